"""The optimizer's state of a checkpoint that is not DCP, in the form that torch's DCP recipes use.

    state.<fqn>.exp_avg, state.<fqn>.step, ...      tensors
    param_groups.<number>.lr, ...                   byte entries, one for each setting

`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` returns it nested; `dcp.save` makes these flat names.
A leaf is one value of a parameter's state, such as `exp_avg`.

If each rank saved a file of its own, `OptimizerComparison` checks that all are of one save, by their step counts and
settings. Files of two saves would fit together by name and shape, but training would resume with moments of
different steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkit.core.catalog import Catalog, Decoded, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.torchsave.file import TensorRef
from shardkit.formats.torchsave.writer import is_plain, plain_record

STATE, GROUPS, PARAMS, STEP = "state", "param_groups", "params", "step"
Path = tuple[str | int, ...]
Group = Mapping[str, Any]
"""An item of `optimizer.state_dict()["param_groups"]`: the settings of a group of parameters."""

_MAX_COUNT = 1 << 53
# Byte entries. A group for each of 15,000 parameters needs fewer; a pickle of a few KiB can ask for millions.
_MAX_OBJECTS = 1 << 18
_ADAM = frozenset({"exp_avg", "exp_avg_sq", STEP})
# torch 2.13, torch/optim/adam.py: what `dcp.load` asks for beside `params`.
_ADAMW_SETTINGS = frozenset(
    {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable"}
    | {"fused", "decoupled_weight_decay"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An opened optimizer's state; no tensor data."""

    catalog: Catalog
    """Its extents are raw bytes, and it has `paths`; a byte entry is a tensor of bytes in it."""
    objects: tuple[str, ...]
    """Names of the byte entries."""
    shows_cuts: bool = True
    """As in `Contents`."""
    has_model: bool = False
    """True if the catalog has the model too: one file holds both, and all names stay as they are."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The values of the byte entries, by name."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""


@dataclass(frozen=True, slots=True)
class UnusableOptimizer:
    """An optimizer's state that cannot be used."""

    names: Sequence[str]
    """Its files, or its entries in the model's file."""
    reason: str
    """Why it cannot be used; escaped."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Those settings of its groups that could be read, by name."""


def state_path(fqn: str, leaf: str | int) -> Path:
    """Return the path of one leaf of a parameter's state in the nested dict."""
    return STATE, fqn, str(leaf)


def path_name(path: Path) -> str:
    """Return the flat name of a path, as `dcp.save` makes it."""
    return ".".join(map(str, path))


def read_groups(name: str, value: object) -> list[Group] | None:
    """Return the groups of an optimizer's state dict; None if the value is not a list of dicts.

    Args:
        name: of the file, for messages.
        value: the entry `param_groups`.

    Raises:
        SourceError: more settings than any optimizer has.
    """
    if not isinstance(value, list) or not all(isinstance(group, dict) for group in value):
        return None
    _refuse_many(name, sum(map(len, value)))
    return value


def _refuse_many(name: str, number: int) -> None:
    if number > _MAX_OBJECTS:
        raise SourceError(
            f"{escape(name)}: an optimizer with more than {_MAX_OBJECTS} settings",
            hint="the file is damaged, or only pretends to hold an optimizer: use another copy",
        )


