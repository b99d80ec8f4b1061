"""Open DeepSpeed checkpoints: ZeRO-1, 2 and 3, without ZeRO, and universal ones.

With ZeRO, the weights are the optimizer's fp32 masters: flat tensors in `*_optim_states.pt`, one part for
each rank. DeepSpeed's own zero_to_fp32.py computes the same values; here the catalog points at their bytes, and no data
is loaded. Experts that DeepSpeed's MoE layers distribute over ranks have masters too; see `experts`.

A universal checkpoint has `zero/PARAMETER/fp32.pt`, one file for each parameter. From ZeRO-1 and 2 a file is
{"param": tensor, ...} with the parameter's shape; from ZeRO-3 it is a bare flat tensor. If some ranks have no elements,
older versions of the script left padding at its end: a bias of one element, saved by 8 ranks, has 7. The
optimizer's leaves are in the same folder (`exp_avg.pt`), its settings in `zero/optimizer_state.pt`. Newer versions also
write files for buffers and tied names, which the optimizer does not have. These files are cast from the module, so
shardkit reads the module itself.

Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeVar

from shardkit.core.catalog import subset
from shardkit.core.dtypes import short_dtype
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.files import storage
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    Opener,
    Remarks,
    asset_directories,
    folder_below,
    listing,
    parent_folder,
)
from shardkit.formats.contract.copies import CopyComparison, StoredCopy
from shardkit.formats.contract.optimizer import (
    GROUPS,
    STATE,
    STEP,
    Group,
    OptimizerState,
    UnusableOptimizer,
    read_groups,
)
from shardkit.formats.deepspeed.experts import open_experts, place_experts, stale_experts
from shardkit.formats.deepspeed.files import (
    ExpertStates,
    ModelStates,
    OptimizerStates,
    StateFiles,
    Tag,
    find_tag,
    list_state_files,
    open_states,
    read_model_states,
    read_optimizer_states,
    require_files,
)
from shardkit.formats.deepspeed.zero import group_params, masters_of, open_zero_optimizer
from shardkit.formats.rankfiles.flat import (
    FlatRange,
    Leaves,
    Weight,
    build_catalog,
    is_number,
    without_tree,
    write_state,
)
from shardkit.formats.torchsave.classes import refuse_objects
from shardkit.formats.torchsave.file import TensorRef, TorchFile, UnreadableTensor

_WRITERS = {
    "zero0": "DeepSpeed",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
    "universal": "DeepSpeed (universal checkpoint)",
}
_WEIGHTS, _SUFFIX = "fp32.pt", ".pt"
_SETTINGS = "zero/optimizer_state.pt"
_AGAIN = "convert the checkpoint again"
_MAX_HOPS = 8  # from a shared parameter to the stored one; DeepSpeed takes one hop

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _ModuleWeights:
    """The weights, under the module's names and in its order."""

    files: Sequence[TorchFile]
    by_name: dict[str, Weight] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    """Names of the module's entries that are not tensors."""
    lost: list[str] = field(default_factory=list)
    """Names of parameters whose values are in none of the files."""
    of_classes: dict[str, str] = field(default_factory=dict)
    """Parameters of classes whose values cannot be read: name -> file and reason."""


def is_deepspeed(path: str) -> bool:
    """True for a directory with DeepSpeed's state files, or with a `latest` that names one."""
    return find_tag(path) is not None


def open_deepspeed(path: str) -> Checkpoint:
    """Open the weights of a DeepSpeed checkpoint, in the optimizer's precision.

    Args:
        path: the directory that was given to `save_checkpoint`, which has `latest`; or the directory of one tag.

    Raises:
        SourceError: it is not DeepSpeed's, files are missing or damaged, or more than ZeRO split the model.
        IntegrityError: files do not fit each other.
        ResourceError: a file may not be read.
    """
    tag = find_tag(path)
    if tag is None:
        raise SourceError(
            f"{escape(path)} is not a DeepSpeed checkpoint",
            hint="give the directory that holds `latest`, or the tag's own (global_step20)",
        )
    files = list_state_files(tag)
    if files.is_universal:
        return _open_universal(path, tag, files)
    if not files.optimizers:
        return _open_without_optimizer(path, tag, files)
    return _open_zero(path, tag, files)


