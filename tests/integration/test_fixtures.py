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

import shardkit
from shardkit.core.catalog import Catalog
from shardkit.core.regions import relative_to, runs
from shardkit.errors import SourceError
from shardkit.formats.sharded.detect import layout_of, open_checkpoint

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
_SHORT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}

# Layout and writer of the checkpoint inside; what is not listed is plain DCP.
LAYOUTS = {
    "accelerate_fsdp1_nodcp_w2": "accelerate-bin",
    "accelerate_fsdp2_w2": "accelerate",
    "bytecheckpoint_fsdp2_w2": "bytecheckpoint",
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
    "bytecheckpoint_fsdp2_w2": ("ckpt/global_step_2", "bytecheckpoint"),
    "minitrainer_w2": ("ckpt/step_2", "mini-trainer"),
    "nemo_automodel_safetensors_w2": ("ckpt/epoch_0_step_2", "nemo-automodel"),
    "trainer_fsdp2_w2": ("ckpt/checkpoint-2", "accelerate"),
    "verl_fsdp1_w3": ("ckpt/global_step_2", "verl"),
    "verl_fsdp2_w2": ("ckpt/global_step_2", "verl"),
}
REFUSED = {"fsdp1_local_sd_w2": "flat"}
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
        if source.decode:
            data = bytes(source.decode())[start:stop]
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
            open_checkpoint(str(HOME / name / "ckpt"))
        return
    found = checkpoints(name)
    assert found or name in WITHOUT_READ_BACK
    for inside in found:
        checkpoint = open_checkpoint(str(inside.path))
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
    assert layout_of(str(path)) == LAYOUTS.get(name, "dcp")
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.layout.startswith(LAYOUTS.get(name, "dcp"))
    if name in WRITERS:
        assert checkpoint.writer == WRITERS[name]


@pytest.mark.parametrize("name", [name for name in AROUND if name in NAMES])
def test_the_directory_around(name):
    around, layout = AROUND[name]
    path = str(HOME / name / around)
    assert layout_of(path) == layout
    found, inside = open_checkpoint(path), open_checkpoint(str(model_of(name)))
    assert (found.path, found.layout) == (path, layout)
    assert set(found.catalog.tensors) == set(inside.catalog.tensors)


def test_megatron_keeps_its_own_names():
    name = "megatron_torch_dist_tp2"
    if name not in NAMES:
        pytest.skip("not among the checkpoints")
    checkpoint = open_checkpoint(str(HOME / name / "ckpt"))
    assert "embedding.word_embeddings.weight" in checkpoint.catalog.tensors
    assert checkpoint.select(list(checkpoint.catalog.tensors)).encoding == "raw"


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
    assert set(expected) <= set(found)
    assert {fqn: found[fqn][1:] for fqn in expected} == {fqn: value[1:] for fqn, value in expected.items()}


@consolidates
@pytest.mark.parametrize("name", sorted(ADAPTERS & set(NAMES)))
def test_adapters(name, tmp_path):
    truth = HOME / name / "truth"
    base = str(truth / "adapter")
    shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"), base=base)
    assert read_model(tmp_path / "out") == read_model(truth / "adapter")


@consolidates
@pytest.mark.parametrize("name", sorted(REFUSED.keys() & set(NAMES)))
def test_refused(name, tmp_path):
    with pytest.raises(SourceError, match=REFUSED[name]):
        shardkit.consolidate(str(HOME / name / "ckpt"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
