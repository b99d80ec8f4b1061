"""Save a sharded model so that the destination always contains a whole checkpoint.

All ranks write with torch's own distributed checkpoint (DCP) into a directory next to the destination. When every
rank has reported and the files have been checked, rank 0 commits them by a rename (see `files/output`). In a store the
files are written to a folder at the destination, and the commit is one request that writes a `.metadata` naming them.
A rank that fails or is killed does not change the previous checkpoint.

    .<name>.shardkit/                 during the save
    <name>/.metadata, __R_N.distcp    stock `dcp.load` reads {"model": ..., "optimizer": ..., "extra": ...}
    <name>/huggingface/               config and tokenizer of the Hub model, if they are known
    <name>/shardkit.json              world, mesh, units, ties, key rules, files

A tensor with several names is stored once. `.metadata` lists its record under all names; those after the first are
*aliases*.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardkit._torch import fsdp1_unit, is_fsdp1_part, pickle_without_strides
from shardkit.core.keywords import suggests_keywords
from shardkit.core.result import Result
from shardkit.core.text import count, escape, format_size, listed
from shardkit.errors import LayoutError, ResourceError, ShardkitError
from shardkit.files import manifest, storage
from shardkit.files.digest import crc32
from shardkit.files.location import location_of
from shardkit.files.stores import forget
from shardkit.formats.dcp import METADATA
from shardkit.formats.torchsave.classes import is_known_class
from shardkit.keys.names import clean_name
from shardkit.layout.classes import transformers_model
from shardkit.operations.ties import shared_record_notes
from shardkit.training.extras.checkpointable import checkpointable
from shardkit.training.extras.diagnose import diagnose
from shardkit.training.fill.reading import HubNaming
from shardkit.training.fill.source import recall
from shardkit.training.kept import HubFileWriter
from shardkit.training.objects import distributed_in_objects
from shardkit.training.ranks.agree import agree, agreed, gather_json, lost_rank_error
from shardkit.training.ranks.local import (
    fsdp1_units,
    memory_of,
    module_places,
    optimizer_parameters,
    refuse_copies,
    refuse_lazy,
    reshard,
    with_root,
)
from shardkit.training.save_target import SaveJob, read_metadata, write_with_retries, writer_files
from shardkit.training.saved_layout import saved_layout

MODEL, OPTIMIZER, EXTRA = "model", "optimizer", "extra"
_PHASE = "saving"
_COMPARED_NBYTES = 1 << 20  # of each value; states of random generators and data loaders have a few KB

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult(Result):
    """The result of a save, equal on every rank."""

    path: str
    """Absolute path of the checkpoint."""
    num_files: int
    """Number of shard files."""
    file_bytes: int
    """Total size of the shard files."""

    def headline(self) -> str:
        """Return a line with the path, the number of files and their size."""
        return f"saved {escape(self.path)}: {count(self.num_files, 'file')}, {format_size(self.file_bytes)}"


@suggests_keywords
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    extra: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
) -> SaveResult:
    """Save a model from all its ranks; every rank calls it. An old checkpoint stays until the new one is whole.

    `shardkit consolidate`, `reshard` and `inspect` read the result, and so does stock torch:
    `dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=path)`. If config and tokenizer of the Hub model are
    known, they are written next to the shards, in `huggingface/`, so that consolidate needs no base.

    Args:
        model: wrapped by FSDP2, FSDP1, tensor parallelism, DDP, or plain; with weights.
        path: a path on a file system that all ranks share, or in a store, such as `s3://BUCKET/KEY`. Rank 0's path
            counts. Missing directories above it are created.
        optimizer: one or several optimizers, whose state is saved under "optimizer", by names of parameters.
        extra: further values, saved under "extra": numbers, text, tensors, objects with a state dict. Each rank must
            pass the same names and values. A warning names values that differ; those of one rank are saved.
        process_group: the ranks that save; None for all of them.
        overwrite: replace an existing checkpoint, in one exchange. Files that shardkit did not write are never
            replaced. In a store the old data stay; `shardkit status` prints their place.

    Raises:
        UsageError: the destination exists, or has files that shardkit did not write. If they appeared during the save,
            the message names the place of the new save, which is whole. Or an optimizer steps copies that a forward
            had gathered when the optimizer was created. Like every error, it is raised on all ranks.
        LayoutError: the model has parameters on meta, or an optimizer steps parameters of another model.
        ResourceError: no space, no permission, a rank that does not see the directory, or a rank that died.
        ShardkitError: any other failure of a rank during the save; the problems name the ranks.
    """
    group = process_group
    leads = not dist.is_initialized() or dist.get_rank(group) == 0
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer or ())
    model = with_root(model)
    with agreed(_PHASE, group):
        _check_values(model, optimizers)
    with contextlib.ExitStack() as ending:
        ending.enter_context(_system_errors(os.fspath(path)))
        lead, place = _start(os.fspath(path), overwrite, group, leads=leads)
        if lead is not None:
            ending.callback(lead.close)
        aliases = find_aliases(model)
        with contextlib.ExitStack() as stack:
            with agreed(_PHASE, group) as exchanged:
                files = writer_files(place)
                state = stack.enter_context(checkpoint_state(model, optimizers, extra, aliases))
                kept = HubFileWriter(model, _state_paths(model), state[MODEL]) if leads else None
                layout = saved_layout(_leaves(state, ""), _world_size(group)) if leads else None
                exchanged.mine = _digests(model, state)
                if leads:
                    _warn_of_classes(state)
                    _warn_of_objects(state)
                    _warn_of_unused(model, optimizers)
            digests = exchanged.of_all
            writer = SaveWriter(place, aliases, files)
            _write(checkpointable(state), writer, group)
            namings = gather_json(recall(model, (*state[MODEL], *aliases)), group, phase=_PHASE)
            form = next((HubNaming(*naming) for naming in namings if naming is not None), HubNaming(None, {}))
            with agreed(_PHASE, group):
                if kept is not None and lead is not None:
                    _warn_of_ranks(digests)
                    for note in shared_record_notes(lead.path, aliases):
                        warnings.warn(note, stacklevel=2)
                    asset_files = kept.write(lead.local_directory)
                    content = _describe(model, writer, aliases, form, group, asset_files, layout)
                    storage.write_file(
                        os.path.join(lead.local_directory, manifest.NAME), manifest.dump(content)
                    )
        with agreed(_PHASE, group) as exchanged:
            if lead is not None:
                lead.commit(writer.metadata(), writer.folder_metadata)
                exchanged.mine = [lead.path, len(writer.files), sum(writer.files.values())]
            if kept is not None and lead is not None:
                kept.record_place(lead.home)
    saved, num_files, file_bytes = exchanged.of_all[0]
    return SaveResult(path=saved, num_files=num_files, file_bytes=file_bytes)


@contextlib.contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Turn an OSError into a ResourceError that names the file, if it is known."""
    try:
        yield
    except OSError as error:  # with several ranks, `agreed` has already turned it into a ResourceError
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            reason = f"{reason}: {escape(os.fsdecode(error.filename))}"
        raise ResourceError(f"cannot save {escape(path)}: {reason}") from error


