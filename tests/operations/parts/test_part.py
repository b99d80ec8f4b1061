"""Which part a process carries out, told by a person or a launcher; and which files belong to a part."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import UsageError
from shardkit.operations.parts.part import divide, parse_part

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "11",
    "SLURM_ARRAY_TASK_MIN": "5",
    "SLURM_ARRAY_TASK_MAX": "14",
    "SLURM_ARRAY_TASK_STEP": "3",
    "SLURM_ARRAY_TASK_COUNT": "4",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "7"}


@pytest.mark.parametrize(
    ("text", "environ", "expected", "found"),
    [
        ("3/16", {}, "3/16", ""),
        ("3/16", TORCHRUN, "3/16", ""),
        ("env", TORCHRUN, "3/16", "RANK=2, WORLD_SIZE=16"),
        ("env", MPI, "1/4", "OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=4"),
        ("env", PMI, "4/4", "PMI_RANK=3, PMI_SIZE=4"),
        ("env", SRUN, "6/8", "SLURM_PROCID=5, SLURM_NTASKS=8"),
        ("env", {**TORCHRUN, **SRUN}, "3/16", "RANK=2, WORLD_SIZE=16"),
        (
            "env",
            ARRAY,
            "3/4",
            "SLURM_ARRAY_TASK_ID=11, SLURM_ARRAY_TASK_MIN=5, SLURM_ARRAY_TASK_STEP=3, SLURM_ARRAY_TASK_COUNT=4",
        ),
        ("env/16", KUBERNETES, "8/16", "JOB_COMPLETION_INDEX=7"),
        ("env/16", TORCHRUN, "3/16", "RANK=2, WORLD_SIZE=16"),
    ],
)
def test_who_tells_it(text: str, environ: Mapping[str, str], expected: str, found: str) -> None:
    part = parse_part(text, environ)
    assert (str(part), part.found) == (expected, found)


def test_tasks_of_a_step_within_an_array() -> None:
    """Each of four tasks of the array starts two processes with srun."""
    seen = []
    for task in (5, 8, 11, 14):
        for process in (0, 1):
            environ = {
                **ARRAY,
                "SLURM_ARRAY_TASK_ID": str(task),
                "SLURM_PROCID": str(process),
                "SLURM_NTASKS": "2",
                "SLURM_STEP_NUM_TASKS": "2",
            }
            seen.append(str(parse_part("env", environ)))
    assert seen == [f"{number}/8" for number in range(1, 9)]


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ("0/4", {}, "there is no part 0 of 4"),
        ("5/4", {}, "there is no part 5 of 4"),
        ("1/0", {}, "0 parts"),
        ("1", {}, "part takes K/N"),
        ("1/\u0664", {}, "part takes K/N"),
        ("env", {}, "no launcher has set"),
        ("env", {"RANK": "0"}, "no launcher has set"),
        ("env", {"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one is not a number"),
        ("env", {"RANK": "2", "WORLD_SIZE": "2"}, "there is no part 3 of 2 (RANK=2, WORLD_SIZE=2)"),
        ("env", KUBERNETES, "does not say how many parts there are"),
        ("env/8", TORCHRUN, "the launcher started 16"),
        ("env/4", KUBERNETES, "there is no part 8 of 4"),
        ("env", {**ARRAY, "SLURM_ARRAY_TASK_ID": "12"}, "not evenly spaced"),
        ("env", {**ARRAY, "SLURM_ARRAY_TASK_COUNT": "3"}, "not evenly spaced"),
    ],
)
def test_what_is_refused(text: str, environ: Mapping[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_part(text, environ)
    assert said in str(caught.value)


@given(st.lists(st.integers(0, 1 << 40), max_size=60), st.integers(1, 9))
def test_every_file_has_one_part_and_no_part_has_much_more_than_another(sizes: list[int], count: int) -> None:
    parts = divide(sizes, count)
    assert all(1 <= part <= count for part in parts)
    loads = [sum(s for s, p in zip(sizes, parts, strict=True) if p == part) for part in range(1, count + 1)]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.parametrize(
    ("sizes", "count", "parts"),
    [
        ([7, 7, 7, 7, 7, 7], 3, [1, 1, 2, 2, 3, 3]),
        ([100, 101, 100, 101, 100], 2, [1, 1, 2, 2, 2]),
        ([9, 1, 1, 1, 6], 2, [1, 2, 2, 2, 2]),
        ([6, 1, 1, 1, 9], 2, [1, 1, 1, 1, 2]),
        ([6, 1, 1, 1, 8, 3], 2, [2, 1, 1, 2, 1, 2]),
        ([5, 5], 4, [1, 2]),
        ([5, 5, 5], 2, [1, 2, 1]),
        ([], 2, []),
    ],
)
def test_files_that_follow_one_another_go_together_where_that_is_even(
    sizes: list[int], count: int, parts: list[int]
) -> None:
    assert divide(sizes, count) == parts
