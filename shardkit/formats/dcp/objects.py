"""Find tensors inside the byte entries of a DCP directory, without unpickling them.

DCP stores a pickled object as a byte entry. It looks for tensors only in dicts and lists: a tensor in a tuple, a set or
any other object is pickled with the object, and so is a whole state dict that is saved with `flatten_state_dict=False`.
Every rank has this entry under the same name, and DCP saves one rank's. If a sharded tensor is inside, the rows of the
other ranks are lost.

Source: torch 2.13, torch/distributed/checkpoint/_nested_dict.py and default_planner.py; placement_types.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

from shardkit.core.text import count, escape, listed
from shardkit.errors import SourceError
from shardkit.files.strict_json import open_regular
from shardkit.formats.contract import DcpFolder, EntryLocation
from shardkit.formats.torchsave.archive import ZipEntry, ZipReader, pread_of, read_directory
from shardkit.formats.torchsave.file import DistributedRef, TensorNames, UnreadableTensor
from shardkit.pickles.policies import Inert, Maker

_LEAST = 1400  # bytes: torch 2.13 writes a number in 1,261, and a tensor of one element in 1,577
_MAX_PICKLE = 1 << 24
_OF_MESH = re.compile(rb"ctorch\.distributed\.[\w.]+\n(DTensor|ShardedTensor)\n")
"""The classes of distributed tensors, as a pickle of torch.save names them."""
_OF_TYPE = "_rebuild_from_type"
"""Beginning of the names of the functions that make distributed tensors."""

ObjectContent = Literal["tensors", "distributed", "parts"]
"""What an object contains: plain tensors, distributed tensors that every rank has whole, or one rank's parts of them."""


class SavedAsObjects(SourceError):
    """Only objects were saved, with sharded tensors inside, so that only the parts of one rank are stored."""


def objects_with_tensors(opened: DcpFolder) -> dict[str, ObjectContent]:
    """Return what each byte entry with tensors inside contains, by name.

    Left out are entries that an extension encoded (`transforms`), damaged ones, and those of fewer than `_LEAST` bytes,
    which have no room for a tensor.

    Raises:
        ResourceError: a file may not be read.
    """
    kinds = dict[str, ObjectContent]()
    by_file: dict[int, list[tuple[str, EntryLocation]]] = {}
    for name, place in opened.objects.items():
        if place is not None and place.nbytes >= _LEAST and not place.transforms:
            by_file.setdefault(place.file, []).append((name, place))
    for number, entries in by_file.items():
        source = opened.catalog.files[number]
        with open_regular(source.path, source.name, follow=False) as (fd, _):
            for name, place in entries:
                with suppress(SourceError):
                    reader = ZipReader(pread_of(fd), place.start, place.nbytes, escape(source.name))
                    members = read_directory(reader)
                    if "data.pkl" in members and any(member.startswith("data/") for member in members):
                        data = reader.content("data.pkl", members["data.pkl"], _MAX_PICKLE)
                        kinds[name] = _content_of(data, members)
    return {name: kinds[name] for name in opened.objects if name in kinds}


def _content_of(data: bytes, members: Mapping[str, ZipEntry]) -> ObjectContent:
    """Return what an object contains, by its pickle, of which nothing is executed; "parts" if it cannot be read."""
    if not _OF_MESH.search(data):
        return "tensors"
    names = TensorNames({key[5:]: entry for key, entry in members.items() if key.startswith("data/")})
    made_objects = list[object]()

    def look_up(module: str, name: str) -> object:
        thing = names.look_up(module, name)
        if isinstance(thing, Maker) and name.startswith(_OF_TYPE):
            return Maker(thing.name, partial(make, thing))
        return thing

    def make(thing: Maker, args: tuple[Any, ...]) -> object:
        made_objects.append(thing.make(args))
        return made_objects[-1]

    try:
        Inert(data, look_up, names.storage).run("data.pkl")
    except SourceError:
        return "parts"
    return "distributed" if all(map(_is_whole, made_objects)) else "parts"


def _is_whole(tensor: object) -> bool:
    """True if one rank has all of a tensor; False also for a tensor of an unknown class."""
    if not isinstance(tensor, DistributedRef):
        return not isinstance(tensor, UnreadableTensor)
    return sum(prod(part.tensor.shape) for part in tensor.parts) == prod(tensor.shape)


def distributed_objects(opened: DcpFolder) -> tuple[str, ...]:
    """Return the names of byte entries with distributed tensors inside, which fit only the mesh of the save.

    Raises:
        ResourceError: a file may not be read.
    """
    return tuple(name for name, kind in objects_with_tensors(opened).items() if kind != "tensors")


class ObjectLines(NamedTuple):
    """Messages about objects with distributed tensors inside."""

    lost: tuple[str, ...]
    """About objects of which other ranks' parts are lost."""
    notes: tuple[str, ...]
    """About objects that are complete, but cannot be loaded on another mesh."""


def object_lines(opened: DcpFolder) -> ObjectLines:
    """Return messages about objects with distributed tensors inside.

    Raises:
        ResourceError: a file may not be read.
    """
    kinds = objects_with_tensors(opened)
    lost = [name for name, kind in kinds.items() if kind == "parts"]
    bound = [name for name, kind in kinds.items() if kind == "distributed"]
    return ObjectLines(
        (
            f"{_entry_count(lost)} sharded tensors in an object, such as a tuple, of which torch saves the rows of one rank; "
            f"those of the others are in no file: {listed(lost)}",
        )
        if lost
        else (),
        (
            f"{_entry_count(bound)} distributed tensors in an object, such as a tuple, which fit the mesh of this save alone: "
            f"{listed(bound)}",
        )
        if bound
        else (),
    )


def _entry_count(names: Collection[str]) -> str:
    return count(len(names), "byte entry has", "byte entries have")


def refuse_objects_alone(path: str, opened: DcpFolder) -> None:
    """Refuse a directory that has byte entries and no tensor.

    Raises:
        SavedAsObjects: tensors were saved inside objects, and parts of them are lost.
        SourceError: no part is known to be lost.
    """
    sizes: Mapping[str, int] = {name: place.nbytes if place else 0 for name, place in opened.objects.items()}
    tensors, lost = objects_with_tensors(opened), object_lines(opened).lost
    lines = [
        f"{escape(name)}: {count(size, 'byte')}"
        + (", an object with tensors in it" if name in tensors else "")
        for name, size in sizes.items()
        if name in tensors or not tensors
    ]
    message = f"{escape(path)} has no tensors: only " + count(
        len(sizes), "entry that is not a tensor", "entries that are not tensors"
    )
    if lost:
        raise SavedAsObjects(
            f"{message}; a state dict was saved as one object, of which DCP keeps the rows of one rank",
            problems=lines,
            hint="the rows of the other ranks are in no file: use an earlier checkpoint, and save without "
            "DefaultSavePlanner(flatten_state_dict=False)",
        )
    if tensors:
        raise SourceError(
            f"{message}; a state dict was saved as one object",
            problems=lines,
            hint="load it with DefaultLoadPlanner(flatten_state_dict=False), as it was saved, and save it again without",
        )
    raise SourceError(
        message,
        problems=lines,
        hint="a trainer that picks parameters by name may have found none (known: FSDP1 with PEFT adapters);"
        " use an earlier checkpoint, or save the model again",
    )
