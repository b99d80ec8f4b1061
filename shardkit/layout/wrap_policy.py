"""Parse `--wrap`: which modules become units, each with a `fully_shard` call of its own.

    auto                          the classes that the model itself names (`_no_split_modules`)
    none                          one unit, the whole model
    LlamaDecoderLayer,...         modules of these classes
    pkg.mod.Class,...             the same, with the import path of the class
    model.layers                  modules by their path in the model: the children of a numbered container,
    model.layers.*                or every module that a path with `*` matches
    pkg.mod:function              function(model, mesh) calls `fully_shard` itself

Nothing is imported here. Names are resolved where the model or the tensor names are known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardkit.core.text import count, escape, likeness, suggestion, without_numbers
from shardkit.errors import PolicyError

# One part of a dotted name: an identifier, an index of a numbered container, or a `*`.
_NAME = re.compile(r"(?:\w+|\*)(?:\.(?:\w+|\*))*")
_FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
_MAX_SUGGESTIONS = 3
_MAX_CANDIDATES = 5


class PolicyWording(NamedTuple):
    """How a user writes a policy: as an option of the command or as an argument in Python. Messages use these words."""

    name: str
    """Name of the option or argument."""
    value: str
    """Template of the option with a value in place of `{}`, such as "--wrap {}"."""
    usage: str
    """Hint that lists the accepted values."""
    effect: str = "makes one unit"
    """The effect of "none"."""

    def of(self, policy: str) -> str:
        """Return a policy as the user would write it, such as "--wrap none"."""
        return self.value.format(policy)


OPTION = PolicyWording(
    "--wrap",
    "--wrap {}",
    "write auto, none, class names (A,B), import paths (pkg.mod.Class), module paths or module:function",
)

STAGES = PolicyWording("--stages", "--stages {}", "write auto or module:function")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapPolicy:
    """A wrap policy, parsed."""

    kind: Literal["auto", "none", "names", "function"]
    text: str
    """The policy as the user wrote it."""
    names: tuple[str, ...] = ()
    """Class names, import paths and module paths of the kind "names"."""
    function: tuple[str, str] | None = None
    """(module, attribute) of the kind "function"."""


def parse_policy(text: str, wording: PolicyWording = OPTION) -> WrapPolicy:
    """Return the policy that `--wrap` describes.

    Args:
        text: the value, in one of the forms that the docstring of this module lists.
        wording: the words for messages.

    Raises:
        PolicyError: the text is empty, or has none of the forms.
    """
    stripped = text.strip()
    if stripped == "auto":
        return WrapPolicy(kind="auto", text=stripped)
    if stripped == "none":
        return WrapPolicy(kind="none", text=stripped)
    function = _FUNCTION.fullmatch(stripped)
    if function:
        return WrapPolicy(kind="function", text=stripped, function=(function.group(1), function.group(2)))
    names = tuple(dict.fromkeys(part.strip() for part in stripped.split(",")))
    bad = [name for name in names if not _NAME.fullmatch(name)]
    if bad:
        shown = ", ".join(repr(escape(name)) for name in bad)
        raise PolicyError(f"{wording.name} {escape(stripped)!r}: cannot read {shown}", hint=wording.usage)
    reserved = [name for name in names if name in ("auto", "none")]
    if reserved:
        raise PolicyError(
            f"{wording.name} {escape(stripped)!r}: {reserved[0]!r} stands alone", hint=wording.usage
        )
    return WrapPolicy(kind="names", text=stripped, names=names)


def parse_stages(text: str) -> WrapPolicy:
    """Return the policy that `--stages` describes: "auto" or a function.

    Raises:
        PolicyError: the text is neither.
    """
    policy = parse_policy(text, STAGES)
    if policy.kind not in ("auto", "function"):
        raise PolicyError(f"--stages {escape(text)!r} is neither auto nor a function", hint=STAGES.usage)
    return policy


def no_split_names(value: object) -> tuple[str, ...]:
    """Return the class names in the value of a `_no_split_modules`, which may be a str, list, tuple, set or None.

    Sets are sorted, because their order differs from run to run.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(str, value)))
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def match_paths(pattern: str, paths: Sequence[str]) -> list[str]:
    """Return the modules that a module path names, in the order of `paths`.

    Args:
        pattern: "model.layers.*" (each `*` matches one part), a path ("model.layers"), or the last parts of a path
            ("layers"). A numbered container stands for its children.
        paths: every module path of the model.
    """
    pattern_parts = pattern.split(".")
    ends = [path for path in paths if _ends_with(path.split("."), pattern_parts)]
    if "*" in pattern_parts:
        return ends
    everything = set(paths)
    containers = {path for path in ends if f"{path}.0" in everything}
    named_paths = set(ends) - containers

    def is_meant(path: str) -> bool:
        around, _, name = path.rpartition(".")
        return path in named_paths or (around in containers and name.isdecimal())

    return list(filter(is_meant, paths))


def _ends_with(parts: list[str], pattern_parts: list[str]) -> bool:
    tail = parts[-len(pattern_parts) :]
    return len(tail) == len(pattern_parts) and all(
        w in ("*", p) for p, w in zip(tail, pattern_parts, strict=True)
    )


def path_templates(paths: Iterable[str]) -> Counter[str]:
    """Return module paths with `*` for numbers, and how many modules each matches."""
    return Counter(without_numbers(path) for path in paths if path)


def unknown_names_error(
    names: Iterable[str],
    candidates: Mapping[str, int],
    *,
    what: str,
    reason: str = "",
    wording: PolicyWording = OPTION,
) -> PolicyError:
    """Return the error for names that match no module.

    Args:
        names: the names that matched nothing.
        candidates: the names that exist, with the number of modules of each.
        what: the kind of `candidates`: "module classes" or "module paths".
        reason: why other kinds of names cannot be tried, as one clause.
        wording: the words for messages.
    """
    unmatched = tuple(names)
    shown = ", ".join(
        escape(name) + (suggestion(name, candidates) if index < _MAX_SUGGESTIONS else "")
        for index, name in enumerate(unmatched)
    )
    return PolicyError(
        f"{wording.name}: no module matches {shown}{'; ' + reason if reason else ''}",
        problems=list_candidates(candidates, unmatched),
        hint=f"the {what} that exist are listed above, nearest first; {wording.of('none')} {wording.effect}",
    )


def list_candidates(candidates: Mapping[str, int], names: Iterable[str] = ()) -> list[str]:
    """Return one line for each of the candidates most similar to `names`, and a line that counts the rest."""
    targets = tuple(names)
    ordered = sorted(candidates, key=lambda name: -_likeness(name, targets))
    shown = [f"{escape(name)}  ({count(candidates[name], 'module')})" for name in ordered[:_MAX_CANDIDATES]]
    return [*shown, *([f"... {len(ordered) - len(shown)} more"] if len(ordered) > len(shown) else [])]


def _likeness(name: str, names: tuple[str, ...]) -> float:
    return max((likeness(name, each) for each in names), default=0.0)
