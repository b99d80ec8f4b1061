"""Find problems of a model to be written, by its names, shapes, config and its base's names. No model is built.

Names may be another trainer's own, transformers' names in memory, or factors of weights, or differ from the base's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape as escape_glob

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape
from shardkit.errors import SourceError
from shardkit.keys.names import Segments, is_number, join, split
from shardkit.keys.renaming import is_computed

# Trainer -> a pattern that only its names match; the first one that matches decides.
_OWN_NAMES = {
    "torchtitan's": r"(?:^|\.)layers\.\d+\.attention\.(?:qkv_linear\.)?(?:wqkv|wq|wk|wv)\.weight$",
    "torchtune's": r"(?:^|\.)layers\.\d+\.(?:attn\.output_proj\.weight|sa_norm\.scale)$",
    "OLMo-core's": r"(?:^|\.)blocks\.\d+\.attention\.(?:w_q|w_out)\.weight$",
    "fms's": r"(?:^|\.)(?:ff_sub_layer\.\w+\.weight|attn\.in_proj\.qkv_fused\.weight)$",
    "Megatron's": r"(?:^|\.)(?:linear_qkv|linear_fc1|embedding\.word_embeddings)\.(?:weight|layer_norm_weight)$",
}
_LIKE_TORCHTITANS = ("mistral_large4", "mistral_large4_text")
"""Types of models whose names on the Hub look like torchtitan's."""
_FUSED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")
_IN_MEMORY = {
    "experts fused into one tensor": _FUSED_EXPERTS.pattern,
    "the language model of a vision model below `model.`": r"^model\.(?:language_model|visual|vision_tower)\.",
}
# mini_trainer 0.9 (osft_utils.py) and PEFT 0.21 (tuners/osf): a matrix is kept as factors of its SVD.
_FACTORS = re.compile(
    r"(?:^|\.)(?:osft_[USV]_high|osft_params\.[USV]_low|osf_svd_params\.(?:[^.]+\.)?[USV]_low|_?osf_[USV]_high)$"
)
_MEGATRON_ONLY = re.compile(r"^(?:decoder|embedding)\.")


def own_names_warnings(
    names: Iterable[str], base: Collection[str] | None, model_type: object = None
) -> tuple[str, ...]:
    """Return a warning if names are a trainer's own, so that `from_pretrained` would find none of them.

    Args:
        names: the names to write.
        base: the base's names, which are always right; None if they are not known.
        model_type: `model_type` in the model's config, or None.
    """
    if model_type in _LIKE_TORCHTITANS:
        return ()
    for what, matched in _matches(_OWN_NAMES, names, base):
        if what != "Megatron's" or any(map(_MEGATRON_ONLY.search, matched)):
            return (f"the names are {what} own, not the Hub's ({_example(matched)})",)
    return ()


def in_memory_warnings(names: Iterable[str], base: Collection[str] | None) -> tuple[str, ...]:
    """Return a warning for each kind of name that transformers uses only in memory.

    Args:
        names, base: as for `own_names_warnings`.
    """
    return tuple(
        f"{len(matched)} names are transformers' own in memory and may not be the Hub's: {what} "
        f"({_example(matched)}); they are written as they are"
        for what, matched in _matches(_IN_MEMORY, names, base)
    )


