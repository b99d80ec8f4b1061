"""The part of a job that a process writes: by `--part K/N`, or by the variables of a launcher."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardkit.core.text import escape
from shardkit.errors import UsageError

_MAX_PARTS = 100_000
_UNEVEN = 1.02  # largest part in relation to that of the most even division
_FORM = "--part takes K/N such as 3/16, env, or env/N"
_RANKS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, and what follows it
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI
)
_STEP = ("SLURM_PROCID", "SLURM_NTASKS")
_ARRAY = (
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_STEP",
    "SLURM_ARRAY_TASK_COUNT",
)
_INDEX = "JOB_COMPLETION_INDEX"  # Kubernetes: an Indexed Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the parts of a job."""

    number: int
    """From 1 on."""
    count: int
    found: str = ""
    """The variables of the launcher that name it; empty for one that the user named."""

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_part(text: str, environ: Mapping[str, str]) -> Part:
    """Parse the value of `--part`.

    Args:
        text: "3/16", "env", or "env/16" where the launcher sets only an index.
        environ: the environment, for "env".

    Raises:
        UsageError: the text has another form, no launcher has set variables, or they contradict the count.
    """
    if text == "env":
        return _checked(*_from_launcher(environ))
    if match := re.fullmatch(r"env/(\d{1,6})", text, re.ASCII):
        return _of_count(int(match[1]), environ)
    if match := re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII):
        return _checked(int(match[1]), int(match[2]), "")
    raise UsageError(f"--part {escape(text)!r}: {_FORM}")


def _checked(number: int, count: int, origin: str) -> Part:
    """Return part `number` of `count`, or raise UsageError if there is no such part; `origin` has the launcher's variables."""
    where = f" ({origin})" if origin else ""
    if not 1 <= count <= _MAX_PARTS:
        raise UsageError(f"--part: {count} parts{where}", hint=f"1 to {_MAX_PARTS} are possible")
    if not 1 <= number <= count:
        raise UsageError(
            f"--part: there is no part {number} of {count}{where}",
            hint=f"parts are numbered from 1 to {count}",
        )
    return Part(number=number, count=count, found=origin)


def _of_count(count: int, environ: Mapping[str, str]) -> Part:
    """Return the part for "env/N": by Kubernetes' index, else by another launcher, whose count must be N."""
    index = _env_number(environ, _INDEX)
    if index is not None:
        return _checked(index + 1, count, _shown(environ, _INDEX))
    number, launcher_count, origin = _from_launcher(environ)
    if launcher_count != count:
        raise UsageError(
            f"--part env/{count}: the launcher started {launcher_count} ({origin})",
            hint="say --part env, or the same number",
        )
    return _checked(number, count, origin)


