"""What real worlds save comes out as rank 0 would have gathered it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import shardkit
from shardkit.errors import IntegrityError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from tests.bits import raw
from tests.operations.consolidate.checkpoints import CONFIG, EMBED, HEAD, assert_bit_equal, hub, load
from tests.worlds.processes import run_script

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("worlds")
    run_script("distributed/consolidate_world.py", str(out))
    return out


def test_a_trained_model(worlds: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    base = hub(tmp_path / "base", None, {**CONFIG, "tie_word_embeddings": True})
    result = shardkit.consolidate(
        worlds / "trained", str(tmp_path / "out"), base=str(base), max_shard_size=3000
    )
    expected = load_file(worlds / "trained.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(result.output, dtype=torch.bfloat16)
    assert_bit_equal(model.state_dict(), expected)
    assert result.ties == ((EMBED, HEAD),)
    del expected[HEAD]
    assert_bit_equal(load(result.output), expected)
    assert {part.what for part in result.skipped} >= {"optimizer"}


@pytest.mark.parametrize("digest", ["crc32", "none"])
def test_every_way_to_cut_a_tensor(digest: str, worlds: Path, tmp_path: Path) -> None:
    result = shardkit.consolidate(
        worlds / "placed",
        str(tmp_path / "out"),
        root="",
        digest=digest,
        max_shard_size=1000,
        check=True,
        manifest=True,
    )
    assert result.checked
    expected = load_file(worlds / "placed.safetensors")
    assert_bit_equal(load(result.output), expected)
    described = manifest.load(manifest.read_bytes(result.output), manifest.NAME)
    assert described is not None
    assert {name: entry.get("crc32") for name, entry in described["tensors"].items()} == {
        name: crc32(raw(value)) if digest == "crc32" else None for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("name", "stripped"),
    [("replicated", "app.model."), ("flattened", "model.")],
    ids=["HSDP, async_save, a file for each tensor", "FSDP1, ShardedTensor"],
)
def test_other_ways_to_save_a_model(name: str, stripped: str, worlds: Path, tmp_path: Path) -> None:
    result = shardkit.consolidate(worlds / name, str(tmp_path / "out"))
    expected = load_file(worlds / f"{name}.safetensors")
    assert_bit_equal(load(result.output), expected)
    assert result.stripped == ((stripped, len(expected)),)
    assert result.ties == ()


def test_a_flipped_byte_is_found(worlds: Path, tmp_path: Path) -> None:
    source, name = tmp_path / "bad", "grid.16.weight"
    shutil.copytree(worlds / "placed", source)
    value = load_file(worlds / "placed.safetensors")[name]
    file, rows = source / "__0_0.distcp", raw(value[:8, :5])
    data = bytearray(file.read_bytes())
    assert data.count(rows) == 1
    data[data.index(rows) + 7] ^= 1
    file.write_bytes(data)
    for check in (True, False):  # before a byte moves, or as they move
        with pytest.raises(IntegrityError, match=rf"(?s){name}.*__0_0\.distcp"):
            shardkit.consolidate(source, str(tmp_path / "out"), root="", check=check)
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    shardkit.consolidate(source, str(tmp_path / "out"), root="", check_source=False)
    assert (load(tmp_path / "out")[name] != value).sum() == 1


def test_a_cast_is_torchs(worlds: Path, tmp_path: Path) -> None:
    result = shardkit.consolidate(worlds / "placed", str(tmp_path / "out"), root="", dtype="bf16")
    expected = load_file(worlds / "placed.safetensors")
    assert_bit_equal(load(result.output), {name: value.bfloat16() for name, value in expected.items()})
