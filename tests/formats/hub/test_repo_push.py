"""Uploading to the Hub, against a small server that speaks the endpoints of a push."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from shardkit.formats.hub.directory import open_model
from tests.cases import but_first
from tests.hub_server import Answers, serving
from tests.operations.consolidate.checkpoints import CONFIG, assert_bit_equal, hub, load, save, weights


class FakeHub(Answers):
    """What huggingface.co answers to `create_repo`, `create_branch` and `upload_folder`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = urlsplit(self.path).path
        if "/tree/" in path:
            branch = path.rpartition("/tree/")[2]
            names = self.server.repo.get(branch, {})
            self.answer([{"type": "file", "path": n, "size": 1, "oid": "0" * 40} for n in names])
        else:
            self.answer({"id": "me/model", "sha": "1" * 40, "siblings": []})

    def do_PUT(self):
        self.server.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self):
        path, body = urlsplit(self.path).path, self.body()
        self.server.asked.append((path, self.headers.get("Authorization")))
        if "refused" in path:
            return self.answer({"error": "you may not"}, 403)
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if "/branch/" in path:
            self.server.repo.setdefault(path.rpartition("/")[2], {})
            return self.answer({})
        if "/preupload/" in path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": modes})
        if path.endswith("/objects/batch"):
            return self.answer({"transfer": "basic", "objects": self.places(json.loads(body)["objects"])})
        if "/commit/" in path:
            self.commit(path.rpartition("/commit/")[2], [json.loads(line) for line in body.splitlines()])
        return self.answer({"commitUrl": "https://hf.co/me/model/commit/1", "commitOid": "1" * 40})

    def create(self, request):
        self.server.created.append(request)
        exists = request["name"] == "old"
        self.answer({"url": f"{self.server.url}/me/model", "error": "exists"}, 409 if exists else 200)

    def places(self, objects):
        return [
            {**entry, "actions": {"upload": {"href": f"{self.server.url}/upload/{entry['oid']}"}}}
            for entry in objects
        ]

    def commit(self, branch, lines):
        files = self.server.repo.setdefault(branch, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
                assert hashlib.sha256(files[value["path"]]).hexdigest() == value["oid"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


@pytest.fixture
def server():
    with serving(FakeHub, repo={"main": {}}, blobs={}, created=[], asked=[]) as server:
        yield server


SCRIPT = """
import json, os, sys
import shardkit
from shardkit.formats.hub import repo
from shardkit.operations.consolidate import run
request = json.loads(sys.argv[1])
if request.pop("damaged", False):
    run.HubDescriptions.finish = lambda *args: (_ for _ in ()).throw(shardkit.IntegrityError("damaged"))
if request.pop("dies", False):
    repo.push = lambda *args, **options: os._exit(0)
if request.pop("stopped", False):
    repo.push = lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt)
if request.pop("refused", False):
    repo.push = lambda *args, **options: (_ for _ in ()).throw(shardkit.ResourceError("refused"))
name, steps = request.pop("call", "consolidate"), []
if name == "consolidate":
    request["on_step"] = steps.append
try:
    print(json.dumps({**getattr(shardkit, name)(**request).to_json(), "steps": steps}))
except shardkit.ShardkitError as error:
    print(json.dumps(error.to_json()))
"""


@pytest.fixture
def consolidate(server, hub_client, tmp_path):
    """Return a function that consolidates in an environment of its own."""

    def consolidate(token="hf_secret", **request):
        environment = {
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **({"HF_TOKEN": token} if token else {}),
        }
        # The class's answer is a warning, and asking it six seconds of a process of its own.
        if "call" not in request:
            request = {"checkpoint": str(tmp_path / "c"), "ask_class": False, **request}
        where = {"url": server.url, "cache": tmp_path / "cache", "directory": tmp_path}
        said = hub_client(SCRIPT, request, environment=environment, **where)
        return said[-1] if said else None

    return consolidate


@pytest.fixture
def checkpoint(tmp_path):
    hub(tmp_path / "base", None, CONFIG, tokenizer__json="{}")
    return save({"model": weights(torch.bfloat16)}, tmp_path / "c")


def test_a_new_repo_gets_what_was_written(server, checkpoint, consolidate, tmp_path):
    result = consolidate(
        base=str(tmp_path / "base"),
        push_to_hub="me/model",
        private=True,
        max_shard_size=4000,
    )
    written = {path.name: path.read_bytes() for path in Path(result["output"]).iterdir()}
    assert server.repo["main"] == written
    assert len(written) > 5
    assert result["pushed_to"] == f"{server.url}/me/model"
    (created,) = server.created  # huggingface_hub said "private": true before 2.0
    assert created["name"] == "model"
    assert created.get("private") is True or created["visibility"] == "private"
    assert {token for _, token in server.asked if token} == {"Bearer hf_secret"}
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in server.repo["main"].items():
        (copy / name).write_bytes(data)
    assert_bit_equal(load(copy), weights(torch.bfloat16))


def test_of_parts_the_one_that_commits_uploads(server, checkpoint, consolidate, tmp_path):
    request = {"output": str(tmp_path / "out"), "push_to_hub": "me/model", "max_shard_size": 4000}
    first = consolidate(part="1/2", **request)
    assert first["pushed_to"] is None
    assert not server.repo["main"]
    assert consolidate(part="2/2", **request)["pushed_to"] == f"{server.url}/me/model"
    assert server.repo["main"] == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    server.repo["main"].clear()
    assert consolidate(part="2/2", exist_ok=True, **request)["pushed_to"] is None
    assert not server.repo["main"]


def test_weights_of_an_earlier_upload_go(server, checkpoint, consolidate, tmp_path):
    server.repo["dev"] = dict.fromkeys(
        ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "model.safetensors", "notes.md"],
        b"old",
    )
    result = consolidate(push_to_hub="me/old", branch="dev")
    assert result["steps"] == [
        "uploading to me/old ...; if that fails, the same command with --exist-ok uploads it"
    ]
    assert result["pushed_to"].endswith("/tree/dev")
    assert sorted(server.repo["dev"]) == ["model.safetensors", "notes.md"]
    assert server.repo["dev"]["model.safetensors"] != b"old"
    assert not server.repo["main"]
    assert not {"private", "visibility"} & server.created[0].keys()


def test_what_said_how_earlier_weights_were_quantised_goes(server, checkpoint, consolidate):
    server.repo["main"] = dict.fromkeys(["hf_quant_config.json", "notes.json"], b"{}")
    result = consolidate(push_to_hub="me/old")
    assert sorted(server.repo["main"]) == ["model.safetensors", "notes.json"]
    assert "me/old: hf_quant_config.json of its earlier, quantised weights was removed" in result["notes"]


def test_what_people_wrote_in_the_repo_stays(server, checkpoint, consolidate, tmp_path):
    for name in ("README.md", "LICENSE", "modeling_tiny.py"):
        (tmp_path / "base" / name).write_text("of the base")
    there = [
        "README.md",
        "LICENSE",
        "handler.py",
        "assets/plot.png",
        "tokenizer.json",
        "config.json",
        ".gitattributes",
    ]
    server.repo["main"] = dict.fromkeys(there, b"theirs")
    result = consolidate(base=str(tmp_path / "base"), push_to_hub="me/old")
    (note,) = [note for note in result["notes"] if "keeps its own" in note]
    assert note.startswith("me/old keeps its own LICENSE;")
    written = {path.name: path.read_bytes() for path in Path(result["output"]).iterdir()}
    assert written["LICENSE"] == b"of the base"
    assert "README.md" not in written
    kept = {name: b"theirs" for name in there if name not in ("tokenizer.json", "config.json")}
    assert server.repo["main"] == {**written, **kept}


def test_what_fails_its_checks_is_never_uploaded(server, checkpoint, consolidate, tmp_path):
    error = consolidate(push_to_hub="me/model", damaged=True)
    assert error["message"] == "damaged"
    assert not server.asked
    assert not (tmp_path / "c-hf").exists()


def test_a_dry_run_uploads_nothing(server, checkpoint, consolidate, tmp_path):
    request = {"push_to_hub": "me/model", "branch": "dev", "private": True}
    result = consolidate(**request, dry_run=True, token=None)
    assert result["pushed_to"] is None
    assert not server.asked
    written = consolidate(**request)
    assert written["upload"] is None
    assert result["upload"] == {
        "repo": "me/model",
        "branch": "dev",
        "private": True,
        "upload_bytes": sum(path.stat().st_size for path in Path(written["output"]).iterdir()),
    }


def test_a_refusal_leaves_the_model_and_says_how_to_go_on(server, checkpoint, consolidate, tmp_path):
    error = consolidate(push_to_hub="me/refused")
    assert (error["error"], error["exit_code"]) == ("ResourceError", 5)
    assert "HTTP 403" in error["message"]
    assert error["hint"] == (
        f"it is complete in {tmp_path / 'c-hf'}: check HF_TOKEN or log in with `hf auth login`, then run the same command "
        "again with --exist-ok to upload it"
    )
    assert open_model(str(tmp_path / "c-hf")).catalog.tensors.keys() == weights().keys()


def test_nobody_logged_in_is_known_before_any_work(server, checkpoint, consolidate, tmp_path):
    error = consolidate(token=None, push_to_hub="me/model")
    assert (error["error"], error["exit_code"]) == ("UsageError", 2)
    assert not (tmp_path / "c-hf").exists()


def test_ctrl_c_while_it_uploads_says_what_is_there(server, checkpoint, consolidate, tmp_path):
    error = consolidate(push_to_hub="me/model", stopped=True)
    assert (error["error"], error["exit_code"]) == ("Interrupted", 130)
    assert error["message"] == f"interrupted: {tmp_path}/c-hf is whole; it was not uploaded to me/model"
    assert open_model(str(tmp_path / "c-hf")).catalog.tensors.keys() == weights().keys()
    assert consolidate(push_to_hub="me/model", exist_ok=True)["pushed_to"] == f"{server.url}/me/model"
    assert server.repo["main"] == {path.name: path.read_bytes() for path in (tmp_path / "c-hf").iterdir()}


@pytest.mark.parametrize("how", but_first(["dies", "refused"]))
@pytest.mark.parametrize("way", but_first(["one process", "parts", "commit"]))
def test_a_process_that_ended_before_it_had_uploaded(way, how, server, checkpoint, consolidate, tmp_path):
    """The same command without a part does that, with `exist_ok`; a part that comes late leaves it alone."""
    out = tmp_path / "out"
    request = {"base": str(tmp_path / "base"), "push_to_hub": "me/model", "max_shard_size": 4000}
    request["output"] = str(out)
    if way in ("parts", "commit"):
        consolidate(part="1/2", **request)
        request["part"] = "2/2"
    ended = consolidate(**{how: True}, **request)
    assert (ended and ended["message"]) == (None if how == "dies" else "refused")
    assert out.exists()
    assert server.repo["main"] == {}
    written = {path.name: path.read_bytes() for path in out.iterdir()}
    if way == "commit":
        again = consolidate(call="commit", output=str(out))
        assert (again["by_another"], again["pushed_to"]) == (True, None)
    elif way == "parts":
        for part in ("1/2", "2/2"):
            late = consolidate(**{**request, "part": part, "exist_ok": True})
            assert (late["was_there"], late["pushed_to"]) == (True, None)
        assert server.repo["main"] == {}
    again = consolidate(**{**request, "part": None, "exist_ok": True})
    assert (again["was_there"], again["pushed_to"]) == (True, f"{server.url}/me/model")
    assert server.repo["main"] == {path.name: path.read_bytes() for path in out.iterdir()} == written


def test_what_is_there_is_uploaded_again(server, checkpoint, consolidate, tmp_path):
    request = {"base": str(tmp_path / "base"), "push_to_hub": "me/model", "output": str(tmp_path / "out")}
    first = consolidate(**request)
    uploaded = server.repo["main"]
    server.repo["main"] = {}
    assert consolidate(**request)["exit_code"] == 2
    assert server.repo["main"] == {}
    again = consolidate(**request, exist_ok=True)
    assert (first["was_there"], again["was_there"]) == (False, True)
    assert server.repo["main"] == uploaded
    refused = consolidate(**{**request, "push_to_hub": "me/refused", "exist_ok": True})
    assert (refused["exit_code"], (tmp_path / "out").exists()) == (5, True)
