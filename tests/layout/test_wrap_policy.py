import pytest

from shardkit.errors import PolicyError
from shardkit.layout.wrap_policy import match_paths, no_split_names, parse_policy, unknown_names_error

PATHS = [
    "model",
    "model.embed_tokens",
    "model.layers",
    *(
        f"model.layers.{n}{part}"
        for n in range(12)
        for part in ("", ".mlp", ".mlp.experts", ".mlp.experts.0")
    ),
    "model.norm",
    "visual.layers",
    "visual.layers.0",
]


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ("auto", "auto", ()),
        (" none ", "none", ()),
        ("LlamaDecoderLayer", "names", ("LlamaDecoderLayer",)),
        ("A, B,A", "names", ("A", "B")),
        ("pkg.mod.Class,Other", "names", ("pkg.mod.Class", "Other")),
        ("model.layers.*", "names", ("model.layers.*",)),
    ],
)
def test_parses_every_form(text: str, kind: str, names: tuple[str, ...]) -> None:
    policy = parse_policy(text)
    assert (policy.kind, policy.names) == (kind, names)


def test_parses_a_function() -> None:
    assert parse_policy("my_pkg.wrap:apply").function == ("my_pkg.wrap", "apply")


@pytest.mark.parametrize(
    "text", ["", " ", "A,,B", "A B", "a:b:c", ":f", "m:", "auto,A", "../x:f", "a..b", "a-b"]
)
def test_refuses_what_it_cannot_read(text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(text)
    assert "module:function" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ()),
        ("Block", ("Block",)),
        (["B", "A"], ("B", "A")),
        (("B", "A"), ("B", "A")),
        ({"B", "A"}, ("A", "B")),
        (7, ()),
    ],
)
def test_no_split_modules_may_be_anything(value: object, names: tuple[str, ...]) -> None:
    assert no_split_names(value) == names


def test_a_container_stands_for_its_children() -> None:
    layers = [f"model.layers.{n}" for n in range(12)]
    assert match_paths("model.layers", PATHS) == layers
    assert match_paths("model.layers.*", PATHS) == layers
    assert match_paths("layers", PATHS) == [*layers, "visual.layers.0"]


def test_a_path_stands_for_itself() -> None:
    assert match_paths("model.layers.3", PATHS) == ["model.layers.3"]
    assert match_paths("embed_tokens", PATHS) == ["model.embed_tokens"]
    assert match_paths("layers.*.mlp", PATHS) == [f"model.layers.{n}.mlp" for n in range(12)]
    assert match_paths("tokens", PATHS) == []


def test_candidates_are_listed_nearest_first() -> None:
    error = unknown_names_error(
        ["LlamaDecodeLayer"], {"Linear": 7, "LlamaDecoderLayer": 1}, what="module classes"
    )
    assert error.problems == ("LlamaDecoderLayer  (1 module)", "Linear  (7 modules)")
    assert "closest name: LlamaDecoderLayer" in error.message
