"""What training saves is whole or not there, and read by everything that reads checkpoints."""

import copy
import errno
import json
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.files import storage
from shardkit.files.output.local import LocalOutput, status
from shardkit.training.ranks.local import local_tensor, optimizer_parameters
from shardkit.training.save import SaveWriter
from shardkit.training.save_target import writer_files
from shardkit.training.wrap import layer_policy, wrap
from tests.contents import edit_json, json_of
from tests.operations.stops import interrupt
from tests.training.models import reference
from tests.training.wrapping import full, tensor_parallel, wrapped, wrapped_with_replicas
from tests.worlds.processes import run_script
from tests.worlds.ranks import Ranks, same_error

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def make_kills(out: Path) -> None:
    (out / "kills").mkdir()


two = Ranks(__name__, 2, first=make_kills)
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


@pytest.mark.parametrize(
    "label", [*OF_TWO, *(pytest.param(label, marks=pytest.mark.prove) for label in OF_FOUR)]
)
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


@pytest.mark.prove
def test_the_manifest_says_what_was_saved(out: Path) -> None:
    content = json.loads((out / "saved-hsdp" / "shardkit.json").read_text())
    assert content["kind"] == "checkpoint"
    assert content["model_class"] == "LlamaForCausalLM"
    assert content["world_size"] == 4
    assert content["meshes"] == ["dp_replicate=2, dp_shard=2"]
    assert [unit["path"] for unit in content["units"]] == ["", *(f"model.layers.{n}" for n in range(3))]
    assert content["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert [file["name"] for file in content["files"]] == [f"__{n}_0.distcp" for n in range(4)]
    assert content["vocab_size"] == json_of(out / "hub-saved-hsdp")["vocab_size"]


def test_a_cut_vocabulary_is_known_by_the_record(out: Path, tmp_path: Path) -> None:
    """The base had more rows than the model that was saved; resharding keeps what was recorded."""
    saved, base = out / "saved-llama", out / "hub-saved-llama"
    rows, stored = json_of(base)["vocab_size"], load_file(base / "model.safetensors")
    larger = {
        name: np.concatenate([value, value[:9]]) if len(value) == rows and value.ndim == 2 else value
        for name, value in stored.items()
    }
    shutil.copytree(base, tmp_path / "base")
    save_file(larger, tmp_path / "base" / "model.safetensors")
    edit_json(tmp_path / "base" / "config.json", vocab_size=rows + 9)
    shardkit.reshard(saved, tmp_path / "other", world_size=3)
    for source in (saved, tmp_path / "other"):
        done = shardkit.consolidate(source, tmp_path / f"{source.name}-hf", base=tmp_path / "base")
        assert json_of(done.output)["vocab_size"] == rows
        found = load_file(Path(done.output) / "model.safetensors")
        assert all(found[name].tobytes() == value.tobytes() for name, value in stored.items())


class Model(nn.Module):
    """Odd sizes, a tie, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 23), nn.GELU(), nn.Linear(23, 10)) for _ in range(2)
        )
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden) * self.scale.mean()


def start(value: float | None = None, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model, all its parameters `value` if that is given."""
    torch.manual_seed(seed)
    model = Model()
    if value is not None:
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
    wrap(model, init_device_mesh("cpu", (2,)), mixed_precision=None)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(12).view(2, 6)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in flat(value, f"{prefix}{key}.").items()}
    if isinstance(tree, list | tuple):
        return flat(dict(enumerate(tree)), prefix)
    if hasattr(tree, "local_shards"):  # FSDP1 without a mesh has ShardedTensors
        return flat([shard.tensor for shard in tree.local_shards()], prefix)
    return {prefix: tree.full_tensor() if isinstance(tree, DTensor) else tree}


def same(a: Any, b: Any) -> bool:
    a, b = flat(a), flat(b)
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


def load_by_torch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    place: Path,
    beside: dict[str, Any],
    planner: Any = None,
) -> None:
    """Load both with stock torch, and fill what is wanted beside them."""
    beside |= zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
    dcp.load(beside, checkpoint_id=place, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=beside["model"], optim_state_dict=beside["optimizer"])


