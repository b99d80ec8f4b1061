"""What a checkpoint of any format opens to, and what every opener asks about a directory and about names.

The functions that ask never raise because of what a directory holds: they run before anything is known about it.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shardkit._folding import fold_lines
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.text import count, escape, few, in_shell, nearest
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import manifest, storage
from shardkit.files.home import names_in
from shardkit.files.links import read_inside
from shardkit.files.location import location_of
from shardkit.files.manifest import Manifest
from shardkit.files.output import local
from shardkit.files.remote.hub import SCHEME, address_of, names_repo
from shardkit.files.stores import READ_FROM, is_other_address
from shardkit.files.strict_json import parse_object

if TYPE_CHECKING:
    from shardkit.core.regions import Region
    from shardkit.formats.contract.optimizer import OptimizerState, Unmapped
    from shardkit.keys.rule_sets import Padding

NAME_A_REPO = "name a model on the Hub as organisation/name"
_MAX_COPIES = 3
_MAX_CONFIG = 16 << 20
_OF_A_MODEL = ("model_type", "architectures", "_class_name")  # the last: diffusers
_ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedHubModel:
    """A model as the Hub lays it out, opened."""

    catalog: Catalog
    """Tensors in the order of the index; without an index, by their bytes in a safetensors file, or by the entries of a
    legacy one."""
    config: dict[str, object] | None
    """config.json, None if there is none."""
    directory: str
    """Where the files lie."""
    label: str
    """A short name, for the names of outputs."""
    stem: str = "model"
    """What the names of its weight files begin with, variants aside."""
    index: str | None = None
    """The name of its index, if it has one."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What the headers of its safetensors files say beside the tensors, without the format; by file."""
    identity: manifest.RecordedSource
    """Which weights these are, as plain data; the same wherever they lie."""
    other_weights: tuple[tuple[str, str], ...] = ()
    """(name, what it is) of other files with weights, which are not read."""
    download_bytes: int = 0
    """Size of the weight files that are not on this machine; only their headers were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryLocation:
    """Where the bytes of one entry of a DCP directory lie."""

    file: int
    """Index into the files that `.metadata` names."""
    start: int
    """First byte."""
    nbytes: int
    """Length in bytes."""
    transforms: tuple[str, ...] = ()
    """The extensions that the bytes went through, e.g. ("stream.zstd/1",)."""


class DcpFolder(Protocol):
    """A directory that torch's DCP saved, opened; `formats.dcp` makes these."""

    @property
    def catalog(self) -> Catalog:
        """Its tensors; extents may still be records."""

    @property
    def transforms(self) -> Mapping[int, tuple[str, ...]]:
        """By chunk, the extensions that its record went through."""

    @property
    def objects(self) -> Mapping[str, EntryLocation | None]:
        """Entries that are not tensors, and where each one's record lies."""

    @property
    def copy_ends(self) -> Sequence[tuple[int, int]]:
        """File and end of each record that another rank's stands for."""

    @property
    def has_records(self) -> bool:
        """True if tensors are stored as `torch.save` records, which have a CRC-32."""

    def select(self, names: Collection[str]) -> Catalog:
        """Return a catalog of some tensors, in the order given, whose extents are raw bytes."""

    def select_within(
        self, regions: Mapping[str, Sequence[Region]], opened: dict[str, int] | None = None
    ) -> Catalog:
        """Return the same with those chunks alone in which some regions lie; no other record is opened."""

    def defer(self, names: Collection[str]) -> Catalog:
        """Return the same with records that its `open_records` opens, as far as somebody reads them."""


