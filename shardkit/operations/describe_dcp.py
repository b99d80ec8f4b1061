"""Write the files that describe a DCP checkpoint's shard files: chunk lists, `.metadata` and the manifest.

`.metadata` appears last, because it makes a directory a checkpoint. Trainers have several DCP directories in folders of
one checkpoint; each folder has its own description.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, is_contiguous
from shardkit.core.text import KIB
from shardkit.files import manifest, storage
from shardkit.files.digest import combine, sha256_of
from shardkit.formats.dcp import METADATA, chunk_list
from shardkit.formats.dcp.images import DcpImage, DcpImages, RecordKind
from shardkit.formats.dcp.writer import write_metadata
from shardkit.keys.expressions import Expression, to_json
from shardkit.keys.renaming import KeyRule
from shardkit.layout.layout import Layout
from shardkit.layout.recorded import record_view
from shardkit.operations.casts import DtypeRule
from shardkit.operations.describe import OutputFiles
from shardkit.operations.environment import traced_with
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.stream import read_back

# Bytes that a chunk adds to `.metadata` and to a chunk list. Measured for a 2-D weight: 110 and 130 bytes. Names of tied
# tensors and long paths add some.
DESCRIPTION_BYTES = 1 * KIB
_PART = METADATA + ".part"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpOutput:
    """One DCP directory to write: its images, and the information about them that is recorded."""

    output: DcpImages
    layout: Layout
    entries: Mapping[str, TensorEntry]
    """Name of a stored tensor -> its tensor in the source."""
    dtypes: Mapping[str, DType]
    """Name of a stored tensor -> dtype in the output."""
    sources: Mapping[str, str]
    """Name of a stored tensor -> name in the plan's catalog."""
    aliases: Mapping[str, tuple[str, ...]]
    """Name of a stored tensor -> further names that share its records."""
    identity: manifest.RecordedSource
    """The source's weights: repo, commit and files."""
    cast: str
    """The option `dtype`: "keep", "bf16", "fp16" or "fp32"."""
    digest: str
    """"crc32" or "none"."""
    dequantized: str | None = None
    """How the source's weights are quantised, if they were dequantised."""
    osft: manifest.Osft | None = None
    """Which weights are stored as factors."""
    vocab_size: int | None = None
    """Rows of the vocabulary, as `shardkit.save` recorded them."""
    dtype_rules: tuple[DtypeRule, ...] = ()
    """The option `dtype_rules`, parsed."""
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    """Name -> keys in the nested state dict; None if names are flat."""
    key_rules: tuple[KeyRule, ...] = ()
    """Rules that turn the model's names into the Hub's."""
    tells_hub_names: bool = True
    """False if it is not known which names the tensors have on the Hub."""
    derived: Mapping[str, Expression] = field(default_factory=dict)
    """Name in memory -> the expression of the Hub's tensors that it was made by, for tensors that were converted."""
    file_names: Mapping[str, str] = field(default_factory=dict)
    """Name of a stored tensor -> name in the model's original files, if the source was itself made from these."""
    root: str = ""
    """Prefix before the model's own names that a trainer expects: "model."."""
    optimizer_cast: str | None = None
    """The option `optimizer_dtype`; None if the checkpoint can have neither an optimizer nor byte entries."""
    objects: tuple[str, ...] = ()
    """Names of the byte entries."""

    def describe(self, crcs: Mapping[str, int] = MappingProxyType({})) -> manifest.Presharded:
        """Return the manifest, as far as it is known before bytes move.

        Args:
            crcs: CRC-32s of tensors, once they are known.
        """
        layout, mesh, is_whole = self.layout, self.layout.mesh, self.optimizer_cast is not None
        placed = {fqn: layout.tensors[fqn] for fqn in self.output.catalog.tensors}  # in file order
        views = list(dict.fromkeys(t.mesh for t in placed.values() if t.mesh))
        return manifest.Presharded(
            tool=manifest.TOOL,
            source=self.identity,
            mesh=manifest.RecordedMesh(
                axes=tuple(manifest.RecordedAxis(name=a.name, size=a.size, role=a.role) for a in mesh.axes),
                ep=None if mesh.ep == 1 else mesh.ep,
                pp=None if mesh.pp == 1 else mesh.pp,
                world_size=mesh.size,
                num_shards=len(mesh.file_ranks),
            ),
            meshes=tuple(map(record_view, views)) or None,
            layout=manifest.LayoutOrigin(origin=layout.origin, policy=layout.policy),
            root=self.root or None,
            units=layout.units,
            ties=tuple((name, *other_names) for name, other_names in self.aliases.items()),
            key_rules=tuple((rule.old, rule.new) for rule in self.key_rules),
            hub_names=None if self.tells_hub_names else "unknown",
            derived=tuple(
                manifest.Derived(name=fqn.removeprefix(self.root), made_of=to_json(expression))
                for fqn, expression in self.derived.items()
            ),
            dequantized=self.dequantized,
            osft=self.osft,
            vocab_size=self.vocab_size,
            dtype=self.cast,
            dtype_rules=tuple((rule.glob, rule.dtype) for rule in self.dtype_rules) or None,
            optimizer_dtype=self.optimizer_cast,
            digest=self.digest,
            omitted=tuple(manifest.Omitted(name=name, reason=reason) for name, reason in layout.omitted),
            objects=self.objects if is_whole else None,
            tensors={
                fqn: manifest.ShardedTensor(
                    dtype=self.dtypes[fqn].name,
                    shape=tensor.shape,
                    placements=tuple(map(str, tensor.placements)),
                    mesh=None if tensor.mesh is None else views.index(tensor.mesh),
                    stage=tensor.stage,
                    unit=tensor.unit,
                    buffer=tensor.is_buffer,
                    source=manifest.SourceTensor(
                        name=fqn.removeprefix(self.root)
                        if fqn in self.derived
                        else self.file_names.get(fqn, self.entries[fqn].fqn),
                        dtype=self.entries[fqn].dtype.name,
                    ),
                    crc32=crcs.get(fqn),
                )
                for fqn, tensor in placed.items()
                if fqn not in self.output.objects
            },
            files=(),
        )


