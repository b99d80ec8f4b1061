"""Jobs that somebody else's engine runs, of whose processes one is killed in the middle."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

import shardkit
from tests.contents import contents

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 12
OPTIONS = ["--world-size", str(WORLD_SIZE), "--layout", "declared"]
_LONGEST_S = 600.0


class Job:
    """A model, what one process makes of it, and a place for what an engine makes of it.

    Args:
        home: an empty directory.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.model, self.out = home, home / "model", home / "out"
        self._marker = home / "stopped"
        self.model.mkdir()
        tensors = {f"layers.{n}.weight": torch.randn(64, 32) for n in range(4)}
        save_file(tensors, self.model / "model.safetensors", metadata={"format": "pt"})
        shardkit.preshard(self.model, home / "whole", world_size=WORLD_SIZE, layout="declared")

    @property
    def command(self) -> list[str]:
        """What follows the name of the program."""
        return ["preshard", str(self.model), str(self.out), *OPTIONS, "--jobs", "1"]

    def environment(self, *, stops: bool = False) -> dict[str, str]:
        """Return what processes get to see.

        Args:
            stops: the first of them that has finished two files stops there.
        """
        paths = [str(Path(__file__).parent / "stop")] if stops else []
        paths += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        stop = {"SHARDKIT_TESTS_STOP": str(self._marker)} if stops else {}
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **stop}

    def run(self, *words: str, by: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, undisturbed; it ends well.

        Args:
            words: its arguments.
            by: the command that starts it.
        """
        command, environment = [*by, sys.executable, *words], self.environment()
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_LONGEST_S, cwd=self.home
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def run_and_lose_one(
        self, *words: str, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments, kill one of the processes in the middle, and see what becomes of it.

        Nothing that was finished by then is written again.
        """
        environment = {**self.environment(stops=True), **(more or {})}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, *words], env=environment, stdout=pipe, stderr=pipe, text=True, cwd=self.home
        ) as running:
            try:
                wait_until(lambda: self._marker.exists() or running.poll() is not None)
                assert self._marker.exists(), running.communicate()
                finished = self.finished()
                os.kill(int(self._marker.read_text()), signal.SIGKILL)
                out, err = running.communicate(timeout=_LONGEST_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    running.kill()
        self.was_kept = len(finished) >= 2 and all(
            (self.out / name).exists() and (self.out / name).stat().st_ino == node
            for name, node in finished.items()
        )
        return subprocess.CompletedProcess(words, running.returncode, out, err)

    def finished(self) -> dict[str, int]:
        """Return the inodes of the files that are finished."""
        work = self.home / ".out.shardkit"
        files = json.loads((work / "job.json").read_text())["files"]
        names = [files[int(note.stem)][0] for note in (work / "done").iterdir()]
        return {name: (work / "data" / name).stat().st_ino for name in names}

    def check(self) -> None:
        """The output is that of one process, byte for byte, and nothing is left beside it."""
        assert contents(self.out) == contents(self.home / "whole")
        assert shardkit.commit(self.out).by_another
        assert not list(self.home.glob(".out.*"))


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait for something that another process does."""
    until = time.monotonic() + _LONGEST_S
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
