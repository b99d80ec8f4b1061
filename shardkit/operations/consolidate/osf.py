"""PEFT's OSF adapters, merged into the weights that they were trained on.

An adapter holds the trained factors alone; what is frozen, and what the trained ones were at the start, PEFT computes
from the base whenever it loads one. The merged weight is W + low - low at the start: W without its weakest directions,
and what these were trained to. Signs cancel. Where singular values k and k + 1 are equal, nothing tells which direction
was frozen, to PEFT as little as here.

Source: peft 0.21, tuners/osf/layer.py (get_delta_weight, merge), tuners/osf/utils.py (decompose_weight_matrix).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from shardkit.core.catalog import Catalog, OnRead, SourceFile, renumber, subset
from shardkit.core.regions import full_region
from shardkit.core.text import count, escape
from shardkit.errors import SourceError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.base import Base
from shardkit.keys.expressions import made_name
from shardkit.keys.renaming import name_as_hub
from shardkit.operations.consolidate.adapter import as_bytes, read_tensor

_FACTOR = re.compile(r"(.+)\.osf_svd_params\.(?:[^.]+\.)?([USV])_low$")
_PREFIX = "base_model.model."
_BLOCK_ROWS = 256


class Trained(NamedTuple):
    """The trained factors of a weight, by their names in the adapter."""

    u: str
    """(N, r)"""
    s: str
    """(r)"""
    v: str
    """(r, M)"""


def merge_osf(checkpoint: Checkpoint, base: Base | None) -> Checkpoint:
    """Return the model that an OSF adapter and its base make; a checkpoint of anything else as it is.

    Args:
        checkpoint: opened. Only PEFT's own files are merged.
        base: what the adapter was trained on.

    Raises:
        SourceError: there is no base with weights on this machine; factors are missing, or do not fit the base's weights;
            or the adapter holds something else, too. All problems are listed.
    """
    tensors = checkpoint.catalog.tensors
    if checkpoint.hub is None or not any(map(_FACTOR.match, tensors)):
        return checkpoint
    if base is None or base.catalog is None:
        raise SourceError(
            f"{escape(checkpoint.path)}: an OSF adapter of PEFT, which holds no frozen part: its weights are made from "
            "those that it was trained on",
            hint="name them with --base DIRECTORY; bring a Hub model here with: hf download ORGANISATION/NAME",
        )
    found = _found(tensors)
    weights = _name(found, checkpoint.catalog, base.catalog)
    catalog = merged_catalog(base.catalog, checkpoint.select(list(tensors)), weights)
    number = count(len(weights), "weight")
    note = f"merged from an OSF adapter of PEFT: {number}; what it started from was computed anew from {escape(base.label)}"
    return replace(
        checkpoint,
        catalog=catalog,
        hub=replace(checkpoint.hub, catalog=catalog, config=base.config),
        select=partial(subset, catalog),
        check=None,
        notes=(*checkpoint.notes, note),
    )


def _found(names: Collection[str]) -> dict[str, Trained]:
    """Return the factors by the path of their module in the base model."""
    parts: dict[str, dict[str, str]] = {}
    problems = list[str]()
    for name in names:
        factor = _FACTOR.match(name)
        if factor is None:
            problems.append(f"{escape(name)}: no factor of OSF")
            continue
        held = parts.setdefault(factor[1].removeprefix(_PREFIX), {})
        if held.setdefault(factor[2], name) != name:
            problems.append(f"{escape(name)}: of another adapter than {escape(held[factor[2]])}")
    problems += [
        f"{escape(path)}: lacks {', '.join(f'{each}_low' for each in 'USV' if each not in held)}"
        for path, held in parts.items()
        if len(held) < 3
    ]
    SourceError.raise_for(
        problems,
        "the adapter cannot be merged",
        hint="merge it with PEFT's merge_and_unload, save the model with save_pretrained, and use that",
    )
    return {path: Trained(held["U"], held["S"], held["V"]) for path, held in parts.items()}


def _name(found: Mapping[str, Trained], adapter: Catalog, base: Catalog) -> dict[str, Trained]:
    """Return the factors by the base's name of their weight.

    Raises:
        SourceError: the base has no such weight, or one that the factors do not fit; lists all.
    """
    theirs = {name: entry.shape for name, entry in base.tensors.items()}
    shapes = {
        path: (*adapter.tensors[each.u].shape[:1], *adapter.tensors[each.v].shape[-1:])
        for path, each in found.items()
    }
    named = name_as_hub({path: f"{path}.weight" for path in found}, shapes, None, theirs).names
    problems = list[str]()
    for path, each in found.items():
        name, rank = named[path], adapter.tensors[each.s].shape
        held = [adapter.tensors[factor].shape for factor in each]
        fits = len(rank) == 1 and len(shapes[path]) == 2
        fits = fits and held == [(shapes[path][0], *rank), rank, (*rank, shapes[path][1])]
        if name not in theirs:
            problems.append(f"{escape(path)}: the base has no {escape(name)}")
        elif theirs[name] != shapes[path] or not fits or rank[0] > min(shapes[path]):
            factors = " x ".join(str(list(shape)) for shape in held)
            problems.append(f"{escape(path)}: {factors} do not fit {list(theirs[name])}")
        elif not base.tensors[name].dtype.is_convertible:
            problems.append(f"{escape(path)}: {base.tensors[name].dtype.name} cannot be added to")
    SourceError.raise_for(
        problems, "the adapter does not fit --base", hint="name the model that it was trained on"
    )
    return {named[path]: each for path, each in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One weight that is computed. Names are those of the catalog."""

    base: str
    """The weight to start from; the result has its shape and dtype."""
    trained: Trained


