"""The child process of a trace: it builds the model, wraps it, reads the placements and answers with JSON.

    request (a line)   {"directory", "axes": [[name, size, role]], "ep", "pp", "stages", "wrap", "dtype",
                       "trust_remote_code", "names", "answer"}
                       The axes are those of one pipeline stage. "answer" is the path of the answer's file.
                       With "asks": "class" nothing is wrapped, and `naming.answer_class` answers.
    answer (a file)    {"status": "ok", ...} with the keys of `_read_model`, or an error: {"status":
                       one of `STATUSES`, "message", "problems", "hint", "show_output"}

The parent shows the last lines of stdout and stderr if the child fails, and ignores them otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from shardkit._torch import class_before_sharding, init_fake_world
from shardkit.core.mesh import Axis, Mesh
from shardkit.core.text import escape
from shardkit.errors import LayoutError, PolicyError, SourceError, UsageError
from shardkit.keys.names import clean_name
from shardkit.layout.classes import ClassDtypes, build_model, built_dtypes, class_dtypes
from shardkit.layout.layout import innermost_unit
from shardkit.layout.naming import answer_class, ask_model, tensors_of, tied_groups
from shardkit.layout.parallel import Meshes, add_dispatched_units, apply_plans, is_parallel
from shardkit.layout.placed import MeshPlacements, read_placements
from shardkit.layout.stages import find_stages
from shardkit.layout.traced import STATUSES
from shardkit.layout.units import (
    PlannedUnit,
    class_counts,
    describe_error,
    find_units,
    import_name,
    plan_units,
    shard_units,
    tie_error,
)
from shardkit.layout.wrap_policy import OPTION, WrapPolicy, list_candidates, parse_policy, parse_stages

# Far above what the largest models need, which is 12 s and 400 MiB.
_MAX_CPU_S, _MAX_DATA_BYTES = 300, 16 << 30


def main() -> None:
    """Serve requests from stdin, one a line, then end the process.

    stdin is a socket; a byte goes back through it when an answer is written.
    """
    requests, sys.stdin = sys.stdin.buffer, open(os.devnull, encoding="utf-8")  # models must not read it
    for line in requests:
        request = json.loads(line)
        answer = answer_request(request)
        sys.stdout.flush()
        sys.stderr.flush()
        with open(request["answer"], "w", encoding="utf-8") as file:
            json.dump(answer, file)
        with contextlib.suppress(OSError):  # the parent has stopped waiting
            os.write(0, b"\n")
    os._exit(0)  # an orderly end of a fake process group takes time and serves nothing


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, errors included.

    A trace makes a fake process group, so one process can do only one trace. It can answer any number of questions about a
    class.
    """
    try:
        return {"status": "ok", **_trace(request)}
    except PolicyError as error:
        # The user's function failed: show where. A missing module is named in the message.
        if not isinstance(error.__cause__, ModuleNotFoundError | None):
            traceback.print_exception(error.__cause__)
        return {"status": "policy", **error.to_json(), "show_output": error.__cause__ is not None}
    except (SourceError, UsageError) as error:  # LayoutError is a SourceError
        return {
            "status": next(s for s, kind in STATUSES.items() if isinstance(error, kind)),
            **error.to_json(),
        }
    except (Exception, SystemExit) as error:
        # A model's own code may raise any error. The parent gets it with its traceback.
        traceback.print_exc()
        failure = LayoutError(
            f"the model cannot be built and wrapped: {describe_error(error)}",
            hint="the last lines that the model's code printed are above",
        )
        return {"status": "layout", **failure.to_json(), "show_output": True}


def _limit_resources() -> None:
    """Limit this process, so that a config of an endless model does not exhaust the machine."""
    for what, most in ((resource.RLIMIT_CPU, _MAX_CPU_S), (resource.RLIMIT_DATA, _MAX_DATA_BYTES)):
        allowed = resource.getrlimit(what)[1]
        least = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(what, (least, allowed))


