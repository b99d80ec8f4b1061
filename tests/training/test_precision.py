"""What a wrapped model computes in bf16 is what `from_pretrained` computes in bf16, bit for bit."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardkit
from shardkit._torch import fsdp2_units
from shardkit.keys.names import clean_name
from shardkit.layout import traced
from shardkit.training.extras.diagnose import diagnose
from shardkit.training.finalize import finalize
from shardkit.training.prepare import prepare
from shardkit.training.wrap import wrap
from tests.training import models
from tests.training.half_precision import CASES, DTYPES, KEPT, halved, in_one_process, logits, save
from tests.training.wrapping import full
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

PRESHARDED = ("hunyuan-moe", "deberta")
OWN_UNITS = {
    "ernie4_5-moe": ["model.layers.1.mlp"],
    "hunyuan-moe": ["model.layers.0.mlp", "model.layers.1.mlp"],
    "deberta": ["deberta.encoder.layer.0.attention", "deberta.encoder.layer.1.attention"],
    "t5": [
        f"{stack}.block.{n}.layer.{at}" for stack, at in (("encoder", 1), ("decoder", 2)) for n in range(2)
    ],
    "blip2": ["qformer"],
}
"""Of what is computed in fp32 beside half precision."""


def save_all(out: Path) -> None:
    for name, case in CASES.items():
        save(out / name, case)
    for name, case in KEPT.items():
        save(out / f"kept-{name}", case)
    with mock.patch.object(traced, "_serve_request", forked_trace):
        for name in PRESHARDED:
            kept, presharded = out / f"kept-{name}", out / f"presharded-{name}"
            shardkit.preshard(str(kept), str(presharded), world_size=2, dtype="bf16")


two = Ranks(__name__, 2, first=save_all)


@cache
def expected_logits(name: str, out: Path) -> torch.Tensor:
    """Those of one process in bf16."""
    case = CASES[name]
    with torch.no_grad():
        return logits(in_one_process(out / name, case), halved(case.inputs(), torch.bfloat16)).float()


@two.test_each({f"{name}-{dtype}": (name, dtype) for name, case in CASES.items() for dtype in case.masters})
def test_logits_are_those_of_one_process(of: tuple[str, str], out: Path) -> None:
    name, dtype = of
    mesh = init_device_mesh("cpu", (2,))
    expected = expected_logits(name, out)
    assert expected.std() > 1e-3  # nothing is all zeros
    with torch.no_grad():
        context = prepare(out / name, out / name, dtype=dtype)
        model = finalize(wrap(context.model, mesh), context).eval()
        assert (logits(model, CASES[name].inputs()).float() - expected).abs().max() == 0


@two.test
def test_the_root_casts_its_inputs_and_blocks_do_not() -> None:
    mesh = init_device_mesh("cpu", (2,))

    def casts(dtype: torch.dtype, **options: Any) -> dict[str, bool]:
        model = wrap(models.reference("bert", dtype=dtype), mesh, **options)
        return {
            path: next(fsdp2_units(module, is_root=not path)).mixed_precision.cast_forward_inputs
            for path, module in model.named_modules()
            if hasattr(module, "_get_fsdp_state")
        }

    blocks = {"encoder.layer.0": False, "encoder.layer.1": False}
    assert casts(torch.bfloat16) == {"": True, "embeddings": False, **blocks}
    # Masters of another dtype than what is computed in: models ask for it, and cast by it.
    assert casts(torch.float32) == {"": True, "embeddings": True, **blocks}
    own = casts(torch.float32, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert own.keys() == {"", "embeddings", *blocks}
    assert all(own.values())


class Run(NamedTuple):
    """A training step of a model that has parameters in fp32 beside half precision."""

    name: str
    dtype: str
    """Of the masters."""
    again: bool = False
    """Whether activations are computed again."""
    source: str = "kept"


RUNS = {
    f"{name}-{dtype}{'-again' if again else ''}": Run(name, dtype, again)
    for name, case in KEPT.items()
    for dtype in case.masters
    for again in (False, True)
}
RUNS |= {f"{name}-presharded": Run(name, KEPT[name].half, source="presharded") for name in PRESHARDED}


class Step(NamedTuple):
    """What one process makes of the batches of both ranks."""

    batches: list[dict[str, torch.Tensor]]
    logits: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    """Means over both batches."""


@cache
def step_of_one_process(name: str, out: Path) -> Step:
    case = KEPT[name]
    batches = [case.inputs(), case.inputs()]
    if name != "blip2":
        batches[1] = {key: x.flip(-1) for key, x in batches[1].items()}
    plain = in_one_process(out / f"kept-{name}", case)
    found, mean = [], dict[str, torch.Tensor]()
    for batch in batches:
        plain.zero_grad()
        found.append(logits(plain, halved(batch, DTYPES[case.half])))
        found[-1].float().pow(2).sum().backward()
        for fqn, parameter in plain.named_parameters():
            if parameter.grad is not None:
                mean[fqn] = mean.get(fqn, 0) + parameter.grad.float() / len(batches)
    return Step(batches, [each.detach().float() for each in found], mean)


@two.test_each(RUNS)
def test_parameters_in_fp32_train_as_in_one_process(run: Run, out: Path) -> None:
    """In units of their own, also while activations are computed again, and from a directory of `preshard --dtype`."""
    name, case, mesh = run.name, KEPT[run.name], init_device_mesh("cpu", (2,))
    batches, expected, gradients = step_of_one_process(name, out)
    kept = out / f"kept-{name}"
    context = prepare(kept, out / f"{run.source}-{name}", dtype=run.dtype)
    model = wrap(
        context.model,
        mesh,
        mixed_precision="bf16" if case.half == "bf16" else None,
        activation_checkpointing=run.again,
    )
    units = {unit.path for unit in diagnose(model).units}
    ours = logits(finalize(model, context).train(run.again), batches[dist.get_rank()])
    ours.float().pow(2).sum().backward()
    assert (ours.float() - expected[dist.get_rank()]).abs().max() == 0

    held = {clean_name(fqn): parameter for fqn, parameter in model.named_parameters()}
    errors = {
        fqn: float((full(held[fqn].grad).float() - mean).abs().max()) for fqn, mean in gradients.items()
    }
    largest = {fqn: float(mean.abs().max()) for fqn, mean in gradients.items()}
    # Rounded twice at most: per rank, and as a mean. What is 0 but for rounding is held against the largest.
    assert max(error / (largest[fqn] + 1e-3) for fqn, error in errors.items()) < 0.04
    # A bias of keys changes no softmax: its gradient is nothing but rounding.
    in_fp32 = [fqn for fqn in errors if re.search("|".join(case.fp32), fqn) and not fqn.endswith("key.bias")]
    assert in_fp32
    assert max(errors[fqn] / largest[fqn] for fqn in in_fp32) < (1e-6 if run.dtype == "fp32" else 0.04)

    right = getattr(transformers, case.class_name).from_pretrained(kept, dtype=DTYPES[case.half])
    wide = {fqn for fqn, parameter in right.named_parameters() if parameter.dtype == torch.float32}
    assert wide
    assert run.dtype == "fp32" or wide == {fqn for fqn, p in held.items() if p.dtype == torch.float32}
    outside = [fqn for fqn, parameter in held.items() if not isinstance(parameter, DTensor)]
    assert outside == (["query_tokens"] if name == "blip2" else [])
    # With masters in fp32 nothing but what is computed in fp32 is apart.
    own = set() if (name, run.dtype) == ("deberta", "fp32") else {*OWN_UNITS[name]}
    assert own <= units
    plain = {path for path in units if not path or path.rpartition(".")[2].isdecimal()}
    assert name == "blip2" or units - own <= plain | {"deberta.embeddings"}
