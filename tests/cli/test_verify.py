"""`shardkit verify`: its words, its JSON, its exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal

import pytest
import torch

from shardkit.files import storage
from tests.bits import flip_byte
from tests.operations.consolidate.checkpoints import hub

SHARD = "__1_0.distcp"


def data_of(directory, name):
    """The first byte of a tensor's data in SHARD."""
    lines = json.loads((directory / SHARD.replace(".distcp", ".chunks.json")).read_bytes())["chunks"]
    return next(line[7] for line in lines if line[0] == name)


def test_nothing_wrong(run, sharded):
    result = run("verify", "out", "--full")
    assert (result.exit_code, result.stderr) == (0, "")
    size = sum(os.path.getsize(sharded / f"__{n}_0.distcp") for n in range(2))
    assert result.stdout == (
        "out: no problem found\n"
        "  checkpoint       shardkit\n"
        "  level            full\n"
        "  holds            4 tensors, 7 chunks, 116 B in 2 files\n"
        "  checked against  shardkit.json\n"
        f"  compared         {size / 1024:.1f} KiB: 7 chunks, 2 whole files\n"
    )


def test_nothing_to_compare_with_is_the_first_thing_said(run, sharded):
    result = run("verify", "tiny", "--full")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "tiny: its structure is whole; no byte could be compared, because no checksum"
    )


def test_the_last_line_says_which_files_to_bring_again(run, sharded):
    flip_byte(sharded / SHARD, data_of(sharded, "embed.weight"))
    os.remove(sharded / "__0_0.distcp")
    assert run("verify", "out", "--full").stdout.endswith("\n\ncopy these files again: __{0,1}_0.distcp\n")


def test_problems_and_exit_code(run, sharded):
    at = data_of(sharded, "embed.weight")
    flip_byte(sharded / SHARD, at)
    assert run("verify", "out").exit_code == 0
    result = run("verify", "out", "--full")
    assert result.exit_code == 1
    assert result.stdout.startswith("out: 1 problem found\n")
    *_, problem, _, _ = result.stdout.splitlines()
    assert problem.startswith(
        f"  {SHARD}: embed.weight [3:5, 0:3]: bytes {at} to {at + 24}: CRC-32 of the data: expected "
    )
    assert ", found " in problem


def test_json(run, sharded):
    at = data_of(sharded, "embed.weight")
    flip_byte(sharded / SHARD, at)
    result = run("verify", "out", "--full", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    content = json.loads(result.stdout)
    assert (content["ok"], content["level"]) == (False, "full")
    assert content["read_bytes"] > content["tensor_bytes"] == 116
    (problem,) = content["problems"]
    assert (problem["file"], problem["tensor"]) == (SHARD, "embed.weight")
    assert problem["region"] == [[3, 0], [2, 3]]
    assert (problem["start_byte"], problem["num_bytes"]) == (at, 24)
    assert len(problem["expected"]) == len(problem["found"]) == 8


def test_files_that_metadata_names_and_that_are_gone_are_a_problem_each(run, sharded):
    (sharded / "shardkit.json").unlink()
    for n in range(2):
        (sharded / f"__{n}_0.distcp").unlink()
    result = run("verify", "out")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == "out: 2 problems found"
    named = [line.split(":")[0] for line in result.stdout.splitlines()[-4:-2]]
    assert named == ["  __0_0.distcp", "  __1_0.distcp"]


def test_warnings_and_notes_are_on_stderr(run, sharded):
    (sharded / "__5_0.distcp").write_bytes(b"")
    (sharded / "shardkit.json").unlink()
    result = run("verify", "out")
    assert result.exit_code == 0
    assert "warning: __5_0.distcp: not of this checkpoint\n" in result.stderr
    assert "note: .metadata has no checksum" in result.stderr


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("absent",), 3),
        (("empty",), 3),
        ((".",), 0),  # what it holds is taken, as in the directory of a run
        (("tiny", "--read", "5%"), 2),
        (("tiny",), 0),
        (("tiny", "--jobs", "0"), 2),
        (("tiny", "--revision", "main"), 2),
        (("tiny", "--manifest", "absent"), 3),
        (("tiny", "--against", "tiny"), 2),
        (("tiny", "--strict"), 0),
    ],
)
def test_exit_codes(run, tiny, args, code):
    assert run("verify", *args).exit_code == code


def test_names_of_files_cannot_act_on_a_terminal(run, sharded):
    (sharded / "\x1b[31m.distcp").write_bytes(b"")
    result = run("verify", "out")
    assert "\x1b" not in result.stdout + result.stderr
    assert "\\x1b[31m.distcp" in result.stderr


