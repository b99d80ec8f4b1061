"""Lightning's sharded checkpoints: a DCP directory with a `meta.pt` beside its `.metadata`.

    FSDPStrategy            model.<attribute>.<name>        optimizer_0.state...
    ModelParallelStrategy   state_dict.<attribute>.<name>   optimizer_0.state...
    Fabric                  whatever keys the script chose

`meta.pt` holds loops, callbacks and hyperparameters, but no usable weights: tensors that a callback put there are rank
0's parts alone. shardkit reads it, without executing anything, only to tell users why an EMA in it cannot be recovered.

Source: lightning 2.6, strategies/fsdp.py, strategies/model_parallel.py, callbacks/weight_averaging.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.links import locate
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    Opener,
    asset_directories,
    has_any,
    heads_of,
    listing,
)
from shardkit.formats.dcp.directory import open_dcp_checkpoint
from shardkit.formats.torchsave.file import DistributedRef, TensorRef, open_torch_file, tree_leaves

VERSION = "pytorch-lightning_version"
"""A key at the top of every checkpoint of a Trainer."""
AVERAGING, CURRENT = "averaging_state", "current_model_state"
"""Keys that a WeightAveraging callback adds: its own state, and the current weights, as the model has the average."""
AVERAGED = "the model is the running average that a WeightAveraging callback keeps, not the current weights"

_META = "meta.pt"
_STRATEGIES = {"model": "Lightning FSDPStrategy", "state_dict": "Lightning ModelParallelStrategy"}
_FABRIC_MODELS = ("model", "state_dict")
_OPTIMIZER = re.compile(r"optim(izer)?s?(_\d+)?")
_EMA = re.compile(
    r"(^|[^a-z])ema([^a-z]|$)|exponential.?moving|shadow.?param|averaged?.?(model|weights)", re.I
)
_EMA_CLASS = re.compile(r"EMA([^a-z]|$)|Ema([A-Z]|$)|([a-z]|^)EMA")
_ONLY_RANK_0 = "{} in meta.pt, which rank 0 alone writes: of a sharded model that is one part of each tensor"


class _Meta(NamedTuple):
    """Findings from the names in a `meta.pt`."""

    is_trainer: bool = False
    """True if a Trainer wrote it, and not a Fabric script."""
    refused: Mapping[str, str] = MappingProxyType({})
    """See `Contents.refused_weights`."""
    notes: tuple[str, ...] = ()
    """See `Remarks`."""
    problem: str | None = None
    """Why it could not be read; None if it could."""


def is_lightning(path: str) -> bool:
    """True for a DCP directory with a `meta.pt`."""
    names = listing(path)
    return _META in names and has_any(names, ".metadata", "__*.metadata")


def open_lightning(path: str) -> Checkpoint:
    """Open a checkpoint that a Lightning Trainer or Fabric saved with a sharded strategy.

    Raises:
        SourceError, IntegrityError, ResourceError: as for any DCP directory.
    """
    checkpoint, meta = open_dcp_checkpoint(path), _read_meta(path)
    tops = [str(head[0]) for head in heads_of(checkpoint.catalog, 1)]
    model = next((name for name in _FABRIC_MODELS if name in tops), None)
    roots: dict[str, tuple[str | int, ...]] = {} if model is None else {"model": (model,)}
    optimizers = sorted(name for name in tops if _OPTIMIZER.fullmatch(name))
    for number, name in enumerate(optimizers):
        roots["optimizer" if number == 0 else f"optimizer_{number}"] = (name,)
    is_trainer = meta.is_trainer or any(re.fullmatch(r"optimizer_\d+", name) for name in optimizers)
    return replace(
        checkpoint,
        format="lightning",
        writer=_STRATEGIES[model] if is_trainer and model else "Lightning Fabric",
        contents=Contents(roots=roots, refused_weights=meta.refused, assets=asset_directories(path)),
        remarks=checkpoint.remarks.plus(
            meta.notes, [(_META, meta.problem or "state of the trainer: not decoded for weights")]
        ),
    )


def _read_meta(path: str) -> _Meta:
    """Return the findings from the names in `meta.pt`. A damaged one is no error, as the weights are elsewhere."""
    try:
        tree = open_torch_file(locate(path, _META), _META).tree
    except SourceError as error:
        return _Meta(problem=f"not read: {error.message}")
    if not isinstance(tree, Mapping):
        return _Meta()
    is_trainer = VERSION in tree
    if holds_average(tree):
        current = _ONLY_RANK_0.format(f"the current weights are {CURRENT}")
        refused = {"current": current} if _has_tensors(tree.get(CURRENT)) else {}
        return _Meta(is_trainer, refused, (AVERAGED,))
    ema = next(map(escape, _find_ema(tree)), None)
    if ema is None:
        return _Meta(is_trainer)
    note = f"meta.pt holds an EMA ({ema}) that cannot be recovered: it is rank 0's part alone"
    return _Meta(is_trainer, {"ema": _ONLY_RANK_0.format(f"the EMA is {ema}")}, (note,))


def holds_average(tree: Mapping[str | int, object]) -> bool:
    """True if a WeightAveraging callback saved its average as the model, so that its own state has only counters."""
    return AVERAGING in tree and not _has_tensors(tree[AVERAGING])


def _find_ema(tree: object, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted path of each name that is about an EMA and has tensors below it."""
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        name = str(key)
        is_average = name == AVERAGING or _EMA.search(name) or _EMA_CLASS.search(name)
        if is_average and _has_tensors(value):
            yield ".".join((*path, name))
        else:
            yield from _find_ema(value, (*path, name))


def _has_tensors(tree: object) -> bool:
    """True for a tree with tensors that have dims; counters and decays are not weights."""
    return any(
        isinstance(value, DistributedRef) or (isinstance(value, TensorRef) and bool(value.shape))
        for _, value in tree_leaves(tree)
    )


OPENERS = {"lightning": Opener(is_lightning, open_lightning)}
