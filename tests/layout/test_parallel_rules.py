"""Tensor and expert parallelism declared by rules: the same bytes as from the plans of the model's class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import shardkit
from shardkit.layout.choice.parallel_rules import STYLES
from tests.cases import but_first

LLAMA = (
    "model.layers.*.self_attn.[qkv]_proj=colwise",
    "model.layers.*.o_proj=rowwise",
    "*.mlp.gate_proj=colwise",
    "*.mlp.up_proj.weight=colwise",
    "*.mlp.down_proj=rowwise",
    "lm_head=colwise",
    "model.embed_tokens=embedding_rowwise",
)
MOE = (
    "model.layers.*.self_attn.[qkv]_proj=colwise",
    "model.layers.*.o_proj=rowwise",
    "lm_head=colwise",
    "model.embed_tokens=embedding_rowwise",
)
TP_EXPERTS = ("*.experts.gate_up_proj=packed_colwise", "*.experts.down_proj=rowwise")
SIZES = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 51,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for tied in (False, True):
        llama = transformers.LlamaConfig(
            **SIZES, intermediate_size=26, tie_word_embeddings=tied, attention_bias=True
        )
        transformers.LlamaForCausalLM(llama).save_pretrained(out / ("tied" if tied else "llama"))
    moe = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=12, num_experts=8, tie_word_embeddings=False
    )
    transformers.Qwen3MoeForCausalLM(moe).save_pretrained(out / "moe")
    return out


def written(path: Path) -> tuple[dict[str, bytes], dict[str, object]]:
    """Return the shard files, and where the manifest says that tensors lie."""
    files = {each.name: each.read_bytes() for each in path.glob("*.distcp")}
    said = json.loads((path / "shardkit.json").read_text())
    meshes = said.get("meshes") or []
    for axis in (axis for mesh in meshes for axis in mesh["axes"] if axis["size"] == 1):
        del axis["steps"]  # they mean nothing
    placed = {
        name: (tensor["placements"], None if tensor.get("mesh") is None else meshes[tensor["mesh"]])
        for name, tensor in said["tensors"].items()
    }
    return files, placed


@pytest.mark.parametrize(
    ("name", "mesh", "rules"),
    but_first(
        [
            ("llama", "dp_shard=4,tp=2", LLAMA),
            ("llama", "tp=2", LLAMA),
            ("llama", "dp_replicate=2,dp_shard=2,tp=4", LLAMA),
            ("tied", "dp_shard=2,tp=2", LLAMA),
            ("moe", "dp_shard=2,tp=2", (*MOE, *TP_EXPERTS)),
            ("moe", "dp_shard=4,ep=2", ("*.experts.*=experts",)),
            ("moe", "dp_replicate=2,dp_shard=2,tp=2,ep=4", ("*=replicate", *MOE, "*.mlp.experts=experts")),
        ]
    ),
)
def test_rules_write_what_the_models_own_plans_write(
    name: str, mesh: str, rules: tuple[str, ...], models: Path, tmp_path: Path, fast_trace: object
) -> None:
    shardkit.preshard(models / name, tmp_path / "traced", mesh=mesh)
    expected = written(tmp_path / "traced")
    result = shardkit.preshard(models / name, tmp_path / "live", mesh=mesh, parallel_rules=rules)
    assert (result.layout, result.mesh) == ("declared", mesh)
    assert written(tmp_path / "live") == expected
    if name != "moe":  # the files have the names and shapes of the model
        shardkit.preshard(models / name, tmp_path / "hub", mesh=mesh, names="hub", parallel_rules=rules)
        assert written(tmp_path / "hub") == expected


@pytest.mark.parametrize(
    ("mesh", "rules", "match"),
    [
        ("dp_shard=2,tp=2", ["*.q_proj=columns", "colwise"], r"(?s)columns.*\n.*colwise: not GLOB=STYLE"),
        (
            "dp_shard=2,tp=2",
            ["*.q_poj=colwise", "*=rowwise", "x=replicate"],
            r"2 globs of --parallel-rule match(?s:.*)q_poj(?s:.*)  x",
        ),
        ("dp_shard=2,tp=2", ["*.q_proj=replicate"], "cuts anything over tp"),
        ("dp_shard=2,tp=2,ep=2", ["*.q_proj=colwise"], "cuts anything over ep"),
        (
            "dp_shard=2,tp=2",
            ["lm_head=colwise", "*.embed_tokens=embedding_colwise"],
            r"one parameter(?s:.*)lm_head",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    mesh: str, rules: list[str], match: str, models: Path, tmp_path: Path, fast_trace: object
) -> None:
    with pytest.raises(shardkit.UsageError, match=match):
        shardkit.preshard(models / "tied", tmp_path / "out", mesh=mesh, parallel_rules=rules)
    assert not (tmp_path / "out").exists()


def test_rules_for_an_axis_that_is_not_there_are_named(models: Path) -> None:
    def noted(mesh: str) -> str:
        rules = ["*.q_proj=colwise", "*.o_proj=rowwise", "*.mlp.*=experts"]
        job = shardkit.preshard(models / "llama", mesh=mesh, names="hub", parallel_rules=rules, dry_run=True)
        return "\n".join(each for each in job.notes if "cut nothing" in each)

    assert noted("dp_shard=4").splitlines() == [
        "--mesh dp_shard=4 has no tp, so these rules cut nothing: *.q_proj=colwise, *.o_proj=rowwise",
        "--mesh dp_shard=4 has no ep, so these rules cut nothing: *.mlp.*=experts",
    ]
    assert "has no ep" in noted("dp_shard=2,tp=2")
    assert "has no tp" not in noted("dp_shard=2,tp=2")


@pytest.mark.prove
def test_what_is_cut_is_counted(models: Path) -> None:
    """Not what a rule names and the mesh has no axis for."""
    for mesh, num_cut in (("dp_shard=4", 0), ("dp_shard=2,tp=2", 4)):
        job = shardkit.preshard(
            models / "llama", mesh=mesh, parallel_rules=["*.q_proj=colwise"], dry_run=True
        )
        assert f"{num_cut} tensors of 29 cut over tp or ep by --parallel-rule" in job.notes


def test_a_function_and_rules_are_too_much(
    models: Path, tmp_path: Path, fast_trace: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_parallel.py").write_text(
        "from torch.distributed.fsdp import fully_shard\ndef wrap(model, mesh):\n    fully_shard(model, mesh=mesh)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(shardkit.PolicyError, match="parallelises the model itself"):
        shardkit.preshard(
            models / "llama",
            mesh="dp_shard=2,tp=2",
            wrap="my_parallel:wrap",
            parallel_rules=["lm_head=colwise"],
        )


def test_styles_are_named_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "preshard.md").read_text()
    assert all(f"`{style}`" in text for style in STYLES)
