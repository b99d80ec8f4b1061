"""The first steps of the names in a checkpoint: what tells who made the state dict."""

from __future__ import annotations

from shardkit.core.catalog import Catalog


def heads_of(catalog: Catalog, num_steps: int) -> dict[tuple[str | int, ...], None]:
    """Return the different beginnings of all names, in the order of the source.

    Steps are those of the state dict that was saved where the checkpoint records them, otherwise what
    stands between the dots of a name. Names with fewer steps are given whole.
    """
    if catalog.paths is not None:
        return dict.fromkeys(path[:num_steps] for path in catalog.paths.values())
    names = (*catalog.tensors, *catalog.objects)
    return dict.fromkeys(tuple(name.split(".", num_steps)[:num_steps]) for name in names)
