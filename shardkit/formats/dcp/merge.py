"""Rank-local metadata: what `dcp.save(..., use_collectives=False)` leaves instead of one `.metadata`.

Each rank writes `__R.metadata` with the chunks that it holds; nobody has written how many ranks there were.
All files together are the checkpoint: ranks must be there without a gap, and the chunks must make up each
tensor. A tensor that every rank holds whole is taken from the first.

Source: torch 2.13, torch/distributed/checkpoint/state_dict_saver.py and filesystem.py (`finish`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

from shardkit.core.catalog import TensorEntry
from shardkit.core.regions import Region
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import read_small
from shardkit.formats.dcp.metadata import DcpMetadata, Path, parse_metadata

_RANK = re.compile(r"__(0|[1-9]\d{0,6})\.metadata(\.tmp)?")
_MAX_LISTED = 1000  # missing ranks: one file named with a huge number stands for no more
_MISSING_RANK = "a rank's files may be missing: copy all __R.metadata and .distcp files of the save"


def rank_files(names: Collection[str]) -> dict[int, str]:
    """Return rank -> file, in the order of ranks, of the finished rank-local metadata among some names."""
    found = {int(match[1]): name for name in names if (match := _RANK.fullmatch(name)) and not match[2]}
    return dict(sorted(found.items()))


def read_rank_metadata(directory: str, names: Collection[str], max_bytes: int) -> DcpMetadata:
    """Read the metadata of every rank as that of one checkpoint.

    Args:
        directory: where the files lie.
        names: what the directory holds.
        max_bytes: of one file.

    Raises:
        SourceError: a rank is missing or did not finish, a file is damaged, or ranks contradict each other.
        ResourceError: a file may not be read.
    """
    found = rank_files(names)
    unfinished = sorted(name for name in names if (match := _RANK.fullmatch(name)) and match[2])
    gaps = list(islice((rank for rank in range(max(found)) if rank not in found), _MAX_LISTED))
    if unfinished or gaps:
        problems = [f"__{rank}.metadata: no such file" for rank in gaps]
        problems += [f"{escape(name)}: this rank's save did not finish" for name in unfinished]
        raise SourceError(
            f"{escape(directory)} has rank-local metadata, but not of every rank",
            problems=problems,
            hint=_MISSING_RANK,
        )
    parts: list[DcpMetadata] = []
    for name in found.values():
        data = read_small(os.path.join(directory, name), name, max_bytes, follow=False)
        parts.append(parse_metadata(data, where=name))
    return _Merge(parts).result()


class _Merge:
    """Puts the metadata of all ranks together."""

    def __init__(self, parts: Sequence[DcpMetadata]) -> None:
        self._parts = parts
        self._files: dict[str, int] = {}
        self._problems: list[str] = []

    def result(self) -> DcpMetadata:
        parts, merged = self._parts, DcpMetadata()
        merged.where = f"__0.metadata to __{len(parts) - 1}.metadata" if len(parts) > 1 else "__0.metadata"
        file_ids = [[self._files.setdefault(name, len(self._files)) for name in part.files] for part in parts]
        for fqn in dict.fromkeys(fqn for part in parts for fqn in part.tensors):
            self._add_tensor(merged, fqn, file_ids)
        for part, ids in zip(parts, file_ids, strict=True):
            self._add_objects(merged, part, ids)
        merged.files = tuple(self._files)
        merged.paths = self._paths()
        merged.orphans = tuple(dict.fromkeys(fqn for part in parts for fqn in part.orphans))
        if self._problems:
            raise SourceError(
                f"the ranks' metadata contradict each other in {len(self._problems)} places",
                problems=self._problems,
                hint="the files are from different saves: use one copy of one save",
            )
        return merged

    def _add_tensor(self, merged: DcpMetadata, fqn: str, file_ids: Sequence[Sequence[int]]) -> None:
        """Add the chunks of all ranks; an equal region is a replica and is left out."""
        first: TensorEntry | None = None
        seen: set[Region] = set()
        begin = len(merged.chunks)
        for part, ids in zip(self._parts, file_ids, strict=True):
            entry = part.tensors.get(fqn)
            if entry is None:
                continue
            first = first or entry
            if entry.dtype is not first.dtype or entry.shape != first.shape:
                self._problems.append(
                    f"{escape(fqn)}: {part.where} has {entry.dtype.name} {list(entry.shape)}, "
                    f"another rank {first.dtype.name} {list(first.shape)}"
                )
                continue
            table = part.chunks
            for row, region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True):
                if region in seen:
                    continue
                seen.add(region)
                new = merged.chunks.append(ids[table.file[row]], table.start[row], table.nbytes[row], region)
                if row in part.transforms:
                    merged.transforms[new] = part.transforms[row]
        assert first is not None
        merged.tensors[fqn] = TensorEntry(
            fqn=fqn,
            dtype=first.dtype,
            shape=first.shape,
            first_chunk=begin,
            num_chunks=len(merged.chunks) - begin,
        )

    def _add_objects(self, merged: DcpMetadata, part: DcpMetadata, ids: Sequence[int]) -> None:
        for fqn, place in part.objects.items():
            if fqn in merged.tensors:
                self._problems.append(f"{escape(fqn)}: an object in {part.where}, a tensor elsewhere")
            elif fqn not in merged.objects:
                merged.objects[fqn] = place and replace(place, file=ids[place.file])

    def _paths(self) -> dict[str, Path] | None:
        merged: dict[str, Path] = {}
        owners: dict[Path, str] = {}
        for part in self._parts:
            for fqn, path in (part.paths or {}).items():
                if merged.setdefault(fqn, path) != path or owners.setdefault(path, fqn) != fqn:
                    self._problems.append(
                        f"{escape(fqn)}: {part.where} gives it another path in planner_data"
                    )
        return merged or None
