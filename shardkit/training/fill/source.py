"""Open a source of weights, and find the weights of one model in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit import formats
from shardkit._version import major
from shardkit.core.catalog import Catalog, subset
from shardkit.core.dtypes import BY_NAME
from shardkit.core.factored import Target, factor_of, stored_targets
from shardkit.core.regions import Region
from shardkit.core.text import count, escape, listed
from shardkit.errors import LayoutError
from shardkit.files import manifest, storage
from shardkit.formats.contract import Checkpoint, OpenedHubModel, PlainWeights, folder_below, has_model_config
from shardkit.formats.dequantize import why_scaled
from shardkit.formats.hub.adapter import is_adapter_file
from shardkit.formats.hub.base import SAVED_ASSETS, own_home, recorded_derived, recorded_names, recorded_rules
from shardkit.formats.hub.directory import read_config
from shardkit.formats.quantised import why_quantised, why_scales
from shardkit.formats.recorded import add_checksums
from shardkit.keys.check import refuse_factors
from shardkit.keys.expressions import Expression, Opaque, Stored, leaves, rename_leaves, to_json
from shardkit.keys.names import clean_name
from shardkit.keys.peft import base_name
from shardkit.keys.renaming import KeyRule, apply_key_rules, find_rules
from shardkit.keys.rules import RuleSet
from shardkit.keys.select import select_model
from shardkit.layout.binding import (
    Binding,
    ClassNames,
    TensorsAtHand,
    bind,
    class_provider,
    name_in_catalog,
    person_provider,
)
from shardkit.layout.classes import transformers_model
from shardkit.layout.naming import match_names
from shardkit.layout.own_code import OwnCode
from shardkit.operations.environment import package_version
from shardkit.training.fill.from_rank import RankSource
from shardkit.training.fill.presharded import PreshardedSource, open_presharded
from shardkit.training.fill.reading import HubNaming, KeyRules, OpenChunks, Weights
from shardkit.training.ranks.agree import world
from shardkit.training.ranks.local import ExpectedTensor

_ATTRIBUTE = "_shardkit_key_rules"
_MANY, _A_HANDFUL = 127, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened source of weights. Its catalog is known, and no tensor has been read."""

    path: str
    """Path of the source, for messages."""
    catalog: Catalog
    """All tensors of the source. The catalog of a pre-sharded directory has no chunks yet."""
    checkpoint: Checkpoint | None = None
    """The checkpoint; None for a pre-sharded directory and for the memory of a rank."""
    presharded: PreshardedSource | None = None
    """The pre-sharded directory; None for any other source."""
    dequantizes: bool = False
    """True if quantised weights are to be converted to plain ones."""

    @property
    def home(self) -> str | None:
        """The source's own directory with a config.json for these weights, or None."""
        if self.presharded is not None:
            place = folder_below(self.path, SAVED_ASSETS)
            return place if place is not None and has_model_config(place) else None
        return None if self.checkpoint is None else own_home(self.checkpoint)

    def plain(self, dtypes: Collection[torch.dtype]) -> Source:
        """Return the source with plain weights in place of quantised ones, if `dequantizes`; else the source itself.

        Args:
            dtypes: the dtypes of the model's floating tensors, to which each value is rounded once.

        Raises:
            LayoutError: the quantisation is not known, or scales do not fit.
        """
        if not self.dequantizes or self.checkpoint is None:
            return self
        narrow = set(dtypes) <= {torch.bfloat16}
        dtype = BY_NAME["bfloat16" if narrow else "float32"]
        plain = formats.open(
            self.checkpoint, plain=PlainWeights(dtype=dtype, by_config=True, by_content=True)
        )
        return replace(self, checkpoint=plain, catalog=plain.catalog)


