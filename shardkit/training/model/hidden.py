"""Find hidden tensors: those on meta that a model uses, but that are in no state dict.

They are in plain lists of modules, closures, partials or other objects. `prepare` moves every parameter to meta, and
`finalize` gives memory to those that have a name in the model. A hidden tensor would stay on meta, and a forward would
compute with unwritten memory, because torch accepts a tensor on meta together with one on the CPU without an error.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardkit.core.text import count, escape
from shardkit.errors import LayoutError
from shardkit.training.ranks.local import full_name, tensor_places

_MOST_OBJECTS = 1_000_000  # limit on searched objects, as a model may refer to a tokenizer or a data set
_REGISTERED = ("_parameters", "_buffers", "_modules")
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
# Objects that are not searched: they contain no tensors of a model, or lead to everything else in the process.
_CLOSED = (type, types.ModuleType, types.FrameType, types.CodeType, weakref.ref, torch.optim.Optimizer)
_COPY = "_hparams_initial"  # Lightning's copy of a module's arguments
_LIBRARIES = ("torch", "transformers", "shardkit", "builtins")


class Hidden(NamedTuple):
    """A reference to a tensor on meta from elsewhere than a prepared model's parameters and buffers."""

    tensor: weakref.ref[torch.Tensor]
    where: str
    """Place of the reference in the model, such as "teacher[0].weight"; "" if it is not in the model."""
    fqn: str
    """The tensor's name in the prepared model; "" if it has none."""


class _ReachedObject(NamedTuple):
    """An object that the search has reached."""

    where: str
    """Place of the object, such as "teacher[0].weight"."""
    value: Any
    in_module: bool
    """True for a parameter or buffer of a module that is not one of the model's submodules."""


def search_hidden(model: nn.Module) -> Iterator[_ReachedObject]:
    """Yield tensors on meta that a model refers to other than by parameters and buffers; each once."""
    modules = dict(model.named_modules())
    roots = (
        _ReachedObject(full_name(path, name), value, False)
        for path, module in modules.items()
        for name, value in vars(module).items()
        if name not in _REGISTERED and not _is_empty(value)
    )
    return _search(roots, {id(module) for module in modules.values()})


def find_hidden(model: nn.Module, moved: Sequence[nn.Parameter] | None) -> list[Hidden]:
    """Return the hidden tensors of a model that was just built.

    Args:
        model: a model that is not wrapped.
        moved: all parameters that modules got while the model was built. Parameters of other modules, which were built
            before, are not hidden tensors, as the user may fill them. None if this was not recorded.
    """
    named = {id(place.tensor): place.fqn for place in tensor_places(model)}
    moved_ids = {id(parameter) for parameter in moved or ()}
    hidden = {
        id(tensor): Hidden(weakref.ref(tensor), where, named.get(id(tensor), ""))
        for where, tensor, in_module in search_hidden(model)
        if id(tensor) in named or moved is None or not in_module or id(tensor) in moved_ids
    }
    for parameter in moved or ():
        if parameter.is_meta and id(parameter) not in named:
            hidden.setdefault(id(parameter), Hidden(weakref.ref(parameter), "", ""))
    unused = _unused(model) - named.keys()
    return [entry for key, entry in hidden.items() if key not in unused]


def _unused(model: nn.Module) -> set[int]:
    """Return the ids of tensors on meta in copies that are never used."""
    copies = (vars(module)[_COPY] for module in model.modules() if _COPY in vars(module))
    return {id(item.value) for item in _search((_ReachedObject("", copy, False) for copy in copies), set())}


def has_hidden(model: nn.Module) -> bool:
    """True for a model that was built on meta and has hidden tensors without a name."""
    return any(not entry.fqn for entry in find_hidden(model, None))


def refuse_hidden(model: nn.Module, hidden: Sequence[Hidden], elsewhere: Collection[int]) -> None:
    """Raise an error if a wrapped model still refers to hidden tensors on meta that nothing fills.

    A parameter that a wrapper has replaced may still be in an optimizer or in a list. It counts only if the model
    still refers to it.

    Args:
        model: the wrapped model, with parameters on meta or not.
        hidden: result of `find_hidden`.
        elsewhere: ids of the parameters of other prepared models.

    Raises:
        LayoutError: there are such tensors; the error names all of them.
    """
    if not any(_is_unfilled(entry, elsewhere) for entry in hidden):
        return
    gc.collect()  # frees objects in reference cycles
    remaining = [entry for entry in hidden if _is_unfilled(entry, elsewhere)]
    reached = {id(item.value): item.where for item in search_hidden(model)}
    stale = [entry for entry in remaining if entry.fqn and _id(entry) in reached]
    never = [entry for entry in remaining if not entry.fqn]
    if not stale and not never:
        return
    reached = {**_in_globals(model), **reached}
    problems = [f"{_describe_hidden(entry, reached)}, which was {escape(entry.fqn)}" for entry in stale]
    problems += _count_repeats(_describe_hidden(entry, reached) for entry in never)
    LayoutError.raise_for(
        problems,
        f"{count(len(stale) + len(never), 'tensor')} of the model on meta, in no state dict: nothing fills "
        f"{'it' if len(stale) + len(never) == 1 else 'them'}, and a forward would read memory that nobody has written",
        hint=_hint(is_stale=not never),
    )


