"""A source is parsed once in a run: choosing, checking and reading it share what was opened."""

from __future__ import annotations

import gc
import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit import formats
from shardkit.errors import SourceError
from shardkit.files import manifest, storage
from shardkit.formats.dcp import directory
from tests.manifests import write_file_list
from tests.operations.consolidate.checkpoints import CONFIG, hub, save, weights


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directories whose `.metadata` was read, one entry for each time."""
    seen: list[str] = []
    read = directory._read_metadata

    def spy(path: str) -> Any:
        seen.append(Path(path).name)
        return read(path)

    monkeypatch.setattr(directory, "_read_metadata", spy)
    return seen


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each file was opened."""
    seen, open_fd = Counter[Path](), storage.open_fd

    def spy(path: str, *given: Any, **named: Any) -> int:
        seen[Path(path)] += 1
        return open_fd(path, *given, **named)

    monkeypatch.setattr(storage, "open_fd", spy)
    return seen


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory with one pre-sharded checkpoint, `step-2`."""
    source = hub(tmp_path / "hub", {"a.weight": torch.ones(8, 4), "b.bias": torch.arange(8.0)}, None)
    (tmp_path / "run").mkdir()
    shardkit.preshard(source, tmp_path / "run/step-2", world_size=2, wrap="none")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "verb",
    [
        lambda run, out: shardkit.consolidate(run, out),
        lambda run, out: shardkit.consolidate(run, out, dry_run=True),
        lambda run, out: shardkit.reshard(run, out, world_size=3, dry_run=True),
        lambda run, out: shardkit.verify(run / "step-2", full=True),
        lambda run, out: shardkit.diff(run, run.parent / "hub"),
    ],
)
def test_one_source_is_parsed_once(
    verb: Callable[[Path, Path], object], run: Path, tmp_path: Path, parsed: list[str]
) -> None:
    parsed.clear()
    verb(run, tmp_path / "out")
    assert parsed == ["step-2"]


_OF_ALL: dict[str, Callable[[Path, Path], object]] = {
    "verify": lambda source, out: shardkit.verify(source, full=True),
    "diff": lambda source, out: shardkit.diff(source, source),
    "inspect": lambda source, out: shardkit.inspect(source, holdings=True),
}
_OF_SHARDS: dict[str, Callable[[Path, Path], object]] = {
    "consolidate": lambda source, out: shardkit.consolidate(source, out),
    "consolidate, cast": lambda source, out: shardkit.consolidate(source, out, dtype="bf16", manifest=True),
    "reshard": lambda source, out: shardkit.reshard(source, out, world_size=3),
    **_OF_ALL,
}
_OF_MODELS: dict[str, Callable[[Path, Path], object]] = {
    "preshard": lambda source, out: shardkit.preshard(source, out, world_size=2, wrap="none"),
    **_OF_ALL,
}


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        *itertools.product(["presharded", "saved"], _OF_SHARDS),
        *itertools.product(["consolidated", "listed"], _OF_MODELS),
        *itertools.product(["listed beside"], ["preshard", "verify"]),
    ],
)
def test_a_manifest_is_parsed_once(kind: str, verb: str, run: Path, tmp_path: Path) -> None:
    source = _described(kind, run)
    seen = Counter[bytes]()
    with pytest.MonkeyPatch.context() as patched:
        gc.collect()  # of what made it
        load = manifest.load
        patched.setattr(manifest, "load", lambda data, name: (seen.update([data]), load(data, name))[1])
        {**_OF_SHARDS, **_OF_MODELS}[verb](source, tmp_path / "out")
    place = source / manifest.NAME
    there = (place if place.exists() else Path(manifest.sidecar_of(str(source)))).read_bytes()
    assert seen[there] == 1


def _described(kind: str, run: Path) -> Path:
    """Return a checkpoint with a manifest."""
    source = run.parent / "described"
    if kind == "presharded":
        return run / "step-2"
    if kind == "saved":
        shardkit.save(torch.nn.Linear(4, 4), source)
    elif kind == "consolidated":
        shardkit.consolidate(run, source, manifest=True)
    else:
        shutil.copytree(run.parent / "hub", source)
        write_file_list(source, inside=kind == "listed")
    return source


@pytest.mark.parametrize("verb", [_OF_SHARDS["consolidate"], _OF_SHARDS["reshard"]])
def test_a_manifest_is_opened_twice(
    verb: Callable[[Path, Path], object], run: Path, tmp_path: Path, opened: Counter[Path]
) -> None:
    """For its kind in the first bytes, and for all that it says."""
    gc.collect()  # of what made it
    opened.clear()
    verb(run / "step-2", tmp_path / "out")
    assert opened[run / "step-2" / manifest.NAME] == 2


@pytest.mark.parametrize(
    ("verb", "times"),
    [
        (lambda source, out: shardkit.verify(source), 1),  # for the records
        (lambda source, out: shardkit.verify(source, full=True), 2),  # and for the bytes
    ],
)
def test_how_often_a_shard_is_opened(
    verb: Callable[[Path, Path], object], times: int, run: Path, tmp_path: Path, opened: Counter[Path]
) -> None:
    opened.clear()
    verb(run / "step-2", tmp_path / "out")
    assert [opened[run / "step-2" / f"__{rank}_0.distcp"] for rank in range(2)] == [times, times]


def test_a_manifest_that_has_changed_is_read_again(run: Path) -> None:
    checkpoint, path = formats.open(str(run / "step-2")), run / "step-2" / manifest.NAME
    first = checkpoint.read_manifest()
    assert isinstance(first, manifest.Presharded)
    assert checkpoint.read_manifest() is first
    path.write_text("{}")
    with pytest.raises(SourceError):
        _ = checkpoint.read_manifest()
    path.unlink()
    assert checkpoint.read_manifest() is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_prepare_parses_it_once(run: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the config names no dtype, the source tells it, before it is known which of its tensors are wanted."""
    config = {key: value for key, value in CONFIG.items() if key != "dtype"}
    model = hub(run.parent / "model", None, config)
    save(weights(torch.bfloat16), run / "dcp")
    parsed.clear()
    context = shardkit.prepare(str(model), run / "dcp")
    assert parsed == ["dcp"]
    assert {param.dtype for param in context.model.parameters()} == {torch.bfloat16}
