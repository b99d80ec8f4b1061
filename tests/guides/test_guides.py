"""Every guide's commands print what the page says, and its scripts run with the real trainer on CPU."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor  # or torch.load refuses what verl pickles
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardkit
from tests.distributed.test_profiles import TITAN, needs
from tests.formats.dcp.samples import quiet
from tests.guides import console
from tests.test_examples import make_model

pytestmark = pytest.mark.prove

NEEDS = {"lightning-to-hub": "lightning", "trainer-to-hub": "accelerate"}
GUIDES = [
    pytest.param(
        page,
        id=page.stem,
        marks=pytest.mark.skipif(
            page.stem in NEEDS and find_spec(NEEDS[page.stem]) is None,
            reason=f"{NEEDS.get(page.stem)} is not installed",
        ),
    )
    for page in sorted(console.PAGES.glob("*.md"))
    if "```console" in page.read_text()
]


@pytest.mark.dist
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_trace: object
) -> None:
    monkeypatch.chdir(tmp_path)
    with console.prepared(page, tmp_path):
        for command, said, printed in console.differences(page, tmp_path):
            assert printed == said, f"{command}\npython -m tests.guides.console"
    if page.stem == "lightning-to-hub":
        state = FileSystemReader(tmp_path / "last.ckpt").read_metadata().state_dict_metadata
        tensors = {name: len(value.chunks) for name, value in state.items() if "state_dict.net." in name}
        assert set(tensors.values()) == {2}, "each process had the whole model"


def test_each_script_belongs_to_a_guide_and_each_guide_is_listed() -> None:
    pages = {page.name: page.read_text() for page in console.PAGES.glob("*.md")}
    index = pages.pop("index.md")
    assert not [name for name in pages if f"({name})" not in index]
    assert not [
        path.name
        for path in console.SCRIPTS.iterdir()
        if path.suffix in (".py", ".sbatch") and path.name not in "".join(pages.values())
    ]
    assert not [name for name, text in pages.items() if "## What can go wrong" not in text]
    batch = {path.name: path.read_text() for path in console.SCRIPTS.glob("*.sbatch")}
    assert not [name for name, text in batch.items() if f"```bash\n{text}```" not in pages["moe.md"]]


def made(text: str) -> set[str]:
    """Return the names in the working directory that a page's commands make, or give to a script."""
    names = set(re.findall(r"^wrote /data/([\w.-]+)", text, re.M))
    for words in (
        shlex.split(typed.command)
        for block in console.BLOCK.findall(text)
        for typed in console.commands(block)
    ):
        given = {"torchrun": words[4:], "cp": words[-1:]}.get(words[0], [])
        names |= {word.partition("/")[0] for word in given if not word.isdigit()}
    return names - {"my-model"}


def test_guides_that_share_a_directory_do_not_meet() -> None:
    of_pages = {page.name: made(page.read_text()) for page in console.PAGES.glob("*.md")}
    counted = Counter(name for names in of_pages.values() for name in names)
    assert {"trained", "ranks-run", "my-moe-dp_shard4-ep2", "copy"} <= counted.keys()
    assert [name for name, number in counted.items() if number > 1] == []


def test_a_page_that_says_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("```console\n$ echo one\none\n$ echo two\nthree\n```\n")
    found = list(console.differences(tmp_path / "page.md", tmp_path))
    assert found == [("echo one", "one", "one"), ("echo two", "three", "two")]


def run(home: Path, *arguments: object, **place: str) -> None:
    """Run Python in a process of its own: trainers compile, change what all tests share, and warn of much."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        cwd=home,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | place,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr


TWO_PROCESSES = (
    *("-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"),
    *("--nproc-per-node", "2"),
)


def make_hub_model(directory: Path, config: Any) -> None:
    """Save a model and a tokenizer; weights that begin as ones and zeros differ too, so that none passes for another."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(directory)
    words = WordLevel({str(number): number for number in range(60)}, unk_token="0")
    transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(directory)


def unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors differ in dtype, shape or a value."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, value in expected.items()
        if found[name].dtype != value.dtype or not torch.equal(found[name], value)
    ]