def _trace(request: dict[str, Any]) -> dict[str, Any]:
    """Build the model, wrap it, and return its placements, units and ties; or answer a question about its class.

    Args:
        request: from the parent, as data of JSON. With "asks", it is a question about a class.
    """
    if "asks" in request:
        _limit_resources()
        return answer_class(request)
    dtype: torch.dtype | None = getattr(torch, request["dtype"]) if request.get("dtype") else None
    model = build_model(request["directory"], trust_remote_code=request["trust_remote_code"], dtype=dtype)
    mesh = Mesh(tuple(Axis(*axis) for axis in request["axes"]), ep=request.get("ep", 1))
    policy = parse_policy(request["wrap"])
    built = dtype or getattr(getattr(model, "config", None), "dtype", None) or torch.float32
    # `wide` has the dtypes that the class gives its tensors under half precision: some modules stay in fp32, and these are
    # units of their own. A model that is not built in half precision (fp32) is assumed to be trained in bf16.
    wide = built_dtypes(model, built) if built.itemsize == 2 else class_dtypes(model, torch.bfloat16)
    # `keep_fp32` lists exceptions to `--dtype`. Without that option, or with fp32, no tensor is narrowed, so there are none.
    keep_fp32 = [] if wide.default_dtype is not dtype else _in_fp32(model, wide)
    before = tensors_of(model)
    matched = (
        None if request["names"] is None else ask_model(model, request["names"], as_loaded=False).to_json()
    )
    classes = {id(module): type(module).__name__ for module in model.modules()}
    num_stages, stages = request.get("pp", 1), dict[str, list[int]]()
    if num_stages > 1:
        wanted_stages = parse_stages(request["stages"])
        if wanted_stages.kind == "function":
            _import_from_here()
        stages = find_stages(model, list(before), num_stages, wanted_stages)
    init_fake_world(mesh.size)
    device_mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    view, experts = mesh.experts, None
    if view is not None:
        experts = init_device_mesh("cpu", view.shape, mesh_dim_names=view.names)
    data = [axis.name for axis in mesh.axes if axis.role != "tensor"]
    tensor = next((axis.name for axis in mesh.axes if axis.role == "tensor"), None)
    wrap_model(model, device_mesh, policy, Meshes.of(device_mesh, data, tensor, experts), wide)
    answer = _read_model(model, mesh, before, classes)
    about = {"model_class": classes[id(model)], "keep_fp32": keep_fp32, "stages": stages}
    return {**about, **answer, "match": matched}


def _in_fp32(model: nn.Module, wide: ClassDtypes) -> list[str]:
    """Return the names in the state dict of tensors that the model's class keeps in fp32 under half precision."""
    state = model.state_dict(keep_vars=True)
    return [name for name, x in state.items() if x.is_floating_point() and wide.of(name) is torch.float32]


def wrap_model(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: WrapPolicy,
    meshes: Meshes,
    wide: ClassDtypes | None,
) -> None:
    """Apply a policy as `training.wrap` does: first the model's plans, then `fully_shard` on units and on the root.

    Args:
        model: a model on the meta device. It is sharded in place.
        mesh: replicate axis, shard axis and tensor axis, each optional. A function in the policy is called with it.
        policy: the parsed `--wrap`.
        meshes: the parts of `mesh`, and the meshes of experts.
        wide: the dtypes of the model's class. Modules that it keeps in fp32 get units of their own.

    Raises:
        PolicyError: the policy matches nothing, its function cannot be imported or fails, or the model has no plan
            for an axis.
    """
    if policy.kind == "function":
        _call_function(model, mesh, policy)
        return
    if any("." in name for name in policy.names):
        _import_from_here()
    matched = find_units(model, policy)
    dispatched = apply_plans(model, meshes)
    if meshes.data is None:
        return
    plan = plan_units(model, add_dispatched_units(model, matched, dispatched), wide)

    def shard(unit: PlannedUnit, module: nn.Module) -> None:
        fully_shard(module, mesh=meshes.of_unit(unit.around in dispatched))

    shard_units(plan, dict(model.named_modules()), shard)