def _open_zero(path: str, tag: Tag, files: StateFiles) -> Checkpoint:
    """Open the files of all ranks; the number of ranks is in the optimizer file of the lowest rank."""
    first = _open_first(tag, files, files.optimizers[min(files.optimizers)], read_optimizer_states)
    num_ranks = max(first.counts, default=max(files.optimizers) + 1)
    is_partitioned = first.stage == 3
    main = None if is_partitioned else _open_main(tag, files, False)
    if main and main.num_ranks and main.num_experts:  # experts have fewer ranks than the model
        num_ranks = max(num_ranks, main.num_ranks)
    require_files(tag, files, num_ranks, with_models=is_partitioned)
    main = main or _open_main(tag, files, True)
    names = [files.models[rank] for rank in range(1, num_ranks)] if is_partitioned else []
    names += [files.optimizers[rank] for rank in range(num_ranks)]
    opened = open_states(tag, names, partial(_read_states, main))
    states = [main, *(item for item in opened if isinstance(item, ModelStates))]
    optimizers = [item for item in opened if isinstance(item, OptimizerStates)]
    _check_same_save(tag, states, num_ranks)
    experts = open_experts(tag, files, main)
    if experts or any(count != num_ranks for count in first.counts):
        main = states[0] = place_experts(tag, main, optimizers, experts)
    masters = masters_of(main, optimizers, len(states), tag.directory)
    stale = stale_experts(files, main)
    stale += [name for rank, name in sorted(files.optimizers.items()) if rank >= num_ranks]
    stale += [name for rank, name in sorted(files.models.items()) if not is_partitioned or rank >= num_ranks]
    stale += [files.whole] if is_partitioned and files.whole else []
    opened_files = [item.file for group in (states, optimizers, experts) for item in group]
    weights = _assemble(opened_files, states, masters, experts)
    notes = _notes_on_masters(main, optimizers)
    if main.leaves_frozen_out and first.stage > 1:  # DeepSpeed 0.19.8, engine._save_checkpoint: else a dict
        notes.append(_WITHOUT_FROZEN)
    copies = _compare_buffers(states)
    notes += copies.notes()
    reason = "of an earlier save, with other ranks or another stage"
    remarks = Remarks(
        notes=tuple(notes),
        why_missing=_WITHOUT_FROZEN if _WITHOUT_FROZEN in notes else "",
        differing=copies.differing(),
        skipped=tuple((tag.prefix + name, reason) for name in stale),
    )
    optimizer = partial(open_zero_optimizer, tag.directory, main, optimizers)
    return _checkpoint(path, tag, main, weights, f"zero{first.stage}", remarks, optimizer)


def _compare_buffers(states: Sequence[ModelStates]) -> CopyComparison:
    """Compare the buffers of all ranks with those of the first rank, which are used."""
    copies, main = CopyComparison(), states[0]
    for state in states[1:]:
        for name, copy in state.module.items():
            first = main.module.get(name)
            if isinstance(first, TensorRef) and isinstance(copy, TensorRef) and first.nbytes:
                stored = StoredCopy.of(first), main.file.name, StoredCopy.of(copy), state.file.name
                copies.compare(name, *stored)
    return copies


_WITHOUT_FROZEN = "saved with exclude_frozen_parameters=True: parameters that were not trained are in no file, and the base has them"


def _open_without_optimizer(path: str, tag: Tag, files: StateFiles) -> Checkpoint:
    """Open the module's weights: after training without ZeRO, or if the optimizer files were deleted."""
    if files.whole is None:
        raise SourceError(
            f"{escape(tag.directory)}: the optimizer files of all ranks are missing, and with ZeRO-3 they hold the weights",
            problems=[escape(tag.prefix + name) for _, name in sorted(files.models.items())],
            hint="copy *_optim_states.pt too",
        )
    state = _open_main(tag, files, False)
    notes = []
    if state.groups is not None:
        notes.append(
            "the optimizer's files are missing: these are the module's weights, not the fp32 masters"
        )
    elif _module_dtypes(state) != {"float32"}:
        notes.append(
            "without ZeRO, DeepSpeed saves the fp32 masters without their names: these are the module's weights"
        )
    experts = open_experts(tag, files, state)
    weights = _assemble([state.file, *(expert.file for expert in experts)], [state], {}, experts)
    stale = [
        (tag.prefix + name, "of an earlier save, with ZeRO-3") for _, name in sorted(files.models.items())
    ]
    stale += [(tag.prefix + name, "of an earlier save") for name in stale_experts(files, state)]
    return _checkpoint(path, tag, state, weights, "zero0", Remarks(notes=tuple(notes), skipped=tuple(stale)))


