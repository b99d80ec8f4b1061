"""Key rules: the shipped sets against what the trainers do, there and back; and every mistake is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardkit.errors import LayoutError, UsageError
from shardkit.keys.expressions import Stored, pieces
from shardkit.keys.rule_sets import (
    Padding,
    bind_in_form,
    choose_shipped,
    find_shipped,
    foreign_type,
    shipped_sets,
)
from shardkit.keys.rules import RuleSet, bind_names, parse_rules
from tests.keys.test_expressions import evaluate
from tests.keys.trainers import (
    HEADS,
    KV_HEADS,
    SETS,
    by_groups,
    config,
    hub,
    layers_one_by_one,
    numbered,
    padded,
    pairs,
)


def found(name: str) -> RuleSet:
    rules = find_shipped(name)
    assert rules is not None
    return rules


def moved(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the tensors of a set's small model, on the Hub and in the trainer's model."""
    model_type, shapes = SETS[name]
    values = numbered(shapes)
    binding = bind_names(found(name), shapes, config(model_type), side="hub")
    return values, {target: evaluate(made, values) for target, made in binding.expressions.items()}


def test_every_shipped_set_is_tried() -> None:
    assert {rules.name for rules in shipped_sets()} == SETS.keys()


@pytest.mark.parametrize("name", SETS)
def test_what_goes_there_comes_back_and_the_set_is_chosen_by_itself(name: str) -> None:
    model_type, _ = SETS[name]
    values, theirs = moved(name)
    shapes = {target: value.shape for target, value in theirs.items()}
    choice = choose_shipped(shapes, config(model_type), side="model", padding=None)
    assert [rules.name for rules, _ in choice.fitting] == [name]
    back = {target: evaluate(made, theirs) for target, made in choice.fitting[0][1].expressions.items()}
    expected = dict(values)
    if "lm_head.weight" in back.keys() - values.keys():  # tied
        expected["lm_head.weight"] = values["model.embed_tokens.weight"]
    assert back.keys() == expected.keys()
    assert all(np.array_equal(back[target], expected[target]) for target in back)


@pytest.mark.parametrize("name", ["torchtitan-llama3", "torchtitan-llama3-0.2", "torchtune-llama"])
def test_rows_of_query_and_key_are_those_of_pairs_also_for_grouped_queries(name: str) -> None:
    values, theirs = moved(name)
    place = {"torchtitan-llama3": "attention.qkv_linear.w{}", "torchtitan-llama3-0.2": "attention.w{}"}
    for letter, heads in (("q", HEADS), ("k", KV_HEADS)):
        mine = theirs[f"layers.1.{place.get(name, 'attn.{}_proj').format(letter)}.weight"]
        assert np.array_equal(mine, pairs(values[f"model.layers.1.self_attn.{letter}_proj.weight"], heads))


def test_qwens_rows_stay() -> None:
    values, theirs = moved("torchtitan-qwen3")
    assert np.array_equal(
        theirs["layers.0.attention.qkv_linear.wq.weight"], values["model.layers.0.self_attn.q_proj.weight"]
    )
    experts = [values[f"model.layers.0.mlp.experts.{e}.up_proj.weight"] for e in range(3)]
    assert np.array_equal(theirs["layers.0.moe.routed_experts.inner_experts.w3_EFD"], np.stack(experts))


def test_llama_4_is_transposed_and_taken_apart() -> None:
    values, theirs = moved("torchtitan-llama4-0.2")
    fused = values["language_model.model.layers.1.feed_forward.experts.gate_up_proj"]
    w1, w3 = np.split(fused, 2, axis=-1)
    assert np.array_equal(theirs["layers.1.moe.experts.w1"], w1.swapaxes(1, 2))
    assert np.array_equal(theirs["layers.1.moe.experts.w3"], w3.swapaxes(1, 2))


