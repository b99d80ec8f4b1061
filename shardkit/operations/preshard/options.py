"""The options of preshard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, get_args

from shardkit.core.dtypes import Cast
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.threads import OnStep
from shardkit.layout.choice.parallel_rules import ParallelRule, parse_parallel_rules
from shardkit.operations.casts import DtypeRule, parse_rules
from shardkit.operations.options import WriteOptions
from shardkit.operations.preshard.profiles import Profile, ProfileName, find_profile

Origin = Literal["auto", "traced", "declared"]
StoredNames = Literal["live", "hub"]
ORIGINS: tuple[str, ...] = get_args(Origin)
STORED_NAMES: tuple[str, ...] = get_args(StoredNames)


@dataclass(frozen=True, kw_only=True)
class PreshardOptions(WriteOptions):
    """The keywords of `preshard`."""

    verb: ClassVar[str] = "preshard"
    source: str | os.PathLike[str] = field(kw_only=False)
    output: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    world_size: int | None = None
    mesh: str | None = None
    wrap: str = "auto"
    parallel_rules: Sequence[str] = ()
    stages: str = "auto"
    layout: Origin = "auto"
    keys: str | os.PathLike[str] = "none"
    names: StoredNames = "live"
    profile: ProfileName = "plain"
    attribute: str | None = None
    dtype: Cast = "keep"
    dtype_rules: Sequence[str] = ()
    dequantize: bool = False
    revision: str | None = None
    variant: str | None = None
    holdings: bool = False
    trust_remote_code: bool = False
    on_step: OnStep | None = None

    @cached_property
    def ranks(self) -> Mesh:
        """The mesh of the training job that will load the output."""
        return parse_mesh(self.mesh, self.world_size)

    @cached_property
    def rules(self) -> tuple[DtypeRule, ...]:
        """The parsed `dtype_rules`."""
        return parse_rules(self.dtype_rules)

    @cached_property
    def parallel(self) -> tuple[ParallelRule, ...]:
        """The parsed `parallel_rules`."""
        return parse_parallel_rules(self.parallel_rules)

    @property
    def key_rules(self) -> str:
        """The option `keys`: "none", a file's path, or the name of a shipped set."""
        return os.fspath(self.keys)

    @cached_property
    def trainer(self) -> Profile:
        """The profile of the trainer that will load the output."""
        return find_profile(self.profile)

    @property
    def root(self) -> str:
        """The prefix of the model's names in the output, such as "model."; "" for none."""
        return self.trainer.head(self.attribute)

    def check(self) -> None:
        """As `WriteOptions.check`."""
        super().check()
        _ = self.ranks, self.parallel, self.root, self.rules  # raises if one is invalid
