"""Choose a layout, traced if a model can be built and else declared, and check that model and source fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shardkit._version import page
from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.mesh import Mesh
from shardkit.core.text import count, escape, listed, suggestions
from shardkit.core.threads import OnStep, silent
from shardkit.errors import LayoutError
from shardkit.keys.expressions import Expression, leaves
from shardkit.keys.names import COMPILED, IN_BLOCK, match_prefix, split
from shardkit.layout.binding import ClassNames, TensorsAtHand, bind, class_provider, name_in_catalog
from shardkit.layout.layout import CannotBuildError, Layout, TensorLayout, declare
from shardkit.layout.traced import Trace, class_name, trace_model, why_no_class
from shardkit.layout.wrap_policy import parse_policy

_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.", re.ASCII)


class Model(Protocol):
    """The parts of an opened Hub model from which a layout is made."""

    @property
    def catalog(self) -> Catalog:
        """The catalog with names, shapes and dtypes."""

    @property
    def config(self) -> dict[str, object] | None:
        """The content of config.json, or None."""

    @property
    def directory(self) -> str:
        """The directory with config.json."""


def make_layout(
    model: Model,
    mesh: Mesh,
    wrap: str,
    *,
    stages: str = "auto",
    dtype: DType | None = None,
    trust_remote_code: bool = False,
    origin: str = "auto",
    on_step: OnStep = silent,
) -> Layout:
    """Return the layout of a model's tensors: traced if the model can be built, else declared.

    Args:
        model: the source.
        mesh: the device mesh that training will use.
        wrap: the policy, see `wrap_policy`.
        stages: the assignment to pipeline stages, see `layout.stages`.
        dtype: the dtype that floating tensors will have; None keeps the stored ones.
        trust_remote_code: whether the model's own code may run, in the tracing child.
        origin: "traced" raises an error if no model can be built, "declared" does not try to; "auto" is as above.
        on_step: called with a text before the model is traced, which takes seconds.

    Returns:
        Layout whose tensors are all in the source, under the names in `sources`. A declared layout has a note
        with the reason why there was no model.

    Raises:
        PolicyError: the policy matches nothing, or needs a model although none can be built.
        LayoutError: the model and the source differ in names or shapes, the model fails to build, or a model is needed
            but cannot be built: by `origin`, or because the files have single experts, which transformers models fuse.
        ResourceError: the tracing child was killed or took too long.
    """
    parse_policy(wrap)
    reason = "--layout declared" if origin == "declared" else why_no_class(model.config)
    if reason is None:
        try:
            trace = trace_model(
                model.directory,
                mesh,
                wrap,
                stages=stages,
                dtype=dtype,
                names={name: entry.shape for name, entry in model.catalog.tensors.items()},
                trust_remote_code=trust_remote_code,
                on_start=lambda: on_step(f"tracing {class_name(model.config)} ..."),
            )
        except CannotBuildError as error:
            reason = f"{error.message} ({error.hint})" if error.hint else error.message
        else:
            return fit_trace(trace, model.catalog.tensors, model.config)
    if origin == "traced":
        raise LayoutError(
            f"--layout traced: no model can be traced: {reason}", hint="--layout auto declares it then"
        )
    if origin != "declared":
        _refuse_single_experts(model.catalog.tensors, reason)
    return declare(model.catalog.tensors, mesh, wrap, model.config, reason=reason)


def _refuse_single_experts(names: Iterable[str], reason: str) -> None:
    """Raise an error for single experts without a traced model.

    A transformers model has them fused, so stock `dcp.load` would not find its names.
    """
    experts = [name for name in names if _EXPERT.search(name)]
    if experts:
        raise LayoutError(
            f"the files have {count(len(experts), 'tensor')} of single experts, which models of transformers fuse, and no "
            f"model can be traced: {reason}",
            problems=[listed(experts)],
            hint="fix this; or, if the job's model has a module for each expert, --layout declared stores them as they are",
        )


def fit_trace(
    trace: Trace, source: Mapping[str, TensorEntry], config: Mapping[str, Any] | None = None
) -> Layout:
    """Return a traced layout for the tensors of a source: with their names there, omitted tensors, and reordered ties.

    Args:
        trace: the trace of the model.
        source: name in the source -> tensor.
        config: the content of config.json, for the hint; or None.

    Raises:
        LayoutError: names or shapes differ; the error lists every difference.
    """
    match = trace.match or ClassNames(names={name: name for name in source})
    shapes_in_files = {name: entry.shape for name, entry in source.items()}
    have = TensorsAtHand(shapes=shapes_in_files, side="hub")
    names, expressions = name_in_catalog(
        bind(have, None, [class_provider(lambda _: match)]).expressions, source
    )
    source_shapes = shapes_in_files | {name: expression.shape for name, expression in expressions.items()}
    layout = _store_present_names(trace.layout, names)
    live = _live_shapes(layout)
    sources = {fqn: stored for fqn, stored in names.items() if fqn in live}
    used = frozenset(sources.values()) | {leaf.name for tree in expressions.values() for leaf in leaves(tree)}
    unused = [name for name in source if name not in used]
    unknown, omitted = _sort_unknown(trace, match, unused)
    missing = [name for name in layout.tensors if name not in sources and name not in match.computed_fqns]
    shapes = [
        f"{escape(name)}: {list(source_shapes[sources[name]])} in the source, {list(shape)} in the model"
        for name, shape in live.items()
        if name in sources and source_shapes[sources[name]] != shape
    ]
    # A block is a module whose name is a number, such as `layers.0`. `from_pretrained` leaves out any tensor that the
    # model has no place for. Here only one outside of all blocks is left out, such as the head of another task; one
    # inside of a block suggests that config.json and files are of different models.
    spare = [name for name in unknown if not IN_BLOCK.search(name)]
    # Known quantisations were refused or undone before. A `quantization_config` that is still there does not say how
    # weights are quantised, so an unknown tensor may be a scale, without which the weights are wrong.
    is_quantised = "quantization_config" in (config or {})
    if not missing and not shapes and not is_quantised and len(spare) == len(unknown):
        omitted = (*omitted, *((name, f"{trace.model_class} has no place for it") for name in spare))
    elif unknown or missing or shapes:
        raise _misfit_error(
            trace.model_class, match, source, unknown=unknown, missing=missing, shapes=shapes, config=config
        )
    computed = [name for name in layout.tensors if name not in sources]
    tensors = {name: tensor for name, tensor in layout.tensors.items() if name in sources}
    return replace(
        layout,
        tensors=tensors,
        sources=sources,
        expressions=expressions,
        omitted=omitted,
        notes=(*layout.notes, *_notes(trace, sources, expressions, computed)),
    )


def _notes(
    trace: Trace, sources: Mapping[str, str], expressions: Mapping[str, Expression], computed: Sequence[str]
) -> Iterator[str]:
    renamed = [fqn for fqn, stored in sources.items() if fqn != stored and stored not in expressions]
    if renamed:
        yield (
            f"{count(len(renamed), 'tensor')} stored under the names of the model, which are not those of its files "
            f"({escape(sources[renamed[0]])} is {escape(renamed[0])})"
        )
    if computed:
        yield (
            f"not in the files, {escape(trace.model_class)} computes them: {listed(computed)}; stock dcp.load needs "
            "DefaultLoadPlanner(allow_partial_load=True)"
        )


def _live_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return name in the live model's state dict -> shape, including aliases."""
    shapes = {name: tensor.shape for name, tensor in layout.tensors.items()}
    for group in layout.ties:
        shapes.update(dict.fromkeys(group, shapes[group[0]]))
    return shapes


