"""Real gloo worlds that wrap real models, train a step, measure gradients, diagnose and save.

    python wrap_world.py OUT

Every rank writes OUT/<world>-<rank>.json; what it trains is held against the same model in one process.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardkit.errors import ShardkitError
from shardkit.keys.names import clean_name
from shardkit.training.diagnostics.diagnose import diagnose
from shardkit.training.gradients import clip_grad_norm_, grad_norm
from shardkit.training.optimizer import parameter_names, rebind_optimizer
from shardkit.training.save import save
from shardkit.training.wrap import layer_policy, wrap
from tests.training.models import inputs, reference
from tests.worlds.processes import end_world, fork, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

Found = dict[str, Any]
NORMS = (2.0, 1.0, 3.5, float("inf"))


def run_loss(name: str, model: nn.Module) -> torch.Tensor:
    out = model(**inputs(name))
    logits = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return logits.float().pow(2).mean()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters after one step of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(0)  # of dropout
    run_loss(name, model.train()).backward()
    optimizer.step()
    return {key: full(value) for key, value in model.state_dict().items()}


def compare(name: str, prepare: Callable[[nn.Module], nn.Module], **changes: Any) -> Found:
    """Wrap, train a step, and hold everything against one process."""
    plain = reference(name, **changes)
    config = plain.config.to_json_string()
    model = prepare(copy.deepcopy(plain))
    names = list(model.state_dict())
    found = diagnose(model)
    calls: list[str] = []
    ends = ("layers.0.mlp.gate_proj", "layers.0.mlp.gate", "h.0.mlp.c_fc", "layer.0.output.dense")
    layer = next(m for path, m in model.named_modules() if clean_name(path).endswith(ends))
    layer.register_forward_pre_hook(lambda *_: calls.append("call"))
    after, expected = trained(name, model), trained(name, plain)
    return {
        "units": [unit.path for unit in found.units],
        "reshard": [unit.reshard_after_forward for unit in found.units],
        "checkpointed": found.checkpoint_wrappers,
        "problems": list(found.problems),
        "ties": [list(tie) for tie in found.ties],
        "same_names": names == list(expected),
        "difference": max(float((after[key] - expected[key]).abs().max()) for key in expected),
        "moved": any(
            not torch.equal(expected[key], value)
            for key, value in reference(name, **changes).state_dict().items()
        ),
        "calls": len(calls),
        "same_config": plain.config.to_json_string() == config == model.config.to_json_string(),
    }


def gradients(name: str, prepare: Callable[[nn.Module], nn.Module], **changes: Any) -> Found:
    """Norms and clipped gradients of the wrapped model, and of one process."""
    plain = reference(name, **changes)
    model = prepare(copy.deepcopy(plain))
    found: Found = {}
    for each in (model, plain):
        run_loss(name, each).backward()
    for each in (model, plain):
        for n, parameter in each.named_parameters():
            if "k_proj" in n:
                parameter.grad = None
    found["ours"] = [grad_norm(model, order).item() for order in NORMS]
    found["torch"] = [
        torch.nn.utils.get_total_norm(
            [p.grad for p in plain.parameters() if p.grad is not None], order
        ).item()
        for order in NORMS
    ]
    found["kind"] = type(grad_norm(model)).__name__
    found["returned"] = clip_grad_norm_(model.parameters(), 0.01).item()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found["clipped"] = max(float((full(a.grad) - b.grad).abs().max()) for a, b in pairs if b.grad is not None)
    found["after"] = grad_norm(list(model.parameters())).item()
    return found


def edge_gradients(mesh: DeviceMesh) -> Found:
    """Half precision, empty parts, plain parameters beside sharded ones, no gradients at all, not finite ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    extra = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    wrap(model, mesh, policy="none", mixed_precision=None)
    found: Found = {"none": grad_norm(model).item(), "empty": list(diagnose(model).empty)}
    model(torch.ones(2, 3)).sum().backward()
    extra.grad = torch.full((5,), 0.3, dtype=torch.bfloat16)
    everything = [*model.parameters(), extra]
    expected = torch.cat([full(p.grad).flatten().double() for p in everything]).norm().item()
    found["mixed"] = [grad_norm(everything).item(), expected]
    many = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    many.grad = torch.full((100_000,), 0.01, dtype=torch.bfloat16)
    found["half"] = [grad_norm(many).item(), many.grad.double().norm().item()]
    # A gradient that only one rank has: no rank waits for the other.
    if dist.get_rank() == 1:
        model[0].weight.grad = None
    found["one_sided"] = grad_norm(model).item()
    extra.grad.fill_(float("nan"))
    try:
        clip_grad_norm_(everything, 1.0, error_if_nonfinite=True)
    except ShardkitError as error:
        found["nonfinite"] = error.message
    return found


