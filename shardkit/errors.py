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

Messages and hints are written with options as the command line has them, `--overwrite`. Whoever reads an error in
Python finds arguments in their place, `overwrite=True`, in its attributes as in a traceback; while a command runs,
options stay (`speaking_options`). A command that can be run as it stands is put between backticks.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from shardkit._folding import fold_lines
from shardkit._version import has_torch

_SHOWN_PROBLEMS = 20
_TORCH = "`pip install 'shardkit[torch]'` in this Python"

FLAGS = frozenset(
    "--abort --allow-missing --allow-unexpected --dequantize --dry-run --follow-links --full --inside "
    "--keep-factors --manifest --merge-lora --no-optimizer --no-resume --overwrite --private --rounded --sha256 --single-file "
    "--stats --store --strict --tensors --trust-remote-code --uncommitted".split()
)
"""Options without a value that functions have as arguments."""
VALUED = frozenset(
    "--adapter-config --add-prefix --against --ask-class --atol --attribute --base --base-revision --branch "
    "--check-source --device --digest --dtype --dtype-rule --exclude --executor --fill-from-base --hub --include --jobs --keys --layout "
    "--manifest --manifest-file --max-memory --max-shard-size --mesh --names --num-parts --older-than --optimizer-dtype --osft --output "
    "--parallel-rule --part --profile --push-to-hub --read --rename --revision --root --rtol --seed "
    "--sort --source-manifest --stages --strip-prefix --tokenizer --variant --wait --weights --world-size --wrap".split()
)
"""Options with a value that functions have as arguments."""
ARGUMENTS = {
    "--dtype-rule": "dtype_rules",
    "--parallel-rule": "parallel_rules",
}
"""Those whose argument has another name than the option."""
_OF_A_PLAN = {"--osft-targets": "targets", "--osft-rank": "ranks"}
"""Options that are fields of the OsftPlan that `osft=` takes."""
_SWITCHES = {"on": "True", "off": "False"}
# A value: quoted, or a word that cannot be one of the sentence's own.
_OPTION = re.compile(
    r"`[^`]*`|(--[a-z][a-z0-9-]*)(?:[ =]('[^']*'|(?=[^\s;)]*[A-Z0-9=:])[^\s;)]*[^\s;),:]|(?:none|auto|on|off|env|declared|hub)\b))?"
)


# Of the process, as threads of a command raise errors too.
_readers = ["python"]


@contextmanager
def speaking_options() -> Iterator[None]:
    """Let errors name options, not arguments: the command line runs, or a process that works for whoever reads errors."""
    _readers.append("shell")
    try:
        yield
    finally:
        _readers.pop()


def as_arguments(text: str) -> str:
    """Return a message with the arguments of functions in place of options; commands in backticks stay."""

    def spell(match: re.Match[str]) -> str:
        option, value = match.groups()
        if option in _OF_A_PLAN:
            return _of_a_plan(option, value)
        if option == "--no-resume":
            return "resume=False"
        if option in FLAGS and (value is None or option not in VALUED):
            return match[0].replace(option, f"{option[2:].replace('-', '_')}=True", 1)
        if option not in VALUED:
            return match[0]
        name = ARGUMENTS.get(option, option[2:].replace("-", "_"))
        if value is None:
            return match[0].replace(option, name, 1)
        is_literal = value.startswith("'") or value.isupper() or value.replace(".", "").isdigit()
        return f"{name}={_SWITCHES.get(value, value if is_literal else repr(value))}"

    return _OPTION.sub(spell, text)


def _of_a_plan(option: str, value: str | None) -> str:
    """Return what stands for an option in an OsftPlan: `--osft-rank '*.q_proj=8'` is `ranks={'*.q_proj': 8}`."""
    name = _OF_A_PLAN[option]
    if value is None:
        return f"OsftPlan.{name}"
    glob, _, rank = value.strip("'").rpartition("=")
    return f"{name}={{'{glob}': {rank}}}" if name == "ranks" else f"{name}='{rank}'"


def _spoken(text: str) -> str:
    return as_arguments(text) if _readers[-1] == "python" else text


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
        self._written = (message, tuple(problems), hint)

    @property
    def message(self) -> str:
        """One line, what is wrong."""
        return _spoken(self._written[0])

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each instance."""
        return tuple(map(_spoken, self._written[1]))

    @property
    def hint(self) -> str | None:
        """What to do next; None if there is nothing to say."""
        return None if self._written[2] is None else _spoken(self._written[2])

    @classmethod
    def raise_for(cls, problems: Collection[str], message: str, *, hint: str | None = None) -> None:
        """Raise this error where there are problems; arguments as for the error itself."""
        if problems:
            raise cls(message, problems=problems, hint=hint)

    def __str__(self) -> str:
        """Return the error as a traceback shows it: layers and ranks are folded, as on the command line."""
        found = fold_lines(self.problems, spreads=True)
        lines = [self.message, *(f"  {each.pattern}" for each in found[:_SHOWN_PROBLEMS])]
        if hidden := sum(each.count for each in found[_SHOWN_PROBLEMS:]):
            lines.append(f"  ... {hidden} more")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Return the error as plain data, with options: type, message, every problem, hint, exit code."""
        message, problems, hint = self._written
        public = (kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        return {
            "error": next(public),
            "message": message,
            "problems": list(problems),
            "hint": hint,
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


def signal_of(interrupt: KeyboardInterrupt) -> int:
    """Return the number of the signal that an interrupt was raised for: SIGINT's, unless it says another."""
    return getattr(interrupt, "signum", signal.SIGINT)


def without_torch(error: ImportError) -> ResourceError | None:
    """Return what to raise in the place of an error that says that torch cannot be imported; None for any other."""
    if (error.name or "").partition(".")[0] != "torch":
        return None
    return ResourceError(f"this needs torch: {' '.join(str(error).split())}", hint=_TORCH)


def check_torch(what: str = "this") -> None:
    """Refuse what torch does here, or in a child process.

    Args:
        what: needs torch; for the message.

    Raises:
        ResourceError: torch is not installed.
    """
    if not has_torch():
        raise ResourceError(f"{what} needs torch, which is not installed", hint=_TORCH)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, innermost last."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
