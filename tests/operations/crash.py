"""Run preshard and die, by SIGKILL, at the n-th call that changes the file system.

crash.py N SOURCE OUTPUT       (N = 0: live on, and print how many calls there were)
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CALLS = ("mkdir", "open", "ftruncate", "pwrite", "fsync", "rename", "unlink", "rmdir")


def main() -> None:
    fatal, seen = int(sys.argv[1]), 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    import shardkit

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    from shardkit.transfer import staging

    staging._renameat2 = counted(staging._renameat2)
    result = shardkit.preshard(
        sys.argv[2], sys.argv[3], world_size=5, wrap="none", jobs=1, overwrite="--overwrite" in sys.argv
    )
    print(seen, result.resumed_files)


if __name__ == "__main__":
    main()
