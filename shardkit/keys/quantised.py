"""Tensors that are stored as narrow numbers with scales beside them: which they are, and what their values are.

    fp8      X.weight in fp8, and X.weight_scale_inv (or X.weight_scale) with one scale for each block, or one in all:
             value = number * scale. The last blocks of a dim may be shorter.
    MXFP4    X_blocks, two 4-bit numbers in each byte, and X_scales, an exponent for each 32 numbers: gpt_oss. The model
             has the last two dims in the other order.
    NVFP4    two 4-bit numbers in each byte, an fp8 scale for each 16 numbers, and a scale of all these scales:
             ModelOpt            X.weight, X.weight_scale, X.weight_scale_2, which multiplies; of a parameter with
                                 another name P, such as experts in one, P, P_weight_scale, P_weight_scale_2
             compressed-tensors  X.weight_packed, X.weight_scale, X.weight_global_scale, which divides

Other methods (GPTQ, AWQ, bitsandbytes, ...) are only recognised. Pure: names, dtypes and shapes. Some of them show in no
config and under no telling name: NVFP4 and int8 are narrow integers (or fp4) with scales beside them.

Source: transformers 5.23, integrations/finegrained_fp8.py (Fp8Dequantize) and integrations/mxfp4.py; ModelOpt 0.47,
torch/export (hf_quant_config.json, quantizer_attr_names); compressed-tensors 0.20, compressors/nvfp4/base.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardkit.core.dtypes import DType
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed
from shardkit.errors import LayoutError

FP8, MXFP4, NVFP4 = "fp8", "mxfp4", "nvfp4"
_KNOWN = (FP8, MXFP4)
_WRITE_NVFP4 = ("modelopt", "compressed-tensors")  # and much else, under the same name of a method
_CONFIG = "quantization_config"
EXPORT_CONFIG = "hf_quant_config.json"
"""What ModelOpt writes beside a config.json that may say nothing."""
_WITH_SCALES = "with scales beside them"
_CONFIGS = (_CONFIG, "compression_config")  # the second: compressed-tensors before it was one of transformers
_NUMBERS = frozenset("float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split())
_SCALE_DTYPES = frozenset("float32 bfloat16 float16 float8_e8m0fnu uint8".split())
# Of a weight: what is added to its name, or stands for its last part.
_ADDED = ("_scale_inv", "_scale")
_LAST = ("scale", "qscale_weight")
_OF_ACTIVATIONS = ("input_scale", "activation_scale")
_PACKED = (".qweight", ".qzeros", ".weight_packed", ".absmax", ".quant_map", ".SCB")
_SCALES = (
    *_PACKED,
    ".weight_scale_inv",
    ".weight_scale",
    "_proj_blocks",
    "_proj_scales",
)  # no plain tensor's
# Packed or small numbers of other methods: a tensor, and where the scales lie beside it. A mask is uint8 too.
_NARROW = frozenset("int8 uint8 uint16 uint32 float4_e2m1fn_x2".split())
_ADDED_ELSEWHERE = (*_ADDED, "_scales", "_scale_2", "_weight_scale")
_LAST_ELSEWHERE = ("scale", "scales", "weight_scale", "weight_scales", "_scale", "_weight_scale")
_OF_NUMBERS = ("weight", "codes", "_data", "qdata")
_PAIR = 2  # numbers in a byte
_BLOCK_NBYTES = 16
_NUM_DIMS = 3
_PACKED_WEIGHT = ".weight_packed"
_GROUP = 16  # numbers of NVFP4 that share a scale
_SECOND, _DIVISOR = "_scale_2", "_global_scale"
_OF_NVFP4 = ("float8_e4m3fn", "float32")  # scales, and the scale of all of them
# Beside an NVFP4 weight: of what goes into a layer; of the cache, there (ModelOpt) or at the attention (compressed-tensors).
_BESIDE_NVFP4 = ("input_scale", "input_global_scale")
_OF_CACHE = ("k_scale", "v_scale")
# Where one of these is beside them, the numbers and their scales are not the whole weight (AWQ, SVDQuant, zero points).
_INCOMPLETE = ("pre_quant_scale", "svdquant_lora_a", "weight_zero_point")


class Held(Protocol):
    """What is known of a stored tensor."""

    @property
    def dtype(self) -> DType:
        """As stored."""

    @property
    def shape(self) -> Shape:
        """Of the whole tensor, in elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A tensor whose values are stored numbers times stored scales."""

    numbers: str
    """Stored name."""
    scales: str
    """Stored name."""
    shape: Shape
    """Of the numbers, unpacked."""
    block: Shape
    """Numbers that share a scale, along each dim."""
    method: str
    """FP8, MXFP4 (two numbers are in a byte, and the last two dims of what is stored are one of `shape`), or NVFP4."""
    dims: tuple[int, ...]
    """Order of the numbers' dims in the tensor."""
    second: str | None = None
    """Stored name of the scale of all scales."""
    divides: bool = False
    """That one divides the others, and does not multiply them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Which tensors of a source are stored as numbers with scales."""

    scaled: Mapping[str, Scaled]
    """By the name that the tensor has once it is plain."""
    of_activations: tuple[str, ...]
    """Scales of what goes into a layer, which a plain model does without."""

    @property
    def methods(self) -> frozenset[str]:
        """How they are quantised."""
        return frozenset(each.method for each in self.scaled.values())

    @property
    def scales(self) -> frozenset[str]:
        """Stored names that nothing stands for once the tensors are plain."""
        scaled = self.scaled.values()
        second = (each.second for each in scaled if each.second is not None)
        return frozenset((*(each.scales for each in scaled), *second, *self.of_activations))


