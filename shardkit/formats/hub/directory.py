"""Open a Hub model in a directory: choose the weight files, check them against the index, and make their catalog."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardkit.core.catalog import Catalog, SourceFile, subset
from shardkit.core.regions import full_region
from shardkit.core.text import count, escape, suggestions
from shardkit.core.threads import at_once
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import manifest, storage, stores
from shardkit.files.links import is_below, link_notes, locate, locate_weights, read_inside
from shardkit.files.location import location_of
from shardkit.files.strict_json import (
    DOWNLOAD_AGAIN,
    parse_integer,
    parse_object,
    read_small,
    refuse_pointers,
)
from shardkit.formats.contract import (
    Checkpoint,
    Contents,
    DamagedFiles,
    OpenedHubModel,
    Opener,
    Remarks,
    asset_directories,
    listing,
    missing_path,
)
from shardkit.formats.hub.adapter import ADAPTER, ADAPTER_CONFIG, base_of_adapter, is_adapter_file
from shardkit.formats.hub.assets import list_weights, list_weights_around, module_folders, weights_beside
from shardkit.formats.hub.files import PLAIN_STEMS, Kind, WeightFiles, select_file, select_weights
from shardkit.formats.hub.safetensors import SafetensorsHeader, StoredTensor, read_header

if TYPE_CHECKING:
    from shardkit.formats.torchsave.bin import BinFile

    Content = SafetensorsHeader | BinFile

MAX_INDEX_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20

DIFFUSERS_CLASS = "_class_name"
"""The key of a config.json of diffusers that names the model's class."""
_FILES = (".safetensors", ".safetensors.index.json", ".bin.index.json")

