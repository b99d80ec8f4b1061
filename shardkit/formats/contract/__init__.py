"""The types that an opened checkpoint consists of, and the helpers that all formats use to inspect a directory.

Each format has an `Opener`, which recognises a path and opens it to a `Checkpoint`. The helpers for recognising
(`listing`, `has_any`, `folder_below`, ...) never raise because of the content of a directory: nothing is known about it yet.

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
    from shardkit.formats.contract.optimizer import OptimizerState, UnusableOptimizer
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
    """An opened model with the files of a Hub repo: config, weights, perhaps an index."""

    catalog: Catalog
    """Tensors in the order of the index. Without an index: in the order of their bytes in a safetensors file, or of the
    entries in a legacy one."""
    config: dict[str, object] | None
    """The content of config.json, or None."""
    directory: str
    """The directory of the files."""
    label: str
    """A short name, from which names of outputs are made."""
    stem: str = "model"
    """Beginning of the names of its weight files, without a variant."""
    index: str | None = None
    """The name of its index, if it has one."""
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By safetensors file, the `__metadata__` of its header without `format`."""
    identity: manifest.RecordedSource
    """Which weights these are, as plain data that does not depend on where they are stored."""
    other_weights: tuple[tuple[str, str], ...] = ()
    """(name, description) of other files with weights, which are not read."""
    download_bytes: int = 0
    """Size of the weight files that are not on this machine; only their headers were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryLocation:
    """The place of one entry's bytes in a DCP directory."""

    file: int
    """Index into the files that `.metadata` names."""
    start: int
    """First byte."""
    nbytes: int
    """Length in bytes."""
    transforms: tuple[str, ...] = ()
    """The stream extensions that encoded the bytes, e.g. ("stream.zstd/1",)."""


class DcpFolder(Protocol):
    """An opened directory of torch's DCP; `formats.dcp` implements it."""

    @property
    def catalog(self) -> Catalog:
        """Its tensors. An extent may be a whole record, which has to be opened to find the bytes."""

    @property
    def transforms(self) -> Mapping[int, tuple[str, ...]]:
        """By chunk, the stream extensions that encoded its record; most chunks have none."""

    @property
    def objects(self) -> Mapping[str, EntryLocation | None]:
        """Entries that are not tensors, with the place of each one's record."""

    @property
    def copy_ends(self) -> Sequence[tuple[int, int]]:
        """(file, end) of each record that is not in the catalog because another rank saved the same chunk."""

    @property
    def doubts(self) -> tuple[str, ...]:
        """The notes of `catalog` that something may be missing."""

    @property
    def leftovers(self) -> tuple[str, ...]:
        """The notes of `catalog` about files of another save."""

    @property
    def has_records(self) -> bool:
        """True if tensors are stored as `torch.save` records, which have a CRC-32."""

    def select(self, names: Collection[str]) -> Catalog:
        """Return a catalog of the named tensors, in that order, whose extents are raw bytes."""

    def select_within(
        self, regions: Mapping[str, Sequence[Region]], opened: dict[str, int] | None = None
    ) -> Catalog:
        """Like `select`, but only with the chunks that intersect the regions; no other record is opened."""

    def defer(self, names: Collection[str]) -> Catalog:
        """Like `select`, but records stay closed until the catalog's `open_records` opens those that are read."""


