"""The model that a config describes, on the meta device: every name and shape, no memory for weights.

Importing it imports torch and transformers.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import transformers
from torch import nn

from shardkit.core.text import escape
from shardkit.layout.class_ties import tie
from shardkit.layout.dtypes import safe_creation
from shardkit.layout.traced import CannotBuildError
from shardkit.layout.units import collect

_TRUST = "--trust-remote-code lets the model's own code run; read it first"


def build_model(directory: str, *, trust_remote_code: bool, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model that `from_pretrained` would, without weights, on the meta device.

    Args:
        directory: holds config.json.
        dtype: the wanted one; None is the config's.
        trust_remote_code: may code in the directory be imported.

    Raises:
        CannotBuildError: no config, no architecture, or one that is not known or may not be run.
    """
    model_class, config = find_class(directory, trust_remote_code=trust_remote_code)
    try:
        with torch.device("meta"), safe_creation():
            # The attention's implementation owns no parameters; the fast ones need packages.
            options = {} if dtype is None else {"dtype": dtype}
            model = model_class._from_config(config, attn_implementation="eager", **options)
    except ImportError as error:
        raise CannotBuildError(
            f"{model_class.__name__} needs a package that is not here: {escape(str(error))}"
        ) from error
    assert isinstance(model, nn.Module)
    tie(model)
    return model


def find_class(directory: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the class of the model that a directory's config describes, and the config; nothing is built.

    Args:
        directory: holds config.json.
        trust_remote_code: may code in the directory be imported.

    Raises:
        CannotBuildError: no config, no architecture, or one that is not known or may not be run.
    """
    raw = _read_config(directory)
    model_class = _find_class(raw, directory, trust_remote_code)
    return model_class, transformers.AutoConfig.from_pretrained(
        directory, trust_remote_code=trust_remote_code
    )


def _read_config(directory: str) -> dict[str, Any]:
    try:
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise CannotBuildError(f"config.json cannot be read: {escape(str(error))}") from None
    if not isinstance(config, dict):
        raise CannotBuildError("config.json is not an object")
    return config


def _find_class(raw: dict[str, Any], directory: str, trust_remote_code: bool) -> Any:
    """The class that `architectures` names, from transformers or from the model's own code."""
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
    """The auto_map's "module.Class" whose class is `name`."""
    if not isinstance(auto_map, dict):
        return None
    references = (value for value in auto_map.values() if isinstance(value, str))
    return next((value for value in references if value.rpartition(".")[2] == name), None)


def ignored_patterns(model: nn.Module) -> tuple[str, ...]:
    """Return the patterns of source names that `from_pretrained` leaves out in silence.

    Source: transformers 5.23, PreTrainedModel._adjust_missing_and_unexpected_keys: besides the class's
    own patterns two for buffers that used to be persistent.
    """
    patterns = list(collect(model, "_keys_to_ignore_on_load_unexpected"))
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return tuple(patterns)
