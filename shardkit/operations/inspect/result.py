"""The answer of inspect, and the parts of it that every kind of source has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Shape
from shardkit.core.text import fold
from shardkit.files import storage


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedFile:
    """One file that holds tensors."""

    name: str
    file_bytes: int
    """Size of the file."""
    tensor_bytes: int | None
    """Bytes of tensors in it; None where only its own chunk list or header would tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTensors:
    """One tensor, or several whose names differ only in numbers."""

    name: str
    """A name, or a pattern as `model.layers.{0..35}.mlp.up_proj.weight`."""
    count: int
    dtype: str
    shape: tuple[int, ...]
    """Of each, in elements."""
    placements: str | None
    """One for each mesh axis, such as "R,S(0)"; None where it is not recorded."""
    tensor_bytes: int
    """Of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedUnits:
    """One unit of the wrap policy, or several whose paths differ only in numbers."""

    path: str
    """Module path or pattern; "" is the root."""
    count: int
    class_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedDType:
    """All tensors of one dtype."""

    dtype: str
    num_tensors: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectResult:
    """What a model or a checkpoint holds."""

    path: str
    """As it was given."""
    kind: Literal["hub", "presharded", "dcp", "sharded"]
    """A Hub model, a checkpoint with a `shardkit.json`, any other plain DCP checkpoint, or one of another
    format."""
    format: str
    """Of the files: "safetensors", "torch-bin" or "dcp"; for kind "sharded" the checkpoint's, e.g. "lightning"."""
    made_by: str | None = None
    """Tool and version, where they are recorded; for sharded checkpoints the trainer, where it can be told."""
    source: str | None = None
    """What it was made from: repo and commit, or file names."""
    model_class: str | None = None
    """From config.json."""
    world_size: int | None = None
    """Ranks of the mesh; None where no mesh is recorded."""
    mesh: str | None = None
    layout: str | None = None
    """"traced" or "declared"."""
    policy: str | None = None
    """The wrap policy as it was asked for."""
    units: tuple[InspectedUnits, ...] = ()
    num_tensors: int
    """Tied tensors count once; their other names are in `ties`."""
    tensor_bytes: int
    tensors: tuple[InspectedTensors, ...]
    dtypes: tuple[InspectedDType, ...]
    """Most bytes first."""
    files: tuple[InspectedFile, ...]
    imbalance: float | None = None
    """Largest shard file over the mean; None for a Hub model."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Names that share their bytes; the first of each is among `tensors`."""
    objects: tuple[str, ...] = ()
    """Entries that are not tensors; they are never decoded."""
    omitted: tuple[tuple[str, str], ...] = ()
    """(name, reason) of tensors that the source had and this lacks."""
    roots: tuple[tuple[str, str], ...] = ()
    """(kind, beginning of its names), e.g. ("model", "app.model"), where the trainer fixes them."""
    assets: tuple[str, ...] = ()
    """Directories with the config, tokenizer and the like that come with a sharded checkpoint, best first."""
    refused: tuple[tuple[str, str], ...] = ()
    """(kind of weights, reason) of weights that are there in part and cannot be recovered."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(file or entry, reason) of what was not read."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Differences from what the manifest lists."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


class Tensor(NamedTuple):
    """One tensor, before those that are alike become one entry."""

    name: str
    dtype: str
    shape: Shape
    placements: str | None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


def tensor_fields(found: Sequence[Tensor], *, unfold: bool) -> dict[str, Any]:
    """Return the fields of the result that are about all tensors."""
    dtypes: dict[str, list[int]] = {}
    for tensor in found:
        dtypes.setdefault(tensor.dtype, []).append(tensor.nbytes)
    groups = (
        ((t.name, 1, t) for t in found)
        if unfold
        else ((f.pattern, f.count, f.key) for f in fold((t.name, t._replace(name="")) for t in found))
    )
    return {
        "num_tensors": len(found),
        "tensor_bytes": sum(tensor.nbytes for tensor in found),
        "tensors": tuple(
            InspectedTensors(
                name=name,
                count=count,
                dtype=tensor.dtype,
                shape=tensor.shape,
                placements=tensor.placements,
                tensor_bytes=count * tensor.nbytes,
            )
            for name, count, tensor in groups
        ),
        "dtypes": tuple(
            InspectedDType(dtype=dtype, num_tensors=len(sizes), tensor_bytes=sum(sizes))
            for dtype, sizes in sorted(dtypes.items(), key=lambda item: (-sum(item[1]), item[0]))
        ),
    }


def model_class(config: Mapping[str, object]) -> str | None:
    """Return the class that a config.json names."""
    classes = config.get("architectures")
    return classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None


def imbalance(sizes: Sequence[int]) -> float:
    """Return the largest size over the mean."""
    return round(max(sizes) * len(sizes) / sum(sizes), 4) if sum(sizes) else 1.0


def beside(directory: str) -> Iterator[str]:
    """Yield a note where safetensors files lie beside the shards."""
    if any(name.endswith(".safetensors") for name in storage.listdir(directory)):
        yield "there are also safetensors files in this directory: give the path of one to see what it holds"
