"""A model's names become its base's where they differ by prefixes: exactly, or not at all."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.keys.renaming import KeyRule, apply_key_rules, find_rules, rename_to_base
from shardkit.keys.select import Naming, select_model
from tests.keys.key_sets import entries, entry, layered, load, optimizer

Shapes = dict[str, tuple[int, ...]]

TEXT = ["embed_tokens.weight", *layered("layers", ["q_proj.weight", "norm.weight"]), "norm.weight"]
TOWER = [*layered("blocks", ["attn.weight", "norm.weight"], 2), "patch.weight"]


def shaped(names: list[str]) -> Shapes:
    """Give matrices and vectors shapes; those of other modules are often equal, as in real models."""
    return {name: (8,) if "norm" in name else (8, 8) for name in names}


def rules_of(ours: Shapes, base: Shapes, *, is_part: bool = False) -> tuple[KeyRule, ...]:
    found = rename_to_base(ours, base, is_part=is_part) or {}
    return find_rules({name: found.get(name, name) for name in ours})


def below(prefix: str, names: list[str]) -> list[str]:
    return [f"{prefix}{name}" for name in names]


def test_several_parts_go_to_several_places() -> None:
    ours = shaped([*below("model.language_model.", TEXT), *below("model.visual.", TOWER), "lm_head.weight"])
    base = shaped([*below("model.", TEXT), *below("visual.", TOWER), "lm_head.weight"])
    found = rename_to_base(ours, base)
    assert found
    assert rules_of(ours, base) == (
        KeyRule("model.language_model.", "model.", 8),
        KeyRule("model.visual.", "visual.", 5),
    )
    assert {found.get(name, name) for name in ours} == base.keys()
    assert found["model.language_model.norm.weight"] == "model.norm.weight"
    back = rename_to_base(base, ours)
    assert {new: old for old, new in found.items()} == back


@pytest.mark.parametrize("base_has_head", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_a_tied_head_may_be_missing_on_either_side(has_head: bool, base_has_head: bool) -> None:
    """It has the embedding's shape, and goes where a head stands."""
    ours = shaped([*below("model.language_model.", TEXT), *(["lm_head.weight"] if has_head else [])])
    head = ["language_model.lm_head.weight"] if base_has_head else []
    base = shaped([*below("language_model.model.", TEXT), *head])
    found = rename_to_base(ours, base)
    assert found
    assert found["model.language_model.embed_tokens.weight"] == "language_model.model.embed_tokens.weight"
    moved = "language_model.lm_head.weight" if has_head and base_has_head else None
    assert found.get("lm_head.weight") == moved
    assert len(found) == len(TEXT) + (moved is not None)


@pytest.mark.parametrize(
    ("ours", "base", "rules"),
    [
        (below("model.", TEXT), [*below("thinker.model.", TEXT), *below("talker.", TOWER)], [""]),
        (TEXT, [*below("model.text.", TEXT), *below("model.visual.", TOWER)], [""]),
        (TEXT, [*below("thinker.", TEXT), *below("talker.", TEXT)], []),  # two places
        (["norm.weight"], [*below("text.", TEXT), *below("visual.", TOWER)], []),  # may be anything's
        ([*TEXT, "value.weight"], [*below("text.", TEXT), *below("visual.", TOWER)], []),
        ([*below("a.", TEXT), *below("b.", TOWER)], [*below("x.", TEXT), *below("y.", [*TOWER, "z.w"])], []),
    ],
)
def test_a_part_of_the_base_has_one_place(ours: list[str], base: list[str], rules: list[str]) -> None:
    assert [rule.old for rule in rules_of(shaped(ours), shaped(base), is_part=True)] == rules
    assert not rename_to_base(shaped(ours), shaped(base))


def test_prefixes_come_and_go() -> None:
    assert rules_of(shaped(TEXT), shaped(below("model.", TEXT))) == (KeyRule("", "model.", 8),)
    assert rules_of(shaped(below("a.b.", TEXT)), shaped(TEXT)) == (KeyRule("a.b.", "", 8),)


def test_a_tensor_beside_others_that_stay_is_renamed_alone() -> None:
    ours = shaped(["model.scale", "model.a.weight", "model.b.norm.weight"])
    base = shaped(["scale", "model.a.weight", "b.norm.weight"])
    assert rules_of(ours, base) == (KeyRule("model.b.", "b.", 1), KeyRule("model.scale", "scale", 1))


