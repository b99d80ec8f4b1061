"""`data.pkl` of a `torch.save` record that holds one plain tensor.

Source: torch 2.2 and 2.13, torch/_utils.py (`_rebuild_tensor_v2`, `_rebuild_tensor_v3`) and
torch/serialization.py (`persistent_id`).
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple, TypeGuard

from shardkit.core.dtypes import BY_NAME, DType
from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.pickles.interpreter import Global, Refusal, Vocabulary, parse

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


class StoredTensor(NamedTuple):
    """What a `data.pkl` says."""

    dtype: DType
    shape: Shape
    stride: Shape
    storage_offset: int
    storage_nbytes: int


class _StorageClass(NamedTuple):
    """A storage class: its dtype, None for the untyped one, which counts bytes."""

    dtype: DType | None


class _Storage(NamedTuple):
    """The storage that the tensor views."""

    dtype: DType | None
    num_units: int
    """Elements, or bytes where the class has no dtype."""


class _Hooks:
    """An empty OrderedDict."""


def parse_tensor(data: bytes, where: str) -> StoredTensor:
    """Return the one tensor that a `data.pkl` describes.

    Args:
        data: the whole entry.
        where: what to call it in messages, escaped.

    Raises:
        SourceError: damaged, hostile, or not one plain tensor.
    """
    value = parse(data, _VOCABULARY, where)
    if not isinstance(value, StoredTensor):
        raise SourceError(f"{where}: it holds something other than one tensor")
    return value


def _make_storage(value: object) -> _Storage:
    """("storage", class, key, location, number of elements), as torch names a storage in a pickle."""
    if type(value) is not tuple or len(value) != 5 or type(value[0]) is not str or value[0] != "storage":
        raise Refusal("a persistent id that is not a storage")
    _, cls, key, location, count = value
    if type(cls) is not _StorageClass or type(key) is not str or key != "0" or type(location) is not str:
        raise Refusal("a storage that is not the record's only one")
    if location == "meta":
        raise Refusal("a storage on the meta device, which has no values")
    if type(count) is not int or not 0 <= count < _MAX_ELEMENTS:
        raise Refusal("a storage of impossible size")
    return _Storage(cls.dtype, count)


def _rebuild_v2(args: tuple[Any, ...]) -> StoredTensor:
    """(storage, offset, shape, stride, requires_grad, hooks[, metadata])."""
    if len(args) not in (6, 7) or type(args[0]) is not _Storage or args[0].dtype is None:
        raise Refusal("_rebuild_tensor_v2 with other arguments than torch gives it")
    return _view(args[0].dtype, args[0].num_units * args[0].dtype.itemsize, args[1:6], args[6:])


def _rebuild_v3(args: tuple[Any, ...]) -> StoredTensor:
    """(storage, offset, shape, stride, requires_grad, hooks, dtype[, metadata]); the storage counts bytes."""
    if len(args) not in (7, 8) or type(args[0]) is not _Storage or args[0].dtype is not None:
        raise Refusal("_rebuild_tensor_v3 with other arguments than torch gives it")
    if type(args[6]) is not DType:
        raise Refusal("_rebuild_tensor_v3 without a dtype")
    return _view(args[6], args[0].num_units, args[1:6], args[7:])


def _view(dtype: DType, nbytes: int, view: tuple[Any, ...], metadata: tuple[Any, ...]) -> StoredTensor:
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
    return StoredTensor(dtype, shape, stride, offset, nbytes)


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
        ("torch.storage", "UntypedStorage"): _StorageClass(None),
        **{("torch", name): _StorageClass(BY_NAME[dtype]) for name, dtype in STORAGES.items()},
        **{("torch", name): dtype for name, dtype in BY_NAME.items()},
    },
    max_bytes=_MAX_BYTES,
    persistent=_make_storage,
)
