"""The results of verbs that write an output, or a part of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardkit.core.result import Result, wrote
from shardkit.core.text import escape
from shardkit.errors import refuse_warnings
from shardkit.transfer.checks import Unchecked
from shardkit.transfer.plan import TransferPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """The result of a part."""

    part: str
    """Such as "3/16"."""
    found: str
    """The variables of the launcher that name the part; empty for one that the user named."""
    plan: str
    """Hash of the job."""
    num_files: int
    """Files of this part."""
    written_bytes: int
    """Size of these files."""
    resumed_files: int
    """Files of this part that were finished before this run."""
    finished_files: int
    """Finished files of all parts, as far as this process sees them."""
    missing: tuple[str, ...]
    """Parts with unfinished files, as far as this process sees them, such as "3/16"."""
    is_committed: bool
    """The output exists: this part was the last to finish, or another process has committed."""
    by_another: bool = False
    """Another process has committed the output, so that the numbers cover only this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The tensors of one dtype that are written in another."""

    stored: str
    """The dtype in the source, by torch's name."""
    written: str
    """The dtype in the output, by torch's name."""
    num_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(Result):
    """The common part of the results of preshard, consolidate and reshard: what was written, or with `dry_run` would be."""

    output: str
    """The directory; absolute."""
    dry_run: bool
    num_tensors: int
    num_files: int
    """Number of files with tensors."""
    file_bytes: tuple[int, ...]
    """Size of each of these files."""
    read_bytes: int
    """Bytes of the source's tensors, each counted once."""
    written_bytes: int
    """Size of all these files."""
    converted: tuple[Converted, ...]
    """The tensors that get another dtype."""
    checked_bytes: int
    """Bytes of the source that were compared, while they moved, with recorded CRC-32s."""
    unchecked: tuple[Unchecked, ...]
    """Bytes that could not be compared, by reason."""
    source_manifests: tuple[str, ...]
    """Paths of the shardkit manifests whose checksums were compared, besides those in the source's own files."""
    peak_memory_bytes: int
    """Upper bound of all buffers, without the interpreter and the plan."""
    free_bytes: int | None
    """On the destination's file system, before writing; None for a store."""
    resumed_files: int
    """Files that were finished before this run."""
    was_there: bool = False
    """An existing output was left as it is: other processes of this job made it, or `exist_ok` was set."""
    part: PartResult | None = None
    """The result of a part; None for a run of one process."""
    replaced: tuple[str, ...] = ()
    """Prefixes of replaced data in a bucket. The data stays, since readers may need it."""
    elapsed_s: float
    moving_s: float
    """The part of `elapsed_s` during which bytes moved."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def unfinished(self) -> PartResult | None:
        """Return the part, if the output does not exist yet or this is a dry run; else None."""
        return self.part if self.part and (self.dry_run or not self.part.is_committed) else None

    def headline(self) -> str:
        """Return the first line of the text output."""
        if self.unfinished is not None:
            return (
                f"{'dry run: ' if self.dry_run else ''}part {self.unfinished.part} of {escape(self.output)}"
            )
        if self.was_there:
            return f"{escape(self.output)} is already there"
        return wrote(self.output, dry_run=self.dry_run)


def converted_in(plan: TransferPlan) -> Iterator[Converted]:
    """Yield the conversions of a plan, by pairs of dtypes."""
    tensors = plan.catalog.tensors
    counts = Counter((tensors[holes.source].dtype, holes.dtype) for holes in plan.images.tensors())
    for (stored, written), number in counts.items():
        if stored is not written:
            yield Converted(stored=stored.name, written=written.name, num_tensors=number)


class Warnings:
    """The warnings of one call of a verb. Each is shown once, as soon as it is known.

    Args:
        on_warning: shows a warning; None shows none.
        are_errors: warnings about source or output are errors: `strict`.
    """

    def __init__(self, on_warning: Callable[[str], object] | None, *, are_errors: bool) -> None:
        self._on_warning, self._are_errors, self._shown = on_warning, are_errors, set[str]()
        self.of_result: dict[str, None] = {}
        """What `add` was called with, in order, for the result."""

    def show(self, warnings: Iterable[str]) -> None:
        """Show warnings about source or output, which the verb itself adds to its result where they still hold.

        Raises:
            SourceError: they are errors.
        """
        warnings = list(warnings)
        if self._are_errors:
            refuse_warnings(warnings)
        self._show(warnings)

    def add(self, warnings: Sequence[str]) -> None:
        """Show warnings, and add them to the result. They are never errors."""
        self._show(warnings)
        self.of_result |= dict.fromkeys(warnings)

    def _show(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            if self._on_warning is not None and warning not in self._shown:
                self._on_warning(warning)
            self._shown.add(warning)
