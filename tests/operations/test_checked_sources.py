"""A source is compared with the CRC-32s in it as its bytes move; damage is refused before an output appears."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.serialization import get_crc32_options, set_crc32_options

import shardkit
from shardkit.errors import IntegrityError, SourceError, UsageError
from shardkit.files import manifest, storage
from shardkit.files.digest import crc32
from shardkit.operations.consolidate import ConsolidateResult
from shardkit.transfer import checks, fill, sources, stream
from tests.bits import flip, flip_byte
from tests.corruption.outputs import columns
from tests.formats.deepspeed.samples import write_joined, write_partitioned
from tests.manifests import write_file_list
from tests.operations.consolidate.checkpoints import load, save

TENSORS = {f"layers.{n}.weight": torch.arange(n, n + 6000.0).reshape(60, 100) for n in range(3)}
NAME = "layers.1.weight"


def save_dcp(directory: Path, state: dict[str, torch.Tensor] = TENSORS, *, has_sums: bool = True) -> Path:
    assert get_crc32_options()
    set_crc32_options(has_sums)
    try:
        return save(state, directory)
    finally:
        set_crc32_options(True)


def unchecked(result: ConsolidateResult) -> dict[str, tuple[int, int]]:
    return {part.reason: (part.num_entries, part.entry_bytes) for part in result.unchecked}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bf16"},
        {"jobs": 1, "max_memory": "2MiB"},
        {"digest": "none"},
        {"max_shard_size": "20KB"},
    ],
)
def test_consolidate(tmp_path: Path, options: dict[str, object]) -> None:
    saved, out = save_dcp(tmp_path / "c"), tmp_path / "out"
    result = shardkit.consolidate(saved, out, **options)
    assert (result.checked_bytes, result.unchecked) == (3 * 24_000, ())
    flip(saved / "__0_0.distcp", TENSORS[NAME])
    with pytest.raises(IntegrityError) as caught:
        shardkit.consolidate(saved, tmp_path / "other", **options)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{NAME}: __0_0.distcp: bytes ")
    assert "--check-source off" in str(caught.value.hint)
    assert sorted(os.listdir(tmp_path)) == ["c", "out"]
    result = shardkit.consolidate(saved, out, overwrite=True, check_source=False, **options)
    assert (result.checked_bytes, result.unchecked) == (0, ())
    assert any("--check-source off" in warning for warning in result.warnings)


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"jobs": 1}])
def test_reshard(tmp_path: Path, options: dict[str, object]) -> None:
    saved = save_dcp(tmp_path / "c")
    first = shardkit.reshard(saved, tmp_path / "first", world_size=4, **options)
    assert (first.checked_bytes, first.unchecked) == (3 * 24_000, ())
    back = shardkit.reshard(tmp_path / "first", tmp_path / "back", world_size=3)
    assert back.checked_bytes == first.checked_bytes // (2 if "dtype" in options else 1)
    assert back.unchecked == ()
    flip(saved / "__0_0.distcp", TENSORS[NAME])
    with pytest.raises(IntegrityError, match="1 byte range fails its CRC-32"):
        shardkit.reshard(saved, tmp_path / "out", world_size=4, **options)
    assert shardkit.reshard(saved, tmp_path / "out", world_size=4, check_source=False, **options).warnings
    assert sorted(os.listdir(tmp_path)) == ["back", "c", "first", "out"]


def test_byte_entries_move_checked(tmp_path: Path) -> None:
    """They are zips, each entry of which has a CRC-32."""
    text = "a scheduler's state " * 50
    save_dcp(tmp_path / "c", {**TENSORS, "scheduler": {"text": text}})  # type: ignore[dict-item]
    result = shardkit.reshard(tmp_path / "c", tmp_path / "out", world_size=2)
    assert result.checked_bytes > 3 * 24_000 + len(text)
    assert not result.unchecked
    file = tmp_path / "c" / "__0_0.distcp"
    flip_byte(file, file.read_bytes().index(text.encode()) + 10)
    with pytest.raises(IntegrityError, match=r"scheduler.text: __0_0.distcp: "):
        shardkit.reshard(tmp_path / "c", tmp_path / "other", world_size=2)
    result = shardkit.reshard(tmp_path / "c", tmp_path / "other", world_size=2, check_source=False)
    assert result.num_objects == 1


def test_a_byte_entry_that_is_no_zip_any_more_is_refused(tmp_path: Path) -> None:
    """Damage in what says where its CRC-32s are is not "none is recorded"."""
    save_dcp(tmp_path / "c", {**TENSORS, "scheduler": {"text": "a scheduler's state"}})  # type: ignore[dict-item]
    file = tmp_path / "c" / "__0_0.distcp"
    content = file.read_bytes()
    flip_byte(file, content.index(b"PK\1\2", content.index(b"a scheduler's state")))
    with pytest.raises(SourceError, match="1 byte entry is damaged") as caught:
        shardkit.reshard(tmp_path / "c", tmp_path / "out", world_size=2)
    assert caught.value.problems[0].startswith("scheduler.text: ")
    result = shardkit.reshard(tmp_path / "c", tmp_path / "out", world_size=2, check_source=False)
    assert any("1 byte entry is damaged" in warning for warning in result.warnings)


def test_columns_are_put_together_and_cut_again(tmp_path: Path) -> None:
    """Gathered and scattered: the ways of tensors that are cut along a later dim."""
    with columns():
        shardkit.preshard(save_hub(tmp_path / "hub"), tmp_path / "cut", world_size=3, wrap="none")
    result = shardkit.consolidate(tmp_path / "cut", tmp_path / "out")
    assert (result.checked_bytes, result.unchecked) == (3 * 24_000, ())
    flip(tmp_path / "cut" / "__1_0.distcp", TENSORS[NAME][:, 34:68], 5000)
    with pytest.raises(IntegrityError) as caught:
        shardkit.consolidate(tmp_path / "cut", tmp_path / "other")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{NAME}: __1_0.distcp: ")
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    with columns():
        result = shardkit.preshard(tmp_path / "pytorch_model.bin", tmp_path / "p", world_size=3)
    assert result.checked_bytes == 72_000
    flip(tmp_path / "pytorch_model.bin", TENSORS[NAME])
    with columns(), pytest.raises(IntegrityError, match=NAME):
        shardkit.preshard(tmp_path / "pytorch_model.bin", tmp_path / "q", world_size=3)


def test_a_legacy_model(tmp_path: Path) -> None:
    state = {**TENSORS, "turned": torch.arange(9.0, 6009.0).reshape(60, 100).T}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for digest in ("crc32", "none"):
        result = shardkit.preshard(tmp_path, tmp_path.parent / f"p-{digest}", world_size=2, digest=digest)
        assert (result.checked_bytes, result.unchecked) == (4 * 24_000, ())
    for name in (NAME, "turned"):
        torch.save(state, tmp_path / "pytorch_model.bin")
        flip(tmp_path / "pytorch_model.bin", state[name] if name == NAME else state[name].T)
        with pytest.raises(IntegrityError) as caught:
            shardkit.preshard(tmp_path, tmp_path.parent / "out", world_size=2)
        assert caught.value.problems[0].startswith(f"{name}: pytorch_model.bin: ")


def test_without_recorded_checksums(tmp_path: Path) -> None:
    result = shardkit.consolidate(save_dcp(tmp_path / "c", has_sums=False), tmp_path / "out")
    assert result.checked_bytes == 0
    assert unchecked(result) == {"no CRC-32 is recorded": (3, 72_000)}
    result = shardkit.consolidate(tmp_path / "out", tmp_path / "again")
    assert unchecked(result) == {"safetensors have no CRC-32": (3, 72_000)}


def save_hub(directory: Path, state: dict[str, torch.Tensor] = TENSORS) -> Path:
    """A Hub model of somebody else's, with a file beside."""
    directory.mkdir()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text('{"model_type": "none"}')
    (directory / "merges.txt").write_text("a b\n" * 100)
    return directory


