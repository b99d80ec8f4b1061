"""Checkpoints that trainers' own code wrote, against the truth beside each.

Runs where the environment variable SHARDKIT_FIXTURES names a directory with `sharded/<name>/{README.txt,ckpt,truth}`.
A README's "Read-back check" tells which checkpoint inside holds the truth, and below which names:

    ckpt/step-2.ckpt: 21 tensors under 'model.' bit-identical to truth/state_dict.safetensors
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import shardkit
from shardkit import formats
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_SAFETENSORS
from shardkit.core.regions import relative_to, runs
from shardkit.errors import SourceError
from shardkit.formats.registry import format_of

HOME = Path(os.environ.get("SHARDKIT_FIXTURES", "nowhere")) / "sharded"
NAMES = sorted(path.name for path in HOME.iterdir()) if HOME.is_dir() else []

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not NAMES, reason="SHARDKIT_FIXTURES names no directory with checkpoints"),
]

_READ_BACK = re.compile(
    r"^(ckpt\S*): (\d+) tensors under '([^']*)' bit-identical to truth/(\w+)\.safetensors", re.M
)
_WRAPPERS = re.compile(r"^module\.|_orig_mod\.|_checkpoint_wrapped_module\.")
_SHORT_DTYPES = {dtype.safetensors: dtype.name for dtype in BY_SAFETENSORS.values()}

# Layout and writer of the checkpoint inside; what is not listed is plain DCP.
LAYOUTS = {
    "accelerate_fsdp1_nodcp_w2": "accelerate-bin",
    "accelerate_fsdp2_w2": "accelerate",
    "deepspeed_zero3_bf16_w2": "deepspeed",
    "fabric_fsdp_w2": "lightning",
    "hfwriter_sharded_w2": "dcp-hf",
    "lightning_fsdp_w2": "lightning",
    "lightning_mp_w2": "lightning",
    "megatron_torch_dist_tp2": "megatron",
    "nemo_automodel_safetensors_w2": "dcp-hf",
    "torch_checkpointing_w2": "torch-checkpointing",
    "trainer_fsdp2_w2": "accelerate",
    "verl_fsdp1_w3": "verl",
    "verl_fsdp2_lora_w2": "verl",
    "verl_fsdp2_w2": "verl",
}
WRITERS = {
    "fabric_fsdp_w2": "Lightning Fabric",
    "fsdp2_app_stateful_w2": "torch's AppState recipe",
    "lightning_fsdp_w2": "Lightning FSDPStrategy",
    "lightning_mp_w2": "Lightning ModelParallelStrategy",
    "torchtitan_llama3_w2": "torchtitan",
    "torchtune_llama3_w2": "torchtune",
    "trainer_fsdp2_w2": "transformers Trainer (FSDP)",
}
# The directory that people would name, one or two above the weights.
AROUND = {
    "accelerate_fsdp2_w2": ("ckpt", "accelerate"),
    "minitrainer_w2": ("ckpt/step_2", "mini-trainer"),
    "nemo_automodel_safetensors_w2": ("ckpt/epoch_0_step_2", "nemo-automodel"),
    "trainer_fsdp2_w2": ("ckpt/checkpoint-2", "accelerate"),
    "verl_fsdp1_w3": ("ckpt/global_step_2", "verl"),
    "verl_fsdp2_w2": ("ckpt/global_step_2", "verl"),
}
REFUSED = {"fsdp1_local_sd_w2": "flat", "bytecheckpoint_fsdp2_w2": "is not a checkpoint|ByteCheckpoint"}
WITHOUT_READ_BACK = {"deepspeed_zero3_bf16_w2", "megatron_torch_dist_tp2", *REFUSED}
# Names of the live model that only key rules turn into the Hub's: the truth is its state dict.
OWN_NAMES = {
    "edge_dtypes_w2",
    "fsdp2_qwen2vl_w2",
    "fsdp2_qwen3moe_w2",
    "torchtitan_llama3_w2",
    "torchtune_llama3_w2",
}
ADAPTERS = {"peft_lora_fsdp2_full_w2", "verl_fsdp2_lora_w2"}


class Inside(NamedTuple):
    """A checkpoint of an example, and the truth of some of its tensors."""

    path: Path
    prefix: str
    truth: str


def checkpoints(name: str) -> list[Inside]:
    text = (HOME / name / "README.txt").read_text()
    found = [Inside(HOME / name / path, prefix, truth) for path, _, prefix, truth in _READ_BACK.findall(text)]
    if name == "deepspeed_zero3_bf16_w2":
        found.append(Inside(HOME / name / "ckpt", "", "fp32_master"))
    return found


def model_of(name: str) -> Path:
    """The checkpoint that holds the model."""
    found = checkpoints(name)
    return found[0].path if found else HOME / name / "ckpt"


def hashes(name: str, truth: str) -> dict[str, dict[str, Any]]:
    return json.loads((HOME / name / "truth" / f"{truth}.sha256.json").read_text())


def read_tensor(catalog: Catalog, fqn: str) -> bytes:
    """Put a tensor's bytes together from the chunks of a raw catalog."""
    entry, table = catalog.tensors[fqn], catalog.chunks
    out, itemsize = bytearray(entry.nbytes), entry.dtype.itemsize
    for row in entry.chunk_ids:
        source, region = catalog.files[table.file[row]], table.region(row)
        assert table.nbytes[row] == region.num_elements * itemsize
        start, stop = table.start[row], table.start[row] + table.nbytes[row]
        if not source.is_raw:
            data = bytes(source.decoded())[start:stop]
        else:
            with open(source.path, "rb") as file:
                file.seek(start)
                data = file.read(stop - start)
        if not entry.shape:
            return data
        for run in runs(relative_to(region, (0,) * len(entry.shape)), entry.shape):
            out[run.source * itemsize : (run.source + run.length) * itemsize] = data[
                run.target * itemsize : (run.target + run.length) * itemsize
            ]
    return bytes(out)


