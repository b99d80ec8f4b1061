"""Outputs at `az://`, from Azurite (`npm install -g azurite`), and at `gs://`, by requests as Google documents them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardkit
from shardkit.errors import ResourceError
from tests.operations.stored.conftest import WRITES, make
from tests.operations.stored.test_outputs import (  # noqa: F401
    test_a_hub_model_has_the_bytes_of_a_local_one,
    test_a_run_that_failed_is_resumed,
    test_a_sharded_checkpoint_has_the_bytes_of_a_local_one,
    test_a_source_that_is_damaged_gives_no_output,
    test_an_answer_to_the_marker_that_is_lost,
    test_an_output_is_replaced,
    test_it_is_a_source,
    test_nothing_is_visible_before_the_marker,
    test_of_two_jobs_that_commit_one_wins,
)
from tests.operations.stored.test_parts import (  # noqa: F401
    runs,
    test_a_commit_that_died_before_it_cleaned_up,
    test_a_file_that_is_gone_is_missed,
    test_a_part_that_is_late_replaces_no_file,
    test_a_part_that_was_killed_goes_on,
    test_parts_at_once_write_what_one_process_writes,
    test_parts_replace_an_output,
    test_stock_torch_reads_what_parts_wrote,
    whole,
)
from tests.operations.stored.test_parts import (  # noqa: F401
    test_of_two_that_commit_one_wins as test_of_two_that_commit_parts_one_wins,
)
from tests.worlds import stores as servers

pytestmark = pytest.mark.prove

MIB = 1 << 20


@pytest.fixture(scope="module", params=["google", "azure"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Served]:
    home = tmp_path_factory.mktemp("clouds")
    with servers.reached(request.param, home) as proxy:
        make(home)
        yield servers.Served(home, proxy, servers.ROOTS[request.param])


def test_faults_of_the_store(served: servers.Served, out: str) -> None:
    served.proxy.strikes = lambda seen: seen.method in ("PUT", "POST") and bool(seen.sent_nbytes)
    served.proxy.faults[:] = ["500", "", "reset", "", "lost", "", "", "503"]
    WRITES["consolidate"](served.home, out)
    assert len(served.proxy.struck) == 4
    assert shardkit.diff(out, served.home / "hub").is_equal
    served.proxy.faults[:] = ["403"] * 3
    with pytest.raises(ResourceError, match="denies access") as refused:
        WRITES["preshard"](served.home, f"{out}-2")
    assert "sig=" not in str(refused.value)
