"""Layouts with factors of OSFT, cut as `fully_shard` cuts them: declared for targets that names tell, or asked of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.factored import FACTOR_DTYPE, Target, shard_dim
from shardkit.core.mesh import Mesh
from shardkit.core.placements import REPLICATE, Placement, Placements
from shardkit.core.text import escape
from shardkit.errors import MeshError
from shardkit.files import manifest
from shardkit.layout.choice.factored import put_factors
from shardkit.layout.layout import Layout, TensorLayout
from shardkit.layout.traced import Division
from shardkit.osft.plan import Candidate, OsftPlan, as_config, choose_targets

# Models whose linear layers are transformers' Conv1D, by model_type; and how the paths of these layers end.
_WITH_CONV1D = frozenset(("gpt2", "openai-gpt", "imagegpt", "decision_transformer"))
_CONV1D = frozenset(("c_attn", "q_attn", "c_proj", "c_fc"))
# How the paths of embeddings end: those of decoders and encoders that are in use.
_EMBEDDINGS = frozenset(
    "embed_tokens embed_positions embed_in wte wpe tok_embeddings shared word_embeddings position_embeddings "
    "token_type_embeddings".split()
)


def check_osft_mesh(mesh: Mesh) -> None:
    """Refuse a mesh that cuts weights of layers, or deals layers out: factors are sharded by `fully_shard` alone.

    Raises:
        MeshError: names its axes.
    """
    axes = [axis.name for axis in mesh.axes if axis.role == "tensor"]
    axes += ["ep"] * (mesh.ep > 1) + ["pp"] * (mesh.pp > 1)
    refuse_cuts(axes, f"--mesh {mesh}: ")


def refuse_cuts(axes: Sequence[str], where: str = "") -> None:
    """Refuse axes that would cut the factors of a layer.

    Raises:
        MeshError: there are some.
    """
    if axes:
        raise MeshError(
            f"{where}OSFT: the factors of a layer are not cut over {' and '.join(axes)}",
            hint="take a mesh of dp_replicate and dp_shard",
        )


def factor_layout(
    layout: Layout, plan: OsftPlan, entries: Mapping[str, TensorEntry], config: Mapping[str, Any] | None
) -> Layout:
    """Return a declared layout with factors in the place of its targets.

    Args:
        layout: of dense weights.
        plan: which become factors.
        entries: the tensors of the source, by name.
        config: config.json, for the type of the model; None if there is none.

    Raises:
        LayoutError, UsageError: as `choose_targets`.
    """
    model_type = (config or {}).get("model_type")
    weights = _candidates(layout, entries, model_type)
    targets, notes = choose_targets(plan, weights, model_type)
    placed = {
        fqn: _placed(layout, target, fqn, shape) for target in targets for fqn, shape in target.shapes.items()
    }
    return replace(put_factors(layout, targets, placed, entries), notes=(*layout.notes, *notes))


def _candidates(
    layout: Layout, entries: Mapping[str, TensorEntry], model_type: str | None
) -> dict[str, Candidate]:
    """Return the tensors of a layout, and what is known against each without a model."""
    ties = {name: group[group[0] == name] for group in layout.ties for name in group}
    candidates = {}
    for fqn, tensor in layout.tensors.items():
        dtype, why = entries[layout.sources[fqn]].dtype, ""
        kind = fqn.removesuffix(".weight").rpartition(".")[2]
        if fqn in ties:
            why = f"it is tied to {escape(ties[fqn])}"
        elif not dtype.is_convertible:
            why = f"it is {dtype.name}: quantised, or no weight"
        elif model_type in _WITH_CONV1D and kind in _CONV1D:
            why = "it belongs to Conv1D, and only a Linear can be divided"
        elif kind in _EMBEDDINGS:
            why = "by its name it belongs to an Embedding, and only a Linear can be divided"
        candidates[fqn] = Candidate(tensor.shape, None, why)
    return candidates


def _placed(layout: Layout, target: Target, fqn: str, shape: tuple[int, ...]) -> TensorLayout:
    """Place a factor as `fully_shard` does, in the unit of its dense weight."""
    dense = layout.tensors[target.weight]
    num_shards = next((axis.size for axis in layout.mesh.axes if axis.role == "shard"), 1)
    cut = Placement(shard_dim(fqn, shape, num_shards))
    placements: Placements = tuple(cut if axis.role == "shard" else REPLICATE for axis in layout.mesh.axes)
    return replace(dense, fqn=fqn, shape=shape, placements=placements)


def division_of(plan: OsftPlan | None) -> Division | None:
    """Return what puts a plan's factors into a model that is traced; None for None."""
    return None if plan is None else Division("shardkit.osft.trace_child", as_config(plan))


def describe_osft(plan: OsftPlan, layout: Layout, dtypes: Mapping[str, DType], root: str) -> manifest.Osft:
    """Return the entry of a manifest for factors that are not yet computed.

    Args:
        plan: what was asked for.
        layout: what came of it.
        dtypes: of everything that is stored, by name.
        root: what stands before the model's own names.
    """
    targets, sizes = layout.factored.values(), Counter[str]()
    factors = {name for target in targets for name in target.shapes}
    for name, dtype in dtypes.items():
        if name not in factors and dtype.is_convertible:
            sizes[dtype.name] += prod(layout.tensors[name].shape)
    return manifest.Osft(
        ratio=plan.ratio,
        targets=plan.globs,
        ranks=plan.ranks,
        svd=plan.svd,
        dense_dtype=max(sizes, key=sizes.__getitem__, default=FACTOR_DTYPE.name),
        modules={
            target.path.removeprefix(root): manifest.OsftModule(
                rank=target.rank, shape=(target.rows, target.columns)
            )
            for target in targets
        },
    )
