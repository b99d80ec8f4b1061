"""Quantised sources on real ranks: what they hold is what transformers dequantises, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.errors import LayoutError
from tests.manifests import write_file_list
from tests.models.quantised import COMPRESSED, MODELOPT, QUANTISED, QWEN3, by_transformers, quantise, to_nvfp4
from tests.models.zoo import make_hub
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

NAMES = [architecture.name for architecture in QUANTISED]
WAYS = [f"{name} {strategy}" for name in NAMES for strategy in ("direct", "broadcast")]
WAYS += [f"{MODELOPT} broadcast", f"{COMPRESSED} direct"]


def make_sources(out: Path) -> None:
    torch.set_num_threads(1)  # OpenMP does not outlive a fork
    for architecture in QUANTISED:
        hub = quantise(architecture, out / architecture.name)
        state = {name: x.clone() for name, x in by_transformers(hub).items()}
        torch.save(state, out / f"{architecture.name}.pt")
    torch.save(by_transformers(out / QWEN3.name, torch.float32), out / "float32.pt")
    for writer in (MODELOPT, COMPRESSED):
        make_hub(QWEN3, out / writer)
        torch.save(to_nvfp4(out / writer, writer), out / f"{writer}.pt")
    for name in ("whole", "damaged"):
        shutil.copytree(out / QWEN3.name, out / name)
        write_file_list(out / name)
    tensors = load_file(out / "damaged" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] += 1
    save_file(tensors, out / "damaged" / "model.safetensors", metadata={"format": "pt"})
    make_hub(QWEN3, out / "gptq")
    path = out / "gptq" / "config.json"
    described = {"quant_method": "gptq", "bits": 4}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": described}))


two = Ranks(__name__, 2, first=make_sources)


def assert_is(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    held = {name: x for name, x in model.state_dict().items() if isinstance(x, torch.Tensor)}
    found = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in held.items()}
    assert found.keys() == expected.keys()
    wrong = [
        name
        for name, x in expected.items()
        if found[name].dtype != x.dtype or not torch.equal(found[name], x)
    ]
    assert not wrong


def finalised(hub: Path, strategy: Any, **options: Any) -> nn.Module:
    context = shardkit.prepare(str(hub), str(hub), dequantize=True, **options)
    shardkit.wrap(context.model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    return shardkit.finalize(context.model, context, strategy=strategy)


@two.test_each(WAYS)
def test_three_phases(way: str, out: Path) -> None:
    name, strategy = way.split()
    model = finalised(out / name, strategy)
    assert_is(model, torch.load(out / f"{name}.pt"))
    config: Any = model.config
    assert "quantization_config" not in config.to_dict()


@two.test
def test_a_model_in_float32_has_each_product_unrounded(out: Path) -> None:
    expected = torch.load(out / "float32.pt")
    found = finalised(out / QWEN3.name, "direct", dtype="fp32").state_dict()
    for name, tensor in expected.items():
        if name.endswith("_proj.weight"):
            assert torch.equal(found[name].full_tensor(), tensor), name


@two.test_each(NAMES)
def test_a_model_that_anybody_has_wrapped(name: str, out: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(out / name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(LayoutError, match=r"^quantised: ") as caught:
        shardkit.load_into(model, str(out / name))
    assert "--dequantize" in str(caught.value.hint)
    shardkit.load_into(model, str(out / name), dequantize=True)
    expected = torch.load(out / f"{name}.pt")
    own = {
        fqn: x.dtype for fqn, x in model.state_dict().items()
    }  # nobody keeps DeepSeek's biases in fp32 here
    assert_is(model, {fqn: x.to(own[fqn]) for fqn, x in expected.items()})


@two.test_each(("qwen3", "gptq", COMPRESSED))
def test_without_the_option_prepare_refuses(name: str, out: Path) -> None:
    plain = transformers.Qwen3Config(
        **{**transformers.AutoConfig.from_pretrained(out / name).to_dict(), "quantization_config": None}
    )

    def build() -> nn.Module:
        with torch.device("meta"):
            return transformers.Qwen3ForCausalLM(plain)

    for what in (str(out / name), build):
        with pytest.raises(LayoutError, match=r"^quantised: "):
            shardkit.prepare(what, str(out / name))
    if name == "gptq":
        with pytest.raises(LayoutError, match=r"^quantised: .*gptq") as caught:
            shardkit.prepare(build, str(out / name), dequantize=True)
        assert "--dequantize" not in str(caught.value.hint)


@two.test_each(("whole", "damaged"))
def test_scales_are_compared_with_their_checksums(what: str, out: Path) -> None:
    """Each scale is read with every piece that it scales."""
    hub = out / what
    context = shardkit.prepare(str(hub), str(hub), dequantize=True)
    shardkit.wrap(context.model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    if what == "damaged":
        with pytest.raises(shardkit.IntegrityError) as caught:
            shardkit.finalize(context.model, context, strategy="direct")
        text = "\n".join((caught.value.message, *caught.value.problems))
        assert "up_proj.weight: model.safetensors" in text
        return
    shardkit.finalize(context.model, context, strategy="direct")
    assert context.checked is not None
    assert context.checked.checked_bytes == sum(
        x.nbytes for x in load_file(hub / "model.safetensors").values()
    )
