"""`save` keeps config and tokenizer of the Hub model, so that consolidate needs no base."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.errors import UsageError
from tests.contents import edit_json, json_of
from tests.training import models
from tests.training.wrapping import wrapped
from tests.worlds.ranks import Ranks, same_error

pytestmark = [pytest.mark.prove, pytest.mark.usefixtures("fast_trace")]

FILES = {
    "tokenizer.json": json.dumps(
        {"model": {"vocab": {f"t{each}": each for each in range(models.VOCABULARY)}}}
    ),
    "tokenizer_config.json": "{}",
    "preprocessor_config.json": "{}",
    "LICENSE": "to whom it may concern",
    "modeling_own.py": "own = True",
    "README.md": "A card about the base.",
}
KEPT = {*FILES} - {"README.md"} | {"config.json", "generation_config.json"}


def hub(directory: Path, name: str = "llama-tied", **changes: Any) -> Path:
    models.save(name, directory, **changes)
    for file, text in FILES.items():
        (directory / file).write_text(text)
    return directory


class Task(nn.Module):
    """As a LightningModule has its model: below a name, beside weights of a loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.ones(2))


class Tokens:
    """A tokenizer with added tokens."""

    def __len__(self) -> int:
        return models.VOCABULARY + 6

    def save_pretrained(self, directory: str) -> None:
        (Path(directory) / "tokenizer.json").write_text("grown")
        (Path(directory) / "notes.bin").write_text("no part of it")


def prepared(out: Path, wrap: Callable[[nn.Module], nn.Module] = wrapped, **options: Any) -> nn.Module:
    context = shardkit.prepare(out / "hub", out / "hub", **options)
    return shardkit.finalize(wrap(context.model), context)


def loaded(out: Path) -> nn.Module:
    return shardkit.load_into(wrapped(models.reference("llama-tied", seed=7)), out / "hub")


def live(out: Path) -> nn.Module:
    """From no Hub model that shardkit has seen, with a vocabulary that grew."""
    model = models.reference("llama-tied")
    model.resize_token_embeddings(models.VOCABULARY + 3)
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, True
    model.generation_config._from_model_config = False
    model.config.use_cache = False
    return wrapped(model)


def fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


SAVED: dict[str, Callable[[Path], nn.Module]] = {
    "prepared": prepared,
    "grown": lambda out: prepared(out, tokenizer=Tokens()),
    "loaded": loaded,
    "task": lambda out: Task(prepared(out)),
    "compiled": lambda out: torch.compile(prepared(out)),  # type: ignore[return-value]
    "ddp": lambda out: DistributedDataParallel(loaded_plain(out)),
    "fsdp1": lambda out: fsdp1(loaded_plain(out)),
    "live": live,
}


def loaded_plain(out: Path) -> nn.Module:
    return shardkit.load_into(models.reference("llama-tied", seed=7), out / "hub")


def make(out: Path) -> None:
    hub(out / "hub")


two = Ranks(__name__, 2, first=make)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two.folder(tmp_path_factory)


@two.test_each(SAVED.keys())
def test_a_save_keeps_the_files(name: str, out: Path) -> None:
    model = SAVED[name](out)
    shardkit.save(model, out / name)
    shardkit.save(model, out / name, overwrite=True)
    state = {"model": get_model_state_dict(model)}
    if name not in ("fsdp1", "grown"):
        dcp.load(state, checkpoint_id=out / name)


@two.test
def test_a_save_that_cannot_write_them_fails_on_all_ranks(out: Path) -> None:
    model = prepared(out)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("shardkit.training.kept.storage.write_file", refuse)
        error = same_error(lambda: shardkit.save(model, out / "full"))
    assert "No space left" in error["message"]
    assert not (out / "full").exists()


def refuse(path: str, data: bytes) -> None:
    raise OSError(28, "No space left on device", path)


def files(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir() if each.suffix != ".safetensors"}


