"""The first phase ends alike on all ranks: with a model and its source, or with one error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.training.model.initialise import initialise
from shardkit.training.prepare import prepare
from tests.training import models
from tests.worlds.processes import run_script

Told = list[dict[str, Any]]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("hub") / "llama"
    models.save("llama", directory)
    return str(directory)


def untie(directory: Path) -> None:
    """Make a model tied whose file has two values."""
    models.save("llama", directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    root = tmp_path_factory.mktemp("world")
    for name, model in (("hub", "llama"), ("moe", "qwen3-moe"), ("vlm", "qwen2-vl")):
        models.save(model, root / name)
    untie(root / "untied")
    config = json.loads((root / "untied/config.json").read_text())
    hub_config = root / "hub/config.json"
    assert json.loads(hub_config.read_text())["tie_word_embeddings"] != config["tie_word_embeddings"]
    run_script("training/prepare_world.py", str(root))
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def same(told: Told, scenario: str) -> dict[str, Any]:
    """What both ranks got."""
    assert told[0][scenario] == told[1][scenario]
    found: dict[str, Any] = told[0][scenario]
    return found


def test_a_config_without_a_dtype_takes_the_files(tmp_path: Path) -> None:
    """As `from_pretrained` does; a file beside the config comes before another source."""
    models.save("llama", tmp_path / "half", dtype=torch.bfloat16, max_shard_size="20KB")
    models.save("llama", tmp_path / "whole")
    for name in ("half", "whole"):
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        assert config.pop("dtype") == {"half": "bfloat16", "whole": "float32"}[name]
        path.write_text(json.dumps(config))
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "half/config.json", tmp_path / "config")

    def dtypes(model: str, source: str | None) -> set[torch.dtype]:
        context = prepare(str(tmp_path / model), source and str(tmp_path / source))
        return {p.dtype for p in context.model.parameters()}

    right = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert dtypes("half", "half") == {p.dtype for p in right.parameters()} == {torch.bfloat16}
    assert dtypes("half", "whole") == {torch.bfloat16}
    assert dtypes("config", "half") == {torch.bfloat16}
    assert dtypes("whole", "whole") == dtypes("config", None) == {torch.float32}


def test_a_context_says_what_is_read(hub: str) -> None:
    ctx = prepare(hub, hub, dtype="bf16")
    state = models.reference("llama").state_dict()
    assert ctx.weights is not None
    assert ctx.weights.names == {name: name for name in state}
    assert {fqn for fqn, tensor in ctx.expected.items() if tensor.persistent} == set(state)
    assert {tensor.dtype for tensor in ctx.expected.values() if tensor.kind == "parameter"} == {
        torch.bfloat16
    }
    assert all(
        tensor.shape == tuple(state[fqn].shape) for fqn, tensor in ctx.expected.items() if fqn in state
    )
    assert ctx.buffers.keys() == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    assert not any(ctx.expected[fqn].persistent for fqn in ctx.buffers)
    assert (ctx.source, ctx.unavailable, ctx.initialised, ctx.grown) == (hub, None, frozenset(), {})
    assert ctx.blueprint is None


def test_a_new_head_comes_with_a_blueprint(hub: str) -> None:
    def build() -> nn.Module:
        return transformers.LlamaForSequenceClassification(models.llama(num_labels=3))

    ctx = prepare(build, hub, missing="init")
    assert ctx.initialised == {"score.weight"}
    assert any("lm_head.weight" in note for note in ctx.notes)
    assert ctx.blueprint is not None
    assert ctx.blueprint is not ctx.model
    assert all(tensor.is_meta for tensor in (*ctx.blueprint.parameters(), *ctx.blueprint.buffers()))
    assert not ctx.buffers["model.rotary_emb.inv_freq"].is_meta
    ((fqn, value),) = initialise(ctx, ctx.initialised)
    assert (fqn, tuple(value.shape)) == ("score.weight", (3, 24))


def test_the_vocabulary_follows_the_tokenizer(hub: str) -> None:
    both = {"model.embed_tokens.weight": 101, "lm_head.weight": 101}
    for options, rows in (
        ({"tokenizer": range(102)}, 104),
        ({"tokenizer": 102, "align_vocab": True}, 104),
        ({"tokenizer": 102, "align_vocab": 64}, 128),
    ):
        ctx = prepare(hub, hub, **options)  # type: ignore[arg-type]
        assert ctx.grown == both
        assert ctx.expected["lm_head.weight"].shape == (rows, 24)
        assert ctx.model.config.vocab_size == rows  # type: ignore[union-attr]
    for options in ({"tokenizer": 102, "align_vocab": False}, {"tokenizer": 90}, {}):
        ctx = prepare(hub, hub, **options)  # type: ignore[arg-type]
        assert (ctx.grown, ctx.expected["lm_head.weight"].shape) == ({}, (101, 24))
    with pytest.raises(UsageError, match="without a tokenizer"):
        prepare(hub, hub, align_vocab=True)
    # From scratch there are no rows of a source.
    ctx = prepare(hub, None, tokenizer=102)
    assert ctx.grown == {}
    assert dict(initialise(ctx, ["lm_head.weight"]))["lm_head.weight"].shape == (104, 24)


def test_a_tie_with_two_values_is_none(tmp_path: Path) -> None:
    """As in `from_pretrained`, whatever the config says."""
    untie(tmp_path)
    ctx = prepare(str(tmp_path), str(tmp_path))
    assert ctx.ties == ()
    assert ctx.model.lm_head.weight is not ctx.model.model.embed_tokens.weight
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= ctx.expected.keys()
    assert any("not tied" in note for note in ctx.notes)


class Counter(nn.Module):
    """A persistent buffer that only the source has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.zeros(2))


