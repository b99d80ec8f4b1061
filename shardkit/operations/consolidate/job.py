"""Everything that is decided before a byte moves: what consolidate would read and write.

    checkpoint -> names -> ties -> base -> dtypes -> images -> plan

Building a job reads descriptions, and of tied tensors the bytes; it writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.regions import Shape
from shardkit.core.text import escape, listed
from shardkit.errors import SourceError, UsageError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.assets import CONFIG
from shardkit.formats.hub.base import SAVED_ROOT, Base, holds_equal, hub_key_rules, saved_key_rules
from shardkit.formats.hub.safetensors import OutputTensor, SafetensorsImages
from shardkit.keys.check import find_gaps, refuse_factors
from shardkit.keys.renaming import KeyRule
from shardkit.keys.select import Naming, Selection, select_model
from shardkit.keys.ties import may_be_untied, ties_embeddings
from shardkit.layout.traced import Answer, ModelNames
from shardkit.operations.casts import check_choice, choose_dtypes
from shardkit.operations.consolidate.adapter import STEM as ADAPTER_STEM
from shardkit.operations.consolidate.adapter import Chosen, choose_tensors
from shardkit.operations.consolidate.assets import (
    Asset,
    TrainedModule,
    adapter_assets,
    main_dtype,
    model_assets,
    trained_modules,
)
from shardkit.operations.consolidate.fit import (
    Fit,
    ask_class,
    base_shapes,
    check_fit,
    may_ask,
    name_by_class,
    name_merged,
)
from shardkit.operations.ties import Ties, resolve_ties, tie_groups
from shardkit.operations.write import hash_plan
from shardkit.transfer.plan import TransferPlan, build_plan

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)", re.ASCII)
_NO_TIES = Ties(dropped={}, diverged=(), untied=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What a person asks for."""

    naming: Naming
    """Which tensors are wanted, and what becomes of their names."""
    allow_missing: bool = False
    """Tensors of the base may be missing."""
    allow_unexpected: bool = False
    """There may be tensors that the base does not have."""
    dtype: str = "keep"
    """"keep", "base", "bf16", "fp16" or "fp32"."""
    max_shard_bytes: int | None = None
    """Most bytes of tensors in a file; None makes one file."""
    digest: str = "crc32"
    """"crc32" or "none"."""
    merge_lora: bool = False
    """Add an adapter to the weights that it was trained on."""
    adapter_config: str | None = None
    """An adapter's settings: a file, or the directory that it lies in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateJob:
    """A decided consolidation."""

    checkpoint: Checkpoint
    options: JobOptions
    selection: Selection
    kind: str
    """"model", "adapter", or "merged": an adapter added to its model."""
    ties: Ties
    base: Base | None
    catalog: Catalog
    """Of the tensors that were chosen; extents are raw bytes."""
    tensors: tuple[OutputTensor, ...]
    """In the order of the output."""
    output: SafetensorsImages
    plan: TransferPlan
    assets: tuple[Asset, ...]
    """What lies beside the weights."""
    modules: tuple[TrainedModule, ...]
    """Weights of modules that lie beside the model's, and are the checkpoint's."""
    notes: tuple[str, ...]
    unloadable: tuple[str, ...]
    """Why `from_pretrained` would not load all weights of the output; the first of `warnings`."""
    warnings: tuple[str, ...]
    fit: Fit
    """How names and shapes fit the base's."""
    answer: Answer | None = None
    """What the class says of the output's names, where it was to be asked."""

    @property
    def plan_hash(self) -> str:
        """Stand for inputs, options and version: an interrupted run resumes only under an equal one."""
        return hash_plan(self, description=self.describe())

    def describe(self) -> dict[str, Any]:
        """Return the part of the manifest that is known before a byte moves."""
        return {
            "layout": self.checkpoint.format,
            "writer": self.checkpoint.writer,
            "weights": self.options.naming.weights,
            "holds": self.kind,
            "root": self.selection.root,
            "key_rules": [list(rule) for rule in (*self.selection.stripped, *self.selection.renamed)],
            "ties": [[kept, dropped] for dropped, kept in self.ties.dropped.items()],
            "dtype": self.options.dtype,
            "digest": self.options.digest,
            "tensors": {
                tensor.fqn: {
                    "dtype": tensor.dtype.name,
                    "shape": list(tensor.shape),
                    "source": {
                        "name": tensor.source,
                        "dtype": self.catalog.tensors[tensor.source].dtype.name,
                    },
                }
                for tensor in self.tensors
            },
        }


