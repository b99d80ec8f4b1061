"""The engine against numpy: any placement, any dtype, any buffer size puts the right bytes in place."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from math import prod
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.mesh import Axis, Mesh
from shardkit.core.placements import Placement
from shardkit.core.regions import Region, Shape, full_region
from shardkit.core.text import MIB
from shardkit.core.threads import NoProgress, check_interrupt
from shardkit.errors import IntegrityError, ResourceError, UsageError
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.files.manifest import Unit
from shardkit.formats.dcp.images import DcpImages, Phase
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.transfer.execute import ExecuteOptions, Execution, FileDigest
from shardkit.transfer.plan import TransferPlan, build_plan
from tests.worlds.threads import interrupted, threads_left

Tensors = dict[str, tuple[DType, Shape, int | None]]
"""For each tensor: dtype, shape, and the dim that is cut (None where it is replicated)."""


def source(directory: Path, tensors: Tensors, pad: int) -> tuple[Catalog, dict[str, bytes]]:
    """Put random bytes for all tensors into one file, `pad` bytes apart."""
    random, data, content = numpy.random.default_rng(0), {}, bytearray()
    catalog = Catalog(format="safetensors", directory=str(directory))
    for fqn, (dtype, shape, _) in tensors.items():
        content += bytes(pad)
        data[fqn] = random.bytes(prod(shape) * dtype.itemsize)
        catalog.add_tensor(fqn, dtype, shape, iter([(0, len(content), len(data[fqn]), full_region(shape))]))
        content += data[fqn]
    path = directory / "source.bin"
    path.write_bytes(content)
    catalog.files.append(SourceFile(name="source.bin", path=str(path), size=len(content)))
    return catalog, data


def planned(
    catalog: Catalog, tensors: Tensors, num_shards: int, phase: Phase = lambda fqn: None
) -> tuple[DcpImages, TransferPlan]:
    layout = Layout(
        origin="declared",
        mesh=Mesh((Axis("dp_shard", num_shards, "shard"),)),
        units=(Unit(path="", class_name=None),),
        tensors={
            fqn: TensorLayout(fqn=fqn, shape=shape, placements=(Placement(dim),), unit=0)
            for fqn, (_, shape, dim) in tensors.items()
        },
    )
    dtypes = {fqn: dtype for fqn, (dtype, _, _) in tensors.items()}
    images = DcpImages(layout, dtypes, {fqn: fqn for fqn in tensors}, phase)
    return images, build_plan(images, catalog)


def execution(
    plan: TransferPlan,
    directory: Path,
    finish: Callable[[FileDigest, object], object] = lambda digest, _: None,
    progress: NoProgress | None = None,
    **options: int,
) -> Execution:
    return Execution(
        plan,
        str(directory),
        ExecuteOptions(**options),  # type: ignore[arg-type]
        finished={},
        on_finished=finish,
        progress=progress or NoProgress(),
    )


def run(plan: TransferPlan, directory: Path, **options: int) -> dict[str, FileDigest]:
    finished: list[FileDigest] = []
    digests, _ = execution(plan, directory, lambda digest, _: finished.append(digest), **options).run()
    assert {digest.name for digest in finished} == set(digests)
    return digests


def stored(images: DcpImages, directory: Path, fqn: str) -> list[tuple[Region, bytes]]:
    entry, table = images.catalog.tensors[fqn], images.catalog.chunks
    found = []
    for row, (start, nbytes) in zip(entry.chunk_ids, images.data_places(fqn), strict=True):
        with open(directory / images.catalog.files[table.file[row]].name, "rb") as file:
            file.seek(start)
            found.append((table.region(row), file.read(nbytes)))
    return found


def cut(data: bytes, dtype: DType, shape: Shape, region: Region) -> bytes:
    whole = numpy.frombuffer(data, dtype=f"V{dtype.itemsize}").reshape(shape)
    return whole[tuple(slice(o, o + s) for o, s in zip(*region, strict=True))].tobytes()


@st.composite
def tensor_sets(draw: st.DrawFn) -> Tensors:
    tensors: Tensors = {}
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) if shape else None
        dtype = draw(st.sampled_from([BY_NAME[name] for name in ("bool", "bfloat16", "int32", "complex128")]))
        tensors[f"t{index}"] = (dtype, shape, dim)
    return tensors


@settings(max_examples=60, deadline=None)
@given(tensor_sets(), st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_every_chunk_has_its_bytes(tensors: Tensors, num_shards: int, pad: int, digests: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        catalog, data = source(directory, tensors, pad)
        images, plan = planned(catalog, tensors, num_shards)
        files = run(plan, directory, digests=digests, max_memory_bytes=1)
        for fqn, (dtype, shape, _) in tensors.items():
            chunks = stored(images, directory, fqn)
            for region, found in chunks:
                assert found == cut(data[fqn], dtype, shape, region)
            assert sum(region.num_elements for region, _ in chunks) == prod(shape)
        for image in images:
            content = (directory / image.name).read_bytes()
            assert len(content) == image.size
            assert files[image.name].crc32 == (crc32(content) if digests else None)


def test_a_task_leaves_what_lies_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second task may begin within the zeros that a stream writes in place of a short gap."""
    monkeypatch.setattr("shardkit.transfer.plan._TASK_NBYTES", 1)
    tensors: Tensors = {f"t{number}": (BY_NAME["int32"], (3,), 0) for number in range(3)}
    catalog, data = source(tmp_path, tensors, 0)
    images, plan = planned(catalog, tensors, 1)
    assert [0 < task.begin < 4096 for task in plan.tasks[:2]] == [False, True]
    run(plan, tmp_path, jobs=1)
    assert {fqn: stored(images, tmp_path, fqn)[0][1] for fqn in tensors} == data


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tensors_larger_than_every_buffer(dim: int, tmp_path: Path) -> None:
    shape = (130, 67, 41)
    tensors: Tensors = {"w": (BY_NAME["float32"], shape, dim)}
    catalog, data = source(tmp_path, tensors, 3)
    images, plan = planned(catalog, tensors, 4)
    options = ExecuteOptions(max_memory_bytes=1)
    assert options.band_bytes < prod(shape) * 4
    assert (dim != 0) == bool(plan.scattered)
    run(plan, tmp_path, max_memory_bytes=1)
    for region, found in stored(images, tmp_path, "w"):
        assert found == cut(data["w"], BY_NAME["float32"], shape, region)


