"""Config, tokenizer and processor of the checkpoint's own, though a base is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import shardkit
from shardkit.errors import LayoutError, UsageError
from shardkit.formats.hub.base import _is_own
from shardkit.operations.consolidate import ConsolidateResult
from tests.cases import but_first
from tests.contents import edit_json, json_of
from tests.operations.consolidate.checkpoints import (
    CONFIG,
    EMBED,
    HEAD,
    assert_bit_equal,
    hub,
    load,
    save,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}
TRAINED = {**CONFIG, "eos_token_id": 3, "rope_parameters": ROPE}
BASE = {**CONFIG, "eos_token_id": 2, "rope_parameters": {**ROPE, "rope_theta": 10000.0}}
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def tokenizer(
    directory: Path, *, eos: str = "</s>", more: tuple[str, ...] = (), template: str | None = None
) -> Path:
    """Save a tokenizer by transformers itself."""
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 3}
    ids |= {f"w{number}": number for number in range(4, 33)}
    plain = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made: Any = transformers.PreTrainedTokenizerFast
    fast = made(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": list(more)})
    fast.chat_template = template
    fast.save_pretrained(directory)
    return directory


def put(directory: Path, **files: Mapping[str, Any] | str) -> Path:
    """Write files, `__` standing for a dot in their names."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def base_of(tmp_path: Path, **files: str) -> Path:
    """A base with a tokenizer and a generation config."""
    base = hub(tmp_path / "base", weights(), BASE)
    tokenizer(base)
    return put(base, **{"generation_config__json": {"eos_token_id": 2, "bos_token_id": 1}, **files})


def trainers(tmp_path: Path) -> Path:
    """The directory of a step of transformers' Trainer."""
    return save({"model": weights()}, tmp_path / "run/checkpoint-10/pytorch_model_fsdp_0").parent


def shardkits(tmp_path: Path) -> Path:
    return save({"model": weights()}, tmp_path / "run/last")


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Trainer": (trainers, "."),
    "dcp": (shardkits, "."),
    "huggingface": (shardkits, "huggingface"),
}


def read(result: ConsolidateResult, name: str = "config.json") -> Any:
    return json_of(result.output, name)


