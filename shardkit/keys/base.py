"""A model's names held against those of its base on the Hub."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shardkit.core.regions import Shape
from shardkit.keys.names import Segments, join

# Buffers that today's models compute and no file needs: rotary frequencies, positions, causal masks,
# sinusoids. Files of transformers before 4.3x have them, some of them once for each layer.
_COMPUTED = re.compile(
    r"(?:^|\.)(?:rotary_emb\.inv_freq|position_ids|masked_bias|causal_mask|embed_positions\.weights)$"
)
_MASK = re.compile(r"(?:^|\.)(?:attn|attention|self_attention)\.bias$")
_MASK_NDIM = 4
_MODERN = {"gamma": "weight", "beta": "bias"}

_MIN_SHARE = 0.25  # of the names below a prefix; fused experts and renamed towers may not match


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """How the names to write differ from the base's."""

    missing: tuple[str, ...] = ()
    """Names of the base that would not be written, except those that a tie replaces."""
    unexpected: tuple[str, ...] = ()
    """Names that the base lacks, except copies of tied tensors."""
    computed: tuple[str, ...] = ()
    """Names of buffers that only one side has and that every model computes itself."""
    wrong_shapes: tuple[tuple[str, Shape, Shape], ...] = ()
    """(name, the base's shape, ours)."""
    tied: tuple[str, ...] = ()
    """Names that differ only because one side stores a tied tensor once and the other twice."""

    @property
    def is_equal(self) -> bool:
        """True where nothing differs, ties aside."""
        return not (self.missing or self.unexpected or self.wrong_shapes)


def is_computed(name: str, shape: Shape) -> bool:
    """True for a buffer of old files that every model computes itself."""
    return bool(_COMPUTED.search(name) or (len(shape) == _MASK_NDIM and _MASK.search(name)))


def modern_name(name: str) -> str:
    """Return a name as transformers reads it: gamma and beta of the first BERTs are weight and bias.

    Source: transformers 5.23, conversion_mapping, "legacy".
    """
    return re.sub(r"(?<=LayerNorm\.)(?:gamma|beta)$", lambda found: _MODERN[found[0]], name)


def compare_with_base(
    ours: Mapping[str, Shape], base: Mapping[str, Shape], *, ties: Iterable[Collection[str]] = ()
) -> BaseComparison:
    """Compare the names and shapes to write with those of the base.

    Args:
        ours: shape by output name.
        base: shape by name in the base.
        ties: groups of names that are one parameter, e.g. [("model.embed_tokens.weight", "lm_head.weight")].
            Another name of its group replaces a name that one side lacks.
    """
    groups = {name: set(group) for group in ties for name in group}
    missing, unexpected, tied, computed = list[str](), list[str](), list[str](), list[str]()
    for one, other, lacking in ((base, ours, missing), (ours, base, unexpected)):
        for name in one:
            if name in other:
                continue
            if groups.get(name, set()) & other.keys():
                tied.append(name)
            else:
                (computed if is_computed(name, one[name]) else lacking).append(name)
    return BaseComparison(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        computed=tuple(computed),
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
        The prefix with the most matches, or a prefix of it where names outside of it match too
        (`lm_head.weight` beside `model.`). None where two prefixes match equally well, or too few names
        match.
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
