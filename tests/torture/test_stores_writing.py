"""A few faults on the way into a store; `python -m tests.torture.stores_writing` makes thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torture.stores_writing import Torture, small_and_impatient
from tests.worlds import stores as servers

pytestmark = pytest.mark.prove


def test_faults_lead_to_the_whole_output_or_a_clear_error(tmp_path: Path) -> None:
    with servers.reached("moto", tmp_path) as proxy, small_and_impatient(tmp_path):
        tally = Torture(tmp_path / "home", proxy).run(20, seed=8)  # some end well, and some do not
    assert tally.broken == []
    assert tally.right
    assert tally.refused
