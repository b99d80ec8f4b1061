"""shardkit: move model weights between layouts - Hub models, per-rank shards, any mesh.

    import shardkit
    result = shardkit.preshard("Qwen/Qwen3-8B", world_size=32)
    print(shardkit.inspect(result.output).to_json())

    context = shardkit.prepare("Qwen/Qwen3-8B", result.output, dtype="fp32")    # in each process of a training job
    model = shardkit.finalize(shardkit.wrap(context.model, mesh), context)

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
    from shardkit.operations.consolidate import consolidate
    from shardkit.operations.consolidate.result import ConsolidateResult
    from shardkit.operations.diff.diff import diff
    from shardkit.operations.diff.result import DiffResult
    from shardkit.operations.environment import Environment, environment
    from shardkit.operations.inspect.inspect import inspect
    from shardkit.operations.inspect.result import InspectResult
    from shardkit.operations.manifest.manifest import ManifestResult, write_manifest
    from shardkit.operations.preshard import PreshardResult, preshard
    from shardkit.operations.reshard import ReshardResult, reshard
    from shardkit.operations.resolve import ResolvedCheckpoint, resolve_checkpoint
    from shardkit.operations.verify.result import VerifyProblem, VerifyResult
    from shardkit.operations.verify.verify import verify
    from shardkit.training.diagnostics.diagnose import Diagnosis, diagnose
    from shardkit.training.diagnostics.lightning import FSDPDiagnosticsCallback
    from shardkit.training.diagnostics.memory import PhaseMemory
    from shardkit.training.finalize import finalize, load_into
    from shardkit.training.fsdp1 import hf_ram_efficient_loading, param_init_fn
    from shardkit.training.gradients import clip_grad_norm_, grad_norm
    from shardkit.training.optimizer import parameter_names, rebind_optimizer
    from shardkit.training.prepare import prepare
    from shardkit.training.ranks.context import ModelInitializationContext
    from shardkit.training.safe_reader import SafeReader
    from shardkit.training.save import SaveResult, save
    from shardkit.training.source.from_rank import from_rank
    from shardkit.training.wrap import bf16_mixed_precision, layer_policy, wrap

_HOMES = {
    "consolidate": "shardkit.operations.consolidate",
    "ConsolidateResult": "shardkit.operations.consolidate.result",
    "diff": "shardkit.operations.diff.diff",
    "DiffResult": "shardkit.operations.diff.result",
    "preshard": "shardkit.operations.preshard",
    "PreshardResult": "shardkit.operations.preshard",
    "inspect": "shardkit.operations.inspect.inspect",
    "InspectResult": "shardkit.operations.inspect.result",
    "reshard": "shardkit.operations.reshard",
    "ReshardResult": "shardkit.operations.reshard",
    "resolve_checkpoint": "shardkit.operations.resolve",
    "ResolvedCheckpoint": "shardkit.operations.resolve",
    "verify": "shardkit.operations.verify.verify",
    "VerifyProblem": "shardkit.operations.verify.result",
    "VerifyResult": "shardkit.operations.verify.result",
    "write_manifest": "shardkit.operations.manifest.manifest",
    "ManifestResult": "shardkit.operations.manifest.manifest",
    "environment": "shardkit.operations.environment",
    "Environment": "shardkit.operations.environment",
    **dict.fromkeys(
        (
            "Diagnosis",
            "FSDPDiagnosticsCallback",
            "ModelInitializationContext",
            "PhaseMemory",
            "SafeReader",
            "SaveResult",
            "bf16_mixed_precision",
            "clip_grad_norm_",
            "diagnose",
            "finalize",
            "from_rank",
            "grad_norm",
            "hf_ram_efficient_loading",
            "layer_policy",
            "load_into",
            "param_init_fn",
            "parameter_names",
            "prepare",
            "rebind_optimizer",
            "save",
            "wrap",
        ),
        "shardkit.training",
    ),
}

__all__ = [
    "ConsolidateResult",
    "Diagnosis",
    "DiffResult",
    "Environment",
    "FSDPDiagnosticsCallback",
    "IncompleteError",
    "InspectResult",
    "IntegrityError",
    "Interrupted",
    "LayoutError",
    "ManifestResult",
    "MeshError",
    "ModelInitializationContext",
    "PhaseMemory",
    "PolicyError",
    "PreshardResult",
    "ReshardResult",
    "ResolvedCheckpoint",
    "ResourceError",
    "SafeReader",
    "SaveResult",
    "ShardkitError",
    "SourceError",
    "UsageError",
    "VerifyProblem",
    "VerifyResult",
    "__version__",
    "bf16_mixed_precision",
    "clip_grad_norm_",
    "consolidate",
    "diagnose",
    "diff",
    "environment",
    "finalize",
    "from_rank",
    "grad_norm",
    "hf_ram_efficient_loading",
    "inspect",
    "layer_policy",
    "load_into",
    "param_init_fn",
    "parameter_names",
    "prepare",
    "preshard",
    "rebind_optimizer",
    "reshard",
    "resolve_checkpoint",
    "save",
    "verify",
    "wrap",
    "write_manifest",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "shardkit.errors")), name)


def __dir__() -> list[str]:
    return __all__
