"""An adapter of which PEFT makes another model, added to the base: what PEFT itself makes of it is the judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda

import shardkit
from tests.operations.consolidate.checkpoints import CONFIG, hub, save, weights

pytestmark = [
    pytest.mark.usefixtures("fast_trace"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning"),  # LoRA-GA
]
IDS = torch.arange(1, 17)[None]
# Both projections of two layers are adapted; 21 tensors are there.
COUNT = "4 of 21 compared weights differ"


def lora(init: object = True, **options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=init, **options)


def opened(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def trained(model: Any, settings: peft.LoraConfig, directory: Path) -> Any:
    """Return a PEFT model after a step, so to say, and save it as PEFT and as a trainer do."""
    torch.manual_seed(1)
    if settings.init_lora_weights == "corda":
        preprocess_corda(model, settings, run_model=lambda: model(input_ids=IDS))
    if settings.init_lora_weights == "lora_ga":
        backward = lambda: model(input_ids=IDS, labels=IDS).loss.backward()  # noqa: E731
        peft.tuners.lora.preprocess_loraga(model, settings, backward)
    tuned = peft.get_peft_model(model, settings)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    tuned.save_pretrained(directory / "saved")
    save({"model": {name: value.contiguous() for name, value in tuned.state_dict().items()}}, directory / "c")
    return tuned.eval()


def peft_makes_it_of(base: Path, adapter: Path, tuned: Any) -> bool:
    """Return whether PEFT makes the trained model of a base and an adapter."""
    torch.manual_seed(9)
    try:
        again = peft.PeftModel.from_pretrained(opened(base), adapter).eval()
    except ValueError:  # CorDA needs its data again
        return False
    return torch.allclose(again(input_ids=IDS).logits, tuned(input_ids=IDS).logits, atol=1e-4)


SETTINGS: dict[str, tuple[Callable[[], peft.LoraConfig], bool]] = {
    "plain": (lora, True),
    "gaussian": (lambda: lora("gaussian"), True),
    "mica": (lambda: lora("mica"), True),
    "pissa": (lambda: lora("pissa"), True),
    "olora": (lambda: lora("olora"), True),
    "kasa": (lambda: lora(kasa_config=peft.KasaConfig()), True),
    "pissa, a randomised split": (lambda: lora("pissa_niter_2"), False),
    "corda": (lambda: lora("corda", corda_config=CordaConfig(corda_method="kpm")), False),
    "lora_ga": (lambda: lora("lora_ga", lora_ga_config=peft.LoraGAConfig()), False),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_initialisation_that_changed_the_bases_weights(kind: str, tmp_path: Path) -> None:
    settings, is_right = SETTINGS[kind]
    base = hub(tmp_path / "base", weights(), CONFIG)
    tuned = trained(opened(base), settings(), tmp_path)
    alone = {name: value for name, value in tuned.state_dict().items() if "lora_" in name}
    result = shardkit.consolidate(
        tmp_path / "c", tmp_path / "out", base=base, adapter_config=str(tmp_path / "saved")
    )
    assert peft_makes_it_of(base, tmp_path / "out", tuned) == is_right
    assert bool(result.warnings) != is_right
    if not is_right:
        (warning,) = result.warnings
        assert f"init_lora_weights={settings().init_lora_weights} changed them" in warning
        assert COUNT in warning
        assert "--merge-lora writes the trained one" in warning
        shardkit.consolidate(
            tmp_path / "c", tmp_path / "m", base=base, adapter_config=str(tmp_path / "saved"), merge_lora=True
        )
        expected = tuned.merge_and_unload()(input_ids=IDS).logits
        torch.testing.assert_close(opened(tmp_path / "m").eval()(input_ids=IDS).logits, expected)
    # Without the base's weights the settings alone say it.
    save({"model": alone}, tmp_path / "alone")
    result = shardkit.consolidate(tmp_path / "alone", base=base, adapter_config=str(tmp_path / "saved"))
    assert bool(result.warnings) != is_right
    assert all(
        "a checkpoint that has those weights too can be merged" in warning for warning in result.warnings
    )


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_a_base_that_has_the_split_already(init: str, tmp_path: Path) -> None:
    """PEFT would split it again, unless the settings say that nothing is to be done."""
    base = hub(tmp_path / "base", weights(), CONFIG)
    tuned = trained(opened(base), lora(init), tmp_path)
    residual = tuned.unload()
    residual.save_pretrained(tmp_path / "residual")
    settings = {"base": tmp_path / "residual", "adapter_config": str(tmp_path / "saved")}
    (warning,) = shardkit.consolidate(tmp_path / "c", tmp_path / "out", **settings).warnings
    assert f"init_lora_weights={init} PEFT changes them" in warning
    assert "write true there" in warning
    again = trained(opened(base), lora(init), tmp_path / "again")
    assert not peft_makes_it_of(tmp_path / "residual", tmp_path / "out", again)
    mended = json.loads((tmp_path / "out/adapter_config.json").read_text()) | {"init_lora_weights": True}
    (tmp_path / "out/adapter_config.json").write_text(json.dumps(mended))
    assert peft_makes_it_of(tmp_path / "residual", tmp_path / "out", again)
    settings["adapter_config"] = str(tmp_path / "out")
    assert not shardkit.consolidate(tmp_path / "c", tmp_path / "right", **settings).warnings


def test_a_base_that_is_another_model(tmp_path: Path) -> None:
    base = hub(tmp_path / "base", weights(), CONFIG)
    other = hub(tmp_path / "other", {name: value + 1 for name, value in weights().items()}, CONFIG)
    tuned = trained(opened(base), lora("pissa"), tmp_path)
    settings = {"adapter_config": str(tmp_path / "saved")}
    (warning,) = shardkit.consolidate(tmp_path / "c", tmp_path / "out", base=other, **settings).warnings
    assert "17 of 17 compared weights differ" in warning
    assert "init_lora_weights" not in warning
    assert not peft_makes_it_of(other, tmp_path / "out", tuned)
    # In another dtype nothing can be said.
    half = hub(tmp_path / "half", weights(torch.bfloat16), CONFIG)
    assert not shardkit.consolidate(tmp_path / "c", tmp_path / "half-out", base=half, **settings).warnings
