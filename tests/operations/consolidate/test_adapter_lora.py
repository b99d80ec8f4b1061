"""Merged weights are W + scale * B A, whatever the chunks, and nothing else is merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core.catalog import Catalog, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.regions import Region
from shardkit.errors import SourceError
from shardkit.operations.consolidate.merge import plan_merge
from shardkit.transfer.codecs import lora as lora_module
from shardkit.transfer.codecs.convert import one_thread_each
from shardkit.transfer.codecs.derive import derive
from shardkit.transfer.sources import SourceFiles
from tests.cases import but_first
from tests.transfer.codecs.test_dequantize import read

P = "base_model.model."
MakeCatalog = Callable[[Mapping[str, torch.Tensor]], Catalog]


@pytest.fixture
def make_catalog(tmp_path: Path) -> MakeCatalog:
    """Return a function that stores tensors in two chunks each, the later rows first."""

    def make(tensors: Mapping[str, torch.Tensor]) -> Catalog:
        catalog, data = Catalog(format="dcp", directory=str(tmp_path)), bytearray()
        for name, tensor in tensors.items():
            half = (len(tensor) + 1) // 2
            chunks = []
            for start, part in ((half, tensor[half:]), (0, tensor[:half])):
                raw = part.contiguous().view(torch.uint8).numpy().tobytes()
                offsets = (start, *[0] * (tensor.dim() - 1))
                chunks.append((0, len(data), len(raw), Region(offsets, tuple(part.shape))))
                data += raw
            dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
            catalog.add_tensor(name, dtype, tuple(tensor.shape), iter(chunks))
        (tmp_path / "data").write_bytes(data)
        catalog.files.append(SourceFile(name="data", path=str(tmp_path / "data"), size=len(data)))
        return catalog

    return make


def lora(
    module: str = "q_proj", *, dtype: torch.dtype = torch.bfloat16, rank: int = 3, is_transposed: bool = False
) -> dict[str, torch.Tensor]:
    """Return a module's tensors, named as PEFT holds them."""
    torch.manual_seed(0)
    weight = torch.randn(10, 7) if is_transposed else torch.randn(7, 10)
    return {
        f"{P}{module}.base_layer.weight": weight.to(dtype),
        f"{P}{module}.lora_A.default.weight": torch.randn(rank, 10),
        f"{P}{module}.lora_B.default.weight": torch.randn(7, rank),
    }


