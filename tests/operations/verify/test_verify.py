"""verify: what shardkit and stock torch wrote, whole and damaged in every place."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shardkit.errors import SourceError, UsageError
from shardkit.files import manifest
from shardkit.formats.dcp import chunk_list
from shardkit.formats.hub.directory import open_model
from shardkit.operations.consolidate import consolidate
from shardkit.operations.preshard import preshard
from shardkit.operations.reshard import reshard
from shardkit.operations.verify import verify
from shardkit.operations.verify.bytes import FirstDifference
from shardkit.operations.verify.result import VerifyResult
from shardkit.training.save import save
from tests.bits import flip, flip_byte
from tests.formats.dcp.samples import alter, open_catalog
from tests.formats.reading import chunk_list_of
from tests.manifests import change_manifest
from tests.operations.consolidate.checkpoints import hub

# torch's own: a save without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

SHARD = "__0_0.distcp"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.big.weight": torch.randn(130, 300, generator=generator),  # shards of it are put at whole pages
        "model.norm.weight": torch.randn(33, generator=generator).bfloat16(),
        "model.steps": torch.arange(5),
        "model.empty": torch.zeros(0, 4),
    }


def state() -> dict[str, Any]:
    weights = tensors()
    moments = {name: {"exp_avg": value.float() * 2} for name, value in weights.items()}
    return {"model": weights, "optim": {"state": moments}, "epoch": {"number": 3, "name": "run"}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each: hub/, presharded/, plain/ (no digests), stock/, resharded/, consolidated/."""
    root = tmp_path_factory.mktemp("verify")
    (root / "hub").mkdir()
    save_file(tensors(), root / "hub" / "model.safetensors", metadata={"format": "pt"})
    preshard(root / "hub", root / "presharded", world_size=2, wrap="none")
    preshard(root / "hub", root / "plain", world_size=2, wrap="none", digest="none")
    dcp.save(state(), checkpoint_id=root / "stock", no_dist=True)
    reshard(root / "stock", root / "resharded", world_size=2)
    consolidate(root / "stock", root / "consolidated", manifest=True, max_shard_size="100KB", root="model")
    return root


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        shutil.copytree(made / name, tmp_path / name)
        return tmp_path / name

    return copy


@contextmanager
def flipped(path: Path, at: int, bits: int) -> Iterator[None]:
    """Let a byte be another one for a while."""
    with open(path, "r+b") as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(bytes([before[0] ^ bits]))
        file.flush()
        yield
        file.seek(at)
        file.write(before)


def lines(result: VerifyResult) -> str:
    return "\n".join([*(p.line() for p in result.problems), *(d for p in result.problems for d in p.details)])


def extents(directory: Path) -> dict[str, list[tuple[int, int, set[str]]]]:
    """For each file (first byte, byte after the last, names) of the tensors' data."""
    is_hub = any(name.endswith(".safetensors") for name in os.listdir(directory))
    catalog = open_model(str(directory)).catalog if is_hub else open_catalog(str(directory), records=True)
    found: dict[tuple[str, int, int], set[str]] = {}
    for fqn, entry in catalog.tensors.items():
        for row in entry.chunk_ids:
            start, table = catalog.chunks.start[row], catalog.chunks
            place = (catalog.files[table.file[row]].name, start, start + table.nbytes[row])
            found.setdefault(place, set()).add(fqn)
    by_file: dict[str, list[tuple[int, int, set[str]]]] = {}
    for (name, start, stop), fqns in found.items():
        by_file.setdefault(name, []).append((start, stop, fqns))
    return by_file


NAMES = ("hub", "presharded", "plain", "stock", "resharded", "consolidated")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"full": True}])
def test_whole_ones_have_no_problem(made: Path, name: str, options: dict[str, Any]) -> None:
    result = verify(made / name, **options)
    assert (result.problems, result.warnings) == ((), ())
    assert result.ok
    assert result.num_tensors == {"stock": 8, "resharded": 8}.get(name, 4)
    assert (result.read_bytes > 0) == (bool(options) and name not in ("hub", "plain"))


