"""The order in which files in a store are read: each is read once."""

from __future__ import annotations

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.formats.hub.safetensors import OutputTensor, SafetensorsImages
from shardkit.transfer.plan import build_plan, plan_reading

FILES, ROWS, COLUMNS, TENSORS = 8, 8192, 16384, 3


def test_the_pieces_of_a_large_tensor_follow_one_another() -> None:
    """Three tensors of 256 MiB, an eighth of each in each file: they are written in pieces of 64 MiB."""
    dtype, nbytes = BY_NAME["bfloat16"], ROWS // FILES * COLUMNS * 2
    catalog = Catalog(format="raw", directory="")
    catalog.files = [
        SourceFile(name=f"{file}", path=f"/nowhere/{file}", size=TENSORS * nbytes) for file in range(FILES)
    ]
    for number in range(TENSORS):
        chunks = (
            (file, number * nbytes, nbytes, Region((file * ROWS // FILES, 0), (ROWS // FILES, COLUMNS)))
            for file in range(FILES)
        )
        catalog.add_tensor(f"t{number}", dtype, (ROWS, COLUMNS), chunks)
    tensors = [OutputTensor(f"t{number}", f"t{number}", dtype, (ROWS, COLUMNS)) for number in range(TENSORS)]
    images = SafetensorsImages(tensors, max_shard_bytes=None)
    reading = plan_reading(build_plan(images, catalog), (), in_source_order=True)
    assert len(reading.tasks) == 4 * TENSORS
    assert reading.tasks == sorted(reading.tasks)
    assert reading.num_places == FILES
