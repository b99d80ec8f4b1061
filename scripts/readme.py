"""Make the output of the three commands in docs/start.md, and docs/recording.svg, which README shows of them.

    python scripts/readme.py

A small Qwen3 (218 million parameters) is made, trained for a step by 2 processes, and moved by the commands of the page.
It takes a minute or two, 8 GB of disk and 6 GB of memory. The recording is what a terminal got, in the time that it took;
pauses are cut to `PAUSE_S`. tests/guides/test_readme.py has the same commands run on a smaller model.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README, PAGE, RECORDING = ROOT / "README.md", ROOT / "docs" / "start.md", ROOT / "docs" / "recording.svg"
COLUMNS, ROWS = 98, 22
FRAME_S, PAUSE_S, HOLD_S, KEY_S = 0.1, 1.2, 7.0, 0.04
RECORDED = ("shardkit preshard", "shardkit consolidate", "shardkit reshard")
"""Commands of the page that are in the recording."""
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)
_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r|\n|\x08)|([^\x1b\r\n\x08]+)")
_COLOURS = {"1": "b", "2": "d", "31": "r", "32": "g", "33": "y", "34": "c", "36": "c", "90": "d"}
"""SGR code -> class of the picture."""


def make_model(directory: Path, width: int = 768) -> None:
    """Save a Qwen3 of 28 layers with random weights in bf16, and a tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=width * 125 // 3,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=width // 12,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(directory / "tokenizer.json"))


