"""Which stage of a pipeline holds what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import shardkit

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11, "intermediate_size": 6}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for tied in (False, True):
        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=5, tie_word_embeddings=tied)
        transformers.LlamaForCausalLM(config).save_pretrained(out / ("tied" if tied else "llama"))
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=6)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(out / "gpt2")  # its class has no pp_plan
    t5 = transformers.T5Config(d_model=8, d_ff=6, d_kv=4, num_layers=2, num_heads=2, vocab_size=11)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(out / "t5")
    return out


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_stages.py").write_text(
        "def first_has_all_but_one(model, n):\n"
        "    layers = [f'model.layers.{at}' for at in range(5)]\n"
        "    return [['model.embed_tokens', *layers[:4]], [layers[4], 'model.norm', 'lm_head', 'model.rotary_emb']]\n"
        "def forgets(model, n):\n"
        "    return [['model.embed_tokens', 'modle.layers'], ['lm_head']]\n"
        "def three(model, n):\n"
        "    return [[], [], []]\n"
        "def fails(model, n):\n"
        "    raise RuntimeError('no idea')\n"
    )
    monkeypatch.chdir(tmp_path)


def stages(path: Path) -> dict[int, set[str]]:
    """Return the beginnings of the names on each stage."""
    found: dict[int, set[str]] = {}
    for name, tensor in json.loads((path / "shardkit.json").read_text())["tensors"].items():
        parts = name.split(".")
        start = 3 if parts[2:3] and parts[2].isdecimal() else 2
        found.setdefault(tensor["stage"], set()).add(".".join(parts[:start]))
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "policy", "expected"),
    [
        (
            "llama",
            "pp=2,dp_shard=2",
            "auto",
            ["embed_tokens layers.0 layers.1 layers.2", "layers.3 layers.4 norm lm_head.weight"],
        ),
        (
            "llama",
            "pp=2,dp_shard=1",
            "my_stages:first_has_all_but_one",
            ["embed_tokens layers.0 layers.1 layers.2 layers.3", "layers.4 norm lm_head.weight"],
        ),
        ("tied", "pp=2,tp=2", "auto", ["embed_tokens layers.0 layers.1 layers.2", "layers.3 layers.4 norm"]),
        ("gpt2", "pp=2,dp_shard=2", "auto", ["wte wpe h.0", "h.1 ln_f"]),
    ],
)
@pytest.mark.usefixtures("fast_trace", "functions")
def test_a_model_is_split(
    name: str, mesh: str, policy: str, expected: list[str], models: Path, tmp_path: Path
) -> None:
    result = shardkit.preshard(models / name, tmp_path / "out", mesh=mesh, stages=policy)
    root = "transformer" if name == "gpt2" else "model"
    assert stages(tmp_path / "out") == {
        stage: {each if each == "lm_head.weight" else f"{root}.{each}" for each in text.split()}
        for stage, text in enumerate(expected)
    }
    assert (result.mesh, result.world_size) == (mesh, result.num_files)
    assert shardkit.inspect(tmp_path / "out").mesh == mesh
    assert shardkit.diff(tmp_path / "out", models / name).is_equal


@pytest.mark.usefixtures("fast_trace")
def test_files_are_those_of_the_first_replica_of_each_stage(models: Path, tmp_path: Path) -> None:
    shardkit.preshard(models / "llama", tmp_path / "out", mesh="pp=2,dp_replicate=2,dp_shard=2")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.distcp")) == [
        f"__{rank}_0.distcp" for rank in (0, 1, 4, 5)
    ]
    shardkit.consolidate(tmp_path / "out", tmp_path / "hf")
    assert shardkit.diff(tmp_path / "hf", models / "llama").is_equal


@pytest.mark.parametrize(
    ("name", "mesh", "options", "match"),
    [
        (
            "llama",
            "pp=2,dp_shard=2",
            {"stages": "my_stages:forgets"},
            r"(?s)modle.layers: no such module.*model\.layers\.\{0\.\.4\}\..*: on no stage",
        ),
        ("llama", "pp=2,dp_shard=2", {"stages": "my_stages:three"}, "returned 3 lists, not 2"),
        ("llama", "pp=2,dp_shard=2", {"stages": "my_stages:fails"}, "RuntimeError: no idea"),
        ("llama", "pp=2,dp_shard=2", {"stages": "my_stages:nothing"}, "stages: cannot import nothing"),
        ("llama", "pp=2,dp_shard=2", {"stages": "none"}, "neither auto nor a function"),
        ("llama", "pp=8,dp_shard=2", {}, "has 5 blocks in model.layers, fewer than the 8 stages"),
        ("t5", "pp=2,dp_shard=2", {}, "does not say which blocks"),
        ("llama", "pp=2,dp_shard=2", {"names": "hub"}, "to pipeline stages needs the model"),
    ],
)
@pytest.mark.usefixtures("fast_trace", "functions")
def test_what_cannot_be_split_is_refused(
    name: str, mesh: str, options: dict[str, str], match: str, models: Path, tmp_path: Path
) -> None:
    with pytest.raises(shardkit.PolicyError, match=match):
        shardkit.preshard(models / name, tmp_path / "out", mesh=mesh, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("fast_trace")
def test_rules_cut_within_a_stage(models: Path, tmp_path: Path) -> None:
    shardkit.preshard(
        models / "llama", tmp_path / "out", mesh="pp=2,dp_shard=2,tp=2", parallel_rules=["*.q_proj=colwise"]
    )
    said = json.loads((tmp_path / "out" / "shardkit.json").read_text())["tensors"]
    tensor = said["model.layers.4.self_attn.q_proj.weight"]
    assert (tensor["stage"], tensor["placements"]) == (1, ["SS(0,2)", "S(0)"])


def test_reshard_has_no_model_to_ask(tmp_path: Path) -> None:
    with pytest.raises(shardkit.MeshError, match="needs the model"):
        shardkit.reshard(tmp_path, tmp_path / "out", mesh="pp=2,dp_shard=2")
