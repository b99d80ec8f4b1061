"""The first phase ends alike on all ranks: with a model and its source, or with one error."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardkit
from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.training.fill.source import find_weights, open_source
from shardkit.training.model.fit import ModelInitializationContext
from shardkit.training.model.initialise import initialise, new_rows
from shardkit.training.prepare import prepare
from shardkit.training.ranks.local import describe_tensors
from tests.contents import edit_json, json_of
from tests.models.zoo import ZOO, make_hub
from tests.training import models
from tests.training.models import forget_dtype
from tests.worlds.ranks import Ranks, on_all, same_error


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("hub") / "llama"
    models.save("llama", directory)
    return str(directory)


def untie(directory: Path) -> None:
    """Make a model tied whose file has two values."""
    models.save("llama", directory)
    assert not json_of(directory)["tie_word_embeddings"]
    edit_json(directory / "config.json", tie_word_embeddings=True)


def make_models(out: Path) -> None:
    for name, model in (("hub", "llama"), ("moe", "qwen3-moe"), ("vlm", "qwen2-vl")):
        models.save(model, out / name)
    state = load_file(file := out / "moe/model.safetensors")
    del state["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(state, file, {"format": "pt"})
    for rank in range(2):
        shutil.copytree(out / "hub", out / f"truncated-{rank}")
        shutil.copytree(out / "hub", out / f"emptied-{rank}")
    shutil.copytree(out / "hub", out / "only-0")
    os.truncate(file := out / "truncated-1/model.safetensors", file.stat().st_size - 4)
    (out / "emptied-1/model.safetensors").unlink()
    untie(out / "untied")


two = Ranks(__name__, 2, first=make_models)


def test_a_config_without_a_dtype_takes_the_files(tmp_path: Path) -> None:
    """As `from_pretrained` does; a file beside the config comes before another source."""
    models.save("llama", tmp_path / "half", dtype=torch.bfloat16, max_shard_size="20KB")
    models.save("llama", tmp_path / "whole")
    for name in ("half", "whole"):
        assert forget_dtype(tmp_path / name) == {"half": "bfloat16", "whole": "float32"}[name]
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
    parameters = [tensor for tensor in ctx.expected.values() if tensor.kind == "parameter"]
    assert {tensor.dtype for tensor in parameters} == {torch.bfloat16}
    assert all(ctx.expected[fqn].shape == tuple(tensor.shape) for fqn, tensor in state.items())
    assert ctx.buffers.keys() == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    assert not any(ctx.expected[fqn].persistent for fqn in ctx.buffers)
    assert (ctx.source, ctx.unavailable, ctx.initialised, ctx.grown) == (hub, None, frozenset(), {})
    assert ctx.blueprint is None
    assert repr(ctx) == f"<prepared LlamaForCausalLM from {hub}: {len(ctx.expected)} tensors>"


def test_a_new_head_comes_with_a_blueprint(hub: str) -> None:
    def build() -> nn.Module:
        return transformers.LlamaForSequenceClassification(models.llama(num_labels=3))

    ctx = prepare(build, hub, missing="init")
    assert ctx.initialised == {"score.weight"}
    assert repr(ctx).endswith(" tensors, 1 of them initialised>")
    assert any("lm_head.weight" in note for note in ctx.notes)
    assert ctx.blueprint is not None
    assert ctx.blueprint is not ctx.model
    assert all(tensor.is_meta for tensor in (*ctx.blueprint.parameters(), *ctx.blueprint.buffers()))
    assert not ctx.buffers["model.rotary_emb.inv_freq"].is_meta
    ((fqn, value),) = initialise(ctx, ctx.initialised)
    assert (fqn, tuple(value.shape)) == ("score.weight", (3, 24))


def test_an_adapter_beside_the_weights_is_named(hub: str, tmp_path: Path) -> None:
    """`from_pretrained` adds it to the model."""
    shutil.copytree(hub, tmp_path / "both")
    save_file({"a": torch.ones(1)}, tmp_path / "both" / "adapter_model.safetensors")
    notes = shardkit.prepare(tmp_path / "both", tmp_path / "both").notes
    assert notes == ("left out: adapter_model.safetensors: an adapter, which is not merged into the weights",)


@pytest.mark.parametrize(
    ("whole", "part"), [("clip", "CLIPVisionModel"), ("clip", "CLIPTextModel"), ("resnet", "ResNetModel")]
)
def test_a_part_of_the_sources_model_is_filled_as_from_pretrained_does(
    whole: str, part: str, tmp_path: Path
) -> None:
    """Another tower has blocks too, and a head of two layers has numbers as blocks do."""
    make_hub(ZOO[whole], tmp_path)
    right = getattr(transformers, part).from_pretrained(tmp_path)

    def build() -> nn.Module:
        model = type(right)(right.config)
        assert isinstance(model, nn.Module)
        return model

    ctx = prepare(build, str(tmp_path), dtype="bf16")
    assert any("in the source, not in the model: " in note for note in ctx.notes)
    state = shardkit.finalize(ctx.model, ctx).state_dict()
    assert state.keys() == right.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in right.state_dict().items())
    with pytest.raises(LayoutError, match=r"unexpected: "):  # nobody says which of anybody's own model counts
        prepare(lambda: nn.ModuleDict(dict(build().named_children())), str(tmp_path))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.LSTM(3, 4, 2), nn.GRU(3, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x)[0] for part in self.parts])


def test_recurrent_modules_get_memory(tmp_path: Path) -> None:
    """They refer to their parameters weakly, and torch swaps no such tensor."""
    whole = Recurrent()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    ctx = prepare(Recurrent, str(tmp_path))
    filled = shardkit.finalize(ctx.model, ctx)
    x = torch.randn(5, 2, 3)
    assert torch.equal(filled(x), whole(x))


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
    with pytest.raises(SourceError, match="no such file"):
        prepare(hub, tmp_path / "absent/")
    with pytest.raises(SourceError):
        prepare(hub, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_no_model_can_be_built_from_is_named(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thing is, and what to give; where a run's directory is the source, the line that takes its newest."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(hub, "model")
    state = load_file("model/model.safetensors")
    for step in (10, 20):
        dcp.save({"model": state}, checkpoint_id=f"run/step-{step}", no_dist=True)
    torch.save(state, "model.pt")
    Path("lora").mkdir()
    save_file({"a": torch.ones(1)}, "lora/adapter_model.safetensors")
    Path("lora/adapter_config.json").write_text("{}")
    Path("tiny.gguf").write_bytes(b"GGUF" + bytes(64))
    Path("other").mkdir()
    newest = 'shardkit.resolve_checkpoint("run").path'
    for given, what, hinted in (
        ("run", "a run's directory", newest),
        ("run/step-10", "a checkpoint", '"run/step-10"'),
        ("model.pt", "a file with weights", '"model.pt"'),
        ("lora", "a PEFT adapter", ""),
        ("tiny.gguf", "a model in GGUF format", ""),
        ("other", "no checkpoint", ""),
    ):
        with pytest.raises(LayoutError, match=r"no config\.json to build a model from") as caught:
            prepare(given, "model")
        assert type(caught.value) is LayoutError
        assert caught.value.message.startswith(f"{given} is {what}, ")
        assert str(caught.value.hint).partition("prepare(MODEL, ")[2].removesuffix(")") == hinted
        if hinted:
            assert prepare("model", eval(hinted, {"shardkit": shardkit})).weights is not None
    with pytest.raises(SourceError, match="run is not a checkpoint") as refused:
        prepare("model", "run")
    assert refused.value.problems[0] == "it holds: step-10, step-20"
    for pair in (("./modle", "model"), ("model", "./modle")):
        with pytest.raises(SourceError, match=r"closest name: \./model"):
            prepare(*pair)


def test_files_of_the_same_directory_do_not_mix(hub: str, tmp_path: Path) -> None:
    """The source may be one file of a directory that builds another model."""
    shutil.copytree(hub, tmp_path / "model")
    tuned = {key: value + 1 for key, value in load_file(Path(hub, "model.safetensors")).items()}
    save_file(tuned, tmp_path / "model/tuned.safetensors")
    ctx = prepare(str(tmp_path / "model"), tmp_path / "model/tuned.safetensors")
    assert ctx.weights is not None
    assert [file.name for file in ctx.weights.catalog.files] == ["tuned.safetensors"]


def said(ctx: ModelInitializationContext) -> dict[str, Any]:
    """What every rank's context has to say alike, whatever its process drew before."""
    drawn = [
        *(value for _, value in initialise(ctx, ctx.initialised)),
        *(new_rows(ctx, fqn) for fqn in ctx.grown),
    ]
    return {
        "initialised": sorted(ctx.initialised),
        "grown": ctx.grown,
        "drawn": digest(drawn),
        "buffers": digest(ctx.buffers.values()),
        "meta": all(parameter.is_meta for parameter in ctx.model.parameters()),
    }


