"""Names of PEFT adapters: told from the base's, and renamed for PEFT's own files or for a merged model.

    base_model.model.X.q_proj.base_layer.weight           the base's weight of a wrapped module
    base_model.model.X.q_proj.lora_A.default.weight       the adapter's, named `default`
    base_model.model.X.q_proj.lora_magnitude_vector...    DoRA
    base_model.model.lm_head.original_module.weight       a module trained in full: before
    base_model.model.lm_head.modules_to_save.default...   and after

Source: peft 0.21, utils/save_and_load.py (get_peft_model_state_dict), utils/other.py (ModulesToSaveWrapper).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardkit.core.text import escape
from shardkit.errors import UsageError
from shardkit.keys.names import PEFT, Segments, join, split

_SAVED, _ORIGINAL, _BASE, _TOKENS = "modules_to_save", "original_module", "base_layer", "token_adapter"
_MAGNITUDE = "lora_magnitude_vector"
_A, _B, _EMBEDDING_A, _EMBEDDING_B = "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"
_LORA = {_A: "a", _B: "b", _EMBEDDING_A: "a", _EMBEDDING_B: "b", _MAGNITUDE: "magnitude"}
# Parameters of other methods, which can be exported but not merged. Prompts are left out: their names are
# too common.
_OTHER = re.compile(
    r"(ia3)_l|(hada)_[wt][12]\w*|(lokr)_[wt][12]\w*|(oft)_[rRs]|(boft)_[Rs]|(vera)_lambda_[bd]|(randlora)_\w+"
    r"|(vblora)_\w+|(lora)_\w+|(trainable_tokens)_(?:delta|original)|(adaption)_(?:prompt|gate)"
    r"|(fourierft)_spectrum|(shira)_weight|(c3a)_kernel|(road)_(?:theta|alpha)|(bone)_block|(miss)_block"
)
_PARAMETERS = ("weight", "bias")
_BASE_LAYER = re.compile(rf"\.{_BASE}(?=\.)")
_WRAPPED = re.compile(rf"\.(?:{_BASE}|{_ORIGINAL}|{_SAVED}\.[^.]+)(?=\.)")


class LoraModule(NamedTuple):
    """A module that LoRA adds to. The fields are names as given, None if there is no such tensor."""

    path: str
    """Its place in the base model."""
    base: str | None
    """The base's weight."""
    base_bias: str | None
    a: str | None
    b: str | None
    magnitude: str | None
    """DoRA's."""
    b_bias: str | None
    is_embedding: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftNames:
    """What names tell about adapters."""

    kind: Literal["none", "adapter", "base+adapter"]
    """Is there an adapter, and are the weights there that it was trained on?"""
    adapter: str | None
    """The adapter of the names below; None if names do not give it, as in PEFT's own files."""
    others: tuple[str, ...]
    """Other adapters."""
    methods: tuple[str, ...]
    """"lora", "dora", "modules_to_save", or the first part of other methods' names."""
    adapter_names: dict[str, str]
    """Name given -> name in `adapter_model.safetensors`."""
    base_names: dict[str, str]
    """Name given -> the base model's own name. Modules that were trained in full replace the originals."""
    modules: tuple[LoraModule, ...]
    """Modules to merge, so that `base_names` are those of the trained model."""
    unmergeable: tuple[str, ...]
    """Names of the adapter that no merge here can use."""


class _Part(NamedTuple):
    """One name of an adapter, taken apart."""

    name: str
    module: Segments
    marker: str
    adapter: str | None
    rest: Segments


def classify_peft(names: Iterable[str], *, adapter: str | None = None) -> PeftNames:
    """Sort a model's names into the base's and an adapter's.

    Args:
        names: a model's names, e.g. the output names of a selection. `base_model.model.` may be missing.
        adapter: which of several adapters; None for `default`, or for the only one.

    Raises:
        UsageError: there are several adapters and none is `default`, or `adapter` is not among them.
    """
    plain, parts = list[str](), list[_Part]()
    for name in names:
        part = _take_apart(name)
        if part is None:
            plain.append(name)
        else:
            parts.append(part)
    chosen, others = _choose(parts, adapter)
    parts = [part for part in parts if part.adapter in (chosen, None) or part.marker == _ORIGINAL]
    modules = _modules(parts, plain)
    is_whole = any(_BASE in split(name) or _ORIGINAL in split(name) for name in plain)
    is_whole = is_whole or any(part.marker == _ORIGINAL for part in parts) or any(m.base for m in modules)
    return PeftNames(
        kind="none" if not parts else "base+adapter" if is_whole else "adapter",
        adapter=chosen,
        others=others,
        methods=_methods(parts),
        adapter_names=_adapter_names(parts, [] if is_whole else plain) if parts else {},
        base_names=_base_names(parts, plain) if is_whole or not parts else {},
        modules=modules,
        unmergeable=tuple(part.name for part in parts if part.marker not in (*_LORA, _SAVED, _ORIGINAL)),
    )