def method_of(config: Mapping[str, Any] | None) -> str | None:
    """Return how a config says that its weights are quantised, such as "fp8"; None if it does not."""
    described = _described(config)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, Mapping) else None
    return str(method or "of no named method")


def can_dequantize(config: Mapping[str, Any] | None) -> bool:
    """True if plain values can be made of weights that a config calls quantised so, or in a way that names may tell."""
    method = method_of(config)
    return method is None or method in _KNOWN or _says_nvfp4(config)


def _says_nvfp4(config: Mapping[str, Any] | None) -> bool:
    """True if a config of one of the two that write NVFP4 names it, for all layers or for a group of them.

    With compressed-tensors' transforms, weights are those of a model that transforms what goes into them too.
    """
    described = _described(config)
    if method_of(config) not in _WRITE_NVFP4 or described.get("transform_config"):
        return False
    return NVFP4 in repr(described).lower()


def _described(config: Mapping[str, Any] | None) -> Any:
    for part in (config or {}, (config or {}).get("text_config")):
        if isinstance(part, Mapping):
            found = next((part[key] for key in _CONFIGS if part.get(key)), None)
            if found is not None:
                return found
    return None


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the same model with plain weights."""
    plain = {key: value for key, value in config.items() if key not in _CONFIGS}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = {k: v for k, v in plain["text_config"].items() if k not in _CONFIGS}
    return plain


def why_quantised(tensors: Mapping[str, Held], config: Mapping[str, Any] | None = None) -> str | None:
    """Return the evidence that stored values mean nothing by themselves; None if there is none.

    Args:
        tensors: by stored name.
        config: config.json, if there is one.
    """
    method = method_of(config)
    if method is not None:
        kind = f" {NVFP4}" if _says_nvfp4(config) else ""
        return f"config.json has a {_CONFIG} ({escape(method)}{kind})"
    found = [*_scale_names(tensors), *_packed(tensors)]
    return _why(found, _kind(found, tensors))


def may_be_quantised(tensors: Mapping[str, Held]) -> bool:
    """True if some tensors may be numbers of quantised weights: what a config says of how they are made belongs to them."""
    fp8 = any(held.dtype.name in _NUMBERS for held in tensors.values())
    return fp8 or holds_narrow(tensors) or bool(_packed(tensors))


def holds_narrow(tensors: Mapping[str, Held]) -> bool:
    """True if some tensor may be the packed or small numbers of a quantised one."""
    return any(_narrow(tensors))


def _narrow(tensors: Mapping[str, Held]) -> Iterator[str]:
    return (name for name, held in tensors.items() if held.dtype.name in _NARROW and len(held.shape) > 1)


def why_narrow(tensors: Mapping[str, Held], exported: Mapping[str, Any] | None = None) -> str | None:
    """Return the evidence that values have scales, where neither config nor names show a method; None if there is none.

    Whole files may be moved and compared all the same. Cut apart, values and scales mean nothing.

    Args:
        tensors: by stored name.
        exported: ModelOpt's hf_quant_config.json, if there is one.
    """
    method = _exported_method(exported)
    found = [
        name
        for name in _narrow(tensors)
        if _scale_beside(name, tensors) or (method and not _is_of_mxfp4(name, tensors))
    ]
    if not found:
        return None
    said = f"{EXPORT_CONFIG} says {escape(method)}, and " if method else ""
    dtypes = " and ".join(sorted({tensors[name].dtype.name for name in found}))
    kind = _kind(found, tensors)
    return f"{said}{count(len(found), 'tensor')} of {dtypes} {_WITH_SCALES}{kind}: {listed(found)}"


def _exported_method(exported: Mapping[str, Any] | None) -> str | None:
    described = (exported or {}).get("quantization")
    method = described.get("quant_algo") if isinstance(described, Mapping) else None
    return str(method) if method else None


def _scale_beside(name: str, tensors: Mapping[str, Held]) -> bool:
    if any(name + end in tensors for end in _ADDED_ELSEWHERE):
        return True
    stem = name.rpartition(".")[0]
    return name.endswith(_OF_NUMBERS) and any(f"{stem}.{last}" in tensors for last in _LAST_ELSEWHERE)


def _is_of_mxfp4(name: str, tensors: Mapping[str, Held]) -> bool:
    blocks = name.removesuffix("_scales") + "_blocks" if name.endswith("_scales") else name
    return blocks in tensors and _is_mxfp4(blocks, tensors)


def why_scales(unused: Iterable[str]) -> str | None:
    """Return the same for names for which a model has no place; there a name's end is reason enough."""
    return _why([name for name in unused if name.endswith(_SCALES)])


