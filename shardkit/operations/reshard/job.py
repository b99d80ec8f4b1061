"""Decide what reshard reads and writes, before any byte moves.

    checkpoint -> parts -> layout of each -> images -> one plan for all

The *parts* are the DCP directories (*folders*) of a checkpoint; a checkpoint in another format is one part. All other files
are copied. A *byte entry* is an object other than a tensor, which torch stored as the bytes of a `torch.save` file. The
*layout* says which rank stores which rows of which tensor; an *image* describes one file to write.

No model is needed: tensors that were sharded are sharded for the new mesh by FSDP2's rule, and stock `dcp.load` finds its
rows in whichever files they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from shardkit import formats
from shardkit.core.catalog import (
    Catalog,
    Checksums,
    FileStamp,
    TensorEntry,
    combine_catalogs,
    join_catalogs,
    join_name,
)
from shardkit.core.dtypes import BY_NAME, CASTS, DType
from shardkit.core.factored import factor_of, shard_dim
from shardkit.core.mesh import Mesh
from shardkit.core.placements import REPLICATE, Placement
from shardkit.core.regions import Region, Shape
from shardkit.core.text import count, escape, listed
from shardkit.errors import SourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import home_of
from shardkit.files.manifest import Unit
from shardkit.files.remote.contract import OtherVersion
from shardkit.files.strict_json import open_regular, refuse_pointers
from shardkit.formats.contract import (
    Checkpoint,
    DcpFolder,
    EntryLocation,
    PlainWeights,
    copies_warnings,
    listing,
)
from shardkit.formats.contract.optimizer import OptimizerState, UnusableOptimizer
from shardkit.formats.dcp.directory import open_dcp
from shardkit.formats.dcp.images import DcpImages, JoinedImages
from shardkit.formats.dcp.objects import distributed_objects
from shardkit.formats.hub.assets import list_assets
from shardkit.formats.hub.base import (
    RecordedNames,
    find_config,
    holds_hub_names,
    recorded_derived,
    recorded_names,
    recorded_shards,
    recorded_vocab_rows,
    saved_key_rules,
)
from shardkit.formats.registry import recognise
from shardkit.formats.torchsave.archive import ZipReader, pread_of, read_directory
from shardkit.formats.torchsave.classes import UnreadableClass
from shardkit.keys.expressions import Expression
from shardkit.keys.moments import NamedShape, parts_of_ranks
from shardkit.keys.renaming import KeyRule
from shardkit.keys.trainer_state import Kind, is_optimizer_name, object_kind, optimizer_names
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.operations.casts import check_cast
from shardkit.operations.companions import FileToCopy, Survey, check_survey, drop_shard_folders, survey
from shardkit.operations.describe_dcp import DcpOutput
from shardkit.operations.parts.ingredients import ReadFile
from shardkit.operations.reshard.left_out import OF_A_RANK, find_left_out, find_unread
from shardkit.operations.reshard.options import ReshardOptions
from shardkit.operations.resolve import ChosenCheckpoint
from shardkit.transfer.plan import TransferPlan, build_plan

_ENTRY_OF_A_RANK = re.compile(r"(?:.*[._])?(?:dp_)?rank_?\d+(?:\..*)?")  # torchtitan: dataloader.dp_rank_0
_OPTIMIZER = re.compile(r"(bf16_)?(zero_pp_)?optim")
_MAX_ENTRIES = 1 << 16  # in the zip of a byte entry
_MODEL, _OPTIM = "model", "optim"  # as torch's DCP recipes name the two
_NESTED = (
    "names begin with model. and optim.: load it into the two state dicts that "
    "torch.distributed.checkpoint.state_dict.get_state_dict gives"
)
_HEAD = 3  # maximum number of segments that trainers put above a state dict: app.optimizers, policy.optimizer.optim
_SMALL = 4096  # elements: a larger tensor below such a name is a model's, not the state of a scheduler and the like


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """The tensors and byte entries of one folder."""

    folder: str
    """Relative to the checkpoint; "" for the checkpoint itself."""
    catalog: Catalog
    """A catalog of raw extents, in which byte entries are tensors of bytes."""
    objects: tuple[str, ...]
    """Names of the byte entries."""
    paths: dict[str, tuple[str | int, ...]] | None
    """Name -> keys in the nested state dict: `planner_data` in torch's `.metadata`."""
    notes: tuple[str, ...]
    distributed_objects: tuple[str, ...] = ()
    """Byte entries that contain distributed tensors, as one rank of the old mesh had them."""
    damaged: tuple[str, ...] = ()
    """A line for each byte entry that is not a zip as torch writes it."""
    maybe_cut: frozenset[str] = frozenset()
    """Names of tensors whose chunks do not show whether they were sharded: the trainer kept the elements of many tensors
    in one flat vector, and cut that; or one rank saved whole tensors."""
    # From here on: what the source's manifest records. The output's manifest repeats it.
    key_rules: tuple[KeyRule, ...] = ()
    """Rules that turn the model's names into the Hub's, if `shardkit.save` recorded them."""
    tells_hub_names: bool = True
    """False if it is not known which names the model's tensors have on the Hub."""
    derived: Mapping[str, Expression] = field(default_factory=dict)
    """Name in memory -> the expression of the Hub's tensors that it was made by, for tensors that were converted."""
    file_names: Mapping[str, str] = field(default_factory=dict)
    """Name -> name in the files that `preshard` read."""
    root: str = ""
    """Prefix that `preshard` put before the model's own names."""
    recorded: RecordedNames = field(default_factory=RecordedNames)
    """Tied tensors, and tensors that `preshard` left out."""
    osft: manifest.Osft | None = None
    """How `preshard` turned weights into factors."""
    vocab_size: int | None = None
    """Rows of the vocabulary, as `shardkit.save` recorded them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The content of a checkpoint: its DCP directories (`parts`), and the files that are copied."""

    writer: str
    parts: tuple[CheckpointFolder, ...]
    files: tuple[FileToCopy, ...] = ()
    """Files outside of the parts, which are copied unchanged."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Name of each of these files -> path."""
    empty: tuple[str, ...] = ()
    """Empty directories."""
    weights_beside: str | None = None
    """The folder of DCP-HF shards with the weights, or None. Such shards fit any number of ranks and are copied."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    is_training: bool = True
    """True for a checkpoint of a training job, False for a Hub model."""
    manifests: tuple[manifest.Manifest | None, ...] = ()
    """The checkpoint's manifests, kept here so that they are parsed only once."""

    @property
    def siblings(self) -> tuple[str, ...]:
        """Names of the copied files, relative to the checkpoint."""
        return tuple(file.name for file in self.files)


