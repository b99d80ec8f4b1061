"""Parameters on meta and buffers as the real model has them, whatever builds it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from shardkit._torch import non_persistent_buffers
from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.training.finalize import load_into
from shardkit.training.model import build
from shardkit.training.model.buffers import class_buffers, unlike_computed
from shardkit.training.model.build import build_model
from tests.training import models
from tests.worlds.processes import return_freed_memory

MODELS = ["llama-tied", "gpt2", "bert-lm", "qwen2-vl", "qwen3-moe"]


class Rope(nn.Module):
    """Has every kind of buffer and a plain attribute, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 6), persistent=False)
        self.original_inv_freq = self.inv_freq
        self.mask = torch.tril(torch.ones(3, 3, dtype=torch.bool))
        self.tables = [torch.arange(3), torch.arange(4)]


def compute(model: nn.Module) -> None:
    """What a person gives as init_buffers."""
    for module in model.modules():
        if isinstance(module, Rope):
            module.seen.zero_()
            module.inv_freq.copy_(1.0 / torch.arange(1, 6))
            module.mask = torch.tril(torch.ones(3, 3, dtype=torch.bool))
            module.tables = [torch.arange(3), torch.arange(4)]


def meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def shape_of(model: nn.Module) -> Any:
    """All that must be as in the real model, but for parameters' memory."""
    ties: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(name)
    hidden = {path: non_persistent_buffers(module) for path, module in model.named_modules()}
    described = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    return described, sorted(ties.values()), hidden, list(model.state_dict())


def assert_built(built: nn.Module, real: nn.Module) -> None:
    assert shape_of(built) == shape_of(real)
    assert all(parameter.is_meta for parameter in built.parameters())
    expected = dict(real.named_buffers())
    for name, buffer in built.named_buffers():
        assert buffer.dtype == expected[name].dtype
        assert torch.equal(buffer, expected[name]), name


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_becomes_the_model_of_transformers(name: str, tmp_path: Path) -> None:
    models.config_of(name).save_pretrained(tmp_path)
    built = build_model(str(tmp_path))
    real = models.reference(name)
    assert_built(built, real)
    # Not the attention of a tracing child.
    assert built.config._attn_implementation == real.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", MODELS)
def test_buffers_of_a_transformers_model_on_meta_are_computed_anew(name: str) -> None:
    real = models.reference(name)
    on_meta = meta(lambda: type(real)(models.config_of(name)))
    assert all(buffer.is_meta for buffer in on_meta.buffers())
    assert_built(build_model(on_meta), real)


def test_a_model_of_transformers_that_only_its_constructor_completes(tmp_path: Path) -> None:
    from transformers import MimiConfig, MimiModel

    config = MimiConfig(num_hidden_layers=1)
    config.architectures = ["MimiModel"]
    config.save_pretrained(tmp_path)
    # Convolutions keep their padding in tensors that are neither parameter nor buffer.
    with pytest.raises(LayoutError, match="padding_left"):
        build_model(meta(lambda: MimiModel(config)))
    built: Any = build_model(str(tmp_path))
    assert_built(built, MimiModel(config))
    assert not built.encoder.encoder_seanet.layers[0].padding_left.is_meta


def test_tensors_in_nested_objects_of_a_model_with_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(type(models.reference("llama"))):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.held = SimpleNamespace(tables=[(torch.arange(3.0),)])

    models.config_of("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(build, "find_class", lambda *_, **__: (Own, models.config_of("llama")))
    built: Any = build_model(str(tmp_path))
    assert torch.equal(built.held.tables[0][0], torch.arange(3.0))
    assert all(parameter.is_meta for parameter in built.parameters())


def test_experts_larger_than_the_machine_are_never_allocated(tmp_path: Path) -> None:
    models.config_of("qwen3-moe", num_experts=1 << 14, moe_intermediate_size=1 << 14).save_pretrained(
        tmp_path
    )
    built = build_model(str(tmp_path))
    assert max(parameter.numel() for parameter in built.parameters()) * 4 > 24 << 30


def test_memory_stays_that_of_no_parameter() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(48)))  # 1 GiB each

    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_kib("VmRSS")
    model = build_model(build)
    assert peak_kib("VmHWM") - before < 64 << 10
    assert sum(parameter.numel() * 4 for parameter in model.parameters()) == 48 << 30


