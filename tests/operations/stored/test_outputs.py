"""Outputs in a store: what lies there, that it is what a local output has, and that stock readers take it."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import shardkit
from shardkit.errors import IncompleteError, IntegrityError, Interrupted, ResourceError, UsageError
from shardkit.files import stores
from shardkit.files.output.bucket import BucketOutput
from shardkit.files.remote.objects import Objects
from shardkit.formats.owned import OutputKind
from shardkit.operations import write
from shardkit.operations.destination import check_target
from tests.cases import but_first
from tests.contents import contents
from tests.operations.stored.conftest import LARGE, MIB, WRITES, check_bytes, fetch, objects, put
from tests.osft.presharded import unpacked
from tests.training import models
from tests.worlds import stores as servers


def data_folder(found: dict[str, bytes]) -> str:
    (folder,) = {name.partition("/")[0] for name in found if "/" in name}
    return folder


@pytest.mark.parametrize("verb", but_first(["preshard", "reshard"]))
def test_a_sharded_checkpoint_has_the_bytes_of_a_local_one(
    served: servers.Served, tmp_path: Path, out: str, verb: str
) -> None:
    result = WRITES[verb](served.home, out)
    WRITES[verb](served.home, tmp_path / "local")
    assert result.output == out
    check_bytes(out, tmp_path / "local")


def test_a_hub_model_has_the_bytes_of_a_local_one(served: servers.Served, tmp_path: Path, out: str) -> None:
    """Its files have a mark in their names, there is an index, and the rest lies flat."""
    WRITES["consolidate"](served.home, out)
    WRITES["consolidate"](served.home, tmp_path / "local")
    found, want = objects(out), contents(tmp_path / "local")
    index = json.loads(found.pop("model.safetensors.index.json"))
    theirs = json.loads(want.pop("model.safetensors.index.json"))
    assert index["metadata"] == theirs["metadata"]
    marks = {name.split("-")[1] for name in index["weight_map"].values()}
    assert len(marks) == 1
    (mark,) = marks
    assert {name: file.replace(f"-{mark}", "") for name, file in index["weight_map"].items()} == theirs[
        "weight_map"
    ]
    renamed = {name.replace(f"-{mark}", ""): data for name, data in found.items()}
    assert renamed.keys() == want.keys()
    for name in want.keys() - {"shardkit.json"}:
        assert renamed[name] == want[name], name
    listed = {each["name"] for each in json.loads(found["shardkit.json"])["files"]}
    assert listed == set(index["weight_map"].values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_torch_reads_it(served: servers.Served, tmp_path: Path, out: str) -> None:
    WRITES["preshard"](served.home, out)
    want = load_file(served.home / "hub/model.safetensors")
    for reader in (dcp.FileSystemReader, fsspec_reader()):
        state = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
        dcp.load(state, storage_reader=reader(str(fetch(out, tmp_path / "copy"))))
        assert all(torch.equal(state[name], tensor) for name, tensor in want.items())


def fsspec_reader() -> Any:
    from torch.distributed.checkpoint import _fsspec_filesystem

    return _fsspec_filesystem.FsspecReader


def test_transformers_reads_it(served: servers.Served, tmp_path: Path, out: str) -> None:
    from transformers import AutoModelForCausalLM

    model = models.save("qwen3", tmp_path / "hub")
    shardkit.preshard(tmp_path / "hub", tmp_path / "dcp", world_size=2, layout="declared")
    shardkit.consolidate(tmp_path / "dcp", out)
    loaded = AutoModelForCausalLM.from_pretrained(fetch(out, tmp_path / "copy"))
    assert all(
        torch.equal(one, other) for one, other in zip(loaded.parameters(), model.parameters(), strict=True)
    )


def test_tensors_that_are_cut_along_a_later_dim(served: servers.Served, tmp_path: Path, out: str) -> None:
    """On a disk they are scattered; nothing is written out of order into a store."""
    options: dict[str, Any] = {"mesh": "dp_shard=2,tp=2", "wrap": "none", "layout": "declared"}
    rules = ["layers.[024]=rowwise", "layers.[135]=colwise"]
    for place in (out, tmp_path / "local"):
        shardkit.preshard(served.home / "hub", place, parallel_rules=rules, dtype="bf16", **options)
    found, want = objects(out), contents(tmp_path / "local")
    folder = data_folder(found)
    for name in want.keys() - {".metadata", "shardkit.json"}:
        assert found[f"{folder}/{name}"] == want[name], name
    ours, theirs = (json.loads(each) for each in (found[f"{folder}/shardkit.json"], want["shardkit.json"]))
    assert ours["tensors"] == theirs["tensors"]


def test_nothing_is_visible_before_the_marker(served: servers.Served, out: str) -> None:
    """It is the last thing that is written, by one request."""
    for verb, marker in (("preshard", ".metadata"), ("consolidate", "model.safetensors.index.json")):
        WRITES[verb](served.home, f"{out}-{verb}")
        puts = [seen for seen in served.proxy.seen if seen.method == "PUT"]
        names = [seen.path.partition("?")[0].rpartition("/")[2] for seen in puts]
        assert names[-1] == marker
        assert names.count(marker) == 1


def test_memory_for_two_uploads_is_taken_from_the_bound(served: servers.Served, out: str) -> None:
    result = shardkit.consolidate(served.home / "dcp", out, jobs=1)
    assert result.peak_memory_bytes <= 256 * MIB
    with pytest.raises(UsageError, match="--max-memory is too little for a store"):
        shardkit.consolidate(served.home / "dcp", f"{out}-2", max_memory="8MiB")


def test_a_dry_run_writes_nothing(served: servers.Served, out: str) -> None:
    for verb in WRITES:
        result = WRITES[verb](served.home, out, dry_run=True)
        assert result.free_bytes is not None, "of scratch"
    assert {seen.method for seen in served.proxy.seen} <= {"GET", "HEAD"}


def test_what_is_there_is_not_replaced(served: servers.Served, out: str) -> None:
    for verb in ("preshard", "consolidate"):
        assert not WRITES[verb](served.home, f"{out}-{verb}").was_there
        served.proxy.seen.clear()
        assert WRITES[verb](served.home, f"{out}-{verb}").was_there
        assert WRITES[verb](served.home, f"{out}-{verb}", dtype="fp16", exist_ok=True).was_there
        for other in ({"dtype": "fp16"}, {"sha256": True}):
            with pytest.raises(UsageError, match="exists"):
                WRITES[verb](served.home, f"{out}-{verb}", **other)
        with pytest.raises(UsageError, match="exists"):
            WRITES[verb](served.home, f"{out}-{verb}", dry_run=True)
        assert "PUT" not in {seen.method for seen in served.proxy.seen}
    with pytest.raises(UsageError, match="holds a Hub model: it is not replaced"):
        WRITES["preshard"](served.home, f"{out}-consolidate", overwrite=True)
    with pytest.raises(UsageError, match=r"holds no weights of a Hub model: it is not replaced") as caught:
        WRITES["consolidate"](served.home, f"{out}-preshard", overwrite=True)
    assert ".metadata" in caught.value.problems


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_output_is_replaced(served: servers.Served, tmp_path: Path, out: str) -> None:
    """By one request, so that there is no moment without one. The old data stays: readers may be in it."""
    WRITES["preshard"](served.home, out)
    shardkit.preshard(served.home / "hub", out, world_size=2, wrap="none", overwrite=True)
    found = objects(out)
    assert len({name.partition("/")[0] for name in found if "/" in name}) == 2
    state = {
        name: torch.zeros_like(each)
        for name, each in load_file(served.home / "hub/model.safetensors").items()
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(str(fetch(out, tmp_path / "copy"))))


def test_files_of_somebody_else_are_not_replaced(served: servers.Served, out: str) -> None:
    put(out, "tokenizer_config.json", b"another")
    put(f"{out}-2", "model.safetensors", b"another")
    served.proxy.seen.clear()
    with pytest.raises(UsageError, match="exists and holds no weights of a Hub model: it is not replaced"):
        WRITES["consolidate"](served.home, out)
    for place, theirs in ((out, "tokenizer_config.json"), (f"{out}-2", "model.safetensors")):
        with pytest.raises(UsageError, match="it is not replaced") as caught:
            WRITES["consolidate"](served.home, place, overwrite=True)
        assert caught.value.problems == (theirs,)
    assert {seen.method for seen in served.proxy.seen} == {"GET", "HEAD"}


@pytest.mark.prove
def test_an_output_is_replaced_again_and_again(served: servers.Served, out: str) -> None:
    """Files of older outputs stay, and no manifest lists them."""
    for dtype in ("keep", "bf16", "keep"):
        WRITES["consolidate"](served.home, out, overwrite=True, dtype=dtype)
    shardkit.consolidate(
        served.home / "dcp", out, base=served.home / "hub", overwrite=True
    )  # without a manifest
    WRITES["consolidate"](served.home, out, overwrite=True)
    assert len({name[:14] for name in objects(out) if name.startswith("model-")}) == 3


def test_of_a_hub_model_that_is_there_what_people_wrote_stays(served: servers.Served, out: str) -> None:
    """Its own config and tokenizer are replaced, edited or not; a card that somebody wrote, and notes, never."""
    WRITES["consolidate"](served.home, out)
    put(out, "tokenizer_config.json", b"another")
    put(out, ".gitattributes", b"")
    assert WRITES["consolidate"](served.home, out, overwrite=True).was_there, "made by this very job"
    WRITES["consolidate"](served.home, out, overwrite=True, dtype="bf16")
    assert objects(out)["tokenizer_config.json"] == b'{"a": 1}'
    for name in ("README.md", "handler.py", "logs/notes.txt"):
        put(out, f"{name}", b"mine")
    before = objects(out)
    for options in ({}, {"part": "1/2"}):
        with pytest.raises(UsageError, match="holds what shardkit did not write") as caught:
            WRITES["consolidate"](served.home, out, overwrite=True, dtype="fp16", **options)
        assert [each.partition(":")[0] for each in caught.value.problems] == [
            "logs/",
            "README.md",
            "handler.py",
        ]
    assert objects(out) == before


def test_what_somebody_puts_there_meanwhile_stays(
    served: servers.Served, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name that the output has a file of, too."""
    WRITES["consolidate"](served.home, out)
    before, finish = objects(out), write.finish

    def meanwhile(*args: Any) -> None:
        put(out, "README.md", b"mine")
        stores.forget()
        finish(*args)

    monkeypatch.setattr(write, "finish", meanwhile)
    with pytest.raises(UsageError, match="holds what shardkit did not write") as caught:
        WRITES["consolidate"](served.home, out, overwrite=True, dtype="bf16")
    assert [each.partition(":")[0] for each in caught.value.problems] == ["README.md"]
    found = objects(out)
    assert found.pop("README.md") == b"mine"
    assert {name: found[name] for name in before} == before


