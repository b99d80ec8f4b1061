"""Settings in the headers of safetensors files that diffusers and torchao wrote (tests/data), and those of people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardkit.cli.consolidate import render
from shardkit.errors import LayoutError, SourceError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.inspect import inspect
from shardkit.operations.preshard import preshard

DATA = Path(__file__).parents[2] / "data"
LORA = DATA / "diffusers/lora/pytorch_lora_weights.safetensors"
QUANTISED = [
    *(DATA / "torchao" / f"{name}.safetensors" for name in ("int8", "fp8")),
    *(DATA / "quanto" / f"{name}.safetensors" for name in ("int8", "int4", "fp8")),
]


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def model(directory: Path, *files: Mapping[str, str]) -> Path:
    """Write a model whose files have such settings."""
    directory.mkdir()
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for number, (name, settings) in enumerate(zip(names, files, strict=True)):
        save_file(
            {f"layers.{number}.weight": torch.ones(2, 2)}, directory / name, {"format": "pt", **settings}
        )
    weights = {f"layers.{number}.weight": name for number, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return directory


def test_a_lora_of_diffusers(tmp_path: Path) -> None:
    """Without its settings diffusers takes the rank for alpha, and by other names it finds no module."""
    result = consolidate(LORA, tmp_path / "out")
    assert header(tmp_path / "out" / LORA.name) == header(LORA)
    stored, written = load_file(LORA), load_file(tmp_path / "out" / LORA.name)
    assert stored.keys() == written.keys()
    assert all(torch.equal(value, written[name]) for name, value in stored.items())
    assert result.warnings == ()
    consolidate(LORA, tmp_path / "cast", dtype="bf16")
    assert header(tmp_path / "cast" / LORA.name) == header(LORA)
    assert json.loads(header(LORA)["lora_adapter_metadata"])["lora_alpha"] == 8
    with pytest.raises(LayoutError, match=r"an adapter's settings \(lora_adapter_metadata\)"):
        consolidate(LORA, tmp_path / "renamed", add_prefix="unet.")


@pytest.mark.parametrize("prefix", ["", "unet.", "model."])
def test_a_lora_of_older_diffusers(tmp_path: Path, prefix: str) -> None:
    """Until 0.34 its header had no settings: it is known by its name, and has to keep its names all the same."""
    path, tensors = tmp_path / LORA.name, {prefix + name: value for name, value in load_file(LORA).items()}
    save_file(tensors, path, {"format": "pt"})
    result = consolidate(path, tmp_path / "out")
    assert (result.file_names, result.warnings) == ((LORA.name,), ())
    assert load_file(tmp_path / "out" / LORA.name).keys() == tensors.keys()
    with pytest.raises(SourceError) as caught:
        consolidate(path, tmp_path / "merged", merge_lora=True)
    assert "fuse_lora()" in str(caught.value.hint)


@pytest.mark.parametrize("path", QUANTISED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_quantised_by_names(tmp_path: Path, path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(path.read_bytes())
    (source / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert any("the model is quantised" in note for note in inspect(source).notes)
    for options in ({}, {"layout": "declared"}, {"dequantize": True}):
        with pytest.raises(LayoutError, match=r"quantised: .* with scales beside them"):
            preshard(source, tmp_path / "out", world_size=2, **options)
    with pytest.raises(LayoutError, match=r"quantised: .* with scales beside them"):
        consolidate(source, tmp_path / "out", dequantize=True)
    result = consolidate(source, tmp_path / "copy", ask_class=False)
    assert any("the model is quantised and copied as it is" in note for note in result.notes)
    assert header(tmp_path / "copy/model.safetensors") == header(path)
    assert "  safetensors.torch.load_file(" in "\n".join(render(result))
    if path.parent.name == "torchao":
        for changes in ({"dtype": "fp32"}, {"rename": ["0=first"]}):
            with pytest.raises(LayoutError, match="the header describes the types of tensors"):
                consolidate(source, tmp_path / "out", **changes)


def test_quantised_by_mlx(tmp_path: Path) -> None:
    """mlx-lm packs numbers of 4 bits into uint32, with scales and biases of each group beside them."""
    source, packed = (
        tmp_path / "model.safetensors",
        {"layers.0.weight": torch.zeros(4, 8, dtype=torch.uint32)},
    )
    scales = {f"layers.0.{part}": torch.zeros(4, 1, dtype=torch.float16) for part in ("scales", "biases")}
    save_file({**packed, **scales}, source, {"format": "mlx"})
    assert any("1 tensor of uint32 with scales" in note for note in inspect(source).notes)
    with pytest.raises(LayoutError, match="with scales beside them"):
        preshard(source, tmp_path / "out", world_size=2, layout="declared")
    result = consolidate(source, tmp_path / "copy")
    assert any("the model is quantised and copied as it is" in note for note in result.notes)


def test_settings_of_several_files(tmp_path: Path) -> None:
    one = {"title": "a model", "license": "mit", "tied": "layers.0.weight"}
    source = model(tmp_path / "source", one, {"title": "another", "author": "me"})
    result = consolidate(source, tmp_path / "out")
    for name in result.file_names:
        said = {"format": "pt", "license": "mit", "tied": "layers.0.weight", "author": "me"}
        assert header(tmp_path / "out" / name) == said
    assert any("title, in which the source's files contradict each other" in note for note in result.notes)
    consolidate(source, tmp_path / "cast", dtype="bf16")
    assert header(tmp_path / "cast/model.safetensors") == said
    result = consolidate(source, tmp_path / "without", exclude=["layers.0.*"])
    assert "tied" not in header(tmp_path / "without/model.safetensors")
    result = consolidate(source, tmp_path / "renamed", add_prefix="net.")
    assert header(tmp_path / "renamed/model.safetensors") == {"format": "pt"}
    assert any("left out of the header: author, license, tied, " in note for note in result.notes)
    (note,) = (
        note
        for note in preshard(source, tmp_path / "shards", world_size=2, layout="declared").notes
        if "header" in note
    )
    assert "author, license, tied, " in note
    plain = model(tmp_path / "plain", {})
    assert header(consolidate_file(plain, tmp_path / "plain-out")) == {"format": "pt"}


def consolidate_file(source: Path, out: Path) -> Path:
    return out / consolidate(source, out).file_names[0]


def test_types_that_contradict(tmp_path: Path) -> None:
    files = [{"layers.0.weight": json.dumps({"_type": kind})} for kind in ("Int8Tensor", "Tensor")]
    with pytest.raises(LayoutError, match="files that contradict each other"):
        consolidate(model(tmp_path / "source", *files), tmp_path / "out")
