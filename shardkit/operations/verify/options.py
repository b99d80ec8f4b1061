"""The options of verify."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardkit.core.threads import ProgressOption
from shardkit.errors import UsageError
from shardkit.operations.verify.result import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The keywords of `verify`, whose docstring describes them."""

    path: str | os.PathLike[str] = field(kw_only=False)
    full: bool = False
    manifest: str | os.PathLike[str] | None = None
    strict: bool = False
    hub: str | None = None
    revision: str | None = None
    jobs: int | None = None
    holdings: bool = False
    follow_links: bool = False
    progress: ProgressOption = None

    @property
    def level(self) -> Level:
        """How much is checked."""
        return "full" if self.full else "structure"

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            UsageError: they do.
        """
        if self.revision is not None and self.hub is None:
            raise UsageError("--revision belongs to --hub, which is not given")
