"""A directory against a repo on the Hub: the ids that the Hub has of its files, and nothing downloaded."""

from __future__ import annotations

import hashlib
import os
from functools import partial

from shardkit.errors import ResourceError, SourceError
from shardkit.files.file_bytes import ByteReader
from shardkit.files.strict_json import open_regular
from shardkit.formats.hub.repo import RepoFile, list_repo
from shardkit.operations.verify.in_threads import in_threads
from shardkit.operations.verify.listing import list_files
from shardkit.operations.verify.result import Report

_LEFT_OUT = (".gitattributes", "shardkit.json")
"""What the Hub, or shardkit, puts beside a model without being part of it."""


def compare_with_repo(directory: str, repo_id: str, revision: str | None, jobs: int, report: Report) -> str:
    """Hold the files of a directory against those of a repo.

    Args:
        directory: with the files; or one file.
        repo_id: `organisation/name`.
        revision: branch, tag or commit; None is the default branch.
        jobs: threads.
        report: gets files that differ, are missing, or that the repo does not have.

    Returns:
        The commit.

    Raises:
        UsageError: huggingface_hub is told to stay offline.
        SourceError: not a repo id, no such repo or revision.
        ResourceError: no network.
    """
    commit, remote = list_repo(repo_id, revision=revision)
    is_one_file = not os.path.isdir(directory)
    home = (os.path.dirname(directory) or os.curdir) if is_one_file else directory
    local = list_files(home, follow=True)
    names = [os.path.basename(directory)] if is_one_file else [*local.files]
    held = {name: local.files[name] for name in names if name in local.files}
    wanted = names if is_one_file else remote
    for name in sorted({*held, *wanted}):
        if name in held and name in remote:
            if held[name] != remote[name].size:
                expected, found = str(remote[name].size), str(held[name])
                report.problem("size in bytes in the repo", file=name, expected=expected, found=found)
        elif name not in _LEFT_OUT:
            which = "extra: the repo has no such file" if name in held else "missing: the repo has it"
            report.problem(which, file=name)
    same_size = [n for n in held if n in remote and held[n] == remote[n].size]
    report.progress.start(sum(held[name] for name in same_size), "hash")
    try:
        tasks = [partial(_compare, os.path.join(home, name), remote[name]) for name in same_size]
        in_threads(tasks, jobs, report)
    finally:
        report.progress.finish()
    return commit


def _compare(path: str, remote: RepoFile, report: Report) -> None:
    """Compare the id of a file with that in the repo: sha256 for large ones, git's for small ones."""
    try:
        with open_regular(path, remote.name) as (fd, size):
            reader = ByteReader(fd, remote.name, size, report.read, ahead=True)
            if remote.sha256 is not None:
                hashed, kind, expected = hashlib.sha256(), "sha256", remote.sha256
            else:
                hashed, kind, expected = hashlib.sha1(usedforsecurity=False), "git id", remote.git_id
                # man git-hash-object: the type, the size in decimal, a NUL, then the content
                hashed.update(b"blob %d\0" % size)
            reader.update(hashed)
    except ResourceError as error:
        report.unreadable(error, file=remote.name)
        return
    except SourceError as error:
        report.error(error, file=remote.name)
        return
    report.num_checked_files += 1
    if hashed.hexdigest() != expected:
        report.problem(
            f"{kind} of the file in the repo", file=remote.name, expected=expected, found=hashed.hexdigest()
        )
