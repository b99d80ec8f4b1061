"""`shardkit diff`: its words, its JSON, its exit codes."""

from __future__ import annotations

import json
import re

import pytest
import torch

import shardkit
from tests.operations.consolidate.checkpoints import hub, load

EQUAL = """\
  A     tiny (Hub model)
  B     out (DCP checkpoint)
  read  232 B in TIME s

=  4 tensors

equal
"""
DIFFERS = """\
  A     tiny (Hub model)
  B     other (Hub model)
  read  208 B in TIME s

=  1 tensor
*  embed.weight        fp32          [5, 3]            2 of 15 elements (13.3%), first at [1, 2]; relative norm 0.75
*  layers.0.up.weight  bf16 -> fp32  [4, 3]            dtypes differ, equal after conversion
*  layers.1.up.weight  bf16          [4, 3] -> [3, 4]  shapes differ
+  more                fp32          [2]               only in B

4 of 5 tensors differ
"""


@pytest.fixture
def other(tiny):
    """The same model, changed in four ways."""
    tensors = load(tiny)
    tensors["embed.weight"][1, 2] += 1
    tensors["embed.weight"][4, 0] *= -1
    tensors["layers.0.up.weight"] = tensors["layers.0.up.weight"].float()
    tensors["layers.1.up.weight"] = tensors["layers.1.up.weight"].reshape(3, 4)
    tensors["more"] = torch.zeros(2)
    return hub(tiny.parent / "other", tensors, None)


def said(result):
    return re.sub(r"\d+\.\d\d s$", "TIME s", result.stdout, flags=re.MULTILINE)


def test_equal(run, tiny):
    assert run("preshard", "tiny", "out", "--world-size", "2", "--wrap", "none").exit_code == 0
    result = run("diff", "tiny", "out")
    assert (result.exit_code, said(result), result.stderr) == (0, EQUAL, "")


def test_differs(run, other):
    result = run("diff", "tiny", "other")
    note = "note: 1 tensor bf16 in A and fp32 in B: `diff B A --as bf16` rounds the wider side first\n"
    assert (result.exit_code, said(result), result.stderr) == (1, DIFFERS, note)


def test_stats(run, other):
    result = run("diff", "tiny", "other", "--stats", "--include", "embed*")
    line = next(line for line in result.stdout.splitlines() if line.startswith("*"))
    assert "; max abs 24; max rel 2; cosine " in line


def test_tolerance(run, other):
    result = run("diff", "tiny", "other", "--atol", "1", "--include", "embed*")
    assert result.exit_code == 1
    assert "  within  rtol 0, atol 1\n" in result.stdout
    assert "2 of 15 elements (13.3%), first at [1, 2]; 1 beyond the tolerance" in result.stdout
    result = run("diff", "tiny", "other", "--atol", "24", "--include", "embed*")
    assert result.exit_code == 0
    assert "=  1 tensor (1 within the tolerance)\n\nequal within the tolerance\n" in result.stdout


def test_json_has_every_tensor(run, other):
    result = run("diff", "tiny", "other", "--json")
    content = json.loads(result.stdout)
    assert result.exit_code == 1
    assert content["is_equal"] is False
    assert [(t["symbol"], t["status"]) for t in content["tensors"]] == [
        ("*", "values"),
        ("*", "dtype"),
        ("*", "shape"),
        ("+", "only_b"),
        ("=", "equal"),
    ]
    assert content["tensors"][0]["first_changed"] == [1, 2]
    assert content["num_values"] == content["num_shape"] == content["num_dtype"] == content["num_only_b"] == 1


def test_long_lists_are_cut_for_people(run, tiny):
    for name, shift in (("a", 0), ("b", 1)):
        hub(tiny.parent / name, {f"w{n}": torch.full((2,), n + shift) for n in range(30)}, None)
    result = run("diff", "a", "b")
    assert sum(line.startswith("*") for line in result.stdout.splitlines()) == 20
    assert "... 10 more, see -v or --json\n\n30 of 30 tensors differ\n" in result.stdout
    assert len(json.loads(run("diff", "a", "b", "--json").stdout)["tensors"]) == 30


@pytest.fixture
def layers(tiny):
    """Two models of 30 layers whose values differ by 1 and more, the second one in two dtypes."""
    for name, dtype in (("a", torch.float32), ("b", torch.float32), ("c", torch.bfloat16)):
        shift = torch.arange(4.0) if name == "b" else torch.zeros(4)
        tensors = {f"l.{n}.w": (torch.full((4,), 1.001 + n) + shift * (n + 1)).to(dtype) for n in range(30)}
        hub(tiny.parent / name, tensors, None)
    return tiny.parent


