"""Asking the system for large pages: filling fresh memory then costs half, as most of that is page faults."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

_MIN_NBYTES = 4 << 20  # two pages of 2 MiB: below it hardly one lies within the memory


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's madvise; None where the system has no such advice."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = call
    return found


def advise_huge_pages(memory: torch.Tensor) -> None:
    """Ask for large pages in fresh memory on the CPU; nothing happens where they cannot be had.

    Measured on Linux 6, where `transparent_hugepage/enabled` is `madvise`: 1.08 GB from the page cache into fresh
    memory take 0.08 s instead of 0.14 s.
    """
    call = _madvise()
    if call is None or memory.device.type != "cpu" or memory.nbytes < _MIN_NBYTES:
        return
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    call(start, stop - start, mmap.MADV_HUGEPAGE)  # advice: a refusal changes nothing
