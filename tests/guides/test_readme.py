"""The three commands print what docs/start.md says, on a smaller model of the same kind; README's recording shows the same."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.guides import console
from tests.worlds.processes import run_script

MADE = runpy.run_path(str(console.ROOT / "scripts" / "readme.py"))
_SIZE = re.compile(r"\d[\d,.]* ([KMG]iB|parameters)")


def sized(text: str) -> str:
    """Return text without what depends on how large the model is, or how fast the machine."""
    return _SIZE.sub(r"... \1", re.sub(r" [KMG]iB", " MiB", console.steady(text)))


@pytest.mark.prove
@pytest.mark.dist
def test_the_commands_print_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast_trace: object
) -> None:
    MADE["make_model"](tmp_path / "my-model", width=96)
    monkeypatch.chdir(tmp_path)
    trained = {
        "script": str(console.SCRIPTS / "plain_fsdp2.py"),
        "arguments": ["my-model", "last.ckpt", "1"],
        "num_processes": 2,
        "printed": str(tmp_path / "printed"),
    }
    environment = {"CUDA_VISIBLE_DEVICES": "", "PWD": str(tmp_path)}
    run_script("distributed/launch_world.py", json.dumps(trained), env=environment)
    compared = list(console.differences(MADE["PAGE"], tmp_path))
    assert len(compared) == 3
    for command, said, printed in compared:
        assert sized(printed) == sized(said), f"{command}\npython scripts/readme.py"


def test_readme_has_the_commands_of_the_page() -> None:
    (block,) = (
        block
        for block in re.findall(r"^```bash\n(.*?)^```", MADE["README"].read_text(), re.M | re.S)
        if "preshard" in block
    )
    typed = [line for line in block.splitlines() if not line.startswith("#")]
    assert typed == list(MADE["commands"](MADE["PAGE"].read_text()))


def test_the_recording_ends_with_what_the_page_says() -> None:
    blocks = console.BLOCK.findall(MADE["PAGE"].read_text())
    typed = [typed for block in blocks for typed in console.commands(block)]
    said = [
        line
        for command, printed in typed
        if command.startswith(MADE["RECORDED"])
        for line in (f"$ {command}", *printed.splitlines())
        if line
    ]
    texts = ElementTree.parse(MADE["RECORDING"]).findall(".//{*}text")
    last = sorted(
        (int(text.get("y")), "".join(text.itertext())) for text in texts if "last" in text.get("class")
    )
    assert [line for _, line in last if not re.match(r"\w+: 100%", line)] == said


def test_a_screen_shows_what_a_terminal_would() -> None:
    screen = MADE["Screen"]()
    screen.feed("one\r\ntwo\r\x1b[Kthr\x1b[1mee\x1b[0m\nfour\b\x1b[1A!")
    assert screen.text() == "one\nthree   !\n     four"
    assert screen.shown()[1] == (("thr", ""), ("ee", "b"), ("   !", ""))
