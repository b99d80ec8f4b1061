"""Write a Qwen3-like Hub model of random bf16 weights, with nothing but numpy.

python benchmarks/model.py OUTPUT --gigabytes 3 [--hidden 8192] [--experts 64] [--sparse] [--file-megabytes 500]

With --experts it is like Qwen3-MoE: every layer has so many experts, each stored by itself, of 768 rows. With
--sparse files have no data, only their sizes: a terabyte takes no room, and serves what reads headers alone.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy

VOCAB, HEAD, EXPERT = 32000, 128, 768
FILE_BYTES, SPARSE_BYTES = 500_000_000, 5_000_000_000


def layer(index: int, hidden: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, kv, inner = hidden // HEAD, hidden // HEAD // 2, hidden * 3
    for name, shape in {
        "self_attn.q_proj": (heads * HEAD, hidden),
        "self_attn.k_proj": (kv * HEAD, hidden),
        "self_attn.v_proj": (kv * HEAD, hidden),
        "self_attn.o_proj": (hidden, heads * HEAD),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        **(_experts(experts, hidden) if experts else _dense(inner, hidden)),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }.items():
        yield f"model.layers.{index}.{name}.weight", shape


def _dense(inner: int, hidden: int, before: str = "mlp") -> dict[str, tuple[int, ...]]:
    return {
        f"{before}.gate_proj": (inner, hidden),
        f"{before}.up_proj": (inner, hidden),
        f"{before}.down_proj": (hidden, inner),
    }


def _experts(number: int, hidden: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"mlp.gate": (number, hidden)}
    for expert in range(number):
        found |= _dense(EXPERT, hidden, f"mlp.experts.{expert}")
    return found


def tensors(num_layers: int, hidden: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, hidden)
    for index in range(num_layers):
        yield from layer(index, hidden, experts)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCAB, hidden)


def write_file(
    path: Path, shapes: list[tuple[str, tuple[int, ...]]], dtype: str, itemsize: int, *, sparse: bool
) -> None:
    header, offset = {}, 0
    for name, shape in shapes:
        stop = offset + prod(shape) * itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    random = numpy.random.default_rng([*path.name.encode()])  # no two files begin with the same values
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if sparse:
            file.truncate(file.tell() + offset)
            return
        for _, shape in shapes:
            values = random.standard_normal(prod(shape), dtype=numpy.float32)
            # The upper half of a float32 is a bfloat16: real exponents, so conversions do real work.
            (values.view(numpy.uint32) >> 16).astype(numpy.uint16).tofile(
                file
            ) if itemsize == 2 else values.tofile(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--sparse", action="store_true")
    parser.add_argument("--file-megabytes", type=float, help="of each file; 500, or 5000 with --sparse")
    args = parser.parse_args()
    hidden: int = args.hidden
    experts: int = args.experts
    dtype, itemsize = ("F32", 4) if args.fp32 else ("BF16", 2)
    per_layer = sum(prod(shape) for _, shape in layer(0, hidden, experts)) * itemsize
    num_layers = max(1, round((args.gigabytes * 1e9 - 2 * VOCAB * hidden * itemsize) / per_layer))
    args.output.mkdir(parents=True)
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    held = 0
    most = args.file_megabytes * 1e6 if args.file_megabytes else SPARSE_BYTES if args.sparse else FILE_BYTES
    for name, shape in tensors(num_layers, hidden, experts):
        nbytes = prod(shape) * itemsize
        if files[-1] and held + nbytes > most:
            files.append([])
            held = 0
        files[-1].append((name, shape))
        held += nbytes
    weight_map = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(args.output / name, shapes, dtype, itemsize, sparse=args.sparse)
        weight_map |= {tensor: name for tensor, _ in shapes}
    total = sum(prod(shape) for _, shape in tensors(num_layers, hidden, experts)) * itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (args.output / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD // 2,
        "head_dim": HEAD,
        "intermediate_size": hidden * 3,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "float32" if args.fp32 else "bfloat16",
    }
    if experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": experts,
        }
        config |= {
            "num_experts_per_tok": min(8, experts),
            "moe_intermediate_size": EXPERT,
            "mlp_only_layers": [],
        }
    (args.output / "config.json").write_text(json.dumps(config))
    for path in args.output.iterdir():
        os.utime(
            path, (0, 0)
        )  # what transformers answers is not kept while files are new: they may change unseen
    print(f"{total / 1e9:.2f} GB, {len(weight_map)} tensors, {len(files)} files")


if __name__ == "__main__":
    main()
