"""DCP directories: `.metadata`, rank-local metadata, records, byte entries, manifests and chunk lists."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardkit.files import manifest
from tests.security.case import ACCEPTED, HARMLESS, REFUSED, Case
from tests.security.payloads import BOMBS, CALLS, PYTHON, bare, stealth

W, META = "model.w", ".metadata"
_RECORD = {"inspect": HARMLESS}
Change = Callable[[Path], None]


class Raw:
    """Pickles as any opcodes, so that a good metadata object can have anything inside."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        if self.name == "system":
            return os.system, ("touch $SHARDKIT_CANARY",)
        return eval, (PYTHON,)


def alter(change: Callable[[Metadata], object], protocol: int = 4) -> Change:
    """Change what `.metadata` says."""

    def apply(d: Path) -> None:
        metadata = pickle.loads((d / META).read_bytes())
        change(metadata)
        (d / META).write_bytes(pickle.dumps(metadata, protocol))

    return apply


def place(**fields: object) -> Change:
    """Change where the tensor lies."""

    def change(metadata: Metadata) -> None:
        (key,) = (key for key in metadata.storage_data if key.fqn == W)
        metadata.storage_data[key].__dict__.update(fields)

    return alter(change)


def described(*boxes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...] = (6, 4)) -> Change:
    """Describe the tensor by other chunks, all in its one record."""

    def change(metadata: Metadata) -> None:
        (key,) = (key for key in metadata.storage_data if key.fqn == W)
        info = metadata.storage_data.pop(key)
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
        properties = TensorProperties(torch.float32)
        metadata.state_dict_metadata[W] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        for chunk in chunks:
            metadata.storage_data[MetadataIndex(W, chunk.offsets)] = info

    return alter(change)


def metadata(data: bytes) -> Change:
    """Replace `.metadata`."""
    return lambda d: (d / META).write_bytes(data) and None


def both(*changes: Change) -> Change:
    """Several changes, in order."""

    def change(d: Path) -> None:
        for each in changes:
            each(d)

    return change


def record_of(d: Path, fqn: str) -> tuple[Path, int, int]:
    """The file, start and length of an entry's record."""
    found = pickle.loads((d / META).read_bytes()).storage_data
    (info,) = (info for key, info in found.items() if key.fqn == fqn)
    return d / info.relative_path, info.offset, info.length


def with_record(fqn: str, data: bytes, transforms: list[str] | None = None) -> Change:
    """Let an entry's record be other bytes, at the end of its file."""

    def apply(d: Path) -> None:
        path, _, _ = record_of(d, fqn)
        start = path.stat().st_size
        with open(path, "ab") as file:
            file.write(data)

        def move(content: Metadata) -> None:
            (key,) = (key for key in content.storage_data if key.fqn == fqn)
            content.storage_data[key] = _StorageInfo(path.name, start, len(data), transforms)

        alter(move)(d)

    return apply


def archive(content: dict[str, bytes], *, deflated: bool = False) -> bytes:
    """A zip as torch writes it, but for the alignment."""
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as file:
        for name, data in content.items():
            file.writestr(name, data)
    return out.getvalue()


def saved(value: object) -> bytes:
    """What torch.save writes."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def with_pickle(pickled: bytes, data: bytes = bytes(96)) -> bytes:
    """A record with any pickle in it."""
    return archive(
        {
            "archive/data.pkl": pickled,
            "archive/byteorder": b"little",
            "archive/data/0": data,
            "archive/version": b"3\n",
        }
    )


def good_pickle(value: object = None) -> bytes:
    """The pickle of a record of the tensor."""
    value = torch.zeros(6, 4) if value is None else value
    with zipfile.ZipFile(io.BytesIO(saved(value))) as file:
        (name,) = (name for name in file.namelist() if name.endswith("data.pkl"))
        return file.read(name)


def patched(fqn: str, old: bytes, new: bytes) -> Change:
    """Replace bytes inside a record."""

    def apply(d: Path) -> None:
        path, start, length = record_of(d, fqn)
        data = path.read_bytes()
        record = data[start : start + length]
        assert old in record
        path.write_bytes(data[:start] + record.replace(old, new) + data[start + length :])

    return apply


def truncated(d: Path) -> None:
    """Cut the tensor's file."""
    path, start, _ = record_of(d, W)
    os.truncate(path, start + 100)


