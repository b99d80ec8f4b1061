"""Trainers start, with their own loading code, from what preshard writes in their form."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardkit
from shardkit.layout import traced
from tests.bits import raw
from tests.distributed.models import LLAMA, build
from tests.worlds.processes import forked_trace
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.prove

CONFIG = {**LLAMA, "head_dim": 4, "num_hidden_layers": 3}
WORLD = 2
PROFILES = ("accelerate", "lightning", "lightning-mp", "transformers")


def needs(package: str) -> Callable[[Any], Any]:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def preshard_all(out: Path) -> None:
    torch.manual_seed(0)
    build(CONFIG).save_pretrained(out / "hub")
    with mock.patch.object(traced, "_serve_request", forked_trace):
        for profile in PROFILES:
            shardkit.preshard(out / "hub", out / profile, world_size=WORLD, profile=profile)
        for profile in ("lightning", "lightning-mp"):  # whose module is the model itself
            fabric = out / f"fabric-{profile}"
            shardkit.preshard(out / "hub", fabric, world_size=WORLD, profile=profile, attribute="")


two = Ranks(__name__, WORLD, first=preshard_all)


def start_model() -> Any:
    """Build a model whose weights, other than the checkpoint's, must not pass for loaded ones."""
    torch.manual_seed(7)
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    return build(CONFIG)


def check(model: nn.Module, out: Path) -> None:
    """Compare every tensor of the model, bit for bit, with the Hub's."""
    expected = load_file(out / "hub" / "model.safetensors")
    found = {
        name.replace("_fsdp_wrapped_module.", ""): tensor.full_tensor()
        if isinstance(tensor, DTensor)
        else tensor.clone()  # FSDP1 frees what it has gathered
        for name, tensor in model.state_dict().items()
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor), name


def make_accelerator(version: int = 2) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tests.distributed.trainers.accelerate_cases import allow_cpu

    allow_cpu()
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=version,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )


@needs("accelerate")
@two.test_apart
def test_accelerate_loads_the_state_of_a_model(out: Path) -> None:
    """With FSDP1: with FSDP2, accelerate prepares no model without an optimizer, whose state it would load too."""
    from accelerate.utils import save_fsdp_model

    from tests.distributed.trainers.resuming import let_fsdp_use_cpu

    let_fsdp_use_cpu()
    model = start_model()
    accelerator = make_accelerator(1)
    model = accelerator.prepare(model)
    accelerator.load_state(str(out / "accelerate"))
    again = out / "again"
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(again))
    if dist.get_rank() == 0:
        assert shardkit.diff(again, out / "hub").is_equal


@needs("accelerate")
@two.test_apart
def test_accelerate_loads_the_model_beside_an_optimizer(out: Path) -> None:
    from accelerate.utils import load_fsdp_model

    model = start_model()
    accelerator = make_accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(out / "accelerate"))
    check(model, out)
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()


class Stop(transformers.TrainerCallback):
    """Looks at the model when training begins, and stops after a step."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.seen: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        check(given["model"], self.out)
        self.seen.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append(state.global_step)


@needs("accelerate")
@two.test_apart
def test_a_trainer_of_transformers_starts_from_it_and_saves(out: Path) -> None:
    from tests.distributed.trainers.accelerate_cases import allow_cpu

    model, rows = start_model(), [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    allow_cpu()
    arguments = transformers.TrainingArguments(
        output_dir=str(out / "trainer"),
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
        per_device_train_batch_size=2,
        max_steps=1,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Stop(out)
    callbacks = [watch, transformers.EarlyStoppingCallback(early_stopping_patience=7)]
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=str(out / "accelerate"))
    assert watch.seen == [0, 1]
    state = json.loads((out / "trainer" / "checkpoint-1" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 7


def lightning_strategy(kind: str, *, fabric: bool = False) -> Any:
    from tests.distributed.trainers import lightning_cases as cases

    if kind == "lightning":
        cases.let_fsdp_use_cpu()
        policy = {type(build(CONFIG).model.layers[0])}
        make = cases.FabricOnCpu if fabric else cases.OnCpu
        return make(state_dict_type="sharded", auto_wrap_policy=policy)
    return (
        cases.FabricModelParallelStrategy(shard, WORLD, 1)
        if fabric
        else cases.ModelParallelStrategy(WORLD, 1)
    )


def shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def make_trainer(kind: str, out: Path) -> Any:
    import lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=lightning_strategy(kind),
        max_steps=1,
        limit_val_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )


def make_module(out: Path, path: Path) -> Any:
    """Return a LightningModule that compares its model with the Hub's whenever work begins."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = start_model()
            self.seen: list[str] = []

        def configure_model(self) -> None:
            is_sharded = any(isinstance(each, DTensor) for each in self.model.parameters())
            if isinstance(self.trainer.strategy, ModelParallelStrategy) and not is_sharded:
                shard(self.model, self.device_mesh)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def look(self, what: str, inside: nn.Module) -> None:
            with gathered(inside):
                check(self.model, out)
            self.seen.append(what)

        def on_fit_start(self) -> None:
            """Load as docs/trainers.md says: without the optimizers, of which the checkpoint has no state."""
            strategy = self.trainer.strategy
            optimizers, strategy.optimizers = strategy.optimizers, []
            strategy.load_checkpoint(path)
            strategy.optimizers = optimizers

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            if not self.seen:
                self.look("validation", self)  # the root's own are whole during its forward

        def on_train_start(self) -> None:
            self.look("training", self.trainer.strategy.model)

        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            return self.model(input_ids=batch, labels=batch).loss

    return Module()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Hold whole parameters where FSDP1 has flattened them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with contextlib.ExitStack() as stack:
        for each in module.modules():
            if isinstance(each, FullyShardedDataParallel):
                stack.enter_context(FullyShardedDataParallel.summon_full_params(each, recurse=False))
        yield


