"""Distinguish names of PEFT adapters from the base's, and rename them for PEFT's own files or for a merged model.

    base_model.model.X.q_proj.base_layer.weight           the base's weight of a wrapped module
    base_model.model.X.q_proj.lora_A.default.weight       a weight of the adapter `default`
    base_model.model.X.q_proj.lora_magnitude_vector...    a vector that DoRA adds
    base_model.model.lm_head.original_module.weight       a module trained in full: its weight before training
    base_model.model.lm_head.modules_to_save.default...   and after training

In such names, a segment that PEFT adds (`lora_A`, `modules_to_save`, ...) is a *marker*. The *module* comes before it;
the adapter's name and the rest come after it.

Source: peft 0.21, utils/save_and_load.py (get_peft_model_state_dict), utils/other.py (ModulesToSaveWrapper).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from shardkit.core.text import escape
from shardkit.errors import SourceError, UsageError
from shardkit.keys.names import PEFT, Segments, join, split
from shardkit.keys.ties import is_embedding, is_output

_SAVED, _ORIGINAL, _BASE, _TOKENS = "modules_to_save", "original_module", "base_layer", "token_adapter"
_MAGNITUDE, _ROWS = "lora_magnitude_vector", "trainable_tokens_delta"
_A, _B, _EMBEDDING_A, _EMBEDDING_B = "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"
_LORA = {_A: "a", _B: "b", _EMBEDDING_A: "a", _EMBEDDING_B: "b", _MAGNITUDE: "magnitude"}
# Parameters of other methods, which can be exported but not merged. Prompts are left out: their names are
# too common.
_OTHER = re.compile(
    r"(ia3)_l|(hada)_[wt][12]\w*|(lokr)_[wt][12]\w*|(oft)_(?:[rRs]|embedding_R)|(boft)_[Rs]|(vera)_(?:lambda_[bd]|[AB])|(randlora)_\w+"
    r"|(vblora)_\w+|(lora)_\w+|(trainable_tokens)_(?:delta|original)|(adaption)_(?:prompt|gate)"
    r"|(fourierft)_spectrum|(shira)_weight|(c3a)_kernel|(road)_(?:theta|alpha)|(bone)_block|(miss)_block"
    r"|(beft)_bias|(deft)_[PR]|(delora)_(?:[AB]|lambda|w_norm)|(glora)_[A-E]|(gralora)_[AB]\w*|(hira)_(?:embedding_)?[AB]"
    r"|(lily)_(?:[AB]|router)|(poly)_(?:lora_[AB]|router)|(supertuning)_(?:indices|values|lora_[AB])|(waveft)_spectrum"
    r"|(ln_tuning)_layers|(pvera)_(?:lambda_[bd]|[AB])|(tinylora)_[ABPv]|(unilora)_(?:theta_d|(?:indices|scales)_[AB])"
    r"|(peanut)_(?:[AB]|encoders|decoders)|(psoft)_R|(adamss)_(?:A|B|newB)|(hra)_u"
    r"|(frod)_(?:V|s_indices|s_size|lambda_l|lambda_s_values)"
    r"|(shadow)_(?:backbone|down|up|update_gate|update_transform)"
)
# Parameters that all modules share. They are at PEFT's own root, and in memory also in each module; PEFT saves one.
_SHARED = re.compile(r"p?vera_[AB]|vblora_vector_bank|tinylora_v|unilora_theta_d")
# Markers with two parts after them: the adapter, and a number or a kind of modules. PEFT's file has only the second.
_TWO_PARTS = re.compile(r"tinylora_v|frod_(?:V|s_indices|s_size)|adamss_[AB]")
# Markers with three parts after them: the adapter, the number of a module, and its parameter.
_NUMBERED = re.compile(r"peanut_(?:encoders|decoders)")
# Parameters of prompt methods. Models such as SAM have a `prompt_encoder` too, with other names below it.
_PROMPT = re.compile(r"(?:^|\.)prompt_encoder\.[^.]+\.(?:embedding\.weight|trainable_embedding)$")
_PARAMETERS = ("weight", "bias")
_BASE_LAYER = re.compile(rf"\.{_BASE}(?=\.)")
_WRAPPED = re.compile(rf"\.(?:{_BASE}|{_ORIGINAL}|{_SAVED}\.[^.]+)(?=\.)")


_REPEATED = re.compile(r"\)[*+?{]")
_MAX_PATTERN = 500  # characters
# Settings of LoraConfig that change the arithmetic W + scale * B A.
OTHER_ARITHMETIC = (
    *("use_qalora", "use_bdlora", "kasa_config", "arrow_config", "monteclora_config", "velora_config"),
    *("alora_invocation_tokens", "layer_replication"),
)
_PLAIN_METHODS = frozenset(("lora", "modules_to_save", "trainable_tokens"))


class LoraModule(NamedTuple):
    """A module that LoRA adapts. The other fields are names in the checkpoint, None for tensors that it lacks."""

    path: str
    """Path of the module in the base model."""
    base: str | None
    """The base's weight."""
    base_bias: str | None
    a: str | None
    b: str | None
    magnitude: str | None
    """The vector that DoRA adds."""
    b_bias: str | None
    is_embedding: bool
    parameters: tuple[str, ...] = ()
    """Tensors of the base, one of which the module adapts, if it wraps a parameter such as fused experts. `base` is
    then None."""