RemoteHeaders = Mapping[str, Callable[[], SafetensorsHeader]]
"""For each weight file that is not on this machine, a function that returns its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubIndex:
    """A `*.index.json`."""

    weight_map: dict[str, str]
    """Tensor name -> file name, relative to the index."""
    total_bytes: int | None
    """`metadata.total_size`; writers disagree on whether tied weights count once."""

    @property
    def files(self) -> tuple[str, ...]:
        """File names, each once, in the order of their first tensor."""
        return tuple(dict.fromkeys(self.weight_map.values()))


def open_model(directory: str, *, variant: str | None = None) -> OpenedHubModel:
    """Open a Hub model: read and check every header, but no tensor data.

    Args:
        directory: the model's directory, one weight file, or an index.
        variant: e.g. "fp16" for `model.fp16.safetensors`; None opens the default weights.

    Raises:
        SourceError: no weights or several sets, a damaged file, or an index that contradicts its files.
        ResourceError: a file may not be read.
    """
    if storage.lexists(directory) and not storage.isdir(directory):
        folder, name = os.path.split(directory)
        refuse_pointers({name: directory})
        return open_weights(folder or os.curdir, select_file(name), chosen_by_hand=True)
    try:
        names = storage.listdir(directory)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        raise missing_path(directory, hint="check the path of the model") from None
    except OSError as error:
        raise ResourceError(f"{escape(directory)}: {error.strerror}") from None
    model = open_weights(directory, choose_weights(directory, names, variant=variant))
    model = with_other_weights(model, list_weights(directory), module_folders(directory))
    return replace(model, other_weights=(*model.other_weights, *list_weights_around(directory)))


def choose_weights(directory: str, names: Collection[str], *, variant: str | None = None) -> WeightFiles:
    """Decide which files in a directory are the weights of a model; errors as for `select_weights`.

    Args:
        directory: the model's.
        names: of the files in it.
        variant: as for `open_model`.
    """
    adapted = base_of_adapter(directory) if ADAPTER_CONFIG in names else None
    return select_weights(names, directory, variant=variant, adapted=adapted)


def with_other_weights(
    model: OpenedHubModel, names: Iterable[str], folders: Collection[str] = ()
) -> OpenedHubModel:
    """Return a model whose `other_weights` are the files with weights beside its own.

    Args:
        model: opened.
        names: of all files in its directory or repo.
        folders: of its modules, if known.
    """
    model_files = {file.name for file in model.catalog.files}
    return replace(model, other_weights=tuple(weights_beside(names, model_files, folders)))


def open_weights(
    directory: str,
    weights: WeightFiles,
    *,
    chosen_by_hand: bool = False,
    elsewhere: RemoteHeaders = MappingProxyType({}),
) -> OpenedHubModel:
    """Open the weight files that were chosen as a model.

    Args:
        directory: of the files.
        weights: from `select_weights` or `select_file`.
        chosen_by_hand: the user named the single file, so it may be a link to anywhere.
        elsewhere: safetensors files that are not on this machine; the catalog has the paths that they would have.

    Raises:
        SourceError: a damaged file, or an index that contradicts its files.
        ResourceError: a file may not be read.
    """
    names, index = weight_files(directory, weights, chosen_by_hand=chosen_by_hand)
    paths = _locate_all(directory, names, weights.index, elsewhere)
    contents = dict(_read_headers(paths, weights.kind, elsewhere))
    if index is not None and weights.index is not None:
        _check_index(index, contents, weights.index)
    _refuse_unreadable(contents, paths)
    catalog = _catalog(directory, weights.kind, contents, paths, index)
    linked = () if chosen_by_hand and index is None else link_notes(directory, paths)
    catalog.notes = (*weights.notes, *linked, *_notes(catalog, index, weights.index, contents))
    stem = os.path.splitext(names[0])[0] if weights.single and names else ""
    repo, commit = stores.repo_of(directory) or (None, None)
    return OpenedHubModel(
        catalog=catalog,
        config=read_config(directory),
        directory=directory,
        label=_label(directory) if not chosen_by_hand or not stem or stem in PLAIN_STEMS else stem,
        stem=weights.stem,
        index=weights.index,
        settings={
            name: file_settings
            for name, content in contents.items()
            if (file_settings := _header_settings(content))
        },
        identity=manifest.RecordedSource(
            files=tuple(
                manifest.RecordedSourceFile(name=name, size_bytes=content.size, crc32=content.crc32)
                for name, content in contents.items()
            ),
            repo=repo,
            commit=commit,
        ),
        download_bytes=sum(contents[name].size for name in contents if name in elsewhere),
    )


def _header_settings(content: Content) -> dict[str, str]:
    metadata = content.metadata if isinstance(content, SafetensorsHeader) else {}
    return {key: value for key, value in metadata.items() if key != "format"}


def weight_files(
    directory: str, weights: WeightFiles, *, chosen_by_hand: bool = False
) -> tuple[tuple[str, ...], HubIndex | None]:
    """Return the names of the weight files, and the index that lists them, or None.

    Raises:
        SourceError: the index is damaged or unsafe, or does not list a weight file beside it.
        ResourceError: the index may not be read.
    """
    if weights.index is None:
        return ((weights.single,) if weights.single else ()), None
    index = read_index(locate(directory, weights.index, chosen_by_hand), weights.index)
    _refuse_stray(weights, index)
    return index.files, index


def read_index(path: str, name: str) -> HubIndex:
    """Read an index, and check that every file name in it stays below the index's directory.

    Args:
        path: of the index.
        name: of the index in messages.

    Raises:
        SourceError: not strict JSON, no weight_map, or unsafe file names; lists all of them.
        ResourceError: the index may not be read.
    """
    content = parse_object(read_small(path, name, MAX_INDEX_BYTES), name)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        actual = "no entry" if weight_map == {} else type(weight_map).__name__
        raise SourceError(
            f"{escape(name)}: weight_map: expected an object that names files, found {actual}",
            hint=DOWNLOAD_AGAIN,
        )
    problems = [
        f"{escape(fqn)}: {problem}" for fqn, file in weight_map.items() if (problem := _name_problem(file))
    ]
    SourceError.raise_for(
        problems,
        f"{escape(name)}: {len(problems)} of {len(weight_map)} entries do not name a file in the model's directory",
        hint="file names are relative, with '/' between their parts and without '..'",
    )
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return HubIndex(weight_map=weight_map, total_bytes=total if type(total) is int else None)


def _name_problem(file: object) -> str | None:
    """Return why a file name from an index is refused, or None."""
    if not isinstance(file, str):
        return f"expected a file name, found {type(file).__name__}"
    if not file.isprintable() or not is_below(file):
        return f"unsafe file name {escape(file)!r}"
    return None


def _refuse_stray(weights: WeightFiles, index: HubIndex) -> None:
    if weights.single and weights.single not in index.files:
        raise SourceError(
            f"{escape(weights.single)} lies beside {escape(weights.index or '')}, which does not list it: "
            "two sets of weights",
            hint="remove the one that is out of date, or give the path of the one you mean",
        )
    unlisted = weights.unlisted(frozenset(index.files))
    SourceError.raise_for(
        [escape(name) for name in unlisted],
        f"{escape(weights.index or '')} does not list {count(len(unlisted), 'file')} of the set that it lists",
        hint=f"{DOWNLOAD_AGAIN}; if the rest is meant to be left out, give the path of the index",
    )


def _locate_all(
    directory: str, names: tuple[str, ...], index_name: str | None, elsewhere: RemoteHeaders
) -> dict[str, str]:
    """Return the path of each file.

    A file may be a link to a regular file anywhere; opening it checks again that it is one.

    Raises:
        DamagedFiles: lists all missing files.
        SourceError: a file is a link to something else than a regular file.
    """

    def find(name: str) -> str:
        return os.path.join(directory, name) if name in elsewhere else locate_weights(directory, name)

    paths = dict(zip(names, at_once(find, names, location_of(directory).connections), strict=True))
    missing = [name for name, path in paths.items() if name not in elsewhere and not storage.lexists(path)]
    if missing:
        raise DamagedFiles(
            f"{len(missing)} of {len(paths)} files that {escape(index_name or 'the model')} lists are missing",
            dict.fromkeys(missing, ""),
            hint="download the missing files",
        )
    return paths


def _read_headers(paths: dict[str, str], kind: Kind, elsewhere: RemoteHeaders) -> list[tuple[str, Content]]:
    """Read every file's header; damaged files are reported together."""

    def read(name: str) -> Content | SourceError:
        try:
            return elsewhere[name]() if name in elsewhere else _read_content(paths[name], name, kind)
        except SourceError as error:
            return error

    connections = location_of(next(iter(paths.values()), "")).connections
    results = zip(paths, at_once(read, paths, connections), strict=True)
    contents: list[tuple[str, Content]] = []
    errors: list[SourceError] = []
    for name, content in results:
        if isinstance(content, SourceError):
            errors.append(content)
        else:
            contents.append((name, content))
    if len(errors) == 1:
        raise errors[0]
    if errors:
        kinds = {type(error) for error in errors}
        raise (kinds.pop() if len(kinds) == 1 else SourceError)(
            f"{len(errors)} of {len(paths)} weight files are refused",
            problems=[line for error in errors for line in (error.message, *error.problems)],
            hint=errors[0].hint,
        )
    return contents


