"""Open a directory from preshard or reshard by its manifest, without reading a record.

The file that has a region is computed from the manifest's meshes and placements. So a rank opens only the chunk lists
of the files from which it reads, usually one, and not those of a thousand other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardkit.core.catalog import Catalog, Checksums, FileStamp, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.mesh import Mesh
from shardkit.core.regions import Region, find_tiling_error, full_region, intersect, relative_to
from shardkit.core.text import count, escape
from shardkit.core.threads import at_once
from shardkit.errors import IntegrityError, LayoutError, ResourceError, ShardkitError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.home import home_of, names_in
from shardkit.files.links import locate
from shardkit.files.location import location_of
from shardkit.formats.dcp import METADATA, chunk_list
from shardkit.formats.dcp.chunk_list import ChunkList, ListedChunk
from shardkit.formats.hub.base import read_derived, read_key_rules, source_key_rules
from shardkit.keys.expressions import Expression
from shardkit.keys.renaming import KeyRule
from shardkit.layout.layout import Layout
from shardkit.layout.recorded import recorded_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PreshardedSource:
    """A pre-sharded directory, as its manifest describes it."""

    catalog: Catalog
    """All tensors and files, but no chunks; these come from `open_chunks`."""
    content: manifest.Presharded
    """The manifest; it has the catalog's files in the same order."""
    layout: Layout
    """The layout of every tensor, without aliases."""
    ties: Mapping[str, str]
    """Alias of a tensor -> the name under which it is stored."""
    meshes: Mapping[str, Mesh]
    """Name of each tensor -> the mesh that it lies on."""
    key_rules: tuple[KeyRule, ...]
    """Rules that turn the model's names into the Hub's; empty if these are equal or not known."""
    derived: Mapping[str, Expression]
    """Name -> expression of the Hub's tensors, for tensors that the Hub's files have in another form."""

    def open_chunks(self, regions_by_name: Mapping[str, Sequence[Region]] | None = None) -> Catalog:
        """Return the catalog with the chunks of the files that have some regions.

        Args:
            regions_by_name: name of each tensor -> regions, in elements; None for all tensors.

        Raises:
            IntegrityError: manifest, chunk lists and files are of different runs, or a file is not whole.
            SourceError: a chunk list cannot be read.
        """
        if regions_by_name is not None:
            by_record: dict[str, list[Region]] = {}
            for fqn, regions in regions_by_name.items():
                by_record.setdefault(self.ties.get(fqn, fqn), []).extend(regions)
            regions_by_name = by_record
        files = self.content.files
        numbers = range(len(files)) if regions_by_name is None else self._files_of(regions_by_name)
        lists = _read_lists(self.catalog.directory, {n: files[n] for n in numbers})
        catalog = self._with_chunks(lists)
        self._check(catalog, regions_by_name)
        for tied_name, name in self.ties.items():
            catalog.tensors[tied_name] = replace(catalog.tensors[name], fqn=tied_name)
        return catalog

    def _files_of(self, regions_by_name: Mapping[str, Sequence[Region]]) -> list[int]:
        """Return the indexes of files that have regions. Equal regions, as in equal layers, are computed only once."""
        num_shards = self.layout.mesh.pp * self.layout.mesh.num_shards
        if num_shards > 2 * len(self.content.files):  # a hostile number could make the computation take hours
            raise IntegrityError(
                f"{escape(self.catalog.directory)}: {manifest.NAME} lists {count(len(self.content.files), 'file')} for "
                f"{count(num_shards, 'shard')}",
                hint="copy the directory again, or preshard again",
            )
        by_name = {file.name: number for number, file in enumerate(self.catalog.files)}
        numbers, seen = set[int](), set[object]()
        for fqn, regions in regions_by_name.items():
            shape, placements = self.catalog.tensors[fqn].shape, self.layout.tensors[fqn].placements
            mesh = self.meshes[fqn]
            for region in regions:
                if (shape, placements, region, mesh) in seen:
                    continue
                seen.add((shape, placements, region, mesh))
                for rank, owned in mesh.owners(shape, placements):
                    number = by_name.get(f"__{rank}_0.distcp")
                    if number is not None and intersect(owned, region) is not None:
                        numbers.add(number)
        return sorted(numbers)

    def _with_chunks(self, lists: Mapping[int, tuple[ChunkList, FileStamp]]) -> Catalog:
        whole = self.catalog
        catalog = Catalog(format=whole.format, directory=whole.directory, files=list(whole.files))
        rows: dict[str, list[tuple[int, ListedChunk]]] = {}
        for number, (listed, stamp) in lists.items():
            stored = ((chunk.data_start, chunk.data_nbytes, chunk.crc32) for chunk in listed.chunks)
            catalog.files[number] = replace(whole.files[number], stamp=stamp, checksums=Checksums.of(stored))
            for chunk in listed.chunks:
                rows.setdefault(chunk.fqn, []).append((number, chunk))
        for fqn in self.layout.tensors:
            entry = whole.tensors[fqn]
            chunks = rows.pop(fqn, [])
            if any((chunk.dtype, chunk.shape) != (entry.dtype, entry.shape) for _, chunk in chunks):
                raise IntegrityError(
                    f"{escape(whole.directory)}: a chunk list has another dtype or shape of {escape(fqn)} than "
                    f"{manifest.NAME}"
                )
            catalog.add_tensor_columns(
                fqn,
                entry.dtype,
                entry.shape,
                [file for file, _ in chunks],
                [chunk.data_start for _, chunk in chunks],
                [chunk.data_nbytes for _, chunk in chunks],
                [chunk.region for _, chunk in chunks],
            )
        return catalog

    def _check(self, catalog: Catalog, regions_by_name: Mapping[str, Sequence[Region]] | None) -> None:
        """Raise an error unless the chunks contain the regions completely, without overlaps."""
        problems = []
        for fqn in self.layout.tensors if regions_by_name is None else regions_by_name:
            entry = catalog.tensors[fqn]
            chunks = catalog.chunks.regions(entry.chunk_ids)
            for region in (None,) if regions_by_name is None else regions_by_name[fqn]:
                region = full_region(entry.shape) if region is None else region
                parts = [part for chunk in chunks if (part := intersect(chunk, region)) is not None]
                stored = sum(part.num_elements for part in parts)
                if stored != region.num_elements:
                    problems.append(f"{escape(fqn)}: {stored} of {region.num_elements} elements are there")
                elif not _are_apart(parts, region):
                    problems.append(f"{escape(fqn)}: chunks overlap, so that elements are missing")
        IntegrityError.raise_for(
            problems, f"{escape(catalog.directory)}: {manifest.NAME} and the chunk lists disagree"
        )