class TrainedTokens(NamedTuple):
    """A module of which some rows were trained. The other fields are names in the checkpoint, None if it lacks them."""

    path: str
    """Path of the module in the base model."""
    base: str | None
    """The base's weight."""
    rows: str
    """The trained rows, in the order of the settings. They replace rows of `base`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftNames:
    """The names of a checkpoint, sorted into the base's and an adapter's."""

    kind: Literal["none", "adapter", "base+adapter"]
    """Whether the checkpoint has an adapter, and whether it has the weights that the adapter was trained on."""
    adapter: str | None
    """The adapter to which the names below belong; None if names do not contain it, as in PEFT's own files."""
    other_adapters: tuple[str, ...]
    """The adapters that are left out."""
    methods: tuple[str, ...]
    """"lora", "dora", "modules_to_save", or the first part of the names of another method, such as "ia3"."""
    adapter_names: dict[str, str]
    """Name in the checkpoint -> name in `adapter_model.safetensors`."""
    base_names: dict[str, str]
    """Name in the checkpoint -> the base model's own name. Modules that were trained in full replace the originals."""
    modules: tuple[LoraModule, ...]
    """Modules to merge, after which the tensors of `base_names` are those of the trained model."""
    tokens: tuple[TrainedTokens, ...]
    """Modules to merge that were trained by LoRA's `trainable_token_indices`."""
    unmergeable: tuple[str, ...]
    """Names of the adapter that cannot be merged here."""


class _AdapterName(NamedTuple):
    """The parts of one of an adapter's names: MODULE.MARKER.ADAPTER.REST."""

    name: str
    module: Segments
    marker: str
    adapter: str | None
    rest: Segments


def classify_peft(names: Iterable[str], base_names: Container[str] = ()) -> PeftNames:
    """Sort a model's names into the base's and an adapter's.

    Args:
        names: a model's names, e.g. the output names of a selection. `base_model.model.` may be missing.
        base_names: names that are the base's even if they look like an adapter's, such as `lora_A.vision` in the files
            of Phi-4-multimodal.

    Raises:
        UsageError: there are several adapters and none is called `default`.
    """
    plain, parts = list[str](), list[_AdapterName]()
    for name in names:
        part = None if name in base_names else _take_apart(name)
        if part is None:
            plain.append(name)
        else:
            parts.append(part)
    chosen, other_adapters = _choose(parts)
    parts = [part for part in parts if part.adapter in (chosen, None) or part.marker == _ORIGINAL]
    modules, tokens = _modules(parts, plain), tuple(_tokens(parts, plain))
    is_whole = any(_BASE in split(name) or _ORIGINAL in split(name) for name in plain)
    is_whole = is_whole or any(part.marker == _ORIGINAL for part in parts) or any(m.base for m in modules)
    # An adaption prompt wraps the attention module, and the wrapper calls it `model`.
    prompted = {(*part.module, "model") for part in parts if part.marker.startswith("adaption_")}
    is_whole = is_whole or any(_without_prefix(split(name))[:-2] in prompted for name in plain)
    return PeftNames(
        kind="none" if not parts else "base+adapter" if is_whole else "adapter",
        adapter=chosen,
        other_adapters=other_adapters,
        methods=_methods(parts),
        adapter_names=_adapter_names(parts, [] if is_whole else plain) if parts else {},
        base_names=_base_names(parts, plain) if is_whole or not parts else {},
        modules=modules,
        tokens=tokens,
        unmergeable=tuple(
            part.name
            for part in parts
            if part.marker not in (*_LORA, _SAVED, _ORIGINAL) and part.name not in {of.rows for of in tokens}
        ),
    )


