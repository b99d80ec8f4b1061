"""torch_checkpointing: a file of `torch.save` for each item of the checkpoint and each rank.

    metadata.pkl             the items with tensors, the number of ranks
    model_0.pt, model_1.pt   DTensors
    step_0.pt ...            items without tensors, which metadata.pkl does not name

`metadata.pkl` consists of plain dicts; shardkit interprets the pickle, and executes nothing.

Source: torch_checkpointing 0.1.1, metadata_serialization.py and checkpoint_layout.py.
"""

from __future__ import annotations

import os
from dataclasses import replace

from shardkit.core.text import escape
from shardkit.errors import ShardkitError, SourceError
from shardkit.files import storage
from shardkit.files.links import read_inside
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    Opener,
    asset_directories,
    explain_skipped,
    listing,
)
from shardkit.formats.rankfiles.files import RankFile, gather_files
from shardkit.pickles.policies import Inert, UnmadeObject

_METADATA = "metadata.pkl"
_MAX_METADATA = 1 << 25
_MAX_RANKS = 1 << 17
_TORCH = "TorchSerialization"
_SKIPPED = {r".*_.*\.(pt|json)": "holds no tensors"}

_Tree = dict[str | int, object]


def is_torch_checkpointing(path: str) -> bool:
    """True for a directory whose `metadata.pkl` is torch_checkpointing's."""
    if _METADATA not in listing(path):
        return False
    try:
        _read_metadata(path)
    except ShardkitError:
        return False
    return True


def open_torch_checkpointing(path: str) -> Checkpoint:
    """Open all items that have tensors. If there are several, each name begins with its item's name.

    Raises:
        SourceError: damaged, not saved with `torch.save`, or files of ranks are missing or contradict each other.
        ResourceError: a file may not be read.
    """
    items, num_ranks = _read_metadata(path)
    names = [name for name in items if isinstance(name, str)]
    files: list[RankFile] = []
    problems: list[str] = []
    for name in names:
        for rank in range(num_ranks):
            try:
                file_name = _file_of(path, name, items[name], rank)
            except ValueError as error:
                problems.append(f"item {escape(name)}, rank {rank}: {error}")
                continue
            files.append(RankFile(file_name, (name,) if len(names) > 1 else ()))
    SourceError.raise_for(
        problems,
        f"{len(problems)} files that {_METADATA} lists cannot be read",
        hint="copy all files of the checkpoint, and save tensors with torch's own serialization",
    )
    gathered = gather_files(path, files)
    is_alone = len(names) == 1
    root_names = [name for name in names if name in ("model", "optimizer", "ema")]
    checkpoint = gathered.as_checkpoint(path, "torch-checkpointing", "torch_checkpointing")
    return replace(
        checkpoint,
        contents=Contents(
            roots={name: () if is_alone else (name,) for name in root_names}, assets=asset_directories(path)
        ),
        remarks=checkpoint.remarks.plus(
            skipped=explain_skipped(listing(path) - {file.name for file in files}, _SKIPPED)
        ),
    )


def _read_metadata(path: str) -> tuple[_Tree, int]:
    """Return the items that have tensors, and the number of ranks.

    Raises:
        SourceError: not the metadata of torch_checkpointing.
    """
    data = read_inside(path, _METADATA, _MAX_METADATA)
    pickle = Inert(
        data, lambda module, name: UnmadeObject(f"{module}.{name}"), lambda value: UnmadeObject("storage")
    )
    tree = pickle.run(_METADATA)
    items = tree.get("metadata") if isinstance(tree, dict) else None
    num_ranks = tree.get("world_size") if isinstance(tree, dict) else None
    if not isinstance(items, dict) or type(num_ranks) is not int or not 0 < num_ranks <= _MAX_RANKS:
        raise SourceError(f"{_METADATA} is not that of torch_checkpointing")
    return items, num_ranks


def _file_of(path: str, name: str, item: object, rank: int) -> str:
    """Return the name of a rank's file of an item.

    Raises:
        ValueError: the file is missing, is outside the checkpoint, or is not a file of torch.save.
    """
    infos = item.get("rank_to_layout_info") if isinstance(item, dict) else None
    info = infos.get(rank) if isinstance(infos, dict) else None
    file_name = f"{name}_{rank}.pt"
    if isinstance(info, dict):
        serialization = info.get("serialization_format")
        kind = serialization.get("type") if isinstance(serialization, dict) else None
        if kind != _TORCH:
            raise ValueError(f"saved with {escape(str(kind))}, not with torch.save")
        file_name = str(info.get("file_path", "")).replace("{rank}", str(rank))
    directory = os.path.join(storage.realpath(path), "")
    if not storage.realpath(os.path.join(path, file_name)).startswith(directory):
        raise ValueError(f"{escape(file_name)} lies outside of the checkpoint")
    if not storage.lexists(os.path.join(path, file_name)):
        raise ValueError(f"{escape(file_name)} is missing")
    return file_name


OPENERS = {"torch-checkpointing": Opener(is_torch_checkpointing, open_torch_checkpointing)}
