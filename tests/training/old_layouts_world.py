"""Two gloo ranks start models from files in old layouts, and from what preshard made of them; then the way back.

    python old_layouts_world.py OUT

In it lie then, of each model, NAME (the Hub directory), NAME-pre (pre-sharded), NAME-run (saved by stock torch after
the three phases), NAME-out (consolidated), and results.json: what preshard and consolidate said.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.layout import traced
from shardkit.training.finalize import finalize
from shardkit.training.prepare import prepare
from shardkit.training.wrap import wrap
from tests.training import old_layouts
from tests.worlds.processes import end_world, fork, forked_trace, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZE = 2
MODES = (("", "direct"), ("", "broadcast"), ("-pre", "direct"))


def run(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=SIZE)
    mesh = init_device_mesh("cpu", (SIZE,))
    for name in old_layouts.OLD:
        judged, expected = old_layouts.judge(name, out / name)
        inputs = old_layouts.inputs(judged)
        with torch.no_grad():
            logits = judged(**inputs).logits
        for ending, strategy in MODES:
            ctx = prepare(str(out / name), str(out / f"{name}{ending}"))
            model = finalize(wrap(ctx.model, mesh, mixed_precision=None), ctx, strategy=strategy)
            state = get_model_state_dict(model)
            whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
            assert whole.keys() == expected.keys(), (name, ending, whole.keys() ^ expected.keys())
            wrong = [fqn for fqn, value in whole.items() if not torch.equal(value, expected[fqn])]
            assert not wrong, (name, ending, strategy, wrong)
            with torch.no_grad():
                assert torch.equal(model.eval()(**inputs).logits, logits), (name, ending, strategy)
        dcp.save({"model": state}, checkpoint_id=out / f"{name}-run")
    end_world()


def stock(name: str, out: Path) -> None:
    """What preshard wrote, by stock torch into the state dict of the live model; what it computes stays."""
    _, expected = old_layouts.judge(name, out / name)
    state = {fqn: torch.full_like(value, 7) for fqn, value in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads in a single process, as asked
        partial_load = dcp.DefaultLoadPlanner(allow_partial_load=name == "marian")
        dcp.load(state, checkpoint_id=out / f"{name}-pre", no_dist=True, planner=partial_load)
    wrong = {fqn for fqn, value in state.items() if not torch.equal(value, expected[fqn])}
    assert wrong == ({fqn for fqn in expected if "embed_positions" in fqn} if name == "marian" else set()), (
        name
    )


def back(name: str, out: Path) -> shardkit.ConsolidateResult:
    """What was saved becomes a Hub model with the base's names, and `from_pretrained` finds everything in it."""
    result = shardkit.consolidate(out / f"{name}-run", out / f"{name}-out", base=out / name)
    _, expected = old_layouts.judge(name, out / name)
    _, found = old_layouts.judge(name, out / f"{name}-out")
    assert all(torch.equal(found[fqn], value) for fqn, value in expected.items()), name
    return result


def main(out: Path) -> None:
    traced._spawn = forked_trace
    told = {}
    for name in old_layouts.OLD:
        old_layouts.write(name, out / name)
        told[name] = {
            "preshard": shardkit.preshard(out / name, out / f"{name}-pre", world_size=SIZE).to_json()
        }
        stock(name, out)
    wait([fork(partial(run, rank, out)) for rank in range(SIZE)])
    for name in old_layouts.OLD:
        told[name]["consolidate"] = back(name, out).to_json()
    (out / "results.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
