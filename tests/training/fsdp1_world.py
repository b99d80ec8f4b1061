"""Real gloo worlds in which FSDP1, accelerate's FSDP1, transformers' Trainer and Lightning fill a prepared model unit by unit.

    python fsdp1_world.py OUT

Writes OUT/<first check>-<rank>.json: by check what went wrong, or the error that was raised, or figures.
It is a script: memory is measured in fresh processes, and accelerate and Lightning may be missing.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from lightning.pytorch.strategies import FSDPStrategy
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import ShardkitError
from tests.distributed.trainers.accelerate_cases import allow_cpu
from tests.distributed.trainers.lightning_cases import OnCpu
from tests.training.finalize_world_memory import Watch
from tests.training.models import reference, save
from tests.training.wrapping import blocks_of, run_model, same
from tests.worlds.processes import agent_store, fork, return_freed_memory, wait

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
SIZE = 2
OUTER = ("model.embed_tokens", "model.norm", "lm_head")
"""All of a Llama that lies outside of its blocks."""
CPU = torch.device("cpu")


def policy(model: nn.Module) -> ModuleWrapPolicy:
    return ModuleWrapPolicy({type(block) for block in blocks_of(model)})


def wrapped(model: nn.Module, ignored: tuple[str, ...] = (), **options: Any) -> FullyShardedDataParallel:
    if ignored:
        options["ignored_modules"] = [model.get_submodule(path) for path in ignored]
    given = {"auto_wrap_policy": policy(model), "device_id": CPU, "use_orig_params": True, **options}
    return FullyShardedDataParallel(model, **given)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, gathered by FSDP1 itself."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        return {name.replace("_fsdp_wrapped_module.", ""): value.detach().clone() for name, value in named}


def prepared(name: str, out: Path, source: Any = None, **options: Any) -> Any:
    ctx = shardkit.prepare(str(out / name), source or str(out / name), **options)
    ctx.model.eval()
    assert all(parameter.is_meta for parameter in ctx.model.parameters())
    return ctx


def check(name: str, out: Path, *, source: Any = None, **options: Any) -> None:
    """Equal in every bit to a model that was loaded whole and wrapped in the same way, forward, backward and a step."""
    ctx = prepared(name, out, source() if callable(source) else source and str(out / source))
    init = shardkit.param_init_fn(ctx)
    model = wrapped(ctx.model, param_init_fn=init, **options)
    init(ctx.model)  # for what FSDP1 ignores; nothing is left otherwise
    expected = wrapped(reference(name).eval(), **options)
    same(whole(model), whole(expected), "values")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, expected)]
    logits = [run_model(name, each) for each in (model, expected)]
    assert torch.equal(*logits), "logits"
    torch.testing.assert_close(logits[0], run_model(name, reference(name).eval()), rtol=1e-4, atol=1e-4)
    for each, optimizer in zip((model, expected), optimizers, strict=True):
        run_model(name, each).float().square().mean().backward()
        optimizer.step()
    same(whole(model), whole(expected), "after a step")


def check_hybrid(out: Path, strategy: ShardingStrategy, source: Any = None) -> None:
    """On a mesh that replicates and shards; then the norm of the gradients, saving and consolidating."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    options: dict[str, Any] = {"device_mesh": mesh, "sharding_strategy": strategy}
    check("llama-tied", out, source=source, **options)
    ctx = prepared("llama-tied", out, source() if source else None)
    model = wrapped(ctx.model, param_init_fn=shardkit.param_init_fn(ctx), **options)
    plain = reference("llama-tied").eval()
    for each in (model, plain):
        run_model("llama-tied", each).square().mean().backward()
    norms = [shardkit.grad_norm(each) for each in (model, plain)]
    torch.testing.assert_close(*norms)
    place = out / f"saved-{strategy.name}-{source is None}"
    shardkit.save(model, place)
    if dist.get_rank() == 0:
        shardkit.consolidate(place, str(place) + "-hub", base=str(out / "llama-tied"))
        found, wanted = (load_file(f"{at}/model.safetensors") for at in (f"{place}-hub", out / "llama-tied"))
        same(found, wanted, "consolidated")