def _read_content(path: str, name: str, kind: Kind) -> Content:
    if kind == "safetensors":
        return read_header(path, name)
    from shardkit.formats.torchsave.bin import read_bin  # few models need it

    return read_bin(path, name)


def _check_index(index: HubIndex, contents: dict[str, Content], index_name: str) -> None:
    """Compare the index with its files: each tensor must be in the one file that the index names."""
    holders: dict[str, list[str]] = {}
    for name, content in contents.items():
        for fqn in (*(tensor.fqn for tensor in content.tensors), *content.unreadable):
            holders.setdefault(fqn, []).append(name)
    lacking = [
        (fqn, listed) for fqn, listed in index.weight_map.items() if listed not in holders.get(fqn, ())
    ]
    nowhere = Counter(listed for fqn, listed in lacking if fqn not in holders)
    as_records = {
        name
        for name, content in contents.items()
        if isinstance(content, SafetensorsHeader) and nowhere[name] <= content.num_records
    }
    lacking = [(fqn, name) for fqn, name in lacking if fqn in holders or name not in as_records]
    closest = suggestions(
        [fqn for fqn, _ in lacking], (fqn for fqn in holders if fqn not in index.weight_map)
    )
    problems = [_lacking_line(fqn, listed, holders) + closest.get(fqn, "") for fqn, listed in lacking]
    for fqn, names in holders.items():
        if len(names) > 1:
            problems.append(f"{escape(fqn)}: in {len(names)} files: {', '.join(map(escape, names))}")
        elif fqn not in index.weight_map:
            problems.append(f"{escape(fqn)}: in {escape(names[0])}, not in the index")
    SourceError.raise_for(
        problems,
        f"{escape(index_name)} and its files disagree in {count(len(problems), 'place')}",
        hint="the index and the files are of different versions: download all of them again",
    )


