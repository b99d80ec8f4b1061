"""Decide what preshard reads and writes, before any byte moves.

    layout -> stored tensors (ties, dtypes) -> images -> plan

The *layout* says which rank stores which region of which tensor, and under which name. Names that are *tied* are one
parameter of the model. An *image* is the description of one file to write: its headers, and a hole for each region, which
the plan fills. In the layout, an *FQN* is a tensor's name in the output, and its *source* a name in the catalog, which has
the tensors of the Hub's files and those that `expressions` compute from them.

Building a job reads headers, traces a layout, and reads the bytes of tied tensors. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardkit._version import major
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import CASTS, DType
from shardkit.core.factored import factor_of, stored_targets
from shardkit.core.mesh import Mesh
from shardkit.core.text import count, escape, format_size, listed
from shardkit.core.threads import silent
from shardkit.errors import UsageError
from shardkit.formats.contract import Checkpoint, Dequantized, OpenedHubModel
from shardkit.formats.dcp.hugging_face_writer import shard_images, without_strided_shards
from shardkit.formats.dcp.images import DcpImages, JoinedImages, Phase
from shardkit.formats.gaps import find_gaps
from shardkit.keys.expressions import Expression, Opaque
from shardkit.keys.rule_sets import NONE, foreign_type, load_rules
from shardkit.keys.rules import RuleSet
from shardkit.layout.binding import TensorsAtHand, bind, name_in_catalog, person_provider
from shardkit.layout.choice.choose import make_layout
from shardkit.layout.choice.parallel_rules import data_axes, parallelise
from shardkit.layout.layout import Layout, declare
from shardkit.layout.own_code import own_code_for
from shardkit.operations.casts import (
    apply_rules,
    check_cast,
    find_default_dtypes,
    quantised_notes,
)
from shardkit.operations.describe_dcp import DcpOutput
from shardkit.operations.describe_files import FilesOutput
from shardkit.operations.environment import traced_with
from shardkit.operations.parts.ingredients import ReadFile
from shardkit.operations.preshard.options import ORIGINS, STORED_NAMES, PreshardOptions
from shardkit.operations.preshard.profiles import (
    Assets,
    Profile,
    check_stock,
    choose_keys,
    find_assets,
    with_config,
    with_root,
)
from shardkit.transfer.codecs.bound import bind as bound_catalog
from shardkit.transfer.codecs.converted import group_nbytes, opaque_groups
from shardkit.transfer.plan import TransferPlan, build_plan
from shardkit.transfer.rank_files import RankImages
from shardkit.transfer.sources import same_bytes

_MODULES_SINCE = 5
"""Major version of transformers since which models have fused experts, and other names in memory than on the Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreshardJob:
    """All decisions of a preshard."""

    model: OpenedHubModel
    profile: Profile
    layout: Layout
    aliases: Mapping[str, tuple[str, ...]]
    """Name of a stored tensor -> further names of the same tensor."""
    part: DcpOutput | FilesOutput
    """All shard files, which are in the profile's folder."""
    assets: Mapping[str, str]
    """The model's files to copy: name in the output -> path."""
    output: DcpImages | JoinedImages | RankImages
    """The images of `part`, named relative to the whole directory."""
    plan: TransferPlan
    named_by: str
    """Who decided the names; see `NamedTensor`."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def num_chunks(self) -> int:
        """Number of tensor regions in all files."""
        return sum(map(len, self.output))

    @property
    def decided(self) -> dict[str, object]:
        """See `operations.write.Job`."""
        return {
            "identity": self.part.identity,
            "description": self.part.describe(),
            "profile": self.profile.name,
            "companions": {name: data.hex() for name, data in self.profile.companions.items()},
            "assets": [ReadFile(name, path) for name, path in self.assets.items()],
        }


def build_job(checkpoint: Checkpoint, options: PreshardOptions) -> PreshardJob:
    """Decide how a Hub model is stored for a mesh.

    Args:
        checkpoint: an opened Hub model.
        options: the user's options.

    Raises:
        UsageError: the value of an option is not allowed, or a policy matches nothing.
        LayoutError: model and source do not fit each other.
    """
    assert checkpoint.hub is not None
    model, profile = checkpoint.hub, options.trainer
    check_cast("--dtype", options.dtype)
    check_cast("--names", options.names, STORED_NAMES)
    check_cast("--layout", options.layout, ORIGINS)
    _check_keys(options)
    _check_no_factors(model, options)
    layout = _for_trainer(_choose_layout(model, options), options)
    return _build_for_layout(checkpoint, layout, options, find_assets(profile, model))


def _build_for_layout(
    checkpoint: Checkpoint, layout: Layout, options: PreshardOptions, assets: Assets
) -> PreshardJob:
    """Return the job that stores a model in a layout."""
    assert checkpoint.hub is not None
    model, profile = checkpoint.hub, options.trainer
    memory_warnings = tuple(_whole_tensor_warnings(model, layout))
    model = replace(model, catalog=_catalog_of_layout(model, layout, options))
    layout, aliases, unchecked_ties, warnings = _resolve_ties(model, layout)
    sources = {fqn: layout.sources[fqn] for fqn in layout.tensors}
    default_dtypes = find_default_dtypes(
        model.catalog, sources, checkpoint.remarks.dequantized, layout.expressions
    )
    dtypes, notes = _choose_dtypes(default_dtypes, layout, options.dtype)
    dtypes = apply_rules(options.rules, default_dtypes, dtypes)
    content = _StoredContent(layout=layout, aliases=aliases, sources=sources, dtypes=dtypes)
    part = _part(model, content, options, checkpoint.remarks.dequantized)
    output = _in_folder(part, profile.folder)
    files = assets.files
    if checkpoint.remarks.dequantized is not None and files:
        profile, files = with_config(profile, files, model.config)
    return PreshardJob(
        model=model,
        profile=profile,
        layout=layout,
        aliases=aliases,
        part=part,
        assets=files,
        output=output,
        plan=build_plan(output, model.catalog),
        named_by=_who_named(layout, options),
        notes=(
            *model.catalog.notes,
            *_settings_notes(model),
            *layout.notes,
            *_old_transformers(layout),
            *unchecked_ties,
            *notes,
            *_left_out_notes(model, assets.refused),
        ),
        warnings=(
            *(find_gaps(checkpoint) if layout.origin == "declared" else ()),  # no class was asked
            *not_for_stock(layout),
            *(foreign_type(load_rules(options.key_rules), model.config) if options.key_rules != NONE else ()),
            *memory_warnings,
            *warnings,
        ),
    )


def _who_named(layout: Layout, options: PreshardOptions) -> str:
    """Return who decided the names of the output: one of the words in `NamedTensor`, the same for all tensors."""
    if options.key_rules != NONE:
        return "person"
    if options.trainer.key_sets:
        return "shipped rules"
    return "class" if layout.origin == "traced" else "equal names"


def _old_transformers(layout: Layout) -> Iterator[str]:
    """Yield a note if the layout was traced with an old version of transformers, whose models have other modules."""
    traced = traced_with(layout.origin)
    if traced is not None and major(traced.transformers) < _MODULES_SINCE:
        yield (
            f"traced with transformers {escape(traced.transformers)}: models of {_MODULES_SINCE}.0 and newer have other "
            "modules, so a job with one of these may not find its weights"
        )


def _check_keys(options: PreshardOptions) -> None:
    """Refuse `--names hub` together with key rules.

    Raises:
        UsageError: both are given.
    """
    if options.names == "hub" and (options.key_rules != NONE or options.trainer.key_sets):
        naming_option = "--keys" if options.key_rules != NONE else f"--profile {options.trainer.name}"
        raise UsageError(
            f"--names hub keeps the names of the files, and {naming_option} gives those of key rules",
            hint="leave out one of the two",
        )


def _check_no_factors(model: OpenedHubModel, options: PreshardOptions) -> None:
    """Refuse OSFT factors if the layout would be traced from a model, which has weights instead.

    Raises:
        UsageError: the source has factors.
        LayoutError: factors of a weight are missing.
    """
    paths = {path for name in model.catalog.tensors if (path := factor_of(name)) is not None}
    is_declared = options.names == "hub" or options.layout == "declared" or options.key_rules != NONE
    is_declared |= options.layout == "auto" and not model.config
    if paths and not is_declared:
        raise UsageError(
            f"the source has {count(len(paths), 'weight')} as factors of OSFT: {listed([escape(path) for path in paths])}",
            hint="shardkit.prepare and finalize start from it as it is; --layout declared stores the factors for this mesh; "
            "shardkit consolidate makes dense weights of them",
        )
    stored_targets({name: entry.shape for name, entry in model.catalog.tensors.items()})


def _catalog_of_layout(model: OpenedHubModel, layout: Layout, options: PreshardOptions) -> Catalog:
    """Return a catalog of the stored tensors, and of those that the layout computes from them."""
    catalog = model.catalog
    if layout.expressions:
        convert = own_code_for(model.directory, trust_remote_code=options.trust_remote_code)
        catalog = bound_catalog(catalog, layout.expressions, convert)
    return catalog


def _choose_layout(model: OpenedHubModel, options: PreshardOptions) -> Layout:
    """Return which rank holds which regions, without the trainer's prefix; raises as `build_job`.

    The names are those that key rules give, if there are any; with `--names hub`, those in the files; otherwise those in the
    model of transformers.
    """
    # With --parallel-rule, the tensors are first laid out without the axes of tp and ep; `parallelise` then cuts them over
    # these by the rules. Without, the layout already has the cuts that the model's class plans.
    mesh = data_axes(options.ranks) if options.parallel else options.ranks
    keys = options.key_rules
    if keys == NONE and options.trainer.key_sets:
        keys = choose_keys(options.trainer, model.config)
    if options.layout == "traced" and (keys != NONE or options.names == "hub"):
        what = "key rules give" if keys != NONE else "--names hub gives"
        raise UsageError(
            f"--layout traced: {what} other names than a model of transformers has", hint="leave out --layout"
        )
    if keys != NONE:
        layout = _lay_out_by_rules(model, mesh, options.wrap, load_rules(keys))
    elif options.names == "hub":
        layout = declare(model.catalog.tensors, mesh, options.wrap, model.config, reason="--names hub")
    else:
        layout = make_layout(
            model,
            mesh,
            options.wrap,
            stages=options.stages,
            dtype=CASTS.get(options.dtype),
            trust_remote_code=options.trust_remote_code,
            origin=options.layout,
            on_step=options.on_step or silent,
        )
    return parallelise(layout, options.ranks, options.parallel) if options.parallel else layout


def _for_trainer(layout: Layout, options: PreshardOptions) -> Layout:
    """Return the layout with the trainer's prefix before all names, and in regions that the trainer can load.

    Raises:
        UsageError: the trainer cannot load them, or has no module around the model (`--attribute`).
    """
    profile = options.trainer
    layout = with_root(layout, options.root)
    if profile.form == "safetensors":
        return without_strided_shards(layout)
    if profile.name != "plain":
        check_stock(profile, layout)
    return layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredContent:
    """The tensors to store, in either form (DCP or safetensors shards)."""

    layout: Layout
    aliases: Mapping[str, tuple[str, ...]]
    """Name of a stored tensor -> further names of the same tensor."""
    sources: Mapping[str, str]
    """Name of a stored tensor -> name in the catalog."""
    dtypes: Mapping[str, DType]
    """Name of a stored tensor -> dtype in the output."""


def _part(
    model: OpenedHubModel,
    content: _StoredContent,
    options: PreshardOptions,
    dequantized: Dequantized | None,
) -> DcpOutput | FilesOutput:
    """Return the rank files, in the profile's form."""
    if options.trainer.form == "dcp":
        return _dcp_part(model, content, options, dequantized)
    return FilesOutput(
        output=shard_images(content.layout, content.dtypes, content.sources, content.aliases),
        dtypes=content.dtypes,
        identity=model.identity,
        aliases=content.aliases,
        opaque={
            fqn: expression for fqn, expression in _derived(content).items() if isinstance(expression, Opaque)
        },
        cast=options.dtype,
        digest=options.digest,
    )


