"""What verbs answer that write a directory, and parts of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shardkit.core.result import Result, wrote
from shardkit.core.text import escape
from shardkit.transfer.checks import Unchecked
from shardkit.transfer.plan import TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """What became of a part."""

    part: str
    """Such as "3/16"."""
    found: str
    """What told the number; empty where a person did."""
    plan: str
    """Hash of the job."""
    num_files: int
    """Files of this part."""
    written_bytes: int
    """Size of these files."""
    resumed_files: int
    """Those of them that were finished before."""
    finished_files: int
    """Of all parts, as far as this one can see."""
    missing: tuple[str, ...]
    """The parts that lack files, as far as this one can see."""
    is_committed: bool
    """The output is there: this part was the last to finish, or another process has committed meanwhile."""
    by_another: bool = False
    """Another process has made the output, and this one knows its own share alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Tensors of one dtype that are written in another."""

    stored: str
    """torch's name of the dtype in the source."""
    written: str
    """The same of the dtype in the output."""
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(Result):
    """What every verb that writes a directory answers: what it wrote, or with `dry_run` would write."""

    output: str
    """The directory; absolute."""
    dry_run: bool
    num_tensors: int
    num_files: int
    """Files with tensors in them."""
    file_bytes: tuple[int, ...]
    """Size of each of these files."""
    read_bytes: int
    """Of the source's tensors, once."""
    written_bytes: int
    """Size of all these files."""
    converted: tuple[Converted, ...]
    """What has another dtype in the output than in the source."""
    checked_bytes: int
    """Bytes of the source that were compared, as they moved, with the CRC-32 recorded for them."""
    unchecked: tuple[Unchecked, ...]
    """What could not be compared, by reason."""
    source_manifests: tuple[str, ...]
    """Manifests by shardkit that the source was compared with, beside what its files record."""
    peak_memory_bytes: int
    """Bound on the buffers, beside the interpreter and the plan."""
    free_bytes: int | None
    """On the destination's file system, before writing; None for a store."""
    resumed_files: int
    """Files that an interrupted run had finished."""
    was_there: bool = False
    """An output was there already and is left as it is: other processes of this job made it, or `exist_ok` was given."""
    part: PartResult | None = None
    """What became of a part; None where one process wrote all."""
    replaced: tuple[str, ...] = ()
    """How the paths begin of data in a bucket that were replaced. They stay, as readers may need them."""
    elapsed_s: float
    moving_s: float
    """Of `elapsed_s`, how long bytes moved; 0 if this process moved none."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def unfinished(self) -> PartResult | None:
        """The part, if the output is not there yet or this is a dry run of it."""
        return self.part if self.part and (self.dry_run or not self.part.is_committed) else None

    def headline(self) -> str:
        """Return what was written, would be, or is there already."""
        if self.unfinished is not None:
            return (
                f"{'dry run: ' if self.dry_run else ''}part {self.unfinished.part} of {escape(self.output)}"
            )
        if self.was_there:
            return f"{escape(self.output)} is already there"
        return wrote(self.output, dry_run=self.dry_run)


def converted_in(plan: TransferPlan) -> Iterator[Converted]:
    """Yield what a plan converts."""
    tensors = plan.catalog.tensors
    counts = Counter((tensors[holes.source].dtype, holes.dtype) for holes in plan.images.tensors())
    for (stored, written), number in counts.items():
        if stored is not written:
            yield Converted(stored=stored.name, written=written.name, num_tensors=number)


class Told:
    """The warnings of a run. Each is told once, as soon as it is known.

    Args:
        on_warning: is told each; None if nobody is.
    """

    def __init__(self, on_warning: Callable[[str], object] | None) -> None:
        self._on_warning, self._seen_warnings = on_warning, set[str]()
        self.kept: tuple[str, ...] = ()
        """Those of the writing, for the result."""

    def tell(self, warnings: Iterable[str]) -> None:
        """Tell the warnings that were not told before."""
        for warning in warnings:
            if self._on_warning is not None and warning not in self._seen_warnings:
                self._on_warning(warning)
            self._seen_warnings.add(warning)

    def keep(self, warnings: Iterable[str]) -> None:
        """Tell warnings, and keep for the result those that are new."""
        new_warnings = [warning for warning in warnings if warning not in self.kept]
        self.tell(new_warnings)
        self.kept += tuple(new_warnings)
