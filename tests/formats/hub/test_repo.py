"""Fetching from the Hub, against a small server that speaks its few endpoints; and `formats.open`."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import pytest
import torch

from shardkit import formats
from shardkit.errors import SourceError, UsageError
from shardkit.files.remote.hub import address_of
from shardkit.formats.hub.repo import looks_like_repo_id, named_repo
from tests.cases import but_first
from tests.formats.torchsave.samples import saved
from tests.hub_server import serving

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
BIG = 32 << 20
TIED = {"model.embed_tokens.weight": b"12", "lm_head.weight": b"34"}
REPOS = {
    "org/good": SHARDED,
    "gpt2": {"model.safetensors": tiny_file(a=b"1")},
    "org/stray": STRAY,
    "org/lfs": SHARDED,  # its weights lie on another host
    "org/big": {"model.safetensors": tiny_file(a=bytes(BIG))},
    "org/norange": {"model.safetensors": tiny_file(a=bytes(BIG))},  # as if ranges had not been invented
    "org/hushed": SHARDED,  # answers ranges without the size
    "org/wrong": SHARDED,  # answers another range
    "org/gap": {
        **SHARDED,
        "x-2.safetensors": tiny_file(c=b"345"),
        "x [1].safetensors": tiny_file(a=b"1") + b"?",
    },
    "org/short": {**SHARDED, "x-2.safetensors": b"1234", "x [1].safetensors": b""},
    "org/lacks": {name: data for name, data in SHARDED.items() if name != "x-2.safetensors"},
    "org/tied": {
        "config.json": b'{"architectures": ["OwnForCausalLM"], "tie_word_embeddings": true}',
        "model.safetensors": tiny_file(**TIED),
    },
}


def header_bytes(repo: str) -> int:
    """Bytes of the weights of a repo that are not data."""
    files = [data for name, data in REPOS[repo].items() if name.endswith(".safetensors") and "/" not in name]
    return sum(8 + struct.unpack("<Q", data[:8])[0] for data in files)


class FakeHub(BaseHTTPRequestHandler):
    """The answers of huggingface.co that huggingface_hub relies on."""

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        path = urlsplit(self.path).path.replace("%20", " ").replace("%5B", "[").replace("%5D", "]")
        status, headers, body = self.route(path)
        if status == 200 and path.endswith(".safetensors"):
            self.server.asked.append((self.headers["Host"], path, self.headers.get("Authorization")))
            status, headers, body = self.weights(path, headers, body)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.server.fetched.append(path)
            # What the system takes of it before anybody reads counts as sent: of a machine's own choice, it may be all.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
            for start in range(0, len(body), 1 << 16):
                piece = body[start : start + (1 << 16)]
                # Once it is sent the client may be done, and the test looks.
                self.server.weight_bytes += len(piece) * path.endswith(".safetensors")
                try:
                    self.wfile.write(piece)
                except OSError:  # the client has had enough
                    break

    def weights(self, path, headers, body):
        """What becomes of the answer for a weight file."""
        if "org/lfs" in path and not self.headers["Host"].startswith("localhost"):
            place = f"http://localhost:{self.server.server_port}{self.path}"
            linked = {"Location": place, "X-Linked-Size": str(len(body)), "X-Linked-ETag": headers["ETag"]}
            return 302, {**headers, **linked}, b""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted or "norange" in path:
            return 200, headers, body
        start, last = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        if start >= len(body):
            return 416, {"Content-Range": f"bytes */{len(body)}"}, b""
        size = "*" if "hushed" in path else len(body)
        shown = 0 if "wrong" in path else start
        return 206, {**headers, "Content-Range": f"bytes {shown}-{last}/{size}"}, body[start : last + 1]

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
    with serving(FakeHub, fetched=[], asked=[], weight_bytes=0) as server:
        yield server


SCRIPT = """
import json, os, sys
from dataclasses import asdict
from shardkit import preshard
from shardkit.errors import ShardkitError
from shardkit import formats
for source, revision in json.loads(sys.argv[1]):
    if revision and revision.startswith("-> "):
        output, *flags = revision[3:].split()
        try:
            print(json.dumps(preshard(source, output, world_size=2, wrap="none", dry_run="-n" in flags, exist_ok="--exist-ok" in flags).to_json()))
        except ShardkitError as error:
            print(json.dumps(error.to_json()))
        continue
    try:
        model = formats.open(source, format="hub", revision=revision).hub
        config = model.config and model.config["model_type"]
        row = [asdict(model.identity), model.label, config, list(model.catalog.tensors)]
        row.append([open(file.path, "rb").read()[-1:].decode() for file in model.catalog.files])
    except ShardkitError as error:
        row = [type(error).__name__, error.message, error.hint]
    print(json.dumps(row))
