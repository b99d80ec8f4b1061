"""The first phase: a model without weights, its source opened and held against it, on all ranks alike."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardkit._torch import non_persistent_buffers, times_written
from shardkit.core.text import count, escape, listed
from shardkit.errors import LayoutError, ResourceError, ShardkitError, UsageError
from shardkit.files.links import may_follow_links
from shardkit.formats.hub.directory import read_config, read_index
from shardkit.layout.classes import BrokenTie, broken_ties, tie
from shardkit.training.model.buffers import InitBuffers
from shardkit.training.model.build import MULTIPLE, BuildModel, align_vocab, build_model, find_config
from shardkit.training.model.fit import Fit, Missing, check_fit, check_ties, check_untied, diverged_ties
from shardkit.training.model.initialise import not_repeated
from shardkit.training.ranks.agree import agree, gather_json
from shardkit.training.ranks.context import ExpectedTensor, ModelInitializationContext, Weights, clean_name
from shardkit.training.source.from_rank import RankSource, check_sources
from shardkit.training.source.weights import first_dtype, open_weights

_WEIGHT_FILES = (".safetensors", ".bin", ".distcp", ".pt", ".pth", ".ckpt", ".metadata", ".json")
_T = TypeVar("_T")

_log = logging.getLogger("shardkit")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plain:
    """A model before it has a source."""

    model: nn.Module
    expected: Mapping[str, ExpectedTensor]
    ties: tuple[tuple[str, ...], ...]
    grown: Mapping[str, int]
    """FQN -> rows before the vocabulary was aligned."""
    writes: Mapping[str, int]
    """FQN -> how often each parameter was written while the model was built."""
    retied: tuple[BrokenTie, ...]
    """What was several parameters of the given model, and is one as its class has it."""

    def digest(self, seed: int, missing: Missing, *, has_source: bool) -> str:
        """Return what must be the same on all ranks."""
        tensors = [(t.fqn, t.shape, str(t.dtype), t.kind, t.persistent) for t in self.expected.values()]
        content = [
            tensors,
            self.ties,
            dict(self.grown),
            seed,
            missing if isinstance(missing, str) else sorted(missing),  # a set has another order on each rank
            has_source,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What a rank found."""

    weights: Weights | None = None
    fit: Fit | None = None
    absent: ShardkitError | None = None
    """It is not here; it may be elsewhere."""
    untied: tuple[str, ...] = ()
    """FQNs that the model ties and whose values in the source are others."""


