"""The options of reshard."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from shardkit.core.dtypes import Cast
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.text import MIB
from shardkit.errors import MeshError, UsageError
from shardkit.operations.options import WriteOptions


@dataclass(frozen=True, kw_only=True)
class ReshardOptions(WriteOptions):
    """The keywords of `reshard`."""

    verb: ClassVar[str] = "reshard"
    checkpoint: str | os.PathLike[str] = field(kw_only=False)
    output: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    world_size: int | None = None
    mesh: str | None = None
    dtype: Cast = "keep"
    optimizer_dtype: Cast = "keep"
    no_optimizer: bool = False
    strict: bool = False
    max_memory: str | int = 256 * MIB

    @cached_property
    def ranks(self) -> Mesh:
        """The mesh of the training job that will load the output."""
        return parse_mesh(self.mesh, self.world_size)

    def check(self) -> None:
        """As `WriteOptions.check`.

        Raises:
            MeshError: the mesh is invalid, or has pipeline stages.
            UsageError: two options contradict each other.
        """
        super().check()
        ranks = self.ranks
        if self.no_optimizer and self.optimizer_dtype != "keep":
            raise UsageError(
                "--optimizer-dtype converts what --no-optimizer leaves out", hint="leave out one of the two"
            )
        if ranks.pp > 1:
            raise MeshError(
                f"--mesh {ranks}: which stage holds what needs the model",
                hint="leave pp out; stock dcp.load reads the output into any stage",
            )
