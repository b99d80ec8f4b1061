"""The classes that a DCP `.metadata` may name, as inert records that `shardkit.pickles` makes in their place.

Each class here replaces the torch class in its docstring. Chunks go into columns as soon as their tensor is complete, and
storage entries as soon as they are read, so that a million of them are never alive as objects at once. Many records in
a row that the pickle spells in the same way are a "run", which the interpreter reads into columns from the start.

Source: torch 2.2 to 2.15, torch/distributed/checkpoint/{metadata,filesystem,planner}.py; Megatron-Core
0.16, which adds fields of its own to `Metadata`; OLMo-core 3.0.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, TypeGuard

from shardkit.core.dtypes import BY_NAME, OF_CODES, DType
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.pickles.columns import Column, Corners, Numbers, RecordFields, RunKind, Texts
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.policies import Global, Record, Vocabulary

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_OLMO_CORE = "olmo_core.distributed.checkpoint.filesystem"  # its writer has a copy of torch's classes
_PLANNER = "torch.distributed.checkpoint.planner"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # TensorProperties up to torch 2.2

MAX_BYTES = 1 << 30  # a million chunks take 138 MB
_MAX_DIMS = 64  # torch's own limit
_MAX_INT = (1 << 63) - 1
_MAX_TRANSFORMS = 16
_PROPERTIES_LENGTHS = (5, 6)  # fields of TensorProperties
_MIN_CHUNK_BYTES = 8  # a chunk's storage entry takes more than this many bytes of pickle

INDEX_FIELDS = frozenset({"fqn", "offset", "index"})
"""Fields of `MetadataIndex`."""
STORAGE_FIELDS = frozenset({"relative_path", "offset", "length", "transform_descriptors"})
"""Fields of `_StorageInfo`."""
_MIN_INT = -(1 << 63)
_TENSOR_FIELDS = frozenset({"properties", "size", "chunks"})
_METADATA_FIELDS = frozenset(
    {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    | {"mcore_data", "all_local_plans"}  # Megatron-Core's
)

RECORDS = object()
"""The key of the table in a dict whose keys are records (`storage_data`)."""


class Size(tuple[int, ...]):
    """A `torch.Size`: checked to hold at most 64 integers from 0 to 2^63 - 1."""

    __slots__ = ()


class Chunk(Record):
    """`ChunkStorageMetadata`: a region, in elements."""

    __slots__ = ("offsets", "sizes")
    offsets: Size
    sizes: Size

    def build(self, state: object) -> None:
        if type(state) is not dict or len(state) != 2:
            raise Refusal("ChunkStorageMetadata has other fields than offsets and sizes")
        self.offsets, self.sizes = _size(state["offsets"]), _size(state["sizes"])


class Index(Record):
    """`MetadataIndex`: name and chunk that a storage entry belongs to. Its third field, `index`, is only a hint."""

    __slots__ = ("corner", "fqn")
    fqn: str
    corner: bytes | None
    """The chunk's offsets as native 64-bit integers; None for an object. They are bytes because Python hashes bytes with
    a random key: a hostile file can make integers collide in a dict, but not bytes."""

    def build(self, state: object) -> None:
        fields = checked_fields(state, "MetadataIndex", INDEX_FIELDS)
        if type(fields["fqn"]) is not str:
            raise Refusal("MetadataIndex.fqn is not text")
        self.fqn, offset = fields["fqn"], fields.get("offset")  # torch leaves out None
        self.corner = None if offset is None else array("q", _size(offset)).tobytes()


class StorageInfo(Record):
    """`_StorageInfo`: a byte range in a file of the directory."""

    __slots__ = ("length", "offset", "path", "transforms")
    path: str
    offset: int
    length: int
    transforms: tuple[str, ...]

    def build(self, state: object) -> None:
        fields = checked_fields(state, "_StorageInfo", STORAGE_FIELDS)
        self.path, self.offset, self.length = fields["relative_path"], fields["offset"], fields["length"]
        if type(self.path) is not str or type(self.offset) is not int or type(self.length) is not int:
            raise Refusal("_StorageInfo: relative_path is not text, or offset or length is not an integer")
        if not -_MAX_INT <= self.offset <= _MAX_INT or not -_MAX_INT <= self.length <= _MAX_INT:
            raise Refusal("_StorageInfo: offset or length is beyond 64 bits")
        transforms = fields.get("transform_descriptors")
        if transforms is None:
            self.transforms = ()
            return
        # torch leaves out an empty list. One that is empty now could be filled later in the pickle.
        if type(transforms) not in (list, tuple) or not 0 < len(transforms) <= _MAX_TRANSFORMS:
            raise Refusal("_StorageInfo: transform_descriptors is not a short list")
        if any(type(name) is not str for name in transforms):
            raise Refusal("_StorageInfo: a transform descriptor is not text")
        self.transforms = tuple(transforms)


class Properties(Record):
    """`TensorProperties`: five fields, and a sixth that torch 2.15 adds; only the dtype matters.

    The sixth, `strides`, has the strides of the tensor on the first rank, or of that rank's part. torch never reads it:
    each chunk's record has its own strides.
    """

    __slots__ = ("dtype",)
    dtype: DType

    def build(self, state: object) -> None:
        if type(state) is not tuple or not state or type(state[0]) is not DType:
            raise Refusal("TensorProperties does not begin with a dtype")
        if len(state) not in _PROPERTIES_LENGTHS:
            raise Refusal(
                f"TensorProperties has {len(state)} fields; torch writes 5 up to 2.14, and 6 from 2.15 on"
            )
        if state[1] is not _STRIDED:
            raise Refusal("a tensor that is not strided")
        if len(state) > 5 and not _are_strides(state[5]):
            raise Refusal(
                "TensorProperties.strides is neither None nor a tuple of at most 64 non-negative integers"
            )
        self.dtype = state[0]


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """A run of `ChunkStorageMetadata`, in one list."""

    num_chunks: int
    num_dims: int
    boxes: bytes
    """For each chunk its offsets, then its sizes, as native 64-bit integers."""


@dataclass(frozen=True, slots=True)
class IndexRun:
    """The keys of a run of storage entries: many `MetadataIndex`."""

    fqns: list[str]
    num_dims: array[int]
    corners: bytes
    """One after the other, as native 64-bit integers."""


@dataclass(frozen=True, slots=True)
class StorageInfoRun:
    """The values of a run of storage entries: many `_StorageInfo` without transforms."""

    paths: list[str]
    offsets: array[int]
    lengths: array[int]


class StorageTable:
    """`storage_data` in columns, one row for each entry."""

    def __init__(self) -> None:
        self.fqns: dict[str, int] = {}
        """Name -> id, in the order of first appearance."""
        self.paths: dict[str, int] = {}
        """relative_path -> id."""
        self.corners = array("q")
        """The chunks' offsets, row after row."""
        self.corner_at, self.num_dims = array("q"), array("b")
        """By row: where its offsets begin in `corners`, and how many there are; -1 for an object."""
        self.name_ids, self.path_ids = array("i"), array("i")
        self.offsets, self.lengths = array("q"), array("q")
        self.transforms: dict[int, tuple[str, ...]] = {}
        """By row, if it has any."""

    def __len__(self) -> int:
        return len(self.name_ids)

    def append(self, index: Index, info: StorageInfo) -> None:
        """Add one entry."""
        if info.transforms:
            self.transforms[len(self)] = info.transforms
        self.corner_at.append(len(self.corners))
        if index.corner is None:
            self.num_dims.append(-1)
        else:
            self.num_dims.append(len(index.corner) // 8)
            self.corners.frombytes(index.corner)
        self.name_ids.append(self.fqns.setdefault(index.fqn, len(self.fqns)))
        self.path_ids.append(self.paths.setdefault(info.path, len(self.paths)))
        self.offsets.append(info.offset)
        self.lengths.append(info.length)

    def extend(self, indexes: IndexRun, infos: StorageInfoRun) -> None:
        """Add the entries of a run."""
        first = len(self.corners)
        self.corner_at.extend(accumulate(indexes.num_dims[:-1], initial=first))
        self.num_dims.extend(indexes.num_dims)
        self.corners.frombytes(indexes.corners)
        for ids, numbers, names in (
            (self.name_ids, self.fqns, indexes.fqns),
            (self.path_ids, self.paths, infos.paths),
        ):
            for name in dict.fromkeys(names):
                numbers.setdefault(name, len(numbers))
            ids.extend(map(numbers.__getitem__, names))
        self.offsets.extend(infos.offsets)
        self.lengths.extend(infos.lengths)

    def corner(self, row: int) -> bytes | None:
        """Return the offsets of a row's chunk in the form of `Index.corner`; None for an object."""
        first, num_dims = self.corner_at[row], self.num_dims[row]
        return None if num_dims < 0 else self.corners[first : first + num_dims].tobytes()


class Tensor(Record):
    """`TensorStorageMetadata`: dtype, shape, and the regions of its chunks in one column."""

    __slots__ = ("boxes", "dtype", "num_chunks", "problem", "shape")

    def __init__(self) -> None:
        self.dtype: DType | None = None
        self.shape: Shape = ()
        self.num_chunks = 0
        self.boxes = array("q")
        """For each chunk its offsets, then its sizes."""
        self.problem: str | None = None
        """Why the chunks cannot be used; reported once the tensor's name is known."""

    def build(self, state: object) -> None:
        fields = checked_fields(state, "TensorStorageMetadata", _TENSOR_FIELDS)
        properties, chunks = fields["properties"], fields["chunks"]
        if type(properties) is not Properties or type(chunks) is not list:
            raise Refusal("TensorStorageMetadata: properties or chunks are of another type")
        self.dtype, self.shape = properties.dtype, tuple(_size(fields["size"]))
        self.num_chunks = count_chunks(chunks)
        extend, num_dims = self.boxes.extend, len(self.shape)
        for chunk in chunks:
            if type(chunk) is ChunkRun:
                if chunk.num_dims != num_dims:
                    self.problem = f"a chunk has {chunk.num_dims} dims, the tensor has {num_dims}"
                    return
                self.boxes.frombytes(chunk.boxes)
                continue
            if type(chunk) is not Chunk:
                raise Refusal("TensorStorageMetadata: a chunk is of another type")
            if len(chunk.offsets) != num_dims or len(chunk.sizes) != num_dims:
                self.problem = f"a chunk has {len(chunk.offsets)} dims, the tensor has {num_dims}"
                return
            extend(chunk.offsets)
            extend(chunk.sizes)


class BytesEntry(Record):
    """`BytesStorageMetadata`: an entry that is not a tensor."""

    __slots__ = ()

    def build(self, state: object) -> None:
        checked_fields(state, "BytesStorageMetadata", frozenset())


class Metadata(Record):
    """`Metadata`, the top of the file."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def build(self, state: object) -> None:
        self.fields = checked_fields(state, "Metadata", _METADATA_FIELDS)


class Ignored(Record):
    """An object whose content is ignored; its fields must still be those of its class."""

    __slots__ = ("_field_names", "_name")

    def __init__(self, name: str, field_names: frozenset[str]) -> None:
        self._name, self._field_names = name, field_names

    def build(self, state: object) -> None:
        checked_fields(state, self._name, self._field_names)


def count_chunks(chunks: list[object]) -> int:
    """Return the number of chunks in a list, including those in runs."""
    return sum(chunk.num_chunks if type(chunk) is ChunkRun else 1 for chunk in chunks)


def metadata_vocabulary(nbytes: int) -> Vocabulary:
    """Return the vocabulary for one parse of a `.metadata` of `nbytes` bytes."""
    return Vocabulary(names=metadata_names(nbytes), max_bytes=MAX_BYTES, set_records=store_places, runs=RUNS)


def metadata_names(nbytes: int) -> dict[tuple[str, str], object]:
    """Return (module, name) -> class for one parse of a `.metadata` of `nbytes` bytes; it may use no other names."""
    return {**_NAMES, (_METADATA, "TensorStorageMetadata"): Global("Tensor", new=_limited_tensor(nbytes))}


def _limited_tensor(nbytes: int) -> Callable[[], Record]:
    """Return a subclass of `Tensor` that refuses more chunks in all than a file of `nbytes` bytes can place.

    Many tensors may refer to the same list of chunks, and each copies it into its columns. Without a limit, memory
    would grow with the square of the file's size.
    """
    chunks_left = nbytes // _MIN_CHUNK_BYTES

    class CountedTensor(Tensor):
        __slots__ = ()

        def build(self, state: object) -> None:
            nonlocal chunks_left
            chunks = state.get("chunks") if type(state) is dict else None
            chunks_left -= count_chunks(chunks) if type(chunks) is list else 0
            if chunks_left < 0:
                raise Refusal("it lists more chunks than a file of its size can place")
            super().build(state)

    return CountedTensor


def store_places(target: dict[Any, Any], items: list[Any]) -> None:
    """Put [MetadataIndex, _StorageInfo, ...] into the table of a dict (`Vocabulary.set_records`)."""
    table = target.get(RECORDS)
    if table is None:
        if target:
            raise Refusal("a dict whose keys are partly text and partly records")
        table = target[RECORDS] = StorageTable()
    if type(table) is not StorageTable:
        raise Refusal("a dict with values of several kinds")
    for i in range(0, len(items), 2):
        if type(items[i]) is IndexRun and type(items[i + 1]) is StorageInfoRun:
            table.extend(items[i], items[i + 1])
            continue
        if type(items[i]) is not Index or type(items[i + 1]) is not StorageInfo:
            raise Refusal("storage_data holds something other than MetadataIndex and _StorageInfo")
        table.append(items[i], items[i + 1])


def checked_fields(state: object, name: str, field_names: frozenset[str]) -> dict[str, Any]:
    """Return the state of a record after checking that it is a dict without unknown fields."""
    if type(state) is not dict:
        raise Refusal(f"the state of {name} is not a dict")
    if not field_names.issuperset(state):
        unknown = [
            escape(key) if type(key) is str else "(records)" for key in state if key not in field_names
        ]
        raise Refusal(f"{name} has unknown fields: {', '.join(unknown[:_MAX_TRANSFORMS])}")
    return state


def _size(value: object) -> Size:
    return value if type(value) is Size else _make_size((value,))


def _make_size(args: tuple[Any, ...]) -> Size:
    sizes = args[0] if len(args) == 1 else None
    if type(sizes) is not tuple or len(sizes) > _MAX_DIMS:
        raise Refusal("torch.Size of something that is not a tuple of at most 64 integers")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= _MAX_INT:
            raise Refusal("torch.Size holds something that is not an integer from 0 to 2^63 - 1")
    return Size(sizes)


def _are_strides(value: object) -> bool:
    """True for None and for a tuple that `Tensor.stride` could return."""
    if value is None:
        return True
    return (
        isinstance(value, tuple)
        and len(value) <= _MAX_DIMS
        and all(type(stride) is int and 0 <= stride <= _MAX_INT for stride in value)
    )


_STRIDED = object()


def _make_layout(args: tuple[Any, ...]) -> object:
    if len(args) != 1 or type(args[0]) is not str:
        raise Refusal("a layout without a name")
    if args[0] != "torch.strided":
        raise Refusal(f"tensor layout {escape(args[0])}")
    return _STRIDED


def _make_enum(args: tuple[Any, ...]) -> int:
    if len(args) != 1 or type(args[0]) is not int or not 0 <= args[0] <= 3:
        raise Refusal("an enum value that does not exist")
    return args[0]


def _make_path(args: tuple[Any, ...]) -> None:
    """Check and drop a `checkpoint_id`, which is a path on the machine that saved."""
    if any(type(part) is not str for part in args):
        raise Refusal("a path that is not text")


def _ignored_class(name: str, *field_names: str) -> Global:
    return Global(name, new=lambda: Ignored(name, frozenset(field_names)))


_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

_NAMES: dict[tuple[str, str], object] = {
    **{("torch", name): dtype for name, dtype in (BY_NAME | OF_CODES).items()},
    (_METADATA, "ChunkStorageMetadata"): Global("ChunkStorageMetadata", new=Chunk),
    (_METADATA, "MetadataIndex"): Global("MetadataIndex", new=Index),
    (_FILESYSTEM, "_StorageInfo"): Global("_StorageInfo", new=StorageInfo),
    (_OLMO_CORE, "_StorageInfo"): Global("_StorageInfo", new=StorageInfo),
    (_METADATA, "TensorProperties"): Global("TensorProperties", new=Properties),
    (_OLD_METADATA, "TensorProperties"): Global("TensorProperties", new=Properties),
    (_METADATA, "BytesStorageMetadata"): Global("BytesStorageMetadata", new=BytesEntry),
    (_METADATA, "Metadata"): Global("Metadata", new=Metadata),
    (_METADATA, "StorageMeta"): _ignored_class(
        "StorageMeta", "checkpoint_id", "save_id", "load_id", "modules"
    ),
    ("torch", "Size"): Global("torch.Size", call=_make_size),
    ("torch.serialization", "_get_layout"): Global("_get_layout", call=_make_layout),
    (_METADATA, "_MEM_FORMAT_ENCODING"): Global("_MEM_FORMAT_ENCODING", call=_make_enum),
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): Global("MEM_FORMAT_ENCODING", call=_make_enum),
    # In pickles of Python 3.13 the module of paths is pathlib._local.
    **{
        (module, name): Global(f"{module}.{name}", call=_make_path)
        for module in ("pathlib", "pathlib._local")
        for name in _PATH_CLASSES
    },
    # Megatron-Core keeps every rank's plan in `all_local_plans`.
    (_PLANNER, "SavePlan"): _ignored_class("SavePlan", "items", "storage_data", "planner_data", "usable"),
    (_PLANNER, "WriteItem"): _ignored_class("WriteItem", "index", "type", "bytes_io_data", "tensor_data"),
    (_PLANNER, "TensorWriteData"): _ignored_class("TensorWriteData", "chunk", "properties", "size"),
    (_PLANNER, "BytesIOWriteData"): _ignored_class("BytesIOWriteData", "nbytes"),
    (_PLANNER, "WriteItemType"): Global("WriteItemType", call=_make_enum),
}


def chunk_run(fields: RecordFields) -> tuple[ChunkRun] | None:
    """Return chunks as a run; None if their numbers of dims differ, or they have other fields."""
    offsets, sizes = fields[0].get("offsets"), fields[0].get("sizes")
    if len(fields[0]) != 2 or type(offsets) is not Corners or type(sizes) is not Corners:
        return None
    nbytes = len(offsets.values[0])
    if {nbytes} != {*map(len, offsets.values), *map(len, sizes.values)}:
        return None
    pairs = zip(offsets.values, sizes.values, strict=True)
    return (ChunkRun(len(offsets.values), nbytes // 8, b"".join(chain.from_iterable(pairs))),)


def storage_run(fields: RecordFields) -> tuple[IndexRun, StorageInfoRun] | None:
    """Return storage entries as runs of keys and values; None if one is an object's, has transforms or other fields."""
    index, info = fields
    if not INDEX_FIELDS.issuperset(index) or not STORAGE_FIELDS.issuperset(info):
        return None
    fqns, corners, paths = index.get("fqn"), index.get("offset"), info.get("relative_path")
    offsets, lengths = info.get("offset"), info.get("length")
    if type(fqns) is not Texts or type(corners) is not Corners or type(paths) is not Texts:
        return None
    if not _are_places(offsets) or not _are_places(lengths) or info.get("transform_descriptors") is not None:
        return None
    num_dims = array("b", [len(corner) // 8 for corner in corners.values])
    return (
        IndexRun(fqns.values, num_dims, b"".join(corners.values)),
        StorageInfoRun(paths.values, array("q", offsets.values), array("q", lengths.values)),
    )


def _are_places(column: Column) -> TypeGuard[Numbers]:
    """True for a column of integers whose negatives fit into 64 bits too, as `StorageInfo` requires."""
    return type(column) is Numbers and min(column.values) > _MIN_INT


RUNS = (
    RunKind((Chunk,), list, _make_size, Size, chunk_run),
    RunKind((Index, StorageInfo), dict, _make_size, Size, storage_run),
)
