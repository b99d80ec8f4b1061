"""The options of diff."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from shardkit.core.dtypes import CASTS, DType, DTypeName, short_dtype
from shardkit.core.text import KIB, MIB, escape, parse_size
from shardkit.core.threads import ProgressOption
from shardkit.errors import UsageError

if TYPE_CHECKING:
    from shardkit.operations.diff.values import Tolerance

Sort = Literal["name", "difference"]
SORTS: tuple[str, ...] = get_args(Sort)
_MIN_MEMORY = 2 * MIB
_BAND_BYTES = (
    MIB  # a band is the run of elements compared at a time; per side, so that both fit into the cache
)
_BUFFERS = 8  # number of buffers of a band's size: two for each side while it is gathered, and masks
# Values that are measured at a time: their float64s fit into the processor's cache, and malloc reuses their memory.
_MAX_VALUES = 16 * KIB
_BYTES_PER_VALUE = 160  # maximum memory of measuring: float64s of both sides, differences, masks


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The keywords of `diff`, whose docstring describes them."""

    a: str | os.PathLike[str] = field(kw_only=False)
    b: str | os.PathLike[str] = field(kw_only=False)
    rtol: float | None = None
    atol: float | None = None
    as_dtype: DTypeName | None = None
    stats: bool = False
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    all_tensors: bool = False
    strict: bool = False
    sort: Sort = "name"
    max_memory: str | int = 256 * MIB
    follow_links: bool = False
    progress: ProgressOption = None

    @property
    def tolerance(self) -> Tolerance | None:
        """The tolerance of `rtol` and `atol`; None if bits are compared."""
        from shardkit.operations.diff.values import Tolerance

        is_exact = self.rtol is None and self.atol is None
        return None if is_exact else Tolerance(self.rtol or 0.0, self.atol or 0.0)

    @property
    def target(self) -> DType | None:
        """The dtype that A is rounded to, or None."""
        return None if self.as_dtype is None else CASTS[short_dtype(self.as_dtype)]

    @property
    def takes_stats(self) -> bool:
        """True if statistics are computed."""
        return self.stats or self.sort == "difference"

    def max_elements(self, itemsize: int, *, measured: bool) -> int:
        """Return the number of elements of a band.

        Args:
            itemsize: the longer itemsize of both sides.
            measured: values are computed from the bytes, which takes more memory.
        """
        budget = parse_size(self.max_memory)
        if measured:
            return max(min(_MAX_VALUES, budget // (_BYTES_PER_VALUE + _BUFFERS * itemsize)), 1)
        return max(min(_BAND_BYTES, budget // _BUFFERS) // itemsize, 1)

    def check(self) -> None:
        """Check the values of the options.

        Raises:
            UsageError: a value is not allowed.
        """
        if self.sort not in SORTS:
            raise UsageError(f"--sort {escape(self.sort)!r} is not one of {', '.join(SORTS)}")
        if self.as_dtype is not None and short_dtype(self.as_dtype) not in CASTS:
            raise UsageError(f"--as {escape(self.as_dtype)!r} is not one of {', '.join(CASTS)}")
        for option, number in (("--rtol", self.rtol), ("--atol", self.atol)):
            if number is not None and not (math.isfinite(number) and number >= 0):
                raise UsageError(f"{option} must be a number of at least 0, not {number}")
        if parse_size(self.max_memory) < _MIN_MEMORY:
            raise UsageError(f"--max-memory must be at least 2MiB, not {self.max_memory}")
