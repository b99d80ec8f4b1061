"""diff: two checkpoints of any formats, compared tensor by tensor in bounded memory.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from shardkit.core.dtypes import BY_NAME, DType, short_dtype
from shardkit.core.factored import HIGH, factor_of
from shardkit.core.keywords import keywords_of
from shardkit.core.regions import Shape
from shardkit.core.result import DrawnResult
from shardkit.core.text import count, listed, parse_size
from shardkit.core.threads import progress_for
from shardkit.files import storage
from shardkit.files.links import reading_as
from shardkit.keys.names import natural
from shardkit.layout.traced import one_process
from shardkit.operations.diff.experts import num_fused
from shardkit.operations.diff.options import DiffOptions
from shardkit.operations.diff.sides import find_ties, open_sides
from shardkit.operations.resolve import Taken, take
from shardkit.transfer.convert import make_converter
from shardkit.transfer.plan import chunk_ranges
from shardkit.transfer.sources import Reader, SourceFiles

if TYPE_CHECKING:
    from shardkit.operations.diff.values import Measure, TensorStats

_MAX_MISSED = 1e-5  # of the norm: a decomposition in float64 misses 4e-8, mini_trainer's in float32 2e-6

Status = Literal["equal", "close", "tied", "folded", "only_a", "only_b", "shape", "dtype", "values"]

SYMBOLS: dict[Status, str] = {
    "equal": "=",
    "close": "=",
    "tied": "=",
    "folded": "~",
    "only_a": "-",
    "only_b": "+",
    "shape": "*",
    "dtype": "*",
    "values": "*",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """One tensor, by its name in the model."""

    name: str
    status: Status
    """"equal" (the same bytes), "close" (within the tolerance), "tied" (only on one side, where it equals a tensor
    that both have), "folded" (factors of OSFT on one side, and all that differs is what factors miss: at most 1e-5 of the
    weight's norm), "only_a", "only_b", or what differs: "shape", "dtype", or else "values"."""
    stored_a: str | None
    """Its name in A; None if A has none."""
    stored_b: str | None
    dtype_a: str | None
    dtype_b: str | None
    shape_a: Shape | None
    """In elements."""
    shape_b: Shape | None
    num_changed: int | None = None
    """Elements whose bits differ, or, with two dtypes, whose values differ. None if nothing was compared."""
    num_outside: int | None = None
    """Elements beyond the tolerance; None if none was given."""
    first_changed: Shape | None = None
    """Index of the first element that counts in `num_changed`."""
    tied_to: str | None = None
    """For "tied": the name that both sides have."""
    relative_error: float | None = None
    """|a - b| / max(|a|, |b|) of the tensors as vectors (Euclidean norms), where elements differ and all are finite
    numbers, not all of them 0; else None."""
    experts: tuple[float, ...] | None = None
    """Of fused experts that differ: `relative_error` of each of them, or else its share of elements that differ; 0 for one
    that does not differ."""
    stats: TensorStats | None = None
    """Figures, where they were asked for, elements differ, and the bits of the dtypes stand for numbers."""

    @property
    def symbol(self) -> str:
        """ "=", "~" (equal after folding), "-" (only in A), "+" (only in B) or "*"."""
        return SYMBOLS[self.status]

    @property
    def is_difference(self) -> bool:
        """True if A and B are not the same here, not even after folding."""
        return self.symbol not in "=~"

    @property
    def num_elements(self) -> int:
        """Elements of the tensor: of A's where A has it, else of B's."""
        return prod((self.shape_a if self.shape_a is not None else self.shape_b) or ())

    @property
    def rows(self) -> tuple[int, int] | None:
        """The rows of A and of B if the shapes differ in these alone, as those of a vocabulary do; else None."""
        one, two = self.shape_a or (), self.shape_b or ()
        is_matrix = len(one) > 1 and one[1:] == two[1:] and one != two
        return (one[0], two[0]) if is_matrix else None

    @property
    def share_changed(self) -> float | None:
        """`num_changed` over all elements."""
        if self.num_changed is None:
            return None
        return self.num_changed / self.num_elements if self.num_elements else 0.0

    @property
    def magnitude(self) -> tuple[float, float]:
        """How much it differs, to sort by: tensors that cannot be compared come first, then by error and share."""
        if not self.is_difference:
            return (0.0, 0.0)
        if self.num_changed is None:
            return (float("inf"), 0.0)
        share = self.share_changed or 0.0
        if self.stats is None:
            return (self.relative_error or 0.0, share)
        if self.stats.num_nonfinite:
            return (2.0, share)  # more than any finite error between two tensors of like size
        return (self.stats.relative_error or 0.0, share)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"symbol": self.symbol, **asdict(self), "share_changed": self.share_changed}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffResult(DrawnResult):
    """How two checkpoints differ."""

    a: str
    """As it was given."""
    b: str
    resolved_a: str
    """The checkpoint that was taken."""
    resolved_b: str
    format_a: str
    """As `shardkit.inspect` names it."""
    format_b: str
    is_equal: bool
    """No tensor differs, and none is equal only after folding."""
    as_dtype: str | None
    """A's tensors were rounded to it where B's have it: "bf16", "fp16" or "fp32"; None if nothing was rounded."""
    rtol: float | None
    """The tolerance; None if bits are compared."""
    atol: float | None
    tensors: tuple[TensorDiff, ...]
    """All tensors that were compared, equal ones too."""
    read_bytes: int
    """Of both sides."""
    elapsed_s: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    """What was passed over in a run directory although it is newer, or may be."""

    def count(self, *statuses: Status) -> int:
        """Return how many tensors have one of these statuses."""
        return sum(tensor.status in statuses for tensor in self.tensors)

    @property
    def differences(self) -> tuple[TensorDiff, ...]:
        """The tensors that differ."""
        return tuple(tensor for tensor in self.tensors if tensor.is_difference)

    def headline(self) -> str:
        """Return whether they are equal, or how many tensors differ."""
        if number := len(self.differences):
            return f"{number} of {count(len(self.tensors), 'tensor')} differ"
        ways = [] if self.rtol is None else ["within the tolerance"]
        ways += [] if self.is_equal else ["after folding"]
        ways += [] if self.as_dtype is None else [f"with A rounded to {self.as_dtype}"]
        return " ".join(["equal", *ways])

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "tensors"}
        counts = {f"num_{status}": self.count(status) for status in SYMBOLS}
        return {
            **plain,
            "num_tensors": len(self.tensors),
            **counts,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


@keywords_of(DiffOptions, reading_as)
@one_process()
def diff(options: DiffOptions) -> DiffResult:
    """Compare two checkpoints, bit by bit or within a tolerance.

    Tensors are paired by the names that their model has on the Hub, whatever the trainers called them and however they
    are chunked. Tied weights may be stored once on one side and twice on the other.

    Args:
        a: a checkpoint of any format, or a run directory, whose newest complete one is taken.
        b: another.
        rtol: elements are equal where |a - b| <= atol + rtol * |b|, or both are NaN. None compares bits, unless `atol`
            is given.
        atol: the same; where only one of the two is given, the other is 0.
        as_dtype: "bf16", "fp16" or "fp32": A's tensors are rounded to it, where B's have it, before they are compared.
        stats: take figures of how much tensors differ.
        include: globs over the names that the result has; only these tensors. Each must match.
        exclude: globs over the same names; not these tensors. Each must match.
        all_tensors: compare the optimizer's and all other tensors too, under their stored names.
        strict: warnings are errors, such as a newer checkpoint in a run directory that had to be passed over.
        sort: "name", or "difference": what differs most comes first; this takes figures.
        max_memory: bytes for all buffers, as a number or as "512MiB".
        follow_links: links that lead out of a checkpoint's directory are read as the files that they lead to.
            Weight files of a Hub model are read in any case.
        progress: told of the bytes of A as they are compared; by default a bar, on a terminal and in a notebook. False: none.

    Raises:
        UsageError: options that cannot be carried out.
        SourceError: one of them is damaged or incomplete.
        IntegrityError: a file changed while it was read.
        ResourceError: disk or permission.
    """
    options.check()
    sources = (take(options.a, strict=options.strict), take(options.b, strict=options.strict))
    return Comparison(sources, options).compare()


class Comparison:
    """Two checkpoints that are to be compared.

    Args:
        taken: the checkpoints; what is open of them is not opened again.
        options: what to compare, and how.

    Raises:
        UsageError, SourceError, ResourceError: as `diff`.
    """

    def __init__(self, sources: tuple[Taken, Taken], options: DiffOptions) -> None:
        self._begun, self._options = time.monotonic(), options
        self._progress = progress_for(options.progress)
        self._a, self._b, self._notes = open_sides(sources, options)
        self._names = sorted({*self._a.names, *self._b.names}, key=natural)
        self._readers: list[Reader] = []
        self._read_bytes = 0  # of both sides

    def compare(self) -> DiffResult:
        """Compare all tensors that both sides have.

        Raises:
            IntegrityError, ResourceError: a file changed while it was read, or cannot be read.
        """
        one, two = sides = self._a, self._b
        names = [name for name in self._names if self._is_read(name)]
        with ExitStack() as stack:
            stack.enter_context(storage.limit_fetched(parse_size(self._options.max_memory) // 2))
            files = [stack.enter_context(SourceFiles(side.catalog.files)) for side in sides]
            self._readers = [stack.enter_context(source.reader()) for source in files]
            places = max((sum(side.entry(name).num_chunks for side in sides) for name in names), default=1)
            for side, source in zip(sides, files, strict=True):
                source.expect(chunk_ranges(side.catalog, {side.names[name] for name in names}), places)
            sizes = (one.entry(name).num_elements * self._dtypes(name)[0].itemsize for name in names)
            self._progress.start(sum(sizes), "diff")
            try:
                is_one_alone = one.names.keys() != two.names.keys()
                ties = {**find_ties(one, two), **find_ties(two, one)} if is_one_alone else {}
                tensors = [
                    self._compare(name) if self._is_read(name) else self._unread(name, ties)
                    for name in self._names
                ]
            finally:
                self._progress.finish()
            for source in files:
                source.check_unchanged()
        return self._result(tensors)

    def _is_read(self, name: str) -> bool:
        """True if both sides have a tensor of this name, in one shape."""
        is_in_both = name in self._a.names and name in self._b.names
        return is_in_both and self._a.entry(name).shape == self._b.entry(name).shape

    def _unread(self, name: str, ties: Mapping[str, str]) -> TensorDiff:
        """Return the text about a tensor that one side alone has, or that has two shapes."""
        in_a, kept = name in self._a.names, ties.get(name)
        if in_a and name in self._b.names:
            return self._describe(name, "shape")
        alone: Status = "only_a" if in_a else "only_b"
        return self._describe(name, alone if kept is None else "tied", tied_to=kept)

    def _result(self, tensors: list[TensorDiff]) -> DiffResult:
        options, one, two = self._options, self._a, self._b
        if options.sort == "difference":
            tensors.sort(key=lambda tensor: tensor.magnitude, reverse=True)
        return DiffResult(
            a=one.given_path,
            b=two.given_path,
            resolved_a=one.resolved.path,
            resolved_b=two.resolved.path,
            format_a=one.checkpoint.format,
            format_b=two.checkpoint.format,
            is_equal=all(tensor.symbol == "=" for tensor in tensors),
            as_dtype=None if options.target is None else short_dtype(options.target.name),
            rtol=options.tolerance.rtol if options.tolerance else None,
            atol=options.tolerance.atol if options.tolerance else None,
            tensors=tuple(tensors),
            read_bytes=self._read_bytes,
            elapsed_s=round(time.monotonic() - self._begun, 3),
            notes=(*self._notes, *_dtype_notes(tensors), *_frozen_notes(tensors)),
            warnings=(*one.resolved.warnings, *two.resolved.warnings),
        )

    def _compare(self, name: str) -> TensorDiff:
        """Compare what both sides have under a name, in one shape."""
        measure = self._measure(name)
        entry, status = self._a.entry(name), self._status(name, measure)
        relative_error = self._relative_error(name, measure)
        if status in ("dtype", "values") and self._is_factors(name) and _is_folded_well(measure):
            status = "folded"
        return self._describe(
            name,
            status,
            num_changed=measure.num_changed,
            num_outside=measure.num_outside if self._options.tolerance is not None else None,
            first_changed=_unravel(measure.first_changed, entry.shape),
            relative_error=relative_error,
            experts=measure.of_experts() if SYMBOLS[status] == "*" else None,
            stats=measure.stats() if measure.num_changed and self._options.takes_stats else None,
        )

    def _relative_error(self, name: str, measure: Measure) -> float | None:
        """Return how far two tensors are apart; equal bands before the first difference are read again."""
        norms = measure.norms
        if not measure.num_changed or norms is None:
            return None
        if norms.num_missing:
            first = 0
            for left_bytes, right_bytes in self._bands(name, measured=self._is_measured(name)):
                if first >= norms.num_missing:
                    break
                norms.add(left_bytes, right_bytes, first)
                first += len(left_bytes) // self._dtypes(name)[0].itemsize
        return norms.relative_error()

    def _describe(self, name: str, status: Status, **fields: Any) -> TensorDiff:
        one, two = (side.entry(name) if name in side.names else None for side in (self._a, self._b))
        return TensorDiff(
            name=name,
            status=status,
            stored_a=one.fqn if one else None,
            stored_b=two.fqn if two else None,
            dtype_a=one.dtype.name if one else None,
            dtype_b=two.dtype.name if two else None,
            shape_a=one.shape if one else None,
            shape_b=two.shape if two else None,
            **fields,
        )

    def _status(self, name: str, measure: Measure) -> Status:
        one, two = self._dtypes(name)
        if one is not two:
            return "dtype"
        if not measure.num_changed:
            return "equal"
        return "close" if self._options.tolerance is not None and not measure.num_outside else "values"

    def _measure(self, name: str) -> Measure:
        """Compare two tensors of one shape; those that differ are read again where figures are wanted."""
        from shardkit.operations.diff.values import ExpertSizes, Measure

        (one, two), options = self._dtypes(name), self._options
        is_measured = options.takes_stats or self._is_factors(name)
        if is_measured and one is two and not self._has_difference(name):
            return Measure(one, two, tolerance=None, stats=False)
        entry = self._a.entry(name)
        number = num_fused(name, entry.shape) or 1
        experts = ExpertSizes(number, entry.num_elements // number)
        measure = Measure(one, two, tolerance=options.tolerance, stats=is_measured, experts=experts)
        for left_bytes, right_bytes in self._bands(name, measured=self._is_measured(name)):
            measure.add(left_bytes, right_bytes)
            self._progress.advance(len(left_bytes))
        return measure

    def _is_measured(self, name: str) -> bool:
        """True if more than bytes are compared, in shorter bands."""
        one, two = self._dtypes(name)
        is_measured = self._options.takes_stats or self._options.tolerance is not None
        return is_measured or one is not two or self._is_factors(name)

    def _is_factors(self, name: str) -> bool:
        """True if one side has factors of a weight, and the other one the weight or other factors."""
        return self._a.is_folded(name) or self._b.is_folded(name)

    def _has_difference(self, name: str) -> bool:
        from shardkit.operations.diff.values import have_same_bytes

        done = 0
        for left_bytes, right_bytes in self._bands(name, measured=False):
            if not have_same_bytes(left_bytes, right_bytes):
                return True
            done += len(left_bytes)
        self._progress.advance(done)
        return False

    def _dtypes(self, name: str) -> tuple[DType, DType]:
        """Return the dtypes that are compared: A's is another than the stored one where A is rounded."""
        one, two = self._a.entry(name).dtype, self._b.entry(name).dtype
        return (two if one.is_convertible and two is self._options.target else one), two

    def _bands(self, name: str, *, measured: bool) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield both sides' bytes in step."""
        stored, (one, two) = self._a.entry(name).dtype, self._dtypes(name)
        limit = self._options.max_elements(max(stored.itemsize, two.itemsize), measured=measured)
        convert = None if one is stored else make_converter(stored, one)
        sides = zip((self._a, self._b), self._readers, strict=True)
        for left_bytes, right_bytes in zip(
            *(side.bands(name, reader, limit) for side, reader in sides), strict=True
        ):
            self._read_bytes += len(left_bytes) + len(right_bytes)
            if convert is None:
                yield left_bytes, right_bytes
            else:
                narrow = memoryview(bytearray(len(left_bytes) // stored.itemsize * one.itemsize))
                convert(left_bytes, narrow)
                yield narrow, right_bytes


def _is_folded_well(measure: Measure) -> bool:
    """True if two weights differ by no more than their factors may miss."""
    stats = measure.stats()
    return (
        stats is not None
        and not stats.num_nonfinite
        and stats.relative_error is not None
        and stats.relative_error <= _MAX_MISSED
    )


def _dtype_notes(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield the way to compare tensors of which one side may hold the other's values rounded."""
    dtypes = Counter((tensor.dtype_a, tensor.dtype_b) for tensor in tensors if tensor.status == "dtype")
    for (a, b), number in dtypes.items():
        one, two = BY_NAME.get(str(a)), BY_NAME.get(str(b))
        if one and two and one.is_convertible and two.is_convertible and one.itemsize != two.itemsize:
            order, narrow = ("A B", two) if two.itemsize < one.itemsize else ("B A", one)
            yield (
                f"{count(number, 'tensor')} {short_dtype(one.name)} in A and {short_dtype(two.name)} in B: "
                f"`diff {order} --as {short_dtype(narrow.name)}` rounds the wider side first"
            )


def _frozen_notes(tensors: Sequence[TensorDiff]) -> Iterator[str]:
    """Yield a note that says whether the frozen factors of two OSFT checkpoints are the same."""
    differs: dict[str, bool] = {}
    for tensor in tensors:
        if tensor.name.endswith(HIGH) and (path := factor_of(tensor.name)) is not None:
            differs[path] = differs.get(path, False) or tensor.is_difference
    changed = [path for path, is_changed in differs.items() if is_changed]
    if changed:
        yield (
            f"frozen factors differ in {len(changed)} of {count(len(differs), 'weight')}, which one training never "
            f"does: {listed(changed)}"
        )
    elif differs:
        yield f"frozen factors are the same in all of {count(len(differs), 'weight')}"


def _unravel(flat: int | None, shape: Shape) -> Shape | None:
    """Return the index of an element that is counted row-major."""
    if flat is None:
        return None
    index: list[int] = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))
