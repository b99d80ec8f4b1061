"""Runs and parts under other versions of the packages that a layout is traced with: real ones, some of which are killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardkit
from shardkit.operations import environment
from tests.models.zoo import ZOO, make_hub
from tests.operations.preshard.old_versions import here, with_old


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hub") / "hub"
    make_hub(ZOO["qwen3"], directory)
    return directory


def recorded(out: Path) -> str:
    found: str = json.loads((out / "shardkit.json").read_text())["layout"]["traced_with"]["transformers"]
    return found


@pytest.mark.usefixtures("fast_trace")
class TestOnADisk:
    def test_a_run_that_was_killed_goes_on(self, hub: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with_old(hub, out, killed_after=2)
        assert here(hub, out).resumed_files >= 2
        assert recorded(out) == environment.package_version("transformers")
        assert shardkit.verify(out, full=True).problems == ()

    def test_parts_and_a_commit(self, hub: Path, tmp_path: Path) -> None:
        out, other = tmp_path / "out", tmp_path / "other"
        with_old(hub, out, part="1/2")
        here(hub, out, part="2/2")
        assert recorded(out) == environment.package_version("transformers")
        with_old(hub, other, part="1/2")
        here(hub, other, part="2/3")
        with_old(hub, other, part="2/2")
        for path in out.glob("*.distcp"):
            assert path.read_bytes() == (other / path.name).read_bytes()
        assert len(list(out.glob("*.distcp"))) == len(list(other.glob("*.distcp")))

    def test_a_commit(self, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "out"
        with_old(hub, out, part="1/2")
        with monkeypatch.context() as patch:  # the last part sees that a file is missing
            patch.setattr("shardkit.operations.write.Writer._finished", lambda *_: {0})
            here(hub, out, part="2/2")
        assert shardkit.commit(out).warnings == ()
        assert shardkit.verify(out, full=True).problems == ()