@pytest.mark.parametrize("name", NAMES)
def test_stored_tensors_are_the_truth(name):
    if name in REFUSED:
        with pytest.raises(SourceError, match=REFUSED[name]):
            formats.open(str(HOME / name / "ckpt"))
        return
    found = checkpoints(name)
    assert found or name in WITHOUT_READ_BACK
    for inside in found:
        checkpoint = formats.open(str(inside.path))
        expected = hashes(name, inside.truth)
        known = {
            fqn: expected[plain]
            for fqn in checkpoint.catalog.tensors
            if fqn.startswith(inside.prefix)
            and (plain := _WRAPPERS.sub("", fqn.removeprefix(inside.prefix))) in expected
        }
        stored = list(known)
        chosen = checkpoint.select(stored)
        assert list(chosen.tensors) == stored
        assert chosen.encoding == "raw"
        # One copy of tied weights is enough where the writer leaves out the other.
        assert len(expected) - len(known) == (name == "nemo_automodel_safetensors_w2")
        for fqn in stored:
            entry, truth = chosen.tensors[fqn], known[fqn]
            assert (entry.dtype.name, list(entry.shape)) == (
                truth["dtype"].removeprefix("torch."),
                truth["shape"],
            )
            assert hashlib.sha256(read_tensor(chosen, fqn)).hexdigest() == truth["sha256"], fqn


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_layouts(name):
    path = model_of(name)
    assert format_of(str(path)) == LAYOUTS.get(name, "dcp")
    checkpoint = formats.open(str(path))
    assert checkpoint.format.startswith(LAYOUTS.get(name, "dcp"))
    if name in WRITERS:
        assert checkpoint.writer == WRITERS[name]


@pytest.mark.parametrize("name", [name for name in AROUND if name in NAMES])
def test_the_directory_around(name):
    around, layout = AROUND[name]
    path = str(HOME / name / around)
    assert format_of(path) == layout
    found, inside = formats.open(path), formats.open(str(model_of(name)))
    assert (found.path, found.format) == (path, layout)
    assert set(found.catalog.tensors) == set(inside.catalog.tensors)


def test_megatron_keeps_its_own_names():
    name = "megatron_torch_dist_tp2"
    if name not in NAMES:
        pytest.skip("not among the checkpoints")
    checkpoint = formats.open(str(HOME / name / "ckpt"))
    assert "embedding.word_embeddings.weight" in checkpoint.catalog.tensors
    assert checkpoint.select(list(checkpoint.catalog.tensors)).encoding == "raw"