def open_parts(source: ChosenCheckpoint, options: ReshardOptions) -> Parts:
    """Open every DCP directory of a checkpoint, or the one catalog of a checkpoint in another format.

    Warnings and notes name files near the checkpoint that will not be in the output (`left_out`).

    Args:
        source: the checkpoint.
        options: the user's options. Byte entries that are not zips as torch writes them are refused; with `check_source`
            off, they are copied with a warning.

    Raises:
        SourceError, IntegrityError, ResourceError: the checkpoint cannot be opened, or a part of it was not saved
            completely.
    """
    parts = _open_parts(source, options)
    if not parts.is_training:
        return parts
    given_path = stores.as_path(options.checkpoint)
    left_out = find_left_out(source.resolved.path, given_path, no_optimizer=options.no_optimizer)
    stored = (
        NamedShape(e.fqn, e.dtype.name, e.shape)
        for part in parts.parts
        for e in part.catalog.tensors.values()
    )
    halved = parts_of_ranks(stored)
    return replace(
        parts,
        notes=(*parts.notes, *left_out.notes()),
        warnings=(*parts.warnings, *left_out.warnings(), *([] if halved is None else [halved])),
    )


def _open_parts(source: ChosenCheckpoint, options: ReshardOptions) -> Parts:
    """As `open_parts`, without the warnings and notes about files near the checkpoint."""
    path, no_optimizer = home_of(source.resolved.path), options.no_optimizer
    if not storage.isdir(path) or not _keeps_folders(path):
        return _open_other_format(_open_plain(source), no_optimizer=no_optimizer)
    surveyed = survey(path)
    if not surveyed.folders or not all(_keeps_folders(os.path.join(path, name)) for name in surveyed.folders):
        return _open_other_format(_open_plain(source), no_optimizer=no_optimizer)
    dropped = _drop_optimizer(surveyed) if no_optimizer else []
    # A run of Accelerate may train several models and then saves each in a folder of its own. All of them are resharded.
    models = source.models()
    opened = {folder: _open_folder(os.path.join(path, folder), models) for folder in surveyed.folders}
    # A folder that has shards and no `.metadata` looks like an unfinished save, which `check_survey` refuses. If an opened
    # directory above it uses the shards, it is none.
    drop_shard_folders(
        surveyed, (os.path.join(folder, f.name) for folder, dcp in opened.items() for f in dcp.catalog.files)
    )
    check_survey(path, surveyed)
    # `Parts` has one writer and one set of manifests. With several models, these are the first one's.
    checkpoint = models[0]
    rules, derived = saved_key_rules(checkpoint) or (), recorded_derived(checkpoint)
    parts = tuple(_open_part(folder, dcp, no_optimizer=no_optimizer) for folder, dcp in opened.items())
    shards, recorded = recorded_shards(checkpoint), recorded_names(checkpoint)
    root = (shards.root or "") if shards else ""
    names = {fqn: tensor.source.name for fqn, tensor in shards.tensors.items()} if shards else {}
    # The part that gets what the manifest records: the folder with the model where `preshard` wrote for a trainer that needs
    # a prefix, and the checkpoint itself otherwise.
    home = os.path.relpath(checkpoint.catalog.directory, path) if root else os.curdir
    parts = tuple(
        replace(
            part,
            key_rules=rules,
            tells_hub_names=holds_hub_names(checkpoint),
            derived={root + name: expression for name, expression in derived.items()},
            file_names=names,
            root=root,
            recorded=recorded,
            osft=shards.osft if shards else None,
            vocab_size=recorded_vocab_rows(checkpoint),
        )
        if (part.folder or os.curdir) == home
        else part
        for part in parts
    )
    damaged = [problem for part in parts for problem in part.damaged]
    if damaged and options.check_source:
        raise SourceError(
            f"{count(len(damaged), 'byte entry is', 'byte entries are')} damaged",
            problems=damaged,
            hint="use another copy of the checkpoint; --check-source off carries them over as they are",
        )
    weights_beside = _weights_beside(path, checkpoint, surveyed)
    of_ranks = [file.name for file in surveyed.files if OF_A_RANK.search(os.path.basename(file.name))]
    return Parts(
        writer=checkpoint.writer,
        manifests=tuple(checkpoint.contents.manifests.values()),
        parts=parts,
        files=tuple(surveyed.files),
        paths={file.name: os.path.join(path, file.name) for file in surveyed.files},
        empty=tuple(surveyed.empty),
        weights_beside=weights_beside,
        notes=(*surveyed.notes(), *_part_notes(of_ranks, weights_beside), *dropped),
        warnings=(
            *copies_warnings([each for model in models for each in model.remarks.differing]),
            *_part_warnings(of_ranks, damaged),
            *_old_mesh_warnings(
                [join_name(part.folder, name) for part in parts for name in part.distributed_objects]
            ),
        ),
    )


