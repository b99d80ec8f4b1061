"""Open a file of `torch.save` without torch: return its tree of values, and the places of its tensors' bytes.

The pickle inside is interpreted, never executed, and no tensor data is read. A tensor becomes a `TensorRef`,
or a `DistributedRef` if it is one rank's part of a larger one. Everything else that is not plain data
becomes an `UnmadeObject`, which has only a name.

The region of a DTensor's part is computed from its placements and the rank's position in the mesh, both of
which are in the pickle; the shards of a ShardedTensor have their offsets in it. Classes of torch are accepted
under every module that they have been in.

Source: torch 2.2 to 2.13, torch/serialization.py (`_save`, `persistent_id`; zip files since torch 1.6),
torch/_utils.py and torch/_tensor.py (`_rebuild_*`), torch/distributed/tensor/_dtensor_spec.py
(`_maybe_convert_StridedShard_to_shard_order`), placement_types.py and _utils.py
(`compute_local_shape_and_global_offset`), torch/distributed/device_mesh.py,
torch/distributed/_shard/sharded_tensor/api.py (`__getstate__`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeGuard

from shardkit.core.catalog import Checksums, FileStamp, SourceFile
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Region, Shape, split_dim
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import ZIP, open_regular, read_exactly, refuse_pointer, stamp_of
from shardkit.formats.torchsave.archive import (
    SAVE_AGAIN,
    UnsupportedFile,
    ZipEntry,
    ZipReader,
    pread_of,
    read_directory,
)
from shardkit.formats.torchsave.classes import (
    class_made_by,
    describe_object,
    padding_error,
    quantised_parameter,
    unwrap_value,
)
from shardkit.formats.torchsave.record import STORAGES, TensorRecord, is_extent
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.policies import Fields, Inert, Maker, UnmadeObject

_PICKLE = b"\x80"
_MAGIC_BEFORE_ZIP = bytes.fromhex("8a0a6cfc9c46f9206aa850192e")
"""The number with which files from before torch 1.6 begin, after the protocol: torch/serialization.py, MAGIC_NUMBER."""
_MAGIC_AS_TEXT = b"L119547037146038801333356L\n."  # the same number in protocols 0 and 1
HEAD_NBYTES = 32
"""Enough for `is_before_zip`."""
_MAX_ENTRIES = 1 << 18
_MAX_PICKLE = 1 << 25
_NO_PROGRAM = (
    "save the state dict of what torch.jit.load gives: torch.save(torch.jit.load(FILE).state_dict(), NEW)"
)
_ANOTHER_COPY = "the file is cut short or damaged: use another copy"
_MAX_ELEMENTS = 1 << 62
_REBUILDS = "_rebuild_"
_WITH_VALUES = {
    "sparse_tensor": "torch's sparse tensor, which is made of indices and values",
    "nested_tensor": "torch's nested tensor, which is made of several",
}
"""torch's own tensors that store no plain array of values; by the function that makes them."""
_PARTS = ("ShardedTensor", "ShardedTensorFactory", "FlatParameter")
"""Classes of Megatron-Core (dist_checkpointing/mapping.py) and fairscale (nn/misc/flatten_params_wrapper.py)."""
_QUANTISED = "torch's quantised tensor, which is made of codes and scales: quantised by torch"
_OF_CODES = {
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}
"""Storages of quantised tensors, and the bytes of each unit that they count."""
_ON_META = "a tensor on the meta device, without values"
_LAZY_VIEW = "a lazily conjugated or negated view: the stored bytes are not its values"
_DATA = re.compile(
    r"(builtins|__builtin__)\.(bool|bytearray|complex|dict|Ellipsis|float|frozenset|int|list|long|object|set|slice|str|tuple|x?range)"
    r"|_codecs\.encode|collections\.Counter|datetime\.(date|datetime|time|timedelta|timezone)|decimal\.Decimal"
    r"|fractions\.Fraction|numpy\.(dtype|_?core\.multiarray\.scalar)|pathlib(\._local)?\.(Pure)?(Posix|Windows)Path"
    r"|torch\.(device|Tensor|nn\.parameter\.(Buffer|Parameter)|serialization\._get_layout)|uuid\.(SafeUUID|UUID)"
)
"""Names of plain data, which is neither weights nor code."""
_MAKES_ARRAYS = re.compile(r"numpy\._?core\.(multiarray\._reconstruct|numeric\._frombuffer)")
_REBUILD_WRAPPER = "torch._utils._rebuild_wrapper_subclass"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """An opened file of `torch.save`."""

    path: str
    name: str
    """Of the file in messages; not escaped."""
    stamp: FileStamp
    """Stamp of the file when its pickle was read."""
    tree: object
    """The saved value: None, bool, int, float, str, bytes, lists, tuples, dicts with strings and integers as keys.
    `TensorRef`, `DistributedRef` and `UnmadeObject` stand for tensors and everything else. Size and depth (100
    levels) of the tree are bounded, though equal parts may be one object. It leaves out attributes that were
    set on a dict or tensor."""
    num_dropped: int
    """Entries of dicts that are left out because their keys are neither strings nor integers."""
    storages: Mapping[str, ZipEntry]
    """Places of the storages, by key; positions count from the first byte of the file."""
    protocol: int
    """Of its pickle; torch.save writes 2 by default."""
    unknown: tuple[str, ...]
    """Full names in the pickle that are neither torch's nor those of plain data."""
    data: tuple[str, ...]
    """Full names of the classes of plain data in the pickle."""

    @property
    def source(self) -> SourceFile:
        """The file as an entry for a catalog."""
        entries = self.storages.values()
        return SourceFile(
            name=self.name,
            path=self.path,
            size=self.stamp.size,
            stamp=self.stamp,
            checksums=Checksums.of((entry.start, entry.nbytes, entry.crc) for entry in entries),
        )


