"""The base of a checkpoint, which is the model that it was trained from: config, files, names, shapes and dtypes.

The user names it with --base, or the trainer saved its config and tokenizer in the checkpoint. Its weights are read only
to see whether two names hold the same bytes.

The second half of this module reads what a checkpoint's manifest records about names: the key rules from names in
memory to those of the Hub, ties, and tensors that were derived from several stored ones (fused experts).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shardkit._version import page
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import DType
from shardkit.core.factored import weight_of
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, in_shell, listed
from shardkit.errors import IntegrityError, ShardkitError, SourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.home import is_data_folder
from shardkit.formats.contract import (
    NAME_A_REPO,
    Checkpoint,
    OpenedHubModel,
    folder_below,
    folder_name,
    has_model_config,
    listing,
    missing_path,
    with_path_hint,
)
from shardkit.formats.hub.adapter import ADAPTER_CONFIG, base_of_adapter
from shardkit.formats.hub.assets import (
    CONFIG,
    asset_patterns,
    list_assets,
    list_weights,
    module_folders,
    unknown_settings,
    unread_weights,
)
from shardkit.formats.hub.directory import library_of, open_model, read_config, repo_id_of
from shardkit.formats.hub.files import DIFFUSERS, MODEL, select_weights
from shardkit.formats.hub.repo import fetch_files, list_files, named_repo, open_headers
from shardkit.keys.expressions import Expression, from_json, leaves
from shardkit.keys.renaming import KeyRule, find_rules
from shardkit.transfer.sources import same_bytes

SAVED_ROOT = "model"  # first step of a model's names in checkpoints of `shardkit.save`
SAVED_ASSETS = "huggingface"  # folder of config and tokenizer in these checkpoints, as in verl's
_TRAINER_STATE = "trainer_state.json"  # transformers' Trainer saves it beside the model in training
_TRACKER = "latest"  # DeepSpeed's file with the name of the newest step
_ACCELERATES = "pytorch_model"  # accelerate's only tag of DeepSpeed, a folder in the directory of a step
_PART = re.compile(r"pytorch_model(_fsdp_\d+)?")  # accelerate's folders in the directory of a step
_NUMBERED = re.compile(
    r"(?<![a-z])(checkpoint|ckpt|(global_?)?step|iter(ation)?|epoch)[-_=]?\d", re.IGNORECASE
)
_STEP = re.compile(rf".*{_NUMBERED.pattern[:-2]}(?P<number>\d+)(\.\w+)?|.*\.ckpt", re.IGNORECASE)


class BaseTensor(NamedTuple):
    """A tensor of the base."""

    dtype: DType
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDifference:
    """A key whose meaning differs between a file of the checkpoint and that of the base."""

    file: str
    """Name of the file; of a tokenizer, the first of its files."""
    key: str
    """With a dot between the levels, as in `text_config.rope_theta`."""
    checkpoint: str
    """The checkpoint's value as JSON, cut if it is long."""
    base: str
    """The base's value as JSON, cut if it is long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFiles:
    """Files from the checkpoint's own directory that are written instead of the base's."""

    config: Mapping[str, Any] | None = None
    """The content of config.json; None if the base's is written."""
    names: frozenset[str] = frozenset()
    """Names in the base's `assets` whose files are the checkpoint's."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Content by name, of files that are not copied unchanged."""
    differences: tuple[FileDifference, ...] = ()
    """Keys whose meaning differs from the base's."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """An opened base."""

    label: str
    """As the user wrote it; the name of its directory if it was found in the checkpoint."""
    directory: str
    """The directory of its files."""
    config: dict[str, object] | None
    """The content of config.json, or None."""
    tensors: Mapping[str, BaseTensor] | None
    """By name, in the order of its files; None if it has no weights with readable headers."""
    catalog: Catalog | None = None
    """Of its weights; None if they are not on this machine, or were not opened."""
    assets: Mapping[str, str]
    """Files beside the weights: name -> path. Those of modules hold weights too."""
    left_out: tuple[tuple[str, str], ...] = ()
    """(name, description) of other files with weights, which are not copied."""
    stem: str
    """Beginning of the names of its weight files; without weight files, the beginning that its library expects."""
    index: str | None = None
    """The name of its index, if it has one."""
    is_given: bool
    """True if the user named it; False if it was found in the checkpoint."""
    repo_id: str | None = None
    """Its name on the Hub, if that is known for certain."""
    is_trainers: bool = False
    """True if a trainer wrote it, and may have changed the config for the run."""
    says_dtype: bool = False
    """True if shardkit wrote the config, so that its dtype is right for the stored weights."""
    stored: Base | None = None
    """The same with its quantised weights as they are stored; None if all are stored plain."""
    own_files: OwnFiles | None = None
    """Files of the checkpoint that replace those of a base that the user named; None if they were not searched for."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    warnings: tuple[str, ...] = ()
    """Why the names were not compared with it."""

    @property
    def download(self) -> str:
        """The command that downloads the weights of a repo, at the commit that was compared."""
        return f"hf download {in_shell(self.label)} --revision {os.path.basename(self.directory)}"


