"""The options of the verbs that write a directory, as a person gave them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from shardkit.core.dtypes import short_dtype
from shardkit.core.text import KIB, MIB, escape, parse_size
from shardkit.core.threads import ProgressOption, choose_jobs
from shardkit.errors import UsageError
from shardkit.operations.parts.agreement import Command, Committing, Share, as_share
from shardkit.operations.parts.pool import Executor
from shardkit.transfer.execute import ExecuteOptions

Digest = Literal["crc32", "none"]
DIGESTS: tuple[str, ...] = get_args(Digest)

OnWarning = Callable[[str], object]
"""Is told a warning."""

_MEMORY, _MIN_MEMORY, _MIN_MEMORY_PER_JOB = 256 * MIB, 2 * MIB, 512 * KIB


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """The keywords that preshard, consolidate and reshard share. Each adds its own, and its docstring describes all.

    Its class has a field for each keyword, with the same type and default. There are no slots, unlike elsewhere: what a
    keyword stands for is kept once it is known.
    """

    verb: ClassVar[str] = ""
    overwrite: bool = False
    dry_run: bool = False
    resume: bool = True
    part: str | Share | None = None
    executor: Executor | Literal["ray"] | None = None
    num_parts: int | None = None
    digest: Digest = "crc32"
    sha256: bool = False
    check_source: bool = True
    source_manifest: str | os.PathLike[str] | None = None
    jobs: int | None = None
    max_memory: str | int | None = None
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
        """All of them by name; the verb's own come first."""
        shared = WriteOptions.__dataclass_fields__
        names = sorted((field.name for field in fields(self)), key=lambda name: name in shared)
        return {name: getattr(self, name) for name in names}

    @property
    def is_pooled(self) -> bool:
        """True if the workers of a pool carry out the parts."""
        return self.executor is not None or self.num_parts is not None

    @cached_property
    def share(self) -> Share | None:
        """What of the job this process carries out, where several do; None for all of it."""
        return as_share(self.part)

    @property
    def ends(self) -> bool:
        """True if the output is there, and nobody else does what comes after it."""
        return isinstance(self.share, Committing) and self.share.ends

    @cached_property
    def command(self) -> Command:
        """The call, which other parts repeat; nobody repeats that of one process."""
        if self.share is not None:
            return Command.of(self.verb, self.given)
        settings = {**dict.fromkeys(self.recorded, True), "check_source": self.check_source}
        return Command(verb=self.verb, options=settings)

    @property
    def recorded(self) -> list[str]:
        """What was asked for of the record of the output, and the plan does not tell."""
        return ["sha256"] if self.sha256 else []

    def check(self) -> None:
        """Refuse options that cannot be carried out, before anything is read.

        Raises:
            UsageError: they do not go together, or one has no such value.
        """
        if self.share is not None and not self.resume:
            raise UsageError(
                "--part goes without --no-resume: what any part has finished counts",
                hint="shardkit status gives up what all parts have written, with `--abort`",
            )

    def execute_options(self) -> ExecuteOptions:
        """Return these options as the engine takes them.

        Raises:
            UsageError: no such digest, too few threads, or too little memory for them.
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
