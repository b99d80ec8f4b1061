"""The model that a checkpoint was trained from: its config, its files, and its tensors' names, shapes and dtypes.

Its weights matter in one way only: whether two names hold the same bytes. A person names the base with --base, or the
trainer put it into the checkpoint.
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
    absent,
    has_model_config,
    inner,
    listing,
    meant_path,
    own_name,
)
from shardkit.formats.hub.adapter import ADAPTER_CONFIG, adapted_model
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

SAVED_ROOT = "model"  # what `shardkit.save` puts a model's names under
SAVED_ASSETS = "huggingface"  # where it puts config and tokenizer, as verl does
_TRAINER_STATE = "trainer_state.json"  # transformers' Trainer saves the model that it trains beside it
_TRACKER = "latest"  # of DeepSpeed: names the newest of its steps
_ACCELERATES = "pytorch_model"  # accelerate's only tag of DeepSpeed, in the directory of a step
_PART = re.compile(r"pytorch_model(_fsdp_\d+)?")  # what accelerate makes in it
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
    """What a file of the checkpoint means otherwise than the base's."""

    file: str
    """Name of the file, or of the first of a tokenizer's."""
    key: str
    """Dotted."""
    checkpoint: str
    """The value there, as JSON; long ones are cut."""
    base: str
    """The base's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFiles:
    """What a checkpoint's own directory has beside the weights, in place of the base's."""

    config: Mapping[str, Any] | None = None
    """config.json; None if the base's is written."""
    names: frozenset[str] = frozenset()
    """Of all its files in the base's `assets`."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Of files that are not copied as they are, by name."""
    differences: tuple[FileDifference, ...] = ()
    """From the base, in meaning."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base, opened."""

    label: str
    """As it was given; its directory's name if it was found in the checkpoint."""
    directory: str
    """Where its files lie."""
    config: dict[str, object] | None
    """config.json, None if there is none."""
    tensors: Mapping[str, BaseTensor] | None
    """By name, in the order of its files; None if it has no weights whose headers could be read."""
    catalog: Catalog | None = None
    """Of its weights; None if they are not on this machine, or were not opened."""
    assets: Mapping[str, str]
    """Files beside the weights: name -> path. Those of modules hold weights too."""
    left_out: tuple[tuple[str, str], ...] = ()
    """(name, what it is) of other files with weights there, which are not copied."""
    stem: str
    """What the names of its weight files begin with; where it has none, what its library looks for."""
    index: str | None = None
    """The name of its index, if it has one."""
    is_given: bool
    """A person named it; otherwise it was found in the checkpoint."""
    repo_id: str | None = None
    """Its name on the Hub, if that is known for certain."""
    is_trainers: bool = False
    """A trainer wrote it, and may have changed the config for the run."""
    says_dtype: bool = False
    """shardkit put the config there, with the dtype that is right for the weights as they are."""
    own_files: OwnFiles | None = None
    """Files of the checkpoint that count before those of the base that a person named; None if none were looked for."""
    notes: tuple[str, ...] = ()
    """What a person should be told."""
    warnings: tuple[str, ...] = ()
    """Why the names were not compared with it."""

    @property
    def download(self) -> str:
        """The command that brings the weights of a repo here, of the commit that was compared."""
        return f"hf download {in_shell(self.label)} --revision {os.path.basename(self.directory)}"


def holds_equal(base: Base, first: str, second: str) -> bool:
    """True if a base on this machine stores the same bytes under two names.

    Raises:
        IntegrityError, ResourceError: a file cannot be read as described.
    """
    catalog = base.catalog
    if catalog is None or not {first, second} <= catalog.tensors.keys():
        return False
    rows = (row for name in (first, second) for row in catalog.tensors[name].chunk_ids)
    is_raw = all(catalog.files[catalog.chunks.file[row]].is_raw for row in rows)
    return is_raw and same_bytes(catalog, first, second)