def _keeps_folders(path: str) -> bool:
    """False for a format, such as Megatron's, that reshard writes as one directory instead of folder by folder."""
    recognised = recognise(path)
    return recognised is None or recognised.keeps_folders


def _part_warnings(of_ranks: list[str], damaged: list[str]) -> Iterator[str]:
    """Yield warnings about files of single ranks that contain an optimizer's state, and about damaged byte entries."""
    states = [name for name in of_ranks if _is_optimizer(name)]
    if states:
        yield (
            f"the optimizer's state was not resharded: {listed(states)} are copied as they are and fit only the old "
            "world size"
        )
    if damaged:
        yield (
            f"{count(len(damaged), 'byte entry is', 'byte entries are')} damaged and carried over as they are "
            f"(--check-source off): {'; '.join(damaged)}"
        )


def _old_mesh_warnings(names: Sequence[str]) -> Iterator[str]:
    """Yield the warning about byte entries that contain distributed tensors, which cannot be divided anew."""
    if names:
        yield (
            f"training cannot resume from it: {count(len(names), 'byte entry has', 'byte entries have')} distributed tensors "
            "in an object, such as a tuple, which torch saves as one rank of the old mesh has them; copied unchanged: "
            f"{listed(names)}"
        )


def _weights_beside(path: str, checkpoint: Checkpoint, surveyed: Survey) -> str | None:
    """Return the folder with the weights if it is none of the DCP directories; see `Parts.weights_beside`."""
    weights = storage.realpath(checkpoint.catalog.directory or path)
    if any(storage.realpath(os.path.join(path, folder)) == weights for folder in surveyed.folders):
        return None
    return os.path.relpath(weights, storage.realpath(path))


