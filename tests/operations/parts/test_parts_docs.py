"""The examples of docs/clusters.md and examples/parts: shells and Kubernetes could read them, and the options exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from shardkit.cli import main

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/clusters.md").read_text()
FILES = sorted((ROOT / "examples/parts").iterdir())
# Commands of other tools stand in blocks of `sh`.
SCRIPTS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
JOBS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)


def check_command(words: list[str]) -> None:
    """Parse what follows the program's name; nothing is run."""
    root = click.Context(main, **main.context_settings)
    command = main.get_command(root, words[0])
    assert command is not None, words
    command.make_context(words[0], words[1:], parent=root)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_right(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    found = re.findall(
        r"shardkit ((?:preshard|consolidate|reshard|commit|verify|diff|status|abort) [^\"\n]*)", script
    )
    assert found or "sbatch" in script
    for typed in found:
        check_command(shlex.split(typed, comments=True))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_page_quotes_the_files(path: Path) -> None:
    assert path.read_text() in (SCRIPTS if path.suffix == ".sbatch" else JOBS)
    assert f"`examples/parts/{path.name}`" in PAGE


def test_batch_scripts_say_what_sbatch_reads() -> None:
    """Its options come before any command, one on a line."""
    for path in FILES:
        if path.suffix == ".sbatch":
            first, *lines = path.read_text().splitlines()
            assert first == "#!/bin/bash"
            options = [line for line in lines if line.startswith("#SBATCH ")]
            assert options == lines[: len(options)]
            assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=[\w-]+)?", line) for line in options)


def test_the_job_of_kubernetes_has_as_many_completions_as_parts() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = JOBS
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][0] == "shardkit"
    check_command(container["command"][1:])
    assert container["command"][-2] == f"env/{spec['completions']}"
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] <= spec["completions"] <= spec["backoffLimit"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")  # a Job takes no other
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
