"""Converters of transformers whose operations shardkit does not know, on real ranks: what they hold is what
`from_pretrained` gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

import shardkit
from shardkit.errors import LayoutError
from shardkit.layout import traced
from tests.models.zoo import ZOO, from_pretrained, make_hub
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks, on_all

pytestmark = pytest.mark.prove

NORM, GATE, UP = "input_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"


class PlusOne(ConversionOps):
    """The files have norms around zero."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **_: Any
    ) -> Any:
        return {target_patterns[0]: input_dict[source_patterns[0]][0] + 1}


class Mix(ConversionOps):
    """Two tensors are made of two, neither of one alone."""

    supports_many_to_many = True

    def convert(
        self, input_dict: dict[str, Any], source_patterns: Any, target_patterns: Any, **_: Any
    ) -> Any:
        a, b = (input_dict[pattern][0] for pattern in source_patterns)
        return {target_patterns[0]: a.flip(0) * 0.75, target_patterns[1]: a + b}


def register() -> None:
    """Let transformers know the converters, in this process."""
    converters = [
        WeightConverter(NORM, NORM, operations=[PlusOne()]),
        WeightConverter(["mlp.a.weight", "mlp.b.weight"], [GATE, UP], operations=[Mix()]),
    ]
    register_checkpoint_conversion_mapping("LlamaForCausalLM", converters, overwrite=True)


def make(out: Path) -> None:
    torch.set_num_threads(1)  # OpenMP does not outlive a fork
    make_hub(ZOO["llama"], out / "hub")
    path = out / "hub" / "model.safetensors"
    stored = load_file(path)
    renamed = {
        name.replace("gate_proj", "a").replace("up_proj", "b"): tensor for name, tensor in stored.items()
    }
    save_file(renamed, path, metadata={"format": "pt"})
    register()
    expected = {
        name: x.clone() for name, x in from_pretrained(ZOO["llama"], out / "hub").state_dict().items()
    }
    torch.save(expected, out / "expected.pt")
    changed = {
        name for name, x in expected.items() if name not in renamed or not torch.equal(x, renamed[name])
    }
    assert {name.split(".", 3)[-1] for name in changed} == {NORM, GATE, UP}
    with mock.patch.object(traced, "_serve_request", forked_trace):
        tried = shardkit.preshard(out / "hub", out / "pre", mesh="dp_shard=4", dry_run=True)
        done = shardkit.preshard(out / "hub", out / "pre", mesh="dp_shard=4")
    assert tried.warnings == done.warnings
    (said,) = done.warnings
    config = transformers.AutoConfig.from_pretrained(out / "hub")
    assert f"{3 * config.num_hidden_layers} tensors made whole by transformers' own code" in said
    assert "beyond --max-memory" in said
    shardkit.verify(out / "pre")
    with mock.patch.object(traced, "_serve_request", forked_trace):
        shapes = {name: tuple(x.shape) for name, x in expected.items()}
        form = traced.ask_class(str(out / "hub"), shapes, in_memory=True)
        assert form is not None
        assert form.hub_form is None
        assert form.is_lost
        assert "it would change" in str(form.answer.failure)
        shardkit.preshard(out / "hub", out / "transformers", mesh="dp_shard=2", profile="transformers")


two = Ranks(__name__, 2, first=make)


@two.test_each(("pre direct", "pre broadcast", "hub direct", "hub broadcast"))
def test_ranks_hold_what_from_pretrained_gives(way: str, out: Path) -> None:
    register()
    source, strategy = way.split()
    context = shardkit.prepare(str(out / "hub"), str(out / source))
    shardkit.wrap(context.model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    strategies: Any = strategy
    model = shardkit.finalize(context.model, context, strategy=strategies)
    held = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
    expected = torch.load(out / "expected.pt")
    assert held.keys() == expected.keys()
    wrong = [
        name for name, x in expected.items() if held[name].dtype != x.dtype or not torch.equal(held[name], x)
    ]
    assert not wrong


@two.test_each(("pre", "transformers"))
def test_the_way_back_is_refused(way: str, out: Path) -> None:
    if dist.get_rank() == 0:
        with pytest.raises(LayoutError, match="does not know the way back") as caught:
            shardkit.consolidate(out / way, out / "back", base=str(out / "hub"))
        assert any(GATE in problem for problem in caught.value.problems)
        assert any(NORM in problem for problem in caught.value.problems)
        assert not (out / "back").exists()
    on_all(None)


@two.test
def test_what_a_trainer_saved_is_not_converted_twice(out: Path) -> None:
    register()
    dcp.save(torch.load(out / "expected.pt"), checkpoint_id=out / "plain")
    with pytest.raises(LayoutError) as caught:
        shardkit.prepare(str(out / "hub"), str(out / "plain"))
    text = "\n".join((caught.value.message, *caught.value.problems, caught.value.hint or ""))
    assert "only transformers' own code tells the two apart" in text
