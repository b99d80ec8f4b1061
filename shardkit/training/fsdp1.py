"""FSDP1 (FullyShardedDataParallel): its units get their values one by one as they are wrapped.

FSDP1 cuts whole tensors, and calls `param_init_fn` for each unit whose parameters are on meta, inner units first. So
every rank holds its shards and the whole of one unit at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardkit._torch import non_persistent_buffers
from shardkit.core.regions import full_region
from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError, LayoutError, UsageError
from shardkit.training.fill.reading import Filled
from shardkit.training.finalize import (
    Strategy,
    check_options,
    fill,
    fill_initialised,
    is_direct,
    prove_filled,
)
from shardkit.training.model.buffers import equalise_buffers, named_buffers, restore_buffers, retie
from shardkit.training.ranks.agree import agreed, device_for
from shardkit.training.ranks.context import ModelInitializationContext, clean_name, remember
from shardkit.training.ranks.local import LocalShard, Replicas, give_memory

# transformers 5.23, distributed/fsdp.py: is_fsdp_enabled; accelerate 1.15, utils/dataclasses.py.
_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@contextlib.contextmanager
def hf_ram_efficient_loading(enabled: bool) -> Iterator[None]:
    """Turn the RAM efficient loading of transformers on or off for a while; put back what was there, whatever happens.

    shardkit needs none of it: this is for code that calls `from_pretrained` beside it, which must not be half on. What
    the variables do was found out by running each version on two ranks:

    - transformers 5.23: nothing. Every rank reads every value.
    - transformers 5.12, 5.17, 5.20 and 5.22: ranks whose LOCAL_RANK is 0 read; the others have zeros.
      5.0: random values in their place. In all of them the others take the memory of the whole model all the same,
      and have right non-persistent buffers. Without LOCAL_RANK in the environment no rank reads, rank 0 neither.
    - Any transformers, where torch.distributed is not initialised: nothing.
    - accelerate 1.10 and 1.15: FSDP_CPU_RAM_EFFICIENT_LOADING is what `FullyShardedDataParallelPlugin` takes for
      `cpu_ram_efficient_loading`. A plugin that is told so itself sets the variable, and leaves it so.

    Args:
        enabled: what both variables say inside.
    """
    before = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        for name in _VARIABLES:
            os.environ[name] = "true" if enabled else "false"
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# accelerate 1.15, utils/dataclasses.py: with either on, it puts a function of its own in the place of param_init_fn,
# which leaves memory as it is, and rank 0 sends that to all.
_SETTINGS = ("sync_module_states", "cpu_ram_efficient_loading")


def param_init_fn(
    ctx: ModelInitializationContext,
    strategy: object = None,
    *,
    read: Strategy = "auto",
    device: torch.device | str | None = None,
) -> UnitFiller:
    """Return what FSDP1 takes as `param_init_fn`: it fills each unit from the context's source; every rank calls it.

    It does for FSDP1 what `finalize` does for `fully_shard`: reads or receives, initialises, ties, restores buffers,
    and proves. The first forward checks that all of the model was filled.

    Args:
        ctx: from `prepare`; FSDP1 has to wrap `ctx.model`, or a module that holds it.
        strategy: accelerate's FSDP plugin, Lightning's FSDPStrategy, or FSDP1's arguments as a mapping, whose settings
            are looked at; None looks at accelerate's environment variables.
        read: "direct", "broadcast" or "auto", as `finalize`'s strategy.
        device: where a unit is filled; None is where the process group can send, the CPU if it can.

    Returns:
        A function of a module that returns the module.

    Raises:
        UsageError: on all ranks: `sync_module_states` or `cpu_ram_efficient_loading` is on, or the plugin is for FSDP2.
    """
    with agreed("setting up param_init_fn"):
        _refuse_replaced(strategy)
        check_options(read, "global")
    return UnitFiller(ctx, read, device)


def _refuse_replaced(strategy: object) -> None:
    if getattr(strategy, "fsdp_version", 1) == 2:
        raise UsageError(
            "param_init_fn is for FSDP1, and the plugin is for FSDP2",
            hint="accelerator.prepare(ctx.model), then shardkit.finalize(model, ctx)",
        )
    given = strategy if isinstance(strategy, Mapping) else getattr(strategy, "kwargs", None)  # Lightning's
    on = []
    for name in _SETTINGS:
        variable = f"FSDP_{name.upper()}"
        if strategy is None:
            is_on = os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")
            on += [f"{variable}={escape(os.environ[variable])}"] if is_on else []
        elif (given or {}).get(name) or getattr(strategy, name, False):
            on.append(f"{name}=True")
    if on:
        raise UsageError(
            f"{' and '.join(on)}: rank 0's values would be sent over those that every rank has, and accelerate replaces"
            " param_init_fn by a function that fills nothing",
            hint="set both to False: fsdp_config={'cpu_ram_efficient_loading': False, 'sync_module_states': False} or"
            " FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False, sync_module_states=False)",
        )


class UnitFiller:
    """Fills the units of FSDP1; made by `param_init_fn`."""

    def __init__(
        self, ctx: ModelInitializationContext, read: Strategy, device: torch.device | str | None
    ) -> None:
        self._ctx, self._read, self._direct = ctx, read, False
        default = device_for() if dist.is_initialized() else torch.device("cpu")
        self._device = default if device is None else torch.device(device)
        self._weights = ctx.weights
        self._has_begun = False
        self._left = {fqn for fqn, tensor in ctx.expected.items() if tensor.persistent}
        self._groups = {name: tuple(group) for group in ctx.ties for name in group}
        self._paths: dict[int, list[str]] = {}
        for path, module in ctx.model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._hook = ctx.model.register_forward_pre_hook(self._check_complete, prepend=True)

    def __call__(self, module: nn.Module) -> nn.Module:
        """Fill what is on meta of a module, and of those in it that FSDP1 has not wrapped; return it.

        FSDP1 calls it for the modules of a unit one after the other, the outermost first, which fills all of them.
        """
        if not any(parameter.is_meta for part in _unit(module) for parameter in part.parameters(False)):
            return module
        with agreed("looking at an FSDP1 unit"):
            self._begin()
            shards = self._shards(list(_unit(module)))
            _materialise(shards, self._device)
        if not self._has_begun:
            self._locate()
            self._has_begun = True
        self._fill(shards)
        self._left.difference_update(shard.fqn for shard in shards)
        if not self._left:
            self._end()
        return module

    def _begin(self) -> None:
        if not self._has_begun:
            unread = {
                fqn: torch.empty_like(value, device=self._device)
                for fqn, _, _, value in named_buffers(self._ctx.model)
                if value.is_meta
            }
            restore_buffers(self._ctx.model, {**unread, **self._ctx.buffers}, self._device)
            retie(self._ctx.model, self._ctx.ties)

    def _locate(self) -> None:
        """Decide once who reads."""
        if self._ctx.source is not None:
            self._direct = is_direct(self._weights, self._ctx.unavailable, self._read, "global")
        with agreed("opening the source"):
            self._weights = self._weights.located() if self._weights is not None else None

    def _shards(self, modules: Sequence[nn.Module]) -> list[LocalShard]:
        """Return the parameters of a unit, and its persistent buffers, as whole tensors that every rank holds."""
        found: dict[int, LocalShard] = {}
        inside: set[str] = set()
        strangers: list[str] = []
        for module in modules:
            hidden = non_persistent_buffers(module)
            for name, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ):
                fqns = [
                    clean_name(f"{path}.{name}" if path else name) for path in self._paths.get(id(module), ())
                ]
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                if not fqns:
                    strangers += [f"{type(module).__name__}: {escape(name)}"] if tensor.is_meta else []
                    continue
                inside.update(fqns)
                group = self._groups.get(fqns[0], (fqns[0],))
                if kind == "buffer" and name in hidden:
                    continue
                found[id(tensor)] = LocalShard(
                    fqn=group[0],
                    names=group,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    kind=kind,
                    persistent=True,
                    region=full_region(tuple(tensor.shape)),
                    replicas=Replicas(mesh=None),
                    whole=tensor,
                )
        if strangers:
            raise LayoutError(
                "FSDP1 wraps parameters on meta that are not of the prepared model",
                problems=strangers,
                hint="prepare the model that they are part of, or give them values",
            )
        split = [
            listed(group)
            for group in self._ctx.ties
            if not inside.isdisjoint(group) and not inside >= set(group)
        ]
        if split:
            raise LayoutError(
                "names of one parameter lie in different FSDP1 units: they would be trained apart",
                problems=split,
                hint="let the wrap policy leave both modules to one unit, as the root (wrap the blocks alone)",
            )
        return list(found.values())

    def _fill(self, shards: Sequence[LocalShard]) -> None:
        ctx, filled = self._ctx, Filled()
        fqns = {shard.fqn for shard in shards}
        if ctx.source is not None:
            filled = fill(
                shards,
                self._weights,
                ctx.unavailable,
                self._read,
                "global",
                initialised=ctx.initialised,
                grown=ctx.grown,
                direct=self._direct,
            )
        with agreed("initialising parameters"):
            part = replace(
                ctx,
                initialised=ctx.initialised & fqns,
                grown={fqn: rows for fqn, rows in ctx.grown.items() if fqn in fqns},
            )
            fill_initialised(shards, part, filled)
            problems = list(prove_filled(shards, filled.elements))
            if problems:
                raise IntegrityError("an FSDP1 unit is not filled as it should be", problems=problems)

    def _end(self) -> None:
        differing = equalise_buffers(self._ctx.model)
        with agreed("proving the filled model"):
            if differing:
                raise IntegrityError("buffers differ between ranks", problems=map(escape, differing))
        remember(self._ctx.model, self._weights)

    def _check_complete(self, module: nn.Module, args: Any) -> None:
        """Refuse to run on memory that nobody filled; what a forward pre-hook of the model does, once."""
        if self._left:
            left = sorted(self._left)
            raise UsageError(
                f"{count(len(left), 'tensor')} of the model were never filled: {listed(left)}",
                hint="FSDP1 must get this param_init_fn when it wraps the model; accelerate replaces it where"
                " sync_module_states or cpu_ram_efficient_loading is on, so set both to False. Where FSDP1 ignores"
                " all of what the root holds, call it with the model once more after wrapping",
            )
        self._hook.remove()


def _unit(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it that lie in no unit inside."""
    yield module
    for child in module.children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _unit(child)


def _materialise(shards: Sequence[LocalShard], device: torch.device) -> None:
    problems = []
    with torch.no_grad():
        for shard in shards:
            if shard.whole.is_meta and isinstance(shard.whole, nn.Parameter):
                try:
                    give_memory(shard.whole, torch.empty_like(shard.whole.detach(), device=device))
                except RuntimeError as error:
                    problems.append(f"{escape(shard.fqn)}: {str(error).splitlines()[0]}")
    if problems:
        raise LayoutError(f"{len(problems)} parameters cannot be given memory", problems=problems)
