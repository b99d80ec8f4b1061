"""The JSON schema of `shardkit.json`, made from the types that read it.

    python -m tests.files.manifest_schema

writes docs/manifest.schema.json anew.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from shardkit.files import manifest

PATH = Path(__file__).parents[2] / "docs" / "manifest.schema.json"
_SCALARS: dict[Any, dict[str, Any]] = {
    int: {"type": "integer", "minimum": 0},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    float: {"type": "number", "minimum": 0},
    NoneType: {"type": "null"},
    object: {},
}


def schema() -> dict[str, Any]:
    """Return the schema of a manifest of any kind."""
    records: dict[str, dict[str, Any]] = {}
    kinds = [_of(kind, records) for kind in manifest.KINDS]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "shardkit.json (draft)",
        "description": (
            "A draft: docs/format.md is the contract. Keys may be added within a format number, "
            "so unknown keys are allowed everywhere."
        ),
        "oneOf": kinds,
        "$defs": dict(sorted(records.items())),
    }


def _of(hint: Any, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _of_record(hint, records)
    if origin is Annotated:
        return {**_SCALARS[arguments[0]], **_of_check(arguments[1])}
    if origin in (Union, UnionType):
        return {"anyOf": [_of(argument, records) for argument in arguments]}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _of(arguments[1], records)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], records)}
    if origin is tuple:
        items = [_of(argument, records) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    return dict(_SCALARS[hint])


def _of_check(check: Any) -> dict[str, Any]:
    if isinstance(check, range):
        return {"maximum": check.stop - 1}
    if isinstance(check, tuple):
        return {}
    if isinstance(check, re.Pattern):  # ECMA-262 has no \Z
        return {"pattern": f"^(?:{check.pattern})$".replace("\\Z", "$").replace("\\0", "\\u0000")}
    return {"enum": sorted(check)}


def _of_record(kind: Any, records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name = kind.__name__.removeprefix("Recorded")  # which tells a class from that of a mesh or source at work
    if name not in records:
        records[name] = {}
        hints = get_type_hints(kind, include_extras=True)
        properties: dict[str, Any] = {}
        required = []
        if kind in manifest.KINDS:
            properties["format"] = {"enum": list(range(1, manifest.FORMAT + 1))}
            required.append("format")
            if kind is not manifest.Presharded:
                properties["kind"] = {"const": kind.kind}
                required.append("kind")
            else:
                properties["kind"] = {
                    "const": kind.kind,
                    "description": "Not written: absent means this kind.",
                }
        for field in dataclasses.fields(kind):
            key = field.metadata.get("key", field.name)
            properties[key] = _of(hints[field.name], records)
            if field.default is dataclasses.MISSING or (kind in manifest.KINDS and key == "crc32"):
                required.append(key)
        records[name] = {
            "description": kind.__doc__,
            "type": "object",
            "properties": properties,
            "required": required,
        }
    return {"$ref": f"#/$defs/{name}"}


def text() -> str:
    """Return the schema as it lies in docs."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
