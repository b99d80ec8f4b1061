"""What verify says of a checkpoint whose bytes are all right, and that is only a part of its model."""

from __future__ import annotations

from shardkit.core.text import escape
from shardkit.errors import UsageError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.gaps import Gaps, gaps_of
from shardkit.formats.hub.adapter import ADAPTER
from shardkit.layout.traced import ClassQuestion
from shardkit.operations.verify.result import Report

_MODEL = "the model"


def check_gaps(checkpoint: Checkpoint, report: Report, *, ask_class: bool) -> None:
    """Report what a checkpoint seems to lack.

    It is a problem if it is sure. Config and names alone give warnings, since a class may read a config in its own way.

    Args:
        checkpoint: opened.
        report: gets what was found.
        ask_class: ask the class that the config names, which knows all of its weights.

    Raises:
        UsageError: a class is to be asked about something else than a Hub model.
    """
    gaps = gaps_of(checkpoint)
    if ask_class and _ask(checkpoint, gaps, report):
        gaps = gaps._replace(weights=())
    if gaps.is_part:
        report.problem("only a part of the model is here", details=tuple(gaps.lines(_MODEL)))
    else:
        report.doubt(gaps.lines(_MODEL))


def _ask(checkpoint: Checkpoint, gaps: Gaps, report: Report) -> bool:
    """Ask the class; return whether it answered."""
    hub = checkpoint.hub
    if hub is None or checkpoint.writer == ADAPTER:
        raise UsageError(
            f"--ask-class is about the files of a Hub model, and {escape(checkpoint.path)} is something else",
            hint="leave it out; consolidate asks the class about what it writes",
        )
    shapes = {name: entry.shape for name, entry in hub.catalog.tensors.items()}
    with ClassQuestion(hub.config or {}, shapes) as question:
        answer = question.answer()
    if answer.failure is not None:
        said = f"the model's class was not asked whether from_pretrained finds all weights: {answer.failure}"
        if gaps.has_own_code:
            report.doubt([said])
        else:
            report.problem(said, is_unreadable=True)
        return False
    lines = list(answer.lines(_MODEL))
    if gaps.has_own_code:
        report.doubt(lines)
    else:
        for line in lines:
            report.problem(line)
    if not lines:
        report.add_notes([f"{escape(answer.model_class)}.from_pretrained finds all weights"])
    return True
