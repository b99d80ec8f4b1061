"""Outputs in buckets: what each kind of output does, and what only stores need."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from shardkit.errors import ResourceError, ShardkitError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.output import bucket
from shardkit.files.output.bucket import BucketOutput, status, unnamed_data
from shardkit.files.output.contract import JobEnded, JobRecord, JobStatus, OutputExists
from shardkit.files.remote import contract, objects
from shardkit.files.remote.objects import Objects
from tests.files.outputs.conformance import (
    ALL,
    MARKER,
    OLD,
    OutputPlace,
    OutputTests,
    add,
    begun,
    commit,
    ended,
    expected,
    make_record,
    together,
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

    def status(self) -> list[JobStatus]:
        return status(self.address)

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
    return lambda seen: seen.method in ("PUT", "POST") and seen.path.partition("?")[0].endswith(part)


def is_get(part: str) -> Callable[[servers.Seen], bool]:
    """Return what is true for reading an object whose key ends so."""
    return lambda seen: seen.method == "GET" and seen.path.partition("?")[0].endswith(part)


def is_note(seen: servers.Seen) -> bool:
    """True for a request that reads a note."""
    return seen.method == "GET" and seen.path.endswith(".json")


def is_delete(seen: servers.Seen) -> bool:
    """True for a request that removes objects."""
    return seen.method == "DELETE" or seen.path.endswith("?delete") or "comp=batch" in seen.path


def strike(place: BucketPlace, matches: Callable[[servers.Seen], bool], *faults: str) -> None:
    """Let faults happen to the next requests that match."""
    place.proxy.strikes, place.proxy.faults[:] = matches, list(faults)


def before(place: BucketPlace, matches: Callable[[servers.Seen], bool], call: Callable[[], object]) -> None:
    """Call something once, just before the next request that matches is carried out."""
    todo = [call]

    def first(seen: servers.Seen) -> None:
        if todo and matches(seen):
            todo.pop()()

    place.proxy.before = first


def make(place: BucketPlace, *, overwrite: bool = False, seed: str = "new") -> None:
    """Begin, write and commit a job."""
    with begun(place, ALL, seed, overwrite=overwrite) as output:
        commit(output, seed)


def ready(
    place: BucketPlace, numbers: Iterable[int] = ALL, seed: str = "new", *, overwrite: bool = False
) -> BucketOutput:
    """Return an output with files that are finished."""
    output = place.output(overwrite=overwrite)
    output.begin(make_record(seed))
    add(output, numbers, seed)
    return output


def protect(address: str) -> None:
    """Refuse to replace an output."""
    raise OutputExists(f"{address} is somebody else's")


class TestReplacing:
    def test_a_marker_that_was_replaced_meanwhile(self, place: BucketPlace) -> None:
        place.put(OLD)
        output = ready(place, overwrite=True)
        make(place, overwrite=True, seed="other")
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
        for overwrite, may_replace, says in (
            (True, protect, "somebody else's"),
            (False, lambda _: None, "exists"),
        ):
            output = BucketOutput(place.address, marker=MARKER, may_replace=may_replace, overwrite=overwrite)
            with pytest.raises(OutputExists, match=says):
                output.begin(make_record())
        assert place.leftovers() == []

    def test_readers_of_an_older_output_do_not_meet_files_of_the_new_one(self, place: BucketPlace) -> None:
        place.put({**OLD, "tokenizer.json": b"old"})
        output = ready(place, overwrite=True)
        assert place.look("tokenizer.json") == b"old"
        commit(output)
        assert place.read() == expected()


class TestConditions:
    """A store that ignores conditions is refused before anything is written."""

    CREATE = ("if-none-match", "x-goog-if-generation-match")
    REPLACE = ("if-match", "x-goog-if-generation-match")

    @pytest.mark.parametrize("dropped", [CREATE, REPLACE])
    def test_they_are_ignored(self, place: BucketPlace, dropped: tuple[str, ...]) -> None:
        if place.address.startswith("az://"):
            pytest.skip("the signature of a request covers its conditions")
        place.put(OLD)
        place.proxy.drops = dropped
        with pytest.raises(UsageError, match="the store ignores conditions"):
            place.output(overwrite=True).begin(make_record())
        assert place.leftovers() == []
        assert place.read() == OLD

    def test_a_store_without_metadata(self, place: BucketPlace) -> None:
        if place.address.startswith("az://"):
            pytest.skip("the signature of a request covers its metadata")
        place.proxy.drops = ("x-amz-meta-shardkit_job", "x-goog-meta-shardkit_job")
        with pytest.raises(SourceError, match="keeps no metadata"):
            place.output().begin(make_record())


UNCLEAR = ("lost", "late 500")
"""The request was carried out, and the client does not hear of it."""


class TestUnclearAnswers:
    """The marker and the record are looked at, and their tags decide."""

    @pytest.mark.parametrize("fault", [*UNCLEAR, "500", "409", "reset"])
    def test_once(self, place: BucketPlace, fault: str) -> None:
        place.put(OLD)
        strike(place, is_put("/job.json"), fault)
        output = ready(place, overwrite=True)
        assert place.proxy.struck == [fault]
        strike(place, is_put(MARKER), fault)
        commit(output)
        assert place.proxy.struck == [fault] * 2
        assert place.read() == expected()
        assert place.leftovers() == []

    @pytest.mark.parametrize("fault", UNCLEAR)
    def test_the_marker_of_somebody_else_is_there(self, place: BucketPlace, fault: str) -> None:
        output = ready(place)
        strike(place, is_put(MARKER), fault)
        before(place, is_put(MARKER), lambda: place.put(OLD))
        with pytest.raises(OutputExists, match="appeared while it was being written"):
            commit(output)
        assert place.proxy.struck == [fault]
        assert place.read() == OLD

    def test_a_twin_was_faster(self, place: BucketPlace) -> None:
        output, twin = ready(place), ready(place)
        before(place, is_put(MARKER), lambda: commit(twin))
        with ended(is_committed=True):
            commit(output)
        assert place.read() == expected()
        assert place.leftovers() == []

    def test_the_store_fails_for_long(self, place: BucketPlace) -> None:
        output = ready(place)
        strike(place, is_put(MARKER), *["500"] * contract.NUM_TRIES)
        with pytest.raises(ResourceError, match="cannot be reached or fails"):
            commit(output)
        assert place.read() is None
        with place.output() as again:
            again.begin(make_record())
            assert set(again.notes(ALL)) == {*ALL}
            commit(again)
        assert place.read() == expected()

    def test_what_is_left_after_the_marker_is_removed_later(self, place: BucketPlace) -> None:
        """As after a kill between the two."""
        output = ready(place)
        strike(place, is_delete, "403")
        commit(output)
        assert place.proxy.struck == ["403"]
        assert place.read() == expected()
        assert place.leftovers()
        assert status(place.address) == []
        assert place.output().join() is None
        with ended(is_committed=True):
            place.output().begin(make_record())
        assert place.leftovers() == []

    def test_abort_removes_only_the_job_of_an_output(self, place: BucketPlace) -> None:
        output = ready(place)
        strike(place, is_delete, "403")
        commit(output)
        place.output().abort()
        assert place.leftovers() == []
        assert place.read() == expected()


class TestTwins:
    """Processes of one job meet at the worst moments."""

    def test_a_commit_between_the_look_at_the_marker_and_the_record(self, place: BucketPlace) -> None:
        twin = ready(place)
        before(place, is_put("/job.json"), lambda: commit(twin))
        with ended(is_committed=True):
            place.output().begin(make_record())
        assert place.leftovers() == []
        assert place.read() == expected()

    def test_a_commit_while_the_old_marker_is_read(self, place: BucketPlace) -> None:
        place.put(OLD)
        output, twin = ready(place, overwrite=True), ready(place, overwrite=True)
        before(place, is_get(MARKER), lambda: commit(twin))
        with ended(is_committed=True):
            commit(output)
        assert place.read() == expected()

    def test_a_commit_while_notes_are_read(self, place: BucketPlace) -> None:
        twin, output = ready(place), ready(place, [])
        before(place, is_note, lambda: commit(twin))
        with ended(is_committed=True):
            output.notes(ALL)

    def test_a_note_that_is_forgotten_while_notes_are_read(self, place: BucketPlace) -> None:
        output, twin = ready(place), ready(place)
        before(place, is_note, lambda: twin.forget(ALL))
        assert output.notes(ALL).keys() < {*ALL}

    def test_a_note_that_is_damaged(self, place: BucketPlace) -> None:
        output = ready(place)
        (name,) = (name for name in place.objects.sizes() if name.endswith("/2.json"))
        place.objects.put(name, 1, lambda: [b"{"])
        assert set(output.notes(ALL)) == {0, 1, 3}

    def test_a_late_twin_sends_nothing_more(self, place: BucketPlace) -> None:
        late, twin = ready(place, []), ready(place)
        before(place, is_put("tokenizer.json"), lambda: commit(twin))
        with pytest.raises(JobEnded):
            add(late, [2, 0, 1])
        assert place.leftovers() == []
        assert not [seen for seen in place.proxy.seen if is_put("-00001-of-00001.bin")(seen)][2:]


class TestSeveralJobs:
    def test_all_are_listed(self, place: BucketPlace) -> None:
        make(place, seed="made")
        for seed, numbers in (("first", [0]), ("second", [1, 3])):
            ready(place, numbers, seed, overwrite=True)
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
        strike(place, is_delete, *["403"] * 20, "")  # the record is removed, the data is not
        with pytest.raises(ResourceError, match="denies access"):
            place.output().abort()
        # Google's objects are removed one by one, and some of these requests may still be on their way.
        assert [name for name in place.leftovers() if name.endswith(".bin")]
        place.proxy.faults.clear()
        assert status(place.address) == []
        place.output().abort()
        assert place.leftovers() == []

    def test_a_store_that_is_read_only(self) -> None:
        """It is refused before anybody is asked which commit a branch is."""
        for name in ("model", "model@main", "model@" + "0" * 40):
            with pytest.raises(UsageError, match="hf:// is read only"):
                BucketOutput(
                    f"hf://somebody/{name}", marker=MARKER, may_replace=lambda _: None, overwrite=False
                )


OLD_DATA = {"data-0123456789abcdef/__0_0.distcp": b"old", "model-01234567-00001-of-00001.bin": b"old"}
"""Data as earlier versions name it."""


class TestOutputsOfEarlierVersions:
    """Their markers have no tags."""

    def test_one_is_replaced_and_its_data_stays(self, place: BucketPlace) -> None:
        place.put(OLD_DATA)
        output = ready(place, overwrite=True)
        assert output.replaced == ()
        commit(output)
        assert place.read() == expected()
        assert output.replaced == tuple(
            f"{place.address}/{prefix}" for prefix in ("data-0123456789abcdef/", "model-01234567-")
        )
        assert all(place.look(name) == b"old" for name in OLD_DATA)
        assert unnamed_data(place.address, [MARKER, "absent"]) == [*output.replaced]

    def test_the_data_of_an_output_is_named(self, place: BucketPlace) -> None:
        place.put(OLD_DATA)
        assert unnamed_data(place.address, [MARKER]) == []
        place.objects.put("data-fedcba9876543210/.metadata", 1, lambda: [b"x"])  # a save that was slower
        ready(place, overwrite=True)
        assert unnamed_data(place.address, [MARKER]) == []

    def test_a_job_of_one_is_left_alone(self, place: BucketPlace) -> None:
        for name in (".shardkit-parts-0123456789abcdef/plan.json", *OLD_DATA):
            place.objects.put(name, 2, lambda: [b"{}"])
        assert status(place.address) == []
        place.output().abort()
        assert place.output().join() is None
        make(place)
        assert place.read() == expected()
        assert len(place.leftovers()) == 3
        assert len(unnamed_data(place.address, [MARKER])) == 2


class TestSharedNames:
    """Files without the job's hash in their names, such as a config, belong to one job alone."""

    def test_a_file_of_a_person_stays(self, place: BucketPlace) -> None:
        for name in ("README.md", "tokenizer.json"):
            output = ready(place)
            place.objects.put(name, 4, lambda: [b"mine"])
            with pytest.raises(OutputExists, match=f"{name} is there, with other content"):
                commit(output)
            assert place.look(name) == b"mine"
            place.objects.delete([name])
        assert place.read() is None
        commit(output)
        assert place.read() == expected()

    def test_a_file_of_the_same_content_is_taken(self, place: BucketPlace) -> None:
        place.objects.put("README.md", 3, lambda: [b"new"])
        make(place)
        assert place.read() == expected()

    def test_what_may_be_replaced_is_looked_at_again(self, place: BucketPlace) -> None:
        output = BucketOutput(place.address, marker=MARKER, may_replace=protect, overwrite=True)
        output.begin(make_record())
        add(output, ALL)
        with pytest.raises(OutputExists, match="somebody else's"):
            commit(output)
        assert place.read() is None

    def test_of_two_commits_one_output_is_made(self, place: BucketPlace) -> None:
        output, rival = ready(place), ready(place, seed="rival")
        before(place, is_put("README.md"), lambda: commit(rival, "rival"))
        with pytest.raises(OutputExists, match="appeared while it was being written"):
            commit(output)
        assert place.read() == expected("rival")

    def test_a_commit_that_was_interrupted_holds_its_files_until_it_is_aborted(
        self, place: BucketPlace
    ) -> None:
        rival = ready(place, seed="rival")
        strike(place, is_put(MARKER), *["500"] * contract.NUM_TRIES)
        with pytest.raises(ResourceError):
            commit(rival, "rival")
        output = ready(place)
        with pytest.raises(UsageError, match="another job is under way") as caught:
            commit(output)
        assert make_record("rival").command in str(caught.value.problems)
        assert place.look("README.md") == b"rival"
        place.output().abort()
        output = ready(place)
        commit(output)
        assert place.read() == expected()


