"""The singular value decomposition of a weight, with a measurement of its accuracy.

All directions of a matrix are needed, and at least half of them are frozen, so approximations are not an option. The
eigenvectors of the Gram matrix (of the tall orientation, in float64) cost a fifth of a full decomposition in float64, and
are as exact unless the matrix is nearly singular. In that case, or if the measurement fails, the full decomposition is
used. Each target is computed in one thread, so that results do not depend on the number of threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from shardkit.core.factored import FACTORS, Svd, Target
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.transfer.codecs.convert import one_thread_each

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 20  # numbers in float64 at a time
_NUM_VECTORS = 16
_LEAST_RATIO = 1e-4  # smallest to largest singular value, for the Gram matrix: its square is 1e-8
MAX_ERROR = 1e-6
"""Limit for `Factors.error` and `Factors.orthogonality`."""
PROMISED: dict[Svd, float] = {"exact": MAX_ERROR, "fp32": 1e-4}
"""The limit for each `svd`: rounding errors in float32 grow with the size of the matrix."""


def num_operations(target: Target) -> int:
    """Estimate the floating point operations of a decomposition, from measurements for the Gram matrix."""
    small, large = target.num_directions, max(target.rows, target.columns)
    return 4 * large * small**2 + 9 * small**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of a weight, and their accuracy."""

    tensors: dict[str, torch.Tensor]
    """Float32 tensors by the names of `core.factored.FACTORS`."""
    algorithm: str
    """"gram", "svd" or "svd fp32"."""
    error: float
    """Frobenius norm of what folding misses, to the weight's; the norm itself if the weight is zero. An estimate by 16
    random vectors."""
    orthogonality: float
    """Largest absolute entry of (U'U - I) x and (VV' - I) x, over all directions, for 16 vectors x of ones and minus
    ones; nearly always above the largest entry of the matrices."""


def factorise(weight: torch.Tensor, target: Target, svd: Svd = "exact") -> Factors:
    """Return the factors of a weight.

    Args:
        weight: (N, M), of any floating dtype, on the CPU.
        target: whose weight it is.
        svd: "exact" in float64; "fp32" in float32.

    Raises:
        SourceError: the weight is not finite, or LAPACK does not converge.
    """
    import torch

    if not torch.isfinite(weight).all():
        raise SourceError(
            f"{escape(target.weight)}: has values that are not finite, so there are no singular values",
            hint="the source is damaged, or training diverged: use an earlier checkpoint",
        )
    with one_thread_each(True), _named(target):
        if svd == "fp32":
            return _measured(weight, _rounded(_by_svd(weight.float()), target), "svd fp32")
        by_gram = _by_gram(weight)
        if by_gram is not None:
            factors = _measured(weight, _rounded(by_gram, target), "gram")
            if max(factors.error, factors.orthogonality) <= MAX_ERROR:
                return factors
        return _measured(weight, _rounded(_by_svd(weight.double()), target), "svd")


def check_factors(factors: Factors, target: Target, svd: Svd = "exact") -> Factors:
    """Return the factors if they are accurate enough.

    Raises:
        IntegrityError: they do not fold back to their weight, or are not orthogonal.
    """
    limit = PROMISED[svd]
    if not (factors.error <= limit and factors.orthogonality <= limit):  # nan too
        raise IntegrityError(
            f"{escape(target.weight)}: its factors ({factors.algorithm}) miss it by {factors.error:.1e}, and are orthogonal "
            f"to {factors.orthogonality:.1e} only; {limit:.0e} is allowed",
            hint="leave this weight dense, and report it: no matrix should do this",
        )
    return factors


Triplets = list["torch.Tensor"]
"""U (N, R), S (R) descending, rows of V' (R, M). A list, so that popping an item can free its memory."""


def _by_gram(weight: torch.Tensor) -> Triplets | None:
    """Decompose by the eigenvectors of the Gram matrix; None if the matrix is nearly singular."""
    import torch

    is_wide = weight.shape[0] < weight.shape[1]
    tall = (weight.T if is_wide else weight).double()
    try:
        values, vectors = torch.linalg.eigh(tall.T @ tall)  # ascending
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    sizes = values.flip(0).clamp(min=0).sqrt()
    if sizes[-1] <= _LEAST_RATIO * sizes[0]:
        return None
    right_vectors = vectors.flip(1)
    del vectors
    left_vectors = (tall @ right_vectors).div_(sizes)
    del tall
    # The norm of the weight times a direction is more exact than the root of the eigenvalue.
    lengths = torch.linalg.vector_norm(left_vectors, dim=0)
    sizes, left_vectors = sizes * lengths, left_vectors.div_(lengths)
    order = sizes.argsort(descending=True, stable=True)
    if not torch.equal(order, torch.arange(len(order))):  # hardly ever
        sizes, left_vectors, right_vectors = sizes[order], left_vectors[:, order], right_vectors[:, order]
    return [right_vectors, sizes, left_vectors.T] if is_wide else [left_vectors, sizes, right_vectors.T]


