"""Reading objects by ranges: few requests, several at a time, each byte fetched once, in bounded memory.

An object is divided into *spans*, each fetched by one request. Reads should be announced (`Ranges.plan`): close ranges
then become one span of at most 8 MiB, and while a span is used the next ones are fetched. Without a plan, a small read
fetches its surroundings, and sequential reads fetch 8 MiB at a time.

If many places are read in turn and memory is tight, a request fetches several spans of 1 MiB, so that used ones can be
dropped before the others.

All threads share the spans: threads that need the same one wait for one request. Used spans are dropped first. Fetched
data and requests in progress together stay below one limit, which is the process's (`set_limit`).
"""

from __future__ import annotations

import mmap
import os
import threading
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest

MAX_REQUEST_NBYTES = 8 << 20
MAX_GAP_NBYTES = 1 << 20
"""Gaps up to this size are read if at least as much was needed before them."""
_SMALL_GAP_NBYTES = 32 << 10
"""Gaps up to this size are always read: 0.8 ms at 40 MB/s, while one of 32 concurrent requests of 32 ms costs 1 ms."""
DEFAULT_LIMIT_NBYTES = 48 << 20
MAX_CONNECTIONS = 32
_FIRST_NBYTES = 64 << 10  # for a small read: a header, or the directory of a record
_LARGE_NBYTES = 256 << 10  # reads of tensors are at least this large, those of headers are not
_MIN_REQUEST_NBYTES = 64 << 10
_PIECE_NBYTES = 1 << 20
_OVERHEAD_NBYTES = 1 << 19  # of a request in progress: buffers of the HTTP client
_KEPT_ENDS = 32  # ends of reads of an object, where sequential reads may continue
BLOCK = 4096
_STREAK = 2  # consecutive spans before the next one is fetched ahead

Fetch = Callable[[int, int], memoryview]
"""Returns `nbytes` bytes from a first byte on."""


class _FetchedSpan:
    """A range of an object that is fetched, and dropped, as a unit."""

    __slots__ = (
        "data",
        "is_ahead",
        "is_begun",
        "is_planned",
        "is_read_to_end",
        "is_under_way",
        "owner",
        "request",
        "start",
        "stop",
        "unread_bytes",
        "was_held",
    )

    def __init__(self, owner: Ranges, start: int, stop: int, unread_bytes: int, request: int | None) -> None:
        self.owner, self.start, self.stop, self.unread_bytes = owner, start, stop, unread_bytes
        self.data: memoryview | None = None
        self.request, self.is_planned = request, request is not None
        self.is_under_way = self.was_held = self.is_begun = self.is_read_to_end = self.is_ahead = False

    def __lt__(self, other: _FetchedSpan) -> bool:
        return self.start < other.start

    @property
    def is_used_up(self) -> bool:
        """True if it is unlikely to be needed again."""
        return self.unread_bytes <= 0 and self.is_read_to_end

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.start


