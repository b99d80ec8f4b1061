"""Carrying out a decided preshard: staging, moving, describing, one rename."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from shardkit import manifest
from shardkit._version import __version__
from shardkit.core.text import escape
from shardkit.errors import Interrupted, ResourceError
from shardkit.formats import chunk_list
from shardkit.formats.dcp_images import DcpImage
from shardkit.formats.dcp_metadata_writer import write_metadata
from shardkit.operations.preshard_job import PreshardJob
from shardkit.transfer.digest import combine, crc32
from shardkit.transfer.execute import SYNC_THREADS, ExecuteOptions, Execution, FileDigest
from shardkit.transfer.journal import Journal, read_finished, read_plan_hash
from shardkit.transfer.progress import Progress
from shardkit.transfer.staging import Staging, abandoned, journal_of, remove_abandoned
from shardkit.transfer.stream import read_back

METADATA = ".metadata"


def run_job(
    job: PreshardJob, path: str, options: ExecuteOptions, progress: Progress, *, overwrite: bool, resume: bool
) -> int:
    """Write a job's checkpoint to `path`; return how many files an interrupted run had finished.

    On Ctrl-C or SIGTERM the staging directory stays for the next run; on any error it is removed.

    Raises:
        Interrupted: after a signal.
        IntegrityError, ResourceError: as `Execution.run`.
    """
    plan_hash, staging, num_finished = job.plan_hash, None, 0
    try:
        staging = (_adopted(path, plan_hash) if resume else None) or Staging.create(path)
        remove_abandoned(path)  # of other plans, or to begin anew: their room may be needed
        progress.start(job.plan.hole_bytes, "preshard")
        finished = _finished(job, staging, progress)
        num_finished = len(finished)
        digests, scattered = _moved(job, staging, plan_hash, options, progress, finished)
        _describe_files(job, staging, digests, scattered)
        staging.commit(overwrite=overwrite)
    except KeyboardInterrupt as interrupt:
        if staging is not None and staging.is_committed:
            staging.discard()
        else:
            if staging is not None:
                staging.release()
            raise Interrupted(
                f"interrupted: {escape(path)} was not made; what was finished is kept beside it",
                signum=getattr(interrupt, "signum", signal.SIGINT),
                hint="run the same command again to resume",
            ) from interrupt
    except BaseException:
        if staging is not None:
            staging.discard()
        raise
    finally:
        progress.finish()
    return num_finished


def _adopted(path: str, plan_hash: str) -> Staging | None:
    """Take over a dead run's staging directory if it was carrying out this very plan."""
    for leftover in abandoned(path):
        if read_plan_hash(journal_of(leftover)) == plan_hash:
            staging = Staging.adopt(path, leftover)
            if staging is not None:
                return staging
    return None


def _finished(job: PreshardJob, staging: Staging, progress: Progress) -> dict[str, FileDigest]:
    finished = read_finished(staging.journal, staging.data, {image.name: image.size for image in job.output})
    for number, image in enumerate(job.output):
        if image.name in finished:
            progress.advance(job.output.data_nbytes[number])
    return finished


def _moved(
    job: PreshardJob,
    staging: Staging,
    plan_hash: str,
    options: ExecuteOptions,
    progress: Progress,
    finished: Mapping[str, FileDigest],
) -> tuple[dict[str, FileDigest], dict[str, int]]:
    with _translated(staging.path), contextlib.closing(Journal(staging.journal, plan_hash)) as journal:
        execution = Execution(
            job.plan, staging.data, options, finished=finished, on_finished=journal.add, progress=progress
        )
        return execution.run()


@contextlib.contextmanager
def _translated(path: str) -> Iterator[None]:
    """Let what the system refuses in our own bookkeeping name the place."""
    try:
        yield
    except OSError as error:
        raise ResourceError(f"cannot write to {escape(path)}: {error.strerror}") from error


def _describe_files(
    job: PreshardJob, staging: Staging, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]
) -> None:
    """Write the chunk lists, then the manifest; `.metadata`, which makes it a checkpoint, comes last."""
    crcs = [digests[image.name].data_crcs for image in job.output]
    rows, tensor_crcs = _chunk_rows(job, crcs, scattered)
    with _translated(staging.path):
        with ThreadPoolExecutor(SYNC_THREADS) as pool:
            lists = list(pool.map(partial(_write_chunk_list, job, staging), job.output, rows))
        temporary = os.path.join(staging.data, METADATA + ".part")
        metadata = _write_metadata(job, temporary)
        described = job.describe()
        for fqn, crc in tensor_crcs.items():
            described["tensors"][fqn]["crc32"] = crc
        content = {
            "format": manifest.FORMAT,
            "tool": {"name": "shardkit", "version": __version__},
            "source": job.model.identity,
            **described,
            "files": [
                _file_entry(digests[i.name], entry) for i, entry in zip(job.output, lists, strict=True)
            ],
            "metadata": metadata,
        }
        _write_synced(os.path.join(staging.data, manifest.NAME), manifest.dump(content))
        os.rename(temporary, os.path.join(staging.data, METADATA))


def _file_entry(digest: FileDigest, chunks: dict[str, Any]) -> dict[str, Any]:
    return {"name": digest.name, "size": digest.size, "crc32": digest.crc32, "chunks": chunks}


def _chunk_rows(
    job: PreshardJob, crcs: Sequence[Sequence[int]], scattered: Mapping[str, int]
) -> tuple[list[list[str]], dict[str, int]]:
    """Return the chunk list lines of every file, and the CRC-32 of every tensor's logical bytes.

    A tensor whose chunks are neighbours in row-major order has the combination of theirs; one that was
    scattered had its digest taken on the source's side, where it is contiguous.
    """
    output, lines = job.output, list[list[str]]([] for _ in job.output)
    tensor_crcs: dict[str, int] = {}
    for fqn, entry in output.catalog.tensors.items():
        table, rows = output.catalog.chunks, entry.chunk_ids
        head = chunk_list.line_head(fqn, entry.dtype, entry.shape)
        pieces: list[tuple[int, int]] = []
        records = zip(
            *(c[rows.start : rows.stop] for c in (table.file, table.start, table.nbytes)), strict=True
        )
        chunks = zip(table.regions(rows), records, output.data_places(fqn), strict=True)
        for region, (file, start, nbytes), (data_start, data_nbytes) in chunks:
            into = lines[file]
            crc = crcs[file][len(into)] if crcs[file] else None
            into.append(chunk_list.line(head, region, (start, nbytes, data_start, data_nbytes), crc))
            pieces.append((crc or 0, data_nbytes))
        if job.digest != "none":
            source = job.sources[fqn]
            tensor_crcs[fqn] = scattered[source] if source in scattered else combine(pieces)
    return lines, tensor_crcs


def _write_chunk_list(
    job: PreshardJob, staging: Staging, image: DcpImage, lines: list[str]
) -> dict[str, Any]:
    data = chunk_list.dump(image.name, image.size, job.aliases, lines)
    name = chunk_list.name_for(image.name)
    _write_synced(os.path.join(staging.data, name), data)
    return {"name": name, "size": len(data), "crc32": crc32(data)}


def _write_metadata(job: PreshardJob, path: str) -> dict[str, Any]:
    with open(path, "wb") as file:
        write_metadata(file, job.output.catalog, job.aliases)
        file.flush()
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        crc = read_back(file.fileno(), 0, size, bytearray(1 << 20))
    return {"name": METADATA, "size": size, "crc32": crc}


def _write_synced(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
