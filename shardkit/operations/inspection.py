"""inspect: what a Hub model, a pre-sharded directory or any DCP checkpoint holds; no tensor data is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from shardkit import manifest
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.operations.folding import fold

_METADATA, _SHARD_SUFFIX = ".metadata", ".distcp"
_SHOWN_NAMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedFile:
    """One file that holds tensors."""

    name: str
    file_bytes: int
    """Size of the file."""
    tensor_bytes: int | None
    """Bytes of tensors in it; None where only its own chunk list or header would tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTensors:
    """One tensor, or several whose names differ only in numbers."""

    name: str
    """A name, or a pattern as `model.layers.{0..35}.mlp.up_proj.weight`."""
    count: int
    dtype: str
    shape: tuple[int, ...]
    """Of each, in elements."""
    placements: str | None
    """One for each mesh axis, such as "R,S(0)"; None where it is not recorded."""
    tensor_bytes: int
    """Of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedUnits:
    """One unit of the wrap policy, or several whose paths differ only in numbers."""

    path: str
    """Module path or pattern; "" is the root."""
    count: int
    class_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedDType:
    """All tensors of one dtype."""

    dtype: str
    num_tensors: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """What a model or a checkpoint holds."""

    path: str
    """As it was given."""
    kind: Literal["hub", "presharded", "dcp"]
    """A Hub model, a checkpoint with a `shardkit.json`, or any other DCP checkpoint."""
    format: str
    """Of the files: "safetensors", "torch-bin" or "dcp"."""
    made_by: str | None
    """Tool and version, where they are recorded."""
    source: str | None
    """What it was made from: repo and commit, or file names."""
    model_class: str | None
    """From config.json."""
    world_size: int | None
    """Ranks of the mesh; None where no mesh is recorded."""
    mesh: str | None
    layout: str | None
    """"traced" or "declared"."""
    policy: str | None
    """The wrap policy as it was asked for."""
    units: tuple[InspectedUnits, ...]
    num_tensors: int
    """Each counted once; the other names of tied ones are in `ties`."""
    tensor_bytes: int
    tensors: tuple[InspectedTensors, ...]
    dtypes: tuple[InspectedDType, ...]
    """Most bytes first."""
    files: tuple[InspectedFile, ...]
    imbalance: float | None
    """Largest shard file over the mean; None for a Hub model."""
    ties: tuple[tuple[str, ...], ...]
    """Names that share their bytes; the first of each is among `tensors`."""
    objects: tuple[str, ...]
    """Entries that are not tensors; never decoded."""
    omitted: tuple[tuple[str, str], ...]
    """(name, reason) of tensors that the source had and this has not."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    """What is not as it should be."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: Shape
    placements: str | None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


def inspect(path: str, *, tensors: bool = False) -> InspectResult:
    """Return what a path holds, without reading tensor data and without torch (legacy `.bin` needs it).

    Args:
        path: a Hub model's directory or weight file, a pre-sharded directory, or any DCP directory.
        tensors: list every tensor; otherwise those whose names differ only in numbers are folded.

    Raises:
        SourceError: nothing there, not a model or a checkpoint, or damaged.
        ResourceError: a file may not be read.
    """
    if not os.path.lexists(path):
        raise SourceError(
            f"{escape(path)}: no such file or directory",
            hint="inspect reads local paths; bring a Hub model here with: hf download ORGANISATION/NAME",
        )
    directory = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
    is_checkpoint = os.path.isdir(path) or _is_part_of_checkpoint(os.path.basename(path))
    content = manifest.read(directory) if is_checkpoint else None
    if content is not None:
        return _inspect_presharded(path, directory, content, unfold=tensors)
    if is_checkpoint and os.path.lexists(os.path.join(directory, _METADATA)):
        return _inspect_dcp(path, directory, unfold=tensors)
    if is_checkpoint:
        _refuse_unfinished(path, directory)
    return _inspect_hub(path, unfold=tensors)


def _is_part_of_checkpoint(name: str) -> bool:
    return name in (manifest.NAME, _METADATA) or name.endswith(_SHARD_SUFFIX)


def _refuse_unfinished(path: str, directory: str) -> None:
    shards = sum(name.endswith(_SHARD_SUFFIX) for name in os.listdir(directory))
    if shards:
        raise SourceError(
            f"{escape(path)} has {shards} {_SHARD_SUFFIX} files and no {_METADATA}: the save did not finish",
            hint="use another checkpoint; without its metadata the shards cannot be told apart",
        )


def _inspect_hub(path: str, *, unfold: bool) -> InspectResult:
    from shardkit.formats.hub import open_model

    model = open_model(path)
    catalog, config = model.catalog, model.config or {}
    found = [_Tensor(e.fqn, e.dtype.name, e.shape, None) for e in catalog.tensors.values()]
    held = {file.name: 0 for file in catalog.files}
    for fqn in catalog.tensors:
        file = catalog.files[catalog.chunks.file[catalog.tensors[fqn].first_chunk]].name
        held[file] += catalog.tensors[fqn].nbytes
    notes = catalog.notes
    if config.get("tie_word_embeddings") is True:
        notes += ("config.json ties the word embeddings: input and output are one parameter",)
    return InspectResult(
        path=path,
        kind="hub",
        format=catalog.format,
        made_by=None,
        source=None,
        model_class=_model_class(config),
        **_NO_LAYOUT,
        **_tensor_fields(found, unfold=unfold),
        files=tuple(_hub_files(model.identity, held)),
        imbalance=None,
        ties=(),
        objects=catalog.objects,
        omitted=(),
        notes=notes,
        warnings=(),
    )


