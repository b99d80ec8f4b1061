"""Checkpoints of verl with FSDP: a file of `torch.save` for each rank, and a folder with config and tokenizer.

    global_step_100/
        actor/                                   (and critic/)
            model_world_size_8_rank_0.pt ...     DTensors (FSDP2, or FSDP1 with a mesh) or ShardedTensors
            optim_world_size_8_rank_0.pt ...
            fsdp_config.json                     FSDP_version, world_size (verl 0.5 and later)
            huggingface/                         config, tokenizer; the model too if verl's settings ask for it

Source: verl 0.9, utils/checkpoint/fsdp_checkpoint_manager.py and model_merger/fsdp_model_merger.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.links import read_inside
from shardkit.files.strict_json import parse_object
from shardkit.formats.contract import (
    Checkpoint,
    Opener,
    asset_directories,
    explain_skipped,
    folder_below,
    listing,
)
from shardkit.formats.contract.optimizer import OptimizerState, UnusableOptimizer
from shardkit.formats.rankfiles.files import GatheredTensors, RankFile, gather_files, require_ranks
from shardkit.formats.rankfiles.optimizer import open_optimizer_files, parameters_of

_MODEL = re.compile(r"model_world_size_([1-9]\d{0,5})_rank_(0|[1-9]\d{0,5})\.pt")
_SKIPPED = {
    r"optim_world_size_\d+_rank_\d+\.pt": "optimizer state",
    r"extra_state_world_size_\d+_rank_\d+\.pt": "schedulers and random states",
    _MODEL.pattern: "of a save with another number of ranks",
    "lora_adapter": "the adapter that the checkpoint's tensors hold too",
}
_ROLES = ("actor", "critic")
_CONFIG, _LORA = "fsdp_config.json", "lora_train_meta.json"
_MAX_CONFIG = 1 << 16


class _RankDirectory(NamedTuple):
    """The directory with the ranks' files."""

    path: str
    role: str | None
    """Its name below the path that the user gave; None if it is that path."""


def is_verl(path: str) -> bool:
    """True for a directory with files `model_world_size_W_rank_R.pt`, or whose `actor/` or `critic/` has such files."""
    return _find_home(path) is not None


def open_verl(path: str) -> Checkpoint:
    """Open the model of a verl checkpoint: the actor, if there is a critic too. Its optimizer is opened on demand.

    Raises:
        SourceError: files of ranks are missing, damaged or contradict each other.
        ResourceError: a file may not be read.
    """
    home = _find_home(path)
    if home is None:
        raise SourceError(f"{escape(path)} holds no model_world_size_W_rank_R.pt")
    config = _read_config(home.path, _CONFIG)
    files = _choose_files(home.path, config.get("world_size"))
    gathered = gather_files(home.path, [RankFile(name) for name in files])
    states = ["optim" + name.removeprefix("model") for name in files]
    has_states = not listing(home.path).isdisjoint(states)
    version = config.get("FSDP_version")
    checkpoint = gathered.as_checkpoint(path, "verl", f"verl (FSDP{version if version in (1, 2) else ''})")
    return replace(
        checkpoint,
        contents=replace(
            checkpoint.contents,
            optimizer=partial(_open_optimizer, home.path, states, gathered) if has_states else None,
            assets=asset_directories(
                folder_below(home.path, "huggingface"), home.path, folder_below(path, "huggingface")
            ),
        ),
        remarks=checkpoint.remarks.plus(_notes(path, home), _skipped(path, home, files)),
    )


def _find_home(path: str) -> _RankDirectory | None:
    if any(map(_MODEL.fullmatch, listing(path))):
        return _RankDirectory(path, None)
    for role in _ROLES:
        directory = folder_below(path, role)
        if directory is not None and any(map(_MODEL.fullmatch, listing(directory))):
            return _RankDirectory(directory, role)
    return None


def _read_config(directory: str, name: str) -> dict[str, object]:
    """Return the content of a JSON file in the directory, or {} if there is no such file."""
    if name not in listing(directory):
        return {}
    return parse_object(read_inside(directory, name, _MAX_CONFIG), name)


def _choose_files(directory: str, world_size: object) -> list[str]:
    """Return the model's files in the order of the ranks.

    Args:
        directory: with the files.
        world_size: from `fsdp_config.json`; None if it is not recorded there.

    Raises:
        SourceError: some are missing, or the files of several world sizes are complete.
    """
    by_size: dict[int, set[int]] = {}
    for match in filter(None, map(_MODEL.fullmatch, listing(directory))):
        by_size.setdefault(int(match[1]), set()).add(int(match[2]))
    sizes = sorted(by_size)
    if type(world_size) is int and world_size in by_size:
        sizes = [world_size]
    elif len(sizes) > 1:  # two runs saved into one directory, and one of them may be incomplete
        sizes = [size for size in sizes if by_size[size] >= set(range(size))] or sizes[-1:]
    if len(sizes) > 1:
        raise SourceError(
            f"{escape(directory)} holds models saved by {' and by '.join(map(str, sizes))} ranks",
            hint="move the files of all but one into another directory",
        )
    size = sizes[0]
    pattern = f"model_world_size_{size}_rank_{{}}.pt"
    require_ranks(pattern, by_size[size], size)
    return [pattern.format(rank) for rank in range(size)]


def _open_optimizer(
    directory: str, names: list[str], model: GatheredTensors
) -> OptimizerState | UnusableOptimizer:
    file_names = listing(directory)
    ranks = {rank for rank, name in enumerate(names) if name in file_names}
    require_ranks(names[0].replace("_rank_0.", "_rank_{}."), ranks, len(names))
    return open_optimizer_files(directory, names, parameters_of(model.catalog, model.plain, model.contents))


def _skipped(path: str, home: _RankDirectory, read_names: list[str]) -> Iterator[tuple[str, str]]:
    yield from explain_skipped(listing(home.path).difference(read_names), _SKIPPED)
    for role in _ROLES:
        if home.role is not None and role != home.role and folder_below(path, role) is not None:
            yield role, "another model"


def _notes(path: str, home: _RankDirectory) -> Iterator[str]:
    if home.role == "actor" and folder_below(path, "critic") is not None:
        yield "the actor was opened; give the directory critic to open the critic"
    lora = _read_config(home.path, _LORA)
    if lora:
        facts = ", ".join(f"{key}={value}" for key, value in lora.items())
        yield f"trained with LoRA: {escape(facts)} ({_LORA})"


OPENERS = {"verl": Opener(is_verl, open_verl)}
