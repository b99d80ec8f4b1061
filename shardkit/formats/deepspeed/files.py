"""The files of a DeepSpeed checkpoint: find them, check that all are there, and read them into records.

A tag is one saved state, a directory such as `global_step20`.

    RUN/latest                                         the name of the last tag
    RUN/global_step20/
        mp_rank_00_model_states.pt                     ZeRO-0, 1 and 2: the module, whole
        zero_pp_rank_R_mp_rank_00_model_states.pt      ZeRO-3: shapes, buffers, frozen parameters' parts
        layer_L_expert_E_mp_rank_00_model_states.pt    the experts of MoE layers, see `experts`
        [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
        zero/PARAMETER/fp32.pt                         only in universal checkpoints

An optimizer file has the rank's parts of the fp32 masters, and the state of the inner optimizer (such as Adam):

    optimizer_state_dict
        base_optimizer_state     ZeRO-1 and 2, bf16: the state dict of the inner optimizer, or a list of states
        optimizer_state_dict     ZeRO-3: the same
            state                for each flat tensor: exp_avg, exp_avg_sq, of the same length; step
            param_groups         settings, whose `params` are numbers of flat tensors

Source: DeepSpeed 0.19, runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`,
`_common_checkpoint_state`), runtime/zero/stage_1_and_2.py, stage3.py and runtime/bf16_optimizer.py
(`state_dict`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import ShardkitError, SourceError
from shardkit.files import storage
from shardkit.files.links import read_inside
from shardkit.formats.contract import DamagedFiles, folder_below, listing
from shardkit.formats.contract.optimizer import GROUPS, STATE, STEP, count_of, read_groups
from shardkit.formats.rankfiles.files import open_each
from shardkit.formats.rankfiles.flat import RankStateDict, without_tree
from shardkit.formats.torchsave.file import TensorRef, TorchFile
from shardkit.pickles.policies import UnmadeObject

_MODEL = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{2,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:(?:bf16|fp16)_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt")
_PIPELINE = re.compile(r"layer_[0-9]+-model_(.*-model_)?states\.pt")
_EXPERT = re.compile(r"(?:layer_([0-9]{1,6})_)?expert_([0-9]{1,6})_mp_rank_([0-9]{2,6})_model_states\.pt")
_TRACKERS = ("latest", "latest_universal")
_MAX_TRACKER = 4096
_MAX_RANKS = 1 << 17
_MAX_EXPERTS = 1 << 20  # of all layers
_AUTOEP, _PER_EXPERT = ("w1", "w2", "w3"), "per_expert_files"
_DATA_FIRST = "use_data_before_expert_parallelism"
_UNIVERSAL = "convert it with DeepSpeed's ds_to_universal.py, and give the directory that this makes"
_BY_ITSELF = "load it in the training script and save it whole: ds_to_universal.py does not convert experts"
_NOT_DEEPSPEED = "it was not written by DeepSpeed, or by an unknown version: please report it"

T = TypeVar("T")


class Tag(NamedTuple):
    """One saved state."""

    directory: str
    prefix: str
    """Put before a file's name in messages: the tag and a slash, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFiles:
    """The names of the files in a tag's directory, by their kinds."""

    whole: str | None
    """The file with the whole module."""
    models: dict[int, str]
    """The model files of ZeRO-3, by rank."""
    optimizers: dict[int, str]
    """The optimizer files, by rank."""
    experts: dict[tuple[int, int], str]
    """The experts' files, by MoE layer and expert; the layer is -1 if a file is for all layers."""
    is_universal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """The content of one `*_model_states.pt`."""

    file: TorchFile
    module: Mapping[str, object]
    """The module's state dict; with ZeRO-3 its partitioned parameters are empty tensors."""
    buffers: frozenset[str]
    groups: Sequence[Mapping[str, Shape]] | None
    """The shapes of the optimizer's parameters, by group and in the order of the flat tensors. None without ZeRO."""
    frozen: Mapping[str, Shape]
    """Shapes of the parameters that the optimizer does not train."""
    leaves_frozen_out: bool
    """With ZeRO-2 and 3: saved with `exclude_frozen_parameters=True`."""
    fragments: Mapping[str, TensorRef]
    """Frozen parameters: with ZeRO-3 the rank's flat part, otherwise the whole parameter."""
    shared: Mapping[str, str]
    """For each parameter that is stored under another name, that name."""
    num_ranks: int | None
    step: int | None
    is_lightning: bool
    num_experts: Sequence[int]
    """Number of experts in each MoE layer."""
    is_data_first: bool
    """True if ranks with the same experts have consecutive numbers."""
    stacked: Mapping[str, int]
    """Parameters in which AutoEP stacks experts, with the number of experts in the whole model."""
    has_own_places: bool
    """True if AutoEP's own rules decide which rank has which expert; shardkit does not know them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStates:
    """The content of one expert's file."""

    file: TorchFile
    tensors: Mapping[str, TensorRef]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """The content of one `*_optim_states.pt`."""

    file: TorchFile
    stage: int
    """1 to 3."""
    counts: Sequence[int]
    """For each group, the number of ranks over which it is cut; smaller for experts. Empty if not recorded."""
    flat: Sequence[TensorRef]
    """The rank's part of each group's flat fp32 tensor."""
    paddings: Sequence[Sequence[int]] | None
    """ZeRO-1 and 2: for each group, the number of padding elements after each parameter."""
    steps: Mapping[object, object]
    """The step count of each flat tensor that has one, in the form of `count_of`."""
    inner: RankStateDict
    """The inner optimizer's state dict, whose parameters are numbers of flat tensors."""

    def ep_size_of(self, group: int, num_ranks: int) -> int:
        """Return the number of expert-parallel ranks among which a group is divided; 1 for ordinary parameters."""
        return num_ranks // self.counts[group] if group < len(self.counts) else 1