class TestRequests:
    """What takes requests, or room."""

    def test_objects_of_others_are_not_listed(self, place: BucketPlace) -> None:
        place.put({**OLD, "data-0123456789abcdef/__0_0.distcp": b"old"})
        place.proxy.seen.clear()
        output = ready(place, overwrite=True)
        assert output.notes(ALL).keys() == {*ALL}
        commit(output)
        status(place.address)
        place.output().abort()
        listed = [dict(parse_qsl(urlsplit(seen.path).query)) for seen in place.proxy.seen]
        listed = [query for query in listed if "prefix" in query]
        above = [
            query
            for query in listed
            if "/.shardkit-" not in query["prefix"] and "/data-" not in query["prefix"]
        ]
        assert listed
        assert all("delimiter" in query for query in above), above
        assert not [query for query in listed if "0123456789abcdef" in query["prefix"]]

    def test_an_object_that_is_gone_keeps_no_other(self, place: BucketPlace) -> None:
        """Google's store is sent a request for each object, and none after one that fails."""
        if place.address.startswith("az://"):
            pytest.skip("Azure answers for each object of a request")
        output = ready(place)
        strike(place, is_delete, "404")
        output.forget(ALL)
        assert place.proxy.struck == ["404"]
        assert output.notes(ALL) == {}


