"""Make records.tar.xz: tensors of the classes that trainers give to weights and to the state of optimizers.

python make.py new FOLDER        # torchao 0.18
python make.py delayed FOLDER    # torchao 0.5
python make.py grouped FOLDER    # torchao 0.12, 0.14 and 0.16; they need triton
torchrun --nproc-per-node 2 make.py checkpoints FOLDER    # torchao 0.18

All with torch 2.13. A record is what `torch.save` makes of one object, as DCP stores it. Its values count up from the
number that its name ends with. xtuner cannot be imported without CUDA: for its records, the classes' `__new__` and
`__init__` (xtuner 1, xtuner/v1/float8/fsdp_utils.py) stood alone in a module of that name.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

WHAT, OUT = sys.argv[1], Path(sys.argv[2])
VERSION = metadata.version("torchao").rpartition(".")[0]


def value(first: int, shape: tuple[int, ...] = (4, 8), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape).to(dtype)


def put(name: str, tensor: torch.Tensor) -> None:
    torch.save(tensor, OUT / f"torchao-{VERSION}-{name}.pt")


def new() -> None:
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8
    from torchao.prototype.moe_training import config, tensor
    from torchao.prototype.quantized_training import bitnet, int8, int8_mixed_precision
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    every = ScaledMMConfig(True, True, False, False)
    products, fp8, experts = LinearMMConfig(every, every, every), torch.float8_e4m3fn, (2, 4, 8)
    scale = torch.tensor(3.5)
    cast = WeightWithDynamicFloat8CastTensor
    put("float8-1", cast(value(1), products, fp8).detach())
    put("float8-scale-2", cast(value(2, dtype=torch.bfloat16), products, fp8, scale))
    put("float8-parameter-3", torch.nn.Parameter(cast(value(3), products, fp8)))
    weight = value(4, experts, torch.bfloat16)
    put(
        "grouped-float8-4",
        tensor.Float8TrainingWeightWrapperTensor(weight, config.Float8TrainingOpConfig()).detach(),
    )
    weight = value(5, experts, torch.bfloat16)
    put(
        "grouped-mxfp8-5",
        tensor.MXFP8TrainingWeightWrapperTensor(weight, config.MXFP8TrainingOpConfig()).detach(),
    )
    mixed = int8_mixed_precision.Int8MixedPrecisionTrainingConfig()
    put(
        "int8-mixed-6",
        int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight(value(6), mixed).detach(),
    )
    put("bitnet-scale-7", bitnet.BitNetTrainingLinearWeight(value(7), scale))
    put("int8-quantised", int8.Int8QuantizedTrainingLinearWeight.from_float(value(8)).detach())
    put("nf4", to_nf4(value(9, (64, 64)), 64, 64))
    for name, cls in (("8bit", OptimState8bit), ("4bit", OptimState4bit), ("fp8", OptimStateFp8)):
        put(f"optim-{name}", cls.zeros((4, 64)))


def delayed() -> None:
    from torchao.float8 import fsdp_utils
    from torchao.float8.float8_tensor import LinearMMConfig, ScaledMMConfig

    every = ScaledMMConfig(True, True, False, False)
    products, scale = LinearMMConfig(every, every, every), torch.tensor(2.0)
    put("float8-11", fsdp_utils.WeightWithDynamicFloat8CastTensor(value(11), products).detach())
    buffers: tuple[Any, ...] = (torch.tensor(1.0), torch.zeros(16), scale, products, True)
    put("float8-delayed-12", fsdp_utils.WeightWithDelayedFloat8CastTensor(value(12), *buffers).detach())
    put("float8-static-13", fsdp_utils.WeightWithStaticFloat8CastTensor(value(13), scale, products).detach())


def grouped() -> None:
    from torchao.prototype.moe_training import conversion_utils, tensor

    kind = getattr(conversion_utils, "MoEScalingType", None)
    args = () if VERSION == "0.12" else (kind.FP8_ROWWISE,)
    put("grouped-21", tensor.ScaledGroupedMMTensor(value(21, (2, 4, 8)), *args).detach())


def checkpoints() -> None:
    """float8/ and verl/: a weight that counts up from 1; adamw8bit/: two weights after a step of AdamW8bit."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.optim import AdamW8bit

    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    model[0].weight.data.copy_(value(1, (8, 8)))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    fully_shard(convert_to_float8_training(model, config=config))
    dcp.save({"model": model.state_dict()}, checkpoint_id=OUT / "float8")
    (OUT / "verl").mkdir(exist_ok=True)
    torch.save(model.state_dict(), OUT / "verl" / f"model_world_size_2_rank_{dist.get_rank()}.pt")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 4, bias=False))
    for layer in model:
        layer.weight.data.fill_(0.5)
    fully_shard(model)
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=OUT / "adamw8bit")
    dist.destroy_process_group()


OUT.mkdir(parents=True, exist_ok=True)
globals()[WHAT]()
