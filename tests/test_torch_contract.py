"""The names of torch that are not public are still there, and still do what shardkit needs."""

import subprocess
import sys

import pytest

# In a process of its own: a fake process group and a real one cannot live side by side.
FAKE_WORLD = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from shardkit._torch import init_fake_world

init_fake_world(6)
assert dist.get_world_size() == 6 and dist.get_rank() == 0
mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
assert mesh["b"].size() == 3
"""


def test_fake_world_has_ranks_that_do_not_exist() -> None:
    subprocess.run([sys.executable, "-c", FAKE_WORLD], check=True, timeout=600)


def test_views_on_meta_share_memory_and_copies_do_not() -> None:
    import torch

    from shardkit._torch import shares_memory

    whole = torch.empty(6, 4, device="meta")
    assert shares_memory(whole, whole[2:].detach())
    assert not shares_memory(whole, whole.clone())


FSDP_WORLD = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from shardkit._torch import class_before_sharding, fsdp1_unit, fsdp2_units, init_fake_world, is_fsdp1_part

init_fake_world(4)
mesh = init_device_mesh("cpu", (4,))
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
model[1].bias = model[0].bias
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=CPUOffloadPolicy(pin_memory=False))
assert type(model) is not nn.Sequential
assert (class_before_sharding(model), class_before_sharding(model[0])) == (nn.Sequential, nn.Linear)
(unit,) = fsdp2_units(model, is_root=True)
assert (unit.mesh, unit.mixed_precision, unit.cpu_offload) == (mesh, precision, True)
assert unit.compute_dtypes == (torch.bfloat16,)
assert unit.reshard_after_forward is False, "nothing was said, and it is the root"
(unit,) = fsdp2_units(model, is_root=False)
assert unit.reshard_after_forward is True
named = {name: unit.parameters[id(model[int(name[0])]), name[2:]] for name, _ in model.named_parameters(remove_duplicate=False)}
assert len(named) == 4 and named["0.bias"] is named["1.bias"] and named["0.weight"].to_local().shape == (2, 8)
is_obeyed = hasattr(model._get_fsdp_state(), "_auto_reshard_after_forward")  # up to torch 2.7 the root is never resharded
for asked in (True, False, 2):
    module = fully_shard(nn.Linear(8, 8), mesh=mesh, reshard_after_forward=asked)
    for is_root, expected in ((False, asked), (True, asked if is_obeyed else False)):
        (unit,) = fsdp2_units(module, is_root=is_root)
        assert unit.reshard_after_forward == expected and type(unit.reshard_after_forward) is type(expected)

if hasattr(precision, "param_dtype_override_fn"):  # torch 2.15
    each = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p.ndim == 1 else None)
    (unit,) = fsdp2_units(fully_shard(nn.Linear(8, 8), mesh=mesh, mp_policy=each), is_root=True)
    assert unit.compute_dtypes == (torch.bfloat16, torch.float32)

for use_orig_params in (False, True):
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrapped = FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    unit = fsdp1_unit(wrapped)
    assert unit.fqns == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert unit.numels == (64, 8, 64, 8) and unit.num_shards == 4 and unit.local.numel() == 36
    assert {id(p) for p in wrapped.parameters()} <= set(map(id, unit.registered))
    assert all(map(is_fsdp1_part, wrapped.parameters())) and not any(map(is_fsdp1_part, model.parameters()))
    assert unit.group.size() == 4 and unit.device == torch.device("cpu") and not unit.has_dtensors
    assert unit.shared == ()
    tied = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    tied["b"].weight = tied["a"].weight
    unit = fsdp1_unit(FullyShardedDataParallel(tied, device_id=torch.device("cpu"), use_orig_params=use_orig_params))
    assert unit.shared == (("b.weight", "a.weight"),)
"""


def test_fsdp_tells_its_settings_and_parameters() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FSDP_WORLD], check=True, timeout=600)


def test_checkpointed_modules_keep_their_names() -> None:
    import torch
    from torch import nn

    from shardkit._torch import checkpointed_module, is_checkpointed

    calls = []
    plain = nn.Linear(2, 2)
    plain.register_forward_pre_hook(lambda *_: calls.append(1))
    model = nn.Sequential(checkpointed_module(plain))
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert is_checkpointed(model[0])
    assert not is_checkpointed(plain)
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(calls) == 2


