"""Which parameters get units of their own, told by a model on meta."""

from __future__ import annotations

import torch
from torch import nn

from shardkit.core.factored import Target
from shardkit.layout.classes import ClassDtypes
from shardkit.layout.units import UnitPlan, match_auto, plan_units, shard_units
from shardkit.layout.wrap_policy import OPTION
from shardkit.osft.modules import OsftLinear

BF16 = ClassDtypes(default_dtype=torch.bfloat16)
BLOCKS = ["blocks.0", "blocks.1"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        self.lists = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def half() -> Model:
    with torch.device("meta"):
        return Model().bfloat16()


def widen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.float()
    return model


def split(plan: UnitPlan) -> dict[str, tuple[str, bool, int]]:
    """Path of what was split off -> (the unit around it, is it computed with in fp32, number of parameters)."""
    return {u.path: (u.around, u.is_wide, len(u.parameters)) for u in plan.units if u.parameters is not None}


def test_a_model_of_one_dtype_has_the_policys_units_alone() -> None:
    for model in (half(), half().float()):
        plan = plan_units(model, BLOCKS, BF16)
        assert [unit.path for unit in plan.units] == [*BLOCKS, ""]
        assert not any(unit.is_wide for unit in plan.units)
        assert not plan.outside


def test_lists_of_lists_of_blocks_have_the_blocks_as_units() -> None:
    """As Funnel has them: nothing calls a list."""
    model = half()
    model.blocks = nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleList([Block(), Block()])])
    assert match_auto(model, OPTION) == ["blocks.0.0", "blocks.1.0", "blocks.1.1"]


def test_what_is_wider_goes_to_the_outermost_module_that_is_called() -> None:
    model = widen(half(), "blocks.1.inner.1.weight", "blocks.1.lists.0.weight", "blocks.1.lists.0.bias")
    for wide, in_fp32 in ((BF16, True), (None, False)):
        plan = plan_units(model, BLOCKS, wide)
        assert split(plan) == {
            "blocks.1.inner": ("blocks.1", in_fp32, 1),
            "blocks.1.lists.0": ("blocks.1", in_fp32, 2),
        }
    assert split(plan_units(model, [], BF16)) == {
        "blocks.1": ("", True, 3),
    }


def test_what_lies_on_the_units_own_module_stays_outside() -> None:
    plan = plan_units(widen(half(), "blocks.0.gain"), BLOCKS, BF16)
    assert list(plan.outside) == ["blocks.0.gain"]
    assert split(plan) == {}


def test_masters_are_split_by_what_the_class_says() -> None:
    made = ClassDtypes(default_dtype=torch.bfloat16, parameters={"blocks.0.inner.0.weight": torch.float32})
    assert split(plan_units(half().float(), BLOCKS, made)) == {"blocks.0.inner": ("blocks.0", True, 1)}


def test_a_unit_that_is_wide_as_a_whole_is_not_split() -> None:
    model = half()
    model.blocks[1].float()
    plan = plan_units(
        model,
        BLOCKS,
        ClassDtypes(
            default_dtype=torch.bfloat16,
            parameters={
                name: torch.float32 for name, _ in model.named_parameters() if name.startswith("blocks.1.")
            },
        ),
    )
    assert {unit.path: unit.is_wide for unit in plan.units} == {
        "blocks.0": False,
        "blocks.1": True,
        "": False,
    }


def test_adapters_beside_frozen_weights_are_not_split() -> None:
    """FSDP2 asks for one dtype of what is trained; adapters in fp32 are many, and small."""
    model = widen(half(), "blocks.0.inner.0.weight", "blocks.1.inner.0.weight")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("inner.0.weight")
    assert split(plan_units(model, BLOCKS, BF16)) == {}


def test_names_of_one_parameter_share_the_module_around_all_of_them() -> None:
    model = half()
    model.blocks[0].inner[1].weight = model.blocks[0].inner[0].weight
    widen(model, "blocks.0.inner.0.weight")
    assert split(plan_units(model, BLOCKS, BF16)) == {"blocks.0.inner": ("blocks.0", True, 1)}
    model.blocks[0].lists[0].weight = model.blocks[0].inner[0].weight
    assert list(plan_units(model, BLOCKS, BF16).outside) == ["blocks.0.inner.0.weight"]


def test_a_module_shows_the_parameters_of_its_unit_alone() -> None:
    model = widen(half(), "blocks.1.inner.1.weight", "blocks.0.gain")
    names, seen = [name for name, _ in model.named_parameters()], {}
    shard_units(
        plan_units(model, BLOCKS, BF16),
        dict(model.named_modules()),
        lambda unit, module: seen.update({unit.path: [name for name, _ in module.named_parameters()]}),
    )
    assert seen["blocks.1.inner"] == ["1.weight"]
    assert "inner.1.weight" not in seen["blocks.1"]
    assert "gain" in seen["blocks.1"]
    assert "gain" not in seen["blocks.0"]
    assert [name for name, _ in model.named_parameters()] == names


class Divided(nn.Module):
    """A block whose matrix is factors: they are fp32, and the first is frozen."""

    def __init__(self, *, trained: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.inner = OsftLinear(Target(path="inner", rows=2, columns=3, rank=1))
        self.norm.bfloat16().requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_factors_are_a_unit_that_is_computed_as_the_weights_around_it() -> None:
    for trained in (True, False):
        with torch.device("meta"):
            model = nn.Sequential(Divided(trained=trained), Divided(trained=trained))
        for wide in (BF16, None):
            plan = plan_units(model, ["0", "1"], wide)
            assert split(plan) == {"0.inner": ("0", False, 6), "1.inner": ("1", False, 6)}
            assert {unit.factors_of for unit in plan.units if unit.parameters} == {torch.bfloat16}


def test_factors_beside_weights_of_their_dtype_are_no_unit() -> None:
    for trained in (True, False):
        with torch.device("meta"):
            model = nn.Sequential(Divided(trained=trained), Divided(trained=trained)).float()
        assert split(plan_units(model, ["0", "1"], BF16)) == {}


def test_a_unit_of_factors_alone_is_computed_as_the_weights_around_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Divided(), Divided())
    for paths in (
        ["0", "0.inner"],
        ["0.inner"],
    ):  # the root of the second has weights: those of the other block
        plan = plan_units(model, paths, None)
        found = {unit.path: unit.factors_of for unit in plan.units if unit.parameters is None}
        assert found == {path: torch.bfloat16 if path == "0.inner" else None for path in ("", *paths)}
