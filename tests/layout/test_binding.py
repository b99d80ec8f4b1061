"""Who decides what tensors are on the other side, and in which order they are asked."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardkit.core.regions import Region, Shape
from shardkit.keys.expressions import Expression, Stored, concat, cut
from shardkit.keys.rule_sets import find_shipped
from shardkit.keys.rules import parse_rules
from shardkit.layout.binding import (
    ClassNames,
    TensorsAtHand,
    bind,
    class_provider,
    manifest_provider,
    name_in_catalog,
    person_provider,
    saved_form_provider,
    shipped_provider,
    whole_provider,
)
from tests.keys.trainers import SETS, config, megatron, numbered

GATE, UP = Stored("h.gate", (2, 3)), Stored("h.up", (2, 3))
FUSED = {"m.gate_up": concat([GATE, UP], 0)}
HELD: dict[str, Shape] = {"m.gate_up": (4, 3), "m.norm": (3,)}


def says(names: dict[str, str], converted: dict[str, Expression]) -> ClassNames:
    return ClassNames(names=names, converted=converted)


def never(_: object) -> None:
    raise AssertionError("the class was asked")


def test_what_nobody_knows_keeps_the_name_that_it_was_given() -> None:
    binding = bind(TensorsAtHand(shapes={"a": (2,)}, names={"a": "model.a"}), None, [shipped_provider])
    assert binding.expressions == {"model.a": Stored("a", (2,))}
    assert binding.by == {"model.a": "selection"}


def test_the_manifest_decides_before_the_class_and_by_names_in_memory() -> None:
    """`keys.select` may have renamed what the manifest speaks of."""
    names = {name: f"language.{name}" for name in HELD}
    asked = says({"m.norm": "h.norm", "language.m.norm": "h.norm"}, {"m.gate_up": GATE})
    binding = bind(
        TensorsAtHand(shapes=HELD, names=names),
        None,
        [manifest_provider(FUSED), class_provider(lambda _: asked)],
    )
    assert binding.by == {"h.norm": "class", "h.gate": "manifest", "h.up": "manifest"}
    assert binding.expressions["h.up"] == cut(Stored("m.gate_up", (4, 3)), Region((2, 0), (2, 3)))
    assert binding.made_from == {"h.gate": {"m.gate_up"}, "h.up": {"m.gate_up"}}


def test_nobody_is_asked_once_all_that_is_wanted_is_there() -> None:
    wanted: dict[str, Shape | None] = {"m.norm": (3,), "h.gate": (2, 3), "h.up": (2, 3)}
    binding = bind(TensorsAtHand(shapes=HELD), wanted, [manifest_provider(FUSED), class_provider(never)])
    assert binding.expressions.keys() == wanted.keys()
    binding = bind(TensorsAtHand(shapes=HELD), HELD, [manifest_provider(FUSED), class_provider(never)])  # type: ignore[arg-type]
    assert set(binding.by.values()) == {"selection"}


def test_an_answer_counts_only_if_more_of_what_is_wanted_is_there() -> None:
    binding = bind(TensorsAtHand(shapes=HELD), {"m.gate_up": (4, 3), "x": (1,)}, [manifest_provider(FUSED)])
    assert binding.expressions.keys() == HELD.keys()


def test_shipped_rules_decide_alone_where_one_set_knows_all_names() -> None:
    model = numbered(SETS["megatron-llama"][1])
    shapes = {name: value.shape for name, value in megatron(model).items()}
    wanted = {name: tuple(value.shape) for name, value in model.items()}
    have = TensorsAtHand(shapes=shapes, config=config("qwen2"))
    binding = bind(have, wanted, [shipped_provider, class_provider(never)])
    assert binding.rules == find_shipped("megatron-llama")
    assert binding.expressions.keys() == model.keys()
    assert set(binding.by.values()) == {"shipped"}
    rules = bind(have, None, [person_provider(find_shipped("megatron-llama")), shipped_provider])
    assert set(rules.by.values()) == {"person"}
    assert rules.expressions == binding.expressions


def test_the_class_says_what_a_model_makes_of_the_hubs_names() -> None:
    shapes: dict[str, Shape] = {"h.gate": (2, 3), "h.up": (2, 3), "h.norm": (3,), "h.spare": (1,)}
    asked = ClassNames(names={"m.norm": "h.norm"}, converted=FUSED, unused={"h.spare": (1,)})
    binding = bind(TensorsAtHand(shapes=shapes, side="hub"), None, [class_provider(lambda _: asked)])
    assert binding.expressions == {"m.norm": Stored("h.norm", (3,)), **FUSED}
    assert binding.dropped == ("h.spare",)
    names, made = name_in_catalog(binding.expressions, [*shapes, "m.gate_up"])
    assert names == {"m.norm": "h.norm", "m.gate_up": "m.gate_up (made)"}
    assert made == {"m.gate_up (made)": FUSED["m.gate_up"]}


def test_a_live_model_is_asked_about_what_a_persons_rules_make() -> None:
    """Rules give the names of files; what the model makes of these is made of the source's tensors."""
    text = b'format = 1\nname = "mine"\n[[rule]]\nhub = "h.{i}.w"\nmodel = "t.{i}.w"\n'
    rules, seen = parse_rules(text, "mine.toml"), list[Mapping[str, Shape]]()
    fused = {"m.both": concat([Stored("h.0.w", (2, 3)), Stored("h.1.w", (2, 3))], 0)}

    def ask(shapes: Mapping[str, Shape]) -> ClassNames:
        seen.append(shapes)
        return says({}, fused)

    stored: dict[str, Shape] = {"t.0.w": (2, 3), "t.1.w": (2, 3)}
    binding = bind(
        TensorsAtHand(shapes=stored, side=None),
        {"m.both": None},
        [person_provider(rules), class_provider(ask)],
    )
    assert seen == [{"h.0.w": (2, 3), "h.1.w": (2, 3)}]
    assert binding.expressions == {"m.both": concat([Stored("t.0.w", (2, 3)), Stored("t.1.w", (2, 3))], 0)}
    assert binding.rules == rules


