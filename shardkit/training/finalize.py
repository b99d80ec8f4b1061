"""The third phase: memory for this rank's shards, their values, and the proof that all is as promised."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import fsdp_shards
from shardkit.core.regions import Region, relative_to
from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError, LayoutError, ResourceError, SourceError, UsageError
from shardkit.files.links import may_follow_links
from shardkit.keys.names import clean_name
from shardkit.layout.classes import broken_ties
from shardkit.operations.keys import load_rules
from shardkit.osft.plan import Target
from shardkit.training.fill.broadcast import fill_broadcast
from shardkit.training.fill.direct import divide, fill_direct, regions_of
from shardkit.training.fill.factorise import fill_factors
from shardkit.training.fill.from_rank import RankSource, check_sources
from shardkit.training.fill.reading import (
    Filled,
    ReadOptions,
    SourceRank,
    Strategy,
    Supply,
    Weights,
    match,
    say_checked,
)
from shardkit.training.fill.samples import kept_open, take_samples, versions
from shardkit.training.fill.source import Source, find_weights, has_factors, open_source, remember
from shardkit.training.kept import remember_files
from shardkit.training.model.between import check_hidden, compare_parameters, release, say_put_back
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
from shardkit.training.model.factored_weights import Factoring, own_targets, to_json
from shardkit.training.model.fit import ModelInitializationContext, check_fit, check_ties, check_untied
from shardkit.training.model.initialise import initialise, new_rows
from shardkit.training.model.overlap import apart, put_together, refuse_expanded
from shardkit.training.model.states import extra_states, hand_over, states_to_read
from shardkit.training.optimizer import rebind_optimizer
from shardkit.training.ranks.agree import agree, agreed, current_device, gather_json, world
from shardkit.training.ranks.listings import share_listings
from shardkit.training.ranks.local import (
    ExpectedTensor,
    LocalShard,
    buffer_places,
    describe,
    local_shards,
    materialise,
    refuse_fsdp1,
    reshard,
    window,
)
from shardkit.training.ranks.stages import on_other_ranks, unused_here_alone, with_ties
from shardkit.transfer.checks import CheckedSource

_log = logging.getLogger("shardkit")

_OPENING = "opening the source"
_COMPARING = "comparing the ranks' sources"
_FITTING = "comparing the source with the model"
_APART = "make them one parameter, or give each its memory: parameter.data = parameter.data.clone()"
_SLACK_NBYTES = 4096  # an allocator's rounding


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
        model: what `wrap` returned, or what anybody else made of `ctx.model`.
        ctx: from `prepare`.
        strategy: "direct": every rank reads its own shards. "broadcast": source ranks read and send each rank
            only what it holds. "auto": direct, if every rank can open the source and sees the same weights.
        source_rank: who reads for whom with broadcast: "global", one for all; "node", one for the ranks of
            its host; "replica", one for each replica of an HSDP mesh.
        device: for parameters and buffers; None is the device type of the mesh.
        optimizer: one or several that were made before the model was wrapped. They are pointed at the
            parameters that the model has now, as by `rebind_optimizer`. Afterwards each steps every parameter
            once, or is refused.
        check_source: compare what all ranks read with the CRC-32s that the source's files record;
            `ctx.checked` says how much was compared. False lets damage through, with a warning.

    Returns:
        The model: every parameter filled once, nothing on meta, ties one object, buffers equal on all ranks.

    Raises:
        UsageError: an unknown strategy, or a model that is wrapped by FSDP1. Or an optimizer that has one
            parameter several times, or another model's, and no names that would tell which ones are meant.
        LayoutError, IntegrityError: the wrapped model is not what was prepared, the source does not fit it,
            or its bytes are not what its checksums say.
        SourceError, ResourceError: the source cannot be read. All are raised on all ranks and name
            those that failed.
    """
    with agreed("looking at the wrapped model"):
        refuse_fsdp1(model)
        options = ReadOptions(strategy=strategy, source_rank=source_rank, check_source=check_source)
        reshard(model)
        place = _device(model, device)
        say_put_back(model, ctx)
        restore_buffers(model, ctx.buffers, place)
        retie(model, ctx.ties)
        check_hidden(model, ctx)
        materialise(model, place)
        for each in (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ():
            rebind_optimizer(model, each)
        shards = with_ties(local_shards(model), ctx.ties)
    compare_parameters([(shard.names, shard.whole.requires_grad) for shard in shards], ctx)
    filled, own = Filled(), shards
    if ctx.source is not None:
        supply = supply_of(ctx)
        own = [*shards, *read_states(model, ctx)]
        filled = _fill_compared(shards, own, supply, options)
        ctx.checked = filled.checked
        say_checked(filled.checked, check_source=check_source)
    with agreed("initialising parameters"):
        fill_initialised(shards, ctx, filled)
    _prove(model, shards, filled, ctx, own)
    remember(model, ctx.weights)
    return model


def read_states(model: nn.Module, ctx: ModelInitializationContext) -> list[LocalShard]:
    """Return memory for the extra states of modules that a context's source has; every rank calls it."""
    shards, note = states_to_read(model, ctx.weights)
    if note is not None and note not in ctx.notes:
        ctx.notes = (*ctx.notes, note)
        _say_left_out(note)
    return shards


def _say_left_out(note: str | None) -> None:
    if note is not None and world()[0] == 0:
        _log.info("weights: %s", note)


@may_follow_links
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
    """Fill a model that anybody has wrapped, or nobody, from any source; every rank calls it.

    Args:
        model: on meta, or with values, which are overwritten in place. Its OSFT factors, whoever made its layers, are
            computed if the source has dense weights. Buffers that are in no checkpoint are computed if they are on meta.
            Otherwise they must have their values already: `to_empty()` takes those away. A warning names those of a
            transformers model that differ from what its class computes. If such a buffer is in the model's state dict
            and not in the source, it gets what the class computes.
        source: Hub directory or id, pre-sharded directory, or any sharded checkpoint; or `from_rank(...)`.
        strategy: as for `finalize`.
        source_rank: as for `finalize`.
        device: for parameters that are on meta; None is the device type of the mesh.
        keys: as for `prepare`.
        dequantize: as for `prepare`.
        follow_links: read links that lead out of a checkpoint's directory as the files to which they lead.
            Weight files of a Hub model are read in any case.
        check_source: as for `finalize`.

    Returns:
        The model.

    Raises:
        ShardkitError: as for `finalize`.
    """
    with agreed("looking at the model"):
        refuse_fsdp1(model)
        options = ReadOptions(strategy=strategy, source_rank=source_rank, check_source=check_source)
        reshard(model)
        place = _device(model, device)
        if any(buffer.tensor.is_meta for buffer in buffer_places(model)):
            compute_buffers(model, None)
        restore_buffers(model, memory_for_buffers(model, place), place)
        release(model)
        materialise(model, place)
        shards = local_shards(model)
        refuse_expanded(shards)
        computed = class_buffers(model)
        unlike = unlike_computed(model, computed)
        hidden = {name for shard in shards if not shard.persistent for name in shard.names}
        _say_unlike_computed([fqn for fqn in unlike if fqn in hidden])
    supply = _open(model, source, keys, dequantize=dequantize, computed=computed)
    states = states_to_read(model, supply.weights)
    _say_left_out(states.note)
    own = [*apart(shards), *states.shards]
    filled = _fill_compared(shards, own, supply, options)
    say_checked(filled.checked, check_source=check_source)
    made = {fqn: value for fqn, value in computed.items() if fqn in supply.initialised}
    _fill_computed(own, made, unlike, filled)
    _prove(model, shards, filled, None, own)
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
) -> Supply:
    """Open a source for a live model and compare the two; a rank that cannot, while others can, says why.

    Args:
        model: on this rank.
        source: as it was given.
        keys: as they were given.
        dequantize: as for `load_into`.
        computed: FQNs of buffers that the source need not have.
    """
    expected, ties = describe(model)
    weights: Weights | None = None
    error: BaseException | None = None
    factoring, own = Factoring(), own_targets(model)
    check_sources(source)

    @cache
    def open_given() -> Source:
        path = source if isinstance(source, RankSource) else os.fspath(source)
        return open_source(path, dequantize=dequantize)

    share_listings((source,), open_given, phase=_OPENING)
    try:
        if isinstance(source, RankSource) and not source.is_here:
            raise source.elsewhere()
        opened = open_given()
        rules = None if keys is None else load_rules(keys)
        if own and not has_factors(opened):
            factoring = Factoring(targets=own, svd="exact")
        wanted = {**factoring.read(expected), **extra_states(model)}
        weights = find_weights(opened, wanted, ties, model=model, rules=rules)
    except BaseException as caught:  # the others must not wait
        error = caught
    is_absent = isinstance(error, (SourceError, ResourceError))
    if isinstance(source, RankSource) and source.is_here:
        is_absent = False
    agree(None if is_absent else error, phase=_OPENING)
    able = gather_json(weights is not None, phase=_OPENING)
    if not any(able):
        agree(error, phase=_OPENING)
    factoring = _same_factoring(factoring, own)
    used, unused = (weights.stored_names(), weights.unused) if weights is not None else ((), ())
    elsewhere, are_stages = unused_here_alone(frozenset(used), frozenset(unused))
    if weights is not None and are_stages:
        weights = replace(weights, identity=weights.source_identity, sampled_files=0)
    made = frozenset[str]()
    with agreed(_FITTING):
        if weights is not None:
            check_untied(broken_ties(model), weights)
            needed = factoring.read(expected)
            made = check_fit(
                needed, ties, weights, initialises=False, elsewhere=elsewhere, computed=computed
            ).initialised
            if world()[0] == able.index(True):  # it reads names of one parameter that are stored apart
                check_ties(ties, weights)
    told = gather_json(sorted(made), phase=_FITTING)
    if weights is None:
        made = frozenset(name for each in told for name in each)
    return _with_factors(
        Supply(weights=weights, unavailable=None if error is None else str(error), initialised=made),
        factoring,
    )