def merged_catalog(base: Catalog, adapter: Catalog, weights: Mapping[str, Trained]) -> Catalog:
    """Return the base's catalog with weights that are computed when they are read, one at a time.

    Args:
        base: raw extents.
        adapter: raw extents.
        weights: factors by the name of the weight in the base.
    """
    joined = subset(base, base.tensors)
    numbers = range(len(joined.files), len(joined.files) + len(adapter.files))
    joined.files += [renumber(file, numbers) for file in adapter.files]
    held = {name: made_name(name, base.tensors) for each in weights.values() for name in each}
    for name, source in held.items():
        joined.copy_tensor(adapter, name, source, numbers)
    merged = replace(joined, files=list(joined.files), tensors={}, chunks=type(joined.chunks)(), paths=None)
    for name, entry in base.tensors.items():
        if name not in weights:
            merged.copy_tensor(joined, name, name)
            continue
        merge = Merge(base=name, trained=Trained(*(held[each] for each in weights[name])))
        first = base.files[base.chunks.file[entry.first_chunk]]
        merged.files.append(
            SourceFile(
                name=f"{first.name} (merged)",
                path=first.path,
                size=entry.nbytes,
                decode=_Merging(joined, merge),
                stamp=first.stamp,
            )
        )
        chunk = (len(merged.files) - 1, 0, entry.nbytes, full_region(entry.shape))
        merged.add_tensor(name, entry.dtype, entry.shape, iter([chunk]))
    return merged


_of_thread = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class _Merging:
    """Gives the bytes of a merged weight; a `SourceFile.decode`.

    A weight is written band by band, and other threads decode in between. So each thread keeps the last one that it
    made: a decomposition takes minutes.
    """

    catalog: Catalog
    merge: Merge

    def __call__(self, on_read: OnRead) -> memoryview:
        if getattr(_of_thread, "maker", None) is not self:
            _of_thread.maker, _of_thread.content = None, None  # two would be held at once
            _of_thread.content = compute_merge(self.catalog, self.merge, on_read)
            _of_thread.maker = self
        content: memoryview = _of_thread.content
        return content


def compute_merge(catalog: Catalog, merge: Merge, on_read: OnRead = lambda *_: None) -> memoryview:
    """Return the bytes of a merged weight, row-major, in the dtype of its base.

    The start is PEFT's: a decomposition in float32 whose factors are rounded to the base's dtype. Products are taken in
    float64 and rounded once, at the end.
    """
    import torch

    weight = read_tensor(catalog, merge.base, on_read)
    u, s, v = (read_tensor(catalog, name, on_read).double() for name in merge.trained)
    left, sizes, right = torch.linalg.svd(weight.float(), full_matrices=False)
    kept = len(sizes) - len(s)
    before = [each.to(weight.dtype).double() for each in (left[:, kept:], sizes[kept:], right[kept:])]
    del left, sizes, right
    for start in range(0, len(weight), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        value = torch.addmm(weight[rows].double(), u[rows] * s, v)
        value.addmm_(before[0][rows] * before[1], before[2], alpha=-1)
        weight[rows] = value.to(weight.dtype)
    return as_bytes(weight)
