"""What a power loss may leave of a log: a file system that promises what POSIX does, and nothing more.

- A sync of a file brings its bytes and its size to the disk, not its name. A sync of a directory brings its names,
  not the bytes of what they stand for.
- Of the bytes and sizes since, any subset may be there, in sectors of 512 bytes or pages of 4 KiB; a file may have
  become longer without its bytes, and reads as zeros there.
- Of the names since, any subset may be there, over all directories, as long as the changes of one name keep their
  order. A rename or an exchange is there as a whole or not at all.

Method: ALICE (OSDI 2014, Pillai et al.) and SQLite's test6.c.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tests.powerloss.log import ROOT, Entries, Log, Resize, Sync, Write, apply

SECTORS = (512, 4096)
MOST_SINGLES = 16
"""Of un-synced operations that are lost, or kept, on their own; more are drawn."""

Tree = dict[str, bytes | None]
"""Path -> bytes of a file, None for a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """How much of a write or a new size there is."""

    sector: int = 0
    """Bytes; 0 where it is not divided."""
    sectors: frozenset[int] = frozenset()
    """Numbers of those that are there."""
    has_size: bool = True
    """The file is as long as the write makes it."""


WHOLE, SIZE, NOTHING = Part(), Part(sector=1 << 62), Part(sector=1 << 62, has_size=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a disk has after a power loss."""

    tree: Tree
    nodes: Mapping[str, int]
    """Path -> node of the log."""
    story: str
    """Which operations are there, for people."""


class Disk:
    """The disk after the first `stop` operations of a log."""

    def __init__(self, log: Log, stop: int) -> None:
        self._log, self._ops = log, log.ops[:stop]
        synced: dict[int, int] = {}  # node -> its last sync
        for at, op in enumerate(self._ops):
            if isinstance(op, Sync):
                synced[op.node] = at
        self._safe_names = self._with_earlier(
            at
            for at, op in enumerate(self._ops)
            if isinstance(op, Entries) and any(synced.get(c.directory, -1) > at for c in op.changes)
        )
        self.names = [
            at for at, op in enumerate(self._ops) if isinstance(op, Entries) and at not in self._safe_names
        ]
        """Changes of names that may be lost."""
        self.data = [
            at
            for at, op in enumerate(self._ops)
            if isinstance(op, Write | Resize) and synced.get(op.node, -1) < at
        ]
        """Writes and sizes that may be lost."""
        self._of_node: dict[int, list[int]] = {}
        for at, op in enumerate(self._ops):
            if isinstance(op, Write | Resize):
                self._of_node.setdefault(op.node, []).append(at)
        self._unsafe_data = frozenset(self.data)
        self._contents: dict[tuple[object, ...], bytes] = {}

    def _with_earlier(self, wanted: Collection[int] | Iterator[int]) -> set[int]:
        """Return changes of names, and all that the same names went through before."""
        kept, places = set[int](), set[tuple[int, str]]()
        wanted = set(wanted)
        for at in range(len(self._ops) - 1, -1, -1):
            op = self._ops[at]
            if isinstance(op, Entries):
                own = {(change.directory, change.name) for change in op.changes}
                if at in wanted or own & places:
                    kept.add(at)
                    places |= own
        return kept

    def state(self, names: Collection[int], parts: Mapping[int, Part]) -> State:
        """Return what is there if of the unsafe operations these are; others' data is as `NOTHING`."""
        kept = self._safe_names | self._with_earlier(names)
        entries = dict(self._log.entries)
        for at in sorted(kept):
            op = self._ops[at]
            assert isinstance(op, Entries)
            apply(op, entries)
        below: dict[int, list[tuple[str, int]]] = {}
        for (directory, name), node in entries.items():
            below.setdefault(directory, []).append((name, node))
        tree, nodes, pending = Tree(), dict[str, int](), [("", ROOT)]
        while pending:
            prefix, directory = pending.pop()
            for name, node in sorted(below.get(directory, ())):
                path = prefix + name
                nodes[path] = node
                if self._log.is_directory[node]:
                    tree[path] = None
                    pending.append((f"{path}/", node))
                else:
                    tree[path] = self._content(node, parts)
        shown = [f"{at}:{_shown(self._ops[at])}" for at in self.names if at in kept]
        torn = [f"{at}:{_shown(self._ops[at])}" for at in self.data if parts.get(at, NOTHING) is not WHOLE]
        story = (
            f"after {len(self._ops)} of {len(self._log.ops)}; names kept {shown}; data lost or torn {torn}"
        )
        return State(tree=tree, nodes=nodes, story=story)

    def _content(self, node: int, parts: Mapping[int, Part]) -> bytes:
        own = self._of_node.get(node, ())
        key = (node, *((at, parts.get(at, NOTHING)) for at in own if at in self._unsafe_data))
        if key not in self._contents:
            data = bytearray(self._log.contents.get(node, b""))
            for at in own:
                _put(data, self._ops[at], parts.get(at, NOTHING) if at in self._unsafe_data else WHOLE)
            self._contents[key] = bytes(data)
        return self._contents[key]

    def states(self, pick: random.Random, num_random: int) -> Iterator[State]:
        """Yield states: all and nothing, each un-synced operation lost and kept alone, and some drawn."""
        everything = dict.fromkeys(self.data, WHOLE)
        yield self.state((), {})
        yield self.state(self.names, everything)
        yield self.state(self.names, {})
        yield self.state(self.names, dict.fromkeys(self.data, SIZE))
        yield self.state((), everything)
        for at in _some(self.names, pick):
            yield self.state(self._without(at), everything)
            yield self.state((at,), everything)
        for at in _some(self.data, pick):
            for part in (NOTHING, SIZE, *self._torn(at, pick)):
                yield self.state(self.names, {**everything, at: part})
            yield self.state(self.names, {at: WHOLE})
        for _ in range(num_random if self.names or self.data else 0):
            share = pick.choice((0.2, 0.5, 0.8, 0.95))
            names = [at for at in self.names if pick.random() < share]
            share = pick.choice((0.2, 0.5, 0.8, 0.95))
            drawn = {at: WHOLE if pick.random() < share else self._any_part(at, pick) for at in self.data}
            yield self.state(names, drawn)

    def _without(self, lost: int) -> list[int]:
        """Return all changes of names but one, and those that need it."""
        op = self._ops[lost]
        assert isinstance(op, Entries)
        gone, kept = {(c.directory, c.name) for c in op.changes}, []
        for at in self.names:
            later = self._ops[at]
            assert isinstance(later, Entries)
            own = {(c.directory, c.name) for c in later.changes}
            if at == lost or (at > lost and own & gone):
                gone |= own
            else:
                kept.append(at)
        return kept

    def _torn(self, at: int, pick: random.Random) -> list[Part]:
        op = self._ops[at]
        if not isinstance(op, Write):
            return []
        return [_part(op, sector, pick) for sector in SECTORS if len(op.data) > sector]

    def _any_part(self, at: int, pick: random.Random) -> Part:
        return pick.choice([NOTHING, SIZE, *self._torn(at, pick)])


def _part(op: Write, sector: int, pick: random.Random) -> Part:
    sectors = range(op.at // sector, (op.at + len(op.data) - 1) // sector + 1)
    share = pick.choice((0.1, 0.5, 0.9))
    return Part(sector=sector, sectors=frozenset(n for n in sectors if pick.random() < share))


def _some(numbers: list[int], pick: random.Random) -> list[int]:
    return numbers if len(numbers) <= MOST_SINGLES else sorted(pick.sample(numbers, MOST_SINGLES))


def _put(data: bytearray, op: object, part: Part) -> None:
    """Carry out a write or a resize, as far as it is there."""
    if isinstance(op, Resize):
        if part.has_size:
            del data[op.size :]
            data.extend(bytes(op.size - len(data)))
        return
    assert isinstance(op, Write)
    stop = op.at + len(op.data)
    if part.has_size and len(data) < stop:
        data.extend(bytes(stop - len(data)))
    if part is WHOLE:
        data[op.at : stop] = op.data
        return
    for number in part.sectors:
        start, end = max(number * part.sector, op.at), min((number + 1) * part.sector, stop)
        if start < end:
            data[start:end] = op.data[start - op.at : end - op.at]


def _shown(op: object) -> str:
    if isinstance(op, Write):
        return f"write {op.node} {op.at}+{len(op.data)}"
    if isinstance(op, Resize):
        return f"resize {op.node} {op.size}"
    assert isinstance(op, Entries)
    return " ".join(f"{change.directory}/{change.name}={change.node}" for change in op.changes)
