"""A few dozen faults on the way from a store; `python -m tests.torture.stores_reading` makes thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.stores_reading import Torture, patient_for_a_moment
from tests.worlds import stores as servers

pytestmark = pytest.mark.prove


def test_faults_lead_to_right_bytes_or_a_clear_error(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with servers.reached("moto", tmp_path) as proxy, patient_for_a_moment():
        tally = Torture(home, proxy).run(40)
    assert tally.broken == []
    assert tally.right
    assert tally.refused
