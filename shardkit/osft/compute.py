"""Computing factors into records, by several processes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from shardkit.core.factored import Target
from shardkit.core.text import escape, format_size, parse_size
from shardkit.core.threads import run_all
from shardkit.errors import ResourceError, UsageError
from shardkit.files import storage
from shardkit.osft.job import FactoredJob, FactorRecords
from shardkit.osft.plan import OsftPlan
from shardkit.osft.svd import num_operations, svd_nbytes
from shardkit.osft.workers import FactorWorker
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.execute import DAMAGED
from shardkit.transfer.sources import SourceFiles

# Limit and use of a container, and what of it are pages of files, by the second and the first version of control groups.
_CONTAINER_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_cache",
    ),
)


def factored_job(
    plan: OsftPlan | None,
    records: FactorRecords,
    *,
    jobs: int,
    max_memory: str | int | None,
    sending_bytes: int,
) -> FactoredJob | None:
    """Return what has to be computed for a job; None if it is without factors.

    Args:
        plan: what was asked for.
        records: of all weights that become factors.
        jobs: most processes.
        max_memory: for all of them; None where a person did not say.
        sending_bytes: what of it factors take on their way into a store.

    Raises:
        UsageError: the memory is too little for one of them.
    """
    if plan is None:
        return None
    targets = [weight.target for weight in records.weights]
    workers = choose_num_workers(
        targets, jobs, None if max_memory is None else parse_size(max_memory), sending_bytes
    )
    return FactoredJob(records=records, svd=plan.svd, num_workers=workers)


def choose_num_workers(
    targets: Collection[Target], jobs: int, memory_bytes: int | None, sending_bytes: int = 0
) -> int:
    """Return how many processes compute at a time.

    Args:
        targets: all of them.
        jobs: most processes.
        memory_bytes: for all of them together; None for as much as the machine has left.
        sending_bytes: what of it is taken by factors on their way into a store.

    Raises:
        UsageError: the memory is too little for one.
    """
    largest = max(targets, key=svd_nbytes)
    if memory_bytes is None:
        return max(min(jobs, len(targets), (_available_bytes() - sending_bytes) // svd_nbytes(largest)), 1)
    if svd_nbytes(largest) + sending_bytes > memory_bytes:
        raise UsageError(
            f"--max-memory {format_size(memory_bytes)} is too little for the factors of {escape(largest.path)}: they "
            f"take {format_size(svd_nbytes(largest))}"
            + (f", and {format_size(sending_bytes)} on their way into a store" if sending_bytes else ""),
            hint="give more, or leave such weights dense: --osft-targets 'auto,!GLOB'",
        )
    return min(jobs, len(targets), (memory_bytes - sending_bytes) // svd_nbytes(largest))


def _available_bytes() -> int:
    """Return the memory that new processes can have: what the machine has left, and a container's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _text_of("/proc/meminfo").splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used, stat, of_files in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, KeyError, ValueError):  # no such file, or "max"
            lines = dict(line.split() for line in _text_of(stat).splitlines())
            limits.append(int(_text_of(limit)) - int(_text_of(used)) + int(lines[of_files]))
    return max(min(limits), 0)


