"""shardkit: move model weights between layouts - Hub models, per-rank shards, any mesh.

    import shardkit
    result = shardkit.preshard("Qwen/Qwen3-8B", world_size=32)
    print(shardkit.inspect(result.output).to_json())

    context = shardkit.prepare("Qwen/Qwen3-8B", result.output, dtype="fp32")  # on every rank
    model = shardkit.finalize(shardkit.wrap(context.model, mesh), context)

The names of this module and the command line are the public API. All modules below it are internal and may
change. Importing shardkit does not import torch. A name is imported from its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardkit._version import __version__ as __version__

if TYPE_CHECKING:  # the same names once more, for type checkers: they do not run `__getattr__`
    from shardkit.errors import IncompleteError as IncompleteError
    from shardkit.errors import IntegrityError as IntegrityError
    from shardkit.errors import Interrupted as Interrupted
    from shardkit.errors import LayoutError as LayoutError
    from shardkit.errors import MeshError as MeshError
    from shardkit.errors import PolicyError as PolicyError
    from shardkit.errors import ResourceError as ResourceError
    from shardkit.errors import ShardkitError as ShardkitError
    from shardkit.errors import SourceError as SourceError
    from shardkit.errors import UsageError as UsageError
    from shardkit.operations.commit import AbortResult as AbortResult
    from shardkit.operations.commit import CommitResult as CommitResult
    from shardkit.operations.commit import StatusResult as StatusResult
    from shardkit.operations.commit import UnfinishedJob as UnfinishedJob
    from shardkit.operations.commit import abort as abort
    from shardkit.operations.commit import commit as commit
    from shardkit.operations.commit import status as status
    from shardkit.operations.consolidate import ConsolidateResult as ConsolidateResult
    from shardkit.operations.consolidate import consolidate as consolidate
    from shardkit.operations.diff import DiffResult as DiffResult
    from shardkit.operations.diff import diff as diff
    from shardkit.operations.environment import Environment as Environment
    from shardkit.operations.environment import environment as environment
    from shardkit.operations.inspect import InspectResult as InspectResult
    from shardkit.operations.inspect import inspect as inspect
    from shardkit.operations.latest import LatestResult as LatestResult
    from shardkit.operations.latest import RunCheckpoint as RunCheckpoint
    from shardkit.operations.latest import latest as latest
    from shardkit.operations.parts.results import PartResult as PartResult
    from shardkit.operations.preshard import PreshardResult as PreshardResult
    from shardkit.operations.preshard import preshard as preshard
    from shardkit.operations.reshard import ReshardResult as ReshardResult
    from shardkit.operations.reshard import reshard as reshard
    from shardkit.operations.resolve import ResolvedCheckpoint as ResolvedCheckpoint
    from shardkit.operations.resolve import resolve_checkpoint as resolve_checkpoint
    from shardkit.operations.verify import verify as verify
    from shardkit.operations.verify.result import VerifyProblem as VerifyProblem
    from shardkit.operations.verify.result import VerifyResult as VerifyResult
    from shardkit.osft.plan import OsftPlan as OsftPlan
    from shardkit.osft.training.projection import osft_leak as osft_leak
    from shardkit.osft.training.projection import osft_optimizer as osft_optimizer
    from shardkit.osft.training.projection import project_gradients_ as project_gradients_
    from shardkit.osft.training.projection import project_parameters_ as project_parameters_
    from shardkit.training.extras.checkpointable import checkpointable as checkpointable
    from shardkit.training.extras.diagnose import Diagnosis as Diagnosis
    from shardkit.training.extras.diagnose import diagnose as diagnose
    from shardkit.training.extras.fsdp1 import hf_ram_efficient_loading as hf_ram_efficient_loading
    from shardkit.training.extras.fsdp1 import param_init_fn as param_init_fn
    from shardkit.training.extras.gradients import clip_grad_norm_ as clip_grad_norm_
    from shardkit.training.extras.gradients import grad_norm as grad_norm
    from shardkit.training.extras.lightning import FSDPDiagnosticsCallback as FSDPDiagnosticsCallback
    from shardkit.training.extras.memory import PhaseMemory as PhaseMemory
    from shardkit.training.extras.optimizer import parameter_names as parameter_names
    from shardkit.training.extras.optimizer import rebind_optimizer as rebind_optimizer
    from shardkit.training.extras.publish import LightningPublisher as LightningPublisher
    from shardkit.training.extras.publish import Publisher as Publisher
    from shardkit.training.extras.publish import TrainerPublisher as TrainerPublisher
    from shardkit.training.extras.safe_reader import SafeReader as SafeReader
    from shardkit.training.fill.from_rank import from_rank as from_rank
    from shardkit.training.finalize import finalize as finalize
    from shardkit.training.finalize import load_into as load_into
    from shardkit.training.model.fit import ModelInitializationContext as ModelInitializationContext
    from shardkit.training.prepare import prepare as prepare
    from shardkit.training.save import SaveResult as SaveResult
    from shardkit.training.save import save as save
    from shardkit.training.wrap import bf16_mixed_precision as bf16_mixed_precision
    from shardkit.training.wrap import layer_policy as layer_policy
    from shardkit.training.wrap import wrap as wrap

_HOMES = {
    "shardkit.errors": tuple(
        "IncompleteError IntegrityError Interrupted LayoutError MeshError PolicyError ResourceError ShardkitError"
        " SourceError UsageError".split()
    ),
    "shardkit.operations.commit": (
        "AbortResult",
        "CommitResult",
        "StatusResult",
        "UnfinishedJob",
        "abort",
        "commit",
        "status",
    ),
    "shardkit.operations.consolidate": ("ConsolidateResult", "consolidate"),
    "shardkit.operations.diff": ("DiffResult", "diff"),
    "shardkit.operations.environment": ("Environment", "environment"),
    "shardkit.operations.inspect": ("InspectResult", "inspect"),
    "shardkit.operations.latest": ("LatestResult", "RunCheckpoint", "latest"),
    "shardkit.operations.parts.results": ("PartResult",),
    "shardkit.operations.preshard": ("PreshardResult", "preshard"),
    "shardkit.operations.reshard": ("ReshardResult", "reshard"),
    "shardkit.operations.resolve": ("ResolvedCheckpoint", "resolve_checkpoint"),
    "shardkit.operations.verify": ("verify",),
    "shardkit.operations.verify.result": ("VerifyProblem", "VerifyResult"),
    "shardkit.osft.plan": ("OsftPlan",),
    "shardkit.training.extras.checkpointable": ("checkpointable",),
    "shardkit.training.extras.diagnose": ("Diagnosis", "diagnose"),
    "shardkit.training.extras.lightning": ("FSDPDiagnosticsCallback",),
    "shardkit.training.extras.memory": ("PhaseMemory",),
    "shardkit.training.finalize": ("finalize", "load_into"),
    "shardkit.training.extras.fsdp1": ("hf_ram_efficient_loading", "param_init_fn"),
    "shardkit.training.extras.gradients": ("clip_grad_norm_", "grad_norm"),
    "shardkit.training.extras.optimizer": ("parameter_names", "rebind_optimizer"),
    "shardkit.osft.training.projection": (
        "osft_leak",
        "osft_optimizer",
        "project_gradients_",
        "project_parameters_",
    ),
    "shardkit.training.prepare": ("prepare",),
    "shardkit.training.model.fit": ("ModelInitializationContext",),
    "shardkit.training.extras.publish": ("LightningPublisher", "Publisher", "TrainerPublisher"),
    "shardkit.training.extras.safe_reader": ("SafeReader",),
    "shardkit.training.save": ("SaveResult", "save"),
    "shardkit.training.fill.from_rank": ("from_rank",),
    "shardkit.training.wrap": ("bf16_mixed_precision", "layer_policy", "wrap"),
}
"""Module -> the public names that it defines."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(["__version__", *_HOME_OF])