def _call_function(model: nn.Module, mesh: DeviceMesh, policy: WrapPolicy) -> None:
    assert policy.function is not None
    _import_from_here()
    function: Callable[[nn.Module, DeviceMesh], object] = import_name(*policy.function)
    try:
        function(model, mesh)
    except (Exception, SystemExit) as error:
        raise PolicyError(
            f"--wrap {policy.text}: the function failed: {describe_error(error)}",
            hint="it is called with the model on the meta device and a device mesh, and shards the model in place",
        ) from error
    if not any(isinstance(module, FSDPModule) for module in model.modules()) and not is_parallel(model):
        raise PolicyError(
            f"--wrap {policy.text}: after the call no module of the model is sharded",
            problems=list_candidates(class_counts(model)),
            hint="the function applies fully_shard in place; what it returns is not used",
        )


def _import_from_here() -> None:
    """Allow imports from the current directory too. torch is loaded by now, so files there cannot take its place."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _read_model(
    model: nn.Module, mesh: Mesh, before: dict[str, torch.Tensor], classes: dict[int, str]
) -> dict[str, Any]:
    """Return the answer for a wrapped model: units, tensors, ties and the other parts of a `Trace`.

    Args:
        model: the model after wrapping.
        mesh: the main mesh.
        before: the tensors of its state dict before wrapping.
        classes: id of each module -> name of its class before wrapping.
    """
    after = tensors_of(model)
    units = _units(model, classes)
    index = {path: number for number, (path, _) in enumerate(units)}
    _check_ties(before, after, index, units)
    ties = tied_groups(after)
    aliases = {name for group in ties for name in group[1:]}
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    kept = {name: tensor for name, tensor in after.items() if name not in aliases}
    placed = _all_placements(kept, mesh)
    views = list(dict.fromkeys(place.mesh for place in placed.values() if place.mesh is not None))
    return {
        "meshes": [
            [(a.name, a.size, a.role, steps) for a, steps in zip(view.axes, view.digits, strict=True)]
            for view in views
        ],
        "units": units,
        "tensors": [
            (
                name,
                tuple(tensor.shape),
                [str(p) for p in placed[name].placements],
                innermost_unit(name, index),
                not isinstance(tensor, nn.Parameter | DTensor),
                None if (view := placed[name].mesh) is None else views.index(view),
            )
            for name, tensor in kept.items()
        ],
        "ties": ties,
        "absent_buffers": [name for name in map(clean_name, buffers) if name not in after],
        "notes": [
            f"left out, not a tensor: {escape(n)}" for n in model.state_dict(keep_vars=True) if n not in after
        ],
    }


def _units(model: nn.Module, classes: dict[int, str]) -> list[tuple[str, str]]:
    """Return (path, class) of the root and of every module that is a unit, in module order."""
    units = [("", classes[id(model)])]
    for path, module in model.named_modules():
        if path and isinstance(module, FSDPModule):
            units.append((clean_name(path), class_before_sharding(module).__name__))
    return units


def _check_ties(
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    index: dict[str, int],
    units: list[tuple[str, str]],
) -> None:
    """Raise an error for ties that `fully_shard` split, because a function put their names into different units."""
    split = [
        {name: units[innermost_unit(name, index)][0] for name in group}
        for group in tied_groups(before)
        if len({id(after.get(name)) for name in group}) > 1
    ]
    if split:
        raise tie_error(split, [(path, class_name) for path, class_name in units if path], OPTION)


def _all_placements(tensors: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, MeshPlacements]:
    placed: dict[str, MeshPlacements] = {}
    problems = []
    for name, tensor in tensors.items():
        try:
            placed[name] = read_placements(tensor, mesh)
        except LayoutError as error:
            problems.append(f"{escape(name)}: {error.message}")
    LayoutError.raise_for(
        problems,
        "tensors have placements that are not supported",
        hint="replicated and dim-sharded tensors on meshes over the ranks of --mesh are supported",
    )
    return placed
