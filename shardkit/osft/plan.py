"""Which weights of a model become factors, of which rank, and what that costs. Pure: names and shapes.

A target is the weight W (N x M) of a linear layer at a module path P, with R = min(N, M). Of its singular value
decomposition the first k triplets are frozen and the other R - k are trained:

    P.osft_U_high  (N, k)     P.osft_params.U_low  (N, R-k)
    P.osft_S_high  (k)        P.osft_params.S_low  (R-k)
    P.osft_V_high  (k, M)     P.osft_params.V_low  (R-k, M)        V: rows of the transpose

`P.weight` is gone, a bias stays. The names are those of mini_trainer, whose checkpoints are read too.

Source: "Sculpting Subspaces", arXiv 2504.07097; mini_trainer 0.9.0, osft_utils.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import floor
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed, match_nothing, unmatched
from shardkit.errors import LayoutError, UsageError

AUTO = "auto"
HIGH = ("osft_U_high", "osft_S_high", "osft_V_high")
LOW = ("osft_params.U_low", "osft_params.S_low", "osft_params.V_low")
FACTORS = (*HIGH, *LOW)
"""What stands for `weight` in a module; the first three are frozen."""
_ENDS = tuple(f".{name}" for name in FACTORS)

Svd = Literal["exact", "fp32"]

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_OF_GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
# By how config.json's model_type begins; the first that fits counts. Source: mini_trainer 0.9.0, MODEL_CONFIGS.
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
_USUAL = (*_ATTENTION, *_GATED)  # llama, mistral, qwen, gemma, granite, and what is not listed


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftPlan:
    """How a model is divided into what is frozen and what is trained."""

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
        found = [each for each in problems if each]
        UsageError.raise_for(
            found,
            "this is no plan for OSFT",
            hint="--osft 0.3 trains three tenths of each target's singular directions",
        )

    @property
    def globs(self) -> tuple[str, ...]:
        """`targets`, one by one."""
        given = self.targets.split(",") if isinstance(self.targets, str) else self.targets
        return tuple(glob.strip() for glob in given if glob.strip())


def as_plan(osft: float | OsftPlan | Mapping[str, Any] | None) -> OsftPlan | None:
    """Return the plan that somebody gave, which a ratio or its `as_config` may stand for; None for None.

    Raises:
        UsageError: it is no plan, or the ratio is not between 0 and 1.
    """
    if osft is None or isinstance(osft, OsftPlan):
        return osft
    if isinstance(osft, Mapping):
        return from_config(osft)
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


def parse_ranks(texts: Iterable[str]) -> dict[str, int | float]:
    """Return `OsftPlan.ranks` of what `--osft-rank` takes: "GLOB=K" or "GLOB=RATIO".

    Raises:
        UsageError: lists all that are neither.
    """
    found, problems = dict[str, int | float](), list[str]()
    for text in texts:
        glob, _, value = text.rpartition("=")
        try:
            found[glob] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            glob = ""
        if not glob:
            problems.append(f"{escape(text)}: neither GLOB=K nor GLOB=RATIO")
    UsageError.raise_for(problems, "--osft-rank", hint="--osft-rank '*.down_proj=256', or '*.down_proj=0.5'")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A weight that becomes factors."""

    path: str
    """Of the linear module, e.g. "model.layers.0.mlp.up_proj"."""
    rows: int
    """N: what the layer returns."""
    columns: int
    """M: what the layer takes."""
    rank: int
    """k: directions that are frozen, at least 1 and less than min(N, M)."""

    @property
    def weight(self) -> str:
        """FQN of the dense weight."""
        return f"{self.path}.weight"

    @property
    def num_directions(self) -> int:
        """R: frozen and trained ones together."""
        return min(self.rows, self.columns)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each factor, by FQN."""
        kept, trained = self.rank, self.num_directions - self.rank
        shapes = [
            shape for size in (kept, trained) for shape in ((self.rows, size), (size,), (size, self.columns))
        ]
        return {f"{self.path}.{name}": shape for name, shape in zip(FACTORS, shapes, strict=True)}

    @property
    def num_operations(self) -> int:
        """Floating point operations of the decomposition, about: measured for the eigenvalues of the Gram matrix."""
        small, large = self.num_directions, max(self.rows, self.columns)
        return 4 * large * small**2 + 9 * small**3

    @property
    def svd_nbytes(self) -> int:
        """Most bytes of memory that the decomposition takes: the matrix and its products in float64, factors in float32.

        By the Gram matrix it is two matrices in float64 instead of three; a matrix that is nearly singular needs a
        third, and which it is shows only on the way.
        """
        small = self.num_directions
        return 8 * (3 * self.rows * self.columns + 3 * small**2) + 4 * small * (self.rows + self.columns)

    @property
    def factors_nbytes(self) -> int:
        """Bytes of its factors, which are float32."""
        return 4 * self.num_directions * (self.rows + self.columns + 1)


class Candidate(NamedTuple):
    """A weight that may become a target."""

    shape: Shape
    module_class: str | None = None
    """Name of its module's class; None if there is no model."""
    why_not: str = ""
    """Why it can be no target, e.g. "is tied to model.embed_tokens.weight"; empty if nothing is known against it."""