def _matches(
    patterns: Mapping[str, str], names: Iterable[str], base: Collection[str] | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield (kind, names) for each kind whose pattern matches names that the base lacks."""
    extra_names = [name for name in names if base is None or name not in base]
    for what, pattern in patterns.items():
        matched = [name for name in extra_names if re.search(pattern, name)]
        if matched:
            yield what, matched


def holds_fused_experts(names: Iterable[str]) -> bool:
    """True if one of the tensors holds several experts, which the Hub stores one by one."""
    return any(map(_FUSED_EXPERTS.search, names))


def differing_expert_counts(shapes: Mapping[str, Shape], base: Mapping[str, Shape]) -> dict[str, int]:
    """Find fused experts whose number differs from the base's, which has them one by one.

    Returns:
        Name of each such tensor -> number of experts in the base.
    """
    numbers = dict[str, set[str]]()
    for name in base:
        if match := _EXPERT.match(name):
            numbers.setdefault(match[1], set()).add(match[2])
    return {
        name: len(numbers[match[1]])
        for name, shape in shapes.items()
        if name not in base
        and (match := _STACKED.match(name))
        and match[1] in numbers
        and shape[:1] != (len(numbers[match[1]]),)
    }


def refuse_factors(names: Iterable[str], model_names: Iterable[str] = (), hint: str | None = None) -> None:
    """Raise an error if weights are stored as the factors of orthogonal subspace fine-tuning (OSFT).

    OSFT keeps a matrix as the factors U, S and V of its SVD. The `_high` ones, of the largest singular values, are frozen,
    and the `_low` ones are trained. The error names each matrix with its first factor.

    Args:
        names: the names from which a model is filled.
        model_names: names of the model, if known. A model that has factors itself loads them as they are.
        hint: a hint for the error, in place of the general one.

    Raises:
        SourceError: some names are of factors.
    """
    factors = [name for name in names if _FACTORS.search(name)]
    if not factors or any(map(_FACTORS.search, model_names)):
        return
    modules = {_FACTORS.sub("", name): name for name in reversed(factors)}
    has_high = any("_high" in name for name in factors)
    lost = "" if has_high else "; only their trained part is here, so the weights cannot be made from it"
    raise SourceError(
        f"{count(len(modules), 'matrix is', 'matrices are')} stored as factors of orthogonal subspace fine-tuning "
        f"(OSFT), which are not weights{lost}",
        problems=[f"{escape(module)}: {escape(name)}" for module, name in reversed(modules.items())],
        hint=hint or "consolidate folds whole sets of factors: name the checkpoint that has all of them",
    )


def _example(names: list[str]) -> str:
    return f"such as {escape(names[0])}"


_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.", re.ASCII)
_STACKED = re.compile(r"^((.+)\.experts)\.(?:gate_up_proj|up_proj|down_proj)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """The differences between the names to write and the base's."""

    missing: tuple[str, ...] = ()
    """Names of the base that would not be written, except those that a tie replaces."""
    unexpected: tuple[str, ...] = ()
    """Names that the base lacks, except copies of tied tensors."""
    computed: tuple[str, ...] = ()
    """Names of buffers that only one side has and that every model computes itself."""
    wrong_shapes: tuple[tuple[str, Shape, Shape], ...] = ()
    """(name, shape in the base, shape to write)."""

    @property
    def is_equal(self) -> bool:
        """True if there is no difference, apart from ties and computed buffers."""
        return not (self.missing or self.unexpected or self.wrong_shapes)


def compare_with_base(
    shapes: Mapping[str, Shape], base: Mapping[str, Shape], *, ties: Iterable[Collection[str]] = ()
) -> BaseComparison:
    """Compare the names and shapes to write with those of the base.

    Args:
        shapes: name to write -> shape.
        base: name in the base -> shape.
        ties: groups of names that are one parameter, e.g. [("model.embed_tokens.weight", "lm_head.weight")].
            A side that has one name of a group lacks none of them.
    """
    groups = {name: set(group) for group in ties for name in group}
    missing, unexpected, computed = list[str](), list[str](), list[str]()
    for side, other_side, lacking in ((base, shapes, missing), (shapes, base, unexpected)):
        for name in side:
            if name not in other_side and groups.get(name, set()).isdisjoint(other_side):
                (computed if is_computed(name, side[name]) else lacking).append(name)
    return BaseComparison(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        computed=tuple(computed),
        wrong_shapes=tuple(
            (name, tuple(base[name]), tuple(shape))
            for name, shape in shapes.items()
            if name in base and tuple(base[name]) != tuple(shape)
        ),
    )


def incomplete_parts(missing: Collection[str], present_names: Collection[str]) -> dict[str, str]:
    """Return missing name -> the part that contains it, for parts of which other tensors are present.

    A part is the outermost list of blocks or experts around a tensor; if there is no list, the largest module that
    contains none. Tensors that lie directly in one module belong together too.

    For example, if `model.layers.1.mlp.weight` is missing and `model.layers.0.mlp.weight` is present, the part is
    `model.layers`.

    Args:
        missing: names of the base that are to come from elsewhere.
        present_names: names of the base that are present.
    """
    paths = {name: split(name) for name in (*missing, *present_names)}
    above_lists = {path[:stop] for path in paths.values() for stop in range(_first_number(path) + 1)}
    present_paths = {paths[name][:depth] for name in present_names for depth in range(len(paths[name]))}
    parents = {paths[name][:-1] for name in present_names}
    torn = dict[str, str]()
    for name in missing:
        path = paths[name]
        stop = _first_number(path)
        without = (path[:depth] for depth in range(1, len(path)) if path[:depth] not in above_lists)
        part = path[:stop] if stop >= 0 else next(without, path)
        if part in present_paths or path[:-1] in parents:
            torn[name] = join(part if part in present_paths else path[:-1])
    return torn


def missing_globs(missing: Collection[str], present_names: Collection[str]) -> list[str]:
    """Return globs for missing names, each for the largest module of which no tensor is present.

    Args:
        missing, present_names: as for `incomplete_parts`.
    """
    present_paths = {path[:depth] for path in map(split, present_names) for depth in range(1, len(path))}
    globs = list[str]()
    for name in missing:
        path = split(name)
        module = next(
            (path[:depth] for depth in range(1, len(path)) if path[:depth] not in present_paths), None
        )
        globs.append(escape_glob(name) if module is None else f"{escape_glob(join(module))}.*")
    return list(dict.fromkeys(globs))


def _first_number(path: Segments) -> int:
    """Return the position of the first number among a name's segments, or -1."""
    return next((place for place, segment in enumerate(path) if is_number(segment)), -1)
