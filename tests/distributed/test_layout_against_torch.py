"""The chunks of a layout are those that stock `dcp.save` writes from real processes, wrapped the same way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import BY_NAME
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.layout.layout import Layout, declare
from shardkit.layout.traced import read_answer
from tests.worlds.processes import run_script

pytestmark = pytest.mark.dist

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 21,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 2,  # k_proj has 2 rows: fewer than 3 or 4 ranks
    "vocab_size": 101,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True, "dtype": "bfloat16"},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 9,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 17,
        "vocab_size": 101,
    },
}
UNITS = {
    "llama": "LlamaDecoderLayer",
    "llama-tied": "LlamaDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gpt2": "GPT2Block",
}
WORLDS = {"2": "dp_shard=2", "3": "dp_shard=3", "4": "dp_shard=4", "2x2": "dp_replicate=2,dp_shard=2"}

Box = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stock torch wrote, and the traces: see stock_world.py."""
    base = tmp_path_factory.mktemp("stock")
    for name, config in MODELS.items():
        directory = base / "models" / name
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
    (base / "out").mkdir()
    jobs = {
        "worlds": [[int(size) for size in world.split("x")] for world in WORLDS],
        "models": MODELS,
        "units": UNITS,
        "directories": str(base / "models"),
        "out": str(base / "out"),
    }
    run_script("distributed/stock_world.py", json.dumps(jobs))
    return base / "out"


def read_metadata(directory: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(directory).read_metadata()


def stock_chunks(metadata: Any) -> Iterator[tuple[str, list[Box]]]:
    for fqn, entry in metadata.state_dict_metadata.items():
        yield fqn, sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)


def assert_equal_to_stock(layout: Layout, metadata: Any, mesh: Mesh) -> None:
    stored = {name: group[0] for group in layout.ties for name in group}
    chunks = dict(stock_chunks(metadata))
    assert set(chunks) == {*layout.tensors, *stored}
    for fqn, boxes in chunks.items():
        # Lists, not sets: an empty chunk is written once, however many ranks have nothing.
        assert sorted(tuple(region) for _, region in layout.owners(stored.get(fqn, fqn))) == boxes, fqn
    if len(mesh.axes) == 1:
        assert_same_files(layout, metadata, stored)


def assert_same_files(layout: Layout, metadata: Any, stored: dict[str, str]) -> None:
    """Rank r of a 1-D mesh wrote `__r_0.distcp`, and the shard coordinate is the rank."""
    owners = {
        (fqn, region.offsets): shard
        for fqn, tensor in layout.tensors.items()
        if tensor.is_sharded
        for shard, region in layout.owners(fqn)
        if region.num_elements
    }
    for index, info in metadata.storage_data.items():
        shard = owners.get((stored.get(index.fqn, index.fqn), tuple(index.offset)))
        assert shard is None or info.relative_path == f"__{shard}_0.distcp", index


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", MODELS)
def test_traced_chunks_are_those_of_stock_torch(stock: Path, world: str, name: str) -> None:
    mesh = parse_mesh(WORLDS[world], None)
    answer = json.loads((stock / world / f"{name}.json").read_text())
    assert answer["status"] == "ok"
    layout = read_answer(answer, mesh, UNITS[name]).layout
    assert len(layout.units) == 3
    assert bool(layout.ties) == (name in ("llama-tied", "gpt2"))
    assert_equal_to_stock(layout, read_metadata(stock / world / name), mesh)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", [*MODELS, "edges"])
def test_declared_chunks_are_those_of_stock_torch(stock: Path, world: str, name: str) -> None:
    mesh = parse_mesh(WORLDS[world], None)
    metadata = read_metadata(stock / world / name)
    tied = name in ("llama-tied", "gpt2")
    source = {
        fqn: TensorEntry(
            fqn=fqn,
            dtype=BY_NAME[str(entry.properties.dtype).removeprefix("torch.")],
            shape=tuple(entry.size),
            first_chunk=0,
            num_chunks=1,
        )
        for fqn, entry in metadata.state_dict_metadata.items()
        if not (tied and fqn == "lm_head.weight")
    }
    layout = declare(source, mesh, "auto", MODELS.get(name))
    assert bool(layout.ties) == tied
    assert_equal_to_stock(layout, metadata, mesh)
