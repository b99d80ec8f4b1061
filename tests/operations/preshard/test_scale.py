"""A thousand ranks: bounded memory, few open files, and a rank's list without the whole `.metadata`."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from tests.answers import HIGH_WATER, answer_of
from tests.formats.reading import chunk_list_of

# Plans 1,024 ranks x 600 tensors and writes their `.metadata`; memory is this image's own high-water mark
# (`ru_maxrss` would also count the process that was forked, which may be larger).
PLAN = f"""{HIGH_WATER}
import json, os, sys
from shardkit.formats.dcp.writer import write_metadata
from shardkit import formats
from shardkit.operations.preshard.job import build_job
from shardkit.operations.preshard.options import PreshardOptions
job = build_job(formats.open(sys.argv[1]), PreshardOptions(sys.argv[1], world_size=1024, digest="none"))
with open(sys.argv[2], "wb") as file:
    write_metadata(file, job.output.catalog, job.aliases)
print(json.dumps([len(job.output.catalog.chunks), high_water(), "torch" in sys.modules]))
"""
FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import shardkit
print(shardkit.preshard(sys.argv[1], sys.argv[2], world_size=1024, wrap="none", jobs=4).num_files)
"""


def sparse_model(directory: Path, num_tensors: int, shape: tuple[int, int]) -> Path:
    """A valid Hub model whose data is a hole in the file."""
    directory.mkdir()
    header, offset = {}, 0
    for index in range(num_tensors):
        stop = offset + shape[0] * shape[1] * 2
        name = f"model.layers.{index // 12}.part{index % 12}.weight"
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return directory


@pytest.mark.prove
def test_600_000_chunks_are_planned_and_described_within_a_gibibyte(tmp_path: Path) -> None:
    model = sparse_model(tmp_path / "model", 600, (1024, 8))
    num_chunks, peak, has_torch = answer_of(PLAN, model, tmp_path / ".metadata")
    assert num_chunks == 600 * 1024
    assert peak < 1 << 30
    assert not has_torch
    assert (tmp_path / ".metadata").stat().st_size > 50_000_000


@pytest.mark.prove
def test_1024_files_are_written_with_64_open_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert answer_of(FEW_FILES, sparse_model(tmp_path / "model", 5, (1030, 4)), out) == 1024
    assert len(list(out.glob("*.distcp"))) == 1024
    listed = chunk_list_of(str(out), "__514_0.distcp")  # ceil(1030 / 1024) = 2 rows for each of 515 ranks
    assert [chunk.region.offsets for chunk in listed.chunks] == [(1028, 0)] * 5
    assert [chunk.region.sizes for chunk in chunk_list_of(str(out), "__515_0.distcp").chunks] == [(0, 4)] * 5
    assert chunk_list_of(str(out), "__1023_0.distcp").chunks == ()
    assert os.stat(out / "__1023_0.distcp").st_size == 0