def _why(found: list[str], kind: str = "") -> str | None:
    if not found:
        return None
    return f"{count(len(found), 'tensor')} of scales or packed values{kind}: {listed(found)}"


def _kind(found: list[str], tensors: Mapping[str, Held]) -> str:
    return "" if without_nvfp4(tensors).keys() & found else f" ({NVFP4})"


def _packed(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith(_PACKED)]


def _scale_names(tensors: Mapping[str, Held]) -> Iterator[str]:
    for name, held in tensors.items():
        if held.dtype.name in _NUMBERS:
            scales = _scales_of(name, tensors)
            if scales is not None:
                yield scales
        elif _is_mxfp4(name, tensors):
            yield _mxfp4_scales(name)


def _scales_of(name: str, tensors: Mapping[str, Held]) -> str | None:
    stem = name.rpartition(".")[0]
    wanted = (*(name + end for end in _ADDED), *(f"{stem}.{last}" for last in _LAST))
    return next((each for each in wanted if each in tensors), None)


def _is_mxfp4(name: str, tensors: Mapping[str, Held]) -> bool:
    return (
        name.endswith("_blocks")
        and tensors[name].dtype.name == "uint8"
        and (scales := tensors.get(_mxfp4_scales(name))) is not None
        and scales.dtype.name == "uint8"
    )


def _mxfp4_scales(name: str) -> str:
    return name.removesuffix("_blocks") + "_scales"


def of_nvfp4(tensors: Mapping[str, Held]) -> dict[str, Held]:
    """Return the tensors that are numbers or scales of NVFP4 weights."""
    found = dict[str, Held]()
    for name in tensors:
        if (base := _nvfp4_base(name, tensors)) is not None:
            found |= {each: tensors[each] for each in (name, *_nvfp4_scales(name, base))}
    return found


def without_nvfp4(tensors: Mapping[str, Held]) -> dict[str, Held]:
    """Return the other ones."""
    found = of_nvfp4(tensors)
    return {name: held for name, held in tensors.items() if name not in found}


