"""Whose a file is that lies where an output goes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardkit.files import manifest
from shardkit.formats.owned import (
    Claim,
    OutputKind,
    Owner,
    RunFiles,
    find_foreign,
    is_text,
    owner_of,
    replacement_refusal,
)

OURS, UNCHANGED, NOBODYS, PERSONS = Owner.OURS, Owner.OURS_UNCHANGED, Owner.NOBODYS, Owner.PERSONS
LEFT_BEHIND = (
    ".DS_Store",
    ".nfs000000000000abcd00000001",
    ".ipynb_checkpoints/notes-checkpoint.ipynb",
    "__pycache__/modeling.cpython-312.pyc",
    ".gitattributes",
    ".cache/huggingface/download/model.safetensors.metadata",
    "._model.safetensors",
    ".fuse_hidden0000000100000001",
)


def claim(kind: OutputKind, *, listed: tuple[str, ...] = (), by_format: bool = False) -> Claim:
    return Claim(
        kind=kind,
        listed=listed,
        by_format=by_format,
        folders=("2_Dense",),
        run_names=("2_Dense/whole.words",),
        is_stored=False,
    )


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("model.safetensors", OURS),
        ("model-00001-of-00002.safetensors", OURS),
        ("model-000001-of-000002.safetensors", OURS),
        ("model.safetensors.index.json", OURS),
        ("adapter_model.safetensors", OURS),
        ("adapter_config.json", OURS),
        ("config.json", OURS),
        ("generation_config.json", OURS),
        ("tokenizer.json", OURS),
        ("tokenizer.model", OURS),
        ("merges.txt", OURS),
        ("preprocessor_config.json", OURS),
        ("additional_chat_templates/tool.jinja", OURS),
        ("qformer_tokenizer/tokenizer.json", OURS),
        ("modules.json", OURS),
        ("2_Dense/model.safetensors", OURS),
        ("shardkit.json", OURS),
        ("README.md", UNCHANGED),
        ("LICENSE", UNCHANGED),
        ("NOTICE.txt", UNCHANGED),
        ("modeling_x.py", UNCHANGED),
        ("tokenization_x.py", UNCHANGED),
        ("2_Dense/README.md", UNCHANGED),
        ("2_Dense/whole.words", OURS),
        ("notes.txt", PERSONS),
        ("2_Dense/notes.txt", PERSONS),
        ("qformer_tokenizer/model.safetensors", PERSONS),
        ("qformer_tokenizer/config.json", PERSONS),
        ("optimizer.pt", PERSONS),
        ("pytorch_model.bin", PERSONS),
        ("lora.safetensors", PERSONS),
        ("logs/events.out", PERSONS),
        ("eval_results.json", PERSONS),
        (".git/HEAD", PERSONS),
        (".cache/pip/x", PERSONS),
        (".metadata", PERSONS),
        *((name, NOBODYS) for name in LEFT_BEHIND),
    ],
)
def test_of_a_hub_model_without_a_manifest(name: str, to: Owner) -> None:
    assert owner_of(name, claim(OutputKind.HUB, by_format=True)) is to


@pytest.mark.parametrize("kind", OutputKind)
@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("config.json", OURS),
        ("scheduler.pt", OURS),
        ("args.yaml", OURS),
        ("README.md", UNCHANGED),
        ("tokenizer.json", PERSONS),
        ("__9_0.distcp", PERSONS),
        ("model.safetensors", PERSONS),
        ("shardkit.json", OURS),
        *((name, NOBODYS) for name in LEFT_BEHIND),
    ],
)
def test_with_a_manifest_ours_is_what_it_lists(kind: OutputKind, name: str, to: Owner) -> None:
    listed = ("config.json", "scheduler.pt", "args.yaml", "README.md")
    assert owner_of(name, claim(kind, listed=listed)) is to


@pytest.mark.parametrize(
    ("name", "to"),
    [
        (".metadata", OURS),
        ("__0_0.distcp", OURS),
        ("__0_0.chunks.json", OURS),
        ("data-0123456789abcdef/__0_0.distcp", OURS),
        ("logs/__0_0.distcp", PERSONS),
        ("tokenizer.json", PERSONS),
        ("model.safetensors", PERSONS),
    ],
)
def test_of_a_dcp_directory_without_a_manifest(name: str, to: Owner) -> None:
    assert owner_of(name, claim(OutputKind.SHARDED, by_format=True)) is to


def test_what_people_write() -> None:
    texts = ["README.md", "readme.txt", "LICENSE-MIT", "NOTICE", "a/b.py", "tokenization.py"]
    assert [name for name in texts if not is_text(name)] == []
    others = ["vocab.txt", "merges.txt", "config.json", "latest", "template.jinja", "args.yaml", "run.sh"]
    assert [name for name in others if is_text(name)] == []


def hub(path: Path, others: Mapping[str, str]) -> Path:
    for name, text in {"model.safetensors": "w", "config.json": "{}", **others}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def found(path: Path, made: RunFiles | None) -> list[str]:
    return find_foreign(str(path), OutputKind.HUB, made)


def test_texts_are_ours_if_they_are_what_the_run_writes(tmp_path: Path) -> None:
    path = hub(tmp_path, {"README.md": "by hand", "handler.py": "x", "LICENSE": "MIT"})
    made = {"README.md": lambda: b"card", "LICENSE": lambda: b"MIT"}
    wrote = "it is not what this run writes there"
    assert found(path, made) == [f"README.md: {wrote}", f"handler.py: {wrote}"]
    assert found(path, None) == []  # not known yet


def test_whatever_else_lies_there_is_named(tmp_path: Path) -> None:
    path = hub(
        tmp_path / "out",
        dict.fromkeys(LEFT_BEHIND, "") | {"notes.txt": "", "logs/a/1": "", ".cache/mine": ""},
    )
    (path / "empty").mkdir()
    (path / "link").symlink_to(tmp_path)
    assert found(path, {}) == ["empty/", "link/", "logs/", "notes.txt", ".cache/mine"]


def test_without_weights_a_tokenizer_is_somebodys(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    assert found(tmp_path, {}) == ["tokenizer.json"]


def listing(path: Path) -> None:
    """Write the manifest of a Hub model that lists all that lies there."""
    files = [
        manifest.describe_bytes(each.name, each.read_bytes(), digest=True, sha256=False)
        for each in path.iterdir()
    ]
    weights = [each for each in files if each.name == "model.safetensors"]
    content = manifest.HubModel(
        tool=manifest.TOOL,
        layout="dcp",
        writer="torch",
        weights="model",
        holds="model",
        root="",
        key_rules=(),
        ties=(),
        dtype="keep",
        digest="crc32",
        tensors={},
        files=tuple(weights),
        others=tuple(each for each in files if each not in weights),
    )
    (path / manifest.NAME).write_bytes(manifest.dump(content))


def test_a_listed_file_is_ours_whoever_edited_it_and_a_listed_text_if_the_run_writes_it(
    tmp_path: Path,
) -> None:
    path = hub(tmp_path, {"README.md": "card", "tokenizer.json": "{}"})
    listing(path)
    (path / "config.json").write_text(json.dumps({"edited": True}))
    assert found(path, {"README.md": lambda: b"card"}) == []
    for made in ({}, {"README.md": lambda: b"another"}):
        assert found(path, made) == ["README.md: it is not what this run writes there"]


def test_the_hint_moves_the_first_of_them(tmp_path: Path) -> None:
    path = hub(tmp_path / "a b", {"README.md": "by hand", "config.json": "{}"})
    refused = replacement_refusal(str(path), str(path), OutputKind.HUB, {})
    assert refused is not None
    command = re.search("`(.*)`", str(refused.hint))
    assert command is not None
    subprocess.run(command[1], shell=True, check=True)
    assert (tmp_path / "a b-README.md").read_text() == "by hand"
    assert replacement_refusal(str(path), str(path), OutputKind.HUB, {}) is None


def test_an_early_manifest_lists_weights_alone(tmp_path: Path) -> None:
    path = hub(tmp_path, {"tokenizer.json": "{}"})
    listing(path)
    content = json.loads((path / manifest.NAME).read_text())
    del content["others"]
    (path / manifest.NAME).write_bytes(manifest.sign(content))
    assert found(path, {}) == []


def test_a_manifest_of_another_kind_claims_nothing(tmp_path: Path) -> None:
    path = hub(tmp_path, {})
    listing(path)
    assert find_foreign(str(path), OutputKind.SHARDED, {}) == ["config.json", "model.safetensors"]


def test_a_damaged_manifest_claims_nothing_and_is_ours(tmp_path: Path) -> None:
    path = hub(tmp_path, {"notes.txt": "", "shardkit.json": "half of it"})
    assert found(path, {}) == ["notes.txt"]