def _part_notes(of_ranks: list[str], weights_beside: str | None) -> Iterator[str]:
    """Yield notes about files that are copied as they are: those of single ranks, and weights outside of the parts."""
    if of_ranks:
        yield (
            f"{len(of_ranks)} files belong to single ranks of the old world size and are copied as they are: "
            f"{listed(of_ranks)}"
        )
    if weights_beside is not None:
        yield f"the weights in {escape(weights_beside)} are copied as they are: such files fit any number of ranks"


def _open_folder(directory: str, models: Sequence[Checkpoint]) -> DcpFolder:
    """Open a DCP directory, or return it as one of the models has opened it."""
    opened = (model.opened_at(directory) for model in models)
    return next((folder for folder in opened if folder is not None), None) or open_dcp(directory)


def _select(opened: DcpFolder, names: Sequence[str], folder: str) -> Catalog:
    """Open the records of tensors.

    Raises:
        UnreadableClass: some are objects of classes that cannot be read; the hint says what reshard can do.
    """
    try:
        return opened.select(names)
    except UnreadableClass as error:
        state = optimizer_state(opened.catalog.tensors.values(), opened.objects, folder)
        if not state.issuperset(error.tensors):
            raise
        raise UnreadableClass(
            f"{count(len(error.tensors), 'tensor')} of the optimizer's state cannot be divided",
            problems=error.problems,
            hint="with --no-optimizer, reshard writes everything but the optimizer's state",
        ) from None


_LEFT_OUT = "the optimizer's state is left out (--no-optimizer)"


def _drop_optimizer(surveyed: Survey) -> list[str]:
    """Remove an optimizer's folders and files from the survey, and return a note about them."""
    folders = [name for name in surveyed.folders if _is_of_optimizer(name)]
    files = [file for file in surveyed.files if _is_optimizer(file.name) or _is_of_optimizer(file.name)]
    surveyed.folders = [name for name in surveyed.folders if name not in folders]
    surveyed.unfinished = [name for name in surveyed.unfinished if not _is_of_optimizer(name)]
    surveyed.files = [file for file in surveyed.files if file not in files]
    names = [*folders, *(file.name for file in files)]
    return [f"{_LEFT_OUT}: {listed(names)}"] if names else []


def _is_of_optimizer(folder: str) -> bool:
    """True for a folder of an optimizer, such as `optimizer_0`, and for names below it."""
    return any(map(is_optimizer_name, folder.split("/")))


def _state_note(tensors: Collection[str], objects: Collection[str]) -> Iterator[str]:
    if tensors or objects:
        entries = f" and {count(len(objects), 'byte entry', 'byte entries')}" if objects else ""
        yield f"{_LEFT_OUT}: {count(len(tensors), 'tensor')}{entries}"


def _open_part(folder: str, opened: DcpFolder, *, no_optimizer: bool) -> CheckpointFolder:
    """Return the content of a DCP directory; its byte entries become tensors of bytes, which are copied unread.

    Raises:
        SourceError: byte entries were saved through extensions, or records of tensors cannot be opened.
    """
    placed = {name: place for name, place in opened.objects.items() if place is not None}
    state, entries = frozenset[str](), frozenset[str]()
    if no_optimizer:
        state = optimizer_state(opened.catalog.tensors.values(), opened.objects, folder)
        entries = frozenset(name for name in placed if "optimizer" in _kinds_above(name))
        placed = {name: place for name, place in placed.items() if name not in entries}
    catalog = _select(opened, [name for name in opened.catalog.tensors if name not in state], folder)
    paths = opened.catalog.paths
    packed = [name for name, place in placed.items() if place.transforms]
    if packed:
        raise SourceError(
            "the byte entries of this checkpoint were saved through extensions and cannot be carried over yet",
            problems=[escape(name) for name in packed],
            hint="load it with torch.distributed.checkpoint and save it without extensions",
        )
    files = {file.name: number for number, file in enumerate(catalog.files)}
    damaged = _add_entry_checksums(
        catalog,
        [(name, files[opened.catalog.files[place.file].name], place) for name, place in placed.items()],
    )
    for name, place in placed.items():
        file = files[opened.catalog.files[place.file].name]
        chunk = (file, place.start, place.nbytes, Region((0,), (place.nbytes,)))
        catalog.add_tensor(name, BY_NAME["uint8"], (place.nbytes,), iter([chunk]))
    return CheckpointFolder(
        folder=folder,
        catalog=catalog,
        objects=tuple(placed),
        paths=paths and {name: path for name, path in paths.items() if name not in state | entries},
        notes=(
            *opened.catalog.notes,
            *_entry_notes(
                folder, {name: place for name, place in opened.objects.items() if name not in entries}
            ),
            *_state_note(state, entries),
        ),
        damaged=tuple(damaged),
        distributed_objects=tuple(name for name in distributed_objects(opened) if name in placed),
    )