@may_follow_links
def prepare(
    build_model: BuildModel,
    source: str | os.PathLike[str] | RankSource | None,
    *,
    dtype: torch.dtype | str | None = None,
    tokenizer: Sized | int | None = None,
    align_vocab: bool | int | None = None,
    missing: Missing = "error",
    seed: int = 0,
    init_buffers: InitBuffers | None = None,
    revision: str | None = None,
    variant: str | None = None,
    trust_remote_code: bool = False,
    follow_links: bool = False,
) -> ModelInitializationContext:
    """Build a model without memory for its weights, and hold its source against it; each rank must call it.

    Args:
        build_model: a function that returns the model, a directory with config.json or a repo id, or a model on meta.
        source: a Hub directory or repo id, a pre-sharded directory, or any sharded checkpoint; `from_rank(...)` for
            a state dict in the memory of one rank; None initialises every tensor, whole, the same in any world.
        dtype: of floating parameters; None keeps the model's own: what its config says, else what is stored. What its
            class makes fp32 stays so, as in `from_pretrained`. Values are converted as they are read.
        tokenizer: embeddings become as long as it needs; or the number of its tokens.
        align_vocab: False leaves embeddings alone; a number rounds their rows up to a multiple of it, True and None
            to one of 8.
        missing: what to do about tensors that the source lacks: "error"; "init" initialises them, unless they look
            renamed; globs over FQNs initialise what they match.
        seed: of what is initialised.
        init_buffers: computes the buffers of a model on meta.
        revision: branch, tag or commit, where the source is a repo id; of the model too where it is the same one.
        variant: "fp16" takes `model.fp16.safetensors`.
        trust_remote_code: the model's own code may run.
        follow_links: links that lead out of a checkpoint's directory are read as the files that they lead to.
            Weight files of a Hub model are read in any case.

    Returns:
        Context for `finalize`; its `model` is to be wrapped. A rank that has no source while others do says so in
        `unavailable`.

    Raises:
        LayoutError: model and source differ, every difference listed; or buffers that nothing computes.
        SourceError: the source is damaged, or nobody has it.
        UsageError: options that contradict each other.
        All on all ranks, and naming those that failed.
    """
    if dtype is None and isinstance(build_model, (str, os.PathLike)):
        dtype = _stored_dtype(build_model, source, revision, variant)
    plain = _together(
        lambda: _build(
            build_model,
            dtype=dtype,
            init_buffers=init_buffers,
            revision=revision if isinstance(build_model, str) and build_model == source else None,
            trust_remote_code=trust_remote_code,
            seed=seed,
            tokenizer=tokenizer,
            align=align_vocab,
        ),
        "building the model",
    )
    source = _together(lambda: _given(source, revision, variant), "opening the source")
    check_sources(source)
    found = _open_together(plain, source, missing, seed, revision, variant)
    fit = found.fit
    assert fit is not None
    if found.untied:
        plain = _untie(plain, found.untied)
    buffers = {fqn: value for fqn, value in _buffers(plain.model).items() if not value.is_meta}
    _together(lambda: _refuse_uncomputed(plain, buffers, fit), "checking buffers")
    blueprint = _blueprint(plain.model) if fit.initialised or fit.grown else None
    if blueprint is not None:
        _warn_not_repeated(blueprint, plain, fit)
    notes = (
        *(() if isinstance(build_model, (str, os.PathLike)) else _tied_notes(plain, found.untied)),
        *_grown_notes(fit.grown, plain),
        *_untied_notes(found.untied),
        *(found.weights.notes if found.weights else ()),
        *fit.notes,
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        for note in notes:
            _log.info("prepare: %s", note)
    return ModelInitializationContext(
        model=plain.model,
        source=source,
        weights=found.weights,
        unavailable=str(found.absent) if found.absent is not None else None,
        expected=dict(plain.expected),
        ties=plain.ties,
        initialised=fit.initialised,
        grown=dict(fit.grown),
        seed=seed,
        blueprint=blueprint,
        buffers=buffers,
        notes=notes,
    )


def _given(
    source: str | os.PathLike[str] | RankSource | None, revision: str | None, variant: str | None
) -> str | RankSource | None:
    if isinstance(source, RankSource):
        if revision is not None or variant is not None:
            raise UsageError("revision and variant are of files: a state dict has none")
        return source
    return None if source is None else os.fspath(source)


def _stored_dtype(
    model: str | os.PathLike[str],
    source: str | os.PathLike[str] | RankSource | None,
    revision: str | None,
    variant: str | None,
) -> str | None:
    """Return the dtype of stored weights, for a model whose config says none: its own, or else the source's."""

    def look() -> str | None:
        try:
            directory = find_config(os.fspath(model), revision if model == source else None)
            config = read_config(directory) or {}
        except ShardkitError:  # building the model says so
            return None
        if any(config.get(key) is not None for key in ("dtype", "torch_dtype")):
            return None
        own = first_dtype(directory, variant=variant) if os.path.exists(model) else None
        if own is not None or not isinstance(source, (str, os.PathLike, RankSource)):
            return own
        is_here = not isinstance(source, RankSource) or source.is_here
        return first_dtype(source, revision=revision, variant=variant) if is_here else None

    found = gather_json(_together(look, "reading the config"), phase="reading the config")
    return next((each for each in found if each is not None), None)  # a rank may not see the source


def _together(work: Callable[[], _T], phase: str) -> _T:
    """Do something on every rank; raise on all where any fails."""
    result: list[_T] = []
    error: BaseException | None = None
    try:
        result.append(work())
    except BaseException as caught:
        error = caught
    agree(error, phase=phase)
    return result[0]


def _build(
    what: BuildModel, *, tokenizer: Sized | int | None, align: bool | int | None, **options: Any
) -> _Plain:
    model = build_model(what, **options)
    retied = tuple(tie(model))
    if align and tokenizer is None:
        raise UsageError("align_vocab is given without a tokenizer", hint="give tokenizer= too")
    grown: dict[str, int] = {}
    if tokenizer is not None and align is not False:
        grown = align_vocab(model, tokenizer, multiple=MULTIPLE if align in (None, True) else int(align))
    expected, ties = describe(model)
    tied = {name for group in ties for name in group}  # written by each of their modules
    named = ((clean_name(name), param) for name, param in model.named_parameters())
    writes = {fqn: times_written(param) for fqn, param in named if fqn not in tied}
    return _Plain(model=model, expected=expected, ties=ties, grown=grown, writes=writes, retied=retied)


def describe(model: nn.Module) -> tuple[dict[str, ExpectedTensor], tuple[tuple[str, ...], ...]]:
    """Return every parameter and buffer of a plain model by its first name, and the groups of names that share one."""
    names: dict[int, list[str]] = {}
    first: dict[int, ExpectedTensor] = {}
    stored: set[int] = set()  # a buffer under several names may be persistent under any of them
    for path, module in model.named_modules(remove_duplicate=False):
        hidden = non_persistent_buffers(module)
        own: list[tuple[str, torch.Tensor]] = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own:
            fqn = clean_name(f"{path}.{name}" if path else name)
            names.setdefault(id(tensor), []).append(fqn)
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter or name not in hidden:
                stored.add(id(tensor))
            first.setdefault(
                id(tensor),
                ExpectedTensor(
                    fqn=fqn,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    kind="parameter" if is_parameter else "buffer",
                    persistent=False,
                ),
            )
    ordered = sorted(first, key=lambda key: first[key].kind != "parameter")
    ties = (tuple(dict.fromkeys(names[key])) for key in ordered)
    found = {first[key].fqn: replace(first[key], persistent=key in stored) for key in ordered}
    return found, tuple(group for group in ties if len(group) > 1)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_buffers(remove_duplicate=False)
    return {clean_name(name): buffer.detach().clone() for name, buffer in named}


def _open_together(
    plain: _Plain,
    source: str | RankSource | None,
    missing: Missing,
    seed: int,
    revision: str | None,
    variant: str | None,
) -> _Source:
    """Open the source on every rank that has it; the others learn from those what is read and what initialised."""
    found, error = _Source(), None
    try:
        found = _open(plain, source, missing, revision, variant)
    except BaseException as caught:
        error = caught
    told = gather_json(
        {
            "has": found.weights is not None,
            "failed": error is not None,
            "digest": plain.digest(seed, missing, has_source=source is not None),
        },
        phase="opening the source",
    )
    if error is None and any(each["digest"] != told[0]["digest"] for each in told):
        error = LayoutError(
            "the ranks do not have the same model, seed or options",
            hint="build the model, and call prepare, the same way on every rank; one that does not see the source"
            " gives its path all the same",
        )
    untied = list[str]()
    holders = [rank for rank, each in enumerate(told) if each["has"]]
    if error is None and not holders and not any(each["failed"] for each in told):
        error = found.absent
    here = dist.get_rank() if len(told) > 1 else 0
    if error is None and holders and here == holders[0] and found.weights is not None:
        error = _caught(lambda source=found: untied.extend(_untied(plain, source)))  # type: ignore[misc]
    agree(error, phase="opening the source")
    if holders:
        found = replace(found, untied=tuple(gather_json(untied, phase="opening the source")[holders[0]]))
    if source is not None and len(holders) < len(told):
        mine = _fit_to_json(found.fit) if here == holders[0] else None
        shared = gather_json(mine, phase="opening the source")[holders[0]]
        found = replace(found, fit=found.fit or _fit_from_json(shared))
    return found


def _untied(plain: _Plain, source: _Source) -> list[str]:
    """Return the names that `from_pretrained` would untie, because the source has two values for one parameter."""
    assert source.weights is not None
    if not source.weights.follows_class or plain.grown:
        check_ties(plain.ties, source.weights)
        return []
    return [fqn for _, _, fqn in diverged_ties(plain.ties, source.weights)]


def _untie(plain: _Plain, fqns: Sequence[str]) -> _Plain:
    """Give names of a tied parameter one of their own.

    Source: transformers 5.23, PreTrainedModel.tie_weights.
    """
    model = plain.model
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if clean_name(f"{path}.{name}" if path else name) in fqns:
                own = nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad)
                setattr(module, name, own)
    for module in model.modules():
        tied = getattr(module, "all_tied_weights_keys", None)
        if isinstance(tied, dict):
            for name in [name for name in tied if any(f".{fqn}".endswith(f".{name}") for fqn in fqns)]:
                del tied[name]
    expected, ties = describe(model)
    return replace(plain, expected=expected, ties=ties)


