"""Choose between the checkpoint's own config, tokenizer and the like, and those of the base that the user named.

Files that a trainer or `shardkit.save` wrote into the checkpoint's directory describe what was trained, so they come
first: config, generation config, the tokenizer as one group of files, the processor as another. All other files are the
base's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardkit.core.text import escape, few, listed
from shardkit.errors import ShardkitError
from shardkit.files.strict_json import parse_integer, read_small
from shardkit.formats.configs import (
    CODE,
    TOKENS,
    architectures_of,
    config_differences,
    difference,
    eos_ids,
    generation_differences,
    is_same_model,
)
from shardkit.formats.contract import Checkpoint, has_model_config
from shardkit.formats.hub.adapter import ADAPTER_CONFIG, find_settings
from shardkit.formats.hub.assets import (
    CONFIG,
    GENERATION_CONFIG,
    is_generated_asset,
    is_processor_file,
    is_template,
    is_tokenizer_file,
    is_vocabulary,
    list_assets,
)
from shardkit.formats.hub.base import Base, FileDifference, OwnFiles, own_directories, settings_directories
from shardkit.formats.hub.directory import read_json
from shardkit.formats.hub.tokenizer import (
    SETTINGS,
    FileReaders,
    Tokenizer,
    read_tokenizer,
    special_tokens,
    token_ids,
    tokenizer_differences,
)
from shardkit.formats.quantised import FILES
from shardkit.operations.consolidate.assets import Asset, dump_config

_MAX_BYTES = 256 << 20
_PROCESSOR = "processor_config.json"
_MOST_NAMED = 6


def use_own_files(base: Base, checkpoint: Checkpoint, *, has_tokenizer: bool) -> Base:
    """Return the base with the checkpoint's own files in place of the base's, where the checkpoint has some.

    Args:
        base: the base that the user named.
        checkpoint: the opened checkpoint.
        has_tokenizer: the user named the tokenizer, so the checkpoint's is not used.
    """
    choice = _OwnFilesChoice(base, own_directories(checkpoint))
    choice.choose_config()
    if not has_tokenizer:
        choice.choose_tokenizer()
    choice.choose_processor()
    choice.compare_adapter(settings_directories(checkpoint))
    choice.choose_code()
    choice.warn_of_others(skip_tokenizer=has_tokenizer)
    return choice.merged()


class _OwnFilesChoice:
    """Collects the choice: each method decides on one group of files, `merged` returns the result."""

    def __init__(self, base: Base, directories: Iterable[str]) -> None:
        self._base, self._assets = base, dict(base.assets)
        self._files_by_place, refused = dict[str, dict[str, str]](), list[str]()
        for directory in directories:
            self._files_by_place[directory], links = list_assets(directory)
            refused += filter(is_generated_asset, links)
        self._config: dict[str, Any] | None = None
        self._is_other = False
        self._names, self._contents = set[str](), dict[str, bytes]()
        self._differences, self._warnings = list[FileDifference](), list[str]()
        if refused:
            self._warnings.append(
                f"links that leave the checkpoint, or lead to nothing, are not followed: {listed(refused)}"
            )

    def merged(self) -> Base:
        """Return the base with the chosen files."""
        own_files = OwnFiles(
            config=self._config,
            names=frozenset(self._names),
            contents=self._contents,
            differences=tuple(self._differences),
            warnings=tuple(self._warnings),
        )
        return replace(self._base, assets=dict(sorted(self._assets.items())), own_files=own_files)

    def choose_config(self) -> None:
        """Use the checkpoint's config and generation config, if they describe the same model as the base's."""
        label, base = escape(self._base.label), self._base.config
        config = self._read(CONFIG, has_model_config)
        if config is not None and base is not None:
            self._is_other = not is_same_model(config, base)
            differing = config_differences(CONFIG, config, base)
            if not self._is_other:
                self._config, self._differences = config, [*self._differences, *differing]
                self._names.add(CONFIG)
            elif architectures_of(config) or differing:
                self._warnings.append(
                    f"{CONFIG} of the checkpoint is about another model, {_model(config)}, than that of {label}, "
                    f"{_model(base)}: {CONFIG} and {GENERATION_CONFIG} are those of {label}"
                )
        generation = None if self._is_other else self._read(GENERATION_CONFIG)
        base_generation = self._of_base(GENERATION_CONFIG)
        if generation is not None and not _is_derived(generation):
            self._differences += generation_differences(GENERATION_CONFIG, generation, base_generation or {})
            self._assets[GENERATION_CONFIG] = next(
                files[GENERATION_CONFIG]
                for files in self._files_by_place.values()
                if GENERATION_CONFIG in files
            )
            self._names.add(GENERATION_CONFIG)
        elif _is_derived(base_generation) and any(
            each.key in TOKENS for each in self._differences
        ):  # transformers made it from the base's config, whose tokens differ
            self._assets.pop(GENERATION_CONFIG, None)

    def choose_tokenizer(self) -> None:
        """Use the checkpoint's tokenizer if it is complete, or else its chat template with the base's tokenizer."""
        for place, files in self._files_by_place.items():
            group = {name for name in files if is_tokenizer_file(name)}
            if SETTINGS in group and any(map(is_vocabulary, group)):
                self._replace(place, is_tokenizer_file, group)
                break
            templates = set(filter(is_template, group))
            if templates:
                self._replace(place, is_template, templates)
                self._drop(SETTINGS, "chat_template")
                break
        else:
            return
        own_reads, base_reads = reads_of(self._assets), reads_of(self._base.assets)
        if not any(map(is_tokenizer_file, base_reads)):
            return
        with suppress(ShardkitError):  # a broken tokenizer is reported by the library that loads it
            self._differences += [difference(*each) for each in tokenizer_differences(own_reads, base_reads)]

    def choose_processor(self) -> None:
        """Use the checkpoint's processor files, if they are a whole processor."""
        for place, files in self._files_by_place.items():
            group = {name for name in files if is_processor_file(name)}
            if group and (_PROCESSOR in group or _PROCESSOR not in self._base.assets):
                self._replace(place, is_processor_file, group)
                for name in sorted(group & self._base.assets.keys()):
                    own_values, base_values = _parsed(files[name], name), self._of_base(name)
                    self._differences += config_differences(name, own_values or {}, base_values or {})
                return

    def compare_adapter(self, places: Iterable[str]) -> None:
        """Note how the adapter settings found in these places differ from the base's."""
        own_settings, base_settings = find_settings(places), read_json(self._base.directory, ADAPTER_CONFIG)
        if own_settings is not None and own_settings.is_complete and base_settings is not None:
            self._differences += config_differences(ADAPTER_CONFIG, own_settings.values, base_settings)

    def choose_code(self) -> None:
        """Use Python code, and the `auto_map` entries that name it, from one source: the base if it has some."""
        files = [name for name in self._assets if name in (CONFIG, SETTINGS) or is_processor_file(name)]
        of_base = {name: content[CODE] for name in files if CODE in (content := self._of_base(name) or {})}
        mine = {name: _parsed(self._assets[name], name) or {} for name in files if name in self._names}
        mine |= {CONFIG: self._config} if self._config is not None else {}
        if of_base:
            codes = {name: path for name, path in self._base.assets.items() if _is_code(name)}
            self._assets, self._names = self._assets | codes, self._names - codes.keys()
            for name, content in mine.items():
                if name in self._base.assets and content.get(CODE) != of_base.get(name):
                    self._set(name, CODE, of_base.get(name))
        elif any(CODE in content for content in mine.values()):
            for paths in self._files_by_place.values():
                codes = {name: path for name, path in paths.items() if _is_code(name)}
                self._assets, self._names = self._assets | codes, self._names | codes.keys()

    def warn_of_others(self, *, skip_tokenizer: bool) -> None:
        """Warn about files that differ between checkpoint and base, and of which the output gets the base's."""
        names = [
            name
            for files in self._files_by_place.values()
            for name, path in files.items()
            if name in self._base.assets
            and is_generated_asset(name)
            and name not in (*self._names, *FILES, CONFIG, GENERATION_CONFIG)
            and not (skip_tokenizer and is_tokenizer_file(name))
            and _differ(path, self._base.assets[name], name)
        ]
        if names:
            self._warnings.append(
                f"{listed(sorted(set(names)))}: written as in {escape(self._base.label)}, though different in the checkpoint; "
                "if the checkpoint's is right, copy it into the output"
            )

    def _read(self, name: str, is_one: Callable[[str], bool] = lambda _: True) -> dict[str, Any] | None:
        """Return the content of the checkpoint's own JSON file, or None.

        Args:
            name: name of the file.
            is_one: True for a directory whose file may be used.
        """
        for place, files in self._files_by_place.items():
            if name not in files:
                continue
            try:
                content = read_json(place, name)
            except ShardkitError as error:
                label = escape(self._base.label)
                self._warnings.append(
                    f"{name} of the checkpoint cannot be used, so that of {label} is: {error.message}"
                )
                continue
            if content is not None and is_one(place):
                return content
        return None

    def _replace(self, place: str, belongs: Callable[[str], bool], group: Collection[str]) -> None:
        self._assets = {name: path for name, path in self._assets.items() if not belongs(name)}
        self._assets |= {name: self._files_by_place[place][name] for name in group}
        self._names |= set(group)

    def _drop(self, name: str, key: str) -> None:
        if key in (self._of_base(name) or {}):
            self._set(name, key, None)

    def _set(self, name: str, key: str, value: object) -> None:
        """Set a key of a JSON file; None removes it."""
        if name == CONFIG:
            assert self._config is not None
            content = self._config
        else:
            content = _parsed(self._assets[name], name) or {}
        content = {other_key: each for other_key, each in content.items() if other_key != key}
        content |= {} if value is None else {key: value}
        if name == CONFIG:
            self._config = content
        else:
            self._contents[name] = dump_config(content)

    def _of_base(self, name: str) -> dict[str, Any] | None:
        if name == CONFIG:
            return self._base.config
        return _parsed(self._base.assets[name], name) if name in self._base.assets else None


