"""Compute a model's initial values, one whole tensor at a time, independent of the number of ranks.

If shards were initialised in place, every rank would get the same rows. If one generator were used for all tensors,
each would depend on those before it. So each module's parameters are created whole on the CPU, with a generator that is
seeded from the user's seed and the module's name, and then sliced.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardkit._torch import times_written
from shardkit.core.regions import Region, relative_to, window
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError
from shardkit.keys.names import clean_name
from shardkit.keys.peft import base_name
from shardkit.layout.classes import is_transformers, transformers_model
from shardkit.training.fill.reading import Filled
from shardkit.training.model.buffers import FILLS, enclosing_paths, filled_memory, same_bits
from shardkit.training.model.fit import ModelInitializationContext
from shardkit.training.ranks.local import LocalShard, full_name

_RESETS = ("reset_parameters", "_reset_parameters")
_ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
# peft 0.21, LoraLayer: all other modes are computed from the base's weights.
_PLAIN_LORA = (True, False, "gaussian")
_STD = 0.02  # transformers' default initializer_range


def initialise(ctx: ModelInitializationContext, fqns: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors on the CPU with the values of the model's own initialisation.

    A tensor depends only on the seed and its module. The parameters of one module are in memory at a time.

    Args:
        ctx: a context with a blueprint.
        fqns: first names of the parameters. Buffers may be among them; they get their computed values.

    Yields:
        (FQN, tensor) in the model's order.

    Raises:
        LayoutError: nothing initialises some parameters; the error lists those of one module.
    """
    remaining = set(fqns)
    modules = dict(ctx.blueprint.named_modules()) if ctx.blueprint is not None else {}
    for path, module in modules.items():
        names = {
            fqn: name
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
            if (fqn := full_name(path, name)) in remaining
        }
        remaining -= names.keys()
        if names:
            values = _make(modules, path, ctx.seed)
            for fqn, name in names.items():
                yield fqn, values.pop(name)
    for fqn in ctx.buffers:
        if fqn in remaining:
            remaining.discard(fqn)
            yield fqn, ctx.buffers[fqn]
    problems = list(map(escape, sorted(remaining)))
    LayoutError.raise_for(
        problems, f"{count(len(remaining), 'tensor')} to be initialised are not in the model"
    )


def new_rows(ctx: ModelInitializationContext, fqn: str) -> torch.Tensor:
    """Return the values, on the CPU, of the rows that `align_vocab` added to a tensor.

    Weights get the values of the model's `_init_weights`, usually normal with its initializer_range; biases are zero.
    (transformers itself draws new weights from the distribution of the old rows, for which it needs all of these.)

    Args:
        ctx: a context with a blueprint.
        fqn: a key of `ctx.grown`.
    """
    expected, blueprint = ctx.expected[fqn], ctx.blueprint
    assert blueprint is not None
    rows = expected.shape[0] - ctx.grown[fqn]
    with _seeded_generator(ctx.seed, f"{_seed_name(fqn)}[{ctx.grown[fqn]}:]"), torch.no_grad():
        if len(expected.shape) == 1:
            return torch.zeros(rows, dtype=expected.dtype)
        layer = nn.Embedding(rows, expected.shape[1], dtype=expected.dtype)
        holder = transformers_model(blueprint)
        if holder is None:
            layer.weight.normal_(std=_STD)
        else:
            holder._init_weights(layer)
        return layer.weight.detach()


def lost_initialisations(blueprint: nn.Module, writes: Mapping[str, int], fqns: Collection[str]) -> list[str]:
    """Return the parameters that the building of the model wrote by code that `initialise` does not run.

    Such code is outside the parameter's own module, for example `nn.init.zeros_(self.head.weight)` in
    a model's `__init__`. transformers models are not checked: they have all such code in `_init_weights`, and write
    some parameters several times.

    Args:
        blueprint: the model on meta.
        writes: FQN -> number of times that the parameter was written while the model was built.
        fqns: the parameters to be initialised.
    """
    missed: list[str] = []
    modules = dict(blueprint.named_modules())
    for path, module in modules.items():
        parameters = dict(module.named_parameters(recurse=False))
        named = {full_name(path, name): param for name, param in parameters.items()}
        named = {fqn: param for fqn, param in named.items() if fqn in fqns and writes.get(fqn)}
        if not named or any(is_transformers(modules[outer]) for outer in enclosing_paths(path)):
            continue
        before = {fqn: times_written(param) for fqn, param in named.items()}
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            for step in _steps(modules, path):
                step()
        missed += [fqn for fqn, param in named.items() if writes[fqn] > times_written(param) - before[fqn]]
    return missed


def _make(modules: dict[str, nn.Module], path: str, seed: int) -> dict[str, torch.Tensor]:
    """Return a module's own parameters, initialised, after a check that each was written."""
    first = _run(modules, path, seed, FILLS[0])
    if any(map(_may_be_unwritten, first.values())):
        second = _run(modules, path, seed, FILLS[1])
        lost = [name for name, value in first.items() if not same_bits(value, second[name])]
        LayoutError.raise_for(
            [escape(full_name(path, name)) for name in lost],
            f"nothing initialises {count(len(lost), 'parameter')} of"
            f" {escape(path) or 'the model'} ({type(modules[path]).__name__})",
            hint="give the module a reset_parameters() that does it, or give a source that has them",
        )
    return first