def small_blocks(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(lora_module, "_ROWS", rows)
    monkeypatch.setattr(lora_module, "_BLOCK_NUMBERS", 1)


def merge(catalog: Catalog, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the merged model as it would be written."""
    plan = plan_merge(catalog.tensors, {name: name for name in catalog.tensors}, config)
    merged, result = derive(catalog, plan.merges, plan.adapter_names), {}
    with SourceFiles(merged.files) as files, files.reader() as reader:
        for stored, target in plan.names.items():
            entry = merged.tensors[stored]
            whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.name))
            for row in entry.chunk_ids:
                raw, region = bytearray(merged.chunks.nbytes[row]), merged.chunks.region(row)
                reader.read_into(merged.chunks.file[row], memoryview(raw), merged.chunks.start[row], stored)
                box = tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))
                whole[box] = torch.frombuffer(raw, dtype=whole.dtype).reshape(region.sizes)
            result[target] = whole
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [192, 2], ids=["whole", "two rows at a time"])
def test_adds_the_product(
    make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int
) -> None:
    small_blocks(monkeypatch, rows)
    tensors = lora(dtype=dtype) | {f"{P}norm.weight": torch.ones(5)}
    weight, a, b = list(tensors.values())[:3]
    merged = merge(make_catalog(tensors), {"lora_alpha": 8, "r": 3})
    assert merged.keys() == {"q_proj.weight", "norm.weight"}
    torch.testing.assert_close(merged["q_proj.weight"], (weight.float() + b @ a * (8 / 3)).to(dtype))
    assert merged["q_proj.weight"].dtype == dtype
    assert torch.equal(merged["norm.weight"], torch.ones(5))


@pytest.mark.parametrize("dora", but_first([False, True]), ids=["lora", "dora"])
@pytest.mark.parametrize("is_transposed", but_first([False, True]), ids=["linear", "transposed"])
@pytest.mark.parametrize(("rows", "columns", "rank"), but_first([(777, 1000, 8), (1500, 301, 3)]))
def test_any_range_has_the_bits_of_all_at_once(
    make_catalog: MakeCatalog, rows: int, columns: int, rank: int, is_transposed: bool, dora: bool
) -> None:
    torch.manual_seed(0)
    out, into = (columns, rows) if is_transposed else (rows, columns)
    weight, a, b = torch.randn(rows, columns).bfloat16(), torch.randn(rank, into), torch.randn(out, rank)
    head = f"{P}q_proj."
    names = (f"{head}base_layer.weight", f"{head}lora_A.default.weight", f"{head}lora_B.default.weight")
    tensors = dict(zip(names, (weight, a, b), strict=True))
    if dora:
        tensors[f"{head}lora_magnitude_vector.default.weight"] = torch.rand(out) + 1
    catalog = make_catalog(tensors)
    config = {"lora_alpha": 5, "use_dora": dora, "fan_in_fan_out": is_transposed}
    plan = plan_merge(catalog.tensors, {name: name for name in tensors}, config)
    with one_thread_each(True):
        product = (b @ a) * (5 / rank)
        expected = (product.T if is_transposed else product) + weight
        if dora:
            length = expected.norm(dim=0 if is_transposed else 1)
            factor = tensors[f"{head}lora_magnitude_vector.default.weight"] / length
            expected = expected * (factor if is_transposed else factor[:, None])
        found = read(derive(catalog, plan.merges, plan.adapter_names), names[0])
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("is_transposed", [False, True], ids=["linear", "transposed"])
def test_any_range_of_experts_has_the_bits_of_all_at_once(
    make_catalog: MakeCatalog, is_transposed: bool
) -> None:
    """What PEFT computes of them, by one product for all."""
    torch.manual_seed(0)
    experts, out, into, rank = 3, 410, 300, 4
    shape = (experts, into, out) if is_transposed else (experts, out, into)
    name = "mlp.experts.base_layer.up"
    tensors = {
        name: torch.randn(shape).bfloat16(),
        "mlp.experts.lora_A.default.weight": torch.randn(rank * experts, into),
        "mlp.experts.lora_B.default.weight": torch.randn(out, rank * experts),
    }
    catalog = make_catalog(tensors)
    config = {"lora_alpha": 5, "r": rank, "target_parameters": ["experts.up"]}
    plan = plan_merge(catalog.tensors, {name: name for name in tensors}, config)
    weight, a, b = tensors.values()
    with one_thread_each(True):
        a, b = a.reshape(experts, -1, into), b.reshape(out, -1, experts)
        added = torch.einsum("ore,eri->eio" if is_transposed else "ore,eri->eoi", b, a) * (5 / rank)
        found = read(derive(catalog, plan.merges, plan.adapter_names), name)
    assert torch.equal(found, (weight.float() + added).bfloat16())
    assert plan.names == {name: "mlp.experts.up"}


def test_settings_for_some_modules(make_catalog: MakeCatalog) -> None:
    """A pattern counts for the modules whose path ends with it; the rank itself is the tensors'."""
    tensors = lora("layers.0.q_proj") | lora("layers.0.down_proj", rank=2)
    config = {
        "r": 3,
        "lora_alpha": 6,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"0.down_proj": 5, "proj": 100},
    }
    merged = merge(make_catalog(tensors), config)
    for module, scale in (("layers.0.q_proj", 6 / sqrt(3)), ("layers.0.down_proj", 5 / sqrt(2))):
        weight, a, b = (tensor for name, tensor in tensors.items() if module in name)
        expected = (weight.float() + b @ a * scale).bfloat16()
        torch.testing.assert_close(merged[f"{module}.weight"], expected)


def test_matrices_that_are_stored_the_other_way_round(make_catalog: MakeCatalog) -> None:
    tensors = lora("c_attn", is_transposed=True)
    tensors |= {
        f"{P}c_attn.base_layer.bias": torch.randn(7),
        f"{P}c_attn.lora_B.default.bias": torch.randn(7),
    }
    weight, a, b, bias, added = tensors.values()
    merged = merge(make_catalog(tensors), {"lora_alpha": 3, "fan_in_fan_out": True})
    torch.testing.assert_close(merged["c_attn.weight"], (weight.float() + (b @ a).T).bfloat16())
    torch.testing.assert_close(merged["c_attn.bias"], bias + added)


def test_embeddings(make_catalog: MakeCatalog) -> None:
    tensors = {
        f"{P}e.base_layer.weight": torch.randn(11, 4),
        f"{P}e.lora_embedding_A.default": torch.randn(2, 11),
        f"{P}e.lora_embedding_B.default": torch.randn(4, 2),
    }
    weight, a, b = tensors.values()
    merged = merge(make_catalog(tensors), {"lora_alpha": 4})
    torch.testing.assert_close(merged["e.weight"], weight + 2 * (b @ a).T)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_dora_scales_every_output(
    make_catalog: MakeCatalog, monkeypatch: pytest.MonkeyPatch, is_transposed: bool
) -> None:
    small_blocks(monkeypatch, 2)
    tensors = lora(dtype=torch.float32, is_transposed=is_transposed)
    weight, a, b = tensors.values()
    magnitude = tensors[f"{P}q_proj.lora_magnitude_vector.default.weight"] = torch.rand(7) + 1
    config = {"lora_alpha": 3, "use_dora": True, "fan_in_fan_out": is_transposed}
    merged = merge(make_catalog(tensors), config)["q_proj.weight"]
    outputs = merged.T if is_transposed else merged
    torch.testing.assert_close(outputs.norm(dim=1), magnitude)
    direction = (weight.T if is_transposed else weight) + b @ a
    torch.testing.assert_close(
        outputs / outputs.norm(dim=1)[:, None], direction / direction.norm(dim=1)[:, None]
    )


def test_a_module_trained_in_full_takes_the_originals_place(make_catalog: MakeCatalog) -> None:
    trained = torch.randn(3, 3)
    tensors = lora() | {
        f"{P}head.original_module.weight": torch.zeros(3, 3),
        f"{P}head.modules_to_save.default.weight": trained,
    }
    merged = merge(make_catalog(tensors), {"lora_alpha": 1})
    assert merged.keys() == {"q_proj.weight", "head.weight"}
    assert torch.equal(merged["head.weight"], trained)


def test_the_catalog_that_was_given_stays_as_it_was(make_catalog: MakeCatalog) -> None:
    catalog = make_catalog(lora())
    before = (dict(catalog.tensors), len(catalog.files), len(catalog.chunks))
    merge(catalog, {"lora_alpha": 1})
    assert (dict(catalog.tensors), len(catalog.files), len(catalog.chunks)) == before


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"norm.weight": torch.ones(1)}, {"lora_alpha": 1}, "holds no adapter"),
        (dict(list(lora().items())[1:]), {"lora_alpha": 1}, "weight of the base is missing"),
        (lora(), {}, "lora_alpha is not known"),
        (lora(), {"lora_alpha": 1, "peft_type": "LOHA"}, "type LOHA"),
        (lora(), {"lora_alpha": 1, "use_qalora": True}, "use_qalora"),
        (lora(), {"lora_alpha": 1, "r": 4}, "rank is 3, and 4"),
        (lora(), {"lora_alpha": "1"}, "lora_alpha: not a number"),
        (lora(), {"lora_alpha": 1, "rank_pattern": {"(": 3}}, "rank_pattern: (: missing )"),
        (lora(), {"lora_alpha": 1, "alpha_pattern": {"(a+)+": 3}}, "too costly"),
        (lora(), {"lora_alpha": 1, "alpha_pattern": {"q_proj": None}}, "its value is not a number"),
        (lora(), {"lora_alpha": 1, "alpha_pattern": [1]}, "alpha_pattern: not a mapping"),
        (
            lora() | {f"{P}q_proj.lora_B.default.weight": torch.ones(6, 3)},
            {"lora_alpha": 1, "fan_in_fan_out": True},
            "do not fit each other",
        ),
        (dict(list(lora().items())[:2]), {"lora_alpha": 1}, "q_proj: its lora_B is missing"),
        (lora() | {f"{P}x.ia3_l.default": torch.ones(2)}, {"lora_alpha": 1}, "ia3_l"),
        (lora() | {f"{P}q_proj.lora_B.default.bias": torch.ones(7)}, {"lora_alpha": 1}, "the base has none"),
    ],
)
def test_refuses_what_it_cannot_merge(
    make_catalog: MakeCatalog, tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(SourceError) as caught:
        merge(make_catalog(tensors), config)
    assert message in str(caught.value)