def test_numbers_stay() -> None:
    ours = {f"encoder.{n}.o_proj.weight": (8, 8) for n in range(12)}
    base = {f"encoder.{n}.out_proj.weight": (8, 8) for n in range(12)}
    assert rename_to_base(ours, base) == {name: name.replace("o_proj", "out_proj") for name in ours}


@pytest.mark.parametrize(
    ("ours", "base"),
    [
        (["a.weight", "b.weight"], ["c.weight", "d.weight"]),
        (below("a.", TOWER) + below("b.", TOWER), below("c.", TOWER) + below("d.", TOWER)),
        (["model.x.weight", "lm_head.weight", "output.weight"], ["x.weight", "head.weight", "tail.weight"]),
    ],
    ids=["modules", "towers", "beside what fits"],
)
def test_of_two_ways_none_is_taken(ours: list[str], base: list[str]) -> None:
    assert rename_to_base(shaped(ours), shaped(base)) is None


def test_shapes_decide_between_two_ways() -> None:
    found = rename_to_base({"a.w": (4,), "b.w": (5,)}, {"c.w": (5,), "d.w": (4,)})
    assert found == {"a.w": "d.w", "b.w": "c.w"}
    ours = {"a.w": (4,), "a.x": (5,), "b.w": (4,), "b.x": (6,)}
    base = {"c.w": (4,), "c.x": (6,), "d.w": (4,), "d.x": (5,)}
    assert rules_of(ours, base) == (KeyRule("a.", "d.", 2), KeyRule("b.", "c.", 2))


def test_what_both_sides_have_stays() -> None:
    """All of `m` would fit into `n`, but a part of it is where it should be."""
    ours = shaped(["m.a.weight", "m.b.weight", "x.a.weight"])
    base = shaped(["m.a.weight", "n.a.weight", "n.b.weight"])
    assert rename_to_base(ours, base) == {"m.b.weight": "n.b.weight", "x.a.weight": "n.a.weight"}


@pytest.mark.parametrize(
    "change",
    [
        lambda base: base | {"visual.more.weight": (8, 8)},
        lambda base: base | {"visual.blocks.0.attn.weight": (8, 9)},
        lambda base: {name: shape for name, shape in base.items() if name != "visual.patch.weight"},
        lambda base: {name.replace("patch.weight", "patch.kernel"): shape for name, shape in base.items()},
        lambda base: base | {"lm_head.weight": (9, 9)},
    ],
    ids=["one more", "another shape", "one fewer", "another end", "another shape of the same name"],
)
def test_what_does_not_fit_exactly_is_left_alone(change) -> None:
    ours = shaped([*below("model.language_model.", TEXT), *below("model.visual.", TOWER), "lm_head.weight"])
    base = shaped([*below("model.", TEXT), *below("visual.", TOWER), "lm_head.weight"])
    assert rename_to_base(ours, base)
    assert rename_to_base(ours, change(base)) == {}


def test_equal_names_are_left_alone() -> None:
    names = shaped(TEXT)
    assert not rename_to_base(names, names)
    assert not rename_to_base({}, {})


def test_a_great_many_candidates_end() -> None:
    """Every tensor may be every other: it is given up, not tried for hours."""
    ours = {f"a.{'x' * (n % 7)}{n}y.w": (8, 8) for n in range(20_000)}
    base = {f"b.{'x' * (n % 7)}{n}z.w": (8, 8) for n in range(20_000)}
    assert not rename_to_base(ours, base)


def test_rules_give_back_what_they_were_found_from() -> None:
    names = {
        **{name: name.replace("model.", "", 1) for name in below("model.", TOWER)},
        "model.norm.weight": "final.weight",
        "head.weight": "head.weight",
    }
    names["model.norm.weight"] = "final.norm.weight"
    rules = find_rules(names)
    assert apply_key_rules(rules, {name: name for name in names}) == names
    assert find_rules({"a.b": "a.b"}) == ()


