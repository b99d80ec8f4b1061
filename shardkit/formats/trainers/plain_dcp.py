"""Trainers that save plain DCP: what surrounds it, and what the beginnings of its names mean.

Two tables. `_STRUCTURES`: the checkpoint is a directory below the one that people name, with the trainer's
own files beside it. `_WRITERS`: the directory is DCP itself, and its names tell who wrote it. Tensor names
stay as they are; key rules map them to the Hub's if they differ.

Source: docs and savers of mini_trainer 0.9, OLMo-core 2.3, NeMo Automodel 0.7, NeMo-RL 0.4, prime-rl 0.3,
verl 0.9, SkyRL, VeOmni (its layout of September 2026 too), fms-fsdp, Composer 0.30, AReaL, torchtitan 0.3,
torchtune 0.6, XTuner V1 (both its layouts); torch's AppState recipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from shardkit.core.text import escape
from shardkit.files import manifest
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    Opener,
    asset_directories,
    has_any,
    heads_of,
    inner,
    listing,
    matching,
    own_name,
    parent,
)
from shardkit.keys.trainer_state import is_averaged, is_optimizer_name, is_optimizer_of

Roots = Mapping[str, tuple[str | int, ...]]

_WEIGHTS = (
    ".metadata",
    "__*.metadata",
    "shard-*-model-*-of-*.safetensors",
    "model_world_size_*_rank_*.pt",
    "sharded",
)
_OPTIMIZERS = ("optim", "optimizer", "optimizers", "optimizer_state")
_VEOMNIS_LAST = "checkpoint_manifest.json"
_STEP = re.compile(r"(?:step|iter|epoch|checkpoint|ckpt)[-_=]?[0-9]+", re.IGNORECASE)
_NOT_SHOWN = (
    ".*",
    manifest.NAME,
    "*.md",
    "config.json",
    "*token*",
    "*.jinja",
    "huggingface",
    "hf",
    "*.yaml",
    "*.log",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerDirectory:
    """A directory that a trainer puts around a checkpoint."""

    format: str | None
    """Stable identifier; None if the checkpoint inside has one of its own."""
    writer: str | None
    """For people; None if only the checkpoint inside can tell."""
    weights: tuple[str, ...]
    """Where the checkpoint may lie in it, best first."""
    neighbours: tuple[str, ...] = ()
    """Patterns of names beside it, one of which must be there; or directories, relative to the one that people name."""
    roots: Roots = field(default_factory=dict)
    """As in `Checkpoint`, if the trainer's own code fixes them."""
    assets: tuple[str, ...] = (".",)
    """Where config and tokenizer may lie in it."""
    last: str | None = None
    """The file that the trainer writes last."""
    is_taken_without_last: bool = False
    """Without that file it is taken if nothing finished is there: DCP's own markers prove its tensors."""


class RecognisedDirectory(NamedTuple):
    """A structure, recognised."""

    structure: TrainerDirectory
    weights: str
    """The directory of the checkpoint in it."""


_VEOMNI = TrainerDirectory(
    format="veomni",
    writer="VeOmni",
    weights=("model/ckpt",),
    neighbours=("model/optimizer", _VEOMNIS_LAST),
    roots={"model": ("model",)},
    assets=("hf_ckpt", "."),
    last=_VEOMNIS_LAST,
    is_taken_without_last=True,
)
_STRUCTURES = (
    TrainerDirectory(
        format="verl-megatron",
        writer="verl (Megatron)",
        weights=("model/dist_ckpt", "dist_ckpt", "actor/model/dist_ckpt", "actor/dist_ckpt"),
        assets=("model/huggingface", "huggingface", "actor/model/huggingface", "actor/huggingface"),
    ),
    TrainerDirectory(
        format="mini-trainer",
        writer="mini_trainer",
        weights=("distributed",),
        neighbours=("training_state.pt", "optimizer_rank_*.pt", "rng_state_rank_*.pt"),
        roots={"model": ("model",)},
        last="training_state.pt",
    ),
    TrainerDirectory(
        format="olmo-core",
        writer="OLMo-core",
        weights=("model_and_optim",),
        roots={"model": ("model",), "optimizer": ("optim",)},
        last=".metadata.json",
    ),
    TrainerDirectory(
        format="nemo-rl",
        writer="NeMo-RL",
        weights=("policy/weights/model", "policy/weights"),
        assets=("policy/tokenizer", "policy"),
    ),
    TrainerDirectory(format="skyrl", writer="SkyRL", weights=("policy",), assets=("policy/huggingface",)),
    TrainerDirectory(
        format="prime-rl",
        writer="prime-rl",
        weights=("trainer",),
        roots={"model": ("app", "model"), "optimizer": ("app", "optimizers")},
    ),
    TrainerDirectory(
        format="nemo",
        writer="NeMo 2.0",
        weights=("weights",),
        neighbours=("context",),
        assets=("context", "context/nemo_tokenizer"),
    ),
    TrainerDirectory(
        format="nemo-automodel",
        writer="NeMo Automodel",
        weights=("model",),
        neighbours=("optim", "step_scheduler*", "losses.json"),
        roots={"model": ()},
        assets=("model/.hf_metadata", "model", "."),
    ),
    _VEOMNI,
    TrainerDirectory(
        format="xtuner",
        writer="XTuner V1",
        weights=("weights", "model"),
        neighbours=("trainer_config.json", "train_state.json"),
        roots={"model": ("model",), "optimizer": ("optimizer",)},
        last="train_state.json",
    ),
    # No trainer in particular: the model's part of a checkpoint in a directory of its own.
    TrainerDirectory(format=None, writer=None, weights=("model", "weights", "distcp", "dcp", "fsdp")),
)


