"""Repos of the Hub at `hf://` paths are read by ranges, of one commit, and nothing of them stays on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardkit
from tests.contents import contents
from tests.hub_client import HubClient
from tests.hub_server import Repo, serving

OLD, NEW = "0123456789abcdef0123456789abcdef01234567", "f" * 40
TOKEN = "hf_nobodymayseethis"
SCRIPT = """
import json, sys
import shardkit
from shardkit.errors import ShardkitError
for verb, source, output, options in json.loads(sys.argv[1]):
    try:
        answer = getattr(shardkit, verb)(*filter(None, (source, output)), **options)
        print(json.dumps(answer.to_json()))
    except ShardkitError as error:
        print(json.dumps(error.to_json()))
"""
WORLD = {"world_size": 2, "wrap": "none"}

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two folders."""
    home = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    for folder in (home, home / "sub"):
        folder.mkdir(exist_ok=True)
        save_file({f"layers.{n}": torch.randn(512, 512) for n in range(4)}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "own"}')
    return home


@pytest.fixture
def hub(model: Path) -> Iterator[Any]:
    files = {str(p.relative_to(model)): p.read_bytes() for p in model.rglob("*") if p.is_file()}
    state: dict[str, Any] = {
        "files": files,
        "commits": {"main": OLD, OLD: OLD, "v1": OLD},
        "asked": [],
        "faults": [],
    }
    with serving(Repo, signature="first", **state) as server:
        yield server


@pytest.fixture
def run(hub: Any, hub_client: HubClient, tmp_path: Path) -> Run:
    """Return a function that calls verbs in an environment of its own."""

    def run(*calls: tuple[str, str, str | None, dict[str, Any]], **environment: str) -> list[Any]:
        return hub_client(
            SCRIPT,
            calls,
            url=hub.url,
            cache=tmp_path / "cache",
            environment={"HF_TOKEN": TOKEN, **environment},
        )

    return run


def test_a_repo_is_streamed(hub: Any, run: Run, model: Path, tmp_path: Path) -> None:
    """The shards are those of a local copy, the manifest names repo and commit, and the disk has nothing else."""
    (answer,) = run(("preshard", "hf://org/model", str(tmp_path / "out"), WORLD))
    assert answer.get("output") == str(tmp_path / "out"), answer
    shardkit.preshard(model, tmp_path / "local", world_size=2, wrap="none")
    remote, local = contents(tmp_path / "out"), contents(tmp_path / "local")
    assert remote.keys() == local.keys()
    assert all(remote[name] == local[name] for name in remote if name != "shardkit.json")
    source = json.loads(remote["shardkit.json"])["source"]
    assert (source["repo"], source["commit"]) == ("org/model", OLD)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [path for path in kept if path.stat().st_size > 1000]
    ranges = [span for _, path, span, _ in hub.asked if span and path.startswith("/signed/")]
    assert len(ranges) <= 4, ranges


def test_the_token_goes_to_the_hub_alone(hub: Any, run: Run) -> None:
    run(("inspect", "hf://org/model", None, {}))
    sent = {path.split("/")[1]: token for _, path, _, token in hub.asked}
    assert sent["api"]
    assert sent["org"]
    assert not sent["signed"]


def test_all_is_of_the_commit_that_was_resolved_first(hub: Any, run: Run, tmp_path: Path) -> None:
    run(
        ("preshard", "hf://org/model@v1", str(tmp_path / "a"), WORLD),
        ("preshard", f"hf://org/model@{OLD}/sub", str(tmp_path / "b"), WORLD),
        ("preshard", "hf://org/model", str(tmp_path / "c"), {**WORLD, "revision": "v1"}),
    )
    assert [path for _, path, _, _ in hub.asked if "/resolve/" in path and OLD not in path] == []
    shards = [{n: d for n, d in contents(tmp_path / out).items() if n.endswith(".distcp")} for out in "abc"]
    assert shards[0] == shards[2] != {}
    assert len(shards[1]) == 2


def test_the_address_of_a_page_is_read_like_that_of_its_repo(hub: Any, run: Run) -> None:
    page, file = "https://huggingface.co/org/model", "https://hf.co/org/model/blob/v1/sub/model.safetensors"
    by_page, by_file, compared, checked = run(
        ("inspect", page, None, {}),
        ("inspect", file, None, {}),
        ("diff", page, f"{page}/tree/v1", {}),
        ("verify", page, None, {}),
    )
    assert by_page["path"] == "hf://org/model"
    assert by_file["path"] == "hf://org/model@v1/sub/model.safetensors"
    assert by_page["num_tensors"] == by_file["num_tensors"] == 4
    assert compared["is_equal"]
    assert (checked.get("num_tensors"), checked["problems"]) == (4, []), checked


def test_faults_pass_and_signatures_are_renewed(hub: Any, run: Run, tmp_path: Path) -> None:
    for number, faults in enumerate((["403", "reset", "500", ""], ["short", "503", ""])):
        hub.faults[:] = faults  # the last comes first
        (answer,) = run(("preshard", "hf://org/model", str(tmp_path / str(number)), WORLD))
        assert not hub.faults
        assert answer.get("output") == str(tmp_path / str(number)), answer
    assert contents(tmp_path / "0") == contents(tmp_path / "1")


def test_what_is_wrong_is_said(hub: Any, run: Run, tmp_path: Path) -> None:
    hub.faults[:] = ["401"] * 99
    refused = run(
        ("inspect", "hf://org/model", None, {}),
        ("inspect", "hf://org/nothing", None, {}),
        ("inspect", "hf://org/model@nowhere", None, {}),
        ("inspect", "hf://datasets/org/model", None, {}),
        ("inspect", "hf://org/model/none", None, {}),
        ("preshard", "hf://org/model@v1", str(tmp_path / "out"), {**WORLD, "revision": "v2"}),
    )
    for found, words in zip(
        refused,
        ("refuses access", "no such model", "no revision", "is not a repo", "no such", "leave out one"),
        strict=True,
    ):
        assert words in str(found), found
    assert TOKEN not in str(refused)
    assert "signature" not in str(refused)
    (offline,) = run(("inspect", "hf://org/model", None, {}), HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in str(offline)
