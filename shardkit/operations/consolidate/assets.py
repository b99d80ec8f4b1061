"""The output's files other than weights, called *assets*: the base's config, tokenizer and so on, with necessary changes.

A model of sentence-transformers has modules with their own weights, such as `2_Dense/`. These are assets as well: they
are copied from the base. A checkpoint in which they were trained, too, is refused, unless `--root` says which module to
write.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardkit.core.dtypes import DType, most_bytes
from shardkit.core.text import count, escape, in_shell, listed
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.strict_json import parse_integer, read_small
from shardkit.formats.configs import follow_weights
from shardkit.formats.hub.adapter import ADAPTER_CONFIG
from shardkit.formats.hub.assets import (
    CARD,
    CONFIG,
    GENERATION_CONFIG,
    card_of,
    is_tokenizer_file,
    is_weights,
    list_modules,
)
from shardkit.formats.hub.base import Base
from shardkit.formats.hub.safetensors import OutputTensor
from shardkit.formats.hub.tokenizer import Tokenizer
from shardkit.formats.quantised import FILES, QUANTIZATION_CONFIGS, plain_config

_MAX_BYTES = 256 << 20
_DTYPE, _OLD_DTYPE = "dtype", "torch_dtype"
_NEW_DTYPE_SINCE = (4, 56)  # transformers, PretrainedConfig.to_dict
_TIE = "tie_word_embeddings"
_WITHOUT_CACHE = frozenset(
    "EvollaModel evolla mimi mimi_decoder mimi_encoder mpt pix2struct_text_model pocket_tts_audio_tokenizer"
    " pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder ultrabert".split()
)
"""Types of models whose config says `use_cache: false` by itself, in transformers 5.23."""


class Asset(NamedTuple):
    """A file to write that is not one of the weight files."""

    name: str
    """Relative to the output."""
    path: str | None
    """The file to copy; None if `content` is the whole file."""
    content: bytes
    """The bytes to write if `path` is None."""

    def read(self) -> bytes:
        """Return the content to write.

        Raises:
            SourceError, ResourceError: the file is gone, or is not a regular file.
        """
        return self.content if self.path is None else read_small(self.path, self.name, _MAX_BYTES)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return len(self.content) if self.path is None else storage.getsize(self.path)


def main_dtype(tensors: Sequence[OutputTensor], base: Base | None) -> DType | None:
    """Return the dtype of most bytes of ordinary floating tensors, for the config; None if the base's config is right.

    The dtype in the base's config need not be that of most bytes: in a small model, most bytes may be the embedding's.
    But it must be the dtype of some tensor: otherwise `from_pretrained` would round all tensors to it.
    """
    base_dtype = None if base is None else dtype_of(base.config)
    base_tensors = (base.tensors if base is not None else None) or {}
    both = [tensor for tensor in tensors if tensor.fqn in base_tensors]
    are_theirs = bool(both) and all(tensor.dtype == base_tensors[tensor.fqn].dtype for tensor in both)
    if are_theirs or (base is not None and base.says_dtype and base_dtype is not None):
        if base_dtype is None or base_dtype in {tensor.dtype.name for tensor in tensors}:
            return None
    return most_bytes((tensor.dtype, tensor.nbytes) for tensor in tensors)


def model_assets(
    base: Base | None,
    dtype: DType | None,
    *,
    most: DType | None,
    untie: bool,
    tied: bool | None,
    is_plain: bool,
) -> tuple[list[Asset], list[str]]:
    """Return the assets of a model, and the notes about them.

    Args:
        base: the model that the checkpoint was trained from, or None.
        dtype: dtype of the weights, for the config; None if the config's is right.
        most: dtype of most bytes, for the checkpoint's own config if the base's has no dtype.
        untie: the config must say that embeddings are not tied.
        tied: whether embeddings are tied in the output, for a config that does not say so.
        is_plain: the output's weights are not quantised, so no file may say that they are.
    """
    if base is None:
        return [], []
    assets, notes = _card(base) if base.is_given else ([], [])
    if is_plain:
        base, more_notes = _without_quantisation(base)
        notes += more_notes
    for name, path in base.assets.items():
        if name == CARD and base.is_given:
            continue
        if name == CONFIG and base.config is not None:
            content, more_notes = _model_config(base, dtype, most=most, untie=untie, tied=tied)
            assets.append(Asset(name, None, content))
            notes += more_notes
        elif name == GENERATION_CONFIG and (base.is_trainers or _is_own(base, name)):
            assets.append(_generation_config(name, path))
        else:
            assets.append(_copy(base, name, path))
    return assets, notes


def _is_own(base: Base, name: str) -> bool:
    return base.own_files is not None and name in base.own_files.names


def _copy(base: Base, name: str, path: str) -> Asset:
    content = base.own_files.contents.get(name) if base.own_files is not None else None
    return Asset(name, path, b"") if content is None else Asset(name, None, content)


def _without_quantisation(base: Base) -> tuple[Base, list[str]]:
    """Return a base without the files and settings that say how weights are quantised, and the notes about it."""
    assets = {name: path for name, path in base.assets.items() if name not in FILES}
    config = None if base.config is None else plain_config(base.config)
    gone = [
        *(["quantization_config"] if config != base.config else ()),
        *(base.assets.keys() - assets.keys()),
    ]
    notes = [f"{' and '.join(gone)} of {escape(base.label)} left out: the weights are plain"] if gone else []
    return replace(base, assets=assets, config=config), notes


def _card(base: Base) -> tuple[list[Asset], list[str]]:
    """Return a new model card that names the base, and a note; the base's own card describes the base."""
    if base.repo_id is not None:
        return [Asset(CARD, None, card_of(base.repo_id))], [
            f"{CARD} names the base, {escape(base.repo_id)}, and no more"
        ]
    if CARD in base.assets:
        return [], [
            f"no model card: {CARD} of {escape(base.label)} is about the base, whose Hub name is not known"
        ]
    return [], []


