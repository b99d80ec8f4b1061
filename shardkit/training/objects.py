"""Find distributed tensors inside objects of a state dict, where torch's DCP does not find them.

DCP searches only dicts and lists. Other values that are not tensors are pickled, and the pickle of one rank is saved.
If a tuple, a set, a dataclass or an optimizer's object contains a DTensor, only that rank's rows are saved.

Source: torch 2.13, torch/distributed/checkpoint/_nested_dict.py and _traverse.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PLAIN = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type(None),
    type,
    FunctionType,
    BuiltinFunctionType,
    ModuleType,
)
_MOST = 1 << 20  # limit on the objects that are searched in one value


def distributed_in_objects(state: Mapping[str, Any]) -> list[str]:
    """Return the names of values that DCP pickles and that contain tensors distributed over several ranks.

    Args:
        state: the state dict to save.
    """
    return [name for name, value in _objects(state, "") if any(map(_is_distributed, _pickled_tensors(value)))]


def _objects(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield (name, value) for the values of a state dict that torch pickles."""
    if isinstance(value, (Mapping, list)):
        for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _objects(child, f"{name}.{key}" if name else str(key))
    elif not isinstance(value, (*_PLAIN, torch.Tensor)):
        yield name, value


def _is_distributed(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return type(tensor).__name__ == "ShardedTensor"
    return tensor.device_mesh.size() > 1


def _pickled_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that pickle would reach from an object."""
    seen, waiting = dict[int, object](), list[Any]([value])
    while waiting and len(seen) < _MOST:
        each = waiting.pop()
        if isinstance(each, torch.Tensor) or type(each).__name__ == "ShardedTensor":
            yield each
        elif not isinstance(each, _PLAIN) and id(each) not in seen:
            seen[id(each)] = each
            waiting += _pickled_items(each)


def _pickled_items(value: Any) -> Iterator[object]:
    """Yield the values that pickle takes from an object: items, or the result of `__reduce_ex__`."""
    if type(value) in (list, tuple, set, frozenset):
        yield from value
    elif type(value) is dict:
        yield from (*value, *value.values())
    else:
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # pickling will report it
            return
        if isinstance(reduced, tuple):
            _, arguments, *more = reduced
            yield from (arguments, *more[:1])
            for items in more[1:3]:
                yield from items or ()
