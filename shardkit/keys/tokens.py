"""Find out whether a model's vocabulary is larger or smaller than its base's, by tensors with a row per token. Pure.

The base's config has the number of tokens, and its names show which tensors are input and output embeddings. If the
vocabulary changed, all of them have the same new number of rows and are otherwise unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardkit.core.regions import Shape
from shardkit.keys.names import Segments, split
from shardkit.keys.ties import is_embedding, is_output, is_output_bias

_COUNTS = ("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size")
_OF_DECODER = frozenset({"decoder_vocab_size", "tgt_vocab_size"})
# Embeddings whose number of rows has a key of its own (Gemma 3n and 4).
_OWN_COUNTS = {"embed_tokens_per_layer": "vocab_size_per_layer_input"}
COUNTS = (*_COUNTS, *_OWN_COUNTS.values())
"""Keys of a config whose value is the number of rows of a vocabulary."""
_TEXT_PARTS = frozenset({"text", "llm", "language", "language_model"})
_MAX_DEPTH = 4
_SHARES = (2, 3, 4)
_MULTIPLES = tuple(8 << n for n in range(11))
_VALUE_HEAD = 4  # a head with fewer than 1/4 of the rows, next to an unchanged embedding, is no output layer

ConfigPath = tuple[str, ...]
"""Keys that lead to a number in a config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """The tensors of the base with a row for each token of a vocabulary whose size differs in the model."""

    old: int
    """Number of rows in the base."""
    rows: Mapping[str, int]
    """Name in the base -> number of rows in the model, for tensors that the model has."""
    shapes: Mapping[str, Shape]
    """Name in the base -> shape with the model's number of rows; empty if the model has several such numbers."""
    places: tuple[ConfigPath, ...]
    """Paths in the base's config whose value is the number of tokens."""

    @property
    def new(self) -> tuple[int, ...]:
        """Number of rows in the model; several numbers if the tensors differ among themselves."""
        return tuple(dict.fromkeys(self.rows.values()))

    @property
    def are_alike(self) -> bool:
        """True if all tensors have the same number of rows in the model."""
        return len(self.new) == 1

    @property
    def is_cut(self) -> bool:
        """True if the model has fewer rows than the base."""
        return self.are_alike and self.new[0] < self.old

    @property
    def share(self) -> int | None:
        """2, 3 or 4 if the model has a half, a third or a fourth of the base's rows, like one of N ranks; else None."""
        shares = (n for n in _SHARES if self.new[0] in (self.old // n, -(-self.old // n)))
        return next(shares, None) if self.is_cut else None


def find_token_rows(
    own_shapes: Mapping[str, Shape], base: Mapping[str, Shape], config: Mapping[str, Any]
) -> list[TokenRows]:
    """Return each vocabulary whose number of rows differs between a model and its base.

    Args:
        own_shapes: name in the model, or below a wrapper's prefix -> shape.
        base: name in the base -> shape.
        config: the base's config.
    """
    counts = dict(_counts(config, ()))
    ends: dict[Segments, list[str]] = {}
    for name in own_shapes:
        for end in filter(None, (_end(name), _role(name))):
            ends.setdefault(end, []).append(name)
    counted = list[_TokenTensor]()
    for name, shape in base.items():
        dim = _token_dim(name, shape)
        places = () if dim is None else tuple(_places(name, shape[dim], counts))
        if dim is not None and places:
            counted.append(_TokenTensor(name, shape, dim, places, _rows(name, shape, dim, own_shapes, ends)))
    return [rows for group in _group_by_place(counted) if (rows := _token_rows(group)) is not None]


def with_token_rows(shapes: Mapping[str, Shape], tokens: int) -> dict[str, Shape]:
    """Return a model's shapes with `tokens` rows in every embedding of tokens and every output layer."""
    dims = {name: _token_dim(name, shape) for name, shape in shapes.items()}
    return {
        name: shape if (dim := dims[name]) is None else (*shape[:dim], tokens, *shape[dim + 1 :])
        for name, shape in shapes.items()
    }


class _TokenTensor(NamedTuple):
    """A tensor of the base with an element or a row for each token."""

    name: str
    shape: Shape
    dim: int
    """The dim that has an index for each token."""
    places: tuple[ConfigPath, ...]
    """Paths in the config whose value is the size of that dim."""
    rows: int | None
    """Size of that dim in the model; None if the model lacks the tensor."""


def _counts(config: Mapping[str, Any], above: ConfigPath) -> Iterator[tuple[ConfigPath, int]]:
    """Yield (path, number) for each number of tokens in a config; `above` is the path of `config` itself."""
    for key, value in config.items():
        if isinstance(value, Mapping) and len(above) < _MAX_DEPTH:
            yield from _counts(value, (*above, key))
        elif key in COUNTS and isinstance(value, int) and not isinstance(value, bool):
            yield (*above, key), value


def _token_dim(name: str, shape: Shape) -> int | None:
    """Return the dim of a tensor that has an index for each token; None if the tensor has no such dim."""
    if is_output_bias(name):
        return len(shape) - 1 if shape and set(shape[:-1]) <= {1} else None
    module = split(name)[-2:-1]
    is_row = is_embedding(name) or is_output(name) or (module and module[0] in _OWN_COUNTS)
    return 0 if is_row and len(shape) == 2 else None


def _places(name: str, rows: int, counts: Mapping[ConfigPath, int]) -> Iterator[ConfigPath]:
    """Yield the paths in the config whose value is the number of a tensor's rows."""
    segments = split(name)
    key = next((_OWN_COUNTS[segment] for segment in segments if segment in _OWN_COUNTS), None)
    for place, count in counts.items():
        parts = [part.removesuffix("_config") for part in place[:-1]]
        is_leaf = place[-1] == key if key else place[-1] in _COUNTS and _may_count(place, segments, counts)
        if count == rows and is_leaf and all(_may_contain(part, segments) for part in parts):
            yield place


def _may_count(place: ConfigPath, segments: Segments, counts: Mapping[ConfigPath, int]) -> bool:
    """True if a count may apply to a tensor, given that encoder and decoder may have one each."""
    key, is_encoders = place[-1], "encoder" in segments
    if key == "vocab_size":
        has_two = (*place[:-1], "decoder_vocab_size") in counts
        return not has_two or is_encoders or "shared" in segments
    return is_encoders == (key not in _OF_DECODER) or "shared" in segments


def _may_contain(part: str, segments: Segments) -> bool:
    """True if a tensor may lie in a part of the model that has its own config, such as "text" or "decoder"."""
    if part == "decoder":
        return "encoder" not in segments
    return part in _TEXT_PARTS or part in segments


def _end(name: str) -> Segments:
    return split(name)[-2:]


def _role(name: str) -> Segments:
    """Return the role of a tensor, independent of a class's names: ("input",), ("output",) or ("bias",); else ()."""
    roles = {"input": is_embedding, "output": is_output, "bias": is_output_bias}
    return tuple(role for role, has_role in roles.items() if has_role(name))


def _rows(
    name: str, shape: Shape, dim: int, own_shapes: Mapping[str, Shape], ends: Mapping[Segments, Sequence[str]]
) -> int | None:
    """Return the number of rows of the model's tensor that corresponds to one of the base's, or None.

    It has the same name, end of the name or role, and equal other dims.
    """
    names = [name] if name in own_shapes else ends.get(_end(name)) or ends.get(_role(name), ())
    alike = [
        candidate for candidate in names if _other_dims(own_shapes[candidate], dim) == _other_dims(shape, dim)
    ]
    longest = max((_num_common_segments(name, candidate) for candidate in alike), default=0)
    rows = {
        own_shapes[candidate][dim] for candidate in alike if _num_common_segments(name, candidate) == longest
    }
    return rows.pop() if len(rows) == 1 else None


def _other_dims(shape: Shape, dim: int) -> tuple[int, ...]:
    return (len(shape), *shape[:dim], *shape[dim + 1 :])


def _num_common_segments(first: str, second: str) -> int:
    """Return the number of equal segments at the ends of two names."""
    pairs = zip(reversed(split(first)), reversed(split(second)), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(split(first)), len(split(second))))


def _group_by_place(counted: Iterable[_TokenTensor]) -> list[list[_TokenTensor]]:
    """Group tensors whose numbers of rows have a path of the config in common."""
    groups = list[list[_TokenTensor]]()
    for tensor in counted:
        near = [group for group in groups if any(set(tensor.places) & set(member.places) for member in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(member for group in near for member in group), tensor])
    return groups


def _token_rows(group: Sequence[_TokenTensor]) -> TokenRows | None:
    """Return a vocabulary whose number of rows has changed, by its tensors; None if it has not, or if only a head has."""
    rows = {tensor.name: tensor.rows for tensor in group if tensor.rows is not None}
    old = group[0].shape[group[0].dim]
    if set(rows.values()) <= {old} or _are_other_heads(rows, old):
        return None
    changed = TokenRows(
        old=old,
        rows=rows,
        shapes={},
        places=tuple(dict.fromkeys(place for tensor in group for place in tensor.places)),
    )
    if not changed.are_alike:
        return changed
    shapes = {name: (*shape[:dim], changed.new[0], *shape[dim + 1 :]) for name, shape, dim, _, _ in group}
    return replace(changed, shapes=shapes)


def _are_other_heads(rows: Mapping[str, int], old: int) -> bool:
    """True if only the head changed, to so few rows that it is a critic's or a classifier's."""
    changed = {name: number for name, number in rows.items() if number != old}
    return any(number == old and is_embedding(name) for name, number in rows.items()) and all(
        not is_embedding(name) and number * _VALUE_HEAD < old for name, number in changed.items()
    )


def paddings(tokens: int) -> set[int]:
    """Return the numbers of rows that a vocabulary may be padded to: the next multiples of 8, 16, ... to 128 x 64.

    Megatron-Core pads to a multiple of `make_vocab_size_divisible_by`, 128 by default, times the number of
    tensor-parallel ranks.
    """
    return {-(-tokens // multiple) * multiple for multiple in _MULTIPLES}


def with_num_tokens(config: Mapping[str, Any], places: Iterable[ConfigPath], rows: int) -> dict[str, Any]:
    """Return a copy of a config with `rows` as the number of tokens (of rows of an embedding) at some paths.

    With 12 rows at ("text_config", "vocab_size"), {"text_config": {"vocab_size": 10}} becomes {"text_config": {"vocab_size":
    12}}.
    """
    changed = dict(config)
    for place in places:
        if len(place) == 1:
            changed[place[0]] = rows
        else:
            changed[place[0]] = with_num_tokens(changed[place[0]], [place[1:]], rows)
    return changed


def counts_tokens(config: Mapping[str, Any], places: Iterable[ConfigPath], rows: int) -> bool:
    """True if a config has this number of tokens at one of the paths."""
    counts = dict(_counts(config, ()))
    return any(counts.get(place) == rows for place in places)
