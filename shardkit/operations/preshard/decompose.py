"""Preshard with OSFT: what is refused, what the factors cost, and how they are computed and described."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from shardkit.core.dtypes import DType
from shardkit.core.factored import FACTOR_DTYPE, Target
from shardkit.core.mesh import Mesh
from shardkit.core.text import parse_size
from shardkit.errors import UsageError
from shardkit.files import manifest
from shardkit.layout.layout import Layout
from shardkit.operations.environment import package_version
from shardkit.operations.keys import NONE
from shardkit.operations.parts.part import Part, share_of
from shardkit.operations.preshard.profiles import Profile
from shardkit.osft.compute import choose_num_workers
from shardkit.osft.job import FactoredJob
from shardkit.osft.layout import check_osft_mesh
from shardkit.osft.plan import OsftPlan, parse_ranks
from shardkit.osft.records import FactorRecords
from shardkit.osft.svd import num_operations, svd_nbytes

OPERATIONS_PER_S = 20e9
"""Of one core, on the safe side: a virtual core at 2.5 GHz does 30e9 with 512 to 2048 directions. A weight that is nearly
singular takes some five times as long."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ENVIRONMENT = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE")
# Lines of /proc/cpuinfo that tell one type of CPU from another.
_CPU_LINES = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "CPU implementer",
    "CPU part",
    "flags",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftKind:
    """Targets of one size and rank, at like places in the model."""

    name: str
    """Path with * for numbers: "model.layers.*.mlp.up_proj"."""
    num_targets: int
    rows: int
    columns: int
    rank: int
    """k: directions that are frozen."""
    factor_bytes: int
    """Of all of them."""
    num_operations: int
    """Floating point operations for all of them."""
    memory_bytes: int
    """What the decomposition of one takes at its peak."""
    expected_s: float
    """For all of them, on one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OsftResult:
    """What the factors of a run cost, and how good they are; those of a part, while others lack some."""

    kinds: tuple[OsftKind, ...]
    num_workers: int
    """Processes that compute at a time."""
    memory_bytes: int
    """What all of these take at their peak, besides interpreters."""
    expected_s: float
    """For all targets, with these processes on a core each."""
    operations_per_s: float
    """What that is reckoned with."""
    record_bytes: int
    """Of factors in records beside the output, until it is there. With a store, of those on the local disk, in shardkit's
    cache directory; of a part, those that it has to compute, until it ends."""
    num_resumed: int
    """Weights that an interrupted run had computed."""
    max_error: float | None
    """The largest of all targets; None before they are computed, and where other parts have computed some."""
    max_orthogonality: float | None


def plan_of_options(
    ratio: float | None, targets: str | None, ranks: Iterable[str], svd: str | None
) -> OsftPlan | None:
    """Return the plan that the options of the command line say; None without --osft.

    Raises:
        UsageError: some are given without --osft, or cannot be carried out.
    """
    if ratio is None:
        given = {"--osft-targets": targets, "--osft-rank": tuple(ranks), "--osft-svd": svd}
        UsageError.raise_for(
            [option for option, value in given.items() if value],
            "options for factors, without --osft",
            hint="--osft 0.3 trains three tenths of each target's singular directions",
        )
        return None
    about = {name: value for name, value in (("targets", targets), ("svd", svd)) if value is not None}
    return OsftPlan(ratio=ratio, ranks=parse_ranks(ranks), **about)  # type: ignore[arg-type]  # checked there


def check_osft(profile: Profile, mesh: Mesh, keys: str) -> None:
    """Refuse what cannot start from factors.

    Args:
        profile: the trainer that is to start.
        mesh: its device mesh.
        keys: key rules, as `--keys` takes them.

    Raises:
        MeshError, UsageError: it cannot.
    """
    check_osft_mesh(mesh)
    if profile.form != "dcp" or profile.key_sets:
        raise UsageError(
            f"--osft with --profile {profile.name}: this trainer builds its own layers, and has none for factors",
            hint="take profile plain, accelerate, lightning or lightning-mp, whose models are the caller's",
        )
    if keys != NONE:
        raise UsageError(
            "--osft with --keys: factors are for the layers of transformers' models",
            hint="leave one of them out",
        )


def choose_memory(max_memory: str | int | None) -> int | None:
    """Return the memory for processes that compute factors; None where a person did not say."""
    return None if max_memory is None else parse_size(max_memory)


def factored_job(
    plan: OsftPlan | None,
    records: FactorRecords,
    *,
    jobs: int,
    max_memory: str | int | None,
    sending_bytes: int,
) -> FactoredJob | None:
    """Return what has to be computed for a job; None if it is without factors.

    Args:
        plan: what was asked for.
        records: of all weights that become factors.
        jobs: most processes.
        max_memory: for all of them; None where a person did not say.
        sending_bytes: what of it factors take on their way into a store.

    Raises:
        UsageError: the memory is too little for one of them.
    """
    if plan is None:
        return None
    targets = [weight.target for weight in records.weights]
    workers = choose_num_workers(targets, jobs, choose_memory(max_memory), sending_bytes)
    return FactoredJob(records=records, svd=plan.svd, num_workers=workers)


def osft_result(job: FactoredJob, part: Part | None, *, record_bytes: int) -> OsftResult:
    """Return the cost of the decomposition, and its quality if it has run.

    Args:
        job: what was, or would be computed.
        part: whose weights are meant; None for all.
        record_bytes: as in the result.
    """
    targets = [weight.target for weight in job.records.weights]
    if part is not None:
        targets = [targets[number] for number in share_of([size for _, size in job.weights], part)]
    workers, seconds = job.num_workers, [_expected_s(target) for target in targets]
    found = [job.measured[target.path] for target in targets if target.path in job.measured]
    is_known = 0 < len(found) == len(targets)
    largest = sorted((svd_nbytes(target) for target in targets), reverse=True)[:workers]
    return OsftResult(
        kinds=tuple(kinds_of(targets)),
        num_workers=workers,
        memory_bytes=sum(largest),
        expected_s=round(max([sum(seconds) / workers, *seconds]), 3),
        operations_per_s=OPERATIONS_PER_S,
        record_bytes=record_bytes,
        num_resumed=sum(each.is_resumed for each in found),
        max_error=max(each.error for each in found) if is_known else None,
        max_orthogonality=max(each.orthogonality for each in found) if is_known else None,
    )


def _expected_s(target: Target) -> float:
    return num_operations(target) / OPERATIONS_PER_S


def kinds_of(targets: Iterable[Target]) -> list[OsftKind]:
    """Return the kinds of targets, in the order of the model."""
    groups: dict[tuple[str, int, int, int], list[Target]] = {}
    for target in targets:
        name = _NUMBER.sub("*", target.path)
        groups.setdefault((name, target.rows, target.columns, target.rank), []).append(target)
    return [
        OsftKind(
            name=name,
            num_targets=len(each),
            rows=rows,
            columns=columns,
            rank=rank,
            factor_bytes=sum(target.factors_nbytes for target in each),
            num_operations=sum(num_operations(target) for target in each),
            memory_bytes=svd_nbytes(each[0]),
            expected_s=round(sum(map(_expected_s, each)), 3),
        )
        for (name, rows, columns, rank), each in groups.items()
    ]


def describe_osft(plan: OsftPlan, layout: Layout, dtypes: Mapping[str, DType], root: str) -> manifest.Osft:
    """Return the entry of a manifest for factors that are not yet computed.

    Args:
        plan: what was asked for.
        layout: what came of it.
        dtypes: of everything that is stored, by name.
        root: what stands before the model's own names.
    """
    targets, sizes = layout.factored.values(), Counter[str]()
    factors = {name for target in targets for name in target.shapes}
    for name, dtype in dtypes.items():
        if name not in factors and dtype.is_convertible:
            sizes[dtype.name] += prod(layout.tensors[name].shape)
    return manifest.Osft(
        ratio=plan.ratio,
        targets=plan.globs,
        ranks=plan.ranks,
        svd=plan.svd,
        dense_dtype=max(sizes, key=sizes.__getitem__, default=FACTOR_DTYPE.name),
        modules={
            target.path.removeprefix(root): manifest.OsftModule(
                rank=target.rank, shape=(target.rows, target.columns)
            )
            for target in targets
        },
    )


def computed_by() -> dict[str, object]:
    """Return what decides the bits of a decomposition: torch, the type of the CPU, and the settings that pick its code."""
    lines: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                lines.setdefault(name.strip(), value.strip())
    except OSError:
        lines["model name"] = platform.processor() or platform.machine()
    return {
        "torch": package_version("torch"),
        "cpu": [lines.get(name) for name in _CPU_LINES],
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }
