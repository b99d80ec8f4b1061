"""PEFT's OSF adapters and their base become what PEFT's own merge_and_unload makes of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.errors import SourceError
from shardkit.operations.consolidate import osf
from tests.operations.consolidate.checkpoints import CONFIG, hub, load, weights

MADE_BY_PEFT = Path(__file__).parents[2] / "data/peft/osf.safetensors"  # make_osf.py says how


def part(name: str) -> dict[str, torch.Tensor]:
    return {
        fqn.removeprefix(f"{name}."): value
        for fqn, value in load_file(MADE_BY_PEFT).items()
        if fqn.startswith(f"{name}.")
    }


def adapter(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text('{"peft_type": "OSF", "effective_rank": 0.5}')
    return directory


@pytest.mark.parametrize("name", ["", "default."])
def test_what_peft_merged(name: str, tmp_path: Path) -> None:
    """As recorded from PEFT 0.21; its older files have the adapter's name in them."""
    tensors = {fqn.replace("params.", f"params.{name}"): value for fqn, value in part("adapter").items()}
    base = hub(tmp_path / "base", {**part("base"), "other": torch.ones(3)})
    result = shardkit.consolidate(adapter(tmp_path / "adapter", tensors), base=base)
    assert Path(result.output) == tmp_path / "adapter-hf"
    found, expected = load(result.output), {**part("merged"), "other": torch.ones(3)}
    assert found.keys() == expected.keys()
    for fqn, value in expected.items():
        torch.testing.assert_close(found[fqn], value, rtol=1e-6, atol=1e-6)
    assert any(note.startswith("merged from an OSF adapter of PEFT: 2 weights") for note in result.notes)


def test_an_untrained_adapter_changes_nothing(tmp_path: Path) -> None:
    """In half precision too: the start is rounded as PEFT rounds it."""
    base = {name: value.bfloat16() for name, value in part("base").items()}
    tensors = {}
    for name, rank in (("q", 6), ("up", 3)):
        factors = torch.linalg.svd(base[f"{name}.weight"].float(), full_matrices=False)
        for letter, value in zip("USV", factors, strict=True):
            low = value[:, rank:] if letter == "U" else value[rank:]
            fqn = f"base_model.model.{name}.osf_svd_params.{letter}_low"
            tensors[fqn] = low.bfloat16().float().contiguous()
    shardkit.consolidate(
        adapter(tmp_path / "adapter", tensors), tmp_path / "out", base=hub(tmp_path / "base", base)
    )
    assert all(torch.equal(value, base[name]) for name, value in load(tmp_path / "out").items())


def test_without_a_base(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no frozen part") as caught:
        shardkit.consolidate(adapter(tmp_path / "adapter", part("adapter")))
    assert "base" in str(caught.value.hint)


def test_every_misfit_is_named(tmp_path: Path) -> None:
    tensors = part("adapter")
    base = hub(tmp_path / "base", {"q.weight": torch.ones(12, 17)})
    with pytest.raises(SourceError, match="does not fit base") as caught:
        shardkit.consolidate(adapter(tmp_path / "one", tensors), base=base)
    assert len(caught.value.problems) == 2
    del tensors["base_model.model.q.osf_svd_params.S_low"]
    tensors["base_model.model.head.weight"] = torch.ones(3)
    with pytest.raises(SourceError, match="cannot be merged") as caught:
        shardkit.consolidate(adapter(tmp_path / "two", tensors), base=base)
    assert sorted(caught.value.problems) == [
        "base_model.model.head.weight: no factor of OSF",
        "q: lacks S_low",
    ]


def test_each_thread_decomposes_a_weight_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many bands of it are written, and whatever other threads merge in between."""
    made, compute = list[tuple[str, int]](), osf.compute_merge

    def counted(catalog, merge, on_read):  # type: ignore[no-untyped-def]
        made.append((merge.base, threading.get_ident()))
        return compute(catalog, merge, on_read)

    monkeypatch.setattr(osf, "compute_merge", counted)
    state = {f"{name}.weight": torch.randn(1200, 400) for name in "abcd"}
    tensors = {
        f"base_model.model.{name}.osf_svd_params.{letter}_low": torch.randn(shape)
        for name in "abcd"
        for letter, shape in (("U", (1200, 4)), ("S", (4,)), ("V", (4, 400)))
    }
    base = hub(tmp_path / "base", state)
    shardkit.consolidate(adapter(tmp_path / "adapter", tensors), base=base, max_memory="2MiB")
    assert len(made) == len(set(made)) == 4


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_peft_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    base = hub(tmp_path / "base", weights(dtype), {**CONFIG, "dtype": str(dtype).removeprefix("torch.")})
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    wrapped = peft.get_peft_model(
        model,
        peft.OSFConfig(effective_rank=0.6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    optimizer = torch.optim.AdamW([each for each in wrapped.parameters() if each.requires_grad], lr=0.01)
    tokens = torch.arange(8).reshape(1, 8)
    for _ in range(3):
        wrapped(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped.save_pretrained(tmp_path / "adapter")
    shardkit.consolidate(tmp_path / "adapter", tmp_path / "out", base=base)
    found, expected = load(tmp_path / "out"), wrapped.merge_and_unload().state_dict()
    # PEFT rounds the product of the start in half precision.
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **close)