class DcpDescriptions:
    """Writes the chunk lists, `.metadata` and the manifest of one DCP directory.

    Args:
        job: the DCP directory.
        directory: path of the directory, which has the shard files already.
        sha256: compute the sha256 of each of these files, too.
        folder: folder of the shard files relative to `.metadata`, if they will not be beside it; else empty.
    """

    def __init__(
        self,
        job: DcpOutput,
        directory: str,
        *,
        sha256: bool = False,
        folder: str = "",
    ) -> None:
        self._job = job
        self._files = OutputFiles(directory, digest=True, sha256=sha256)
        self._sha256, self._folder = sha256, folder
        self._images = {image.name: image for image in job.output}
        self._line_makers = [self._lines_of(kind) for kind in job.output.kinds]
        self._lists: dict[str, manifest.File] = {}

    def _add_file(self, digest: FileDigest) -> None:
        """Write the chunk list of a file."""
        image = self._images[digest.name]
        data = chunk_list.dump(image.name, image.size, self._job.aliases, self._lines(image, digest))
        listed = self._files.write(chunk_list.name_for(image.name), data)
        self._lists[image.name] = listed

    def _lines_of(self, kind: RecordKind) -> chunk_list.LineFormatter | None:
        """Return the template of chunk list lines for one kind of record; None for byte entries, which have no lines."""
        if kind.fqn in self._job.output.objects:
            return None
        shape, skeleton = self._job.output.catalog.tensors[kind.fqn].shape, kind.skeleton
        record = (skeleton.nbytes, len(skeleton.prefix), skeleton.data_nbytes)
        return chunk_list.LineFormatter(kind.fqn, kind.dtype, shape, kind.sizes, record)

    def _lines(self, image: DcpImage, digest: FileDigest) -> list[str]:
        crcs = digest.data_crcs or (None,) * len(image)
        makers = self._line_makers
        return [
            maker.line(offsets, start, crc)
            for (kind, offsets, start), crc in zip(image.records(), crcs, strict=True)
            if (maker := makers[kind]) is not None
        ]

    def finish(
        self,
        digests: Mapping[str, FileDigest],
        scattered: Mapping[str, int],
        *,
        other_files: Sequence[manifest.File] = (),
    ) -> manifest.ListedFile:
        """Write chunk lists and manifest, then rename `.metadata` into place, which makes the directory a checkpoint.

        Args:
            digests: digest of every shard file, including files that an interrupted run has finished.
            scattered: CRC-32 of every scattered tensor, by its source name.
            other_files: manifest entries of the files that were copied into the directory.

        Returns:
            The entry for the manifest itself, for a manifest of several folders.
        """
        for digest in digests.values():
            self._add_file(digest)
        crcs = self._tensor_crcs(digests, scattered) if self._job.digest != "none" else {}
        described = self._job.describe(crcs)
        content = replace(
            described,
            # Not part of the job's identity, so that another version of torch may resume the job.
            layout=replace(described.layout, traced_with=traced_with(described.layout.origin)),
            files=tuple(self._listed(digests[name]) for name in self._images),
            others=tuple(other_files) or None,
            metadata=self._write_metadata(),
        )
        listed = self._files.write(manifest.NAME, manifest.dump(content))
        storage.rename(*(os.path.join(self._files.directory, name) for name in (_PART, METADATA)))
        return listed

    def _listed(self, digest: FileDigest) -> manifest.ShardFile:
        return manifest.ShardFile(
            name=digest.name,
            size=digest.size,
            crc32=digest.crc32,
            sha256=digest.sha256,
            chunks=self._lists[digest.name],
        )

    def _tensor_crcs(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> dict[str, int]:
        """Return the CRC-32 of every tensor's logical bytes.

        If a tensor's chunks are contiguous in row-major order, their CRC-32s are combined. If it was cut along another
        dim, its CRC-32 was computed while the source was read, where it was contiguous.
        """
        output, tensor_crcs = self._job.output, dict[str, int]()
        crcs = [iter(digests[image.name].data_crcs) for image in output]
        for fqn, entry in output.catalog.tensors.items():
            files = output.catalog.chunks.file[entry.chunk_ids.start : entry.chunk_ids.stop]
            pieces = [
                (next(crcs[file]), nbytes)
                for file, (_, nbytes) in zip(files, output.data_places(fqn), strict=True)
            ]
            if fqn in output.objects:
                continue
            sizes = {region.sizes for region in output.catalog.chunks.regions(entry.chunk_ids)}
            are_neighbours = all(is_contiguous(Region((0,) * len(s), s), entry.shape) for s in sizes)
            crc = combine(pieces) if are_neighbours else scattered.get(self._job.sources[fqn])
            if crc is not None:
                tensor_crcs[fqn] = crc
        return tensor_crcs

    def _write_metadata(self) -> manifest.File:
        path = os.path.join(self._files.directory, _PART)
        with storage.writing(path) as (fd, stream):
            job = self._job
            write_metadata(
                stream,
                job.output.catalog,
                job.aliases,
                objects=job.output.objects,
                paths=job.paths,
                folder=self._folder,
            )
            stream.flush()
            size = storage.fstat(fd).st_size
            crc = read_back(fd, 0, size, bytearray(1 << 20))
        sha256 = sha256_of(path, METADATA) if self._sha256 else None
        return manifest.File(name=METADATA, size=size, crc32=crc, sha256=sha256)


WriteOthers = Callable[[OutputFiles], list[manifest.ListedFile]]
"""Writes the files outside of the DCP directories, and returns their manifest entries."""


class FolderDescriptions:
    """Describes a checkpoint of one or more DCP directories, and writes its other files.

    Args:
        folders: folder -> its DCP directory; "" is the directory itself.
        write_others: writes the other files; called when the shard files are finished.
        directory: directory of the output.
        sha256: compute the sha256 of every file.
        folder: as for `DcpDescriptions`.
    """

    def __init__(
        self,
        folders: Mapping[str, DcpOutput],
        write_others: WriteOthers,
        directory: str,
        *,
        sha256: bool = False,
        folder: str = "",
    ) -> None:
        assert not folder or list(folders) == [""], "several folders have no common marker"
        has_digests = any(output.digest != "none" for output in folders.values())
        self._write_others = write_others
        self._files = OutputFiles(directory, digest=has_digests, sha256=sha256)
        self._of: dict[str, DcpDescriptions] = {}
        for name, output in folders.items():
            place = os.path.join(directory, name)
            storage.make_folders(directory, name)
            self._of[name] = DcpDescriptions(output, place, sha256=sha256, folder=folder)

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Write the other files, then the description of each DCP directory, which makes it a checkpoint."""
        listed = self._write_others(self._files)
        top_files = tuple(listed)
        for folder, descriptions in self._of.items():
            folder_digests = {
                os.path.basename(name): replace(digest, name=os.path.basename(name))
                for name, digest in digests.items()
                if os.path.dirname(name) == folder
            }
            inner = descriptions.finish(folder_digests, scattered, other_files=() if folder else top_files)
            listed.append(replace(inner, name=os.path.join(folder, manifest.NAME)))
        if "" not in self._of:  # a manifest of all other files and of the folders' manifests
            content = manifest.FileList(
                tool=manifest.TOOL,
                folders=tuple(self._of),
                files=tuple(sorted(listed, key=attrgetter("name"))),
                unlisted=(),
            )
            self._files.write(manifest.NAME, manifest.dump(content))
