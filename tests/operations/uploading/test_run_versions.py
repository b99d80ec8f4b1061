"""Runs and parts that write into a store under other versions of the packages that a layout is traced with."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardkit
from tests.models.zoo import ZOO, make_hub
from tests.operations.preshard.old_versions import MIXED, here, with_old
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
    result, (warning,) = here(hub, out)
    assert result.resumed_files >= 2
    assert warning.startswith(MIXED)
    assert shardkit.verify(out, full=True).problems == ()
    assert with_old(hub, out) == []


@pytest.mark.usefixtures("fast_trace")
def test_parts_and_a_commit(
    served: servers.Served, hub: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert with_old(hub, out, part="1/2") == []
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.operations.parts.divided.Divided.commit", lambda _: False)
        (warning,) = here(hub, out, part="2/2")[1]
    assert warning.startswith(MIXED)
    told = list[str]()
    assert shardkit.commit(out, on_warning=told.append).warnings == tuple(told)
    assert [each.startswith(MIXED) for each in told] == [True]
    assert shardkit.verify(out, full=True).problems == ()