def _add_entry_checksums(catalog: Catalog, placed: Sequence[tuple[str, int, EntryLocation]]) -> list[str]:
    """Add the CRC-32s inside of byte entries, which are zips, to the catalog's files; the copy is compared with them.

    Args:
        catalog: catalog of the folder; its files get the checksums.
        placed: (name, index of the file, location) of each byte entry.

    Returns:
        A line for each entry that is not a zip as torch writes it. Such an entry has no CRC-32s to compare with, and
        torch would not load it, or would load something else.
    """
    damaged = list[str]()
    stretches: dict[int, list[tuple[int, int, int | None]]] = {}
    for name, file, place in placed:
        source, rows = catalog.files[file], stretches.setdefault(file, [])
        with open_regular(source.path, source.name, follow=False) as (fd, _):
            try:
                reader = ZipReader(pread_of(fd), place.start, place.nbytes, escape(source.name))
                entries = read_directory(reader, max_entries=_MAX_ENTRIES)
            except OtherVersion:
                raise
            except SourceError as error:
                damaged.append(f"{escape(name)}: {error.message}")
                rows.append((place.start, place.nbytes, None))
            else:
                rows += ((place.start + entry.start, entry.nbytes, entry.crc) for entry in entries.values())
    for file, rows in stretches.items():
        checksums_before, more = catalog.files[file].checksums, Checksums.of(rows)
        checksums = more if checksums_before is None else checksums_before | more
        catalog.files[file] = replace(catalog.files[file], checksums=checksums)
    return damaged


def _entry_notes(folder: str, objects: Mapping[str, EntryLocation | None]) -> Iterator[str]:
    """Yield notes about byte entries that a training job with another number of ranks may not be able to load."""
    of_ranks = [name for name, place in objects.items() if place and _ENTRY_OF_A_RANK.fullmatch(name)]
    where = f" of {escape(folder)}" if folder else ""
    if of_ranks:
        yield (
            f"{count(len(of_ranks), 'byte entry', 'byte entries')}{where} belong to single ranks of the old world "
            f"size ({listed(of_ranks)}): you may have to tell the trainer not to load them"
        )
    lost = [name for name, place in objects.items() if place is None]
    if lost:
        yield f"{count(len(lost), 'byte entry', 'byte entries')}{where} without any bytes left out: {listed(lost)}"


def _open_plain(source: ChosenCheckpoint) -> Checkpoint:
    """Open a checkpoint of plain weights. Resharding quantised ones would separate values from their scales.

    Raises:
        LayoutError: the checkpoint is quantised.
    """
    return formats.open(source.open(), plain=PlainWeights(dequantize=False, has_dequantize_option=False))


