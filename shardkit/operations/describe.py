"""Writes and copies files into an output, and describes each as its manifest lists it."""

from __future__ import annotations

import logging
import os

from shardkit.core.text import escape
from shardkit.files import manifest, storage
from shardkit.files.digest import crc32
from shardkit.operations.companions import BesideFile, copy_file

_log = logging.getLogger("shardkit")


class OutputFiles:
    """The files of an output that lie beside those of tensors. May be used from several threads.

    Args:
        directory: where the output goes.
        digest: take the CRC-32 of each.
        sha256: take the sha256 of each too.
    """

    def __init__(self, directory: str, *, digest: bool, sha256: bool) -> None:
        self.directory = directory
        self._digest, self._sha256 = digest, sha256
        self.copies: list[tuple[str, str, int | None]] = []
        """Name, path in the source, and CRC-32 of what was copied."""

    def describe(self, name: str, data: bytes) -> manifest.ListedFile:
        """Return what the manifest says of a file with this content."""
        return manifest.describe_bytes(name, data, digest=self._digest, sha256=self._sha256)

    def write(self, name: str, data: bytes, *, path: str | None = None) -> manifest.ListedFile:
        """Write a file, which the output's commit syncs; return what the manifest says of it.

        Args:
            name: below the directory.
            data: its content.
            path: of the source's file with this content; None if it has none.
        """
        if folder := os.path.dirname(name):
            storage.make_folders(self.directory, folder)
        storage.write_file(os.path.join(self.directory, name), data, is_synced=False)
        if path is not None:
            self.copies.append((name, path, int(crc32(data))))
            _log.debug("copied %s", escape(path))
        return self.describe(name, data)

    def copy(self, file: BesideFile, path: str, *, is_recorded: bool = False) -> manifest.ListedFile:
        """Copy a file block by block; return what the manifest says of it.

        Args:
            file: its name below the directory, and its state.
            path: where it lies.
            is_recorded: its CRC-32 is needed in any case, to compare it with what the source records.

        Raises:
            IntegrityError, ResourceError: as `copy_file`.
        """
        digest = self._digest or is_recorded
        crc, sha256 = copy_file(path, file, self.directory, digest=digest, sha256=self._sha256)
        self.copies.append((file.name, path, crc))
        _log.debug("copied %s", escape(path))
        crc = crc if self._digest else None
        return manifest.ListedFile(name=file.name, size=file.stamp.size, crc32=crc, sha256=sha256)
