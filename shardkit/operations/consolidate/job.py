"""Everything that is decided before a byte moves: what consolidate would read and write.

    checkpoint -> names -> ties -> base -> dtypes -> images -> plan

Building a job reads descriptions, and of tied tensors the bytes; it writes nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from shardkit.core.catalog import Catalog, carry
from shardkit.core.dtypes import most_bytes
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed
from shardkit.core.threads import OnStep
from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.files.strict_json import refuse_pointers
from shardkit.formats.contract import Checkpoint, copies_warnings
from shardkit.formats.dcp.hugging_face import LAST_RANKS
from shardkit.formats.dequantize import why_scaled
from shardkit.formats.hub.adapter import ADAPTER_CONFIG
from shardkit.formats.hub.assets import CONFIG
from shardkit.formats.hub.base import (
    SAVED_ROOT,
    Base,
    RecordedNames,
    files_of,
    holds_equal,
    holds_hub_names,
    holds_saved_state,
    recorded_names,
    recorded_rules,
    recorded_shards,
    saved_derived,
)
from shardkit.formats.hub.files import MODEL
from shardkit.formats.hub.safetensors import OutputTensor, SafetensorsImage, SafetensorsImages
from shardkit.formats.hub.tokenizer import Tokenizer
from shardkit.formats.quantised import may_be_quantised
from shardkit.keys.check import compare_with_base, refuse_factors
from shardkit.keys.expressions import (
    EXPERTS,
    Expression,
    FusedTensors,
    NamedTensor,
    Opaque,
    Stored,
    computed_name,
    leaves,
    rename_leaves,
)
from shardkit.keys.names import in_order, natural, split
from shardkit.keys.peft import refuse_prompts
from shardkit.keys.renaming import KeyRule, find_rules, name_as_hub, name_part
from shardkit.keys.rule_sets import AUTO, NONE, Padding, load_rules
from shardkit.keys.select import Globs, Naming, Selection, select_model
from shardkit.keys.ties import is_output, may_be_untied, ties_embeddings
from shardkit.layout.binding import (
    Binding,
    ClassNames,
    Provider,
    TensorsAtHand,
    bind,
    class_provider,
    name_in_catalog,
    person_provider,
    shipped_provider,
    whole_provider,
)
from shardkit.layout.binding import manifest_provider as manifest_says
from shardkit.layout.traced import (
    ClassAnswer,
    ClassReply,
    ask_class,
    asking_text,
    may_differ_in_memory,
)
from shardkit.operations.casts import (
    BASE,
    KEEP,
    check_choice,
    choose_dtypes,
    held_dtypes,
    held_folded,
)
from shardkit.operations.consolidate.adapter import STEM as ADAPTER_STEM
from shardkit.operations.consolidate.adapter import Chosen, choose_tensors, merged_by_peft
from shardkit.operations.consolidate.assets import (
    Asset,
    adapter_assets,
    main_dtype,
    model_assets,
    trained_modules,
    with_tokenizer,
)
from shardkit.operations.consolidate.fit import BaseFit, base_shapes, check_fit
from shardkit.operations.consolidate.globs import Sieve, leave_out
from shardkit.operations.consolidate.headers import is_diffusers_lora, keep_settings
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.consolidate.own import eos_warnings, own_notes, own_tokenizer
from shardkit.operations.consolidate.schedule_free import EVAL, optimizer_warnings, take_evaluated
from shardkit.operations.consolidate.vocabulary import RowsChange, check_tokenizer, follow_vocabulary
from shardkit.operations.parts.agreement import Share
from shardkit.operations.parts.part import Part, share_of
from shardkit.operations.ties import Ties, resolve_ties, tie_groups
from shardkit.osft.fold import Written, take_factors
from shardkit.transfer.codecs.bound import bind as bound_catalog
from shardkit.transfer.codecs.derive import made_among
from shardkit.transfer.codecs.fold import Fold
from shardkit.transfer.plan import TransferPlan, build_plan
from shardkit.transfer.sources import is_far

_log = logging.getLogger("shardkit")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)", re.ASCII)
_DECIDERS = {"shipped": "shipped rules", "base": "equal names"}
"""What results call those who have other names in a `Binding`."""
_NO_TIES = Ties(dropped={}, diverged=(), untied=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateJob:
    """A decided consolidation."""

    checkpoint: Checkpoint
    options: ConsolidateOptions
    weights: str
    """As they were asked for: "model", "ema", "eval" ..."""
    selection: Selection
    kind: str
    """"model", "adapter", or "merged": an adapter added to its model."""
    ties: Ties
    base: Base | None
    catalog: Catalog
    """Of the tensors that were chosen; extents are raw bytes, and what other parts read may have no chunks."""
    tensors: tuple[OutputTensor, ...]
    """In the order of the output."""
    output: SafetensorsImages
    plan: TransferPlan
    assets: tuple[Asset, ...]
    """What lies beside the weights."""
    contents: tuple[tuple[str, int], ...]
    """Name and CRC-32 of each of them: with another config or tokenizer it is another output.

    Not their stamps: each machine of a job may have the base in a place of its own.
    """
    notes: tuple[str, ...]
    unloadable: tuple[str, ...]
    """Why `from_pretrained` would not load all weights of the output; the first of `warnings`."""
    warnings: tuple[str, ...]
    fit: BaseFit
    """How names and shapes fit the base's."""
    answer: ClassAnswer | None = None
    """What the class says of the output's names, where it was to be asked."""
    split: tuple[FusedTensors, ...] = ()
    """Tensors that become several."""
    names: tuple[NamedTensor, ...] = ()
    """All tensors of the output, in a dry run."""

    @property
    def needed_bytes(self) -> int:
        """Room for all that is written."""
        return self.plan.written_bytes + sum(asset.nbytes for asset in self.assets)

    @property
    def decided(self) -> dict[str, object]:
        """See `operations.write.Job`."""
        return {"description": self.describe(), "assets": self.contents}

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the files that lie beside the weights."""
        return tuple(asset.name for asset in self.assets)

    def marked(self, mark: str) -> ConsolidateJob:
        """Return the same job with a mark in the names of its weight files, as they lie in a store.

        Raises:
            UsageError: it writes an adapter, whose file PEFT finds by its name alone.
        """
        if self.kind == "adapter":
            raise UsageError(
                "an adapter cannot be written into a store so far: PEFT finds its weights by their name, without an index",
                hint="write it into a local directory, or add it to its model with --merge-lora",
            )
        if self.output.stem != MODEL:
            raise UsageError(
                f"a model in {self.output.stem} files cannot be written into a store so far: its library finds the "
                "weights by their name",
                hint="write it into a local directory, and copy that",
            )
        output = self.output.marked(mark)
        return replace(self, output=output, plan=replace(self.plan, images=output))

    def describe(self, crcs: Mapping[str, int] = MappingProxyType({})) -> manifest.HubModel:
        """Return the manifest, as far as it is known before a byte moves; `crcs` are those of tensors."""
        dequantized = self.checkpoint.remarks.dequantized
        return manifest.HubModel(
            tool=manifest.TOOL,
            layout=self.checkpoint.format,
            writer=self.checkpoint.writer,
            weights=self.weights,
            holds=self.kind,
            root=self.selection.root,
            key_rules=tuple(map(tuple, (*self.selection.stripped, *self.selection.renamed))),
            ties=tuple((kept, dropped) for dropped, kept in self.ties.dropped.items()),
            dequantized=dequantized.method if dequantized else None,
            dtype=self.options.dtype,
            dtype_rules=tuple((rule.glob, rule.dtype) for rule in self.options.rules) or None,
            digest=self.options.digest,
            tensors={
                tensor.fqn: manifest.HubTensor(
                    dtype=tensor.dtype.name,
                    shape=tensor.shape,
                    source=manifest.SourceTensor(
                        name=tensor.source, dtype=self.catalog.tensors[tensor.source].dtype.name
                    ),
                    crc32=crcs.get(tensor.fqn),
                )
                for tensor in self.tensors
            },
            files=(),
        )


def build_job(
    checkpoint: Checkpoint, base: Base | None, options: ConsolidateOptions, share: Share | None
) -> ConsolidateJob:
    """Decide what a checkpoint becomes.

    Args:
        checkpoint: opened.
        base: given or found, or None.
        options: what is asked for.
        share: what this process carries out: it opens the records of these files alone. None for all.

    Raises:
        UsageError: an option has no such value, or cannot be carried out.
        SourceError: the weights that are asked for are missing, cannot be told apart or recovered, or have no place
            in safetensors.
        LayoutError: names or shapes differ from those of the given base.
    """
    _check_options(checkpoint, base, options)
    weights, evaluated, of_training = options.weights, tuple[str, ...](), tuple[str, ...]()
    if weights == EVAL:
        options = replace(options, weights="model")
        checkpoint, evaluated = take_evaluated(checkpoint, _select(checkpoint, base, options.naming).names)
    elif weights == "model":
        of_training = tuple(optimizer_warnings(checkpoint))
    elif checkpoint.contents.roots.get(weights) == ():  # all of it is what was asked for
        options = replace(options, weights="model")
    named = _name(checkpoint, base, options)
    chosen, selection, fit, base = named.chosen, named.selection, named.fit, named.vocabulary.base
    tensors, dtype_notes = _tensors(named, checkpoint, base, options)
    written = take_factors(tensors, chosen.catalog, checkpoint, keep=options.keep_factors)
    headers = keep_settings(checkpoint, written.tensors)
    output = _images(written.tensors, base, options, checkpoint, chosen.kind, headers.settings)
    check_tokenizer(options.new_tokenizer, base, {tensor.fqn: tensor.shape for tensor in written.tensors})
    assets, changed, doubts = _assets(chosen, base, named.ties, written.tensors, options.new_tokenizer)
    left_out_names = checkpoint.catalog.tensors.keys() - selection.names.keys()
    untrained = trained_modules(
        base,
        [asset.name for asset in assets],
        selection.root,
        left_out_names,
        by_hand=options.naming.weights != "model" or options.naming.chooses_names,
    )
    catalog = _opened(written, _images_of(output, share), as_read=share is not None and not options.dry_run)
    unloadable: tuple[str, ...] = ()
    if chosen.kind != "adapter":
        unloadable = (*selection.unloadable, *fit.missing, *written.unloadable)
    return ConsolidateJob(
        checkpoint=checkpoint,
        options=options,
        selection=selection,
        kind=chosen.kind,
        split=chosen.split,
        ties=named.ties,
        base=base,
        catalog=catalog,
        tensors=written.tensors,
        output=output,
        plan=build_plan(output, catalog),
        assets=tuple(assets),
        contents=tuple((asset.name, int(crc32(asset.read()))) for asset in assets),
        weights=weights,
        notes=(
            *(note for note in checkpoint.remarks.notes if note != LAST_RANKS or chosen.kind == "adapter"),
            *evaluated,
            *named.notes(base),
            *headers.notes,
            *_copied_scales(checkpoint),
            *written.notes,
            *dtype_notes,
            *changed,
        ),
        unloadable=unloadable,
        warnings=(
            *unloadable,
            *of_training,
            *copies_warnings(
                [copy for copy in checkpoint.remarks.differing if copy.tensor not in left_out_names]
            ),
            *named.warnings(base),
            *_tie_warnings(named.ties, base),
            *doubts,
            *untrained,
        ),
        fit=fit,
        answer=named.answer,
        names=tuple(_named_tensors(written.tensors, chosen, checkpoint, options)) if options.dry_run else (),
    )


def _named_tensors(
    tensors: Iterable[OutputTensor], chosen: Chosen, checkpoint: Checkpoint, options: ConsolidateOptions
) -> Iterator[NamedTensor]:
    """Yield the tensors of the output with what they are made of."""
    by = "equal names"
    if options.naming.changes_names:
        by = "person"
    elif options.naming.weights == "model" and options.naming.root is None and recorded_rules(checkpoint):
        by = "manifest"
    for tensor in tensors:
        sources = sorted(chosen.origins.get(tensor.source, (tensor.source,)), key=natural)
        yield NamedTensor.made_of(tensor.fqn, chosen.by.get(tensor.fqn, by), sources)


def is_copied_quantised(checkpoint: Checkpoint) -> bool:
    """True for a source whose weights are quantised in a way that no config tells, and are copied so."""
    return any(_copied_scales(checkpoint))


def _copied_scales(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note about quantised weights that are copied as they are, where no config tells of them."""
    is_copied = checkpoint.hub is not None and checkpoint.remarks.dequantized is None
    why = why_scaled(checkpoint) if is_copied else None
    if why is not None:
        yield f"the model is quantised, and copied so: {why}: its values mean nothing without their scales"