def _open_other_format(checkpoint: Checkpoint, *, no_optimizer: bool) -> Parts:
    """Return the parts of a checkpoint that is not a DCP directory: one part with all tensors.

    Config, tokenizer and the like are copied from the directory where this trainer keeps them. The optimizer's state may
    be in the same files as the model, or in others; the format opens it. If it cannot be used, only weights are written.
    """
    entries, state = checkpoint.catalog.tensors, frozenset[str]()
    open_optimizer = checkpoint.contents.optimizer
    opened = open_optimizer() if open_optimizer is not None and not no_optimizer else None
    if no_optimizer:
        state = optimizer_state(entries.values(), checkpoint.catalog.objects, "")
    elif isinstance(opened, UnusableOptimizer):
        state = frozenset(
            name for name in entries if name.startswith(tuple(f"{prefix}." for prefix in opened.names))
        )
    catalog = checkpoint.select([name for name in entries if name not in state])
    skipped = list(checkpoint.remarks.skipped)
    warnings, notes, objects = list[str](), list(checkpoint.remarks.notes), tuple[str, ...]()
    # The chunks of some formats show how tensors were cut for ranks; if not, all tensors may have been (see `_layout`).
    maybe_cut = set[str]() if checkpoint.contents.shows_cuts else set(catalog.tensors)
    states = list[str]()
    if isinstance(opened, OptimizerState) and opened.has_model:  # one file with the model and the optimizer
        catalog, objects = opened.catalog, opened.objects
        notes += opened.notes
        skipped = [pair for pair in skipped if not any(name.startswith(f"{pair[0]}.") for name in objects)]
    elif isinstance(opened, OptimizerState):  # files of its own
        maybe_cut = {f"{_MODEL}.{name}" for name in maybe_cut}
        maybe_cut |= set() if opened.shows_cuts else {f"{_OPTIM}.{name}" for name in opened.catalog.tensors}
        catalog = combine_catalogs({_MODEL: catalog, _OPTIM: opened.catalog})
        objects = tuple(f"{_OPTIM}.{name}" for name in opened.objects)
        notes.append(_NESTED)
        notes += opened.notes
        skipped = [pair for pair in skipped if not _is_optimizer(pair[0])]
    elif no_optimizer:
        states = [name for name, _ in skipped if _is_optimizer(name)]
        states += [name for name in listing(checkpoint.path) if is_optimizer_name(name)]
        notes.append(f"{_LEFT_OUT}{f': {listed(states)}' if states else ''}")
        skipped = [pair for pair in skipped if not _is_optimizer(pair[0])]
    else:
        states, warnings = _lost_optimizer(opened, [name for name, _ in skipped])
    if checkpoint.hub is None and storage.isdir(checkpoint.path):
        catalogs = [checkpoint.catalog, *([opened.catalog] if isinstance(opened, OptimizerState) else [])]
        read = {storage.realpath(os.path.dirname(file.path)) for source in catalogs for file in source.files}
        warnings += find_unread(checkpoint.path, read, {name.split("/")[0] for name in states}).warnings()
    paths, refused = _assets(checkpoint)
    part = CheckpointFolder(
        folder="",
        catalog=catalog,
        objects=objects,
        paths=catalog.paths if objects else None,
        notes=(*notes, *refused),
        tells_hub_names=checkpoint.hub is not None or holds_hub_names(checkpoint),
        maybe_cut=frozenset(maybe_cut),
    )
    return Parts(
        writer=checkpoint.writer,
        manifests=tuple(checkpoint.contents.manifests.values()),
        parts=(part,),
        files=tuple(
            FileToCopy(name, FileStamp.of(storage.stat(path)), is_executable=False)
            for name, path in paths.items()
        ),
        paths=paths,
        notes=tuple(f"{escape(name)} was not read: {escape(reason)}" for name, reason in skipped),
        warnings=(*copies_warnings(checkpoint.remarks.differing), *warnings),
        is_training=checkpoint.hub is None,
    )


