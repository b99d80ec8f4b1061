"""What the optimizer's files of all ranks have to say alike: counts, groups and settings.

Each rank saves its own file, and all of them count the same steps. Files of two saves in one directory fit together by
name, shape and place: moments of one step beside those of another would train, and train wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError
from shardkit.formats.optimizer.entries import PARAMS, STEP
from shardkit.formats.torchsave.file import TensorRef
from shardkit.formats.torchsave.plain_record import is_plain


class Agreement:
    """Holds the files of other ranks against the first one's; of that alone something is kept."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._counts: dict[str, object] = {}
        self._groups: list[dict[str, str]] | None = None
        self._problems: list[str] = []

    def add(
        self,
        name: str,
        states: Mapping[str, Mapping[str, object]],
        groups: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Take a rank's file.

        Args:
            name: of the file.
            states: what each parameter, or flat tensor, has of each leaf.
            groups: as `optimizer.state_dict()` has them; None where they were not saved.
        """
        counts = {
            f"{leaf} of {parameter}": value
            for parameter, leaves in states.items()
            for leaf, stored in leaves.items()
            if (leaf == STEP or type(stored) is int) and (value := count_of(stored)) is not None
        }
        settings = None if groups is None else [_settings(group) for group in groups]
        if self._first is None:
            self._first, self._counts, self._groups = name, counts, settings
            return
        others = [key for key, value in counts.items() if self._counts.get(key, value) != value]
        if settings is not None and self._groups is not None:
            others += _other_settings(self._groups, settings)
        if others:
            self._problems.append(f"{escape(name)}: not as in {escape(self._first)}: {listed(others)}")

    def check(self) -> None:
        """Refuse files that are not of one save.

        Raises:
            IntegrityError: names every file that differs from the first one.
        """
        if self._problems:
            raise IntegrityError(
                f"{count(len(self._problems), 'file')} of the optimizer {'is' if len(self._problems) == 1 else 'are'} "
                "of another save than the first rank's",
                problems=self._problems,
                hint="use another copy of the checkpoint, with the files of all ranks from one save",
            )


def count_of(value: object) -> object | None:
    """Return what a count is, to be compared: the number, or the CRC-32 of the only element of a tensor."""
    if type(value) in (int, float):
        return repr(value)
    if not isinstance(value, TensorRef) or value.shape or value.nbytes != value.data_nbytes:
        return None
    return None if value.crc32 is None else (value.dtype.name, value.crc32)


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a group as text; torch gathers named parameters in no order."""
    params = group.get(PARAMS)
    found = {str(key): repr(value) for key, value in group.items() if key != PARAMS and is_plain(value)}
    if isinstance(params, list):
        found[PARAMS] = repr(sorted(params) if all(type(key) is str for key in params) else params)
    return found


def _other_settings(
    groups: Sequence[Mapping[str, str]], others: Sequence[Mapping[str, str]]
) -> Iterator[str]:
    if len(groups) != len(others):
        yield f"{len(others)} groups"
        return
    for number, (group, other) in enumerate(zip(groups, others, strict=True)):
        for key in sorted(group.keys() | other.keys()):
            if group.get(key) != other.get(key):
                yield f"{key} of group {number}"