@pytest.mark.parametrize("place", PLACES)
def test_what_was_trained_is_written(place: str, tmp_path: Path) -> None:
    """`trained_config_dropped`: all of it, and a note of what differs from the base."""
    make, below = PLACES[place]
    checkpoint, base = make(tmp_path), base_of(tmp_path, LICENSE="of the base")
    own = put(checkpoint / below, config__json=TRAINED, generation_config__json={"eos_token_id": [3, 2]})
    tokenizer(own, eos="<|im_end|>", more=("<think>",), template=TEMPLATE)
    (checkpoint / "trainer_state.json").write_text("{}")
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert read(made) == TRAINED
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (own / name).read_bytes()
    assert (tmp_path / "out/LICENSE").read_text() == "of the base"
    assert made.warnings == ()
    assert_bit_equal(load(made.output), weights())
    told = {(each.file, each.key): (each.checkpoint, each.base) for each in made.differs_from_base}
    assert told == {
        ("config.json", "eos_token_id"): ("3", "2"),
        ("config.json", "rope_parameters.rope_theta"): ("1000000.0", "10000.0"),
        ("generation_config.json", "eos_token_id"): ("[3, 2]", "2"),
        ("generation_config.json", "bos_token_id"): ("null", "1"),
        ("tokenizer.json", "tokens"): ('["<think>"]', "[]"),
        ("tokenizer_config.json", "eos_token"): ('"<|im_end|>"', '"</s>"'),
        ("chat_template.jinja", "chat_template"): (json.dumps(TEMPLATE)[:60] + "...", "null"),
    }
    (note,) = (line for line in made.notes if line.startswith("written as in the checkpoint"))
    assert "rope_parameters.rope_theta 1000000.0, there 10000.0" in note
    assert "--config base" in note
    by_base = shardkit.consolidate(checkpoint, tmp_path / "by-base", base=base, config="base")
    assert read(by_base) == BASE
    assert (by_base.differs_from_base, by_base.from_checkpoint) == ((), ())
    assert (tmp_path / "by-base/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (tmp_path / "by-base/chat_template.jinja").exists()


def test_the_runs_config_above_the_step_is_not_the_steps(tmp_path: Path) -> None:
    """Nor is a stub."""
    checkpoint, base = trainers(tmp_path), base_of(tmp_path)
    (checkpoint / "trainer_state.json").write_text("{}")
    run = put(tmp_path / "run", config__json=TRAINED, generation_config__json={"eos_token_id": 3})
    tokenizer(run, more=("<x>",))
    put(checkpoint, config__json={"lr": 0.1})
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert read(made) == BASE
    assert (made.from_checkpoint, made.warnings) == ((), ())
    assert not [line for line in made.notes if "as in the checkpoint" in line]


def test_a_config_of_another_model_is_not_taken(tmp_path: Path) -> None:
    checkpoint, base = shardkits(tmp_path), base_of(tmp_path)
    mistral = {**TRAINED, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    put(checkpoint, config__json=mistral, generation_config__json={"eos_token_id": 3})
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert read(made) == BASE
    assert read(made, "generation_config.json")["eos_token_id"] == 2
    (warning,) = made.warnings
    assert "MistralForCausalLM (mistral)" in warning
    assert "LlamaForCausalLM (llama)" in warning


def test_what_follows_from_the_weights_does_not_come_from_the_config(tmp_path: Path) -> None:
    """dtype, rows, ties, quantisation and the class's plain name; use_cache and a path are mended as without a base."""
    checkpoint, base = shardkits(tmp_path), base_of(tmp_path)
    of_training = {"dtype": "bfloat16", "vocab_size": 64, "tie_word_embeddings": True, "use_cache": False}
    more = {"_name_or_path": "/home/me/base", "quantization_config": {"quant_method": "bitsandbytes"}}
    put(checkpoint, config__json={**BASE, **of_training, **more, "architectures": ["FSDPLlamaForCausalLM"]})
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert read(made) == BASE
    assert (made.differs_from_base, made.warnings) == ((), ())
    assert "config.json" in made.from_checkpoint


SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rope": (
        {"rope_parameters": {**ROPE, "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default", "factor": 2}},
    ),
    "no rope": ({"rope_parameters": {**ROPE, "rope_theta": 10000.0}}, {}),
    "null": ({"sliding_window": None, "pad_token_id": None}, {}),
    "added": ({"attention_bias": False, "layer_types": ["full_attention"] * 2, "pretraining_tp": 1}, {}),
    "dtype": ({"dtype": "float32"}, {"torch_dtype": "float32"}),
    "a list of one": ({"eos_token_id": [2]}, {"eos_token_id": 2}),
    "version": (
        {"transformers_version": "5.24.0"},
        {"transformers_version": "4.30.0", "_attn_implementation": "eager"},
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_words_are_no_difference(spelling: str, tmp_path: Path) -> None:
    plain = {key: value for key, value in CONFIG.items() if key != "dtype" or spelling != "dtype"}
    own, theirs = SPELLINGS[spelling]
    base = hub(tmp_path / "base", weights(), {**plain, **theirs})
    checkpoint = shardkits(tmp_path)
    put(checkpoint, config__json={**plain, **own})
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert (made.differs_from_base, made.from_checkpoint) == ((), ("config.json",))
    assert not [line for line in made.notes if "as in the checkpoint" in line]


@pytest.mark.parametrize(
    "own", [{"_from_model_config": True, "eos_token_id": 3}, {}], ids=["derived", "empty"]
)
def test_a_derived_generation_config_is_none(own: dict[str, Any], tmp_path: Path) -> None:
    checkpoint, base = shardkits(tmp_path), base_of(tmp_path)
    put(checkpoint, config__json=BASE, generation_config__json=own)
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert read(made, "generation_config.json")["eos_token_id"] == 2
    assert made.differs_from_base == ()


def test_a_derived_one_of_the_base_says_nothing_of_another_config(tmp_path: Path) -> None:
    checkpoint = shardkits(tmp_path)
    base = base_of(tmp_path, generation_config__json='{"_from_model_config": true, "eos_token_id": 2}')
    put(checkpoint, config__json=TRAINED)
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert "generation_config.json" not in made.assets


def test_a_lone_template_replaces_the_template(tmp_path: Path) -> None:
    """In tokenizer_config.json too, where older tokenizers have it."""
    checkpoint, base = shardkits(tmp_path), base_of(tmp_path)
    settings = json_of(base, "tokenizer_config.json")
    edit_json(base / "tokenizer_config.json", chat_template="old")
    put(base, chat_template__json={"chat_template": "old"})
    put(checkpoint, chat_template__jinja=TEMPLATE)
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE
    assert read(made, "tokenizer_config.json") == settings
    assert "chat_template.json" not in made.assets
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert [each.key for each in made.differs_from_base] == ["chat_template"]


@pytest.mark.parametrize("name", ["tokenizer.model", "qwen.tiktoken", "merges.txt"])
def test_a_vocabulary_that_is_not_read_is_named_by_its_file(name: str, tmp_path: Path) -> None:
    checkpoint, base = shardkits(tmp_path), hub(tmp_path / "base", weights(), BASE)
    for directory in (checkpoint, base):
        put(directory, vocab__json={"a": 0}, tokenizer_config__json={})
    put(checkpoint, tokenizer_config__json={"mask_token": "a"})  # as transformers 5 adds it to Gemma's
    for directory, end in ((checkpoint, "x"), (base, "y")):
        (directory / name).write_text(end)
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base, ask_class=False)
    assert [(each.file, each.key) for each in made.differs_from_base] == [(name, "crc32")]
    if name != "merges.txt":  # it is the vocabulary
        (checkpoint / "vocab.json").unlink()
        alone = shardkit.consolidate(checkpoint, tmp_path / "alone", base=base, ask_class=False)
        assert [(each.file, each.key) for each in alone.differs_from_base] == [(name, "crc32")]
    put(checkpoint, vocab__json={"a": 0, "b": 1}, tokenizer_config__json={"chat_template": "T"})
    (checkpoint / name).write_text("y")
    made = shardkit.consolidate(checkpoint, tmp_path / "two", base=base, ask_class=False)
    named = [(each.file, each.key) for each in made.differs_from_base]
    assert named == [("vocab.json", "tokens"), ("tokenizer_config.json", "chat_template")]


@pytest.mark.parametrize(
    ("name", "own", "why"),
    [
        ("tokenizer_config.json", '{"eos_token": "<|im_end|>"}', "written as in"),  # half a tokenizer
        ("generation_config.json", "{", "not valid JSON"),
        ("sentence_bert_config.json", '{"max_seq_length": 512}', "written as in"),
    ],
)
def test_what_is_not_taken_is_as_in_the_base_and_named(name: str, own: str, why: str, tmp_path: Path) -> None:
    base = base_of(tmp_path, sentence_bert_config__json='{"max_seq_length": 8}')
    checkpoint = put(shardkits(tmp_path), config__json=BASE)
    (checkpoint / name).write_text(own)
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert f"{name}: {why}" in made.warnings[0]
    assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


def test_the_processor_is_a_group_of_its_own(tmp_path: Path) -> None:
    checkpoint = shardkits(tmp_path)
    old, files = {"size": {"height": 224}}, {"video_preprocessor_config__json": {"fps": 1}}
    base = put(hub(tmp_path / "base", weights(), BASE), preprocessor_config__json=old, **files)
    put(checkpoint, preprocessor_config__json={"size": {"height": 448}})
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert made.assets == ("config.json", "preprocessor_config.json")
    (each,) = made.differs_from_base
    assert (each.key, each.checkpoint, each.base) == ("size.height", "448", "224")
    put(base, processor_config__json={"processor_class": "P"})  # of which the checkpoint has a part alone
    made = shardkit.consolidate(checkpoint, tmp_path / "two", base=base)
    assert read(made, "preprocessor_config.json") == old
    assert "preprocessor_config.json: written as in" in made.warnings[0]


CODE = {"AutoModelForCausalLM": "modeling_own.OwnModel"}


@pytest.mark.parametrize("has_code", [True, False])
def test_code_comes_from_one_source(has_code: bool, tmp_path: Path) -> None:
    checkpoint = shardkits(tmp_path)
    config = {**BASE, "auto_map": CODE} if has_code else BASE
    base = hub(tmp_path / "base", weights(), config)
    if has_code:
        put(base, modeling_own__py="BASE = 1")
    other = {"AutoModelForCausalLM": "modeling_new.OwnModel"}
    own = {**TRAINED, "auto_map": other}
    put(checkpoint, config__json=own, modeling_own__py="new", modeling_new__py="new")
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base, ask_class=False)
    assert read(made) == {**TRAINED, "auto_map": CODE if has_code else other}
    codes = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.py")}
    expected = {"modeling_own.py": "BASE = 1"}
    assert codes == (expected if has_code else {"modeling_own.py": "new", "modeling_new.py": "new"})