def test_figures_are_those_of_all_layers(run, layers):
    rows = [x for x in run("diff", "a", "b", "--stats", "--atol", "2").stdout.splitlines() if x[:1] == "*"]
    assert len(rows) == 1
    assert rows[0].startswith(
        "*  l.{0..29}.w  x30  fp32  [4]  75% of 4 elements each; 1 to 3 beyond the tolerance; relative norm 0.683; max"
    )
    assert "max abs 3 to 90; max rel" in rows[0]
    assert len(json.loads(run("diff", "a", "b", "--stats", "--json").stdout)["tensors"]) == 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fine_tune_says_how_far_tensors_are_apart(run, tiny, dtype):
    """That nearly all elements differ is true of each step of training, and says nothing."""
    torch.manual_seed(0)
    base = {f"model.layers.{n}.up.weight": torch.randn(200_000, 7).to(dtype) for n in range(2)}
    tuned = {name: value.float() + 0.01 * torch.randn(200_000, 7) for name, value in base.items()}
    last = "model.layers.1.up.weight"
    tuned[last][:190_000] = base[last][:190_000]  # equal at its beginning
    for name, tensors in {"base": base, "tuned": tuned}.items():
        hub(tiny.parent / name, tensors, None)
    shown = run("diff", "base", "tuned", "--max-memory", "16MiB").stdout
    found = {t.name: t for t in shardkit.diff("base", "tuned", max_memory="16MiB").tensors}
    for name, value in base.items():
        a, b = value.double(), tuned[name].double()
        expected = float((a - b).norm() / max(a.norm(), b.norm()))
        assert found[name].relative_error == pytest.approx(expected, rel=1e-9)
        assert f"relative norm {expected:.3g}" in shown
    assert "100%" not in shown
    assert shardkit.diff("base", "base").tensors[0].relative_error is None


def test_no_norm_of_what_is_no_finite_number(run, tiny):
    for name, value in {"a": 1.0, "b": float("inf")}.items():
        tensors = {"w": torch.full((3,), value), "n": torch.full((3,), 2 if name == "a" else 5)}
        hub(tiny.parent / name, tensors, None)
    assert [tensor.relative_error for tensor in shardkit.diff("a", "b").tensors] == [None, None]
    assert run("diff", "a", "b").stdout.count("3 of 3 elements (100%)") == 2
    assert "relative norm" not in run("diff", "a", "b").stdout


def test_equal_after_rounding(run, tiny):
    tensors = {"w": torch.tensor([1.1, 2.0, 1e-43]), "same": torch.ones(2)}
    for name, state in (("a", tensors), ("b", {**tensors, "w": tensors["w"].bfloat16()})):
        hub(tiny.parent / name, state, None)
    result = run("diff", "a", "b", "--as", "bf16")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "  rounded  A to bf16, where B has it\n" in result.stdout
    assert result.stdout.endswith("=  2 tensors\n\nequal with A rounded to bf16\n")
    assert run("diff", "a", "b").exit_code == run("diff", "b", "a", "--as", "bf16").exit_code == 1


def test_quiet(run, other):
    assert [run("diff", "tiny", name, "-q").exit_code for name in ("tiny", "other")] == [0, 1]
    result = run("diff", "tiny", "other", "--quiet")
    assert (result.stdout, result.stderr) == ("", "")
    assert json.loads(run("diff", "tiny", "other", "--quiet", "--json").stdout)["is_equal"] is False


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["absent"], 3),
        (["tiny", "--max-memory", "1"], 2),
        (["tiny", "--rtol", "-1"], 2),
        (["tiny", "--include", "nothing"], 2),
        (["tiny", "--sort", "size"], 2),
    ],
)
def test_exit_codes(run, tiny, args, code):
    assert run("diff", "tiny", *args).exit_code == code


def test_names_cannot_act_on_a_terminal(run, tiny):
    hub(tiny.parent / "evil", {"a\x1b[31m": torch.zeros(1)}, None)
    result = run("diff", "tiny", "evil")
    assert result.exit_code == 1
    assert "\x1b" not in result.stdout
    assert "a\\x1b[31m" in result.stdout


def test_torch_is_not_imported_for_bits(ended, other):
    code = """
import sys
from shardkit.cli import main
try:
    main(["diff", "tiny", "other", "--stats", "--exclude", "layers.0*"])
except SystemExit as end:
    assert end.code == 1
assert "torch" not in sys.modules
"""
    returncode, _, errors = ended("-c", code)
    assert returncode == 0, errors


def test_whoever_reads_may_be_gone(start, other):
    process = start("-m", "shardkit", "diff", "tiny", "other")
    process.stdout.close()
    assert process.wait(600) == 141
    process.stderr.close()


def test_an_adapter_is_called_one(run, tiny):
    lora = {f"base_model.model.a.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    adapter = hub(tiny.parent / "lora", lora, None, adapter_config__json="{}")
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    for verb, said in (("inspect", "lora: PEFT adapter"), ("diff lora", "A     lora (PEFT adapter)")):
        result = run(*verb.split(), "lora")
        assert (result.exit_code, said in result.stdout) == (0, True), result.output