def _store_present_names(layout: Layout, source: Mapping[str, str]) -> Layout:
    """Return the layout with ties reordered, so that the name that the source has comes first and names the tensor."""
    renamed: dict[str, str] = {}
    ties = []
    for group in layout.ties:
        first = next((name for name in group if name in source), group[0])
        renamed[group[0]] = first
        ties.append((first, *(name for name in group if name != first)))
    tensors: dict[str, TensorLayout] = {}
    for name, tensor in layout.tensors.items():
        stored = renamed.get(name, name)
        tensors[stored] = replace(tensor, fqn=stored)
    return replace(layout, tensors=tensors, ties=tuple(ties))


def _sort_unknown(
    trace: Trace, match: ClassNames, names: Iterable[str]
) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """Split the source tensors that the state dict lacks into differences, and tensors to omit with their reasons."""
    unknown, omitted = [], []
    for name in names:
        if name in match.fused:
            unknown.append(name)
        elif name in trace.absent_buffers:
            omitted.append((name, f"a buffer that {trace.model_class} makes itself and does not save"))
        elif name in match.ignored:
            omitted.append((name, f"transformers leaves it out when it loads {trace.model_class}"))
        else:
            unknown.append(name)
    return unknown, tuple(omitted)


def _misfit_error(
    model_class: str,
    match: ClassNames,
    source: Mapping[str, TensorEntry],
    *,
    unknown: list[str],
    missing: list[str],
    shapes: list[str],
    config: Mapping[str, Any] | None,
) -> LayoutError:
    name = escape(model_class)
    is_compiled = _is_compiled(unknown, missing)
    if match.fused:
        return LayoutError(
            f"{name} holds tensors in another form than its files store them, and it is not known how to make them",
            problems=[
                f"{escape(fqn)}: {match.failed.get(fqn, '')} ({listed([stored for stored, target in match.fused.items() if target == fqn])})"
                for fqn in dict.fromkeys(match.fused.values())
            ],
            hint="load it with from_pretrained once, save its state_dict() with torch.distributed.checkpoint, and"
            " reshard that",
        )
    if not is_compiled and _is_renamed(unknown, missing, source):
        return LayoutError(
            "the model's module names differ from the names in its files, and transformers does not know how to turn one "
            "into the other",
            problems=_name_problems(name, unknown, missing),
            hint=f"the config names {name}: if the files are of another class, correct its architectures. Otherwise say "
            f"with --keys RULES.toml what each name becomes ({page('keys.md')}; with --dry-run too, the names are "
            "shown), or keep the names of the files with --names hub",
        )
    counts = {
        "in the files but not in the model": len(unknown),
        "in the model but not in the files": len(missing),
        "of another shape": len(shapes),
    }
    differences = ", ".join(f"{what}: {count}" for what, count in counts.items() if count)
    return LayoutError(
        f"{name} and its files do not fit each other; tensors {differences}",
        problems=[*shapes, *_name_problems(name, unknown, missing)],
        hint=_hint(config or {}, is_compiled=is_compiled),
    )


