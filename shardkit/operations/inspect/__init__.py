"""inspect: list the content of a Hub model, a pre-sharded directory or any trainer's checkpoint, without tensor data.

A *presharded* directory is described from its manifest (`shardkit.json`) alone, which lists its tensors; a Hub model from
its headers; any other checkpoint (*sharded*) from the catalog that its format opens. Names that differ only in numbers are
*folded* into one entry with a pattern. *Holdings* say which rank and which file holds which bytes, for pictures.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

from shardkit import formats
from shardkit._folding import fold
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME, OF_CODES
from shardkit.core.factored import stored_targets
from shardkit.core.keywords import suggests_keywords
from shardkit.core.regions import Shape
from shardkit.core.result import DrawnResult
from shardkit.core.text import escape, format_name, listed
from shardkit.errors import LayoutError, ResourceError, SourceError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import home_of
from shardkit.files.links import may_follow_links
from shardkit.files.listing import differing_sizes
from shardkit.formats.contract import Checkpoint, copies_warnings, missing_path, refuse_unfinished
from shardkit.formats.dcp import METADATA
from shardkit.formats.dcp.objects import object_lines
from shardkit.formats.dequantize import why_scaled
from shardkit.formats.gaps import find_gaps
from shardkit.formats.hub.adapter import ADAPTER, is_adapter_file
from shardkit.formats.hub.directory import model_class_of
from shardkit.formats.quantised import why_quantised
from shardkit.formats.registry import stray_weights
from shardkit.keys.moments import NamedShape, parts_of_ranks
from shardkit.keys.ties import ties_embeddings
from shardkit.layout.layout import Layout
from shardkit.layout.recorded import recorded_layout, saved_layout, saved_mesh
from shardkit.operations.casts import DTypeCount, count_dtypes
from shardkit.operations.holdings import Holdings, find_holdings, imbalance_of, shared_extents, size_on_disk
from shardkit.operations.resolve import find_checkpoint

_SHARD_SUFFIX = ".distcp"
_QUICK_METADATA = 16 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedFile:
    """One file with tensors."""

    name: str
    file_bytes: int | None
    """Size on disk; None if the file is missing."""
    tensor_bytes: int | None
    """Bytes of tensors in it; None if only its own chunk list or header has them, which is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTensors:
    """One tensor, or several whose names differ only in numbers."""

    name: str
    """A name, or a pattern such as `model.layers.{0..35}.mlp.up_proj.weight`."""
    count: int
    dtype: str
    shape: tuple[int, ...]
    """Shape of each, in elements."""
    placements: str | None
    """One for each mesh axis, such as "R,S(0)"; None if they are not recorded."""
    tensor_bytes: int
    """Bytes of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTargets:
    """A weight that is stored as factors of OSFT, or several whose paths differ only in numbers."""

    path: str
    """Module path or pattern."""
    count: int
    shape: tuple[int, int]
    """Shape of the dense weight."""
    rank: int
    """Number of frozen directions."""
    num_directions: int
    """Number of all directions, frozen or trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedUnits:
    """One unit of the wrap policy, or several whose paths differ only in numbers."""

    path: str
    """Module path or pattern; "" is the root."""
    count: int
    class_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult(DrawnResult):
    """The content of a model or a checkpoint."""

    path: str
    """The argument `path`."""
    resolved: str
    """The checkpoint that was inspected: the newest complete one of a run directory, else `path`."""
    kind: Literal["hub", "presharded", "dcp", "sharded", "unfinished"]
    """A Hub model, a checkpoint with a `shardkit.json`, any other plain DCP checkpoint, or one of another format.
    "unfinished" is not a checkpoint: a work directory of a shardkit job that is running or was killed."""
    format: str
    """Format of the files: "safetensors", "torch-bin" or "dcp". For kind "sharded" the checkpoint's format, such as
    "lightning"; for "unfinished" the verb, if known."""
    made_by: str | None = None
    """Tool and version, if recorded; for a sharded checkpoint the trainer, if known."""
    source: str | None = None
    """The source of a pre-sharded checkpoint: repo and commit, or file names."""
    model_class: str | None = None
    """The class named in config.json, or recorded by `shardkit.save`."""
    world_size: int | None = None
    """Ranks of the mesh, or of the job that saved; None if neither is recorded."""
    mesh: str | None = None
    layout: str | None = None
    """"traced" or "declared"; or "live", recorded by `shardkit.save` from the model."""
    policy: str | None = None
    """The value of `wrap`; None for a live model."""
    units: tuple[InspectedUnits, ...] = ()
    num_tensors: int
    """Number of tensors. Tied ones count once; their other names are in `ties`."""
    tensor_bytes: int
    tensors: tuple[InspectedTensors, ...]
    dtypes: tuple[DTypeCount, ...]
    """Sorted by bytes, the largest first."""
    files: tuple[InspectedFile, ...]
    osft: tuple[InspectedTargets, ...] = ()
    """The weights that are stored as factors."""
    imbalance: float | None = None
    """Size of the largest shard file, divided by the mean size; None for a Hub model."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Names that share their bytes; the first of each group is among `tensors`."""
    objects: tuple[str, ...] = ()
    """Entries that are not tensors; they are never decoded."""
    omitted: tuple[tuple[str, str], ...] = ()
    """(name, reason) of tensors of the source that were left out."""
    roots: tuple[tuple[str, str], ...] = ()
    """(kind, prefix of its names), such as ("model", "app.model"), if the trainer's format defines them."""
    assets: tuple[str, ...] = ()
    """Directories with the config, tokenizer and the like of a sharded checkpoint, the best first."""
    refused: tuple[tuple[str, str], ...] = ()
    """(kind of weights, reason) of weights that are incomplete and cannot be recovered."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(file or entry, reason) of those that were not read."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Differences from the manifest, and signs that something is missing."""
    holdings: Holdings | None = None
    """Which rank and which file holds which bytes; None without the option `holdings`. It has its own `to_json`."""

    def title(self) -> str:
        """Return the kind in words, such as "Hub model of Qwen3ForCausalLM, safetensors"."""
        made_by = escape(self.made_by or "")
        if self.kind == "presharded":
            return f"DCP checkpoint, pre-sharded by {made_by}"
        if self.kind == "dcp":
            is_plain = self.made_by in (None, "torch.distributed.checkpoint")
            return format_name(self.kind) if is_plain else f"DCP checkpoint of {made_by}"
        if self.kind == "sharded":
            by = self.made_by or self.format
            return format_name(by) if self.format == "full-file" else f"checkpoint of {escape(by)}"
        if is_adapter_file(self.resolved):
            return f"{ADAPTER}, {self.format}"
        model_class = f" of {escape(self.model_class)}" if self.model_class else ""
        return f"Hub model{model_class}, {self.format}"

    def headline(self) -> str:
        """Return path and kind as one line."""
        return f"{escape(self.path)}: {self.title()}"