def linked(d: Path) -> None:
    """Move the tensor's file out of the directory, and leave a link to it."""
    path, _, _ = record_of(d, W)
    outside = d.parent / "outside.distcp"
    path.rename(outside)
    path.symlink_to(outside)


def instead(make: Callable[[Path], object]) -> Change:
    """Put something in the place of the tensor's file."""

    def apply(d: Path) -> None:
        path, _, _ = record_of(d, W)
        path.unlink()
        make(path)

    return apply


def sparse(d: Path) -> None:
    """Claim 4 TiB, in a file that has them but no block of them."""
    path, start, _ = record_of(d, W)
    os.truncate(path, start + (1 << 42))
    both(place(length=1 << 42), described(((0, 0), (1 << 20, 1 << 20)), shape=(1 << 20, 1 << 20)))(d)


def many_chunks(d: Path) -> None:
    """A list of chunks that many tensors share: each would copy it."""

    def change(content: Metadata) -> None:
        chunks = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(4000)]
        shared = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4000]), chunks)
        content.state_dict_metadata.update({f"t{i}": shared for i in range(4000)})

    alter(change)(d)


def rank_local(content: bytes) -> Change:
    """Only rank-local metadata is there."""
    return both(lambda d: (d / META).unlink(), lambda d: (d / "__0.metadata").write_bytes(content) and None)


def _metadata_cases() -> Iterator[Case]:
    def refused(name: str, change: Change, *mention: str, **more: Any) -> Case:
        return Case(id=f"metadata-{name}", sample="dcp", change=change, mention=mention or (META,), **more)

    for name in CALLS:
        yield refused(f"code-{name}", metadata(bare(name)))
    for name in ("system", "eval", "inst", "dotted", "popen"):
        yield refused(
            f"stealth-{name}",
            lambda d, name=name: (d / META).write_bytes(stealth((d / META).read_bytes(), name)) and None,
        )
    for where in ("version", "planner_data", "storage_meta"):
        for name in ("system", "eval"):
            yield refused(f"{where}-{name}", alter(lambda m, w=where, n=name: setattr(m, w, Raw(n))))
    yield refused("key-runs", alter(lambda m: m.planner_data.update({"x": Raw("system")})))
    for name, data in BOMBS.items():
        yield refused(f"bomb-{name}", metadata(data))
    yield refused("empty", metadata(b""))
    yield refused("garbage", metadata(bytes(range(256)) * 4))
    yield refused("cut", lambda d: os.truncate(d / META, 200))
    yield refused("trailing", lambda d: (d / META).write_bytes((d / META).read_bytes() + b"N.") and None)
    yield refused("another-object", metadata(pickle.dumps({"a": 1})))
    yield refused("a-module", metadata(pickle.dumps(torch.nn.Linear(2, 2).state_dict()["bias"].dtype)))
    yield refused("missing", lambda d: (d / META).unlink())
    yield refused("unfinished", lambda d: (d / META).rename(d / ".metadata.tmp") and None)
    yield refused("a-directory", lambda d: ((d / META).unlink(), (d / META).mkdir()) and None)
    yield refused("a-fifo", lambda d: ((d / META).unlink(), os.mkfifo(d / META)) and None)
    yield refused(
        "a-link-outside",
        lambda d: (
            ((d / META).rename(d.parent / "elsewhere"), (d / META).symlink_to(d.parent / "elsewhere"))
            and None
        ),
    )
    yield refused("a-device", lambda d: ((d / META).unlink(), (d / META).symlink_to("/dev/zero")) and None)
    yield refused("version-unknown", alter(lambda m: setattr(m, "version", "9.9")))
    yield refused("field-unknown", alter(lambda m: m.__dict__.update({"on_load": "x"})))
    yield refused("keys-not-text", alter(lambda m: m.state_dict_metadata.update({7: BytesStorageMetadata()})))
    yield refused("keys-tuples", alter(lambda m: m.planner_data.update({("a",): ("a",)})))
    yield refused("many-chunks", many_chunks)
    yield refused("planner-index", alter(lambda m: m.planner_data.update({W: ("model", 10**9)})), W)
    yield refused("planner-negative", alter(lambda m: m.planner_data.update({W: ("model", -1)})), W)
    yield refused("planner-collision", alter(lambda m: m.planner_data.update({"step": (W,)})), W, "step")
    yield refused("planner-a-list", alter(lambda m: m.planner_data.update({W: ["model", "w"]})), W)
    yield refused("planner-long", alter(lambda m: m.planner_data.update({W: ("a",) * 1000})), W)
    for kind, data in {"code": bare("system"), "stealth": None, "bomb": BOMBS["memo"]}.items():
        yield Case(
            id=f"rank-local-{kind}",
            sample="dcp",
            change=rank_local(data)
            if data
            else both(
                lambda d: (d / "__0.metadata").write_bytes(stealth((d / META).read_bytes())) and None,
                lambda d: (d / META).unlink(),
            ),
            mention=("__0.metadata",),
        )
    yield Case(
        id="rank-local-beside-a-damaged-one",
        sample="dcp",
        change=both(
            lambda d: (d / "__0.metadata").write_bytes((d / META).read_bytes()) and None,
            metadata(bare("system")),
        ),
        mention=(META,),
    )
    yield Case(
        id="rank-local-evil-and-unused",
        sample="dcp",
        change=lambda d: (d / "__0.metadata").write_bytes(bare("system")) and None,
        mention=(),
        expect=ACCEPTED,
    )


def _place_cases() -> Iterator[Case]:
    def refused(name: str, change: Change, *mention: str, **more: Any) -> Case:
        return Case(id=f"place-{name}", sample="dcp", change=change, mention=mention or (W,), **more)

    for name, path in {
        "parent": "../outside.distcp",
        "absolute": "/etc/hostname",
        "self": META,
        "dot": ".",
        "empty": "",
        "deep": "a/../__0_0.distcp",
        "deep-absent": "data-abc/__0_0.distcp",
        "deep-doubled": "data-abc//__0_0.distcp",
        "deep-surrogate": "\udcff/__0_0.distcp",
        "nul": "__0_0.distcp\0",
        "escape": "\x1b[2J.distcp",
        "surrogate": "\udcff.distcp",
        "missing": "__9_0.distcp",
        "long": "x" * 5000 + ".distcp",
        "proc": "/proc/self/environ",
    }.items():
        yield refused(f"path-{name}", place(relative_path=path), W, META)
    for name, fields in {
        "offset-negative": {"offset": -1},
        "offset-beyond": {"offset": 1 << 40},
        "offset-bool": {"offset": True},
        "offset-float": {"offset": 0.5},
        "offset-bigint": {"offset": 1 << 70},
        "length-zero": {"length": 0},
        "length-negative": {"length": -5},
        "length-huge": {"length": (1 << 63) - 1},
        "length-beyond": {"length": 1 << 30},
        "path-not-text": {"relative_path": 3},
        "transform-unknown": {"transform_descriptors": ["evil/1"]},
        "transform-not-text": {"transform_descriptors": [[]]},
        "transforms-many": {"transform_descriptors": ["stream.zstd/1"] * 1000},
    }.items():
        inspects = {"inspect": HARMLESS, "verify": HARMLESS} if name == "transform-unknown" else {}
        yield refused(name, place(**fields), W, META, but=inspects)
    for name, boxes in {
        "gap": (((0, 0), (3, 4)),),
        "overlap": (((0, 0), (4, 4)), ((3, 0), (3, 4))),
        "twice": (((0, 0), (6, 4)), ((0, 0), (6, 4))),
        "out-of-bounds": (((0, 0), (7, 4)),),
        "of-other-dims": (((0,), (24,)),),
        "none": (),
    }.items():
        yield refused(f"chunks-{name}", described(*boxes))
    yield refused("shape-huge", described(((0, 0), (1 << 40, 1 << 30)), shape=(1 << 40, 1 << 30)))
    yield refused(
        "shape-4-tb",
        described(((0, 0), (1 << 20, 1 << 20)), shape=(1 << 20, 1 << 20)),
        but={"inspect": HARMLESS},
    )
    yield refused("shape-4-tb-sparse", sparse, but={"inspect": HARMLESS})
    yield refused(
        "overlapping-records",
        lambda d: place(offset=record_of(d, "model.b")[1] + 8)(d),
        W,
    )
    yield refused("file-truncated", truncated)
    yield refused("file-a-link-outside", linked)
    yield refused("file-a-fifo", instead(os.mkfifo))
    yield refused("file-a-directory", instead(Path.mkdir))
    yield refused("file-a-device", instead(lambda p: p.symlink_to("/dev/zero")))
    yield refused("file-missing", instead(lambda p: None))


