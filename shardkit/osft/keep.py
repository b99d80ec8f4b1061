"""What is written of a model whose weights are stored as factors of OSFT: dense weights, or the factors as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardkit.core.catalog import Catalog, carry
from shardkit.core.factored import Target
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.formats.contract import Folded
from shardkit.formats.hub.safetensors import OutputTensor
from shardkit.keys.expressions import made_name
from shardkit.osft.fold import Fold
from shardkit.transfer.codecs.derive import made_among

_UNLOADABLE = (
    "weights are written as factors of OSFT, which from_pretrained does not know; consolidate without --keep-factors "
    "folds them"
)


class Written(NamedTuple):
    """What is written of a model, be its weights factors or not."""

    tensors: tuple[OutputTensor, ...]
    """In the order of the output."""
    catalog: Catalog
    notes: tuple[str, ...] = ()
    unloadable: tuple[str, ...] = ()
    """Why `from_pretrained` would not load it."""


def take_factors(
    tensors: Sequence[OutputTensor], catalog: Catalog, folded: Folded | None, *, keep: bool
) -> Written:
    """Return the tensors to write: dense weights, or the factors in the place of each folded one.

    Args:
        tensors: with dense weights, in the order of the output.
        catalog: of them.
        folded: what is stored as factors.
        keep: write the factors.

    Raises:
        UsageError: there are no factors to keep.
        LayoutError: the Hub has some of the weights in another form, or under a name of another kind; lists all.
    """
    folds = made_among(catalog, (tensor.source for tensor in tensors), Fold)
    among = [tensor for tensor in tensors if tensor.source in folds]
    if not keep:
        notes = (f"folded from factors of OSFT: {count(len(among), 'weight')}",) if among else ()
        return Written(tuple(tensors), catalog, notes)
    if folded is None or not among:
        raise UsageError("--keep-factors: the checkpoint holds no factors of OSFT, or none was chosen")
    LayoutError.raise_for(
        [
            escape(tensor.fqn)
            for tensor in among
            if tensor.source not in folded.targets or not tensor.fqn.endswith(".weight")
        ],
        "--keep-factors: the Hub has weights in another form than the model that was divided",
        hint="leave --keep-factors out: folded weights take that form",
    )
    chosen = {tensor.source: folded.targets[tensor.source] for tensor in among}
    factors = [name for target in chosen.values() for name in target.shapes]
    sources = {name: made_name(name, catalog.tensors) for name in factors}
    dense = [tensor.source for tensor in tensors if tensor.source not in chosen]
    joined = carry(
        catalog, dense, folded.factors(factors), {source: name for name, source in sources.items()}
    )
    written = list[OutputTensor]()
    for tensor in tensors:
        target = chosen.get(tensor.source)
        written += [tensor] if target is None else _factors(tensor, target, sources, joined)
    note = f"kept as factors of OSFT: {count(len(among), 'weight')}"
    return Written(tuple(written), joined, (note,), (_UNLOADABLE,))


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
