"""Outputs in buckets: what each kind of output does, and what only stores need."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import pytest

from shardkit.errors import ResourceError, SourceError, UsageError
from shardkit.files.output.bucket import BucketOutput, status
from shardkit.files.output.contract import JobEnded, JobRecord, OutputExists
from shardkit.files.remote import contract, objects
from shardkit.files.remote.objects import Objects
from tests.files.outputs.conformance import (
    ALL,
    MARKER,
    OLD,
    OutputPlace,
    OutputTests,
    add,
    commit,
    expected,
    make_record,
)
from tests.worlds import stores as servers

_numbers = itertools.count()


class BucketPlace(OutputPlace):
    """An address in a bucket.

    Args:
        proxy: in front of the store.
        address: of the output.
    """

    sees_other_jobs = exists_is_refused = False

    def __init__(self, proxy: servers.Proxy, address: str) -> None:
        self.proxy, self.address, self.objects = proxy, address, Objects(address)
        self._put = {MARKER}

    def output(self, *, overwrite: bool = False) -> BucketOutput:
        def may_replace(address: str) -> None:
            assert address == self.address
            if not overwrite:
                raise OutputExists(f"{address} exists")

        return BucketOutput(self.address, marker=MARKER, may_replace=may_replace, overwrite=overwrite)

    def look(self, name: str) -> bytes | None:
        found = self.objects.get(name)
        return None if found is None else found.data

    def put(self, files: dict[str, bytes]) -> None:
        for name, content in (*files.items(), (MARKER, json.dumps(sorted(files)).encode())):
            self.objects.put(name, len(content), lambda content=content: [content])
            self._put.add(name)

    def leftovers(self) -> list[str]:
        return sorted(self.objects.sizes().keys() - self._put - (self.read() or {}).keys())

    def damage_record(self) -> None:
        (name,) = (name for name in self.objects.sizes() if name.endswith("/job.json"))
        self.objects.put(name, 3, lambda: [b"{}]"])

    def lose(self, record: JobRecord, number: int) -> None:
        self.objects.delete([record.files[number].name])


@pytest.fixture(scope="module", params=servers.WRITABLE)
def reached(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[servers.Proxy, str]]:
    with servers.reached(request.param, tmp_path_factory.mktemp("stores")) as proxy:
        yield proxy, servers.ROOTS[request.param]


@pytest.fixture
def place(reached: tuple[servers.Proxy, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketPlace]:
    proxy, root = reached
    monkeypatch.setattr(contract, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(objects, "FIRST_PAUSE_S", 0.0)
    proxy.reset()
    yield BucketPlace(proxy, f"{root}/out/{next(_numbers)}")
    proxy.reset()


class TestBucketOutput(OutputTests):
    """The tests that each kind has to pass."""


def is_put(part: str) -> Callable[[servers.Seen], bool]:
    """Return what is true for a put of an object whose key ends so, or a part of it."""
    return lambda seen: seen.method in ("PUT", "POST") and unquote(seen.path).partition("?")[0].endswith(part)


def is_note(seen: servers.Seen) -> bool:
    """True for a request that reads a note."""
    return seen.method == "GET" and unquote(seen.path).endswith(".json")


def is_delete(seen: servers.Seen) -> bool:
    """True for a request that removes objects."""
    return seen.method == "DELETE" or seen.path.endswith("?delete")


def strike(place: BucketPlace, part: str, *faults: str) -> None:
    """Let faults happen to the next puts of an object."""
    place.proxy.strikes, place.proxy.faults[:] = is_put(part), list(faults)


def before(place: BucketPlace, matches: Callable[[servers.Seen], bool], call: Callable[[], object]) -> None:
    """Call something once, just before the next request that matches is carried out."""
    todo = [call]

    def first(seen: servers.Seen) -> None:
        if todo and matches(seen):
            todo.pop()()

    place.proxy.before = first


def make(place: BucketPlace, *, overwrite: bool = False, seed: str = "new") -> None:
    """Begin, write and commit a job."""
    with place.output(overwrite=overwrite) as output:
        output.begin(make_record(seed))
        add(output, ALL, seed)
        commit(output, seed)


def ready(place: BucketPlace, *, overwrite: bool = False) -> BucketOutput:
    """Return an output whose files are finished."""
    output = place.output(overwrite=overwrite)
    output.begin(make_record())
    add(output, ALL)
    return output


class TestReplacing:
    def test_a_marker_that_was_replaced_meanwhile(self, place: BucketPlace) -> None:
        place.put(OLD)
        output, other = ready(place, overwrite=True), place.output(overwrite=True)
        other.begin(make_record("other"))
        add(other, ALL, "other")
        commit(other, "other")
        with pytest.raises(OutputExists, match="changed while it was being written"):
            commit(output)
        assert place.read() == expected("other")
        make(place, overwrite=True)
        assert place.read() == expected()

    def test_a_marker_that_was_replaced_after_the_last_look(self, place: BucketPlace) -> None:
        place.put(OLD)
        output, other = ready(place, overwrite=True), {**OLD, "new.bin": b"new"}
        before(place, is_put(MARKER), lambda: place.put(other))
        with pytest.raises(OutputExists, match="changed while it was being written"):
            commit(output)
        assert json.loads(place.look(MARKER) or b"") == sorted(other)

    def test_a_marker_that_was_removed_meanwhile(self, place: BucketPlace) -> None:
        place.put(OLD)
        output = ready(place, overwrite=True)
        before(place, is_put(MARKER), lambda: place.objects.delete([MARKER]))
        with pytest.raises(OutputExists, match="changed while it was being written"):
            commit(output)
        assert place.read() is None

    def test_an_output_that_appears_while_a_job_begins(self, place: BucketPlace) -> None:
        before(place, is_put("/job.json"), lambda: place.put(OLD))
        with pytest.raises(OutputExists):
            place.output().begin(make_record())
        assert place.leftovers() == []
        assert place.read() == OLD

    def test_overwrite_alone_does_not_replace_what_is_protected(self, place: BucketPlace) -> None:
        place.put(OLD)

        def protect(address: str) -> None:
            raise OutputExists(f"{address} is somebody else's")

        for overwrite, may_replace, says in (
            (True, protect, "somebody else's"),
            (False, lambda _: None, "exists"),
        ):
            output = BucketOutput(place.address, marker=MARKER, may_replace=may_replace, overwrite=overwrite)
            with pytest.raises(OutputExists, match=says):
                output.begin(make_record())
        assert place.leftovers() == []

    def test_readers_of_an_older_output_do_not_meet_files_of_the_new_one(self, place: BucketPlace) -> None:
        place.put({**OLD, "tokenizer.json": b"old", "tokenizer.chunks": b"old"})
        output = ready(place, overwrite=True)
        assert (place.look("tokenizer.json"), place.look("tokenizer.chunks")) == (b"old", b"old")
        commit(output)
        assert place.read() == expected()


class TestConditions:
    """A store that ignores conditions is refused before anything is written."""

    CREATE = ("if-none-match", "x-goog-if-generation-match")
    REPLACE = ("if-match", "x-goog-if-generation-match")

    @pytest.mark.parametrize("dropped", [CREATE, REPLACE])
    def test_they_are_ignored(self, place: BucketPlace, dropped: tuple[str, ...]) -> None:
        place.put(OLD)
        place.proxy.drops = dropped
        with pytest.raises(UsageError, match="the store ignores conditions"):
            place.output(overwrite=True).begin(make_record())
        assert place.leftovers() == []
        assert place.read() == OLD

    def test_a_store_without_metadata(self, place: BucketPlace) -> None:
        place.proxy.drops = ("x-amz-meta-shardkit_job", "x-goog-meta-shardkit_job", "x-ms-meta-shardkit_job")
        with pytest.raises(SourceError, match="keeps no metadata"):
            place.output().begin(make_record())


UNCLEAR = ("lost", "late 500")
"""The request was carried out, and the client does not hear of it."""


class TestUnclearAnswers:
    """The marker and the record are looked at, and their tags decide."""

    @pytest.mark.parametrize("fault", [*UNCLEAR, "500", "409", "reset"])
    def test_once(self, place: BucketPlace, fault: str) -> None:
        place.put(OLD)
        strike(place, "/job.json", fault)
        output = ready(place, overwrite=True)
        assert place.proxy.struck == [fault]
        strike(place, MARKER, fault)
        commit(output)
        assert place.proxy.struck == [fault] * 2
        assert place.read() == expected()
        assert place.leftovers() == []

    @pytest.mark.parametrize("fault", UNCLEAR)
    def test_the_marker_of_somebody_else_is_there(self, place: BucketPlace, fault: str) -> None:
        output = ready(place)
        strike(place, MARKER, fault)
        before(place, is_put(MARKER), lambda: place.put(OLD))
        with pytest.raises(OutputExists, match="appeared while it was being written"):
            commit(output)
        assert place.proxy.struck == [fault]
        assert place.read() == OLD

    def test_a_twin_was_faster(self, place: BucketPlace) -> None:
        output, twin = ready(place), ready(place)
        before(place, is_put(MARKER), lambda: commit(twin))
        with pytest.raises(JobEnded) as caught:
            commit(output)
        assert caught.value.is_committed
        assert place.read() == expected()
        assert place.leftovers() == []

    def test_the_store_fails_for_long(self, place: BucketPlace) -> None:
        output = ready(place)
        strike(place, MARKER, *["500"] * contract.NUM_TRIES)
        with pytest.raises(ResourceError, match="cannot be reached or fails"):
            commit(output)
        assert place.read() is None
        with place.output() as again:
            again.begin(make_record())
            assert set(again.notes()) == {*ALL}
            commit(again)
        assert place.read() == expected()

    def test_what_is_left_after_the_marker_is_removed_later(self, place: BucketPlace) -> None:
        """As after a kill between the two."""
        output = ready(place)
        place.proxy.strikes = is_delete
        place.proxy.faults[:] = ["403"]
        commit(output)
        assert place.proxy.struck == ["403"]
        assert place.read() == expected()
        assert place.leftovers()
        assert status(place.address) == []
        assert place.output().join() is None
        with pytest.raises(JobEnded) as caught:
            place.output().begin(make_record())
        assert caught.value.is_committed
        assert place.leftovers() == []

    def test_abort_removes_only_the_job_of_an_output(self, place: BucketPlace) -> None:
        output = ready(place)
        place.proxy.strikes = is_delete
        place.proxy.faults[:] = ["403"]
        commit(output)
        place.output().abort()
        assert place.leftovers() == []
        assert place.read() == expected()


class TestTwins:
    """Processes of one job meet at the worst moments."""

    def test_a_commit_between_the_look_at_the_marker_and_the_record(self, place: BucketPlace) -> None:
        twin = ready(place)
        before(place, is_put("/job.json"), lambda: commit(twin))
        with pytest.raises(JobEnded) as caught:
            place.output().begin(make_record())
        assert caught.value.is_committed
        assert place.leftovers() == []
        assert place.read() == expected()

    def test_a_commit_while_notes_are_read(self, place: BucketPlace) -> None:
        twin, output = ready(place), place.output()
        output.begin(make_record())
        before(place, is_note, lambda: commit(twin))
        with pytest.raises(JobEnded) as caught:
            output.notes()
        assert caught.value.is_committed

    def test_a_note_that_is_forgotten_while_notes_are_read(self, place: BucketPlace) -> None:
        output, twin = ready(place), ready(place)
        before(place, is_note, lambda: twin.forget(ALL))
        assert output.notes().keys() < {*ALL}

    def test_a_note_that_is_damaged(self, place: BucketPlace) -> None:
        output = ready(place)
        (name,) = (name for name in place.objects.sizes() if name.endswith("/2.json"))
        place.objects.put(name, 1, lambda: [b"{"])
        assert set(output.notes()) == {0, 1, 3}

    def test_a_late_twin_sends_nothing_more(self, place: BucketPlace) -> None:
        late, twin = place.output(), ready(place)
        late.begin(make_record())
        before(place, is_put("tokenizer.json"), lambda: commit(twin))
        with pytest.raises(JobEnded):
            add(late, [2, 0, 1])
        assert place.leftovers() == []
        assert not [seen for seen in place.proxy.seen if is_put("-00001-of-00001.bin")(seen)][2:]


class TestSeveralJobs:
    def test_all_are_listed(self, place: BucketPlace) -> None:
        make(place, seed="made")
        for seed, numbers in (("first", [0]), ("second", [1, 3])):
            output = place.output(overwrite=True)
            output.begin(make_record(seed))
            add(output, numbers, seed)
        found = {job.record.command: job.finished for job in status(place.address)}
        assert found == {make_record("first").command: {0}, make_record("second").command: {1, 3}}
        with pytest.raises(UsageError, match="2 jobs are under way") as caught:
            place.output(overwrite=True).join()
        assert all(command in str(caught.value.problems) for command in found)
        place.output().abort()
        assert status(place.address) == []
        assert place.leftovers() == []
        assert place.read() == expected("made")

    def test_an_abort_that_was_interrupted(self, place: BucketPlace) -> None:
        ready(place)
        place.proxy.strikes = is_delete
        place.proxy.faults[:] = [*["403"] * 20, ""]  # the record is removed, the data is not
        with pytest.raises(ResourceError, match="denies access"):
            place.output().abort()
        place.proxy.faults.clear()
        assert [name for name in place.leftovers() if name.endswith(".bin")]
        assert status(place.address) == []
        place.output().abort()
        assert place.leftovers() == []

    def test_an_empty_place(self, place: BucketPlace) -> None:
        assert status(place.address) == []
        assert place.output().join() is None
        place.output().abort()

    def test_a_store_that_is_read_only(self) -> None:
        with pytest.raises(UsageError, match="hf:// is read only"):
            BucketOutput(
                "hf://somebody/model@" + "0" * 40, marker=MARKER, may_replace=lambda _: None, overwrite=False
            )


class TestForks:
    def test_a_child_is_refused(self, place: BucketPlace) -> None:
        ready(place)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                place.output().begin(make_record())
            except ResourceError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        said = os.read(reading, 1000).decode()
        os.close(reading)
        assert "this process was forked" in said
