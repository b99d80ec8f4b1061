"""The documentation holds together: links and anchors lead somewhere, and the site has every page."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

import click
import pytest
import yaml

from shardkit._version import SOURCE
from shardkit.cli import main

ROOT = Path(__file__).parents[1]
SITE = runpy.run_path(str(ROOT / "scripts" / "site.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)|(?:src|href|srcset)=\"([^\"\s]+)")
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of the lines of Markdown that stand in no fence."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" *(`{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
        else:
            yield number, line


def anchors(text: str) -> Iterator[str]:
    """Yield the anchors of a page, as GitHub makes them of its headings."""
    taken = set[str]()
    for _, line in prose(text):
        if heading := re.match(r"#+ +(.*)", line):
            said = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower().replace("`", "").strip()
            slug = re.sub(r"[^\w\- ]", "", said).replace(" ", "-")
            slug = next(each for n in count() if (each := f"{slug}-{n}" if n else slug) not in taken)
            taken.add(slug)
            yield slug


def broken(path: Path, root: Path) -> Iterator[str]:
    """Yield the links of a page that lead to no file of the repository, or to no heading."""
    text = path.read_text()
    for number, line in prose(text):
        for found in _LINK.findall(_CODE.sub("", line)):
            target, _, anchor = (found[0] or found[1]).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            at = Path(posixpath.normpath(path.parent / target)) if target else path
            where = f"{path.relative_to(root)}:{number}: {target or '#'}"
            if not at.exists() or not at.is_relative_to(root):
                yield where
            elif anchor and at.suffix == ".md" and anchor not in anchors(at.read_text()):
                yield f"{where}: no heading {anchor}"


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    assert [problem for page in PAGES for problem in broken(page, ROOT)] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`: three\n[a](gone.md) [b](#one-two-three) `[c](gone.md)` [d](page.md#four) [e](../..)\n"
        "```text\n[f](gone.md)\n```\n[g](https://example.org/gone)\n"
    )
    assert [problem.partition(": ")[2] for problem in broken(page, tmp_path)] == [
        "gone.md",
        "page.md: no heading four",
        "../..",
    ]


def listed(entries: object) -> Iterator[str]:
    """Yield the pages of the site's navigation."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        yield from listed(list(entries.values()))
    elif isinstance(entries, list):
        for entry in entries:
            yield from listed(entry)


