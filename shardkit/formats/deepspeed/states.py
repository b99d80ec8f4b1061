"""What the files of DeepSpeed say: trees from torch's pickles, checked and put into records.

Source: DeepSpeed 0.19, runtime/engine.py (`_common_checkpoint_state`), runtime/zero/stage_1_and_2.py and
stage3.py (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.optimizer import STATE, STEP, count_of
from shardkit.formats.rankfiles.flat import without_tree
from shardkit.formats.torchsave.file import Opaque, TensorRef, TorchFile

_MAX_RANKS = 1 << 17
_NOT_DEEPSPEED = "it was not written by DeepSpeed, or by a version that is not known: please report it"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """One `*_model_states.pt`."""

    file: TorchFile
    module: Mapping[str, object]
    """The module's state dict; with ZeRO-3 its partitioned parameters are empty tensors."""
    buffers: frozenset[str]
    groups: Sequence[Mapping[str, Shape]] | None
    """The shapes of the optimizer's parameters, by group and in the order of the flat tensors. None without ZeRO."""
    frozen: Mapping[str, Shape]
    """Parameters that the optimizer does not have."""
    fragments: Mapping[str, TensorRef]
    """Frozen parameters: with ZeRO-3 the rank's flat part, otherwise all of it."""
    shared: Mapping[str, str]
    """By the name of a parameter that is stored under another: that other."""
    num_ranks: int | None
    step: int | None
    is_lightning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """One `*_optim_states.pt`."""

    file: TorchFile
    stage: int
    """1 to 3."""
    num_ranks: int | None
    flat: Sequence[TensorRef]
    """The rank's part of each group's flat fp32 tensor."""
    paddings: Sequence[Sequence[int]] | None
    """ZeRO-1 and 2: for each group, elements after each parameter."""
    steps: Mapping[object, object]
    """What each flat tensor's count of steps is, to be compared; none where it has none."""


def read_model_states(file: TorchFile, *, first: ModelStates | None = None) -> ModelStates:
    """Return what a model file says.

    Args:
        first: that of rank 0, if this is another rank's: what is the same is not kept twice, and of the
            module, which rank 0 has too, nothing.

    Raises:
        SourceError: it is not one, or was saved in a way that ZeRO's rules do not cover.
    """
    tree = _tree(file)
    if "module" not in tree:
        raise _refusal(file, "it has no entry 'module'")
    if tree.get("ds_autoep_layers") or tree.get("autoep_layers"):
        raise SourceError(
            f"{escape(file.name)}: its experts are partitioned over groups of their own (AutoEP)",
            hint="convert it with DeepSpeed's ds_to_universal.py",
        )
    module = _strings(tree["module"]) if first is None else {}
    shapes = tree.get("param_shapes")
    groups = None if shapes is None else [_shapes(file, group) for group in _list(shapes)]
    frozen = _shapes(file, tree.get("frozen_param_shapes") or {})
    fragments = {
        name: value
        for name, value in _strings(tree.get("frozen_param_fragments")).items()
        if isinstance(value, TensorRef)
    }
    shared = _strings(tree.get("shared_params"))
    buffers = tree.get("buffer_names")
    stored = (value for value in (*module.values(), *fragments.values()) if isinstance(value, TensorRef))
    return ModelStates(
        file=without_tree(file, stored),
        module=module,
        buffers=frozenset(map(str, buffers)) if first is None and isinstance(buffers, list) else frozenset(),
        groups=groups if first is None or groups != first.groups else first.groups,
        frozen=frozen if first is None or frozen != first.frozen else first.frozen,
        fragments=fragments,
        shared={name: value for name, value in shared.items() if isinstance(value, str)},
        num_ranks=_count(tree.get("dp_world_size")),
        step=_count(tree.get("global_steps")),
        is_lightning="pytorch-lightning_version" in tree,
    )