def open_source(
    source: str | RankSource,
    revision: str | None = None,
    variant: str | None = None,
    *,
    dequantize: bool = False,
) -> Source:
    """Open a source, independent of a model.

    Args:
        source: a Hub directory, file or repo id, a pre-sharded directory, a checkpoint of any trainer, or
            the result of `from_rank` on the rank that has the state dict.
        revision: branch, tag or commit of a repo id.
        variant: variant of the weight files; "fp16" reads `model.fp16.safetensors`.
        dequantize: convert quantised weights to plain ones.

    Raises:
        SourceError, IntegrityError: the source does not exist, or is damaged or incomplete.
        ResourceError: it cannot be read or downloaded.
        UsageError: a revision is given for a local path, or `from_rank` got something that is not a state dict.
    """
    if isinstance(source, RankSource):
        return Source(path=source.label, catalog=source.open())
    is_plain = revision is None and variant is None and storage.isdir(source)
    presharded = open_presharded(source) if is_plain else None
    if presharded is not None:
        return Source(path=source, catalog=presharded.catalog, presharded=presharded)
    checkpoint = formats.open(source, revision=revision, variant=variant)
    path = checkpoint.path if checkpoint.hub is None else checkpoint.hub.directory
    if checkpoint.hub is not None:
        add_checksums(checkpoint.hub.catalog, checkpoint.path)
    return Source(path=path, catalog=checkpoint.catalog, checkpoint=checkpoint, dequantizes=dequantize)


def has_factors(source: Source) -> bool:
    """True if some weights are stored as factors of OSFT."""
    return any(factor_of(name) is not None for name in source.catalog.tensors)


def find_targets(
    source: Source, names: Mapping[str, ExpectedTensor], *, model: nn.Module | None = None
) -> tuple[Target, ...]:
    """Return the weights of a model that a source has as OSFT factors, with the model's paths and in its order.

    Args:
        source: the opened source.
        names: FQN -> parameter or buffer of the model, with dense weights.
        model: as for `find_weights`.

    Raises:
        LayoutError: factors are missing or do not fit each other, or the model lacks their weights; the error lists
            all of them.
        SourceError: the model's names cannot be distinguished from those of an optimizer or another model.
    """
    if not has_factors(source):
        return ()
    fqns = [fqn for fqn, tensor in names.items() if tensor.persistent]
    stored, _ = _select(source, fqns)
    shapes = {below: source.catalog.tensors[name].shape for name, below in stored.items()}
    targets = {target.weight: target for target in stored_targets(shapes).values()}
    dense = {name: shape for name, shape in shapes.items() if factor_of(name) is None}
    dense |= {name: (target.rows, target.columns) for name, target in targets.items()}
    match = match_names(dense, fqns, model=model)
    by_fqn = {fqn: targets[name] for fqn, name in match.names.items() if name in targets}
    matched_paths = {target.path for target in by_fqn.values()}
    LayoutError.raise_for(
        [f"{escape(target.path)}" for target in targets.values() if target.path not in matched_paths],
        f"{escape(source.path)} has OSFT factors of weights that the model does not have",
        hint="is it this model's source?",
    )
    return tuple(replace(by_fqn[fqn], path=fqn.removesuffix(".weight")) for fqn in fqns if fqn in by_fqn)


def first_dtype(source: Source) -> str | None:
    """Return the dtype that `from_pretrained` would use if a config names none; None if there is no floating tensor.

    It is the dtype of the first floating tensor by name, in the first file, not counting OSFT factors.

    Raises:
        SourceError: the model's names cannot be distinguished from those of an optimizer or another model.

    Source: transformers 5.23, modeling_utils, _get_dtype and get_state_dict_dtype.
    """
    tensors, chunks, files = source.catalog.tensors, source.catalog.chunks, source.catalog.files
    is_hub = source.checkpoint is not None and source.checkpoint.hub is not None

    def place(name: str) -> tuple[str, str]:
        entry = tensors[name]
        return files[chunks.file[entry.first_chunk]].name if is_hub and entry.num_chunks else "", name

    names = tensors if is_hub else _select(source, [])[0]
    floating = (name for name in names if tensors[name].dtype.is_convertible and factor_of(name) is None)
    first = min(floating, key=place, default=None)
    return None if first is None else tensors[first].dtype.name


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredModel:
    """The weights of the model in a source."""

    names: Mapping[str, str]
    """Stored name -> name below the checkpoint's root."""
    select: Callable[[Collection[str]], Catalog]
    """Returns the catalog of the tensors with some stored names."""
    identity: Callable[[Catalog], object]
    """Takes the catalog of the needed tensors; returns plain data that identifies these weights."""
    sampled_files: int = _MANY
    """See `Weights`. Sampling is needed as headers of fine-tunes are equal. A save with an id needs few files: each has
    a part of each tensor, and opening those of a thousand ranks takes long."""
    has_all_checksums: bool = False
    """See `Weights`."""
    hub_names: Mapping[str, str] | None
    """Stored name -> name on the Hub; None if it is not known."""
    open_chunks: OpenChunks | None = None
    """See `Weights`."""
    derived: Mapping[str, Expression] = field(default_factory=dict)
    """Name below the root -> expression of the Hub's tensors of which it was made, from a manifest."""
    config: Mapping[str, object] | None = None
    """The content of config.json, or None."""
    may_have_own_names: bool = False
    """True if `hub_names` may be a model's own names, so that they are known to be the Hub's only if they differ."""
    has_hub_names: bool = False
    """True if `hub_names` are the Hub's even if they equal the model's."""
    further_names: frozenset[str] = frozenset()
    """Stored names of tied tensors that the Hub's files have under another name."""
    quantised: str | None = None
    """See `Weights`."""
    assets: tuple[str, ...] = ()
    """Directories with config and tokenizer."""
    notes: tuple[str, ...] = ()


