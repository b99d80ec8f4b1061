"""Writers with a mistake in them, of the kinds that only a power loss shows."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

from shardkit.files import manifest, storage
from shardkit.files.output.local import LocalOutput


def _sync_only(wanted: Callable[[int], bool]) -> None:
    fsync = storage.fsync
    storage.fsync = lambda fd: fsync(fd) if wanted(fd) else None


def files_are_not_synced() -> None:
    _sync_only(lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode))


def data_is_not_synced() -> None:
    """Notes, descriptions and directories are."""
    _sync_only(lambda fd: not os.readlink(f"/proc/self/fd/{fd}").endswith((".distcp", ".safetensors")))


def descriptions_are_not_synced() -> None:
    _sync_only(lambda fd: not os.readlink(f"/proc/self/fd/{fd}").endswith((".json", ".note")))


def directories_are_not_synced() -> None:
    storage.sync_directories = lambda path: None


def folders_are_not_synced() -> None:
    """Only the outermost directory is."""
    storage.sync_directories = storage.sync_directory


def parent_is_not_synced() -> None:
    sync = storage.sync_directory
    storage.sync_directory = lambda path: sync(path) if ".shardkit-" in path else None


def directories_are_synced_after_the_rename() -> None:
    commit, sync = LocalOutput.commit, storage.sync_directories

    def late(self: LocalOutput, beside: str) -> None:
        storage.sync_directories = lambda path: None
        commit(self, beside)
        sync(self.path)

    LocalOutput.commit = late  # type: ignore[method-assign]


def manifest_comes_after_the_rename() -> None:
    commit = LocalOutput.commit

    def late(self: LocalOutput, beside: str) -> None:
        path = os.path.join(beside, manifest.NAME)
        with open(path, "rb") as file:
            data = file.read()
        storage.unlink(path)
        commit(self, beside)
        storage.write_file(os.path.join(self.path, manifest.NAME), data)
        storage.sync_directory(self.path)

    LocalOutput.commit = late  # type: ignore[method-assign]


def parts_are_not_synced() -> None:
    """Notes that say that files are finished are."""
    data_is_not_synced()


def exchange_of_parts_is_not_synced() -> None:
    parent_is_not_synced()


MUTATIONS = {
    make.__name__: make
    for make in (
        files_are_not_synced,
        data_is_not_synced,
        descriptions_are_not_synced,
        directories_are_not_synced,
        folders_are_not_synced,
        parent_is_not_synced,
        directories_are_synced_after_the_rename,
        manifest_comes_after_the_rename,
        parts_are_not_synced,
        exchange_of_parts_is_not_synced,
    )
}
