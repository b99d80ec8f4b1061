"""Starting a sharded model in three phases, saving it, and looking at it: prepare, wrap, finalize.

Importing this package imports torch; `import shardkit` does not import this package before one of its names is used.
"""

# At once and not when first used: modules here have the names of their functions, and importing one later would
# put the module in the function's place.
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

__all__ = [
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
]