def _images_of(output: SafetensorsImages, share: Share | None) -> list[SafetensorsImage]:
    """Return the files that this process writes: all, those of its part, or none where all parts are done."""
    images = list(output)
    if share is None:
        return images
    if not isinstance(share, Part):
        return []
    return [images[number] for number in share_of([image.size for image in images], share)]


def _opened(written: Written, images: Iterable[SafetensorsImage], *, as_read: bool) -> Catalog:
    """Return a catalog of raw extents, in which what goes into other files than these may have no chunks.

    Args:
        written: the tensors of all files.
        images: the files of this process.
        as_read: records may be opened when they are read; in a store that saves requests.
    """
    catalog = written.catalog
    if catalog.open_records is None:
        return catalog
    sources = {tensor.fqn: tensor.source for tensor in written.tensors}
    names = {sources[tensor.fqn] for image in images for tensor in image.tensors}
    return catalog.open_records(names, as_read=as_read and is_far(catalog))


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedTensors:
    """The tensors to write, and their names."""

    chosen: Chosen
    selection: Selection
    ties: Ties
    fit: BaseFit
    vocabulary: RowsChange
    answer: ClassAnswer | None
    """What the class says of the names, where it was to be asked."""

    @property
    def names(self) -> dict[str, str]:
        """Name in the catalog -> name in the output, in the order of the output; ties are there once."""
        return {source: name for source, name in self.chosen.names.items() if name not in self.ties.dropped}

    def notes(self, base: Base | None) -> Iterator[str]:
        """Yield what to tell about the choice."""
        yield from (*self.selection.notes, *self.chosen.notes)
        yield from (*(base.notes if base else ()), *self.vocabulary.notes, *self.fit.notes)

    def warnings(self, base: Base | None) -> Iterator[str]:
        """Yield the warnings about the choice, without those that say that the output cannot be loaded."""
        selection = self.selection
        if base is not None and self.chosen.kind != "adapter":
            yield from base.warnings
        if not selection.unloadable:  # else they ask for the base
            yield from _base_warnings(base, self.chosen.kind)
        yield from self.fit.warnings
        yield from self.vocabulary.warnings
        if not {*self.names.values()} <= (base_shapes(base) or {}).keys():  # else the class has found them
            yield from selection.renaming
            if self.answer is None or self.answer.missing:  # else it is no wrapper's, beside a model
                yield from selection.warnings
        if self.answer is None:  # else the class that the config names has these names in its files
            yield from selection.in_memory_warnings(list(self.names.values()), base_shapes(base))
        yield from self.chosen.warnings


