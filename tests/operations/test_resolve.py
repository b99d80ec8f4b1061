"""Rules of `resolve_checkpoint`, over stand-ins for checkpoints; the real formats come at the end."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from shardkit import prepare
from shardkit.cli import main
from shardkit.errors import LayoutError, SourceError, UsageError
from shardkit.files import storage
from shardkit.formats.registry import Format
from shardkit.operations import resolve
from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import diff
from shardkit.operations.inspect import inspect
from shardkit.operations.reshard import reshard
from shardkit.operations.resolve import (
    ResolvedCheckpoint,
    is_left_out,
    is_temporary,
    resolve_checkpoint,
    step_of,
)
from shardkit.operations.verify import verify
from tests.operations.consolidate.checkpoints import hub, load
from tests.operations.consolidate.checkpoints import save as save_dcp


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a file `whole`, and a .ckpt file, is a checkpoint; with `damaged` it does not open."""

    def recognise(path: str) -> Format | None:
        if os.path.isdir(path) and {"whole", "damaged"}.isdisjoint(os.listdir(path)):
            return None
        return Format(name="stand-in", module="", gate=(), what="")

    def open_stand_in(path: str) -> object:
        if os.path.exists(os.path.join(path, "damaged")):
            raise SourceError("1 of 2 rank files is missing", problems=["rank_1.pt"])
        return SimpleNamespace(catalog=SimpleNamespace(files=(), tensors={}, objects=()))

    monkeypatch.setattr(resolve, "recognise", recognise)
    monkeypatch.setattr(resolve.formats, "open", open_stand_in)


def make(root: Path, *names: str) -> None:
    """Make stand-ins: `a/b` is whole, `a/b!` damaged, `a/b/` an empty directory, `file=text` a text file."""
    for name in names:
        path = root / name.rstrip("!/").partition("=>")[0]
        if "=>" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name.partition("=>")[2])
            continue
        path.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            (path / ("damaged" if name.endswith("!") else "whole")).touch()


def taken(root: Path) -> str:
    return os.path.relpath(resolve_checkpoint(root), root)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("names", "expected", "step"),
    [
        (["checkpoint-9", "checkpoint-10", "checkpoint-100"], "checkpoint-100", 100),
        (["step_9", "step_10!", "step_11/"], "step_9", 9),
        (["step-20", "step-9"], "step-20", 20),
        (["global_step_1000", "global_step_200"], "global_step_1000", 1000),
        (["iter_0000100", "iter_0000020"], "iter_0000100", 100),
        (["step_5_ckp", "step_40_ckp"], "step_40_ckp", 40),
        (["ep0-ba9", "ep1-ba10"], "ep1-ba10", 10),
        (["1000", "200"], "1000", 1000),
        (["epoch_2", "epoch_10"], "epoch_10", None),
        (["dist_epoch_0", "dist_epoch_1"], "dist_epoch_1", None),
        (["epoch=0-step=9.ckpt", "epoch=1-step=10.ckpt"], "epoch=1-step=10.ckpt", 10),
        (["epoch=1-step=10.ckpt", "epoch=1-step=10-v1.ckpt"], "epoch=1-step=10-v1.ckpt", 10),
        (["epoch=9-step=90.ckpt", "last.ckpt"], "last.ckpt", None),
        (["last.ckpt", "last-v2.ckpt", "last-v10.ckpt"], "last-v10.ckpt", None),
        (["on_exception.ckpt", "last.ckpt", "epoch=9-step=90.ckpt"], "on_exception.ckpt", None),
        (["on_exception.ckpt!", "last.ckpt", "epoch=9-step=90.ckpt"], "last.ckpt", None),
        (["hpc_ckpt_2.ckpt", "hpc_ckpt_10.ckpt", "on_exception.ckpt"], "hpc_ckpt_10.ckpt", None),
        (["checkpoints/step_3", "checkpoints/step_12"], "checkpoints/step_12", 12),
        (["checkpoint-5/", "checkpoint-4/x/deep"], "checkpoint-4/x/deep", 4),
        (["lightning_logs/version_9/checkpoints/epoch=0-step=5.ckpt", "lightning_logs/version_9/checkpoints/last.ckpt"],
         "lightning_logs/version_9/checkpoints/last.ckpt", None),
        (["step_5", "x/sft", "x/dpo"], "step_5", 5),
        (["step-10", "step-10-hf", "last.ckpt", "last-hf"], "last.ckpt", None),
        (["latest=>sft", "sft", "dpo"], "sft", None),
        (["step_3", "optimizer_0", "critic", ".hidden", "wandb"], "step_3", 3),
    ],
)  # fmt: skip
def test_the_newest_is_taken(tmp_path: Path, names: list[str], expected: str, step: int | None) -> None:
    make(tmp_path, *names)
    found = resolve_checkpoint(tmp_path)
    assert os.path.relpath(found, tmp_path) == expected
    assert found.step == step
    assert ": " not in found.reason, "one level"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["step_3", "step_12"], "it has the highest step"),
        (["step_3", "step_12!"], "it has the highest step of those that are whole"),
        (["x/epoch_3/a", "x/epoch_2/a"], "epoch_3 has the highest epoch"),
        (["last.ckpt", "epoch=1-step=3.ckpt"], "it is what Lightning resumes from"),
        (["checkpoints/final"], "it is the only one"),
        (["latest=>global_step_2", "global_step_2/a", "global_step_9/a"], "latest names global_step_2"),
    ],
)
def test_the_reason_names_the_rule(tmp_path: Path, names: list[str], expected: str) -> None:
    make(tmp_path, *names)
    assert resolve_checkpoint(tmp_path).reason == expected


