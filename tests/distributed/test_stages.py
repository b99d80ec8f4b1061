"""Pipeline parallelism: each stage finds the tensors of its own layers, sharded over its own ranks.

transformers 5.24 splits a model into stages, but combines that with nothing else: for tp it fails, fsdp it refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardkit
from tests.distributed.parallel import (
    CLASSES,
    Case,
    blank,
    check_regions,
    check_stock,
    loaded_by_transformers,
    local,
    made_mesh,
    mine,
    preshard_all,
    shared_model,
    wrong,
)
from tests.worlds.ranks import Ranks, on_all

THEIRS = [Case(name, "pp=4,dp_shard=1") for name in ("deep", "deep-tied")]
OURS = [
    Case("deep", mesh)
    for mesh in ("pp=2,dp_replicate=2,dp_shard=2", "pp=4,dp_shard=2", "pp=2,dp_shard=2,tp=2")
]
TIED = Case("deep-tied", "pp=2,dp_shard=4")
"""The first stage has the embedding, the last one the head."""


def every_case(out: Path) -> None:
    preshard_all((*THEIRS, *OURS, TIED), out)


four = Ranks(__name__, 4, first=every_case)
eight = Ranks(__name__, 8)


@four.test_each({case.label: case for case in THEIRS})
def test_stock_load_fills_what_transformers_would_have(case: Case, out: Path) -> None:
    check_stock(case, out)


@four.test_each({case.label: case for case in THEIRS})
def test_regions_are_those_of_each_stage(case: Case, out: Path) -> None:
    check_regions(case, out)


@four.test
def test_what_stages_save_is_one_checkpoint(out: Path) -> None:
    """The momentum of a first step is the gradient, which here is the parameter."""
    (case, _) = THEIRS
    model = shared_model(case, out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    shardkit.save(model, out / "saved", optimizer=optimizer)
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=out / "stock",
    )
    whole = CLASSES[case.name].from_pretrained(out / case.name).state_dict()
    for source in ("saved", "stock"):
        problem = None
        if dist.get_rank() == 0:  # the others wait, whatever happens
            try:
                shardkit.reshard(out / source, out / f"{source}-two", world_size=2)
            except Exception as error:
                problem = repr(error)
        problem = on_all(problem)[0]
        assert problem is None, problem
        found = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in whole.items()}
        momenta = {
            f"optimizer.state.{name}.momentum_buffer": torch.zeros_like(tensor)
            for name, tensor in whole.items()
        }
        state = {**found, **momenta}
        dcp.load(state, checkpoint_id=out / f"{source}-two")
        for loaded in (found, momenta):
            assert all(map(torch.equal, loaded.values(), whole.values())), source


@four.test
def test_load_into_fills_a_stage(out: Path) -> None:
    (case, _) = THEIRS
    model = shared_model(case, out)
    for source in (case.label, case.name):
        truth = blank(model.state_dict())
        shardkit.load_into(model, out / source)
        assert wrong(model.state_dict(), truth) == set()


@four.test
def test_what_no_stage_has_is_unexpected(out: Path) -> None:
    (case, _) = THEIRS
    model = loaded_by_transformers(case, out)
    last = model.model.layers._modules.pop("4", None)
    assert any(on_all(last is not None))
    with pytest.raises(shardkit.LayoutError, match=r"differ in \d+ places") as caught:
        shardkit.load_into(model, out / case.name)
    assert all("model.layers.4." in line for line in caught.value.problems)


@eight.test_each({case.label: case for case in OURS})
def test_stock_load_fills_stages_of_ones_own(case: Case, out: Path) -> None:
    """Each stage is a model with its own layers alone, sharded over the ranks of the stage."""
    model = CLASSES["deep"].from_pretrained(out / "deep")
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = wrapped_stage(model, case)
    stage = mesh.get_local_rank("pp")
    state = model.state_dict()
    truth = blank(state)
    dcp.load(state, checkpoint_id=out / case.label)
    assert wrong(state, truth) == set()
    assert mine(case, out, whole).keys() == state.keys()
    stored = dcp.FileSystemReader(out / case.label).read_metadata().storage_data
    files = {place.relative_path for index, place in stored.items() if index.fqn in state}
    assert files <= {f"__{rank}_0.distcp" for rank in mesh.mesh[stage].flatten().tolist()}


@eight.test_each({case.label: case for case in (*OURS, TIED)})
def test_three_phases_of_stages(case: Case, out: Path) -> None:
    """All ranks prepare the whole model on meta, and each keeps its stage."""
    for source in (case.label, case.name):
        context = shardkit.prepare(str(out / case.name), str(out / source))
        wrapped_stage(context.model, case)
        model = shardkit.finalize(context.model, context)
        truth = CLASSES[case.name].from_pretrained(out / case.name)
        wrapped_stage(truth, case)
        held = {name: local(tensor) for name, tensor in truth.state_dict().items()}
        assert wrong(model.state_dict(), held) == set()


@eight.test
def test_what_is_lost_within_a_stage_is_named(out: Path) -> None:
    case = OURS[1]
    context = shardkit.prepare(str(out / "deep"), str(out / "deep"))
    mesh = wrapped_stage(context.model, case)
    if dist.get_rank() == 7:
        del context.model.model.norm
    with pytest.raises(shardkit.IntegrityError) as caught:
        shardkit.finalize(context.model, context)
    assert mesh.size() == 8
    text = "\n".join((caught.value.message, *caught.value.problems))  # `str` is one line on other ranks
    assert "model.norm.weight: was prepared and is not in the wrapped model" in text


def wrapped_stage(model: Any, case: Case) -> DeviceMesh:
    """Leave a model with the layers of this rank's stage, and shard them over the ranks of the stage."""
    mesh = made_mesh("cpu", (case.parsed.pp, *case.parsed.shape), mesh_dim_names=("pp", *case.parsed.names))
    stage, num_stages = mesh.get_local_rank("pp"), case.parsed.pp
    layers = {2: [range(3), range(3, 5)], 4: [range(2), range(2, 3), range(3, 4), range(4, 5)]}[num_stages][
        stage
    ]
    for at in set(range(5)) - set(layers):
        del model.model.layers._modules[str(at)]
    if stage > 0:
        del model.model.embed_tokens
    if stage < num_stages - 1:
        del model.model.norm, model.lm_head
    data = mesh[case.parsed.names]
    if "tp" in case.parsed.names:
        shardkit.wrap(model, data, mixed_precision=None)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    return mesh
