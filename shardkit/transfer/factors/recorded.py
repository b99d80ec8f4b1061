"""Factors of an output that is there: what its manifest says of them, and of which weights they were computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.core.threads import run_all
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.transfer.factors.catalog import FactoredWeight
from shardkit.transfer.factors.fill import Measured
from shardkit.transfer.factors.workers import rows_of
from shardkit.transfer.sources import SourceFiles


def recorded(
    weights: Sequence[FactoredWeight], found: manifest.Presharded, root: str
) -> Iterator[tuple[str, Measured]]:
    """Yield what a manifest says of the factors of weights, by the path of their module.

    Args:
        weights: of a job.
        found: the manifest.
        root: what stands before the model's own names.
    """
    for weight in weights:
        path = weight.target.path
        module = None if found.osft is None else found.osft.modules.get(path.removeprefix(root))
        if module is None or module.algorithm is None or module.error is None or module.orthogonality is None:
            continue
        stored = {name: found.tensors.get(f"{path}.{short}") for name, short in weight.factors.items()}
        crcs = {name: each.crc32 for name, each in stored.items() if each is not None}
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


def other_weights(
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
