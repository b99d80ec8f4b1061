"""Checkpoints of accelerate, and of transformers' Trainer, with FSDP: DCP directories, or `.bin` files.

With SHARDED_STATE_DICT they are DCP directories:

    checkpoint-200/                          (Trainer: trainer_state.json, scheduler.pt, rng_state_R.pth)
        pytorch_model_fsdp_0/.metadata       root `model`
        optimizer_0/.metadata                root `optimizer`

Otherwise they are files of `torch.save`, one for each rank or one for the whole model:

    pytorch_model_fsdp_0_rank0.bin ...   SHARDED_STATE_DICT without DCP: DTensors or ShardedTensors
    pytorch_model_fsdp.bin               FULL_STATE_DICT; pytorch_model_fsdp_1.bin for the second model
    pytorch_model_fsdp_rank0.bin ...     LOCAL_STATE_DICT: flat parameters, which cannot be split into parameters

Source: accelerate 1.15, utils/fsdp_utils.py (save_fsdp_model, save_fsdp_optimizer).
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.links import locate
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    Opener,
    asset_directories,
    explain_skipped,
    folder_below,
    folder_name,
    has_any,
    listing,
    parent_folder,
)
from shardkit.formats.contract.optimizer import OptimizerState, UnusableOptimizer
from shardkit.formats.dcp.directory import as_checkpoint, open_dcp, refuse_flat
from shardkit.formats.rankfiles.files import RankFile, gather_files, require_ranks
from shardkit.formats.rankfiles.optimizer import open_optimizer_files, parameters_of
from shardkit.formats.trainers.full_file import open_full_file

_MODEL = re.compile(r"pytorch_model_fsdp_\d+")
_METADATA = (".metadata", "__*.metadata")
_TRAINER_STATE = "trainer_state.json"
_SKIPPED = {
    r"optimizer_\d+": "optimizer state",
    _MODEL.pattern: "another model",
    r"trainer_state\.json|training_args\.bin|scheduler(_\d+)?\.(bin|pt)|sampler(_\d+)?\.bin|scaler\.pt"
    r"|rng_state(_\d+)?\.pth|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl": "state of the trainer",
}
# (number of the model or optimizer, rank); either may be absent
_MODEL_FILE = re.compile(r"pytorch_model_fsdp(?:_(\d{1,6}))?(?:_rank(0|[1-9]\d{0,5}))?\.bin")
_OPTIMIZER_FILE = re.compile(r"optimizer(?:_(\d{1,6}))?(?:_rank(0|[1-9]\d{0,5}))?\.bin")
_SKIPPED_FILES = {
    r"optimizer(_\d+)?(_rank\d+)?\.(bin|pt)": "optimizer state",
    _MODEL_FILE.pattern: "another model",
    r"scheduler(_\d+)?\.(bin|pt)|random_states_\d+\.pkl": "state of the trainer",
}

_Files = dict[int | None, str]  # by rank; the key None is the file of the whole model or optimizer


def is_accelerate(path: str) -> bool:
    """True for a directory that contains `pytorch_model_fsdp_N/`, and for `pytorch_model_fsdp_N/` itself."""
    if _MODEL.fullmatch(folder_name(path)):
        return has_any(listing(path), *_METADATA)
    return bool(model_directories(path))


def open_accelerate(path: str) -> Checkpoint:
    """Open the model of an accelerate checkpoint; optimizer, scheduler and random states are skipped.

    Raises:
        SourceError: there are several models, of which one must be named; or the model is empty or damaged.
        IntegrityError, ResourceError: as for any DCP directory.
    """
    if _MODEL.fullmatch(folder_name(path)):
        directory, home, name = path, parent_folder(path), folder_name(path)
    else:
        name = _only_model(path)
        directory, home = os.path.join(path, name), path
    folder = open_dcp(directory)
    if not folder.catalog.tensors and not folder.objects:
        raise SourceError(
            f"{escape(name)} is empty: the state dict that was saved had no tensors",
            hint="with FSDP1 and LoRA, peft finds no adapter weights under the wrapped names; the weights are not in "
            "this checkpoint: train with FSDP2, or save the adapter itself",
        )
    checkpoint = as_checkpoint(directory, folder)
    is_trainer = _TRAINER_STATE in listing(home)
    return replace(
        checkpoint,
        path=path,
        format="accelerate",
        writer="transformers Trainer (FSDP)" if is_trainer else "accelerate (FSDP)",
        contents=Contents(
            roots={"model": ("model",)},
            # Trainer writes the config into the output directory, at the end of training (save_model).
            assets=asset_directories(directory, home, parent_folder(home) if is_trainer else None),
        ),
        remarks=checkpoint.remarks.plus(skipped=explain_skipped(listing(home) - {name}, _SKIPPED)),
    )


def model_directories(path: str) -> list[str]:
    """Return the names of a checkpoint's model directories, one for each model of the run, by their numbers."""
    names = [
        name
        for name in listing(path)
        if _MODEL.fullmatch(name)
        and (directory := folder_below(path, name)) is not None
        and has_any(listing(directory), *_METADATA)
    ]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def _only_model(path: str) -> str:
    models = model_directories(path)
    if len(models) > 1:
        raise SourceError(
            f"{escape(path)} holds {len(models)} models",
            problems=[escape(os.path.join(path, name)) for name in models],
            hint="give the directory of the one you mean",
        )
    return models[0]


