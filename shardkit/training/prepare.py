"""The first phase: a model without weights, its source opened and compared with it, on all ranks alike."""

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
from shardkit.layout.classes import BrokenTie, broken_ties, tie, transformers_model
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
from shardkit.training.model.between import note_prepared
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
from shardkit.training.model.initialise import not_repeated
from shardkit.training.model.states import extra_states
from shardkit.training.ranks.agree import agreed, broadcast_json, gather_json, look_where_possible, say, world
from shardkit.training.ranks.listings import is_looked_at, share_listings
from shardkit.training.ranks.local import ExpectedTensor, buffer_places, describe, places

_WEIGHT_FILES = (".safetensors", ".bin", ".distcp", ".pt", ".pth", ".ckpt", ".metadata", ".json")
_OPENING = "opening the source"
_MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The keywords of `prepare`, whose docstring describes them. There are no slots: what is opened is kept."""

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
        """The source, a path as text."""
        source = self.source
        return source if source is None or isinstance(source, RankSource) else os.fspath(source)

    @cached_property
    def model_place(self) -> str | None:
        """The model's directory or repo id; None if it is a function or a model."""
        return os.fspath(self.build_model) if isinstance(self.build_model, (str, os.PathLike)) else None

    @cached_property
    def home(self) -> str | None:
        """The directory of the model's config; None if it is a function or a model.

        Raises:
            LayoutError, SourceError, ResourceError: as `find_config`.
        """
        if self.model_place is None:
            return None
        return find_config(self.model_place, self.revision if self.model_place == self.place else None)

    @cached_property
    def rules(self) -> RuleSet | None:
        """Between the names of the source and those of the model."""
        return None if self.keys is None else load_rules(self.keys)

    @cached_property
    def plan(self) -> OsftPlan | None:
        """Which weights become factors; None leaves that to the source and the model."""
        return as_plan(self.osft)

    @cached_property
    def open(self) -> Callable[[str | RankSource, str | None], Source]:
        """Opens a source of some revision, each once."""
        return cache(partial(open_source, variant=self.variant, dequantize=self.dequantize))

    def check(self) -> None:
        """Refuse options that contradict each other, or have no such value.

        Raises:
            UsageError: these do.
            SourceError, ResourceError: the rules cannot be read.
        """
        if isinstance(self.source, RankSource) and (self.revision is not None or self.variant is not None):
            raise UsageError("revision and variant are for files: a state dict has none")
        _ = self.place, self.rules, self.plan  # what is wrong with them is said now


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourcelessModel:
    """A model before it has a source."""

    model: nn.Module
    expected: Mapping[str, ExpectedTensor]
    ties: tuple[tuple[str, ...], ...]
    grown: Mapping[str, int]
    """FQN -> rows before the vocabulary was aligned."""
    writes: Mapping[str, int]
    """FQN -> how often each parameter was written while the model was built."""
    moved: list[nn.Parameter] | None
    """Every parameter that a module got while the model was built; None if it was given."""
    retied: tuple[BrokenTie, ...]
    """Parameters that were several in the given model and are now one, as its class says."""
    factoring: Factoring = field(default_factory=Factoring)
    """Which of its weights are OSFT factors."""
    home: str | None = None
    """The directory of its config; None if the model or a function was given."""

    @property
    def read(self) -> Mapping[str, ExpectedTensor]:
        """What the source must have."""
        return self.factoring.read(self.expected)

    def digest(self, options: PrepareOptions) -> str:
        """Return a digest of what must be the same on all ranks."""
        tensors = [(t.fqn, t.shape, str(t.dtype), t.kind, t.persistent) for t in self.expected.values()]
        content = [
            tensors,
            self.ties,
            dict(self.grown),
            options.seed,
            # A set has another order on each rank.
            options.missing if isinstance(options.missing, str) else sorted(options.missing),
            options.place is not None,
            self.factoring.svd,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundSource:
    """What a rank found."""

    weights: Weights | None = None
    fit: ModelFit
    absent: BaseException | None = None
    """Why the source is not here; other ranks may have it."""
    untied: tuple[str, ...] = ()
    """FQNs that the model ties although the source has other values for them."""
    warning: str | None = None
    """What the model's config means otherwise than the source's."""
    generation: dict[str, Any] | None = None
    """generation_config.json of the source; None if it has none, or the model is that of a directory."""


@storage.listed_once()
@keywords_of(PrepareOptions, reading_as)
def prepare(options: PrepareOptions) -> ModelInitializationContext:
    """Build a model without memory for its weights, and compare it with its source; each rank must call it.

    Args:
        build_model: a function that returns the model, a directory with config.json or a repo id, or a
            model on meta.
        source: a Hub directory or repo id, a pre-sharded directory, or any sharded checkpoint;
            `from_rank(...)` for a state dict in the memory of one rank; None initialises every tensor, whole,
            the same in any world.
        dtype: of floating parameters; None keeps the model's own: what its config says, or else what is
            stored. Parameters that its class makes fp32 stay fp32, as in `from_pretrained`. Reading
            converts the values. OSFT factors are fp32 in any case; where there are some, None is the dtype in which
            the source has the other weights, or fp32 if it has no factors yet.
        tokenizer: embeddings are made as long as it needs; a number of tokens will do.
        align_vocab: False leaves embeddings alone; a number rounds their rows up to a multiple of it, True
            and None to a multiple of 8.
        missing: what to do about tensors that the source lacks. "error" refuses them. "init" initialises
            them, unless they look renamed. Globs over FQNs initialise what they match.
        seed: of what is initialised.
        init_buffers: computes the buffers of a model on meta.
        revision: branch, tag or commit, if the source is a repo id; of the model too if it is the same repo.
        variant: "fp16" takes `model.fp16.safetensors`.
        keys: rules between the names of the source and those of the model (docs/keys.md): the path of a TOML file, or
            the name of a set that shardkit has, such as "torchtitan-llama3". Models of transformers need none.
        dequantize: make plain weights of fp8, MXFP4 and NVFP4 ones, each value rounded once to the parameter's
            dtype; quantised sources and configs are refused otherwise.
        osft: the share of each target's singular directions that is trained, or a plan which targets there are;
            `finalize` computes the factors of dense weights. None: the weights that the source has as factors, or the
            model has, and no others. What contradicts the source is refused.
        trust_remote_code: the model's own code may run.
        follow_links: read links that lead out of a checkpoint's directory as the files to which they lead.
            Weight files of a Hub model are read in any case.

    Returns:
        Context for `finalize`; its `model` is what to wrap. A rank that has no source while others do says
        why in `unavailable`.

    Raises:
        LayoutError: model and source differ (every difference is listed), or nothing computes some buffers.
        SourceError: the source is damaged, or nobody has it.
        UsageError: options contradict each other.
        All are raised on all ranks and name those that failed.
    """
    with agreed(_OPENING):
        options.check()
    share_listings(
        (options.model_place, options.place),
        partial(_look, options),
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
        say(f"prepare: {note}")
    if opened.warning is not None:
        say(f"prepare: {opened.warning}", logging.WARNING)
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
    note_prepared(ctx, find_hidden(plain.model, plain.moved))
    model_place = plain.home if location_of(options.model_place).is_for_all else options.model_place
    remember_files(plain.model, (model_place,), opened.weights, options.tokenizer)
    return ctx


def _look(options: PrepareOptions) -> None:
    """Look at what lies in a store or has headers, before other ranks do."""
    if options.model_place is not None and location_of(options.model_place).is_listed_once:
        _ = options.home
    if isinstance(options.place, str) and is_looked_at(options.place):
        options.open(options.place, options.revision)


def _computed_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the buffers that are not on meta, by FQN: what they are to be again once there is memory."""
    return {
        place.fqn: place.tensor.detach().clone() for place in buffer_places(model) if not place.tensor.is_meta
    }


def _stored_dtype(model: str, options: PrepareOptions) -> str | None:
    """Return the stored dtype for a model whose config names none: its own weights', or else the source's."""

    def dtype_of(
        source: str | RankSource | None, revision: str | None, *, of_factored: bool = False
    ) -> str | None:
        """Return the dtype of what a source has beside OSFT factors; None if it has none and has to have them."""
        try:
            opened = None if source is None else options.open(source, revision)
            is_wanted = opened is not None and (has_factors(opened) or not of_factored)
            return first_dtype(opened) if opened is not None and is_wanted else None
        except ShardkitError:  # opening it in earnest raises it again
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


def _factor(plain: _SourcelessModel, options: PrepareOptions) -> _SourcelessModel:
    """Return a model with factors where the source has them, or where they are wanted; every rank calls it."""
    with agreed(_OPENING) as exchanged:
        exchanged.mine = [asdict(target) for target in _stored_targets(plain, options)]
    stored = tuple(Target(**fields) for fields in next(filter(None, exchanged.of_all), ()))
    with agreed("dividing weights into factors"):
        factoring = factor_model(
            plain.model, options.plan, stored, grown=plain.grown, has_source=options.place is not None
        )
        if not factoring.targets:
            return plain
        expected, ties = describe(plain.model)
        return replace(plain, expected=expected, ties=ties, factoring=factoring)


def _stored_targets(plain: _SourcelessModel, options: PrepareOptions) -> tuple[Target, ...]:
    """Return the targets that the source has as factors; none if this rank cannot open it."""
    if options.place is None:
        return ()
    try:
        opened = options.open(options.place, options.revision)
    except ShardkitError:  # opening it in earnest raises it again
        return ()
    return find_targets(opened, dense_names(plain.model, plain.expected), model=plain.model)


def _build(options: PrepareOptions, dtype: torch.dtype | str | None) -> _SourcelessModel:
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
    return _SourcelessModel(
        model=model,
        expected=expected,
        ties=ties,
        grown=grown,
        writes=writes,
        moved=moved,
        retied=retied,
        home=options.home,
    )


def _open_together(plain: _SourcelessModel, options: PrepareOptions) -> _FoundSource:
    """Open the source on every rank that has it; the first of these tells all what is read and initialised."""
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
            return _FoundSource(
                fit=ModelFit(initialised=every, notes=("no source: every tensor is initialised",))
            )
    source = options.place
    mine, error, holders = look_where_possible(
        lambda: _open(plain, source, options), lambda error: _is_absent(source, error), phase=_OPENING
    )
    untied, generation, warning = list[str](), None, None
    with agreed(_OPENING):
        if holders[0] == world()[0] and mine is not None:  # it reads the values of ties, for all ranks
            untied = _untied(plain, mine[0])
            generation = _generation_config(mine[0]) if options.home is None else None
            warning = _other_config(plain, source, options)
    plain_fit = None if mine is None else {**asdict(mine[1]), "initialised": sorted(mine[1].initialised)}
    findings = [untied, plain_fit, generation, warning]
    untied, seen, generation, warning = broadcast_json(findings, holders[0], phase=_OPENING)
    weights, fit = mine or (
        None,
        ModelFit(initialised=frozenset(seen["initialised"]), grown=seen["grown"], notes=tuple(seen["notes"])),
    )
    return _FoundSource(
        weights=weights,
        fit=fit,
        absent=error,
        untied=tuple(untied),
        generation=generation,
        warning=warning,
    )


def _other_config(plain: _SourcelessModel, source: str | RankSource, options: PrepareOptions) -> str | None:
    """Return a warning if config or tokenizer mean something else than those of the checkpoint; what was passed counts."""
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
        ):  # a live one is what `save` keeps
            differing += [difference(*each) for each in tokenizer_differences(*tokenizers)]
    except ShardkitError:  # whoever needs them says so
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
    """Return the generation config beside the config of a source; None if there is none that can be read."""
    try:
        home = next((place for place in weights.assets if read_config(place) is not None), None)
        return None if home is None else read_json(home, GENERATION_CONFIG)
    except ShardkitError:  # whoever copies the file says so
        return None


def _open(
    plain: _SourcelessModel, source: str | RankSource, options: PrepareOptions
) -> tuple[Weights, ModelFit]:
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
    """True if a path is missing, holds no weights, or lacks files of its index: nothing is damaged."""
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


def _untied(plain: _SourcelessModel, weights: Weights) -> list[str]:
    """Return the names that `from_pretrained` would untie: the source has two values for one parameter."""
    if not weights.match.is_transformers or plain.grown:
        check_ties(plain.ties, weights)
        return []
    return [fqn for _, _, fqn in diverged_ties(plain.ties, weights)]


def _untie(plain: _SourcelessModel, fqns: Sequence[str]) -> _SourcelessModel:
    """Give some names of tied parameters their own parameters.

    Source: transformers 5.23, PreTrainedModel.tie_weights.
    """
    model = plain.model
    for place in places(model, once=True):
        if place.kind == "parameter" and place.fqn in fqns:
            parameter = nn.Parameter(torch.empty_like(place.tensor), requires_grad=place.tensor.requires_grad)
            setattr(place.module, place.name, parameter)
    for module in model.modules():
        tied = getattr(module, "all_tied_weights_keys", None)
        if isinstance(tied, dict):
            for name in [name for name in tied if any(f".{fqn}".endswith(f".{name}") for fqn in fqns)]:
                del tied[name]
    expected, ties = describe(model)
    return replace(plain, expected=expected, ties=ties)


def _refuse_uncomputed(plain: _SourcelessModel, buffers: Mapping[str, torch.Tensor], fit: ModelFit) -> None:
    """Refuse buffers that the model does not compute and the source lacks."""
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
    """Return a copy of a model, all on meta; later changes of the model do not reach it."""
    memoryless: dict[int, Any] = {
        id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()
    }
    return copy.deepcopy(model, memoryless)


def _warn_not_repeated(blueprint: nn.Module, plain: _SourcelessModel, fit: ModelFit) -> None:
    lost = not_repeated(blueprint, plain.writes, fit.initialised)
    if lost:
        say(
            "initialised by reset_parameters and _init_weights alone, though other code of the model writes them too: "
            f"{listed(lost)}; move that code into _init_weights(module) of the model",
            logging.WARNING,
        )


def _notes(plain: _SourcelessModel, opened: _FoundSource, fit: ModelFit, *, is_given: bool) -> Iterator[str]:
    """Yield what a person should be told.

    Args:
        is_given: the model was given or built by a function, so that its ties may surprise.
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
