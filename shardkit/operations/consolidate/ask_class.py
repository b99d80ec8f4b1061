"""Whether `from_pretrained` would find all weights of the output: its class is asked while the bytes move."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from shardkit.core.text import count, escape, fold, listed
from shardkit.formats.hub.assets import CONFIG
from shardkit.layout.traced import Answer, Question
from shardkit.operations.consolidate.job import ConsolidateJob
from shardkit.operations.write import OnWarning, warn_all

_SWITCHED_OFF = "--ask-class off"


class ClassCheck:
    """The question to the class that the output's config names; leaving it ends the process that asks.

    Args:
        job: decided.
        is_on: False asks nobody.
        on_warning: told what the class says as soon as it is waited for.
    """

    def __init__(self, job: ConsolidateJob, *, is_on: bool, on_warning: OnWarning | None) -> None:
        self._job, self._is_on, self._on_warning = job, is_on, on_warning
        self._question: Question | None = None
        self._is_settled = not _may_ask(job)

    def __enter__(self) -> ClassCheck:
        if self._is_on and not self._is_settled:
            config = next(asset.read() for asset in self._job.assets if asset.name == CONFIG)
            shapes = {tensor.fqn: tensor.shape for tensor in self._job.tensors}
            self._question = Question(json.loads(config), shapes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._question is not None:
            self._question.close()

    def settle(self) -> ConsolidateJob:
        """Return the job with the answer, waiting for it; the class's word replaces what names and shapes alone told."""
        if not self._is_settled:
            self._is_settled = True
            answer = self._question.answer() if self._question else Answer(failure=_SWITCHED_OFF)
            told = self._job.unloadable
            self._job = _with_answer(self._job, answer)
            warn_all(self._on_warning, (line for line in self._job.unloadable if line not in told))
        return self._job


def _may_ask(job: ConsolidateJob) -> bool:
    """True where nothing else tells: a model with a config that is no chosen part, and has not all a base's weights."""
    is_part = job.kind == "adapter" or job.options.include or job.options.exclude
    return not (is_part or job.fit.is_whole) and any(asset.name == CONFIG for asset in job.assets)


def _with_answer(job: ConsolidateJob, answer: Answer) -> ConsolidateJob:
    if answer.failure is not None:
        note = f"the model's class was not asked whether from_pretrained finds all weights: {answer.failure}"
        return replace(job, answer=answer, notes=(*job.notes, note))
    found = tuple(_lines(answer))
    unloadable = (*job.selection.unloadable, *found)
    others = job.warnings[len(job.unloadable) :]
    # What a base has and the class does not miss is a difference all the same.
    differs = () if found else job.fit.missing
    return replace(job, answer=answer, unloadable=unloadable, warnings=(*unloadable, *differs, *others))


def _lines(answer: Answer) -> Iterator[str]:
    name = escape(answer.model_class)
    if answer.missing:
        folded = [each.pattern for each in fold((fqn, None) for fqn in answer.missing)]
        yield (
            f"{name}.from_pretrained would initialise {count(len(answer.missing), 'tensor')} at random, which the output "
            f"does not have: {listed(folded)}"
        )
    if answer.misfits:
        shown = [each.pattern for each in fold((fqn, None) for fqn, _ in answer.misfits)]
        yield (
            f"{name}.from_pretrained would refuse the output for {count(len(answer.misfits), 'tensor')}: {listed(shown)} "
            f"({answer.misfits[0][0]}: {answer.misfits[0][1]})"
        )
