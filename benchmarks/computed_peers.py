"""shardkit beside the peers that cast, dequantise and merge on a CPU: whole processes, each with the model on disk before and after.

    python benchmarks/computed_peers.py DIRECTORY [--gigabytes 3] [--runs 3] [--only CASE ...]

DIRECTORY gets a generated Qwen3 model in the form that the case needs, the larger of source and output, and one output at
a time. "cast" is fp32 to bf16, from a Hub model or a checkpoint of DCP; "dequantise" is fp8 to bf16, in blocks of
transformers or in rows of compressed-tensors; "merge" is an adapter of rank 16 on all linear weights of a bf16 model.
transformers and peft load the model, and save it; accelerate merges the checkpoint, and safetensors casts the result;
shardkit reads and writes the same bytes. A peer that is not installed is left out.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from common import (
    HERE,
    Found,
    Report,
    Variant,
    common_options,
    process,
    run,
    work_in,
)
from computed import BLOCK, Case, Tensor, compare, generate, shardkit
from model import layer
from model import tensors as whole
from safetensors.numpy import save_file

HIDDEN, RANK = 2048, 16
ARGUMENTS = """
import sys
source, adapter, output = sys.argv[1:]
"""
SAVE = """
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
if adapter:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, adapter)
dcp.save(model.state_dict(), checkpoint_id=output, no_dist=True)
"""
LOAD_AND_CAST = """
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16").save_pretrained(output)
"""
MERGE_AND_CAST = """
import pathlib, torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file, save_file
merge_fsdp_weights(source, output)
for path in pathlib.Path(output).glob("*.safetensors"):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
"""
LOAD_DEQUANTISED = """
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
how = FineGrainedFP8Config(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(source, quantization_config=how, dtype="bfloat16")
model.save_pretrained(output)
"""
LOAD_DECOMPRESSED = """
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
how = CompressedTensorsConfig(run_compressed=False)
model = AutoModelForCausalLM.from_pretrained(source, quantization_config=how, dtype="bfloat16")
model.save_pretrained(output)
"""
MERGE = """
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)
"""


class Peer(NamedTuple):
    """A job, as shardkit and a peer do it."""

    peer: str
    module: str
    """Its name when it is imported."""
    code: str
    """What the peer runs; it follows `ARGUMENTS`."""
    command: tuple[str, ...]
    """What shardkit is started with, as in `computed.Case`."""


PEERS = {
    "cast": Peer(
        "transformers",
        "transformers",
        LOAD_AND_CAST,
        ("consolidate", "SOURCE", "OUTPUT", "--dtype", "bf16"),
    ),
    "cast, sharded": Peer(
        "accelerate, then a cast",
        "accelerate",
        MERGE_AND_CAST,
        ("consolidate", "CHECKPOINT", "OUTPUT", "--dtype", "bf16"),
    ),
    "dequantise": Peer(
        "transformers",
        "transformers",
        LOAD_DEQUANTISED,
        ("consolidate", "SOURCE", "OUTPUT", "--dequantize"),
    ),
    "dequantise, rows": Peer(
        "compressed-tensors in transformers",
        "compressed_tensors",
        LOAD_DECOMPRESSED,
        ("consolidate", "SOURCE", "OUTPUT", "--dequantize"),
    ),
    "merge": Peer(
        "peft",
        "peft",
        MERGE,
        (
            *("consolidate", "CHECKPOINT", "OUTPUT", "--base", "SOURCE"),
            *("--merge-lora", "--adapter-config", "SETTINGS"),
        ),
    ),
}
BY_BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
BY_ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}
SETTINGS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}


def model(place: Path, gigabytes: float, *options: str) -> int:
    """Generate a plain Qwen3 model; return its number of layers."""
    run([sys.executable, str(HERE / "model.py"), str(place), "--gigabytes", str(gigabytes), *options])
    number: int = json.loads((place / "config.json").read_text())["num_hidden_layers"]
    return number


def in_layer() -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, shape) of a layer's tensors."""
    return [(name.removeprefix("model.layers.0."), shape) for name, shape in layer(0, HIDDEN, 0)]