def _lacking_line(fqn: str, listed: str, holders: dict[str, list[str]]) -> str:
    files = holders.get(fqn)
    if files:
        return f"{escape(fqn)}: listed in {escape(listed)}, found in {escape(files[0])}"
    return f"{escape(fqn)}: listed in {escape(listed)}, which lacks it"


def _refuse_unreadable(contents: Mapping[str, Content], paths: Mapping[str, str]) -> None:
    reasons = {
        fqn: f"{name}: {why}" for name, content in contents.items() for fqn, why in content.unreadable.items()
    }
    if reasons:
        from shardkit.formats.torchsave.classes import refuse_objects

        refuse_objects(
            reasons, [_source_file(name, paths[name], content) for name, content in contents.items()]
        )


def _source_file(name: str, path: str, content: Content) -> SourceFile:
    stamp, checksums = content.stamp, content.checksums
    return SourceFile(name=name, path=path, size=content.size, stamp=stamp, checksums=checksums)


def _catalog(
    directory: str, kind: Kind, contents: dict[str, Content], paths: dict[str, str], index: HubIndex | None
) -> Catalog:
    """Return the catalog of checked files, in which each tensor is one chunk."""
    catalog = Catalog(format=kind, directory=directory)
    places = {}
    for name, content in contents.items():
        whole = _source_file(name, paths[name], content)
        number = len(catalog.files)
        catalog.files.append(whole)
        catalog.objects += content.objects
        for tensor in content.tensors:
            file, start = number, tensor.start
            if start is None:
                assert not isinstance(tensor, StoredTensor)  # a tensor of a legacy file that needs decoding
                file, start = len(catalog.files), 0
                size = full_region(tensor.shape).num_elements * tensor.dtype.itemsize
                decoded = replace(whole, name=f"{name}:{tensor.fqn}", size=size, derivation=tensor.decoded)
                catalog.files.append(decoded)
            places[tensor.fqn] = (tensor.dtype, tensor.shape, file, start)
    for fqn in index.weight_map if index else places:
        if fqn not in places:  # a record of torch.save before the tensors
            catalog.objects += (fqn,)
            continue
        dtype, shape, file, start = places[fqn]
        region = full_region(shape)
        chunk = (file, start, region.num_elements * dtype.itemsize, region)
        catalog.add_tensor(fqn, dtype, shape, iter((chunk,)))
    return catalog


def _notes(
    catalog: Catalog, index: HubIndex | None, index_name: str | None, contents: dict[str, Content]
) -> tuple[str, ...]:
    headers = [content for content in contents.values() if isinstance(content, SafetensorsHeader)]
    notes = [note for header in headers for note in header.notes]
    if index and index.total_bytes is not None and index.total_bytes != catalog.nbytes:
        notes.append(
            f"{escape(index_name or '')}: total_size is {count(index.total_bytes, 'byte')}, "
            f"the tensors take {catalog.nbytes}"
        )
    return tuple(notes)


def _label(directory: str) -> str:
    """Return a directory's name; for a commit's folder in the Hub's cache, the repo's name."""
    return os.path.basename(repo_id_of(directory) or storage.absolute(directory)) or "model"


def repo_id_of(directory: str) -> str | None:
    """Return the repo id for a directory that is a commit of a Hub repo, at hf:// or in the cache; else None."""
    path = storage.absolute(directory)
    repo_id, commit = stores.repo_of(path) or ("", "")
    if repo_id and path.endswith(f"@{commit}"):
        return repo_id
    top, snapshots = os.path.split(os.path.dirname(path))
    marked, _, name = os.path.basename(top).partition("--")
    return name.replace("--", "/", 1) if snapshots == "snapshots" and marked == "models" and name else None


