"""`shardkit consolidate`: what it says, what reaches the library, and what it imports."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace

import pytest
import torch

from shardkit.cli import consolidate as consolidate_command
from shardkit.operations.casts import DTypeCount
from shardkit.operations.consolidate import ConsolidateResult, SkippedPart
from tests.cli.conftest import assert_as_planned
from tests.cli.test_start import imported
from tests.operations.consolidate.checkpoints import save

RESULT = ConsolidateResult(
    checkpoint="/run",
    resolved="/run/step-10",
    reason="the highest step",
    step=10,
    format="dcp",
    writer="torch.distributed.checkpoint",
    output="/run/step-10-hf",
    dry_run=False,
    kind="model",
    weights="model",
    root="app.model",
    stripped=(("app.model.", 20), ("_orig_mod", 18)),
    split=(),
    renamed=(("model.visual.", "visual.", 8), ("net.", "", 1), ("", "transformer.", 2)),
    skipped=(
        SkippedPart(what="optimizer", where="app.optim", num_tensors=60, num_objects=2),
        SkippedPart(what="extra.pt", where="random states", num_tensors=0, num_objects=0),
    ),
    candidates=("ema",),
    base="org/model",
    model_class="LlamaForCausalLM",
    library="transformers",
    assets=("config.json", "tokenizer.json"),
    ties=(("embed.weight", "lm_head.weight"),),
    untied=(("wte.weight", "head.weight"),),
    cast="bf16",
    dtypes=(DTypeCount(dtype="bfloat16", num_tensors=20, tensor_bytes=8 << 30),),
    num_tensors=20,
    num_parameters=4 << 30,
    num_files=2,
    file_names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    file_bytes=(5 << 30, 3 << 30),
    read_bytes=16 << 30,
    written_bytes=8 << 30,
    converted=(),
    peak_memory_bytes=128 << 20,
    free_bytes=100 << 30,
    resumed_files=0,
    checked_bytes=0,
    unchecked=(),
    source_manifests=(),
    pushed_to="https://huggingface.co/me/model",
    elapsed_s=4.0,
    moving_s=2.0,
    notes=("a note",),
    warnings=("a \x1b warning",),
)

HUMAN = """\
wrote /run/step-10-hf
  found     DCP checkpoint
  using     /run/step-10: the highest step
  weights   model, everything below app.model; also there: ema
  stripped  app.model. from 20 names
            _orig_mod from 18 names
  renamed   8 tensors: model.visual. -> visual.
            1 tensor: net. -> (nothing)
            2 tensors: (nothing) -> transformer.
  base      org/model, 2 files: config.json, tokenizer.json
  tied      embed.weight = lm_head.weight (stored once)
  untied    wte.weight and head.weight differ: both kept
  skipped   optimizer: app.optim: 60 tensors, 2 other
            extra.pt: random states
  read      20 tensors, 16.0 GiB
  write     2 weight files, 8.0 GiB, 4,294,967,296 parameters
  dtypes    bf16: 20, 8.0 GiB
  pushed    https://huggingface.co/me/model
  time      4.00 s; bytes moved in 2.00 s: 4.0 GiB/s

load it:
  transformers.LlamaForCausalLM.from_pretrained('/run/step-10-hf')
"""

DRY = """\
dry run: nothing was written to /run/step-10-hf
  found      DCP checkpoint
  weights    model, names as they are
  to read    20 tensors, 16.0 GiB
  to write   2 weight files, 8.0 GiB, 4,294,967,296 parameters
  dtypes     bf16: 20, 8.0 GiB
  per file   file 0: 5.0 GiB
             file 1: 3.0 GiB
  memory     at most 128.0 MiB of buffers
  free disk  100.0 GiB
