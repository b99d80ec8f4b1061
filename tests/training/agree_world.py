"""A real gloo world in which some ranks fail: what each is told, as JSON for each scenario.

python agree_world.py OUT
"""

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardkit.errors import IntegrityError, LayoutError, ResourceError, ShardkitError
from shardkit.training.ranks.agree import agree, gather_json
from tests.worlds.processes import fork, wait

torch.set_num_threads(1)
SIZE = 4


def told(error: BaseException | None, group: dist.ProcessGroup | None = None) -> dict[str, object]:
    try:
        agree(error, group, phase="reading")
    except ShardkitError as raised:
        return raised.to_json()
    except KeyboardInterrupt:
        return {"error": "KeyboardInterrupt"}
    return {}


def scenarios(rank: int) -> dict[str, object]:
    damaged = IntegrityError("a file is damaged", problems=["a.distcp", "b.distcp"], hint="copy it again")
    narrow = dist.new_group([1, 3])
    found: dict[str, object] = {
        "values": gather_json({"rank": rank, "text": "ä" * rank}),
        "nobody": told(None),
        "one": told(damaged if rank == 2 else None),
        "same": told(damaged if rank != 1 else None),
        "kinds": told([LayoutError("names differ"), None, damaged, OSError(28, "No space left")][rank]),
        "sources": told([LayoutError("names differ"), None, damaged, None][rank]),
        "bug": told(ZeroDivisionError() if rank == 3 else None),
        "stopped": told(KeyboardInterrupt() if rank == 0 else None),
    }
    if rank in (1, 3):
        found["group"] = told(ResourceError("disk full") if rank == 3 else None, narrow)
    return found


def run(rank: int, out: Path) -> None:
    store = f"file://{out}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=600)
    )
    found = scenarios(rank)
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = told(None)
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    children = [fork(lambda rank=rank: run(rank, out)) for rank in range(SIZE)]
    wait(children[:3])
    assert os.waitstatus_to_exitcode(os.waitpid(children[3], 0)[1]) == -signal.SIGKILL
