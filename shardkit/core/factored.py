"""Weights that are stored as several tensors (factors): names, shapes, and sharded dims. Pure.

The weight W (N x M) of a linear layer at module path P is stored as its singular value decomposition. With
R = min(N, M), the first k triplets are frozen and the other R - k are trained:

    P.osft_U_high  (N, k)     P.osft_params.U_low  (N, R-k)
    P.osft_S_high  (k)        P.osft_params.S_low  (R-k)
    P.osft_V_high  (k, M)     P.osft_params.V_low  (R-k, M)        V: rows of the transpose

`P.weight` is removed; a bias is kept. The names are those of mini_trainer, whose checkpoints can be read too.

Source: "Sculpting Subspaces", arXiv 2504.07097; mini_trainer 0.9.0, osft_utils.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError

HIGH = ("osft_U_high", "osft_S_high", "osft_V_high")
LOW = ("osft_params.U_low", "osft_params.S_low", "osft_params.V_low")
FACTORS = (*HIGH, *LOW)
"""Names that replace `weight` in a module; the first three are frozen."""
_ENDS = tuple(f".{name}" for name in FACTORS)

FACTOR_DTYPE = BY_NAME["float32"]
"""Dtype of factors that shardkit computes, and of all folded weights."""

Svd = Literal["exact", "fp32"]
"""Precision in which factors are computed: float64, or float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A weight that is stored as factors, or becomes them."""

    path: str
    """Path of the linear module, e.g. "model.layers.0.mlp.up_proj"."""
    rows: int
    """N: output features."""
    columns: int
    """M: input features."""
    rank: int
    """k: number of frozen directions, at least 1 and less than min(N, M)."""

    @property
    def weight(self) -> str:
        """FQN of the dense weight."""
        return f"{self.path}.weight"

    @property
    def num_directions(self) -> int:
        """R: frozen plus trained directions."""
        return min(self.rows, self.columns)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each factor, by FQN."""
        kept, trained = self.rank, self.num_directions - self.rank
        shapes = [
            shape for size in (kept, trained) for shape in ((self.rows, size), (size,), (size, self.columns))
        ]
        return {f"{self.path}.{name}": shape for name, shape in zip(FACTORS, shapes, strict=True)}


def factored_names(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the six factor names of each factored module, by module path.

    Args:
        names: of a checkpoint's tensors.

    Raises:
        LayoutError: a factor is missing, or the dense weight is present as well; lists all.
    """
    checkpoint_names, factored = frozenset(names), dict[str, tuple[str, ...]]()
    for path in dict.fromkeys(path for name in names if (path := factor_of(name)) is not None):
        factored[path] = tuple(f"{path}.{name}" for name in FACTORS)
    LayoutError.raise_for(
        [
            *_missing(factored, checkpoint_names),
            *(
                f"{escape(path)}.weight: stored beside its factors"
                for path in factored
                if f"{path}.weight" in checkpoint_names
            ),
        ],
        "the factors of an OSFT checkpoint are incomplete",
        hint="the checkpoint was cut, filtered, or renamed; save it again from the run that made it",
    )
    return factored


def _missing(factored: Mapping[str, Sequence[str]], checkpoint_names: Collection[str]) -> Iterator[str]:
    for path, six in factored.items():
        missing = [name[len(path) + 1 :] for name in six if name not in checkpoint_names]
        if missing:
            yield f"{escape(path)}: lacks {', '.join(missing)}"


def stored_targets(shapes: Mapping[str, Shape]) -> dict[str, Target]:
    """Return the targets whose factors a checkpoint contains, by path, in its order.

    Paths with trained factors only are skipped: they may be names of an optimizer's state.

    Args:
        shapes: of all tensors, by name.

    Raises:
        LayoutError: a factor is missing, the dense weight is present as well, or shapes do not match; lists all.
    """
    frozen = {path for name in shapes if name.endswith(HIGH) and (path := factor_of(name)) is not None}
    names = [name for name in shapes if weight_of(name).removesuffix(".weight") in frozen] if frozen else []
    targets, problems = dict[str, Target](), list[str]()
    for path in factored_names(names):
        try:
            targets[path] = target_of(path, shapes)
        except LayoutError as error:
            problems += [f"{error.message}: {', '.join(error.problems)}"]
    LayoutError.raise_for(
        problems,
        f"factors of {count(len(problems), 'weight')} do not match",
        hint="the checkpoint was cut or changed; save it again from the run that made it",
    )
    return targets


def factor_of(name: str) -> str | None:
    """Return the module path of a factor; None for any other tensor."""
    if "osft_" not in name:  # nearly every name: there may be a hundred thousand
        return None
    return next((name[: -len(end)] for end in _ENDS if name.endswith(end)), None)


def shard_dim(name: str, shape: Shape, num_shards: int) -> int:
    """Return the dim along which `fully_shard` cuts a parameter of an OSFT model.

    V_* is sharded along its second dim if that is divisible: its projection then sums r x k numbers over the shards, and
    V_high is never gathered. FSDP2 does not support an uneven second dim.

    Args:
        name: FQN.
        shape: of the parameter.
        num_shards: size of the shard axis.
    """
    is_v = name.endswith((".osft_V_high", ".osft_params.V_low"))
    return 1 if is_v and shape[-1] % num_shards == 0 else 0


def weight_of(name: str) -> str:
    """Return the weight's name for a factor; any other name unchanged."""
    path = factor_of(name)
    return name if path is None else f"{path}.weight"


def target_of(path: str, shapes: Mapping[str, Shape]) -> Target:
    """Return the target at a path, from the shapes of its factors by FQN.

    Raises:
        LayoutError: the shapes do not match.
    """
    wide, kept, tall = (shapes[f"{path}.{factor}"] for factor in HIGH)
    if len(wide) == 2 and len(tall) == 2 and len(kept) == 1:
        target = Target(path=path, rows=wide[0], columns=tall[1], rank=kept[0])
        if target.shapes == {name: shapes[name] for name in target.shapes}:
            return target
    raise LayoutError(
        f"{escape(path)}: its factors do not match",
        problems=[
            f"{escape(name)}: {list(shapes[name])}" for name in (f"{path}.{factor}" for factor in FACTORS)
        ],
    )
