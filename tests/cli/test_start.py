"""What starting up imports: commands that move no tensor must not wait for torch."""

from __future__ import annotations

import json

import pytest

HEAVY = {"torch", "numpy", "tqdm", "huggingface_hub", "transformers", "safetensors"}

PROBE = """
import json, sys
import shardkit, shardkit.cli
try:
    shardkit.cli.main(json.loads(sys.argv[1]))
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def imported(start, *args):
    process = start("-c", PROBE, json.dumps(args))
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return HEAVY & set(json.loads(said.splitlines()[-1]))


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["preshard", "--help"], ["inspect", "tiny"], ["env"]]
)
def test_light(start, tiny, args):
    assert imported(start, *args) == set()


def test_inspect_of_checkpoints(start, run, tiny):
    run("preshard", "tiny", "out", "--world-size", "2", "--wrap", "none")
    assert imported(start, "inspect", "out") == set()
    (tiny.parent / "out" / "shardkit.json").unlink()
    assert imported(start, "inspect", "out", "--tensors", "--json") == set()