@pytest.mark.skipif("megatron_torch_dist_tp2" not in NAMES, reason="not among the checkpoints")
def test_megatrons_tensors_are_those_of_its_ranks(tmp_path):
    """Layers are stacked; of each the ranks hold parts along one dim, and of fc1 parts of both its halves."""
    home = HOME / "megatron_torch_dist_tp2"
    shardkit.consolidate(str(home / "ckpt"), str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    ranks = [load_file(home / "truth" / f"rank{rank}_state_dict.safetensors") for rank in range(2)]
    fused = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
    compared = set()
    for key in ranks[0]:
        name = key.partition("@")[0]
        parts = [rank[f"{name}@tp{number}"] for number, rank in enumerate(ranks)]
        layer = re.search(r"layers\.(\d+)\.(\w+)", name)
        name = re.sub(r"layers\.\d+\.", "layers.", name)
        if layer and layer[2] in fused:
            name = name.replace(f"{layer[2]}.weight", f"{fused[layer[2]]}.layer_norm_weight")
        whole = found[name][int(layer[1])] if layer else found[name]
        dim = next((dim for dim in range(whole.dim()) if whole.shape[dim] != parts[0].shape[dim]), None)
        if name.endswith("linear_fc1.weight"):
            parts = [
                half for halves in zip(*(part.chunk(2) for part in parts), strict=True) for half in halves
            ]
        assert torch.equal(whole, parts[0] if dim is None else torch.cat(parts, dim)), key
        compared.add(name)
    assert compared == found.keys()


def read_model(directory: Path) -> dict[str, tuple[str, list[int], str]]:
    """Every tensor of a Hub directory: dtype, shape, sha256; read without this library."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for fqn, entry in json.loads(data[8 : 8 + length]).items():
            if fqn != "__metadata__":
                start, stop = (8 + length + offset for offset in entry["data_offsets"])
                digest = hashlib.sha256(data[start:stop]).hexdigest()
                found[fqn] = (_SHORT_DTYPES.get(entry["dtype"], entry["dtype"]), entry["shape"], digest)
    return found


def as_found(expected: dict[str, dict[str, Any]]) -> dict[str, tuple[str, list[int], str]]:
    return {
        fqn: (truth["dtype"].removeprefix("torch."), truth["shape"], truth["sha256"])
        for fqn, truth in expected.items()
    }


consolidates = pytest.mark.skipif(not hasattr(shardkit, "consolidate"), reason="no consolidate")


HUB_NAMES = [
    name
    for name in NAMES
    if name not in {*REFUSED, *OWN_NAMES, *ADAPTERS, "megatron_torch_dist_tp2"}  # whose names are Megatron's
]


@consolidates
@pytest.mark.parametrize("name", HUB_NAMES)
def test_consolidated_is_the_truth(name, tmp_path):
    truth = HOME / name / "truth"
    shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"), base=str(truth / "hf"))
    is_master = name.startswith("deepspeed")
    expected = as_found(hashes(name, "fp32_master")) if is_master else read_model(truth / "hf")
    assert read_model(tmp_path / "out") == expected


@consolidates
@pytest.mark.parametrize("name", HUB_NAMES)
def test_consolidated_without_a_base(name, tmp_path):
    """Nothing tells then that the embeddings are tied: the second name may be there too."""
    if name == "hfwriter_sharded_w2":  # without a config either: nothing shows that all files are there
        with pytest.raises(SourceError, match="those of the last ranks may be missing"):
            shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"))
        return
    shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"))
    is_master = name.startswith("deepspeed")
    expected = (
        as_found(hashes(name, "fp32_master")) if is_master else read_model(HOME / name / "truth" / "hf")
    )
    found = read_model(tmp_path / "out")
    tied = found.keys() - expected.keys()
    assert {fqn: found[fqn] for fqn in expected} == expected
    assert tied <= {"lm_head.weight"}
    assert all(found[fqn] in expected.values() for fqn in tied)


@consolidates
@pytest.mark.parametrize("name", sorted(OWN_NAMES & set(NAMES)))
def test_names_that_are_not_the_hubs_are_kept(name, tmp_path):
    if name == "edge_dtypes_w2":  # safetensors has no complex128
        shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"), exclude=["*complex128"])
    else:
        shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"))
    expected = as_found(hashes(name, "state_dict"))
    found = read_model(tmp_path / "out")
    assert {fqn: found[fqn] for fqn in expected} == expected


@consolidates
@pytest.mark.parametrize("name", sorted(ADAPTERS & set(NAMES)))
def test_adapters(name, tmp_path):
    truth = HOME / name / "truth"
    base = str(truth / "adapter")
    shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"), base=base)
    assert read_model(tmp_path / "out") == read_model(truth / "adapter")


@consolidates
def test_averaged_weights(tmp_path):
    if "fsdp2_ema_w2" not in NAMES:
        pytest.skip("not among the checkpoints")
    source, out = HOME / "fsdp2_ema_w2" / "ckpt", tmp_path / "out"
    shardkit.consolidate(str(source), str(out), weights="ema")
    assert read_model(out) == as_found(hashes("fsdp2_ema_w2", "ema"))


@consolidates
def test_a_merged_adapter_is_what_peft_merges(tmp_path):
    if "peft_lora_fsdp2_full_w2" not in NAMES:
        pytest.skip("not among the checkpoints")
    home = HOME / "peft_lora_fsdp2_full_w2"
    options = {"merge_lora": True, "adapter_config": str(home / "truth" / "adapter")}
    shardkit.consolidate(str(home / "ckpt"), str(tmp_path / "out"), **options)
    assert read_model(tmp_path / "out") == read_model(home / "truth" / "merged")


RESHARDED = [name for name in NAMES if name not in {*REFUSED, "megatron_torch_dist_tp2"}]


@pytest.mark.parametrize("name", RESHARDED)
def test_resharded_is_the_truth(name, tmp_path):
    """Every tensor of the checkpoint; where the optimizer was in a form of its own, the model is below `model.`."""
    shardkit.reshard(str(model_of(name)), str(tmp_path / "out"), world_size=3)
    before, after = (formats.open(str(path)) for path in (model_of(name), tmp_path / "out"))
    head = "model." if before.contents.optimizer is not None else ""
    stored = list(before.catalog.tensors)
    assert {head + fqn for fqn in stored} <= set(after.catalog.tensors)
    old, new = before.select(stored), after.select([head + fqn for fqn in stored])
    for fqn in stored:
        assert new.tensors[head + fqn].dtype == old.tensors[fqn].dtype
        assert read_tensor(new, head + fqn) == read_tensor(old, fqn), fqn


@consolidates
@pytest.mark.parametrize("name", sorted(REFUSED.keys() & set(NAMES)))
def test_refused(name, tmp_path):
    with pytest.raises(SourceError, match=REFUSED[name]):
        shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
