"""docs/schemas describes what `--json` prints."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import jsonschema
import pytest

import shardkit

ROOT = Path(__file__).parents[2]
SCHEMAS = runpy.run_path(str(ROOT / "scripts" / "schemas.py"))

# command -> what is typed, in a directory with the model `tiny` and what the commands before have made.
COMMANDS = {
    "preshard": ["preshard", "tiny", "sharded", "--world-size", "2", "--layout", "declared"],
    "inspect": ["inspect", "sharded", "--tensors"],
    "verify": ["verify", "sharded", "--full"],
    "consolidate": ["consolidate", "sharded", "hub"],
    "reshard": ["reshard", "sharded", "third", "--world-size", "3"],
    "diff": ["diff", "tiny", "hub", "--stats"],
    "env": ["env"],
    "latest": ["latest", "sharded", "--all"],
    "watch": ["watch", "runs", "watched", "--once"],
    "status": ["status", "parts"],
    "abort": ["abort", "parts"],
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