class Holder(nn.Module):
    """Holds what others wrapped, as a LightningModule does."""

    def __init__(self, **held: nn.Module) -> None:
        super().__init__()
        for name, module in held.items():
            self.add_module(name, module)


def flat(module: nn.Module, use_orig: bool, strategy: ShardingStrategy | None = None) -> nn.Module:
    return FullyShardedDataParallel(
        module, sharding_strategy=strategy, use_orig_params=use_orig, device_id=torch.device("cpu")
    )


def held_gradients(mesh: DeviceMesh) -> Found:
    """Norms and clipped gradients of roots of every kind, alone and together, two modules deep."""
    torch.manual_seed(0)
    plain = {
        kind: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
        for kind in ("fsdp1", "fsdp1-orig", "fsdp1-whole", "ddp", "fsdp2", "plain")
    }
    batch = torch.randn(3, 5)
    model = copy.deepcopy(plain)
    wrapped = {
        "fsdp1": flat(model["fsdp1"], False),
        "fsdp1-orig": flat(model["fsdp1-orig"], True),
        "fsdp1-whole": flat(model["fsdp1-whole"], True, ShardingStrategy.NO_SHARD),
        "ddp": DistributedDataParallel(model["ddp"]),
        "fsdp2": fully_shard(model["fsdp2"], mesh=mesh),
        "plain": model["plain"],
    }
    for modules in (plain, wrapped):
        torch.stack([module(batch).pow(2).sum() for module in modules.values()]).sum().backward()

    def expected(kinds: Iterable[str], order: float) -> float:
        gradients = [parameter.grad for kind in kinds for parameter in plain[kind].parameters()]
        return torch.nn.utils.get_total_norm(gradients, order).item()

    found: Found = {"pairs": [], "refused": {}}
    for kinds in [*([kind] for kind in plain), ["fsdp1", "fsdp1-orig"], list(plain)]:
        holder = Holder(inner=Holder(**{kind: wrapped[kind] for kind in kinds}))
        found["pairs"] += [[grad_norm(holder, order).item(), expected(kinds, order)] for order in NORMS]
    found["returned"] = clip_grad_norm_(holder, 0.01).item()
    found["after"] = grad_norm(holder).item()
    for kind in ("fsdp1", "fsdp1-orig"):
        module = wrapped[kind]
        found["refused"][f"{kind}-loose"] = told(lambda module=module: grad_norm(module.parameters()))
        module.zero_grad()
        with module.no_sync():
            module(batch).sum().backward()
        found["refused"][f"{kind}-early"] = told(lambda module=module: clip_grad_norm_(Holder(it=module), 1))
    return found


def told(work: Callable[[], object]) -> Found:
    try:
        work()
    except ShardkitError as error:
        return error.to_json()
    return {}


