"""Legacy `.bin` weights: bytes of every kind of tensor, and refusals."""

from __future__ import annotations

import os
import warnings

import pytest

import shardkit
from shardkit.core.catalog import ignore_read
from shardkit.errors import SourceError
from shardkit.formats.hub.directory import open_model
from shardkit.formats.torchsave.bin import read_bin
from tests.bits import raw

torch = pytest.importorskip("torch")


def plain_bytes(tensor):
    return raw(tensor.detach().resolve_conj().resolve_neg())


DECODED = {"transposed", "expanded", "empty", "conj", "negative", "negative_bf16", "both"}
"""Tensors whose bytes do not lie in the file in their order; the others are read from where they lie."""


def state_dict():
    torch.manual_seed(0)
    base = torch.randn(4, 6)
    return {
        "dense": base,
        "shared": base[1:3],
        "transposed": base.t(),
        "expanded": torch.ones(1, 3).expand(2, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 5),
        "bool": torch.tensor([True, False]),
        "bf16": torch.randn(3).bfloat16(),
        "fp8": torch.randn(3).to(torch.float8_e4m3fn),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "negative_bf16": torch._neg_view(torch.randn(2, 3).bfloat16()).t(),
        "both": torch._neg_view(torch.randn(3, dtype=torch.complex128).conj()),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "step": 3,
        "nested": {"a": 1},
    }


def test_every_kind_of_tensor(tmp_path):
    expected = state_dict()
    path = str(tmp_path / "pytorch_model.bin")
    torch.save(expected, path)
    content = read_bin(path, "pytorch_model.bin")
    assert content.objects == ("step", "nested")
    assert [tensor.fqn for tensor in content.tensors] == list(expected)[:-2]
    for found in content.tensors:
        tensor = expected[found.fqn]
        assert (found.shape, f"torch.{found.dtype.name}") == (tuple(tensor.shape), str(tensor.dtype))
        assert (found.start is None) == (found.decoded is not None) == (found.fqn in DECODED)
        if found.decoded is None:
            with open(path, "rb") as file:
                file.seek(found.start)
                assert file.read(tensor.nbytes) == plain_bytes(tensor)
            continue
        data = found.decoded.decode(ignore_read)
        assert data.readonly
        assert data.contiguous
        assert bytes(data) == plain_bytes(tensor)
    assert content.size == os.path.getsize(path)


def test_a_number_is_no_name(tmp_path):
    """As text it could be that of another tensor, whose values it would take."""
    path = str(tmp_path / "pytorch_model.bin")
    torch.save({"1": torch.ones(2), 1: torch.zeros(2)}, path)
    content = read_bin(path, "pytorch_model.bin")
    assert [tensor.fqn for tensor in content.tensors] == ["1"]
    assert content.objects == ("1",)


def test_in_a_model_directory(tmp_path):
    torch.save({"a": torch.ones(2, 2), "n": 1}, tmp_path / "pytorch_model.bin")
    model = open_model(str(tmp_path))
    catalog = model.catalog
    assert (catalog.format, catalog.objects, catalog.nbytes) == ("torch-bin", ("n",), 16)
    (file,) = catalog.files
    path = tmp_path / "pytorch_model.bin"
    assert (file.name, file.path, file.size) == (path.name, str(path), path.stat().st_size)
    start = catalog.chunks.start[0]
    assert path.read_bytes()[start : start + 16] == plain_bytes(torch.ones(2, 2))
    torch.save({"a": torch.zeros(2, 2), "n": 1}, tmp_path / "pytorch_model.bin")
    assert open_model(str(tmp_path)).identity != model.identity


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "x.bin")
    with pytest.raises(SourceError, match=r"x\.bin: holds more than tensors.*posix\.mkdir") as caught:
        read_bin("x.bin", "x.bin")
    assert "weights_only" not in str(caught.value)
    assert not os.path.exists("ran")


def test_damaged(tmp_path):
    path = tmp_path / "x.bin"
    torch.save({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    for stop in (0, 1, 4, 50, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:stop])
        with pytest.raises(SourceError, match=r"^x\.bin: .*\n?") as caught:
            read_bin(str(path), "x.bin")
        assert "download it again" in caught.value.hint


def test_not_a_plain_state_dict(tmp_path):
    path = str(tmp_path / "x.bin")
    torch.save([1], path)
    with pytest.raises(SourceError, match="expected a state dict, found list"):
        read_bin(path, "x.bin")
    torch.save({"state_dict": {"a": torch.ones(1)}, "epoch": 1}, path)
    with pytest.raises(SourceError, match="below 'state_dict'"):
        read_bin(path, "x.bin")
    for entries, names in (
        ({"net": {"a": torch.ones(1)}, "epoch": 1}, "net, epoch"),
        ({0: torch.ones(1)}, "0"),
    ):
        torch.save(entries, path)
        with pytest.raises(SourceError, match=f"no name in it is that of a tensor: {names}\n"):
            read_bin(path, "x.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"s": torch.ones(2, 2).to_sparse(), "m": torch.ones(2, device="meta")}, path)
    with pytest.raises(
        SourceError, match="1 of 2 entries are tensors without plain bytes\n  m: a tensor on the meta device"
    ):
        read_bin(path, "x.bin")


def test_a_file_from_before_the_zip_format_is_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin: the format from before torch 1\.6") as caught:
        shardkit.inspect(tmp_path)
    assert "save it again" in caught.value.hint
