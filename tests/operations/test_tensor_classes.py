"""Checkpoints whose tensors are objects of torchao's classes: float8 weights, and the state of AdamW8bit.

Nothing is imported but the verbs and errors that every version has: it says what versions without the table do.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import shardkit
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import diff
from shardkit.operations.preshard import preshard
from shardkit.operations.reshard import reshard
from shardkit.operations.verify import verify
from tests.bits import flip_byte
from tests.formats.torchsave.classes import respell, unpacked
from tests.manifests import write_file_list

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")
WEIGHT = torch.arange(1.0, 65.0).reshape(8, 8)
KEPT = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
STATE = "optim.state.0.weight.exp_avg", "optim.state.0.weight.exp_avg_sq"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("classes"))


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """Both, to be changed."""
    for name in ("float8", "adamw8bit"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def load(path: Path, name: str = "model.0.weight") -> torch.Tensor:
    return load_shape(path, name, WEIGHT.shape)


def flip(path: Path, old: bytes) -> None:
    """Flip a bit behind some bytes that are there once."""
    data = path.read_bytes()
    assert data.count(old) == 1
    flip_byte(path, data.index(old) + len(old))


def warning_of_what_is_whole(path: Path) -> str:
    """Return the one warning about what is no damage."""
    found = verify(path, full=True)
    assert found.ok
    (warning,) = found.warnings
    return str(warning)


def assert_a_flip_is_found(file: Path, held: torch.Tensor, source: Path | None = None) -> None:
    """Flip a bit of a tensor in a file, of this source if it is none itself: the CRC-32 tells."""
    flip(file, held.numpy().tobytes()[:-1])
    (problem,) = verify(source or file, full=True).problems
    assert "CRC-32" in problem.message


def test_float8_weights_are_read_like_others(made: Path, tmp_path: Path) -> None:
    found = verify(made / "float8", full=True)
    assert found.ok
    assert not found.warnings
    assert (found.num_checked_chunks, found.tensor_bytes) == (2, 256)
    reshard(made / "float8", tmp_path / "resharded", world_size=3)
    assert torch.equal(load(tmp_path / "resharded"), WEIGHT)
    assert diff(made / "float8", tmp_path / "resharded").is_equal
    assert diff(made / "float8", tmp_path / "resharded", all_tensors=True).is_equal
    result = consolidate(made / "float8", tmp_path / "hub")
    assert result.num_tensors == 1
    assert diff(made / "float8", tmp_path / "hub").is_equal
    write_file_list(made / "float8", output=tmp_path / "manifest.json")
    assert verify(made / "float8", full=True, manifest=tmp_path / "manifest.json").ok


def test_rank_files_of_float8_weights_are_read_like_others(made: Path, tmp_path: Path) -> None:
    found = verify(made / "verl", full=True)
    assert found.ok
    assert found.num_checked_chunks == 2
    reshard(made / "verl", tmp_path / "resharded", world_size=3)
    assert torch.equal(load(tmp_path / "resharded", "0.weight"), WEIGHT)
    assert diff(made / "verl", made / "float8").is_equal


def test_parts_read_them_too(made: Path, tmp_path: Path) -> None:
    for part in ("1/2", "2/2"):
        reshard(made / "float8", tmp_path / "resharded", world_size=4, part=part)
    assert torch.equal(load(tmp_path / "resharded"), WEIGHT)


def test_a_flipped_bit_of_a_value_is_found(copy: Path) -> None:
    value = WEIGHT[4:].numpy().tobytes()
    flip(copy / "float8" / "__1_0.distcp", value[:-1])
    (problem,) = verify(copy / "float8", full=True).problems
    assert problem.tensor == "model.0.weight"
    with pytest.raises(ShardkitError, match="CRC-32"):
        reshard(copy / "float8", copy / "resharded", world_size=2)


def test_an_unknown_class_is_named_and_nothing_is_called_damaged(copy: Path) -> None:
    source = copy / "float8"
    for name in ("__0_0.distcp", "__1_0.distcp"):
        respell(source / name, b"ctorchao.float8.", b"cmytools.shifts.")
    name = "mytools.shifts.fsdp_utils.WeightWithDynamicFloat8CastTensor"
    found = verify(source, full=True)
    assert found.ok
    assert found.num_checked_chunks == 2
    (warning,) = found.warnings
    assert name in warning
    assert "model.0.weight" in warning
    for attempt in (
        lambda: reshard(source, copy / "out", world_size=2),
        lambda: consolidate(source, copy / "out"),
        lambda: diff(source, copy / "adamw8bit"),
    ):
        with pytest.raises(SourceError) as caught:
            attempt()
        assert caught.value.problems == (f"model.0.weight: {name}, which is made of _tensor",)
        assert "damaged" not in str(caught.value)
        assert f"add_safe_globals([{name}])" in str(caught.value.hint)
        assert f"path, new = {str(source)!r}, {str(source) + '-plain'!r}" in str(caught.value.hint)


def test_quantised_state_is_checked_whole(copy: Path) -> None:
    source = copy / "adamw8bit"
    found = verify(source, full=True)
    assert found.ok
    assert not found.warnings
    assert found.num_checked_chunks == found.num_chunks
    told = "2 tensors are of class torchao.optim.subclass_8bit.OptimState8bit"
    assert any(note.startswith(told) for note in found.notes)
    file = source / "__1_0.distcp"
    data, last = file.read_bytes(), torch.ones(1).numpy().tobytes()  # the last number of the map
    assert data.startswith(b"PK")
    flip_byte(file, data.index(last, data.index(b"OptimState8bit")))
    (problem,) = verify(source, full=True).problems
    assert STATE[0] in problem.message
    assert "CRC-32" in problem.message


def test_quantised_state_is_left_out_by_a_name(made: Path, tmp_path: Path) -> None:
    source = made / "adamw8bit"
    with pytest.raises(SourceError, match="optimizer's state cannot be divided") as caught:
        reshard(source, tmp_path / "out", world_size=4)
    assert all("torchao.optim.subclass_8bit.OptimState8bit" in each for each in caught.value.problems)
    assert [each.partition(":")[0] for each in caught.value.problems] == list(STATE)
    assert "--no-optimizer" in str(caught.value.hint)
    with pytest.raises(SourceError, match="OptimState8bit"):
        diff(source, source, all_tensors=True)
    result = reshard(source, tmp_path / "out", world_size=4, no_optimizer=True)
    assert (result.num_tensors, result.num_optimizer_tensors, result.num_objects) == (2, 0, 0)
    assert "the optimizer's state is left out (--no-optimizer): 7 tensors and 5 byte entries" in result.notes
    assert diff(source, tmp_path / "out").is_equal
    written = json.loads((tmp_path / "out" / "shardkit.json").read_text())
    assert sorted(written["tensors"]) == ["model.0.weight", "model.1.weight"]
    assert torch.all(load_shape(tmp_path / "out", "model.1.weight", (4, 128)).isfinite())


def load_shape(path: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    state = {name: torch.full(shape, float("nan"))}
    dcp.load(state, checkpoint_id=path)
    return state[name]


def test_converting_what_is_left_out_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leaves out"):
        reshard(made / "adamw8bit", tmp_path / "out", world_size=2, no_optimizer=True, optimizer_dtype="bf16")


class Scaled(torch.Tensor):
    """A tensor of codes that mean nothing without a factor."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, factor: float) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=codes.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: torch.Tensor, factor: float) -> None:
        self.codes, self.factor = codes, factor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            return cls(func(args[0].codes), args[0].factor)
        plain = [each.codes * each.factor if isinstance(each, Scaled) else each for each in args]
        return func(*plain, **(kwargs or {}))


