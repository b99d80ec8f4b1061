"""Choice of the weights that become factors (`core.factored`), and of their ranks. Pure: names and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import floor
from types import MappingProxyType
from typing import NamedTuple

from shardkit.core.factored import Svd, Target
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed, match_nothing, unmatched
from shardkit.errors import LayoutError, UsageError

AUTO = "auto"

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_OF_GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# By prefix of config.json's model_type; the first match counts. Source: mini_trainer 0.9.0, MODEL_CONFIGS.
_BY_MODEL_TYPE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gptj": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.fc_in", "mlp.fc_out"),
        "gpt_neo": (
            *(f"attn.attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
            "mlp.c_fc",
            "mlp.c_proj",
        ),
        "gpt_oss": _ATTENTION,
        "gpt2": _OF_GPT2,
        "opt": (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.out_proj",
            "fc1",
            "fc2",
        ),
        "qwen3_5": (*_ATTENTION, "linear_attn.out_proj", *_GATED),
        "phi3": ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"),
        "phi4": ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    }
)
_USUAL = (*_ATTENTION, *_GATED)  # llama, mistral, qwen, gemma, granite, and unlisted types


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftPlan:
    """How the weights of a model are divided into frozen and trained directions."""

    ratio: float
    """Share of each target's singular directions that is trained, above 0 and below 1."""
    targets: str | Sequence[str] = AUTO
    """"auto" by the architecture, or globs over names of weights or their modules. "!GLOB" leaves targets dense."""
    ranks: Mapping[str, int | float] = field(default_factory=dict)
    """By glob, instead of `ratio`: an int is the number of frozen directions, a float the share that is trained. The
    last that matches wins."""
    svd: Svd = "exact"
    """"exact" computes in float64; "fp32" is quicker for wide matrices and a hundredth as exact."""

    def __post_init__(self) -> None:
        problems = [_bad_ratio("the ratio", self.ratio)]
        problems += [_bad_rank(glob, rank) for glob, rank in self.ranks.items()]
        if self.svd not in ("exact", "fp32"):
            problems.append(f'svd is "exact" or "fp32", not {escape(repr(self.svd))}')
        if not self.globs:
            problems.append("targets names nothing")
        elif all(glob.startswith("!") for glob in self.globs):
            problems.append(
                f"targets says only what stays dense: begin with {AUTO}, or a glob: '{AUTO},{escape(','.join(self.globs))}'"
            )
        errors = [problem for problem in problems if problem]
        UsageError.raise_for(
            errors,
            "not a valid plan for OSFT",
            hint="osft=0.3 trains three tenths of each target's singular directions",
        )

    @property
    def globs(self) -> tuple[str, ...]:
        """`targets` as a tuple."""
        patterns = self.targets.split(",") if isinstance(self.targets, str) else self.targets
        return tuple(glob.strip() for glob in patterns if glob.strip())


def as_plan(osft: float | OsftPlan | None) -> OsftPlan | None:
    """Return the plan for an `osft=` option: a plan, a ratio, or None.

    Raises:
        UsageError: neither a plan nor a ratio, or the ratio is not between 0 and 1.
    """
    if osft is None or isinstance(osft, OsftPlan):
        return osft
    if isinstance(osft, bool) or not isinstance(osft, (int, float)):
        raise UsageError(
            f"osft is a {type(osft).__name__}",
            hint="give the share of each weight's directions that is trained, such as 0.3, or an OsftPlan",
        )
    return OsftPlan(ratio=float(osft))


def _bad_ratio(what: str, ratio: float) -> str:
    if 0 < ratio < 1:
        return ""
    why = {0.0: ": nothing would be trained", 1.0: ": that is full fine-tuning, without OSFT"}.get(ratio, "")
    return f"{what} is {ratio}, not between 0 and 1{why}"


def _bad_rank(glob: str, rank: int | float) -> str:
    if isinstance(rank, float):
        return _bad_ratio(f"the ratio of {escape(glob)}", rank)
    return "" if rank > 0 else f"the rank of {escape(glob)} is {rank}: nothing would be kept"


class Candidate(NamedTuple):
    """A weight that may become a target."""

    shape: Shape
    module_class: str
    """Name of the module's class."""
    why_not: str = ""
    """Why it cannot be a target, e.g. "is tied to model.embed_tokens.weight"; empty if it can."""


