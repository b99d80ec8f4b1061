"""DeepSpeed's layouts: every tensor is read from the parts of ranks, and what does not fit is refused by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from shardkit import consolidate, resolve_checkpoint
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.deepspeed.checkpoint import is_deepspeed, open_deepspeed
from shardkit.formats.deepspeed.zero import zero2_pieces, zero3_pieces
from shardkit.formats.registry import open_checkpoint, stray_weights
from shardkit.operations.verify import verify
from tests.formats.deepspeed.samples import (
    GROUPS,
    OPTIM,
    buffers,
    change,
    frozen,
    parameters,
    truth,
    write_joined,
    write_partitioned,
    write_universal,
)
from tests.formats.reading import contents, expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("keep_padding", [False, True])
def test_joined_partitions(tmp_path: Path, num_ranks: int, keep_padding: bool) -> None:
    root = write_joined(tmp_path / "run", num_ranks, keep_padding=keep_padding)
    checkpoint = open_deepspeed(str(root))
    assert contents(checkpoint) == expected(truth())
    assert (checkpoint.format, checkpoint.writer) == ("deepspeed-zero2", "DeepSpeed ZeRO-2")
    assert checkpoint.contents.roots == {"model": ()}
    assert any("fp32 masters; the model ran in bf16" in note for note in checkpoint.remarks.notes)


def test_stage_1_keeps_frozen_parameters_in_the_module_alone(tmp_path: Path) -> None:
    checkpoint = open_deepspeed(str(write_joined(tmp_path, 2, stage=1)))
    assert checkpoint.format == "deepspeed-zero1"
    assert contents(checkpoint) == expected(truth())


def test_buffers_of_ranks_that_differ_are_named(tmp_path: Path) -> None:
    file = write_partitioned(tmp_path / "run", 2) / "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt"
    change(file, lambda state: state["module"]["mean"].add_(1))
    (copy,) = open_deepspeed(str(tmp_path / "run")).remarks.differing
    assert copy.line().startswith("mean: rank 0's (")
    assert f"rank 1's (global_step2/{file.name}) differs" in copy.line()
    assert [problem.details for problem in verify(str(tmp_path / "run")).problems] == [(copy.line(),)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
def test_partitioned_parameters(tmp_path: Path, num_ranks: int) -> None:
    checkpoint = open_deepspeed(str(write_partitioned(tmp_path / "run", num_ranks)))
    assert contents(checkpoint) == expected(truth())
    assert checkpoint.format == "deepspeed-zero3"


@pytest.mark.parametrize("stage", [2, 3])
def test_universal(tmp_path: Path, stage: int) -> None:
    """What a universal checkpoint casts from the module, a tied name or a buffer, is read from the module."""
    checkpoint = open_deepspeed(str(write_universal(tmp_path / "run", stage)))
    assert checkpoint.format == "deepspeed-universal"
    assert contents(checkpoint) == expected(truth())


def test_universal_of_a_model_parallel_run(tmp_path: Path) -> None:
    """The module's files are parts; the parameters' own files are whole."""
    root = write_universal(tmp_path / "run", 2)
    tag = root / "global_step2_universal"
    (tag / "mp_rank_01_model_states.pt").write_bytes((tag / "mp_rank_00_model_states.pt").read_bytes())
    checkpoint = open_deepspeed(str(root))
    assert contents(checkpoint) == expected(
        {**parameters(), "head.weight": torch.zeros(7, 5), "count": torch.ones(())}
    )


def test_ties_point_at_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = open_deepspeed(str(write_partitioned(tmp_path, 2)))
    catalog = checkpoint.select(["head.weight", "embed.weight"])
    head, embed = (
        [(catalog.chunks.file[row], catalog.chunks.start[row]) for row in entry.chunk_ids]
        for entry in catalog.tensors.values()
    )
    assert head == embed


def test_names_are_in_the_order_of_the_module(tmp_path: Path) -> None:
    checkpoint = open_deepspeed(str(write_joined(tmp_path, 2)))
    assert list(checkpoint.catalog.tensors) == [*parameters(), *frozen(), *buffers(), "head.weight"]


def test_the_tag_itself_and_what_is_no_checkpoint(tmp_path: Path) -> None:
    root = write_partitioned(tmp_path / "run", 2)
    assert is_deepspeed(str(root))
    assert contents(open_deepspeed(str(root / "global_step2"))) == expected(truth())
    assert not is_deepspeed(str(tmp_path))
    assert not is_deepspeed(str(root / "latest"))
    with pytest.raises(SourceError, match="not a DeepSpeed checkpoint"):
        open_deepspeed(str(tmp_path))


@pytest.mark.parametrize("text", ["../run/global_step2", "..", "", "global_step3", "\0", "x" * 9000])
def test_latest_leads_to_a_directory_of_its_own(tmp_path: Path, text: str) -> None:
    root = write_joined(tmp_path / "run", 1)
    (root / "latest").write_text(text)
    assert not is_deepspeed(str(root))


def test_an_older_universal_checkpoint_does_not_stand_for_what_latest_names(tmp_path: Path) -> None:
    root = write_universal(tmp_path / "run", 2)
    (root / "latest").write_text("global_step2")
    assert contents(open_deepspeed(str(root))) == expected(truth())
    (root / "latest").write_text("global_step")  # begins the name, and is another step
    assert not is_deepspeed(str(root))
    (root / "latest").write_text("global_step3")
    assert not is_deepspeed(str(root))
    with pytest.raises(SourceError, match="latest names global_step3, which is not there"):
        resolve_checkpoint(root)
    (root / "latest").unlink()
    (root / "latest_universal").write_text("1000")
    (root / "global_step2_universal").rename(root / "1000")
    assert contents(open_deepspeed(str(root))) == expected(truth())


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
    assert contents(checkpoint) == expected({"weight": module["weight"], "bias": module["bias"]})
    assert (checkpoint.format, checkpoint.catalog.objects) == ("deepspeed-zero0", ("extra",))
    assert checkpoint.writer == "Lightning DeepSpeedStrategy, DeepSpeed"
    assert any("without their names" in note for note in checkpoint.remarks.notes)


def test_optimizer_files_that_were_not_kept(tmp_path: Path) -> None:
    """With ZeRO-2 the module's 16-bit weights are still there; with ZeRO-3 nothing is."""
    for root in (
        write_joined(tmp_path / "two", 2),
        write_partitioned(tmp_path / "three", 2),
    ):
        for path in (root / "global_step2").glob("*_optim_states.pt"):
            path.unlink()
    checkpoint = open_deepspeed(str(tmp_path / "two"))
    weights = {name: value.bfloat16() for name, value in parameters().items()} | frozen() | buffers()
    assert contents(checkpoint) == expected({**weights, "head.weight": weights["embed.weight"]})
    assert any("not the fp32 masters" in note for note in checkpoint.remarks.notes)
    with pytest.raises(SourceError, match="optimizer files of all ranks are missing"):
        open_deepspeed(str(tmp_path / "three"))