@pytest.mark.usefixtures("stand_ins")
def test_a_checkpoint_is_taken_as_it_is(tmp_path: Path) -> None:
    make(tmp_path, "step_7!", "step_7/step_9")
    found = resolve_checkpoint(tmp_path / "step_7")
    assert not found.warnings
    assert found == ResolvedCheckpoint(
        path=str(tmp_path / "step_7"), format="stand-in", step=7, reason="given directly"
    )
    assert os.fspath(found) == str(found) == found.to_json()["path"]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("tracker", "names"),
    [
        ("latest_checkpointed_iteration.txt=>20\n", ["global_step_3", "global_step_20", "global_step_100"]),
        ("latest=>step20\n", ["step3", "step20", "step100"]),
    ],
)
def test_a_tracker_file_comes_before_the_highest_step(tmp_path: Path, tracker: str, names: list[str]) -> None:
    make(tmp_path, tracker, *names)
    found = resolve_checkpoint(tmp_path)
    name = tracker.partition("=>")[0]
    assert os.path.basename(found) == names[1]
    assert found.reason == f"{name} names it"
    assert found.skipped == ((names[2], f"{name} does not name it, so its save may not have finished"),)
    assert os.path.basename(resolve_checkpoint(tmp_path / name)) == names[1]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("20", "cannot be opened"),
        ("step_20", "cannot be opened"),
        ("9", "is not there"),
        ("step_9", "is not there"),
        ("\0", "is not there"),
    ],
)
def test_a_tracker_that_names_nothing_whole_is_refused(tmp_path: Path, text: str, what: str) -> None:
    make(
        tmp_path,
        f"run/latest_checkpointed_iteration.txt=>{text}",
        "run/step_3",
        "run/step_20!",
        "run/step_100",
    )
    for path in (tmp_path, tmp_path / "run"):
        with pytest.raises(SourceError, match=f"_iteration.txt names .*, which {what}") as caught:
            resolve_checkpoint(path)
        assert caught.value.problems == (
            ("1 of 2 rank files is missing; rank_1.pt",) if what == "cannot be opened" else ()
        )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("text", ["../elsewhere", "/etc", "..", "", "x" * 5000])
def test_a_tracker_never_leads_out(tmp_path: Path, text: str) -> None:
    make(tmp_path, "elsewhere", "run/step_3")
    (tmp_path / "run/latest").write_text(text)
    assert taken(tmp_path / "run") == "step_3"


@pytest.mark.usefixtures("stand_ins")
def test_what_is_unfinished_is_passed_over_and_named(tmp_path: Path) -> None:
    make(tmp_path, "step_1", "step_2!", "step_3/", "step_4/", "step_5/distributed/", "checkpoint-6.tmp")
    (tmp_path / "step_3/.metadata.tmp").touch()
    (tmp_path / "step_4/__0_0.distcp").touch()
    (tmp_path / "step_5/distributed/__0_0.distcp").touch()
    found = resolve_checkpoint(tmp_path)
    assert os.path.basename(found) == "step_1"
    reasons = dict(found.skipped)
    assert list(reasons) == ["checkpoint-6.tmp", "step_5/distributed", "step_4", "step_3", "step_2"]
    assert reasons["step_3"] == "the save did not finish: .metadata.tmp was never renamed"
    assert (
        reasons["step_4"]
        == "the save did not finish, or .metadata was not copied: there are .distcp files without it"
    )
    assert reasons["step_2"] == "1 of 2 rank files is missing; rank_1.pt"