def _same_factoring(mine: Factoring, own: tuple[Target, ...]) -> Factoring:
    """Return which weights of a live model become factors, told by ranks that see the source; every rank calls it.

    Raises:
        LayoutError: on all ranks: they have other targets, as stages of a pipeline would.
    """
    told = gather_json([mine.svd, to_json(own)], phase="comparing the ranks' models")
    svd = next((each for each, _ in told if each is not None), None)
    if svd is not None and any(targets != told[0][1] for _, targets in told):
        raise LayoutError(
            "the ranks' models have other OSFT targets than each other, and the source has dense weights",
            hint="OSFT has no stages of a pipeline (pp): give what `shardkit preshard --osft` wrote, or a checkpoint with factors",
        )
    return Factoring() if svd is None else Factoring(targets=own, svd=svd)


def _with_factors(supply: Supply, factoring: Factoring) -> Supply:
    """Return a supply that has factors computed where they are not read."""
    if factoring.svd is None:
        return supply
    initialised = frozenset(supply.initialised) | factoring.computed
    return replace(supply, initialised=initialised, targets=factoring.targets, svd=factoring.svd)


def supply_of(ctx: ModelInitializationContext) -> Supply:
    """Return a prepared model's supply: its weights, and which tensors are initialised or computed."""
    supply = Supply(
        weights=ctx.weights, unavailable=ctx.unavailable, initialised=ctx.initialised, grown=ctx.grown
    )
    return _with_factors(supply, ctx.factoring)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return where buffers go: to the mesh's devices, or else to where parameters are already."""
    if device is not None:
        return torch.device(device)
    parameters = list(model.parameters())
    kind = next((p.device_mesh.device_type for p in parameters if isinstance(p, DTensor)), None)
    if kind is None:
        return next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
    return current_device(kind)


