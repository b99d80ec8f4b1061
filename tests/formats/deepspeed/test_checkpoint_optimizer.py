"""The optimizer's state of DeepSpeed's layouts: each parameter's moments, step and settings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core.catalog import subset
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.contract.optimizer import OptimizerState, UnusableOptimizer
from shardkit.formats.deepspeed.checkpoint import open_deepspeed
from shardkit.operations.reshard import reshard
from tests.formats.dcp.samples import open_catalog
from tests.formats.deepspeed.samples import (
    GROUPS,
    OPTIM,
    Tensors,
    ZeroStageEnum,
    change,
    deepspeed_classes,
    parameters,
    part_of,
    truth,
    write_joined,
    write_partitioned,
    write_universal,
)
from tests.formats.reading import Contents, contents, expected, held, objects_of, tensors_of

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
SETTINGS |= {"maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
SETTINGS |= {"decoupled_weight_decay": True}


def moments() -> dict[str, Tensors]:
    return {
        name: {"exp_avg": value + 10, "exp_avg_sq": (value * value).bfloat16()}
        for name, value in parameters().items()
    }


def groups(first: int = 0) -> list[dict[str, Any]]:
    """As the inner optimizer's state dict has them: their parameters are flat tensors."""
    return [{**SETTINGS, "lr": 10.0**-number, "params": [first + number]} for number in range(len(GROUPS))]


def flat_moments(leaf: str, group: tuple[str, ...]) -> torch.Tensor:
    return torch.cat([moments()[name][leaf].flatten() for name in group])


def joined(root: Path, num_ranks: int, *, elastic: bool = False) -> Path:
    """ZeRO-2: moments are cut like the masters; what is not elastic keeps the padding that masters lose."""
    write_joined(root, num_ranks)
    parts: list[dict[str, list[torch.Tensor]]] = []
    for group in GROUPS:
        found = {}
        for leaf in ("exp_avg", "exp_avg_sq"):
            flat = flat_moments(leaf, group)
            padding = -len(flat) % (2 * num_ranks)
            cut = list(torch.cat([flat, torch.full((padding,), 77.0).to(flat.dtype)]).chunk(num_ranks))
            if elastic:
                cut[-1] = cut[-1][: len(cut[-1]) - padding]
            found[leaf] = [part.clone() for part in cut]
        parts.append(found)
    for rank in range(num_ranks):
        states = [{leaf: cut[rank] for leaf, cut in found.items()} for found in parts]
        counted = {number: {**state, "step": torch.tensor(5.0)} for number, state in enumerate(states)}
        base: Any = states if elastic else {"state": counted, "param_groups": groups()}
        more = {"base_optimizer_state_step": 5} if elastic else {}
        change(
            root / "global_step2" / OPTIM.format(rank),
            lambda state, base=base, more=more: state["optimizer_state_dict"].update(
                base_optimizer_state=base, **more
            ),
        )
    return root


def partitioned(root: Path, num_ranks: int) -> Path:
    """ZeRO-3."""
    write_partitioned(root, num_ranks)
    for rank in range(num_ranks):
        states = {
            number: {
                "step": torch.tensor(5.0),
                **{
                    leaf: torch.cat([part_of(moments()[name][leaf], num_ranks, rank) for name in group])
                    for leaf in ("exp_avg", "exp_avg_sq")
                },
            }
            for number, group in enumerate(GROUPS)
        }
        inner = {"state": states, "param_groups": groups()}
        change(
            root / "global_step2" / OPTIM.format(rank),
            lambda state, inner=inner: state["optimizer_state_dict"].update(optimizer_state_dict=inner),
        )
    return root


@deepspeed_classes()
def universal(root: Path, stage: int) -> Path:
    """From ZeRO-3, the steps are in `optimizer_state.pt` alone."""
    write_universal(root, stage)
    zero = root / "global_step2_universal/zero"
    for name, leaves in moments().items():
        for leaf, value in leaves.items():
            content = value.flatten() if stage == 3 else {"param": value}
            torch.save(content, zero / name / f"{leaf}.pt")
        if stage != 3:
            torch.save(torch.tensor(5.0), zero / name / "step.pt")
    states = {number: {"step": torch.tensor(5.0)} for number in range(len(GROUPS))}
    settings = {"param_groups": groups(), "zero_stage": ZeroStageEnum(stage)}
    if stage == 3:
        settings["optimizer_state_dict"] = {"state": states, "param_groups": groups()}
    torch.save(settings, zero / "optimizer_state.pt")
    return root


def opened(root: Path) -> OptimizerState:
    checkpoint = open_deepspeed(str(root))
    assert checkpoint.contents.optimizer is not None
    state = checkpoint.contents.optimizer()
    assert isinstance(state, OptimizerState), state.reason
    return state