@pytest.mark.usefixtures("stand_ins")
def test_a_save_that_had_hardly_begun_is_named(tmp_path: Path) -> None:
    make(tmp_path, "step_1", "step_2/", "notes/")
    assert resolve_checkpoint(tmp_path).skipped == (("step_2", "it holds no checkpoint of a known format"),)


@pytest.mark.usefixtures("stand_ins")
def test_nothing_complete_says_what_was_passed_over(tmp_path: Path) -> None:
    make(tmp_path, "step_2!", "step_3!")
    with pytest.raises(SourceError) as caught:
        resolve_checkpoint(tmp_path)
    assert caught.value.problems == (
        "step_3: 1 of 2 rank files is missing; rank_1.pt",
        "step_2: 1 of 2 rank files is missing; rank_1.pt",
    )


def test_the_search_goes_three_levels_down(tmp_path: Path) -> None:
    save(tmp_path / "a/b/c/d/step_1", weight=1)
    with pytest.raises(SourceError, match="is not a checkpoint") as caught:
        resolve_checkpoint(tmp_path)
    assert caught.value.problems[0] == "it holds: a"
    assert resolve_checkpoint(tmp_path / "a").step == 1


@pytest.mark.usefixtures("stand_ins")
def test_links_are_followed_inside_only(tmp_path: Path) -> None:
    make(tmp_path, "other/step_9", "run/step_3", "run/step_2")
    (tmp_path / "run/step_8").symlink_to(tmp_path / "other/step_9")
    (tmp_path / "run/loop").symlink_to(tmp_path / "run")
    (tmp_path / "run/dangling.ckpt").symlink_to(tmp_path / "run/none")
    (tmp_path / "run/itself").symlink_to("itself")
    assert taken(tmp_path / "run") == "step_3"
    (tmp_path / "run/last.ckpt").symlink_to("step_2")
    assert taken(tmp_path / "run") == "last.ckpt"


@pytest.mark.usefixtures("stand_ins")
def test_links_that_lead_out_are_named_where_they_matter(tmp_path: Path) -> None:
    make(tmp_path, "scratch/step_9", "run/step_3", "alone/")
    for link in ("last.ckpt", "wandb-run", "step_8"):
        (tmp_path / "run" / link).symlink_to(tmp_path / "scratch/step_9")
    reason = f"a link that leads out of {tmp_path / 'run'}: it was not followed"
    assert dict(resolve_checkpoint(tmp_path / "run").skipped) == {"last.ckpt": reason, "step_8": reason}
    (tmp_path / "alone/checkpoints").symlink_to(tmp_path / "scratch")
    with pytest.raises(SourceError, match="no checkpoint in it opens whole") as caught:
        resolve_checkpoint(tmp_path / "alone")
    assert "checkpoints: a link that leads out" in caught.value.problems[0]
    assert taken(tmp_path / "alone/checkpoints") == "step_9"


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("link", "expected"),
    [("last.ckpt", "last.ckpt"), ("latest", "epoch=1-step=20.ckpt"), ("step-30", "epoch=1-step=20.ckpt")],
)
def test_a_link_to_a_neighbour_is_no_other_checkpoint(tmp_path: Path, link: str, expected: str) -> None:
    make(tmp_path, "epoch=1-step=20.ckpt", "epoch=0-step=10.ckpt")
    (tmp_path / link).symlink_to("epoch=1-step=20.ckpt")
    found = resolve_checkpoint(tmp_path, strict=True)
    assert (os.path.basename(found), found.step) == (expected, 20)
    assert resolve_checkpoint(tmp_path / "last.ckpt").step == 20 if link == "last.ckpt" else True


@pytest.mark.usefixtures("stand_ins")
def test_any_number_of_other_files_may_lie_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_MAX_ENTRIES", 5)
    make(tmp_path, "step_4", "samples/")
    for n in range(20):
        (tmp_path / f"{n}.png").touch()
    assert taken(tmp_path) == "step_4"