def _name(checkpoint: Checkpoint, base: Base | None, options: ConsolidateOptions) -> _NamedTensors:
    """Choose the tensors, name them, and compare them with the base's; errors as for `build_job`."""
    ask = partial(_ask_class, on_step=options.tell_step)
    sieve, selection, chosen = _choose(checkpoint, base, options, ask)
    vocabulary = RowsChange(base=base)
    if chosen.kind != "adapter":
        shapes = _shapes_in(chosen, sieve.taken(chosen))
        vocabulary = follow_vocabulary(checkpoint, base, shapes, options.new_tokenizer)
    if vocabulary.changed:  # names that differ from the base's are found by shapes
        base = vocabulary.base
        sieve, selection, chosen = _choose(checkpoint, base, options, ask)
    chosen, answer, by_class, tied = _name_as_saved(chosen, selection, checkpoint, base, options)
    chosen, ties, fit, renamed = _fit(chosen, selection, checkpoint, vocabulary, options, sieve, ask, tied)
    if any(sieve.globs):
        written = {stored for source in chosen.names for stored in chosen.origins.get(source, (source,))}
        selection = selection.only(written)
    selection = replace(selection, renamed=(*selection.renamed, *by_class, *renamed))
    chosen = replace(chosen, names=_in_order(chosen.names, base_shapes(base)) or chosen.names)
    named = _NamedTensors(
        chosen=chosen, selection=selection, ties=ties, fit=fit, vocabulary=vocabulary, answer=answer
    )
    model_type = base.config.get("model_type") if base is not None and base.config else None
    selection = selection.for_written_names(list(named.names.values()), base_shapes(base), model_type)
    fix = "--keys says which rules turn them into the Hub's" if _has_config(base) else "add --base MODEL"
    return replace(
        named,
        selection=replace(selection, unloadable=tuple(f"{line}; {fix}" for line in selection.unloadable)),
    )


def _has_config(base: Base | None) -> bool:
    return base is not None and base.config is not None


def _tensors(
    named: _NamedTensors, checkpoint: Checkpoint, base: Base | None, options: ConsolidateOptions
) -> tuple[tuple[OutputTensor, ...], list[str]]:
    """Choose the dtypes; return what is written, in the order of the output, and notes.

    Raises:
        UsageError: the dtype or a rule cannot be carried out.
    """
    names, stored = named.names, named.chosen.catalog
    sources = {name: source for source, name in names.items()}
    default_dtypes = held_dtypes(stored, sources, checkpoint.remarks.dequantized, {})
    fold_notes = list[str]()
    folds = made_among(stored, names, Fold)
    folded = [name for source, name in names.items() if source in folds]
    if folded and not options.keep_factors and options.dtype in (KEEP, BASE):
        nbytes = {name: stored.tensors[source].nbytes for source, name in names.items()}
        default_dtypes, fold_notes = held_folded(default_dtypes, folded, nbytes, base)
    dtypes, notes = choose_dtypes(default_dtypes, names, options.dtype, options.rules, base, checkpoint.path)
    tensors = tuple(
        OutputTensor(name, source, dtypes[name], stored.tensors[source].shape)
        for source, name in names.items()
    )
    return tensors, [*fold_notes, *notes]


