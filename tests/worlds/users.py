"""Commands that other users run."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.worlds.processes import fork_server

NOBODY = 65534
_RUN = """
import json, os, sys
from tests.worlds.processes import import_all
uid, umask, args = json.loads(sys.argv[1])
import_all()
import tomllib
from shardkit.cli import main
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
os.umask(umask)
sys.argv = ["shardkit", *args]
main(args)
"""


def run_as(
    uid: int, *args: str | Path, umask: int = 0o022, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of shardkit as another user, who cannot read the interpreter's own files: all is imported before.

    Args:
        uid: of the user, and of the group.
        args: what is typed after the program's name.
        umask: of the process.
        cwd: a directory that the user may enter.
    """
    request = {"code": _RUN, "argument": json.dumps([uid, umask, [*map(str, args)]])}
    return fork_server().run(request, cwd=cwd, is_apart=True, env={"SHARDKIT_CACHE": "off"})


@contextmanager
def shared_directory() -> Iterator[Path]:
    """Give a directory in which all users may write."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)