def find_weights(
    source: Source,
    names: Mapping[str, ExpectedTensor],
    ties: Iterable[Collection[str]] = (),
    *,
    model: nn.Module | None = None,
    rules: RuleSet | None = None,
) -> Weights:
    """Find the tensors of a model in a source. No tensor is read; `check_fit` decides whether they fit.

    Args:
        source: the opened source; it may be used again for another model.
        names: FQN -> parameter or buffer of the model; non-persistent ones are not searched.
        ties: groups of names that are one parameter; the source may have any of them.
        model: the model, wrapped or not. A transformers model's own renamings apply.
        rules: key rules between the names of the source and those of the model, in either direction.

    Raises:
        SourceError, IntegrityError: the source is damaged or incomplete, or has factors of matrices that are not
            factored in the model.
        LayoutError: the rules do not fit; the error lists every problem.
        ResourceError: the source cannot be read.
    """
    source = source.plain({tensor.dtype for tensor in names.values() if tensor.dtype.is_floating_point})
    fqns = {fqn: None for fqn, tensor in names.items() if tensor.persistent}
    for group in ties:
        fqns.update(dict.fromkeys(group if any(name in fqns for name in group) else ()))
    stored = _find_stored_model(source, [] if rules is not None else list(fqns))
    inner_model = transformers_model(model)
    below = {short: name for name, short in stored.names.items()}
    have = TensorsAtHand(
        shapes={short: source.catalog.tensors[name].shape for short, name in below.items()},
        side=None,
        config=stored.config or (None if inner_model is None else inner_model.config.to_dict()),
        padding=None if source.checkpoint is None else source.checkpoint.contents.padding,
    )
    ask = partial(
        match_names,
        model_names=fqns,
        computed=[fqn for fqn, tensor in names.items() if not tensor.persistent],
        model=model,
    )
    binding = bind(
        have, fqns, [*([person_provider(rules)] if rules is not None else []), class_provider(ask)]
    )
    expressions, match = _drop_repeated_conversions(binding, source, stored.derived)
    expressions = {fqn: rename_leaves(expression, below) for fqn, expression in expressions.items()}
    match = _with_stored_names(match, below if rules is None else {})
    parts = (leaf.name for expression in expressions.values() for leaf in leaves(expression))
    catalog = stored.select(list(dict.fromkeys(parts)))
    catalog_names, made_of = name_in_catalog(expressions, stored.names)
    return Weights(
        path=source.path,
        catalog=catalog,
        names=catalog_names,
        made_of=made_of,
        convert=None if inner_model is None else OwnCode(lambda: inner_model),
        identity=_digest(stored.identity(catalog)),
        sampled_files=stored.sampled_files,
        has_all_checksums=stored.has_all_checksums,
        source_identity=_digest(stored.identity(Catalog(format="", directory=""))),
        unused=match.unused,
        match=match,
        quantised=stored.quantised or why_scales(match.unused) or _why_scaled(source, match.unused),
        notes=(*stored.notes, *binding.warnings, *_match_notes(expressions, match)),
        naming=_naming(stored, expressions, ties),
        assets=stored.assets,
        open_chunks=stored.open_chunks,
    )


