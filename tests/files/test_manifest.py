"""shardkit.json: docs/format.md, the JSON schema and the types say the same; errors name the field."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from shardkit.errors import IntegrityError, SourceError
from shardkit.files import manifest
from tests.files import manifest_schema

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
HEADINGS = {
    manifest.Presharded: "### Manifest: `shardkit.json`",
    manifest.SavedState: "## A saved training state",
    manifest.HubModel: "### Manifest of a Hub model",
    manifest.FileList: "## A manifest of files",
}
CONTENTS: dict[str, dict[str, Any]] = {
    "presharded": {
        "tool": {"name": "shardkit", "version": "0"},
        "source": {"files": [{"name": "model.safetensors", "size_bytes": 10, "crc32": 1}]},
        "mesh": {
            "axes": [{"name": "dp_shard", "size": 1, "role": "shard"}],
            "world_size": 1,
            "num_shards": 1,
        },
        "layout": {"origin": "declared", "policy": "auto"},
        "units": [{"path": "", "class": None}],
        "ties": [["a.w", "b.w"]],
        "key_rules": [],
        "derived": [],
        "dtype": "keep",
        "digest": "crc32",
        "omitted": [{"name": "x", "reason": "unused"}],
        "tensors": {
            "a.w": {
                "dtype": "float32",
                "shape": [2, 3],
                "placements": ["S(0)"],
                "unit": 0,
                "buffer": False,
                "source": {"name": "a.w", "dtype": "bfloat16"},
                "crc32": 7,
            }
        },
        "files": [
            {
                "name": "__0_0.distcp",
                "size": 5,
                "crc32": 2,
                "chunks": {"name": "__0_0.chunks.json", "size": 3, "crc32": 4},
            }
        ],
        "metadata": {"name": ".metadata", "size": 1, "crc32": 3, "sha256": "0" * 64},
    },
    "checkpoint": {
        "kind": "checkpoint",
        "tool": {"name": "shardkit", "version": "0"},
        "model_class": "Model",
        "world_size": 2,
        "meshes": ["dp_shard=2"],
        "units": [{"path": "layers.0", "class": "Layer"}],
        "ties": [],
        "key_rules": [["model.", ""]],
        "files": [{"name": "__0_0.distcp", "size": 5}],
    },
    "hub": {
        "kind": "hub",
        "tool": {"name": "shardkit", "version": "0"},
        "layout": "dcp",
        "writer": "torch",
        "weights": "model",
        "holds": "model",
        "root": "",
        "key_rules": [["_orig_mod", 3], ["a.", "b.", 2]],
        "ties": [["a", "b"]],
        "dtype": "keep",
        "digest": "none",
        "tensors": {"a": {"dtype": "float32", "shape": [], "source": {"name": "a", "dtype": "float32"}}},
        "files": [{"name": "model.safetensors", "size": 5, "crc32": None}],
        "others": [],
    },
    "files": {
        "kind": "files",
        "tool": {"name": "shardkit", "version": "0"},
        "folders": ["optimizer_0"],
        "files": [{"name": "optimizer_0/shardkit.json", "size": 5, "crc32": 1, "extents": [[0, 4, 9]]}],
        "unlisted": ["link"],
    },
}


def parsed(content: dict[str, Any]) -> manifest.Manifest:
    return manifest.parse(manifest.sign({"format": 1, **content}), manifest.NAME)


@pytest.mark.parametrize("kind", CONTENTS)
def test_what_is_read_is_written_again(kind: str) -> None:
    data = manifest.sign({"format": 1, **CONTENTS[kind]})
    found = manifest.parse(data, manifest.NAME)
    assert found.kind == kind
    assert manifest.dump(found) == data


def test_keys_of_later_versions_are_passed_over() -> None:
    content = CONTENTS["checkpoint"]
    assert dataclasses.replace(parsed({**content, "meshes_of": {}}), crc32=None) == dataclasses.replace(
        parsed(content), crc32=None
    )


def changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    content = json.loads(json.dumps(CONTENTS["presharded"]))
    here = content
    for step in path[:-1]:
        here = here[step]
    if value is None:
        del here[path[-1]]
    else:
        here[path[-1]] = value
    return dict(content)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            ("tensors", "a.w", "shape", 1),
            "x",
            'tensors["a.w"].shape[1]: expected an integer from 0 on, found "x"',
        ),
        (("tensors", "a.w", "shape", 1), True, "shape[1]: expected an integer from 0 on, found true"),
        (("tensors", "a.w", "shape", 0), -1, "shape[0]: expected an integer from 0 on, found -1"),
        (("tensors", "a.w", "shape", 0), 1 << 62, "shape[0]: expected an integer"),
        (
            ("tensors", "a.w", "dtype"),
            "float9",
            '.dtype: expected a dtype that shardkit knows, found "float9"',
        ),
        (
            ("tensors", "a.w", "placements"),
            ["P"],
            'placements[0]: expected a placement, "R", "S(dim)" or "SS(dim,factor)"',
        ),
        (("tensors", "a.w"), [1], 'tensors["a.w"]: expected an object, found a list of 1'),
        (("tensors", "a.w", "source", "name"), None, 'tensors["a.w"].source.name: it is missing'),
        (
            ("files", 0, "name"),
            "../x",
            'files[0].name: expected a file name without a directory, found "../x"',
        ),
        (("files", 0, "name"), "\ud800", "files[0].name: expected a file name without a directory"),
        (("files", 0, "chunks", "crc32"), 1 << 32, "files[0].chunks.crc32: expected a CRC-32"),
        (("metadata", "sha256"), "0", 'metadata.sha256: expected a sha256 in hex, found "0"'),
        (("mesh", "axes", 0, "size"), 2.0, "mesh.axes[0].size: expected an integer from 0 on, found 2.0"),
        (("mesh",), None, "mesh: it is missing"),
        (("ties",), [["a", 3]], "ties[0][1]: expected text, found 3"),
        (("derived",), [{"name": "a"}], "derived[0].made_of: it is missing"),
        (("kind",), "other", "kind: expected one of presharded, checkpoint, hub, files"),
    ],
)
def test_errors_name_the_field(path: tuple[str | int, ...], value: object, said: str) -> None:
    with pytest.raises(SourceError) as caught:
        parsed(changed(path, value))
    assert said in caught.value.message
    assert not isinstance(caught.value, IntegrityError)


def test_a_file_name_may_have_bytes_that_are_no_text() -> None:
    name = os.fsdecode(b"__0_\xff.distcp")
    found = parsed(changed(("files", 0, "name"), name))
    assert next(file.name for file in manifest.all_files(found)) == name


def test_the_wrong_one_of_many_tensors_is_named() -> None:
    content = changed(("omitted",), [])
    tensor = content["tensors"]["a.w"]
    content["tensors"] = {f"t{number}": dict(tensor) for number in range(10_000)}
    content["tensors"]["t9876"]["shape"] = [2, -3]
    content["tensors"]["t9877"].pop("unit")
    with pytest.raises(SourceError) as caught:
        parsed(content)
    assert caught.value.problems == (
        'tensors["t9876"].shape[1]: expected an integer from 0 on, found -3',
        'tensors["t9877"].unit: it is missing',
    )
    content["tensors"]["t9876"]["shape"], content["tensors"]["t9877"]["unit"] = [5], 8
    found = manifest.all_tensors(parsed(content))
    assert list(found) == list(content["tensors"])
    assert found["t9876"].shape == (5,)
    assert dataclasses.replace(found["t9877"], unit=0) == found["t0"]


@pytest.mark.parametrize("content", ["presharded", "checkpoint", "hub", "files"])
def test_a_list_of_files_is_told_from_its_first_bytes(content: str, tmp_path: Path) -> None:
    assert not manifest.lists_files(str(tmp_path))
    (tmp_path / manifest.NAME).write_bytes(manifest.sign({"format": 1, **CONTENTS[content]}))
    assert manifest.lists_files(str(tmp_path)) == (content == "files")


def test_all_that_is_wrong_comes_at_once_and_not_without_end() -> None:
    content = changed(("mesh",), None)
    content["files"] = 3
    with pytest.raises(SourceError, match="2 fields") as caught:
        parsed(content)
    assert caught.value.problems == ("mesh: it is missing", "files: expected a list, found 3")
    content["tensors"] = {f"{number}\x1b": 1 for number in range(10_000)}
    with pytest.raises(SourceError) as caught:
        parsed(content)
    assert 100 <= len(caught.value.problems) < 110
    assert all(problem.isprintable() for problem in caught.value.problems)


def section(heading: str) -> str:
    level = heading.split()[0]
    _, _, rest = DOC.partition(f"\n{heading}\n")
    assert rest, heading
    return re.split(rf"\n#{{1,{len(level)}}} ", rest)[0]


def keys_of(kind: Any) -> set[str]:
    return {field.metadata.get("key", field.name) for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", manifest.KINDS)
def test_docs_have_the_keys_of_the_types(kind: Any) -> None:
    text = section(HEADINGS[kind])
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    shared = {
        key
        for said in re.findall(r"((?:`\w+`[,\sand]*)+)are those of", text)
        for key in re.findall(r"\w+", said)
    }
    own = {"format", *(() if kind is manifest.Presharded else ("kind",))}
    if f'"kind": "{kind.kind}"' in text:
        listed.add("kind")
    assert listed | (shared - {"and"}) == keys_of(kind) | own


def records_below(kind: Any, found: set[Any]) -> set[Any]:
    for hint in get_type_hints(kind).values():
        stack = [hint]
        while stack:
            part = stack.pop()
            stack += get_args(part)
            if dataclasses.is_dataclass(part) and part not in found:
                found.add(part)
                records_below(part, found)
    return found


@pytest.mark.parametrize("kind", manifest.KINDS)
def test_docs_have_the_keys_of_every_part(kind: Any) -> None:
    text = section(HEADINGS[manifest.Presharded]) + section(HEADINGS[kind])
    lacking = {
        f"{part.__name__}.{key}"
        for part in records_below(kind, set())
        for key in keys_of(part)
        if f"`{key}`" not in text
    }
    assert not lacking


def test_the_schema_is_that_of_the_types() -> None:
    assert manifest_schema.PATH.read_text() == manifest_schema.text(), "python -m tests.files.manifest_schema"
