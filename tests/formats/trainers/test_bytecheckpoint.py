"""ByteCheckpoint: classes of its own in `.metadata`, bare storages in `.distcp`.

The package is not needed: what it writes is put together from classes that have its names.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.core.catalog import subset
from shardkit.errors import IntegrityError, SourceError
from shardkit.formats.contract.optimizer import OptimizerState, Unmapped
from shardkit.formats.dcp.vocabulary import metadata_vocabulary
from shardkit.formats.trainers.bytecheckpoint import (
    bytecheckpoint_vocabulary,
    is_bytecheckpoint,
    open_bytecheckpoint,
)
from shardkit.operations.reshard import reshard
from shardkit.pickles.policies import Strict
from tests.bits import raw
from tests.formats.dcp.samples import assert_holds, save
from tests.formats.reading import read_tensor

MODULE = "bytecheckpoint.checkpointer.meta_type"
WIDE = torch.arange(20.0).reshape(5, 4)
TENSORS = {"w": WIDE, "t": torch.arange(6).reshape(2, 3).t(), "scale": torch.tensor(2.5).bfloat16()}


class Fields:
    """What pickles as a class with these attributes."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    return its_classes(monkeypatch)


def its_classes(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with the names of ByteCheckpoint's classes."""
    module = types.ModuleType(MODULE)
    for name in ("Metadata", "_StorageInfo"):
        setattr(module, name, type(name, (Fields,), {"__module__": MODULE}))
    for name in ("bytecheckpoint", "bytecheckpoint.checkpointer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


class Writer:
    """Puts a state together as the package does."""

    def __init__(self, directory: Path, classes: types.ModuleType) -> None:
        self.directory, self.classes = directory, classes
        self.files: dict[str, bytearray] = {}
        self.fields: dict[str, Any] = {
            "state_dict_metadata": {},
            "planner_data": {},
            "storage_data": {},
            "all_tensor_metadata": {},
            "bytecheckpoint_version": "0.0.2",
            "user_defined_dict": {},
        }

    def place(self, index: MetadataIndex, file: str, content: bytes) -> None:
        out = self.files.setdefault(file, bytearray())
        info = self.classes._StorageInfo(relative_path=file, offset=len(out), length=len(content))
        out += content
        self.fields["storage_data"][index] = info

    def add(self, fqn: str, tensor: torch.Tensor, *chunks: tuple[list[int], torch.Tensor]) -> None:
        """Add a tensor in chunks (offsets, part), one in each file."""
        parts = chunks or (([0] * tensor.dim(), tensor),)
        listed = [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in parts]
        entry = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, listed)
        self.fields["state_dict_metadata"][fqn] = entry
        self.fields["planner_data"][fqn] = (fqn,)
        for number, (offsets, part) in enumerate(parts):
            index = MetadataIndex(fqn, torch.Size(offsets), number)
            storage = torch.tensor([], dtype=torch.uint8).set_(part.untyped_storage())
            self.place(index, f"__{number}_0.distcp", raw(storage))
            self.fields["all_tensor_metadata"][index] = without_data(part)

    def add_object(self, fqn: str, content: bytes = b"never opened") -> None:
        index = MetadataIndex(fqn)
        self.fields["state_dict_metadata"][fqn] = BytesStorageMetadata()
        self.fields["planner_data"][fqn] = (fqn,)
        self.place(index, "__0_0.distcp", content)
        self.fields["all_tensor_metadata"][index] = None

    def write(self) -> str:
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (self.directory / name).write_bytes(content)
        (self.directory / ".metadata").write_bytes(pickle.dumps(self.classes.Metadata(**self.fields)))
        return str(self.directory)


def without_data(tensor: torch.Tensor) -> bytes:
    """The pickle of a tensor whose storage lies elsewhere."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, torch.storage.TypedStorage):
                storage_type = getattr(torch, value._pickle_storage_type())
                return ("storage", storage_type, "0", "cpu", value._size())
            return None

    out = io.BytesIO()
    Pickler(out, protocol=2).dump(tensor)
    return out.getvalue()


@pytest.fixture
def writer(tmp_path: Path, classes: types.ModuleType) -> Writer:
    made = Writer(tmp_path / "global_step_2" / "model", classes)
    made.add_object("param_groups")
    made.add("w", WIDE, ([0, 0], WIDE[:3].clone()), ([3, 0], WIDE[3:].clone()))
    made.add("t", TENSORS["t"])
    made.add("scale", TENSORS["scale"])
    return made


def test_chunks_of_all_files_make_the_tensors(writer: Writer) -> None:
    directory = writer.write()
    for path in (directory, str(Path(directory).parent)):
        assert is_bytecheckpoint(path)
        checkpoint = open_bytecheckpoint(path)
        assert (checkpoint.path, checkpoint.format, checkpoint.has_checksums) == (
            path,
            "bytecheckpoint",
            False,
        )
        assert_holds(checkpoint.select(tuple(TENSORS)), TENSORS)
        assert checkpoint.catalog.objects == ("param_groups",)
    assert all(file.stamp is not None for file in checkpoint.select(["t", "w"]).files)


def test_a_view_into_a_larger_storage(tmp_path: Path, classes: types.ModuleType) -> None:
    writer = Writer(tmp_path / "c", classes)
    writer.add("row", WIDE[2])
    writer.add("column", WIDE[:, 1])
    assert_holds(
        open_bytecheckpoint(writer.write()).select(("column", "row")), {"row": WIDE[2], "column": WIDE[:, 1]}
    )


def test_what_lies_beside_the_model_is_skipped(writer: Writer) -> None:
    step = Path(writer.write()).parent
    (step / "optimizer").mkdir()
    (step / "extra_state").mkdir()
    assert [name for name, _ in open_bytecheckpoint(str(step)).skipped] == ["extra_state", "optimizer"]


GROUPS = [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": ["w"]}]


@pytest.fixture
def optimizer(writer: Writer, classes: types.ModuleType) -> Writer:
    """`optimizer/` beside the model: a state by FQN, and all groups in one byte entry."""
    made = Writer(Path(writer.write()).parent / "optimizer", classes)
    content = io.BytesIO()
    torch.save(GROUPS, content)
    made.add("state.w.step", torch.tensor(5.0))
    made.add_object("param_groups", content.getvalue())
    made.add("state.w.exp_avg", WIDE, ([0, 0], WIDE[:3].clone()), ([3, 0], WIDE[3:].clone()))
    for fqn in list(made.fields["planner_data"]):
        if fqn != "param_groups":
            made.fields["planner_data"][fqn] = ("state", "w", fqn.rpartition(".")[2])
    return made


def open_optimizer(writer: Writer) -> OptimizerState | Unmapped:
    checkpoint = open_bytecheckpoint(str(Path(writer.write()).parent))
    assert checkpoint.optimizer is not None
    return checkpoint.optimizer()


def test_the_optimizer_s_state(optimizer: Writer) -> None:
    state = open_optimizer(optimizer)
    assert isinstance(state, OptimizerState)
    expected = {"state.w.step": torch.tensor(5.0), "state.w.exp_avg": WIDE}
    assert_holds(subset(state.catalog, list(expected)), expected)
    read = {
        name: torch.load(io.BytesIO(read_tensor(state.catalog, name)), weights_only=True)
        for name in state.objects
    }
    assert read == {f"param_groups.0.{key}": value for key, value in GROUPS[0].items()}
    assert state.catalog.paths is not None
    assert state.catalog.paths["param_groups.0.lr"] == ("param_groups", 0, "lr")
    whole = Path(optimizer.directory).parent
    result = reshard(whole, whole.parent / "out", world_size=2)
    assert (result.num_optimizer_tensors, result.num_objects, result.warnings) == (2, 4, ())


def without_paths(optimizer: Writer) -> None:
    optimizer.fields["planner_data"]["state.w.exp_avg"] = ("state.w.exp_avg",)


def numbered(optimizer: Writer) -> None:
    for fqn in ("state.w.exp_avg", "state.w.step"):
        optimizer.fields["planner_data"][fqn] = ("state", "0", fqn.rpartition(".")[2])


def without_groups(optimizer: Writer) -> None:
    for name in ("state_dict_metadata", "planner_data"):
        del optimizer.fields[name]["param_groups"]
    for name in ("storage_data", "all_tensor_metadata"):
        del optimizer.fields[name][MetadataIndex("param_groups")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_paths, "no states of single parameters"),
        (numbered, "only numbered"),
        (without_groups, "no param_groups"),
    ],
)
def test_an_optimizer_in_another_form(
    optimizer: Writer, change: Callable[[Writer], None], reason: str
) -> None:
    change(optimizer)
    state = open_optimizer(optimizer)
    assert isinstance(state, Unmapped)
    assert reason in state.reason


def test_groups_that_are_damaged(optimizer: Writer) -> None:
    at = bytes(optimizer.files["__0_0.distcp"]).index(b"PK\x05\x06")
    optimizer.files["__0_0.distcp"][at] ^= 1
    with pytest.raises(SourceError, match=r"optimizer/__0_0\.distcp"):
        open_optimizer(optimizer)


def test_torch_s_own_is_not_one(tmp_path: Path) -> None:
    directory = save({"w": torch.ones(2)}, tmp_path / "step" / "model")
    assert not is_bytecheckpoint(directory)
    assert not is_bytecheckpoint(str(tmp_path / "step"))
    assert not is_bytecheckpoint(str(tmp_path))


def first(writer: Writer, fqn: str) -> MetadataIndex:
    return next(index for index in writer.fields["storage_data"] if index.fqn == fqn)


def other_dtype(writer: Writer) -> None:
    writer.fields["all_tensor_metadata"][first(writer, "w")] = without_data(WIDE[:3].int())


def other_shape(writer: Writer) -> None:
    writer.fields["all_tensor_metadata"][first(writer, "w")] = without_data(WIDE[:4].clone())


def longer(writer: Writer) -> None:
    """A view that reaches past what is stored."""
    writer.fields["all_tensor_metadata"][first(writer, "w")] = without_data(WIDE[:3])


def no_pickle(writer: Writer) -> None:
    del writer.fields["all_tensor_metadata"][first(writer, "w")]


def past_the_end(writer: Writer) -> None:
    writer.fields["storage_data"][first(writer, "t")].offset = 1 << 40


def gap(writer: Writer) -> None:
    writer.fields["state_dict_metadata"]["w"].chunks.pop()


def leaves(writer: Writer) -> None:
    writer.fields["storage_data"][first(writer, "w")].relative_path = "../x.distcp"


def evil(writer: Writer) -> None:
    writer.fields["user_defined_dict"]["x"] = io.BytesIO


def unknown(writer: Writer) -> None:
    writer.fields["more"] = 1


def mixed(writer: Writer) -> None:
    writer.fields["all_tensor_metadata"] = writer.fields["storage_data"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_dtype, r"w: chunk at \[0, 0\]: stored as int32, \.metadata says float32"),
        (other_shape, r"w: chunk at \[0, 0\]: stored with shape \[4, 4\]"),
        (longer, r"w: chunk at \[0, 0\]: a storage of 80 bytes, of which 48 are stored"),
        (no_pickle, r"w: chunk at \[0, 0\] has no entry in all_tensor_metadata"),
        (past_the_end, r"t: bytes 1099511627776 .* of __0_0\.distcp"),
        (gap, r"w: chunks hold 12 of 20"),
        (leaves, r"\.\./x\.distcp: not the name"),
        (evil, r"it names _io\.BytesIO"),
        (unknown, r"Metadata has unknown fields: more"),
        (mixed, r"all_tensor_metadata does not hold the pickles"),
    ],
)
def test_what_does_not_fit_is_refused(writer: Writer, change: Callable[[Writer], None], message: str) -> None:
    change(writer)
    with pytest.raises(SourceError, match=message):
        open_bytecheckpoint(writer.write())


def test_both_descriptions_are_held_against_each_other(writer: Writer) -> None:
    other_dtype(writer)
    with pytest.raises(IntegrityError):
        open_bytecheckpoint(writer.write())


def test_bytes_are_values_only_where_the_vocabulary_has_them() -> None:
    for data in (pickle.dumps(b"short", 4), pickle.dumps(bytes(300), 4)):
        assert Strict(data, bytecheckpoint_vocabulary(len(data)), in_columns=False).run("x") == pickle.loads(
            data
        )
        with pytest.raises(SourceError, match=r"opcode 0x4[23]"):
            Strict(data, metadata_vocabulary(len(data)), in_columns=False).run("x")
        with pytest.raises(SourceError):
            Strict(data[:-3], bytecheckpoint_vocabulary(len(data)), in_columns=False).run("x")
