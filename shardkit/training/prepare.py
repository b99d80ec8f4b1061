"""The first phase of starting a model: build it without weights, open its source, and compare the two on all ranks."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import nn

from shardkit._torch import times_written
from shardkit.core.dtypes import DTypeName
from shardkit.core.factored import Target
from shardkit.core.keywords import keywords_of
from shardkit.core.text import count, escape, few, listed
from shardkit.errors import LayoutError, ResourceError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.links import reading_as
from shardkit.files.location import location_of
from shardkit.formats.configs import config_differences, difference, generation_differences
from shardkit.formats.hub.assets import CONFIG, GENERATION_CONFIG
from shardkit.formats.hub.directory import read_config, read_index, read_json
from shardkit.formats.hub.tokenizer import tokenizer_differences, tokenizer_files
from shardkit.keys.names import clean_name
from shardkit.keys.rule_sets import load_rules
from shardkit.keys.rules import RuleSet
from shardkit.layout.classes import BrokenTie, broken_ties, mend_ties, transformers_model
from shardkit.operations.consolidate.own import reads_of
from shardkit.osft.plan import OsftPlan, as_plan
from shardkit.osft.training.model import Factoring, dense_names, factor_model
from shardkit.training.fill.from_rank import RankSource, check_sources
from shardkit.training.fill.reading import Weights
from shardkit.training.fill.source import (
    Source,
    find_targets,
    find_weights,
    first_dtype,
    has_factors,
    open_source,
)
from shardkit.training.kept import remember_files
from shardkit.training.model.between import register_prepared
from shardkit.training.model.buffers import InitBuffers
from shardkit.training.model.build import (
    MULTIPLE,
    BuildModel,
    align_vocab,
    build_model,
    find_config,
    set_generation_config,
)
from shardkit.training.model.fit import (
    Missing,
    ModelFit,
    ModelInitializationContext,
    check_fit,
    check_ties,
    check_untied,
    diverged_ties,
)
from shardkit.training.model.hidden import find_hidden
from shardkit.training.model.initialise import lost_initialisations
from shardkit.training.model.states import extra_states
from shardkit.training.ranks.agree import (
    agreed,
    broadcast_json,
    gather_json,
    log_once,
    run_where_possible,
    world,
)
from shardkit.training.ranks.listings import is_shared_source, share_listings
from shardkit.training.ranks.local import ExpectedTensor, buffer_places, describe_tensors, tensor_places

_WEIGHT_FILES = (".safetensors", ".bin", ".distcp", ".pt", ".pth", ".ckpt", ".metadata", ".json")
_OPENING = "opening the source"
_MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The keywords of `prepare`, whose docstring describes them. There are no slots, so that results can be cached."""

    build_model: BuildModel = field(kw_only=False)
    source: str | os.PathLike[str] | RankSource | None = field(kw_only=False)
    dtype: torch.dtype | DTypeName | Literal["fp64", "float64"] | None = None
    tokenizer: Sized | int | None = None
    align_vocab: bool | int | None = None
    missing: Missing = "error"
    seed: int = 0
    init_buffers: InitBuffers | None = None
    revision: str | None = None
    variant: str | None = None
    keys: str | os.PathLike[str] | None = None
    dequantize: bool = False
    osft: float | OsftPlan | None = None
    trust_remote_code: bool = False
    follow_links: bool = False

    @cached_property
    def place(self) -> str | RankSource | None:
        """The source, with a path as `str`."""
        source = self.source
        return source if source is None or isinstance(source, RankSource) else os.fspath(source)

    @cached_property
    def model_place(self) -> str | None:
        """The model's directory or repo id; None if `build_model` is a function or a model."""
        return os.fspath(self.build_model) if isinstance(self.build_model, (str, os.PathLike)) else None

    @cached_property
    def home(self) -> str | None:
        """The directory of the model's config; None if `build_model` is a function or a model.

        Raises:
            LayoutError, SourceError, ResourceError: as `find_config`.
        """
        if self.model_place is None:
            return None
        return find_config(self.model_place, self.revision if self.model_place == self.place else None)

    @cached_property
    def rules(self) -> RuleSet | None:
        """The rules between the names of the source and those of the model, or None."""
        return None if self.keys is None else load_rules(self.keys)

    @cached_property
    def plan(self) -> OsftPlan | None:
        """The plan for the weights that become factors; None to follow the source and the model."""
        return as_plan(self.osft)

    @cached_property
    def open(self) -> Callable[[str | RankSource, str | None], Source]:
        """A cached function that opens a source in a revision."""
        return cache(partial(open_source, variant=self.variant, dequantize=self.dequantize))

    def check(self) -> None:
        """Raise an error for options that contradict each other or have an invalid value.

        Raises:
            UsageError: some options do.
            SourceError, ResourceError: the rules cannot be read.
        """
        if isinstance(self.source, RankSource) and (self.revision is not None or self.variant is not None):
            raise UsageError("revision and variant are for files: a state dict has none")
        _ = self.place, self.rules, self.plan  # raises their errors now


