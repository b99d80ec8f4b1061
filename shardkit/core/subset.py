"""A catalog of some of another's tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardkit.core.catalog import Catalog


def subset(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Return a catalog of some of the tensors, in the order given; `catalog` itself stays as it is.

    Files keep their numbers. Notes and objects are about the whole and stay behind.
    """
    paths = catalog.paths
    chosen = Catalog(
        format=catalog.format,
        directory=catalog.directory,
        encoding=catalog.encoding,
        files=list(catalog.files),
        paths=None if paths is None else {name: paths[name] for name in names if name in paths},
    )
    table = catalog.chunks
    for name in names:
        entry = catalog.tensors[name]
        rows = slice(entry.chunk_ids.start, entry.chunk_ids.stop)
        first = len(chosen.chunks)
        chosen.chunks.extend_columns(
            table.file[rows], table.start[rows], table.nbytes[rows], table.boxes(entry.chunk_ids)
        )
        chosen.tensors[name] = replace(entry, first_chunk=first)
    return chosen