@suggests_keywords
@may_follow_links
def inspect(
    path: str | os.PathLike[str], *, tensors: bool = False, holdings: bool = False, follow_links: bool = False
) -> InspectResult:
    """Return the content of a model or checkpoint, without reading tensor data and without torch.

    Args:
        path: a Hub model's directory or weight file, a PEFT adapter, a pre-sharded directory, any trainer's
            checkpoint, or a run directory, whose newest complete checkpoint is used.
        tensors: list every tensor; otherwise tensors whose names differ only in numbers are one entry.
        holdings: also return which rank and which file holds which bytes, for pictures. For a pre-sharded directory, this
            reads `.metadata` and headers, which takes ten seconds for a million chunks.
        follow_links: follow links that lead out of the checkpoint's directory, and read the files behind them.
            Weight files of a Hub model are read through links in any case.

    Raises:
        SourceError: `path` does not exist, is neither a model nor a checkpoint, or is damaged.
        ResourceError: a file cannot be read.
    """
    path = stores.as_path(path)
    if not storage.lexists(path):
        raise missing_path(path)
    refuse_unfinished(path)
    resolved = find_checkpoint(path)
    result = _inspect(resolved.path, tensors=tensors, holdings=holdings)
    return replace(
        result,
        path=path,
        notes=tuple(note for note in result.notes if note not in resolved.warnings),
        warnings=(*resolved.warnings, *result.warnings),
    )


