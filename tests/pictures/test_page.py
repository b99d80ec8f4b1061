"""Pages as files: what is in them, what they allow, what names may do in them, and where they are written."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import shardkit
from shardkit.cli import main
from shardkit.pictures import page as page_module
from shardkit.pictures.changes import place_of
from shardkit.pictures.held import held_page
from shardkit.pictures.page import render
from tests.pictures.hostile import NAMES


class Parsed(HTMLParser):
    """A page as a browser sees it: elements with their attributes, and the text in each kind of them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts, self._open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self._open[-1] if self._open else "", data))

    def inside(self, tag):
        return [text for kind, text in self.texts if kind == tag]

    @property
    def data(self):
        """What the script draws."""
        return json.loads(self.inside("script")[0])


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(main, args, prog_name="shardkit")


@pytest.fixture
def tiny(tmp_path):
    """`tiny`, and `tuned`, in which the weights of layers differ, those of layer 1 more."""
    plain = {f"model.layers.{n}.up.weight": torch.ones(8, 4) for n in range(2)}
    plain |= {"model.norm.weight": torch.ones(4), "model.embed.weight": torch.arange(20.0).view(5, 4)}
    tuned = {n: t + 0.1 * (1 + int(n[13])) if ".layers." in n else t for n, t in plain.items()}
    tuned["model.norm.weight"] = torch.full((4,), float("nan"))
    for name, tensors in {"tiny": plain, "tuned": tuned}.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    return plain


@pytest.fixture
def start_python(tmp_path):
    root = os.path.dirname(os.path.dirname(shardkit.__file__))

    def begin(code):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": root},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    return begin


def page(path):
    data = path.read_bytes()
    assert data.isascii()
    return Parsed(data.decode())


def table(parsed_text, name):
    """The rows of a table, without tags."""
    body = re.search(rf'<div class="table" id="{name}">.*?<tbody>(.*?)</tbody>', parsed_text, re.S).group(1)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.S)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in rows]


