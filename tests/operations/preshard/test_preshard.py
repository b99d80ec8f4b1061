"""preshard through its Python API: values, ties, casts, digests, destinations. Declared layouts, no processes."""

from __future__ import annotations

import errno
import json
import os
import threading
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardkit
from shardkit.core.dtypes import BY_NAME, short_dtype
from shardkit.errors import IntegrityError, Interrupted, ResourceError, UsageError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.operations.destination import check_space
from shardkit.operations.preshard import _needed_bytes
from shardkit.operations.preshard.job import _choose_dtypes
from tests.bits import raw
from tests.contents import contents
from tests.formats.reading import chunk_list_of
from tests.operations.consolidate.checkpoints import EMBED, HEAD, assert_bit_equal
from tests.operations.stops import InterruptAfter, failing

MakeHub = Callable[..., Path]
CAUSAL = {"architectures": ["TinyForCausalLM"]}  # no model_type: declared, without a child process


def loaded(directory: Path, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load with stock DCP into fresh tensors."""
    state = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads in a single process, as asked
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


def every_kind() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    bits = torch.randint(0, 255, (6, 5), dtype=torch.uint8)
    return {
        "model.embed.weight": torch.randn(1001, 16).bfloat16(),
        "model.layers.0.weight": torch.randn(70, 33),
        "model.layers.1.weight": torch.randn(3, 4, 5, dtype=torch.float64),
        "model.layers.1.odd": torch.randn(7).half(),
        "complex": torch.randn(5, 2, dtype=torch.complex64),
        "fp8": bits.view(torch.float8_e4m3fn),
        "int64": torch.arange(9).reshape(3, 3),
        "uint16": torch.arange(4).to(torch.uint16),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "int_scalar": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 9])
def test_stock_load_gives_every_bit_back(world_size: int, make_hub: MakeHub, tmp_path: Path) -> None:
    tensors = every_kind()
    result = shardkit.preshard(make_hub(tensors), tmp_path / "out", world_size=world_size, wrap="none")
    assert result.num_files == world_size
    assert_bit_equal(loaded(tmp_path / "out", tensors), tensors)


def test_torch_converts_it_to_one_file(make_hub: MakeHub, tmp_path: Path) -> None:
    tensors = every_kind()
    shardkit.preshard(str(make_hub(tensors)), str(tmp_path / "out"), world_size=3, wrap="none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    assert_bit_equal(torch.load(tmp_path / "whole.pt", weights_only=True), tensors)


def test_digests_are_those_of_the_bytes(make_hub: MakeHub, tmp_path: Path) -> None:
    tensors, out = every_kind(), tmp_path / "out"
    shardkit.preshard(str(make_hub(tensors)), str(out), world_size=3, wrap="none")
    content = manifest.load(manifest.read_bytes(str(out)), manifest.NAME)
    for name, tensor in tensors.items():
        assert content["tensors"][name]["crc32"] == crc32(raw(tensor)), name
    for file in (*content["files"], *(f["chunks"] for f in content["files"]), content["metadata"]):
        data = (out / file["name"]).read_bytes()
        assert (len(data), crc32(data)) == (file["size"], file["crc32"]), file["name"]
    for file in content["files"]:
        listed = chunk_list_of(str(out), file["name"])
        data = (out / file["name"]).read_bytes()
        for chunk in listed.chunks:
            assert crc32(data[chunk.data_start : chunk.data_start + chunk.data_nbytes]) == chunk.crc32
            record = tmp_path / "record"
            record.write_bytes(data[chunk.record_start : chunk.record_start + chunk.record_nbytes])
            with zipfile.ZipFile(record) as archive:
                assert archive.testzip() is None


def test_digests_do_not_depend_on_the_layout(make_hub: MakeHub, tmp_path: Path) -> None:
    source, found = str(make_hub(every_kind())), []
    for world_size in (1, 2, 5):
        out = str(tmp_path / str(world_size))
        shardkit.preshard(source, out, world_size=world_size, wrap="none")
        content = manifest.load(manifest.read_bytes(out), manifest.NAME)
        assert content is not None
        found.append({name: tensor["crc32"] for name, tensor in content["tensors"].items()})
    assert found[0] == found[1] == found[2]


def test_without_digests_records_say_not_recorded(make_hub: MakeHub, tmp_path: Path) -> None:
    tensors, out = every_kind(), tmp_path / "out"
    shardkit.preshard(str(make_hub(tensors)), str(out), world_size=2, wrap="none", digest="none")
    assert_bit_equal(loaded(out, tensors), tensors)
    listed = chunk_list_of(str(out), "__0_0.distcp")
    data = (out / "__0_0.distcp").read_bytes()
    chunk = listed.chunks[0]
    (tmp_path / "record").write_bytes(data[chunk.record_start : chunk.record_start + chunk.record_nbytes])
    with zipfile.ZipFile(tmp_path / "record") as archive:
        assert archive.getinfo("archive/data/0").CRC == 0
    content = manifest.load(manifest.read_bytes(str(out)), manifest.NAME)
    assert "crc32" not in content["tensors"]["scalar"]


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_casts_round_as_torch_and_leave_the_rest(
    name: str, dtype: torch.dtype, make_hub: MakeHub, tmp_path: Path
) -> None:
    tensors, out = every_kind(), tmp_path / "out"
    result = shardkit.preshard(str(make_hub(tensors)), str(out), world_size=3, wrap="none", dtype=name)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    expected = {k: t.to(dtype) if t.dtype in floats else t for k, t in tensors.items()}
    if dtype is torch.bfloat16:  # torch's own NaN has other bits on other processors
        expected["nan"].view(torch.int16)[expected["nan"].isnan()] = -1
    assert_bit_equal(loaded(out, expected), expected)
    changed = Counter(t.dtype for key, t in tensors.items() if expected[key].dtype != t.dtype)
    assert {each.stored: each.num_tensors for each in result.converted} == {
        str(dtype).removeprefix("torch."): number for dtype, number in changed.items()
    }
    assert {each.written for each in result.converted} == {str(dtype).removeprefix("torch.")}
    assert any("fp8" in note for note in result.notes)


def test_a_cast_tensor_larger_than_the_memory(make_hub: MakeHub, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"w": torch.randn(3000, 1024)}
    out = tmp_path / "out"
    options: dict[str, Any] = {"dtype": "bf16", "max_memory": "2MiB", "jobs": 1}
    result = shardkit.preshard(make_hub(tensors), out, world_size=1, wrap="none", **options)
    assert result.peak_memory_bytes < tensors["w"].nbytes
    expected = {"w": tensors["w"].bfloat16()}
    assert_bit_equal(loaded(out, expected), expected)


class TestTies:
    """One parameter under two names."""

    TIED: ClassVar = {**CAUSAL, "tie_word_embeddings": True}

    def test_a_name_that_is_not_in_the_file_points_at_the_same_record(
        self, make_hub: MakeHub, tmp_path: Path
    ) -> None:
        embed = torch.randn(11, 4)
        source = make_hub({EMBED: embed}, config=self.TIED)
        result = shardkit.preshard(str(source), str(tmp_path / "out"), world_size=2, wrap="none")
        assert result.ties == ((EMBED, HEAD),)
        both = {EMBED: embed, HEAD: embed}
        assert_bit_equal(loaded(tmp_path / "out", both), both)
        assert len(chunk_list_of(str(tmp_path / "out"), "__0_0.distcp").chunks) == 1

    def test_equal_copies_are_stored_once(self, make_hub: MakeHub, tmp_path: Path) -> None:
        embed = torch.randn(11, 4)
        both = {EMBED: embed, HEAD: embed.clone()}
        source = make_hub(both, config=self.TIED)
        result = shardkit.preshard(source, tmp_path / "out", world_size=2, wrap="none")
        assert (result.num_tensors, result.warnings) == (1, ())
        assert_bit_equal(loaded(tmp_path / "out", both), both)

    def test_copies_that_differ_are_both_kept_with_a_warning(self, make_hub: MakeHub, tmp_path: Path) -> None:
        both = {EMBED: torch.randn(11, 4), HEAD: torch.randn(11, 4)}
        source = make_hub(both, config=self.TIED)
        result = shardkit.preshard(source, tmp_path / "out", world_size=2, wrap="none")
        assert (result.num_tensors, result.ties) == (2, ())
        assert HEAD in result.warnings[0]
        assert_bit_equal(loaded(tmp_path / "out", both), both)


class TestDestination:
    """What may be written, and where."""

    @pytest.fixture
    def source(self, make_hub: MakeHub) -> str:
        return str(make_hub({"w": torch.arange(8.0)}))

    def test_an_existing_destination_is_left_alone(self, source: str, tmp_path: Path) -> None:
        shardkit.preshard(source, str(tmp_path / "out"), world_size=2, wrap="none")
        (tmp_path / "out" / "__0_0.distcp").unlink()
        with pytest.raises(UsageError, match="exists"):
            shardkit.preshard(source, str(tmp_path / "out"), world_size=2, wrap="none")
        assert not (tmp_path / "out" / "__0_0.distcp").exists()

    def test_overwrite_replaces_a_checkpoint_whole(self, source: str, tmp_path: Path) -> None:
        out = tmp_path / "out"
        shardkit.preshard(source, str(out), world_size=3, wrap="none")
        shardkit.preshard(source, str(out), world_size=1, wrap="none", overwrite=True)
        of_one = [".metadata", "__0_0.chunks.json", "__0_0.distcp", "shardkit.json"]
        assert sorted(p.name for p in out.iterdir()) == of_one
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]

    def test_overwrite_never_replaces_anything_else(self, source: str, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").touch()
        with pytest.raises(UsageError, match="not a sharded checkpoint"):
            shardkit.preshard(source, str(tmp_path / "out"), world_size=1, overwrite=True)
        assert (tmp_path / "out" / "thesis.tex").exists()

    @pytest.mark.parametrize("place", ["", "inside", ".."])
    def test_the_source_is_never_written(self, place: str, source: str) -> None:
        with pytest.raises(UsageError):
            shardkit.preshard(source, os.path.join(source, place), world_size=1, overwrite=True)

    def test_a_missing_parent_is_named(self, source: str, tmp_path: Path) -> None:
        with pytest.raises(ResourceError, match="does not exist"):
            shardkit.preshard(source, str(tmp_path / "no" / "out"), world_size=1)

    def test_a_link_is_not_written_through(self, source: str, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "out").symlink_to("elsewhere")
        with pytest.raises(UsageError, match="symbolic link"):
            shardkit.preshard(source, str(tmp_path / "out"), world_size=1, overwrite=True)

    def test_a_dry_run_writes_nothing(self, source: str, tmp_path: Path) -> None:
        result = shardkit.preshard(source, str(tmp_path / "out"), world_size=2, wrap="none", dry_run=True)
        assert result.dry_run
        assert result.written_bytes == sum(result.file_bytes) > 0
        assert [p.name for p in tmp_path.iterdir()] == ["model"]

    def test_too_little_space_is_known_before_the_first_byte(
        self, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = type("usage", (), {"free": 100})
        monkeypatch.setattr("shardkit.files.storage.disk_usage", lambda path: usage)
        with pytest.raises(ResourceError, match="No space left"):
            shardkit.preshard(source, str(tmp_path / "out"), world_size=1, wrap="none")
        assert [p.name for p in tmp_path.iterdir()] == ["model"]

    def test_a_disk_that_fills_up_half_way_leaves_nothing(
        self, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shardkit.files.storage.pwrite", failing(errno.ENOSPC))
        with pytest.raises(ResourceError, match=r"__0_0\.distcp.*\(w\).*No space left"):
            shardkit.preshard(source, str(tmp_path / "out"), world_size=1, wrap="none")
        assert [p.name for p in tmp_path.iterdir()] == ["model"]

    def test_the_umask_decides_the_modes(self, source: str, tmp_path: Path) -> None:
        old = os.umask(0o027)
        try:
            shardkit.preshard(source, str(tmp_path / "out"), world_size=1, wrap="none")
        finally:
            os.umask(old)
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
        assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o640}


def test_equal_input_gives_equal_bytes_wherever_it_lies(make_hub: MakeHub, tmp_path: Path) -> None:
    tensors, found = every_kind(), []
    for name in ("one", "two"):
        out = tmp_path / f"{name}-out"
        source, jobs = make_hub(tensors, name=name), 1 + len(found) % 2
        shardkit.preshard(source, out, world_size=2, wrap="none", jobs=jobs)
        found.append(contents(out))
    assert found[0] == found[1]
    assert str(tmp_path).encode() not in b"".join(found[0].values())


def test_the_manifest_says_what_was_done(make_hub: MakeHub, tmp_path: Path) -> None:
    shardkit.preshard(str(make_hub(every_kind())), str(tmp_path / "out"), mesh="dp_replicate=2,dp_shard=3")
    content = json.loads((tmp_path / "out" / "shardkit.json").read_text())
    assert content["mesh"]["world_size"] == 6
    assert [file["name"] for file in content["files"]] == [f"__{shard}_0.distcp" for shard in range(3)]
    assert content["tensors"]["model.embed.weight"]["placements"] == ["R", "S(0)"]
    assert [unit["path"] for unit in content["units"]] == ["", "model.layers.0", "model.layers.1"]


class TestSourceThatChanges:
    """A source is the one whose headers were read, or the run ends with its name."""

    @pytest.fixture
    def swap(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
        """Let something happen between reading the headers and moving the bytes."""

        def install(happen: Callable[[], None]) -> None:
            from shardkit.operations import preshard as module

            decide = module.build_job

            def build_job(*args: Any, **kwargs: Any) -> Any:
                job = decide(*args, **kwargs)
                happen()
                return job

            monkeypatch.setattr(module, "build_job", build_job)

        return install

    def assert_refused(self, source: Path, tmp_path: Path, name: str) -> None:
        with pytest.raises(IntegrityError, match=f"(?s)changed.*{name}"):
            shardkit.preshard(str(source), str(tmp_path / "out"), world_size=2, wrap="none")
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*"))

    def test_a_file_of_the_same_size_in_its_place(
        self, make_hub: MakeHub, tmp_path: Path, swap: Callable[[Callable[[], None]], None]
    ) -> None:
        old, new = make_hub({"a": torch.zeros(8)}), make_hub({"a": torch.ones(8)}, name="new")
        swap(lambda: os.replace(new / "model.safetensors", old / "model.safetensors"))
        self.assert_refused(old, tmp_path, "model.safetensors")

    @pytest.mark.parametrize("tensor", [torch.zeros(300, 40), torch.zeros(40, 300).t()])
    @pytest.mark.parametrize("size", [None, 5000])
    def test_a_legacy_file_overwritten_or_cut(
        self,
        tensor: torch.Tensor,
        size: int | None,
        tmp_path: Path,
        swap: Callable[[Callable[[], None]], None],
    ) -> None:
        (tmp_path / "model").mkdir()
        path = tmp_path / "model" / "pytorch_model.bin"
        torch.save({"a": tensor}, path)

        def damage() -> None:
            with path.open("r+b") as file:
                if size is None:
                    file.seek(4000)
                    file.write(b"damage")
                else:
                    file.truncate(size)

        swap(damage)
        self.assert_refused(path.parent, tmp_path, "pytorch_model.bin")


def test_legacy_files_with_tensors_that_lie_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "model").mkdir()
    base = torch.randn(50, 33)
    tensors = {"plain": base, "rows": base[7:19], "turned": torch.randn(21, 70).t()}
    tensors["half"] = base[:5].bfloat16()
    torch.save(tensors, tmp_path / "model" / "pytorch_model.bin")
    for dtype in ("keep", "fp32"):
        out = tmp_path / dtype
        result = shardkit.preshard(str(tmp_path / "model"), str(out), world_size=3, wrap="none", dtype=dtype)
        assert result.source_format == "torch-bin"
        expected = {k: t.float() if dtype == "fp32" else t for k, t in tensors.items()}
        assert_bit_equal(loaded(out, {k: t.contiguous() for k, t in expected.items()}), expected)


def test_an_interrupted_call_is_resumed_by_the_next_one(make_hub: MakeHub, tmp_path: Path) -> None:
    """As in a notebook: the process that was interrupted calls again."""
    source, out = str(make_hub(every_kind())), str(tmp_path / "out")
    with pytest.raises(Interrupted):
        shardkit.preshard(source, out, world_size=9, wrap="none", jobs=1, progress=InterruptAfter(20))
    assert not os.path.exists(out)
    result = shardkit.preshard(source, out, world_size=9, wrap="none")
    assert result.resumed_files > 0
    assert_bit_equal(loaded(Path(out), every_kind()), every_kind())
    assert not list(tmp_path.glob(".*"))


def test_two_calls_at_once_have_one_winner(make_hub: MakeHub, tmp_path: Path) -> None:
    tensors, out = every_kind(), tmp_path / "out"
    source, outcomes = str(make_hub(tensors)), []

    def call(world_size: int) -> None:
        try:
            outcomes.append(shardkit.preshard(source, str(out), world_size=world_size, wrap="none").num_files)
        except UsageError:
            outcomes.append(None)

    threads = [threading.Thread(target=call, args=(size,)) for size in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome]
    assert len(winners) == 1
    assert len(list(out.glob("*.distcp"))) == winners[0]
    assert_bit_equal(loaded(out, tensors), tensors)
    assert not list(tmp_path.glob(".*"))


def test_the_working_directory_as_source_gives_its_own_name(
    make_hub: MakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_hub({"w": torch.ones(4, 2)}, name="Own-1B")
    (source / "sub").mkdir()
    monkeypatch.chdir(source)
    assert shardkit.preshard(".", world_size=2, wrap="none").output == str(tmp_path / "Own-1B-dp_shard2")
    monkeypatch.chdir(source / "sub")
    assert shardkit.preshard("..", world_size=3, wrap="none").output == str(tmp_path / "Own-1B-dp_shard3")
    monkeypatch.chdir(tmp_path)
    assert shardkit.preshard("Own-1B/", world_size=4, wrap="none").output == str(
        tmp_path / "Own-1B-dp_shard4"
    )
    assert sorted(path.name for path in source.iterdir()) == ["model.safetensors", "sub"]


def test_the_hub_cache_gets_no_output_by_default(
    make_hub: MakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--Own-1B" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    make_hub({"w": torch.ones(4, 2)}).rename(snapshot)
    monkeypatch.chdir(snapshot)
    with pytest.raises(UsageError, match="Own-1B-dp_shard2 lies inside the source"):
        shardkit.preshard(".", world_size=2, wrap="none")


def test_a_dry_run_minds_the_room_for_the_download(tmp_path: Path) -> None:
    def job(cache: Path, download_bytes: int) -> Any:
        model = SimpleNamespace(directory=str(cache), download_bytes=download_bytes, label="Own-1B")
        return SimpleNamespace(model=model, num_chunks=0, plan=SimpleNamespace(written_bytes=1))

    def check_room(cache: Path, download_bytes: int) -> None:
        out = str(tmp_path / "out")
        check_space(out, _needed_bytes(job(cache, download_bytes), out, 0))

    check_room(tmp_path / "not" / "yet", 1)
    with pytest.raises(ResourceError, match=rf"{1 + (1 << 60)} bytes"):
        check_room(tmp_path / "not" / "yet", 1 << 60)
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        return
    with pytest.raises(ResourceError, match=rf"/Own-1B: .*{1 << 60} bytes"):  # the cache is on another disk
        check_room(Path("/dev/shm/hub"), 1 << 60)


def chosen(held: str, dtype: str) -> tuple[str, list[str]]:
    """Return what becomes of a tensor that its model keeps in fp32, and the notes."""
    layout: Any = SimpleNamespace(tensors={"wo.weight": None}, keep_fp32=frozenset({"wo.weight"}))
    dtypes, notes = _choose_dtypes({"wo.weight": BY_NAME[held]}, layout, dtype)
    return dtypes["wo.weight"].name, notes


@pytest.mark.parametrize(
    ("held", "dtype", "expected"),
    [
        ("float32", "bf16", "float32"),
        ("float32", "fp16", "float32"),
        ("bfloat16", "fp16", "float32"),  # as from_pretrained has it
        ("bfloat16", "fp32", "float32"),
        ("float64", "fp32", "float32"),
        ("float32", "keep", "float32"),
    ],
)
def test_what_the_model_keeps_in_fp32_is_never_narrowed(held: str, dtype: str, expected: str) -> None:
    found, notes = chosen(held, dtype)
    assert found == expected
    assert bool(notes) == (dtype in ("bf16", "fp16"))
    assert all(short_dtype(expected) in note for note in notes)
