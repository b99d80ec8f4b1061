"""The description of one tensor in a `torch.save` file or record: dtype, shape, strides, and the place of its bytes.

`parse_tensor` reads the pickle of a DCP record that holds one plain tensor. It refuses tensors whose raw bytes are not
their values: conjugated or negated views, and objects of classes (`classes` finds the value of some of these).

Source: torch 2.2 and 2.13, torch/_utils.py (`_rebuild_tensor_v2`, `_rebuild_tensor_v3`) and torch/serialization.py
(`persistent_id`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeGuard

from shardkit.core.catalog import Decoded, OnRead, SourceFile, TensorEntry
from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.formats.torchsave.archive import ZipEntry
from shardkit.pickles.interpreter import Refusal
from shardkit.pickles.policies import Global, Strict, Vocabulary

_MAX_BYTES = 1 << 16
_MAX_DIMS = 64  # torch's own limit
_MAX_ELEMENTS = 1 << 62

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A stored tensor."""

    dtype: DType
    shape: Shape
    """In elements."""
    stride: Shape
    """In elements. A dense tensor that was not contiguous is stored with its strides in memory."""
    storage_offset: int
    """Number of elements in the storage before the tensor's first."""
    data_start: int
    """First byte of the storage, counted from the start of the file."""
    data_nbytes: int
    """Bytes of the storage."""
    crc32: int | None
    """Recorded CRC-32 of the storage; None if not recorded (0 for data that is not empty)."""
    other_storages: tuple[ZipEntry, ...] = ()
    """Further storages of the record, if its tensor's class stores more than the value; from the file's start."""
    flipped: tuple[int, ...] = ()
    """Bytes of each element whose highest bit, the sign, is inverted: those of a lazily conjugated or negated view."""
    unpadded: tuple[str, Shape] | None = None
    """If the tensor's class pads weights: the class, and the unpadded shape of the whole weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def start(self) -> int:
        """First byte of the tensor in the file. Without elements, that of the storage, as the offset means nothing then."""
        return self.data_start + (self.storage_offset * self.dtype.itemsize if self.nbytes else 0)

    @property
    def reach(self) -> int:
        """Number of bytes from the start of the storage to the end of the tensor."""
        if 0 in self.shape:
            return 0
        steps = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (self.storage_offset + steps + 1) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the tensor's values are stored row-major, without gaps and with their own signs."""
        if self.flipped:
            return False
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True

    def at_offset(self, offset: int, crc: int) -> TensorRecord:
        """Return a plain tensor's record with its storage `offset` bytes further on (`dataclasses.replace` is slow).

        Args:
            offset: in bytes.
            crc: recorded CRC-32 of the storage; 0 if not recorded.
        """
        return TensorRecord(
            dtype=self.dtype,
            shape=self.shape,
            stride=self.stride,
            storage_offset=self.storage_offset,
            data_start=self.data_start + offset,
            data_nbytes=self.data_nbytes,
            crc32=crc if crc or not self.data_nbytes else None,
        )


class _StorageDtype(NamedTuple):
    """A storage class: its dtype, or None for the untyped one, which counts bytes."""

    dtype: DType | None


class _ViewedStorage(NamedTuple):
    """The storage that the tensor views."""

    dtype: DType | None
    num_units: int
    """Elements, or bytes if the class has no dtype."""


class _Hooks:
    """An empty OrderedDict."""


def parse_tensor(data: bytes, where: str) -> TensorRecord:
    """Return the one tensor that a `data.pkl` describes, with positions relative to its storage.

    Args:
        data: content of the entry.
        where: name of the entry in messages, escaped.

    Raises:
        SourceError: damaged, hostile, or not one plain tensor.
    """
    value = Strict(data, _VOCABULARY, in_columns=False).run(where)
    if not isinstance(value, TensorRecord):
        raise SourceError(f"{where}: it holds something other than one tensor")
    return value


def _make_storage(value: object) -> _ViewedStorage:
    """Return the storage for a persistent id of torch: ("storage", class, key, location, number of elements)."""
    if type(value) is not tuple or len(value) != 5 or type(value[0]) is not str or value[0] != "storage":
        raise Refusal("a persistent id that is not a storage")
    _, cls, key, location, count = value
    if type(cls) is not _StorageDtype or type(key) is not str or key != "0" or type(location) is not str:
        raise Refusal("a storage that is not the record's only one")
    if location == "meta":
        raise Refusal("a storage on the meta device, which has no values")
    if type(count) is not int or not 0 <= count < _MAX_ELEMENTS:
        raise Refusal("a storage of impossible size")
    return _ViewedStorage(cls.dtype, count)


def _rebuild_v2(args: tuple[Any, ...]) -> TensorRecord:
    """(storage, offset, shape, stride, requires_grad, hooks[, metadata])."""
    if len(args) not in (6, 7) or type(args[0]) is not _ViewedStorage or args[0].dtype is None:
        raise Refusal("_rebuild_tensor_v2 with other arguments than torch gives it")
    return _make_view(args[0].dtype, args[0].num_units * args[0].dtype.itemsize, args[1:6], args[6:])


