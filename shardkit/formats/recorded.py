"""Checksums that a manifest records of a source, so that its bytes can be checked as they move."""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardkit.core.catalog import Catalog, Checksums, SourceFile, TensorEntry
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError, UsageError
from shardkit.files import manifest, storage
from shardkit.files.home import home_of
from shardkit.formats.registry import directory_of
from shardkit.transfer.checks import Entry

_SAFETENSORS = ".safetensors"
_ANOTHER = "name the manifest of this source, or leave --source-manifest out"
_WAYS_OUT = "use another copy of it; if you changed it on purpose, add --check-source off"


@dataclass(slots=True, kw_only=True)
class SourceManifests:
    """The manifests that a source is compared with."""

    paths: list[str] = field(default_factory=list)
    """Manifests that tensors are compared with."""
    warnings: list[str] = field(default_factory=list)
    """Why other manifests were not used."""
    files: dict[str, int] = field(default_factory=dict)
    """Real path of a listed file whose size is as recorded -> its CRC-32."""

    def crc_of(self, path: str) -> int | None:
        """Return the CRC-32 that a file should have; None if none is recorded."""
        return self.files.get(storage.realpath(path)) if self.files else None

    def check_copies(self, copies: Iterable[tuple[str, str, int | None]]) -> None:
        """Refuse copied files that are not what was recorded.

        Args:
            copies: name, path and CRC-32 of each.

        Raises:
            IntegrityError: naming all of them.
        """
        problems = [
            f"{escape(name)}: its bytes have CRC-32 {crc:08x}, the manifest records {recorded:08x}"
            for name, path, crc in copies
            if crc is not None and (recorded := self.crc_of(path)) not in (None, crc)
        ]
        IntegrityError.raise_for(
            problems, "files beside the weights are not what the source's manifest says", hint=_WAYS_OUT
        )


class _ReadManifest(NamedTuple):
    """A manifest, and the directory that its names are relative to."""

    content: manifest.Manifest
    home: str
    path: str


def add_checksums(catalog: Catalog, path: str) -> None:
    """Give files that record no CRC-32 the checksums of their manifests, if there are any, and if chunks lie in such files.

    Args:
        catalog: of raw extents; its files get checksums.
        path: the source, a directory or a file.

    Raises:
        IntegrityError: files have the recorded sizes but other tensors.
        ResourceError: a manifest may not be read.
    """
    if any(_lacks(catalog.files[number]) for number in set(catalog.chunks.file)):
        find_manifests([catalog], path)


def find_manifests(
    catalogs: Sequence[Catalog],
    path: str,
    *,
    manifest_path: str | os.PathLike[str] | None = None,
    check_source: bool = True,
) -> SourceManifests:
    """Give files that record no CRC-32 the checksums of their manifests.

    A manifest lies in a directory (`shardkit.json`) or else beside it (`<path>.shardkit.json`). A file of another size
    than recorded is not compared: the manifest is about another file.

    Args:
        catalogs: of raw extents; their files get checksums.
        path: the source, a directory or a file.
        manifest_path: a manifest of the source that lies elsewhere; it is used instead, and must fit.
        check_source: False looks for no manifest.

    Returns:
        The manifests that were used, and why others were not.

    Raises:
        UsageError: `manifest_path` without `check_source`.
        SourceError: `manifest_path` is missing, or is not about this source.
        IntegrityError: `manifest_path` is not what was written; or files have the recorded sizes but other tensors.
        ResourceError: a manifest may not be read.
    """
    manifests = SourceManifests()
    if not check_source:
        if manifest_path is not None:
            raise UsageError("--source-manifest is for comparing, and --check-source is off")
        return manifests
    homes = [home_of(directory_of(path)), *(catalog.directory for catalog in catalogs if catalog.directory)]
    homes = list(dict.fromkeys(storage.realpath(home) for home in homes))
    if manifest_path is not None:
        read = _read_given(os.fspath(manifest_path), homes.pop(0))
        _check_fits(read, catalogs)
        _take(read, catalogs, manifests)
    for home in homes:
        try:
            home_manifest = _read_beside(home)
        except SourceError as error:
            manifests.warnings.append(f"the source is not compared with its manifest: {error.message}")
            continue
        if home_manifest is not None:
            _take(home_manifest, catalogs, manifests)
    return manifests