def test_what_a_page_allows_and_asks_for(run, tiny, tmp_path):
    assert run("inspect", "tiny", "--html", "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    found = page(tmp_path / "page.html")
    (policy,) = (a["content"] for a in found.attributes if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    hashes = {
        kind: base64.b64encode(hashlib.sha256(found.inside(kind)[-1].encode()).digest()).decode()
        for kind in ("script", "style")
    }
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'sha256-{hashes['script']}'",
        "style-src": f"'sha256-{hashes['style']}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(found.tags)
    names = {name for each in found.attributes for name in each}
    assert not {name for name in names if name.startswith("on")} | (names & {"src", "style"})
    assert not re.findall(r"https?://", text)
    assert found.tags.count("script") == 2


def test_a_held_page_says_everything_without_its_script(run, tiny, tmp_path):
    run("preshard", "tiny", "out", "--world-size", "4", "--layout", "declared")
    assert run("inspect", "out", "--html", "page.html").exit_code == 0
    text, found = (tmp_path / "page.html").read_text(), page(tmp_path / "page.html")
    held = shardkit.inspect("out", holdings=True).holdings
    assert [row[0] for row in table(text, "holders")] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert {row[0] for row in table(text, "tensors")} == set(tiny)
    assert found.data["cells"] == [list(row) for row in held.cells]
    assert found.inside("h1") == ["out"]
    assert "4 ranks share" in "".join(found.inside("p"))
    assert any("too few rows for all ranks, so some ranks get none" in item for item in found.inside("li"))
    pictures = [each["data-picture"] for each in found.attributes if "data-picture" in each]
    assert pictures == ["naive", "ours", "matrix", "tensor", "strips"]
    canvases = [a for tag, a in zip(found.tags, found.attributes, strict=True) if tag == "canvas"]
    assert all(each["tabindex"] == "0" and len(each["aria-label"]) > 20 for each in canvases)


def test_a_plan_has_the_page_of_its_output(run, tiny, tmp_path):
    done = run(
        "preshard",
        "tiny",
        "out",
        "--world-size",
        "4",
        "--dry-run",
        "--layout",
        "declared",
        "--html",
        "page.html",
    )
    assert done.exit_code == 0
    assert not (tmp_path / "out").exists()
    planned = page(tmp_path / "page.html").data
    run("preshard", "tiny", "out", "--world-size", "4", "--layout", "declared")
    run("inspect", "out", "--html", "page.html")
    written = page(tmp_path / "page.html").data
    assert {k: planned[k] for k in ("cells", "holders", "strips", "lanes", "cuts", "flow")} == {
        k: written[k] for k in ("cells", "holders", "strips", "lanes", "cuts", "flow")
    }
    at_once = run(
        "preshard", "tiny", "more", "--world-size", "4", "--layout", "declared", "--html", "more.html"
    )
    assert at_once.exit_code == 0, at_once.output
    assert page(tmp_path / "more.html").data["cells"] == written["cells"]
    assert "nothing is written yet" not in (tmp_path / "more.html").read_text()
    for wrong in (["--html", "more/page.html", "--overwrite"], ["--html", "a.html", "--executor", "ray"]):
        refused = run("preshard", "tiny", "more", "--world-size", "4", "--layout", "declared", *wrong)
        assert refused.exit_code == 2, refused.output


def test_damage_lies_where_it_was_done(run, tiny, tmp_path):
    run("preshard", "tiny", "out", "--world-size", "2", "--layout", "declared")
    whole = run("verify", "out", "--full", "--html", "page.html")
    assert whole.exit_code == 0
    assert "verdict good" in (tmp_path / "page.html").read_text()
    held = shardkit.inspect("out", holdings=True).holdings
    names = [tensor.name for tensor in held.tensors]
    strip = held.strips[held.files[1].strip]
    record = [names[at] for at in strip.tensors].index("model.layers.1.up.weight")
    with open("out/__1_0.distcp", "r+b") as file:
        file.seek(strip.starts[record])
        at = strip.starts[record] + file.read(strip.nbytes[record]).index(torch.ones(4).numpy().tobytes())
        file.seek(at)
        file.write(b"\xff")
    broken = run("verify", "out", "--full", "--html", "page.html")
    assert broken.exit_code == 1
    text, data = (tmp_path / "page.html").read_text(), page(tmp_path / "page.html").data
    assert "verdict bad" in text
    ((file, tensor, *_),) = table(text, "problems")
    assert (file, tensor) == ("__1_0.distcp", "model.layers.1.up.weight")
    (lane,) = data["lanes"]
    ((start, nbytes, said, _, tone),) = lane["damage"]
    assert start <= at < start + nbytes
    assert tone == "somewhere"  # in the bytes that the checksum is of
    assert "CRC-32" in said
    assert data["places"][0]["damage"] == [[[4, 0], [4, 4], "somewhere"]]
    assert [each["tone"] for each in data["files"]] == ["good", "mark"]


def test_files_that_are_missing_or_short_are_on_the_page(run, tiny, tmp_path):
    run("preshard", "tiny", "out", "--world-size", "3", "--layout", "declared")
    size, gone, others = os.path.getsize("out/__1_0.distcp"), os.path.getsize("out/__2_0.distcp"), {}
    os.truncate("out/__1_0.distcp", 100)
    os.remove("out/__2_0.distcp")
    for name in ("shardkit.json", None):  # what is missing is known from the manifest, or else from .metadata
        assert run("verify", "out", "--html", "page.html").exit_code == 1
        text, data = (tmp_path / "page.html").read_text(), page(tmp_path / "page.html").data
        lanes = {lane["label"]: lane for lane in data["lanes"]}
        assert set(lanes) == ({"__1_0.distcp", "__2_0.distcp"} if name else {"__2_0.distcp"})
        assert lanes["__2_0.distcp"]["damage"][0][:2] == [0, gone]  # a whole bar
        assert lanes["__2_0.distcp"]["damage"][0][-1] == "missing"
        assert lanes["__2_0.distcp"]["missing"].endswith("KiB, 4 tensors")
        assert {each["name"]: each["tone"] for each in data["files"]}["__2_0.distcp"] == "missing"
        assert "Copy 2 files again" in text or not name
        others[name] = lanes
        (tmp_path / "out" / "shardkit.json").unlink(missing_ok=True)
    start, nbytes, *_, tone = others["shardkit.json"]["__1_0.distcp"]["damage"][0]
    assert (start, nbytes, tone) == (100, size - 100, "missing")


def test_what_training_changed(run, tiny, tmp_path):
    assert run("diff", "tiny", "tuned", "--stats", "--html", "page.html").exit_code == 1
    data, text = page(tmp_path / "page.html").data, (tmp_path / "page.html").read_text()
    assert data["rows"] == ["up", "model.embed", "model.norm"]
    assert data["columns"] == ["-", "0", "1"]
    cells = [data["cells"][at : at + 3] for at in range(0, 9, 3)]
    assert cells[0][0] is None
    assert 0 < cells[0][1][0] < cells[0][2][0] == data["peak"]
    assert cells[1][0][0] == 0
    assert cells[2][0][0] == "bad"
    assert "1 tensor with NaN or infinity" in text
    assert table(text, "tensors")[cells[0][2][2]][0] == "model.layers.1.up.weight"
    assert run("diff", "tiny", "tiny", "--html", "page.html").exit_code == 0
    assert "verdict good" in (tmp_path / "page.html").read_text()


MOVED = {2: {1, 3}, 5: {0, 1, 2, 3}}
"""Layer -> the experts that training moved, of four."""


def write_experts(folder, *, is_fused, is_tuned):
    """A mixture of experts in layers 2, 5 and 7, each with a shared expert, which is none of them."""
    torch.manual_seed(0)
    tensors = {}
    for layer in (2, 5, 7):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.shared_experts.up_proj.weight"] = torch.randn(6, 4) + is_tuned
        up, down, bias = torch.randn(4, 6, 4), torch.randn(4, 4, 6), torch.randn(4, 6)
        for expert in MOVED.get(layer, ()) if is_tuned else ():
            (up if expert % 2 else down)[expert] += 0.5
        if is_fused:
            names = {"up_proj": up, "down_proj": down, "up_proj_bias": bias}
            tensors |= {f"{prefix}.experts.{name}": tensor for name, tensor in names.items()}
        else:
            for name, stack in {"up_proj": up, "down_proj": down}.items():
                singles = {f"{prefix}.experts.{n}.{name}.weight": one.clone() for n, one in enumerate(stack)}
                tensors |= singles
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("is_fused", [False, True])
def test_which_experts_did_not_move(run, tmp_path, is_fused):
    for name in ("base", "tuned"):
        write_experts(tmp_path / name, is_fused=is_fused, is_tuned=name == "tuned")
    result = run("diff", "base", "tuned", "--html", "page.html")
    line = "6 of 12 are identical: 2 of 4 in layer 2 (0, 2); all of 4 in layer 7"
    assert result.exit_code == 1
    assert f"  experts  {line}\n" in result.stdout
    html, experts = page(tmp_path / "page.html"), page(tmp_path / "page.html").data["experts"]
    assert f"Experts: {line}." in (tmp_path / "page.html").read_text()
    assert html.data["kind"] == "changes"
    assert (experts["rows"], experts["columns"]) == (["layer 2", "layer 5", "layer 7"], [0, 1, 2, 3])
    cells = [experts["cells"][at : at + 4] for at in range(0, 12, 4)]
    moved = [{n for n, amount in enumerate(row) if amount} for row in cells]
    assert moved == [{1, 3}, {0, 1, 2, 3}, set()]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "tuned"))
    before, after = (
        each["model.layers.2.mlp.experts.up_proj"][3]
        if is_fused
        else each["model.layers.2.mlp.experts.3.up_proj.weight"]
        for each in (one, two)
    )
    norm = torch.dist(before, after) / max(before.norm(), after.norm())
    assert cells[0][3] == pytest.approx(float(norm), rel=1e-2)


