"""Worlds whose findings several test modules look at."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.worlds.processes import run_script


class World(NamedTuple):
    """What the worlds of a script left."""

    out: Path
    """Where they wrote."""
    found: Callable[[str], list[dict[str, Any]]]
    """A world's name -> what each rank that was not killed said, in order."""


def run_world(name: str, out: Path) -> World:
    """Run a script of worlds, and return what they left in `out`."""
    run_script(f"training/{name}", str(out))

    def found(world: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(out.glob(f"{world}-*.json"))]

    return World(out, found)


@pytest.fixture(scope="session")
def precision_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return run_world("precision_world.py", tmp_path_factory.mktemp("precision"))
