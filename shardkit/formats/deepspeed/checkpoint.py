"""DeepSpeed checkpoints: ZeRO-1, 2 and 3, without ZeRO, and universal ones.

With ZeRO, the weights are the optimizer's fp32 masters: flat tensors in `*_optim_states.pt`, one part for each
rank. DeepSpeed's own zero_to_fp32.py gives the same values; here their bytes are pointed at, not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shardkit.core.catalog import subset
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.checkpoint import Checkpoint, Opener, asset_directories, parent
from shardkit.formats.deepspeed.files import (
    ModelStates,
    OptimizerStates,
    StateFiles,
    Tag,
    find_tag,
    open_states,
    read_model_states,
    read_optimizer_states,
    require_ranks,
    survey,
)
from shardkit.formats.deepspeed.optimizer import open_zero_optimizer
from shardkit.formats.deepspeed.universal import is_cut, open_parameters, open_universal_optimizer
from shardkit.formats.deepspeed.zero import Weights, assemble, masters_of
from shardkit.formats.optimizer import OptimizerState, Unmapped
from shardkit.formats.rankfiles.flat import build_catalog, differing
from shardkit.formats.torchsave.file import TensorRef, TorchFile

T = TypeVar("T")


def is_deepspeed(path: str) -> bool:
    """True for a directory with DeepSpeed's state files, or with a `latest` that names one."""
    return find_tag(path) is not None


def open_deepspeed(path: str) -> Checkpoint:
    """Open the weights of a DeepSpeed checkpoint, in the optimizer's precision.

    Args:
        path: the directory given to `save_checkpoint`, which has `latest`, or that of one tag.

    Raises:
        SourceError: not such a directory, files missing or damaged, or a model that was split in other ways.
        IntegrityError: files that do not fit each other.
        ResourceError: a file may not be read.
    """
    tag = find_tag(path)
    if tag is None:
        raise SourceError(
            f"{escape(path)} is not a DeepSpeed checkpoint",
            hint="give the directory that holds `latest`, or the tag's own (global_step20)",
        )
    files = survey(tag)
    if files.is_universal:
        return _open_universal(path, tag, files)
    if not files.optimizers:
        return _open_without_optimizer(path, tag, files)
    return _open_zero(path, tag, files)


def _open_zero(path: str, tag: Tag, files: StateFiles) -> Checkpoint:
    """Open the files of all ranks; the lowest one that is there says how many there have to be."""
    first = _open_first(tag, files, files.optimizers[min(files.optimizers)], read_optimizer_states)
    num_ranks = first.num_ranks or max(files.optimizers) + 1
    is_partitioned = first.stage == 3
    require_ranks(tag, files, num_ranks, with_models=is_partitioned)
    main = _open_main(tag, files, is_partitioned)
    models = [files.models[rank] for rank in range(1, num_ranks)] if is_partitioned else []
    names = [*models, *(files.optimizers[rank] for rank in range(num_ranks))]
    opened = open_states(tag, names, partial(_read_states, main))
    states = [main, *(item for item in opened if isinstance(item, ModelStates))]
    optimizers = [item for item in opened if isinstance(item, OptimizerStates)]
    _check_same_save(tag, states, num_ranks)
    masters = masters_of(states[0], optimizers, len(states), tag.directory)
    weights = assemble(
        [*(state.file for state in states), *(rank.file for rank in optimizers)], states, masters
    )
    stale = [name for rank, name in sorted(files.optimizers.items()) if rank >= num_ranks]
    stale += [name for rank, name in sorted(files.models.items()) if not is_partitioned or rank >= num_ranks]
    stale += [files.whole] if is_partitioned and files.whole else []
    return _checkpoint(
        path,
        tag,
        states[0],
        weights,
        kind=f"zero{first.stage}",
        writer=f"DeepSpeed ZeRO-{first.stage}",
        skipped=[
            (tag.prefix + name, "of an earlier save, with other ranks or another stage") for name in stale
        ],
        notes=_notes_on_masters(states[0], optimizers),
        optimizer=partial(open_zero_optimizer, tag, names[len(models) :], states[0], optimizers),
    )


def _open_without_optimizer(path: str, tag: Tag, files: StateFiles) -> Checkpoint:
    """Open the module alone: training without ZeRO, or optimizer files that were not kept."""
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
            "the optimizer's files are not there: these are the weights of the module, not the fp32 masters"
        )
    elif _dtypes(state) != {"float32"}:
        notes.append(
            "without ZeRO, DeepSpeed saves the fp32 masters without their names: these are the module's weights"
        )
    skipped = [
        (tag.prefix + name, "of an earlier save, with ZeRO-3") for _, name in sorted(files.models.items())
    ]
    return _checkpoint(
        path,
        tag,
        state,
        assemble([state.file], [state], {}),
        kind="zero0",
        writer="DeepSpeed",
        skipped=skipped,
        notes=notes,
    )


