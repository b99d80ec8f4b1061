"""A diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardkit.core.text import MIB, count, escape, fold, listed

if TYPE_CHECKING:
    from shardkit.training.diagnostics.diagnose import Diagnosis
    from shardkit.training.diagnostics.units import DiagnosedUnit


def make_table(found: Diagnosis, kind: str) -> str:
    """Return a diagnosis as text; units of one kind are one line.

    Args:
        kind: what `found.kind` is, in words.
    """
    lines = [
        f"{escape(found.model_class)} on rank {found.rank} of {found.world_size}: {kind}",
        f"  parameters    {found.local_parameters:,} of {found.parameters:,} here: {_mib(found.local_bytes)} MiB, "
        f"expected {_mib(found.expected_bytes)} of {_mib(found.parameter_bytes)}",
        f"  units         {_units(found)}",
        *(f"    {line}" for line in _settings(found.units)),
        f"  checkpointed  {count(found.checkpoint_wrappers, 'module')}",
        *_names("uneven", found.uneven),
        *_names("empty here", found.empty),
        *_names("not cut", found.whole),
        *(f"  tied          {' = '.join(map(escape, names))}" for names in found.ties),
    ]
    return "\n".join([*lines, *(f"  problem       {problem}" for problem in found.problems)])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f}"


def _units(found: Diagnosis) -> str:
    inner = [unit.path for unit in found.units if not unit.is_root]
    roots = [unit.path for unit in found.units if unit.is_root]
    if not roots:
        return "none"
    if len(roots) > 1:
        return f"{len(found.units)}, and nothing around them: {listed(roots)}"
    return f"{len(inner)} and {escape(roots[0]) or 'the root'}{f': {listed(inner)}' if inner else ''}"


def _settings(units: Sequence[DiagnosedUnit]) -> Iterator[str]:
    """Yield one line for each kind of unit: paths that differ in numbers alone, and equal settings."""
    for folded in fold((unit.path, _describe(unit)) for unit in units):
        times = f" ({folded.count})" if folded.count > 1 else ""
        yield f"{escape(folded.pattern) or 'root'}{times}  {folded.key}"


def _describe(unit: DiagnosedUnit) -> str:
    if not unit.mesh:
        return f"{escape(unit.class_name)}, nothing of its own"
    parts = [
        escape(unit.class_name),
        f"{unit.parameters:,} parameters",
        f"mesh {escape(unit.mesh)}",
        f"placed {' and '.join(f'({placed})' for placed in unit.placements)}",
        f"reshard {unit.reshard_after_forward}",
        unit.mixed_precision or "no mixed precision",
        *(["on the CPU"] if unit.cpu_offload else []),
    ]
    return ", ".join(parts)


def _names(title: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"  {title:<14}{count(len(names), 'parameter')}: {listed(names)}"