def _why_scaled(source: Source, unused: Collection[str]) -> str | None:
    """Return the evidence that weights have scales for which the model has no tensors, or None."""
    if source.checkpoint is None or not any("scale" in name for name in unused):
        return None
    return why_scaled(source.checkpoint)


def _drop_repeated_conversions(
    binding: Binding, source: Source, derived: Mapping[str, Expression]
) -> tuple[dict[str, Expression], ClassNames]:
    """Return (FQN -> expression, how the model matches the source's names), such that no tensor is converted twice.

    A converter may keep a tensor's name and shape, which then do not show whether it has run. It has not run for the
    Hub's files, and it has run for tensors that a manifest lists as derived. In a trainer's checkpoint this is not
    known.

    Args:
        binding: the binding of names below the root.
        source: the source that has them.
        derived: name below the root -> expression of the Hub's tensors, from a manifest.
    """
    match, expressions = binding.class_names or ClassNames(), dict(binding.expressions)
    if source.checkpoint is not None and source.checkpoint.hub is not None:
        return expressions, match
    fused, failed = dict(match.fused), dict(match.failed)
    for fqn, expression in binding.expressions.items():
        parts = [*leaves(expression)]
        if not isinstance(expression, Opaque) or parts[0].name not in (expression.target, fqn):
            continue
        if parts[0].name in derived:
            expressions[fqn] = parts[0]
        elif source.presharded is None:
            failed[fqn] = (
                "may be as in the Hub's files or as in the model: only transformers' own code tells the two apart"
            )
            fused |= dict.fromkeys((leaf.name for leaf in parts), fqn)
            del expressions[fqn]
    return expressions, replace(match, fused=fused, failed=failed)


def _with_stored_names(match: ClassNames, names: Mapping[str, str]) -> ClassNames:
    """Return a match with stored names in place of names below the root. Names that `names` lacks stay."""
    return replace(
        match,
        names={fqn: names.get(name, name) for fqn, name in match.names.items()},
        unused={names.get(name, name): shape for name, shape in match.unused.items()},
        fused={names.get(name, name): fqn for name, fqn in match.fused.items()},
        ignored=[names.get(name, name) for name in match.ignored],
    )


def _match_notes(expressions: Mapping[str, Expression], match: ClassNames) -> Iterator[str]:
    if match.ignored:
        yield f"left out of the source, the model computes them: {listed(match.ignored)}"
    if converted := [fqn for fqn, expression in expressions.items() if not isinstance(expression, Stored)]:
        parts = {leaf.name for fqn in converted for leaf in leaves(expressions[fqn])}
        yield f"fused {count(len(parts), 'tensor')} of the source into {len(converted)}, as from_pretrained does"
    if renamed := {name for name in match.names.values() if match.names.get(name) != name}:
        yield f"{count(len(renamed), 'tensor')} of the source found under other names than the model's"


def _naming(
    stored: _StoredModel, expressions: Mapping[str, Expression], ties: Iterable[Collection[str]]
) -> HubNaming | None:
    hub, rules, derived = stored.hub_names, None, stored.derived
    plain = {
        fqn: expression.name for fqn, expression in expressions.items() if isinstance(expression, Stored)
    }
    if hub is not None:
        rules = key_rules({fqn: hub[name] for fqn, name in plain.items()})
        if not rules and stored.may_have_own_names and not stored.has_hub_names:
            rules = None
        if not stored.may_have_own_names:
            converted = {fqn: rename_leaves(expressions[fqn], hub) for fqn in expressions if fqn not in plain}
            derived = {**derived, **converted}
    if rules is None and not derived:
        return None
    tied = (fqn for group in ties for fqn in group if fqn in plain)
    return HubNaming(
        rules,
        {fqn: to_json(expression) for fqn, expression in derived.items()},
        tuple(fqn for fqn in tied if plain[fqn] not in stored.further_names),
    )