PLAIN = BY_NAME["bfloat16"]
"""The dtype of weights that were quantised, unless another is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWeights:
    """How a checkpoint is opened as plain weights."""

    dequantize: bool = True
    """Put plain tensors in the place of quantised ones. Otherwise these are refused."""
    dtype: DType = PLAIN
    """Of the plain tensors."""
    by_config: bool = False
    """Take the word of a config beside the checkpoint of a training for it, although it may be that of its base."""
    by_content: bool = False
    """Take or refuse narrow numbers with scales beside them too, whatever names and config tell. They may be moved and
    compared as bytes, but not be divided; NVFP4 alone may be made plain."""
    has_option: bool = True
    """Whoever asks could be told to dequantise."""


class Dequantized(NamedTuple):
    """Plain tensors that are quantised in the files."""

    method: str
    """How, such as "fp8"."""
    names: frozenset[str]


class DifferentCopies(NamedTuple):
    """A tensor that files of ranks have whole, with other bytes."""

    tensor: str
    first_file: str
    """The file whose copy counts."""
    file: str
    """The first file with another."""
    num_files: int
    """Files with other bytes than the one that counts."""

    def line(self) -> str:
        """Return tensor, ranks and files, as one line that is safe to print."""
        more = f" and {count(self.num_files - 1, 'more file')}" if self.num_files > 1 else ""
        return f"{escape(self.tensor)}: {_of_rank(self.first_file)} is taken, {_of_rank(self.file)}{more} differs"


def _of_rank(file: str) -> str:
    match = re.search(r"(?:rank_?|__)(\d+)|_(\d+)\.pt$", file)
    return f"rank {int(match[1] or match[2])}'s ({escape(file)})" if match else escape(file)


def copies_message(differing: Collection[DifferentCopies]) -> str:
    """Return what to say of tensors that differ between the files of ranks, for `DifferentCopies.line` to follow."""
    return (
        f"{count(len(differing), 'tensor differs', 'tensors differ')} between the files of ranks, and one rank's "
        "alone can be taken (each rank's own part of a tensor, such as its experts, has to be saved as a DTensor)"
    )


def copies_warnings(differing: Collection[DifferentCopies]) -> list[str]:
    """Return the warning of tensors that differ between the files of ranks; none if there are none."""
    folded = [line.pattern for line in fold_lines((each.line() for each in differing), spreads=True)]
    return [f"{copies_message(differing)}: {few(folded, _MAX_COPIES, '; ')}"] if differing else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds beside the tensors in its catalog, and what its tensors are."""

    roots: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Prefix paths that the format itself gives a meaning, by "model", "optimizer" or "ema". The empty tuple stands for
    everything. A kind is absent where only the names can tell."""
    refused_weights: Mapping[str, str] = field(default_factory=dict)
    """Kinds of weights that are there but cannot be recovered, with the reason, e.g. {"ema": "..."}."""
    optimizer: Callable[[], OptimizerState | Unmapped] | None = None
    """Open the optimizer's state if it lies in files of its own, or if the catalog lacks its settings. None if there is
    none, or if the catalog holds all of it.

    Raises:
        SourceError, IntegrityError, ResourceError: as opening does.
    """
    has_boxes: bool = True
    """The chunks show how tensors were cut for ranks. Flat partitions and tensors saved whole do not."""
    assets: tuple[str, ...] = ()
    """Directories with the model's config, tokenizer and the like, best first."""
    padding: Padding | None = None
    """What the trainer's arguments say of a vocabulary that it padded; None if they say nothing."""
    manifests: dict[str, Manifest | None] = field(default_factory=dict, repr=False, compare=False)
    """What `Checkpoint.read_manifest` read, by directory: a manifest is parsed once while somebody has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """What opening a checkpoint showed."""

    notes: tuple[str, ...] = ()
    """What a person should be told."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(file or entry, why it was not read)."""
    differing: tuple[DifferentCopies, ...] = ()
    """Tensors that differ between the files of ranks, of which one rank's are in the catalog."""
    why_missing: str = ""
    """Why the save left parameters of the model out; empty if nothing says that it did."""
    dequantized: Dequantized | None = None
    """What is quantised in the files, where the catalog has plain tensors in their place."""

    def plus(self, notes: Iterable[str] = (), skipped: Iterable[tuple[str, str]] = ()) -> Remarks:
        """Return these remarks and further ones."""
        return replace(self, notes=(*self.notes, *notes), skipped=(*self.skipped, *skipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint, opened: names, dtypes, shapes and places; no tensor data."""

    path: str
    """The directory or file that was opened."""
    format: str
    """Stable identifier, e.g. "dcp", "dcp-hf", "lightning", "accelerate", "verl", "deepspeed-zero3", "hub"."""
    writer: str
    """Who wrote it, for people, e.g. "Lightning FSDPStrategy"."""
    catalog: Catalog
    """All of its tensors, model or not, under their stored names. Extents may still be records (`encoding`)."""
    select: Callable[[Collection[str]], Catalog]
    """Return a catalog of some tensors, in the order given, whose extents are raw bytes. Opens and checks their records
    and nothing else. Factors whose dense weights are in the catalog can be selected too.

    Raises:
        SourceError, IntegrityError, ResourceError: naming file and tensor; all problems of a kind at once.
    """
    hub: OpenedHubModel | None = None
    """The Hub model that it is; None for a checkpoint of a training."""
    dcp: DcpFolder | None = None
    """The DCP directory that its weights lie in; None if they lie in files of another kind."""
    contents: Contents = field(default_factory=Contents)
    """What it holds beside the tensors, and what these are."""
    remarks: Remarks = field(default_factory=Remarks)
    """What opening it showed."""

    def read_manifest(self) -> Manifest | None:
        """Return the manifest that lies with its files; None if there is none. It is parsed again only if it changes.

        Raises:
            SourceError, IntegrityError, ResourceError: as `manifest.read`.
        """
        directory = self.catalog.directory
        self.contents.manifests[directory] = content = manifest.read(directory) if directory else None
        return content

    def opened_at(self, directory: str) -> DcpFolder | None:
        """Return the opened DCP directory if it is the one at a path, so that nobody parses it again; else None."""
        if self.dcp and storage.realpath(self.dcp.catalog.directory) == storage.realpath(directory):
            return self.dcp
        return None


class Opener(NamedTuple):
    """How a format is recognised and opened."""

    matches: Callable[[str], bool]
    """True for a path that has the format. Never raises."""
    open: Callable[[str], Checkpoint]
    """Open a path that has the format."""


def listing(path: str) -> frozenset[str]:
    """Return the names in a directory, as `names_in`; none if it cannot be listed."""
    try:
        return frozenset(names_in(path))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return frozenset()


class DamagedFiles(SourceError):
    """Files of a checkpoint are not there, cannot be read, or are too short.

    Args:
        message: what is wrong.
        files: name, relative to the directory that was opened -> the reason; "" where there is no such file.
        hint: what to do.
        problems: lines for people, where they are not one for each file.
    """

    def __init__(
        self, message: str, files: Mapping[str, str], *, hint: str, problems: Iterable[str] | None = None
    ) -> None:
        lines = [escape(name) + (f": {reason}" if reason else "") for name, reason in files.items()]
        super().__init__(message, problems=lines if problems is None else problems, hint=hint)
        self.files = dict(files)


def absent(path: str, *, hint: str | None = None) -> SourceError:
    """Return the error for a path at which there is nothing, with the nearest name beside it; or what writes there.

    Args:
        hint: None for whoever reads `hf://`: it says how a repo of the Hub is written, if the path may name one.
    """
    if is_other_address(path):
        meant = address_of(path)
        elsewhere = f"addresses begin with {READ_FROM}; download anything else first"
        return SourceError(
            f"{escape(path)}: shardkit reads no such address",
            hint=elsewhere if meant is None else f"give {escape(meant)}",
        )
    if hint is None:
        hint = "check the path"
        if names_repo(path) and not storage.isdir(os.path.dirname(path)):  # else something in there is meant
            hint += f"; a model on the Hub is read as {SCHEME}{escape(path)}"
    closest, where = _closest(path), storage.absolute(path)
    if _is_under_way(where):
        closest, hint = None, f"it is not committed: `shardkit status {in_shell(where)}` says how far it is"
    elif path.startswith("~") or set("*?") & set(path):
        closest, hint = None, "no shell has expanded it: give the whole path, or leave quotes out"
    near = f"  (closest name: {closest})" if closest else ""
    return SourceError(f"{escape(path) or 'an empty path'}: no such file or directory{near}", hint=hint)


def _is_under_way(destination: str) -> bool:
    """True if a job for this path on a disk is not committed."""
    if not location_of(destination).renames:
        return False
    try:
        return local.is_under_way(destination)
    except ValueError:  # a NUL or a lone surrogate: no path of a file
        return False


def refuse_unfinished(path: str) -> None:
    """Refuse the directory of a job that is not committed, where a model or a checkpoint is expected.

    Raises:
        SourceError: it is one, or lies in one.
    """
    output = local.output_of(storage.absolute(path)) if location_of(path).renames else None
    if output is not None:
        raise SourceError(
            f"{escape(path)} is no checkpoint: a job of shardkit writes there that is not committed",
            hint=f"`shardkit status {in_shell(output)}` says how far it is",
        )


def meant_path(path: str, error: ShardkitError) -> ShardkitError:
    """Return an error of the Hub that first says that no such path is here, where a path may have been meant."""
    closest, reason = _closest(path), error.message.removeprefix(f"{escape(path)}: ")
    if reason == error.message or not (closest or "/" not in path):  # only a few old repos have such names
        return error
    near, instead = (f" (closest name: {closest})", f"give {closest}") if closest else ("", "check the path")
    if "/" not in path:
        instead += f", or {NAME_A_REPO}"
    elif error.hint:
        instead += f"; for the repo, {error.hint}"
    return type(error)(
        f"{escape(path)}: not a local path{near}; on the Hub: {reason}",
        problems=error.problems,
        hint=instead,
    )


def _closest(path: str) -> str | None:
    """Return the path whose name is nearest to that of a path, escaped; None if no name there is like it."""
    around, name = os.path.split(path.rstrip("/"))
    closest = nearest(name, sorted(listing(around or os.curdir)))
    return None if closest is None else escape(os.path.join(around, closest))


def matching(names: Iterable[str], *patterns: str) -> list[str]:
    """Return the names that match one of the patterns, sorted."""
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def has_any(names: Collection[str], *patterns: str) -> bool:
    """True if a name matches one of the patterns."""
    return any(
        pattern in names if not set(pattern) & set("*?[") else bool(matching(names, pattern))
        for pattern in patterns
    )


def explained(names: Iterable[str], reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, why it was not read) for each name that a regular expression matches as a whole, sorted.

    Args:
        names: in a directory.
        reasons: by expression; the first that matches counts.
    """
    for name in sorted(names):
        reason = next((reason for pattern, reason in reasons.items() if re.fullmatch(pattern, name)), None)
        if reason is not None:
            yield name, reason


def inner(path: str, below: str) -> str | None:
    """Return a directory below `path`; None if there is none, or a link leads out of `path`.

    Args:
        below: relative, with "/" between its parts.
    """
    directory = os.path.join(path, *below.split("/"))
    if not storage.isdir(directory):
        return None
    home = os.path.join(storage.realpath(path), "")
    return directory if storage.realpath(directory).startswith(home) else None


def own_name(path: str) -> str:
    """Return the name of a directory itself, however the path is spelled."""
    return os.path.basename(storage.absolute(path))


def parent(path: str) -> str:
    """Return the directory that holds `path`."""
    return os.path.dirname(storage.absolute(path))


def asset_directories(*candidates: str | None) -> tuple[str, ...]:
    """Return the directories that hold a Hub model's config, tokenizer, template or processor, each once."""
    directories = dict[str, str]()
    for path in candidates:
        if path is not None and _has_assets(path):
            # One may be relative, and the other, a file's parent, absolute.
            directories.setdefault(storage.absolute(path), path)
    return tuple(directories.values())


def _has_assets(path: str) -> bool:
    names = listing(path)
    return has_any(names, *_ASSETS) or ("config.json" in names and has_model_config(path))


def has_model_config(path: str) -> bool:
    """True for a config.json as on the Hub; trainers keep their own settings under that name too."""
    try:
        content = json.loads(read_inside(path, "config.json", _MAX_CONFIG))
    except (ShardkitError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and not content.keys().isdisjoint(_OF_A_MODEL)


def settings_in(directory: str, name: str, max_bytes: int = _MAX_CONFIG) -> dict[str, object]:
    """Return the JSON object in a file of a directory; an empty one if it is missing or cannot be read."""
    try:
        return parse_object(read_inside(directory, name, max_bytes), name)
    except (SourceError, ResourceError):
        return {}


def heads_of(catalog: Catalog, num_steps: int) -> dict[tuple[str | int, ...], None]:
    """Return the distinct first `num_steps` steps of all names, in the order of the source.

    The steps are the keys of the state dict that was saved, if the checkpoint records them; else the parts of a name
    between its dots. A name with fewer steps is returned whole.
    """
    if catalog.paths is not None:
        return dict.fromkeys(path[:num_steps] for path in catalog.paths.values())
    names = (*catalog.tensors, *catalog.objects)
    return dict.fromkeys(tuple(name.split(".", num_steps)[:num_steps]) for name in names)
