"""verify, diff and manifest in parts: one answer, that of one process, whoever is killed and however often it is run."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardkit.formats.dcp import chunk_list
from tests.torture.harness import Answer, Scenarios, Server, restore

Ask = Callable[..., list[Answer]]


class Asked:
    """A command that is run whole and in parts.

    Args:
        server: where it runs.
        directory: for the answers.
        args: of the command.
    """

    def __init__(self, server: Server, directory: Path, *args: str) -> None:
        self._server, self.answers, self._args = server, directory, args
        self.whole = server((*args, "--json", "--no-progress"))
        """One process."""

    def run(self, part: str | None, *extra: str, **more: Any) -> dict[str, Any]:
        """Return the request for a part, or for what puts parts together."""
        which = () if part is None else ("--part", part)
        args = [*self._args, *which, "--answers", str(self.answers), *extra, "--json", "--no-progress"]
        return {"args": args, **more}

    def parts(self, count: int) -> list[dict[str, Any]]:
        """Return the requests for all parts."""
        return [self.run(f"{number}/{count}") for number in range(1, count + 1)]

    def together(self, requests: Sequence[dict[str, Any]]) -> list[Answer]:
        """Run them at the same moment."""
        return self._server.together(requests)

    def is_whole(self, answer: Answer) -> bool:
        """True if this is the answer of one process: what it says, and its exit code."""
        return answer.code == self.whole.code and said(answer) == said(self.whole)


def said(answer: Answer) -> dict[str, Any]:
    """Return the document without the time that it took."""
    found: dict[str, Any] = json.loads(answer.out)
    found.pop("elapsed_s", None)
    return found


@pytest.fixture
def sharded(found: Scenarios, place: Path) -> Iterator[Path]:
    """A pre-sharded directory of five ranks, with a damaged byte of a tensor in each of two files."""
    path = place / "sharded"
    restore(path, found["preshard columns"].expected)
    for number in (1, 3):
        file = path / f"__{number}_0.distcp"
        chunk = chunk_list.read(str(path), file.name).chunks[-1]
        data = bytearray(file.read_bytes())
        data[chunk.data_start] ^= 1
        file.write_bytes(data)
    yield path
    shutil.rmtree(place)


@pytest.fixture(params=["verify", "sample", "against", "diff", "stats"])
def asked(request: pytest.FixtureRequest, found: Scenarios, server: Server, sharded: Path) -> Asked:
    hub = str(found["preshard columns"].source)
    args = {
        "verify": ["verify", str(sharded), "--full"],
        "sample": ["verify", str(sharded), "--read", "60%", "--seed", "3"],
        "against": ["verify", str(sharded), "--full", "--against", hub],
        "diff": ["diff", str(sharded), hub],
        "stats": ["diff", str(sharded), hub, "--stats", "--sort", "difference"],
    }[request.param]
    made = Asked(server, sharded.parent / "answers", *args)
    assert made.whole.code == (1 if request.param != "sample" else made.whole.code)
    return made


def test_the_last_of_several_at_once_has_the_answer_of_one(asked: Asked) -> None:
    answers = asked.together(asked.parts(3))
    whole = [answer for answer in answers if asked.is_whole(answer)]
    assert whole, [answer.err for answer in answers]
    for answer in answers:
        if answer not in whole:
            assert answer.code == 0
            part = said(answer)["part"]
            assert part["missing"]
            assert part["part"] not in part["missing"]
    assert asked.is_whole(asked.together([asked.run(None)])[0])
    assert sorted(path.name for path in asked.answers.iterdir()) == [
        *(f"part-{number}-of-3.json" for number in (1, 2, 3)),
        "plan.json",
    ]


@pytest.mark.parametrize("asked", ["against"], indirect=True)
def test_a_part_that_is_run_again_reads_nothing(asked: Asked) -> None:
    asked.together(asked.parts(2))
    before = {path.name: path.stat().st_mtime_ns for path in asked.answers.iterdir()}
    assert all(asked.is_whole(answer) for answer in asked.together(asked.parts(2)))
    assert {path.name: path.stat().st_mtime_ns for path in asked.answers.iterdir()} == before


@pytest.mark.parametrize("asked", ["verify"], indirect=True)
def test_more_parts_than_questions_and_another_number_of_parts(asked: Asked) -> None:
    first = asked.together([asked.run("1/2")])[0]
    assert first.code == 0
    answers = asked.together(asked.parts(9))
    assert any(asked.is_whole(answer) for answer in answers)
    assert asked.is_whole(asked.together([asked.run(None)])[0])


@pytest.mark.parametrize("at", [0.1, 0.5, 1.0])
def test_killed_and_run_again(at: float, sharded: Path, found: Scenarios, server: Server) -> None:
    hub = str(found["preshard columns"].source)
    asked = Asked(
        server, sharded.parent / "answers", "verify", str(sharded), "--full", "--against", hub, "--jobs", "1"
    )
    counted = asked.together([asked.run("2/2")])[0]
    shutil.rmtree(asked.answers)
    fault = {"at": max(int(len(counted.calls) * at), 1), "do": "kill"}
    assert asked.together([asked.run("2/2", fault=fault)])[0].code == -9
    other = asked.together([asked.run("1/2")])[0]
    report = asked.together([asked.run(None)])[0]
    if at < 1:
        assert other.code == 0
        assert report.code == 4
        (line,) = json.loads(report.out)["problems"]
        assert line.startswith("part 2/2: ")
        assert re.search("--answers .* --part 2/2$", line)
    else:
        assert asked.is_whole(other)
    assert asked.is_whole(asked.together([asked.run("2/2")])[0])
    assert sorted(path.name for path in asked.answers.iterdir()) == [
        *(f"part-{number}-of-2.json" for number in (1, 2)),
        "plan.json",
    ]


def refused(asked: Asked, *requests: dict[str, Any]) -> list[str]:
    """Return what is said against parts."""
    texts = []
    for answer in asked.together(requests):
        assert answer.code == 2, (answer.code, answer.err)
        error = json.loads(answer.out)
        texts.append("\n".join([error["message"], *error["problems"], error["hint"] or ""]))
    return texts


def test_parts_of_another_state_or_with_other_options_are_refused(
    sharded: Path, found: Scenarios, server: Server
) -> None:
    hub = str(found["preshard columns"].source)
    asked = Asked(server, sharded.parent / "answers", "verify", str(sharded), "--full", "--against", hub)
    assert asked.together([asked.run("1/2")])[0].code == 0
    other = Asked(server, asked.answers, "verify", str(sharded), "--full")
    assert "against: " in refused(other, other.run("2/2"), other.run(None))[0]
    compared = Asked(server, asked.answers, "diff", str(sharded), hub)
    assert "verify there, diff here" in refused(compared, compared.run("2/2"))[0]
    file = sharded / "__2_0.distcp"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))
    for text in refused(asked, asked.run("2/2"), asked.run(None), asked.run("1/2")):
        assert "holds answers of another plan" in text
        assert "__2_0.distcp" in text
        assert "choose another directory" in text
    wrong = asked.run("2/2")
    wrong["args"][-3] = str(sharded / "answers")
    assert "lies in" in refused(asked, wrong)[0]


def test_what_is_said_of_wrong_use(sharded: Path, server: Server) -> None:
    for args, said_then in (
        (["verify", str(sharded), "--full", "--part", "1/2"], "--part needs --answers DIR"),
        (["verify", str(sharded), "--part", "1/2", "--answers", "x"], "divides what is read"),
        (["verify", str(sharded), "--full", "--part", "3/2", "--answers", "x"], "no part 3 of 2"),
        (["diff", str(sharded), str(sharded), "--part", "1/2"], "--part needs --answers DIR"),
    ):
        answer = server(args)
        assert (answer.code, said_then in answer.err) == (2, True), answer.err


def test_nothing_there_and_what_is_damaged(sharded: Path, server: Server) -> None:
    asked = Asked(server, sharded.parent / "answers", "verify", str(sharded), "--full")
    nobody = asked.together([asked.run(None)])[0]
    assert nobody.code == 4
    assert "no part has begun" in nobody.err
    asked.together([asked.run("1/2")])
    file = asked.answers / "part-1-of-2.json"
    for content in (
        "",
        "{}",
        file.read_text().replace('"answers"', '"other"'),
        '{"plan": "x", "answers": {}}',
    ):
        file.write_text(content)
        answer = asked.together([asked.run("2/2")])[0]
        assert answer.code == 3, answer.err
        assert "part-1-of-2.json" in answer.err
    file.unlink()
    asked.together([asked.run("1/2")])
    assert asked.is_whole(asked.together([asked.run("2/2")])[0])


@pytest.fixture
def plain(found: Scenarios, place: Path) -> Iterator[Path]:
    """A checkpoint of five ranks, as somebody else's that nobody described; a tensor's pieces lie in several files."""
    path = place / "plain"
    restore(path, {n: data for n, data in found["preshard two jobs"].expected.items() if "json" not in n})
    yield path
    shutil.rmtree(place)


@pytest.mark.parametrize("extra", [(), ("--sha256",)])
def test_parts_make_the_manifest_of_one_process(plain: Path, server: Server, extra: tuple[str, ...]) -> None:
    whole, target = plain.parent / "whole.json", plain.parent / "out.json"
    one = server(["manifest", str(plain), "-o", str(whole), *extra, "--json"])
    assert one.code == 0, one.err
    asked = Asked(server, plain.parent / "answers", "manifest", str(plain), "-o", str(target), *extra)
    target.unlink()
    killed = asked.run("2/3", fault={"at": 40, "do": "kill"})
    assert [answer.code for answer in asked.together([asked.run("1/3"), killed])] == [0, -9]
    assert asked.together([asked.run(None)])[0].code == 4
    assert not target.exists()
    answers = asked.together([asked.run("2/3"), asked.run("3/3")])
    assert [answer.code for answer in answers] == [0, 0], [answer.err for answer in answers]
    assert target.read_bytes() == whole.read_bytes()
    assert [said(answer)["part"] for answer in answers].count(None) >= 1
    assert said(answers[-1])["num_tensor_digests"] in (0, said(one)["num_tensor_digests"])
    assert {answer.code for answer in asked.together([*asked.parts(3), asked.run(None)])} == {0}
    target.write_bytes(b"{}")
    for options in ((), ("--overwrite",)):  # no manifest
        assert asked.together([asked.run(None, *options)])[0].code == 2
        assert target.read_bytes() == b"{}"
    target.unlink()
    assert server(["manifest", str(plain), "-o", str(target), *([] if extra else ["--sha256"])]).code == 0
    other = target.read_bytes()
    assert asked.together([asked.run(None)])[0].code == 2
    assert target.read_bytes() == other
    assert asked.together([asked.run(None, "--overwrite")])[0].code == 0
    assert target.read_bytes() == whole.read_bytes()


def test_a_damaged_checkpoint_gets_no_manifest(sharded: Path, server: Server) -> None:
    for path in sharded.glob("*json"):
        path.unlink()
    asked = Asked(server, sharded.parent / "answers", "manifest", str(sharded))
    answers = asked.together(asked.parts(3))
    assert sorted(answer.code for answer in answers)[-1] == 3
    whole = asked.together([asked.run(None)])[0]
    assert (whole.code, whole.out) == (asked.whole.code, asked.whole.out)
    assert not sharded.with_name("sharded.shardkit.json").exists()


def test_the_text_for_people_is_that_of_one_process(sharded: Path, server: Server) -> None:
    args = ["verify", str(sharded), "--full"]
    whole, answers = server(args), ["--answers", str(sharded.parent / "answers")]
    first = server([*args, "--part", "1/2", *answers])
    assert first.code == 0
    assert first.out.startswith(f"part 1/2 of {sharded}: ")
    assert "missing" in first.out
    for last in (server([*args, "--part", "2/2", *answers]), server([*args, *answers])):
        assert (last.code, last.out, last.err) == (whole.code, whole.out, whole.err)


def test_what_could_not_be_read_is_read_again(plain: Path, server: Server) -> None:
    asked = Asked(server, plain.parent / "answers", "verify", str(plain), "--full", "--jobs", "1")
    fault = {"of": ["preadv"], "at": 1, "do": "errno", "errno": errno.EIO}
    first, other = asked.together([asked.run("1/2", fault=fault)])[0], asked.together([asked.run("2/2")])[0]
    assert first.code == 0
    assert said(first)["problems"][0]["is_unreadable"]
    assert other.code == 5
    assert asked.is_whole(asked.together([asked.run("1/2")])[0])
    assert asked.is_whole(asked.together([asked.run(None)])[0])