def class_of(thing: UnmadeObject) -> str:
    """Return the class of an object that is not plain data, as its pickle names it; not escaped."""
    return "numpy.ndarray" if _MAKES_ARRAYS.fullmatch(thing.name) else thing.name


class Leaf(NamedTuple):
    """A value in a tree that is not a dict, list or tuple."""

    path: tuple[str | int, ...]
    """Keys of dicts and indexes of lists, from the top of the tree."""
    value: object


def open_torch_file(path: str, name: str, extent: tuple[int, int] | None = None) -> TorchFile:
    """Open a file of `torch.save`: read the zip's directory and the pickle, but not the tensors.

    Args:
        path: of the file.
        name: of the file in messages.
        extent: (first byte, number of bytes) of a record inside the file; None for the whole file.

    Raises:
        SourceError: missing, not a regular file, damaged, or from before torch 1.6.
        IntegrityError: the CRC-32 of its pickle is wrong.
        ResourceError: the file may not be read.
    """
    where = escape(name)
    with open_regular(path, name) as (fd, size):
        stamp = stamp_of(fd)
        begin, length = extent or (0, size)
        head = read_exactly(fd, begin, min(length, HEAD_NBYTES), name)
        refuse_pointer(head, name)
        _check_magic(head, length, where)
        try:
            reader = ZipReader(pread_of(fd), begin, length, where)
            entries = read_directory(reader, max_entries=_MAX_ENTRIES)
            if "data.pkl" not in entries:
                reader.refuse("a zip, but not one of torch.save: no data.pkl is in it")
            if "constants.pkl" in entries:
                raise UnsupportedFile(f"{where}: a TorchScript program, not a state dict", hint=_NO_PROGRAM)
            order = reader.content("byteorder", entries["byteorder"]) if "byteorder" in entries else b"little"
            if order != b"little":
                order_name = escape(order.decode("ascii", "replace"))
                raise UnsupportedFile(
                    f"{where}: its byte order is {order_name!r}, not little", hint=SAVE_AGAIN
                )
            if "version" in entries:
                reader.check_version(reader.content("version", entries["version"]))
            data = reader.content("data.pkl", entries["data.pkl"], _MAX_PICKLE)
            if data and not data.startswith(_PICKLE):
                raise UnsupportedFile(f"{where}: pickled with protocol 0 or 1", hint=SAVE_AGAIN)
        except SourceError as error:
            raise type(error)(error.message, hint=error.hint or _ANOTHER_COPY) from None
    storages = {
        key[5:]: entry._replace(start=begin + entry.start)
        for key, entry in entries.items()
        if key.startswith("data/")
    }
    names = TensorNames(storages)
    pickle = Inert(data, names.look_up, names.storage)
    tree = pickle.run(f"{where}, data.pkl")
    return TorchFile(
        path=path,
        name=name,
        stamp=stamp,
        tree=tree,
        num_dropped=pickle.num_dropped,
        storages=storages,
        protocol=data[1],
        unknown=tuple(name for name in names.opaque_names if not _DATA.fullmatch(name)),
        data=tuple(name for name in names.opaque_names if _DATA.fullmatch(name)),
    )