@two.test
def test_model_optimizer_and_the_rest_come_back(out: Path) -> None:
    model, optimizer = start()
    train_step(model, optimizer)
    place = out / "whole" / "trained"  # its parent is missing
    sampler = torch.Generator().get_state()
    result = shardkit.save(model, place, optimizer=optimizer, extra={"step": 5, "sampler": sampler})
    assert result.path == str(place)
    assert result.num_files == 2
    assert result.file_bytes > 3 * 1729 * 4  # weights and two moments
    other, other_optimizer = start(seed=1)
    state: dict[str, Any] = {"extra": {"step": 0}}
    load_by_torch(other, other_optimizer, place, state)
    assert same(get_state_dict(other, other_optimizer), get_state_dict(model, optimizer))
    assert state["extra"]["step"] == 5
    assert other.head.weight is other.embed.weight


def differences_named(model: nn.Module, place: Path, **given: Any) -> list[str]:
    """Save, and return the warnings about values that differ between ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardkit.save(model, place, **given)
    return [str(warning.message) for warning in caught if "differ" in str(warning.message)]


@two.test
def test_what_is_saved_of_one_rank_alone_is_named(out: Path) -> None:
    """torch saves one of several values under a name, from whichever rank writes least."""
    rank = dist.get_rank()
    extra = {
        "step": 5,
        "job": {"loader": [torch.tensor([rank]), rank], "rng": torch.get_rng_state()},
        "sharded": distribute_tensor(torch.arange(4), init_device_mesh("cpu", (2,)), [Shard(0)]),
        "all": [None, None],
    }
    dist.all_gather_object(extra["all"], rank)
    assert differences_named(nn.Linear(2, 2), out / "ranks", extra=extra) == [
        "2 values differ between ranks, and only one rank's is saved: extra.job.loader.0, extra.job.loader.1; "
        "of extra, save a list of all ranks' (torch.distributed.all_gather_object)"
    ] * (rank == 0)
    back = {"extra": {"all": [None, None]}}
    dcp.load(back, checkpoint_id=out / "ranks")
    assert back["extra"]["all"] == [0, 1]


class _Blockwise(torch.optim.SGD):
    """Keeps a plain scale of the rank's part beside a moment, as optimizers of 8 bits do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in optimizer_parameters(self):
            self.state[parameter]["scale"] = local_tensor(parameter).reshape(-1)[:1].clone()


