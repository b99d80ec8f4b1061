"""What a job is, for its hash: of one that is equal, what others have finished counts."""

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
"""What parts note of their files; those of another version of shardkit may not be put together with ours."""


class Images(ImageSet, Protocol):
    """Images that know how much of each is data."""

    @property
    def data_nbytes(self) -> Sequence[int]:
        """Bytes of all holes of each image."""
        ...


class Job(Protocol):
    """Something decided that is to be carried out."""

    @property
    def plan(self) -> TransferPlan:
        """What to move."""
        ...

    @property
    def output(self) -> Images:
        """The plan's images."""
        ...

    @property
    def decided(self) -> Mapping[str, object]:
        """Whatever decides what is written, beside sources and images, as plain data; a `ReadFile` may be in a list."""
        ...


class ReadFile(NamedTuple):
    """A file that is read, and its state."""

    name: str
    path: str
    stamp: FileStamp | None = None
    """None if it is to be asked for."""


def ingredients(job: Job) -> dict[str, object]:
    """Return the ingredients of a job's hash, as plain data: inputs, options and the version of shardkit."""
    files = job.plan.catalog.files
    plain = {file.path for file in files if file.is_raw}
    # What is decoded or computed of a file is known to those processes alone that read it.
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
    """Return a digest of plain data."""
    text = json.dumps(described, sort_keys=True, default=manifest.to_json)
    return hashlib.sha256(text.encode()).hexdigest()


def _stamp(file: ReadFile) -> FileStamp | None:
    """Return the stamp of a source file: another file may have its name and size."""
    return stamp_at(file.path) if file.stamp is None else file.stamp


def shared_stamp(file: ReadFile) -> list[int | str] | None:
    """Return a stamp that is the same on all machines: numbers of inodes and devices are not.

    In the Hub's cache a file is named after its content, and each machine may have a cache of its own. What stands for the
    inode of an object in a store is its version.
    """
    stamp = _stamp(file)
    if stamp is None:
        return None
    if location_of(file.path).has_versions:
        return [stamp.size, stamp.inode]
    place, name = os.path.split(storage.realpath(file.path))
    if os.path.basename(place) == "blobs":
        return [stamp.size, name]
    return [stamp.size, stamp.modified_ns // 1000]  # some file systems keep no more


def agreement_of(job: Job, command: Command) -> Agreement:
    """Return what all processes of a job agree on.

    Args:
        job: what is to be carried out.
        command: the call that others may repeat.
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
