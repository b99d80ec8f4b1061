"""Split dotted names into segments, remove the segments that wrappers add, sort names naturally, match prefixes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

Segments = tuple[str, ...]

COMPILED = "_orig_mod"
WRAPPERS = frozenset(
    {COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_fpw_module"}
)
"""The segments that wrappers add to names: torch.compile, activation checkpointing, FSDP1, Lightning's
strategies, fairscale. No model has a submodule of such a name."""
MODULE = "module"
"""The segment that DDP and others add. Unlike `WRAPPERS`, models do have submodules of that name."""
PEFT = ("base_model", "model")
"""The segments that PEFT puts before every name of a model that it wraps. `keys.peft` knows those inside names."""
IN_BLOCK = re.compile(r"(?:^|\.)\d+\.")  # layers.0.

# Name of FSDP1's flat parameter in a LOCAL_STATE_DICT. torch 2.13, torch/distributed/fsdp/_flat_param.py: FLAT_PARAM;
# "flat_param" before torch 2.0.
_FLAT = re.compile(r"_?flat_param(_\d+)?")
_DIGITS = re.compile(r"([0-9]+)")
_MIN_SHARE = 0.25  # of the names below a prefix; fused experts and renamed towers may not match


def split(name: str) -> Segments:
    """Return the segments of a name, that is, the parts between dots; `join` is the inverse."""
    return tuple(name.split("."))


def join(segments: Iterable[str]) -> str:
    """Return the dotted name of segments."""
    return ".".join(segments)


def is_number(segment: str) -> bool:
    """True for the index of a numbered container, as in `layers.0`."""
    return segment.isascii() and segment.isdigit()


def clean(name: str) -> Segments:
    """Return the segments of a name without those that wrappers add, at any position."""
    segments = split(name)
    if WRAPPERS.isdisjoint(segments):
        return segments
    # A name of wrappers' segments only is not the name of a wrapped parameter.
    return tuple(segment for segment in segments if segment not in WRAPPERS) or segments


def clean_name(path: str) -> str:
    """Return the name of a parameter or module without the segments that wrappers add; empty for a wrapped root."""
    return join(segment for segment in split(path) if segment not in WRAPPERS)


def is_flat_parameter(name: str) -> bool:
    """True for the name of a flat parameter of FSDP1, which contains many tensors end to end."""
    return _FLAT.fullmatch(name.rpartition(".")[2]) is not None


def natural(name: str) -> tuple[object, ...]:
    """Return a sort key that compares numbers as numbers: `layers.2` before `layers.10`."""
    parts: list[object] = list(_DIGITS.split(name))
    for place in range(1, len(parts), 2):
        digits = str(parts[place])
        # By length and then by text. This works for numbers of any length, without the cost and the limits of `int`.
        parts[place] = (len(digits.lstrip("0")), digits.lstrip("0"), digits)
    return tuple(parts)


def match_prefix(names: Collection[Segments], base: Collection[str]) -> Segments | None:
    """Return the prefix below which names are the base's, or None if no prefix is clearly the best.

    For example, ["net.a.weight", "net.b.weight"] and the base's {"a.weight", "b.weight"} give ("net",).

    Args:
        names: names without the segments of wrappers.
        base: the base's names, as a set or a dict.

    Returns:
        The prefix with the most matches, or a prefix of it if names outside of it match too (`lm_head.weight`
        next to `model.`). None if two prefixes match equally well, or too few names match.
    """
    counts = Counter[Segments]()
    for segments in names:
        name, start = join(segments), 0
        for depth in range(len(segments)):
            if name[start:] in base:
                counts[segments[:depth]] += 1
            start += len(segments[depth]) + 1
    if not counts:
        return None
    (best, most), *rest = counts.most_common()
    if any(count == most and not _on_one_line(best, prefix) for prefix, count in rest):
        return None
    for depth in range(len(best)):
        if counts[best[:depth]]:
            best = best[:depth]
            break
    below = sum(segments[: len(best)] == best for segments in names)
    return best if counts[best] >= _MIN_SHARE * below else None


def _on_one_line(a: Segments, b: Segments) -> bool:
    shorter = min(len(a), len(b))
    return a[:shorter] == b[:shorter]


def in_order(names: Iterable[str], order: Collection[str] | None) -> list[str]:
    """Return names in the order of `order`, followed by the names that it lacks in natural order.

    A set has no order, so it counts as None.
    """
    if order is None or isinstance(order, (set, frozenset)):
        return sorted(names, key=natural)
    position = {name: place for place, name in enumerate(order)}
    last = len(position)
    return sorted(names, key=lambda name: (position.get(name, last), natural(name)))
