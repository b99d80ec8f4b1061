"""Compare the files of a checkpoint with a repo on the Hub, by the ids of its files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import partial

from shardkit.files import storage
from shardkit.files.digest import ByteReader
from shardkit.files.listing import list_files
from shardkit.files.strict_json import open_regular
from shardkit.formats.hub.repo import RepoFile
from shardkit.operations.verify.result import Report, in_threads

_LEFT_OUT = (".gitattributes", "shardkit.json")
"""Files that the Hub or shardkit adds to a model; they may be missing on either side."""


def check_repo(remote: Mapping[str, RepoFile], directory: str, report: Report, jobs: int) -> None:
    """Report the files that differ from those of a repo, that are missing, and that the repo lacks.

    Args:
        remote: the files of the repo, by name.
        directory: the directory with the files, or a single file.
        report: gets the problems.
        jobs: number of threads.
    """
    is_one_file = not storage.isdir(directory)
    home = (os.path.dirname(directory) or os.curdir) if is_one_file else directory
    local_sizes, names = list_files(home, follow=True).files, [*remote]
    if is_one_file:
        names = [os.path.basename(directory)]
        local_sizes = {name: local_sizes[name] for name in names if name in local_sizes}
    for name in sorted({*local_sizes, *names}):
        if name in local_sizes and name in remote:
            if local_sizes[name] != remote[name].size:
                expected, actual = str(remote[name].size), str(local_sizes[name])
                report.problem("size in bytes in the repo", file=name, expected=expected, found=actual)
        elif name not in _LEFT_OUT:
            is_extra = name in local_sizes
            which = "extra: the repo has no such file" if is_extra else "missing: the repo has it"
            report.problem(which, file=name, is_contradiction=is_extra, is_missing=not is_extra)
    alike = [name for name in local_sizes if name in remote and local_sizes[name] == remote[name].size]
    tasks = [partial(_compare, os.path.join(home, name), remote[name]) for name in alike]
    in_threads(report, tasks, jobs, label="hash", total_bytes=sum(local_sizes[name] for name in alike))


def _compare(path: str, remote: RepoFile, report: Report) -> None:
    """Compare a file with its id in the repo: the sha256 of a large file, git's id of a small one."""
    with report.collect_errors(remote.name), open_regular(path, remote.name) as (fd, size):
        reader = ByteReader(fd, remote.name, size, report.read, ahead=True)
        if remote.sha256 is not None:
            hashed, kind, expected = hashlib.sha256(), "sha256", remote.sha256
        else:
            hashed, kind, expected = hashlib.sha1(usedforsecurity=False), "git id", remote.git_id
            # man git-hash-object: the type, the size in decimal, a NUL, then the content
            hashed.update(b"blob %d\0" % size)
        reader.update(hashed)
        report.num_checked_files += 1
        if (digest := hashed.hexdigest()) != expected:
            report.problem(
                f"{kind} of the file in the repo", file=remote.name, expected=expected, found=digest
            )