def _are_apart(parts: Sequence[Region], region: Region) -> bool:
    """True if parts, with as many elements in total as the region, cover it without overlap."""
    kept = [part for part in parts if part.num_elements]
    if len(kept) < 2:
        return True
    moved = [relative_to(part, region.offsets) for part in kept]
    return find_tiling_error(region.sizes, moved) is None


def open_presharded(directory: str) -> PreshardedSource | None:
    """Open a directory by its manifest; return None if it is not a pre-sharded directory.

    Args:
        directory: the directory, with `shardkit.json` next to shard files.

    Raises:
        IntegrityError: a file is missing.
        SourceError: the manifest contradicts itself, or the run that wrote the directory did not finish.
    """
    directory = home_of(directory)
    content = manifest.read(directory)
    if not isinstance(content, manifest.Presharded):
        return None
    present_names = set(names_in(directory))
    if METADATA not in present_names:
        raise SourceError(
            f"{escape(directory)} has {manifest.NAME} and no {METADATA}, which is written last",
            hint="copy all of the directory; or preshard again",
        )
    try:
        source = _build_source(directory, content)
    except (ValueError, LayoutError) as error:
        raise SourceError(
            f"{escape(os.path.join(directory, manifest.NAME))} does not describe shards as this version does",
            problems=[error.message if isinstance(error, ShardkitError) else str(error)],
            hint="preshard again",
        ) from error
    names = (name for file in source.catalog.files for name in (file.name, chunk_list.name_for(file.name)))
    missing = [escape(name) for name in names if name not in present_names]
    IntegrityError.raise_for(
        missing,
        f"{escape(directory)}: {count(len(missing), 'file')} missing that {manifest.NAME} lists",
        hint="copy all of the directory; or preshard again",
    )
    return source


