"""`shardkit.json`: what was written, from what, and how to check it.

docs/format.md is the contract, and the types here say the same. A field is a key; fields stand in the order of the
file; an optional field that is None is left out. A manifest is parsed once, here, with errors that name the field.

The manifest has the digests of `.metadata`, of every shard file and its chunk list, of every tensor, and of itself:
`crc32` is that of the manifest's own JSON without that key, written with sorted keys and no blanks.

A manifest that lies beside a directory, not in it, has the directory's name and `.shardkit.json`.
"""

# Annotations here are objects, not text: `get_type_hints` would compile text, while a file is parsed.
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
"""The newest format. A manifest that says nothing that format 1 cannot say has that; one with `osft` has this."""
MAX_BYTES = 1 << 30
_SIDECAR_ENDING = ".shardkit.json"
_NUMBERS = range(1 << 62)
_MAX_PROBLEMS = 100
_MAX_SHOWN = 200  # characters of a name or value

# An `int` is a whole number from 0 on, below 2^62. What else a value has to be stands beside its type.
Crc32 = Annotated[int, range(1 << 32), "a CRC-32"]
Sha256 = Annotated[str, re.compile(r"[0-9a-f]{64}"), "a sha256 in hex"]
NonNegative = Annotated[float, (0.0, sys.float_info.max), "a number from 0 on"]
DtypeName = Annotated[str, frozenset(BY_NAME), "a dtype that shardkit knows"]
# No "", "." or "..", and no character that a file's name cannot have. Of the surrogates, Python gives U+DC80 to U+DCFF
# to bytes that are not UTF-8.
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
    """Who wrote a manifest."""

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
    """None if it was not taken."""
    sha256: Sha256 | None = None
    """In hex; None if it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile(File):
    """A shard file and its chunk list."""

    name: PlainName
    chunks: File


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile(File):
    """A file that somebody else wrote."""

    extents: tuple[tuple[int, int, Crc32], ...] | None = None
    """(first byte, bytes, CRC-32) of parts of tensors that have no checksum in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSourceFile:
    """A file that weights were read from."""

    name: str
    size_bytes: int
    crc32: Crc32 | None = None
    """Of the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSource:
    """The identity of the weights that were read."""

    repo: str | None = None
    """Of the Hub; None for local files."""
    commit: str | None = None
    """Of that repo."""
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
    """The device mesh that shards were written for."""

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
    """(size, stride) in ranks of what the axis is made of, outermost first: one, unless it is flattened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshView:
    """Another mesh over the ranks of the first, such as that of experts."""

    axes: tuple[ViewAxis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWith:
    """The versions of the packages whose code decided a layout."""

    torch: str
    transformers: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOrigin:
    """How the layout came to be."""

    origin: str
    """"traced" from the real model or "declared" from names and shapes."""
    policy: str
    """The wrap policy, as it was asked for."""
    traced_with: TracedWith | None = None
    """None if it was not traced, or by an early version, which did not note it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that is sharded as one."""

    path: str
    """Such as "model.layers.0"; "" for the root."""
    class_name: str | None = field(metadata={"key": "class"})
    """None if no model was at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Omitted:
    """A tensor of the source that is not in the output."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """What a tensor was in the source."""

    name: str
    dtype: DtypeName


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedTensor:
    """A tensor that is cut over a mesh."""

    dtype: DtypeName
    shape: tuple[int, ...]
    """Of the whole tensor, elements."""
    placements: tuple[PlacementText, ...]
    """One for each axis of its mesh."""
    mesh: int | None = None
    """Index into `meshes`; None if it lies on the first mesh, `mesh`."""
    stage: int | None = None
    """The pipeline stage that holds it."""
    unit: int
    """Index into `units`."""
    buffer: bool
    source: SourceTensor
    crc32: Crc32 | None = None
    """Of the whole tensor's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A tensor that is made of several of the source, or of one in another form."""

    name: str
    made_of: object
    """An expression of stored tensors, as `keys.expressions.to_json` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftModule:
    """A linear layer whose weight is stored as factors."""

    rank: int
    """Directions that are frozen."""
    shape: tuple[int, ...]
    """Of the dense weight."""
    algorithm: str | None = None
    """How the factors were computed: "gram", "svd" or "svd fp32"."""
    error: NonNegative | None = None
    """Frobenius norm of what folding them misses, to the weight's; the norm itself if the weight is zero. Estimated."""
    orthogonality: NonNegative | None = None
    """Largest absolute value that U'U - I and VV' - I, over frozen and trained directions, make of vectors of ones and
    minus ones."""
    crc32: Crc32 | None = None
    """Of the dense weight that the factors were computed of, in the source's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Osft:
    """How weights became factors, of which most are frozen; as asked for, and what came of it."""

    ratio: NonNegative
    """Share of each target's directions that is trained."""
    targets: tuple[str, ...]
    """"auto" or globs."""
    ranks: Mapping[str, int | float]
    """By glob, instead of `ratio`: directions that are frozen, or a share that is trained."""
    svd: str
    """"exact" or "fp32"."""
    dense_dtype: DtypeName
    """Of most of the other weights. Factors are float32."""
    modules: Mapping[str, OsftModule]
    """By path, without `root`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubTensor:
    """A tensor of a Hub model that was made from a checkpoint."""

    dtype: DtypeName
    shape: tuple[int, ...]
    source: SourceTensor
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedTensor:
    """A tensor of a checkpoint that somebody else wrote, by its stored name."""

    dtype: DtypeName
    shape: tuple[int, ...]
    crc32: Crc32 | None = None
    """None if one pass over the files did not give it."""


class _Referable:
    """What slots keep weak references to: `weakref_slot` of dataclasses is of Python 3.11."""

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
    """What stands before the model's own names for the sake of a trainer: "model."; None if nothing does."""
    units: tuple[Unit, ...]
    """The root first, then in module order."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names that are one parameter; the first has the records."""
    key_rules: tuple[tuple[str, str], ...]
    """Empty; in a resharded checkpoint those of `shardkit.save`."""
    hub_names: str | None = None
    """"unknown" in a resharded checkpoint of which nothing told what its tensors are on the Hub; None where this manifest
    tells it."""
    derived: tuple[Derived, ...]
    """Tensors that are made of others of the source, by their names without `root`; their `source` is their own name."""
    vocab_size: int | None = None
    """Of reshard alone: what `shardkit.save` recorded of the vocabulary; None if it did not."""
    dequantized: str | None = None
    """How weights are quantised in the source, such as "fp8", where plain ones were made of them; else None."""
    osft: Osft | None = None
    """What became factors; None if nothing did."""
    dtype: str
    """As asked for: "keep", "bf16", "fp16" or "fp32"."""
    dtype_rules: tuple[tuple[str, str], ...] | None = None
    """(glob, dtype) of other dtypes for some tensors, as asked for; None if there are none."""
    optimizer_dtype: str | None = None
    """The same for the optimizer's state; of reshard alone."""
    digest: str
    """Either "crc32" or "none"."""
    omitted: tuple[Omitted, ...]
    objects: tuple[str, ...] | None = None
    """Names of byte entries; of reshard alone."""
    tensors: Mapping[str, ShardedTensor]
    """By name, in file order."""
    files: tuple[ShardFile, ...]
    others: tuple[File, ...] | None = None
    """Files of a trainer that lie beside the shards; None if there are none."""
    metadata: File | None = None
    """`.metadata`; None until it is written."""
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTensors:
    """Tensors that are cut alike over the same mesh."""

    placements: tuple[PlacementText, ...]
    """One for each axis of the mesh."""
    mesh: int | None = None
    """Index into `meshes`; None if it is the mesh of `axes`."""
    names: tuple[str, ...]
    """As they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedLayout:
    """How a training state lay on the ranks that saved it."""

    axes: tuple[RecordedAxis, ...]
    """Of the device mesh, outermost first."""
    ep: int | None = None
    """Number of ranks that hold distinct experts; None without expert parallelism."""
    meshes: tuple[MeshView, ...] | None = None
    """Further meshes over the same ranks; None if there are none."""
    placed: tuple[PlacedTensors, ...]
    """Every tensor that lay on a mesh. All ranks had copies of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState(_Referable):
    """A training state that `shardkit.save` wrote."""

    kind: ClassVar[str] = "checkpoint"
    tool: Tool
    model_class: str
    world_size: int
    meshes: tuple[str, ...]
    """Every mesh that parameters lie on: axis names and sizes."""
    units: tuple[Unit, ...]
    """The root, and modules that `fully_shard` was called on."""
    layout: SavedLayout | None = None
    """None if no mesh had all ranks in their order, as of stages; early versions did not record it."""
    ties: tuple[tuple[str, ...], ...]
    """Groups of names that share records; first the name in the Hub's files, where that is known."""
    key_rules: tuple[tuple[str, str], ...] | None = None
    """Rules that turn the model's names into the Hub's: a prefix and its replacement. None if that is not known."""
    derived: tuple[Derived, ...] | None = None
    """The model's tensors that are made of others of the Hub's; None if there are none."""
    vocab_size: int | None = None
    """Rows of the vocabulary, as the model's config counts them; None if it has none."""
    metadata: File | None = None
    """`.metadata`; early versions did not list it."""
    files: tuple[SavedFile, ...]
    others: tuple[File, ...] | None = None
    """Files of a Hub model that lie beside the shards; None if there are none."""
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel(_Referable):
    """A Hub model that consolidate wrote."""

    kind: ClassVar[str] = "hub"
    tool: Tool
    layout: str
    """The format of the checkpoint that it was made from: "dcp", "lightning", ..."""
    writer: str
    """Who wrote that, for people."""
    weights: str
    """The value of `--weights`."""
    holds: str
    """"model", "adapter" or "merged"."""
    root: str
    """What was taken as the model's beginning, dotted; "" for the top."""
    key_rules: tuple[tuple[str | int, ...], ...]
    """What was taken out of names or renamed, with the number of names."""
    ties: tuple[tuple[str, ...], ...]
    """Pairs of the name that is kept and its equal that is left out."""
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
    """Every other file but the manifest; early versions did not list them."""
    crc32: Crc32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileList(_Referable):
    """The files of a checkpoint, whoever wrote it; says nothing of how they were made."""

    kind: ClassVar[str] = "files"
    tool: Tool
    layout: str | None = None
    """The format of the checkpoint: "hub", "dcp", "lightning", ... None from reshard and preshard."""
    writer: str | None = None
    folders: tuple[FileName, ...] | None = None
    """Folders with manifests of their own; of reshard and preshard alone."""
    files: tuple[ListedFile, ...]
    unlisted: tuple[str, ...]
    """Symbolic links, pipes, sockets and devices."""
    tensors: Mapping[str, ListedTensor] | None = None
    """None if shardkit cannot take the weights."""
    derived: tuple[Derived, ...] | None = None
    """Of what preshard wrote in a trainer's form, what transformers' own code made; None if there is nothing."""
    crc32: Crc32 | None = None


Manifest = Presharded | SavedState | HubModel | FileList
DescribedTensor = ShardedTensor | HubTensor | ListedTensor
KINDS: tuple[type[Manifest], ...] = (Presharded, SavedState, HubModel, FileList)


def sidecar_of(path: str) -> str:
    """Return where the manifest of a checkpoint lies that is beside it: `run/last.ckpt.shardkit.json`.

    Nothing lies beside a bucket or a repo: what it would be called is another one. That manifest is in it.
    """
    place = storage.absolute(root_of(path))
    return f"{place}/{_SIDECAR_ENDING}" if stores.is_whole(place) else place + _SIDECAR_ENDING


def all_files(manifest: Manifest) -> tuple[SavedFile, ...]:
    """Return every file that a manifest lists, those beside the weights last."""
    other_files = None if isinstance(manifest, FileList) else manifest.others
    return (*manifest.files, *(other_files or ()))


def every_file(manifest: Manifest) -> Iterator[SavedFile]:
    """Yield the same, and what describes them: chunk lists, each after its file, and `.metadata`."""
    for file in all_files(manifest):
        yield file
        if isinstance(file, ShardFile):
            yield file.chunks
    if isinstance(manifest, (Presharded, SavedState)) and manifest.metadata is not None:
        yield manifest.metadata


def follows_links(manifest: Manifest) -> bool:
    """True if links count as files in what a manifest describes, as in the Hub's cache."""
    return isinstance(manifest, HubModel) or (isinstance(manifest, FileList) and manifest.layout == "hub")


def crc_of(file: SavedFile) -> int | None:
    """Return the recorded CRC-32 of a file; None if there is none."""
    return file.crc32 if isinstance(file, File) else None


def all_tensors(manifest: Manifest) -> Mapping[str, DescribedTensor]:
    """Return every tensor that a manifest lists, by name."""
    return (None if isinstance(manifest, SavedState) else manifest.tensors) or {}


def describe_bytes(name: str, data: bytes, *, digest: bool, sha256: bool) -> ListedFile:
    """Return the entry of a manifest for a file whose content is at hand; `digest` and `sha256` choose the digests."""
    crc = int(crc32(data)) if digest else None
    return ListedFile(
        name=name, size=len(data), crc32=crc, sha256=hashlib.sha256(data).hexdigest() if sha256 else None
    )


def format_of(manifest: Manifest) -> int:
    """Return the lowest format that can express a manifest, so that older readers read what they understand."""
    if not isinstance(manifest, Presharded):
        return 1
    if manifest.osft is not None:  # whoever does not know it would take factors for weights
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
    """Return a record of this module as JSON has it, its parts still records: what `json.dumps` takes as `default`."""
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
    """Return what a type's JSON begins with, the keys, what takes their values, and which keys may be left out."""
    head: dict[str, object] = {"format": 1} if kind in KINDS else {}
    if kind in KINDS and kind is not Presharded:
        head["kind"] = kind.kind
    items = fields(kind)
    names = [item.name for item in items]
    values_of: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    if len(names) == 1:  # then attrgetter gives the value itself
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
    """Return a manifest as bytes, with its own digest in it."""
    # Text with indents is made in Python, which would ask for each record; without them C does it, at twice the speed.
    return sign(json.loads(json.dumps(to_json(manifest), default=to_json)))


def sign(content: Mapping[str, Any]) -> bytes:
    """Return the JSON of a manifest as bytes, with its digest as the last key."""
    body = {key: value for key, value in content.items() if key != "crc32"}
    return encode({**body, "crc32": _digest(body)})


def encode(content: Mapping[str, Any]) -> bytes:
    """Return the bytes that shardkit writes for some JSON."""
    return json.dumps(content, indent=1, ensure_ascii=True, default=to_json).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> int:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=to_json)
    return int(crc32(canonical.encode()))


