"""Let source ranks read tensors, and send to every other rank only the parts that it stores.

Source and receivers derive the same sequence of messages from names, shapes and dtypes, so only statuses and bytes
are sent. Large tensors are sent in *bands* (boxes of bounded size), with one message for each part of a band that a
rank stores. Small tensors are *packed* into one message per rank, which begins with a status. If a source rank fails,
it reports this in the next status, so that no rank waits for messages that are never sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region, blocks, intersect, relative_to, window
from shardkit.core.text import MIB
from shardkit.errors import LayoutError
from shardkit.training.fill.reading import (
    Filled,
    ReadWorker,
    Supply,
    WantedPart,
    Weights,
    compare_together,
    match,
    neighbours,
    plan_reads,
    source_files,
    torch_dtype,
)
from shardkit.training.ranks.agree import (
    agree,
    agreed,
    broadcast_json,
    device_for,
    from_bytes,
    to_bytes,
    wire,
    world,
)
from shardkit.training.ranks.local import LocalShard, flat_bytes
from shardkit.transfer.codecs.convert import one_thread_each
from shardkit.transfer.plan import chunk_ranges

BAND_NBYTES = 4 * MIB
"""Limit on the bytes of a tensor in one message."""

_ALIGN = 16  # bytes; alignment of parts in a packed message, so that they can be viewed as any dtype
_IN_FLIGHT = 4  # bands that are sent at a time
_OK, _FAILED = 1, 2
_PHASE = "sending weights"


def fill_broadcast(
    shards: Sequence[LocalShard], supply: Supply, sources: Sequence[int], *, check_source: bool = True
) -> Filled:
    """Fill shards with data that source ranks read and send; every rank calls it.

    Args:
        shards: this rank's shards, with memory.
        supply: the weights that fill them.
        sources: the source rank of every rank; equal on all ranks.
        check_source: compare the data with the checksums in the source.

    Returns:
        The numbers of elements that this rank filled, and of bytes that it read.

    Raises:
        ShardkitError: on all ranks, if any fails; the error names these.
    """
    rank, _ = world()
    rows: list[Any] = []
    with agreed("comparing the source with the model"):
        if supply.weights is not None:
            if sources[rank] == rank:
                supply = replace(supply, weights=supply.weights.located())
            parts = match(shards, supply)
            rows = [_row(items[0]) for items in _by_tensor(parts).values()]
    rows = broadcast_json(rows, min(sources), phase=_PHASE)
    with agreed("comparing the source with the model"):
        if supply.weights is None:
            parts = match(shards, replace(supply, weights=_weights_of_rows(rows)))
        tensors = _in_rows_order(parts, rows)
    mine = {
        number: kept
        for number, items in enumerate(tensors)
        if (kept := [i for i in items if i.region.num_elements])
    }
    sent = [SentTensor(items[0].entry, _dtype_to_send(items[0])) for items in tensors]
    filled, reader, error = Filled(), None, None
    with contextlib.ExitStack() as stack:
        if sources[rank] == rank:
            assert supply.weights is not None
            names = list(dict.fromkeys(tensor.entry.fqn for tensor in sent))
            reader = WeightReader(stack, supply.weights, names, check_source=check_source)
        error = send_parts(reader, sources, sent, mine, filled)
        if reader is not None and error is None:
            try:
                reader.files.check_unchanged()
            except BaseException as caught:  # also Ctrl-C, so that the others do not wait
                error = caught
    agree(error, phase=_PHASE)
    if check_source:
        filled.checked = compare_together(None if reader is None else reader.files.check)
    return filled


def _row(item: WantedPart) -> list[Any]:
    """Return a description of a tensor as plain data, for ranks that cannot open the source."""
    dtype = str(_dtype_to_send(item)).removeprefix("torch.")
    return [item.shard.fqn, item.entry.fqn, item.entry.dtype.name, list(item.entry.shape), dtype]


def _dtype_to_send(item: WantedPart) -> torch.dtype:
    """Return the narrower of the stored and the wanted dtype: the source narrows values, the receiver widens them."""
    stored = torch_dtype(item.entry.dtype)
    return stored if stored.itemsize <= item.shard.dtype.itemsize else item.shard.dtype


def _weights_of_rows(rows: Sequence[Any]) -> Weights:
    catalog = Catalog(format="", directory="")
    for _, stored, dtype, shape, _ in rows:
        catalog.add_tensor(stored, BY_NAME[dtype], tuple(shape), iter(()))
    names = {fqn: stored for fqn, stored, *_ in rows}
    return Weights(path="the source", catalog=catalog, names=names, identity="")


def _by_tensor(parts: Sequence[WantedPart]) -> dict[str, list[WantedPart]]:
    """Return FQN -> this rank's parts of the tensor: one, or several if a dim is packed."""
    by_tensor: dict[str, list[WantedPart]] = {}
    for item in parts:
        by_tensor.setdefault(item.shard.fqn, []).append(item)
    return by_tensor