_NO_LAYOUT: dict[str, Any] = {"world_size": None, "mesh": None, "layout": None, "policy": None, "units": ()}


def _model_class(config: Mapping[str, object]) -> str | None:
    classes = config.get("architectures")
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None


def _hub_files(identity: Mapping[str, Any], held: Mapping[str, int]) -> Iterator[InspectedFile]:
    """Yield the weight files; a legacy file is one, though each of its tensors has an entry of its own."""
    for file in identity["files"]:
        name, prefix = file["name"], f"{file['name']}:"
        nbytes = sum(size for entry, size in held.items() if entry == name or entry.startswith(prefix))
        yield InspectedFile(name=name, file_bytes=file["size_bytes"], tensor_bytes=nbytes)


def _inspect_dcp(path: str, directory: str, *, unfold: bool) -> InspectResult:
    from shardkit.formats.dcp import open_dcp

    catalog = open_dcp(directory)
    ties = _shared_extents(catalog)
    copies = {name for group in ties for name in group[1:]}
    found = [
        _Tensor(e.fqn, e.dtype.name, e.shape, None) for e in catalog.tensors.values() if e.fqn not in copies
    ]
    files = tuple(
        InspectedFile(name=file.name, file_bytes=file.size, tensor_bytes=nbytes)
        for file, nbytes in zip(catalog.files, _bytes_by_file(catalog, copies), strict=True)
    )
    return InspectResult(
        path=path,
        kind="dcp",
        format=catalog.format,
        made_by=None,
        source=None,
        model_class=None,
        **_NO_LAYOUT,
        **_tensor_fields(found, unfold=unfold),
        files=files,
        imbalance=_imbalance([file.file_bytes for file in files]),
        ties=ties,
        objects=catalog.objects,
        omitted=(),
        notes=(*catalog.notes, *_beside(directory)),
        warnings=(),
    )


def _shared_extents(catalog: Catalog) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names whose chunks lie in the same places."""
    chunks, groups = catalog.chunks, dict[tuple[object, ...], list[str]]()
    for fqn, entry in catalog.tensors.items():
        row = entry.first_chunk
        place = (chunks.file[row], chunks.start[row], entry.num_chunks, entry.dtype, entry.shape)
        groups.setdefault(place, []).append(fqn)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _bytes_by_file(catalog: Catalog, copies: set[str]) -> list[int]:
    """Return the bytes of tensors in each file; an extent is a record, which is larger than its data."""
    held = [0] * len(catalog.files)
    for fqn, entry in catalog.tensors.items():
        if fqn not in copies:
            regions = catalog.chunks.regions(entry.chunk_ids)
            for row, region in zip(entry.chunk_ids, regions, strict=True):
                held[catalog.chunks.file[row]] += region.num_elements * entry.dtype.itemsize
    return held


def _beside(directory: str) -> Iterator[str]:
    if any(name.endswith(".safetensors") for name in os.listdir(directory)):
        yield "there are also safetensors files in this directory: give the path of one to see what it holds"


def _inspect_presharded(
    path: str, directory: str, content: Mapping[str, Any], *, unfold: bool
) -> InspectResult:
    """Read the manifest alone: `.metadata` takes seconds to parse at a thousand ranks."""
    try:
        mesh, layout, tool = content["mesh"], content["layout"], content["tool"]
        found = [
            _Tensor(fqn, t["dtype"], tuple(t["shape"]), ",".join(t["placements"]))
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
            **_tensor_fields(found, unfold=unfold),
            files=files,
            imbalance=_imbalance([file.file_bytes for file in files]),
            ties=tuple(tuple(group) for group in content["ties"]),
            objects=(),
            omitted=tuple((entry["name"], entry["reason"]) for entry in content["omitted"]),
            notes=tuple(_beside(directory)),
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


def _imbalance(sizes: Sequence[int]) -> float:
    return round(max(sizes) * len(sizes) / sum(sizes), 4) if sum(sizes) else 1.0


def _tensor_fields(found: Sequence[_Tensor], *, unfold: bool) -> dict[str, Any]:
    """Return the fields of the result that are about all tensors."""
    dtypes: dict[str, list[int]] = {}
    for tensor in found:
        dtypes.setdefault(tensor.dtype, []).append(tensor.nbytes)
    groups = (
        ((t.name, 1, t) for t in found)
        if unfold
        else ((f.pattern, f.count, f.key) for f in fold((t.name, t._replace(name="")) for t in found))
    )
    return {
        "num_tensors": len(found),
        "tensor_bytes": sum(tensor.nbytes for tensor in found),
        "tensors": tuple(
            InspectedTensors(
                name=name,
                count=count,
                dtype=tensor.dtype,
                shape=tensor.shape,
                placements=tensor.placements,
                tensor_bytes=count * tensor.nbytes,
            )
            for name, count, tensor in groups
        ),
        "dtypes": tuple(
            InspectedDType(dtype=dtype, num_tensors=len(sizes), tensor_bytes=sum(sizes))
            for dtype, sizes in sorted(dtypes.items(), key=lambda item: (-sum(item[1]), item[0]))
        ),
    }
