"""An audit hook that tells what a process does beyond reading its input and writing its output."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Where an interpreter reads its own modules from.
CODE = tuple(
    {
        os.path.realpath(path)
        for path in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(ROOT / "shardkit"))
    }
)
_SYSTEM = ("/dev/null", "/etc/machine-id", "/proc/self/maps", "/proc/sys/kernel/random/boot_id")
# Names of unfinished directories begin with the host; and the one system call that Python has no function for.
_OURS = frozenset({"socket.gethostname ()", "ctypes.dlopen (None,)"})
_OUR_SYMBOLS = frozenset({"renameat2"})
_RUNS_CODE = frozenset(
    {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn"}
) | {
    "subprocess.Popen",
    "pickle.find_class",
    "code.__new__",
    "function.__new__",
    "builtins.input",
    "builtins.breakpoint",
    "sys.unraisablehook",
    "webbrowser.open",
    "shutil.unpack_archive",
    "urllib.Request",
    "syslog.openlog",
}
_RUNS_CODE_OF = ("socket.", "ctypes.", "ftplib.", "smtplib.", "http.client.", "cpython.run_")
_CHANGES = frozenset(
    {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod"}
) | {
    "os.truncate",
    "os.utime",
    "os.chown",
    "os.setxattr",
    "shutil.rmtree",
    "shutil.move",
}
_LOOKS = frozenset({"os.listdir", "os.scandir"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Collects what an audit hook saw that it should not have; there is no way to take a hook off again."""

    def __init__(self) -> None:
        self._writable: tuple[str, ...] = ()
        self._readable: tuple[str, ...] = ()
        self.found: dict[str, None] = {}
        self.is_on = False

    def allow(self, *, readable: Iterable[str], writable: Iterable[str]) -> None:
        """Say what the next run may do, and forget what was found.

        Args:
            readable: directories that it may read, with everything below.
            writable: directories that it may write.
        """
        self._writable = tuple(os.path.realpath(path) for path in writable)
        own = f"/proc/{os.getpid()}/stat"
        self._readable = (*map(os.path.realpath, readable), *self._writable, *CODE, *_SYSTEM, own)
        self.found.clear()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """What `sys.addaudithook` takes."""
        if not self.is_on:
            return
        self.is_on = False  # what is done here is not the run's
        try:
            problem = self._problem(event, args)
        finally:
            self.is_on = True
        if problem is not None:
            self.found[problem] = None

    def _problem(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "import":
            return f"import {args[0]}"
        if event in ("exec", "compile"):
            name = args[0].co_filename if event == "exec" else os.fsdecode(args[1] or b"")
            return None if _is_within(name, CODE) else f"{event} {name}"
        if event == "ctypes.dlsym" and args[1] in _OUR_SYMBOLS:
            return None
        if event in _RUNS_CODE or event.startswith(_RUNS_CODE_OF):
            said = f"{event} {args!r:.200}"
            return None if said in _OURS else said
        if event == "open":
            return self._opened(args[0], args[2] or 0)
        if event in _LOOKS:
            is_fine = (
                self._may(args[0], self._readable) or args[0] in sys.path
            )  # looking for a module of ours
            return None if is_fine else f"{event} {args[0]}"
        if event in _CHANGES:
            paths = args[:2] if event in ("os.rename", "os.link", "shutil.move") else args[:1]
            bad = [path for path in paths if not self._may(path, self._writable, last=False)]
            return f"{event} {bad}" if bad else None
        return None

    def _opened(self, path: Any, flags: int) -> str | None:
        if flags & _WRITES:
            return None if path == os.devnull or self._may(path, self._writable) else f"write {path}"
        follows = not flags & os.O_NOFOLLOW
        return None if self._may(path, self._readable, last=follows) else f"read {path}"

    def _may(self, path: Any, places: tuple[str, ...], *, last: bool = True) -> bool:
        """True for descriptors, and paths that lie in one of the places after links are followed.

        Args:
            last: the last part may be a link that is followed too.
        """
        if path is None or isinstance(path, int):
            return True
        name = os.fsdecode(path)
        try:
            if last:
                real = os.path.realpath(name)
                return _is_within(real, places) or name in places
            return _is_within(os.path.join(os.path.realpath(os.path.dirname(name) or "."), "x"), places)
        except ValueError:  # a NUL: no file has such a name
            return True


def _is_within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place + os.sep) for place in places)
