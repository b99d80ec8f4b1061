"""What parts read of a tensor that is cut along a later dim: what they have holes for, once; the rule is in docs/clusters.md."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.serialization import get_crc32_options, set_crc32_options

import shardkit
from shardkit.core.placements import Placement
from shardkit.core.text import KIB
from shardkit.errors import IncompleteError, IntegrityError, SourceError
from shardkit.files import storage
from shardkit.formats.torchsave.scan import BulkScanner, RecordScanner
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.operations.consolidate import job as consolidate_job
from shardkit.operations.preshard import job as preshard_job
from shardkit.transfer.sources import SourceFiles
from tests.bits import flip, flip_byte
from tests.contents import contents
from tests.formats.dcp.samples import save_rank_local, shard
from tests.manifests import write_file_list

RANKS = 4
EXPERTS, ROW = "layers.0.experts", "layers.0.rows"
# Two of eight rows of 48 KiB belong to a rank: 96 KiB in a row. A rank's part of a row of the other tensor is 512 bytes.
TENSORS = {EXPERTS: torch.randn(5, 8, 12 * KIB), ROW: torch.randn(256, 512)}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is cut along its second dim."""
    make_layout = preshard_job.make_layout

    def second(tensor: TensorLayout) -> TensorLayout:
        return replace(tensor, placements=tuple(Placement(1) for _ in tensor.placements))

    def made(*args: Any, **more: Any) -> Layout:
        layout = make_layout(*args, **more)
        return replace(layout, tensors={fqn: second(tensor) for fqn, tensor in layout.tensors.items()})

    monkeypatch.setattr(preshard_job, "make_layout", made)


@contextmanager
def reads(path: Path) -> Iterator[list[tuple[int, int]]]:
    """Give (start, stop) of every read of a file's data."""
    found = list[tuple[int, int]]()
    preadv = storage.preadv

    def counted(fd: int, buffers: Sequence[Any], start: int) -> int:
        nbytes = preadv(fd, buffers, start)
        if os.readlink(f"/proc/self/fd/{fd}") == str(path):
            found.append((start, start + nbytes))
        return nbytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "preadv", counted)
        yield found


def place(path: Path, fqn: str) -> tuple[int, int]:
    """Return where a tensor lies in a safetensors file."""
    with safe_open(path, "np") as opened:  # its order is that of the file
        names = sorted(opened.keys())
    size = path.stat().st_size
    at = size - sum(TENSORS[name].nbytes for name in names)
    for name in names:
        if name == fqn:
            return at, at + TENSORS[name].nbytes
        at += TENSORS[name].nbytes
    raise KeyError(fqn)


def preshard(model: Path, out: Path, part: str | None = None, **options: Any) -> shardkit.PreshardResult:
    return shardkit.preshard(model, out, world_size=RANKS, layout="declared", part=part, **options)


