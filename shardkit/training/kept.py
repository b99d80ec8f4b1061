"""Write the files of a Hub model next to the shards of `save`, so that consolidate needs no base.

    <name>/huggingface/config.json, generation_config.json, tokenizer.json, ...

The config comes from a live transformers model, because it may have changed. All other files come from the directory of
the Hub model from which the model was prepared or loaded, as they are when the first rank saves. Weights are never
copied.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from shardkit.core.dtypes import BY_NAME, DType, most_bytes
from shardkit.core.text import escape, listed
from shardkit.errors import ShardkitError
from shardkit.files import manifest, storage
from shardkit.files.strict_json import FOLLOWS_LINKS, read_small
from shardkit.formats.hub.adapter import ADAPTER_CONFIG
from shardkit.formats.hub.assets import (
    CARD,
    CONFIG,
    GENERATION_CONFIG,
    MODULES,
    card_of,
    is_generated_card,
    is_tokenizer_file,
    is_weights,
    list_assets,
    module_folders,
)
from shardkit.formats.hub.base import SAVED_ASSETS
from shardkit.formats.hub.directory import repo_id_of
from shardkit.layout.classes import is_transformers
from shardkit.operations.consolidate.assets import Asset, dtype_of, dump_config, set_dtype
from shardkit.training.extras.diagnose import plain_class
from shardkit.training.fill.reading import Weights
from shardkit.training.model.build import is_derived

_ATTRIBUTE = "_shardkit_hub_files"
_ADAPTERS = (
    "peft_config"  # of a PeftModel: name of each adapter -> its settings; peft 0.21, peft/peft_model.py
)
_MAX_BYTES = 256 << 20
_OF_TRANSFORMERS = ("transformers", "transformers_modules")  # the second: models with code of their own

_Files = dict[str, Asset]
"""Name below `huggingface/` -> file."""


class HubFiles(NamedTuple):
    """The places of the files of the Hub model from which a model was filled. It is an attribute of the model."""

    directories: tuple[str, ...]
    """Directories with the files. Earlier ones take precedence; later ones supply files that these lack."""
    follows_links: bool = False
    """True if links that leave the directories are followed."""
    tokenizer: object = None
    """The live tokenizer, if the user passed one."""
    dtypes: Mapping[str, str] = MappingProxyType({})
    """FQN -> dtype of the Hub model's tensor."""
    last: str | None = None
    """The directory into which the last save has copied the files, in case the others have been removed."""


def remember_files(
    model: nn.Module, directories: Iterable[str | None], weights: Weights | None, tokenizer: object = None
) -> None:
    """Record in a model the places of its config and tokenizer, for `save`. If none is known, nothing changes.

    Args:
        model: the prepared or filled model.
        directories: directories that have the files; those of `weights` come after them.
        weights: the weights that fill the model, or None.
        tokenizer: the user's tokenizer, or None.
    """
    more = weights.assets if weights is not None else ()
    places = tuple(dict.fromkeys(directory for directory in (*directories, *more) if directory is not None))
    live = tokenizer if hasattr(tokenizer, "save_pretrained") else None
    if places or live is not None:
        setattr(model, _ATTRIBUTE, HubFiles(places, FOLLOWS_LINKS.get(), live, _dtypes(weights)))


def _dtypes(weights: Weights | None) -> dict[str, str]:
    """Return FQN -> dtype in the source. A tensor that is made of several has the dtype that all of them have."""
    if weights is None:
        return {}
    tensors = weights.catalog.tensors
    return {fqn: tensors[name].dtype.name for fqn, name in weights.names.items() if name in tensors}