def _tied_notes(plain: _Plain, untied: Sequence[str]) -> list[str]:
    tied = [f"{other} to {kept}" for kept, other in plain.retied if not {kept, other} & set(untied)]
    return [f"tied, as the model's class has it: {listed(tied)}"] if tied else []


def _untied_notes(fqns: Sequence[str]) -> list[str]:
    return [f"not tied, the source has values of their own for them: {listed(fqns)}"] if fqns else []


def _caught(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


def _open(
    plain: _Plain,
    source: str | RankSource | None,
    missing: Missing,
    revision: str | None,
    variant: str | None,
) -> _Source:
    if source is None:
        check_untied(broken_ties(plain.model), None)
        every = frozenset(fqn for fqn, tensor in plain.expected.items() if tensor.persistent)
        return _Source(fit=Fit(initialised=every, notes=("no source: every tensor is initialised",)))
    if isinstance(source, RankSource) and not source.is_here:
        return _Source(absent=source.elsewhere())
    try:
        weights = open_weights(
            source, plain.expected, plain.ties, model=plain.model, revision=revision, variant=variant
        )
    except ShardkitError as error:
        if not isinstance(source, RankSource) and (isinstance(error, ResourceError) or _is_absent(source)):
            return _Source(absent=error)
        raise
    check_untied(broken_ties(plain.model), weights)
    fit = check_fit(plain.expected, plain.ties, weights, missing=missing, grown=plain.grown)
    return _Source(weights=weights, fit=fit)


def _is_absent(source: str) -> bool:
    """True where a path does not exist, holds no weights, or lacks files that its index lists: nothing is damaged."""
    try:
        if not os.path.exists(source):
            return True
        if not os.path.isdir(source):
            return False
        files = [name for _, _, names in os.walk(source) for name in names if name.endswith(_WEIGHT_FILES)]
        if all(name.endswith(".json") for name in files):
            return True
        for name in os.listdir(source):
            if name.endswith(".index.json"):
                listed = read_index(os.path.join(source, name), name).files
                return any(not os.path.exists(os.path.join(source, file)) for file in listed)
    except (OSError, ShardkitError):
        pass
    return False


def _fit_to_json(fit: Fit | None) -> dict[str, Any]:
    assert fit is not None
    return {"initialised": sorted(fit.initialised), "grown": dict(fit.grown), "notes": fit.notes}


def _fit_from_json(content: Mapping[str, Any]) -> Fit:
    return Fit(
        initialised=frozenset(content["initialised"]), grown=content["grown"], notes=tuple(content["notes"])
    )


def _refuse_uncomputed(plain: _Plain, buffers: Mapping[str, torch.Tensor], fit: Fit) -> None:
    """Refuse buffers that neither the model computes nor the source has."""
    lost = [
        fqn
        for fqn, tensor in plain.expected.items()
        if tensor.kind == "buffer" and fqn not in buffers and fqn in fit.initialised
    ]
    if lost:
        raise LayoutError(
            f"{count(len(lost), 'buffer')} of the model are on meta, nothing computes them, and they are not read",
            problems=[escape(fqn) for fqn in lost],
            hint="give a function that builds the model, or init_buffers=fn that computes them",
        )


def _warn_not_repeated(blueprint: nn.Module, plain: _Plain, fit: Fit) -> None:
    lost = not_repeated(blueprint, plain.writes, fit.initialised)
    if lost and (not dist.is_initialized() or dist.get_rank() == 0):
        _log.warning(
            "initialised by reset_parameters and _init_weights alone, though other code of the model writes them too: %s;"
            " move that code into _init_weights(module) of the model",
            listed(lost),
        )


def _grown_notes(grown: Mapping[str, int], plain: _Plain) -> Sequence[str]:
    return [
        f"{escape(fqn)}: {rows} rows in the source, {plain.expected[fqn].shape[0]} in the model; the rest is initialised"
        for fqn, rows in grown.items()
    ]


def _blueprint(model: nn.Module) -> nn.Module:
    """Return a copy of a model that is on meta altogether, whatever is done to the model itself."""
    memoryless: dict[int, Any] = {
        id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()
    }
    return copy.deepcopy(model, memoryless)
