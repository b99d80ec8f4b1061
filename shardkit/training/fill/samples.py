"""Some bytes of a source, by which ranks see that they have the same weights: all fine-tunes have equal headers."""

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

_NUM_PLACES = 64  # at least, and fewer than twice as many
_PLACE_NBYTES = 256


@contextlib.contextmanager
def kept_open(supply: Supply) -> Iterator[Supply]:
    """Keep files that are opened open until `SourceFiles` takes them, or until this is left."""
    opened, weights = dict[str, int](), supply.weights
    try:
        yield supply if weights is None else replace(supply, weights=replace(weights, opened=opened))
    finally:
        for fd in opened.values():
            storage.close_fd(fd)


def versions(weights: Weights) -> str | None:
    """Return a digest of the versions of a source's objects in a store, of which alone anything is read; None elsewhere.

    Raises:
        ResourceError: an object is gone.
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
    """Return a digest of some bytes of weights. Their identity says which: ranks that have the same read the same.

    Args:
        weights: opened by this rank, in `kept_open`.

    Raises:
        IntegrityError: one is not the file that was looked at.
        ResourceError: one cannot be read.
    """
    digest, opened = hashlib.sha256(), weights.opened
    assert opened is not None
    places = [
        (weights.catalog.files[file], start, nbytes)
        for file, start, nbytes in _places(weights.catalog, weights.identity, weights.sampled_files)
    ]
    files = {source.path: source for source, _, _ in places}
    # All at once: one by one, each is a wait on storage over a network.
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
    """Yield (file, first byte, bytes): one place, drawn at random, in each of many parts of the data of some files.

    The parts are runs of chunks, or pieces of each where they are few; of each file, where chunks are not known.
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
    """Yield all of some items; or at most so many, and at least half of that, one out of each run of them."""
    step = -(-len(items) // max(most, 1))
    for first in range(0, len(items) if most else 0, max(step, 1)):
        run = items[first : first + step]
        yield run[_number(identity, first) % len(run)]


def _number(identity: str, *places: int) -> int:
    """Return a number that the same content has everywhere, whatever the version of Python."""
    return int.from_bytes(hashlib.sha256(f"{identity} {places}".encode()).digest()[:8], "little")