def files_of(base: Base) -> dict[str, list[str]] | None:
    """Return the names of the tensors in each weight file of a base, in the order of their bytes.

    None if its files are not at hand, or lie in folders.
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
    """Open the base that a person named.

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
                raise meant_path(base, error) from None
        raise absent(base, hint=f"check the path of --base, or {NAME_A_REPO}")
    if revision is not None:
        raise UsageError(f"--base {escape(base)} is a local path, it has no revision {escape(revision)!r}")
    if not storage.isdir(base):
        raise SourceError(f"--base {escape(base)}: not a directory", hint="give the directory of a Hub model")
    return _open(base, base, is_given=True)


def find_base(checkpoint: Checkpoint) -> Base | None:
    """Open the first of a checkpoint's own directories that has a config; damaged weights there are ignored."""
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
    """Return the first of a checkpoint's own directories that has a config; None if none has."""
    for directory in checkpoint.contents.assets:
        names = storage.listdir(directory)
        if CONFIG in names or ADAPTER_CONFIG in names:
            return directory
    recorded, directory = recorded_shards(checkpoint), checkpoint.catalog.directory
    # preshard copied it, whatever library reads it.
    is_models = recorded is not None and recorded.hub_names is None
    return directory if is_models and storage.isfile(os.path.join(directory, CONFIG)) else None