def digest(tensors: Iterable[torch.Tensor]) -> str:
    content = [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for tensor in tensors]
    return hashlib.sha256("".join(content).encode()).hexdigest()


def same(value: Any) -> Any:
    """Return what every rank has here."""
    assert on_all(value) == [value] * 2
    return value


def score() -> nn.Module:
    return transformers.LlamaForSequenceClassification(models.llama(num_labels=1))


@two.test
def test_ranks_prepare_alike(out: Path) -> None:
    torch.manual_seed(dist.get_rank())  # nothing may depend on it
    ctx = prepare(str(out / "hub"), str(out / "hub"))
    assert same(said(ctx))["meta"]
    assert ctx.weights is not None
    assert same(ctx.weights.identity)
    assert ctx.unavailable is None
    assert dist.get_backend() == "gloo"


@two.test
def test_what_is_drawn_is_the_same_on_all_ranks_and_in_a_world_of_one(out: Path) -> None:
    torch.manual_seed(dist.get_rank())
    ctx = prepare(str(out / "hub"), None)
    assert ctx.weights is None
    assert ctx.unavailable is None
    (out / f"scratch-{dist.get_rank()}.json").write_text(json.dumps(same(said(ctx))))


@pytest.mark.dist
def test_a_world_of_one_draws_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    out = two.folder(tmp_path_factory)
    torch.manual_seed(77)
    alone = said(prepare(str(out / "hub"), None))
    assert [json.loads((out / f"scratch-{rank}.json").read_text()) for rank in range(2)] == [alone] * 2