def has_equal_bytes(base: Base, first: str, second: str) -> bool:
    """True if a base on this machine stores the same bytes under two names; False also if this cannot be compared.

    Raises:
        IntegrityError, ResourceError: a file differs from its description, or cannot be read.
    """
    catalog = base.catalog
    if catalog is None or not {first, second} <= catalog.tensors.keys():
        return False
    rows = (row for name in (first, second) for row in catalog.tensors[name].chunk_ids)
    is_raw = all(catalog.files[catalog.chunks.file[row]].is_raw for row in rows)
    return is_raw and same_bytes(catalog, first, second)


def tensors_by_file(base: Base) -> dict[str, list[str]] | None:
    """Return, for each weight file of a base, the names of its tensors in the order of their bytes.

    None if the weights are not safetensors files on this machine, or are in folders.
    """
    catalog = base.catalog
    if catalog is None or catalog.format != "safetensors" or not catalog.tensors:
        return None
    rows: dict[str, list[tuple[int, str]]] = {}
    for name, entry in catalog.tensors.items():
        if entry.num_chunks != 1:
            return None
        chunk = entry.first_chunk
        rows.setdefault(catalog.files[catalog.chunks.file[chunk]].name, []).append(
            (catalog.chunks.start[chunk], name)
        )
    if any("/" in file or not file.endswith(".safetensors") for file in rows):
        return None
    return {file: [name for _, name in sorted(rows[file])] for file in sorted(rows)}


def open_base(base: str, *, revision: str | None = None) -> Base:
    """Open the base that the user named.

    Args:
        base: a Hub directory or a repo id; a path that exists is never looked up on the Hub.
        revision: branch, tag or commit of a repo id.

    Raises:
        UsageError: `revision` is given for a local path.
        SourceError: neither a path nor a repo id; no config there; damaged headers.
        ResourceError: no network, or files that may not be read.
    """
    base, revision = stores.settled(base, revision)
    if not storage.lexists(base):
        repo = named_repo(base, revision)
        if repo is not None:
            try:
                return _fetch(repo.id, repo.revision)
            except ShardkitError as error:
                raise with_path_hint(base, error) from None
        raise missing_path(base, hint=f"check the path of --base, or {NAME_A_REPO}")
    if revision is not None:
        raise UsageError(
            f"--base {escape(base)} is not a repo of the Hub: it has no revision {escape(revision)!r}"
        )
    if not storage.isdir(base):
        raise SourceError(f"--base {escape(base)}: not a directory", hint="give the directory of a Hub model")
    return _open(base, base, is_given=True)


def find_base(checkpoint: Checkpoint) -> Base | None:
    """Open the first of a checkpoint's directories with a config as its base, or return None. Damaged weights are ignored."""
    directory = find_config(checkpoint)
    if directory is None:
        return None
    parent, name = os.path.split(os.path.abspath(directory))
    base = _open(os.path.basename(parent) if is_data_folder(name) else name, directory, is_given=False)
    is_trainers = checkpoint.hub is None or _TRAINER_STATE in storage.listdir(directory)
    recorded = _manifest_of(checkpoint)
    kept = recorded.others or () if isinstance(recorded, (manifest.Presharded, manifest.SavedState)) else ()
    says_dtype = any(file.name == f"{SAVED_ASSETS}/{CONFIG}" for file in kept)
    config = base.config
    if is_trainers and config is not None and isinstance(names := config.get("architectures"), list):
        config = {**config, "architectures": [str(name).removeprefix("FSDP") for name in names]}
    return replace(base, config=config, is_trainers=is_trainers, says_dtype=says_dtype)


def find_config(checkpoint: Checkpoint) -> str | None:
    """Return the first of a checkpoint's directories that has a config, or None."""
    for directory in checkpoint.contents.assets:
        names = storage.listdir(directory)
        if CONFIG in names or ADAPTER_CONFIG in names:
            return directory
    recorded, directory = recorded_shards(checkpoint), checkpoint.catalog.directory
    # preshard copied it, whatever library reads it.
    is_models = recorded is not None and recorded.hub_names is None
    return directory if is_models and storage.isfile(os.path.join(directory, CONFIG)) else None