def _rebuild_v3(args: tuple[Any, ...]) -> TensorRecord:
    """(storage, offset, shape, stride, requires_grad, hooks, dtype[, metadata]); the storage counts bytes."""
    if len(args) not in (7, 8) or type(args[0]) is not _ViewedStorage or args[0].dtype is not None:
        raise Refusal("_rebuild_tensor_v3 with other arguments than torch gives it")
    if type(args[6]) is not DType:
        raise Refusal("_rebuild_tensor_v3 without a dtype")
    return _make_view(args[6], args[0].num_units, args[1:6], args[7:])


def _make_view(dtype: DType, nbytes: int, view: tuple[Any, ...], metadata: tuple[Any, ...]) -> TensorRecord:
    offset, shape, stride, requires_grad, hooks = view
    if metadata and metadata[0] is not None:
        flags = ", ".join(map(escape, metadata[0])) if type(metadata[0]) is dict else "unknown flags"
        raise Refusal(f"the tensor is a lazy view ({flags}): its bytes alone are not its values")
    if type(offset) is not int or not 0 <= offset < _MAX_ELEMENTS or type(requires_grad) is not bool:
        raise Refusal("a tensor with an impossible offset")
    if type(hooks) is not _Hooks or not (is_extent(shape) and is_extent(stride)) or len(shape) != len(stride):
        raise Refusal("a tensor with an impossible shape or stride")
    if prod(shape) >= _MAX_ELEMENTS:  # a stride of 0 needs no bytes
        raise Refusal("a tensor of more elements than can be counted")
    return TensorRecord(
        dtype=dtype,
        shape=shape,
        stride=stride,
        storage_offset=offset,
        data_start=0,
        data_nbytes=nbytes,
        crc32=None,
    )


def is_extent(value: object) -> TypeGuard[Shape]:
    """True for a tuple that can be a shape or a stride."""
    return (
        type(value) is tuple
        and len(value) <= _MAX_DIMS
        and all(type(size) is int and 0 <= size < _MAX_ELEMENTS for size in value)
    )


def _make_hooks(args: tuple[Any, ...]) -> _Hooks:
    if args:
        raise Refusal("an OrderedDict that is not empty")
    return _Hooks()


_VOCABULARY = Vocabulary(
    names={
        ("torch._utils", "_rebuild_tensor_v2"): Global("_rebuild_tensor_v2", call=_rebuild_v2),
        ("torch._utils", "_rebuild_tensor_v3"): Global("_rebuild_tensor_v3", call=_rebuild_v3),
        ("collections", "OrderedDict"): Global("OrderedDict", call=_make_hooks),
        ("torch.storage", "UntypedStorage"): _StorageDtype(None),
        **{("torch", name): _StorageDtype(BY_NAME[dtype]) for name, dtype in STORAGES.items()},
        **{("torch", name): dtype for name, dtype in BY_NAME.items()},
    },
    max_bytes=_MAX_BYTES,
    persistent=_make_storage,
)


def strided_file(source: SourceFile, entry: TensorEntry, record: TensorRecord) -> SourceFile:
    """Return a virtual file that is one tensor. Decoding it puts the tensor into row-major order.

    Args:
        source: the file with the record.
        entry: the tensor of which the record is a chunk, or the whole.
        record: of a dense tensor, contiguous or not.
    """

    def decode(on_read: OnRead) -> memoryview:
        return read_row_major(source.path, source.name, record, on_read, follow=False)

    span = record.data_start, record.data_start + record.data_nbytes
    return decoded_file(source, entry, record.nbytes, Decoded(decode, span))


def read_row_major(
    path: str, name: str, record: TensorRecord, on_read: OnRead, *, follow: bool
) -> memoryview:
    """Return a tensor's bytes in row-major order.

    Args:
        path: of the file.
        name: of the file in messages.
        record: of a dense tensor in it.
        on_read: called with the bytes of the storage.
        follow: as for `open_regular`.
    """
    with open_regular(path, name, follow=follow) as (fd, _):
        data = memoryview(read_exactly(fd, record.data_start, record.data_nbytes, name))
    on_read(path, record.data_start, data)
    return gather_strided(data, record)


def decoded_file(source: SourceFile, entry: TensorEntry, nbytes: int, decoded: Decoded) -> SourceFile:
    """Return a virtual file of `nbytes` bytes, which exist only after decoding; it has the stamp of its source."""
    name = f"{source.name}:{entry.fqn}"
    return SourceFile(name=name, path=source.path, size=nbytes, derivation=decoded, stamp=source.stamp)


def gather_strided(storage: memoryview, record: TensorRecord) -> memoryview:
    """Return a strided tensor's bytes in row-major order.

    Args:
        storage: the bytes of the record's storage.
        record: of the tensor that views them.
    """
    import numpy as np

    itemsize = record.dtype.itemsize
    view = np.ndarray(
        record.shape,
        np.dtype((np.void, itemsize)),  # numpy has no bfloat16 or float8; bytes are moved, not values
        storage,
        record.storage_offset * itemsize,
        tuple(stride * itemsize for stride in record.stride),
    )
    data = view.tobytes()
    if record.flipped:
        values = np.frombuffer(data, np.uint8).reshape(-1, itemsize).copy()
        values[:, record.flipped] ^= 0x80
        data = values.tobytes()
    return memoryview(data)
