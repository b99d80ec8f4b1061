"""An output that `from_pretrained` would load with weights made up says so first of all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardkit.cli import main
from shardkit.operations.consolidate import consolidate
from tests.operations.consolidate.checkpoints import CONFIG, EMBED, hub, save, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

LAYERS = 5
Q = "self_attn.q_proj.weight"


def deep() -> dict[str, torch.Tensor]:
    """Return the weights of a model with several layers."""
    state = weights()
    block = {
        name.split(".", 3)[3]: value for name, value in state.items() if name.startswith("model.layers.0.")
    }
    state |= {f"model.layers.{at}.{name}": value for at in range(LAYERS) for name, value in block.items()}
    return state


@pytest.mark.parametrize("is_given", [True, False])
def test_lost_weights_are_told_first(is_given: bool, tmp_path: Path, fast_trace: None) -> None:
    """In the first warning and in the first line; by a config without weights, given or found."""
    state = {name: value for name, value in deep().items() if not name.startswith("model.layers.1.")}
    checkpoint = save({"model": state}, tmp_path / "step-3")
    hf = hub(
        tmp_path / "base" if is_given else checkpoint / "hf", None, {**CONFIG, "num_hidden_layers": LAYERS}
    )
    args = [str(checkpoint), str(tmp_path / "out"), *(["--base", str(hf)] if is_given else [])]
    result = CliRunner().invoke(main, ["consolidate", *args])
    assert result.exit_code == 0, result.output
    first, *others = result.stdout.splitlines()
    assert first.startswith(f"wrote {tmp_path}/out, which from_pretrained would not load whole: ")
    made = consolidate(checkpoint, tmp_path / "again", base=hf if is_given else None)
    assert "model.layers.1." in made.warnings[0]
    assert made.unloadable == made.warnings[:1]
    assert made.warnings[0] in first
    assert not any("from_pretrained(" in line for line in others)
    unasked = consolidate(checkpoint, tmp_path / "unasked", base=hf if is_given else None, ask_class=False)
    assert unasked.warnings == ()
    assert any("was not asked whether from_pretrained finds all weights" in note for note in unasked.notes)


def test_what_is_whole_or_was_chosen_is_not_warned_of(tmp_path: Path) -> None:
    checkpoint = save({"model": deep()}, tmp_path / "step-3")
    hub(checkpoint / "hf", None, {**CONFIG, "num_hidden_layers": LAYERS})
    assert consolidate(checkpoint, tmp_path / "out").warnings == ()
    assert consolidate(checkpoint, tmp_path / "same", ask_class=False).warnings == ()
    assert consolidate(checkpoint, tmp_path / "part", exclude=[f"*.2.{Q}"]).unloadable == ()


def test_other_trainers_names_come_before_all_else(tmp_path: Path) -> None:
    state = {
        f"layers.{at}.attention.{name}.weight": weights()[EMBED] for at in range(2) for name in ("wq", "wk")
    }
    checkpoint = save({"model": {**state, "tok_embeddings.weight": weights()[EMBED]}}, tmp_path / "step-3")
    made = consolidate(checkpoint, tmp_path / "out")
    assert "torchtitan's own" in made.warnings[0]
    assert made.warnings[0].endswith("; add --base MODEL")
    assert made.warnings == made.unloadable
    hub(checkpoint / "hf", None)
    result = CliRunner().invoke(main, ["consolidate", str(checkpoint), str(tmp_path / "other")])
    assert "torchtitan's own" in result.stdout.splitlines()[0]
    assert "from_pretrained(" not in result.stdout