def _nvfp4_base(name: str, tensors: Mapping[str, Held]) -> str | None:
    """Return what the names of a tensor's scales begin with, if it is the numbers of an NVFP4 weight."""
    if tensors[name].dtype.name != "uint8":
        return None
    plain = _plain_name(name)
    base = plain if plain.rpartition(".")[2] == "weight" else f"{plain}_weight"
    scales = [tensors.get(each) for each in _nvfp4_scales(name, base)]
    if tuple(each and each.dtype.name for each in scales) != _OF_NVFP4:
        return None
    return None if any(base.removesuffix("weight") + last in tensors for last in _INCOMPLETE) else base


def _plain_name(numbers: str) -> str:
    return numbers.removesuffix("_packed") if numbers.endswith(_PACKED_WEIGHT) else numbers


def _nvfp4_scales(name: str, base: str) -> tuple[str, str]:
    return f"{base}_scale", base + (_DIVISOR if name.endswith(_PACKED_WEIGHT) else _SECOND)


def refuse_quantised(why: str, where: str, *, has_option: bool = True, is_tried: bool = False) -> LayoutError:
    """Return the error for a source whose values mean nothing without their scales.

    Args:
        why: as `why_quantised` says.
        where: the source, for people.
        has_option: who was asked can dequantise.
        is_tried: plain values were asked for, and cannot be made.
    """
    other = "take the model that it was quantised from"
    is_other = any(each in why for each in (_CONFIG, _WITH_SCALES, *_PACKED))
    is_known = any(each in why for each in (f"({FP8})", f"({MXFP4})", f"{NVFP4})")) or not is_other
    way = "--dequantize makes" if has_option else "preshard and consolidate can make"
    hint = (
        f"{way} plain weights of fp8, MXFP4 and NVFP4 ones; or {other}"
        if is_known and not is_tried
        else f"{other}, or dequantise it with the tools of that method and save it first"
    )
    return LayoutError(
        f"quantised: {escape(where)}: {why}: its values mean nothing without their scales", hint=hint
    )


def find_scaled(tensors: Mapping[str, Held], config: Mapping[str, Any] | None, where: str) -> Quantised:
    """Return the stored tensors that the values of each quantised tensor are made of.

    Args:
        tensors: by stored name.
        config: config.json, if there is one: it tells the size of fp8's blocks.
        where: the source, for messages.

    Raises:
        LayoutError: they are quantised in a way that is not known here, or scales are missing or do not fit what they
            scale; lists all.
    """
    rest = without_nvfp4(tensors)
    is_mixed = _says_nvfp4(config) and why_narrow(rest) is not None
    if _packed(rest) or is_mixed or not can_dequantize(config):
        why = why_quantised(tensors, config)
        assert why is not None
        raise refuse_quantised(why, where, is_tried=True)
    described = _described(config)
    block = _block_size(described.get("weight_block_size") if isinstance(described, Mapping) else None)
    found, problems = dict[str, Scaled](), list[str]()
    for name, held in tensors.items():
        try:
            if (base := _nvfp4_base(name, tensors)) is not None:
                found[_plain_name(name)] = _nvfp4(name, base, tensors)
            elif name in rest and held.dtype.name in _NUMBERS:
                found[name] = _fp8(name, tensors, block)
            elif _is_mxfp4(name, tensors):
                found[name.removesuffix("_blocks")] = _mxfp4(name, tensors)
        except ValueError as error:
            problems.append(f"{escape(name)}: {error}")
    twice = [name for name in found if name in tensors and found[name].numbers != name]
    problems += [f"{escape(name)}: it is there both plain and quantised" for name in twice]
    LayoutError.raise_for(
        problems,
        f"quantised: {escape(where)}: it is not known what the values of {count(len(problems), 'tensor')} are",
        hint="config.json tells the size of blocks (weight_block_size): it must be that of these weights",
    )
    beside = (each for name, scaled in found.items() for each in _of_activations(name, scaled))
    return Quantised(scaled=found, of_activations=tuple(name for name in beside if name in tensors))