def check_ignored(out: Path, *ignored: str) -> None:
    """What FSDP1 leaves alone is filled too: whole, on every rank."""
    check("llama", out, ignored=ignored)


def check_bf16(out: Path) -> None:
    """fp32 masters, computing in bf16: logits are those of the model in bf16."""
    ctx = prepared("llama", out, dtype="fp32")
    precision = shardkit.bf16_mixed_precision("fsdp1")
    assert isinstance(precision, MixedPrecision)
    model = wrapped(ctx.model, param_init_fn=shardkit.param_init_fn(ctx), mixed_precision=precision)
    assert all(value.dtype == torch.float32 for value in whole(model).values())
    expected = transformers.LlamaForCausalLM.from_pretrained(out / "llama", dtype=torch.bfloat16)
    assert torch.equal(run_model("llama", model), run_model("llama", expected.eval()))


def check_new_head(out: Path) -> None:
    """What the source lacks is initialised, the same on all ranks and as in any world."""

    def build() -> nn.Module:
        return transformers.LlamaForSequenceClassification(
            transformers.AutoConfig.from_pretrained(out / "llama")
        )

    options: dict[str, Any] = {"missing": ["score.*"], "tokenizer": 120}
    models = [shardkit.prepare(build, str(out / "llama"), **options) for _ in range(2)]
    values = whole(wrapped(models[0].model, param_init_fn=shardkit.param_init_fn(models[0])))
    same(values, plain_values(shardkit.finalize(models[1].model, models[1])), "values")


def plain_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}


def rank_source() -> Any:
    return shardkit.from_rank(reference("llama-tied").state_dict() if dist.get_rank() == 1 else None, rank=1)


def never_filled(out: Path) -> None:
    """All that the root has is ignored, so FSDP1 never calls the function for it, and nobody does."""
    ctx = prepared("llama", out)
    run_model("llama", wrapped(ctx.model, OUTER, param_init_fn=shardkit.param_init_fn(ctx)))


def accelerator(name: str, **options: Any) -> accelerate.Accelerator:
    allow_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[name],
        use_orig_params=True,
        **{"cpu_ram_efficient_loading": False, "sync_module_states": False, **options},
    )
    return accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)


def check_accelerate(out: Path) -> None:
    """`accelerator.prepare` wraps; its own re-tying and ours agree."""
    made = accelerator("LlamaDecoderLayer")
    plugin = made.state.fsdp_plugin
    ctx = prepared("llama-tied", out)
    plugin.param_init_fn = shardkit.param_init_fn(ctx, plugin)
    model = made.prepare(ctx.model)
    assert isinstance(model, FullyShardedDataParallel)
    expected = wrapped(reference("llama-tied").eval())
    same(whole(model), whole(expected), "values")
    torch.testing.assert_close(run_model("llama-tied", model), run_model("llama-tied", expected))
    optimizer = made.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    made.backward(run_model("llama-tied", model).square().mean())
    optimizer.step()
    other = torch.optim.AdamW(expected.parameters(), lr=0.01)
    run_model("llama-tied", expected).square().mean().backward()
    other.step()
    same(whole(model), whole(expected), "after a step")


