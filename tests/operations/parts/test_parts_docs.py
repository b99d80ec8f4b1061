"""The examples of docs/parts.md: shells and Kubernetes could read them, and the options exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from shardkit.cli import main

PAGE = (Path(__file__).parents[3] / "docs/parts.md").read_text()
SCRIPTS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
JOBS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)


def check_command(words: list[str]) -> None:
    """Parse what follows the program's name; nothing is run."""
    command = main.get_command(click.Context(main), words[0])
    assert command is not None, words
    command.make_context(words[0], words[1:])


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_right(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    found = re.findall(
        r"shardkit ((?:preshard|consolidate|reshard|commit|verify|diff|manifest) [^\"\n]*)", script
    )
    assert found or "sbatch" in script
    for typed in found:
        check_command(shlex.split(typed))


def test_the_job_of_kubernetes_has_as_many_completions_as_parts() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = JOBS
    spec = yaml.safe_load(text)["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    check_command(container["command"][1:])
    assert container["command"][-1] == f"env/{spec['completions']}"
    assert spec["completionMode"] == "Indexed"