def _choose(
    checkpoint: Checkpoint,
    base: Base | None,
    options: ConsolidateOptions,
    ask: Callable[[Base], ClassNames | None],
) -> tuple[Sieve, Selection, Chosen]:
    """Choose the tensors and name them, with what sifts them by names; errors as for `build_job`."""
    naming = options.naming
    if not naming.chooses_names:
        # First: otherwise their names would be refused because they fit nothing.
        refuse_factors(checkpoint.catalog.tensors, hint=merged_by_peft(checkpoint, base))
        refuse_prompts(checkpoint.catalog.tensors, base_shapes(base) or ())
    selection, sieve = leave_out(checkpoint, base, _select(checkpoint, base, naming), options, ask)
    stored_names = [stored for stored, name in selection.names.items() if sieve.globs.selects(name)]
    refuse_factors(stored_names, hint=merged_by_peft(checkpoint, base))
    _refuse_objects(checkpoint.catalog.objects, stored_names)
    chosen = choose_tensors(
        checkpoint,
        selection.names,
        base,
        merge=options.merge_lora,
        adapter_config=options.adapter_config,
    )
    if chosen.kind == "merged":
        selection = replace(selection, live=chosen.names)  # which are free of PEFT's own only now
        if not naming.changes_names:
            shapes_in_base = base_shapes(base) or None
            by_source = {source: chosen.catalog.tensors[source].shape for source in chosen.names}
            named = name_as_hub(chosen.names, by_source, None, shapes_in_base)
            chosen = replace(chosen, names=_in_order(named.names, shapes_in_base) or named.names)
            warnings = (*selection.warnings, *named.warnings)
            selection = replace(selection, renamed=named.rules, warnings=warnings)
    rules = None if options.key_rules in (AUTO, NONE) else load_rules(options.key_rules)
    if rules is not None:
        _refuse_rules(chosen, naming)
    elif chosen.kind == "adapter" or naming.root is not None or naming.changes_names:
        return sieve, selection, chosen
    is_plain = chosen.kind == "model" and (sieve.takes_rules or not naming.chooses_names)
    tokens = options.new_tokenizer.tokens if options.new_tokenizer is not None else None
    derived = saved_derived(checkpoint) if rules is None else {}
    takes_shipped = is_plain and options.key_rules == AUTO
    chosen, binding = _bound(
        chosen,
        selection.live,
        [
            person_provider(rules) if rules is not None else manifest_says(derived),
            *([shipped_provider] if takes_shipped else []),
        ],
        converted=derived,
        config=base.config if base else None,
        padding=replace(checkpoint.contents.padding or Padding(), tokens=tokens),
    )
    return sieve, *_with_rules(
        selection, replace(chosen, warnings=(*chosen.warnings, *binding.warnings)), base, binding
    )


def _refuse_rules(chosen: Chosen, naming: Naming) -> None:
    """Refuse key rules that a person asked for where they are about nothing, or something else gives the names."""
    if chosen.kind == "adapter":
        raise UsageError("--keys is about a model, and the checkpoint holds an adapter")
    if naming.changes_names:
        raise UsageError(
            "--keys gives the names, and --strip-prefix, --add-prefix and --rename would have no effect",
            hint="leave them out, and write the names into the rules; --root says where the model begins",
        )


def _with_rules(
    selection: Selection, chosen: Chosen, base: Base | None, binding: Binding
) -> tuple[Selection, Chosen]:
    """Note what key rules did with a trainer's own names, or why they did nothing."""
    for rules in binding.candidates:
        _log.debug("key rules %s fit all names", escape(rules.name))
    for reason in binding.why_not:
        _log.debug("key rules: %s", reason)
    if binding.rules is not None:
        notes = [f"names turned into the Hub's by the key rules of {escape(binding.rules.title)}"]
        if binding.dropped:
            notes.append(f"left out by the key rules: {listed(binding.dropped)}")
        chosen = replace(chosen, keys=binding.rules.name, notes=(*chosen.notes, *notes, *binding.notes))
        return replace(selection, renaming=(), renamed=(), are_hubs=True), chosen
    # Without a config all of them lack the same thing, which the warning about the names asks for.
    reasons = binding.why_not if _has_config(base) or not selection.unloadable else ()
    if binding.candidates:
        names = " and ".join(rules.name for rules in binding.candidates)
        reasons = (f"several sets of key rules fit: {names}; choose one with --keys",)
    warnings = (*chosen.warnings, *(f"key rules: {reason}" for reason in reasons))
    return selection, replace(chosen, warnings=warnings, why_not_rules=tuple(reasons))


def _bound(
    chosen: Chosen,
    live: Mapping[str, str],
    providers: Iterable[Provider],
    *,
    converted: Mapping[str, Expression],
    config: Mapping[str, Any] | None = None,
    padding: Padding | None = None,
) -> tuple[Chosen, Binding]:
    """Give tensors the names and forms of the Hub, as those decide who may know.

    Args:
        chosen: what is written.
        live: name in the catalog -> name in memory.
        providers: those who may know.
        converted: what names in memory were made of, as these say.
        config: the base's.
        padding: what is known of a padded vocabulary.

    Raises:
        LayoutError: transformers' own code made some of them, which nothing here can undo, or rules do not fit; lists all.
        SourceError: a tensor would be there twice.
    """
    tensors = chosen.catalog.tensors
    sources = {live.get(source, name): source for source, name in chosen.names.items()}
    shapes = {name: tensors[source].shape for name, source in sources.items()}
    names = {live.get(source, name): name for source, name in chosen.names.items()}
    _refuse_opaque(converted, shapes)
    have = TensorsAtHand(shapes=shapes, names=names, config=config, padding=padding)
    binding = bind(have, None, providers)
    SourceError.raise_for(
        [escape(name) for name in binding.clashing_names],
        f"{count(len(binding.clashing_names), 'tensor')} would be there twice: under "
        f"{'its' if len(binding.clashing_names) == 1 else 'their'} own name, and as a part of another",
        hint="--exclude leaves out both",
    )
    if {*binding.by.values()} <= {"selection"}:
        return chosen, binding
    notes = list[str]()
    notes += [
        f"{count(rows, 'row')} of {escape(name)} that the model drops {'is' if rows == 1 else 'are'} zeros"
        for name, rows in binding.padded.items()
    ]
    split = [
        FusedTensors(are_experts=are_experts, num_stored=len(gone), num_tensors=len(apart))
        for are_experts in (True, False)
        for gone in [[name for name in binding.names_taken_apart if (EXPERTS in name) == are_experts]]
        for apart in [[name for name in binding.made_from if (EXPERTS in name) == are_experts]]
        if gone and apart
    ]
    chosen = replace(chosen, notes=(*chosen.notes, *notes), split=tuple(split))
    by = {
        name: chosen.by[name] if who == "selection" and name in chosen.by else _DECIDERS.get(who, who)
        for name, who in binding.by.items()
        if who != "selection" or name in chosen.by
    }
    return replace(_made(chosen, binding.expressions, sources), by=by), binding


