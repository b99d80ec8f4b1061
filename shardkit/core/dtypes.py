"""Element types: torch's names, sizes in bytes, and safetensors' tags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["float", "int", "bool", "complex"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type. Each exists once (in `BY_NAME`), so identity is equality and hashing is cheap."""

    name: str
    """torch's name, e.g. "bfloat16"; `getattr(torch, name)` is the dtype."""
    itemsize: int
    """Bytes of one element, as torch counts elements: one of float4_e2m1fn_x2 holds two values."""
    kind: Kind
    safetensors: str | None
    """The tag in a safetensors header; None if that format lacks the type."""

    @property
    def is_floating(self) -> bool:
        """True for real floating types."""
        return self.kind == "float"

    @property
    def is_convertible(self) -> bool:
        """True if a value has a meaning of its own: fp8 and fp4 need scales that are stored elsewhere."""
        return self.kind == "float" and self.itemsize >= 2


# safetensors tags: safetensors 0.8, safetensors/src/tensor.rs, enum Dtype. torch names: torch 2.13.
_ALL = (
    DType("float64", 8, "float", "F64"),
    DType("float32", 4, "float", "F32"),
    DType("float16", 2, "float", "F16"),
    DType("bfloat16", 2, "float", "BF16"),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3"),
    DType("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ"),
    DType("float8_e5m2", 1, "float", "F8_E5M2"),
    DType("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, "float", "F8_E8M0"),
    DType("float4_e2m1fn_x2", 1, "float", "F4"),
    DType("complex128", 16, "complex", None),
    DType("complex64", 8, "complex", "C64"),
    DType("complex32", 4, "complex", None),
    DType("int64", 8, "int", "I64"),
    DType("int32", 4, "int", "I32"),
    DType("int16", 2, "int", "I16"),
    DType("int8", 1, "int", "I8"),
    DType("uint64", 8, "int", "U64"),
    DType("uint32", 4, "int", "U32"),
    DType("uint16", 2, "int", "U16"),
    DType("uint8", 1, "int", "U8"),
    DType("bool", 1, "bool", "BOOL"),
)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in _ALL if dtype.safetensors}
OF_CODES: dict[str, DType] = {
    name: DType(name, size, "int", None) for name, size in (("qint8", 1), ("quint8", 1), ("qint32", 4))
}
"""Dtypes of torch's quantised tensors: shown but never read, as values are computed from codes and scales."""

CASTS: dict[str, DType] = {
    "bf16": BY_NAME["bfloat16"],
    "fp16": BY_NAME["float16"],
    "fp32": BY_NAME["float32"],
}
"""Values of `--dtype`, apart from `keep`."""
DTypeName = Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"]
"""Values of `dtype=` in the library, which also accepts torch's names."""
Cast = Literal["keep"] | DTypeName
_SHORT = {dtype.name: short for short, dtype in CASTS.items()} | {"float64": "fp64"}


def short_dtype(dtype: object) -> str:
    """Return the short name of a dtype, "bf16" for "bfloat16" and torch.bfloat16; torch's name if there is none."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def wide_among_half(dtypes: Mapping[str, DType]) -> frozenset[str] | None:
    """Return the names of the wider tensors in a model of mostly half precision; None for any other model."""
    counted = Counter(dtype for dtype in dtypes.values() if dtype.is_convertible)
    if not counted or counted.most_common(1)[0][0].itemsize > 2:
        return None
    return frozenset(name for name, dtype in dtypes.items() if dtype.is_convertible and dtype.itemsize > 2)


def most_bytes(tensors: Iterable[tuple[DType, int]]) -> DType | None:
    """Return the dtype that accounts for the most bytes of ordinary floating tensors; None without such tensors.

    Args:
        tensors: (dtype, bytes) of each.
    """
    sizes: dict[DType, int] = {}
    for dtype, nbytes in tensors:
        if dtype.is_convertible:
            sizes[dtype] = sizes.get(dtype, 0) + nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None
