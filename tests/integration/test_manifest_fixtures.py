"""Manifests of checkpoints that trainers' own code wrote, and damage in each of their files.

Runs where the environment variable SHARDKIT_FIXTURES names a directory with `sharded/<name>/ckpt`.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import shardkit
from tests.integration.test_fixtures import HOME
from tests.manifests import write_file_list
from tests.operations.verify.test_verify import flipped

# One of each kind of layout.
NAMES = (
    "accelerate_fsdp1_nodcp_w2",
    "deepspeed_zero3_bf16_w2",
    "fsdp1_local_sd_w2",
    "fsdp2_tp_2x2",
    "hfwriter_sharded_w2",
    "lightning_fsdp_w2",
    "megatron_torch_dist_tp2",
    "minitrainer_w2",
    "nemo_automodel_safetensors_w2",
    "torch_checkpointing_w2",
    "trainer_fsdp2_w2",
    "verl_fsdp1_w3",
    "writer_safetensors_fmt_w2",
    "writer_zstd_w2",
)

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not HOME.is_dir(), reason="SHARDKIT_FIXTURES names no directory with checkpoints"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_is_found(name: str, tmp_path: Path) -> None:
    given = HOME / name / "ckpt"
    try:
        given = Path(shardkit.resolve_checkpoint(given).path)
    except shardkit.SourceError:  # weights that cannot be taken, in a checkpoint that is whole
        pass
    path, pick = tmp_path / given.name, random.Random(name)
    shutil.copytree(given, path)
    write_file_list(path)
    assert shardkit.verify(path, full=True).problems == ()
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and os.path.getsize(file)]
    num_named = 0
    for file in files:
        for _ in range(3):
            with flipped(file, pick.randrange(os.path.getsize(file)), pick.randrange(1, 256)):
                problems = shardkit.verify(path, full=True).problems
            named = [problem for problem in problems if problem.file == str(file.relative_to(path))]
            assert named, file
            num_named += any(problem.tensor for problem in named)
    assert num_named
