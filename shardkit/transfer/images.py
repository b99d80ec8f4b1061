"""Files to be written: their size, their literal bytes and their holes.

An image is a sequence of pieces in file order. A piece consists of literal bytes, a hole for a region of a tensor, and
more literal bytes that may depend on the CRC-32 of the hole's bytes. Between pieces there may be gaps of zero bytes.
Pieces are created on demand: the literal bytes of a 1,024-rank checkpoint would take a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape


class Hole(NamedTuple):
    """A place for a region of a tensor, row-major and contiguous."""

    fqn: str
    """The tensor's name in the source catalog."""
    region: Region
    """Region of the whole tensor, in elements."""
    dtype: DType
    """The dtype of its bytes, after conversion."""
    start: int
    """First byte in the image."""
    nbytes: int


class Frame(Protocol):
    """The literal bytes around a hole."""

    @property
    def prefix(self) -> bytes:
        """The bytes before it."""

    @property
    def prefix_crc(self) -> int:
        """CRC-32 of `prefix`."""

    def suffix(self, data_crc: int, /) -> bytes:
        """Return the bytes after it, given the CRC-32 of the hole's bytes (0 where digests are off)."""


class Piece(NamedTuple):
    """A hole and the literal bytes around it; sufficient to fill a hole whose region is a run of its tensor.

    A checkpoint has as many pieces as chunks, so a piece is a flat tuple. `Image.hole` returns the region.
    """

    start: int
    """First byte of the frame's prefix in the image. The hole follows the prefix."""
    frame: Frame
    fqn: str
    """The tensor's name in the source catalog."""
    first: int
    """First element of the hole's region, counted row-major in the whole tensor."""
    nbytes: int
    """Bytes of the hole."""
    dtype: DType
    """Their dtype, after conversion."""


class Image(Protocol):
    """A file to write."""

    @property
    def name(self) -> str:
        """Bare file name."""

    @property
    def size(self) -> int:
        """Bytes of the finished file."""

    def __len__(self) -> int:
        """Number of pieces."""

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the end of every piece; cheaper than the pieces themselves."""

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield pieces `start .. stop` in file order."""

    def hole(self, index: int, /) -> Hole:
        """Return the hole of a piece, given its number."""


T = TypeVar("T")


class ImageList(Generic[T]):
    """A sequence of images; the base of `ImageSet`s."""

    images: list[T]

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[T]:
        return iter(self.images)

    def __getitem__(self, index: int) -> T:
        return self.images[index]


class TensorHoles(NamedTuple):
    """A summary of all holes of one stored tensor."""

    fqn: str
    """The stored name."""
    source: str
    """The name in the source catalog."""
    sizes: tuple[Shape, ...]
    """The distinct sizes of its regions, in elements."""
    dtype: DType
    """The dtype of its bytes, after conversion."""
    nbytes: int
    """Bytes of all its holes."""


class ImageSet(Protocol):
    """The files of one output."""

    def __len__(self) -> int:
        """Number of images."""

    def __iter__(self) -> Iterator[Image]:
        """Yield the images."""

    def __getitem__(self, index: int, /) -> Image:
        """Return an image."""

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield every stored tensor."""

    def holes(self, fqn: str, /) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of every hole of a stored tensor."""
