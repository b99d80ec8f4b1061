"""A layer of factors computes what the dense one did."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from shardkit.core.factored import FACTORS, Target
from shardkit.errors import LayoutError
from shardkit.osft.modules import (
    OsftLinear,
    candidates,
    factor_modules,
    factors_of,
    osft_modules,
    placement_fn,
)
from shardkit.osft.plan import OsftPlan, choose_targets
from shardkit.osft.svd import factorise


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6, bias=False))


def factored(model: nn.Sequential) -> tuple[nn.Sequential, tuple[Target, ...]]:
    """Return a copy with factors in the place of its weights."""
    targets, _ = choose_targets(OsftPlan(ratio=0.4, targets="0,2"), candidates(model), None)
    new = copy.deepcopy(model)
    for path, module in factor_modules(new, targets).items():
        old = model.get_submodule(path)
        assert isinstance(old, nn.Linear)
        target = next(each for each in targets if each.path == path)
        assert all(x.is_meta for x in factors_of(module).values())
        found = factorise(old.weight.detach(), target)
        module.to_empty(device="cpu", recurse=False)
        module.osft_params.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in factors_of(module).items():
                parameter.copy_(found.tensors[name])
            if module.bias is not None:
                module.bias.copy_(old.bias)
    return new, targets


def test_it_computes_the_same() -> None:
    dense = network()
    new, targets = factored(dense)
    x = torch.randn(7, 12)
    assert torch.allclose(new(x), dense(x), atol=1e-6)
    assert list(osft_modules(new)) == ["0", "2"] == [target.path for target in targets]
    frozen = [name for name, parameter in new.named_parameters() if not parameter.requires_grad]
    assert frozen == [f"{path}.{name}" for path in ("0", "2") for name in FACTORS[:3]]
    assert "0.weight" not in new.state_dict()
    assert "0.bias" in new.state_dict()
    new(x).sum().backward()
    assert all((p.grad is not None) is p.requires_grad for p in new.parameters())


def test_it_can_be_copied_pickled_and_autocast() -> None:
    new, _ = factored(network())
    x = torch.randn(7, 12)
    expected = new(x)
    assert torch.equal(copy.deepcopy(new)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(new))(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert new(x).dtype is torch.bfloat16
    assert "rank=7" in repr(new)


def test_code_that_reads_the_weight_itself_is_told_what_to_do() -> None:
    """As T5 does: it casts to the dtype of `wo.weight` before it calls `wo`."""
    new, _ = factored(network())
    assert not hasattr(new[2], "weight")
    with pytest.raises(AttributeError, match=r"2 has OSFT factors and no weight.* add '!2' to the targets"):
        new[2].weight  # noqa: B018
    with pytest.raises(AttributeError, match="other"):
        new[2].other  # noqa: B018


def test_tied_and_other_weights_are_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Embedding(4, 4)})
    model["b"].weight = model["c"].weight
    found = candidates(model)
    assert found["a.weight"] == ((4, 4), "Linear", "")
    assert found["b.weight"].why_not == "it is tied to c.weight"
    assert found["c.weight"].module_class == "Embedding"


def test_other_layers_are_refused() -> None:
    targets = [Target(path=path, rows=20, columns=12, rank=3) for path in ("0", "1", "2", "5")]
    with pytest.raises(LayoutError) as caught:
        factor_modules(network(), targets)
    assert [each.partition(":")[0] for each in caught.value.problems] == ["1", "2", "5"]


def test_v_is_cut_along_its_columns_where_they_divide() -> None:
    new, _ = factored(network())
    layer = new[0]
    assert isinstance(layer, OsftLinear)
    for num_shards, dims in ((2, (1, 1)), (5, (None, None))):
        place = placement_fn(new, num_shards)
        found = [place(layer.osft_V_high), place(layer.osft_params.V_low)]
        assert tuple(each and each.dim for each in found) == dims
        assert place(layer.osft_U_high) is None
        assert place(layer.bias) is None
