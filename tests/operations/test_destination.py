"""What --overwrite of a sharded checkpoint may replace, and what never."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.core.mesh import parse_mesh
from shardkit.errors import Interrupted, ResourceError, UsageError
from shardkit.files.output.local import LocalOutput
from shardkit.formats.owned import OutputKind, find_foreign
from shardkit.operations.destination import default_output
from tests.cases import but_first
from tests.operations.consolidate.checkpoints import CONFIG, hub, save, weights
from tests.operations.stops import interrupt

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("fast_trace"),
]


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    """Model and optimizer in folders of their own, and a file beside."""
    home = tmp_path / "run" / "checkpoint-2"
    save({"model": weights()}, home / "pytorch_model_fsdp_0")
    save({"optimizer": {"x": torch.zeros(2)}}, home / "optimizer_0")
    (home / "trainer_state.json").write_text("{}")
    return home


def foreign(path: Path) -> list[str]:
    return find_foreign(str(path), OutputKind.SHARDED, {})


def test_what_reshard_wrote_in_folders_is_replaced(trainers: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkpoint-2"
    shardkit.reshard(trainers, str(out), world_size=3)
    shardkit.reshard(trainers, str(out), world_size=2, overwrite=True)
    assert len(list(out.glob("pytorch_model_fsdp_0/*.distcp"))) == 2


def test_what_a_trainer_wrote_in_folders_is_not(trainers: Path, tmp_path: Path) -> None:
    theirs = ["optimizer_0/", "pytorch_model_fsdp_0/", "trainer_state.json"]
    assert foreign(trainers) == theirs
    shardkit.reshard(trainers, str(tmp_path / "checkpoint-2"), world_size=3)
    shutil.rmtree(trainers / "optimizer_0")
    shutil.copytree(tmp_path / "checkpoint-2" / "optimizer_0", trainers / "optimizer_0")  # half of it is ours
    assert foreign(trainers) == theirs


def test_a_run_around_one_is_not(trainers: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shardkit.reshard(trainers, str(tmp_path / "other" / "checkpoint-2"), world_size=3)
    shardkit.reshard(trainers / "pytorch_model_fsdp_0", str(tmp_path / "other" / "model"), world_size=3)
    assert foreign(tmp_path / "other") == ["checkpoint-2/", "model/"]


def test_a_hub_model_is_not(trainers: Path, tmp_path: Path) -> None:
    out = shardkit.consolidate(trainers, str(tmp_path / "out"), manifest=True).output
    with pytest.raises(UsageError, match="holds a Hub model"):
        shardkit.reshard(trainers, out, world_size=2, overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


def write(verb: str, home: Path, out: Path, **options: Any) -> object:
    """Write an output, of which a card, a licence and code are a part where the verb copies these."""
    base, checkpoint = home / "hub", home / "run" / "checkpoint-2"
    if verb == "save":
        return shardkit.save(torch.nn.Linear(2, 2), out, **options)
    if verb == "reshard":
        return shardkit.reshard(checkpoint, out, world_size=2, **options)
    if verb == "consolidate":
        return shardkit.consolidate(checkpoint, out, base=base, ask_class=False, **options)
    return shardkit.preshard(base, out, world_size=2, wrap="none", layout="declared", **options)


def content(path: Path) -> dict[str, bytes | None]:
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() else None for each in path.rglob("*")
    }


WRITERS: dict[str, tuple[str, dict[str, Any]]] = {
    "preshard": ("preshard", {}),
    "preshard for transformers": ("preshard", {"profile": "transformers"}),
    "preshard for accelerate": ("preshard", {"profile": "accelerate"}),
    "preshard without digests": ("preshard", {"digest": "none"}),
    "reshard": ("reshard", {}),
    "consolidate": ("consolidate", {}),
    "consolidate with a manifest": ("consolidate", {"manifest": True}),
    "save": ("save", {}),
}
FOREIGN = ("handler.py", "my.yaml", "notes.txt", "optimizer.pt")


@pytest.mark.parametrize("end", ["commit", "again", "other", "abort", "save"])
def test_whoever_ends_a_commit_leaves_a_text_that_was_edited_meanwhile(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anybody leave the rest of the old output beside the new one."""
    base, out = hub(tmp_path / "hub", weights(), CONFIG), tmp_path / "out"
    (base / "README.md").write_text("of the base")

    def run(**options: Any) -> Any:
        return shardkit.consolidate(base, out, ask_class=False, **options)

    run()
    with monkeypatch.context() as killed:
        killed.setattr(LocalOutput, "_publish_own", interrupt)
        with pytest.raises(Interrupted):
            run(overwrite=True)
    (out / "README.md").write_text("by hand")
    ends = {
        "commit": lambda: shardkit.commit(out),
        "again": lambda: run(overwrite=True),
        "other": lambda: run(overwrite=True, dtype="fp16"),
        "save": lambda: shardkit.save(torch.nn.Linear(2, 2), out, overwrite=True),
    }
    if end == "abort":
        shardkit.abort(out)
    else:
        with pytest.raises(UsageError, match="exists and holds"):
            ends[end]()
    assert (out / "README.md").read_text() == "by hand"
    (out / "README.md").write_text("of the base")
    if end != "abort":
        run(overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "out"]