def wide(rows: int) -> bytes:
    """The pickle of a tensor of so many rows; it is not made, for there may be gigabytes of it."""
    pickled, number = good_pickle(), struct.Struct("<cI").pack
    for old, new in (
        (b"K\x06K\x04\x86", number(b"J", rows) + b"K\x04\x86"),
        (b"K\x18", number(b"J", rows * 4)),
    ):
        assert pickled.count(old) == 1
        pickled = pickled.replace(old, new)
    return pickled


def _record_cases() -> Iterator[Case]:
    def refused(name: str, data: bytes, **more: Any) -> Case:
        return Case(
            id=f"record-{name}", sample="dcp", change=with_record(W, data), mention=(W,), but=_RECORD, **more
        )

    for name in ("system", "eval", "inst", "dotted", "newobj", "build", "popen", "torch-load"):
        yield refused(f"code-{name}", with_pickle(bare(name)))
    yield refused("stealth", with_pickle(stealth(good_pickle())))
    for name, data in BOMBS.items():
        yield refused(f"bomb-{name}", with_pickle(data))
    yield refused("of-another-shape", saved(torch.zeros(4, 6)))
    yield refused("of-another-dtype", saved(torch.zeros(6, 4, dtype=torch.int32)))
    yield refused("larger", saved(torch.zeros(60, 4)))
    yield refused("not-a-tensor", saved({"w": torch.zeros(6, 4)}))
    yield refused("of-two-tensors", saved([torch.zeros(6, 4), torch.ones(3)]))
    yield refused("quantized", with_pickle(good_pickle().replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor")))
    yield refused("without-bytes", with_pickle(wide(1 << 28), bytes(16)))
    yield refused(
        "of-negative-shape",
        with_pickle(good_pickle().replace(b"K\x06K\x04\x86", b"J\xff\xff\xff\xffK\x04\x86")),
    )
    yield refused("reaching-past-its-storage", with_pickle(good_pickle(), bytes(90)))
    yield refused("not-a-zip", b"hello" * 100)
    yield refused("too-short", b"PK")
    yield refused("legacy-pickle", pickle.dumps(torch.zeros(6, 4)))
    yield refused(
        "big-endian",
        archive(
            {"archive/data.pkl": good_pickle(), "archive/byteorder": b"big", "archive/data/0": bytes(96)}
        ),
    )
    yield refused(
        "deflated", archive({"archive/data.pkl": good_pickle(), "archive/data/0": bytes(96)}, deflated=True)
    )
    yield refused(
        "zip-bomb",
        archive({"archive/data.pkl": good_pickle(), "archive/data/0": bytes(1 << 24)}, deflated=True),
    )
    yield refused(
        "name-traversal",
        archive({"../../x": b"", "archive/data.pkl": good_pickle(), "archive/data/0": bytes(96)}),
    )
    yield refused(
        "name-absolute",
        archive({"/etc/x": b"", "archive/data.pkl": good_pickle(), "archive/data/0": bytes(96)}),
    )
    yield refused(
        "entry-added",
        archive(
            {
                "archive/data.pkl": good_pickle(),
                "archive/data/0": bytes(96),
                "archive/code/x.py": b"import os",
            }
        ),
    )
    yield refused(
        "constants",
        archive(
            {
                "archive/data.pkl": good_pickle(),
                "archive/data/0": bytes(96),
                "archive/constants.pkl": bare("system"),
            }
        ),
    )
    many = archive({f"archive/{i}": b"" for i in range(5000)})
    yield refused("many-entries", many)
    good = with_pickle(good_pickle())
    end = len(good) - 22
    yield refused("directory-outside", good[: end + 16] + struct.pack("<I", 1 << 30) + good[end + 20 :])
    yield refused("count-huge", good[: end + 8] + b"\xff\xff\xff\xff" + good[end + 12 :])
    yield refused("comment", good[:-2] + b"\x05\0hello")
    yield refused(
        "sizes-huge", good.replace(struct.pack("<II", 96, 96), struct.pack("<II", 0xFFFFFFFE, 0xFFFFFFFE))
    )
    for name, pair in {
        "bytes-of-another-crc": (b"little", b"lxttle"),
        "pickle-of-another-crc": (b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
    }.items():
        yield Case(id=f"record-{name}", sample="dcp", change=patched(W, *pair), mention=(W,), but=_RECORD)


def zstd(data: bytes) -> bytes:
    """What the ZStandard extension makes of it."""
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=1).compress(data))


def _zstd_cases() -> Iterator[Case]:
    def refused(name: str, data: bytes, **more: Any) -> Case:
        change = with_record(W, data, ["stream.zstd/1"])
        but = {**_RECORD, "verify": HARMLESS}
        return Case(id=f"zstd-{name}", sample="dcp", change=change, mention=(W,), **{"but": but, **more})

    bomb = zstd(bytes(1 << 24)) * 16  # frames one after the other
    yield refused("bomb", bomb)
    yield refused("not-zstd", b"hello" * 20)
    yield refused("cut", zstd(saved(torch.rand(6, 4)))[:-20])
    yield refused("code", zstd(with_pickle(bare("system"))))
    yield refused("another-shape", zstd(saved(torch.zeros(4, 6))))
    window = b"\x28\xb5\x2f\xfd\x00" + bytes([0xF8]) + b"\x01\0\0"  # a window of 2^41 bytes
    yield refused("window-huge", window)
    frame = b"\x28\xb5\x2f\xfd\xc4\x58" + struct.pack("<Q", 1 << 50) + b"\x01\0\0"
    yield refused("content-size-huge", frame)


def _object_cases() -> Iterator[Case]:
    """Byte entries: nothing here decodes them."""
    for name in ("system", "eval", "popen"):
        yield Case(
            id=f"object-code-{name}",
            sample="dcp",
            change=with_record("step", with_pickle(bare(name))),
            mention=(),
            expect=ACCEPTED,
        )
    for name, data in BOMBS.items():
        yield Case(
            id=f"object-bomb-{name}",
            sample="dcp",
            change=with_record("step", with_pickle(data)),
            mention=(),
            expect=ACCEPTED,
        )

    yield Case(
        id="object-compressed",
        sample="dcp",
        change=with_record("step", zstd(saved(7)), ["stream.zstd/1"]),
        mention=("step",),
        expect=ACCEPTED,
        but={"reshard": REFUSED},  # it would be copied without being told to be compressed
    )

    def becomes(content: Metadata) -> None:
        content.state_dict_metadata[W] = BytesStorageMetadata()

    yield Case(id="object-where-a-tensor-was", sample="dcp", change=alter(becomes), mention=(W,))
    for fqn in ("model.\x1b[2J", "model.a\nerror: fine", "model.../../x", "model." + "y" * 3000):

        def add(content: Metadata, fqn: str = fqn) -> None:
            for key in [key for key in content.storage_data if key.fqn == W]:
                content.storage_data[MetadataIndex(fqn, key.offset)] = content.storage_data.pop(key)
            content.state_dict_metadata[fqn] = content.state_dict_metadata.pop(W)
            content.planner_data[fqn] = ("model", fqn.removeprefix("model."))
            del content.planner_data[W]

        yield Case(
            id=f"name-of-{len(fqn)}-characters",
            sample="dcp",
            change=alter(add),
            mention=(),
            expect=HARMLESS,
        )


def _edit_json(name: str, edit: Callable[[dict[str, Any]], object], *, sign: bool = True) -> Change:
    def apply(d: Path) -> None:
        content = json.loads((d / name).read_text())
        edit(content)
        dumped = manifest.sign(content) if sign and name == manifest.NAME else json.dumps(content).encode()
        (d / name).write_bytes(dumped)

    return apply


def _presharded_cases() -> Iterator[Case]:
    """Manifest and chunk lists: what verify holds a directory against, and a rank reads."""
    name, chunks = manifest.NAME, "__0_0.chunks.json"
    only = {"inspect": HARMLESS, "diff": HARMLESS, "consolidate": HARMLESS, "reshard": HARMLESS}
    edits: dict[str, Change] = {
        "not-json": lambda d: (d / name).write_bytes(b"{") and None,
        "a-list": lambda d: (d / name).write_bytes(b"[]") and None,
        "deep": lambda d: (d / name).write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000) and None,
        "bigint": lambda d: (d / name).write_bytes(b'{"format": ' + b"9" * 100_000 + b"}") and None,
        "unsigned": _edit_json(name, lambda c: c["files"][0].update(size=7), sign=False),
        "size-wrong": _edit_json(name, lambda c: c["files"][0].update(size=7)),
        "size-huge": _edit_json(name, lambda c: c["files"][0].update(size=1 << 80)),
        "size-text": _edit_json(name, lambda c: c["files"][0].update(size="x")),
        "path-parent": _edit_json(name, lambda c: c["files"][0].update(name="../outside.distcp")),
        "path-absolute": _edit_json(name, lambda c: c["files"][0].update(name="/etc/hostname")),
        "path-nul": _edit_json(name, lambda c: c["files"][0].update(name="a\0b")),
        "path-a-list": _edit_json(name, lambda c: c["files"][0].update(name=[1])),
        "files-a-dict": _edit_json(name, lambda c: c.update(files={"a": 1})),
        "files-of-numbers": _edit_json(name, lambda c: c.update(files=[1, 2])),
        "tensors-a-list": _edit_json(name, lambda c: c.update(tensors=[1])),
        "tensors-wrong": _edit_json(name, lambda c: c["tensors"].update({"x\x1b[2J": {"dtype": 1}})),
        "mesh-wrong": _edit_json(name, lambda c: c.update(mesh={"dp_shard": -(1 << 70)})),
        "units-wrong": _edit_json(name, lambda c: c.update(units=7, ties=[1], source="x")),
        "a-fifo": lambda d: ((d / name).unlink(), os.mkfifo(d / name)) and None,
        "a-link-outside": lambda d: (
            (
                (d / name).rename(d.parent / "m.json"),
                (d / name).symlink_to(d.parent / "m.json"),
            )
            and None
        ),
    }
    for key, change in edits.items():
        yield Case(
            id=f"manifest-{key}",
            sample="presharded",
            change=change,
            mention=(name, "__0_0", "hostname", "outside"),
            but=only,
            expect=HARMLESS if key in ("mesh-wrong", "units-wrong", "a-link-outside") else REFUSED,
        )
    lists: dict[str, Change] = {
        "not-json": lambda d: (d / chunks).write_bytes(b"{") and None,
        "deep": lambda d: (d / chunks).write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000) and None,
        "missing": lambda d: (d / chunks).unlink(),
        "a-fifo": lambda d: ((d / chunks).unlink(), os.mkfifo(d / chunks)) and None,
        "offset-beyond": _edit_json(chunks, lambda c: c["chunks"][0].__setitem__(7, 1 << 50)),
        "offset-negative": _edit_json(chunks, lambda c: c["chunks"][0].__setitem__(5, -1)),
        "shape-bigint": _edit_json(chunks, lambda c: c["chunks"][0].__setitem__(2, [1 << 90])),
        "shape-text": _edit_json(chunks, lambda c: c["chunks"][0].__setitem__(2, "xx")),
        "dtype-unknown": _edit_json(chunks, lambda c: c["chunks"][0].__setitem__(1, "os.system")),
        "name-a-list": _edit_json(chunks, lambda c: c["chunks"][0].__setitem__(0, [1])),
        "rows-short": _edit_json(chunks, lambda c: c["chunks"].__setitem__(0, [1])),
        "other-file": _edit_json(chunks, lambda c: c.update(file="../x.distcp")),
        "size-wrong": _edit_json(chunks, lambda c: c.update(size=3)),
        "aliases-wrong": _edit_json(chunks, lambda c: c.update(aliases={"a": 7})),
    }
    for key, change in lists.items():
        yield Case(
            id=f"chunk-list-{key}", sample="presharded", change=change, mention=(chunks, "__0_0"), but=only
        )


def cases() -> Iterator[Case]:
    """Every case of this kind."""
    yield from _metadata_cases()
    yield from _place_cases()
    yield from _record_cases()
    yield from _zstd_cases()
    yield from _object_cases()
    yield from _presharded_cases()
