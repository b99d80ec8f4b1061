"""Runs the commands of a guide as a reader types them, and holds what they print against the page.

    python -m tests.guides.console       puts what they print today into all pages

A block of the language `console` has lines that begin with `$ `, each followed by what it prints. `shardkit` and `python`
run in this process, `torchrun` on ranks that are forked, and anything else in a shell.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
from click.testing import CliRunner

from shardkit.cli import main
from shardkit.files import storage
from shardkit.layout import traced
from tests.guides import moe
from tests.test_examples import make_model
from tests.worlds import stores
from tests.worlds.processes import fork_server, run_script

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "guides"
SCRIPTS = ROOT / "examples" / "guides"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
# What depends on the machine, and not on what is done.
_VARYING = (
    (re.compile(r"\b\d+\.\d\d s(; bytes moved in \d+\.\d\d s: [\d.]+ [KMG]iB/s)?"), "0.00 s"),
    (re.compile(r"converted in \d+\.\d s"), "converted in 0.0 s"),
    (re.compile(r"free disk(\s+).*"), r"free disk\1..."),
    (re.compile(r"loss \d+\.\d+"), "loss ..."),
    (re.compile(r"leak \d\.\de-(0[7-9]|[1-9]\d)"), "leak below 1e-6"),
    (re.compile(r"'(train_\w+)': '[\d.]+'"), r"'\1': ..."),
    (re.compile(r"error at most \S+, orthogonal to \S+"), "error at most ..."),
    (re.compile(r"\bdata-[0-9a-f]{16}"), "data-..."),
)


class Written(NamedTuple):
    """A checkpoint that a trainer wrote, which is not at hand here."""

    fixture: str
    """Below `FIXTURES`."""
    place: str
    """Where the page has it."""


FIXTURES = Path(os.environ.get("SHARDKIT_FIXTURES", "nowhere")).absolute() / "sharded"
WRITTEN = {
    "torchtitan-to-hub": Written("torchtitan_llama3_w2", "outputs"),
    "verl-to-hub": Written("verl_fsdp2_w2", "checkpoints"),
    "deepspeed-to-hub": Written("deepspeed_zero3_bf16_w2", "output_dir"),
}
"""Page -> what it begins with. The trainers need GPUs or are a stack of their own; their checkpoints do not."""


IN_BF16 = {"fsdp2-to-hub", "lightning-to-hub", "trainer-to-hub"}
"""Pages whose model is in bf16, as most are on the Hub; the others show that no bit changes."""


class Typed(NamedTuple):
    """A command of a page."""

    command: str
    printed: str


def commands(block: str) -> Iterator[Typed]:
    """Yield the commands of a block."""
    for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
        command, _, printed = part.partition("\n")
        while command.endswith("\\"):
            more, _, printed = printed.partition("\n")
            command += "\n" + more
        yield Typed(command, printed)


def run(command: str, home: Path) -> str:
    """Run a command in a directory, and return all that it prints; the directory itself is shown as `/data`."""
    words = shlex.split(command.partition("  # ")[0])
    if words[0] == "shardkit":
        with mock.patch.object(sys, "argv", words):  # hints repeat what was typed
            quiet = {"SHARDKIT_NO_PROGRESS": "1"}  # how long it takes depends on the machine
            result = CliRunner().invoke(main, words[1:], prog_name="shardkit", env=quiet)
        assert result.exit_code in (0, 1), result.output
        said = result.output
    elif words[0] == "python":
        with mock.patch.object(sys, "argv", words[1:]), contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(SCRIPTS / words[1]), run_name="__main__")
        said = printed.getvalue()
    elif words[0] == "torchrun":
        said = _launch(words, home)
    else:
        done = subprocess.run(command, shell=True, cwd=home, capture_output=True, text=True, check=True)
        said = done.stdout
    return said.replace(f"{home}/", "/data/").replace(str(home), "/data")


def steady(text: str) -> str:
    """Return text without what differs from machine to machine."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return "\n".join(line.rstrip() for line in text.strip("\n").split("\n"))


def _launch(words: list[str], home: Path) -> str:
    _, option, size, script, *arguments = words
    assert option == "--nproc-per-node"
    printed = home / ".printed"
    printed.unlink(missing_ok=True)
    request = {
        "script": str(SCRIPTS / script),
        "arguments": arguments,
        "num_processes": int(size),
        "printed": str(printed),
    }
    run_script(
        "distributed/launch_world.py", json.dumps(request), env={"CUDA_VISIBLE_DEVICES": "", "PWD": str(home)}
    )
    said = printed.read_text()
    printed.unlink()
    return said


def differences(page: Path, home: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (command, what the page says, what it prints) of each command of a page, run in order."""
    for block in BLOCK.findall(page.read_text()):
        for command, printed in commands(block):
            yield command, steady(printed), steady(run(command, home))


def _fresh(typed: Typed, printed: str) -> Iterator[str]:
    """Yield a command and what it prints now, or what the page says already where only the machine differs."""
    yield f"$ {typed.command}"
    text = typed.printed if steady(typed.printed) == steady(printed) else printed
    yield from (line.rstrip() for line in text.rstrip("\n").split("\n") if text.strip())


def rewrite(page: Path, home: Path) -> None:
    """Put what the commands print into a page."""

    def fresh(match: re.Match[str]) -> str:
        lines = [line for typed in commands(match[1]) for line in _fresh(typed, run(typed.command, home))]
        return "\n".join(["```console", *lines, "```"])

    page.write_text(BLOCK.sub(fresh, page.read_text()))


def _roomy(path: str) -> SimpleNamespace:
    """A disk with room for any model."""
    return SimpleNamespace(free=1 << 40)


@contextlib.contextmanager
def prepared(page: Path, home: Path) -> Iterator[None]:
    """Put what a page begins with into a directory: a model, what a trainer wrote, a server of a store."""
    with contextlib.ExitStack() as stack:
        if page.stem in WRITTEN:
            written = WRITTEN[page.stem]
            if not (FIXTURES / written.fixture).is_dir():
                pytest.skip(
                    f"SHARDKIT_FIXTURES names no directory with {written.fixture}, which the trainer wrote"
                )
            shutil.copytree(FIXTURES / written.fixture / "ckpt", home / written.place)
            shutil.copytree(FIXTURES / written.fixture / "truth" / "hf", home / "my-model")
        elif page.stem == "moe":
            moe.make_large(home / "Qwen3-30B-A3B")
            stack.enter_context(mock.patch.object(storage, "disk_usage", _roomy))
        else:
            make_model(home / "my-model", dtype="bfloat16" if page.stem in IN_BF16 else "float32")
        if page.stem == "object-stores":
            stack.enter_context(stores.reached("moto", home / ".server"))
        yield


if __name__ == "__main__":
    traced._serve_request = fork_server().trace  # not once more in a process of its own
    for each in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(PAGES.glob("*.md")):
        with tempfile.TemporaryDirectory() as place, contextlib.suppress(pytest.skip.Exception):
            os.chdir(place)
            with prepared(each, Path(place)):
                rewrite(each if each.is_absolute() else ROOT / each, Path(place))
