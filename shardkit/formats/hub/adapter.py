"""PEFT adapters: recognise their directory, find their settings and their base, and show the command that merges them.

Source: peft 0.21, CONFIG_NAME and SAFETENSORS_WEIGHTS_NAME.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.core.text import in_shell
from shardkit.files import storage
from shardkit.files.home import METADATA
from shardkit.files.links import locate
from shardkit.files.strict_json import parse_object, read_small
from shardkit.formats.contract import settings_in
from shardkit.formats.hub.assets import is_weights

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER = "PEFT adapter"
"""The name of the format in messages."""
_MAX_CONFIG_BYTES = 16 << 20
_VERL_META = "lora_train_meta.json"  # only rank, alpha and task type
# Names are arguments of the command, so that no text from a file becomes code.
_MERGE = (
    "from sys import argv; from peft import PeftModel; from transformers import AutoModelForCausalLM; "
    'model = AutoModelForCausalLM.from_pretrained(argv[1], dtype="auto"); '
    "PeftModel.from_pretrained(model, argv[2]).merge_and_unload().save_pretrained(argv[3])"
)


def is_adapter_file(path: str) -> bool:
    """True for a path with the name of an adapter's weight file."""
    return os.path.basename(path) == ADAPTER_WEIGHTS


def is_adapter(names: Collection[str]) -> bool:
    """True if the names in a directory are those of an adapter without a model beside it.

    The settings may be missing if there are no other weights: `consolidate` writes such a directory if it does not know
    the settings.
    """
    if ADAPTER_WEIGHTS not in names or any(name.startswith("model") for name in names):
        return False
    other_names = (name for name in names if name != ADAPTER_WEIGHTS)
    return ADAPTER_CONFIG in names or not any(name == METADATA or is_weights(name) for name in other_names)


def base_of_adapter(directory: str) -> str | None:
    """Return the path or repo of the model that an adapter was trained on, from its settings, or None."""
    name = settings_in(directory, ADAPTER_CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """An adapter's settings, with the keys of `adapter_config.json`."""

    values: Mapping[str, Any]
    is_complete: bool
    """True if they are from an `adapter_config.json`; False if a trainer saved only some of them."""
    origin: str
    """Name of the file, for people."""


def find_settings(directories: Iterable[str]) -> AdapterSettings | None:
    """Return an adapter's settings from the first directory that has some, or None.

    Raises:
        SourceError: the file is not a JSON object.
        ResourceError: the file may not be read.
    """
    places = list(directories)
    for name in (ADAPTER_CONFIG, _VERL_META):
        for directory in places:
            if storage.isfile(os.path.join(directory, name)):
                values = read_settings(locate(directory, name))
                return AdapterSettings(values=values, is_complete=name == ADAPTER_CONFIG, origin=name)
    return None


def read_settings(path: str) -> Mapping[str, Any]:
    """Return the content of a file of settings; errors as for `find_settings`."""
    name = os.path.basename(path)
    return parse_object(read_small(path, name, _MAX_CONFIG_BYTES), name)


def merge_command(adapter: str, model: str | None, output: str) -> str:
    """Return the command that merges an adapter into its model, with PEFT's own code, between backticks.

    Args:
        adapter: directory or repo.
        model: directory or repo; None writes MODEL, for the user to replace.
        output: the directory to create.
    """
    arguments = (in_shell(text) for text in (model or "MODEL", adapter, output))
    return f"`python -c {in_shell(_MERGE)} {' '.join(arguments)}`"
