"""The options that all verbs which write a directory share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from shardkit.core.dtypes import DType, short_dtype
from shardkit.core.text import KIB, MIB, escape, parse_size
from shardkit.core.threads import ProgressOption, choose_jobs
from shardkit.errors import UsageError, refuse_warnings
from shardkit.operations.casts import beyond_range
from shardkit.operations.parts.agreement import Command, Share
from shardkit.operations.parts.part import parse_part
from shardkit.transfer.execute import ExecuteOptions

Digest = Literal["crc32", "none"]
DIGESTS: tuple[str, ...] = get_args(Digest)

OnWarning = Callable[[str], object]
"""Callback with a warning."""

_MEMORY, _MIN_MEMORY, _MIN_MEMORY_PER_JOB = 256 * MIB, 2 * MIB, 512 * KIB


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The keywords that preshard, consolidate and reshard share. The docstrings of these functions describe them.

    Each verb has a subclass with its own keywords; a field has the type and default of its keyword. Unlike elsewhere,
    there are no slots, because parsed values are cached properties.
    """

    verb: ClassVar[str] = ""
    overwrite: bool = False
    exist_ok: bool = False
    dry_run: bool = False
    part: str | Share | None = None
    executor: Literal["ray"] | None = None
    num_parts: int | None = None
    digest: Digest = "crc32"
    sha256: bool = False
    check_source: bool = True
    source_manifest: str | os.PathLike[str] | None = None
    jobs: int | None = None
    max_memory: str | int | None = None
    scratch: str | os.PathLike[str] | None = None
    follow_links: bool = False
    progress: ProgressOption = None
    on_warning: OnWarning | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("dtype") and value is not None:
                object.__setattr__(self, field.name, short_dtype(value))

    @property
    def given(self) -> dict[str, Any]:
        """All options by name, the verb's own first."""
        shared = WriteOptions.__dataclass_fields__
        names = sorted((field.name for field in fields(self)), key=lambda name: name in shared)
        return {name: getattr(self, name) for name in names}

    @property
    def is_on_ray(self) -> bool:
        """True if the parts run as Ray tasks."""
        return self.executor is not None or self.num_parts is not None

    @cached_property
    def share(self) -> Share | None:
        """The share of this process in a job that several processes share; None if it does the whole job."""
        return parse_part(self.part, os.environ) if isinstance(self.part, str) else self.part

    @cached_property
    def command(self) -> Command:
        """The call with its arguments, so that messages can show it and other processes can repeat it."""
        return Command.of(self.verb, self.given)

    @property
    def refuses_warnings(self) -> bool:
        """True if warnings are errors: with `strict`, which not all verbs have."""
        return bool(getattr(self, "strict", False))

    def note_infinite(self, infinite: dict[tuple[str, DType], None], fqn: str, dtype: DType) -> None:
        """Record that values of a tensor are beyond the range of its new dtype. Called from any thread.

        Raises:
            SourceError: with `strict`; raised at once, so that the output does not appear.
        """
        infinite[fqn, dtype] = None
        if self.refuses_warnings:
            refuse_warnings(beyond_range(infinite))

    def check(self) -> None:
        """Check the options, before anything is read.

        Raises:
            UsageError: two options contradict each other, or a value is not allowed.
        """
        if self.overwrite and self.exist_ok:
            raise UsageError(
                "--overwrite and --exist-ok exclude each other",
                hint="--exist-ok leaves an existing output as it is; --overwrite replaces it",
            )

    def execute_options(self) -> ExecuteOptions:
        """Return the options for `transfer.execute`.

        Raises:
            UsageError: the digest is unknown, or there are too few threads, or too little memory for them.
        """
        if self.digest not in DIGESTS:
            raise UsageError(f"--digest {escape(self.digest)!r} is not one of {', '.join(DIGESTS)}")
        max_memory = _MEMORY if self.max_memory is None else self.max_memory
        budget, jobs = parse_size(max_memory), choose_jobs(self.jobs)
        if self.jobs is None:
            jobs = max(min(jobs, budget // _MIN_MEMORY_PER_JOB), 1)
        if budget < _MIN_MEMORY:
            raise UsageError(f"--max-memory must be at least 2MiB, not {max_memory}")
        if budget < jobs * _MIN_MEMORY_PER_JOB:
            raise UsageError(
                f"--max-memory {max_memory} is too little for --jobs {jobs}: each needs at least 512KiB",
                hint="a few threads are as fast as many: leave --jobs out",
            )
        return ExecuteOptions(
            jobs=jobs,
            max_memory_bytes=budget,
            digests=self.digest != "none",
            check_source=self.check_source,
        )
