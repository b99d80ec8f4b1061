"""Recognise the trainers that save plain DCP, by the directories around it or by its names.

There are two tables. In `_STRUCTURES` the checkpoint is inside the directory that users name, with the trainer's
own files beside it. In `_WRITERS` the directory is DCP itself, and the beginnings of its names identify the trainer.
Tensor names are not changed; key rules map them to the Hub's if they differ.

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
    folder_below,
    folder_name,
    has_any,
    heads_of,
    listing,
    matching_names,
    parent_folder,
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
    """The trainer's name, for people; None if that of the checkpoint inside is used."""
    weights: tuple[str, ...]
    """Folders that may hold the checkpoint, best first."""
    neighbours: tuple[str, ...] = ()
    """Patterns of names in the directory, or paths of folders below it; one of them must exist."""
    roots: Roots = field(default_factory=dict)
    """As in `Contents`, if the trainer's own code fixes them."""
    assets: tuple[str, ...] = (".",)
    """Folders that may hold config and tokenizer."""
    last: str | None = None
    """The file that the trainer writes last, or None."""
    is_taken_without_last: bool = False
    """True if a save without that file may be used when there is no finished one: DCP's own markers prove its tensors."""


class RecognisedDirectory(NamedTuple):
    """A directory with one of the structures."""

    structure: TrainerDirectory
    weights: str
    """The path of the checkpoint inside."""


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
    # Not of a particular trainer: the model's part of a checkpoint has a folder of its own.
    TrainerDirectory(format=None, writer=None, weights=("model", "weights", "distcp", "dcp", "fsdp")),
)


class _TrainerNames(NamedTuple):
    """The names in a DCP directory by which one trainer is recognised."""

    name: str
    model: tuple[str, ...] | None
    """The root of the model, which must exist; None if the model's names have no root."""
    optimizers: tuple[tuple[str, ...], ...] = ()
    """Possible roots of the optimizer's state."""
    mark: str | None = None
    """A pattern that must match the name of a file beside `.metadata`."""
    also: tuple[tuple[str, ...], ...] = ()
    """Further roots, one of which must exist."""
    ending: str = ""
    """An ending that the name of some tensor must have."""


_APP = ("app", "model")
# The first match counts.
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
    """Return the structure of a directory by the names in it, or None."""
    names = listing(path)
    if has_any(names, ".metadata", "__*.metadata"):
        return None
    for structure in _STRUCTURES:
        if structure.neighbours and not any(
            _has_neighbour(path, names, name) for name in structure.neighbours
        ):
            continue
        for below in structure.weights:
            weights = folder_below(path, below) if below.partition("/")[0] in names else None
            if weights is not None and has_any(listing(weights), *_WEIGHTS):
                return RecognisedDirectory(structure, weights)
    return _find_pair(path, names)


def _has_neighbour(path: str, names: frozenset[str], neighbour: str) -> bool:
    first, _, below = neighbour.partition("/")
    return (
        folder_below(path, neighbour) is not None if below and first in names else has_any(names, neighbour)
    )


def _find_pair(path: str, names: frozenset[str]) -> RecognisedDirectory | None:
    """Recognise a directory with two DCP folders, one of a model and one of its optimizer, or return None.

    Their names may be any that keys.trainer_state pairs. A run's directory that also has folders of other steps is not
    recognised.
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
    if len(paired) != 1 or any(folder_below(path, name) is not None for name in steps):
        return None
    return RecognisedDirectory(
        TrainerDirectory(format=None, writer=None, weights=(paired[0],)), os.path.join(path, paired[0])
    )


def optimizers_beside(path: str, names: Collection[str]) -> set[str]:
    """Return the names of DCP folders that hold the optimizer of a model in another folder of the same directory."""
    optimizers = [name for name in names if is_optimizer_name(name) and _has_weights(path, name)]
    models = [
        name for name in names if optimizers and not is_optimizer_name(name) and _has_weights(path, name)
    ]
    return {
        name for name in optimizers if any(is_optimizer_of(name, model, is_only=True) for model in models)
    }


def _has_weights(path: str, name: str) -> bool:
    weights = folder_below(path, name)
    return weights is not None and has_any(listing(weights), *_WEIGHTS)


def missing_last_warning(path: str) -> str | None:
    """Return a warning if the trainer's last file is missing in a checkpoint that may be used without it, else None."""
    recognised = find_structure(path)
    structure = recognised.structure if recognised is not None else _VEOMNI if _holds_modules(path) else None
    if structure is None or not structure.is_taken_without_last:
        return None
    return next(_unfinished_warnings(path, structure), None)


def _holds_modules(path: str) -> bool:
    """True for a checkpoint of VeOmni with several modules, each with the folders that `_VEOMNI` has for a single one."""
    models = folder_below(path, "model") if "model" in listing(path) else None
    return models is not None and any(
        folder_below(models, f"{name}/ckpt") and folder_below(models, f"{name}/optimizer")
        for name in listing(models)
    )


