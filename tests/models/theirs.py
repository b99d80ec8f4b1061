"""What transformers' own FSDP loading makes of the models: `python -m tests.models.theirs [NAME...]`.

`from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=2))` on two gloo ranks. Every tensor that it loads is
held against what plain `from_pretrained` gives, bit for bit. `make models` holds the three phases against the same.
What it came to stands in theirs.json, which `python -m tests.models --docs` puts into docs/models.md; with names, only
their entries are made anew.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from shardkit.core.text import listed
from tests.models.table import THEIRS
from tests.models.zoo import ZOO, from_pretrained, make_hub
from tests.models.zoo_world import SIZE, difference, live_tensors
from tests.worlds.processes import end_world, fork

_HANGS_S = 300.0


def make(name: str, home: Path) -> None:
    """Make a model, and what plain from_pretrained loads."""
    make_hub(ZOO[name], home / "hub")
    model = from_pretrained(ZOO[name], home / "hub")
    torch.save({each: tensor.clone() for each, tensor in live_tensors(model).items()}, home / "tensors.pt")


def load(rank: int, name: str, home: Path) -> None:
    """Load it as one rank, and note what differs."""
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    store, patience = f"file://{home}/store", timedelta(seconds=_HANGS_S)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE, timeout=patience)
    config = DistributedConfig(fsdp_size=SIZE)
    model = from_pretrained(ZOO[name], home / "hub", distributed_config=config)
    found = {
        each: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for each, tensor in sorted(live_tensors(model).items())
    }
    expected = torch.load(home / "tensors.pt")
    wrong = [*(found.keys() ^ expected.keys())]
    wrong += [each for each in found.keys() & expected.keys() if difference(found[each], expected[each])]
    (home / f"rank{rank}.json").write_text(json.dumps({"wrong": sorted(wrong), "of": len(expected)}))
    end_world()


def outcome(name: str) -> str:
    """Return "right", how many tensors are wrong, or the error."""
    with tempfile.TemporaryDirectory() as out:
        home = Path(out)
        run(home, [partial(make, name, home)])
        if not (home / "tensors.pt").exists():
            raise SystemExit((home / "said0").read_text())
        run(home, [partial(load, rank, name, home) for rank in range(SIZE)])
        answers = [path for rank in range(SIZE) if (path := home / f"rank{rank}.json").exists()]
        if len(answers) < SIZE:
            return f"error: {error(home)}"
        first, *_ = found = [json.loads(path.read_text()) for path in answers]
        wrong = {each for answer in found for each in answer["wrong"]}
        return f"wrong: {len(wrong)} of {first['of']} tensors: {listed(sorted(wrong))}" if wrong else "right"


def run(home: Path, works: list[Callable[[], None]]) -> None:
    """Do all at once, each in a process of its own whose output is kept; what hangs is killed."""

    def quietly(log: Path, work: Callable[[], None]) -> None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()

    children = [fork(partial(quietly, home / f"said{at}", work)) for at, work in enumerate(works)]
    timer = threading.Timer(_HANGS_S, lambda: [os.kill(child, signal.SIGKILL) for child in children])
    timer.start()
    for child in children:
        os.waitpid(child, 0)
    timer.cancel()


def error(home: Path) -> str:
    """Return the line that says why a rank failed; the first rank's, unless that only lost its peer."""
    said = [line for rank in range(SIZE) for line in (home / f"said{rank}").read_text().splitlines()]
    errors = [line.strip() for line in said if re.match(r"(\w+\.)*\w*Error: ", line)]
    return next((line for line in errors if "gloo" not in line), (*errors, "it hung")[0])


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = sys.argv[1:]
    results = json.loads(THEIRS.read_text()) if names else {}
    models = results.setdefault("models", {})
    results |= {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    for name in names or ZOO:
        models[name] = outcome(name)
        print(f"{name}: {models[name]}", flush=True)
        THEIRS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