def forget_named(hidden: list[Hidden], model: nn.Module) -> None:
    """Remove a model's own tensors from `hidden`, as a tensor with weak references cannot be given memory."""
    named = {id(place.tensor) for place in tensor_places(model)} if hidden else set()
    hidden[:] = [entry for entry in hidden if _id(entry) not in named]


def _hint(*, is_stale: bool) -> str:
    if is_stale:
        return (
            "wrapping has replaced the parameter: read it from its module when it is used (self.a.weight), instead of "
            "keeping it in a list, closure, partial or object"
        )
    return (
        "register it (self.name = module), so that the source has it; or build it after finalize; or give it memory and "
        "values before: module.to_empty(device=...), then module.load_state_dict(...)"
    )


def _id(entry: Hidden) -> int | None:
    tensor = entry.tensor()
    return None if tensor is None else id(tensor)


def _is_unfilled(entry: Hidden, elsewhere: Collection[int]) -> bool:
    tensor = entry.tensor()
    return tensor is not None and tensor.is_meta and id(tensor) not in elsewhere


def _describe_hidden(entry: Hidden, reached: dict[int, str]) -> str:
    tensor = entry.tensor()
    assert tensor is not None
    where = reached.get(id(tensor)) or entry.where
    shape = list(tensor.shape)
    return f"{escape(where)}: {shape}" if where else f"a parameter of {shape} that something else holds"


def _count_repeats(lines: Iterable[str]) -> list[str]:
    return [line if times == 1 else f"{line} ({times} times)" for line, times in Counter(lines).items()]


def _in_globals(model: nn.Module) -> dict[int, str]:
    """Return id -> place of tensors on meta that the globals of the model's own code refer to."""
    names = dict.fromkeys(kind.__module__ for module in model.modules() for kind in type(module).__mro__)
    module_names = [
        name for name in names if name.partition(".")[0] not in _LIBRARIES and name in sys.modules
    ]
    roots = (
        _ReachedObject(f"{key} of {name}", value, False)
        for name in module_names
        for key, value in vars(sys.modules[name]).items()
    )
    return {id(item.value): item.where for item in _search(roots, set())}


def _search(roots: Iterable[_ReachedObject], seen: set[int]) -> Iterator[_ReachedObject]:
    """Yield tensors on meta that objects refer to, directly or through other objects, the nearest first."""
    waiting = deque(roots)
    while waiting and len(seen) < _MOST_OBJECTS:
        item = waiting.popleft()
        kind = type(item.value)
        if _is_empty(item.value) or id(item.value) in seen or issubclass(kind, _CLOSED):
            continue
        seen.add(id(item.value))
        if not issubclass(kind, torch.Tensor):
            waiting.extend(_parts(item.where, item.value))
        elif item.value.is_meta:
            yield item


def _is_empty(value: Any) -> bool:
    return type(value) in _ATOMS or (type(value) in _CONTAINERS and not value)


def _parts(where: str, value: Any) -> Iterator[_ReachedObject]:
    """Yield the objects that an object refers to, with their names if known. No code of the object runs."""
    kind = type(value)
    if issubclass(kind, nn.Module):
        for name, part in list(vars(value).items()):
            items = part.items() if name in _REGISTERED else ()
            yield from (_ReachedObject(f"{where}.{key}", item, name != "_modules") for key, item in items)
            if name not in _REGISTERED:
                yield _ReachedObject(f"{where}.{name}", part, False)
    elif issubclass(kind, dict):
        for key, item in list(dict.items(value)):
            yield _ReachedObject(f"{where}[{key!r}]" if type(key) in (str, int) else where, item, False)
    elif issubclass(kind, (list, tuple)):
        yield from (
            _ReachedObject(f"{where}[{index}]", item, False) for index, item in enumerate(tuple(value))
        )
    elif kind is types.FunctionType:
        yield from _parts_of_function(where, value)
    elif kind is functools.partial:
        yield _ReachedObject(where, value.func, False)
        yield _ReachedObject(f"{where}.args", value.args, False)
        yield _ReachedObject(f"{where}.keywords", value.keywords, False)
    else:
        attributes = _attributes(value)
        yield from (_ReachedObject(f"{where}.{name}", item, False) for name, item in list(attributes.items()))
        yield from (
            _ReachedObject(where, item, False) for item in gc.get_referents(value) if item is not attributes
        )


def _attributes(value: Any) -> dict[str, Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        attributes = None
    return attributes if type(attributes) is dict else {}


def _parts_of_function(where: str, function: types.FunctionType) -> Iterator[_ReachedObject]:
    """Yield the objects in a function's closure, defaults and attributes, but not in its globals."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from (_ReachedObject(f"{where}.{name}", item, False) for item in gc.get_referents(cell))
    yield _ReachedObject(where, function.__defaults__, False)
    yield _ReachedObject(where, function.__kwdefaults__, False)
    yield _ReachedObject(where, function.__dict__, False)
