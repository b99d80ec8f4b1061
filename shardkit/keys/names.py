"""Dotted names in segments, the segments that wrappers put into them, and their natural order."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

Segments = tuple[str, ...]

# What wraps a module without being part of the model: torch.compile, activation checkpointing, FSDP1,
# Lightning's strategies, fairscale. No model calls a submodule of its own so.
WRAPPERS = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_fpw_module"}
)
# DDP and others; but models do have submodules of that name.
MODULE = "module"
# What PEFT puts before every name of the model that it wraps.
PEFT = ("base_model", "model")

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
    """Return the segments of a name without those of wrappers, wherever they stand."""
    segments = split(name)
    if WRAPPERS.isdisjoint(segments):
        return segments
    # A name that is nothing but wrappers is not one of a wrapped parameter.
    return tuple(segment for segment in segments if segment not in WRAPPERS) or segments


def clean_name(path: str) -> str:
    """Return the dotted name of a parameter or module without the segments of wrappers; a wrapped root's is empty."""
    return join(segment for segment in split(path) if segment not in WRAPPERS)


def natural(name: str) -> tuple[object, ...]:
    """Return a sort key that counts numbers: `layers.2` before `layers.10`."""
    parts: list[object] = list(_DIGITS.split(name))
    for at in range(1, len(parts), 2):
        digits = str(parts[at])
        # By length and then text: numbers of any length, without the cost or limits of `int`.
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
