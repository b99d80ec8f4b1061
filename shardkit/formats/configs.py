"""Compare two configs of one model by meaning, not by text. Pure.

Versions of transformers write the same config in different ways: each adds keys, leaves some out, and fills in values
that were null. So a key that only one file has is a difference only if the same version wrote both files. Keys that
describe the weights as written (dtype, rows, ties, quantisation) are not compared.

Source: transformers 4.57 and 5.24: PretrainedConfig.to_diff_dict, RotaryEmbeddingConfigMixin, GenerationConfig.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardkit.formats.hub.base import FileDifference
from shardkit.formats.quantised import QUANTIZATION_CONFIGS
from shardkit.keys.ties import text_part, ties_embeddings
from shardkit.keys.tokens import COUNTS

DTYPES, TIE, CODE = ("dtype", "torch_dtype"), "tie_word_embeddings", "auto_map"
_VERSIONS = ("transformers_version", "peft_version")
_NOT_COMPARED = {
    *(*DTYPES, TIE, CODE, *COUNTS, *QUANTIZATION_CONFIGS, *_VERSIONS, "architectures", "model_type"),
    *("gradient_checkpointing", "use_cache", "return_dict", "inference_mode"),
    *("processor_class", "base_model_name_or_path"),
}
_THETAS = ("rope_theta", "global_rope_theta", "rotary_emb_base")
_LOCAL_THETAS = ("rope_local_base_freq", "local_rope_theta")
_FACTORS = ("partial_rotary_factor", "rotary_pct")
_ROPE = {"rope_parameters", "rope_scaling", *_THETAS, *_LOCAL_THETAS, *_FACTORS}
_PLAIN_ROPE = {"rope_theta": 10000.0, "rope_type": "default", "factor": 1.0}
_ADDED_TO_ROPE = ("original_max_position_embeddings", "partial_rotary_factor")
_SAME_ROPES = {"axial": "default", "mrope": "default", "su": "longrope"}
_SAME_LAYERS = {"mamba": "linear_attention"}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
_LABELS = ("id2label", "label2id", "problem_type")
# No version of transformers adds these keys by itself, or leaves out a value that matters.
_NEVER_ADDED = (*_LABELS, "sliding_window")
_DEFAULTS = {"max_length": 20, "top_k": 50, "num_assistant_tokens": 20}  # the others: see `_is_default`
_MOST_SHOWN = 60


def difference(file: str, key: str, checkpoint: object, base: object) -> FileDifference:
    """Return the difference between two values of one key."""
    return FileDifference(file=file, key=key, checkpoint=_value_text(checkpoint), base=_value_text(base))


def _value_text(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config of transformers or diffusers names, without the FSDP that `fully_shard` prepends."""
    names = config.get("architectures", [config["_class_name"]] if "_class_name" in config else None)
    return [str(name).removeprefix("FSDP") for name in names] if isinstance(names, list) else []


