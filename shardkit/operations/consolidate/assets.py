"""What lies beside the weights of the output: the base's config and files, and what has to change in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardkit.core.dtypes import DType
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import parse_integer, read_small
from shardkit.formats.hub.assets import CONFIG, GENERATION_CONFIG
from shardkit.formats.hub.base import ADAPTER_CONFIG, Base
from shardkit.formats.hub.images import OutputTensor

_MAX_BYTES = 256 << 20
_DTYPE, _OLD_DTYPE = "dtype", "torch_dtype"
_NEW_DTYPE_SINCE = (4, 56)  # transformers, PretrainedConfig.to_dict
_TIE = "tie_word_embeddings"
# What an adapter may change of its model's files: tokens that were added, the template of a chat.
_ADAPTERS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


class Asset(NamedTuple):
    """A file to lie beside the weights."""

    name: str
    """Relative to the output."""
    path: str | None
    """Where it is copied from; None where `content` is all."""
    content: bytes
    """What it holds, where it is not copied as it is."""

    def read(self) -> bytes:
        """Return what is to be written.

        Raises:
            SourceError, ResourceError: the file is gone, or not a regular one.
        """
        return self.content if self.path is None else read_small(self.path, self.name, _MAX_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return len(self.content) if self.path is None else os.path.getsize(self.path)


def main_dtype(tensors: Iterable[OutputTensor]) -> DType | None:
    """Return the dtype of most bytes of ordinary floating tensors; None where there are none."""
    sizes: dict[DType, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_convertible:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def model_assets(base: Base | None, dtype: DType | None, *, untie: bool) -> tuple[list[Asset], list[str]]:
    """Return what to write beside a model's weights, and what has to be said about it.

    Args:
        base: None where there is none.
        dtype: what the weights are.
        untie: the config must say that embeddings are not tied.
    """
    if base is None:
        return [], []
    assets, notes = [], list[str]()
    for name, path in base.assets.items():
        if name == CONFIG and base.config is not None:
            content, said = _model_config(base, dtype, untie=untie)
            assets.append(Asset(name, None, content))
            notes += said
        elif name == GENERATION_CONFIG and base.is_trainers:
            assets.append(_generation_config(name, path))
        else:
            assets.append(Asset(name, path, b""))
    return assets, notes


def adapter_assets(base: Base | None, config: bytes | None) -> list[Asset]:
    """Return what to write beside an adapter's weights: its config, and the tokenizer."""
    names = [name for name in (base.assets if base else ()) if any(fnmatchcase(name, p) for p in _ADAPTERS)]
    assets = [Asset(name, base.assets[name], b"") for name in names] if base else []
    return [*assets, Asset(ADAPTER_CONFIG, None, config)] if config is not None else assets


def _model_config(base: Base, dtype: DType | None, *, untie: bool) -> tuple[bytes, list[str]]:
    """Return config.json with the dtype that was written; what it says otherwise is the base's."""
    assert base.config is not None
    config, notes = dict(base.config), list[str]()
    if dtype is not None:
        _set_dtype(config, dtype.name)
    if untie:
        _untie(config)
    if base.is_trainers:
        if config.get("use_cache") is False:  # as trainers set it for gradient checkpointing
            config["use_cache"] = True
            notes.append(f"use_cache, which training had switched off in {escape(base.label)}, is on again")
        if os.path.isabs(str(config.get("_name_or_path", ""))):
            del config["_name_or_path"]
    return _dump(config), notes


def _set_dtype(config: dict[str, object], name: str) -> None:
    """Set the dtype where the config, or one of a part of it, says one."""
    keys = [key for key in (_DTYPE, _OLD_DTYPE) if key in config]
    for key in keys or [_DTYPE if _is_new(config) else _OLD_DTYPE]:
        config[key] = name
    for key, part in config.items():
        if isinstance(part, dict) and key.endswith("_config"):
            said = [k for k in (_DTYPE, _OLD_DTYPE) if isinstance(part.get(k), str)]
            config[key] = {**part, **dict.fromkeys(said, name)}


def _is_new(config: Mapping[str, object]) -> bool:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", str(config.get("transformers_version", "")))
    return match is None or (int(match[1]), int(match[2])) >= _NEW_DTYPE_SINCE


def _untie(config: dict[str, object]) -> None:
    config[_TIE] = False
    for key, part in config.items():
        if isinstance(part, dict) and part.get(_TIE) is True:
            config[key] = {**part, _TIE: False}


def _generation_config(name: str, path: str) -> Asset:
    data = read_small(path, name, _MAX_BYTES)
    try:
        config = json.loads(data, parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: not valid JSON: {escape(str(error))}") from None
    if isinstance(config, dict) and config.get("use_cache") is False:
        return Asset(name, None, _dump({**config, "use_cache": True}))
    return Asset(name, path, b"")


def _dump(config: Mapping[str, object]) -> bytes:
    """Write a config as transformers does."""
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"