class _TrainerNames(NamedTuple):
    """Names in a DCP directory that only one trainer gives."""

    name: str
    model: tuple[str, ...] | None
    """The root that must be there, and is the model's; None if the model's names stand at the top."""
    optimizers: tuple[tuple[str, ...], ...] = ()
    """Where its optimizer state may be."""
    mark: str | None = None
    """A pattern that must match a name beside `.metadata`."""
    also: tuple[tuple[str, ...], ...] = ()
    """Other beginnings, one of which must be there."""
    ending: str = ""
    """What the name of some tensor must end with."""


_APP = ("app", "model")
# The first that fits counts.
_WRITERS = (
    _TrainerNames("fms-fsdp", ("model_state",), (("optimizer_state",),)),
    _TrainerNames("VeOmni", ("model",), (("optimizer",),), mark="extra_state"),
    _TrainerNames("Composer", ("state", "model"), (("state", "optimizers"),)),
    _TrainerNames("AReaL", ("dcp", "model"), (("dcp", "optimizer"), ("dcp", "optim"))),
    _TrainerNames(
        "prime-rl", _APP, (("app", "optimizers"),), also=(("app", "progress"), ("app", "optimizers"))
    ),
    _TrainerNames("torch's AppState recipe", _APP, (("app", "optim"), ("app", "optimizer"))),
    _TrainerNames("torchtitan", None, (("optimizer",),), also=(("train_state",), ("tok_embeddings.weight",))),
    _TrainerNames("torchtune", None, ending=".sa_norm.scale"),
)


def find_structure(path: str) -> RecognisedDirectory | None:
    """Return the structure of a directory, going by the names in it; None if it has none of them."""
    names = listing(path)
    if has_any(names, ".metadata", "__*.metadata"):
        return None
    for structure in _STRUCTURES:
        if structure.neighbours and not any(_lies_in(path, names, name) for name in structure.neighbours):
            continue
        for below in structure.weights:
            weights = inner(path, below) if below.partition("/")[0] in names else None
            if weights is not None and has_any(listing(weights), *_WEIGHTS):
                return RecognisedDirectory(structure, weights)
    return _pair(path, names)


def _lies_in(path: str, names: frozenset[str], neighbour: str) -> bool:
    first, _, below = neighbour.partition("/")
    return inner(path, neighbour) is not None if below and first in names else has_any(names, neighbour)


def _pair(path: str, names: frozenset[str]) -> RecognisedDirectory | None:
    """Return a directory with the weights of one model beside one of its optimizer, whatever the two are called.

    A run's directory, with other steps beside them, is none.
    """
    optimizers = [name for name in names if is_optimizer_name(name) and _has_weights(path, name)]
    if not optimizers:
        return None
    models = [
        name
        for name in names
        if not is_optimizer_name(name) and not is_averaged(name) and _has_weights(path, name)
    ]
    is_only = len(models) == 1
    paired = [
        name
        for name in models
        if any(is_optimizer_of(optimizer, name, is_only=is_only) for optimizer in optimizers)
    ]
    steps = {name for name in names.difference(optimizers, paired) if _STEP.search(name)}
    if len(paired) != 1 or any(inner(path, name) is not None for name in steps):
        return None
    return RecognisedDirectory(
        TrainerDirectory(format=None, writer=None, weights=(paired[0],)), os.path.join(path, paired[0])
    )


def optimizers_beside(path: str, names: Collection[str]) -> set[str]:
    """Return those of the names in a directory that are DCP directories of optimizers of models beside them."""
    optimizers = [name for name in names if is_optimizer_name(name) and _has_weights(path, name)]
    models = [
        name for name in names if optimizers and not is_optimizer_name(name) and _has_weights(path, name)
    ]
    return {
        name for name in optimizers if any(is_optimizer_of(name, model, is_only=True) for model in models)
    }


def _has_weights(path: str, name: str) -> bool:
    weights = inner(path, name)
    return weights is not None and has_any(listing(weights), *_WEIGHTS)


def lacks_last(path: str) -> str | None:
    """Return the doubt about a checkpoint that may be taken all the same; None if there is none."""
    recognised = find_structure(path)
    structure = recognised.structure if recognised is not None else _VEOMNI if _holds_modules(path) else None
    if structure is None or not structure.is_taken_without_last:
        return None
    return next(_unfinished(path, structure), None)


