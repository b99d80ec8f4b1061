"""What shardkit raises.

    ShardkitError            anything a user can cause; `exit_code` is what the command line returns
      UsageError        2    options that cannot be carried out, an existing destination
        MeshError       2    a mesh that does not parse, or disagrees with the world size
        PolicyError     2    a wrap policy that matches nothing
      SourceError       3    an input that is damaged, refused or not understood
        IntegrityError  3    bytes that are not what their description or digest says
        LayoutError     3    a model and a source that do not fit each other
      IncompleteError   4    work that stopped half-way; running it again resumes it
      ResourceError     5    disk, permission, memory or network
      Interrupted     130    Ctrl-C (130) or SIGTERM (143)

A message says what is wrong and where (file, tensor, offset); `problems` lists every instance of it,
and `hint` says what to do next. Names that came from a file must be escaped (`core.text.escape`) before
they are put into a message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

_SHOWN_PROBLEMS = 20


class ShardkitError(Exception):
    """Base of everything that a user can cause.

    Args:
        message: one line, what is wrong.
        problems: one line for each instance; all of one kind at once.
        hint: what to do next.
    """

    exit_code = 70

    def __init__(self, message: str, *, problems: Iterable[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.problems = tuple(problems)
        self.hint = hint

    @classmethod
    def raise_for(cls, problems: Collection[str], message: str, *, hint: str | None = None) -> None:
        """Raise this error where there are problems; arguments as for the error itself."""
        if problems:
            raise cls(message, problems=problems, hint=hint)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {problem}" for problem in self.problems[:_SHOWN_PROBLEMS])]
        if len(self.problems) > _SHOWN_PROBLEMS:
            lines.append(f"  ... {len(self.problems) - _SHOWN_PROBLEMS} more")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the error as plain data: type, message, every problem, hint, exit code."""
        return {
            "error": type(self).__name__,
            "message": self.message,
            "problems": list(self.problems),
            "hint": self.hint,
            "exit_code": self.exit_code,
        }


class UsageError(ShardkitError):
    """Options that cannot be carried out."""

    exit_code = 2


class MeshError(UsageError):
    """A mesh that does not parse, or disagrees with the world size."""


class PolicyError(UsageError):
    """A wrap policy that matches nothing, or cannot be imported."""


class SourceError(ShardkitError):
    """An input that is damaged, refused or not understood."""

    exit_code = 3


class IntegrityError(SourceError):
    """Bytes that are not what their description or digest says."""


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
    """SIGTERM, raised in the main thread like Ctrl-C so that both take the same way out."""

    signum = 15
