"""A sample of `python -m tests.models.lacking`: no model is said to lack what it never saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.lacking import alarms, class_names, lacking_of

pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings("ignore")]

# Ties, renamings, experts one by one, ignored and computed names, old layouts, parts of other models.
CLASSES = (
    *(
        "BertForPreTraining",
        "LlavaForConditionalGeneration",
        "GPT2LMHeadModel",
        "MarianMTModel",
        "MixtralForCausalLM",
    ),
    *("Qwen2VLForConditionalGeneration", "T5ForConditionalGeneration", "WhisperForConditionalGeneration"),
    *("XLMRobertaForMaskedLM", "ZambaForCausalLM"),
)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "qwen3_moe", "qwen2_vl", "whisper", "marian", "gpt_neox", "t5gemma2", "mistral_large4"),
        "inkling2_text",
    ],
)
def test_consolidate_without_a_base_raises_no_alarm(name: str, tmp_path: Path, fast_trace: object) -> None:
    assert alarms(name, tmp_path) == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_lacks_nothing_of_what_it_saves(name: str) -> None:
    assert name in class_names()
    found = lacking_of(name)
    assert found is not None
    assert (*found.missing, *found.misfits) == ()
