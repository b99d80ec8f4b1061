"""Only `files.storage` calls what asks or changes files; and its own helpers leave files whole."""

from __future__ import annotations

import ast
import errno
import gc
import os
from pathlib import Path

import pytest

import shardkit
from shardkit.files import storage

PACKAGE = Path(shardkit.__file__).parent
CALLS = {
    *("open", "write", "pwrite", "writev", "pwritev", "ftruncate", "truncate", "posix_fallocate", "fsync"),
    *("fdatasync", "rename", "renames", "replace", "mkdir", "makedirs", "rmdir", "removedirs", "unlink"),
    *("remove", "link", "symlink", "chmod", "fchmod", "copy_file_range", "sendfile", "pread", "preadv"),
    *("read", "readv", "access", "fstat", "fwalk", "listdir", "lstat", "readlink", "scandir", "stat"),
    *("statvfs", "walk", "exists", "getmtime", "getsize", "isdir", "isfile", "islink", "ismount"),
    *("lexists", "realpath", "samefile"),
}
"""Names in `os` and `os.path` of what asks or changes a file system."""
# What is not about checkpoints: the traced layout's scratch files, /proc, pipes, shared memory, standard output.
ELSEWHERE = {
    "keys/rule_sets.py": {"open", "os.listdir"},  # the sets that lie in the package
    "pictures/page.py": {"open"},  # style and script, which lie in the package
    "cli/output.py": {"os.open", "shutil.get_terminal_size"},
    "layout/trace_child.py": {"open", "os.write"},  # its answer, and a byte to the process that waits
    "layout/traced.py": {"open"},
    "cli/errors.py": {"os.path.realpath", "shutil.which"},
    "cli/__init__.py": {"open"},
    "formats/torchsave/bin.py": {"open"},
    "operations/environment.py": {"open"},
    "training/extras/memory.py": {"open"},
    # memory without a name, which is behind the calls of storage
}


def calls_of_the_system(path: Path) -> set[str]:
    """Return what a module uses of the system's calls on files, called or handed on."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            module, _, call = name.rpartition(".")
            if (module in ("os", "os.path") and call in CALLS) or module == "shutil" or name == "fcntl.ioctl":
                found.add(name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.add("open")
        elif isinstance(node, ast.ImportFrom) and node.module in ("shutil", "pathlib", "os", "os.path"):
            found.add(f"from {node.module}")
    return found


def test_files_are_found_read_and_changed_in_one_place() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        calls = calls_of_the_system(path) - ELSEWHERE.get(name, set())
        if calls and name != "files/storage.py":
            found[name] = calls
    assert not found


def test_a_file_is_written_however_short_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(100_000)
    write = os.write
    monkeypatch.setattr(storage, "write", lambda fd, piece: write(fd, bytes(piece[:999])))
    storage.write_file(str(tmp_path / "a"), data)
    assert (tmp_path / "a").read_bytes() == data


def test_nothing_is_written_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stream still holds must not go to another file that got the descriptor's number."""
    write, failed = os.write, list[int]()

    def failing(fd: int, piece: memoryview) -> int:
        if not failed:
            failed.append(fd)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, piece)

    monkeypatch.setattr(storage, "write", failing)
    with pytest.raises(OSError, match="No space"):
        storage.write_file(str(tmp_path / "a"), b"lost")
    other = os.open(tmp_path / "b", os.O_RDWR | os.O_CREAT)
    assert other == failed[0]
    gc.collect()
    os.close(other)
    assert (tmp_path / "b").read_bytes() == b""


def test_a_tree_is_removed_and_what_its_links_lead_to_stays(tmp_path: Path) -> None:
    kept, tree = tmp_path / "kept", tmp_path / "tree"
    (kept / "deep").mkdir(parents=True)
    (kept / "deep" / "file").write_text("x")
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").write_text("y")
    (tree / "a" / "to_directory").symlink_to(kept)
    (tree / "a" / "b" / "to_file").symlink_to(kept / "deep" / "file")
    storage.remove_tree(str(tree))
    assert not tree.exists()
    assert (kept / "deep" / "file").read_text() == "x"
    storage.remove_tree(str(tree))  # a second time: nothing to do


def test_scratch_of_killed_processes_is_removed(tmp_path: Path) -> None:
    above = tmp_path / "cache/scratch"
    with storage.scratch_directory(str(above)) as path:
        (Path(path) / "folder").mkdir()
        dead = above / f"{os.path.basename(path)}-dead"
        dead.mkdir()
        (dead / "file").write_bytes(b"half")
        (above / "other").mkdir()
        with storage.scratch_directory(str(above)) as another:
            assert {each.name for each in above.iterdir()} == {
                *map(os.path.basename, (path, another)),
                "other",
            }
        assert os.listdir(path) == ["folder"]
    assert os.listdir(above) == ["other"]


def test_file_systems_in_memory() -> None:
    kinds = [
        line.split(" - ")[1].split()[0]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split()[4] == "/dev/shm"
    ]
    if kinds == ["tmpfs"]:
        assert storage.is_in_memory("/dev/shm")
    assert not storage.is_in_memory("/proc")


def test_directories_are_made_where_they_are_missing(tmp_path: Path) -> None:
    storage.make_directories(str(tmp_path / "a" / "b"))
    storage.make_directories(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        storage.make_directories(str(tmp_path / "file"))


def test_folders_are_made_in_a_directory_that_is_there(tmp_path: Path) -> None:
    for folder in ("a/b", "a/b", "a", ""):
        storage.make_folders(str(tmp_path), folder)
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        storage.make_folders(str(tmp_path / "gone"), "a/b")
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/a"):
        with pytest.raises(NotADirectoryError):
            storage.make_folders(str(tmp_path), folder)
    with pytest.raises(OSError, match="gone"):
        storage.make_folders(str(tmp_path / "gone"), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]


def test_what_a_listing_has_or_lacks_is_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").touch()
    looked, lists = list[str](), list[str]()
    look, listing = os.path.lexists, os.listdir
    monkeypatch.setattr(os.path, "lexists", lambda path: looked.append(str(path)) or look(path))
    monkeypatch.setattr(os, "listdir", lambda path: lists.append(str(path)) or listing(path))
    monkeypatch.chdir(tmp_path.parent)
    with storage.listed_once():
        assert storage.lexists(tmp_path / "there")
        assert storage.listdir(tmp_path) == ["there"]
        with storage.listed_once():
            assert storage.listdir(f"{tmp_path.name}/") == ["there"]
            assert storage.lexists(f"{tmp_path}/there")
            assert not storage.lexists(f"{tmp_path.name}/new")
        assert (len(looked), len(lists)) == (1, 1)
        assert storage.lexists(f"{tmp_path}/.")  # in no listing
        (tmp_path / "new").touch()
        storage.list_again()
        assert storage.lexists(tmp_path / "new")
    assert storage.lexists(tmp_path / "there")
    assert len(looked) == 4