_parsed: WeakValueDictionary[FileStamp, Manifest] = WeakValueDictionary()
"""Manifests that somebody has: that of many tensors takes a second to parse, and a verb has several uses for it."""


def read(directory: str) -> Manifest | None:
    """Return the manifest of a directory, checked against its own digest; None if there is none.

    Raises:
        SourceError, IntegrityError, ResourceError: as `read_file`; or a link leads out of the directory.
    """
    if not storage.lexists(os.path.join(directory, NAME)):
        return None
    return read_file(locate(directory, NAME), NAME)


def read_file(
    path: str, name: str, *, check: Callable[[bytes, Mapping[str, Any]], object] | None = None
) -> Manifest:
    """Return the manifest in a file. It is parsed once for as long as anybody has it and the file does not change.

    Args:
        path: of the file.
        name: how to call it in messages.
        check: looks at the bytes, and at the JSON in them before it is used up; the file is parsed for it.

    Raises:
        SourceError: it is missing, not a manifest, not a regular file, or of a version that this shardkit does not know.
        IntegrityError: it is not what was written.
        ResourceError: it may not be read.
    """
    stamp = None
    with contextlib.suppress(OSError):  # reading says what is wrong
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
    """Return the manifest of a directory as it lies there; a link must not lead out of the directory.

    Raises:
        SourceError: there is none, or it is no regular file.
        ResourceError: it may not be read.
    """
    return read_small(locate(directory, NAME), NAME, MAX_BYTES)