def bytes_of(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    """Return how often each 512 bytes of a tensor were read; reads begin and end at whole ones."""
    seen = [0] * ((stop - start) // 512)
    for first, end in ranges:
        for at in range(max(first, start), min(end, stop), 512):
            seen[(at - start) // 512] += 1
    return seen


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_part_reads_what_it_has_holes_for_and_nothing_twice(
    make_hub: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    model = make_hub(TENSORS)
    source = model / "model.safetensors"
    experts, rows = place(source, EXPERTS), place(source, ROW)
    with reads(source) as of_one:
        whole = preshard(model, tmp_path / "whole", dtype=dtype)
    assert bytes_of(of_one, *experts) == [1] * (TENSORS[EXPERTS].nbytes // 512)
    assert bytes_of(of_one, *rows) == [1] * (TENSORS[ROW].nbytes // 512)
    total = [0] * (TENSORS[EXPERTS].nbytes // 512)
    last = None
    for number in range(1, RANKS + 1):
        with reads(source) as of_part:
            last = preshard(model, tmp_path / "out", f"{number}/{RANKS}", dtype=dtype)
        seen = bytes_of(of_part, *experts)
        assert sum(seen) == len(seen) // RANKS, "its rows of each expert, and nothing else"
        assert set(seen) == {0, 1}, "nothing is read twice"
        # The pieces of a row are short: the tensor is read whole, once.
        assert bytes_of(of_part, *rows) == [1] * (TENSORS[ROW].nbytes // 512)
        total = [a + b for a, b in zip(total, seen, strict=True)]
    assert set(total) == {1}, "all parts together read it once, and whoever commits reads none of it"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert last is not None
    assert last.checked_bytes == whole.checked_bytes
    assert shardkit.verify(tmp_path / "out", full=True).ok


@pytest.mark.usefixtures("cut")
def test_another_number_of_parts_goes_on(make_hub: Callable[..., Path], tmp_path: Path) -> None:
    """Two of the files were read for one part; the others are read for two."""
    model = make_hub(TENSORS)
    preshard(model, tmp_path / "whole")
    preshard(model, tmp_path / "out", "1/2")
    for number in (1, 2, 3):
        preshard(model, tmp_path / "out", f"{number}/3", max_memory="2MiB")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("cut")
def test_a_source_with_checksums_is_compared_by_all_parts_together(
    make_hub: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_hub(TENSORS)
    write_file_list(model)
    whole = preshard(model, tmp_path / "whole")
    assert whole.checked_bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    source = model / "model.safetensors"
    with reads(source) as of_all:
        results = [preshard(model, tmp_path / "out", f"{n}/{RANKS}") for n in range(1, RANKS + 1)]
    assert results[-1].checked_bytes == whole.checked_bytes
    assert set(bytes_of(of_all, *place(source, EXPERTS))) == {1}
    status = source.stat()
    flip_byte(source, place(source, EXPERTS)[0] + 5)
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    for number in range(1, RANKS):
        preshard(model, tmp_path / "bad", f"{number}/{RANKS}")
    with pytest.raises(shardkit.IntegrityError, match=EXPERTS):
        preshard(model, tmp_path / "bad", f"{RANKS}/{RANKS}")
    assert not (tmp_path / "bad").exists()


@pytest.mark.usefixtures("cut")
def test_a_tensor_that_has_to_be_decoded_is_read_whole(tmp_path: Path) -> None:
    """A legacy file holds it in another order."""
    model = tmp_path / "model"
    model.mkdir()
    torch.save({EXPERTS: torch.randn(8, 5, 12 * KIB).transpose(0, 1)}, model / "pytorch_model.bin")
    preshard(model, tmp_path / "whole")
    for number in (1, 2):
        preshard(model, tmp_path / "out", f"{number}/2")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.fixture(params=["opened before", "opened as read"])
def opening(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are opened as they are read where they lie in a store; here on a disk, too."""
    if request.param == "opened as read":
        monkeypatch.setattr(consolidate_job, "is_far", lambda _: True)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Twelve tensors of eight ranks, and two that may be tied."""
    state = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(16, 8) for n in range(12)}
    state["model.embed_tokens.weight"] = state["lm_head.weight"] = torch.randn(32, 8)
    home = tmp_path / "hub"
    home.mkdir()
    save_file({name: tensor.clone() for name, tensor in state.items()}, home / "model.safetensors")
    (home / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "model_type": "llama"}))
    shardkit.preshard(home, tmp_path / "dcp", world_size=8, wrap="none", layout="declared", dtype="fp16")
    return tmp_path / "dcp"


@contextmanager
def opened_records() -> Iterator[list[int]]:
    """Give the places of all records that are opened, one by one or many at once."""
    found = list[int]()
    inner, compare = RecordScanner.read, BulkScanner.compare

    def read(scanner: RecordScanner, kind: Any, offset: int, length: int, *, where: str) -> Any:
        found.append(offset)
        return inner(scanner, kind, offset, length, where=where)

    def compared(scanner: BulkScanner, fd: int, templates: Any, offsets: Any, lengths: Any) -> Any:
        found.extend(offsets.tolist())
        return compare(scanner, fd, templates, offsets, lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordScanner, "read", read)
        patch.setattr(BulkScanner, "compare", compared)
        yield found


OPTIONS: dict[str, Any] = {"max_shard_size": 300, "ask_class": False, "manifest": True}


def assert_as_in_one_process(
    last: shardkit.ConsolidateResult, out: Path, whole: shardkit.ConsolidateResult
) -> None:
    """The last of the parts has committed what one process wrote, and all have compared what that one did."""
    assert last.part is not None
    assert last.part.is_committed
    assert contents(out) == contents(Path(whole.output))
    assert (last.checked_bytes, last.unchecked) == (whole.checked_bytes, whole.unchecked)


@pytest.mark.usefixtures("opening")
def test_a_part_opens_the_records_of_its_own_files(sharded: Path, tmp_path: Path) -> None:
    """And, as all do, those of the tied tensors that are compared."""
    whole = shardkit.consolidate(sharded, tmp_path / "whole", **OPTIONS)
    last = None
    for number in range(1, 5):
        with opened_records() as found:
            last = shardkit.consolidate(sharded, tmp_path / "out", part=f"{number}/4", **OPTIONS)
        assert last.part is not None
        assert 0 < len(found) <= 8 * (last.part.num_files + 2) < 8 * 14
    assert last is not None
    assert_as_in_one_process(last, tmp_path / "out", whole)
    assert whole.checked_bytes == whole.read_bytes


@pytest.mark.usefixtures("opening")
def test_a_record_that_another_part_reads_may_be_damaged(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads it refuses it. If that one dies before it takes its note back, whoever commits refuses it."""
    with safe_open(tmp_path / "hub/model.safetensors", "pt") as hub:
        flip(sharded / "__5_0.distcp", hub.get_tensor("model.layers.3.mlp.up_proj.weight").half()[10:12], 5)

    def refused(number: int, out: str) -> bool:
        return said(number, out).partition(": __5_0")[0].endswith("layers.3.mlp.up_proj.weight")

    def said(number: int, out: str) -> str:
        try:
            shardkit.consolidate(sharded, tmp_path / out, part=f"{number}/4", **OPTIONS)
        except IntegrityError as error:
            return str(error)
        return ""

    (reader,) = [number for number in range(1, 5) if refused(number, "out")]
    *others, last = [number for number in range(1, 5) if number != reader]
    with monkeypatch.context() as patch:
        patch.setattr(SourceFiles, "finish", lambda *_, **__: None)
        assert not refused(reader, "dies")
    assert not any(refused(number, "dies") for number in others)
    assert refused(last, "dies")
    with pytest.raises(IncompleteError):
        shardkit.commit(tmp_path / "dies")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "dies").exists()


RULES = """
format = 1
name = "mine"

[[rule]]
hub = ["model.layers.{i}.gate.weight", "model.layers.{i}.up.weight"]
model = "layers.{i}.both"
steps = [{ concat = 0 }]

[[rule]]
hub = "model.layers.{i}.down.weight"
model = "layers.{i}.down"
"""


@pytest.mark.parametrize("names", [("both", "down"), ("down",)])
@pytest.mark.usefixtures("opening")
def test_parts_whose_tensors_are_made_of_others(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Key rules rename them, or make them of several."""
    state = {f"layers.{n}.{name}": torch.randn(16, 8) for n in range(4) for name in names}
    save_rank_local(lambda mesh: {fqn: shard(t, mesh) for fqn, t in state.items()}, 4, tmp_path / "dcp")
    text = RULES if "both" in names else RULES.replace("[[rule]]", "[[rule]]\noptional = true", 1)
    (tmp_path / "rules.toml").write_text(text)
    options = {**OPTIONS, "keys": tmp_path / "rules.toml"}
    whole = shardkit.consolidate(tmp_path / "dcp", tmp_path / "whole", **options)
    num_opened = []
    for number in range(1, 4):
        with opened_records() as found:
            last = shardkit.consolidate(tmp_path / "dcp", tmp_path / "out", part=f"{number}/3", **options)
        num_opened.append(len(found))
    assert_as_in_one_process(last, tmp_path / "out", whole)
    assert not whole.unchecked
    num_records = 4 * len(state)
    assert max(num_opened) < num_records
    # The two halves of a tensor may go to two parts.
    assert num_records <= sum(num_opened) <= num_records + 2 * 4 * ("both" in names)


@pytest.mark.usefixtures("opening")
def test_a_record_of_another_form_than_its_like(tmp_path: Path) -> None:
    """One tensor of a rank was not contiguous. One part reads it, the others never look at it, and all agree."""

    def make(mesh: DeviceMesh) -> dict[str, DTensor]:
        made = {f"layers.{n}.weight": shard(torch.full((16, 4), float(n)), mesh) for n in range(9)}
        if mesh.get_local_rank() == 2:
            local = torch.arange(16.0).reshape(4, 4).t()
            made["layers.5.weight"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        return made

    save_rank_local(make, 4, tmp_path / "dcp")
    whole = shardkit.consolidate(tmp_path / "dcp", tmp_path / "whole", **OPTIONS)
    counts = []
    for order in ((1, 2, 3), (3, 2, 1)):
        out = tmp_path / f"out{order[0]}"
        for number in order:
            with opened_records() as found:
                last = shardkit.consolidate(tmp_path / "dcp", out, part=f"{number}/3", **OPTIONS)
            counts.append(len(found))
        assert_as_in_one_process(last, out, whole)
    assert sum(counts) == 2 * 36


@pytest.mark.usefixtures("opening")
def test_damaged_records_are_named_all_at_once(sharded: Path, tmp_path: Path) -> None:
    """The end of a record does not say what it holds any more."""
    for rank in (3, 6):
        path = sharded / f"__{rank}_0.distcp"
        data = bytearray(path.read_bytes())
        at = [index for index in range(len(data)) if data.startswith(b"PK\x05\x06", index)]
        for index in at[2:8]:
            data[index] = 0
        path.write_bytes(data)
    found = set[str]()
    for number in (1, 2):
        with pytest.raises(SourceError) as caught:
            shardkit.consolidate(sharded, tmp_path / "out", part=f"{number}/2", **OPTIONS)
        found |= {problem.partition(":")[0] for problem in caught.value.problems}
    assert len(found) == 6


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("opening")
def test_two_tensors_of_one_record(tmp_path: Path) -> None:
    """The bytes are whole and the CRC-32 is theirs: what the record says of itself fits one of the two alone."""
    shapes = {"l.0.weight": (4, 8), "l.1.weight": (8, 4), "l.2.weight": (8, 4), "l.3.weight": (4, 8)}
    state = {fqn: torch.arange(32.0).reshape(shape) for fqn, shape in shapes.items()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path = tmp_path / "dcp/.metadata"
    metadata = pickle.loads(path.read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    metadata.storage_data[places["l.2.weight"]] = metadata.storage_data[places["l.3.weight"]]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(IntegrityError, match=r"l.2.weight: .*shape \[4, 8\]"):
        shardkit.consolidate(tmp_path / "dcp", tmp_path / "out", part="1/1", ask_class=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("opening")
def test_an_empty_tensor_among_others(tmp_path: Path) -> None:
    state = {f"l.{n}.weight": torch.full((0 if n == 2 else 4, 8), float(n)) for n in range(6)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    shardkit.consolidate(tmp_path / "dcp", tmp_path / "whole", ask_class=False)
    shardkit.consolidate(tmp_path / "dcp", tmp_path / "out", part="1/1", ask_class=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("opening")
def test_a_rank_that_recorded_no_checksums(tmp_path: Path) -> None:
    """What the parts read of it counts as unchecked, as in one process."""

    def make(mesh: DeviceMesh) -> dict[str, DTensor]:
        set_crc32_options(mesh.get_local_rank() != 2)
        return {f"layers.{n}.weight": shard(torch.full((16, 4), float(n)), mesh) for n in range(9)}

    before = get_crc32_options()
    try:
        save_rank_local(make, 4, tmp_path / "dcp")
    finally:
        set_crc32_options(before)
    whole = shardkit.consolidate(tmp_path / "dcp", tmp_path / "whole", **OPTIONS)
    assert whole.unchecked
    for number in range(1, 4):
        last = shardkit.consolidate(tmp_path / "dcp", tmp_path / "out", part=f"{number}/3", **OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert (last.checked_bytes, last.unchecked) == (whole.checked_bytes, whole.unchecked)
