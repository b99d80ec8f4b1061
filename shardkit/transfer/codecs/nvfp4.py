"""Plain values of NVFP4 weights: 4-bit numbers, an fp8 scale for each 16 of them, and a scale of all these scales.

    ModelOpt            X.weight, X.weight_scale, X.weight_scale_2: number * (scale * weight_scale_2), and a number that
                        rounded to zero lost its sign; of a parameter with another name P, such as experts in one, P,
                        P_weight_scale, P_weight_scale_2
    compressed-tensors  X.weight_packed, X.weight_scale, X.weight_global_scale: number * (scale / weight_global_scale), with
                        negative zeros

Both compute in float32, in this order, and round once. The low half of a byte is the first of its two numbers.

Source: nvidia-modelopt 0.47.0, torch/quantization/qtensor/nvfp4_tensor.py (NVFP4QTensor.dequantize) and torch/export
(hf_quant_config.json, quantizer_attr_names); compressed-tensors 0.20.0, compressors/nvfp4/base.py (decompress) and
quantization/lifecycle/forward_helpers.py (_dequantize).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shardkit.core.catalog import StoredParts
from shardkit.core.regions import full_region
from shardkit.core.text import escape
from shardkit.transfer.codecs.dequantize import (
    INCOMPLETE,
    PAIR,
    Blocks,
    Held,
    Method,
    Pairs,
    ScaledNames,
    is_declared,
)

if TYPE_CHECKING:
    import numpy

EXPORT_CONFIG = "hf_quant_config.json"
"""A file of ModelOpt; config.json may not mention the quantisation."""
_WRITERS = {"modelopt": "nvfp4", "compressed-tensors": "nvfp4"}  # both have many other methods too
_PACKED = ".weight_packed"
_GROUP = 16  # numbers that share a scale
_SECOND, _DIVISOR = "_scale_2", "_global_scale"
_DTYPES = ("float8_e4m3fn", "float32")  # scales, and the scale of scales
_BESIDE = ("input_scale", "input_global_scale")  # scales of a layer's inputs


class TwoScales(Pairs):
    """Computes an NVFP4 weight; a `Codec`."""

    __slots__ = ()

    @property
    def _divides(self) -> bool:
        return self.scaled.names.second.endswith(_DIVISOR)

    def _numbers(self, parts: StoredParts) -> numpy.ndarray:
        """Return both numbers of each byte in float32."""
        numbers = super()._numbers(parts)
        return numbers if self._divides else numbers + 0.0  # removes the sign of zeros

    def _with_second(self, parts: StoredParts, scales: numpy.ndarray) -> numpy.ndarray:
        """Return the scales with the scale of all scales."""
        import numpy

        name = self.scaled.names.second
        second = parts.box(name, full_region(parts.entry(name).shape)).view("f4").reshape(())
        with numpy.errstate(all="ignore"):
            scaled: numpy.ndarray = scales / second if self._divides else scales * second
        return scaled


def _claim(name: str, tensors: Mapping[str, Held]) -> ScaledNames | None:
    if tensors[name].dtype.name != "uint8":
        return None
    is_packed = name.endswith(_PACKED)
    plain = name.removesuffix("_packed") if is_packed else name
    base = plain if plain.rpartition(".")[2] == "weight" else f"{plain}_weight"
    scales, second = f"{base}_scale", base + (_DIVISOR if is_packed else _SECOND)
    dtypes = tuple(tensors[name].dtype.name for name in (scales, second) if name in tensors)
    layer = base.removesuffix("weight")
    if dtypes != _DTYPES or any(layer + last in tensors for last in INCOMPLETE):
        return None
    return ScaledNames(plain, name, scales, second, tuple(layer + last for last in _BESIDE))


def _fit(claim: ScaledNames, tensors: Mapping[str, Held], config: Mapping[str, Any]) -> Blocks:
    stored, grid = tensors[claim.numbers].shape, tensors[claim.scales].shape
    # The dim of the inputs, which is not the last one for fused experts (ModelOpt, Llama 4 and gpt_oss).
    packed = [dim for dim, sizes in enumerate(zip(stored, grid, strict=False)) if sizes[0] != sizes[1]]
    size = stored[packed[0]] * PAIR if len(packed) == 1 else 0
    if len(grid) != len(stored) or not size or size != grid[packed[0]] * _GROUP:
        raise ValueError(f"it is {list(stored)}, and its scales {escape(claim.scales)} are {list(grid)}")
    second = list(tensors[claim.second].shape)
    if any(size != 1 for size in second):
        raise ValueError(f"the scale of its scales, {escape(claim.second)}, is {second}")
    dims = range(len(stored))
    return Blocks(
        tuple(size if dim in packed else stored[dim] for dim in dims),
        tuple(_GROUP if dim in packed else 1 for dim in dims),
    )


NVFP4 = Method(
    "nvfp4", TwoScales, _claim, _fit, partial(is_declared, _WRITERS), shows=False, files=(EXPORT_CONFIG,)
)
