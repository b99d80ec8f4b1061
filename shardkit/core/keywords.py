"""Functions whose keywords are the fields of a class, and suggestions for misspelled keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, ParamSpec, TypeVar, get_type_hints

from shardkit.core.text import suggestion

_P = ParamSpec("_P")
_O = TypeVar("_O")
_R = TypeVar("_R")


def keywords_of(
    options: Callable[_P, _O], within: Callable[[_O], AbstractContextManager[object]] = nullcontext
) -> Callable[[Callable[[_O], _R]], Callable[_P, _R]]:
    """Return a decorator that lets callers pass the fields of an options class as keywords.

    The decorated function takes an options object.

    Type checkers, `help` and `inspect.signature` show these as the function's own arguments.

    Args:
        options: a dataclass. In the signature, inherited fields come last.
        within: returns the context in which the function runs, from the options.
    """
    assert isinstance(options, type)
    inherited = {field.name for base in options.__bases__ if is_dataclass(base) for field in fields(base)}
    params = inspect.signature(options).parameters.values()
    shown = sorted(params, key=lambda param: (param.kind, param.name in inherited))
    hints = get_type_hints(options)

    def decorate(function: Callable[[_O], _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            _refuse_unknown(function.__name__, signature, kwargs)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # the original message would name the class
                raise TypeError(f"{function.__name__}() {error}") from None
            filled = options(*args, **kwargs)
            with within(filled):
                return function(filled)

        returned = inspect.signature(function).return_annotation
        signature = inspect.Signature(shown, return_annotation=returned)
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {**{param.name: hints[param.name] for param in shown}, "return": returned}
        return call

    return decorate


def suggests_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose TypeError for an unknown keyword suggests the closest one, as Python 3.13 does."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _refuse_unknown(function.__name__, signature, kwargs)
        return function(*args, **kwargs)

    return call


def _refuse_unknown(name: str, signature: inspect.Signature, keywords: dict[str, Any]) -> None:
    for keyword in keywords:
        if keyword not in signature.parameters:
            near = suggestion(keyword, signature.parameters)
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}{near}")