def _in_rows_order(parts: Sequence[WantedPart], rows: Sequence[Any]) -> list[list[WantedPart]]:
    """Return this rank's parts of each tensor, in the order of the messages.

    Raises:
        LayoutError: this rank's model has other tensors or dtypes than the source rank's.
    """
    by_fqn = _by_tensor(parts)
    differ = {fqn for fqn, *_ in rows} ^ by_fqn.keys()
    differ |= {row[0] for row in rows if row[0] in by_fqn and _row(by_fqn[row[0]][0]) != row}
    LayoutError.raise_for(
        sorted(differ),
        "the ranks' models have other tensors or dtypes than the source rank's",
        hint="every rank must build and wrap the same model; stages of a pipeline read for themselves: strategy='direct'",
    )
    return [by_fqn[row[0]] for row in rows]


class SentTensor(NamedTuple):
    """A tensor to send."""

    entry: TensorEntry
    """The stored tensor."""
    dtype: torch.dtype
    """The dtype in which it is sent: the narrower of the stored and the wanted one."""


class Band(NamedTuple):
    """A contiguous box of a tensor, of bounded size."""

    number: int
    """Index of the tensor, in the order of sending."""
    box: Region


class Message(NamedTuple):
    """Bands that are read and sent together."""

    bands: tuple[Band, ...]
    is_packed: bool
    """True for whole small tensors, sent after a status in one message to each rank. False for one band of a large
    tensor, each part of which is sent as a message of its own."""


class PackedPart(NamedTuple):
    """A rank's part of a tensor, in a packed message."""

    number: int
    """Index of the tensor."""
    box: Region
    start: int
    """First byte in the message."""
    stop: int
    """End in the message."""