if not TYPE_CHECKING:  # else every name would exist, and be Any

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name not in _HOME_OF:
            raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
        try:
            value = getattr(import_module(_HOME_OF[name]), name)
        except ImportError as error:
            if lacking := import_module("shardkit.errors").missing_torch_error(error):
                raise lacking from error
            raise
        # The code that displays results is in a layer above the code that needs it, so it is passed down here.
        results = import_module("shardkit.core.result")
        results.lines_of, results.html_of, results.save_page = _lines_of, _html_of, _save_page
        import_module("shardkit.core.threads").bar = _bar
        return value


def _lines_of(result: object) -> list[str] | None:
    """Return the lines that the command line prints for a result."""
    from shardkit.cli import lines_of  # imported here, because few results are displayed

    return lines_of(result)


def _html_of(result: object) -> str:
    """Return a result as an HTML page."""
    from shardkit.cli import page_of
    from shardkit.pictures.page import render

    return render(page_of(result))


def _save_page(result: object, path: str) -> None:
    """Write a result to a file as an HTML page."""
    from shardkit.cli import page_of
    from shardkit.pictures.page import check_page, write_page

    place = check_page(path)
    write_page(place, page_of(result))


def _bar() -> Any:
    """Return the progress bar for a call from Python, which shows nothing if nobody can see it."""
    # Imported here, because the command line has its own bar.
    from shardkit.cli.progress import bar_of_library_calls

    return bar_of_library_calls()


def __dir__() -> list[str]:
    return __all__
