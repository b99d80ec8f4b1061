"""Plain values of quantised tensors: stored numbers times stored scales, computed box by box in bounded memory.

    fp8      X.weight in fp8, and X.weight_scale_inv (or X.weight_scale) with one scale for each block, or one in all:
             value = number * scale. The last blocks of a dim may be shorter.
    MXFP4    X_blocks, two 4-bit numbers in each byte, and X_scales, an exponent for each 32 numbers: gpt_oss. The model
             has the last two dims swapped. Other tools write X.weight or X.weight_packed and
             X.weight_scale or X.scale, with the dims of the weight.

The product is computed in float32 and rounded once, as in transformers. Each box is read together with its scales.

A quantisation method is a codec and a `Method`; `formats/quantised` has the table.

Source: transformers 5.23, integrations/finegrained_fp8.py (Fp8Dequantize) and integrations/mxfp4.py; compressed-tensors
0.20.0, compressors/mxfp4 and mxfp8; nvidia-modelopt 0.47.0, torch/export/quant_utils.py (to_quantized_weight).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from shardkit.core.catalog import StoredParts
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, blocks, full_region, shifted, window
from shardkit.core.text import escape
from shardkit.transfer.codecs.boxes import copy_array, kind_of
from shardkit.transfer.codecs.codes import E2M1, NUM_CODES, code_values, powers_of_two
from shardkit.transfer.codecs.convert import as_float32
from shardkit.transfer.codecs.products import BoxScales, multiply
from shardkit.transfer.codecs.quantize import CODES, Fp8Form

if TYPE_CHECKING:
    import numpy

_MAX_NUMBERS = 1 << 20  # read at once
PAIR = 2
"""Numbers of 4 bits in a byte."""
_BLOCK_NBYTES = 16
_GROUPED, _NUM_DIMS = "_blocks", 3  # of gpt_oss
_NUMBERS_OF_4_BITS = ("uint8", "int8", "float4_e2m1fn_x2")
_EXPONENTS = ("uint8", "float8_e8m0fnu")
_NUMBERS = frozenset("float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split())
_SCALE_DTYPES = frozenset("float32 bfloat16 float16 float8_e8m0fnu uint8".split())
ADDED = ("_scale_inv", "_scale")
"""Suffixes of a weight's name for its scales."""
_LEAST_BLOCK = 1024  # numbers: the scales of a whole weight are in memory
_WRITTEN_SCALES = ("float32", "bfloat16", "float8_e8m0fnu")
_LAST = ("scale", "qscale_weight")  # or it replaces `weight`
_OF_CLASSES = (
    "_qdata",
    "._data",
)  # the numbers of torchao's and quanto's classes, with scales of their own kinds
_DEFAULT_BLOCK = (128, 128)  # FineGrainedFP8Config of transformers; may be missing in a config
INCOMPLETE = ("pre_quant_scale", "svdquant_lora_a", "weight_zero_point", "weight_g_idx")
"""Names of further tensors that a weight depends on (AWQ, SVDQuant, zero points, permuted columns)."""
_WRITERS = {
    "fp8": "",
    "fbgemm_fp8": "",
    "compressed-tensors": "'(float|mxfp8)-quantized'",
    "modelopt": "'quant_algo': '(mx)?fp8",
}
_WRITERS_OF_PAIRS = {"compressed-tensors": "'mxfp4-pack-quantized'", "modelopt": "mxfp4"}
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "qscale_act")


class Held(Protocol):
    """Dtype and shape of a stored tensor."""

    @property
    def dtype(self) -> DType:
        """As stored."""

    @property
    def shape(self) -> Shape:
        """Of the whole tensor, in elements."""


class ScaledNames(NamedTuple):
    """Names of the stored tensors of one quantised weight, found by names and dtypes only."""

    plain: str
    """The name of the plain weight."""
    numbers: str
    scales: str
    """Empty if they are missing."""
    second: str = ""
    """The scale of all scales; empty if there is none."""
    dropped: tuple[str, ...] = ()
    """Possible names of tensors that a plain model does not need, such as the scales of activations."""

    @property
    def stored(self) -> tuple[str, ...]:
        """The stored tensors of the weight."""
        return tuple(filter(None, (self.numbers, self.scales, self.second)))


