"""Compare some bytes of a source, to make sure that ranks see the same weights; headers of fine-tunes are equal."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardkit.core.catalog import Catalog, FileStamp, SourceFile
from shardkit.core.text import escape
from shardkit.core.threads import at_once
from shardkit.errors import ResourceError
from shardkit.files import storage
from shardkit.files.location import location_of
from shardkit.training.fill.reading import Supply, Weights
from shardkit.transfer.sources import changed

_Item = TypeVar("_Item")

_NUM_PLACES = 64  # the minimum; there are fewer than twice as many
_PLACE_NBYTES = 256


@contextlib.contextmanager
def keep_files_open(supply: Supply) -> Iterator[Supply]:
    """Keep opened files open until `SourceFiles` uses them, or until the end of the context."""
    opened, weights = dict[str, int](), supply.weights
    try:
        yield supply if weights is None else replace(supply, weights=replace(weights, opened=opened))
    finally:
        for fd in opened.values():
            storage.close_fd(fd)


def versions(weights: Weights) -> str | None:
    """Return a digest of the versions of a source's objects in a store; None for other sources.

    Only these versions are read, so equal digests mean equal data.

    Raises:
        ResourceError: an object has been removed.
    """
    files = weights.catalog.files
    if not files or not all(location_of(file.path).has_versions for file in files):
        return None
    try:
        identities = [storage.stat(file.path).st_ino for file in files]  # of path and version
    except OSError as error:
        raise ResourceError(f"{escape(weights.path)}: {error.strerror}") from error
    return hashlib.sha256(repr(identities).encode()).hexdigest()


def take_samples(weights: Weights) -> str:
    """Return a digest of some bytes of weights.

    The places are derived from the weights' identity, so that ranks with equal identities read the same places.

    Args:
        weights: weights that this rank has opened, in `keep_files_open`.

    Raises:
        IntegrityError: a file was replaced since its headers were read.
        ResourceError: a file cannot be read.
    """
    digest, opened = hashlib.sha256(), weights.opened
    assert opened is not None
    places = [
        (weights.catalog.files[file], start, nbytes)
        for file, start, nbytes in _places(weights.catalog, weights.identity, weights.sampled_files)
    ]
    files = {source.path: source for source, _, _ in places}
    # All at once, because each open waits for storage over a network.
    at_once(partial(_open, opened=opened), files.values(), location_of(next(iter(files), "")).connections)
    try:
        for source, start, nbytes in places:
            storage.will_need(opened[source.path], start, nbytes)
        for source, start, nbytes in places:
            digest.update(storage.pread(opened[source.path], nbytes, start))
    except OSError as error:
        raise ResourceError(f"{escape(source.name)}: {error.strerror}") from error
    return digest.hexdigest()


def _open(source: SourceFile, opened: dict[str, int]) -> None:
    if source.path in opened:
        return
    try:
        fd = opened[source.path] = storage.open_fd(source.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        stamp = FileStamp.of(storage.fstat(fd))
    except OSError as error:
        raise ResourceError(f"{escape(source.name)}: {error.strerror}") from error
    if source.stamp not in (None, stamp):
        raise changed([source.name])


def _places(catalog: Catalog, identity: str, most_files: int) -> Iterator[tuple[int, int, int]]:
    """Yield (file, first byte, number of bytes) of pseudo-random places in the data of some files.

    The data is divided into parts, each of which has one place. If there are many chunks, a part is a run of chunks. If
    there are few, it is a piece of a chunk. If chunks are not known, files are divided instead.
    """
    table = catalog.chunks
    parts = [
        (table.file[row], table.start[row], table.nbytes[row])
        for row in range(len(table))
        if table.nbytes[row] and catalog.files[table.file[row]].is_raw
    ] or [(number, 0, file.size) for number, file in enumerate(catalog.files) if file.is_raw]
    files = set(_draw(sorted({file for file, _, _ in parts}), most_files, identity))
    parts = [part for part in parts if part[0] in files]
    pieces = -(-_NUM_PLACES // max(len(parts), 1))
    for index, (file, first, nbytes) in enumerate(_draw(parts, 2 * _NUM_PLACES - 1, identity)):
        for piece in range(pieces):
            start, stop = (first + nbytes * number // pieces for number in (piece, piece + 1))
            place = start + _number(identity, index, piece) % max(stop - start - _PLACE_NBYTES + 1, 1)
            yield file, place, min(_PLACE_NBYTES, stop - place)


def _draw(items: list[_Item], most: int, identity: str) -> Iterator[_Item]:
    """Yield items: all of them if there are at most `most`; else one of each run of them, at least half of `most`."""
    step = -(-len(items) // max(most, 1))
    for first in range(0, len(items) if most else 0, max(step, 1)):
        run = items[first : first + step]
        yield run[_number(identity, first) % len(run)]


def _number(identity: str, *places: int) -> int:
    """Return a pseudo-random number that depends only on the arguments, not on the machine or the version of Python."""
    return int.from_bytes(hashlib.sha256(f"{identity} {places}".encode()).digest()[:8], "little")
