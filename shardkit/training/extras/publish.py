"""Publishing from a training job: `shardkit watch RUN OUTPUT --once` in a process of its own, after a save.

transformers and Lightning are imported when a callback is created, not before.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TypeVar

from shardkit.core.text import in_shell
from shardkit.errors import ResourceError, UsageError
from shardkit.files import storage

_log = logging.getLogger("shardkit")

LOG = "watch.log"
"""File of the output directory that gets what the processes print."""
_OF_THE_JOB = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_OF_TORCHRUN = "TORCHELASTIC_"
_LOWEST_PRIORITY = 19
LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""The same library under two names; each has its own classes."""


class Publisher:
    """Publishes the checkpoints of a run from the training job itself, for accelerate and loops of your own.

    After each save, rank 0 starts `shardkit watch RUN OUTPUT_DIRECTORY --once` in a process of its own, unless one is
    still running. That has the lowest priority, and uses no GPU and none of the job's settings. It never blocks or ends
    the training: what goes wrong is logged, with the command to run by hand, and `watch.log` in OUTPUT_DIRECTORY has all
    that it printed.

        publisher = shardkit.Publisher("run", "published", "--base", "Qwen/Qwen3-8B")
        ...
        dcp.save(state, checkpoint_id=f"run/step-{step}")
        publisher.saved()        # on every rank
        # or, for torch's asynchronous saves and torch_checkpointing's: future.add_done_callback(publisher.saved)
        ...
        publisher.finish()       # last of all: rank 0 waits until the last checkpoint is published

    Args:
        run: the directory that the job saves into.
        output_directory: gets a directory for each checkpoint; on a disk, outside of `run`.
        options: of `shardkit watch`, as typed.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        output_directory: str | os.PathLike[str],
        *options: str | os.PathLike[str],
    ) -> None:
        self.output_directory = os.fspath(output_directory)
        self.command = [sys.executable, "-m", "shardkit", "watch", os.fspath(run), self.output_directory]
        self.command += ["--once", "--no-progress", *map(str, options)]
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Held while a process is started or waited for; a save that ends in another thread does not wait for that."""

    def __getstate__(self) -> dict[str, object]:
        return {"output_directory": self.output_directory, "command": self.command}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _process=None, _lock=threading.Lock())

    def saved(self, *_: object) -> None:
        """Start publishing on rank 0, unless it is still under way; then the next call publishes this save too.

        Arguments are ignored, so that this is also a callback of what saves.
        """
        if _rank() == 0 and self._lock.acquire(blocking=False):
            try:
                if self._has_ended():
                    self._start()
            finally:
                self._lock.release()

    def finish(self, *, wait: bool = True) -> str | None:
        """Publish what is left on rank 0, and wait for it; return what went wrong, or None.

        Call it when all saves have ended: asynchronous ones too.

        Args:
            wait: if False, only the end of the interpreter waits, so that other ranks, which may be in a collective
                operation with this one by then, do not.
        """
        if _rank() != 0:
            return None
        if not wait:
            self.saved()
            atexit.register(self.finish)
            return None
        with self._lock:
            self._wait()
            return self._start() or self._wait()

    def _wait(self) -> str | None:
        """Wait for the process that is under way; return what went wrong."""
        if self._process is not None:
            self._process.wait()
        return self._report()

    def _start(self) -> str | None:
        """Start the process; return why it did not start."""
        names = (*_OF_THE_JOB, *(name for name in os.environ if name.startswith(_OF_TORCHRUN)))
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        try:
            storage.make_directories(self.output_directory)
            with storage.open_file(os.path.join(self.output_directory, LOG), "ab") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            _lower_priority(self._process.pid)
        except (OSError, ResourceError, ValueError) as error:  # ValueError: a NUL in a path
            failure = f"publishing did not start: {error}; run by hand: {self._typed()}"
            _log.warning("%s", failure)
            return failure
        return None

    def _has_ended(self) -> bool:
        if self._process is not None and self._process.poll() is None:
            return False
        self._report()
        return True

    def _report(self) -> str | None:
        """Log how the last process ended; return what went wrong."""
        process, self._process = self._process, None
        if process is None or process.returncode == 0:
            return None
        where = os.path.join(self.output_directory, LOG)
        failure = (
            f"publishing ended with exit code {process.returncode}, see {where}; run by hand: {self._typed()}"
        )
        _log.warning("%s", failure)
        return failure

    def _typed(self) -> str:
        return " ".join(map(in_shell, ["shardkit", *self.command[3:]]))


