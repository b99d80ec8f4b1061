"""Checks on where an operation is about to write, before it reads or writes anything."""

from __future__ import annotations

import os
import shutil

from shardkit import manifest
from shardkit.core.text import escape
from shardkit.core.units import format_size
from shardkit.errors import ResourceError, UsageError
from shardkit.transfer.staging import reclaimable_bytes

_MAX_NAME_BYTES = 255  # NAME_MAX of every file system in use


def check_destination(output: str, source: str | None, *, overwrite: bool) -> str:
    """Return the absolute path of a destination that may be written.

    Args:
        output: as the user gave it.
        source: directory that is read, or None for one in a cache of its own.
        overwrite: an existing checkpoint may be replaced; nothing else ever is.

    Raises:
        UsageError: it exists, or lies in, on or around the source.
        ResourceError: its parent does not exist or cannot be written.
    """
    path = os.path.join(
        os.path.realpath(os.path.dirname(os.path.abspath(output))), os.path.basename(os.path.abspath(output))
    )
    shown = escape(output)
    if source is not None:
        _check_apart(path, os.path.realpath(source), shown)
    if os.path.islink(path):
        raise UsageError(f"{shown} is a symbolic link", hint="give the directory's own path")
    if os.path.lexists(path):
        _check_replaceable(path, shown, overwrite)
    parent = os.path.dirname(path)
    if len(os.fsencode(os.path.basename(path))) > _MAX_NAME_BYTES:
        raise UsageError(f"the name {shown} is longer than {_MAX_NAME_BYTES} bytes")
    if not os.path.isdir(parent):
        raise ResourceError(f"{escape(parent)} does not exist", hint=f"create it: mkdir -p {escape(parent)}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ResourceError(f"{escape(parent)} cannot be written", hint="choose another destination")
    return path


def _check_apart(path: str, source: str, shown: str) -> None:
    nested = os.path.commonpath([path, source])
    if nested in (path, source):
        relation = "is" if path == source else "lies inside" if nested == source else "contains"
        raise UsageError(
            f"the destination {shown} {relation} the source", hint="choose a destination of its own"
        )


def _check_replaceable(path: str, shown: str, overwrite: bool) -> None:
    if not overwrite:
        raise UsageError(f"{shown} exists", hint="choose another name, or pass --overwrite to replace it")
    is_checkpoint = any(os.path.isfile(os.path.join(path, name)) for name in (manifest.NAME, ".metadata"))
    if not (is_checkpoint or (os.path.isdir(path) and not os.listdir(path))):
        raise UsageError(
            f"{shown} exists and is not a sharded checkpoint: it is not replaced",
            hint="--overwrite replaces only a directory with shardkit.json or .metadata in it",
        )


def free_bytes(path: str) -> int:
    """Return the bytes free for this user on the file system of a destination's parent."""
    return shutil.disk_usage(os.path.dirname(path)).free


def check_space(path: str, needed_bytes: int) -> None:
    """Refuse to begin what cannot end. What dead runs left beside `path` counts as free.

    Raises:
        ResourceError: with needed and free bytes.
    """
    free = free_bytes(path) + reclaimable_bytes(path)
    if needed_bytes > free:
        raise ResourceError(
            f"No space left for {escape(path)}: {format_size(needed_bytes)} ({needed_bytes} bytes) are needed, "
            f"{format_size(free)} ({free} bytes) are available",
            hint="free some space or choose another file system",
        )
