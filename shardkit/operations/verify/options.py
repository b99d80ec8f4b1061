"""The options of verify."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardkit.core.text import parse_size
from shardkit.core.threads import ProgressOption
from shardkit.errors import UsageError
from shardkit.operations.verify.result import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The keywords of `verify`, whose docstring describes them."""

    path: str | os.PathLike[str] = field(kw_only=False)
    full: bool = False
    read: str | int | None = None
    seed: int = 0
    manifest: str | os.PathLike[str] | None = None
    against: str | os.PathLike[str] | None = None
    rounded: bool = False
    strict: bool = False
    hub: str | None = None
    revision: str | None = None
    store: bool = False
    ask_class: bool = False
    jobs: int | None = None
    holdings: bool = False
    follow_links: bool = False
    progress: ProgressOption = None

    @property
    def level(self) -> Level:
        """How much is looked at."""
        if self.store:
            return "store"
        return "full" if self.full else "structure" if self.read is None else "sample"

    def sample_bytes(self, recorded_bytes: int) -> int:
        """Return how much to read of the bytes that have a checksum."""
        if self.read is None:
            return 0
        text = str(self.read).strip()
        if not text.endswith("%"):
            return parse_size(self.read)
        try:
            share = float(text[:-1])
        except ValueError:
            share = -1
        if not 0 < share <= 100:
            raise UsageError(
                f"not a share: {text!r}", hint="write a percentage such as 5%, or a size such as 50GiB"
            )
        return -int(-recorded_bytes * share // 100)

    def check(self) -> None:
        """Refuse options that do not go together or are out of range.

        Raises:
            UsageError: these do not.
        """
        self.sample_bytes(0)
        if self.full and self.read is not None:
            raise UsageError("a full check reads everything: give either --full or --read")
        if self.revision is not None and self.hub is None:
            raise UsageError("--revision belongs to --hub, which is not given")
        for option, is_given in (("--rounded", self.rounded), ("--strict", self.strict)):
            if is_given and self.against is None:
                raise UsageError(f"{option} belongs to --against, which is not given")
        reads = self.full or self.read or self.against or self.hub or self.ask_class or self.holdings
        if self.store and reads:
            raise UsageError("--store reads no bytes: give it without what reads or draws them")