class _Memory:
    """The memory of all spans in a process. `changed` is the lock for it and for all `Ranges`."""

    def __init__(self) -> None:
        self.limit = DEFAULT_LIMIT_NBYTES
        self.changed = threading.Condition()
        self.filled_spans: OrderedDict[_FetchedSpan, None] = OrderedDict()
        """Spans with data, least recently used first."""
        self.used = 0
        """Bytes fetched and being fetched."""
        self.most = 0
        """The maximum of `used` so far."""
        self.ahead = 0
        """Bytes of `used` that were fetched ahead and are not used yet."""
        self.num_under_way = self.num_waiting = 0
        self.copying = threading.Lock()
        self.pool: ThreadPoolExecutor | None = None
        self.pid = os.getpid()

    def reserve(self, nbytes: int, *, must: bool) -> bool:
        """Make room for a request; False if there is none and the request is optional. The lock is held."""
        nbytes += _OVERHEAD_NBYTES
        while self.used + nbytes > self.limit:
            if not self._drop_one(must=must):
                if not must:
                    return False
                if not self.num_under_way:  # one request at a time is always allowed
                    break
                self.num_waiting += 1
                try:
                    self.changed.wait()
                finally:
                    self.num_waiting -= 1
        self.used += nbytes
        self.most = max(self.most, self.used)
        self.num_under_way += 1
        return True

    def _drop_one(self, *, must: bool) -> bool:
        """Drop a span: preferably a used one, then one that is cheap to fetch again, and an unused one last."""
        dropped = next((span for span in self.filled_spans if span.is_used_up), None)
        if dropped is None and must:
            begun = (span for span in self.filled_spans if span.is_begun)
            dropped = min(begun, key=lambda span: span.unread_bytes, default=None)
            if dropped is None and not self.num_under_way:
                dropped = next(iter(self.filled_spans), None)
        if dropped is not None:
            self.drop(dropped)
        return dropped is not None

    def drop(self, span: _FetchedSpan) -> None:
        """Forget the bytes of a span. The lock is held."""
        assert span.data is not None
        self.used -= len(span.data)
        self.claim(span)
        span.data, span.was_held = None, True
        del self.filled_spans[span]
        span.owner.remove_unplanned(span)
        self.changed.notify_all()

    def claim(self, span: _FetchedSpan) -> None:
        """Stop counting a span as fetched ahead. The lock is held."""
        if span.is_ahead:
            span.is_ahead = False
            self.ahead -= span.nbytes

    def threads(self) -> ThreadPoolExecutor:
        """Return the thread pool for fetching ahead. The lock is held."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(MAX_CONNECTIONS, "shardkit-store")
        return self.pool


_memory = _Memory()


def _after_fork() -> None:
    """Reset a forked child: threads of the parent may have held locks."""
    global _memory
    _memory = _Memory()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Limit the memory for fetched data within this context. A low limit makes requests smaller."""
    memory = _memory
    with memory.changed:
        before, memory.limit = memory.limit, max(nbytes, _MIN_REQUEST_NBYTES)
    try:
        yield
    finally:
        with memory.changed:
            memory.limit = before


