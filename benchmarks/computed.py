"""Conversions and dequantising beside `cp`, as whole processes: what a computed value costs.

    python benchmarks/computed.py DIRECTORY [--gigabytes 3] [--runs 7] [--beside CHECKOUT ...] [--only CASE ...]

DIRECTORY gets a generated source (`--gigabytes` of bf16 values: half of that in fp8, twice in fp32), the larger of source
and output, and one output at a time. Each case is one command; `--beside` runs it also with another checkout of shardkit,
in turn with this one. The `cp` copies the larger of source and output. "a plain move" is preshard of plain bf16 weights:
the rest is what computing costs. `cpu` is user and system time of the whole process.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from functools import partial
from math import prod
from multiprocessing import Process
from pathlib import Path
from typing import NamedTuple

import numpy
from common import Found, Report, Variant, alternate, common_options, copies, figures, process, work_in

ROWS, COLUMNS = 7168, 2048
BLOCK, GROUP, NVFP4_GROUP = 128, 32, 16
START = "import sys; del sys.path[0]; from shardkit.cli import main; main()"
"""`python -m shardkit` without the working directory, which may be another checkout."""
Tensor = tuple[str, str, tuple[int, ...]]
"""(what follows the weight's name, tag of safetensors, shape)."""


class Case(NamedTuple):
    """A source, and the command that computes an output from it."""

    tensors: tuple[Tensor, ...]
    """Of each layer."""
    command: tuple[str, ...]
    """A verb and its options. SOURCE, OUTPUT and BASE stand for directories, ADAPTER for the settings of an adapter."""
    quantised: dict[str, object] | None = None
    """Of the config."""
    name: str = "model.layers.{}.mlp.up_proj.weight"
    """Of a tensor, with the layer's number; what is in `tensors` follows."""
    first: tuple[str, ...] = ()
    """The command that makes SOURCE from the generated model, which is BASE unless `example` names another one."""
    example: str | None = None
    """The case whose generated model is BASE."""
    outer: tuple[Tensor, ...] = ()
    """Tensors outside of the layers, by their names."""
    number: int | None = None
    """Of layers; None: as many as have `--gigabytes` of bf16 values."""


PRESHARD = ("preshard", "SOURCE", "OUTPUT", "--layout", "declared", "--wrap", "none")
RANKS = ("--world-size", "4")
BY_ROWS = ("--mesh", "tp=4", "--parallel-rule", "*up_proj=rowwise")
"""Cut along the last dim."""
CONSOLIDATE = ("consolidate", "SOURCE", "OUTPUT", "--base", "BASE")
DEQUANTISE = (*PRESHARD, *RANKS, "--dequantize")


def plain(tag: str, *command: str, first: tuple[str, ...] = (), example: str | None = None) -> Case:
    """Return a model of plain weights."""
    return Case((("", tag, (ROWS, COLUMNS)),), command, first=first, example=example)


def fp8(method: str, suffix: str, grid: tuple[int, ...], tag: str = "F32", **described: object) -> Case:
    """Return a model in e4m3 with a grid of scales."""
    tensors = (("", "F8_E4M3", (ROWS, COLUMNS)), (suffix, tag, grid))
    return Case(tensors, DEQUANTISE, {"quant_method": method, **described})


def fp4(suffix: str, scales: Tensor, *others: Tensor, **described: object) -> Case:
    """Return a model with two numbers in a byte."""
    return Case(((suffix, "U8", (ROWS, COLUMNS // 2)), scales, *others), DEQUANTISE, described)


def merge(rank: int) -> Case:
    """Return a model whose weights have an adapter each."""
    factors = (
        ("lora_A.default.weight", "F32", (rank, COLUMNS)),
        ("lora_B.default.weight", "F32", (ROWS, rank)),
    )
    return Case(
        (("base_layer.weight", "BF16", (ROWS, COLUMNS)), *factors),
        ("consolidate", "SOURCE", "OUTPUT", "--merge-lora", "--adapter-config", "ADAPTER"),
        first=(*PRESHARD, *RANKS),
        name="base_model.model.model.layers.{}.mlp.up_proj.",
    )


def fold(hidden: int, kept: int) -> Case:
    """Return a model whose weights are factors of OSFT, of which `kept` directions are frozen.

    The product is in float64, so these are few, and in files of their own, for all cores.
    """
    sizes = {"U_high": (hidden, kept), "S_high": (kept,), "V_high": (kept, hidden)}
    rest = hidden - kept
    sizes |= {"U_low": (hidden, rest), "S_low": (rest,), "V_low": (rest, hidden)}
    names = {name: f"osft_{name}" if name.endswith("high") else f"osft_params.{name}" for name in sizes}
    return Case(
        tuple((names[name], "F32", shape) for name, shape in sizes.items()),
        ("consolidate", "SOURCE", "OUTPUT", "--dtype", "bf16", "--max-shard-size", "50MB"),
        name="model.layers.{}.self_attn.o_proj.",
        number=6,
    )


_PACKED, _COMPRESSED = "_packed", "compressed-tensors"
CASES = {
    "a plain move": plain("BF16", *PRESHARD, *RANKS),
    "fp32 -> bf16": plain("F32", *PRESHARD, *RANKS, "--dtype", "bf16"),
    "fp32 -> bf16, consolidate": plain(
        "F32", *CONSOLIDATE, "--dtype", "bf16", first=(*PRESHARD, *RANKS), example="a plain move"
    ),
    "bf16 -> fp32": plain("BF16", *PRESHARD, *RANKS, "--dtype", "fp32"),
    "fp8, blocks": fp8(
        "fp8",
        "_scale_inv",
        (ROWS // BLOCK, COLUMNS // BLOCK),
        weight_block_size=[BLOCK, BLOCK],
    ),
    "fp8, rows": fp8(_COMPRESSED, "_scale", (ROWS, 1), "BF16", format="float-quantized"),
    "fp8, one scale": fp8("fp8", "_scale", (1,)),
    "MXFP4, gpt_oss": Case(
        (
            ("_blocks", "U8", (1, COLUMNS, ROWS // GROUP, GROUP // 2)),
            ("_scales", "U8", (1, COLUMNS, ROWS // GROUP)),
        ),
        DEQUANTISE,
        {"quant_method": "mxfp4"},
        name="model.layers.{}.mlp.experts.gate_up_proj",
    ),
    "MXFP4, packed": fp4(
        _PACKED,
        ("_scale", "U8", (ROWS, COLUMNS // GROUP)),
        quant_method=_COMPRESSED,
        format="mxfp4-pack-quantized",
    ),
    "NVFP4, ModelOpt": fp4(
        "",
        ("_scale", "F8_E4M3", (ROWS, COLUMNS // NVFP4_GROUP)),
        ("_scale_2", "F32", ()),
        quant_method="modelopt",
        quant_algo="NVFP4",
    ),
    "NVFP4, compressed-tensors": fp4(
        _PACKED,
        ("_scale", "F8_E4M3", (ROWS, COLUMNS // NVFP4_GROUP)),
        ("_global_scale", "F32", (1,)),
        quant_method=_COMPRESSED,
        format="nvfp4-pack-quantized",
    ),
    "FP8 by example": plain("BF16", *CONSOLIDATE, "--quantize", "base", example="fp8, blocks"),
    "merge, rank 16": merge(16),
    "merge, rank 128": merge(128),
    "folded factors": fold(4096, 1228),
    "tp, cut along dim 1": plain("BF16", *PRESHARD, *BY_ROWS),
    "tp, gathered along dim 1": plain("BF16", *CONSOLIDATE, first=(*PRESHARD, *BY_ROWS)),
    "transposed experts": Case(
        (("gate_and_up_projs", "BF16", (3, COLUMNS, 1536)), ("down_projs", "BF16", (3, 768, COLUMNS))),
        ("consolidate", "SOURCE", "OUTPUT", "--keys", "nemo-automodel-moe"),
        name="model.layers.{}.mlp.experts.",
    ),
}
_ITEMSIZES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4}


def values(random: numpy.random.Generator, suffix: str, tag: str, number: int) -> numpy.ndarray:
    """Return numbers of a dtype: codes are those of finite numbers, scales are near 1."""
    if tag == "F32":
        return (
            random.random(number, "f4") + 0.5 if "scale" in suffix else random.standard_normal(number, "f4")
        )
    if tag == "BF16":
        return (random.standard_normal(number, dtype="f4").view("u4") >> 16).astype("u2")
    if "scale" not in suffix:
        codes = random.integers(0, 256, number, "u1")
        codes[codes & 0x7F == 0x7F] = 0  # in e4m3 it is no number
        return codes
    return random.integers(118, 128, number, "u1") if tag == "U8" else random.integers(48, 60, number, "u1")


def generate(source: Path, case: Case, gigabytes: float) -> None:
    """Write a Hub model, in a process of its own: its memory would count as that of the commands that this one starts."""
    process = Process(target=_generate, args=(source, case, gigabytes))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"making {source} failed")


def _generate(source: Path, case: Case, gigabytes: float) -> None:
    source.mkdir()
    number = case.number or max(round(gigabytes * 1e9 / (2 * ROWS * COLUMNS)), 1)
    random, weight_map = numpy.random.default_rng(0), dict[str, str]()
    block = [
        (suffix, tag, shape, values(random, suffix, tag, prod(shape))) for suffix, tag, shape in case.tensors
    ]
    outer = [(name, tag, shape, values(random, "", tag, prod(shape))) for name, tag, shape in case.outer]
    num_files = number + bool(outer)
    for at in range(num_files):
        before = case.name.format(at) if at < number else ""
        file_name = f"model-{at + 1:05d}-of-{num_files:05d}.safetensors"
        header, offset = dict[str, object](), 0
        for name, tag, shape, _ in block if at < number else outer:
            stop = offset + prod(shape) * _ITEMSIZES[tag]
            header[before + name] = {"dtype": tag, "shape": shape, "data_offsets": [offset, stop]}
            weight_map[before + name], offset = file_name, stop
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (source / file_name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for *_, data in block if at < number else outer:
                file.write(data.tobytes())
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    config = {"model_type": "benchmark", "quantization_config": case.quantised}
    (source / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value}))


def shardkit(command: tuple[str, ...], places: dict[str, Path], checkout: Path | None, output: Path) -> Found:
    """Run a command as a whole process, with another checkout if one is given."""
    words = {**{key: str(path) for key, path in places.items()}, "OUTPUT": str(output)}
    arguments = [words.get(word, word) for word in command]
    paths = [str(checkout)] if checkout else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    started = [sys.executable, "-c", START, *arguments, "--no-progress"]
    return process(started, PYTHONPATH=os.pathsep.join(paths))


def made(work: Path, case: Case, gigabytes: float) -> dict[str, Path]:
    """Make what a case needs, and return the directories that its command names."""
    generated = {"SOURCE": case} if case.example is None else {"SOURCE": case, "BASE": CASES[case.example]}
    places = {key: work / key.lower() for key in generated}
    for key, each in generated.items():
        generate(places[key], each, gigabytes)
    if case.first:
        generated_at, places["SOURCE"] = places["SOURCE"], work / "sharded"
        places.setdefault("BASE", generated_at)
        shardkit(case.first, {"SOURCE": generated_at}, None, places["SOURCE"])
        (places["SOURCE"] / "shardkit.json").unlink()  # as a trainer writes it
        if case.example:
            shutil.rmtree(generated_at)
    rank = next((shape[0] for suffix, _, shape in case.tensors if suffix.startswith("lora_A")), None)
    if rank is not None:
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["up_proj"]}
        places["ADAPTER"] = work / "adapter.json"
        places["ADAPTER"].write_text(json.dumps(settings))
    return places


def larger(source: Path, output: Path, variant: Variant) -> Path:
    """Return whatever of source and output has more bytes; an output is kept beside the source for that."""
    variant(output)
    if nbytes(output) <= nbytes(source):
        shutil.rmtree(output)
        return source
    return output.rename(output.with_name("made"))


def nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def compare(
    report: Report, name: str, source: Path, output: Path, variants: dict[str, Variant], runs: int
) -> None:
    """Report the variants of a case beside copies of the larger of source and output."""
    copied = larger(source, output, variants["shardkit"])
    rows = alternate(copied, output, variants, runs)
    report.add(name, "cp -r", **copies(rows))
    for what, row in rows.items():
        report.add(name, what, **figures(row))


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=7)
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        type=Path,
        metavar="CHECKOUT",
        help="another checkout of shardkit; may be given several times",
    )
    parser.add_argument("--only", action="append", choices=CASES, help="default: all")
    args = parser.parse_args()
    with Report(args) as report:
        for name in args.only or CASES:
            case, work = CASES[name], work_in(args.directory)
            places = made(work, case, args.gigabytes)
            variants: dict[str, Variant] = {"shardkit": partial(shardkit, case.command, places, None)}
            for checkout in args.beside:
                variant = partial(shardkit, case.command, places, checkout.resolve())
                try:
                    variant(work / "output")
                    variants[f"shardkit, {checkout.name}"] = variant
                except SystemExit as error:  # it has no such option
                    report.leave_out(f"{name}, {checkout.name}", str(error))
                shutil.rmtree(work / "output", ignore_errors=True)
            compare(report, name, places["SOURCE"], work / "output", variants, args.runs)
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