class Shared(nn.Module):
    """Blocks of a plain model, two of which share a parameter with what stands around them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.blocks[1][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def policies(mesh: DeviceMesh) -> Found:
    """Units that every kind of policy makes, and the errors of those that do not."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

    def units(policy: Any, name: str = "llama", **options: Any) -> list[str]:
        model = reference(name)
        return [unit.path for unit in diagnose(wrap(model, mesh, policy=policy, **options)).units]

    def build(make: Callable[[], nn.Module], **options: Any) -> Found:
        return told(lambda: wrap(make(), mesh, **options))

    llama, shared = partial(reference, "llama"), Shared()
    twice = wrap(reference("llama"), mesh)
    return {
        "units": {
            "class": units(LlamaDecoderLayer),
            "name": units("LlamaDecoderLayer"),
            "path": units("transformers.models.llama.modeling_llama.LlamaDecoderLayer"),
            "template": units("model.layers.*"),
            "container": units("model.layers"),
            "set": units({LlamaDecoderLayer, "LlamaMLP"}),
            "nested": units("LlamaDecoderLayer,LlamaMLP"),
            "predicate": units(lambda name, module: name.endswith("self_attn")),
            "none": units("none"),
            "plain": [u.path for u in diagnose(wrap(shared, mesh)).units],
        },
        "shared_is_one": shared.head.weight is shared.blocks[1][0].weight,
        "shared_step": trained_shared(shared),
        "given": [
            unit.reshard_after_forward
            for unit in diagnose(wrap(llama(), mesh, reshard_after_forward=True)).units
        ],
        "nothing": build(llama, policy="LlamaDecodeLayer"),
        "no_class": build(llama, policy=nn.Conv2d),
        "no_predicate": build(llama, policy=lambda name, module: False),
        "bad_predicate": build(llama, policy=lambda module: True),
        "function": build(llama, policy="my.module:apply"),
        "unreadable": build(llama, policy="a b"),
        "modulelist": build(llama, policy=nn.ModuleList),
        "number": build(llama, policy=3),
        "tied": build(lambda: reference("bert-lm"), policy="BertEmbeddings,BertLayer"),
        "tied_predicate": build(Shared, policy=lambda name, module: name == "blocks.1"),
        "checkpoint_none": build(llama, policy="none", activation_checkpointing=True),
        "checkpoint_nothing": build(llama, activation_checkpointing="Nothing"),
        "twice": told(lambda: wrap(twice, mesh)),
        "precision": build(llama, mixed_precision="int4"),
        "no_blocks": build(lambda: nn.Sequential(nn.Linear(2, 2))),
        "mlp": LlamaMLP.__name__,
    }


def trained_shared(model: nn.Module) -> bool:
    """A tied parameter of a wrapped model is still one after a step."""
    model(torch.ones(2, 6)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.head.weight is model.blocks[1][0].weight


def precision(mesh: DeviceMesh) -> Found:
    model = wrap(reference("llama"), mesh)
    out = model(**inputs("llama"))
    out.logits.float().sum().backward()
    own = MixedPrecisionPolicy(param_dtype=torch.float16)
    return {
        "logits": str(out.logits.dtype),
        "grads": sorted({str(p.grad.dtype) for p in model.parameters()}),
        "stored": sorted({str(p.dtype) for p in model.parameters()}),
        "text": str(diagnose(model)),
        "own": diagnose(wrap(reference("llama"), mesh, mixed_precision=own)).units[1].mixed_precision,
        "offload": diagnose(wrap(reference("llama"), mesh, cpu_offload=True)).units[1].cpu_offload,
    }


def on_meta(mesh: DeviceMesh) -> Found:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(reference("llama").config)
    found = diagnose(wrap(model, mesh, activation_checkpointing=True))
    return {
        "meta": len(found.meta),
        "problems": list(found.problems),
        "local": [found.local_parameters, found.parameters, found.local_bytes, found.expected_bytes],
        "uneven": list(found.uneven),
        "json": json.loads(json.dumps(found.to_json()))["kind"],
    }


def wrappers(mesh: DeviceMesh) -> Found:
    """torch's checkpoint wrapper on modules that transformers cannot checkpoint itself."""
    return compare(
        "llama", lambda m: wrap(m, mesh, activation_checkpointing="LlamaMLP", mixed_precision=None)
    )


def saved(out: Path, name: str, prepare: Callable[[nn.Module], nn.Module], label: str) -> Found:
    """Save a wrapped model; load it with stock dcp.load into one that was made anew."""
    plain = reference(name)
    if dist.get_rank() == 0:
        plain.save_pretrained(out / f"hub-{label}")
    model = prepare(copy.deepcopy(plain))
    result = save(model, out / label)
    other = prepare(reference(name, seed=7))
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=out / label)
    expected = plain.state_dict()
    same = all(torch.equal(full(value), expected[key]) for key, value in state["model"].items())
    return {
        "same": same and state["model"].keys() == expected.keys(),
        "files": result.num_files,
        "bytes": result.file_bytes,
    }


