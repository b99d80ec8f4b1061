"""Find quantised tensors, which are stored as narrow numbers with scales beside them, and the evidence for it.

`METHODS` has an entry for each method whose values can be computed here. Such a method claims tensors: it names the
numbers, their scales, and the plain tensor that they make up. Other methods (GPTQ, AWQ, bitsandbytes, ...) are only
recognised, in order to refuse them. Some show in no config and by no name, such as NVFP4 and int8: they are recognised
as tensors of a narrow dtype with scales beside them.

Pure: only names, dtypes and shapes are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.core.text import count, escape, listed
from shardkit.errors import LayoutError
from shardkit.transfer.codecs.dequantize import ADDED, FP8, MXFP4, PAIRS, Held, Method, Scaled, ScaledNames
from shardkit.transfer.codecs.nvfp4 import EXPORT_CONFIG, NVFP4

METHODS = (NVFP4, MXFP4, PAIRS, FP8)
"""In the order in which they claim tensors. NVFP4 comes before FP8, because its scales are fp8 numbers themselves."""
FILES = frozenset(name for method in METHODS for name in method.files)
"""Files of a model that describe its quantisation; a plain model does not have them."""
_CONFIG = "quantization_config"
_WITH_SCALES = "with scales beside them"
# The second is compressed-tensors' own, from before transformers supported it.
QUANTIZATION_CONFIGS = (_CONFIG, "compression_config")
_PACKED = (".qweight", ".qzeros", ".weight_packed", ".absmax", ".quant_map", ".SCB")
# Endings that no plain tensor's name has.
_SCALES = (*_PACKED, ".weight_scale_inv", ".weight_scale", "_proj_blocks", "_proj_scales")
# Numbers of other methods are recognised by dtype and by a scale beside them: the dtype alone may be that of a mask.
_NARROW = frozenset("int8 uint8 uint16 uint32 float4_e2m1fn_x2".split())
_ADDED_ELSEWHERE = (*ADDED, "_scales", "_scale_2", "_weight_scale")
_OF_QDATA = ("_scale", "_scale_and_zero", "_per_tensor_scale", "_zero_point")
_LAST_ELSEWHERE = ("scale", "scales", "weight_scale", "weight_scales", "_scale", "_weight_scale")
_OF_NUMBERS = ("weight", "codes", "_data", "qdata", "W_q")
# Endings of names that torchao and quanto give to numbers of any dtype, and nobody to plain tensors.
_QDATA, _DATA = "_qdata", "._data"
# Scales of a quantised key-value cache. They are stored at the attention (compressed-tensors, AutoFP8) or at k_proj and
# v_proj (ModelOpt), whose weights may be plain.
_OF_CACHE = ("q_scale", "k_scale", "v_scale", "kv_scale", "output_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensors:
    """The quantised tensors of a source, and which stored names disappear when they are dequantised."""

    scaled: Mapping[str, Scaled]
    """By the name of the plain tensor."""
    gone: frozenset[str]
    """Stored names, such as those of scales, that have no counterpart among the plain tensors."""

    @property
    def methods(self) -> frozenset[str]:
        """The names of their methods."""
        return frozenset(scaled.method.name for scaled in self.scaled.values())


def find_claims(tensors: Mapping[str, Held]) -> dict[str, tuple[Method, ScaledNames]]:
    """Return which tensors are the numbers of quantised weights, by stored name, with method and names; shapes are ignored."""
    claims, taken_names = dict[str, tuple[Method, ScaledNames]](), set[str]()
    for method in METHODS:
        names_left = (name for name in tensors if name not in taken_names)
        new_claims = {
            name: claim for name in names_left if (claim := method.claim(name, tensors)) is not None
        }
        claims |= {name: (method, claim) for name, claim in new_claims.items()}
        taken_names.update(name for claim in new_claims.values() for name in claim.stored)
    return {name: claims[name] for name in tensors if name in claims}


def _methods(tensors: Mapping[str, Held]) -> dict[str, Method]:
    """Return, for each tensor that holds the numbers or scales of a quantised weight, the method."""
    return {name: method for method, claim in find_claims(tensors).values() for name in claim.stored}


def unmarked_tensors(tensors: Mapping[str, Held]) -> dict[str, Held]:
    """Return the numbers and scales of quantised weights whose names do not show the method, such as NVFP4's."""
    return {name: tensors[name] for name, method in _methods(tensors).items() if not method.shows}


def unclaimed_tensors(tensors: Mapping[str, Held]) -> dict[str, Held]:
    """Return the tensors that belong to no quantised weight which can be dequantised here."""
    claimed = _methods(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in claimed}


