"""Factors for files that go into a store: computed into records on the local disk, which are a source like any other.

    CACHE/factors/.<of the output>.shardkit-<owner>/    a staging directory: the journal has a line for each weight
                                               data/    a record of each weight

What is sent is written front to back, and a weight has parts in all files: so factors need a place where they wait. A run
that was killed leaves it to the next one of the same plan on this machine. A part sends each record to where all parts
have theirs, and keeps it here for as long as it writes files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace

from shardkit.core.text import escape
from shardkit.errors import IncompleteError, Interrupted, ResourceError, UsageError
from shardkit.files import cache, storage
from shardkit.files.shared_store import StoredStaging
from shardkit.files.staging import Staging, nothing, remove_abandoned
from shardkit.operations.parts.agreement import Agreement
from shardkit.operations.parts.shared_factors import FactoredJob, SharedFactors, WithFactors
from shardkit.operations.uploading.in_store import DividedInStore
from shardkit.operations.uploading.run import StoredFiles, Upload, check_conditions, interrupted
from shardkit.transfer.checks import SourceCheck
from shardkit.transfer.factors.catalog import plan_records
from shardkit.transfer.factors.fill import Filling
from shardkit.transfer.journal import Journal, adopted, read_targets, read_versions
from shardkit.transfer.plan import build_plan

_FOLDER = "factors"
ELSEWHERE = (
    f"factors wait on the local disk until they are sent; {cache.VARIABLE}=DIRECTORY has them elsewhere"
)
"""What to do where they cannot be written."""
_ANOTHER_PLACE = f"set {cache.VARIABLE}=DIRECTORY"


class FactoredUpload:
    """An upload of files that have factors.

    Args:
        upload: what would be written if somebody had filled the holes for factors.
        job: what is to be computed.
        computed_by: stands for the kind of this machine.
    """

    def __init__(self, upload: Upload, job: FactoredJob, *, computed_by: str) -> None:
        self._by = f"{upload.plan_hash} {computed_by}"  # another kind has other last bits
        self._job, self._records = job, plan_records(upload.plan.catalog, job.factoring.weights)
        self.plan = build_plan(upload.plan.images, self._records.catalog).in_order()
        """Of the files; factors are read from records."""
        self.record_bytes = sum(image.size for image in self._records.images)
        """Size of all records."""
        self._upload = replace(upload, plan=self.plan)

    def run(self, check: SourceCheck | None) -> int:
        """Compute what has no record yet, and write everything; as `Upload.run`.

        Raises:
            SourceError, IntegrityError, IncompleteError: as `FactorRun.run`; and whatever `Upload.run` raises.
            ResourceError: the local disk fails.
        """
        upload = self._upload
        check_conditions(upload.target.path)  # before hours of computing
        if StoredFiles(upload).is_named:
            # Whoever reads the output that is there must not get the factors of two machines.
            upload = replace(upload, plan_hash=hashlib.sha256(self._by.encode()).hexdigest())
        with self._staging() as staging:
            computed = self._compute(staging, check)
            return replace(upload, computed=computed).run(check)

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Staging]:
        """Give the directory of the records; it stays for the next run where what was sent does."""
        output = self._upload.target.path
        with _made_directory() as directory:
            place = os.path.join(directory, _name(output))
            staging = (adopted(place, self._by) if self._upload.resume else None) or Staging.create(place)
            try:
                remove_abandoned(place, nothing)  # of other plans, or to begin anew
                yield staging
            except KeyboardInterrupt as interrupt:
                staging.release()
                raise interrupted(interrupt, self._upload.target, "what was computed is kept") from interrupt
            except (IncompleteError, Interrupted, ResourceError):
                staging.release()
                raise
            except BaseException:
                staging.discard()
                raise
            staging.discard()

    def _compute(self, staging: Staging, check: SourceCheck | None) -> str:
        """Compute the factors, and let the plan read them; return what stands for all of them."""
        progress, records = self._upload.progress, self._records
        try:
            progress.start(
                sum(weight.target.factors_nbytes for weight in self._job.factoring.weights),
                f"{self._upload.verb}, factors",
            )
            self._upload.on_resumed(read_versions(staging.journal, staging.data))
            with contextlib.closing(
                Journal(staging.journal, self._by, staging.data, versions=self._upload.versions)
            ) as journal:
                filling = Filling(
                    plan=records,
                    directory=staging.data,
                    journal=journal,
                    earlier=read_targets(staging.journal, staging.data),
                    finished=(),
                    check=check,
                    advance=progress.advance,
                    another_place=_ANOTHER_PLACE,
                )
                crcs = self._job.fill(filling)
        except OSError as error:
            raise ResourceError(
                f"cannot write to {escape(staging.path)}: {error.strerror}", hint=ELSEWHERE
            ) from error
        finally:
            progress.finish()
        records.lie_at([os.path.join(staging.data, image.name) for image in records.images])
        return hashlib.sha256(json.dumps(sorted(crcs.items())).encode()).hexdigest()


class FactoredInStore(WithFactors, DividedInStore):
    """Parts that compute factors, and share nothing but a store.

    Args:
        upload: what each of them would write alone, if somebody had filled the holes for factors.
        agreement: what they have to agree on.
        factors: what is to be computed.
        computed_by: stands for the kind of this machine.
        replaces_any: as for `DividedInStore`.
    """

    _another_place = _ANOTHER_PLACE

    def __init__(
        self,
        upload: Upload,
        agreement: Agreement,
        *,
        factors: FactoredJob,
        computed_by: str,
        replaces_any: bool = False,
    ) -> None:
        self._place = StoredStaging.of_plan(upload.target.path, agreement.plan).factors
        self._factors = SharedFactors(
            self._place,
            factors,
            upload.plan,
            compares=upload.options.check_source,
            computed_by=computed_by,
        )
        upload = replace(upload, plan=self._factors.plan.in_order())
        super().__init__(upload, agreement, replaces_any=replaces_any)

    def clean_up(self, *, keeps_mark: bool) -> None:
        """Remove what is left after the commit, and what dead parts have on this machine."""
        super().clean_up(keeps_mark=keeps_mark)
        remove_records(self._destination)

    def check_absent(self) -> None:
        """Refuse, too, an output of these names that is not whole; errors as `DividedInStore.check_absent`."""
        super().check_absent()
        if self._files.is_named and not self.is_committed:
            raise self._not_whole()

    def _agreement_is_there(self) -> None:
        """Refuse, too, once one process has made the output of these names: its factors may have other bits."""
        super()._agreement_is_there()
        if self._files.is_named:
            raise self._given_up() if self._is_over() else self._not_whole()

    def _not_whole(self) -> UsageError:
        return UsageError(
            f"{escape(self._destination)} has lost some of its files: parts do not replace the others, whose factors may "
            "have other bits",
            hint="write all of them into another folder: --overwrite, without --part",
        )

    @contextlib.contextmanager
    def _room_for_records(self) -> Iterator[str]:
        """Give a directory that goes afterwards, with those of dead runs: the store has the records."""
        with _made_directory() as directory:
            beside = os.path.join(directory, _name(self._destination))
            remove_abandoned(beside, nothing)
            staging = Staging.create(beside)
            try:
                yield staging.data
            finally:
                self._place.here.clear()
                staging.discard()


def place_of_records(output: str) -> str:
    """Return the path beside which this machine has the records for an output; it and its directory need not exist."""
    return os.path.join(_directory() or tempfile.gettempdir(), _name(output))


def remove_records(output: str) -> None:
    """Remove what dead runs on this machine have computed for an output that they did not make."""
    directory = _directory()
    if directory is not None:
        remove_abandoned(os.path.join(directory, _name(output)), nothing)


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