def reads_of(assets: Mapping[str, str]) -> FileReaders:
    """Return a function that reads the file, for each name."""
    return {name: Asset(name, path, b"").read for name, path in assets.items()}


def _parsed(path: str, name: str) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it has something else or cannot be read."""
    try:
        return _content(read_small(path, name, _MAX_BYTES))
    except ShardkitError:  # copying it raises the error
        return None


def _content(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `data`, or None."""
    try:
        content = json.loads(data, parse_int=parse_integer)
    except (ValueError, RecursionError):  # reported by the library that loads the copy
        return None
    return content if isinstance(content, dict) else None


def _is_derived(generation: Mapping[str, Any] | None) -> bool:
    """True for a generation config that transformers derived from config.json, or that is empty."""
    if generation is None:
        return False
    return generation.get("_from_model_config") is True or not generation.keys() - {"transformers_version"}


def _is_code(name: str) -> bool:
    return name.endswith(".py")


def _differ(path: str, other_path: str, name: str) -> bool:
    """True if two files differ; two JSON objects differ only if their values do, not if only blanks or the order do."""
    one, two = (read_small(each, name, _MAX_BYTES) for each in (path, other_path))
    if one == two:
        return False
    contents = [_parsed(each, name) for each in (path, other_path)]
    return None in contents or contents[0] != contents[1]