@pytest.mark.usefixtures("stand_ins")
def test_the_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_MAX_ENTRIES", 5)
    make(tmp_path, *(f"step_{n}" for n in range(5)))
    assert taken(tmp_path) == "step_4"
    make(tmp_path, "step_5")
    with pytest.raises(UsageError, match="more than 5"):
        resolve_checkpoint(tmp_path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        resolve_checkpoint(tmp_path / "none")


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("lr 1e-5")
    with pytest.raises(SourceError, match="not a checkpoint"):
        resolve_checkpoint(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch=3-step=1200.ckpt", 1200), ("step_00012", 12), ("checkpoint-500-best", 500), ("exit1", None),
        ("last.ckpt", None), ("epoch=3.ckpt", None), ("ckpt_300", 300), ("3d-model", None), ("٣", None),
    ],
)  # fmt: skip
def test_steps_in_names(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_names_that_are_not_looked_into() -> None:
    for name in ("optimizer", "optimizer_0", "optim", ".cache", "critic", "huggingface"):
        assert is_left_out(name)
    for name in ("actor", "checkpoint-3", "optimum", "runs", "logs", "refined", "pytorch_model_fsdp_0"):
        assert not is_left_out(name)
    assert is_temporary("tmp-checkpoint-3")
    assert is_temporary("step_3.incomplete")
    assert not is_temporary("attempt_3")


def save(path: Path, **values: float) -> None:
    save_dcp({"model": {name: torch.full((4,), value) for name, value in values.items()}}, path)


def save_file_of_torch(path: Path, value: float = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"layers.0.weight": torch.full((2,), float(value))}, path)


def test_real_checkpoints(tmp_path: Path) -> None:
    """A run of DCP saves: one whole, one that lost a file, one that never got its .metadata."""
    for step in (9, 10, 11):
        save(tmp_path / f"step-{step}", weight=step)
    (tmp_path / "step-10/__0_0.distcp").unlink()
    (tmp_path / "step-11/.metadata").rename(tmp_path / "step-11/.metadata.tmp")
    found = resolve_checkpoint(tmp_path)
    assert (os.path.basename(found), found.format, found.step) == ("step-9", "dcp", 9)
    assert [name for name, _ in found.skipped] == ["step-11", "step-10"]
    assert "__0_0.distcp" in found.skipped[1][1]


def test_what_is_newer_is_a_warning_before_anything_is_written(tmp_path: Path) -> None:
    """One rank file of the newest is missing: said at once, and refused on request, by all that take a run."""
    run = tmp_path / "run"
    for step in (5, 10, 20):
        save(run / f"step-{step}", weight=step)
    (run / "step-20/__0_0.distcp").unlink()
    (run / "step-5.tmp").mkdir()
    told: list[tuple[str, list[str]]] = []

    def on_warning(text: str) -> None:
        told.append((text, sorted(path.name for path in tmp_path.iterdir())))

    found = resolve_checkpoint(run)
    assert found.step == 10
    assert found.reason == "it has the highest step of those that are whole"
    (warning,) = found.warnings
    assert warning.startswith("skipped step-20: ")
    assert "__0_0.distcp" in warning
    base = hub(tmp_path / "base", {"weight": torch.zeros(4)}, {})
    exported = consolidate(run, tmp_path / "out", base=base, on_warning=on_warning)
    assert exported.warnings[0] == warning
    assert exported.reason == found.reason
    assert told[0] == (warning, ["base", "run"])
    told.clear()
    resharded = reshard(run, tmp_path / "anew", world_size=2, on_warning=on_warning)
    assert resharded.warnings[0] == warning
    assert told[0] == (warning, ["base", "out", "run"])
    assert diff(run, tmp_path / "out").warnings == (warning,)
    for refused in (
        lambda: resolve_checkpoint(run, strict=True),
        lambda: consolidate(run, tmp_path / "strict", strict=True),
        lambda: reshard(run, tmp_path / "strict", world_size=2, strict=True),
        lambda: diff(run, tmp_path / "out", strict=True),
    ):
        with pytest.raises(
            SourceError, match="step-10 may not be the newest checkpoint that is whole"
        ) as caught:
            refused()
        assert caught.value.problems == (warning,)
        assert str(run / "step-10") in (caught.value.hint or "")
    assert not (tmp_path / "strict").exists()
    (run / "step-20").rename(tmp_path / "step-20")
    assert resolve_checkpoint(run, strict=True).reason == "it has the highest step"


def test_a_file_stands_for_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "step-9", weight=9)
    for name in (".metadata", "__0_0.distcp"):
        found = resolve_checkpoint(tmp_path / "step-9" / name)
        assert (found.path, found.step) == (str(tmp_path / "step-9"), 9)


