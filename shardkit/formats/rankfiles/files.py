"""Assemble the tensors of a checkpoint from several `torch.save` files, one for each rank.

A part of a DTensor or ShardedTensor has its region in the whole tensor. A plain tensor should be the same on every
rank: the first file's is used, and the others must have its dtype and shape. A part that several ranks have is used
once. If the recorded CRC-32s of two copies differ, this is reported; no data is read. Files are opened one after another
and only the places of their tensors are kept, so that 1,000 files fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from shardkit.core.catalog import Catalog, SourceFile, TensorEntry, subset
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, Shape, find_tiling_error, full_region
from shardkit.core.text import count, escape
from shardkit.errors import SourceError
from shardkit.files.links import locate_all
from shardkit.formats.contract import Checkpoint, Contents, DamagedFiles, DifferentCopies, Remarks
from shardkit.formats.contract.copies import CopyComparison, StoredCopy
from shardkit.formats.contract.optimizer import Path, path_name
from shardkit.formats.torchsave.archive import UnsupportedFile
from shardkit.formats.torchsave.classes import refuse_objects
from shardkit.formats.torchsave.file import (
    DistributedRef,
    LocalPart,
    TensorRef,
    TorchFile,
    UnreadableTensor,
    open_torch_file,
)
from shardkit.formats.torchsave.record import strided_file

_MAX_NAMES = 1 << 18  # of tensors, and of values beside them in lists and dicts
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_ANOTHER_COPY = "the checkpoint is damaged or incomplete: use another copy"

T = TypeVar("T")


class RankFile(NamedTuple):
    """One of the files to assemble."""

    name: str
    """Relative to the checkpoint."""
    below: Path = ()
    """The path in front of the paths of its tensors."""


class GatheredTensors(NamedTuple):
    """The tensors of several files, assembled."""

    catalog: Catalog
    """Extents are raw."""
    select: Callable[[Collection[str]], Catalog]
    """As in `Checkpoint`."""
    plain: frozenset[str]
    """Names of the tensors that are whole in every file that has them."""
    contents: Mapping[str, frozenset[tuple[Region, int]]]
    """By tensor, (region, recorded CRC-32) of its parts; equal for copies. Only tensors whose parts all have a CRC-32."""

    differing: tuple[DifferentCopies, ...] = ()
    """Tensors for which a later file has other bytes than the first, whose copy is used."""
    notes: tuple[str, ...] = ()
    """About copies that were not compared, and buffers that differ."""

    def as_checkpoint(self, path: str, format: str, writer: str) -> Checkpoint:
        """Return a checkpoint of these tensors, all of which are the model's."""
        return Checkpoint(
            path=path,
            format=format,
            writer=writer,
            catalog=self.catalog,
            select=self.select,
            contents=Contents(roots={"model": ()}),
            remarks=Remarks(differing=self.differing, notes=self.notes),
        )


class _PartBytes(NamedTuple):
    """The place of a part's bytes, and its checksum."""

    file: int
    start: int
    nbytes: int
    crc: int | None
    """Recorded CRC-32 of its bytes; None if the storage has other bytes too, or no CRC-32 is recorded."""
    stored: StoredCopy


class _CollectedTensor(NamedTuple):
    """A tensor while its parts are collected."""

    path: Path
    dtype: DType
    shape: Shape
    is_plain: bool
    chunks: dict[Region, _PartBytes]


def gather_files(directory: str, files: Sequence[RankFile]) -> GatheredTensors:
    """Open the files of all ranks, and assemble their tensors.

    Args:
        directory: the checkpoint's.
        files: in the order of the ranks.

    Raises:
        SourceError: damaged files, tensors that cannot be read or whose place is unknown, or parts that do not make up
            the whole; all problems of a kind at once.
        ResourceError: a file may not be read.
    """
    gathering, no_dicts = TensorCollector(directory), list[str]()
    below: dict[str, list[Path]] = {}
    for name, path in files:
        below.setdefault(name, []).append(path)
    for file in open_each(directory, list(below), lambda file: file):
        if isinstance(file.tree, dict):
            for path in below[file.name]:
                gathering.add(file, file.tree, path)
        else:
            no_dicts.append(f"{escape(file.name)}: no dict at its top, so no state dict either")
        del file  # its tree may be large; without this, it would live until the next file is open
    SourceError.raise_for(
        no_dicts, f"{len(no_dicts)} of {len(files)} files hold something else", hint=_ANOTHER_COPY
    )
    return gathering.finish()


