"""Saving a sharded model so that the name always has a whole checkpoint.

All ranks write with torch's own distributed checkpoint into a directory beside the destination. When every rank has
reported, and what was written has been looked at, rank 0 makes it the destination in one rename. A rank that fails, or
is killed, changes nothing about what was there before.

    .<name>.shardkit-<owner>/data/    while it is written
    <name>/.metadata, __R_N.distcp    what stock `dcp.load` reads: {"model": ..., "optimizer": ..., "extra": ...}
    <name>/shardkit.json              world, mesh, units, ties, key rules, files

Names of one tensor share one record.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from shardkit._version import __version__
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, ResourceError, ShardkitError
from shardkit.files import manifest, storage
from shardkit.files.staging import Staging, remove_abandoned
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp.directory import METADATA
from shardkit.operations.destination import check_destination
from shardkit.training.diagnostics.diagnose import diagnose
from shardkit.training.optimizer import stepped_by
from shardkit.training.ranks.agree import agree, gather_json, lost
from shardkit.training.ranks.context import KeyRules, clean_name
from shardkit.training.save_state import State, Writer, checkpoint_state, find_aliases
from shardkit.training.source.hub_names import recall

_PHASE = "saving"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What was saved; the same on every rank."""

    path: str
    """Absolute."""
    num_files: int
    """Shard files."""
    file_bytes: int
    """Of all of them together."""


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
) -> SaveResult:
    """Save a model from all its ranks; a collective. What was at `path` stays whole until this is whole.

    `shardkit consolidate`, `reshard` and `inspect` read it, and stock torch does:
    `dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=path)`.

    Args:
        model: wrapped by FSDP2, FSDP1, tensor parallelism, DDP, or plain; with weights.
        path: on a file system that all ranks share; what rank 0 says counts. Missing directories above it are made.
        optimizer: its state, or that of several, is saved too, under "optimizer", by names of parameters.
        extra: saved under "extra": numbers, text, tensors, objects with a state dict; each rank gives the same names.
        process_group: the ranks that save; None for all of them.
        overwrite: a checkpoint that is there is replaced, in one exchange; nothing else ever is.

    Raises:
        UsageError: the destination exists; on all ranks, as every error.
        LayoutError: the model has parameters on meta, or an optimizer steps parameters of another model.
        ResourceError: no space, no permission, a rank that does not see the directory, a rank that died.
        ShardkitError: anything else that a rank met while it saved; problems name the ranks.
    """
    leads = not dist.is_initialized() or dist.get_rank(process_group) == 0
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
    _together(lambda: _check_values(model, optimizers), process_group)
    staging, place = _start(os.fspath(path), overwrite, process_group, leads=leads)
    try:
        aliases = find_aliases(model)
        writer = Writer(place, aliases)
        with contextlib.ExitStack() as stack:
            saving = checkpoint_state(model, optimizers, extra, aliases)
            state = _together(lambda: stack.enter_context(saving), process_group)
            _write(state, writer, process_group)
        told_rules = gather_json(recall(model), process_group, phase=_PHASE)
        rules = next((each for each in told_rules if each is not None), None)
        _together(
            lambda: _describe(model, writer, aliases, rules, process_group) if leads else None, process_group
        )
        _together(lambda: _commit(staging, overwrite=overwrite) if staging else None, process_group)
    except BaseException:
        if staging is not None and not staging.is_committed:
            staging.discard()
        raise
    sizes = writer.files.values()
    told = gather_json([staging.destination, len(sizes), sum(sizes)] if staging else None, process_group)
    return SaveResult(path=told[0][0], num_files=told[0][1], file_bytes=told[0][2])


