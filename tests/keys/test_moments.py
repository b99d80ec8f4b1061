"""Moments beside their parameters: one rank's part is told, and no optimizer's own shapes are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from shardkit.core.regions import Shape, split_dim
from shardkit.keys.moments import NamedShape, parts_of_ranks

MODEL: dict[str, Shape] = {
    "model.embed.weight": (64, 32),
    "model.layers.0.q.weight": (32, 32),
    "model.layers.0.up.weight": (96, 32),
    "model.layers.0.norm.weight": (32,),
    "model.layers.0.experts": (8, 16, 32),
    "model.scale": (1,),
    "model.temperature": (),
}
ADAM = ("exp_avg", "exp_avg_sq")
State = Mapping[str, tuple[str, Shape]]


def saved(
    state_of: Callable[[str, Shape], State], *, root: str = "", optimizer: str = "optim."
) -> list[NamedShape]:
    found = [NamedShape(f"{root}{name}", "bfloat16", shape) for name, shape in MODEL.items()]
    for name, shape in MODEL.items():
        for leaf, (dtype, own) in state_of(name, shape).items():
            found.append(NamedShape(f"{optimizer}state.{name}.{leaf}", dtype, own))
    return found


def part(shape: Shape, num_ranks: int, rank: int) -> Shape:
    return (split_dim(shape[0], num_ranks, rank)[1], *shape[1:]) if shape else ()


def adam(num_ranks: int, rank: int = 0) -> Callable[[str, Shape], State]:
    return lambda _, shape: {
        "step": ("float32", ()),
        **{leaf: ("float32", part(shape, num_ranks, rank)) for leaf in ADAM},
    }


@pytest.mark.parametrize(
    ("root", "optimizer"),
    [("", ""), ("model.", "optim."), ("app.model.", "app.optimizer."), ("", "optimizer.")],
)
@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (2, 1), (4, 0), (5, 0), (5, 4), (96, 0)])
def test_one_ranks_part_is_told_with_names_and_counts(
    root: str, optimizer: str, num_ranks: int, rank: int
) -> None:
    warning = parts_of_ranks(saved(adam(num_ranks, rank), root=root, optimizer=optimizer))
    assert warning is not None
    num_lacking = 2 * sum(part(shape, num_ranks, rank) != shape for shape in MODEL.values())
    assert warning.startswith(f"{num_lacking} of 12 moments of the optimizer have 1/{num_ranks} of ")
    assert f"{optimizer}state.model.embed.weight.exp_avg, " in warning


def only(choose: Callable[[str, Shape], Mapping[str, Shape]], dtype: str = "float32") -> list[NamedShape]:
    return saved(lambda name, shape: {leaf: (dtype, own) for leaf, own in choose(name, shape).items()})


def adafactor(_: str, shape: Shape) -> Mapping[str, Shape]:
    if len(shape) < 2:
        return {"exp_avg_sq": shape}
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": (*shape[:-2], shape[-1]), "exp_avg": shape}


def low_rank(_: str, shape: Shape) -> Mapping[str, Shape]:
    """As GaLore and APOLLO project the gradients of matrices; all to a quarter of the rows."""
    own = (shape[0] // 4, *shape[1:]) if len(shape) == 2 else shape
    return dict.fromkeys(ADAM, own)


GOOD = {
    "adam": saved(adam(1)),
    "no optimizer": [NamedShape(name, "float32", shape) for name, shape in MODEL.items()],
    "adafactor": only(adafactor),
    "muon": only(
        lambda name, shape: {"momentum_buffer": shape} if len(shape) == 2 else dict.fromkeys(ADAM, shape)
    ),
    "low rank": only(low_rank),
    "adam-mini": only(lambda _, shape: {"exp_avg": shape, "exp_avg_sq": (part(shape, 4, 0))}),
    "adam-mini's own names": only(lambda _, shape: {"m": shape, "vmean": (1,)}),
    "shampoo": only(lambda _, shape: {"exp_avg": part(shape, 2, 0), "preconditioners": (4, 4)}),
    "8-bit": only(lambda _, shape: dict.fromkeys(ADAM, part(shape, 2, 0)), "uint8"),
    "bitsandbytes": only(lambda _, shape: {"state1": part(shape, 2, 0), "absmax1": (4,)}),
    "flat": only(lambda _, shape: dict.fromkeys(ADAM, (1024,))),
    "flat parameters": [
        NamedShape("model.flat", "float32", (4096,)),
        *(NamedShape(f"optim.state.flat.{leaf}", "float32", (2048,)) for leaf in ADAM),
    ],
    "padded": only(
        lambda _, shape: dict.fromkeys(ADAM, (-(-shape[0] // 128) * 128, *shape[1:]) if shape else ())
    ),
    "few": only(lambda name, shape: dict.fromkeys(ADAM, part(shape, 2, 0) if "experts" in name else shape)),
    "columns": only(lambda _, shape: dict.fromkeys(ADAM, (*shape[:-1], shape[-1] // 2) if shape else ())),
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_said_of_other_shapes(name: str) -> None:
    assert parts_of_ranks(GOOD[name]) is None


def test_an_entry_that_is_no_tensor_tells_the_kind_too() -> None:
    """As GaLore's projector, where all parameters are matrices."""
    tensors = [
        NamedShape("w.weight", "float32", (64, 32)),
        *(NamedShape(f"state.w.weight.{leaf}", "float32", (16, 32)) for leaf in ADAM),
    ]
    assert parts_of_ranks(tensors) is not None
    assert parts_of_ranks(tensors, ["state.w.weight.step", "state.w.weight.projector"]) is None