def method_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the method of quantising that a config names, such as "fp8"; None if the config has no such section."""
    described = _quantization_section(config)
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, Mapping) else None
    return str(method or "of no named method")


def can_dequantize(config: Mapping[str, Any] | None) -> bool:
    """True if the method that a config names can be dequantised here, or if it names none: names of tensors decide then."""
    return method_of(config) is None or _config_method(config) is not None


def _config_method(config: Mapping[str, Any] | None) -> Method | None:
    """Return the method that a config declares, or None if it declares none that can be dequantised here."""
    named, described = str(method_of(config)), _quantization_section(config)
    return next((method for method in METHODS if method.is_declared(named, described)), None)


def _quantization_section(config: Mapping[str, Any] | None) -> Any:
    for part in _config_parts(config or {}):
        described = next((part[key] for key in QUANTIZATION_CONFIGS if part.get(key)), None)
        if described is not None:
            return described
    return None


def _config_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a config and the configs inside it, at any depth: `text_config`, `thinker_config.text_config`."""
    parts = [config]
    for part in parts:
        yield part
        parts += [
            item for key, item in part.items() if isinstance(item, dict) and key not in QUANTIZATION_CONFIGS
        ]


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config without its sections about quantisation, at any depth."""
    plain = dict(config)
    parts = [plain]
    for part in parts:
        for key in [*part]:
            if key in QUANTIZATION_CONFIGS:
                del part[key]
            elif isinstance(part[key], dict):
                part[key] = dict(part[key])
                parts.append(part[key])
    return plain


def why_quantised(tensors: Mapping[str, Held], config: Mapping[str, Any] | None = None) -> str | None:
    """Return the evidence that a checkpoint is quantised, from its config or from names of tensors; or None.

    Args:
        tensors: by stored name.
        config: config.json, or None.
    """
    named, config_method = method_of(config), _config_method(config)
    if named is not None:
        kind = f" {config_method.name}" if config_method is not None and config_method.name != named else ""
        return f"config.json has a {_CONFIG} ({escape(named)}{kind})"
    claims = find_claims(tensors).values()
    scales = [claim.scales for method, claim in claims if method.shows and claim.scales]
    return _evidence_of([*scales, *_packed_names(tensors)], tensors)


def _is_of_cache(name: str, tensor: Held) -> bool:
    """True if a tensor may be the scale of cached keys or values: one in all, or one for each head."""
    return name.rpartition(".")[2] in _OF_CACHE and tensor.shape[-1:] in ((), (1,))


def may_be_quantised(tensors: Mapping[str, Held]) -> bool:
    """True if some tensors may be the numbers of quantised weights, so that a config's section about them is still valid."""
    return bool(find_claims(tensors)) or holds_narrow(tensors) or bool(_packed_names(tensors))


def holds_narrow(tensors: Mapping[str, Held]) -> bool:
    """True if some tensor may hold the packed or narrow numbers of a quantised weight."""
    return any(_narrow_names(tensors))


def _narrow_names(tensors: Mapping[str, Held]) -> Iterator[str]:
    return (
        name
        for name, tensor in tensors.items()
        if len(tensor.shape) > 1
        and (
            tensor.dtype.name in _NARROW or (name.endswith((_QDATA, _DATA)) and _scale_beside(name, tensors))
        )
    )


def why_narrow(tensors: Mapping[str, Held], exported: Mapping[str, Any] | None = None) -> str | None:
    """Return the evidence that values have scales although neither config nor names show a method, or None.

    Such tensors can still be moved whole and compared. If they are cut, values and scales no longer match.

    Args:
        tensors: by stored name.
        exported: ModelOpt's hf_quant_config.json, or None.
    """
    method = _exported_method(exported)
    shown = {name for name, its in _methods(tensors).items() if its.shows}
    narrow = [
        name
        for name in _narrow_names(tensors)
        if _scale_beside(name, tensors) or (method and name not in shown)
    ]
    if not narrow:
        return None
    prefix = f"{EXPORT_CONFIG} says {escape(method)}, and " if method else ""
    dtypes = " and ".join(sorted({tensors[name].dtype.name for name in narrow}))
    kind = _method_text(narrow, tensors)
    return f"{prefix}{count(len(narrow), 'tensor')} of {dtypes} {_WITH_SCALES}{kind}: {listed(narrow)}"


def _exported_method(exported: Mapping[str, Any] | None) -> str | None:
    described = (exported or {}).get("quantization")
    method = described.get("quant_algo") if isinstance(described, Mapping) else None
    return str(method) if method else None


