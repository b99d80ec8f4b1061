"""On two real ranks under the installed torch: preshard, three phases, save, and going on from any version's checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.versions.conftest import FEW, unpack
from tests.worlds.processes import run_script

pytestmark = [pytest.mark.prove, pytest.mark.dist]

VERSIONS = [path.name.removesuffix(".tar.xz") for path in FEW]
PER_VERSION = ("reshard", "SafeReader", "load_into")
OWN = ("stock dcp.load", "three phases", "diagnose", "save")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    out = tmp_path_factory.mktemp("running")
    written = {}
    for version, archive in zip(VERSIONS, FEW, strict=True):
        written[version] = str(out / f"written-{version}")
        unpack(archive, Path(written[version]))
    script = os.path.join(os.path.dirname(__file__), "running_world.py")
    run_script(script, json.dumps({"out": str(out), "written": written}))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "case", [*OWN, *(f"{kind} {version}" for version in VERSIONS for kind in PER_VERSION)]
)
def test_on_two_ranks(told: list[dict[str, str]], case: str) -> None:
    for rank, found in enumerate(told):
        assert case in found, f"rank {rank} did not come to it"
        assert found[case] == "", f"rank {rank}: {found[case]}"