@pytest.mark.parametrize("end", ["commit", "abort", "preshard"])
def test_whoever_ends_a_commit_removes_the_old_output(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that knows nothing of Hub models."""
    base, out = hub(tmp_path / "hub", weights(), CONFIG), tmp_path / "out"
    (base / "README.md").write_text("of the base")
    shardkit.consolidate(base, out, ask_class=False)
    replace = LocalOutput._replace

    def die(*args: Any) -> None:
        replace(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(LocalOutput, "_replace", die)
        with pytest.raises(Interrupted):
            shardkit.consolidate(base, out, ask_class=False, dtype="fp16", overwrite=True)
    if end == "preshard":
        with pytest.raises(UsageError, match="out exists"):
            shardkit.preshard(base, out, world_size=2, layout="declared")
    else:
        getattr(shardkit, end)(out)
    assert not list(tmp_path.glob("*replaced*"))


@pytest.mark.parametrize("case", but_first(WRITERS))
def test_what_a_person_put_into_an_output_is_named_and_stays(
    case: str, trainers: Path, tmp_path: Path
) -> None:
    verb, options = WRITERS[case]
    base = hub(tmp_path / "hub", weights(), CONFIG, tokenizer__json="{}", merges__txt="a b")
    for home in (base, trainers):
        (home / "README.md").write_text("of the base")
        (home / "modeling_tiny.py").write_text("x = 1")
    out, options = tmp_path / "out", {**options, "overwrite": True}
    write(verb, tmp_path, out, **options)
    for name in (".DS_Store", ".gitattributes"):
        (out / name).touch()
    (out / "__pycache__").mkdir()
    write(verb, tmp_path, out, **options)

    (out / "logs").mkdir()
    for name in FOREIGN:
        (out / name).write_text("mine")
    named, card = ["logs/", *FOREIGN], next(iter(sorted(out.rglob("README.md"))), None)
    if card is not None:
        card.write_text("by hand")
        os.utime(card, (2**32, 2**32))
        named.append(str(card.relative_to(out)))
    before = content(out)
    with pytest.raises(UsageError, match="holds what shardkit did not write: it is not replaced") as caught:
        write(verb, tmp_path, out, **options)
    assert {each.partition(":")[0] for each in caught.value.problems} == {*named}
    assert "no option removes it" in (caught.value.hint or "")
    assert content(out) == before
    assert not list(tmp_path.glob(".out*"))

    for name in named:
        shutil.rmtree(out / name) if name.endswith("/") else (out / name).unlink()
    write(verb, tmp_path, out, **options)


def test_with_another_config_or_tokenizer_an_output_is_another(trainers: Path, tmp_path: Path) -> None:
    """The weights are the same, so their sources do not show it; parts of the two are not put together."""
    base, parts = hub(tmp_path / "hub", weights(), CONFIG, tokenizer__json="{}"), "parts"
    for name, text in (("tokenizer.json", '{"a": 1}'), ("config.json", json.dumps({**CONFIG, "eps": 1}))):
        write("consolidate", tmp_path, tmp_path / parts, part="1/2", max_shard_size="20KB")
        (base / name).write_text(text)
        with pytest.raises(UsageError, match="another job is under way"):
            write("consolidate", tmp_path, tmp_path / parts, part="2/2", max_shard_size="20KB")
        parts = "other"


def test_with_another_file_beside_the_shards_a_resharded_checkpoint_is_another(
    trainers: Path, tmp_path: Path
) -> None:
    write("reshard", tmp_path, out := tmp_path / "out")
    write("reshard", tmp_path, tmp_path / "parts", part="1/2")
    (trainers / "trainer_state.json").touch()
    with pytest.raises(UsageError, match="out exists"):
        write("reshard", tmp_path, out)
    with pytest.raises(UsageError, match="another job is under way"):
        write("reshard", tmp_path, tmp_path / "parts", part="2/2")


def test_of_a_model_of_another_base_the_licence_is_named(trainers: Path, tmp_path: Path) -> None:
    """It is not what the run writes."""
    for name in ("hub", "other"):
        hub(tmp_path / name, weights(), CONFIG, tokenizer__json="{}")
        (tmp_path / name / "LICENSE").write_text(name)
    out = tmp_path / "out"
    write("consolidate", tmp_path, out)
    (tmp_path / "hub").rename(tmp_path / "aside")
    (tmp_path / "other").rename(tmp_path / "hub")
    with pytest.raises(UsageError) as caught:
        write("consolidate", tmp_path, out, overwrite=True)
    assert caught.value.problems == ("LICENSE: it is not what this run writes there",)
    (out / "LICENSE").unlink()
    write("consolidate", tmp_path, out, overwrite=True)
    assert (out / "LICENSE").read_text() == "other"


@pytest.mark.parametrize(
    ("label", "mesh", "name"),
    [
        ("last", "dp_shard=3", "last-dp_shard3"),
        ("last-dp_shard2", "dp_shard=3", "last-dp_shard3"),
        ("last-dp_replicate2-dp_shard16", "dp_shard=4,tp=2", "last-dp_shard4-tp2"),
        ("last-dp_shard2-hf", "dp_shard=3", "last-dp_shard2-hf-dp_shard3"),
        ("last-dp_shard2", "dp_shard=2", "last-dp_shard2-dp_shard2"),
        ("-tp2", "dp_shard=2", "-tp2-dp_shard2"),
    ],
)
def test_a_mesh_in_a_default_name_takes_the_place_of_another(label: str, mesh: str, name: str) -> None:
    assert default_output(label, None, parse_mesh(mesh, None)) == name


def test_what_is_resharded_again_has_the_name_of_its_mesh_alone(
    trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = shardkit.reshard(trainers, world_size=3).output
    assert shardkit.reshard(first, world_size=2).output == str(tmp_path / "checkpoint-2-dp_shard2")


def test_of_two_runs_with_one_default_name_the_second_is_told_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, place in enumerate(("run1", "run2", "run3/run1")):
        model = {key: value + number for key, value in weights().items()}
        save({"model": model}, tmp_path / place / "step-30")
    monkeypatch.chdir(tmp_path)
    name = Path(shardkit.reshard("run1/step-30", world_size=2).output).name
    assert name == "step-30-dp_shard2"
    with pytest.raises(UsageError, match="step-30-dp_shard2 exists") as caught:
        shardkit.reshard("run2", world_size=2)  # as it stands for its newest checkpoint
    wording = (
        "choose another name, such as {}, replace it with --overwrite, or leave it as it is with --exist-ok"
    )
    assert caught.value.hint == wording.format("run2-step-30-dp_shard2")
    assert shardkit.reshard("run1/step-30", world_size=2, exist_ok=True).was_there
    (tmp_path / "run1-step-30-dp_shard2").mkdir()
    for source, other in (
        ("run2/step-30", "run2-step-30-dp_shard2"),
        ("run3/run1/step-30", "run3-run1-step-30-dp_shard2"),
    ):
        with pytest.raises(UsageError) as caught:
            shardkit.reshard(source, world_size=2)
        assert caught.value.hint == wording.format(other)
        shardkit.reshard(source, other, world_size=2)
    with pytest.raises(UsageError) as caught:
        shardkit.reshard("run2/step-30", name, world_size=2)  # a person's own
    assert caught.value.hint == (
        "choose another name, replace it with --overwrite, or leave it as it is with --exist-ok"
    )


def test_of_two_models_with_one_default_name_the_second_is_told_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, place in enumerate(("run1", "run2")):
        (tmp_path / place).mkdir()
        hub(tmp_path / place / "final", {key: value + number for key, value in weights().items()})
    monkeypatch.chdir(tmp_path)
    shardkit.preshard("run1/final", world_size=2, wrap="none")
    for source in ("run2/final", "run2/final/model.safetensors"):
        with pytest.raises(UsageError, match="final-dp_shard2 exists") as caught:
            shardkit.preshard(source, world_size=2, wrap="none")
        assert "such as run2-final-dp_shard2, replace" in (caught.value.hint or "")


def test_an_empty_directory_that_no_rename_can_replace(
    trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before anything is moved."""
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path / "out")
    for place, why in (
        (tmp_path / "link", "is a symbolic link"),
        (Path("/proc"), "is a mount point"),
        (tmp_path / "out", "is the working directory"),
    ):
        with pytest.raises(UsageError, match=why):
            shardkit.reshard(trainers, str(place), world_size=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_empty_path_is_not_the_default(
    trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script whose variable is not set must not write somewhere else."""
    monkeypatch.chdir(tmp_path)
    hub(tmp_path / "model", weights())
    for write in (
        lambda: shardkit.preshard("model", "", world_size=2),
        lambda: shardkit.consolidate(trainers, ""),
        lambda: shardkit.reshard(trainers, "", world_size=2),
    ):
        with pytest.raises(UsageError, match="the output is an empty path"):
            write()
    assert sorted(os.listdir(tmp_path)) == ["model", "run"]


def test_the_command_that_makes_a_missing_parent_works(trainers: Path, tmp_path: Path) -> None:
    output = tmp_path / "a b" / "it's $HOME" / "out"
    with pytest.raises(ResourceError, match="does not exist") as caught:
        shardkit.consolidate(trainers, output)
    subprocess.run(["bash", "-c", str(caught.value.hint).partition(": ")[2]], check=True, timeout=600)
    assert shardkit.consolidate(trainers, output).output == str(output)