def _model(config: Mapping[str, Any]) -> str:
    classes = listed(architectures_of(config)) or "no class"
    return f"{classes} ({escape(str(config.get('model_type')))})"


def own_notes(base: Base, written: Collection[str]) -> Iterator[str]:
    """Yield a note on how the checkpoint's own files differ from the base's, among the files that are written."""
    differing = own_differences(base, written)
    by_file = {each.file: [entry for entry in differing if entry.file == each.file] for each in differing}
    files = [
        f"{file} ({few([f'{escape(each.key)} {escape(each.checkpoint)}, there {escape(each.base)}' for each in differences], _MOST_NAMED, '; ')})"
        for file, differences in by_file.items()
    ]
    if files:
        yield (
            f"written as in the checkpoint, though different in {escape(base.label)}: {', '.join(files)}; "
            "--config base writes the base's"
        )


def own_differences(base: Base | None, written: Collection[str]) -> tuple[FileDifference, ...]:
    """Return how settings in the checkpoint's own files differ from the base's, among the files that are written."""
    own_files = base.own_files if base is not None else None
    groups = [kind for kind in (is_tokenizer_file, is_processor_file) if any(map(kind, written))]
    return tuple(
        each
        for each in (own_files.differences if own_files else ())
        if each.file in written or any(kind(each.file) for kind in groups)
    )


def eos_warnings(assets: Iterable[Asset]) -> Iterator[str]:
    """Yield a warning if `generate` would not stop at the tokenizer's end-of-text token."""
    files = {asset.name: asset.read for asset in assets}
    config, generation = (
        _content(files[name]()) if name in files else None for name in (CONFIG, GENERATION_CONFIG)
    )
    stops, end = eos_ids(config, generation), None
    with suppress(ShardkitError):
        token = special_tokens(files).get("eos_token")
        end = token_ids(files).get(token) if stops and token is not None else None
    if end is not None and end not in stops:
        where = GENERATION_CONFIG if (generation or {}).get("eos_token_id") is not None else CONFIG
        yield (
            f"generate does not stop at the tokenizer's end of text, {escape(str(token))} ({end}): eos_token_id in {where} is "
            f"{', '.join(map(str, sorted(stops)))}; set it there, or give the tokenizer that belongs to it"
        )


def own_tokenizer(base: Base | None) -> Tokenizer | None:
    """Return the checkpoint's own tokenizer; None if the base's is written, or if it cannot be read."""
    own_files = base.own_files if base is not None else None
    names = [name for name in own_files.names if is_tokenizer_file(name)] if own_files is not None else []
    if base is None or not any(map(is_vocabulary, names)):
        return None
    with suppress(ShardkitError):
        return read_tokenizer("the tokenizer of the checkpoint", {name: base.assets[name] for name in names})
    return None