def read_config(directory: str) -> dict[str, object] | None:
    """Return the content of config.json, or None if there is no such file; errors as for `read_json`."""
    return read_json(directory, "config.json")


def model_class_of(config: Mapping[str, object] | None) -> str | None:
    """Return the class of transformers or diffusers, or of the model's own code, that a config.json names."""
    named = (config or {}).get("architectures")
    name = named[0] if isinstance(named, list) and named else (config or {}).get(DIFFUSERS_CLASS)
    return name if isinstance(name, str) and name.isidentifier() else None


def library_of(config: Mapping[str, object] | None) -> str | None:
    """Return "transformers" or "diffusers", whose `from_pretrained` loads a model with this config.json; else None."""
    config = config or {}
    code = config.get("auto_map")
    if isinstance(config.get("model_type"), str) or (isinstance(code, dict) and "AutoConfig" in code):
        return "transformers"
    return "diffusers" if DIFFUSERS_CLASS in config and model_class_of(config) else None


def own_loader_of(config: Mapping[str, object] | None) -> str | None:
    """Return the `AutoModel...` class of transformers that loads a model with its own code; None without such code."""
    named = (config or {}).get("auto_map")
    autos = (name for name in named if isinstance(name, str)) if isinstance(named, dict) else ()
    return next((name for name in autos if name.startswith("AutoModel") and name.isidentifier()), None)


def loader_of(config: Mapping[str, object] | None) -> str:
    """Return the class of transformers whose `from_pretrained` loads a model."""
    return own_loader_of(config) or model_class_of(config) or "AutoModel"


def read_json(directory: str, name: str) -> dict[str, object] | None:
    """Return the content of a JSON file, or None if there is no such file. Infinity is allowed, as transformers writes it.

    Raises:
        SourceError: not a JSON object, or a link that leaves the directory.
        ResourceError: the file may not be read.
    """
    if not storage.lexists(os.path.join(directory, name)):
        return None
    data = read_inside(directory, name, MAX_CONFIG_BYTES)
    try:
        config = json.loads(data.decode("utf-8"), parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: not valid JSON: {escape(str(error))}", hint=DOWNLOAD_AGAIN) from None
    if not isinstance(config, dict):
        raise SourceError(f"{name}: expected an object, found {type(config).__name__}")
    return config


def is_hub_directory(path: str) -> bool:
    """True for a directory with the weights of a Hub model, a safetensors file, or an index."""
    try:
        if not storage.isdir(path):
            select_file(os.path.basename(path))
            return path.endswith(_FILES) and storage.isfile(path)
        select_weights(listing(path), path)
    except ShardkitError:
        return False
    return True


def open_hub_directory(path: str) -> Checkpoint:
    """Open a Hub model as a checkpoint; every tensor is one chunk, under its stored name.

    Raises:
        SourceError: no weights or several sets, a damaged file, or an index that contradicts its files.
        ResourceError: a file may not be read.
    """
    return as_checkpoint(path, open_model(path))


def as_checkpoint(path: str, model: OpenedHubModel) -> Checkpoint:
    """Return an opened Hub model as a checkpoint: all of its tensors are the model's, so its root is the empty path."""
    catalog = model.catalog
    names = [file.name for file in catalog.files]
    return Checkpoint(
        path=path,
        format="hub",
        writer=ADAPTER if len(names) == 1 and is_adapter_file(names[0]) else "Hub model",
        catalog=catalog,
        select=lambda names: subset(catalog, names),
        hub=model,
        contents=Contents(
            roots={"model": ()}, assets=asset_directories(model.directory) or _config_directory(path, model)
        ),
        remarks=Remarks(skipped=model.other_weights, notes=catalog.notes),
    )


def _config_directory(path: str, model: OpenedHubModel) -> tuple[str, ...]:
    """Return a model's directory if it has a config.json.

    `asset_directories` leaves out a directory without a tokenizer or the like if its config has none of the keys of a
    transformers model, since some trainers keep their own settings under that name. Beside the weights of a Hub model
    the config is the model's, whatever library reads it.
    """
    return (model.directory,) if model.config is not None and storage.isdir(path) else ()


OPENERS = {"hub": Opener(is_hub_directory, open_hub_directory)}