def open_each(
    directory: str, names: Sequence[str], read: Callable[[TorchFile], T], prefix: str = ""
) -> Iterator[T]:
    """Open one file after another, and yield the result of `read` for each.

    Args:
        directory: of the checkpoint.
        names: of the files in it.
        read: extracts what the caller needs from a file; may raise SourceError.
        prefix: put before the files' names in messages.

    Raises:
        SourceError: links that leave the directory; or at the end, every file that cannot be read.
        IntegrityError: the same, if wrong CRC-32s are the only problem.
        ResourceError: a file may not be read.
    """
    failures: list[SourceError] = []
    for name, path in zip(names, locate_all(directory, names), strict=True):
        try:
            content = read(open_torch_file(path, prefix + name))
        except SourceError as error:
            failures.append(error)
            continue
        yield content
        del content
    if len(failures) == 1:
        raise failures[0]
    if failures:
        kinds = {type(error) for error in failures}
        kind = kinds.pop() if len(kinds) == 1 else SourceError
        raise kind(
            f"{len(failures)} of {len(names)} files cannot be read",
            problems=[error.message for error in failures],
            hint=failures[0].hint or _ANOTHER_COPY,
        )


def require_ranks(pattern: str, ranks: Collection[int], world_size: int) -> None:
    """Refuse a checkpoint that lacks the files of some ranks.

    Args:
        pattern: the name of a rank's file, with "{}" for the rank.
        ranks: those with a file.
        world_size: the number of all ranks.

    Raises:
        SourceError: names every missing file.
    """
    missing = [rank for rank in range(world_size) if rank not in ranks]
    if missing:
        raise DamagedFiles(
            f"the files of {len(missing)} of {world_size} ranks are missing",
            dict.fromkeys(map(pattern.format, missing), ""),
            hint="copy them from where the ranks ran: each may have saved on its own machine",
        )