@needs("lightning")
@two.test_each_apart(["lightning", "lightning-mp"])
def test_lightning_validates(kind: str, out: Path) -> None:
    from torch.utils.data import DataLoader

    module, batches = make_module(out, out / kind), DataLoader(torch.arange(36).reshape(4, 9))
    trainer = make_trainer(kind, out / f"{kind}-validated")
    trainer.validate(module, batches, ckpt_path=str(out / kind), verbose=False)
    assert module.seen == ["validation"]


@needs("lightning")
@two.test_each_apart(["lightning", "lightning-mp"])
def test_lightning_trains(kind: str, out: Path) -> None:
    from torch.utils.data import DataLoader

    module, batches = make_module(out, out / kind), DataLoader(torch.arange(36).reshape(4, 9))
    trainer = make_trainer(kind, out / f"{kind}-trained")
    trainer.fit(module, batches)
    assert module.seen == ["training"]
    assert trainer.global_step == 1


@needs("lightning")
@two.test_each_apart(["lightning", "lightning-mp"])
def test_fabric_loads_it(kind: str, out: Path) -> None:
    import lightning

    fabric = lightning.Fabric(
        accelerator="cpu", devices=WORLD, strategy=lightning_strategy(kind, fabric=True)
    )
    fabric.launch()
    model = fabric.setup_module(start_model())
    key = "model" if kind == "lightning" else "state_dict"
    fabric.load(out / f"fabric-{kind}", {key: model})
    with gathered(model):
        check(model.module, out)


