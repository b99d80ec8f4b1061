"""Let all ranks succeed or fail together, and exchange plain data between them.

If one rank alone raised an error, the others would wait in their next collective until it times out. So every
phase ends with `agree`: each rank sends its error or None, and then either all ranks raise or none does.
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
    # Interrupted has the number of a signal, and a rank that gets a signal raises its own.
    if isinstance(value, type) and issubclass(value, ShardkitError) and value is not errors.Interrupted
}


class LostRank(ResourceError):
    """Another rank died or did not respond in time, so the ranks can no longer agree."""


def world() -> tuple[int, int]:
    """Return (this rank, world size); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def log_once(text: str, level: int = logging.INFO) -> None:
    """Log once for all ranks."""
    if world()[0] == 0:
        _log.log(level, "%s", text)


def current_device(kind: str) -> torch.device:
    """Return this process's current device of a kind, such as "cpu" or "cuda"."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def device_for(group: dist.ProcessGroup | None = None, preferred: torch.device | None = None) -> torch.device:
    """Return the device for tensors in a group's collectives.

    Args:
        group: the group; None for all ranks.
        preferred: used if the group supports it. Otherwise the CPU is used if the group supports it, and
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
        value: plain data. It is sent as JSON, so tuples become lists and keys become strings, in this rank's own
            value too.
        group: the group; None for all ranks. Without a process group the only rank is this process.
        phase: the current activity, for the message if a rank died.

    Raises:
        ResourceError: a rank died, or did not respond within the process group's timeout.
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
    """The names that a rank has, as bits in the order of a list of names."""

    order: int
    """CRC-32 of the list. Bits of masks with different lists cannot be compared."""
    bits: str
    """For each name of the list, "1" if the rank has it, else "0"."""


def gather_masks(names: Collection[str], order: Sequence[str], *, phase: str) -> list[Mask]:
    """Return for each rank which names of a list it has; each rank must call it.

    Args:
        names: the names that this rank has.
        order: the list.
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
        ResourceError: a rank died, or did not respond within the process group's timeout.
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
    """Turn errors of collectives in a block into `LostRank`. The block must only communicate.

    Raises:
        ResourceError: a rank died, or did not respond within the process group's timeout.
    """
    try:
        yield
    except RuntimeError as error:  # gloo and nccl raise no narrower class
        raise lost_rank_error(phase, error) from error


def lost_rank_error(phase: str, error: BaseException) -> LostRank:
    """Return the error for a collective that failed because a rank died or never joined."""
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
        error: this rank's error, or None.
        group: the group; None for all ranks.
        phase: the current activity, for the message if a rank died.
        value: plain data to exchange in the same messages, as with `gather_json`.

    Returns:
        The values of all ranks of the group, in its order.

    Raises:
        ShardkitError: of the most specific class that all errors have in common. Its problems name the ranks; ranks
            with equal errors share a line. Only the lowest rank that failed shows the whole text. With one rank, the
            error itself is raised. So is an error that is no Exception, such as Ctrl-C, on its own rank.
        ResourceError: a rank died, or did not respond within the process group's timeout.
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
        together = _common_error(failures, ranks)
        together.shown_by = None if ranks[here] == shower else shower
        raise together from _cause(error, failures, here)
    return [value for _, value in answers]


def _cause(error: BaseException | None, failures: Sequence[object], here: int) -> BaseException | None:
    """Return the cause that a traceback shows above the common error, or None.

    It is an exception of other code than shardkit's, and only the first of the ranks with equal errors shows it.

    Args:
        error: this rank's error.
        failures: the descriptions of all ranks' errors.
        here: this rank's index among them.
    """
    if error is None or failures.index(failures[here]) != here:
        return None
    cause = error.__cause__ if isinstance(error, ShardkitError) else error
    return None if isinstance(cause, (ShardkitError, OSError)) else cause


@contextlib.contextmanager
def shown_once() -> Iterator[None]:
    """Let only rank 0 show the whole text of an error that every rank raises in this context for exchanged data."""
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
    """The values that ranks exchange at the end of a phase."""

    mine: Any = None
    """This rank's value: plain data."""
    of_all: Sequence[Any] = ()
    """The values of all ranks, as from `gather_json`, after the end of the phase."""


@contextlib.contextmanager
def agreed(phase: str, group: dist.ProcessGroup | None = None) -> Iterator[Exchanged]:
    """Run a block on every rank, and raise on all ranks if it fails on any. The block must not wait for other ranks.

    If the block sets `mine`, all ranks have these values in `of_all` afterwards, without a further message.

    Args:
        phase: the current activity, for the message if a rank died.
        group: the group; None for all ranks.
    """
    error, exchanged = None, Exchanged()
    try:
        yield exchanged
    except BaseException as caught:  # also Ctrl-C, so that the others do not wait
        error = caught
    exchanged.of_all = agree(error, group, phase=phase, value=exchanged.mine)


def run_where_possible(
    look: Callable[[], _Found], is_absent: Callable[[BaseException], bool], *, phase: str
) -> tuple[_Found | None, BaseException | None, list[int]]:
    """Run a function on every rank; it must succeed on at least one of them. Each rank must call this.

    Args:
        look: the function; it must not wait for other ranks.
        is_absent: true for an error that is acceptable if another rank succeeds.
        phase: the current activity, for the message if a rank died.

    Returns:
        (this rank's result or None, this rank's error or None, the ranks that succeeded).

    Raises:
        As `agree`: errors that are not acceptable, or the errors of all ranks if none succeeds.
    """
    result: _Found | None = None
    error: BaseException | None = None
    try:
        result = look()
    except BaseException as caught:  # so that the others do not wait
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


def _common_error(descriptions: Sequence[dict[str, Any] | None], ranks: Sequence[int]) -> ShardkitError:
    """Return one error for the errors of all ranks.

    Args:
        descriptions: for each rank, the result of `_describe`, or None.
        ranks: the ranks' numbers.
    """
    distinct: dict[str, list[int]] = {}
    for rank, failure in zip(ranks, descriptions, strict=True):
        if failure is not None:
            distinct.setdefault(json.dumps(failure), []).append(rank)
    failures = [(json.loads(text), ranks_text(who)) for text, who in distinct.items()]
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


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 2", "ranks 0-3" or "ranks 0, 2-3"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
