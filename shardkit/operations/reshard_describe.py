"""What lies beside the resharded files: the description of each folder, and the files that are copied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace

from shardkit.operations.preshard_describe import Descriptions
from shardkit.operations.reshard_files import copy_file
from shardkit.operations.reshard_job import ReshardJob
from shardkit.transfer import storage
from shardkit.transfer.execute import FileDigest


class ReshardDescriptions:
    """Describes every folder. A context manager, as `Descriptions` is.

    Args:
        source: the checkpoint that siblings are copied from.
        job: what is being written.
        directory: where.
    """

    def __init__(self, source: str, job: ReshardJob, directory: str) -> None:
        self._source, self._job, self._directory = source, job, directory
        self._stack = contextlib.ExitStack()
        self._of: dict[str, Descriptions] = {}
        for folder, part in job.folders.items():
            place = os.path.join(directory, folder)
            storage.make_directories(place)
            self._of[folder] = self._stack.enter_context(Descriptions(part, place))

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
        for file in self._job.parts.files:
            copy_file(self._source, file, self._directory)
        for folder, descriptions in self._of.items():
            own = {
                os.path.basename(name): replace(digest, name=os.path.basename(name))
                for name, digest in digests.items()
                if os.path.dirname(name) == folder
            }
            descriptions.finish(own, scattered)
