"""The example that users copy from, run as its docstring says; and the demo notices what it is there to notice."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

import shardkit
from tests.worlds.processes import agent_store, run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def make_model(directory: Path, *, dtype: str = "float32") -> float:
    """Save a tiny Llama with tied embeddings, and return the loss that the example should print."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    tokens = torch.arange(16).unsqueeze(0)
    return float(model(input_ids=tokens, labels=tokens).loss.detach())


def torchrun(num_processes: int, script: str, *arguments: object) -> str:
    """Run an example as its docstring says; return what it printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            "--nproc-per-node",
            str(num_processes),
            str(EXAMPLES / script),
            *map(str, arguments),
        ],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def launched(printed: Path, num_processes: int, script: str, *arguments: object) -> str:
    """Run an example on ranks that are forked; return what it printed."""
    request = {
        "script": str(EXAMPLES / script),
        "arguments": [str(argument) for argument in arguments],
        "num_processes": num_processes,
        "printed": str(printed),
    }
    run_script("distributed/launch_world.py", json.dumps(request), env={"CUDA_VISIBLE_DEVICES": ""})
    return printed.read_text()


@pytest.mark.prove
@pytest.mark.dist
def test_fsdp2_example_starts_from_the_presharded_weights(tmp_path: Path, fast_trace: object) -> None:
    loss = make_model(tmp_path / "model")
    shardkit.preshard(tmp_path / "model", tmp_path / "checkpoint", world_size=2)
    said = launched(tmp_path / "said", 2, "fsdp2_load.py", tmp_path / "model", tmp_path / "checkpoint")
    word, printed = said.split()
    assert word == "loss"
    assert float(printed) == pytest.approx(loss, abs=2e-6)


@pytest.mark.prove
@pytest.mark.dist
def test_three_phases_start_from_the_hub_directory(tmp_path: Path) -> None:
    loss = make_model(tmp_path / "model")
    *report, last = torchrun(2, "three_phase.py", tmp_path / "model").splitlines()
    assert float(last.removeprefix("loss ")) == pytest.approx(loss, abs=2e-6)
    assert report[0] == "LlamaForCausalLM on rank 0 of 2: FSDP2 (fully_shard)"
    assert any("model.embed_tokens.weight = lm_head.weight" in line for line in report)


@pytest.mark.prove
@pytest.mark.dist
def test_three_phases_start_from_the_presharded_directory_alone(tmp_path: Path, fast_trace: object) -> None:
    loss = make_model(tmp_path / "model")
    shardkit.preshard(tmp_path / "model", tmp_path / "checkpoint", world_size=2)
    said = launched(tmp_path / "said", 2, "three_phase.py", tmp_path / "checkpoint")
    assert float(said.splitlines()[-1].removeprefix("loss ")) == pytest.approx(loss, abs=2e-6)


def test_three_phases_ask_for_the_model_where_the_source_has_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["three_phase.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"config.json is missing: name the model too"):
        runpy.run_path(str(EXAMPLES / "three_phase.py"), run_name="__main__")


@pytest.mark.prove
@pytest.mark.dist
def test_a_training_loop_goes_on_in_another_world_and_back_to_the_hub(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    whole, first, second = (
        launched(
            tmp_path / f"said-{size}", size, "train_fsdp2.py", tmp_path / "model", out, steps
        ).splitlines()
        for size, out, steps in (
            (1, tmp_path / "whole", 4),
            (4, tmp_path / "run", 2),
            (3, tmp_path / "run", 4),
        )
    )
    losses = [[float(line.split()[-1]) for line in lines] for lines in (whole, [*first, *second])]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    result = shardkit.consolidate(
        tmp_path / "run" / "last", tmp_path / "trained", base=tmp_path / "model", dtype="base"
    )
    assert not result.warnings


@pytest.mark.prove
@pytest.mark.dist
@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_example(tmp_path: Path) -> None:
    with agent_store() as place:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "lightning_callback.py"), "2"],
            env=os.environ | place | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    assert "rank 1, batch 1 after backward, MiB:" in done.stderr
    assert "units         4 and network" in done.stderr


def write_ranks(directory: Path, embeddings: list[bytes]) -> list[dict[str, list[str]]]:
    """Write what the demo's processes leave behind; return the ranks' reports."""
    (directory / "reference.embedding").write_bytes(b"same")
    for rank, embedding in enumerate(embeddings):
        (directory / f"rank{rank}.embedding").write_bytes(embedding)
    return [{"opened": [f"__{rank}_0.distcp"]} for rank in range(len(embeddings))]


def test_demo_notices_what_differs(tmp_path: Path) -> None:
    find_problems = runpy.run_path(str(EXAMPLES / "demo" / "run.py"))["find_problems"]
    result = {"omitted": [["embeddings.position_ids", "why"]]}

    assert find_problems(tmp_path, result, write_ranks(tmp_path, [b"same", b"same"])) == []

    reports = write_ranks(tmp_path, [b"same", b"sane"])
    reports[0]["opened"].append("__1_0.distcp")
    assert find_problems(tmp_path, {"omitted": []}, reports) == [
        "rank 0 opened ['__0_0.distcp', '__1_0.distcp'], not its own file",
        "the embedding of rank 1 differs from the whole model's",
        "preshard left out [], not ['embeddings.position_ids']",
    ]


def make_encoder(directory: Path) -> None:
    """Save a tiny encoder and a tokenizer that knows the words w0 to w59."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        directory
    )
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(directory)


def make_articles(directory: Path) -> None:
    """Write eight articles of each topic, with words of its own."""
    for topic, name in enumerate(("business", "politics", "sports", "tech", "entertainment")):
        (directory / name).mkdir(parents=True)
        for number in range(8):
            words = (f"w{topic * 12 + (number + at) % 12}" for at in range(42))
            (directory / name / f"{number}.txt").write_text(" ".join(words))


@pytest.mark.prove
@pytest.mark.parametrize("tasks", ["topics", "order"])
def test_osft_example_trains_both_ways_and_checks_what_is_folded(
    tasks: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fast_trace: object,
) -> None:
    make_encoder(tmp_path / "model")
    make_articles(tmp_path / "corpus")
    places = [str(tmp_path / name) for name in ("model", "corpus", "out")]
    arguments = [
        word for pair in zip(("--model", "--corpus", "--output"), places, strict=True) for word in pair
    ]
    short = ["--tasks", tasks, "--rates", "1e-3,1e-2", "--steps", "2", "--tests", "8"]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, *short])
    monkeypatch.syspath_prepend(EXAMPLES / "osft")
    runpy.run_path(str(EXAMPLES / "osft" / "run.py"), run_name="__main__")

    runs = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(run["method"], run["rate"]) for run in runs] == [
        ("full fine-tuning", 1e-3),
        ("OSFT", 1e-3),
        ("full fine-tuning", 1e-2),
        ("OSFT", 1e-2),
    ]
    assert all(run["leak"] <= 1e-6 for run in runs)
    picture = (tmp_path / "out" / "forgetting.svg").read_text()
    assert len(ElementTree.fromstring(picture).findall(".//{*}polyline")) == 4
    assert capsys.readouterr().out.count("chosen by the second task") == 2