MakeOutput = Callable[[str | None], BucketOutput]


class TestScratch:
    """Files are written on this machine first."""

    @pytest.fixture
    def output(self, place: BucketPlace) -> MakeOutput:
        def make_output(scratch: str | None) -> BucketOutput:
            output = BucketOutput(
                place.address, marker=MARKER, may_replace=lambda _: None, overwrite=False, scratch=scratch
            )
            output.begin(make_record())
            return output

        return make_output

    def test_it_is_where_a_person_wants_it(self, output: MakeOutput, tmp_path: Path) -> None:
        mine = tmp_path / "scratch-mine"
        mine.mkdir()
        with output(str(tmp_path)).scratch() as scratch:
            assert Path(scratch).parent == tmp_path
            assert Path(scratch).stat().st_mode & 0o77 == 0
            assert mine.exists()
        assert [*tmp_path.iterdir()] == [mine]

    def test_by_default_it_is_beside_the_cache(
        self, output: MakeOutput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(storage, "is_in_memory", lambda path: False)
        monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
        with output(None).scratch() as scratch:
            assert Path(scratch).parent == tmp_path / "cache/scratch"

    def test_what_the_system_refuses(self, output: MakeOutput, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with (
            pytest.raises(ResourceError, match=r"scratch files in .*file") as caught,
            output(str(tmp_path / "file")).scratch(),
        ):
            pass
        assert "--scratch DIR" in str(caught.value.hint)
        begun = output(str(tmp_path))
        with begun.scratch() as scratch, pytest.raises(ResourceError, match="No such file"):
            begun.add(scratch, 0, {})


def test_scratch_is_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cache, the system's directory for temporary files and /var/tmp, the first on a disk."""
    in_memory = {str(tmp_path)}
    monkeypatch.setattr(storage, "is_in_memory", lambda path: path in in_memory)
    (tmp_path / "disk").mkdir()
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "disk"))
    assert bucket.scratch_home(None) == str(tmp_path / "disk")
    monkeypatch.setenv("SHARDKIT_CACHE", "off")
    assert bucket.scratch_home(None) == str(tmp_path / "disk")
    monkeypatch.delenv("TMPDIR")
    assert bucket.scratch_home(None) == "/var/tmp"
    assert bucket.scratch_home(str(tmp_path)) == str(tmp_path)
    in_memory.add("/var/tmp")
    with pytest.raises(ResourceError, match="no directory on a disk"):
        bucket.scratch_home(None)
    with pytest.raises(UsageError, match="not on this machine"):
        bucket.scratch_home("s3://bucket/scratch")


