"""Fetching from the Hub, against a small server that speaks its few endpoints; and `open_source`."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from shardkit.errors import SourceError, UsageError
from shardkit.formats.hub_repo import looks_like_repo_id
from shardkit.formats.source import open_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tiny_file(**tensors: bytes) -> bytes:
    header, position = {}, 0
    for fqn, data in tensors.items():
        stop = position + len(data)
        header[fqn] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


SHARDED = {
    "config.json": b'{"model_type": "llama"}',
    "modeling_own.py": b"raise SystemExit",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"not needed",
    "optimizer.pt": b"not needed",
    "sub/model.safetensors": b"not needed",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"b": "x-2.safetensors", "a": "x [1].safetensors"}}
    ).encode(),
    "x [1].safetensors": tiny_file(a=b"12"),
    "x-2.safetensors": tiny_file(b=b"345"),
}
STRAY = {**SHARDED, "model.safetensors": tiny_file(a=b"99")}
REPOS = {"org/good": SHARDED, "gpt2": {"model.safetensors": tiny_file(a=b"1")}, "org/stray": STRAY}


class FakeHub(BaseHTTPRequestHandler):
    """The answers of huggingface.co that huggingface_hub relies on."""

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        path = urlsplit(self.path).path.replace("%20", " ").replace("%5B", "[").replace("%5D", "]")
        status, headers, body = self.route(path)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.server.fetched.append(path)
            self.wfile.write(body)

    def route(self, path):
        if "down" in path:
            return 503, {}, b""
        api = path.startswith("/api/models/")
        path = path.removeprefix("/api/models").removeprefix("/")
        repo = next((repo for repo in REPOS if path.startswith(repo)), None)
        if repo is None:
            gated = "gated" in path
            code = {"X-Error-Code": "GatedRepo"} if gated else {"X-Error-Code": "RepoNotFound"}
            return (403 if gated else 404), code, b""
        rest, files = path.removeprefix(repo), REPOS[repo]
        if "nowhere" in rest:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api and "/tree/" in rest:
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(rows).encode()
        if api:
            siblings = [{"rfilename": name} for name in files]
            info = {"_id": "1", "id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = rest.split("/", 3)[3]
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        etag = f'"{hashlib.sha1(files[name]).hexdigest()}"'
        return 200, {"X-Repo-Commit": COMMIT, "ETag": etag}, files[name]

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.fetched = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


SCRIPT = """
import json, sys
from shardkit.errors import ShardkitError
from shardkit.formats.source import open_source
for source, revision in json.loads(sys.argv[1]):
    try:
        model = open_source(source, revision=revision)
        config = model.config and model.config["model_type"]
        row = [model.identity, model.label, config, list(model.catalog.tensors)]
        row.append([open(file.path, "rb").read()[-1:].decode() for file in model.catalog.files])
    except ShardkitError as error:
        row = [type(error).__name__, error.message, error.hint]
    print(json.dumps(row))
"""


def fetch(hub, cache, *sources, **environment):
    """Run `open_source` in a fresh interpreter, because huggingface_hub reads its environment at import."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        **environment,
    }
    pairs = [source if isinstance(source, tuple) else (source, None) for source in sources]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(pairs)],
        env=env, capture_output=True, text=True, timeout=120, check=True, cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_needed_files_only_then_offline(hub, tmp_path):
    hub.fetched.clear()
    (online,) = fetch(hub, tmp_path, "org/good")
    identity, label, config, tensors, last_bytes = online
    assert (identity["repo"], identity["commit"]) == ("org/good", COMMIT)
    assert [file["name"] for file in identity["files"]] == ["x-2.safetensors", "x [1].safetensors"]
    assert (label, config, tensors, last_bytes) == ("good", "llama", ["b", "a"], ["5", "2"])
    got = sorted({path.split(COMMIT + "/")[1] for path in hub.fetched if "/resolve/" in path})
    assert got == [
        "config.json",
        "model.safetensors.index.json",
        "modeling_own.py",
        "x [1].safetensors",
        "x-2.safetensors",
    ]
    hub.fetched.clear()
    offline, other = fetch(hub, tmp_path, "org/good", "gpt2", HF_HUB_OFFLINE="1")
    assert offline == online
    assert not hub.fetched
    assert other[0] == "ResourceError"
    assert "HF_HUB_OFFLINE" in other[1]


def test_refusals(hub, tmp_path):
    rows = fetch(
        hub,
        tmp_path,
        "org/absent",
        "org/gated",
        ("org/good", "nowhere"),
        "org/stray",
        ("gpt2", COMMIT),
    )
    absent, gated, nowhere, stray, good = rows
    assert absent[0] == gated[0] == nowhere[0] == stray[0] == "SourceError"
    assert "org/absent" in absent[1]
    assert "no such model" in absent[1]
    assert "hf auth login" in gated[2]
    assert "'nowhere'" in nowhere[1]
    assert "model.safetensors lies beside" in stray[1]
    assert good[0]["commit"] == COMMIT
    assert good[2] is None


def test_no_server(hub, tmp_path):
    (row,) = fetch(hub, tmp_path, "org/good", HF_ENDPOINT="http://127.0.0.1:9")
    assert row[0] == "ResourceError"
    assert "\n" not in row[1]
    assert "cannot be downloaded" in row[1]


@pytest.mark.parametrize("text", ["gpt2", "Qwen/Qwen3-8B", "org/name_1.5-x"])
def test_repo_ids(text):
    assert looks_like_repo_id(text)


@pytest.mark.parametrize(
    "text",
    [
        "./x", "../x", "/abs/path", "a/b/c", "~/model", "x/", "-x", "a--b", "a..b", "dir/model.safetensors",
        "", "a b", "x" * 97, "http://x", "org/\u00e4",
    ],
)  # fmt: skip
def test_not_repo_ids(text):
    assert not looks_like_repo_id(text)


def test_neither_path_nor_repo():
    with pytest.raises(SourceError, match="no such path, and not a repo id"):
        open_source("./absent")


def test_local_path_has_no_revision(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(tiny_file(a=b"1"))
    assert list(open_source(str(tmp_path)).catalog.tensors) == ["a"]
    with pytest.raises(UsageError, match="no revision"):
        open_source(str(tmp_path), revision="main")