def test_a_part_of_a_larger_model_has_the_names_that_it_has_there() -> None:
    shapes: dict[str, Shape] = {"layers.0.w": (4, 3), "layers.1.w": (4, 3), "norm.w": (3,)}
    whole = {f"text.{name}": shape for name, shape in shapes.items()} | {"eye.w": (3, 3)}
    binding = bind(TensorsAtHand(shapes=shapes), None, [whole_provider([{"eye.w": (3, 3)}, whole])])
    assert binding.by == {f"text.{name}": "base" for name in shapes}
    twice = whole | {f"talk.{name}": shape for name, shape in shapes.items()}
    assert set(bind(TensorsAtHand(shapes=shapes), None, [whole_provider([twice])]).by.values()) == {
        "selection"
    }


def test_the_form_that_save_pretrained_writes_names_what_it_lacks() -> None:
    have = TensorsAtHand(shapes={**HELD, "positions": (7,)}, names={"m.norm": "norm"})
    form = {
        "h.norm": Stored("m.norm", (3,)),
        "h.gate": cut(Stored("m.gate_up", (4, 3)), Region((0, 0), (2, 3))),
    }
    binding = bind(have, None, [saved_form_provider(form)])
    assert binding.expressions == form
    assert binding.by == {"h.norm": "class", "h.gate": "class"}
    assert binding.dropped == ("positions",)
    assert bind(have, None, [saved_form_provider({})]).dropped == ("m.gate_up", "m.norm", "positions")


def test_what_a_class_says_comes_back_from_plain_data() -> None:
    said = ClassNames(
        names={"m.norm": "h.norm"},
        converted=FUSED,
        unused={"h.spare": (1, 2)},
        ignored=frozenset({"h.old"}),
        computed_fqns=frozenset({"m.mask"}),
        unsaved=frozenset({"m.mask"}),
        ties=(("h.a", "h.b"),),
        missing=["m.lacking"],
        misfits=[["m.norm", "why"]],  # type: ignore[list-item]
        is_transformers=True,
    )
    assert ClassNames.from_json(json.loads(json.dumps(said.to_json(), default=sorted))) == said


def test_nothing_is_decided_if_a_tensor_has_its_own_name_and_is_a_part_of_another() -> None:
    have = TensorsAtHand(shapes={**HELD, "h.up": (2, 3)})
    binding = bind(have, None, [manifest_provider(FUSED), class_provider(never)])
    assert (binding.clashing_names, set(binding.by.values())) == (("h.up",), {"selection"})


def test_rows_that_a_model_drops_are_zeros() -> None:
    """Only where nothing else is made of the tensor, and the first rows are there: else a part of it is lost."""
    shapes: dict[str, Shape] = {"head": (5, 3), "other": (1, 3), "last": (5, 3)}
    made: dict[str, Expression] = {
        "head": cut(Stored("files.head", (7, 3)), Region((0, 0), (5, 3))),
        "last": cut(Stored("files.last", (7, 3)), Region((2, 0), (5, 3))),
    }
    binding = bind(TensorsAtHand(shapes=shapes), None, [manifest_provider(made)])
    assert binding.padded == {"files.head": 2}
    assert binding.expressions.keys() == {"files.head", "other", "last"}
    assert binding.expressions["files.head"].shape == (7, 3)
    made["other"] = cut(Stored("files.head", (7, 3)), Region((5, 0), (1, 3)))
    assert set(bind(TensorsAtHand(shapes=shapes), None, [manifest_provider(made)]).by.values()) == {
        "selection"
    }