def _find_stored_model(source: Source, fqns: list[str]) -> _StoredModel:
    if fqns:
        # Checked first; otherwise the error would be that no names fit.
        refuse_factors(source.catalog.tensors, fqns)
    if source.checkpoint is None:
        return _model_of_records(source, fqns)
    if source.checkpoint.hub is not None:
        return _model_of_hub(source.checkpoint.hub)
    return _model_of_checkpoint(source, source.checkpoint, fqns)


def _model_of_records(source: Source, fqns: list[str]) -> _StoredModel:
    """Describe a pre-sharded directory, or the memory of a rank."""
    catalog, presharded = source.catalog, source.presharded
    names, notes = _select(source, fqns)
    select = partial(subset, catalog)
    if presharded is None:
        return _StoredModel(
            names=names,
            hub_names=names,
            may_have_own_names=True,
            select=select,
            identity=lambda _: source.path,
            sampled_files=0,
            notes=(*catalog.notes, *notes),
        )
    assets = folder_below(source.path, SAVED_ASSETS)
    return _StoredModel(
        names=names,
        hub_names=apply_key_rules(presharded.key_rules, names),
        derived=presharded.derived,
        may_have_own_names=True,  # `reshard` writes the same format, with a model's own names
        has_hub_names=presharded.content.hub_names is None,
        further_names=frozenset(presharded.ties),
        select=select,
        open_chunks=lambda regions, _: presharded.open_chunks(regions),
        identity=lambda _: presharded.content.crc32,
        sampled_files=_A_HANDFUL,
        has_all_checksums=presharded.content.digest == "crc32",  # its CRC-32 is of those of the chunk lists
        assets=() if assets is None else (assets,),  # `reshard` copies them
        notes=tuple(_other_versions(presharded)),
    )


def _other_versions(presharded: PreshardedSource) -> Iterator[str]:
    """Yield a note for each package whose major version differs from the one that traced the layout."""
    traced = presharded.content.layout.traced_with
    for name, recorded_version in (
        (("torch", traced.torch), ("transformers", traced.transformers)) if traced else ()
    ):
        here = package_version(name)
        if here is not None and major(here) != major(recorded_version):
            yield f"pre-sharded with {name} {escape(recorded_version)}, and this job has {escape(here)}: modules may differ"


def _model_of_hub(model: OpenedHubModel) -> _StoredModel:
    names = {name: name for name in model.catalog.tensors}
    return _StoredModel(
        names=names,
        hub_names=names,
        select=partial(subset, model.catalog),
        # Repo and commit are left out, as a copy in a directory has the same weights.
        identity=lambda _: [manifest.to_json(file) for file in model.identity.files],
        config=model.config,
        quantised=why_quantised({}, model.config),
        assets=(model.directory,),
        # An adapter next to a model's weights is left out, while `from_pretrained` would add it.
        notes=(
            *model.catalog.notes,
            *(
                f"left out: {escape(name)}: {what}"
                for name, what in model.other_weights
                if is_adapter_file(name)
            ),
        ),
    )


def _model_of_checkpoint(source: Source, checkpoint: Checkpoint, fqns: list[str]) -> _StoredModel:
    names, notes = _select(source, fqns)
    config = next((read_config(directory) for directory in checkpoint.contents.assets), None)
    recorded, dcp, save = recorded_rules(checkpoint), checkpoint.dcp, checkpoint.catalog.metadata_crc32
    has_records = dcp is not None and dcp.has_records
    # `save` writes the config of the live model, which has these tensors.
    is_plain = checkpoint.remarks.dequantized is not None or checkpoint.writer == "shardkit"
    return _StoredModel(
        names=names,
        hub_names=None if recorded is None else apply_key_rules(recorded.rules, names),
        derived=recorded_derived(checkpoint),
        further_names=frozenset(
            name for _, *tied_names in recorded_names(checkpoint).ties for name in tied_names
        ),
        select=partial(_select_checked, checkpoint)
        if not has_records
        else partial(subset, checkpoint.catalog),
        open_chunks=partial(_open_chunks, checkpoint) if has_records else None,
        identity=lambda catalog: [save, _rows(catalog)],
        sampled_files=_MANY if save is None else _A_HANDFUL,
        config=config,
        quantised=None if is_plain else why_quantised({}, config),
        assets=checkpoint.contents.assets,
        notes=(*checkpoint.remarks.notes, *notes),
    )