def _may_be_unwritten(tensor: torch.Tensor) -> bool:
    """True if an element has the value of the first filling: NaN, -1 or True."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(torch.isnan(tensor).any())
    return bool((tensor == filled_memory(tensor.new_empty(1), FILLS[0])).any())


def _run(modules: dict[str, nn.Module], path: str, seed: int, byte: int) -> dict[str, torch.Tensor]:
    """Initialise a module's own parameters over memory that is filled with one byte; all others stay on meta."""
    module = modules[path]
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    try:
        for name, param in parameters.items():
            setattr(module, name, nn.Parameter(filled_memory(param, byte), requires_grad=param.requires_grad))
        with _seeded_generator(seed, _seed_name(path)), torch.no_grad():
            for step in _steps(modules, path):
                step()
        return {name: getattr(module, name).detach() for name in parameters}
    except LayoutError:
        raise
    except Exception as error:  # the model's own code may need values of tensors on meta
        raise LayoutError(
            f"{escape(path) or 'the model'} ({type(module).__name__}) cannot be initialised by itself",
            problems=[f"{type(error).__name__}: {escape(str(error))}"],
            hint="give a source that has its weights",
        ) from error
    finally:
        for name, param in parameters.items():
            setattr(module, name, param)


@contextlib.contextmanager
def _seeded_generator(seed: int, name: str) -> Iterator[None]:
    """Use a separate random generator in this context, so that later random numbers do not change."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield


def _seed_name(path: str) -> str:
    """Return a module's name in the base model, so that wrappers do not change the random numbers."""
    name = clean_name(path)
    return base_name(f"{name}.weight".removeprefix(".")) or name


def _steps(modules: dict[str, nn.Module], path: str) -> Iterator[Callable[[], object]]:
    """Yield the calls that initialise a module, in the order in which building the model makes them.

    First come the constructors' `reset_parameters`, from the inside out. Then comes `_init_weights` of the nearest
    transformers model, or of any other module that has one, called with the module and with those around it, because
    a module may initialise its children, as GPT-2's blocks do.
    """
    outwards = [(outer, modules[outer]) for outer in enclosing_paths(path)]
    adapted = _lora_reset(outwards)
    for _, module in outwards:
        # The class must have the attribute: an instance of PEFT's wrappers forwards attributes of the wrapped module.
        reset = next((getattr(module, name) for name in _RESETS if hasattr(type(module), name)), None)
        if callable(reset) and not _num_required(reset):
            yield reset
        if adapted is not None:
            yield adapted
            return  # PEFT creates adapters after the model was initialised
    for depth, (_, module) in enumerate(outwards):
        holder = _initialising_module([enclosing for _, enclosing in outwards[depth:]])
        if holder is not None:
            yield lambda holder=holder, module=module: holder._init_weights(module)  # type: ignore[misc]


def _initialising_module(outwards: Iterable[nn.Module]) -> Any:
    """Return the nearest transformers model with `_init_weights`, else the nearest module whose own takes a module."""
    having = [module for module in outwards if callable(getattr(type(module), "_init_weights", None))]
    transformers_module = next(filter(is_transformers, having), None)
    if transformers_module is not None:
        return transformers_module
    return next((module for module in having if _num_required(module._init_weights) == 1), None)


def _num_required(function: Any) -> int:
    """Return the number of arguments without a default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return 0
    return sum(parameter.default is parameter.empty and parameter.kind in kinds for parameter in parameters)


def _lora_reset(outwards: list[tuple[str, nn.Module]]) -> Callable[[], object] | None:
    """Return the call by which PEFT initialises the LoRA adapter that a module is part of; None for other modules."""
    path = outwards[0][0]
    depth: int
    layer: Any
    for depth, (outer, layer) in enumerate(outwards):
        segments = path.removeprefix(outer).strip(".").split(".")
        if segments[0] not in _ADAPTERS or not hasattr(type(layer), "reset_lora_parameters"):
            continue
        names = segments[1:2] or list(getattr(layer, segments[0]).keys())
        configs: Any = next((m.peft_config for _, m in outwards[depth:] if hasattr(m, "peft_config")), {})
        modes = {name: getattr(configs.get(name), "init_lora_weights", True) for name in names}
        computed = {str(mode) for mode in modes.values() if mode not in _PLAIN_LORA}
        if computed:
            raise LayoutError(
                f"{escape(path)}: init_lora_weights={', '.join(sorted(computed))} is computed from the base's weights",
                hint="initialise adapters with init_lora_weights=True or 'gaussian'",
            )
        return lambda: [layer.reset_lora_parameters(name, mode) for name, mode in modes.items()]
    return None


def fill_initialised(shards: Sequence[LocalShard], ctx: ModelInitializationContext, filled: Filled) -> None:
    """Fill the tensors that are not read with initial values."""
    by_name = {name: shard for shard in shards for name in shard.names}
    if ctx.initialised:
        for fqn, whole in initialise(ctx, ctx.initialised):
            if fqn in by_name:  # otherwise the final check reports it
                put_rows(by_name[fqn], whole, 0, filled)
    # Two tensors that were tied after prepare have the same new rows: those of the first one.
    grown = {id(by_name[fqn]): fqn for fqn in reversed(ctx.grown) if fqn in by_name}
    for fqn in reversed(grown.values()):
        if fqn not in ctx.initialised:
            put_rows(by_name[fqn], new_rows(ctx, fqn), ctx.grown[fqn], filled)


def put_rows(shard: LocalShard, values: torch.Tensor, first_row: int, filled: Filled) -> None:
    """Copy `values` into a tensor's rows from `first_row` on, as far as this rank stores them."""
    offsets = (first_row, *(0,) * (values.ndim - 1)) if values.ndim else ()
    rows = Region(offsets, tuple(values.shape))
    for part in shard.parts:
        overlap = shard.cut(part, rows)
        if overlap is not None:
            region, target = overlap
            with torch.no_grad():
                target.copy_(values[window(relative_to(region, offsets))])
            filled.elements[shard.fqn] += region.num_elements
