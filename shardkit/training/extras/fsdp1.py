"""Fill the units of FSDP1 (FullyShardedDataParallel) one by one, while they are wrapped.

FSDP1 cuts whole tensors, and calls `param_init_fn` for each unit whose parameters are on meta, inner units
first. So every rank has only its shards and one whole unit in memory at a time.
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

from shardkit._torch import swappable_parameters
from shardkit.core.keywords import suggests_keywords
from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError, LayoutError, UsageError
from shardkit.training.fill.reading import Filled
from shardkit.training.fill.samples import keep_files_open
from shardkit.training.fill.source import remember
from shardkit.training.fill.strategy import FillPlan, ReadOptions, Strategy, choose_sources, fill_shards
from shardkit.training.model.between import check_hidden, compare_parameters, warn_of_restored_buffers
from shardkit.training.model.buffers import equalise_buffers, memory_for_buffers, restore_buffers, retie
from shardkit.training.model.fit import ModelInitializationContext, supply_of
from shardkit.training.model.initialise import fill_initialised
from shardkit.training.model.states import read_states, set_extra_states
from shardkit.training.ranks.agree import agreed, device_for, world
from shardkit.training.ranks.local import LocalShard, allocate, distinct_tensors, module_places

# accelerate 1.15, utils/dataclasses.py: if either is on, accelerate replaces param_init_fn by a function that
# does not fill memory, and rank 0 sends its memory to all ranks.
_SETTINGS = ("sync_module_states", "cpu_ram_efficient_loading")


@suggests_keywords
def param_init_fn(
    ctx: ModelInitializationContext,
    strategy: object = None,
    *,
    read: Strategy = "auto",
    device: torch.device | str | None = None,
) -> UnitFiller:
    """Return a `param_init_fn` for FSDP1 that fills each unit from the context's source; every rank calls it.

    It does for FSDP1 what `finalize` does for `fully_shard`: it reads or receives weights, initialises others, mends
    ties, restores buffers, and checks the result. The first forward checks that the whole model was filled.

    Args:
        ctx: the result of `prepare`. FSDP1 must wrap `ctx.model`, or a module that contains it.
        strategy: accelerate's FSDP plugin, Lightning's FSDPStrategy, or FSDP1's arguments as a mapping, whose
            settings are checked; None checks accelerate's environment variables.
        read: "direct", "broadcast" or "auto", as for the strategy of `finalize`.
        device: the device on which units are filled; None for one that the process group supports, preferably the CPU.

    Returns:
        A function that takes a module, fills it and returns it.

    Raises:
        UsageError: on all ranks: `sync_module_states` or `cpu_ram_efficient_loading` is on, the plugin is for
            FSDP2, or the model has OSFT factors.
    """
    with agreed("setting up param_init_fn"):
        _refuse_replaced(strategy)
        if ctx.factoring.targets:
            raise UsageError(
                "OSFT: FSDP1 makes one flat parameter of factors that are frozen, trained and fp32, and of weights that"
                " are not",
                hint="wrap with shardkit.wrap or fully_shard (FSDP2)",
            )
        options = ReadOptions(strategy=read)
    return UnitFiller(ctx, options, device)


def _refuse_replaced(strategy: object) -> None:
    if getattr(strategy, "fsdp_version", 1) == 2:
        raise UsageError(
            "param_init_fn is for FSDP1, and the plugin is for FSDP2",
            hint="accelerator.prepare(ctx.model), then shardkit.finalize(model, ctx)",
        )
    # Lightning's strategy keeps FSDP1's arguments in `kwargs`.
    arguments = strategy if isinstance(strategy, Mapping) else getattr(strategy, "kwargs", None)
    on = []
    for name in _SETTINGS:
        variable = f"FSDP_{name.upper()}"
        if strategy is None:
            is_on = os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")
            on += [f"{variable}={escape(os.environ[variable])}"] if is_on else []
        elif (arguments or {}).get(name) or getattr(strategy, name, False):
            on.append(f"{name}=True")
    if on:
        raise UsageError(
            f"{' and '.join(on)}: rank 0's values would be sent over those that every rank has, and accelerate replaces"
            " param_init_fn by a function that fills nothing",
            hint="set both to False: fsdp_config={'cpu_ram_efficient_loading': False, 'sync_module_states': False} or"
            " FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False, sync_module_states=False)",
        )


class UnitFiller:
    """Fills the units of FSDP1; the result of `param_init_fn`."""

    def __init__(
        self, ctx: ModelInitializationContext, options: ReadOptions, device: torch.device | str | None
    ) -> None:
        self._ctx, self._options = ctx, options
        default = device_for() if dist.is_initialized() else torch.device("cpu")
        self._device = default if device is None else torch.device(device)
        self._has_begun = False
        self._unfilled = {fqn for fqn, tensor in ctx.expected.items() if tensor.persistent}
        self._groups = {name: tuple(group) for group in ctx.ties for name in group}
        self._paths: dict[int, list[str]] = {}
        for path, module in ctx.model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self._hook = ctx.model.register_forward_pre_hook(self._check_complete, prepend=True)

    def __call__(self, module: nn.Module) -> nn.Module:
        """Fill the tensors on meta in a module and in the modules inside it that are not wrapped; return the module.

        FSDP1 calls this for the modules of a unit one after the other, the outermost first, so the first
        call fills all of them.
        """
        if not any(parameter.is_meta for part in _unit(module) for parameter in part.parameters(False)):
            return module
        if not self._has_begun:
            self._begin()
            self._has_begun = True
        with agreed("looking at an FSDP1 unit"):
            shards = self._shards(list(_unit(module)))
            with swappable_parameters(_unit(module)):
                allocate((shard.fqn, shard.whole, self._device, None) for shard in shards)
        self._fill(shards)
        self._unfilled.difference_update(name for shard in shards for name in shard.names)
        if not self._unfilled:
            self._end()
        return module

    def _begin(self) -> None:
        """Check the user's changes of the model since `prepare`, and decide which ranks read. Called once."""
        ctx = self._ctx
        parameters = [(names, tensor.requires_grad) for names, tensor, _ in distinct_tensors(ctx.model)]
        compare_parameters(parameters, ctx)
        self._groups.update({name: names for names, _ in parameters if len(names) > 1 for name in names})
        supply, sources = supply_of(ctx), None
        with agreed("looking at the prepared model"):
            warn_of_restored_buffers(ctx.model, ctx)
            check_hidden(ctx.model, ctx)
            unread = memory_for_buffers(ctx.model, self._device)
            restore_buffers(ctx.model, {**unread, **ctx.buffers}, self._device)
            retie(ctx.model, ctx.ties)
        if ctx.source is not None:
            with keep_files_open(supply) as opened:
                sources = choose_sources([], opened, self._options)
        with agreed("opening the source"):
            is_reader = sources is None or sources[world()[0]] == world()[0]
            if supply.weights is not None and is_reader:
                supply = replace(supply, weights=supply.weights.located())
        self._plan = FillPlan(supply=supply, sources=sources, check_source=self._options.check_source)

    def _shards(self, modules: Sequence[nn.Module]) -> list[LocalShard]:
        """Return a unit's parameters and persistent buffers as shards that are whole on every rank."""
        shards: dict[int, LocalShard] = {}
        inside: set[str] = set()
        strangers: list[str] = []
        for module in modules:
            paths = self._paths.get(id(module), ())
            if not paths:
                tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                strangers += [
                    f"{type(module).__name__}: {escape(name)}" for name, tensor in tensors if tensor.is_meta
                ]
            for place in module_places((path, module) for path in paths):
                inside.add(place.fqn)
                if place.persistent and id(place.tensor) not in shards:
                    names = self._groups.get(place.fqn, (place.fqn,))
                    shards[id(place.tensor)] = LocalShard.plain(names, place.tensor, place.kind)
        LayoutError.raise_for(
            strangers,
            "FSDP1 wraps parameters on meta that are not in the prepared model",
            hint="prepare the model that they belong to, or give them values",
        )
        split = [
            listed(group)
            for group in dict.fromkeys(self._groups.values())
            if not inside.isdisjoint(group) and not inside >= set(group)
        ]
        LayoutError.raise_for(
            split,
            "names of one parameter lie in different FSDP1 units: they would be trained apart",
            hint="let the wrap policy leave both modules to one unit, such as the root (wrap the blocks alone)",
        )
        return list(shards.values())

    def _fill(self, shards: Sequence[LocalShard]) -> None:
        ctx, filled = self._ctx, Filled()
        fqns = {shard.fqn for shard in shards}
        if ctx.source is not None:
            filled = fill_shards(shards, self._plan)
        with agreed("initialising parameters"):
            part = replace(
                ctx,
                initialised=ctx.initialised & fqns,
                grown={fqn: rows for fqn, rows in ctx.grown.items() if fqn in fqns},
            )
            fill_initialised(shards, part, filled)
            problems = list(filled.problems(shards))
            IntegrityError.raise_for(problems, "an FSDP1 unit is not filled as it should be")

    def _end(self) -> None:
        states = read_states(self._ctx.model, self._ctx) if self._ctx.source is not None else []
        if states:
            fill_shards(states, self._plan)
        differing = equalise_buffers(self._ctx.model)
        with agreed("proving the filled model"):
            if differing:
                raise IntegrityError("buffers differ between ranks", problems=map(escape, differing))
            set_extra_states(self._ctx.model, states)
        remember(self._ctx.model, self._plan.supply.weights)

    def _check_complete(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook that raises an error if tensors were not filled, and removes itself otherwise."""
        if self._unfilled:
            unfilled = sorted(self._unfilled)
            raise UsageError(
                f"{count(len(unfilled), 'tensor')} of the model were never filled: {listed(unfilled)}",
                hint="FSDP1 must get this param_init_fn when it wraps the model; accelerate replaces it if"
                " sync_module_states or cpu_ram_efficient_loading is on, so set both to False. If FSDP1 ignores"
                " everything that the root holds, call it with the model once more after wrapping",
            )
        self._hook.remove()


def _unit(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules inside it that are not in an inner unit."""
    yield module
    for child in module.children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _unit(child)


# transformers 5.23, distributed/fsdp.py: is_fsdp_enabled; accelerate 1.15, utils/dataclasses.py.
_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@contextlib.contextmanager
def hf_ram_efficient_loading(enabled: bool) -> Iterator[None]:
    """Turn transformers' RAM-efficient loading on or off in this context, and restore the previous setting afterwards.

    shardkit does not need it. It is for code that also calls `from_pretrained`, for which two environment variables
    must agree. These are the effects of the variables, found by running each version on two ranks:

    - transformers 5.23: none. Every rank reads every value.
    - transformers 5.12, 5.17, 5.20 and 5.22: ranks whose LOCAL_RANK is 0 read; the others have zeros.
      5.0: the others have random values instead. In all of these versions the others still use the memory of the
      whole model, and have the right non-persistent buffers. Without LOCAL_RANK in the
      environment no rank reads, not even rank 0.
    - Any transformers, if torch.distributed is not initialised: none.
    - accelerate 1.10 and 1.15: FSDP_CPU_RAM_EFFICIENT_LOADING is the default for the argument
      `cpu_ram_efficient_loading` of `FullyShardedDataParallelPlugin`. A plugin that gets the argument sets
      the variable, and leaves it set.

    Args:
        enabled: the value of both variables in this context.
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
