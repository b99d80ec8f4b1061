"""Every architecture through everything, against transformers and stock torch.

    python zoo_world.py '{"out": OUT, "names": [...]}'

Imports once and forks: two workers that make the models and pre-shard them, two ranks of one gloo world that
load and save one after the other, two workers that consolidate and compare. Writes OUT/results.json:
{name: {step: what is wrong, as text; "" where nothing is; null where the step before it failed}}.
It is a script: `make zoo` runs it too, for the models that its command line names.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.errors import ShardkitError
from shardkit.layout import traced
from tests.models.architecture import Architecture
from tests.models.repos import REPOS
from tests.models.zoo import BROADCAST, ZOO, from_pretrained, is_quantised, make_hub
from tests.worlds.processes import fork, forked_trace, wait

torch.set_num_threads(1)

SIZE = 2
SHARDS = 4
"""Of the pre-sharded directory: more than there are ranks that load it."""

INDEX = "model.safetensors.index.json"

Step = Callable[[], object]


class Wrong(AssertionError):
    """Something is not what transformers makes of it."""


class Log:
    """What came of the steps of one model, in one process."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def step(self, name: str, work: Step) -> bool:
        """Do a step and remember what went wrong; False where something did."""
        try:
            work()
        except ShardkitError as error:
            self.found[name] = "\n".join([f"refused: {error.message}", *error.problems])
        except Wrong as error:
            self.found[name] = f"wrong: {error}"
        except (Exception, CheckpointException) as error:  # torch derives that from BaseException
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.found[name] = f"{type(error).__name__}: {error}\n{where.filename}:{where.lineno}"
        else:
            self.found[name] = ""
        return not self.found[name]


def reference(architecture: Architecture, hub: Path, out: Path) -> None:
    """Save what from_pretrained gives: every tensor that the model has, and what it answers."""
    model = from_pretrained(architecture, hub)
    tensors = {name: tensor.clone() for name, tensor in live_tensors(model).items()}
    torch.save(tensors, out / "tensors.pt")
    torch.save(answer(model, architecture, dtype=dtype_of(hub)), out / "answer.pt")


def dtype_of(hub: Path) -> torch.dtype:
    dtype: torch.dtype = transformers.AutoConfig.from_pretrained(hub).dtype
    return dtype


def live_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict, and the buffers that are not in it."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def answer(
    model: nn.Module, architecture: Architecture, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return every floating tensor of the output of a model's forward.

    Args:
        dtype: of floating inputs; None gives them as processors do.
    """
    inputs = architecture.inputs()
    if dtype is not None:
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        found = dict(_tensors(model(**inputs)))
    assert found
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
    return found


def _tensors(output: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield name, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _tensors(value, f"{name}.{key}")
    elif isinstance(output, list | tuple):
        for at, value in enumerate(output):
            yield from _tensors(value, f"{name}.{at}")


def prepare_model(name: str, out: Path) -> None:
    """Make a model, its reference and its pre-sharded directory."""
    architecture, home, log = ZOO[name], out / name, Log()
    home.mkdir()
    make_hub(architecture, home / "hub")
    assert not shardkit.verify(home / "hub").warnings
    assert not shardkit.inspect(home / "hub").warnings
    log.step("reference", partial(reference, architecture, home / "hub", home))
    log.step("preshard", partial(preshard, home))
    (home / "prepared.json").write_text(json.dumps(log.found))


def preshard(home: Path) -> None:
    quantised = is_quantised(home.name)
    done = shardkit.preshard(
        str(home / "hub"), str(home / "sharded"), world_size=SHARDS, dequantize=quantised
    )
    if done.layout != "traced":
        raise Wrong(f"the layout is {done.layout}")


def rank_main(rank: int, names: list[str], out: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}/store",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=600),
    )
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp_shard",))
    for name in names:
        log = Log()
        with contextlib.redirect_stdout(sys.stderr):
            live_model(ZOO[name], mesh, out / name, log)
        (out / name / f"rank{rank}.json").write_text(json.dumps(log.found))
    dist.barrier()


def live_model(architecture: Architecture, mesh: DeviceMesh, home: Path, log: Log) -> None:
    """All that happens to a model in a training job."""
    prepared = json.loads((home / "prepared.json").read_text())
    hub, sharded = str(home / "hub"), str(home / "sharded")
    precision = "bf16" if dtype_of(home / "hub") == torch.bfloat16 else None
    models: list[nn.Module] = []

    def start(source: str, strategy: str) -> None:
        context = shardkit.prepare(hub, source, dequantize=is_quantised(architecture.name))
        model = shardkit.wrap(context.model, mesh, mixed_precision=precision)
        model = shardkit.finalize(model, context, strategy=strategy).eval()
        models.append(model)
        compare_tensors(live_tensors(model), home)

    log.step("direct", partial(start, hub, "direct"))
    if models:  # wrong ones go on too: which steps find it out is worth knowing
        model = models[0]
        if not prepared["reference"]:
            log.step("logits", partial(compare_answer, model, architecture, home))
        log.step("save", partial(shardkit.save, model, home / "saved"))
        log.step("dcp_save", partial(dcp.save, model.state_dict(), checkpoint_id=home / "stock"))
        if architecture.name in BROADCAST:
            log.step("broadcast", partial(start, hub, "broadcast"))
    if not prepared["preshard"]:
        log.step("presharded", partial(start, sharded, "direct"))
        log.step("stock", partial(stock_load, architecture, mesh, home))


def compare_tensors(found: Mapping[str, torch.Tensor], home: Path) -> None:
    """Compare names, dtypes and bits with those of from_pretrained."""
    expected = torch.load(home / "tensors.pt")
    lines = [f"{name}: only here" for name in found.keys() - expected.keys()]
    lines += [f"{name}: only in from_pretrained" for name in expected.keys() - found.keys()]
    for name, tensor in found.items():
        if name in expected and (problem := difference(*local(tensor, expected[name]))):
            lines.append(f"{name}: {problem}")
    if lines:
        raise Wrong("\n".join(sorted(lines)))


def local(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a tensor, and of what it should be: `fully_shard` cuts dim 0 as `torch.chunk` does."""
    if not isinstance(tensor, DTensor) or tensor.shape != whole.shape:
        return tensor, whole
    parts = whole.chunk(SIZE)
    rank = dist.get_rank()
    return tensor.to_local(), parts[rank] if rank < len(parts) else whole[:0]


def difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Say in what two tensors differ; "" where they are bit-equal."""
    if found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    if found.shape != expected.shape:
        return f"{list(found.shape)} instead of {list(expected.shape)}"
    if torch.equal(bits(found), bits(expected)):
        return ""
    return f"off by {(found.double() - expected.double()).abs().max().item():.2g}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def compare_answer(model: nn.Module, architecture: Architecture, home: Path) -> None:
    """Compare what a model answers with what from_pretrained does, bit for bit."""
    expected, found = torch.load(home / "answer.pt"), answer(model, architecture)
    assert expected.keys() == found.keys(), (expected.keys(), found.keys())
    lines = [f"{name}: {why}" for name, each in found.items() if (why := difference(each, expected[name]))]
    if lines:
        raise Wrong("\n".join(lines))


def stock_load(architecture: Architecture, mesh: DeviceMesh, home: Path) -> None:
    """Load the pre-sharded directory with torch alone, into a model that only transformers and torch have touched."""
    model_class = getattr(transformers, architecture.model_class)
    config = transformers.AutoConfig.from_pretrained(home / "hub")
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=config.dtype)
    numbers = {parameter for parameter in model.parameters() if not parameter.ndim}  # torch refuses them
    fully_shard(model, mesh=mesh, ignored_params=numbers)
    model.to_empty(device="cpu")
    model.tie_weights()
    state = model.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(77)
    dcp.load(state, checkpoint_id=home / "sharded")
    expected = torch.load(home / "tensors.pt")
    lines = []
    for name, tensor in state.items():
        # A parameter that from_pretrained keeps in fp32 is what torch's own caller must build so.
        if problem := difference(*local(tensor, expected[name].to(tensor.dtype))):
            lines.append(f"{name}: {problem}")
    if lines:
        raise Wrong("\n".join(sorted(lines)))


def export_model(name: str, out: Path) -> None:
    """Consolidate what was saved, and compare it with the original."""
    home, log = out / name, Log()
    ranks = [json.loads((home / f"rank{rank}.json").read_text()) for rank in range(SIZE)]
    for saved, step, exported in (("save", "saved", "consolidate"), ("dcp_save", "stock", "dcp_consolidate")):
        if all(rank.get(saved) == "" for rank in ranks):
            log.step(exported, partial(consolidate, home, step))
            if step == "stock" and ZOO[name].names == "hub":
                log.step("bare", partial(consolidate_bare, home))
    found = json.loads((home / "prepared.json").read_text()) | log.found
    for step in dict.fromkeys(step for rank in ranks for step in rank):
        said = list(dict.fromkeys(rank.get(step, "not reached") for rank in ranks))
        found[step] = "\nother rank: ".join(filter(None, said))
    (home / "result.json").write_text(json.dumps(found))
    for each in ("hub", "sharded", "saved", "stock", "saved-hf", "stock-hf"):
        shutil.rmtree(home / each, ignore_errors=True)


def consolidate_bare(home: Path) -> None:
    """Consolidate with nothing but the model's config: the class alone knows the names of the Hub."""
    shutil.copy(home / "hub" / "config.json", home / "stock")
    result = shardkit.consolidate(home / "stock", str(home / "bare"))
    if any("may not be the Hub's" in warning for warning in result.warnings):
        raise Wrong("\n".join(result.warnings))
    shutil.rmtree(home / "stock-hf", ignore_errors=True)
    (home / "bare").rename(home / "stock-hf")
    compare(home, "stock")


