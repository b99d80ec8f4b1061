"""Every fuzz target by its name."""

from __future__ import annotations

import importlib

from tests.fuzz.target import Target

TARGETS = {
    "safetensors": "target_safetensors",
    "sharding_info": "target_safetensors",
    "metadata": "target_metadata",
    "metadata_runs": "target_metadata",
    "record": "target_record",
    "tensor_pickle": "target_record",
    "record_scan": "target_record",
    "torch_file": "target_file",
    "bin_file": "target_file",
    "inert_pickle": "target_file",
    "index": "target_json",
    "manifest": "target_json",
    "chunk_list": "target_json",
    "rename": "target_text",
    "wrap": "target_text",
    "mesh": "target_text",
    "size": "target_text",
    "placements": "target_text",
}
"""Name -> the module that has it."""


def load(name: str) -> Target:
    """Return a target; its module imports torch and others."""
    target: Target = importlib.import_module(f"tests.fuzz.{TARGETS[name]}").TARGETS[name]
    return target