def _dcp_part(
    model: OpenedHubModel,
    content: _StoredContent,
    options: PreshardOptions,
    dequantized: Dequantized | None,
) -> DcpOutput:
    """Return the rank files in DCP's own form, with what the manifest says about them."""
    layout, aliases, sources = content.layout, content.aliases, content.sources
    return DcpOutput(
        output=DcpImages(layout, content.dtypes, sources, _phase(model, content.dtypes, sources)),
        layout=layout,
        entries={fqn: model.catalog.tensors[source] for fqn, source in sources.items()},
        dtypes=content.dtypes,
        sources=sources,
        aliases=aliases,
        derived=_derived(content),
        root=options.root,
        paths=options.trainer.paths(fqn for name in layout.tensors for fqn in (name, *aliases.get(name, ()))),
        identity=model.identity,
        dequantized=dequantized.method if dequantized is not None else None,
        cast=options.dtype,
        dtype_rules=options.rules,
        digest=options.digest,
    )


def _derived(content: _StoredContent) -> dict[str, Expression]:
    """Return the expression of each tensor that is computed from tensors of the source."""
    expressions = content.layout.expressions
    return {fqn: expressions[source] for fqn, source in content.sources.items() if source in expressions}


def _in_folder(part: DcpOutput | FilesOutput, folder: str) -> DcpImages | JoinedImages | RankImages:
    """Return the images of a part, named relative to the whole directory."""
    if isinstance(part, DcpOutput) and folder:
        return JoinedImages({folder: part.output})
    return part.output


