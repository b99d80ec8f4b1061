import pytest

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import BY_NAME
from shardkit.core.mesh import parse_mesh
from shardkit.core.regions import Region
from shardkit.errors import PolicyError
from shardkit.layout.layout import declare, find_containers

MESH = parse_mesh(None, 4)


def tensors(*specs: tuple[str, tuple[int, ...], str]) -> dict[str, TensorEntry]:
    return {
        fqn: TensorEntry(fqn=fqn, dtype=BY_NAME[dtype], shape=shape, first_chunk=0, num_chunks=1)
        for fqn, shape, dtype in specs
    }


def named(*fqns: str) -> dict[str, TensorEntry]:
    return tensors(*((fqn, (8, 2), "float32") for fqn in fqns))


LLAMA = named(
    "lm_head.weight",
    "model.embed_tokens.weight",
    *(f"model.layers.{n}.mlp.experts.{e}.up.weight" for n in sorted(range(12), key=str) for e in (0, 1)),
    "model.norm.weight",
)


@pytest.mark.parametrize(
    ("fqn", "shape", "dtype", "placement"),
    [
        ("w", (5, 3), "float32", "S(0)"),
        ("w", (2, 3), "bfloat16", "S(0)"),  # fewer rows than ranks
        ("w", (5,), "complex64", "S(0)"),
        ("w", (5, 3), "float8_e4m3fn", "S(0)"),
        ("w", (), "float32", "R"),
        ("w", (5, 3), "int64", "R"),
        ("w", (5, 3), "bool", "R"),
        ("bn.running_mean", (5,), "float32", "R"),
        ("rope.inv_freq", (5,), "float32", "R"),
    ],
)
def test_places_by_the_rule_of_fsdp2(fqn: str, shape: tuple[int, ...], dtype: str, placement: str) -> None:
    layout = declare(tensors((fqn, shape, dtype)), MESH, "none", None)
    tensor = layout.tensors[fqn]
    assert [str(p) for p in tensor.placements] == [placement]
    assert tensor.is_sharded == (placement != "R")


def test_hsdp_shards_on_the_last_axis_only() -> None:
    layout = declare(named("w"), parse_mesh("dp_replicate=2,dp_shard=3", None), "none", None)
    assert [str(p) for p in layout.tensors["w"].placements] == ["R", "S(0)"]
    assert list(layout.owners("w")) == [
        (0, Region((0, 0), (3, 2))),
        (1, Region((3, 0), (3, 2))),
        (2, Region((6, 0), (2, 2))),
    ]


def test_auto_units_are_numbered_and_in_numeric_order() -> None:
    layout = declare(LLAMA, MESH, "auto", None)
    assert [unit.path for unit in layout.units] == ["", *(f"model.layers.{n}" for n in range(12))]
    assert layout.origin == "declared"
    assert layout.units[0].class_name is None
    assert layout.tensors["model.layers.10.mlp.experts.0.up.weight"].unit == 11


@pytest.mark.parametrize(
    ("fqns", "containers"),
    [
        (("h.0.w", "h.1.w", "wte.weight"), {"h": 2}),
        (("encoder.layer.0.a.w", "decoder.layer.0.a.w"), {"encoder.layer": 1, "decoder.layer": 1}),
        (("net.0.w", "net.2.w"), {}),  # a Sequential with parts that hold nothing
        (("layers.0.experts.0.w", "layers.1.experts.0.w"), {"layers": 2}),
        (("stage.3.blocks.0.w", "stage.3.blocks.1.w"), {"stage.3.blocks": 2}),
        (("scales.0", "scales.1"), {}),  # a ParameterList: tensors, not modules
        (("layers.00.w",), {}),
    ],
)
def test_finds_containers(fqns: tuple[str, ...], containers: dict[str, int]) -> None:
    assert find_containers(fqns) == containers


def test_none_is_one_unit() -> None:
    assert len(declare(LLAMA, MESH, "none", None).units) == 1