def test_an_optimizer_that_was_not_saved_to_its_end(tmp_path: Path) -> None:
    """accelerate saves the model first; a job that resumes needs both."""
    for step in (9, 10):
        save(tmp_path / f"checkpoint_{step}/pytorch_model_fsdp_0", weight=step)
        save(tmp_path / f"checkpoint_{step}/optimizer_0", exp_avg=step)
    unfinished = tmp_path / "checkpoint_10/optimizer_0/.metadata"
    assert resolve_checkpoint(tmp_path).step == 10
    unfinished.unlink()
    found = resolve_checkpoint(tmp_path)
    assert found.step == 9
    why = "the save did not finish, or .metadata was not copied: there are .distcp files without it"
    assert found.skipped[0] == ("checkpoint_10", f"optimizer_0: {why}")


def test_what_transformers_trainer_writes_last_counts(tmp_path: Path) -> None:
    for step in (9, 10):
        save(tmp_path / f"checkpoint-{step}/pytorch_model_fsdp_0", weight=step)
    assert resolve_checkpoint(tmp_path).step == 10, "accelerate's own, under such a name"
    (tmp_path / "checkpoint-9/trainer_state.json").write_text("{}")
    found = resolve_checkpoint(tmp_path)
    assert found.step == 9
    assert "trainer_state.json, which is written last, is missing" in found.skipped[0][1]


def test_several_models_in_one_checkpoint(tmp_path: Path) -> None:
    for index in (0, 1):
        save(tmp_path / f"checkpoint_3/pytorch_model_fsdp_{index}", weight=index)
    assert resolve_checkpoint(tmp_path).step == 3
    (tmp_path / "checkpoint_3/pytorch_model_fsdp_1/__0_0.distcp").unlink()
    with pytest.raises(SourceError, match="no checkpoint in it opens whole"):
        resolve_checkpoint(tmp_path)


def test_a_commit_marker_counts(tmp_path: Path) -> None:
    """mini_trainer writes training_state.pt when everything else is there."""
    for step in (2, 4):
        save(tmp_path / f"step_{step}/distributed", weight=step)
        (tmp_path / f"step_{step}/rng_state_rank_0.pt").touch()
    (tmp_path / "step_2/training_state.pt").touch()
    found = resolve_checkpoint(tmp_path)
    assert (os.path.basename(found), found.format) == ("step_2", "mini-trainer")
    assert "training_state.pt" in found.skipped[0][1]


