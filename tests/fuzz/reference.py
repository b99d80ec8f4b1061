"""Python's own unpickler, with only inert classes to make: a second opinion on what a pickle says."""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardkit.core.dtypes import BY_NAME


class Top:
    """An instance of the class of the whole file."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Fields:
    """An instance of any other class: what it was made from and its state.

    The state is as it was when it was given. A hand-made pickle may put more into a list of it later, which
    ours does not see and torch does.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = {key: _copy(value) for key, value in state.items()} if type(state) is dict else state


def _copy(value: Any) -> Any:
    """Return a list or dict of its own, anything else as it is."""
    return type(value)(value) if type(value) in (list, dict) else value


class Unpickler(pickle.Unpickler):
    """Knows the given names and nothing else; nothing is imported."""

    def __init__(
        self,
        data: bytes,
        names: Mapping[tuple[str, str], Any],
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names, self._persistent = names, persistent

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._names[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name}") from None

    def persistent_load(self, value: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a persistent id")
        return self._persistent(value)


# What torch refuses to load although the tensor is all there: it asks for a device that this machine lacks,
# for gradients of integers, and for numbers in entries that say nothing about the tensor.
_NOT_ABOUT_BYTES = (
    *("don't know how to restore data location", "Attempting to deserialize", "Invalid device string"),
    *(
        "can require gradients",
        "a leaf Variable that requires grad",
        "invalid literal for int",
        "'utf-8' codec",
    ),
    'Expected hasRecord("version")',
    "end of frame",  # lengths of frames are only a hint to read ahead; Python's own unpickler in C ignores them
)


def load_tensor(data: bytes) -> Any:
    """Return what torch makes of a file of `torch.save`, with nothing allowed but tensors.

    torch's own weights-only unpickler knows protocol 2 alone; where it gives up, torch's other way is taken,
    with an unpickler that knows the names of plain tensors. None where torch gives up for a reason that has
    nothing to do with the bytes of the tensor.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on protocols
        try:
            try:
                return torch.load(io.BytesIO(data), weights_only=True)
            except pickle.UnpicklingError:
                return torch.load(io.BytesIO(data), weights_only=False, pickle_module=_TensorPickle)
        except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
            if any(reason in str(error) for reason in _NOT_ABOUT_BYTES):
                return None
            raise


class _TensorPickle:
    """Stands in for the module `pickle`."""

    class Unpickler(pickle._Unpickler):  # in Python, whose memo is a dict: a slot's number may be anything
        def find_class(self, module: str, name: str) -> Any:
            allowed = {
                "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3"),
                "collections": ("OrderedDict",),
                "torch.storage": ("UntypedStorage",),
                "torch": BY_NAME,
            }
            if name not in allowed.get(module, ()):
                raise pickle.UnpicklingError(f"{module}.{name}")
            return getattr(sys.modules[module], name)


class SlowUnpickler(pickle._Unpickler):
    """The same in Python; it knows no names."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, value: Any) -> Any:
        raise pickle.UnpicklingError("a persistent id")
