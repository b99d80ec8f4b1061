"""Weights beside the model's own: those of modules that its files name are carried along, all others are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shardkit.errors import SourceError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.inspect import inspect
from shardkit.operations.preshard import preshard
from shardkit.operations.verify import verify
from tests.bits import flip_byte
from tests.operations.consolidate.checkpoints import hub, save, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fast_trace"),
]

DENSE = "2_Dense/model.safetensors"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {"idx": 3, "name": "3", "path": "late/norm", "type": "sentence_transformers.models.LayerNorm"},
]


def dense() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {"linear.weight": torch.randn(8, 16), "linear.bias": torch.randn(8)}


def sentence_model(directory: Path) -> Path:
    """Make a model with two modules that have weights, as sentence-transformers lays it out."""
    hub(directory, weights(), modules__json=json.dumps(MODULES))
    for folder in ("1_Pooling", "2_Dense", "late/norm"):
        (directory / folder).mkdir(parents=True)
        (directory / folder / "config.json").write_text("{}")
    save_file(dense(), directory / DENSE)
    torch.save({"norm.weight": torch.ones(8)}, directory / "late/norm/pytorch_model.bin")
    return directory


def skipped(result: object) -> dict[str, str]:
    return {part.what: part.where for part in result.skipped}  # type: ignore[attr-defined]


def test_modules_are_carried_along(tmp_path: Path) -> None:
    """From the model itself, and from a checkpoint of it whose base it is; manifest and verify cover them."""
    model = sentence_model(tmp_path / "model")
    checkpoint = save({"model": weights()}, tmp_path / "step-3")
    made = consolidate(model, tmp_path / "one", manifest=True, sha256=True)
    based = consolidate(checkpoint, tmp_path / "two", base=model)
    for result in (made, based):
        assert {DENSE, "2_Dense/config.json", "late/norm/pytorch_model.bin"} <= set(result.assets)
        assert (result.skipped, result.warnings) == ((), ())
        for name in (DENSE, "late/norm/pytorch_model.bin", "modules.json"):
            assert (Path(result.output) / name).read_bytes() == (model / name).read_bytes()
    assert verify(made.output, full=True).ok
    flip_byte(tmp_path / "one" / DENSE, -1)
    (problem,) = verify(made.output, full=True).problems
    assert problem.file == DENSE


def test_preshard_names_them(tmp_path: Path) -> None:
    model = sentence_model(tmp_path / "model")
    result = preshard(model, tmp_path / "out", world_size=2, wrap="none")
    own = "weights of a module of its own"
    assert result.skipped == ((DENSE, own), ("late/norm/pytorch_model.bin", own))


def trained_state() -> dict[str, torch.Tensor]:
    """Return what SentenceTransformer.state_dict() has after training."""
    state = {f"0.auto_model.{name}": value for name, value in weights().items()}
    return state | {f"2.{name}": value + 1 for name, value in dense().items()}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_module_that_was_trained_too(tmp_path: Path, prefix: str) -> None:
    """It is refused; the hint has the runs that write the transformer and the module."""
    model = sentence_model(tmp_path / "model")
    state = {f"{prefix}{name}": value for name, value in trained_state().items()}
    checkpoint = save(state, tmp_path / "step-3")
    with pytest.raises(SourceError, match="modules beside the transformer were trained too") as caught:
        consolidate(checkpoint, tmp_path / "out", base=model)
    assert not (tmp_path / "out").exists()
    place = f"{prefix}2"
    named = f"{place}.linear.bias, {place}.linear.weight"
    assert caught.value.problems == (f"{DENSE}: the checkpoint has 2 tensors of it, {named}",)
    assert f"`--root {prefix}0.auto_model`" in (caught.value.hint or "")
    assert f"`--root {place}`" in (caught.value.hint or "")
    result = consolidate(checkpoint, tmp_path / "out", base=model, root=f"{prefix}0.auto_model")
    (warning,) = (line for line in result.warnings if "copied from the base" in line)
    assert warning == f"copied from the base: {caught.value.problems[0]}; --root {place} writes these"
    assert (tmp_path / "out" / DENSE).read_bytes() == (model / DENSE).read_bytes()
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in weights().items())
    alone = consolidate(checkpoint, tmp_path / "alone", root=place)
    found = load_file(f"{alone.output}/model.safetensors")
    assert found.keys() == dense().keys()
    assert all(torch.equal(found[name], value + 1) for name, value in dense().items())


BESIDE: Mapping[str, str] = {
    "adapter_model.safetensors": "an adapter",
    "model.fp16.safetensors": "not among the model's weight files",
    "pytorch_model.bin": "not among the model's weight files",
    "training_args.bin": "state of the trainer",
    "optimizer.pt": "state of the trainer",
    "tiny-q4.gguf": "not among the model's weight files",
    "tf_model.h5": "not among the model's weight files",
    "onnx/": "2 files: not among the model's weight files",
    "openvino/": "not among the model's weight files",
    "original/": "not among the model's weight files",
    "vae/": "not among the model's weight files",
    ".hidden/": "not among the model's weight files",
    **dict.fromkeys(
        [
            *("x.PT", "x.pkl", "extra.pickle", "e.npy", "e.npz", "a.dduf", "y.mlmodel", "z.tar", "w.bin.gz"),
            *("model.safetensors.bak", "q.safetensors.part", "__0_0.distcp", "lora.pt2"),
            *("checkpoint", ".w.bin"),
        ],
        "not among the model's weight files",
    ),
}


def put_all(directory: Path, names: list[str]) -> None:
    """Write files of one byte; a name of a directory stands for those below it that are listed too."""
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (directory / name).write_bytes(b"x")


def test_every_other_file_with_weights_is_named(tmp_path: Path) -> None:
    model = hub(tmp_path / "model", weights())
    files = [*BESIDE, "onnx/model.onnx", "onnx/model_fp16.onnx", "openvino/openvino_model.bin"]
    files += ["original/consolidated.00.pth", "vae/diffusion_pytorch_model.safetensors", "vae/config.json"]
    files += [".cache/huggingface/x.bin", ".git/objects/pack/p.pack", ".gitattributes", "vocab.txt", "a.PNG"]
    files += [".hidden/w.bin", "tokenizer.model", "LICENSE", "runs/events.out.tfevents.1.host"]
    put_all(model, files)
    result = consolidate(model, tmp_path / "one")
    based = consolidate(save({"model": weights()}, tmp_path / "step-3"), tmp_path / "two", base=model)
    sharded = preshard(model, tmp_path / "three", world_size=2, wrap="none")
    twice = consolidate(model, tmp_path / "four", base=model)
    assert [(part.what, part.where) for part in twice.skipped] == list(skipped(result).items()), "once each"
    for found in (skipped(result), skipped(based), dict(sharded.skipped)):
        assert found.keys() == BESIDE.keys()
        assert all(why in found[name] for name, why in BESIDE.items())
    assert all(reason.startswith("of the base: ") for reason in skipped(based).values())


def test_a_transformer_in_a_directory_of_its_own(tmp_path: Path) -> None:
    """As sentence-transformers saved until version 5: written into a copy, which keeps every module."""
    listed = [{"path": "0_Transformer", "name": "0"}, {"path": "2_Dense", "name": "2"}]
    model = tmp_path / "model"
    hub(model / "0_Transformer", weights())
    (model / "2_Dense").mkdir()
    save_file(dense(), model / "2_Dense" / "model.safetensors")
    (model / "2_Dense" / "config.json").write_text("{}")
    (model / "modules.json").write_text(json.dumps(listed))
    trained = {name: value + 1 for name, value in weights().items()}
    run = save({"model": trained}, tmp_path / "step-3")
    with pytest.raises(SourceError, match=r"has no config\.json") as caught:
        consolidate(run, tmp_path / "out", base=model)
    assert "found 0_Transformer" in caught.value.problems
    shutil.copytree(model, tmp_path / "OUT")
    transformer = model / "0_Transformer"
    result = consolidate(run, tmp_path / "OUT" / "0_Transformer", base=transformer, overwrite=True)
    assert "weights of a module of its own" in skipped(result)["../2_Dense/model.safetensors"]
    sharded = preshard(transformer, tmp_path / "sharded", world_size=2, wrap="none")
    assert "../2_Dense/model.safetensors" in dict(sharded.skipped)
    before = {path.relative_to(model) for path in model.rglob("*")}
    assert before <= {path.relative_to(tmp_path / "OUT") for path in (tmp_path / "OUT").rglob("*")}
    written = load_file(tmp_path / "OUT" / "0_Transformer" / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in trained.items())


@pytest.mark.parametrize(
    "path", ["\0", "a\0b", "\ud800", "a\nb", "x" * 300, "a/" * 3000, ".", "", "/", "..", "*"]
)
@pytest.mark.parametrize("name", ["modules.json", "router_config.json"])
def test_no_name_of_a_module_is_our_fault(name: str, path: str, tmp_path: Path) -> None:
    content = [{"path": path, "name": "1"}] if name == "modules.json" else {"types": {path: "x"}}
    model = hub(tmp_path / "model", weights())
    (model / name).write_text(json.dumps(content))
    run = save({"model": weights()}, tmp_path / "step-3")
    for source, base in ((model, None), (run, model)):
        if path in ("\0", "a\0b", "\ud800", "/", ".."):
            with pytest.raises(SourceError, match="cannot be in the model's"):
                consolidate(source, tmp_path / "out", base=base, overwrite=True)
        else:
            consolidate(source, tmp_path / "out", base=base, overwrite=True)


def test_modules_outside_of_the_model(tmp_path: Path) -> None:
    listed = json.dumps([{"path": "../elsewhere", "name": "1"}])
    model = hub(tmp_path / "model", weights(), modules__json=listed)
    save_file(dense(), tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match="cannot be in the model's"):
        consolidate(model, tmp_path / "out")
    (model / "modules.json").write_text(json.dumps(MODULES))
    (model / "2_Dense").mkdir()
    (model / "2_Dense" / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    result = consolidate(model, tmp_path / "out")
    assert DENSE in skipped(result)
    assert any(note.startswith("1 file of model not copied, as links that leave it") for note in result.notes)


def test_sentence_transformers_loads_it(tmp_path: Path) -> None:
    """The library itself, where it is installed."""
    library = pytest.importorskip("sentence_transformers")
    from transformers import BertConfig, BertModel, BertTokenizerFast

    modules = pytest.importorskip("sentence_transformers.models")
    source = tmp_path / "bert"
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=24)
    BertModel(config).save_pretrained(source)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (source / "vocab.txt").write_text("\n".join(tokens))
    BertTokenizerFast(str(source / "vocab.txt")).save_pretrained(source)
    parts = [modules.Transformer(str(source)), modules.Pooling(16), modules.Dense(16, 8), modules.Normalize()]
    model = library.SentenceTransformer(modules=parts, device="cpu")
    model.save(str(tmp_path / "model"))
    expected = model.encode(["a b c"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    trained = model.encode(["a b c"])
    assert not np.allclose(trained, expected)
    checkpoint = save(model.state_dict(), tmp_path / "step-3")
    root = next(iter(model.state_dict())).partition(".embeddings.")[0]
    consolidate(checkpoint, tmp_path / "two", base=tmp_path / "model", root=root)
    consolidate(checkpoint, tmp_path / "alone", root="2")
    shutil.copy(tmp_path / "alone/model.safetensors", tmp_path / "two" / DENSE)
    consolidate(tmp_path / "model", tmp_path / "one")
    for output, answer in (("one", expected), ("two", trained)):
        loaded = library.SentenceTransformer(str(tmp_path / output), device="cpu")
        assert np.array_equal(loaded.encode(["a b c"]), answer)


def test_what_lies_beside_a_trainers_checkpoint_is_named(tmp_path: Path) -> None:
    """No file with weights is left out in silence; what was read, or is carried along, is not named."""
    checkpoint = save({"model": weights()}, tmp_path / "step-3")
    sentence_model(checkpoint / "hf")
    (checkpoint / "hf/model.safetensors").unlink()  # the trainer's: config, tokenizer, modules
    stray = {
        "consolidated.00.pth": "not among",
        "ema.safetensors": "not among the model's weight files",
        "optim-rank0.pt": "state of the trainer",
        "rng_state_0.pth": "state of the trainer",
        "scheduler.pt": "state of the trainer",
        "last.ckpt": "not among",
        "q4.gguf": "not among",
        "2_Dense/model.safetensors": "a module of its own",
        "head/": "head.bin: not among",
        "parts/": "2 files: not among",
    }
    put_all(checkpoint, [*stray, "head/head.bin", "parts/a.pt", "parts/b.pt", "notes.txt"])
    result = consolidate(checkpoint, tmp_path / "out")
    assert DENSE in result.assets
    assert skipped(result).keys() == stray.keys()
    assert all(why in skipped(result)[name] for name, why in stray.items())
    assert dict(inspect(checkpoint).skipped) == skipped(result)


def test_a_pipeline_of_models_is_none_of_them(tmp_path: Path) -> None:
    """consolidate took its text encoder for the newest checkpoint of a run."""
    pipeline = hub(tmp_path / "pipeline" / "text_encoder", weights()).parent
    (pipeline / "model_index.json").write_text("{}")
    for run in (consolidate, partial(preshard, world_size=2)):
        with pytest.raises(SourceError, match=r"is not a checkpoint|no model weights found"):
            run(pipeline, tmp_path / "out")  # type: ignore[operator]
    assert consolidate(pipeline / "text_encoder", tmp_path / "out").num_tensors == len(weights())
