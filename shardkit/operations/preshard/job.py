"""What preshard decides before a byte moves: what it reads and writes.

    source -> layout -> stored tensors (ties, dtypes) -> images -> plan

Building a job reads headers and traces a layout; it writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardkit.core.dtypes import CASTS, DType
from shardkit.core.mesh import Mesh
from shardkit.core.text import count, escape, listed
from shardkit.formats.contract import HubModel
from shardkit.formats.dcp.images import DcpImages, Phase
from shardkit.layout.choose import make_layout
from shardkit.layout.layout import Layout
from shardkit.operations.casts import check_cast, quantised_notes, rounded_wide
from shardkit.operations.describe_dcp import DcpOutput
from shardkit.operations.write import hash_plan
from shardkit.transfer.plan import TransferPlan, build_plan
from shardkit.transfer.sources import same_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PreshardJob(DcpOutput):
    """A decided preshard."""

    model: HubModel
    plan: TransferPlan
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def plan_hash(self) -> str:
        """Stand for inputs, options and version; see `operations.write.Job`."""
        return hash_plan(self, identity=self.identity, description=self.describe())


def build_job(
    model: HubModel, mesh: Mesh, *, wrap: str, dtype: str, digest: str, trust_remote_code: bool
) -> PreshardJob:
    """Decide how `model` is stored for `mesh`.

    Args:
        model: an opened Hub model.
        mesh: the device mesh of the job that will load it.
        wrap: wrap policy, as `--wrap` takes it.
        dtype: "keep", "bf16", "fp16" or "fp32".
        digest: "crc32" or "none".
        trust_remote_code: the model's own code may run, in the process that traces the layout.

    Raises:
        UsageError: an option does not have such a value, or a policy matches nothing.
        LayoutError: model and source do not fit each other.
    """
    check_cast("--dtype", dtype)
    layout = make_layout(model, mesh, wrap, dtype=CASTS.get(dtype), trust_remote_code=trust_remote_code)
    layout, aliases, untried, warnings = _resolve_ties(model, layout)
    sources = {fqn: layout.sources[fqn] for fqn in layout.tensors}
    dtypes, notes = _choose_dtypes(model, layout, sources, dtype)
    entries = {fqn: model.catalog.tensors[source] for fqn, source in sources.items()}
    output = DcpImages(layout, dtypes, sources, _phase(model, dtypes, sources))
    return PreshardJob(
        model=model,
        layout=layout,
        entries=entries,
        dtypes=dtypes,
        sources=sources,
        aliases=aliases,
        identity=model.identity,
        cast=dtype,
        digest=digest,
        output=output,
        plan=build_plan(output, model.catalog),
        notes=(*model.catalog.notes, *layout.notes, *untried, *notes, *_skipped(model)),
        warnings=(*warnings, *rounded_wide({fqn: entry.dtype for fqn, entry in entries.items()}, dtypes)),
    )


def _skipped(model: HubModel) -> list[str]:
    objects = model.catalog.objects
    return [f"left out, as they are not tensors: {escape(', '.join(objects))}"] if objects else []


def _resolve_ties(
    model: HubModel, layout: Layout
) -> tuple[Layout, dict[str, tuple[str, ...]], tuple[str, ...], tuple[str, ...]]:
    """Store each group of tied names once, but keep names apart whose bytes in the source differ.

    Returns:
        The layout with a tensor for every stored name, the aliases of each, notes and warnings.
    """
    tensors, aliases = dict(layout.tensors), dict[str, tuple[str, ...]]()
    notes, warnings = list[str](), list[str]()
    for group in layout.ties:
        first, *others = group
        present = [name for name in others if name in layout.sources]
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
        aliases[first] = tuple(name for name in others if name not in diverged)
    return (
        replace(layout, tensors=tensors),
        {k: v for k, v in aliases.items() if v},
        tuple(notes),
        tuple(warnings),
    )


def _choose_dtypes(
    model: HubModel, layout: Layout, sources: Mapping[str, str], dtype: str
) -> tuple[dict[str, DType], list[str]]:
    """Return the dtype that each tensor is stored in, and what to tell about it."""
    held = {fqn: model.catalog.tensors[sources[fqn]].dtype for fqn in layout.tensors}
    target = CASTS.get(dtype)
    if target is None:
        return held, []
    chosen, kept, notes = dict(held), list[str](), list[str]()
    for fqn, stored in held.items():
        if stored.is_convertible:
            is_kept = target.name != "float32" and fqn in (layout.keep_fp32 or ())
            chosen[fqn] = CASTS["fp32"] if is_kept else target
            kept += [fqn] if is_kept else []
    if kept:
        notes.append(
            f"stored in float32, as the model asks for it and from_pretrained does: {count(len(kept), 'tensor')}: "
            f"{listed(kept)}"
        )
    notes += quantised_notes(held)
    if target.name != "float32" and layout.keep_fp32 is None:
        notes.append("without the model nobody knows which tensors it keeps in fp32: all were converted")
    return chosen, notes


def _phase(model: HubModel, dtypes: Mapping[str, DType], sources: Mapping[str, str]) -> Phase:
    """Return a function that tells images where a tensor's bytes lie in the source, so that they can match it."""
    catalog = model.catalog

    def phase(fqn: str) -> int | None:
        entry = catalog.tensors[sources[fqn]]
        is_copied = dtypes[fqn] is entry.dtype and entry.num_chunks == 1
        return catalog.chunks.start[entry.first_chunk] if is_copied else None

    return phase
