"""Get from the classes of transformers: the model of a config, the dtype of each tensor, the ties.

Models are built on the meta device, so they have every name and shape, but use no memory for weights.

Dtypes are those that `from_pretrained` gives for a wanted dtype. It builds the class with the wanted dtype as
torch's default, so a tensor that the class itself makes in fp32 (a router, a bias) stays fp32. A class also lists
modules that half precision would harm.

Ties can break without an error. transformers 5.0 builds on meta without them. `init_empty_weights` and `.to("meta")`
turn one parameter into two, and so do `fully_shard` and `parallelize_module` if each name is wrapped separately.
The two are filled with the same values and then diverge in training. The class still declares the tie.

prepare, wrap, preshard and consolidate all use this module. Importing it imports torch, but not transformers.

Source: transformers 5.23, PreTrainedModel.from_pretrained, _get_dtype_plan, and core_model_loading,
convert_and_load_state_dict_in_model.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit._torch import class_before_sharding
from shardkit.core.text import escape
from shardkit.files import storage
from shardkit.keys.names import clean_name
from shardkit.keys.peft import without_base_layers, without_peft_modules
from shardkit.layout.layout import CannotBuildError
from shardkit.layout.wrap_policy import no_split_names

# `_keep_in_fp32_modules` applies to fp16 only, `_keep_in_fp32_modules_strict` to bf16 too.
_KEPT = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDtypes:
    """The dtypes that a model's class gives its tensors when one dtype is wanted for all."""

    default_dtype: torch.dtype
    """The wanted dtype."""
    kept: re.Pattern[str] | None = None
    """Matches the names of tensors that the class keeps in fp32; None if it keeps none."""
    parameters: Mapping[str, torch.dtype] = field(default_factory=dict)
    """FQN -> dtype, for floating parameters that the class creates in another dtype than the wanted one."""
    buffers: Mapping[str, torch.dtype] = field(default_factory=dict)
    """FQN -> dtype, for floating buffers that the class creates."""

    def of(self, fqn: str) -> torch.dtype:
        """Return the dtype of a floating tensor, by its name in the model."""
        if self.kept is not None and self.kept.search(fqn):
            return torch.float32
        return self.parameters.get(without_peft_modules(fqn), self.default_dtype)

    def of_stored(self, name: str) -> torch.dtype:
        """Return the dtype of a floating tensor, by its name in a file, which may lack names of outer modules."""
        by_name = self.of(name)
        if by_name is not self.default_dtype or not self.parameters:
            return by_name
        ends = (
            dtype
            for fqn, dtype in self.parameters.items()
            if f".{fqn}".endswith(f".{name}") or name.endswith(f".{fqn}")
        )
        return next(ends, by_name)