def is_before_zip(head: bytes) -> bool:
    """True for the first bytes of a file in the format from before torch 1.6.

    Its number follows the protocol's 2 bytes, or with protocols 4 and 5 a frame of 9 more.
    """
    return any(head[at:].startswith(_MAGIC_BEFORE_ZIP) for at in (2, 11)) or head.startswith(_MAGIC_AS_TEXT)


def _check_magic(magic: bytes, size: int, where: str) -> None:
    if magic.startswith(ZIP):
        return
    if not size:
        raise SourceError(f"{where}: the file is empty", hint=_ANOTHER_COPY)
    if is_before_zip(magic):
        raise UnsupportedFile(
            f"{where}: the format from before torch 1.6, a pickle that is not in a zip", hint=SAVE_AGAIN
        )
    if magic.startswith(_PICKLE):
        raise SourceError(
            f"{where}: a pickle that is not in a zip, and not one of torch.save", hint=SAVE_AGAIN
        )
    raise SourceError(f"{where}: not a file of torch.save (it is no zip)", hint=SAVE_AGAIN)


def tree_leaves(tree: object) -> Iterator[Leaf]:
    """Yield the leaves of a tree in its order; an empty dict or list has none.

    Args:
        tree: of a file, or a part of it.
    """
    todo = [Leaf((), tree)]
    while todo:
        path, value = leaf = todo.pop()
        if isinstance(value, dict):
            todo.extend(Leaf((*path, key), value[key]) for key in reversed(value))
        elif isinstance(value, (list, tuple)):
            todo.extend(Leaf((*path, index), value[index]) for index in reversed(range(len(value))))
        else:
            yield leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef(TensorRecord):
    """A tensor in a file, and the place of its storage. Several tensors may view one storage."""

    key: str
    """Name of the storage in the file: equal for tensors that share it."""


class LocalPart(NamedTuple):
    """One rank's part of a tensor."""

    region: Region
    """Of the part in the whole tensor."""
    tensor: TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedRef:
    """One rank's parts of a DTensor or ShardedTensor."""

    dtype: DType
    shape: Shape
    """Of the whole tensor."""
    parts: tuple[LocalPart, ...]
    """Empty if the rank has no part of it."""
    problem: str | None = None
    """Why the regions of the parts are unknown; None if they are known."""


class UnreadableTensor(UnmadeObject):
    """A tensor whose bytes are not its values: quantised, sparse, or on the meta device. `name` is the reason.

    If its class is the reason, `value` is the full name of the class.
    """

    __slots__ = ()


class _StorageClass(UnmadeObject):
    """A storage class, with its dtype (None if its bytes are not plain numbers) and the bytes of each unit it counts."""

    __slots__ = ("dtype", "unit")

    def __init__(self, name: str, dtype: DType | None, unit: int = 1) -> None:
        super().__init__(name)
        self.dtype = dtype
        self.unit = dtype.itemsize if dtype else unit


class _Storage(UnmadeObject):
    """A storage of the file; its `entry` is None if its bytes are not in the file, as for the meta device."""

    __slots__ = ("dtype", "entry", "key")

    def __init__(self, key: str, dtype: DType | None, entry: ZipEntry | None) -> None:
        super().__init__("torch.storage")
        self.key, self.dtype, self.entry = key, dtype, entry