def find_tag(path: str) -> Tag | None:
    """Return the saved state in a directory, or the one that its tracker file names, or None.

    If the state in `latest` is gone, the one in `latest_universal` is used only if it was converted from the same state,
    as any other is older.
    """
    if not storage.isdir(path):
        return None
    if _has_states(path):
        return Tag(path, "")
    gone: str | None = None
    for tracker in _TRACKERS:
        try:
            data = read_inside(path, tracker, _MAX_TRACKER)
        except ShardkitError:  # no such file, or something else of that name
            continue
        tag = data.decode("utf-8", "replace").strip()
        if not tag or os.path.basename(tag) != tag or tag in (os.curdir, os.pardir) or "\0" in tag:
            continue
        directory = folder_below(path, tag)
        if directory is not None and _has_states(directory) and (gone is None or _belongs_to(tag, gone)):
            return Tag(directory, f"{tag}/")
        gone = tag
    return None


def _belongs_to(name: str, tag: str) -> bool:
    """True if a name is a tag with an ending: `global_step10_universal` belongs to `global_step10`, not to `global_step1`."""
    return name.startswith(tag) and not name[len(tag) :][:1].isdigit()


def _has_states(path: str) -> bool:
    return any(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) for name in listing(path))


def list_state_files(tag: Tag) -> StateFiles:
    """Return the files of a tag, by their kinds.

    Raises:
        SourceError: the model was split by tensor or pipeline parallelism, or files of two saves are mixed.
    """
    names = sorted(listing(tag.directory))
    is_universal = folder_below(tag.directory, "zero") is not None
    whole: str | None = None
    models: dict[int, str] = {}
    optimizers: dict[int, list[str]] = {}
    experts: dict[tuple[int, int], str] = {}
    split: list[str] = []
    for name in names:
        model, optimizer = _MODEL.fullmatch(name), _OPTIMIZER.fullmatch(name)
        if expert := _EXPERT.fullmatch(name):
            experts[int(expert[1] or -1), int(expert[2])] = name
            split += [name] if int(expert[3]) else []
        match = model or optimizer
        if match and int(match[2]):
            split.append(name)
        elif model and model[1] is None:
            whole = name
        elif model:
            models[int(model[1])] = name
        elif optimizer:
            optimizers.setdefault(int(optimizer[1]), []).append(name)
    if not is_universal:
        _refuse_splits(tag, names, split, _BY_ITSELF if experts else _UNIVERSAL)
    twice = [escape(tag.prefix + name) for same in optimizers.values() if len(same) > 1 for name in same]
    SourceError.raise_for(
        twice,
        f"{escape(tag.directory)} holds the optimizer files of two saves",
        hint="move those of one save out of the directory",
    )
    return StateFiles(
        whole=whole,
        models=models,
        optimizers={rank: match[0] for rank, match in optimizers.items()},
        experts=experts,
        is_universal=is_universal,
    )


