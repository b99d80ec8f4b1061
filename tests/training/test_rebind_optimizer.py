"""Optimizers that were made before wrapping."""

import pytest
import torch
from torch import nn

from shardkit.errors import UsageError
from shardkit.training.optimizer import parameter_names, rebind_optimizer
from tests.training.conftest import World


@pytest.mark.dist
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_it_steps_the_parameters_that_the_model_has_now(wrap_world: World, name: str) -> None:
    for each in wrap_world.found("two"):
        found = each["rebound"][name]
        assert found["difference"] < 1e-6
        assert found["decay"] == [0.1, 0.01]  # of two groups
        assert found["lr"] == [pytest.approx(0.01)] * 2  # the schedule goes on


@pytest.mark.dist
def test_names_that_torch_recorded_are_enough(wrap_world: World) -> None:
    assert wrap_world.found("two")[0]["rebound"]["named"]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unknown", "it is not known what the model calls the optimizer's parameters"),
        ("late", "30 tensors of the optimizer are no parameters of the model"),
        ("used", "the optimizer has state of 30 parameters"),
        ("lbfgs", "LBFGS keeps parameters in _params too"),
        ("short", "names of [1] parameters for an optimizer with groups of [30]"),
        ("wrong", "2 parameters of the optimizer cannot be found in the model"),
    ],
)
def test_what_cannot_be_rebound_is_refused(wrap_world: World, case: str, message: str) -> None:
    error = wrap_world.found("two")[0]["rebound"][case]
    assert error["error"] == "UsageError"
    assert message in error["message"]
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