class TensorNames:
    """The vocabulary for the pickle of one file: it maps names and persistent ids to objects."""

    def __init__(self, storages: Mapping[str, ZipEntry]) -> None:
        self._storages = storages
        self._values: dict[tuple[str, str], object] = {}

    def look_up(self, module: str, name: str) -> object:
        """Return the object for a name: for most names, an `UnmadeObject`."""
        value = self._values.get((module, name))
        if value is None:
            value = self._values[module, name] = _NAMES.get((module, name)) or _make_unknown(module, name)
        return value

    @property
    def opaque_names(self) -> tuple[str, ...]:
        """The names that were looked up and have no meaning here."""
        return tuple(value.name for value in self._values.values() if type(value) is UnmadeObject)

    def storage(self, value: object) -> object:
        """Return the storage for a persistent id ("storage", class, key, location, number of elements).

        Raises:
            Refusal: the storage is not in the file, or has another size there.
        """
        if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
            return UnmadeObject("a persistent id")
        _, cls, key, location, count = value
        if type(cls) is not _StorageClass or type(key) is not str or type(count) is not int:
            raise Refusal("a storage that is not one of torch's")
        entry = self._storages.get(key)
        nbytes = count * cls.unit
        if entry is None and location != "meta":
            raise Refusal("a storage that is not in the file")
        if entry is not None and entry.nbytes != nbytes:
            raise Refusal(f"a storage of {nbytes} bytes, for which the file has {entry.nbytes}")
        return _Storage(key, cls.dtype, entry)


def _make_unknown(module: str, name: str) -> object:
    """Return the object for a name that is not in `_NAMES`, by its module and form.

    A torch.distributed class keeps its fields. A function that makes tensors, or a class of parts of them, makes an
    `UnreadableTensor`. Any other name is kept as an `UnmadeObject`.
    """
    full = f"{module}.{name}"
    if module.startswith("torch.distributed"):
        return Maker(full, lambda args: Fields(full, args))
    if name.startswith(_REBUILDS) and module.partition(".")[0] in ("torch", "torchao"):
        kind = name.removeprefix(_REBUILDS)
        if kind in _WITH_VALUES:
            return Maker(full, lambda args: UnreadableTensor(_WITH_VALUES[kind], full))
        return Maker(full, lambda args: UnreadableTensor(_ON_META if kind.startswith("meta_") else kind))
    if (cls := class_made_by(module, name)) is not None:
        return Maker(full, partial(_make_unreadable, cls))
    if name in _PARTS:
        return Maker(full, lambda args: UnreadableTensor(f"{full}, one rank's part of tensors", full))
    return UnmadeObject(full)


def _make_unreadable(cls: str, args: tuple[Any, ...]) -> object:
    """Return the unreadable tensor for an object that a class would make from tensors and settings."""
    return UnreadableTensor(describe_object(cls, sum(isinstance(value, TensorRef) for value in args)), cls)


def _make_attribute(args: tuple[Any, ...]) -> object:
    """Return the object for getattr(class, name), which is how pickles refer to a method of a class."""
    if len(args) == 2 and isinstance(args[0], UnmadeObject) and type(args[1]) is str:
        if class_made_by(args[0].name, args[1]) is not None:
            return Maker(args[0].name, partial(_make_unreadable, args[0].name))
    return UnmadeObject("builtins.getattr")


def _without_values(name: str) -> Maker:
    return Maker(name, lambda args: UnreadableTensor(f"{name}, which has no values yet", name))


