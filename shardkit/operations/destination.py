"""Checks on where an operation is about to write, before it reads or writes anything."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable

from shardkit.core.text import escape, format_size, listed
from shardkit.errors import ResourceError, ShardkitError, UsageError
from shardkit.files import manifest
from shardkit.files.staging import reclaimable_bytes, recover
from shardkit.formats.hub.assets import is_asset, is_asset_folder

_MAX_NAME_BYTES = 255  # NAME_MAX of every file system in use
_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_BESIDE = (manifest.NAME, "adapter_config.json", ".gitattributes")
_METADATA = ".metadata"


Replaceable = Callable[[str], str | None]
"""Tells why a directory may not be replaced, None where it may."""


def is_sharded_checkpoint(path: str) -> str | None:
    """Let only a directory with the manifest or `.metadata` in it be replaced, or a trainer's with ours in its folders."""
    if is_hub_model(path) is None:  # with a manifest of its own, perhaps
        return "holds a Hub model"
    if os.path.isfile(os.path.join(path, _METADATA)) or _has_manifest(path) or _is_resharded(path):
        return None
    return "is not a sharded checkpoint (--overwrite replaces only a directory with shardkit.json or .metadata in it)"


def _has_manifest(path: str) -> bool:
    """True for the manifest of what shardkit wrote, a damaged one too; one that lists somebody's files says nothing."""
    if not os.path.isfile(os.path.join(path, manifest.NAME)):
        return False
    try:
        content = manifest.load(manifest.read_bytes(path), manifest.NAME)
    except ShardkitError:
        return True
    return content.get("kind") != manifest.FileList.kind


def _is_resharded(path: str) -> bool:
    """True for a checkpoint of a trainer that keeps DCP directories in folders, where all of these are ours."""
    from shardkit.formats.registry import recognise

    format = recognise(path)
    if format is None or not format.is_trainers:  # a run's directory, a folder of somebody's own
        return False
    found = [here for here, _, names in os.walk(path) if _METADATA in names]
    return bool(found) and all(os.path.isfile(os.path.join(here, manifest.NAME)) for here in found)


def is_hub_model(path: str) -> str | None:
    """Let only a directory that holds a Hub model, or an adapter, and nothing else be replaced.

    A trainer's run directory has the final model beside all its checkpoints.
    """
    try:
        names = os.listdir(path)
    except OSError as error:
        return f"cannot be listed: {error.strerror}"
    others = sorted(
        name for name in names if not (_WEIGHTS.fullmatch(name) or name in _BESIDE or _is_asset(path, name))
    )
    if others:
        return f"holds what is no part of a Hub model: {listed(others)}"
    return None if any(_WEIGHTS.fullmatch(name) for name in names) else "holds no weights of a Hub model"


def _is_asset(path: str, name: str) -> bool:
    return is_asset_folder(name) if os.path.isdir(os.path.join(path, name)) else is_asset(name)


def check_destination(
    output: str,
    source: str | None,
    *,
    overwrite: bool,
    why_not: Replaceable = is_sharded_checkpoint,
) -> str:
    """Return the absolute path of a destination that may be written.

    What a run that was killed moved aside and did not replace is put back first, as nothing tells better that
    the destination exists.

    Args:
        output: as the user gave it.
        source: directory that is read, or None for one in a cache of its own.
        overwrite: an existing output may be replaced; nothing else ever is.
        why_not: tells an output of the same kind from anything else.

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
    recover(path)
    if os.path.lexists(path):
        check_replaceable(path, shown, overwrite=overwrite, why_not=why_not)
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


def check_replaceable(path: str, shown: str, *, overwrite: bool, why_not: Replaceable) -> None:
    """Refuse to replace what is there, unless it is an empty directory or an output of the same kind.

    Args:
        path: of something that exists.
        shown: how to call it, safe to print.
        overwrite: an existing output may be replaced.
        why_not: tells an output of the same kind from anything else.

    Raises:
        UsageError: with the reason.
    """
    if not overwrite:
        raise UsageError(
            f"{shown} exists", hint="choose another name, or replace it: --overwrite (overwrite=True)"
        )
    if not os.path.isdir(path):
        raise UsageError(f"{shown} exists and is not a directory: it is not replaced")
    reason = why_not(path) if os.listdir(path) else None
    if reason is not None:
        raise UsageError(
            f"{shown} exists and {reason}: it is not replaced",
            hint="choose another name, or remove it yourself",
        )


def free_bytes(path: str) -> int:
    """Return the bytes free for this user on the file system of a destination's parent."""
    return shutil.disk_usage(os.path.dirname(path)).free


def check_space(path: str, needed_bytes: int, *, resume_from: str | None = None) -> None:
    """Refuse to begin what cannot end. What dead runs left beside `path` counts as free.

    Args:
        path: absolute.
        needed_bytes: of everything that is to be written.
        resume_from: a staging directory that is resumed from; it counts as free too.

    Raises:
        ResourceError: with needed and free bytes.
    """
    free = free_bytes(path) + reclaimable_bytes(path, resume_from)
    if needed_bytes > free:
        raise ResourceError(
            f"No space left for {escape(path)}: {format_size(needed_bytes)} ({needed_bytes} bytes) are needed, "
            f"{format_size(free)} ({free} bytes) are available",
            hint="free some space or choose another file system",
        )