def _from_launcher(environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return (number from 1 on, count, variables) of the first launcher that sets both."""
    for place in _launchers(environ):
        return place
    if _env_number(environ, _INDEX) is not None:
        raise UsageError(
            f"--part env: {_shown(environ, _INDEX)} does not say how many parts there are",
            hint="say --part env/N, with the completions of the Job as N",
        )
    names = ", ".join(" and ".join(names) for names in (*_RANKS, _ARRAY[:1], _STEP, (_INDEX,)))
    raise UsageError(
        "--part env: no launcher has set which part this is",
        problems=[f"looked for {names}"],
        hint="start it with torchrun, mpirun, srun or in an array job, or say --part K/N",
    )


def _launchers(environ: Mapping[str, str]) -> Iterator[tuple[int, int, str]]:
    """Yield (number from 1 on, count, variables) of each launcher that sets both, in the order of preference."""
    for rank, size in _RANKS:
        pair = _pair(environ, rank, size)
        if pair is not None:
            yield (*pair, _shown(environ, rank, size))
    array, step = _array(environ), _pair(environ, *_STEP)
    if array is not None and step is not None and "SLURM_STEP_NUM_TASKS" in environ:
        # srun within a task of an array: each task of the array has as many parts as the step has tasks
        number, count = (array[0] - 1) * step[1] + step[0], array[1] * step[1]
        yield number, count, _shown(environ, *_ARRAY, *_STEP)
    elif array is not None:
        yield (*array, _shown(environ, *_ARRAY))
    elif step is not None:
        yield (*step, _shown(environ, *_STEP))


def _pair(environ: Mapping[str, str], rank: str, size: str) -> tuple[int, int] | None:
    """Return (number from 1 on, count) by the variables `rank`, from 0 on, and `size`; None if one is unset."""
    number, count = _env_number(environ, rank), _env_number(environ, size)
    return None if number is None or count is None else (number + 1, count)


def _array(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (number from 1 on, count) of a task in an array of SLURM. Ids may begin anywhere, with any constant step.

    Raises:
        UsageError: the distances between ids differ.
    """
    task, first, step, count = (_env_number(environ, name) for name in _ARRAY)
    if task is None or first is None or count is None:
        return None
    place, rest = divmod(task - first, step or 1)
    last = _env_number(environ, "SLURM_ARRAY_TASK_MAX")
    if rest or not 0 <= place < count or (last is not None and last - first != (count - 1) * (step or 1)):
        raise UsageError(
            f"--part env: the tasks of the array are not evenly spaced ({_shown(environ, *_ARRAY)})",
            hint="use --array=1-16 or the like; to run single tasks again, say --part K/N",
        )
    return place + 1, count


def _env_number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the value of a launcher's variable; None if it is unset or empty.

    Raises:
        UsageError: the value is not a number of one to nine digits.
    """
    text = environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise UsageError(f"--part: the launcher's variable {name}={escape(text)} is not a number")
    return int(text)


def _shown(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={escape(environ[name])}" for name in names if name in environ)


def divide(sizes: Sequence[int], count: int) -> list[int]:
    """Return the part of each file, from 1 on: [5, 5, 5, 5] in 2 parts -> [1, 1, 2, 2].

    Consecutive files go to one part if this is about as even as any division, as they are often made of neighbouring
    bytes of the source. Otherwise the largest files are dealt first, each to the part with the fewest bytes so far. The
    result depends on the arguments only, so that all processes agree, whatever files are finished.

    Args:
        sizes: bytes of each file, or other weights.
        count: number of parts.
    """
    dealt = _deal(sizes, count)
    if len(sizes) < 2 * count:
        return dealt
    in_a_row = _cut(sizes, count)
    most, least = (limit(_loads(sizes, in_a_row, count)) for limit in (max, min))
    is_as_even = most <= _UNEVEN * max(_loads(sizes, dealt, count)) and most - least <= max(sizes, default=0)
    return in_a_row if is_as_even else dealt


def _loads(sizes: Sequence[int], parts: Sequence[int], count: int) -> list[int]:
    loads = [0] * count
    for size, part in zip(sizes, parts, strict=True):
        loads[part - 1] += size
    return loads


def _cut(sizes: Sequence[int], count: int) -> list[int]:
    """Divide the files in their order, with cuts at the most even places."""
    total, before, numbers = max(sum(sizes), 1), 0, list[int]()
    for size in sizes:
        numbers.append(min((2 * before + size) * count // (2 * total), count - 1) + 1)
        before += size
    return numbers


def _deal(sizes: Sequence[int], count: int) -> list[int]:
    """Deal the files, largest first, to the part with the fewest bytes so far."""
    loads = [(0, number) for number in range(1, count + 1)]
    numbers = [0] * len(sizes)
    for file in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + sizes[file], number))
        numbers[file] = number
    return numbers


def share_of(sizes: Sequence[int], part: Part) -> list[int]:
    """Return the numbers of the files, by their sizes, that belong to a part."""
    return [number for number, each in enumerate(divide(sizes, part.count)) if each == part.number]