def test_megatron_stacks_layers_and_groups_query_key_and_value() -> None:
    values, theirs = moved("megatron-llama")
    for kind in ("weight", "bias"):
        parts = [
            [values[f"model.layers.{layer}.self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            for layer in range(2)
        ]
        assert np.array_equal(
            theirs[f"decoder.layers.self_attention.linear_qkv.{kind}"],
            np.stack([by_groups(part) for part in parts]),
        )
    embedding = theirs["embedding.word_embeddings.weight"]
    assert embedding.shape == (128, 16)
    assert not embedding[40:].any()
    fc1 = np.concatenate([values[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert np.array_equal(theirs["decoder.layers.mlp.linear_fc1.weight"][1], fc1)


def test_megatrons_experts_are_stacked_twice() -> None:
    values, theirs = moved("megatron-mixtral")
    at = "model.layers.1.block_sparse_moe.experts.2."
    expected = np.concatenate([values[f"{at}w1.weight"], values[f"{at}w3.weight"]])
    assert np.array_equal(theirs["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1, 2], expected)


def test_fms_permutes_query_and_key_and_fuses() -> None:
    values, theirs = moved("fms-llama")
    at = "model.layers.0.self_attn."
    expected = np.concatenate(
        [
            pairs(values[f"{at}q_proj.weight"], HEADS),
            pairs(values[f"{at}k_proj.weight"], KV_HEADS),
            values[f"{at}v_proj.weight"],
        ]
    )
    assert np.array_equal(theirs["base_model.layers.0.attn.in_proj.qkv_fused.weight"], expected)


def test_nemos_experts_are_transposed_side_by_side_and_all_else_stays() -> None:
    values, theirs = moved("nemo-automodel-moe")
    at = "model.layers.1.mlp.experts.2."
    expected = np.concatenate([values[f"{at}gate_proj.weight"].T, values[f"{at}up_proj.weight"].T], 1)
    assert np.array_equal(theirs["model.layers.1.mlp.experts.gate_and_up_projs"][2], expected)
    assert np.array_equal(theirs["model.norm.weight"], values["model.norm.weight"])


def test_olmo_cores_experts_lie_one_below_the_other() -> None:
    values, theirs = moved("olmo-core")
    experts = [values[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] for e in range(3)]
    assert np.array_equal(theirs["blocks.0.feed_forward_moe.experts.mlp.w1"], np.concatenate(experts, 1).T)
    assert np.array_equal(
        theirs["blocks.0.feed_forward_moe.router.weight"],
        values["model.layers.0.mlp.gate.weight"].reshape(-1),
    )


def test_stacked_experts_move_as_they_lie() -> None:
    model_type, shapes = SETS["torchtitan-qwen3"]
    binding = bind_names(found("torchtitan-qwen3"), shapes, config(model_type), side="hub")
    assert all(piece.is_box for made in binding.expressions.values() for piece in pieces(made))


HEAD = 'format = 1\nname = "mine"\n'
ONE = HEAD + '[[rule]]\nhub = "a.{i}.w"\nmodel = "b.{i}.v"\n'


def bound(
    text: str, shapes: dict[str, tuple[int, ...]], side: Any = "hub", config: Any = None
) -> dict[str, Any]:
    return dict(bind_names(parse_rules(text.encode(), "mine.toml"), shapes, config, side=side).expressions)


def problems(
    text: str, shapes: dict[str, tuple[int, ...]], side: Any = "hub", config: Any = None
) -> list[str]:
    with pytest.raises(LayoutError) as caught:
        bound(text, shapes, side, config)
    return list(caught.value.problems)


def test_a_set_goes_both_ways() -> None:
    assert bound(ONE, {"a.3.w": (2,)}) == {"b.3.v": Stored("a.3.w", (2,))}
    assert bound(ONE, {"b.3.v": (2,)}, "model") == {"a.3.w": Stored("b.3.v", (2,))}


@pytest.mark.parametrize("only", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [2, 0], [0, 1, 2], None])
def test_a_step_is_for_all_places_that_only_lists(only: list[int] | None) -> None:
    places = "" if only is None else f", only = {only}"
    steps = f"steps = [{{ rope = 2{places} }}, {{ concat = 0 }}]"
    text = HEAD + f'[[rule]]\nhub = ["q", "k", "v"]\nmodel = "wqkv"\n{steps}\n'
    values = numbered({name: (8, 3) for name in "qkv"})
    made = evaluate(bound(text, {name: (8, 3) for name in values})["wqkv"], values)
    listed = range(3) if only is None else only
    expected = [pairs(rows, 2) if place in listed else rows for place, rows in enumerate(values.values())]
    assert np.array_equal(made, np.concatenate(expected))
    back = bound(text, {"wqkv": made.shape}, "model")
    assert all(np.array_equal(evaluate(back[name], {"wqkv": made}), values[name]) for name in values)


@pytest.mark.parametrize("rules", ["embed head", "head embed", "head others"])
def test_a_tie_stands_for_a_name_that_is_missing_wherever_its_rule_is(rules: str) -> None:
    texts = {
        "embed": '[[rule]]\nhub = "embed"\nmodel = "tok"\n',
        "head": '[[rule]]\nhub = "head"\nmodel = "out"\ntie = "embed"\n',
    }
    first = HEAD + ('others = "keep"\n' if "others" in rules else "")
    text = first + "".join(texts.get(name, "") for name in rules.split())
    embed, tok = Stored("embed", (4, 2)), "embed" if "others" in rules else "tok"
    assert bound(text, {"embed": (4, 2)}) == {tok: embed, "out": embed}
    assert bound(text, {"embed": (4, 2), "head": (4, 2)}) == {tok: embed, "out": Stored("head", (4, 2))}
    assert bound(text, {tok: (4, 2), "out": (4, 2)}, "model").keys() == {"embed", "head"}


def test_tensors_without_a_rule_and_rules_without_a_tensor_are_all_listed() -> None:
    text = ONE + '[[rule]]\nhub = "c"\nmodel = "d"\n'
    with pytest.raises(UsageError) as caught:
        bound(text, {"x.weight": (2,), "y": (3, 4)})
    said = caught.value.problems
    assert len(said) == 4
    assert "rule 1 (a.{i}.w = b.{i}.v): matches nothing" in said
    assert "rule 2 (c = d): matches nothing" in said
    assert any(line.startswith("y [3, 4]: no rule is about it") for line in said)


def test_collisions_are_listed() -> None:
    twice = ONE + '[[rule]]\nhub = "a.0.w"\nmodel = "c"\n'
    assert any("rule 1" in line and "rule 2" in line for line in problems(twice, {"a.0.w": (2,)}))
    same = ONE + '[[rule]]\nhub = "c.{i}"\nmodel = "b.{i}.v"\n'
    said = problems(same, {"a.0.w": (2,), "c.0": (2,)})
    assert any("b.0.v: made twice" in line for line in said)


def test_what_does_not_come_back_is_refused() -> None:
    lossy = HEAD + '[[rule]]\nhub = ["a", "b"]\nmodel = "c"\nsteps = [{ concat = 0 }]\n'
    said = problems(lossy, {"a": (2, 3), "b": (4, 3)})
    assert any(line.startswith("a: ") and "comes back as" in line for line in said)
    sizes = lossy.replace("{ concat = 0 }", "{ concat = 0, sizes = [2, 4] }")
    assert bound(sizes, {"a": (2, 3), "b": (4, 3)})["c"].shape == (6, 3)


@pytest.mark.parametrize("to", [-3, 3, 10**20])
def test_a_padded_vocabulary_has_no_fewer_rows_than_before(to: int) -> None:
    text = HEAD + f'[[rule]]\nhub = "a"\nmodel = "b"\nsteps = [{{ pad = 0, of = 4, to = {to} }}]\n'
    assert f"cannot pad 4 rows to {to}" in problems(text, {"a": (4, 2)})[0]


def test_gaps_among_experts_are_named() -> None:
    text = HEAD + '[[rule]]\nhub = "e.{e}.w"\nmodel = "w"\nsteps = [{ stack = "e" }]\n'
    assert "1 is missing" in problems(text, {"e.0.w": (2,), "e.2.w": (2,)})[0]
    assert bound(text, {"e.1.w": (2,), "e.0.w": (2,)})["w"].shape == (2, 2)


def test_numbers_come_from_the_config_or_the_file() -> None:
    text = (
        HEAD
        + 'numbers = { heads = ["nh", "hidden // 4"] }\n[[rule]]\nhub = "q"\nmodel = "p"\nsteps = [{ rope = "heads" }]\n'
    )
    assert bound(text, {"q": (8, 2)}, config={"hidden": 8})["p"].shape == (8, 2)
    said = problems(text, {"q": (8, 2)})
    assert "the number hidden is not known: there is no config.json" in said[0]
    assert "8 rows are not 3 heads" in problems(text, {"q": (8, 2)}, config={"nh": 3})[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format = 2\n[[rule]]\nhub='a'\nmodel='b'", "format: expected 1"),
        ("format = 1\n", "rule: expected one"),
        ("format = 1\n[[rule]]\nhubb='a'\nmodel='b'", "hubb: no such key"),
        ("format = 1\n[[rule]]\nhub='a'", "drop = true"),
        ("format = 1\n[[rule]]\nhub=['a','b']\nmodel='c'", "concat step"),
        ("format = 1\n[[rule]]\nhub='a.{e}'\nmodel='c'", "stack step"),
        ("format = 1\n[[rule]]\nhub='a'\nmodel='c'\nsteps=[{ turn = 1 }]", "expected one of"),
        ("format = 1\n[[rule]]\nhub='a'\nmodel=['b','c']\nsteps=[{ concat = 0 }]", "steps_to_hub"),
        (
            "format = 1\n[[rule]]\nhub='a'\nmodel='b'\nsteps=[{ permute = [1, 0], only = [1] }]",
            "only = [1]: expected",
        ),
        (
            "format = 1\n[[rule]]\nhub='a'\nmodel='b'\nsteps=[{ permute = [1, 0], only = 0 }]",
            "only = 0: expected",
        ),
        *(
            (
                f"format = 1\n[[rule]]\nhub='a'\nmodel='b'\nsteps=[{{ permute = {value} }}]",
                "with each dim once",
            )
            for value in ("[0, 0]", "[0, 2]", "[1]", "[[0]]", "1", "'x'")
        ),
        ("format = 1\n[[rule]]\nhub='a'\nmodel='b'\nsteps=[{ concat = 'x' }]", "concat a dim"),
        ("format = 1\n[[rule]]\nhub='a.{e}'\nmodel='b'\nsteps=[{ stack = ['e'] }]", "stack takes a variable"),
        (
            "format = 1\n[[rule]]\nhub='a.{e}'\nmodel='b'\nsteps=[{ stack = 'e', dim = 'x' }]",
            "a variable and a dim",
        ),
        ("format = 1\nothers = 'drop'\n[[rule]]\nhub='a'\nmodel='b'", "others:"),
        ("format = 1\nnumbers = { a = true }\n[[rule]]\nhub='a'\nmodel='b'", "numbers.a"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_it(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rules(text.encode(), "mine.toml")
    assert any(said in problem for problem in caught.value.problems), caught.value.problems


def test_what_is_not_toml_is_refused() -> None:
    with pytest.raises(UsageError, match="is not TOML"):
        parse_rules(b"[[rule", "mine.toml")
    with pytest.raises(UsageError, match="is not TOML"):
        parse_rules(b"\xff\xfe", "mine.toml")


def test_a_number_is_arithmetic_and_nothing_else() -> None:
    rule = '[[rule]]\nhub = "q"\nmodel = "p"\nsteps = [{ rope = "%s" }]\n'
    said = "is not a number, a name or arithmetic"
    assert said in problems(HEAD + rule % "__import__(1)", {"q": (8, 2)}, config={})[0]
    for called in ("n", "4"):  # a number that no step calls is looked at too
        with pytest.raises(UsageError) as caught:
            parse_rules(
                f'{HEAD}numbers = {{ n = ["2 ** x", "__import__(1)"] }}\n{rule % called}'.encode(), "mine"
            )
        assert [each.startswith("numbers.n: ") and said in each for each in caught.value.problems] == [
            True
        ] * 2


def test_a_set_is_not_chosen_for_another_architecture() -> None:
    shapes = {target: value.shape for target, value in moved("torchtitan-llama3-0.2")[1].items()}
    choice = choose_shipped(shapes, config("mistral3"), side="model", padding=None)
    assert not choice.fitting
    assert any("it is for llama" in reason for reason in choice.reasons)
    assert not choose_shipped(hub("llama"), config("llama"), side="model", padding=None).fitting


def test_a_set_that_is_named_for_another_architecture_is_warned_of() -> None:
    rules = find_shipped("torchtitan-qwen3")
    assert rules is not None
    (said,) = foreign_type(rules, {"model_type": "llama"})
    assert "torchtitan 0.3, Qwen3 are for qwen3" in said
    assert "llama is none of these" in said
    assert not foreign_type(rules, {"model_type": "qwen3"})
    assert not foreign_type(rules, None)
    assert not foreign_type(parse_rules(ONE.encode(), "mine.toml"), {"model_type": "llama"})


def test_without_a_config_names_of_two_architectures_are_not_guessed() -> None:
    for name in ("torchtune-llama", "olmo-core-llama"):
        shapes = {target: value.shape for target, value in moved(name)[1].items()}
        choice = choose_shipped(shapes, None, side="model", padding=None)
        assert not choice.fitting
        assert "a config.json tells which it is" in choice.reasons[0]


MEGATRON = [name for name in SETS if name.startswith("megatron")]


@pytest.mark.parametrize("rows", [40, 48, 64, 128, 256, 512, 1024, 8192])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", MEGATRON)
def test_megatrons_layers_and_padding_have_several_forms(name: str, one_by_one: bool, rows: int) -> None:
    """Stacked or one by one; padded to 128 rows times the ranks of tensor parallelism, to others, or not at all."""
    values, theirs = moved(name)
    theirs = padded(layers_one_by_one(theirs) if one_by_one else theirs, rows)
    shapes = {target: value.shape for target, value in theirs.items()}
    ((rules, binding),) = choose_shipped(shapes, config(SETS[name][0]), side="model", padding=None).fitting
    assert rules.name == name
    assert all(
        np.array_equal(evaluate(made, theirs), values[target]) for target, made in binding.expressions.items()
    )
    assert binding.expressions.keys() == values.keys()
    assert binding.notes == (
        (f"{rows - 40} rows of padding cut: 40 of {rows} are tokens",) if rows > 40 else ()
    )


@pytest.mark.parametrize("name", MEGATRON)
def test_a_model_with_its_layers_one_by_one_is_filled(name: str) -> None:
    """As a model in memory has them; the Hub's names alone do not tell."""
    values, theirs = moved(name)
    theirs = layers_one_by_one(theirs)
    model_type, shapes = SETS[name]
    made = bind_in_form(
        found(name), shapes, config(model_type), side="hub", padding=None, model_names=theirs
    ).expressions
    assert made.keys() == theirs.keys()
    assert all(np.array_equal(evaluate(each, values), theirs[target]) for target, each in made.items())


@pytest.mark.parametrize(
    ("rows", "padding", "kept"),
    [
        (44, None, 44),  # of no padding: the vocabulary grew
        (192, None, 192),
        (42, Padding(rows=42, multiple=6), 40),
        (48, Padding(rows=48, multiple=6), 48),  # the arguments decide, though 48 is a multiple of 8
        (48, Padding(rows=40, multiple=6), 40),  # arguments of another checkpoint do not
        (128, Padding(used=50), 128),
        (128, Padding(used=39), 40),
        (128, Padding(tokens=50), 50),
        (128, Padding(tokens=39), 40),
        (32, None, 32),
    ],
)
def test_what_is_no_padding_of_the_configs_tokens_stays(
    rows: int, padding: Padding | None, kept: int
) -> None:
    shapes = {
        name: (rows, 16) if name.endswith(("word_embeddings.weight", "output_layer.weight")) else value.shape
        for name, value in moved("megatron-llama")[1].items()
    }
    binding = bind_in_form(found("megatron-llama"), shapes, config("qwen2"), side="model", padding=padding)
    assert {
        binding.expressions[name].shape[0] for name in ("model.embed_tokens.weight", "lm_head.weight")
    } == {kept}
    assert binding.notes == (
        (f"{rows - kept} rows of padding cut: {kept} of {rows} are tokens",) if rows > kept else ()
    )


def test_a_set_that_nearly_fits_says_what_it_lacks() -> None:
    """A router's bias, which no model of this set has; and nothing of names that are no trainer's."""
    _, theirs = moved("megatron-qwen-moe")
    shapes = {target: value.shape for target, value in theirs.items()}
    for form in (shapes, {target: value.shape for target, value in layers_one_by_one(theirs).items()}):
        odd = next(name for name in form if name.endswith("router.weight")).replace("weight", "expert_bias")
        choice = choose_shipped({**form, odd: (3,)}, config("qwen3_moe"), side="model", padding=None)
        assert choice.fitting == ()
        assert choice.reasons == (f"Megatron, Qwen3-MoE (megatron-qwen-moe): no rule is about {odd}",)
        choice = choose_shipped({**form, odd: (3,)}, config("deepseek_v3"), side="model", padding=None)
        assert "it is for mixtral, not for deepseek_v3" in choice.reasons[0]
    assert (
        choose_shipped(
            hub("qwen3_moe", experts="each"), config("qwen3_moe"), side="model", padding=None
        ).reasons
        == ()
    )


# megatron-core 0.16.1, GPTModel.sharded_state_dict of a block spec, moe_layer_freq=[0, 1]: the second layer has experts.
OF_A_LIST = """
decoder.final_layernorm.weight
decoder.layers.0.mlp.linear_fc1.layer_norm_weight
decoder.layers.0.mlp.linear_fc1.weight
decoder.layers.0.mlp.linear_fc2.weight
decoder.layers.0.self_attention.k_layernorm.weight
decoder.layers.0.self_attention.linear_proj.weight
decoder.layers.0.self_attention.linear_qkv.layer_norm_weight
decoder.layers.0.self_attention.linear_qkv.weight
decoder.layers.0.self_attention.q_layernorm.weight
decoder.layers.1.mlp.experts.experts.linear_fc1.weight
decoder.layers.1.mlp.experts.experts.linear_fc2.weight
decoder.layers.1.mlp.linear_fc1.layer_norm_weight
decoder.layers.1.mlp.router.weight
decoder.layers.1.self_attention.k_layernorm.weight
decoder.layers.1.self_attention.linear_proj.weight
decoder.layers.1.self_attention.linear_qkv.layer_norm_weight
decoder.layers.1.self_attention.linear_qkv.weight
decoder.layers.1.self_attention.q_layernorm.weight
embedding.word_embeddings.weight
output_layer.weight
""".split()
NORM, TE_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


@pytest.mark.parametrize("has_te", [False, True])
def test_megatrons_layers_may_have_experts_or_not(has_te: bool) -> None:
    """With Transformer Engine the norm before experts has a name of its own, and is no part of the first matrix."""
    values, theirs = moved("megatron-qwen-moe")
    theirs = layers_one_by_one(theirs)
    dense = {
        f"model.layers.0.mlp.{part}_proj.weight": np.ones((20, 16)) * n
        for n, part in enumerate(("gate", "up"))
    }
    dense["model.layers.0.mlp.down_proj.weight"] = np.ones((16, 20))
    theirs["decoder.layers.0.mlp.linear_fc1.weight"] = np.concatenate([*dense.values()][:2])
    theirs["decoder.layers.0.mlp.linear_fc2.weight"] = dense["model.layers.0.mlp.down_proj.weight"]
    for layer in (0, 1):
        norm = theirs.pop(f"decoder.layers.{layer}.{TE_NORM}")
        theirs[f"decoder.layers.{layer}.{TE_NORM if has_te and layer else NORM}"] = norm
    theirs = {
        name: theirs[name]
        for name in sorted(theirs)
        if not name.startswith(("decoder.layers.0.mlp.e", "decoder.layers.0.mlp.r"))
    }
    if not has_te:
        assert [*theirs] == OF_A_LIST
    shapes = {name: value.shape for name, value in theirs.items()}
    ((rules, binding),) = choose_shipped(shapes, config("qwen3_moe"), side="model", padding=None).fitting
    assert rules.name == "megatron-qwen-moe"
    experts = ("model.layers.0.mlp.experts", "model.layers.0.mlp.gate.")
    expected = {name: value for name, value in values.items() if not name.startswith(experts)} | dense
    assert binding.expressions.keys() == expected.keys()
    assert all(
        np.array_equal(evaluate(made, theirs), expected[name]) for name, made in binding.expressions.items()
    )


@pytest.mark.parametrize("name", ["megatron-mixtral", "megatron-qwen-moe"])
def test_megatrons_experts_without_transformer_engine(name: str) -> None:
    values, theirs = moved(name)
    theirs[f"decoder.layers.{NORM}"] = theirs.pop(f"decoder.layers.{TE_NORM}")
    shapes = {target: value.shape for target, value in theirs.items()}
    ((_, binding),) = choose_shipped(shapes, config(SETS[name][0]), side="model", padding=None).fitting
    assert all(
        np.array_equal(evaluate(made, theirs), values[target]) for target, made in binding.expressions.items()
    )
