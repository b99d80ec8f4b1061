"""Make the screenshots of docs/pictures.md: a model is trained a little, pre-sharded, damaged, compared, and looked at.

    make pictures

Needs transformers, playwright and a Chromium (`pip install playwright`, `apt-get install chromium`). Everything is made on the
way, on a CPU, in a minute. Each picture stays below 150 kB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_BYTES = 150_000
WIDTH, HEIGHT = 900, 900
STEPS, FROZEN_LAYERS = 8, 4


def shardkit(*arguments: str, allowed: tuple[int, ...] = (0,)) -> None:
    """Run a command of shardkit, as a person does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "shardkit", *arguments], env=environment, check=False)
    if done.returncode not in allowed:
        sys.exit(f"shardkit {' '.join(arguments)}: exit code {done.returncode}")


def train() -> None:
    """Save a small Qwen3 as `qwen3-tiny`, and the same after a few steps, the first layers frozen, as `qwen3-tuned`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=20,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained("qwen3-tiny")
    model.float()
    for module in (model.model.embed_tokens, *model.model.layers[:FROZEN_LAYERS]):
        module.requires_grad_(False)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    tokens = torch.randint(4000, (2, 64))
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained("qwen3-tuned")


def make_pages() -> None:
    """Write the three pages."""
    shardkit("preshard", "qwen3-tiny", "qwen3-tiny-16", "--mesh", "dp_replicate=2,dp_shard=8")
    shardkit("inspect", "qwen3-tiny-16", "--html", "inspect.html", "--picture")
    shutil.copytree("qwen3-tiny-16", "qwen3-damaged")
    os.remove("qwen3-damaged/__5_0.distcp")
    with open("qwen3-damaged/__2_0.distcp", "r+b") as file:
        for place in (700_000, 1_900_000, 2_400_000):
            file.seek(place)
            file.write(b"\xff" * 64)
    shardkit("verify", "qwen3-damaged", "--full", "--html", "verify.html", allowed=(1,))
    shardkit("diff", "qwen3-tiny", "qwen3-tuned", "--stats", "--html", "diff.html", "--picture", allowed=(1,))


def photograph() -> None:
    """Take a picture of the top of each page, one of them in the dark."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=arguments)
        for name, scheme in (("inspect", "light"), ("verify", "light"), ("diff", "dark")):
            page = browser.new_page(color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(Path(f"{name}.html").absolute().as_uri())
            page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
            target = DOCS / f"picture-{name}.png"
            page.screenshot(path=target)
            if target.stat().st_size > MAX_BYTES:
                sys.exit(f"{target.name} has {target.stat().st_size} bytes, more than {MAX_BYTES}")
        browser.close()


def main() -> None:
    """Do all of it in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        train()
        make_pages()
        photograph()
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
