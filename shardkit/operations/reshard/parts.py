"""What a checkpoint directory is made of, for resharding: DCP directories, and files beside them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardkit.core.catalog import Catalog, Checksums, combine_catalogs
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.core.text import count, escape, listed
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.strict_json import open_regular
from shardkit.formats.contract import Checkpoint, DcpFolder, Place
from shardkit.formats.contract.optimizer import OptimizerState
from shardkit.formats.dcp.directory import open_dcp
from shardkit.formats.hub.base import saved_key_rules
from shardkit.formats.registry import recognise
from shardkit.formats.torchsave.archive import ZipReader, read_directory
from shardkit.keys import KeyRule
from shardkit.operations.companions import BesideFile, Survey, check_survey, survey
from shardkit.operations.resolve import Taken

_OF_A_RANK = re.compile(r"(?:^|[_-])rank[_-]?\d+\.|(?:rng_state|random_states)_\d+\.")
_ENTRY_OF_A_RANK = re.compile(r"(?:.*[._])?(?:dp_)?rank_?\d+(?:\..*)?")  # torchtitan: dataloader.dp_rank_0
_OPTIMIZER = re.compile(r"(bf16_)?(zero_pp_)?optim")
_MAX_ENTRIES = 1 << 16  # of a byte entry's zip
_MODEL, _OPTIM = "model", "optim"  # as torch's DCP recipes name the two
_NESTED = (
    "names begin with model. and optim.: load it into the two state dicts that "
    "torch.distributed.checkpoint.state_dict.get_state_dict gives"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The tensors and byte entries of one folder."""

    folder: str
    """Relative to the checkpoint; "" for the checkpoint itself."""
    catalog: Catalog
    """Raw extents; a byte entry is a tensor of bytes."""
    objects: tuple[str, ...]
    """Names of the byte entries."""
    paths: dict[str, tuple[str | int, ...]] | None
    """planner_data of the save."""
    notes: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    """Why byte entries are not what torch writes; a line for each."""
    unboxed: frozenset[str] = frozenset()
    """Names of tensors whose chunks do not tell whether they were sharded: cut from flat partitions, or saved whole."""
    key_rules: tuple[KeyRule, ...] = ()
    """Rules that turn the model's names into the Hub's, if `shardkit.save` recorded them; they are carried over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A checkpoint, taken apart."""

    writer: str
    parts: tuple[Part, ...]
    files: tuple[BesideFile, ...] = ()
    """Files beside the parts, copied as they are."""
    empty: tuple[str, ...] = ()
    """Directories with nothing in them."""
    weights_beside: str | None = None
    """The folder of DCP-HF shards that holds the weights. They fit any number of ranks and are copied."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @property
    def siblings(self) -> tuple[str, ...]:
        """Names of what is copied, relative to the checkpoint."""
        return tuple(file.name for file in self.files)


def take_apart(taken: Taken, *, check_source: bool = True) -> Parts:
    """Open every DCP directory of a checkpoint, or the one catalog of a checkpoint in another format.

    Args:
        taken: the checkpoint.
        check_source: refuse byte entries that are not zips as torch writes them. Otherwise they are carried over as they
            are, with a warning.

    Raises:
        SourceError, IntegrityError, ResourceError: it cannot be opened, or the save of a part did not finish.
    """
    path = taken.resolved.path
    if not storage.isdir(path) or not _keeps_folders(path):
        return _other(taken.open())
    found = survey(path)
    if not found.folders or not all(_keeps_folders(os.path.join(path, name)) for name in found.folders):
        return _other(taken.open())
    check_survey(path, found)
    models = taken.models()  # all of them are resharded
    checkpoint = models[0]
    rules = saved_key_rules(checkpoint) or ()
    parts = tuple(
        _open_part(folder, _open_folder(os.path.join(path, folder), models), rules if not folder else ())
        for folder in found.folders
    )
    damaged = [problem for part in parts for problem in part.damaged]
    if damaged and check_source:
        raise SourceError(
            f"{count(len(damaged), 'byte entry is', 'byte entries are')} damaged",
            problems=damaged,
            hint="use another copy of the checkpoint; --check-source off carries them over as they are",
        )
    beside = _weights_beside(path, checkpoint, found)
    of_ranks = [file.name for file in found.files if _OF_A_RANK.search(os.path.basename(file.name))]
    return Parts(
        writer=checkpoint.writer,
        parts=parts,
        files=tuple(found.files),
        empty=tuple(found.empty),
        weights_beside=beside,
        notes=(*found.notes(), *_notes(of_ranks, beside)),
        warnings=tuple(_warnings(of_ranks, damaged)),
    )


def _keeps_folders(path: str) -> bool:
    found = recognise(path)
    return found is None or found.keeps_folders


def _warnings(of_ranks: list[str], damaged: list[str]) -> Iterator[str]:
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


def _weights_beside(path: str, checkpoint: Checkpoint, found: Survey) -> str | None:
    weights = storage.realpath(checkpoint.catalog.directory or path)
    if any(storage.realpath(os.path.join(path, folder)) == weights for folder in found.folders):
        return None
    return os.path.relpath(weights, storage.realpath(path))


def _notes(of_ranks: list[str], beside: str | None) -> Iterator[str]:
    if of_ranks:
        yield (
            f"{len(of_ranks)} files belong to single ranks of the old world size and are copied as they are: "
            f"{listed(of_ranks)}"
        )
    if beside is not None:
        yield f"the weights in {escape(beside)} are copied as they are: such files fit any number of ranks"


def _open_folder(directory: str, models: Sequence[Checkpoint]) -> DcpFolder:
    """Return a DCP directory; one that is open already is not parsed again."""
    opened = (model.opened_at(directory) for model in models)
    return next((folder for folder in opened if folder is not None), None) or open_dcp(directory)


def _open_part(folder: str, opened: DcpFolder, key_rules: tuple[KeyRule, ...]) -> Part:
    catalog = opened.select(tuple(opened.catalog.tensors))
    placed = {name: place for name, place in opened.objects.items() if place is not None}
    packed = [name for name, place in placed.items() if place.transforms]
    if packed:
        raise SourceError(
            "the byte entries of this checkpoint were saved through extensions and cannot be carried over yet",
            problems=[escape(name) for name in packed],
            hint="load it with torch.distributed.checkpoint and save it without extensions",
        )
    files = {file.name: number for number, file in enumerate(catalog.files)}
    damaged = _record(
        catalog,
        [(name, files[opened.catalog.files[place.file].name], place) for name, place in placed.items()],
    )
    for name, place in placed.items():
        file = files[opened.catalog.files[place.file].name]
        chunk = (file, place.start, place.nbytes, Region((0,), (place.nbytes,)))
        catalog.add_tensor(name, BY_NAME["uint8"], (place.nbytes,), iter([chunk]))
    return Part(
        folder=folder,
        catalog=catalog,
        objects=tuple(placed),
        paths=opened.catalog.paths,
        notes=(*opened.catalog.notes, *_entry_notes(folder, opened.objects)),
        damaged=tuple(damaged),
        key_rules=key_rules,
    )


def _record(catalog: Catalog, placed: Sequence[tuple[str, int, Place]]) -> list[str]:
    """Have byte entries compared, as they move, with the CRC-32s that they hold: they are zips.

    Returns:
        A line for each entry that is not a zip as torch writes it. It has nothing to be compared with, and torch would
        not load it, or would load something else.
    """
    damaged = list[str]()
    stretches: dict[int, list[tuple[int, int, int | None]]] = {}
    for name, file, place in placed:
        source, rows = catalog.files[file], stretches.setdefault(file, [])
        with open_regular(source.path, source.name, follow=False) as (fd, _):
            try:
                reader = ZipReader(partial(_pread, fd), place.start, place.nbytes, escape(source.name))
                entries = read_directory(reader, lambda name: True, max_entries=_MAX_ENTRIES)
            except SourceError as error:
                damaged.append(f"{escape(name)}: {error.message}")
                rows.append((place.start, place.nbytes, None))
            else:
                rows += ((place.start + each.start, each.nbytes, each.crc) for each in entries.values())
    for file, rows in stretches.items():
        held, more = catalog.files[file].checksums, Checksums.of(rows)
        checksums = more if held is None else held | more
        catalog.files[file] = replace(catalog.files[file], checksums=checksums)
    return damaged


def _pread(fd: int, start: int, nbytes: int) -> bytes:
    return storage.pread(fd, nbytes, start)


def _entry_notes(folder: str, objects: Mapping[str, Place | None]) -> Iterator[str]:
    """Yield what to tell about byte entries before a job of another size loads them."""
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


def _other(checkpoint: Checkpoint) -> Parts:
    """Make one DCP directory, with all its tensors, of a checkpoint that is not one."""
    catalog = checkpoint.select(tuple(checkpoint.catalog.tensors))
    skipped = list(checkpoint.skipped)
    opened = checkpoint.optimizer() if checkpoint.optimizer is not None else None
    warnings, notes, objects = list[str](), list(checkpoint.notes), tuple[str, ...]()
    unboxed = set[str]() if checkpoint.has_boxes else set(catalog.tensors)
    if isinstance(opened, OptimizerState):
        unboxed = {f"{_MODEL}.{name}" for name in unboxed}
        unboxed |= set() if opened.has_boxes else {f"{_OPTIM}.{name}" for name in opened.catalog.tensors}
        catalog = combine_catalogs({_MODEL: catalog, _OPTIM: opened.catalog})
        objects = tuple(f"{_OPTIM}.{name}" for name in opened.objects)
        notes.append(_NESTED)
        notes += opened.notes
        skipped = [pair for pair in skipped if not _is_optimizer(pair[0])]
    else:
        states, reason = [name for name, _ in skipped if _is_optimizer(name)], ""
        if opened is not None:
            states, reason = list(opened.names), f": {opened.reason}"
        if states:
            warnings.append(
                f"the optimizer's state is left out ({listed(states)}){reason}; only weights are written"
            )
    part = Part(
        folder="",
        catalog=catalog,
        objects=objects,
        paths=catalog.paths if objects else None,
        notes=tuple(notes),
        unboxed=frozenset(unboxed),
    )
    return Parts(
        writer=checkpoint.writer,
        parts=(part,),
        notes=tuple(f"{escape(name)} was not read: {escape(reason)}" for name, reason in skipped),
        warnings=tuple(warnings),
    )


def _is_optimizer(name: str) -> bool:
    return _OPTIMIZER.match(os.path.basename(name)) is not None
