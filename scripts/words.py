"""Count the words that people wrote in README and docs, by shelf and page; `LIMITS` bounds them.

    python scripts/words.py

What is made from code does not count: whole pages of `GENERATED`, tables between marks of a script, and what
a terminal has shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIMITS = {"all": 45_000, "Use": 20_000}
"""Most words of all pages, and of the shelf of that name in mkdocs.yml. README counts as Use."""
GENERATED = {"docs/commands.md", "docs/python.md", "docs/models.md"}
_MADE = re.compile(
    r"^<!-- (?!end).*? -->$.*?^<!-- end -->$|^( *)```console\n.*?^\1```$", re.MULTILINE | re.DOTALL
)


def count_words(text: str) -> int:
    """Return how many words of a page people wrote; a mark alone, such as a table's, is none."""
    return sum(any(map(str.isalnum, word)) for word in _MADE.sub("", text).split())


def pages() -> Iterator[tuple[str, str]]:
    """Yield (shelf, page) of README and of each page in the site's navigation."""
    yield "Use", "README.md"
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        for shelf, inside in entry.items():
            for name in _names(inside) if isinstance(inside, list) else ():
                if (ROOT / "docs" / name).exists():
                    yield shelf, f"docs/{name}"


def _names(entries: object) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        yield from _names(list(entries.values()))
    elif isinstance(entries, list):
        for entry in entries:
            yield from _names(entry)


def counted() -> dict[tuple[str, str], int]:
    """Return (shelf, page) -> words, without pages that are generated."""
    return {
        (shelf, page): count_words((ROOT / page).read_text())
        for shelf, page in pages()
        if page not in GENERATED
    }


def totals() -> dict[str, int]:
    """Return the words of each shelf, and of all."""
    words = dict[str, int]()
    for (shelf, _), number in counted().items():
        for name in (shelf, "all"):
            words[name] = words.get(name, 0) + number
    return words


def main() -> None:
    """Print words by page and by shelf; exit with 1 where a limit is exceeded."""
    for (shelf, page), number in counted().items():
        print(f"{number:6}  {shelf:10}  {page}")
    found = totals()
    for name, number in found.items():
        limit = LIMITS.get(name)
        print(f"{number:6}  {name}" + ("" if limit is None else f", at most {limit}"))
    if any(found[name] > limit for name, limit in LIMITS.items()):
        sys.exit("too many words: shorten a page")


if __name__ == "__main__":
    main()