@pytest.mark.dist
@needs("deepspeed")
def test_what_deepspeed_saves_is_consolidated_as_it_does_itself(tmp_path: Path) -> None:
    make_model(tmp_path / "my-model")
    merge = "import sys, torch; from deepspeed.utils.zero_to_fp32 import *; " + (
        "torch.save({k: v.clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]).items()}, sys.argv[2])"
    )
    script = console.SCRIPTS / "deepspeed_run.py"
    run(tmp_path, *TWO_PROCESSES, script, "my-model", "output_dir", DS_ACCELERATOR="cpu")
    run(tmp_path, "-c", merge, "output_dir", "merged.pt", DS_ACCELERATOR="cpu")
    shardkit.consolidate(tmp_path / "output_dir", tmp_path / "trained", base=tmp_path / "my-model")
    found = load_file(tmp_path / "trained" / "model.safetensors")
    merged = torch.load(tmp_path / "merged.pt")
    assert found.keys() == merged.keys() - {"lm_head.weight"}
    assert not [name for name, value in found.items() if not torch.equal(value, merged[name])]


def titan_weights(step: Path) -> dict[str, torch.Tensor]:
    """Return the model of a checkpoint of torchtitan, as torch reads it: its tensors lie at the top."""
    with quiet():
        dcp_to_torch_save(step, step.with_suffix(".pt"))
    saved = torch.load(step.with_suffix(".pt"), weights_only=True)
    return {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}


@pytest.mark.dist
@needs("torchtitan")
@needs("datasets")  # its data and its metrics import these two
@needs("tensorboard")
def test_torchtitan_starts_and_is_consolidated_as_it_does_itself(tmp_path: Path) -> None:
    """Its Trainer runs twice: from what preshard wrote, and with its own reading and writing of Hub models."""
    make_hub_model(tmp_path / "my-model", transformers.LlamaConfig(**TITAN))
    shardkit.preshard(tmp_path / "my-model", tmp_path / "titan-start", world_size=2, profile="torchtitan")
    script = (
        *TWO_PROCESSES,
        Path(__file__).with_name("titan_on_cpu.py"),
        console.SCRIPTS / "torchtitan_run.py",
    )
    options = (
        *("--training.disable_cuda_graphs", "--training.local_batch_size", 2, "--checkpoint.interval", 1),
        *("--parallelism.spmd_backend", "partial_dtensor"),  # the default fails with torch 2.13
    )
    start = "--checkpoint.initial_load_path"
    run(tmp_path, *script, *options, start, tmp_path / "titan-start")
    as_hub_models = (
        *(start, tmp_path / "my-model", "--checkpoint.initial_load_in_hf"),
        *("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"),
    )
    run(tmp_path, *script, *options, *as_hub_models, "--dump_folder", "theirs")

    ours, theirs = (titan_weights(tmp_path / at / "checkpoint" / "step-1") for at in ("outputs", "theirs"))
    assert not unequal(ours, theirs)
    shardkit.consolidate(tmp_path / "outputs", tmp_path / "trained", base=tmp_path / "my-model")
    exported = tmp_path / "theirs" / "checkpoint" / "step-2" / "model-00001-of-00001.safetensors"
    assert not unequal(load_file(tmp_path / "trained" / "model.safetensors"), load_file(exported))


def verl_weights(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Return the model of a run of verl on two ranks, put together as the pickled tensors say."""
    actor = checkpoints / "global_step_2" / "actor"
    first, second = (
        torch.load(actor / f"model_world_size_2_rank_{rank}.pt", weights_only=True) for rank in range(2)
    )
    return {
        name: torch.cat((part.to_local(), second[name].to_local()), dim=part.placements[0].dim)
        for name, part in first.items()
    }


@pytest.mark.dist
@needs("verl")
def test_what_verl_saves_is_consolidated_as_it_does_itself(tmp_path: Path) -> None:
    """Its merger rounds to bf16."""
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen2Config(**sizes, **heads, tie_word_embeddings=True)
    make_hub_model(tmp_path / "my-model", config)
    run(tmp_path, *TWO_PROCESSES, console.SCRIPTS / "verl_run.py", "my-model", "checkpoints")
    actor = tmp_path / "checkpoints" / "global_step_2" / "actor"
    merge = ("-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", actor)
    run(tmp_path, *merge, "--target_dir", tmp_path / "merged")

    trained = verl_weights(tmp_path / "checkpoints")
    shardkit.consolidate(tmp_path / "checkpoints", tmp_path / "trained")
    found = load_file(tmp_path / "trained" / "model.safetensors")
    assert torch.equal(trained.pop("lm_head.weight"), trained["model.embed_tokens.weight"])
    assert not unequal(found, trained)
    rounded = {name: value.bfloat16() for name, value in found.items()}
    assert not unequal(rounded, load_file(tmp_path / "merged" / "model.safetensors"))
