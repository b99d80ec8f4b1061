"""What is settled of a file on its way into a store: each part is taken once, when all of it is."""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import pytest

from shardkit.files import uploads

SIZE, STEP = 1000, 64


def make_file(monkeypatch: pytest.MonkeyPatch) -> uploads.SentFile:
    monkeypatch.setattr(uploads, "part_nbytes", lambda size: STEP)
    file = uploads.SentFile(cast(Any, None), "s3://bucket/file")
    file.truncate(SIZE)
    return file


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_taken_once_they_are_settled(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As threads do it: stretches tile the file, and each is settled from its start, further and further."""
    file, choose = make_file(monkeypatch), random.Random(seed)
    cuts = sorted({0, SIZE, *(choose.randrange(SIZE) for _ in range(6))})
    stretches = list(itertools.pairwise(cuts))
    at, settled, taken = {start: start for start, _ in stretches}, set[int](), list[int]()
    while at:
        start = choose.choice(sorted(at))
        stop = next(stop for begin, stop in stretches if begin == start)
        at[start] = min(at[start] + choose.randrange(1, 200), stop)
        settled.update(range(start, at[start]))
        taken += file._take_settled(start, at[start])
        whole = [
            n
            for n in range(-(-SIZE // STEP))
            if settled.issuperset(range(n * STEP, min((n + 1) * STEP, SIZE)))
        ]
        assert sorted(taken) == whole
        if at[start] == stop:
            del at[start]
    assert sorted(taken) == list(range(-(-SIZE // STEP)))
    assert not file._take_settled(0, SIZE)


def test_no_object_has_too_many_parts() -> None:
    for size in (0, 1, 8 << 20, 80 << 30, (80 << 30) + 1, 5 << 40):
        step = uploads.part_nbytes(size)
        assert step >= uploads.PART_NBYTES
        assert step % (1 << 20) == 0
        assert -(-size // step) <= uploads.MAX_PARTS
