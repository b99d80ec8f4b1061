"""Describe a tensor as a function of stored tensors: concatenated, cut, permuted, reshaped. Pure: shapes and indexes.

A model and its files often have the same numbers in different forms: experts one by one or stacked; query, key and
value separate or as one; rows in another order for rotary embeddings. The tensor that is wanted is the *target*. Its
expression states, for each element of the target, which element of which stored tensor it is. An expression is a tree:

    Stored    a stored tensor
    Cut       a box of another expression
    Concat    parts side by side along one dim
    Permuted  dims in another order
    Reshaped  the same elements, counted row-major, in another shape
    Zeros     padding
    Opaque    the result of transformers' own code on whole tensors; only at the root

For example, the second expert of a stacked tensor "w" of shape (8, 64, 32) is

    cut(Stored("w", (8, 64, 32)), Region((1, 0, 0), (1, 64, 32)))

Nodes are made by the functions `cut`, `concat`, `stack`, `permute` and `reshape`. These keep trees in a simple form:
cuts are moved down to the leaves, and operations without effect are left out. So `pieces` can find the parts of a tree
that only put boxes side by side, and whole byte ranges are copied for them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from shardkit._folding import fold
from shardkit.core.regions import Region, Shape, flat_offset, full_region, intersect, relative_to


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Cut:
    """A box (a region) of another expression."""

    of: Expression
    region: Region

    @property
    def shape(self) -> Shape:
        """Sizes of the box."""
        return self.region.sizes


@dataclass(frozen=True, slots=True)
class Concat:
    """Parts side by side along a dim."""

    parts: tuple[Expression, ...]
    dim: int
    shape: Shape

    def placed(self) -> Iterator[tuple[Expression, Region]]:
        """Yield (part, its region in the result)."""
        start = 0
        for part in self.parts:
            offsets = (*(0,) * self.dim, start, *(0,) * (len(self.shape) - self.dim - 1))
            yield part, Region(offsets, part.shape)
            start += part.shape[self.dim]


@dataclass(frozen=True, slots=True)
class Permuted:
    """Dims in another order: dim `d` is dim `dims[d]` of the inner expression."""

    of: Expression
    dims: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The same elements, counted row-major, in another shape."""

    of: Expression
    shape: Shape


@dataclass(frozen=True, slots=True)
class Zeros:
    """Padding."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class Opaque:
    """A result of one of transformers' converters, whose operations cannot be expressed here.

    One call of the converter makes all targets with equal `group` and `parts`.
    """

    target: str
    """The tensor's name in the transformers model."""
    group: str
    """Name in the model of the first target of the same call. The converter is called with this name."""
    parts: tuple[tuple[str, Expression], ...]
    """The converter's inputs in its order, at least one: (name that the converter sees, tensor)."""
    shape: Shape


Expression = Stored | Cut | Concat | Permuted | Reshaped | Zeros | Opaque


def cut(of: Expression, region: Region) -> Expression:
    """Return a box of an expression. The cut is made as deep in the tree as possible.

    Raises:
        ValueError: the box does not lie within the expression's shape.
    """
    inside = len(region.sizes) == len(of.shape) == len(region.offsets)
    if not inside or any(o < 0 or o + n > size for o, n, size in zip(*region, of.shape, strict=True)):
        raise ValueError(f"{region.offsets} + {region.sizes} does not lie in {of.shape}")
    if region == full_region(of.shape):
        return of
    match of:
        case Cut():
            offsets = tuple(a + b for a, b in zip(of.region.offsets, region.offsets, strict=True))
            return Cut(of.of, Region(offsets, region.sizes))
        case Concat():
            met = [
                (part, inner, place)
                for part, place in of.placed()
                if (inner := intersect(place, region)) is not None
            ]
            if met:
                return concat(
                    [cut(part, relative_to(inner, place.offsets)) for part, inner, place in met], of.dim
                )
        case Permuted():
            back = _inverse(of.dims)
            below = Region(tuple(region.offsets[d] for d in back), tuple(region.sizes[d] for d in back))
            return permute(cut(of.of, below), of.dims)
        case Reshaped():
            below, whole = cover(of.of.shape, of.shape, region)
            if whole == region:
                return reshape(cut(of.of, below), region.sizes)
        case Zeros():
            return Zeros(region.sizes)
    return Cut(of, region)


