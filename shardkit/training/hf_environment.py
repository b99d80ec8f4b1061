"""The environment variables by which transformers and accelerate load on rank 0 alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# transformers 5.23, distributed/fsdp.py: is_fsdp_enabled; accelerate 1.15, utils/dataclasses.py.
_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@contextlib.contextmanager
def hf_ram_efficient_loading(enabled: bool) -> Iterator[None]:
    """Turn the RAM efficient loading of transformers on or off for a while; put back what was there, whatever happens.

    With it `from_pretrained` reads weights on rank 0 alone, and leaves the other ranks' parameters empty. shardkit
    needs none of it: this is for code that calls `from_pretrained` beside it, which must not be half on.

    Args:
        enabled: what both variables say inside.
    """
    before = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        for name in _VARIABLES:
            os.environ[name] = "true" if enabled else "false"
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
