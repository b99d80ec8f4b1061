"""The public names: sorted, importable, seen by type checkers, and the same signatures as before.

tests/data/public_api.txt has the signatures. A change there is a change for users, made on purpose:

    python -m tests.test_public_api > tests/data/public_api.txt
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit import errors

SIGNATURES = Path(__file__).parent / "data/public_api.txt"
INTERNAL = {"Terminated"}  # how the command line turns SIGTERM into an exception


def test_all_is_sorted():
    assert shardkit.__all__ == sorted(set(shardkit.__all__))
    assert dir(shardkit) == shardkit.__all__


@pytest.mark.parametrize("name", shardkit.__all__)
def test_each_is_importable(name):
    assert getattr(shardkit, name) is not None


def test_every_error_is_public():
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__ == errors.__name__
    }
    assert raised - INTERNAL <= set(shardkit.__all__)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'bogus'"):
        _ = shardkit.bogus


def test_type_checkers_see_the_same_names():
    """`mypy --strict` takes a name only from an import `name as name`; tests/typed_use.py is checked with the package."""
    block = next(
        node for node in ast.parse(Path(shardkit.__file__).read_text()).body if isinstance(node, ast.If)
    )
    seen = [
        (node.module, alias.name, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    wanted = [(home, name, name) for home, names in shardkit._HOMES.items() for name in names]
    assert sorted(seen) == sorted(wanted)


def packages() -> list[str]:
    root = Path(shardkit.__file__).parent
    inits = sorted(root.glob("*/**/__init__.py"))
    return [".".join(("shardkit", *init.parent.relative_to(root).parts)) for init in inits]


@pytest.mark.parametrize("name", packages())
def test_every_package_below_says_that_it_is_internal(name):
    assert (import_module(name).__doc__ or "").rstrip().endswith("Internal: import from `shardkit`.")


def signature_of(name: str, value: Any) -> Iterator[str]:
    """Yield the lines of a public name: what a function takes, what a class has."""
    if not isinstance(value, type):
        yield from parameters_of(f"def {name}", value)
        return
    bases = [] if is_dataclass(value) else [base.__name__ for base in value.__bases__ if base is not object]
    yield f"class {name}" + (f"({', '.join(bases)})" if bases else "")
    own = {
        key: found for base in reversed(value.__mro__) if is_ours(base) for key, found in vars(base).items()
    }
    if is_dataclass(value):
        yield from (f"    {field.name}: {field.type}" for field in fields(value))
    elif "__init__" in own:
        yield from indented(parameters_of("__init__", value.__init__))
    for method, found in sorted(own.items()):
        if method.startswith("_"):
            continue
        if isinstance(found, property):
            yield f"    {method}: {inspect.signature(found.fget).return_annotation}"
        elif isinstance(found, (classmethod, staticmethod)) or inspect.isfunction(found):
            yield from indented(parameters_of(f"def {method}", getattr(value, method)))


def is_ours(value: type) -> bool:
    return value.__module__.split(".")[0] == "shardkit"


def parameters_of(head: str, function: Any) -> Iterator[str]:
    """Yield a signature in one line, or with a line for each parameter where it is long."""
    signature, parts, has_star = inspect.signature(function), [], False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not has_star:
            parts.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        has_star = has_star or stars == "*" or each.kind is each.KEYWORD_ONLY
        kind = "" if each.annotation is each.empty else f": {each.annotation}"
        parts.append(
            f"{stars}{each.name}{kind}" + ("" if each.default is each.empty else f" = {each.default!r}")
        )
    end = ")" if signature.return_annotation is signature.empty else f") -> {signature.return_annotation}"
    line = f"{head}({', '.join(parts)}{end}"
    if len(line) <= 100:
        yield line
    else:
        yield from (f"{head}(", *(f"    {part}," for part in parts), end)


def indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


def all_signatures() -> str:
    names = [name for name in shardkit.__all__ if name != "__version__"]
    return "\n\n".join("\n".join(signature_of(name, getattr(shardkit, name))) for name in names) + "\n"


def test_signatures_are_those_that_users_know():
    assert all_signatures() == SIGNATURES.read_text(), "see the top of this file"


if __name__ == "__main__":
    print(all_signatures(), end="")
