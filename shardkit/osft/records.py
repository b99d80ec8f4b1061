"""Factors as tensors of a catalog: they lie in records, which somebody computes before anything moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.factored import FACTOR_DTYPE, FACTORS, Target
from shardkit.core.regions import full_region
from shardkit.files.storage import BLOCK
from shardkit.transfer.images import Hole


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredWeight:
    """A weight of a catalog that becomes factors."""

    target: Target
    source: str
    """Its name in the catalog."""
    factors: Mapping[str, str]
    """Name of each factor in the catalog -> its name in `core.factored.FACTORS`."""


def factored_weight(target: Target, sources: Mapping[str, str]) -> FactoredWeight:
    """Return a target with its names in a catalog.

    Args:
        target: of a layout.
        sources: name in the layout -> name in the catalog, of the dense weight and of its factors.
    """
    names = {sources[f"{target.path}.{short}"]: short for short in FACTORS}
    return FactoredWeight(target=target, source=sources[target.weight], factors=names)


class RecordFile(NamedTuple):
    """A file with the six factors of one weight, one after another, each from a whole block on."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRecords:
    """Records of all weights that become factors. Whoever fills their holes has computed all that files are made of."""

    weights: Sequence[FactoredWeight]
    images: Sequence[RecordFile]
    """Of each weight, named after its number."""
    holes: Mapping[str, Hole]
    """Where each factor lies in the record of its weight, by its name in the catalog."""
    catalog: Catalog
    """Has the factors where the records lie, beside all else that is read."""

    @property
    def nbytes(self) -> int:
        """Size of all records."""
        return sum(image.size for image in self.images)

    @property
    def made_of(self) -> dict[str, str]:
        """Name of each factor in the catalog -> the weight there that it is computed from."""
        return {name: weight.source for weight in self.weights for name in weight.factors}

    def holes_of(self, number: int) -> Iterator[tuple[Hole, str]]:
        """Yield the place of each factor in the record of a weight, with the factor's short name."""
        for name, short in self.weights[number].factors.items():
            yield self.holes[name], short

    def lie_at(self, paths: Sequence[str]) -> None:
        """Let the catalog say where the records lie, by the number of their weight."""
        files = self.catalog.files
        for at, path in enumerate(paths, len(files) - len(self.images)):
            files[at] = replace(files[at], path=path)


def plan_records(catalog: Catalog, weights: Sequence[FactoredWeight]) -> FactorRecords:
    """Return records of weights, and a catalog in which their factors lie there; `lie_at` says where that is.

    Args:
        catalog: has the weights.
        weights: all that become factors.
    """
    if not weights:
        return FactorRecords(weights=(), images=(), holes={}, catalog=catalog)
    whole = replace(catalog, files=list(catalog.files), tensors={}, chunks=type(catalog.chunks)())
    for name in catalog.tensors:
        whole.copy_tensor(catalog, name, name)
    images, holes = list[RecordFile](), dict[str, Hole]()
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
            holes[name] = Hole(name, region, FACTOR_DTYPE, start, nbytes)
        images.append(RecordFile(str(number), stop))
    whole.files += [
        SourceFile(name=f"factors of {weight.target.path}", path="", size=image.size)
        for weight, image in zip(weights, images, strict=True)
    ]
    return FactorRecords(weights=weights, images=images, holes=holes, catalog=whole)