class StateWriter:
    """Adds settings and counts, which the source does not store as tensors, to a catalog of state tensors.

    Args:
        catalog: receives the entries.
        source: the file that they were read from; if it changes, the entries are stale too.
        below: the path in front of every entry's path.
    """

    def __init__(self, catalog: Catalog, source: SourceFile, below: Path = ()) -> None:
        self._catalog, self._source, self._below = catalog, source, below
        self._files: dict[bytes, int] = {}
        self._tensor_file: int | None = None
        self._objects: list[str] = []
        self._dropped: list[str] = []
        self._settings: dict[str, object] = {}
        self._paths = catalog.paths = dict(catalog.paths or {})

    def add_object(self, path: Path, value: object) -> None:
        """Add a byte entry. A value that is not plain data is left out, and a note names it.

        Raises:
            SourceError: there are more than any optimizer has.
        """
        _refuse_many(self._source.name, len(self._objects))
        if not is_plain(value):
            self._dropped.append(path_name(path))
            return
        data = plain_record(value)
        name = self._add_bytes(path, "uint8", (len(data),), data)
        self._objects.append(name)
        self._settings[name] = value

    def add_count(self, path: Path, value: float) -> None:
        """Add a number as torch's optimizers store their step count: a float32 tensor without dims.

        A number that is too large, or NaN, is left out, and a note names it.
        """
        if abs(value) <= _MAX_COUNT:
            self._add_bytes(path, "float32", (), struct.pack("<f", value))
        else:  # too large, or NaN
            self._dropped.append(path_name(path))

    def add_groups(self, groups: Sequence[Group], params: Sequence[Sequence[str]]) -> None:
        """Add the settings of every group of parameters.

        Args:
            groups: from `read_groups`.
            params: the FQNs of each group's parameters.

        Raises:
            SourceError: more settings than any optimizer has.
        """
        for number, (group, names) in enumerate(zip(groups, params, strict=True)):
            for key, value in group.items():
                path = (GROUPS, number, key)
                if key == PARAMS:
                    continue
                if isinstance(value, TensorRef):
                    self._add_tensor(path, value)
                else:
                    self.add_object(path, value)
            self.add_object((GROUPS, number, PARAMS), list(names))

    def finish(self, notes: Iterable[str] = (), *, shows_cuts: bool = True) -> OptimizerState:
        """Return the state, with `notes` and a note about what was left out."""
        return OptimizerState(
            catalog=self._catalog,
            objects=tuple(self._objects),
            shows_cuts=shows_cuts,
            settings=self._settings,
            notes=(*notes, *self._more_notes()),
        )

    def _more_notes(self) -> Iterator[str]:
        if self._dropped:
            yield (
                f"{count(len(self._dropped), 'entry', 'entries')} of the optimizer are not plain data, and are left out: "
                f"{listed(self._dropped)}"
            )
        depth = len(self._below)
        paths = [path[depth:] for path in self._paths.values() if path[:depth] == self._below]
        leaves = {path[-1] for path in paths if path[0] == STATE}
        groups: dict[str | int, set[str | int]] = {}
        for path in paths:
            if path[0] == GROUPS:
                groups.setdefault(path[1], set()).add(path[2])
        lacking = sorted({key for keys in groups.values() for key in _ADAMW_SETTINGS - keys})
        if leaves >= {"exp_avg", "exp_avg_sq"} and leaves <= _ADAM and lacking:
            yield (
                f"the optimizer was not torch's own AdamW: its groups do not have {', '.join(lacking)}; with "
                "DefaultLoadPlanner(allow_partial_load=True), dcp.load leaves them as they are"
            )

    def _add_tensor(self, path: Path, value: TensorRef) -> None:
        if not value.is_contiguous:
            self._dropped.append(path_name(path))
            return
        if self._tensor_file is None:
            self._catalog.files.append(self._source)
            self._tensor_file = len(self._catalog.files) - 1
        self._add(path, value.dtype.name, value.shape, self._tensor_file, value.start, value.nbytes)

    def _add_bytes(self, path: Path, dtype: str, shape: tuple[int, ...], data: bytes) -> str:
        file = self._files.get(data)
        if file is None:  # equal entries share a file: all parameters usually have the same count
            entry_file = SourceFile(
                name=f"{self._source.name}:{path_name((*self._below, *path))}",
                path=self._source.path,
                size=len(data),
                derivation=Decoded(lambda _: memoryview(data), is_proved=True),
                stamp=self._source.stamp,
            )
            self._catalog.files.append(entry_file)
            file = self._files[data] = len(self._catalog.files) - 1
        return self._add(path, dtype, shape, file, 0, len(data))

    def _add(self, path: Path, dtype: str, shape: tuple[int, ...], file: int, start: int, nbytes: int) -> str:
        path = (*self._below, *path)
        name = path_name(path)
        chunk = (file, start, nbytes, Region((0,) * len(shape), shape))
        self._catalog.add_tensor(name, BY_NAME[dtype], shape, iter([chunk]))
        self._paths[name] = path
        return name


class OptimizerComparison:
    """Compares the optimizer's file of each rank with that of the first, whose values alone are kept."""

    def __init__(self) -> None:
        self._first: str | None = None
        self._counts: dict[str, object] = {}
        self._groups: list[dict[str, str]] | None = None
        self._problems: list[str] = []

    def add(
        self, name: str, states: Mapping[str, Mapping[str, object]], groups: Sequence[Group] | None
    ) -> None:
        """Compare a rank's file with the first, or keep it if it is the first.

        Args:
            name: of the file.
            states: by parameter or flat tensor, the leaves of its state.
            groups: the file's `param_groups`; None if they were not saved.
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
        differences = [key for key, value in counts.items() if self._counts.get(key, value) != value]
        if settings is not None and self._groups is not None:
            differences += _differing_settings(self._groups, settings)
        if differences:
            self._problems.append(f"{escape(name)}: not as in {escape(self._first)}: {listed(differences)}")

    def check(self) -> None:
        """Refuse files of different saves.

        Raises:
            IntegrityError: names every file that differs from the first one.
        """
        if self._problems:
            number = len(self._problems)
            raise IntegrityError(
                f"{count(number, 'file')} of the optimizer {'is' if number == 1 else 'are'} "
                "from another save than the first rank's",
                problems=self._problems,
                hint="use another copy of the checkpoint, with the files of all ranks from one save",
            )


def count_of(value: object) -> object | None:
    """Return a step count in a form that can be compared: a number's text, or the dtype and CRC-32 of a scalar tensor.

    None if the value is neither, or if no CRC-32 is recorded.
    """
    if type(value) in (int, float):
        return repr(value)
    if not isinstance(value, TensorRef) or value.shape or value.nbytes != value.data_nbytes:
        return None
    return None if value.crc32 is None else (value.dtype.name, value.crc32)


def _settings(group: Group) -> dict[str, str]:
    """Return a group's settings as text. Names of parameters are sorted: torch gathers them in no fixed order."""
    params = group.get(PARAMS)
    settings = {str(key): repr(value) for key, value in group.items() if key != PARAMS and is_plain(value)}
    if isinstance(params, list):
        settings[PARAMS] = repr(sorted(params) if all(type(key) is str for key in params) else params)
    return settings


def _differing_settings(
    groups: Sequence[Mapping[str, str]], other_groups: Sequence[Mapping[str, str]]
) -> Iterator[str]:
    if len(groups) != len(other_groups):
        yield f"{len(other_groups)} groups"
        return
    for number, (group, other_group) in enumerate(zip(groups, other_groups, strict=True)):
        for key in sorted(group.keys() | other_group.keys()):
            if group.get(key) != other_group.get(key):
                yield f"{key} of group {number}"