def test_what_was_read_and_what_has_no_checksum(made: Path) -> None:
    full = verify(made / "presharded", full=True)
    sizes = [os.path.getsize(made / "presharded" / f"__{n}_0.distcp") for n in range(2)]
    assert (full.read_bytes, full.num_checked_files, full.num_files) == (sum(sizes), 2, 2)
    assert (full.num_checked_chunks, full.num_unrecorded_chunks) == (full.num_chunks, 0)
    plain = verify(made / "plain", full=True)
    # The empty chunk has nothing that could be wrong: its checksum is 0, and is right.
    assert (plain.num_unrecorded_chunks, plain.num_unrecorded_tensors) == (plain.num_chunks - 1, 3)
    assert "no checksum is recorded for" in plain.notes[-1]
    stock = verify(made / "stock", full=True)
    assert stock.num_checked_chunks == 8
    assert stock.tensor_bytes == sum(value.nbytes + value.float().nbytes for value in tensors().values())
    assert stock.read_bytes > stock.tensor_bytes  # byte entries too
    assert any(".metadata has no checksum" in note for note in stock.notes)
    plain = verify(made / "hub", full=True)
    assert (plain.num_unrecorded_tensors, plain.read_bytes) == (4, 0)
    (note,) = plain.notes
    assert note == (
        "no checksum is recorded for 4 chunks of 4 tensors (safetensors files have none, only a manifest with digests has): "
        "their content cannot be checked"
    )
    consolidated = verify(made / "consolidated", full=True)
    assert (consolidated.num_checked_files, consolidated.num_unrecorded_chunks) == (3, 0)  # the index too


@pytest.mark.prove
def test_flipped_bytes_of_a_foreign_checkpoint_are_found_by_the_checksum_in_the_record(
    copied: Callable[[str], Path],
) -> None:
    directory, pick = copied("stock"), random.Random(1)
    for start, stop, names in extents(directory)[SHARD]:
        for _ in range(20 if stop > start else 0):
            with flipped(directory / SHARD, pick.randrange(start, stop), pick.randrange(1, 256)):
                assert verify(directory).ok
                (problem,) = verify(directory, full=True).problems
            assert problem.file == SHARD
            assert problem.tensor in names
            assert problem.expected != problem.found


@pytest.mark.prove
def test_flipped_bytes_around_the_data_of_a_foreign_record_are_found(copied: Callable[[str], Path]) -> None:
    """Those too that no checksum covers and no reader needs: padding, and fields that a zip has twice."""
    directory, pick = copied("stock"), random.Random(2)
    data = extents(directory)[SHARD]
    catalog = open_catalog(str(directory))
    for fqn, entry in catalog.tensors.items():
        row = entry.first_chunk
        start, nbytes = catalog.chunks.start[row], catalog.chunks.nbytes[row]
        places = [at for at in range(start, start + nbytes) if not any(a <= at < b for a, b, _ in data)]
        for at in pick.sample(places, 12):
            with flipped(directory / SHARD, at, pick.randrange(1, 256)):
                problems = verify(directory).problems
            assert (SHARD, fqn) in {(problem.file, problem.tensor) for problem in problems}, at


def test_records_that_are_spelled_otherwise_are_no_damage(tmp_path: Path) -> None:
    values = {
        "turned": torch.arange(12.0).view(3, 4).t(),
        "row": torch.arange(8.0).view(8, 1).t(),
        # Its strides take more bytes than those of a contiguous tensor.
        "piece of a row": torch.arange(900.0).view(1, 900)[:, 897:],
        "part": torch.arange(20.0)[3:9],
        "learned": torch.ones(4, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(4, 2)),
        "empty": torch.zeros(0, 3).t(),
        "scalar": torch.tensor(True),
        **{f"plain{n}": torch.full((n,), float(n)) for n in range(1, 9)},
    }
    dcp.save(values, checkpoint_id=tmp_path / "out", no_dist=True)
    result = verify(tmp_path / "out", full=True)
    assert result.ok
    assert (result.num_chunks, result.num_unrecorded_chunks) == (16, 0)


