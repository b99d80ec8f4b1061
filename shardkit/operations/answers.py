"""An answer that several processes find together: each part reads its share, and one report is made of what all found.

    DIR/plan.json            what all parts agree on
    DIR/part-3-of-16.json    what the third part found: there once it is whole

An `Inquiry` is a verb that only reads, decided and not yet carried out: its questions can be asked one by one (of a file,
of a pair of tensors), and what is answered is summed up. One process asks all; a part asks its own, the largest first.
Whoever finds that no answer is missing has the report of one process.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from shardkit._version import __version__
from shardkit.core.text import count, escape
from shardkit.errors import IncompleteError, ResourceError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.strict_json import parse_object, read_small
from shardkit.operations.destination import refuse_remote, write_sidecar
from shardkit.operations.parts.agreement import Agreement, Command
from shardkit.operations.parts.part import Part, divide, parse_part

_PLAN, _PART = "plan.json", re.compile(r"part-\d{1,6}-of-\d{1,6}\.json", re.ASCII)
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Something that can be found out without the rest."""

    name: str
    """Of the file or the tensor."""
    nbytes: int
    """That are read to answer it, more or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What answers depend on: parts that see another state answer other questions."""

    files: Sequence[tuple[str, str]]
    """(name, path) of those that are read."""
    decided: Mapping[str, object] = field(default_factory=dict)
    """Everything else, as plain data."""


A = TypeVar("A")


class Inquiry(Protocol[A]):
    """A verb that only reads, decided and not yet carried out."""

    @property
    def questions(self) -> Sequence[Question]:
        """What can be asked, in an order that all processes come to."""
        ...

    def state(self) -> State:
        """Return what the answers depend on."""
        ...

    def ask(self, numbers: Sequence[int]) -> Mapping[int, A]:
        """Answer some questions, by their numbers; this reads."""
        ...

    def dump(self, number: int, answer: A) -> object:
        """Return the answer to a question as plain data."""
        ...

    def load(self, number: int, plain: Any) -> A:
        """Return the answer that `dump` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        ...

    def is_final(self, number: int, answer: A) -> bool:
        """False for what may be another time, such as a file that the system could not read."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAnswer:
    """What became of a part of an answer."""

    part: str
    """Such as "3/16"."""
    found: str
    """What told the number; empty where a person did."""
    answers: str
    """The directory in which all parts put their answers."""
    plan: str
    """Hash of what all parts agree on."""
    num_questions: int
    """Of this part: files or pairs of tensors."""
    read_bytes: int
    """That this part has to read."""
    answered_questions: int
    """Of all parts, as far as this one can see."""
    all_questions: int
    missing: tuple[str, ...]
    """The parts that lack something, as far as this one can see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Where parts put their answers, and which part this process is."""

    directory: str
    part: Part | None
    """None puts together what all parts have found."""
    command: Command

    @classmethod
    def of(cls, verb: str, arguments: Mapping[str, Any]) -> Gathering | None:
        """Return what a verb was asked for; None where one process answers everything.

        Args:
            verb: its name.
            arguments: all that it got, `part` and `answers` among them.

        Raises:
            UsageError: only one of the two is given, or the part cannot be understood.
        """
        part, directory = arguments["part"], arguments["answers"]
        if directory is None:
            if part is not None:
                raise UsageError(
                    "--part needs --answers DIR: a directory in which all parts put what they find",
                    hint="without --part, the same command then puts together what is there",
                )
            return None
        if isinstance(part, str):
            part = parse_part(part, os.environ)
        refuse_remote(os.fspath(directory))
        places = {"answers": directory, "output": arguments.get("output")}
        paths = {
            name: storage.absolute(os.fspath(place)) for name, place in places.items() if place is not None
        }
        command = Command.of(verb, arguments)
        command = replace(command, options={**command.options, **paths})  # for whoever runs a missing part
        return cls(directory=paths["answers"], part=part, command=command)

    @property
    def has_begun(self) -> bool:
        """True once a part has begun."""
        return storage.lexists(os.path.join(self.directory, _PLAN))

    def check_outside(self, *places: str) -> None:
        """Refuse a directory that lies in what is read.

        Args:
            places: what is read.

        Raises:
            UsageError: it does.
        """
        here = os.path.join(storage.realpath(self.directory), "")
        for place in places:
            if storage.isdir(place) and here.startswith(os.path.join(storage.realpath(place), "")):
                raise UsageError(
                    f"--answers {escape(self.directory)} lies in {escape(place)}",
                    hint="choose a directory outside it",
                )


def answers_to(inquiry: Inquiry[A], gathering: Gathering | None) -> tuple[Mapping[int, A], PartAnswer | None]:
    """Return the answers to all questions, or those of a part while others are missing.

    Args:
        inquiry: decided.
        gathering: None asks all questions here.

    Returns:
        Answers by the number of their question; what became of the part, or None where no answer is missing.

    Raises:
        UsageError: parts of another plan have put their answers there.
        IncompleteError: this is no part, and answers are missing; says which parts to run.
        SourceError: what lies there is damaged.
        ResourceError: it cannot be read or written.
        ShardkitError: whatever `Inquiry.ask` raises.
    """
    everything = range(len(inquiry.questions))
    if gathering is None:
        return inquiry.ask(everything), None
    shared = _Shared(inquiry, gathering)
    part = gathering.part
    if part is None:
        found = shared.read()
        missing = [number for number in everything if number not in found]
        if missing:
            raise shared.incomplete(missing)
        return found, None
    return shared.carry_out(part)


