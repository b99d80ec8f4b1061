"""The third phase of starting a model: allocate this rank's shards, fill them, and prove that the model is complete.

`finalize` does this for a model from `prepare`, `load_into` for any other model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import fsdp_shards
from shardkit.core.factored import Target
from shardkit.core.keywords import suggests_keywords
from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError, LayoutError, ResourceError, SourceError
from shardkit.files import storage
from shardkit.files.links import may_follow_links
from shardkit.keys.names import clean_name
from shardkit.keys.rule_sets import load_rules
from shardkit.layout.classes import broken_ties
from shardkit.osft.training.model import Factoring, own_targets
from shardkit.training.extras.optimizer import rebind_optimizer
from shardkit.training.fill.from_rank import RankSource, check_sources
from shardkit.training.fill.reading import Filled, Supply, Weights, log_checked
from shardkit.training.fill.source import Source, find_weights, has_factors, open_source, remember
from shardkit.training.fill.strategy import ReadOptions, SourceRank, Strategy, fill_shards, plan_fill
from shardkit.training.kept import remember_files
from shardkit.training.model.between import (
    check_hidden,
    compare_parameters,
    forget_hidden,
    refuse_other_context,
    warn_of_restored_buffers,
)
from shardkit.training.model.buffers import (
    class_buffers,
    compute_buffers,
    equalise_buffers,
    memory_for_buffers,
    meta_attributes,
    restore_buffers,
    retie,
    unlike_computed,
)
from shardkit.training.model.fit import (
    ModelInitializationContext,
    check_fit,
    check_ties,
    check_untied,
    supply_of,
)
from shardkit.training.model.initialise import fill_initialised, put_rows
from shardkit.training.model.overlap import copy_back, refuse_expanded, with_own_memory
from shardkit.training.model.states import extra_states, read_states, set_extra_states, states_to_read
from shardkit.training.ranks.agree import (
    agreed,
    current_device,
    gather_json,
    log_once,
    run_where_possible,
    shown_once,
    world,
)
from shardkit.training.ranks.listings import share_listings
from shardkit.training.ranks.local import (
    ExpectedTensor,
    LocalShard,
    buffer_places,
    describe_tensors,
    local_shards,
    materialise,
    refuse_fsdp1,
    refuse_lazy,
    reshard,
)
from shardkit.training.ranks.stages import tensors_of_other_ranks, used_elsewhere, with_tied_names

_OPENING = "opening the source"
_FITTING = "comparing the source with the model"
_APART = "make them one parameter, or give each its memory: parameter.data = parameter.data.clone()"
_SLACK_NBYTES = 4096  # an allocator's rounding


@suggests_keywords
def finalize(
    model: nn.Module,
    ctx: ModelInitializationContext,
    *,
    strategy: Strategy = "auto",
    source_rank: SourceRank = "global",
    device: torch.device | str | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    check_source: bool = True,
) -> nn.Module:
    """Give a prepared and wrapped model its weights; every rank calls it.

    Args:
        model: the result of `wrap`, or `ctx.model` wrapped by other code.
        ctx: the result of `prepare`.
        strategy: "direct": every rank reads its own shards. "broadcast": source ranks read, and send to each rank
            only its own shards. "auto": direct, if every rank can open the source and sees the same weights.
        source_rank: which ranks read with broadcast: "global", one for all ranks; "node", one on each host, for the
            ranks there; "replica", one for each replica of an HSDP mesh.
        device: for parameters and buffers; None for the device type of the mesh.
        optimizer: one or several that were created before the model was wrapped. Their parameters are replaced by
            those that the model has now, as `rebind_optimizer` does. Afterwards each optimizer steps every
            parameter once; otherwise an error is raised.
        check_source: compare the data that all ranks read with the CRC-32s that the source's files record;
            `ctx.checked` has the amount compared. With False damaged data is used, with a warning.

    Returns:
        The model: every parameter is filled once, nothing is on meta, tied parameters are one object, and buffers
        are equal on all ranks.

    Raises:
        UsageError: the strategy is unknown, the model is wrapped by FSDP1, or another context prepared it. Or an
            optimizer has one parameter several times, or another model's, and has no names to identify the right
            ones.
        LayoutError, IntegrityError: the wrapped model differs from the prepared one, the source does not fit it,
            or its bytes do not have the recorded checksums.
        SourceError, ResourceError: the source cannot be read. All errors are raised on all ranks and name the
            ranks that failed.
    """
    with agreed("looking at the wrapped model"):
        refuse_fsdp1(model)
        refuse_other_context(model, ctx)
        options = ReadOptions(strategy=strategy, source_rank=source_rank, check_source=check_source)
        reshard(model)
        place = _device(model, device)
        warn_of_restored_buffers(model, ctx)
        restore_buffers(model, ctx.buffers, place)
        retie(model, ctx.ties)
        check_hidden(model, ctx)
        materialise(model, place)
        for one in (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ():
            rebind_optimizer(model, one)
        shards = with_tied_names(local_shards(model), ctx.ties)
    compare_parameters([(shard.names, shard.whole.requires_grad) for shard in shards], ctx)
    filled, filled_shards = Filled(), shards
    if ctx.source is not None:
        filled_shards = [*shards, *read_states(model, ctx)]
        with plan_fill(filled_shards, supply_of(ctx), options) as plan:
            filled = fill_shards(filled_shards, plan)
            filled.add(ctx.factoring.fill(filled_shards, plan))
        ctx.checked = filled.checked
        log_checked(filled.checked, check_source=check_source)
    with agreed("initialising parameters"):
        fill_initialised(shards, ctx, filled)
    _check_filled(model, shards, filled, ctx, filled_shards)
    remember(model, ctx.weights)
    return model


@suggests_keywords
@may_follow_links
@storage.listed_once()
def load_into(
    model: nn.Module,
    source: str | os.PathLike[str] | RankSource,
    *,
    strategy: Strategy = "auto",
    source_rank: SourceRank = "global",
    device: torch.device | str | None = None,
    keys: str | os.PathLike[str] | None = None,
    dequantize: bool = False,
    follow_links: bool = False,
    check_source: bool = True,
) -> nn.Module:
    """Fill a model, wrapped in any way or not at all, from any source; every rank calls it.

    Args:
        model: on meta, or with values, which are overwritten in place. OSFT factors, of any library, are computed if
            the source has dense weights. Buffers that are in no checkpoint are computed if they are on meta.
            Otherwise they must have their values already, which `to_empty()` destroys. A warning names those of a
            transformers model that differ from the values that its class computes. If such a buffer is in the
            model's state dict but not in the source, it gets the computed value.
        source: Hub directory or id, pre-sharded directory, or any sharded checkpoint; or `from_rank(...)`.
        strategy: as for `finalize`.
        source_rank: as for `finalize`.
        device: for parameters that are on meta; None for the device type of the mesh.
        keys: as for `prepare`.
        dequantize: as for `prepare`.
        follow_links: follow links that leave a checkpoint's directory. Links of a Hub model's weight files are
            always followed.
        check_source: as for `finalize`.

    Returns:
        The model.

    Raises:
        ShardkitError: as for `finalize`.
    """
    with agreed("looking at the model"):
        refuse_fsdp1(model)
        refuse_lazy(model)
        options = ReadOptions(strategy=strategy, source_rank=source_rank, check_source=check_source)
        reshard(model)
        place = _device(model, device)
        if any(buffer.tensor.is_meta for buffer in buffer_places(model)):
            compute_buffers(model, None)
        restore_buffers(model, memory_for_buffers(model, place), place)
        forget_hidden(model)
        materialise(model, place)
        shards = local_shards(model)
        refuse_expanded(shards)
        computed = class_buffers(model)
        unlike = unlike_computed(model, computed)
        hidden = {name for shard in shards if not shard.persistent for name in shard.names}
        _say_unlike_computed([fqn for fqn in unlike if fqn in hidden])
    supply, factoring = _open(model, source, keys, dequantize=dequantize, computed=computed)
    states, _ = states_to_read(model, supply.weights)
    filled_shards = [*with_own_memory(shards), *states]
    with plan_fill(filled_shards, supply, options) as plan:
        filled = fill_shards(filled_shards, plan)
        filled.add(factoring.fill(filled_shards, plan))
    log_checked(filled.checked, check_source=check_source)
    missing_buffers = {fqn: value for fqn, value in computed.items() if fqn in supply.initialised}
    _fill_computed(filled_shards, missing_buffers, unlike, filled)
    _check_filled(model, shards, filled, None, filled_shards)
    remember(model, supply.weights)
    remember_files(model, (), supply.weights)
    return model


def _open(
    model: nn.Module,
    source: str | os.PathLike[str] | RankSource,
    keys: str | os.PathLike[str] | None,
    *,
    dequantize: bool,
    computed: Collection[str],
) -> tuple[Supply, Factoring]:
    """Open a source for a live model, and compare the two.

    If only some ranks can open it, the `Supply` of the others has the reason.

    Args:
        model: this rank's model.
        source, keys, dequantize: as for `load_into`.
        computed: FQNs of buffers that the source may lack.

    Returns:
        The weights that fill the model, and the factors that are computed from them.
    """
    expected, ties = describe_tensors(model)
    local_targets = own_targets(model)
    check_sources(source)
    is_read_elsewhere = not isinstance(source, RankSource) or not source.is_here

    @cache
    def open_given() -> Source:
        path = source if isinstance(source, RankSource) else os.fspath(source)
        return open_source(path, dequantize=dequantize)

    def look() -> tuple[Weights, Factoring]:
        opened = open_given()
        rules = None if keys is None else load_rules(keys)
        is_dense = bool(local_targets) and not has_factors(opened)
        factoring = Factoring(targets=local_targets, svd="exact") if is_dense else Factoring()
        expected_tensors = {**factoring.read(expected), **extra_states(model)}
        return find_weights(opened, expected_tensors, ties, model=model, rules=rules), factoring

    share_listings((source,), open_given)
    seen, error, able = run_where_possible(
        look,
        lambda error: is_read_elsewhere and isinstance(error, (SourceError, ResourceError)),
        phase=_OPENING,
    )
    weights, factoring = seen or (None, Factoring())
    factoring = _same_factoring(factoring, local_targets)
    used, unused = (weights.stored_names(), weights.unused) if weights is not None else ((), ())
    elsewhere, are_stages = used_elsewhere(frozenset(used), frozenset(unused))
    if weights is not None and are_stages:
        weights = replace(weights, identity=weights.source_identity, sampled_files=0)
    absent_names = frozenset[str]()
    with agreed(_FITTING) as exchanged:
        if weights is not None:
            check_untied(broken_ties(model), weights)
            needed = factoring.read(expected)
            absent_names = check_fit(
                needed, ties, weights, initialises=False, elsewhere=elsewhere, computed=computed
            ).initialised
            if world()[0] == able[0]:  # only this rank reads tied tensors that are stored separately
                check_ties(ties, weights)
        exchanged.mine = sorted(absent_names)
    if weights is None:
        absent_names = frozenset(name for names in exchanged.of_all for name in names)
    unavailable = None if error is None else str(error)
    initialised = absent_names | factoring.computed
    return Supply(weights=weights, unavailable=unavailable, initialised=initialised), factoring


@shown_once()
def _same_factoring(mine: Factoring, local_targets: tuple[Target, ...]) -> Factoring:
    """Return the factors to compute for a live model, as found by ranks that see the source; every rank calls it.

    Raises:
        LayoutError: on all ranks: their targets differ, as is the case with pipeline stages.
    """
    answers = gather_json(
        [mine.svd, [asdict(target) for target in local_targets]], phase="comparing the ranks' models"
    )
    svd = next((mode for mode, _ in answers if mode is not None), None)
    if svd is not None and any(targets != answers[0][1] for _, targets in answers):
        raise LayoutError(
            "the ranks' models have other OSFT targets than each other, and the source has dense weights",
            hint="OSFT has no stages of a pipeline (pp): give a checkpoint with factors, as save writes it without pp",
        )
    return Factoring() if svd is None else Factoring(targets=local_targets, svd=svd)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device for buffers: the user's, the mesh's, or else the one of the parameters."""
    if device is not None:
        return torch.device(device)
    parameters = list(model.parameters())
    kind = next((p.device_mesh.device_type for p in parameters if isinstance(p, DTensor)), None)
    if kind is None:
        return next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
    return current_device(kind)


