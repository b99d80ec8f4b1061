"""A model's names held against those of its base on the Hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shardkit.core.regions import Shape
from shardkit.keys.names import Segments, join

_MIN_SHARE = 0.25  # of the names below a prefix; fused experts and renamed towers may miss


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """How the names to be written differ from the base's."""

    missing: tuple[str, ...] = ()
    """Names of the base that would not be written, without those that a tie makes good."""
    unexpected: tuple[str, ...] = ()
    """Names that the base does not have, without copies of tied tensors."""
    wrong_shapes: tuple[tuple[str, Shape, Shape], ...] = ()
    """(name, the base's shape, ours)."""
    tied: tuple[str, ...] = ()
    """Names that differ only because one side stores a tied tensor once and the other twice."""

    @property
    def is_equal(self) -> bool:
        """True where nothing differs, ties aside."""
        return not (self.missing or self.unexpected or self.wrong_shapes)


def compare_with_base(
    ours: Mapping[str, Shape], base: Mapping[str, Shape], *, ties: Iterable[Collection[str]] = ()
) -> BaseComparison:
    """Compare names and shapes to be written with those of the base.

    Args:
        ours: shape by output name.
        base: shape by name in the base.
        ties: groups of names that are one parameter, e.g. [("model.embed_tokens.weight", "lm_head.weight")].
            A name that one side lacks is made good by another name of its group.
    """
    groups = {name: set(group) for group in ties for name in group}
    missing, unexpected, tied = list[str](), list[str](), list[str]()
    for name in base:
        if name not in ours:
            (tied if groups.get(name, set()) & ours.keys() else missing).append(name)
    for name in ours:
        if name not in base:
            (tied if groups.get(name, set()) & base.keys() else unexpected).append(name)
    return BaseComparison(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        wrong_shapes=tuple(
            (name, tuple(base[name]), tuple(shape))
            for name, shape in ours.items()
            if name in base and tuple(base[name]) != tuple(shape)
        ),
        tied=tuple(tied),
    )


def match_prefix(names: Collection[Segments], base: Collection[str]) -> Segments | None:
    """Return the prefix below which names are those of the base, or None where nothing shows one.

    Args:
        names: without the segments of wrappers.
        base: the base's names, quick to look up.

    Returns:
        The prefix with the most matches; a prefix of it instead where names outside of it match there too
        (`lm_head.weight` beside `model.`); None for a tie, or where too few names match.
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
    (best, most), *others = counts.most_common()
    if any(count == most and not _on_one_line(best, other) for other, count in others):
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