def _open_universal(path: str, tag: Tag, files: StateFiles) -> Checkpoint:
    """Open a checkpoint that ds_to_universal.py made: a directory for each parameter."""
    num_ranks = max(files.models) + 1 if files.models else None
    if num_ranks is not None and num_ranks > len(files.models):
        require_files(tag, files, num_ranks, with_models=True)
    main = _open_main(tag, files, num_ranks is not None)
    names = [files.models[rank] for rank in range(1, num_ranks or 1)]
    states = [main, *open_states(tag, names, partial(read_model_states, first=main))]
    notes = ["the weights are the fp32 masters of the optimizer"]
    if _is_model_parallel(tag):
        states = [replace(main, module={}, frozen={}, shared={})]
        notes.append(
            "the model was trained with model parallelism: its buffers are not in the checkpoint as a whole"
        )
    masters, opened = _open_parameters(tag, states[0], len(states))
    weights = _assemble([*(state.file for state in states), *opened], states, masters)
    optimizer = partial(_open_universal_optimizer, tag, states[0], len(states))
    remarks = Remarks(notes=tuple(notes))
    return _checkpoint(path, tag, states[0], weights, "universal", remarks, optimizer)


def _open_main(tag: Tag, files: StateFiles, is_partitioned: bool) -> ModelStates:
    """Open the main model file: rank 0's with ZeRO-3, otherwise the one with the whole module."""
    name = files.models[0] if is_partitioned else files.whole
    if name is None:
        raise SourceError(
            f"{escape(tag.directory)}: the file of the module is missing; it holds the names and shapes",
            problems=[escape(f"{tag.prefix}mp_rank_00_model_states.pt")],
            hint="copy it too",
        )
    return _open_first(tag, files, name, read_model_states)


def _open_first(tag: Tag, files: StateFiles, name: str, read: Callable[[TorchFile], T]) -> T:
    """Open a file that describes the others. If it is damaged, open all, so that the error lists every damaged file."""
    try:
        return open_states(tag, [name], read)[0]
    except SourceError:
        whole = [files.whole] if files.whole else []
        open_states(tag, [*whole, *files.models.values(), *files.optimizers.values()], lambda file: None)
        raise


def _read_states(main: ModelStates, file: TorchFile) -> ModelStates | OptimizerStates:
    """Return the content of a rank's model file or optimizer file."""
    if file.name.endswith("_model_states.pt"):
        return read_model_states(file, first=main)
    return read_optimizer_states(file)


def _check_same_save(tag: Tag, states: Sequence[ModelStates], num_ranks: int) -> None:
    """Check that the model files of all ranks are of one step, with equal shapes, and by as many ranks as the optimizer's.

    Raises:
        IntegrityError: lists all files that differ.
    """
    problems = []
    first = states[0]
    for state in states:
        name = escape(state.file.name)
        if state.groups is None:
            problems.append(f"{name}: it has no shapes of parameters")
        elif state.groups != first.groups or state.frozen != first.frozen:
            problems.append(f"{name}: its parameters are not those of {escape(first.file.name)}")
        if state.step != first.step:
            problems.append(f"{name}: saved at step {state.step}, others at {first.step}")
        if state.num_ranks not in (None, num_ranks):
            problems.append(f"{name}: saved by {state.num_ranks} ranks, the optimizer by {num_ranks}")
    IntegrityError.raise_for(
        problems,
        f"{escape(tag.directory)}: its files are from different saves",
        hint="use another copy of the checkpoint",
    )


def _module_dtypes(state: ModelStates) -> set[str]:
    """Return the floating dtypes of a module's parameters."""
    return {
        value.dtype.name
        for name, value in state.module.items()
        if isinstance(value, TensorRef) and value.dtype.is_floating and name not in state.buffers
    }


def _notes_on_masters(state: ModelStates, optimizers: Sequence[OptimizerStates]) -> list[str]:
    """Return a note that the weights are the masters if the module has other dtypes, else an empty list."""
    masters = {ref.dtype.name for ref in optimizers[0].flat}
    module = _module_dtypes(state) - masters
    if not module:
        return []
    master_dtypes, ran = (", ".join(sorted(map(short_dtype, names))) for names in (masters, module))
    return [
        f"the weights are the optimizer's {master_dtypes} masters; the model ran in {ran}, which a cast restores"
    ]


