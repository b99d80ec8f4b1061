"""Files to be written: their size, their literal bytes and their holes.

An image is a run of pieces in file order. A piece is literal bytes, a hole that waits for a region of a
tensor, and more literal bytes that may depend on the CRC-32 of what filled the hole. Between pieces
there may be gaps of zero bytes. Pieces are made when they are asked for: the literal bytes of a
1,024-rank checkpoint would take a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape


class Hole(NamedTuple):
    """A place for a region of a tensor, row-major and contiguous."""

    fqn: str
    """The tensor's name in the source catalog."""
    region: Region
    """In elements of the whole tensor."""
    dtype: DType
    """What the bytes are to be, after conversion."""
    start: int
    """First byte in the image."""
    nbytes: int


class Piece(NamedTuple):
    """Literal bytes, a hole, literal bytes."""

    start: int
    """First byte of `prefix` in the image; the hole follows the prefix."""
    prefix: bytes
    prefix_crc: int
    hole: Hole
    suffix_nbytes: int
    tail: PieceTail

    @property
    def stop(self) -> int:
        """End of the suffix in the image."""
        return self.hole.start + self.hole.nbytes + self.suffix_nbytes


class PieceTail(Protocol):
    """Makes the literal bytes after a hole."""

    def suffix(self, data_crc: int, /) -> bytes:
        """Return them, given the CRC-32 of the hole's bytes (0 where digests are off)."""
        ...


class Image(Protocol):
    """A file to be written."""

    @property
    def name(self) -> str:
        """Bare file name."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the finished file."""
        ...

    def __len__(self) -> int:
        """Number of pieces."""
        ...

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of every piece, cheaper than the pieces themselves."""
        ...

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield pieces `start .. stop` in file order."""
        ...


class TensorHoles(NamedTuple):
    """The holes of one stored tensor, taken together."""

    fqn: str
    """The stored name."""
    source: str
    """The name in the source catalog."""
    sizes: tuple[Shape, ...]
    """The distinct sizes of its regions, in elements."""
    dtype: DType
    """What its bytes are to be, after conversion."""
    nbytes: int
    """Bytes of all its holes."""


class ImageSet(Protocol):
    """The files of one output."""

    def __len__(self) -> int:
        """Number of images."""
        ...

    def __iter__(self) -> Iterator[Image]:
        """Yield the images."""
        ...

    def __getitem__(self, index: int, /) -> Image:
        """Return an image."""
        ...

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield every stored tensor."""
        ...

    def holes(self, fqn: str, /) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of every hole of a stored tensor."""
        ...