def test_a_tokenizer_that_generate_does_not_stop_at(tmp_path: Path) -> None:
    """Of --tokenizer, of the checkpoint, or beside a config that was trained: the config's or generation config's counts."""
    checkpoint, base = shardkits(tmp_path), base_of(tmp_path)
    directory = tokenizer(tmp_path / "tokenizer", eos="<|im_end|>")
    made = shardkit.consolidate(checkpoint, tmp_path / "a", base=base, tokenizer=directory)
    assert "<|im_end|> (3): eos_token_id in generation_config.json is 2" in made.warnings[0]
    tokenizer(checkpoint, eos="<|im_end|>")
    made = shardkit.consolidate(checkpoint, tmp_path / "b", base=base)
    assert "eos_token_id in generation_config.json is 2" in made.warnings[0]
    (base / "generation_config.json").unlink()
    put(checkpoint, config__json=TRAINED)
    assert shardkit.consolidate(checkpoint, tmp_path / "c", base=base).warnings == ()
    put(checkpoint, config__json=BASE)
    made = shardkit.consolidate(checkpoint, tmp_path / "d")
    assert "eos_token_id in config.json is 2" in made.warnings[0]


def test_a_tokenizer_beyond_the_rows_is_a_warning(tmp_path: Path) -> None:
    checkpoint, base = shardkits(tmp_path), base_of(tmp_path)
    tokenizer(checkpoint, more=tuple(f"<{number}>" for number in range(6)))
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert "the tokenizer of the checkpoint needs 39 rows, and the vocabulary has 37" in made.warnings[0]


