"""Computing factors into records: by how many processes, and what was measured."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import Any

from shardkit.core.text import escape, format_size
from shardkit.core.threads import run_all
from shardkit.errors import ResourceError, UsageError
from shardkit.files import storage
from shardkit.osft.plan import Svd, Target
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.factors.catalog import FactoredWeight, FactorRecords
from shardkit.transfer.factors.workers import FactorWorker
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
_DAMAGED = "use another copy of the checkpoint; --check-source off takes the damaged bytes as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How the factors of a target were computed, and how good they are."""

    algorithm: str
    """As `osft.svd.Factors` has it."""
    error: float
    orthogonality: float
    whole: Mapping[str, int]
    """CRC-32 of each factor's bytes, by its name in the catalog."""
    is_resumed: bool
    """An interrupted run had computed them."""
    weight_crc32: int | None = None
    """Of the dense weight, as it is stored."""


def measured_of(weight: FactoredWeight, told: Mapping[str, Any], *, is_resumed: bool) -> Measured:
    """Return the measurements of a target's factors, from the answer of the process that computed them (`child`)."""
    shorts = {short: name for name, short in weight.factors.items()}
    return Measured(
        algorithm=told["algorithm"],
        error=told["error"],
        orthogonality=told["orthogonality"],
        whole={shorts[short]: crc for short, crc in told["whole"].items()},
        is_resumed=is_resumed,
        weight_crc32=told.get("weight_crc32"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFactoring:
    """How factors are computed."""

    svd: Svd
    num_workers: int


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
    largest = max(targets, key=lambda target: target.svd_nbytes)
    if memory_bytes is None:
        return max(min(jobs, len(targets), (_available_bytes() - sending_bytes) // largest.svd_nbytes), 1)
    if largest.svd_nbytes + sending_bytes > memory_bytes:
        raise UsageError(
            f"--max-memory {format_size(memory_bytes)} is too little for the factors of {escape(largest.path)}: they "
            f"take {format_size(largest.svd_nbytes)}"
            + (f", and {format_size(sending_bytes)} on their way into a store" if sending_bytes else ""),
            hint="give more, or leave such weights dense: --osft-targets 'auto,!GLOB'",
        )
    return min(jobs, len(targets), (memory_bytes - sending_bytes) // largest.svd_nbytes)


def _available_bytes() -> int:
    """Return the memory that new processes can have: what the machine has left, and a container's limit."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _text_of("/proc/meminfo").splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    for limit, used, stat, of_files in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, KeyError, ValueError):  # no such file, or "max"
            lines = dict(line.split() for line in _text_of(stat).splitlines())
            found.append(int(_text_of(limit)) - int(_text_of(used)) + int(lines[of_files]))
    return max(min(found), 0)


def _text_of(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Which records are filled, and where."""

    records: FactorRecords
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
    elsewhere: Callable[[int], Measured | None]
    """Tells what another process has computed meanwhile; asked before each weight."""
    another_place: str
    """How the records come to lie on another disk, if there is no room for them."""

    @property
    def hint(self) -> str:
        """What to do where a record cannot be written."""
        needed = sum(self.records.images[number].size for number in self.numbers)
        return (
            f"the files there take {format_size(needed)}: free some space or {self.another_place}, then run the same "
            "command again"
        )

    def path(self, number: int) -> str:
        """Return the path of the record of a weight."""
        return os.path.join(self.directory, self.records.images[number].name)

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


class _Publishing:
    """Brings records to the disk and publishes them, while the next ones are computed. A context manager that waits for all.

    Args:
        filling: has the records.
        stop: set if that fails.
    """

    def __init__(self, filling: Filling, stop: threading.Event) -> None:
        self._filling, self._stop, self._has_failed = filling, stop, False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardkit-sync")
        self._published: list[Future[None]] = []

    def __enter__(self) -> _Publishing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        if error is None or isinstance(error, CancelledError):
            for each in self._published:
                each.result()

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
            with self._filling.writing(number) as path:
                storage.sync_file(path)
            self._filling.publish(number, target, source)
        except BaseException:
            self._has_failed = True
            self._stop.set()
            raise


class FactorRun:
    """Computes factors into records.

    Args:
        factoring: how.
        filling: which, and where.
    """

    def __init__(self, factoring: JobFactoring, filling: Filling) -> None:
        self._factoring, self._filling = factoring, filling
        self._records, self._check = filling.records, filling.check
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.local()
        self._found: dict[str, Measured] = {}

    def run(self) -> dict[str, Measured]:
        """Fill all records, and return what was measured, by the target's path.

        Raises:
            IntegrityError: the source is damaged or changed, or factors are not as good as promised.
            SourceError: a weight has no factors.
            IncompleteError: a process died; another run resumes.
            ResourceError: the system cannot read or write.
            KeyboardInterrupt: once no process writes any more.
        """
        for number in self._filling.numbers:
            with self._filling.writing(number) as path:
                fd = storage.open_fd(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                try:
                    storage.ftruncate(fd, self._records.images[number].size)
                finally:
                    storage.close_fd(fd)
        weights = self._records.weights
        self._compute(
            sorted(self._filling.numbers, key=lambda number: -weights[number].target.num_operations)
        )
        if self._check is not None:
            self._check.raise_differences(hint=_DAMAGED)
        return self._found

    def _compute(self, numbers: Sequence[int]) -> None:
        catalog, weights = self._records.catalog, self._records.weights
        largest = max(catalog.tensors[weights[number].source].nbytes for number in numbers)
        with (
            SourceFiles(catalog.files, check=self._check) as files,
            contextlib.ExitStack() as workers,
        ):
            with _Publishing(self._filling, self._stop) as publishing:
                jobs = [
                    partial(self._compute_one, number, files, largest, workers, publishing)
                    for number in numbers
                ]
                run_all(jobs, self._factoring.num_workers, self._stop, name="shardkit-svd")
            files.check_unchanged()

    def _compute_one(
        self,
        number: int,
        files: SourceFiles,
        largest: int,
        workers: contextlib.ExitStack,
        publishing: _Publishing,
    ) -> None:
        weight = self._records.weights[number]
        measured = self._filling.elsewhere(number)
        if measured is None:
            worker: FactorWorker | None = getattr(self._thread, "worker", None)
            if worker is None:
                worker = self._thread.worker = FactorWorker(largest)
                with self._lock:
                    workers.enter_context(worker)
            with files.reader() as reader:
                crc = worker.read(self._records.catalog, weight.source, reader, weight.target.weight)
                read = reader.take_runs()
            answer = {**worker.ask(self._request(number), self._stop), "weight_crc32": crc}
            told = None if self._check is None else self._check.dump(read)
            publishing.add(number, {"path": weight.target.path, **answer}, told)
            measured = measured_of(weight, answer, is_resumed=False)
        with self._lock:
            self._found[weight.target.path] = measured
        self._filling.advance(weight.target.factors_nbytes)

    def _request(self, number: int) -> dict[str, Any]:
        weight = self._records.weights[number]
        return {
            **asdict(weight.target),
            "svd": self._factoring.svd,
            "dtype": self._records.catalog.tensors[weight.source].dtype.name,
            "record": self._filling.path(number),
            "hint": self._filling.hint,
            "starts": [(short, hole.start) for hole, short in self._records.holes_of(number)],
        }