def not_for_stock(layout: Layout) -> Iterator[str]:
    """Yield the warning about tensors that stock torch would fill with wrong values.

    Stock `dcp.load` assumes one box per rank and tensor. Where tp and dp_shard cut the same dim, a rank's rows are not one.
    """
    names = layout.not_for_stock()
    if names:
        yield (
            f"stock dcp.load would silently load {count(len(names), 'tensor')} incorrectly on this mesh "
            f"({listed(names)}); load with shardkit.finalize or "
            "shardkit.load_into"
        )


def _whole_tensor_warnings(model: OpenedHubModel, layout: Layout) -> Iterator[str]:
    """Yield the warning about tensors that can only be computed as a whole, which takes memory.

    transformers' own code computes them in groups; the tensors of one group are in memory together.
    """
    groups = opaque_groups(layout.expressions)
    if groups:
        names = [fqn for fqn in layout.tensors if any(layout.sources[fqn] in group for group in groups)]
        largest = max(group_nbytes(model.catalog, group.values()) for group in groups)
        yield (
            f"{count(len(names), 'tensor')} made whole by transformers' own code, by operations that shardkit does not "
            f"know: {listed(names)}; the largest group takes {format_size(largest)} of memory beyond --max-memory"
        )


def _lay_out_by_rules(model: OpenedHubModel, mesh: Mesh, wrap: str, rules: RuleSet) -> Layout:
    """Return the layout of the tensors into which key rules convert a model's files.

    Raises:
        LayoutError: the rules do not fit; lists every problem.
    """
    stored = model.catalog.tensors
    shapes = {name: entry.shape for name, entry in stored.items()}
    have = TensorsAtHand(shapes=shapes, side="hub", config=model.config)
    binding = bind(have, None, [person_provider(rules)])
    sources, derived_tensors = name_in_catalog(binding.expressions, stored)
    bound = bound_catalog(model.catalog, derived_tensors).tensors
    layout = declare(
        {fqn: replace(bound[source], fqn=fqn) for fqn, source in sources.items()},
        mesh,
        wrap,
        model.config,
        reason=f"they are those of the key rules of {rules.title}",
    )
    groups: dict[str, list[str]] = {}
    for fqn, source in sources.items():
        groups.setdefault(source, []).append(fqn)
    ties = tuple(tuple(group) for group in groups.values() if len(group) > 1)
    aliases = {name for group in ties for name in group[1:]}
    return replace(
        layout,
        tensors={fqn: tensor for fqn, tensor in layout.tensors.items() if fqn not in aliases},
        ties=(*layout.ties, *ties),
        sources=sources,
        expressions=derived_tensors,
        omitted=tuple((name, f"the key rules of {rules.title} leave it out") for name in binding.dropped),
    )


