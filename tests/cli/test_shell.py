"""The scripts that complete what is typed, run by the shells that are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import shardkit

ROOT = os.path.dirname(os.path.dirname(shardkit.__file__))
PROGRAM = (
    f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {ROOT!r})\nfrom shardkit.cli import main\nmain()\n"
)


@pytest.fixture
def shell(tmp_path, run):
    """Run a line in a shell that has `shardkit` and its script, and return the words that it prints."""
    program = tmp_path / "bin" / "shardkit"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)

    def call(name: str, *options: str, line: str) -> list[str]:
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"there is no {name}")
        (tmp_path / "torchtune.toml").touch()
        (tmp_path / "script").write_text(run("completion", name).stdout)
        env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            [found, *options, line], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    return call


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["shardkit", "con"], ["consolidate"]),
        (["shardkit", "preshard", "model", "--world"], ["--world-size"]),
        (["shardkit", "preshard", "--dtype", "f"], ["fp16", "fp32"]),
        (["shardkit", "completion", ""], ["bash", "zsh", "fish"]),
        (["shardkit", "preshard", "--profile", "light"], ["lightning", "lightning-mp"]),
        (["shardkit", "preshard", "--dtype", "bfl"], ["bfloat16"]),
        (["shardkit", "consolidate", "--keys", "a"], ["auto"]),
        (
            ["shardkit", "consolidate", "--keys", "torchtune"],
            ["torchtune-llama", "torchtune-qwen2", "torchtune.toml"],
        ),
        (["shardkit", "preshard", "--keys", "megatron-q"], ["megatron-qwen-moe"]),
    ],
)
def test_bash(shell, typed: list[str], words: list[str]) -> None:
    line = (
        f"source ./script; COMP_WORDS=({' '.join(repr(word) for word in typed)}); COMP_CWORD={len(typed) - 1}; "
        '_shardkit_completion shardkit; echo "${COMPREPLY[@]}"'
    )
    assert shell("bash", "--norc", "-c", line=line) == words


def test_bash_completes_paths_by_itself(shell) -> None:
    line = (
        "source ./script; compopt() { echo $*; }; COMP_WORDS=(shardkit inspect x); COMP_CWORD=2; "
        "_shardkit_completion shardkit"
    )
    assert shell("bash", "--norc", "-c", line=line) == ["-o", "default"]


def test_fish(shell) -> None:
    assert "consolidate" in shell("fish", "-c", line='source ./script; complete -C "shardkit con"')


def test_zsh(shell) -> None:
    assert shell("zsh", "-f", "-n", line="script") == []  # it parses; to complete needs a terminal


def test_an_unknown_shell_is_refused(run) -> None:
    assert run("completion", "tcsh").exit_code == 2