def _refuse_splits(tag: Tag, names: Sequence[str], split: Sequence[str], hint: str) -> None:
    for what, files in (
        ("was trained with tensor parallelism: its matrices are cut, and the files do not record how", split),
        (
            "was trained as a pipeline: its layers are in files of their own",
            filter(_PIPELINE.fullmatch, names),
        ),
    ):
        problems = [escape(tag.prefix + name) for name in files]
        SourceError.raise_for(problems, f"{escape(tag.directory)} {what}", hint=hint)


def require_files(tag: Tag, files: StateFiles, num_ranks: int, *, with_models: bool) -> None:
    """Check that the files of all ranks exist.

    Raises:
        SourceError: lists all missing files.
    """
    sample = min(files.optimizers.values(), default="zero_pp_rank_0_mp_rank_00_optim_states.pt")
    file_sets = [(files.optimizers, sample)]
    if with_models:
        file_sets.append((files.models, "zero_pp_rank_0_mp_rank_00_model_states.pt"))
    missing = [
        tag.prefix + re.sub(r"pp_rank_[0-9]+", f"pp_rank_{rank}", name)
        for present, name in file_sets
        for rank in range(num_ranks)
        if rank not in present
    ]
    if missing:
        raise DamagedFiles(
            f"{len(missing)} of {num_ranks * len(file_sets)} rank files are missing: "
            f"it was saved by {num_ranks} ranks",
            dict.fromkeys(missing, ""),
            hint="copy the files of all ranks; each node may have kept its own",
        )


def open_states(tag: Tag, names: Sequence[str], read: Callable[[TorchFile], T]) -> list[T]:
    """Open some of a tag's files, and return the result of `read` for each.

    Raises:
        SourceError, IntegrityError, ResourceError: as `open_each`.
    """
    return list(open_each(tag.directory, names, read, tag.prefix))


def read_model_states(file: TorchFile, *, first: ModelStates | None = None) -> ModelStates:
    """Return the content of a model file.

    Args:
        file: opened.
        first: rank 0's content, if this is the file of another rank. Equal parts are then shared with it to save memory,
            and of the module only buffers are kept.

    Raises:
        SourceError: it is not a model file, or was saved in a way that ZeRO's rules do not cover.
    """
    tree = _tree(file)
    if "module" not in tree:
        raise _refusal(file, "it has no entry 'module'")
    module = _string_items(tree["module"])
    if first is not None:
        module = {name: module[name] for name in first.buffers if name in module}
    shapes = tree.get("param_shapes")
    groups = None if shapes is None else [_shapes(file, group) for group in _as_list(shapes)]
    layers = _as_list(tree.get("ds_autoep_layers") or tree.get("autoep_layers") or [])
    stacked = _stacked_experts(layers)
    num_experts = [count for count in map(_as_count, _as_list(tree.get("num_experts"))) if count]
    if max(sum(num_experts), sum(stacked.values())) > _MAX_EXPERTS:
        raise _refusal(file, "it has more experts than any model")
    frozen = _shapes(file, tree.get("frozen_param_shapes") or {})
    frozen = {name: shape for name, shape in frozen.items() if name not in stacked}
    fragments = {
        name: value
        for name, value in _string_items(tree.get("frozen_param_fragments")).items()
        if isinstance(value, TensorRef)
    }
    shared = {**_aliases(layers, module), **_string_items(tree.get("shared_params"))}
    buffers = tree.get("buffer_names")
    return ModelStates(
        file=without_tree(file, (*module.values(), *fragments.values())),
        module=module,
        buffers=frozenset(map(str, buffers)) if first is None and isinstance(buffers, list) else frozenset(),
        groups=groups if first is None or groups != first.groups else first.groups,
        leaves_frozen_out="frozen_param_shapes" in tree and tree["frozen_param_shapes"] is None,
        frozen=frozen if first is None or frozen != first.frozen else first.frozen,
        fragments=fragments,
        shared={name: value for name, value in shared.items() if isinstance(value, str)},
        num_ranks=_as_count(tree.get("dp_world_size")),
        step=_as_count(tree.get("global_steps")),
        is_lightning="pytorch-lightning_version" in tree,
        num_experts=num_experts,
        is_data_first=_string_items(tree.get("ds_config")).get(_DATA_FIRST) is True,
        stacked=stacked,
        has_own_places=not all(map(_is_in_order, layers)),
    )