@pytest.mark.parametrize("rows", but_first([30, 18]))
def test_the_checkpoints_config_says_that_rows_were_cut(rows: int, tmp_path: Path) -> None:
    """Half of the base's rows too; that of the run above does not, and the hint names the way."""
    state = weights() | {name: weights()[name][:rows].clone() for name in (EMBED, HEAD)}
    checkpoint, base = save({"model": state}, tmp_path / "run/last"), base_of(tmp_path)
    with pytest.raises(LayoutError) as caught:
        shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert "--base COPY --config base" in caught.value.to_json()["hint"]
    put(checkpoint, config__json={**TRAINED, "vocab_size": rows})
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base)
    assert read(made) == {**TRAINED, "vocab_size": rows}
    assert_bit_equal(load(made.output), state)


def test_config_base_needs_a_base(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a base"):
        shardkit.consolidate(shardkits(tmp_path), config="base")


def peft_state() -> dict[str, Any]:
    """Return what a PEFT model's state dict holds: an adapter of one module, and the weights."""
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {f"base_model.model.{name}": value for name, value in weights().items()}
    state[f"{path}.base_layer.weight"] = state.pop(f"{path}.weight")
    state[f"{path}.lora_A.default.weight"] = torch.ones(2, 16)
    state[f"{path}.lora_B.default.weight"] = torch.ones(16, 2)
    return state


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapters_settings_and_tokenizer_are_the_checkpoints(merge: bool, tmp_path: Path) -> None:
    """Alpha 32 of the run, not what lies beside the base; the merged model has the config too."""
    checkpoint, base = save({"model": peft_state()}, tmp_path / "run/last"), base_of(tmp_path)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 32, "target_modules": ["q_proj"]}
    put(checkpoint, adapter_config__json=settings, config__json=TRAINED)
    put(base, adapter_config__json={**settings, "lora_alpha": 8})
    tokenizer(checkpoint, more=("<think>",))
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base, merge_lora=merge)
    told = {each.key: (each.checkpoint, each.base) for each in made.differs_from_base}
    assert told["lora_alpha"] == ("32", "8")
    assert "<think>" in (tmp_path / "out/tokenizer.json").read_text()
    if not merge:
        assert read(made, "adapter_config.json")["lora_alpha"] == 32
        assert "eos_token_id" not in told  # no config is written
        return
    assert read(made) == TRAINED
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(load(made.output)[name], weights()[name] + 2 * 16.0)