def test_rules_that_would_lose_a_name_are_not_applied() -> None:
    same = {"1": "a.w", "2": "b.w"}
    assert apply_key_rules([KeyRule("a.", "b.", 1)], same) == same
    assert apply_key_rules([KeyRule("a.w", "", 1)], same) == same
    rules = [KeyRule("a.", "", 0), KeyRule("gone.", "x.", 0), KeyRule("c", "d", 0)]
    names = {"1": "a.w", "2": "c", "3": "c.w"}
    assert apply_key_rules(rules, names) == {"1": "w", "2": "d", "3": "c.w"}


class TestSelection:
    """The same as a part of naming a checkpoint."""

    def checkpoint(self):
        keys = load("fsdp2_qwen2vl")
        hub = {
            name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): name
            for name in keys.names
        }
        return keys, {name: keys.tensors[f"model.{own}"].shape for name, own in hub.items()}

    def test_a_trained_vision_model_gets_the_hubs_names(self) -> None:
        keys, base = self.checkpoint()
        found = select_model(keys.tensors, keys.objects, keys.paths, base_shapes=base)
        assert set(found.names.values()) == base.keys()
        assert list(found.names.values()) == list(base)  # the base's order
        assert found.warnings == ()
        assert [(rule.old, rule.new) for rule in found.renamed] == [
            ("model.language_model.", "model."),
            ("model.visual.", "visual."),
        ]

    def test_a_person_who_renames_has_the_say(self) -> None:
        keys, base = self.checkpoint()
        found = select_model(
            keys.tensors,
            keys.objects,
            keys.paths,
            naming=Naming(rename=(r"^model\.visual\.=eye.",)),
            base_shapes=base,
        )
        assert "eye.patch_embed.proj.weight" in found.names.values()
        assert "model.language_model.norm.weight" in found.names.values()
        assert found.renamed == ()

    def test_recorded_rules_do_it_without_a_base(self) -> None:
        keys, base = self.checkpoint()
        rules = [KeyRule("model.language_model.", "model.", 0), KeyRule("model.visual.", "visual.", 0)]
        found = select_model(keys.tensors, keys.objects, keys.paths, key_rules=rules)
        assert set(found.names.values()) == base.keys()
        assert found.warnings == ()
        assert {rule.num_names for rule in found.renamed} == {26, 31}
        both = select_model(keys.tensors, keys.objects, keys.paths, key_rules=rules, base_shapes=base)
        assert both.names.keys() == found.names.keys()
        assert both.renamed == found.renamed

    def test_names_that_are_known_to_be_the_hubs_are_not_warned_of(self) -> None:
        keys, _ = self.checkpoint()
        unknown = select_model(keys.tensors, keys.objects, keys.paths)
        known = select_model(keys.tensors, keys.objects, keys.paths, key_rules=[])
        assert unknown.in_memory_warnings(list(unknown.names.values()), None)
        assert not known.in_memory_warnings(list(known.names.values()), None)

    def test_several_ways_are_left_alone_with_a_warning(self) -> None:
        ours = {name: entry(f"{name}") for name in [*below("model.one.", TOWER), *below("model.two.", TOWER)]}
        base = {name: (4, 4) for name in [*below("left.", TOWER), *below("right.", TOWER)]}
        found = select_model(ours, naming=Naming(root=""), base_shapes=base)
        assert set(found.names.values()) == ours.keys()
        assert "several renamings" in found.renaming[0]

    def test_no_part_of_a_model_is_lost_to_a_base_that_matches_another(self) -> None:
        """`visual` is in the base as it is, below `model.model`; the head is not below that."""
        names = [*below("model.visual.", TOWER), *below("model.language_model.", TEXT), "lm_head.weight"]
        tensors = {f"model.{name}": entry(f"model.{name}") for name in names} | optimizer("optimizer", names)
        base = {name: (4, 4) for name in [*below("visual.", TOWER), *below("model.", TEXT)]}
        for head in ({}, {"lm_head.weight": (4, 4)}):
            found = select_model(tensors, base_shapes=base | head)
            assert set(found.names.values()) == {*base, "lm_head.weight"}
            assert found.root == "model"

    @pytest.mark.parametrize("dict_name", ["model.", ""])
    @pytest.mark.parametrize("head", ["lm_head.weight", "head.out.weight"])
    def test_nor_where_names_alone_do_not_fit(self, dict_name: str, head: str) -> None:
        """Only the class knows what its fused experts are, so no renaming of prefixes gives the base's names."""
        names = [
            *below("model.visual.", TOWER),
            *below("model.language_model.", [*TEXT, "experts.fused"]),
            head,
        ]
        base = {name: (4, 4) for name in [*below("visual.", TOWER), *below("language_model.model.", TEXT)]}
        base |= {"language_model.model.experts.0.weight": (4, 4), f"language_model.{head}": (4, 4)}
        found = select_model(entries([f"{dict_name}{name}" for name in names]), base_shapes=base)
        assert found.root == dict_name.rstrip(".")
        assert len(found.names) == len(names)

    def test_what_the_base_has_no_name_for_is_no_part_of_the_model(self) -> None:
        """A value head beside the model that was trained: the base has other tensors that are missing, but not that."""
        names = [f"policy.{name}" for name in below("model.", TEXT)]
        base = {name: (4, 4) for name in [*below("model.", TEXT), "mtp.norm.weight", "lm_head.weight"]}
        tensors = entries(names) | {"v_head.summary.weight": entry("v_head.summary.weight", (1, 4))}
        found = select_model(tensors, base_shapes=base)
        assert set(found.names.values()) == set(below("model.", TEXT))