def peak_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def test_buffers_and_attributes_of_a_function_are_real() -> None:
    model = build_model(lambda: nn.Sequential(Rope(), nn.Linear(3, 2)))
    rope: Any = model[0]
    assert rope.weight.is_meta
    assert torch.equal(rope.inv_freq, 1.0 / torch.arange(1, 6))
    assert rope.original_inv_freq is rope.inv_freq
    assert non_persistent_buffers(rope) == {"inv_freq"}
    assert rope.mask.sum() == 6
    assert "inv_freq" not in rope.state_dict()


def test_a_function_that_builds_on_meta_is_a_model_on_meta() -> None:
    model = build_model(lambda: meta(Rope), init_buffers=compute)
    assert_built(model, Rope())
    assert model.original_inv_freq is model.inv_freq
    assert not model.tables[0].is_meta


def test_what_nobody_computes_is_listed() -> None:
    with pytest.raises(LayoutError) as caught:
        build_model(lambda: meta(lambda: nn.Sequential(Rope(), Rope())))
    names = [problem.split(":")[0] for problem in caught.value.problems]
    each = ["mask", "original_inv_freq", "tables[0]", "tables[1]"]
    # Not `seen`, which is persistent: the source may have it.
    assert sorted(names) == sorted(
        ["0.inv_freq", "1.inv_freq", *(f"{at}.{name}" for at in (0, 1) for name in each)]
    )


def test_a_buffer_that_is_written_in_part_is_not_computed() -> None:
    def partly(model: Any) -> None:
        before = model.inv_freq.clone()
        compute(model)
        model.inv_freq[4:] = before[4:]

    with pytest.raises(LayoutError, match="nothing computes") as caught:
        build_model(lambda: meta(Rope), init_buffers=partly)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["inv_freq", "original_inv_freq"]


def test_persistence_survives_a_function_that_registers_anew() -> None:
    def register(model: Any) -> None:
        compute(model)
        model.register_buffer("inv_freq", 1.0 / torch.arange(1, 6))  # persistent from now on

    model = build_model(meta(Rope), init_buffers=register)
    assert non_persistent_buffers(model) == {"inv_freq"}


def test_random_buffers_are_the_same_in_every_process() -> None:
    def draw(model: Any) -> None:
        compute(model)
        model.inv_freq.normal_()

    torch.manual_seed(1)
    one = build_model(meta(Rope), init_buffers=draw).inv_freq
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert torch.equal(build_model(meta(Rope), init_buffers=draw).inv_freq, one)
    assert torch.equal(torch.random.get_rng_state(), before)


class Odd(nn.Module):
    """Holds parameters in ways that a replacement would miss."""

    def __init__(self) -> None:
        super().__init__()
        held = nn.Parameter(torch.randn(3, 3))
        self.first, self.second = held, held
        self.kept = [held]
        self.by_hand = nn.Linear(3, 3)
        self.by_hand._parameters["weight"] = nn.Parameter(torch.randn(3, 3))
        recorded = nn.Parameter(torch.ones(2))
        self.graph = recorded * 2  # autograd holds on to the parameter
        self.recorded = self.again = recorded
        self.graph = None
        nn.init.normal_(held)


def unlike(model: nn.Module) -> list[str]:
    return unlike_computed(model, class_buffers(model))


def orthogonal() -> nn.Module:
    return nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))


def reading(read: Any) -> Any:
    """Return a function that builds a layer and reads its weight."""

    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.norm = read(layer.weight.detach())
        return layer

    return build


