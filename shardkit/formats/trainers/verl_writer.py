"""The files from which verl starts with FSDP2: for each rank one of `torch.save`, a dict of DTensors.

    model_world_size_8_rank_0.pt ...

verl shards the first dim that the shard axis divides, so that nothing is padded, and dim 0 where there is none. Its
mesh has the axis `fsdp`, with `ddp` before it for replicas. A pickled DTensor names the mesh and its device type. The
form of a mesh is torch's own, so the torch that is installed writes these pickles, in a child process; the data are
holes. CRC-32s in such a file are 0, not recorded: they stand at its end, and would have to wait for all data.

Source: verl 0.9, workers/engine/fsdp/utils.py (create_device_mesh), utils/fsdp_utils.py (get_shard_placement_fn).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardkit.core.dtypes import DType
from shardkit.core.placements import REPLICATE, Placement
from shardkit.errors import ResourceError, UsageError, check_torch
from shardkit.files import storage
from shardkit.files.digest import crc32
from shardkit.formats.torchsave.archive import Pread, ZipReader, pread_of, read_directory
from shardkit.keys.names import natural
from shardkit.layout.layout import Layout
from shardkit.transfer.rank_files import Content, PlacedRegion, RankImages

_AXES = {"replicate": "ddp", "shard": "fsdp"}
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from shardkit.formats.torchsave.dtensor_child import main; main()"
_DROPPED = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def placed_by_verl(layout: Layout) -> Layout:
    """Return a layout with the placements that verl gives.

    Raises:
        UsageError: a mesh that verl's FSDP does not have.
    """
    mesh = layout.mesh
    roles = [axis.role for axis in mesh.axes]
    if roles not in (["shard"], ["replicate", "shard"]) or mesh.ep > 1 or mesh.pp > 1:
        raise UsageError(
            f"--mesh {mesh}: verl's FSDP has one shard axis, and a replicate axis before it",
            hint="--mesh dp_shard=8, or dp_replicate=2,dp_shard=4",
        )
    size, tensors = mesh.axes[-1].size, dict(layout.tensors)
    for fqn, tensor in layout.tensors.items():
        if tensor.is_sharded:
            dim = next((dim for dim, length in enumerate(tensor.shape) if length % size == 0), 0)
            tensors[fqn] = replace(tensor, placements=(*(REPLICATE for _ in mesh.axes[:-1]), Placement(dim)))
    return replace(layout, tensors=tensors)


def rank_images(
    layout: Layout,
    dtypes: Mapping[str, DType],
    sources: Mapping[str, str],
    aliases: Mapping[str, Sequence[str]],
    device: str,
) -> RankImages:
    """Return the files of all ranks.

    Args:
        layout: from `placed_by_verl`.
        dtypes: what each tensor is to be stored as.
        sources: each tensor's name in the source.
        aliases: for a tensor, its other names, which share its storage.
        device: device type of the mesh.

    Raises:
        ResourceError: the child process failed.
    """
    mesh, names = layout.mesh, sorted(layout.tensors, key=natural)
    placed = [
        [
            PlacedRegion(n, sources[n], dtypes[n], layout.tensors[n].shape, layout.held(n, rank)[0].region)
            for n in names
        ]
        for rank in range(mesh.size)
    ]
    request = {
        "shape": mesh.shape,
        "names": [_AXES[axis.role] for axis in mesh.axes],
        "device": device,
        "world_size": mesh.size,
        "ranks": [
            [rank, mesh.coord(rank), list(_entries(layout, regions, aliases))]
            for rank, regions in enumerate(placed)
        ],
    }
    first = next((index for index, name in enumerate(names) if layout.tensors[name].is_sharded), None)
    with tempfile.TemporaryDirectory(prefix="shardkit-verl-") as scratch:
        _run_child({**request, "directory": scratch})
        return RankImages(
            [
                _content(os.path.join(scratch, f"{rank}.pt"), rank, mesh.size, regions, first)
                for rank, regions in enumerate(placed)
            ]
        )


def _entries(
    layout: Layout, placed: Sequence[PlacedRegion], aliases: Mapping[str, Sequence[str]]
) -> list[object]:
    entries = list[object]()
    for part in placed:
        tensor = layout.tensors[part.fqn]
        dims = [placement.shard_dim for placement in tensor.placements] if tensor.is_sharded else None
        entries.append([part.fqn, part.dtype.name, part.shape, part.region.sizes, dims])
        entries += aliases.get(part.fqn, ())
    return entries


def _run_child(request: Mapping[str, object]) -> None:
    check_torch()
    command = [sys.executable, "-c", _BOOT, *map(os.path.abspath, sys.path)]
    environment = {key: value for key, value in os.environ.items() if key not in _DROPPED}
    done = subprocess.run(
        command,
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode:
        raise ResourceError(
            f"the process in which torch writes files of DTensors ended with code {done.returncode}",
            problems=done.stdout.decode(errors="replace").splitlines()[-3:],
        )


def _content(
    path: str, rank: int, world_size: int, placed: Sequence[PlacedRegion], first_sharded: int | None
) -> Content:
    """Return the file that torch wrote for a rank, with holes for its tensors.

    Args:
        path: the file; what it has of tensors is zeros.
        rank: the rank.
        world_size: number of ranks.
        placed: its tensors, in their order.
        first_sharded: the first DTensor among them, after which the ranks of the mesh are stored.
    """
    size = storage.stat(path).st_size
    name = f"model_world_size_{world_size}_rank_{rank}.pt"
    with storage.open_file(path, "rb") as file:
        pread = pread_of(file.fileno())
        entries = read_directory(ZipReader(pread, 0, size, name))
        number, before, end = 0, list[bytes](), 0
        patches: list[tuple[int, bytes]] = []
        if first_sharded is not None:
            ranks = entries[f"data/{first_sharded + 1}"]
            data = b"".join(rank.to_bytes(ranks.nbytes // world_size, "little") for rank in range(world_size))
            crc = crc32(data).to_bytes(4, "little")
            patches = [(ranks.start, data), (ranks.start + ranks.nbytes + 4, crc), (ranks.crc_at, crc)]
        for index in range(len(placed)):
            number += first_sharded is not None and index == first_sharded + 1
            entry = entries[f"data/{number}"]
            before.append(_literal(pread, end, entry.start, patches))
            end, number = entry.start + entry.nbytes, number + 1
        return Content(name, placed, before, _literal(pread, end, size, patches))


def _literal(pread: Pread, start: int, stop: int, patches: Sequence[tuple[int, bytes]]) -> bytes:
    """Return bytes of the file, with what was not written to it."""
    data = bytearray(pread(start, stop - start))
    for offset, patch in patches:
        if start <= offset < stop:
            data[offset - start : offset - start + len(patch)] = patch
    return bytes(data)