def test_persistent_buffers_on_meta_must_be_in_the_source(tmp_path: Path) -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Counter()

    save_file(Counter().state_dict(), tmp_path / "whole.safetensors")
    save_file({"weight": torch.ones(3)}, tmp_path / "part.safetensors")
    ctx = prepare(build, tmp_path / "whole.safetensors")
    assert not ctx.buffers
    for source in (tmp_path / "part.safetensors", None):
        with pytest.raises(LayoutError, match="are on meta, nothing computes them") as caught:
            prepare(build, source, missing="init")
        assert caught.value.problems == ("steps",)
    # Built for real it has a value.
    assert prepare(Counter, tmp_path / "part.safetensors", missing="init").initialised == {"steps"}


def test_random_buffers_do_not_depend_on_the_process(hub: str) -> None:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.randn(8))

    drawn = []
    for seed in (0, 0, 1):
        before = torch.random.get_rng_state()
        drawn.append(prepare(Fourier, None, seed=seed).buffers["frequencies"])
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.manual_seed(len(drawn))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_alone_a_source_that_is_absent_is_an_error(hub: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such path"):
        prepare(hub, tmp_path / "absent/")
    with pytest.raises(SourceError):
        prepare(hub, tmp_path)


def test_files_of_the_same_directory_do_not_mix(hub: str, tmp_path: Path) -> None:
    """The source may be one file of a directory that builds another model."""
    shutil.copytree(hub, tmp_path / "model")
    tuned = {key: value + 1 for key, value in load_file(Path(hub, "model.safetensors")).items()}
    save_file(tuned, tmp_path / "model/tuned.safetensors")
    ctx = prepare(str(tmp_path / "model"), tmp_path / "model/tuned.safetensors")
    assert ctx.weights is not None
    assert [file.name for file in ctx.weights.catalog.files] == ["tuned.safetensors"]


@pytest.mark.dist
def test_ranks_prepare_alike(told: Told) -> None:
    found = same(told, "all")
    assert found["weights"]
    assert found["meta"]
    assert not found["unavailable"]
    assert told[0]["backend"] == "gloo"


@pytest.mark.dist
def test_what_is_drawn_is_the_same_on_all_ranks_and_in_a_world_of_one(told: Told, hub: str) -> None:
    from tests.training.prepare_world import attempt

    torch.manual_seed(77)
    assert attempt(lambda: prepare(hub, None)) == same(told, "scratch")


@pytest.mark.dist
def test_a_rank_without_the_source_learns_what_is_read(told: Told) -> None:
    assert [each["hidden"].pop("unavailable") for each in told] == [False, True]
    assert [each["hidden"].pop("weights") is None for each in told] == [False, True]
    found = same(told, "hidden")
    assert found["initialised"] == ["score.weight"]
    assert found["grown"] == {"model.embed_tokens.weight": 101}
    assert [each["emptied"]["unavailable"] for each in told] == [False, True]


@pytest.mark.dist
def test_a_source_that_nobody_has_is_one_error(told: Told) -> None:
    found = same(told, "nowhere")
    assert found["error"] == "SourceError"
    assert "no such path" in found["message"]


@pytest.mark.dist
def test_a_truncated_file_of_one_rank_is_an_error_on_all(told: Told) -> None:
    found = same(told, "truncated")
    assert found["exit_code"] == 3
    assert any("rank 1" in problem for problem in found["problems"])
    assert not any("rank 0" in problem for problem in found["problems"])


@pytest.mark.dist
@pytest.mark.parametrize(("scenario", "ranks"), [("mismatch", "ranks 0-1"), ("hidden mismatch", "rank 0")])
def test_differences_are_told_on_all_ranks(scenario: str, ranks: str, told: Told) -> None:
    found = same(told, scenario)
    assert found["error"] == "LayoutError"
    assert [problem.split("  (")[0] for problem in found["problems"]] == [
        f"{ranks}: missing: score.weight [1, 24]",
        f"{ranks}: unexpected: lm_head.weight [101, 24]",
    ]


@pytest.mark.dist
def test_experts_are_refused_on_all_ranks(told: Told) -> None:
    assert "experts one by one" in same(told, "experts")["message"]


@pytest.mark.dist
@pytest.mark.parametrize("scenario", ["other model", "other seed"])
def test_ranks_that_prepare_different_things_are_told(scenario: str, told: Told) -> None:
    assert "do not have the same model" in same(told, scenario)["message"]


@pytest.mark.dist
def test_a_rank_that_cannot_build_ends_all(told: Told) -> None:
    found = same(told, "one cannot build")
    assert any("rank 1" in problem and "no disk" in problem for problem in found["problems"])


@pytest.mark.dist
def test_a_model_that_is_wrapped_is_no_plain_one(told: Told) -> None:
    found = same(told, "wrapped")
    assert "wrapped already" in found["message"]
    assert "load_into" in found["hint"]
    # transformers' own renamings are found in a model whose classes fully_shard has changed.
    assert same(told, "names of a sharded model") == [True, True]


def test_initialisation_from_outside_of_a_module_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
            nn.init.zeros_(self.head.weight)

    prepare(Outer, None)
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "head.weight" in warning.getMessage()
    assert "body" not in warning.getMessage()