@pytest.mark.parametrize("wrap", ["model.layers", "model.layers.*", "layers"])
def test_module_paths_are_matched(wrap: str) -> None:
    assert declare(LLAMA, MESH, wrap, None).units == declare(LLAMA, MESH, "auto", None).units


def test_units_may_nest() -> None:
    layout = declare(LLAMA, MESH, "model.layers,model.layers.*.mlp", None)
    assert [unit.path for unit in layout.units][:5] == [
        "",
        "model.layers.0",
        "model.layers.0.mlp",
        "model.layers.1",
        "model.layers.1.mlp",
    ]
    assert layout.tensors["model.layers.1.mlp.experts.0.up.weight"].unit == 4


@pytest.mark.parametrize(
    "wrap", ["LlamaDecoderLayer", "transformers.models.llama.LlamaDecoderLayer", "layer"]
)
def test_class_names_need_the_model(wrap: str) -> None:
    with pytest.raises(PolicyError) as caught:
        declare(LLAMA, MESH, wrap, None, reason="transformers is not installed")
    assert "need the model" in caught.value.message
    assert "transformers is not installed" in caught.value.message
    assert "model.layers.*  (12 modules)" in caught.value.problems


def test_a_function_needs_the_model() -> None:
    with pytest.raises(PolicyError, match="there is no config"):
        declare(LLAMA, MESH, "pkg:wrap", None, reason="there is no config.json")


def test_auto_without_containers_lists_module_paths() -> None:
    with pytest.raises(PolicyError) as caught:
        declare(named("a.b.weight"), MESH, "auto", None)
    assert caught.value.problems == ("a  (1 module)", "a.b  (1 module)")


CAUSAL = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("fqns", "config", "ties"),
    [
        (("model.embed_tokens.weight",), {**CAUSAL, "tie_word_embeddings": True}, True),
        (("model.embed_tokens.weight", "lm_head.weight"), {**CAUSAL, "tie_word_embeddings": True}, True),
        (("model.embed_tokens.weight", "lm_head.weight"), CAUSAL, False),
        (("model.embed_tokens.weight", "lm_head.weight"), {**CAUSAL, "tie_word_embeddings": False}, False),
        (("model.embed_tokens.weight",), {**CAUSAL, "text_config": {"tie_word_embeddings": True}}, True),
        (
            ("model.embed_tokens.weight",),
            {"architectures": ["LlamaModel"], "tie_word_embeddings": True},
            False,
        ),
        (("model.embed_tokens.weight",), None, False),
        (("model.embed_tokens.weight",), {"architectures": "x", "text_config": 3}, False),
    ],
)
def test_ties_come_from_the_config(
    fqns: tuple[str, ...], config: dict[str, object] | None, ties: bool
) -> None:
    layout = declare(named(*fqns), MESH, "none", config)
    assert layout.ties == ((("model.embed_tokens.weight", "lm_head.weight"),) if ties else ())
    assert ("lm_head.weight" in layout.tensors) == ("lm_head.weight" in fqns and not ties)


def test_gpt2_says_nothing_about_its_tie() -> None:
    layout = declare(named("transformer.wte.weight"), MESH, "none", {"architectures": ["GPT2LMHeadModel"]})
    assert layout.ties == (("transformer.wte.weight", "lm_head.weight"),)


def test_names_of_different_shape_are_not_tied() -> None:
    entries = tensors(("model.embed_tokens.weight", (8, 2), "float32"), ("lm_head.weight", (9, 2), "float32"))
    assert declare(entries, MESH, "none", {**CAUSAL, "tie_word_embeddings": True}).ties == ()


def test_says_that_names_were_not_checked() -> None:
    layout = declare(LLAMA, MESH, "none", None, reason="there is no config.json")
    assert layout.notes == ("names were not checked against a model: there is no config.json",)
    assert layout.keep_fp32 is None