def refuse_prompts(names: Iterable[str], model_names: Iterable[str] = ()) -> None:
    """Raise an error for prompts that PEFT trained, because only PEFT's classes can compute the tensors for its file.

    Args:
        names: the names in a checkpoint.
        model_names: names of the model, if known. A model that has such names itself loads them as they are.

    Raises:
        SourceError: the checkpoint has such prompts.
    """
    prompts = [escape(name) for name in names if _PROMPT.search(name)]
    if not any(map(_PROMPT.search, model_names)):
        SourceError.raise_for(
            prompts,
            "the checkpoint has a prompt that PEFT trained (prefix tuning, P-tuning, prompt tuning, CPT or Cartridge), "
            "which shardkit cannot write",
            hint="load the checkpoint into the PeftModel, and call its save_pretrained",
        )


def base_name(name: str) -> str | None:
    """Return the base model's name of a parameter of a model that PEFT wrapped; None for an adapter's own parameter.

    A module that is trained in full has two parameters with one base name: before (`original_module`) and after
    training (`modules_to_save`).

    Args:
        name: a name of the wrapped model. The names of a model without PEFT are returned unchanged.
    """
    part = _take_apart(name)
    if part is None:
        path = _without_prefix(split(name))
    elif part.marker in (_SAVED, _ORIGINAL):
        path = (*part.module, *part.rest)
    else:
        return None
    return _plain_name(path)


def _plain_name(path: Segments) -> str:
    return join(segment for segment in path if segment not in (_BASE, _TOKENS))


def without_base_layers(fqn: str) -> str:
    """Return a name without the segment that PEFT adds to the base's weights: "q.base_layer.weight" -> "q.weight"."""
    return _BASE_LAYER.sub("", fqn)


def without_peft_modules(fqn: str) -> str:
    """Return a name without that segment and without those of modules trained in full (`modules_to_save.default`)."""
    return _WRAPPED.sub("", fqn)


def _take_apart(name: str) -> _AdapterName | None:
    segments = _without_prefix(split(name))
    for place, segment in enumerate(segments):
        if segment == "parametrizations":  # torch's, in a model with low-rank factors of its own (Jina)
            return None
        if segment in (*_LORA, _SAVED, _ORIGINAL) or _OTHER.fullmatch(segment):
            rest = segments[place + 1 :]
            if segment.startswith("frod_"):  # the kind of modules comes before the adapter
                rest = rest[::-1]
            has_adapter = bool(rest) and rest[0] not in _PARAMETERS and segment != _ORIGINAL
            num_further = 2 if _NUMBERED.fullmatch(segment) else 1 if _TWO_PARTS.fullmatch(segment) else 0
            has_adapter = has_adapter and len(rest) > num_further
            return _AdapterName(
                name=name,
                module=segments[:place],
                marker=segment,
                adapter=rest[0] if has_adapter else None,
                rest=rest[1:] if has_adapter else rest,
            )
    return None


def _without_prefix(segments: Segments) -> Segments:
    return segments[len(PEFT) :] if segments[: len(PEFT)] == PEFT else segments


def _choose(parts: list[_AdapterName]) -> tuple[str | None, tuple[str, ...]]:
    """Return (the adapter to use, the others). It is `default` or the only one; None if no name contains an adapter."""
    counts = Counter(part.adapter for part in parts if part.adapter is not None)
    if len(counts) > 1 and "default" not in counts:
        raise UsageError(
            f"there are {len(counts)} adapters, and none is called default",
            problems=[f"{escape(name)}: {count} tensors" for name, count in counts.items()],
        )
    chosen = "default" if "default" in counts else next(iter(counts), None)
    return chosen, tuple(name for name in counts if name != chosen)


def _methods(parts: list[_AdapterName]) -> tuple[str, ...]:
    methods = dict[str, None]()
    for part in parts:
        if part.marker == _MAGNITUDE:
            methods["dora"] = None
        elif part.marker in _LORA:
            methods["lora"] = None
        elif part.marker != _ORIGINAL:
            match = _OTHER.fullmatch(part.marker)
            methods[next(filter(None, match.groups())) if match else part.marker] = None
    return tuple(methods)