def base_name(name: str) -> str | None:
    """Return what the base model calls a parameter of a model that PEFT wrapped; None for an adapter's own.

    A module that is trained in full has two parameters of one base name: before (`original_module`)
    and after training.

    Args:
        name: a name of the wrapped model. A plain model's names come back as they are.
    """
    part = _take_apart(name)
    if part is None:
        path = _without_prefix(split(name))
    elif part.marker in (_SAVED, _ORIGINAL):
        path = (*part.module, *part.rest)
    else:
        return None
    return _plain(path)


def _plain(path: Segments) -> str:
    return join(segment for segment in path if segment not in (_BASE, _TOKENS))


def without_base_layers(fqn: str) -> str:
    """Return a name without the segment that PEFT adds to a base's weight."""
    return _BASE_LAYER.sub("", fqn)


def without_peft_modules(fqn: str) -> str:
    """Return a name without that segment and without the segments of modules that are trained in full."""
    return _WRAPPED.sub("", fqn)


def _take_apart(name: str) -> _Part | None:
    segments = _without_prefix(split(name))
    for at, segment in enumerate(segments):
        if segment in (*_LORA, _SAVED, _ORIGINAL) or _OTHER.fullmatch(segment):
            rest = segments[at + 1 :]
            has_adapter = bool(rest) and rest[0] not in _PARAMETERS and segment != _ORIGINAL
            return _Part(
                name=name,
                module=segments[:at],
                marker=segment,
                adapter=rest[0] if has_adapter else None,
                rest=rest[1:] if has_adapter else rest,
            )
    return None


def _without_prefix(segments: Segments) -> Segments:
    return segments[len(PEFT) :] if segments[: len(PEFT)] == PEFT else segments


def _choose(parts: list[_Part], adapter: str | None) -> tuple[str | None, tuple[str, ...]]:
    counts = Counter(part.adapter for part in parts if part.adapter is not None)
    if adapter is not None and adapter not in counts:
        raise UsageError(
            f"there is no adapter {escape(adapter)!r}", problems=[escape(name) for name in counts]
        )
    if adapter is None and counts:
        if len(counts) > 1 and "default" not in counts:
            raise UsageError(
                f"there are {len(counts)} adapters, and none is called default",
                problems=[f"{escape(name)}: {count} tensors" for name, count in counts.items()],
            )
        adapter = "default" if "default" in counts else next(iter(counts))
    return adapter, tuple(name for name in counts if name != adapter)


def _methods(parts: list[_Part]) -> tuple[str, ...]:
    found = dict[str, None]()
    for part in parts:
        if part.marker == _MAGNITUDE:
            found["dora"] = None
        elif part.marker in _LORA:
            found["lora"] = None
        elif part.marker != _ORIGINAL:
            other = _OTHER.fullmatch(part.marker)
            found[next(filter(None, other.groups())) if other else part.marker] = None
    return tuple(found)


def _adapter_names(parts: list[_Part], plain: list[str]) -> dict[str, str]:
    """Name tensors as PEFT's files do. In an adapter alone, plain names are of modules trained in full."""
    names = {}
    for part in parts:
        if part.marker == _ORIGINAL:
            continue
        path = part.module if part.marker == _SAVED else (*part.module, part.marker)
        # PEFT keeps the name that DoRA's vector had before it became a module.
        rest = () if part.marker == _MAGNITUDE else part.rest
        names[part.name] = join((*PEFT, *path, *rest))
    names.update({name: join((*PEFT, *_without_prefix(split(name)))) for name in plain})
    return names


def _base_names(parts: list[_Part], plain: list[str]) -> dict[str, str]:
    names = {name: _plain(_without_prefix(split(name))) for name in plain}
    replaced = {(*part.module, *part.rest) for part in parts if part.marker == _SAVED}
    for part in parts:
        path = tuple(segment for segment in (*part.module, *part.rest) if segment != _BASE)
        if part.marker == _SAVED or (part.marker == _ORIGINAL and (*part.module, *part.rest) not in replaced):
            names[part.name] = join(path)
    return names


def _modules(parts: list[_Part], plain: list[str]) -> tuple[LoraModule, ...]:
    by_path = {_without_prefix(split(name)): name for name in plain}
    found: dict[Segments, dict[str, str]] = {}
    embeddings = set[Segments]()
    for part in parts:
        if part.marker in _LORA:
            field = "b_bias" if part.rest == ("bias",) else _LORA[part.marker]
            found.setdefault(part.module, {})[field] = part.name
            if "embedding" in part.marker:
                embeddings.add(part.module)
    modules = []
    for path, tensors in found.items():
        base, base_bias = (
            by_path.get((*path, _BASE, leaf)) or by_path.get((*path, leaf)) for leaf in ("weight", "bias")
        )
        fields = {field: tensors.get(field) for field in ("a", "b", "magnitude", "b_bias")}
        modules.append(LoraModule(join(path), base, base_bias, is_embedding=path in embeddings, **fields))
    return tuple(modules)
