"""Answers in parts from Python; tests/torture/test_answers.py has them from real processes, killed ones too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import IncompleteError, UsageError


@pytest.fixture
def sharded(model: Path, tmp_path: Path) -> Path:
    shardkit.preshard(model, tmp_path / "sharded", world_size=4, layout="declared")
    return tmp_path / "sharded"


def call(text: str) -> Any:
    """Make the call that an error says, as a person who pastes it would."""
    return eval(text, {"shardkit": shardkit})


@pytest.mark.parametrize("verb", ["verify", "diff", "write_manifest"])
def test_what_to_type_works_from_another_directory(
    verb: str, model: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "verify": (["sharded"], {"full": True, "against": "model"}),
        "diff": (["sharded", "model"], {}),
        "write_manifest": (["sharded", "listed.json"], {}),
    }
    given, options = arguments[verb]
    monkeypatch.chdir(tmp_path)
    run = getattr(shardkit, verb)
    first = run(*given, **options, part="1/2", answers="answers")
    assert first.part.missing == ("2/2",)
    monkeypatch.chdir("/")
    given = [tmp_path / path for path in given]
    options |= {"against": model} if "against" in options else {}
    with pytest.raises(IncompleteError, match=r"part 2/2") as caught:
        run(*given, **options, answers=tmp_path / "answers")
    (line,) = caught.value.problems
    found = re.fullmatch(r"part 2/2: \d+ answers?; (shardkit\..*)", line)
    assert found is not None
    assert call(found[1]).part is None
    whole = run(*given, **options, answers=tmp_path / "answers")
    assert whole.part is None
    assert (tmp_path / "listed.json").exists() == (verb == "write_manifest")


def test_answers_in_a_store_or_in_the_checkpoint_are_refused(sharded: Path) -> None:
    with pytest.raises(UsageError):
        shardkit.verify(sharded, full=True, part="1/2", answers="s3://bucket/answers")
    with pytest.raises(UsageError, match="lies in"):
        shardkit.verify(sharded, full=True, part="1/2", answers=sharded / "answers")
    assert not (sharded / "answers").exists()
