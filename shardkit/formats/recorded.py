"""Give the files of a source the checksums that its manifest records, so that bytes are checked as they move."""

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
    """The manifests of a source that were found."""

    paths: list[str] = field(default_factory=list)
    """Manifests whose checksums are used."""
    warnings: list[str] = field(default_factory=list)
    """Why other manifests are not used."""
    files: dict[str, int] = field(default_factory=dict)
    """For each listed file of the recorded size: its real path -> its CRC-32."""

    def crc_of(self, path: str) -> int | None:
        """Return the recorded CRC-32 of a file, or None."""
        return self.files.get(storage.realpath(path)) if self.files else None

    def check_copies(self, copies: Iterable[tuple[str, str, int | None]]) -> None:
        """Refuse copied files whose bytes differ from what the manifests record.

        Args:
            copies: (name, path, CRC-32) of each.

        Raises:
            IntegrityError: naming all of them.
        """
        problems = [
            f"{escape(name)}: its bytes have CRC-32 {crc:08x}, the manifest records {recorded:08x}"
            for name, path, crc in copies
            if crc is not None and (recorded := self.crc_of(path)) not in (None, crc)
        ]
        IntegrityError.raise_for(
            problems, "files beside the weights differ from the source's manifest", hint=_WAYS_OUT
        )


class _ReadManifest(NamedTuple):
    """A manifest that was read."""

    content: manifest.Manifest
    home: str
    """The directory that its names are relative to."""
    path: str
    """Of the manifest itself."""


def add_checksums(catalog: Catalog, path: str) -> None:
    """Give files without a CRC-32 of their own the checksums of their manifests, if they hold chunks of the catalog.

    Args:
        catalog: of raw extents; its files get checksums.
        path: the source, a directory or a file.

    Raises:
        IntegrityError: files have the recorded sizes but other tensors.
        ResourceError: a manifest may not be read.
    """
    if any(_lacks_checksums(catalog.files[number]) for number in set(catalog.chunks.file)):
        find_manifests([catalog], path)


def find_manifests(
    catalogs: Sequence[Catalog],
    path: str,
    *,
    manifest_path: str | os.PathLike[str] | None = None,
    check_source: bool = True,
) -> SourceManifests:
    """Find the manifests of a source, and give files without a CRC-32 of their own the recorded checksums.

    A manifest is in the directory (`shardkit.json`) or else beside it (`<path>.shardkit.json`). A file whose size is not
    the recorded one gets no checksum: the manifest describes another file.

    Args:
        catalogs: of raw extents; their files get checksums.
        path: the source, a directory or a file.
        manifest_path: a manifest that the user named; it replaces the source's own, and must describe this source.
        check_source: False returns without manifests.

    Returns:
        The manifests that were used, and why others were not.

    Raises:
        UsageError: `manifest_path` without `check_source`.
        SourceError: `manifest_path` is missing, or does not describe this source.
        IntegrityError: `manifest_path` is damaged; or files have the recorded sizes but other tensors.
        ResourceError: a manifest may not be read.
    """
    manifests = SourceManifests()
    if not check_source:
        if manifest_path is not None:
            raise UsageError("--source-manifest is of no use, as --check-source is off")
        return manifests
    homes = [home_of(directory_of(path)), *(catalog.directory for catalog in catalogs if catalog.directory)]
    homes = list(dict.fromkeys(storage.realpath(home) for home in homes))
    if manifest_path is not None:
        read = _read_named(os.fspath(manifest_path), homes.pop(0))
        _check_fits(read, catalogs)
        _use_manifest(read, catalogs, manifests)
    for home in homes:
        try:
            home_manifest = _read_own(home)
        except SourceError as error:
            manifests.warnings.append(f"the source is not compared with its manifest: {error.message}")
            continue
        if home_manifest is not None:
            _use_manifest(home_manifest, catalogs, manifests)
    return manifests


def _read_named(path: str, source: str) -> _ReadManifest:
    if not storage.lexists(path):
        raise SourceError(f"{escape(path)}: no such file", hint=_ANOTHER)
    content = manifest.read_file(path, path)
    return _ReadManifest(
        content, source if storage.isdir(source) else os.path.dirname(source) or os.curdir, path
    )


def _read_own(home: str) -> _ReadManifest | None:
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


def _listed_files(read: _ReadManifest) -> dict[str, manifest.SavedFile]:
    """Return the files that a manifest lists, by real path."""
    files = manifest.all_files(read.content)
    return {storage.realpath(os.path.join(read.home, file.name)): file for file in files}


