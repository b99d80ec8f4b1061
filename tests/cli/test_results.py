"""How results show themselves in Python: a line, what the command prints, a notebook; and the bar of a call."""

from __future__ import annotations

import os
import pty
import re
import termios
from dataclasses import replace
from importlib import import_module
from xml.etree import ElementTree

import pytest

import shardkit
from shardkit.cli import _LINES
from shardkit.core.result import Result
from shardkit.training.save import SaveResult
from tests.operations.consolidate.checkpoints import hub, load

# call -> its line
LINES = {
    "inspect('tiny')": "<InspectResult: tiny: Hub model, safetensors>",
    "preshard('tiny', 'out', world_size=2, layout='declared')": "<PreshardResult: wrote {}/out>",
    "preshard('tiny', 'new', world_size=2, layout='declared', dry_run=True)": (
        "<PreshardResult: dry run: nothing was written to {}/new>"
    ),
    "preshard('tiny', 'parts', world_size=2, layout='declared', part='1/2')": (
        "<PreshardResult: part 1/2 of {}/parts>"
    ),
    "status('parts')": "<StatusResult: {}/parts is not there>",
    "reshard('out', 'third', world_size=3)": "<ReshardResult: wrote {}/third>",
    "consolidate('out', 'hub')": "<ConsolidateResult: wrote {}/hub>",
    "commit('out')": "<CommitResult: {}/out is there>",
    "verify('out', full=True)": "<VerifyResult: out: no problem found>",
    "diff('tiny', 'hub')": "<DiffResult: equal>",
    "diff('tiny', 'other')": "<DiffResult: 2 of 4 tensors differ>",
    "abort('out')": "<AbortResult: {}/out is there>",
    "latest('out')": "<LatestResult: out>",
    "latest('out', list_all=True)": "<LatestResult: out: 1 checkpoint, 1 whole>",
    "resolve_checkpoint('out')": "<ResolvedCheckpoint: out>",
    "environment()": "<Environment: shardkit *>",
}


@pytest.fixture
def other(tiny):
    """A model like `tiny`, of which two tensors differ."""
    tensors = load(tiny)
    changed = {name: tensors[name] + 1 for name in ("embed.weight", "steps")}
    return hub(tiny.parent / "other", tensors | changed, None)


def test_the_repr_of_a_result_is_one_line(other, subtests):
    for call, line in LINES.items():
        with subtests.test(call):
            found = repr(eval(f"shardkit.{call}"))
            wanted = line.format(other.parent)
            assert re.fullmatch(re.escape(wanted).replace(re.escape("*"), ".*"), found)
            assert len(found) < 120 + len(str(other.parent))


def test_no_result_shows_all_of_its_fields():
    assert repr(SaveResult(path="/a/b", num_files=2, file_bytes=3 << 20)) == (
        "<SaveResult: saved /a/b: 2 files, 3.0 MiB>"
    )
    for kind in kinds(Result):
        assert kind.__repr__ is Result.__repr__, kind


TYPED = [
    "inspect {}",
    "preshard {} out --world-size 2 --wrap none -n",
    "verify {}",
    "diff {} {}",
]


@pytest.mark.parametrize("typed", TYPED)
def test_a_result_as_text_is_what_the_command_prints_and_inert_in_a_notebook(run, tiny, typed):
    name = "<script>&"
    tiny.rename(tiny.parent / name)
    printed = run(*typed.format(name, name).split()).stdout.splitlines()
    result = called(typed, name)
    lines = str(result).splitlines()
    assert [_steady(line) for line in lines[: len(printed)]] == list(map(_steady, printed))
    assert all(line.startswith(("note: ", "warning: ")) for line in lines[len(printed) :])
    page = ElementTree.fromstring(result._repr_html_())
    if page.tag == "div":  # with the page, in a frame of which the notebook is safe
        page, frame = page
        assert (frame.tag, frame.get("sandbox")) == ("iframe", "allow-scripts")
        assert frame.get("srcdoc").startswith("<!doctype html>")
    has_page = typed.split()[0] in ("inspect", "diff")
    assert has_page == ("frame" in locals())
    assert (page.tag, list(page), _steady(page.text)) == ("pre", [], _steady(str(result)))
    assert "white-space: pre-wrap" in page.get("style")  # a long line does not run off the page


def called(typed, name):
    verb, *words = typed.split()
    if verb == "preshard":
        return shardkit.preshard(name, "out", world_size=2, wrap="none", dry_run=True)
    return getattr(shardkit, verb)(*(name for word in words if word == "{}"))


def _steady(line):
    return re.sub(r"(time|read|free disk) .*", r"\1", line)


def kinds(of):
    for name in shardkit.__all__:
        getattr(shardkit, name)
    return {each for direct in of.__subclasses__() for each in (direct, *kinds(direct))}


def test_every_result_of_a_command_has_lines():
    names = {kind.__name__ for kind in kinds(Result)}
    for name in names - {"DrawnResult", "WriteResult", "ResolvedCheckpoint", "SaveResult"}:
        module, function = _LINES[name].split(".")
        assert callable(getattr(import_module(f"shardkit.cli.{module}"), function))


def test_a_result_without_a_command_lists_what_it_has_and_is_inert(tiny):
    tiny.rename(tiny.parent / "<script>&")
    result = shardkit.resolve_checkpoint("<script>&")
    assert str(result) == os.fspath(result)  # it stands for its path
    page = ElementTree.fromstring(result._repr_html_())
    first, *rows = page.text.splitlines()
    assert first.endswith("<script>&")
    assert "  format  hub" in rows
    assert not [row for row in rows if row.split()[0] == "step"]


def test_a_notebook_shows_warnings(tiny):
    result = replace(shardkit.inspect("tiny"), warnings=("name it with --base",))
    assert "\nwarning: name it with --base</pre>" in result._repr_html_()
    assert result.to_json()["warnings"] == ("name it with --base",)


CALL = "import shardkit; shardkit.preshard('tiny', 'out', world_size=2, layout='declared'{})"
KERNEL = (
    "import sys, types; kernel = types.SimpleNamespace(kernel=object())\n"
    "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=lambda: kernel)\n"
)


def on_a_terminal(start, script, **env):
    """Return what a call in Python shows on a terminal."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))
    process = start("-c", script, stdout=its, stderr=its, env={"TERM": "xterm", **env})
    os.close(its)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0, shown
    return shown.decode()


def test_a_call_on_a_terminal_shows_a_bar(start, tiny):
    assert "preshard: 100%" in on_a_terminal(start, CALL.format(""))


@pytest.mark.parametrize(
    ("more", "env"),
    [(", progress=False", {}), ("", {"SHARDKIT_NO_PROGRESS": "1"})],
    ids=["False", "variable"],
)
def test_it_shows_none_where_nobody_wants_it(start, tiny, more, env):
    assert on_a_terminal(start, CALL.format(more), **env) == ""


@pytest.mark.parametrize(("before", "shows"), [("", False), (KERNEL, True)], ids=["script", "notebook"])
def test_without_a_terminal_only_a_notebook_has_a_bar(ended, tiny, before, shows):
    code, out, err = ended("-c", before + CALL.format(""), env={"SHARDKIT_NO_PROGRESS": "0"})
    assert (code, out, "preshard: 100%" in err) == (0, "", shows)
    assert bool(err) == shows
