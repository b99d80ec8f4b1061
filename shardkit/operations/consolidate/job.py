"""Decide what consolidate reads and writes, before any byte moves.

    checkpoint -> names -> ties -> comparison with the base -> dtypes -> images -> plan

Building a job reads headers and configs, and the bytes of tensors that may be tied. It writes nothing.

A tensor has up to three names: the stored one, in the checkpoint's catalog; the one in memory, as the model calls it; and
the one in the output, as the Hub has it. `chosen.names` maps stored names to names in the output, and `selection.live`
maps stored names to names in memory.
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
    has_equal_bytes,
    holds_hub_names,
    holds_saved_state,
    recorded_derived,
    recorded_names,
    recorded_rules,
    recorded_shards,
    tensors_by_file,
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
    saved_form_provider,
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
    find_default_dtypes,
    find_folded_dtypes,
)
from shardkit.operations.consolidate.adapter import STEM as ADAPTER_STEM
from shardkit.operations.consolidate.adapter import ChosenTensors, choose_tensors, merged_by_peft
from shardkit.operations.consolidate.assets import (
    Asset,
    adapter_assets,
    main_dtype,
    model_assets,
    trained_modules,
    with_tokenizer,
)
from shardkit.operations.consolidate.fit import BaseFit, base_shapes, check_fit
from shardkit.operations.consolidate.globs import Sieve, exclude_early
from shardkit.operations.consolidate.headers import is_diffusers_lora, keep_settings
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.operations.consolidate.own import eos_warnings, own_notes, own_tokenizer
from shardkit.operations.consolidate.quantize import Example, example_of, plain_options, quantise
from shardkit.operations.consolidate.schedule_free import EVAL, optimizer_warnings, with_eval_weights
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
"""Deciders that results call by other names than `Binding` does."""
_NO_TIES = Ties(dropped={}, diverged=(), untied=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateJob:
    """All decisions of a consolidation."""

    checkpoint: Checkpoint
    options: ConsolidateOptions
    weights: str
    """The option `weights`: "model", "ema", "eval" ..."""
    selection: Selection
    kind: str
    """"model", "adapter", or "merged": an adapter added to its model."""
    ties: Ties
    base: Base | None
    catalog: Catalog
    """The chosen tensors. Extents are raw bytes; tensors that only other parts read may have no chunks."""
    tensors: tuple[OutputTensor, ...]
    """In the order of the output."""
    output: SafetensorsImages
    plan: TransferPlan
    assets: tuple[Asset, ...]
    """The files other than weights."""
    contents: tuple[tuple[str, int], ...]
    """Name and CRC-32 of each asset. They identify the output: another config or tokenizer makes another output.

    The files' stamps would not do: each machine of a job may have its own copy of the base.
    """
    notes: tuple[str, ...]
    unloadable: tuple[str, ...]
    """Reasons why `from_pretrained` would not load all weights of the output; `warnings` begins with them."""
    warnings: tuple[str, ...]
    fit: BaseFit
    """How names and shapes compare with the base's."""
    answer: ClassAnswer | None = None
    """What the class says about the output's names, if it was asked."""
    split: tuple[FusedTensors, ...] = ()
    """Tensors that are split into several."""
    names: tuple[NamedTensor, ...] = ()
    """All tensors of the output, in a dry run."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of all files of the output."""
        return self.plan.written_bytes + sum(asset.nbytes for asset in self.assets)

    @property
    def decided(self) -> dict[str, object]:
        """See `operations.write.Job`."""
        return {"description": self.describe(), "assets": self.contents}

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of the files other than weights."""
        return tuple(asset.name for asset in self.assets)

    def marked(self, mark: str) -> ConsolidateJob:
        """Return the same job with a mark in the names of its weight files, for an output in a store.

        Raises:
            UsageError: the output's files must keep their names, by which their library finds them: those of an
                adapter, or of a model that is not in `model*.safetensors`.
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
        output = self.output.with_mark(mark)
        return replace(self, output=output, plan=replace(self.plan, images=output))

    def describe(self, crcs: Mapping[str, int] = MappingProxyType({})) -> manifest.HubModel:
        """Return the manifest, as far as it is known before bytes move; `crcs` has the CRC-32s of tensors."""
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
    """Decide what consolidate writes.

    Args:
        checkpoint: the opened checkpoint.
        base: the base that the user named or that was found, or None.
        options: the user's options.
        share: the files that this process writes; only their records are opened. None for all files.

    Raises:
        UsageError: the value of an option is not allowed, or the option cannot be fulfilled.
        SourceError: the requested weights are missing, ambiguous or unrecoverable, or safetensors cannot store them.
        LayoutError: names or shapes differ from those of the base that the user named.
    """
    fill, example = options.fill_from_base, None if options.quantize is None else example_of(base)
    options = options if example is None else plain_options(options, base, example)
    _check_options(checkpoint, base, options)
    weights, of_training = options.weights, tuple[str, ...]()
    checkpoint, options, evaluated = _choose_weights(checkpoint, base, options)
    if weights == "model":
        of_training = tuple(optimizer_warnings(checkpoint))
    named = _name(checkpoint, base, options)
    chosen, selection, fit, base = named.chosen, named.selection, named.fit, named.vocabulary.base
    tensors, dtype_notes = _tensors(named, checkpoint, base, options)
    written = take_factors(tensors, chosen.catalog, checkpoint, keep=options.keep_factors)
    headers = keep_settings(checkpoint, written.tensors)
    check_tokenizer(options.new_tokenizer, base, {tensor.fqn: tensor.shape for tensor in written.tensors})
    form = base if example is None or base is None else example.form(base)
    is_quantised, tokenizer = example is not None, options.new_tokenizer
    assets, changed, doubts = _assets(
        chosen, form, named.ties, written.tensors, tokenizer, is_quantised=is_quantised
    )
    written = written if example is None else _quantised(written, chosen, fit, example, fill)
    output = _images(written.tensors, form, options, checkpoint, chosen.kind, headers.settings)
    left_out_names = checkpoint.catalog.tensors.keys() - selection.names.keys()
    untrained = trained_modules(
        base,
        [asset.name for asset in assets],
        selection.root,
        left_out_names,
        by_hand=options.naming.weights != "model" or options.naming.chooses_names,
    )
    catalog = _open_records(
        written, _images_of(output, share), as_read=share is not None and not options.dry_run
    )
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


