"""inspect of what shardkit wrote: its manifest, held against the directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardkit.core.text import escape, fold
from shardkit.errors import SourceError
from shardkit.files import manifest
from shardkit.operations.inspect.result import (
    NOT_SHARDED,
    InspectedFile,
    InspectedUnits,
    InspectResult,
    Tensor,
    beside,
    imbalance,
    tensor_fields,
)

_SHARD_SUFFIX = ".distcp"
_SHOWN_NAMES = 3


def inspect_presharded(
    path: str, directory: str, content: Mapping[str, Any], *, unfold: bool
) -> InspectResult:
    """Say what a manifest says, and where the directory differs from it.

    Only the manifest is read: `.metadata` takes seconds to parse at a thousand ranks.
    """
    try:
        mesh, layout, tool = content["mesh"], content["layout"], content["tool"]
        found = [
            Tensor(fqn, t["dtype"], tuple(t["shape"]), ",".join(t["placements"]))
            for fqn, t in content["tensors"].items()
        ]
        files = tuple(
            InspectedFile(name=file["name"], file_bytes=file["size"], tensor_bytes=None)
            for file in content["files"]
        )
        return InspectResult(
            path=path,
            kind="presharded",
            format="dcp",
            made_by=f"{tool['name']} {tool['version']}",
            source=_source(content["source"]),
            model_class=None,
            world_size=mesh["world_size"],
            mesh=",".join(f"{axis['name']}={axis['size']}" for axis in mesh["axes"]),
            layout=layout["origin"],
            policy=layout["policy"],
            units=_units(content["units"]),
            **tensor_fields(found, unfold=unfold),
            files=files,
            imbalance=imbalance([file.file_bytes for file in files]),
            ties=tuple(tuple(group) for group in content["ties"]),
            objects=tuple(content.get("objects", ())),
            omitted=tuple((entry["name"], entry["reason"]) for entry in content["omitted"]),
            **NOT_SHARDED,
            notes=tuple(beside(directory)),
            warnings=tuple(_differences(directory, content)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(
            f"{manifest.NAME} lacks what its format has: {type(error).__name__} {escape(str(error))}",
            hint="the file was written by something else; docs/format.md describes it",
        ) from error


def _source(identity: Mapping[str, Any]) -> str:
    if "repo" in identity:
        return f"{identity['repo']} at {identity['commit']}"
    names = [file["name"] for file in identity["files"]]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"


def _units(units: Iterable[Mapping[str, Any]]) -> tuple[InspectedUnits, ...]:
    folded = fold((unit["path"], unit["class"]) for unit in units)
    return tuple(InspectedUnits(path=f.pattern, count=f.count, class_name=f.key) for f in folded)


def _differences(directory: str, content: Mapping[str, Any]) -> Iterator[str]:
    """Hold the directory against what the manifest lists: names and sizes, no digests."""
    listed = {content["metadata"]["name"]: content["metadata"]["size"]}
    for file in content["files"]:
        listed[file["name"]] = file["size"]
        listed[file["chunks"]["name"]] = file["chunks"]["size"]
    for name, size in listed.items():
        if os.path.basename(name) != name or name in ("", os.curdir, os.pardir):
            raise ValueError(f"file name {name!r}")
        held = _file_size(os.path.join(directory, name))
        if held is None:
            yield f"{escape(name)}: the manifest lists it, and there is no such file"
        elif held != size:
            yield f"{escape(name)}: {size} bytes in the manifest, {held} on disk"
    stale = sorted(n for n in os.listdir(directory) if n.endswith(_SHARD_SUFFIX) and n not in listed)
    if stale:
        shown = ", ".join(map(escape, stale[:_SHOWN_NAMES])) + (", ..." if len(stale) > _SHOWN_NAMES else "")
        yield f"{len(stale)} {_SHARD_SUFFIX} files are not of this checkpoint: {shown}"


def _file_size(path: str) -> int | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
