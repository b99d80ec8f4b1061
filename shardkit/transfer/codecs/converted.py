"""Tensors computed by converters of transformers: a group of tensors is read whole, and converted at once.

This is the exception from bounded memory: a group's stored and converted tensors are in memory together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, ClassVar

from shardkit.core.catalog import Catalog, Codec, StoredParts
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, full_region, window
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.keys.expressions import Expression, Opaque, leaves
from shardkit.transfer.codecs.boxes import as_box, as_tensor, box_of

if TYPE_CHECKING:
    import numpy
    import torch

Convert = Callable[[Opaque, "list[torch.Tensor]"], "Mapping[str, torch.Tensor]"]
"""Returns the tensors of a group, by their names in the model, from the values of `Opaque.parts`.

Raises:
    LayoutError: the converter fails.
"""


def opaque_groups(targets: Mapping[str, Expression]) -> list[dict[str, Opaque]]:
    """Return the groups of targets that are computed together, each by name."""
    groups: dict[object, dict[str, Opaque]] = {}
    for name, expression in targets.items():
        if isinstance(expression, Opaque):
            groups.setdefault((expression.group, expression.parts), {})[name] = expression
    return list(groups.values())


def group_nbytes(catalog: Catalog, group: Iterable[Opaque]) -> int:
    """Return the bytes of a group's targets and of their stored tensors."""
    members = list(group)
    parts = {leaf.name: leaf for _, part in members[0].parts for leaf in leaves(part)}
    itemsize = catalog.tensors[next(iter(parts))].dtype.itemsize
    shapes = [*(part.shape for part in parts.values()), *(member.shape for member in members)]
    return itemsize * sum(map(prod, shapes))


@dataclass(slots=True)
class GroupConverter:
    """Converts groups, and caches the tensors of the last one."""

    convert: Convert
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _group: object = None
    _tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def value(self, codec: GroupMember, parts: StoredParts) -> torch.Tensor:
        """Return a tensor of a group, converting the group unless it was the last one.

        Raises:
            LayoutError: the converter fails, or returns another shape or dtype.
        """
        import torch

        with self._lock:
            if self._group != codec.group:
                self._group, self._tensors = None, {}
                wholes = [
                    as_tensor(box_of(part, parts, full_region(part.shape)), part.dtype)
                    for part in codec.parts
                ]
                self._group, self._tensors = codec.group, self.convert(codec.expression, wholes)
            value = self._tensors.get(codec.expression.target)
        dtype = getattr(torch, codec.dtype.name)
        if value is None or value.dtype is not dtype or tuple(value.shape) != codec.shape:
            result = "nothing" if value is None else f"{list(value.shape)} in {value.dtype}"
            raise LayoutError(
                f"{escape(codec.target)}: transformers' own code returns {result}, not "
                f"{list(codec.shape)} in {dtype}",
                hint="the files do not match the config, or shardkit has a defect: please report it",
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A tensor of a group; a `Codec`, except for the bound on memory."""

    converter: GroupConverter
    expression: Opaque
    parts: tuple[Codec, ...]
    """Codecs of the tensors that the converter gets."""
    target: str
    """The tensor's name, for messages."""
    needs_torch: ClassVar[bool] = True

    @property
    def of(self) -> tuple[str, ...]:
        """The stored tensors of all parts."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.of))

    @property
    def dtype(self) -> DType:
        """The dtype of the stored tensors."""
        return self.parts[0].dtype

    @property
    def shape(self) -> Shape:
        """Of the tensor."""
        return self.expression.shape

    @property
    def group(self) -> object:
        """Equal for all tensors that are computed together."""
        return self.expression.group, self.expression.parts

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Fill an array with a box of the tensor; the whole group is computed for it."""
        value = self.converter.value(self, parts)
        target[...] = as_box(value[window(region)].contiguous(), self.dtype)