class Screen:
    """A terminal as far as shardkit and its progress bar use one; lines are kept, none scrolls away."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        """Take what was written to the terminal."""
        for arguments, code, control, plain in _ESCAPE.findall(text):
            if plain:
                for character in plain:
                    self._put(character)
            elif control == "\n":
                self._row += 1
                self.lines += [[] for _ in range(self._row + 1 - len(self.lines))]
            elif control:
                self._column = 0 if control == "\r" else max(self._column - 1, 0)
            elif code == "m":
                self._style = " ".join(filter(None, map(_COLOURS.get, arguments.split(";"))))
            elif code == "K":
                del self.lines[self._row][self._column :]
            elif code == "A":
                self._row = max(self._row - int(arguments or 1), 0)

    def _put(self, character: str) -> None:
        line = self.lines[self._row]
        line += [(" ", "")] * (self._column + 1 - len(line))
        line[self._column] = (character, self._style)
        self._column += 1

    def shown(self) -> list[tuple[tuple[str, str], ...]]:
        """Return the lines as runs of text in one style."""
        return [tuple(_runs(line)) for line in self.lines]

    def text(self) -> str:
        """Return all lines, without trailing blanks."""
        return "\n".join("".join(character for character, _ in line).rstrip() for line in self.lines)


def _runs(line: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    text, style = "", ""
    for character, its_style in line:
        if its_style != style and text:
            yield text, style
            text = ""
        text, style = text + character, its_style
    if text.strip():
        yield text.rstrip(), style


class Written(NamedTuple):
    """What a command wrote at a time."""

    at_s: float
    text: str


def record(command: str, home: Path) -> list[Written]:
    """Run a command in a terminal of its own; `home` is shown as `/data`.

    Returns:
        What it wrote, with seconds since it began. Pauses are cut to `PAUSE_S`.
    """
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.chdir(home)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "SHARDKIT_CACHE": str(home / "cache"),
        }
        os.execve(
            "/bin/sh",
            ["sh", "-c", command.replace("shardkit", f"{sys.executable} -m shardkit", 1)],
            environment,
        )
    written, last, at_s = list[Written](), time.monotonic(), 0.0
    while data := _read(terminal):
        now = time.monotonic()
        at_s, last = at_s + min(now - last, PAUSE_S), now
        written.append(Written(at_s, data.decode(errors="replace").replace(f"{home}/", "/data/")))
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"{command}: {''.join(each.text for each in written)}")
    return written


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the command has ended
        return b""


def frames(
    runs: list[tuple[str, list[Written]]],
) -> Iterator[tuple[float, list[tuple[tuple[str, str], ...]]]]:
    """Yield (seconds, lines) whenever the terminal has changed, at most once in `FRAME_S`."""
    screen, now = Screen(), 0.0
    for command, written in runs:
        screen.feed("\x1b[32m$\x1b[0m ")
        for character in command:
            screen.feed(character)
            now += KEY_S
            yield now, screen.shown()
        screen.feed("\n\r")
        begun, shown = now + 0.2, 0.0
        for number, (at_s, text) in enumerate(written):
            screen.feed(text)
            now = begun + at_s
            is_last = number + 1 == len(written)
            if is_last or now - shown >= FRAME_S or written[number + 1].at_s - at_s >= FRAME_S:
                shown = now
                yield now, screen.shown()
        screen.feed("\n\r")
        now += PAUSE_S


def picture(runs: list[tuple[str, list[Written]]]) -> str:
    """Return the recording as an SVG that plays by itself, again and again, without a script."""
    states = list(frames(runs))
    total = states[-1][0] + HOLD_S
    intervals: dict[tuple[int, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for (start, lines), (stop, _) in zip(states, [*states[1:], (total, [])], strict=True):
        for number, line in enumerate(lines):
            spans = intervals.setdefault((number, line), []) if line else []
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
    rules, texts, names = list[str](), list[str](), dict[tuple[float, float], str]()
    for (number, line), spans in sorted(intervals.items(), key=lambda item: (item[0][0], item[1])):
        for start, stop in spans:
            name = names.setdefault((start, stop), f"t{len(names)}")
            spoken = "".join(
                f'<tspan class="{style}">{escape(text)}</tspan>' if style else escape(text)
                for text, style in line
            )
            kept = " last" if stop == total else ""
            texts.append(f'<text class="{name}{kept}" x="14" y="{44 + 17 * number}">{spoken}</text>')
    for (start, stop), name in names.items():
        begin, end = 100 * start / total, 100 * stop / total
        after = f" {end:.2f}%{{visibility:hidden}}" if stop < total else ""
        rules.append(f"@keyframes {name}{{0%{{visibility:hidden}}{begin:.2f}%{{visibility:visible}}{after}}}")
        rules.append(f".{name}{{animation:{name} {total:.1f}s step-end infinite}}")
    tops = [(at_s, max(len(lines) - (0 if lines[-1] else 1) - ROWS, 0)) for at_s, lines in states]
    scrolls = [
        f"{100 * at_s / total:.2f}%{{transform:translateY(-{17 * top}px)}}" for at_s, top in tops if top
    ]
    rules.append("@keyframes scroll{0%{transform:none}" + "".join(dict.fromkeys(scrolls)) + "}")
    rules.append(f".scroll{{animation:scroll {total:.1f}s step-end infinite}}")
    still = f"transform:translateY(-{17 * tops[-1][1]}px)"
    width, height = 16 + round(COLUMNS * 7.83), 36 + 17 * ROWS + 8
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="A terminal in which shardkit runs">
<style>
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d0d7de; white-space: pre; visibility: hidden }}
.b {{ font-weight: 600 }} .d {{ fill: #8b949e }} .g {{ fill: #56d364 }} .r {{ fill: #ff7b72 }} .y {{ fill: #e3b341 }} .c {{ fill: #79c0ff }}
{chr(10).join(rules)}
@media (prefers-reduced-motion: reduce) {{ text, .scroll {{ animation: none !important }} .last {{ visibility: visible }} .scroll {{ {still} }} }}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#161b22" stroke="#30363d"/>
<circle cx="18" cy="15" r="5" fill="#30363d"/><circle cx="34" cy="15" r="5" fill="#30363d"/><circle cx="50" cy="15" r="5" fill="#30363d"/>
<clipPath id="screen"><rect y="32" width="{width}" height="{17 * ROWS + 4}"/></clipPath>
<g clip-path="url(#screen)"><g class="scroll">
{chr(10).join(texts)}
</g></g>
</svg>
"""


def commands(text: str) -> Iterator[str]:
    """Yield the commands of the console blocks of a page."""
    for block in _BLOCK.findall(text):
        yield from re.findall(r"^\$ (.*)", block, re.M)


def main() -> None:
    """Make model and checkpoint, run the commands, and write page and recording anew."""
    text, recorded = PAGE.read_text(), list[tuple[str, list[Written]]]()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place).resolve()
        make_model(home / "my-model")
        script = str(ROOT / "examples" / "guides" / "plain_fsdp2.py")
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([*launch, "my-model", "last.ckpt", "1"], cwd=home, env=environment, check=True)
        for command in commands(text):
            if command.startswith("shardkit preshard"):  # asked before, as a dry run does
                record(f"{command} --dry-run", home)
            written = record(command, home)
            screen = Screen()
            screen.feed("".join(each.text for each in written))
            printed = re.sub(r"\A(tracing .*|.*\d%.*|\s)*\n", "", screen.text() + "\n").rstrip()
            text = _BLOCK.sub(
                lambda match, command=command, printed=printed: (
                    f"```console\n$ {command}\n{printed}\n```" if f"$ {command}\n" in match[0] else match[0]
                ),
                text,
            )
            if command.startswith(RECORDED):
                recorded.append((command, written))
    PAGE.write_text(text)
    RECORDING.write_text(picture(recorded))


if __name__ == "__main__":
    main()
