"""The answer of diff: the result and its parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from shardkit.core.regions import Shape

Status = Literal["equal", "close", "tied", "rounded", "only_a", "only_b", "shape", "dtype", "values"]

SYMBOLS: dict[Status, str] = {
    "equal": "=",
    "close": "=",
    "tied": "=",
    "rounded": "~",
    "only_a": "-",
    "only_b": "+",
    "shape": "*",
    "dtype": "*",
    "values": "*",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """How much two tensors differ, over the elements that are finite numbers on both sides.

    The real and imaginary parts of complex tensors count as values of their own.
    """

    max_abs: float
    """Largest |a - b|."""
    max_rel: float
    """Largest |a - b| / max(|a|, |b|); at most 2."""
    max_ulp: int | None
    """Largest number of representable values between a and b; None where the dtypes differ or have no ulp."""
    cosine: float | None
    """Cosine of the angle between the tensors as vectors; None where one of them is zero."""
    relative_error: float | None
    """|a - b| / max(|a|, |b|) of the tensors as vectors (Euclidean norms); None where both are zero."""
    num_nonfinite: int
    """Values that differ where at least one is infinite or NaN; no figure above includes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """One tensor, by its name in the model."""

    name: str
    status: Status
    """"equal" (the same bytes), "close" (within the tolerance), "tied" (only on one side, where it equals a tensor
    that both have), "rounded" (equal after rounding, in the direction of `DiffResult.rounded_side`), "only_a",
    "only_b", or what differs: "shape", "dtype", or else "values"."""
    stored_a: str | None
    """Its name in A; None where A has none."""
    stored_b: str | None
    dtype_a: str | None
    dtype_b: str | None
    shape_a: Shape | None
    """In elements."""
    shape_b: Shape | None
    num_changed: int | None = None
    """Elements whose bits differ, or, with two dtypes, whose values differ. None where nothing was compared."""
    num_outside: int | None = None
    """Elements beyond the tolerance; None where none was given."""
    num_off_rounding: int | None = None
    """Elements of the shorter floating dtype that are not the other side's after rounding; a finite number that becomes
    infinite counts as one. None where neither dtype is shorter."""
    rounded_to: str | None = None
    """For "rounded": "bfloat16" or "float16", whatever dtype the values are stored as."""
    num_flushed: int | None = None
    """For "rounded": elements that are 0 on the rounded side and not on the other."""
    first_changed: Shape | None = None
    """Index of the first element that counts in `num_changed`."""
    tied_to: str | None = None
    """For "tied": the name that both sides have."""
    stats: TensorStats | None = None
    """Figures, where they were asked for, elements differ, and the bits of the dtypes stand for numbers."""

    @property
    def symbol(self) -> str:
        """ "=", "~" (equal after rounding), "-" (only in A), "+" (only in B) or "*"."""
        return SYMBOLS[self.status]

    @property
    def is_difference(self) -> bool:
        """True where A and B are not the same here, not even after rounding."""
        return self.symbol not in "=~"

    @property
    def is_said_by_dtypes(self) -> bool:
        """True for "rounded" where the stored dtypes explain it: they differ, and nothing else was lost."""
        return self.dtype_a != self.dtype_b and (
            not self.num_changed or self.rounded_to in (self.dtype_a, self.dtype_b)
        )

    @property
    def num_elements(self) -> int:
        """Elements of the tensor: of A's where A has it, else of B's."""
        return prod((self.shape_a if self.shape_a is not None else self.shape_b) or ())

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
        if self.stats is None or self.stats.num_nonfinite:
            return (2.0, share)  # more than any finite error between two tensors of like size
        return (self.stats.relative_error or 0.0, share)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"symbol": self.symbol, **asdict(self), "share_changed": self.share_changed}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffResult:
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
    """No tensor differs, and none is equal only after rounding."""
    rounded_side: Literal["a", "b"] | None
    """The side whose "rounded" tensors hold the other's values rounded; None where no tensor is "rounded"."""
    rtol: float | None
    """The tolerance; None where bits are compared."""
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

    @property
    def is_equal_after_rounding(self) -> bool:
        """True where no tensor differs, though some may be equal only after rounding."""
        return not self.differences

    @property
    def num_flushed(self) -> int:
        """Values that rounding made 0, of all "rounded" tensors."""
        return sum(tensor.num_flushed or 0 for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "tensors"}
        counts = {f"num_{status}": self.count(status) for status in SYMBOLS}
        return {
            **plain,
            "is_equal_after_rounding": self.is_equal_after_rounding,
            "num_flushed": self.num_flushed,
            "num_tensors": len(self.tensors),
            **counts,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }
