"""The wheel, in an environment of its own: what it declares is what the commands need, and torch is not among it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.dist import export, extension, with_whole_links
from tests.operations.verify.test_gaps import CONFIG, hub, model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/install.md"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, as a clone has them."""
    return export(tmp_path_factory.mktemp("source") / "tree")


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip makes of the line in the docs, in a clone."""
    place = tmp_path_factory.mktemp("wheel")
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith("pip install '.[trace]'"))
    *_, wanted = shlex.split(line, comments=True)
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(place)]
    subprocess.run([*PIP, "wheel", *options, wanted], cwd=tree, check=True)
    return next(place.glob("*.whl"))


def needs(wanted: Iterable[str], extras: Iterable[str] = ("",)) -> Iterator[Requirement]:
    """Yield the requirements that hold in this Python."""
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": each}) for each in extras):
            yield requirement


def closure(wanted: Iterable[Requirement]) -> dict[str, Distribution]:
    """Return what an installer brings for requirements: the packages of this environment, by name."""
    found: dict[str, Distribution] = {}
    left = list(wanted)
    while left:
        requirement = left.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found:
            continue
        found[name] = distribution(name)
        assert requirement.specifier.contains(found[name].version), requirement
        left += needs(found[name].requires or (), ("", *requirement.extras))
    return found


def link(packages: Iterable[Distribution], site: Path) -> None:
    """Put packages into a directory of packages, as links."""
    for each in packages:
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(each.locate_file(top))))


def described(wheel: Path, place: Path) -> Distribution:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place, [name for name in archive.namelist() if ".dist-info/" in name])
    return PathDistribution(next(place.glob("*.dist-info")))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel, and of this one's packages those that the wheel declares; its bin/."""
    place = tmp_path_factory.mktemp("installed")
    venv.create(place / "venv", symlinks=True)
    python = place / "venv/bin/python"
    options = ["--python", str(python), "install", "--no-deps", "--no-index"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*PIP, *options, str(wheel)], env=environment, check=True)
    site = next((place / "venv/lib").glob("python*/site-packages"))
    link(closure(needs(described(wheel, place).requires or ())).values(), site)
    return python.parent


def test_the_wheel_has_all_files_of_the_package(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "shardkit"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {name for name in tracked.stdout.split() if (ROOT / name).is_file()}


def test_its_metadata_is_what_an_index_shows(wheel: Path, tmp_path: Path) -> None:
    metadata = described(wheel, tmp_path).metadata
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert not re.search(r"\]\((?!https?:|#)", text)  # nothing lies beside it there


def test_links_of_readme_become_whole() -> None:
    source = "https://example.org/shardkit"
    text = "![A](docs/a.svg) [b](docs/b.md#c) [d](#e) [f](https://g.h)"
    wanted = (
        f"![A]({source}/raw/main/docs/a.svg) [b]({source}/blob/main/docs/b.md#c) [d](#e) [f](https://g.h)"
    )
    assert with_whole_links(text, source) == wanted
    assert with_whole_links(text, "") == "A b [d](#e) [f](https://g.h)"


def test_torch_comes_with_its_extra(wheel: Path, tmp_path: Path) -> None:
    requires = described(wheel, tmp_path).requires or ()
    heavy = {"torch", "safetensors", "transformers"}
    assert heavy.isdisjoint(closure(needs(requires)))
    own = {"shardkit"}  # `shardkit[torch]` in an extra is of the wheel itself
    for extra, wanted in {"torch": {"torch", "safetensors"}, "trace": heavy}.items():
        brought = {each.name for each in needs(requires, [extra]) if each.name not in own}
        if extra != "torch":
            assert any("torch" in each.extras for each in needs(requires, [extra]) if each.name in own)
            brought |= {each.name for each in needs(requires, ["torch"])}
        assert wanted <= brought


def test_it_runs_without_torch(installed: Path, tmp_path: Path) -> None:
    hub(tmp_path / "model", model(), CONFIG)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*args: str) -> str:
        command = [str(installed / "shardkit"), *args]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (args, done.stdout, done.stderr)
        return done.stdout

    run("preshard", "model", "two", "--world-size", "2", "--layout", "declared")  # a MoE
    run("reshard", "two", "three", "--world-size", "3")
    run("consolidate", "three", "back", "--dtype", "fp16")
    run("verify", "back", "--full")
    assert "39 tensors" in run("diff", "model", "back", "--as", "fp16")
    assert json.loads(run("inspect", "back", "--json"))["format"]
    assert re.search(r"torch +not installed", run("env"))


def test_extras_are_for_users_and_pin_nothing(wheel: Path, tmp_path: Path) -> None:
    extras = described(wheel, tmp_path).metadata.get_all("Provides-Extra")
    assert set(extras) == {"torch", "trace", "stores", "ray", "zstd"}
    assert [
        each for each in described(wheel, tmp_path).requires or () if "==" in each.partition(";")[0]
    ] == []


