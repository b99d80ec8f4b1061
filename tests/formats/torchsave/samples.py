"""Reading records of one tensor, from a file that is open."""

from __future__ import annotations

import io
import os
from typing import Any

from shardkit.formats.torchsave.record import TensorRecord
from shardkit.formats.torchsave.scan import read_entries


def saved(value: Any) -> bytes:
    """What `torch.save` writes."""
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def read_record(
    fd: int, offset: int, length: int, *, where: str = "record", check_crc: bool = False
) -> TensorRecord:
    """The description of the record at a byte range of a file."""
    record, _ = read_entries(
        lambda start, nbytes: os.pread(fd, nbytes, start), offset, length, where=where, check_crc=check_crc
    )
    return record