class HubFileWriter:
    """The Hub files to write with a save of one model.

    Args:
        model: the whole model that is saved.
        paths: (path as in state dicts, module) of all modules, outermost first.
        tensors: name -> tensor, for all that is saved.
    """

    def __init__(
        self, model: nn.Module, paths: Iterable[tuple[str, nn.Module]], tensors: Mapping[str, Any]
    ) -> None:
        pairs = list(paths)
        self._root = next((pair for pair in pairs if is_transformers(pair[1])), None)
        self._holder = next((pair for pair in pairs if _ATTRIBUTE in vars(pair[1])), None)
        buffers = {f"{path}.{name}".lstrip(".") for path, module in pairs for name in module._buffers}
        self._adapted = next((m for _, m in pairs if isinstance(vars(m).get(_ADAPTERS), dict)), None)
        path = (self._root or self._holder or ("", model))[0]
        # If the config is about only a part of the model, it must not be written for the whole.
        self._dtypes = _saved_dtypes(tensors)
        self._is_whole = not path or all(
            name.startswith(f"{path}.") for name in tensors if name not in buffers
        )

    def write(self, place: str) -> tuple[manifest.File, ...]:
        """Write the files below a directory, and return their records. Without a config nothing is written.

        A warning names files that cannot be read.

        Raises:
            OSError, ResourceError: a file cannot be written.
        """
        problems = list[str]()
        files, hub_config = self._files(problems) if self._is_whole else ({}, None)
        written = list[manifest.File]()
        for name, asset in sorted(files.items()) if CONFIG in files else ():
            try:
                data = self._config(asset, hub_config) if name == CONFIG else asset.read()
            except ShardkitError as error:
                problems.append(error.message)
                continue
            except OSError as error:
                problems.append(f"{escape(name)}: {error}")
                continue
            path = os.path.join(SAVED_ASSETS, name)
            storage.make_folders(place, os.path.dirname(path))
            storage.write_file(os.path.join(place, path), data)
            written.append(manifest.describe_bytes(f"{SAVED_ASSETS}/{name}", data, digest=True, sha256=False))
        if problems:
            warnings.warn(
                f"not kept beside the checkpoint: {'; '.join(problems)}; consolidate takes it from --base MODEL",
                stacklevel=4,
            )
        return tuple(written)

    def record_place(self, path: str) -> None:
        """Record the place of the files in a finished save; the Hub model's directory may be gone by the next save."""
        if self._holder is not None:
            module = self._holder[1]
            files = getattr(module, _ATTRIBUTE)
            setattr(module, _ATTRIBUTE, files._replace(last=os.path.join(path, SAVED_ASSETS)))

    def _files(self, problems: list[str]) -> tuple[_Files, Asset | None]:
        """Return (files to write, the Hub model's config.json or None).

        The live model's config replaces the Hub model's among the files to write, so that is returned separately.
        """
        holder: HubFiles | None = None if self._holder is None else getattr(self._holder[1], _ATTRIBUTE)
        files = _Files() if holder is None else _source_files(holder, problems)
        hub_config = files.get(CONFIG)
        if self._root is not None:
            model = self._root[1]
            files |= _collect(f"the config of {type(model).__name__}", _live_configs(model), problems)
            has_code = any(name.endswith(".py") for name in files)
            if not has_code and any(getattr(owner, "_auto_class", None) for owner in (model, model.config)):
                problems.append(f"the code of {escape(type(model).__name__)}")
        if self._adapted is not None:
            files |= _collect(ADAPTER_CONFIG, _adapter_config(self._adapted), problems)
        if holder is not None and holder.tokenizer is not None and CONFIG in files:
            name = f"the tokenizer, a {type(holder.tokenizer).__name__}"
            live = _collect(name, _live_tokenizer(holder.tokenizer), problems)
            if live:
                files = {name: asset for name, asset in files.items() if not is_tokenizer_file(name)} | live
        return files, hub_config

    def _config(self, asset: Asset, hub_config: Asset | None) -> bytes:
        """Return config.json with the dtype of the saved tensors.

        If all tensors have their dtypes in the Hub model, it is the dtype in the Hub model's config. Else it is the
        dtype of most bytes, which could be wrong for a small model: its embedding may be most of it, with another dtype
        than its layers.
        """
        data = asset.read()
        config = _parse_json(data)
        prefix, holder = ("", None) if self._holder is None else self._holder
        hub_dtypes: Mapping[str, str] = getattr(holder, _ATTRIBUTE).dtypes if holder is not None else {}
        start = f"{prefix}." if prefix else ""
        both = [(dtype.name, hub_dtypes.get(name.removeprefix(start))) for name, dtype, _ in self._dtypes]
        is_same = any(hub_dtype for _, hub_dtype in both) and all(
            hub_dtype in (None, saved_dtype) for saved_dtype, hub_dtype in both
        )
        config_dtype = (
            dtype_of(_parse_json(hub_config.read())) if is_same and hub_config is not None else None
        )
        most = most_bytes((dtype, nbytes) for _, dtype, nbytes in self._dtypes)
        name = config_dtype or (most.name if most is not None else None)
        if config is None or name is None or dtype_of(config) == name:
            return data
        set_dtype(config, name)
        return dump_config(config)


def _saved_dtypes(tensors: Mapping[str, Any]) -> list[tuple[str, DType, int]]:
    """Return (name, dtype, number of bytes) of the tensors with ordinary floating dtypes."""
    typed_tensors = (
        (name, BY_NAME.get(str(tensor.dtype).removeprefix("torch.")), tensor)
        for name, tensor in tensors.items()
        if hasattr(tensor, "dtype")
    )
    return [
        (name, dtype, prod(tensor.size()) * dtype.itemsize)
        for name, dtype, tensor in typed_tensors
        if dtype is not None and dtype.is_convertible
    ]


