"""The hash of a job: inputs, options and version. Processes with equal hashes share the finished files of one job."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from shardkit._version import __version__
from shardkit.core.catalog import FileStamp
from shardkit.files import manifest, storage
from shardkit.files.location import location_of
from shardkit.files.strict_json import stamp_at
from shardkit.operations.parts.agreement import Agreement, Command
from shardkit.transfer.images import ImageSet
from shardkit.transfer.plan import TransferPlan

_NOTES = 3
"""Version of the notes' content. It is part of the hash, so that notes of another format are never read."""


class Images(ImageSet, Protocol):
    """Images with the number of data bytes of each."""

    @property
    def data_nbytes(self) -> Sequence[int]:
        """Return the bytes of all holes of each image."""
        ...


class Job(Protocol):
    """The plan of an output."""

    @property
    def plan(self) -> TransferPlan:
        """Return the moves."""
        ...

    @property
    def output(self) -> Images:
        """Return the plan's images."""
        ...

    @property
    def decided(self) -> Mapping[str, object]:
        """Return everything else that affects the output, as plain data; lists may contain a `ReadFile`."""
        ...


class ReadFile(NamedTuple):
    """A source file, and its state."""

    name: str
    path: str
    stamp: FileStamp | None = None
    """None to read it from the file system."""


def ingredients(job: Job) -> dict[str, object]:
    """Return the ingredients of a job's hash, as plain data."""
    files = job.plan.catalog.files
    plain = {file.path for file in files if file.is_raw}
    # An entry for values that are decoded or computed from a file exists only in processes that read them, so it counts
    # only where no plain entry names the same file.
    sources = [
        ReadFile(file.name, file.path, file.stamp) for file in files if file.is_raw or file.path not in plain
    ]
    described: dict[str, object] = {
        **job.decided,
        "version": __version__,
        "sources": sources,
        "images": [(image.name, image.size) for image in job.output],
    }
    for key, value in described.items():
        if isinstance(value, list) and value and isinstance(value[0], ReadFile):
            described[key] = [(file.name, shared_stamp(file)) for file in value]
    return described


def hash_of(described: object) -> str:
    """Return the SHA-256 of plain data, in hex."""
    text = json.dumps(described, sort_keys=True, default=manifest.to_json)
    return hashlib.sha256(text.encode()).hexdigest()


def shared_stamp(file: ReadFile) -> list[int | str] | None:
    """Return the part of a stamp that is equal on all machines, unlike inode and device numbers.

    For a file of the Hub's cache, which each machine may have for itself, it is the name of the blob, which stands for
    the content. For an object of a store it is the hash of the version, which the stamp has as its inode.
    """
    stamp = stamp_at(file.path) if file.stamp is None else file.stamp
    if stamp is None:
        return None
    if location_of(file.path).has_versions:
        return [stamp.size, stamp.inode]
    place, name = os.path.split(storage.realpath(file.path))
    if os.path.basename(place) == "blobs":  # of the Hub's cache
        return [stamp.size, name]
    return [stamp.size, stamp.modified_ns // 1000]  # some file systems keep no more


def agreement_of(job: Job, command: Command) -> Agreement:
    """Return the agreement of a job.

    Args:
        job: the planned output.
        command: the call that planned it.
    """
    made_of = {**ingredients(job), "settings": command.settings(), "notes": _NOTES}
    return Agreement(
        version=__version__,
        command=command,
        ingredients={
            key: dict(value) if key == "sources" and isinstance(value, list) else hash_of(value)
            for key, value in made_of.items()
        },
    )
