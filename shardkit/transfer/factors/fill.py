"""Filling the holes of factors: which weights are still to be computed, by how many processes, and what was measured.

Every record's place is known before any decomposition, so each target is computed once and its parts go straight to
where they belong. The journal has a line for each target whose parts are on the disk. A run that resumes takes over
those whose bytes are still there. Where a job is divided, the holes are those of records, which all parts share.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape, format_size
from shardkit.core.threads import run_all
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.osft.plan import Svd, Target
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.factors.catalog import FactoredWeight
from shardkit.transfer.factors.workers import FactorWorker
from shardkit.transfer.images import Hole
from shardkit.transfer.sources import SourceFiles
from shardkit.transfer.stream import read_back

_CHECK_BUFFER = 1 << 20
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
    """All weights of a job that become factors."""

    weights: tuple[FactoredWeight, ...]
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


class FilledFile(Protocol):
    """A file with holes of factors."""

    @property
    def name(self) -> str:
        """Bare file name."""

    @property
    def size(self) -> int:
        """Bytes of the finished file."""


class FilledFiles(Protocol):
    """All files with such holes."""

    def __iter__(self) -> Iterator[FilledFile]:
        """Yield the files."""

    def __getitem__(self, index: int, /) -> FilledFile:
        """Return a file."""


class FilledPlan(Protocol):
    """Which holes are filled: a `TransferPlan`, or records."""

    @property
    def images(self) -> FilledFiles:
        """The files."""

    @property
    def catalog(self) -> Catalog:
        """Has the weights, and the factors by their names."""

    @property
    def filled(self) -> Mapping[str, tuple[tuple[int, Hole], ...]]:
        """(number of the file, hole) of every hole of each factor."""


class TargetJournal(Protocol):
    """Takes note of targets whose factors are on the disk."""

    def add_target(self, target: Mapping[str, object], source: Mapping[str, object] | None, /) -> None:
        """See `Journal.add_target`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Where holes are filled, and what is known of an earlier run."""

    plan: FilledPlan
    """Has the holes, in `filled`."""
    directory: str
    """Where the images go."""
    journal: TargetJournal
    """Gets a line for each target."""
    earlier: Mapping[str, Mapping[str, object]]
    """What an interrupted run's journal tells of targets, by path."""
    finished: Collection[str]
    """Names of the images that are whole. They are not touched."""
    check: SourceCheck | None
    """Compares what is read with what the source records."""
    advance: Callable[[int], None]
    """Told the bytes that filled holes."""
    elsewhere: Callable[[FactoredWeight], Measured | None] = lambda _: None
    """Tells what another process has computed meanwhile; asked before each target."""
    another_place: str = "choose another destination"
    """How the files come to lie on another disk, if there is no room for them."""

    @property
    def hint(self) -> str:
        """What to do where a file cannot be written."""
        needed = sum(image.size for image in self.plan.images if image.name not in self.finished)
        return (
            f"the files there take {format_size(needed)}: free some space or {self.another_place}, then run the same "
            "command again"
        )

    def cannot_write(self, path: str, error: OSError) -> ResourceError:
        """Return the error for a file that the system does not let be written."""
        return ResourceError(f"cannot write {escape(path)}: {error.strerror}", hint=self.hint)


class _Written(NamedTuple):
    """A target whose factors lie in their files, perhaps not on the disk yet."""

    names: Collection[str]
    """Of these files."""
    target: Mapping[str, object]
    source: Mapping[str, object] | None
    """Both as `Journal.add_target` takes them."""


class _Noting:
    """Brings files to the disk and notes their targets in the journal, while the next ones are computed.

    Targets that come while the disk is busy share the next sync of each file. A context manager that waits for all.

    Args:
        filling: has the files and the journal.
        stop: set if that fails.
    """

    def __init__(self, filling: Filling, stop: threading.Event) -> None:
        self._filling, self._stop = filling, stop
        self._lock, self._waiting = threading.Lock(), list[_Written]()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shardkit-sync")
        self._rounds: list[Future[None]] = []

    def __enter__(self) -> _Noting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        if error is None or isinstance(error, CancelledError):
            for each in self._rounds:
                each.result()

    def add(self, written: _Written) -> None:
        """Take note of a target. May be called from any thread.

        Raises:
            CancelledError: an earlier one could not be noted; the context raises why.
        """
        if self._stop.is_set():
            raise CancelledError
        with self._lock:
            self._waiting.append(written)
            self._rounds.append(self._pool.submit(self._note))

    def _note(self) -> None:
        with self._lock:
            written, self._waiting = self._waiting, []
        try:
            for name in sorted({name for each in written for name in each.names}):
                path = os.path.join(self._filling.directory, name)
                try:
                    storage.sync_file(path)
                except OSError as error:
                    raise self._filling.cannot_write(path, error) from error
            for each in written:
                self._filling.journal.add_target(each.target, each.source)
        except BaseException:
            self._stop.set()
            raise