def test_no_expert_is_all_or_none_of_them(run, tmp_path):
    write_experts(tmp_path / "base", is_fused=True, is_tuned=False)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    for name, change in {"router": "shared_experts", "all": ".experts."}.items():
        (tmp_path / name).mkdir()
        moved = {key: value + 1 if change in key else value for key, value in tensors.items()}
        save_file(moved, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    assert "  experts  all of 12 in 3 layers are identical\n" in run("diff", "base", "router").stdout
    assert "  experts  none of 12 in 3 layers are identical\n" in run("diff", "base", "all").stdout
    assert "experts " not in run("diff", "base", "base").stdout


def test_a_page_says_nothing_of_what_was_not_compared(run, tiny, tmp_path):
    (tmp_path / "bert").mkdir()
    others = {f"encoder.layer.{n}.query.weight": torch.ones(3, 3) for n in range(2)} | {
        "pooler.bias": torch.ones(3)
    }
    save_file(others, tmp_path / "bert" / "model.safetensors", metadata={"format": "pt"})
    assert run("diff", "tiny", "bert", "--html", "page.html").exit_code == 1
    text = (tmp_path / "page.html").read_text()
    assert "None of 7 tensors can be compared" in text
    assert "differs most:" not in text
    assert "little to much" not in text


def test_only_what_needs_somebody_is_yellow(run, tmp_path):
    tensors = {f"model.layers.{n}.up.weight": torch.ones(8, 4) for n in range(5)}
    tensors["model.embed.weight"] = torch.ones(20_001, 4)  # most of it, in no layer; uneven on four ranks
    (tmp_path / "big").mkdir()
    save_file(tensors, tmp_path / "big" / "model.safetensors", metadata={"format": "pt"})
    run("preshard", "big", "out", "--world-size", "4", "--layout", "declared")
    for path, blocks in (("out", {"notable"}), ("big/model.safetensors", set())):
        assert run("inspect", path, "--html", "page.html").exit_code == 0
        text = (tmp_path / "page.html").read_text()
        assert {each for each in ("unusual", "notable") if f'<div class="{each}"' in text} == blocks
        assert "what is in no layer has" not in text
    os.remove("out/__2_0.distcp")
    assert run("verify", "out", "--html", "page.html").exit_code == 1
    assert '<div class="unusual"' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("mesh", "parts"), [("dp_shard=4", 1), ("dp_shard=2,tp=2", 2)])