def _make_plain_tensor(args: tuple[Any, ...], dtype: DType | None, metadata: tuple[Any, ...]) -> object:
    """Make a tensor from (storage, offset, shape, stride, ...)."""
    if len(args) < 4 or type(args[0]) is not _Storage or dtype is None:
        raise Refusal("a tensor made from other arguments than torch gives")
    storage, offset, shape, stride = args[:4]
    if type(offset) is not int or not 0 <= offset < _MAX_ELEMENTS:
        raise Refusal("a tensor with an impossible offset")
    if not (is_extent(shape) and is_extent(stride)) or len(shape) != len(stride):
        raise Refusal("a tensor with an impossible shape or stride")
    if storage.entry is None:
        return UnreadableTensor(_ON_META)
    flipped = _flipped_bytes(dtype, metadata[0] if metadata else None)
    if flipped is None:
        return UnreadableTensor(_LAZY_VIEW, "torch.Tensor")
    entry = storage.entry
    tensor = TensorRef(
        dtype=dtype,
        shape=shape,
        stride=stride,
        storage_offset=offset,
        data_start=entry.start,
        data_nbytes=entry.nbytes,
        crc32=entry.crc if entry.crc or not entry.nbytes else None,
        key=storage.key,
        flipped=flipped,
    )
    if tensor.reach > entry.nbytes:
        raise Refusal(f"a tensor that reaches to byte {tensor.reach} of a storage of {entry.nbytes}")
    return tensor