def test_save_says_what_cannot_be_read_again_and_the_hint_reads_it(tmp_path: Path) -> None:
    """A person's own class: stock `dcp.load` computes its values, by the lines of the hint."""
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(Scaled(WEIGHT, 0.5), requires_grad=False)
    name = f"{__name__}.Scaled"
    with pytest.warns(UserWarning, match=rf"1 tensor is saved as an object of {name}.*\(model\.weight\)"):
        shardkit.save(model, tmp_path / "saved")
    with pytest.raises(SourceError, match=f"model.weight: {name}, which is made of codes") as caught:
        consolidate(tmp_path / "saved", tmp_path / "hub")
    assert verify(tmp_path / "saved", full=True).ok
    exec("\n".join(line.strip() for line in str(caught.value.hint).splitlines()[1:]))
    assert torch.equal(load(tmp_path / "saved-plain", "model.weight"), WEIGHT / 2)
    consolidate(tmp_path / "saved-plain", tmp_path / "hub")
    (weight,) = load_file(tmp_path / "hub" / "model.safetensors").values()
    assert torch.equal(weight, WEIGHT / 2)


def test_a_file_of_an_unknown_class_is_whole_but_not_read(tmp_path: Path) -> None:
    file = tmp_path / "step.pt"
    torch.save({"model": {"up.weight": Scaled(WEIGHT, 0.5), "norm.weight": torch.ones(8)}, "step": 3}, file)
    assert f"{__name__}.Scaled, which is made of codes" in warning_of_what_is_whole(file)
    for attempt in (
        lambda: consolidate(file, tmp_path / "out"),
        lambda: reshard(file, tmp_path / "out", world_size=2),
        lambda: diff(file, file),
    ):
        with pytest.raises(SourceError, match=f"up.weight: step.pt: {__name__}.Scaled"):
            attempt()
    assert_a_flip_is_found(file, WEIGHT)