def _choose_weights(
    checkpoint: Checkpoint, base: Base | None, options: ConsolidateOptions
) -> tuple[Checkpoint, ConsolidateOptions, tuple[str, ...]]:
    """Return the checkpoint with the weights of `--weights`, the options to read them, and notes."""
    if options.weights == EVAL:
        options = replace(options, weights="model")
        checkpoint, notes = with_eval_weights(checkpoint, _select(checkpoint, base, options.naming).names)
        return checkpoint, options, notes
    if checkpoint.contents.roots.get(options.weights) == ():  # the whole checkpoint consists of these weights
        options = replace(options, weights="model")
    return checkpoint, options, ()


def _quantised(
    written: Written, chosen: ChosenTensors, fit: BaseFit, example: Example, fill: Sequence[str]
) -> Written:
    """Return the tensors to write with `--quantize`; arguments and errors as for `quantise`."""
    if chosen.kind == "adapter":
        raise UsageError("--quantize is about a model, and the checkpoint holds an adapter")
    tensors, catalog, note = quantise(written.tensors, written.catalog, example, fill, fit.from_base)
    return written._replace(tensors=tensors, catalog=catalog, notes=(*written.notes, note))


def _named_tensors(
    tensors: Iterable[OutputTensor],
    chosen: ChosenTensors,
    checkpoint: Checkpoint,
    options: ConsolidateOptions,
) -> Iterator[NamedTensor]:
    """Yield each tensor of the output with its sources and who decided its name."""
    by = "equal names"
    if options.naming.changes_names:
        by = "person"
    elif options.naming.weights == "model" and options.naming.root is None and recorded_rules(checkpoint):
        by = "manifest"
    for tensor in tensors:
        sources = sorted(chosen.origins.get(tensor.source, (tensor.source,)), key=natural)
        yield NamedTensor.made_of(tensor.fqn, chosen.by.get(tensor.fqn, by), sources)