def test_a_chunked_source_is_streamed_across_its_chunks(tmp_path: Path) -> None:
    """What resharding will need: holes that several source chunks fill in order."""
    rows, dtype = 12, BY_NAME["int32"]
    data = numpy.random.default_rng(1).bytes(rows * 5 * 4)
    (tmp_path / "s").write_bytes(data)
    catalog = Catalog(format="dcp", directory=str(tmp_path))
    catalog.files.append(SourceFile(name="s", path=str(tmp_path / "s"), size=len(data)))
    cuts = [0, 5, 6, 12]
    pieces = [(0, a * 20, (b - a) * 20, Region((a, 0), (b - a, 5))) for a, b in itertools.pairwise(cuts)]
    catalog.add_tensor("w", dtype, (rows, 5), iter(pieces))
    for dim in (0, 1):
        images, plan = planned(catalog, {"w": (dtype, (rows, 5), dim)}, 3)
        run(plan, tmp_path)
        for region, found in stored(images, tmp_path, "w"):
            assert found == cut(data, dtype, (rows, 5), region)


SHARED: Tensors = {
    "large": (BY_NAME["bfloat16"], (700, 600), 0),
    "small": (BY_NAME["int32"], (5,), None),
    "other": (BY_NAME["int32"], (999, 400), 0),
}


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("refused", ["by this file system", "never", "now and then"])
def test_what_cannot_be_shared_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: bool, refused: str
) -> None:
    catalog, data = source(tmp_path, SHARED, 7)
    starts = {fqn: catalog.chunks.start[entry.first_chunk] for fqn, entry in catalog.tensors.items()}
    images, plan = planned(catalog, SHARED, 3, phase=starts.__getitem__)
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    plain.mkdir()
    shared.mkdir()
    expected = run(plan, plain, digests=digests)
    asked, alone = list[int](), threading.Lock()

    def clone_range(source_fd: int, source_start: int, fd: int, start: int, nbytes: int) -> None:
        """Do what a file system does that shares extents, by copying."""
        assert alone.acquire(blocking=False), "two threads clone at once"
        asked.append(nbytes)
        assert source_start % storage.BLOCK == start % storage.BLOCK == nbytes % storage.BLOCK == 0
        try:
            if refused == "now and then" and len(asked) % 2:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            assert os.pwrite(fd, os.pread(source_fd, nbytes, source_start), start) == nbytes
        finally:
            alone.release()

    if refused != "by this file system":
        monkeypatch.setattr(storage, "clone_range", clone_range)
    assert run(plan, shared, digests=digests, share_extents=True) == expected
    assert len(asked) > 3 or refused == "by this file system"
    for image in images:
        assert (shared / image.name).read_bytes() == (plain / image.name).read_bytes()
    for fqn, (dtype, shape, _) in SHARED.items():
        for region, content in stored(images, shared, fqn):
            assert content == cut(data[fqn], dtype, shape, region)


@pytest.fixture
def plan(tmp_path: Path) -> TransferPlan:
    """What reads 4 MiB of `source.bin`."""
    tensors: Tensors = {"layers.0.weight": (BY_NAME["uint8"], (4096, 1024), 0)}
    catalog, _ = source(tmp_path, tensors, 0)
    return planned(catalog, tensors, 2)[1]


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [(lambda path: os.truncate(path, 1 << 20), IntegrityError), (os.unlink, ResourceError)],
    ids=["shrank", "vanished"],
)
def test_a_source_that_is_not_whole_is_named(
    plan: TransferPlan, tmp_path: Path, spoil: Callable[[Path], None], kind: type[Exception]
) -> None:
    spoil(tmp_path / "source.bin")
    with pytest.raises(kind, match=r"source\.bin"):
        run(plan, tmp_path)