def test_foreach_norms_accumulate_in_the_dtype_asked_for() -> None:
    import torch

    from shardkit._torch import foreach_norms, foreach_scale_

    tensors = [torch.full((4096,), 0.01, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)]
    norms = foreach_norms(tensors, 2.0, torch.float32)
    assert [norm.dtype for norm in norms] == [torch.float32] * 2
    torch.testing.assert_close(norms[0], tensors[0].double().norm().float())
    foreach_scale_(tensors, torch.tensor(0.5))
    assert tensors[1].tolist() == [0.5] * 3


SHARDS_WORLD = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from shardkit._torch import flattened_mesh, fsdp_shards, init_fake_world, shard_of

init_fake_world(4)
mesh = init_device_mesh("cpu", (4,))
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
fully_shard(list(model), mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 8 else None)
fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
shards = {id(each.param): each for each in fsdp_shards(model)}
named = {name: shards[id(value)] for name, value in model.named_parameters()}
assert len(shards) == len(named) == 4, "two modules in one call are listed once"
assert [(each.padded_sizes, each.dim) for each in named.values()] == [((6, 2), 1), ((2,), 0), ((2, 6), 0), ((2,), 0)]
assert not any(each.on_cpu or each.pinned for each in named.values())

with torch.device("meta"):
    single = nn.Linear(3, 5)