def is_copied_quantised(checkpoint: Checkpoint) -> bool:
    """True if the source's quantised weights are copied as they are, though no config says that they are quantised."""
    return any(_copied_scales(checkpoint))


def _copied_scales(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note if quantised weights are copied as they are, though no config says that they are quantised."""
    is_copied = checkpoint.hub is not None and checkpoint.remarks.dequantized is None
    why = why_scaled(checkpoint) if is_copied else None
    if why is not None:
        yield f"the model is quantised and copied as it is: {why}: its values mean nothing without their scales"


def _images_of(output: SafetensorsImages, share: Share | None) -> list[SafetensorsImage]:
    """Return the files that this process writes: all, those of its part, or none if all parts are finished."""
    images = list(output)
    if share is None:
        return images
    if not isinstance(share, Part):
        return []
    return [images[number] for number in share_of([image.size for image in images], share)]


def _open_records(written: Written, images: Iterable[SafetensorsImage], *, as_read: bool) -> Catalog:
    """Return a catalog of raw extents. Tensors that go into other files than `images` may have no chunks.

    Args:
        written: the tensors of all files.
        images: the files that this process writes.
        as_read: records may be opened as late as when they are read, which saves requests to a store.
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

    chosen: ChosenTensors
    selection: Selection
    ties: Ties
    fit: BaseFit
    vocabulary: RowsChange
    answer: ClassAnswer | None
    """What the class says about the names, if it was asked."""

    @property
    def names(self) -> dict[str, str]:
        """Name in the catalog -> name in the output, in the order of the output; one name for each group of ties."""
        return {source: name for source, name in self.chosen.names.items() if name not in self.ties.dropped}

    def notes(self, base: Base | None) -> Iterator[str]:
        """Yield the notes about the choice of tensors and names."""
        yield from (*self.selection.notes, *self.chosen.notes)
        yield from (*(base.notes if base else ()), *self.vocabulary.notes, *self.fit.notes)

    def warnings(self, base: Base | None) -> Iterator[str]:
        """Yield the warnings about the choice, except those that say that the output cannot be loaded."""
        selection = self.selection
        if base is not None and self.chosen.kind != "adapter":
            yield from base.warnings
        if not selection.unloadable:  # otherwise those warnings ask for the base already
            yield from _base_warnings(base, self.chosen.kind)
        yield from self.fit.warnings
        yield from self.vocabulary.warnings
        if not {*self.names.values()} <= (base_shapes(base) or {}).keys():  # otherwise the base has them all
            yield from selection.renaming
            if self.answer is None or self.answer.missing:  # otherwise the class finds all of its weights
                yield from selection.warnings
        if self.answer is None:  # otherwise the class confirms that its files have these names
            yield from selection.in_memory_warnings(list(self.names.values()), base_shapes(base))
        yield from self.chosen.warnings


def _name(checkpoint: Checkpoint, base: Base | None, options: ConsolidateOptions) -> _NamedTensors:
    """Choose the tensors, name them, and compare them with the base's; errors as for `build_job`."""
    ask = partial(_ask_class, on_step=options.tell_step)
    sieve, selection, chosen = _choose(checkpoint, base, options, ask)
    vocabulary = RowsChange(base=base)
    if chosen.kind != "adapter":
        shapes = _shapes_in(chosen, sieve.selected_names(chosen))
        vocabulary = follow_vocabulary(checkpoint, base, shapes, options.new_tokenizer)
    if vocabulary.changed:  # renaming to the base's names matches shapes, which are others now
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
    """Choose the dtypes; return the tensors to write, in the order of the output, and notes.

    Raises:
        UsageError: the dtype or a dtype rule cannot be applied.
    """
    names, stored = named.names, named.chosen.catalog
    sources = {name: source for source, name in names.items()}
    default_dtypes = find_default_dtypes(stored, sources, checkpoint.remarks.dequantized, {})
    fold_notes = list[str]()
    folds = made_among(stored, names, Fold)
    folded = [name for source, name in names.items() if source in folds]
    if folded and not options.keep_factors and options.dtype in (KEEP, BASE):
        nbytes = {name: stored.tensors[source].nbytes for source, name in names.items()}
        default_dtypes, fold_notes = find_folded_dtypes(default_dtypes, folded, nbytes, base)
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
) -> tuple[Sieve, Selection, ChosenTensors]:
    """Choose the tensors and name them; return them with the filter of `--include` and `--exclude`.

    Raises as `build_job`.
    """
    naming = options.naming
    if not naming.chooses_names:
        # Checked first: later, such names would be refused with an error that does not name the cause.
        refuse_factors(checkpoint.catalog.tensors, hint=merged_by_peft(checkpoint, base))
        refuse_prompts(checkpoint.catalog.tensors, base_shapes(base) or ())
    selection, sieve = exclude_early(checkpoint, base, _select(checkpoint, base, naming), options, ask)
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
        selection = replace(selection, live=chosen.names)  # merging removed PEFT's own segments
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
    derived = recorded_derived(checkpoint) if rules is None else {}
    takes_shipped = is_plain and options.key_rules == AUTO
    chosen, binding = _bind_names(
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


def _refuse_rules(chosen: ChosenTensors, naming: Naming) -> None:
    """Refuse `--keys` for an adapter, or together with other options that set the names."""
    if chosen.kind == "adapter":
        raise UsageError("--keys is about a model, and the checkpoint holds an adapter")
    if naming.changes_names:
        raise UsageError(
            "--keys gives the names, and --strip-prefix, --add-prefix and --rename would have no effect",
            hint="leave them out, and write the names into the rules; --root says where the model begins",
        )


def _with_rules(
    selection: Selection, chosen: ChosenTensors, base: Base | None, binding: Binding
) -> tuple[Selection, ChosenTensors]:
    """Add the notes on how key rules renamed the tensors, or the warning why no rules applied."""
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
    # Without a config every rule set fails for the same reason, and the warning about the names asks for the base.
    reasons = binding.why_not if _has_config(base) or not selection.unloadable else ()
    if binding.candidates:
        names = " and ".join(rules.name for rules in binding.candidates)
        reasons = (f"several sets of key rules fit: {names}; choose one with --keys",)
    warnings = (*chosen.warnings, *(f"key rules: {reason}" for reason in reasons))
    return selection, replace(chosen, warnings=warnings, why_not_rules=tuple(reasons))


def _bind_names(
    chosen: ChosenTensors,
    live: Mapping[str, str],
    providers: Iterable[Provider],
    *,
    converted: Mapping[str, Expression],
    config: Mapping[str, Any] | None = None,
    padding: Padding | None = None,
) -> tuple[ChosenTensors, Binding]:
    """Give tensors the Hub's names and shapes. The providers are asked in order (see `layout.binding`).

    Args:
        chosen: the tensors to write.
        live: name in the catalog -> name in memory.
        providers: sources of names: key rules, a manifest, the model's class, a larger model.
        converted: name in memory -> the expression that made it from the Hub's tensors.
        config: the base's config.
        padding: what is known about a padded vocabulary.

    Raises:
        LayoutError: transformers' own code made some of the tensors, which shardkit cannot undo; or rules do not fit.
            Lists all of them.
        SourceError: a tensor would be written twice.
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
    if {*binding.by.values()} <= {"selection"} and not binding.dropped:
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
    chosen = replace(chosen, notes=(*chosen.notes, *notes), split=(*chosen.split, *split))
    by = {
        name: chosen.by[name] if who == "selection" and name in chosen.by else _DECIDERS.get(who, who)
        for name, who in binding.by.items()
        if who != "selection" or name in chosen.by
    }
    return replace(_with_derived_tensors(chosen, binding.expressions, sources), by=by), binding


def _refuse_opaque(derived: Mapping[str, Expression], shapes: Mapping[str, Shape]) -> None:
    """Refuse tensors that transformers made by operations that shardkit does not know, and so cannot undo.

    Args:
        derived: name in memory -> the expression that made the tensor.
        shapes: name in memory -> shape in the checkpoint. A tensor of another shape is no longer the one that was made.
    """
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


def _with_derived_tensors(
    chosen: ChosenTensors, expressions: Mapping[str, Expression], sources: Mapping[str, str]
) -> ChosenTensors:
    """Replace the chosen tensors by tensors that are computed from them.

    Args:
        chosen: the tensors to compute from.
        expressions: name in the output -> an expression of names in memory, such as a slice of a fused tensor.
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
    chosen: ChosenTensors,
    selection: Selection,
    checkpoint: Checkpoint,
    base: Base | None,
    options: ConsolidateOptions,
) -> tuple[ChosenTensors, ClassAnswer | None, tuple[KeyRule, ...], tuple[tuple[str, ...], ...]]:
    """Give tensors the names that `save_pretrained` would give, if neither a base nor a manifest has the Hub's names.

    Returns:
        The tensors to write; the class's answer, if it was asked; the rules by which it renamed tensors; and the
        groups of names in the catalog that it ties, the Hub's name first in each.
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
    here = (tuple(sources[name] for name in group if name in sources) for group in form.ties)
    ties = tuple(group for group in here if len(group) > 1)
    chosen, binding = _bind_names(chosen, selection.live, [saved_form_provider(form.hub_form)], converted={})
    if binding.dropped:
        note = f"not written, the model computes them: {listed(binding.dropped)}"
        chosen = replace(chosen, notes=(*chosen.notes, note))
    stored = {
        expression.name: name
        for name, expression in binding.expressions.items()
        if isinstance(expression, Stored)
    }
    if len(stored) == len(binding.expressions) and all(name == on_hub for name, on_hub in stored.items()):
        return chosen, form.answer, (), ties
    warning = (
        f"the model's names on the Hub are not known: those that {form.answer.model_class}.save_pretrained gives are "
        f"used; to be sure, add --base MODEL, because the names there may have another prefix"
    )
    return replace(chosen, warnings=(*chosen.warnings, warning)), form.answer, find_rules(stored), ties


def _lost_form(form: ClassReply) -> Iterator[str]:
    """Yield the warning about tensors that are written as they are in memory, as their form on the Hub is unknown."""
    if form.is_lost:
        yield (
            f"tensors are written as the model holds them, and from_pretrained may make something else of them: "
            f"{form.answer.failure}; to be sure, load the checkpoint with shardkit.load_into, and call the model's "
            "save_pretrained"
        )


def _refuse_objects(objects: Sequence[str], stored: Iterable[str]) -> None:
    """Refuse a checkpoint in which one layer has an object where the other layers have a tensor: a weight was lost."""
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
    chosen: ChosenTensors,
    selection: Selection,
    checkpoint: Checkpoint,
    vocabulary: RowsChange,
    options: ConsolidateOptions,
    sieve: Sieve,
    ask: Callable[[Base], ClassNames | None],
    tied: tuple[tuple[str, ...], ...],
) -> tuple[ChosenTensors, Ties, BaseFit, tuple[KeyRule, ...]]:
    """Decide on ties, and compare names and shapes with the base's. If they differ, ask the base's class why.

    An adapter is returned without ties or comparison.

    Args:
        chosen: the tensors to write.
        selection: which tensors of the checkpoint they are.
        checkpoint: the opened checkpoint.
        vocabulary: with the base.
        options: the user's options.
        sieve: the filter of `--include` and `--exclude`.
        ask: asks the base's class.
        tied: groups of names in the catalog that the class ties, the Hub's first.

    Returns:
        The tensors to write, the ties, how they fit the base, and the rules by which the class renamed tensors.
    """
    if chosen.kind == "adapter":
        if options.fill_from_base:
            raise UsageError("--fill-from-base is about a model, and the checkpoint holds an adapter")
        return sieve.sift(chosen), _NO_TIES, BaseFit(), ()
    class_names, renamed, base = sieve.class_names, tuple[KeyRule, ...](), vocabulary.base
    recorded = RecordedNames() if base_shapes(base) is not None else recorded_names(checkpoint)
    recorded = recorded._replace(ties=(*recorded.ties, *tied))
    ties, shapes, groups = _ties(chosen, base, class_names, recorded)
    if class_names is None and base is not None and _may_explain_misfit(shapes, base, groups):
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
    return _add_from_base(chosen, base, fit.from_base), ties, fit, renamed


def _omitted_notes(omitted: Iterable[str], names: Collection[str]) -> Iterator[str]:
    """Yield a note about tensors that preshard left out and that the output lacks."""
    if gone := [name for name in omitted if name not in names]:
        yield (
            f"not in the output, because preshard left {count(len(gone), 'tensor')} of its source out: {listed(gone)}; "
            "--base MODEL takes them from there"
        )


def _fit_base(
    chosen: ChosenTensors,
    selection: Selection,
    base: Base,
    options: ConsolidateOptions,
    class_names: ClassNames | None,
) -> tuple[ChosenTensors, tuple[KeyRule, ...]]:
    """Convert tensors to the base's names and shapes, and leave out those that the base need not have.

    Args:
        chosen: the tensors to write.
        selection: which tensors of the checkpoint they are.
        base: a base with known tensors.
        options: the user's options.
        class_names: what the base's class says. Without it, tensors can only be matched by name, or as a part of the
            base with shorter prefixes.

    Returns:
        The tensors to write, and the rules by which their names changed.
    """
    before, live, shapes_in_base = chosen.names, selection.live, base_shapes(base) or {}
    is_lone, rules = not shapes_in_base.keys() >= {*before.values()}, tuple[KeyRule, ...]()
    if not options.naming.changes_names and (class_names is not None or is_lone):
        wholes = (
            _whole_models(shapes_in_base, {}, options)
            if base.is_given and not options.allow_unexpected
            else []
        )
        if class_names is not None and is_lone and wholes:
            live = _live_in_whole(chosen, live, shapes_in_base, options, class_names)
        asked_class = [] if class_names is None else [class_provider(lambda _: class_names, shapes_in_base)]
        converted = class_names.converted if class_names is not None else {}
        chosen, _ = _bind_names(chosen, live, [*asked_class, whole_provider(wholes)], converted=converted)
        rules = find_rules({before.get(source, name): name for source, name in chosen.names.items()})
        chosen = replace(chosen, names=_in_order(chosen.names, shapes_in_base) or chosen.names)
    lacking = [name for name in chosen.names.values() if name not in shapes_in_base]
    unsaved = [name for name in lacking if class_names and name in class_names.unsaved]
    states = [name for name in lacking if "_extra_state" in split(name) and not options.allow_unexpected]
    kept = {source: name for source, name in chosen.names.items() if name not in {*unsaved, *states}}
    names_by_reason = {"the model computes them": unsaved, "they are states of modules, no weights": states}
    notes = [f"not written, {why}: {listed(names)}" for why, names in names_by_reason.items() if names]
    return replace(chosen, names=kept, notes=(*chosen.notes, *notes)), rules


def _shapes_in(chosen: ChosenTensors, names: Mapping[str, str]) -> dict[str, Shape]:
    return {name: chosen.catalog.tensors[source].shape for source, name in names.items()}


def _live_in_whole(
    chosen: ChosenTensors,
    live: Mapping[str, str],
    shapes_in_base: Mapping[str, Shape],
    options: ConsolidateOptions,
    class_names: ClassNames,
) -> Mapping[str, str]:
    """Return the names in memory that tensors of a part have in the whole model; `live` if the model is not a part.

    For example, a checkpoint of a language model alone has `layers.0.w`, the whole model `language_model.layers.0.w`.

    Args:
        chosen: the tensors to write.
        live: name in the catalog -> name in memory, in the part.
        shapes_in_base: shape by name in the base.
        options: tensors that `--fill-from-base` copies do not belong to the part.
        class_names: what the class of the whole model says.
    """
    in_memory = {source: live.get(source, name) for source, name in chosen.names.items()}
    whole = {fqn: expression.shape for fqn, expression in class_names.converted.items()}
    whole |= {fqn: shapes_in_base[name] for fqn, name in class_names.names.items() if name in shapes_in_base}
    shapes = {source: chosen.catalog.tensors[source].shape for source in in_memory}
    named = name_part(in_memory, shapes, _whole_models(whole, class_names.names, options))
    return live if named == in_memory else {**live, **named}


def _whole_models(
    whole: Mapping[str, Shape], names: Mapping[str, str], options: ConsolidateOptions
) -> list[Mapping[str, Shape]]:
    """Return the models that the checkpoint may be a part of: the whole one, and it without `--fill-from-base` tensors.

    Args:
        whole: shape by name of all tensors.
        names: name -> name in the base's files, where it differs.
        options: with the globs of `--fill-from-base`.
    """
    globs = Globs((), tuple(options.fill_from_base))
    checkpoint_shapes = {fqn: shape for fqn, shape in whole.items() if globs.selects(names.get(fqn, fqn))}
    return [whole, checkpoint_shapes] if options.fill_from_base else [whole]


def _ties(
    chosen: ChosenTensors,
    base: Base | None,
    class_names: ClassNames | None,
    recorded: RecordedNames,
) -> tuple[Ties, dict[str, Shape], list[tuple[str, ...]]]:
    """Decide which tensors are tied.

    Args:
        chosen: the tensors to write.
        base: the base, or None.
        class_names: what the base's class says; None if it was not asked.
        recorded: what the checkpoint's manifest says; empty if the base's tensors are known.

    Returns:
        The ties, the shapes of the remaining tensors by name in the output, and groups of names that mean one tensor.
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
        equal_in_base=partial(has_equal_bytes, base) if base else lambda _one, _two: False,
    )
    groups = tie_groups(
        ties, {**dict.fromkeys(chosen.names.values()), **(base_tensors or {})}, declared=declared
    )
    if ties.diverged and _must_untie(ties, base.config if base else None):
        ties = replace(ties, dropped={})
    shapes = {
        name: chosen.catalog.tensors[source].shape
        for source, name in chosen.names.items()
        if name not in ties.dropped
    }
    return ties, shapes, [*groups, *known_ties]


