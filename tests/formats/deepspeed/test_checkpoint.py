"""DeepSpeed's layouts, written here with stock torch as DeepSpeed itself does (its structure, its classes' names)."""

from __future__ import annotations

import enum
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardkit import consolidate, resolve_checkpoint
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.deepspeed.checkpoint import is_deepspeed, open_deepspeed
from shardkit.formats.deepspeed.zero import zero2_pieces, zero3_pieces
from shardkit.formats.registry import open_checkpoint, stray_weights
from shardkit.operations.verify import verify

Tensors = dict[str, torch.Tensor]
GROUPS = (("embed.weight", "up.weight", "conv.weight"), ("up.bias", "scale", "norm.weight"))
TIED = {"head.weight": "embed.weight"}


@pytest.fixture(autouse=True)
def deepspeed_classes(monkeypatch: pytest.MonkeyPatch) -> type[enum.IntEnum]:
    """The names that DeepSpeed's pickles mention; nothing is imported when they are read."""
    config = ModuleType("deepspeed.runtime.zero.config")
    stages = enum.IntEnum(
        "ZeroStageEnum", {"disabled": 0, "one": 1, "two": 2, "three": 3}, module=config.__name__
    )
    config.ZeroStageEnum = stages
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, config.__name__, config)
    return stages


def parameters() -> Tensors:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "embed.weight": (7, 5), "up.weight": (5, 3), "conv.weight": (3, 2, 3), "up.bias": (5,), "scale": (),
        "norm.weight": (3,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def frozen() -> Tensors:
    return {"frozen.weight": torch.arange(14.0).reshape(2, 7).bfloat16(), "empty": torch.zeros(0, 3)}


def buffers() -> Tensors:
    return {"mean": torch.tensor([1.5, 2.5]), "count": torch.tensor(7)}


def truth() -> Tensors:
    weights = {**parameters(), **frozen(), **buffers()}
    return {**weights, "head.weight": weights["embed.weight"]}


def model_state(
    num_ranks: int, module: Tensors, fragments: Tensors, *, shared: bool = True
) -> dict[str, Any]:
    groups = [OrderedDict((name, parameters()[name].shape) for name in group) for group in GROUPS]
    return {
        "module": OrderedDict(module),
        "buffer_names": list(buffers()),
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen().items()),
        "frozen_param_fragments": OrderedDict(fragments),
        "shared_params": TIED if shared else {},
        "global_steps": 2,
        "dp_world_size": num_ranks,
        "ds_version": "0.19.8",
    }


def finish(root: Path) -> Path:
    (root / "latest").write_text("global_step2")
    return root


def write_joined(
    root: Path, num_ranks: int, stages: Any, *, stage: int = 2, keep_padding: bool = False
) -> Path:
    """ZeRO-1 and 2: groups are joined, padded to twice the ranks and cut; the padding at the end is not saved."""
    tag = root / "global_step2"
    tag.mkdir(parents=True)
    module = {**{name: value.bfloat16() for name, value in parameters().items()}, **frozen(), **buffers()}
    module["head.weight"] = module["embed.weight"]
    fragments = frozen() if stage == 2 else {}
    torch.save(model_state(num_ranks, module, fragments), tag / "mp_rank_00_model_states.pt")
    parts = []
    for group in GROUPS:
        flat = torch.cat([parameters()[name].flatten() for name in group])
        padding = -len(flat) % (2 * num_ranks)
        cut = list(torch.cat([flat, torch.full((padding,), 99.0)]).chunk(num_ranks))
        if not keep_padding:
            cut[-1] = cut[-1][: len(cut[-1]) - padding]
        parts.append(cut)
    for rank in range(num_ranks):
        state = {
            "single_partition_of_fp32_groups": [cut[rank] for cut in parts],
            "zero_stage": stages(stage),
            "partition_count": [num_ranks] * len(parts),
            "base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(4)}}},
        }
        path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, path)
    return finish(root)