def _say_unlike_computed(buffers: Sequence[str]) -> None:
    if buffers and world()[0] == 0:
        _log.warning(
            "%s in no checkpoint, and not what the model's class computes: %s. After to_empty() buffers hold whatever "
            "memory held; leave the model on meta, or put their values back",
            "1 buffer is" if len(buffers) == 1 else f"{len(buffers)} buffers are",
            listed(buffers),
        )


def _fill_compared(
    shards: Sequence[LocalShard], own: Sequence[LocalShard], supply: Supply, options: ReadOptions
) -> Filled:
    """Compare what the ranks see, and fill what each of them has; every rank calls it."""
    with kept_open() as opened:
        sources = choose_sources(shards, supply, options, opened)
        located = supply.weights
        if sources is None and options.strategy == "auto" and world()[1] > 1:
            located, seen = _locate(own, supply, opened)
            if seen is not None:
                supply, sources = seen, choose_sources(shards, seen, options, opened)
        return fill(own, supply, options, sources, opened, located)


def _locate(
    own: Sequence[LocalShard], supply: Supply, opened: dict[str, int]
) -> tuple[Weights | None, Supply | None]:
    """Open what this rank reads, before any rank reads: where some cannot, others may read for them.

    Every rank calls it.

    Returns:
        The opened weights. Where some ranks fail and others do not, what this rank can supply; else None.
    """
    assert supply.weights is not None
    located: Weights | None = None
    error: BaseException | None = None
    with agreed(_FITTING):
        wanted = match(own, supply)
    regions = regions_of(divide(wanted)[0])
    try:
        located = supply.weights.located(regions, opened)
    except BaseException as caught:  # the others must not wait
        error = caught
    is_source = isinstance(error, (SourceError, ResourceError))
    agree(None if is_source else error, phase=_OPENING)
    able = gather_json(error is None, phase=_OPENING)
    if all(able):
        return located, None
    if not any(able):
        agree(error, phase=_OPENING)
    return None, supply if error is None else replace(supply, weights=None, unavailable=str(error))