def test_the_site_has_every_page_once() -> None:
    pages = sorted(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    in_docs = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages == sorted(in_docs | set(SITE["OUTSIDE"].values()))


@pytest.mark.parametrize(
    ("path", "link", "on_the_site"),
    [
        ("README.md", "[a](docs/start.md#install)", "[a](start.md#install)"),
        ("README.md", "![a](docs/speed.svg) [b](LICENSE)", "![a](speed.svg) [b](REPO/blob/main/LICENSE)"),
        ("docs/guides/index.md", "[a](../start.md)", "[a](../start.md)"),
        ("docs/guides/index.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("docs/start.md", "[a](../examples/guides)", "[a](REPO/tree/main/examples/guides)"),
        ("docs/start.md", "[a](gone.md) [b](https://example.org)", "[a](gone.md) [b](https://example.org)"),
        ("docs/start.md", "```text\n[a](../LICENSE)\n```", "```text\n[a](../LICENSE)\n```"),
    ],
)
def test_links_on_the_site(path: str, link: str, on_the_site: str) -> None:
    assert SITE["site_links"](link, path, "REPO") == on_the_site


def test_a_link_out_of_the_site_is_text_without_an_address() -> None:
    text = "See [`examples` [1]](../examples/guides), [help](help.md)."
    assert SITE["site_links"](text, "docs/start.md", "") == "See `examples` [1], [help](help.md)."


WIDTH = 120


def misshapen(text: str) -> Iterator[str]:
    """Yield what stands in the way of reading a page: long lines, and code without a fence that says its language.

    Tables, pictures and what a terminal showed (`console`) are as wide as they are.
    """
    fence = language = ""
    is_item = False
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.fullmatch(r" *(`{3,})(\w*)", line)
        if mark and not fence:
            fence, language = mark.groups()
            if not language:
                yield f"{number}: a fence without a language"
        elif mark and mark[1].startswith(fence):
            fence = language = ""
        elif len(line) > WIDTH and language != "console" and not line.startswith(("|", "![", "<")):
            yield f"{number}: {len(line)} characters"
        elif not fence and not is_item and line.startswith("    "):
            yield f"{number}: indented code"
        if line.strip() and not fence:
            is_item = bool(re.match(r" *([-*]|\d+\.) ", line)) or (is_item and line.startswith(" "))


def test_pages_have_short_lines_and_fenced_code() -> None:
    pages = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
    assert [f"{name}:{each}" for name, text in pages.items() for each in misshapen(text)] == []


def test_what_is_misshapen_is_found() -> None:
    wide = "x" * (WIDTH + 1)
    page = f"{wide}\n\n    code\n\n- item\n    more\n\n```\nwide\n```\n```text\n{wide}\n```\n```console\n{wide}\n```\n| {wide} |\n"
    assert list(misshapen(page)) == [
        "1: 121 characters",
        "3: indented code",
        "8: a fence without a language",
        "12: 121 characters",
    ]


TRAINERS = runpy.run_path(str(ROOT / "scripts" / "trainers.py"))


def test_the_table_of_trainers_is_what_the_tests_found() -> None:
    rows = json.loads(TRAINERS["ROWS_FILE"].read_text())
    assert "\n".join(TRAINERS["table"](rows)) in TRAINERS["PAGE"].read_text(), "scripts/trainers.py --render"
    assert not [name for name, row in rows.items() for _, failed in row["columns"].values() if failed]
    pins = (ROOT / "pyproject.toml").read_text() + (ROOT / "constraints.txt").read_text()
    shown = {package: versions for row in rows.values() for package, versions in row["versions"].items()}
    for package in ("torch", "transformers", "lightning", "accelerate"):
        assert any(f"{package}=={version}" in pins for version in shown[package]), "scripts/trainers.py"


def test_the_table_of_trainers_names_tests_that_exist() -> None:
    named = {
        test.partition("[")[0] for row in TRAINERS["ROWS"].values() for _, test in TRAINERS["tests_of"](row)
    }
    for test in named:
        file, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (ROOT / file).read_text(), test


SCRIPTS = [
    *(
        (page, block)
        for page in PAGES
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    ),
    *((path, path.read_text()) for path in sorted(ROOT.glob("examples/**/*.sbatch"))),
]


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words behind `shardkit` of each command in a script; a line of usage, with brackets, is none."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        yield from (found for word in words if "shardkit " in word for found in commands(word))  # in quotes
        if "shardkit" in words and "[" not in line:
            typed = words[words.index("shardkit") + 1 :]
            yield list(takewhile(lambda word: not set(word) <= set("|&;<>()"), typed))


_ADDRESS = re.compile(r"(?:git\+|https?://)[^\s)\"'`>]*")
_INSTALLER = re.compile(
    r"\b(?:pip install|uv add|uv tool (?:install|run)|uvx|pipx (?:install|run)|git clone|hf extensions install|hf jobs)\b.*"
)
_FROM_AN_INDEX = re.compile(r"(?<![\w./-])['\"]?(?:[\w-]+/)?(?:hf-)?shardkit(?:\[[\w,]+\])?['\"]?(?= |$)")


def unreachable(text: str, source: str) -> Iterator[str]:
    """Yield addresses of shardkit that are not its public one, and lines that install it from an index.

    Args:
        text: of a page, a script or a package.
        source: the public address, `SOURCE`; "" while there is none.
    """
    for address in _ADDRESS.findall(text):
        rest = address.removeprefix("git+")
        if ("shardkit" in address or address != rest) and not (source and rest.startswith(source)):
            yield address
    for line in _INSTALLER.findall(text):
        typed = line.partition("`")[0].partition(" #")[0].replace("shardkit shardkit", "shardkit")
        words = re.sub(r"(--from|--spec) (\S+) shardkit\b.*", r"\1 \2", typed)
        if not source and _FROM_AN_INDEX.search(words):
            yield line


SOLD = [
    *PAGES,
    *(
        path
        for top in ("examples", "packaging")
        for path in sorted(ROOT.glob(f"{top}/**/*"))
        if path.is_file() and path.suffix != ".pyc"
    ),
]


def test_nobody_is_sent_to_an_address_that_does_not_exist() -> None:
    """Where shardkit is installed, its name is enough to add an extra: lines that say so are right."""
    found = {}
    for path in SOLD:
        text = path.read_text().replace("git+https://SOURCE", "")
        text = re.sub(r".*shardkit (?:is|was) installed.*", "", text)
        if wrong := list(unreachable(text, SOURCE)):
            found[str(path.relative_to(ROOT))] = wrong
    assert found == {}


@pytest.mark.parametrize(
    ("line", "is_wrong"),
    [
        ("pip install '.[trace]'    # in a clone of shardkit", False),
        ("pip install './shardkit[trace]'", False),
        ("uvx --from . shardkit inspect a", False),
        ("pipx run --spec '.[stores]' shardkit inspect a", False),
        ("pip install 'shardkit[trace]'", True),
        ("uv tool install shardkit", True),
        ("uvx shardkit inspect a", True),
        ("pipx run shardkit inspect a", True),
        ("hf extensions install somebody/hf-shardkit", True),
        ("[it](https://example.com/shardkit/blob)", True),
        ("pip install git+https://example.com/other", True),
    ],
)
def test_an_address_that_does_not_exist_is_found(line: str, is_wrong: bool) -> None:
    assert bool(list(unreachable(line, ""))) == is_wrong
    assert list(unreachable("git+https://example.org/shardkit", "https://example.org/shardkit")) == []


def parse(words: list[str]) -> None:
    """Parse a command; nothing is run."""
    # With the settings of main: click keeps a command's help option as its first context made it.
    root = click.Context(main, info_name="shardkit", **main.context_settings)
    command = main.get_command(root, words[0])
    assert command is not None, words
    with contextlib.suppress(click.exceptions.Exit):  # --help
        command.make_context(words[0], words[1:], parent=root)


def test_shells_and_the_command_line_take_what_pages_say_to_type() -> None:
    for path, script in SCRIPTS:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for words in commands(script):
            try:
                parse(words)
            except click.ClickException as error:
                pytest.fail(
                    f"{path.relative_to(ROOT)}: shardkit {shlex.join(words)}: {error.format_message()}"
                )


def test_help_quotes_messages_that_exist() -> None:
    """A message in an f-string may go over several lines: what is quoted stands on one."""
    said = (ROOT / "docs" / "help.md").read_text().partition("## torch")[0]
    code = "".join(path.read_text() for path in ROOT.glob("shardkit/**/*.py"))
    rows = re.findall(r"^\| (`[^|]*) \|", said, re.M)
    assert len(rows) > 15
    assert [words for row in rows for words in re.findall(r"`([^`]+)`", row) if words not in code] == []


WORDS = runpy.run_path(str(ROOT / "scripts" / "words.py"))


def test_people_wrote_no_more_than_a_user_reads() -> None:
    found = WORDS["totals"]()
    assert {name: words for name, words in found.items() if words > WORDS["LIMITS"].get(name, words)} == {}
    assert {page for _, page in WORDS["pages"]()} >= WORDS["GENERATED"]


def test_words_that_people_wrote_are_counted() -> None:
    page = "# One two\n| three | - |\n```console\n$ shown\n```\n<!-- begin: x -->\n| made |\n<!-- end -->\n```bash\nfour\n```\n"
    assert WORDS["count_words"](page) == len(["One", "two", "three", "```bash", "four"])
