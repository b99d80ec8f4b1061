"""The order of names in a run directory, newest first, by the rules of the trainers. Pure.

Numbers are compared as numbers. What a trainer says itself comes first, then names that trainers give a meaning, then
steps, then epochs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

EXPORT_ENDING = "-hf"
"""What consolidate appends to a checkpoint's name for its default output."""

EXPORT_ENDINGS = re.compile(r"[-_.](?:hf|huggingface|hub)$", re.IGNORECASE)
"""What people, and consolidate, append to it."""

TRACKERS = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
"""Files in which a trainer records its last save: verl, Megatron and ByteCheckpoint as a step, DeepSpeed as a name."""

_STEP = re.compile(r"(?<![a-z])(?:global_?)?(?:steps?|iter(?:ation)?|it)[-_=]?([0-9]{1,15})", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![a-z])(?:checkpoint|ckpt|ckp|ba|batch|save)[-_=]?([0-9]{1,15})", re.IGNORECASE)
_EPOCH = re.compile(r"(?<![a-z])(?:epoch|ep)[-_=]?([0-9]{1,15})", re.IGNORECASE)
_RANK = re.compile(r"(?:(?:rank|(?:pp|tp|ep)(?:[-_](?:rank|stage))?)[-_=]?[0-9]+[-_]?)+", re.IGNORECASE)
# Lightning adds it if the name is taken.
_VERSION = re.compile(r"-v([0-9]{1,9})(?:\.ckpt)?$")
_BARE = re.compile(r"[0-9]{1,15}")
_DATE = re.compile(r"(?<![0-9])20[0-9]{2}([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12][0-9]|3[01])")
_LAST = re.compile(r"(last|latest)(-v[0-9]+)?(\.ckpt)?", re.IGNORECASE)
_REQUEUED = re.compile(r"hpc_ckpt_([0-9]{1,9})\.ckpt")
_ON_EXCEPTION = re.compile(r"on_exception(-v[0-9]+)?\.ckpt")
_HOMES = ("checkpoints", "checkpoint", "ckpts", "ckpt", "actor", "policy", "model", "lightning_logs")
_NOT_MODELS = re.compile(
    r"(optim(izers?|izer_state)?|critic|ref|reward(_model)?|ema|scheduler|dataloader)(_[0-9]+)?"
    r"|wandb|tensorboard|tb_logs|huggingface|hf|__pycache__|node_modules|site-packages"
)
_UNFINISHED = re.compile(
    r".*\.(tmp|temp|partial|incomplete|part)|(tmp|temp)[-_].+|.*[-_](tmp|temp)", re.IGNORECASE
)


class Recency(NamedTuple):
    """How new a name is among its neighbours: greater is newer."""

    rule: int
    """One of the constants below."""
    numbers: tuple[int, ...]


NAMED, REQUEUED, ON_EXCEPTION, LAST, STEP, EPOCH, HOME, OTHER, BEYOND = range(9, 0, -1)

RULES = {
    NAMED: "{tracker} names {it}",
    REQUEUED: "{it} was saved when the job was requeued, which comes before all others",
    ON_EXCEPTION: "{it} was saved when the run failed, which comes before last.ckpt and numbered ones",
    LAST: "{it} is named as the last one, which comes before numbered ones",
    STEP: "{it} has the highest step",
    EPOCH: "{it} has the highest epoch",
    HOME: "{it} is where trainers put checkpoints",
    OTHER: "{it} has the highest number",
    BEYOND: "nothing that {tracker} covers is complete",
}
"""Why a name was taken, by `Recency.rule`. What is taken is `it`; a directory on the way to it has its name."""


def step_of(name: str) -> int | None:
    """Return the training step that a name tells, None if it tells none."""
    if _REQUEUED.fullmatch(name):
        return None
    for pattern in (_STEP, _NUMBER):
        numbers = pattern.findall(name)
        if numbers:
            return int(numbers[-1])
    return int(name) if _BARE.fullmatch(name) else None


def is_of_a_run(name: str) -> bool:
    """True for a name that tools give to runs, later ones later: with a date in it, or Lightning's `version_3`."""
    return _DATE.search(name) is not None or re.fullmatch("version_[0-9]+", name) is not None


def family_of(name: str) -> str:
    """Return the text that a name shares with names that differ from it in numbers alone.

    A number of a rank says nothing of the time: each has a part of one model.
    """
    return name if _RANK.fullmatch(name) else re.sub(r"[0-9]+", "0", name)


def is_left_out(name: str) -> bool:
    """True for names that hold no model's checkpoint: hidden ones, optimizers, logs."""
    return name.startswith(".") or _NOT_MODELS.fullmatch(name.lower()) is not None


def is_temporary(name: str) -> bool:
    """True for names of saves that are not finished."""
    return _UNFINISHED.fullmatch(name) is not None


def is_a_place(name: str) -> bool:
    """True for a name that says that a checkpoint, or a directory of them, is there."""
    return _place(name, None, None).rule != OTHER


def is_ordered(name: str) -> bool:
    """True for a name that tells when a checkpoint was saved: a step, an epoch, the last one."""
    return _place(name, None, None).rule not in (HOME, OTHER)


def is_a_step(name: str) -> bool:
    """True for a directory's name that tells a step or an epoch, and nothing of a model (ckpt-8b-sft)."""
    return name[-1:].isdigit() and _place(name, None, None).rule in (STEP, EPOCH)


def ordered(names: Iterable[str], tracked: str | None) -> list[tuple[Recency, str]]:
    """Return names with their places, newest first; of equal ones the plain name first, `step-10` before `step-10-ema`.

    Args:
        names: of checkpoints and of directories that may hold some.
        tracked: what a tracker file says: a name or a step; None if there is no such file.
    """
    known = list(names)
    named = next((name for name in known if tracked is not None and _is_tracked(name, tracked)), None)
    limit = step_of(named) if named is not None else None
    placed = [(_place(name, named, limit), name) for name in known]
    return sorted(placed, key=lambda pair: (*pair[0], -len(pair[1]), pair[1]), reverse=True)


def _is_tracked(name: str, tracked: str) -> bool:
    return name == tracked or (_BARE.fullmatch(tracked) is not None and step_of(name) == int(tracked))


def _place(name: str, named: str | None, limit: int | None) -> Recency:
    """Return the place of a name; `limit` is the step of the one that a tracker names."""
    if name == named:
        return Recency(NAMED, ())
    version = _VERSION.search(name)
    versions = (int(version[1]) if version else 0,)
    requeued = _REQUEUED.fullmatch(name)
    if requeued:
        return Recency(REQUEUED, (int(requeued[1]),))
    if _ON_EXCEPTION.fullmatch(name):
        return Recency(ON_EXCEPTION, versions)
    if _LAST.fullmatch(name):
        return Recency(LAST, versions)
    step, epochs = step_of(name), _EPOCH.findall(name)
    epoch = int(epochs[-1]) if epochs else 0
    if step is not None:
        # A save that the trainer did not get to record may be incomplete in ways that do not show.
        return Recency(BEYOND if limit is not None and step > limit else STEP, (step, epoch, *versions))
    if epochs:
        return Recency(EPOCH, (epoch, *versions))
    if name.lower() in _HOMES:
        return Recency(HOME, (-_HOMES.index(name.lower()),))
    return Recency(OTHER, tuple(map(int, re.findall(r"[0-9]{1,15}", name))))