def pack(package: Distribution, place: Path) -> None:
    """Write an installed package as a wheel again: an installer finds it without an index."""
    described = next(file.parent for file in package.files or () if file.name == "WHEEL")
    tag = re.findall(r"^Tag: (.*)$", package.read_text("WHEEL") or "", re.M)[-1]
    name = re.sub(r"[-_.]+", "_", package.metadata["Name"]).lower()
    with zipfile.ZipFile(place / f"{name}-{package.version}-{tag}.whl", "w") as archive:
        for file in package.files or ():
            if (
                ".." not in file.parts
                and file.suffix != ".pyc"
                and file.name not in ("RECORD", "direct_url.json")
            ):
                archive.write(package.locate_file(file), str(file))
        archive.writestr(f"{described}/RECORD", "".join(f"{each},,\n" for each in archive.namelist()))


@pytest.fixture(scope="module")
def offline(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which uv and pipx find what shardkit needs, in a directory, and keep all that they make."""
    place = tmp_path_factory.mktemp("packages")
    metadata = described(wheel, place)
    wanted = closure(needs(metadata.requires or (), ("", "stores")))
    for name in ("pip", "setuptools"):
        wanted[name] = distribution(name)
    for package in wanted.values():
        pack(package, place)
    home = tmp_path_factory.mktemp("home")
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(place),
        "UV_OFFLINE": "1",
        "UV_FIND_LINKS": str(place),
        "UV_CACHE_DIR": str(home / "uv"),
        "UV_PYTHON": sys.executable,
        "PIPX_HOME": str(home / "pipx"),
        "PIPX_BIN_DIR": str(home / "bin"),
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
    }


def typed(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of install.md's code that begins so."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    yield from (shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith(text))


@pytest.mark.prove
@pytest.mark.parametrize("tool", ["uvx", "pipx", "uv run"])
def test_tools_run_it_from_a_clone(tool: str, tree: Path, offline: dict[str, str], tmp_path: Path) -> None:
    if not (Path(sys.executable).parent / tool.split()[0]).exists():
        pytest.skip(f"{tool} is not installed: pip install uv pipx")
    hub(tree / "step-500", model(), CONFIG)
    lines = list(typed(tool))
    assert len(lines) == {"uvx": 2, "pipx": 2, "uv run": 1}[tool]
    for words in lines:
        words = ["step-500" if word.startswith("s3:") else word for word in words]
        if tool == "uv run":
            words = [*words[:3], "step-500", str(tmp_path / "trained"), "--dtype", "fp32"]
        done = subprocess.run(words, cwd=tree, env=offline, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        assert "install" in words or "39" in done.stdout or (tmp_path / "trained/model.safetensors").exists()
    shutil.rmtree(tree / "step-500")


HF = """
import shutil, subprocess, sys
import httpx2
from huggingface_hub.cli import extensions, hf

repository, archive, *sys.argv = sys.argv[1:]
run = subprocess.run

def request(method, url, **options):
    path = url.removeprefix("https://raw.githubusercontent.com/me/hf-shardkit/HEAD/")
    asked = httpx2.Request(method, url)
    if url.startswith("https://github.com/me/hf-shardkit"):
        return httpx2.Response(200, request=asked, text=40 * "0" + " HEAD" + chr(0))
    try:
        return httpx2.Response(200, request=asked, content=open(f"{repository}/{path}", "rb").read())
    except FileNotFoundError:
        httpx2.Response(404, request=asked).raise_for_status()

extensions._github_request = request
subprocess.run = lambda command, **options: run(
    [archive if each == "https://github.com/me/hf-shardkit/archive/HEAD.zip" else each for each in command], **options
)
hf.main()
"""


@pytest.mark.prove
def test_hf_installs_the_extension_and_runs_it(installed: Path, tmp_path: Path) -> None:
    """By `hf` itself; only what the network would answer is put in its place."""
    repository, tools = tmp_path / "hf-shardkit", tmp_path / "tools"
    extension(repository, "https://example.org/shardkit")
    archive = shutil.make_archive(str(tmp_path / "HEAD"), "zip", tmp_path, "hf-shardkit")
    site = next(installed.parent.glob("lib/python*/site-packages"))
    tools.mkdir()
    link([distribution("setuptools")], tools)
    environment = {
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",  # without uv
        "PYTHONPATH": f"{tools}:{site}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }

    def hf(*args: str) -> str:
        command = [sys.executable, "-c", HF, str(repository), archive, "hf", *args]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    hf("extensions", "install", "me/hf-shardkit")
    hub(tmp_path / "model", model(), CONFIG)
    assert "wrote" in hf("shardkit", "preshard", "model", "two", "--world-size", "2", "--layout", "declared")
    installed_at = tmp_path / ".local/share/hf/extensions/hf-shardkit"
    assert json.loads((installed_at / "manifest.json").read_text())["description"].startswith("Consolidate, ")
    metadata = PathDistribution(
        next(installed_at.glob("venv/lib/python*/site-packages/hf_shardkit-*.dist-info"))
    )
    assert metadata.requires == ["shardkit[stores] @ git+https://example.org/shardkit"]
