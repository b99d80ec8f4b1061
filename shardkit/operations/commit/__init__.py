"""commit, status and abort: what becomes of a job that has not ended.

Internal: import from `shardkit`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import signature

from shardkit._version import __version__
from shardkit.core.keywords import suggests_keywords
from shardkit.core.result import Result, wrote
from shardkit.core.text import escape, in_shell, listed
from shardkit.core.threads import ProgressOption
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.location import location_of
from shardkit.files.place.contract import Notebook
from shardkit.operations.consolidate import ConsolidateResult, consolidate
from shardkit.operations.leftovers import Leftover, outputs_in, remove, warn_before
from shardkit.operations.options import OnWarning
from shardkit.operations.parts.agreement import (
    Agreement,
    Command,
    Committing,
    read_all,
    read_parts,
)
from shardkit.operations.parts.divided import incomplete
from shardkit.operations.parts.results import WriteResult
from shardkit.operations.places import Destination, destination_at
from shardkit.operations.preshard import preshard
from shardkit.operations.reshard import reshard
from shardkit.operations.uploading.status import StoredStatus
from shardkit.transfer.checks import Unchecked

_VERBS: Mapping[str, Callable[..., WriteResult]] = {
    "preshard": preshard,
    "consolidate": consolidate,
    "reshard": reshard,
}
_LOOK_AGAIN_S = 0.5
_MAY_RUN = ("wrap", "stages")
"""Options that may be "module:function"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult(Result):
    """What became of an output that parts have written."""

    output: str
    """The directory; absolute."""
    by_another: bool
    """It was there already, or another process was faster: nothing was left to do."""
    num_files: int
    """Files with tensors in them; 0 where there was nothing to do."""
    written_bytes: int
    """Size of all these files."""
    checked_bytes: int
    """Bytes of the source that were compared with the CRC-32 recorded for them, by all parts."""
    unchecked: tuple[Unchecked, ...]
    """What could not be compared, by reason."""
    source_manifests: tuple[str, ...]
    """Manifests by shardkit that the source was compared with, beside what its files record."""
    replaced: tuple[str, ...] = ()
    """How the paths begin of data in a bucket that were replaced. They stay, as readers may need them."""
    elapsed_s: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    pushed_to: str | None = None
    """Address of the repo on the Hub, where the parts were told to upload."""

    def headline(self) -> str:
        """Return what was made, or that it is there."""
        return f"{escape(self.output)} is there" if self.by_another else wrote(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """One part of a plan, as its notes describe it."""

    part: str
    """Such as "3/16"."""
    host: str
    """The machine that began it last."""
    pid: int
    found: str
    """What told the number; empty where a person did."""
    is_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus:
    """How far the parts of a plan are."""

    staging: str
    """The directory that they share."""
    plan: str
    """Hash of what they agree on."""
    verb: str
    num_parts: int
    """Of the process that began."""
    num_files: int
    file_bytes: int
    finished_files: int
    finished_bytes: int
    parts: tuple[PartStatus, ...]
    missing: tuple[tuple[str, int, str], ...]
    """(part, files that it lacks, what to type) of each part that lacks something."""
    is_committed: bool
    """The output was made, and only the rest was not removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusResult(Result):
    """What parts and runs have written for a destination, and nobody has committed."""

    output: str
    """The directory; absolute."""
    is_there: bool
    """Something has its name."""
    plans: tuple[PlanStatus, ...]
    """One, unless several were begun at the same moment."""
    stored: StoredStatus | None = None
    """What lies in a store beside the output; None for a local one."""
    runs: tuple[Leftover, ...] = ()
    """Directories in which runs of one process work, or worked until they were killed."""
    outputs: tuple[str, ...] | None = None
    """Where no output was named, all in the directory that are not committed: `plans` and `runs` are of these."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return whether the output is there, or which are not committed in a directory."""
        if self.outputs is not None:
            names = listed([os.path.basename(path) for path in self.outputs])
            return (
                f"{escape(self.output)}: {f'not committed: {names}' if names else 'no output is under way'}"
            )
        return _headline(self.output, self.is_there)


def _headline(output: str, is_there: bool) -> str:
    return f"{escape(output)} {'is' if is_there else 'is not'} there"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortResult(Result):
    """What was removed of a job that nobody has committed."""

    output: str
    """The directory; absolute."""
    is_there: bool
    """An output has its name, which stays."""
    aborted: bool
    """Something was removed: what parts had written, or a run that is over; in a store, what nobody has committed."""
    stored: StoredStatus | None = None
    """What was removed from a store; None for a local output, or if nothing was there."""
    runs: tuple[Leftover, ...] = ()
    """Directories in which runs of one process worked until they were killed, or work: those stay."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    def headline(self) -> str:
        """Return whether an output is there."""
        return _headline(self.output, self.is_there)


@suggests_keywords
def commit(
    output: str | os.PathLike[str],
    *,
    wait: float = 0,
    overwrite: bool = False,
    progress: ProgressOption = None,
    on_warning: OnWarning | None = None,
) -> CommitResult:
    """Make the output of what all parts of a job have written. May run any number of times, and several at once.

    Args:
        output: the destination that the parts were given.
        wait: seconds to wait for parts that are not finished, or that a network file system does not show yet.
        overwrite: replace what is there, if it is of the same kind, even if the parts were not told to.
        progress: told of the bytes that are read to compare what parts read of the source; by default a bar, on a terminal and in a notebook. False: none.
        on_warning: told each warning.

    Raises:
        IncompleteError: parts lack something; says which, and what to type.
        UsageError: no part was begun, something else is at the destination, or the plan is another one by now.
        IntegrityError: what the parts read is not what the source records.
        ResourceError: disk or permission.
    """
    begun, place = time.monotonic(), _destination(output)
    path, before, until = place.path, place.identity(), begun + wait
    staging = _only_one(place)
    while staging is None and place.identity() is None and time.monotonic() < until:  # no part has begun
        time.sleep(_LOOK_AGAIN_S)
        staging = _only_one(place)
    if staging is not None:
        staging.reopen()
    if staging is None or not staging.is_open:
        if staging is not None and not staging.is_attended:
            staging.remove(only_closed=True)
        return _was_there(place, begun)
    try:
        agreement = Agreement.of(staging)
        _wait_for_all(staging, agreement, until)
        result, is_ours = _carry_out(staging, agreement, overwrite, progress, on_warning)
    except (OSError, ShardkitError):  # the directory may have gone meanwhile, with another commit
        if staging.is_open or place.identity() in (None, before):
            raise
        return _was_there(place, begun)
    if not is_ours:
        return _was_there(place, begun)
    return CommitResult(
        output=path,
        by_another=False,
        num_files=result.num_files,
        written_bytes=result.written_bytes,
        checked_bytes=result.checked_bytes,
        unchecked=result.unchecked,
        source_manifests=result.source_manifests,
        replaced=result.replaced,
        elapsed_s=round(time.monotonic() - begun, 3),
        notes=result.notes,
        warnings=result.warnings,
        pushed_to=result.pushed_to if isinstance(result, ConsolidateResult) else None,
    )


def _destination(output: str | os.PathLike[str]) -> Destination:
    """Return where an output goes.

    Raises:
        UsageError: no output can be there.
    """
    given = os.fspath(output)
    if not location_of(given).is_writable:
        raise UsageError(f"{escape(given)}: this store is read only so far, so nothing is written there")
    return destination_at(given)


def _carry_out(
    staging: Notebook,
    agreement: Agreement,
    overwrite: bool,
    progress: ProgressOption,
    on_warning: OnWarning | None,
) -> tuple[WriteResult, bool]:
    """Plan once more, as each part did, and let the verb describe what they wrote; tell too whether it was first."""
    command = agreement.command
    if agreement.version != __version__:
        raise UsageError(
            f"the parts were written by shardkit {escape(agreement.version)}, and this is {__version__}",
            hint=f"commit with the same version; or begin anew after {_give_up(staging.destination)}",
        )
    verb = _VERBS.get(command.verb)
    if verb is None or not command.options.keys() <= signature(verb).parameters.keys():
        raise SourceError(f"{escape(staging.record)} is damaged")
    staging.check_owner()
    if not location_of(staging.destination).has_owners:
        _check_harmless(command)
    options = {**command.options, "overwrite": overwrite or bool(command.options.get("overwrite"))}
    ended = list[bool]()
    share = Committing(
        check=lambda here: _check_same(staging.destination, agreement, here),
        on_end=ended.append,
        overwrite=overwrite,
    )
    result = verb(output=staging.destination, part=share, progress=progress, on_warning=on_warning, **options)
    return result, ended == [True]


def _check_harmless(command: Command) -> None:
    """Refuse what a record in a store may not ask for: whoever may write there may have written it.

    Raises:
        UsageError: it names code to run, or a file to write on this machine.
    """
    given = command.options
    asked = ["--trust-remote-code"] if given.get("trust_remote_code") else []
    asked += ["--manifest-file"] if given.get("manifest_file") else []
    asked += [f"--{name} {escape(str(given[name]))}" for name in _MAY_RUN if ":" in str(given.get(name, ""))]
    UsageError.raise_for(
        asked,
        "the parts were told what no record in a store is believed, since others may write there",
        hint="run any of the parts again instead, with the options that it had: once nothing is missing it commits",
    )


def _give_up(destination: str) -> str:
    return f"`shardkit abort {in_shell(destination)}`"


def _check_same(destination: str, agreement: Agreement, here: Agreement) -> None:
    if here.plan == agreement.plan:
        return
    differences = agreement.differences(replace(here, command=agreement.command))
    raise UsageError(
        f"the plan is another one by now: {agreement.plan[:16]} was carried out, {here.plan[:16]} is it here",
        problems=differences,
        hint="commit with the same version of shardkit and an unchanged source; or begin anew after "
        f"{_give_up(destination)}",
    )


def _wait_for_all(staging: Notebook, agreement: Agreement, until: float) -> None:
    """Return once every file has a note.

    Raises:
        IncompleteError: some have none when the time is over.
    """
    while True:
        missing = staging.done.missing(len(agreement.files))
        if not missing:
            return
        if time.monotonic() >= until or not staging.is_open:
            raise incomplete(staging.destination, agreement, missing)
        time.sleep(_LOOK_AGAIN_S)


def _only_one(place: Destination) -> Notebook | None:
    notebooks, path = place.stagings(), place.path
    if len(notebooks) > 1:
        plans = [notebook.path.rpartition("-")[2] for notebook in notebooks]
        raise UsageError(
            f"parts of {len(plans)} plans were begun for {escape(path)}: {listed(plans)}",
            hint=f"see `shardkit status {in_shell(path)}`; {_give_up(path)} gives up all of them",
        )
    return notebooks[0] if notebooks else None


def _was_there(place: Destination, begun: float) -> CommitResult:
    path = place.path
    if place.identity() is None:
        raise UsageError(
            f"no part was begun for {escape(path)}, and nothing is there",
            hint="run the parts first: preshard, consolidate or reshard with `--part 1/16` and so on",
        )
    place.clean()
    return CommitResult(
        output=path,
        by_another=True,
        num_files=0,
        written_bytes=0,
        checked_bytes=0,
        unchecked=(),
        source_manifests=(),
        elapsed_s=round(time.monotonic() - begun, 3),
        notes=(f"{escape(path)} is there, and no parts of it are under way: nothing is left to commit",),
        warnings=(),
    )


@suggests_keywords
def status(output: str | os.PathLike[str] | None = None) -> StatusResult:
    """Return what parts and runs have written of an output, which parts are missing, and how to continue.

    Args:
        output: the destination that they were given. None: all of those in the working directory.

    Raises:
        SourceError, ResourceError: the record of the parts cannot be read.
    """
    if output is None:
        return _status_here()
    place = _destination(output)
    notebooks = place.stagings()
    plans = tuple(_plan_status(staging, agreement) for staging, agreement in read_all(notebooks))
    stored, runs = place.uncommitted(), place.runs()
    return StatusResult(
        output=place.path,
        is_there=place.identity() is not None,
        plans=plans,
        stored=stored,
        runs=runs,
        notes=() if notebooks or stored is not None or runs else (_nothing(place),),
    )


def _nothing(place: Destination) -> str:
    end = " since they have committed it" if place.has_commits() else ""
    return f"no parts are under way for {escape(place.path)}{end}"


def _status_here() -> StatusResult:
    """Return what is under way in the working directory."""
    directory = storage.absolute(os.curdir)
    every = [status(path) for path in outputs_in(directory)]
    each = [found for found in every if found.plans or found.runs]
    return StatusResult(
        output=directory,
        is_there=True,
        plans=tuple(plan for found in each for plan in found.plans),
        runs=tuple(run for found in each for run in found.runs),
        outputs=tuple(found.output for found in each),
        notes=(),
    )


def abort(output: str | os.PathLike[str], *, on_warning: OnWarning | None = None) -> AbortResult:
    """Remove what parts and runs have written of an output, and nobody has committed.

    Parts that are still at work end with an error. A run that is known to be at work is left alone; one of another host
    or container, of which nobody can tell that here, is named first. Files that shardkit has not put there stay.

    Args:
        output: the destination that they were given. An output that is there stays.
        on_warning: told each warning, before anything is removed.

    Raises:
        UsageError: a commit or a run that did not end has moved an old output aside, and it cannot go back.
        ResourceError: the record of the parts cannot be read, or something cannot be removed.
    """
    place = _destination(output)
    notebooks, stored, runs = place.stagings(), place.uncommitted(), place.runs()
    with contextlib.suppress(SourceError):  # of a record that is damaged, but not of a disk that fails
        read_all(notebooks)
    shared = [notebook.path for notebook in notebooks if location_of(notebook.path).has_directories]
    warnings = warn_before(runs, shared, on_warning)
    nothing = () if notebooks or stored is not None or runs else (_nothing(place),)
    for staging in notebooks:
        staging.give_up()
    place.give_up()
    runs = remove(place.path, runs)
    return AbortResult(
        output=place.path,
        is_there=place.identity() is not None,
        aborted=bool(notebooks) or stored is not None or any(run.is_removed for run in runs),
        stored=stored,
        runs=runs,
        notes=nothing,
        warnings=warnings,
    )


def _plan_status(staging: Notebook, agreement: Agreement) -> PlanStatus:
    files = agreement.files
    missing = staging.done.missing(len(files))
    finished = sorted({*range(len(files))} - {*missing})
    return PlanStatus(
        staging=staging.path,
        plan=agreement.plan,
        verb=agreement.command.verb,
        num_parts=agreement.num_parts,
        num_files=len(files),
        file_bytes=sum(size for _, size in files),
        finished_files=len(finished),
        finished_bytes=sum(files[number][1] for number in finished),
        parts=tuple(_parts(staging)),
        missing=tuple(
            (str(part), number, agreement.command_of(part, staging.destination))
            for part, number in agreement.missing_parts(missing)
        ),
        is_committed=not staging.is_open,
    )


def _parts(staging: Notebook) -> Iterator[PartStatus]:
    """Yield what parts said of themselves, in the order of their numbers."""
    for (place, of), content in read_parts(staging):
        pid = content.get("pid")
        yield PartStatus(
            part=f"{place}/{of}",
            host=str(content.get("host", "")),
            pid=pid if isinstance(pid, int) else 0,
            found=str(content.get("found", "")),
            is_done=content.get("is_done") is True,
        )
