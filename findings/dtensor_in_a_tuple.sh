#!/bin/bash
# A DTensor in a tuple is saved by torch.distributed.checkpoint as the rows of one rank. In a list it is saved whole.
#
# DCP looks for tensors in dicts and lists only. Anything else, such as a tuple, is pickled by each rank under the same name,
# and one rank's pickle is kept. Neither save nor load raises an error or prints a warning: after loading on the same two
# ranks, one of them has the other's rows, and the other half of the tensor is in no file.
#
# Output seen with torch 2.13.0, 2 ranks with gloo:
#   list:  rank 0 saved [0, 1, 2, 3] and loaded [0, 1, 2, 3]; rank 1 saved [4, 5, 6, 7] and loaded [4, 5, 6, 7]
#   tuple: rank 0 saved [0, 1, 2, 3] and loaded [4, 5, 6, 7]; rank 1 saved [4, 5, 6, 7] and loaded [4, 5, 6, 7]
# Which rank's rows are kept may differ; that it is one rank's is what counts.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$place/save.py" <<'PYTHON'
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
kept = {}
for form in (list, tuple):
    directory = f"{sys.argv[1]}-{form.__name__}"
    state = {"state": form([distribute_tensor(torch.arange(8), mesh, [Shard(0)])])}
    saved = state["state"][0].to_local().tolist()
    dcp.save(state, checkpoint_id=directory)
    state = {"state": form([distribute_tensor(torch.zeros(8, dtype=torch.int64), mesh, [Shard(0)])])}
    dcp.load(state, checkpoint_id=directory)
    loaded = state["state"][0].to_local().tolist()
    both = [None, None]
    dist.all_gather_object(both, (saved, loaded))
    kept[form] = both
if rank == 0:
    print("torch", torch.__version__)
    for form, both in kept.items():
        lines = [f"rank {each} saved {saved} and loaded {loaded}" for each, (saved, loaded) in enumerate(both)]
        print(f"{form.__name__ + ':':6}", "; ".join(lines))
    is_whole = all(saved == loaded for saved, loaded in kept[list])
    is_one = kept[tuple][0][1] == kept[tuple][1][1]
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if rank or (is_whole and is_one) else 1)
PYTHON
"$place/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 "$place/save.py" "$place/saved" 2> "$place/log" || {
    tail -n 20 "$place/log"
    exit 1
}