def is_manifest(path: str) -> bool:
    """True for a file that has the name of a manifest or begins as one, damaged or not; only the beginning is read.

    Raises:
        ResourceError: it may not be read.
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
    """True if the manifest of a directory is a `FileList`. The kind stands in its first bytes; only they are read."""
    try:
        with open_regular(locate(directory, NAME), NAME) as (fd, size):
            head = read_exactly(fd, 0, min(size, 64), NAME)
    except ShardkitError:  # whoever needs the manifest will say that it cannot be read
        return False
    return f'"kind": "{FileList.kind}"'.encode() in head


def parse(data: bytes, name: str) -> Manifest:
    """Return a manifest from its bytes, checked against its own digest.

    Args:
        data: all of the file.
        name: how to call it in messages.

    Raises:
        SourceError, IntegrityError: as `read`.
    """
    return decode(load(data, name), name)


@uncollected()
def load(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON of a manifest, checked against its own digest; arguments as for `parse`.

    Raises:
        SourceError: it is not a manifest, or of a version that this shardkit does not know.
        IntegrityError: it is not what was written.
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
        content: as `load` gives it; it is used up, so that memory holds each part once.
        name: how to call it in messages.

    Raises:
        SourceError: naming each field that is missing or of another type.
    """
    shown, kind = escape(name), content.get("kind", Presharded.kind)
    kinds: dict[str, Any] = {cls.kind: cls for cls in KINDS}
    if not isinstance(kind, str) or kind not in kinds:
        raise SourceError(
            f"{shown}: kind: expected one of {', '.join(kinds)}, found {_found(kind)}", hint="update shardkit"
        )
    try:
        manifest: Manifest = _decoder(kinds[kind])(content)
    except _WrongFields as wrong:
        problems = [problem.removeprefix(".") for problem in wrong.problems]
        what = problems[0] if len(problems) == 1 else count(len(problems), "field")
        raise SourceError(
            f"{shown} lacks what its format has: {what}",
            problems=problems,
            hint=f"the file was written by something else; {page('format.md')} describes it",
        ) from None
    return manifest


