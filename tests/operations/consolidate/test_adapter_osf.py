"""An OSF adapter of PEFT is refused with the command that merges it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import shardkit
from shardkit.errors import SourceError
from tests.operations.consolidate.checkpoints import CONFIG, hub, load, weights


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_given", [False, True])
def test_the_command_merges_it(is_given: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    base = hub(tmp_path / "base", weights(torch.float32), {**CONFIG, "dtype": "float32"})
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.OSFConfig(
        effective_rank=0.6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(model, settings)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(0.01 * parameter.requires_grad)
    wrapped.save_pretrained(tmp_path / "adapter")
    given = {"base": base} if is_given else {}
    with pytest.raises(SourceError, match="only their trained part is here") as caught:
        shardkit.consolidate(tmp_path / "adapter", tmp_path / "out", **given)
    command = re.search(r"`python (.+)`", caught.value.hint or "", re.DOTALL)
    assert command is not None
    subprocess.run([sys.executable, *shlex.split(command[1])], cwd=tmp_path, check=True, timeout=600)
    merged, expected = load(tmp_path / "merged"), wrapped.merge_and_unload().state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=1e-6, atol=1e-6)
