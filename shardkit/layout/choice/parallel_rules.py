"""Declare by patterns of names how tensor and expert parallelism cut tensors, for models without a plan of their own.

    model.layers.*.self_attn.q_proj=colwise      GLOB=STYLE; the glob matches tensors, or the modules that have them

Styles have the same names and effects as in transformers and torch. First a layout is made for only the data axes of
a mesh, as `fully_shard` would see it; then the rules add the cuts over the other axes, which come before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardkit.core.mesh import Axis, Mesh
from shardkit.core.placements import REPLICATE, Placement
from shardkit.core.text import GLOBS_HINT, count, escape, match_nothing, suggestion, unmatched
from shardkit.errors import PolicyError, UsageError
from shardkit.layout.layout import Layout, TensorLayout

_EXPERTS, _REPLICATE = "experts", "replicate"
_TENSOR = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
    "embedding_rowwise": (-2, 1),
    "embedding_colwise": (-1, 1),
}
"""Style -> (dim that it cuts, number of blocks in this dim). A tensor of one dim is cut if this is -2, else whole."""
STYLES = (*_TENSOR, _EXPERTS, _REPLICATE)


class ParallelRule(NamedTuple):
    """A pattern of tensors, and how they are cut."""

    glob: str
    """Matches names of tensors, or of the modules that have them; `*` matches dots too."""
    style: str
    """One of `STYLES`."""


def parse_parallel_rules(texts: Iterable[str]) -> tuple[ParallelRule, ...]:
    """Return the rules that `--parallel-rule` describes.

    Args:
        texts: rules, each as "GLOB=STYLE".

    Raises:
        UsageError: some cannot be parsed; the error lists all of these.
    """
    rules, wrong = list[ParallelRule](), list[str]()
    for text in texts:
        glob, _, style = text.rpartition("=")
        if glob and style in STYLES:
            rules.append(ParallelRule(glob, style))
        elif glob:
            wrong.append(f"{escape(text)}: there is no style {escape(style)!r}{suggestion(style, STYLES)}")
        else:
            wrong.append(f"{escape(text)}: not GLOB=STYLE")
    UsageError.raise_for(wrong, f"--parallel-rule: the styles are {', '.join(STYLES)}")
    return tuple(rules)


def data_axes(mesh: Mesh) -> Mesh:
    """Return the mesh without axes of tensor and expert parallelism; it has one rank if no axis is left."""
    axes = tuple(axis for axis in mesh.axes if axis.role != "tensor")
    return Mesh(axes or (Axis("dp_shard", 1, "shard"),), pp=mesh.pp)


def parallelise(layout: Layout, mesh: Mesh, rules: Sequence[ParallelRule]) -> Layout:
    """Return a layout with its tensors cut by rules. If several rules match a tensor, the last one counts.

    Args:
        layout: a layout on `data_axes(mesh)`. Its buffers stay whole on each rank.
        mesh: the device mesh that training will use.
        rules: the rules, at least one.

    Raises:
        PolicyError: a rule matches nothing, an axis has no rule, a function has cut the model, or names of one
            parameter would be cut in different ways.
    """
    if any(tensor.mesh is not None for tensor in layout.tensors.values()) or ":" in layout.policy:
        raise PolicyError(
            f"--wrap {escape(layout.policy)}: the function parallelises the model itself, and --parallel-rule would do "
            "it again",
            hint="leave one of the two out",
        )
    names = {name: (name, *_aliases(layout, name)) for name in layout.tensors}
    _check_globs(rules, [name for group in names.values() for name in group])
    styles = {name: _style(group, rules) for name, group in names.items()}
    _check_axes(mesh, {rule.style for rule in rules})
    tensors = {name: _cut_tensor(tensor, mesh, styles[name]) for name, tensor in layout.tensors.items()}
    num_cut = sum(tensors[name] != _cut_tensor(tensor, mesh, None) for name, tensor in layout.tensors.items())
    note = f"{count(num_cut, 'tensor')} of {len(tensors)} cut over tp or ep by --parallel-rule"
    notes = (*layout.notes, note, *_idle_styles(mesh, rules))
    return replace(layout, origin="declared", mesh=mesh, tensors=tensors, notes=notes)


def _idle_styles(mesh: Mesh, rules: Sequence[ParallelRule]) -> Iterator[str]:
    """Yield a note for each axis over which rules would cut, but that the mesh lacks."""
    has_tensor = any(axis.role == "tensor" for axis in mesh.axes)
    for axis, is_there, styles in (("tp", has_tensor, _TENSOR), ("ep", mesh.ep > 1, (_EXPERTS,))):
        idle = [f"{escape(rule.glob)}={rule.style}" for rule in rules if rule.style in styles]
        if idle and not is_there:
            yield f"--mesh {mesh} has no {axis}, so these rules cut nothing: {', '.join(idle)}"


def _aliases(layout: Layout, name: str) -> tuple[str, ...]:
    return next((group[1:] for group in layout.ties if group[0] == name), ())


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name.rpartition(".")[0], glob)


def _check_globs(rules: Sequence[ParallelRule], names: Sequence[str]) -> None:
    idle = [rule for rule in rules if not any(_matches(name, rule.glob) for name in names)]
    if idle:
        modules = [name.rpartition(".")[0] for name in names]
        raise PolicyError(
            match_nothing("--parallel-rule", len(idle), "no tensor and no module"),
            problems=unmatched([rule.glob for rule in idle], [*names, *filter(None, modules)]),
            hint=GLOBS_HINT,
        )


def _check_axes(mesh: Mesh, styles: set[str]) -> None:
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.role == "tensor"}
    bare = [name for name, size in sizes.items() if size > 1 and styles.isdisjoint(_TENSOR)]
    if mesh.ep > 1 and _EXPERTS not in styles:
        bare.append("ep")
    if bare:
        raise PolicyError(
            f"--mesh {mesh}: no --parallel-rule cuts anything over {' or '.join(bare)}",
            hint=f"{', '.join(_TENSOR)} cut over tp, {_EXPERTS} over ep",
        )


def _style(names: Iterable[str], rules: Sequence[ParallelRule]) -> str | None:
    """Return the style by which rules cut a parameter; None if no rule matches.

    If several rules match a name, the last one counts.

    Args:
        names: all names of the parameter, as tied ones are cut together.
        rules: in the user's order.

    Raises:
        PolicyError: the names get styles that cut in different ways.
    """
    styles = dict[str, str]()
    for name in names:
        for rule in rules:
            if _matches(name, rule.glob):
                styles[name] = rule.style
    if len({_TENSOR.get(style, (style,)) for style in styles.values()}) > 1:
        raise PolicyError(
            "--parallel-rule: names of one parameter would be cut in different ways",
            problems=[f"{escape(name)}: {style}" for name, style in styles.items()],
            hint="give them one style",
        )
    return next(iter(styles.values()), None)


def _cut_tensor(tensor: TensorLayout, mesh: Mesh, style: str | None) -> TensorLayout:
    """Return a tensor's layout on the whole mesh, given its layout on the data axes."""
    if tensor.is_buffer or not tensor.shape:
        style = None
    if style == _EXPERTS and mesh.experts is not None:
        *replicas, _, _ = mesh.experts.axes
        placements = (*(REPLICATE for _ in replicas), Placement(0, mesh.ep), Placement(0))
        return replace(tensor, placements=placements, mesh=mesh.experts)
    on_tensor = _on_tensor_axis(len(tensor.shape), style)
    size = next((axis.size for axis in mesh.axes if axis.role == "tensor"), 1)
    before, after = iter(tensor.placements), list[Placement]()
    for axis in mesh.axes:
        placement = on_tensor if axis.role == "tensor" else next(before)
        if (
            axis.role == "shard"
            and placement.shard_dim is not None
            and placement.shard_dim == on_tensor.shard_dim
        ):
            placement = Placement(placement.shard_dim, size)
        after.append(placement)
    return replace(tensor, placements=tuple(after))


def _on_tensor_axis(num_dims: int, style: str | None) -> Placement:
    from_end, num_blocks = _TENSOR.get(style or "", (0, 0))
    if not num_blocks:
        return REPLICATE
    if num_dims == 1:  # a bias, which transformers does not treat as packed
        return REPLICATE if from_end == -1 else Placement(0)
    return Placement(num_dims + from_end, num_blocks)
