"""Every guide's commands print what the page says, and its scripts run with the real trainer on CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.guides import console

NEEDS = {"lightning-to-hub": "lightning", "trainer-to-hub": "accelerate"}
GUIDES = [
    pytest.param(
        page,
        id=page.stem,
        marks=pytest.mark.skipif(
            page.stem in NEEDS and find_spec(NEEDS[page.stem]) is None,
            reason=f"{NEEDS.get(page.stem)} is not installed",
        ),
    )
    for page in sorted(console.PAGES.glob("*.md"))
    if "```console" in page.read_text()
]


@pytest.mark.dist
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_trace: object, fast_factors: object
) -> None:
    monkeypatch.chdir(tmp_path)
    with console.prepared(page, tmp_path):
        for command, said, printed in console.differences(page, tmp_path):
            assert printed == said, f"{command}\npython -m tests.guides.console"


def test_each_script_belongs_to_a_guide_and_each_guide_is_listed() -> None:
    pages = {page.name: page.read_text() for page in console.PAGES.glob("*.md")}
    index = pages.pop("index.md")
    assert not [name for name in pages if f"({name})" not in index]
    assert not [
        path.name
        for path in console.SCRIPTS.iterdir()
        if path.suffix == ".py" and path.name not in "".join(pages.values())
    ]
    assert not [name for name, text in pages.items() if "## What can go wrong" not in text]


def test_a_page_that_says_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("```console\n$ echo one\none\n$ echo two\nthree\n```\n")
    found = list(console.differences(tmp_path / "page.md", tmp_path))
    assert found == [("echo one", "one", "one"), ("echo two", "three", "two")]
