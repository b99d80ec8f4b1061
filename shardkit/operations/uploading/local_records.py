"""Factors for files that go into a store: computed into records on the local disk, which are a source like any other.

    CACHE/factors/.<of the output>.shardkit-run-<hash>/factors/    a record and a note of each weight
    CACHE/factors/.<of the output>.shardkit-<owner>/data/          records of a part

What is sent is written front to back, and a weight has parts in all files: so factors need a place where they wait. A run
that was killed leaves it to the next one of the same plan on this machine. A part sends each record to where all parts
have theirs, and keeps it here for as long as it writes files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace

from shardkit.core.text import escape
from shardkit.errors import IncompleteError, Interrupted, ResourceError
from shardkit.files import cache, storage
from shardkit.files.shared import SharedStaging, remove_runs
from shardkit.files.staging import Staging, nothing
from shardkit.operations.uploading.run import StoredFiles, Upload, check_conditions, interrupted
from shardkit.osft.phase import PhaseAt
from shardkit.transfer.checks import SourceCheck

_FOLDER = "factors"
ELSEWHERE = (
    f"factors wait on the local disk until they are sent; {cache.VARIABLE}=DIRECTORY has them elsewhere"
)
"""What to do where they cannot be written."""
ANOTHER_PLACE = f"set {cache.VARIABLE}=DIRECTORY"
"""How records come to lie on another disk."""


@contextlib.contextmanager
def with_factors(
    upload: Upload, phase: PhaseAt, computed_by: str, check: SourceCheck | None
) -> Iterator[Upload]:
    """Compute what has no record yet, and give the upload of the files that are made of the records.

    The records stay for the next run where what was sent does.

    Args:
        upload: what is written once there are factors.
        phase: computes them, given where records lie.
        computed_by: stands for the kind of this machine.
        check: compares what is read with what the source records.

    Raises:
        SourceError, IntegrityError, IncompleteError: as `FactorPhase.compute`.
        UsageError: the store has no conditional requests.
        Interrupted: after a signal; what was computed is kept.
        ResourceError: the local disk fails.
    """
    check_conditions(upload.target.path)  # before hours of computing
    by = f"{upload.plan_hash} {computed_by}"  # another kind has other last bits
    if StoredFiles(upload).is_named:
        # Whoever reads the output that is there must not get the factors of two machines.
        upload = replace(upload, plan_hash=hashlib.sha256(by.encode()).hexdigest())
    with _made_directory() as directory:
        place = os.path.join(directory, _name(upload.target.path))
        plan = hashlib.sha256(by.encode()).hexdigest()
        staging = SharedStaging.of_plan(place, plan, nothing, is_run=True)
        if not upload.resume:
            staging.give_up()
        remove_runs(place, nothing, but=staging.path)
        try:
            with contextlib.ExitStack() as stack:
                try:
                    staging.create(b"", ())
                    work = stack.enter_context(staging.workplace())  # who is in it needs all records
                    run = phase(staging.factors)
                    run.compute_all(
                        work, check, upload.progress, f"{upload.verb}, factors", upload.on_resumed
                    )
                except OSError as error:
                    raise ResourceError(
                        f"cannot write to {escape(staging.path)}: {error.strerror}", hint=ELSEWHERE
                    ) from error
                yield replace(upload, computed=run.digest or "")
        except KeyboardInterrupt as interrupt:
            raise interrupted(interrupt, upload.target, "what was computed is kept") from interrupt
        except (IncompleteError, Interrupted, ResourceError):
            raise
        except BaseException:
            _remove(staging)
            raise
        _remove(staging)


def _remove(staging: SharedStaging) -> None:
    """Remove records, unless another process is at work there."""
    if staging.is_over:
        with contextlib.suppress(ResourceError):
            staging.remove()


@contextlib.contextmanager
def room_for_records(output: str) -> Iterator[str]:
    """Give a directory for the records of a part until the store has them; it goes afterwards, with those of dead runs."""
    with _made_directory() as directory:
        beside = os.path.join(directory, _name(output))
        remove_runs(beside, nothing, but="")
        staging = Staging.create(beside)
        try:
            yield staging.scratch()
        finally:
            staging.discard()


def place_of_records(output: str) -> str:
    """Return the path beside which this machine has the records for an output; it and its directory need not exist."""
    return os.path.join(_directory() or tempfile.gettempdir(), _name(output))


def remove_records(output: str) -> None:
    """Remove what dead runs on this machine have computed for an output that they did not make."""
    directory = _directory()
    if directory is not None:
        remove_runs(os.path.join(directory, _name(output)), nothing, but="")


def _name(output: str) -> str:
    return hashlib.sha256(output.encode()).hexdigest()[:16]


def _directory() -> str | None:
    """Return where the records of all outputs lie; None if nothing is kept between runs."""
    home = cache.home()
    return None if home is None else os.path.join(home, _FOLDER)


@contextlib.contextmanager
def _made_directory() -> Iterator[str]:
    """Give the directory of all records, or one that lasts as long as this run."""
    directory = _directory()
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="shardkit-") as temporary:
            yield temporary
        return
    try:
        storage.make_directories(os.path.dirname(directory))
        with contextlib.suppress(FileExistsError):
            storage.mkdir(directory, 0o700)
    except OSError as error:
        raise ResourceError(f"cannot write {escape(directory)}: {error.strerror}", hint=ELSEWHERE) from error
    yield directory
