"""Reading a tensor as operations do: chunk by chunk, from wherever a buffer happens to begin."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from shardkit.core.catalog import Catalog
from shardkit.transfer.sources import SourceFiles
from tests.keys.test_expressions import window


def read_in_ranges(catalog: Catalog, name: str, rng: random.Random, lengths: Sequence[int]) -> bytearray:
    """Return a tensor's bytes, row-major; each chunk is read in ranges of some of these numbers of elements."""
    entry, table = catalog.tensors[name], catalog.chunks
    itemsize = entry.dtype.itemsize
    found, times = np.zeros(entry.shape, f"V{itemsize}"), np.zeros(entry.shape, int)
    with SourceFiles(catalog.files) as files, files.reader() as reader:
        for row in entry.chunk_ids:
            region = table.region(row)
            data, done = bytearray(region.num_elements * itemsize), 0
            while done < len(data):
                size = min(rng.choice(lengths) * itemsize, len(data) - done)
                part = memoryview(data)[done : done + size]
                reader.read_into(table.file[row], part, table.start[row] + done, name)
                done += size
            found[window(region)] = np.frombuffer(data, found.dtype).reshape(region.sizes)
            times[window(region)] += 1
    assert (times == 1).all()
    return bytearray(found.tobytes())
