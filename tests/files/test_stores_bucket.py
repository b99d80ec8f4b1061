"""Buckets of the Hub are read by ranges, and only the content that their listing named.

The server stands for the Hub as huggingface_hub 2.4.0 sees it; nothing was tried against the Hub itself.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkit
from shardkit.files.remote.kinds import split
from tests.contents import contents
from tests.files.test_stores_hub import SCRIPT, TOKEN
from tests.hub_client import HubClient
from tests.hub_server import Repo, serving

Run = Callable[..., list[Any]]
BUCKET = "hf://buckets/org/runs"
CHANGED = "2026-03-01T12:00:00.000Z"


class Bucket(Repo):
    """One bucket, `org/runs`.

    State of the server: `files` (path -> bytes), `asked` (method, path, range, with a token), `direct` (the Hub sends bytes
    itself), `names_hash` (each answer names the hash of the content), `mirror` (another host sends the bytes of a path).
    """

    def _route(self) -> None:
        state: Any = self.server
        path = unquote(urlsplit(self.path).path)
        span = self.headers.get("Range", "")
        state.asked.append((self.command, path, span, "Authorization" in self.headers))
        tree, content = "/api/buckets/org/runs/tree", "/buckets/org/runs/resolve/"
        if path.startswith(tree):
            self.answer(self._tree(path.removeprefix(tree).strip("/")))
        elif path.startswith("/api/"):
            self.answer({}, 404, {"X-Error-Code": "RepoNotFound"})
        elif path == "/replace":  # step 1 gets the content of step 10
            newer = {
                k.replace("-10/", "-1/"): v for k, v in state.files.items() if k.startswith("run/step-10/")
            }
            state.files.update(newer)
            self.answer({})
        elif path.startswith("/of/"):
            self._send(state.kept[path.removeprefix("/of/")], {})
        elif path.removeprefix(content) not in state.files:
            self.answer({}, 404, {"X-Error-Code": "EntryNotFound"})
        else:
            data = state.files[path.removeprefix(content)]
            state.kept[hash_of(data)] = data
            named = {"X-Xet-Hash": hash_of(data), "X-Xet-Refresh-Route": "/refresh", "ETag": '"other"'}
            if state.mirror and self.headers["Host"].startswith("127."):
                self._head_alone(
                    302, {"Location": f"http://localhost:{state.server_port}{self.path}", **named}
                )
            elif state.direct:
                self._send(data, named if state.names_hash or self.command == "HEAD" else {})
            else:
                place = f"http://localhost:{state.server_port}/of/{hash_of(data)}"
                self._head_alone(302, {"Location": place, "X-Linked-Size": str(len(data)), **named})

    def _tree(self, prefix: str) -> list[dict[str, Any]]:
        """Return what begins with the text of a prefix, and what is in it."""
        state: Any = self.server
        rows = dict[str, dict[str, Any]]()
        above = prefix.count("/") + 1 if prefix else 0
        for path, data in state.files.items():
            if path.startswith(prefix):
                parts = path.split("/")
                name = "/".join(parts[: above + 1])
                is_file = name == path
                of_file = {"size": len(data), "xetHash": hash_of(data), "mtime": CHANGED}
                kind = {"type": "file", **of_file} if is_file else {"type": "directory"}
                rows[name] = {**kind, "path": name, "uploadedAt": CHANGED}
        return list(rows.values())


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two steps, one of which begins with the name of the other."""
    home = tmp_path_factory.mktemp("runs")
    for step in (1, 10):
        torch.manual_seed(step)
        state = {f"layers.{n}.weight": torch.randn(300, 300) for n in range(3)}
        with warnings.catch_warnings():  # torch says that it saves in one process
            warnings.simplefilter("ignore")
            dcp.save({"model": state}, checkpoint_id=home / "run" / f"step-{step}", no_dist=True)
    return home


@pytest.fixture
def hub(runs: Path) -> Iterator[Any]:
    files = {str(p.relative_to(runs)): p.read_bytes() for p in runs.rglob("*") if p.is_file()}
    state: dict[str, Any] = {"files": files, "kept": {}, "asked": [], "direct": False}
    state |= {"names_hash": True, "mirror": False, "faults": [], "commits": {"main": ""}}
    with serving(Bucket, **state) as server:
        yield server


@pytest.fixture
def run(hub: Any, hub_client: HubClient, tmp_path: Path) -> Run:
    def run(*calls: tuple[str, str, str | None, dict[str, Any]]) -> list[Any]:
        return hub_client(
            SCRIPT, calls, url=hub.url, cache=tmp_path / "cache", environment={"HF_TOKEN": TOKEN}
        )

    return run