class PlanWording(NamedTuple):
    """How a plan is written where it was given, so that messages use the same words."""

    targets: str
    """Name of the option or argument of the targets."""
    targets_value: str
    """The option with a value for `{}`."""
    ranks: str
    """Name of the option or argument of the ranks."""
    ranks_value: str
    """The option with a glob and a rank for both `{}`."""


OPTIONS = PlanWording("--osft-targets", "--osft-targets '{}'", "--osft-rank", "--osft-rank '{}={}'")
ARGUMENT = PlanWording("OsftPlan.targets", "targets='{}'", "OsftPlan.ranks", "ranks={{'{}': {}}}")


def choose_targets(
    plan: OsftPlan,
    weights: Mapping[str, Candidate],
    model_type: str | None,
    wording: PlanWording = OPTIONS,
) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """Return the targets of a plan, in the order of the weights, and notes.

    Args:
        plan: what is wanted.
        weights: all parameters of a model by FQN. Only `weight` of a linear layer can be a target.
        model_type: from config.json, which tells the targets of "auto".
        wording: where the plan was given.

    Raises:
        LayoutError: nothing matches; or matrices that match cannot be divided (each is named).
        UsageError: some glob of `ranks` or `targets` matches nothing.
    """
    chosen, left = _matching(plan, weights, model_type, wording)
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
        hint=f"leave such weights dense: {wording.targets_value.format('auto,!GLOB')}",
    )
    _check_ranks(plan, targets, wording)
    notes = (f"left dense, as {wording.targets} says: {listed(left)}",) if left else ()
    return tuple(targets), notes


def _matching(
    plan: OsftPlan, weights: Mapping[str, Candidate], model_type: str | None, wording: PlanWording
) -> tuple[list[str], list[str]]:
    """Return the weights that a plan's globs name, and those that it leaves dense although they are named."""
    wanted, without = dict[str, None](), dict[str, None]()
    unused = []
    for glob in plan.globs:
        is_left = glob.startswith("!")
        found = _named(glob.removeprefix("!"), weights, model_type)
        (without if is_left else wanted).update(dict.fromkeys(found))
        if not found and glob != AUTO:
            unused.append(glob)
    if unused:
        raise UsageError(
            match_nothing(wording.targets, len(unused), "no weight"),
            problems=unmatched(unused, weights),
            hint="globs are compared with names of weights and of their modules: '*.mlp.up_proj'",
        )
    chosen = [name for name in weights if name in wanted and name not in without]
    if not chosen:
        raise LayoutError(
            f"no weight to divide: it is not known which layers of a model of type {escape(model_type or 'unknown')} "
            "are the targets"
            if not wanted
            else "no weight to divide: all that match are left dense",
            problems=[escape(name) for name in list(weights)[:20]],
            hint=f"name them: {wording.targets_value.format('*.query,*.key,*.value')}",
        )
    return chosen, [name for name in weights if name in wanted and name in without]


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
    """Return how the paths of the modules end that are the targets of an architecture.

    Source: mini_trainer 0.9.0, osft_utils.py, MODEL_CONFIGS.
    """
    kind = model_type or ""
    return next((ends for start, ends in _BY_MODEL_TYPE.items() if kind.startswith(start)), _USUAL)


def _unfit(name: str, weight: Candidate) -> str:
    """Return why a weight can be no target; "" if it can."""
    if weight.why_not:
        return weight.why_not
    if len(weight.shape) != 2:
        return f"{list(weight.shape)} is no matrix" + (
            ": experts stay dense" if len(weight.shape) == 3 else ""
        )
    if weight.module_class not in (None, "Linear"):
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
    """Return why a target's rank is none, or ""."""
    if not target.rank:
        return f"[{target.rows}, {target.columns}] has {target.num_directions} directions, and none would be kept"
    if target.rank >= target.num_directions:
        return f"[{target.rows}, {target.columns}] has {target.num_directions} directions, and {target.rank} were to be kept"
    return ""


def _check_ranks(plan: OsftPlan, targets: Sequence[Target], wording: PlanWording) -> None:
    names = [target.weight for target in targets]
    unused = [glob for glob in plan.ranks if not _named(glob, names, None)]
    if unused:
        raise UsageError(
            f"{wording.ranks}: {count(len(unused), 'glob')} without a target",
            problems=unmatched(unused, names),
            hint=f"globs are compared with names of targets: {wording.ranks_value.format('*.mlp.up_proj', 256)}",
        )