@two.test
def test_state_that_is_a_ranks_own_is_named(out: Path) -> None:
    model = fully_shard(nn.Linear(2, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer = _Blockwise(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    texts = differences_named(model, out / "blockwise", optimizer=optimizer)
    assert [text.partition(";")[0] for text in texts] == [
        "1 value differs between ranks, and only one rank's is saved: optimizer.state.weight.scale"
    ] * (dist.get_rank() == 0)


@two.test_each({"values": 4, "shape": 5})
def test_parameters_that_each_rank_has_for_itself_are_named(rows: int, out: Path) -> None:
    """As parts of a matrix that ranks divide by hand; torch saves one rank's, under the name of all."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model: Any = nn.Sequential(nn.Linear(2, rows if rank else 4, bias=False), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank)
    texts = differences_named(model, out / f"apart-{rows}")
    assert [text.partition(";")[0] for text in texts] == [
        "1 value differs between ranks, and only one rank's is saved: model.0.weight"
    ] * (rank == 0)


@two.test
def test_groups_of_ranks_save_at_the_same_time(out: Path) -> None:
    """The first rank of a group leads, whatever its number is."""
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(2)]
    place, model = out / "groups" / str(rank), nn.Linear(rank + 1, 2)
    for overwrite in (False, True):
        result = shardkit.save(model, place, process_group=groups[rank], overwrite=overwrite)
        assert (result.path, result.num_files) == (str(place), 1)
    assert shardkit.verify(place, full=True).problems == ()
    dist.barrier()
    assert names_in(place.parent) == ["0", "1"]


class _OwnTensor(torch.Tensor):
    """Of a class whose objects nobody else makes."""


@two.test
def test_a_warning_that_is_an_error_is_one_on_all_ranks(out: Path) -> None:
    """Only the first rank warns: the others would wait for it until the group's timeout."""
    odd = torch.ones(2).as_subclass(_OwnTensor)
    for extra in ({"rank": dist.get_rank()}, {"odd": odd}):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            error = same_error(lambda: shardkit.save(nn.LayerNorm(2), out / "warned", extra=extra))  # noqa: B023
        assert error["message"].startswith("UserWarning: 1 "), error
        assert not (out / "warned").exists()


@two.test
def test_lazy_modules_are_refused_by_name(out: Path) -> None:
    lazy = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    for run in (
        lambda: shardkit.save(lazy, out / "lazy"),
        lambda: shardkit.load_into(lazy, out / "whole" / "trained"),
    ):
        error = same_error(run)
        assert error["message"] == "6 tensors of the model without a shape before the first forward"
        assert error["problems"][0] == "ranks 0-1: 0.weight"


def test_an_optimizer_is_resharded_with_its_model(out: Path) -> None:
    done = shardkit.reshard(out / "whole" / "trained", str(out / "three"), world_size=3)
    assert done.num_optimizer_tensors == 3 * 9


@two.test_each((torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop))
def test_an_optimizer_that_has_not_stepped_stays_so(kind: Any, out: Path) -> None:
    place = out / f"unused-{kind.__name__}"
    # torch 2.13: Rprop steps no DTensors.
    model = Model() if kind is torch.optim.Rprop else start()[0]
    optimizer = kind(model.parameters(), lr=1e-2)
    model(torch.arange(12).view(2, 6)).pow(2).mean().backward()
    gradient = model.head.weight.grad
    shardkit.save(model, place, optimizer=optimizer)
    assert len(optimizer.state) == 0
    assert model.head.weight.grad is gradient
    optimizer.zero_grad()
    other = Model() if kind is torch.optim.Rprop else start(seed=1)[0]
    other_optimizer = kind(other.parameters(), lr=1e-2)
    train_step(other, other_optimizer)
    load_by_torch(other, other_optimizer, place, {})
    train_step(model, optimizer)
    train_step(other, other_optimizer)  # its first step after loading is a first step
    assert same(model.state_dict(), other.state_dict())


def names_in(folder: Path) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in folder.iterdir())
    dist.barrier()  # before any rank goes on and makes a new one
    return names


class Looking:
    """A state that calls something while it is saved."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look

    def state_dict(self) -> dict[str, int]:
        self._look()
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise OSError(5, "the tape is torn")


def save_on_a_full_disk(model: nn.Module, place: Path) -> None:
    """Rank 1's files may not grow beyond a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        shardkit.save(model, place, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Failure(NamedTuple):
    save: Callable[[nn.Module, Path], object]
    """Given a checkpoint that exists."""
    error: str
    rank: int
    """That fails."""
    message: str


@two.test_each(
    {
        "exists": Failure(lambda model, last: shardkit.save(model, last), "UsageError", 0, "exists"),
        "foreign": Failure(
            lambda model, last: shardkit.save(model, last.parent, overwrite=True),
            "UsageError",
            0,
            "is not a sharded checkpoint",
        ),
        "orphan": Failure(
            lambda model, last: shardkit.save(model, last / ".metadata" / "last"),
            "ResourceError",
            0,
            "cannot be made: Not a directory",
        ),
        "state_dict": Failure(
            lambda model, last: shardkit.save(
                model, last.parent / "new", extra={"bad": Looking(fail_on_one)}
            ),
            "ResourceError",
            1,
            "the tape is torn",
        ),
        "full": Failure(save_on_a_full_disk, "ResourceError", 1, "File too large"),
    }
)
def test_one_rank_that_fails_fails_all(failure: Failure, out: Path) -> None:
    """It leaves nothing, and the next save works."""
    model, _ = start()
    last = out / f"fails-{failure.error}-{failure.message}" / "last"
    shardkit.save(model, last)
    error = same_error(lambda: failure.save(model, last))
    assert error["error"] == failure.error
    (problem,) = error["problems"]
    assert problem.startswith(f"rank {failure.rank}: ")
    assert failure.message in f"{error['message']} {problem}"
    assert names_in(last.parent) == ["last"]
    shardkit.save(model, last, overwrite=True)
    assert names_in(last) == [".metadata", "__0_0.distcp", "__1_0.distcp", "shardkit.json"]


class Several(Model):
    """A block, a parameter and a buffer under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]
        self.register_buffer("scale_again", self.scale)


class Holder(nn.Module):
    """Holds a wrapped model, as a LightningModule does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def flat_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=False, device_id=torch.device("cpu"))


SEVERAL: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "fsdp2": lambda model: wrap(model, init_device_mesh("cpu", (2,)), mixed_precision=None),
    "ddp": DistributedDataParallel,
    "held-ddp": lambda model: Holder(DistributedDataParallel(model)),
    "fsdp1": flat_fsdp1,
    "held-fsdp1": lambda model: Holder(flat_fsdp1(model)),
}