def test_a_rank_gathers_what_tp_and_ep_leave_it(run, tmp_path, mesh, parts):
    tensors = {f"model.layers.{n}.up.weight": torch.ones(64, 64) for n in range(5)}
    tensors |= {f"model.layers.{n}.norm.weight": torch.ones(4) for n in range(5)}
    (tmp_path / "big").mkdir()
    save_file(tensors, tmp_path / "big" / "model.safetensors", metadata={"format": "pt"})
    rules = ["*.up.weight=colwise"] if parts > 1 else []
    plan = {"mesh": mesh, "layout": "declared", "parallel_rules": rules, "dry_run": True, "holdings": True}
    held = shardkit.preshard("big", "out", **plan).holdings
    gathered = {unit.path: unit.gathered_bytes for unit in held.units}
    assert gathered["model.layers.0"] == 64 * 64 * 4 // parts + 4 * 4  # a norm is whole


def test_ranks_without_an_expert_are_the_first_thing_to_see(run, tmp_path):
    """FSDP cuts fused experts along dim 0: with fewer experts than ranks some ranks have none."""
    tensors = {f"model.layers.{n}.mlp.experts.gate_up_proj": torch.ones(3, 8, 4) for n in range(2)}
    tensors["model.norm.weight"] = torch.ones(5)
    (tmp_path / "moe").mkdir()
    save_file(tensors, tmp_path / "moe" / "model.safetensors", metadata={"format": "pt"})
    assert run("preshard", "moe", "out", "--world-size", "8", "--layout", "declared").exit_code == 0
    assert run("inspect", "out", "--html", "page.html").exit_code == 0
    text, found = (tmp_path / "page.html").read_text(), page(tmp_path / "page.html")
    (unusual,) = re.findall(r'<div class="unusual">.*?</div>', text)
    assert "5 of 8 ranks hold no expert: experts are cut along dim 0, and there are 3." in unusual
    assert "with ep in --mesh, or cut another dim with shard_placement_fn" in unusual
    # torch's chunks without elements are no pieces.
    pieces = {row[0]: row[-1] for row in table(text, "tensors")}
    assert pieces == {name: "5" if "norm" in name else "3" for name in tensors}
    assert {cut["num_pieces"] for cut in found.data["cuts"]} == {3, 5}
    # One number for one fact: that of the command.
    imbalance = f"{shardkit.inspect('out').imbalance:.2f}"
    assert f"<dd>{imbalance} x</dd><dt>largest file over the mean</dt>" in text
    assert f"the largest file is {imbalance} times the mean" in text
    run("preshard", "moe", "three", "--world-size", "3", "--layout", "declared")
    run("inspect", "three", "--html", "page.html")
    assert "hold no expert" not in (tmp_path / "page.html").read_text()


