"""Merge an adapter into the weights that it was trained on.

This module only decides: for each weight that changes it returns a codec, which computes the merged weight when it is
read (`transfer.codecs.lora`). The catalog then has the merged weight as if it were stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, Literal, NamedTuple

from shardkit.core.catalog import TensorEntry
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape
from shardkit.errors import SourceError
from shardkit.keys.peft import (
    OTHER_ARITHMETIC,
    LoraModule,
    PeftNames,
    TrainedTokens,
    classify_peft,
    pattern_problems,
    pattern_value,
    without_base_layers,
)
from shardkit.transfer.codecs.lora import Lora, LoraOfExperts, TrainedRows

_EXPORT = "export it without --merge-lora instead"
_BY_PEFT = "merge_and_unload() of PEFT merges it"

MergeCodec = Lora | LoraOfExperts | TrainedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """How to merge an adapter into its model."""

    names: dict[str, str]
    """Name in the catalog -> name in the output."""
    merges: dict[str, MergeCodec]
    """The codecs, by the name of the weight in the catalog that each changes."""

    @property
    def adapter_names(self) -> frozenset[str]:
        """The adapter's tensors that are merged."""
        return frozenset(name for merge in self.merges.values() for name in merge.added)


def plan_merge(
    tensors: Mapping[str, TensorEntry], names: Mapping[str, str], config: Mapping[str, Any]
) -> MergePlan:
    """Decide how a checkpoint's adapter is merged.

    Args:
        tensors: tensors of the catalog.
        names: selected name in the catalog -> its output name, still with PEFT's `base_model.model.` and the like.
        config: the adapter's settings (`adapter_config.json`). `lora_alpha` is required; `r`, `rank_pattern`,
            `alpha_pattern`, `use_rslora` and `fan_in_fan_out` are used if present.

    Raises:
        SourceError: the adapter or its model is missing, the adapter is not LoRA, or shapes do not fit. All problems of
            a kind are listed.
    """
    stored = {name: source for source, name in names.items()}
    peft = classify_peft(names.values())
    if peft.kind == "none":
        raise SourceError(
            "there is nothing to merge: the checkpoint holds no adapter",
            hint="--merge-lora is for checkpoints that hold both an adapter and the weights that it was trained on",
        )
    _check_settings(peft, config)
    merges, problems = list[MergeCodec](), list[str]()
    shapes = {name: tensors[source].shape for name, source in stored.items()}
    modules = list(_with_parameters(peft.modules, shapes, config))
    transposed = _Transposed(
        matrices=_transposed_modules(shapes), experts=_transposed_experts(modules, shapes)
    )
    for module in modules:
        merges += _merges_of(module, stored, tensors, config, transposed, problems)
    for trained in peft.tokens:
        merges += _rows_of(trained, stored, tensors, config, problems)
    SourceError.raise_for(problems, f"{count(len(problems), 'module')} cannot be merged", hint=_EXPORT)
    kept = {stored[name]: target for name, target in peft.base_names.items()}
    return MergePlan(names=kept, merges={merge.base: merge for merge in merges})


def _check_settings(peft: PeftNames, config: Mapping[str, Any]) -> None:
    """Refuse an adapter that is not LoRA with known arithmetic, and settings whose values are missing or not numbers."""
    problems = [f"{escape(name)}: not LoRA's" for name in peft.unmergeable]
    problems += [f"the adapter's settings have {name}" for name in OTHER_ARITHMETIC if config.get(name)]
    if config.get("peft_type") not in (None, "LORA"):
        problems.append(f"the adapter is of type {escape(str(config['peft_type']))}, not LORA")
    SourceError.raise_for(problems, "the adapter cannot be merged", hint=_EXPORT)
    if config.get("lora_alpha") is None:
        raise SourceError(
            "the adapter's lora_alpha is not known, so neither is its scale",
            hint="name the adapter_config.json that was used with --adapter-config",
        )
    problems = [
        f"{name}: not a number"
        for name in ("r", "lora_alpha")
        if config.get(name) is not None and type(config[name]) not in (int, float)
    ]
    for name in ("rank_pattern", "alpha_pattern"):
        problems += [f"{name}: {problem}" for problem in pattern_problems(config.get(name))]
    SourceError.raise_for(problems, "the adapter's settings cannot be read")


