"""Functions whose keywords are the fields of a class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import ParamSpec, TypeVar, get_type_hints

_P = ParamSpec("_P")
_O = TypeVar("_O")
_R = TypeVar("_R")


def keywords_of(options: Callable[_P, _O]) -> Callable[[Callable[[_O], _R]], Callable[_P, _R]]:
    """Return a decorator: a function that takes an options object is called with the fields of its class instead.

    Type checkers, `help` and `inspect.signature` show these as the function's own arguments.

    Args:
        options: a dataclass. In the signature, what it inherits comes last.
    """
    assert isinstance(options, type)
    inherited = {field.name for base in options.__bases__ if is_dataclass(base) for field in fields(base)}
    params = inspect.signature(options).parameters.values()
    shown = sorted(params, key=lambda param: (param.kind, param.name in inherited))
    hints = get_type_hints(options)

    def decorate(function: Callable[[_O], _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return function(options(*args, **kwargs))

        returned = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(shown, return_annotation=returned)  # type: ignore[attr-defined]
        call.__annotations__ = {**{param.name: hints[param.name] for param in shown}, "return": returned}
        return call

    return decorate
