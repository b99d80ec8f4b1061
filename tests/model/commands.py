"""Command lines of a small job, as the verbs would run them over `LocalOutput`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

from shardkit.files.output import local
from shardkit.files.output.contract import FileNote, JobEnded, JobFile, JobRecord, OutputExists
from shardkit.files.output.local import LocalOutput
from tests.model.processes import STORAGE, Command

OUT = "/p/OUT"
TWO, THREE = ("a", "b"), ("a", "b", "c")
FOLDERS = ("x/a", "b")
_NAMES = {*THREE, "index", "x"}
"""What shardkit writes: everything else in OUT is a person's."""
_BAD = b"BAD"


def content(tag: str, files: Sequence[str] = TWO) -> dict[str, bytes]:
    """Return the files of the output of a job, by name."""
    return {name: f"{tag}-{name}".encode() for name in (*files, "index")}


def tree(tag: str, files: Sequence[str] = TWO) -> dict[str, object]:
    """Return the output of a job as a tree."""
    root = dict[str, object]()
    for name, data in content(tag, files).items():
        *folders, last = PurePath(name).parts
        directory = root
        for folder in folders:
            directory = directory.setdefault(folder, {})  # type: ignore[assignment]
        directory[last] = data
    return root


def make_record(tag: str, files: Sequence[str]) -> JobRecord:
    """Return what the processes of a job agree on."""
    contents = content(tag, files)
    return JobRecord(
        hash=f"hash of {tag}",
        command=f"shardkit preshard {tag}",
        directory="/p",
        files=[JobFile(name=name, size=len(contents[name])) for name in files],
        draft={"index": contents["index"]},
    )


def write(
    tag: str = "new",
    *,
    files: Sequence[str] = TWO,
    part: tuple[int, int] = (1, 1),
    overwrite: bool = False,
    exist_ok: bool = True,
    is_damaged_once: bool = False,
) -> Command:
    """Return a command that writes the files of a part, and commits where it is the last.

    Args:
        tag: of the job; what it writes begins with it.
        files: of the job.
        part: (number, from 1; of how many).
        overwrite, exist_ok: as the options of a command.
        is_damaged_once: what the command reads of its source first is damaged.
    """

    def run() -> str:
        record, contents = make_record(tag, files), content(tag, files)
        bad = {0} if is_damaged_once else set[int]()

        def write_file(scratch: str, number: int) -> FileNote:
            data = contents[files[number]]
            if number in bad:
                bad.remove(number)
                data = _BAD + data[len(_BAD) :]
            STORAGE.write_file(os.path.join(scratch, files[number]), data, is_synced=False)
            return {"content": data.decode()}

        def attempt() -> str:
            with _output(overwrite) as output:
                try:
                    return _write_job(output, record, part, write_file)
                except OutputExists:
                    if exist_ok:
                        output.discard()
                    raise

        return _answer(attempt, exist_ok=exist_ok)

    return run


def save(tag: str = "new", *, overwrite: bool = False) -> Command:
    """Return what writes an output without numbered files, each time as a new job, and removes it after an error."""

    def run() -> str:
        record = JobRecord(
            hash=f"{tag} {local._new_id()}", command=f"shardkit.save({tag})", directory="", files=()
        )

        def attempt() -> str:
            with _output(overwrite) as output:
                try:
                    output.begin(record)
                    return _answer(lambda: _save(output, content(tag)), exist_ok=True)
                except BaseException:
                    output.discard()
                    raise

        return _answer(attempt, exist_ok=True)

    return run


def commit(*, overwrite: bool = False) -> Command:
    """Return `shardkit commit OUT`."""

    def run() -> str:
        with _output(overwrite) as output:
            return _answer(lambda: _commit_job(output))

    return run


def abort() -> str:
    """Run `shardkit abort OUT`."""
    with _output(overwrite=False) as output:
        output.abort()
    return "aborted"


def person(*calls: Callable[[], None]) -> Command:
    """Return what a person does beside the commands. It ends where a call fails."""

    def run() -> str:
        for call in calls:
            try:
                call()
            except OSError as error:
                return f"failed: {error.strerror}"
        return "done"

    return run


def _write_job(
    output: LocalOutput, record: JobRecord, part: tuple[int, int], write_file: Callable[[str, int], FileNote]
) -> str:
    output.begin(record)
    number, num_parts = part
    while True:
        finished = output.notes(range(len(record.files)))
        with output.scratch() as scratch:
            for file in range(number - 1, len(record.files), num_parts):
                if file not in finished:
                    output.add(scratch, file, write_file(scratch, file))
        notes = output.notes(range(len(record.files)))
        if num_missing := len(record.files) - len(notes):
            return f"part {number}/{num_parts} is finished, {num_missing} files are missing"
        if message := _finish_job(output, record, notes):
            return message


def _save(output: LocalOutput, contents: Mapping[str, bytes]) -> str:
    with output.scratch() as scratch:
        for name, data in contents.items():
            STORAGE.write_file(os.path.join(scratch, name), data)
        output.commit(scratch)
    return "OUT is made"


def _finish_job(output: LocalOutput, record: JobRecord, notes: Mapping[int, FileNote]) -> str:
    """Commit, and return the message; empty if files were damaged, and have to be written again."""
    damaged = [number for number, note in notes.items() if note["content"].startswith(_BAD.decode())]
    if damaged:
        output.forget(damaged)
        return ""
    with output.scratch() as scratch:
        for name, data in record.draft.items():
            STORAGE.write_file(os.path.join(scratch, name), data, is_synced=False)
        output.commit(scratch)
    return "OUT is made"


def _commit_job(output: LocalOutput) -> str:
    jobs = local.status(OUT)
    record = output.join() if jobs else None
    if record is None:
        return "nothing to commit"
    if record.hash != jobs[0].record.hash:
        raise JobEnded(OUT, is_committed=False)
    record = jobs[0].record  # with the draft
    return _finish_job(output, record, output.notes(range(len(record.files)))) or "files are damaged"


def _answer(run: Callable[[], str], *, exist_ok: bool = False) -> str:
    try:
        return run()
    except JobEnded as error:
        if not error.is_committed:
            raise
        return "OUT was made by another process"
    except OutputExists:
        if not exist_ok:
            raise
        return "OUT exists"


def _output(overwrite: bool) -> LocalOutput:
    def may_replace(path: str, new: str) -> None:
        if not overwrite:
            raise OutputExists("OUT exists")
        if names := _foreign_files(path, new):
            raise OutputExists(f"OUT has files of a person: {', '.join(names)}")

    return local.LocalOutput(OUT, may_replace=may_replace, foreign_files=_foreign_files, overwrite=overwrite)


def _foreign_files(path: str, new: str) -> list[str]:
    return [name for name in STORAGE.listdir(path) if name not in _NAMES]
