"""A wrong keyword of any public function is answered with the function's name and the closest keyword."""

import inspect

import pytest

import shardkit

WRONG = {
    "preshard": ("world_sizes", "world_size"),
    "consolidate": ("bse", "base"),
    "reshard": ("mehs", "mesh"),
    "verify": ("ful", "full"),
    "diff": ("rtoll", "rtol"),
    "inspect": ("follow_link", "follow_links"),
    "status": ("prat", None),
    "commit": ("wait_s", "wait"),
    "latest": ("list_al", "list_all"),
    "resolve_checkpoint": ("stric", "strict"),
    "prepare": ("tokeniser", "tokenizer"),
    "wrap": ("polciy", "policy"),
    "finalize": ("strateg", "strategy"),
    "load_into": ("dequantise", "dequantize"),
    "save": ("optimiser", "optimizer"),
    "from_rank": ("rnak", "rank"),
    "param_init_fn": ("strateg", "strategy"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_keyword_names_the_function_and_the_closest_keyword(name):
    keyword, closest = WRONG[name]
    with pytest.raises(TypeError) as caught:
        getattr(shardkit, name)("a", **{keyword: 8})
    near = f"  (closest name: {closest})" if closest else ""
    assert str(caught.value) == f"{name}() got an unexpected keyword argument '{keyword}'{near}"


def test_a_missing_argument_names_the_function():
    with pytest.raises(TypeError, match=r"^preshard\(\) missing a required argument: 'source'$"):
        shardkit.preshard(world_size=2)
    with pytest.raises(TypeError, match=r"^preshard\(\) too many positional arguments$"):
        shardkit.preshard("a", "b", "c")


def test_no_public_function_with_options_is_left_out():
    options = {
        name
        for name in shardkit.__all__
        if inspect.isfunction(function := getattr(shardkit, name))
        and any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(function).parameters.values())
    }
    assert options - WRONG.keys() <= {"abort", "clip_grad_norm_"}