@two.test_each(SEVERAL.keys())
def test_a_tensor_with_several_names_is_stored_once(case: str, out: Path) -> None:
    """Stock torch loads it into the same model, and `load_into` does."""
    prepare = SEVERAL[case]
    torch.manual_seed(0)
    model = prepare(Several())
    expected = get_model_state_dict(model)
    place = out / "several" / case / "last"
    shardkit.save(model, place, optimizer=torch.optim.AdamW(model.parameters()))
    torch.manual_seed(1)
    state = {"model": get_model_state_dict(prepare(Several()))}
    dcp.load(state, checkpoint_id=place)
    assert same(state["model"], expected)
    if "fsdp1" not in case:
        torch.manual_seed(2)
        refilled = prepare(Several())
        shardkit.load_into(refilled, place)
        assert same(get_model_state_dict(refilled), expected)
    if dist.get_rank() == 0:
        check_stored_once(place, sorted(expected))


def check_stored_once(place: Path, names: list[str]) -> None:
    metadata = FileSystemReader(place).read_metadata()
    assert sorted(n.removeprefix("model.") for n in metadata.state_dict_metadata if n[0] == "m") == names
    records: dict[Any, set[str]] = {}
    for index, record in metadata.storage_data.items():
        if index.fqn.startswith("model."):
            records.setdefault((record.relative_path, record.offset), set()).add(index.fqn)
    shared = [ties for ties in records.values() if len(ties) > 1]
    assert {len(ties) for ties in shared} == {2}
    # A head, a block of four tensors, a buffer: each with its second name.
    assert len(set().union(*shared)) == 12
    assert len(set().union(*records.values())) == 16
    manifest = json.loads((place / "shardkit.json").read_text())
    assert {frozenset(f"model.{n}" for n in tie) for tie in manifest["ties"]} == set(map(frozenset, shared))

    done = shardkit.consolidate(place, str(place.with_name("model")), root="model")
    found = load_file(place.with_name("model") / "model.safetensors")
    first = {name: ties[0] for ties in done.ties for name in ties}
    assert {name for name in names if name in found or first[name] in found} == set(names)
    for ties in manifest["ties"]:
        values = {found[first.get(name, name)].tobytes() for name in ties}
        assert len(values) == 1


class Kills:
    """An object that cannot be written: whoever tries is killed."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def kill_after_rename(place: Path) -> None:
    rename = storage.renameat2

    def last(source: str, target: str, flags: int) -> bool:
        is_done = rename(source, target, flags)
        if is_done and target == str(place):
            os.kill(os.getpid(), signal.SIGKILL)
        return is_done

    storage.renameat2 = last


def value_in(place: Path) -> float:
    """The one value of all tensors of a checkpoint, read with stock torch; of a torn one this fails."""
    state = {name: torch.zeros_like(value) for name, value in Model().state_dict().items() if name != "scale"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": state}, checkpoint_id=place, no_dist=True)
    (value,) = {float(value) for tensor in state.values() for value in tensor.flatten()}
    return value


class Kill(NamedTuple):
    value: float
    """Of all tensors that are saved over the last checkpoint."""
    victim: int | None
    moment: str
    holds: float
    """What the checkpoint's name stands for afterwards."""
    num_left: int
    """Directories beside it. What a killed first rank left is removed by the next save; one that lives removes its own."""


