"""Factors as tensors of a catalog, whose bytes do not exist before they are computed; or lie in records by then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit.core.catalog import Catalog, OnRead, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import full_region
from shardkit.files.storage import BLOCK
from shardkit.osft.plan import FACTORS, Target
from shardkit.transfer.images import Hole

FACTOR_DTYPE = BY_NAME["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredWeight:
    """A weight of a catalog that becomes factors."""

    target: Target
    source: str
    """Its name in the catalog."""
    factors: Mapping[str, str]
    """Name of each factor in the catalog -> its name in `osft.plan.FACTORS`."""


def factored_weight(target: Target, sources: Mapping[str, str]) -> FactoredWeight:
    """Return a target with its names in a catalog.

    Args:
        target: of a layout.
        sources: name in the layout -> name in the catalog, of the dense weight and of its factors.
    """
    names = {sources[f"{target.path}.{short}"]: short for short in FACTORS}
    return FactoredWeight(target=target, source=sources[target.weight], factors=names)


def add_factors(catalog: Catalog, weights: Iterable[FactoredWeight]) -> Catalog:
    """Return a catalog that has factors beside the tensors of another.

    Somebody computes them before anything else is filled (`fill`): they cannot be read from it.
    """
    whole = replace(catalog, files=list(catalog.files), tensors={}, chunks=type(catalog.chunks)())
    for name in catalog.tensors:
        whole.copy_tensor(catalog, name, name)
    for weight in weights:
        entry = catalog.tensors[weight.source]
        home = catalog.files[catalog.chunks.file[entry.first_chunk]]
        for name, short in weight.factors.items():
            shape = weight.target.shapes[f"{weight.target.path}.{short}"]
            region = full_region(shape)
            nbytes = region.num_elements * FACTOR_DTYPE.itemsize
            file = SourceFile(
                name=home.name, path=home.path, size=nbytes, decode=_cannot_be_read, is_converted=True
            )
            whole.files.append(file)
            whole.add_tensor(name, FACTOR_DTYPE, shape, iter([(len(whole.files) - 1, 0, nbytes, region)]))
    return whole


def _cannot_be_read(on_read: OnRead) -> memoryview:
    raise AssertionError("factors are computed before anything is read")


class RecordFile(NamedTuple):
    """A file with the six factors of one weight, one after another, each from a whole block on."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRecords:
    """Records of weights that become factors. Whoever fills their holes has computed all that files are made of."""

    images: Sequence[RecordFile]
    """Of each weight, named after its number."""
    filled: Mapping[str, tuple[tuple[int, Hole], ...]]
    """(number of the record, hole) of each factor, by its name in the catalog."""
    catalog: Catalog
    """Has the factors where the records lie."""

    def lie_at(self, paths: Sequence[str]) -> None:
        """Let the catalog say where the records lie, by the number of their weight."""
        files = self.catalog.files
        for at, path in enumerate(paths, len(files) - len(self.images)):
            files[at] = replace(files[at], path=path)


def plan_records(catalog: Catalog, weights: Sequence[FactoredWeight]) -> FactorRecords:
    """Return records of weights, and a catalog in which their factors lie there.

    Args:
        catalog: has the weights, and perhaps factors that cannot be read (`add_factors`).
        weights: all that become factors.
    """
    made = {name for weight in weights for name in weight.factors}
    whole = replace(catalog, files=list(catalog.files), tensors={}, chunks=type(catalog.chunks)())
    for name in catalog.tensors:
        if name not in made:
            whole.copy_tensor(catalog, name, name)
    images, filled = list[RecordFile](), dict[str, tuple[tuple[int, Hole], ...]]()
    for number, weight in enumerate(weights):
        stop = 0
        for name, short in weight.factors.items():
            shape = weight.target.shapes[f"{weight.target.path}.{short}"]
            region = full_region(shape)
            nbytes = region.num_elements * FACTOR_DTYPE.itemsize
            start = -(-stop // BLOCK) * BLOCK
            stop = start + nbytes
            whole.add_tensor(
                name, FACTOR_DTYPE, shape, iter([(len(whole.files) + number, start, nbytes, region)])
            )
            filled[name] = ((number, Hole(name, region, FACTOR_DTYPE, start, nbytes)),)
        images.append(RecordFile(str(number), stop))
    whole.files += [
        SourceFile(name=f"factors of {weight.target.path}", path="", size=image.size)
        for weight, image in zip(weights, images, strict=True)
    ]
    return FactorRecords(images=images, filled=filled, catalog=whole)