"""


@pytest.fixture
def fetch(hub, hub_client):
    """Return a function that runs `formats.open` in an environment of its own."""

    def fetch(cache, *sources, script=SCRIPT, url=hub.url, **environment):
        pairs = [source if isinstance(source, tuple) else (source, None) for source in sources]
        return hub_client(script, pairs, url=url, cache=cache, environment=environment)

    return fetch


def test_needed_files_only_then_offline(hub, fetch, tmp_path):
    hub.fetched.clear()
    (online,) = fetch(tmp_path, "org/good")
    identity, label, config, tensors, last_bytes = online
    assert (identity["repo"], identity["commit"]) == ("org/good", COMMIT)
    assert [file["name"] for file in identity["files"]] == ["x-2.safetensors", "x [1].safetensors"]
    assert (label, config, tensors, last_bytes) == ("good", "llama", ["b", "a"], ["5", "2"])
    got = {path.split(COMMIT + "/")[1] for path in hub.fetched if "/resolve/" in path}
    described = {"config.json", "model.safetensors.index.json", "modeling_own.py"}
    assert got == described | {"x [1].safetensors", "x-2.safetensors"}
    hub.fetched.clear()
    offline, other = fetch(tmp_path, "org/good", "gpt2", HF_HUB_OFFLINE="1")
    assert offline == online
    assert not hub.fetched
    assert other[0] == "ResourceError"
    assert "HF_HUB_OFFLINE" in other[1]


def test_a_repo_may_be_named_by_its_address(fetch, tmp_path):
    plain, *others = fetch(
        tmp_path,
        "org/good",
        "https://huggingface.co/org/good",
        f"https://huggingface.co/org/good/tree/{COMMIT}",
    )
    assert plain[0]["commit"] == COMMIT
    assert others == [plain] * 2


OF_ONE_RUN = {"dry_run", "names", "elapsed_s", "moving_s", "free_bytes", "download_bytes", "checked_bytes"}


def plan_of(result):
    """What must not depend on whether it is a dry run."""
    return {key: value for key, value in result.items() if key not in OF_ONE_RUN | {"unchecked"}}


@pytest.mark.parametrize("repo", but_first(["org/good", "org/lfs", "org/hushed", "gpt2"]))
def test_a_dry_run_reads_headers_only_and_plans_the_same(hub, fetch, tmp_path, repo):
    hub.weight_bytes = 0
    hub.asked.clear()
    planned = f"-> {tmp_path}/out -n"
    (dry,) = fetch(tmp_path / "cache", (repo, planned), HF_TOKEN="hf_secret")
    assert hub.weight_bytes == header_bytes(repo)
    data_bytes = sum(
        len(data) for name, data in REPOS[repo].items() if name.endswith(".safetensors") and "/" not in name
    )
    assert dry["download_bytes"] == data_bytes
    assert not (tmp_path / "out").exists()
    by_host = {host.split(":")[0]: token for host, _, token in hub.asked}
    assert by_host == {"127.0.0.1": "Bearer hf_secret", **({"localhost": None} if repo == "org/lfs" else {})}
    (real,) = fetch(tmp_path / "cache", (repo, f"-> {tmp_path}/out"), HF_TOKEN="hf_secret")
    assert (tmp_path / "out" / ".metadata").exists()
    assert plan_of(dry) == plan_of(real)
    assert real["download_bytes"] == 0
    hub.weight_bytes = 0
    (again,) = fetch(tmp_path / "cache", (repo, f"-> {tmp_path}/other -n"), HF_HUB_OFFLINE="1")
    assert hub.weight_bytes == again["download_bytes"] == 0
    # Without the Hub nobody knows what else the repo holds.
    assert plan_of({**again, "output": dry["output"], "skipped": dry["skipped"]}) == plan_of(dry)


def test_what_is_there_takes_no_download(hub, fetch, tmp_path):
    (made,) = fetch(tmp_path / "cache", ("org/good", f"-> {tmp_path}/out"))
    assert made["was_there"] is False
    for cache in ("cache", "empty"):
        hub.weight_bytes = 0
        (again,) = fetch(tmp_path / cache, ("org/good", f"-> {tmp_path}/out --exist-ok"))
        assert again["was_there"] is True
        assert hub.weight_bytes == (header_bytes("org/good") if cache == "empty" else 0)
        (refused,) = fetch(tmp_path / cache, ("org/good", f"-> {tmp_path}/out"))
        assert refused["exit_code"] == 2


def test_a_dry_run_opens_the_same_catalog(fetch, tmp_path):
    """The identity, too: it holds sizes and digests of headers."""
    code = SCRIPT.replace("revision=revision)", "revision=revision, headers_only=True)").replace(
        "file.path, ", "os.devnull, "
    )
    (dry,) = fetch(tmp_path, "org/good", script=code)
    (real,) = fetch(tmp_path, "org/good")
    assert dry[:-1] == real[:-1]
    assert dry[-1] == ["", ""]


@pytest.mark.parametrize(
    ("repo", "most_bytes"), but_first([("org/big", header_bytes("org/big")), ("org/norange", BIG // 2)])
)
def test_no_more_is_read_than_the_header(hub, fetch, tmp_path, repo, most_bytes):
    hub.weight_bytes = 0
    (dry,) = fetch(tmp_path / "cache", (repo, f"-> {tmp_path}/out -n"))
    assert dry["read_bytes"] == BIG
    assert hub.weight_bytes <= most_bytes
    assert not [
        file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.stat().st_size > 1 << 20
    ]


def test_a_dry_run_refuses_what_the_real_run_would(fetch, tmp_path):
    repos = ["org/gap", "org/short", "org/lacks"]
    dry = fetch(tmp_path / "cache", *((repo, f"-> {tmp_path}/out -n") for repo in repos))
    real = fetch(tmp_path / "cache", *((repo, f"-> {tmp_path}/out") for repo in repos))
    assert dry == real
    assert [error["error"] for error in dry] == ["SourceError"] * 3
    assert "1 byte after the end of a belong to no tensor" in " ".join(dry[0]["problems"])
    assert "expected at least 8 bytes, found 4" in " ".join(dry[1]["problems"])
    assert "expected at least 8 bytes, found 0" in " ".join(dry[1]["problems"])
    assert "x-2.safetensors" in dry[2]["problems"]
    wrong, down = (
        *fetch(tmp_path / "cache", ("org/wrong", f"-> {tmp_path}/out -n")),
        *fetch(tmp_path / "none", ("org/good", f"-> {tmp_path}/out -n"), url="http://127.0.0.1:9"),
    )
    assert (wrong["error"], down["error"]) == ("ResourceError", "ResourceError")
    assert "another range" in wrong["message"]


def test_a_dry_run_takes_what_is_cached_and_no_more_when_offline(hub, fetch, tmp_path):
    (_,) = fetch(tmp_path / "cache", "org/good")
    (shard,) = (tmp_path / "cache").rglob("x-2.safetensors")
    shard.unlink()
    (offline,) = fetch(tmp_path / "cache", ("org/good", f"-> {tmp_path}/out -n"), HF_HUB_OFFLINE="1")
    assert offline["error"] == "ResourceError"
    assert "HF_HUB_OFFLINE" in offline["message"]
    hub.weight_bytes = 0
    (dry,) = fetch(tmp_path / "cache", ("org/good", f"-> {tmp_path}/out -n"))
    assert hub.weight_bytes == len(SHARDED["x-2.safetensors"]) - 3
    assert dry["download_bytes"] == len(SHARDED["x-2.safetensors"])


def test_a_dry_run_of_tied_copies_says_that_it_did_not_compare_them(fetch, tmp_path):
    (dry,) = fetch(tmp_path / "cache", ("org/tied", f"-> {tmp_path}/out -n"))
    (real,) = fetch(tmp_path / "cache", ("org/tied", f"-> {tmp_path}/out"))
    assert any("is not checked before they are downloaded" in note for note in dry["notes"])
    assert not any("is not checked before they are downloaded" in note for note in real["notes"])
    assert (len(dry["warnings"]), len(real["warnings"])) == (0, 1)


def test_a_dry_run_of_a_legacy_repo_says_that_it_was_downloaded(fetch, tmp_path):
    REPOS["org/legacy"] = {"pytorch_model.bin": saved({"a": torch.zeros(3)})}
    first, second = fetch(tmp_path / "cache", *[("org/legacy", f"-> {tmp_path}/out -n")] * 2)
    assert "downloaded into the cache" in " ".join(first["notes"])
    assert not any("downloaded" in note for note in second["notes"])
    assert first["download_bytes"] == 0


def test_refusals(fetch, tmp_path):
    asked = ("org/absent", "org/gated", ("org/good", "nowhere"), "org/stray", ("gpt2", COMMIT))
    absent, gated, nowhere, stray, good = fetch(tmp_path, *asked)
    assert absent[0] == gated[0] == nowhere[0] == stray[0] == "SourceError"
    assert "org/absent" in absent[1]
    assert "no such model" in absent[1]
    assert "hf auth login" in gated[2]
    assert "'nowhere'" in nowhere[1]
    assert "model.safetensors lies beside" in stray[1]
    assert good[0]["commit"] == COMMIT
    assert good[2] is None


def test_no_server(fetch, tmp_path):
    (row,) = fetch(tmp_path, "org/good", url="http://127.0.0.1:9")
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


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("org/name", None),
        ("hf://org/name", None),
        ("hf://org/name@v1.0", "v1.0"),
        ("https://huggingface.co/org/name/", None),
        ("http://hf.co/org/name?library=transformers#usage", None),
        ("https://www.huggingface.co/org/name/tree/main", "main"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", "refs/pr/1"),
    ],
)
def test_addresses_of_repos(text, revision):
    assert named_repo(text) == ("org/name", revision)


@pytest.mark.parametrize(
    "text",
    [
        "hf://datasets/org/name", "https://huggingface.co/datasets/org/name", "https://huggingface.co/org",
        "https://huggingface.co/org/name/blob/main/model.safetensors", "https://other.co/org/name",
        "hf://org/name/tree/main/sub", "hf://../name", "s3://org/name",
    ],
)  # fmt: skip
def test_not_addresses_of_models(text):
    assert named_repo(text) is None


@pytest.mark.parametrize(
    ("page", "address"),
    [
        ("https://huggingface.co/org/name", "hf://org/name"),
        ("https://hf.co/org/name/?library=transformers", "hf://org/name"),
        ("https://huggingface.co/org/name/tree/main", "hf://org/name@main"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1/sub/", "hf://org/name@refs%2Fpr%2F1/sub"),
        ("https://huggingface.co/org/name/blob/main/a%20b.safetensors", "hf://org/name@main/a b.safetensors"),
        ("https://huggingface.co/org/name/resolve/v1/m.bin?download=true", "hf://org/name@v1/m.bin"),
        ("https://huggingface.co/org/name/discussions/1", None),
        ("https://huggingface.co/datasets/org/name", None),
        ("https://other.co/org/name", None),
        ("org/name", None),
    ],
)
def test_pages_are_hub_addresses(page, address):
    assert address_of(page) == address


def test_one_revision_is_enough():
    assert named_repo("hf://org/name@v1", "v1") == named_repo("hf://org/name", "v1") == ("org/name", "v1")
    with pytest.raises(UsageError, match="is of revision v1, and --revision is main"):
        named_repo("hf://org/name@v1", "main")


def test_neither_path_nor_repo():
    with pytest.raises(SourceError, match="no such file or directory"):
        formats.open("./absent")


def test_local_path_has_no_revision(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(tiny_file(a=b"1"))
    assert list(formats.open(str(tmp_path)).catalog.tensors) == ["a"]
    with pytest.raises(UsageError, match="no revision"):
        formats.open(str(tmp_path), revision="main")