def _refuse_opaque(derived: Mapping[str, Expression], shapes: Mapping[str, Shape]) -> None:
    LayoutError.raise_for(
        [
            escape(fqn)
            for fqn, expression in derived.items()
            if isinstance(expression, Opaque) and shapes.get(fqn) == expression.shape
        ],
        "the Hub has tensors in another form, and shardkit does not know the way back: transformers' own code made "
        "them, by operations that shardkit does not know",
        hint="load the checkpoint into the model with shardkit.load_into, and call its save_pretrained; or leave the "
        "tensors out with --exclude",
    )


def _made(chosen: Chosen, expressions: Mapping[str, Expression], sources: Mapping[str, str]) -> Chosen:
    """Return the tensors to write, if they are made of the chosen ones.

    Args:
        expressions: name in the output -> an expression of names in memory.
        sources: name in memory -> name in the catalog.
    """
    stored = {name: rename_leaves(expression, sources) for name, expression in expressions.items()}
    names, derived_tensors = name_in_catalog(stored, chosen.catalog.tensors)
    origins = {
        source: frozenset(leaf.name for leaf in leaves(expression))
        for source, expression in derived_tensors.items()
    }
    return replace(
        chosen,
        catalog=bound_catalog(chosen.catalog, derived_tensors),
        names={source: name for name, source in names.items()},
        origins={**chosen.origins, **origins},
    )


def _name_as_saved(
    chosen: Chosen,
    selection: Selection,
    checkpoint: Checkpoint,
    base: Base | None,
    options: ConsolidateOptions,
) -> tuple[Chosen, ClassAnswer | None, tuple[KeyRule, ...], tuple[tuple[str, ...], ...]]:
    """Where no base's weights and no manifest tell the Hub's names, take those that `save_pretrained` would give.

    Returns:
        What is written, what the class says of it if it was asked, the rules by which it renamed tensors, and groups
        of names in the catalog that it ties, the Hub's first.
    """
    config = base.config if base is not None and base.tensors is None else None
    is_known = (
        chosen.keys is not None
        or holds_hub_names(checkpoint)
        or options.naming.chooses_names
        or chosen.kind == "adapter"
    )
    if (
        base is None
        or config is None
        or is_known
        or not options.ask_class
        or not may_differ_in_memory(config)
    ):
        return chosen, None, (), ()
    tensors = chosen.catalog.tensors
    sources = {selection.live.get(source, name): source for source, name in chosen.names.items()}
    shapes = {name: tensors[source].shape for name, source in sources.items()}
    form = ask_class(
        base.directory, shapes, in_memory=True, on_start=lambda: options.tell_step(asking_text(config))
    )
    if form is None:  # without the class the names stay as they are
        return chosen, None, (), ()
    if form.hub_form is None:
        return replace(chosen, warnings=(*chosen.warnings, *_lost_form(form))), None, (), ()
    chosen = replace(chosen, by=dict.fromkeys(form.hub_form, "class"))
    here = (tuple(sources[name] for name in group if name in sources) for group in form.ties)
    ties = tuple(group for group in here if len(group) > 1)
    if all(
        isinstance(expression, Stored) and expression.name == name
        for name, expression in form.hub_form.items()
    ):
        computed = [name for name in sources if name not in form.hub_form]
        if not computed:
            return chosen, form.answer, (), ties
        note = f"not written, the model computes them: {listed(computed)}"
        kept = {source: name for source, name in chosen.names.items() if name in form.hub_form}
        return replace(chosen, names=kept, notes=(*chosen.notes, note)), form.answer, (), ties
    warning = (
        f"nothing tells the names that the model has on the Hub: those that {form.answer.model_class}.save_pretrained "
        f"gives were taken; --base MODEL makes sure, because a model of another prefix is possible"
    )
    rules = find_rules(
        {
            expression.name: name
            for name, expression in form.hub_form.items()
            if isinstance(expression, Stored)
        }
    )
    chosen = _made(chosen, form.hub_form, sources)
    return replace(chosen, warnings=(*chosen.warnings, warning)), form.answer, rules, ties


def _lost_form(form: ClassReply) -> Iterator[str]:
    """Yield the warning about tensors that are written as they are in memory, because no other form is known."""
    if form.is_lost:
        yield (
            f"tensors are written as the model holds them, and from_pretrained may make something else of them: "
            f"{form.answer.failure}; to be sure, load the checkpoint with shardkit.load_into, and call the model's "
            "save_pretrained"
        )


def _refuse_objects(objects: Sequence[str], stored: Iterable[str]) -> None:
    """Refuse an entry that is no tensor if another layer has a tensor of that name: a weight is lost there."""
    patterns = {_NUMBER.sub("#", name) for name in stored if _NUMBER.search(name)}
    lost = [
        name for name in objects if _NUMBER.sub("#", name) in patterns and not name.endswith("_extra_state")
    ]
    if lost:
        raise SourceError(
            f"{len(lost)} entries are not tensors, while those of the same name in other layers are",
            problems=map(escape, lost),
            hint="the checkpoint is damaged or was changed (such entries are never decoded): use another copy",
        )