def _check_fits(read: _ReadManifest, catalogs: Iterable[Catalog]) -> None:
    """Refuse a manifest that the user named if it describes other files."""
    sizes, home = {path: file.size for path, file in _listed_files(read).items()}, storage.realpath(read.home)
    problems = dict[str, None]()
    for catalog in catalogs:
        for file in catalog.files:
            path = storage.realpath(file.path)
            if path not in sizes and (not file.is_raw or not path.startswith(os.path.join(home, ""))):
                continue  # this file is outside the source, such as a base's
            if path not in sizes:
                problems[f"{escape(file.name)}: it is not listed"] = None
            elif file.is_raw and sizes[path] != file.size:
                problems[f"{escape(file.name)}: {file.size} bytes, the manifest lists {sizes[path]}"] = None
    message = f"{escape(read.path)} is not a manifest of this source"
    SourceError.raise_for(list(problems), message, hint=_ANOTHER)


def _use_manifest(read: _ReadManifest, catalogs: Iterable[Catalog], manifests: SourceManifests) -> None:
    """Give files of the catalogs the checksums of a manifest, and add it to `manifests`."""
    listed, tensors = _listed_files(read), manifest.all_tensors(read.content)
    for path, file in listed.items():
        crc = manifest.crc_of(file)
        if crc is not None and storage.isfile(path) and storage.getsize(path) == file.size:
            manifests.files.setdefault(path, crc)
    for catalog in catalogs:
        _check_headers(catalog, listed, tensors)
    if any([_add_checksums(catalog, listed, tensors) for catalog in catalogs]):
        manifests.paths.append(read.path)


def mismatched_tensors(
    tensors: Mapping[str, manifest.DescribedTensor], catalog: Catalog
) -> Iterator[tuple[str, manifest.DescribedTensor, TensorEntry | None]]:
    """Yield (name, description, entry) of each described tensor that is stored with another dtype or shape, or is not stored.

    The entry of a tensor that is not stored is None.
    """
    for fqn, description in tensors.items():
        entry = catalog.tensors.get(fqn)
        if entry is None or (description.dtype, description.shape) != (entry.dtype.name, entry.shape):
            yield fqn, description, entry


def _check_headers(
    catalog: Catalog,
    listed: Mapping[str, manifest.SavedFile],
    tensors: Mapping[str, manifest.DescribedTensor],
) -> None:
    """Refuse safetensors files whose headers differ from the manifest; a header has no checksum of its own.

    Nothing is checked unless the manifest lists exactly these files, with their sizes.
    """
    files = {storage.realpath(file.path): file for file in catalog.files}
    weights = {path for path in listed if path.endswith(_SAFETENSORS)}
    if weights != files.keys() or any(listed[path].size != file.size for path, file in files.items()):
        return
    problems = []
    for fqn, description, entry in mismatched_tensors(tensors, catalog):
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


def _lacks_checksums(file: SourceFile) -> bool:
    """True for a file that is read as stored, and that lacks a recorded CRC-32 for some storage."""
    return file.is_raw and (file.checksums is None or 0 in file.checksums.crcs)


def _add_checksums(
    catalog: Catalog,
    listed: Mapping[str, manifest.SavedFile],
    tensors: Mapping[str, manifest.DescribedTensor],
) -> bool:
    """Give files of a catalog that lack CRC-32s those of a manifest, and return whether any were added."""
    lacking: dict[int, manifest.SavedFile] = {}
    # Files without chunks of this catalog are read, and so checked, by other processes.
    for number in sorted({*catalog.chunks.file}):
        file = catalog.files[number]
        if _lacks_checksums(file):
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
    """Yield the extents whose CRC-32 a file's entry in the manifest has."""
    extents = file.extents if isinstance(file, manifest.ListedFile) else None
    for start, nbytes, crc in extents or ():
        if nbytes and start + nbytes <= file.size:
            yield Entry(start, start + nbytes, crc)


def _tensor_rows(
    catalog: Catalog, tensors: Mapping[str, manifest.DescribedTensor], files: Mapping[int, object]
) -> tuple[dict[int, list[Entry]], dict[int, list[Entry]]]:
    """Return two dicts by file number: the tensors of one chunk with their recorded CRC-32, and the extents of all chunks."""
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
    """Rows (start, stop, CRC-32) of a file that do not overlap; a row that was added earlier wins."""

    def __init__(self) -> None:
        self.rows: list[Entry] = []

    def add(self, rows: Iterable[Entry]) -> None:
        """Add those rows that overlap no present row."""
        for row in sorted(rows):
            place = bisect_left(self.rows, row)
            if self._stop_before(place) <= row.start and self._start_from(place) >= row.stop:
                insort(self.rows, row)

    def fill(self, rows: Iterable[Entry]) -> None:
        """Add those parts of the rows that no present row covers."""
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