def fill(
    shards: Sequence[LocalShard],
    supply: Supply,
    options: ReadOptions,
    sources: Sequence[int] | None,
    opened: dict[str, int] | None = None,
    located: Weights | None = None,
) -> Filled:
    """Fill shards from a source, one way or the other; every rank calls it.

    Args:
        shards: of this rank, materialised.
        supply: what fills them.
        options: how they are filled.
        sources: from `choose_sources`.
        opened: files that `choose_sources` has opened.
        located: the supply's weights, if it is known already where lies what this rank reads.
    """
    seen = supply if located is None else replace(supply, weights=located)
    filled = _fill_read(shards, seen if sources is None else supply, options, sources, opened)
    if supply.targets:
        computed = fill_factors(shards, supply, sources, check_source=options.check_source)
        filled.add(computed)
        filled.checked = CheckedSource.of_all([filled.checked, computed.checked])
    return filled


def _fill_read(
    shards: Sequence[LocalShard],
    supply: Supply,
    options: ReadOptions,
    sources: Sequence[int] | None,
    opened: dict[str, int] | None,
) -> Filled:
    """Fill what is read as it is."""
    if sources is not None:
        return fill_broadcast(shards, supply, sources, check_source=options.check_source)
    assert supply.weights is not None
    with agreed(_FITTING):
        wanted = match(shards, supply)
    return fill_direct(wanted, supply.weights, check_source=options.check_source, opened=opened)


class _Told(NamedTuple):
    """What a rank says of itself."""

    identity: str | None
    """Of the weights that it sees; None if it cannot open them."""
    reason: str | None
    """Why it cannot."""
    is_version: bool
    """The identity is of objects in a store, and no bytes were compared."""
    group: str
    """Ranks of the same group are served by one source."""
    options: str


def choose_sources(
    shards: Sequence[LocalShard], supply: Supply, options: ReadOptions, opened: dict[str, int]
) -> list[int] | None:
    """Return the source rank of every rank, or None if each reads for itself; every rank calls it.

    A source rank is the first of its group that can open the source. What was decided, and why,
    is logged once.

    Args:
        shards: of this rank; they tell the replicas of a mesh from each other.
        supply: whether this rank can open the source.
        options: what the caller wants; the same on all ranks.
        opened: from `kept_open`; gets the files of which some bytes were compared.

    Raises:
        UsageError: on all ranks: they want different things.
        SourceError: on all ranks: too few of them can open the source for what is wanted, or source ranks see
            different weights.
    """
    group = ""
    if options.source_rank != "global":
        group = _node() if options.source_rank == "node" else _replica(shards)
    asked = f"{options.strategy}, {options.source_rank}, check_source={options.check_source}"
    for compares_bytes in (False, True):
        with agreed(_COMPARING):
            found = _identity(supply, options, opened, compares_bytes=compares_bytes)
        told = [_Told(*answer) for answer in gather_json([*found, group, asked], phase=_COMPARING)]
        # In stores the same weights may be of several versions: in two regions.
        if (
            not any(answer.is_version for answer in told)
            or len({answer.identity for answer in told} - {None}) == 1
        ):
            break
    if any(answer.options != told[0].options for answer in told):
        raise UsageError(
            "the ranks do not have the same strategy, source_rank and check_source",
            problems=[f"rank {rank}: {answer.options}" for rank, answer in enumerate(told)],
        )
    if options.strategy != "broadcast" and _all_read(told, options.strategy):
        return None
    return _sources(told, options.source_rank)


