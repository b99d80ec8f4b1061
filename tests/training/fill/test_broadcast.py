"""Messages of a broadcast tile every shard; and what a rank takes, in bytes read and memory, for either strategy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region, find_tiling_error, full_region, intersect
from shardkit.training.fill.broadcast import BAND_NBYTES, Message, SentTensor, build_messages, packed_layout
from tests.training.finalize_world_memory import LAYERS, MEASURES, ROWS, WIDTH
from tests.worlds.processes import run_script

MIB = 1 << 20
SHAPES = [(), (3,), (0, 4), (5000, 1000), (7, 9), (1, 3 * BAND_NBYTES), (2, 2)]
MODEL_NBYTES = 2 * LAYERS * (2 * WIDTH * ROWS + WIDTH)


def tensors() -> list[SentTensor]:
    entries = (
        TensorEntry(fqn=str(at), dtype=BY_NAME["float32"], shape=shape, first_chunk=0, num_chunks=0)
        for at, shape in enumerate(SHAPES)
    )
    return [SentTensor(entry, torch.bfloat16) for entry in entries]


def test_every_element_is_sent_once_in_bounded_pieces() -> None:
    sent = tensors()
    boxes: dict[int, list[Region]] = {at: [] for at in range(len(sent))}
    for message in build_messages(sent):
        assert sum(box.num_elements * 4 for _, box in message.bands) <= BAND_NBYTES
        for number, box in message.bands:
            boxes[number].append(box)
    for number, (entry, _) in enumerate(sent):
        assert find_tiling_error(entry.shape, boxes[number]) is None
        assert entry.num_elements == sum(box.num_elements for box in boxes[number])


def test_the_last_message_is_a_status() -> None:
    last = list(build_messages(tensors()))[-1]
    assert last == Message((), True)
    assert packed_layout(last.bands, [], {}) == ((), 16)


def test_parts_of_a_packed_message_are_aligned_and_apart() -> None:
    sent = tensors()
    regions = {
        1: [Region((1,), (2,))],
        4: [Region((0, 3), (7, 2)), Region((0, 6), (7, 2))],
        6: [full_region((2, 2))],
    }
    for message in build_messages(sent):
        parts, nbytes = packed_layout(message.bands, sent, regions)
        end = 1  # the status
        for part in parts:
            assert part.start % 16 == 0
            assert part.start >= end
            end = part.stop
            assert part.stop - part.start == part.box.num_elements * 2
            assert any(intersect(part.box, region) == part.box for region in regions[part.number])
        assert end <= nbytes


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank took, by measurement."""
    out = tmp_path_factory.mktemp("memory")
    run_script("training/finalize_world_memory.py", str(out))
    return {
        name: [json.loads(Path(out, f"{name}-{rank}.json").read_text()) for rank in range(size)]
        for size, measures in MEASURES.items()
        for name in measures
    }


@pytest.mark.prove
@pytest.mark.dist
@pytest.mark.parametrize("name", [name for measures in MEASURES.values() for name in measures])
def test_memory_beyond_the_shard_is_bounded(taken: dict[str, list[dict[str, Any]]], name: str) -> None:
    for rank, each in enumerate(taken[name]):
        assert each["extra"] < 32 * MIB, f"rank {rank}: {each}"
        assert each["held"] >= MODEL_NBYTES // 4


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *(("direct", 2), ("direct-presharded", 2), ("direct-cast", 2)),
        *(("direct-replicas", 4), ("direct-plain", 4), ("direct-both", 4)),
    ],
)
def test_no_byte_is_read_twice(taken: dict[str, list[dict[str, Any]]], name: str, parts: int) -> None:
    """Replicas divide what they have in common, and columns cost no more than their bytes."""
    for each in taken[name]:
        assert abs(each["read"] - MODEL_NBYTES / parts) < 2 * MIB + MODEL_NBYTES / 50


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "sources"),
    [("broadcast", {0}), ("broadcast-cast", {0}), ("broadcast-both", {0}), ("broadcast-replica", {0, 2})],
)
def test_only_sources_read(taken: dict[str, list[dict[str, Any]]], name: str, sources: set[int]) -> None:
    for rank, each in enumerate(taken[name]):
        expected = MODEL_NBYTES if rank in sources else 0
        assert abs(each["read"] - expected) < 2 * MIB
