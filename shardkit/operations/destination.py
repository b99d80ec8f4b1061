"""Checks of a destination, default names for outputs, and single files beside an output (`--manifest-file`).

An output in a store:

    sharded checkpoint    OUT/.metadata            the marker, which names the files in data-<hash>
                          OUT/data-<hash>/...      all other files
    Hub model             OUT/model.safetensors.index.json    the marker, which names files with the hash in their names
                          OUT/...                             all other files

The marker is put last, by one conditional request: that is the commit (`files/output/bucket`).
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
        output: the user's path.
        source: the directory that is read, or None for one in the Hub's cache.
        overwrite: an existing output of shardkit may be replaced. Nothing else ever is.
        kind: of the output; None if an existing one stays, so that its content does not matter.
        files: as for `owned.find_foreign`.
        named_after: the path after which `output` was named, or None if the user named it. Checkpoints of two runs may
            have one name; then the hint has a longer one.

    Raises:
        UsageError: it exists; or has files that shardkit did not write; or is the source, or lies inside or around it; or
            it is an address of an unknown scheme.
        ResourceError: its parent directory is missing or not writable.
    """
    if not output:  # probably an unset variable in a script, so the default name would be wrong
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
    """Raise ResourceError unless the directory above a destination exists and may be written."""
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
    """Refuse to replace an existing path, unless it is an empty directory, or an output without foreign files.

    Args:
        path: exists.
        shown: the path in messages, escaped.
        overwrite: an existing output may be replaced. An empty directory is replaced in any case.
        kind: of the new output; None if the existing one stays, so that its content does not matter.
        files: as for `owned.find_foreign`.
        another: a free name to suggest.

    Raises:
        OutputExists: with the reason.
        ResourceError: the directory cannot be read, or not be written by this user.
    """
    choose = f"{_CHOOSE}, such as {escape(another)}" if another else _CHOOSE
    if not storage.isdir(path):
        apart = f"{choose}, or remove it yourself"
        raise OutputExists(f"{shown} exists and is not a directory: it is not replaced", hint=apart)
    if storage.ismount(path):  # no rename can replace it, with or without --overwrite
        raise OutputExists(f"{shown} is a mount point: it cannot be replaced", hint=_CHOOSE_IN_IT)
    if is_free(path):
        if _is_working_directory(path):  # a shell in it would remain in the replaced directory
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
    """Return the name of a checkpoint without its file suffix: `run/last.ckpt` -> `last`."""
    name = os.path.basename(storage.absolute(checkpoint))
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name) or name or "model"


def default_output(label: str, source: str | None, mesh: Mesh) -> str:
    """Return a name for an output: label and mesh, such as "Qwen3-8B-dp_shard32" or "last-dp_replicate2-dp_shard16".

    A mesh at the end of the label is replaced: "last-dp_shard16" becomes "last-dp_shard32".

    Args:
        label: the name of the model or checkpoint.
        source: the directory that is read, or None for one in the Hub's cache.
        mesh: of the output.
    """
    axes = str(mesh).replace("=", "").split(",")
    name = "-".join([_OF_A_MESH.sub("", label), *axes])
    if name == label:  # the name of the source itself
        name = "-".join([label, *axes])
    return default_place(name, source)


def default_place(name: str, source: str | None) -> str:
    """Return the path for a default name: in the working directory; beside the source, if the working directory is in it.

    Args:
        name: of the output.
        source: the directory that is read, or None for one in the Hub's cache.
    """
    if source is None or is_snapshot(source):  # never beside it, in the Hub's cache
        return name
    home = storage.realpath(source)
    is_around = f"{os.getcwd()}/".startswith(f"{home.rstrip('/')}/")
    return os.path.join(os.path.dirname(home), name) if is_around else name


def _longer_name(output: str, named_after: str) -> str | None:
    """Return a free name that begins with parent directories of the source, such as `run2-step-30`; None if all exist."""
    directory, name = os.path.split(output)
    around = os.path.dirname(storage.absolute(named_after))
    while parent := os.path.basename(around):
        around = os.path.dirname(around)
        if name.startswith(f"{parent}-"):  # the source is a file whose name begins with that of its directory
            continue
        name = f"{parent}-{name}"
        path = os.path.join(directory, name)
        if not storage.lexists(path):
            return path
    return None


def free_bytes(path: str) -> int:
    """Return the free bytes for this user on the file system of a path whose directory may not exist yet."""
    return storage.disk_usage(storage.nearest_existing(os.path.dirname(path))).free


def check_space(
    path: str,
    needed_bytes: int,
    *,
    hint: str = "free some space or choose another file system",
) -> None:
    """Refuse to write more than fits.

    Args:
        path: of the output; absolute.
        needed_bytes: of all files that will be written.
        hint: of the error.

    Raises:
        ResourceError: too few bytes are free; the message has both sizes.
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
    """Return the absolute path of a single file that may be written.

    Args:
        path: the user's path.
        overwrite: an existing file of shardkit may be replaced.
        outside: directories in which the file must not lie.
        is_ours: True for the path of a file that shardkit wrote.

    Raises:
        UsageError: the path exists and may not be replaced, or lies in one of those directories.
        ResourceError: its directory is missing or not writable.
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
    """Raise UsageError if a path exists, unless it is a file for which `is_ours` is true."""
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
    """Write a single file under a temporary name, sync it, and rename it.

    Args:
        path: the result of `check_sidecar`.
        data: the content.
        overwrite: an existing file of shardkit is replaced. This is checked again, as the file may be new.
        is_ours: as for `check_sidecar`.

    Raises:
        UsageError: the path exists and may not be replaced.
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
    """Return the address of an output in a store, and whether an output of its kind exists there.

    Args:
        output: the user's address.
        source: the directory that is read, or None for one in the Hub's cache.
        kind: of the output.
        overwrite: an existing output is going to be replaced.
        files: as for `owned.find_foreign`.
        looks: refuse an address with files that shardkit did not write.

    Raises:
        UsageError: the address has foreign files; it is the source, or inside or around it; the store is read only.
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
    """Refuse to replace an object by one of other content.

    Args:
        path: of the object.
        data: the new content.

    Raises:
        UsageError: the object exists and has other content.
    """
    directory, _, name = path.rpartition("/")
    stored_file = Objects(directory).get(name)
    if stored_file is not None and stored_file.data != data:
        raise OutputExists(
            f"{escape(path)} exists, and is not what is written there",
            hint="choose another name, or replace the output: --overwrite",
        )


def check_one_folder(folders: Sequence[str]) -> None:
    """Refuse a checkpoint of several folders: no single request of a store makes all of them visible.

    Raises:
        UsageError: there are several folders.
    """
    if list(folders) != [""]:
        raise UsageError(
            f"this checkpoint lies in folders ({listed(list(folders))}), which a store cannot make visible all at once",
            hint="write it into a local directory, and copy that with the store's own tool",
        )


def check_apart(path: str, source: str, shown: str) -> None:
    """Refuse a destination that is the source, or lies inside or around it.

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
