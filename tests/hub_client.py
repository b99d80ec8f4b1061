"""Runs scripts that take a server for the Hub, in forks of a process that has imported all but huggingface_hub.

That reads its environment when it is imported, so each script has an import of its own. A request is a line of JSON:
{"script", "argument", "environment", "directory"}; an answer is a line: {"code", "out", "err"}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTED = ("preshard", "consolidate", "verify")


class HubClient:
    """The process, and how a script is run in a fork of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hub_client"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        )

    def __call__(
        self,
        script: str,
        argument: Any,
        *,
        url: str,
        cache: Path,
        directory: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run a script, and return the lines of JSON that it prints.

        Args:
            script: Python.
            argument: `sys.argv[1]` is this in JSON.
            url: of the server.
            cache: what the Hub sent is kept here.
            directory: where it runs.
            environment: what more, or else, there is in it.
        """
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))
        }
        own = {
            "HF_ENDPOINT": url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        request = {
            "script": script,
            "argument": json.dumps(argument),
            "environment": {**inherited, **own, **(environment or {})},
            "directory": str(directory),
        }
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert answer["code"] == 0, answer["err"]
        return [json.loads(line) for line in answer["out"].splitlines()]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _run(request: dict[str, Any]) -> None:
    """Carry out a request in this process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.argv = ["-c", request["argument"]]
    exec(compile(request["script"], "<script>", "exec"), {"__name__": "__main__"})


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a run and wait for its end."""
    out, err = os.memfd_create("out"), os.memfd_create("err")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(out, 1)
            os.dup2(err, 2)
            _run(request)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "out": _text(out), "err": _text(err)}


def _text(fd: int) -> str:
    """Return all that was written to a file of memory, and close it."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    return data.decode(errors="replace")


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(f"shardkit.operations.{name}")
    for name in ("hub_headers", "hub_push", "hub_repo", "source"):
        import_module(f"shardkit.formats.{name}")
    assert "huggingface_hub" not in sys.modules
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)
