"""A training load from a directory of shards that somebody tampered with, digests made anew: refused, in little time."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import nn

from shardkit.core.regions import Region
from shardkit.errors import SourceError
from shardkit.files import manifest
from shardkit.files.digest import crc32
from shardkit.operations.preshard import preshard
from shardkit.training.fill.reading import Weights
from shardkit.training.fill.source import find_weights, open_source
from shardkit.training.ranks.local import describe_tensors
from tests.manifests import change_manifest

NAME, LIST, FILE = manifest.NAME, "__0_0.chunks.json", "__0_0.distcp"
W = "0.weight"
Change = Callable[[dict[str, Any]], object]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("presharded")
    (base / "hub").mkdir()
    save_file(model().state_dict(), base / "hub" / "model.safetensors")
    preshard(str(base / "hub"), str(base / "made"), world_size=2, wrap="none")
    return base / "made"


@pytest.fixture
def made(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "made"))


def load(directory: Path) -> Weights:
    """Open it as a rank does, for all of the tensors, and then for a part of one."""
    target = model()
    weights = find_weights(open_source(str(directory)), *describe_tensors(target), model=target)
    weights.located({W: [Region((0, 0), (2, 3))]})
    return weights.located()


def of_list(directory: Path, change: Change) -> None:
    """Change a chunk list, and the digest of it in the manifest."""
    content = json.loads((directory / LIST).read_text())
    change(content)
    data = json.dumps(content).encode()
    (directory / LIST).write_bytes(data)
    change_manifest(
        directory, lambda whole: whole["files"][0]["chunks"].update(crc32=crc32(data), size=len(data))
    )


def test_the_good_one(made: Path) -> None:
    change_manifest(made, lambda content: None)
    of_list(made, lambda content: None)
    load(made)
    assert open_source(str(made)).presharded is not None


def axis(**fields: object) -> Change:
    return lambda content: content["mesh"]["axes"][0].update(fields)


def file(**fields: object) -> Change:
    return lambda content: content["files"][0].update(fields)


def tensor(**fields: object) -> Change:
    return lambda content: content["tensors"][W].update(fields)


NUMBERS: dict[str, object] = {
    **{"bool": True, "zero": 0, "negative": -1, "float": 2.0, "huge": 10**9, "text": "2", "null": None},
    **{"larger": 1 << 70, "list": [2], "dict": {}},
}
MANIFESTS: dict[str, Change] = {
    **{f"axis-size-{name}": axis(size=value) for name, value in NUMBERS.items()},
    **{f"file-size-{name}": file(size=value) for name, value in NUMBERS.items()},
    **{f"dim-{name}": tensor(shape=[value, 3]) for name, value in NUMBERS.items()},
    "axis-size-more": axis(size=100_000),
    "axis-role": axis(role="shards"),
    "axis-name": axis(name="a=1,b"),
    "axis-a-list": lambda content: content["mesh"].update(axes=[[1, 2]]),
    "axes-none": lambda content: content["mesh"].update(axes=[]),
    "axes-missing": lambda content: content["mesh"].pop("axes"),
    "axes-many": lambda content: content["mesh"].update(axes=content["mesh"]["axes"] * 60),
    "placements-none": tensor(placements=[]),
    "placements-more": tensor(placements=["S(0)", "S(1)"]),
    "placements-text": tensor(placements="R"),
    "placements-a-number": tensor(placements=[0]),
    "placements-unknown": tensor(placements=["P"]),
    "placements-other-dim": tensor(placements=["S(2)"]),
    "shape-text": tensor(shape="83"),
    "shape-of-many-dims": tensor(shape=[1] * 1000),
    "shape-of-none": tensor(shape=[]),
    "dtype-unknown": tensor(dtype="os.system"),
    "dtype-other": tensor(dtype="float16"),
    "dtype-a-list": tensor(dtype=["float32"]),
    "tensor-a-list": lambda content: content["tensors"].update({W: [1]}),
    "ties-unknown": lambda content: content.update(ties=[["no.such", W]]),
    "ties-of-two-tensors": lambda content: content.update(ties=[["1.weight", W]]),
    "ties-of-numbers": lambda content: content.update(ties=[[W, 3]]),
    "ties-a-number": lambda content: content.update(ties=3),
    "ties-empty": lambda content: content.update(ties=[[]]),
    "ties-missing": lambda content: content.pop("ties"),
    "name-parent": file(name="../x.distcp"),
    "name-slash": file(name="a/__0_0.distcp"),
    "name-absolute": file(name="/etc/hostname"),
    "name-nul": file(name="__0_0.distcp\0"),
    "name-empty": file(name=""),
    "name-a-list": file(name=[1]),
    "name-other": file(name="__9_0.distcp"),
    "name-twice": file(name="__1_0.distcp"),
    "files-fewer": lambda content: content["files"].pop(),
    "files-more": lambda content: content["files"].append(content["files"][0]),
    "list-crc-null": lambda content: content["files"][0]["chunks"].update(crc32=None),
    "size-other": file(size=3),
}  # fmt: skip


def refused(directory: Path) -> str:
    start = time.process_time()
    with pytest.raises(SourceError) as caught:
        load(directory)
    assert time.process_time() - start < 5
    return str(caught.value)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(name: str, made: Path) -> None:
    change_manifest(made, MANIFESTS[name])
    said = refused(made)
    assert NAME in said or FILE[:5] in said
    assert said.replace("\n", "").isprintable()


def row(at: int, value: object) -> Change:
    return lambda content: content["chunks"][0].__setitem__(at, value)


def overlap(content: dict[str, Any]) -> None:
    """The first half of a part twice, so that as many elements are there as in the whole."""
    rows = content["chunks"]
    number = next(n for n, each in enumerate(rows) if each[0] == W)
    whole = rows.pop(number)
    half = [*whole]
    half[4], half[8] = [whole[4][0] // 2, whole[4][1]], whole[8] // 2
    rows += [half, [*half]]


LISTS: dict[str, Change] = {
    **{f"shape-{name}": row(2, [value, 3]) for name, value in NUMBERS.items()},
    **{f"offset-{name}": row(3, [value, 0]) for name, value in NUMBERS.items() if name != "zero"},
    **{f"sizes-{name}": row(4, [value, 3]) for name, value in NUMBERS.items()},
    **{f"data-{name}": row(7, value) for name, value in NUMBERS.items() if name != "zero"},
    **{f"bytes-{name}": row(8, value) for name, value in NUMBERS.items()},
    "name-a-list": row(0, [1]),
    "name-other": row(0, "no.such"),
    "dtype": row(1, "os.system"),
    "dtype-a-list": row(1, []),
    "row-short": lambda content: content["chunks"].__setitem__(0, [1]),
    "row-missing": lambda content: content["chunks"].pop(0),
    "rows-a-dict": lambda content: content.update(chunks={}),
    "row-twice": lambda content: content["chunks"].append(content["chunks"][0]),
    "overlap": overlap,
    "other-file": lambda content: content.update(file="../x.distcp"),
    "file-a-list": lambda content: content.update(file=[1]),
    "size": lambda content: content.update(size=3),
    "aliases": lambda content: content.update(aliases={"a": 7}),
}


@pytest.mark.parametrize("name", LISTS)
def test_chunk_lists(name: str, made: Path) -> None:
    of_list(made, LISTS[name])
    said = refused(made)
    assert NAME in said or "__0_0" in said
    assert said.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", [NAME, LIST])
def test_deep_json(name: str, made: Path) -> None:
    data = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    (made / name).write_bytes(data)
    if name == LIST:
        change_manifest(made, lambda content: content["files"][0]["chunks"].update(crc32=crc32(data)))
    assert name in refused(made)


def test_links_that_leave_the_directory(made: Path) -> None:
    for name in (NAME, LIST, FILE):
        (made / name).rename(made.parent / name)
        (made / name).symlink_to(made.parent / name)
        assert name in refused(made)
        (made / name).unlink()
        (made.parent / name).rename(made / name)
    load(made)
