"""verify against a repo on the Hub, by a small server that speaks the two endpoints; nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.hub_server import Answers, serving
from tests.operations.consolidate.checkpoints import hub, weights

COMMIT = "c0ffee" + "0" * 34


def described(name: str, data: bytes, *, large: bool) -> dict[str, object]:
    """What the Hub says of a file: git's id of it, or of the pointer in its place, and then the file's sha256."""
    held = data
    if large:
        oid = hashlib.sha256(data).hexdigest()
        held = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(data)}\n".encode()
    git_id = hashlib.sha1(b"blob %d\0" % len(held) + held).hexdigest()
    entry = {"type": "file", "path": name, "size": len(data), "oid": git_id}
    return {**entry, "lfs": {"oid": oid, "size": len(data), "pointerSize": len(held)}} if large else entry


class FakeHub(Answers):
    """What huggingface.co answers to `model_info` and `list_repo_tree`, in pages of two files."""

    def do_GET(self):
        url = urlsplit(self.path)
        self.server.asked.append(url.path)
        if "absent" in url.path:
            return self.answer({"error": "no such repo"}, 404, {"X-Error-Code": "RepoNotFound"})
        if url.path.startswith("/api/models/me/model/tree/"):
            assert url.path.endswith(f"/tree/{COMMIT}")
            at = int(parse_qs(url.query).get("cursor", ["0"])[0])
            more = f'<{self.server.url}{url.path}?recursive=True&cursor={at + 2}>; rel="next"'
            is_last = at + 2 >= len(self.server.tree)
            return self.answer(self.server.tree[at : at + 2], 200, {} if is_last else {"Link": more})
        if url.path in ("/api/models/me/model", "/api/models/me/model/revision/v2"):
            return self.answer({"id": "me/model", "sha": COMMIT, "siblings": []})
        return self.answer({"error": "not asked for in these tests"}, 500)


@pytest.fixture
def server():
    with serving(FakeHub, tree=[], asked=[]) as server:
        yield server


@pytest.fixture
def model(server, tmp_path) -> Path:
    """A directory, and the repo that it came from."""
    model = hub(tmp_path / "model", weights(), tokenizer__json="{}" * 50, chat_template__jinja="")
    for name in sorted(os.listdir(model)):
        server.tree.append(described(name, (model / name).read_bytes(), large=name.endswith(".safetensors")))
    (model / ".git").mkdir()  # as in the Hub's cache, the files are links
    os.rename(model / "tokenizer.json", model / ".git" / "blob")
    os.symlink(".git/blob", model / "tokenizer.json")
    server.tree.append({"type": "directory", "path": "onnx", "oid": "0" * 40})
    server.tree.append(described(".gitattributes", b"*.safetensors filter=lfs\n", large=False))
    return model


SCRIPT = """
import json, sys
import shardkit
requests = json.loads(sys.argv[1])
for request in requests:
    before = {}
    for name, text in request.pop("write", {}).items():
        open(name, "ab").write(text.encode())
    for name, at in request.pop("flip", {}).items():
        data = bytearray(open(name, "rb").read())
        before[name] = bytes(data)
        data[at] ^= 1
        open(name, "wb").write(data)
    try:
        print(json.dumps(shardkit.verify(**request).to_json()))
    except shardkit.ShardkitError as error:
        print(json.dumps(error.to_json()))
    for name, data in before.items():
        open(name, "wb").write(data)
"""


@pytest.fixture
def verify(server, hub_client, tmp_path):
    """Return a function that verifies several in one environment of its own."""

    def verify(*requests, **environment):
        asked = [{"path": "model", "hub": "me/model", **request} for request in requests]
        where = {"url": server.url, "cache": tmp_path / "cache", "directory": tmp_path}
        return hub_client(SCRIPT, asked, environment=environment, **where)

    return verify


def test_each_flipped_byte_is_found_and_nothing_downloaded(server, model, verify, tmp_path):
    files = [path for path in sorted(model.iterdir()) if path.is_file()]
    names = [path.name for path in files if path.stat().st_size]
    flips = [{"flip": {f"model/{name}": (model / name).stat().st_size - 2}} for name in names]
    whole, tagged, one_file, *damaged = verify(
        {},
        {"revision": "v2", "full": True},
        {"path": "model/model.safetensors"},
        *flips,
    )
    assert (whole["ok"], whole["repo"], whole["commit"]) == (True, "me/model", COMMIT)
    assert (whole["num_checked_files"], whole["read_bytes"]) == (
        len(files),
        sum(path.stat().st_size for path in files),
    )
    assert tagged["ok"]
    assert "/api/models/me/model/revision/v2" in server.asked
    assert (one_file["ok"], one_file["num_checked_files"]) == (True, 1)
    assert len(names) == 3
    for name, result in zip(names, damaged, strict=True):
        (problem,) = (
            each for each in result["problems"] if each["file"]
        )  # of the config the class says more
        assert problem["file"] == name
        assert problem["expected"] != problem["found"]
        assert problem["message"].startswith("sha256" if name.endswith(".safetensors") else "git id")
    assert not any("/resolve/" in path for path in server.asked)
    assert not (tmp_path / "cache" / "hub").exists()


def test_missing_extra_and_differing_files_are_told_apart(server, model, verify, tmp_path):
    os.remove(model / "chat_template.jinja")
    (model / "shardkit.json.bak").write_text("x")
    (model / ".cache" / "huggingface").mkdir(parents=True)
    (model / ".cache" / "huggingface" / "state").write_text("what hf download keeps here")
    (result,) = verify({"write": {"model/tokenizer.json": "\n"}})
    found = {problem["file"]: problem["message"].partition(":")[0] for problem in result["problems"]}
    assert found == {
        "chat_template.jinja": "missing",
        "shardkit.json.bak": "extra",
        "tokenizer.json": "size in bytes in the repo",
    }


def test_what_cannot_be_asked(server, model, verify, tmp_path):
    absent, local, no_repo = verify({"hub": "me/absent"}, {"hub": None, "revision": "v2"}, {"hub": "me/x/y"})
    assert (absent["error"], absent["exit_code"]) == ("SourceError", 3)
    assert "no such model" in absent["message"]
    assert (local["error"], "--hub" in local["message"]) == ("UsageError", True)
    assert "not a repo id" in no_repo["message"]
    (offline,) = verify({}, HF_HUB_OFFLINE="1")
    assert (offline["error"], "HF_HUB_OFFLINE" in offline["message"]) == ("UsageError", True)