def _adapter_names(parts: list[_AdapterName], plain: list[str]) -> dict[str, str]:
    """Return name -> name in PEFT's files.

    Args:
        parts: the adapter's names.
        plain: names without a marker. In a checkpoint without the base they are of modules trained in full.
    """
    names = {}
    for part in parts:
        is_at_root = part.module == PEFT[:1]
        if part.marker == _ORIGINAL or (_SHARED.fullmatch(part.marker) and not is_at_root):
            continue
        path = part.module if part.marker == _SAVED else (*part.module, part.marker)
        # DoRA's vector has become a module in PEFT, but its name in files has stayed.
        rest = () if part.marker == _MAGNITUDE else part.rest
        if part.marker.startswith("shadow_") and part.adapter is not None:
            rest = (part.adapter, *rest)  # as in PEFT's file
        names[part.name] = join((*(() if is_at_root else PEFT), *path, *rest))
    names.update({name: _name_in_file(name) for name in plain})
    return names


def _name_in_file(name: str) -> str:
    """Return the name that a tensor of the base has in PEFT's file."""
    return join((*PEFT, *_without_prefix(split(name))))


def base_names_to_save(
    peft: PeftNames,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    base: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    """Return the base's tensors that PEFT saves with an adapter: name -> name in `adapter_model.safetensors`.

    These are biases that were trained, and embeddings and outputs whose number of rows differs from the base's. For
    the arguments see `find_misfits`.

    Source: peft 0.21, tuners/tuners_utils.py (_get_learnable_bias_state_dict), utils/save_and_load.py.
    """
    bias, targets = str(settings.get("bias")), dict[str, str]()
    ends = ".bias" if bias == "all" else f".{_BASE}.bias" if bias.endswith("_only") else None
    for name, name_in_base in peft.base_names.items():
        is_trained = ends is not None and f".{name}".endswith(ends)
        has_rows = (is_embedding(name_in_base) or is_output(name_in_base)) and name_in_base in base
        if is_trained or (has_rows and shapes.get(name, base[name_in_base]) != base[name_in_base]):
            targets[name] = _name_in_file(name)
    return {name: target for name, target in targets.items() if name not in peft.adapter_names}


def _base_names(parts: list[_AdapterName], plain: list[str]) -> dict[str, str]:
    names = {name: _plain_name(_without_prefix(split(name))) for name in plain}
    replaced = {(*part.module, *part.rest) for part in parts if part.marker == _SAVED}
    for part in parts:
        path = tuple(segment for segment in (*part.module, *part.rest) if segment != _BASE)
        if part.marker == _SAVED or (part.marker == _ORIGINAL and (*part.module, *part.rest) not in replaced):
            names[part.name] = join(path)
    return names


def _modules(parts: list[_AdapterName], plain: list[str]) -> tuple[LoraModule, ...]:
    by_path = {_without_prefix(split(name)): name for name in plain}
    wrapped = dict[Segments, list[str]]()
    for path, name in by_path.items():
        if path[-2:-1] == (_BASE,):
            wrapped.setdefault(_innermost_path(path[:-1]), []).append(name)
    tensors_of: dict[Segments, dict[str, str]] = {}
    embeddings = set[Segments]()
    for part in parts:
        if part.marker in _LORA:
            field = "b_bias" if part.rest == ("bias",) else _LORA[part.marker]
            tensors_of.setdefault(part.module, {})[field] = part.name
            if "embedding" in part.marker:
                embeddings.add(part.module)
    modules = []
    for path, tensors in tensors_of.items():
        base, base_bias = (
            by_path.get((*path, _BASE, leaf)) or by_path.get((*path, leaf)) for leaf in ("weight", "bias")
        )
        fields = {field: tensors.get(field) for field in ("a", "b", "magnitude", "b_bias")}
        parameters = () if base else tuple(wrapped.get(_innermost_path(path), ()))
        modules.append(
            LoraModule(
                join(path), base, base_bias, is_embedding=path in embeddings, parameters=parameters, **fields
            )
        )
    return tuple(modules)


def _innermost_path(path: Segments) -> Segments:
    """Return the path of the innermost module in nested wrappers of parameters."""
    while path[-1:] == (_BASE,):
        path = path[:-1]
    return path


def _tokens(parts: list[_AdapterName], plain: list[str]) -> Iterator[TrainedTokens]:
    by_path = {_without_prefix(split(name)): name for name in plain}
    for part in parts:
        if part.marker == _ROWS and part.module[-1:] == (_TOKENS,):
            base = by_path.get((*part.module, _BASE, "weight"))
            yield TrainedTokens(join(part.module[:-1]), base, part.name)


def pattern_problems(patterns: object) -> Iterator[str]:
    """Yield the reasons why a setting with patterns of module names, such as `rank_pattern`, cannot be used."""
    if patterns is None:
        return
    if not isinstance(patterns, Mapping):
        yield "not a mapping"
        return
    for pattern, value in patterns.items():
        shown = escape(str(pattern))
        if type(value) not in (int, float):
            yield f"{shown}: its value is not a number"
        # Anyone may have written the pattern, and a repeated group can take exponentially long to match.
        if _REPEATED.search(str(pattern)) or len(str(pattern)) > _MAX_PATTERN:
            yield f"{shown}: too costly to match"
            continue
        try:
            re.compile(str(pattern))
        except re.error as error:
            yield f"{shown}: {error}"


def pattern_value(patterns: Mapping[str, float] | None, path: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the path's end, as PEFT matches it, or the default."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def find_misfits(
    peft: PeftNames,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    base: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """Return a line for each module of a plain LoRA whose shapes do not fit its settings and its base.

    Other kinds of adapters have other shapes and are not checked.

    Args:
        peft: the sorted names.
        shapes: name in `peft` -> shape.
        settings: the content of `adapter_config.json`.
        base: name in the base -> shape, as far as known. A vocabulary may have grown since.

    Source: peft 0.21, tuners/lora/layer.py (update_layer of Linear, Embedding, _ConvNd and ParamWrapper).
    """
    is_plain = settings.get("peft_type") == "LORA" and _PLAIN_METHODS.issuperset(peft.methods)
    keys = ("use_dora", "megatron_config", *OTHER_ARITHMETIC)
    is_plain = is_plain and not any(".lora_" in name for name in peft.unmergeable)
    if not is_plain or any(map(settings.get, keys)) or any(pattern_problems(settings.get("rank_pattern"))):
        return []
    lines = (_misfit_line(module, shapes, settings, base) for module in peft.modules)
    return [line for line in lines if line is not None]


def _misfit_line(
    module: LoraModule,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    base: Mapping[str, tuple[int, ...]],
) -> str | None:
    path = _plain_name(split(module.path))
    rank = pattern_value(settings.get("rank_pattern"), path, settings.get("r"))
    if module.a is None or module.b is None or type(rank) is not int or rank < 1:
        return None
    a, b = shapes[module.a], shapes[module.b]
    if len(a) < 2 or len(a) != len(b):
        return None
    if settings.get("target_parameters") and settings.get("rank_pattern"):  # it names parameters
        return None
    weight, experts = _adapted_shape(module, path, shapes, settings, base)
    rows = rank * experts if experts is not None else max(a[0] - a[0] % rank, rank)
    is_conv = len(a) > 2  # with groups, lora_B has fewer columns
    need_a, need_b = (rows, *a[1:]), b if is_conv else (b[0], rows)
    if weight is not None and len(weight) == len(a) and b[0] * a[1] < weight[0] * weight[1]:
        is_transposed = module.is_embedding or settings.get("fan_in_fan_out")
        out, into = weight[1::-1] if is_transposed else weight[:2]
        need_a, need_b = (rows, into, *a[2:]), (out, *need_b[1:])
    if (a, b) == (need_a, need_b):
        return None
    of_base = "" if weight is None else f" and the base's {list(weight)}"
    return f"{escape(path)}: lora_A {list(a)}, lora_B {list(b)}; r={rank}{of_base} need {list(need_a)}, {list(need_b)}"


def _adapted_shape(
    module: LoraModule,
    path: str,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, Any],
    base: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[int, ...] | None, int | None]:
    """Return (shape of the weight that a module adapts, number of experts that share its rows); None for unknown."""
    targets = settings.get("target_parameters")
    leaves = [
        leaf
        for home, _, leaf in (
            str(name).rpartition(".") for name in (targets if isinstance(targets, list) else ())
        )
        if f".{path}".endswith(f".{home}")
    ]
    if not leaves:
        return shapes.get(module.base or "") or base.get(f"{path}.weight"), 1
    target_shapes = {base[name] for leaf in leaves if (name := f"{path}.{leaf}") in base}
    numbers = {shape[0] if len(shape) > 2 else 1 for shape in target_shapes}
    return None, numbers.pop() if len(numbers) == 1 else None