def test_a_shard_without_elements_may_begin_anywhere(tmp_path: Path) -> None:
    """`distribute_tensor(..., src_data_rank=None)` makes such shards: slices of a tensor that has no elements either."""
    values = {"a": torch.zeros(3, 5000, 0)[2:], "b": torch.ones(4)}
    dcp.save(values, checkpoint_id=tmp_path / "out", no_dist=True)
    assert verify(tmp_path / "out", full=True).ok
    reshard(tmp_path / "out", tmp_path / "two", world_size=2)
    loaded = {"a": torch.ones(1, 5000, 0), "b": torch.zeros(4)}
    dcp.load(loaded, checkpoint_id=tmp_path / "two", no_dist=True)
    assert torch.equal(loaded["b"], values["b"])


def test_records_without_checksums_are_no_damage(tmp_path: Path) -> None:
    """What a writer does that had checksums switched off for a while."""
    dcp.save({f"with{n}": torch.ones(n) for n in range(1, 9)}, checkpoint_id=tmp_path / "out", no_dist=True)
    catalog = open_catalog(str(tmp_path / "out"))
    row = catalog.tensors["with3"].first_chunk
    start, stop = catalog.chunks.start[row], catalog.chunks.start[row] + catalog.chunks.nbytes[row]
    data = bytearray((tmp_path / "out" / SHARD).read_bytes())
    for signature, at in ((b"PK\x01\x02", 16), (b"PK\x07\x08", 4)):
        place = data.find(signature, start, stop)
        while place >= 0:
            data[place + at : place + at + 4] = bytes(4)
            place = data.find(signature, place + 1, stop)
    (tmp_path / "out" / SHARD).write_bytes(data)
    result = verify(tmp_path / "out", full=True)
    assert (result.ok, result.num_checked_chunks, result.num_unrecorded_chunks) == (True, 7, 1)


