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
_BAND_BYTES = MIB  # of one side: the processor's cache keeps both while they are compared
_BUFFERS = 8  # of a band's size: two for each side while it is gathered, and the masks
# Values measured at once: their float64s stay in the processor's cache, and malloc keeps them.
_MAX_VALUES = 16 * KIB
_BYTES_PER_VALUE = 160  # that measuring takes at most: float64s of both sides, differences, masks


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
        """None compares bits."""
        from shardkit.operations.diff.values import Tolerance

        is_exact = self.rtol is None and self.atol is None
        return None if is_exact else Tolerance(self.rtol or 0.0, self.atol or 0.0)

    @property
    def target(self) -> DType | None:
        """What A is rounded to; None compares it as it is."""
        return None if self.as_dtype is None else CASTS[short_dtype(self.as_dtype)]

    @property
    def takes_stats(self) -> bool:
        """True if figures are taken of how much tensors differ."""
        return self.stats or self.sort == "difference"

    def max_elements(self, itemsize: int, *, measured: bool) -> int:
        """Return how many elements a band has, for the longer itemsize of both sides; measuring takes more memory."""
        budget = parse_size(self.max_memory)
        if measured:
            return max(min(_MAX_VALUES, budget // (_BYTES_PER_VALUE + _BUFFERS * itemsize)), 1)
        return max(min(_BAND_BYTES, budget // _BUFFERS) // itemsize, 1)

    def check(self) -> None:
        """Refuse what cannot be carried out.

        Raises:
            UsageError: an option has no such value.
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
