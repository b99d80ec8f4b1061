"""Outputs at `az://`, from Azurite (`npm install -g azurite`), and at `gs://`, by requests as Google documents them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from isal.isal_zlib import crc32

import shardkit
from shardkit.errors import ResourceError
from shardkit.files import uploads
from shardkit.files.remote.writers import writer_of
from tests.operations.uploading.conftest import LARGE, WRITES, make, objects
from tests.operations.uploading.test_in_store import (  # noqa: F401
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
from tests.operations.uploading.test_in_store import (  # noqa: F401
    test_of_two_that_commit_one_wins as test_of_two_that_commit_parts_one_wins,
)
from tests.operations.uploading.test_uploading import (  # noqa: F401
    test_a_hub_model_has_the_bytes_of_a_local_one,
    test_a_run_that_failed_is_resumed,
    test_a_sharded_checkpoint_has_the_bytes_of_a_local_one,
    test_a_source_that_is_damaged_leaves_nothing,
    test_an_answer_to_the_marker_that_is_lost,
    test_an_output_is_replaced,
    test_it_is_a_source,
    test_nothing_is_visible_before_the_marker,
    test_of_two_that_commit_one_wins,
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


def test_requests_that_change_the_store(served: servers.Served, out: str) -> None:
    """Conditions hold; parts may come in any order, and are listed."""
    store, path = writer_of(out), f"{out}/one"
    assert (store.head(path), store.get(path)) == (None, None)
    assert store.put_if(path, b"first", crc32(b"first"), None)
    assert not store.put_if(path, b"other", crc32(b"other"), None)
    data, etag = store.get(path) or (b"", "")
    assert data == b"first"
    assert store.put_if(path, b"second", crc32(b"second"), etag)
    assert not store.put_if(path, b"third", crc32(b"third"), etag)
    assert store.has(path, b"second")
    parts = [bytes([number]) * (5 * MIB) for number in (1, 2)] + [b"end"]
    upload, sent = store.begin(path), []
    for number in (3, 1, 2):
        data = parts[number - 1]
        sent.append(store.send_part(path, upload, number, data, crc32(data)))
    known = store.sent_parts(path, upload) or {}
    assert {number: part.size for number, part in known.items()} == {
        number: len(data) for number, data in enumerate(parts, 1)
    }
    content = b"".join(parts)
    stored = store.complete(path, upload, sorted(sent), crc32(content))
    found = store.head(path)
    assert found is not None
    assert (found.size, found.etag) == (stored.size, stored.etag) == (len(content), found.etag)
    assert store.has(path, content)
    assert list(store.objects(out)) == [(path, len(content))]
    for _ in range(2):
        store.delete(path)
    assert store.head(path) is None


def test_what_is_spoiled_on_the_way_is_sent_again(served: servers.Served, out: str) -> None:
    """The store compares the MD5 of each body."""
    served.proxy.garbles = lambda seen: seen.sent_nbytes > LARGE and len(served.proxy.garbled) < 2
    WRITES["consolidate"](served.home, out)
    assert len(served.proxy.garbled) == 2
    assert shardkit.verify(out, full=True).problems == ()


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


def test_what_is_left_is_shown_and_given_up(served: servers.Served, out: str) -> None:
    served.proxy.strikes = lambda seen: seen.sent_nbytes > uploads.PART_NBYTES // 2 and "__2_0" in seen.path
    served.proxy.faults[:] = ["403"] * 100
    with pytest.raises(ResourceError):
        WRITES["preshard"](served.home, out, jobs=1)
    served.proxy.reset()
    status = shardkit.status(out)
    assert status.stored is not None
    assert (status.is_there, status.stored.num_files) == (False, 2)
    shardkit.abort(out)
    assert not objects(out)


def test_names_that_cannot_be_signed_are_refused(served: servers.Served, tmp_path: Path) -> None:
    place = f"{served.root}/a b/out"
    if served.root.startswith("az"):
        with pytest.raises(shardkit.UsageError, match="special characters"):
            WRITES["preshard"](served.home, place)
    else:
        WRITES["preshard"](served.home, place)
        assert shardkit.verify(place, full=True).ok
