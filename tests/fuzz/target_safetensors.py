"""Headers of safetensors files, held against the safetensors library; and torch's DCP_SHARDING_INFO."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from shardkit.core.dtypes import BY_NAME
from shardkit.formats.dcp.hugging_face import saved_offsets
from shardkit.formats.hub.safetensors import SafetensorsHeader, check_header, read_header
from tests.fuzz.mutate import change_bytes, change_json, pick
from tests.fuzz.target import MemoryFile, Refusals, Target, attempt, load_json

_file = MemoryFile()

# What is refused on purpose although the library takes it; see formats/hub/safetensors.py and files/strict_json.py.
_STRICTER = (
    "JSON with the same key given twice",
    "the header does not begin with '{'",
    "__metadata__: expected an object of strings, found NoneType",
)
_STRICTER_PROBLEMS = (
    "expected the fields",
    "63 bits can count",
    "expected integers from 0 to 2^63 - 1",
    "is six bits wide",
    "torch needs an even last dim",
    "a lone surrogate",
)


def check_file(data: bytes) -> bool:
    """A file is accepted only where the library accepts it, with the same tensors."""
    header = attempt(lambda: read_header(_file.put(data), "f.safetensors"))
    try:
        stored = deserialize(data)
    except SafetensorError:
        stored = None
    if header is None:
        if stored is not None:
            assert _is_stricter(Refusals.latest, Refusals.problems), f"refused: {Refusals.latest}"
        return False
    assert stored is not None, "the library refuses it"
    _compare(data, header, dict(stored))
    return True


def _is_stricter(message: str, problems: Sequence[str]) -> bool:
    if any(reason in message for reason in _STRICTER):
        return True
    return any(reason in problem for problem in problems for reason in _STRICTER_PROBLEMS)


def _compare(data: bytes, header: SafetensorsHeader, stored: dict[str, dict[str, object]]) -> None:
    text = load_json(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    assert {tensor.fqn for tensor in header.tensors} == set(stored) == text.keys() - {"__metadata__"}
    for tensor in header.tensors:
        held = stored[tensor.fqn]
        shape = list(tensor.shape)
        if tensor.dtype.safetensors == "F4":
            shape[-1] *= 2
        # `deserialize` gives some dtypes by a name of its own that the file's tag begins.
        assert held["dtype"] == tensor.dtype.safetensors, (held["dtype"], tensor.dtype.safetensors)
        assert held["shape"] == shape
        assert bytes(held["data"]) == data[tensor.start : tensor.start + tensor.nbytes]  # type: ignore[arg-type]


def file_seeds() -> list[bytes]:
    """Files that the library wrote."""
    generator = torch.Generator().manual_seed(0)
    seeds = [save({}), save({"a": torch.zeros(0, 3), "b": torch.tensor(1.5)}, metadata={"format": "pt"})]
    for name, dtype in BY_NAME.items():
        if dtype.safetensors and name != "float4_e2m1fn_x2":
            raw = torch.randint(0, 255, (6 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
            tensor = raw.view(getattr(torch, name)).reshape(2, 3)
            seeds.append(save({"w": tensor, "layers.0.weight": tensor.clone()}, metadata={"k": "v"}))
    many = {f"model.layers.{i}.w": torch.zeros(i, dtype=torch.int8) for i in range(6)}
    return [*seeds, save(many)]


_NAMES = (b'"a"', b'"w"', b'"layers.0.weight"', b'"__metadata__"', b'"dtype"', b'"shape"', b'"data_offsets"')
_TAGS = (*(b'"%s"' % d.safetensors.encode() for d in BY_NAME.values() if d.safetensors), b'"F6_E2M3"', b'"X"')


def mutate_file(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit the JSON of a file and fix its length; or make a good one of random tensors."""
    kind = rng.random()
    if kind < 0.1:
        return change_bytes(rng, pick(rng, seeds))
    if kind < 0.65:
        text, num_bytes = _random_header(rng)
        if kind < 0.4:
            text = change_json(rng, text, _TAGS if rng.random() < 0.5 else _NAMES)
    else:
        seed = pick(rng, seeds)
        stop = 8 + struct.unpack_from("<Q", seed)[0]
        text, num_bytes = change_json(rng, seed[8:stop].rstrip(), _TAGS + _NAMES), len(seed) - stop
    text += b" " * (-len(text) % 8 if rng.random() < 0.9 else int(rng.random() * 9))
    num_bytes += pick(rng, (0, 0, 0, 0, 0, 0, 0, 0, -1, 1))
    return struct.pack("<Q", len(text)) + text + b"\x07" * num_bytes


_SIZES = {d.safetensors: d.itemsize for d in BY_NAME.values() if d.safetensors}


def _random_header(rng: Random) -> tuple[bytes, int]:
    """Return the JSON of some tensors that tile the data, and the bytes of the data."""
    entries, at = [], 0
    for i in range(int(rng.random() * 5)):
        tag = pick(rng, tuple(_SIZES))
        shape = [int(rng.random() * 4) for _ in range(int(rng.random() * 4))]
        nbytes = _SIZES[tag]
        for size in shape:
            nbytes *= size
        if tag == "F4" and shape:
            shape[-1] *= 2
        fields = f'{{"dtype":"{tag}","shape":{shape},"data_offsets":[{at},{at + nbytes}]}}'
        entries.append(f'"{pick(rng, ("t", "model.w", "é"))}{i}":{fields}')
        at += nbytes
    if rng.random() < 0.4:
        entries.insert(int(rng.random() * (len(entries) + 1)), '"__metadata__":{"format":"pt","x":"1"}')
    return f"{{{','.join(entries)}}}".encode(), at


_TEXT = b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"F32","shape":[],"data_offsets":[24,28]}}'
_HEADER = check_header(_TEXT, 8 + len(_TEXT) + 28, "f")


def check_sharding(data: bytes) -> bool:
    """Offsets are taken as torch takes them."""
    # What is not UTF-8 cannot stand in a header; lone surrogates can, and are refused there.
    text = data.decode("utf-8", "replace")
    header = SafetensorsHeader(
        tensors=_HEADER.tensors, metadata={"DCP_SHARDING_INFO": text}, size=0, crc32=0, stamp=None
    )
    offsets = attempt(lambda: saved_offsets(header, "f"))
    if offsets is None:
        return False
    info = load_json(text)
    assert {name: list(corner) for name, corner in offsets.items()} == {
        name: info[name]["saved_offsets"] for name in ("a", "b")
    }
    return True


def sharding_seeds() -> list[bytes]:
    """As torch writes it."""
    return [
        b'{"a": {"saved_offsets": [4, 0]}, "b": {"saved_offsets": []}}',
        b'{"b":{"saved_offsets":[]},"a":{"saved_offsets":[0,9]},"c":{"saved_offsets":[1,2,3]}}',
    ]


_FIELDS = (b'"a"', b'"b"', b'"saved_offsets"')


def mutate_sharding(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Edit tokens."""
    return change_json(rng, pick(rng, seeds), _FIELDS)


TARGETS = {
    "safetensors": Target(check_file, file_seeds, mutate_file),
    "sharding_info": Target(check_sharding, sharding_seeds, mutate_sharding),
}