def _say_unlike_computed(buffers: Sequence[str]) -> None:
    if buffers:
        log_once(
            f"{'1 buffer is' if len(buffers) == 1 else f'{len(buffers)} buffers are'} in no checkpoint, and not what the "
            f"model's class computes: {listed(buffers)}. After to_empty() buffers hold whatever memory held; leave the "
            "model on meta, or put their values back",
            logging.WARNING,
        )


def _fill_computed(
    shards: Sequence[LocalShard],
    missing_buffers: Mapping[str, torch.Tensor],
    unlike: Collection[str],
    filled: Filled,
) -> None:
    """Give buffers that the source lacks the values that the model's class computes.

    Args:
        shards: this rank's shards.
        missing_buffers: name of each such buffer -> computed value.
        unlike: names of buffers that have other values now.
        filled: counter to which the buffers' elements are added.
    """
    for shard in shards:
        name = next((name for name in shard.names if name in missing_buffers), None)
        if name in unlike and name is not None:
            put_rows(shard, missing_buffers[name], 0, filled)
        elif name is not None:
            filled.elements[shard.fqn] += shard.num_elements
    changed = [name for name in missing_buffers if name in unlike]
    if missing_buffers:
        log_once(
            f"weights: not in the source, buffers that the model's class computes: {listed(missing_buffers)}"
        )
    if changed:
        log_once(
            f"weights: these held other values than the class computes, and have those now: {listed(changed)}",
            logging.WARNING,
        )