def part_of(tensor: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    size = -(-tensor.numel() // num_ranks)
    flat = torch.cat(
        [tensor.flatten(), torch.full((size * num_ranks - tensor.numel(),), 99.0).to(tensor.dtype)]
    )
    return flat[rank * size : (rank + 1) * size].clone()


def write_partitioned(root: Path, num_ranks: int, stages: Any) -> Path:
    """ZeRO-3: every parameter is padded to the ranks and cut by itself."""
    tag = root / "global_step2"
    tag.mkdir(parents=True)
    placeholders = {name: torch.empty(0).bfloat16() for name in truth() if name not in buffers()}
    for rank in range(num_ranks):
        fragments = {name: part_of(value, num_ranks, rank) for name, value in frozen().items()}
        state = model_state(num_ranks, {**placeholders, **buffers()}, fragments, shared=rank == 0)
        torch.save(state, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = [
            torch.cat([part_of(parameters()[name], num_ranks, rank) for name in group]) for group in GROUPS
        ]
        optimizer = {"fp32_flat_groups": flat, "zero_stage": stages(3), "partition_count": num_ranks}
        path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer}, path)
    return finish(root)


def write_universal(root: Path, stage: int, stages: Any) -> Path:
    """What ds_to_universal.py makes of either; from ZeRO-3 the tensors are bare and flat."""
    if stage == 3:
        tag = write_partitioned(root, 2, stages) / "global_step2"
    else:
        tag = write_joined(root, 2, stages) / "global_step2"
    for path in tag.glob("*_optim_states.pt"):
        path.unlink()
    values = {
        **parameters(),
        **({} if stage == 3 else {"head.weight": torch.zeros(7, 5), "count": torch.ones(())}),
    }
    for name, value in values.items():
        (tag / "zero" / name).mkdir(parents=True)
        content = value.flatten() if stage == 3 else {"param": value, "cat_dim": 0}
        torch.save(content, tag / "zero" / name / "fp32.pt")
        torch.save(torch.zeros(3), tag / "zero" / name / "exp_avg.pt")
    torch.save({"optimizer_state_dict": {}}, tag / "zero" / "optimizer_state.pt")
    tag.rename(root / "global_step2_universal")
    (root / "latest").unlink()
    (root / "latest_universal").write_text("global_step2_universal\n")
    return root


def read(checkpoint: Checkpoint) -> Tensors:
    """Read every tensor through the catalog, chunk by chunk."""
    catalog = checkpoint.select(list(checkpoint.catalog.tensors))
    assert catalog.encoding == "raw"
    found = {}
    for name, entry in catalog.tensors.items():
        grid = np.zeros(entry.shape, np.dtype((np.void, entry.dtype.itemsize)))
        covered = 0
        for chunk, region in zip(entry.chunk_ids, catalog.chunks.regions(entry.chunk_ids), strict=True):
            file, nbytes = catalog.files[catalog.chunks.file[chunk]], catalog.chunks.nbytes[chunk]
            start = catalog.chunks.start[chunk]
            content = Path(file.path).read_bytes() if file.is_raw else bytes(file.decoded())
            data = np.frombuffer(content[start : start + nbytes], grid.dtype)
            box = tuple(slice(o, stop) for o, stop in zip(region.offsets, region.stops, strict=True))
            grid[box] = data.reshape(region.sizes)
            covered += region.num_elements
        assert covered == entry.num_elements
        flat = torch.frombuffer(
            bytearray(grid.tobytes()) or bytearray(8), dtype=getattr(torch, entry.dtype.name)
        )
        found[name] = flat[: entry.num_elements].reshape(entry.shape)
    return found


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("keep_padding", [False, True])
def test_joined_partitions(
    tmp_path: Path, num_ranks: int, keep_padding: bool, deepspeed_classes: Any
) -> None:
    root = write_joined(tmp_path / "run", num_ranks, deepspeed_classes, keep_padding=keep_padding)
    checkpoint = open_deepspeed(str(root))
    assert_same(read(checkpoint), truth())
    assert (checkpoint.format, checkpoint.writer) == ("deepspeed-zero2", "DeepSpeed ZeRO-2")
    assert checkpoint.contents.roots == {"model": ()}
    assert any("fp32 masters; the model ran in bf16" in note for note in checkpoint.remarks.notes)


def test_stage_1_keeps_frozen_parameters_in_the_module_alone(tmp_path: Path, deepspeed_classes: Any) -> None:
    checkpoint = open_deepspeed(str(write_joined(tmp_path, 2, deepspeed_classes, stage=1)))
    assert checkpoint.format == "deepspeed-zero1"
    assert_same(read(checkpoint), truth())


def test_buffers_of_ranks_that_differ_are_named(tmp_path: Path, deepspeed_classes: Any) -> None:
    file = write_partitioned(tmp_path / "run", 2, deepspeed_classes) / (
        "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt"
    )
    state = torch.load(file, weights_only=False)
    state["module"]["mean"] += 1
    torch.save(state, file)
    (copy,) = open_deepspeed(str(tmp_path / "run")).remarks.differing
    assert copy.line().startswith("mean: rank 0's (")
    assert f"rank 1's (global_step2/{file.name}) differs" in copy.line()
    assert [problem.details for problem in verify(str(tmp_path / "run")).problems] == [(copy.line(),)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
def test_partitioned_parameters(tmp_path: Path, num_ranks: int, deepspeed_classes: Any) -> None:
    checkpoint = open_deepspeed(str(write_partitioned(tmp_path / "run", num_ranks, deepspeed_classes)))
    assert_same(read(checkpoint), truth())
    assert checkpoint.format == "deepspeed-zero3"


@pytest.mark.parametrize("stage", [2, 3])
def test_universal(tmp_path: Path, stage: int, deepspeed_classes: Any) -> None:
    """What a universal checkpoint casts from the module, a tied name or a buffer, is read from the module."""
    checkpoint = open_deepspeed(str(write_universal(tmp_path / "run", stage, deepspeed_classes)))
    assert checkpoint.format == "deepspeed-universal"
    assert_same(read(checkpoint), truth())


def test_universal_of_a_model_parallel_run(tmp_path: Path, deepspeed_classes: Any) -> None:
    """The module's files are parts; the parameters' own files are whole."""
    root = write_universal(tmp_path / "run", 2, deepspeed_classes)
    tag = root / "global_step2_universal"
    (tag / "mp_rank_01_model_states.pt").write_bytes((tag / "mp_rank_00_model_states.pt").read_bytes())
    checkpoint = open_deepspeed(str(root))
    assert_same(read(checkpoint), {**parameters(), "head.weight": torch.zeros(7, 5), "count": torch.ones(())})


def test_ties_point_at_the_same_bytes(tmp_path: Path, deepspeed_classes: Any) -> None:
    checkpoint = open_deepspeed(str(write_partitioned(tmp_path, 2, deepspeed_classes)))
    catalog = checkpoint.select(["head.weight", "embed.weight"])
    head, embed = (
        [(catalog.chunks.file[row], catalog.chunks.start[row]) for row in entry.chunk_ids]
        for entry in catalog.tensors.values()
    )
    assert head == embed


def test_names_are_in_the_order_of_the_module(tmp_path: Path, deepspeed_classes: Any) -> None:
    checkpoint = open_deepspeed(str(write_joined(tmp_path, 2, deepspeed_classes)))
    assert list(checkpoint.catalog.tensors) == [*parameters(), *frozen(), *buffers(), "head.weight"]


def test_the_tag_itself_and_what_is_no_checkpoint(tmp_path: Path, deepspeed_classes: Any) -> None:
    root = write_partitioned(tmp_path / "run", 2, deepspeed_classes)
    assert is_deepspeed(str(root))
    assert_same(read(open_deepspeed(str(root / "global_step2"))), truth())
    assert not is_deepspeed(str(tmp_path))
    assert not is_deepspeed(str(root / "latest"))
    with pytest.raises(SourceError, match="not a DeepSpeed checkpoint"):
        open_deepspeed(str(tmp_path))


@pytest.mark.parametrize("text", ["../run/global_step2", "..", "", "global_step3", "\0", "x" * 9000])
def test_latest_leads_to_a_directory_of_its_own(tmp_path: Path, text: str, deepspeed_classes: Any) -> None:
    root = write_joined(tmp_path / "run", 1, deepspeed_classes)
    (root / "latest").write_text(text)
    assert not is_deepspeed(str(root))


def test_an_older_universal_checkpoint_does_not_stand_for_what_latest_names(
    tmp_path: Path, deepspeed_classes: Any
) -> None:
    root = write_universal(tmp_path / "run", 2, deepspeed_classes)
    (root / "latest").write_text("global_step2")
    assert_same(read(open_deepspeed(str(root))), truth())
    (root / "latest").write_text("global_step")  # begins the name, and is another step
    assert not is_deepspeed(str(root))
    (root / "latest").write_text("global_step3")
    assert not is_deepspeed(str(root))
    with pytest.raises(SourceError, match="latest names global_step3, which is not there"):
        resolve_checkpoint(root)
    (root / "latest").unlink()
    (root / "latest_universal").write_text("1000")
    (root / "global_step2_universal").rename(root / "1000")
    assert_same(read(open_deepspeed(str(root))), truth())


def test_without_zero(tmp_path: Path) -> None:
    """The module alone; a tensor that is not contiguous is put in order."""
    module = {
        "weight": torch.arange(6.0).reshape(2, 3).T,
        "bias": torch.ones(3).bfloat16(),
        "extra": {"a": 1},
    }
    state = {"module": module, "param_shapes": None, "buffer_names": [], "shared_params": None}
    torch.save({**state, "pytorch-lightning_version": "2.6.6"}, tmp_path / "mp_rank_00_model_states.pt")
    checkpoint = open_deepspeed(str(tmp_path))
    assert_same(read(checkpoint), {"weight": module["weight"], "bias": module["bias"]})
    assert (checkpoint.format, checkpoint.catalog.objects) == ("deepspeed-zero0", ("extra",))
    assert checkpoint.writer == "Lightning DeepSpeedStrategy, DeepSpeed"
    assert any("without their names" in note for note in checkpoint.remarks.notes)


def test_optimizer_files_that_were_not_kept(tmp_path: Path, deepspeed_classes: Any) -> None:
    """With ZeRO-2 the module's 16-bit weights are still there; with ZeRO-3 nothing is."""
    for root in (
        write_joined(tmp_path / "two", 2, deepspeed_classes),
        write_partitioned(tmp_path / "three", 2, deepspeed_classes),
    ):
        for path in (root / "global_step2").glob("*_optim_states.pt"):
            path.unlink()
    checkpoint = open_deepspeed(str(tmp_path / "two"))
    expected = {name: value.bfloat16() for name, value in parameters().items()} | frozen() | buffers()
    assert_same(read(checkpoint), {**expected, "head.weight": expected["embed.weight"]})
    assert any("not the fp32 masters" in note for note in checkpoint.remarks.notes)
    with pytest.raises(SourceError, match="optimizer files of all ranks are missing"):
        open_deepspeed(str(tmp_path / "three"))


def test_parameters_without_values_are_named(tmp_path: Path, deepspeed_classes: Any) -> None:
    """Older versions did not save what is frozen."""
    root = write_partitioned(tmp_path, 2, deepspeed_classes)
    for path in (root / "global_step2").glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        del state["frozen_param_shapes"], state["frozen_param_fragments"]
        torch.save(state, path)
    checkpoint = open_deepspeed(str(root))
    assert not set(frozen()) & set(checkpoint.catalog.tensors)
    assert {name for name, _ in checkpoint.remarks.skipped} >= set(frozen())


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_parameter_of_a_class_is_not_left_out(
    tmp_path: Path, stage: int, deepspeed_classes: Any
) -> None:
    """It is refused by name, and the checkpoint is whole. A trained one is read: its masters are plain."""
    root = write_joined(tmp_path, 2, deepspeed_classes, stage=stage)
    odd = torch.eye(3).to_sparse()

    def put(name: str) -> None:
        def edit(state: dict[str, Any]) -> None:
            for each in (state["module"], state["frozen_param_fragments"]):
                each.update({name: odd} if name in each else {})

        change(root / "global_step2/mp_rank_00_model_states.pt", edit)

    put("up.weight")
    assert_same(read(open_deepspeed(str(root))), truth())
    put("frozen.weight")
    with pytest.raises(SourceError, match=r"frozen\.weight: .*mp_rank_00_model_states\.pt: torch's sparse"):
        open_deepspeed(str(root))
    found = verify(root, full=True)
    assert found.ok
    assert "frozen.weight" in found.warnings[0]


def test_paddings_between_parameters(tmp_path: Path, deepspeed_classes: Any) -> None:
    """Newer versions may start every parameter at a multiple of some elements."""
    root = write_joined(tmp_path, 1, deepspeed_classes)
    path = root / "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(path, weights_only=False)
    paddings, flat = [], []
    for group in GROUPS:
        gaps = [-parameters()[name].numel() % 4 for name in group[:-1]] + [0]
        pieces = [
            torch.cat([parameters()[name].flatten(), torch.zeros(gap)])
            for name, gap in zip(group, gaps, strict=True)
        ]
        paddings.append(gaps)
        flat.append(torch.cat(pieces))
    state["optimizer_state_dict"]["param_alignment_paddings"] = paddings
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"] = flat
    torch.save(state, path)
    assert_same(read(open_deepspeed(str(root))), truth())


def test_files_of_an_earlier_larger_save_are_left_out(tmp_path: Path, deepspeed_classes: Any) -> None:
    old = write_partitioned(tmp_path / "old", 4, deepspeed_classes)
    new = write_partitioned(tmp_path / "new", 2, deepspeed_classes)
    for path in (old / "global_step2").iterdir():
        if "rank_2" in path.name or "rank_3" in path.name:
            path.rename(new / "global_step2" / path.name)
    checkpoint = open_deepspeed(str(new))
    assert_same(read(checkpoint), truth())
    assert len([name for name, why in checkpoint.remarks.skipped if "earlier save" in why]) == 4


@pytest.mark.parametrize("tag", ["global_step2", "last"])
def test_files_of_an_earlier_save_are_named_once(tmp_path: Path, deepspeed_classes: Any, tag: str) -> None:
    """Also where `latest` names a link to the tag: whatever lists the directory finds them under the other name."""
    root = write_partitioned(tmp_path, 2, deepspeed_classes)
    stale = root / "global_step2" / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    shutil.copyfile(root / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt", stale)
    (root / "last").symlink_to("global_step2")
    (root / "latest").write_text(tag)
    checkpoint = open_checkpoint(str(root))
    assert f"{tag}/{stale.name}" in dict(checkpoint.remarks.skipped)
    assert list(stray_weights(checkpoint)) == []


def test_a_name_that_no_file_could_have(tmp_path: Path, deepspeed_classes: Any) -> None:
    """What was not read may be a file or an entry, and an entry's name may be anything."""
    root = write_partitioned(tmp_path / "run", 1, deepspeed_classes)
    file = root / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "module": {**state["module"], "lost\0": torch.empty(0)}}, file)
    result = consolidate(root, tmp_path / "out", dry_run=True)
    assert "lost\0" in {part.what for part in result.skipped}


def test_a_directory_with_the_config_is_named_once(
    tmp_path: Path, deepspeed_classes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its path is relative: the one above the tag is the same."""
    write_partitioned(tmp_path / "run", 1, deepspeed_classes)
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    assert open_deepspeed("run").contents.assets == ("run",)


@pytest.mark.parametrize("write", [write_joined, write_partitioned])
def test_every_missing_file_is_listed(
    tmp_path: Path, write: Callable[..., Path], deepspeed_classes: Any
) -> None:
    root = write(tmp_path, 4, deepspeed_classes)
    gone = sorted(
        path
        for path in (root / "global_step2").iterdir()
        if "pp_rank_0" in path.name or "pp_rank_3" in path.name
    )
    for path in gone:
        path.unlink()
    with pytest.raises(SourceError, match=f"{len(gone)} of .* rank files are missing") as caught:
        open_deepspeed(str(root))
    assert sorted(caught.value.problems) == [f"global_step2/{path.name}" for path in gone]


@pytest.mark.parametrize("ranks", [(1, 2), (0, 2)])
def test_every_damaged_file_is_listed(tmp_path: Path, ranks: tuple[int, int], deepspeed_classes: Any) -> None:
    root = write_partitioned(tmp_path, 3, deepspeed_classes)
    cut = [root / f"global_step2/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks]
    for path in cut:
        os.truncate(path, path.stat().st_size // 2)
    fifo = root / "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt"
    fifo.unlink()
    os.mkfifo(fifo)
    with pytest.raises(SourceError, match=r"3 of \d files cannot be read") as caught:
        open_deepspeed(str(root))
    assert all(any(path.name in problem for problem in caught.value.problems) for path in (*cut, fifo))


def test_a_missing_model_file(tmp_path: Path, deepspeed_classes: Any) -> None:
    root = write_joined(tmp_path, 2, deepspeed_classes)
    (root / "global_step2/mp_rank_00_model_states.pt").unlink()
    with pytest.raises(SourceError, match="file of the module is missing"):
        open_deepspeed(str(root))


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(path, weights_only=False)
    edit(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("zero_pp_rank_1_mp_rank_00_model_states.pt", lambda state: state.update(global_steps=4), "from different saves"),
        ("zero_pp_rank_1_mp_rank_00_model_states.pt", lambda state: state.update(dp_world_size=4), "from different saves"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", lambda state: state.update(param_shapes=None), "from different saves"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
         lambda state: state["optimizer_state_dict"].update(partition_count=4), "do not hold the parameters"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
         lambda state: state["optimizer_state_dict"]["fp32_flat_groups"].pop(), "do not hold the parameters"),
        ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
         lambda state: state["optimizer_state_dict"].update(fp32_flat_groups=[torch.zeros(3)] * 2),
         "do not hold the parameters"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_each_other(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], None], message: str, deepspeed_classes: Any
) -> None:
    root = write_partitioned(tmp_path, 2, deepspeed_classes)
    change(root / "global_step2" / name, edit)
    with pytest.raises(IntegrityError, match=message):
        open_deepspeed(str(root))


@pytest.mark.parametrize("short", [[torch.zeros(30), torch.zeros(9)], [torch.zeros(80), torch.zeros(9)], []])
def test_partitions_of_another_size(
    tmp_path: Path, short: list[torch.Tensor], deepspeed_classes: Any
) -> None:
    root = write_joined(tmp_path, 1, deepspeed_classes)
    path = root / "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    change(path, lambda state: state["optimizer_state_dict"].update(single_partition_of_fp32_groups=short))
    with pytest.raises(SourceError, match="fp32 partitions"):
        open_deepspeed(str(root))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_01-model_00-model_states.pt", "pipeline"),
        ("layer_0_expert_1_mp_rank_01_model_states.pt", "tensor parallelism"),
        ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "two saves"),
    ],
)
def test_other_splits_are_refused(tmp_path: Path, extra: str, message: str, deepspeed_classes: Any) -> None:
    root = write_joined(tmp_path, 2, deepspeed_classes)
    (root / "global_step2" / extra).touch()
    with pytest.raises(SourceError, match=message) as caught:
        open_deepspeed(str(root))
    assert any(extra in problem for problem in caught.value.problems)


def test_universal_files_are_all_needed(tmp_path: Path, deepspeed_classes: Any) -> None:
    root = write_universal(tmp_path / "run", 2, deepspeed_classes)
    zero = root / "global_step2_universal/zero"
    torch.save({"param": torch.zeros(4)}, zero / "up.bias/fp32.pt")
    with pytest.raises(SourceError, match="1 files do not hold their parameter"):
        open_deepspeed(str(root))
    (zero / "up.bias/fp32.pt").unlink()
    (zero / "scale/fp32.pt").unlink()
    with pytest.raises(SourceError, match="2 of 6 parameters have no") as caught:
        open_deepspeed(str(root))
    assert caught.value.problems == tuple(
        f"global_step2_universal/zero/{name}/fp32.pt" for name in ("up.bias", "scale")
    )


@pytest.mark.parametrize("name", ["../../outside", "..", "a/b", "\0"])
def test_names_do_not_lead_out_of_a_universal_checkpoint(
    tmp_path: Path, name: str, deepspeed_classes: Any
) -> None:
    root = write_universal(tmp_path / "run", 2, deepspeed_classes)
    for path in (tmp_path / "run/outside", root / "global_step2_universal/zero/a/b"):
        path.mkdir(parents=True)
        torch.save({"param": torch.zeros(2)}, path / "fp32.pt")
    path = root / "global_step2_universal/mp_rank_00_model_states.pt"
    change(path, lambda state: state["param_shapes"][0].update({name: torch.Size([2])}))
    with pytest.raises(SourceError, match="1 of 7 parameters have no"):
        open_deepspeed(str(root))


@pytest.mark.parametrize(
    "content", [[1, 2], {"module": {}}, {"other": 1}, {"module": {}, "param_shapes": [{"a": "b"}]}]
)
def test_files_of_something_else(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(SourceError, match=r"not a file of DeepSpeed|holds no weights"):
        open_deepspeed(str(tmp_path))


shape_lists = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


def numbered(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    start = 0
    for index, shape in enumerate(shapes):
        yield f"p{index}", np.arange(start, start + prod(shape))
        start += prod(shape)


@given(shape_lists, st.integers(1, 5))
def test_partitions_give_back_every_element(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    """Both ways of cutting, done with numpy and undone by the pieces."""
    values = dict(numbered(shapes))
    named = dict(zip(values, shapes, strict=True))
    flat = np.concatenate(list(values.values()))
    flat = np.pad(flat, (0, -len(flat) % (2 * num_ranks)), constant_values=-1)
    joined = np.split(flat, num_ranks)
    parts = {name: -(-len(value) // num_ranks) for name, value in values.items()}
    padded = {
        name: np.pad(value, (0, parts[name] * num_ranks - len(value)), constant_values=-1)
        for name, value in values.items()
    }
    own = [
        np.concatenate([padded[name][rank * part : (rank + 1) * part] for name, part in parts.items()])
        for rank in range(num_ranks)
    ]
    for held, pieces in (
        (joined, zero2_pieces(0, named, [len(part) for part in joined])),
        (own, zero3_pieces(named, [[len(part)] for part in own])),
    ):
        assert list(pieces) == list(named)
        for name, found in pieces.items():
            got = [
                value
                for piece in found
                for value in held[piece.rank][piece.start : piece.start + piece.length]
            ]
            assert got == values[name].tolist()
            assert [piece.target for piece in found] == np.cumsum([0, *(p.length for p in found)])[
                :-1
            ].tolist()


@pytest.mark.shared
@pytest.mark.skipif("SHARDKIT_FIXTURES" not in os.environ, reason="SHARDKIT_FIXTURES is not set")
def test_what_deepspeed_wrote() -> None:
    home = Path(os.environ["SHARDKIT_FIXTURES"], "sharded/deepspeed_zero3_bf16_w2")
    assert_same(read(open_deepspeed(str(home / "ckpt"))), load_file(home / "truth/fp32_master.safetensors"))
