"""A server on this machine in the place of huggingface.co; what it answers is each test's own."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answers(BaseHTTPRequestHandler):
    """Answers with JSON, and says nothing about it."""

    def answer(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


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