@dataclass(frozen=True, slots=True, kw_only=True)
class _BuiltModel:
    """A model that is built, but not yet compared with its source."""

    model: nn.Module
    expected: Mapping[str, ExpectedTensor]
    ties: tuple[tuple[str, ...], ...]
    grown: Mapping[str, int]
    """FQN -> rows before the vocabulary was aligned."""
    writes: Mapping[str, int]
    """FQN -> number of times that the parameter was written while the model was built."""
    moved: list[nn.Parameter] | None
    """All parameters that modules got while the model was built; None if the user passed the model."""
    retied: tuple[BrokenTie, ...]
    """Ties that the model's class declares, that were broken when the model was built, and that were mended."""
    factoring: Factoring = field(default_factory=Factoring)
    """The choice of weights that are OSFT factors."""
    home: str | None = None
    """The directory of its config; None if the user passed a model or a function."""

    @property
    def read(self) -> Mapping[str, ExpectedTensor]:
        """The tensors that the source must have."""
        return self.factoring.read(self.expected)

    def digest(self, options: PrepareOptions) -> str:
        """Return a digest of the properties that must be equal on all ranks."""
        tensors = [(t.fqn, t.shape, str(t.dtype), t.kind, t.persistent) for t in self.expected.values()]
        content = [
            tensors,
            self.ties,
            dict(self.grown),
            options.seed,
            # The order of a set differs between ranks.
            options.missing if isinstance(options.missing, str) else sorted(options.missing),
            options.place is not None,
            self.factoring.svd,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenedSource:
    """The result of opening the source and comparing it with the model."""

    weights: Weights | None = None
    """The weights that this rank can read; None if it cannot open the source, or there is none."""
    fit: ModelFit
    absent: BaseException | None = None
    """Why this rank cannot open the source, while other ranks can."""
    untied: tuple[str, ...] = ()
    """FQNs that the model ties although the source has separate values for them."""
    warning: str | None = None
    """A warning if the model's config differs from the source's."""
    generation: dict[str, Any] | None = None
    """generation_config.json of the source; None if it has none, or if the model was built from a directory."""


@storage.listed_once()
@keywords_of(PrepareOptions, reading_as)
def prepare(options: PrepareOptions) -> ModelInitializationContext:
    """Build a model without memory for its weights, and compare it with its source; each rank must call it.

    Args:
        build_model: a function that returns the model, a directory with config.json or a repo id, or a
            model on meta.
        source: a Hub directory or repo id, a pre-sharded directory, or any sharded checkpoint;
            `from_rank(...)` for a state dict in the memory of one rank. None initialises every tensor, with values
            that do not depend on the number of ranks.
        dtype: dtype of floating parameters, to which values are converted while they are read. None keeps the
            model's own: the config's, or else the stored one. Parameters that the model's class makes fp32 stay
            fp32, as in `from_pretrained`. OSFT factors are always fp32; in a model with factors, None is the dtype of
            the source's other weights, or fp32 if the source has no factors yet.
        tokenizer: a tokenizer, or its number of tokens. Embeddings get as many rows as it needs.
        align_vocab: a number rounds the rows of embeddings up to a multiple of it; True and None round to a multiple
            of 8. False leaves embeddings as they are.
        missing: treatment of tensors that the source lacks. "error" raises an error. "init" initialises
            them, unless they look renamed. Globs over FQNs initialise the tensors that they match.
        seed: seed of initialised values.
        init_buffers: a function that computes the buffers of a model on meta.
        revision: branch, tag or commit, if the source is a repo id; also used for the model if it is the same repo.
        variant: variant of the weight files; "fp16" reads `model.fp16.safetensors`.
        keys: rules between the names of the source and those of the model (docs/keys.md): the path of a TOML file, or
            the name of a set that shardkit has, such as "torchtitan-llama3". transformers models need none.
        dequantize: convert fp8, MXFP4 and NVFP4 weights to plain ones, each value rounded once to the parameter's
            dtype. Without it, quantised sources and configs raise an error.
        osft: the share of each target's singular directions that is trained, or a plan that lists the targets;
            `finalize` computes the factors of dense weights. None: the weights that are factors in the source or the
            model, and no others. A plan that contradicts the source raises an error.
        trust_remote_code: the model's own code may run.
        follow_links: follow links that leave a checkpoint's directory. Links of a Hub model's weight files are
            always followed.

    Returns:
        Context for `finalize`; its `model` is the one to wrap. If a rank has no source while others do, its
        `unavailable` has the reason.

    Raises:
        LayoutError: model and source differ (every difference is listed), or nothing computes some buffers.
        SourceError: the source is damaged, or no rank has it.
        UsageError: options contradict each other.
        All errors are raised on all ranks and name the ranks that failed.
    """
    with agreed(_OPENING):
        options.check()
    share_listings(
        (options.model_place, options.place),
        partial(_open_shared, options),
        revision=options.revision,
        variant=options.variant,
    )
    dtype: torch.dtype | str | None = options.dtype
    if dtype is None and options.model_place is not None:
        dtype = _stored_dtype(options.model_place, options)
    with agreed("building the model"):
        plain = _build(options, dtype)
    check_sources(options.place)
    plain = _factor(plain, options)
    opened = _open_together(plain, options)
    fit = opened.fit
    if opened.untied:
        plain = _untie(plain, opened.untied)
    if opened.generation is not None:
        set_generation_config(plain.model, str(options.place), opened.generation)
    buffers = _computed_buffers(plain.model)
    with agreed("checking buffers"):
        _refuse_uncomputed(plain, buffers, fit)
    blueprint = _blueprint(plain.model) if fit.initialised or fit.grown else None
    if blueprint is not None:
        _warn_not_repeated(blueprint, plain, fit)
    notes = tuple(_notes(plain, opened, fit, is_given=options.model_place is None))
    for note in notes:
        log_once(f"prepare: {note}")
    if opened.warning is not None:
        log_once(f"prepare: {opened.warning}", logging.WARNING)
        notes = (*notes, opened.warning)
    ctx = ModelInitializationContext(
        model=plain.model,
        source=options.place,
        weights=opened.weights,
        unavailable=str(opened.absent) if opened.absent is not None else None,
        expected=dict(plain.expected),
        ties=plain.ties,
        initialised=fit.initialised,
        grown=dict(fit.grown),
        factoring=plain.factoring,
        seed=options.seed,
        blueprint=blueprint,
        buffers=buffers,
        notes=notes,
    )
    register_prepared(ctx, find_hidden(plain.model, plain.moved))
    model_place = plain.home if location_of(options.model_place).is_for_all else options.model_place
    remember_files(plain.model, (model_place,), opened.weights, options.tokenizer)
    return ctx


def _open_shared(options: PrepareOptions) -> None:
    """Open sources in stores, and those with headers to read, so that their content can be shared with other ranks."""
    if options.model_place is not None and location_of(options.model_place).is_listed_once:
        _ = options.home
    if isinstance(options.place, str) and is_shared_source(options.place):
        options.open(options.place, options.revision)


def _computed_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return FQN -> copy of each buffer that is not on meta. `finalize` restores these values."""
    return {
        place.fqn: place.tensor.detach().clone() for place in buffer_places(model) if not place.tensor.is_meta
    }


def _stored_dtype(model: str, options: PrepareOptions) -> str | None:
    """Return the stored dtype for a model whose config names none: that of its own weights, else of the source."""

    def dtype_of(
        source: str | RankSource | None, revision: str | None, *, of_factored: bool = False
    ) -> str | None:
        """Return the dtype of a source's weights other than factors; None if `of_factored` and it has no factors."""
        try:
            opened = None if source is None else options.open(source, revision)
            is_wanted = opened is not None and (has_factors(opened) or not of_factored)
            return first_dtype(opened) if opened is not None and is_wanted else None
        except ShardkitError:  # raised again when the source is opened for reading
            return None

    def look() -> str | None:
        if options.plan is not None:
            return "float32"
        try:
            assert options.home is not None
            config = read_config(options.home) or {}
        except ShardkitError:  # building the model raises it again
            return None
        if any(config.get(key) is not None for key in ("dtype", "torch_dtype")):
            return None
        model_dtype = dtype_of(options.home, None) if storage.exists(model) else None
        return model_dtype or dtype_of(options.place, options.revision)

    with agreed("reading the config") as exchanged:
        exchanged.mine = [dtype_of(options.place, options.revision, of_factored=True), look()]
    # A rank may not see the source.
    return next((dtype for dtypes in zip(*exchanged.of_all, strict=True) for dtype in dtypes if dtype), None)


def _factor(plain: _BuiltModel, options: PrepareOptions) -> _BuiltModel:
    """Replace weights by factors where the source has them or the plan asks for them; every rank calls it."""
    with agreed(_OPENING) as exchanged:
        exchanged.mine = [asdict(target) for target in _stored_targets(plain, options)]
    stored = tuple(Target(**fields) for fields in next(filter(None, exchanged.of_all), ()))
    with agreed("dividing weights into factors"):
        factoring = factor_model(
            plain.model, options.plan, stored, grown=plain.grown, has_source=options.place is not None
        )
        if not factoring.targets:
            return plain
        expected, ties = describe_tensors(plain.model)
        return replace(plain, expected=expected, ties=ties, factoring=factoring)


def _stored_targets(plain: _BuiltModel, options: PrepareOptions) -> tuple[Target, ...]:
    """Return the targets that the source has as factors; empty if this rank cannot open it."""
    if options.place is None:
        return ()
    try:
        opened = options.open(options.place, options.revision)
    except ShardkitError:  # raised again when the source is opened for reading
        return ()
    return find_targets(opened, dense_names(plain.model, plain.expected), model=plain.model)


def _build(options: PrepareOptions, dtype: torch.dtype | str | None) -> _BuiltModel:
    what, tokenizer, align = options.build_model, options.tokenizer, options.align_vocab
    moved = None if isinstance(what, nn.Module) else list[nn.Parameter]()
    model = build_model(
        what,
        home=options.home,
        moved=moved,
        dtype=dtype,
        init_buffers=options.init_buffers,
        trust_remote_code=options.trust_remote_code,
        dequantize=options.dequantize,
        seed=options.seed,
    )
    retied = tuple(mend_ties(model))
    if align and tokenizer is None:
        raise UsageError("align_vocab is given without a tokenizer", hint="give tokenizer= too")
    grown: dict[str, int] = {}
    if tokenizer is not None and align is not False:
        grown = align_vocab(model, tokenizer, multiple=MULTIPLE if align in (None, True) else int(align))
    expected, ties = describe_tensors(model)
    tied = {name for group in ties for name in group}  # each of their modules writes them
    named = ((clean_name(name), param) for name, param in model.named_parameters())
    writes = {fqn: times_written(param) for fqn, param in named if fqn not in tied}
    return _BuiltModel(
        model=model,
        expected=expected,
        ties=ties,
        grown=grown,
        writes=writes,
        moved=moved,
        retied=retied,
        home=options.home,
    )


def _open_together(plain: _BuiltModel, options: PrepareOptions) -> _OpenedSource:
    """Open the source on every rank that has it. The first of these ranks decides for all what is read."""
    digests = gather_json(plain.digest(options), phase=_OPENING)
    with agreed(_OPENING):
        if any(digest != digests[0] for digest in digests):
            raise LayoutError(
                "the ranks do not have the same model, seed or options",
                hint="build the model, and call prepare, the same way on every rank; one that does not see the source"
                " gives its path all the same",
            )
        if options.place is None:
            check_untied(broken_ties(plain.model), None)
            every = frozenset(fqn for fqn, tensor in plain.expected.items() if tensor.persistent)
            return _OpenedSource(
                fit=ModelFit(initialised=every, notes=("no source: every tensor is initialised",))
            )
    source = options.place
    mine, error, holders = run_where_possible(
        lambda: _open(plain, source, options), lambda error: _is_absent(source, error), phase=_OPENING
    )
    untied, generation, warning = list[str](), None, None
    with agreed(_OPENING):
        if holders[0] == world()[0] and mine is not None:  # only this rank reads the values of ties
            untied = _find_diverged_ties(plain, mine[0])
            generation = _generation_config(mine[0]) if options.home is None else None
            warning = _other_config(plain, source, options)
    plain_fit = None if mine is None else {**asdict(mine[1]), "initialised": sorted(mine[1].initialised)}
    findings = [untied, plain_fit, generation, warning]
    untied, seen, generation, warning = broadcast_json(findings, holders[0], phase=_OPENING)
    weights, fit = mine or (
        None,
        ModelFit(initialised=frozenset(seen["initialised"]), grown=seen["grown"], notes=tuple(seen["notes"])),
    )
    return _OpenedSource(
        weights=weights,
        fit=fit,
        absent=error,
        untied=tuple(untied),
        generation=generation,
        warning=warning,
    )


def _other_config(plain: _BuiltModel, source: str | RankSource, options: PrepareOptions) -> str | None:
    """Return a warning if the model's config or tokenizer differs from the checkpoint's, or None.

    The model's config and the passed tokenizer are used in any case.
    """
    try:
        home = options.open(source, options.revision).home
        inner = transformers_model(plain.model)
        if home is None or (options.home is None and inner is None) or _is_same(home, options.home):
            return None
        live = (
            json.loads(inner.config.to_json_string()) if options.home is None else read_config(options.home)
        )
        config, files = read_config(home) or {}, (home, options.home or home)
        if live is None or config.get("model_type") != live.get("model_type"):
            return None
        differing = config_differences(CONFIG, config, live)
        generations = [read_json(place, GENERATION_CONFIG) or {} for place in files]
        if all(generations) and not any(each.get("_from_model_config") for each in generations):
            differing += generation_differences(GENERATION_CONFIG, *generations)
        tokenizers = [reads_of(tokenizer_files(place)) for place in files]
        if all(tokenizers) and not hasattr(
            options.tokenizer, "save_pretrained"
        ):  # `save` writes a live tokenizer
            differing += [difference(*each) for each in tokenizer_differences(*tokenizers)]
    except ShardkitError:  # reported when the files are needed
        return None
    if not differing:
        return None
    differences = few(
        [f"{each.key} {each.base}, there {each.checkpoint}" for each in differing], _MOST_NAMED, "; "
    )
    return (
        f"{escape(home)} says otherwise than what was passed, which counts: {escape(differences)}; "
        f"prepare({escape(home)!r}, ...) takes what is there"
    )


def _is_same(one: str, second: str | None) -> bool:
    return second is not None and storage.realpath(one) == storage.realpath(second)


def _generation_config(weights: Weights) -> dict[str, Any] | None:
    """Return the generation config next to the config of a source; None if it is missing or cannot be read."""
    try:
        home = next((place for place in weights.assets if read_config(place) is not None), None)
        return None if home is None else read_json(home, GENERATION_CONFIG)
    except ShardkitError:  # reported when the file is copied
        return None


def _open(plain: _BuiltModel, source: str | RankSource, options: PrepareOptions) -> tuple[Weights, ModelFit]:
    opened = options.open(source, options.revision)
    expected = {**plain.read, **extra_states(plain.model)}
    weights = find_weights(opened, expected, plain.ties, model=plain.model, rules=options.rules)
    check_untied(broken_ties(plain.model), weights)
    fit = check_fit(plain.read, plain.ties, weights, missing=options.missing, grown=plain.grown)
    lost = [target.weight for target in plain.factoring.targets if target.weight in fit.initialised]
    LayoutError.raise_for(
        [f"missing: {escape(fqn)}" for fqn in lost],
        f"{escape(weights.path)} lacks weights that OSFT divides",
        hint="leave them out of osft=, or give a source that has them",
    )
    return weights, fit


def _is_absent(source: str | RankSource, error: BaseException) -> bool:
    """True if a path is missing, has no weights, or lacks files of its index, so that nothing in it is damaged."""
    if not isinstance(error, ShardkitError):
        return False
    if isinstance(source, RankSource):
        return not source.is_here
    if isinstance(error, ResourceError):
        return True
    try:
        if not storage.exists(source):
            return True
        if not storage.isdir(source):
            return False
        files = [
            name for _, _, names in storage.walk(source) for name in names if name.endswith(_WEIGHT_FILES)
        ]
        if all(name.endswith(".json") for name in files):
            return True
        for name in storage.listdir(source):
            if name.endswith(".index.json"):
                indexed_files = read_index(os.path.join(source, name), name).files
                return any(not storage.exists(os.path.join(source, file)) for file in indexed_files)
    except (OSError, ShardkitError):
        pass
    return False


def _find_diverged_ties(plain: _BuiltModel, weights: Weights) -> list[str]:
    """Return the names that `from_pretrained` would untie, because the source has two values for one parameter."""
    if not weights.match.is_transformers or plain.grown:
        check_ties(plain.ties, weights)
        return []
    return [fqn for _, _, fqn in diverged_ties(plain.ties, weights)]


def _untie(plain: _BuiltModel, fqns: Sequence[str]) -> _BuiltModel:
    """Untie names: give each of them a parameter of its own.

    Source: transformers 5.23, PreTrainedModel.tie_weights.
    """
    model = plain.model
    for place in tensor_places(model, once=True):
        if place.kind == "parameter" and place.fqn in fqns:
            parameter = nn.Parameter(torch.empty_like(place.tensor), requires_grad=place.tensor.requires_grad)
            setattr(place.module, place.name, parameter)
    for module in model.modules():
        tied = getattr(module, "all_tied_weights_keys", None)
        if isinstance(tied, dict):
            for name in [name for name in tied if any(f".{fqn}".endswith(f".{name}") for fqn in fqns)]:
                del tied[name]
    expected, ties = describe_tensors(model)
    return replace(plain, expected=expected, ties=ties)


def _refuse_uncomputed(plain: _BuiltModel, buffers: Mapping[str, torch.Tensor], fit: ModelFit) -> None:
    """Raise an error for buffers that the model does not compute and the source lacks."""
    lost = [
        escape(fqn)
        for fqn, tensor in plain.expected.items()
        if tensor.kind == "buffer" and fqn not in buffers and fqn in fit.initialised
    ]
    LayoutError.raise_for(
        lost,
        f"{count(len(lost), 'buffer')} of the model are on meta, nothing computes them, and they are not read",
        hint="give a function that builds the model, or init_buffers=fn that computes them",
    )


def _blueprint(model: nn.Module) -> nn.Module:
    """Return a copy of a model that is all on meta, and that later changes of the model do not affect."""
    memoryless: dict[int, Any] = {
        id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()
    }
    return copy.deepcopy(model, memoryless)


def _warn_not_repeated(blueprint: nn.Module, plain: _BuiltModel, fit: ModelFit) -> None:
    lost = lost_initialisations(blueprint, plain.writes, fit.initialised)
    if lost:
        log_once(
            "initialised by reset_parameters and _init_weights alone, though other code of the model writes them too: "
            f"{listed(lost)}; move that code into _init_weights(module) of the model",
            logging.WARNING,
        )


def _notes(plain: _BuiltModel, opened: _OpenedSource, fit: ModelFit, *, is_given: bool) -> Iterator[str]:
    """Yield notes for the user.

    Args:
        plain: the model.
        opened: the result of opening the source.
        fit: the result of comparing the two.
        is_given: true if the user's code built the model, so that its ties may be unexpected.
    """
    tied = [f"{alias} to {kept}" for kept, alias in plain.retied if not {kept, alias} & set(opened.untied)]
    if tied and is_given:
        yield f"tied, as the model's class has it: {listed(tied)}"
    for fqn, rows in fit.grown.items():
        now = plain.expected[fqn].shape[0]
        yield f"{escape(fqn)}: {rows} rows in the source, {now} in the model; the rest is initialised"
    if opened.untied:
        yield f"not tied, the source has values of their own for them: {listed(opened.untied)}"
    yield from plain.factoring.notes
    yield from opened.weights.notes if opened.weights else ()
    yield from fit.notes
