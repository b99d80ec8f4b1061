"""`shardkit manifest`: its words, its JSON, its exit codes."""

from __future__ import annotations

import errno
import json
import os
import re

import pytest

from shardkit.files import storage


def test_what_it_says(run, tiny):
    result = run("manifest", "tiny", "--sha256")
    assert (result.exit_code, result.stderr) == (0, "")
    size = (tiny / "model.safetensors").stat().st_size
    path = tiny.parent / "tiny.shardkit.json"
    assert re.sub(r"[0-9.]+ s$", "T s", result.stdout.rstrip()) == (
        f"wrote {path}\n"
        "  checkpoint  Hub model\n"
        f"  read        1 file, {size} B\n"
        "  digests     CRC-32 and sha256 of every file, CRC-32 of 4 tensors\n"
        "  time        T s"
    )
    found = run("verify", "tiny", "--full")
    assert f"held against  {path}\n" in found.stdout
    assert (found.exit_code, found.stderr) == (0, "")


def test_a_dry_run(run, tiny):
    result = run("manifest", "tiny", "-n", "-o", "m.json")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"dry run: nothing was written to {tiny.parent / 'm.json'}\n")
    assert "to read" in result.stdout
    assert not (tiny.parent / "m.json").exists()


def test_json(run, tiny):
    result = run("manifest", "tiny", "--json", "--inside")
    assert (result.exit_code, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    assert (content["manifest"], content["sha256"]) == (str(tiny / "shardkit.json"), False)
    assert (content["num_files"], content["num_tensors"], content["num_tensor_digests"]) == (1, 4, 4)
    assert content["read_bytes"] == (tiny / "model.safetensors").stat().st_size


def test_links_are_named_on_stderr(run, tiny):
    (tiny / "link").symlink_to("/etc/hostname")
    result = run("manifest", "tiny")
    assert "note: not listed: 1 link, pipe, socket or device: link\n" in result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("absent",), 3),
        (("empty",), 3),
        ((".",), 0),  # what it holds is taken, as in the directory of a run
        (("tiny", "--output", "tiny/m.json"), 2),
        (("tiny", "--output", "absent/m.json"), 5),
        (("tiny", "--inside", "-o", "m.json"), 2),
        (("tiny", "--jobs", "0"), 2),
        (("tiny", "--jobs", "7"), 0),
    ],
)
def test_exit_codes(run, tiny, args, code):
    assert run("manifest", *args).exit_code == code


def test_an_existing_one(run, tiny):
    assert run("manifest", "tiny").exit_code == 0
    assert run("manifest", "tiny").exit_code == 2
    assert run("manifest", "tiny", "--overwrite").exit_code == 0


@pytest.mark.parametrize("call", ["mkdir", "write_file"])
@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (errno.ENOSPC, "hint: free some space or choose another file system\n"),
        (errno.EDQUOT, "hint: free some space or choose another file system\n"),
        (errno.EROFS, "hint: choose a destination in an existing directory that you may write to\n"),
        (errno.EIO, f"{os.strerror(errno.EIO)}\n"),
    ],
)
def test_the_hint_is_about_why_it_cannot_be_written(run, tiny, monkeypatch, call, code, way_out):
    def refuse(*args, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(storage, call, refuse)
    for command in (("manifest", "tiny"), ("inspect", "tiny", "--html", "x.html")):
        result = run(*command)
        assert result.exit_code == 5
        assert result.stderr.endswith(way_out)