def factored_names(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the six names of each module that is factored, by its path.

    Args:
        names: of a checkpoint's tensors.

    Raises:
        LayoutError: a factor is missing, or the dense weight is there too; lists all.
    """
    held, found = frozenset(names), dict[str, tuple[str, ...]]()
    for path in dict.fromkeys(path for name in names if (path := factor_of(name)) is not None):
        found[path] = tuple(f"{path}.{name}" for name in FACTORS)
    LayoutError.raise_for(
        [
            *_missing(found, held),
            *(
                f"{escape(path)}.weight: stored beside its factors"
                for path in found
                if f"{path}.weight" in held
            ),
        ],
        "the factors of an OSFT checkpoint are not complete",
        hint="the checkpoint was cut, filtered, or renamed; save it again from the run that made it",
    )
    return found


def _missing(found: Mapping[str, Sequence[str]], held: Collection[str]) -> Iterator[str]:
    for path, six in found.items():
        missing = [name[len(path) + 1 :] for name in six if name not in held]
        if missing:
            yield f"{escape(path)}: lacks {', '.join(missing)}"


def stored_targets(shapes: Mapping[str, Shape]) -> dict[str, Target]:
    """Return the targets whose factors a checkpoint holds, by path, in its order.

    Paths of which there are trained factors alone are passed over: they may be the names of an optimizer's state.

    Args:
        shapes: of all tensors, by name.

    Raises:
        LayoutError: a factor is missing, the dense weight is there too, or shapes do not fit; lists all.
    """
    frozen = {path for name in shapes if name.endswith(HIGH) and (path := factor_of(name)) is not None}
    names = [name for name in shapes if weight_of(name).removesuffix(".weight") in frozen] if frozen else []
    found, problems = dict[str, Target](), list[str]()
    for path in factored_names(names):
        try:
            found[path] = target_of(path, shapes)
        except LayoutError as error:
            problems += [f"{error.message}: {', '.join(error.problems)}"]
    LayoutError.raise_for(
        problems,
        f"factors of {count(len(problems), 'weight')} do not fit each other",
        hint="the checkpoint was cut or changed; save it again from the run that made it",
    )
    return found


def factor_of(name: str) -> str | None:
    """Return the path of the module that a tensor is a factor of; None if it is none."""
    if "osft_" not in name:  # quick: there may be 100,000 names
        return None
    if not name.endswith(_ENDS):  # nearly every name: there may be a hundred thousand
        return None
    return next(name[: -len(end)] for end in _ENDS if name.endswith(end))


def shard_dim(name: str, shape: Shape, num_shards: int) -> int:
    """Return the dim along which `fully_shard` cuts a parameter of an OSFT model.

    V_* is cut along its second dim where that divides: then its projection sums r x k numbers over the shards, and
    nobody gathers V_high. FSDP2 takes no uneven second dim.

    Args:
        name: FQN.
        shape: of the parameter.
        num_shards: size of the shard axis.
    """
    is_v = name.endswith((".osft_V_high", ".osft_params.V_low"))
    return 1 if is_v and shape[-1] % num_shards == 0 else 0


def weight_of(name: str) -> str:
    """Return the name of the weight that a tensor is a factor of; a name of anything else as it is."""
    path = factor_of(name)
    return name if path is None else f"{path}.weight"


def target_of(path: str, shapes: Mapping[str, Shape]) -> Target:
    """Return the target whose factors have these shapes, by FQN.

    Raises:
        LayoutError: they do not fit each other.
    """
    wide, kept, tall = (shapes[f"{path}.{name}"] for name in ("osft_U_high", "osft_S_high", "osft_V_high"))
    if len(wide) == 2 and len(tall) == 2 and len(kept) == 1:
        target = Target(path=path, rows=wide[0], columns=tall[1], rank=kept[0])
        if target.shapes == {name: shapes[name] for name in target.shapes}:
            return target
    raise LayoutError(
        f"{escape(path)}: its factors do not fit each other",
        problems=[f"{escape(name)}: {list(shapes[name])}" for name in (f"{path}.{each}" for each in FACTORS)],
    )


def as_config(plan: OsftPlan) -> dict[str, Any]:
    """Return a plan as JSON."""
    return {"ratio": plan.ratio, "targets": list(plan.globs), "ranks": dict(plan.ranks), "svd": plan.svd}


def as_plain(osft: float | OsftPlan | Mapping[str, Any] | None) -> float | dict[str, Any] | None:
    """Return plain data that stands for the plan that somebody gave: the ratio, if there is no more to it.

    Raises:
        UsageError: as `as_plan`.
    """
    plan = as_plan(osft)
    if plan is None or plan == OsftPlan(ratio=plan.ratio):
        return None if plan is None else plan.ratio
    return as_config(plan)


def from_config(config: Mapping[str, Any]) -> OsftPlan:
    """Return the plan that `as_config` made JSON of."""
    return OsftPlan(**config)
