"""Conversions and dequantising beside `cp`, as whole processes: what a computed value costs.

    python benchmarks/computed.py DIRECTORY [--gigabytes 3] [--runs 7] [--beside CHECKOUT] [--only CASE ...]

DIRECTORY gets a generated source (`--gigabytes` of bf16 values: half of that in fp8, twice in fp32) and one output at a
time. Each case is one command; `--beside` runs it also with another checkout of shardkit, in turn with this one. The `cp`
copies the larger of source and output. "a plain move" is the same command over plain bf16 weights: the rest is what
computing costs. `cpu` is user and system time of the whole process.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from functools import partial
from math import prod
from multiprocessing import Process
from pathlib import Path
from typing import NamedTuple

import numpy
from common import Found, Report, Variant, alternate, common_options, copies, figures, process, work_in

ROWS, COLUMNS = 7168, 2048
BLOCK, GROUP, NVFP4_GROUP = 128, 32, 16
RANKS = 4
Tensor = tuple[str, str, tuple[int, ...]]
"""(what follows the weight's name, tag of safetensors, shape)."""


class Case(NamedTuple):
    """A source, and what is done with it."""

    tensors: tuple[Tensor, ...]
    """Of each weight."""
    quantised: dict[str, object] | None
    """Of the config."""
    options: tuple[str, ...]
    wide: int
    """Bytes of a value, in the source or the output, wherever it is more."""


def fp8(method: str, suffix: str, grid: tuple[int, ...], tag: str = "F32", **described: object) -> Case:
    """Return a model in e4m3 with a grid of scales."""
    tensors = (("", "F8_E4M3", (ROWS, COLUMNS)), (suffix, tag, grid))
    return Case(tensors, {"quant_method": method, **described}, ("--dequantize",), 2)


def fp4(suffix: str, scales: Tensor, *others: Tensor, **described: object) -> Case:
    """Return a model with two numbers in a byte."""
    return Case(((suffix, "U8", (ROWS, COLUMNS // 2)), scales, *others), {**described}, ("--dequantize",), 2)


_PACKED, _COMPRESSED = "_packed", "compressed-tensors"
CASES = {
    "a plain move": Case((("", "BF16", (ROWS, COLUMNS)),), None, (), 2),
    "fp32 -> bf16": Case((("", "F32", (ROWS, COLUMNS)),), None, ("--dtype", "bf16"), 4),
    "bf16 -> fp32": Case((("", "BF16", (ROWS, COLUMNS)),), None, ("--dtype", "fp32"), 4),
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
        {"quant_method": "mxfp4"},
        ("--dequantize",),
        2,
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
}
_ITEMSIZES = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4}


def values(random: numpy.random.Generator, suffix: str, tag: str, number: int) -> numpy.ndarray:
    """Return numbers of a dtype: codes are those of finite numbers, scales are near 1."""
    if tag == "F32":
        return random.standard_normal(number, dtype="f4") if not suffix else random.random(number, "f4") + 0.5
    if tag == "BF16":
        return (random.standard_normal(number, dtype="f4").view("u4") >> 16).astype("u2")
    if suffix in ("", _PACKED, "_blocks"):
        codes = random.integers(0, 256, number, "u1")
        codes[codes & 0x7F == 0x7F] = 0  # in e4m3 it is no number
        return codes
    return random.integers(118, 128, number, "u1") if tag == "U8" else random.integers(48, 60, number, "u1")


def make(source: Path, case: Case, gigabytes: float) -> None:
    """Write a Hub model."""
    source.mkdir()
    number = max(round(gigabytes * 1e9 / (2 * ROWS * COLUMNS)), 1)
    random, weight_map = numpy.random.default_rng(0), dict[str, str]()
    block = [
        (suffix, tag, shape, values(random, suffix, tag, prod(shape))) for suffix, tag, shape in case.tensors
    ]
    for at in range(number):
        name, header, offset = f"model-{at + 1:05d}-of-{number:05d}.safetensors", dict[str, object](), 0
        for suffix, tag, shape, _ in block:
            stop = offset + prod(shape) * _ITEMSIZES[tag]
            full = f"model.layers.{at}.mlp.up_proj.weight{suffix}"
            if suffix in ("_blocks", "_scales"):
                full = f"model.layers.{at}.mlp.experts.gate_up_proj{suffix}"
            header[full] = {"dtype": tag, "shape": shape, "data_offsets": [offset, stop]}
            weight_map[full], offset = name, stop
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (source / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for *_, data in block:
                file.write(data.tobytes())
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "benchmark", "quantization_config": case.quantised}
    (source / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value}))


def preshard(source: Path, options: tuple[str, ...], checkout: Path | None, output: Path) -> Found:
    """Run the command as a whole process, with another checkout if one is given."""
    command = [sys.executable, "-m", "shardkit", "preshard", str(source), str(output), "--no-progress"]
    command += ["--world-size", str(RANKS), "--layout", "declared", "--wrap", "none", *options]
    paths = [str(checkout)] if checkout else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return process(command, PYTHONPATH=os.pathsep.join(paths))


def larger(source: Path, output: Path, variant: Variant) -> Path:
    """Return whatever of source and output has more bytes; an output is kept beside the source for that."""
    variant(output)
    if nbytes(output) <= nbytes(source):
        shutil.rmtree(output)
        return source
    return output.rename(output.with_name("made"))


def nbytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def checkouts(beside: Path | None) -> Iterator[tuple[str, Path | None]]:
    yield "", None
    if beside is not None:
        yield ", before", beside.resolve()


def main() -> None:
    parser = common_options(__doc__, gigabytes=3.0, runs=7)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout of shardkit")
    parser.add_argument("--only", action="append", choices=CASES, help="default: all")
    args = parser.parse_args()
    work = work_in(args.directory)
    with Report(args) as report:
        for name in args.only or CASES:
            case, source = CASES[name], work / "source"
            making = Process(target=make, args=(source, case, args.gigabytes))
            making.start()  # its memory would count as that of the commands, which are started from here
            making.join()
            variants: dict[str, Variant] = {
                f"shardkit{which}": partial(preshard, source, case.options, checkout)
                for which, checkout in checkouts(args.beside)
            }
            copied = larger(source, work / "output", variants["shardkit"])
            rows = alternate(copied, work / "output", variants, args.runs)
            report.add(name, "cp -r", **copies(rows))
            for what, row in rows.items():
                report.add(name, what, **figures(row))
            for each in {source, copied}:
                shutil.rmtree(each)
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