def test_parameters_without_values_are_named(tmp_path: Path) -> None:
    """Older versions did not save what is frozen."""
    root = write_partitioned(tmp_path, 2)
    for path in (root / "global_step2").glob("*_model_states.pt"):
        change(path, lambda state: [state.pop("frozen_param_shapes"), state.pop("frozen_param_fragments")])
    checkpoint = open_deepspeed(str(root))
    assert not set(frozen()) & set(checkpoint.catalog.tensors)
    assert {name for name, _ in checkpoint.remarks.skipped} >= set(frozen())


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_parameter_of_a_class_is_not_left_out(tmp_path: Path, stage: int) -> None:
    """It is refused by name, and the checkpoint is whole. A trained one is read: its masters are plain."""
    root = write_joined(tmp_path, 2, stage=stage)
    odd = torch.eye(3).to_sparse()

    def put(name: str) -> None:
        def edit(state: dict[str, Any]) -> None:
            for each in (state["module"], state["frozen_param_fragments"]):
                each.update({name: odd} if name in each else {})

        change(root / "global_step2/mp_rank_00_model_states.pt", edit)

    put("up.weight")
    assert contents(open_deepspeed(str(root))) == expected(truth())
    put("frozen.weight")
    with pytest.raises(SourceError, match=r"frozen\.weight: .*mp_rank_00_model_states\.pt: torch's sparse"):
        open_deepspeed(str(root))
    found = verify(root, full=True)
    assert found.ok
    assert "frozen.weight" in found.warnings[0]


def test_paddings_between_parameters(tmp_path: Path) -> None:
    """Newer versions may start every parameter at a multiple of some elements."""
    root = write_joined(tmp_path, 1)
    paddings, flat = [], []
    for group in GROUPS:
        gaps = [-parameters()[name].numel() % 4 for name in group[:-1]] + [0]
        pieces = [
            torch.cat([parameters()[name].flatten(), torch.zeros(gap)])
            for name, gap in zip(group, gaps, strict=True)
        ]
        paddings.append(gaps)
        flat.append(torch.cat(pieces))
    made = {"param_alignment_paddings": paddings, "single_partition_of_fp32_groups": flat}
    path = root / "global_step2" / OPTIM.format(0)
    change(path, lambda state: state["optimizer_state_dict"].update(made))
    assert contents(open_deepspeed(str(root))) == expected(truth())


