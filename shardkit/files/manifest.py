"""`shardkit.json`: a description of an output, its source, and its checksums.

docs/format.md is the specification, and the types here correspond to it. A field is a key; fields are in the order of the
file; an optional field that is None is left out. Manifests are parsed here only, with errors that name the field.

The manifest contains the digests of `.metadata`, of every shard file and its chunk list, of every tensor, and of itself:
`crc32` is that of the manifest's JSON without this key, written with sorted keys and without blanks.

A manifest next to a directory is named after it, with the suffix `.shardkit.json`.
"""

# Annotations here are objects, not text, which `get_type_hints` would compile while a file is parsed.
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from operator import attrgetter
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints
from weakref import WeakValueDictionary

from shardkit._version import __version__, page
from shardkit.core.catalog import FileStamp
from shardkit.core.dtypes import BY_NAME
from shardkit.core.text import count, escape
from shardkit.errors import IntegrityError, ShardkitError, SourceError
from shardkit.files import storage, stores
from shardkit.files.digest import crc32
from shardkit.files.home import MANIFEST, root_of
from shardkit.files.links import locate
from shardkit.files.strict_json import open_regular, parse_integer, read_exactly, read_small, uncollected

NAME = MANIFEST
FORMAT = 3
"""The newest format. A manifest that format 1 can express has format 1; one with `osft` has this one."""
MAX_BYTES = 1 << 30
_SIDECAR_ENDING = ".shardkit.json"
_NUMBERS = range(1 << 62)
_MAX_PROBLEMS = 100
_MAX_SHOWN = 200  # characters of a name or value

