"""Names that are known not to be the Hub's: other trainers' own, and transformers' names in memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from shardkit.core.text import escape


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
_MEGATRON_ONLY = re.compile(r"^(?:decoder|embedding)\.")


def foreign_warnings(names: Iterable[str], base: Collection[str] | None) -> tuple[str, ...]:
    """Return a warning for each kind of name that the Hub's models do not have.

    Args:
        names: to be written.
        base: the base's names where they are known: what it has is right.
    """
    left = [name for name in names if base is None or name not in base]
    warnings = []
    for what, pattern in _OWN_NAMES:
        found = [name for name in left if pattern.search(name)]
        if what == "Megatron's" and not any(map(_MEGATRON_ONLY.search, found)):
            continue
        if found:
            warnings.append(
                f"these are not Hub names but {what} own ({_example(found)}): they are written as they are, and "
                "transformers cannot load them; --rename maps names, but no values are permuted, fused or split"
            )
            break
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


def _example(found: list[str]) -> str:
    return f"such as {escape(found[0])}"
