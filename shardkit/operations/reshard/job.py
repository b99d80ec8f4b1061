"""What reshard decides before a byte moves: what it reads and writes.

    checkpoint -> parts -> layout of each -> images -> one plan for all

No model is needed. What was sharded is sharded for the new mesh by FSDP2's rule, and stock `dcp.load` finds its rows
wherever they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import CASTS, DType
from shardkit.core.mesh import REPLICATE, Mesh, Placement
from shardkit.core.text import escape
from shardkit.errors import SourceError, UsageError
from shardkit.formats.dcp.images import DcpImages, JoinedImages, join_catalogs, join_name
from shardkit.keys.tree import Kind, object_kind, optimizer_names
from shardkit.layout.layout import Layout, TensorLayout, Unit
from shardkit.operations.casts import check_cast
from shardkit.operations.describe_dcp import DcpOutput
from shardkit.operations.reshard.parts import Part, Parts
from shardkit.operations.write import hash_plan
from shardkit.transfer.plan import TransferPlan, build_plan

_HEAD = 3  # segments that trainers put above a state dict: app.optimizers, policy.optimizer.optim
_SMALL = 4096  # elements: nobody but a model has more under such a name


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob(DcpOutput):
    """One DCP directory of the output."""

    optimizer: frozenset[str]
    """Names of the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardJob:
    """A decided reshard."""

    parts: Parts
    mesh: Mesh
    folders: Mapping[str, PartJob]
    """By folder of the checkpoint."""
    output: JoinedImages
    plan: TransferPlan
    notes: tuple[str, ...]

    @property
    def plan_hash(self) -> str:
        """Stand for inputs, options and version; see `operations.write.Job`."""
        folders = {folder: job.describe() for folder, job in self.folders.items()}
        return hash_plan(self, folders=folders, siblings=self.parts.siblings)


def build_job(parts: Parts, mesh: Mesh, *, dtype: str, optimizer_dtype: str, digest: str) -> ReshardJob:
    """Decide how a checkpoint is stored for `mesh`.

    Args:
        parts: the checkpoint, taken apart.
        mesh: of the job that will load it.
        dtype: "keep", "bf16", "fp16" or "fp32", for floating tensors outside the optimizer. Scalars stay as they are.
        optimizer_dtype: the same for the optimizer's state. Its scalars (`step`) stay as they are.
        digest: "crc32" or "none".

    Raises:
        UsageError: an option does not have such a value, or is about tensors that are copied as they are.
        SourceError: there is nothing to reshard.
    """
    check_cast("--dtype", dtype)
    check_cast("--optimizer-dtype", optimizer_dtype)
    if not any(part.catalog.tensors for part in parts.parts):
        raise SourceError("the checkpoint holds no tensors")
    if parts.weights_beside is not None and dtype != "keep":
        raise UsageError(
            f"--dtype {dtype}: the weights in {escape(parts.weights_beside)} are copied as they are and cannot be converted",
            hint="convert them with shardkit consolidate --dtype",
        )
    folders = {part.folder: _part_job(part, mesh, dtype, optimizer_dtype, digest) for part in parts.parts}
    output = JoinedImages({folder: job.output for folder, job in folders.items()})
    catalog = join_catalogs({part.folder: part.catalog for part in parts.parts})
    notes = [note for part in parts.parts for note in part.notes]
    return ReshardJob(
        parts=parts,
        mesh=mesh,
        folders=folders,
        output=output,
        plan=build_plan(output, catalog),
        notes=(*parts.notes, *notes),
    )


def _part_job(part: Part, mesh: Mesh, cast: str, optimizer_cast: str, digest: str) -> PartJob:
    aliases = _aliases(part.catalog, part.objects)
    repeated = {name for others in aliases.values() for name in others}
    kept = [name for name in part.catalog.tensors if name not in repeated]
    objects = frozenset(part.objects)
    entries = part.catalog.tensors
    optimizer = optimizer_state((entries[name] for name in kept if name not in objects), part.folder)
    layout = _layout(part, kept, mesh)
    dtypes = {
        name: entries[name].dtype
        if name in objects
        else _target(
            entries[name], CASTS.get(optimizer_cast if name in optimizer else cast), name in optimizer
        )
        for name in kept
    }
    sources = {name: join_name(part.folder, name) for name in kept}
    return PartJob(
        layout=layout,
        entries=entries,
        dtypes=dtypes,
        sources=sources,
        aliases=aliases,
        identity={"files": [{"name": file.name, "size_bytes": file.size} for file in part.catalog.files]},
        cast=cast,
        digest=digest,
        paths=part.paths,
        key_rules=part.key_rules,
        optimizer_cast=optimizer_cast,
        objects=part.objects,
        optimizer=optimizer,
        output=DcpImages(layout, dtypes, sources, _no_phase, objects=objects),
    )