def own_directories(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return those of a checkpoint's directories of config and tokenizer that are its own, and not the run's above it."""
    is_model = checkpoint.hub is not None
    return tuple(place for place in checkpoint.contents.assets if is_model or _is_own(place, checkpoint.path))


def own_home(checkpoint: Checkpoint) -> str | None:
    """Return the first of a checkpoint's own directories with the config.json of a model; None if there is none."""
    return next((place for place in own_directories(checkpoint) if has_model_config(place)), None)


def own_config(checkpoint: Checkpoint) -> dict[str, object] | None:
    """Return the config.json in `own_home`."""
    home = own_home(checkpoint)
    return None if home is None else read_config(home)


def places_of_settings(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return where the settings of an adapter may lie that are a checkpoint's own."""
    return (*own_directories(checkpoint), checkpoint.catalog.directory, checkpoint.path)


def _is_own(place: str, path: str) -> bool:
    """True for a directory below what was opened; for itself, or the one above, if only this checkpoint lies there."""
    home, opened = storage.absolute(place), storage.absolute(path)
    step, part = (_STEP.fullmatch(own_name(each)) for each in (home, opened))
    if home == opened:  # DeepSpeed's directory of several steps is opened by its newest
        is_step = step is not None or _TRAINER_STATE in listing(home) or inner(home, _ACCELERATES) is not None
        return is_step or _TRACKER not in listing(home)
    if home.startswith(os.path.join(opened, "")):
        return True
    if step is not None:  # `checkpoint-10/global_step10`, but not `run-step2/checkpoint-10`
        return part is None or part["number"] == step["number"]
    return _PART.fullmatch(own_name(opened)) is not None or _is_alone(opened)


def _is_alone(path: str) -> bool:
    """True for a file of a whole model, none of several beside each other."""
    if storage.isdir(path) or _NUMBERED.search(os.path.basename(path)):
        return False
    names = listing(os.path.dirname(path))
    return sum(os.path.splitext(name)[1] == os.path.splitext(path)[1] for name in names) == 1


def saved_key_rules(checkpoint: Checkpoint) -> tuple[KeyRule, ...] | None:
    """Return the rules that give the Hub's names, as `shardkit.save` recorded them; None if it did not.

    They apply to names below `SAVED_ROOT`. `reshard` carries them over.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    return read_key_rules(_manifest_of(checkpoint))


class RecordedRules(NamedTuple):
    """Rules from a model's names in memory to the Hub's, as a manifest has them."""

    rules: tuple[KeyRule, ...]
    """None of them: the names are the Hub's."""
    root: str | None
    """What stands before the model's own names, dotted; None leaves it open."""

    @property
    def before(self) -> str:
        """The same with its dot."""
        return f"{self.root}." if self.root else ""


def recorded_rules(checkpoint: Checkpoint) -> RecordedRules | None:
    """Return the rules to the Hub's names that a checkpoint's manifest has; None if it does not tell these names.

    `shardkit.save` records rules, and preshard the names that tensors had in their files.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    saved = saved_key_rules(checkpoint)
    if saved is not None:
        return RecordedRules(saved, SAVED_ROOT)
    recorded = recorded_shards(checkpoint)
    if recorded is not None and (rules := source_key_rules(recorded)):
        return RecordedRules(rules, (recorded.root or "").rstrip("."))
    return RecordedRules((), None) if holds_hub_names(checkpoint) else None


def recorded_shards(checkpoint: Checkpoint) -> manifest.Presharded | None:
    """Return the manifest of a checkpoint that preshard wrote, in a trainer's form too; None for any other.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    recorded = _manifest_of(checkpoint)
    return recorded if isinstance(recorded, manifest.Presharded) else None


class RecordedNames(NamedTuple):
    """What a checkpoint's manifest says of names beyond the rules."""

    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of stored names that are one tensor, the Hub's first."""
    names: frozenset[str] | None = None
    """All names of the files that it was pre-sharded from; None if that is not known."""
    omitted: tuple[tuple[str, str], ...] = ()
    """(name, reason) of those of them that preshard left out."""


def recorded_names(checkpoint: Checkpoint) -> RecordedNames:
    """Return what a checkpoint's manifest says of ties, and of the files that its weights came from.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
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


def recorded_tokens(checkpoint: Checkpoint) -> int | None:
    """Return the rows of the vocabulary that `shardkit.save` recorded; None if it did not.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    recorded = _manifest_of(checkpoint)
    return recorded.vocab_size if isinstance(recorded, (manifest.Presharded, manifest.SavedState)) else None


def source_key_rules(recorded: manifest.Presharded) -> tuple[KeyRule, ...] | None:
    """Return the rules from the model's names to the source's; None if preshard kept the names.

    Factors of OSFT have the names of their weights there.
    """
    root = recorded.root or ""
    names = {fqn.removeprefix(root): tensor.source.name for fqn, tensor in recorded.tensors.items()}
    return find_rules({weight_of(fqn): weight_of(name) for fqn, name in names.items()}) or None


def holds_hub_names(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint's manifest tells what its tensors are on the Hub.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    recorded = _manifest_of(checkpoint)
    if isinstance(recorded, manifest.Presharded):
        return recorded.hub_names is None
    return isinstance(recorded, manifest.SavedState) and recorded.key_rules is not None


def holds_saved_state(checkpoint: Checkpoint) -> bool:
    """True if `shardkit.save` wrote a checkpoint: names are those of the model's class, without wrappers.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    return isinstance(_manifest_of(checkpoint), manifest.SavedState)


def saved_derived(checkpoint: Checkpoint) -> dict[str, Expression]:
    """Return what the model's tensors were made of when they were read from the Hub's files, by name in memory.

    Only those that are not stored tensors themselves are among them: fused experts and the like.

    Raises:
        SourceError, IntegrityError: the manifest cannot be read, or is not what was written.
    """
    return read_derived(_manifest_of(checkpoint))


def read_derived(recorded: manifest.Manifest | None) -> dict[str, Expression]:
    """Return what the manifest of a sharded checkpoint says of derived tensors, as `saved_derived` does."""
    derived = None if recorded is None or isinstance(recorded, manifest.HubModel) else recorded.derived
    try:
        return {tensor.name: from_json(tensor.made_of) for tensor in derived or ()}
    except ValueError as error:
        raise SourceError(
            f"{manifest.NAME}: derived: {error}",
            hint=f"the file was written by something else; {page('format.md')} describes it",
        ) from None


def read_key_rules(recorded: manifest.Manifest | None) -> tuple[KeyRule, ...] | None:
    """Return the rules in the manifest of a sharded checkpoint, as `saved_key_rules` does."""
    rules = recorded.key_rules if isinstance(recorded, (manifest.Presharded, manifest.SavedState)) else None
    if rules is None or (isinstance(recorded, manifest.Presharded) and not rules):  # preshard writes no rules
        return None
    return tuple(KeyRule(old, new, 0) for old, new in rules)


def _manifest_of(checkpoint: Checkpoint) -> manifest.Manifest | None:
    if checkpoint.writer == "shardkit":
        return checkpoint.read_manifest()
    # In the form of a trainer, preshard's manifest counts too.
    try:
        recorded = checkpoint.read_manifest()
    except IntegrityError:  # who compares checksums warns of it
        return None
    is_there = isinstance(recorded, manifest.Presharded) and recorded.root is not None
    return recorded if is_there or (isinstance(recorded, manifest.FileList) and recorded.derived) else None


def _open(label: str, directory: str, *, is_given: bool) -> Base:
    model, notes = None, list[str]()
    if _has_weights(directory, legacy=is_given):
        try:
            model = open_model(directory)
        except ShardkitError as error:
            if is_given:
                raise
            notes.append(f"the weights in {escape(label)} were not looked at: {error.message}")
    assets, refused = list_assets(directory)
    base = _describe(label, directory, model, assets, is_given=is_given)
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
            + "; --follow-links copies what they lead to"
        )
    unread = unread_weights(list_weights(directory)) if is_given and model is None else []
    settings = unknown_settings(storage.listdir(directory)) if is_given else []
    if settings:
        notes.append(f"not copied, as only another library reads it: {listed(settings)} of {escape(label)}")
    return replace(
        base,
        catalog=model.catalog if model else None,
        notes=tuple(notes),
        warnings=tuple(_not_compared(label, unread)),
    )


def _not_compared(label: str, unread: Collection[str]) -> Iterator[str]:
    if unread:
        yield (
            f"names were not compared: {listed(unread)}: nothing in {escape(label)} is named as the weights of a model; "
            f"a base with {MODEL}.safetensors would be compared"
        )


def _describe(
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
    """Refuse a base that is an adapter: it has neither the config nor the names of a model.

    Raises:
        SourceError: it is one; the hint names the model that it was trained on, if the adapter tells.
    """
    if base.config is not None or not storage.lexists(os.path.join(base.directory, ADAPTER_CONFIG)):
        return
    model = adapted_model(base.directory)
    named = "" if model is None else f": {in_shell(model)}, as its {ADAPTER_CONFIG} says"
    raise SourceError(
        f"--base {escape(base.label)} is a PEFT adapter, not a model: it has no {CONFIG}",
        hint=f"give as --base the model that the adapter was trained on{named}",
    )


def _has_weights(directory: str, *, legacy: bool) -> bool:
    """True if there are headers to read; legacy files need torch for that."""
    try:
        weights = select_weights(storage.listdir(directory), directory)
    except SourceError:
        return False
    return legacy or weights.kind == "safetensors"


def _fetch(repo_id: str, revision: str | None) -> Base:
    """Download everything but the weights into the cache; of the weights, only the headers."""
    folder = fetch_files(repo_id, (*asset_patterns(), ADAPTER_CONFIG), revision=revision)
    modules = [f"{glob.escape(place)}/*" for place in module_folders(folder)]
    if modules:
        fetch_files(repo_id, modules, revision=os.path.basename(folder))
    if not any(storage.isfile(os.path.join(folder, name)) for name in (CONFIG, ADAPTER_CONFIG)):
        raise SourceError(f"--base {escape(repo_id)} has no {CONFIG}", hint="name the repo of a model")
    model = open_headers(repo_id, os.path.basename(folder))
    base = _describe(repo_id, folder, model, list_assets(folder)[0], is_given=True)
    if model is not None:
        return base
    unread = unread_weights(list_files(repo_id, os.path.basename(folder)))
    note = f"{escape(repo_id)} has no safetensors weights: names and shapes were not compared with it"
    warnings = tuple(_not_compared(repo_id, unread))
    return replace(base, notes=() if warnings else (note,), warnings=warnings)
