"""Where a verb may write: a directory, or a single file that appears whole or not at all.

In a store:

    sharded checkpoint    OUT/.metadata            the marker, which names what lies in data-<hash>
                          OUT/data-<hash>/...      everything else
    Hub model             OUT/model.safetensors.index.json    the marker, which names files with the hash in their names
                          OUT/...                             everything else

The marker is put last, by one request that succeeds only if nobody was faster: that is the commit.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Sequence

from shardkit.core.mesh import MAIN_AXES, Mesh
from shardkit.core.text import escape, format_size, in_shell, listed
from shardkit.errors import ResourceError, UsageError
from shardkit.files import manifest, storage, stores
from shardkit.files.links import is_snapshot
from shardkit.files.location import location_of
from shardkit.files.output.contract import OutputExists
from shardkit.files.output.local import is_free, output_of
from shardkit.files.remote.objects import Objects
from shardkit.files.stores import WRITTEN_TO
from shardkit.formats.owned import OutputKind, RunFiles, replacement_refusal

_MAX_NAME_BYTES = 255  # NAME_MAX of every file system in use
_CHOOSE, _CHOOSE_IN_IT = "choose another name", "choose a directory in it"
_OR_REPLACE = ", replace it with --overwrite, or leave it as it is with --exist-ok"
KEEP_OR_REPLACE = _CHOOSE + _OR_REPLACE


def check_destination(
    output: str,
    source: str | None,
    *,
    overwrite: bool,
    kind: OutputKind | None = OutputKind.SHARDED,
    files: RunFiles | None = None,
    named_after: str | None = None,
) -> str:
    """Return the absolute path of a destination that may be written.

    Args:
        output: as the user gave it.
        source: the directory that is read, or None if it lies in a cache of its own.
        overwrite: an existing output may be replaced. Nothing else ever is.
        kind: of what is written; None if what is there stays, whatever it is.
        files: as for `owned.find_foreign`.
        named_after: the path that gave `output` its name; None if a person named it. Checkpoints of two runs may have
            one name: the hint has another one then.

    Raises:
        UsageError: it exists, or holds what shardkit did not write, or is the source, lies in it or around it; or it is
            an address that is no store's.
        ResourceError: its parent directory is missing or cannot be written.
    """
    if not output:  # an unset variable in a script is not a request for the default
        raise UsageError(
            "the output is an empty path", hint="name a directory, or leave it out for the default"
        )
    if "://" in output:
        raise UsageError(
            f"{escape(output)}: shardkit writes to no such address",
            hint=f"choose a local directory, or an address that begins with {WRITTEN_TO}",
        )
    path, shown = absolute(output), escape(output)
    if (job_output := output_of(path)) is not None:
        raise UsageError(f"{shown} lies in the directory of the job for {escape(job_output)}", hint=_CHOOSE)
    if source is not None:
        check_apart(path, source, shown)
    if storage.islink(path):
        raise UsageError(f"{shown} is a symbolic link", hint="give the directory's own path")
    if storage.lexists(path):
        another = None if named_after is None else _longer_name(output, named_after)
        check_replaceable(path, shown, overwrite=overwrite, kind=kind, files=files, another=another)
    if len(os.fsencode(os.path.basename(path))) > _MAX_NAME_BYTES:
        raise UsageError(f"the name {shown} is longer than {_MAX_NAME_BYTES} bytes")
    _check_parent(path)
    return path


def absolute(output: str) -> str:
    """Return the path of a destination, with all links above it resolved."""
    path = storage.absolute(output)
    return os.path.join(storage.realpath(os.path.dirname(path)), os.path.basename(path))


def _check_parent(path: str) -> None:
    parent = os.path.dirname(path)
    if not storage.isdir(parent):
        raise ResourceError(
            f"{escape(parent)} does not exist", hint=f"create it: `mkdir -p {in_shell(parent)}`"
        )
    if not storage.access(parent, os.W_OK | os.X_OK):
        raise ResourceError(f"{escape(parent)} cannot be written", hint="choose another destination")


def check_replaceable(
    path: str,
    shown: str,
    *,
    overwrite: bool,
    kind: OutputKind | None,
    files: RunFiles | None,
    another: str | None = None,
) -> None:
    """Refuse to replace what is there, unless it is an empty directory, or an output that holds nothing of a person's.

    Args:
        path: of something that exists.
        shown: its name in messages, safe to print.
        overwrite: an existing output may be replaced. An empty directory is replaced in any case.
        kind: of what is written; None if what is there stays, whatever it is.
        files: as for `owned.find_foreign`.
        another: a name to suggest in its place.

    Raises:
        OutputExists: with the reason.
        ResourceError: it cannot be looked into, or its user may not write it.
    """
    choose = f"{_CHOOSE}, such as {escape(another)}" if another else _CHOOSE
    if not storage.isdir(path):
        apart = f"{choose}, or remove it yourself"
        raise OutputExists(f"{shown} exists and is not a directory: it is not replaced", hint=apart)
    if storage.ismount(path):  # no rename can replace it, with or without --overwrite
        raise OutputExists(f"{shown} is a mount point: it cannot be replaced", hint=_CHOOSE_IN_IT)
    if is_free(path):
        if _is_working_directory(path):  # a shell in it would stay in what was replaced
            raise OutputExists(f"{shown} is the working directory: it is not replaced", hint=_CHOOSE_IN_IT)
        return
    refused = None if kind is None else replacement_refusal(path, shown, kind, files)
    if not overwrite:
        raise OutputExists(f"{shown} exists", hint=choose if refused else choose + _OR_REPLACE)
    if refused is not None:
        raise refused
    if kind is not None and not storage.access(path, os.W_OK):
        raise ResourceError(f"{shown} cannot be written: it is not replaced", hint=_CHOOSE)


def _is_working_directory(path: str) -> bool:
    try:
        return os.path.samestat(storage.stat(path), storage.stat(os.curdir))
    except OSError:  # one of them is gone
        return False


_OF_A_MESH = re.compile(rf"(?<=.)(-({'|'.join(MAIN_AXES)})\d+)+$")
_SUFFIXES = (".safetensors.index.json", ".bin.index.json", ".safetensors", ".ckpt", ".pth", ".bin", ".pt")


def label_of(checkpoint: str) -> str:
    """Return the name of a checkpoint without what says that it is one: `run/last.ckpt` -> `last`."""
    name = os.path.basename(storage.absolute(checkpoint))
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name) or name or "model"


def default_output(label: str, source: str | None, mesh: Mesh) -> str:
    """Return a name made of label and mesh: "Qwen3-8B-dp_shard32", "last-dp_replicate2-dp_shard16".

    The mesh takes the place of another one in the label: "last-dp_shard16" becomes "last-dp_shard32".

    Args:
        label: of what is written.
        source: what is read; None if it lies in a cache.
        mesh: that it is written for.
    """
    axes = str(mesh).replace("=", "").split(",")
    name = "-".join([_OF_A_MESH.sub("", label), *axes])
    if name == label:  # the source's own name
        name = "-".join([label, *axes])
    return default_place(name, source)


def default_place(name: str, source: str | None) -> str:
    """Return where an output lies that nobody has named: in the working directory, or beside a source that lies around it.

    Args:
        name: of the output.
        source: what is read; None if it lies in a cache.
    """
    if source is None or is_snapshot(source):  # beside it lies the Hub's cache
        return name
    home = storage.realpath(source)
    is_around = f"{os.getcwd()}/".startswith(f"{home.rstrip('/')}/")
    return os.path.join(os.path.dirname(home), name) if is_around else name


def _longer_name(output: str, named_after: str) -> str | None:
    """Return a name that is free: a default one after the names of the directories around its source, `run2-step-30`."""
    directory, name = os.path.split(output)
    around = os.path.dirname(storage.absolute(named_after))
    while parent := os.path.basename(around):
        around = os.path.dirname(around)
        if name.startswith(f"{parent}-"):  # a file, named after its directory
            continue
        name = f"{parent}-{name}"
        path = os.path.join(directory, name)
        if not storage.lexists(path):
            return path
    return None


def free_bytes(path: str) -> int:
    """Return the bytes that are free for this user on a destination's file system. Its directory may be missing."""
    return storage.disk_usage(storage.nearest_existing(os.path.dirname(path))).free