def _parse_json(data: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):  # reported when the copy is read
        return None
    return content if isinstance(content, dict) else None


def _source_files(files: HubFiles, problems: list[str]) -> _Files:
    """Return the files next to the weights of the Hub model from which a model was filled."""
    files_beside, absent = _Files(), list[str]()
    token = FOLLOWS_LINKS.set(files.follows_links)
    try:
        for directory in (*files.directories, files.last):
            try:
                assets = {} if directory is None else _read_directory(directory, problems)
            except (ShardkitError, OSError) as error:
                absent.append(str(error))
                continue
            has_tokenizer = any(map(is_tokenizer_file, files_beside))
            has_config = CONFIG in files_beside
            for name, asset in assets.items():
                is_code = name.endswith(".py") and has_config
                if not (is_code or (has_tokenizer and is_tokenizer_file(name))):
                    files_beside.setdefault(name, asset)
    finally:
        FOLLOWS_LINKS.reset(token)
    if absent and not any(map(is_tokenizer_file, files_beside)):
        problems += absent
    return files_beside


def _read_directory(directory: str, problems: list[str]) -> _Files:
    """Return the files of one directory, without weights, and with a new card in place of the base's.

    Raises:
        SourceError, ResourceError: the directory was removed, or cannot be listed.
    """
    assets, _ = list_assets(directory)
    folders = module_folders(directory)
    weights = [name for name in assets if is_weights(name)]
    if weights:  # the modules' weights are not copied, so their files must not be either
        problems.append(f"{escape(MODULES)} and what it names, for the weights there ({listed(weights)})")
        inside = tuple(f"{folder}/" for folder in folders)
        assets = {
            name: path for name, path in assets.items() if not name.startswith(inside) and name != MODULES
        }
    files = {name: _file_asset(name, path) for name, path in assets.items() if name != CARD}
    repo_id = repo_id_of(directory)
    if repo_id is not None:
        files[CARD] = Asset(CARD, None, card_of(repo_id))
    elif CARD in assets and is_generated_card(read_small(assets[CARD], CARD, _MAX_BYTES)):
        files[CARD] = _file_asset(CARD, assets[CARD])
    return files


def _file_asset(name: str, path: str) -> Asset:
    return Asset(name, storage.realpath(path), b"")


def _collect(what: str, assets: Iterator[Asset], problems: list[str]) -> _Files:
    """Return the files that foreign code yields, up to a failure, which is added to `problems`."""
    files = _Files()
    try:
        for asset in assets:
            files[asset.name] = asset
    except Exception as error:
        problems.append(f"{escape(what)}: {escape(str(error))}")
    return files


def _live_configs(model: Any) -> Iterator[Asset]:
    """Yield the configs of a transformers model, as `save_pretrained` would write them.

    A generation config that transformers derived from the config, and that has not changed since, is left out, so that
    the Hub model's own is used.
    """
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [_class_name(model)]
    if os.path.isabs(str(config.get("_name_or_path", ""))):
        del config["_name_or_path"]
    yield Asset(CONFIG, None, dump_config(config))
    generation = getattr(model, "generation_config", None)
    if generation is not None and not is_derived(generation):
        content = json.loads(generation.to_json_string())
        for key in ("compile_config", "_from_model_config"):
            content.pop(key, None)
        yield Asset(GENERATION_CONFIG, None, dump_config(content))


def _adapter_config(model: Any) -> Iterator[Asset]:
    """Yield the settings of a PeftModel's only adapter, as its `save_pretrained` would write them."""
    settings = list(getattr(model, _ADAPTERS).values())
    if len(settings) != 1:
        return
    with tempfile.TemporaryDirectory() as scratch:
        settings[0].save_pretrained(scratch)
        config = json.loads(read_small(os.path.join(scratch, ADAPTER_CONFIG), ADAPTER_CONFIG, _MAX_BYTES))
    base = config.get("base_model_name_or_path")
    if base is None or os.path.isabs(str(base)):  # a path on this machine
        config["base_model_name_or_path"] = None
    yield Asset(ADAPTER_CONFIG, None, dump_config({**config, "inference_mode": True}))


def _class_name(model: nn.Module) -> str:
    """Return the name of the transformers class that a model's class is or is derived from."""
    classes = (cls for cls in type(model).__mro__ if cls.__module__.partition(".")[0] in _OF_TRANSFORMERS)
    class_name = next(classes).__name__
    return plain_class(model) if class_name == "PreTrainedModel" else class_name


def _live_tokenizer(tokenizer: Any) -> Iterator[Asset]:
    """Yield the files that a tokenizer's `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        files = [file for file in list_assets(scratch)[0].items() if is_tokenizer_file(file[0])]
        yield from [Asset(name, None, Asset(name, path, b"").read()) for name, path in files]
