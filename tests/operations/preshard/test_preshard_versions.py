"""Runs and parts under other versions of the packages that a layout is traced with: real ones, some of which are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.operations import environment
from tests.models.zoo import ZOO, make_hub
from tests.operations.preshard.old_versions import MIXED, OLD, here, with_old


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
    def test_a_run_that_was_killed_goes_on_with_a_warning(self, hub: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with_old(hub, out, killed_after=2)
        result, (warning,) = here(hub, out)
        assert result.resumed_files >= 2
        installed = environment.package_version("transformers")
        assert warning.startswith(f"{MIXED}{installed}: ")
        assert "may differ" in warning
        assert recorded(out) == installed
        assert shardkit.verify(out, full=True).problems == ()

    def test_one_of_the_same_versions_or_of_an_early_shardkit_says_nothing(
        self, hub: Path, tmp_path: Path
    ) -> None:
        for name, spoil in (("same", False), ("early", True)):
            out = tmp_path / name
            with_old(hub, out, killed_after=2)
            if spoil:
                (left,) = tmp_path.glob(f".{name}.shardkit-*")
                for path in (left / "done").iterdir():
                    note = json.loads(path.read_text())
                    path.write_text(json.dumps({k: v for k, v in note.items() if k != "versions"}))
                result, warnings = here(hub, out)
                assert result.resumed_files >= 2
            else:
                warnings = with_old(hub, out)
            assert warnings == []

    def test_what_nothing_was_finished_of_has_one_version(self, hub: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with_old(hub, out, killed_after=2)
        (left,) = tmp_path.glob(".out.shardkit-*")
        for path in (left / "done").iterdir():
            path.unlink()
        assert here(hub, out)[1] == []

    def test_parts_and_a_commit(self, hub: Path, tmp_path: Path) -> None:
        out, other = tmp_path / "out", tmp_path / "other"
        assert with_old(hub, out, part="1/2") == []
        (warning,) = here(hub, out, part="2/2")[1]
        assert warning.startswith(MIXED)
        assert recorded(out) == environment.package_version("transformers")
        assert with_old(hub, other, part="1/2") == []
        assert [each.startswith(MIXED) for each in here(hub, other, part="2/3")[1]] == [True]
        assert with_old(hub, other, part="2/2") == []
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".distcp"} == {
            path.name: path.read_bytes() for path in other.iterdir() if path.suffix == ".distcp"
        }

    def test_a_pool_says_what_one_part_found(
        self, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed = environment.package_version

        class Pool:
            def submit(self, verb: Callable[..., Any], **options: Any) -> Future[Any]:
                has_old = options["part"] == "2/3"  # neither the one that begins nor the one that commits
                monkeypatch.setattr(
                    environment,
                    "package_version",
                    lambda name: OLD if has_old and name == "transformers" else installed(name),
                )
                done = Future[Any]()
                done.set_result(verb(**options))
                return done

        told = list[str]()
        result = shardkit.preshard(
            hub,
            tmp_path / "out",
            world_size=4,
            executor=Pool(),  # type: ignore[arg-type]
            num_parts=3,
            on_warning=told.append,
        )
        (warning,) = [each for each in result.warnings if "begun with" in each]
        assert warning.startswith(
            f"begun with transformers {installed('transformers')}, and goes on with transformers {OLD}"
        )
        assert warning in told

    def test_a_commit(self, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        out = tmp_path / "out"
        with monkeypatch.context() as patch:  # a file is missing when the last part looks
            patch.setattr("shardkit.operations.parts.divided.Divided.commit", lambda _: False)
            with_old(hub, out, part="1/2")
            here(hub, out, part="2/2")
        told = list[str]()
        result = shardkit.commit(out, on_warning=told.append)
        assert [each for each in result.warnings if each.startswith(MIXED)] == told
        assert len(told) == 1

    def test_an_output_of_other_versions_is_there_already(
        self, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for profile, folder in (("plain", ""), ("accelerate", "pytorch_model_fsdp_0")):
            out = tmp_path / profile
            with_old(hub, out, profile=profile)
            assert here(hub, out, profile=profile)[0].was_there
            with monkeypatch.context() as patch:  # nothing but the bytes says what it is
                patch.setattr("shardkit.transfer.existing.home", lambda: None)
                found, warnings = here(hub, out, profile=profile)
            assert (found.was_there, warnings) == (True, [])
            assert recorded(out / folder) == OLD