@two.test_each_killing(
    {
        "1 nobody": Kill(1.0, None, "", 1.0, 0),
        "2 writing on rank 1": Kill(2.0, 1, "writing", 1.0, 0),
        "3 writing on rank 0": Kill(3.0, 0, "writing", 1.0, 1),
        "4 before the rename": Kill(4.0, 0, "before", 1.0, 1),
        "5 after the rename": Kill(5.0, 0, "after", 5.0, 1),
        "6 writing on rank 1": Kill(6.0, 1, "writing", 5.0, 0),
        "7 nobody": Kill(7.0, None, "", 7.0, 0),
    }
)
def test_killed_ranks_never_cost_the_last_checkpoint(kill: Kill, out: Path) -> None:
    """Saved over one another. Survivors hear of it at once: nobody waits until gloo gives up."""
    model, _ = start(kill.value)
    is_victim = dist.get_rank() == kill.victim
    if kill.moment == "before" and is_victim:
        LocalOutput.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    last = out / "kills" / "last"
    if kill.moment == "after" and is_victim:
        kill_after_rename(last)
    extra = {f"bad{kill.victim}": Kills()} if kill.moment == "writing" and is_victim else {}
    if kill.victim is None:
        shardkit.save(model, last, extra=extra, overwrite=True)
        dist.barrier()
    else:
        with pytest.raises(shardkit.ResourceError) as caught:
            shardkit.save(model, last, extra=extra, overwrite=True)
        assert caught.value.message == "another rank was lost during saving"
        assert "imed out" not in json.dumps(caught.value.to_json())
    assert value_in(last) == kill.holds
    assert len([path for path in last.parent.iterdir() if path != last]) == kill.num_left


@two.test
def test_a_rank_that_is_interrupted_while_torch_saves_raises_its_own(out: Path) -> None:
    model, _ = start()
    last = out / "interrupted" / "last"
    is_interrupted = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patched:
        if is_interrupted:
            patched.setattr(SaveWriter, "write_data", interrupt)
        with pytest.raises(KeyboardInterrupt if is_interrupted else shardkit.ShardkitError) as caught:
            shardkit.save(model, last)
    if not is_interrupted:
        assert caught.value.problems == ("rank 1: KeyboardInterrupt",)
    assert names_in(last.parent) == []


