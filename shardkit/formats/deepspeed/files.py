"""The files of a DeepSpeed checkpoint: where they are, which there have to be, and opening them.

    RUN/latest                                         the name of the last tag
    RUN/global_step20/
        mp_rank_00_model_states.pt                     ZeRO-0, 1 and 2: the module, whole
        zero_pp_rank_R_mp_rank_00_model_states.pt      ZeRO-3: shapes, buffers, frozen parameters' parts
        [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
        zero/PARAMETER/fp32.pt                         universal checkpoints alone

Source: DeepSpeed 0.19, runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from shardkit.core.text import escape
from shardkit.errors import IntegrityError, ShardkitError, SourceError
from shardkit.files.links import locate, read_inside
from shardkit.formats.beside import inner, listing
from shardkit.formats.torchsave.file import TorchFile, open_torch_file

_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:(?:bf16|fp16)_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt")
_PIPELINE = re.compile(r"layer_[0-9]+-model_(.*-model_)?states\.pt")
_EXPERTS = re.compile(
    r"(layer_[0-9]+_)?expert_[0-9]+_mp_rank_.*_model_states\.pt|expp_rank_.*_optim_states\.pt"
)
_TRACKERS = ("latest", "latest_universal")
_MAX_TRACKER = 4096
_UNIVERSAL = "convert it with DeepSpeed's ds_to_universal.py, and give the directory that this makes"

T = TypeVar("T")


class Tag(NamedTuple):
    """One saved state."""

    directory: str
    prefix: str
    """What to put before a file's name in messages: the tag and a slash, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFiles:
    """What a tag's directory holds, by the names."""

    whole: str | None
    """The file with the whole module."""
    models: dict[int, str]
    """By rank, the model files of ZeRO-3."""
    optimizers: dict[int, str]
    """By rank."""
    is_universal: bool


def find_tag(path: str) -> Tag | None:
    """Return the saved state that a directory is, or that it names as its last; None where there is none."""
    if not os.path.isdir(path):
        return None
    if _has_states(path):
        return Tag(path, "")
    for tracker in _TRACKERS:
        try:
            data = read_inside(path, tracker, _MAX_TRACKER)
        except ShardkitError:  # no such file, or something else of that name
            continue
        tag = data.decode("utf-8", "replace").strip()
        if not tag or os.path.basename(tag) != tag or tag in (os.curdir, os.pardir) or "\0" in tag:
            continue
        directory = inner(path, tag)
        if directory is not None and _has_states(directory):
            return Tag(directory, f"{tag}/")
    return None


def _has_states(path: str) -> bool:
    return any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in listing(path))


def survey(tag: Tag) -> StateFiles:
    """Return which files a tag has.

    Raises:
        SourceError: the model was split in a way that the files of ZeRO alone do not tell.
    """
    names = sorted(listing(tag.directory))
    is_universal = inner(tag.directory, "zero") is not None
    whole: str | None = None
    models: dict[int, str] = {}
    optimizers: dict[int, list[str]] = {}
    split: list[str] = []
    for name in names:
        model, optimizer = _MODEL.fullmatch(name), _OPTIMIZER.fullmatch(name)
        found = model or optimizer
        if found and int(found[2]):
            split.append(name)
        elif model and model[1] is None:
            whole = name
        elif model:
            models[int(model[1])] = name
        elif optimizer:
            optimizers.setdefault(int(optimizer[1]), []).append(name)
    if not is_universal:
        _refuse_splits(tag, names, split)
    twice = [tag.prefix + name for found in optimizers.values() if len(found) > 1 for name in found]
    if twice:
        raise SourceError(
            f"{escape(tag.directory)} holds the optimizer files of two saves",
            problems=map(escape, twice),
            hint="move those of one save out of the directory",
        )
    return StateFiles(
        whole=whole,
        models=models,
        optimizers={rank: found[0] for rank, found in optimizers.items()},
        is_universal=is_universal,
    )


def _refuse_splits(tag: Tag, names: Iterable[str], split: list[str]) -> None:
    for what, found in (
        ("was trained with tensor parallelism: its matrices are cut, and the files do not say how", split),
        ("was trained as a pipeline: its layers are in files of their own", _matching(names, _PIPELINE)),
        ("has experts in files of their own", _matching(names, _EXPERTS)),
    ):
        if found:
            raise SourceError(
                f"{escape(tag.directory)} {what}",
                problems=[escape(tag.prefix + name) for name in found],
                hint=_UNIVERSAL,
            )


def _matching(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    return [name for name in names if pattern.fullmatch(name)]


def require_ranks(tag: Tag, files: StateFiles, num_ranks: int, *, with_models: bool) -> None:
    """Check that every rank's files are there.

    Raises:
        SourceError: lists all that are missing.
    """
    sample = min(files.optimizers.values(), default="zero_pp_rank_0_mp_rank_00_optim_states.pt")
    wanted = [("optimizers", sample)]
    if with_models:
        wanted.append(("models", "zero_pp_rank_0_mp_rank_00_model_states.pt"))
    missing = [
        tag.prefix + re.sub(r"pp_rank_[0-9]+", f"pp_rank_{rank}", name)
        for kind, name in wanted
        for rank in range(num_ranks)
        if rank not in getattr(files, kind)
    ]
    if missing:
        raise SourceError(
            f"{len(missing)} of {num_ranks * len(wanted)} rank files are missing: "
            f"it was saved by {num_ranks} ranks",
            problems=map(escape, missing),
            hint="copy the files of all ranks; each node may have kept its own",
        )


def open_states(tag: Tag, names: Iterable[str], read: Callable[[TorchFile], T]) -> list[T]:
    """Open some of a tag's files, one after the other, and return what `read` makes of each.

    Raises:
        SourceError: lists every one that cannot be read.
        IntegrityError: the same, where all that is wrong is a CRC-32.
        ResourceError: a file may not be read.
    """
    found: list[T] = []
    failures: list[SourceError] = []
    for name in names:
        try:
            found.append(read(open_torch_file(locate(tag.directory, name), tag.prefix + name)))
        except SourceError as error:
            failures.append(error)
    if not failures:
        return found
    if len(failures) == 1:
        raise failures[0]
    kind = IntegrityError if all(isinstance(error, IntegrityError) for error in failures) else SourceError
    raise kind(
        f"{len(failures)} files of {escape(tag.directory)} cannot be read",
        problems=[error.message for error in failures],
        hint=failures[0].hint,
    )
