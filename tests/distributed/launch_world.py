"""Start a script on some ranks, as `torchrun` does but without its imports.

    python launch_world.py REQUEST

REQUEST is JSON: {"script", "arguments", "num_processes", "printed": the file for what the ranks print}.
It is a script: it stands in for a launcher.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.worlds.processes import agent_store, fork, wait


def run(request: dict[str, Any], place: Mapping[str, str], rank: int) -> None:
    size = str(request["num_processes"])
    os.environ.update(
        place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0"
    )
    sys.argv = [request["script"], *request["arguments"]]
    with open(request["printed"], "a") as sys.stdout:
        runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with agent_store() as found:
        wait([fork(partial(run, given, found, rank)) for rank in range(given["num_processes"])])