class Blocks(NamedTuple):
    """The blocks of numbers that share a scale."""

    shape: Shape
    """Shape of the unpacked numbers."""
    sizes: Shape
    """Size of a block along each leading dim; along any further dim all numbers share a scale."""


@dataclass(frozen=True, slots=True)
class Method:
    """A quantisation method: names of its tensors, files that plain models do not need, and the codec."""

    name: str
    """The name in messages."""
    codec: type[Product]
    claim: Callable[[str, Mapping[str, Held]], ScaledNames | None]
    """Returns the names of a weight's tensors if a name is that of its numbers; uses names and dtypes only."""
    fit: Callable[[ScaledNames, Mapping[str, Held], Mapping[str, Any]], Blocks]
    """Returns the blocks, from shapes and the method's part of the config.

    Raises:
        ValueError: scales are missing, or do not match the numbers.
    """
    is_declared: Callable[[str, Any], bool]
    """True if a config declares this method, given its `quant_method` and the whole quantisation config."""
    shows: bool = True
    """True if names alone identify the method, so that operations that would separate scales can be refused."""
    files: tuple[str, ...] = ()
    """Files that describe the quantisation, and are dropped with it."""
    form: Callable[[Scaled, Mapping[str, Held], Mapping[str, Any]], Fp8Form] | None = None
    """Returns how to quantise a weight as another one is, which is given with the stored tensors and the method's part
    of the config. None if weights are never quantised by this method here.

    Raises:
        ValueError: this form is only read.
    """