def _stacked_experts(layers: Sequence[object]) -> dict[str, int]:
    """Return the parameters in which AutoEP stacks a layer's experts, with the number of experts."""
    num_experts: dict[str, int] = {}
    for layer in map(_string_items, layers):
        prefix, number = layer.get("expert_key_prefix"), _as_count(layer.get("num_experts"))
        if isinstance(prefix, str) and number:
            num_experts |= {f"{prefix}.{name}": number for name in _AUTOEP}
    return num_experts


def _aliases(layers: Sequence[object], module: Mapping[str, object]) -> dict[str, str]:
    """Return the second name of each of AutoEP's routers -> the first: `gate.gate.weight` -> `router.gate.weight`."""
    aliases: dict[str, str] = {}
    for path in (_string_items(layer).get("module_path") for layer in layers):
        for name in module:
            child, _, rest = name.removeprefix(f"{path}.").partition(".")
            first = f"{path}.router.{rest}"
            if name.startswith(f"{path}.") and child not in ("router", "shared_experts") and first in module:
                aliases[name] = first
    return aliases


def _is_in_order(layer: object) -> bool:
    """True if AutoEP wrote a file for each expert of a layer, and the ranks have the experts in order."""
    entries = _string_items(layer)
    ranks = _as_list(_string_items(entries.get("expert_placement")).get("ranks", []))
    experts = [expert for rank in ranks for expert in _as_list(_string_items(rank).get("experts"))]
    in_order = not ranks or (experts, len(experts)) == (list(range(len(experts))), entries.get("num_experts"))
    return in_order and entries.get("checkpoint_format", _PER_EXPERT) == _PER_EXPERT


def read_expert_states(file: TorchFile) -> ExpertStates:
    """Return the content of an expert's file.

    Raises:
        SourceError: it is not an expert's file.
    """
    tensors = {name: value for name, value in _tree(file).items() if isinstance(value, TensorRef)}
    if not tensors or len(tensors) != len(_tree(file)):
        raise _refusal(file, "it does not hold the tensors of an expert")
    return ExpertStates(file=without_tree(file, tensors.values()), tensors=tensors)