def _check_values(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    refuse_lazy(model)
    empty = [escape(clean_name(name)) for name, parameter in model.named_parameters() if parameter.is_meta]
    LayoutError.raise_for(
        empty,
        f"{count(len(empty), 'parameter')} of the model on meta: there are no values to save",
        hint="finalize or load_into gives it weights",
    )
    units = fsdp1_units(model)
    pieces = [
        escape(clean_name(name))
        for name, parameter in model.named_parameters()
        if is_fsdp1_part(parameter) and id(parameter) not in units
    ]
    LayoutError.raise_for(
        pieces,
        f"an FSDP1 unit around the model holds {count(len(pieces), 'parameter')} of it: each rank has only a flat piece",
        hint="save the whole model that FSDP1 has wrapped",
    )
    reshard(model)  # gathered parameters are copies
    for optimizer in optimizers:
        refuse_copies(model, optimizer)
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    stepped = [parameter for optimizer in optimizers for parameter in optimizer_parameters(optimizer)]
    foreign = sum(id(parameter) not in parameter_ids for parameter in stepped)
    if foreign:
        raise LayoutError(
            f"{foreign} of {count(len(stepped), 'parameter')} that the optimizer steps are not the model's:"
            " their state has no name",
            hint="make the optimizer after the model is wrapped, or give it the new parameters: rebind_optimizer",
        )
    copies = [
        len(ids) - len(set(ids)) for ids in ([id(p) for p in optimizer_parameters(o)] for o in optimizers)
    ]
    if any(copies):
        raise LayoutError(
            f"the optimizer holds {count(sum(copies), 'repeated parameter')}: it does not step all that it should",
            hint="point it at all of them before the first step: rebind_optimizer, or finalize(..., optimizer=)",
        )


def _warn_of_classes(state: State) -> None:
    """Warn of tensors that torch saves as objects of classes that shardkit cannot read from a file."""
    by_class: dict[str, list[str]] = {}
    for name, tensor in _leaves(state, ""):
        if not isinstance(tensor, torch.Tensor):
            continue
        cls = type((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach())
        cls_name = f"{cls.__module__}.{cls.__qualname__}"
        if not cls_name.startswith("torch.") and not is_known_class(cls_name):
            by_class.setdefault(cls_name, []).append(name)
    for cls_name, names in by_class.items():
        warnings.warn(
            f"{count(len(names), 'tensor is saved as an object', 'tensors are saved as objects')} of "
            f"{escape(cls_name)}, which shardkit cannot read back from a file ({listed(names)}): stock dcp.load "
            "can, where the class is installed. Of an optimizer's state, reshard with no_optimizer=True leaves it out; "
            "consolidate and load_into need weights that are saved as plain tensors",
            stacklevel=4,
        )


def _warn_of_objects(state: State) -> None:
    """Warn of distributed tensors inside objects. torch pickles these, as it finds tensors only in dicts and lists."""
    lost = distributed_in_objects(state)
    if lost:
        warnings.warn(
            f"{count(len(lost), 'value has', 'values have')} distributed tensors in a tuple, a set or another object, which torch "
            f"saves as one rank has it: with that rank's rows alone, and for this mesh alone ({listed(lost)}). In a list or "
            "a dict they are saved whole",
            stacklevel=3,
        )


def _warn_of_unused(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn of trained parameters without optimizer state, if the optimizer has state for others."""
    # LBFGS has all of its state under the first parameter.
    used = [o for o in optimizers if o.state and not isinstance(o, torch.optim.LBFGS)]
    trained = [(o, p) for o in used for p in optimizer_parameters(o) if p.requires_grad]
    lacking = {id(p) for o, p in trained if not o.state.get(p)}
    names = [name for name, tensor in _state_names(model) if id(tensor) in lacking]
    if names:
        warnings.warn(
            f"{len(lacking)} of {count(len(trained), 'trained parameter')} have no optimizer state, because no step has had a "
            f"gradient for them: {listed(names)}. The state of a new optimizer has entries for them, so load it with "
            "DefaultLoadPlanner(allow_partial_load=True)",
            stacklevel=3,
        )


def _digests(model: nn.Module, state: State) -> dict[str, int]:
    """Return stored name -> digest for values of which torch saves only one rank's, so that ranks can compare them.

    These are plain parameters, their optimizer states apart from step counts, and `extra`. Buffers are left out,
    because statistics of batches differ between ranks.
    """
    digests = dict[str, int]()
    trained = {name for name, tensor in _state_names(model) if isinstance(tensor, nn.Parameter)}
    weights = [(f"{MODEL}.{name}", value) for name, value in state[MODEL].items() if name in trained]
    states = _leaves(state.get(OPTIMIZER, {}).get("state"), f"{OPTIMIZER}.state")
    of_optimizer = [(name, value) for name, value in states if getattr(value, "ndim", 0)]
    for name, value in (*weights, *of_optimizer, *_leaves(state.get(EXTRA), EXTRA)):
        if isinstance(value, (int, float, str, bytes)):
            digests[name] = crc32(repr(value).encode())
        elif type(value) is torch.Tensor and not value.is_meta and _is_cheap(value):
            with contextlib.suppress(RuntimeError):  # sparse and quantised tensors have no plain bytes
                first = value.detach().flatten()[: _COMPARED_NBYTES // value.itemsize].cpu()
                digests[name] = crc32(memory_of(first), crc32(repr(value.shape).encode()))
    return digests


def _is_cheap(value: torch.Tensor) -> bool:
    """True if the first bytes of a tensor can be read without copying all of it."""
    return value.nbytes <= _COMPARED_NBYTES or (value.layout is torch.strided and value.is_contiguous())


def _warn_of_ranks(digests: Iterable[Mapping[str, int]]) -> None:
    """Warn of values that differ between ranks although torch saves only one rank's."""
    values: dict[str, set[int]] = {}
    for name, digest in (item for rank in digests for item in rank.items()):
        values.setdefault(name, set()).add(digest)
    differing = [name for name, several in values.items() if len(several) > 1]
    if differing:
        warnings.warn(
            f"{count(len(differing), 'value differs', 'values differ')} between ranks, and only one rank's is saved: "
            f"{listed(differing)}; of extra, save a list of all ranks' (torch.distributed.all_gather_object)",
            stacklevel=4,
        )


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield (stored name, value) for the values in a state dict's nested containers."""
    if isinstance(value, (dict, list, tuple)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(child, _join_path(name, str(key)))
    else:
        yield name, value


def _start(
    path: str, overwrite: bool, group: dist.ProcessGroup | None, *, leads: bool
) -> tuple[SaveJob | None, str]:
    """Begin the save on rank 0; return its `SaveJob` there (else None), and on all ranks the place to write to."""
    lead: SaveJob | None = None
    try:
        with agreed(_PHASE, group) as exchanged:
            if leads:
                lead = SaveJob(path, overwrite=overwrite)
                exchanged.mine = lead.place
        place = str(exchanged.of_all[0])
        with agreed(_PHASE, group):
            if location_of(place).has_directories and not storage.isdir(place):
                raise ResourceError(
                    f"this rank does not see {escape(place)}, which rank 0 made",
                    hint="save to a file system that all ranks share",
                )
    except BaseException:
        if lead is not None:
            lead.close()
        raise
    return lead, place


def _write(state: State, writer: SaveWriter, group: dist.ProcessGroup | None) -> None:
    """Let torch save. torch raises the failures of all ranks on every rank; each rank reports its own to the others."""
    caught: CheckpointException | None = None
    # Failures of a rank are raised as CheckpointException; a RuntimeError comes from a collective.
    try:
        with warnings.catch_warnings():
            # One process without a group is allowed here.
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            save_distributed(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        caught = error
    except RuntimeError as error:
        raise lost_rank_error(_PHASE, error) from error
    local_error = None
    if caught is not None:
        rank = dist.get_rank(group) if dist.is_initialized() else 0
        local_error = caught.failures.get(rank, (None,))[0]  # Ctrl-C too
    agree(local_error, group, phase=_PHASE)
    if caught is not None:
        raise ShardkitError(f"torch could not save: {str(caught).splitlines()[0]}") from caught


def _describe(
    model: nn.Module,
    writer: SaveWriter,
    aliases: Mapping[str, str],
    form: HubNaming,
    group: dist.ProcessGroup | None,
    asset_files: tuple[manifest.File, ...],
    layout: manifest.SavedLayout | None,
) -> manifest.SavedState:
    """Check the files that all ranks wrote, and return the manifest; `asset_files` are those in `huggingface/`."""
    forget()
    missing = [
        f"{escape(name)}: {size} bytes were written"
        for name, size in sorted(writer.files.items())
        if not _has_bytes(os.path.join(writer.path, name), size)
    ]
    ResourceError.raise_for(
        missing,
        "files that ranks wrote are not in the directory that rank 0 sees",
        hint="save to a file system or a store that all ranks share",
    )
    diagnosis = diagnose(model)
    ties: dict[str, list[str]] = {}
    for alias, kept in aliases.items():
        ties.setdefault(kept, [kept]).append(alias)
    return manifest.SavedState(
        tool=manifest.TOOL,
        model_class=diagnosis.model_class,
        world_size=_world_size(group),
        meshes=tuple(sorted({unit.mesh for unit in diagnosis.units if unit.mesh})),
        units=tuple(manifest.Unit(path=unit.path, class_name=unit.class_name) for unit in diagnosis.units),
        layout=layout,
        ties=tuple(tuple(sorted(group, key=lambda name: name not in form.tied)) for group in ties.values()),
        key_rules=form.key_rules,
        derived=tuple(
            manifest.Derived(name=fqn, made_of=expression) for fqn, expression in form.derived.items()
        )
        or None,
        vocab_size=_vocab_size(model),
        metadata=manifest.describe_bytes(METADATA, writer.metadata(), digest=True, sha256=False),
        files=tuple(
            manifest.SavedFile(name=name, size=storage.getsize(os.path.join(writer.path, name)))
            for name in sorted(writer.files)
        ),
        others=asset_files or None,
    )


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _vocab_size(model: nn.Module) -> int | None:
    """Return the `vocab_size` of a transformers model's config, or None."""
    config = getattr(transformers_model(model), "config", None)
    size = getattr(config.get_text_config(), "vocab_size", None) if config is not None else None
    return size if type(size) is int else None


def _has_bytes(path: str, size: int) -> bool:
    try:
        return storage.getsize(path) >= size
    except OSError:
        return False


@contextlib.contextmanager
def checkpoint_state(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None,
    aliases: Mapping[str, str],
) -> Iterator[State]:
    """Yield the state to save. After the context the model and its optimizers are as before.

    Args:
        model: the model.
        optimizers: its optimizers.
        extra: further values, or None.
        aliases: alias -> first name; aliases are left out.
    """
    weights = get_model_state_dict(model)
    state: State = {
        MODEL: {name: value for name, value in weights.items() if aliases.get(name) not in weights}
    }
    if extra:
        # dcp.save would call `state_dict` only when other ranks are already waiting.
        state[EXTRA] = {
            name: value.state_dict() if isinstance(value, Stateful) else value
            for name, value in extra.items()
        }
    with _temporary_state(optimizers) as new:
        if optimizers:
            state[OPTIMIZER] = get_optimizer_state_dict(model, list(optimizers))
        if new:
            _undo_step_counts(model, state[OPTIMIZER], None if new == list(optimizers) else new)
        yield state


def _undo_step_counts(model: nn.Module, saved: State, new: list[torch.optim.Optimizer] | None) -> None:
    """Undo the changes that the step of `_temporary_state` made to optimizer states: step counts and learning rates.

    The step has a learning rate of 0, which ASGD and Rprop would otherwise use for their first real step.

    Args:
        model: the model.
        saved: the optimizers' state dict.
        new: the optimizers to which this applies; None for all.
    """
    states = saved["state"]
    rates = {name: float(group.get("lr") or 0) for group in saved["param_groups"] for name in group["params"]}
    names = list(states)
    if new is not None:
        stepped = {id(p) for optimizer in new for p in optimizer_parameters(optimizer)}
        names = [name for name, tensor in _state_names(model) if id(tensor) in stepped]
    for name in names:
        state, rate = states.get(name, {}), rates.get(name, 0.0)
        # mu_product is NAdam's, eta ASGD's, step_size Rprop's.
        for key, first in (("step", 0), ("mu_product", 1), ("eta", rate), ("step_size", rate)):
            if key in state:
                state[key] = state[key] * 0 + first


@contextlib.contextmanager
def _temporary_state(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[list[torch.optim.Optimizer]]:
    """Let torch create missing optimizer state in this context, by a step without gradients; remove it afterwards.

    Yields the optimizers without state. If the new state stayed, Adam's first real step would count as its second.

    Source: torch 2.13, torch/distributed/checkpoint/state_dict.py, _init_optim_state. It makes no state if
    there are gradients.
    """
    new = [optimizer for optimizer in optimizers if not optimizer.state]
    parameters = [parameter for optimizer in new for parameter in optimizer_parameters(optimizer)]
    gradients = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield new
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer in new:
            optimizer.state.clear()


def find_aliases(model: nn.Module) -> dict[str, str]:
    """Return alias -> first name for parameters and buffers with several names, as in state dicts."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for fqn, tensor in _state_names(model):
        kept = first.setdefault(id(tensor), fqn)
        if kept != fqn:
            aliases[fqn] = kept
    for path, module in _state_paths(model):  # modules may lack the parameters in FSDP1's flat parameters
        unit = fsdp1_unit(module) if isinstance(module, FullyShardedDataParallel) else None
        for name, kept in unit.shared if unit else ():
            aliases[clean_name(_join_path(path, name))] = clean_name(_join_path(path, kept))
    return aliases


def _state_names(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for parameters and persistent buffers, with all names, as in torch's model state dicts."""
    tensors = module_places(_state_paths(model))
    return ((place.fqn, place.tensor) for place in tensors if place.persistent)


def _state_paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for all modules with all their paths, without the segments that wrappers and DDP add."""
    inside: dict[str, str] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        holder, _, name = path.rpartition(".")
        is_wrapped = path and isinstance(modules[holder], DistributedDataParallel)
        inside[path] = inside[holder] if is_wrapped else _join_path(inside.get(holder, ""), name)
        yield clean_name(inside[path]), module


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


class SaveWriter(FileSystemWriter):
    """torch's writer for a directory, with the aliases of tensors added to `.metadata`.

    Args:
        path: the directory.
        aliases: alias -> first name, as in the model.
        files: the file system that creates the files.
    """

    def __init__(self, path: str, aliases: Mapping[str, str], files: FileSystem) -> None:
        # torch syncs a file by its descriptor. A file in a store has none, and torch would then sync the whole machine.
        self._sends = location_of(path).sends
        super().__init__(path, sync_files=not self._sends)
        self.fs, self.path = files, path if self._sends else self.path
        self.files: dict[str, int] = {}
        """File -> end of its last record; known on the rank that writes `.metadata`."""
        self.folder_metadata = b""
        """In a store, a `.metadata` that could be put into the folder of the files."""
        self._aliases = {f"{MODEL}.{name}": f"{MODEL}.{kept}" for name, kept in aliases.items()}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        return write_with_retries(self.fs, plan, partial(super().write_data, plan, planner))

    def metadata(self) -> bytes:
        """Return the `.metadata` that `finish` has written."""
        return read_metadata(self.fs, str(self.path))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, with aliases."""
        for written in (result for rank in results for result in rank):
            stop = written.storage_data.offset + written.storage_data.length
            name = written.storage_data.relative_path
            self.files[name] = max(stop, self.files.get(name, 0))
        results = [*results, self._copies(metadata, results)]
        pickle_without_strides(metadata)
        if self._sends:
            super().finish(metadata, results)
            self.folder_metadata = self.metadata()
            results = [[_in_folder(item, os.path.basename(self.path)) for item in rank] for rank in results]
        super().finish(metadata, results)

    def _copies(self, metadata: Metadata, results: list[list[WriteResult]]) -> list[WriteResult]:
        """Add aliases to the metadata, and return a copy of their tensors' records under each alias."""
        by_name: dict[str, list[WriteResult]] = {}
        for written in (result for rank in results for result in rank):
            by_name.setdefault(written.index.fqn, []).append(written)
        copies = []
        for alias, kept in self._aliases.items():
            if kept not in metadata.state_dict_metadata or alias in metadata.state_dict_metadata:
                continue
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[kept]
            metadata.planner_data[alias] = (MODEL, alias.removeprefix(f"{MODEL}."))
            copies += [
                replace(result, index=MetadataIndex(alias, result.index.offset, result.index.index))
                for result in by_name[kept]
            ]
        return copies


def _in_folder(written: WriteResult, folder: str) -> WriteResult:
    """Return a record with its path as seen from the directory above the folder."""
    stored = written.storage_data
    return replace(written, storage_data=replace(stored, relative_path=f"{folder}/{stored.relative_path}"))