def _no_phase(fqn: str) -> None:
    """Return None: rows come from many files, so their blocks cannot be shared with a source file."""


def _aliases(catalog: Catalog, objects: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return, by the first of them, the names that point at the same bytes: shardkit stores tied parameters so."""
    table, first, found = catalog.chunks, dict[object, str](), dict[str, tuple[str, ...]]()
    left_out = frozenset(objects)
    for name, entry in catalog.tensors.items():
        if name in left_out or entry.nbytes == 0:
            continue
        rows = slice(entry.chunk_ids.start, entry.chunk_ids.stop)
        places = zip(table.file[rows], table.start[rows], table.regions(entry.chunk_ids), strict=True)
        key = (entry.dtype.name, entry.shape, frozenset(places))
        original = first.setdefault(key, name)
        if original != name:
            found[original] = (*found.get(original, ()), name)
    return found


def _layout(part: Part, names: list[str], mesh: Mesh) -> Layout:
    """Shard on dim 0 whatever was sharded. If nothing was, or the chunks do not tell, shard everything with rows."""
    entries, objects = part.catalog.tensors, frozenset(part.objects)
    rows = {name for name in names if entries[name].shape and entries[name].dtype.is_floating}
    cut = {name for name in names if entries[name].num_chunks > 1} | (rows & part.unboxed)
    cut = cut or rows
    placed: dict[str, TensorLayout] = {}
    for name in names:
        is_cut = name in cut and bool(entries[name].shape) and name not in objects
        rule = Placement(0) if is_cut else REPLICATE
        placed[name] = TensorLayout(
            fqn=name,
            shape=entries[name].shape,
            placements=tuple(rule if axis.role == "shard" else REPLICATE for axis in mesh.axes),
            unit=0,
        )
    units = (Unit(path="", class_name=None),)
    return Layout(origin="declared", mesh=mesh, units=units, tensors=placed, policy="none")


def _target(entry: TensorEntry, wanted: DType | None, is_optimizer: bool) -> DType:
    if wanted is None or not is_convertible(entry, is_optimizer=is_optimizer):
        return entry.dtype
    return wanted


def optimizer_state(entries: Iterable[TensorEntry], folder: str) -> frozenset[str]:
    """Return the names of an optimizer's state, told by its leaves or by its place.

    Args:
        entries: all entries of one folder.
        folder: where it lies in the checkpoint. A folder of an optimizer (`optimizer_0`) holds nothing else.
    """
    found = list(entries)
    # OLMo-core's model_and_optim holds both
    if any(object_kind(step) == "optimizer" and "model" not in step for step in folder.split("/")):
        return frozenset(entry.fqn for entry in found)
    names = optimizer_names(found)
    return frozenset(
        entry.fqn for entry in found if entry.fqn in names or "optimizer" in _kinds_above(entry.fqn)
    )


def is_convertible(entry: TensorEntry, *, is_optimizer: bool) -> bool:
    """True for a tensor whose values a cast may round.

    A cast must never round a count: a step of 257 is 256 in bfloat16. So scalars stay as they are, and so does the state
    of schedulers, data loaders and random generators; `load_state_dict` converts them when it has to.
    """
    if not entry.shape or not entry.dtype.is_floating or not entry.dtype.is_convertible:
        return False
    if is_optimizer:
        return entry.num_elements > 1  # some keep their step count in a tensor of one element
    return entry.num_elements > _SMALL or not any(_kinds_above(entry.fqn))


def _kinds_above(name: str) -> list[Kind | None]:
    return [object_kind(step) for step in name.split(".")[:_HEAD]]
