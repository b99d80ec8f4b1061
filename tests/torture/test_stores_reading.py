"""A few dozen faults on the way from a store; `python -m tests.torture.stores_reading` makes thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardkit.files import stores
from tests.torture.stores_reading import Torture, patient_for_a_moment
from tests.worlds import stores as servers


def test_faults_lead_to_right_bytes_or_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shardkit[stores]'")
    with servers.serving("moto", tmp_path / "server") as port, patient_for_a_moment():
        if port is None:
            pytest.skip("moto is not installed (moto[server])")
        proxy, home = servers.Proxy(port), tmp_path / "home"
        home.mkdir()
        for name, value in servers.environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        stores._stores.clear()
        try:
            tally = Torture(home, proxy).run(40)
        finally:
            proxy.close()
            stores._stores.clear()
    assert tally.broken == []
    assert tally.right
    assert tally.refused