def others(out: Path, mesh: DeviceMesh) -> Found:
    """Models that FSDP1, DDP or nobody wrapped."""
    classes = layer_policy("transformers.models.llama.modeling_llama.LlamaDecoderLayer")
    plain = reference("llama-tied")
    run_loss("llama-tied", plain).backward()
    found: Found = {
        "plain": diagnose(plain).to_json(),
        "ddp": diagnose(DistributedDataParallel(reference("llama"))).to_json(),
    }
    for use_orig in (False, True):
        model = FullyShardedDataParallel(
            reference("llama-tied"),
            auto_wrap_policy=ModuleWrapPolicy(classes),
            use_orig_params=use_orig,
            device_id=torch.device("cpu"),
        )
        found[f"fsdp1-{use_orig}"] = diagnose(model).to_json()
        save(model, out / f"saved-fsdp1-{use_orig}")
        run_loss("llama-tied", model).backward()
        found[f"norm-{use_orig}"] = grad_norm(model).item()
        found[f"clip-{use_orig}"] = clip_grad_norm_(model, 0.1).item()
        found["text"] = str(diagnose(model))
    found["wrapped"] = told(lambda: wrap(model, mesh))
    found["norm"] = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    layers_only = reference("llama")
    for layer in layers_only.model.layers:
        fully_shard(layer, mesh=mesh)
    found["layers_only"] = diagnose(layers_only).to_json()
    root_only = fully_shard(reference("llama"), mesh=mesh)
    found["root_only"] = diagnose(root_only).to_json()
    broken = wrap(reference("llama-tied"), mesh, mixed_precision=None)
    broken.lm_head.weight = nn.Parameter(broken.lm_head.weight.detach().clone())
    found["broken"] = diagnose(broken).to_json()
    mixed = reference("llama")
    mixed.model.layers[0].mlp.to(torch.bfloat16)
    mixed.model.scratch = torch.empty(2, device="meta")
    found["split"] = diagnose(wrap(copy.deepcopy(mixed), mesh)).to_json()
    for layer in mixed.model.layers:
        fully_shard(layer, mesh=mesh)
    found["mixed"] = diagnose(fully_shard(mixed, mesh=mesh)).to_json()
    model = fully_shard(reference("llama"), mesh=mesh)
    run_loss("llama", model)  # without resharding: parameters are whole just now
    found["in_forward"] = diagnose(model).local_parameters
    return found


