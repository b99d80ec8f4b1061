"""Layouts with OSFT factors: traced from the model, or declared from names, they are the same."""

from collections.abc import Callable

import pytest

from shardkit.core.catalog import TensorEntry
from shardkit.core.mesh import parse_mesh
from shardkit.errors import LayoutError, MeshError, ShardkitError
from shardkit.layout.choice.choose import make_layout
from shardkit.layout.choice.factored import factors_below
from shardkit.layout.layout import declare
from shardkit.layout.traced import trace_model
from shardkit.osft.layout import check_osft_mesh, division_of, factor_layout
from shardkit.osft.plan import OsftPlan
from tests.layout.test_layout import tensors
from tests.layout.test_traced import fake_model, placements, source_of

ModelDir = Callable[..., str]
MESH = parse_mesh(None, 4)
PLAN = OsftPlan(ratio=0.3)
UP = "model.layers.3.mlp.up_proj"


def small() -> dict[str, TensorEntry]:
    return tensors(
        ("layers.0.self_attn.q_proj.weight", (8, 12), "bfloat16"),
        ("layers.0.self_attn.q_proj.bias", (8,), "bfloat16"),
        ("layers.0.mlp.up_proj.weight", (10, 6), "bfloat16"),
        ("layers.0.norm.weight", (6,), "bfloat16"),
        ("embed.weight", (9, 12), "bfloat16"),
    )


@pytest.mark.usefixtures("fast_trace")
@pytest.mark.parametrize("mesh", ["dp_shard=4", "dp_replicate=2,dp_shard=3"])
def test_a_traced_layout_has_the_factors_that_a_declared_one_has(mesh: str, model_dir: ModelDir) -> None:
    directory, axes = model_dir("llama"), parse_mesh(mesh, None)
    dense = source_of(trace_model(directory, axes, "auto").layout)
    model = fake_model(directory, dense)
    traced = make_layout(model, axes, "auto", division=division_of(PLAN))
    declared = factor_layout(declare(dense, axes, "auto", model.config), PLAN, dense, model.config)
    assert traced.origin == "traced"
    assert len(traced.factored) == 7 * 11
    assert traced.factored[UP].shapes == {
        name: tensor.shape for name, tensor in traced.tensors.items() if name.startswith(f"{UP}.")
    }
    assert f"{UP}.weight" not in traced.tensors
    assert traced.sources[f"{UP}.weight"] == f"{UP}.weight"
    assert {name: traced.sources[name] for name in traced.tensors} == {name: name for name in traced.tensors}
    for layout in (traced, declared):
        assert placements(layout, f"{UP}.osft_U_high")[-1] == "S(0)"
        assert placements(layout, f"{UP}.osft_params.V_low")[-1] == "S(1)"
        assert placements(layout, "model.layers.0.mlp.down_proj.osft_V_high")[-1] == "S(0)"  # 37 columns
    assert {f: (t.shape, t.placements) for f, t in traced.tensors.items()} == {
        f: (t.shape, t.placements) for f, t in declared.tensors.items()
    }
    assert traced.factored == declared.factored
    assert traced.units[traced.tensors[f"{UP}.osft_U_high"].unit].path == "model.layers.3"


@pytest.mark.usefixtures("fast_trace")
def test_what_speaks_against_a_target_is_told_by_the_model(model_dir: ModelDir) -> None:
    def why(name: str, targets: str) -> str:
        directory = model_dir(name)
        with pytest.raises(ShardkitError) as caught:
            trace_model(directory, MESH, "auto", division=division_of(OsftPlan(ratio=0.3, targets=targets)))
        return f"{type(caught.value).__name__}: " + "; ".join(caught.value.problems)

    assert "belongs to Conv1D" in why("gpt2", "auto")
    assert "lm_head.weight: it is tied to model.embed_tokens.weight" in why("llama-tied", "lm_head")
    assert why("llama", "*.no_proj").startswith("UsageError: *.no_proj")


def test_the_source_is_compared_before_weights_are_factors(model_dir: ModelDir, fast_trace: object) -> None:
    directory = model_dir("llama")
    dense = source_of(trace_model(directory, MESH, "auto").layout, without=(f"{UP}.weight",))
    with pytest.raises(LayoutError) as caught:
        make_layout(fake_model(directory, dense), MESH, "auto", division=division_of(PLAN))
    assert f"{UP}.weight" in str(caught.value.problems)
    assert "osft" not in str(caught.value.problems)


def test_a_declared_layout_takes_names_for_it() -> None:
    entries = small()
    layout = factor_layout(declare(entries, MESH, "none", None), PLAN, entries, None)
    assert list(layout.factored) == ["layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"]
    assert "layers.0.self_attn.q_proj.bias" in layout.tensors
    assert placements(layout, "layers.0.self_attn.q_proj.osft_V_high") == ["S(1)"]
    assert placements(layout, "layers.0.mlp.up_proj.osft_V_high") == ["S(0)"]
    moved = factors_below(layout.factored, "model.")["model.layers.0.mlp.up_proj"]
    assert moved.weight == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("more", "config", "targets", "why"),
    [
        (("a.q.weight", (8, 8), "int8"), None, "a.q", "quantised"),
        (("a.c_attn.weight", (8, 8), "float32"), {"model_type": "gpt2"}, "a.c_attn", "Conv1D"),
        (("a.embed_tokens.weight", (8, 8), "float32"), None, "a.embed_tokens", "Embedding"),
        (("a.experts.up", (4, 8, 8), "float32"), None, "a.experts.up", "experts stay dense"),
        (("a.q.weight", (1, 8), "float32"), None, "a.q", "one direction"),
        (("a.q.weight", (2, 8), "float32"), None, "a.q", "none would be kept"),
    ],
)
def test_weights_without_factors_are_refused_by_name(
    more: tuple[str, tuple[int, ...], str], config: dict[str, str] | None, targets: str, why: str
) -> None:
    entries = {**small(), **tensors(more)}
    plan = OsftPlan(ratio=0.9, targets=targets)
    with pytest.raises(LayoutError) as caught:
        factor_layout(declare(entries, MESH, "none", config), plan, entries, config)
    assert f"{more[0]}: " in caught.value.problems[0]
    assert why in caught.value.problems[0]


def test_a_tie_is_no_target() -> None:
    entries = tensors(
        ("lm_head.weight", (9, 12), "float32"), ("model.embed_tokens.weight", (9, 12), "float32")
    )
    layout = declare(
        entries,
        MESH,
        "none",
        {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    )
    assert layout.ties
    with pytest.raises(LayoutError) as caught:
        factor_layout(layout, OsftPlan(ratio=0.5, targets="*"), entries, None)
    assert "tied" in caught.value.problems[0]


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp_shard=2,ep=2", "pp=2,dp_shard=2"])
def test_other_meshes_are_refused(mesh: str) -> None:
    with pytest.raises(MeshError, match="factors of a layer"):
        check_osft_mesh(parse_mesh(mesh, None))
    check_osft_mesh(parse_mesh("dp_replicate=2,dp_shard=2", None))