class _Shared(Generic[A]):
    """The directory of all parts, for one inquiry."""

    def __init__(self, inquiry: Inquiry[A], gathering: Gathering) -> None:
        from shardkit.operations.write import (
            ReadFile,
            hash_of,
            shared_stamp,
        )  # here: most answers need none of it

        self._inquiry, self._directory, part = inquiry, gathering.directory, gathering.part
        state = inquiry.state()
        made_of = {
            **state.decided,
            "sources": {name: shared_stamp(ReadFile(name, path)) for name, path in state.files},
            "questions": [(question.name, question.nbytes) for question in inquiry.questions],
            "version": __version__,
        }
        here = Agreement(
            plan=hash_of(made_of),
            version=__version__,
            ingredients={
                key: value if key == "sources" else hash_of(value)[:16] for key, value in made_of.items()
            },
            command=gathering.command,
            typed=part.typed if part is not None else "",
            num_parts=part.count if part is not None else 1,
            files=[(question.name, question.nbytes) for question in inquiry.questions],
        )
        self._agreement = self._agree(here, is_part=part is not None)

    def _agree(self, here: Agreement, *, is_part: bool) -> Agreement:
        """Return what the parts agreed on, this one first if there is none; refuse another plan."""
        path = os.path.join(self._directory, _PLAN)
        if is_part and not storage.lexists(path):
            self._begin(path, here)
        if not storage.lexists(path):
            raise IncompleteError(
                f"{escape(self._directory)}: no part has begun there",
                hint="run the parts first: the same command with --part 1/N and so on",
            )
        there = Agreement.read(path)
        if there.plan != here.plan:
            raise UsageError(
                f"{escape(self._directory)} holds answers of another plan: {there.plan[:16]} there, "
                f"{here.plan[:16]} here",
                problems=list(there.differences(here)) or ["no difference is known"],
                hint="give all parts the same command, checkpoint and version of shardkit; or choose another directory",
            )
        return there

    def _begin(self, path: str, here: Agreement) -> None:
        try:
            if not storage.isdir(self._directory):
                storage.mkdir(self._directory)
        except FileExistsError:
            pass
        except OSError as error:
            raise ResourceError(f"cannot make {escape(self._directory)}: {error.strerror}") from error
        try:
            write_sidecar(path, here.dump(), overwrite=False)
        except UsageError:  # another part was faster
            pass

    def read(self) -> dict[int, A]:
        """Return all answers that lie there.

        Raises:
            SourceError: a file is damaged, or of another plan.
            ResourceError: the directory or a file cannot be read.
        """
        try:
            names = sorted(filter(_PART.fullmatch, storage.listdir(self._directory)))
        except OSError as error:
            raise ResourceError(f"cannot list {escape(self._directory)}: {error.strerror}") from error
        found: dict[int, A] = {}
        for name in names:
            for number, answer in self._read(name).items():
                if number not in found or self._inquiry.is_final(number, answer):
                    found[number] = answer
        return found

    def _read(self, name: str) -> dict[int, A]:
        path, load = os.path.join(self._directory, name), self._inquiry.load
        content = parse_object(read_small(path, name, _MAX_BYTES, follow=False), name)
        try:
            if content["plan"] != self._agreement.plan:
                raise ValueError("another plan")
            answers = content["answers"]
            assert isinstance(answers, dict)
            numbers = [int(number) for number in answers]
            assert all(0 <= number < len(self._inquiry.questions) for number in numbers)
            found = {number: load(number, answers[str(number)]) for number in numbers}
        except (AssertionError, KeyError, TypeError, ValueError):
            raise SourceError(
                f"{escape(path)} is damaged, or of other parts than the rest",
                hint="remove it, and run that part again",
            ) from None
        return found

    def carry_out(self, part: Part) -> tuple[Mapping[int, A], PartAnswer | None]:
        """Answer what is missing of a part's questions."""
        questions = self._inquiry.questions
        parts = divide([question.nbytes for question in questions], part.count)
        mine = [number for number, each in enumerate(parts) if each == part.number]
        found = self.read()
        is_final = self._inquiry.is_final
        missing = [number for number in mine if number not in found or not is_final(number, found[number])]
        if missing:
            answered = self._inquiry.ask(missing)
            self._write(part, {**{n: found[n] for n in mine if n in found}, **answered})
            found = {**self.read(), **answered}
        left = [number for number in range(len(questions)) if number not in found]
        if not left:
            return found, None
        return {number: found[number] for number in mine}, PartAnswer(
            part=str(part),
            found=part.found,
            answers=self._directory,
            plan=self._agreement.plan,
            num_questions=len(mine),
            read_bytes=sum(questions[number].nbytes for number in mine),
            answered_questions=len(found),
            all_questions=len(questions),
            missing=tuple(str(each) for each, _ in self._agreement.missing_parts(left)),
        )

    def _write(self, part: Part, answers: Mapping[int, A]) -> None:
        content = {
            "plan": self._agreement.plan,
            "answers": {str(n): self._inquiry.dump(n, answer) for n, answer in answers.items()},
        }
        path = os.path.join(self._directory, f"part-{part.number}-of-{part.count}.json")
        write_sidecar(
            path, json.dumps(content).encode(), overwrite=True, is_ours=lambda _: True
        )  # else `read` had refused it

    def incomplete(self, missing: Collection[int]) -> IncompleteError:
        """Return the error that names the parts that lack answers, and what to type."""
        agreement = self._agreement
        parts = agreement.missing_parts(sorted(missing))
        return IncompleteError(
            f"{escape(self._directory)}: {count(len(missing), 'answer')} of {len(agreement.files)} "
            f"{'is' if len(missing) == 1 else 'are'} missing, of {count(len(parts), 'part')}",
            problems=[
                f"part {each}: {count(number, 'answer')}; {agreement.command_of(each, answers=self._directory)}"
                for each, number in parts
            ],
            hint="run these parts; the last of them to finish makes the report",
        )
