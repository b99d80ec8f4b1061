"""Which rank and which file will hold which bytes of a decided preshard."""

from __future__ import annotations

from shardkit.core.catalog import Catalog, SourceFile, join_name
from shardkit.core.regions import Region
from shardkit.operations.describe_dcp import DcpOutput
from shardkit.operations.holdings import Holdings, hold
from shardkit.operations.preshard.job import PreshardJob
from shardkit.transfer.rank_files import PlacedRegion, RankImages


def hold_job(job: PreshardJob) -> Holdings:
    """Return who will hold what, before a byte moves."""
    if isinstance(job.part, DcpOutput):
        folder = job.profile.folder
        return hold(job.part.output.catalog, job.part.layout, names=lambda file: join_name(folder, file.name))
    return hold(_catalog(job.part.output), job.layout)


def _catalog(images: RankImages) -> Catalog:
    """Return a catalog of files of ranks that do not exist yet."""
    catalog = Catalog(format="", directory="")
    rows: dict[str, list[tuple[int, int, PlacedRegion]]] = {}
    for number, image in enumerate(images):
        catalog.files.append(SourceFile(name=image.name, path="", size=image.size))
        for placed, hole in zip(image.placed, image.holes, strict=True):
            rows.setdefault(placed.fqn, []).append((number, hole.start, placed))
    for fqn, found in rows.items():
        _, _, first = found[0]
        regions: list[Region] = [placed.region for _, _, placed in found]
        catalog.add_tensor_columns(
            fqn,
            first.dtype,
            first.shape,
            [number for number, _, _ in found],
            [start for _, start, _ in found],
            [placed.nbytes for _, _, placed in found],
            regions,
        )
    return catalog