def _build_source(directory: str, content: manifest.Presharded) -> PreshardedSource:
    catalog = Catalog(format="dcp", directory=directory)
    for file in content.files:
        path = os.path.join(directory, file.name)
        catalog.files.append(SourceFile(name=file.name, path=path, size=file.size))
    if len({file.name for file in catalog.files}) != len(catalog.files):
        raise ValueError("files: a file is listed twice")
    layout = recorded_layout(content)
    for fqn, tensor in content.tensors.items():
        catalog.add_tensor(fqn, BY_NAME[tensor.dtype], tensor.shape, iter(()))
    ties = _ties(content.ties, layout.tensors)
    for tied_name, name in ties.items():
        catalog.tensors[tied_name] = replace(catalog.tensors[name], fqn=tied_name)
    return PreshardedSource(
        catalog=catalog,
        content=content,
        layout=layout,
        ties=ties,
        meshes={fqn: layout.mesh_of(fqn) for fqn in layout.tensors},
        key_rules=read_key_rules(content) or source_key_rules(content) or (),
        derived=read_derived(content),
    )


def _ties(groups: Sequence[Sequence[str]], tensors: Mapping[str, object]) -> dict[str, str]:
    """Return alias -> name under which the tensor is stored."""
    name_of: dict[str, str] = {}
    for group in groups:
        if not group or group[0] not in tensors:
            raise ValueError(
                f"ties: {escape(group[0]) if group else 'an empty group'} is none of the tensors"
            )
        name, *tied_names = group
        for tied_name in tied_names:
            if tied_name in tensors or name_of.setdefault(tied_name, name) != name:
                raise ValueError(f"ties: {escape(tied_name)} has bytes of its own, or of two tensors")
    return name_of


def _read_lists(
    directory: str, files: Mapping[int, manifest.ShardFile]
) -> dict[int, tuple[ChunkList, FileStamp]]:
    def read(number: int) -> tuple[ChunkList, FileStamp] | ShardkitError:
        try:
            return _read_list(directory, files[number])
        except ShardkitError as error:
            return error

    lists = dict(zip(files, at_once(read, files, location_of(directory).connections), strict=True))
    problems = [answer.message for answer in lists.values() if isinstance(answer, ShardkitError)]
    IntegrityError.raise_for(
        problems,
        f"{escape(directory)}: {count(len(problems), 'file')} not as {manifest.NAME} describes",
        hint="copy the directory again, or preshard again",
    )
    return {number: answer for number, answer in lists.items() if not isinstance(answer, ShardkitError)}


def _read_list(directory: str, file: manifest.ShardFile) -> tuple[ChunkList, FileStamp]:
    """Return a file's chunk list and stamp. The file itself is opened only when it is read."""
    try:
        stamp = FileStamp.of(storage.stat(locate(directory, file.name)))
    except OSError as error:
        raise ResourceError(f"{escape(file.name)}: {error.strerror}") from error
    listed, crc = chunk_list.read_beside(directory, file.name, stamp.size)
    if listed.size != file.size:
        raise IntegrityError(f"{escape(file.name)} has {listed.size} bytes, not {file.size}")
    if crc != file.chunks.crc32:
        raise IntegrityError(f"{escape(chunk_list.name_for(file.name))} has been changed")
    return listed, stamp