def _fit(
    chosen: Chosen,
    selection: Selection,
    checkpoint: Checkpoint,
    vocabulary: RowsChange,
    options: ConsolidateOptions,
    sieve: Sieve,
    ask: Callable[[Base], ClassNames | None],
    tied: tuple[tuple[str, ...], ...],
) -> tuple[Chosen, Ties, BaseFit, tuple[KeyRule, ...]]:
    """Decide on ties, and compare names and shapes with the base's. Where they differ, its class may know why.

    Args:
        tied: groups of names in the catalog that the class ties, the Hub's first.

    Returns:
        What is written, the ties, how it fits, and the rules by which the class renamed tensors. None of it is about
        an adapter.
    """
    if chosen.kind == "adapter":
        if options.fill_from_base:
            raise UsageError("--fill-from-base is about a model, and the checkpoint holds an adapter")
        return sieve.sift(chosen), _NO_TIES, BaseFit(), ()
    class_names, renamed, base = sieve.class_names, tuple[KeyRule, ...](), vocabulary.base
    recorded = RecordedNames() if base_shapes(base) is not None else recorded_names(checkpoint)
    recorded = recorded._replace(ties=(*recorded.ties, *tied))
    ties, shapes, groups = _ties(chosen, base, class_names, recorded)
    if class_names is None and base is not None and _may_ask(shapes, base, groups):
        class_names = ask(base)
    if base is not None and base.tensors is not None:
        chosen, renamed = _fit_base(chosen, selection, base, options, class_names)
    if any(sieve.globs):
        chosen = sieve.sift(chosen)
    if any(sieve.globs) or class_names is not None or renamed:
        ties, shapes, groups = _ties(chosen, base, class_names, recorded)
    fit = check_fit(
        shapes,
        vocabulary,
        groups,
        class_names,
        options,
        checkpoint=checkpoint.path,
        why_missing=checkpoint.remarks.why_missing,
        left_out_shapes={
            name: entry.shape
            for name, entry in checkpoint.catalog.tensors.items()
            if name not in selection.names
        },
        is_plain=not may_be_quantised(checkpoint.catalog.tensors),
        why_not_rules=chosen.why_not_rules,
    )
    if recorded.omitted and options.naming.weights == "model" and not options.naming.chooses_part:
        fit = replace(fit, notes=(*fit.notes, *_omitted_notes(dict(recorded.omitted), chosen.names.values())))
    return _carry(chosen, base, fit.carried), ties, fit, renamed


def _omitted_notes(omitted: Iterable[str], names: Collection[str]) -> Iterator[str]:
    """Yield a note about tensors that preshard left out, if the output lacks them."""
    if gone := [name for name in omitted if name not in names]:
        yield (
            f"not in the output, because preshard left {count(len(gone), 'tensor')} of its source out: {listed(gone)}; "
            "--base MODEL takes them from there"
        )


def _fit_base(
    chosen: Chosen,
    selection: Selection,
    base: Base,
    options: ConsolidateOptions,
    class_names: ClassNames | None,
) -> tuple[Chosen, tuple[KeyRule, ...]]:
    """Return the tensors to write in the base's form and under its names, and the rules by which these changed.

    Args:
        class_names: what the base's class says. Without it tensors may be a part of the base, with shorter prefixes.
    """
    before, live, shapes_in_base = chosen.names, selection.live, base_shapes(base) or {}
    is_lone, rules = not shapes_in_base.keys() >= {*before.values()}, tuple[KeyRule, ...]()
    if not options.naming.changes_names and (class_names is not None or is_lone):
        wholes = (
            _wholes(shapes_in_base, {}, options) if base.is_given and not options.allow_unexpected else []
        )
        if class_names is not None and is_lone and wholes:
            live = _live_in_whole(chosen, live, shapes_in_base, options, class_names)
        asked_class = [] if class_names is None else [class_provider(lambda _: class_names, shapes_in_base)]
        converted = class_names.converted if class_names is not None else {}
        chosen, _ = _bound(chosen, live, [*asked_class, whole_provider(wholes)], converted=converted)
        rules = find_rules({before.get(source, name): name for source, name in chosen.names.items()})
        chosen = replace(chosen, names=_in_order(chosen.names, shapes_in_base) or chosen.names)
    lacking = [name for name in chosen.names.values() if name not in shapes_in_base]
    unsaved = [name for name in lacking if class_names and name in class_names.unsaved]
    states = [name for name in lacking if "_extra_state" in split(name) and not options.allow_unexpected]
    kept = {source: name for source, name in chosen.names.items() if name not in {*unsaved, *states}}
    names_by_reason = {"the model computes them": unsaved, "they are states of modules, no weights": states}
    notes = [f"not written, {why}: {listed(names)}" for why, names in names_by_reason.items() if names]
    return replace(chosen, names=kept, notes=(*chosen.notes, *notes)), rules


def _shapes_in(chosen: Chosen, names: Mapping[str, str]) -> dict[str, Shape]:
    return {name: chosen.catalog.tensors[source].shape for source, name in names.items()}


def _live_in_whole(
    chosen: Chosen,
    live: Mapping[str, str],
    shapes_in_base: Mapping[str, Shape],
    options: ConsolidateOptions,
    class_names: ClassNames,
) -> Mapping[str, str]:
    """Return the names in memory that a part's tensors have in the whole model; `live` if it is no part.

    Args:
        chosen: what is written.
        live: name in the catalog -> name in memory, in the part.
        shapes_in_base: shape by name in the base.
        options: globs of names that the base gives are no part's.
        class_names: what the class of the whole model says.
    """
    in_memory = {source: live.get(source, name) for source, name in chosen.names.items()}
    whole = {fqn: expression.shape for fqn, expression in class_names.converted.items()}
    whole |= {fqn: shapes_in_base[name] for fqn, name in class_names.names.items() if name in shapes_in_base}
    shapes = {source: chosen.catalog.tensors[source].shape for source in in_memory}
    named = name_part(in_memory, shapes, _wholes(whole, class_names.names, options))
    return live if named == in_memory else {**live, **named}