class FactorRun:
    """Computes the factors of a plan into a directory.

    Args:
        factoring: what is computed.
        filling: into what.
    """

    def __init__(self, factoring: JobFactoring, filling: Filling) -> None:
        self._factoring, self._filling = factoring, filling
        self._plan: FilledPlan = filling.plan
        self._check = filling.check
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.local()
        self._found: dict[str, Measured] = {}

    def run(self) -> dict[str, Measured]:
        """Fill all holes, and return what was measured, by the target's path.

        Raises:
            IntegrityError: the source is damaged or changed, or factors are not as good as promised.
            SourceError: a weight has no factors.
            IncompleteError: a process died; another run resumes.
            ResourceError: the system cannot read or write.
            KeyboardInterrupt: once no process writes any more.
        """
        self._create_files()
        left = [weight for weight in self._factoring.weights if not self._takes_over(weight)]
        left.sort(key=lambda weight: -weight.target.num_operations)  # stable
        if left:
            self._compute(left)
        if self._check is not None:
            self._check.raise_differences(hint=_DAMAGED)
        return {weight.target.path: self._found[weight.target.path] for weight in self._factoring.weights}

    def _create_files(self) -> None:
        for image in self._plan.images:
            if image.name not in self._filling.finished:
                path = os.path.join(self._filling.directory, image.name)
                try:
                    fd = storage.open_fd(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                    try:
                        storage.ftruncate(fd, image.size)
                    finally:
                        storage.close_fd(fd)
                except OSError as error:
                    raise self._filling.cannot_write(path, error) from error

    def _compute(self, weights: Sequence[FactoredWeight]) -> None:
        catalog = self._plan.catalog
        largest = max(catalog.tensors[weight.source].nbytes for weight in weights)
        with (
            SourceFiles(catalog.files, check=self._check) as files,
            contextlib.ExitStack() as workers,
        ):
            with _Noting(self._filling, self._stop) as noting:
                jobs = [
                    partial(self._compute_one, weight, files, largest, workers, noting) for weight in weights
                ]
                run_all(jobs, self._factoring.num_workers, self._stop, name="shardkit-svd")
            files.check_unchanged()

    def _compute_one(
        self,
        weight: FactoredWeight,
        files: SourceFiles,
        largest: int,
        workers: contextlib.ExitStack,
        noting: _Noting,
    ) -> None:
        measured = self._filling.elsewhere(weight)
        if measured is not None:
            self._keep(weight, measured)
            return
        worker: FactorWorker | None = getattr(self._thread, "worker", None)
        if worker is None:
            worker = self._thread.worker = FactorWorker(largest)
            with self._lock:
                workers.enter_context(worker)
        catalog = self._plan.catalog
        with files.reader() as reader:
            crc = worker.read(catalog, weight.source, reader, weight.target.weight)
            read = reader.take_runs()
        answer = {**worker.ask(self._request(weight), self._stop), "weight_crc32": crc}
        told = None if self._check is None else self._check.dump(read)
        names = {image.name for image, _ in self._holes(weight)} - set(self._filling.finished)
        noting.add(_Written(names, {"path": weight.target.path, **answer}, told))
        self._keep(weight, measured_of(weight, answer, is_resumed=False))

    def _request(self, weight: FactoredWeight) -> dict[str, Any]:
        return {
            **asdict(weight.target),
            "svd": self._factoring.svd,
            "dtype": self._plan.catalog.tensors[weight.source].dtype.name,
            "hint": self._filling.hint,
            "holes": [
                (
                    None
                    if image.name in self._filling.finished
                    else os.path.join(self._filling.directory, image.name),
                    hole.start,
                    weight.factors[hole.fqn],
                    *hole.region,
                )
                for image, hole in self._holes(weight)
            ],
        }

    def _holes(self, weight: FactoredWeight) -> list[tuple[FilledFile, Hole]]:
        """Return the holes of a target with their images, those of an image together."""
        holes = [each for name in weight.factors for each in self._plan.filled[name]]
        return [(self._plan.images[number], hole) for number, hole in sorted(holes, key=lambda each: each[0])]

    def _keep(self, weight: FactoredWeight, measured: Measured) -> None:
        """Take note of a target's factors, and count them."""
        with self._lock:
            self._found[weight.target.path] = measured
        self._filling.advance(
            sum(
                hole.nbytes for image, hole in self._holes(weight) if image.name not in self._filling.finished
            )
        )

    def _takes_over(self, weight: FactoredWeight) -> bool:
        """True if an interrupted run computed a target, and its bytes are still there."""
        line = self._filling.earlier.get(weight.target.path, {})
        told = line.get("target")
        if not isinstance(told, Mapping) or not self._is_intact(weight, told):
            return False
        if self._check is not None and not self._check.load(line.get("source")):
            return False
        self._keep(weight, measured_of(weight, told, is_resumed=True))
        return True

    def _is_intact(self, weight: FactoredWeight, told: Mapping[str, object]) -> bool:
        crcs = told.get("crcs")
        holes = self._holes(weight)
        if not isinstance(crcs, list) or len(crcs) != len(holes):
            return False
        left, buffer = iter(crcs), bytearray(_CHECK_BUFFER)
        for name, group in groupby(holes, key=lambda each: each[0].name):
            pairs = [(hole, next(left)) for _, hole in group]
            if name not in self._filling.finished and not self._holds(name, pairs, buffer):
                return False
        return True

    def _holds(self, name: str, pairs: Sequence[tuple[Hole, object]], buffer: bytearray) -> bool:
        """True if holes of a file have these CRC-32s."""
        try:
            fd = storage.open_fd(
                os.path.join(self._filling.directory, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            )
        except OSError:
            return False
        try:
            return all(read_back(fd, hole.start, hole.nbytes, buffer) == crc for hole, crc in pairs)
        except ShardkitError:
            return False
        finally:
            storage.close_fd(fd)