def concat(parts: Sequence[Expression], dim: int) -> Expression:
    """Return parts side by side along a dim, which may be counted from the end.

    Raises:
        ValueError: there are no parts, or their other dims differ.
    """
    if not parts:
        raise ValueError("nothing to put together")
    num_dims = len(parts[0].shape)
    dim = dim + num_dims if dim < 0 else dim
    other_dims = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if not 0 <= dim < num_dims or len(other_dims) != 1 or len({len(part.shape) for part in parts}) != 1:
        raise ValueError(f"{', '.join(str(part.shape) for part in parts)} do not fit along dim {dim}")
    flat = [
        piece
        for part in parts
        for piece in (part.parts if isinstance(part, Concat) and part.dim == dim else (part,))
    ]
    kept = _merge_neighbours([part for part in flat if part.shape[dim]] or flat[:1], dim)
    if len(kept) == 1:
        return kept[0]
    shape = (*parts[0].shape[:dim], sum(part.shape[dim] for part in kept), *parts[0].shape[dim + 1 :])
    return Concat(tuple(kept), dim, shape)


def _merge_neighbours(parts: list[Expression], dim: int) -> list[Expression]:
    """Return parts along a dim, with neighbouring boxes of one expression merged into one box."""
    joined: list[Expression] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(last, Cut) and isinstance(part, Cut) and last.of == part.of:
            (start, size), (next_start, more) = last.region, part.region
            follows = tuple(o + n * (d == dim) for d, (o, n) in enumerate(zip(start, size, strict=True)))
            if next_start == follows and all(
                a == b for d, (a, b) in enumerate(zip(size, more, strict=True)) if d != dim
            ):
                sizes = tuple(a + b * (d == dim) for d, (a, b) in enumerate(zip(size, more, strict=True)))
                joined[-1] = cut(last.of, Region(start, sizes))
                continue
        joined.append(part)
    return joined


def stack(parts: Sequence[Expression], dim: int) -> Expression:
    """Return parts of equal shapes stacked along a new dim, which may be counted from the end.

    Raises:
        ValueError: there are no parts, or their shapes differ.
    """
    if not parts:
        raise ValueError("nothing to put together")
    dim = dim + len(parts[0].shape) + 1 if dim < 0 else dim
    return concat([reshape(part, (*part.shape[:dim], 1, *part.shape[dim:])) for part in parts], dim)


def permute(of: Expression, dims: Sequence[int]) -> Expression:
    """Return an expression with its dims in another order: dim `d` of the result is dim `dims[d]` of the input.

    Raises:
        ValueError: `dims` does not list each dim once.
    """
    dims = tuple(dim + len(of.shape) if dim < 0 else dim for dim in dims)
    if sorted(dims) != list(range(len(of.shape))):
        raise ValueError(f"{dims} are not the dims of {of.shape}")
    shape = tuple(of.shape[dim] for dim in dims)
    moved = [dim for dim in dims if of.shape[dim] != 1]
    if moved == sorted(moved):  # only dims of size 1 move, so all elements stay in their order
        return reshape(of, shape)
    if isinstance(of, Permuted):
        return permute(of.of, [of.dims[dim] for dim in dims])
    return Zeros(shape) if isinstance(of, Zeros) else Permuted(of, dims, shape)


def reshape(of: Expression, shape: Shape) -> Expression:
    """Return the same elements, counted row-major, in another shape.

    Raises:
        ValueError: the shapes differ in their number of elements.
    """
    shape = tuple(shape)
    if prod(shape) != prod(of.shape):
        raise ValueError(f"{of.shape} has another number of elements than {shape}")
    if shape == of.shape:
        return of
    if isinstance(of, Reshaped):
        return reshape(of.of, shape)
    return Zeros(shape) if isinstance(of, Zeros) else Reshaped(of, shape)