def _wholes(
    whole: Mapping[str, Shape], names: Mapping[str, str], options: ConsolidateOptions
) -> list[Mapping[str, Shape]]:
    """Return tensors of a whole model, and those of them that are not to be taken from the base; `names` in its files."""
    globs = Globs((), tuple(options.fill_from_base))
    checkpoint_shapes = {fqn: shape for fqn, shape in whole.items() if globs.selects(names.get(fqn, fqn))}
    return [whole, checkpoint_shapes] if options.fill_from_base else [whole]


def _ties(
    chosen: Chosen,
    base: Base | None,
    class_names: ClassNames | None,
    recorded: RecordedNames,
) -> tuple[Ties, dict[str, Shape], list[tuple[str, ...]]]:
    """Decide on ties.

    Args:
        base: None is no base.
        class_names: what the base's class says; None if it was not asked.
        recorded: what the checkpoint's manifest says, where no base's weights do.

    Returns:
        The ties, the shapes of what is left by name in the output, and groups of names that mean one tensor.
    """
    declared = ties_embeddings(base.config) if base else None
    base_tensors = base.tensors if base else None
    known_ties = [*(class_names.ties if class_names else ()), *_recorded_ties(chosen, recorded, declared)]
    ties = resolve_ties(
        chosen.catalog,
        chosen.names,
        declared=declared,
        base_names=base_tensors if base_tensors is not None else _recorded_all(chosen, recorded),
        known_ties=known_ties,
        equal_in_base=partial(holds_equal, base) if base else lambda _one, _two: False,
    )
    groups = tie_groups(
        ties, {**dict.fromkeys(chosen.names.values()), **(base_tensors or {})}, declared=declared
    )
    if ties.diverged and _unties(ties, base.config if base else None):
        ties = replace(ties, dropped={})
    shapes = {
        name: chosen.catalog.tensors[source].shape
        for source, name in chosen.names.items()
        if name not in ties.dropped
    }
    return ties, shapes, [*groups, *known_ties]


def _unties(ties: Ties, config: Mapping[str, Any] | None) -> bool:
    """True if the written config says that nothing is tied.

    It says so of all ties at once: `from_pretrained` then wants embeddings of encoder and decoder, and the head's bias,
    under each name.
    """
    return ties.untied and ties_embeddings(config) is not False and may_be_untied(config)


def _recorded_ties(
    chosen: Chosen, recorded: RecordedNames, declared: bool | None
) -> Iterator[tuple[str, ...]]:
    """Yield the recorded groups under the names that are written, without an output that the config does not tie."""
    for group in recorded.ties:
        names = [chosen.names[stored] for stored in group if stored in chosen.names]
        kept = [name for name in names if declared is not False or not is_output(name)]
        if len(kept) > 1:
            yield tuple(kept)


def _recorded_all(chosen: Chosen, recorded: RecordedNames) -> frozenset[str] | None:
    """Return the recorded names of the Hub's files, if they are those of all that is written, further names aside."""
    further = {stored for _, *aliases in recorded.ties for stored in aliases}
    names = {name for stored, name in chosen.names.items() if stored not in further}
    return recorded.names if recorded.names is not None and names <= recorded.names else None


def _carry(chosen: Chosen, base: Base | None, names: Sequence[str]) -> Chosen:
    """Add tensors of the base, as they are."""
    if not names:
        return chosen
    assert base is not None
    assert base.catalog is not None
    sources = {computed_name(name, chosen.catalog.tensors): name for name in names}
    catalog = carry(chosen.catalog, list(chosen.names), base.catalog, sources)
    return replace(chosen, catalog=catalog, names={**chosen.names, **sources})


def _images(
    tensors: Sequence[OutputTensor],
    base: Base | None,
    options: ConsolidateOptions,
    checkpoint: Checkpoint,
    kind: str,
    settings: Mapping[str, str],
) -> SafetensorsImages:
    if kind == "adapter":  # PEFT has no index
        is_whole = is_diffusers_lora(checkpoint) and all(tensor.fqn == tensor.source for tensor in tensors)
        stem = checkpoint.hub.stem if checkpoint.hub is not None and is_whole else ADAPTER_STEM
        return SafetensorsImages(tensors, max_shard_bytes=None, stem=stem, settings=settings)
    files = files_of(base) if base is not None and options.follows_base else None
    if files is not None and not _is_as_in(base, tensors):
        files = None
    return SafetensorsImages(
        tensors,
        max_shard_bytes=options.max_shard_bytes,
        stem=MODEL if base is None else base.stem,
        files=files,
        index=base.index if base is not None and files is not None else None,
        settings=settings,
    )


def _is_as_in(base: Base | None, tensors: Sequence[OutputTensor]) -> bool:
    """True if a base has the same tensors in the same dtypes and shapes."""
    base_tensors = base.tensors if base is not None and base.tensors is not None else {}
    return len(tensors) == len(base_tensors) and all(
        tensor.fqn in base_tensors and base_tensors[tensor.fqn] == (tensor.dtype, tensor.shape)
        for tensor in tensors
    )


def _assets(
    chosen: Chosen,
    base: Base | None,
    ties: Ties,
    tensors: Sequence[OutputTensor],
    tokenizer: Tokenizer | None,
) -> tuple[list[Asset], list[str], list[str]]:
    """Return the files beside the weights, notes and warnings about them."""
    if chosen.kind == "adapter":
        assets, changed = adapter_assets(base, chosen.adapter_config), list[str]()
    else:
        config = base.config if base else None
        assets, changed = model_assets(
            base,
            main_dtype(tensors, base),
            most=most_bytes((tensor.dtype, tensor.nbytes) for tensor in tensors),
            untie=_unties(ties, config),
            tied=_are_tied(ties, tensors, config),
            is_plain=not may_be_quantised({tensor.fqn: tensor for tensor in tensors}),
        )
    assets = assets if tokenizer is None else with_tokenizer(assets, tokenizer)
    refuse_pointers({asset.name: asset.path for asset in assets if asset.path is not None})
    own_files, names = base.own_files if base is not None else None, [asset.name for asset in assets]
    scales = [ADAPTER_CONFIG] if chosen.kind == "merged" else []
    changed += own_notes(base, [*names, *scales]) if base is not None else ()
    warnings = list(own_files.warnings) if own_files is not None else []
    if (
        tokenizer is not None
        or (own_files is not None and own_files.names)
        or (base is not None and base.is_trainers)
    ):
        warnings += eos_warnings(assets)
    if own_files is not None and tokenizer is None:
        warnings += _row_warnings(own_tokenizer(base), base, tensors)
    return assets, changed, warnings


