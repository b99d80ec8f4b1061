"""`shardkit env`: versions, and no secrets."""

from __future__ import annotations

import contextlib
import json
import sys
from importlib import metadata

import pytest

import shardkit
from shardkit.operations import environment


def test_human_and_json_say_the_same(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/cache")
    monkeypatch.setenv("HF_ENDPOINT", "https://user:secret@mirror/")
    human, document = run("env"), run("env", "--json")
    assert "secret" not in human.output + document.output
    content = json.loads(document.stdout)
    assert content["huggingface"]["HF_TOKEN"] == "(set)"
    assert content["huggingface"]["HF_HOME"] == "/cache"
    assert content["huggingface"]["HF_ENDPOINT"] == "https://...@mirror/"
    assert isinstance(content["memory_bytes"], int)
    rows = dict(line.strip().split(maxsplit=1) for line in human.stdout.splitlines())
    assert rows["shardkit"] == content["shardkit"] == shardkit.__version__
    assert rows["torch"] == content["packages"]["torch"]
    assert rows["HF_TOKEN"] == "(set)"


def test_missing_package(run, monkeypatch):
    monkeypatch.setattr("shardkit.operations.environment._PACKAGES", ("no-such-package",))
    monkeypatch.delenv(
        "HF_HUB_DISABLE_PROGRESS_BARS", raising=False
    )  # the longest name: it widens the column
    assert "no-such-package  not installed" in run("env").stdout
    assert json.loads(run("env", "--json").stdout)["packages"] == {"no-such-package": None}


def test_versions_are_those_of_importlib_metadata(monkeypatch, tmp_path):
    for name in environment._PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            assert environment.package_version(name) == metadata.version(name)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(tmp_path)])
    for version in ("1.0", "2.0"):  # one of them was left behind: its METADATA decides
        (tmp_path / f"no_such-{version}.dist-info").mkdir()
        (tmp_path / f"no_such-{version}.dist-info" / "METADATA").write_text("Name: no-such\nVersion: 9.0\n")
        assert environment.package_version("no-such") == ("1.0" if version == "1.0" else "9.0")


@pytest.mark.parametrize(
    ("version", "side"),
    [
        ("2.5.1", "older"),
        ("2.6.0+cu124", None),
        ("2.15.3", None),
        ("2.16.0a0+git1", "newer"),
        ("3.0.0", "newer"),
    ],
)
def test_torch_that_was_not_tried_is_a_note(run, monkeypatch, version, side):
    monkeypatch.setattr("shardkit.operations.environment.package_version", lambda name: version)
    expected = [f"torch {version} is {side} than what shardkit was tried with, 2.6 to 2.15"] if side else []
    assert json.loads(run("env", "--json").stdout)["notes"] == expected
    assert [
        line.split(maxsplit=1)[1] for line in run("env").stdout.splitlines() if "note" in line.split()[0]
    ] == expected