def _open_universal(path: str, tag: Tag, files: StateFiles) -> Checkpoint:
    """Open a checkpoint that ds_to_universal.py made: a directory for each parameter."""
    num_ranks = max(files.models) + 1 if files.models else None
    if num_ranks is not None and num_ranks > len(files.models):
        require_ranks(tag, files, num_ranks, with_models=True)
    main = _open_main(tag, files, num_ranks is not None)
    names = [files.models[rank] for rank in range(1, num_ranks or 1)]
    states = [main, *open_states(tag, names, partial(read_model_states, first=main))]
    notes = ["the weights are the fp32 masters of the optimizer"]
    if is_cut(tag):
        states = [replace(states[0], module={}, frozen={}, shared={})]
        notes.append(
            "the model was trained with model parallelism: its buffers are not in the checkpoint as a whole"
        )
    masters, opened = open_parameters(tag, states[0], len(states))
    return _checkpoint(
        path,
        tag,
        states[0],
        assemble([*(state.file for state in states), *opened], states, masters),
        kind="universal",
        writer="DeepSpeed (universal checkpoint)",
        skipped=[],
        notes=notes,
        optimizer=partial(open_universal_optimizer, tag, states[0]),
    )


def _open_main(tag: Tag, files: StateFiles, is_partitioned: bool) -> ModelStates:
    """Open the model file that speaks for all: rank 0's of ZeRO-3, or the one with the whole module."""
    name = files.models[0] if is_partitioned else files.whole
    if name is None:
        raise SourceError(
            f"{escape(tag.directory)}: the file of the module is missing, which has names and shapes",
            problems=[escape(f"{tag.prefix}mp_rank_00_model_states.pt")],
            hint="copy it too",
        )
    return _open_first(tag, files, name, read_model_states)


def _open_first(tag: Tag, files: StateFiles, name: str, read: Callable[[TorchFile], T]) -> T:
    """Open the file that tells about the others; where it is damaged, the others may be too, so try them all."""
    try:
        return open_states(tag, [name], read)[0]
    except SourceError:
        whole = [files.whole] if files.whole else []
        open_states(tag, [*whole, *files.models.values(), *files.optimizers.values()], lambda file: None)
        raise


def _read_states(main: ModelStates, file: TorchFile) -> ModelStates | OptimizerStates:
    """Read the file of some rank, whichever kind it is."""
    if file.name.endswith("_model_states.pt"):
        return read_model_states(file, first=main)
    return read_optimizer_states(file)


def _check_same_save(tag: Tag, states: Sequence[ModelStates], num_ranks: int) -> None:
    """The files of all ranks must be of one step, and by as many ranks as there are partitions."""
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
    if problems:
        raise IntegrityError(
            f"{escape(tag.directory)}: its files are not of one save",
            problems=problems,
            hint="use another copy of the checkpoint",
        )


def _dtypes(state: ModelStates) -> set[str]:
    """Return the floating dtypes of a module's parameters."""
    return {
        value.dtype.name
        for name, value in state.module.items()
        if isinstance(value, TensorRef) and value.dtype.is_floating and name not in state.buffers
    }


def _notes_on_masters(state: ModelStates, optimizers: Sequence[OptimizerStates]) -> list[str]:
    """Say which of the two sets of weights was taken, where they differ."""
    masters = sorted({ref.dtype.name for ref in optimizers[0].flat})
    module = sorted(_dtypes(state) - set(masters))
    if not module:
        return []
    return [
        f"the weights are the optimizer's {', '.join(masters)} masters; the model ran in {', '.join(module)}, "
        "which a cast gives again"
    ]


def _checkpoint(
    path: str,
    tag: Tag,
    state: ModelStates,
    weights: Weights,
    *,
    kind: str,
    writer: str,
    skipped: Sequence[tuple[str, str]],
    notes: Sequence[str],
    optimizer: Callable[[], OptimizerState | Unmapped] | None = None,
) -> Checkpoint:
    if not weights.by_name:
        raise SourceError(f"{escape(tag.directory)} holds no weights", hint="give another checkpoint")
    catalog = build_catalog(path, weights.files, weights.by_name)
    catalog.objects = tuple(weights.objects)
    lost = [(name, "a parameter whose values are in none of the files") for name in weights.lost]
    if lost:
        notes = [*notes, f"{len(lost)} parameters were saved without their values (frozen ones)"]
    check: Callable[..., Iterator[str]] = partial(differing, weights.files, weights.by_name)
    return Checkpoint(
        path=path,
        format=f"deepspeed-{kind}",
        writer=f"Lightning DeepSpeedStrategy, {writer}" if state.is_lightning else writer,
        catalog=catalog,
        select=partial(subset, catalog),
        check=check,
        roots={"model": ()},
        optimizer=optimizer,
        has_boxes=False,
        # accelerate and transformers' Trainer put the model's config beside the tag or one level up.
        assets=asset_directories(tag.directory, path, parent(tag.directory), parent(path)),
        skipped=(*skipped, ("optimizer_state_dict", "optimizer state, but for the fp32 weights"), *lost),
        notes=tuple(notes),
    )


OPENERS = {"deepspeed": Opener(is_deepspeed, open_deepspeed)}
