"""A process that computes factors: what it answers, and that it ends with whoever asked."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from pathlib import Path
from zlib import crc32

import pytest
import torch

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.factored import FACTORS, Target
from shardkit.core.regions import full_region
from shardkit.errors import ResourceError, SourceError
from shardkit.osft.svd import factorise
from shardkit.osft.workers import FactorWorker
from shardkit.transfer.sources import SourceFiles

SHAPE = (9, 7)
TARGET = Target(path="up", rows=9, columns=7, rank=4)


def catalog_of(weight: torch.Tensor, path: Path) -> Catalog:
    path.write_bytes(weight.numpy().tobytes())
    catalog = Catalog(format="safetensors", directory=str(path.parent))
    catalog.files = [SourceFile(name=path.name, path=str(path), size=weight.nbytes)]
    chunk = (0, 0, weight.nbytes, full_region(SHAPE))
    catalog.add_tensor("up.weight", BY_NAME["float32"], SHAPE, iter([chunk]))
    return catalog


def test_it_answers_and_ends_with_whoever_asked(tmp_path: Path) -> None:
    weight, out = torch.randn(SHAPE), tmp_path / "record"
    out.write_bytes(bytes(4096 + TARGET.factors_nbytes))
    expected = factorise(weight, TARGET)
    sizes = [expected.tensors[name].nbytes for name in FACTORS]
    request = {**{key: getattr(TARGET, key) for key in ("path", "rows", "columns", "rank")}, "svd": "exact"}
    starts = [(name, 4096 + sum(sizes[:number])) for number, name in enumerate(FACTORS)]
    request |= {"dtype": "float32", "hint": "free some", "record": str(out), "starts": starts}
    catalog, stop = catalog_of(weight, tmp_path / "weights"), threading.Event()
    with FactorWorker(weight.nbytes) as worker, SourceFiles(catalog.files) as files, files.reader() as reader:
        worker.read(catalog, "up.weight", reader, "up.weight")
        answer = worker.ask(request, stop)
        parts = [expected.tensors[name].contiguous().numpy().tobytes() for name in FACTORS]
        assert out.read_bytes() == bytes(4096) + b"".join(parts)
        assert answer["whole"] == dict(zip(FACTORS, map(crc32, parts), strict=True))
        assert (answer["error"], answer["algorithm"]) == (expected.error, expected.algorithm)

        full = {**request, "record": "/dev/full"}
        with pytest.raises(
            ResourceError, match=r"cannot write /dev/full at byte 4096 .*No space left"
        ) as caught:
            worker.ask(full, stop)
        assert caught.value.hint == "free some"

        catalog_of(torch.full(SHAPE, torch.inf), tmp_path / "weights")
        worker.read(catalog, "up.weight", reader, "up.weight")
        with pytest.raises(SourceError, match=r"up\.weight: has values"):
            worker.ask(request, stop)

        stop.set()
        with pytest.raises(CancelledError):
            worker.ask(request, stop)
        assert worker._process.stdin is not None
        worker._process.stdin.close()  # as when this process is gone
        assert worker._process.wait(timeout=600) == 0