def _check_filled(
    model: nn.Module,
    shards: Sequence[LocalShard],
    filled: Filled,
    ctx: ModelInitializationContext | None,
    filled_shards: Sequence[LocalShard],
) -> None:
    """Check that the filled model is complete; raise an IntegrityError on all ranks if it is not.

    Args:
        model: the whole model.
        shards: this rank's shards of it.
        filled: the numbers of elements that were filled.
        ctx: the context of a prepared model, or None.
        filled_shards: the shards that were filled. They replace those of `shards` that share memory, and include extra
            states of modules.
    """
    differing = equalise_buffers(model)
    elsewhere = frozenset[str]() if ctx is None else tensors_of_other_ranks(shards, ctx.expected)
    with agreed("proving the filled model"):
        changed = "a wrapper has changed it between prepare and finalize" if ctx is not None else None
        clashes = copy_back(shards, filled_shards)
        problems = [*clashes, *filled.problems(filled_shards), *_on_meta(model)]
        if ctx is not None:
            problems += [*_unlike_expected(shards, ctx.expected, elsewhere), *_too_large(model, shards)]
        problems += [f"{escape(fqn)}: the buffer differs between ranks" for fqn in differing]
        IntegrityError.raise_for(
            problems,
            f"the filled model is not as it should be in {count(len(problems), 'place')}",
            hint=_APART if clashes else changed,
        )
        set_extra_states(model, filled_shards)


