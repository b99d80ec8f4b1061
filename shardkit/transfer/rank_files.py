"""Images of rank files: a header, then holes for regions of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, flat_offset
from shardkit.files.digest import crc32
from shardkit.transfer.images import Hole, ImageList, Piece, TensorHoles


class PlacedRegion(NamedTuple):
    """A region of a tensor in a file."""

    fqn: str
    """The stored name."""
    source: str
    """The name in the source catalog."""
    dtype: DType
    """The dtype in the file."""
    shape: Shape
    """Region of the whole tensor, in elements."""
    region: Region

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.region.num_elements * self.dtype.itemsize


class Content(NamedTuple):
    """The content of one file."""

    name: str
    header: bytes
    placed: Sequence[PlacedRegion]
    """One or more, in the order of their bytes."""


class _HoleFrame(NamedTuple):
    """Literal bytes before a hole; none after it."""

    prefix: bytes
    prefix_crc: int

    def suffix(self, data_crc: int, /) -> bytes:
        """Return no bytes."""
        return b""


@dataclass(frozen=True, slots=True)
class RankImage:
    """One file."""

    name: str
    size: int
    frames: tuple[_HoleFrame, ...]
    holes: tuple[Hole, ...]
    placed: tuple[PlacedRegion, ...]

    def __len__(self) -> int:
        return len(self.holes)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of every piece."""
        for frame, hole in zip(self.frames, self.holes, strict=True):
            yield hole.start - len(frame.prefix), hole.start + hole.nbytes

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces `start .. stop`."""
        for frame, hole, placed in zip(
            self.frames[start:stop], self.holes[start:stop], self.placed[start:stop], strict=True
        ):
            first = flat_offset(hole.region.offsets, placed.shape)
            yield Piece(hole.start - len(frame.prefix), frame, hole.fqn, first, hole.nbytes, hole.dtype)

    def hole(self, index: int) -> Hole:
        """Return the hole of a piece."""
        return self.holes[index]


class RankImages(ImageList[RankImage]):
    """The files of all ranks."""

    def __init__(self, contents: Sequence[Content]) -> None:
        """Place every region."""
        self.images = [_make_image(content) for content in contents]
        self.data_nbytes = [sum(hole.nbytes for hole in image.holes) for image in self.images]
        self._holes: dict[str, list[tuple[int, Hole]]] = {}
        self._placed: dict[str, PlacedRegion] = {}
        for number, image in enumerate(self.images):
            for placed, hole in zip(image.placed, image.holes, strict=True):
                self._holes.setdefault(placed.fqn, []).append((number, hole))
                self._placed.setdefault(placed.fqn, placed)

    def stored(self) -> Iterator[PlacedRegion]:
        """Yield each stored tensor once, as its first region."""
        yield from self._placed.values()

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield the summary of each tensor's holes."""
        for fqn, placed in self._placed.items():
            holes = [hole for _, hole in self._holes[fqn]]
            sizes = tuple(dict.fromkeys(hole.region.sizes for hole in holes))
            nbytes = sum(hole.nbytes for hole in holes)
            yield TensorHoles(fqn, placed.source, sizes, placed.dtype, nbytes)

    def holes(self, fqn: str) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of every region of a tensor, by file."""
        yield from self._holes[fqn]


def _make_image(content: Content) -> RankImage:
    header, holes, offset = content.header, list[Hole](), len(content.header)
    for placed in content.placed:
        holes.append(Hole(placed.source, placed.region, placed.dtype, offset, placed.nbytes))
        offset += placed.nbytes
    frames = (_HoleFrame(header, crc32(header)), *[_HoleFrame(b"", 0)] * (len(holes) - 1))
    return RankImage(content.name, offset, frames, tuple(holes), tuple(content.placed))