def _holds_modules(path: str) -> bool:
    """True for a step of several modules, each of which has what `_VEOMNI` expects of the only one."""
    models = inner(path, "model") if "model" in listing(path) else None
    return models is not None and any(
        inner(models, f"{name}/ckpt") and inner(models, f"{name}/optimizer") for name in listing(models)
    )


def inside(checkpoint: Checkpoint, recognised: RecognisedDirectory, path: str) -> Checkpoint:
    """Return the checkpoint inside a structure as that of the whole directory.

    Args:
        checkpoint: `recognised.weights`, opened.
        path: the directory that has the structure.
    """
    structure = recognised.structure
    places = [inner(path, below) if below != "." else path for below in structure.assets]
    return replace(
        checkpoint,
        path=path,
        format=structure.format or checkpoint.format,
        writer=structure.writer or checkpoint.writer,
        contents=_with_more(
            checkpoint.contents, asset_directories(*places), _present(structure.roots, checkpoint)
        ),
        remarks=checkpoint.remarks.plus(_unfinished(path, structure), _beside(path, recognised)),
    )


def open_plain_dcp(directory: str) -> Checkpoint:
    """Open a DCP directory; its names, and the files beside it, tell who wrote it.

    Raises:
        SourceError, ResourceError: as `open_dcp_checkpoint`.
    """
    # Here, because this module is also asked about directories of other formats.
    from shardkit.formats.dcp.directory import open_dcp_checkpoint

    checkpoint = open_dcp_checkpoint(directory)
    names = listing(directory)
    assets = asset_directories(directory, inner(directory, "huggingface"), inner(directory, "hf"))
    heads = heads_of(checkpoint.catalog, 2)
    tops = {head[0] for head in heads}
    checkpoint = replace(
        checkpoint,
        contents=_with_more(checkpoint.contents, assets, {}),
        remarks=checkpoint.remarks.plus(_only_optimizer(tops, directory)),
    )
    if manifest.NAME in names and not manifest.lists_files(directory):
        return replace(checkpoint, writer="shardkit")
    for writer in _WRITERS:
        if writer.mark is not None and not has_any(names, writer.mark):
            continue
        if not any(name.endswith(writer.ending) for name in checkpoint.catalog.tensors):
            continue
        begins = partial(_begins, heads=heads, tops=tops)
        if (writer.model is None or begins(writer.model)) and (
            not writer.also or any(map(begins, writer.also))
        ):
            optimizer = next(filter(begins, writer.optimizers), None)
            candidates = {"model": writer.model, "optimizer": optimizer}
            roots = {kind: root for kind, root in candidates.items() if root is not None}
            return replace(
                checkpoint, writer=writer.name, contents=_with_more(checkpoint.contents, (), roots)
            )
    return checkpoint


def _with_more(contents: Contents, assets: Iterable[str], roots: Roots) -> Contents:
    """Return contents with directories of assets that come first, and with further roots."""
    return replace(
        contents,
        assets=tuple(dict.fromkeys((*assets, *contents.assets))),
        roots={**contents.roots, **roots},
    )


def _begins(head: tuple[str, ...], heads: Collection[tuple[str | int, ...]], tops: set[str | int]) -> bool:
    """True if names begin with `head`, one step or two; a state dict may have two in one step, with a dot between."""
    if len(head) == 2:
        return head in heads
    return head[0] in tops or ("." in head[0] and tuple(head[0].split(".")) in heads)


def _present(roots: Roots, checkpoint: Checkpoint) -> dict[str, tuple[str | int, ...]]:
    """Return the roots that some names begin with."""
    return {kind: root for kind, root in roots.items() if root in heads_of(checkpoint.catalog, len(root))}


def _only_optimizer(tops: set[str | int], directory: str) -> Iterator[str]:
    kinds = {str(top).rpartition("_")[0] if str(top)[-1:].isdigit() else str(top) for top in tops}
    if not kinds or not kinds <= set(_OPTIMIZERS):
        return
    siblings = matching(listing(parent(directory)) - {own_name(directory)}, "model", "pytorch_model_fsdp_*")
    where = f"; the model's is {escape(siblings[0])}, beside it" if siblings else ""
    yield f"this is the state of an optimizer{where}"


def _beside(path: str, recognised: RecognisedDirectory) -> Iterator[tuple[str, str]]:
    """Yield what lies beside the weights and was not read."""
    above = ""
    for segment in os.path.relpath(recognised.weights, path).split(os.sep):
        names = listing(os.path.join(path, above))
        for name in sorted(names - {segment} - set(matching(names, *_NOT_SHOWN))):
            reason = "optimizer state" if is_optimizer_name(name) else "not a part of the weights"
            yield os.path.join(above, name), reason
        above = os.path.join(above, segment)


def _unfinished(path: str, structure: TrainerDirectory) -> Iterator[str]:
    if structure.last is not None and structure.last not in listing(path):
        yield f"{structure.last} is missing, which {structure.writer} writes last: the save may not have finished"


def _is_dcp(directory: str) -> bool:
    from shardkit.formats.dcp.directory import is_dcp

    return is_dcp(directory)


OPENERS = {"dcp": Opener(_is_dcp, open_plain_dcp)}
