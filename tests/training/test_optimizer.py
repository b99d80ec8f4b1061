"""Optimizers that were made before wrapping."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from shardkit.errors import UsageError
from shardkit.training.optimizer import parameter_names, rebind_optimizer
from tests.training.conftest import World, run_world


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


def test_what_stands_in_several_places_is_repaired() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    (weight, bias), others = list(model[0].parameters()), list(model[1].parameters())
    optimizer = torch.optim.SGD([{"params": [weight, bias], "lr": 0.2}, {"params": others}], lr=0.1)
    names = parameter_names(model, optimizer)
    for group in optimizer.param_groups:
        group["params"] = [bias, bias]
    with pytest.raises(UsageError, match="it has the same ones 3 times more"):
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
def accelerate_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    return run_world("accelerate_world.py", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "num_parameters"), [("recorded", 30), ("given", 30), ("all", 30), ("tied", 29)]
)
def test_accelerate_trains_every_parameter(accelerate_world: World, case: str, num_parameters: int) -> None:
    ranks = accelerate_world.found("accelerate")
    assert len(ranks) == 2
    for each in ranks:
        found = each[case]
        assert found["places"] == [
            num_parameters,
            1,
        ]  # what accelerate makes of an optimizer of a model on meta
        assert found["parameters"] == found["state"] == num_parameters
        assert found["decay"] == ([0.01] if case == "all" else [0.1, 0.0])
        assert found["moved"]
        assert found["same"]  # as one process, bit for bit


@pytest.mark.dist
def test_finalize_refuses_an_optimizer_that_cannot_be_repaired(accelerate_world: World) -> None:
    for each in accelerate_world.found("accelerate"):
        error = each["unknown"]
        assert error["error"] == "UsageError"
        assert "it has the same ones 29 times more" in error["message"]
        assert "model.named_parameters()" in error["hint"]
