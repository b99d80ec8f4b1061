"""safetensors files of a Hub model, as images with holes.

Tensors are divided over files as transformers and huggingface_hub do: in order, each into the file under
way until that one would become too large; a tensor larger than the limit gets a file of its own. Within
a file wider elements come first, so that each tensor starts at a multiple of its element: readers
make views of the bytes as they lie.

Source: huggingface_hub 2.4, serialization/_base.py, split_state_dict_into_shards_factory; safetensors 0.8,
safetensors/src/tensor.rs, `prepare`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, blocks, flat_offset, full_region
from shardkit.core.text import MIB, escape
from shardkit.errors import SourceError
from shardkit.files.digest import crc32
from shardkit.files.strict_json import is_unicode
from shardkit.formats.hub.safetensors import MAX_HEADER_BYTES
from shardkit.transfer.images import Hole, Piece, TensorHoles

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 8
_PIECE_BYTES = 64 * MIB  # a larger tensor is several pieces, which several threads may fill


class OutputTensor(NamedTuple):
    """A tensor to be written."""

    fqn: str
    """The name in the file."""
    source: str
    """The name in the source catalog."""
    dtype: DType
    """What it is to be stored as."""
    shape: Shape
    """As torch counts elements."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def num_values(self) -> int:
        """Numbers in it: an element of float4_e2m1fn_x2 holds two."""
        return prod(_header_shape(self))


class _Frame(NamedTuple):
    """The header before a file's first tensor; nothing stands around the others."""

    prefix: bytes
    prefix_crc: int

    def suffix(self, data_crc: int, /) -> bytes:
        """Return no bytes."""
        return b""


_NO_FRAME = _Frame(b"", 0)


@dataclass(frozen=True, slots=True)
class SafetensorsImage:
    """One file."""

    name: str
    size: int
    header: bytes
    """Everything before the data: the length, the JSON text and blanks."""
    tensors: tuple[OutputTensor, ...]
    """In the order of their bytes."""
    holes: tuple[Hole, ...]
    """One or more for each tensor, in file order and without gaps."""

    def __len__(self) -> int:
        return len(self.holes)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of every piece."""
        start = 0  # the header comes with the first
        for hole in self.holes:
            yield start, hole.start + hole.nbytes
            start = hole.start + hole.nbytes

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces `start .. stop`."""
        shapes = {tensor.source: tensor.shape for tensor in self.tensors}
        for index, hole in enumerate(self.holes[start:stop], start):
            frame = _NO_FRAME if index else _Frame(self.header, crc32(self.header))
            first = flat_offset(hole.region.offsets, shapes[hole.fqn])
            yield Piece(hole.start - len(frame.prefix), frame, hole.fqn, first, hole.nbytes, hole.dtype)

    def hole(self, index: int) -> Hole:
        """Return the hole of a piece."""
        return self.holes[index]