def _checkpoint(
    path: str,
    tag: Tag,
    state: ModelStates,
    weights: _ModuleWeights,
    kind: str,
    remarks: Remarks,
    optimizer: Callable[[], OptimizerState | UnusableOptimizer] | None = None,
) -> Checkpoint:
    if not weights.by_name:
        raise SourceError(f"{escape(tag.directory)} holds no weights", hint="give another checkpoint")
    refuse_objects(weights.of_classes, (file.source for file in weights.files))
    catalog = build_catalog(path, weights.files, weights.by_name)
    catalog.objects = tuple(weights.objects)
    lost = [(name, "a parameter whose values are in none of the files") for name in weights.lost]
    frozen = [f"{len(lost)} parameters were saved without their values (frozen ones)"] if lost else []
    return Checkpoint(
        path=path,
        format=f"deepspeed-{kind}",
        writer=f"{'Lightning DeepSpeedStrategy, ' if state.is_lightning else ''}{_WRITERS[kind]}",
        catalog=catalog,
        select=partial(subset, catalog),
        contents=Contents(
            roots={"model": ()},
            optimizer=optimizer,
            shows_cuts=False,
            # accelerate and transformers' Trainer put the model's config beside the tag or one level up.
            assets=asset_directories(tag.directory, path, parent_folder(tag.directory), parent_folder(path)),
        ),
        remarks=remarks.plus(
            frozen, [("optimizer_state_dict", "optimizer state, but for the fp32 weights"), *lost]
        ),
    )


def _assemble(
    files: Sequence[TorchFile],
    states: Sequence[ModelStates],
    masters: Mapping[str, Weight],
    experts: Sequence[ExpertStates] = (),
) -> _ModuleWeights:
    """Return the weights of a checkpoint: fp32 masters, frozen parameters, buffers, ties.

    Args:
        files: with the weights.
        states: the model file of each rank (ZeRO-3), or the only one.
        masters: the trained parameters, in the optimizer's precision.
        experts: their files, used for experts without masters.
    """
    main = states[0]
    weights = _ModuleWeights(files=files)
    numbers = {id(file): number for number, file in enumerate(files)}
    whole = {
        name: Weight.whole(numbers[id(expert.file)], ref)
        for expert in experts
        for name, ref in expert.tensors.items()
    }
    cache: dict[str, Weight | None] = {}

    def weight_of(name: str) -> Weight | None:
        """Return the parameter stored under a name, always as the same object, so that ties share it."""
        if name not in cache:
            cache[name] = masters.get(name) or whole.get(name) or _frozen_weight(name, states, numbers)
        return cache[name]

    for name in dict.fromkeys(chain(main.module, whole, masters, main.frozen, main.shared)):
        weight = (
            weight_of(name)
            or weight_of(_stored_name(name, main.shared))
            or _module_weight(name, main, numbers)
        )
        stored = main.module.get(name)
        if weight is not None:
            weights.by_name[name] = weight
        elif isinstance(stored, UnreadableTensor) and stored.value is not None:
            weights.of_classes[name] = f"{main.file.name}: {stored.name}"
        elif isinstance(stored, (TensorRef, UnreadableTensor, type(None))):
            weights.lost.append(name)
        else:
            weights.objects.append(name)
    return weights


def _stored_name(name: str, shared: Mapping[str, str]) -> str:
    """Return the stored name of a shared parameter; any other name unchanged."""
    for _ in range(_MAX_HOPS):
        if name not in shared:
            break
        name = shared[name]
    return name