def _on_meta(model: nn.Module) -> Iterator[str]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            yield f"{escape(clean_name(name))}: parameter or buffer still on meta"
    for attribute in meta_attributes(model):
        yield f"{escape(attribute.fqn)}: tensor attribute still on meta"


def _unlike_expected(
    shards: Sequence[LocalShard], expected: Mapping[str, ExpectedTensor], elsewhere: Collection[str]
) -> Iterator[str]:
    shards_by_name = {name: shard for shard in shards for name in shard.names}
    for fqn, plan in expected.items():
        shard = shards_by_name.get(fqn)
        if shard is None:
            if fqn not in elsewhere:
                yield f"{escape(fqn)}: was prepared and is not in the wrapped model"
            continue
        # `wrap` casts non-persistent buffers to the compute dtype.
        if shard.dtype != plan.dtype and (plan.persistent or plan.kind == "parameter"):
            yield f"{escape(fqn)}: is {shard.dtype}, should be {plan.dtype}"
        if shard.shape != plan.shape:
            yield f"{escape(fqn)}: has {list(shard.shape)}, should have {list(plan.shape)}"
        if shard.persistent != plan.persistent:
            yield f"{escape(fqn)}: is {_in_state(shard.persistent)}, should be {_in_state(plan.persistent)}"
    for shard in shards:
        if not any(name in expected for name in shard.names):
            yield f"{escape(shard.fqn)}: is in the wrapped model and was not prepared"


def _in_state(persistent: bool) -> str:
    return "in the state dict" if persistent else "not in the state dict"


def _too_large(model: nn.Module, shards: Sequence[LocalShard]) -> Iterator[str]:
    """Yield a problem for each shard whose memory is larger than the shard, such as a view of a whole tensor."""
    padded = {
        id(shard.param): torch.Size(shard.padded_sizes).numel() * shard.param.itemsize
        for shard in fsdp_shards(model)
    }
    for shard in shards:
        local = shard.tensor
        if not isinstance(shard.whole, DTensor) or local.is_meta or type(local) is not torch.Tensor:
            continue
        allowed = padded.get(id(shard.whole), local.nbytes) + _SLACK_NBYTES
        if local.untyped_storage().nbytes() > allowed:
            yield (
                f"{escape(shard.fqn)}: {local.untyped_storage().nbytes()} bytes are kept for a part of {local.nbytes}"
            )