def check_space(
    path: str,
    needed_bytes: int,
    *,
    hint: str = "free some space or choose another file system",
) -> None:
    """Refuse to begin what cannot end.

    Args:
        path: absolute.
        needed_bytes: room for everything that is to be written.
        hint: what to do if there is less.

    Raises:
        ResourceError: there is less room; the message has both sizes.
    """
    free = free_bytes(path)
    if needed_bytes > free:
        raise ResourceError(
            f"No space left for {escape(path)}: {format_size(needed_bytes)} ({needed_bytes} bytes) are needed, "
            f"{format_size(free)} ({free} bytes) are available",
            hint=hint,
        )


def check_sidecar(
    path: str,
    *,
    overwrite: bool,
    outside: Sequence[str] = (),
    is_ours: Callable[[str], bool] = manifest.is_manifest,
) -> str:
    """Return the absolute path of a file that may be written.

    Args:
        path: as the user gave it.
        overwrite: an existing file may be replaced, if it is ours.
        outside: directories that it must not lie in.
        is_ours: tells a file of shardkit's from a person's.

    Raises:
        UsageError: it exists, or is a person's, or is not a file, or lies in one of those directories.
        ResourceError: its directory is missing or cannot be written.
    """
    full, shown = os.path.abspath(path), escape(path)
    if "://" in path:
        raise UsageError(
            f"{shown}: this is written to local paths alone",
            hint="choose a local path, and copy it with the store's own tool",
        )
    for directory in outside:
        home = storage.realpath(directory)
        if os.path.join(storage.realpath(full), "").startswith(os.path.join(home, "")):
            raise UsageError(f"{shown} lies in {escape(directory)}", hint="choose a place outside it")
    _check_file(full, shown, is_ours if overwrite else None)
    _check_parent(full)
    return full


