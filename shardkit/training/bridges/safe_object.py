"""Byte entries of a DCP checkpoint (a step, a learning rate, an RNG state), made safe for `torch.load`.

A stock load planner unpickles them without restriction. So none reaches it as it lies in the file: its pickle is
first looked through by our own interpreter, which refuses every name but those of plain data and plain tensors and
everything that would cost much; what passed is put into a new zip, loaded with torch's weights-only loader, and the
value that comes out is saved anew. The planner sees only that.

Source: torch 2.13, torch/distributed/checkpoint/default_planner.py (`load_bytes`), torch/_weights_only_unpickler.py.
"""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any

import torch

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.torchsave.archive import Entry, ZipReader, read_directory
from shardkit.formats.torchsave.screen import screen

MAX_OBJECT_NBYTES = 1 << 30
"""Most bytes of one entry; a step or a scheduler's state has hundreds."""

_MAX_PICKLE = 1 << 25
_MAX_ENTRIES = 1 << 16
_NAMES = frozenset({"data.pkl", "byteorder", "version", ".data/serialization_id"}) | {
    ".format_version",
    ".storage_alignment",
}
_STORAGE = re.compile(r"data/[0-9]{1,9}")


def vetted(data: memoryview, where: str) -> io.BytesIO:
    """Return a byte entry's value, saved anew by torch; no name that the file gives is looked up before it is vetted.

    Args:
        data: what `torch.save` wrote.
        where: the entry, escaped, for messages.

    Classes of the program's own that it gave to `torch.serialization.add_safe_globals` are admitted too.

    Raises:
        SourceError: damaged, hostile, or holding more than plain data and plain tensors; names the classes.
        IntegrityError: a CRC-32 is not that of the bytes.
    """
    reader = ZipReader(lambda start, nbytes: bytes(data[start : start + nbytes]), 0, len(data), where)
    entries = read_directory(reader, _is_known, max_entries=_MAX_ENTRIES)
    if "data.pkl" not in entries:
        reader.refuse("it has no entry data.pkl: not a file of torch.save")
    if "byteorder" in entries and reader.content("byteorder", entries["byteorder"]) != b"little":
        reader.refuse("its byte order is not little")
    pickle = reader.content("data.pkl", entries["data.pkl"], _MAX_PICKLE)
    storages = {name[5:]: entry for name, entry in entries.items() if name.startswith("data/")}
    trusted = _trusted_names()
    unknown = [name for name in screen(pickle, storages, where) if name not in trusted]
    if unknown:
        raise SourceError(
            f"{where} holds more than plain data, and is not loaded: nothing of it was executed",
            problems=[escape(name) for name in unknown],
            hint="leave it out of the state dict that is loaded; or, for classes of your own in a checkpoint that "
            "you trust, torch.serialization.add_safe_globals",
        )
    try:
        value = torch.load(_clean_copy(reader, entries, pickle), map_location="cpu", weights_only=True)
    except Exception as error:  # what torch refuses ends in any exception there is
        found = re.search(r"WeightsUnpickler error: (.*)", str(error))
        reason = escape(found[1] if found else (str(error).splitlines() or [type(error).__name__])[0])
        raise SourceError(f"{where}: torch's weights-only loader refuses it: {reason}") from None
    out = io.BytesIO()
    torch.save(value, out)
    out.seek(0)
    return out


def _is_known(name: str) -> bool:
    return name in _NAMES or _STORAGE.fullmatch(name) is not None


def _trusted_names() -> frozenset[str]:
    """Return what the program has declared safe. torch declares some too, such as DTensor: no plain data."""
    items: list[Any] = torch.serialization.get_safe_globals()
    names = (i[1] if isinstance(i, tuple) else f"{i.__module__}.{i.__qualname__}" for i in items)
    return frozenset(name for name in names if not name.startswith("torch."))


def _clean_copy(reader: ZipReader, entries: dict[str, Entry], pickle: bytes) -> io.BytesIO:
    """Put what was checked into a new zip: another reader cannot find other entries in it than ours did."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", b"3\n")  # torch 2.13, caffe2/serialize/versions.h
        archive.writestr("archive/byteorder", b"little")
        for name, entry in entries.items():
            if _STORAGE.fullmatch(name):
                archive.writestr(f"archive/{name}", reader.content(name, entry, MAX_OBJECT_NBYTES))
    out.seek(0)
    return out