fully_shard(single, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
(weight, bias) = fsdp_shards(single)
assert weight.on_cpu and not weight.pinned and weight.padded_sizes == (2, 3)
memory = torch.arange(6.0).view(2, 3)
weight.keep(memory)
state = single._get_fsdp_state()
group = state._fsdp_param_groups[0] if hasattr(state, "_fsdp_param_groups") else state._fsdp_param_group
assert group.fsdp_params[0]._sharded_param_data.data_ptr() == memory.data_ptr(), "what all_gather_inputs returns"

if not hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6 gathers on GPUs alone
    torch.cpu.Stream.record_event = lambda self: None
gathering = fully_shard(nn.Linear(3, 5), mesh=mesh)
assert [each.gathered for each in fsdp_shards(gathering)] == [None, None]
gathering.unshard()
assert [id(each.gathered) for each in fsdp_shards(gathering)] == [id(each) for each in gathering.parameters()]
gathering.reshard()
assert not {id(each.gathered) for each in fsdp_shards(gathering)} & {id(each) for each in gathering.parameters()}

grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
both = parallelize_module(nn.Linear(8, 8), grid["tp"], ColwiseParallel())
fully_shard(both, mesh=grid["dp"])
assert [shard_of(placement) for placement in both.weight.placements] == [(0, 2), (0, 1)]
assert shard_of(Replicate()) is None and shard_of(Shard(1)) == (1, 1)

three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
both = flattened_mesh(three, ("dp_shard", "cp"), "dp_shard_cp", ("dp_replicate",))
assert (both.mesh_dim_names, tuple(both.shape)) == (("dp_replicate", "dp_shard_cp"), (1, 4))
assert flattened_mesh(three, ("dp_shard", "cp"), "dp_shard_cp").mesh.tolist() == [0, 1, 2, 3]
"""


def test_fsdp_tells_the_memory_of_its_shards_and_keeps_what_it_is_given() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", SHARDS_WORLD], check=True, timeout=600)


def test_metadata_is_pickled_with_the_five_fields_that_every_torch_reads() -> None:
    import pickle

    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    from shardkit._torch import pickle_without_strides

    properties = TensorProperties.create_from_tensor(torch.ones(2, 3, dtype=torch.bfloat16).t())
    metadata = Metadata(
        {"a": TensorStorageMetadata(properties, torch.Size([3, 2]), []), "b": BytesStorageMetadata()}
    )
    pickle_without_strides(metadata)
    described = properties.__reduce_ex__(4)
    assert described[0].__name__ == "__newobj__"
    assert len(described[2]) == 5
    read = pickle.loads(pickle.dumps(metadata))
    assert read.state_dict_metadata["a"].properties.dtype == torch.bfloat16
    assert getattr(read.state_dict_metadata["a"].properties, "strides", None) is None


def test_buffers_outside_of_the_state_dict() -> None:
    import torch
    from torch import nn

    from shardkit._torch import non_persistent_buffers

    module = nn.BatchNorm1d(2)
    module.register_buffer("hidden", torch.ones(1), persistent=False)
    assert non_persistent_buffers(module) == {"hidden"}
    assert "hidden" not in module.state_dict()


def test_parameters_of_an_lstm_can_be_swapped() -> None:
    import torch
    from torch import nn

    from shardkit._torch import swappable_parameters

    module, whole = nn.LSTM(3, 2, device="meta"), nn.LSTM(3, 2)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(module.weight_ih_l0, nn.Parameter(torch.ones(8, 3)))
    with swappable_parameters([nn.Linear(2, 2), module]):
        for name, parameter in module.named_parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(whole.get_parameter(name).detach().clone()))
    values = torch.randn(4, 1, 3)
    assert torch.equal(module(values)[0], whole(values)[0])
    others = {name: parameter.detach() + 1 for name, parameter in whole.named_parameters()}
    replaced = [torch.func.functional_call(each, others, (values,))[0] for each in (module, whole)]
    assert torch.equal(*replaced)
    assert torch.equal(module.double()(values.double())[0], whole.double()(values.double())[0])


def test_writes_in_place_are_counted_on_meta_too() -> None:
    import torch

    from shardkit._torch import times_written

    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    before = times_written(parameter)
    torch.nn.init.normal_(parameter)
    with torch.no_grad():
        parameter.mul_(2)
    assert times_written(parameter) == before + 2


def test_a_wrap_policy_tells_its_classes() -> None:
    from torch import nn
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from shardkit._torch import wrap_policy_classes

    assert wrap_policy_classes(ModuleWrapPolicy({nn.Linear, nn.GELU})) == {nn.Linear, nn.GELU}
    assert wrap_policy_classes(lambda module: True) == frozenset()


def test_a_newer_torch_without_a_name_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from shardkit import _torch
    from shardkit.errors import ResourceError

    with pytest.raises(AttributeError):  # of a torch that was tried it is our fault
        _torch.non_persistent_buffers(object())  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    message = (
        r"torch 2\.99\.0 is newer .* 2\.6 to 2\.15, and {} does not work with it: .* has no attribute '{}'"
    )
    with pytest.raises(
        ResourceError, match=message.format("non_persistent_buffers", "_non_persistent_buffers_set")
    ):
        _torch.non_persistent_buffers(object())  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match=message.format("fsdp2_units", "_get_fsdp_state")):
        list(_torch.fsdp2_units(object(), is_root=True))  # type: ignore[arg-type]


def test_a_dispatch_mode_sees_operations_by_name() -> None:
    import torch

    from shardkit._torch import DispatchMode

    class Mode(DispatchMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def on_operation(self, name: str, inputs: object, options: object, result: object) -> None:
            self.found.append(name)

    with Mode() as mode:
        tensor = torch.empty(4, 6, device="meta")
        torch.stack([tensor, tensor]).chunk(2, dim=1)[0].transpose(0, 1).reshape(4, 6).contiguous()
    assert {"aten.stack.default", "aten.split.Tensor", "aten.transpose.int"} <= set(mode.found)
    assert mode.found[-1] in ("aten.view.default", "aten._unsafe_view.default")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads_memory_of_several_regions(tmp_path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from shardkit._torch import LocalRegions

    whole = torch.arange(8.0).reshape(4, 2)
    memory = whole[[0, 2, 3, 1]].clone()
    rows = [((0, 0), (1, 2), slice(0, 1)), ((2, 0), (2, 2), slice(1, 3)), ((1, 0), (1, 2), slice(3, 4))]
    parts = [(offsets, sizes, (place, slice(0, 2))) for offsets, sizes, place in rows]
    stored = LocalRegions.of(memory, (4, 2), parts)
    assert (stored.size(), stored.size(0), stored.data_ptr()) == ((4, 2), 4, memory.data_ptr())
    dcp.save({"w": stored}, checkpoint_id=tmp_path)
    found = {"w": torch.zeros(4, 2)}
    dcp.load(found, checkpoint_id=tmp_path)
    assert torch.equal(found["w"], whole)
    memory.zero_()
    dcp.load({"w": stored}, checkpoint_id=tmp_path)
    assert torch.equal(memory, whole[[0, 2, 3, 1]])
