"""The chunks of a layout are those that stock `dcp.save` writes from real processes, wrapped the same way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.checkpoint as dcp

from shardkit.core.catalog import TensorEntry
from shardkit.core.dtypes import BY_NAME
from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.layout import trace_child
from shardkit.layout.layout import Layout, declare
from shardkit.layout.traced import read_answer
from tests.distributed.meshes import Shape, axes, mesh_text
from tests.distributed.models import EDGES, MODELS, SHAPES, Model, build, shard
from tests.worlds.processes import fork, wait
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

Box = tuple[tuple[int, ...], tuple[int, ...]]


def trace_models(out: Path) -> None:
    """Leave what each trace answers; each is made in a process of its own, which has no group of ranks."""
    for case in [case for size in SHAPES for case in cases(size).values()]:
        directory = out / f"config-{case.label}"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(case.model.config))
        roles = ("replicate", "shard")[-len(case.shape) :]
        request = {
            "directory": str(directory),
            "axes": list(zip(axes(case.shape), case.shape, roles, strict=True)),
            "wrap": case.model.unit,
            "names": None,
            "trust_remote_code": False,
        }
        wait([fork(partial(answer, request, out / f"{case.label}.json"))])


def answer(request: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(trace_child.answer_request(request)))


two = Ranks(__name__, 2, first=trace_models)
three = Ranks(__name__, 3)
four = Ranks(__name__, 4)


class Case(NamedTuple):
    label: str
    model: Model
    shape: Shape

    @property
    def mesh(self) -> Mesh:
        return parse_mesh(mesh_text(self.shape), None)


def cases(size: int, **more: Model) -> dict[str, Case]:
    """Each model on each mesh of so many ranks."""
    return {
        f"{name}-{label}": Case(f"{name}-{label}", model, shape)
        for label, shape in SHAPES[size].items()
        for name, model in {**MODELS, **more}.items()
    }


def save(case: Case, directory: Path) -> Any:
    """Save a wrapped model with stock torch; return the metadata."""
    model = build(case.model.config)
    shard(model, case.model.unit, case.shape)
    dcp.save(model.state_dict(), checkpoint_id=directory)
    return dcp.FileSystemReader(directory).read_metadata()


def check_traced(case: Case, out: Path) -> None:
    metadata = save(case, out / f"traced-{case.label}")
    traced = json.loads((out / f"{case.label}.json").read_text())
    assert traced["status"] == "ok"
    layout = read_answer(traced, case.mesh, case.model.unit).layout
    assert len(layout.units) == 3
    assert bool(layout.ties) == case.model.is_tied
    assert_equal_to_stock(layout, metadata, case.mesh)


def check_declared(case: Case, out: Path) -> None:
    metadata = save(case, out / f"declared-{case.label}")
    source = {
        fqn: TensorEntry(
            fqn=fqn,
            dtype=BY_NAME[str(entry.properties.dtype).removeprefix("torch.")],
            shape=tuple(entry.size),
            first_chunk=0,
            num_chunks=1,
        )
        for fqn, entry in metadata.state_dict_metadata.items()
        if not (case.model.is_tied and fqn == "lm_head.weight")
    }
    layout = declare(source, case.mesh, "auto", case.model.config)
    assert bool(layout.ties) == case.model.is_tied
    assert_equal_to_stock(layout, metadata, case.mesh)


def assert_equal_to_stock(layout: Layout, metadata: Any, mesh: Mesh) -> None:
    stored = {name: group[0] for group in layout.ties for name in group}
    chunks = dict(stock_chunks(metadata))
    assert set(chunks) == {*layout.tensors, *stored}
    for fqn, boxes in chunks.items():
        # Lists, not sets: an empty chunk is written once, however many ranks have nothing.
        assert sorted(tuple(region) for _, region in layout.owners(stored.get(fqn, fqn))) == boxes, fqn
    if len(mesh.axes) == 1:
        assert_same_files(layout, metadata, stored)


def stock_chunks(metadata: Any) -> Iterator[tuple[str, list[Box]]]:
    for fqn, entry in metadata.state_dict_metadata.items():
        yield fqn, sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)


def assert_same_files(layout: Layout, metadata: Any, stored: dict[str, str]) -> None:
    """Rank r of a 1-D mesh wrote `__r_0.distcp`, and the shard coordinate is the rank."""
    owners = {
        (fqn, region.offsets): shard
        for fqn, tensor in layout.tensors.items()
        if tensor.is_sharded
        for shard, region in layout.owners(fqn)
        if region.num_elements
    }
    for index, info in metadata.storage_data.items():
        shard = owners.get((stored.get(index.fqn, index.fqn), tuple(index.offset)))
        assert shard is None or info.relative_path == f"__{shard}_0.distcp", index


@two.test_each(cases(2))
def test_traced_chunks_are_those_of_two_ranks(case: Case, out: Path) -> None:
    check_traced(case, out)


@three.test_each(cases(3))
def test_traced_chunks_are_those_of_three_ranks(case: Case, out: Path) -> None:
    check_traced(case, out)


@four.test_each(cases(4))
def test_traced_chunks_are_those_of_four_ranks(case: Case, out: Path) -> None:
    check_traced(case, out)


@two.test_each(cases(2, edges=EDGES))
def test_declared_chunks_are_those_of_two_ranks(case: Case, out: Path) -> None:
    check_declared(case, out)


@three.test_each(cases(3, edges=EDGES))
def test_declared_chunks_are_those_of_three_ranks(case: Case, out: Path) -> None:
    check_declared(case, out)


@four.test_each(cases(4, edges=EDGES))
def test_declared_chunks_are_those_of_four_ranks(case: Case, out: Path) -> None:
    check_declared(case, out)