def test_a_run_that_also_holds_its_final_model(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert resolve_checkpoint(tmp_path).format == "hub"
    save(tmp_path / "checkpoint-30/pytorch_model_fsdp_0", weight=1)
    found = resolve_checkpoint(tmp_path)
    assert (found.format, found.step) == ("accelerate", 30)
    assert found.reason == "it has the highest step"
    (warning,) = found.warnings
    assert warning.startswith("skipped the model at the top: ")
    with pytest.raises(SourceError):
        resolve_checkpoint(tmp_path, strict=True)
    assert resolve_checkpoint(tmp_path / "model.safetensors", strict=True).format == "hub"
    (tmp_path / "model.safetensors").unlink()
    assert resolve_checkpoint(tmp_path, strict=True).step == 30


def test_lightning_resumes_from_its_last_one(tmp_path: Path) -> None:
    for step in (100, 200):
        save(tmp_path / f"epoch=0-step={step}.ckpt", weight=step)
    save(tmp_path / "last.ckpt", weight=100)
    found = resolve_checkpoint(tmp_path, strict=True)
    assert (os.path.basename(found), found.step) == ("last.ckpt", None)
    (tmp_path / "last.ckpt/__0_0.distcp").unlink()
    found = resolve_checkpoint(tmp_path)
    assert found.step == 200
    assert [path for path, _ in found.skipped] == ["last.ckpt"]


def test_a_checkpoint_without_a_step_beside_steps(tmp_path: Path) -> None:
    save(tmp_path / "step-200", weight=1)
    save(tmp_path / "final/model", weight=2)
    found = resolve_checkpoint(tmp_path)
    assert (found.step, found.reason) == (200, "it has the highest step")
    assert found.warnings == ("skipped final: its name has no step, so it may be newer",)
    with pytest.raises(SourceError, match="may not be the newest") as caught:
        resolve_checkpoint(tmp_path, strict=True)
    assert f"give {tmp_path / 'step-200'} by its path" in (caught.value.hint or "")
    with pytest.raises(SourceError, match="may not be the newest"):
        verify(tmp_path)
    (tmp_path / "step-200/__0_0.distcp").unlink()
    with pytest.raises(UsageError, match="2 checkpoints here; say which") as listed:
        resolve_checkpoint(tmp_path)
    assert [problem.partition(":")[0] for problem in listed.value.problems] == ["final", "step-200"]


def test_several_side_by_side_are_named_by_every_verb(tmp_path: Path) -> None:
    for name in ("sft", "dpo"):
        save(tmp_path / "runs" / name, weight=1)
    runs, other = tmp_path / "runs", tmp_path / "runs/sft"
    for refused in (
        lambda: resolve_checkpoint(runs),
        lambda: consolidate(runs, tmp_path / "out"),
        lambda: reshard(runs, tmp_path / "out", world_size=2),
        lambda: diff(runs, other),
        lambda: verify(runs),
        lambda: inspect(runs),
    ):
        with pytest.raises(UsageError, match="runs: 2 checkpoints here; say which") as caught:
            refused()
        assert caught.value.problems == ("dpo", "sft")
        assert str(runs / "dpo") in (caught.value.hint or "")
    done = CliRunner().invoke(main, ["verify", str(runs)])
    assert (done.exit_code, done.stdout) == (2, "")
    with pytest.raises(LayoutError, match="runs is a directory of several checkpoints"):
        prepare(str(runs), str(other))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("names", "listed"),
    [
        (["base", "sft", "dpo", "rlhf"], ["base", "dpo", "rlhf", "sft"]),
        (["sft/checkpoints/a", "sft/checkpoints/b", "dpo/final"], ["dpo/final", "sft/checkpoints/a", "sft/checkpoints/b"]),
        (["step_5/generator", "step_5/discriminator"], ["step_5/discriminator", "step_5/generator"]),
        (["rank_0", "rank_1"], ["rank_0", "rank_1"]),
        (["tp_0_pp_0", "tp_0_pp_1"], ["tp_0_pp_0", "tp_0_pp_1"]),
        (["step_4/pp_rank_0", "step_5/pp_rank_0", "step_5/pp_rank_1"], ["step_5/pp_rank_0", "step_5/pp_rank_1"]),
        (["stage0-step_5", "stage1-step_4"], ["stage0-step_5", "stage1-step_4"]),
        (["stage0/step_5", "stage1/step_5!"], ["stage0/step_5", "stage1/step_5"]),
        (["stage0/step_5", "stage1/step_5!", "stage1/step_4"], ["stage0/step_5", "stage1/step_4"]),
        (["stage1", "stage2"], ["stage1", "stage2"]),
        (["sft", "dpo!"], ["dpo", "sft"]),
        (["sft", "dpo", "last"], ["dpo", "last", "sft"]),
        (["sft", "dpo", "model"], ["dpo", "model", "sft"]),
        (["sft/step_9", "dpo"], ["dpo", "sft/step_9"]),
        (["sft/step_9", "dpo/step_30"], ["dpo/step_30", "sft/step_9"]),
        (["sft/step_9", "dpo/step_9!", "dpo/step_8"], ["dpo/step_8", "sft/step_9"]),
        (["run-1/step_9", "run-2/step_9"], ["run-1/step_9", "run-2/step_9"]),
        (["2026-01-09_sft/step_9", "2026-01-10_dpo/step_3"], ["2026-01-09_sft/step_9", "2026-01-10_dpo/step_3"]),
        (["version_9/checkpoints/last.ckpt", "version_10/checkpoints/step=5.ckpt"],
         ["version_10/checkpoints/step=5.ckpt", "version_9/checkpoints/last.ckpt"]),
        (["ablation-1", "ablation-2"], ["ablation-1", "ablation-2"]),
        (["lora-rank8", "lora-rank16"], ["lora-rank16", "lora-rank8"]),
        (["step-9", "step-10", "step-10-ema"], ["step-10", "step-10-ema"]),
        (["epoch_2", "epoch_2_ema", "epoch_2_old!"], ["epoch_2", "epoch_2_ema", "epoch_2_old"]),
        (["qwen-step-10", "llama-step-10"], ["llama-step-10", "qwen-step-10"]),
        (["step_10!", "final"], ["final", "step_10"]),
    ],
)  # fmt: skip
def test_where_no_rule_decides_all_are_listed(tmp_path: Path, names: list[str], listed: list[str]) -> None:
    make(tmp_path, *names)
    with pytest.raises(UsageError, match=f": {len(listed)} checkpoints here; say which") as caught:
        resolve_checkpoint(tmp_path)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == listed
    with pytest.raises(UsageError, match="say which"):
        resolve_checkpoint(tmp_path, strict=True)


