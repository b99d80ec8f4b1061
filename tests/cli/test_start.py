"""What starting up imports: commands that move no tensor must not wait for torch."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from shardkit import cli
from tests.operations.consolidate.checkpoints import save
from tests.operations.verify.test_gaps import CONFIG, hub

ROOT = Path(__file__).parents[2]

HEAVY = {"torch", "numpy", "tqdm", "huggingface_hub", "transformers", "safetensors"}

PROBE = """
import json, sys
import shardkit, shardkit.cli
try:
    shardkit.cli.main(json.loads(sys.argv[1]))
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def imported(start, *args):
    process = start("-c", PROBE, json.dumps(args))
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return HEAVY & set(json.loads(said.splitlines()[-1]))


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["preshard", "--help"], ["inspect", "tiny"], ["env"]]
)
def test_light(start, tiny, args):
    assert imported(start, *args) == set()


def test_inspect_of_checkpoints(start, run, tiny):
    run("preshard", "tiny", "out", "--world-size", "2", "--wrap", "none")
    assert imported(start, "inspect", "out") == set()
    (tiny.parent / "out" / "shardkit.json").unlink()
    assert imported(start, "inspect", "out", "--tensors", "--json") == set()


_WITHOUT_TORCH = """
import json, struct, sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError
from pathlib import Path
from click.testing import CliRunner
from shardkit.cli import main
from tests.operations.verify.test_gaps import CONFIG, hub, model

place = Path(sys.argv[1])
hub(place / "hub", model(), CONFIG)

def run(code, *args):
    done = CliRunner().invoke(main, [str(place / each[1:]) if each.startswith("@") else each for each in args])
    assert done.exit_code == code, (args, done.exit_code, done.output)
    return done.output

run(0, "inspect", "@hub")
run(0, "preshard", "@hub", "@two", "--world-size", "2", "--layout", "declared")
run(0, "inspect", "@two")
run(0, "reshard", "@two", "@three", "--world-size", "3")
run(0, "consolidate", "@three", "@back", "--base", "@hub")
run(0, "consolidate", "@three", "@half", "--dtype", "fp16")
run(0, "consolidate", "@half", "@short", "--dtype", "bf16")
run(0, "preshard", "@short", "@wide", "--world-size", "2", "--layout", "declared", "--dtype", "fp32")
run(0, "verify", "@back", "--full")
run(0, "diff", "@back", "@hub")
run(0, "verify", "@three", "--full")
run(0, "diff", "@hub", "@three")

import shardkit
hub(place / "fp8", {}, CONFIG | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
weight, scale = (f"model.layers.0.self_attn.q_proj.weight{end}" for end in ("", "_scale_inv"))
header = json.dumps({weight: {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16]},
                     scale: {"dtype": "F32", "shape": [1, 1], "data_offsets": [16, 20]}}).encode()
codes = bytes(range(0x30, 0x40))
(place / "fp8/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + codes + bytes([0, 0, 0, 0x40]))
run(0, "diff", "@fp8", "@fp8", "--stats")
run(0, "preshard", "@fp8", "@dequantised", "--world-size", "1", "--layout", "declared", "--wrap", "none", "--dequantize")
run(0, "consolidate", "@dequantised", "@values", "--dtype", "fp32")
twice = [2 * (8 + code % 8) / 8 * 2.0 ** (code // 8 - 7) for code in codes]  # the scale is 2
assert (place / "values/model.safetensors").read_bytes()[-64:] == struct.pack("<16f", *twice)
for args in ([], ["--dry-run"]):
    said = run(5, "consolidate", "@adapter", "@merged", "--merge-lora",
               "--adapter-config", str(place / "adapter.json"), *args)
    assert "needs torch" in said and "`pip install 'shardkit[torch]'`" in said, said
    assert not (place / "merged").exists()
    assert not list(place.glob(".merged*")), args
run(0, "preshard", "@bin", "@of-bin", "--world-size", "2", "--layout", "declared")
run(0, "diff", "@of-bin", "@bin")
said = run(3, "preshard", "@bin", "@plain", "--world-size", "2", "--layout", "traced")
assert "torch is not installed (`pip install 'shardkit[trace]'`)" in said, said
try:
    shardkit.prepare
except shardkit.ResourceError as error:
    assert error.hint == "`pip install 'shardkit[torch]'` in this Python", error.hint
else:
    raise AssertionError("prepare without torch")
"""


def test_commands_run_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {f"model.layers.{at}.mlp.up_proj.weight": torch.randn(8, 6) for at in range(2)}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/config.json").write_text(json.dumps(CONFIG))
    torch.save(weights, tmp_path / "bin/pytorch_model.bin")
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {
        f"{path}.lora_A.default.weight": torch.ones(2, 4),
        f"{path}.lora_B.default.weight": torch.ones(4, 2),
    }
    save({**factors, f"{path}.base_layer.weight": torch.ones(4, 4)}, tmp_path / "adapter")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (tmp_path / "adapter.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_dequantising_uses_freed_memory_again(start, tmp_path: Path) -> None:
    """With malloc's defaults there are 0.6 page faults for each page of the output, and a third of the time is theirs."""
    described = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    hub(tmp_path / "fp8", {}, CONFIG | {"quantization_config": described})
    rows, tensors = 4096, dict[str, torch.Tensor]()
    for layer in range(16):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name] = torch.ones(rows, rows).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(rows // 128, rows // 128)
    save_file(tensors, tmp_path / "fp8/model.safetensors", metadata={"format": "pt"})
    options = ["--world-size", "2", "--layout", "declared", "--wrap", "none", "--dequantize"]
    process = start("-m", "shardkit", "preshard", "fp8", "out", *options, "--quiet", stdout=None, stderr=None)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    num_pages = 16 * rows * rows * torch.bfloat16.itemsize // mmap.PAGESIZE
    assert used.ru_minflt < num_pages // 4


def test_what_a_user_has_set_for_malloc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    options = list[int]()
    library = SimpleNamespace(mallopt=lambda option, _: options.append(option))
    monkeypatch.setattr(cli.ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    cli._keep_freed_memory()
    assert options == []
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    cli._keep_freed_memory()
    assert sorted(options) == [-3, -1]
    monkeypatch.setattr(cli.ctypes, "CDLL", lambda _: SimpleNamespace())  # another C library
    cli._keep_freed_memory()