READING = {
    "orthogonal": orthogonal,
    "spectral norm of old": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "item": reading(lambda weight: weight.norm().item()),
    "numpy": reading(lambda weight: weight.numpy()),
    "bool": reading(lambda weight: bool(weight.isfinite().all())),
    "list": reading(lambda weight: weight.tolist()),
    "equal": reading(lambda weight: torch.equal(weight, weight)),
    "text": reading(lambda weight: f"{weight.sum():.3f}"),
    "kept": reading(lambda weight: weight.sum(1)),
}


@pytest.mark.parametrize("name", READING)
def test_code_that_reads_weights_gets_the_way_that_works(name: str, tmp_path: Path) -> None:
    build = READING[name]
    with pytest.raises(LayoutError) as caught:
        build_model(build)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(
        "build it with memory: model = shardkit.wrap(build(), mesh), and then"
    )
    wanted, model = build(), build()
    save_file(
        {key: value.contiguous() for key, value in wanted.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    parameters = list(model.parameters())
    load_into(model, tmp_path / "model.safetensors")
    assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
    x = torch.ones(2, 3)
    assert torch.equal(model.eval()(x), wanted.eval()(x))


def test_other_errors_of_the_code_stay_what_they_are() -> None:
    def build() -> nn.Module:
        raise RuntimeError("the metadata of a tensor is wrong")

    with pytest.raises(RuntimeError, match="metadata"):
        build_model(build)


@pytest.mark.parametrize("name", ["qwen3", "qwen2-vl"])
def test_buffers_unlike_what_the_class_computes_are_found(name: str) -> None:
    model = models.reference(name)
    wrapped = nn.ModuleDict({"net": model})
    assert unlike(wrapped) == unlike(wrapped.to(torch.bfloat16)) == []
    buffers = {f"net.{fqn}": buffer for fqn, buffer in model.named_buffers()}
    hidden = {fqn for fqn in buffers if fqn not in wrapped.state_dict()}
    grown = [fqn for fqn in hidden if fqn.endswith(".original_inv_freq")]
    for fqn in grown:  # as a forward that is longer than the model was trained for does
        buffers[fqn.replace("original_", "")].mul_(0.5)
    assert unlike(wrapped) == []
    for noise in (0.0, float("nan")):
        for buffer in buffers.values():
            buffer.fill_(noise)
        assert set(unlike(wrapped)) == hidden
    assert grown


def test_ties_are_one_object_however_they_are_held() -> None:
    model: Any = build_model(Odd)
    assert model.first is model.second
    assert model.kept[0] is model.first
    assert model.recorded is model.again
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(list(model.parameters())) == 4


def test_register_parameter_is_put_back_after_an_exception() -> None:
    original = nn.Module.register_parameter

    def build() -> nn.Module:
        assert nn.Module.register_parameter is not original
        raise KeyError("a mistake in the model")

    with pytest.raises(KeyError):
        build_model(build)
    assert nn.Module.register_parameter is original
    assert not nn.Linear(2, 2).weight.is_meta


def test_dtypes_are_of_floating_parameters_alone() -> None:
    class Mixed(Rope):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.steps = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
            self.scaled = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)

    model: Any = build_model(Mixed, dtype="bf16")
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == {
        "weight": torch.bfloat16,
        "wide": torch.bfloat16,
        "steps": torch.int32,
        "scaled": torch.float8_e4m3fn,
    }
    assert model.inv_freq.dtype == torch.float32
    assert build_model(Mixed).wide.dtype == torch.float64
    assert build_model(Mixed, dtype=torch.float16).weight.dtype == torch.float16


def test_modules_that_a_class_keeps_in_fp32_stay_so(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM, T5Config

    config = T5Config(d_model=12, d_kv=4, d_ff=19, num_layers=1, num_heads=3, vocab_size=50)
    config.architectures = ["T5ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    half = {name: p.dtype for name, p in build_model(str(tmp_path), dtype="fp16").named_parameters()}
    assert {name for name, dtype in half.items() if dtype == torch.float32} == {
        name for name in half if ".wo." in name
    }
    assert any(dtype == torch.float32 for dtype in half.values())
    brain = build_model(str(tmp_path), dtype="bf16")  # transformers: only about fp16
    assert {p.dtype for p in brain.parameters()} == {torch.bfloat16}

    class Strict(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ("norm",)

    strict = build_model(lambda: Strict(models.llama()), dtype="bf16")
    wide = {name for name, p in strict.named_parameters() if p.dtype == torch.float32}
    assert wide == {name for name, _ in strict.named_parameters() if "norm" in name}


def test_what_a_class_makes_fp32_stays_so(tmp_path: Path) -> None:
    """A router, biases: of each tensor the dtype that `from_pretrained` gives it, however the model is built."""
    import transformers

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    router = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 2, "moe_topk": 1, "vocab_size": 50}
    configs = {
        "HunYuanMoEV1ForCausalLM": transformers.HunYuanMoEV1Config(**small, **router),
        "DebertaForMaskedLM": transformers.DebertaConfig(**small, vocab_size=50),
    }
    for name, config in configs.items():
        kind = getattr(transformers, name)
        config.architectures = [name]
        kind(config).save_pretrained(tmp_path / name)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            right = {
                n: p.dtype for n, p in kind.from_pretrained(tmp_path / name, dtype=dtype).named_parameters()
            }
            assert {torch.float32, dtype} == set(right.values())
            for what in (str(tmp_path / name), partial(kind, config), meta(partial(kind, config))):
                found = build_model(what, dtype=dtype)
                assert {n: p.dtype for n, p in found.named_parameters()} == right


def test_a_class_that_takes_more_than_a_config_is_asked_for_its_list_alone() -> None:
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ("norm",)

        def __init__(self, config: Any, more: int) -> None:
            super().__init__(config)

    found = build_model(lambda: Own(models.llama(), 1), dtype="bf16")
    assert {n for n, p in found.named_parameters() if p.dtype == torch.float32} == {
        n for n, _ in found.named_parameters() if "norm" in n
    }


def test_an_own_dtype_of_the_config_is_kept(tmp_path: Path) -> None:
    models.config_of("llama", dtype="bfloat16").save_pretrained(tmp_path)
    assert {p.dtype for p in build_model(str(tmp_path)).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in build_model(str(tmp_path), dtype="fp32").parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "half", torch.int32, 5])
def test_dtypes_that_hold_no_weights_are_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match="cannot hold weights"):
        build_model(Rope, dtype=dtype)


def test_what_is_no_plain_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="wrapped already") as caught:
        build_model(meta(lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))))
    assert caught.value.problems == ("0: DataParallel",)
    with pytest.raises(UsageError, match="memory for 2 parameters") as caught:
        build_model(nn.Linear(2, 3))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["weight", "bias"]
    with pytest.raises(LayoutError, match="2 tensors of the model without a shape before the first forward"):
        build_model(lambda: nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"not a torch\.nn\.Module"):
        build_model(lambda: 5)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="build_model is a int"):
        build_model(5)  # type: ignore[arg-type]


def test_configs_that_make_no_model_are_refused(tmp_path: Path) -> None:
    from shardkit.errors import SourceError

    with pytest.raises(SourceError, match="no such file or directory"):
        build_model(str(tmp_path / "absent/"))
    with pytest.raises(LayoutError, match=r"no config\.json to build a model from"):
        build_model(str(tmp_path))
    config = models.config_of("llama")
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    with pytest.raises(LayoutError, match="quantised"):
        build_model(str(tmp_path))


def test_a_models_own_config_need_not_list_the_part_that_says_quantised() -> None:
    class Config(transformers.PretrainedConfig):  # type: ignore[misc]
        model_type = "of_its_own_code"

    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = Config(text_config=transformers.LlamaConfig(quantization_config=said))
    with pytest.raises(SourceError, match="fp8"):
        build._without_quantisation(config, "it", dequantize=False)
    build._without_quantisation(config, "it", dequantize=True)
    assert not hasattr(config.text_config, "quantization_config")
