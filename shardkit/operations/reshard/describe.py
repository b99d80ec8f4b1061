"""What lies beside the resharded files: the description of each folder, and the files that are copied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardkit._version import __version__
from shardkit.files import manifest, storage
from shardkit.formats.recorded import SourceManifests
from shardkit.operations.companions import BesideFile, copy_file
from shardkit.operations.describe_dcp import Descriptions
from shardkit.operations.reshard.job import ReshardJob
from shardkit.transfer.execute import FileDigest


class ReshardDescriptions:
    """Describes every folder. A context manager, as `Descriptions` is.

    Args:
        source: the checkpoint that siblings are copied from.
        job: what is being written.
        manifests: of the source; siblings are compared with them.
        directory: where.
        sha256: take it of every file.
    """

    def __init__(
        self,
        source: str,
        job: ReshardJob,
        manifests: SourceManifests,
        directory: str,
        *,
        sha256: bool = False,
    ) -> None:
        self._source, self._job, self._directory, self._sha256 = source, job, directory, sha256
        self._manifests = manifests
        self._has_digests = any(part.digest != "none" for part in job.folders.values())
        self._stack = contextlib.ExitStack()
        self._of: dict[str, Descriptions] = {}
        for folder, part in job.folders.items():
            place = os.path.join(directory, folder)
            storage.make_directories(place)
            self._of[folder] = self._stack.enter_context(Descriptions(part, place, sha256=sha256))

    def __enter__(self) -> ReshardDescriptions:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add_file(self, digest: FileDigest) -> None:
        """Write the chunk list of a finished file; may be called from any thread."""
        folder, name = os.path.split(digest.name)
        self._of[folder].add_file(replace(digest, name=name))

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Copy what lies beside, then let each folder become a checkpoint."""
        for name in self._job.parts.empty:
            storage.make_directories(os.path.join(self._directory, name))
        copied = [self._copy(file) for file in self._job.parts.files]
        self._manifests.check_copies(
            (entry["name"], os.path.join(self._source, entry["name"]), entry["crc32"]) for entry in copied
        )
        if not self._has_digests:
            copied = [{**entry, "crc32": None} for entry in copied]
        for folder, descriptions in self._of.items():
            own = {
                os.path.basename(name): replace(digest, name=os.path.basename(name))
                for name, digest in digests.items()
                if os.path.dirname(name) == folder
            }
            descriptions.finish(own, scattered, others=() if folder else copied)
        if "" not in self._of:
            self._write_manifest(copied)

    def _copy(self, file: BesideFile) -> dict[str, Any]:
        """Copy a file; return what the manifest says of it."""
        is_listed = self._manifests.crc_of(os.path.join(self._source, file.name)) is not None
        crc, sha256 = copy_file(
            self._source, file, self._directory, digest=self._has_digests or is_listed, sha256=self._sha256
        )
        return manifest.file_entry(file.name, file.stamp.size, crc, sha256)

    def _write_manifest(self, copied: list[dict[str, Any]]) -> None:
        """Write the manifest of the whole: the files beside the folders, and the manifests of those."""
        own = [
            manifest.entry_of(
                os.path.join(folder, manifest.NAME), each.manifest, digest=True, sha256=self._sha256
            )
            for folder, each in self._of.items()
        ]
        content = {
            "format": manifest.FORMAT,
            "kind": manifest.KIND_FILES,
            "tool": {"name": "shardkit", "version": __version__},
            "folders": list(self._of),
            "files": sorted((*copied, *own), key=lambda entry: str(entry["name"])),
            "unlisted": [],
        }
        storage.write_file(os.path.join(self._directory, manifest.NAME), manifest.dump(content))