def check_trainer(out: Path) -> None:
    """The recipe of the docs for transformers' Trainer."""
    allow_cpu()
    arguments = transformers.TrainingArguments(
        output_dir=str(out / "run"),
        use_cpu=True,
        accelerator_config={"use_configured_state": True},
        fsdp=True,
        fsdp_config={
            "version": 1,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
            "use_orig_params": True,
        },
        per_device_train_batch_size=1,
        max_steps=1,
        learning_rate=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    ctx = prepared("llama-tied", out)
    rows = [{"input_ids": torch.arange(7), "labels": torch.arange(7)}] * 4
    trainer = transformers.Trainer(model=ctx.model, args=arguments, train_dataset=rows)
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.param_init_fn = shardkit.param_init_fn(ctx, plugin)
    done = trainer.train()
    row = torch.arange(7)[None]
    loss = reference("llama-tied")(input_ids=row, labels=row).loss
    torch.testing.assert_close(torch.tensor(done.training_loss), loss.detach(), rtol=1e-4, atol=1e-4)
    assert isinstance(trainer.model_wrapped, FullyShardedDataParallel)
    same(whole(trainer.model_wrapped), whole(wrapped(reference("llama-tied"))), "values")


class Lightning(pl.LightningModule):
    def __init__(self, out: Path) -> None:
        super().__init__()
        self.net: Any = None
        self.out = out
        self.values: dict[str, torch.Tensor] = {}
        self.logits: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            ctx = shardkit.prepare(str(self.out / "llama-tied"), str(self.out / "llama-tied"))
            self.net = ctx.model
            strategy: Any = self.trainer.strategy
            strategy.kwargs["param_init_fn"] = shardkit.param_init_fn(ctx, strategy)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.logits = run_model("llama-tied", self.net)
        return self.logits.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.0)


def check_lightning(out: Path) -> None:
    strategy = OnCpu(auto_wrap_policy={transformers.models.llama.modeling_llama.LlamaDecoderLayer})
    module = Lightning(out)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=SIZE,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(module, DataLoader(torch.arange(4)))
    expected = wrapped(reference("llama-tied"))
    wrapper: Any = trainer.strategy.model
    values = {name.removeprefix("net."): value for name, value in whole(wrapper).items()}
    same(values, whole(expected), "values")
    torch.testing.assert_close(module.logits, run_model("llama-tied", expected), rtol=1e-5, atol=1e-5)


def attempt(work: Callable[[], object]) -> dict[str, Any]:
    try:
        work()
    except ShardkitError as error:
        return error.to_json()
    return {"error": ""}


def refusals(out: Path) -> dict[str, Callable[[], object]]:
    ctx = prepared("llama", out)
    tied = prepared("llama-tied", out)
    there = {"auto_wrap_policy": ModuleWrapPolicy({nn.Embedding})}

    def under(variable: str) -> Callable[[], object]:
        def run() -> None:
            os.environ[variable] = "true"
            try:
                shardkit.param_init_fn(ctx)
            finally:
                del os.environ[variable]

        return run

    def replaced() -> None:
        """What accelerate does when its plugin is made later: memory that nobody fills."""
        other = prepared("llama", out)
        shardkit.param_init_fn(other)
        model = wrapped(other.model, param_init_fn=lambda module: module.to_empty(device=CPU, recurse=False))
        run_model("llama", model)

    def stranger() -> None:
        other = prepared("llama", out)
        with torch.device("meta"):
            holder = nn.ModuleDict({"model": other.model, "head": nn.Linear(3, 3)})
        wrapped(holder, param_init_fn=shardkit.param_init_fn(other), auto_wrap_policy=policy(other.model))

    def one_rank() -> None:
        state = {k: v.clone() for k, v in reference("llama").state_dict().items()}
        other = prepared("llama", out, shardkit.from_rank(state if dist.get_rank() == 1 else None, rank=1))
        state["model.norm.weight"].untyped_storage().resize_(0)
        wrapped(other.model, param_init_fn=shardkit.param_init_fn(other))

    plugin, first = (
        FullyShardedDataParallelPlugin(fsdp_version=2),
        FullyShardedDataParallelPlugin(fsdp_version=1),
    )
    first.sync_module_states = True  # as cpu_ram_efficient_loading=True sets it, which needs an accelerator
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    lightning_like = FSDPStrategy.__new__(FSDPStrategy)
    lightning_like.kwargs = {"sync_module_states": True}
    return {
        "sync variable": under("FSDP_SYNC_MODULE_STATES"),
        "efficient variable": under("FSDP_CPU_RAM_EFFICIENT_LOADING"),
        "plugin of FSDP2": lambda: shardkit.param_init_fn(ctx, plugin),
        "plugin of FSDP1": lambda: shardkit.param_init_fn(ctx, first),
        "arguments": lambda: shardkit.param_init_fn(ctx, {"sync_module_states": True}),
        "lightning": lambda: shardkit.param_init_fn(ctx, lightning_like),
        "read": lambda: shardkit.param_init_fn(ctx, read="disk"),  # type: ignore[arg-type]
        "apart": lambda: wrapped(tied.model, param_init_fn=shardkit.param_init_fn(tied), **there),
        "replaced": replaced,
        "ignored": lambda: never_filled(out),
        "stranger": stranger,
        "one rank fails": one_rank,
    }