# An `int` is from 0 to below 2^62. Other constraints are given with the types.
Crc32 = Annotated[int, range(1 << 32), "a CRC-32"]
Sha256 = Annotated[str, re.compile(r"[0-9a-f]{64}"), "a sha256 in hex"]
NonNegative = Annotated[float, (0.0, sys.float_info.max), "a number from 0 on"]
DtypeName = Annotated[str, frozenset(BY_NAME), "a dtype that shardkit knows"]
# No "", "." or "..", and no character that a file name cannot contain. Of the surrogates, Python uses U+DC80 to U+DCFF
# for bytes that are not UTF-8.
_PART = r"(?!\.{0,2}(?:/|\Z))[^/\0\ud800-\udc7f\udd00-\udfff]+"
PlainName = Annotated[str, re.compile(_PART), "a file name without a directory"]
FileName = Annotated[str, re.compile(f"{_PART}(?:/{_PART})*"), "a file name below the directory"]
PlacementText = Annotated[
    str,
    re.compile(r"R|S\([0-9]{1,3}\)|SS\([0-9]{1,3},[0-9]{1,9}\)"),
    'a placement, "R", "S(dim)" or "SS(dim,factor)"',
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """The writer of a manifest."""

    name: str
    version: str


TOOL = Tool(name="shardkit", version=__version__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file, relative to the directory."""

    name: FileName
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File(SavedFile):
    """A file and its digests."""

    crc32: Crc32 | None
    """None if it was not computed."""
    sha256: Sha256 | None = None
    """In hex; None if it was not requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile(File):
    """A shard file and its chunk list."""

    name: PlainName
    chunks: File


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile(File):
    """A file that was not written by shardkit."""

    extents: tuple[tuple[int, int, Crc32], ...] | None = None
    """(first byte, bytes, CRC-32) of parts of tensors without a checksum in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSourceFile:
    """A file that weights were read from."""

    name: str
    size_bytes: int
    crc32: Crc32 | None = None
    """Of the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSource:
    """The identity of the source weights."""

    repo: str | None = None
    """Repo id on the Hub; None for local files."""
    commit: str | None = None
    """Commit of that repo."""
    files: tuple[RecordedSourceFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAxis:
    """An axis of the mesh."""

    name: str
    size: int
    role: str
    """"replicate", "shard" or "tensor"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedMesh:
    """The device mesh of the shards."""

    axes: tuple[RecordedAxis, ...]
    """Outermost first."""
    ep: int | None = None
    """Number of ranks that hold distinct experts; None without expert parallelism."""
    pp: int | None = None
    """Number of pipeline stages, each with these axes; None without pipeline parallelism."""
    world_size: int
    num_shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewAxis(RecordedAxis):
    """An axis of another mesh over the same ranks."""

    steps: tuple[tuple[int, int], ...]
    """(size, stride) in ranks of each part of the axis, outermost first; a single one unless it is flattened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshView:
    """Another mesh over the ranks of the first, such as that of experts."""

    axes: tuple[ViewAxis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWith:
    """Versions of the packages that determined a layout."""

    torch: str
    transformers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOrigin:
    """The origin of the layout."""

    origin: str
    """"traced" from the real model or "declared" from names and shapes."""
    policy: str
    """The wrap policy, as requested."""
    traced_with: TracedWith | None = None
    """None if the layout was not traced, or was traced by an early version, which did not record this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that is sharded as a unit."""

    path: str
    """Such as "model.layers.0"; "" for the root."""
    class_name: str | None = field(metadata={"key": "class"})
    """None without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Omitted:
    """A tensor of the source that is not in the output."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor in the source."""

    name: str
    dtype: DtypeName


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """A tensor that is sharded over a mesh."""

    dtype: DtypeName
    shape: tuple[int, ...]
    """Shape of the whole tensor, in elements."""
    placements: tuple[PlacementText, ...]
    """One for each axis of its mesh."""
    mesh: int | None = None
    """Index into `meshes`; None for the main mesh, `mesh`."""
    stage: int | None = None
    """The pipeline stage that holds it."""
    unit: int
    """Index into `units`."""
    buffer: bool
    source: SourceTensor
    crc32: Crc32 | None = None
    """CRC-32 of the whole tensor's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A tensor that was computed from several tensors of the source, or from one in another form."""

    name: str
    made_of: object
    """An expression of stored tensors, as `keys.expressions.to_json` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftModule:
    """A linear layer whose weight is stored as factors."""

    rank: int
    """Number of frozen directions."""
    shape: tuple[int, ...]
    """Shape of the dense weight."""
    algorithm: str | None = None
    """How the factors were computed: "gram", "svd" or "svd fp32"."""
    error: NonNegative | None = None
    """Estimated Frobenius norm of the folding error, relative to the weight; absolute if the weight is zero."""
    orthogonality: NonNegative | None = None
    """Largest absolute entry of (U'U - I) x and (VV' - I) x, over all directions, for vectors x of +1 and -1."""
    crc32: Crc32 | None = None
    """CRC-32 of the dense weight from which the factors were computed, in the source's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Osft:
    """The division of weights into factors: the request and the result."""

    ratio: NonNegative
    """Share of trained directions of each target."""
    targets: tuple[str, ...]
    """"auto" or globs."""
    ranks: Mapping[str, int | float]
    """By glob, instead of `ratio`: number of frozen directions, or share of trained ones."""
    svd: str
    """"exact" or "fp32"."""
    dense_dtype: DtypeName
    """Dtype of most other weights. Factors are float32."""
    modules: Mapping[str, OsftModule]
    """By path, without `root`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensor:
    """A tensor of a Hub model that was consolidated from a checkpoint."""

    dtype: DtypeName
    shape: tuple[int, ...]
    source: SourceTensor
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """A tensor of a checkpoint that was not written by shardkit, by its stored name."""

    dtype: DtypeName
    shape: tuple[int, ...]
    crc32: Crc32 | None = None
    """None if it could not be computed in one pass over the files."""


class _Referable:
    """Adds a slot for weak references: `weakref_slot` of dataclasses needs Python 3.11."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Presharded(_Referable):
    """A directory that preshard or reshard wrote. The only kind whose JSON has no `kind`."""

    kind: ClassVar[str] = "presharded"
    tool: Tool
    source: RecordedSource
    mesh: RecordedMesh
    meshes: tuple[MeshView, ...] | None = None
    """Further meshes over the same ranks; None if there are none."""
    layout: LayoutOrigin
    root: str | None = None
    """Prefix of the model's names that a trainer needs, such as "model.", or None."""
    units: tuple[Unit, ...]
    """The root first, then in module order."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names of one parameter; records have the first name."""
    key_rules: tuple[tuple[str, str], ...]
    """Empty; in a resharded checkpoint, the rules of `shardkit.save`."""
    hub_names: str | None = None
    """"unknown" in a resharded checkpoint whose names on the Hub could not be determined; otherwise None."""
    derived: tuple[Derived, ...]
    """Tensors computed from others of the source, by names without `root`; their `source` is their own name."""
    vocab_size: int | None = None
    """reshard only: the vocabulary size that `shardkit.save` recorded, or None."""
    dequantized: str | None = None
    """Quantisation of weights in the source that were dequantised, such as "fp8", or None."""
    osft: Osft | None = None
    """The weights that became factors, or None."""
    dtype: str
    """As asked for: "keep", "bf16", "fp16" or "fp32"."""
    dtype_rules: tuple[tuple[str, str], ...] | None = None
    """Requested (glob, dtype) rules for some tensors, or None."""
    optimizer_dtype: str | None = None
    """The dtype for the optimizer's state; reshard only."""
    digest: str
    """Either "crc32" or "none"."""
    omitted: tuple[Omitted, ...]
    objects: tuple[str, ...] | None = None
    """Names of byte entries; reshard only."""
    tensors: Mapping[str, ShardedTensor]
    """By name, in file order."""
    files: tuple[ShardFile, ...]
    others: tuple[File, ...] | None = None
    """Files of a trainer next to the shards, or None."""
    metadata: File | None = None
    """`.metadata`; None until it is written."""
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensors:
    """Tensors with equal placements on the same mesh."""

    placements: tuple[PlacementText, ...]
    """Placement on each axis of the mesh."""
    mesh: int | None = None
    """Index into `meshes`; None if it is the mesh of `axes`."""
    names: tuple[str, ...]
    """As they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLayout:
    """The placement of a training state on the ranks that saved it."""

    axes: tuple[RecordedAxis, ...]
    """Axes of the device mesh, outermost first."""
    ep: int | None = None
    """Number of ranks that hold distinct experts; None without expert parallelism."""
    meshes: tuple[MeshView, ...] | None = None
    """Further meshes over the same ranks; None if there are none."""
    placed: tuple[PlacedTensors, ...]
    """All tensors on a mesh. Other tensors were replicated on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState(_Referable):
    """A training state that `shardkit.save` wrote."""

    kind: ClassVar[str] = "checkpoint"
    tool: Tool
    model_class: str
    world_size: int
    meshes: tuple[str, ...]
    """The meshes of parameters: axis names and sizes."""
    units: tuple[Unit, ...]
    """The root, and the modules that `fully_shard` was applied to."""
    layout: SavedLayout | None = None
    """None if no mesh had all ranks in order, as with stages; early versions did not record it."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names that share records; the first is that of the Hub's files, if known."""
    key_rules: tuple[tuple[str, str], ...] | None = None
    """Prefixes of the model's names and their replacements on the Hub; None if unknown."""
    derived: tuple[Derived, ...] | None = None
    """Tensors of the model that are computed from those of the Hub, or None."""
    vocab_size: int | None = None
    """Vocabulary size in the model's config, or None."""
    metadata: File | None = None
    """`.metadata`; early versions did not list it."""
    files: tuple[SavedFile, ...]
    others: tuple[File, ...] | None = None
    """Files of a Hub model next to the shards, or None."""
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel(_Referable):
    """A Hub model that consolidate wrote."""

    kind: ClassVar[str] = "hub"
    tool: Tool
    layout: str
    """Format of the source checkpoint: "dcp", "lightning", ..."""
    writer: str
    """Writer of the source, for display."""
    weights: str
    """The value of `--weights`."""
    holds: str
    """"model", "adapter" or "merged"."""
    root: str
    """Dotted path of the model in the checkpoint; "" for the top."""
    key_rules: tuple[tuple[str | int, ...], ...]
    """Parts removed from names, or renamed, with the number of names."""
    ties: tuple[tuple[str, ...], ...]
    """Pairs of a stored name and an equal one that is left out."""
    dequantized: str | None = None
    """As in a presharded directory."""
    dtype: str
    """As asked for: "keep", "base", "bf16", "fp16" or "fp32"."""
    dtype_rules: tuple[tuple[str, str], ...] | None = None
    """As in a presharded directory."""
    digest: str
    tensors: Mapping[str, HubTensor]
    files: tuple[File, ...]
    """The weight files."""
    others: tuple[File, ...] | None = None
    """All other files except the manifest; early versions did not list them."""
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList(_Referable):
    """The files of any checkpoint, without information on their origin."""

    kind: ClassVar[str] = "files"
    tool: Tool
    layout: str | None = None
    """The format of the checkpoint: "hub", "dcp", "lightning", ... None from reshard and preshard."""
    writer: str | None = None
    folders: tuple[FileName, ...] | None = None
    """Folders with their own manifests; reshard and preshard only."""
    files: tuple[ListedFile, ...]
    unlisted: tuple[str, ...]
    """Symbolic links, pipes, sockets and devices."""
    tensors: Mapping[str, ListedTensor] | None = None
    """None if shardkit does not support the weights."""
    derived: tuple[Derived, ...] | None = None
    """In preshard's output for a trainer, the tensors that code of transformers computed, or None."""
    crc32: Crc32 | None = None


Manifest = Presharded | SavedState | HubModel | FileList
DescribedTensor = ShardedTensor | HubTensor | ListedTensor
KINDS: tuple[type[Manifest], ...] = (Presharded, SavedState, HubModel, FileList)


def sidecar_of(path: str) -> str:
    """Return the path of the manifest next to a checkpoint: `run/last.ckpt.shardkit.json`.

    For a bucket or a repo it is inside: a sibling name would be another bucket or repo.
    """
    place = storage.absolute(root_of(path))
    return f"{place}/{_SIDECAR_ENDING}" if stores.is_whole(place) else place + _SIDECAR_ENDING


def all_files(manifest: Manifest) -> tuple[SavedFile, ...]:
    """Return all files of a manifest, those other than weights last."""
    other_files = None if isinstance(manifest, FileList) else manifest.others
    return (*manifest.files, *(other_files or ()))


def every_file(manifest: Manifest) -> Iterator[SavedFile]:
    """Yield all files of a manifest, each followed by its chunk list, and `.metadata`."""
    for file in all_files(manifest):
        yield file
        if isinstance(file, ShardFile):
            yield file.chunks
    if isinstance(manifest, (Presharded, SavedState)) and manifest.metadata is not None:
        yield manifest.metadata


def follows_links(manifest: Manifest) -> bool:
    """True if links count as files in the described directory, as in the Hub's cache."""
    return isinstance(manifest, HubModel) or (isinstance(manifest, FileList) and manifest.layout == "hub")


def crc_of(file: SavedFile) -> int | None:
    """Return the recorded CRC-32 of a file, or None."""
    return file.crc32 if isinstance(file, File) else None


def all_tensors(manifest: Manifest) -> Mapping[str, DescribedTensor]:
    """Return all tensors of a manifest, by name."""
    return (None if isinstance(manifest, SavedState) else manifest.tensors) or {}


def describe_bytes(name: str, data: bytes, *, digest: bool, sha256: bool) -> ListedFile:
    """Return the manifest entry for a file, given its content; `digest` and `sha256` select the digests."""
    crc = int(crc32(data)) if digest else None
    return ListedFile(
        name=name, size=len(data), crc32=crc, sha256=hashlib.sha256(data).hexdigest() if sha256 else None
    )


def format_of(manifest: Manifest) -> int:
    """Return the lowest format that can express a manifest, so that older versions can read it if possible."""
    if not isinstance(manifest, Presharded):
        return 1
    if manifest.osft is not None:  # older versions would mistake factors for weights
        return 3
    is_plain = all(axis.role in ("replicate", "shard") for axis in manifest.mesh.axes)
    is_boxed = not any(
        text.startswith("SS") for tensor in manifest.tensors.values() for text in tensor.placements
    )
    is_old = (
        is_plain
        and is_boxed
        and manifest.mesh.ep is None
        and manifest.mesh.pp is None
        and manifest.meshes is None
        and not manifest.derived
        and manifest.root is None
    )
    return 1 if is_old else 2


def to_json(record: Any) -> dict[str, Any]:
    """Return a record of this module as a dict with nested records unchanged, for use as `default` of `json.dumps`."""
    kind: Any = type(record)
    head, keys, values_of, optional = _spelling(kind)
    content = {**head, **dict(zip(keys, values_of(record), strict=True))}
    if kind in KINDS:
        content["format"] = format_of(record)
    for key in optional:
        if content[key] is None:
            del content[key]
    return content


@cache
def _spelling(kind: Any) -> tuple[dict[str, object], list[str], Callable[[Any], tuple[Any, ...]], list[str]]:
    """Return the first items of a type's JSON, its keys, a getter of their values, and the optional keys."""
    head: dict[str, object] = {"format": 1} if kind in KINDS else {}
    if kind in KINDS and kind is not Presharded:
        head["kind"] = kind.kind
    items = fields(kind)
    names = [item.name for item in items]
    values_of: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    if len(names) == 1:  # attrgetter then returns the value itself
        values_of = partial(_values, names)
    return (
        head,
        [_key(item) for item in items],
        values_of,
        [_key(item) for item in items if item.default is None],
    )


def _values(names: list[str], record: Any) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in names)


@uncollected()
def dump(manifest: Manifest) -> bytes:
    """Return a manifest as bytes, including its own digest."""
    # Indented JSON is written by Python code; without indents C code does it, twice as fast.
    return sign(json.loads(json.dumps(to_json(manifest), default=to_json)))


def sign(content: Mapping[str, Any]) -> bytes:
    """Return the JSON of a manifest as bytes, with its digest as the last key."""
    body = {key: value for key, value in content.items() if key != "crc32"}
    return encode({**body, "crc32": _digest(body)})


def encode(content: Mapping[str, Any]) -> bytes:
    """Return JSON as the bytes that shardkit writes."""
    return json.dumps(content, indent=1, ensure_ascii=True, default=to_json).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> int:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=to_json)
    return int(crc32(canonical.encode()))


_parsed: WeakValueDictionary[FileStamp, Manifest] = WeakValueDictionary()
"""Manifests in use: parsing one of many tensors takes a second, and a verb uses it several times."""


def read(directory: str) -> Manifest | None:
    """Return the manifest of a directory, checked against its own digest, or None.

    Raises:
        SourceError, IntegrityError, ResourceError: as for `read_file`; or it is a link that leaves the directory.
    """
    if not storage.lexists(os.path.join(directory, NAME)):
        return None
    return read_file(locate(directory, NAME), NAME)


def read_file(
    path: str, name: str, *, check: Callable[[bytes, Mapping[str, Any]], object] | None = None
) -> Manifest:
    """Return the manifest in a file. It is cached while it is referenced and the file does not change.

    Args:
        path: of the file.
        name: for messages.
        check: receives the bytes and the JSON before decoding; the file is then parsed even if cached.

    Raises:
        SourceError: the file is missing, not regular, not a manifest, or of a newer version.
        IntegrityError: the file was modified.
        ResourceError: the file cannot be read.
    """
    stamp = None
    with contextlib.suppress(OSError):  # reading reports the error
        stamp = FileStamp.of(storage.stat(path))
    manifest = _parsed.get(stamp) if stamp is not None and check is None else None
    if manifest is None:
        data = read_small(path, name, MAX_BYTES)
        content = load(data, name)
        if check is not None:
            check(data, content)
        del data
        manifest = decode(content, name)
        if stamp is not None:
            _parsed[stamp] = manifest
    return manifest


def read_bytes(directory: str) -> bytes:
    """Return the bytes of a directory's manifest, unparsed. It must not be a link that leaves the directory.

    Raises:
        SourceError: the manifest does not exist, or is not a regular file.
        ResourceError: the manifest cannot be read.
    """
    return read_small(locate(directory, NAME), NAME, MAX_BYTES)


def is_manifest(path: str) -> bool:
    """True for a file that has the name or the first bytes of a manifest, damaged or not; only these are read.

    Raises:
        ResourceError: the file cannot be read.
    """
    if os.path.basename(path) == NAME or path.endswith(_SIDECAR_ENDING):
        return True
    try:
        with open_regular(path, path) as (fd, size):
            head = read_exactly(fd, 0, min(size, 64), path)
    except SourceError:
        return False
    return re.match(rb'\{\s*"format":\s*[0-9]', head) is not None


def lists_files(directory: str) -> bool:
    """True if the manifest of a directory is a `FileList`, from the kind in its first bytes; only these are read."""
    try:
        with open_regular(locate(directory, NAME), NAME) as (fd, size):
            head = read_exactly(fd, 0, min(size, 64), NAME)
    except ShardkitError:  # reading the manifest will report the error
        return False
    return f'"kind": "{FileList.kind}"'.encode() in head


def parse(data: bytes, name: str) -> Manifest:
    """Return a manifest from its bytes, checked against its own digest.

    Args:
        data: the whole file.
        name: for messages.

    Raises:
        SourceError, IntegrityError: as for `read`.
    """
    return decode(load(data, name), name)


@uncollected()
def load(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON of a manifest, checked against its own digest; arguments as for `parse`.

    Raises:
        SourceError: the data are not a manifest, or of a newer version.
        IntegrityError: the manifest was modified.
    """
    shown = escape(name)
    try:
        content = json.loads(data, parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{shown} is not JSON: {escape(str(error))}") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise SourceError(f"{shown} is not a shardkit manifest")
    if content["format"] > FORMAT:
        raise SourceError(
            f"{shown} has format {content['format']}, this shardkit knows up to {FORMAT}",
            hint="update shardkit",
        )
    body = {key: value for key, value in content.items() if key != "crc32"}
    try:
        digest = _digest(body)
    except RecursionError:
        raise IntegrityError(f"{shown} is nested too deeply for a manifest") from None
    if content.get("crc32") != digest:
        raise IntegrityError(f"{shown} has been changed: its own digest does not match")
    return content


@uncollected()
def decode(content: dict[str, Any], name: str) -> Manifest:
    """Return a manifest from its JSON.

    Args:
        content: from `load`; consumed while decoding, to save memory.
        name: for messages.

    Raises:
        SourceError: fields are missing or of a wrong type; lists all.
    """
    shown, kind = escape(name), content.get("kind", Presharded.kind)
    kinds: dict[str, Any] = {cls.kind: cls for cls in KINDS}
    if not isinstance(kind, str) or kind not in kinds:
        raise SourceError(
            f"{shown}: kind: expected one of {', '.join(kinds)}, found {_value_text(kind)}",
            hint="update shardkit",
        )
    try:
        manifest: Manifest = _decoder(kinds[kind])(content)
    except _WrongFields as wrong:
        problems = [problem.removeprefix(".") for problem in wrong.problems]
        what = problems[0] if len(problems) == 1 else count(len(problems), "field")
        raise SourceError(
            f"{shown} does not have the fields of its format: {what}",
            problems=problems,
            hint=f"the file was written by something else; {page('format.md')} describes it",
        ) from None
    return manifest


class _WrongFields(Exception):
    """Wrong fields; each problem begins with its path in the decoded value."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)


_Key = TypeVar("_Key")
_Decoder = Callable[[Any], Any]
"""Decodes a value of one type from JSON, or raises `_WrongFields`."""


def _key(item: dataclasses.Field[Any]) -> str:
    return str(item.metadata.get("key", item.name))


@cache
def _decoder(hint: Any) -> _Decoder:
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _records(hint)
    if origin is Annotated:
        kind, check, what = arguments
        if kind is float:
            return _scalars({int, float}, what, partial(_is_between, *check))
        is_good = check.fullmatch if isinstance(check, re.Pattern) else check.__contains__
        return _scalars({kind}, what, is_good)
    if origin is Mapping:
        return _mappings(_decoder(arguments[1]))
    if origin is tuple and arguments[-1] is Ellipsis:
        return _lists(_decoder(arguments[0]))
    if origin is tuple:
        return _rows([_decoder(argument) for argument in arguments])
    if NoneType in arguments:
        (inner,) = {*arguments} - {NoneType}
        return _optional(_decoder(inner))
    return _SCALARS[hint]


def _records(kind: Any) -> _Decoder:
    hints = get_type_hints(kind, include_extras=True)
    parts = [
        (_key(item), _decoder(hints[item.name]), MISSING if item.default is MISSING else None)
        for item in fields(kind)
    ]
    # Slots are set directly: the `__init__` of a frozen class would look up each of them by name, for each record.
    setters = [getattr(kind, item.name).__set__ for item in fields(kind)]

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expectation_error("an object", value)
        record, get = object.__new__(kind), value.get
        decoded = _decode_all(((key, part, get(key, absent)) for key, part, absent in parts), ".{}".format)
        for set_field, (_, item) in zip(setters, decoded, strict=True):
            set_field(record, item)
        return record

    return decode


def _rows(decoders: list[_Decoder]) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) != len(decoders):
            raise _expectation_error(f"a list of {len(decoders)}", value)
        items = zip(range(len(value)), decoders, value, strict=True)
        return tuple(item for _, item in _decode_all(items, _at_index))

    return decode


def _lists(decode_item: _Decoder) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _expectation_error("a list", value)
        items = ((index, decode_item, item) for index, item in enumerate(value))
        return tuple(item for _, item in _decode_all(items, _at_index))

    return decode


def _mappings(decode_item: _Decoder) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expectation_error("an object", value)
        for name, item in _decode_all(((name, decode_item, value[name]) for name in value), _at_name):
            value[name] = item  # in place, to save memory
        return value

    return decode


def _decode_all(
    items: Iterable[tuple[_Key, _Decoder, Any]], place: Callable[[_Key], str]
) -> Iterator[tuple[_Key, Any]]:
    """Yield each key and its decoded value; raise all problems at the end, up to a limit.

    Args:
        items: (key, decoder, value) of each.
        place: formats a key as the prefix of its problems.
    """
    problems = list[str]()
    for key, decode, value in items:
        try:
            yield key, decode(value)
        except _WrongFields as wrong:
            problems += (place(key) + problem for problem in wrong.problems)
            if len(problems) >= _MAX_PROBLEMS:
                break
    if problems:
        raise _WrongFields(problems)


def _optional(decode_given: _Decoder) -> _Decoder:
    return lambda value: None if value is None else decode_given(value)


def _scalars(kinds: set[type], what: str, is_good: Callable[[Any], object] | None = None) -> _Decoder:
    def decode(value: Any) -> Any:
        # By exact type: True is an int to isinstance.
        if type(value) not in kinds or (is_good and not is_good(value)):
            raise _expectation_error(what, value)
        return value

    return decode


def _anything(value: Any) -> Any:
    if value is MISSING:
        raise _expectation_error("a value", value)
    return value


def _is_name_or_count(value: str | int) -> bool:
    return isinstance(value, str) or value in _NUMBERS


def _is_between(least: float, most: float, value: float) -> bool:
    return least <= value <= most


_SCALARS: Mapping[Any, _Decoder] = {
    int: _scalars({int}, "an integer from 0 on", _NUMBERS.__contains__),
    str: _scalars({str}, "text"),
    bool: _scalars({bool}, "true or false"),
    str | int: _scalars({str, int}, "an integer from 0 on", _is_name_or_count),
    int | float: _scalars({int, float}, "a number from 0 on", partial(_is_between, 0.0, sys.float_info.max)),
    object: _anything,
}


def _at_name(name: str) -> str:
    return f'["{escape(name[:_MAX_SHOWN])}"]'


def _at_index(index: int) -> str:
    return f"[{index}]"


def _expectation_error(what: str, value: object) -> _WrongFields:
    if value is MISSING:
        return _WrongFields([": it is missing"])
    return _WrongFields([f": expected {what}, found {_value_text(value)}"])


def _value_text(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value)
    return escape(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
