"""Pages in a real browser. Needs playwright and a Chromium:

pip install playwright && apt-get install chromium
"""

from __future__ import annotations

import json
import os
import shutil
import struct

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from shardkit.cli import main
from tests.pictures.hostile import NAMES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

NUM_RANKS, NUM_TENSORS = 1024, 1000


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield found
        found.close()


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a page; at the end nothing may have been asked for, and nothing may have failed."""
    requests, errors = [], []
    context = browser.new_context(viewport={"width": 1280, "height": 900})

    def begin(path, **options):
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(f"file://{path}")
        page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
        return page

    yield begin
    assert len(requests) == len(context.pages)  # each of its own file
    assert not errors
    context.close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(main, args, prog_name="shardkit")


def write_headers(path, shapes):
    """Write a safetensors file that has a header and holes."""
    header, at = {}, 0
    for name, (rows, columns) in shapes.items():
        header[name] = {
            "dtype": "BF16",
            "shape": [rows, columns],
            "data_offsets": [at, at + 2 * rows * columns],
        }
        at += 2 * rows * columns
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def is_painted(page, picture):
    """True if a canvas has many pixels that are not clear."""
    return page.evaluate(
        """name => { const c = document.querySelector(`[data-picture=${name}] canvas`);
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n > 500 }""",
        picture,
    )


def detail(page, picture):
    return page.inner_text(f"[data-picture={picture}] .detail")


def test_a_thousand_ranks_and_tensors(run, open_page, tmp_path):
    (tmp_path / "big").mkdir()
    kinds = ("q", "k", "v", "o", "gate", "up", "down", "a", "b", "c")
    shapes = {
        f"model.layers.{n}.{kind}.weight": (2048, 64) for n in range(NUM_TENSORS // 10) for kind in kinds
    }
    write_headers(tmp_path / "big" / "model.safetensors", shapes)
    done = run(
        "preshard",
        "big",
        "out",
        "--world-size",
        str(NUM_RANKS),
        "--layout",
        "declared",
        "--dry-run",
        "--html",
        "p.html",
    )
    assert done.exit_code == 0, done.output
    assert os.path.getsize("p.html") < 2_000_000
    page = open_page(tmp_path / "p.html")
    assert all(is_painted(page, name) for name in ("naive", "ours", "matrix", "tensor", "strips"))
    assert page.locator("#tensors tbody tr").count() == NUM_TENSORS
    page.fill("#tensors input", "layers.7. down")
    assert (
        page.locator("#tensors tbody tr:visible")
        .all_inner_texts()[0]
        .startswith("model.layers.7.down.weight")
    )
    assert page.locator("#tensors tbody tr:visible").count() == 1
    page.locator("#tensors tbody tr:visible").click()
    assert page.inner_text("#tensor-name") == "model.layers.7.down.weight [2048, 64]: 1,024 pieces"
    page.fill("#tensors input", "")
    page.locator("#tensors thead button").first.click()
    page.locator("#tensors thead button").first.click()
    assert page.locator("#tensors tbody tr").first.inner_text().startswith("model.layers.99.v.weight")


@pytest.fixture
def held_page(run, open_page, tmp_path):
    tensors = {f"model.layers.{n}.up.weight": torch.ones(8, 4) for n in range(3)} | {
        "model.norm.weight": torch.ones(2)
    }
    (tmp_path / "tiny").mkdir()
    save_file(tensors, tmp_path / "tiny" / "model.safetensors", metadata={"format": "pt"})
    run("preshard", "tiny", "out", "--world-size", "4", "--layout", "declared")
    assert run("inspect", "out", "--html", "page.html").exit_code == 0
    return open_page(tmp_path / "page.html")


def test_keys(held_page):
    page = held_page
    page.focus("[data-picture=matrix] canvas")
    page.keyboard.press("ArrowRight")
    assert detail(page, "matrix").startswith("rank 0, the root unit: 4 B")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert detail(page, "matrix").startswith(
        "rank 1, model.layers.0: 32 B, 32.0% of its 100 B; reads 100 B of __1_0.distcp"
    )
    page.keyboard.press("End")
    page.keyboard.press("PageDown")
    assert detail(page, "matrix").startswith("rank 3, model.layers.2: 32 B")
    page.keyboard.press("Escape")
    assert detail(page, "matrix") == ""
    page.focus("#tensors tbody tr")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#tensor-name").startswith("model.layers.1.up.weight [8, 4]")
    page.focus("[data-picture=tensor] canvas")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert detail(page, "tensor") == "[2:4, 0:4] lies in __1_0.distcp, read by rank 1"
    page.focus("[data-picture=strips] canvas")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "record 2 of " in detail(page, "strips")


def test_pointer(held_page):
    canvas = held_page.locator("[data-picture=matrix] canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    held_page.mouse.move(box["x"] + 90, box["y"] + 15)
    assert detail(held_page, "matrix").startswith("rank 0, the root unit")
    held_page.mouse.click(box["x"] + 90, box["y"] + 35)
    held_page.mouse.move(5, 5)
    assert detail(held_page, "matrix").startswith("rank 1, the root unit")  # a click keeps it


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_everything_fits(held_page, width, scheme):
    held_page.emulate_media(color_scheme=scheme)
    held_page.set_viewport_size({"width": width, "height": 900})
    assert held_page.evaluate("document.documentElement.scrollWidth") <= width
    assert all(is_painted(held_page, name) for name in ("naive", "ours", "matrix", "tensor", "strips"))


def test_damage_is_red_where_it_lies(run, held_page, open_page, tmp_path):
    with open("out/__2_0.distcp", "r+b") as file:
        at = file.read().index(torch.ones(8).numpy().tobytes())
        file.seek(at)
        file.write(b"\xff")
    assert run("verify", "out", "--full", "--html", "check.html").exit_code == 1
    page = open_page(tmp_path / "check.html")
    colours = page.evaluate(
        """() => { const c = document.querySelector('[data-picture=strips] canvas'), d = c.getContext('2d');
        const y = 16 * devicePixelRatio, red = []; for (let x = 0; x < c.width; x++) { const p = d.getImageData(x, y, 1, 1).data;
        if (p[0] > 180 && p[1] < 60 && p[2] < 80) red.push(x / c.width) } return red }"""
    )
    where = at / os.path.getsize("out/__2_0.distcp")
    width = page.locator("[data-picture=strips] canvas").bounding_box()["width"]
    left = 230 / width
    assert colours
    assert colours[0] - 0.01 <= left + (1 - left - 10 / width) * where <= colours[-1] + 0.01
    page.focus("[data-picture=strips] canvas")
    page.keyboard.press("ArrowRight")
    assert "CRC-32 of the data" in detail(page, "strips")
    assert page.locator("#problems tr[aria-selected=true]").count() == 1


def test_a_cell_of_the_map_leads_to_its_tensor(run, held_page, open_page, tmp_path):
    (tmp_path / "tuned").mkdir()
    tensors = {f"model.layers.{n}.up.weight": torch.ones(8, 4) + n / 10 for n in range(3)} | {
        "model.norm.weight": torch.ones(2)
    }
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    assert run("diff", "tiny", "tuned", "--stats", "--html", "changes.html").exit_code == 1
    page = open_page(tmp_path / "changes.html")
    page.focus("[data-picture=changes] canvas")
    for key in ("ArrowRight", "End"):
        page.keyboard.press(key)
    assert detail(page, "changes").startswith("up, layer 2: relative norm 0.167, 100% of elements differ")
    page.keyboard.press("Enter")
    assert page.inner_text("#tensors tr[aria-selected=true]").startswith("model.layers.2.up.weight")


def test_hostile_names_do_nothing(run, open_page, tmp_path):
    for name, value in {"one": 1.0, "two": 2.0}.items():
        (tmp_path / name).mkdir()
        save_file({n: torch.full((4, 2), value) for n in NAMES}, tmp_path / name / "model.safetensors")
    run("preshard", "one", "out", "--world-size", "2", "--layout", "declared", "--wrap", "none")
    for at, arguments in enumerate((("inspect", "out"), ("diff", "one", "two"), ("verify", "one"))):
        run(*arguments, "--html", f"{at}.html")
        page = open_page(tmp_path / f"{at}.html")
        for row in page.locator("tbody tr.pickable").all():
            row.click()
        for canvas in page.locator("canvas:visible").all():
            canvas.focus()
            for key in ("ArrowRight", "ArrowDown", "Enter"):
                page.keyboard.press(key)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img, svg").count() == 0
        assert NAMES[0] in page.inner_text("body")


def test_the_policy_refuses_what_would_get_in_after_all(run, browser, tmp_path):
    (tmp_path / "tiny").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "tiny" / "model.safetensors")
    run("inspect", "tiny", "--html", "page.html")
    page = browser.new_page()
    page.goto(f"file://{tmp_path / 'page.html'}")
    page.evaluate(
        """() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);
        document.body.insertAdjacentHTML('beforeend', '<b onclick="window.hacked=1" id="x">x</b>'); document.getElementById('x').click() }"""
    )
    assert page.evaluate("window.hacked") is None
    page.close()