def test_files_that_cannot_be_read(run, sharded, monkeypatch):
    """5 where nothing is known to be wrong, 1 where something is."""
    plain, inode = storage.preadv, (sharded / SHARD).stat().st_ino

    def preadv(fd, buffers, start):
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, buffers, start)

    monkeypatch.setattr(storage, "preadv", preadv)
    result = run("verify", "out", "--full")
    assert result.exit_code == 5
    assert f"  {SHARD}: reading at byte 0: Input/output error" in result.stdout
    flip_byte(sharded / "__0_0.distcp", 1000)
    result = run("verify", "out", "--full", "--json")
    assert result.exit_code == 1
    unreadable = [problem["is_unreadable"] for problem in json.loads(result.stdout)["problems"]]
    assert sorted(unreadable) == [False, True]


@pytest.mark.parametrize("name", [SHARD, ".metadata"])
def test_a_file_that_may_not_be_opened_is_one_problem(run, sharded, monkeypatch, name):
    """It is opened for its structure, and again for its bytes."""
    plain = storage.open_fd

    def open_fd(path, *arguments):
        if os.path.basename(path) == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return plain(path, *arguments)

    monkeypatch.setattr(storage, "open_fd", open_fd)
    (sharded / "shardkit.json").unlink()
    result = run("verify", "out", "--full")
    assert result.exit_code == 5
    assert f"  {name}: Permission denied\n" in result.stdout
    assert result.stdout.startswith("out: 1 problem found\n")


def test_ctrl_c(ended, sharded):
    """A signal while bytes are compared ends it without a traceback."""
    code = (
        "import os, signal, sys\n"
        "from shardkit.files import digest\n"
        "from shardkit.cli import main\n"
        "plain = digest.crc32\n"
        "def crc32(*args):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return plain(*args)\n"
        "digest.crc32 = crc32\n"
        "main(['verify', 'out', '--full'])\n"
    )
    returncode, out, err = ended("-c", code)
    assert (returncode, out) == (128 + signal.SIGINT, "")
    assert err.startswith("interrupted: ")
    assert "Traceback" not in err


def test_tensors_past_the_end_are_one_line(run, tiny):
    layers = {f"model.layers.{n}.up.weight": torch.full((4, 3), float(n)) for n in range(12)}
    file = hub(tiny.parent / "a", layers, None) / "model.safetensors"
    size = os.path.getsize(file)
    os.truncate(file, size - 300)
    stdout = run("verify", "a").stdout
    assert f"past the end of the file at {size - 300}  x7" in stdout
    assert stdout.count("past the end") == 1
    assert len(json.loads(run("verify", "a", "--json").stdout)["problems"][0]["details"]) == 7


def test_a_note_for_all_ranks(run, tiny):
    made = run("preshard", "tiny", "ck", "--profile", "accelerate", "--world-size", "2", "--wrap", "none")
    assert made.exit_code == 0
    for rank in range(64):
        (tiny.parent / "ck" / f"rng_state_{rank}.pth").write_bytes(b"x")
    assert run("verify", "ck").stderr.count("rng_state") == 1
    assert "note: not read: rng_state_{0..63}.pth: state of the trainer" in run("verify", "ck").stderr
    assert "skipped  rng_state_{0..63}.pth: state of the trainer\n" in run("inspect", "ck").stdout
    assert len(json.loads(run("inspect", "ck", "--json").stdout)["skipped"]) == 65
    assert run("consolidate", "ck", "x", "-n").stdout.count("rng_state") == 1


def test_each_thing_is_said_once(run, tiny):
    plain = run("verify", "tiny")
    assert "  level       structure: names, headers and sizes; --full reads the bytes\n" in plain.stdout
    assert "no checksum" not in plain.stdout
    assert plain.stderr.count("checksum") == 1
    assert "compared" not in run("verify", "tiny", "--full").stdout.partition("\n")[2]
    os.truncate(tiny / "model.safetensors", os.path.getsize(tiny / "model.safetensors") - 1)
    stdout = run("verify", "tiny").stdout
    assert "\n  model.safetensors: truncated: " in stdout
    assert stdout.count("model.safetensors:") == 1


def test_a_manifest_that_is_missing_is_named(run, tiny):
    missing = run("verify", "tiny", "--manifest", "the manifest.json", "--full")
    assert missing.exit_code == 3
    assert missing.stderr == (
        "error: the manifest.json: no such file\nhint: name an existing manifest, or leave --manifest out\n"
    )


def test_a_stray_file_of_weights_is_said_once(run, tiny):
    for name in ("stray.safetensors", "consolidated.safetensors"):
        shutil.copy(tiny / "model.safetensors", tiny / name)
    (tiny / "optimizer.pt").write_bytes(b"x")
    said = run("verify", "tiny").stderr
    assert "warning: stray.safetensors: not among the model's weight files\n" in said
    assert "warning: consolidated.safetensors: not among the model's weight files\n" in said
    assert (said.count("stray"), said.count("consolidated")) == (1, 1)
    assert "note: not read: optimizer.pt: state of the trainer\n" in said
