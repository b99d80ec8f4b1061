"""mini_trainer's own code beside ours: the same targets and ranks, the same steps from its factors, the same weights.

Needs mini_trainer 0.9.0 and rich, which are not among the project's own requirements:
`pip install --no-deps rhai-innovation-mini-trainer==0.9.0` and `pip install rich`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardkit
from shardkit.core.factored import FACTORS
from shardkit.errors import LayoutError
from shardkit.osft.modules import candidates, factor_modules, osft_modules
from shardkit.osft.plan import OsftPlan, auto_targets, choose_targets
from tests.operations.consolidate.checkpoints import load
from tests.osft.factored import fold

pytest.importorskip("rich")
_found = importlib.util.find_spec("mini_trainer")
if _found is None or _found.submodule_search_locations is None:
    pytest.skip("mini_trainer is not installed", allow_module_level=True)

RATIO, STEPS = 0.3, 8
SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}


def of(name: str, **changes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**{**SMALL, **changes})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": of("LlamaConfig"),
    "mistral": of("MistralConfig"),
    "qwen": of("Qwen3Config"),
    "gemma": of("Gemma2Config"),
    "granite": of("GraniteConfig"),
    "phi3": of("Phi3Config"),
    "gpt-oss": of("GptOssConfig", num_local_experts=2, num_experts_per_tok=1),
    "gpt-j": lambda: transformers.GPTJConfig(**GPT, rotary_dim=4),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        hidden_size=24, num_layers=2, num_heads=4, attention_types=[[["global"], 2]], vocab_size=61
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=24,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=61,
        word_embed_proj_dim=24,
        dropout=0.0,
    ),
    "qwen3_5": of("Qwen3_5TextConfig", layer_types=["linear_attention", "full_attention"]),
    "default": of("Olmo2Config"),
}
"""A config of each entry of its table; gpt2 is refused, and stands below."""


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """Import osft_utils without the rest of the package, which asks for numba and datasets."""
    package = ModuleType("mini_trainer")
    assert _found is not None
    package.__path__ = list(_found.submodule_search_locations or ())
    before = {name for name in sys.modules if name.startswith("mini_trainer")}
    sys.modules["mini_trainer"] = package
    yield importlib.import_module("mini_trainer.osft_utils")
    for name in {name for name in sys.modules if name.startswith("mini_trainer")} - before:
        del sys.modules[name]


def dense(config: Any) -> Any:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_targets_and_ranks(name: str, theirs: Any) -> None:
    assert name in theirs.MODEL_CONFIGS
    model = dense(CONFIGS[name]())
    for ratio in (0.1, 0.3, 0.5, 0.9):
        expected = theirs.auto_generate_target_osft_config(
            model, model_name_or_class=type(model), rank_ratio=1.0 - ratio
        )
        found, _ = choose_targets(OsftPlan(ratio=ratio), candidates(model), model.config.model_type)
        assert {target.weight: target.rank for target in found} == expected


def test_every_entry_of_its_table_is_known(theirs: Any) -> None:
    kinds = {"gpt-j": "gptj", "gpt-neo": "gpt_neo", "gpt-oss": "gpt_oss", "qwen": "qwen3"}
    for name, entry in theirs.MODEL_CONFIGS.items():
        assert set(auto_targets(kinds.get(name, name))) == set(entry["patterns"])


def test_what_it_would_divide_wrongly_is_refused(theirs: Any) -> None:
    """GPT-2's Conv1D has the weight turned; gpt-oss's experts are no matrices."""
    model = dense(transformers.GPT2Config(**GPT))
    assert theirs.auto_generate_target_osft_config(model, model_name_or_class=type(model), rank_ratio=0.7)
    with pytest.raises(LayoutError, match="belongs to Conv1D"):
        choose_targets(OsftPlan(ratio=RATIO), candidates(model), "gpt2")
    experts = dense(CONFIGS["gpt-oss"]())
    with pytest.raises(LayoutError, match="experts stay dense"):
        choose_targets(
            OsftPlan(ratio=RATIO, targets="*.experts.gate_up_proj"), candidates(experts), "gpt_oss"
        )


def pair(theirs: Any, name: str) -> tuple[Any, Any]:
    """Return its model, with factors that it computed, and ours with the same ones."""
    plain = dense(CONFIGS[name]())
    ours = copy.deepcopy(plain)
    targets, _ = choose_targets(OsftPlan(ratio=RATIO), candidates(plain), plain.config.model_type)
    kind = theirs.create_osft_model_class(type(plain))
    model = kind(plain.config, initialize_osft=False, output_dtype=torch.float32)
    model.load_state_dict(plain.state_dict())
    model.osft_config = theirs.auto_generate_target_osft_config(
        plain, model_name_or_class=type(plain), rank_ratio=1.0 - RATIO
    )
    model.reinitialize_osft(decompose_existing_weights=True)
    factor_modules(ours, targets)
    ours.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    ours.tie_weights()
    for layer in osft_modules(ours).values():
        for parameter in (layer.osft_U_high, layer.osft_S_high, layer.osft_V_high):
            parameter.requires_grad_(False)
    return model, ours


def train(model: Any, wrapped: Callable[[Any, torch.optim.Optimizer], object]) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    wrapped(model, optimizer)
    losses = []
    for number in range(STEPS):
        tokens = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(number % 2))
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ["llama", "qwen", "opt"])
def test_the_same_steps_from_its_factors(name: str, theirs: Any) -> None:
    model, ours = pair(theirs, name)
    expected = train(model, lambda model, optimizer: theirs.optim_wrapper(optimizer, model))
    found = train(ours, shardkit.osft_optimizer)
    assert found == pytest.approx(expected, abs=1e-6)
    assert expected[-1] < expected[0]
    state = model.state_dict()
    for key, value in ours.state_dict().items():
        if not key.endswith(
            "k_proj.bias"
        ):  # whose gradient is zero but for rounding, of which AdamW makes whole steps
            assert float((value - state[key]).abs().max()) <= 1e-6, key
    folded = model.prepare_state_dict_for_save(dict(state))
    for path, layer in osft_modules(ours).items():
        weight = fold({key: layer.get_parameter(key).detach() for key in FACTORS})
        assert float((weight - folded[f"{path}.weight"]).abs().max()) <= 2e-6


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore::FutureWarning", "ignore::UserWarning"
)
def test_its_checkpoint_is_folded_as_it_folds(theirs: Any, tmp_path: Path) -> None:
    """Saved by its own checkpointer after some steps; inspect and verify know it too."""
    saver = importlib.import_module("mini_trainer.full_state_checkpoint")
    model, _ = pair(theirs, "llama")
    train(model, lambda model, optimizer: theirs.optim_wrapper(optimizer, model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saver.FullStateCheckpointer(str(tmp_path), 0, 1, str(tmp_path / "trigger")).save(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
        training_state={"step": 8},
        checkpointer_state={},
        data_loader=SimpleNamespace(sampler=SimpleNamespace(epoch=0)),
        device=torch.device("cpu"),
    )
    checkpoint = tmp_path / "step_8"
    assert sum(each.count for each in shardkit.inspect(checkpoint).osft) == 14
    assert shardkit.verify(checkpoint, full=True).ok
    shardkit.consolidate(checkpoint, tmp_path / "out")
    found, expected = load(tmp_path / "out"), model.prepare_state_dict_for_save(dict(model.state_dict()))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= 2e-6, name
