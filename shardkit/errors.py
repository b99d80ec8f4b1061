"""The exceptions that shardkit raises, with the exit codes of the command line.

    ShardkitError            any error that a user can cause
      UsageError        2    invalid options, an existing destination
        MeshError       2    a mesh that does not parse, or disagrees with the world size
        PolicyError     2    a wrap policy that matches nothing
      SourceError       3    an input that is damaged, refused or not understood
        IntegrityError  3    bytes that are not what their description or digest says
        LayoutError     3    a model and a source that do not fit each other
      IncompleteError   4    work that stopped half-way; running it again resumes it
      ResourceError     5    disk, permission, memory or network
      Interrupted     130    Ctrl-C (130) or SIGTERM (143)

A message names the problem and its place (file, tensor, offset); `problems` lists every instance of it,
and `hint` is what to do next. Names that came from a file must be escaped (`core.text.escape`) before
they are put into a message.

Messages and hints name options as on the command line, `--overwrite`; in Python that is the argument `overwrite`. A
command that can be run unchanged is put between backticks.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Iterator

from shardkit._folding import fold_lines
from shardkit._version import has_torch

_SHOWN_PROBLEMS = 20
_TORCH = "`pip install 'shardkit[torch]'` in this Python"


class ShardkitError(Exception):
    """Base of all errors that a user can cause.

    Args:
        message: one line, what is wrong.
        problems: one line for each instance; all of one kind at once.
        hint: what to do next.
    """

    exit_code = 70
    message: str
    """One line, what is wrong."""
    problems: tuple[str, ...]
    """One line for each instance."""
    hint: str | None
    """What to do next."""

    def __init__(self, message: str, *, problems: Iterable[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.problems, self.hint = message, tuple(problems), hint
        self.shown_by: int | None = None
        """Another rank whose error has the full text, so that this one is a single line; None to show the full text."""

    @classmethod
    def raise_for(cls, problems: Collection[str], message: str, *, hint: str | None = None) -> None:
        """Raise this error if there are problems; arguments as for the error itself."""
        if problems:
            raise cls(message, problems=problems, hint=hint)

    def __str__(self) -> str:
        """Return the text for a traceback, in which problems that differ only in numbers are folded into one line."""
        if self.shown_by is not None:
            return f"{self.message} (see rank {self.shown_by})"
        folded = fold_lines(self.problems, spreads=True)
        lines = [self.message, *(f"  {each.pattern}" for each in folded[:_SHOWN_PROBLEMS])]
        if hidden := sum(each.count for each in folded[_SHOWN_PROBLEMS:]):
            lines.append(f"  ... {hidden} more")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the error as plain data: type, message, every problem, hint, exit code."""
        public = (kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        return {
            "error": next(public),
            "message": self.message,
            "problems": list(self.problems),
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


class UsageError(ShardkitError):
    """Invalid options, or a destination that exists."""

    exit_code = 2


class MeshError(UsageError):
    """A mesh that does not parse, or disagrees with the world size."""


class PolicyError(UsageError):
    """A wrap policy that matches nothing, or cannot be imported."""


class SourceError(ShardkitError):
    """An input that is damaged, refused or not understood."""

    exit_code = 3


def refuse_warnings(warnings: Iterable[str]) -> None:
    """Raise an error if there are warnings; for --strict.

    Raises:
        SourceError: lists all warnings.
    """
    problems = list(warnings)
    SourceError.raise_for(
        problems,
        f"{len(problems)} warning{'s' * (len(problems) != 1)}, and --strict makes each an error",
        hint="fix what they name, or leave --strict out",
    )


class IntegrityError(SourceError):
    """Bytes that differ from their description or digest."""


class LayoutError(SourceError):
    """A model and a source that do not fit each other."""


class IncompleteError(ShardkitError):
    """Work that stopped half-way; running it again resumes it."""

    exit_code = 4


class ResourceError(ShardkitError):
    """Disk, permission, memory or network."""

    exit_code = 5


class Interrupted(ShardkitError):
    """A signal ended the run; what was finished is kept for the next one.

    Args:
        signum: the signal, SIGINT (2) or SIGTERM (15).
    """

    def __init__(self, message: str, *, signum: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = 128 + signum


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread like Ctrl-C, so that both are handled in the same way."""

    signum = 15


def signal_of(interrupt: KeyboardInterrupt) -> int:
    """Return the number of the signal that caused an interrupt: its `signum`, or SIGINT's if it has none."""
    return getattr(interrupt, "signum", signal.SIGINT)


def missing_torch_error(error: ImportError) -> ResourceError | None:
    """Return the error to raise instead of an ImportError about torch; None for other imports."""
    if (error.name or "").partition(".")[0] != "torch":
        return None
    return ResourceError(f"this needs torch: {' '.join(str(error).split())}", hint=_TORCH)


def check_torch() -> None:
    """Check that torch is installed, before it is needed here or in a child process.

    Raises:
        ResourceError: torch is not installed.
    """
    if not has_torch():
        raise ResourceError("this needs torch, which is not installed", hint=_TORCH)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes (`raise ... from`), innermost last."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
