"""shardkit beside the peers that cast, dequantise and merge on a CPU: whole processes, each with the model on disk before and after.

    python benchmarks/computed_peers.py DIRECTORY [--gigabytes 3] [--runs 3] [--only CASE ...]

DIRECTORY gets a generated Qwen3 model in the form that the case needs, the larger of source and output, and one output at
a time. "cast" is fp32 to bf16, "dequantise" fp8 in blocks to bf16, "merge" an adapter of rank 16 on all linear weights of
a bf16 model. transformers and peft load the model, and save it; shardkit reads and writes the same bytes.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from itertools import product
from pathlib import Path

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
LOAD = """
import sys
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
source, adapter, output = sys.argv[1:]
"""
SAVE = """
import sys
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from transformers import AutoModelForCausalLM
source, adapter, output = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16"), adapter)
dcp.save(model.state_dict(), checkpoint_id=output, no_dist=True)
"""
PEERS = {
    "cast": 'AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16").save_pretrained(output)',
    "dequantise": "how = FineGrainedFP8Config(dequantize=True)\n"
    'model = AutoModelForCausalLM.from_pretrained(source, quantization_config=how, dtype="bfloat16")\n'
    "model.save_pretrained(output)",
    "merge": "from peft import PeftModel\n"
    'model = AutoModelForCausalLM.from_pretrained(source, dtype="bfloat16")\n'
    "PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(output)",
}
PROGRAMS = {
    "cast": ("consolidate", "SOURCE", "OUTPUT", "--dtype", "bf16"),
    "dequantise": ("consolidate", "SOURCE", "OUTPUT", "--dequantize"),
    "merge": (
        "consolidate",
        "CHECKPOINT",
        "OUTPUT",
        "--base",
        "SOURCE",
        "--merge-lora",
        "--adapter-config",
        "SETTINGS",
    ),
}
"""What shardkit is started with."""
SETTINGS = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}


def model(place: Path, gigabytes: float, *options: str) -> int:
    """Generate a plain Qwen3 model; return its number of layers."""
    run([sys.executable, str(HERE / "model.py"), str(place), "--gigabytes", str(gigabytes), *options])
    number: int = json.loads((place / "config.json").read_text())["num_hidden_layers"]
    return number


def in_layer() -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, shape) of a layer's tensors."""
    return [(name.removeprefix("model.layers.0."), shape) for name, shape in layer(0, HIDDEN, 0)]


def quantised(place: Path, gigabytes: float) -> None:
    """Generate the model with the linear weights of its layers in fp8."""
    number = model(place, gigabytes)
    config = json.loads((place / "config.json").read_text())
    shutil.rmtree(place)
    tensors = list[Tensor]()
    for name, shape in in_layer():
        tensors.append((name, "BF16" if len(shape) == 1 else "F8_E4M3", shape))
        if len(shape) > 1:
            tensors.append((f"{name}_scale_inv", "F32", tuple(-(-size // BLOCK) for size in shape)))
    outer = tuple(
        (name, "BF16", shape) for name, shape in whole(0, HIDDEN, 0) if not name.startswith("model.layers.")
    )
    case = Case(tuple(tensors), (), name="model.layers.{}.", outer=outer, number=number)
    generate(place, case, gigabytes)
    described = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    (place / "config.json").write_text(json.dumps({**config, "quantization_config": described}))


def adapted(work: Path, gigabytes: float) -> dict[str, Path]:
    """Generate the model, an adapter as PEFT writes it, and a checkpoint of both as a trainer writes it."""
    places = {key: work / key.lower() for key in ("SOURCE", "ADAPTER", "CHECKPOINT")}
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
    run([sys.executable, "-c", SAVE, *(str(places[key]) for key in ("SOURCE", "ADAPTER", "CHECKPOINT"))])
    return places


def peer(name: str, places: dict[str, Path], output: Path) -> Found:
    """Run a peer as a whole process."""
    adapter = places.get("ADAPTER", output)
    return process(
        [sys.executable, "-c", LOAD + PEERS[name], str(places["SOURCE"]), str(adapter), str(output)]
    )


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=3)
    parser.add_argument("--only", action="append", choices=PEERS, help="default: all")
    args = parser.parse_args()
    with Report(args) as report:
        for name in args.only or PEERS:
            work = work_in(args.directory)
            places = {"SOURCE": work / "source"}
            if name == "cast":
                model(places["SOURCE"], 2 * args.gigabytes, "--fp32")
            elif name == "dequantise":
                quantised(places["SOURCE"], args.gigabytes)
            else:
                places = adapted(work, args.gigabytes)
            variants: dict[str, Variant] = {
                "shardkit": partial(shardkit, PROGRAMS[name], places, None),
                "peft" if name == "merge" else "transformers": partial(peer, name, places),
            }
            compare(report, name, places["SOURCE"], work / "output", variants, args.runs)
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