def read_optimizer_states(file: TorchFile) -> OptimizerStates:
    """Return what an optimizer file says.

    Raises:
        SourceError: it is not one of ZeRO, or its partitions are not flat tensors.
    """
    state = _tree(file).get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise _refusal(file, "it has no entry 'optimizer_state_dict'")
    is_partitioned = "fp32_flat_groups" in state
    flat = state.get("fp32_flat_groups" if is_partitioned else "single_partition_of_fp32_groups")
    if not isinstance(flat, list) or not flat:
        raise _refusal(file, "it has no fp32 partitions")
    refs = [ref for ref in flat if isinstance(ref, TensorRef) and len(ref.shape) == 1 and ref.is_contiguous]
    if len(refs) != len(flat):
        raise _refusal(
            file, f"{len(flat) - len(refs)} of its {len(flat)} fp32 partitions are not flat tensors"
        )
    counts = [count for count in map(_count, _list(state.get("partition_count"))) if count]
    if counts and max(counts) > _MAX_RANKS:
        raise _refusal(file, f"it is one of {max(counts)} partitions")
    if len(set(counts)) > 1 or _other_groups(state, counts):
        raise SourceError(
            f"{escape(file.name)}: its groups are partitioned over different numbers of ranks (experts)",
            hint="convert it with DeepSpeed's ds_to_universal.py",
        )
    paddings = state.get("param_alignment_paddings")
    return OptimizerStates(
        file=without_tree(file, refs),
        stage=3 if is_partitioned else _stage(state),
        num_ranks=counts[0] if counts else None,
        flat=refs,
        paddings=None if paddings is None else [_ints(file, group) for group in _list(paddings)],
        steps=_steps(state),
    )


def _steps(state: Mapping[str, Any]) -> dict[object, object]:
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    states = base.get(STATE) if isinstance(base, dict) else None
    found = {None: count_of(state.get("base_optimizer_state_step"))}  # beside "elastic" states
    for number, leaves in states.items() if isinstance(states, dict) else ():
        found[number] = count_of(leaves.get(STEP)) if isinstance(leaves, dict) else None
    return {number: step for number, step in found.items() if step is not None}


def _stage(state: Mapping[str, Any]) -> int:
    """Return 1 or 2, which differ in nothing that is saved; the optimizer of bf16 does not say."""
    stage = state.get("zero_stage")
    return 2 if (stage.value if isinstance(stage, Opaque) else stage) == 2 else 1


def _other_groups(state: Mapping[str, Any], counts: Sequence[int]) -> bool:
    """True where a group of ZeRO-3 has ranks of its own."""
    groups = state.get("ds_zero_partition_groups")
    return isinstance(groups, list) and any(
        isinstance(group, dict) and group.get("partition_count") not in (None, *counts) for group in groups
    )


def _tree(file: TorchFile) -> Mapping[str, Any]:
    if not isinstance(file.tree, dict):
        raise _refusal(file, "it is not a dict")
    return _strings(file.tree)


def _refusal(file: TorchFile, reason: str) -> SourceError:
    return SourceError(f"{escape(file.name)} is not a file of DeepSpeed: {reason}", hint=_NOT_DEEPSPEED)


def _strings(value: object) -> dict[str, Any]:
    """Return the entries of a dict whose keys are strings; none of anything else."""
    return {key: item for key, item in value.items() if type(key) is str} if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    """Return a list as it is, and anything else as the list of it."""
    return value if isinstance(value, list) else [value]


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _shapes(file: TorchFile, value: object) -> dict[str, Shape]:
    if not isinstance(value, dict):
        raise _refusal(file, "its shapes are not a dict")
    return {str(name): tuple(_ints(file, shape)) for name, shape in value.items()}


def _ints(file: TorchFile, value: object) -> Sequence[int]:
    if not isinstance(value, (tuple, list)) or any(type(size) is not int or size < 0 for size in value):
        raise _refusal(file, "a shape or padding that is not made of sizes")
    return value
