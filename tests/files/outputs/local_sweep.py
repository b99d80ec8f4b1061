"""Small jobs in processes of their own, one for each call of `storage` that dies or fails.

`python -m tests.files.outputs.local_sweep DIRECTORY FAULT MODE` prints what is wrong, one problem a line. FAULT is "kill", or
the name of an errno. This is a program since it forks, which a process with threads should not.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardkit.errors import ShardkitError
from shardkit.files import storage
from shardkit.files.output.contract import JobEnded, JobFile, JobRecord, OutputExists
from shardkit.files.output.local import LocalOutput
from tests.torture.faults import Faults

FILES = {"data/a.bin": b"new a", "b.bin": b"new bb"}
NEW = {**FILES, "config.json": b"new"}
OLD = {"data/a.bin": b"old a", "b.bin": b"old", "config.json": b"old", "data/c.bin": b"old c"}
COPIES = "overwrite-where-a-link-is-a-copy"
MODES: dict[str, tuple[bool, dict[str, bytes] | None]] = {
    "overwrite": (True, OLD),
    "fresh": (True, None),
    "overwrite-in-two-renames": (False, OLD),
    COPIES: (False, OLD),
}
"""(whether directories can be exchanged, what is there before). Some file systems of FUSE copy where they should link."""
RECORD = JobRecord(
    hash="hash",
    command="shardkit preshard model out",
    directory="/",
    files=[JobFile(name=name, size=len(data)) for name, data in FILES.items()],
    draft={"config.json": b"new"},
)
_REFUSED, _BROKEN = 2, 3
"""Exit codes of a command that ends with an error of shardkit, and with any other."""


def write(out: str) -> None:
    """Write the output."""

    def may_replace(path: str, new: str) -> None:
        if read(path) == NEW:
            raise OutputExists("it is there")

    with LocalOutput(out, may_replace=may_replace, foreign_files=lambda path, new: []) as output:
        try:
            output.begin(RECORD)
            finished = output.notes(range(len(FILES)))
            with output.scratch() as scratch:
                for number, name in enumerate(FILES):
                    if number not in finished:
                        storage.write_file(os.path.join(scratch, name), FILES[name])
                        output.add(scratch, number, {"number": number})
            assert len(output.notes(range(len(FILES)))) == len(FILES)
            with output.scratch() as scratch:
                storage.write_file(os.path.join(scratch, "config.json"), b"new")
                output.commit(scratch)
        except JobEnded as error:
            if not error.is_committed:
                raise
        except OutputExists:
            pass


def read(directory: str) -> dict[str, bytes] | None:
    """Return the files of a directory; None if it does not exist."""
    root = Path(directory)
    if not root.is_dir():
        return None
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def run(out: str, fault: dict[str, Any] | None, *, exchange: bool, copies: bool) -> tuple[int, list[str]]:
    """Write the output in a child process; return its exit code, and the calls and the error that it reports."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = _BROKEN
        try:
            faults = Faults(fault, os.open(os.devnull, os.O_WRONLY) if fault else writing)
            if copies:
                storage.hard_link = shutil.copyfile  # type: ignore[assignment]
            faults.install(exchange=exchange)
            try:
                write(out)
                code = 0
            except ShardkitError as error:
                code = _REFUSED
                os.write(writing, str(error).encode())
            if fault is None:
                faults.report_calls()
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading) as stream:
        text = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, json.loads(text)["calls"] if fault is None and code == 0 else [text]


def sweep(
    directory: str, fault: str, *, exchange: bool, old: dict[str, bytes] | None, copies: bool = False
) -> Iterator[str]:
    """Yield what is wrong after a kill, or an error, at each call."""
    out = os.path.join(directory, "out")

    def prepare() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        os.mkdir(directory)
        for name, data in (old or {}).items():
            Path(out, name).parent.mkdir(parents=True, exist_ok=True)
            Path(out, name).write_bytes(data)

    prepare()
    code, calls = run(out, None, exchange=exchange, copies=copies)
    assert code == 0, calls
    how = {"do": "kill"} if fault == "kill" else {"do": "errno", "errno": getattr(errno, fault)}
    for at in range(1, len(calls) + 1):
        prepare()
        where = f"{fault} at call {at}, {calls[at - 1]}"
        code, said = run(out, {"at": at, **how}, exchange=exchange, copies=copies)
        if code not in ((-9,) if fault == "kill" else (0, _REFUSED)):
            yield f"{where}: ends with {code}, {said}"
        found = read(out)
        if found not in (old, NEW) and (exchange or found is not None):
            yield f"{where}: OUT is {found}"
        if code == 0 and found != NEW:
            yield f"{where}: exit code 0, and OUT is {found}"
        again, said = run(out, None, exchange=exchange, copies=copies)
        if again != 0 or read(out) != NEW or os.listdir(directory) != ["out"]:
            yield f"{where}: the same command ends with {again}, {said[-1:]}; there is {os.listdir(directory)}"


def main() -> None:
    """Print what is wrong."""
    directory, fault, mode = sys.argv[1:]
    exchange, old = MODES[mode]
    for problem in sweep(directory, fault, exchange=exchange, old=old, copies=mode == COPIES):
        print(problem, flush=True)


if __name__ == "__main__":
    main()