@pytest.mark.parametrize("direct", [False, True])
def test_a_checkpoint_is_streamed(hub: Any, run: Run, runs: Path, tmp_path: Path, direct: bool) -> None:
    """The model is that of a local copy, whoever sends the bytes; the disk has nothing else."""
    hub.direct = direct
    newest, made = run(
        ("latest", f"{BUCKET}/run", None, {}),
        ("consolidate", f"{BUCKET}/run/step-1", str(tmp_path / "out"), {}),
    )
    assert newest["path"] == f"{BUCKET}/run/step-10", newest
    assert made.get("output") == str(tmp_path / "out"), made
    shardkit.consolidate(runs / "run" / "step-1", tmp_path / "local")
    remote, local = contents(tmp_path / "out"), contents(tmp_path / "local")
    weights = [name for name in local if name != "shardkit.json"]
    assert [remote[name] == local[name] for name in weights] == [True] * len(weights) != []
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    sent = {path.split("/")[1]: token for _, path, _, token in hub.asked}
    assert sent == {"api": True, "buckets": True, **({} if direct else {"of": False})}


def change(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("when", ["listed", "found", "unnamed", "elsewhere"])
def test_another_content_is_never_read(hub: Any, run: Run, tmp_path: Path, when: str) -> None:
    """A file that is replaced after it was listed, or after its address was found, ends the job."""
    name = next(path for path in hub.files if path.startswith("run/step-1/") and path.endswith(".distcp"))
    changed = change(hub.files[name])
    hub.direct, hub.names_hash = when != "listed", when != "unnamed"
    hub.mirror = when == "elsewhere"
    route, num_read = Bucket._route, 0

    def replaced(self: Bucket) -> None:
        nonlocal num_read
        num_read += self.command == "GET" and self.path.partition("?")[0].endswith(".distcp")
        if num_read == 2 if when in ("found", "elsewhere") else self.command == "HEAD" and when == "listed":
            hub.files[name] = changed
        route(self)

    hub.RequestHandlerClass = type("Replaced", (Bucket,), {"_route": replaced})
    (refused,) = run(("consolidate", f"{BUCKET}/run/step-1", str(tmp_path / "out"), {}))
    reason = "does not name the hash" if when == "unnamed" else "another version than it listed"
    assert reason in str(refused), refused
    assert not (tmp_path / "out").exists()


TWICE = """
import json, os, sys, urllib.request
import shardkit
bucket, output = json.loads(sys.argv[1])
for name in ("first", "second"):
    shardkit.consolidate(bucket, f"{output}/{name}")
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/replace").read()
"""


def test_a_later_job_of_a_process_reads_the_new_content(
    hub: Any, hub_client: HubClient, runs: Path, tmp_path: Path
) -> None:
    """The address of the content that was there before is not used again."""
    hub_client(TWICE, [f"{BUCKET}/run/step-1", str(tmp_path)], url=hub.url, cache=tmp_path / "cache")
    for name, step in (("first", 1), ("second", 10)):
        shardkit.consolidate(runs / f"run/step-{step}", tmp_path / f"{name}-local")
        found, expected = (contents(tmp_path / each) for each in (name, f"{name}-local"))
        assert found["model.safetensors"] == expected["model.safetensors"]


def test_a_name_that_is_no_path(hub: Any, run: Run) -> None:
    """A name that is no part of a path would be walked forever."""
    hub.files["run/step-1//y.bin"] = b"y"
    (refused,) = run(("inspect", f"{BUCKET}/run/step-1", None, {}))
    assert "cannot be read as a path" in str(refused), refused


def test_what_is_wrong_is_said(run: Run, tmp_path: Path) -> None:
    words = {
        "hf://buckets/org/nothing/run": "no such bucket",
        "hf://buckets/org": "no such",
        f"{BUCKET}@v1/run": "is not a bucket",
        f"{BUCKET}/none": "no such",
        f"{BUCKET}/run/step-1/.metadata/x": "no such",
    }
    for found, expected in zip(
        run(*(("inspect", source, None, {}) for source in words)), words.values(), strict=True
    ):
        assert expected in str(found), found
    revision, written = run(
        ("preshard", f"{BUCKET}/run/step-1", str(tmp_path / "out"), {"revision": "v1", "world_size": 2}),
        ("consolidate", f"{BUCKET}/run/step-1", f"{BUCKET}/out", {}),
    )
    assert "not a repo of the Hub" in str(revision), revision
    assert "hf://buckets/" in str(written), written


def test_keys() -> None:
    assert split(f"{BUCKET}/run//step-1/") == (BUCKET, "run/step-1")
    assert split(BUCKET) == (BUCKET, "")