def _check_file(path: str, shown: str, is_ours: Callable[[str], bool] | None) -> None:
    """Refuse to replace what is not ours; anything, if there is nothing to say what is."""
    if not storage.lexists(path):
        return
    if storage.islink(path) or not storage.isfile(path):
        raise UsageError(f"{shown} exists and is not a regular file: it is not replaced")
    if is_ours is None:
        raise UsageError(f"{shown} exists", hint=_CHOOSE + _OR_REPLACE)
    if not is_ours(path):
        raise UsageError(
            f"{shown} exists, and shardkit did not write it: it is not replaced",
            hint="move that file somewhere else, or choose another name",
        )


def write_sidecar(
    path: str,
    data: bytes,
    *,
    overwrite: bool,
    is_ours: Callable[[str], bool] = manifest.is_manifest,
) -> None:
    """Write a file beside its place, sync it, and only then give it its name.

    Args:
        path: absolute, and checked by `check_sidecar`.
        data: the whole content.
        overwrite: an existing file is replaced, if it is ours; asked again, since it may have appeared meanwhile.
        is_ours: as for `check_sidecar`.

    Raises:
        UsageError: it exists, or is a person's.
        ResourceError: the system refuses.
    """
    directory, name = os.path.split(path)
    written = os.path.join(directory, f".{secrets.token_hex(8)}.{name[: _MAX_NAME_BYTES // 4]}.part")
    try:
        storage.write_file(written, data)
        if overwrite:
            _check_file(path, escape(path), is_ours)
        (storage.rename if overwrite else storage.rename_noreplace)(written, path)
        storage.sync_directory(directory)
    except FileExistsError as error:
        raise UsageError(f"{escape(path)} appeared while it was being written") from error
    except OSError as error:
        way_out = storage.WAYS_OUT.get(error.errno)
        raise ResourceError(f"cannot write {escape(path)}: {error.strerror}", hint=way_out) from error
    finally:
        with contextlib.suppress(OSError):
            storage.unlink(written)


def check_target(
    output: str,
    source: str | None,
    kind: OutputKind,
    *,
    overwrite: bool,
    files: RunFiles | None = None,
    looks: bool = True,
) -> tuple[str, bool]:
    """Return the address of an output in a store, and whether one of its kind is there.

    Args:
        output: as the user gave it.
        source: what is read, or None if it lies in a cache of its own.
        kind: of what is written.
        overwrite: an output that is there is going to be replaced.
        files: as for `owned.find_foreign`.
        looks: refuse files that are not shardkit's, beside which nothing is written, or which would be replaced.

    Raises:
        UsageError: it holds something else; it is the source, lies in it or around it; the store can only be read.
        ResourceError: the store does not answer.
    """
    shown = escape(output)
    if not location_of(output).is_writable:
        raise UsageError(
            f"{shown}: this store is read only so far",
            hint="write to s3://, gs:// or az://, or to a local directory",
        )
    path = stores.plain(output)
    if source is not None:
        check_apart(path, source, shown)
    is_there = Objects(path).head(kind.value) is not None
    stores.forget()
    refused = replacement_refusal(path, shown, kind, files) if looks and (overwrite or not is_there) else None
    if refused is not None:
        raise refused
    return path, is_there


def check_same(path: str, data: bytes) -> None:
    """Refuse to write a file where another one lies.

    Args:
        path: of an object.
        data: what is going to be written there.

    Raises:
        UsageError: it exists, and is something else.
    """
    directory, _, name = path.rpartition("/")
    stored_file = Objects(directory).get(name)
    if stored_file is not None and stored_file.data != data:
        raise OutputExists(
            f"{escape(path)} exists, and is not what is written there",
            hint="choose another name, or replace the output: --overwrite",
        )


def check_one_folder(folders: Sequence[str]) -> None:
    """Refuse a checkpoint whose parts lie in folders: no single request makes all of them visible.

    Raises:
        UsageError: it is one.
    """
    if list(folders) != [""]:
        raise UsageError(
            f"this checkpoint lies in folders ({listed(list(folders))}), which a store cannot make visible all at once",
            hint="write it into a local directory, and copy that with the store's own tool",
        )


def check_apart(path: str, source: str, shown: str) -> None:
    """Refuse a destination that is the source, lies in it or around it.

    Raises:
        UsageError: it does.
    """
    mine, source_folder = (f"{each.rstrip('/')}/" for each in (path, storage.realpath(source)))
    if mine.startswith(source_folder) or source_folder.startswith(mine):
        relation = (
            "is" if mine == source_folder else "lies inside" if mine.startswith(source_folder) else "contains"
        )
        raise UsageError(
            f"the destination {shown} {relation} the source", hint="choose a destination apart from it"
        )