def is_accelerate_bin(path: str) -> bool:
    """True for a directory with a file `pytorch_model_fsdp*.bin`."""
    return any(map(_MODEL_FILE.fullmatch, listing(path)))


def open_accelerate_bin(path: str) -> Checkpoint:
    """Open the model in `.bin` files. Its optimizer is opened on demand; scheduler and random states are skipped.

    Raises:
        SourceError: there are several models; ranks' files are missing, damaged or contradict each other; or the
            parameters are flat.
        ResourceError: a file may not be read.
    """
    models = _find_files(path, _MODEL_FILE)
    files = _only_files(models)
    if files is None:
        raise SourceError(
            f"{escape(path)} holds {'several models' if len(models) > 1 else 'the model as a whole and in parts'}",
            problems=[escape(name) for model in models.values() for name in model.values()],
            hint="move those that you do not mean into another directory, or give the file of a whole model",
        )
    names = _files_in_order(files)
    if None in files:
        whole = open_full_file(locate(path, names[0]))
        contents = replace(whole.contents, shows_cuts=False)
        checkpoint = replace(whole, writer="accelerate (FSDP, full)", contents=contents)
        plain = frozenset(whole.catalog.tensors)
    else:
        gathered = gather_files(path, [RankFile(name) for name in names])
        refuse_flat(path, gathered.catalog)
        checkpoint = gathered.as_checkpoint(path, "accelerate-bin", "accelerate (FSDP, a file for each rank)")
        plain = gathered.plain
    optimizer = _find_files(path, _OPTIMIZER_FILE)
    return replace(
        checkpoint,
        path=path,
        format="accelerate-bin",
        contents=replace(
            checkpoint.contents,
            optimizer=partial(_open_optimizer, path, optimizer, checkpoint.catalog, plain)
            if optimizer
            else None,
            assets=asset_directories(path),
        ),
        remarks=checkpoint.remarks.plus(
            skipped=explain_skipped(listing(path).difference(names), _SKIPPED_FILES)
        ),
    )


def _find_files(path: str, pattern: re.Pattern[str]) -> dict[int, _Files]:
    """Return the files of each model or optimizer, by number."""
    by_number: dict[int, _Files] = {}
    for match in filter(None, map(pattern.fullmatch, sorted(listing(path)))):
        rank = None if match[2] is None else int(match[2])
        by_number.setdefault(int(match[1] or 0), {}).setdefault(rank, match[0])
    return dict(sorted(by_number.items()))


def _only_files(by_number: dict[int, _Files]) -> _Files | None:
    """Return the files of the only model or optimizer; None if there are several, or one is there both whole and in parts."""
    (files, *more_files) = by_number.values()
    return None if more_files or (None in files and len(files) > 1) else files


def _files_in_order(files: _Files) -> list[str]:
    """Return the name of the whole file, or the names of all ranks' files in order.

    Raises:
        SourceError: the files of some ranks are missing.
    """
    ranks = {rank: name for rank, name in files.items() if rank is not None}
    if not ranks:
        return list(files.values())
    last = max(ranks)
    require_ranks(ranks[last].replace(f"_rank{last}.", "_rank{}."), ranks, last + 1)
    return [ranks[rank] for rank in sorted(ranks)]


def _open_optimizer(
    path: str, by_number: dict[int, _Files], model: Catalog, plain: frozenset[str]
) -> OptimizerState | UnusableOptimizer:
    files = _only_files(by_number)
    if files is None:
        return UnusableOptimizer(
            [name for group in by_number.values() for name in group.values()], "there are several of them"
        )
    state = open_optimizer_files(path, _files_in_order(files), parameters_of(model, plain))
    return replace(state, shows_cuts=False) if None in files and isinstance(state, OptimizerState) else state


OPENERS = {
    "accelerate": Opener(is_accelerate, open_accelerate),
    "accelerate-bin": Opener(is_accelerate_bin, open_accelerate_bin),
}
