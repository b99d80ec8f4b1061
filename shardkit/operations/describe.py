"""Write and copy files into an output, and return the manifest's entry for each."""

from __future__ import annotations

import logging
import os

from shardkit.core.text import escape
from shardkit.files import manifest, storage
from shardkit.files.digest import crc32
from shardkit.operations.companions import FileToCopy, copy_file

_log = logging.getLogger("shardkit")


class OutputFiles:
    """Writes the files of an output that do not contain tensors. May be used from several threads.

    Args:
        directory: directory of the output.
        digest: compute the CRC-32 of each file.
        sha256: compute the sha256 of each file, too.
    """

    def __init__(self, directory: str, *, digest: bool, sha256: bool) -> None:
        self.directory = directory
        self._digest, self._sha256 = digest, sha256
        self.copies: list[tuple[str, str, int | None]] = []
        """(name, path in the source, CRC-32) of each copied file."""

    def describe(self, name: str, data: bytes) -> manifest.ListedFile:
        """Return the manifest's entry for a file with this content."""
        return manifest.describe_bytes(name, data, digest=self._digest, sha256=self._sha256)

    def write(self, name: str, data: bytes, *, path: str | None = None) -> manifest.ListedFile:
        """Write a file, without syncing it (the commit does); return its manifest entry.

        Args:
            name: name relative to the directory.
            data: content of the file.
            path: the source file with this content, or None.
        """
        if folder := os.path.dirname(name):
            storage.make_folders(self.directory, folder)
        storage.write_file(os.path.join(self.directory, name), data, is_synced=False)
        if path is not None:
            self.copies.append((name, path, int(crc32(data))))
            _log.debug("copied %s", escape(path))
        return self.describe(name, data)

    def copy(self, file: FileToCopy, path: str, *, is_recorded: bool = False) -> manifest.ListedFile:
        """Copy a file block by block; return its manifest entry.

        Args:
            file: name relative to the directory, and the expected stamp.
            path: path of the source file.
            is_recorded: the source records a CRC-32 of this file, so it is computed in any case, for comparison.

        Raises:
            IntegrityError, ResourceError: as `copy_file`.
        """
        digest = self._digest or is_recorded
        crc, sha256 = copy_file(path, file, self.directory, digest=digest, sha256=self._sha256)
        self.copies.append((file.name, path, crc))
        _log.debug("copied %s", escape(path))
        crc = crc if self._digest else None
        return manifest.ListedFile(name=file.name, size=file.stamp.size, crc32=crc, sha256=sha256)