MOVES = {
    "preshard": partial(shardkit.preshard, world_size=2, wrap="none"),
    "reshard": partial(shardkit.reshard, world_size=2),
    "consolidate": shardkit.consolidate,
    "cast": partial(shardkit.consolidate, dtype="bf16"),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("where", ["of consolidate", "inside", "beside", "given", "given, of consolidate"])
def test_a_manifest_of_a_hub_model(tmp_path: Path, where: str, move: str) -> None:
    """safetensors record nothing: what shardkit wrote in them, beside them or elsewhere does."""
    hub, file, run = tmp_path / "hub", tmp_path / "elsewhere.json", MOVES[move]
    if "of consolidate" in where:
        options = {"manifest_file": file} if "given" in where else {"manifest": True}
        shardkit.consolidate(save_dcp(tmp_path / "c"), hub, **options)
    else:
        output = {"output": file} if where == "given" else {"inside": where == "inside"}
        write_file_list(save_hub(hub), **output)
    given = {"source_manifest": file} if "given" in where else {}
    taken = {"beside": tmp_path / "hub.shardkit.json"}.get(where, file if given else hub / "shardkit.json")
    if given:
        assert run(hub, tmp_path / "out").checked_bytes == 0
        shutil.rmtree(tmp_path / "out")
    result = run(hub, tmp_path / "out", **given)
    assert (result.checked_bytes, result.unchecked) == (72_000, ())
    assert result.source_manifests == (str(taken),)
    flip(hub / "model.safetensors", TENSORS[NAME])
    with pytest.raises(IntegrityError, match=r"layers.1.weight: model.safetensors: "):
        run(hub, tmp_path / "other", **given)
    assert not (tmp_path / "other").exists()
    assert run(hub, tmp_path / "other", check_source=False).checked_bytes == 0


def test_a_manifest_that_was_given_has_to_fit(tmp_path: Path) -> None:
    hub, file = save_hub(tmp_path / "hub"), tmp_path / "m.json"
    write_file_list(hub, file)
    more = save_hub(tmp_path / "more", {**TENSORS, "more": torch.zeros(3)})
    (more / "model.safetensors").rename(more / "other.safetensors")
    save_file({**TENSORS, "more": torch.zeros(3)}, hub / "model.safetensors")
    for run in MOVES.values():
        with pytest.raises(SourceError, match=r"m.json is not a manifest of this source") as caught:
            run(hub, tmp_path / "out", source_manifest=file)
        assert caught.value.problems[0].startswith("model.safetensors: 72")
        with pytest.raises(SourceError, match=r"absent.json: no such file"):
            run(hub, tmp_path / "out", source_manifest=tmp_path / "absent.json")
        with pytest.raises(UsageError, match="--check-source is off"):
            run(hub, tmp_path / "out", source_manifest=file, check_source=False)
    with pytest.raises(SourceError) as caught:
        shardkit.consolidate(more / "other.safetensors", tmp_path / "out", source_manifest=file)
    assert caught.value.problems == ("other.safetensors: it is not listed",)


def test_a_damaged_manifest_is_a_warning(tmp_path: Path) -> None:
    hub = save_hub(tmp_path / "hub")
    write_file_list(hub, inside=True)
    content = (hub / "shardkit.json").read_bytes()
    (hub / "shardkit.json").write_bytes(content.replace(b'"size": 400', b'"size": 401'))
    for name in ("preshard", "reshard", "consolidate"):
        result = MOVES[name](hub, tmp_path / name)
        assert unchecked(result) == {"safetensors have no CRC-32": (3, 72_000)}
        assert any("shardkit.json has been changed" in warning for warning in result.warnings)


def test_what_a_manifest_does_not_describe_is_counted(tmp_path: Path) -> None:
    hub = save_hub(tmp_path / "hub")
    write_file_list(hub, inside=True)
    content = json.loads((hub / "shardkit.json").read_text())
    del content["tensors"][NAME]["crc32"]
    del content["tensors"]["layers.2.weight"]
    (hub / "shardkit.json").write_bytes(manifest.sign(content))
    for name, run in MOVES.items():
        result = run(hub, tmp_path / name)
        assert result.checked_bytes == 24_000
        assert unchecked(result) == {"no CRC-32 is recorded": (2, 48_000)}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("where", ["of consolidate", "inside"])
def test_a_header_that_names_other_tensors_is_refused(tmp_path: Path, where: str, move: str) -> None:
    """The header of a safetensors file has no checksum: a flip in a name, dtype or shape gives another tensor."""
    hub, run = tmp_path / "hub", MOVES[move]
    if where == "inside":
        write_file_list(save_hub(hub), inside=True)
    else:
        shardkit.consolidate(save_dcp(tmp_path / "c"), hub, manifest=True)
    file = hub / "model.safetensors"
    whole = file.read_bytes()
    assert run(hub, tmp_path / "whole").checked_bytes == 72_000
    for old, new, told in (
        (b"layers.2.weight", b"layers.2.wdight", "layers.2.weight: recorded, and not in the files"),
        (b'"F32"', b'"I32"', "int32"),
    ):
        assert old in whole
        file.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(IntegrityError, match=r"model.safetensors: the tensors differ") as caught:
            run(hub, tmp_path / "out")
        assert told in "".join(caught.value.problems)
        assert not (tmp_path / "out").exists()
        assert run(hub, tmp_path / "out", check_source=False).checked_bytes == 0
        shutil.rmtree(tmp_path / "out")


def test_a_manifest_of_what_records_no_checksum(tmp_path: Path) -> None:
    """Storages with a CRC-32 of 0, in torch's own files: what a manifest says stands in for it."""
    saved = save_dcp(tmp_path / "c", has_sums=False)
    write_file_list(saved)
    for name in ("reshard", "consolidate", "cast"):
        result = MOVES[name](saved, tmp_path / name)
        assert (result.checked_bytes, result.unchecked) == (72_000, ())
    flip(saved / "__0_0.distcp", TENSORS[NAME])
    for name in ("reshard", "consolidate", "cast"):
        with pytest.raises(IntegrityError, match=rf"{NAME}: __0_0.distcp: "):
            MOVES[name](saved, tmp_path / "out")


def test_copied_files_are_compared_with_a_manifest(tmp_path: Path) -> None:
    """Tokenizers and whatever lies beside the shards are copied as they are: they are listed too."""
    hub = save_hub(tmp_path / "hub")
    write_file_list(hub, inside=True)
    (hub / "merges.txt").write_text("a c\n" * 100)
    saved = save_dcp(tmp_path / "c")
    (saved / "scheduler.bin").write_bytes(bytes(5000))
    write_file_list(saved)
    (saved / "scheduler.bin").write_bytes(bytes(4999) + b"\1")
    for source, name, file in ((hub, "consolidate", "merges.txt"), (saved, "reshard", "scheduler.bin")):
        for options in ({}, {"digest": "none"}):
            with pytest.raises(IntegrityError) as caught:
                MOVES[name](source, tmp_path / "out", **options)
            assert caught.value.problems[0].startswith(f"{file}: its bytes have CRC-32 ")
            assert "--check-source off" in str(caught.value.hint)
            assert shardkit.abort(tmp_path / "out").aborted
        MOVES[name](source, tmp_path / name, check_source=False)
        assert (tmp_path / name / file).read_bytes() == (source / file).read_bytes()


@pytest.mark.parametrize("move", ["consolidate", "reshard"])
def test_the_same_bytes_are_summed_once(tmp_path: Path, move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the source that is a run of the output has one CRC-32, for both."""
    summed: list[int] = []

    def noted(data: bytes, crc: int = 0) -> int:
        summed.append(memoryview(data).nbytes)
        return int(crc32(data, crc))

    for module in (checks, fill, sources, stream):
        monkeypatch.setattr(module, "crc32", noted)
    large = {"large": torch.arange(1_500_000.0), **TENSORS}
    saved = save_dcp(tmp_path / "c", large)
    totals = []
    for check in (False, True):
        summed.clear()
        result = MOVES[move](saved, tmp_path / str(check), check_source=check)
        assert result.checked_bytes == (6_072_000 if check else 0)
        totals.append(sum(summed))
    assert totals[0] >= 6_072_000
    assert totals[1] < totals[0] + 10_000


@pytest.mark.parametrize("kind", ["pytorch_model.bin", "manifest"])
def test_shared_blocks_are_read_for_digests_and_counted_without(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that shares extents stands here in a copy that no reader sees."""

    def clone(source: int, start: int, target: int, target_start: int, nbytes: int) -> None:
        os.pwrite(target, os.pread(source, nbytes, start), target_start)

    monkeypatch.setattr(storage, "clone_range", clone)
    large, hub = {"large.weight": torch.arange(3_000_000.0).reshape(3000, 1000)}, tmp_path / "hub"
    if kind == "manifest":
        write_file_list(save_hub(hub, large), inside=True)
        file = hub / "model.safetensors"
    else:
        hub.mkdir()
        torch.save(large, file := hub / "pytorch_model.bin")
    result = MOVES["preshard"](hub, tmp_path / "read")
    assert result.shares_extents
    assert (result.checked_bytes, result.unchecked) == (12_000_000, ())
    result = MOVES["preshard"](hub, tmp_path / "not-read", digest="none")
    assert result.shares_extents
    assert result.checked_bytes == 0
    assert unchecked(result) == {"blocks shared with the output, not read": (1, 12_000_000)}
    flip(file, large["large.weight"], 5_000_000)
    with pytest.raises(IntegrityError, match=rf"large.weight: {file.name}: "):
        MOVES["preshard"](hub, tmp_path / "out")


def test_views_of_one_storage(tmp_path: Path) -> None:
    """An entry is a storage: what only one view reaches is checked with the other's."""
    whole = torch.arange(100_000.0)
    model = {"a.weight": whole[:50_000], "b.weight": whole[50_000:]}
    torch.save(model, tmp_path / "model.pt")
    result = shardkit.consolidate(tmp_path / "model.pt", tmp_path / "out", max_shard_size="200KB")
    assert (result.checked_bytes, result.unchecked) == (400_000, ())
    assert torch.equal(load_file(tmp_path / "out" / result.file_names[1])["b.weight"], model["b.weight"])
    result = shardkit.consolidate(tmp_path / "model.pt", tmp_path / "part", include=["b.*"])
    assert unchecked(result) == {"only a part was needed": (1, 200_000)}
    for at in (100, 399_000):
        flip(tmp_path / "model.pt", whole, at)
        with pytest.raises(IntegrityError) as caught:
            shardkit.consolidate(tmp_path / "model.pt", tmp_path / "other")
        (problem,) = caught.value.problems
        assert problem.startswith("a.weight, b.weight: model.pt: bytes ")
        torch.save(model, tmp_path / "model.pt")
    # No view of the last element.
    torch.save({**model, "b.weight": whole[50_000:99_999]}, tmp_path / "model.pt")
    result = shardkit.consolidate(tmp_path / "model.pt", tmp_path / "other")
    assert (result.checked_bytes, unchecked(result)) == (0, {"only a part was needed": (1, 399_996)})


def test_views_that_overlap(tmp_path: Path) -> None:
    """Their storage is not compared, which is said."""
    whole = torch.arange(100_000.0)
    parts = whole[:50_000], whole[50_000:], whole[10_000:30_000].view(400, 50).T
    model = dict(zip(("a.weight", "b.weight", "c.weight"), parts, strict=True))
    torch.save(model, tmp_path / "model.pt")
    result = shardkit.consolidate(tmp_path / "model.pt", tmp_path / "out", max_shard_size="200KB")
    stored = load(tmp_path / "out")
    assert all(torch.equal(stored[name], value) for name, value in model.items())
    assert result.checked_bytes == 0
    assert unchecked(result) == {"read in parts that overlap": (1, 400_000)}


@pytest.mark.parametrize("write", [write_joined, write_partitioned])
def test_flats_of_deepspeed(tmp_path: Path, write: Callable[[Path, int], Path]) -> None:
    """Many parameters in one storage; one with padding, which nothing reads, is not compared."""
    run = write(tmp_path / "run", 3)
    result = shardkit.consolidate(run, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    stored.pop("head.weight", None)  # the same bytes as the embedding
    unread = sum(part.entry_bytes for part in result.unchecked)
    assert unchecked(result).keys() <= {"only a part was needed"}
    assert result.checked_bytes + unread >= sum(tensor.nbytes for tensor in stored.values())
    assert result.checked_bytes


_KILLED = """
import os, signal, sys
import shardkit
from shardkit.core.threads import NoProgress
from tests.manifests import write_file_list

class Kill(NoProgress):
    done = 0
    def advance(self, num_bytes):
        Kill.done += num_bytes
        if Kill.done > 1_200_000:
            import glob
            while len(glob.glob(sys.argv[2] + "/.out.shardkit/done/*")) < 2:
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)

shardkit.consolidate(sys.argv[1], sys.argv[2] + "/out", max_shard_size="400KB", jobs=1, progress=Kill(), OPTIONS)
"""


def consolidate_until_killed(source: Path, home: Path, options: str = "") -> None:
    command = [sys.executable, "-c", _KILLED.replace("OPTIONS", options), str(source), str(home)]
    done = subprocess.run(command, check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("damaged", [False, True])
def test_what_an_interrupted_run_read_is_still_compared(tmp_path: Path, damaged: bool) -> None:
    """The damage lies in a file that the killed run had finished, and the next one does not touch.

    What notes have not kept of it would be far more than is read again for the check.
    """
    whole = torch.arange(400_000.0)
    # Of one storage: partial CRCs.
    model = {f"t{n}.weight": part for n, part in enumerate(whole.chunk(4))}
    torch.save(model, tmp_path / "model.pt")
    if damaged:
        flip(tmp_path / "model.pt", whole)
    consolidate_until_killed(tmp_path / "model.pt", tmp_path)
    if damaged:
        with pytest.raises(IntegrityError, match=r"t0.weight, t1.weight, t2.weight and 1 more: model.pt"):
            shardkit.consolidate(tmp_path / "model.pt", tmp_path / "out", max_shard_size="400KB")
    else:
        result = shardkit.consolidate(tmp_path / "model.pt", tmp_path / "out", max_shard_size="400KB")
        assert result.resumed_files >= 2
        assert (result.checked_bytes, result.unchecked) == (1_600_000, ())


@pytest.mark.parametrize("way", ["tied", "turned"])
def test_each_reading_of_an_interrupted_run_is_compared(tmp_path: Path, way: str) -> None:
    """A storage is damaged while one of the two runs reads it, and is as it was while the other does."""
    whole, file = torch.arange(100_000.0), tmp_path / "model.pt"
    model = {f"{name}.weight": torch.arange(100_000.0) + number for number, name in enumerate("abc", 1)}
    if way == "tied":  # read for the first file before the kill, for the last one after it
        model |= {"a.weight": whole, "z.weight": whole}
    else:  # read before any file is finished, and of all files
        model |= {"a.weight": whole.view(1000, 100).T, "d.weight": whole + 9}
    torch.save(model, file)

    def flip_unseen() -> None:
        times = file.stat()
        flip(file, whole)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    if way == "turned":
        content = file.read_bytes()
        flip_unseen()
    consolidate_until_killed(file, tmp_path)
    if way == "turned":
        times = file.stat()
        with open(file, "r+b") as opened:
            opened.write(content)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        # Files are finished in any order: where that of `a` was not, what was read for it is read anew.
        if not list(tmp_path.glob(".out.shardkit/done/0.json")):
            result = shardkit.consolidate(file, tmp_path / "out", max_shard_size="400KB")
            first = load_file(tmp_path / "out" / result.file_names[0])
            assert torch.equal(first["a.weight"], model["a.weight"])
            return
    else:
        flip_unseen()
    with pytest.raises(IntegrityError, match=r"[az].weight: model.pt: bytes "):
        shardkit.consolidate(file, tmp_path / "out", max_shard_size="400KB")
    assert not (tmp_path / "out").exists()


def test_a_run_that_did_not_compare_is_not_gone_on_with(tmp_path: Path) -> None:
    saved = save_dcp(tmp_path / "c", {f"t{n}.weight": torch.arange(100_000.0) + n for n in range(4)})
    consolidate_until_killed(saved, tmp_path, "check_source=False")
    with pytest.raises(UsageError, match="another job is under way"):
        shardkit.consolidate(saved, tmp_path / "out", max_shard_size="400KB")
    result = shardkit.consolidate(saved, tmp_path / "out", max_shard_size="400KB", overwrite=True)
    assert (result.resumed_files, result.checked_bytes, result.unchecked) == (0, 1_600_000, ())


def test_the_command(tmp_path: Path) -> None:
    saved = save_dcp(tmp_path / "c")
    flip(saved / "__0_0.distcp", TENSORS[NAME])

    def shardkit_cli(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "shardkit", "consolidate", str(saved), str(tmp_path / "out")]
        command += options
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)

    refused = shardkit_cli()
    assert refused.returncode == 3
    assert f"{NAME}: __0_0.distcp: bytes " in refused.stderr
    assert "--check-source off" in refused.stderr
    answer = json.loads(shardkit_cli("--check-source", "off", "--json").stdout)
    assert (answer["checked_bytes"], answer["unchecked"]) == (0, [])
    save_dcp(saved)
    passed = shardkit_cli("--overwrite")
    assert "70.3 KiB against the CRC-32s in the source" in passed.stdout, passed.stdout