def _identity(
    supply: Supply, options: ReadOptions, opened: dict[str, int], *, compares_bytes: bool
) -> tuple[str | None, str | None, bool]:
    """Return what tells this rank's weights from others; or None, and why they cannot be read; see `_Told`."""
    weights = supply.weights
    if weights is None:
        return None, supply.unavailable, False
    if world()[1] == 1 or (options.strategy, options.source_rank) == ("broadcast", "global"):
        return weights.identity, None, False  # nobody's weights are compared
    try:
        version = None if compares_bytes else versions(weights)
        return f"{weights.identity} {version or take_samples(weights, opened)}", None, version is not None
    except ResourceError as error:
        return None, str(error), False


def _all_read(told: Sequence[_Told], strategy: Strategy) -> bool:
    """True if all ranks can read the same weights; otherwise raise, unless some may read for the others."""
    blind = [rank for rank, answer in enumerate(told) if answer.identity is None]
    others = [rank for rank, answer in enumerate(told) if answer.identity not in (None, told[0].identity)]
    if not blind and not others:
        _say(f"direct: all {len(told)} ranks see the same weights")
        return True
    problems = [f"rank {rank}: {_first_line(told[rank].reason)}" for rank in blind]
    problems = problems or [f"rank {rank}: other weights than rank 0" for rank in others]
    if strategy == "direct" or len(blind) == len(told):
        raise SourceError(
            f"{len(problems)} of {len(told)} ranks cannot read the source by themselves",
            problems=problems,
            hint="make it readable on every node, or use strategy='broadcast'"
            if len(blind) < len(told)
            else None,
        )
    _say(f"broadcast, not direct: {problems[0]}", logging.WARNING if others else logging.INFO)
    return False


def _sources(told: Sequence[_Told], source_rank: SourceRank) -> list[int]:
    """Return the source rank of every rank: the first of its group that can open the source."""
    source_of: dict[str, int] = {}
    for rank, answer in enumerate(told):
        if answer.identity is not None:
            source_of.setdefault(answer.group, rank)
    problems = [
        f"rank {rank}: {_first_line(answer.reason)}"
        for rank, answer in enumerate(told)
        if answer.group not in source_of
    ]
    SourceError.raise_for(
        problems,
        f"no rank of some {source_rank} can open the source" if source_of else "no rank can open the source",
        hint="source_rank='global' needs only one rank that can" if source_of else None,
    )
    first = min(source_of.values())
    others = [rank for rank in source_of.values() if told[rank].identity != told[first].identity]
    SourceError.raise_for(
        [f"rank {rank}: other weights than rank {first}" for rank in others],
        "source ranks see different weights",
        hint="copy the same weights to every node, or use source_rank='global'",
    )
    return [source_of[answer.group] for answer in told]


def _first_line(reason: str | None) -> str:
    """Return why a rank cannot open the source, in one line."""
    return (reason or "cannot open the source").splitlines()[0]


def _node() -> str:
    """Name this rank's node: torchrun numbers the nodes; without it the host's name tells them apart."""
    return f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"


def _replica(shards: Sequence[LocalShard]) -> str:
    """Return the place on the axes that replicate every sharded tensor: `dp_replicate` of an HSDP mesh."""
    widest = max(
        (shard.replicas.mesh for shard in shards if shard.replicas.mesh is not None),
        key=lambda mesh: mesh.size(),
        default=None,
    )
    coordinate = widest.get_coordinate() if widest is not None else None
    if coordinate is None:
        return ""
    axes = set(range(len(coordinate)))
    for shard in shards:
        if shard.replicas.mesh == widest:
            axes.intersection_update(shard.replicas.axes)
    return str([coordinate[axis] for axis in sorted(axes)])


def _say(text: str, level: int = logging.INFO) -> None:
    if world()[0] == 0:
        _log.log(level, "weights: %s", text)