def is_same_model(config: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """True if two configs name the same type of model and the same class; a base without a class fits every class."""
    classes = architectures_of(base)
    return config.get("model_type") == base.get("model_type") and classes in ([], architectures_of(config))


def config_differences(file: str, config: Mapping[str, Any], base: Mapping[str, Any]) -> list[FileDifference]:
    """Return the keys of a config.json, or another file of settings, whose meaning differs from the base's."""
    versions = [_version(each) for each in (config, base)]
    return [difference(file, key, *values) for key, *values in _differences(config, base, "", versions)]


def generation_differences(
    file: str, config: Mapping[str, Any], base: Mapping[str, Any]
) -> list[FileDifference]:
    """Return the keys of a generation_config.json whose meaning differs from the base's."""
    return [
        difference(file, key, config.get(key), base.get(key))
        for key in sorted(config.keys() | base.keys())
        if not (key.startswith("_") or key in _NOT_COMPARED)
        and _generation_value(config, key) != _generation_value(base, key)
    ]


def _generation_value(config: Mapping[str, Any], key: str) -> object:
    value = _comparable_value(key, config.get(key))
    return None if _is_default(key, value) else value


def _is_default(key: str, value: object) -> bool:
    """True if writing this value means the same as leaving the key out."""
    if key in TOKENS or key in _DEFAULTS:
        return value == _DEFAULTS.get(key)
    return value is False or value in ("", [], {}) or (value in (0, 1) and value is not True)


def _comparable_value(key: str, value: object) -> object:
    """Return a value in the form in which it is compared, so that different spellings are equal.

    A list of one token id becomes the id, several are sorted, and labels without real names become None.
    """
    if key in _LABELS and isinstance(value, Mapping):
        return None if all("LABEL_" in f"{label}{number}" for label, number in value.items()) else value
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:  # infinity, as transformers 5 writes it
        return float(str(value["__float__"]))
    if not isinstance(value, list):
        return (
            value.removesuffix("Fast")
            if isinstance(value, str) and key.endswith("_processor_type")
            else value
        )
    if "modules" in key:  # PEFT writes a set
        return sorted(value, key=str)
    parts = [
        _SAME_LAYERS.get(each, each) if isinstance(each, str) else _comparable_value("", each)
        for each in value
    ]
    is_tokens = key in TOKENS and all(isinstance(each, int) for each in value)
    return parts if not is_tokens else parts[0] if len(parts) == 1 else sorted(value)


def _differences(
    config: Mapping[str, Any], base: Mapping[str, Any], above: str, versions: list[list[int]]
) -> Iterator[tuple[str, object, object]]:
    # transformers 5 writes the settings of the text model into a section of their own.
    if ("text_config" in config) != ("text_config" in base):
        config, base = _flatten(config), _flatten(base)
    for key in sorted((config.keys() | base.keys()) - _NOT_COMPARED - _ROPE):
        pair = [_comparable_value(key, _effective_value(each, key)) for each in (config, base)]
        if key.startswith("_") or pair[0] == pair[1]:
            continue
        is_lone = key not in base or key not in config
        if None in pair and not _is_real_difference(key, pair, versions, is_lone=is_lone):
            continue
        value, base_value = pair
        if isinstance(value, Mapping) and isinstance(base_value, Mapping) and key not in _LABELS:
            yield from _differences(value, base_value, f"{above}{key}.", versions)
        else:
            yield f"{above}{key}", config.get(key), base.get(key)
    yield from _rope_differences(_ropes(config), _ropes(base), f"{above}rope_parameters.")


def _effective_value(config: Mapping[str, Any], key: str) -> object:
    """Return the value that takes effect in the model, or None if it has no effect."""
    is_off = key == "sliding_window" and config.get("use_sliding_window") is False
    is_computed = key == "layer_types" and {*(config.get(key) or ())} == {"full_attention"}
    return None if is_off or is_computed else config.get(key)


def _is_real_difference(
    key: str, pair: Sequence[object], versions: list[list[int]], *, is_lone: bool
) -> bool:
    """True if it is a difference that one config has this value, and the other null or no such key."""
    value = pair[0] if pair[1] is None else pair[1]
    if key in TOKENS and not is_lone:
        return True
    if _is_default(key, value):
        return False
    is_of_newer = versions[0] > versions[1] if pair[1] is None else versions[1] > versions[0]
    is_known = all(versions)
    return key in _NEVER_ADDED or (is_known and (versions[0] == versions[1] or not (is_lone or is_of_newer)))


def _version(config: Mapping[str, Any]) -> list[int]:
    """Return the version of the library that wrote a file, [5, 24, 0] for 5.24.0; an empty list if it is not recorded."""
    version = _first_value(config, _VERSIONS)
    return [int(part) for part in re.findall(r"\d+", str(version))[:3]] if version is not None else []


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    part = config.get("text_config")
    return {**config, **part} if isinstance(part, Mapping) else dict(config)


def _rope_differences(
    ropes: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]], above: str
) -> Iterator[tuple[str, object, object]]:
    if not ropes and not base:
        return
    has_both, by_layers = bool(ropes and base), ("" in ropes) != ("" in base)
    ropes, base = ropes or {"": {}}, base or {"": {}}
    for layers, rope in ropes.items():
        all_layers = {"": "full_attention", "full_attention": ""}.get(layers, layers)
        base_rope = base.get(layers, base.get(all_layers, rope))
        for key in sorted(rope.keys() | base_rope.keys()) if has_both else ("factor", "rope_theta"):
            value, base_value = (each.get(key, _PLAIN_ROPE.get(key)) for each in (rope, base_rope))
            is_class_default = key == "rope_theta" and by_layers and has_both  # as of Gemma 3
            was_added = (is_class_default or key in _ADDED_TO_ROPE) and not (key in rope and key in base_rope)
            if value != base_value and not was_added:
                yield f"{above}{layers}{'.' if layers else ''}{key}", value, base_value


