r"""Small checkpoints of MoE models, written by DeepSpeed itself, with what its engine held beside them.

    python make.py OUT        # DeepSpeed 0.19.8, torch 2.13, transformers 5.24, CPU: four gloo processes
    python -m deepspeed.checkpoint.ds_to_universal --input_folder OUT/zero2_autoep/global_step2 \
        --output_folder OUT/zero2_autoep_universal/global_step2    # of its zero/ only fp32.pt is kept
    rm OUT/*/*.py && tar -C OUT -cJf moe.tar.xz .

Each directory of OUT is a checkpoint. Its `truth.pt` was put together from every rank's engine, under the numbers
of the whole model's experts: "module" (the state dict), "masters" (fp32, by safe_get_full_fp32_param) and "exp_avg" (of
the ranks that share a partition).
"""

import json
import logging
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WIDTH, WORLD = 6, 4
CASES = {
    # name: (ZeRO stage, experts and ep_size of each MoE layer, frozen experts, dtype, data before experts)
    "zero2_ep2": (2, ((4, 2), (4, 2)), False, "bf16", False),
    "zero1_ep4": (1, ((4, 4), (4, 4)), False, "bf16", False),
    "zero2_mixed": (2, ((4, 2), (8, 4)), True, "bf16", False),
    "zero1_ep1_fp32": (1, ((4, 1),), False, "fp32", False),
    "zero0_ep2": (0, ((4, 2), (4, 2)), False, "fp32", False),
    "zero2_data_first": (2, ((4, 2),), False, "bf16", True),
    "zero2_autoep": (2, None, False, "bf16", False),  # a Mixtral whose experts DeepSpeed spreads itself
}


class Block(nn.Module):
    def __init__(self, experts, ep_size, residual):
        from deepspeed.moe.layer import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 3), nn.ReLU(), nn.Linear(3, WIDTH))
        self.moe = MoE(
            WIDTH, expert, num_experts=experts, ep_size=ep_size, k=1, min_capacity=4, use_residual=residual
        )
        self.shared_expert = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.moe(x)[0].to(x.dtype) + self.shared_expert(x)


class Net(nn.Module):
    def __init__(self, layers, freeze):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.tower.requires_grad_(False)
        self.layers = nn.ModuleList(Block(*layer, number == 1) for number, layer in enumerate(layers))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))
        if freeze:
            self.layers[0].moe.deepspeed_moe.experts.requires_grad_(False)

    def forward(self, tokens):
        x = self.tower(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().pow(2).mean()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import output_capturing

    registry = (
        output_capturing._CanRecordRegistry
    )  # DeepSpeed 0.19.8 gives a default, transformers 5.24 takes none
    get = registry.get
    registry.get = lambda self, key, default=None: get(self, key)
    config = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config |= {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 2}
    return MixtralForCausalLM(MixtralConfig(**config, num_local_experts=4, num_experts_per_tok=2))


def whole_names(engine, tensors):
    """Return a rank's tensors under the numbers of the whole model's experts."""
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    named = {}
    for name, value in tensors.items():
        for prefix, module in engine.module.named_modules():
            if isinstance(module, MoE) and name.startswith(prefix + "."):
                first = groups._get_expert_parallel_rank(module.expert_group_name) * module.num_local_experts
                name = re.sub(
                    r"(?<=deepspeed_experts\.)\d+",
                    lambda found, first=first: str(int(found[0]) + first),
                    name,
                )
            if isinstance(module, AutoEPMoELayer) and name.startswith(f"{prefix}.experts.w"):
                first = groups._get_expert_parallel_rank(module.ep_group_name) * len(value)
                named |= {f"{name}.{first + at}": part.detach().clone() for at, part in enumerate(value)}
                break
        else:
            named[name] = value.detach().clone()
    return named


def write_config(rank, config):
    if rank == 0:
        Path("config.json").write_text(json.dumps(config))
    dist.barrier()
    return "config.json"


def moments(engine):
    """Return the first moments of a rank's parameters, from the partitions of the ranks that share them."""
    zero, found = engine.optimizer, {}
    for number, flat in enumerate(zero.single_partition_of_fp32_groups):
        own = zero.optimizer.state[flat]["exp_avg"]
        group = zero.real_dp_process_group[number]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        at, whole = 0, torch.cat(parts)
        for param in zero.round_robin_bit16_groups[number]:
            found[engine.param_names[param]] = whole[at : at + param.numel()].view(param.shape)
            at += param.numel()
    return found


def train(rank, out, name, stage, layers, freeze, dtype, data_first):
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(0)
    net = Net(layers, freeze) if layers else mixtral()
    if not layers and rank == 0:
        net.to(torch.bfloat16).save_pretrained(os.path.join(out, "base"))
        net.float()
    torch.manual_seed(rank + 1)
    for key, value in net.named_parameters():  # experts of different ranks differ
        if "deepspeed_experts" in key:
            nn.init.normal_(value, std=0.2)
    config = {
        "train_batch_size": 2 * WORLD,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        **({"use_data_before_expert_parallelism": True} if data_first else {}),
    }
    params = [param for param in net.parameters() if param.requires_grad]
    if layers:
        params = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "all"})
    else:
        experts = {"autoep_size": 2, "preset_model": "mixtral", "use_grouped_mm": False}
        config["expert_parallel"] = {"enabled": True, **experts}
    if data_first:  # a checkpoint has the path alone then
        config = write_config(rank, config)
    engine = deepspeed.initialize(model=net, model_parameters=params, config=config)[0]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        tokens = torch.randint(0, 10, (2, 4), generator=generator)
        engine.backward(engine(tokens) if layers else engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    path = os.path.join(out, name)
    engine.save_checkpoint(path, tag="global_step2")
    truth = {"module": engine.module.state_dict(), "masters": {}, "exp_avg": {}}
    for key, param in engine.module.named_parameters():
        if param.requires_grad and stage:
            truth["masters"][key] = safe_get_full_fp32_param(param)
    if stage:
        truth["exp_avg"] = moments(engine)
    truth = {kind: whole_names(engine, values) for kind, values in truth.items()}
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, truth)
    if rank == 0:
        merged = {kind: {k: v for one in reversed(gathered) for k, v in one[kind].items()} for kind in truth}
        torch.save(merged, os.path.join(path, "truth.pt"))
    dist.barrier()


def run(rank, out, port, names):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import groups

    logging.disable(logging.WARNING)
    deepspeed.init_distributed(dist_backend="gloo")
    for name in names:
        groups._EXPERT_PARALLEL_GROUP.clear()
        groups._EXPERT_DATA_PARALLEL_GROUP.clear()
        for found in ("_EXPERT_PARALLEL_GROUP_RANKS", "_EXPERT_DATA_PARALLEL_GROUP_RANKS"):
            getattr(groups, found, {}).clear()
        try:
            train(rank, out, name, *CASES[name])
            print("DONE", rank, name, flush=True)
        except Exception:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


if __name__ == "__main__":
    out = os.path.abspath(sys.argv[1])
    mp.spawn(run, (out, 29500 + os.getpid() % 400, sys.argv[2:] or list(CASES)), nprocs=WORLD)
