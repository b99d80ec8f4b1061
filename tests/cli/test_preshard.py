"""`shardkit preshard`: what it says, and what it leaves when a signal ends it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

import shardkit
from shardkit.cli import preshard as preshard_command
from shardkit.keys.expressions import FusedTensors
from shardkit.operations.parts.results import Converted
from shardkit.operations.preshard import PreshardResult
from tests.cases import but_first
from tests.cli.conftest import assert_as_planned

ARGS = ["preshard", "tiny", "--world-size", "4", "--wrap", "none"]

RESULT = PreshardResult(
    source="org/model",
    source_format="safetensors",
    output="/data/model-dp_shard4",
    dry_run=False,
    world_size=4,
    mesh="dp_shard=4",
    loader="LlamaForCausalLM",
    profile="plain",
    layout="traced",
    num_units=3,
    num_tensors=20,
    num_files=4,
    read_bytes=8 << 30,
    written_bytes=8 << 30,
    converted=(),
    file_bytes=(2 << 30, 2 << 30, 2 << 30, 1 << 30),
    imbalance=1.1429,
    num_tensors_with_empty_shards=2,
    fused=(FusedTensors(are_experts=True, num_stored=72, num_tensors=6),),
    shares_extents=False,
    peak_memory_bytes=128 << 20,
    download_bytes=0,
    free_bytes=100 << 30,
    resumed_files=0,
    checked_bytes=0,
    unchecked=(),
    source_manifests=(),
    elapsed_s=4.0,
    moving_s=2.0,
    ties=(("embed.weight", "lm_head.weight"),),
    omitted=(("ids", "a buffer"),),
    copied=("config.json", "tokenizer\x1b.json"),
    skipped=(),
    notes=("a note",),
    warnings=("a \x1b warning",),
)

HUMAN = """\
wrote /data/model-dp_shard4
  source   org/model (safetensors)
  mesh     dp_shard=4; world size 4
  layout   traced from the model, 3 units
  read     20 tensors, 8.0 GiB
  fused    72 expert tensors into 6
  write    4 shard files, 8.0 GiB
  copy     2 files: config.json, tokenizer\\x1b.json
  balance  the largest file is 1.14 times the mean
  empty    2 tensors with no rows on some ranks
  tied     embed.weight = lm_head.weight (stored once)
  omitted  ids: a buffer
  time     4.00 s; bytes moved in 2.00 s: 4.0 GiB/s

load it on every rank, into a meta-device model already wrapped for this mesh (do not call to_empty()):
  import shardkit
  shardkit.load_into(model, '/data/model-dp_shard4')  # parameters and buffers
"""

DRY = """\
dry run: nothing was written to /data/model-dp_shard4
  source     org/model (safetensors)
  mesh       dp_shard=4; world size 4
  layout     traced from the model, 3 units
  to fetch   6.0 GiB from the Hub; so far only headers were read
  to read    20 tensors, 8.0 GiB
  fused      72 expert tensors into 6
  to write   4 shard files, 8.0 GiB
  to copy    2 files: config.json, tokenizer\\x1b.json
  balance    the largest file is 1.14 times the mean
  per rank   shard 0-2: 2.0 GiB each
             shard 3: 1.0 GiB
  empty      2 tensors with no rows on some ranks
  tied       embed.weight = lm_head.weight (stored once)
  omitted    ids: a buffer
  memory     at most 128.0 MiB of buffers
  free disk  100.0 GiB
"""


def test_what_is_converted_is_said() -> None:
    converted = (Converted(stored="float32", written="bfloat16", num_tensors=19),)
    assert "  converted  fp32 -> bf16: 19 tensors" in preshard_command.render(
        replace(RESULT, converted=converted)
    )
    dry = preshard_command.render(replace(RESULT, converted=converted, dry_run=True))
    assert "  to convert  fp32 -> bf16: 19 tensors" in dry


@pytest.mark.parametrize(("dry_run", "text"), [(False, HUMAN), (True, DRY)])
def test_text(dry_run, text):
    lines = preshard_command.render(replace(RESULT, dry_run=dry_run, download_bytes=(6 << 30) * dry_run))
    assert "\n".join(lines) + "\n" == text


@pytest.mark.parametrize(
    "option", ["--osft=0.3", "--osft-targets=auto", "--osft-rank=*.o=7", "--osft-svd=exact"]
)
def test_factors_are_computed_in_a_job(run, option):
    found = run(*ARGS, option)
    assert found.exit_code == 2
    assert "prepare(model, model, osft=0.3) and finalize compute the factors" in found.stderr


def test_streams(run, monkeypatch):
    monkeypatch.setattr("shardkit.operations.preshard.preshard", lambda *args, **options: RESULT)
    human, document = run(*ARGS), run(*ARGS, "--json")
    assert human.stdout == HUMAN
    assert human.stderr == "note: a note\nwarning: a \\x1b warning\n"
    assert document.stderr == "warning: a \\x1b warning\n"
    assert json.loads(document.stdout) == json.loads(json.dumps(RESULT.to_json()))


def test_options_reach_the_library(run, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "shardkit.operations.preshard.preshard",
        lambda *args, **options: seen.update(options, args=args) or RESULT,
    )
    flags = "--mesh dp_shard=4 --parallel-rule *.q=colwise --stages m:f --layout declared --keys k.toml --names hub --profile lightning --attribute net --dtype bf16 --revision r --variant v --overwrite -n --digest none"
    run(*ARGS, "out", *flags.split(), "--jobs", "3", "--max-memory", "1GB", "--trust-remote-code", "--json")
    assert type(seen.pop("progress")).__name__ == "NoProgress"
    assert callable(seen.pop("on_warning"))
    assert callable(seen.pop("on_step"))
    assert seen == {
        "args": ("tiny", "out"),
        "world_size": 4,
        "mesh": "dp_shard=4",
        "wrap": "none",
        "parallel_rules": ("*.q=colwise",),
        "stages": "m:f",
        "layout": "declared",
        "holdings": False,
        "keys": "k.toml",
        "names": "hub",
        "profile": "lightning",
        "attribute": "net",
        "dtype_rules": (),
        "dequantize": False,
        "dtype": "bf16",
        "revision": "r",
        "variant": "v",
        "overwrite": True,
        "exist_ok": False,
        "dry_run": True,
        "executor": None,
        "num_parts": None,
        "part": None,
        "sha256": False,
        "check_source": True,
        "source_manifest": None,
        "follow_links": False,
        "digest": "none",
        "jobs": 3,
        "max_memory": "1GB",
        "scratch": None,
        "trust_remote_code": True,
    }


def test_real_run(run, tiny):
    planned = json.loads(run(*ARGS, "--dry-run", "--json").stdout)
    assert not os.path.exists("tiny-dp_shard4")
    written = json.loads(run(*ARGS, "--json").stdout)
    assert written["output"] == str(tiny.parent / "tiny-dp_shard4")
    assert written["file_bytes"] == [os.path.getsize(f"tiny-dp_shard4/__{n}_0.distcp") for n in range(4)]
    assert_as_planned(planned, written)


def test_existing_destination_is_refused_by_both(run, tiny):
    os.makedirs("tiny-dp_shard4/other")
    assert run(*ARGS).exit_code == run(*ARGS, "--dry-run").exit_code == 2


def test_other_torch_is_said(run, tiny, monkeypatch):
    monkeypatch.setattr("shardkit.operations.environment.package_version", lambda name: "2.99.0")
    result = run(*ARGS, "-n")
    assert "warning: torch 2.99.0 is newer than what shardkit was tried with, 2.6 to 2.15\n" in result.stderr


BARS = """
import sys
from shardkit.cli import main
try:
    main(sys.argv[1:])
