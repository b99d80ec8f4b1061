"""Parts that write into a store: in real processes, on real servers; some are killed, some come late."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.errors import IncompleteError, IntegrityError, ResourceError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.output.bucket import BucketOutput
from shardkit.files.remote.objects import Objects
from tests.bits import flip_byte
from tests.operations.consolidate.checkpoints import load
from tests.operations.stored.conftest import LARGE, MIB, WRITES, fetch, objects, put
from tests.torture.stores import Runs
from tests.worlds import stores as servers

pytestmark = pytest.mark.prove

MARKERS = {"consolidate": "model.safetensors.index.json"}


@pytest.fixture(scope="module")
def runs(served: servers.Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A process that forks the command line."""
    home, part_nbytes = tmp_path_factory.mktemp("runs"), served.proxy.least_part_nbytes
    found = Runs(served.proxy, home, part_nbytes=part_nbytes)
    yield found
    found.close()


def command(home: Path, verb: str, out: str, *more: str) -> list[str]:
    """Return what is typed; each verb has four files or more."""
    options = {
        "preshard": [f"{home}/hub", out, "--world-size", "4", "--wrap", "none", "--layout", "declared"],
        "reshard": [f"{home}/dcp", out, "--world-size", "4"],
        "consolidate": [f"{home}/dcp", out, "--manifest", "--max-shard-size", "4MB", "--ask-class", "off"],
    }
    return [verb, *options[verb], "--no-progress", *more]


def together(runs: Runs, commands: list[list[str]]) -> list[int]:
    runs.begin(commands)
    return runs.end()


def parts_of(home: Path, verb: str, out: str, count: int, *more: str) -> list[list[str]]:
    return [command(home, verb, out, f"--part={n}/{count}", *more) for n in range(1, count + 1)]


@pytest.fixture(scope="module")
def whole(served: servers.Served, runs: Runs) -> dict[str, dict[str, bytes]]:
    """By verb: what one process writes."""
    found = {}
    for verb in WRITES:
        assert together(runs, [command(served.home, verb, f"{served.root}/whole-{verb}")]) == [0]
        found[verb] = objects(f"{served.root}/whole-{verb}")
    return found


def sends(seen: servers.Seen, marker: str) -> bool:
    """True for the request that makes an output of what is there; Azure's has its key behind the path."""
    return seen.method == "PUT" and seen.path.partition("?")[0].endswith(f"/out/{marker}")


def data_puts(served: servers.Served) -> list[str]:
    """Return the names of files whose data were sent, one for each part of a file."""
    return [
        os.path.basename(seen.path.partition("?")[0])
        for seen in served.proxy.seen
        if seen.method == "PUT" and seen.sent_nbytes > LARGE
    ]


@pytest.mark.parametrize("verb", WRITES)
def test_parts_at_once_write_what_one_process_writes(
    served: servers.Served, runs: Runs, whole: dict[str, dict[str, bytes]], out: str, verb: str
) -> None:
    """A twin among them, one that comes late, and a commit that finds nothing to do."""
    commands = parts_of(served.home, verb, out, 3)
    assert together(runs, [*commands, commands[1]]) == [0, 0, 0, 0]
    assert objects(out) == whole[verb]
    served.proxy.seen.clear()
    assert together(runs, [commands[2], ["commit", out]]) == [0, 0]
    assert not data_puts(served)
    assert objects(out) == whole[verb]


