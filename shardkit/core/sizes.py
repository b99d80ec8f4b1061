"""Sizes in bytes as people write and read them: `5GB` is 5 * 10^9, `5GiB` is 5 * 2^30."""

from __future__ import annotations

import re

from shardkit.errors import UsageError

KIB, MIB = 1 << 10, 1 << 20

_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}
_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50}
_FACTORS = _DECIMAL | _BINARY
_PATTERN = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(text: str | int) -> int:
    """Return a number of bytes from text such as "5GB", "512MiB" or "1024"; case does not matter.

    Raises:
        UsageError: not a size.
    """
    if isinstance(text, int):
        return text
    match = _PATTERN.fullmatch(text.strip())
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"not a size: {text!r}",
            hint="write a number of bytes with a unit, such as 512MiB, 5GB or 1048576",
        )
    whole, _, fraction = match.group(1).partition(".")
    # Integer arithmetic: a float would lose bytes above 2^53.
    return int(whole) * factor + (int(fraction) * factor // 10 ** len(fraction) if fraction else 0)


def format_size(num_bytes: int) -> str:
    """Return bytes for people, in binary units, always with the unit: "131.4 GiB"."""
    if num_bytes < 0:
        return "-" + format_size(-num_bytes)
    if num_bytes < KIB:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"