def _read_given(path: str, source: str) -> _ReadManifest:
    if not storage.lexists(path):
        raise SourceError(f"{escape(path)}: no such file", hint=_ANOTHER)
    content = manifest.read_file(path, path)
    return _ReadManifest(
        content, source if storage.isdir(source) else os.path.dirname(source) or os.curdir, path
    )


def _read_beside(home: str) -> _ReadManifest | None:
    """Return the manifest in a directory, or else the one beside it; for a file the order is reversed."""
    is_directory = storage.isdir(home)
    inside = os.path.join(home if is_directory else os.path.dirname(home), manifest.NAME)
    sidecar = manifest.sidecar_of(home)
    for path in (inside, sidecar) if is_directory else (sidecar, inside):
        if storage.lexists(path):
            directory = home if is_directory else os.path.dirname(home)
            content = manifest.read(directory) if path == inside else manifest.read_file(path, path)
            return None if content is None else _ReadManifest(content, directory, path)
    return None


def _listed(read: _ReadManifest) -> dict[str, manifest.SavedFile]:
    """Return each file that a manifest lists, by real path."""
    files = manifest.all_files(read.content)
    return {storage.realpath(os.path.join(read.home, file.name)): file for file in files}


def _check_fits(read: _ReadManifest, catalogs: Iterable[Catalog]) -> None:
    """Refuse a manifest that a person gave if it is about other files."""
    sizes, home = {path: file.size for path, file in _listed(read).items()}, storage.realpath(read.home)
    problems = dict[str, None]()
    for catalog in catalogs:
        for file in catalog.files:
            path = storage.realpath(file.path)
            if path not in sizes and (not file.is_raw or not path.startswith(os.path.join(home, ""))):
                continue  # it is read from beside the source
            if path not in sizes:
                problems[f"{escape(file.name)}: it is not listed"] = None
            elif file.is_raw and sizes[path] != file.size:
                problems[f"{escape(file.name)}: {file.size} bytes, the manifest lists {sizes[path]}"] = None
    message = f"{escape(read.path)} is not a manifest of this source"
    SourceError.raise_for(list(problems), message, hint=_ANOTHER)


def _take(read: _ReadManifest, catalogs: Iterable[Catalog], manifests: SourceManifests) -> None:
    """Give files the checksums of a manifest."""
    listed, tensors = _listed(read), manifest.all_tensors(read.content)
    for path, file in listed.items():
        crc = manifest.crc_of(file)
        if crc is not None and storage.isfile(path) and storage.getsize(path) == file.size:
            manifests.files.setdefault(path, crc)
    for catalog in catalogs:
        _check_headers(catalog, listed, tensors)
    if any([_add_checksums(catalog, listed, tensors) for catalog in catalogs]):
        manifests.paths.append(read.path)


def unlike_stored(
    tensors: Mapping[str, manifest.DescribedTensor], catalog: Catalog
) -> Iterator[tuple[str, manifest.DescribedTensor, TensorEntry | None]]:
    """Yield each tensor that a manifest lists, and that is stored with another dtype or shape; None if it is not stored."""
    for fqn, description in tensors.items():
        entry = catalog.tensors.get(fqn)
        if entry is None or (description.dtype, description.shape) != (entry.dtype.name, entry.shape):
            yield fqn, description, entry


def _check_headers(
    catalog: Catalog,
    listed: Mapping[str, manifest.SavedFile],
    tensors: Mapping[str, manifest.DescribedTensor],
) -> None:
    """Refuse safetensors files whose headers differ from what was recorded: a header has no checksum of its own.

    This checks only if the manifest is about exactly these files: each is there, with its size.
    """
    files = {storage.realpath(file.path): file for file in catalog.files}
    weights = {path for path in listed if path.endswith(_SAFETENSORS)}
    if weights != files.keys() or any(listed[path].size != file.size for path, file in files.items()):
        return
    problems = []
    for fqn, description, entry in unlike_stored(tensors, catalog):
        if entry is None:
            problems.append(f"{escape(fqn)}: recorded, and not in the files")
        else:
            stored = f"{entry.dtype.name} {list(entry.shape)}"
            recorded = f"{description.dtype} {list(description.shape)}"
            problems.append(f"{escape(fqn)}: {stored}, the manifest records {escape(recorded)}")
    names = ", ".join(escape(file.name) for file in catalog.files[:3])
    IntegrityError.raise_for(
        problems,
        f"{names}{', ...' if len(files) > 3 else ''}: the tensors differ from those that the source's manifest records",
        hint=_WAYS_OUT,
    )


