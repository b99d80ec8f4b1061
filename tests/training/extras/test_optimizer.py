"""Optimizers that were made before wrapping."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardkit.errors import UsageError
from shardkit.training.extras.optimizer import parameter_names, rebind_optimizer
from tests.training.models import reference
from tests.training.wrapping import full, loss_of, wrapped
from tests.worlds.processes import run_script
from tests.worlds.ranks import Ranks, same_error

two = Ranks(__name__, 2)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2]},
    ]


def stepped(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    loss_of(name, model).backward()
    optimizer.step()
    return {key: full(value) for key, value in model.state_dict().items()}


@two.test_each(("llama", "llama-tied"))
def test_it_steps_the_parameters_that_the_model_has_now(name: str) -> None:
    plain = reference(name)
    expected = stepped(name, plain, torch.optim.AdamW(groups(plain), lr=0.1))
    model = reference(name)
    optimizer = torch.optim.AdamW(groups(model), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    names = parameter_names(model, optimizer)
    wrapped(model)
    rebind_optimizer(model, optimizer, names)
    rebind_optimizer(model, optimizer, names)  # a second time there is nothing to do
    after = stepped(name, model, optimizer)
    schedule.step()
    for key, value in expected.items():
        assert float((after[key] - value).abs().max()) < 1e-6, key
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.01)] * 2


@two.test
def test_names_that_torch_recorded_are_enough() -> None:
    model = reference("llama")
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    wrapped(model)
    rebind_optimizer(model, named)
    for stepped, held in zip(named.param_groups[0]["params"], model.parameters(), strict=True):
        assert stepped is held


def used() -> torch.optim.Optimizer:
    """An optimizer of another such model, which has made a step."""
    optimizer = torch.optim.AdamW(reference("llama").parameters())
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


class Refused(NamedTuple):
    work: Callable[[nn.Module, torch.optim.Optimizer, list[str]], object]
    """Given a wrapped model, an optimizer that was made before, and the names of all parameters."""
    said: str


@two.test_each(
    {
        "unknown": Refused(
            lambda model, unnamed, names: rebind_optimizer(model, unnamed),
            "the names that the model has for the optimizer's parameters are not known",
        ),
        "late": Refused(
            lambda model, unnamed, names: parameter_names(model, unnamed),
            "30 tensors of the optimizer are not parameters of the model",
        ),
        "used": Refused(
            lambda model, unnamed, names: rebind_optimizer(model, used(), [names]),
            "the optimizer has state of 30 parameters",
        ),
        "lbfgs": Refused(
            lambda model, unnamed, names: rebind_optimizer(
                model, torch.optim.LBFGS(reference("llama").parameters()), [names]
            ),
            "LBFGS keeps parameters in _params too",
        ),
        "short": Refused(
            lambda model, unnamed, names: rebind_optimizer(model, unnamed, [["lm_head.weight"]]),
            "names of [1] parameters for an optimizer with groups of [30]",
        ),
        "wrong": Refused(
            lambda model, unnamed, names: rebind_optimizer(
                model, unnamed, [[*names[:-2], "model.norm.weigth", names[0]]]
            ),
            "2 parameters of the optimizer cannot be found in the model",
        ),
    }
)
def test_what_cannot_be_rebound_is_refused(case: Refused) -> None:
    model = reference("llama")
    unnamed = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    wrapped(model)
    error = same_error(lambda: case.work(model, unnamed, names))
    assert error["error"] == "UsageError"
    assert case.said in error["message"]
    assert error["hint"]


def test_another_shape_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = parameter_names(model, optimizer)
    assert names == [["weight", "bias"]]
    with pytest.raises(UsageError) as caught:
        rebind_optimizer(nn.Linear(3, 4), optimizer, names)
    assert caught.value.problems == (
        "weight: (2, 3) in the optimizer, (4, 3) in the model",
        "bias: (2,) in the optimizer, (4,) in the model",
    )
    assert optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.parametrize(
    ("names", "near"),
    [
        (["wieght", "bias"], "  (closest name: weight)"),
        (["weight", "weights"], ""),  # `weight` has its place already
    ],
)
def test_only_a_name_that_is_free_is_suggested(names: list[str], near: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(UsageError) as caught:
        rebind_optimizer(nn.Linear(3, 3), optimizer, [names])
    lost = next(name for name in names if name.startswith("w") and name != "weight")
    assert caught.value.problems == (f"{lost}: the model has no parameter of that name{near}",)


def test_what_stands_in_several_places_is_repaired() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    (weight, bias), others = list(model[0].parameters()), list(model[1].parameters())
    optimizer = torch.optim.SGD([{"params": [weight, bias], "lr": 0.2}, {"params": others}], lr=0.1)
    names = parameter_names(model, optimizer)
    for group in optimizer.param_groups:
        group["params"] = [bias, bias]
    with pytest.raises(UsageError, match="3 of them are repeats"):
        rebind_optimizer(model, optimizer)
    rebind_optimizer(model, optimizer, names)
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        [id(weight), id(bias)],
        list(map(id, others)),
    ]
    rebind_optimizer(model, optimizer, [names[1], names[0]])  # names count, also where nothing stands twice
    assert optimizer.param_groups[0]["params"][0] is others[0]
    rebind_optimizer(model, optimizer)  # and without them such an optimizer is left as it is
    assert optimizer.param_groups[0]["params"][0] is others[0]


def test_one_group_of_all_parameters_needs_no_names() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = [model.bias, model.bias]
    rebind_optimizer(model, optimizer)
    assert list(map(id, optimizer.param_groups[0]["params"])) == [id(model.weight), id(model.bias)]
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    optimizer.param_groups[0]["params"] *= 3  # more than the model has
    with pytest.raises(UsageError):
        rebind_optimizer(model, optimizer)


@pytest.fixture(scope="module")
def accelerate_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    out = tmp_path_factory.mktemp("accelerate")
    run_script("training/accelerate_world.py", str(out))
    return [json.loads((out / f"accelerate-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "num_parameters"), [("recorded", 30), ("given", 30), ("all", 30), ("tied", 29)]
)
def test_accelerate_trains_every_parameter(
    accelerate_ranks: list[dict[str, Any]], case: str, num_parameters: int
) -> None:
    for each in accelerate_ranks:
        found = each[case]
        # What accelerate makes of an optimizer of a model on meta.
        assert found["places"] == [num_parameters, 1]
        assert found["parameters"] == found["state"] == num_parameters
        assert found["decay"] == ([0.01] if case == "all" else [0.1, 0.0])
        assert found["moved"]
        assert found["same"]  # as one process, bit for bit


@pytest.mark.dist
def test_finalize_refuses_an_optimizer_that_cannot_be_repaired(
    accelerate_ranks: list[dict[str, Any]],
) -> None:
    for each in accelerate_ranks:
        error = each["unknown"]
        assert error["error"] == "UsageError"
        assert "29 of them are repeats" in error["message"]
        assert "model.named_parameters()" in error["hint"]