def test_one_process_that_is_interrupted_while_torch_saves(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(SaveWriter, "write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        shardkit.save(nn.Linear(2, 2), tmp_path / "last")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["shardkit.json", "__0_0.distcp", "config.json"])
def test_one_process_that_cannot_write_a_file_names_it(name: str, tmp_path: Any, monkeypatch: Any) -> None:
    write, opened = storage.write_file, FileSystem.create_stream

    def refuse(path: Any) -> None:
        if os.path.basename(path) == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def write_file(path: str, *args: Any, **options: Any) -> None:
        refuse(path)
        write(path, *args, **options)

    def create_stream(self: FileSystem, path: Any, mode: str) -> Any:
        refuse(path)
        return opened(self, path, mode)

    monkeypatch.setattr(storage, "write_file", write_file)
    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    with pytest.raises(
        shardkit.ResourceError, match=f"cannot save .*last: No space left on device: .*{name}"
    ):
        shardkit.save(reference("llama"), tmp_path / "last")
    assert not list(tmp_path.iterdir())


def test_a_model_without_values_is_refused(tmp_path: Any) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(shardkit.LayoutError, match="2 parameters of the model on meta"):
        shardkit.save(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_parameters_that_no_step_has_reached_are_named(tmp_path: Any) -> None:
    """A new optimizer's state has entries for them, which stock dcp.load then misses, unless it is told not to."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        model[2].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters())

    def load(planner: Any) -> None:
        fresh = made()
        load_by_torch(*fresh, tmp_path / "run", {}, planner)
        assert torch.equal(
            fresh[1].state[fresh[0][0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
        )

    model, optimizer = made()
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.warns(
        UserWarning, match=r"2 of 4 trained parameters have no optimizer state.*: 1\.weight, 1\.bias"
    ):
        shardkit.save(model, tmp_path / "run", optimizer=optimizer)
    with pytest.raises(CheckpointException, match="Missing key"):
        load(DefaultLoadPlanner())
    load(DefaultLoadPlanner(allow_partial_load=True))


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
    with pytest.raises(shardkit.LayoutError, match="the optimizer holds 1 repeated parameter"):
        shardkit.save(model, tmp_path / "last", optimizer=optimizer)
    assert not list(tmp_path.iterdir())


def test_what_somebody_puts_there_meanwhile_is_not_replaced(tmp_path: Any) -> None:
    place = tmp_path / "last"

    def meddle() -> None:
        place.mkdir()
        (place / "thesis.txt").write_text("mine")

    for name in ("last-new", "last-new2"):
        with pytest.raises(
            shardkit.UsageError, match=f"the new save is whole, and lies in .*/{name}\\n"
        ) as caught:
            shardkit.save(nn.Linear(2, 2), place, extra={"it": Looking(meddle)}, overwrite=True)
        assert "thesis.txt" in caught.value.problems
        assert (place / "thesis.txt").read_text() == "mine"
        assert shardkit.verify(tmp_path / name, full=True).problems == ()
        shutil.rmtree(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-new", "last-new2"]


def test_what_somebody_puts_there_in_the_last_moment_is_not_replaced(tmp_path: Any, monkeypatch: Any) -> None:
    """The commit has begun by then."""
    place, rename, model = tmp_path / "last", storage.rename, nn.Linear(2, 2)
    shardkit.save(model, place)

    def meddle(source: str, target: str) -> None:
        rename(source, target)
        if "-commit-" in target:
            (place / "thesis.txt").write_text("mine")

    monkeypatch.setattr(storage, "rename", meddle)
    with pytest.raises(
        shardkit.UsageError, match=r"the new save is whole, and lies in .*/last-new\n"
    ) as caught:
        shardkit.save(model, place, overwrite=True)
    assert "thesis.txt" in caught.value.problems
    assert (place / "thesis.txt").read_text() == "mine"
    assert shardkit.verify(tmp_path / "last-new", full=True).problems == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "last-new"]


def test_what_cannot_get_a_name_beside_the_destination_is_not_lost(tmp_path: Any, monkeypatch: Any) -> None:
    """The next save would remove it there: the hint says to move it first."""
    place, rename = tmp_path / "last", storage.rename_noreplace

    def refuse(source: str, target: str) -> None:
        if target.startswith(f"{place}-new"):
            raise OSError(errno.EACCES, "Permission denied")
        rename(source, target)

    def meddle() -> None:
        place.mkdir()
        (place / "thesis.txt").write_text("mine")

    monkeypatch.setattr(storage, "rename_noreplace", refuse)
    with pytest.raises(shardkit.UsageError, match="the new save is whole, and lies in") as caught:
        shardkit.save(nn.Linear(2, 2), place, extra={"it": Looking(meddle)})
    hidden = tmp_path / ".last.shardkit" / "data"
    assert str(hidden) in caught.value.message
    assert caught.value.hint == (
        f"first copy it to {place}-new: where it lies, the next save to {place} removes it, or gives it that name"
    )
    shutil.copytree(hidden, f"{place}-new")
    assert shardkit.verify(f"{place}-new", full=True).problems == ()


def test_what_a_person_puts_into_the_old_save_meanwhile_stays(tmp_path: Any) -> None:
    """Nor does it cost the new one, which lies beside it."""
    place, model = tmp_path / "last", nn.Linear(2, 2)
    shardkit.save(model, place)

    def log() -> None:
        (place / "tokenizer.json").write_text("{}")
        (place / "logs").mkdir()

    with pytest.raises(shardkit.UsageError, match="last-new") as caught:
        shardkit.save(model, place, extra={"it": Looking(log)}, overwrite=True)
    assert {"logs/", "tokenizer.json"} < {*caught.value.problems}
    assert (place / "tokenizer.json").exists()
    assert shardkit.verify(tmp_path / "last-new", full=True).problems == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "last-new"]
    with pytest.raises(shardkit.UsageError, match="holds what shardkit did not write"):
        shardkit.save(model, place, overwrite=True)  # now it is known at once
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "last-new"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_is_seen_at_work_and_no_other_one_takes_its_place(overwrite: bool, tmp_path: Any) -> None:
    place, seen = tmp_path / "last", list[Any]()

    def look() -> None:
        seen.extend(status(str(place)))
        with pytest.raises(shardkit.UsageError, match="another job is under way for") as caught:
            shardkit.save(nn.Linear(3, 3), place, overwrite=overwrite)
        assert caught.value.problems == (f"it was begun by `shardkit.save(model, '{place}')`",)

    shardkit.save(nn.Linear(2, 2), place, extra={"it": Looking(look)})
    assert [(job.record.command, job.finished, job.is_committing) for job in seen] == [
        (f"shardkit.save(model, '{place}')", set(), False)
    ]
    assert shardkit.verify(place, full=True).problems == ()
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_what_was_removed_during_a_save_is_not_called_saved(tmp_path: Any, monkeypatch: Any) -> None:
    commit = LocalOutput.commit

    def late(output: LocalOutput, beside: str) -> None:
        LocalOutput(output.path, may_replace=print, foreign_files=lambda old, new: []).abort()
        commit(output, beside)

    monkeypatch.setattr(LocalOutput, "commit", late)
    with pytest.raises(shardkit.ResourceError, match="was removed while the save wrote there"):
        shardkit.save(nn.Linear(2, 2), tmp_path / "last")
    assert not list(tmp_path.iterdir())


def test_a_late_rank_of_a_dead_save_writes_nothing_into_the_next(tmp_path: Any, monkeypatch: Any) -> None:
    """Its rank 0 was killed, and it did not hear of that: it writes where it was told to."""
    place = tmp_path / "last"

    def killed(self: SaveWriter, plan: Any, planner: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        monkeypatch.setattr(SaveWriter, "write_data", killed)
        shardkit.save(nn.Linear(2, 2), place)
    os.waitpid(child, 0)
    (scratch,) = (tmp_path / ".last.shardkit" / "tmp").glob("*/*")
    files = writer_files(str(scratch))

    def look() -> None:
        files.mkdir(scratch)
        with pytest.raises(FileNotFoundError), files.create_stream(scratch / "__1_0.distcp", "wb"):
            raise AssertionError

    shardkit.save(nn.Linear(2, 2), place, extra={"it": Looking(look)})
    assert not list(place.glob("__1_0*"))
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.prove
@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_that_is_killed_at_any_call_costs_nothing(exchange: bool, tmp_path: Path) -> None:
    argument = json.dumps({"home": str(tmp_path), "exchange": exchange})
    run_script("training/save_kills_world.py", argument)


def test_a_model_of_somebodys_own_keeps_its_names(tmp_path: Path) -> None:
    """Its one attribute, and a list of modules called `module`, look like a wrapper's."""
    layers = nn.ModuleList([nn.ModuleDict({"module": nn.Linear(4, 4)}) for _ in range(2)])
    net = nn.ModuleDict({"embed": nn.Embedding(8, 4), "layers": layers, "head": nn.Linear(4, 8)})
    model = nn.ModuleDict({"net": net})
    shardkit.save(model, tmp_path / "saved")
    shardkit.consolidate(tmp_path / "saved", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == model.state_dict().keys()
