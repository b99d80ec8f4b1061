"""Two real ranks that type what README, docs, the command line and an example say, for real models.

    python typed_world.py '{"out": ..., "texts": {name: code}}'

Every rank writes OUT/typed-<rank>.json: what differs from `from_pretrained`, parameters and buffers of all kinds.
It is a script: each process runs the texts in the folder that they speak of, and so changes its directory.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import transformers
from click.testing import CliRunner
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig

import shardkit
from shardkit.cli import main as command_line
from shardkit.layout import traced
from tests.training.models import llama
from tests.worlds.processes import ROOT, end_world, fork, forked_trace, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MODEL, CHECKPOINT = "./my-model", "my-model-dp_shard2"
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(dtype="bfloat16", tie_word_embeddings=True),
    # Two rotary tables, one for each type of layer, and a scale of embeddings: all of them buffers.
    "gemma3": lambda: Gemma3TextConfig(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}


def save_model(folder: Path, make: Callable[[], Any]) -> str:
    """Save a model, pre-shard it from the command line, and return what that printed to be typed."""
    folder.mkdir()
    torch.manual_seed(0)
    config = make()
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / MODEL)
    os.chdir(folder)
    with mock.patch.object(traced, "_serve_request", forked_trace):
        done = CliRunner().invoke(
            command_line, ["preshard", MODEL, "--world-size", "2"], prog_name="shardkit"
        )
    assert done.exit_code == 0, done.output
    _, _, said = done.stdout.partition("load it on every rank")
    return "\n".join(line.strip() for line in said.splitlines()[1:])


def on_meta() -> nn.Module:
    """A model on meta with all of its buffers, wrapped the usual way."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def type_text(code: str, mesh: Any) -> nn.Module:
    """Run a text of a document, in the place of a user who follows it."""
    names: dict[str, Any] = {"shardkit": shardkit, "mesh": mesh, "source": CHECKPOINT, "model": on_meta()}
    names["torch"] = torch
    exec(code, names)
    return names["model"]


def run_example(mesh: Any) -> nn.Module:
    """The functions of examples/fsdp2_load.py, as its `main` calls them."""
    example = runpy.run_path(str(ROOT / "examples" / "fsdp2_load.py"))
    model = example["build_on_meta"](MODEL)
    example["wrap"](model, "cpu")
    example["fill"](model, CHECKPOINT, "cpu")
    return model


def differences(model: nn.Module, dtype: Any) -> list[str]:
    """Names of parameters and buffers that are not, bit for bit, those of `from_pretrained`.

    Where masters are fp32, `wrap` computes in bf16: buffers that are in no checkpoint are those of the bf16 model.
    """
    expected = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    computing = torch.bfloat16 if dtype == torch.float32 else dtype
    buffers = AutoModelForCausalLM.from_pretrained(MODEL, dtype=computing).named_buffers()
    wanted = {**dict(expected.named_parameters()), **dict(buffers)}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in found.items()}
    differing = {
        name
        for name in wanted.keys() & whole.keys()
        if wanted[name].dtype != whole[name].dtype or not torch.equal(wanted[name], whole[name])
    }
    return sorted(differing | (wanted.keys() ^ whole.keys()))


def rank(out: Path, printed: Mapping[str, str], texts: Mapping[str, str], number: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    found: dict[str, Any] = {}
    for name in CONFIGS:
        os.chdir(out / name)
        all_texts = {**texts, "printed": printed[name]}
        models = {text: partial(type_text, code, mesh) for text, code in all_texts.items()}
        models["example"] = partial(run_example, mesh)
        for text, make in models.items():
            dtype = torch.float32 if 'dtype="fp32"' in all_texts.get(text, "") else "auto"
            model = make()
            found[f"{name} {text}"] = differences(model, dtype)
            hidden = set(dict(model.named_buffers())) - set(model.state_dict())
            found[f"{name} buffers"] = sorted(hidden)
    (out / f"typed-{number}.json").write_text(json.dumps(found))
    end_world()


def main() -> None:
    request = json.loads(sys.argv[1])
    out = Path(request["out"])
    printed = {name: save_model(out / name, make) for name, make in CONFIGS.items()}
    wait([fork(partial(rank, out, printed, request["texts"], number)) for number in range(2)])


if __name__ == "__main__":
    main()
