"""Moving the bytes of a plan, with a few threads and bounded memory.

Scattered tensors are dealt out first. Then every image is written front to back, in stretches. A file is
handed over as finished once all of it is on disk. A run that stops before leaves files that were not handed
over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Protocol

from shardkit.core.catalog import Computed
from shardkit.core.dtypes import DType
from shardkit.core.text import KIB, MIB, escape, format_size
from shardkit.core.threads import Progress, heed, run_all, until_done
from shardkit.errors import ResourceError, UsageError
from shardkit.files import storage
from shardkit.files.location import location_of
from shardkit.files.remote.objects import NUM_SENDS, upload_nbytes
from shardkit.transfer.checks import EntryReading, Readings, SourceCheck, pack
from shardkit.transfer.convert import one_thread_each
from shardkit.transfer.fill import CrcPiece, Filler, Scatter, TaskOutput, crc_of, image_crc
from shardkit.transfer.images import Image
from shardkit.transfer.plan import Task, TransferPlan, plan_reading
from shardkit.transfer.sources import SourceFiles, is_far
from shardkit.transfer.stream import Controls

_log = logging.getLogger("shardkit")

_BUFFER_BYTES = MIB  # fits the processor's cache; 8 MiB is slower on every file system that was tried
_BAND_BYTES = 16 * MIB
# A few thousand tensors lie between one shard's records and the next one's; with more tensors some are read
# twice.
_RECENT_BYTES = 16 * MIB
_STORE_JOBS, _MIN_JOB_BYTES = 4, 2 * MIB
_LOOK_S = 0.5  # a run that has ended is noticed, whoever ended it
_SYNC_THREADS = 8
"""Threads that wait for the disk, while others move bytes. Syncs that wait together share one commit of the
file system's log."""
DAMAGED = "use another copy of the checkpoint; --check-source off takes the damaged bytes as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteOptions:
    """How to move."""

    jobs: int = 2
    """Threads."""
    max_memory_bytes: int = 256 * MIB
    """Bound on all buffers together."""
    digests: bool = True
    """Take CRC-32s on the way."""
    share_extents: bool = False
    """Clone blocks instead of copying them where a range allows it."""
    check_source: bool = True
    """Compare what is read with the CRC-32s that the source records."""
    infinite: Callable[[str, DType], None] = field(default=lambda fqn, dtype: None, compare=False)
    """See `Controls`."""
    upload_bytes: int = 0
    """What parts of files take on their way into a store; 0 where files are written to a disk."""

    max_unsent_files: int = 0
    """Files that are written and not yet handed over at a time, where that sends them; 0 for any number."""

    def through_scratch(self, largest_bytes: int) -> ExecuteOptions:
        """Return these options for files that are written into scratch and sent into a bucket; the plan is `in_order`.

        Two files are in scratch at a time, or one if there is too little memory for two uploads.

        Args:
            largest_bytes: size of the largest file.

        Raises:
            UsageError: there is too little memory for one upload.
        """
        upload = upload_nbytes(largest_bytes)
        for num_files in range(NUM_SENDS, 0, -1):
            buffers = self.max_memory_bytes - num_files * upload
            if buffers >= self.jobs * _MIN_JOB_BYTES:
                return replace(
                    self,
                    max_memory_bytes=buffers,
                    upload_bytes=num_files * upload,
                    max_unsent_files=num_files,
                )
        if self.jobs > 1:
            return replace(self, jobs=self.jobs - 1).through_scratch(largest_bytes)
        needed = _MIN_JOB_BYTES + upload
        raise UsageError(
            f"--max-memory is too little for a store: an upload takes {format_size(needed)}",
            hint=f"give at least --max-memory {-(-needed // MIB)}MiB",
        )

    @property
    def buffer_bytes(self) -> int:
        """Size of a thread's output buffer, and of its source buffer where it converts."""
        return max(min(_BUFFER_BYTES, self.max_memory_bytes // (4 * self.jobs)), 64 * KIB)

    @property
    def band_bytes(self) -> int:
        """Source bytes held while a tensor is scattered; a thread holds up to four times as many."""
        return max(min(_BAND_BYTES, self.max_memory_bytes // (8 * self.jobs)), 64 * KIB)

    @property
    def recent_bytes(self) -> int:
        """Source bytes that all threads together keep from small reads, for neighbouring records."""
        return min(_RECENT_BYTES, self.max_memory_bytes // 16)

    def buffers_bytes(self, plan: TransferPlan) -> int:
        """Return the most bytes of all buffers together that a plan takes."""
        per_job = 2 * self.buffer_bytes + self.band_bytes // 2  # a stream, a conversion, a gathered band
        if plan.scattered:
            per_job = max(per_job, 4 * self.band_bytes)
        return self.jobs * per_job + self.recent_bytes

    def held_bytes(self, plan: TransferPlan) -> int:
        """Return how much of objects in stores is held and under way; 0 where no source lies in one."""
        return self.max_memory_bytes - self.buffers_bytes(plan) if is_far(plan.catalog) else 0

    def peak_bytes(self, plan: TransferPlan) -> int:
        """Return the most bytes that moving takes: of all buffers, of what is held of a store, and of parts."""
        return self.buffers_bytes(plan) + self.held_bytes(plan) + self.upload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """A finished file."""

    name: str
    size: int
    crc32: int | None
    """Of the whole file; None if digests are off."""
    data_crcs: tuple[int, ...]
    """CRC-32 of what fills each hole, in file order; empty where digests are off."""
    sha256: str | None = None
    """Of the whole file, in hex; None unless a part of a divided job took it for whoever describes the output."""


class Describer(Protocol):
    """Writes what lies beside the images."""

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Write the rest, now that every image is on disk; last of all what makes the directory complete.

        Args:
            digests: of every file, those of an interrupted run included.
            scattered: CRC-32 of every scattered tensor, by its source name.
        """
        ...


@dataclass(slots=True)
class _ImageState:
    """What is known of an unfinished image."""

    tasks_left: int = 0
    stretches: dict[int, TaskOutput] = field(default_factory=dict)
    """By first piece."""


class Execution:
    """One run of a plan into a directory.

    Args:
        plan: what to move.
        directory: where the images go; it exists.
        finished: files that an earlier run finished, by name. They are not touched.
        foreign: files that other processes write. They are not touched either, and what is scattered over them alone is
            not read.
        scattered: the CRC-32s of scattered tensors that are known already, None for those that have none. These
            tensors are not read for the sake of it.
        read_for: gathered tensors that are read as a whole for their CRC-32 though files are left to others -> the file
            that this reading is told with.
        on_finished: told of each file once it is on disk, and of what was read for it; called from any
            thread.
        progress: told of the bytes, and that the phase ends with the last of them.
        check: compares what is read with what the source records. It has what was read for the finished
            files.
    """

    def __init__(
        self,
        plan: TransferPlan,
        directory: str,
        options: ExecuteOptions,
        *,
        finished: Mapping[str, FileDigest],
        foreign: Collection[str] = (),
        scattered: Mapping[str, int | None] = MappingProxyType({}),
        read_for: Mapping[str, str] = MappingProxyType({}),
        on_finished: Callable[[FileDigest, Readings], None],
        progress: Progress,
        check: SourceCheck | None = None,
    ) -> None:
        self.plan, self._directory, self._options = plan, directory, options
        self._digests = dict(finished)
        self._foreign_files, self._skipped = frozenset(foreign), frozenset(finished) | frozenset(foreign)
        self._on_finished, self._source_check, self._progress = on_finished, check, progress
        self._controls = Controls(
            digests=options.digests, check=self._check, advance=progress.advance, infinite=options.infinite
        )
        self._stop, self._is_over, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._states: dict[int, _ImageState] = {}
        self._unsent, self._is_sent = set[str](), threading.Condition()
        self._interrupt = threading.Event()
        self._thread = threading.local()
        self._read_for = read_for
        self.scattered = dict(scattered)
        """CRC-32 of every scattered tensor that is known so far, None for one that has none."""
        self.pieces: dict[str, list[CrcPiece] | None] = {}
        """What was read of each scattered tensor; None where its chunks are not runs of it."""
        self._scattered_readings: dict[str, list[EntryReading]] = {}
        self._sync_pool = ThreadPoolExecutor(
            _SYNC_THREADS, thread_name_prefix="shardkit-sync", initializer=heed, initargs=(self._interrupt,)
        )
        self._syncs: list[Future[None]] = []

    def run(self) -> tuple[dict[str, FileDigest], dict[str, int]]:
        """Move everything.

        Returns:
            The digest of every file by its name, and of every scattered tensor by its source name, where it
            could be taken.

        Raises:
            IntegrityError: a source changed, or is not what it records.
            ResourceError: the system cannot read or write.
            KeyboardInterrupt: once no thread writes any more.
            CancelledError: after `stop`.
        """
        files, held_bytes = self.plan.catalog.files, self._options.held_bytes(self.plan)
        with (
            one_thread_each(self.plan.needs_torch),
            storage.hold_at_most(held_bytes) if held_bytes else contextlib.nullcontext(),
            SourceFiles(files, self._options.recent_bytes, check=self._source_check) as sources,
        ):
            try:
                self._create_files()
                tasks = self._tasks(sources)
                run_all(self._scatter_jobs(sources), self._options.jobs, self._stop, name="shardkit")
                run_all(self._task_jobs(tasks, sources), self._options.jobs, self._stop, name="shardkit")
                self._raise_unfinished()
                self._check()  # threads that are stopped between two jobs end in silence
                self._wait_for_files()
            except BaseException as error:
                self._stop.set()
                if isinstance(error, KeyboardInterrupt):
                    self._interrupt.set()
                raise
            finally:  # also on Ctrl-C while waiting: no thread may outlive the files that it reads
                try:
                    self._sync_pool.shutdown()  # whole files are worth keeping for the next run
                finally:
                    self._is_over.set()  # on a second Ctrl-C threads may still be there
            sources.finish(hint=DAMAGED)
        self._progress.finish()  # what comes now, such as waiting for a model's class, is not moving
        return self._digests, {fqn: crc for fqn, crc in self.scattered.items() if crc is not None}

    def _create_files(self) -> None:
        """Create every unfinished file, but for those that wait for room."""
        assert not self._options.max_unsent_files or self.plan.scattered.keys() <= self.plan.gathered
        for image in self.plan.images:
            if image.name in self._skipped:
                continue
            if len(image) == 0 or not self._options.max_unsent_files:
                self._create(image)
            if len(image) == 0:
                self._submit_finish(image, _ImageState())

    def _create(self, image: Image) -> None:
        """Create a file at its full size: gaps are zeros, and a missing write shows."""
        with self._opened(image, os.O_CREAT | os.O_TRUNC) as fd:
            storage.ftruncate(fd, image.size)

    def _scatter_jobs(self, sources: SourceFiles) -> list[Callable[[], None]]:
        if not self.plan.scattered:
            return []
        images, options = self.plan.images, self._options
        scatter = Scatter(
            self.plan.catalog,
            sources,
            lambda image: self._target(images[image]),
            self._controls,
            band_bytes=options.band_bytes,
        )

        def job(fqn: str) -> None:
            holes = [
                (n, hole)
                for n, hole in self.plan.scattered[fqn]
                if images[n].name not in self._skipped and fqn not in self.plan.gathered
            ]
            is_read = fqn in self._read_for
            if not holes and not is_read and (self._foreign_files or fqn in self.scattered):
                return
            dtype = self.plan.scattered[fqn][0][1].dtype
            # What others have holes for, they read.
            pieces, readings = scatter.run(fqn, dtype, holes, reads_all=is_read or not self._foreign_files)
            nbytes = self.plan.catalog.tensors[fqn].num_elements * dtype.itemsize
            names = {images[n].name for n, _ in holes} | ({self._read_for[fqn]} if is_read else set())
            with self._lock:
                self.pieces[fqn] = pieces
                self.scattered[fqn] = None if pieces is None else crc_of(pieces, nbytes)[0]
                for name in names:
                    self._scattered_readings.setdefault(name, []).extend(readings)
            if not names and self._source_check is not None:
                self._source_check.add(readings)

        def one_by_one(fqns: Sequence[str]) -> None:
            for fqn in fqns:
                job(fqn)

        # What is made together follows one another, and no two groups are in memory at a time.
        catalog, groups, jobs = self.plan.catalog, dict[object, list[str]](), list[Callable[[], None]]()
        for fqn in self.plan.scattered:
            files = {catalog.chunks.file[row] for row in catalog.tensors[fqn].chunk_ids}
            computed = (
                maker for file in files if isinstance(maker := catalog.files[file].derivation, Computed)
            )
            group = next((maker.group for maker in computed), None)
            if group is None:
                jobs.append(partial(job, fqn))
            else:
                groups.setdefault(group, []).append(fqn)
        return [partial(one_by_one, [*chain(*groups.values())]), *jobs] if groups else jobs

    def _tasks(self, sources: SourceFiles) -> Sequence[Task]:
        """Return the tasks in the order in which they are carried out.

        Sources in a store are read front to back, for all images at once: each request brings what several of them need.
        Where the images go to a store themselves, there is no room for parts of all of them.
        """
        if not is_far(self.plan.catalog):
            return [t for t in self.plan.tasks if self.plan.images[t.image].name not in self._skipped]
        reading = plan_reading(self.plan, self._skipped, in_source_order=not self._sends)
        sources.expect(reading.ranges, reading.num_places)
        return reading.tasks

    def _task_jobs(self, tasks: Sequence[Task], sources: SourceFiles) -> list[Callable[[], None]]:
        for task in tasks:
            self._states.setdefault(task.image, _ImageState()).tasks_left += 1
        return [partial(self._run_task, task, sources) for task in tasks]

    def _run_task(self, task: Task, sources: SourceFiles) -> None:
        image = self.plan.images[task.image]
        self._wait_for_room(image)
        filler = getattr(self._thread, "filler", None)
        if filler is None:
            filler = self._thread.filler = Filler(
                self.plan,
                sources,
                self._controls,
                buffer_bytes=self._options.buffer_bytes,
                band_bytes=self._options.band_bytes // 4,  # fits the cache
                share_extents=self._options.share_extents,
            )
        with self._opened(image) as fd:
            stretch = filler.write(task, image, fd)
        with self._lock:
            state = self._states[task.image]
            state.stretches[task.start] = stretch
            state.tasks_left -= 1
            is_whole = state.tasks_left == 0
        if is_whole:
            self._submit_finish(image, self._states.pop(task.image))

    @property
    def _sends(self) -> bool:
        return bool(self._options.max_unsent_files) or location_of(self._directory).sends

    def _wait_for_room(self, image: Image) -> None:
        """Create a file once so few are unsent that there is room for it. The tasks of a file follow one another."""
        if not self._options.max_unsent_files:
            return
        with self._is_sent:
            while image.name not in self._unsent and len(self._unsent) >= self._options.max_unsent_files:
                self._check()
                self._is_sent.wait(_LOOK_S)
            if image.name not in self._unsent:
                self._create(image)
                self._unsent.add(image.name)

    def _submit_finish(self, image: Image, state: _ImageState) -> None:
        with self._lock:
            self._syncs.append(self._sync_pool.submit(self._finish_in_turn, image, state))

    def _finish_in_turn(self, image: Image, state: _ImageState) -> None:
        """Finish a file. Where one cannot be sent, no other is written: there may be no room for it."""
        try:
            self._finish(image, state)
        except BaseException:
            if self._options.max_unsent_files:
                self._stop.set()
            raise
        finally:
            with self._is_sent:
                self._unsent.discard(image.name)
                self._is_sent.notify_all()

    def _raise_unfinished(self) -> None:
        """Raise the error of a file that stopped all others."""
        if self._stop.is_set():
            until_done(self._syncs)
        for sync in self._syncs:
            if sync.done() and not isinstance(error := sync.exception(), CancelledError | None):
                raise error

    def _finish(self, image: Image, state: _ImageState) -> None:
        """Sync a whole file to disk and hand it over."""
        stretches = [state.stretches[start] for start in sorted(state.stretches)]
        self._settle(image)
        crc = None
        if self._options.digests:
            crc = image_crc(image.size, [s for stretch in stretches for s in stretch.segments])
        digest = FileDigest(
            name=image.name,
            size=image.size,
            crc32=crc,
            data_crcs=tuple(crc for stretch in stretches for crc in stretch.data_crcs),
        )
        if self._is_over.is_set():  # nobody waits for it any more
            raise CancelledError
        of_stretches = (stretch.read for stretch in stretches)
        readings = pack(chain(self._scattered_readings.get(image.name, ()), *of_stretches))
        if self._source_check is not None:
            self._source_check.put(image.name, readings)
        self._on_finished(digest, readings)
        with self._lock:
            self._digests[image.name] = digest

    def _wait_for_files(self) -> None:
        """Wait until every file is where it belongs, a phase of its own: all bytes are counted, and it may take minutes."""
        self._progress.finish()
        self._progress.start(0, "sending" if self._sends else "syncing")
        until_done(self._syncs)
        for sync in self._syncs:
            sync.result()

    def _settle(self, image: Image) -> None:
        """Bring a whole file to the disk, unless it only passes through it."""
        if not self._options.max_unsent_files:
            with self._opened(image) as fd:
                storage.fsync(fd)
        _log.debug("wrote %s, %s", escape(image.name), format_size(image.size))

    @contextlib.contextmanager
    def _opened(self, image: Image, flags: int = 0) -> Iterator[int]:
        """Open an image for reading and writing; errors name the file."""
        path = os.path.join(self._directory, image.name)
        try:
            fd = storage.open_fd(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
            try:
                yield fd
            finally:
                storage.close_fd(fd)
        except OSError as error:
            raise ResourceError(f"cannot write {escape(image.name)}: {error.strerror}") from error

    @contextlib.contextmanager
    def _target(self, image: Image) -> Iterator[tuple[int, str]]:
        with self._opened(image) as fd:
            yield fd, image.name

    def _check(self) -> None:
        if self._stop.is_set():
            raise CancelledError
