"""The JSON schema of what each command prints with `--json`, made from the types of the results.

python scripts/schemas.py            writes docs/schemas/*.schema.json anew
python scripts/schemas.py --check    fails where one of them is out of date
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import shardkit
from shardkit.operations.diff import SYMBOLS, DiffResult, TensorDiff
from shardkit.operations.diff.values import TensorStats
from shardkit.operations.watch import WatchResult

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
RESULTS: dict[str, type] = {
    "abort": shardkit.AbortResult,
    "commit": shardkit.CommitResult,
    "consolidate": shardkit.ConsolidateResult,
    "diff": DiffResult,
    "env": shardkit.Environment,
    "inspect": shardkit.InspectResult,
    "latest": shardkit.LatestResult,
    "preshard": shardkit.PreshardResult,
    "reshard": shardkit.ReshardResult,
    "status": shardkit.StatusResult,
    "verify": shardkit.VerifyResult,
    "watch": WatchResult,
}
"""By command, the type of its result."""
COMPUTED: dict[type, dict[str, tuple[Any, str]]] = {
    shardkit.VerifyResult: {
        "ok": (bool, "No problem was found."),
        "bring_again": (tuple[str, ...], "Files that are missing or whose bytes are damaged."),
    },
    TensorDiff: {
        "symbol": (str, "One of = ~ - + *, as the text has them."),
        "share_changed": (float | None, "`num_changed` over all elements."),
    },
    DiffResult: {
        "num_tensors": (int, "Tensors that were compared."),
        **{f"num_{status}": (int, f"Tensors of the status {status!r}.") for status in SYMBOLS},
    },
}
"""What `to_json` adds to the fields: type and text."""
ERROR = {
    "type": "object",
    "description": "What every command prints instead of its result where it fails.",
    "properties": {
        "error": {"type": "string", "description": "The type, such as SourceError."},
        "message": {"type": "string", "description": "What is wrong, one line."},
        "problems": {"type": "array", "items": {"type": "string"}, "description": "Each instance of it."},
        "hint": {"type": ["string", "null"], "description": "What to do next."},
        "exit_code": {"type": "integer", "description": "That the process exits with."},
        "resume_command": {
            "type": "string",
            "description": "After an interruption, what goes on with the run.",
        },
    },
    "required": ["error", "message", "problems", "hint", "exit_code"],
}
LEFT_OUT = {"holdings"}
"""Fields for pictures, which `to_json` leaves out."""
_LATE = {"TensorStats": TensorStats}
"""Types that the modules which name them import only for type checkers."""
_SCALARS: dict[Any, str] = {
    int: "integer",
    str: "string",
    bool: "boolean",
    float: "number",
    NoneType: "null",
}


def schema(command: str) -> dict[str, Any]:
    """Return the schema of the result of a command."""
    records: dict[str, dict[str, Any]] = {}
    top = _of_record(RESULTS[command], records)
    del records[RESULTS[command].__name__]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"shardkit {command} --json",
        "$comment": "Keys may be added in any release: ignore those that you do not know.",
        **top,
        **({"$defs": dict(sorted(records.items()))} if records else {}),
    }


def _of_record(kind: Any, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {"type": "object", "description": (kind.__doc__ or "").split("\n\n")[0]}
    records[kind.__name__] = record
    hints, texts = get_type_hints(kind, localns=_LATE), dict(texts_of_fields(kind))
    properties = {
        field.name: _with(_of(hints[field.name], records), texts.get(field.name))
        for field in dataclasses.fields(kind)
        if field.name not in LEFT_OUT
    }
    properties |= {
        name: _with(_of(hint, records), text) for name, (hint, text) in COMPUTED.get(kind, {}).items()
    }
    record |= {"properties": properties, "required": list(properties)}
    return record


def _with(found: dict[str, Any], text: str | None) -> dict[str, Any]:
    return {**found, "description": text} if text else found


def _of(hint: Any, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        name = hint.__name__  # type: ignore[union-attr]
        if name not in records:
            _of_record(hint, records)
        return {"$ref": f"#/$defs/{name}"}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_of(argument, records) for argument in arguments]}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], records)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], records)}
    if origin is tuple:
        items = [_of(argument, records) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    return {"type": _SCALARS[hint]}


def texts_of_fields(kind: type) -> Iterator[tuple[str, str]]:
    """Yield (field, the text below it) of a dataclass and of those that it is made from."""
    for each in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                yield field.target.id, " ".join(str(text.value.value).split())


_PAGE = """\
# JSON schemas

What each command prints with `--json`, as a [JSON schema](https://json-schema.org), made from the types of the results.
Keys may be added in any release, and none is renamed. Sizes end with `_bytes`, times in seconds with `_s`, and counts
begin with `num_`. The same results come from [Python](../python.md).

| schema | of what |
|---|---|
"""
_FILES = {
    "../keys.schema.json": "a file of [key rules](../keys.md), for editors",
    "../manifest.schema.json": "`shardkit.json`, the [manifest](../format.md) beside shards",
}


def texts() -> dict[str, str]:
    """Return the files of docs/schemas, by name."""
    error = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "an error", **ERROR}
    made = {**{name: schema(name) for name in RESULTS}, "error": error}
    rows = [
        f"| [{name}]({name}.schema.json) | {content['title'].replace('shardkit', '`shardkit')}{'`' if name != 'error' else ''} |"
        for name, content in sorted(made.items())
    ]
    rows += [
        f"| [{path[3:].partition('.')[0]}.schema.json]({path}) | {what} |" for path, what in _FILES.items()
    ]
    files = {f"{name}.schema.json": json.dumps(content, indent=1) + "\n" for name, content in made.items()}
    return {**files, "README.md": _PAGE + "\n".join(rows) + "\n"}


def main() -> int:
    """Write the files, or with `--check` compare them."""
    stale = [name for name, text in texts().items() if not _is_same(FOLDER / name, text)]
    if "--check" in sys.argv:
        if stale:
            print(f"out of date: {', '.join(stale)}; run python scripts/schemas.py", file=sys.stderr)
        return bool(stale)
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
    return 0


def _is_same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