def _scale_beside(name: str, tensors: Mapping[str, Held]) -> bool:
    if any(name + end in tensors for end in _ADDED_ELSEWHERE):
        return True
    stem, _, last = name.rpartition(".")
    if last.startswith("_") and last.endswith(_QDATA):
        return any(scale in tensors for scale in (f"{name.removesuffix(_QDATA)}{end}" for end in _OF_QDATA))
    stem = stem.removesuffix(_DATA)  # quanto packs numbers of 4 bits once more
    return name.endswith(_OF_NUMBERS) and any(f"{stem}.{last}" in tensors for last in _LAST_ELSEWHERE)


def why_scales(unused: Iterable[str]) -> str | None:
    """Return the evidence that names which a model lacks belong to quantised weights, or None; their endings suffice."""
    return _evidence_of([name for name in unused if name.endswith(_SCALES)], {})


def _evidence_of(names: list[str], tensors: Mapping[str, Held]) -> str | None:
    if not names:
        return None
    return f"{count(len(names), 'tensor')} of scales or packed values{_method_text(names, tensors)}: {listed(names)}"


def _method_text(names: list[str], tensors: Mapping[str, Held]) -> str:
    """Return e.g. " (nvfp4)" if the names of all these tensors do not show their method, else an empty string."""
    methods = {name: method.name for name, method in _methods(tensors).items() if not method.shows}
    kinds = sorted({methods.get(name, "") for name in names})
    return f" ({', '.join(kinds)})" if all(kinds) else ""


def _packed_names(names: Collection[str]) -> list[str]:
    tables = {name.removesuffix("centroids.weight") + "indices" for name in names}  # VPTQ
    return [name for name in names if name.endswith(_PACKED) or name in tables]


def refuse_quantised(
    why: str, where: str, *, has_dequantize_option: bool = True, is_tried: bool = False
) -> LayoutError:
    """Return the error for a source that is quantised.

    Args:
        why: the evidence, from `why_quantised` or `why_narrow`.
        where: the source, for people.
        has_dequantize_option: the command has --dequantize, which the hint then names.
        is_tried: the user asked to dequantise, and that is impossible.
    """
    original_hint = "take the model that it was quantised from"
    is_other = any(mark in why for mark in (_CONFIG, _WITH_SCALES, *_PACKED))
    marks = [mark + method.name for method in METHODS for mark in ("(", " ")]
    is_known = any(f"{mark})" in why for mark in marks) or not is_other
    way = "--dequantize makes" if has_dequantize_option else "preshard and consolidate can make"
    hint = (
        f"{way} plain weights of fp8, MXFP4 and NVFP4 ones; or {original_hint}"
        if is_known and not is_tried
        else f"{original_hint}, or dequantise it with the tools of that method and save it first"
    )
    return LayoutError(
        f"quantised: {escape(where)}: {why}: its values mean nothing without their scales", hint=hint
    )


def find_scaled(
    tensors: Mapping[str, Held], config: Mapping[str, Any] | None, where: str
) -> QuantisedTensors:
    """Return the quantised tensors of a source, each with the stored tensors from which its values are computed.

    Args:
        tensors: by stored name.
        config: config.json, or None. It has the size of fp8's blocks.
        where: the source, for messages.

    Raises:
        LayoutError: the method is unknown here, or scales are missing or do not fit their tensors; lists all.
    """
    rest, config_method, described = (
        unclaimed_tensors(tensors),
        _config_method(config),
        _quantization_section(config),
    )
    is_mixed = config_method is not None and why_narrow(rest) is not None
    if _packed_names(rest) or is_mixed or not can_dequantize(config):
        why = why_quantised(tensors, config)
        assert why is not None
        raise refuse_quantised(why, where, is_tried=True)
    claims, scaled, problems = find_claims(tensors), dict[str, Scaled](), list[str]()
    for name, (method, claim) in claims.items():
        try:
            blocks = method.fit(claim, tensors, described if isinstance(described, Mapping) else {})
            scaled[claim.plain] = Scaled(method, claim, blocks)
        except ValueError as error:
            problems.append(f"{escape(name)}: {error}")
    twice = [name for name in scaled if name in tensors and scaled[name].names.numbers != name]
    problems += [f"{escape(name)}: stored both plain and quantised" for name in twice]
    LayoutError.raise_for(
        problems,
        f"quantised: {escape(where)}: the values of {count(len(problems), 'tensor')} are unknown",
        hint="weights, scales and config.json must be of one revision; for fp8, weight_block_size in config.json must "
        "be the size of these blocks",
    )
    gone = {name for _, claim in claims.values() for name in (*claim.stored, *claim.dropped)}
    gone.update(name for name, tensor in tensors.items() if _is_of_cache(name, tensor))
    return QuantisedTensors(scaled=scaled, gone=frozenset(gone & tensors.keys() - claims.keys()))