def test_old_spelling_is_no_damage(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where most records are not as torch 2.13 writes them, another version did."""
    unlike = FirstDifference(0, 1, 2)
    monkeypatch.setattr("shardkit.operations.verify.dcp.spelling", lambda *_: unlike)
    assert verify(made / "stock").ok


def test_what_is_refused_for_its_weights_may_be_whole(tmp_path: Path) -> None:
    dcp.save({"model._flat_param": torch.ones(30)}, checkpoint_id=tmp_path / "out", no_dist=True)
    result = verify(tmp_path / "out", full=True)
    assert result.ok
    assert any("flat parameters" in note for note in result.notes)
    flip_byte(tmp_path / "out" / SHARD, (tmp_path / "out" / SHARD).read_bytes().index(b"\x00\x00\x80?" * 30))
    assert "model._flat_param" in {problem.tensor for problem in verify(tmp_path / "out", full=True).problems}


def test_compressed_records(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    extensions = pytest.importorskip("torch.distributed.checkpoint._extension")
    writer = dcp.FileSystemWriter(tmp_path / "out", _extensions=[extensions.ZStandard()])
    dcp.save({"w": torch.arange(900.0)}, storage_writer=writer, no_dist=True)
    assert verify(tmp_path / "out", full=True).num_checked_chunks == 1
    flip_byte(tmp_path / "out" / SHARD, os.path.getsize(tmp_path / "out" / SHARD) // 2)
    assert {(p.file, p.tensor) for p in verify(tmp_path / "out", full=True).problems} == {(SHARD, "w")}


def test_flipped_byte_in_a_foreign_byte_entry(copied: Callable[[str], Path]) -> None:
    directory = copied("stock")
    at = (directory / SHARD).read_bytes().index(b"run")  # the epoch's name in its pickle
    flip_byte(directory / SHARD, at)
    (problem,) = verify(directory, full=True).problems
    assert (problem.file, problem.tensor) == (SHARD, "epoch.name")


def test_padding_between_records_is_covered_by_the_checksum_of_the_file(
    copied: Callable[[str], Path],
) -> None:
    directory = copied("presharded")
    records = sorted(
        (chunk.record_start, chunk.record_start + chunk.record_nbytes)
        for chunk in chunk_list_of(str(directory), SHARD).chunks
    )
    ends = [0, *(stop for _, stop in records)]
    gaps = [(end, start) for end, (start, _) in zip(ends, records, strict=False) if start > end]
    assert gaps
    flip_byte(directory / SHARD, gaps[0][0])
    assert verify(directory).ok
    (problem,) = verify(directory, full=True).problems
    assert problem.file == SHARD
    assert "outside the tensors' data" in problem.message


@pytest.mark.parametrize("name", ["presharded", "plain", "resharded", "consolidated", "stock"])
def test_files_that_are_cut_short_or_missing(copied: Callable[[str], Path], name: str) -> None:
    directory = copied(name)
    for file in sorted(os.listdir(directory)):
        if file == manifest.NAME:
            continue
        data = (directory / file).read_bytes()
        for damage in ("cut", "missing"):
            os.remove(directory / file) if damage == "missing" else (directory / file).write_bytes(data[:-7])
            result = verify(directory)
            assert not result.ok, (file, damage)
            has_no_index = file.endswith("index.json") and damage == "missing"
            assert ("index is missing" if has_no_index else file) in lines(result), (file, damage)
            is_recognised = (name, file, damage) != ("stock", ".metadata", "missing")
            assert result.bring_again == ((file,) if is_recognised else ()), (file, damage)
            (directory / file).write_bytes(data)
    assert verify(directory, full=True).ok


def test_each_file_to_bring_again_is_named_once_and_no_other(copied: Callable[[str], Path]) -> None:
    for name in ("presharded", "stock"):
        directory = copied(name)
        shards = sorted(file for file in os.listdir(directory) if file.endswith(".distcp"))
        for file in shards:
            os.remove(directory / file)
        result = verify(directory)
        # `.metadata`, which names them, is whole.
        assert [problem.file for problem in result.problems] == shards
        assert result.bring_again == tuple(shards)


def test_shards_of_a_hub_model_that_are_missing_are_named(made: Path, tmp_path: Path) -> None:
    consolidate(made / "stock", tmp_path / "hub", max_shard_size="100KB", root="model")
    gone = sorted(file for file in os.listdir(tmp_path / "hub") if file.endswith(".safetensors"))[0]
    os.remove(tmp_path / "hub" / gone)
    result = verify(tmp_path / "hub")
    told = [(problem.file, problem.message) for problem in result.problems]
    assert told == [(gone, "there is no such file")]
    assert result.bring_again == (gone,)


def test_a_part_of_a_model_alone(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model-00001-of-00002.bin")
    save_file(tensors(), tmp_path / "model-00001-of-00002.safetensors")
    for path in tmp_path.iterdir():
        assert sum("is part 1 of 2 of a model" in note for note in verify(path).notes) == 1


def test_a_damaged_header_of_a_record_is_one_problem(copied: Callable[[str], Path]) -> None:
    directory = copied("presharded")
    at = (directory / SHARD).read_bytes().index(b"archive/data.pkl")
    flip_byte(directory / SHARD, at)
    result = verify(directory, full=True)
    (problem,) = result.problems
    assert problem.line().count(SHARD) == 1
    assert result.bring_again == (SHARD,)


def test_a_damaged_header_of_tied_names_is_one_problem(tmp_path: Path) -> None:
    embed, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    model = torch.nn.ModuleDict({"embed": embed, "head": head})
    model["head"].weight = model["embed"].weight
    save(model, tmp_path / "last")
    file = tmp_path / "last" / SHARD
    flip_byte(file, file.read_bytes().index(b"archive/data.pkl"))
    (problem,) = verify(tmp_path / "last", full=True).problems
    assert problem.tensor == "model.embed.weight"


def test_all_problems_are_listed(copied: Callable[[str], Path]) -> None:
    directory = copied("presharded")
    for file in (SHARD, "__1_0.distcp"):
        for start, stop, _ in extents(copied_again(directory))[file]:
            if stop > start:
                flip_byte(directory / file, start)
    os.remove(directory / "__0_0.chunks.json")
    flip_byte(directory / ".metadata", 100)
    result = verify(directory, full=True)
    named = {(problem.file, problem.tensor) for problem in result.problems}
    assert {("__0_0.chunks.json", None), (".metadata", None)} <= named
    assert {("__1_0.distcp", "model.big.weight"), ("__1_0.distcp", "model.norm.weight")} <= named
    assert SHARD in {file for file, _ in named}


def copied_again(directory: Path) -> Path:
    """The intact one, for its extents."""
    target = directory.parent / "again"
    if not target.exists():
        shutil.copytree(directory, target)
    return target


def test_data_is_checked_by_chunk_lists_where_metadata_is_lost(copied: Callable[[str], Path]) -> None:
    directory = copied("presharded")
    start, _, names = extents(directory)["__1_0.distcp"][0]
    flip_byte(directory / "__1_0.distcp", start)
    os.remove(directory / ".metadata")
    result = verify(directory, full=True)
    assert ("__1_0.distcp", names.pop()) in {(p.file, p.tensor) for p in result.problems}
    assert ".metadata" in {p.file for p in result.problems}


def swap_shards(directory: Path) -> None:
    os.rename(directory / SHARD, directory / "kept")
    os.rename(directory / "__1_0.distcp", directory / SHARD)
    os.rename(directory / "kept", directory / "__1_0.distcp")


def test_swapped_files(copied: Callable[[str], Path]) -> None:
    directory = copied("presharded")
    swap_shards(directory)
    assert {problem.file for problem in verify(directory).problems} >= {SHARD, "__1_0.distcp"}


def test_swapped_files_of_one_size(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub", {"w": torch.arange(64.0).view(8, 8)}, None)
    preshard(source, tmp_path / "out", world_size=2, wrap="none")
    swap_shards(tmp_path / "out")
    problems = verify(tmp_path / "out").problems
    assert [(problem.file, problem.tensor) for problem in problems] == [(SHARD, "w"), ("__1_0.distcp", "w")]
    assert "the chunk list says that another was written" in problems[0].message


def test_a_tensor_whose_bytes_alone_metadata_places_is_named(copied: Callable[[str], Path]) -> None:
    directory = copied("stock")
    alter(str(directory), lambda metadata: metadata.state_dict_metadata.pop("model.model.steps"))
    (doubt,) = verify(directory).doubts
    assert doubt == ".metadata places bytes of 1 name that it does not describe: model.model.steps"


def test_stale_files_are_named_and_no_problem(copied: Callable[[str], Path]) -> None:
    directory = copied("presharded")
    for stale in ("__7_0.distcp", "__7_0.chunks.json", "__3.metadata"):
        (directory / stale).write_bytes(b"x")
    result = verify(directory, full=True)
    assert result.ok
    named = sorted(warning.partition(":")[0] for warning in result.warnings)
    assert named == ["__3.metadata", "__7_0.chunks.json", "__7_0.distcp"]
    model = copied("hub")
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    assert [w.partition(":")[0] for w in verify(model).warnings] == ["consolidated.safetensors"]


def test_lists_of_another_run_are_found_though_their_checksums_are_right(
    copied: Callable[[str], Path],
) -> None:
    """Whoever made the manifest anew hides nothing: chunk lists are held against `.metadata`."""
    directory = copied("presharded")
    name = chunk_list.name_for(SHARD)
    text = (directory / name).read_text().replace('"model.norm.weight"', '"model.norm.weighs"')
    (directory / name).write_text(text)
    change_manifest(directory, lambda content: content["files"][0]["chunks"].update(crc32=None))
    problems = verify(directory).problems
    assert [(problem.file, problem.tensor) for problem in problems] == [(SHARD, "model.norm.weight")]
    assert "weighs" in (problems[0].found or "")


def test_manifest_against_the_tensors(copied: Callable[[str], Path]) -> None:
    directory = copied("presharded")

    def change(content: dict[str, Any]) -> None:
        content["tensors"]["model.steps"]["dtype"] = "int32"
        content["tensors"]["more"] = content["tensors"].pop("model.empty")

    change_manifest(directory, change)
    found = {(problem.tensor, problem.expected) for problem in verify(directory).problems}
    assert found == {("model.steps", "int32 [5]"), ("more", None), ("model.empty", None)}
    assert verify(directory).bring_again == ()  # the same file once more would change nothing


@pytest.mark.parametrize("key", ["files", "metadata", "tensors"])
def test_manifest_that_lacks_something(copied: Callable[[str], Path], key: str) -> None:
    directory = copied("presharded")
    change_manifest(directory, lambda content: content.update({key: 3}))
    (problem,) = {problem.file: problem for problem in verify(directory).problems}.values()
    assert problem.file == manifest.NAME
    assert "does not have the fields of its format" in problem.message


def test_manifest_names_stay_in_the_directory(copied: Callable[[str], Path]) -> None:
    directory = copied("presharded")
    (directory.parent / "secret").write_bytes(b"x")
    change_manifest(directory, lambda content: content["files"][0].update(name="../secret"))
    assert "../secret" in lines(verify(directory, full=True))


def test_manifest_of_a_training_state(copied: Callable[[str], Path]) -> None:
    directory = copied("stock")
    size = os.path.getsize(directory / SHARD)
    content = manifest.SavedState(
        tool=manifest.TOOL,
        model_class="Model",
        world_size=2,
        meshes=("dp_shard=2",),
        units=(),
        ties=(),
        files=(manifest.SavedFile(name=SHARD, size=size),),
    )
    (directory / manifest.NAME).write_bytes(manifest.dump(content))
    result = verify(directory, full=True)
    assert result.ok
    assert result.manifests == (manifest.NAME,)
    assert result.num_checked_chunks == 8
    with open(directory / SHARD, "ab") as file:
        file.write(b"x")
    (problem,) = verify(directory).problems
    assert (problem.file, problem.expected, problem.found) == (SHARD, str(size), str(size + 1))


def test_every_folder_of_a_trainers_checkpoint(made: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "optimizer_0", "optimizer_1"):
        source = "resharded" if name == "optimizer_1" else "stock"
        shutil.copytree(made / source, tmp_path / "checkpoint-5" / name)
    result = verify(tmp_path / "checkpoint-5", full=True)
    assert result.ok
    assert (result.format, result.num_tensors, result.num_files) == ("accelerate", 24, 4)
    assert result.manifests == ("optimizer_1/shardkit.json",)
    assert not any("not read: optimizer_0" in note for note in result.notes)
    start, _, names = extents(made / "stock")[SHARD][0]
    flip_byte(tmp_path / "checkpoint-5" / "optimizer_0" / SHARD, start)
    (problem,) = verify(tmp_path / "checkpoint-5", full=True).problems
    assert (problem.file, problem.tensor) == (f"optimizer_0/{SHARD}", names.pop())


def test_a_file_may_stand_for_its_checkpoint(made: Path) -> None:
    for file in (".metadata", SHARD, manifest.NAME):
        assert verify(made / "presharded" / file).num_tensors == 4
    whole = verify(made / "hub" / "model.safetensors")
    assert (whole.ok, whole.format, whole.num_tensors) == (True, "hub", 4)


def test_rank_files_of_torch_save(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.arange(500.0), "v": torch.ones(3)}}, tmp_path / "whole.ckpt")
    result = verify(tmp_path / "whole.ckpt", full=True)
    assert (result.ok, result.format, result.num_checked_chunks) == (True, "full-file", 2)
    flip(tmp_path / "whole.ckpt", torch.arange(500.0), 99)
    assert verify(tmp_path / "whole.ckpt").ok
    (problem,) = verify(tmp_path / "whole.ckpt", full=True).problems
    assert "w" in problem.line()
    assert "whole.ckpt" in problem.line()


def test_legacy_weights(tmp_path: Path) -> None:
    weight = torch.arange(500.0)
    state = {"w": weight, "turned": torch.rand(5, 4).T, "v": torch.ones(3)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    result = verify(tmp_path, full=True)
    assert (result.ok, result.num_checked_chunks, result.num_unrecorded_chunks) == (True, 3, 0)
    assert "no problem found" in result.headline()
    flip(tmp_path / "pytorch_model.bin", weight, 99)
    (problem,) = verify(tmp_path, full=True).problems
    assert (problem.file, problem.tensor) == ("pytorch_model.bin", "w")


def test_what_is_no_checkpoint(made: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(SourceError):
            verify(path)
    with pytest.raises(UsageError, match="6 checkpoints here"):
        verify(made)


def test_unfinished_save_is_a_problem(copied: Callable[[str], Path]) -> None:
    directory = copied("stock")
    os.remove(directory / ".metadata")
    (problem,) = verify(directory).problems
    assert "did not finish" in problem.message


def test_torch_is_not_imported(made: Path) -> None:
    code = (
        "import sys; from shardkit.operations.verify import verify\n"
        "for path in sys.argv[1:]: assert verify(path, full=True).ok\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *(str(made / name) for name in NAMES)], check=True)
