"""The version, and the versions of torch that were tried. A module of its own: reading it imports nothing."""

__version__ = "0.1.0"

SOURCE = ""
"""Where the source is, e.g. https://example.org/shardkit; empty while there is no public address: no page promises one."""

TESTED_TORCH = ("2.6", "2.15")
"""The oldest and the newest torch that the tests ran with; docs/versions.md has all."""


def page(name: str) -> str:
    """Return where a page of docs/ is read, by its name: who installed shardkit has no docs/."""
    return f"{SOURCE}/blob/main/docs/{name}" if SOURCE else f"docs/{name} in shardkit's source"


def major(version: str) -> int:
    """Return the first number of a version; 0 if it has none."""
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def torch_note(version: str | None) -> str | None:
    """Return a note if a version of torch is outside those that were tried; None otherwise, or for None."""
    if version is None:
        return None
    oldest, newest = (tuple(map(int, each.split("."))) for each in TESTED_TORCH)
    running = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if oldest <= running <= newest:
        return None
    side = "older" if running < oldest else "newer"
    return f"torch {version} is {side} than what shardkit was tried with, {' to '.join(TESTED_TORCH)}"


def has_torch() -> bool:
    """True if torch is installed; it is not imported."""
    from importlib.util import find_spec

    return find_spec("torch") is not None
