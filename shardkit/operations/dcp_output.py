"""What a decided job says of one DCP directory that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shardkit.formats.dcp.images import DcpImages


class DcpOutput(Protocol):
    """One DCP directory to be written, images and all that is said about them."""

    @property
    def output(self) -> DcpImages:
        """Its images."""
        ...

    @property
    def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """For a stored tensor, the other names that point at its records."""
        ...

    @property
    def sources(self) -> Mapping[str, str]:
        """The source's name of each stored tensor."""
        ...

    @property
    def paths(self) -> Mapping[str, tuple[str | int, ...]] | None:
        """The path of each name in a nested state; None where names are flat."""
        ...

    @property
    def digest(self) -> str:
        """Either "crc32" or "none"."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the source is, for the manifest."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the part of the manifest that is known before a byte moves."""
        ...
