"""verify by what a store says of its objects: one request for each file that a manifest lists, and none of its bytes.

Amazon S3 and stores like it keep the CRC-32 of a whole object that was sent with one, as shardkit sends all. They computed it
from the bytes that they got. Of any other object only the size is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from shardkit.core.text import count, escape
from shardkit.core.threads import at_once
from shardkit.errors import SourceError, UsageError
from shardkit.files import manifest, storage
from shardkit.files.home import path_in
from shardkit.files.links import locate
from shardkit.files.location import location_of
from shardkit.files.remote.writers import writer_of
from shardkit.formats.contract import absent
from shardkit.operations.resolve import described_at
from shardkit.operations.verify.result import SIZE, Report


def check_stored(path: str, manifest_path: str | None, report: Report) -> None:
    """Compare what a manifest records with what the store says of each file.

    Args:
        path: of a checkpoint in a store.
        manifest_path: of a manifest that lies elsewhere.
        report: gets what is wrong, and what the store cannot tell; its progress is told of the bytes.

    Raises:
        UsageError: the path is none of a store that can be asked.
        SourceError: there is nothing, or no manifest.
        ResourceError: the store does not answer.
    """
    if not location_of(path).vouches:
        raise UsageError(
            f"--store asks an object store, and {escape(path)} lies in none",
            hint="--full reads the bytes; of a repo of the Hub, --hub REPO compares a copy with it",
        )
    if not storage.lexists(path):
        raise absent(path)
    directory = described_at(path)
    wanted = list(_recorded(directory, manifest_path, report))
    report.progress.start(sum(file.size for _, file in wanted), "ask")
    try:
        answers = at_once(writer_of(path).head, [path_in(directory, name) for name, _ in wanted])
    finally:
        report.progress.finish()
    untold, unrecorded = list[str](), list[str]()
    for (name, file), stored in zip(wanted, answers, strict=True):
        crc = manifest.crc_of(file)
        if isinstance(file, manifest.ShardFile):
            report.files.add(name)
        if stored is None:
            report.problem("the manifest lists it, and there is no such object", file=name, is_missing=True)
        elif stored.size != file.size:
            report.problem(SIZE, file=name, expected=str(file.size), found=str(stored.size))
        elif crc is None:
            unrecorded.append(name)
        elif stored.crc32 is None:
            untold.append(name)
        elif stored.crc32 != crc:
            report.problem(
                "CRC-32 that the store has", file=name, expected=f"{crc:08x}", found=f"{stored.crc32:08x}"
            )
        else:
            report.num_vouched_files += 1
            report.vouched_bytes += file.size
    _say(
        report,
        untold,
        "the store keeps no CRC-32 of {}: only sizes were compared, a full check reads the bytes",
    )
    _say(report, unrecorded, "the manifest records no CRC-32 of {}: only sizes were compared")


def _recorded(
    directory: str, manifest_path: str | None, report: Report, folder: str = ""
) -> Iterator[tuple[str, manifest.SavedFile]]:
    """Yield (name relative to the checkpoint, what is recorded of it) of each file."""
    here = os.path.join(directory, folder) if folder else directory
    where = manifest_path or os.path.join(folder, manifest.NAME)
    if not storage.lexists(manifest_path or os.path.join(here, manifest.NAME)):
        raise SourceError(
            f"{escape(manifest_path or here)}: there is no manifest, so that nothing says what the files should be",
            hint="make one of a copy that is right, with shardkit manifest, and name it: --manifest FILE",
        )
    report.manifests.append(where)
    content: manifest.Manifest | None = None
    with report.failing(where):
        content = manifest.read_file(manifest_path or locate(here, manifest.NAME), os.path.basename(where))
    if content is None:
        return
    for file in manifest.every_file(content):
        yield os.path.join(folder, file.name), file
    for inner in (content.folders or ()) if isinstance(content, manifest.FileList) else ():
        yield from _recorded(directory, None, report, os.path.join(folder, inner))


def _say(report: Report, names: Sequence[str], message: str) -> None:
    """Add that nothing tells whether the bytes of some files are right."""
    if names:
        details = tuple(map(escape, names))
        report.problem(message.format(count(len(names), "file")), details=details, is_unreadable=True)
