"""Hooks of mkdocs: pages of README.md and its neighbours, and links that lead out of docs/.

The pages are plain Markdown with relative links, as GitHub shows them. On the site, a link to a page leads to the page,
and a link to any other file leads to the public source, `SOURCE` in shardkit/_version.py; it is plain text while that is
empty.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE: str = runpy.run_path(str(ROOT / "shardkit" / "_version.py"))["SOURCE"]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "build/python-api.md": "python-api.md",
}
"""File that is a page too, outside of docs -> page; `make docs` writes the last one before it builds the site."""
BOOSTS = {
    "guides/publish-while-training.md": 6,
    "guides/": 2,
    "help.md": 2,
    "install.md": 2,
    "loading.md": 2,
    "start.md": 2,
}
"""Beginning of a page's path -> how much search prefers it: pages that say what to type. "Hub" is in the title of six guides."""
_LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)(\]\(<?)([^)#\s>]+)((?:#[^)\s>]*)?>?\))")
_FENCE = re.compile(r"^( *)(```+|~~~+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site."""
    outside = {to: path for path, to in OUTSIDE.items()}
    for beginning, boost in BOOSTS.items():
        if page.file.src_uri.startswith(beginning):
            page.meta.setdefault("search", {"boost": boost})
    here = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return site_links(markdown, here, SOURCE)


def site_links(markdown: str, path: str, repository: str) -> str:
    """Return the Markdown of a file of the repository with its links as they are on the site.

    Args:
        markdown: its text.
        path: where it lies, from the root of the repository, e.g. "docs/guides/index.md".
        repository: URL of the repository; "" if it has none.
    """
    page = OUTSIDE.get(path, path.removeprefix("docs/"))

    def lead(match: re.Match[str]) -> str:
        label, before, target, after = match.groups()
        found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if ":" in target or not (ROOT / found).exists():  # what is missing, mkdocs says
            return match[0]
        if found in OUTSIDE or (found.startswith("docs/") and (ROOT / found).is_file()):
            to = OUTSIDE.get(found, found.removeprefix("docs/"))
            return f"[{label}{before}" + posixpath.relpath(to, posixpath.dirname(page) or ".") + after
        if not repository:
            return label
        kind = "tree" if (ROOT / found).is_dir() else "blob"
        return f"[{label}{before}{repository}/{kind}/main/{found}{after}"

    lines, fence = markdown.split("\n"), ""
    for number, line in enumerate(lines):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[2]
        elif mark and mark[2].startswith(fence):
            fence = ""
        elif not fence:
            lines[number] = _LINK.sub(lead, line)
    return "\n".join(lines)