def _lost_optimizer(opened: UnusableOptimizer | None, skipped: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of an optimizer's state that cannot be resharded, and the warning if there are some."""
    states, reason = list(filter(_is_optimizer, skipped)), ""
    if opened is not None:
        states, reason = list(opened.names), f": {opened.reason}"
    warning = f"the optimizer's state is left out ({listed(states)}){reason}; only weights are written"
    return states, [warning] if states else []


def _assets(checkpoint: Checkpoint) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return the paths of a checkpoint's config, tokenizer and the like, by name, and notes."""
    directory = find_config(checkpoint)
    if directory is None:
        return {}, ()
    paths, refused = list_assets(directory)
    refuse_pointers(paths)
    notes = (f"links out of the checkpoint's directory, or to nothing, are not copied: {listed(refused)}",)
    return paths, notes if refused else ()


def _is_optimizer(name: str) -> bool:
    return _OPTIMIZER.match(os.path.basename(name)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartJob(DcpOutput):
    """One DCP directory of the output."""

    optimizer: frozenset[str]
    """Names of the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardJob:
    """All decisions of a reshard."""

    parts: Parts
    mesh: Mesh
    folders: Mapping[str, PartJob]
    """Folder of the checkpoint -> its job."""
    output: JoinedImages
    plan: TransferPlan
    notes: tuple[str, ...]

    @property
    def decided(self) -> dict[str, object]:
        """See `operations.write.Job`."""
        folders = {folder: job.describe() for folder, job in self.folders.items()}
        siblings = [ReadFile(file.name, self.parts.paths[file.name], file.stamp) for file in self.parts.files]
        return {"folders": folders, "siblings": siblings}


def build_job(parts: Parts, options: ReshardOptions) -> ReshardJob:
    """Decide how a checkpoint is stored for a mesh. Scalars, such as an optimizer's `step`, keep their dtype.

    Args:
        parts: the checkpoint's content.
        options: the user's options.

    Raises:
        UsageError: the value of an option is not allowed, or it would convert tensors that are copied unchanged.
        SourceError: the checkpoint has no tensors.
    """
    check_cast("--dtype", options.dtype)
    check_cast("--optimizer-dtype", options.optimizer_dtype)
    if not any(part.catalog.tensors for part in parts.parts):
        raise SourceError("the checkpoint holds no tensors")
    if parts.weights_beside is not None and options.dtype != "keep":
        raise UsageError(
            f"--dtype {options.dtype}: the weights in {escape(parts.weights_beside)} are copied as they are and cannot be "
            "converted",
            hint="shardkit consolidate converts them, with `--dtype`",
        )
    folders = {part.folder: _part_job(part, options) for part in parts.parts}
    output = JoinedImages({folder: job.output for folder, job in folders.items()})
    catalog = join_catalogs({part.folder: part.catalog for part in parts.parts})
    notes = [note for part in parts.parts for note in part.notes]
    return ReshardJob(
        parts=parts,
        mesh=options.ranks,
        folders=folders,
        output=output,
        plan=build_plan(output, catalog),
        notes=(*parts.notes, *notes),
    )


def _part_job(part: CheckpointFolder, options: ReshardOptions) -> PartJob:
    """Decide how one folder is stored: layout, dtypes, and names that share bytes. Each group of such names is stored once."""
    aliases = _aliases(part.catalog, part.objects, {group[0] for group in part.recorded.ties if group})
    repeated = {name for other_names in aliases.values() for name in other_names}
    kept = [name for name in part.catalog.tensors if name not in repeated]
    objects = frozenset(part.objects)
    entries = part.catalog.tensors
    optimizer = optimizer_state((entries[name] for name in kept if name not in objects), objects, part.folder)
    layout = replace(_layout(part, kept, options.ranks), omitted=part.recorded.omitted)

    def dtype_of(name: str) -> DType:
        entry, is_optimizer = entries[name], name in optimizer
        target = CASTS.get(options.optimizer_dtype if is_optimizer else options.dtype)
        is_cast = name not in objects and is_convertible(entry, is_optimizer=is_optimizer)
        is_cast = is_cast and (is_optimizer or factor_of(name) is None)  # OSFT needs all digits of factors
        return target if target is not None and is_cast else entry.dtype

    dtypes = {name: dtype_of(name) for name in kept}
    sources = {name: join_name(part.folder, name) for name in kept}
    return PartJob(
        layout=layout,
        entries=entries,
        dtypes=dtypes,
        sources=sources,
        aliases=aliases,
        identity=manifest.RecordedSource(
            files=tuple(
                manifest.RecordedSourceFile(name=file.name, size_bytes=file.size)
                for file in part.catalog.files
            )
        ),
        cast=options.dtype,
        digest=options.digest,
        paths=part.paths,
        key_rules=part.key_rules,
        tells_hub_names=part.tells_hub_names,
        derived=part.derived,
        file_names=part.file_names,
        root=part.root,
        osft=_osft(part.osft, options.dtype),
        vocab_size=part.vocab_size,
        optimizer_cast=options.optimizer_dtype,
        objects=part.objects,
        optimizer=optimizer,
        output=DcpImages(layout, dtypes, sources, _no_phase, objects=objects),
    )


def _osft(osft: manifest.Osft | None, cast: str) -> manifest.Osft | None:
    if osft is None or cast not in CASTS:
        return osft
    return replace(osft, dense_dtype=CASTS[cast].name)


def _no_phase(fqn: str) -> None:
    """Return None: rows come from many files, so no offset in one source file helps to share its blocks."""


def _aliases(
    catalog: Catalog, objects: Iterable[str], recorded: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return groups of names with the same bytes, as first name -> others. This is how shardkit stores tied parameters.

    Args:
        catalog: a catalog with the tensors' chunks.
        objects: names of byte entries, which are skipped.
        recorded: names that come first in their group, because the Hub's files have them according to a manifest.
    """
    table, left_out = catalog.chunks, frozenset(objects)
    alike: dict[object, list[str]] = {}  # candidates; comparing a million chunks would be slow
    for name, entry in catalog.tensors.items():
        if name in left_out or entry.nbytes == 0:
            continue
        rows = slice(entry.chunk_ids.start, entry.chunk_ids.stop)
        files, starts = table.file[rows], table.start[rows]
        key = (entry.dtype.name, entry.shape, min(files), max(files), min(starts), max(starts))
        alike.setdefault(key, []).append(name)
    aliases: dict[str, tuple[str, ...]] = {}
    for names in alike.values():
        first: dict[object, str] = {}
        for name in sorted(names, key=lambda name: name not in recorded) if len(names) > 1 else ():
            ids = catalog.tensors[name].chunk_ids
            rows = slice(ids.start, ids.stop)
            places = frozenset(zip(table.file[rows], table.start[rows], table.regions(ids), strict=True))
            original = first.setdefault(places, name)
            if original != name:
                aliases[original] = (*aliases.get(original, ()), name)
    return aliases


def _layout(part: CheckpointFolder, names: list[str], mesh: Mesh) -> Layout:
    """Return a layout that shards on dim 0 each tensor that was sharded, and replicates the others.

    Floating tensors whose chunks do not show whether they were sharded are sharded. If no tensor is, all floating ones
    are. OSFT's factor V, and its optimizer state, is cut along the same dim as by `fully_shard`.
    """
    entries, objects = part.catalog.tensors, frozenset(part.objects)
    floating = {name for name in names if entries[name].shape and entries[name].dtype.is_floating}
    cut = {name for name in names if entries[name].num_chunks > 1} | (floating & part.maybe_cut)
    cut = cut or floating
    whole = (REPLICATE,) * len(mesh.axes)
    # Without a model, it is not known which tensors are parallel over tp. So rows are cut over tp as over dp_shard.
    tensor = prod(axis.size for axis in mesh.axes if axis.role == "tensor")
    rows = tuple(
        REPLICATE if axis.role == "replicate" else Placement(0, tensor if axis.role == "shard" else 1)
        for axis in mesh.axes
    )
    num_shards = prod(axis.size for axis in mesh.axes if axis.role == "shard")
    columns = tuple(REPLICATE if axis.role == "replicate" else Placement(1) for axis in mesh.axes)
    placed: dict[str, TensorLayout] = {}
    for name in names:
        by_columns = tensor == 1 and _is_cut_by_columns(name, entries[name].shape, num_shards)
        is_cut = name in cut and bool(entries[name].shape) and name not in objects
        placed[name] = TensorLayout(
            fqn=name,
            shape=entries[name].shape,
            placements=(columns if by_columns else rows) if is_cut else whole,
            unit=0,
        )
    units = (Unit(path="", class_name=None),)
    return Layout(origin="declared", mesh=mesh, units=units, tensors=placed, policy="none")


def _is_cut_by_columns(name: str, shape: Shape, num_shards: int) -> bool:
    """True for a factor V of OSFT, or its state (`exp_avg` and the like), that `fully_shard` cuts along dim 1."""
    of = name if factor_of(name) is not None else name.rpartition(".")[0]  # without exp_avg
    return len(shape) == 2 and shard_dim(of, shape, num_shards) == 1


def optimizer_state(entries: Iterable[TensorEntry], objects: Iterable[str], folder: str) -> frozenset[str]:
    """Return the names of an optimizer's state, recognised by `param_groups`, by segments of the name, or by the folder.

    Args:
        entries: all tensors of one folder.
        objects: names of its byte entries.
        folder: the folder, relative to the checkpoint. A folder of an optimizer (`optimizer_0`) has nothing else.
    """
    tensors = list(entries)
    if _is_of_optimizer(folder):
        return frozenset(entry.fqn for entry in tensors)
    names = optimizer_names(tensors, objects)
    return frozenset(
        entry.fqn for entry in tensors if entry.fqn in names or "optimizer" in _kinds_above(entry.fqn)
    )


def is_convertible(entry: TensorEntry, *, is_optimizer: bool) -> bool:
    """True for a tensor that a cast may round.

    A cast must never round a count: a step of 257 becomes 256 in bfloat16. So scalars keep their dtype, and so does the
    state of schedulers, data loaders and random generators; `load_state_dict` converts that itself if necessary.
    """
    if not entry.shape or not entry.dtype.is_floating or not entry.dtype.is_convertible:
        return False
    if is_optimizer:
        return entry.num_elements > 1  # some keep their step count in a tensor of one element
    return entry.num_elements > _SMALL or not any(_kinds_above(entry.fqn))


def _kinds_above(name: str) -> list[Kind | None]:
    """Return the kind of state that each of a name's first segments stands for: "app.optimizers.a.b" -> [None,
    "optimizer", None]."""
    return [object_kind(step) for step in name.split(".")[:_HEAD]]