def _must_untie(ties: Ties, config: Mapping[str, Any] | None) -> bool:
    """True if the written config must say `tie_word_embeddings: false`.

    This key switches off all ties at once: `from_pretrained` then looks for the embeddings of encoder and decoder, and
    the head's bias, under each name.
    """
    return ties.untied and ties_embeddings(config) is not False and may_be_untied(config)


def _recorded_ties(
    chosen: ChosenTensors, recorded: RecordedNames, declared: bool | None
) -> Iterator[tuple[str, ...]]:
    """Yield the recorded groups under their names in the output, without an output layer that the config does not tie."""
    for group in recorded.ties:
        names = [chosen.names[stored] for stored in group if stored in chosen.names]
        kept = [name for name in names if declared is not False or not is_output(name)]
        if len(kept) > 1:
            yield tuple(kept)


def _recorded_all(chosen: ChosenTensors, recorded: RecordedNames) -> frozenset[str] | None:
    """Return the recorded names of the Hub's files if they include all names that are written, apart from aliases."""
    further = {stored for _, *aliases in recorded.ties for stored in aliases}
    names = {name for stored, name in chosen.names.items() if stored not in further}
    return recorded.names if recorded.names is not None and names <= recorded.names else None


def _add_from_base(chosen: ChosenTensors, base: Base | None, names: Sequence[str]) -> ChosenTensors:
    """Add tensors of the base, which are copied unchanged."""
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
    """Return the images of the weight files: the base's names and distribution if all tensors are as in the base."""
    if kind == "adapter":  # PEFT has no index
        is_whole = is_diffusers_lora(checkpoint) and all(tensor.fqn == tensor.source for tensor in tensors)
        stem = checkpoint.hub.stem if checkpoint.hub is not None and is_whole else ADAPTER_STEM
        return SafetensorsImages(tensors, max_shard_bytes=None, stem=stem, settings=settings)
    files = tensors_by_file(base) if base is not None and options.follows_base else None
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
    chosen: ChosenTensors,
    base: Base | None,
    ties: Ties,
    tensors: Sequence[OutputTensor],
    tokenizer: Tokenizer | None,
    *,
    is_quantised: bool,
) -> tuple[list[Asset], list[str], list[str]]:
    """Return the files other than weights, and the notes and warnings about them."""
    if chosen.kind == "adapter":
        assets, changed = adapter_assets(base, chosen.adapter_config), list[str]()
    else:
        config = base.config if base else None
        assets, changed = model_assets(
            base,
            main_dtype(tensors, base),
            most=most_bytes((tensor.dtype, tensor.nbytes) for tensor in tensors),
            untie=_must_untie(ties, config),
            tied=_are_tied(ties, tensors, config),
            is_plain=not (is_quantised or may_be_quantised({tensor.fqn: tensor for tensor in tensors})),
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
    """Return whether the output's input and output embeddings are one tensor; None if there is no output layer."""
    config_ties = ties_embeddings(config)
    if config_ties is not None or not any(is_output(tensor.fqn) for tensor in tensors):
        return config_ties if config_ties is not None or not any(map(is_output, ties.dropped)) else True
    return False


def _row_warnings(
    tokenizer: Tokenizer | None, base: Base | None, tensors: Sequence[OutputTensor]
) -> Iterator[str]:
    """Yield a warning if the checkpoint's own tokenizer has ids beyond the rows of the output's embeddings."""
    try:
        check_tokenizer(tokenizer, base, {tensor.fqn: tensor.shape for tensor in tensors})
    except LayoutError as error:
        yield f"{error.message}; {error.to_json()['hint']}"


def _check_options(checkpoint: Checkpoint, base: Base | None, options: ConsolidateOptions) -> None:
    """Refuse options that need a base if there is none, and `--weights` that cannot be recovered.

    Raises:
        UsageError, SourceError: these.
    """
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
    """Refuse `--fill-from-base` without `--base`, or with a base whose weights are not on this machine."""
    if base is None or not base.is_given or base.tensors is None:
        raise UsageError("--fill-from-base takes tensors of a base with weights: name it with --base")
    if base.catalog is None:
        raise UsageError(
            f"--fill-from-base copies bytes of the base, and the weights of {escape(base.label)} are not on this machine",
            hint=f"`{base.download}` brings them here and prints the directory to give as --base",
        )


def _select(checkpoint: Checkpoint, base: Base | None, naming: Naming) -> Selection:
    """Select the tensors of the model (or of other `--weights`), and name them. Raises as `select_model`.

    The prefix before the model's names (`root`) is the user's, else the one in a manifest, else the one that fits best.
    """
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
        return select(naming=replace(naming, root=SAVED_ROOT))  # exactly what the model's class loads
    return selection


def _tie_warnings(ties: Ties, base: Base | None) -> list[str]:
    """Return a warning for each pair of tensors that the base ties and whose values differ after training."""
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
    """Return names in the order of the base's names; None if two tensors have the same name."""
    by_output = {name: source for source, name in names.items()}
    if len(by_output) < len(names):
        return None
    return {by_output[name]: name for name in in_order(by_output, base_names)}


def _may_explain_misfit(
    shapes: Mapping[str, Shape], base: Base | None, ties: Iterable[Collection[str]]
) -> bool:
    """True if names or shapes differ from those of a named base, so that its class should be asked for the reason."""
    shapes_in_base = base_shapes(base)
    if base is None or shapes_in_base is None or not base.is_given:
        return False
    return not compare_with_base(shapes, shapes_in_base, ties=ties).is_equal


def _ask_class(base: Base, on_step: OnStep) -> ClassNames | None:
    """Ask the class that the base's config names, in a separate process; None if it cannot be asked."""
    shapes = base_shapes(base)
    if shapes is None or not (base.config or {}).get("architectures"):
        return None
    reply = ask_class(base.directory, shapes, on_start=lambda: on_step(asking_text(base.config)))
    return None if reply is None else reply.match
