"""accelerate and transformers' Trainer with FSDP, SHARDED_STATE_DICT: a DCP directory for each model and optimizer.

    checkpoint-200/                          (Trainer: trainer_state.json, scheduler.pt, rng_state_R.pth)
        pytorch_model_fsdp_0/.metadata       root `model`
        optimizer_0/.metadata                root `optimizer`

Source: accelerate 1.15, utils/fsdp_utils.py (save_fsdp_model, save_fsdp_optimizer).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.beside import asset_directories, has_any, inner, listing, own_name, parent
from shardkit.formats.checkpoint import Checkpoint
from shardkit.formats.dcp.checkpoint import open_dcp_directory

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