def _hint(config: Mapping[str, Any], *, is_compiled: bool) -> str:
    if is_compiled:
        return (
            f"the names differ by '{COMPILED}.', which torch.compile puts into them:"
            f" save the model inside (its {COMPILED}), or remove that from the names"
        )
    if "quantization_config" in config:
        # A config that describes the quantisation was refused before, or --dequantize has removed it.
        return "config.json has a quantization_config that does not say how weights are quantised: remove it if they are plain"
    return "config.json and the weight files must be of the same model"


def _is_compiled(unknown: list[str], missing: list[str]) -> bool:
    """True if the files have every missing tensor under the name that `torch.compile` gives it."""
    plain = {name.replace(f"{COMPILED}.", "") for name in unknown if f"{COMPILED}." in name}
    return bool(missing) and plain.issuperset(missing)


def _is_renamed(unknown: list[str], missing: list[str], source: Mapping[str, TensorEntry]) -> bool:
    """True if names differ because of a renaming, and not because some tensors are missing.

    This is assumed if the files have single experts that the model has fused, if the model lacks more than half of the
    source's names, or if one prefix turns names of one side into names of the other:

        unknown ["model.a", "model.b"], missing ["a", "b"] -> True
        unknown ["x"], missing ["y"], in a source of 300   -> False

    Args:
        unknown: names in the files that the model lacks.
        missing: names in the model that the files lack.
        source: name in the files -> tensor, for all tensors.
    """
    if not unknown or not missing:
        return False
    fused = any(_EXPERT.search(name) for name in unknown) and any(".experts." in name for name in missing)
    prefixes = (
        match_prefix([split(name) for name in longer], set(shorter))
        for longer, shorter in ((missing, unknown), (unknown, missing))
    )
    return fused or 2 * len(unknown) > len(source) or any(prefixes)


def _name_problems(model_class: str, unknown: list[str], missing: list[str]) -> list[str]:
    """Return a line for each unmatched name, with the most similar unmatched name of the other side."""
    lines = []
    for names, candidates, place in (
        (unknown, missing, f"in the files, not in {model_class}"),
        (missing, unknown, f"in {model_class}, not in the files"),
    ):
        closest = suggestions(names, candidates)
        lines += [f"{escape(name)}: {place}{closest.get(name, '')}" for name in names]
    return lines