def build_job(checkpoint: Checkpoint, base: Base | None, options: JobOptions) -> ConsolidateJob:
    """Decide what a checkpoint becomes.

    Args:
        checkpoint: opened.
        base: given or found, or None.
        options: what is asked for.

    Raises:
        UsageError: an option has no such value, or cannot be carried out.
        SourceError: the weights that are asked for are missing, cannot be told apart or recovered, or have no place
            in safetensors.
        LayoutError: names or shapes differ from those of the given base.
    """
    _check_options(checkpoint, base, options)
    selection, chosen = _choose(checkpoint, base, options)
    chosen, ties, fit, renamed = _fit(chosen, base, options)
    selection, catalog = replace(selection, renamed=(*selection.renamed, *renamed)), chosen.catalog
    names = {source: name for source, name in chosen.names.items() if name not in ties.dropped}
    dtypes = choose_dtypes(catalog, names, options.dtype, base, checkpoint.path)
    tensors = tuple(
        OutputTensor(name, source, dtypes.chosen[name], catalog.tensors[source].shape)
        for source, name in names.items()
    )
    output = _images(tensors, options, chosen.kind)
    assets, changed = _assets(chosen, base, ties, tensors)
    modules, untaken = trained_modules(
        checkpoint,
        base,
        [asset.name for asset in assets],
        selection.root,
        checkpoint.catalog.tensors.keys() - selection.names.keys(),
        dtype=options.dtype,
        takes=options.naming.weights == "model" and not options.naming.chooses_names,
    )
    unloadable: tuple[str, ...] = ()
    if chosen.kind != "adapter":
        unloadable = (*selection.unloadable, *fit.missing, *_gap_warnings(tensors, base, options))
    return ConsolidateJob(
        checkpoint=checkpoint,
        options=options,
        selection=selection,
        kind=chosen.kind,
        ties=ties,
        base=base,
        catalog=catalog,
        tensors=tensors,
        output=output,
        plan=build_plan(output, catalog),
        assets=tuple(asset for asset in assets if asset.name not in [module.file for module in modules]),
        modules=tuple(modules),
        notes=(
            *checkpoint.notes,
            *selection.notes,
            *chosen.notes,
            *(base.notes if base else ()),
            *fit.notes,
            *dtypes.notes,
            *changed,
            *(module.note for module in modules),
        ),
        unloadable=unloadable,
        warnings=(
            *unloadable,
            *_base_warnings(base, chosen.kind),
            *fit.warnings,
            *selection.warnings,
            *chosen.warnings,
            *dtypes.warnings,
            *_tie_warnings(ties, base),
            *untaken,
        ),
        fit=fit,
    )


def _choose(checkpoint: Checkpoint, base: Base | None, options: JobOptions) -> tuple[Selection, Chosen]:
    """Choose the tensors and name them; errors as for `build_job`."""
    naming = options.naming
    if not naming.chooses_names:
        refuse_factors(
            checkpoint.catalog.tensors
        )  # first: otherwise their names would be refused for fitting nothing
    selection = _select(checkpoint, base, naming)
    refuse_factors(selection.names)
    _refuse_objects(checkpoint.catalog.objects, selection)
    chosen = choose_tensors(
        checkpoint,
        selection.names,
        base,
        merge=options.merge_lora,
        adapter_config=options.adapter_config,
    )
    if chosen.kind == "merged" and not naming.changes_names:
        named = name_merged(chosen.names, chosen.catalog, base)
        chosen = replace(chosen, names=named.names)
        selection = replace(selection, renamed=named.rules, warnings=(*selection.warnings, *named.warnings))
    return selection, chosen


def _refuse_objects(objects: Sequence[str], selection: Selection) -> None:
    """Refuse an entry that is no tensor if another layer has a tensor of that name: a weight is lost there."""
    patterns = {_NUMBER.sub("#", name) for name in selection.names if _NUMBER.search(name)}
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
    chosen: Chosen, base: Base | None, options: JobOptions
) -> tuple[Chosen, Ties, Fit, tuple[KeyRule, ...]]:
    """Decide on ties, and compare names and shapes with the base's. Where they differ, its class may know why.

    Returns:
        What is written, the ties, how it fits, and the rules by which the class renamed tensors. None of it is about
        an adapter.
    """
    if chosen.kind == "adapter":
        return chosen, _NO_TIES, Fit(), ()
    declared = ties_embeddings(base.config) if base else None
    base_tensors = base.tensors if base else None

    def decide(
        chosen: Chosen, asked: ModelNames | None
    ) -> tuple[Ties, dict[str, Shape], list[tuple[str, ...]]]:
        known = asked.ties if asked else ()
        ties = resolve_ties(
            chosen.catalog,
            chosen.names,
            declared=declared,
            base_names=base_tensors,
            known=known,
            equal_in_base=partial(holds_equal, base) if base else lambda _one, _other: False,
        )
        shapes = {
            name: chosen.catalog.tensors[source].shape
            for source, name in chosen.names.items()
            if name not in ties.dropped
        }
        both = {**dict.fromkeys(shapes), **(base_tensors or {})}
        return ties, shapes, [*tie_groups(ties, both, declared=declared), *known]

    asked, renamed = None, tuple[KeyRule, ...]()
    ties, shapes, groups = decide(chosen, None)
    if base is not None and may_ask(shapes, base, groups):
        asked = ask_class(base)
    if base is not None and base_tensors is not None and asked is not None:
        if not options.naming.changes_names:
            named = name_by_class(chosen.names, base, asked)
            chosen, renamed = replace(chosen, names=named.names), named.rules
        unsaved = [
            name for name in chosen.names.values() if name in asked.unsaved and name not in base_tensors
        ]
        kept = {source: name for source, name in chosen.names.items() if name not in unsaved}
        notes = [f"not written, the model computes them: {listed(unsaved)}"] if unsaved else []
        chosen = replace(chosen, names=kept, notes=(*chosen.notes, *notes))
        ties, shapes, groups = decide(chosen, asked)
    fit = check_fit(
        shapes,
        base,
        groups,
        allow_missing=options.allow_missing,
        allow_unexpected=options.allow_unexpected,
        asked=asked,
    )
    return chosen, ties, fit, renamed


def _images(tensors: Sequence[OutputTensor], options: JobOptions, kind: str) -> SafetensorsImages:
    if kind == "adapter":
        return SafetensorsImages(tensors, max_shard_bytes=None, stem=ADAPTER_STEM)  # PEFT has no index
    return SafetensorsImages(tensors, max_shard_bytes=options.max_shard_bytes)


def _assets(
    chosen: Chosen, base: Base | None, ties: Ties, tensors: Sequence[OutputTensor]
) -> tuple[list[Asset], list[str]]:
    if chosen.kind == "adapter":
        return adapter_assets(base, chosen.adapter_config), []
    config = base.config if base else None
    untie = ties.untied and ties_embeddings(config) is not False and may_be_untied(config)
    return model_assets(base, main_dtype(tensors), untie=untie)


def _check_options(checkpoint: Checkpoint, base: Base | None, options: JobOptions) -> None:
    check_choice(options.dtype, base)
    if (options.allow_missing or options.allow_unexpected) and (base is None or base.tensors is None):
        raise UsageError("--allow-missing and --allow-unexpected are about a base: name it with --base")
    reason = checkpoint.refused_weights.get(options.naming.weights)
    if reason is not None:
        raise SourceError(
            f"--weights {escape(options.naming.weights)}: {reason}",
            hint="leave --weights out to take the model's",
        )


def _select(checkpoint: Checkpoint, base: Base | None, naming: Naming) -> Selection:
    catalog = checkpoint.catalog
    if checkpoint.hub is not None and not catalog.tensors:  # even a file without tensors is a model
        return Selection(names={}, root="", stripped=(), skipped=(), candidates=())
    rules = saved_key_rules(checkpoint) if naming.weights == "model" else None
    root = SAVED_ROOT
    if rules is None and (of_source := hub_key_rules(checkpoint)):
        rules, root = of_source, ""
    if rules is not None and naming.root is None and not naming.strip_prefix:
        naming = replace(naming, root=root)
    return select_model(
        catalog.tensors,
        catalog.objects,
        catalog.paths,
        checkpoint.roots,
        naming=naming,
        base_shapes=base_shapes(base),
        key_rules=rules,
    )


def _tie_warnings(ties: Ties, base: Base | None) -> list[str]:
    says = base is not None and base.config is not None and may_be_untied(base.config)
    said = " and the written config says tie_word_embeddings: false" if says else ""
    return [
        f"{escape(kept)} and {escape(other)} are tied in the base, but training made them differ: both are kept{said}"
        for kept, other in ties.diverged
    ]


def _gap_warnings(tensors: Sequence[OutputTensor], base: Base | None, options: JobOptions) -> list[str]:
    """Return what the output seems to lack, if no weights are there to compare it with and nobody asked for a part."""
    config = base.config if base is not None and base.tensors is None else None
    if not config or "model_type" not in config or options.naming.chooses_part:
        return []
    return [
        f"from_pretrained would initialise at random what {CONFIG} calls for and the output lacks: {gap}; "
        "--base MODEL, with its weights, compares every name"
        for gap in find_gaps({tensor.fqn: tensor.shape for tensor in tensors}, config)
    ]


def _base_warnings(base: Base | None, kind: str) -> list[str]:
    if kind != "adapter" and (base is None or base.config is None):
        return [
            f"there is no {CONFIG} for the model: name the model that it was trained from with --base, so that the "
            "output can be loaded by itself"
        ]
    return []