def _ropes(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary embedding of each kind of layers, with the keys of transformers 5; the kind "" is all layers."""
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    settings = settings if isinstance(settings, Mapping) else {}
    parts = {name: part for name, part in settings.items() if isinstance(part, Mapping)}
    if parts:
        return {name: _normal_rope(part) for name, part in parts.items()}
    theta, factor, local = (_first_value(config, keys) for keys in (_THETAS, _FACTORS, _LOCAL_THETAS))
    if not settings and theta is None and local is None:
        return {}
    plain = {"rope_theta": theta, "partial_rotary_factor": factor, **settings}
    ropes = {"" if local is None else "full_attention": _normal_rope(plain)}
    return ropes if local is None else {**ropes, "sliding_attention": _normal_rope({"rope_theta": local})}


def _normal_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    rope = {key: value for key, value in settings.items() if value is not None and key != "type"}
    name = settings.get("rope_type", settings.get("type", "default"))
    return {**rope, "rope_type": _SAME_ROPES.get(str(name), name)}


def _first_value(config: Mapping[str, Any], keys: Sequence[str]) -> object:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def eos_ids(config: Mapping[str, Any] | None, generation: Mapping[str, Any] | None) -> set[int]:
    """Return the token ids at which `generate` stops, from the generation config or else the config; empty if unknown."""
    places = (generation, config, text_part(config))
    eos = next(
        (place["eos_token_id"] for place in places if place and place.get("eos_token_id") is not None), None
    )
    ids = eos if isinstance(eos, list) else [eos]
    return {each for each in ids if isinstance(each, int)}


def follow_weights(
    config: Mapping[str, Any], written: Mapping[str, Any], *, dtype: str | None, tied: bool | None
) -> dict[str, Any]:
    """Return a config whose keys about the weights (dtype, rows, ties, quantisation) have the values of another config.

    Args:
        config: provides all other keys.
        written: of the same model, with the right dtype, rows and quantisation.
        dtype: of the weights, used if `written` has none.
        tied: whether input and output embeddings are one tensor, used if `written` does not have the key; None if
            unknown.
    """
    followed = _follow_keys(config, written, dtype)
    for key in QUANTIZATION_CONFIGS:
        followed.pop(key, None)
        if key in written:
            followed[key] = written[key]
    if TIE not in written and tied is not None and ties_embeddings(followed) not in (None, tied):
        followed[TIE] = tied
    if architectures_of(config):
        followed["architectures"] = architectures_of(config)
    return followed


def _follow_keys(config: Mapping[str, Any], written: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    written_dtype = str(_first_value(written, DTYPES) or dtype or "") or None
    followed = dict(config)
    for key, value in config.items():
        if key in DTYPES and written_dtype is not None:
            followed[key] = written_dtype
        elif key in COUNTS or key == TIE:
            followed[key] = written.get(key, value)
        elif isinstance(value, Mapping) and key not in QUANTIZATION_CONFIGS:
            part = written.get(key, written if key == "text_config" else {})
            followed[key] = _follow_keys(value, part if isinstance(part, Mapping) else {}, written_dtype)
    is_apart = "text_config" in config and "text_config" not in written
    followed |= {
        key: written[key] for key in (*COUNTS, TIE) if key in written and not (is_apart and key in COUNTS)
    }
    if (
        written_dtype is not None
        and not any(key in config for key in DTYPES)
        and _first_value(written, DTYPES)
    ):
        followed[next(key for key in DTYPES if written.get(key) is not None)] = written_dtype
    return followed
