"""What a person asks of names: prefixes to strip or add, renames, globs. Applied in that order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardkit.core.text import count, escape, suggestion
from shardkit.errors import UsageError
from shardkit.keys.names import clean, join

_MANY_TIMES = re.compile(r"\{(?:\d*,)?\d{4,}")  # no name is so long; Python takes gigabytes to repeat nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Rename:
    """One `--rename`, parsed."""

    text: str
    """As it was given."""
    pattern: re.Pattern[str]
    replacement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Every override of names, parsed."""

    strip_prefix: tuple[str, ...] = ()
    """Without the dot at the end; the first that a name begins with goes."""
    add_prefix: str = ""
    """With its dot, or empty."""
    rename: tuple[Rename, ...] = ()
    """Each is applied to what the one before it left."""
    include: tuple[str, ...] = ()
    """Globs; empty for all."""
    exclude: tuple[str, ...] = ()
    """Globs; they win over `include`."""

    @property
    def change_names(self) -> bool:
        """True where names are changed, not only chosen."""
        return bool(self.strip_prefix or self.add_prefix or self.rename)


def parse_rules(
    *,
    strip_prefix: Sequence[str] = (),
    add_prefix: str = "",
    rename: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Rules:
    """Return the overrides that the options describe.

    Args:
        strip_prefix: dotted; a dot at the end makes no difference.
        add_prefix: the same.
        rename: REGEX=REPL, Python's syntax; the last `=` divides, so that look-aheads need no escaping.
        include: globs over output names or stored names, where `*` matches dots too.
        exclude: the same.

    Raises:
        UsageError: every rename or prefix that cannot be read.
    """
    problems: list[str] = []
    renames = [parsed for text in rename if (parsed := _rename(text, problems)) is not None]
    problems += [f"--strip-prefix {text!r}: empty" for text in strip_prefix if not text.strip(".")]
    if problems:
        raise UsageError(
            f"{count(len(problems), 'option')} about names cannot be read",
            problems=problems,
            hint=r"write --rename 'REGEX=REPL', e.g. --rename '^backbone\.=model.'; groups are \1 or \g<name>",
        )
    return Rules(
        strip_prefix=tuple(join(clean(text.rstrip("."))) for text in strip_prefix),
        add_prefix=add_prefix.rstrip(".") + "." if add_prefix.strip(".") else "",
        rename=tuple(renames),
        include=tuple(include),
        exclude=tuple(exclude),
    )


def _rename(text: str, problems: list[str]) -> Rename | None:
    regex, equals, replacement = text.rpartition("=")
    if not equals or not regex:
        problems.append(f"--rename {escape(text)!r}: there is no = between two parts")
        return None
    if _MANY_TIMES.search(regex):
        problems.append(f"--rename {escape(text)!r}: it repeats something more than 999 times")
        return None
    try:
        pattern = re.compile(regex)
        pattern.sub(replacement, "")  # reads the replacement's group references too
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        problems.append(f"--rename {escape(text)!r}: {escape(str(error))}")
        return None
    return Rename(text=text, pattern=pattern, replacement=replacement)


def apply_rules(rules: Rules, names: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return output names by stored names, and a note for each option that changed nothing.

    Args:
        rules: the overrides.
        names: stored name -> output name so far.

    Raises:
        UsageError: a prefix to strip that no name has; a rename that leaves a name empty.
    """
    unnamed = {stored for stored, name in names.items() if not name}  # as it was saved: allowed, if odd
    names, notes = _strip(rules.strip_prefix, names), list[str]()
    names = {stored: rules.add_prefix + name for stored, name in names.items()}
    for rename in rules.rename:
        renamed = {stored: rename.pattern.sub(rename.replacement, name) for stored, name in names.items()}
        if renamed == names:
            notes.append(f"--rename {escape(rename.text)!r} matches no name")
        names = renamed
    empty = [escape(stored) for stored, name in names.items() if not name and stored not in unnamed]
    if empty:
        raise UsageError(f"--rename leaves {count(len(empty), 'name')} empty", problems=empty)
    notes += [f"--exclude {escape(glob)!r} matches no name" for glob in _idle(rules.exclude, names)]
    notes += [f"--include {escape(glob)!r} matches no name" for glob in _idle(rules.include, names)]
    kept = {
        stored: name
        for stored, name in names.items()
        if (not rules.include or _matches(rules.include, stored, name))
        and not _matches(rules.exclude, stored, name)
    }
    return kept, notes


def _strip(prefixes: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    stripped, used = dict(names), set[str]()
    for stored, name in names.items():
        for prefix in prefixes:
            if name.startswith(prefix + "."):
                stripped[stored] = name[len(prefix) + 1 :]
                used.add(prefix)
                break
    idle = [prefix for prefix in prefixes if prefix not in used]
    if idle:
        known = {join(clean(name)[:depth]) for name in names.values() for depth in range(1, 4)}
        raise UsageError(
            f"no name begins with {count(len(idle), 'prefix', 'prefixes')} to strip",
            problems=[f"--strip-prefix {escape(prefix)!r}{suggestion(prefix, known)}" for prefix in idle],
        )
    return stripped


def _matches(globs: Iterable[str], stored: str, name: str) -> bool:
    return any(fnmatchcase(name, glob) or fnmatchcase(stored, glob) for glob in globs)


def _idle(globs: Iterable[str], names: Mapping[str, str]) -> list[str]:
    return [glob for glob in globs if not any(_matches((glob,), *pair) for pair in names.items())]