def test_a_result_writes_the_page_of_the_command(run, tiny, tmp_path):
    made = shardkit.preshard("tiny", "out", world_size=4, layout="declared", check_source="off")
    results = {
        ("inspect", "out"): shardkit.inspect("out"),
        ("verify", "out"): shardkit.verify("out", holdings=True),
        ("diff", "tiny", "tuned"): shardkit.diff("tiny", "tuned"),
    }
    for typed, result in results.items():
        run(*typed, "--html", "command.html")
        result.save_html(tmp_path / "python.html")
        texts = [
            re.sub(r"[0-9.]+ m?s\b", "", (tmp_path / f"{name}.html").read_text())
            for name in ("command", "python")
        ]
        assert texts[0] == texts[1]
    made.save_html("made.html")
    planned = shardkit.preshard("tiny", "plan", world_size=4, layout="declared", dry_run=True, holdings=True)
    planned.save_html("plan.html")
    assert page(tmp_path / "made.html").data["cells"] == page(tmp_path / "plan.html").data["cells"]


def test_what_has_no_page_says_how_to_get_one(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = shardkit.preshard("tiny", "plan", world_size=4, layout="declared", dry_run=True)
    for result in (planned, shardkit.verify("tiny")):
        with pytest.raises(shardkit.UsageError) as caught:
            result.save_html("page.html")
        assert "holdings=True" in caught.value.hint
        assert "<iframe" not in result._repr_html_()
    (tmp_path / "mine.html").write_text("<p>mine")
    with pytest.raises(shardkit.UsageError):
        shardkit.inspect("tiny").save_html("mine.html")
    assert (tmp_path / "mine.html").read_text() == "<p>mine"


def test_titles_have_no_absolute_paths(run, tiny, tmp_path):
    run("preshard", "tiny", "runs/a/last", "--world-size", "2", "--layout", "declared")
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True, exist_ok=True)
        save_file(tiny, tmp_path / "runs" / name / "model.safetensors", metadata={"format": "pt"})
    titles = {
        ("inspect", f"{tmp_path}/tiny"): "tiny",
        ("verify", f"{tmp_path}/tiny"): "tiny",
        ("preshard", "tiny", "out", "--world-size", "2", "--layout", "declared", "--dry-run"): "out",
        ("diff", f"{tmp_path}/runs/a/model.safetensors", f"{tmp_path}/runs/b/model.safetensors"): (
            "a/model.safetensors and b/model.safetensors"
        ),
        ("diff", "tiny", f"{tmp_path}/tuned"): "tiny and tuned",
    }
    for typed, title in titles.items():
        assert run(*typed, "--html", "page.html").exit_code in (0, 1)
        found = page(tmp_path / "page.html")
        assert found.inside("h1") == [title]
        assert not any(str(tmp_path) in each for each in found.inside("title"))
        assert typed[0] != "preshard" or f"{tmp_path}/out" in found.inside("td")  # in the text it is whole


def test_files_whose_records_have_no_places_have_no_strip(run, tiny):
    """As the flat partitions of DeepSpeed, which exist only decoded."""
    result = shardkit.inspect("tiny", holdings=True)
    held = result.holdings
    files = tuple(replace(file, strip=None) for file in held.files)
    bare = replace(result, holdings=replace(held, strips=(), files=files))
    found = Parsed(render(held_page(bare, kicker="", path="bare", facts=[])))
    assert [a["data-picture"] for a in found.attributes if "data-picture" in a] == ["matrix", "tensor"]


@pytest.mark.parametrize(
    ("name", "row", "layer"),
    [
        ("model.layers.12.mlp.up.weight", "model.layers.#.mlp.up.weight", 12),
        ("layers.3.experts.7.w", "layers.#.experts.*.w", 3),
        ("norm.weight", "norm.weight", -1),
        ("h.007.w", "h.007.w", -1),
    ],
)
def test_places(name, row, layer):
    assert place_of(name) == (row, layer)


@pytest.mark.parametrize("verb", ["inspect", "verify", "diff"])
def test_hostile_names_are_text(run, tmp_path, verb):
    for name, value in {"one": 1.0, "two": 2.0}.items():
        (tmp_path / name).mkdir()
        save_file({n: torch.full((4, 2), value) for n in NAMES}, tmp_path / name / "model.safetensors")
    if verb == "verify":  # every tensor is damaged
        run("preshard", "one", "out", "--world-size", "2", "--layout", "declared", "--wrap", "none")
        for file in (tmp_path / "out").glob("*.distcp"):
            file.write_bytes(file.read_bytes().replace(struct.pack("<4f", *[1.0] * 4), bytes(16)))
    arguments = {
        "inspect": ("inspect", "one"),
        "verify": ("verify", "out", "--full"),
        "diff": ("diff", "one", "two"),
    }
    result = run(*arguments[verb], "--html", "page.html")
    assert result.exit_code == (0 if verb == "inspect" else 1), result.output
    text, found = (tmp_path / "page.html").read_text(), page(tmp_path / "page.html")
    assert found.tags.count("script") == 2
    assert not {"img", "svg"} & set(found.tags)
    assert "\u202e" not in "".join(text for _, text in found.texts)
    shown = {text for kind, text in found.texts if kind == "td"}
    assert NAMES[0] in shown
    assert r"a\u202eb\u2066c\u2028d.weight" in shown
    assert all(len(text) < 1000 for text in shown)
    assert len(text) < 150_000


