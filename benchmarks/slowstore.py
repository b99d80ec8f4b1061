"""A store that only reads: a directory behind the requests of S3, each answered late; it writes down all of them.

    python benchmarks/slowstore.py SOURCE LOG ADDRESS PORT [--delay-ms 20]

The bucket's name does not matter. Whoever asks is told apart by its access key, `rank3`; nothing is signed for. When standard
input ends, LOG gets one JSON list for each request, as that of benchmarks/slowfs.py: rank, what ("read", "head", "list"), file,
first byte, bytes, seconds from the start to the request, and to its answer.

Source: Amazon S3 API, GetObject, HeadObject, ListObjectsV2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE = 1 << 20


class Store(ThreadingHTTPServer):
    """Answers requests, each in a thread of its connection."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], source: Path, delay_s: float) -> None:
        super().__init__(address, Answer)
        self.source, self.delay_s, self.begun = source, delay_s, time.monotonic()
        self.log: list[tuple[int, str, str, int, int, float, float]] = []


class Answer(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Store

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Describe an object."""
        self._object(with_body=False)

    def do_GET(self) -> None:
        """Send an object, a range of one, or a list."""
        asked = urlsplit(self.path)
        query = parse_qs(asked.query, keep_blank_values=True)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        else:
            self._object(with_body=True)

    def _object(self, *, with_body: bool) -> None:
        begun, key = time.monotonic(), unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
        path = self.server.source / key
        if not path.is_file():
            self._send(
                404,
                {"Content-Type": "application/xml"},
                b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"",
            )
            return self._note("head", key, 0, 0, begun)
        status = path.stat()
        first, stop, code = 0, status.st_size, 200
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        about = {
            "ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}"',
            "Last-Modified": formatdate(status.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if found is not None:
            code = 206
            first = int(found[1]) if found[1] else max(status.st_size - int(found[2]), 0)
            stop = min(int(found[2]) + 1, stop) if found[1] and found[2] else stop
            about["Content-Range"] = f"bytes {first}-{stop - 1}/{status.st_size}"
        with path.open("rb", buffering=0) as file:
            body = os.pread(file.fileno(), stop - first, first) if with_body else b""
        self._send(code, about, body, stop - first)
        self._note("read" if with_body else "head", key, first, len(body), begun)

    def _list(self, prefix: str, delimiter: str) -> None:
        begun, contents, folders = time.monotonic(), list[str](), set[str]()
        source = self.server.source
        for path in sorted(source.rglob("*")):
            key = str(path.relative_to(source))
            if not path.is_file() or not key.startswith(prefix):
                continue
            inner, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                folders.add(prefix + inner + delimiter)
                continue
            status = path.stat()
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified>"
                f"<ETag>&quot;{status.st_mtime_ns:x}-{status.st_size:x}&quot;</ETag><Size>{status.st_size}</Size></Contents>"
            )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)
        )
        body = (
            f'<?xml version="1.0"?><ListBucketResult><Name>bucket</Name><Prefix>{escape(prefix)}</Prefix>'
            f"<KeyCount>{len(contents)}</KeyCount><MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>"
            f"{''.join(contents)}{common}</ListBucketResult>"
        ).encode()
        self._send(200, {"Content-Type": "application/xml"}, body)
        self._note("list", prefix, 0, 0, begun)

    def _send(self, code: int, about: dict[str, str], body: bytes, nbytes: int | None = None) -> None:
        time.sleep(self.server.delay_s)
        self.send_response(code)
        for name, value in {**about, "Content-Length": str(len(body) if nbytes is None else nbytes)}.items():
            self.send_header(name, value)
        self.end_headers()
        view = memoryview(body)
        for at in range(0, len(view), _PIECE):
            self.wfile.write(view[at : at + _PIECE])

    def _note(self, what: str, key: str, start: int, nbytes: int, begun: float) -> None:
        asker = re.search(r"Credential=rank(\d+)/", self.headers.get("Authorization", ""))
        rank = int(asker[1]) if asker else -1
        times = (round(each - self.server.begun, 6) for each in (begun, time.monotonic()))
        self.server.log.append((rank, what, key, start, nbytes, *times))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("address")
    parser.add_argument("port", type=int)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    args = parser.parse_args()
    with Store((args.address, args.port), args.source.resolve(), args.delay_ms / 1000) as store:
        threading.Thread(target=store.serve_forever, daemon=True).start()
        print(store.server_address[1], flush=True)
        sys.stdin.read()
        store.shutdown()
        args.log.write_text("".join(f"{json.dumps(row)}\n" for row in store.log))


if __name__ == "__main__":
    main()