def test_the_config_of_a_part_is_not_that_of_the_whole(tmp_path: Path) -> None:
    """A language model trained out of a vision model: the whole's config, and a warning that names both."""
    whole = {"model_type": "some_vl", "tie_word_embeddings": False, "text_config": {"vocab_size": 37}}
    tensors = {re.sub(r"^model\.", "model.language_model.", name): value for name, value in weights().items()}
    tensors |= {f"model.visual.{name}.weight": torch.ones(8, 8) for name in ("qkv", "proj")}
    base = hub(tmp_path / "base", tensors, whole)
    checkpoint = put(shardkits(tmp_path), config__json={**TRAINED, "model_type": "some_vl_text"})
    tokenizer(checkpoint)
    made = shardkit.consolidate(checkpoint, tmp_path / "out", base=base, fill_from_base=["model.visual.*"])
    assert read(made) == whole
    assert "LlamaForCausalLM (some_vl_text), than that of" in made.warnings[0]
    assert "tokenizer.json" in made.from_checkpoint


def test_a_quantised_base_and_plain_weights(tmp_path: Path) -> None:
    quantised = {**BASE, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    base = hub(tmp_path / "base", None, quantised)
    own = {**TRAINED, "quantization_config": {"quant_method": "fp8"}}
    checkpoint = put(shardkits(tmp_path), config__json=own)
    assert read(shardkit.consolidate(checkpoint, tmp_path / "out", base=base, ask_class=False)) == TRAINED


def test_ties_follow_what_is_written(tmp_path: Path) -> None:
    """The trained config has them tied, and training made them differ; or untied, and they are equal."""
    apart, tied = weights(), weights(tied=True)
    stored = {name: tied[name] for name in tied if name != HEAD}
    base = hub(tmp_path / "base", stored, {**BASE, "tie_word_embeddings": True})
    for number, (state, said) in enumerate(((apart, True), (tied, False))):
        checkpoint = save({"model": state}, tmp_path / f"run/{number}")
        put(checkpoint, config__json={**TRAINED, "tie_word_embeddings": said})
        made = shardkit.consolidate(checkpoint, tmp_path / f"out{number}", base=base)
        assert read(made)["tie_word_embeddings"] is not said
        assert (HEAD in load(made.output)) is said


def test_a_class_has_its_plain_name_without_a_base_too(tmp_path: Path) -> None:
    checkpoint = put(shardkits(tmp_path), config__json={**BASE, "architectures": ["FSDPLlamaForCausalLM"]})
    made = shardkit.consolidate(checkpoint, tmp_path / "out", ask_class=False)
    assert (read(made), made.model_class) == (BASE, "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("path", "place", "is_own"),
    [
        ("checkpoint-10/global_step10", "checkpoint-10", True),
        ("checkpoint-10/pytorch_model_fsdp_0", "checkpoint-10", True),
        ("save/pytorch_model_fsdp_0", "save", True),
        ("global_step5/actor", "global_step5/actor/huggingface", True),
        ("run/step-500", "run/step-500", True),
        ("run/step-500", "run", False),
        ("run-step2/checkpoint-10", "run-step2", False),
        ("checkpoint-5/step-5.pt", "checkpoint-5", True),
        ("run/global_step5", "run", False),
        ("run/step-5.pt", "run", False),
        ("step-5/model.pt", "step-5", True),
        ("final/model.pt", "final", True),
    ],
)
def test_which_directory_is_the_steps(path: str, place: str, is_own: bool, tmp_path: Path) -> None:
    """By names; that of one file is its own if no other lies there."""
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(".pt"):
        (tmp_path / path).write_text("")
    else:
        (tmp_path / path).mkdir(exist_ok=True)
    assert _is_own(str(tmp_path / place), str(tmp_path / path)) is is_own
    (tmp_path / path).parent.joinpath("other.pt").write_text("")
    assert _is_own(str(tmp_path / place), str(tmp_path / path)) is (is_own and place != "final")


def test_a_run_that_saved_its_state_is_not_the_steps(tmp_path: Path) -> None:
    """transformers' Trainer puts config and state into the output directory when training is over."""
    checkpoint, base = put(trainers(tmp_path), trainer_state__json="{}"), base_of(tmp_path)
    put(tmp_path / "run", config__json=TRAINED, trainer_state__json="{}")
    assert read(shardkit.consolidate(checkpoint, tmp_path / "out", base=base)) == BASE


def test_a_directory_of_several_steps_is_not_the_steps(tmp_path: Path) -> None:
    """DeepSpeed opens it by `latest`; accelerate and transformers put one step into it."""
    put(tmp_path / "run", latest="global_step5")
    assert not _is_own(str(tmp_path / "run"), str(tmp_path / "run"))
    (tmp_path / "run/pytorch_model").mkdir()
    assert _is_own(str(tmp_path / "run"), str(tmp_path / "run"))