def request_nbytes(num_places: int) -> int:
    """Return the size of requests if data are read from a number of places in turn."""
    return max(min(MAX_REQUEST_NBYTES, _memory.limit // (num_places + 2)), _MIN_REQUEST_NBYTES)


class Ranges:
    """One version of an object, and its fetched data.

    Args:
        size: bytes of the object.
        fetch: returns a range, or raises.
    """

    def __init__(self, size: int, fetch: Fetch) -> None:
        self.size, self._fetch, self._memory = size, fetch, _memory
        self._spans: list[_FetchedSpan] = []
        self._ends: deque[int] = deque(maxlen=_KEPT_ENDS)
        self._streak, self._is_planned = 0, False
        self._set_places(1)

    def _set_places(self, num_places: int) -> None:
        self._nbytes = self._piece_nbytes = request_nbytes(num_places)
        # When a place moves on to its next request, it may still need the rest of the previous one.
        if self._nbytes >= 2 * _PIECE_NBYTES and 2 * num_places * self._nbytes > self._memory.limit:
            self._nbytes, self._piece_nbytes = self._nbytes // _PIECE_NBYTES * _PIECE_NBYTES, _PIECE_NBYTES
        self._ahead_nbytes = max(self._memory.limit - num_places * self._nbytes, 0)

    def plan(self, extents: Iterable[tuple[int, int]], num_places: int = 1) -> None:
        """Announce the reads, replacing previous announcements.

        Args:
            extents: (first byte, byte after the last) of each range, in any order; they may overlap.
            num_places: number of places in all open objects that are read in turn; each needs its own request.
        """
        with self._memory.changed:
            self._set_places(num_places)
            self._spans = [span for span in self._spans if span.data is not None or span.is_under_way]
            self._is_planned = True
            request, end = 0, -1
            for start, stop, nbytes in _coalesce(extents, self._piece_nbytes, self.size):
                if start != end or stop - request > self._nbytes:
                    request = start
                self._add_planned(start, stop, nbytes, request)
                end = stop

    def _add_planned(self, start: int, stop: int, nbytes: int, request: int) -> None:
        """Plan a span, except for parts that exist already."""
        offset = start
        for span in self._overlapping(start, stop):
            if offset < span.start:
                self._add(offset, span.start, min(nbytes, span.start - offset), request)
            offset = span.stop
        if offset < stop:
            self._add(offset, stop, min(nbytes, stop - offset), request)

    def _add(self, start: int, stop: int, unread_bytes: int, request: int | None = None) -> _FetchedSpan:
        span = _FetchedSpan(self, start, stop, unread_bytes, request)
        insort(self._spans, span)
        return span

    def _overlapping(self, start: int, stop: int) -> list[_FetchedSpan]:
        spans = list[_FetchedSpan]()
        for index in range(max(self._index(start), 0), len(self._spans)):
            span = self._spans[index]
            if span.start >= stop:
                break
            if span.stop > start:
                spans.append(span)
        return spans

    def _index(self, offset: int) -> int:
        """Return the index of the last span that begins at or before a byte; -1 if there is none."""
        return bisect_right(self._spans, offset, key=_start_of) - 1

    def read_into(self, views: Sequence[memoryview], start: int) -> int:
        """Fill buffers in order, and return the number of bytes, which is smaller at the end of the object."""
        stop, offset = min(start + sum(map(len, views)), self.size), start
        into = _Into(views)
        while offset < stop:
            span, data, begin = self._bytes_at(offset, stop)
            part = data[offset - begin : stop - begin]
            into.put(part)
            self._count(span, offset, offset + len(part))
            offset += len(part)
        return max(stop - start, 0)

    def ahead(self) -> None:
        """Begin to fetch planned spans, as far as there is room."""
        with self._memory.changed:
            self._fetch_ahead(self._planned_from(0))

    def close(self) -> None:
        """Drop all fetched data."""
        with self._memory.changed:
            for span in list(self._spans):
                if span.data is not None:
                    self._memory.drop(span)
            self._spans = []

    def remove_unplanned(self, span: _FetchedSpan) -> None:
        """Remove a span that was not planned, after its data were dropped. The lock is held."""
        self._ends.append(span.stop)
        if not span.is_planned:
            index = self._index(span.start)
            if index >= 0 and self._spans[index] is span:
                del self._spans[index]

    def _batch(self, span: _FetchedSpan) -> list[_FetchedSpan]:
        """Return a span and its successors in the same request. The lock is held."""
        batch = [span]
        if span.is_planned:
            for index in range(self._index(span.start) + 1, len(self._spans)):
                following = self._spans[index]
                is_there = following.data is not None or following.is_under_way or following.unread_bytes <= 0
                if is_there or following.request != span.request or following.start != batch[-1].stop:
                    break
                batch.append(following)
        return batch

    def _bytes_at(self, offset: int, stop: int) -> tuple[_FetchedSpan, memoryview, int]:
        """Return the span around byte `offset`, its bytes, and the position of the first of them."""
        memory = self._memory
        with memory.changed:
            while True:
                span = self._span(offset, stop)
                memory.claim(span)
                if span.data is not None:
                    return span, span.data, span.start
                if not span.is_under_way:
                    break
                memory.changed.wait()
            if span.was_held:
                span.start = offset  # it was dropped after partial use
            batch = self._batch(span)
            for member in batch:
                member.is_under_way = True
            try:
                memory.reserve(_nbytes_of(batch), must=True)
            except BaseException:
                for member in batch:
                    member.is_under_way = False
                raise
            self._fetch_ahead(self._next_after(batch[-1], stop))
            begin = span.start
        return span, self._carry_out(batch), begin

    def _count(self, span: _FetchedSpan, start: int, stop: int) -> None:
        """Count a read from a span; a read of its end starts fetching the next ones."""
        with self._memory.changed:
            span.unread_bytes -= stop - start
            span.is_begun = True
            span.is_read_to_end |= stop >= span.stop - BLOCK
            if span.data is not None:
                self._memory.filled_spans.move_to_end(span)
            if span.is_read_to_end:
                self._fetch_ahead(self._next_after(span, stop))

    def _span(self, offset: int, stop: int) -> _FetchedSpan:
        """Return the span that contains byte `offset`; a new one if none was planned."""
        index = self._index(offset)
        if index >= 0 and offset < self._spans[index].stop:
            return self._spans[index]
        follows = self._spans[index + 1].start if index + 1 < len(self._spans) else self.size
        end = min(offset + self._guess(offset, stop - offset), follows, self.size)
        return self._add(offset, end, min(stop, end) - offset)

    def _guess(self, offset: int, needed_bytes: int) -> int:
        """Return how many bytes to fetch from `offset` on, of which `needed_bytes` are needed now."""
        before = self._spans[index].stop if (index := self._index(offset)) >= 0 else -1
        is_sequential = not self._is_planned and any(
            end <= offset <= end + MAX_GAP_NBYTES for end in (before, *self._ends) if end >= 0
        )
        self._streak = self._streak + 1 if is_sequential else 0
        if is_sequential or needed_bytes > self._nbytes:
            return self._nbytes
        return needed_bytes if needed_bytes >= _LARGE_NBYTES else min(_FIRST_NBYTES, self._nbytes)

    def _next_after(self, span: _FetchedSpan, stop: int) -> list[_FetchedSpan]:
        """Return the spans to fetch while one is in use: the rest of a large read, then the spans that come next."""
        if span.is_planned:
            return self._planned_from(self._index(span.start) + 1)
        is_sequential, spans, offset = self._streak >= _STREAK, list[_FetchedSpan](), span.stop
        until = min(max(stop, span.stop + self._nbytes if is_sequential else 0), self.size)
        while offset < until and len(spans) < MAX_CONNECTIONS:
            index = self._index(offset)
            if index < 0 or self._spans[index].stop <= offset:
                follows = self._spans[index + 1].start if index + 1 < len(self._spans) else self.size
                end = min(offset + self._nbytes, follows, self.size if is_sequential else until)
                spans.append(self._add(offset, end, end - offset))
            else:
                spans.append(self._spans[index])
            offset = spans[-1].stop
        return spans

    def _planned_from(self, index: int) -> list[_FetchedSpan]:
        """Return the planned, unused spans from one on, as many as may be fetched ahead."""
        spans, room, requests = list[_FetchedSpan](), self._ahead_nbytes, set[int | None]()
        while index < len(self._spans) and len(requests) < MAX_CONNECTIONS:
            span = self._spans[index]
            if span.is_planned and span.unread_bytes > 0:
                room -= span.nbytes
                if room < 0:
                    break
                spans.append(span)
                requests.add(span.request)
            index += 1
        return spans

    def _fetch_ahead(self, spans: Iterable[_FetchedSpan]) -> None:
        """Fetch spans in the background, as far as there is room. The lock is held.

        Fetching ahead leaves room for one request of each place, so that it does not displace data in use. Requests that
        wait for room have precedence.
        """
        memory = self._memory
        if memory.num_waiting:
            return
        for span in spans:
            # Of a partially used span that was dropped, only its reader knows the part that is still needed.
            if span.data is not None or span.is_under_way or span.is_begun:
                continue
            batch = self._batch(span)
            nbytes = _nbytes_of(batch)
            if memory.num_under_way >= MAX_CONNECTIONS or memory.ahead + nbytes > self._ahead_nbytes:
                return
            if not memory.reserve(nbytes, must=False):
                return
            for member in batch:
                member.is_under_way = member.is_ahead = True
            memory.ahead += nbytes
            memory.threads().submit(self._carry_out_quietly, batch)

    def _carry_out_quietly(self, batch: Sequence[_FetchedSpan]) -> None:
        try:
            self._carry_out(batch)
        except Exception:  # a reader that needs the bytes will retry, and report the error
            return

    def _carry_out(self, batch: Sequence[_FetchedSpan]) -> memoryview:
        """Fetch consecutive spans, for which room was made, store them, and return the bytes of the first."""
        memory, start, parts = self._memory, batch[0].start, list[memoryview | None]()
        try:
            data: memoryview | None = self._fetch(start, _nbytes_of(batch))
            if len(batch) == 1:
                parts.append(data)
            else:  # copied, as slices would keep the whole body alive; one at a time, as both exist meanwhile
                with memory.copying:
                    assert data is not None
                    parts += [_copied(data[member.start - start : member.stop - start]) for member in batch]
                    data = None
            first = parts[0]
            assert first is not None
            return first
        finally:
            with memory.changed:
                memory.num_under_way -= 1
                memory.used -= _OVERHEAD_NBYTES
                for span, part in zip_longest(batch, parts):
                    span.is_under_way = False
                    index = self._index(span.start)
                    if part is not None and index >= 0 and self._spans[index] is span:
                        span.data = part
                        memory.filled_spans[span] = None
                    else:  # the request failed, or the object was closed meanwhile
                        memory.claim(span)
                        memory.used -= span.nbytes
                memory.changed.notify_all()


class _Into:
    """Buffers that are filled in order."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views, self._number, self._offset = views, 0, 0

    def put(self, data: memoryview) -> None:
        """Append bytes."""
        while data:
            view = self._views[self._number]
            count = min(len(view) - self._offset, len(data))
            view[self._offset : self._offset + count] = data[:count]
            data, self._offset = data[count:], self._offset + count
            if self._offset == len(view):
                self._number, self._offset = self._number + 1, 0


def _copied(data: memoryview) -> memoryview:
    """Return a copy in separate pages, which are returned to the system, unlike memory of `malloc`."""
    view = memoryview(mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    view[:] = data
    return view


def _nbytes_of(batch: Sequence[_FetchedSpan]) -> int:
    return batch[-1].stop - batch[0].start


def _start_of(span: _FetchedSpan) -> int:
    return span.start


def _coalesce(extents: Iterable[tuple[int, int]], nbytes: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, byte after the last, needed bytes) of requests for ranges.

    A gap is included if it is small, or if at least as much is needed just before it. Requests consist of whole blocks,
    like small reads.
    """
    group, last = list[tuple[int, int]](), 0
    for start, stop in sorted(extents):
        start, stop = max(start, group[-1][1] if group else 0), min(stop, size)
        if stop <= start:
            continue
        gap = start - group[-1][1] if group else 0
        if gap > max(_SMALL_GAP_NBYTES, min(last, MAX_GAP_NBYTES)):
            yield from _cut(group, nbytes, size)
            group.clear()
        last = stop - start + (last if gap <= _SMALL_GAP_NBYTES else 0)
        group.append((start, stop))
    yield from _cut(group, nbytes, size)


def _cut(group: Sequence[tuple[int, int]], nbytes: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the requests for ranges that are read together."""
    if not group:
        return
    first, last, index = group[0][0] // BLOCK * BLOCK, min(-(-group[-1][1] // BLOCK) * BLOCK, size), 0
    for start in range(first, last, nbytes):
        end, of_it = min(start + nbytes, last), 0
        while index < len(group) and group[index][0] < end:
            of_it += min(group[index][1], end) - max(group[index][0], start)
            if group[index][1] > end:
                break
            index += 1
        if of_it:
            yield start, end, of_it
