"""What is saved, as torch's distributed checkpoint takes it; and its writer, which stores a tensor of several names once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardkit._torch import describe_as_before, fsdp1_unit, non_persistent_buffers
from shardkit.files import storage
from shardkit.training.ranks.context import clean_name

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"
_METADATA = ".metadata"

State = dict[str, Any]


@contextlib.contextmanager
def checkpoint_state(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
) -> Iterator[State]:
    """Give what is to be saved; nothing of the model or its optimizers is another one afterwards.

    Args:
        aliases: further names of tensors, which are left out.
    """
    weights = get_model_state_dict(model)
    state: State = {
        MODEL: {name: value for name, value in weights.items() if aliases.get(name) not in weights}
    }
    if extra:
        # dcp.save would ask for a state dict when other ranks are waiting already.
        state[EXTRA] = {
            name: value.state_dict() if isinstance(value, Stateful) else value
            for name, value in extra.items()
        }
    with _complete(optimizers) as new:
        if optimizers:
            state[OPTIMIZER] = get_optimizer_state_dict(model, list(optimizers))
        if new:
            _take_back_step(model, state[OPTIMIZER]["state"], None if new == list(optimizers) else new)
        yield state


def _take_back_step(model: nn.Module, states: State, new: list[torch.optim.Optimizer] | None) -> None:
    """Set back what `_complete` counted, in the state of some optimizers' parameters; None for all."""
    names = list(states)
    if new is not None:
        stepped = {id(p) for each in new for group in each.param_groups for p in group["params"]}
        names = [name for name, tensor in _state_names(model) if id(tensor) in stepped]
    for name in names:
        if "step" in (own := states.get(name, {})):
            own["step"] = own["step"] * 0


@contextlib.contextmanager
def _complete(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.optim.Optimizer]]:
    """Let torch make the state of optimizers that have none, by a step without gradients; take it away afterwards.

    Kept, that state would count the step as one: Adam's first real step would be its second.

    Source: torch 2.13, torch/distributed/checkpoint/state_dict.py, _init_optim_state, which makes none where there
    are gradients.
    """
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    parameters = [parameter for each in new for group in each.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield new
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in new:
            optimizer.state.clear()


def find_aliases(model: nn.Module) -> dict[str, str]:
    """Return every further name of a parameter or buffer with its first name, as state dicts have them."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for fqn, tensor in _state_names(model):
        kept = first.setdefault(id(tensor), fqn)
        if kept != fqn:
            aliases[fqn] = kept
    return aliases | _flat_aliases(model)


def _state_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers under all of their names, as torch's state dicts of models have them."""
    for path, module in _state_paths(model):
        hidden = non_persistent_buffers(module)
        own: list[tuple[str, torch.Tensor]] = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        yield from ((_joined(path, name), tensor) for name, tensor in own if name not in hidden)


def _state_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules, under all of their paths, without what wrappers put in; DDP puts in `module`."""
    inside: dict[str, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        holder, _, name = path.rpartition(".")
        is_wrapped = path and isinstance(modules[holder], DistributedDataParallel)
        inside[path] = inside[holder] if is_wrapped else _joined(inside.get(holder, ""), name)
        yield clean_name(inside[path]), module


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _flat_aliases(model: nn.Module) -> dict[str, str]:
    """Further names of what lies in FSDP1's flat parameters, which modules may not have as parameters."""
    aliases: dict[str, str] = {}
    for path, module in _state_paths(model):
        unit = fsdp1_unit(module) if isinstance(module, FullyShardedDataParallel) else None
        for name, kept in unit.shared if unit else ():
            aliases[clean_name(_joined(path, name))] = clean_name(_joined(path, kept))
    return aliases


class Writer(FileSystemWriter):
    """torch's writer of a directory, whose `.metadata` has the further names of tensors too.

    Args:
        path: the directory.
        aliases: further name -> the name that is stored, both as the model has them.
    """

    def __init__(self, path: str, aliases: Mapping[str, str]) -> None:
        super().__init__(path)
        self.files: dict[str, int] = {}
        """File -> where its last record ends; known on the rank that wrote `.metadata`."""
        self._aliases = {f"{MODEL}.{name}": f"{MODEL}.{kept}" for name, kept in aliases.items()}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`."""
        for written in (each for rank in results for each in rank):
            stop = written.storage_data.offset + written.storage_data.length
            name = written.storage_data.relative_path
            self.files[name] = max(stop, self.files.get(name, 0))
        copies = self._copies(metadata, results)
        describe_as_before(metadata)
        super().finish(metadata, [*results, copies])
        # torch 2.13, FileSystemWriter.finish, syncs it while its bytes are still in Python's buffer.
        storage.sync_file(os.path.join(self.path, _METADATA))

    def _copies(self, metadata: Metadata, results: list[list[WriteResult]]) -> list[WriteResult]:
        """Describe aliases, and return the records of what they stand for under their names."""
        by_name: dict[str, list[WriteResult]] = {}
        for written in (each for rank in results for each in rank):
            by_name.setdefault(written.index.fqn, []).append(written)
        copies = []
        for alias, kept in self._aliases.items():
            if kept not in metadata.state_dict_metadata or alias in metadata.state_dict_metadata:
                continue
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[kept]
            metadata.planner_data[alias] = (MODEL, alias.removeprefix(f"{MODEL}."))
            copies += [
                replace(each, index=MetadataIndex(alias, each.index.offset, each.index.index))
                for each in by_name[kept]
            ]
        return copies