def _flipped_bytes(dtype: DType, marks: object) -> tuple[int, ...] | None:
    """Return the bytes of each element whose sign bit is stored inverted, for a lazily negated or conjugated view.

    None if the dtype has no sign bit that could be inverted.

    Args:
        dtype: of the tensor.
        marks: those of a lazy view, or None.

    Source: torch 2.13, torch/_utils.py, `set_tensor_metadata`: {"conj": True, "neg": True}, or less.
    """
    if not marks:
        return ()
    if type(marks) is not dict or not set(marks) <= {"conj", "neg"}:
        return None
    if not (dtype.is_convertible or dtype.kind == "complex"):
        return None
    last = dtype.itemsize - 1
    imaginary, real = {last}, {last - dtype.itemsize // 2} if dtype.kind == "complex" else set[int]()
    negated = imaginary | real if marks.get("neg") else set[int]()
    conjugated = imaginary if marks.get("conj") and real else set[int]()
    return tuple(sorted(negated ^ conjugated))


def _rebuild_v2(args: tuple[Any, ...]) -> object:
    """(storage, offset, shape, stride, requires_grad, hooks[, metadata])."""
    return _make_plain_tensor(args, getattr(args[0], "dtype", None) if args else None, args[6:])


def _rebuild_v3(args: tuple[Any, ...]) -> object:
    """(storage, offset, shape, stride, requires_grad, hooks, dtype[, metadata]); the storage counts bytes."""
    if len(args) > 6 and isinstance(args[6], UnmadeObject) and args[6].name.startswith("torch."):
        return UnreadableTensor(f"a tensor of dtype {args[6].name}", args[6].name)
    return _make_plain_tensor(args, args[6] if len(args) > 6 and type(args[6]) is DType else None, args[7:])


def _rebuild_quantised(args: tuple[Any, ...]) -> object:
    """(storage, offset, shape, stride, (scheme, scales, ...), requires_grad, hooks)."""
    if not args or type(args[0]) is not _Storage or args[0].dtype is not None:
        raise Refusal("a quantised tensor whose storage does not have codes")
    return UnreadableTensor(_QUANTISED, "torch._utils._rebuild_qtensor")


def _rebuild_parameter(args: tuple[Any, ...]) -> object:
    """(data, requires_grad, hooks[, state]); the state is its attributes, or the pair of these and its slots."""
    if not args:
        return UnreadableTensor("a parameter without data")
    fields = Fields("", ())
    fields.build(args[3] if len(args) > 3 else None)
    unreadable = quantised_parameter(args[0], fields.items)
    return args[0] if unreadable is None else UnreadableTensor(*unreadable)


def _rebuild_from_type(args: tuple[Any, ...]) -> object:
    """(function, type, its arguments, state): a subclass of Tensor."""
    if len(args) != 4 or not isinstance(args[1], UnmadeObject):
        return UnreadableTensor("a tensor of an unknown class")
    function, kind, inner, state = args
    if kind.name.startswith("torch.distributed"):
        fields = Fields(kind.name, inner if type(inner) is tuple else ())
        fields.build(state)
        if kind.name.endswith(".DTensor"):
            return _make_dtensor(fields)
        if kind.name.endswith(".ShardedTensor"):
            return _make_sharded_tensor(fields)
    if isinstance(function, UnmadeObject) and function.name == _REBUILD_WRAPPER:
        fields = Fields(kind.name, ())
        fields.build(state)
        value = unwrap_value(kind.name, inner, fields.items)
        return UnreadableTensor(value, kind.name) if isinstance(value, str) else value
    plain = function.make(inner) if isinstance(function, UnmadeObject) else None
    if isinstance(plain, TensorRef) and _is_plain(kind.name):
        return plain
    is_torchs = isinstance(function, Maker) and function.name.rpartition(".")[2].startswith(_REBUILDS)
    return UnreadableTensor(kind.name, kind.name if is_torchs else None)


def _is_plain(name: str) -> bool:
    """True for the classes that only mark a tensor."""
    return name in ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


def _make_dtensor(fields: Fields) -> object:
    """Place a rank's part of a DTensor, from `_local_tensor` and `_spec`."""
    local, spec = fields.items.get("_local_tensor"), fields.items.get("_spec")
    if not isinstance(local, TensorRef):
        what = local.name if isinstance(local, UnmadeObject) else "nothing"
        cls = local.value if isinstance(local, UnreadableTensor) else None
        return UnreadableTensor(f"a DTensor of {what}", cls)
    shape = fields.args[2] if len(fields.args) > 2 else None  # (class, dtype, shape, stride, ...)
    if not isinstance(spec, Fields) or not is_extent(shape):
        return UnreadableTensor("a DTensor without the shape or the placements of the whole tensor")
    if (padded := padding_error(local, shape)) is not None:
        return UnreadableTensor(f"a DTensor of {padded.why}", padded.class_name)
    try:
        region = _dtensor_region(tuple(shape), spec)
        if region is not None and region.num_elements and region.sizes != local.shape:
            raise ValueError(
                f"its part has shape {list(local.shape)}, its placements give {list(region.sizes)}"
            )
    except ValueError as error:
        return DistributedRef(dtype=local.dtype, shape=shape, parts=(), problem=str(error))
    parts = () if region is None else (LocalPart(region, local),)
    return DistributedRef(dtype=local.dtype, shape=shape, parts=parts)


def _dtensor_region(shape: Shape, spec: Fields) -> Region | None:
    """Return the region of the rank's part; None if the rank is not in the mesh.

    Raises:
        ValueError: a field is missing or not understood; the text says which.
    """
    mesh, placements = spec.items.get("mesh"), spec.items.get("placements")
    if not isinstance(mesh, Fields) or not isinstance(placements, (tuple, list)):
        raise ValueError("its mesh or its placements are missing")
    coord = mesh.items.get("_coordinate_on_dim", 0)
    if coord is None:
        return None
    mesh_shape = _mesh_shape(mesh)
    if not _are_ints(coord) or mesh_shape is None or not len(coord) == len(mesh_shape) == len(placements):
        raise ValueError("its mesh lacks the rank's position")
    stored, order = [_placement(placement) for placement in placements], spec.items.get("shard_order")
    if any(placement.split_factor != 1 for placement in stored):
        if spec.items.get("use_strided_shard_as_shard_order") is False:
            raise ValueError("its strided shards are not boxes of the tensor")
        order = None
    return local_region(shape, stored, mesh_shape, coord, None if order is None else _shard_order(order))


def _mesh_shape(mesh: Fields) -> Shape | None:
    """Return the sizes of a mesh's axes, from its layout (since torch 2.9) or from the tensor of its ranks."""
    layout, ranks = mesh.items.get("_layout"), mesh.items.get("mesh")
    if isinstance(ranks, TensorRef):
        return ranks.shape
    if not isinstance(layout, Fields):
        return None
    axes = layout.items.get("axes")
    if isinstance(axes, (tuple, list)):  # torch 2.13
        sizes: Any = tuple(axis.items.get("shape") if isinstance(axis, Fields) else None for axis in axes)
    else:
        sizes = layout.items.get("shape")
        sizes = (sizes,) if type(sizes) is int else sizes
    if not isinstance(sizes, (tuple, list)):
        return None
    shape = tuple(map(_axis_size, sizes))
    return shape if all(size > 0 for size in shape) else None


def _axis_size(size: object) -> int:
    if type(size) is int:
        return size
    return prod(size) if _are_ints(size) else -1  # an axis may be flattened from several


def _placement(value: object) -> StoredPlacement:
    if not isinstance(value, Fields):
        raise ValueError("a placement that is not one of torch's")
    kind = value.name.rpartition(".")[2]
    if kind == "Replicate":
        return StoredPlacement()
    dim, split_factor = _int_field(value, "dim", 0), _int_field(value, "split_factor", 1)
    if kind == "Shard" and dim is not None:
        return StoredPlacement(dim)
    if kind == "_StridedShard" and dim is not None and split_factor is not None:
        return StoredPlacement(dim, split_factor)
    raise ValueError(f"its placement {kind} does not show which elements a rank has")


class StoredPlacement(NamedTuple):
    """A DTensor's placement on one mesh axis, as the pickle has it."""

    dim: int | None = None
    """The dim that the axis cuts; None if it replicates the tensor."""
    split_factor: int = 1
    """The number of parts into which later axes cut the dim before this axis does (`_StridedShard`); mostly 1."""


def local_region(
    shape: Shape,
    placements: Sequence[StoredPlacement],
    mesh_shape: Sequence[int],
    coord: Sequence[int],
    order: Mapping[int, Sequence[int]] | None = None,
) -> Region:
    """Return the region that the rank at a position of the mesh holds.

    Args:
        shape: of the whole tensor.
        placements: one for each mesh axis.
        mesh_shape: sizes of the axes.
        coord: the rank's position on each axis.
        order: by dim, the axes that cut it, first to last; None if the tensor does not record it.

    Raises:
        ValueError: no order of cutting results in these placements.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim in sorted({placement.dim for placement in placements if placement.dim is not None}):
        if not 0 <= dim < len(shape):
            raise ValueError(f"it is cut along dim {dim}, but has {len(shape)} dims")
        axes = [axis for axis, placement in enumerate(placements) if placement.dim == dim]
        axes = _axis_order(axes, placements, mesh_shape) if order is None else list(order.get(dim, axes))
        for axis in axes:
            if not 0 <= axis < len(mesh_shape) or not 0 <= coord[axis] < mesh_shape[axis]:
                raise ValueError(f"its rank's position {list(coord)} is not in a mesh of {list(mesh_shape)}")
            offset, sizes[dim] = split_dim(sizes[dim], mesh_shape[axis], coord[axis])
            offsets[dim] = offsets[dim] + offset if sizes[dim] else shape[dim]
    return Region(tuple(offsets), tuple(sizes))


def _axis_order(
    axes: Sequence[int], placements: Sequence[StoredPlacement], mesh_shape: Sequence[int]
) -> list[int]:
    """Return the order in which axes cut a dim, from their split factors.

    An axis has the split factor n if the later axes of the mesh that cut before it make n parts. For two axes of size 2
    where the first has split factor 2, the order is [1, 0]. Without strided shards it is the order of the mesh.
    """
    order: list[int] = []
    for axis in reversed(axes):
        factor = placements[axis].split_factor
        for position in range(len(order) + 1):
            if prod(mesh_shape[earlier] for earlier in order[:position]) == factor:
                order.insert(position, axis)
                break
        else:
            raise ValueError(f"its strided shard with split factor {factor} belongs to no order of mesh axes")
    return order


def _int_field(value: Fields, name: str, position: int) -> int | None:
    """Return an integer field of an object: an attribute, or the argument or state item at `position`; else None."""
    state = value.items.get("")
    for args in (value.args, state if type(state) is tuple else ()):
        if len(args) > position and type(args[position]) is int:
            return int(args[position])
    field = value.items.get(name)
    return field if type(field) is int else None


def _shard_order(order: object) -> dict[int, Sequence[int]]:
    """Return the axes that cut each dim, first to last."""
    axes_of: dict[int, Sequence[int]] = {}
    for entry in order if isinstance(order, (tuple, list)) else ():
        args = entry.args if isinstance(entry, Fields) else ()
        if len(args) != 2 or type(args[0]) is not int or not _are_ints(args[1]):
            raise ValueError("the order of its shards is not understood")
        axes_of[args[0]] = args[1]
    return axes_of


def _are_ints(values: object) -> TypeGuard[Sequence[int]]:
    return isinstance(values, (tuple, list)) and all(type(value) is int for value in values)


def _make_sharded_tensor(fields: Fields) -> object:
    """Return a rank's shards of a ShardedTensor, whose state is (shards, metadata, process group, spec, ...)."""
    state = fields.items.get("")
    shards, metadata = state[:2] if type(state) is tuple and len(state) >= 2 else (None, None)
    shape = metadata.items.get("size") if isinstance(metadata, Fields) else None
    dtype = fields.args[1] if len(fields.args) > 1 else None
    if type(shards) is not list or not is_extent(shape) or type(dtype) is not DType:
        return UnreadableTensor("a ShardedTensor without the shape or dtype of the whole tensor")
    parts = []
    for shard in shards:
        items = shard.items if isinstance(shard, Fields) else {}
        local, where = items.get("tensor"), items.get("metadata")
        offsets = where.items.get("shard_offsets") if isinstance(where, Fields) else None
        if not isinstance(local, TensorRef) or not _are_ints(offsets) or len(offsets) != len(local.shape):
            return UnreadableTensor("a ShardedTensor whose shards have no offsets")
        parts.append(LocalPart(Region(tuple(offsets), local.shape), local))
    return DistributedRef(dtype=dtype, shape=tuple(shape), parts=tuple(parts))


def _make_ordered_dict(args: tuple[Any, ...]) -> object:
    """Make a dict from the arguments of OrderedDict: none, or a list of pairs."""
    items: dict[str | int, object] = {}
    for pair in args[0] if args and type(args[0]) in (list, tuple) else ():
        if type(pair) in (list, tuple) and len(pair) == 2 and type(pair[0]) is str:
            items[pair[0]] = pair[1]
    return items


def _make_size(args: tuple[Any, ...]) -> object:
    if len(args) != 1 or not _are_ints(args[0]):
        raise Refusal("a torch.Size of something other than integers")
    return tuple(args[0])


_NAMES: dict[tuple[str, str], object] = {
    ("torch._utils", "_rebuild_tensor"): Maker("_rebuild_tensor", _rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v2"): Maker("_rebuild_tensor_v2", _rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Maker("_rebuild_tensor_v3", _rebuild_v3),
    ("torch._utils", "_rebuild_qtensor"): Maker("torch._utils._rebuild_qtensor", _rebuild_quantised),
    ("torch._utils", "_rebuild_parameter"): Maker("_rebuild_parameter", _rebuild_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Maker("_rebuild_parameter", _rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type"): Maker("_rebuild_from_type", _rebuild_from_type),
    ("torch._tensor", "_rebuild_from_type_v2"): Maker("_rebuild_from_type_v2", _rebuild_from_type),
    ("torch.nn.parameter", "UninitializedParameter"): _without_values(
        "torch.nn.parameter.UninitializedParameter"
    ),
    ("torch.nn.parameter", "UninitializedBuffer"): _without_values("torch.nn.parameter.UninitializedBuffer"),
    ("builtins", "getattr"): Maker("builtins.getattr", _make_attribute),
    ("__builtin__", "getattr"): Maker("builtins.getattr", _make_attribute),
    ("argparse", "Namespace"): Maker("argparse.Namespace", partial(Fields, "argparse.Namespace")),
    ("collections", "OrderedDict"): Maker("collections.OrderedDict", _make_ordered_dict),
    ("collections", "defaultdict"): Maker("collections.defaultdict", lambda args: {}),
    ("torch", "Size"): Maker("torch.Size", _make_size),
    ("torch.storage", "UntypedStorage"): _StorageClass("torch.storage.UntypedStorage", None),
    **{("torch", name): _StorageClass(f"torch.{name}", BY_NAME[dtype]) for name, dtype in STORAGES.items()},
    **{("torch", name): _StorageClass(f"torch.{name}", None, unit) for name, unit in _OF_CODES.items()},
    **{("torch", name): dtype for name, dtype in BY_NAME.items()},
}
