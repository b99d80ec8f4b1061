"""What errors tell people to type: it works, on the command line and in Python."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardkit
from shardkit.cli import main
from shardkit.cli.errors import REMOVED

PACKAGE = Path(shardkit.__file__).parent
COMMAND = re.compile(r"`(shardkit [^`]*)`")
SHELL = re.compile(r"`?((?:cp -r|mkdir -p|ls) [^`;]*)[`;]")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# What other programs are told.
OTHERS = {"--ckpt-format", "--array", "--checkpoint", "--format"}

# what was given -> (command, what the message says, what the hint says)
CASES = {
    "a pre-sharded directory": ("preshard sharded x --world-size 4", "is a checkpoint", "reshard sharded"),
    "a DCP directory": ("preshard dcp x --world-size 4", "not a Hub model", "consolidate dcp"),
    "a run": ("preshard run x --world-size 4", "a run's directory with checkpoints", "reshard run"),
    "a file of torch.save": ("preshard model.pt x --world-size 4", "not a Hub model", "consolidate model.pt"),
    "an adapter": ("preshard lora x --world-size 4", "a PEFT adapter", "tiny lora merged`"),
    "GPTQ": ("preshard gptq x --world-size 4", "quantization_config (gptq)", "dequantise it"),
    "fp8": ("preshard fp8 x --world-size 4", "quantization_config (fp8)", "--dequantize makes plain weights"),
    "fp8 to reshard": (
        "reshard fp8 x --world-size 4",
        "quantization_config (fp8)",
        "preshard and consolidate can make plain weights",
    ),
    "a GGUF file": ("inspect tiny.gguf", "a model in GGUF format, which is not read", "a .safetensors file"),
    "a directory with GGUF": ("consolidate gguf x", "a model in GGUF format", "trainer's save"),
    "an adapter as base": ("consolidate dcp x --base lora", "is a PEFT adapter", "trained on: tiny, as its"),
    "an adapter to merge": ("consolidate lora x --merge-lora", "an adapter alone", "tiny lora merged`"),
    "a quantised base": ("consolidate dcp x --base gptq", "is quantised (gptq)", "it was quantised from"),
    "a model of TensorFlow": ("reshard tf x --world-size 4", "a model of TensorFlow", "trainer's save"),
    "a file of torch.save in a directory": ("inspect folder", "it holds: model.pt", "trainer's save"),
    "the same for preshard": ("preshard folder x --world-size 4", "found model.pt", "the weight file itself"),
    "an empty directory": ("preshard empty x --world-size 4", "empty is an empty", "check the path"),
    "a pipeline of diffusers": ("inspect sd", "it holds: ", "trainer's save"),
    "a farm of links": ("verify linked", "config.json: a symbolic link", "pass --follow-links"),
    "a typo in a path": ("preshard ./tinny x --world-size 4", "closest name: ./tiny", "check the path"),
    "a typo that could be a repo": (
        "preshard tinny x --world-size 4",
        "tinny: not a local path (closest name: tiny); on the Hub: ",
        "give tiny, or name a model on the Hub as organisation/name",
    ),
    "a typo in what is inspected": ("inspect tinny", "closest name: tiny", "check the path"),
    "a model on the Hub": ("verify Qwen/Qwen3", "no such file", "is read as hf://Qwen/Qwen3"),
    "a page of a file": (
        "preshard https://hf.co/a/b/blob/main/c/d.safetensors x --world-size 4",
        "reads no such address",
        "give hf://a/b@main/c/d.safetensors",
    ),
    "a typo in what is verified": ("verify tinny", "closest name: tiny", "check the path"),
    "a typo in what is compared": ("diff tiny tinny", "closest name: tiny", "check the path"),
    "a typo in a base": ("consolidate run x --base tinny", "closest name: tiny", "give tiny"),
    "a typo in the path of a base": (
        "consolidate run x --base ./tinny",
        "./tinny: no such file or directory  (closest name: ./tiny)",
        "check the path of --base, or name a model on the Hub as organisation/name",
    ),
    "a typo in a module path": (
        "preshard tiny x --world-size 4 --wrap layer.*",
        "closest name: layers",
        "module paths that exist",
    ),
    "a typo in a glob": (
        "preshard tiny x --world-size 4 --dtype-rule layer.*.weight=fp32",
        "layer.*.weight  (closest name: layers.*.weight)\n  there is layers.{0,1}.up.weight",
        "--dry-run shows",
    ),
    "a typo in what is chosen": (
        "diff tiny tiny --include layer.*",
        "layer.*  (closest name: layers.*)\n  there is layers.{0,1}.up.weight",
        "* also matches dots",
    ),
    "a typo in a rule of cuts": (
        "preshard tiny x --mesh dp_shard=2,tp=2 --wrap none --parallel-rule *.embd=rowwise",
        "--parallel-rule matches no tensor and no module\n  *.embd  (closest name: embed)",
        "globs match whole names",
    ),
    "a typo in an option": ("preshard tiny x --worldsize 4", "no such option", "shows its options"),
    "an option that is gone": (
        "preshard tiny s3://b/x --world-size 4 --allow-unsafe-store",
        "no such option '--allow-unsafe-store'",
        "copy that with the store's own tool",
    ),
    **{
        f"a job is always resumed, {option}": (
            f"reshard dcp x --world-size 4 {option}",
            f"no such option '{option.partition(' ')[0]}'\n",
            "the same command resumes what was finished, on any host",
        )
        for option in ("--no-resume", "--resume", "--resume-from .x.shardkit-1")
    },
    "the pass that is gone": (
        "consolidate dcp x --check",
        "no such option '--check'\n",
        "for an answer before that, run shardkit verify on the checkpoint first",
    ),
    **{
        f"parts of what only reads, {command} {option}": (
            f"{command} {option} 1/2",
            f"no such option '{option}'\n",
            "run them in one process",
        )
        for command in ("verify tiny --full", "diff tiny tiny", "inspect tiny")
        for option in ("--part", "--answers")
    },
    "a command that is gone": ("manifest tiny", "no such command 'manifest'\n", "are still read"),
    "a typo in a command": ("inspct tiny", "closest name: inspect", "shows its options"),
    "a typo in a dtype": ("preshard tiny x --world-size 4 --dtype bf61", "is not one of", "shows its options"),
    "no argument": ("diff tiny", "missing argument 'B'", "shows its options"),
    "no mesh": ("preshard tiny x", "no mesh given", "--world-size"),
    "a destination that is something else": (
        "preshard tiny other --world-size 4 --overwrite",
        "is not a sharded checkpoint",
        "move that",
    ),
    "a destination that can be replaced": ("preshard tiny sharded --world-size 4", "exists", "--overwrite"),
    "nothing that was committed": ("commit x", "no part", "run the parts first"),
    "no manifest": ("verify tiny --manifest gone.json", "gone.json: no such file", "leave --manifest out"),
    "no manifest of a source": (
        "preshard tiny x --world-size 4 --source-manifest lost.json",
        "lost.json: no such file",
        "name the manifest of this source",
    ),
    "no directory around the output": ("preshard tiny a/x --world-size 4", "does not exist", "`mkdir -p /"),
    "no such weights": (
        "consolidate dcp x --weights modle",
        "no weights of that name  (closest name: model)",
        "give --weights 'model';",
    ),
    "no such root": ("consolidate dcp x --root modle", "closest name: model", "leave --root out"),
    "no such variant": ("preshard tiny x --world-size 4 --variant fp16", "no weights of variant", "leave --variant out"),
    "another variant": (
        "preshard variants x --world-size 4 --variant fp61",
        "closest name: fp16",
        "give --variant 'bf16' or 'fp16'",
    ),
    "no ranks": ("preshard tiny x --world-size 0", "must be at least 1", "such as --world-size 8"),
    "a glob in quotes": ("inspect 'tin*'", "no such file or directory\n", "no shell has expanded it"),
    "a home in quotes": ("consolidate dcp x --base=~/tiny", "no such file or directory\n", "no shell has expanded it"),
    "no threads": ("preshard tiny x --world-size 4 --jobs 0", "must be at least 1", "leave --jobs out"),
    "nothing in it": ("inspect other", "is not a checkpoint", "give the directory"),
    "a model of two encoders": (
        "consolidate routed x --base router",
        "found a_0\n  found b_0",
        "give the directory of a Hub model",
    ),
    "a part of a base": (
        "consolidate half x --base whole",
        "does not fit --base whole",
        "`shardkit consolidate half --base whole --fill-from-base",
    ),
    "names of a trainer": ("consolidate trained x --base whole", "are a trainer's own", "inspect trained --tensors"),
    "what parts are writing": ("inspect parts", "no such file", "`shardkit status /"),
    "another job in its place": ("reshard tiny parts --world-size 4 --part 1/2", "parts", "shardkit abort"),
}  # fmt: skip
# Printed where no fixture here leads. In (file, command), what is filled in is {}.
RUN_ELSEWHERE = {
    ("errors.py", "shardkit env"): "a fault of our own; test_errors",
    ("fit.py", "shardkit inspect CHECKPOINT"): "a placeholder",
}


@pytest.fixture
def all_kinds(tiny, monkeypatch):
    """What people give, in the working directory, around `tiny`."""
    home = tiny.parent
    tensors = {"model": {"layers.0.up.weight": torch.ones(4, 3), "embed.weight": torch.ones(5, 3)}}
    for place in ("dcp", "run/step-1", "run/step-2"):
        dcp.save(tensors, checkpoint_id=home / place, no_dist=True)
    torch.save(tensors["model"], home / "model.pt")
    shardkit.preshard(tiny, home / "sharded", world_size=2, layout="declared")
    for place, name in (
        ("lora", "adapter_model.safetensors"),
        ("gptq", "model.safetensors"),
        ("sd/unet", "diffusion_pytorch_model.safetensors"),
    ):
        (home / place).mkdir(parents=True)
        save_file({"a.weight": torch.ones(2, 2)}, home / place / name, metadata={"format": "pt"})
    lora = {f"base_model.model.a.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(lora, home / "lora/adapter_model.safetensors", metadata={"format": "pt"})
    (home / "lora/adapter_config.json").write_text('{"base_model_name_or_path": "tiny"}')
    (home / "gptq/config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    (home / "fp8").mkdir()
    fp8 = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)}
    save_file(fp8, home / "fp8/model.safetensors", metadata={"format": "pt"})
    (home / "fp8/config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    (home / "sd/unet/config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    (home / "sd/model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
    for place in ("tf", "folder", "empty", "linked"):
        (home / place).mkdir()
    (home / "tf/tf_model.h5").write_bytes(bytes(64))
    (home / "tf/config.json").write_text("{}")
    torch.save(tensors["model"], home / "folder/model.pt")
    (home / "linked/model.safetensors").symlink_to(home / "tiny/model.safetensors")
    (home / "linked/config.json").symlink_to(home / "tf/config.json")
    (home / "variants").mkdir()
    for variant in ("bf16", "fp16"):
        shutil.copy(tiny / "model.safetensors", home / f"variants/model.{variant}.safetensors")
    (home / "gguf").mkdir()
    for place in ("tiny.gguf", "gguf/tiny.gguf"):
        (home / place).write_bytes(b"GGUF" + bytes(64))
    (home / "other").mkdir()
    (home / "other/notes.txt").write_text("mine")
    make_misfits(home)
    return home


def make_misfits(home: Path) -> None:
    """Checkpoints beside bases that they fit in part, or in two places."""
    layer, model_config = (
        {"up.weight": torch.ones(3, 3)},
        '{"model_type": "of its own"}',
    )
    routes = {"structure": {"a": ["a_0"], "b": ["b_0"]}, "types": {"a_0": "", "b_0": ""}}
    for place in ("router/a_0", "router/b_0", "whole"):
        (home / place).mkdir(parents=True)
        (home / place / "config.json").write_text(model_config)
        both = {"head.weight": torch.ones(2, 3)} if place == "whole" else {}
        save_file(layer | both, home / place / "model.safetensors", metadata={"format": "pt"})
    (home / "router/modules.json").write_text('[{"path": "", "name": "0"}]')
    (home / "router/router_config.json").write_text(json.dumps(routes))
    routed = {f"0.sub_modules.{route}.0.auto.up.weight": torch.full((3, 3), 2.0) for route in "ab"}
    ends = (
        "attention.wq",
        "attention.wk",
        "attention.wv",
        "attention.wo",
        "feed_forward.w1",
        "feed_forward.w2",
    )
    titan = {
        f"layers.0.{end}.weight": torch.ones(4, 4) for end in (*ends, "feed_forward.w3", "attention_norm")
    }
    for place, state in (("routed", routed), ("half", layer), ("trained", titan)):
        dcp.save({"model": state}, checkpoint_id=home / place, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_to_type_next(run, all_kinds, subtests):
    """Each situation says what it is and what to do; every command in a hint runs, and every option is the verb's."""
    assert run(*"reshard tiny parts --world-size 2 --part 1/2".split()).exit_code == 0
    ran = set[str]()
    for situation, (typed, said, hinted) in CASES.items():
        with subtests.test(situation):
            result = run(*shlex.split(typed))
            assert result.exit_code in (2, 3, 5), result.output
            message, _, hint = result.stderr.partition("hint: ")
            assert message.startswith("error: ")
            assert said in message
            assert hinted in hint
            for command in SHELL.findall(hint):
                subprocess.run(command, shell=True, check=True, capture_output=True)
            for command in COMMAND.findall(hint):
                again = run(*shlex.split(command)[1:])
                assert again.exit_code == 0, (command, again.output)
                ran.add(command)
            named = set(OPTION.findall(re.sub("`[^`]*`", "", result.stderr)))
            assert not named - options_of(typed.split()[0]) - set(typed.split())

    with subtests.test("all that is printed"):
        left = {
            (file, command)
            for file, command in printed()
            if not any(re.fullmatch(re.escape(command).replace(r"\{\}", ".*"), each) for each in ran)
        }
        assert left == RUN_ELSEWHERE.keys()