@pytest.mark.parametrize("verb", ["preshard", "consolidate"])
def test_a_signal_after_the_commit_says_that_the_output_is_there(
    served: servers.Served, out: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_if = Objects.put_if

    def interrupted(self: Objects, name: str, *args: Any) -> Any:
        done = put_if(self, name, *args)
        if name in (".metadata", "model.safetensors.index.json"):
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "put_if", interrupted)
        with pytest.raises(Interrupted, match="out is there, and whole"):
            WRITES[verb](served.home, out)
    assert shardkit.status(out).jobs == ()
    assert WRITES[verb](served.home, out).was_there
    assert not [name for name in objects(out) if name.startswith(".shardkit-")]


def test_whoever_finds_the_output_of_its_job_has_not_made_it(
    served: servers.Served, out: str, tmp_path: Path
) -> None:
    """What comes after an output is not done again."""
    made = tmp_path / "manifest.json"
    assert not WRITES["consolidate"](served.home, out, manifest_file=made).was_there
    made.unlink()
    again = WRITES["consolidate"](served.home, out, manifest_file=made)
    assert again.was_there
    assert not made.exists()
    assert not [note for note in again.notes if "manifest.json" in note]


def test_what_cannot_be_done_is_refused(served: servers.Served, out: str) -> None:
    hub, dcp_ = served.home / "hub", served.home / "dcp"
    for message, call in {
        "--push-to-hub": lambda: shardkit.consolidate(dcp_, out, push_to_hub="a/b"),
        "read only so far": lambda: shardkit.consolidate(dcp_, "hf://one/bucket/x"),
        "--profile transformers": lambda: shardkit.preshard(hub, out, world_size=2, profile="transformers"),
        "lies inside the source": lambda: check_target(f"{out}/x", out, OutputKind.SHARDED, overwrite=False),
    }.items():
        with pytest.raises(UsageError, match=message):
            call()
    assert not objects(out)


