"""Tensors that a converter of transformers makes of whole ones: the group is read whole, and made at once.

This is what the bound on memory does not hold for: a group's stored tensors and what is made of them are in memory
together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from shardkit.core.catalog import Catalog, OnRead, SourceFile
from shardkit.core.dtypes import DType
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.keys.expressions import Expression, Opaque, leaves
from shardkit.transfer.sources import SourceFiles

if TYPE_CHECKING:
    import numpy
    import torch

Convert = Callable[[Opaque, "list[torch.Tensor]"], "Mapping[str, torch.Tensor]"]
"""Makes the tensors of a group, by their names in the model, of the values of `Opaque.parts`.

Raises:
    LayoutError: it fails.
"""

ReadWhole = Callable[[Expression, SourceFiles, str], "numpy.ndarray"]
"""Returns all elements of an expression, as unsigned integers of their size; the name is for messages."""


def opaque_groups(targets: Mapping[str, Expression]) -> list[dict[str, Opaque]]:
    """Return the targets that are made together, by name, a group at a time."""
    groups: dict[object, dict[str, Opaque]] = {}
    for name, made in targets.items():
        if isinstance(made, Opaque):
            groups.setdefault((made.group, made.parts), {})[name] = made
    return list(groups.values())


def group_nbytes(catalog: Catalog, group: Iterable[Opaque]) -> int:
    """Return the bytes of what is made together and of what it is made of."""
    members = list(group)
    parts = {leaf.name: leaf for _, part in members[0].parts for leaf in leaves(part)}
    itemsize = catalog.tensors[next(iter(parts))].dtype.itemsize
    shapes = [*(part.shape for part in parts.values()), *(each.shape for each in members)]
    return itemsize * sum(map(prod, shapes))


@dataclass(slots=True)
class GroupConverter:
    """Makes groups, and keeps the tensors of the last one until another is asked for."""

    catalog: Catalog
    """Of raw extents."""
    convert: Convert
    read: ReadWhole
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _group: object = None
    _made: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def file(self, made: Opaque, target: str) -> SourceFile:
        """Return the file of a target's elements; it exists once it is decoded.

        Args:
            made: the target.
            target: its name, for messages.
        """
        entry = self.catalog.tensors[next(leaves(made)).name]
        home = self.catalog.files[self.catalog.chunks.file[entry.first_chunk] if entry.num_chunks else 0]
        return SourceFile(
            name=home.name,
            path=home.path,
            size=prod(made.shape) * entry.dtype.itemsize,
            decode=partial(self._decode, made, entry.dtype, target),
            is_converted=True,
        )

    def _decode(self, made: Opaque, dtype: DType, target: str, on_read: OnRead) -> memoryview:
        import torch

        with self._lock:
            group = made.group, made.parts
            if self._group != group:
                self._group, self._made = None, {}
                with SourceFiles(self.catalog.files, on_read=on_read) as files:
                    values = [
                        self._tensor(self.read(part, files, target), dtype).reshape(part.shape)
                        for _, part in made.parts
                    ]
                self._group, self._made = group, self.convert(made, values)
            value = self._made.get(made.target)
            wanted = getattr(torch, dtype.name)
            if value is None or value.dtype is not wanted or tuple(value.shape) != made.shape:
                said = "nothing" if value is None else f"{list(value.shape)} in {value.dtype}"
                raise LayoutError(
                    f"{escape(target)}: transformers' own code makes {said} of what is stored, not "
                    f"{list(made.shape)} in {wanted}",
                    hint="the files and the config do not fit each other, or shardkit has a defect: please report it",
                )
            data: memoryview = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
            return data

    def _tensor(self, values: numpy.ndarray, dtype: DType) -> torch.Tensor:
        import numpy
        import torch

        flat = numpy.ascontiguousarray(values).reshape(-1).view(numpy.uint8)
        return torch.from_numpy(flat).view(getattr(torch, dtype.name))
