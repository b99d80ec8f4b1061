"""What is put together and checked in columns is what is found chunk by chunk."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.core.catalog import SourceFile, TensorEntry
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region, find_tiling_error
from shardkit.errors import SourceError
from shardkit.formats.dcp import directory
from shardkit.formats.dcp import metadata as dcp_metadata
from shardkit.formats.dcp.directory import are_apart, are_row_shards, check_extents, check_tiling
from shardkit.formats.dcp.metadata import DcpMetadata, join_fields
from shardkit.formats.dcp.vocabulary import RECORDS, Index, StorageInfo, StorageTable, Tensor

NEVER = 1 << 40


def storage(entries: list[tuple[str, tuple[int, ...] | None, int]]) -> dict[object, object]:
    table = StorageTable()
    for fqn, corner, place in entries:
        index, info = Index(), StorageInfo()
        index.fqn, index.corner = fqn, None if corner is None else array("q", corner).tobytes()
        info.path, info.offset, info.length, info.transforms = f"__{place % 3}_0.distcp", place, 10, ()
        table.append(index, info)
    return {RECORDS: table}


def tensor(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Tensor:
    made = Tensor()
    made.dtype, made.shape, made.num_chunks = BY_NAME["int8"], shape, len(boxes)
    for offsets, sizes in boxes:
        made.boxes.extend((*offsets, *sizes))
    return made


def joined(fields: dict[str, object], min_columns: int, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(dcp_metadata, "MIN_COLUMNS", min_columns)
    monkeypatch.setattr(dcp_metadata, "MIN_TOTAL", min_columns)
    try:
        found = join_fields(fields, "x")
    except SourceError as error:
        return error.message, error.problems
    table = found.chunks
    regions = [table.region(row) for row in range(len(table))]
    return list(table.file), list(table.start), list(table.nbytes), regions, found.tensors, found.orphans


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, object]:
    """Two tensors whose chunks and places are almost what a trainer writes."""
    entries: list[tuple[str, tuple[int, ...] | None, int]] = []
    tensors: dict[str, object] = {}
    for name in ("a", "b"):
        width = draw(st.integers(0, 2))
        rows = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
        boxes = [((start, *[0] * width), (draw(st.integers(0, 2)), *[2] * width)) for start in sorted(rows)]
        if draw(st.booleans()):
            draw(st.randoms()).shuffle(boxes)
        tensors[name] = tensor((6, *[2] * width), boxes)
        corners = list(dict.fromkeys(offsets for offsets, _ in boxes))
        if draw(st.integers(0, 5)) == 0:
            corners = corners[1:] + draw(
                st.sampled_from([[], corners[:1] * 2, [(9, *[0] * width)], [(1, 2, 3, 4)]])
            )
        entries += [(name, corner, len(entries) + n) for n, corner in enumerate(corners)]
        if draw(st.integers(0, 9)) == 0:
            entries.append((name, None, 77))
    if draw(st.booleans()):
        draw(st.randoms()).shuffle(entries)
    return {"state_dict_metadata": tensors, "storage_data": storage(entries)}


@settings(max_examples=400, deadline=None)
@given(checkpoints())
def test_joined_as_chunk_by_chunk(fields: dict[str, object]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert joined(fields, 1, monkeypatch) == joined(fields, NEVER, monkeypatch)


def test_what_trainers_write_is_joined_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [((min(row, 5), 0), (1 if row < 5 else 0, 2)) for row in range(9)]
    entries = [("a", offsets, n) for n, offsets in enumerate(dict.fromkeys(o for o, _ in boxes))]
    fields = {"state_dict_metadata": {"a": tensor((5, 2), boxes)}, "storage_data": storage(entries)}
    expected = joined(fields, NEVER, monkeypatch)
    monkeypatch.delattr(dcp_metadata, "_regions")  # what goes through the chunks one by one
    assert joined(fields, 1, monkeypatch) == expected


def test_a_chunk_that_is_listed_and_placed_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = [((row,), (1,)) for row in (0, 1, 0)]
    fields = {
        "state_dict_metadata": {"a": tensor((2,), boxes)},
        "storage_data": storage([("a", offsets, n) for n, (offsets, _) in enumerate(boxes)]),
    }
    expected = joined(fields, NEVER, monkeypatch)
    assert "twice" in str(expected)
    assert joined(fields, 1, monkeypatch) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    st.booleans(),
)
@example((1,), [(0, 1, 0), (2, 0, 0)], False)  # an empty chunk that lies outside
def test_row_shards_tile_the_tensor(
    shape: tuple[int, ...], cuts: list[tuple[int, int, int]], tidy: bool
) -> None:
    boxes, at = array("q"), 0
    for start, size, column in cuts:
        offsets = [at if tidy else start, *[0 if tidy else column % 2] * (len(shape) - 1)]
        at += size
        boxes.extend((*offsets, size, *(shape[1:] if tidy else [column] * (len(shape) - 1))))
    width = 2 * len(shape)
    regions = [
        Region(tuple(boxes[i : i + len(shape)]), tuple(boxes[i + len(shape) : i + width]))
        for i in range(0, len(boxes), width)
    ]
    if are_row_shards(shape, boxes):
        assert find_tiling_error(shape, regions) is None
    elif tidy and 0 not in shape:
        assert at != shape[0]  # what trainers write is known


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(-1, 9), st.integers(-1, 4)), min_size=1, max_size=5),
    st.booleans(),
)
def test_apart_are_extents_without_a_problem(extents: list[tuple[int, int, int]], end_to_end: bool) -> None:
    if end_to_end:
        extents = [(file, 3 * n, 3) for n, (file, _, _) in enumerate(extents)]
    sizes = [12, 10]
    metadata = DcpMetadata()
    for file, start, nbytes in extents:
        metadata.chunks.append(file, start, nbytes, Region((0,), (1,)))
    table = metadata.chunks
    answers = [are_apart(table.file, table.start, table.nbytes, sizes, ())]
    first, *rest = extents
    answers.append(
        are_apart(array("i", [first[0]]), array("q", [first[1]]), array("q", [first[2]]), sizes, rest)
    )
    assert answers[0] == answers[1]
    inside = all(
        start >= 0 and nbytes > 0 and start + nbytes <= sizes[file] for file, start, nbytes in extents
    )
    bytes_held = [(file, at) for file, start, nbytes in extents for at in range(start, start + nbytes)]
    assert answers[0] == (inside and len(bytes_held) == len(set(bytes_held)))


def said_of(metadata: DcpMetadata, files: list[SourceFile]) -> list[object]:
    """What the checks of extents and tiling refuse."""
    said: list[object] = []
    for check in (lambda: check_extents(metadata, files), lambda: check_tiling(metadata)):
        try:
            check()
        except SourceError as error:
            said.append((error.message, error.problems))
    return said


def test_problems_are_told_as_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred chunks, one of which is wrong: the columns leave it to the words of the slow way."""
    for trial in range(60):
        rng = random.Random(trial)
        metadata = DcpMetadata()
        rows = [[n, 10 * n, 10, n, 1] for n in range(100)]  # file, start, length, offset, size
        if trial:
            rows[rng.randrange(100)][rng.randrange(1, 5)] += rng.choice((-1, 1, 5))
        for file, start, nbytes, offset, size in rows:
            metadata.chunks.append(file % 2, start, nbytes, Region((offset,), (size,)))
        metadata.tensors["w"] = TensorEntry(
            fqn="w", dtype=BY_NAME["int8"], shape=(100,), first_chunk=0, num_chunks=100
        )
        files = [SourceFile(name=f"f{n}", path="", size=1000) for n in range(2)]
        answers = []
        for least in (1, NEVER):
            monkeypatch.setattr(directory, "MIN_COLUMNS", least)
            monkeypatch.setattr(directory, "MIN_TOTAL", least)
            answers.append(said_of(metadata, files))
        assert answers[0] == answers[1]
        assert bool(answers[0]) <= bool(trial)
