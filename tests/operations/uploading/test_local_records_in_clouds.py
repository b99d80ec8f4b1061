"""Parts that compute factors for `gs://` and `az://`, which keep no CRC-32s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operations.uploading import test_local_records_in_parts as in_parts
from tests.operations.uploading.test_local_records_in_parts import (  # noqa: F401
    test_parts_in_any_order_write_what_one_process_writes,
    whole,
)
from tests.worlds import stores as servers

pytestmark = pytest.mark.usefixtures("served", "counted")


@pytest.fixture(scope="module", params=["google", "azure"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Served]:
    home = tmp_path_factory.mktemp("clouds")
    with servers.reached(request.param, home) as proxy:
        yield servers.Served(home, proxy, servers.ROOTS[request.param])


def test_a_record_that_somebody_replaced(
    source: Path,
    out: str,
    whole: dict[str, bytes],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is found by whoever has read it."""
    in_parts.test_a_record_that_somebody_replaced(source, out, whole, tmp_path, monkeypatch, False, 100)
