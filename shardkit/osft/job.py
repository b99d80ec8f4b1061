"""Weights of a job that become factors: these as tensors of a catalog, which lie in records, and what is known of them.

Somebody computes the records before anything moves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.factored import FACTOR_DTYPE, FACTORS, Svd, Target
from shardkit.core.regions import full_region
from shardkit.core.text import escape
from shardkit.core.threads import run_all
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.files.storage import BLOCK
from shardkit.osft.svd import num_operations
from shardkit.osft.workers import rows_of
from shardkit.transfer.existing import Unproven
from shardkit.transfer.images import Hole
from shardkit.transfer.sources import SourceFiles


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorRecords:
    """Records of all weights that become factors. Whoever fills their holes has computed all that files are made of.

    A record has the six factors of one weight, one after another, each from a whole block on.
    """

    weights: Sequence[FactoredWeight]
    sizes: Sequence[int]
    """Bytes of the record of each weight."""
    holes: Mapping[str, Hole]
    """Where each factor lies in the record of its weight, by its name in the catalog."""
    catalog: Catalog
    """Has the factors where the records lie, beside all else that is read."""

    @property
    def nbytes(self) -> int:
        """Size of all records."""
        return sum(self.sizes)

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
        for number, path in enumerate(paths, len(files) - len(self.weights)):
            files[number] = replace(files[number], path=path)


def plan_records(catalog: Catalog, weights: Sequence[FactoredWeight]) -> FactorRecords:
    """Return records of weights, and a catalog in which their factors lie there; `lie_at` says where that is.

    Args:
        catalog: has the weights.
        weights: all that become factors.
    """
    if not weights:
        return FactorRecords(weights=(), sizes=(), holes={}, catalog=catalog)
    whole = replace(catalog, files=list(catalog.files), tensors={}, chunks=type(catalog.chunks)())
    for name in catalog.tensors:
        whole.copy_tensor(catalog, name, name)
    sizes, holes = list[int](), dict[str, Hole]()
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
        sizes.append(stop)
    whole.files += [
        SourceFile(name=f"factors of {weight.target.path}", path="", size=size)
        for weight, size in zip(weights, sizes, strict=True)
    ]
    return FactorRecords(weights=weights, sizes=sizes, holes=holes, catalog=whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How the factors of a target were computed, and how good they are."""

    algorithm: str
    """As `osft.svd.Factors` has it."""
    error: float
    orthogonality: float
    whole: Mapping[str, int]
    """CRC-32 of each factor's bytes, by its name in the catalog."""
    is_resumed: bool
    """An interrupted run had computed them."""
    weight_crc32: int | None = None
    """Of the dense weight, as it is stored."""


def measured_of(weight: FactoredWeight, told: Mapping[str, Any], *, is_resumed: bool) -> Measured:
    """Return the measurements of a target's factors, from the answer of the process that computed them (`child`)."""
    shorts = {short: name for name, short in weight.factors.items()}
    return Measured(
        algorithm=told["algorithm"],
        error=told["error"],
        orthogonality=told["orthogonality"],
        whole={shorts[short]: crc for short, crc in told["whole"].items()},
        is_resumed=is_resumed,
        weight_crc32=told.get("weight_crc32"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoredJob:
    """What of a job has to be computed."""

    records: FactorRecords
    """Of all weights that become factors, and the catalog from which files are written afterwards."""
    svd: Svd
    num_workers: int
    """Processes that compute at a time."""
    measured: dict[str, Measured] = field(default_factory=dict)
    """By the target's path; empty before."""

    @property
    def weights(self) -> list[tuple[str, int]]:
        """Path of each weight, and the operations that it takes."""
        return [(weight.target.path, num_operations(weight.target)) for weight in self.records.weights]

    @property
    def crcs(self) -> dict[str, int]:
        """CRC-32 of each factor, by its name in the catalog."""
        return {name: crc for measured in self.measured.values() for name, crc in measured.whole.items()}

    def take_over(
        self, manifests: Mapping[str, object], catalog: Catalog, jobs: int, /, *, is_known: bool
    ) -> list[str]:
        """Take what manifests say of factors; return why these are not of the job's weights.

        Args:
            manifests: the manifests that are there, by what stands before the model's own names.
            catalog: has the weights.
            jobs: threads that read them.
            is_known: they are known to be of these weights.

        Raises:
            Unproven: no record says what they were computed of.
            IntegrityError, ResourceError: as `Reader.read_into`.
        """
        weights, known = self.records.weights, dict[str, Measured]()
        for root, content in manifests.items():
            if isinstance(content, manifest.Presharded):
                known |= dict(_recorded(weights, content, root))
        if any(weight.target.path not in known for weight in weights):
            return ["its manifest has no such factors"]
        if not is_known:
            if any(measured.weight_crc32 is None for measured in known.values()):
                raise Unproven(
                    "no record says what its factors were computed of (--digest none keeps none, nor did earlier versions)"
                )
            other = _other_weights(weights, known, catalog, jobs)
            if other:
                return [f"{name}: its factors were computed of other values" for name in other]
        self.measured.update(known)
        return []


def _recorded(
    weights: Sequence[FactoredWeight], recorded: manifest.Presharded, root: str
) -> Iterator[tuple[str, Measured]]:
    """Yield what a manifest says of the factors of weights, by the path of their module.

    Args:
        weights: of a job.
        recorded: the manifest.
        root: what stands before the model's own names.
    """
    for weight in weights:
        path = weight.target.path
        module = None if recorded.osft is None else recorded.osft.modules.get(path.removeprefix(root))
        if module is None or module.algorithm is None or module.error is None or module.orthogonality is None:
            continue
        stored = {name: recorded.tensors.get(f"{path}.{short}") for name, short in weight.factors.items()}
        crcs = {name: tensor.crc32 for name, tensor in stored.items() if tensor is not None}
        yield (
            path,
            Measured(
                algorithm=module.algorithm,
                error=module.error,
                orthogonality=module.orthogonality,
                whole={name: crc for name, crc in crcs.items() if crc is not None},
                is_resumed=False,
                weight_crc32=module.crc32,
            ),
        )


def _other_weights(
    weights: Sequence[FactoredWeight], measured: Mapping[str, Measured], catalog: Catalog, jobs: int
) -> list[str]:
    """Return the name of a weight that is not the one of which its factors were computed; none if all are.

    Args:
        weights: of a job.
        measured: what is known of their factors, by the path of their module.
        catalog: has the weights.
        jobs: threads.

    Raises:
        IntegrityError, ResourceError: as `Reader.read_into`.
    """
    other = list[str]()
    with SourceFiles(catalog.files) as files:

        def compare(weight: FactoredWeight) -> None:
            if other:  # one is enough
                return
            crc = 0
            with files.reader() as reader:
                for data in rows_of(catalog, weight.source, reader, weight.target.weight):
                    crc = int(crc32(data, crc))
            if crc != measured[weight.target.path].weight_crc32:
                other.append(weight.target.weight)

        run_all([partial(compare, weight) for weight in weights], jobs, threading.Event(), name="shardkit")
        files.check_unchanged()
    return [escape(name) for name in other[:1]]
