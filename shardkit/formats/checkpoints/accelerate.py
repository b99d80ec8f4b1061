"""accelerate and transformers' Trainer with FSDP, SHARDED_STATE_DICT: a DCP directory for each model and optimizer.

    checkpoint-200/                          (Trainer: trainer_state.json, scheduler.pt, rng_state_R.pth)
        pytorch_model_fsdp_0/.metadata       root `model`
        optimizer_0/.metadata                root `optimizer`

Source: accelerate 1.15, utils/fsdp_utils.py (save_fsdp_model, save_fsdp_optimizer).

accelerate's FSDP models in `.bin` files: one for each rank, or one with the whole model.

    pytorch_model_fsdp_0_rank0.bin ...   SHARDED_STATE_DICT without DCP: DTensors or ShardedTensors
    pytorch_model_fsdp.bin               FULL_STATE_DICT; pytorch_model_fsdp_1.bin for the second model
    pytorch_model_fsdp_rank0.bin ...     LOCAL_STATE_DICT: flat parameters, which cannot be taken apart

Source: accelerate 1.15, utils/fsdp_utils.py (save_fsdp_model).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.links import locate
from shardkit.formats.checkpoint import (
    Checkpoint,
    Opener,
    asset_directories,
    has_any,
    inner,
    listing,
    own_name,
    parent,
)
from shardkit.formats.checkpoints.full_file import open_full_file
from shardkit.formats.dcp.directory import open_dcp_directory
from shardkit.formats.optimizer import OptimizerState, Unmapped
from shardkit.formats.rankfiles.files import RankFile, gather_files, require_ranks
from shardkit.formats.rankfiles.numbered import parameters_of
from shardkit.formats.rankfiles.optimizer import open_optimizer_files

_MODEL = re.compile(r"pytorch_model_fsdp_\d+")
_OPTIMIZER = re.compile(r"optimizer_\d+")
_METADATA = (".metadata", "__*.metadata")
_TRAINER_STATE = "trainer_state.json"
_STATE = re.compile(
    r"trainer_state\.json|training_args\.bin|scheduler(_\d+)?\.(bin|pt)|sampler(_\d+)?\.bin|scaler\.pt"
    r"|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl"
)


def is_accelerate(path: str) -> bool:
    """True for a directory with `pytorch_model_fsdp_N/` in it, and for that directory itself."""
    if _MODEL.fullmatch(own_name(path)):
        return has_any(listing(path), *_METADATA)
    return bool(model_directories(path))


def open_accelerate(path: str) -> Checkpoint:
    """Open the model of an accelerate checkpoint; optimizer, scheduler and random states are skipped.

    Raises:
        SourceError: several models, of which one has to be named; an empty one; a damaged one.
        IntegrityError, ResourceError: as for any DCP directory.
    """
    if _MODEL.fullmatch(own_name(path)):
        directory, home, name = path, parent(path), own_name(path)
    else:
        name = _only_model(path)
        directory, home = os.path.join(path, name), path
    _refuse_empty(directory, name)
    checkpoint = open_dcp_directory(directory)
    is_trainer = _TRAINER_STATE in listing(home)
    return replace(
        checkpoint,
        path=path,
        format="accelerate",
        writer="transformers Trainer (FSDP)" if is_trainer else "accelerate (FSDP)",
        roots={"model": ("model",)},
        # Trainer leaves the config to the output directory, where save_model puts it at the end.
        assets=asset_directories(directory, home, parent(home) if is_trainer else None),
        skipped=(*checkpoint.skipped, *_skipped(home, name)),
    )


def model_directories(path: str) -> list[str]:
    """Return the names of the directories of models in a checkpoint, as many as the run had, in their order."""
    found = [
        name
        for name in listing(path)
        if _MODEL.fullmatch(name)
        and (directory := inner(path, name)) is not None
        and has_any(listing(directory), *_METADATA)
    ]
    return sorted(found, key=lambda name: int(name.rpartition("_")[2]))


def _only_model(path: str) -> str:
    models = model_directories(path)
    if len(models) > 1:
        raise SourceError(
            f"{escape(path)} holds {len(models)} models",
            problems=[escape(os.path.join(path, name)) for name in models],
            hint="give the directory of the one you mean",
        )
    return models[0]


def _refuse_empty(directory: str, name: str) -> None:
    """Say why there is nothing where peft lost the weights before they were saved."""
    try:
        sizes = [entry.stat().st_size for entry in os.scandir(directory) if entry.name.endswith(".distcp")]
    except OSError:
        return  # opening it says what is wrong
    if sizes and not any(sizes):
        raise SourceError(
            f"{escape(name)} is empty: its {len(sizes)} .distcp files have 0 bytes",
            hint="the trainer saved no tensors (with FSDP1 and LoRA, peft finds no adapter weights under the "
            "wrapped names); the weights are not in this checkpoint: train with FSDP2, or save the adapter itself",
        )


def _skipped(home: str, taken: str) -> Iterable[tuple[str, str]]:
    for name in sorted(listing(home)):
        if name == taken:
            continue
        if _OPTIMIZER.fullmatch(name):
            yield name, "optimizer state"
        elif _MODEL.fullmatch(name):
            yield name, "another model"
        elif _STATE.fullmatch(name):
            yield name, "state of the trainer"


_FILE = re.compile(r"pytorch_model_fsdp(?:_(\d{1,6}))?(?:_rank(0|[1-9]\d{0,5}))?\.bin")
_BIN_STATE = re.compile(
    r"(optimizer(_\d+)?(_rank\d+)?\.(bin|pt)|scheduler(_\d+)?\.(bin|pt)|random_states_\d+\.pkl)"
)
_BIN_OPTIMIZER = re.compile(r"optimizer(?:_(\d{1,6}))?(?:_rank(0|[1-9]\d{0,5}))?\.bin")
_FLAT = ("flat_param", "_flat_param")

_Found = dict[int, dict[int | None, str]]  # model or optimizer -> rank, None for the whole -> name


def is_accelerate_bin(path: str) -> bool:
    """True for a directory with `pytorch_model_fsdp*.bin` in it."""
    return os.path.isdir(path) and any(map(_FILE.fullmatch, listing(path)))


def open_accelerate_bin(path: str) -> Checkpoint:
    """Open the model; optimizer, scheduler and random states are skipped.

    Raises:
        SourceError: several models, of which one has to be named; files of ranks that are missing, damaged or
            contradict each other; flat parameters.
        ResourceError: a file may not be read.
    """
    files = _only_bin_model(path)
    assets = asset_directories(path)
    skipped = tuple(_skipped_bin(path, set(files.values())))
    whole = files.get(None)
    if whole is not None:
        checkpoint = open_full_file(locate(path, whole))
        return replace(
            checkpoint,
            path=path,
            format="accelerate-bin",
            writer="accelerate (FSDP, full)",
            optimizer=_optimizer(path, checkpoint.catalog, frozenset(checkpoint.catalog.tensors)),
            has_boxes=False,
            assets=assets,
            skipped=(*checkpoint.skipped, *skipped),
        )
    ranks = {rank: name for rank, name in files.items() if rank is not None}
    require_ranks(ranks[max(ranks)].replace(f"_rank{max(ranks)}.", "_rank{}."), ranks, max(ranks) + 1)
    gathered = gather_files(path, [RankFile(ranks[rank]) for rank in sorted(ranks)])
    _refuse_flat(list(gathered.catalog.tensors))
    return Checkpoint(
        path=path,
        format="accelerate-bin",
        writer="accelerate (FSDP, a file for each rank)",
        catalog=gathered.catalog,
        select=gathered.select,
        check=gathered.check,
        roots={"model": ()},
        optimizer=_optimizer(path, gathered.catalog, gathered.plain),
        assets=assets,
        skipped=skipped,
    )


def _only_bin_model(path: str) -> dict[int | None, str]:
    """Return the files of the one model: by rank, or under None the whole.

    Raises:
        SourceError: several models, or one in several forms.
    """
    models = _find(path, _FILE)
    (_, files), *others = sorted(models.items())
    if others or (None in files and len(files) > 1):
        raise SourceError(
            f"{escape(path)} holds {'several models' if others else 'the model as a whole and in parts'}",
            problems=[escape(name) for found in models.values() for name in found.values()],
            hint="move those that you do not mean into another directory, or give the file of a whole model",
        )
    return files


def _find(path: str, pattern: re.Pattern[str]) -> _Found:
    found: _Found = {}
    for name in sorted(listing(path)):
        match = pattern.fullmatch(name)
        if match is not None:
            rank = None if match[2] is None else int(match[2])
            found.setdefault(int(match[1] or 0), {}).setdefault(rank, name)
    return found


def _optimizer(
    path: str, model: Catalog, plain: frozenset[str]
) -> Callable[[], OptimizerState | Unmapped] | None:
    """Return what opens the optimizer's state, None where there is none."""
    found = _find(path, _BIN_OPTIMIZER)
    if not found:
        return None

    def open_it() -> OptimizerState | Unmapped:
        (_, files), *others = sorted(found.items())
        if others or (None in files and len(files) > 1):
            names = [name for files in found.values() for name in files.values()]
            return Unmapped(names, "there are several of them")
        ranks = [rank for rank in files if rank is not None]
        if ranks:
            last = max(ranks)
            require_ranks(files[last].replace(f"_rank{last}.", "_rank{}."), ranks, last + 1)
        names = [files[rank] for rank in sorted(ranks)] or [files[None]]
        state = open_optimizer_files(path, names, parameters_of(model, plain))
        return replace(state, has_boxes=False) if isinstance(state, OptimizerState) and not ranks else state

    return open_it


def _refuse_flat(names: list[str]) -> None:
    flat = [name for name in names if name.rpartition(".")[2] in _FLAT]
    if flat:
        raise SourceError(
            f"{len(flat)} of {len(names)} tensors are flat parameters of FSDP1 (LOCAL_STATE_DICT): "
            "nothing in the files says which parameters they are made of",
            problems=map(escape, flat),
            hint="load it with the training script that saved it, and save with SHARDED_STATE_DICT",
        )


def _skipped_bin(path: str, taken: set[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(listing(path)):
        state = _BIN_STATE.fullmatch(name)
        if state is not None:
            yield name, "optimizer state" if name.startswith("optimizer") else "state of the trainer"
        elif _FILE.fullmatch(name) and name not in taken:
            yield name, "another model"


OPENERS = {
    "accelerate": Opener(is_accelerate, open_accelerate),
    "accelerate-bin": Opener(is_accelerate_bin, open_accelerate_bin),
}