def is_note(path: str) -> bool:
    """True for the note of a file."""
    return re.search(r"\.shardkit-[0-9a-f]{16}/\d+\.json$", path) is not None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_reads_what_parts_wrote(
    served: servers.Served, runs: Runs, tmp_path: Path, out: str
) -> None:
    assert together(runs, parts_of(served.home, "preshard", out, 2)) == [0, 0]
    want = load_file(served.home / "hub/model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(str(fetch(out, tmp_path / "copy"))))
    assert all(torch.equal(state[name], tensor) for name, tensor in want.items())
    assert shardkit.verify(out, full=True).problems == ()


@pytest.mark.parametrize("verb", WRITES)
def test_a_part_that_was_killed_goes_on(
    served: servers.Served, runs: Runs, whole: dict[str, dict[str, bytes]], out: str, verb: str
) -> None:
    """Its finished file is not sent again, by itself or by another number of parts."""
    mine = command(served.home, verb, out, "--part=1/2", "--jobs=1")
    lock, state = threading.Lock(), {"noted": False, "killed": False}

    def strikes(seen: servers.Seen) -> bool:
        """Kill it once a file is noted, when it asks for the next thing."""
        with lock:
            if state["noted"] and not state["killed"]:
                state["killed"] = True
                os.kill(runs.children[0], signal.SIGKILL)
            state["noted"] |= seen.method == "PUT" and is_note(seen.path.partition("?")[0])
        return False

    served.proxy.strikes, served.proxy.faults[:] = strikes, ["500"]
    runs.begin([mine])
    assert runs.end() == [-signal.SIGKILL]
    served.proxy.reset()
    assert MARKERS.get(verb, ".metadata") not in objects(out)
    finished = {json.loads(data)["digest"]["name"] for name, data in objects(out).items() if is_note(name)}
    assert finished
    assert together(runs, parts_of(served.home, verb, out, 3)) == [0, 0, 0]
    assert not finished & set(data_puts(served))
    assert objects(out) == whole[verb]


@pytest.mark.parametrize("verb", ["preshard", "consolidate"])
def test_of_two_that_commit_one_wins(
    served: servers.Served,
    runs: Runs,
    whole: dict[str, dict[str, bytes]],
    out: str,
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both send the marker at the same moment."""
    leave_uncommitted(served, runs, verb, out)
    marker, both, inner = MARKERS.get(verb, ".metadata"), threading.Barrier(2), served.proxy.under_way

    def together_with(seen: servers.Seen) -> Any:
        if sends(seen, marker):
            both.wait(600)
        return inner(seen)

    with monkeypatch.context() as patch:
        patch.setattr(served.proxy, "under_way", together_with)
        assert together(runs, [["commit", out]] * 2) == [0, 0]
    assert not both.broken
    assert objects(out) == whole[verb]


def leave_uncommitted(served: servers.Served, runs: Runs, verb: str, out: str, *more: str) -> None:
    """Let parts write all, and the last one fail when it sends the marker."""
    marker = MARKERS.get(verb, ".metadata")
    served.proxy.strikes = lambda seen: sends(seen, marker)
    served.proxy.faults[:] = ["403"] * 20
    commands = parts_of(served.home, verb, out, 2, *more)
    assert together(runs, commands[:1]) == [0]
    assert together(runs, commands[1:]) == [5]
    served.proxy.reset()


def test_a_commit_that_died_before_it_cleaned_up(
    served: servers.Served, runs: Runs, whole: dict[str, dict[str, bytes]], out: str
) -> None:
    """The marker is there, and so is what the parts shared; whoever comes next removes that."""
    for late in (["commit", f"{out}-0/out"], command(served.home, "preshard", f"{out}-1/out", "--part=1/2")):
        here = late[1] if late[0] == "commit" else late[2]
        leave_uncommitted(served, runs, "preshard", here)
        (record,) = [name for name in objects(here) if name.endswith("/job.json")]
        job = Objects(here).get(record)
        assert job is not None
        for name, data in whole["preshard"].items():
            if not name.endswith((".distcp", ".metadata")):
                put(here, name, data)
        tags = {"shardkit_job": job.tags["shardkit_job"]}
        assert Objects(here).put_if(".metadata", whole["preshard"][".metadata"], tags, None) == "put"
        assert together(runs, [late]) == [0]
        assert objects(here) == whole["preshard"]


def test_jobs_do_not_see_each_other_and_the_marker_decides(served: servers.Served, out: str) -> None:
    WRITES["preshard"](served.home, out, part="1/2")
    shardkit.preshard(served.home / "hub", out, world_size=4, wrap="none", part="2/2")
    assert len(shardkit.status(out).jobs) == 2
    with pytest.raises(UsageError, match="2 jobs are under way"):
        shardkit.commit(out)
    WRITES["preshard"](served.home, out, part="2/2")
    with pytest.raises(UsageError, match="exists"):
        shardkit.preshard(served.home / "hub", out, world_size=4, wrap="none", part="1/2")
    assert shardkit.abort(out).aborted
    assert shardkit.status(out).jobs == ()
    assert shardkit.inspect(out).world_size == 3


@pytest.mark.parametrize("verb", ["preshard", "consolidate"])
def test_parts_replace_an_output(
    served: servers.Served, runs: Runs, whole: dict[str, dict[str, bytes]], out: str, verb: str
) -> None:
    """The old one is there until the new one is, and its data stay for those who read it."""
    shardkit.preshard(served.home / "hub", out, world_size=2, wrap="none") if verb == "preshard" else (
        shardkit.consolidate(served.home / "dcp", out, max_shard_size="8MB", base=served.home / "hub")
    )
    old, marker = objects(out), MARKERS.get(verb, ".metadata")
    commands = parts_of(served.home, verb, out, 2, "--overwrite")
    assert together(runs, [command(served.home, verb, out, "--part=1/2")]) == [2]
    assert together(runs, commands[:1]) == [0]
    assert {name: data for name, data in objects(out).items() if name in old} == old
    assert shardkit.verify(out, full=True).problems == ()
    assert together(runs, commands[1:]) == [0]
    found = objects(out)
    assert found[marker] == whole[verb][marker]
    assert {name: found.get(name) for name in whole[verb]} == whole[verb]
    assert {name for name in old if "data-" in name or "model-" in name} <= found.keys()
    assert together(runs, commands) == [0, 0]


def test_an_output_that_somebody_else_made_meanwhile(served: servers.Served, out: str) -> None:
    """It is not replaced, unless a part or the commit is asked to."""
    WRITES["preshard"](served.home, out, part="1/3")
    WRITES["preshard"](served.home, out, part="2/3")
    shardkit.preshard(served.home / "hub", out, world_size=2, wrap="none")
    other = objects(out)[".metadata"]
    with pytest.raises(UsageError, match="exists"):
        WRITES["preshard"](served.home, out, part="3/3")
    with pytest.raises(IncompleteError, match="1 file of 3 is missing"):
        shardkit.commit(out, overwrite=True)
    assert objects(out)[".metadata"] == other
    assert not WRITES["preshard"](served.home, out, part="3/3", overwrite=True).was_there
    assert shardkit.inspect(out).world_size == 3


def test_a_commit_replaces_what_came_meanwhile(served: servers.Served, runs: Runs, out: str) -> None:
    leave_uncommitted(served, runs, "preshard", out)
    shardkit.preshard(served.home / "hub", out, world_size=2, wrap="none")
    with pytest.raises(UsageError, match="exists"):
        shardkit.commit(out)
    assert not shardkit.commit(out, overwrite=True).by_another
    assert shardkit.inspect(out).world_size == 4
    assert not [name for name in objects(out) if name.startswith(".shardkit-")]


def test_status_shows_a_job_and_abort_removes_it(served: servers.Served, out: str) -> None:
    WRITES["preshard"](served.home, out)
    before = objects(out)

    def again(part: str) -> None:
        shardkit.reshard(served.home / "dcp", out, world_size=4, part=part, overwrite=True)

    again("1/4")
    served.proxy.strikes = lambda seen: seen.method == "PUT" and seen.sent_nbytes > LARGE
    served.proxy.faults[:] = ["403"] * 20
    with pytest.raises(ResourceError):
        again("2/4")
    served.proxy.reset()
    (job,) = shardkit.status(out).jobs
    assert (job.num_parts, job.num_files, job.finished_files) == (4, 4, 1)
    assert [part for part, _, _ in job.missing] == ["2/4", "3/4", "4/4"]
    with pytest.raises(IncompleteError, match="3 files of 4 are missing, of 3 parts"):
        shardkit.commit(out)
    assert shardkit.abort(out).aborted
    assert objects(out) == before
    assert shardkit.status(out).jobs == ()


def test_a_part_that_is_aborted_meanwhile(
    served: servers.Served, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = BucketOutput.add

    def aborted(*args: Any) -> None:
        shardkit.abort(out)
        add(*args)

    monkeypatch.setattr(BucketOutput, "add", aborted)
    with pytest.raises(IncompleteError, match="aborted by another process"):
        WRITES["preshard"](served.home, out, part="1/3", jobs=1)
    assert not objects(out)


def test_a_part_that_is_late_replaces_no_file(
    served: servers.Served, runs: Runs, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have committed while it slept, and its source may be another one by now."""
    add, turns, lock = BucketOutput.add, [1], threading.Lock()

    def late(*args: Any) -> None:
        with lock:
            if turns:
                turns.clear()
                assert together(runs, parts_of(served.home, "preshard", out, 2)) == [0, 0]
                served.proxy.seen.clear()
        add(*args)

    monkeypatch.setattr(BucketOutput, "add", late)
    options: dict[str, Any] = {"world_size": 4, "wrap": "none", "layout": "declared", "part": "1/2"}
    result = shardkit.preshard(served.home / "hub", out, jobs=1, **options)
    assert result.part is not None
    assert result.part.by_another
    assert not data_puts(served)


@pytest.mark.parametrize("spoil", [{"files": 5}, {"format": 0}, {"hash": []}])
def test_a_damaged_record_says_how_to_begin_anew(
    served: servers.Served, out: str, spoil: dict[str, Any]
) -> None:
    WRITES["preshard"](served.home, out, part="1/3")
    (record,) = [name for name in objects(out) if name.endswith("/job.json")]
    stored = Objects(out).get(record)
    assert stored is not None
    data = json.dumps({**json.loads(stored.data), **spoil}).encode()
    assert Objects(out).put_if(record, data, stored.tags, stored.version) == "put"
    for call in (lambda: shardkit.status(out), lambda: shardkit.commit(out)):
        with pytest.raises(SourceError, match=r"damaged|another version"):
            call()
    shardkit.abort(out)
    assert ".metadata" not in objects(out)


def test_a_file_that_is_gone_is_missed(served: servers.Served, runs: Runs, out: str) -> None:
    leave_uncommitted(served, runs, "preshard", out)
    Objects(out).delete([next(name for name in objects(out) if name.endswith("__1_0.distcp"))])
    with pytest.raises(IncompleteError, match="1 file of 4 is missing, of 1 part"):
        shardkit.commit(out)
    assert ".metadata" not in objects(out)
    for command_ in parts_of(served.home, "preshard", out, 2):  # the first part lacks it
        assert together(runs, [command_]) == [0]
    assert shardkit.diff(out, served.home / "hub").is_equal


def test_whoever_commits_reads_no_tensor(
    served: servers.Served, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that are cut along a later dim are read as a whole by one of the parts each, for their CRC-32."""
    options: dict[str, Any] = {"mesh": "dp_shard=2,tp=2", "wrap": "none", "layout": "declared"}
    options["parallel_rules"] = ["layers.[024]=rowwise", "layers.[135]=colwise"]
    shardkit.preshard(served.home / "hub", f"{out}-whole", **options)
    served.proxy.strikes = lambda seen: seen.method == "PUT" and seen.path.endswith("/out/.metadata")
    served.proxy.faults[:] = ["403"] * 20
    shardkit.preshard(served.home / "hub", out, part="1/2", **options)
    with pytest.raises(ResourceError):
        shardkit.preshard(served.home / "hub", out, part="2/2", **options)
    served.proxy.reset()
    read, preadv = list[int](), storage.preadv

    def counted(fd: int, buffers: Sequence[Any], start: int) -> int:
        read.append(preadv(fd, buffers, start))
        return read[-1]

    monkeypatch.setattr(storage, "preadv", counted)
    shardkit.commit(out)
    assert sum(read) < MIB
    assert objects(out) == objects(f"{out}-whole")


def test_a_part_asks_for_its_own_notes_alone(served: servers.Served, out: str) -> None:
    options: dict[str, Any] = {"world_size": 60, "wrap": "none", "layout": "declared"}
    num_files = len(shardkit.preshard(served.home / "hub", out, dry_run=True, **options).file_bytes)
    shardkit.preshard(served.home / "hub", out, part="1/2", **options)
    served.proxy.seen.clear()
    assert shardkit.preshard(served.home / "hub", out, part="1/20", **options).part is not None
    assert (
        len(
            [
                seen
                for seen in served.proxy.seen
                if is_note(seen.path.partition("?")[0]) and seen.method == "GET"
            ]
        )
        <= 3
    )
    assert len(served.proxy.seen) < 6 * num_files / 20 + 30


def test_the_sha256_of_files_that_parts_wrote(served: servers.Served, out: str) -> None:
    for verb, write in WRITES.items():
        for part in ("1/2", "2/2"):
            write(served.home, f"{out}-{verb}", part=part, sha256=True)
        write(served.home, f"{out}-{verb}-whole", sha256=True)
        assert objects(f"{out}-{verb}") == objects(f"{out}-{verb}-whole")


def test_a_manifest_file(served: servers.Served, tmp_path: Path, out: str) -> None:
    """As on a disk, whoever commits writes it."""
    made = tmp_path / "manifest.json"
    for part in ("1/2", "2/2"):
        assert not made.exists()
        WRITES["consolidate"](served.home, out, part=part, manifest_file=made)
    assert made.read_bytes() == objects(out)["shardkit.json"]
    WRITES["consolidate"](served.home, out, part="1/2", manifest_file=made, exist_ok=True)


def test_the_manifest_file_of_what_is_there(served: servers.Served, tmp_path: Path, out: str) -> None:
    """Only the process that made the output writes it; a note says so."""
    made = tmp_path / "manifest.json"
    more: dict[str, Any] = {"base": served.home / "hub", "manifest_file": made}
    assert not shardkit.consolidate(served.home / "dcp", out, **more).was_there
    written = made.read_bytes()
    assert shardkit.consolidate(served.home / "dcp", out, **more, exist_ok=True).was_there
    assert made.read_bytes() == written
    made.unlink()
    result = shardkit.consolidate(served.home / "dcp", out, **more, exist_ok=True)
    assert not made.exists()
    assert [line for line in result.notes if "manifest.json was not written" in line]


@pytest.mark.parametrize("verb", WRITES)
def test_all_parts_again_are_no_work(served: servers.Served, out: str, verb: str) -> None:
    for part in ("1/2", "2/2"):
        assert not WRITES[verb](served.home, out, part=part).was_there
    there = objects(out)
    served.proxy.seen.clear()
    for part in ("1/2", "2/2"):
        assert WRITES[verb](served.home, out, part=part).was_there
        assert objects(out) == there
    assert not data_puts(served)
    with pytest.raises(UsageError, match="exists"):
        WRITES[verb](served.home, out, part="1/2", dtype="fp16")


def test_what_was_not_trained_comes_from_a_base_in_the_store(
    served: servers.Served, tmp_path: Path, out: str
) -> None:
    text = {f"model.layers.{at}.weight": torch.randn(4, 4) for at in range(3)}
    whole = {name.replace("model.", "model.text."): value for name, value in text.items()}
    whole |= {f"model.tower.{at}.weight": torch.randn(4, 4) for at in range(3)}
    for name, state in (("base", whole), ("part", text)):
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors", {"format": "pt"})
        (tmp_path / name / "config.json").write_text('{"hidden_size": 4}')
    base = f"{out}/base"
    shardkit.consolidate(tmp_path / "base", base, base=tmp_path / "base")
    shardkit.preshard(tmp_path / "part", tmp_path / "dcp", world_size=2, layout="declared")
    for number in (1, 2):
        shardkit.consolidate(
            tmp_path / "dcp",
            f"{out}/made",
            base=base,
            fill_from_base=["model.tower.*"],
            max_shard_size=100,
            part=f"{number}/2",
        )
    made = fetch(f"{out}/made", tmp_path / "made")
    found = load(made)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], value) for name, value in whole.items())


def test_a_damaged_source_is_refused(served: servers.Served, tmp_path: Path, out: str) -> None:
    shutil.copytree(served.home / "dcp", tmp_path / "dcp")
    flip_byte(tmp_path / "dcp" / "__1_0.distcp", MIB)
    said = []
    for number in (1, 2):
        try:
            shardkit.consolidate(tmp_path / "dcp", out, max_shard_size="6MB", part=f"{number}/2")
        except IntegrityError as error:
            said.append(str(error))
    assert said
    assert "model.safetensors.index.json" not in objects(out)


def test_what_a_record_in_a_store_may_not_ask_for(
    served: servers.Served, runs: Runs, out: str, tmp_path: Path
) -> None:
    """Whoever may write there may have written it: it runs no code, and writes no file on this machine."""
    leave_uncommitted(served, runs, "preshard", out)
    (record,) = [name for name in objects(out) if name.endswith("/draft/0")]
    before = objects(out)[record]
    for option, value in {
        "trust_remote_code": True,
        "wrap": "os:abort",
        "manifest_file": str(tmp_path / "x"),
    }.items():
        content = json.loads(before)
        content["command"]["options"][option] = value
        if option == "manifest_file":
            content["command"]["verb"] = "consolidate"
            content["command"]["options"] = {"checkpoint": "x", option: value}
        put(out, record, json.dumps(content).encode())
        with pytest.raises(UsageError, match="does not take from a record in a store"):
            shardkit.commit(out)


def test_what_parts_cannot_do_in_a_store(served: servers.Served, out: str) -> None:
    served.proxy.drops = ("if-none-match", "if-match")
    with pytest.raises(UsageError, match="the store ignores conditions"):
        WRITES["preshard"](served.home, out, part="1/2")
    with pytest.raises(UsageError, match="--push-to-hub"):
        WRITES["consolidate"](served.home, out, part="1/2", push_to_hub="a/b")
    with pytest.raises(UsageError, match="no part was begun"):
        shardkit.commit(out)
    with pytest.raises(UsageError, match="read only"):
        shardkit.commit("hf://a/b")
    assert not objects(out)
