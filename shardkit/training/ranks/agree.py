"""Ranks that end together: all ranks know what happened on one before any of them goes on.

A rank that raised alone would leave the others waiting in their next collective until it times out. So every
phase ends with `agree`: each rank brings its error or None, and either all ranks raise or none does.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist

from shardkit import errors
from shardkit.errors import ResourceError, ShardkitError

_Found = TypeVar("_Found")
_log = logging.getLogger("shardkit")

_KNOWN: dict[str, type[ShardkitError]] = {
    name: value
    for name, value in vars(errors).items()
    # Interrupted is made with the number of a signal; a rank that was told to stop raises its own.
    if isinstance(value, type) and issubclass(value, ShardkitError) and value is not errors.Interrupted
}


class LostRank(ResourceError):
    """Another rank died or did not come in time: there is nobody left to agree with."""


def world() -> tuple[int, int]:
    """Return (this rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def say(text: str, level: int = logging.INFO) -> None:
    """Log once for all ranks."""
    if world()[0] == 0:
        _log.log(level, "%s", text)


def current_device(kind: str) -> torch.device:
    """Return this process's current device of a kind, such as "cpu" or "cuda"."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def device_for(group: dist.ProcessGroup | None = None, preferred: torch.device | None = None) -> torch.device:
    """Return where tensors must lie for a group's collectives.

    Args:
        group: None for all ranks.
        preferred: taken if the group supports it. Otherwise the CPU is taken if the group supports that, and
            else the current device of the group's kind.
    """
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if preferred is not None and preferred.type in kinds:
        return preferred
    return current_device("cpu" if "cpu" in kinds else kinds[0])


def to_bytes(value: Any, device: torch.device | None = None) -> torch.Tensor:
    """Return plain data as JSON in a tensor of bytes."""
    data = json.dumps(value, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def from_bytes(content: torch.Tensor) -> Any:
    """Return the value that `to_bytes` encoded; tuples have become lists, and keys strings."""
    return json.loads(content.cpu().numpy().tobytes())


def gather_json(value: Any, group: dist.ProcessGroup | None = None, *, phase: str = "gathering") -> list[Any]:
    """Return the values of all ranks of a group, in its order; each rank must call it.

    Args:
        value: plain data. It travels as JSON, so tuples arrive as lists and keys as strings, this
            rank's own too.
        group: None for all ranks. Without a process group the world is this process.
        phase: what is being done, for the message if a rank died.

    Raises:
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [from_bytes(to_bytes(value))]
    size, device = dist.get_world_size(group), device_for(group)
    mine = to_bytes(value, device)
    with wire(phase):
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        dist.all_gather(lengths, torch.tensor([len(mine)], device=device), group)
        padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8, device=device)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(gathered, padded, group)
    return [from_bytes(part[: int(length)]) for part, length in zip(gathered, lengths, strict=True)]


class Mask(NamedTuple):
    """Which names of an order a rank has."""

    order: int
    """CRC-32 of the order. Masks of different orders cannot be compared by their bits."""
    bits: str
    """At the place of each name "1" if the rank has it, else "0"."""


def gather_masks(names: Collection[str], order: Sequence[str], *, phase: str) -> list[Mask]:
    """Return which names of an order each rank has; each rank must call it.

    Args:
        names: what this rank has.
        order: all names that are asked about.
        phase: as for `gather_json`.

    Raises:
        ResourceError: as `gather_json` does.
    """
    mine = "".join("1" if name in names else "0" for name in order)
    plain = [crc32("\n".join(order).encode()), f"{int(mine or '0', 2):x}"]
    answers = gather_json(plain, phase=phase)
    return [Mask(checksum, f"{int(bits, 16):0{len(order)}b}") for checksum, bits in answers]


def broadcast_json(value: Any, source: int, *, phase: str = "sending") -> Any:
    """Return the value of rank `source`; every rank calls it.

    Raises:
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    rank, size = world()
    if size == 1:
        return from_bytes(to_bytes(value))
    device = device_for()
    content = to_bytes(value, device) if rank == source else torch.empty(0, device=device)
    with wire(phase):
        length = torch.tensor([len(content)], device=device)
        dist.broadcast(length, source)
        if rank != source:
            content = torch.empty(int(length), dtype=torch.uint8, device=device)
        dist.broadcast(content, source)
    return from_bytes(content)


@contextlib.contextmanager
def wire(phase: str) -> Iterator[None]:
    """Communicate in a block; nothing else may be in it.

    Raises:
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    try:
        yield
    except RuntimeError as error:  # gloo and nccl raise nothing narrower
        raise lost(phase, error) from error


def lost(phase: str, error: BaseException) -> LostRank:
    """Return the error for a collective that failed: some rank is gone, or never came."""
    first = str(error).strip().splitlines() or [type(error).__name__]
    return LostRank(
        f"another rank was lost during {phase}",
        problems=[first[0]],
        hint="look for the first error among the outputs of all ranks; a rank that was killed leaves none",
    )