def rebound(mesh: DeviceMesh) -> Found:
    """Optimizers that were made before wrapping, and what they do afterwards."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        return [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ]

    def stepped(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        run_loss(name, model).backward()
        optimizer.step()
        return {key: full(value) for key, value in model.state_dict().items()}

    found: Found = {}
    for name in ("llama", "llama-tied"):
        plain = reference(name)
        expected = stepped(name, plain, torch.optim.AdamW(groups(plain), lr=0.1))
        model = reference(name)
        optimizer = torch.optim.AdamW(groups(model), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        names = parameter_names(model, optimizer)
        wrap(model, mesh, mixed_precision=None)
        rebind_optimizer(model, optimizer, names)
        rebind_optimizer(model, optimizer, names)  # a second time there is nothing to do
        after = stepped(name, model, optimizer)
        schedule.step()
        found[name] = {
            "difference": max(float((after[key] - expected[key]).abs().max()) for key in expected),
            "lr": [group["lr"] for group in optimizer.param_groups],
            "decay": [group["weight_decay"] for group in optimizer.param_groups],
        }
    model = reference("llama")
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    unnamed = torch.optim.SGD(model.parameters(), lr=0.1)
    used = torch.optim.AdamW(reference("llama").parameters())
    for parameter in used.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    used.step()
    other = torch.optim.LBFGS(reference("llama").parameters())
    other_names = [[name for name, _ in model.named_parameters()]]
    wrap(model, mesh, mixed_precision=None)
    rebind_optimizer(model, named)
    found["named"] = all(
        a is b for a, b in zip(named.param_groups[0]["params"], model.parameters(), strict=True)
    )
    found["unknown"] = told(lambda: rebind_optimizer(model, unnamed))
    found["late"] = told(lambda: parameter_names(model, unnamed))
    found["used"] = told(lambda: rebind_optimizer(model, used, other_names))
    found["lbfgs"] = told(lambda: rebind_optimizer(model, other, other_names))
    found["short"] = told(lambda: rebind_optimizer(model, unnamed, [["lm_head.weight"]]))
    wrong = [[*other_names[0][:-2], "model.norm.weigth", other_names[0][0]]]
    found["wrong"] = told(lambda: rebind_optimizer(model, unnamed, wrong))
    return found


def world_two(out: Path) -> Found:
    mesh = init_device_mesh("cpu", (2,))
    fp32 = partial(wrap, mesh=mesh, mixed_precision=None)
    found: Found = {
        name: compare(name, fp32)
        for name in ("llama", "llama-tied", "qwen3", "gpt2", "bert", "bert-lm", "qwen3-vl", "qwen3-moe")
    }
    found["llama-recomputed"] = compare("llama", partial(fp32, activation_checkpointing=True))
    found["wrappers"] = wrappers(mesh)
    found["policies"] = policies(mesh)
    found["precision"] = precision(mesh)
    found["meta"] = on_meta(mesh)
    found["gradients"] = gradients("llama-tied", fp32)
    found["edges"] = edge_gradients(mesh)
    found["held"] = held_gradients(mesh)
    found["others"] = others(out, mesh)
    found["rebound"] = rebound(mesh)
    found["saved"] = {
        name: saved(out, name, fp32, f"saved-{name}")
        for name in ("llama", "llama-tied", "bert-lm", "qwen3-vl", "bert")
    }
    return found


def meshes() -> Found:
    """Which axes of a mesh of four ranks are taken, and which meshes are refused."""

    def mesh(shape: tuple[int, ...], *names: str) -> DeviceMesh:
        return init_device_mesh("cpu", shape, mesh_dim_names=names or None)

    def taken(shape: tuple[int, ...], *names: str) -> list[str]:
        return [
            unit.mesh for unit in diagnose(wrap(nn.Linear(2, 2), mesh(shape, *names), policy="none")).units
        ]

    def error(shape: tuple[int, ...], *names: str) -> Found:
        return told(lambda: wrap(nn.Linear(2, 2), mesh(shape, *names), policy="none"))

    return {
        "unnamed": error((2, 2)),
        "only_tp": error((4,), "tp"),
        "only_replicas": error((2, 2), "dp_replicate", "tp"),
        "reversed": error((2, 2), "dp_shard", "dp_replicate"),
        "pipeline": error((2, 2), "pp", "dp_shard"),
        "lightning": taken((2, 2), "data_parallel", "tensor_parallel"),
        "three": taken((2, 2, 1), "dp_replicate", "dp_shard", "tp"),
    }


def world_hsdp(out: Path) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fp32 = partial(wrap, mesh=mesh, mixed_precision=None)
    return {
        "llama-tied": compare("llama-tied", fp32),
        "placements": list(diagnose(fp32(reference("llama"))).units[1].placements),
        "resharded": compare("llama", partial(fp32, reshard_after_forward=2)),
        "gradients": gradients("llama", fp32),
        "saved": saved(out, "llama-tied", fp32, "saved-hsdp"),
        "meshes": meshes(),
    }


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, mesh["tp"], plan)
    return wrap(model, mesh, mixed_precision=None)


def world_tensor_parallel(out: Path) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    prepare = partial(tensor_parallel, mesh=mesh)
    even = {"intermediate_size": 38}  # over tp; not over both axes
    return {
        "llama": compare("llama", prepare, **even),
        "diagnosis": diagnose(prepare(reference("llama"))).to_json(),
        "gradients": gradients("llama", prepare, **even),
        "saved": saved(out, "llama", prepare, "saved-tp"),
    }


WORLDS: dict[str, tuple[int, Callable[[Path], Found]]] = {
    "two": (2, world_two),
    "hsdp": (4, world_hsdp),
    "tp": (4, world_tensor_parallel),
}


def rank(out: Path, name: str, number: int) -> None:
    size, work = WORLDS[name]
    dist.init_process_group("gloo", init_method=f"file://{out}/{name}.store", rank=number, world_size=size)
    (out / f"{name}-{number}.json").write_text(json.dumps(work(out)))
    end_world()


def main() -> None:
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or WORLDS:
        wait([fork(partial(rank, out, name, number)) for number in range(WORLDS[name][0])])


if __name__ == "__main__":
    main()
