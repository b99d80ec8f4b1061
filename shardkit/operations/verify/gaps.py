"""Find out whether an undamaged checkpoint is only a part of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.formats.contract import Checkpoint
from shardkit.formats.gaps import find_absent_files, find_cut_modules, is_whole_model
from shardkit.layout.traced import ClassQuestion, asking_text, why_no_class
from shardkit.operations.verify.result import Report

_MODEL = "the model"


def check_gaps(checkpoint: Checkpoint, report: Report) -> None:
    """Report weights that a checkpoint lacks.

    If transformers is installed, the class that a Hub model's config names decides. Missing files of a numbered set
    (model-00002-of-00004) are a problem unless the class finds all weights.

    Args:
        checkpoint: the opened checkpoint.
        report: gets the problems and doubts; its progress shows a clock while the class is asked.
    """
    hub, finds_all = checkpoint.hub, False
    if hub is not None and hub.config and is_whole_model(checkpoint):
        finds_all = _finds_all(hub.config, hub.catalog, report)
    lines = tuple(find_absent_files(checkpoint))
    if lines and not finds_all:
        report.problem("only a part of the model is here", details=lines)
    else:
        report.add_doubts(lines)
    report.add_doubts(find_cut_modules(checkpoint))


def _finds_all(config: Mapping[str, Any], catalog: Catalog, report: Report) -> bool:
    """Ask the class that a config names about the weights of a catalog; True if it finds all that it needs."""
    failure = why_no_class(config)
    if failure is None:
        shapes = {name: entry.shape for name, entry in catalog.tensors.items()}
        report.progress.start(0, asking_text(config).removesuffix(" ..."))
        try:
            with ClassQuestion(config, shapes) as question:
                answer = question.answer()
        finally:
            report.progress.finish()
        failure = answer.failure
    if failure is not None:
        report.add_notes(
            [f"the model's class was not asked whether from_pretrained finds all weights: {failure}"]
        )
        return False
    lines = list(answer.lines(_MODEL))
    if "auto_map" in config:  # the model's own code may make something else of the config
        report.add_doubts(lines)
    else:
        for line in lines:
            report.problem(line)
    if not lines:
        report.add_notes([f"{escape(answer.model_class)}.from_pretrained finds all weights"])
    return not lines
