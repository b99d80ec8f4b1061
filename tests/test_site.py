"""The site, built and opened from the disk in a real browser: search finds the page that explains a word. Needs what `make docs`
installs, and:

pip install playwright && apt-get install chromium
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MKDOCS = ROOT / ".venv-docs" / "bin" / "python"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
    pytest.mark.skipif(not MKDOCS.exists(), reason="make docs has not been run"),
]

ASKED = {
    "push to hub": {"consolidate.html", "guides/publish-while-training.html"},
    "moe": {"guides/moe.html"},
    "resume": {"cli.html"},
    "MoE on 8 nodes": {"guides/moe.html"},
    "one box with 4 GPUs": {"guides/one-box.html"},
    "Lightning to a private repo": {"guides/lightning-to-hub.html"},
    "verl every 100 steps": {"guides/verl-to-hub.html"},
    "no space left": {"help.html"},
}
"""What is typed -> where it is explained."""


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that types words, and returns the pages that are found, best first."""
    site = tmp_path_factory.mktemp("site")
    whole = ROOT / "build" / "python-api.md"
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    for command in (
        [sys.executable, "scripts/reference.py", "--site", whole],
        [MKDOCS, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site],
    ):
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)

        def typed(words: str) -> list[str]:
            page, requests = browser.new_page(), list[str]()
            page.on("request", lambda request: requests.append(request.url))
            page.goto(f"file://{site}/guides/index.html")
            page.focus("input[name=query]")
            page.fill("input[name=query]", words)
            page.press("input[name=query]", "End")  # it looks when a key goes up: once, for all of the words
            page.wait_for_selector(".md-search-result__item", state="attached")
            links = page.eval_on_selector_all(
                ".md-search-result__item > a", "all => all.map(each => each.href)"
            )
            assert not [url for url in requests if not url.startswith(("file:", "data:"))]
            page.close()
            return [url.partition(f"{site}/")[2].partition("?")[0].partition("#")[0] for url in links]

        yield typed
        browser.close()


@pytest.mark.parametrize("words", ASKED)
def test_search_finds_first_what_explains(search: Any, words: str) -> None:
    assert search(words)[0] in ASKED[words]