except SystemExit as exit:
    from huggingface_hub.utils import are_progress_bars_disabled
    print("bars:", not are_progress_bars_disabled(), "exit:", exit.code)
"""


@pytest.mark.parametrize(
    ("flags", "of_the_user", "has_bars"),
    [([], None, True), (["--json"], None, False), (["--no-progress"], None, False), (["--json"], "0", True)],
)
def test_bars_of_the_hub(tmp_path, flags, of_the_user, has_bars):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
    if of_the_user is not None:
        environment["HF_HUB_DISABLE_PROGRESS_BARS"] = of_the_user
    command = [sys.executable, "-c", BARS, "preshard", "org/model", "--world-size", "4", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"bars: {has_bars} exit: 5" in done.stdout


def write_sparse_model(path, nbytes):
    """A model of zeros that takes no disk; 64 tensors."""
    step = nbytes // 64
    header = {
        f"layers.{n}.weight": {
            "dtype": "U8",
            "shape": [64, step // 64],
            "data_offsets": [n * step, (n + 1) * step],
        }
        for n in range(64)
    }
    text = json.dumps(header).encode()
    path.mkdir()
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 64 * step)


STOPS = """\
import signal, threading
from shardkit.files.output.local import LocalOutput

heard, plain, set_handler = threading.Event(), LocalOutput.add, signal.signal

def hearing(signum, handler):
    def hear(*args):
        heard.set()
        handler(*args)
    return set_handler(signum, hear if callable(handler) else handler)

def add(output, scratch, number, note):
    plain(output, scratch, number, note)
    if not heard.is_set():
        print("a file has a note\\n", end="", flush=True)  # one write: threads may say it at once
        heard.wait(20)  # one that comes just before the main thread waits for this one is heard after that wait

signal.signal, LocalOutput.add = hearing, add
"""
"""Of a `sitecustomize.py`: the run stops when a file has a note, until it hears a signal."""


@pytest.mark.parametrize(("signum", "code"), but_first([(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_signal_then_resume(start, tmp_path, tmp_path_factory, signum, code):
    write_sparse_model(tmp_path / "big model", 200 << 20)
    flags = ["--world-size", "64", "--wrap", "none", "--jobs", "1"]
    stops = tmp_path_factory.mktemp("stops")
    (stops / "sitecustomize.py").write_text(STOPS)
    root = os.path.dirname(os.path.dirname(shardkit.__file__))
    env = {"PYTHONPATH": os.pathsep.join([str(stops), root])}
    process = start("-m", "shardkit", "preshard", "big model", "out", *flags, env=env)
    assert process.stdout.readline() == "a file has a note\n"
    process.send_signal(signum)
    _, said = process.communicate(timeout=600)
    assert process.returncode == code, said
    assert not (tmp_path / "out").exists()
    first, resume = said.splitlines()
    made = re.escape(f"interrupted: {tmp_path}/out was not made; ")
    assert re.fullmatch(rf"{made}\d+ of 64 files are finished and kept", first)
    command = shlex.split(resume.removeprefix("resume: "))
    assert command[1:] == ["-m", "shardkit", "preshard", "big model", "out", *flags]
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(
        [*command, "--json"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=600
    )
    assert json.loads(done.stdout)["resumed_files"] >= 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big model", "out"]


def test_a_profile_says_how_its_trainer_starts() -> None:
    lines = preshard_command.render(replace(RESULT, profile="accelerate"))
    assert any("load_fsdp_model" in line for line in lines)
    assert any(f"resume_from_checkpoint={RESULT.output!r}" in line for line in lines)
