"""What consolidate writes of factors: dense weights in their place, or the factors as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardkit.core.catalog import Catalog, Computed, carry
from shardkit.core.factored import Target
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.safetensors import OutputTensor
from shardkit.keys.expressions import computed_name
from shardkit.transfer.codecs.derive import made_among
from shardkit.transfer.codecs.fold import Fold

_UNLOADABLE = (
    "weights are written as factors of OSFT, which from_pretrained cannot load; consolidate without --keep-factors "
    "folds them"
)


class Written(NamedTuple):
    """The tensors of a model to write, with or without factors."""

    tensors: tuple[OutputTensor, ...]
    """In the order of the output."""
    catalog: Catalog
    notes: tuple[str, ...] = ()
    unloadable: tuple[str, ...] = ()
    """The reason why `from_pretrained` cannot load it."""


def take_factors(
    tensors: Sequence[OutputTensor], catalog: Catalog, checkpoint: Checkpoint, *, keep: bool
) -> Written:
    """Return the tensors to write: dense weights, or factors in place of the folded ones.

    Args:
        tensors: with dense weights, in the order of the output.
        catalog: of these tensors.
        checkpoint: has the factors.
        keep: write the factors.

    Raises:
        UsageError: there are no factors to keep.
        LayoutError: the Hub's form or kind of name differs for some of the weights; lists all.
    """
    folds = made_among(catalog, (tensor.source for tensor in tensors), Fold)
    among = [tensor for tensor in tensors if tensor.source in folds]
    if not keep:
        notes = (f"folded from factors of OSFT: {count(len(among), 'weight')}",) if among else ()
        return Written(tuple(tensors), catalog, notes)
    if not among:
        raise UsageError("--keep-factors: the checkpoint holds no factors of OSFT, or none was chosen")
    targets = {tensor.source: _target_of(catalog, tensor.source) for tensor in among}
    chosen = {source: target for source, target in targets.items() if target is not None}
    LayoutError.raise_for(
        [
            escape(tensor.fqn)
            for tensor in among
            if tensor.source not in chosen or not tensor.fqn.endswith(".weight")
        ],
        "--keep-factors: the Hub has weights in another form than the model that was divided",
        hint="leave --keep-factors out: folded weights take that form",
    )
    factors = [name for target in chosen.values() for name in target.shapes]
    sources = {name: computed_name(name, catalog.tensors) for name in factors}
    dense = [tensor.source for tensor in tensors if tensor.source not in chosen]
    joined = carry(
        catalog, dense, checkpoint.select(factors), {source: name for name, source in sources.items()}
    )
    written = list[OutputTensor]()
    for tensor in tensors:
        target = chosen.get(tensor.source)
        written += [tensor] if target is None else _factors(tensor, target, sources, joined)
    note = f"kept as factors of OSFT: {count(len(among), 'weight')}"
    return Written(tuple(written), joined, (note,), (_UNLOADABLE,))


def _target_of(catalog: Catalog, source: str) -> Target | None:
    """Return the factors that a tensor is folded from; None if something else is made of the folded weight."""
    file = catalog.files[catalog.chunks.file[catalog.tensors[source].first_chunk]]
    codec = file.derivation.codec if isinstance(file.derivation, Computed) else None
    return codec.target if isinstance(codec, Fold) else None


def _factors(
    tensor: OutputTensor, target: Target, sources: dict[str, str], catalog: Catalog
) -> Iterator[OutputTensor]:
    """Yield the factors of a weight, below the path of its module in the output."""
    path = tensor.fqn.removesuffix(".weight")
    for name, shape in target.shapes.items():
        source = sources[name]
        yield OutputTensor(
            f"{path}{name.removeprefix(target.path)}", source, catalog.tensors[source].dtype, shape
        )
