"""Parts that compute factors for a store: in processes, some killed; the bytes are those of one process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.cli import preshard as preshard_command
from shardkit.errors import IncompleteError, IntegrityError, ResourceError, UsageError
from shardkit.files import storage, uploads
from shardkit.files.digest import crc32
from shardkit.files.place.store import StorePlace
from shardkit.files.place.store_notes import StoredRecords
from shardkit.files.remote.writers import writer_of
from shardkit.operations.parts import divided
from shardkit.osft import compute
from shardkit.osft.plan import OsftPlan
from tests.operations.uploading.conftest import NUM_WEIGHTS, check_bytes, objects
from tests.worlds import stores as servers
from tests.worlds.factors import Counting, WorkerHere
from tests.worlds.processes import fork_server

_PARTS = """
import json, os, signal, sys, threading
import shardkit
from shardkit.files.remote.writers import StoreWriter
from shardkit.osft import compute
from tests.worlds.factors import WorkerHere
from tests.worlds.processes import fork

source, out, options, parts, dies = json.loads(sys.argv[1])
compute.FactorWorker = WorkerHere
text, left = dies or ["", 0]
lock = threading.RLock()

def dying(call):
    def called(self, path, *given):
        global left
        if text not in path:
            return call(self, path, *given)
        with lock:  # so that no other of them is under way
            answer = call(self, path, *given)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return answer
    return called

if dies:
    StoreWriter.put, StoreWriter.create = dying(StoreWriter.put), dying(StoreWriter.create)
    StoreWriter.put_if = dying(StoreWriter.put_if)
