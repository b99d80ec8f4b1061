"""What lies at a destination, held against what a job would write there.

It is of this very plan if a record says so: what the run left that made it and died before it had removed that, or this
user's cache, where a run notes its plan (with the stamps of its sources) and the stamps of what it made. Else it is of
this plan if every byte of it is what the job would write: source and output are read, and what describes the files is made
once more, beside the output. Names, shapes and sizes prove nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from shardkit.core.catalog import Catalog, FileStamp
from shardkit.core.text import escape
from shardkit.core.threads import Progress
from shardkit.errors import ShardkitError, UsageError
from shardkit.files import manifest, storage
from shardkit.files.cache import Cache, home
from shardkit.files.staging import Staging
from shardkit.transfer.checks import CheckedSource, SourceCheck
from shardkit.transfer.execute import ComparingExecution, Describer, ExecuteOptions, compared_with
from shardkit.transfer.images import Image
from shardkit.transfer.plan import TransferPlan
from shardkit.transfer.stream import Differs

_MAX_SHOWN = 60
_NO_OPTIONS = frozenset(("tensors", "format", "units", "unlisted"))
_BUFFER_BYTES = 1 << 20


class Unproven(Exception):
    """Nothing says whether an output is of a plan; has the reason."""


class Factored(Protocol):
    """Weights that become factors, as `osft.job.FactoredJob` has it."""

    @property
    def crcs(self) -> Mapping[str, int]:
        """CRC-32 of each factor."""

    def take_over(
        self, manifests: Mapping[str, object], catalog: Catalog, jobs: int, /, *, is_known: bool
    ) -> list[str]:
        """Take what manifests say of factors; return why they are not of these weights. Raises `Unproven`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Existing:
    """An output that is there, and a job that would make one of its name.

    Args of its methods and their errors are as those of `Execution`.
    """

    path: str
    recorded: Sequence[str]
    """What was asked for of the record: "sha256", "manifest"."""
    plan: TransferPlan
    decided: Mapping[str, object]
    """What decides the job, with the records of its manifests."""
    describe: Callable[[str], AbstractContextManager[Describer]]
    options: ExecuteOptions
    progress: Progress
    factors: Factored | None
    """The weights that become factors; None if there are none."""

    def compare(
        self, exists: UsageError, plan_hash: str, *, can_read: bool, is_known: bool, in_any_case: bool
    ) -> CheckedSource:
        """Find out whether what is there is what the job would write; return how much of the source was compared.

        Args:
            exists: what is said if it is not.
            plan_hash: of the job.
            can_read: the source is on this machine.
            is_known: a run of this plan has made it; it is only described once more.
            in_any_case: it is described whatever records say.

        Raises:
            UsageError: it is something else; says what differs.
        """
        check, problems, said = None, list[str](), "and is not what this command writes"
        is_recorded = not in_any_case and (self.is_recorded(plan_hash) or self.is_of_commit())
        try:
            if not can_read and not is_recorded:
                raise Unproven("its source is not on this machine, so nothing was compared")
            if not is_recorded:
                check = SourceCheck(self.plan.catalog) if self.options.check_source else None
                problems = self.differences(check, is_known=is_known)
        except Unproven as reason:
            problems = [*self.otherwise(), str(reason)]
            if len(problems) == 1:
                said = "and nothing proves that it is what this command writes"
        finally:
            self.progress.finish()
        UsageError.raise_for(problems, f"{exists.message}, {said}", hint=exists.hint)
        return compared_with(check, self.plan, self.options)

    def is_recorded(self, plan_hash: str) -> bool:
        """True if this user's cache says that a run of this plan has made these very files.

        Args:
            plan_hash: of the job.
        """
        return is_remembered(self.path, plan_hash, self.recorded)

    def is_of_commit(self) -> bool:
        """True if its manifest says that it was made of this commit of a repo on the Hub, with these options.

        A commit stands for the content of its files, so none is read.
        """
        said = list(self._said())
        is_known = all(
            isinstance(source := here.get("source"), dict) and source.get("repo") and source.get("commit")
            for _, here in said
        )
        is_same = all(
            there is not None and _without_digests(there) == _without_digests(here) for there, here in said
        )
        return bool(said) and is_known and is_same and all(map(self._has_size, self.plan.images))

    def _has_size(self, image: Image) -> bool:
        try:
            return storage.lstat(os.path.join(self.path, image.name)).st_size == image.size
        except OSError:
            return False

    def differences(self, check: SourceCheck | None, *, is_known: bool) -> list[str]:
        """Return the differences from what the job would write: none if the output is of this plan.

        Args:
            check: compares what is read with what the source records.
            is_known: a run of this plan has made it.

        Raises:
            Unproven: no record says what its factors were computed of.
        """
        try:
            problems = self._other_factors(is_known=is_known) or list(self._differences(check))
        except Differs as differs:
            what = f"other bytes at {escape(differs.fqn)}" if differs.fqn else "another size"
            problems = [self._problem(differs.name, what)]
        return [*(self.otherwise() if problems else ()), *problems]

    def _differences(self, check: SourceCheck | None) -> Iterator[str]:
        staging = Staging.create(self.path)
        with contextlib.ExitStack() as stack:
            stack.callback(staging.discard)
            work = staging.scratch()
            linked = set(self._link(work))
            with self.describe(work) as descriptions:
                self.progress.start(self.plan.hole_bytes, "comparing")
                execution = ComparingExecution(
                    self.plan.without_computed(),
                    self.path,
                    self.options,
                    finished={},
                    on_finished=lambda digest, _: descriptions.add_file(digest),
                    progress=self.progress,
                    check=check,
                )
                digests, scattered = execution.run()
                descriptions.finish(digests, {**scattered, **(self.factors.crcs if self.factors else {})})
            for here, _, names in storage.walk(work):
                for name in sorted(names):
                    relative = os.path.relpath(os.path.join(here, name), work)
                    made, there = os.path.join(here, name), os.path.join(self.path, relative)
                    if relative not in linked and not (_are_same(made, there) or _say_the_same(made, there)):
                        yield self._problem(relative, "other content")

    def _problem(self, name: str, what: str) -> str:
        is_there = storage.lexists(os.path.join(self.path, name))
        return f"{escape(name)}: {what if is_there else 'missing'}"

    def _link(self, directory: str) -> Iterator[str]:
        """Let the images lie beside what describes them; yield their names.

        What is little more than a header is written with the descriptions.
        """
        for image in self.plan.images:
            source, target = os.path.join(self.path, image.name), os.path.join(directory, image.name)
            storage.make_folders(directory, os.path.dirname(image.name))
            if not storage.isfile(source):
                raise Differs(image.name, "")
            if len(image):
                storage.link(source, target)
                yield image.name

    def otherwise(self) -> Iterator[str]:
        """Yield what manifests say of how the output was made, where the job's would say something else."""
        for there, here in self._said():
            if there is not None:
                yield from _other_options(there, here)

    def _other_factors(self, *, is_known: bool) -> list[str]:
        """Take what was measured of factors from the manifests that are there; return why they are not of this plan.

        Args:
            is_known: they are known to be of it.
        """
        if self.factors is None:
            return []
        manifests = {
            record.root or "": _parsed(os.path.join(self.path, folder))
            for folder, record in self._records()
            if isinstance(record, manifest.Presharded)
        }
        return self.factors.take_over(manifests, self.plan.catalog, self.options.jobs, is_known=is_known)

    def _records(self) -> Iterator[tuple[str, object]]:
        """Yield what the job's manifests say before anything was written, by their folders."""
        records = self.decided.get("folders")
        if not isinstance(records, Mapping):  # by folder; else all files lie in one
            folders = {os.path.dirname(image.name) for image in self.plan.images}
            records = dict.fromkeys(folders, self.decided.get("description"))
        yield from records.items()

    def _said(self) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any]]]:
        """Yield each manifest that is there, and what the job would say in its place as far as that is decided."""
        for folder, record in self._records():
            if isinstance(record, manifest.KINDS):
                here = json.loads(json.dumps(record, default=manifest.to_json))
                yield _read(os.path.join(self.path, folder)), here


