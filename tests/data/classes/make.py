"""Make records.tar.xz: tensors of the classes that trainers give to weights and to the state of optimizers.

python make.py new FOLDER        # torchao 0.18
python make.py delayed FOLDER    # torchao 0.5
python make.py grouped FOLDER    # torchao 0.12, 0.14 and 0.16; they need triton
torchrun --nproc-per-node 2 make.py checkpoints FOLDER    # torchao 0.18
python make.py quantised FOLDER    # torchao 0.7, 0.9, 0.14 and 0.18
python make.py others FOLDER       # bitsandbytes 0.50, optimum-quanto 0.2
python make.py engine FOLDER       # no TransformerEngine

All with torch 2.13. A record is what `torch.save` makes of one object, as DCP stores it. Its values count up from the
number that its name ends with. xtuner cannot be imported without CUDA: for its records, the classes' `__new__` and
`__init__` (xtuner 1, xtuner/v1/float8/fsdp_utils.py) stood alone in a module of that name. Nor can TransformerEngine:
its classes are stand-ins that pickle as it does (2.9 and 2.20, transformer_engine/pytorch/tensor/*_tensor.py, the
functions `__reduce_ex__`; the number of a DType as pybind11 writes it, and as TransformerEngine's own does since).
"""

from __future__ import annotations

import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

WHAT, OUT = sys.argv[1], Path(sys.argv[2])


def version(package: str) -> str:
    return metadata.version(package).rpartition(".")[0]


def value(first: int, shape: tuple[int, ...] = (4, 8), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).reshape(shape).to(dtype)


def put(name: str, tensor: torch.Tensor) -> None:
    torch.save(tensor, OUT / f"torchao-{version('torchao')}-{name}.pt")


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
    args = () if version("torchao") == "0.12" else (kind.FP8_ROWWISE,)
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


def quantised() -> None:
    """State dicts as `save_pretrained` writes them into pytorch_model.bin."""
    from torchao import quantization

    made = version("torchao")
    configs = {
        "int8": ("Int8WeightOnlyConfig", "int8_weight_only"),
        "int8-dynamic": (
            "Int8DynamicActivationInt8WeightConfig",
            "int8_dynamic_activation_int8_weight",
        ),
        "float8": ("Float8WeightOnlyConfig", "float8_weight_only"),
        "uintx": ("UIntXWeightOnlyConfig", "uintx_weight_only"),
        "intx": ("IntxWeightOnlyConfig",),
    }
    for name, spellings in configs.items():
        found = [getattr(quantization, each) for each in spellings if hasattr(quantization, each)]
        if found:
            model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.LayerNorm(16)).bfloat16()
            model[0].weight.data.copy_(value(1, (16, 64)))
            quantization.quantize_(model, found[0](*((torch.uint4,) if name == "uintx" else ())))
            torch.save(model.state_dict(), OUT / f"torchao-{made}-{name}.bin")


def others() -> None:
    """Parameters of bitsandbytes, a weight of quanto, and a tensor on whose collective nobody has waited."""
    import bitsandbytes
    from optimum import quanto
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    weight = torch.nn.Linear(64, 4, bias=False)
    for name, made in (
        ("4bit", bitsandbytes.nn.Linear4bit(64, 4, bias=False)),
        ("8bit", bitsandbytes.nn.Linear8bitLt(64, 4, bias=False, has_fp16_weights=False)),
    ):
        made.load_state_dict(weight.state_dict())
        torch.save(made.to("cpu").weight, OUT / f"bitsandbytes-{version('bitsandbytes')}-{name}.pt")
    model = torch.nn.Sequential(weight)
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    torch.save(model[0].weight, OUT / f"quanto-{version('optimum-quanto')}-qint8.pt")
    torch.save(AsyncCollectiveTensor(value(31)), OUT / "torch-2.13-async-31.pt")
    gathered = {
        "up.weight": AsyncCollectiveTensor(value(1)),
        "down.weight": AsyncCollectiveTensor(value(1).t()),
    }
    torch.save({**gathered, "norm.weight": value(1, (8,))}, OUT / "torch-2.13-async.bin")


def _stand_in(module: str, name: str, **content: Any) -> Any:
    """Make a class of that name that can be pickled from that module."""
    made = type(name, (), {"__module__": module, **content})
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    setattr(sys.modules[module], name, made)
    return made


def _make_in_reduce_ex(cls: Any, *args: Any) -> None:
    """Stand in for the method of a class."""


def engine() -> None:
    """Weights as TransformerEngine 2.9 and 2.20 pickle them."""
    codes, scale = value(0, (4, 32), torch.uint8), torch.tensor([0.5])
    tensors, shape = "transformer_engine.pytorch.tensor", torch.Size((4, 32))
    old = _stand_in(
        "transformer_engine_torch",
        "DType",
        __getstate__=lambda self: 7,
        __setstate__=lambda self, state: None,
    )
    kinds = {
        "float8": ("Float8Tensor", (codes, old(), scale, torch.bfloat16, shape)),
        "mxfp8": ("MXFP8Tensor", (codes, codes[:, :1].clone(), None, None, old(), torch.bfloat16, shape)),
    }
    for name, (cls, args) in kinds.items():
        made = _stand_in(f"{tensors}.{name}_tensor", cls, _make_in_reduce_ex=classmethod(_make_in_reduce_ex))
        made.__reduce_ex__ = lambda self, protocol, args=args: (type(self)._make_in_reduce_ex, args)
        torch.save(made(), OUT / f"transformer_engine-2.9-{name}.pt")

    new = _stand_in("transformer_engine.pytorch.constants", "DType")
    new.__reduce_ex__ = lambda self, protocol: (type(self), (7,))
    quantizer = _stand_in(f"{tensors}.nvfp4_tensor", "NVFP4Quantizer")()
    later: dict[str, tuple[Any, ...]] = {
        "float8": (codes, new(), scale, torch.bfloat16, shape, None),
        "nvfp4": (shape, codes, codes, None, None, scale, None, new(), torch.bfloat16, quantizer, False),
    }
    for name, args in later.items():

        def make(*args: Any) -> None:
            """Stand in for the function of the module."""

        make.__module__ = f"{tensors}.{name}_tensor"
        make.__name__ = make.__qualname__ = f"_make_{name}_tensor_in_reduce_ex"
        made = _stand_in(make.__module__, "Stand")
        setattr(sys.modules[make.__module__], make.__name__, make)
        made.__reduce_ex__ = lambda self, protocol, make=make, args=args: (make, args)
        torch.save(made(), OUT / f"transformer_engine-2.20-{name}.pt")


OUT.mkdir(parents=True, exist_ok=True)
globals()[WHAT]()
