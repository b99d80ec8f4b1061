"""What verify asks of files: each question is answered with a report, and several are asked at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from shardkit.core.threads import Progress
from shardkit.files.digest import FileBytes, Stretch
from shardkit.operations.answers import Inquiry, Question, State
from shardkit.operations.verify.bytes import check_some, check_whole
from shardkit.operations.verify.result import Report, Task, in_threads


class Questions(Inquiry[Any], Protocol):
    """Questions of one kind."""

    def sum_up(self, answers: Mapping[int, Any], report: Report) -> None:
        """Add what was found to a report, in the order of the questions."""
        ...


class FileQuestions:
    """Questions that are answered by reading a file.

    Args:
        label: what the progress is called.
        questions: of each file.
        tasks: one for each.
        jobs: threads.
        progress: told of the bytes.
        state: returns what the answers depend on.
    """

    def __init__(
        self,
        label: str,
        questions: Sequence[Question],
        tasks: Sequence[Task],
        jobs: int,
        progress: Progress,
        state: Callable[[], State],
    ) -> None:
        self.questions = questions
        self._label, self._tasks, self._jobs, self._progress = label, tasks, jobs, progress
        self._state = state

    def state(self) -> State:
        """Return what the answers depend on."""
        return self._state()

    def ask(self, numbers: Sequence[int]) -> dict[int, Report]:
        """Read some files."""
        tasks = [self._tasks[number] for number in numbers]
        total = sum(self.questions[number].nbytes for number in numbers)
        found = in_threads(tasks, self._jobs, self._progress, label=self._label, total_bytes=total)
        return dict(zip(numbers, found, strict=True))

    def dump(self, number: int, answer: Report) -> object:
        """Return an answer as plain data."""
        return answer.dump()

    def load(self, number: int, plain: Any) -> Report:
        """Return the answer that `dump` wrote."""
        return Report.load(plain)

    def is_final(self, number: int, answer: Report) -> bool:
        """False if the system could not read the file."""
        return not answer.has_unreadable

    def sum_up(self, answers: Mapping[int, Report], report: Report) -> None:
        """Add what was found to a report, in the order of the questions."""
        for number in sorted(answers):
            report.add(answers[number])


def recorded_in(file: FileBytes) -> str:
    """Return a digest of what is recorded of a file."""
    packed = [stretch for stretch, _ in file.packed]
    what = (file.name, file.size, file.crc32, file.sha256, file.stretches, file.archives, packed)
    return hashlib.sha256(repr(what).encode()).hexdigest()


def whole_files(
    files: Sequence[FileBytes], jobs: int, progress: Progress, state: Callable[[], State]
) -> FileQuestions:
    """Return questions about everything in files that has a recorded checksum."""
    questions = [Question(name=file.name, nbytes=file.read_bytes) for file in files]
    tasks = [partial(check_whole, file) for file in files]
    return FileQuestions("verify", questions, tasks, jobs, progress, state)


def some_stretches(
    chosen: Sequence[tuple[FileBytes, Sequence[Stretch]]],
    jobs: int,
    progress: Progress,
    state: Callable[[], State],
) -> FileQuestions:
    """Return questions about some chunks of files."""
    questions = [
        Question(name=file.name, nbytes=sum(stretch.nbytes for stretch in stretches))
        for file, stretches in chosen
    ]
    tasks = [partial(check_some, file, stretches) for file, stretches in chosen]
    return FileQuestions("verify", questions, tasks, jobs, progress, state)


class Joined:
    """Questions of several kinds, numbered through."""

    def __init__(self, kinds: Sequence[Questions]) -> None:
        self._kinds = kinds
        self.questions = [question for kind in kinds for question in kind.questions]
        self._places = [(kind, at) for kind in kinds for at in range(len(kind.questions))]

    def state(self) -> State:
        """Return what the answers of all kinds depend on."""
        states = [kind.state() for kind in self._kinds]
        decided = {str(number): dict(state.decided) for number, state in enumerate(states)}
        return State(files=[file for state in states for file in state.files], decided=decided)

    def ask(self, numbers: Sequence[int]) -> dict[int, Any]:
        """Ask one kind after the other."""
        found: dict[int, Any] = {}
        for kind in self._kinds:
            own = {self._places[number][1]: number for number in numbers if self._places[number][0] is kind}
            if own:
                found.update((own[at], answer) for at, answer in kind.ask(list(own)).items())
        return found

    def dump(self, number: int, answer: Any) -> object:
        """Return an answer as plain data."""
        kind, at = self._places[number]
        return kind.dump(at, answer)

    def load(self, number: int, plain: Any) -> Any:
        """Return the answer that `dump` wrote."""
        kind, at = self._places[number]
        return kind.load(at, plain)

    def is_final(self, number: int, answer: Any) -> bool:
        """False for what may be another time."""
        kind, at = self._places[number]
        return kind.is_final(at, answer)

    def sum_up(self, answers: Mapping[int, Any], report: Report) -> None:
        """Add what was found to a report, kind by kind."""
        for kind in self._kinds:
            kind.sum_up(
                {
                    at: answers[number]
                    for number, (own, at) in enumerate(self._places)
                    if own is kind and number in answers
                },
                report,
            )