def test_where_a_page_may_be_written(run, tiny, tmp_path):
    kept = (tmp_path / "tiny" / "model.safetensors").read_bytes()
    assert run("inspect", "tiny", "--html", "tiny/page.html").exit_code == 2
    assert run("inspect", "tiny", "--html", "tiny").exit_code == 2
    assert run("inspect", "tiny", "--html", "no/such/page.html").exit_code == 5
    assert run("inspect", "tiny", "--html", "notes.html").exit_code == 0
    first = (tmp_path / "notes.html").read_bytes()
    assert run("inspect", "tiny", "--html", "notes.html").exit_code == 0  # a page replaces a page
    assert (tmp_path / "notes.html").read_bytes() == first  # the same input, the same bytes
    assert (tmp_path / "tiny" / "model.safetensors").read_bytes() == kept
    assert sorted(os.listdir(tmp_path)) == ["notes.html", "tiny", "tuned"]


@pytest.mark.parametrize("typed", [
    ("inspect", "tiny", "--html"),
    ("verify", "tiny", "--html"),
    ("diff", "tiny", "tuned", "--html"),
    ("preshard", "tiny", "out", "--world-size", "2", "--layout", "declared", "--dry-run", "--html"),
    ("preshard", "tiny", "out", "--world-size", "2", "--layout", "declared", "--overwrite", "--html"),
    ("consolidate", "tiny", "out", "--manifest-file"),
    ("consolidate", "tiny", "out", "--overwrite", "--manifest-file"),
])  # fmt: skip
def test_no_verb_replaces_the_file_of_a_person(run, tiny, tmp_path, typed):
    """Whatever the option is by which it is named."""
    (tmp_path / "notes").write_text("<html>mine</html>")
    refused = run(*typed, "notes")
    assert refused.exit_code == 2
    assert "notes exists" in refused.stderr
    assert (tmp_path / "notes").read_text() == "<html>mine</html>"
    assert sorted(os.listdir(tmp_path)) == ["notes", "tiny", "tuned"]


def test_a_file_that_appears_meanwhile_is_not_replaced(run, tiny, tmp_path, monkeypatch):
    render = page_module.render

    def late(page):
        (tmp_path / "page.html").write_text("mine")
        return render(page)

    monkeypatch.setattr(page_module, "render", late)
    refused = run("inspect", "tiny", "--html", "page.html")
    assert refused.exit_code == 2
    assert (tmp_path / "page.html").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["page.html", "tiny", "tuned"]


def test_json_is_as_it_was(run, tiny, tmp_path):
    for arguments in (("inspect", "tiny"), ("verify", "tiny"), ("diff", "tiny", "tuned")):
        plain, paged = run(*arguments, "--json"), run(*arguments, "--json", "--html", "page.html")
        without_time = [re.sub(r'"elapsed_s": [0-9.]+', "", each.stdout) for each in (plain, paged)]
        assert without_time[0] == without_time[1]


def test_no_torch(tiny, start_python):
    code = (
        "import sys; from shardkit.cli import main\n"
        "for args in (['inspect', 'tiny'], ['verify', 'tiny'], ['diff', 'tiny', 'tiny']):\n"
        "    main([*args, '--html', 'page.html'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    start_python(code)


def test_the_files_of_pages_are_in_the_package():
    """Whatever is not Python is installed only if pyproject.toml names it."""
    root = Path(shardkit.__file__).parent
    named = re.search(r"^shardkit = \[(.*)\]", (root.parent / "pyproject.toml").read_text(), re.M).group(1)
    patterns = json.loads(f"[{named}]")
    others = [path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {"page.css", "page.js"} <= {path.name for path in others}
    assert all(any(fnmatch(str(path.relative_to(root)), each) for each in patterns) for path in others)