class TensorCollector:
    """Collects the parts of tensors, one file after another, and assembles them in `finish`.

    Args:
        directory: of the checkpoint, for the catalog.
        may_lack: returns whether the tensor at a path may be left out if its bytes are not its values.
    """

    def __init__(self, directory: str, may_lack: Callable[[Path], bool] = lambda path: False) -> None:
        self.left_out: dict[str, str] = {}
        """The tensors that were left out: name -> reason."""
        self._may_lack = may_lack
        self._catalog = Catalog(format="torch-save", directory=directory)
        self._tensors: dict[str, _CollectedTensor] = {}
        self._objects: dict[str, None] = {}
        self._opened: list[TorchFile] = []
        self._file_ids: list[int] = []  # their numbers in the catalog, which has virtual files too
        self._unreadable: dict[str, str] = {}
        self._of_classes = set[str]()
        self._different: dict[str, str] = {}
        self._copies = CopyComparison()

    def add(self, file: TorchFile, tree: object, below: Path = ()) -> None:
        """Add the tensors of a file.

        Args:
            file: opened.
            tree: the part of its tree with the tensors.
            below: the path in front of the paths in `tree`.
        """
        self._opened.append(replace(file, tree=None))
        self._file_ids.append(len(self._catalog.files))
        self._catalog.files.append(file.source)
        self._add_below(file.source, tree, below)

    def _add_below(self, source: SourceFile, value: object, path: Path) -> bool:
        """Add the tensors at and below a path, and return whether there are any."""
        children: Iterable[tuple[str | int, object]]
        if isinstance(value, dict):
            children = value.items()
        elif isinstance(value, (list, tuple)):
            children = enumerate(value)
        else:
            return self._add_value(source, value, path)
        has_tensor, plain_keys = not path, list[str | int]()
        for key, child in children:
            if type(child) not in _SCALARS and self._add_below(source, child, (*path, key)):
                has_tensor = True
            else:
                plain_keys.append(key)
        if has_tensor:  # a subtree without any tensor is one object, not one for each number in it
            self._check_number(len(plain_keys), source)
            self._objects.update(dict.fromkeys(path_name((*path, key)) for key in plain_keys))
        return has_tensor

    def _check_number(self, num_more: int, source: SourceFile) -> None:
        if len(self._tensors) + len(self._objects) + num_more > _MAX_NAMES:
            raise SourceError(f"{escape(source.name)}: more than {_MAX_NAMES} tensors and values beside them")

    def _add_value(self, source: SourceFile, value: object, path: Path) -> bool:
        """Add a tensor of one rank's file, or the reason why it is not read; return False if the value is no tensor."""
        if isinstance(value, UnreadableTensor):
            self._refuse(source, path, value.name, is_of_class=value.value is not None)
        elif isinstance(value, DistributedRef):
            if value.problem:
                self._refuse(source, path, value.problem)
            else:
                self._add_parts(source, path, value, value.parts, is_plain=False)
        elif isinstance(value, TensorRef):
            self._add_parts(source, path, value, (LocalPart(full_region(value.shape), value),), is_plain=True)
        else:
            return False
        return True

    def _refuse(self, source: SourceFile, path: Path, reason: str, *, is_of_class: bool = False) -> None:
        refused = self.left_out if self._may_lack(path) else self._unreadable
        refused.setdefault(path_name(path), f"{source.name}: {reason}")
        if is_of_class:
            self._of_classes.add(path_name(path))

    def _add_parts(
        self,
        source: SourceFile,
        path: Path,
        whole: DistributedRef | TensorRef,
        parts: Iterable[LocalPart],
        *,
        is_plain: bool,
    ) -> None:
        """Add the regions of a tensor that one rank's file has. A region that another rank has too is a copy: it is compared.

        Args:
            source: the rank's file.
            path: of the tensor in the state dict.
            whole: has the dtype and shape of the whole tensor.
            parts: (region, stored tensor) of each part in the file.
            is_plain: the tensor is not a distributed one.
        """
        name = path_name(path)
        tensor = self._tensors.get(name)
        if tensor is None:
            self._check_number(1, source)
            tensor = self._tensors[name] = _CollectedTensor(path, whole.dtype, whole.shape, is_plain, {})
        elif (reason := _difference(tensor, path, whole.dtype, whole.shape, is_plain)) is not None:
            self._different.setdefault(name, f"{source.name}: {reason}")
            return
        for region, part in parts:
            if region.num_elements and region not in tensor.chunks:
                tensor.chunks[region] = self._place(name, part)
            elif region.num_elements:
                first = tensor.chunks[region]
                first_file = self._catalog.files[first.file].name
                self._copies.compare(name, first.stored, first_file, StoredCopy.of(part), source.name)

    def _place(self, name: str, tensor: TensorRef) -> _PartBytes:
        files, file = self._catalog.files, self._file_ids[-1]
        crc = tensor.crc32 if tensor.nbytes == tensor.data_nbytes else None
        if tensor.is_contiguous:
            return _PartBytes(file, tensor.start, tensor.nbytes, crc, StoredCopy.of(tensor))
        # Other tensors may share the storage: only the bytes from this tensor's first to its last are read.
        start = tensor.start
        record = replace(
            tensor, data_start=start, data_nbytes=tensor.reach - (start - tensor.data_start), storage_offset=0
        )
        entry = TensorEntry(fqn=name, dtype=tensor.dtype, shape=tensor.shape, first_chunk=0, num_chunks=1)
        files.append(strided_file(files[file], entry, record))
        return _PartBytes(len(files) - 1, 0, tensor.nbytes, crc, StoredCopy.of(tensor))

    def finish(self) -> GatheredTensors:
        """Return the assembled tensors.

        Raises:
            SourceError: tensors that cannot be read, whose place is unknown, that differ between files, or that lack
                parts.
        """
        self._raise_problems()
        catalog, tensors, gaps = self._catalog, self._tensors, []
        for name, tensor in tensors.items():
            reason = find_tiling_error(tensor.shape, list(tensor.chunks))
            if reason is not None:
                gaps.append(f"{escape(name)}: {reason}")
                continue
            chunks = (
                (chunk.file, chunk.start, chunk.nbytes, region) for region, chunk in tensor.chunks.items()
            )
            catalog.add_tensor(name, tensor.dtype, tensor.shape, chunks)
        SourceError.raise_for(
            gaps,
            f"the parts of {count(len(gaps), 'tensor')} in {count(len(self._opened), 'file')} do not make up the tensor",
            hint="the file of a rank is missing, or files are from different saves: use another copy",
        )
        catalog.objects = tuple(self._objects)
        catalog.paths = {name: tensor.path for name, tensor in tensors.items()}
        return GatheredTensors(
            catalog=catalog,
            select=partial(subset, catalog),
            plain=frozenset(name for name, tensor in tensors.items() if tensor.is_plain),
            contents={
                name: frozenset((region, chunk.crc) for region, chunk in tensor.chunks.items() if chunk.crc)
                for name, tensor in tensors.items()
                if all(chunk.crc for chunk in tensor.chunks.values())
            },
            differing=self._copies.differing(),
            notes=tuple(self._copies.notes()),
        )

    def _raise_problems(self) -> None:
        if self._unreadable.keys() <= self._of_classes:
            refuse_objects(self._unreadable, (file.source for file in self._opened))
        UnsupportedFile.raise_for(
            [f"{escape(name)}: {escape(why)}" for name, why in self._unreadable.items()],
            f"{count(len(self._unreadable), 'tensor')}: the stored bytes are not the values",
            hint="save the model with ordinary dense tensors",
        )
        SourceError.raise_for(
            [f"{escape(name)}: {escape(why)}" for name, why in self._different.items()],
            f"{len(self._different)} tensors are different in the files of other ranks",
            hint="the files are from different saves, or hold local parts without a record of their place",
        )


def _difference(
    tensor: _CollectedTensor, path: Path, dtype: DType, shape: Shape, is_plain: bool
) -> str | None:
    if path != tensor.path:
        return "two tensors of one name"
    if is_plain != tensor.is_plain:
        return "a whole tensor here, a part of one elsewhere"
    if shape != tensor.shape or dtype is not tensor.dtype:
        return f"{dtype.name} {list(shape)}, elsewhere {tensor.dtype.name} {list(tensor.shape)}"
    return None
