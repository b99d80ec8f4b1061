"""Every guide's commands print what the page says, and its scripts run with the real trainer on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardkit
from tests.guides import console
from tests.test_examples import make_model

NEEDS = {"lightning-to-hub": "lightning", "trainer-to-hub": "accelerate"}
GUIDES = [
    pytest.param(
        page,
        id=page.stem,
        marks=pytest.mark.skipif(
            page.stem in NEEDS and find_spec(NEEDS[page.stem]) is None,
            reason=f"{NEEDS.get(page.stem)} is not installed",
        ),
    )
    for page in sorted(console.PAGES.glob("*.md"))
    if "```console" in page.read_text()
]


@pytest.mark.dist
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_trace: object, fast_factors: object
) -> None:
    monkeypatch.chdir(tmp_path)
    with console.prepared(page, tmp_path):
        for command, said, printed in console.differences(page, tmp_path):
            assert printed == said, f"{command}\npython -m tests.guides.console"


def test_each_script_belongs_to_a_guide_and_each_guide_is_listed() -> None:
    pages = {page.name: page.read_text() for page in console.PAGES.glob("*.md")}
    index = pages.pop("index.md")
    assert not [name for name in pages if f"({name})" not in index]
    assert not [
        path.name
        for path in console.SCRIPTS.iterdir()
        if path.suffix == ".py" and path.name not in "".join(pages.values())
    ]
    assert not [name for name, text in pages.items() if "## What can go wrong" not in text]


def test_a_page_that_says_something_else_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("```console\n$ echo one\none\n$ echo two\nthree\n```\n")
    found = list(console.differences(tmp_path / "page.md", tmp_path))
    assert found == [("echo one", "one", "one"), ("echo two", "three", "two")]


@pytest.mark.dist
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_what_deepspeed_saves_is_consolidated_as_it_does_itself(tmp_path: Path) -> None:
    """In processes of their own: DeepSpeed compiles its collectives, and warns of much."""
    make_model(tmp_path / "my-model")
    place = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "localhost",
        "--nproc-per-node",
        "2",
    ]
    script = str(console.SCRIPTS / "deepspeed_run.py")
    merge = "import sys, torch; from deepspeed.utils.zero_to_fp32 import *; " + (
        "torch.save({k: v.clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]).items()}, sys.argv[2])"
    )
    for arguments in ([*launch, script, "my-model", "output_dir"], ["-c", merge, "output_dir", "merged.pt"]):
        command = [sys.executable, "-W", "ignore", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | place, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
    shardkit.consolidate(tmp_path / "output_dir", tmp_path / "trained", base=tmp_path / "my-model")
    found = load_file(tmp_path / "trained" / "model.safetensors")
    merged = torch.load(tmp_path / "merged.pt")
    assert found.keys() == merged.keys() - {"lm_head.weight"}
    assert not [name for name, value in found.items() if not torch.equal(value, merged[name])]
