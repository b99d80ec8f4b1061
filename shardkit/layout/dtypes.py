"""The dtype of each tensor of a transformers model, as `from_pretrained` gives it for a wanted one.

`from_pretrained` builds the class with the wanted dtype as torch's default: what the class makes fp32 by itself (a
router, a bias) stays so. Beside that a class lists modules that half precision would harm. prepare, wrap, preshard and
consolidate all ask here.

Source: transformers 5.23, PreTrainedModel.from_pretrained, _get_dtype_plan, and core_model_loading,
convert_and_load_state_dict_in_model.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardkit._torch import class_before_sharding
from shardkit.layout.units import collect

# `_keep_in_fp32_modules` is about fp16 alone, the strict ones about bf16 too.
_KEPT = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}
_ADAPTED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDtypes:
    """What a model's class makes of a wanted dtype."""

    wanted: torch.dtype
    kept: re.Pattern[str] | None = None
    """Found in names of what stays fp32; None where there is nothing."""
    made: Mapping[str, torch.dtype] = field(default_factory=dict)
    """FQN -> dtype, of floating parameters that the class makes in another dtype than the wanted one."""
    buffers: Mapping[str, torch.dtype] = field(default_factory=dict)
    """FQN -> dtype that the class makes, of floating buffers."""

    def of(self, fqn: str) -> torch.dtype:
        """Return the dtype of a floating tensor, by its name in the model."""
        if self.kept is not None and self.kept.search(fqn):
            return torch.float32
        return self.made.get(_ADAPTED.sub("", fqn), self.wanted)

    def of_stored(self, name: str) -> torch.dtype:
        """Return the dtype of a floating tensor, by its name in a file, where outer modules may be named otherwise."""
        found = self.of(name)
        if found is not self.wanted or not self.made:
            return found
        ends = (
            dtype
            for fqn, dtype in self.made.items()
            if f".{fqn}".endswith(f".{name}") or name.endswith(f".{fqn}")
        )
        return next(ends, found)


def is_transformers(module: object) -> bool:
    """True for a model of transformers; without importing transformers for any other."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def built_dtypes(model: nn.Module, wanted: torch.dtype) -> ClassDtypes:
    """Return what a class makes of a dtype, told by a model of it that was built with that dtype as torch's default."""
    return ClassDtypes(wanted=wanted, kept=_kept(model, wanted), made=dict(_made(model, wanted)))


def class_dtypes(model: nn.Module, wanted: torch.dtype) -> ClassDtypes:
    """Return what the classes of a live model make of a dtype, in whatever dtype it was built.

    Each model of transformers in it is built once more, on meta. What cannot be (a class of somebody's own that takes
    more than a config) is judged by its list of modules alone.

    Args:
        model: any model; wrappers around it and adapters in it do not matter.
        wanted: a floating dtype.
    """
    made, buffers = dict[str, torch.dtype](), dict[str, torch.dtype]()
    holds_any = False
    for prefix, twin in meta_twins(model, wanted):
        holds_any = True
        if twin is not None:
            made |= {prefix + fqn: dtype for fqn, dtype in _made(twin, wanted)}
            buffers |= {prefix + fqn: x.dtype for fqn, x in twin.named_buffers() if x.is_floating_point()}
    kept = _kept(model, wanted) if holds_any else None
    return ClassDtypes(wanted=wanted, kept=kept, made=made, buffers=buffers)


def _kept(model: nn.Module, wanted: torch.dtype) -> re.Pattern[str] | None:
    """Patterns are regular expressions that are searched anywhere in a name; `*` stands for anything."""
    patterns = {pattern for attribute in _KEPT.get(wanted, ()) for pattern in collect(model, attribute)}
    return re.compile("|".join(f"(?:{p.replace('*', '.*')})" for p in sorted(patterns))) if patterns else None


def _made(model: nn.Module, wanted: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() and parameter.dtype != wanted:
            yield fqn, parameter.dtype


def meta_twins(model: nn.Module, wanted: torch.dtype | None) -> Iterator[tuple[str, nn.Module | None]]:
    """Build each outermost model of transformers in a live model once more, on meta.

    Args:
        model: any model; wrappers around it and adapters in it do not matter.
        wanted: a floating dtype; None is the config's.

    Yields:
        What the twin's names have before them in the model, and the twin; None where the class cannot be built.
    """
    outermost: list[str] = []
    for path, module in model.named_modules():
        if is_transformers(module) and not any(f"{path}.".startswith(outer) for outer in outermost):
            outermost.append(f"{path}." if path else "")
            yield _ADAPTED.sub("", outermost[-1]), _twin(module, wanted)


def _twin(model: Any, wanted: torch.dtype | None) -> nn.Module | None:
    plain: Any = class_before_sharding(model)
    options = {} if wanted is None else {"dtype": wanted}
    with (
        contextlib.suppress(Exception),
        torch.random.fork_rng(devices=[]),
        torch.device("meta"),
        safe_creation(),
    ):
        twin = plain._from_config(copy.deepcopy(model.config), **options)
        return twin if isinstance(twin, nn.Module) else None
    return None


@contextlib.contextmanager
def safe_creation() -> Iterator[None]:
    """Do as `from_pretrained` does: code that reads a `torch.linspace` while it builds gets real numbers."""
    try:
        from transformers.initialization import meta_device_safe_creation_ops
    except ImportError:  # transformers 5.0 has no such thing
        yield
        return
    with meta_device_safe_creation_ops():
        yield