def _check_values(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    empty = [clean_name(name) for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise LayoutError(
            f"{count(len(empty), 'parameter')} of the model on meta: there are no values to save",
            problems=map(escape, empty),
            hint="finalize or load_into gives it weights",
        )
    own = {id(parameter) for parameter in model.parameters()}
    stepped = [parameter for each in optimizers for parameter in stepped_by(each)]
    foreign = sum(id(parameter) not in own for parameter in stepped)
    if foreign:
        raise LayoutError(
            f"{foreign} of {count(len(stepped), 'parameter')} that the optimizer steps are not the model's:"
            " their state has no name",
            hint="make the optimizer after the model is wrapped, or give it the new parameters: rebind_optimizer",
        )
    copies = [len(ids) - len(set(ids)) for ids in ([id(p) for p in stepped_by(each)] for each in optimizers)]
    if any(copies):
        raise LayoutError(
            f"the optimizer has the same parameters {sum(copies)} times more: it does not step all that it was made for",
            hint="point it at all of them before the first step: rebind_optimizer, or finalize(..., optimizer=)",
        )


def _together(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Do a rank's work; raise on all ranks what any met."""
    caught, value = None, None
    try:
        value = work()
    except BaseException as error:  # Ctrl-C too: the others must not wait
        caught = error
    agree(caught, group, phase=_PHASE)
    return value


def _start(
    path: str, overwrite: bool, group: dist.ProcessGroup | None, *, leads: bool
) -> tuple[Staging | None, str]:
    """Make the staging directory on the first rank, and tell all where it is."""
    staging: Staging | None = None

    def make() -> Staging | None:
        if not leads:
            return None
        _make_parents(path)
        destination = check_destination(path, None, overwrite=overwrite)
        remove_abandoned(destination)
        return Staging.create(destination)

    try:
        staging = _together(make, group)
        place = str(gather_json(staging.data if staging else None, group, phase=_PHASE)[0])
        _together(lambda: _check_shared(place), group)
    except BaseException:
        if staging is not None:
            staging.discard()
        raise
    return staging, place


def _make_parents(path: str) -> None:
    """Make the directories above a destination, where they are missing, and bring their names to the disk."""
    parent = os.path.dirname(os.path.abspath(path))
    missing = []
    above = parent
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    try:
        storage.make_directories(parent)
        for made in missing:
            storage.sync_directory(os.path.dirname(made))
    except OSError as error:
        raise ResourceError(
            f"{escape(parent)} cannot be made: {error.strerror}", hint="choose another destination"
        ) from error


def _commit(staging: Staging, *, overwrite: bool) -> None:
    check_destination(staging.destination, None, overwrite=overwrite)  # what lies there now may be somebody's
    staging.commit(overwrite=overwrite)


def _check_shared(place: str) -> None:
    if not os.path.isdir(place):
        raise ResourceError(
            f"this rank does not see {escape(place)}, which rank 0 made",
            hint="save to a file system that all ranks share",
        )


def _write(state: State, writer: Writer, group: dist.ProcessGroup | None) -> None:
    """Let torch save. It tells every rank of every failure; each rank answers for its own."""
    caught: CheckpointException | None = None
    try:
        save_distributed(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        caught = error
    except RuntimeError as error:  # of a collective: what ranks do themselves comes as the above
        raise lost(_PHASE, error) from error
    own = None
    if caught is not None:
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        own = caught.failures.get(rank, (None,))[0]
        own = own if isinstance(own, Exception) else None
    agree(own, group, phase=_PHASE)
    if caught is not None:
        raise ShardkitError(f"torch could not save: {str(caught).splitlines()[0]}") from caught


def _describe(
    model: nn.Module,
    writer: Writer,
    aliases: Mapping[str, str],
    rules: KeyRules | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Look at what all ranks wrote, then write the manifest."""
    missing = [
        f"{escape(name)}: {size} bytes were written"
        for name, size in sorted(writer.files.items())
        if not _has_bytes(os.path.join(writer.path, name), size)
    ]
    if missing:
        raise ResourceError(
            "files that ranks wrote are not in the directory that rank 0 sees",
            problems=missing,
            hint="save to a file system that all ranks share",
        )
    found = diagnose(model)
    ties: dict[str, list[str]] = {}
    for alias, kept in aliases.items():
        ties.setdefault(kept, [kept]).append(alias)
    metadata = read_small(os.path.join(writer.path, METADATA), METADATA, manifest.MAX_BYTES)
    content = {
        "format": manifest.FORMAT,
        "kind": "checkpoint",
        "tool": {"name": "shardkit", "version": __version__},
        "model_class": found.model_class,
        "world_size": dist.get_world_size(group) if dist.is_initialized() else 1,
        "meshes": sorted({unit.mesh for unit in found.units if unit.mesh}),
        "units": [{"path": unit.path, "class": unit.class_name} for unit in found.units],
        "ties": list(ties.values()),
        **({} if rules is None else {"key_rules": rules}),
        "metadata": manifest.entry_of(METADATA, metadata, digest=True, sha256=False),
        "files": [
            {"name": name, "size": os.path.getsize(os.path.join(writer.path, name))}
            for name in sorted(writer.files)
        ],
    }
    storage.write_file(os.path.join(writer.path, manifest.NAME), manifest.dump(content))


def _has_bytes(path: str, size: int) -> bool:
    try:
        return os.path.getsize(path) >= size
    except OSError:
        return False