def own_directories(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a checkpoint's directories of config and tokenizer, without those of the run, which other checkpoints share."""
    is_model = checkpoint.hub is not None
    return tuple(place for place in checkpoint.contents.assets if is_model or _is_own(place, checkpoint.path))


def own_home(checkpoint: Checkpoint) -> str | None:
    """Return the first of a checkpoint's own directories whose config.json describes a model, or None."""
    return next((place for place in own_directories(checkpoint) if has_model_config(place)), None)


def own_config(checkpoint: Checkpoint) -> dict[str, object] | None:
    """Return the content of the config.json in `own_home`, or None."""
    home = own_home(checkpoint)
    return None if home is None else read_config(home)


def settings_directories(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the directories that may hold an adapter's settings for this checkpoint."""
    return (*own_directories(checkpoint), checkpoint.catalog.directory, checkpoint.path)


def _is_own(place: str, path: str) -> bool:
    """True if a directory belongs to the checkpoint at `path` alone.

    That is so for each directory below it, and for the checkpoint's own directory or its parent unless several
    checkpoints share that.
    """
    home, opened = storage.absolute(place), storage.absolute(path)
    step, part = (_STEP.fullmatch(folder_name(each)) for each in (home, opened))
    if home == opened:  # DeepSpeed's directory of several steps is opened by its newest
        is_step = (
            step is not None
            or _TRAINER_STATE in listing(home)
            or folder_below(home, _ACCELERATES) is not None
        )
        return is_step or _TRACKER not in listing(home)
    if home.startswith(os.path.join(opened, "")):
        return True
    if step is not None:  # `checkpoint-10/global_step10`, but not `run-step2/checkpoint-10`
        return part is None or part["number"] == step["number"]
    return _PART.fullmatch(folder_name(opened)) is not None or _is_alone(opened)


def _is_alone(path: str) -> bool:
    """True for a file of a whole model that is the only one with its ending in its directory, and has no step number."""
    if storage.isdir(path) or _NUMBERED.search(os.path.basename(path)):
        return False
    names = listing(os.path.dirname(path))
    return sum(os.path.splitext(name)[1] == os.path.splitext(path)[1] for name in names) == 1


def saved_key_rules(checkpoint: Checkpoint) -> tuple[KeyRule, ...] | None:
    """Return the rules from names in memory to the Hub's names that `shardkit.save` recorded, or None.

    They apply to names below `SAVED_ROOT`. `reshard` copies them into its output's manifest.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    return read_key_rules(_manifest_of(checkpoint))


class RecordedRules(NamedTuple):
    """A manifest's rules from a model's names in memory to the Hub's names."""

    rules: tuple[KeyRule, ...]
    """Empty if the names are the Hub's already."""
    root: str | None
    """Prefix of the model's names in the checkpoint, without the last dot; None if unknown."""

    @property
    def prefix(self) -> str:
        """The prefix with its dot, or an empty string."""
        return f"{self.root}." if self.root else ""


def recorded_rules(checkpoint: Checkpoint) -> RecordedRules | None:
    """Return the rules from a checkpoint's names to the Hub's names; None if its manifest does not record the latter.

    `shardkit.save` records the rules themselves. preshard records the names in the source's files, from which the rules
    are found here.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    saved = saved_key_rules(checkpoint)
    if saved is not None:
        return RecordedRules(saved, SAVED_ROOT)
    recorded = recorded_shards(checkpoint)
    if recorded is not None and (rules := source_key_rules(recorded)):
        return RecordedRules(rules, (recorded.root or "").rstrip("."))
    return RecordedRules((), None) if holds_hub_names(checkpoint) else None


def recorded_shards(checkpoint: Checkpoint) -> manifest.Presharded | None:
    """Return the manifest of a checkpoint that preshard wrote, also in a trainer's form; None for other checkpoints.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    recorded = _manifest_of(checkpoint)
    return recorded if isinstance(recorded, manifest.Presharded) else None


class RecordedNames(NamedTuple):
    """What a checkpoint's manifest records about names, apart from rules."""

    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of stored names that are one tensor; the name used on the Hub comes first."""
    names: frozenset[str] | None = None
    """All names in the files from which preshard made the checkpoint; None if unknown."""
    omitted: tuple[tuple[str, str], ...] = ()
    """(name, reason) of names in these files that preshard left out."""


def recorded_names(checkpoint: Checkpoint) -> RecordedNames:
    """Return a checkpoint's ties, and the names in the files from which it was made, as its manifest records them.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    recorded = _manifest_of(checkpoint)
    if isinstance(recorded, manifest.SavedState):
        return RecordedNames(tuple(tuple(f"{SAVED_ROOT}.{fqn}" for fqn in group) for group in recorded.ties))
    if not isinstance(recorded, manifest.Presharded):
        return RecordedNames()
    omitted = tuple((entry.name, entry.reason) for entry in recorded.omitted)
    if recorded.hub_names is not None or recorded.key_rules:
        return RecordedNames(recorded.ties, omitted=omitted)
    parts = (leaf.name for expression in read_derived(recorded).values() for leaf in leaves(expression))
    names = {*(tensor.source.name for tensor in recorded.tensors.values()), *parts, *dict(omitted)}
    return RecordedNames(recorded.ties, frozenset(names), omitted)


def recorded_vocab_rows(checkpoint: Checkpoint) -> int | None:
    """Return the number of rows of the vocabulary that a checkpoint's manifest records, or None.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    recorded = _manifest_of(checkpoint)
    return recorded.vocab_size if isinstance(recorded, (manifest.Presharded, manifest.SavedState)) else None


def source_key_rules(recorded: manifest.Presharded) -> tuple[KeyRule, ...] | None:
    """Return the rules from the model's names to the source's; None if preshard kept the names.

    For the rules, factors of OSFT count under the names of their weights.
    """
    root = recorded.root or ""
    names = {fqn.removeprefix(root): tensor.source.name for fqn, tensor in recorded.tensors.items()}
    return find_rules({weight_of(fqn): weight_of(name) for fqn, name in names.items()}) or None


def holds_hub_names(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint's manifest records the names of its tensors on the Hub.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    recorded = _manifest_of(checkpoint)
    if isinstance(recorded, manifest.Presharded):
        return recorded.hub_names is None
    return isinstance(recorded, manifest.SavedState) and recorded.key_rules is not None


def holds_saved_state(checkpoint: Checkpoint) -> bool:
    """True if `shardkit.save` wrote a checkpoint, so that its names are those of the model's class, without wrappers.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    return isinstance(_manifest_of(checkpoint), manifest.SavedState)


def recorded_derived(checkpoint: Checkpoint) -> dict[str, Expression]:
    """Return the derived tensors that a checkpoint's manifest records: name in memory -> expression of the Hub's tensors.

    A derived tensor is computed from stored ones when a model is loaded, such as fused experts.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is damaged.
    """
    return read_derived(_manifest_of(checkpoint))


def read_derived(recorded: manifest.Manifest | None) -> dict[str, Expression]:
    """Return the derived tensors in the manifest of a sharded checkpoint; see `recorded_derived`."""
    derived = None if recorded is None or isinstance(recorded, manifest.HubModel) else recorded.derived
    try:
        return {tensor.name: from_json(tensor.made_of) for tensor in derived or ()}
    except ValueError as error:
        raise SourceError(
            f"{manifest.NAME}: derived: {error}",
            hint=f"the file was written by something else; {page('format.md')} describes it",
        ) from None


def read_key_rules(recorded: manifest.Manifest | None) -> tuple[KeyRule, ...] | None:
    """Return the rules in the manifest of a sharded checkpoint; see `saved_key_rules`."""
    rules = recorded.key_rules if isinstance(recorded, (manifest.Presharded, manifest.SavedState)) else None
    if rules is None or (isinstance(recorded, manifest.Presharded) and not rules):  # preshard writes no rules
        return None
    return tuple(KeyRule(old, new, 0) for old, new in rules)


def _manifest_of(checkpoint: Checkpoint) -> manifest.Manifest | None:
    if checkpoint.writer == "shardkit":
        return checkpoint.read_manifest()
    # If preshard wrote it in a trainer's form, the writer is that trainer.
    try:
        recorded = checkpoint.read_manifest()
    except IntegrityError:  # the comparison of checksums warns about it
        return None
    is_there = isinstance(recorded, manifest.Presharded) and recorded.root is not None
    return recorded if is_there or (isinstance(recorded, manifest.FileList) and recorded.derived) else None


def _open(label: str, directory: str, *, is_given: bool) -> Base:
    """Open the directory of a base.

    Args:
        label: names it in messages.
        directory: of the base.
        is_given: the user named it with `--base`. Then unreadable weights are an error and not a note, and it must have a
            config or be an adapter's directory.
    """
    model, notes = None, list[str]()
    if _has_weights(directory, legacy=is_given):
        try:
            model = open_model(directory)
        except ShardkitError as error:
            if is_given:
                raise
            notes.append(f"the weights in {escape(label)} were not read: {error.message}")
    assets, refused = list_assets(directory)
    base = _make_base(label, directory, model, assets, is_given=is_given)
    if is_given and base.config is None and ADAPTER_CONFIG not in storage.listdir(directory):
        raise SourceError(
            f"--base {escape(label)} has no {CONFIG}",
            problems=[f"found {escape(name)}" for name in sorted(listing(directory))],
            hint="give the directory of a Hub model (in the Hub's cache: snapshots/<commit>), or its repo id",
        )
    if refused:
        notes.append(
            f"{count(len(refused), 'file')} of {escape(label)} not copied, as links that leave it, or lead to nothing, are not followed: "
            + ", ".join(map(escape, refused))
            + "; --follow-links copies their targets"
        )
    unread = unread_weights(list_weights(directory)) if is_given and model is None else []
    settings = unknown_settings(storage.listdir(directory)) if is_given else []
    if settings:
        notes.append(f"not copied, as only another library reads it: {listed(settings)} of {escape(label)}")
    return replace(
        base,
        catalog=model.catalog if model else None,
        notes=tuple(notes),
        warnings=tuple(_comparison_warnings(label, unread)),
    )


def _comparison_warnings(label: str, unread: Collection[str]) -> Iterator[str]:
    if unread:
        yield (
            f"names were not compared: {listed(unread)}: nothing in {escape(label)} is named as the weights of a model; "
            f"a base with {MODEL}.safetensors would be compared"
        )


def _make_base(
    label: str, directory: str, model: OpenedHubModel | None, assets: Mapping[str, str], *, is_given: bool
) -> Base:
    tensors = model.catalog.tensors.values() if model else ()
    other_weights = model.other_weights if model and is_given else ()
    config = read_config(directory)
    return Base(
        label=label,
        directory=directory,
        config=config,
        stem=model.stem if model else DIFFUSERS if library_of(config) == "diffusers" else MODEL,
        index=model.index if model else None,
        tensors={entry.fqn: BaseTensor(entry.dtype, entry.shape) for entry in tensors} if model else None,
        assets=assets,
        left_out=tuple(item for item in other_weights if item[0] not in assets),
        is_given=is_given,
        repo_id=repo_id_of(directory),
    )


def refuse_adapter(base: Base) -> None:
    """Refuse a base that is an adapter, which has neither the config nor the names of a model.

    Raises:
        SourceError: it is an adapter; the hint names the model that it was trained on, if the adapter records it.
    """
    if base.config is not None or not storage.lexists(os.path.join(base.directory, ADAPTER_CONFIG)):
        return
    model = base_of_adapter(base.directory)
    named = "" if model is None else f": {in_shell(model)}, as its {ADAPTER_CONFIG} says"
    raise SourceError(
        f"--base {escape(base.label)} is a PEFT adapter, not a model: it has no {CONFIG}",
        hint=f"give as --base the model that the adapter was trained on{named}",
    )


def _has_weights(directory: str, *, legacy: bool) -> bool:
    """True if a directory has weights of a model; legacy files (`.bin`) count only if `legacy` is true."""
    try:
        weights = select_weights(storage.listdir(directory), directory)
    except SourceError:
        return False
    return legacy or weights.kind == "safetensors"


def _fetch(repo_id: str, revision: str | None) -> Base:
    """Open a repo as the base: download its assets into the cache, and read only the headers of its weights."""
    folder = fetch_files(repo_id, (*asset_patterns(), ADAPTER_CONFIG), revision=revision)
    modules = [f"{glob.escape(place)}/*" for place in module_folders(folder)]
    if modules:
        fetch_files(repo_id, modules, revision=os.path.basename(folder))
    if not any(storage.isfile(os.path.join(folder, name)) for name in (CONFIG, ADAPTER_CONFIG)):
        raise SourceError(f"--base {escape(repo_id)} has no {CONFIG}", hint="name the repo of a model")
    model = open_headers(repo_id, os.path.basename(folder))
    base = _make_base(repo_id, folder, model, list_assets(folder)[0], is_given=True)
    if model is not None:
        return base
    unread = unread_weights(list_files(repo_id, os.path.basename(folder)))
    note = f"{escape(repo_id)} has no safetensors weights: names and shapes were not compared with it"
    warnings = tuple(_comparison_warnings(repo_id, unread))
    return replace(base, notes=() if warnings else (note,), warnings=warnings)