_Made = TypeVar("_Made", bound="_CallbackPublisher")


class _CallbackPublisher:
    """A callback that publishes; a library's callback class becomes a base of each object's class."""

    _library: str
    _packages: tuple[str, ...]
    _callback: str

    def __new__(cls: type[_Made], *_: object, **__: object) -> _Made:
        bases = callback_classes(cls.__name__, cls._library, cls._packages, cls._callback)
        with_bases = type(cls.__name__, (cls, *bases), {"__module__": __name__})
        callback: _Made = object.__new__(with_bases)
        return callback

    def __init__(
        self,
        run: str | os.PathLike[str],
        output_directory: str | os.PathLike[str],
        *options: str | os.PathLike[str],
    ) -> None:
        self.publisher = Publisher(run, output_directory, *options)


class TrainerPublisher(_CallbackPublisher):
    """A callback of transformers' Trainer that publishes each save; see `Publisher` for its arguments.

    `run` is `TrainingArguments.output_dir`.

        trainer = Trainer(..., callbacks=[shardkit.TrainerPublisher("out", "published", "--base", "Qwen/Qwen3-8B")])

    Raises:
        UsageError: transformers is not installed.
    """

    _library, _packages, _callback = "transformers", ("transformers",), "TrainerCallback"

    def on_save(self, *_: object, **__: object) -> None:
        """Publish a save."""
        self.publisher.saved()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Publish what is left; the end of the interpreter waits for it."""
        self.publisher.finish(wait=False)


class LightningPublisher(_CallbackPublisher):
    """A callback of Lightning's Trainer that publishes each save; see `Publisher` for its arguments.

    `run` is the `dirpath` of the `ModelCheckpoint`, whose file names have to contain the step. A save is published from
    the next batch on, as Lightning calls no callback after it.

    Raises:
        UsageError: Lightning is not installed.
    """

    _library, _packages, _callback = "Lightning", LIGHTNING, "Callback"
    _saves = False
    """Lightning has begun a save since the last batch."""

    def on_save_checkpoint(self, *_: object) -> None:
        """Lightning begins a save."""
        self._saves = True

    def on_train_batch_start(self, *_: object) -> None:
        """Publish a save that has ended."""
        if self._saves:
            self._saves = False
            self.publisher.saved()

    def teardown(self, *_: object, stage: str = "fit") -> None:
        """Publish what is left; the end of the interpreter waits for it."""
        if stage == "fit":
            self.publisher.finish(wait=False)


def callback_classes(owner: str, library: str, packages: Sequence[str], name: str) -> tuple[type, ...]:
    """Return a library's callback class from each imported package, else from the first that can be imported.

    Args:
        owner: our class that needs it.
        library: its name.
        packages: under which it is imported; each has classes of its own.
        name: of the class.

    Raises:
        UsageError: the library is not installed.
    """
    imported = [package for package in packages if package in sys.modules]
    for package in imported or packages:
        if not imported:
            try:
                import_module(package)
            except ModuleNotFoundError:
                continue
        return tuple(getattr(sys.modules[each], name) for each in imported or [package])
    raise UsageError(
        f"{owner} needs {library}, which is not installed", hint=f"`pip install {library.lower()}`"
    )


def _lower_priority(pid: int) -> None:
    """Let the training go before a process, if it has not ended yet and the machine allows it.

    Linux may divide the processors among sessions first (sched(7), autogroup); the process has one of its own.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _LOWEST_PRIORITY)
    with suppress(OSError, ResourceError), storage.open_file(f"/proc/{pid}/autogroup", "wb") as file:
        file.write(str(_LOWEST_PRIORITY).encode())


def _rank() -> int:
    """Return this process's rank in the job."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0
