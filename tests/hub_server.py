"""A server on this machine in the place of huggingface.co; what it answers is each test's own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = 1 << 16
"""Files from so many bytes on lie outside of git."""


class Answers(BaseHTTPRequestHandler):
    """Answers with JSON, and says nothing about it."""

    def answer(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


class Repo(Answers):
    """One repo, `org/model`, whose large files lie elsewhere, under addresses that are signed and go out of date.

    State of the server: `files` (name -> bytes), `commits` (revision -> hash), `asked` (method, path, range, with a token),
    `faults` (what happens to the next ranges: a status, "reset", "short"), `signature` (what an address has to end with).
    """

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        state: Any = self.server
        path = unquote(urlsplit(self.path).path)
        token, span = "Authorization" in self.headers, self.headers.get("Range", "")
        state.asked.append((self.command, path, span, token))
        api, name = "/api/models/org/model", path.partition("/resolve/")[2].partition("/")[2]
        if path.startswith(api):
            self._api(path.removeprefix(api).strip("/"))
        elif path.startswith("/signed/"):
            self._signed(path.removeprefix("/signed/"))
        elif not path.startswith("/org/model/resolve/") or name not in state.files:
            self.answer({}, 404, {"X-Error-Code": "EntryNotFound" if name else "RepoNotFound"})
        elif len(state.files[name]) < _LARGE:
            self._send(state.files[name], {"ETag": f'"{git_id(state.files[name])}"'})
        else:
            data = state.files[name]
            place = f"http://localhost:{state.server_port}/signed/{name}?signature={state.signature}"
            linked = {
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            }
            self._head_alone(302, {"Location": place, **linked})

    def _api(self, rest: str) -> None:
        state: Any = self.server
        what, _, where = rest.partition("/")
        revision, _, folder = where.partition("/")
        if what == "tree":
            self._tree(folder)
        elif (commit := state.commits.get(revision or "main")) is not None:
            self.answer(
                {"_id": "1", "id": "org/model", "modelId": "org/model", "sha": commit, "siblings": []}
            )
        else:
            self.answer({}, 404, {"X-Error-Code": "RevisionNotFound"})

    def _tree(self, folder: str) -> None:
        state: Any = self.server
        rows, prefix = dict[str, dict[str, Any]](), f"{folder}/" if folder else ""
        for name, data in state.files.items():
            if not name.startswith(prefix):
                continue
            inside, _, below = name.removeprefix(prefix).partition("/")
            if below:
                rows[inside] = {"type": "directory", "path": prefix + inside, "oid": "0"}
                continue
            rows[inside] = {"type": "file", "path": name, "size": len(data), "oid": git_id(data)}
            if len(data) >= _LARGE:
                sha256 = hashlib.sha256(data).hexdigest()
                rows[inside]["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": 130}
        if rows:
            self.answer(list(rows.values()))
        else:
            self.answer({}, 404, {"X-Error-Code": "EntryNotFound"})

    def _signed(self, name: str) -> None:
        state: Any = self.server
        if urlsplit(self.path).query != f"signature={state.signature}":
            self.answer({}, 403)
            return
        self._send(state.files[name], {"ETag": '"elsewhere"'})

    def _send(self, data: bytes, headers: Mapping[str, str]) -> None:
        state: Any = self.server
        fault = state.faults.pop() if state.faults and "Range" in self.headers else ""
        if fault.isdigit():
            self.answer({}, int(fault))
            return
        if fault == "reset":
            self.close_connection = True
            self.connection.shutdown(2)
            return
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        status, length = 200, len(data)
        if last:
            data = data[int(first) : int(last) + 1]
            status, headers = (
                206,
                {**headers, "Content-Range": f"bytes {first}-{int(first) + len(data) - 1}/{length}"},
            )
        self._head_alone(status, {"X-Repo-Commit": state.commits["main"], **headers}, len(data))
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if fault == "short" else data)
            self.close_connection |= fault == "short"

    def _head_alone(self, status: int, headers: Mapping[str, str], length: int = 0) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def git_id(data: bytes) -> str:
    """Return what stands for a small file in a repo."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Of connections not yet accepted. Past five, the default, the kernel drops them, and the client waits in vain."""


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **state: Any) -> Iterator[Any]:
    """Give a server that runs; `state` are attributes of it for the handler, besides `url`."""
    server: Any = _Server(("127.0.0.1", 0), handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    vars(server).update(state)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