def choose_targets(
    plan: OsftPlan, weights: Mapping[str, Candidate], model_type: str | None
) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Return the targets of a plan, in the order of the weights, and notes.

    Args:
        plan: the caller's plan.
        weights: all parameters of a model by FQN. Only `weight` of a linear layer can be a target.
        model_type: from config.json; determines the targets of "auto".

    Raises:
        LayoutError: nothing matches, or matching weights cannot be divided; lists all.
        UsageError: a glob of `ranks` or `targets` matches nothing.
    """
    chosen, dense_names = _matching(plan, weights, model_type)
    problems, targets = list[str](), list[Target]()
    for name in chosen:
        why = _unfit(name, weights[name])
        if not why:
            target = _target(plan, name, weights[name].shape)
            why = _bad_division(target)
            targets.append(target)
        if why:
            problems.append(f"{escape(name)}: {why}")
    LayoutError.raise_for(
        problems,
        f"{count(len(problems), 'weight')} cannot be divided into what is frozen and what is trained",
        hint="leave such weights dense: targets='auto,!GLOB'",
    )
    _check_ranks(plan, targets)
    notes = (f"left dense, as OsftPlan.targets says: {listed(dense_names)}",) if dense_names else ()
    return tuple(targets), notes


def _matching(
    plan: OsftPlan, weights: Mapping[str, Candidate], model_type: str | None
) -> tuple[list[str], list[str]]:
    """Return the weights that a plan selects, and those that it explicitly leaves dense."""
    named_weights, negated_weights = dict[str, None](), dict[str, None]()
    unused = []
    for glob in plan.globs:
        is_left = glob.startswith("!")
        names = _named(glob.removeprefix("!"), weights, model_type)
        (negated_weights if is_left else named_weights).update(dict.fromkeys(names))
        if not names and glob != AUTO:
            unused.append(glob)
    if unused:
        raise UsageError(
            match_nothing("OsftPlan.targets", len(unused), "no weight"),
            problems=unmatched(unused, weights),
            hint="globs match names of weights and of their modules: '*.mlp.up_proj'",
        )
    chosen = [name for name in weights if name in named_weights and name not in negated_weights]
    if not chosen:
        raise LayoutError(
            f"no weight to divide: it is not known which layers of a model of type {escape(model_type or 'unknown')} "
            "are the targets"
            if not named_weights
            else "no weight to divide: all that match are left dense",
            problems=[escape(name) for name in list(weights)[:20]],
            hint="name them: targets='*.query,*.key,*.value'",
        )
    return chosen, [name for name in weights if name in named_weights and name in negated_weights]


def _named(glob: str, weights: Collection[str], model_type: str | None) -> list[str]:
    if glob == AUTO:
        ends = auto_targets(model_type)
        return [name for name in weights if any(f".{name}".endswith(f".{end}.weight") for end in ends)]
    return [
        name
        for name in weights
        if fnmatchcase(name, glob)
        or (name.endswith(".weight") and fnmatchcase(name[: -len(".weight")], glob))
    ]


def auto_targets(model_type: str | None) -> tuple[str, ...]:
    """Return the suffixes of module paths that are targets in an architecture.

    Source: mini_trainer 0.9.0, osft_utils.py, MODEL_CONFIGS.
    """
    kind = model_type or ""
    return next((ends for start, ends in _BY_MODEL_TYPE.items() if kind.startswith(start)), _USUAL)


def _unfit(name: str, weight: Candidate) -> str:
    """Return why a weight cannot be a target; "" if it can."""
    if weight.why_not:
        return weight.why_not
    if len(weight.shape) != 2:
        return f"{list(weight.shape)} is not a matrix" + (
            ": experts stay dense" if len(weight.shape) == 3 else ""
        )
    if weight.module_class != "Linear":
        return f"it belongs to {weight.module_class}, and only a Linear can be divided"
    if not name.endswith(".weight"):
        return "only a parameter called weight can be divided"
    if min(weight.shape) < 2:
        return f"{list(weight.shape)} has one direction, which cannot be both frozen and trained"
    return ""


def _target(plan: OsftPlan, name: str, shape: Shape) -> Target:
    rows, columns = shape
    rank: int | float = plan.ratio
    for glob, value in plan.ranks.items():
        if _named(glob, (name,), None):
            rank = value
    most = min(rows, columns)
    kept = min(floor(most * (1.0 - rank)), most - 1) if isinstance(rank, float) else rank
    return Target(path=name[: -len(".weight")], rows=rows, columns=columns, rank=kept)


def _bad_division(target: Target) -> str:
    """Return why a target's rank is invalid, or ""."""
    if not target.rank:
        return f"[{target.rows}, {target.columns}] has {target.num_directions} directions, and none would be kept"
    if target.rank >= target.num_directions:
        return f"[{target.rows}, {target.columns}] has {target.num_directions} directions, and {target.rank} were to be kept"
    return ""


def _check_ranks(plan: OsftPlan, targets: Sequence[Target]) -> None:
    names = [target.weight for target in targets]
    unused = [glob for glob in plan.ranks if not _named(glob, names, None)]
    if unused:
        raise UsageError(
            f"OsftPlan.ranks: {count(len(unused), 'glob')} without a target",
            problems=unmatched(unused, names),
            hint="globs match names of targets: ranks={'*.mlp.up_proj': 256}",
        )