def _left_out_notes(model: OpenedHubModel, links: Sequence[str]) -> Iterator[str]:
    """Yield the notes about entries that are not tensors, and about links out of the model's directory."""
    if objects := model.catalog.objects:
        yield f"left out, as they are not tensors: {escape(', '.join(objects))}"
    if links:
        yield f"not copied, as they are links out of the model's directory, or to nothing: {escape(', '.join(links))}"


def _resolve_ties(
    model: OpenedHubModel, layout: Layout
) -> tuple[Layout, dict[str, tuple[str, ...]], tuple[str, ...], tuple[str, ...]]:
    """Store each group of tied names once, except names whose bytes in the source differ.

    Returns:
        The layout, with a tensor for every stored name; the aliases of each; notes; and warnings.
    """
    tensors, aliases = dict(layout.tensors), dict[str, tuple[str, ...]]()
    notes, warnings = list[str](), list[str]()
    for group in layout.ties:
        first, *other_names = group
        present = [name for name in other_names if name in layout.sources]
        # Only headers were read of a repo on the Hub, as in a dry run: there are no bytes to compare yet.
        if present and model.download_bytes:
            notes.append(
                f"{' and '.join(map(escape, (first, *present)))} are one parameter in the model; whether their values "
                "in the source are equal is not checked before they are downloaded"
            )
            present = []
        stored = layout.sources
        diverged = [name for name in present if not same_bytes(model.catalog, stored[first], stored[name])]
        for name in diverged:
            tensors[name] = replace(tensors[first], fqn=name)
            warnings.append(
                f"{escape(first)} and {escape(name)} are one parameter in the model, but their values in the "
                "source differ: both are kept, as from_pretrained does; give the training model "
                "tie_word_embeddings=False, or the one that stock dcp.load loads last wins"
            )
        aliases[first] = tuple(name for name in other_names if name not in diverged)
    return (
        replace(layout, tensors=tensors),
        {k: v for k, v in aliases.items() if v},
        tuple(notes),
        tuple(warnings),
    )


def _choose_dtypes(
    default_dtypes: Mapping[str, DType], layout: Layout, dtype: str
) -> tuple[dict[str, DType], list[str]]:
    """Return the dtype in which each tensor is stored, and notes."""
    target = CASTS.get(dtype)
    if target is None:
        return dict(default_dtypes), []
    chosen, kept, notes = dict(default_dtypes), list[str](), list[str]()
    for fqn, stored in default_dtypes.items():
        if stored.is_convertible:
            is_kept = target.name != "float32" and fqn in (layout.keep_fp32 or ())
            chosen[fqn] = CASTS["fp32"] if is_kept else target
            kept += [fqn] if is_kept else []
    if kept:
        notes.append(
            f"stored in fp32, as the model asks for it and from_pretrained does: {count(len(kept), 'tensor')}: "
            f"{listed(kept)}"
        )
    notes += quantised_notes(default_dtypes)
    if target.name != "float32" and layout.keep_fp32 is None:
        notes.append("without the model, it is not known which tensors it keeps in fp32: all were converted")
    return chosen, notes


def _settings_notes(model: OpenedHubModel) -> Iterator[str]:
    """Yield a note about settings in the source's safetensors headers: shards have no place for them."""
    keys = sorted({key for settings in model.settings.values() for key in settings})
    if keys:
        yield f"not in the output, whose files have no such header: {listed(keys)} of {listed(list(model.settings))}"


def _phase(model: OpenedHubModel, dtypes: Mapping[str, DType], sources: Mapping[str, str]) -> Phase:
    """Return a function that gives a tensor's offset in its source file; None for a tensor that is not copied from one place.

    Images place the tensor at the same offset within a block of the disk, so that the file system can share the blocks
    of both files instead of copying them.
    """
    catalog = model.catalog

    def phase(fqn: str) -> int | None:
        entry = catalog.tensors[sources[fqn]]
        is_copied = dtypes[fqn] is entry.dtype and entry.num_chunks == 1
        return catalog.chunks.start[entry.first_chunk] if is_copied else None

    return phase