def build_messages(tensors: Sequence[SentTensor]) -> Iterator[Message]:
    """Yield the messages in order. A packed one, which has a status, precedes every large tensor, and is the last."""
    packed: list[Band] = []
    nbytes = 0
    for number, (entry, dtype) in enumerate(tensors):
        itemsize = max(dtype.itemsize, entry.dtype.itemsize)
        bands = [Band(number, box) for box in blocks(entry.shape, max(BAND_NBYTES // itemsize, 1))]
        size = _aligned(entry.num_elements * itemsize)
        if len(bands) > 1 or nbytes + size > BAND_NBYTES:
            yield Message(tuple(packed), True)
            packed, nbytes = [], 0
        if len(bands) > 1:
            yield from (Message((band,), False) for band in bands)
        else:
            packed += bands
            nbytes += size
    yield Message(tuple(packed), True)
    yield Message((), True)  # the status of the message before it


def packed_layout(
    bands: Iterable[Band], tensors: Sequence[SentTensor], regions: Mapping[int, Sequence[Region]]
) -> tuple[tuple[PackedPart, ...], int]:
    """Return (parts in a rank's packed message, size of the message in bytes).

    Args:
        bands: the bands of the message.
        tensors: all tensors to send.
        regions: index of each tensor -> regions that the rank stores.
    """
    parts: list[PackedPart] = []
    stop = _ALIGN  # after the status
    for number, band in bands:
        for box in (intersect(region, band) for region in regions.get(number, ())):
            if box is not None:
                nbytes = box.num_elements * tensors[number].dtype.itemsize
                parts.append(PackedPart(number, box, stop, stop + nbytes))
                stop = _aligned(stop + nbytes)
    return tuple(parts), stop


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _memory_for(items: Sequence[WantedPart], part: Region) -> torch.Tensor:
    """Return this rank's memory for a region of a tensor, which one of `items` contains."""
    item = next(item for item in items if intersect(item.region, part) == part)
    return item.target[window(relative_to(part, item.region.offsets))]


class WeightReader:
    """Reads tensors for a source rank and the ranks that it serves.

    Args:
        stack: the stack that closes the files.
        weights: the source.
        names: stored names of the tensors.
        check_source: compare the data with the checksums in the source.
    """

    def __init__(
        self, stack: contextlib.ExitStack, weights: Weights, names: Collection[str], *, check_source: bool
    ) -> None:
        self.catalog = weights.catalog
        self.files = stack.enter_context(source_files(weights, check_source=check_source))
        """The open files. Their check is complete after the stack was closed."""
        self.files.expect(chunk_ranges(self.catalog, names), 1)
        self.worker = ReadWorker(stack.enter_context(self.files.reader()))


def send_parts(
    reader: WeightReader | None,
    sources: Sequence[int],
    sent: Sequence[SentTensor],
    mine: Mapping[int, Sequence[WantedPart]],
    filled: Filled,
) -> BaseException | None:
    """Fill each rank's parts of tensors, which its source rank reads and sends; every rank calls it.

    Args:
        reader: this rank's reader if it is a source rank, else None.
        sources: the source rank of every rank.
        sent: the tensors to send; equal on all ranks.
        mine: index of each tensor -> this rank's parts.
        filled: counter to which the received and read data is added.

    Returns:
        This rank's error or None. It is not raised, so that the other ranks do not wait.
    """
    rank, _ = world()
    local_regions = {number: [item.region for item in items] for number, items in mine.items()}
    with torch.no_grad(), one_thread_each(True):
        if sources[rank] != rank:
            return _Receiver(sources[rank], sent, mine, filled).run(local_regions)
        assert reader is not None
        receivers = [
            target_rank
            for target_rank, source in enumerate(sources)
            if source == rank and target_rank != rank
        ]
        before = reader.worker.filled.read_bytes
        sender = _Sender(reader, sent, mine, filled)
        regions = {rank: local_regions, **sender.receive_regions(receivers)}
        for message in build_messages(sent):
            layouts = {
                target_rank: packed_layout(message.bands, sent, of_rank)
                for target_rank, of_rank in regions.items()
            }
            needed = {part.number for parts, _ in layouts.values() for part in parts}
            content = sender.read(
                [band for band in message.bands if band.number in needed], layouts.pop(rank)[0]
            )
            if not message.is_packed:
                sender.send_parts(layouts, content)
            else:
                sender.send_packed(layouts, content)
                if sender.error is not None:
                    break
        sender.finish()
        filled.read_bytes += reader.worker.filled.read_bytes - before
        return sender.error


class _Receiver:
    """Receives this rank's parts from its source rank, directly into the parameters' memory if possible."""

    def __init__(
        self,
        source: int,
        sent: Sequence[SentTensor],
        mine: Mapping[int, Sequence[WantedPart]],
        filled: Filled,
    ) -> None:
        self._source, self._sent, self._mine, self._filled = source, sent, mine, filled
        self._device = _device_for(mine)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self._device)] * _IN_FLIGHT
        self._pending: list[tuple[dist.Work, PackedPart, torch.Tensor | None]] = []
        self._turn = 0
        self._error: Exception | None = None

    def run(self, regions: Mapping[int, Sequence[Region]]) -> Exception | None:
        """Receive all parts. An error is returned instead of raised, so that the source rank does not wait."""
        with wire(_PHASE):
            _send_json(list(regions.items()), self._source, self._device)
        for message in build_messages(self._sent):
            parts, nbytes = packed_layout(message.bands, self._sent, regions)
            if not message.is_packed:
                for part in parts:
                    self._receive_part(part)
                continue
            self._finish(0)
            packed = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            with wire(_PHASE):
                dist.recv(packed, self._source)
            if int(packed[0]) != _OK:
                break
            for part in parts:
                self._store(part, packed[part.start : part.stop])
        return self._error

    def _receive_part(self, part: PackedPart) -> None:
        """Begin to receive a part of a large tensor, while a few earlier ones may still be arriving."""
        self._finish(_IN_FLIGHT - 1)
        target, dtype = _memory_for(self._mine[part.number], part.box), self._sent[part.number].dtype
        staged = None
        if target.dtype != dtype or target.device != self._device or not target.is_contiguous():
            self._turn = (self._turn + 1) % _IN_FLIGHT
            staged = _buffer(self._buffers, self._turn)[: part.stop - part.start]
        with wire(_PHASE):
            work = dist.irecv(flat_bytes(target) if staged is None else staged, self._source)
        assert work is not None
        self._pending.append((work, part, staged))

    def _finish(self, most: int) -> None:
        """Wait until at most `most` parts are still arriving."""
        while len(self._pending) > most:
            work, part, staged = self._pending.pop(0)
            with wire(_PHASE):
                work.wait()
            self._store(part, staged)

    def _store(self, part: PackedPart, content: torch.Tensor | None) -> None:
        """Count a part that has arrived, and copy it to its place, unless it was received there (`content` is None)."""
        items = self._mine[part.number]
        try:
            if content is not None:
                values = content.view(self._sent[part.number].dtype).view(part.box.sizes)
                _memory_for(items, part.box).copy_(values)
        except Exception as error:  # returned at the end, since the source rank continues to send
            self._error = self._error or error
        else:
            self._filled.elements[items[0].shard.fqn] += part.box.num_elements


_Layouts = Mapping[int, tuple[Sequence[PackedPart], int]]
"""Receiver -> (parts of a message, size of the message if it is packed)."""
_BandValues = Mapping[int, tuple[Region, torch.Tensor]]
"""Index of a tensor -> (a band of it, the values of the band)."""


class _Sender:
    """Reads every tensor once, copies this rank's own parts, and sends each receiver its parts."""

    def __init__(
        self,
        reader: WeightReader,
        sent: Sequence[SentTensor],
        mine: Mapping[int, Sequence[WantedPart]],
        filled: Filled,
    ) -> None:
        self.error: BaseException | None = None
        """The first error. Until the next status, meaningless data is sent after it, as receivers wait for data."""
        self._reader, self._sent, self._mine, self._filled = reader, sent, mine, filled
        self._device = _device_for(mine)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self._device)] * _IN_FLIGHT
        self._pending: list[list[tuple[dist.Work, torch.Tensor]]] = [[] for _ in range(_IN_FLIGHT)]
        self._turn = 0

    def receive_regions(self, receivers: Iterable[int]) -> dict[int, dict[int, list[Region]]]:
        """Return receiver -> index of each tensor -> regions that the receiver stores."""
        regions = dict[int, dict[int, list[Region]]]()
        for receiver in receivers:
            with wire(_PHASE):
                of_rank = _receive_json(receiver, self._device)
            regions[receiver] = {
                number: [Region(tuple(offsets), tuple(sizes)) for offsets, sizes in parts]
                for number, parts in of_rank
            }
        return regions

    def read(self, bands: Sequence[Band], local_parts: Sequence[PackedPart]) -> _BandValues:
        """Return the values of bands in the dtype to send, and copy this rank's own parts of them into its memory.

        Args:
            bands: bands of at most `BAND_NBYTES` together.
            local_parts: this rank's own parts of them.
        """
        content = self._next_buffer(bands)
        if self.error is not None or not bands:
            return content
        try:
            reads = [
                read
                for number, (box, values) in content.items()
                for read in plan_reads(self._sent[number].entry, self._reader.catalog, box, values)
            ]
            self._reader.worker.run(neighbours(sorted(reads, key=lambda read: read.first)))
            self._reader.worker.finish()
            for part in local_parts:
                items = self._mine[part.number]
                _memory_for(items, part.box).copy_(_cut(content, part))
                self._filled.elements[items[0].shard.fqn] += part.box.num_elements
        except BaseException as error:  # also Ctrl-C; reported with the next status
            self.error = error
        return content

    def _next_buffer(self, bands: Sequence[Band]) -> _BandValues:
        """Return memory for bands, in the next buffer, after its previous content was sent."""
        self._turn = (self._turn + 1) % _IN_FLIGHT
        self._wait(self._turn)
        content, start = dict[int, tuple[Region, torch.Tensor]](), 0
        for number, box in bands:
            dtype = self._sent[number].dtype
            stop = start + box.num_elements * dtype.itemsize
            memory = _buffer(self._buffers, self._turn)[start:stop]
            content[number] = box, memory.view(dtype).view(box.sizes)
            start = _aligned(stop)
        return content

    def send_packed(self, layouts: _Layouts, content: _BandValues) -> None:
        """Send each receiver a status, and its parts of small tensors."""
        # Ranks that store the same parts, such as replicas, share one message.
        messages: dict[tuple[PackedPart, ...], torch.Tensor] = {}
        for receiver, (parts, nbytes) in layouts.items():
            message = messages.get(tuple(parts))
            if message is None:
                message = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                messages[tuple(parts)] = message
                message[0] = _OK if self.error is None else _FAILED
                for part in parts:
                    values = _cut(content, part)
                    message[part.start : part.stop].view(values.dtype).view(values.shape).copy_(values)
            self._send(message, receiver)

    def send_parts(self, layouts: _Layouts, content: _BandValues) -> None:
        """Send each receiver its parts of a band of a large tensor."""
        for receiver, (parts, _) in layouts.items():
            for part in parts:
                self._send(_cut(content, part).contiguous(), receiver)

    def finish(self) -> None:
        """Wait until everything was sent."""
        for turn in range(_IN_FLIGHT):
            self._wait(turn)

    def _send(self, content: torch.Tensor, receiver: int) -> None:
        with wire(_PHASE):
            work = dist.isend(flat_bytes(content), receiver)
        assert work is not None
        self._pending[self._turn].append((work, content))

    def _wait(self, turn: int) -> None:
        with wire(_PHASE):
            for work, _ in self._pending[turn]:
                work.wait()
        self._pending[turn].clear()


def _cut(content: _BandValues, part: PackedPart) -> torch.Tensor:
    box, values = content[part.number]
    return values[window(relative_to(part.box, box.offsets))]


def _buffer(buffers: list[torch.Tensor], turn: int) -> torch.Tensor:
    """Return a buffer of `BAND_NBYTES`, which is allocated at its first use."""
    if not len(buffers[turn]):
        buffers[turn] = torch.empty(BAND_NBYTES, dtype=torch.uint8, device=buffers[turn].device)
    return buffers[turn]


def _device_for(mine: Mapping[int, Sequence[WantedPart]]) -> torch.device:
    """Return the device for messages: that of the parameters, if the process group supports it."""
    if world()[1] == 1:
        return torch.device("cpu")
    return device_for(None, next((items[0].target.device for items in mine.values()), None))


def _send_json(value: Any, receiver: int, device: torch.device) -> None:
    content = to_bytes(value, device)
    dist.send(torch.tensor([len(content)], device=device), receiver)
    dist.send(content, receiver)


def _receive_json(sender: int, device: torch.device) -> Any:
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, sender)
    content = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(content, sender)
    return from_bytes(content)
