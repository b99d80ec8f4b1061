"""Objects that are written into a store: in parts, repeated as a whole, refused if damaged on the way, under conditions."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import ceil

import pytest

from shardkit.errors import ResourceError, UsageError
from shardkit.files.remote import contract, objects
from shardkit.files.remote.objects import NO_SUCH_VERSION, Objects
from tests.worlds import stores as servers

Place = tuple[servers.Proxy, Objects]
UPLOAD_NBYTES = objects.upload_nbytes(160 << 20)


@pytest.fixture(scope="module", params=servers.WRITABLE)
def reached(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with servers.reached(request.param, tmp_path_factory.mktemp("stores")) as proxy:
        yield proxy, Objects(f"{servers.ROOTS[request.param]}/sent")


@pytest.fixture
def place(reached: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    proxy, there = reached
    monkeypatch.setattr(contract, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(objects, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(objects, "NUM_RETRIES", 1)
    monkeypatch.setattr(objects, "PART_NBYTES", proxy.least_part_nbytes)
    there.delete(there.sizes())
    proxy.reset()
    yield proxy, there
    proxy.reset()


def is_part(seen: servers.Seen) -> bool:
    return seen.method == "PUT" and ("partNumber=" in seen.path or "comp=block&" in seen.path)


def is_end(seen: servers.Seen) -> bool:
    return (seen.method == "POST" and "uploadId=" in seen.path) or "comp=blocklist" in seen.path


def file_of(num_parts: float) -> list[bytes]:
    """Return a file of so many parts, in pieces."""
    return [bytes([number]) * (objects.PART_NBYTES // 4) for number in range(int(num_parts * 4))]


def send(place: Place, pieces: list[bytes]) -> None:
    place[1].put("file", sum(map(len, pieces)), lambda: iter(pieces))


def check(place: Place, pieces: list[bytes]) -> None:
    found = place[1].get("file")
    assert found is not None
    assert found.data == b"".join(pieces)


@pytest.mark.parametrize("num_parts", [0, 0.25, 1, 1.25, 3])
def test_files_of_any_size(place: Place, num_parts: float) -> None:
    pieces = file_of(num_parts)
    send(place, pieces)
    assert len(list(filter(is_part, place[0].seen))) == (0 if num_parts <= 1 else -(-num_parts // 1))
    check(place, pieces)


def test_parts_grow_so_that_they_are_few(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_MAX_PARTS", 2)
    pieces = file_of(3.5)
    send(place, pieces)
    assert len(list(filter(is_part, place[0].seen))) == 2
    check(place, pieces)


_SEND = """
import resource, sys
from shardkit.files.remote.objects import NO_SUCH_VERSION, Objects
there, piece = Objects(sys.argv[1]), bytes(1 << 20)
there.put("small", 1, lambda: [b"1"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
there.put("file", 160 << 20, lambda: (piece for _ in range(160)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.prove
def test_an_upload_takes_little_memory(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SEND, place[1].path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) << 10 <= 5 * 8 << 20 == UPLOAD_NBYTES


@pytest.mark.parametrize("fault", ["500", "503", "reset", "lost", "late 500", "expired", "gone"])
@pytest.mark.parametrize(("strikes", "num_parts"), [(is_part, 2), (is_end, 1.25)], ids=["part", "end"])
def test_a_fault_at_a_part_or_at_the_end(
    place: Place, strikes: Callable[[servers.Seen], bool], num_parts: float, fault: str
) -> None:
    proxy, _ = place
    pieces = file_of(num_parts)
    proxy.strikes, proxy.faults[:] = strikes, [fault]
    send(place, pieces)
    assert proxy.struck == [fault]
    check(place, pieces)


@pytest.mark.parametrize("num_parts", [0.25, 1.25])
def test_a_body_that_was_damaged_on_the_way(place: Place, num_parts: float) -> None:
    """S3 compares the SHA-256 of each request. obstore sends no checksum to Google and Azure."""
    proxy, there = place
    if not there.path.startswith("s3://"):
        pytest.skip("obstore sends no checksum")
    pieces = file_of(num_parts)
    proxy.strikes, proxy.faults[:] = (lambda seen: seen.method == "PUT"), ["garbled"]
    send(place, pieces)
    assert proxy.struck == ["garbled"]
    check(place, pieces)


@pytest.mark.parametrize("fault", ["500", "reset", "403", "404", "expired"])
@pytest.mark.parametrize("num_parts", [0.25, 1.25])
def test_a_fault_that_lasts(place: Place, fault: str, num_parts: float) -> None:
    proxy, there = place
    proxy.strikes, proxy.faults[:] = (lambda seen: seen.method in ("PUT", "POST")), [fault] * 99
    with pytest.raises(ResourceError) as caught:
        send(place, file_of(num_parts))
    said = f"{caught.value} {caught.value.hint} {caught.value.__cause__} {list(caught.value.problems)}"
    assert "sent/file" in said
    assert not any(secret in said for secret in (servers.SECRET, "http://", "uploadId", "Debug"))
    num_requests = (
        ceil(num_parts) if there.path.startswith("az://") else 1
    )  # Azure's uploads have no beginning
    assert len(proxy.struck) <= objects.NUM_PUTS * (objects.NUM_RETRIES + 1) * num_requests
    proxy.faults.clear()
    assert there.head("file") is None
    send(place, file_of(num_parts))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.EIO, "read"), FileNotFoundError(errno.ENOENT, "read")]
)
def test_an_upload_that_fails_here_is_ended_at_once(place: Place, error: BaseException) -> None:
    """Ctrl-C is such an error: Python runs between the pieces."""
    proxy, there = place
    begun, pieces = time.monotonic(), file_of(2)
    num_read = 0

    def fail() -> Iterator[bytes]:
        nonlocal num_read
        num_read += 1
        yield from pieces[:6]
        raise error

    with pytest.raises(type(error)) as caught:
        there.put("file", 2 * objects.PART_NBYTES, fail)
    assert caught.value is error
    assert num_read == 1
    assert time.monotonic() - begun < 60
    assert there.head("file") is None
    if not there.path.startswith("az://"):  # there is nothing to end
        assert [seen for seen in proxy.seen if seen.method == "DELETE" and "uploadId=" in seen.path]


def test_conditions(place: Place) -> None:
    _, there = place
    ours, theirs = {"shardkit_job": "ours"}, {"shardkit_job": "theirs"}
    assert there.put_if("marker", b"1", ours, None) == "put"
    assert there.put_if("marker", b"1", ours, None) == "same"
    assert there.put_if("marker", b"2", theirs, None) == "other"
    first = there.get("marker")
    assert first is not None
    assert (first.data, first.tags["shardkit_job"]) == (b"1", "ours")
    assert there.put_if("marker", b"2", theirs, first.version) == "put"
    assert there.put_if("marker", b"3", ours, first.version) == "other"
    assert there.put_if("marker", b"3", ours, NO_SUCH_VERSION) == "other"
    assert there.put_if("absent", b"3", ours, first.version) == "other"
    found = there.head("marker")
    assert found is not None
    assert (found.data, found.tags["shardkit_job"]) == (b"", "theirs")


@pytest.mark.parametrize("fault", ["500", "409", "reset", "lost", "late 500"])
def test_an_unclear_answer_is_settled_by_a_look(place: Place, fault: str) -> None:
    proxy, there = place
    for replaced in (None, there.put_if("old", b"1", {"shardkit_job": "old"}, None) and there.head("old")):
        proxy.strikes, proxy.faults[:] = (lambda seen: seen.method == "PUT"), [fault]
        name, version = ("old", replaced.version) if replaced else ("new", None)
        assert there.put_if(name, b"2", {"shardkit_job": "new"}, version) == "put"
        assert not proxy.faults


def test_what_refused_a_put_may_be_gone_before_anyone_can_look(place: Place) -> None:
    """As when the commit of another process removes the record of a job that this one begins."""
    proxy, there = place
    removed = list[str]()

    def remove(seen: servers.Seen) -> None:
        if seen.method == "HEAD" and not removed:
            removed.append(seen.path)
            there.delete(["record"])

    for tags in ({"shardkit_job": "ours"}, {"shardkit_job": "theirs"}):
        assert there.put_if("record", b"1", tags, None) == "put"
        proxy.before = remove
        assert there.put_if("record", b"2", {"shardkit_job": "ours"}, None) == "put"
        proxy.before = lambda seen: None
        stored = there.get("record")
        assert removed
        assert stored is not None
        assert stored.data == b"2"
        there.delete(["record"])
        removed.clear()


def test_a_conditional_put_needs_no_object(place: Place) -> None:
    """ "Not found" is a failure of the store then."""
    place[0].strikes = lambda seen: True
    place[0].faults[:] = ["404"] * 100
    with pytest.raises(ResourceError, match="HTTP 404"):
        place[1].put_if("marker", b"1", {}, None)


def test_copies_lists_and_removals(place: Place) -> None:
    _, there = place
    names = ["folder/\xf6 %2B&=+ name", "folder/plain", "folders"]
    for name in names:
        there.put_if(name, name.encode(), {"shardkit_job": "ours"}, None)
    there.copy(names[0], "copy")
    copied = there.get("copy")
    assert copied is not None
    assert (copied.data, copied.tags["shardkit_job"]) == (names[0].encode(), "ours")
    with pytest.raises(FileNotFoundError):
        there.copy("absent", "copy")
    assert there.sizes() == {name: len(name.encode()) for name in names} | {"copy": len(names[0].encode())}
    assert Objects(f"{there.path}/folder").sizes().keys() == {"\xf6 %2B&=+ name", "plain"}
    there.delete([*names, "absent"])
    assert there.sizes().keys() == {"copy"}
    assert there.head(names[0]) is None
    assert there.get(names[1]) is None


@pytest.mark.parametrize("num_parts", [0, 0.25, 1, 2.5])
def test_what_is_sent_while_it_is_written(place: Place, num_parts: float) -> None:
    pieces, memory = file_of(num_parts), bytearray(objects.PART_NBYTES // 4)
    with place[1].writing("file", sum(map(len, pieces))) as stream:
        for piece in pieces:
            memory[:] = piece  # torch reuses its memory
            assert stream.write(memory) == len(piece)
        assert stream.tell() == sum(map(len, pieces))
        assert place[1].head("file") is None
    check(place, pieces)


def test_what_is_not_written_to_its_end_is_not_there(place: Place) -> None:
    def write() -> None:
        with place[1].writing("file", 1) as stream:
            stream.write(b"".join(file_of(1.5)))
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert place[1].head("file") is None


@pytest.mark.parametrize("num_parts", [0.25, 2.5])
def test_a_fault_while_it_is_written(place: Place, num_parts: float) -> None:
    """The error is the store's, in our words, whatever the writer makes of it."""
    place[0].strikes = lambda seen: seen.method in ("PUT", "POST")
    place[0].faults[:] = ["403"] * 100

    def write() -> None:
        with place[1].writing("file", 1) as stream:
            try:
                for piece in file_of(num_parts):
                    stream.write(piece)
            except ResourceError:
                raise KeyError from None

    with pytest.raises(ResourceError, match="denies access"):
        write()
    place[0].reset()
    assert place[1].head("file") is None
    with place[1].writing("file", 1) as stream:
        stream.write(b"again")
    check(place, [b"again"])


def test_the_hub_is_read_only() -> None:
    with pytest.raises(UsageError, match="hf:// is read only"):
        Objects("hf://somebody/model")