def printed() -> Iterator[tuple[str, str]]:
    """Yield (file, command) of the commands that the package prints in backticks; what is filled in is {}."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        quiet = {node.value for node in nodes if isinstance(node, ast.Expr)}  # docstrings
        quiet |= {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if node in quiet:
                continue
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = re.sub(r"\{\w+\}", "{}", node.value)
            text = f"`{text}`" if re.match(r"shardkit [a-z]+ \{\} --", text) else text
            for command in COMMAND.findall(text):
                yield path.name, command


def test_what_parts_have_begun_is_found_from_anywhere(run, tiny, monkeypatch):
    """Relative paths in their command are those of where it was typed, and all that reads names the command that helps."""
    monkeypatch.setattr(sys, "argv", ["shardkit"])
    typed = "shardkit reshard tiny 'an out' --world-size 2 --part 2/2"
    assert run(*shlex.split(typed.replace("2/2", "1/2"))[1:]).exit_code == 0
    assert typed in run("status", "an out").stdout
    assert f"cd {tiny.parent}" not in run("status", "an out").stdout
    monkeypatch.chdir(tiny)
    elsewhere, status = f"cd {tiny.parent} && {typed}", f"`shardkit status '{tiny.parent}/an out'`"
    assert elsewhere in run("status", "../an out").stdout
    incomplete = run("commit", "../an out")
    assert incomplete.exit_code == 4
    assert elsewhere in incomplete.stderr
    for verb in ("inspect", "verify", "diff .", "consolidate", "reshard --world-size 3"):
        absent = run(*verb.split(), "../an out")
        assert absent.exit_code == 3
        assert f"hint: it is not committed: {status} shows how far it is" in absent.stderr
    monkeypatch.chdir(tiny.parent)
    assert run(*shlex.split(typed)[1:]).exit_code == 0
    assert run("commit", "an out").exit_code == 0


def test_a_part_needs_no_current_directory(run, tiny, tmp_path, monkeypatch):
    """What it was typed in may be gone, as on a job that has been cleaned up: its paths are whole."""
    monkeypatch.setattr(sys, "argv", ["shardkit"])
    on_path = tmp_path / "bin" / "shardkit"
    on_path.parent.mkdir()
    on_path.touch(0o755)
    monkeypatch.setenv("PATH", f"{on_path.parent}:{os.environ['PATH']}")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    typed = f"shardkit reshard {tiny} {tmp_path}/out --world-size 2 --part 1/2"
    begun = run(*shlex.split(typed)[1:])
    assert begun.exit_code == 0, begun.output
    monkeypatch.chdir(tmp_path)
    status = run("status", "out").stdout
    assert typed.replace("1/2", "2/2") in status
    assert "cd " not in status


def test_status_looks_into_this_directory(run, tiny, tmp_path):
    nothing = run("status")
    assert nothing.exit_code == 0
    assert nothing.stdout == f"{tmp_path}: no output is under way\n"
    for name in ("one", "two"):
        assert run("reshard", "tiny", name, "--world-size", "2", "--part", "1/2").exit_code == 0
    shown = run("status")
    assert shown.stdout.startswith(f"{tmp_path}: not committed: one, two\n")
    assert all(f"output    {tmp_path}/{name}\n" in shown.stdout for name in ("one", "two"))
    content = json.loads(run("status", "--json").stdout)
    assert content["outputs"] == [f"{tmp_path}/one", f"{tmp_path}/two"]
    assert [job["output"] for job in content["jobs"]] == content["outputs"]
    removed = run("abort", "one").stdout
    assert removed.startswith(f"{tmp_path}/one is not there\n")
    assert "removed" in removed
    assert json.loads(run("status", "--json").stdout)["outputs"] == [f"{tmp_path}/two"]
    assert run("reshard", "tiny", "two", "--world-size", "2", "--part", "2/2").exit_code == 0
    assert json.loads(run("status", "--json").stdout)["outputs"] == []


@pytest.mark.parametrize(
    ("typed", "way"),
    [
        ("gc out --older-than 1d", "abort OUTPUT removes what was not committed"),
        ("cache --clear", "`shardkit env` shows the directory"),
        ("help --man", "shardkit COMMAND --help shows all options"),
        ("status out --abort", "abort OUTPUT removes what was not committed"),
    ],
)
def test_a_removed_command_names_the_way_now(typed, way, run):
    refused = run(*typed.split())
    assert refused.exit_code == 2
    assert way in refused.stderr


def test_weights_alone_have_no_trainer_that_resumes(run, tiny):
    result = run("reshard", "tiny", "x", "--world-size", "2")
    first, second, third = result.stdout.splitlines()[-3:]
    assert first == "fill a model with it on 2 ranks:"
    assert second == f"  shardkit.load_into(model, '{tiny.parent}/x')"
    assert third.startswith("  torch.distributed.checkpoint.load(")


def options_of(verb: str) -> set[str]:
    command = main.get_command(click.Context(main), verb)
    return {
        text for param in (command.params if command else ()) for text in (*param.opts, *param.secondary_opts)
    }


def strings() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of every string in the package, with what goes into it left out."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value


def test_options_and_commands_that_texts_name_exist():
    verbs = main.list_commands(click.Context(main))
    known = {option for verb in verbs for option in options_of(verb)} | {"--help", "--version"} | OTHERS
    for file, text in strings():
        if text in REMOVED:
            continue
        assert not set(OPTION.findall(text)) - known, file
        for verb in re.findall(r"`shardkit ([a-z]+)", text):
            assert verb in verbs, (file, text)