def agree(
    error: BaseException | None, group: dist.ProcessGroup | None = None, *, phase: str, value: Any = None
) -> list[Any]:
    """Raise on all ranks if any rank has an error; each rank must call it.

    Args:
        error: of this rank; None if all is well.
        group: None for all ranks.
        phase: what is being done, for the message if a rank died.
        value: plain data, which travels as with `gather_json`, in the same messages.

    Returns:
        The values of all ranks of the group, in its order.

    Raises:
        ShardkitError: of the class that all errors have in common. Its problems name the ranks; ranks with
            equal errors share a line. Only the lowest rank that failed shows all of the text. In a world of one the
            error itself is raised. So is anything that is no Exception, such as Ctrl-C, on its own rank.
        ResourceError: a rank died, or did not come within the process group's timeout.
    """
    if isinstance(error, LostRank):
        raise error
    answers = gather_json([None if error is None else _describe(error), value], group, phase=phase)
    failures = [failure for failure, _ in answers]
    if error is not None and (len(answers) == 1 or not isinstance(error, Exception)):
        raise error
    if any(failure is not None for failure in failures):
        ranks = dist.get_process_group_ranks(group) if len(answers) > 1 else [0]
        here = ranks.index(world()[0])
        shower = min(
            (rank for rank, failure in zip(ranks, failures, strict=True) if failure),
            key=lambda rank: not failures[ranks.index(rank)]["raises_this"],
        )
        together = _together(failures, ranks)
        together.shown_by = None if ranks[here] == shower else shower
        raise together from _cause(error, failures, here)
    return [value for _, value in answers]


def _cause(error: BaseException | None, failures: Sequence[object], here: int) -> BaseException | None:
    """Return what a traceback shows above the error of all ranks: other code's exception, on the first rank that has it.

    Args:
        error: of this rank.
        failures: of all ranks, described.
        here: this rank's place among them.
    """
    if error is None or failures.index(failures[here]) != here:
        return None
    cause = error.__cause__ if isinstance(error, ShardkitError) else error
    return None if isinstance(cause, (ShardkitError, OSError)) else cause


@contextlib.contextmanager
def shown_once() -> Iterator[None]:
    """Show all of an error's text on the first rank alone; every rank makes the same error of what all have exchanged."""
    try:
        yield
    except LostRank:
        raise
    except ShardkitError as error:
        if world()[0] != 0:
            error.shown_by = 0
        raise


@dataclass(slots=True)
class Exchanged:
    """What the ranks exchange at the end of a phase."""

    mine: Any = None
    """Of this rank, plain data."""
    of_all: Sequence[Any] = ()
    """Of each rank, as `gather_json` returns it, once the phase has ended."""


@contextlib.contextmanager
def agreed(phase: str, group: dist.ProcessGroup | None = None) -> Iterator[Exchanged]:
    """Run a block on every rank and `agree` on how it ended; nothing in it may wait for another rank.

    What the block puts into `mine`, all ranks have in `of_all` afterwards: that costs no further message.

    Args:
        phase: what is being done, for the message if a rank died.
        group: None for all ranks.
    """
    error, exchanged = None, Exchanged()
    try:
        yield exchanged
    except BaseException as caught:  # Ctrl-C too: the others must not wait
        error = caught
    exchanged.of_all = agree(error, group, phase=phase, value=exchanged.mine)


def look_where_possible(
    look: Callable[[], _Found], is_absent: Callable[[BaseException], bool], *, phase: str
) -> tuple[_Found | None, BaseException | None, list[int]]:
    """Run a function on every rank, and go on if it succeeds on any; each rank must call it.

    Args:
        look: waits for no other rank.
        is_absent: of an error: it does not matter if other ranks succeed.
        phase: what is being done, for the message if a rank died.

    Returns:
        What this rank found, or else why not; and the ranks that found something.

    Raises:
        As `agree`: errors that matter, or those of all ranks if none succeeds.
    """
    result: _Found | None = None
    error: BaseException | None = None
    try:
        result = look()
    except BaseException as caught:  # the others must not wait
        error = caught
    failure = None if error is None or is_absent(error) else error
    able = [rank for rank, is_able in enumerate(agree(failure, phase=phase, value=error is None)) if is_able]
    if not able:
        agree(error, phase=phase)
    return result, error, able


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ShardkitError):
        kinds = [kind.__name__ for kind in type(error).__mro__]
        message, problems, hint = error.message, list(error.problems), error.hint
    else:
        kinds = [(ResourceError if isinstance(error, (OSError, MemoryError)) else ShardkitError).__name__]
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        problems, hint = [], None
    return {
        "kinds": kinds,
        "message": message,
        "problems": problems,
        "hint": hint,
        "raises_this": isinstance(error, Exception),
    }


def _together(descriptions: Sequence[dict[str, Any] | None], ranks: Sequence[int]) -> ShardkitError:
    """Return one error for those that the ranks told."""
    distinct: dict[str, list[int]] = {}
    for rank, failure in zip(ranks, descriptions, strict=True):
        if failure is not None:
            distinct.setdefault(json.dumps(failure), []).append(rank)
    failures = [(json.loads(text), numbered(who)) for text, who in distinct.items()]
    kinds = [_kind(failure["kinds"]) for failure, _ in failures]
    lineage: Sequence[type[ShardkitError]] = kinds[0].__mro__
    common = next(kind for kind in lineage if all(issubclass(each_kind, kind) for each_kind in kinds))
    problems: list[str] = []
    for failure, who in failures:
        if len(failures) > 1 or not failure["problems"]:
            problems.append(f"{who}: {failure['message']}")
        problems += (f"{who}: {problem}" for problem in failure["problems"])
    failed = sum(map(len, distinct.values()))
    message = (
        failures[0][0]["message"] if len(failures) == 1 else f"{failed} of {len(descriptions)} ranks failed"
    )
    hint = next((failure["hint"] for failure, _ in failures if failure["hint"]), None)
    return common(message, problems=problems, hint=hint)


def _kind(names: Sequence[str]) -> type[ShardkitError]:
    return next((_KNOWN[name] for name in names if name in _KNOWN), ShardkitError)


def numbered(ranks: Sequence[int]) -> str:
    """Return "rank 2", "ranks 0-3", "ranks 0, 2-3"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