WORDS = st.sampled_from(["model", "net", "layers", "blocks", "0", "1", "2", "attn", "mlp", "norm", "proj"])
LEAVES = st.sampled_from(["weight", "bias", "scale"])
KEY_SETS = st.lists(
    st.builds(lambda path, leaf: ".".join([*path, leaf]), st.lists(WORDS, min_size=1, max_size=5), LEAVES),
    min_size=1,
    max_size=25,
    unique=True,
)


@st.composite
def renamed(draw: st.DrawFn) -> tuple[Shapes, dict[str, str]]:
    """Some names with shapes, and what a few renamed modules, with names of their own, make of them."""
    names = draw(KEY_SETS)
    shapes = {name: draw(st.sampled_from([(4,), (5,), (4, 4), (4, 5), (7, 4)])) for name in names}
    modules = sorted(
        {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
    )
    changes: dict[str, str] = {}
    for number, module in enumerate(draw(st.lists(st.sampled_from(modules), max_size=4, unique=True))):
        # What a part is called afterwards nothing else has been called: else names tell nothing.
        *before, last = module.split(".")
        changes[module] = draw(
            st.sampled_from(
                [
                    f"new{number}",
                    f"new{number}.{last}",
                    ".".join([*before, f"new{number}"]),
                    f"new{number}.{module}",
                ]
            )
        )
    truth = {}
    for name in names:
        module = max((m for m in changes if name.startswith(f"{m}.")), key=len, default=None)
        truth[name] = name if module is None else changes[module] + name[len(module) :]
    return shapes, truth


@pytest.mark.prove
@settings(max_examples=400, deadline=None)
@given(renamed())
def test_random_renamings_are_undone_or_left_alone(case: tuple[Shapes, dict[str, str]]) -> None:
    shapes, truth = case
    found = rename_to_base({truth[name]: shape for name, shape in shapes.items()}, shapes)
    if found:
        assert {new: found.get(new, new) for new in truth.values()} == {
            new: old for old, new in truth.items()
        }
    rules = find_rules(truth)
    assert apply_key_rules(rules, {name: name for name in truth}) == truth


def test_most_random_renamings_are_undone() -> None:
    """The test above would pass if nothing ever were."""
    seen = []

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(renamed())
    def count(case: tuple[Shapes, dict[str, str]]) -> None:
        shapes, truth = case
        if any(new != old for old, new in truth.items()):
            base = {truth[name]: shape for name, shape in shapes.items()}
            seen.append(bool(rename_to_base(base, shapes)))

    count()
    assert len(seen) > 50
    assert sum(seen) > len(seen) / 4


def test_is_pure() -> None:
    """Order changes nothing."""
    ours = shaped([*below("model.language_model.", TEXT), *below("model.visual.", TOWER)])
    base = shaped([*below("model.", TEXT), *below("visual.", TOWER)])
    turned = rules_of(dict(reversed(ours.items())), dict(reversed(base.items())))
    assert turned == rules_of(ours, base)
    assert all(re.fullmatch(r"[\w.]*\.", rule.old) for rule in turned)
