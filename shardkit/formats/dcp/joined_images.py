"""Several checkpoints in folders of one directory, taken as one: an image set and a catalog.

Trainers that save model and optimizer apart leave two DCP directories. Names get the folder in front.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardkit.core.catalog import Catalog
from shardkit.formats.dcp.images import DcpImage, DcpImages
from shardkit.transfer.images import Hole, Piece, TensorHoles


def join_name(folder: str, name: str) -> str:
    """Return the name of something in a folder; "" is the directory itself."""
    return f"{folder}/{name}" if folder else name


def join_catalogs(catalogs: Mapping[str, Catalog]) -> Catalog:
    """Return one catalog of raw extents, given those of each folder; names of tensors and files are joined.

    What `subset` leaves out is left out.
    """
    joined = Catalog(format="dcp", directory="")
    for folder, catalog in catalogs.items():
        first, table = len(joined.files), catalog.chunks
        joined.files += [replace(file, name=join_name(folder, file.name)) for file in catalog.files]
        for fqn, entry in catalog.tensors.items():
            rows = slice(entry.chunk_ids.start, entry.chunk_ids.stop)
            joined.add_tensor_columns(
                join_name(folder, fqn),
                entry.dtype,
                entry.shape,
                [first + file for file in table.file[rows]],
                table.start[rows].tolist(),
                table.nbytes[rows].tolist(),
                table.regions(entry.chunk_ids),
            )
    return joined


@dataclass(frozen=True, slots=True)
class _JoinedImage:
    """An image in a folder."""

    name: str
    _image: DcpImage

    @property
    def size(self) -> int:
        return self._image.size

    def __len__(self) -> int:
        return len(self._image)

    def spans(self) -> Iterator[tuple[int, int]]:
        return self._image.spans()

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        return self._image.pieces(start, stop)

    def hole(self, index: int) -> Hole:
        return self._image.hole(index)


class JoinedImages:
    """The images of all folders; `shardkit.transfer.images.ImageSet`.

    Args:
        sets: images by folder. Their sources are named as in the joined catalog.
    """

    def __init__(self, sets: Mapping[str, DcpImages]) -> None:
        self._sets = sets
        self._images = [
            _JoinedImage(join_name(folder, image.name), image)
            for folder, images in sets.items()
            for image in images
        ]
        self.data_nbytes = [nbytes for images in sets.values() for nbytes in images.data_nbytes]
        self._first: dict[str, int] = {}
        for folder in sets:
            self._first[folder] = sum(len(sets[before]) for before in self._first)
        self._places = {
            join_name(folder, holes.fqn): (folder, holes.fqn)
            for folder, images in sets.items()
            for holes in images.tensors()
        }

    def __iter__(self) -> Iterator[_JoinedImage]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> _JoinedImage:
        return self._images[index]

    def tensors(self) -> Iterator[TensorHoles]:
        """Yield what is known of each tensor's holes together."""
        for folder, images in self._sets.items():
            for holes in images.tensors():
                yield holes._replace(fqn=join_name(folder, holes.fqn))

    def holes(self, fqn: str) -> Iterator[tuple[int, Hole]]:
        """Yield (image index, hole) of every chunk of a tensor."""
        folder, name = self._places[fqn]
        for index, hole in self._sets[folder].holes(name):
            yield self._first[folder] + index, hole