def _transposed_modules(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Return whether modules are stored (in, out), by the last part of their path, if the length of a bias shows it.

    For example {"c_attn": True} for GPT-2, where `c_attn.weight` is [768, 2304] and its bias [2304].

    The settings' `fan_in_fan_out` is not enough: it is that of the module that PEFT wrapped last. If this is the output
    layer, it says nothing about square matrices of `Conv1D` (GPT-2's `attn.c_proj`), which fit both ways.
    """
    biases = {name.removesuffix(".bias"): shape for name, shape in shapes.items() if name.endswith(".bias")}
    return {
        without_base_layers(name).rsplit(".", 2)[-2]: bias == shape[1:]
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and shape[0] != shape[1]
        if (bias := biases.get(name.removesuffix(".weight"))) in (shape[:1], shape[1:])
    }


class _Transposed(NamedTuple):
    """Whether modules are stored (in, out), by the last part of their path; modules that nothing shows are missing."""

    matrices: Mapping[str, bool]
    experts: Mapping[str, bool]


def _with_parameters(
    modules: Iterable[LoraModule], shapes: Mapping[str, Shape], config: Mapping[str, Any]
) -> Iterator[LoraModule]:
    """Yield modules, completing those of `target_parameters`: `base` is the adapted parameter, whose name ends the path.

    For each adapted parameter of a module, PEFT wraps the module once more. No name says which wrapper belongs to which
    parameter; only shapes may show it.

    Source: peft 0.21, tuners/tuners_utils.py (_inject_parameters).
    """
    targets = config.get("target_parameters")
    targets = [str(target) for target in targets] if isinstance(targets, list) else []
    for module in modules:
        path = without_base_layers(f"{module.path}.").rstrip(".")
        names = {
            f"{path}.{name.rpartition('.')[2]}": name for name in (module.base, *module.parameters) if name
        }
        chosen = {
            key: name for key, name in names.items() if any(f".{key}".endswith(f".{end}") for end in targets)
        }
        if module.base is None and module.a and module.b:
            fits = [
                (key, name)
                for key, name in chosen.items()
                if _may_add(shapes[name], shapes[module.a], shapes[module.b])
            ]
            if len(fits) == 1:
                module = module._replace(path=fits[0][0], base=fits[0][1])
        elif module.base is not None and chosen:
            module = module._replace(path=next(iter(chosen)))
        yield module


def _may_add(parameter: Shape, a: Shape, b: Shape) -> bool:
    """Return whether LoRA factors fit a parameter by their shapes: a matrix, or a stack of one matrix per expert."""
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return False
    if len(parameter) == 2:
        return (b[0], a[1]) == parameter
    is_one = len(parameter) == 3 and parameter[0] > 0 and a[0] % parameter[0] == 0
    return is_one and (b[0], a[1]) in (parameter[1:], parameter[:0:-1])


def _transposed_experts(modules: Iterable[LoraModule], shapes: Mapping[str, Shape]) -> dict[str, bool]:
    """Return whether experts are stored (in, out), by the name of their module, which stores all its parameters alike.

    The shape of LoRA's factors or of a bias shows it, for a parameter whose matrices are not square.
    """
    shown = defaultdict[str, set[bool]](set)
    for module in modules:
        base, a = shapes.get(module.base or ""), shapes.get(module.a or "")
        if base and a and len(base) == 3 and base[1] != base[2]:
            shown[_expert_module(module.path)].add(a[1] == base[1])
    for name, shape in shapes.items():
        bias = shapes.get(f"{name}_bias")
        if len(shape) == 3 and shape[1] != shape[2] and bias in ((shape[0], shape[1]), (shape[0], shape[2])):
            shown[_expert_module(without_base_layers(name))].add(bias == (shape[0], shape[2]))
    return {name: ways == {True} for name, ways in shown.items() if len(ways) == 1}


def _expert_module(path: str) -> str:
    """Return the last part of the path of a parameter's module: "mlp.experts.down_proj" -> "experts"."""
    return path.split(".")[-2]


def _is_transposed(
    module: LoraModule, weight: Shape, a: Shape, transposed: _Transposed, config: Mapping[str, Any]
) -> bool | None:
    """Return whether a module's weight is stored (in, out); None if nothing shows it."""
    if module.is_embedding:
        return True
    if len({*weight[-2:]}) > 1:
        return a[1:] == weight[-2:-1]
    if len(weight) == 3:
        return transposed.experts.get(_expert_module(module.path))
    name = module.path.rpartition(".")[2]
    if name not in transposed.matrices and len({*transposed.matrices.values()}) > 1:
        return None
    return transposed.matrices.get(name, bool(config.get("fan_in_fan_out")))


def _merges_of(
    module: LoraModule,
    stored: Mapping[str, str],
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
    transposed: _Transposed,
    problems: list[str],
) -> Iterator[MergeCodec]:
    """Yield the codec that adds a module's `lora_A` and `lora_B` to its weight, and one for its bias if that was trained.

    Args:
        module: names of the module's tensors in the output.
        stored: name in the output -> name in `tensors`.
        tensors: the checkpoint's tensors.
        config: the adapter's settings.
        transposed: which modules store their weight as (in, out).
        problems: gets a line if the module cannot be merged.
    """
    if (
        module.base is None and module.parameters and module.a and module.b
    ):  # nn.MultiheadAttention's, for one
        problems.append(
            f"{escape(module.path)}: target_parameters does not show what it is added to: {_BY_PEFT}"
        )
        return
    if module.a is None or module.b is None or module.base is None:
        part = "lora_A" if module.a is None else "lora_B" if module.b is None else "weight of the base"
        problems.append(f"{escape(module.path)}: its {part} is missing")
        return
    base, a, b = stored[module.base], stored[module.a], stored[module.b]
    magnitude = stored[module.magnitude] if module.magnitude else None
    is_transposed = _is_transposed(module, tensors[base].shape, tensors[a].shape, transposed, config)
    problem = _shape_problem(tensors[base], tensors[a], tensors[b], bool(is_transposed))
    if is_transposed is None:
        problem = f"nothing shows if its square matrix is (in, out) or (out, in): {_BY_PEFT}"
    if problem is None and magnitude and (module.is_embedding or len(tensors[base].shape) == 3):
        problem = "DoRA on an embedding" if module.is_embedding else "DoRA on experts"
    if problem is None and module.b_bias and module.base_bias is None:
        problem = "the adapter has a bias and the base has none"
    weight = tensors[base]
    num_experts = weight.shape[0] if len(weight.shape) == 3 else 1
    rank = tensors[a].shape[0] // max(num_experts, 1) if tensors[a].shape else 0
    expected_rank = pattern_value(config.get("rank_pattern"), module.path, config.get("r"))
    if problem is None and expected_rank is not None and expected_rank != rank:
        problem = f"its rank is {rank}, and {escape(str(expected_rank))} in the adapter's settings"
    if problem is not None:
        problems.append(f"{escape(module.path)}: {problem}")
        return
    alpha = pattern_value(config.get("alpha_pattern"), module.path, config["lora_alpha"])
    scale = alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank
    kind: Literal["linear", "transposed"] = "transposed" if is_transposed else "linear"
    merge = Lora(
        base=base,
        dtype=weight.dtype,
        shape=weight.shape[-2:],
        a=a,
        b=b,
        magnitude=magnitude,
        scale=scale,
        kind=kind,
    )
    yield merge if len(weight.shape) == 2 else LoraOfExperts(expert=merge, num_experts=num_experts, rank=rank)
    if module.b_bias and module.base_bias:
        bias = tensors[stored[module.base_bias]]
        b = stored[module.b_bias]
        yield replace(
            merge, base=bias.fqn, dtype=bias.dtype, shape=bias.shape, a=None, b=b, magnitude=None, kind="bias"
        )


def _shape_problem(base: TensorEntry, a: TensorEntry, b: TensorEntry, is_transposed: bool) -> str | None:
    """Return why `b @ a` cannot be added to the weight, or None."""
    if len(base.shape) not in (2, 3) or len(a.shape) != 2 or len(b.shape) != 2:
        return f"only matrices can be merged, and it is {list(base.shape)}"
    if any(not entry.dtype.is_convertible for entry in (base, a, b)):
        return f"{base.dtype.name} cannot be added to"
    added = (b.shape[0], a.shape[1])
    if a.shape[0] != b.shape[1] or (added[::-1] if is_transposed else added) != base.shape[-2:]:
        return (
            f"{list(base.shape)} and what is added, {list(b.shape)} x {list(a.shape)}, do not fit each other"
        )
    return None


def _rows_of(
    trained: TrainedTokens,
    stored: Mapping[str, str],
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
    problems: list[str],
) -> Iterator[MergeCodec]:
    """Yield the codec that puts trained tokens into an embedding, or into an output layer that is tied to it.

    Source: peft 0.21, utils/other.py (TrainableTokensWrapper), tuners/trainable_tokens/layer.py (merge).
    """
    if trained.base is None:
        problems.append(f"{escape(trained.path)}: its weight of the base is missing")
        return
    base, rows = tensors[stored[trained.base]], tensors[stored[trained.rows]]
    numbers = config.get("trainable_token_indices")
    if isinstance(numbers, Mapping):  # by module; a tied output is not named
        named = [value for name, value in numbers.items() if f".{trained.path}".endswith(f".{name}")]
        numbers = next(iter(named or numbers.values()), None)
    is_list = isinstance(numbers, list) and all(type(number) is int for number in numbers)
    shapes = f"{list(base.shape)} and {list(rows.shape)}"
    if not isinstance(numbers, list) or not is_list:
        problem = "the adapter's settings have no list of its trainable_token_indices"
    elif any(not entry.dtype.is_convertible for entry in (base, rows)):
        problem = f"{base.dtype.name} cannot be replaced"
    elif len(base.shape) != 2 or rows.shape != (len(numbers), *base.shape[1:]):
        problem = f"{shapes} do not fit each other and {count(len(numbers), 'trained token')}"
    elif len({*numbers}) < len(numbers) or not all(0 <= number < base.shape[0] for number in numbers):
        problem = f"its trainable_token_indices are not different rows of {list(base.shape)}"
    else:
        yield TrainedRows(
            base=base.fqn, dtype=base.dtype, shape=base.shape, rows=rows.fqn, numbers=tuple(numbers)
        )
        return
    problems.append(f"{escape(trained.path)}: {problem}")
