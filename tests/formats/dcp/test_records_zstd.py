"""Records that torch's ZStandard extension compressed; bombs, damage and missing modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from shardkit.errors import SourceError
from shardkit.formats.dcp import records
from shardkit.formats.dcp.directory import DcpDirectory, open_dcp
from tests.formats.dcp.samples import alter, assert_holds, open_catalog
from tests.formats.reading import read_tensor

zstandard = pytest.importorskip("zstandard")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "w": torch.arange(3000.0).reshape(60, 50),
    "t": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
    "scalar": torch.tensor(7),
    "none": torch.zeros(0, 2),
}


@pytest.fixture
def directory(tmp_path: Path) -> str:
    from torch.distributed.checkpoint._extension import ZStandard

    writer = dcp.FileSystemWriter(str(tmp_path / "c"), _extensions=[ZStandard()])
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    return str(tmp_path / "c")


def place_of(metadata: Metadata, fqn: str) -> tuple[MetadataIndex, Any]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == fqn)


def replace_record(directory: str, fqn: str, content: bytes) -> None:
    """Put other bytes behind a name, in a file of their own."""
    Path(directory, "__9_0.distcp").write_bytes(content)

    def change(metadata: Metadata) -> None:
        _, info = place_of(metadata, fqn)
        info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(content)

    alter(directory, change)


def test_every_tensor_is_decompressed(directory: str) -> None:
    opened = open_dcp(directory)
    catalog = opened.select(tuple(STATE))
    assert not any(catalog.files[file].is_raw for file in catalog.chunks.file)
    assert_holds(catalog, STATE)
    assert list(opened.check(tuple(STATE))) == []


def test_only_named_tensors_are_looked_at(directory: str) -> None:
    replace_record(directory, "w", b"not zstd")
    assert_holds(open_catalog(directory, records=("t",)), {"t": STATE["t"]})
    catalog = open_catalog(directory, records=("w",))
    with pytest.raises(SourceError, match=r"^w: __9_0\.distcp: zstd data at byte 0 is damaged"):
        read_tensor(catalog, "w")


def test_a_bomb_is_stopped(directory: str) -> None:
    replace_record(directory, "scalar", zstandard.ZstdCompressor().compress(bytes(1 << 28)))
    with pytest.raises(SourceError, match=r"scalar: __9_0\.distcp: .* decompress to more than the 65544"):
        read_tensor(open_catalog(directory, records=("scalar",)), "scalar")


def test_a_record_cut_short_names_tensor_and_file(directory: str) -> None:
    content = Path(directory, "__0_0.distcp").read_bytes()
    places: list[tuple[int, int]] = []

    def look(metadata: Metadata) -> None:
        _, info = place_of(metadata, "w")
        places.append((info.offset, info.length))

    alter(directory, look)
    ((start, length),) = places
    replace_record(directory, "w", content[start : start + length - 20])
    with pytest.raises(SourceError, match=r"^w: __9_0\.distcp"):
        read_tensor(open_catalog(directory, records=("w",)), "w")


def test_a_record_of_another_tensor_is_told(directory: str) -> None:
    def exchange(metadata: Metadata) -> None:
        (w, w_info), (t, t_info) = place_of(metadata, "w"), place_of(metadata, "t")
        metadata.storage_data[w], metadata.storage_data[t] = t_info, w_info

    alter(directory, exchange)
    with pytest.raises(SourceError, match=r"w: __0_0\.distcp: stored as bfloat16, \.metadata says float32"):
        read_tensor(open_catalog(directory, records=("w",)), "w")


def test_a_flipped_bit_of_the_tensor_is_found(directory: str) -> None:
    """Compressed again with one bit changed: only the record's own CRC-32 tells."""
    places: list[Any] = []
    alter(directory, lambda metadata: places.append(place_of(metadata, "w")[1]))
    content = Path(directory, "__0_0.distcp").read_bytes()[places[0].offset :][: places[0].length]
    record = bytearray(zstandard.ZstdDecompressor().decompressobj().decompress(content))
    record[record.index(STATE["w"].numpy().tobytes()) + 9] ^= 4
    replace_record(directory, "w", zstandard.ZstdCompressor().compress(bytes(record)))
    opened = open_dcp(directory)
    (line,) = opened.check(tuple(STATE))
    assert line.startswith("w: __9_0.distcp, record at byte 0: entry data/0 is damaged")
    with pytest.raises(SourceError, match=r"^w: "):
        read_tensor(opened.select(("w",)), "w")


def test_without_a_module_it_says_what_to_install(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(records, "import_module", missing)
    opened: DcpDirectory = open_dcp(directory)
    with pytest.raises(SourceError, match=r"stream\.zstd") as caught:
        opened.select(("w", "t"))
    assert caught.value.hint == "`pip install zstandard`"
    assert caught.value.problems == ("w: stream.zstd", "t: stream.zstd")


def test_the_standard_library_is_enough(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14's compression.zstd, or where that is not there one that behaves like it."""
    try:
        module = importlib.import_module("compression.zstd")
    except ImportError:
        module = LikeStandardLibrary

    def only(name: str) -> Any:
        if name != "compression.zstd":
            raise ImportError(name)
        return module

    monkeypatch.setattr(records, "import_module", only)
    assert_holds(open_catalog(directory, records=True), STATE)
    replace_record(directory, "scalar", zstandard.ZstdCompressor().compress(bytes(1 << 22))[:20])
    with pytest.raises(SourceError, match=r"^scalar: __9_0\.distcp: zstd data at byte 0 is damaged"):
        read_tensor(open_catalog(directory, records=("scalar",)), "scalar")


class LikeStandardLibrary:
    """The part of `compression.zstd` that is used, over the zstandard package."""

    ZstdError = zstandard.ZstdError

    class DecompressionParameter:
        window_log_max = 100

    class ZstdDecompressor:
        def __init__(self, options: dict[int, int]) -> None:
            assert options == {100: 27}
            self._inner = zstandard.ZstdDecompressor().decompressobj()
            self._left = b""

        @property
        def eof(self) -> bool:
            return self._inner.eof and not self._left

        @property
        def needs_input(self) -> bool:
            return not self._left and not self._inner.eof

        def decompress(self, data: bytes, max_length: int) -> bytes:
            self._left += self._inner.decompress(data) if data else b""
            piece, self._left = self._left[:max_length], self._left[max_length:]
            return piece