def consolidate(home: Path, saved: str) -> None:
    """With the base's config, byte for byte; the live one of `save` means the same, in words of this transformers."""
    base = home / "hub"
    made = shardkit.consolidate(home / saved, str(home / f"{saved}-hf"), base=str(base), config="base")
    if is_quantised(home.name):
        compare_plain(home, saved)
        return
    compare(home, saved)
    config = [json.loads((each / "config.json").read_text()) for each in (base, Path(made.output))]
    own = shardkit.consolidate(home / saved, str(home / "own"), base=str(base), dry_run=True)
    if config[0] != config[1] or own.differs_from_base:
        raise Wrong(f"config.json differs: {own.differs_from_base}")
    if home.name in REPOS:
        compare_files(home / "hub", home / f"{saved}-hf")


def compare_plain(home: Path, saved: str) -> None:
    """Hold a model with plain weights against the one that transformers dequantised: names of the files, and values."""
    scales = ("_scale_inv", "_blocks", "_scales")
    expected = {name for name in contents(home / "hub") if not name.endswith(scales)}
    expected |= {name.removesuffix("_blocks") for name in contents(home / "hub") if name.endswith("_blocks")}
    found = contents(home / f"{saved}-hf")
    lines = [f"{name}: in one of the two" for name in found.keys() ^ expected]
    config = json.loads((home / f"{saved}-hf" / "config.json").read_text())
    lines += ["config.json has a quantization_config"] if "quantization_config" in config else []
    plain = getattr(transformers, config["architectures"][0]).from_pretrained(home / f"{saved}-hf")
    for name, tensor in torch.load(home / "tensors.pt").items():
        if problem := difference(live_tensors(plain)[name], tensor):
            lines.append(f"{name}: {problem}")
    if lines:
        raise Wrong("\n".join(sorted(lines)))


def compare_files(hub: Path, found: Path) -> None:
    """Compare weight files byte for byte, and what their index says."""
    names, others = (sorted(path.name for path in each.glob("*.safetensors")) for each in (hub, found))
    if names != others:
        raise Wrong(f"the files are {others}, not {names}")
    lines = [
        f"{name}: other bytes" for name in names if (hub / name).read_bytes() != (found / name).read_bytes()
    ]
    if len(names) > 1:
        index, other = (json.loads((each / INDEX).read_text()) for each in (hub, found))
        if (
            index["weight_map"] != other["weight_map"]
            or index["metadata"].items() - other["metadata"].items()
        ):
            lines.append(f"{INDEX} differs")
    if lines:
        raise Wrong("\n".join(lines))


def compare(home: Path, saved: str) -> None:
    """Compare the tensors of what was consolidated with the original's."""
    expected, found = contents(home / "hub"), contents(home / f"{saved}-hf")
    lines = [f"{name}: only in the result" for name in found.keys() - expected.keys()]
    lines += [f"{name}: lost" for name in expected.keys() - found.keys()]
    for name in found.keys() & expected.keys():
        if problem := difference(found[name], expected[name]):
            lines.append(f"{name}: {problem}")
    if lines:
        raise Wrong("\n".join(sorted(lines)))


def contents(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a Hub directory."""
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})
    return found


def in_two(names: list[str], work: Callable[[str], None]) -> None:
    """Do something for each model, in two processes; what traces has imported everything already."""

    def part(first: int) -> None:
        with mock.patch.object(traced, "_serve_request", forked_trace):
            for name in names[first::2]:
                work(name)

    wait([fork(partial(part, first)) for first in range(2)])


def main() -> None:
    request = json.loads(sys.argv[1])
    out, names = Path(request["out"]), request["names"]
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names:
        getattr(transformers, ZOO[name].model_class)  # imported once, before anything is forked
    gc.freeze()  # what is imported by now: forks need not go through it
    in_two(names, partial(prepare_model, out=out))
    wait([fork(partial(rank_main, rank, names, out)) for rank in range(SIZE)])
    in_two(names, partial(export_model, out=out))
    results = {name: json.loads((out / name / "result.json").read_text()) for name in names}
    (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
