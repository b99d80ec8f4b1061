"""Presharding under other versions of the packages that a layout is traced with."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import shardkit
from shardkit.operations import environment
from tests.worlds.processes import fork_server

OLD = "5.1.0"
IN_ANOTHER = """
import json, os, signal, sys
import shardkit
from shardkit.layout import traced
from shardkit.operations import environment
from shardkit.files.output.bucket import BucketOutput
from shardkit.files.output.local import LocalOutput
from tests.worlds.processes import forked_trace

versions, num_files, hub, out, options = json.loads(sys.argv[1])
traced._spawn = forked_trace
environment.package_version = versions.get
def die_after(add):
    def noted(self, *args):
        global num_files
        add(self, *args)
        num_files -= 1
        if not num_files:
            os.kill(os.getpid(), signal.SIGKILL)
    return noted
for output in (LocalOutput, BucketOutput):
    output.add = die_after(output.add)
shardkit.preshard(hub, out, world_size=4, jobs=1, **options)
"""


def with_old(hub: Path, out: str | Path, *, killed_after: int = 0, **options: Any) -> None:
    """Preshard in a process that has an older transformers."""
    versions = {"torch": environment.package_version("torch"), "transformers": OLD}
    argument = json.dumps([versions, killed_after, str(hub), str(out), options])
    done = fork_server().run({"code": IN_ANOTHER, "argument": argument}, is_apart=True)
    assert done.returncode == (-signal.SIGKILL if killed_after else 0), done.stderr.decode()[-4000:]


def here(hub: Path, out: str | Path, **options: Any) -> shardkit.PreshardResult:
    """Preshard with what is installed."""
    return shardkit.preshard(hub, out, world_size=4, **options)