def as_model(folder: Path, files: dict[str, Path]) -> Path:
    """A Hub model with these files; an index if there are several."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = {}
    for name, file in files.items():
        shutil.copy(file, folder / name)
        held = torch.load(file, weights_only=True) if "plain" in file.name else NAMES
        index.update(dict.fromkeys(held, name))
    if len(files) > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


NAMES = "0.weight", "0.bias", "1.weight", "1.bias"
"""Of the state dicts that torchao quantised."""
BINS = {
    "0.7-int8": "dtypes.affine_quantized_tensor.AffineQuantizedTensor",
    "0.7-int8-dynamic": "quantization.linear_activation_quantized_tensor.LinearActivationQuantizedTensor",
    "0.7-float8": "dtypes.affine_quantized_tensor.AffineQuantizedTensor",
    "0.7-uintx": "dtypes.affine_quantized_tensor.AffineQuantizedTensor",
    "0.9-float8": "dtypes.affine_quantized_tensor.AffineQuantizedTensor",
    "0.14-float8": "quantization.Float8Tensor",
    "0.18-float8": "quantization.Float8Tensor",
    "0.18-int8": "quantization.Int8Tensor",
    "0.18-int8-dynamic": "quantization.Int8Tensor",
    "0.18-intx": "quantization.IntxUnpackedToInt8Tensor",
}


@pytest.mark.parametrize("name", BINS)
def test_a_hub_model_that_torchao_quantised_is_whole_and_refused_by_name(
    made: Path, tmp_path: Path, name: str
) -> None:
    model = as_model(tmp_path / "model", {"pytorch_model.bin": made / f"torchao-{name}.bin"})
    assert "1 tensor is an object of a class" in warning_of_what_is_whole(model)
    for attempt in (
        lambda: consolidate(model, tmp_path / "out"),
        lambda: preshard(model, tmp_path / "out", world_size=2),
        lambda: diff(model, model),
    ):
        with pytest.raises(SourceError) as caught:
            attempt()
        (problem,) = caught.value.problems
        assert problem.startswith(f"0.weight: pytorch_model.bin: torchao.{BINS[name]}, which is made of ")
        assert problem.endswith(": quantised by torchao")
        hint = str(caught.value.hint)
        assert hint.startswith("take the model that it was quantised from; or load each file")


def test_a_flipped_bit_of_a_quantised_hub_model_is_found(made: Path, tmp_path: Path) -> None:
    """In a sharded model, of which another file has plain tensors alone."""
    torch.save({"2.weight": WEIGHT}, tmp_path / "plain.bin")
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    files = {first: made / "torchao-0.18-int8.bin", second: tmp_path / "plain.bin"}
    model = as_model(tmp_path / "model", files)
    assert verify(model, full=True).ok
    assert verify(model, full=True).num_files == 2
    flip(model / second, WEIGHT.numpy().tobytes()[:-1])
    (problem,) = verify(model, full=True).problems
    assert (problem.file, "CRC-32" in problem.message) == (second, True)
    flip_byte(model / first, (model / first).read_bytes().index(b"data/0") + 100)
    assert [each.file for each in verify(model, full=True).problems] == [first, second]
    os.truncate(model / first, (model / first).stat().st_size - 40)
    assert not verify(model).ok
    index = model / "pytorch_model.bin.index.json"
    index.write_text(index.read_text().replace("0.weight", "9.weight"))
    shutil.copy(made / "torchao-0.18-int8.bin", model / first)
    (problem,) = verify(model).problems
    assert "disagree" in problem.message


def test_a_hub_model_of_a_class_in_the_table_is_read(made: Path, tmp_path: Path) -> None:
    """Also one that is not row-major in the file, and through a link as in the Hub's cache."""
    model = as_model(tmp_path / "model", {"pytorch_model.bin": made / "torch-2.13-async.bin"})
    (model / "pytorch_model.bin").rename(tmp_path / "blob")
    (model / "pytorch_model.bin").symlink_to(tmp_path / "blob")
    assert verify(model, full=True).ok
    consolidate(model, tmp_path / "out")
    read = load_file(tmp_path / "out" / "model.safetensors")
    up = torch.arange(1.0, 33.0).reshape(4, 8)
    expected = {"up.weight": up, "down.weight": up.t(), "norm.weight": torch.arange(1.0, 9.0)}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value) for name, value in expected.items())