def checkpoint_of_structure(checkpoint: Checkpoint, recognised: RecognisedDirectory, path: str) -> Checkpoint:
    """Return the checkpoint inside a trainer's directory as the checkpoint of that directory.

    Args:
        checkpoint: opened from `recognised.weights`.
        recognised: the structure of the directory.
        path: of the directory.
    """
    structure = recognised.structure
    places = [folder_below(path, below) if below != "." else path for below in structure.assets]
    return replace(
        checkpoint,
        path=path,
        format=structure.format or checkpoint.format,
        writer=structure.writer or checkpoint.writer,
        contents=_with_additions(
            checkpoint.contents, asset_directories(*places), _present_roots(structure.roots, checkpoint)
        ),
        remarks=checkpoint.remarks.plus(
            _unfinished_warnings(path, structure), _unread_names(path, recognised)
        ),
    )


def open_plain_dcp(directory: str) -> Checkpoint:
    """Open a DCP directory, and recognise its writer by its names and the files beside it.

    Raises:
        SourceError, ResourceError: as `open_dcp_checkpoint`.
    """
    # Imported here, because this module also recognises directories of other formats.
    from shardkit.formats.dcp.directory import open_dcp_checkpoint

    checkpoint = open_dcp_checkpoint(directory)
    names = listing(directory)
    assets = asset_directories(
        directory, folder_below(directory, "huggingface"), folder_below(directory, "hf")
    )
    heads = heads_of(checkpoint.catalog, 2)
    tops = {head[0] for head in heads}
    checkpoint = replace(
        checkpoint,
        contents=_with_additions(checkpoint.contents, assets, {}),
        remarks=checkpoint.remarks.plus(_optimizer_notes(tops, directory)),
    )
    if manifest.NAME in names and not manifest.lists_files(directory):
        return replace(checkpoint, writer="shardkit")
    for writer in _WRITERS:
        if writer.mark is not None and not has_any(names, writer.mark):
            continue
        if not any(name.endswith(writer.ending) for name in checkpoint.catalog.tensors):
            continue
        begins = partial(_have_root, heads=heads, tops=tops)
        if (writer.model is None or begins(writer.model)) and (
            not writer.also or any(map(begins, writer.also))
        ):
            optimizer = next(filter(begins, writer.optimizers), None)
            candidates = {"model": writer.model, "optimizer": optimizer}
            roots = {kind: root for kind, root in candidates.items() if root is not None}
            return replace(
                checkpoint, writer=writer.name, contents=_with_additions(checkpoint.contents, (), roots)
            )
    return checkpoint


def _with_additions(contents: Contents, assets: Iterable[str], roots: Roots) -> Contents:
    """Return contents with further directories of assets in front, and with further roots."""
    return replace(
        contents,
        assets=tuple(dict.fromkeys((*assets, *contents.assets))),
        roots={**contents.roots, **roots},
    )


def _have_root(head: tuple[str, ...], heads: Collection[tuple[str | int, ...]], tops: set[str | int]) -> bool:
    """True if names begin with `head`, which has one or two steps; one step "a.b" also matches the two steps a and b."""
    if len(head) == 2:
        return head in heads
    return head[0] in tops or ("." in head[0] and tuple(head[0].split(".")) in heads)


def _present_roots(roots: Roots, checkpoint: Checkpoint) -> dict[str, tuple[str | int, ...]]:
    """Return those roots that some name begins with."""
    return {kind: root for kind, root in roots.items() if root in heads_of(checkpoint.catalog, len(root))}


def _optimizer_notes(tops: set[str | int], directory: str) -> Iterator[str]:
    kinds = {str(top).rpartition("_")[0] if str(top)[-1:].isdigit() else str(top) for top in tops}
    if not kinds or not kinds <= set(_OPTIMIZERS):
        return
    siblings = matching_names(
        listing(parent_folder(directory)) - {folder_name(directory)}, "model", "pytorch_model_fsdp_*"
    )
    where = f"; the model's is {escape(siblings[0])}, beside it" if siblings else ""
    yield f"this is the state of an optimizer{where}"


def _unread_names(path: str, recognised: RecognisedDirectory) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of each file and folder beside the weights that was not read."""
    above = ""
    for segment in os.path.relpath(recognised.weights, path).split(os.sep):
        names = listing(os.path.join(path, above))
        for name in sorted(names - {segment} - set(matching_names(names, *_NOT_SHOWN))):
            reason = "optimizer state" if is_optimizer_name(name) else "not a part of the weights"
            yield os.path.join(above, name), reason
        above = os.path.join(above, segment)


def _unfinished_warnings(path: str, structure: TrainerDirectory) -> Iterator[str]:
    if structure.last is not None and structure.last not in listing(path):
        yield f"{structure.last} is missing, which {structure.writer} writes last: the save may not have finished"


def _is_dcp(directory: str) -> bool:
    from shardkit.formats.dcp.directory import is_dcp

    return is_dcp(directory)


OPENERS = {"dcp": Opener(_is_dcp, open_plain_dcp)}