class Scaled(NamedTuple):
    """A tensor that is stored as numbers and scales."""

    method: Method
    names: ScaledNames
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Product:
    """Computes an fp8 tensor, numbers times scales; a `Codec`, and the base of similar ones."""

    scaled: Scaled
    dtype: DType
    needs_torch: ClassVar[bool] = False

    @property
    def of(self) -> tuple[str, ...]:
        """Numbers, scales, and the scale of scales."""
        return self.scaled.names.stored

    @property
    def shape(self) -> Shape:
        """Shape of the plain tensor."""
        return tuple(self.scaled.blocks.shape[dim] for dim in self._dims)

    @property
    def _dims(self) -> tuple[int, ...]:
        """The stored dim of each dim of the tensor."""
        return tuple(range(len(self.scaled.blocks.shape)))

    def fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box of the plain tensor."""
        back = [self._dims.index(dim) for dim in range(len(self._dims))]
        below = Region(tuple(region.offsets[d] for d in back), tuple(region.sizes[d] for d in back))
        turned = target.transpose(back)
        for block in blocks(below.sizes, _MAX_NUMBERS):
            self._fill(parts, shifted(block, below.offsets), turned[window(block) or ...])

    def _fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box by stored dims."""
        self._multiply(parts, region, self.scaled.blocks.sizes, target)

    def _multiply(self, parts: StoredParts, region: Region, sizes: Shape, target: numpy.ndarray) -> None:
        """Compute the values of a box of bytes.

        Args:
            parts: the stored tensors.
            region: of the bytes.
            sizes: bytes of a block along each leading dim.
            target: receives the values, as unsigned integers that hold those of a byte side by side.
        """
        codes, scales = self._codes(parts, region), self._scales(parts, region, sizes)
        multiply(codes, region, self._numbers(parts), scales, self.dtype, target)

    def _codes(self, parts: StoredParts, region: Region) -> numpy.ndarray:
        """Return a box of the stored bytes."""
        return parts.box(self.scaled.names.numbers, region)

    def _numbers(self, parts: StoredParts) -> numpy.ndarray:
        """Return the numbers of each byte in float32: (256, numbers in a byte)."""
        numbers: numpy.ndarray = code_values(parts.entry(self.scaled.names.numbers).dtype.name)[:, None]
        return numbers.astype("f4")

    def _scales(self, parts: StoredParts, region: Region, sizes: Shape) -> BoxScales:
        """Return the scales of a box of bytes; arguments as for `_multiply`."""
        import numpy

        name, (shape, block) = self.scaled.names.scales, self.scaled.blocks
        first, dtype = tuple[int, ...](), parts.entry(name).dtype
        if all(n >= size for n, size in zip(block, shape, strict=False)):
            stored = parts.box(name, full_region(parts.entry(name).shape)).reshape(())
        else:
            first = tuple(offset // n for offset, n in zip(region.offsets, sizes, strict=False))
            last = tuple((stop - 1) // n for stop, n in zip(region.stops, sizes, strict=False))
            grid = Region(first, tuple(b - a + 1 for a, b in zip(first, last, strict=True)))
            stored = parts.box(name, grid)
        indices: numpy.ndarray
        if dtype.itemsize == 1:
            with numpy.errstate(over="ignore"):
                values, indices = self._scale_codes(dtype).astype("f4"), stored.astype("u2")
        else:
            values, kind = as_float32(stored, dtype).reshape(-1), "u2" if stored.size <= NUM_CODES else "u4"
            indices = numpy.arange(stored.size, dtype=kind).reshape(stored.shape)
        return BoxScales(self._with_second(parts, values), indices, first, sizes[: len(first)])

    def _scale_codes(self, dtype: DType) -> numpy.ndarray:
        """Return the scales of all codes of a dtype of 8 bits, in float64."""
        return powers_of_two() if dtype.name == "uint8" else code_values(dtype.name)

    def _with_second(self, parts: StoredParts, scales: numpy.ndarray) -> numpy.ndarray:
        """Return the scales with the scale of all scales."""
        return scales


class Pairs(Product):
    """Computes a tensor of 4-bit numbers, two neighbours of a dim in each byte, and scales; a `Codec`."""

    __slots__ = ()

    def _fill(self, parts: StoredParts, region: Region, target: numpy.ndarray) -> None:
        """Compute a box by stored dims."""
        import numpy

        dim = next(dim for dim, size in enumerate(self.scaled.blocks.sizes) if size > 1)
        first, stop = region.offsets[dim] // PAIR, -(-region.stops[dim] // PAIR)
        in_bytes = Region(_replaced(region.offsets, dim, first), _replaced(region.sizes, dim, stop - first))
        sizes, skipped, itemsize = self.scaled.blocks.sizes, region.offsets[dim] % PAIR, self.dtype.itemsize
        is_last = dim == target.ndim - 1 and target.strides[dim] == itemsize
        is_whole = is_last and skipped == region.sizes[dim] % PAIR == 0
        kind = kind_of(PAIR * itemsize)
        pairs = target.view(kind) if is_whole else numpy.empty(in_bytes.sizes, kind)
        self._multiply(parts, in_bytes, _replaced(sizes, dim, sizes[dim] // PAIR), pairs)
        if is_whole:
            return
        single = pairs.view(kind_of(itemsize)).reshape(*pairs.shape, PAIR)
        values = numpy.moveaxis(single, -1, dim + 1).reshape(
            _replaced(pairs.shape, dim, PAIR * (stop - first))
        )
        inside = (slice(None),) * dim + (slice(skipped, skipped + region.sizes[dim]),)
        copy_array(values[inside], target)

    def _numbers(self, parts: StoredParts) -> numpy.ndarray:
        """Return both numbers of each byte in float32; the first one is in the low half."""
        import numpy

        numbers, codes = numpy.array(E2M1, "f4"), numpy.arange(NUM_CODES)
        return numpy.stack((numbers[codes & 0xF], numbers[codes >> 4]), axis=1)


class Exponents(Pairs):
    """Computes an MXFP4 tensor of gpt_oss, whose last two stored dims are one dim of the numbers; a `Codec`."""

    __slots__ = ()

    @property
    def _dims(self) -> tuple[int, ...]:
        return 0, 2, 1

    def _codes(self, parts: StoredParts, region: Region) -> numpy.ndarray:
        """Return a box of the stored bytes, whose dims are those of the numbers."""
        start, stop = region.offsets[-1], region.stops[-1]
        first, num_groups = start // _BLOCK_NBYTES, -(-stop // _BLOCK_NBYTES) - start // _BLOCK_NBYTES
        groups = Region((*region.offsets[:-1], first, 0), (*region.sizes[:-1], num_groups, _BLOCK_NBYTES))
        codes = parts.box(self.scaled.names.numbers, groups)
        codes = codes.reshape((*region.sizes[:-1], num_groups * _BLOCK_NBYTES))
        return codes[..., start - first * _BLOCK_NBYTES : stop - first * _BLOCK_NBYTES]

    # Doubled numbers with half of the scales: 2^128 is infinite in float32, but 0.5 * 2^128 is not.
    def _numbers(self, parts: StoredParts) -> numpy.ndarray:
        """Return twice both numbers of each byte in float32."""
        return super()._numbers(parts) * 2

    def _scale_codes(self, dtype: DType) -> numpy.ndarray:
        """Return half of the scales of all codes, in float64."""
        return super()._scale_codes(dtype) / 2


def _replaced(sizes: Shape, dim: int, size: int) -> Shape:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _fp8_form(scaled: Scaled, tensors: Mapping[str, Held], described: Mapping[str, Any]) -> Fp8Form:
    """Return the form of an fp8 weight; see `Method.form`."""
    names, (shape, block) = scaled.names, scaled.blocks
    numbers, scale = tensors[names.numbers].dtype, tensors[names.scales].dtype
    if numbers is not CODES:
        raise ValueError(f"its numbers are {numbers.name}")
    if scale.name not in _WRITTEN_SCALES:
        raise ValueError(f"its scales are {scale.name}")
    method, is_exponent = described.get("quant_method"), scale.name == _EXPONENTS[1]
    form = None
    if names.scales == f"{names.plain}{ADDED[0]}" and method == "fp8" and len(block) == len(shape) > 1:
        form = Fp8Form((block[-2], block[-1]), scale, is_exponent or described.get("scale_fmt") == "ue8m0")
    elif names.scales == f"{names.plain}{ADDED[1]}" and method == "compressed-tensors" and not is_exponent:
        form = Fp8Form(None, scale)
    if form is None or len(shape) < 2 or 0 in shape or form.grid(shape) != tensors[names.scales].shape:
        raise ValueError(
            "its scales are neither weight_scale_inv of blocks nor those of compressed-tensors' rows"
        )
    if form.block is not None and prod(form.block) < min(_LEAST_BLOCK, prod(shape[-2:])):
        raise ValueError(f"its blocks have fewer than {_LEAST_BLOCK} numbers")
    return form


def is_declared(writers: Mapping[str, str], method: str, described: Any) -> bool:
    """True if a config declares a method, for all layers or for a group; `writers` is library -> name of the method.

    False with transforms of compressed-tensors: such models also transform the inputs of layers.
    """
    mark = writers.get(method)
    is_plain = mark is not None and not described.get("transform_config")
    return is_plain and re.search(str(mark), repr(described).lower()) is not None


def _activation_scales(plain: str) -> tuple[str, ...]:
    return tuple(f"{plain.rpartition('.')[0]}.{last}" for last in _OF_ACTIVATIONS)


def _claim_fp8(name: str, tensors: Mapping[str, Held]) -> ScaledNames | None:
    if tensors[name].dtype.name not in _NUMBERS or name.endswith(_OF_CLASSES):
        return None
    stem, _, last = name.rpartition(".")
    replaced = _LAST if last == "weight" else ()  # a norm may have a `scale` of its own, in fp8 too
    candidates = (*(name + end for end in ADDED), *(f"{stem}.{end}" for end in replaced))
    scales = next((scales for scales in candidates if scales in tensors), "")
    return ScaledNames(name, name, scales, dropped=_activation_scales(name))


def _fit_fp8(claim: ScaledNames, tensors: Mapping[str, Held], config: Mapping[str, Any]) -> Blocks:
    if not claim.scales:
        raise ValueError("fp8 without scales")
    layer = claim.numbers.rpartition(".")[0]
    more = [name for last in INCOMPLETE if (name := f"{layer}.{last}") in tensors]
    if more:
        raise ValueError(f"its values depend on {escape(more[0])} too")
    shape, scales = tensors[claim.numbers].shape, tensors[claim.scales]
    if scales.dtype.name not in _SCALE_DTYPES:
        raise ValueError(f"its scales {escape(claim.scales)} are {scales.dtype.name}")
    size = _block_size(config.get("weight_block_size"))
    return Blocks(shape, _block(shape, scales.shape, size, claim.scales))


def _block_size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return None


def _block(shape: Shape, grid: Shape, block: tuple[int, int] | None, scales: str) -> Shape:
    """Return how many numbers share a scale along each dim."""
    if all(size == 1 for size in grid):
        return tuple(max(size, 1) for size in shape)
    if len(shape) == len(grid) + 1 == 2 and grid == shape[:1]:  # ModelOpt's scale of each row
        return (1,)
    if len(grid) == len(shape) >= 2 and 0 not in grid:
        whole = (*(1 for _ in shape[2:]), *(block or _DEFAULT_BLOCK))
        if grid == tuple(-(-size // n) for size, n in zip(shape, whole, strict=True)):
            return whole
        if all(size % n == 0 for size, n in zip(shape, grid, strict=True)):
            return tuple(max(size // n, 1) for size, n in zip(shape, grid, strict=True))
    reason = "the config has no block size" if block is None else f"blocks are {list(block)}"
    raise ValueError(f"it is {list(shape)}, its scales {escape(scales)} are {list(grid)}, and {reason}")


def _claim_mxfp4(name: str, tensors: Mapping[str, Held]) -> ScaledNames | None:
    plain = name.removesuffix(_GROUPED)
    scales = tensors.get(f"{plain}_scales")
    if plain == name or scales is None or {tensors[name].dtype.name, scales.dtype.name} != {"uint8"}:
        return None
    return ScaledNames(plain, name, f"{plain}_scales", dropped=_activation_scales(plain))


def _fit_mxfp4(claim: ScaledNames, tensors: Mapping[str, Held], config: Mapping[str, Any]) -> Blocks:
    stored, grid = tensors[claim.numbers].shape, tensors[claim.scales].shape
    if claim.numbers.endswith(_GROUPED):
        fits = len(grid) == _NUM_DIMS and stored == (*grid, _BLOCK_NBYTES)
    else:
        fits = len(grid) > 0 and stored == (*grid[:-1], grid[-1] * _BLOCK_NBYTES)
    if not fits:
        raise ValueError(f"it is {list(stored)}, and its scales {escape(claim.scales)} are {list(grid)}")
    size = _BLOCK_NBYTES * PAIR
    return Blocks((*grid[:-1], grid[-1] * size), (*(1 for _ in grid[:-1]), size))


def _claim_pairs(name: str, tensors: Mapping[str, Held]) -> ScaledNames | None:
    plain = name.removesuffix("_packed")
    layer, _, last = plain.rpartition(".")
    if last != "weight" or tensors[name].dtype.name not in _NUMBERS_OF_4_BITS:
        return None
    candidates = (*(plain + end for end in ADDED), f"{layer}.scale")
    scales = next((at for at in candidates if at in tensors and tensors[at].dtype.name in _EXPONENTS), None)
    if scales is None or any(f"{layer}.{end}" in tensors for end in INCOMPLETE):
        return None
    return ScaledNames(plain, name, scales, dropped=_activation_scales(plain))


FP8 = Method("fp8", Product, _claim_fp8, _fit_fp8, partial(is_declared, _WRITERS), form=_fp8_form)
MXFP4 = Method("mxfp4", Exponents, _claim_mxfp4, _fit_mxfp4, lambda method, _: method == "mxfp4")
PAIRS = Method("mxfp4", Pairs, _claim_pairs, _fit_mxfp4, partial(is_declared, _WRITERS_OF_PAIRS), shows=False)