def _frozen_weight(name: str, states: Sequence[ModelStates], numbers: Mapping[int, int]) -> Weight | None:
    """Return a frozen parameter, or None if it is not frozen or incomplete. With ZeRO-3 every rank has a part of it."""
    shape = states[0].frozen.get(name)
    if shape is None:
        return None
    stored = states[0].module.get(name)
    if isinstance(stored, TensorRef) and stored.shape == shape:
        return Weight.whole(numbers[id(states[0].file)], stored)
    size, part, pieces = prod(shape), -(-prod(shape) // len(states)), []
    for rank, state in enumerate(states):
        ref, length = state.fragments.get(name), max(min(part, size - rank * part), 0)
        if ref is None or not ref.is_contiguous or prod(ref.shape) < length:
            return None
        if length or not size:
            pieces.append(FlatRange(numbers[id(state.file)], ref, 0, rank * part, length))
    return Weight(dtype=pieces[0].tensor.dtype, shape=shape, pieces=pieces)


def _module_weight(name: str, state: ModelStates, numbers: Mapping[int, int]) -> Weight | None:
    """Return a buffer or unpartitioned parameter from the module; None for others, which ZeRO-3 stores as empty tensors."""
    stored = state.module.get(name)
    if not isinstance(stored, TensorRef):
        return None
    if state.groups is not None and not prod(stored.shape) and name not in state.buffers:
        return None
    return Weight.whole(numbers[id(state.file)], stored)


class _OptimizerSettings(NamedTuple):
    """The content of `optimizer_state.pt`."""

    file: TorchFile
    groups: Sequence[Group]
    steps: Mapping[int, Weight | float]
    """The step count of each flat tensor; only from ZeRO-3, which has no `step.pt`."""


def _open_parameters(
    tag: Tag, state: ModelStates, num_states: int
) -> tuple[dict[str, Weight], list[TorchFile]]:
    """Return the trained parameters of a universal checkpoint, and their files.

    Args:
        tag: the saved state.
        state: the model file, with the shapes.
        num_states: number of model files, which come first in the catalog; from ZeRO-3, one for each rank.

    Raises:
        SourceError: lists every file that is missing, damaged, or without its parameter.
    """
    shapes = _shapes(tag, state)
    missing = [name for name in shapes if not _has_weights(tag, name)]
    SourceError.raise_for(
        [escape(f"{tag.prefix}zero/{name}/{_WEIGHTS}") for name in missing],
        f"{escape(tag.directory)}: {len(missing)} of {len(shapes)} parameters have no {_WEIGHTS}",
        hint=f"copy the whole directory, or {_AGAIN}",
    )
    opened = open_states(tag, [f"zero/{name}/{_WEIGHTS}" for name in shapes], _read_value)
    weights: dict[str, Weight] = {}
    problems = []
    for number, (name, (file, value)) in enumerate(zip(shapes, opened, strict=True), start=num_states):
        weight = (
            _shaped_weight(number, value, shapes[name], num_states) if isinstance(value, TensorRef) else None
        )
        if weight is None:
            problems.append(f"{escape(name)}: {escape(file.name)} does not hold {list(shapes[name] or ())}")
        else:
            weights[name] = weight
    SourceError.raise_for(
        problems, f"{escape(tag.directory)}: {len(problems)} files do not hold their parameter", hint=_AGAIN
    )
    return weights, [file for file, _ in opened]


def _open_universal_optimizer(
    tag: Tag, state: ModelStates, num_ranks: int
) -> OptimizerState | UnusableOptimizer:
    """Open the optimizer's state: the files beside each parameter's weights, and `zero/optimizer_state.pt`.

    Raises:
        SourceError: as `_open_parameters`; or a parameter lacks a leaf that others have.
        IntegrityError, ResourceError: as `open_each`.
    """
    shapes = _shapes(tag, state)
    by_parameter = {name: _leaf_names(tag, name) for name in shapes}
    kinds = sorted(set().union(*by_parameter.values()))
    if not kinds:
        return UnusableOptimizer(
            [f"{tag.prefix}zero"], "no parameter has a state of the optimizer beside its weights"
        )
    SourceError.raise_for(
        [
            escape(f"{tag.prefix}zero/{name}/{leaf}{_SUFFIX}")
            for leaf in kinds
            for name in shapes
            if leaf not in by_parameter[name]
        ],
        f"{escape(tag.directory)}: the optimizer's state of some parameters is missing",
        hint=f"copy the whole directory, or {_AGAIN}",
    )
    settings = open_states(tag, [_SETTINGS], _read_settings)[0]
    files, state_leaves = [settings.file], Leaves()
    pairs = [(name, leaf) for name in shapes for leaf in kinds]
    opened = open_states(tag, [f"zero/{name}/{leaf}{_SUFFIX}" for name, leaf in pairs], _read_value)
    for (name, leaf), (file, value) in zip(pairs, opened, strict=True):
        if isinstance(value, TensorRef):
            shape = shapes[name] if value.shape else ()
            content: Weight | float | None = _shaped_weight(len(files), value, shape, num_ranks)
        else:
            content = value
        if content is None:
            return UnusableOptimizer([file.name], f"it does not hold the {escape(leaf)} of {escape(name)}")
        files.append(file)
        state_leaves.setdefault(name, {})[leaf] = content
    names = [list(group) for group in state.groups or ()]
    steps = {
        name: settings.steps[number]
        for number, group in enumerate(names)
        if number in settings.steps
        for name in group
    }
    for name, leaves in state_leaves.items():
        if name in steps:
            leaves.setdefault(STEP, steps[name])
    params = group_params(settings.groups, names or [list(shapes)])
    if isinstance(params, str):
        return UnusableOptimizer([settings.file.name], params)
    return write_state(tag.directory, files, state_leaves, settings.groups, params)


def _is_model_parallel(tag: Tag) -> bool:
    """True if the model files are parts of a model-parallel model, so that no file has whole tensors."""
    return any(
        name.startswith("mp_rank_") and not name.startswith("mp_rank_00_") for name in listing(tag.directory)
    )


def _shapes(tag: Tag, state: ModelStates) -> dict[str, Shape | None]:
    """Return the names of the parameters with their shapes; a shape is None if only the parameter's file has it."""
    if state.groups is not None and not _is_model_parallel(tag):
        trained = {name: shape for group in state.groups for name, shape in group.items()}
        stacked = {
            name: (number, *trained[name][1:]) if name in trained else None
            for name, number in state.stacked.items()
        }
        return {**trained, **stacked}
    zero = os.path.join(tag.directory, "zero")
    return {name: None for name in sorted(listing(zero)) if _has_weights(tag, name)}


def _has_weights(tag: Tag, name: str) -> bool:
    """True if a parameter's file exists. False for a name that leads elsewhere, as names come from a file."""
    if os.path.basename(name) != name or "\0" in name:
        return False
    directory = folder_below(tag.directory, f"zero/{name}")
    return directory is not None and storage.lexists(os.path.join(directory, _WEIGHTS))


def _leaf_names(tag: Tag, name: str) -> set[str]:
    """Return the leaves in a parameter's directory: the names of its files without `.pt`, except the weights."""
    directory = folder_below(tag.directory, f"zero/{name}")
    names = listing(directory) if directory is not None else frozenset()
    return {file.removesuffix(_SUFFIX) for file in names if file.endswith(_SUFFIX) and file != _WEIGHTS}


def _read_value(file: TorchFile) -> tuple[TorchFile, TensorRef | float | None]:
    """Return the file and its value; the value is None if it is neither a tensor nor a number."""
    value = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
    return without_tree(file, [value]), value if isinstance(value, TensorRef) or is_number(value) else None


def _shaped_weight(number: int, stored: TensorRef, shape: Shape | None, num_ranks: int) -> Weight | None:
    """Return a stored tensor as a parameter of a shape, or None if it does not fit. From ZeRO-3 the stored one is flat."""
    if shape in (None, stored.shape):
        return Weight.whole(number, stored)
    assert shape is not None
    fits = prod(stored.shape) == prod(shape) or stored.shape == (_flat_length(prod(shape), num_ranks),)
    return Weight.whole(number, stored, shape) if fits and stored.is_contiguous else None


def _flat_length(size: int, num_ranks: int) -> int:
    """Return the length of a parameter's flat tensor with the padding of older versions: 7 for 1 element and 8 ranks."""
    part = -(-size // num_ranks)
    return sum(min(part, abs(size - rank * part)) for rank in range(num_ranks))


def _read_settings(file: TorchFile) -> _OptimizerSettings:
    tree: Any = file.tree if isinstance(file.tree, dict) else {}
    groups, inner_state = read_groups(file.name, tree.get(GROUPS)), tree.get("optimizer_state_dict")
    if groups is None:
        raise SourceError(f"{escape(file.name)} has no settings of the optimizer", hint=_AGAIN)
    states = inner_state.get(STATE) if isinstance(inner_state, dict) else None
    steps: dict[int, Weight | float] = {}
    kept: list[TensorRef] = []
    for number, leaves in states.items() if isinstance(states, dict) else ():
        step: Any = leaves.get(STEP) if isinstance(leaves, dict) else None
        if type(number) is int and is_number(step):
            steps[number] = step
        elif type(number) is int and isinstance(step, TensorRef) and not step.shape:
            steps[number] = Weight.whole(0, step)
            kept.append(step)
    return _OptimizerSettings(without_tree(file, kept), groups, steps)


OPENERS = {"deepspeed": Opener(is_deepspeed, open_deepspeed)}
