"""A few of the rounds of `make torture-stores`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture import stores
from tests.worlds.stores import PACKAGES, SERVERS

pytestmark = pytest.mark.prove


@pytest.mark.parametrize("kind", SERVERS)
def test_a_writer_that_is_killed_leaves_the_old_output_or_the_new_one(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed: pip install 'shardkit[stores]'")
    with stores.serving(kind, tmp_path) as store:
        if store is None:
            pytest.skip(f"{kind} is not installed: {PACKAGES[kind]}")
        for number in range(4):
            stores.attempt(store, number)
        for number in range(4):
            stores.attempt_parts(store, number)