def fill_initialised(shards: Sequence[LocalShard], ctx: ModelInitializationContext, filled: Filled) -> None:
    """Fill the tensors that are not read, with values that are the same on every rank."""
    by_name = {name: shard for shard in shards for name in shard.names}
    if ctx.initialised:
        for fqn, whole in initialise(ctx, ctx.initialised):
            if fqn in by_name:  # otherwise the proof says so
                _put(by_name[fqn], whole, 0, filled)
    # Two that were tied after prepare have grown alike: the first one's new rows are theirs.
    grown = {id(by_name[fqn]): fqn for fqn in reversed(ctx.grown) if fqn in by_name}
    for fqn in reversed(grown.values()):
        if fqn not in ctx.initialised:
            _put(by_name[fqn], new_rows(ctx, fqn), ctx.grown[fqn], filled)


def _fill_computed(
    shards: Sequence[LocalShard], made: Mapping[str, torch.Tensor], unlike: Collection[str], filled: Filled
) -> None:
    """Let buffers that the source lacks have what the model's class computes.

    Args:
        shards: of the model.
        made: name of each -> the computed value.
        unlike: names of those that hold something else.
        filled: counts them.
    """
    for shard in shards:
        name = next((name for name in shard.names if name in made), None)
        if name in unlike and name is not None:
            _put(shard, made[name], 0, filled)
        elif name is not None:
            filled.elements[shard.fqn] += shard.num_elements
    changed = [name for name in made if name in unlike]
    if made:
        _say(f"not in the source, buffers that the model's class computes: {listed(made)}")
    if changed:
        _say(
            f"these held other values than the class computes, and have those now: {listed(changed)}",
            logging.WARNING,
        )


def _put(shard: LocalShard, values: torch.Tensor, first_row: int, filled: Filled) -> None:
    """Fill this rank's part of some rows of a tensor, all of them or those from `first_row` on."""
    offsets = (first_row, *(0,) * (values.ndim - 1)) if values.ndim else ()
    rows = Region(offsets, tuple(values.shape))
    for part in shard.parts:
        found = shard.cut(part, rows)
        if found is not None:
            region, target = found
            with torch.no_grad():
                target.copy_(values[window(relative_to(region, offsets))])
            filled.elements[shard.fqn] += region.num_elements


def _prove(
    model: nn.Module,
    shards: Sequence[LocalShard],
    filled: Filled,
    ctx: ModelInitializationContext | None,
    own: Sequence[LocalShard],
) -> None:
    """Prove that the filled model is as promised.

    Args:
        model: all of it.
        shards: everything that this rank holds of it.
        filled: how much of them was filled.
        ctx: of a prepared model.
        own: what was filled: in place of shards, where several lie on one memory, and extra states of modules.
    """
    differing = equalise_buffers(model)
    elsewhere = frozenset[str]() if ctx is None else on_other_ranks(shards, ctx.expected)
    with agreed("proving the filled model"):
        changed = "a wrapper has changed it between prepare and finalize" if ctx is not None else None
        clashes = put_together(shards, own)
        problems = [*clashes, *prove_filled(own, filled.elements), *_on_meta(model)]
        if ctx is not None:
            problems += [*_unlike_expected(shards, ctx.expected, elsewhere), *_too_large(model, shards)]
        problems += [f"{escape(fqn)}: the buffer differs between ranks" for fqn in differing]
        IntegrityError.raise_for(
            problems,
            f"the filled model is not as it should be in {count(len(problems), 'place')}",
            hint=_APART if clashes else changed,
        )
        hand_over(model, own)


def prove_filled(shards: Sequence[LocalShard], elements: Counter[str]) -> Iterator[str]:
    """Yield a problem for each parameter and persistent buffer that has not been filled exactly once.

    Args:
        shards: everything that this rank holds.
        elements: how many elements of each were filled, counted where bytes were moved.
    """
    for shard in shards:
        held, filled = shard.num_elements, elements[shard.fqn]
        if shard.persistent and filled != held:
            yield f"{escape(shard.fqn)}: {filled} of {held} elements were filled"


def _on_meta(model: nn.Module) -> Iterator[str]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            yield f"{escape(clean_name(name))}: parameter or buffer still on meta"
    for attribute in meta_attributes(model):
        yield f"{escape(attribute.fqn)}: tensor attribute still on meta"


def _unlike_expected(
    shards: Sequence[LocalShard], expected: Mapping[str, ExpectedTensor], elsewhere: Collection[str]
) -> Iterator[str]:
    held = {name: shard for shard in shards for name in shard.names}
    for fqn, plan in expected.items():
        shard = held.get(fqn)
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
    """Yield parts whose memory holds more than the part: a view of a whole tensor keeps all of it."""
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
