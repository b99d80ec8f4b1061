"""Tiny checkpoints for the tests, and what a layout means spelt out in plain numpy."""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from shardkit.errors import ShardkitError
from tests.cases import COLLECTED
from tests.hub_client import HubClient
from tests.worlds.hints import untypable
from tests.worlds.ranks import Ranks

# Tests never look anything up on the network, whatever the machine's settings are.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Nor do they share what the user who runs them has cached.
os.environ["SHARDKIT_CACHE"] = "off"
# Workers share the cores: threads of OpenMP that wait for each other are an eighth of the CPU of tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hypothesis goes by the clock: an example in 200 ms, ten in a second. A busy machine is not a failing property.
settings.register_profile("shardkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shardkit")

# What the tests import, torch and transformers among it, is 600,000 objects that stay, and each full collection goes
# through all of them: a seventh of the CPU of tests.
gc.disable()
gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note all tests, before any is left out."""
    config.stash[COLLECTED] = {item.nodeid: item.get_closest_marker("prove") is not None for item in items}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect from now on, but what is there by now."""
    Ranks.select(session.items)
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def make_hub(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a Hub directory: `make_hub({"a": tensor}, config=..., name="model")`."""

    def make(
        tensors: Mapping[str, Any], *, config: Mapping[str, Any] | None = None, name: str = "model"
    ) -> Path:
        from safetensors.torch import save_file

        directory = tmp_path / name
        directory.mkdir()
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
        if config is not None:
            (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make


@pytest.fixture(scope="session")
def hub_client() -> Iterator[HubClient]:
    """Scripts that take a server for the Hub run in forks of one process."""
    client = HubClient()
    yield client
    client.close()


@pytest.fixture
def fast_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces of this test come from forks of a process that has imported everything."""
    from shardkit.layout import traced
    from tests.worlds.processes import fork_server

    monkeypatch.setattr(traced, "_serve_request", fork_server().trace)


@pytest.fixture(scope="session", autouse=True)
def _errors() -> Iterator[list[ShardkitError]]:
    """Collect every error that is made in this process."""
    made, init = list[ShardkitError](), ShardkitError.__init__

    @functools.wraps(init)
    def note(self: ShardkitError, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    ShardkitError.__init__ = note  # type: ignore[method-assign]
    yield made
    ShardkitError.__init__ = init  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _hints_can_be_typed(_errors: list[ShardkitError]) -> Iterator[None]:
    """Whatever a test is about: commands that errors tell people to type are commands, with options that exist."""
    yield
    made = list(_errors)
    _errors.clear()
    wrong = [line for error in made for line in untypable([*error.problems, error.hint or ""])]
    assert not wrong