class _WrongFields(Exception):
    """Wrong fields; each problem begins with its place below the value that was decoded."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)


_Key = TypeVar("_Key")
_Decoder = Callable[[Any], Any]
"""Makes a value of one type from JSON, or raises `_WrongFields`."""


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
    # Slots are set directly: the `__init__` of a frozen class would look each of them up by name, for each record.
    setters = [getattr(kind, item.name).__set__ for item in fields(kind)]

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected("an object", value)
        record, get = object.__new__(kind), value.get
        decoded = _decode_all(((key, part, get(key, absent)) for key, part, absent in parts), ".{}".format)
        for set_field, (_, item) in zip(setters, decoded, strict=True):
            set_field(record, item)
        return record

    return decode


def _rows(decoders: list[_Decoder]) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) != len(decoders):
            raise _expected(f"a list of {len(decoders)}", value)
        items = zip(range(len(value)), decoders, value, strict=True)
        return tuple(item for _, item in _decode_all(items, _at_index))

    return decode


def _lists(decode_item: _Decoder) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _expected("a list", value)
        items = ((index, decode_item, item) for index, item in enumerate(value))
        return tuple(item for _, item in _decode_all(items, _at_index))

    return decode


def _mappings(decode_item: _Decoder) -> _Decoder:
    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _expected("an object", value)
        for name, item in _decode_all(((name, decode_item, value[name]) for name in value), _at_name):
            value[name] = item  # in place: memory holds each tensor only once
        return value

    return decode


def _decode_all(
    items: Iterable[tuple[_Key, _Decoder, Any]], place: Callable[[_Key], str]
) -> Iterator[tuple[_Key, Any]]:
    """Yield each key and its decoded value; raise all that is wrong at the end, up to a limit.

    Args:
        items: (key, decoder, value) of each.
        place: what stands before a problem of the value with that key.
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
            raise _expected(what, value)
        return value

    return decode


def _anything(value: Any) -> Any:
    if value is MISSING:
        raise _expected("a value", value)
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


def _expected(what: str, value: object) -> _WrongFields:
    if value is MISSING:
        return _WrongFields([": it is missing"])
    return _WrongFields([f": expected {what}, found {_found(value)}"])


def _found(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = json.dumps(value)
    return escape(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