children = [
    fork(lambda: shardkit.preshard(source, out, part=part, jobs=1, **options)) for part in parts
]
print("codes", [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
"""Parts at the same time. `dies` is a text and a number: each ends when it has written the n-th object with that in its path."""

pytestmark = pytest.mark.usefixtures("served", "counted")
_INSTALLED = [kind for kind in servers.SERVERS if servers.command(kind, 1, Path())]
ONE_SERVER = pytest.mark.parametrize("served", (_INSTALLED or servers.SERVERS)[:1], indirect=True)
"""Of what does not depend on the store."""


def preshard(source: Path | str, out: Path | str, part: str | None = None, **options: Any) -> Any:
    return shardkit.preshard(
        source, out, part=part, **{"world_size": 3, "osft": 0.3, "jobs": 1, "digest": "crc32", **options}
    )


def parts(
    source: Path, out: str, *some: str | None, dies: tuple[str, int] | None = None, **options: Any
) -> list[int]:
    """Run parts, each in a process of its own; return their exit codes. None is all of the job."""
    told = [str(source), out, {"world_size": 3, "osft": 0.3, **options}, some, dies]
    done = fork_server().run({"code": _PARTS, "argument": json.dumps(told)})
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said[-3000:]
    (codes,) = [line.removeprefix("codes ") for line in said.splitlines() if line.startswith("codes ")]
    found: list[int] = json.loads(codes)
    assert all(code in (0, -signal.SIGKILL) for code in found), said[-3000:]
    return found


def named(out: str, folder: str, ending: str = "") -> list[str]:
    """Return the names of what parts share."""
    found = (name.partition(f"/{folder}/") for name in objects(out) if name.startswith(".shardkit-parts-"))
    return sorted(name for _, is_there, name in found if is_there and name.endswith(ending))


@pytest.fixture(scope="module")
def whole(served: servers.Served, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes into this store: the bytes of a local output."""
    home = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDKIT_CACHE", str(home / "cache"))
        patch.setattr(compute, "FactorWorker", WorkerHere)
        preshard(source, f"{served.root}/whole")
        preshard(source, home / "local")
    check_bytes(f"{served.root}/whole", home / "local")
    return objects(f"{served.root}/whole")


def check_done(whole: dict[str, bytes], out: str, tmp_path: Path) -> None:
    """See that an output is that of one process, and that nothing is beside it, in the store or here."""
    assert objects(out) == whole
    assert not writer_of(out).uploads(out)
    assert not list((tmp_path / "cache/factors").glob("*"))


def test_parts_in_any_order_write_what_one_process_writes(
    served: servers.Served, source: Path, out: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    results = [preshard(source, out, part) for part in ("2/3", "3/3", "1/3")]
    for number, told in enumerate(results[:-1], 1):
        assert (told.part.finished_files, told.part.is_committed) == (0, False)
        assert len(told.part.missing) == 3 - number
    last = results[-1]
    assert (last.part.is_committed, last.part.finished_weights) == (True, NUM_WEIGHTS)
    assert sum(each.part.num_weights for each in results) == NUM_WEIGHTS == len(Counting.asked)
    check_done(whole, out, tmp_path)
    alone = preshard(source, f"{out}-alone")
    different = {"output", "part", "elapsed_s", "moving_s", "osft", "peak_memory_bytes"}
    assert {name for name, value in alone.to_json().items() if last.to_json()[name] != value} <= different
    assert last.osft.max_error == alone.osft.max_error
    Counting.asked = []
    late = preshard(source, out, "1/3")
    assert (late.part.is_committed, late.part.by_another) == (True, True)
    assert shardkit.commit(out).by_another
    assert not Counting.asked
    check_done(whole, out, tmp_path)


@ONE_SERVER
@pytest.mark.parametrize(
    "options",
    [
        {"digest": "none", "check_source": False, "world_size": 2, "sha256": True},
        {"mesh": "dp_replicate=2,dp_shard=2", "world_size": None, "dtype": "bf16"},
        {"osft": OsftPlan(ratio=0.5, targets="auto,!*.1.*", ranks={"*.2.*": 3})},
    ],
)
def test_options(served: servers.Served, source: Path, out: str, options: dict[str, Any]) -> None:
    for part in ("2/2", "1/2"):
        told = preshard(source, out, part, **options)
    assert told.part.is_committed
    preshard(source, f"{out}-whole", **options)
    assert objects(out) == objects(f"{out}-whole")
    assert shardkit.verify(out, full=True).ok


def test_parts_at_once_and_a_twin(source: Path, out: str, whole: dict[str, bytes], tmp_path: Path) -> None:
    assert parts(source, out, "1/3", "3/3", "2/3", "3/3") == [0] * 4
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_the_source_may_lie_in_a_store(source: Path, out: str, tmp_path: Path) -> None:
    preshard(source, f"{out}/dense", osft=None)
    shardkit.consolidate(f"{out}/dense", f"{out}/hub")
    for part in ("2/2", "1/2"):
        preshard(f"{out}/hub", f"{out}/factors", part)
    preshard(source, tmp_path / "local")
    assert shardkit.diff(f"{out}/factors", tmp_path / "local").is_equal


@ONE_SERVER
def test_another_number_of_parts_computes_what_is_missing(
    source: Path, out: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    first = preshard(source, out, "1/4")
    again = preshard(source, out, "1/4")
    assert (again.part.resumed_weights, again.osft.num_resumed) == (first.part.num_weights,) * 2
    assert len(Counting.asked) == first.part.num_weights
    for part in ("2/2", "1/2"):
        preshard(source, out, part)
    assert len(Counting.asked) == NUM_WEIGHTS
    check_done(whole, out, tmp_path)


@pytest.mark.parametrize("ends", ["part", "other number"])
def test_a_part_that_was_killed_while_it_computed(
    source: Path, out: str, whole: dict[str, bytes], tmp_path: Path, ends: str
) -> None:
    """It dies between a record and its note: the record that has no note is computed again, and the others are not."""
    assert parts(source, out, "1/2", dies=("/factors/", 3)) == [-signal.SIGKILL]
    assert len(named(out, "factors", ".json")) == 1
    assert list((tmp_path / "cache/factors").iterdir()), "what a killed process has on this machine"
    if ends == "part":
        told = preshard(source, out, "1/2")
        assert told.part.resumed_weights == told.osft.num_resumed == 1
        preshard(source, out, "2/2")
    else:
        assert parts(source, out, "1/3", "2/3", "3/3") == [0] * 3
    assert len(Counting.asked) in (0, NUM_WEIGHTS - 1)
    check_done(whole, out, tmp_path)


@ONE_SERVER
@pytest.mark.parametrize("ends", ["commit", "twin"])
def test_a_part_that_was_killed_while_it_wrote_files(
    served: servers.Served, source: Path, out: str, whole: dict[str, bytes], tmp_path: Path, ends: str
) -> None:
    """It dies when one of its files has a note. Whoever sees all factors, which nobody computes again, goes on."""
    assert parts(source, out, "1/2") == [0]
    assert parts(source, out, "2/2", dies=("/done/", 1)) == [-signal.SIGKILL]
    finished = named(out, "done")
    assert finished
    status = shardkit.status(out)
    (plan,) = status.plans
    assert (plan.num_weights, plan.finished_weights) == (NUM_WEIGHTS, NUM_WEIGHTS)
    assert plan.finished_files == len(finished) < 3
    served.proxy.seen.clear()
    if ends == "commit":
        told = shardkit.commit(out)
        assert (told.by_another, told.num_files) == (False, 3)
    else:
        assert preshard(source, out, "1/5").part.is_committed
    assert not Counting.asked
    again = {seen.path for seen in served.proxy.seen if seen.method == "PUT" and "_0.distcp" in seen.path}
    assert len(again) == 3 - len(finished)
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_what_is_missing_is_named(source: Path, out: str) -> None:
    preshard(source, out, "2/2")
    with pytest.raises(IncompleteError, match=r"factors of \d weights of 5 are missing, of 1 part") as caught:
        shardkit.commit(out)
    (problem,) = caught.value.problems
    assert problem.startswith("part 1/2: ")
    with pytest.raises(UsageError, match="parts of another plan are under way"):
        preshard(source, out, "1/2", osft=0.4)


def test_status_and_giving_up(source: Path, out: str, tmp_path: Path) -> None:
    """Records, notes, unfinished uploads of records, and what this machine has: all of it goes."""
    assert parts(source, out, "1/2", dies=("/factors/", 3)) == [-signal.SIGKILL]
    record = next(path for path, _ in writer_of(out).objects(out) if "/factors/" in path)
    writer_of(out).begin(f"{os.path.dirname(record)}/0-00000000")
    status = shardkit.status(out)
    (plan,) = status.plans
    assert (plan.num_weights, plan.finished_weights, plan.finished_files) == (NUM_WEIGHTS, 1, 0)
    assert [(part, number) for part, number, _ in plan.missing] == [("1/2", 2), ("2/2", 2)]
    assert status.stored is not None
    assert (status.stored.num_files, status.stored.num_uploads) == (0, 1)
    assert shardkit.status(out, abort=True).aborted
    assert not objects(out)
    assert not writer_of(out).uploads(out)
    assert not list((tmp_path / "cache/factors").iterdir())


@ONE_SERVER
def test_gc_leaves_no_records(source: Path, out: str) -> None:
    preshard(source, out, "1/2")
    record = next(path for path, _ in writer_of(out).objects(out) if "/factors/" in path)
    writer_of(out).begin(f"{os.path.dirname(record)}/0-00000000")
    with pytest.raises(UsageError, match="nothing was committed there"):
        shardkit.gc(out, older_than=0)
    told = shardkit.gc(out, older_than=0, uncommitted=True)
    assert (len(told.removed), told.num_ended) == (1, 1)
    assert not objects(out)
    assert not writer_of(out).uploads(out)


@ONE_SERVER
def test_a_part_that_is_given_up_while_it_computes(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GivenUp(Counting):
        def ask(self, request: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
            if len(self.asked) == 1:
                shardkit.status(out, abort=True)
            return super().ask(request, stop)

    monkeypatch.setattr(compute, "FactorWorker", GivenUp)
    with pytest.raises(IncompleteError, match="given up meanwhile"):
        preshard(source, out, "1/2")
    assert not objects(out)
    assert not list((tmp_path / "cache/factors").iterdir())


@ONE_SERVER
@pytest.mark.parametrize("call", ["publish", "write_note"])
def test_a_part_that_is_late_leaves_no_record(
    source: Path,
    out: str,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Twins of it have done all, and committed, when it has computed its first weight."""

    def twins() -> None:
        assert parts(source, out, "1/2") == [0]
        assert parts(source, out, "2/2") == [0]

    monkeypatch.setattr(StoredRecords, call, once(getattr(StoredRecords, call), twins))
    told = preshard(source, out, "1/2")
    assert (told.part.is_committed, told.part.by_another) == (True, True)
    check_done(whole, out, tmp_path)


def once(inner: Callable[..., Any], first: Callable[[], object]) -> Callable[..., Any]:
    """Return a call before whose first one something else happens."""
    turns = [first]

    def called(*given: Any, **options: Any) -> Any:
        if turns:
            turns.pop()()
        return inner(*given, **options)

    return called


def damage(path: str, at: int) -> None:
    """Replace an object by one with another byte."""
    found = writer_of(path).get(path)
    assert found is not None
    data = bytearray(found[0])
    data[at] ^= 1
    writer_of(path).put(path, bytes(data), crc32(data))


def records(out: str) -> list[str]:
    """Return the paths of the records of factors, those of the first weights first."""
    paths = [path for path, _ in writer_of(out).objects(out) if "/factors/" in path]
    return sorted(path for path in paths if not path.endswith(".json"))


@ONE_SERVER
@pytest.mark.parametrize(("knows", "at"), [(True, 100), (False, 100), (False, 2 * storage.BLOCK + 100)])
def test_a_record_that_somebody_replaced(
    source: Path,
    out: str,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    knows: bool,
) -> None:
    """A store that knows CRC-32s tells before anything is read. Of others it is found by whoever has read it: a byte of U,
    whose rows lie in the files one after another, or of V, which is cut by columns."""
    if not knows:
        found = StoredRecords.found
        monkeypatch.setattr(
            StoredRecords,
            "found",
            lambda *given: [each and each._replace(crc32=None) for each in found(*given)],
        )
    preshard(source, out, "1/4")
    (record,) = records(out)
    damage(record, at)
    if writer_of(out).head(record).crc32 is None:  # type: ignore[union-attr]
        knows = False
    Counting.asked = []
    preshard(source, out, "2/2")
    if not knows:
        with pytest.raises(IntegrityError, match="factors"):
            preshard(source, out, "1/2")
        assert ".metadata" not in objects(out)
        with pytest.raises(IncompleteError, match="factors of 1 weight of 5 are missing"):
            shardkit.commit(out)
    for part in ("1/2", "2/2"):
        preshard(source, out, part)
    assert len(Counting.asked) == NUM_WEIGHTS, "the damaged one too"
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_a_record_that_is_damaged_before_it_is_sent(
    source: Path, out: str, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were sent before it count."""
    send, turns = storage.send, [1, 2]

    def damaged(file: str, path: str) -> None:
        if turns and turns.pop() == 1:
            Path(file).write_bytes(bytes(os.path.getsize(file)))
        send(file, path)

    monkeypatch.setattr(storage, "send", damaged)
    with pytest.raises(IntegrityError, match="other bytes were sent than were written"):
        preshard(source, out, "1/2")
    assert len(named(out, "factors", ".json")) == 1
    assert preshard(source, out, "1/2").part.resumed_weights == 1
    for part in ("1/2", "2/2"):
        preshard(source, out, part)
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_a_record_that_is_gone_is_computed_again(
    source: Path, out: str, whole: dict[str, bytes], tmp_path: Path
) -> None:
    preshard(source, out, "1/2")
    Counting.asked = []
    writer_of(out).delete(records(out)[0])
    preshard(source, out, "2/2")
    with pytest.raises(IncompleteError, match="factors of 1 weight of 5 are missing"):
        shardkit.commit(out)
    preshard(source, out, "1/2")
    assert len(Counting.asked) == 1 + 2
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_parts_replace_an_output(source: Path, out: str, whole: dict[str, bytes]) -> None:
    preshard(source, out, osft=0.5)
    before = objects(out)
    for part in ("1/2", "2/2"):
        with pytest.raises(UsageError, match="exists"):
            preshard(source, out, part)
    preshard(source, out, "1/2", overwrite=True)
    assert before.items() <= objects(out).items()
    preshard(source, out, "2/2", overwrite=True)
    assert {**before, **whole} == objects(out)
    Counting.asked = []
    (warning,) = preshard(source, out, "2/2", overwrite=True).warnings
    assert "nothing was written" in warning
    assert not Counting.asked


@ONE_SERVER
def test_parts_do_not_mend_an_output(source: Path, out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of another kind would put other factors beside those that are left."""
    preshard(source, out)
    lost = next(path for path, _ in writer_of(out).objects(out) if path.endswith("__1_0.distcp"))
    writer_of(out).delete(lost)
    left = objects(out)
    of_another_kind(monkeypatch)
    for is_dry in (True, False):
        with pytest.raises(UsageError, match="has lost some of its files") as caught:
            preshard(source, out, "1/1", overwrite=True, dry_run=is_dry)
        assert "overwrite=True, without part" in (caught.value.hint or "")
    assert objects(out) == left
    assert len(Counting.asked) == NUM_WEIGHTS, "those of the first run"
    preshard(source, out, overwrite=True)
    assert shardkit.verify(out, full=True).ok


def of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be a machine that finds factors with other bits."""
    ask = Counting.ask

    def others(self: Counting, request: dict[str, Any], stop: threading.Event) -> Any:
        return ask(self, {**request, "svd": "fp32"}, stop)

    monkeypatch.setattr(Counting, "ask", others)
    monkeypatch.setattr("shardkit.operations.preshard.job.computed_by", lambda: {"cpu": "another"})


@ONE_SERVER
def test_machines_of_two_kinds(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They find each other, and late ones their output; each weight has the factors of one, in all files."""
    preshard(source, out, "1/2")
    with monkeypatch.context() as patch:
        of_another_kind(patch)
        last = preshard(source, out, "2/2")
        assert [text for text in last.warnings if "2 kinds of machine" in text]
        assert len(Counting.asked) == NUM_WEIGHTS
        assert preshard(source, out, "1/2").part.by_another
    assert preshard(source, out, "1/2").part.by_another
    assert shardkit.verify(out, full=True).ok
    preshard(source, tmp_path / "whole")
    assert not shardkit.diff(out, tmp_path / "whole").is_equal


@ONE_SERVER
def test_of_twins_with_other_bits_the_faster_counts(
    source: Path, out: str, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow one is of another kind, and has sent its record when it sees the other's note."""

    def twin() -> None:
        assert parts(source, out, "1/2") == [0]

    with monkeypatch.context() as patch:
        of_another_kind(patch)
        patch.setattr(StoredRecords, "write_note", once(StoredRecords.write_note, twin))
        preshard(source, out, "1/2")
    preshard(source, out, "2/2")
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_a_run_of_another_kind_of_machine_replaces_no_file_that_is_read(
    source: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, of a job whose output is there: both have the same names but for the folder."""
    preshard(source, out)
    before = objects(out)
    of_another_kind(monkeypatch)
    preshard(source, out, overwrite=True)
    after = objects(out)
    assert {name: after[name] for name in before if name != ".metadata"} == {
        name: data for name, data in before.items() if name != ".metadata"
    }
    assert after[".metadata"] != before[".metadata"]
    assert shardkit.verify(out, full=True).ok


@ONE_SERVER
@pytest.mark.parametrize("call", ["_move", "check_all"])
def test_one_process_leaves_an_output_that_appears_while_it_computes(
    source: Path,
    out: str,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """Parts on machines of another kind are faster: their files have the same names, and somebody reads them.

    So nothing of them is replaced, and the run says that it is there.
    """

    def others() -> None:
        assert parts(source, out, "1/2") == [0]
        assert parts(source, out, "2/2") == [0]

    with monkeypatch.context() as patch:
        of_another_kind(patch)
        if call == "_move":
            patch.setattr(divided.Divided, call, once(divided.Divided._move, others))
        else:
            patch.setattr(StorePlace, call, lambda _: others())
        told = preshard(source, out)
    assert told.was_there
    check_done(whole, out, tmp_path)


@ONE_SERVER
@pytest.mark.parametrize("call", ["_move", "check_all"])
def test_parts_leave_an_output_that_one_process_has_made_meanwhile(
    source: Path,
    out: str,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    """It is on a machine of another kind. Nothing of it is replaced, and the part says that it is there."""
    preshard(source, out, "1/2")
    with monkeypatch.context() as patch:
        of_another_kind(patch)

        def alone() -> None:
            assert parts(source, out, None) == [0]

        if call == "_move":
            patch.setattr(divided.Divided, call, once(divided.Divided._move, alone))
        else:
            patch.setattr(StorePlace, call, lambda _: alone())
        told = preshard(source, out, "2/2")
    assert (told.part.is_committed, told.part.by_another) == (True, True)
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_a_dry_run_says_what_a_part_takes(
    source: Path, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for its own records on this machine, and memory for what it reads of a store."""
    whole = preshard(source, out, dry_run=True)
    would = preshard(source, out, "1/4", dry_run=True, max_memory="60MiB")
    assert (would.part.num_weights, would.part.all_weights, would.part.num_files) == (1, NUM_WEIGHTS, 1)
    assert 0 < would.osft.record_bytes < whole.osft.record_bytes / 2
    assert would.peak_memory_bytes == 60 << 20
    (line,) = [line for line in preshard_command.render(would) if line.split()[:2] == ["local", "disk"]]
    assert line.endswith("of factors, until this part ends")
    assert "at most 60.0 MiB of buffers" in "".join(preshard_command.render(would))
    assert not objects(out)
    usage = storage.disk_usage(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(storage, "disk_usage", lambda _: usage._replace(free=would.osft.record_bytes - 1))
        for is_dry in (True, False):
            with pytest.raises(ResourceError, match=r"No space left for .*cache") as caught:
                preshard(source, out, "1/4", dry_run=is_dry)
            assert "SHARDKIT_CACHE=DIRECTORY" in (caught.value.hint or "")
    assert not Counting.asked
    preshard(source, out, "1/4")
    assert preshard(source, out, "1/4", dry_run=True).osft.record_bytes == 0, "they are in the store"


@ONE_SERVER
def test_a_part_reads_its_own_records_here_and_each_other_once(
    served: servers.Served, source: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preshard(source, out, "1/2")
    sent = {os.path.basename(path) for path in records(out)}
    served.proxy.seen.clear()

    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(divided.Divided, "commit", stops)
        with pytest.raises(shardkit.Interrupted):
            preshard(source, out, "2/2")
    read = [
        os.path.basename(seen.path)
        for seen in served.proxy.seen
        if seen.is_range and "/factors/" in seen.path
    ]
    assert sorted(read) == sorted(sent)


@ONE_SERVER
def test_a_pool_computes_them(source: Path, out: str, whole: dict[str, bytes], tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        told = preshard(source, out, executor=pool, num_parts=2)
    assert told.part is None
    assert told.osft.max_error is not None
    check_done(whole, out, tmp_path)


@ONE_SERVER
def test_without_a_cache(
    source: Path, out: str, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDKIT_CACHE", "off")
    for part in ("1/2", "2/2"):
        preshard(source, out, part)
    assert objects(out) == whole
    assert not (tmp_path / "cache").exists()


def test_a_large_record_is_sent_in_parts(
    served: servers.Served, make_hub: Callable[..., Path], out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the store refuses ends the part, without an upload that is left."""
    import torch

    monkeypatch.setattr(uploads, "PART_NBYTES", 5 << 20)  # the least that stores take
    draw = torch.Generator().manual_seed(7)
    source = make_hub({"model.layers.0.self_attn.q_proj.weight": torch.randn(12, 130_000, generator=draw)})
    served.proxy.strikes = lambda seen: seen.method == "POST" and "uploadId" in seen.path  # to complete one
    served.proxy.faults[:] = ["403"] * 20
    with pytest.raises(ResourceError, match="denies access"):
        preshard(source, out, "1/1")
    served.proxy.reset()
    assert not writer_of(out).uploads(out)
    assert not named(out, "factors")
    preshard(source, out, "1/1")
    preshard(source, f"{out}-whole")
    assert objects(out) == objects(f"{out}-whole")
