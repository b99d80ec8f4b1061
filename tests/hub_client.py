"""Runs scripts that take a server for the Hub, in forks of a process that has imported all but huggingface_hub.

That reads its environment when it is imported, so each script has an import of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.worlds.processes import ROOT, ForkServer

IMPORTED = (
    *(
        "shardkit.operations.preshard",
        "shardkit.operations.consolidate",
        "shardkit.operations.verify",
    ),
    "shardkit.formats.hub.repo",
    "shardkit.formats.registry",
)


class HubClient:
    """The process, and how a script is run in a fork of it."""

    def __init__(self) -> None:
        self._server = ForkServer(IMPORTED)
        lacks = "import sys; sys.exit('huggingface_hub' in sys.modules)"
        assert self._server.run({"code": lacks, "argument": ""}).returncode == 0

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
        env = {
            **{name: None for name in os.environ if name.startswith(("HF_", "HUGGING"))},
            "HF_ENDPOINT": url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            **(environment or {}),
        }
        request = {"code": script, "argument": json.dumps(argument)}
        done = self._server.run(request, env=env, cwd=directory, is_apart=True)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def close(self) -> None:
        """End the process."""
        self._server.close()