def _of_activations(name: str, scaled: Scaled) -> Iterator[str]:
    """Yield the names that scales of activations would have beside a weight."""
    if scaled.method == NVFP4:
        layer = scaled.scales.removesuffix("weight_scale")
        yield from (layer + last for last in (*_BESIDE_NVFP4, *_OF_CACHE))
        yield from (f"{layer[:-1].rpartition('.')[0]}.{last}" for last in _OF_CACHE)
    else:
        yield from (f"{name.rpartition('.')[0]}.{last}" for last in _OF_ACTIVATIONS)


def _block_size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    return None


def _fp8(name: str, tensors: Mapping[str, Held], block: tuple[int, int] | None) -> Scaled:
    scales = _scales_of(name, tensors)
    if scales is None:
        raise ValueError("fp8, and there are no scales of it")
    if tensors[scales].dtype.name not in _SCALE_DTYPES:
        raise ValueError(f"its scales {escape(scales)} are {tensors[scales].dtype.name}")
    shape, grid = tensors[name].shape, tensors[scales].shape
    return Scaled(
        numbers=name,
        scales=scales,
        shape=shape,
        block=_block(shape, grid, block, scales),
        method=FP8,
        dims=tuple(range(len(shape))),
    )


def _block(shape: Shape, grid: Shape, block: tuple[int, int] | None, scales: str) -> Shape:
    """Return how many numbers share a scale along each dim."""
    if all(size == 1 for size in grid):
        return tuple(max(size, 1) for size in shape)
    if len(grid) == len(shape) >= 2 and 0 not in grid:
        if block is not None:
            whole = (*(1 for _ in shape[2:]), *block)
            if grid == tuple(-(-size // n) for size, n in zip(shape, whole, strict=True)):
                return whole
        if all(size % n == 0 for size, n in zip(shape, grid, strict=True)):
            return tuple(max(size // n, 1) for size, n in zip(shape, grid, strict=True))
    said = "the config tells no size of blocks" if block is None else f"blocks are {list(block)}"
    raise ValueError(f"it is {list(shape)}, its scales {escape(scales)} are {list(grid)}, and {said}")


def _mxfp4(name: str, tensors: Mapping[str, Held]) -> Scaled:
    scales, blocks = _mxfp4_scales(name), tensors[name].shape
    grid = tensors[scales].shape
    if blocks[:-1] != grid or blocks[-1] != _BLOCK_NBYTES or len(grid) != _NUM_DIMS:
        raise ValueError(f"it is {list(blocks)}, and its scales {escape(scales)} are {list(grid)}")
    size = _BLOCK_NBYTES * _PAIR
    return Scaled(
        numbers=name,
        scales=scales,
        shape=(*grid[:-1], grid[-1] * size),
        block=(1, 1, size),
        method=MXFP4,
        dims=(0, 2, 1),
    )


def _nvfp4(name: str, base: str, tensors: Mapping[str, Held]) -> Scaled:
    scales, second = _nvfp4_scales(name, base)
    stored, grid = tensors[name].shape, tensors[scales].shape
    # The dim of the inputs, which is not the last one of experts in one (ModelOpt, Llama 4 and gpt_oss).
    packed = [dim for dim, sizes in enumerate(zip(stored, grid, strict=False)) if sizes[0] != sizes[1]]
    size = stored[packed[0]] * _PAIR if len(packed) == 1 else 0
    if len(grid) != len(stored) or not size or size != grid[packed[0]] * _GROUP:
        raise ValueError(f"it is {list(stored)}, and its scales {escape(scales)} are {list(grid)}")
    if any(size != 1 for size in tensors[second].shape):
        raise ValueError(f"the scale of its scales, {escape(second)}, is {list(tensors[second].shape)}")
    return Scaled(
        numbers=name,
        scales=scales,
        shape=tuple(size if dim in packed else stored[dim] for dim in range(len(stored))),
        block=tuple(_GROUP if dim in packed else 1 for dim in range(len(stored))),
        method=NVFP4,
        dims=tuple(range(len(stored))),
        second=second,
        divides=second.endswith(_DIVISOR),
    )