TITAN: dict[str, Any] = {
    **LLAMA,
    **{"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 16},
    **{"num_key_value_heads": 16, "head_dim": 16, "vocab_size": 2048, "rms_norm_eps": 1e-5},
    "rope_parameters": {
        **{"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "max_position_embeddings": 131072,
}
"""What torchtitan's debug model of Llama 3 is on the Hub."""


def titan_manager(model: nn.Module, folder: Path, **options: Any) -> Any:
    """Return torchtitan's own manager of checkpoints for a model without an optimizer."""
    from torchtitan.components.checkpoint import CheckpointManager

    config = CheckpointManager.Config(enable=True, folder=str(folder), **options)
    return CheckpointManager(
        config,
        dataloader=None,
        model_parts=[model],
        optimizers=None,  # type: ignore[arg-type]
        lr_schedulers=None,  # type: ignore[arg-type]
        states={},
        sd_adapter=None,
    )


@needs("torchtitan")
@two.test_apart
def test_torchtitan_starts_from_it_and_its_checkpoint_comes_back(out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.models.llama3 import Llama3StateDictAdapter, llama3_configs

    if dist.get_rank() == 0:
        torch.manual_seed(0)
        build(TITAN).save_pretrained(out / "titan-hub")
        shardkit.preshard(out / "titan-hub", out / "titan", world_size=WORLD, profile="torchtitan")
    dist.barrier()
    config = llama3_configs["debugmodel"]("flex")
    torch.manual_seed(7)
    model = config.build()
    model.init_states()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for layer in (*model.layers.values(), model):
        fully_shard(layer, mesh=mesh)
    titan_manager(model, out / "none", initial_load_path=str(out / "titan")).load()

    expected = Llama3StateDictAdapter(config, None).from_hf(
        load_file(out / "titan-hub" / "model.safetensors")
    )
    found = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw(found[name]) == raw(tensor.contiguous()), name

    tokens, positions = torch.arange(32)[None], torch.arange(32)[None]
    hub = transformers.AutoModelForCausalLM.from_pretrained(out / "titan-hub", dtype=torch.float32)
    with torch.no_grad():
        logits = model(tokens, positions, model.get_attention_masks(positions))
        assert torch.allclose(logits, hub(tokens).logits, rtol=0, atol=1e-5)

    titan_manager(model, out / "saved", interval=1, last_save_model_only=True).save(1, last_step=True)
    if dist.get_rank() == 0:
        shardkit.consolidate(out / "saved" / "step-1", out / "titan-back", base=out / "titan-hub")
        found, expected = (load_file(out / at / "model.safetensors") for at in ("titan-back", "titan-hub"))
        assert found.keys() == expected.keys()
        assert all(raw(found[name]) == raw(tensor) for name, tensor in expected.items())


def start_from_pretrained(path: Path, **sizes: int) -> Any:
    """Load a model as transformers does it for a distributed config, on CPU."""
    from transformers.distributed import DistributedConfig

    start_model()
    config = DistributedConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config, dtype="auto")
    assert any(isinstance(tensor, DTensor) for tensor in model.parameters())
    return model


def read_files(work: Callable[[], Any]) -> tuple[Any, set[str]]:
    """Return what `work` returns, and the names of the files that torch's reader of safetensors shards read for it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    original, names = HuggingFaceStorageReader.read_data, set[str]()

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        names.update(Path(self.storage_data[item.storage_index].relative_path).name for item in plan.items)
        return original(self, plan, planner)

    with mock.patch.object(HuggingFaceStorageReader, "read_data", read_data):
        return work(), names


@two.test_apart
def test_transformers_loads_it_for_fsdp(out: Path) -> None:
    """And each rank reads its own file alone."""
    model, names = read_files(lambda: start_from_pretrained(out / "transformers", fsdp_size=WORLD))
    check(model, out)
    assert names == {f"shard-{dist.get_rank() + 1:05d}-model-00001-of-00001.safetensors"}


MOE: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "float32"},
    **{"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 64},
    **{"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": False},
}
TIED = {**CONFIG, "vocab_size": 102, "tie_word_embeddings": True}
PARALLEL = {
    "dp_shard=2,tp=2": {"fsdp_size": 2, "tp_size": 2},
    "dp_shard=4,ep=2": {"fsdp_size": 4, "ep_size": 2},
    "dp_replicate=2,dp_shard=2": {"dp_replicate_size": 2, "fsdp_size": 2},
}


def preshard_parallel(out: Path) -> None:
    torch.manual_seed(0)
    for name, config in (("moe", MOE), ("tied", TIED)):
        build(config).save_pretrained(out / f"{name}-hub")
    with mock.patch.object(traced, "_serve_request", forked_trace):
        for mesh in PARALLEL:
            shardkit.preshard(out / "moe-hub", out / f"moe-{mesh}", mesh=mesh, profile="transformers")
        shardkit.preshard(out / "tied-hub", out / "tied", world_size=4, profile="transformers")


four = Ranks(__name__, 4, first=preshard_parallel)


def held(model: nn.Module) -> dict[str, bytes]:
    return {
        name: raw(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in model.state_dict().items()
    }


@four.test_each_apart(list(PARALLEL))
def test_transformers_loads_it_in_parallel(mesh: str, out: Path) -> None:
    """As it loads and converts the Hub's own files: every rank holds the same bytes."""
    sizes = PARALLEL[mesh]
    expected = held(start_from_pretrained(out / "moe-hub", **sizes))
    assert held(start_from_pretrained(out / f"moe-{mesh}", **sizes)) == expected


@four.test_apart
def test_transformers_loads_tied_weights(out: Path) -> None:
    model = start_from_pretrained(out / "tied", fsdp_size=4)
    assert held(model) == held(start_from_pretrained(out / "tied-hub", fsdp_size=4))
    assert model.lm_head.weight is model.model.embed_tokens.weight
