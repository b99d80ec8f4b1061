"""Which weights become factors when a model is prepared: by plan, by its source, by the model itself."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import shardkit
from shardkit.core.factored import factor_of
from shardkit.errors import LayoutError, UsageError
from shardkit.osft.modules import OsftLinear, factor_modules, osft_modules
from shardkit.osft.plan import OsftPlan
from shardkit.training.prepare import prepare
from tests.osft.models import factored, targets_of
from tests.training.models import VOCABULARY, config_of, inputs, reference, save

PLAN = OsftPlan(ratio=0.3)
CHANGES: dict[str, Any] = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("osft") / "dense"
    save("llama", out, dtype=torch.bfloat16, **CHANGES)
    return str(out)


def bf16() -> Any:
    return reference("llama", dtype=torch.bfloat16, **CHANGES)


@pytest.fixture(scope="module")
def stored(dense: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Factors in fp32 beside weights in bf16, as stock `dcp.save` writes them, with the root of a trainer."""
    out = tmp_path_factory.mktemp("osft") / "stored"
    state = factored(bf16(), PLAN).state_dict()
    with warnings.catch_warnings(action="ignore"):  # it says that there is one process
        dcp.save({"model": state}, checkpoint_id=out)
    return str(out)


def dtypes(model: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Of factors, and of all others."""
    named = list(model.named_parameters())
    return (
        {parameter.dtype for name, parameter in named if factor_of(name)},
        {parameter.dtype for name, parameter in named if not factor_of(name)},
    )


FP32, BF16 = {torch.float32}, {torch.bfloat16}


def test_a_ratio_makes_factors_of_the_usual_targets(dense: str) -> None:
    ctx = prepare(dense, dense, osft=0.3)
    assert ctx.factoring.targets == targets_of(reference("llama", **CHANGES), PLAN)
    assert ctx.factoring.svd == "exact"
    assert list(osft_modules(ctx.model)) == [target.path for target in ctx.factoring.targets]
    assert all(parameter.is_meta for parameter in ctx.model.parameters())
    assert "model.layers.0.self_attn.q_proj.weight" not in ctx.expected
    assert dtypes(ctx.model) == (FP32, FP32)  # though the source is bf16
    assert dtypes(prepare(dense, dense, osft=0.3, dtype="bf16").model) == (FP32, BF16)
    assert dtypes(prepare(dense, dense).model) == (set(), BF16)


def test_factors_are_told_by_the_source(dense: str, stored: str) -> None:
    expected = factored(bf16(), PLAN).state_dict()
    for osft in (None, PLAN):
        ctx = prepare(dense, stored, osft=osft)
        assert ctx.factoring.targets == targets_of(bf16(), PLAN)
        assert ctx.factoring.svd is None
        assert dtypes(ctx.model) == (FP32, BF16)  # as they are stored
        model = shardkit.finalize(ctx.model, ctx)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert dtypes(prepare(dense, stored, dtype="fp32").model) == (FP32, FP32)


def test_a_plan_that_contradicts_the_source_is_refused(dense: str, stored: str) -> None:
    plan = OsftPlan(ratio=0.3, targets="auto,!*.v_proj,lm_head", ranks={"*.o_proj": 5})
    with pytest.raises(LayoutError) as caught:
        prepare(dense, stored, osft=plan)
    assert caught.value.message == "the source and osft= differ in 5 factors"
    assert caught.value.problems[1] == (
        "model.layers.0.self_attn.o_proj: 16 directions of [24, 24] kept in the source, "
        "5 directions of [24, 24] kept in osft="
    )
    assert caught.value.problems[-1] == (
        "lm_head: dense in the source, 16 directions of [101, 24] kept in osft="
    )


def on_meta() -> Any:
    import transformers

    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config_of("llama", **CHANGES))


def with_factors(plan: OsftPlan = PLAN) -> Any:
    model = on_meta()
    factor_modules(model, targets_of(model, plan))
    return model


def test_a_model_that_has_factors_is_taken(dense: str, stored: str) -> None:
    for source, svd in ((dense, "exact"), (stored, None)):
        for osft in (None, PLAN):
            ctx = prepare(with_factors(), source, osft=osft, dtype="bf16")
            assert ctx.factoring.svd == svd
            assert dtypes(ctx.model) == (FP32, BF16)
            again = prepare(copy.deepcopy(ctx.model), source)
            assert again.factoring.targets == ctx.factoring.targets
            assert again.expected == ctx.expected
    with pytest.raises(LayoutError, match="the source and the model differ in 2 factors"):
        prepare(with_factors(OsftPlan(ratio=0.3, ranks={"*.o_proj": 5})), stored)


def test_a_function_keeps_its_dtype(dense: str) -> None:
    assert dtypes(prepare(bf16, dense, osft=0.3).model) == (FP32, BF16)


def test_factors_of_another_model_are_refused(stored: str, tmp_path: Path) -> None:
    save("llama", tmp_path / "small", num_hidden_layers=1)
    with pytest.raises(LayoutError) as caught:
        prepare(str(tmp_path / "small"), stored)
    assert "weights that the model does not have" in caught.value.message
    assert "model.layers.1.self_attn.q_proj" in caught.value.problems
    assert len(caught.value.problems) == 7


def test_incomplete_factors_are_refused(dense: str, tmp_path: Path) -> None:
    state = {name: value.contiguous() for name, value in factored(bf16(), PLAN).state_dict().items()}
    del state["model.layers.1.mlp.up_proj.osft_params.S_low"]
    save_file(state, tmp_path / "cut.safetensors")
    with pytest.raises(LayoutError) as caught:
        prepare(dense, str(tmp_path / "cut.safetensors"))
    assert caught.value.problems == ("model.layers.1.mlp.up_proj: lacks osft_params.S_low",)


def test_a_target_that_the_source_lacks_is_not_initialised(dense: str, tmp_path: Path) -> None:
    state = {name: value.contiguous() for name, value in bf16().state_dict().items()}
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "cut.safetensors")
    for missing in ("error", "init"):
        with pytest.raises(LayoutError) as caught:
            prepare(dense, str(tmp_path / "cut.safetensors"), osft=0.3, missing=missing)
        assert "missing: model.layers.1.mlp.up_proj.weight" in caught.value.problems[0]


def test_what_cannot_be_is_refused(dense: str) -> None:
    asked: Any
    for asked, message in (
        (1, "full fine-tuning"),
        (0.0, "nothing would be trained"),
        ("0.3", "osft is a str"),
        (True, "osft is a bool"),
    ):
        with pytest.raises(UsageError) as caught:
            prepare(dense, dense, osft=asked)
        assert message in str(caught.value)
    plan = OsftPlan(ratio=0.3, ranks={"*.q": 3})
    with pytest.raises(UsageError, match=r"^OsftPlan\.ranks: 1 glob without a target") as caught:
        prepare(dense, dense, osft=plan)
    assert "ranks={'*.mlp.up_proj': 256}" in str(caught.value.hint)
    with pytest.raises(UsageError, match="without a source there are none"):
        prepare(dense, None, osft=0.3)


def test_rows_for_new_tokens_are_no_part_of_a_target(dense: str) -> None:
    tokens = VOCABULARY + 3
    plan = OsftPlan(ratio=0.3, targets="auto,lm_head")
    with pytest.raises(LayoutError) as caught:
        prepare(dense, dense, osft=plan, tokenizer=tokens)
    assert caught.value.problems == (f"lm_head.weight: [{tokens}, 24]",)
    with pytest.raises(LayoutError):
        prepare(with_factors(plan), dense, tokenizer=tokens)
    ctx = prepare(dense, dense, osft=0.3, tokenizer=tokens)
    assert set(ctx.grown) == {"model.embed_tokens.weight", "lm_head.weight"}
    model = shardkit.finalize(ctx.model, ctx)
    expected = reference("llama", dtype=torch.bfloat16, **CHANGES).float()(**inputs("llama")).logits
    assert (model(**inputs("llama")).logits[..., :VOCABULARY] - expected).abs().max() < 1e-5


def test_initialised_and_tied_tensors_beside_factors(tmp_path: Path) -> None:
    """A head that the source lacks is made, and what is tied stays one."""
    save("llama-tied", tmp_path / "tied", **CHANGES)
    path = str(tmp_path / "tied")
    ctx = prepare(path, path, osft=0.3)
    model: Any = shardkit.finalize(ctx.model, ctx)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(LayoutError, match="cannot be divided"):
        prepare(path, path, osft=OsftPlan(ratio=0.3, targets="lm_head"))
    import transformers

    def classifier() -> Any:
        return transformers.LlamaForSequenceClassification(config_of("llama-tied", **CHANGES))

    ctx = prepare(classifier, path, osft=0.3, missing=["score.*"])
    assert ctx.initialised == {"score.weight"}
    model = shardkit.finalize(ctx.model, ctx)
    assert model.score.weight.std() > 0
    assert isinstance(model.model.layers[0].mlp.up_proj, OsftLinear)


def test_fsdp1_is_refused(dense: str) -> None:
    with pytest.raises(UsageError, match="FSDP1"):
        shardkit.param_init_fn(prepare(dense, dense, osft=0.3))