@pytest.mark.dist
@pytest.mark.parametrize("name", [*SAVED])
def test_consolidate_needs_no_base(out: Path, name: str, tmp_path: Path) -> None:
    done = shardkit.consolidate(out / name, tmp_path / "out", root="model.net" if name == "task" else None)
    assert done.warnings == ()
    kept = KEPT - {"tokenizer_config.json"} if name == "grown" else KEPT
    kept = {"config.json", "generation_config.json"} if name == "live" else kept
    assert {each.name for each in (out / name / "huggingface").iterdir()} == kept
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if name == "live":
        assert found.config.vocab_size == models.VOCABULARY + 3 == len(found.lm_head.weight)
        assert (found.generation_config.temperature, found.config.use_cache) == (0.5, True)
        return
    if name == "grown":
        assert found.config.vocab_size == 112 == len(found.lm_head.weight)
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "grown"
        return
    shardkit.consolidate(out / name, tmp_path / "by-base", base=out / "hub")
    assert files(tmp_path / "out") == files(tmp_path / "by-base")
    expected, got = load_file(out / "hub/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)


@pytest.mark.dist
def test_they_are_verified_and_resharded(out: Path, tmp_path: Path) -> None:
    said = json.loads((out / "prepared/shardkit.json").read_text())
    assert {each["name"].removeprefix("huggingface/") for each in said["others"]} == KEPT
    assert shardkit.verify(out / "prepared", full=True).problems == ()
    shardkit.reshard(out / "prepared", tmp_path / "four", world_size=4)
    done = shardkit.consolidate(tmp_path / "four", tmp_path / "out")
    assert files(tmp_path / "out").keys() == KEPT
    assert done.warnings == ()
    (tmp_path / "four/huggingface/config.json").write_text("{}")
    assert shardkit.verify(tmp_path / "four").problems
    copy = shutil.copytree(out / "prepared", tmp_path / "copy")
    (copy / "huggingface/LICENSE").write_text("TO WHOM IT MAY CONCERN")
    (problem,) = shardkit.verify(copy, full=True).problems
    assert problem.file == "huggingface/LICENSE"


class Headed(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(2, 2)


@pytest.mark.parametrize(
    "make_model", [lambda: nn.Linear(2, 2), lambda: Headed(models.reference("bert"))], ids=["plain", "headed"]
)
def test_nothing_is_kept_where_nothing_tells_of_the_whole(make_model: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardkit.save(make_model(), tmp_path / "saved")
    assert not (tmp_path / "saved/huggingface").exists()
    assert "others" not in json.loads((tmp_path / "saved/shardkit.json").read_text())


def test_a_model_of_somebodys_own_has_the_files_of_its_source(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

    from safetensors.torch import save_file

    source = tmp_path / "models--some--model/snapshots" / ("0" * 40)
    source.mkdir(parents=True)
    save_file({"weight": torch.ones(3)}, source / "model.safetensors")
    for name, text in {**FILES, "config.json": '{"model_type": "own"}', "other.bin": "weights"}.items():
        (source / name).write_text(text)
    model = shardkit.load_into(Own(), source)
    shardkit.save(model, tmp_path / "saved")
    there = files(tmp_path / "saved/huggingface")
    assert there.keys() == {*FILES, "config.json"}
    assert b"base_model: some/model " in there["README.md"]
    again = shardkit.load_into(Own(), tmp_path / "saved")
    shardkit.save(again, tmp_path / "again")
    assert files(tmp_path / "again/huggingface") == there
    shardkit.save(again, tmp_path / "again", overwrite=True)
    (tmp_path / "again/huggingface/README.md").write_text("mine")
    with pytest.raises(UsageError) as caught:
        shardkit.save(again, tmp_path / "again", overwrite=True)
    assert any("huggingface/README.md: it is not what" in line for line in caught.value.problems)


def test_the_last_save_has_them_where_the_source_is_gone(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub")
    model = loaded_plain(tmp_path)
    shardkit.save(model, tmp_path / "one")
    shutil.rmtree(source)
    shardkit.save(model, tmp_path / "two")
    assert files(tmp_path / "two/huggingface") == files(tmp_path / "one/huggingface")
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "two")
    with pytest.warns(UserWarning, match="not kept beside the checkpoint: .*--base MODEL"):
        shardkit.save(model, tmp_path / "three")
    assert files(tmp_path / "three/huggingface").keys() == {"config.json"}


def test_a_users_file_is_never_replaced(tmp_path: Path) -> None:
    hub(tmp_path / "hub")
    model = loaded_plain(tmp_path)
    shardkit.save(model, tmp_path / "saved")
    (tmp_path / "saved/huggingface/config.json").write_text("{}")
    shardkit.save(model, tmp_path / "saved", overwrite=True)  # it is listed: shardkit's, edited or not
    for name, text in {
        "huggingface/notes.txt": "mine",
        "huggingface/LICENSE": "mine",
        "tokenizer.json": "{}",
    }.items():
        copy = shutil.copytree(tmp_path / "saved", tmp_path / "copy", dirs_exist_ok=True)
        (copy / name).write_text(text)
        with pytest.raises(UsageError) as caught:
            shardkit.save(model, copy, overwrite=True)
        assert any(name in each for each in caught.value.problems)
        assert (copy / name).read_text() == text
        shutil.rmtree(copy)


def test_a_quantised_config_does_not_keep_training_from_going_on(tmp_path: Path) -> None:
    model = models.reference("llama-tied")
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    shardkit.save(model, tmp_path / "saved")
    shardkit.load_into(model, tmp_path / "saved")


def test_pointers_of_git_lfs_are_not_kept(tmp_path: Path) -> None:
    """In the place of the file nobody could read one, and consolidate would refuse it."""
    hub(tmp_path / "hub")
    (tmp_path / "hub/tokenizer.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    said = "not kept beside the checkpoint: tokenizer.json: a pointer of Git LFS, not the file itself; consolidate"
    with pytest.warns(UserWarning, match=said):
        shardkit.save(loaded_plain(tmp_path), tmp_path / "saved")
    assert files(tmp_path / "saved/huggingface").keys() == KEPT - {"tokenizer.json"}


def test_modules_with_weights_are_left_to_the_base(tmp_path: Path) -> None:
    source = hub(tmp_path / "hub")
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Dense", "name": "1"}]))
    (source / "1_Dense").mkdir()
    (source / "1_Dense/config.json").write_text("{}")
    (source / "1_Dense/model.safetensors").write_bytes(b"weights")
    with pytest.warns(UserWarning, match="modules.json and what it names"):
        shardkit.save(loaded_plain(tmp_path), tmp_path / "saved")
    assert files(tmp_path / "saved/huggingface").keys() == KEPT


def wide_hub(directory: Path) -> Path:
    """A bf16 model whose embedding has fp32, and most of the bytes."""
    hub(directory, tie_word_embeddings=False)
    from safetensors.torch import save_file

    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor.float() if "embed_tokens" in name or "lm_head" in name else tensor.bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_json(directory / "config.json", dtype="bfloat16")
    return directory


@pytest.mark.parametrize(("cast", "said"), [(None, "bfloat16"), (torch.float32, "float32")])
def test_the_config_keeps_the_dtype_where_tensors_have_the_bases(
    tmp_path: Path, cast: torch.dtype | None, said: str
) -> None:
    """`voxtral`: fp32 is most of the bytes, and the layers are bf16 all the same."""
    source = wide_hub(tmp_path / "hub")
    stored = load_file(source / "model.safetensors")
    model = models.reference("llama-tied", seed=7, tie_word_embeddings=False)
    for name, tensor in stored.items():
        module, _, last = name.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, last, nn.Parameter(getattr(owner, last).detach().to(cast or tensor.dtype)))
    shardkit.load_into(model, source)
    shardkit.save(model, tmp_path / "saved")
    shardkit.consolidate(tmp_path / "saved", tmp_path / "out")
    assert json_of(tmp_path / "saved/huggingface")["dtype"] == json_of(tmp_path / "out")["dtype"] == said
    shardkit.consolidate(tmp_path / "saved", tmp_path / "by-base", base=source)
    assert files(tmp_path / "out") == files(tmp_path / "by-base")
    shardkit.consolidate(tmp_path / "saved", tmp_path / "bf16", dtype="bf16")
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def own_code_hub(directory: Path) -> Path:
    hub(directory)
    (directory / "modeling_own.py").write_text(OWN_CODE)
    code = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    edit_json(directory / "config.json", model_type="own", architectures=["OwnModel"], auto_map=code)
    return directory


def test_the_code_of_a_model_is_kept_with_it(tmp_path: Path) -> None:
    source = own_code_hub(tmp_path / "own-hub")
    context = shardkit.prepare(source, source, trust_remote_code=True)
    shardkit.save(shardkit.finalize(context.model, context), tmp_path / "saved")
    shardkit.consolidate(tmp_path / "saved", tmp_path / "out", ask_class=False)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(found).__name__ == "OwnModel"
    assert (tmp_path / "out/modeling_own.py").read_text() == OWN_CODE


def test_code_that_only_transformers_has_loaded_is_in_the_base(tmp_path: Path) -> None:
    source = own_code_hub(tmp_path / "own-hub")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    with pytest.warns(
        UserWarning, match="not kept beside the checkpoint: the code of OwnModel; .*--base MODEL"
    ):
        shardkit.save(model, tmp_path / "saved")
    shardkit.consolidate(tmp_path / "saved", tmp_path / "out", base=source, ask_class=False)
    assert (tmp_path / "out/modeling_own.py").read_text() == OWN_CODE


def test_the_files_of_a_repo_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0" * 40
    hub(tmp_path / "models--some--model/snapshots" / commit)
    (tmp_path / "models--some--model/refs").mkdir()
    (tmp_path / "models--some--model/refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    context = shardkit.prepare("some/model", "some/model")
    shardkit.save(shardkit.finalize(context.model, context), tmp_path / "saved")
    kept = files(tmp_path / "saved/huggingface")
    assert kept.keys() == {*KEPT, "README.md"}
    assert b"base_model: some/model " in kept["README.md"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_the_settings_of_an_adapter_are_kept(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        loaded_plain(hub(tmp_path / "hub").parent), peft.LoraConfig(r=2, target_modules=["q_proj"])
    )
    shardkit.save(model, tmp_path / "saved")
    shardkit.consolidate(tmp_path / "saved", tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (2, ["q_proj"])
    assert str(tmp_path) not in json.dumps(settings)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    found = dict(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").named_parameters())
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters())
    shardkit.consolidate(tmp_path / "saved", tmp_path / "merged", merge_lora=True)
    merged = load_file(tmp_path / "merged/model.safetensors")
    expected = model.merge_and_unload().state_dict()
    assert all(torch.allclose(expected[name], tensor) for name, tensor in merged.items())