@contextlib.contextmanager
def _named(target: Target) -> Iterator[None]:
    """Name the weight in errors of LAPACK."""
    import torch

    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise SourceError(
            f"{escape(target.weight)}: no singular values were found: {str(error).splitlines()[0]}",
            hint="leave this weight dense",
        ) from error


def _by_svd(weight: torch.Tensor) -> Triplets:
    import torch

    return list(torch.linalg.svd(weight, full_matrices=False))


def _rounded(triplets: Triplets, target: Target) -> dict[str, torch.Tensor]:
    """Split triplets into frozen and trained ones, in float32, with signs that do not depend on the algorithm.

    The list is emptied: keeping the float64 triplets next to their copies would set the peak of memory.
    """
    right_vectors, sizes, left_vectors = triplets.pop(), triplets.pop(), triplets.pop()
    rows = _largest_rows(left_vectors)
    signs = left_vectors.gather(0, rows[None])[0].sign()
    signs[signs == 0] = 1
    k, parts = target.rank, {}
    parts[FACTORS[0]], parts[FACTORS[3]] = _halves(left_vectors.mul_(signs).float(), k, dim=1)
    del left_vectors
    parts[FACTORS[1]], parts[FACTORS[4]] = _halves(sizes.float(), k, dim=0)
    parts[FACTORS[2]], parts[FACTORS[5]] = _halves(right_vectors.mul_(signs[:, None]).float(), k, dim=0)
    return {name: parts[name] for name in FACTORS}


def _largest_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return the row of the largest absolute entry of each column, a few columns at a time."""
    import torch

    step = max(_BLOCK // matrix.shape[0], 1)
    starts = range(0, matrix.shape[1], step)
    return torch.cat([matrix[:, start : start + step].abs().argmax(dim=0) for start in starts])


def _halves(whole: torch.Tensor, k: int, *, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    parts = whole.narrow(dim, 0, k), whole.narrow(dim, k, whole.shape[dim] - k)
    # `contiguous` does not change the strides of a part with one element.
    high, low = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return high, low


def _measured(weight: torch.Tensor, tensors: dict[str, torch.Tensor], algorithm: str) -> Factors:
    """Measure factors by applying them to random vectors x of ones and minus ones.

    Complete products would cost two thirds of the decomposition. The expected square of the norm of E x is that of E's
    norm; and if an entry of U'U - I exceeds the limit, one of 16 results does so with probability 1 - 2^-16.
    """
    import torch

    u_high, s_high, v_high, u_low, s_low, v_low = (tensors[name].double() for name in FACTORS)
    vectors = random_vectors(weight.shape[1])
    missed = u_high @ (s_high[:, None] * (v_high @ vectors)) + u_low @ (s_low[:, None] * (v_low @ vectors))
    orthogonality = max(_distance(u_high.T, u_low.T), _distance(v_high, v_low))
    del u_high, u_low, v_high, v_low
    step, norm = max(_BLOCK // weight.shape[1], 1), 0.0
    for first in range(0, len(weight), step):
        part = weight[first : first + step].double()
        norm += float(torch.linalg.vector_norm(part)) ** 2
        missed[first : first + step] -= part @ vectors
    error = float(torch.linalg.vector_norm(missed)) / sqrt(_NUM_VECTORS)
    return Factors(
        tensors=tensors,
        algorithm=algorithm,
        error=error / sqrt(norm) if norm else error,
        orthogonality=orthogonality,
    )


def random_vectors(size: int) -> torch.Tensor:
    """Return 16 fixed pseudo-random vectors of ones and minus ones, as columns (size, 16)."""
    import torch

    random = torch.Generator().manual_seed(size)
    return torch.randint(0, 2, (size, _NUM_VECTORS), generator=random).double().mul_(2).sub_(1)


def _distance(high: torch.Tensor, low: torch.Tensor) -> float:
    """Return the deviation of rows A from orthonormality: the largest entry of (AA' - I) x over random vectors x."""
    vectors = random_vectors(len(high) + len(low))
    sums = high.T @ vectors[: len(high)] + low.T @ vectors[len(high) :]
    return max(
        float((high @ sums - vectors[: len(high)]).abs().max()),
        float((low @ sums - vectors[len(high) :]).abs().max()),
    )