def remember(path: str, plan_hash: str, recorded: Sequence[str], directory: str) -> None:
    """Keep in this user's cache which files a run has made.

    Args:
        path: where they are going to be.
        plan_hash, recorded: of the job.
        directory: where they are now; a rename leaves them as they are.
    """
    kept = records()
    if kept is not None:
        with contextlib.suppress(OSError):
            kept.keep(_key(path), _record(plan_hash, recorded, directory))


def is_remembered(path: str, plan_hash: str, recorded: Sequence[str]) -> bool:
    """True if this user's cache says that a run of a plan has made the very files at a path; arguments as `remember`."""
    kept = records()
    record = None if kept is None else kept.find(_key(path))
    return record is not None and record == _record(plan_hash, recorded, path)


def records() -> Cache | None:
    """Return where it is kept who has made outputs; None if nothing shall be."""
    directory = home()
    return None if directory is None else Cache(os.path.join(directory, "outputs"))


def _key(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()


def _record(plan_hash: str, recorded: Sequence[str], directory: str) -> bytes:
    """Return the plan and the state of every file, as bytes."""
    places = (os.path.join(here, name) for here, _, names in storage.walk(directory) for name in names)
    files = {os.path.relpath(place, directory): FileStamp.of(storage.lstat(place)) for place in places}
    return json.dumps({"plan": [plan_hash, *sorted(recorded)], "files": files}, sort_keys=True).encode()


def _read(directory: str) -> dict[str, Any] | None:
    try:
        return manifest.load(manifest.read_bytes(directory), manifest.NAME)
    except ShardkitError:
        return None


def _parsed(directory: str) -> manifest.Manifest | None:
    try:
        return manifest.read(directory)
    except ShardkitError:
        return None


def _without_digests(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest as it is before anything was written: no digests, no files, and no measurements."""
    said = _without_versions(said)
    plain = {key: value for key, value in said.items() if key not in ("files", "others", "metadata")}
    if isinstance(plain.get("osft"), dict):
        plain["osft"] = {key: value for key, value in plain["osft"].items() if key != "modules"}
    if isinstance(plain.get("tensors"), dict):
        plain["tensors"] = {
            name: {key: value for key, value in tensor.items() if key != "crc32"}
            for name, tensor in plain["tensors"].items()
        }
    return plain


def _other_options(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    there, here = _without_digests(there), _without_digests(here)
    for key in sorted((there.keys() | here.keys()) - _NO_OPTIONS):
        if there.get(key) != here.get(key):
            yield f"{escape(key)}: {_shown(there.get(key))} there, {_shown(here.get(key))} here"


def _shown(value: object) -> str:
    if isinstance(value, dict) and isinstance(value.get("axes"), list):
        value = ",".join(f"{axis.get('name')}={axis.get('size')}" for axis in value["axes"])
    text = json.dumps(value)
    return escape(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def _say_the_same(one: str, other: str) -> bool:
    """True for two manifests that differ in the versions of packages alone: of these an output is no other one."""
    said = [
        _read(os.path.dirname(path)) if os.path.basename(path) == manifest.NAME else None
        for path in (one, other)
    ]
    first, second = (None if content is None else _without_versions(content) for content in said)
    return first is not None and first == second


def _without_versions(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without the versions of packages, and what depends on them: sizes and digests of such manifests."""
    plain = {key: value for key, value in said.items() if key != "crc32"}
    if isinstance(plain.get("layout"), dict):
        plain["layout"] = {key: value for key, value in plain["layout"].items() if key != "traced_with"}
    if isinstance(plain.get("files"), list):
        plain["files"] = [
            file.get("name") if os.path.basename(str(file.get("name"))) == manifest.NAME else file
            for file in plain["files"]
            if isinstance(file, dict)
        ]
    return plain


def _are_same(one: str, other: str) -> bool:
    try:
        if storage.islink(other) or storage.getsize(one) != storage.getsize(other):
            return False
        with storage.open_file(one, "rb") as first, storage.open_file(other, "rb") as second:
            while data := first.read(_BUFFER_BYTES):
                if data != second.read(_BUFFER_BYTES):
                    return False
    except OSError:
        return False
    return True