def test_a_source_that_changes_while_read_is_noticed(plan: TransferPlan, tmp_path: Path) -> None:
    class Meddler(NoProgress):
        def advance(self, num_bytes: int) -> None:
            path = tmp_path / "source.bin"
            with path.open("r+b") as file:
                file.write(b"changed")
            os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # a clock of jiffies may stand still

    with pytest.raises(IntegrityError, match="changed while being read"):
        execution(plan, tmp_path, progress=Meddler()).run()


def test_no_thread_outlives_a_run_that_was_given_up(tmp_path: Path) -> None:
    tensors: Tensors = {"w": (BY_NAME["int32"], (64, 8), 0)}
    catalog, _ = source(tmp_path, tensors, 0)
    _, plan = planned(catalog, tensors, 32)
    (tmp_path / "out").mkdir()
    whole, finished, heard = list[str](), list[str](), threading.Event()

    def finish(digest: FileDigest, _: object) -> None:
        """The first one interrupts the run; none ends before that was heard."""
        whole.append(digest.name)
        if len(whole) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        heard.wait()
        finished.append(digest.name)

    with interrupted(heard.set):
        execution(plan, tmp_path / "out", finish).run()
    assert threads_left() == []
    assert sorted(finished) == sorted(whole)
    assert finished


Sending = Callable[[Callable[[Path], None]], Execution]
ROWS_AND_COLUMNS: Tensors = {"w": (BY_NAME["int32"], (64, 8), 0), "v": (BY_NAME["int32"], (8, 64), 1)}


class TestFilesThatAreSent:
    """Few are there at a time: whoever is handed one removes it."""

    @pytest.fixture
    def sending(self, tmp_path: Path) -> Sending:
        catalog, _ = source(tmp_path, ROWS_AND_COLUMNS, 0)
        _, plan = planned(catalog, ROWS_AND_COLUMNS, 16)
        out = tmp_path / "out"
        out.mkdir()

        def make(send: Callable[[Path], None]) -> Execution:
            return execution(
                plan.in_order(), out, lambda digest, _: send(out / digest.name), jobs=4, max_unsent_files=2
            )

        return make

    def test_two_are_there_at_a_time(self, sending: Sending, tmp_path: Path) -> None:
        sent, most = dict[str, bytes](), list[int]()

        def send(path: Path) -> None:
            most.append(len(list(path.parent.iterdir())))
            sent[path.name] = path.read_bytes()
            path.unlink()

        sending(send).run()
        assert max(most) <= 2
        catalog, _ = source(tmp_path, ROWS_AND_COLUMNS, 0)
        (tmp_path / "whole").mkdir()
        run(planned(catalog, ROWS_AND_COLUMNS, 16)[1], tmp_path / "whole")
        assert sent == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}

    def test_none_is_written_after_one_that_cannot_be_sent(self, sending: Sending) -> None:
        tried = list[str]()

        def send(path: Path) -> None:
            tried.append(path.name)
            raise ResourceError("the store fails")

        with pytest.raises(ResourceError, match="the store fails"):
            sending(send).run()
        assert len(tried) <= 2
        assert threads_left() == []

    def test_ctrl_c_ends_what_is_being_sent(self, sending: Sending) -> None:
        begun, ended = list[str](), list[str]()

        def send(path: Path) -> None:
            begun.append(path.name)
            if len(begun) == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            try:
                while True:
                    check_interrupt()
            except CancelledError:
                ended.append(path.name)
                raise

        with interrupted():
            sending(send).run()
        assert sorted(ended) == sorted(begun)
        assert 1 <= len(begun) <= 2
        assert threads_left() == []


def test_memory_for_uploads() -> None:
    """It is taken from the buffers: two uploads, or one where memory is short, with fewer threads if need be."""
    chosen = {
        mib: (
            options.max_unsent_files,
            options.jobs,
            options.max_memory_bytes // MIB,
            options.upload_bytes // MIB,
        )
        for mib in (256, 84, 83, 42)
        for options in [ExecuteOptions(jobs=2, max_memory_bytes=mib * MIB).through_scratch(1000)]
    }
    assert chosen == {256: (2, 2, 176, 80), 84: (2, 2, 4, 80), 83: (1, 2, 43, 40), 42: (1, 1, 2, 40)}
    with pytest.raises(UsageError, match="--max-memory is too little for a store") as caught:
        ExecuteOptions(max_memory_bytes=41 * MIB).through_scratch(1000)
    assert caught.value.hint == "give at least --max-memory 42MiB"
    assert (
        ExecuteOptions(max_memory_bytes=1 << 30).through_scratch(180_000 * MIB).upload_bytes
        == 2 * 5 * 20 * MIB
    )