@pytest.mark.parametrize(
    "names", [("stage_0", "stage_1"), ("pipe0/step_5", "pipe1/step_5"), ("at_0.ckpt", "at_1.ckpt")]
)
def test_stages_of_a_pipeline_are_not_taken_for_the_model(tmp_path: Path, names: tuple[str, ...]) -> None:
    for layer, name in enumerate(names):
        if name.endswith(".ckpt"):
            torch.save({"model": {f"layers.{layer}.weight": torch.ones(4)}}, tmp_path / name)
        else:
            save(tmp_path / name, **{f"layers.{layer}.weight": 1})
    for refused in (
        lambda: consolidate(tmp_path, tmp_path / "out"),
        lambda: reshard(tmp_path, tmp_path / "out", world_size=2),
    ):
        with pytest.raises(UsageError, match="2 checkpoints here; say which") as caught:
            refused()
        assert caught.value.problems == names
    assert not (tmp_path / "out").exists()


def test_a_step_with_one_file_of_torch_save(tmp_path: Path) -> None:
    """Ray Train's, and many own loops': the file of the newest step is taken, however it is called."""
    for step in (1, 2):
        path = tmp_path / f"checkpoint_00000{step}/checkpoint.pt"
        path.parent.mkdir()
        torch.save({"model": {"layers.0.weight": torch.full((2,), float(step))}}, path)
        torch.save({"state": {}, "param_groups": []}, path.parent / "optimizer.pt")
    found = resolve_checkpoint(tmp_path)
    assert (os.path.relpath(found, tmp_path), found.step) == ("checkpoint_000002/checkpoint.pt", 2)
    consolidate(tmp_path, tmp_path / "out")
    assert load(tmp_path / "out")["layers.0.weight"].tolist() == [2, 2]
    path.write_bytes(path.read_bytes()[:-100])
    found = resolve_checkpoint(tmp_path)
    assert os.path.relpath(found, tmp_path) == "checkpoint_000001/checkpoint.pt"
    assert "skipped checkpoint_000002/checkpoint.pt: " in found.warnings[0]


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("epoch_1/model.pt", "epoch_2/model.pt", "epoch_10/model.pt"), "epoch_10/model.pt"),
        (("step_1/model.pt", "step_2/model-00001-of-00001.pt"), "step_2/model-00001-of-00001.pt"),
        (("step_1/model.pt", "epoch_9/samples.json"), "step_1/model.pt"),
        (("step_1/model.pt", "final/latents.pt"), "step_1/model.pt"),
    ],
)
def test_a_step_or_an_epoch_with_one_file(tmp_path: Path, names: tuple[str, ...], taken: str) -> None:
    for number, name in enumerate(names):
        save_file_of_torch(tmp_path / name, number)
    found = resolve_checkpoint(tmp_path, strict=True)
    assert os.path.relpath(found, tmp_path) == taken
    consolidate(tmp_path, tmp_path / "out")
    assert load(tmp_path / "out")["layers.0.weight"].tolist() == [names.index(taken)] * 2


@pytest.mark.parametrize("name", ["final", "best", "last", "epoch_9"])
def test_a_file_that_is_called_as_the_one_taken(tmp_path: Path, name: str) -> None:
    """final/model.pt beside step_1/model.pt is named, as final/ with a checkpoint of another form is."""
    for directory in ("step_1", name):
        save_file_of_torch(tmp_path / directory / "model.pt")
    found = resolve_checkpoint(tmp_path)
    assert os.path.relpath(found, tmp_path) == "step_1/model.pt"
    assert found.warnings == (f"skipped {name}: its name has no step, so it may be newer",)


def test_a_file_of_a_step_that_is_a_link_out_of_the_run(tmp_path: Path) -> None:
    for name in ("run/step_1", "elsewhere"):
        save_file_of_torch(tmp_path / name / "model.pt")
    (tmp_path / "run/step_2").mkdir()
    (tmp_path / "run/step_2/model.pt").symlink_to(tmp_path / "elsewhere/model.pt")
    found = resolve_checkpoint(tmp_path / "run")
    assert os.path.relpath(found, tmp_path / "run") == "step_1/model.pt"
    assert "skipped step_2: " in found.warnings[0]


