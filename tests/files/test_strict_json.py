"""Opening files that somebody else put there."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from shardkit.errors import SourceError
from shardkit.files.strict_json import read_small, uncollected


def test_links_are_followed_only_where_they_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12")
    (tmp_path / "link").symlink_to("file")
    assert read_small(str(tmp_path / "link"), "link", 2) == b"12"
    assert read_small(str(tmp_path / "file"), "file", 2, follow=False) == b"12"
    with pytest.raises(SourceError, match="link is a symbolic link"):
        read_small(str(tmp_path / "link"), "link", 2, follow=False)


@pytest.mark.parametrize("follow", [True, False])
def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path, follow: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (
        ("pipe", "a pipe"),
        ("", "a directory"),
        ("absent", "no such file"),
        ("loop", "link"),
    ):
        with pytest.raises(SourceError, match=reason):
            read_small(str(tmp_path / name), name, 2, follow=follow)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_afterwards_as_before(was_enabled: bool) -> None:
    @uncollected()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("as asked")

    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ValueError, match="as asked"):
            fail()
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()