def adapter_assets(base: Base | None, config: bytes | None) -> list[Asset]:
    """Return the assets of an adapter: its config, and the tokenizer, which training may have changed."""
    assets = (
        [_copy(base, *each) for each in base.assets.items() if is_tokenizer_file(each[0])] if base else []
    )
    return [*assets, Asset(ADAPTER_CONFIG, None, config)] if config is not None else assets


def with_tokenizer(assets: Iterable[Asset], tokenizer: Tokenizer) -> list[Asset]:
    """Return the assets with another tokenizer in place of the base's."""
    other_assets = [asset for asset in assets if not is_tokenizer_file(asset.name)]
    return [*other_assets, *(Asset(name, path, b"") for name, path in tokenizer.files.items())]


def _model_config(
    base: Base, dtype: DType | None, *, most: DType | None, untie: bool, tied: bool | None
) -> tuple[bytes, list[str]]:
    """Return the checkpoint's config.json, or else the base's, adjusted to the output's weights; and notes."""
    assert base.config is not None
    config, notes = dict(base.config), list[str]()
    if dtype is not None:
        set_dtype(config, dtype.name)
    if untie:
        _untie(config)
    own_config = None if base.own_files is None else base.own_files.config
    if own_config is not None:
        config = follow_weights(own_config, config, dtype=most.name if most is not None else None, tied=tied)
    if base.is_trainers or own_config is not None:
        # Trainers set it for gradient checkpointing.
        if config.get("use_cache") is False and config.get("model_type") not in _WITHOUT_CACHE:
            config["use_cache"] = True
            where = escape(base.label) if own_config is None else "the checkpoint"
            notes.append(f"use_cache is on again; training had switched it off in {where}")
        if os.path.isabs(str(config.get("_name_or_path", ""))):
            del config["_name_or_path"]
    return dump_config(config), notes


def dtype_of(config: Mapping[str, object] | None) -> str | None:
    """Return the dtype that a config.json names, or None."""
    dtype = next((value for key in (_DTYPE, _OLD_DTYPE) if (value := (config or {}).get(key))), None)
    return dtype if isinstance(dtype, str) else None


