"""safetensors files as images: what their bytes say, how tensors are divided, and that stock readers agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME, BY_SAFETENSORS, DType
from shardkit.errors import SourceError
from shardkit.formats.hub import safetensors as safetensors_images
from shardkit.formats.hub.directory import open_model
from shardkit.formats.hub.safetensors import OutputTensor, SafetensorsImages, read_header
from shardkit.transfer.plan import build_plan
from tests.operations.consolidate.checkpoints import assert_bit_equal, load
from tests.transfer.test_execute import run

F32, BF16 = BY_NAME["float32"], BY_NAME["bfloat16"]


def tensor(fqn: str, nbytes: int = 4, dtype: DType = F32) -> OutputTensor:
    return OutputTensor(fqn, fqn, dtype, (nbytes // dtype.itemsize,))


def write(images: SafetensorsImages, catalog: Catalog, out: Path, *, jobs: int = 1) -> None:
    """Fill the images from a catalog, as an operation does."""
    out.mkdir(exist_ok=True)
    run(build_plan(images, catalog), out, jobs=jobs)
    index = images.index()
    if index is not None:
        (out / images.index_name).write_bytes(index)


def source(tensors: dict[str, torch.Tensor], directory: Path) -> Catalog:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return open_model(str(directory)).catalog


def outputs(catalog: Catalog) -> list[OutputTensor]:
    return [OutputTensor(fqn, fqn, entry.dtype, entry.shape) for fqn, entry in catalog.tensors.items()]


def groups(images: SafetensorsImages) -> list[list[str]]:
    return [[tensor.fqn for tensor in image.tensors] for image in images]


class TestSplit:
    """Which tensor goes into which file."""

    def test_one_file_has_no_index(self) -> None:
        images = SafetensorsImages([tensor("a"), tensor("b")], max_shard_bytes=8)
        assert [image.name for image in images] == ["model.safetensors"]
        assert images.index() is None

    def test_without_a_limit_there_is_one_file(self) -> None:
        images = SafetensorsImages([tensor("a", 4000), tensor("b", 4000)], max_shard_bytes=None)
        assert groups(images) == [["a", "b"]]

    def test_names_count_from_one(self) -> None:
        images = SafetensorsImages([tensor("a"), tensor("b"), tensor("c")], max_shard_bytes=4, stem="x")
        assert [image.name for image in images] == [f"x-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
        assert images.index_name == "x.safetensors.index.json"

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 60))
    def test_as_huggingface_hub_divides(self, sizes: Sequence[int], limit: int) -> None:
        state = {f"t{n}": torch.zeros(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
        ours = SafetensorsImages(
            [tensor(name, value.numel(), BY_NAME["uint8"]) for name, value in state.items()],
            max_shard_bytes=limit,
        )
        theirs = split_torch_state_dict_into_shards(state, max_shard_size=limit)
        if all(sizes):  # theirs takes all empty tensors for one and the same
            assert groups(ours) == list(theirs.filename_to_tensors.values())
        assert sorted(name for group in groups(ours) for name in group) == sorted(state)

    def test_index(self) -> None:
        images = SafetensorsImages([tensor("b", 8), tensor("a", 8, BF16)], max_shard_bytes=8)
        assert json.loads(images.index() or b"") == {
            "metadata": {"total_parameters": 6, "total_size": 16},
            "weight_map": {
                "b": "model-00001-of-00002.safetensors",
                "a": "model-00002-of-00002.safetensors",
            },
        }
        assert list(json.loads(images.index() or b"")["weight_map"]) == ["a", "b"]


class TestBytes:
    """What is in a file."""

    def test_golden(self) -> None:
        (image,) = SafetensorsImages([tensor("a"), tensor("w\u00e9", 8)], max_shard_bytes=None)
        text = (
            '{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            '"w\u00e9":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'
        ).encode()
        padded = text + b" " * (-len(text) % 8)
        assert image.header == len(padded).to_bytes(8, "little") + padded
        assert image.size == len(image.header) + 12
        assert list(image.spans()) == [(0, image.size - 8), (image.size - 8, image.size)]

    def test_wider_elements_come_first_so_that_all_are_aligned(self) -> None:
        names = ("uint8", "float32", "bool", "float64", "bfloat16")
        tensors = [OutputTensor(name, name, BY_NAME[name], (3,)) for name in names]
        (image,) = SafetensorsImages(tensors, max_shard_bytes=None)
        assert [t.fqn for t in image.tensors] == ["float64", "float32", "bfloat16", "uint8", "bool"]
        assert all(hole.start % hole.dtype.itemsize == 0 for hole in image.holes)

    @pytest.mark.parametrize("name", [dtype.name for dtype in BY_SAFETENSORS.values()])
    def test_every_dtype_is_read_back(self, name: str, tmp_path: Path) -> None:
        dtype = BY_NAME[name]
        images = SafetensorsImages([OutputTensor("t", "t", dtype, (2, 6))], max_shard_bytes=None)
        (image,) = images
        (tmp_path / "x").write_bytes(image.header + bytes(image.size - len(image.header)))
        (stored,) = read_header(str(tmp_path / "x"), "x").tensors
        assert (stored.dtype, stored.shape) == (dtype, (2, 6))
        with safe_open(tmp_path / "x", "pt") as file:
            assert file.get_tensor("t").dtype == getattr(torch, name)
            assert file.metadata() == {"format": "pt"}

    def test_pairs_of_four_bit_values_count_twice(self) -> None:
        pairs = OutputTensor("t", "t", BY_NAME["float4_e2m1fn_x2"], (2, 3))
        assert (pairs.nbytes, pairs.num_values) == (6, 12)

    def test_what_has_no_place_is_listed(self) -> None:
        wide = [OutputTensor(n, n, BY_NAME["complex128"], (1,)) for n in "ab"]
        with pytest.raises(SourceError, match="2 of the tensors") as raised:
            SafetensorsImages([*wide, tensor("c")], max_shard_bytes=None)
        assert raised.value.problems == ("a: complex128", "b: complex128")

    @pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
    def test_names_that_the_format_cannot_hold(self, name: str) -> None:
        with pytest.raises(SourceError, match="1 of the names"):
            SafetensorsImages([tensor(name), tensor("b")], max_shard_bytes=None)

    def test_a_header_beyond_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(safetensors_images, "MAX_HEADER_BYTES", 100)
        with pytest.raises(SourceError, match="--max-shard-size"):
            SafetensorsImages([tensor("a"), tensor("b")], max_shard_bytes=None)


def test_stock_reader_gives_every_bit_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {
        "w": torch.randn(40, 33),
        "half": torch.randn(7, 5).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(9),
    }
    catalog = source(tensors, tmp_path / "in")
    for limit in (None, 100, 3000):
        out = tmp_path / f"out{limit}"
        write(SafetensorsImages(outputs(catalog), max_shard_bytes=limit), catalog, out)
        assert_bit_equal(load(out), tensors)
        assert open_model(str(out)).catalog.nbytes == catalog.nbytes


@pytest.mark.parametrize("shape", [(1000,), (50, 21), (1, 50, 7), (3, 2, 5, 9)])
def test_a_large_tensor_is_several_pieces(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_images, "_PIECE_BYTES", 256)
    tensors = {"small": torch.ones(2), "large": torch.randn(shape)}
    catalog = source(tensors, tmp_path / "in")
    images = SafetensorsImages(outputs(catalog), max_shard_bytes=None)
    assert len(list(images.holes("large"))) > 3
    assert len(list(images.holes("small"))) == 1
    write(images, catalog, tmp_path / "out", jobs=2)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), value) for name, value in tensors.items())
