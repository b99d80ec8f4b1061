"""A few kills while an output is written into a store; `python -m tests.torture.outputs` makes thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.outputs import serving

pytestmark = pytest.mark.prove


@pytest.mark.parametrize("kind", ["seaweedfs", "moto", "google"])
def test_what_is_there_is_old_or_new_or_nothing(kind: str, tmp_path: Path) -> None:
    with serving(kind, tmp_path) as torture:
        for number in range(6):
            torture.round(number)
        assert torture.broken == []
        assert torture.kills