def set_dtype(config: dict[str, object], name: str) -> None:
    """Set the dtype wherever the config, or a nested config, has one. A config of transformers without one gets one."""
    keys = [key for key in (_DTYPE, _OLD_DTYPE) if key in config]
    config |= _parts_with(config, (_DTYPE, _OLD_DTYPE), name)
    if not keys and _may_get_keys(config):
        keys = [_DTYPE if _is_new(config) else _OLD_DTYPE]
    config |= dict.fromkeys(keys, name)


def _parts_with(config: Mapping[str, object], keys: Iterable[str], value: object) -> dict[str, object]:
    """Return the nested configs, at any depth, with `value` for each of `keys` that has a value of the same type.

    Quantisation configs are left alone: Quark's `weight.dtype` is the dtype of the quantised numbers.
    """
    parts = dict[str, object]()
    for name, part in config.items():
        if isinstance(part, dict) and name not in QUANTIZATION_CONFIGS:
            present_keys = [key for key in keys if isinstance(part.get(key), type(value))]
            parts[name] = {**part, **_parts_with(part, keys, value), **dict.fromkeys(present_keys, value)}
    return parts


def _is_new(config: Mapping[str, object]) -> bool:
    match = re.match(r"(\d{1,4})\.(\d{1,4})", str(config.get("transformers_version", "")))
    return match is None or (int(match[1]), int(match[2])) >= _NEW_DTYPE_SINCE


def _untie(config: dict[str, object]) -> None:
    config |= _parts_with(config, (_TIE,), False)
    if _TIE in config or _may_get_keys(config):
        config[_TIE] = False


def _may_get_keys(config: Mapping[str, object]) -> bool:
    """True for a config of transformers. Other libraries pass each key to the class, which refuses unknown keys."""
    return "model_type" in config


def _generation_config(name: str, path: str) -> Asset:
    """Return a generation config, with the cache on: training switches it off, and generating is slow without it."""
    data = read_small(path, name, _MAX_BYTES)
    try:
        config = json.loads(data, parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: not valid JSON: {escape(str(error))}") from None
    if isinstance(config, dict) and config.get("use_cache") is False:
        return Asset(name, None, dump_config({**config, "use_cache": True}))
    return Asset(name, path, b"")


def dump_config(config: Mapping[str, object]) -> bytes:
    """Return a config as transformers writes it."""
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def trained_modules(
    base: Base | None, assets: Iterable[str], root: str, other_names: Iterable[str], *, by_hand: bool
) -> list[str]:
    """Return a warning for each module whose weights are copied from the base, though the checkpoint has trained ones.

    Args:
        base: a sentence-transformers model, or any other.
        assets: names of the assets.
        root: where the model begins in the checkpoint, dotted, such as "0.auto_model".
        other_names: names of the checkpoint's tensors outside of the model.
        by_hand: the user chose the tensors to write by name.

    Raises:
        SourceError: there is such a module, and the user did not choose the tensors.
    """
    modules = [
        (
            place,
            f"{escape(file)}: the checkpoint has {count(len(trained), 'tensor')} of it, {listed(trained)}",
        )
        for file, place, trained in _places(base, assets, root, other_names)
    ]
    writes = " and ".join(f"`--root {in_shell(place)}`" for place, _ in modules)
    if not by_hand:
        SourceError.raise_for(
            [line for _, line in modules],
            "modules beside the transformer were trained too, and one run writes one model",
            hint=f"write the transformer with `--root {in_shell(root)}`, and the weights of its modules with {writes}; put "
            "these in the place of the base's",
        )
    return [f"copied from the base: {line}; --root {in_shell(place)} writes these" for place, line in modules]


def _places(
    base: Base | None, assets: Iterable[str], root: str, other_names: Iterable[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (weight file, prefix in the checkpoint, names there) of trained modules whose weights the base provides."""
    folders = list_modules(base.directory) if base is not None else {}
    parts, main = root.split("."), folders.get(os.curdir)
    if main not in parts:
        return
    before, names, files = parts[: parts.index(main)], sorted(other_names), list(assets)
    for folder, name in folders.items():
        copied = [file for file in files if file.startswith(f"{folder}/") and is_weights(file)]
        place = ".".join((*before, name))
        trained = [stored for stored in names if stored.startswith(f"{place}.")]
        if name and folder != os.curdir and copied and trained:
            yield copied[0], place, trained