def _inspect(path: str, *, tensors: bool, holdings: bool) -> InspectResult:
    """Return the content of one model or checkpoint; options and errors as for `inspect`."""
    directory = home_of(path if storage.isdir(path) else os.path.dirname(path) or os.curdir)
    if storage.isdir(path) or _is_part_of_checkpoint(os.path.basename(path)):
        record = manifest.read(directory)
        # Other manifests are those of a Hub model, or of a checkpoint that training saved.
        if isinstance(record, manifest.Presharded):
            result = _inspect_presharded(path, directory, record, unfold=tensors)
            if not holdings:
                return result
            return replace(
                result, holdings=find_holdings(formats.open(directory).catalog, recorded_layout(record))
            )
    is_legacy = path.endswith(".bin") and storage.isfile(path)  # a weight file, not any state dict
    checkpoint = formats.open(path, format="hub" if is_legacy else None)
    describe = _inspect_sharded if checkpoint.hub is None else _inspect_hub
    result = describe(path, checkpoint, unfold=tensors)
    result = replace(result, warnings=(*result.warnings, *find_gaps(checkpoint)))
    return (
        replace(result, holdings=find_holdings(checkpoint.catalog, _saved_layout(checkpoint)))
        if holdings
        else result
    )


def _saved_layout(checkpoint: Checkpoint) -> Layout | None:
    """Return which rank holds which regions, as `shardkit.save` recorded it, or None."""
    record = checkpoint.read_manifest()
    return (
        saved_layout(record, checkpoint.catalog.tensors) if isinstance(record, manifest.SavedState) else None
    )


def _saved_placements(record: object) -> dict[str, str]:
    """Return name -> placements such as "R,S(0)", as `shardkit.save` recorded them; empty for another manifest."""
    layout = record.layout if isinstance(record, manifest.SavedState) else None
    groups = () if layout is None else layout.placed
    return {name: ",".join(group.placements) for group in groups for name in group.names}


def _saved_fields(record: object) -> dict[str, Any]:
    """Return the result's fields that `shardkit.save` recorded about the training job."""
    if not isinstance(record, manifest.SavedState):
        return {}
    meshes = [mesh.replace(", ", ",") for mesh in record.meshes]
    return {
        "model_class": record.model_class,
        "world_size": record.world_size,
        "mesh": str(saved_mesh(record.layout)) if record.layout is not None else " and ".join(meshes) or None,
        "layout": "live",
        "units": _units(record.units),
    }


def _is_part_of_checkpoint(name: str) -> bool:
    """True for a file of a pre-sharded directory; a path to it stands for the directory."""
    return name in (manifest.NAME, METADATA) or name.endswith(_SHARD_SUFFIX)