def _text_of(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


class _Publishing:
    """Brings records to the disk and publishes them, while the next ones are computed. A context manager that waits for all.

    Args:
        run: has the records.
        stop: set if that fails.
    """

    def __init__(self, run: FactorRun, stop: threading.Event) -> None:
        self._run, self._stop, self._has_failed = run, stop, False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardkit-sync")
        self._published: list[Future[None]] = []

    def __enter__(self) -> _Publishing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._pool.shutdown()
        if error is None or isinstance(error, CancelledError):
            for published in self._published:
                published.result()

    def add(self, number: int, target: Mapping[str, Any], source: Mapping[str, Any] | None) -> None:
        """Publish the record of a weight. May be called from any thread.

        Raises:
            CancelledError: an earlier one could not be published; the context raises why.
        """
        if self._stop.is_set():
            raise CancelledError
        self._published.append(self._pool.submit(self._publish, number, target, source))

    def _publish(self, number: int, target: Mapping[str, Any], source: Mapping[str, Any] | None) -> None:
        if self._has_failed:  # they are computed again; what a stop finds waiting is published
            return
        try:
            with self._run.writing(number) as path:
                storage.sync_file(path)
            self._run.publish(number, target, source)
        except BaseException:
            self._has_failed = True
            self._stop.set()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRun:
    """Computes factors into records."""

    job: FactoredJob
    numbers: Sequence[int]
    """Of the weights whose factors are computed."""
    directory: str
    """Where their records are filled."""
    publish: Callable[[int, Mapping[str, Any], Mapping[str, Any] | None], object]
    """Given the number of a weight whose record is on the disk, what the process has answered (`child`) with the
    "weight_crc32" of the dense weight, and what was read, from `SourceCheck.dump`. May be called from any thread."""
    check: SourceCheck | None
    """Compares what is read with what the source records."""
    advance: Callable[[int], None]
    """Told the bytes of factors that there are."""
    is_elsewhere: Callable[[int], bool]
    """True if another process has computed a weight meanwhile; asked before each."""
    another_place: str
    """How the records come to lie on another disk, if there is no room for them."""
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _thread: threading.local = field(default_factory=threading.local, init=False)

    @property
    def hint(self) -> str:
        """What to do where a record cannot be written."""
        needed = sum(self.job.records.sizes[number] for number in self.numbers)
        return (
            f"the files there take {format_size(needed)}: free some space or {self.another_place}, then run the same "
            "command again"
        )

    def path(self, number: int) -> str:
        """Return the path of the record of a weight."""
        return os.path.join(self.directory, str(number))

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator[str]:
        """Give the path of a record, and name it if the system does not let it be written.

        Raises:
            ResourceError: the system refuses.
        """
        path = self.path(number)
        try:
            yield path
        except OSError as error:
            raise ResourceError(f"cannot write {escape(path)}: {error.strerror}", hint=self.hint) from error

    def run(self) -> None:
        """Fill all records.

        Raises:
            IntegrityError: the source is damaged or changed, or factors are not as good as promised.
            SourceError: a weight has no factors.
            IncompleteError: a process died; another run resumes.
            ResourceError: the system cannot read or write.
            KeyboardInterrupt: once no process writes any more.
        """
        for number in self.numbers:
            with self.writing(number) as path:
                fd = storage.open_fd(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                try:
                    storage.ftruncate(fd, self.job.records.sizes[number])
                finally:
                    storage.close_fd(fd)
        weights = self.job.records.weights
        self._compute(sorted(self.numbers, key=lambda number: -num_operations(weights[number].target)))
        if self.check is not None:
            self.check.raise_differences(hint=DAMAGED)

    def _compute(self, numbers: Sequence[int]) -> None:
        catalog, weights = self.job.records.catalog, self.job.records.weights
        largest = max(catalog.tensors[weights[number].source].nbytes for number in numbers)
        with SourceFiles(catalog.files, check=self.check) as files, contextlib.ExitStack() as workers:
            with _Publishing(self, self._stop) as publishing:
                jobs = [
                    partial(self._compute_one, number, files, largest, workers, publishing)
                    for number in numbers
                ]
                run_all(jobs, self.job.num_workers, self._stop, name="shardkit-svd")
            files.check_unchanged()

    def _compute_one(
        self,
        number: int,
        files: SourceFiles,
        largest: int,
        workers: contextlib.ExitStack,
        publishing: _Publishing,
    ) -> None:
        weight = self.job.records.weights[number]
        if not self.is_elsewhere(number):
            worker: FactorWorker | None = getattr(self._thread, "worker", None)
            if worker is None:
                worker = self._thread.worker = FactorWorker(largest)
                with self._lock:
                    workers.enter_context(worker)
            with files.reader() as reader:
                crc = worker.read(self.job.records.catalog, weight.source, reader, weight.target.weight)
                read = reader.take_runs()
            answer = {**worker.ask(self._request(number), self._stop), "weight_crc32": crc}
            told = None if self.check is None else self.check.dump(read)
            publishing.add(number, {"path": weight.target.path, **answer}, told)
        self.advance(weight.target.factors_nbytes)

    def _request(self, number: int) -> dict[str, Any]:
        weight = self.job.records.weights[number]
        return {
            **asdict(weight.target),
            "svd": self.job.svd,
            "dtype": self.job.records.catalog.tensors[weight.source].dtype.name,
            "record": self.path(number),
            "hint": self.hint,
            "starts": [(short, hole.start) for hole, short in self.job.records.holes_of(number)],
        }
