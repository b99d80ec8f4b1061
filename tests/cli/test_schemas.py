"""docs/schemas describes what `--json` prints, and results show themselves in a notebook."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

import shardkit
from shardkit.cli import _LINES
from shardkit.core.result import Result

ROOT = Path(__file__).parents[2]
SCHEMAS = runpy.run_path(str(ROOT / "scripts" / "schemas.py"))

# command -> what is typed, in a directory with the model `tiny` and what the commands before have made.
COMMANDS = {
    "preshard": ["preshard", "tiny", "sharded", "--world-size", "2", "--layout", "declared"],
    "inspect": ["inspect", "sharded", "--tensors"],
    "manifest": ["manifest", "tiny"],
    "verify": ["verify", "sharded", "--full"],
    "consolidate": ["consolidate", "sharded", "hub"],
    "reshard": ["reshard", "sharded", "third", "--world-size", "3"],
    "diff": ["diff", "tiny", "hub", "--stats"],
    "keys": ["keys", "show", "tiny"],
    "cache": ["cache"],
    "env": ["env"],
    "gc": ["gc", ".", "--dry-run"],
    "status": ["status", "parts"],
    "commit": ["commit", "parts"],
    "error": ["inspect", "gone"],
}


def test_what_lies_in_docs_is_made_from_the_types():
    found = {path.name: path.read_text() for path in (ROOT / "docs/schemas").iterdir()}
    assert found == SCHEMAS["texts"](), "python scripts/schemas.py"


def test_the_reference_is_made_from_the_commands_and_the_docstrings():
    reference = runpy.run_path(str(ROOT / "scripts" / "reference.py"))
    made, whole = reference["texts"](), reference["site_page"]()
    assert {name: (ROOT / "docs" / name).read_text() for name in made} == made, "python scripts/reference.py"
    names = [name for name in shardkit.__all__ if not name.startswith("_")]
    assert sorted(names) == sorted(name for group in reference["_GROUPS"].values() for name in group)
    assert not [name for name in names if f"### {name}\n" not in whole]


def test_every_command_prints_what_its_schema_says(run, tiny, subtests):
    for part in ("1/2", "2/2"):  # the second makes the output, and commit finds it there
        run("preshard", "tiny", "parts", "--world-size", "2", "--layout", "declared", "--part", part)
    damaged = run("diff", "tiny", "parts", "--json")
    assert damaged.exit_code == 0
    for command, typed in COMMANDS.items():
        with subtests.test(command):
            printed = json.loads(run(*typed, "--json").stdout)
            schema = json.loads((ROOT / f"docs/schemas/{command}.schema.json").read_text())
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.validate(printed, schema)
            assert set(printed) <= set(schema["properties"])


def test_a_schema_refuses_what_is_not_so(run, tiny):
    printed = json.loads(run("inspect", "tiny", "--json").stdout)
    schema = json.loads((ROOT / "docs/schemas/inspect.schema.json").read_text())
    for wrong in ({"num_tensors": "4"}, {"kind": "other"}, {"files": [{"name": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(printed | wrong, schema)


@pytest.mark.parametrize(
    "typed",
    [
        "inspect {}",
        "preshard {} out --world-size 2 --wrap none -n",
        "verify {}",
        "diff {} {}",
        "manifest {} -n",
    ],
)
def test_a_result_in_a_notebook_is_what_the_command_prints_and_inert(run, tiny, typed, monkeypatch):
    name = "<script>&"
    tiny.rename(tiny.parent / name)
    printed = run(*typed.format(name, name).split()).stdout.splitlines()
    verb, *words = typed.split()
    paths = [name if word == "{}" else word for word in words if not word.startswith("-")]
    if verb == "preshard":
        result = shardkit.preshard(name, "out", world_size=2, wrap="none", dry_run=True)
    elif verb == "manifest":
        result = shardkit.write_manifest(name, dry_run=True)
    else:
        result = getattr(shardkit, verb)(*paths)
    html = result._repr_html_()
    page = ElementTree.fromstring(html)
    assert (page.tag, list(page)) == ("pre", [])
    lines = page.text.splitlines()
    assert [_steady(line) for line in lines[: len(printed)]] == list(map(_steady, printed))
    assert all(line.startswith(("note: ", "warning: ")) for line in lines[len(printed) :])


def _steady(line):
    return re.sub(r"(time|read|free disk) .*", r"\1", line)


def test_every_result_of_a_command_has_lines():
    for name in shardkit.__all__:
        getattr(shardkit, name)

    def kinds(of):
        return {each for direct in of.__subclasses__() for each in (direct.__name__, *kinds(direct))}

    for kind in kinds(Result) - {"WriteResult", "ResolvedCheckpoint"}:
        module, function = _LINES[kind].split(".")
        assert callable(getattr(import_module(f"shardkit.cli.{module}"), function))


def test_a_result_without_a_command_is_a_small_table_that_is_inert(tiny):
    tiny.rename(tiny.parent / "<script>&")
    html = shardkit.resolve_checkpoint("<script>&")._repr_html_()
    table = ElementTree.fromstring(html.replace("<br>", "<br/>"))
    cells = {row[0].text: "".join(row[1].itertext()) for row in table.findall("tr")}
    assert cells["path"].endswith("<script>&")
    assert "" not in cells.values()
    assert "step" not in cells


def test_a_notebook_is_told_of_arguments(tiny):
    result = replace(shardkit.inspect("tiny"), warnings=("name it with --base",))
    assert "\nwarning: name it with base</pre>" in result._repr_html_()
    assert result.to_json()["warnings"] == ("name it with --base",)