def _quantised(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a note if weights are quantised."""
    reasons = (why_quantised(checkpoint.catalog.tensors, config), why_scaled(checkpoint))
    why = "; ".join(filter(None, reasons))
    if why:
        yield f"the model is quantised: {why}: its values mean nothing without their scales"


def _inspect_hub(path: str, checkpoint: Checkpoint, *, unfold: bool) -> InspectResult:
    """Describe a Hub model. With `unfold`, every tensor is an entry of its own."""
    assert checkpoint.hub is not None
    catalog, config = checkpoint.catalog, checkpoint.hub.config or {}
    tensors = [_OneTensor(e.fqn, e.dtype.name, e.shape, None) for e in catalog.tensors.values()]
    notes = catalog.notes
    if ties_embeddings(config):
        notes += ("config.json ties the word embeddings: input and output are one parameter",)
    notes += tuple(_quantised(checkpoint, config))
    return InspectResult(
        path=path,
        resolved=path,
        kind="hub",
        format=catalog.format,
        model_class=model_class_of(config),
        **_tensor_fields(tensors, unfold=unfold),
        files=tuple(_files(catalog, ())),
        objects=catalog.objects,
        notes=notes,
        **_target_fields(tensors),
    )


def _inspect_sharded(path: str, checkpoint: Checkpoint, *, unfold: bool) -> InspectResult:
    """Describe a checkpoint of any format other than the Hub's. The records of plain DCP are not opened."""
    catalog = checkpoint.catalog
    ties = shared_extents(catalog)
    copies = {name for group in ties for name in group[1:]}
    placed = _saved_placements(checkpoint.read_manifest())
    tensors = [
        _OneTensor(e.fqn, e.dtype.name, e.shape, placed.get(e.fqn))
        for e in catalog.tensors.values()
        if e.fqn not in copies
    ]
    files = tuple(_files(catalog, copies))
    targets = _target_fields(tensors, catalog.objects)
    is_dcp = checkpoint.format == catalog.format  # otherwise a trainer's own format
    return InspectResult(
        path=path,
        resolved=path,
        kind="dcp" if is_dcp else "sharded",
        format=checkpoint.format,
        made_by=checkpoint.writer or None,
        **_tensor_fields(tensors, unfold=unfold),
        files=files,
        imbalance=round(imbalance_of([file.file_bytes or 0 for file in files]), 4),
        ties=ties,
        objects=catalog.objects,
        roots=tuple((kind, ".".join(map(str, root))) for kind, root in checkpoint.contents.roots.items()),
        assets=checkpoint.contents.assets,
        refused=tuple(checkpoint.contents.refused_weights.items()),
        skipped=(*checkpoint.remarks.skipped, *stray_weights(checkpoint)),
        notes=(
            *checkpoint.remarks.notes,
            *_quantised(checkpoint, None),
            *(_safetensors_note(catalog.directory) if is_dcp else ()),
        ),
        warnings=(
            *targets.pop("warnings"),
            *copies_warnings(checkpoint.remarks.differing),
            *_lost_object_lines(checkpoint),
        ),
        **targets,
        **_saved_fields(checkpoint.read_manifest()),
    )


def _lost_object_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield warnings and notes about objects that contain distributed tensors."""
    for lines in () if checkpoint.dcp is None else object_lines(checkpoint.dcp):
        yield from lines


def _files(catalog: Catalog, copies: Collection[str]) -> Iterator[InspectedFile]:
    """Yield the files with the bytes of tensors in each. Decoded tensors count for the file that contains them."""
    tensor_bytes: dict[str, int] = {file.name: 0 for file in catalog.files if file.is_raw}
    sizes = {file.name: file.size for file in catalog.files if file.is_raw}
    chunks, files = catalog.chunks, catalog.files
    for fqn, entry in catalog.tensors.items():
        if fqn in copies:
            continue
        regions = catalog.chunks.regions(entry.chunk_ids)
        for row, region in zip(entry.chunk_ids, regions, strict=True):
            file = files[chunks.file[row]]
            name = file.name if file.is_raw else file.name.removesuffix(f":{fqn}")
            if name not in tensor_bytes:
                tensor_bytes[name], sizes[name] = 0, size_on_disk(os.path.join(catalog.directory, name))
            tensor_bytes[name] += region.num_elements * entry.dtype.itemsize
    for name, nbytes in tensor_bytes.items():
        yield InspectedFile(name=name, file_bytes=sizes[name], tensor_bytes=nbytes)


def _inspect_presharded(
    path: str, directory: str, record: manifest.Presharded, *, unfold: bool
) -> InspectResult:
    """Describe a directory by its manifest, with warnings where file names or sizes differ from it.

    Only the manifest is read, because parsing the `.metadata` of a thousand ranks takes seconds.
    """
    tensors = [_OneTensor(fqn, t.dtype, t.shape, ",".join(t.placements)) for fqn, t in record.tensors.items()]
    listed_files = [each for file in record.files for each in (file, file.chunks)]
    listed_files += [record.metadata] if record.metadata else []
    on_disk = differing_sizes(directory, listed_files)
    files = tuple(
        InspectedFile(name=file.name, file_bytes=on_disk.get(file.name, file.size), tensor_bytes=None)
        for file in record.files
    )
    targets = _target_fields(tensors, record.objects or ())
    return InspectResult(
        path=path,
        resolved=path,
        kind="presharded",
        format="dcp",
        made_by=f"{record.tool.name} {record.tool.version}",
        source=_source(record.source),
        world_size=record.mesh.world_size,
        mesh=",".join(
            (
                *([] if record.mesh.pp is None else [f"pp={record.mesh.pp}"]),
                *(f"{axis.name}={axis.size}" for axis in record.mesh.axes),
                *([] if record.mesh.ep is None else [f"ep={record.mesh.ep}"]),
            )
        ),
        layout=record.layout.origin,
        policy=record.layout.policy,
        units=_units(record.units),
        **_tensor_fields(tensors, unfold=unfold),
        files=files,
        imbalance=round(imbalance_of([file.size for file in record.files]), 4),
        ties=record.ties,
        objects=record.objects or (),
        omitted=tuple((tensor.name, tensor.reason) for tensor in record.omitted),
        notes=tuple(_safetensors_note(directory)),
        warnings=(
            *_differences(directory, {file.name: file.size for file in listed_files}, on_disk),
            *targets.pop("warnings"),
            *_lost_in_presharded(directory, record),
        ),
        **targets,
    )


def _lost_in_presharded(directory: str, record: manifest.Presharded) -> Iterator[str]:
    """Yield the lines of `_lost_object_lines` for a directory with a manifest, if its `.metadata` is small and undamaged."""
    if record.objects and record.metadata is not None and record.metadata.size <= _QUICK_METADATA:
        with contextlib.suppress(SourceError, ResourceError):
            yield from _lost_object_lines(formats.open(directory))


def _source(source: manifest.RecordedSource) -> str:
    """Return the source of a pre-sharded directory as text: "org/model at 1a2b3c", or "a.safetensors and 3 more files"."""
    if source.repo is not None:
        return f"{source.repo} at {source.commit}"
    first, *other_files = [file.name for file in source.files] or ["no files"]
    return f"{first} and {len(other_files)} more files" if other_files else first


def _units(units: Iterable[manifest.Unit]) -> tuple[InspectedUnits, ...]:
    folded = fold((unit.path, unit.class_name) for unit in units)
    return tuple(InspectedUnits(path=f.pattern, count=f.count, class_name=f.key) for f in folded)


def _differences(
    directory: str, recorded: Mapping[str, int], on_disk: Mapping[str, int | None]
) -> Iterator[str]:
    """Yield a warning for each file whose existence or size differs from the manifest; digests are not compared."""
    for name, size in on_disk.items():
        if size is None:
            yield f"{escape(name)}: the manifest lists it, and there is no such file"
        else:
            yield f"{escape(name)}: {recorded[name]} bytes in the manifest, {size} on disk"
    stale = sorted(n for n in storage.listdir(directory) if n.endswith(_SHARD_SUFFIX) and n not in recorded)
    if stale:
        yield f"{len(stale)} {_SHARD_SUFFIX} files are not of this checkpoint: {listed(stale)}"


class _OneTensor(NamedTuple):
    """One tensor, before tensors with similar names are combined into one entry."""

    name: str
    dtype: str
    shape: Shape
    placements: str | None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (BY_NAME.get(self.dtype) or OF_CODES[self.dtype]).itemsize


def _tensor_fields(tensors: Sequence[_OneTensor], *, unfold: bool) -> dict[str, Any]:
    """Return the fields of the result that describe the tensors."""
    dtypes = count_dtypes((tensor.dtype, tensor.nbytes) for tensor in tensors)
    groups = (
        ((t.name, 1, t) for t in tensors)
        if unfold
        else ((f.pattern, f.count, f.key) for f in fold((t.name, t._replace(name="")) for t in tensors))
    )
    return {
        "num_tensors": len(tensors),
        "tensor_bytes": sum(tensor.nbytes for tensor in tensors),
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
        "dtypes": tuple(sorted(dtypes, key=lambda total: (-total.tensor_bytes, total.dtype))),
    }


def _target_fields(tensors: Sequence[_OneTensor], objects: Iterable[str] = ()) -> dict[str, Any]:
    """Return the result's fields about factors of OSFT, and warnings about shapes of only one rank's part.

    Args:
        tensors: all tensors.
        objects: names of entries that are not tensors.
    """
    halved = parts_of_ranks((NamedShape(t.name, t.dtype, t.shape) for t in tensors), objects)
    warnings = () if halved is None else (halved,)
    try:
        targets = stored_targets({tensor.name: tensor.shape for tensor in tensors})
    except LayoutError as error:
        return {"warnings": (f"{error.message}: {'; '.join(error.problems)}", *warnings)}
    kinds = fold((path, (t.rows, t.columns, t.rank, t.num_directions)) for path, t in targets.items())
    inspected = [
        InspectedTargets(
            path=kind.pattern,
            count=kind.count,
            shape=kind.key[:2],
            rank=kind.key[2],
            num_directions=kind.key[3],
        )
        for kind in kinds
    ]
    return {"osft": tuple(inspected), "warnings": warnings}


def _safetensors_note(directory: str) -> Iterator[str]:
    """Yield a note if the directory has safetensors files, too."""
    if any(name.endswith(".safetensors") for name in storage.listdir(directory)):
        yield "there are also safetensors files in this directory: to see their content, give the path of one"