def is_transformers(module: object) -> bool:
    """True for a transformers model. transformers is not imported."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def transformers_model(model: nn.Module | None) -> Any:
    """Return the outermost transformers model in a model, or None."""
    return next(
        (module for module in (model.modules() if model is not None else ()) if is_transformers(module)), None
    )


def is_transformers_layer(module: nn.Module) -> bool:
    """True for a layer with transformers' own activation checkpointing, which keeps caches out of the recomputation."""
    return any(
        base.__name__ == "GradientCheckpointingLayer" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def built_dtypes(model: nn.Module, default_dtype: torch.dtype) -> ClassDtypes:
    """Return the dtypes of a class's tensors, from a model that was built with `default_dtype` as torch's default."""
    return ClassDtypes(
        default_dtype=default_dtype,
        kept=_fp32_pattern(model, default_dtype),
        parameters=dict(_own_dtypes(model, default_dtype)),
    )


def class_dtypes(model: nn.Module, default_dtype: torch.dtype) -> ClassDtypes:
    """Return the dtypes that the classes of a live model give its tensors, whatever dtype the model was built in.

    Each transformers model in it is built once more, on meta. If a class cannot be built, because it needs more than
    a config, only its list of fp32 modules counts.

    Args:
        model: any model. Wrappers around it and adapters in it do not matter.
        default_dtype: a floating dtype.
    """
    parameters, buffers = dict[str, torch.dtype](), dict[str, torch.dtype]()
    holds_any = False
    for prefix, twin in meta_twins(model, default_dtype):
        holds_any = True
        if twin is not None:
            parameters |= {prefix + fqn: dtype for fqn, dtype in _own_dtypes(twin, default_dtype)}
            buffers |= {prefix + fqn: x.dtype for fqn, x in twin.named_buffers() if x.is_floating_point()}
    kept = _fp32_pattern(model, default_dtype) if holds_any else None
    return ClassDtypes(default_dtype=default_dtype, kept=kept, parameters=parameters, buffers=buffers)


def _fp32_pattern(model: nn.Module, default_dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return one regular expression for all tensors that the classes keep in fp32, or None.

    transformers' patterns are regular expressions that match anywhere in a name, and `*` stands for any text.
    """
    patterns = {
        pattern for attribute in _KEPT.get(default_dtype, ()) for pattern in collect(model, attribute)
    }
    return re.compile("|".join(f"(?:{p.replace('*', '.*')})" for p in sorted(patterns))) if patterns else None


def _own_dtypes(model: nn.Module, default_dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() and parameter.dtype != default_dtype:
            yield fqn, parameter.dtype


def meta_twins(model: nn.Module, default_dtype: torch.dtype | None) -> Iterator[tuple[str, nn.Module | None]]:
    """Build each outermost transformers model in a live model once more, on meta.

    Args:
        model: any model. Wrappers around it and adapters in it do not matter.
        default_dtype: a floating dtype; None for the config's.

    Yields:
        (prefix that the twin's names have in the model, the twin). The twin is None if the class cannot be built.
    """
    for path, module in _outermost(model):
        yield without_peft_modules(path), _twin(module, default_dtype)


def _outermost(model: nn.Module, method: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path with a dot at its end, module) of each outermost transformers model that has this method."""
    prefixes: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(f"{path}.".startswith(outer) for outer in prefixes)
        if not is_inside and is_transformers(module) and (not method or hasattr(module, method)):
            prefixes.append(f"{path}." if path else "")
            yield prefixes[-1], module


def _twin(model: Any, default_dtype: torch.dtype | None) -> nn.Module | None:
    """Return a *twin* of a transformers model: a new one of its class and config on meta; None if it cannot be built.

    The model may have been cast or sharded since it was built. Its twin has the dtypes and buffers that the class makes.
    The state of the random generators, and the model's config, stay as they are.
    """
    plain: Any = class_before_sharding(model)
    options = {} if default_dtype is None else {"dtype": default_dtype}
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
    """Give code that reads the values of a `torch.linspace` real numbers while it builds, as `from_pretrained` does."""
    try:
        from transformers.initialization import meta_device_safe_creation_ops
    except ImportError:  # transformers 5.0 lacks it
        yield
        return
    with meta_device_safe_creation_ops():
        yield


_TRUST = "--trust-remote-code lets the model's own code run; read it first"


def build_model(directory: str, *, trust_remote_code: bool, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model that `from_pretrained` would build, without weights, on the meta device.

    Args:
        directory: the directory with config.json.
        dtype: the wanted dtype; None for the config's.
        trust_remote_code: whether code in the directory may be imported.

    Raises:
        CannotBuildError: the config is missing or names no architecture, transformers lacks the architecture, or its
            code may not run.
    """
    model_class, config = find_class(directory, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"), safe_creation():
            # No implementation of attention has parameters, and the fast ones need further packages.
            options = {} if dtype is None else {"dtype": dtype}
            model = model_class._from_config(config, attn_implementation="eager", **options)
    except ImportError as error:
        raise CannotBuildError(
            f"{model_class.__name__} needs a package that is not here: {escape(str(error))}"
        ) from error
    assert isinstance(model, nn.Module)
    mend_ties(model)
    return model


def find_class(directory: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return (class, config) of the model that a directory's config describes. Nothing is built.

    Args:
        directory: the directory with config.json.
        trust_remote_code: whether code in the directory may be imported.

    Raises:
        CannotBuildError: as `build_model`.
    """
    import transformers  # takes seconds, and functions for live models need no import

    directory = storage.local_config(directory)
    raw = _read_config(directory)
    model_class = _find_class(raw, directory, trust_remote_code)
    return model_class, transformers.AutoConfig.from_pretrained(
        directory, trust_remote_code=trust_remote_code
    )


def _read_config(directory: str) -> dict[str, Any]:
    try:
        with storage.open_file(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise CannotBuildError(f"config.json cannot be read: {escape(str(error))}") from None
    if not isinstance(config, dict):
        raise CannotBuildError("config.json is not an object")
    return config


def _find_class(raw: dict[str, Any], directory: str, trust_remote_code: bool) -> Any:
    """Return the class that `architectures` names, from transformers or from the model's own code."""
    import transformers

    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        raise CannotBuildError("config.json names no architecture")
    auto_map = raw.get("auto_map")
    remote = _remote_reference(auto_map, name)
    if remote and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote, directory)
    known_type = raw.get("model_type") in transformers.CONFIG_MAPPING
    native = getattr(transformers, name, None) if known_type and name.isidentifier() else None
    if isinstance(native, type) and issubclass(native, transformers.PreTrainedModel):
        return native
    if auto_map and not trust_remote_code:
        raise CannotBuildError(f"{escape(name)} comes with code of its own, which was not run", hint=_TRUST)
    raise CannotBuildError(
        f"transformers {transformers.__version__} has no {escape(name)} for"
        f" model_type {escape(str(raw.get('model_type')))!r}"
    )


def _remote_reference(auto_map: object, name: str) -> str | None:
    """Return the reference "module.Class" in a config's auto_map whose class is `name`, or None."""
    if not isinstance(auto_map, dict):
        return None
    references = (value for value in auto_map.values() if isinstance(value, str))
    return next((value for value in references if value.rpartition(".")[2] == name), None)


def ignored_patterns(model: nn.Module) -> tuple[str, ...]:
    """Return the patterns of source names that `from_pretrained` skips without a warning.

    These are the class's own patterns, and two for buffers that used to be persistent.

    Source: transformers 5.23, PreTrainedModel._adjust_missing_and_unexpected_keys.
    """
    patterns = list(collect(model, "_keys_to_ignore_on_load_unexpected"))
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return tuple(patterns)


class BrokenTie(NamedTuple):
    """Two parameters of a model that its class declares to be one."""

    kept: str
    """FQN of the parameter that the class ties the other to."""
    alias: str
    """FQN of the other parameter."""


class _ModelParameter(NamedTuple):
    """A parameter and its place in the model."""

    fqn: str
    module: nn.Module
    """The module that has the parameter."""
    name: str
    """Name of its attribute in the module."""
    parameter: nn.Parameter


def broken_ties(model: nn.Module) -> list[BrokenTie]:
    """Return the ties that a model's classes and configs declare, but that are two parameters in the model.

    Args:
        model: any model, wrapped or not. Only transformers models, and models that contain one, declare ties.

    Source: transformers 5.23, PreTrainedModel.tie_weights and get_expanded_tied_weights_keys.
    """
    return [BrokenTie(kept.fqn, alias.fqn) for kept, alias in _broken_pairs(model)]


def mend_ties(model: nn.Module) -> list[BrokenTie]:
    """Mend broken ties where both parameters are on meta and not sharded; return the ties that were mended.

    Args:
        model: a model that is not wrapped.
    """
    done = []
    for kept, alias in _broken_pairs(model):
        if _is_free(kept.parameter) and _is_free(alias.parameter) and _are_alike(kept, alias):
            setattr(alias.module, alias.name, getattr(kept.module, kept.name))
            done.append(BrokenTie(kept.fqn, alias.fqn))
    return done


def _is_free(parameter: nn.Parameter) -> bool:
    return parameter.is_meta and not isinstance(parameter, DTensor)


def _are_alike(kept: _ModelParameter, alias: _ModelParameter) -> bool:
    one, two = kept.parameter, alias.parameter
    return one.dtype == two.dtype and one.requires_grad == two.requires_grad


def _broken_pairs(model: nn.Module) -> Iterator[tuple[_ModelParameter, _ModelParameter]]:
    """Yield (kept, alias) of each declared tie whose names are two parameters of one shape in the model."""
    declared = dict(_declared_ties(model))
    if not declared:
        return
    places: dict[str, _ModelParameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            place = _ModelParameter(clean_name(f"{path}.{name}" if path else name), module, name, parameter)
            places.setdefault(without_base_layers(place.fqn), place)
    for alias, kept in declared.items():
        if alias in places and kept in places:
            one, two = places[kept], places[alias]
            if one.parameter is not two.parameter and one.parameter.shape == two.parameter.shape:
                yield one, two


def _declared_ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (alias, kept name) of the ties that transformers models declare now and also have in `all_tied_weights_keys`.

    The names are those in `model`. Both sources are needed. The constructor fills the dict `all_tied_weights_keys`, and the
    config may have changed since. `from_pretrained` removes the pairs from it that differ in the files and so are not tied,
    which the declaration does not show. If the declared patterns match nothing any more, the dict alone counts.
    """
    for path, module in _outermost(model, "get_expanded_tied_weights_keys"):
        # The path, as a prefix of names, without segments of wrappers and of PEFT, which are found by the dots around them.
        before = without_base_layers(f".{clean_name(path.removesuffix('.'))}.").lstrip(".")
        built = getattr(module, "all_tied_weights_keys", None)
        try:
            now = module.get_expanded_tied_weights_keys(all_submodels=True)  # type: ignore[operator]
        except ValueError:  # patterns match nothing, because wrappers changed names or modules were removed
            now = built
        if isinstance(built, dict) and isinstance(now, dict):
            named = ((clean_name(alias), clean_name(kept)) for alias, kept in now.items())
            yield from ((before + alias, before + kept) for alias, kept in named if alias in built)


def collect(model: nn.Module, attribute: str) -> tuple[str, ...]:
    """Return the strings in a class attribute of all modules. The attribute may be a str, list, set or None.

    transformers 5 puts a `set()` of the attribute on each instance, which turns a str into single letters. So the
    attribute of the class is read too, and single letters are ignored.
    """
    values = (getattr(holder, attribute, None) for part in model.modules() for holder in (type(part), part))
    return tuple(dict.fromkeys(name for value in values for name in no_split_names(value) if len(name) > 1))