def expected_state(step: float = 5.0) -> Contents:
    found = {f"state.{name}.step": torch.tensor(step) for name in parameters()}
    for name, leaves in moments().items():
        found |= {f"state.{name}.{leaf}": value for leaf, value in leaves.items()}
    return expected(found)


def expected_settings() -> dict[str, Any]:
    return {
        f"param_groups.{number}.{key}": list(GROUPS[number]) if key == "params" else value
        for number, group in enumerate(groups())
        for key, value in group.items()
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
@pytest.mark.parametrize("write", [joined, partitioned])
def test_moments_are_cut_like_the_masters(tmp_path: Path, write: Callable[..., Path], num_ranks: int) -> None:
    state = opened(write(tmp_path, num_ranks))
    assert tensors_of(state) == expected_state()
    assert objects_of(state) == expected_settings()
    assert state.catalog.paths is not None
    assert state.catalog.paths["state.up.bias.step"] == ("state", "up.bias", "step")
    assert state.catalog.paths["param_groups.1.lr"] == ("param_groups", 1, "lr")
    assert state.notes == ()


@pytest.mark.parametrize("stage", [2, 3])
def test_universal(tmp_path: Path, stage: int) -> None:
    state = opened(universal(tmp_path / "run", stage))
    assert tensors_of(state) == expected_state()
    assert objects_of(state) == expected_settings()


def test_universal_with_padding_of_ranks_without_elements(tmp_path: Path) -> None:
    """Older versions of ds_to_universal.py cut a rank's part to `abs(size - rank * part)` elements."""
    root, num_ranks = partitioned(tmp_path / "of-ranks", 8), 8
    universal(tmp_path / "run", 3)
    tag = tmp_path / "run/global_step2_universal"
    for path in tag.glob("*_model_states.pt"):
        path.unlink()
    for path in (root / "global_step2").glob("*_model_states.pt"):
        shutil.copy(path, tag)
    lengths = set[tuple[int, int]]()
    for name, leaves in moments().items():
        for leaf, value in {"fp32": parameters()[name], **leaves}.items():
            size = part_of(value, num_ranks, 0).numel()
            kept = [min(size, abs(value.numel() - rank * size)) for rank in range(num_ranks)]
            parts = [part_of(value, num_ranks, rank)[:length] for rank, length in enumerate(kept)]
            torch.save(torch.cat(parts), tag / "zero" / name / f"{leaf}.pt")
            lengths.add((value.numel(), sum(kept)))
    assert {(1, 7), (3, 7), (5, 7)} < lengths
    assert contents(open_deepspeed(str(tmp_path / "run"))) == expected(truth())
    assert tensors_of(opened(tmp_path / "run")) == expected_state()


@pytest.mark.parametrize("write", [joined, partitioned])
def test_all_rows_are_sharded_again(tmp_path: Path, write: Callable[..., Path]) -> None:
    """However the flat partitions happened to cut a parameter, or not."""
    reshard(write(tmp_path / "run", 2), tmp_path / "out", world_size=2)
    catalog = open_catalog(str(tmp_path / "out"), records=True)
    for name, entry in catalog.tensors.items():
        is_cut = entry.dtype.is_floating and entry.shape and entry.num_elements
        assert entry.num_chunks == (2 if is_cut else 1), name
    for name, leaves in moments().items():
        for leaf, value in leaves.items():
            name_there = f"optim.state.{name}.{leaf}"
            assert held(subset(catalog, [name_there])) == expected({name_there: value})


def test_elastic_states_have_no_settings(tmp_path: Path) -> None:
    state = opened(joined(tmp_path, 2, elastic=True))
    assert tensors_of(state) == expected_state()
    assert state.objects == ()
    assert any("settings" in note for note in state.notes)


def test_steps_that_groups_count(tmp_path: Path) -> None:
    """DeepSpeed's own Adam: no step in the states, and other settings than torch's."""
    root = joined(tmp_path, 2)

    def count_by_group(state: dict[str, Any]) -> None:
        base = state["optimizer_state_dict"]["base_optimizer_state"]
        for leaves in base["state"].values():
            del leaves["step"]
        for group in base["param_groups"]:
            del group["foreach"], group["fused"]
            group.update(step=7, bias_correction=True)

    for rank in range(2):
        change(root / "global_step2" / OPTIM.format(rank), count_by_group)
    state = opened(root)
    assert tensors_of(state) == expected_state(7.0)
    assert "param_groups.0.step" not in state.objects
    assert objects_of(state)["param_groups.0.bias_correction"] is True
    (note,) = state.notes
    assert "do not have foreach, fused" in note
    assert "allow_partial_load=True" in note


def test_a_count_that_no_tensor_can_hold_is_left_out(tmp_path: Path) -> None:
    root = joined(tmp_path, 1)

    def count_far(state: dict[str, Any]) -> None:
        for leaves in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            leaves["step"] = 1e300

    change(root / "global_step2" / OPTIM.format(0), count_far)
    state = opened(root)
    assert not any(name.endswith(".step") for name in state.catalog.tensors)
    assert any("are left out" in note and "embed.weight.step" in note for note in state.notes)


def test_one_group_of_all_parameters(tmp_path: Path) -> None:
    """ZeRO-3 cuts a group into sub-groups, each a flat tensor."""
    root = partitioned(tmp_path, 2)

    def join(state: dict[str, Any]) -> None:
        inner = state["optimizer_state_dict"]["optimizer_state_dict"]
        inner["param_groups"] = [{**SETTINGS, "params": [0, 1]}]

    for rank in range(2):
        change(root / "global_step2" / OPTIM.format(rank), join)
    assert objects_of(opened(root))["param_groups.0.params"] == [name for group in GROUPS for name in group]


def set_steps(state: dict[str, Any]) -> None:
    base = state["optimizer_state_dict"]
    base = base.get("base_optimizer_state") or base["optimizer_state_dict"]
    for leaves in base["state"].values():
        leaves["step"] += 1


def set_rate(state: dict[str, Any]) -> None:
    base = state["optimizer_state_dict"]
    base = base.get("base_optimizer_state") or base["optimizer_state_dict"]
    base["param_groups"][1]["lr"] = 0.125


@pytest.mark.parametrize(
    ("edit", "reason"),
    [(set_steps, "saved at another step than"), (set_rate, "lr of group 1")],
)
@pytest.mark.parametrize("write", [joined, partitioned])
def test_files_of_two_saves_are_refused(
    tmp_path: Path,
    write: Callable[..., Path],
    edit: Callable[[dict[str, Any]], None],
    reason: str,
) -> None:
    root = write(tmp_path, 3)
    change(root / "global_step2" / OPTIM.format(2), edit)
    with pytest.raises(IntegrityError) as caught:  # of steps, the weights tell too
        opened(root)
    (problem,) = caught.value.problems
    assert OPTIM.format(2) in problem
    assert reason in problem


def set_groups(state: dict[str, Any], params: list[Any]) -> None:
    inner = state["optimizer_state_dict"]["optimizer_state_dict"]
    inner["param_groups"] = [{**SETTINGS, "params": numbers} for numbers in params]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda state: set_groups(state, [[0], [0]]), "nothing shows"),
        (lambda state: set_groups(state, [[], []]), "nothing shows"),
        (lambda state: set_groups(state, [[0], ["1"]]), "nothing shows"),
        (lambda state: set_groups(state, [[0], 1]), "nothing shows"),
        (lambda state: state["optimizer_state_dict"].pop("optimizer_state_dict"), "never took a step"),
        (lambda state: state["optimizer_state_dict"]["optimizer_state_dict"]["state"].pop(1), "no state"),
        (
            lambda state: state["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].update(
                exp_avg=torch.zeros(3)
            ),
            "has 3 elements for",
        ),
        (
            lambda state: state["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].update(
                exp_avg=torch.zeros(3, 30)
            ),
            "no flat tensor",
        ),
        (
            lambda state: state["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].update(note="x"),
            "no flat tensor",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_told(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    root = partitioned(tmp_path, 2)
    change(root / "global_step2" / OPTIM.format(0), edit)
    checkpoint = open_deepspeed(str(root))
    assert checkpoint.contents.optimizer is not None
    state = checkpoint.contents.optimizer()
    assert isinstance(state, UnusableOptimizer)
    assert reason in state.reason
    assert list(state.names) == [f"global_step2/{OPTIM.format(rank)}" for rank in range(2)]


def test_every_missing_file_of_a_universal_checkpoint_is_listed(tmp_path: Path) -> None:
    zero = universal(tmp_path / "run", 2) / "global_step2_universal/zero"
    gone = [zero / "up.bias/exp_avg.pt", zero / "scale/step.pt"]
    for path in gone:
        path.unlink()
    checkpoint = open_deepspeed(str(tmp_path / "run"))
    assert checkpoint.contents.optimizer is not None
    with pytest.raises(SourceError, match="some parameters is missing") as caught:
        checkpoint.contents.optimizer()
    assert sorted(caught.value.problems) == sorted(
        f"global_step2_universal/zero/{path.parent.name}/{path.name}" for path in gone
    )


def test_a_universal_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    zero = universal(tmp_path / "run", 2) / "global_step2_universal/zero"
    for path in [*zero.glob("*/exp_avg*.pt"), *zero.glob("*/step.pt")]:
        path.unlink()
    checkpoint = open_deepspeed(str(tmp_path / "run"))
    assert checkpoint.contents.optimizer is not None
    assert isinstance(checkpoint.contents.optimizer(), UnusableOptimizer)