def _are_tied(ties: Ties, tensors: Sequence[OutputTensor], config: Mapping[str, Any] | None) -> bool | None:
    """Return whether input and output embeddings are one in the output; None if there is no output layer."""
    config_ties = ties_embeddings(config)
    if config_ties is not None or not any(is_output(tensor.fqn) for tensor in tensors):
        return config_ties if config_ties is not None or not any(map(is_output, ties.dropped)) else True
    return False


def _row_warnings(
    tokenizer: Tokenizer | None, base: Base | None, tensors: Sequence[OutputTensor]
) -> Iterator[str]:
    """Yield a warning about a tokenizer of the checkpoint's own with ids beyond the rows of the output."""
    try:
        check_tokenizer(tokenizer, base, {tensor.fqn: tensor.shape for tensor in tensors})
    except LayoutError as error:
        yield f"{error.message}; {error.to_json()['hint']}"


def _check_options(checkpoint: Checkpoint, base: Base | None, options: ConsolidateOptions) -> None:
    check_choice(options.dtype, base)
    if (options.allow_missing or options.allow_unexpected) and (base is None or base.tensors is None):
        raise UsageError("--allow-missing and --allow-unexpected are about a base: name it with --base")
    if options.fill_from_base:
        _check_filled_from(base)
    reason = checkpoint.contents.refused_weights.get(options.naming.weights)
    if reason is not None:
        raise SourceError(
            f"--weights {escape(options.naming.weights)}: {reason}",
            hint="leave --weights out to take the model's",
        )


def _check_filled_from(base: Base | None) -> None:
    """Refuse to take tensors from a base that is not named, or not on this machine."""
    if base is None or not base.is_given or base.tensors is None:
        raise UsageError("--fill-from-base takes tensors of a base with weights: name it with --base")
    if base.catalog is None:
        raise UsageError(
            f"--fill-from-base copies bytes of the base, and the weights of {escape(base.label)} are not on this machine",
            hint=f"`{base.download}` brings them here and prints the directory to give as --base",
        )


def _select(checkpoint: Checkpoint, base: Base | None, naming: Naming) -> Selection:
    catalog = checkpoint.catalog
    is_lora = is_diffusers_lora(checkpoint) and not (naming.chooses_names or naming.changes_names)
    if checkpoint.hub is not None and (
        is_lora or not catalog.tensors
    ):  # even a file without tensors is a model
        names = {name: name for name in catalog.tensors}
        return Selection(names=names, root="", stripped=(), skipped=(), candidates=())
    recorded = recorded_rules(checkpoint) if naming.weights == "model" else None
    if recorded is not None and naming.root is None and not naming.strip_prefix:
        root, shards = recorded.root, recorded_shards(checkpoint)
        if root is None and shards is not None and base_shapes(base) is None:
            root = (shards.root or "").rstrip(".")  # names are the Hub's, whatever all of them begin with
            if any(path[:-1] == (SAVED_ROOT,) for path in (catalog.paths or {}).values()):
                root = SAVED_ROOT  # `reshard` keeps the dict that `save` wrote
        naming = replace(naming, root=root)
    select = partial(
        select_model,
        catalog.tensors,
        catalog.objects,
        catalog.paths,
        checkpoint.contents.roots,
        base_shapes=base_shapes(base),
        key_rules=None if recorded is None else recorded.rules,
    )
    selection = select(naming=naming)
    is_of_class = base is None and naming.weights == "model" and holds_saved_state(checkpoint)
    if is_of_class and naming.root is None and not naming.strip_prefix and not selection.candidates:
        return select(naming=replace(naming, root=SAVED_ROOT))  # all that its class loads, and nothing else
    return selection


def _tie_warnings(ties: Ties, base: Base | None) -> list[str]:
    says = base is not None and base.config is not None and may_be_untied(base.config)
    note = " and the written config says tie_word_embeddings: false" if says else ""
    return [
        f"{escape(kept)} and {escape(twin)} are tied in the base, but training made them differ: both are kept{note}"
        for kept, twin in ties.diverged
    ]


def _base_warnings(base: Base | None, kind: str) -> list[str]:
    if kind != "adapter" and (base is None or base.config is None):
        return [
            f"there is no {CONFIG} for the model: name the model that it was trained from with --base, so that the "
            "output can be loaded by itself"
        ]
    return []


def _in_order(names: dict[str, str], base_names: Collection[str] | None) -> dict[str, str] | None:
    """Return names in the order of the base's; None if two tensors have one name."""
    by_output = {name: source for source, name in names.items()}
    if len(by_output) < len(names):
        return None
    return {by_output[name]: name for name in in_order(by_output, base_names)}


def _may_ask(shapes: Mapping[str, Shape], base: Base | None, ties: Iterable[Collection[str]]) -> bool:
    """True if the class may explain a misfit: by what it leaves out or computes, by ties, heads, names or its own form."""
    shapes_in_base = base_shapes(base)
    if base is None or shapes_in_base is None or not base.is_given:
        return False
    return not compare_with_base(shapes, shapes_in_base, ties=ties).is_equal


def _ask_class(base: Base, on_step: OnStep) -> ClassNames | None:
    """Ask the class that a base's config names, in a process of its own; None if it cannot be asked."""
    shapes = base_shapes(base)
    if shapes is None or not (base.config or {}).get("architectures"):
        return None
    reply = ask_class(base.directory, shapes, on_start=lambda: on_step(asking_text(base.config)))
    return None if reply is None else reply.match
