"""Expressions against numpy: every tree, its cuts, pieces and inverse say what numpy does with numbered elements."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import prod

import numpy as np
import pytest

from shardkit.core.regions import Region, full_region
from shardkit.keys.expressions import (
    Concat,
    Cut,
    Expression,
    Permuted,
    Reshaped,
    Stored,
    Zeros,
    assemble,
    concat,
    cover,
    cut,
    deinterleave,
    from_json,
    interleave,
    locate,
    occurrences,
    permute,
    pieces,
    read_regions,
    reshape,
    stack,
    substitute,
    to_json,
)

Sources = dict[str, np.ndarray]


def evaluate(of: Expression, sources: Sources) -> np.ndarray:
    match of:
        case Stored():
            return sources[of.name]
        case Cut():
            return evaluate(of.of, sources)[window(of.region)]
        case Concat():
            return np.concatenate([evaluate(part, sources) for part in of.parts], of.dim)
        case Permuted():
            return evaluate(of.of, sources).transpose(of.dims)
        case Reshaped():
            return evaluate(of.of, sources).reshape(of.shape)
        case Zeros():
            return np.zeros(of.shape, np.int64)


def window(region: Region) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*region, strict=True))


def a_box(rng: random.Random, shape: tuple[int, ...]) -> Region:
    offsets = tuple(rng.randrange(size) for size in shape)
    return Region(offsets, tuple(rng.randint(1, size - o) for o, size in zip(offsets, shape, strict=True)))


def factors(rng: random.Random, number: int) -> tuple[int, ...]:
    """Return sizes whose product is a number."""
    sizes = []
    while number > 1:
        size = rng.choice([n for n in range(2, number + 1) if number % n == 0])
        sizes.append(size)
        number //= size
        if rng.random() < 0.2:
            sizes.append(1)
    return tuple(sizes) or (1,)


def a_tree(rng: random.Random, sources: Sources, depth: int) -> tuple[Expression, np.ndarray]:
    if depth == 0:
        name, shape = f"t{len(sources)}", tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        start = sum(values.size for values in sources.values()) + 1
        sources[name] = np.arange(start, start + prod(shape)).reshape(shape)
        return Stored(name, shape), sources[name]
    made, values = a_tree(rng, sources, depth - 1)
    shape = values.shape
    match rng.choice(["cut", "concat", "stack", "permute", "reshape", "interleave", "zeros"]):
        case "cut":
            box = a_box(rng, shape)
            return cut(made, box), values[window(box)]
        case "concat":
            dim, at = rng.randrange(len(shape)), rng.randint(0, 2)
            name, start = f"t{len(sources)}", sum(each.size for each in sources.values()) + 1
            sources[name] = np.arange(start, start + prod(shape)).reshape(shape)
            parts = [(Stored(name, shape), sources[name])] * 2
            parts.insert(at, (made, values))
            return concat([part for part, _ in parts], dim), np.concatenate([each for _, each in parts], dim)
        case "stack":
            dim = rng.randint(0, len(shape))
            return stack([made, made], dim), np.stack([values, values], dim)
        case "permute":
            dims = rng.sample(range(len(shape)), len(shape))
            return permute(made, dims), values.transpose(dims)
        case "interleave":
            dim = rng.randrange(len(shape))
            if shape[dim] % 2 == 0:
                way = rng.choice([interleave, deinterleave])
                apart = (2, shape[dim] // 2) if way is interleave else (shape[dim] // 2, 2)
                split = values.reshape(*shape[:dim], *apart, *shape[dim + 1 :])
                return way(made, dim, 2), np.swapaxes(split, dim, dim + 1).reshape(shape)
            return made, values
        case "zeros":
            return concat([made, Zeros(shape)], 0), np.concatenate([values, np.zeros_like(values)])
        case _:
            new = factors(rng, prod(shape))
            return reshape(made, new), values.reshape(new)


def trees() -> Iterator[tuple[random.Random, Expression, np.ndarray, Sources]]:
    for seed in range(1500):
        rng, sources = random.Random(seed), Sources()
        made, values = a_tree(rng, sources, rng.randint(1, 6))
        if values.size < 4000:
            yield rng, made, values, sources


def test_a_tree_is_what_numpy_makes_and_so_are_its_cuts_and_single_elements() -> None:
    for rng, made, values, sources in trees():
        assert made.shape == values.shape
        assert np.array_equal(evaluate(made, sources), values)
        box = a_box(rng, made.shape)
        assert np.array_equal(evaluate(cut(made, box), sources), values[window(box)])
        for _ in range(4):
            index = tuple(rng.randrange(size) for size in made.shape)
            found = locate(made, index)
            assert (0 if found is None else sources[found[0]][found[1]]) == values[index]


def test_pieces_tile_the_target_and_boxes_keep_their_order() -> None:
    num_boxes = 0
    for _, made, values, sources in trees():
        filled = np.full(made.shape, -1)
        for piece in pieces(made):
            part = evaluate(cut(piece.of, piece.part), sources)
            num_boxes += piece.is_box
            assert (filled[window(piece.region)] == -1).all()
            filled[window(piece.region)] = part.reshape(piece.region.sizes)
        assert np.array_equal(filled, values)
    assert num_boxes > 1000


def test_what_is_read_for_a_box_holds_all_that_is_in_it() -> None:
    for rng, made, _, _ in trees():
        box = a_box(rng, made.shape)
        read = list(read_regions(made, box))
        for offset in product(*(range(o, o + n) for o, n in zip(*box, strict=True))):
            if (found := locate(made, offset)) is not None:
                name, index = found
                assert any(
                    name == other and all(o <= i < o + n for i, o, n in zip(index, *region, strict=True))
                    for other, region in read
                )


def test_json_gives_an_equal_tree() -> None:
    for _, made, values, sources in trees():
        assert np.array_equal(evaluate(from_json(to_json(made)), sources), values)


def test_an_inverse_is_found_where_each_tensor_is_used_once() -> None:
    num_inverted = 0
    for _, made, _, sources in trees():
        try:
            found = list(occurrences(made, Stored("target", made.shape)))
        except ValueError:
            continue
        for name, values in sources.items():
            back = assemble(
                values.shape,
                [(r, value) for other, r, value, view in found if (other, view) == (name, values.shape)],
            )
            if back is None:
                continue
            num_inverted += 1
            assert substitute(back, {"target": made}) == Stored(name, values.shape) or np.array_equal(
                evaluate(substitute(back, {"target": made}), sources), values
            )
    assert num_inverted > 500


def experts(num: int = 4, rows: int = 6, columns: int = 8) -> Expression:
    gate = stack([Stored(f"experts.{e}.gate", (rows, columns)) for e in range(num)], 0)
    up = stack([Stored(f"experts.{e}.up", (rows, columns)) for e in range(num)], 0)
    return concat([gate, up], 1)


def test_fused_experts_are_boxes_of_single_ones_and_each_is_a_box_of_the_fused() -> None:
    made = experts()
    found = {piece.of.name: piece.region for piece in pieces(made) if isinstance(piece.of, Stored)}
    assert found["experts.2.up"] == Region((2, 6, 0), (1, 6, 8))
    assert len(found) == 8
    target = Stored("gate_up_proj", made.shape)
    back = {name: (region, value) for name, region, value, _ in occurrences(made, target)}
    single = assemble((6, 8), [back["experts.3.gate"]])
    assert single == reshape(cut(target, Region((3, 0, 0), (1, 6, 8))), (6, 8))
    assert substitute(single, {"gate_up_proj": made}) == Stored("experts.3.gate", (6, 8))


def test_rows_for_rotary_embeddings_are_permuted_within_heads() -> None:
    stored = Stored("q", (8, 3))  # two heads of four
    permuted = reshape(deinterleave(reshape(stored, (2, 4, 3)), 1, 2), (8, 3))
    assert [locate(permuted, (row, 0))[1][0] for row in range(8)] == [0, 2, 1, 3, 4, 6, 5, 7]  # type: ignore[index]
    assert list(read_regions(permuted, Region((4, 0), (2, 3)))) == [("q", Region((4, 0), (4, 3)))]
    assert cut(permuted, Region((4, 0), (4, 3))) == reshape(
        deinterleave(reshape(cut(stored, Region((4, 0), (4, 3))), (1, 4, 3)), 1, 2), (4, 3)
    )


def test_cover_gives_equal_boxes() -> None:
    assert cover((8, 3), (2, 4, 3), Region((1, 0, 0), (1, 4, 3))) == (
        Region((4, 0), (4, 3)),
        Region((1, 0, 0), (1, 4, 3)),
    )
    below, above = cover((2, 4), (4, 2), Region((1, 0), (2, 2)))
    assert (below, above) == (full_region((2, 4)), full_region((4, 2)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: concat([], 0),
        lambda: concat([Stored("a", (2, 3)), Stored("b", (2, 4))], 0),
        lambda: stack([Stored("a", (2,)), Stored("b", (3,))], 0),
        lambda: permute(Stored("a", (2, 3)), (0, 0)),
        lambda: reshape(Stored("a", (2, 3)), (7,)),
        lambda: cut(Stored("a", (2, 3)), Region((1, 0), (2, 3))),
        lambda: from_json({"stored": "a"}),
        lambda: from_json({"stored": "a", "shape": [-1]}),
        lambda: from_json({"concat": {}, "dim": 0}),
        lambda: from_json(["stored"]),
    ],
)
def test_what_does_not_fit_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()  # type: ignore[operator]
