"""What every reader does, whatever it reads: the right bytes, an error for each damaged file, the source left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit import formats
from shardkit.errors import SourceError
from shardkit.formats import registry
from shardkit.formats.registry import format_of
from shardkit.operations.verify import verify
from tests.formats.conformance import SAMPLES, Sample
from tests.formats.reading import Contents, contents

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory, rank_files: Path) -> dict[str, Sample]:
    """Return all samples. Tests copy what they change."""
    return {kind: make(tmp_path_factory.mktemp("sample"), rank_files) for kind, make in SAMPLES.items()}


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest, samples: dict[str, Sample]) -> Sample:
    return samples[request.param]


def read(path: Path | str) -> Contents:
    return contents(formats.open(str(path)))


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Return the time of everything in a directory, and the content of each file."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in (directory, *directory.rglob("*"))
    }


def copied(sample: Sample, directory: Path) -> Path:
    """Copy a sample below a directory."""
    directory.mkdir(exist_ok=True)
    target = directory / sample.path.name
    if sample.path.is_dir():
        shutil.copytree(sample.path, target)
    else:
        shutil.copy2(sample.path, target)
    return target


def data_files(path: Path) -> list[Path]:
    """Return the files with bytes of tensors, or with copies of them."""
    opened = formats.open(str(path))
    copies = [file for file, _ in opened.dcp.copy_ends] if opened.dcp is not None else []
    used = {opened.catalog.files[number].path for number in (*opened.catalog.chunks.file, *copies)}
    return sorted(Path(file) for file in used)


def test_every_reader_has_a_sample(samples: dict[str, Sample]) -> None:
    assert {sample.format for sample in samples.values()} == set(registry._FORMATS)


def test_every_bit_is_read(sample: Sample) -> None:
    assert format_of(str(sample.path)) == sample.format
    assert read(sample.path) == sample.truth


def test_the_source_is_left_alone(sample: Sample, tmp_path: Path) -> None:
    path = copied(sample, tmp_path)
    before = snapshot(tmp_path)
    read(path)
    assert verify(path, full=True).problems == ()
    assert snapshot(tmp_path) == before


def test_any_path_to_it(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = copied(sample, tmp_path / "a copy")
    link = tmp_path / f"link{moved.suffix}"
    link.symlink_to(moved)
    monkeypatch.chdir(moved.parent)
    for path in (str(moved), str(link), moved.name, f"./{moved.name}"):
        assert read(path) == sample.truth, path
    if moved.is_dir():
        assert read(f"{moved}/") == sample.truth
        monkeypatch.chdir(moved)
        assert read(".") == sample.truth


def test_a_selection(sample: Sample) -> None:
    checkpoint = formats.open(str(sample.path))
    names = sorted(sample.truth, reverse=True)[::2]
    assert list(checkpoint.select(names).tensors) == names
    assert checkpoint.select([]).tensors == {}
    # One selection leaves another as it was.
    assert contents(checkpoint) == sample.truth


def test_files_of_a_person_do_not_matter(sample: Sample, tmp_path: Path) -> None:
    path = copied(sample, tmp_path)
    home = path if path.is_dir() else path.parent
    (home / "README.md").write_text("# My run\n")
    (home / "notes.txt").write_text("lr 3e-4")
    (home / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    (home / "wandb").mkdir()
    (home / "wandb" / "run.json").write_text("{}")
    (home / "events.out.tfevents.1").write_bytes(bytes(40))
    assert format_of(str(path)) == sample.format
    assert read(path) == sample.truth
    assert verify(path, full=True).problems == ()


def damage(sample: Sample, tmp_path: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield (checkpoint, damaged file, what was done), with one file at a time missing, empty, or cut."""
    for number, file in enumerate(data_files(sample.path)):
        size = file.stat().st_size
        for what, left in {"missing": None, "empty": 0, "half": size // 2, "one byte less": size - 1}.items():
            path = copied(sample, tmp_path / f"{number}-{what}")
            target = path / os.path.relpath(file, sample.path) if path.is_dir() else path
            if left is None:
                target.unlink()
            else:
                os.truncate(target, left)
            yield path, target, what


def test_a_damaged_file_is_named(sample: Sample, tmp_path: Path) -> None:
    """By whoever needs its bytes, and by verify."""
    files = data_files(sample.path)
    for path, file, what in damage(sample, tmp_path):
        is_gone = what == "missing"
        if is_gone and file.name == files[-1].name and sample.format in ("accelerate-bin", "dcp-hf"):
            continue  # nothing else shows how many ranks there were: the tests of these formats say what is seen
        # Nothing shows in how many files each rank wrote. Without its only file, a directory is no checkpoint.
        names = [file.name, file.name.replace("model-00001-of", "model-*-of")]
        names += ["is not a checkpoint"] if is_gone else []
        try:
            found, message = read(path), ""
        except SourceError as error:
            found, message = {}, str(error)
        # All bytes are there if the file was cut within copies of what other ranks have.
        assert found == sample.truth or any(name in message for name in names), (what, message)
        try:
            problems = verify(path, full=True).problems
        except SourceError:  # nothing can be opened
            assert is_gone or path.is_file(), (what, file)
        else:
            assert problems, (what, file)


def test_torch_is_not_imported(samples: dict[str, Sample]) -> None:
    """Nor what is as slow to import, or belongs to another format."""
    code = (
        "import sys; from shardkit import formats\n"
        "for path in sys.argv[1:]:\n"
        "    opened = formats.open(path); opened.select(list(opened.catalog.tensors))\n"
        "    assert not {'torch', 'numpy', 'safetensors', 'huggingface_hub'} & set(sys.modules), path"
    )
    paths = [str(sample.path) for sample in samples.values()]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)
