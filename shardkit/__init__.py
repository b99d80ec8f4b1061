"""shardkit: move model weights between layouts - Hub models, per-rank shards, any mesh.

    import shardkit
    result = shardkit.preshard("Qwen/Qwen3-8B", world_size=32)
    print(shardkit.inspect(result.output).to_json())

Importing shardkit imports no torch; what needs it imports it when it runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardkit._version import __version__

if TYPE_CHECKING:
    from shardkit.errors import (
        IncompleteError,
        IntegrityError,
        Interrupted,
        LayoutError,
        MeshError,
        PolicyError,
        ResourceError,
        ShardkitError,
        SourceError,
        UsageError,
    )
    from shardkit.operations.consolidate import ConsolidateResult, consolidate
    from shardkit.operations.environment import Environment, environment
    from shardkit.operations.inspection import inspect
    from shardkit.operations.inspection_result import InspectResult
    from shardkit.operations.preshard import PreshardResult, preshard
    from shardkit.operations.reshard import ReshardResult, reshard
    from shardkit.operations.resolve import ResolvedCheckpoint, resolve_checkpoint

_HOMES = {
    "consolidate": "shardkit.operations.consolidate",
    "ConsolidateResult": "shardkit.operations.consolidate",
    "preshard": "shardkit.operations.preshard",
    "PreshardResult": "shardkit.operations.preshard",
    "inspect": "shardkit.operations.inspection",
    "InspectResult": "shardkit.operations.inspection_result",
    "reshard": "shardkit.operations.reshard",
    "ReshardResult": "shardkit.operations.reshard",
    "resolve_checkpoint": "shardkit.operations.resolve",
    "ResolvedCheckpoint": "shardkit.operations.resolve",
    "environment": "shardkit.operations.environment",
    "Environment": "shardkit.operations.environment",
}

__all__ = [
    "ConsolidateResult",
    "Environment",
    "IncompleteError",
    "InspectResult",
    "IntegrityError",
    "Interrupted",
    "LayoutError",
    "MeshError",
    "PolicyError",
    "PreshardResult",
    "ReshardResult",
    "ResolvedCheckpoint",
    "ResourceError",
    "ShardkitError",
    "SourceError",
    "UsageError",
    "__version__",
    "consolidate",
    "environment",
    "inspect",
    "preshard",
    "reshard",
    "resolve_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "shardkit.errors")), name)


def __dir__() -> list[str]:
    return __all__