def test_room_for_scratch() -> None:
    assert bucket.scratch_nbytes([]) == 0
    assert bucket.scratch_nbytes([3]) == 3
    assert bucket.scratch_nbytes([1, 5, 2, 4]) == 9


class TestJobsWithoutFiles:
    """Their data lies in a folder with the hash, and nothing lists it."""

    def begin(self, place: BucketPlace, beside: Path) -> tuple[BucketOutput, str]:
        """Begin a job, put its data, and write what goes beside it; return its folder too."""
        record = make_record("save")
        output, folder = place.output(), f"data-{record.hash[:16]}"
        output.begin(replace(record, files=(), draft={}))
        place.objects.put(f"{folder}/0.bin", 5, lambda: [b"whole"])
        (beside / folder).mkdir()
        (beside / folder / "config.json").write_text("{}")
        (beside / MARKER).write_text(json.dumps([f"{folder}/0.bin", f"{folder}/config.json"]))
        return output, folder

    def test_it_is_committed(self, place: BucketPlace, tmp_path: Path) -> None:
        output, folder = self.begin(place, tmp_path)
        output.commit(str(tmp_path))
        output.discard()  # as after an error that hides that the commit went well
        assert place.read() == {f"{folder}/0.bin": b"whole", f"{folder}/config.json": b"{}"}
        assert place.leftovers() == []

    @pytest.mark.parametrize("end", ["abort", "discard"])
    def test_it_is_removed(self, place: BucketPlace, end: str, tmp_path: Path) -> None:
        output, _ = self.begin(place, tmp_path)
        other = ready(place, [0])
        if end == "abort":
            place.output().abort()
            assert place.leftovers() == []
            return
        output.discard()
        assert [job.record.hash for job in status(place.address)] == [make_record().hash]
        assert set(other.notes(ALL)) == {0}
        other.abort()
        assert place.leftovers() == []

    def test_it_is_kept_where_another_was_faster(self, place: BucketPlace, tmp_path: Path) -> None:
        output, folder = self.begin(place, tmp_path)
        place.put(OLD)
        with pytest.raises(OutputExists):
            output.commit(str(tmp_path))
        output.keep(str(tmp_path))
        place.output().abort()
        assert place.leftovers() == [f"{folder}/0.bin", f"{folder}/config.json"]
        assert place.read() == OLD


_INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
from pathlib import Path
from shardkit.files.output.bucket import BucketOutput
from shardkit.files.output.contract import JobFile, JobRecord

address, digest, name, nbytes = *sys.argv[1:4], int(sys.argv[4])
output = BucketOutput(address, marker="marker.json", may_replace=lambda _: None, overwrite=False)
files = [JobFile(name=name, size=nbytes)]
output.begin(JobRecord(hash=digest, command="", directory="", files=files))
with output.scratch() as scratch:
    (Path(scratch) / name).write_bytes(bytes(nbytes))
    print("sending", flush=True)
    output.add(scratch, 0, {})
"""


class TestSending:
    """Large files, in parts."""

    def test_two_files_are_sent_at_a_time(self, place: BucketPlace, monkeypatch: pytest.MonkeyPatch) -> None:
        under_way, most, lock = set[str](), list[int](), threading.Lock()
        first_two, put = threading.Barrier(2, timeout=600), Objects.put

        def counted(there: Objects, name: str, *rest: Any) -> None:
            if name.endswith(".json") and "tokenizer" not in name:  # a note
                put(there, name, *rest)
                return
            with lock:
                under_way.add(name)
                most.append(len(under_way))
                is_first = len(most) <= 2
            if is_first:
                first_two.wait()
            put(there, name, *rest)
            with lock:
                under_way.remove(name)

        output = ready(place, [])
        monkeypatch.setattr(Objects, "put", counted)
        assert together(*(lambda number=number: add(output, [number]) for number in ALL)) == [None] * 4
        assert max(most) == 2
        assert output.notes(ALL).keys() == {*ALL}

    def test_ctrl_c_ends_an_upload(self, place: BucketPlace, tmp_path: Path) -> None:
        num_parts = 16
        nbytes, digest = num_parts * objects.PART_NBYTES, make_record().hash
        name = f"model-{digest[:8]}.bin"
        heard = list[bool]()
        child = subprocess.Popen(
            [sys.executable, "-c", _INTERRUPTED, place.address, digest, name, str(nbytes)],
            env={**os.environ, "SHARDKIT_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

        def interrupt(seen: servers.Seen) -> None:
            if seen.sent_nbytes == objects.PART_NBYTES and not heard:
                heard.append(True)
                child.send_signal(signal.SIGINT)

        place.proxy.before = interrupt
        _, said = child.communicate()
        assert child.returncode == -signal.SIGINT, said
        parts = [seen for seen in place.proxy.seen if seen.sent_nbytes == objects.PART_NBYTES]
        assert 1 <= len(parts) < num_parts
        assert place.look(name) is None
        assert status(place.address)[0].finished == set()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def check_words(error: ShardkitError, address: str) -> None:
    """Check that an error says where, and nothing that a log should not have."""
    said = "".join(traceback.format_exception(error)) + f"{error.hint} {list(error.problems)}"
    assert isinstance(error, ResourceError)
    assert address in said
    assert not [secret for secret in (servers.SECRET, "http://", "uploadId", "Debug") if secret in said]


@pytest.mark.prove
@pytest.mark.parametrize("fault", ["403", "reset"])
def test_from_any_request_on_the_store_fails(
    place: BucketPlace, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors are in our words, show no secret, and the same command ends well once the store works again."""
    monkeypatch.setattr(objects, "NUM_RETRIES", 0)
    for first in itertools.count():
        here, num_requests = BucketPlace(place.proxy, f"{place.address}/{first}"), 0
        here.put(OLD)

        def fails(_: servers.Seen, first: int = first) -> bool:
            nonlocal num_requests
            num_requests += 1
            return num_requests > first

        place.proxy.strikes, place.proxy.faults[:] = fails, [fault] * 10_000
        try:
            make(here, overwrite=True)
        except ShardkitError as error:
            check_words(error, place.address)
        is_over = num_requests <= first
        place.proxy.reset()
        with contextlib.suppress(JobEnded):
            make(here, overwrite=True)
        assert here.read() == expected()
        assert here.leftovers() == []
        if is_over:
            break
    assert first > 20


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
