"""The page of `verify`: the problems, and their positions in files and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from shardkit._folding import fold_lines
from shardkit.core.text import count, escape, few, format_size
from shardkit.operations.holdings import HeldFile, Holdings, Strip
from shardkit.operations.verify.result import SIZE, VerifyProblem, VerifyResult
from shardkit.pictures.held import strip_data
from shardkit.pictures.page import Page, Section, legend, picture, short_names, table

_MAX_LANES = 40
_MAX_LISTED = 2000
_MAX_DETAILS = 5
_MAX_PLACES = 500
_MAX_NAMES = 20


def damage_page(result: VerifyResult, facts: Sequence[tuple[str, str]]) -> Page:
    """Return the page of a check.

    Args:
        result: with `holdings`.
        facts: further (label, text) rows.
    """
    holdings = result.holdings
    assert holdings is not None
    drawn = _DrawnProblems(result.problems[:_MAX_LISTED], holdings)
    left_out = [*holdings.merged]
    if len(result.problems) > _MAX_LISTED:
        left_out.append(
            f"the first {_MAX_LISTED} of {len(result.problems)} problems are listed; --json has all"
        )
    return Page(
        kicker=f"check of a checkpoint, level {result.level}",
        title=short_names(result.path)[0],
        verdict=_verdict(result),
        tone="good" if result.ok else "bad",
        figures=list(_figures(result)),
        unusual=[*_files_to_copy(result), *result.warnings],
        sections=list(_sections(result, drawn)),
        facts=[("path", escape(result.path)), *facts, *(("note", note) for note in result.notes)],
        left_out=left_out,
        data=drawn.data(),
    )


def _verdict(result: VerifyResult) -> str:
    if not result.ok:
        names = {problem.file for problem in result.problems if problem.file is not None}
        where = f", in {count(len(names), 'file')}" if len(names) > 1 else ""
        where = f", in {escape(next(iter(names)))}" if len(names) == 1 else where
        return f"{count(len(result.problems), 'problem')} found{where}."
    if result.level == "structure":
        return (
            "No problem found in names, sizes and headers. The bytes themselves were not read: --full does."
        )
    return f"No problem found: {format_size(result.read_bytes)} match their checksums."


def _files_to_copy(result: VerifyResult) -> Iterator[str]:
    if result.bring_again:
        names = [
            line.pattern for line in fold_lines([escape(name) for name in result.bring_again], spreads=True)
        ]
        files = count(len(result.bring_again), "file")
        yield f"Copy {files} again from where the checkpoint was saved: {few(names, _MAX_NAMES)}."


def _figures(result: VerifyResult) -> Iterator[tuple[str, str]]:
    yield f"{len(result.problems):,}", "problem" if len(result.problems) == 1 else "problems"
    if result.num_files:  # otherwise it could not be opened
        yield f"{result.num_files:,}", f"files, {format_size(result.tensor_bytes)}"
        yield (
            f"{result.num_tensors:,}",
            f"tensors, {result.num_chunks:,} chunk{'s' * (result.num_chunks != 1)}",
        )
        yield format_size(result.read_bytes), "compared with a checksum"
    if result.num_unrecorded_chunks:
        yield f"{result.num_unrecorded_chunks:,}", "chunks have no checksum"


def _sections(result: VerifyResult, drawn: _DrawnProblems) -> Iterator[Section]:
    if drawn.lanes:
        yield Section(
            title="Where the damage lies",
            lead="A bar is a damaged file from its first byte to its last. A checksum covers many bytes, and says only that "
            "some of them are wrong: the damage is somewhere in the faint red part. Hover over it or use the arrow keys.",
            body=legend(
                ("missing", "missing"),
                ("mark", "damaged"),
                ("somewhere", "somewhere in here"),
                ("record", "records"),
                ("gap", "header, padding or gap"),
            )
            + picture("strips", f"{count(len(drawn.lanes), 'damaged file')} with their damage in red."),
        )
    if result.problems:
        yield Section(
            title="What is wrong",
            lead="Every problem with its place. Choose one to see the place in its tensor.",
            body=_problems(drawn.problems) + _place(drawn),
        )
    if drawn.knows_all:
        yield Section(
            title="All files",
            lead=f"A square is a file with tensors, or with a problem: {count(drawn.num_bad, 'file')} with a problem, "
            f"{len(drawn.files) - drawn.num_bad} without.",
            body=legend(("fine", "no problem found"), ("mark", "a problem"), ("missing", "missing"))
            + picture("files", f"{count(len(drawn.files), 'file')}, {drawn.num_bad} of them with a problem."),
        )


def _problems(problems: Sequence[VerifyProblem]) -> str:
    rows = [
        (
            escape(problem.file or "-"),
            _tensor(problem),
            ("-", -1.0)
            if problem.start_byte is None
            else (f"{problem.start_byte:,}", float(problem.start_byte)),
            ("-", -1.0)
            if problem.num_bytes is None
            else (format_size(problem.num_bytes), float(problem.num_bytes)),
            _message(problem),
        )
        for problem in problems
    ]
    return table(
        "problems",
        "Problems in the order in which they were found",
        ("file", "tensor", "first byte", "bytes", "what is wrong"),
        rows,
        searchable="Search",
        row_class="bad",
    )


def _tensor(problem: VerifyProblem) -> str:
    return "-" if problem.tensor is None else escape(problem.tensor)


def _message(problem: VerifyProblem) -> str:
    text = problem.message
    if problem.expected is not None:
        text = f"{text}: expected {problem.expected}, found {problem.found}"
    shown = [text, *problem.details[:_MAX_DETAILS]]
    if len(problem.details) > _MAX_DETAILS:
        shown.append(f"and {len(problem.details) - _MAX_DETAILS} more")
    return "\n".join(shown)


def _place(drawn: _DrawnProblems) -> str:
    if not drawn.places:
        return ""
    return f'<h3 id="tensor-name"></h3>{picture("tensor", "The tensor as a rectangle, its damaged part in red.")}'


Tone = Literal["here", "somewhere", "missing"]
"""How damage is drawn: exactly these bytes, somewhere within these bytes, or missing bytes."""


class _Extent(NamedTuple):
    """The bytes of a file that a problem concerns."""

    start: int
    nbytes: int
    tone: Tone


def _extent(problem: VerifyProblem, size: int, whole: int) -> _Extent:
    """Return the bytes that a problem concerns: the whole file, unless more is known.

    Args:
        problem: about a file.
        size: current size of the file.
        whole: its expected size, as far as it is known.
    """
    if problem.is_missing:
        return _Extent(0, problem.num_bytes or whole, "missing")
    if problem.start_byte is not None:
        num_bytes = problem.num_bytes or 1
        return _Extent(problem.start_byte, num_bytes, "here" if num_bytes == 1 else "somewhere")
    expected, actual = problem.expected or "", problem.found or ""
    if problem.message == SIZE and expected.isdecimal() and actual.isdecimal():
        first, last = sorted((int(expected), int(actual)))
        return _Extent(first, last - first, "missing" if int(actual) == first else "here")
    if size < whole:
        return _Extent(size, whole - size, "missing")
    return _Extent(0, size, "somewhere")


class _DrawnProblems:
    """The problems of a check in the form that the script draws: by file and by tensor."""

    def __init__(self, problems: Sequence[VerifyProblem], holdings: Holdings) -> None:
        self.problems, self._holdings = problems, holdings
        by_file: dict[str, list[int]] = {}
        for number, problem in enumerate(problems):
            if problem.file is not None:
                by_file.setdefault(problem.file, []).append(number)
        file_of = {file.name: file for file in holdings.files}
        self._names = [*file_of, *(name for name in by_file if name not in file_of)]
        self.num_bad, self.knows_all = len(by_file), bool(file_of)
        self.files = [
            {
                "name": escape(name),
                "tone": self._tone(by_file.get(name, ())),
                "said": count(len(by_file[name]), "problem") if name in by_file else "no problem found",
            }
            for name in self._names
        ]
        self.lanes = [
            self._lane(name, numbers, file_of) for name, numbers in list(by_file.items())[:_MAX_LANES]
        ]
        self._tensors = {tensor.name: tensor for tensor in holdings.tensors}
        self.places: list[dict[str, Any]] = []
        self._known_places: dict[str, int] = {}
        self._place_of = [self._place(problem) for problem in problems]

    def _tone(self, numbers: Sequence[int]) -> str:
        if any(self.problems[number].is_missing for number in numbers):
            return "missing"
        return "mark" if numbers else "good"

    def _lane(self, name: str, numbers: Sequence[int], file_of: dict[str, HeldFile]) -> dict[str, Any]:
        file = file_of.get(name)
        strip = None if file is None or file.strip is None else self._holdings.strips[file.strip]
        size = 0 if file is None else file.file_bytes or 0
        whole = 0 if strip is None else strip.starts[-1] + strip.nbytes[-1]
        places = [_extent(self.problems[number], size, max(size, whole)) for number in numbers]
        size = max(size, *(place.start + place.nbytes for place in places), 0)
        damage = []
        for number, (start, nbytes, tone) in zip(numbers, places, strict=True):
            problem = self.problems[number]
            about = f"{_tensor(problem)}: " if problem.tensor is not None else ""
            lost = self._lost(size, strip) if tone == "missing" else ""
            text = f"{about}{_message(problem)[:300]}{lost}"
            # For a file of unknown size, only the bar can be drawn.
            damage.append([start, nbytes or size, text, number, tone])
        return {
            "label": escape(name),
            "bytes": size,
            "strip": None if file is None else file.strip,
            "damage": damage,
            "missing": self._lost(size, strip).lstrip("; ") if self._tone(numbers) == "missing" else "",
        }

    def _lost(self, size: int, strip: Strip | None) -> str:
        """Describe a lost file: its size, and how many tensors have bytes in it, as far as known."""
        tensors = "" if strip is None else f", {count(len(set(strip.tensors)), 'tensor')}"
        return f"; {format_size(size) if size else 'its size is not recorded'}{tensors}"

    def _place(self, problem: VerifyProblem) -> int | None:
        """Return the index of the tensor's picture; None if the problem does not concern a known part of a tensor."""
        tensor = None if problem.tensor is None else self._tensors.get(problem.tensor)
        if tensor is None or problem.region is None or not self._holdings.cuts:
            return None
        if tensor.name not in self._known_places:
            if len(self.places) == _MAX_PLACES:
                return None
            self._known_places[tensor.name] = len(self.places)
            cut = self._holdings.cuts[tensor.cut]
            self.places.append(
                {
                    "title": f"{escape(tensor.name)} {list(cut.shape)}: the damage is somewhere in the red part",
                    "shape": cut.shape,
                    "boxes": cut.boxes,
                    "files": cut.files,
                    "damage": [],
                }
            )
        index = self._known_places[tensor.name]
        self.places[index]["damage"].append([list(problem.region[0]), list(problem.region[1]), "somewhere"])
        return index

    def data(self) -> dict[str, Any]:
        """Return the data for the script."""
        first = next((number for number, place in enumerate(self._place_of) if place is not None), 0)
        return {
            "kind": "damage",
            "files": self.files,
            "tensors": [escape(tensor.name) for tensor in self._holdings.tensors],
            "strips": [strip_data(strip) for strip in self._holdings.strips],
            "lanes": self.lanes,
            "places": self.places,
            "place_of": self._place_of,
            "first_problem": first,
        }
