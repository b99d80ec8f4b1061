"""Factors as tensors of a catalog, whose bytes do not exist before they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardkit.core.catalog import Catalog, OnRead, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import full_region
from shardkit.osft.plan import FACTORS, Target

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
