"""Moving the bytes of a plan, with a few threads and bounded memory.

Scattered tensors are written first. Then every image is written front to back, in stretches. A file is reported as
finished when all of it is on disk. An interrupted run leaves files that were never reported.
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
from shardkit.transfer.checks import EntryReading, PackedReadings, Readings, SourceCheck
from shardkit.transfer.codecs.convert import one_thread_each
from shardkit.transfer.fill import CrcPiece, Filler, Scatter, TaskOutput, crc_of, image_crc
from shardkit.transfer.images import Image
from shardkit.transfer.plan import Task, TransferPlan, plan_reading
from shardkit.transfer.sources import SourceFiles, is_far
from shardkit.transfer.stream import Controls

_log = logging.getLogger("shardkit")

_BUFFER_BYTES = MIB  # fits in the processor's cache; 8 MiB was slower on all file systems
_BAND_BYTES = 16 * MIB
# A few thousand tensors are between the records of one shard and the next; with more tensors some are read twice.
_RECENT_BYTES = 16 * MIB
_STORE_JOBS, _MIN_JOB_BYTES = 4, 2 * MIB
_LOOK_S = 0.5  # interval for noticing that the job was ended by another process
_SYNC_THREADS = 8
"""Threads that wait for the disk while others move bytes. Concurrent syncs share a commit of the file system's log."""
DAMAGED = "use another copy of the checkpoint; --check-source off copies the damaged bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteOptions:
    """How to move."""

    jobs: int = 2
    """Threads."""
    max_memory_bytes: int = 256 * MIB
    """Limit for all buffers together."""
    digests: bool = True
    """Compute CRC-32s while writing."""
    share_extents: bool = False
    """Clone blocks instead of copying them where possible."""
    check_source: bool = True
    """Compare data with the CRC-32s in the source."""
    infinite: Callable[[str, DType], None] = field(default=lambda fqn, dtype: None, compare=False)
    """See `Controls`."""
    upload_bytes: int = 0
    """Memory for parts of files that are sent to a store; 0 for files on a disk."""

    max_unsent_files: int = 0
    """Limit on files that are written but not yet sent to a store; 0 for no limit."""

    def through_scratch(self, largest_bytes: int) -> ExecuteOptions:
        """Return these options for files that are written into scratch and sent into a bucket; the plan is `in_order`.

        Two files are in scratch at a time, or one if memory does not suffice for two uploads.

        Args:
            largest_bytes: size of the largest file.

        Raises:
            UsageError: memory does not suffice for one upload.
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
        """Size of a thread's output buffer, and of its source buffer for conversions."""
        return max(min(_BUFFER_BYTES, self.max_memory_bytes // (4 * self.jobs)), 64 * KIB)

    @property
    def band_bytes(self) -> int:
        """Source bytes at a time while a tensor is scattered; a thread needs up to four times as many."""
        return max(min(_BAND_BYTES, self.max_memory_bytes // (8 * self.jobs)), 64 * KIB)

    @property
    def recent_bytes(self) -> int:
        """Size of the cache of small reads, shared by all threads, for neighbouring records."""
        return min(_RECENT_BYTES, self.max_memory_bytes // 16)

    def buffers_bytes(self, plan: TransferPlan) -> int:
        """Return the peak bytes of all buffers for a plan."""
        per_job = 2 * self.buffer_bytes + self.band_bytes // 2  # a stream, a conversion, a gathered band
        if plan.scattered:
            per_job = max(per_job, 4 * self.band_bytes)
        return self.jobs * per_job + self.recent_bytes

    def held_bytes(self, plan: TransferPlan) -> int:
        """Return the limit for fetched data of objects in stores; 0 if no source is in a store."""
        return self.max_memory_bytes - self.buffers_bytes(plan) if is_far(plan.catalog) else 0

    def peak_bytes(self, plan: TransferPlan) -> int:
        """Return the peak bytes of moving: all buffers, fetched data of stores, and parts of uploads."""
        return self.buffers_bytes(plan) + self.held_bytes(plan) + self.upload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """A finished file."""

    name: str
    size: int
    crc32: int | None
    """CRC-32 of the whole file; None without digests."""
    data_crcs: tuple[int, ...]
    """CRC-32 of each hole's bytes, in file order; empty without digests."""
    sha256: str | None = None
    """SHA-256 of the whole file, in hex; None unless a part of a job computed it for the description of the output."""


class Describer(Protocol):
    """Writes the files next to the images."""

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Write the remaining files after all images are on disk; the last one marks the directory as complete.

        Args:
            digests: of all files, including those of an interrupted run.
            scattered: CRC-32 of every scattered tensor, by its source name.
        """
        ...


@dataclass(slots=True)
class _ImageState:
    """Progress of an unfinished image."""

    tasks_left: int = 0
    stretches: dict[int, TaskOutput] = field(default_factory=dict)
    """By first piece; without their readings."""
    readings: PackedReadings = field(default_factory=PackedReadings)


class Execution:
    """One run of a plan into a directory.

    Args:
        plan: what to move.
        directory: existing directory for the images.
        finished: files of an earlier run, by name; left untouched.
        foreign: files that other processes write; left untouched. Tensors that are scattered over these files only are
            not read.
        scattered: known CRC-32s of scattered tensors, None for tensors without one; these tensors need not be read for
            their CRC-32.
        read_for: gathered tensors that are read whole for their CRC-32 although other processes write some of their
            files -> the file whose readings include this one.
        on_finished: called from any thread with each file that is on disk, and the readings for it.
        progress: receives the bytes, and the end of the phase.
        check: compares readings with the CRC-32s in the source; already has the readings of finished files.
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
        """CRC-32 of each scattered tensor so far; None for a tensor without one."""
        self.pieces: dict[str, list[CrcPiece] | None] = {}
        """CRC-32s of the bytes read of each scattered tensor; None if its chunks are not runs of it."""
        self._scattered_readings: dict[str, list[EntryReading]] = {}
        self._sync_pool = ThreadPoolExecutor(
            _SYNC_THREADS, thread_name_prefix="shardkit-sync", initializer=heed, initargs=(self._interrupt,)
        )
        self._syncs: list[Future[None]] = []

    def run(self) -> tuple[dict[str, FileDigest], dict[str, int]]:
        """Move everything.

        Returns:
            The digests of all files by name, and the CRC-32s of scattered tensors by source name, where they could be
            computed.

        Raises:
            IntegrityError: a source file changed, or differs from its checksums.
            ResourceError: reading or writing failed.
            KeyboardInterrupt: after all threads have stopped writing.
            CancelledError: after `stop`.
        """
        files, held_bytes = self.plan.catalog.files, self._options.held_bytes(self.plan)
        with (
            one_thread_each(self.plan.needs_torch),
            storage.limit_fetched(held_bytes) if held_bytes else contextlib.nullcontext(),
            SourceFiles(files, self._options.recent_bytes, check=self._source_check) as sources,
        ):
            try:
                self._create_files()
                tasks = self._tasks(sources)
                run_all(self._scatter_jobs(sources), self._options.jobs, self._stop, name="shardkit")
                run_all(self._task_jobs(tasks, sources), self._options.jobs, self._stop, name="shardkit")
                self._raise_unfinished()
                self._check()  # threads that are stopped between two jobs raise no error
                self._wait_for_files()
            except BaseException as error:
                self._stop.set()
                if isinstance(error, KeyboardInterrupt):
                    self._interrupt.set()
                raise
            finally:  # also on Ctrl-C while waiting: threads must end before their source files are closed
                try:
                    self._sync_pool.shutdown()  # complete files are useful for the next run
                finally:
                    self._is_over.set()  # after a second Ctrl-C threads may still be running
            sources.finish(hint=DAMAGED)
        self._progress.finish()  # later steps, such as waiting for a model's class, move no bytes
        return self._digests, {fqn: crc for fqn, crc in self.scattered.items() if crc is not None}

    def _create_files(self) -> None:
        """Create all unfinished files, except those that wait for room."""
        assert not self._options.max_unsent_files or self.plan.scattered.keys() <= self.plan.gathered
        for image in self.plan.images:
            if image.name in self._skipped:
                continue
            if len(image) == 0 or not self._options.max_unsent_files:
                self._create(image)
            if len(image) == 0:
                self._submit_finish(image, _ImageState())

    def _create(self, image: Image) -> None:
        """Create a file at its full size, so that gaps are zeros and a missing write is noticed."""
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
            # Other processes read what only their holes need.
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

        # Tensors of a group are processed consecutively, so that only one group is in memory.
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
        """Return the tasks in the order of execution.

        Sources in a store are read front to back, for all images at once: one request fetches data for several images.
        If the output is in a store too, memory does not suffice for parts of all images.
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
                band_bytes=self._options.band_bytes // 4,  # fits in the cache
                share_extents=self._options.share_extents,
            )
        with self._opened(image) as fd:
            stretch = filler.write(task, image, fd)
        with self._lock:
            state = self._states[task.image]
            state.readings.add(stretch.read)
            state.stretches[task.start] = replace(stretch, read=[])
            state.tasks_left -= 1
            is_whole = state.tasks_left == 0
        if is_whole:
            self._submit_finish(image, self._states.pop(task.image))

    @property
    def _sends(self) -> bool:
        return bool(self._options.max_unsent_files) or location_of(self._directory).sends

    def _wait_for_room(self, image: Image) -> None:
        """Create a file when enough others have been sent. The tasks of a file are consecutive."""
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
        """Finish a file. If sending it fails, stop: there may be no room for other files."""
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
        """Raise the error of the file that stopped the run."""
        if self._stop.is_set():
            until_done(self._syncs)
        for sync in self._syncs:
            if sync.done() and not isinstance(error := sync.exception(), CancelledError | None):
                raise error

    def _finish(self, image: Image, state: _ImageState) -> None:
        """Describe a complete file and hand it over: `on_finished` brings it to the disk."""
        stretches = [state.stretches[start] for start in sorted(state.stretches)]
        _log.debug("wrote %s, %s", escape(image.name), format_size(image.size))
        crc = None
        if self._options.digests:
            crc = image_crc(image.size, [s for stretch in stretches for s in stretch.segments])
        digest = FileDigest(
            name=image.name,
            size=image.size,
            crc32=crc,
            data_crcs=tuple(crc for stretch in stretches for crc in stretch.data_crcs),
        )
        if self._is_over.is_set():  # the run has ended
            raise CancelledError
        state.readings.add(self._scattered_readings.get(image.name, ()))
        readings = state.readings.merged()
        if self._source_check is not None:
            self._source_check.put(image.name, readings)
        self._on_finished(digest, readings)
        with self._lock:
            self._digests[image.name] = digest

    def _wait_for_files(self) -> None:
        """Wait until all files are on disk or sent; a separate phase, as it may take minutes after the last byte."""
        self._progress.finish()
        self._progress.start(0, "sending" if self._sends else "syncing")
        until_done(self._syncs)
        for sync in self._syncs:
            sync.result()

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
