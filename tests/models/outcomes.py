"""What is known not to pass, and why: everything that does not stand here passes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.models.newer import LATER
from tests.models.zoo import BROADCAST, ZOO

STEPS = {
    "reference": "transformers' own forward in bf16, in one process",
    "preshard": "`shardkit preshard` for 4 ranks",
    "direct": "three phases from the Hub directory, each rank reads; every tensor's name, dtype and bits",
    "broadcast": "the same, one rank reads",
    "presharded": "three phases from the pre-sharded directory",
    "stock": "stock `dcp.load` of it",
    "logits": "the answer of the wrapped model",
    "save": "`shardkit.save`",
    "consolidate": "`shardkit consolidate --base` of that; every byte of the weights",
    "dcp_save": "stock `dcp.save`",
    "dcp_consolidate": "`shardkit consolidate --base` of that",
    "bare": "`shardkit consolidate` of that without a base, beside config.json",
}
"""In the order in which they are done."""

NEEDS = {
    **dict.fromkeys(("presharded", "stock"), ("preshard",)),
    **dict.fromkeys(("broadcast", "save", "dcp_save"), ("direct",)),
    "logits": ("reference", "direct"),
    **{"consolidate": ("save",), "dcp_consolidate": ("dcp_save",)},
    "bare": ("dcp_save",),
}
"""Step -> those that make what it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something does not pass."""

    text: str
    """For people who look their model up."""
    said: str
    """Regular expression: what is found in the words of the step."""
    cases: Mapping[str, tuple[str, ...]]
    """Step, or several with blanks between -> the models."""
    goes_on: bool = False
    """True where the step makes what others take, though it is wrong."""


REASONS = {
    "computed": Reason(
        text="The model computes a parameter that no file has: stock `dcp.load` needs"
        " `DefaultLoadPlanner(allow_partial_load=True)`.",
        said=r"Missing key in checkpoint state_dict: model\.\w+\.embed_positions",
        cases={"stock": ("marian",)},
    ),
    "own": Reason(
        text="transformers' own model fails in its forward in bf16.",
        said=r"expected m1 and m2 to have the same dtype",
        cases={"reference": ("deberta",)},
    ),
    "overwritten": Reason(
        text="transformers itself overwrites a value of the file each time that it loads the model: the last of"
        " `balancing_biases` in `zaya`, the embedding of the padding token in `youtu`, `funnel` and `chinese_clip`."
        " shardkit keeps what the file has.",
        said=r"^wrong: (model\.layers\.0\.mlp\.gate\.balancing_biases|lm_head\.weight|\.logits"
        r"|(funnel|text_model)\.embeddings\.word_embeddings\.weight): off by",
        cases={
            "direct broadcast presharded stock": ("zaya", "youtu+padding", "funnel", "chinese_clip"),
            "logits": ("zaya", "youtu+padding", "funnel"),
        },
        goes_on=True,
    ),
    "way back": Reason(
        text="What transformers makes of the tensors of `inkling2_loop` when it saves them takes operations that"
        " shardkit does not know: `consolidate` needs `--base`, and warns without it.",
        said=r"tensors are written as the model holds them",
        cases={"bare": ("inkling2_loop",)},
    ),
}


def expected(name: str) -> dict[str, str]:
    """Return step -> the name of the reason why it does not pass, "" where it does; steps that are not reached lack."""
    failing = {
        step: reason
        for reason, each in REASONS.items()
        for steps, names in each.cases.items()
        if name in names
        for step in steps.split()
    }
    found: dict[str, str] = {}
    for step in STEPS:
        if step == "broadcast" and name not in BROADCAST:
            continue
        if step == "bare" and ZOO[name].names != "hub":
            continue
        if all(_made(found.get(needed)) for needed in NEEDS.get(step, ())):
            found[step] = failing.get(step, "")
    return found


def _made(reason: str | None) -> bool:
    return reason is not None and (not reason or REASONS[reason].goes_on)


def named(said: Mapping[str, str], name: str) -> dict[str, str]:
    """Return what a model's steps said, each that is wrong for its known reason as the reason's name."""
    known = expected(name)
    return {
        step: known[step] if known.get(step) and re.search(REASONS[known[step]].said, text) else text
        for step, text in said.items()
    }


def check_table() -> None:
    """Refuse a table that speaks of models or steps that are not there, or twice of one."""
    seen: dict[tuple[str, str], str] = {}
    later = {each.name for each in LATER}
    for reason, each in REASONS.items():
        for steps, names in each.cases.items():
            for step in steps.split():
                assert step in STEPS, step
                for name in names:
                    assert name in ZOO or name in later, name
                    assert (name, step) not in seen, (name, step, reason)
                    seen[name, step] = reason