def test_code_beside_tensors_of_classes_is_still_refused(made: Path, tmp_path: Path) -> None:
    """The setting of a tensor's class is taken for no harm, a name of another package is."""
    model = as_model(tmp_path / "model", {"pytorch_model.bin": made / "torchao-0.18-float8.bin"})
    name = b"torchao.quantization.quantize_.common.kernel_preference\nKernelPreference"
    respell(model / "pytorch_model.bin", name, b"posix\nsystem".ljust(len(name), b"_"))
    with pytest.raises(SourceError, match="never run"):
        verify(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["step.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["sparse", "nested", "quantised", "lazy", "bitsandbytes", "gguf"])
def test_torchs_own_kinds_are_whole_but_not_read(made: Path, tmp_path: Path, kind: str, name: str) -> None:
    values: dict[str, Any] = {
        "sparse": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint32),
        "lazy": nn.UninitializedParameter,
        "bitsandbytes": lambda: with_attribute(WEIGHT.to(torch.int8), SCB=torch.full((8,), 2.0)),
        "gguf": lambda: with_attribute(WEIGHT.to(torch.uint8), quant_type=12),
    }
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    torch.save({"up.weight": values[kind](), "norm.weight": torch.ones(8)}, model / name)
    path = model if name.endswith("bin") else model / name
    assert "1 tensor is an object of a class" in warning_of_what_is_whole(path)
    with pytest.raises(SourceError, match=r"up\.weight"):
        consolidate(path, tmp_path / "out")
    assert_a_flip_is_found(model / name, torch.ones(8), path)


def with_attribute(data: torch.Tensor, **attributes: Any) -> nn.Parameter:
    """A parameter that torch pickles as those of bitsandbytes and others: without its class."""
    made = nn.Parameter(data, requires_grad=False)
    made.__dict__.update(attributes)
    return made


@pytest.mark.parametrize("attribute", ["quant_type", "tensor_model_parallel", "main_grad"])
def test_a_weight_with_attributes_is_a_weight(tmp_path: Path, attribute: str) -> None:
    torch.save({"up.weight": with_attribute(WEIGHT, **{attribute: torch.ones(8, 8)})}, tmp_path / "step.pt")
    consolidate(tmp_path / "step.pt", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["up.weight"], WEIGHT)


def _make_coded_in_reduce_ex(codes: torch.Tensor, factor: torch.Tensor) -> Coded:
    return Coded(codes, factor)


class Coded(Scaled):
    """A class that pickles itself as those of TransformerEngine do."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _make_coded_in_reduce_ex, (self.codes, torch.tensor(self.factor))


def test_a_class_that_pickles_itself_is_whole_but_not_read(tmp_path: Path) -> None:
    source, name = tmp_path / "saved", f"{__name__}._make_coded_in_reduce_ex"
    dcp.save({"model.weight": Coded(WEIGHT, 0.5)}, checkpoint_id=source)
    found = verify(source, full=True)
    assert found.ok
    told = f"{name}, which is made of 2 plain tensors"
    assert any(told in each for each in (*found.warnings, *found.notes))
    with pytest.raises(SourceError, match=f"model.weight: {name}, which is made of 2 plain tensors"):
        consolidate(source, tmp_path / "out")
    assert_a_flip_is_found(source / "__0_0.distcp", WEIGHT, source)
