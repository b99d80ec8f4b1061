"""Names that are known not to be the Hub's: other trainers' own, and transformers' names in memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from shardkit.core.text import count, escape
from shardkit.errors import SourceError


class _Family(NamedTuple):
    what: str
    pattern: re.Pattern[str]


def _family(what: str, pattern: str) -> _Family:
    return _Family(what, re.compile(pattern))


# One telling name for each; the first that matches speaks.
_OWN_NAMES = (
    _family("torchtitan's", r"(?:^|\.)layers\.\d+\.attention\.(?:qkv_linear\.)?(?:wqkv|wq|wk|wv)\.weight$"),
    _family("torchtune's", r"(?:^|\.)layers\.\d+\.(?:attn\.output_proj\.weight|sa_norm\.scale)$"),
    _family("OLMo-core's", r"(?:^|\.)blocks\.\d+\.attention\.(?:w_q|w_out)\.weight$"),
    _family("fms's", r"(?:^|\.)(?:ff_sub_layer\.\w+\.weight|attn\.in_proj\.qkv_fused\.weight)$"),
    _family(
        "Megatron's", r"(?:^|\.)(?:linear_qkv|linear_fc1|word_embeddings)\.(?:weight|layer_norm_weight)$"
    ),
)
_IN_MEMORY = (
    _family("experts fused into one tensor", r"\.experts\.(?:gate_up_proj|down_proj)$"),
    _family(
        "the language model of a vision model below `model.`",
        r"^model\.(?:language_model|visual|vision_tower)\.",
    ),
)
# mini_trainer 0.9 (osft_utils.py) and PEFT 0.21 (tuners/osf): a matrix is kept as factors of its SVD.
_FACTORS = re.compile(
    r"(?:^|\.)(?:osft_[USV]_high|osft_params\.[USV]_low|osf_svd_params\.(?:[^.]+\.)?[USV]_low|_?osf_[USV]_high)$"
)
_MEGATRON_ONLY = re.compile(r"^(?:decoder|embedding)\.")


def own_names_warnings(names: Iterable[str], base: Collection[str] | None) -> tuple[str, ...]:
    """Return a warning where names are another trainer's own, of which `from_pretrained` finds none.

    Args:
        names: to be written.
        base: the base's names where they are known: what it has is right.
    """
    left = [name for name in names if base is None or name not in base]
    for what, pattern in _OWN_NAMES:
        found = [name for name in left if pattern.search(name)]
        if what == "Megatron's" and not any(map(_MEGATRON_ONLY.search, found)):
            continue
        if found:
            return (
                f"these are not Hub names but {what} own ({_example(found)}): they are written as they are, and "
                "transformers cannot load them; --rename maps names, but no values are permuted, fused or split",
            )
    return ()


def in_memory_warnings(names: Iterable[str], base: Collection[str] | None) -> tuple[str, ...]:
    """Return a warning for each kind of name that is transformers' own in memory; arguments as above."""
    left = [name for name in names if base is None or name not in base]
    warnings = []
    for what, pattern in _IN_MEMORY:
        found = [name for name in left if pattern.search(name)]
        if found:
            warnings.append(
                f"{len(found)} names are transformers' own in memory and may not be the Hub's: {what} "
                f"({_example(found)}); they are written as they are"
            )
    return tuple(warnings)


def holds_fused_experts(names: Iterable[str]) -> bool:
    """True where experts that the Hub stores one by one are one tensor."""
    return any(map(_IN_MEMORY[0].pattern.search, names))


def refuse_factors(names: Iterable[str], wanted: Iterable[str] = ()) -> None:
    """Refuse weights that are stored as the factors of orthogonal subspace fine-tuning.

    Args:
        names: that a model is to be made of.
        wanted: names of that model, where they are known: one that has factors itself takes them as they are.

    Raises:
        SourceError: there are such factors.
    """
    found = [name for name in names if _FACTORS.search(name)]
    if not found or any(map(_FACTORS.search, wanted)):
        return
    modules = {_FACTORS.sub("", name): name for name in reversed(found)}
    is_adapter = any("osf_svd_params" in name for name in found) and not any(
        "_high" in name for name in found
    )
    lost = (
        "; of these the trained part alone is here, so the weights cannot be made from it"
        if is_adapter
        else ""
    )
    raise SourceError(
        f"{count(len(modules), 'matrix is', 'matrices are')} stored as factors of orthogonal subspace fine-tuning "
        f"(OSFT), which are not folded back into weights yet{lost}",
        problems=[f"{escape(module)}: {escape(name)}" for module, name in reversed(modules.items())],
        hint="let the trainer that wrote them save the model itself: mini_trainer's save and PEFT's merge_and_unload "
        "fold them",
    )


def _example(found: list[str]) -> str:
    return f"such as {escape(found[0])}"