"""

BARE = replace(
    RESULT,
    checkpoint=RESULT.resolved,
    dry_run=True,
    root="",
    stripped=(),
    renamed=(),
    split=(),
    skipped=(),
    candidates=(),
    base=None,
    assets=(),
    ties=(),
    untied=(),
)


@pytest.mark.parametrize(("result", "text"), [(RESULT, HUMAN), (BARE, DRY)])
def test_text(result, text):
    assert "\n".join(consolidate_command.render(result)) + "\n" == text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_class": None}, "transformers.AutoModel.from_pretrained('/run/step-10-hf')"),
        (
            {"model_class": "AutoModelForCausalLM"},  # which only code of its own has
            "transformers.AutoModelForCausalLM.from_pretrained('/run/step-10-hf', trust_remote_code=True)",
        ),
        (
            {"kind": "adapter", "assets": ("adapter_config.json",)},
            "peft.PeftModel.from_pretrained(model, '/run/step-10-hf')",
        ),
        # Without its config PEFT cannot load an adapter.
        ({"kind": "adapter", "assets": (), "num_files": 1}, "load_file("),
        ({"assets": (), "num_files": 1}, "load_file('/run/step-10-hf/model-00001-of-00002.safetensors')"),
    ],
)
def test_how_to_load(changes, line):
    assert line in consolidate_command.render(replace(RESULT, **changes))[-1]


def test_an_adapters_config_is_not_the_bases():
    adapter = replace(RESULT, kind="adapter", base="org/base", assets=("adapter_config.json",))
    lines = consolidate_command.render(adapter)
    assert [line.split() for line in lines if "org/base" in line] == [["base", "org/base"]]


def test_streams(run, monkeypatch):
    monkeypatch.setattr("shardkit.operations.consolidate.consolidate", lambda *args, **options: RESULT)
    human, document = run("consolidate", "/run"), run("consolidate", "/run", "--json")
    assert human.stdout == HUMAN
    assert human.stderr == "note: a note\nwarning: a \\x1b warning\n"
    assert document.stderr == "warning: a \\x1b warning\n"
    assert json.loads(document.stdout) == json.loads(json.dumps(asdict(RESULT)))


def test_options_reach_the_library(run, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "shardkit.operations.consolidate.consolidate",
        lambda *args, **options: seen.update(options, args=args) or RESULT,
    )
    flags = (
        "--base org/m --base-revision r --config base --dtype base --dtype-rule g*=fp32 --max-shard-size 1GB --single-file --weights ema --root a.b "
        "--strip-prefix p --strip-prefix q --add-prefix z --rename a=b --rename c=d --include i* --exclude e* "
        "--fill-from-base v* --tokenizer t --allow-missing --allow-unexpected --keys k.toml --ask-class off --dequantize --quantize base --keep-factors --merge-lora --adapter-config f --manifest --push-to-hub me/m "
        "--private --branch dev --overwrite --strict --follow-links -n --digest none --jobs 3 --max-memory 1GB --json"
    )
    assert run("consolidate", "last.ckpt", "out", *flags.split()).exit_code == 0
    assert type(seen.pop("progress")).__name__ == "NoProgress"
    assert callable(seen.pop("on_warning"))
    assert callable(seen.pop("on_step"))
    assert seen == {
        "args": ("last.ckpt", "out"),
        "base": "org/m",
        "base_revision": "r",
        "config": "base",
        "tokenizer": "t",
        "dtype": "base",
        "dtype_rules": ("g*=fp32",),
        "max_shard_size": "1GB",
        "single_file": True,
        "weights": "ema",
        "root": "a.b",
        "strip_prefix": ("p", "q"),
        "add_prefix": "z",
        "rename": ("a=b", "c=d"),
        "include": ("i*",),
        "exclude": ("e*",),
        "fill_from_base": ("v*",),
        "allow_missing": True,
        "allow_unexpected": True,
        "keys": "k.toml",
        "ask_class": False,
        "dequantize": True,
        "quantize": "base",
        "keep_factors": True,
        "merge_lora": True,
        "adapter_config": "f",
        "manifest": True,
        "manifest_file": None,
        "sha256": False,
        "push_to_hub": "me/m",
        "private": True,
        "branch": "dev",
        "overwrite": True,
        "exist_ok": False,
        "dry_run": True,
        "strict": True,
        "follow_links": True,
        "executor": None,
        "num_parts": None,
        "part": None,
        "check_source": True,
        "source_manifest": None,
        "digest": "none",
        "jobs": 3,
        "max_memory": "1GB",
        "scratch": None,
    }


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    state = {f"layers.{n}.up.weight": torch.full((4, 3), n, dtype=torch.bfloat16) for n in range(2)}
    monkeypatch.chdir(tmp_path)
    return save({"model": {**state, "embed.weight": torch.arange(15.0).view(5, 3)}}, tmp_path / "last.ckpt")


def test_real_run(run, checkpoint):
    planned = json.loads(run("consolidate", "last.ckpt/", "--dry-run", "--json").stdout)
    assert not os.path.exists("last-hf")
    written = json.loads(run("consolidate", "last.ckpt/", "--json").stdout)
    assert written["output"] == str(checkpoint.parent / "last-hf")
    assert written["file_bytes"] == [os.path.getsize("last-hf/model.safetensors")]
    assert_as_planned(planned, written)


def test_exit_codes(run, checkpoint):
    assert run("consolidate", "nowhere").exit_code == 3
    assert run("consolidate", "last.ckpt", "--root", "nope").exit_code == 2
    os.makedirs("last-hf/other")
    assert run("consolidate", "last.ckpt").exit_code == 2
    (checkpoint / "__0_0.distcp").unlink()
    refused = run("consolidate", "last.ckpt", "out", "--json")
    assert refused.exit_code == 3
    assert "__0_0.distcp" in refused.stdout
    assert sorted(os.listdir()) == ["last-hf", "last.ckpt"]


def test_no_torch_is_imported(start, checkpoint):
    """numpy comes with the engine, and casts."""
    assert imported(start, "consolidate", "last.ckpt", "--json") <= {"numpy"}
    assert imported(start, "consolidate", "last.ckpt", "out", "--dtype", "fp16") <= {"numpy"}


def test_a_newer_checkpoint_that_was_passed_over(run, tiny):
    """Said first and once; refused with --strict before anything is written."""
    (tiny.parent / "run").mkdir()
    for step in (1, 2):
        made = run("preshard", "tiny", f"run/step-{step}", "--world-size", "2", "--wrap", "none")
        assert made.exit_code == 0
    (tiny.parent / "run" / "step-2" / "__1_0.distcp").unlink()
    result = run("consolidate", "run", "out")
    assert result.exit_code == 0
    first, *others = result.stderr.splitlines()
    assert first.startswith("warning: skipped step-2: ")
    assert "__1_0.distcp" in first
    assert not any("skipped" in line for line in others)
    assert "  using    run/step-1: it has the highest step of those that are whole\n" in result.stdout
    result = run("consolidate", "run", "strict", "--strict")
    assert result.exit_code == 3
    assert "skipped step-2: " in result.stderr
    assert "give run/step-1 by its path" in result.stderr
    assert not (tiny.parent / "strict").exists()
    assert run("diff", "tiny", "run").exit_code == 0
    refused = run("diff", "tiny", "run", "--strict")
    assert refused.exit_code == 3
    assert refused.stderr == result.stderr


def test_a_dry_run_shows_what_would_be_uploaded_where(run, tiny):
    """Nobody is logged in, and nobody is asked."""
    run("preshard", "tiny", "sharded", "--world-size", "2", "--layout", "declared")
    typed = ["consolidate", "sharded", "--dry-run", "--push-to-hub", "me/m"]
    shown = " ".join(run(*typed).stdout.split())
    assert re.search(r"to upload at most [\d.]+ \w+ to me/m, its default branch; if .* public, unless", shown)
    shown = " ".join(run(*typed, "--branch", "dev", "--private").stdout.split())
    assert "to me/m, branch dev; if the repo is new, it is private" in shown
