"""Lightning's sharded checkpoints: a DCP directory with a `meta.pt` beside its `.metadata`.

    FSDPStrategy            model.<attribute>.<name>        optimizer_0.state...
    ModelParallelStrategy   state_dict.<attribute>.<name>   optimizer_0.state...
    Fabric                  whatever keys the script chose

`meta.pt` holds loops, callbacks and hyperparameters, and no weights that could be used: what a callback put
there is rank 0's part alone. It is looked into, never executed, to say so where somebody expects an EMA.

Source: lightning 2.6, strategies/fsdp.py, strategies/model_parallel.py, callbacks/weight_averaging.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.links import locate
from shardkit.formats.checkpoint import Checkpoint, Opener, asset_directories, has_any, heads_of, listing
from shardkit.formats.dcp.directory import open_dcp_directory
from shardkit.formats.torchsave.file import DistributedRef, TensorRef, open_torch_file

_META = "meta.pt"
_STRATEGIES = {"model": "Lightning FSDPStrategy", "state_dict": "Lightning ModelParallelStrategy"}
_FABRIC_MODELS = ("model", "state_dict")
_OPTIMIZER = re.compile(r"optim(izer)?s?(_\d+)?")
_EMA = re.compile(
    r"(^|[^a-z])ema([^a-z]|$)|exponential.?moving|shadow.?param|averaged?.?(model|weights)", re.I
)
_EMA_CLASS = re.compile(r"EMA([^a-z]|$)|Ema([A-Z]|$)|([a-z]|^)EMA")
_AVERAGING, _CURRENT = "averaging_state", "current_model_state"
_MAX_DEPTH = 32
_ONLY_RANK_0 = "{} in meta.pt, which rank 0 alone writes: of a sharded model that is one part of each tensor"


class _Meta(NamedTuple):
    """What the names in a `meta.pt` tell."""

    is_trainer: bool
    """Written by a Trainer, not by a Fabric script."""
    ema: str | None
    """Where in it tensors of an EMA lie."""
    is_averaged: bool
    """The model that was saved is the average that a WeightAveraging callback keeps."""
    problem: str | None
    """Why it could not be looked into."""


def is_lightning(path: str) -> bool:
    """True for a DCP directory with a `meta.pt`."""
    names = listing(path)
    return _META in names and has_any(names, ".metadata", "__*.metadata")


def open_lightning(path: str) -> Checkpoint:
    """Open what a Lightning Trainer or Fabric saved from a sharded strategy.

    Raises:
        SourceError, IntegrityError, ResourceError: as for any DCP directory.
    """
    checkpoint, meta = open_dcp_directory(path), _read_meta(path)
    tops = [str(head[0]) for head in heads_of(checkpoint.catalog, 1)]
    model = next((name for name in _FABRIC_MODELS if name in tops), None)
    roots: dict[str, tuple[str | int, ...]] = {} if model is None else {"model": (model,)}
    optimizers = sorted(name for name in tops if _OPTIMIZER.fullmatch(name))
    for number, name in enumerate(optimizers):
        roots["optimizer" if number == 0 else f"optimizer_{number}"] = (name,)
    is_trainer = meta.is_trainer or any(re.fullmatch(r"optimizer_\d+", name) for name in optimizers)
    return replace(
        checkpoint,
        path=path,
        format="lightning",
        writer=_STRATEGIES[model] if is_trainer and model else "Lightning Fabric",
        roots=roots,
        refused_weights=_refused(meta),
        assets=asset_directories(path),
        skipped=(
            *checkpoint.skipped,
            (_META, meta.problem or "state of the trainer: not decoded for weights"),
        ),
        notes=(*checkpoint.notes, *_notes(meta)),
    )


def _read_meta(path: str) -> _Meta:
    """Look at the names in `meta.pt`; a damaged one does not stand in the way of the weights."""
    try:
        tree = open_torch_file(locate(path, _META), _META).tree
    except SourceError as error:
        return _Meta(False, None, False, f"not looked into: {error.message}")
    if not isinstance(tree, Mapping):
        return _Meta(False, None, False, None)
    is_averaged = _AVERAGING in tree and next(_tensors(tree.get(_CURRENT)), None) is not None
    ema = None if is_averaged else next(_find_ema(tree), None)
    return _Meta("pytorch-lightning_version" in tree, ema, is_averaged, None)


def _find_ema(tree: object, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield where tensors lie below a name that speaks of an EMA."""
    if not isinstance(tree, Mapping) or len(path) > _MAX_DEPTH:
        return
    for key, value in tree.items():
        name = str(key)
        if (_EMA.search(name) or _EMA_CLASS.search(name)) and next(_tensors(value), None) is not None:
            yield ".".join((*path, name))
        else:
            yield from _find_ema(value, (*path, name))


def _tensors(tree: object, depth: int = 0) -> Iterator[object]:
    """Yield the tensors with dims below a node; counters and decays are not weights."""
    if isinstance(tree, TensorRef):
        if tree.shape:
            yield tree
    elif isinstance(tree, DistributedRef):
        yield tree
    elif depth <= _MAX_DEPTH and isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value, depth + 1)
    elif depth <= _MAX_DEPTH and isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value, depth + 1)


def _refused(meta: _Meta) -> dict[str, str]:
    if meta.is_averaged:
        return {"current": _ONLY_RANK_0.format(f"the current weights are {_CURRENT}")}
    if meta.ema is not None:
        return {"ema": _ONLY_RANK_0.format(f"the EMA is {escape(meta.ema)}")}
    return {}


def _notes(meta: _Meta) -> Iterator[str]:
    if meta.is_averaged:
        yield "the weights are the running average that a WeightAveraging callback keeps, not the current ones"
    if meta.ema is not None:
        yield f"meta.pt holds an EMA ({escape(meta.ema)}) that cannot be recovered: it is rank 0's part alone"


OPENERS = {"lightning": Opener(is_lightning, open_lightning)}