def _select_checked(checkpoint: Checkpoint, names: Collection[str]) -> Catalog:
    catalog = checkpoint.select(names)
    add_checksums(catalog, checkpoint.path)
    return catalog


def _open_chunks(
    checkpoint: Checkpoint, regions_by_name: Mapping[str, Sequence[Region]], opened: dict[str, int] | None
) -> Catalog:
    """Return a catalog with the records of some regions only, since those of all ranks may be in a thousand files."""
    assert checkpoint.dcp is not None
    # Rank 0 counts the data that decoding verifies, so it needs all records if extensions have transformed them.
    has_all = bool(checkpoint.dcp.transforms) and world()[0] == 0
    catalog = (
        checkpoint.dcp.select(regions_by_name)
        if has_all
        else checkpoint.dcp.select_within(regions_by_name, opened)
    )
    add_checksums(catalog, checkpoint.path)
    return catalog


def _select(source: Source, fqns: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return (stored name -> name below the root, notes) for the weights of a checkpoint's model."""
    catalog, bases = source.catalog, [base for base in map(base_name, fqns) if base is not None]
    selection = select_model(
        catalog.tensors,
        catalog.objects,
        catalog.paths,
        source.checkpoint.contents.roots if source.checkpoint is not None else {},
        base_names=list(dict.fromkeys((*fqns, *bases))),
    )
    return selection.names, (
        *selection.notes,
        *selection.unloadable,
        *selection.warnings,
        *selection.renaming,
    )


def _rows(catalog: Catalog) -> list[object]:
    """Return the content of a catalog as plain data, without paths and times."""
    table = catalog.chunks
    files = [(file.name, file.size) for file in catalog.files]
    return [
        [
            entry.fqn,
            entry.dtype.name,
            entry.shape,
            [
                (*files[table.file[row]], table.start[row], table.nbytes[row], region)
                for row, region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True)
            ],
        ]
        for entry in catalog.tensors.values()
    ]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def key_rules(names: Mapping[str, str]) -> KeyRules | None:
    """Return the changes of prefixes that turn a model's names into the Hub's; None for a model that PEFT has wrapped.

    Args:
        names: FQN -> name on the Hub.
    """
    if any(base_name(fqn) != fqn for fqn in names):  # PEFT's names are not the Hub's
        return None
    return tuple((rule.old, rule.new) for rule in find_rules(names))


def remember(model: nn.Module, weights: Weights | None) -> None:
    """Store the weights' naming in the model, for `save`. If it is not known, nothing changes."""
    if weights is not None and weights.naming is not None:
        setattr(model, _ATTRIBUTE, weights.naming)


def recall(model: nn.Module, names: Collection[str] = ()) -> HubNaming | None:
    """Return the naming that `remember` stored in a model, which may have been wrapped since; else None.

    Args:
        model: the whole module that is saved. The model may be a submodule of it, as in a LightningModule, if nothing
            else is saved.
        names: all names that are saved.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    for path, module in inner.named_modules():
        form: HubNaming | None = getattr(module, _ATTRIBUTE, None)
        if form is not None:
            return form if not clean_name(path) else _with_prefix(form, f"{clean_name(path)}.", names)
    return None


def _with_prefix(form: HubNaming, prefix: str, names: Collection[str]) -> HubNaming | None:
    """Return a naming with a prefix before the model's names; None if there are names without the prefix."""
    if not names or form.key_rules is None:
        return None
    if any(not name.startswith(prefix) or base_name(name) != name for name in names):
        return None
    short_names = {name: name.removeprefix(prefix) for name in names}
    return HubNaming(
        key_rules(apply_key_rules([KeyRule(old, new, 0) for old, new in form.key_rules], short_names)),
        {f"{prefix}{fqn}": expression for fqn, expression in form.derived.items()},
        [f"{prefix}{fqn}" for fqn in form.tied],
    )
