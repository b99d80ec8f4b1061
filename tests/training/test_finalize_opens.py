"""What a rank opens of a sharded directory: each file once, and no more of them where there are more ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.errors import LayoutError, SourceError
from tests.training.stores_world import VERBS, Model, shard
from tests.worlds.ranks import Ranks

pytestmark = [pytest.mark.prove, pytest.mark.dist]

_watched: dict[str, list[str]] = {}
"""What is opened, and what is looked at, while somebody wants to know."""


def make(out: Path) -> None:
    (out / "hub").mkdir()
    torch.manual_seed(0)
    save_file(Model().state_dict(), out / "hub/model.safetensors")
    shards = out / "shards"
    shards.mkdir()
    names = {}
    for number, name in enumerate(Model().state_dict()):
        names[name] = f"model-{number % 4 + 1:05}-of-00004.safetensors"
    for file in set(names.values()):
        tensors = load_file(out / "hub/model.safetensors")
        save_file({name: tensors[name] for name in names if names[name] == file}, shards / file)
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for size in (2, 4, 8):
        shardkit.preshard(out / "hub", out / f"sharded-{size}", world_size=size, wrap="none")
    sys.addaudithook(_note)  # in all ranks of all groups: they are forks
    os.stat, os.lstat = _noting(os.stat), _noting(os.lstat)


def _note(event: str, given: tuple[Any, ...]) -> None:
    if "opened" in _watched and event in ("open", "os.listdir", "os.scandir"):
        _watched["opened"].append(str(given[0]))


def _noting(look: Any) -> Any:
    def call(path: Any, *given: Any, **named: Any) -> Any:
        if "looked at" in _watched:
            _watched["looked at"].append(str(path))
        return look(path, *given, **named)

    return call


def assert_whole(model: nn.Module, out: Path) -> None:
    """Compare a model of sharded tensors with the Hub model, bit for bit."""
    whole = load_file(out / "hub/model.safetensors")
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), whole[name])


@contextmanager
def counted(what: str, directory: Path) -> Iterator[Counter[str]]:
    found = Counter[str]()
    _watched[what] = []
    try:
        yield found
    finally:
        paths = _watched.pop(what)
        found.update(os.path.relpath(path, directory) for path in paths if path.startswith(str(directory)))


opened = partial(counted, "opened")
"""Count how often each file of a directory is opened, and the directory itself as "."."""
looked_at = partial(counted, "looked at")
"""Count how often the status of each file of a directory is asked for."""


eight, two, four = Ranks(__name__, 8, first=make), Ranks(__name__, 2), Ranks(__name__, 4)


def opens_few_files(load: Callable[[str], nn.Module], out: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with opened(out / f"sharded-{size}") as found:
        load(str(out / f"sharded-{size}"))
    assert found["."] == 1
    assert {times for name, times in found.items() if name != "."} == {1}, found
    assert found.keys() == {".", "shardkit.json", f"__{rank}_0.distcp", f"__{rank}_0.chunks.json"}


@two.test_each(VERBS)
def test_two_ranks(load: Callable[[str], nn.Module], out: Path) -> None:
    opens_few_files(load, out)


@four.test_each(VERBS)
def test_four_ranks(load: Callable[[str], nn.Module], out: Path) -> None:
    opens_few_files(load, out)


@eight.test_each(VERBS)
def test_eight_ranks(load: Callable[[str], nn.Module], out: Path) -> None:
    opens_few_files(load, out)


def save_by_torch(out: Path) -> Path:
    """Save with torch alone, from all ranks; each finds the same values as in the Hub model."""
    saved = out / f"torch-{dist.get_world_size()}"
    torch.manual_seed(0)
    dcp.save(shard(Model()).state_dict(), checkpoint_id=saved)
    return saved


def opens_few_files_of_others(out: Path) -> None:
    rank, saved = dist.get_rank(), save_by_torch(out)
    for load in VERBS.values():
        with opened(saved) as found, looked_at(saved) as looked:
            model = load(str(saved))
        assert_whole(model, out)
        files = {name: times for name, times in found.items() if name.endswith(".distcp")}
        assert files.pop(f"__{rank}_0.distcp") == 1
        assert set(files.values()) <= {1}, found
        assert len(files) <= 4  # of them a few bytes are compared between ranks
        assert found[".metadata"] == (1 if rank == 0 else 0)
        assert found["."] <= 4
        looked = Counter({name: times for name, times in looked.items() if name.endswith(".distcp")})
        if rank:
            assert looked.keys() <= {f"__{rank}_0.distcp", *files}


@two.test
def test_two_ranks_of_what_torch_saved(out: Path) -> None:
    opens_few_files_of_others(out)


@four.test
def test_four_ranks_of_what_torch_saved(out: Path) -> None:
    opens_few_files_of_others(out)


@eight.test
def test_eight_ranks_of_what_torch_saved(out: Path) -> None:
    opens_few_files_of_others(out)


@four.test
def test_fewer_ranks_than_saved(out: Path) -> None:
    """Each needs the records of two files; the directory was made before this group started."""
    rank, saved = dist.get_rank(), out / "torch-8"
    with opened(saved) as found:
        VERBS["load_into"](str(saved))
    files = {name for name in found if name.endswith(".distcp")}
    assert {f"__{2 * rank}_0.distcp", f"__{2 * rank + 1}_0.distcp"} <= files
    assert len(files) <= 2 + 4


def save_compressed(out: Path) -> Path:
    saved = out / "compressed"
    writer = dcp.FileSystemWriter(str(saved), _extensions=[ZStandard()])
    torch.manual_seed(0)
    dcp.save(shard(Model()).state_dict(), storage_writer=writer)
    return saved


@pytest.mark.skipif(find_spec("zstandard") is None, reason="zstandard is not installed")
@four.test
def test_ranks_open_their_own_compressed_files_alone(out: Path) -> None:
    rank, saved, counts = dist.get_rank(), save_compressed(out), list[Counter[str]]()
    for load in VERBS.values():
        with opened(saved) as found, looked_at(saved) as looked:
            model = load(str(saved))
        assert_whole(model, out)
        counts += [found, looked]
    for found, looked in zip(counts[::2], counts[1::2], strict=True):
        if rank:
            own = f"__{rank}_0.distcp"
            others = {
                name: times for name, times in found.items() if name.endswith(".distcp") and name != own
            }
            assert set(others.values()) <= {1}
            assert len(others) <= 4  # of them a few bytes are compared between ranks
            assert {name for name in looked if name.endswith(".distcp")} == {own}
            assert found[".metadata"] == 0


@two.test
def test_ranks_that_read_nothing_open_nothing(out: Path) -> None:
    """FSDP1 wants whole tensors, which are in all files."""
    saved = out / "torch-2"
    context = shardkit.prepare(Model, saved)
    with opened(saved) as found:
        fill = shardkit.param_init_fn(context, read="broadcast")
        FullyShardedDataParallel(context.model, param_init_fn=fill, device_id=torch.device("cpu"))
    files = {name for name in found if name.endswith(".distcp")}
    assert len(files) == (2 if dist.get_rank() == 0 else 0)


def damage(file: Path) -> None:
    """Damage the directory of the first record."""
    content = bytearray(file.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at : at + 4] = b"none"
    file.write_bytes(content)


@eight.test_each({"auto": 0, "direct": 5})
def test_a_damaged_record_is_named_on_all_ranks(reader: int, out: Path) -> None:
    """Only rank 5 opens it; then rank 0, to read for all."""
    damaged = out / f"damaged-{reader}"
    if dist.get_rank() == 0:
        shutil.copytree(out / "torch-8", damaged)
        damage(damaged / "__5_0.distcp")
    dist.barrier()
    with torch.device("meta"):
        model = shard(Model())
    with pytest.raises(SourceError) as caught:
        shardkit.load_into(model, damaged, strategy="direct" if reader else "auto")
    assert caught.value.message == "1 records cannot be read"
    (problem,) = caught.value.problems
    assert problem.startswith(f"rank {reader}: layers.0.")
    assert "__5_0.distcp" in problem


@eight.test_each(VERBS)
def test_others_read_for_a_rank_whose_copy_is_damaged(load: Callable[[str], nn.Module], out: Path) -> None:
    rank, source = dist.get_rank(), out / "torch-8"
    if rank == 5:
        source = shutil.copytree(source, out / f"copy-{load.__name__}")
        damage(source / "__5_0.distcp")
    dist.barrier()
    assert_whole(load(str(source)), out)


@four.test_each(VERBS)
def test_one_rank_reads_the_headers_of_a_hub_model_for_all(
    load: Callable[[str], nn.Module], out: Path
) -> None:
    with opened(out / "shards") as found:
        model = load(str(out / "shards"))
    files = {name: times for name, times in found.items() if name.endswith(".safetensors")}
    assert len(files) == 4
    assert set(files.values()) == {2 if dist.get_rank() == 0 else 1}
    assert found["."] == 2  # its names, and once what lies below, as files with weights may
    assert_whole(model, out)


@four.test_each(VERBS)
def test_one_rank_reads_the_headers_of_a_repo_for_all(load: Callable[[str], nn.Module], out: Path) -> None:
    """It is in the cache; what has to be downloaded is looked at by each."""
    cache = out / f"cache-{load.__name__}"
    repo = cache / "models--some--model"
    if dist.get_rank() == 0:
        shutil.copytree(out / "shards", repo / "snapshots" / ("0" * 40))
        (repo / "refs").mkdir()
        (repo / "refs/main").write_text("0" * 40)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        patched.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with opened(repo) as found:
            model = load("some/model")
    assert_whole(model, out)
    files = {name: times for name, times in found.items() if name.endswith(".safetensors")}
    assert len(files) == 4
    assert set(files.values()) == {3 if dist.get_rank() == 0 else 1}


@two.test
def test_a_header_of_another_file_is_not_taken(out: Path) -> None:
    """Ranks whose files lie elsewhere read their own: here one has other names."""
    source = out / "hub"
    if dist.get_rank() == 1:
        source = out / "renamed"
        source.mkdir()
        tensors = load_file(out / "hub/model.safetensors")
        save_file({f"other.{name}": value for name, value in tensors.items()}, source / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Model()
    with pytest.raises(LayoutError, match="rank 1"):
        shardkit.load_into(model, source)


@eight.test
def test_other_bytes_below_the_same_manifest_are_noticed(out: Path) -> None:
    """Nothing is compared with checksums, and only the bytes of tensors differ."""
    rank, source = dist.get_rank(), out / "sharded-8"
    if rank == 5:
        source = shutil.copytree(source, out / "other")
        for path in source.glob("*.distcp"):
            content = path.read_bytes()
            path.write_bytes(bytes(each ^ 1 for each in content[:-64]) + content[-64:])
    with torch.device("meta"):
        model = Model()
    with pytest.raises(SourceError) as caught:
        shardkit.load_into(model, source, strategy="direct", check_source=False)
    assert caught.value.problems == ("rank 5: other weights than rank 0",)
