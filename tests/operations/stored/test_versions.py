"""Runs and parts that write into a store under other versions of the packages that a layout is traced with."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkit
from tests.models.zoo import ZOO, make_hub
from tests.operations.preshard.old_versions import here, with_old
from tests.worlds import stores as servers


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "hub"
    make_hub(ZOO["qwen3"], directory)
    return directory


@pytest.mark.usefixtures("fast_trace")
def test_a_run_that_was_killed_and_an_output_that_is_there(
    served: servers.Served, hub: Path, out: str
) -> None:
    with_old(hub, out, killed_after=2)
    assert here(hub, out).resumed_files >= 2
    assert shardkit.verify(out, full=True).problems == ()
    with_old(hub, out)  # the same job has made it


@pytest.mark.usefixtures("fast_trace")
def test_parts_and_a_commit(
    served: servers.Served, hub: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_old(hub, out, part="1/2")
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.operations.write.Writer._finished", lambda *_: {0})
        here(hub, out, part="2/2")
    assert shardkit.commit(out).warnings == ()
    assert shardkit.verify(out, full=True).problems == ()
