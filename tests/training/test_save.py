"""What training saves is whole or not there, and read by everything that reads checkpoints."""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardkit
from shardkit.training.wrap import layer_policy
from tests.training.conftest import World
from tests.training.models import reference
from tests.training.wrapping import full, tensor_parallel, wrapped, wrapped_with_replicas
from tests.worlds.ranks import Ranks

pytestmark = pytest.mark.dist

two = Ranks(__name__, 2)
four = Ranks(__name__, 4)
CLASSES = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"


def fsdp1(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(layer_policy(CLASSES)),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


class Case(NamedTuple):
    model: str
    wrap: Callable[[nn.Module], nn.Module]
    is_loaded: bool = True
    """By `dcp.load`: FSDP1's flat parameters are not compared here."""


OF_TWO = {
    **{
        f"saved-{name}": Case(name, wrapped)
        for name in ("llama", "llama-tied", "bert-lm", "qwen3-vl", "bert")
    },
    "saved-fsdp1-False": Case("llama-tied", partial(fsdp1, use_orig_params=False), False),
    "saved-fsdp1-True": Case("llama-tied", partial(fsdp1, use_orig_params=True), False),
}
OF_FOUR = {
    "saved-hsdp": Case("llama-tied", wrapped_with_replicas),
    "saved-tp": Case("llama", tensor_parallel),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks have saved, under its label."""
    return two.folder(tmp_path_factory)


def check_saved(label: str, case: Case, out: Path) -> None:
    """Save a wrapped model; load it with stock dcp.load into one that was made anew."""
    plain = reference(case.model)
    if dist.get_rank() == 0:
        plain.save_pretrained(out / f"hub-{label}")
    result = shardkit.save(case.wrap(copy.deepcopy(plain)), out / label)
    assert result.num_files == dist.get_world_size()
    if not case.is_loaded:
        return
    state = {"model": get_model_state_dict(case.wrap(reference(case.model, seed=7)))}
    dcp.load(state, checkpoint_id=out / label)
    expected = plain.state_dict()
    assert state["model"].keys() == expected.keys()
    for key, value in state["model"].items():
        assert torch.equal(full(value), expected[key]), key


@two.test_each(OF_TWO.keys())
def test_two_ranks_save_what_stock_torch_loads(label: str, out: Path) -> None:
    check_saved(label, OF_TWO[label], out)


@four.test_each(OF_FOUR.keys())
def test_four_ranks_save_what_stock_torch_loads(label: str, out: Path) -> None:
    check_saved(label, OF_FOUR[label], out)


@pytest.mark.parametrize("label", [*OF_TWO, *OF_FOUR])
def test_consolidate_gives_the_hub_model_back(out: Path, label: str, tmp_path: Path) -> None:
    done = shardkit.consolidate(out / label, str(tmp_path / "model"), base=str(out / f"hub-{label}"))
    assert done.root == "model"
    expected = load_file(out / f"hub-{label}" / "model.safetensors")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].tobytes() == value.tobytes(), name


def test_a_tied_parameter_is_stored_once(out: Path) -> None:
    shown = shardkit.inspect(str(out / "saved-llama-tied"))
    assert shown.made_by == "shardkit"
    assert shown.ties == (("model.model.embed_tokens.weight", "model.lm_head.weight"),)
    assert shown.tensor_bytes == 15768 * 4


@pytest.mark.parametrize("case", ["plain", "fsdp2", "ddp", "held-ddp", "fsdp1", "held-fsdp1"])
def test_a_tensor_with_several_names_is_stored_once(save_world: World, case: str, tmp_path: Path) -> None:
    for each in save_world.found("several"):
        assert each[case]["stock"]  # dcp.load into the same model
        assert each[case]["own"]
    names = save_world.found("several")[0][case]["names"]
    place = save_world.out / "several" / case / "last"
    metadata = FileSystemReader(place).read_metadata()
    assert sorted(n.removeprefix("model.") for n in metadata.state_dict_metadata if n[0] == "m") == names
    records: dict[Any, set[str]] = {}
    for index, record in metadata.storage_data.items():
        if index.fqn.startswith("model."):
            records.setdefault((record.relative_path, record.offset), set()).add(index.fqn)
    shared = [ties for ties in records.values() if len(ties) > 1]
    assert {len(ties) for ties in shared} == {2}
    assert (
        len(set().union(*shared)) == 12
    )  # a head, a block of four tensors, a buffer: each with its second name
    assert len(set().union(*records.values())) == 16
    manifest = json.loads((place / "shardkit.json").read_text())
    assert {frozenset(f"model.{n}" for n in tie) for tie in manifest["ties"]} == set(map(frozenset, shared))

    done = shardkit.consolidate(place, str(tmp_path / "model"), root="model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    first = {name: ties[0] for ties in done.ties for name in ties}
    assert {name for name in names if name in found or first[name] in found} == set(names)
    for ties in manifest["ties"]:
        values = {found[first.get(name, name)].tobytes() for name in ties}
        assert len(values) == 1


def test_the_manifest_says_what_was_saved(out: Path) -> None:
    content = json.loads((out / "saved-hsdp" / "shardkit.json").read_text())
    assert content["kind"] == "checkpoint"
    assert content["model_class"] == "LlamaForCausalLM"
    assert content["world_size"] == 4
    assert content["meshes"] == ["dp_replicate=2, dp_shard=2"]
    assert [unit["path"] for unit in content["units"]] == ["", *(f"model.layers.{n}" for n in range(3))]
    assert content["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert [file["name"] for file in content["files"]] == [f"__{n}_0.distcp" for n in range(4)]


def test_model_optimizer_and_the_rest_come_back(save_world: World) -> None:
    for each in save_world.found("whole"):
        assert each["loaded"]
        assert each["step"] == 5
        assert each["tied"]
        path, num_files, file_bytes = each["result"]
        assert path == str(save_world.out / "whole" / "trained")
        assert num_files == 2
        assert file_bytes > 3 * 1729 * 4  # weights and two moments
    with_optimizer = shardkit.reshard(
        save_world.out / "whole" / "trained", str(save_world.out / "three"), world_size=3
    )
    assert with_optimizer.num_optimizer_tensors == 3 * 9


def test_an_optimizer_that_has_not_stepped_stays_so(save_world: World) -> None:
    for each in save_world.found("unused"):
        assert each["state"] == 0
        assert each["gradient"]
        assert each["same"]  # its first step after loading is a first step


@pytest.mark.parametrize(
    ("case", "kind", "rank", "message"),
    [
        ("exists", "UsageError", 0, "exists"),
        ("foreign", "UsageError", 0, "is not a sharded checkpoint"),
        ("orphan", "ResourceError", 0, "cannot be made: Not a directory"),
        ("state_dict", "ResourceError", 1, "the tape is torn"),
        ("full", "ResourceError", 1, "File too large"),
    ],
)
def test_one_rank_that_fails_fails_all(
    save_world: World, case: str, kind: str, rank: int, message: str
) -> None:
    for each in save_world.found("whole"):
        error = each[case]
        assert error["error"] == kind
        (problem,) = error["problems"]
        assert problem.startswith(f"rank {rank}: ")
        assert message in problem


def test_a_failed_save_leaves_nothing_and_the_next_one_works(save_world: World) -> None:
    for each in save_world.found("whole"):
        assert each["names"] == ["last", "trained"]
        assert each["after"] == {}
        assert each["files"] == [".metadata", "__0_0.distcp", "__1_0.distcp", "shardkit.json"]


def test_killed_ranks_never_cost_the_last_checkpoint(save_world: World) -> None:
    steps = json.loads((save_world.out / "parent.json").read_text())["kills"]
    # Values 1 to 7 are saved over one another: what the name holds after each.
    assert [step["holds"] for step in steps] == [1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 7.0]
    assert [step["ended"] for step in steps] == [
        *([0, 0], [0, -9], [-9, 0], [-9, 0], [-9, 0], [0, -9], [0, 0]),
    ]
    # What a killed first rank left is removed by the next save; a first rank that lives removes its own.
    assert [step["left"] for step in steps] == [0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(("value", "survivor"), [("2.0", 0), ("3.0", 1), ("4.0", 1), ("5.0", 1), ("6.0", 0)])
def test_survivors_hear_of_it_at_once(save_world: World, value: str, survivor: int) -> None:
    found = json.loads((save_world.out / f"kill{value}-{survivor}.json").read_text())
    assert found["message"] == "another rank was lost during saving"
    assert "imed out" not in json.dumps(found)  # nobody waited until gloo gave up


def test_a_model_without_values_is_refused(tmp_path: Any) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(shardkit.LayoutError, match="2 parameters of the model on meta"):
        shardkit.save(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Any) -> None:
    """As one is that was made before the model was wrapped."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    with pytest.raises(
        shardkit.LayoutError, match="2 of 4 parameters that the optimizer steps are not the model's"
    ):
        shardkit.save(model, tmp_path / "last", optimizer=optimizer)
    assert not list(tmp_path.iterdir())


def test_an_optimizer_that_has_one_parameter_several_times_is_refused(tmp_path: Any) -> None:
    """As accelerate leaves it for a model on meta."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["params"] = [model.bias, model.bias]
    with pytest.raises(shardkit.LayoutError, match="the same parameters 1 times more"):
        shardkit.save(model, tmp_path / "last", optimizer=optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_somebody_puts_there_meanwhile_is_not_replaced(tmp_path: Any) -> None:
    place = tmp_path / "last"

    class Meddler:
        def state_dict(self) -> dict[str, int]:
            place.mkdir()
            (place / "thesis.txt").write_text("mine")
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError

    with pytest.raises(shardkit.UsageError, match="is not replaced"):
        shardkit.save(nn.Linear(2, 2), place, extra={"it": Meddler()}, overwrite=True)
    assert (place / "thesis.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