PLAIN = BY_NAME["bfloat16"]
"""The default dtype of dequantised weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWeights:
    """How to open a checkpoint that may be quantised, so that its weights are plain (one number for each value)."""

    dequantize: bool = True
    """Replace quantised tensors by plain ones. False refuses them."""
    dtype: DType = PLAIN
    """Of the plain tensors."""
    by_config: bool = False
    """Trust the `quantization_config` of a config beside a training checkpoint, although it may be that of its base."""
    by_content: bool = False
    """Count narrow numbers with scales beside them as quantised too, even if names and config do not show a method.
    Such tensors can be moved and compared as bytes, but not cut; only NVFP4 among them can be dequantised."""
    has_dequantize_option: bool = True
    """The caller has an option to dequantise, which an error may suggest."""


class Dequantized(NamedTuple):
    """The tensors of a catalog that are plain there and quantised in the files."""

    method: str
    """Of quantising, such as "fp8"."""
    names: frozenset[str]


class DifferentCopies(NamedTuple):
    """A tensor that several ranks saved whole, with different bytes."""

    tensor: str
    first_file: str
    """The file whose copy is used."""
    file: str
    """The first file with a different copy."""
    num_files: int
    """The number of files with a different copy."""

    def line(self) -> str:
        """Return a line with tensor, ranks and files that is safe to print."""
        more = f" and {count(self.num_files - 1, 'more file')}" if self.num_files > 1 else ""
        return (
            f"{escape(self.tensor)}: {_of_rank(self.first_file)} is used, {_of_rank(self.file)}{more} differs"
        )


def _of_rank(file: str) -> str:
    match = re.search(r"(?:rank_?|__)(\d+)|_(\d+)\.pt$", file)
    return f"rank {int(match[1] or match[2])}'s ({escape(file)})" if match else escape(file)


def copies_message(differing: Collection[DifferentCopies]) -> str:
    """Return a message about tensors that differ between ranks; the lines of `DifferentCopies.line` follow it."""
    return (
        f"{count(len(differing), 'tensor differs', 'tensors differ')} between the files of ranks, and one rank's "
        "alone can be used (each rank's own part of a tensor, such as its experts, has to be saved as a DTensor)"
    )


def copies_warnings(differing: Collection[DifferentCopies]) -> list[str]:
    """Return one warning about all tensors that differ between ranks, or an empty list."""
    folded = [line.pattern for line in fold_lines((each.line() for each in differing), spreads=True)]
    return [f"{copies_message(differing)}: {few(folded, _MAX_COPIES, '; ')}"] if differing else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The parts of a checkpoint: which tensors are model, optimizer or average, and what lies beside the catalog."""

    roots: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)
    """For "model", "optimizer" and "ema", the path in the state dict below which the format keeps it. The empty tuple is
    the whole state dict. A kind is absent if the format does not fix its place, so that only names can show it."""
    refused_weights: Mapping[str, str] = field(default_factory=dict)
    """Kinds of weights that are stored but cannot be recovered, with the reason, e.g. {"ema": "..."}."""
    optimizer: Callable[[], OptimizerState | UnusableOptimizer] | None = None
    """Opens the optimizer's state if that is in files of its own, or if the catalog lacks its settings. None if there is
    no optimizer, or if the catalog holds all of it.

    Raises:
        SourceError, IntegrityError, ResourceError: as opening does.
    """
    shows_cuts: bool = True
    """True if the chunks show how tensors were cut for ranks; flat partitions and whole tensors do not."""
    assets: tuple[str, ...] = ()
    """Directories with the model's config, tokenizer and the like, best first."""
    padding: Padding | None = None
    """The padding of the vocabulary that the trainer's arguments record, or None."""
    manifests: dict[str, Manifest | None] = field(default_factory=dict, repr=False, compare=False)
    """Results of `Checkpoint.read_manifest` by directory: keeping them alive keeps `manifest.read` from parsing again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remarks:
    """Findings from opening a checkpoint."""

    notes: tuple[str, ...] = ()
    """Notes for the user."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(file or entry, why it was not read)."""
    differing: tuple[DifferentCopies, ...] = ()
    """Tensors that differ between ranks; the catalog has one rank's."""
    why_missing: str = ""
    """Why the save left out parameters of the model; empty if the checkpoint records no such reason."""
    dequantized: Dequantized | None = None
    """The tensors that were dequantised on opening."""

    def plus(self, notes: Iterable[str] = (), skipped: Iterable[tuple[str, str]] = ()) -> Remarks:
        """Return these remarks with further notes and skipped files."""
        return replace(self, notes=(*self.notes, *notes), skipped=(*self.skipped, *skipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint: names, dtypes, shapes and places of its tensors; no tensor data."""

    path: str
    """The directory or file that was opened."""
    format: str
    """Stable identifier, e.g. "dcp", "dcp-hf", "lightning", "accelerate", "verl", "deepspeed-zero3", "hub"."""
    writer: str
    """The software that wrote it, for people, e.g. "Lightning FSDPStrategy"."""
    catalog: Catalog
    """All of its tensors, model or not, under their stored names. An extent may be a whole record (`encoding`)."""
    select: Callable[[Collection[str]], Catalog]
    """Return a catalog of the named tensors, in that order, whose extents are raw bytes. Opens and checks the records of
    these tensors only. If the catalog has dense weights in place of factors, the factors can be selected too.

    Raises:
        SourceError, IntegrityError, ResourceError: naming file and tensor; all problems of a kind at once.
    """
    hub: OpenedHubModel | None = None
    """Its files as a Hub model; None for a training checkpoint."""
    dcp: DcpFolder | None = None
    """The DCP directory with its weights; None if they are in files of another kind."""
    contents: Contents = field(default_factory=Contents)
    """Which tensors are model, optimizer or average, and what lies beside the catalog."""
    remarks: Remarks = field(default_factory=Remarks)
    """Findings from opening it."""

    def read_manifest(self) -> Manifest | None:
        """Return the manifest in the directory of its files, or None. It is parsed again only if it changes.

        Raises:
            SourceError, IntegrityError, ResourceError: as `manifest.read`.
        """
        directory = self.catalog.directory
        self.contents.manifests[directory] = content = manifest.read(directory) if directory else None
        return content

    def opened_at(self, directory: str) -> DcpFolder | None:
        """Return `dcp` if it is the DCP directory at this path, else None; so it need not be parsed twice."""
        if self.dcp and storage.realpath(self.dcp.catalog.directory) == storage.realpath(directory):
            return self.dcp
        return None


class Opener(NamedTuple):
    """How a format is recognised and opened."""

    matches: Callable[[str], bool]
    """True if a path has the format. Never raises."""
    open: Callable[[str], Checkpoint]
    """Open a path that has the format."""


def listing(path: str) -> frozenset[str]:
    """Return the names in a directory, like `names_in`, or an empty set if it cannot be listed."""
    try:
        return frozenset(names_in(path))
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return frozenset()


class DamagedFiles(SourceError):
    """Files of a checkpoint are missing, cannot be read, or are too short.

    Args:
        message: what is wrong.
        files: name, relative to the directory that was opened -> the reason; "" for a missing file.
        hint: what to do.
        problems: lines for people; by default one for each file.
    """

    def __init__(
        self, message: str, files: Mapping[str, str], *, hint: str, problems: Iterable[str] | None = None
    ) -> None:
        lines = [escape(name) + (f": {reason}" if reason else "") for name, reason in files.items()]
        super().__init__(message, problems=lines if problems is None else problems, hint=hint)
        self.files = dict(files)


def missing_path(path: str, *, hint: str | None = None) -> SourceError:
    """Return the error for a path that does not exist. It names the closest existing path, or a job that writes there.

    Args:
        path: as the user wrote it.
        hint: what to do; None if the caller accepts `hf://` too: the hint then shows that form if `path` may be a repo.
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
        closest, hint = None, f"it is not committed: `shardkit status {in_shell(where)}` shows how far it is"
    elif path.startswith("~") or set("*?") & set(path):
        closest, hint = None, "no shell has expanded it: give the whole path, or leave quotes out"
    near = f"  (closest name: {closest})" if closest else ""
    return SourceError(f"{escape(path) or 'an empty path'}: no such file or directory{near}", hint=hint)


def _is_under_way(destination: str) -> bool:
    """True if this path on a disk is the destination of a job that is not committed."""
    if not location_of(destination).renames:
        return False
    try:
        return local.is_under_way(destination)
    except ValueError:  # a NUL or a lone surrogate: no path of a file
        return False


def refuse_unfinished(path: str) -> None:
    """Refuse a source that is the hidden directory of a job that is not committed.

    Raises:
        SourceError: the path is such a directory, or is inside one.
    """
    output = local.output_of(storage.absolute(path)) if location_of(path).renames else None
    if output is not None:
        raise SourceError(
            f"{escape(path)} is no checkpoint: a job of shardkit writes there that is not committed",
            hint=f"`shardkit status {in_shell(output)}` shows how far it is",
        )


def with_path_hint(path: str, error: ShardkitError) -> ShardkitError:
    """Return a Hub error that also says that no such path exists, if the user may have meant a path."""
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
    """Return the existing path in the same directory with the most similar name, escaped; None if no name is similar."""
    around, name = os.path.split(path.rstrip("/"))
    closest = nearest(name, sorted(listing(around or os.curdir)))
    return None if closest is None else escape(os.path.join(around, closest))


def matching_names(names: Iterable[str], *patterns: str) -> list[str]:
    """Return the names that match one of the patterns, sorted."""
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def has_any(names: Collection[str], *patterns: str) -> bool:
    """True if any of the names matches one of the patterns."""
    return any(
        pattern in names if not set(pattern) & set("*?[") else bool(matching_names(names, pattern))
        for pattern in patterns
    )


def explain_skipped(names: Iterable[str], reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, why it was not read), sorted, for each name with a reason.

    Args:
        names: of files in a directory.
        reasons: regular expression for the whole name -> the reason; the first match counts.
    """
    for name in sorted(names):
        reason = next((reason for pattern, reason in reasons.items() if re.fullmatch(pattern, name)), None)
        if reason is not None:
            yield name, reason


def folder_below(path: str, below: str) -> str | None:
    """Return the path of the directory `below` inside `path`; None if it does not exist, or a link leads out of `path`.

    Args:
        below: relative, with "/" between its parts.
    """
    directory = os.path.join(path, *below.split("/"))
    if not storage.isdir(directory):
        return None
    home = os.path.join(storage.realpath(path), "")
    return directory if storage.realpath(directory).startswith(home) else None


def folder_name(path: str) -> str:
    """Return the last part of a directory's absolute path: "run" for `run/`, and the directory's name for `.`."""
    return os.path.basename(storage.absolute(path))


def parent_folder(path: str) -> str:
    """Return the directory that holds `path`."""
    return os.path.dirname(storage.absolute(path))


def asset_directories(*candidates: str | None) -> tuple[str, ...]:
    """Return those candidates that hold a Hub model's config, tokenizer, template or processor, each once."""
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
    """True if a directory's config.json describes a model; some trainers keep their own settings under that name."""
    try:
        content = json.loads(read_inside(path, "config.json", _MAX_CONFIG))
    except (ShardkitError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and not content.keys().isdisjoint(_OF_A_MODEL)


def settings_in(directory: str, name: str, max_bytes: int = _MAX_CONFIG) -> dict[str, object]:
    """Return the JSON object in a file of a directory, or an empty dict if the file is missing or cannot be read."""
    try:
        return parse_object(read_inside(directory, name, max_bytes), name)
    except (SourceError, ResourceError):
        return {}


def heads_of(catalog: Catalog, num_steps: int) -> dict[tuple[str | int, ...], None]:
    """Return the distinct first `num_steps` steps of all names, in the order of the source.

    For `model.layers.0.weight` and one step this is ("model",). The steps are the keys of the saved state dict, if the
    checkpoint records them, else the parts of a name between its dots. A name with fewer steps is returned whole.
    """
    if catalog.paths is not None:
        return dict.fromkeys(path[:num_steps] for path in catalog.paths.values())
    names = (*catalog.tensors, *catalog.objects)
    return dict.fromkeys(tuple(name.split(".", num_steps)[:num_steps]) for name in names)
