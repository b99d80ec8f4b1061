"""The environment variables that transformers and accelerate call RAM efficient loading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# transformers 5.23, distributed/fsdp.py: is_fsdp_enabled; accelerate 1.15, utils/dataclasses.py.
_VARIABLES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


@contextlib.contextmanager
def hf_ram_efficient_loading(enabled: bool) -> Iterator[None]:
    """Turn the RAM efficient loading of transformers on or off for a while; put back what was there, whatever happens.

    shardkit needs none of it: this is for code that calls `from_pretrained` beside it, which must not be half on. What
    the variables do was found out by running each version on two ranks:

    - transformers 5.23: nothing. Every rank reads every value.
    - transformers 5.12, 5.17, 5.20 and 5.22: ranks whose LOCAL_RANK is 0 read; the others have zeros.
      5.0: random values in their place. In all of them the others take the memory of the whole model all the same,
      and have right non-persistent buffers. Without LOCAL_RANK in the environment no rank reads, rank 0 neither.
    - Any transformers, where torch.distributed is not initialised: nothing.
    - accelerate 1.10 and 1.15: FSDP_CPU_RAM_EFFICIENT_LOADING is what `FullyShardedDataParallelPlugin` takes for
      `cpu_ram_efficient_loading`. A plugin that is told so itself sets the variable, and leaves it so.

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
