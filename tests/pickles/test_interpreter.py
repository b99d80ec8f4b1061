"""The interpreter runs nothing, keeps little, and says no to everything that is not on its lists."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shardkit.errors import SourceError
from shardkit.formats.dcp.metadata import parse_metadata
from shardkit.pickles.policies import Global, Record, Strict, Vocabulary

METADATA = b"torch.distributed.checkpoint.metadata"


class Point(Record):
    __slots__ = ("x",)

    def build(self, state: object) -> None:
        self.x = state


def make_pair(args: tuple[object, ...]) -> object:
    return ("made", len(args))


WORDS = Vocabulary(
    names={
        ("geometry", "Point"): Global("Point", new=Point),
        ("geometry", "pair"): Global("pair", call=make_pair),
        ("geometry", "origin"): "origin",
    },
    max_bytes=1 << 20,
    persistent=lambda value: ("persistent", value),
)


def run(data: bytes) -> object:
    return Strict(data, WORDS, in_columns=False).run("file.pkl")


PLAIN: list[object] = [
    None,
    True,
    [False, 0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**62, -1, -(2**40)],
    {"a": {"b": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]}, "long" * 100: "\u00e9\u4e2d"},
    ["shared"] * 3,
    [[i] for i in range(3000)],
    {str(i): i for i in range(3000)},
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", PLAIN)
def test_reads_plain_data_as_pickle_does(value: object, protocol: int) -> None:
    assert run(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_fetched_late_are_kept(protocol: int) -> None:
    first = (2**40, "x")
    value = [first, *range(5000), [str(i) for i in range(2000)], first]
    result = run(pickle.dumps(value, protocol))
    assert result == value


def test_records_makers_and_persistent_ids() -> None:
    record = run(b"\x80\x02cgeometry\nPoint\n)\x81}X\x01\x00\x00\x00aK\x01sb.")
    assert isinstance(record, Point)
    assert record.x == {"a": 1}
    assert run(b"\x80\x02cgeometry\npair\nK\x01K\x02\x86R.") == ("made", 2)
    assert run(b"\x80\x02cgeometry\norigin\n.") == "origin"
    assert run(b"\x80\x02K\x07Q.") == ("persistent", 7)


REFUSED = {
    "empty": b"",
    "no stop": b"\x80\x02N",
    "protocol 0": b"(lp0\n.",
    "protocol 6": b"\x80\x06N.",
    "protocol again": b"\x80\x02\x80\x02N.",
    "trailing bytes": b"\x80\x02N.N.",
    "two objects": b"\x80\x02NN.",
    "open mark": b"\x80\x02(N.",
    "stack underflow": b"\x80\x02\x86.",
    "tuple through a mark": b"\x80\x02K\x01(\x85t.",
    "mark without": b"\x80\x02t.",
    "memo never set": b"\x80\x02h\x00.",
    "memo far": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo mixed": b"\x80\x04Nq\x00\x94.",
    "unknown global": b"\x80\x02cos\nsystem\n.",
    "unknown name": b"\x80\x02cgeometry\nsystem\n.",
    "dotted name": b"\x80\x04\x8c\x08geometry\x8c\x0cPoint.system\x93.",
    "global not text": b"\x80\x04K\x01K\x02\x93.",
    "global unfinished": b"\x80\x02cgeometry",
    "inst": b"\x80\x02(iposix\nsystem\n.",
    "obj": b"\x80\x02(cgeometry\nPoint\no.",
    "ext": b"\x80\x02\x82\x01.",
    "pop": b"\x80\x02NN0.",
    "dup": b"\x80\x02N2.",
    "float": b"\x80\x02G?\xf0\x00\x00\x00\x00\x00\x00.",
    "bytes": b"\x80\x03C\x01a.",
    "set": b"\x80\x04\x8f.",
    "text persistent id": b"\x80\x02P1\n.",
    "reduce a record": b"\x80\x02cgeometry\nPoint\n)R.",
    "reduce a value": b"\x80\x02K\x01)R.",
    "reduce without a tuple": b"\x80\x02cgeometry\npair\nNR.",
    "new of a maker": b"\x80\x02cgeometry\npair\n)\x81.",
    "new of a value": b"\x80\x02K\x01)\x81.",
    "new with arguments": b"\x80\x02cgeometry\nPoint\nK\x01\x85\x81.",
    "new with keywords": b"\x80\x04cgeometry\nPoint\n)}\x92.",
    "build a value": b"\x80\x02K\x01Nb.",
    "build a class": b"\x80\x02cgeometry\nPoint\nNb.",
    "build twice": b"\x80\x02cgeometry\nPoint\n)\x81}b}b.",
    "key not text": b"\x80\x02}K\x01Ns.",
    "key a tuple": b"\x80\x02})Ns.",
    "key a record": b"\x80\x02}cgeometry\nPoint\n)\x81Ns.",
    "key twice": b"\x80\x02}(X\x01\x00\x00\x00aNX\x01\x00\x00\x00aNu.",
    "key without a value": b"\x80\x02}(X\x01\x00\x00\x00au.",
    "items of a list": b"\x80\x02]X\x01\x00\x00\x00aNs.",
    "append to a dict": b"\x80\x02}Na.",
    "appends to a dict": b"\x80\x02}(Ne.",
    "long integer": b"\x80\x02\x8a\x0a" + bytes(10) + b".",
    "longer integer": b"\x80\x02\x8b\x04\x00\x00\x00" + bytes(4) + b".",
    "not utf-8": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "text past the end": b"\x80\x02X\xff\xff\xff\x7fa.",
    "text far past the end": b"\x80\x04\x8d" + b"\xff" * 8 + b"a.",
    "frame past the end": b"\x80\x04\x95\xff\xff\x00\x00\x00\x00\x00\x00N.",
    "too large": b"\x80\x02X" + bytes(1 << 20),
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_refuses(data: bytes) -> None:
    with pytest.raises(SourceError, match=r"^file\.pkl"):
        run(data)


def test_messages_name_the_place_and_escape_the_file() -> None:
    with pytest.raises(SourceError, match=r"it names os\.\\x1bsystem \(near byte \d+\)"):
        run(b"\x80\x02cos\n\x1bsystem\n.")


def test_hash_bomb_and_deep_nesting_end_at_once() -> None:
    doubled = b"\x80\x04)" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(64))
    started = time.process_time()
    with pytest.raises(SourceError, match="dict key"):
        run(b"\x80\x04}" + doubled[2:] + b"Ns.")
    assert run(b"\x80\x02" + b")" + b"\x85" * 100_000 + b".") is not None
    assert time.process_time() - started < 5


def test_runs_nothing_and_imports_nothing(tmp_path: Path) -> None:
    """In a process whose audit hook ends it when something is called or imported."""
    canary = tmp_path / "canary"
    command = f"touch {canary}".encode()
    text = b"X" + len(command).to_bytes(4, "little") + command
    hostile = [
        b"\x80\x02cposix\nsystem\n" + text + b"\x85R.",
        b"\x80\x02cos\nsystem\n" + text + b"\x85R0" + b"N.",
        b"\x80\x04\x8c\x13torch.serialization\x8c\x09os.system\x93" + text + b"\x85R.",
        b"\x80\x02(" + text + b"iposix\nsystem\n.",
        b"\x80\x02(cposix\nsystem\n" + text + b"o.",
        b"\x80\x02cbuiltins\neval\n" + text + b"\x85R.",
        b"\x80\x02c" + METADATA + b"\nMetadata\n)\x81}X\x09\x00\x00\x00__class__Nsb.",
        b"\x80\x02c" + METADATA + b"\nMetadata\n)\x81N}X\x0a\x00\x00\x00__reduce__Ns\x86b.",
    ]
    program = f"""
        import os, sys
        from shardkit.errors import SourceError
        from shardkit.formats.dcp.metadata import parse_metadata
        from shardkit.formats.torchsave.record import parse_tensor
        def hook(event, args):
            if event.split(".")[0] in ("os", "subprocess", "import", "exec", "compile", "open", "pickle"):
                os.write(2, event.encode()); os._exit(3)
        hostile = {hostile!r}
        sys.addaudithook(hook)
        for data in hostile:
            for reader in (parse_metadata, lambda data: parse_tensor(data, "data.pkl")):
                try:
                    reader(data)
                except SourceError:
                    continue
                os._exit(4)
        assert "pickle" not in sys.modules and "torch" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not canary.exists()


def test_metadata_refusals_name_the_file() -> None:
    for data in (b"", b"\x80\x02cos\nsystem\n.", b"\x80\x02N."):
        with pytest.raises(SourceError, match=r"^\.metadata"):
            parse_metadata(data)
