"""Write the manifest of safetensors shards for ranks (DCP-HF). They need no index, so the manifest is the last file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

from shardkit.core.dtypes import DType
from shardkit.core.regions import Region, is_contiguous
from shardkit.files import manifest
from shardkit.files.digest import combine
from shardkit.keys.expressions import Opaque, to_json
from shardkit.operations.describe import OutputFiles
from shardkit.operations.describe_dcp import WriteOthers
from shardkit.transfer.execute import FileDigest
from shardkit.transfer.rank_files import RankImages

FORMAT = "dcp-hf"
WRITER = "shardkit"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesOutput:
    """Rank files to write, and the information about them that is recorded."""

    output: RankImages
    dtypes: Mapping[str, DType]
    """Name of a stored tensor -> dtype in the output."""
    identity: manifest.RecordedSource
    """The source's weights: repo, commit and files."""
    aliases: Mapping[str, Sequence[str]]
    """Name of a tensor -> further names of it, which are in the files, too, with the same bytes."""
    opaque: Mapping[str, Opaque]
    """Tensors that transformers' own code made and that cannot be converted back. The class can convert all others."""
    cast: str
    """The option `dtype`: "keep", "bf16", "fp16" or "fp32"."""
    digest: str
    """"crc32" or "none"."""

    def describe(self, crcs: Mapping[str, int] = MappingProxyType({})) -> manifest.FileList:
        """Return the manifest, as far as it is known before bytes move; `crcs` has the CRC-32s of tensors."""
        return manifest.FileList(
            tool=manifest.TOOL,
            layout=FORMAT,
            writer=WRITER,
            files=(),
            unlisted=(),
            tensors={
                fqn: manifest.ListedTensor(dtype=t.dtype.name, shape=t.shape, crc32=crcs.get(t.fqn))
                for t in self.output.stored()
                for fqn in (t.fqn, *self.aliases.get(t.fqn, ()))
            },
            derived=tuple(
                manifest.Derived(name=fqn, made_of=to_json(expression))
                for fqn, expression in self.opaque.items()
            )
            or None,
        )


class FileDescriptions:
    """Writes the files other than rank files, and then the manifest.

    Args:
        job: the output.
        write_others: writes the other files; called when the rank files are finished.
        directory: directory of the output.
        sha256: compute the sha256 of every file, too.
    """

    def __init__(
        self, job: FilesOutput, write_others: WriteOthers, directory: str, *, sha256: bool = False
    ) -> None:
        self._job, self._write_others = job, write_others
        self._files = OutputFiles(directory, digest=job.digest != "none", sha256=sha256)

    def finish(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> None:
        """Write the other files, then the manifest.

        Args:
            digests: digest of every rank file, including files that an interrupted run has finished.
            scattered: CRC-32 of every scattered tensor, by its source name.
        """
        other_files = self._write_others(self._files)
        has_digests = self._job.digest != "none"
        content = replace(
            self._job.describe(self._tensor_crcs(digests, scattered) if has_digests else {}),
            files=tuple(sorted((*other_files, *map(self._listed, digests.values())), key=attrgetter("name"))),
        )
        self._files.write(manifest.NAME, manifest.dump(content))

    def _listed(self, digest: FileDigest) -> manifest.ListedFile:
        image = next(image for image in self._job.output if image.name == digest.name)
        holes = zip(image.holes, digest.data_crcs, strict=True) if digest.data_crcs else ()
        return manifest.ListedFile(
            name=digest.name,
            size=digest.size,
            crc32=digest.crc32,
            sha256=digest.sha256,
            extents=tuple((hole.start, hole.nbytes, crc) for hole, crc in holes if hole.nbytes) or None,
        )

    def _tensor_crcs(self, digests: Mapping[str, FileDigest], scattered: Mapping[str, int]) -> dict[str, int]:
        """Return the CRC-32 of every tensor's logical bytes, as `DcpDescriptions._tensor_crcs` does."""
        output, tensor_crcs = self._job.output, dict[str, int]()
        crcs = [iter(digests[image.name].data_crcs) for image in output]
        parts: dict[str, list[tuple[Region, int, int]]] = {}
        for image, of_file in zip(output, crcs, strict=True):
            for placed in image.placed:
                parts.setdefault(placed.fqn, []).append((placed.region, next(of_file), placed.nbytes))
        for tensor in output.stored():
            rows = sorted({row for row in parts[tensor.fqn] if row[2]})
            are_neighbours = all(
                is_contiguous(Region((0,) * len(row[0].sizes), row[0].sizes), tensor.shape) for row in rows
            )
            crc = combine([(crc, nbytes) for _, crc, nbytes in rows]) if are_neighbours else None
            crc = scattered.get(tensor.source) if crc is None else crc
            if crc is not None:
                tensor_crcs[tensor.fqn] = crc
        return tensor_crcs