@pytest.mark.parametrize("there", ["preshard", "consolidate", "a person"])
def test_nothing_is_written_beside_what_is_something_else(
    served: servers.Served, out: str, there: str
) -> None:
    if there == "a person":
        put(out, "thesis.txt", b"mine")
    else:
        WRITES[there](served.home, out)
    before = objects(out)
    for verb in WRITES.keys() - {there, *(("reshard",) if there == "preshard" else ())}:
        with pytest.raises(UsageError, match="exists and"):
            WRITES[verb](served.home, out)
    assert objects(out) == before


def test_a_store_without_conditions_is_refused(served: servers.Served, out: str) -> None:
    served.proxy.drops = ("if-none-match", "if-match")
    with pytest.raises(UsageError, match="the store ignores conditions") as refused:
        WRITES["preshard"](served.home, out)
    assert "local directory" in (refused.value.hint or "")
    assert not objects(out)


@pytest.mark.parametrize("overwrite", but_first([False, True]))
def test_of_two_jobs_that_commit_one_wins(served: servers.Served, out: str, overwrite: bool) -> None:
    """Both are ready when one of them puts the marker; the other says so, and what is there is the winner's."""
    if overwrite:
        shardkit.preshard(served.home / "hub", out, world_size=4, wrap="none")
    ready, ended, put_if = threading.Barrier(2), list[Any](), Objects.put_if

    def together(self: Objects, name: str, *rest: Any) -> Any:
        if name == ".metadata":
            ready.wait()
        return put_if(self, name, *rest)

    def run(size: int) -> None:
        try:
            shardkit.preshard(served.home / "hub", out, world_size=size, wrap="none", overwrite=overwrite)
            ended.append(size)
        except UsageError as error:
            ended.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "put_if", together)
        threads = [threading.Thread(target=run, args=(size,)) for size in (2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (size,) = [each for each in ended if isinstance(each, int)]
    (error,) = [each for each in ended if not isinstance(each, int)]
    assert ("changed while it was" if overwrite else "appeared while it was being written") in str(error)
    found = objects(out)
    folder = next(
        name for name in found if name.endswith("/shardkit.json") and folder_of(name) in found[".metadata"]
    )
    assert json.loads(found[folder])["mesh"]["world_size"] == size


def folder_of(name: str) -> bytes:
    return name.partition("/")[0].encode()


@pytest.mark.parametrize("overwrite", but_first([False, True]))
def test_a_run_whose_twin_was_faster_ends_well(
    served: servers.Served, out: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have sent all files when one of them commits."""
    if overwrite:
        shardkit.preshard(served.home / "hub", out, world_size=4, wrap="none")
    results, finish = list[Any](), write.finish

    def late(*args: Any) -> None:
        monkeypatch.undo()
        results.append(WRITES["preshard"](served.home, out, overwrite=overwrite))
        finish(*args)

    monkeypatch.setattr(write, "finish", late)
    results.append(WRITES["preshard"](served.home, out, overwrite=overwrite))
    assert [(result.was_there, result.resumed_files) for result in results] == [(False, 3), (True, 0)]
    assert shardkit.verify(out, full=True).problems == ()
    assert not [name for name in objects(out) if name.startswith(".shardkit-")]


def test_another_machine_resumes_a_run_that_failed(
    served: servers.Served, tmp_path: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise IntegrityError("the memory fails")

    with monkeypatch.context() as patch:
        patch.setattr(write, "finish", fails)
        with pytest.raises(IntegrityError, match="the memory fails"):
            WRITES["preshard"](served.home, out)
    (job,) = shardkit.status(out).jobs
    assert (job.finished_files, job.num_files) == (3, 3)
    monkeypatch.setenv("SHARDKIT_CACHE", str(tmp_path / "another"))
    assert WRITES["preshard"](served.home, out).resumed_files == 3
    assert shardkit.verify(out, full=True).problems == ()


@pytest.mark.parametrize("fault", but_first(["500", "503", "reset", "lost", "expired"]))
def test_faults_of_the_store(served: servers.Served, tmp_path: Path, out: str, fault: str) -> None:
    """What passes is tried again, also with new credentials."""
    served.proxy.strikes = lambda seen: seen.method in ("PUT", "POST") and bool(seen.sent_nbytes)
    served.proxy.faults[:] = [fault, "", fault, "", "", fault]
    WRITES["consolidate"](served.home, out)
    assert len(served.proxy.struck) == 3
    shardkit.consolidate(served.home / "dcp", tmp_path / "local")
    assert same_tensors(fetch(out, tmp_path / "copy"), tmp_path / "local")


def test_what_is_spoiled_on_the_way_is_sent_again(served: servers.Served, out: str) -> None:
    """A part, a small file, and the list of parts that completes a file."""
    wanted = [
        lambda seen: seen.sent_nbytes > LARGE,
        lambda seen: seen.method == "PUT" and 0 < seen.sent_nbytes < LARGE and "probe" not in seen.path,
        lambda seen: seen.method == "POST" and "uploadId" in seen.path,
    ]
    served.proxy.garbles = lambda seen: any(wanted.pop(at) for at, is_it in enumerate(wanted) if is_it(seen))
    WRITES["consolidate"](served.home, out)
    assert len(served.proxy.garbled) == 3
    assert shardkit.verify(out, full=True).problems == ()


@pytest.mark.parametrize("name", ["shardkit.json", "model.safetensors.index.json"])
def test_a_file_that_is_refused_as_not_found_is_no_success(
    served: servers.Served, out: str, name: str
) -> None:
    """Only a condition that does not hold says that there is one already."""
    served.proxy.strikes = lambda seen: seen.method == "PUT" and seen.path.partition("?")[0].endswith(name)
    served.proxy.faults[:] = ["404"] * 20
    with pytest.raises(ResourceError, match="HTTP 404"):
        WRITES["consolidate"](served.home, out)
    assert "model.safetensors.index.json" not in objects(out)
    served.proxy.reset()
    WRITES["consolidate"](served.home, out)
    assert {name, "model.safetensors.index.json"} <= objects(out).keys()


def same_tensors(one: Path, other: Path) -> bool:
    sides = [
        {
            name: tensor
            for path in sorted(each.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for each in (one, other)
    ]
    return sides[0].keys() == sides[1].keys() and all(
        torch.equal(sides[0][name], sides[1][name]) for name in sides[0]
    )


def test_an_answer_to_the_marker_that_is_lost(served: servers.Served, out: str) -> None:
    """Nobody knows whether it was written until it is read."""
    served.proxy.strikes = lambda seen: (
        seen.method == "PUT" and seen.path.partition("?")[0].endswith("/out/.metadata")
    )
    served.proxy.faults[:] = ["lost"]
    WRITES["preshard"](served.home, out)
    assert served.proxy.struck == ["lost"]
    assert ".metadata" in objects(out)


def test_a_source_that_is_damaged_gives_no_output(served: servers.Served, tmp_path: Path, out: str) -> None:
    for name, data in contents(served.home / "dcp").items():
        (tmp_path / "dcp").mkdir(exist_ok=True)
        spoilt = bytearray(data)
        if name == "__1_0.distcp":
            spoilt[MIB] ^= 1
        (tmp_path / "dcp" / name).write_bytes(spoilt)
    with pytest.raises(IntegrityError, match="CRC-32"):
        shardkit.consolidate(tmp_path / "dcp", out)
    assert "model.safetensors" not in objects(out)
    shardkit.abort(out)
    assert not objects(out)


@pytest.mark.parametrize("verb", WRITES)
def test_the_sha256_of_files_that_were_just_written(served: servers.Served, out: str, verb: str) -> None:
    WRITES[verb](served.home, out, sha256=True)
    found = objects(out)
    (place,) = [name.removesuffix("shardkit.json") for name in found if name.endswith("shardkit.json")]
    listed = json.loads(found[f"{place}shardkit.json"])["files"]
    assert len(listed) > 1
    for each in listed:
        assert each["sha256"] == hashlib.sha256(found[place + each["name"]]).hexdigest()


def test_a_run_that_failed_is_resumed(served: servers.Served, tmp_path: Path, out: str) -> None:
    """A finished file is not sent again."""
    puts = 0

    def fails(seen: servers.Seen) -> bool:
        nonlocal puts
        is_part = seen.method == "PUT" and seen.sent_nbytes > LARGE and "00002-of-00002" in seen.path
        puts += is_part
        return puts > 1 and is_part

    served.proxy.strikes, served.proxy.faults[:] = fails, ["403"] * 100
    with pytest.raises(ResourceError, match="denies access"):
        WRITES["consolidate"](served.home, out, jobs=1)
    assert puts > 1
    served.proxy.reset()
    assert "model.safetensors.index.json" not in objects(out)
    served.proxy.seen.clear()
    result = WRITES["consolidate"](served.home, out, jobs=1)
    sent = [seen.path for seen in served.proxy.seen if seen.method == "PUT" and seen.sent_nbytes > LARGE]
    assert sent
    assert all("00002-of-00002" in path for path in sent)
    assert result.resumed_files == 1
    shardkit.consolidate(served.home / "dcp", tmp_path / "local")
    assert same_tensors(fetch(out, tmp_path / "copy"), tmp_path / "local")


def test_a_run_that_is_aborted_while_it_sends_what_lies_beside_makes_no_output(
    served: servers.Served, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files were there when it looked; the marker would stand over what is gone."""
    send = BucketOutput._send_beside

    def aborted(self: BucketOutput, *args: Any) -> None:
        send(self, *args)
        monkeypatch.undo()
        shardkit.abort(out)

    monkeypatch.setattr(BucketOutput, "_send_beside", aborted)
    with pytest.raises(IncompleteError, match=r"aborted by another process|files were removed"):
        WRITES["preshard"](served.home, out)
    assert ".metadata" not in objects(out)
    WRITES["preshard"](served.home, out)
    assert shardkit.verify(out, full=True).ok


@pytest.mark.parametrize("verb", but_first(WRITES))
def test_it_is_a_source(served: servers.Served, tmp_path: Path, out: str, verb: str) -> None:
    """shardkit reads what it has written, and both sides of a verb may lie in stores."""
    WRITES[verb](served.home, out)
    stores.forget()
    report = shardkit.verify(out, full=True)
    assert (report.problems, report.warnings) == ((), ())
    assert shardkit.diff(out, served.home / "hub").is_equal
    shardkit.preshard(out, f"{out}-again", world_size=2, wrap="none") if verb == "consolidate" else (
        shardkit.consolidate(out, f"{out}-again")
    )
    assert shardkit.diff(f"{out}-again", served.home / "hub").is_equal


@pytest.mark.usefixtures("served")
def test_factors_are_folded_into_a_store_or_kept(out: str, tmp_path: Path) -> None:
    """What trained with OSFT has left; it may lie in a store, too."""
    trained = unpacked(tmp_path) / "factors"
    shardkit.reshard(trained, f"{out}/trained", world_size=2)
    for keep in (False, True):
        shardkit.consolidate(trained, tmp_path / f"kept{keep}", keep_factors=keep)
        shardkit.consolidate(f"{out}/trained", f"{out}/kept{keep}", keep_factors=keep)
        assert shardkit.diff(tmp_path / f"kept{keep}", f"{out}/kept{keep}").is_equal
