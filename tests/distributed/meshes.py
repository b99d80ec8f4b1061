"""Meshes of some ranks, as torch makes them and as shardkit is told of them."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Shape = tuple[int, ...]
"""Size of each axis: (shards,) or (replicas, shards)."""


def axes(shape: Shape) -> tuple[str, ...]:
    return ("dp_replicate", "dp_shard")[-len(shape) :]


def device_mesh(shape: Shape) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=axes(shape))


def mesh_text(shape: Shape) -> str:
    return ",".join(f"{axis}={size}" for axis, size in zip(axes(shape), shape, strict=True))