@two.test
def test_a_rank_without_the_source_learns_what_is_read(out: Path) -> None:
    is_first = dist.get_rank() == 0
    source = out / ("only-0" if is_first else "nowhere")
    ctx = prepare(score, str(source), missing=["score.*"], tokenizer=120)
    assert (ctx.unavailable is None) == is_first
    assert (ctx.weights is not None) == is_first
    found = same(said(ctx))
    assert found["initialised"] == ["score.weight"]
    assert found["grown"] == {"model.embed_tokens.weight": 101}


@two.test
def test_a_rank_whose_source_has_no_weights_learns_what_is_read(out: Path) -> None:
    ctx = prepare(str(out / "hub"), str(out / f"emptied-{dist.get_rank()}"))
    assert (ctx.unavailable is None) == (dist.get_rank() == 0)


@two.test
def test_a_source_that_nobody_has_is_one_error(out: Path) -> None:
    found = same_error(lambda: prepare(str(out / "hub"), str(out / "nowhere.d/")))
    assert found["error"] == "SourceError"
    assert "no such file" in found["message"]


@two.test
def test_a_truncated_file_of_one_rank_is_an_error_on_all(out: Path) -> None:
    found = same_error(lambda: prepare(str(out / "hub"), str(out / f"truncated-{dist.get_rank()}")))
    assert found["exit_code"] == 3
    assert any("rank 1" in problem for problem in found["problems"])
    assert not any("rank 0" in problem for problem in found["problems"])


def differences(work: Callable[[], object]) -> list[str]:
    found = same_error(work)
    assert found["error"] == "LayoutError"
    return [problem.split("  (")[0] for problem in found["problems"]]


@two.test
def test_differences_are_told_on_all_ranks(out: Path) -> None:
    assert differences(lambda: prepare(score, str(out / "hub"))) == [
        "ranks 0-1: missing: score.weight [1, 24]",
        "ranks 0-1: unexpected: lm_head.weight [101, 24]",
    ]


@two.test
def test_differences_that_one_rank_can_see_are_told_on_all(out: Path) -> None:
    source = str(out / ("nowhere" if dist.get_rank() else "only-0"))
    assert differences(lambda: prepare(score, source)) == [
        "rank 0: missing: score.weight [1, 24]",
        "rank 0: unexpected: lm_head.weight [101, 24]",
    ]


@two.test
def test_a_lost_expert_is_refused_on_all_ranks(out: Path) -> None:
    found = same_error(lambda: prepare(str(out / "moe"), str(out / "moe"), missing="init"))
    assert any("mlp.experts" in problem for problem in found["problems"])


@two.test
def test_ranks_with_other_models_are_told() -> None:
    def wider() -> nn.Module:
        return transformers.LlamaForCausalLM(models.llama(vocab_size=101 + dist.get_rank()))

    assert "do not have the same model" in same_error(lambda: prepare(wider, None))["message"]


@two.test
def test_ranks_with_other_seeds_are_told(out: Path) -> None:
    hub = str(out / "hub")
    found = same_error(lambda: prepare(hub, hub, seed=dist.get_rank()))
    assert "do not have the same model" in found["message"]


@two.test
def test_a_tie_with_two_values_is_none_on_any_rank(out: Path) -> None:
    ctx = prepare(str(out / "untied"), str(out / "untied"))
    assert ctx.ties == ()
    same(said(ctx))


@two.test
def test_a_rank_that_cannot_build_ends_all(out: Path) -> None:
    def refuse() -> nn.Module:
        raise OSError("no disk")

    hub = str(out / "hub")
    found = same_error(lambda: prepare(refuse if dist.get_rank() else hub, hub))
    assert any("rank 1" in problem and "no disk" in problem for problem in found["problems"])


@two.test
def test_a_model_that_is_wrapped_is_no_plain_one(out: Path) -> None:
    """A source is found for it all the same."""
    ctx = prepare(str(out / "vlm"), str(out / "vlm"))
    mesh = init_device_mesh("cpu", (2,))
    for layer in ctx.model.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(ctx.model, mesh=mesh)
    expected, ties = describe_tensors(ctx.model)
    assert ctx.weights is not None
    # transformers' own renamings are found in a model whose classes fully_shard has changed.
    again = find_weights(open_source(str(out / "vlm")), expected, ties, model=ctx.model)
    assert (again.names, again.identity) == (ctx.weights.names, ctx.weights.identity)
    found = same_error(lambda: prepare(ctx.model, str(out / "vlm")))
    assert "wrapped already" in found["message"]
    assert "load_into" in found["hint"]


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