def quantised(
    place: Path, gigabytes: float, described: dict[str, Any], scales: Callable[[tuple[int, ...]], Tensor]
) -> None:
    """Generate the model with the linear weights of its layers in fp8; `scales` gets the shape of a weight."""
    number = model(place, gigabytes)
    config = json.loads((place / "config.json").read_text())
    shutil.rmtree(place)
    tensors = list[Tensor]()
    for name, shape in in_layer():
        tensors.append((name, "BF16" if len(shape) == 1 else "F8_E4M3", shape))
        if len(shape) > 1:
            suffix, tag, grid = scales(shape)
            tensors.append((name + suffix, tag, grid))
    outer = tuple(
        (name, "BF16", shape) for name, shape in whole(0, HIDDEN, 0) if not name.startswith("model.layers.")
    )
    case = Case(tuple(tensors), (), name="model.layers.{}.", outer=outer, number=number)
    generate(place, case, gigabytes)
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": described}))


def adapted(work: Path, gigabytes: float) -> dict[str, Path]:
    """Generate the model, an adapter as PEFT writes it, and a checkpoint of both as a trainer writes it."""
    places = {key: work / key.lower() for key in ("SOURCE", "ADAPTER")}
    number = model(places["SOURCE"], gigabytes)
    random, factors = numpy.random.default_rng(0), dict[str, numpy.ndarray]()
    modules = [(name.removesuffix(".weight"), shape) for name, shape in in_layer() if len(shape) > 1]
    for at, (module, (rows, columns)) in product(range(number), modules):
        before = f"base_model.model.model.layers.{at}.{module}"
        factors[f"{before}.lora_A.weight"] = random.standard_normal((RANK, columns), "f4")
        factors[f"{before}.lora_B.weight"] = random.standard_normal((rows, RANK), "f4")
    places["ADAPTER"].mkdir()
    save_file(factors, places["ADAPTER"] / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({module.rpartition(".")[2] for module, _ in modules})
    settings = json.dumps({**SETTINGS, "target_modules": targets})
    places["SETTINGS"] = places["ADAPTER"] / "adapter_config.json"
    places["SETTINGS"].write_text(settings)
    return places


def save(places: dict[str, Path]) -> None:
    """Write the checkpoint of a model, with its adapter if it has one, by one process."""
    arguments = (str(places["SOURCE"]), str(places.get("ADAPTER", "")), str(places["CHECKPOINT"]))
    run([sys.executable, "-c", ARGUMENTS + SAVE, *arguments])


def made(name: str, work: Path, gigabytes: float) -> dict[str, Path]:
    """Make what a case needs, and return the directories that its command names."""
    places = {"SOURCE": work / "source"}
    if name == "dequantise":
        quantised(
            places["SOURCE"],
            gigabytes,
            BY_BLOCKS,
            lambda shape: ("_scale_inv", "F32", tuple(-(-size // BLOCK) for size in shape)),
        )
    elif name == "dequantise, rows":
        quantised(places["SOURCE"], gigabytes, BY_ROWS, lambda shape: ("_scale", "BF16", (shape[0], 1)))
    elif name == "merge":
        places = adapted(work, gigabytes)
    else:
        model(places["SOURCE"], 2 * gigabytes, "--fp32")
    if "CHECKPOINT" in PEERS[name].command:
        places["CHECKPOINT"] = work / "checkpoint"
        save(places)
    return places


def peer(name: str, places: dict[str, Path], output: Path) -> Found:
    """Run a peer as a whole process."""
    source = places["CHECKPOINT" if name == "cast, sharded" else "SOURCE"]
    adapter = places.get("ADAPTER", "")
    return process(
        [sys.executable, "-c", ARGUMENTS + PEERS[name].code, str(source), str(adapter), str(output)]
    )


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=3)
    parser.add_argument("--only", action="append", choices=PEERS, help="default: all")
    args = parser.parse_args()
    with Report(args) as report:
        for name in args.only or PEERS:
            if find_spec(PEERS[name].module) is None:
                report.leave_out(name, f"{PEERS[name].module} is not installed")
                continue
            work = work_in(args.directory)
            places = made(name, work, args.gigabytes)
            variants: dict[str, Variant] = {
                "shardkit": partial(shardkit, PEERS[name].command, places, None),
                PEERS[name].peer: partial(peer, name, places),
            }
            compare(report, name, places["SOURCE"], work / "output", variants, args.runs)
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
