"""Dotted names in segments, the segments that wrappers add, and the natural order of names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

Segments = tuple[str, ...]

COMPILED = "_orig_mod"
WRAPPERS = frozenset(
    {COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_fpw_module"}
)
"""The segments that wrappers add to names: torch.compile, activation checkpointing, FSDP1, Lightning's
strategies, fairscale. No model has a submodule of such a name."""
MODULE = "module"
"""The segment that DDP and others add; but models do have submodules of that name."""
PEFT = ("base_model", "model")
"""What PEFT puts before every name of the model that it wraps (see `keys.peft` for what it puts inside)."""

_DIGITS = re.compile(r"([0-9]+)")


def split(name: str) -> Segments:
    """Return the parts between dots; `".".join` gives the name back."""
    return tuple(name.split("."))


def join(segments: Iterable[str]) -> str:
    """Return the dotted name of segments."""
    return ".".join(segments)


def is_number(segment: str) -> bool:
    """True for the index of a numbered container, as in `layers.0`."""
    return segment.isascii() and segment.isdigit()


def clean(name: str) -> Segments:
    """Return the segments of a name without those of wrappers, wherever they are."""
    segments = split(name)
    if WRAPPERS.isdisjoint(segments):
        return segments
    # A name of nothing but wrappers is not the name of a wrapped parameter.
    return tuple(segment for segment in segments if segment not in WRAPPERS) or segments


def clean_name(path: str) -> str:
    """Return the name of a parameter or module without wrappers' segments; empty for a wrapped root."""
    return join(segment for segment in split(path) if segment not in WRAPPERS)


def natural(name: str) -> tuple[object, ...]:
    """Return a sort key that compares numbers as numbers: `layers.2` before `layers.10`."""
    parts: list[object] = list(_DIGITS.split(name))
    for at in range(1, len(parts), 2):
        digits = str(parts[at])
        # By length and then text, which takes numbers of any length and has neither the cost nor the limits
        # of `int`.
        parts[at] = (len(digits.lstrip("0")), digits.lstrip("0"), digits)
    return tuple(parts)


def common_prefix(names: Sequence[Segments]) -> Segments:
    """Return the segments that all names begin with."""
    if not names:
        return ()
    low, high = min(names), max(names)
    for at, (one, other) in enumerate(zip(low, high, strict=False)):
        if one != other:
            return low[:at]
    return low if len(low) <= len(high) else high


def in_order(names: Iterable[str], order: Collection[str] | None) -> list[str]:
    """Return names sorted: first those that `order` lists, as it lists them, then naturally.

    A set has no order, so it is as good as None.
    """
    if order is None or isinstance(order, (set, frozenset)):
        return sorted(names, key=natural)
    position = {name: at for at, name in enumerate(order)}
    last = len(position)
    return sorted(names, key=lambda name: (position.get(name, last), natural(name)))