def interleave(of: Expression, dim: int, num_groups: int) -> Expression:
    """Interleave `num_groups` equal stretches of a dim: with 2 groups, a0 a1 b0 b1 becomes a0 b0 a1 b1.

    Raises:
        ValueError: the dim cannot be divided into this number of equal stretches.
    """
    return _swap_groups(of, dim, num_groups, of.shape[dim] // max(num_groups, 1))


def deinterleave(of: Expression, dim: int, num_groups: int) -> Expression:
    """Return the inverse of `interleave`: with 2 groups, a0 b0 a1 b1 becomes a0 a1 b0 b1."""
    return _swap_groups(of, dim, of.shape[dim] // max(num_groups, 1), num_groups)


def _swap_groups(of: Expression, dim: int, outer: int, inner: int) -> Expression:
    apart = reshape(of, (*of.shape[:dim], outer, inner, *of.shape[dim + 1 :]))
    dims = list(range(len(apart.shape)))
    dims[dim], dims[dim + 1] = dims[dim + 1], dims[dim]
    return reshape(permute(apart, dims), of.shape)


def _inverse(dims: Sequence[int]) -> tuple[int, ...]:
    back = [0] * len(dims)
    for place, dim in enumerate(dims):
        back[dim] = place
    return tuple(back)


@lru_cache(maxsize=1024)  # experts have equal shapes
def cover(source: Shape, target: Shape, region: Region) -> tuple[Region, Region]:
    """Return boxes before and after a reshape that have the same elements, the smallest that contain `region`.

    The two have the same elements in the same order, counted row-major within each box. For example, after a reshape
    of (4, 6) to (24,), the elements 8 to 9 lie in row 1, so their boxes are ((1, 2), (1, 2)) and ((8,), (2,)).

    Args:
        source: shape before.
        target: shape after, with the same number of elements.
        region: a box of the target.

    Returns:
        (box of the source, box of the target). The latter is `region` itself if `region` is a box of the source too.
    """
    if 0 in region.sizes:
        return Region((0,) * len(source), (0,) * len(source)), region
    below, above = list[tuple[int, int]](), list[tuple[int, int]]()
    for source_dims, target_dims in _groups(source, target):
        source_shape, target_shape = source[source_dims], target[target_dims]
        offsets, sizes = region.offsets[target_dims], region.sizes[target_dims]
        start = flat_offset(offsets, target_shape)
        stop = flat_offset([o + n - 1 for o, n in zip(offsets, sizes, strict=True)], target_shape) + 1
        while True:
            box, (first, last) = _cover_range(target_shape, start, stop)
            inner, (start, stop) = _cover_range(source_shape, first, last)
            if (start, stop) == (first, last):
                break
        # A group with one dim on each side may be cut anywhere, others only where the range is a box on both sides.
        above += box
        below += inner
    return _region(below), _region(above)


def _region(ranges: Iterable[tuple[int, int]]) -> Region:
    pairs = list(ranges)
    return Region(tuple(start for start, _ in pairs), tuple(size for _, size in pairs))


def _cover_range(shape: Shape, start: int, stop: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Return the smallest contiguous box around a range of elements, as (offset, size) of each dim, and its range."""
    box: list[tuple[int, int]] = []
    rest = prod(shape)
    first, last, base = start, stop - 1, 0
    for dim, size in enumerate(shape):
        rest //= size
        a, b = first // rest, last // rest
        if a != b:
            box.append((a, b - a + 1))
            box += ((0, n) for n in shape[dim + 1 :])
            return box, (base + a * rest, base + (b + 1) * rest)
        box.append((a, 1))
        base, first, last = base + a * rest, first - a * rest, last - a * rest
    return box, (start, stop)


def _groups(source: Shape, target: Shape) -> Iterator[tuple[slice, slice]]:
    """Yield the shortest runs of dims of both shapes with equal numbers of elements.

    For example, (4, 6, 5) and (24, 5) have the runs (4, 6) with (24,), and (5,) with (5,). No dim may be empty.
    """
    a = b = 0
    while a < len(source) or b < len(target):
        first, second = a, b
        source_size, target_size = 1, 1
        if a < len(source):
            source_size, a = source[a], a + 1
        if b < len(target):
            target_size, b = target[b], b + 1
        while source_size != target_size:
            if source_size < target_size:
                source_size, a = source_size * source[a], a + 1
            else:
                target_size, b = target_size * target[b], b + 1
        yield slice(first, a), slice(second, b)


class FilledBox(NamedTuple):
    """A box of a target, and the source of its elements."""

    region: Region
    """The box of the target."""
    of: Expression
    """A stored tensor, if a box of it has the same elements in the same order; else an expression with the region's
    sizes, whose elements have to be gathered."""
    part: Region
    """The box of `of` that has the elements."""

    @property
    def is_box(self) -> bool:
        """True if the bytes are, in order, those of a box of a stored tensor."""
        return isinstance(self.of, Stored)


def pieces(of: Expression) -> Iterator[FilledBox]:
    """Yield the boxes that make up an expression. They tile it without gaps or overlaps."""
    match of:
        case Stored():
            yield FilledBox(full_region(of.shape), of, full_region(of.shape))
            return
        case Cut(Stored() as stored, region):
            yield FilledBox(full_region(of.shape), stored, region)
            return
        case Concat():
            for part, place in of.placed():
                for piece in pieces(part):
                    offsets = tuple(a + b for a, b in zip(place.offsets, piece.region.offsets, strict=True))
                    yield piece._replace(region=Region(offsets, piece.region.sizes))
            return
        case Reshaped():
            below = list(pieces(of.of))
            boxes = [cover(of.shape, of.of.shape, piece.region) for piece in below]
            if all(
                piece.is_box and whole == piece.region for piece, (_, whole) in zip(below, boxes, strict=True)
            ):
                for piece, (box, _) in zip(below, boxes, strict=True):
                    yield piece._replace(region=box)
                return
    yield FilledBox(full_region(of.shape), of, full_region(of.shape))


def leaves(of: Expression) -> Iterator[Stored]:
    """Yield the stored tensors of an expression, from left to right. A tensor may be yielded several times."""
    match of:
        case Stored():
            yield of
        case Concat():
            for part in of.parts:
                yield from leaves(part)
        case Cut() | Permuted() | Reshaped():
            yield from leaves(of.of)
        case Opaque():
            for _, part in of.parts:
                yield from leaves(part)


def locate(of: Expression, index: Sequence[int]) -> tuple[str, Shape] | None:
    """Return (stored name, index) of the element that an element of the expression is; None for padding.

    Raises:
        ValueError: the expression is opaque.
    """
    match of:
        case Stored():
            return of.name, tuple(index)
        case Cut():
            return locate(of.of, [a + b for a, b in zip(index, of.region.offsets, strict=True)])
        case Concat():
            place = index[of.dim]
            stops = list(accumulate(part.shape[of.dim] for part in of.parts))
            number = next(n for n, stop in enumerate(stops) if place < stop)
            inner = list(index)
            inner[of.dim] = place - (stops[number] - of.parts[number].shape[of.dim])
            return locate(of.parts[number], inner)
        case Permuted():
            return locate(of.of, [index[d] for d in _inverse(of.dims)])
        case Reshaped():
            flat, below = flat_offset(index, of.shape), list[int]()
            for size in reversed(of.of.shape):
                flat, place = divmod(flat, size)
                below.append(place)
            return locate(of.of, below[::-1])
        case Zeros():
            return None
        case Opaque():
            raise ValueError(_NOT_KNOWN)


def read_regions(of: Expression, region: Region) -> Iterator[tuple[str, Region]]:
    """Yield the boxes of stored tensors that have to be read for a box of an expression."""
    match of:
        case Stored():
            yield of.name, region
        case Cut():
            offsets = tuple(a + b for a, b in zip(of.region.offsets, region.offsets, strict=True))
            yield from read_regions(of.of, Region(offsets, region.sizes))
        case Concat():
            for part, place in of.placed():
                inner = intersect(place, region)
                if inner is not None:
                    yield from read_regions(part, relative_to(inner, place.offsets))
        case Permuted():
            back = _inverse(of.dims)
            below = Region(tuple(region.offsets[d] for d in back), tuple(region.sizes[d] for d in back))
            yield from read_regions(of.of, below)
        case Reshaped():
            yield from read_regions(of.of, cover(of.of.shape, of.shape, region)[0])
        case Opaque():
            for _, part in of.parts:
                yield from read_regions(part, full_region(part.shape))


def computed_name(target: str, stored: Container[str]) -> str:
    """Return a name for a computed tensor that no stored tensor has: the target's own, or else "TARGET (made)"."""
    return f"{target} (made)" if target in stored else target


def substitute(of: Expression, bound: Mapping[str, Expression]) -> Expression:
    """Return an expression with stored tensors replaced by expressions; tensors that `bound` lacks stay."""
    return _map_leaves(of, lambda leaf: bound.get(leaf.name, leaf))


def rename_leaves(of: Expression, names: Mapping[str, str]) -> Expression:
    """Return an expression with its stored tensors renamed; names that `names` lacks stay."""
    return _map_leaves(of, lambda leaf: Stored(names.get(leaf.name, leaf.name), leaf.shape))


def _map_leaves(of: Expression, make: Callable[[Stored], Expression]) -> Expression:
    match of:
        case Stored():
            return make(of)
        case Cut():
            return cut(_map_leaves(of.of, make), of.region)
        case Concat():
            return concat([_map_leaves(part, make) for part in of.parts], of.dim)
        case Permuted():
            return permute(_map_leaves(of.of, make), of.dims)
        case Reshaped():
            return reshape(_map_leaves(of.of, make), of.shape)
        case Zeros():
            return of
        case Opaque():
            return replace(of, parts=tuple((name, _map_leaves(part, make)) for name, part in of.parts))


_NOT_KNOWN = "transformers' own code makes it, by operations that shardkit does not know"


class Occurrence(NamedTuple):
    """A box of a stored tensor, as an expression of the target that contains its elements."""

    name: str
    """The stored name."""
    region: Region
    """The box of the stored tensor."""
    value: Expression
    """The same elements as an expression of the target."""
    view: Shape
    """The shape in which `region` is a box: the stored shape, or another with the same number of elements."""


def occurrences(of: Expression, target: Expression) -> Iterator[Occurrence]:
    """Yield the boxes of stored tensors that an expression uses, each as an expression of the target.

    Args:
        of: the target as an expression of stored tensors.
        target: an expression of the same shape that represents the target.

    Raises:
        ValueError: a part of the tree has no inverse.
    """
    match of:
        case Stored():
            yield Occurrence(of.name, full_region(of.shape), target, of.shape)
        case Cut(Stored() as stored, region):
            yield Occurrence(stored.name, region, target, stored.shape)
        case Cut(Reshaped(Stored() as stored, view), region):  # every other row
            yield Occurrence(stored.name, region, target, view)
        case Cut():
            raise ValueError("a part is cut out of reordered elements")
        case Concat():
            for part, place in of.placed():
                yield from occurrences(part, cut(target, place))
        case Permuted():
            yield from occurrences(of.of, permute(target, _inverse(of.dims)))
        case Reshaped():
            yield from occurrences(of.of, reshape(target, of.of.shape))
        case Opaque():
            raise ValueError(_NOT_KNOWN)


def assemble(shape: Shape, parts: Sequence[tuple[Region, Expression]]) -> Expression | None:
    """Return the expression of a tensor that boxes make up.

    None if the boxes leave gaps, overlap, or cannot be separated by straight cuts, one dim at a time.

    Args:
        shape: shape of the whole tensor.
        parts: (box, its expression).
    """
    return _assemble(full_region(shape), [(r, e) for r, e in parts if 0 not in r.sizes] or list(parts[:1]))


def _assemble(whole: Region, parts: Sequence[tuple[Region, Expression]]) -> Expression | None:
    if len(parts) == 1:
        return parts[0][1] if parts[0][0] == whole else None
    for dim in range(len(whole.sizes)):
        rows = sorted(parts, key=lambda part: part[0].offsets[dim])
        groups: list[list[tuple[Region, Expression]]] = []
        stop = whole.offsets[dim]
        for region, value in rows:
            if region.offsets[dim] >= stop or not groups:
                groups.append([])
            groups[-1].append((region, value))
            stop = max(stop, region.stops[dim])
        if len(groups) < 2:
            continue
        sections = []
        for group in groups:
            begin, end = group[0][0].offsets[dim], max(region.stops[dim] for region, _ in group)
            box = Region(
                (*whole.offsets[:dim], begin, *whole.offsets[dim + 1 :]),
                (*whole.sizes[:dim], end - begin, *whole.sizes[dim + 1 :]),
            )
            part = _assemble(box, group)
            if part is None:
                return None
            sections.append(part)
        if sum(part.shape[dim] for part in sections) != whole.sizes[dim]:
            return None
        return concat(sections, dim)
    return None


def to_json(of: Expression) -> Any:
    """Return an expression as plain data: {"stored": name, "shape": [...]}, {"concat": [...], "dim": 0}, ..."""
    match of:
        case Stored():
            return {"stored": of.name, "shape": list(of.shape)}
        case Cut():
            return {"cut": to_json(of.of), "offsets": list(of.region.offsets), "sizes": list(of.region.sizes)}
        case Concat():
            return {"concat": [to_json(part) for part in of.parts], "dim": of.dim}
        case Permuted():
            return {"permute": to_json(of.of), "dims": list(of.dims)}
        case Reshaped():
            return {"reshape": to_json(of.of), "shape": list(of.shape)}
        case Zeros():
            return {"zeros": list(of.shape)}
        case Opaque():
            parts = [[name, to_json(part)] for name, part in of.parts]
            return {"opaque": of.target, "group": of.group, "of": parts, "shape": list(of.shape)}


_KEYS = {
    "stored": ("shape",),
    "cut": ("offsets", "sizes"),
    "concat": ("dim",),
    "permute": ("dims",),
    "reshape": ("shape",),
    "zeros": (),
    "opaque": ("group", "of", "shape"),
}
_MAX_DEPTH = 32


def from_json(content: Any, depth: int = 0) -> Expression:
    """Return the expression that `to_json` turned into plain data.

    Raises:
        ValueError: the content is not an expression, contradicts itself, or is nested too deeply.
    """
    kind = next((key for key in _KEYS if isinstance(content, dict) and key in content), None)
    if kind is None or set(content) != {kind, *_KEYS[kind]} or depth > _MAX_DEPTH:
        raise ValueError("not an expression of stored tensors")
    if kind == "stored":
        if not isinstance(content[kind], str):
            raise ValueError("a stored tensor without a name")
        return Stored(content[kind], _numbers(content["shape"]))
    if kind == "opaque":
        return _opaque_from_json(content, depth)
    if kind == "zeros":
        return Zeros(_numbers(content[kind]))
    if kind == "concat":
        if not isinstance(content[kind], list):
            raise ValueError("parts that are not a list")
        return concat([from_json(part, depth + 1) for part in content[kind]], *_numbers([content["dim"]]))
    below = from_json(content[kind], depth + 1)
    if kind == "cut":
        return cut(below, Region(_numbers(content["offsets"]), _numbers(content["sizes"])))
    if kind == "permute":
        return permute(below, _numbers(content["dims"]))
    return reshape(below, _numbers(content["shape"]))


def _opaque_from_json(content: Any, depth: int) -> Opaque:
    parts = content["of"]
    if (
        depth
        or not isinstance(content["opaque"], str)
        or not isinstance(content["group"], str)
        or not isinstance(parts, list)
        or not all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in parts)
    ):
        raise ValueError("not what a converter makes of stored tensors")
    named_parts = tuple((name, from_json(part, depth + 1)) for name, part in parts)
    if not any(True for _, part in named_parts for _ in leaves(part)):
        raise ValueError("made of no stored tensor")
    return Opaque(content["opaque"], content["group"], named_parts, _numbers(content["shape"]))


def _numbers(values: Any) -> Shape:
    if not isinstance(values, list) or any(
        type(value) is not int or not 0 <= value < 1 << 62 for value in values
    ):
        raise ValueError("not a list of whole numbers")
    return tuple(values)


EXPERTS = ".experts."
"""A part of the names of all experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensors:
    """Numbers of tensors that are stored in one form and written in another, such as experts one by one or fused."""

    are_experts: bool
    """True if the tensors are of experts, by their names."""
    num_stored: int
    """Number of tensors in the source."""
    num_tensors: int
    """Number of tensors in the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor of an output, and who decided its name."""

    name: str
    by: str
    """"person" (an option such as `--keys`), "manifest", "shipped rules", "class" or "equal names"."""
    sources: tuple[str, ...]
    """The stored tensors that it is made of, with a range for numbers: `experts.{0..7}.up_proj.weight`."""

    @classmethod
    def made_of(cls, name: str, by: str, stored: Iterable[str]) -> NamedTensor:
        """Return the tensor `name` whose sources are the stored names."""
        sources = tuple(line.pattern for line in fold((source, None) for source in stored))
        return cls(name=name, by=by, sources=sources)