class SafetensorsImages:
    """The weight files of one model."""

    def __init__(
        self, tensors: Sequence[OutputTensor], *, max_shard_bytes: int | None, stem: str = "model"
    ) -> None:
        """Place every tensor.

        Args:
            tensors: with distinct names, in the order in which they are divided over files.
            max_shard_bytes: most bytes of tensors in one file; None makes a single one.
            stem: what the file names begin with.

        Raises:
            SourceError: dtypes or names that safetensors cannot hold, or a header that is too large.
        """
        _check_writable(tensors)
        groups = _split(tensors, max_shard_bytes)
        self.stem = stem
        self.images = [
            _make_image(_file_name(stem, number, len(groups)), group) for number, group in enumerate(groups)
        ]
        self.data_nbytes = [sum(tensor.nbytes for tensor in image.tensors) for image in self.images]
        self._stored: dict[str, OutputTensor] = {}
        self._holes: dict[str, list[tuple[int, Hole]]] = {}
        for number, image in enumerate(self.images):
            holes = iter(image.holes)
            for tensor in image.tensors:
                self._stored[tensor.fqn] = tensor
                self._holes[tensor.fqn] = [(number, next(holes)) for _ in _regions(tensor)]

    def __iter__(self) -> Iterator[SafetensorsImage]:
        return iter(self.images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> SafetensorsImage:
        return self.images[index]

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield what is known of each tensor's holes together."""
        for fqn, tensor in self._stored.items():
            sizes = tuple({hole.region.sizes: None for _, hole in self._holes[fqn]})
            yield TensorHoles(fqn, tensor.source, sizes, tensor.dtype, tensor.nbytes)

    def holes(self, fqn: str) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of a tensor, in the order of its bytes."""
        yield from self._holes[fqn]

    def index(self) -> bytes | None:
        """Return the index as transformers writes it; None where a single file needs none."""
        if len(self.images) == 1:
            return None
        content = {
            "metadata": {
                "total_parameters": sum(tensor.num_values for tensor in self._stored.values()),
                "total_size": sum(self.data_nbytes),
            },
            "weight_map": {tensor.fqn: image.name for image in self.images for tensor in image.tensors},
        }
        return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"

    @property
    def index_name(self) -> str:
        """File name of the index."""
        return f"{self.stem}.safetensors.index.json"


def _file_name(stem: str, number: int, total: int) -> str:
    return f"{stem}.safetensors" if total == 1 else f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"


def _split(tensors: Sequence[OutputTensor], limit: int | None) -> list[list[OutputTensor]]:
    """Divide tensors over files, the way that the module's docstring says."""
    if limit is None or not tensors:
        return [list(tensors)]
    groups, current, size = list[list[OutputTensor]](), list[OutputTensor](), 0
    for tensor in tensors:
        if tensor.nbytes > limit:
            groups.append([tensor])
            continue
        if size + tensor.nbytes > limit:
            groups.append(current)
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    return [*groups, current] if current else groups


def _make_image(name: str, tensors: Sequence[OutputTensor]) -> SafetensorsImage:
    ordered = tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize))  # stable
    header = _header(name, ordered)
    holes, start = list[Hole](), len(header)
    for tensor in ordered:
        for region in _regions(tensor):
            first = start + flat_offset(region.offsets, tensor.shape) * tensor.dtype.itemsize
            nbytes = region.num_elements * tensor.dtype.itemsize
            holes.append(Hole(tensor.source, region, tensor.dtype, first, nbytes))
        start += tensor.nbytes
    return SafetensorsImage(name, start, header, ordered, tuple(holes))


def _regions(tensor: OutputTensor) -> list[Region]:
    """Return the contiguous parts that a tensor is filled in."""
    if tensor.nbytes <= _PIECE_BYTES:
        return [full_region(tensor.shape)]
    return list(blocks(tensor.shape, _PIECE_BYTES // tensor.dtype.itemsize))


def _header(name: str, tensors: Sequence[OutputTensor]) -> bytes:
    content: dict[str, object] = {_METADATA: {"format": "pt"}}
    start = 0
    for tensor in tensors:
        content[tensor.fqn] = {
            "dtype": tensor.dtype.safetensors,
            "shape": list(_header_shape(tensor)),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise SourceError(
            f"{escape(name)}: a header of {len(text)} bytes for {len(tensors)} tensors, safetensors allows "
            f"{MAX_HEADER_BYTES}",
            hint="a smaller --max-shard-size puts fewer tensors into each file",
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _header_shape(tensor: OutputTensor) -> Shape:
    """Return the shape as safetensors counts: 4-bit values one by one, torch's float4 in pairs."""
    if tensor.dtype.safetensors == "F4" and tensor.shape:
        return (*tensor.shape[:-1], tensor.shape[-1] * 2)
    return tensor.shape


def _check_writable(tensors: Sequence[OutputTensor]) -> None:
    unknown = [
        f"{escape(tensor.fqn)}: {tensor.dtype.name}" for tensor in tensors if tensor.dtype.safetensors is None
    ]
    if unknown:
        raise SourceError(
            f"safetensors has no way to hold {len(unknown)} of the tensors",
            problems=unknown,
            hint="leave them out with --exclude",
        )
    refused = [
        escape(tensor.fqn) for tensor in tensors if tensor.fqn == _METADATA or not is_unicode(tensor.fqn)
    ]
    if refused:
        raise SourceError(
            f"safetensors cannot hold {len(refused)} of the names",
            problems=refused,
            hint="give them others with --rename",
        )