def layers() -> nn.Sequential:
    """160 MiB in units of 4 MiB."""
    return nn.Sequential(*(nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16) for _ in range(40)))


def memory(out: Path) -> dict[str, int]:
    """Of a process that has loaded nothing before: freed memory would be used again."""
    ctx = shardkit.prepare(layers, str(out / "large"))
    init = shardkit.param_init_fn(ctx)
    with Watch() as watch:
        done = wrapped(ctx.model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), param_init_fn=init)
    held = sum(parameter.nbytes for parameter in done.parameters())
    return {"extra": watch.peak - held, "held": held}


def let_start(rank: int, size: int = SIZE) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), GROUP_RANK="0"
    )
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    original = FullyShardedDataParallel.__init__

    @functools.wraps(original)
    def on_cpu(self: FullyShardedDataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "device_id": CPU})  # Lightning names no device on a CPU

    FullyShardedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]


def run_memory(rank: int, out: Path) -> None:
    let_start(rank)
    dist.init_process_group("gloo")
    (out / f"memory-{rank}.json").write_text(json.dumps(memory(out)))
    dist.barrier()


def run(rank: int, out: Path, names: list[str], size: int = SIZE) -> None:
    let_start(rank, size)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in names:
        try:
            CHECKS[name](out)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    if "tied" in names:
        found["refused"] = {name: attempt(work) for name, work in refusals(out).items()}
        dist.barrier()
    (out / f"{names[0]}-{rank}.json").write_text(json.dumps(found))


CHECKS: dict[str, Callable[[Path], None]] = {
    "tied": partial(check, "llama-tied"),
    "tied flat": partial(check, "gpt2", use_orig_params=False),
    "buffers": partial(check, "bert"),
    "presharded": partial(check, "llama", source="llama-pre2"),
    "from_rank": partial(check, "llama-tied", source=rank_source),
    "ignored": lambda out: check_ignored(out, "model.norm", "model.layers.1.mlp"),
    "ignored root": lambda out: check_ignored(out, *OUTER),
    "one unit": partial(check, "qwen3", auto_wrap_policy=None),
    "bf16": check_bf16,
    "new head": check_new_head,
    "accelerate": check_accelerate,
    "lightning": check_lightning,
    "trainer": check_trainer,  # accelerate keeps what it is started with
    "hybrid": lambda out: check_hybrid(out, ShardingStrategy.HYBRID_SHARD),
    "hybrid zero2": lambda out: check_hybrid(out, ShardingStrategy._HYBRID_SHARD_ZERO2, rank_source),
}


def world(work: Callable[..., None], *arguments: Any, size: int = SIZE) -> None:
    with agent_store() as place:
        os.environ.update(place)
        wait([fork(partial(work, rank, *arguments)) for rank in range(size)])


if __name__ == "__main__":
    out = Path(sys.argv[1])
    return_freed_memory()
    for name in ("llama", "llama-tied", "gpt2", "bert", "qwen3"):
        run_model(name, save(name, out / name))
    (out / "bare").mkdir()
    os.link(out / "llama/model.safetensors", out / "bare/model.safetensors")
    shardkit.preshard(str(out / "bare"), str(out / "llama-pre2"), world_size=2, wrap="none")
    (out / "large").mkdir()
    values = {name: torch.randn(value.shape).bfloat16() for name, value in layers().state_dict().items()}
    save_file(values, out / "large/model.safetensors")
    (out / "large/config.json").write_text("{}")
    del values
    world(run_memory, out)
    *most, trainer, hybrid, zero2 = CHECKS
    world(run, out, most)
    world(run, out, [trainer])
    world(run, out, [hybrid, zero2], 4, size=4)