def read_optimizer_states(file: TorchFile) -> OptimizerStates:
    """Return the content of an optimizer file.

    Raises:
        SourceError: it is not an optimizer file of ZeRO, its partitions are not flat tensors, or it has more settings
            than any optimizer.
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
    counts = [count for count in map(_as_count, _as_list(state.get("partition_count"))) if count]
    if counts and max(counts) > _MAX_RANKS:
        raise _refusal(file, f"it is one of {max(counts)} partitions")
    if is_partitioned and (len(set(counts)) > 1 or _other_groups(state, counts)):
        raise SourceError(
            f"{escape(file.name)}: its groups are partitioned over different numbers of ranks (experts)",
            hint="convert it with DeepSpeed's ds_to_universal.py",
        )
    paddings = state.get("param_alignment_paddings")
    steps = {number: count_of(leaves.get(STEP)) for number, leaves in _inner_leaves(state).items()}
    return OptimizerStates(
        file=without_tree(file, refs),
        stage=3 if is_partitioned else _stage(state),
        counts=counts,
        flat=refs,
        paddings=None if paddings is None else [_as_sizes(file, group) for group in _as_list(paddings)],
        steps={number: step for number, step in steps.items() if step is not None},
        inner=_inner_state(file, state, len(refs)),
    )


def _inner_state(file: TorchFile, state: Mapping[str, Any], num_flat: int) -> RankStateDict:
    """Return the inner optimizer's state dict, with an entry for each of `num_flat` flat tensors."""
    base, states = _inner_optimizer(state), _inner_leaves(state)
    groups = read_groups(file.name, base.get(GROUPS)) if isinstance(base, dict) else None
    return RankStateDict(file, {n: states.get(n, {}) for n in range(num_flat)}, groups).without_tree()


def _inner_optimizer(state: Mapping[str, Any]) -> object:
    return state.get("base_optimizer_state", state.get("optimizer_state_dict"))


def _inner_leaves(state: Mapping[str, Any]) -> dict[object, dict[str, object]]:
    """Return the leaves of each flat tensor, by number."""
    base, step = _inner_optimizer(state), None
    states = base.get(STATE) if isinstance(base, dict) else None
    if isinstance(base, list):  # "elastic": states of flat tensors without settings, and one step count
        states, step = dict(enumerate(base)), state.get("base_optimizer_state_step")
    shared = {STEP: step} if type(step) is int or isinstance(step, TensorRef) else {}
    return {
        number: {**shared, **{str(leaf): value for leaf, value in leaves.items()}}
        for number, leaves in (states.items() if isinstance(states, dict) else ())
        if isinstance(leaves, dict)
    }


def _stage(state: Mapping[str, Any]) -> int:
    """Return the stage, 1 or 2; 1 if not recorded, as by bf16's optimizer. The two are saved in the same way."""
    stage = state.get("zero_stage")
    return 2 if (stage.value if isinstance(stage, UnmadeObject) else stage) == 2 else 1


def _other_groups(state: Mapping[str, Any], counts: Sequence[int]) -> bool:
    """True if a group of ZeRO-3 is cut over another number of ranks than the rest."""
    groups = state.get("ds_zero_partition_groups")
    return isinstance(groups, list) and any(
        isinstance(group, dict) and group.get("partition_count") not in (None, *counts) for group in groups
    )


def _tree(file: TorchFile) -> Mapping[str, Any]:
    if not isinstance(file.tree, dict):
        raise _refusal(file, "it is not a dict")
    return _string_items(file.tree)


def _refusal(file: TorchFile, reason: str) -> SourceError:
    return SourceError(f"{escape(file.name)} is not a file of DeepSpeed: {reason}", hint=_NOT_DEEPSPEED)


def _string_items(value: object) -> dict[str, Any]:
    """Return the entries of a dict whose keys are strings; an empty dict for any other value."""
    return {key: item for key, item in value.items() if type(key) is str} if isinstance(value, dict) else {}


def _as_list(value: object) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one item."""
    return value if isinstance(value, list) else [value]


def _as_count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _shapes(file: TorchFile, value: object) -> dict[str, Shape]:
    if not isinstance(value, dict):
        raise _refusal(file, "its shapes are not a dict")
    return {str(name): tuple(_as_sizes(file, shape)) for name, shape in value.items()}


def _as_sizes(file: TorchFile, value: object) -> Sequence[int]:
    if not isinstance(value, (tuple, list)) or any(type(size) is not int or size < 0 for size in value):
        raise _refusal(file, "a shape or padding that is not made of sizes")
    return value