@pytest.mark.parametrize(
    "names",
    [
        *(
            (f"{name}.pt",)
            for name in "rank_0 model_tp0 shard-0 model-00001-of-00002 model-00001-of-00010".split()
        ),
        *(("rank_0.pt", "rank_1.pt"), ("rank_0/checkpoint.pt", "rank_1/checkpoint.pt"), ("a.pt", "b.pt")),
    ],
)
def test_a_step_with_files_that_may_be_parts(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        save_file_of_torch(tmp_path / "run/step_5" / name)
    with pytest.raises(SourceError, match="no checkpoint in it opens whole") as caught:
        resolve_checkpoint(tmp_path / "run")
    assert f"if {names[0]} is a whole model, give it by its own path" in caught.value.problems[0]
    consolidate(tmp_path / "run/step_5" / names[0], tmp_path / "out")


def test_a_directory_that_may_not_be_listed_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run/step-1", weight=1)
    run = str(tmp_path / "run")
    listdir, scandir = storage.listdir, storage.scandir

    def refusing(path: str) -> None:
        if os.path.realpath(path) == run:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(storage, "listdir", lambda path: refusing(path) or listdir(path))
    monkeypatch.setattr(storage, "scandir", lambda path: refusing(path) or scandir(path))
    for command in ("inspect", "verify", "consolidate"):
        done = CliRunner().invoke(main, [command, run])
        assert done.exit_code == 5
        assert "cannot be listed: Permission denied" in done.stderr


def test_parts_of_one_checkpoint_are_not_taken_for_newer_ones(tmp_path: Path) -> None:
    for name in ("weights", "average"):
        save(tmp_path / "run/step-5" / name, weight=2)
    for path in (tmp_path / "run", tmp_path / "run/step-5"):
        assert resolve_checkpoint(path, strict=True).step == 5


@pytest.mark.usefixtures("stand_ins")
def test_links_to_nothing_are_named_where_they_matter(tmp_path: Path) -> None:
    make(tmp_path, "step_7")
    for name in ("step_8", "latest", "notes"):
        (tmp_path / name).symlink_to(f"gone_{name}")
    found = resolve_checkpoint(tmp_path)
    assert dict(found.skipped) == {"step_8": "a link to gone_step_8, which is not there"}
    assert len(found.warnings) == 1


def test_a_deepspeed_run(tmp_path: Path) -> None:
    """The directory is what `latest` names."""
    for step in (9, 10):
        path = tmp_path / f"global_step{step}/mp_rank_00_model_states.pt"
        path.parent.mkdir()
        torch.save({"module": {"weight": torch.zeros(3)}, "param_shapes": None}, path)
    (tmp_path / "latest").write_text("global_step10")
    found = resolve_checkpoint(tmp_path)
    assert (found.path, found.format, found.step) == (str(tmp_path), "deepspeed", 10)
    assert found.reason == "latest names global_step10"
    shutil.copytree(tmp_path / "global_step10", tmp_path / "global_step11")
    (warning,) = resolve_checkpoint(tmp_path).warnings
    assert warning.startswith("skipped global_step11: latest does not name it")
    shutil.rmtree(tmp_path / "global_step11")
    os.truncate(tmp_path / "global_step10/mp_rank_00_model_states.pt", 200)
    with pytest.raises(SourceError, match="latest names global_step10, which cannot be opened") as caught:
        resolve_checkpoint(tmp_path)
    assert "mp_rank_00_model_states.pt" in caught.value.problems[0]
    assert resolve_checkpoint(tmp_path / "global_step9").step == 9


def test_what_consolidate_wrote_beside_a_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", "last.ckpt"):
        save_dcp({"w": torch.ones(3)}, tmp_path / "run" / name)
    for name in ("step-2-hf", "last-hf", "step-3-hf"):
        hub(tmp_path / "run" / name, {"w": torch.ones(3)}, None)
    assert taken(tmp_path / "run") == "last.ckpt"
    (tmp_path / "run" / "last.ckpt").rename(tmp_path / "other")
    (tmp_path / "run" / "last-hf").rename(tmp_path / "last-hf")
    (tmp_path / "run" / "step-3-hf").rename(tmp_path / "step-3-hf")
    assert taken(tmp_path / "run") == "step-2"
    assert taken(tmp_path / "last-hf") == "."
