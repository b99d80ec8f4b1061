"""Where the model begins: any wrapping around any model is found again."""

import shlex

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.keys.select import Naming, select_model
from shardkit.keys.trainer_state import object_kind
from tests.keys.key_sets import MODELS, entries, entry, optimizer

LLAMA = MODELS["llama"]
HARNESS = [
    "model",
    "app.model",
    "state.model",
    "dcp.model",
    "model_state",
    "state.net",
    "trainer.policy",
    "w",
]
WRAPPERS = ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"]
BESIDE = ["optim", "optimizer", "optimizers", "optimizer_state"]


def under(root: str, names: list[str]) -> list[str]:
    return [f"{root}.{name}" if root else name for name in names]


@st.composite
def wrapped(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Return names with wrappers put between some of their segments, and the plain names."""
    names = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    spelt = list(names)
    for wrapper in draw(st.lists(st.sampled_from(WRAPPERS), max_size=2)):
        depth = draw(st.integers(0, 3))
        parts = [name.split(".") for name in spelt]
        spelt = [
            ".".join([*part[: min(depth, len(part) - 1)], wrapper, *part[min(depth, len(part) - 1) :]])
            for part in parts
        ]
    return spelt, names


@given(wrapped(), st.sampled_from(["", *HARNESS]), st.sampled_from(BESIDE), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_wrapping_is_found_where_the_paths_are_known(
    model: tuple[list[str], list[str]], root: str, beside: str, has_optimizer: bool
) -> None:
    spelt, names = model
    paths = {
        stored: (*root.split("."), name) if root else (name,)
        for stored, name in zip(under(root, spelt), spelt, strict=True)
    }
    state = optimizer(beside, names) if has_optimizer else {}
    paths |= {key: (beside, key.removeprefix(beside + ".")) for key in state}
    selection = select_model(
        {**entries(paths.keys() - state.keys()), **state}, ["step", "lr_scheduler.last_lr"], paths
    )
    assert set(selection.names.values()) == set(names)
    assert sum(part.num_tensors for part in selection.skipped) == len(state)


@given(wrapped(), st.sampled_from(["model", "model_state", "net"]), st.sampled_from(BESIDE))
@settings(max_examples=300, deadline=None)
def test_and_from_the_names_alone_where_a_trainers_own_stand_beside(
    model: tuple[list[str], list[str]], root: str, beside: str
) -> None:
    spelt, names = model
    selection = select_model({**entries(under(root, spelt)), **optimizer(beside, names)}, ["step"])
    assert set(selection.names.values()) == set(names)


@given(wrapped(), st.sampled_from(["", "model", "app.model"]))
@settings(max_examples=300, deadline=None)
def test_names_alone_prove_no_key_but_those_that_no_model_has(
    model: tuple[list[str], list[str]], root: str
) -> None:
    """A model that was saved flat may have `model.` before all its names."""
    spelt, names = model
    assert set(select_model(entries(under(root, spelt))).names.values()) == set(under(root, names))
    for key in ("module", "state_dict", "model_state_dict"):
        selection = select_model(entries(under(key, under(root, spelt))))
        assert set(selection.names.values()) == set(under(root, names))


@given(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), st.sampled_from(sorted(MODELS)), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_lightning_modules_attribute_goes_whatever_it_is_called(
    attribute: str, model: str, has_loss: bool
) -> None:
    assume(object_kind(attribute) is None and attribute not in ("loss_fn", "val_acc", "base_model"))
    names = MODELS[model]
    others = ["loss_fn.weight", "val_acc.tp"] if has_loss else []
    stored = [*under(attribute, names), *others]
    paths = {f"state_dict.{name}": ("state_dict", name) for name in stored}
    roots = {"model": ("state_dict",)}
    # Beside another attribute it may be a part of the model, such as a body beside its head.
    found = select_model(entries(paths), [], paths, roots)
    assert set(found.names.values()) == set(stored if has_loss else names)
    assert not has_loss or "--root state_dict" in found.notes[-1]
    found = select_model(entries(paths), [], paths, roots, base_names=names)
    assert (set(found.names.values()), found.notes) == (set(names), ())


def test_paths_tell_a_flat_save_of_a_bare_model_from_a_wrapped_one() -> None:
    stored = MODELS["llama, tied"]
    flat = select_model(entries(stored), (), {name: (name,) for name in stored})
    assert set(flat.names.values()) == set(stored)
    inside = select_model(entries(stored), (), {name: tuple(name.split(".", 1)) for name in stored})
    assert set(inside.names.values()) == {name.removeprefix("model.") for name in stored}


def test_the_layouts_own_root_is_taken() -> None:
    tensors = entries([*under("a", LLAMA), *under("b", LLAMA)])
    assert select_model(tensors, roots={"model": ("b",)}).root == "b"
    assert (
        select_model(tensors, naming=Naming(weights="ema"), roots={"model": ("a",), "ema": ("b",)}).root
        == "b"
    )
    assert (
        select_model(tensors, naming=Naming(weights="critic"), roots={"model": ("a",), "critic": ("b",)}).root
        == "b"
    )


def saved(*parts: str, names: list[str] = LLAMA) -> dict[str, tuple[str, ...]]:
    """Return the paths of state dicts that were saved under these keys."""
    return {f"{part}.{name}": (*part.split("."), name) for part in parts for name in names}


def test_several_models_are_not_mixed() -> None:
    paths = saved("first", "second")
    for base in (None, LLAMA):
        with pytest.raises(SourceError, match="2 models") as caught:
            select_model(entries(paths), (), paths, base_names=base)
        assert caught.value.problems == ("first: 12 tensors", "second: 12 tensors")
        assert "root first" in str(caught.value.hint)
    second = select_model(entries(paths), (), paths, naming=Naming(root="second"))
    assert set(second.names) == set(under("second", LLAMA))
    every = select_model(entries(paths), (), paths, naming=Naming(root=""))
    assert set(every.names.values()) == set(paths)


def test_the_base_tells_which_of_several_models_is_meant() -> None:
    paths = saved("g") | saved("d", names=MODELS["bert, bare"])
    for names, root in ((LLAMA, "g"), (MODELS["bert, bare"], "d")):
        found = select_model(entries(paths), (), paths, base_shapes=dict.fromkeys(names, (4, 4)))
        assert (found.root, set(found.names.values())) == (root, set(names))


def test_so_do_shapes_where_names_are_equal() -> None:
    paths = saved("large", "small")
    tensors = {name: entry(name, (4, 4) if name.startswith("small") else (8, 8)) for name in paths}
    found = select_model(tensors, (), paths, base_shapes=dict.fromkeys(LLAMA, (4, 4)))
    assert found.root == "small"


def test_a_text_model_of_a_larger_base_is_found() -> None:
    paths = saved("a.text", names=MODELS["bert, bare"]) | saved("b.text")
    base = {f"language_model.{name}": (4, 4) for name in LLAMA} | {"visual.patch_embed.weight": (4, 4)}
    found = select_model(entries(paths), (), paths, base_shapes=base)
    assert (found.root, set(found.live.values())) == ("b.text", set(LLAMA))


@pytest.mark.parametrize("key", ["models", "model"])
def test_a_list_of_models_is_several_models(key: str) -> None:
    paths = {f"{key}.{place}.{name}": (key, place, name) for place in range(2) for name in LLAMA}
    with pytest.raises(SourceError, match="2 models"):
        select_model(entries(paths), (), paths)
    second = select_model(entries(paths), (), paths, naming=Naming(root=f"{key}.1"))
    assert set(second.names.values()) == set(LLAMA)


def test_a_list_of_state_dicts_with_equal_names_is_several_models() -> None:
    """Of models of one layer nothing else shows that they are whole: their names were 0.weight and 1.weight."""
    paths = {
        f"model.{place}.{name}": ("model", place, name) for place in range(2) for name in ("weight", "bias")
    }
    with pytest.raises(SourceError, match="2 models") as caught:
        select_model(entries(paths), (), paths)
    assert caught.value.problems == ("model.0: 2 tensors", "model.1: 2 tensors")


@pytest.mark.parametrize("above", [(), ("app",)])
def test_a_list_of_stages_is_one_model(above: tuple[str, ...]) -> None:
    """What one process with several stages of a pipeline saves: `[stage.state_dict() for stage in stages]`."""
    keys = [(*above, "model", int(name != LLAMA[0]), name) for name in LLAMA]
    paths = {".".join(map(str, path)): path for path in keys}
    for base in (None, LLAMA):
        selection = select_model(entries(paths), (), paths, base_names=base)
        assert set(selection.names.values()) == set(LLAMA)


@pytest.mark.parametrize("left", ["ref", "teacher", "critic"])
def test_of_several_models_the_one_with_a_models_key_is_taken(left: str) -> None:
    paths = saved("model", left)
    for base in (None, LLAMA):
        selection = select_model(entries(paths), (), paths, base_names=base)
        assert selection.root == "model"
        assert selection.candidates == (left,)
    assert left in select_model(entries(paths), (), paths).notes[0]
    assert select_model(entries(paths), (), paths, naming=Naming(weights=left)).root == left


def test_a_model_with_a_head_of_somebodys_own_is_kept_whole() -> None:
    """What TRL calls a value head has no place in the model's own names: without a base nothing is dropped for it."""
    tensors = entries([*under("pretrained_model", LLAMA), "v_head.summary.weight"])
    assert set(select_model(tensors).names.values()) == set(tensors)
    assert set(select_model(tensors, base_names=LLAMA).names.values()) == set(LLAMA)


def test_twin_towers_are_one_model() -> None:
    tensors = entries([*under("query", MODELS["bert, bare"]), *under("passage", MODELS["bert, bare"])])
    assert set(select_model(tensors).names.values()) == set(tensors)


def test_modules_with_names_of_trainers_stay_in_the_model() -> None:
    """A scalar, a scheduler's buffers with weights, a step count: only a trainer's level makes them others."""
    names = ["logit_scale", "step", "ema.weight", "scheduler.up.weight", *MODELS["clip"]]
    tensors = {name: entry(name, (512, 512)) for name in names} | {"step": entry("step", ())}
    assert set(select_model(tensors).names.values()) == set(names)
    tensors |= optimizer("optimizer", ["logit_scale"])
    names = set(names) - {"step", "ema.weight", "scheduler.up.weight"}
    assert set(select_model(tensors).names.values()) == names


OWN = [
    "scaler.mean",
    "scheduler.betas",
    "random_features.weight",
    "sampler.weight",
    "loops.0.weight",
    "optimizer.weight",
]


@pytest.mark.parametrize("root", ["", "model", "app.model"])
@pytest.mark.parametrize("has_optimizer", [True, False])
def test_small_modules_with_names_of_trainers_stay_in_the_model(root: str, has_optimizer: bool) -> None:
    """Where the checkpoint has its paths, they tell a module from an entry beside the model."""
    names = [*OWN, *MODELS["clip"]]
    way = tuple(root.split(".")) if root else ()
    paths = {stored: (*way, name) for stored, name in zip(under(root, names), names, strict=True)}
    tensors = entries(paths) | {"lr_scheduler.lrs": entry("lr_scheduler.lrs", (2,))}
    paths["lr_scheduler.lrs"] = ("lr_scheduler", "lrs")
    if has_optimizer:
        state = optimizer("optim", names)
        tensors |= state
        paths |= {stored: ("optim", stored.removeprefix("optim.")) for stored in state}
    selection = select_model(tensors, ["lr_scheduler.last_epoch"], paths)
    assert set(selection.names.values()) == set(names)


def test_small_modules_of_a_model_alone_stay_in_it() -> None:
    """Files of safetensors have no paths."""
    names = {*OWN, *MODELS["clip"]}
    assert set(select_model(entries(names)).names.values()) == names


def test_modules_beside_an_optimizer_that_was_flattened_by_hand() -> None:
    """Names alone tell there, though the checkpoint has paths."""
    tensors = entries(["optimizer.state.w.factor", *LLAMA]) | optimizer("optimizer", LLAMA)
    selection = select_model(tensors, (), {name: (name,) for name in tensors})
    assert set(selection.names.values()) == set(LLAMA)


def test_momentum_of_the_models_own_is_no_optimizer() -> None:
    names = [*LLAMA, *(f"model.layers.{n}.codebook.exp_avg" for n in range(3))]
    assert set(select_model(entries(names)).names.values()) == set(names)


@pytest.mark.parametrize("opt", ["opt", "state.solver", "adam.state"])
@pytest.mark.parametrize("leaves", [["momentum_buffer"], ["row_var", "col_var"], ["sum"], ["al.0", "H_diag"]])
def test_what_stands_beside_param_groups_is_an_optimizers(opt: str, leaves: list[str]) -> None:
    """Whatever it is called, and whatever it keeps for each parameter."""
    names = [f"{opt}.state.{name}.{leaf}" for name in LLAMA for leaf in leaves]
    selection = select_model(entries([*LLAMA, *names]), [f"{opt}.param_groups.0.lr"])
    assert set(selection.names.values()) == set(LLAMA)
    assert {part.kind for part in selection.skipped} == {"optimizer", "not a tensor"}


@pytest.mark.parametrize("above", ["", "chained_0."])
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("leaves", [["exp_avg", "exp_avg_sq", "fp32_param"], ["fp32_param"]])
def test_states_of_megatron_core_have_the_leaf_before_the_parameter(
    above: str, prefix: str, leaves: list[str]
) -> None:
    """Megatron-Core, optimizer/distrib_optimizer.py and dist_checkpointing/optimizer.py: `optimizer.state.{state}.{key of the parameter}`."""
    model = [f"{prefix}{name}" for name in ("decoder.layers.mlp.linear_fc1.weight", *LLAMA)]
    names = [f"{above}optimizer.state.{leaf}.{name}" for leaf in leaves for name in model]
    selection = select_model(entries([*model, *names]))
    assert set(selection.names) == set(model)
    assert [(part.kind, part.num_tensors) for part in selection.skipped] == [("optimizer", len(names))]


def test_a_sequential_in_a_dict_loses_the_dicts_name() -> None:
    names = [f"{number}.weight" for number in range(3)]
    paths = {f"model.{name}": ("model", name) for name in names}
    assert set(select_model(entries(paths), (), paths).names.values()) == set(names)
    assert set(select_model(entries(paths)).names.values()) == set(paths), "it may be the model's own name"


def test_only_an_optimizer() -> None:
    with pytest.raises(SourceError, match="none of the 36 tensors is a weight") as caught:
        select_model(optimizer("optimizer", LLAMA))
    assert "optimizer's part" in str(caught.value.hint)
    assert len(select_model(optimizer("optimizer", LLAMA), naming=Naming(root="optimizer.state")).names) == 36


def test_names_of_absurdly_many_parts() -> None:
    """Each part costs memory for all those before it."""
    with pytest.raises(SourceError, match="1 name of more than 1000 dotted parts"):
        select_model(entries([*LLAMA, "a." * 200_000 + "w"]))


def test_no_tensors_at_all() -> None:
    with pytest.raises(SourceError, match="no tensors at all"):
        select_model({}, ["step"])


PARTS = {
    "two models": (["generator", "discriminator"], ["generator", "discriminator"]),
    "in a dict": (["state.generator", "state.discriminator"], ["state", "generator", "discriminator"]),
    "in a LightningModule": (["state_dict.generator", "state_dict.discriminator"], ["generator", "discriminator"]),
    "averages": (["model", "ema_fast", "ema_slow"], ["model", "ema_fast", "ema_slow"]),
    "beside the model": (["app.model", "app.critic", "app.teacher"], ["critic", "teacher"]),
}  # fmt: skip
"""Roots of LLAMA's names, and names of parts."""


class TestPartsByName:
    @pytest.mark.parametrize("case", PARTS)
    @pytest.mark.parametrize("has_paths", [True, False])
    def test_each_that_is_there(self, case: str, has_paths: bool) -> None:
        roots, names = PARTS[case]
        tensors = {**entries([n for root in roots for n in under(root, LLAMA)]), **optimizer("optim", LLAMA)}
        dicts = {
            root: root.split(".")[:1] if case == "in a LightningModule" else root.split(".") for root in roots
        }
        paths = {
            f"{root}.{name}": (*above, f"{root}.{name}".removeprefix(f"{'.'.join(above)}."))
            for root, above in dicts.items()
            for name in LLAMA
        }  # fmt: skip
        by_format = {"model": ("state_dict",)} if case == "in a LightningModule" else {}
        for root in roots:
            name = root.rpartition(".")[2]
            if name == "model" and not has_paths:
                continue  # the model's own parts may be called so, too
            found = select_model(
                tensors, paths=paths if has_paths else None, roots=by_format, naming=Naming(weights=name)
            )
            assert (found.root, set(found.names.values())) == (root, set(LLAMA))
        with pytest.raises(UsageError, match="no weights of that name") as caught:
            select_model(
                tensors, paths=paths if has_paths else None, roots=by_format, naming=Naming(weights="nothing")
            )
        assert all(repr(name) in str(caught.value.hint) for name in names)

    def test_small_models_without_a_word_that_tells_one(self) -> None:
        tensors = entries(["g.w.weight", "g.b.weight", "d.w.weight", "d.x.weight"])
        found = select_model(tensors, naming=Naming(weights="g"))
        assert set(found.names.values()) == {"w.weight", "b.weight"}

    @pytest.mark.parametrize("has_paths", [True, False])
    def test_a_key_with_a_dot(self, has_paths: bool) -> None:
        roots = ("model", "ema_0.9999", "ema_0.99")
        paths = {f"{root}.{name}": (root, name) for root in roots for name in LLAMA}
        for root in roots:
            naming = Naming(weights=root)
            found = select_model(entries(list(paths)), paths=paths if has_paths else None, naming=naming)
            assert (found.root, set(found.names.values())) == (root, set(LLAMA))

    def test_two_of_one_name(self) -> None:
        roots = ("a.model", "a.copy", "b.model", "b.copy")
        paths = {f"{root}.{name}": (*root.split("."), name) for root in roots for name in LLAMA}
        with pytest.raises(UsageError, match="2 parts of the checkpoint have that name") as caught:
            select_model(entries(list(paths)), paths=paths, naming=Naming(weights="copy"))
        assert caught.value.problems == ("a.copy: 12 tensors", "b.copy: 12 tensors")


@pytest.mark.parametrize("part", ["image encoder", "<user___rates___item>", "it's"])
def test_a_root_in_a_hint_is_one_word_of_a_shell(part: str) -> None:
    """PyTorch Geometric names modules after types of edges, as the second."""
    stored, paths = entries(saved(part, "other")), saved(part, "other")
    with pytest.raises(SourceError, match="holds 2 models") as caught:
        select_model(stored, (), paths)
    words = shlex.split(str(caught.value.hint).replace(";", ""))
    root = words[words.index("--root") + 1]
    assert set(select_model(stored, naming=Naming(root=root)).names.values()) == set(LLAMA)


class TestModule:
    def test_around_everything(self) -> None:
        assert set(select_model(entries(under("module", LLAMA))).names.values()) == set(LLAMA)
        assert select_model(entries(["module.weight", "module.bias"])).root == "module"

    @pytest.mark.parametrize("above", ["", "model_state_dict.", "_orig_mod."])
    def test_around_a_numbered_list(self, above: str) -> None:
        """DDP around an nn.Sequential, as torch itself names its parameters."""
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        wrapped = torch.nn.DataParallel(model).state_dict()
        stored = entries([f"{above}{name}" for name in wrapped])
        assert set(select_model(stored).names.values()) == set(model.state_dict())

    @pytest.mark.parametrize("name", ["model", "net", "layers"])
    def test_of_a_lightning_module(self, name: str) -> None:
        """An nn.Sequential is a LightningModule's model as any other is."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        stored = entries([f"state_dict.{name}.{part}" for part in model.state_dict()])
        found = select_model(stored, roots={"model": ("state_dict",)})
        assert set(found.names.values()) == set(model.state_dict())

    def test_around_every_layer(self) -> None:
        stored = [name.replace("layers.0.", "layers.0.module.") for name in LLAMA]
        stored = [name.replace("layers.1.", "layers.1.module.") for name in stored]
        some = select_model(entries(stored))
        assert set(some.names.values()) == set(stored), "layer 2 has none, so it may be a submodule's name"
        stored = [name.replace("layers.2.", "layers.2.module.") for name in stored]
        every = select_model(entries(stored))
        assert set(every.names.values()) == set(LLAMA)
        assert ("module", 9) in every.stripped

    def test_beside_other_modules(self) -> None:
        names = [*LLAMA, *(f"model.layers.{n}.adapter.module.weight" for n in range(3))]
        assert set(select_model(entries(names)).names.values()) == set(names)

    def test_as_a_models_own_word(self) -> None:
        """LeViT: the last stage has nothing but such layers, all others end with one of another kind."""
        names = [f"stages.{stage}.layers.{n}.module.weight" for stage in range(2) for n in range(2)]
        names.append("stages.0.layers.2.attention.weight")
        assert set(select_model(entries(names)).names.values()) == set(names)
        wrapped = [f"blocks.{n}.module.weight" for n in range(2)]  # another list has nothing to do with it
        bare = [name.replace("module.", "") for name in wrapped]
        assert set(select_model(entries([*names, *wrapped])).names.values()) == {*names, *bare}

    def test_where_the_base_says_so(self) -> None:
        stored = [name.replace("mlp.", "mlp.module.") for name in LLAMA]
        assert set(select_model(entries(stored), base_names=LLAMA).names.values()) == set(LLAMA)
        assert set(select_model(entries(stored), base_names=stored).names.values()) == set(stored)
        blocks = [f"blocks.{n}.module.weight" for n in range(2)]  # as if every block was wrapped
        assert set(select_model(entries(blocks), base_names=blocks).names.values()) == set(blocks)


ODD = [
    "",
    "model",
    "0",
    "1",
    "layers",
    "module",
    "_orig_mod",
    "ema",
    "optim",
    "state",
    "exp_avg",
    "step",
    "weight",
]
NAMES = st.lists(
    st.sampled_from([*ODD, "lm_head", "base_model", "rng", "state_dict"]), min_size=1, max_size=6
)


@given(
    st.sets(NAMES.map(".".join), max_size=12),
    st.sets(NAMES.map(".".join), max_size=4),
    st.sampled_from(["model", "ema", "x"]),
    st.none() | st.sets(NAMES.map(".".join), max_size=6),
    st.sampled_from([None, 1, 9]),
)
@example({"", "module.", "module"}, set(), "model", {""}, None)  # a tensor whose name is the prefix alone
@settings(max_examples=300, deadline=None)
def test_every_entry_is_taken_once_or_said_to_be_skipped(
    names: set[str], objects: set[str], weights: str, base: set[str] | None, num_steps: int | None
) -> None:
    paths = {name: tuple(name.split(".", num_steps)) for name in names} if num_steps else None
    tensors = entries(sorted(names))
    try:
        selection = select_model(
            tensors, sorted(objects), paths, naming=Naming(weights=weights), base_names=base
        )
    except ShardkitError:
        return
    assert len(set(selection.names.values())) == len(selection.names)
    assert sum(part.num_tensors for part in selection.skipped) + len(selection.names) == len(names)
    assert sum(part.num_objects for part in selection.skipped) == len(objects)


def test_order_is_natural_or_the_bases() -> None:
    stored = under("model", MODELS["llama, twelve layers"])
    names = list(select_model(entries(reversed(stored)), naming=Naming(root="model")).names.values())
    assert names == ["lm_head.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(12))]
    base = MODELS["llama, twelve layers"][::-1]
    assert list(select_model(entries(stored), base_names=base[2:]).names.values()) == [*base[2:], *base[:2]]
    assert list(select_model(entries(stored), base_names=set(base)).names.values()) == names
