"""Choose which settings in the headers of a safetensors source are copied into the output's headers.

Beside the tensors, the `__metadata__` of a header may have settings: those of an adapter (diffusers), the types of
quantised tensors (torchao), names that share one tensor (safetensors' `save_model`), a licence or a title. They refer to
tensors by name, so they become wrong when tensors are renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from shardkit.core.text import escape, listed
from shardkit.errors import LayoutError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.safetensors import OutputTensor

LORA_SETTINGS = "lora_adapter_metadata"
"""Key of an adapter's settings. Source: diffusers 0.42.1, loaders/lora_base.py, LORA_ADAPTER_METADATA_KEY."""
_LORA_STEM = "pytorch_lora_weights"  # LORA_WEIGHT_NAME there; before 0.34 nothing was in its header
# torchao 0.18, prototype/safetensors: a key for all names, and one with a `_type` for each tensor.
_TENSOR_NAMES, _TYPE = "tensor_names", '"_type"'


class HeaderSettings(NamedTuple):
    """The settings for the output's headers."""

    settings: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()


def is_diffusers_lora(checkpoint: Checkpoint) -> bool:
    """True for an adapter that diffusers wrote, by the name of its file or by the settings in the header."""
    hub = checkpoint.hub
    return hub is not None and (
        hub.stem == _LORA_STEM or any(LORA_SETTINGS in settings for settings in hub.settings.values())
    )


def keep_settings(checkpoint: Checkpoint, tensors: Sequence[OutputTensor]) -> HeaderSettings:
    """Return the settings of a source's headers that are right for the output, too.

    Args:
        checkpoint: the source; only a Hub model has settings.
        tensors: the tensors to write.

    Raises:
        LayoutError: names or dtypes change, so that the settings would be wrong, but nothing could read the tensors
            without them.
    """
    hub = checkpoint.hub
    if hub is None or not hub.settings:
        return HeaderSettings()
    values = dict[str, set[str]]()
    for file in hub.settings.values():
        for key, value in file.items():
            values.setdefault(key, set()).add(value)
    stored, written = hub.catalog.tensors, {tensor.fqn for tensor in tensors}
    is_renamed = any(tensor.source != tensor.fqn or tensor.fqn not in stored for tensor in tensors)
    is_cast = checkpoint.remarks.dequantized is not None or any(
        tensor.dtype is not stored[tensor.source].dtype for tensor in tensors if tensor.source in stored
    )
    contradicting = [key for key, stated_values in values.items() if len(stated_values) > 1]
    types = [
        key
        for key, stated_values in values.items()
        if key == _TENSOR_NAMES or any(map(_is_type, stated_values))
    ]
    _refuse(checkpoint, types, contradicting, values, is_renamed=is_renamed, is_cast=is_cast)
    if is_renamed:
        return HeaderSettings(notes=(_left_out_note(values, "because names of tensors change"),))
    settings = {
        key: next(iter(stated_values)) for key, stated_values in values.items() if len(stated_values) == 1
    }
    aliases = [key for key, value in settings.items() if value in stored and value not in written]
    notes = []
    if contradicting:
        notes.append(_left_out_note(contradicting, "in which the source's files contradict each other"))
    if aliases:
        notes.append(_left_out_note(aliases, "other names of tensors that are left out"))
    return HeaderSettings({key: settings[key] for key in settings if key not in aliases}, tuple(notes))


def _is_type(value: str) -> bool:
    return value.startswith("{") and _TYPE in value


def _left_out_note(keys: Mapping[str, object] | Sequence[str], why: str) -> str:
    return f"left out of the header: {listed(sorted(keys))}, {why}"


def _refuse(
    checkpoint: Checkpoint,
    types: Sequence[str],
    contradicting: Sequence[str],
    values: Mapping[str, object],
    *,
    is_renamed: bool,
    is_cast: bool,
) -> None:
    """Refuse an output whose header would describe its tensors wrongly, if it could not be read without the description.

    Args:
        checkpoint: the source.
        types: keys of settings that describe types of tensors.
        contradicting: keys for which the source's files have several values.
        values: all settings, by key.
        is_renamed: some tensors have other names in the output.
        is_cast: some have other dtypes.
    """
    where = escape(checkpoint.path)
    if types and (is_renamed or is_cast or not set(types).isdisjoint(contradicting)):
        what = "names" if is_renamed else "dtypes" if is_cast else "files that contradict each other"
        raise LayoutError(
            f"{where}: the header describes the types of tensors ({listed(types)}), which other {what} make wrong: "
            "nothing could read the output",
            hint="leave out what changes dtypes and names, which copies it whole; or take the model that it was made from",
        )
    if LORA_SETTINGS in values and is_renamed:
        raise LayoutError(
            f"{where}: the header has an adapter's settings ({LORA_SETTINGS}) for the names that its tensors have there",
            hint="leave out what changes or selects names: then names and settings are kept",
        )
