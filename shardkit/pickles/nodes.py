"""What stands in for the objects of a pickle: values that do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Opaque:
    """Something that is not plain data; nothing of it was made but its name."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: object = None) -> None:
        self.name = name
        """As the file gives it, e.g. "argparse.Namespace"; not escaped."""
        self.value = value
        """Its only argument where that was a string, a number or a bool: the value of an enum, a device."""

    def __repr__(self) -> str:
        return f"Opaque({self.name!r})"

    def make(self, args: object) -> object:
        """Return what calling it with a tuple of arguments, or making an instance of it, gives."""
        only = args[0] if type(args) is tuple and len(args) == 1 else None
        return Opaque(self.name, only if type(only) in (str, int, float, bool) else None)

    def build(self, state: object) -> None:
        """Take the state that the pickle gives it: not at all."""


class Maker(Opaque):
    """A name that stands for a function of ours, which gets the arguments."""

    __slots__ = ("_call",)

    def __init__(self, name: str, call: Callable[[tuple[Any, ...]], object]) -> None:
        super().__init__(name)
        self._call = call

    def make(self, args: object) -> object:
        """Return what the function makes of the arguments; it must check them."""
        return self._call(args) if type(args) is tuple else Opaque(self.name)


class Fields(Opaque):
    """An instance whose state is kept, because the classes around it are known."""

    __slots__ = ("args", "items")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        super().__init__(name)
        self.args = args
        """What it was made from."""
        self.items: dict[str, Any] = {}
        """Its attributes; where its state is something else than attributes, that is under ""."""

    def build(self, state: object) -> None:
        """Keep the state: a dict, or the pair (dict, dict of slots)."""
        parts: Any = state if _is_dict_pair(state) else (state,)
        for part in parts:
            if type(part) is dict:
                self.items.update(part)
            elif part is not None:
                self.items[""] = part


def _is_dict_pair(state: object) -> bool:
    return type(state) is tuple and len(state) == 2 and all(x is None or type(x) is dict for x in state)
