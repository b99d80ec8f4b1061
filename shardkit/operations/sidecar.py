"""Writing one file so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from shardkit.core.text import escape
from shardkit.errors import ResourceError, UsageError
from shardkit.files import storage
from shardkit.files.staging import Staging, remove_abandoned


def check_sidecar(path: str, *, overwrite: bool, outside: Sequence[str] = ()) -> str:
    """Return the absolute path of a file that may be written.

    Args:
        path: as the user gave it.
        overwrite: an existing file may be replaced.
        outside: directories that it must not lie in.

    Raises:
        UsageError: it exists, or is no file, or lies in one of those directories.
        ResourceError: its directory does not exist or cannot be written.
    """
    full, shown = os.path.abspath(path), escape(path)
    for directory in outside:
        home = os.path.realpath(directory)
        if os.path.join(os.path.realpath(full), "").startswith(os.path.join(home, "")):
            raise UsageError(f"{shown} lies in {escape(directory)}", hint="choose a place outside of it")
    if os.path.lexists(full):
        if os.path.islink(full) or not os.path.isfile(full):
            raise UsageError(f"{shown} exists and is no regular file: it is not replaced")
        if not overwrite:
            raise UsageError(
                f"{shown} exists", hint="choose another name, or replace it: --overwrite (overwrite=True)"
            )
    parent = os.path.dirname(full)
    if not os.path.isdir(parent):
        raise ResourceError(f"{escape(parent)} does not exist", hint=f"create it: mkdir -p {escape(parent)}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ResourceError(f"{escape(parent)} cannot be written", hint="choose another place")
    return full


def write_sidecar(path: str, data: bytes, *, overwrite: bool) -> None:
    """Write a file beside its place, bring it to the disk, and give it its name.

    Args:
        path: absolute; checked by `check_sidecar`.
        data: all of it.
        overwrite: an existing file is replaced.

    Raises:
        UsageError: it exists.
        ResourceError: the system refuses.
    """
    remove_abandoned(path)
    staging = Staging.create(path)
    written = os.path.join(staging.data, os.path.basename(path))
    with contextlib.ExitStack() as stack:
        stack.callback(staging.discard)
        try:
            storage.write_file(written, data)
            _put(written, path, overwrite=overwrite)
            storage.sync_directory(os.path.dirname(path))
        except FileExistsError as error:
            raise UsageError(f"{escape(path)} appeared while it was being written") from error
        except OSError as error:
            raise ResourceError(f"cannot write {escape(path)}: {error.strerror}") from error


def _put(written: str, path: str, *, overwrite: bool) -> None:
    """Give a file its name, in one step."""
    if overwrite:
        storage.rename(written, path)
    elif not storage.renameat2(written, path, storage.RENAME_NOREPLACE):
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        storage.rename(written, path)
