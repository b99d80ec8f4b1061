"""What becomes of a request whose answer is no answer, with every kind of store: the object is read and compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from isal.isal_zlib import crc32

from shardkit.errors import ResourceError
from shardkit.files.remote import contract
from shardkit.files.remote.contract import NUM_TRIES, UploadedPart
from shardkit.files.remote.writers import StoreWriter, writer_of
from tests.worlds import stores as servers

MIB = 1 << 20
UNCLEAR = ("lost", "late 500")
"""The request was carried out, and the client does not hear of it."""
Place = tuple[servers.Proxy, StoreWriter, str]


@pytest.fixture(
    scope="module",
    params=[*servers.PARAMS, *(pytest.param(each, marks=pytest.mark.prove) for each in ("google", "azure"))],
)
def reached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with servers.reached(request.param, tmp_path_factory.mktemp("stores")) as proxy:
        root = servers.ROOTS[request.param]
        yield proxy, writer_of(root), root


@pytest.fixture
def place(reached: Place, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The proxy, what writes, and the path of an object that no other test uses."""
    proxy, store, root = reached
    monkeypatch.setattr(contract, "FIRST_WAIT_S", 0.0)
    proxy.reset()
    yield proxy, store, f"{root}/{request.node.name.replace('[', '-').replace(']', '').replace(' ', '-')}"
    proxy.reset()


def strike(proxy: servers.Proxy, *faults: str) -> None:
    """Let faults happen to the next requests that make an object."""
    proxy.strikes = lambda seen: (
        seen.method == "POST"
        or (seen.method == "PUT" and "partNumber" not in seen.path and "blockid" not in seen.path)
    )
    proxy.faults[:] = faults[::-1]


def put_if(store: StoreWriter, path: str, data: bytes, etag: str | None = None) -> bool:
    return store.put_if(path, data, crc32(data), etag)


@pytest.mark.parametrize("num_faults", [1, NUM_TRIES])
@pytest.mark.parametrize("fault", UNCLEAR)
def test_a_marker_that_was_put_is_found_to_be_there(place: Place, fault: str, num_faults: int) -> None:
    proxy, store, path = place
    strike(proxy, *[fault] * num_faults)
    assert put_if(store, path, b"first")
    assert len(proxy.struck) == num_faults
    _, etag = store.get(path) or (b"", "")
    strike(proxy, *[fault] * num_faults)
    assert put_if(store, path, b"second", etag)
    assert store.has(path, b"second")


@pytest.mark.parametrize("fault", [*UNCLEAR, "500", "reset"])
def test_a_marker_of_somebody_else_is_not_taken_for_ones_own(place: Place, fault: str) -> None:
    proxy, store, path = place
    assert put_if(store, path, b"theirs")
    _, etag = store.get(path) or (b"", "")
    strike(proxy, fault)
    assert not put_if(store, path, b"ours")
    assert put_if(store, path, b"theirs again", etag)
    strike(proxy, fault)
    assert not put_if(store, path, b"ours", etag)
    assert store.has(path, b"theirs again")


def test_only_other_bytes_are_another_run(place: Place) -> None:
    """Whatever stands between may have sent a request twice: a clear "exists" is no proof that somebody was faster."""
    _, store, path = place
    assert put_if(store, path, b"marker")
    assert put_if(store, path, b"marker")
    assert put_if(store, path, b"marker", '"00000000000000000000000000000000"')
    assert not store.create(path, b"marker", crc32(b"marker"))


def test_a_marker_that_never_arrives(place: Place) -> None:
    proxy, store, path = place
    strike(proxy, *["500"] * NUM_TRIES)
    with pytest.raises(ResourceError, match="cannot be reached"):
        put_if(store, path, b"marker")
    assert len(proxy.struck) == NUM_TRIES
    assert store.get(path) is None


def upload(store: StoreWriter, path: str) -> tuple[str, list[UploadedPart], bytes]:
    """Send all parts of a file; return the upload, the parts, and the content."""
    parts, begun = [bytes([1]) * (5 * MIB), b"end"], store.begin(path)
    sent = [store.send_part(path, begun, at, data, crc32(data)) for at, data in enumerate(parts, 1)]
    return begun, sent, b"".join(parts)


@pytest.mark.parametrize("fault", UNCLEAR)
def test_the_last_request_of_a_file(place: Place, fault: str) -> None:
    proxy, store, path = place
    begun, sent, content = upload(store, path)
    strike(proxy, fault)
    made = store.complete(path, begun, sent, crc32(content))
    assert proxy.struck == [fault]
    found = store.head(path)
    assert found is not None
    assert (made.size, made.etag) == (len(content), found.etag)
    assert store.has(path, content)
    strike(proxy, fault)
    store.put(path, b"in one request", crc32(b"in one request"))
    assert proxy.struck[1:] == [fault]
    assert store.has(path, b"in one request")


def test_the_last_request_of_a_file_of_which_nothing_is_heard(place: Place) -> None:
    """Azure says nothing of a file by which it could be known again: the run ends, and the next one goes on."""
    proxy, store, path = place
    begun, sent, content = upload(store, path)
    strike(proxy, *["late 500"] * NUM_TRIES)
    if path.startswith("az"):
        with pytest.raises(ResourceError, match="cannot be reached"):
            store.complete(path, begun, sent, crc32(content))
    else:
        assert store.complete(path, begun, sent, crc32(content)).size == len(content)
    assert store.has(path, content)


def test_a_file_of_somebody_else_is_not_taken_for_ones_own(place: Place) -> None:
    proxy, store, path = place
    other = bytes(5 * MIB + 3)
    store.put(path, other, crc32(other))
    begun, sent, content = upload(store, path)
    assert len(other) == len(content)
    strike(proxy, *["500"] * NUM_TRIES)
    with pytest.raises(ResourceError, match="cannot be reached"):
        store.complete(path, begun, sent, crc32(content))
    store.abort(path, begun)
    store.abort(path, begun)
