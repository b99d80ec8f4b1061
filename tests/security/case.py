"""What one hostile or odd checkpoint is, and what each command must do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMMANDS = ("inspect", "verify", "diff", "consolidate", "preshard", "reshard")

REFUSED, ACCEPTED, HARMLESS = "refused", "accepted", "harmless"
"""Refused with the culprit's name; done, with the right values; or either, as long as nothing is run or lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint."""

    id: str
    sample: str
    """The good checkpoint that it is made of."""
    change: Callable[[Path], None]
    """Makes it a bad one, in place."""
    mention: tuple[str, ...]
    """Of which every refusal has one."""
    expect: str = REFUSED
    """What most commands do."""
    but: Mapping[str, str] = field(default_factory=dict)
    """What some do instead."""
    reads: str = ""
    """What beside the checkpoint may be read: the store that its weight files are links to."""
    only: tuple[str, ...] = ()
    """The commands to run, where the others would do the same at some cost."""

    @property
    def commands(self) -> tuple[str, ...]:
        """All, if nothing is said; but preshard takes Hub models, and says so of everything else before it looks into it."""
        if self.only:
            return self.only
        return COMMANDS if self.sample in ("hub", "bin") else tuple(c for c in COMMANDS if c != "preshard")

    def outcome(self, command: str) -> str:
        """Return what a command must do."""
        return self.but.get(command, self.expect)