def test_files_of_an_earlier_larger_save_are_left_out(tmp_path: Path) -> None:
    old = write_partitioned(tmp_path / "old", 4)
    new = write_partitioned(tmp_path / "new", 2)
    for path in (old / "global_step2").iterdir():
        if "rank_2" in path.name or "rank_3" in path.name:
            path.rename(new / "global_step2" / path.name)
    checkpoint = open_deepspeed(str(new))
    assert contents(checkpoint) == expected(truth())
    assert len([name for name, why in checkpoint.remarks.skipped if "earlier save" in why]) == 4


@pytest.mark.parametrize("tag", ["global_step2", "last"])
def test_files_of_an_earlier_save_are_named_once(tmp_path: Path, tag: str) -> None:
    """Also where `latest` names a link to the tag: whatever lists the directory finds them under the other name."""
    root = write_partitioned(tmp_path, 2)
    stale = root / "global_step2" / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    shutil.copyfile(root / "global_step2" / "zero_pp_rank_1_mp_rank_00_model_states.pt", stale)
    (root / "last").symlink_to("global_step2")
    (root / "latest").write_text(tag)
    checkpoint = open_checkpoint(str(root))
    assert f"{tag}/{stale.name}" in dict(checkpoint.remarks.skipped)
    assert list(stray_weights(checkpoint)) == []


def test_a_name_that_no_file_could_have(tmp_path: Path) -> None:
    """What was not read may be a file or an entry, and an entry's name may be anything."""
    root = write_partitioned(tmp_path / "run", 1)
    file = root / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    change(file, lambda state: state["module"].update({"lost\0": torch.empty(0)}))
    result = consolidate(root, tmp_path / "out", dry_run=True)
    assert "lost\0" in {part.what for part in result.skipped}


def test_a_directory_with_the_config_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its path is relative: the one above the tag is the same."""
    write_partitioned(tmp_path / "run", 1)
    (tmp_path / "run" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    assert open_deepspeed("run").contents.assets == ("run",)


@pytest.mark.parametrize("write", [write_joined, write_partitioned])
def test_every_missing_file_is_listed(tmp_path: Path, write: Callable[..., Path]) -> None:
    root = write(tmp_path, 4)
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
def test_every_damaged_file_is_listed(tmp_path: Path, ranks: tuple[int, int]) -> None:
    root = write_partitioned(tmp_path, 3)
    cut = [root / "global_step2" / OPTIM.format(rank) for rank in ranks]
    for path in cut:
        os.truncate(path, path.stat().st_size // 2)
    fifo = root / "global_step2/zero_pp_rank_1_mp_rank_00_model_states.pt"
    fifo.unlink()
    os.mkfifo(fifo)
    with pytest.raises(SourceError, match=r"3 of \d files cannot be read") as caught:
        open_deepspeed(str(root))
    assert all(any(path.name in problem for problem in caught.value.problems) for path in (*cut, fifo))


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("zero_pp_rank_1_mp_rank_00_model_states.pt", lambda state: state.update(global_steps=4), "from different saves"),
        ("zero_pp_rank_1_mp_rank_00_model_states.pt", lambda state: state.update(dp_world_size=4), "from different saves"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", lambda state: state.update(param_shapes=None), "from different saves"),
        (OPTIM.format(1),
         lambda state: state["optimizer_state_dict"].update(partition_count=4), "do not hold the parameters"),
        (OPTIM.format(1),
         lambda state: state["optimizer_state_dict"]["fp32_flat_groups"].pop(), "do not hold the parameters"),
        (OPTIM.format(1),
         lambda state: state["optimizer_state_dict"].update(fp32_flat_groups=[torch.zeros(3)] * 2),
         "do not hold the parameters"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_each_other(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    root = write_partitioned(tmp_path, 2)
    change(root / "global_step2" / name, edit)
    with pytest.raises(IntegrityError, match=message):
        open_deepspeed(str(root))


@pytest.mark.parametrize("short", [[torch.zeros(30), torch.zeros(9)], [torch.zeros(80), torch.zeros(9)], []])
def test_partitions_of_another_size(tmp_path: Path, short: list[torch.Tensor]) -> None:
    root = write_joined(tmp_path, 1)
    path = root / "global_step2" / OPTIM.format(0)
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
def test_other_splits_are_refused(tmp_path: Path, extra: str, message: str) -> None:
    root = write_joined(tmp_path, 2)
    (root / "global_step2" / extra).touch()
    with pytest.raises(SourceError, match=message) as caught:
        open_deepspeed(str(root))
    assert any(extra in problem for problem in caught.value.problems)


def test_universal_files_are_all_needed(tmp_path: Path) -> None:
    root = write_universal(tmp_path / "run", 2)
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
def test_names_do_not_lead_out_of_a_universal_checkpoint(tmp_path: Path, name: str) -> None:
    root = write_universal(tmp_path / "run", 2)
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
    assert contents(open_deepspeed(str(home / "ckpt"))) == expected(
        load_file(home / "truth/fp32_master.safetensors")
    )