def _lacks(file: SourceFile) -> bool:
    """True for a file that is read as it lies on disk, and does not record the CRC-32 of every storage."""
    return file.is_raw and (file.checksums is None or 0 in file.checksums.crcs)


def _add_checksums(
    catalog: Catalog,
    listed: Mapping[str, manifest.SavedFile],
    tensors: Mapping[str, manifest.DescribedTensor],
) -> bool:
    """Give files of a catalog that lack CRC-32s those of a manifest; True if any were added."""
    lacking: dict[int, manifest.SavedFile] = {}
    for number in sorted({*catalog.chunks.file}):  # of another file other processes read what they look at
        file = catalog.files[number]
        if _lacks(file):
            entry = listed.get(storage.realpath(file.path))
            if entry is not None and entry.size == file.size:
                lacking[number] = entry
    if not lacking:
        return False
    of_tensors, chunks = _tensor_rows(catalog, tensors, lacking)
    was_taken = False
    for number, entry in lacking.items():
        rows = _DisjointRows()
        sums = catalog.files[number].checksums
        own_rows = [] if sums is None else list(map(Entry, sums.starts, sums.stops, sums.crcs))
        rows.add(row for row in own_rows if row.crc)
        num_own = len(rows.rows)
        rows.add(_extents(entry))
        rows.add(of_tensors.get(number, ()))
        if len(rows.rows) > num_own:
            was_taken = True
            rows.add(row for row in own_rows if not row.crc)
            rows.fill(chunks.get(number, ()))
            rows.fill([Entry(0, catalog.files[number].size, 0)])  # so that every byte read has a row
            checksums = Checksums.of((row.start, row.stop - row.start, row.crc) for row in rows.rows)
            catalog.files[number] = replace(catalog.files[number], checksums=checksums)
    return was_taken


def _extents(file: manifest.SavedFile) -> Iterator[Entry]:
    """Yield the parts of tensors that have a CRC-32 in a file's entry."""
    extents = file.extents if isinstance(file, manifest.ListedFile) else None
    for start, nbytes, crc in extents or ():
        if nbytes and start + nbytes <= file.size:
            yield Entry(start, start + nbytes, crc)


def _tensor_rows(
    catalog: Catalog, tensors: Mapping[str, manifest.DescribedTensor], files: Mapping[int, object]
) -> tuple[dict[int, list[Entry]], dict[int, list[Entry]]]:
    """Return two dicts by file: tensors of one chunk that have a CRC-32 in a manifest, and all chunks."""
    table = catalog.chunks
    recorded: dict[int, list[Entry]] = {}
    chunks: dict[int, list[Entry]] = {}
    for fqn, entry in catalog.tensors.items():
        description = tensors.get(fqn)
        for row in entry.chunk_ids:
            number, start, nbytes = table.file[row], table.start[row], table.nbytes[row]
            if number in files and nbytes:
                chunks.setdefault(number, []).append(Entry(start, start + nbytes, 0))
                if (
                    entry.num_chunks == 1
                    and description is not None
                    and description.crc32 is not None
                    and (description.dtype, description.shape) == (entry.dtype.name, entry.shape)
                    and nbytes == entry.nbytes
                ):
                    recorded.setdefault(number, []).append(Entry(start, start + nbytes, description.crc32))
    return recorded, chunks


class _DisjointRows:
    """Rows of a file that do not overlap; the first to come stays."""

    def __init__(self) -> None:
        self.rows: list[Entry] = []

    def add(self, rows: Iterable[Entry]) -> None:
        """Add the rows that overlap nothing."""
        for row in sorted(rows):
            place = bisect_left(self.rows, row)
            if self._stop_before(place) <= row.start and self._start_from(place) >= row.stop:
                insort(self.rows, row)

    def fill(self, rows: Iterable[Entry]) -> None:
        """Add the parts of some rows that nothing covers."""
        for row in sorted(rows):
            start = row.start
            while start < row.stop:
                place = bisect_left(self.rows, (start + 1,))
                start = max(start, self._stop_before(place))
                stop = min(row.stop, self._start_from(place))
                if start < stop:
                    self.rows.insert(place, Entry(start, stop, row.crc))
                start = max(start, stop)

    def _stop_before(self, place: int) -> int:
        return self.rows[place - 1].stop if place else 0

    def _start_from(self, place: int) -> int:
        return self.rows[place].start if place < len(self.rows) else 1 << 62
