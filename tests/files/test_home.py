"""A checkpoint as it lies in an object store, with its files in a folder beside `.metadata`: read as the flat one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import shardkit
from shardkit.errors import IntegrityError, ShardkitError, SourceError
from shardkit.files import home, manifest
from tests.contents import contents
from tests.formats.dcp.samples import quiet
from tests.manifests import write_file_list
from tests.nested import FOLDER, OLDER, Model, describe, nest, place

CONFIG = {"model_type": "of-nobody", "architectures": ["Model"]}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`hub`, and two checkpoints with its weights, in `flat` and `nested`: `presharded` and `saved`."""
    found = tmp_path_factory.mktemp("homes")
    for name in ("hub", "flat", "nested"):
        (found / name).mkdir()
    torch.manual_seed(0)
    model = Model()
    save_file(model.state_dict(), found / "hub/model.safetensors")
    (found / "hub/config.json").write_text(json.dumps(CONFIG))
    (found / "hub/tokenizer.json").write_text("{}")
    shardkit.preshard(found / "hub", found / "flat/presharded", world_size=2, wrap="none")
    shardkit.save(model, found / "flat/saved", optimizer=torch.optim.AdamW(model.parameters()))
    for kind in ("presharded", "saved"):
        nest(found / "flat" / kind, found / "nested" / kind)
        older = found / "nested" / kind / OLDER  # of a save that was replaced
        shutil.copytree(found / "flat" / kind, older, ignore=lambda _, names: {".metadata"} & set(names))
    return found


@pytest.fixture
def made(kept: Path, tmp_path: Path) -> Path:
    """A nested checkpoint that a test may change."""
    shutil.copytree(kept / "nested/presharded", tmp_path / "one")
    shutil.copy(kept / "hub/model.safetensors", tmp_path / "weights")
    return tmp_path / "one"


def written(directory: Path) -> dict[str, bytes]:
    """Return what lies there, without the manifest."""
    return {name: data for name, data in contents(directory).items() if Path(name).name != manifest.NAME}


Answer = Callable[[Path, Path], object]


def said(result: Any) -> dict[str, Any]:
    """What a verb answers, without paths, times and the size of `.metadata`, which has longer names."""
    dropped = {"path", "resolved", "elapsed_s", "moving_s", "read_bytes", "assets"}
    return {key: value for key, value in result.to_json().items() if key not in dropped}


def fill(path: Path, _: Path) -> dict[str, bytes]:
    context = shardkit.prepare(Model, path)
    first, second = shardkit.finalize(context.model, context), Model()
    shardkit.load_into(second, path)
    states = (first.state_dict(), second.state_dict())
    return {f"{n}.{k}": v.numpy().tobytes() for n, state in enumerate(states) for k, v in state.items()}


def refused(path: Path, out: Path) -> str:
    with pytest.raises(ShardkitError) as error:
        shardkit.preshard(path, out, world_size=2)
    return str(error.value).replace(f"/{FOLDER}", "").replace(str(path), "PATH")


def consolidated(path: Path, out: Path, **options: Any) -> object:
    shardkit.consolidate(path, out, **options)
    return written(out)


def resharded(path: Path, out: Path) -> object:
    shardkit.reshard(path, out, world_size=3)
    return written(out)


def listed(path: Path, out: Path) -> object:
    write_file_list(path, out)
    content = json.loads(out.read_text())
    same = [each for each in content["files"] if each["name"] not in (".metadata", "shardkit.json")]
    names = [each["name"] for each in content["files"]]
    assert not shardkit.verify(path, manifest=out, full=True).problems
    return same, names, content["tensors"]


VERBS: dict[str, Answer] = {
    "inspect": lambda path, _: said(shardkit.inspect(path, tensors=True)),
    "verify": lambda path, _: said(shardkit.verify(path)),
    "verify, full": lambda path, _: said(shardkit.verify(path, full=True)),
    "verify of a file": lambda path, _: said(shardkit.verify(path / ".metadata")),
    "consolidate": consolidated,
    "reshard": resharded,
    "fill": fill,
    "preshard": refused,
    "verify with a list of files": listed,
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["presharded", "saved"])
def test_every_verb_answers_as_for_the_flat_one(kept: Path, tmp_path: Path, kind: str, verb: str) -> None:
    answers = [VERBS[verb](kept / form / kind, tmp_path / form) for form in ("flat", "nested")]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["presharded", "saved"])
def test_nothing_is_wrong_with_it(kept: Path, kind: str) -> None:
    """The answers above could be equally wrong."""
    assert shardkit.inspect(kept / "nested" / kind).warnings == ()
    report = shardkit.verify(kept / "nested" / kind, full=True)
    assert (report.problems, report.warnings) == ((), ())
    assert report.manifests == ("shardkit.json",)
    for other in (kept / "flat" / kind, kept / "hub"):
        assert shardkit.diff(kept / "nested" / kind, other).is_equal


def test_what_lies_in_it_goes_along(kept: Path, tmp_path: Path) -> None:
    shardkit.consolidate(kept / "nested/presharded", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()).items() >= CONFIG.items()
    shardkit.consolidate(kept / "nested/saved", tmp_path / "with", base=kept / "hub")
    assert (tmp_path / "with/tokenizer.json").exists()
    result = shardkit.reshard(kept / "nested/presharded", tmp_path / "three", world_size=3)
    assert result.copied == ("config.json", "tokenizer.json")
    assert shardkit.inspect(kept / "nested/presharded").kind == "presharded"


@pytest.mark.parametrize("reader", [FileSystemReader, FsspecReader, shardkit.SafeReader])
def test_stock_load_reads_it(kept: Path, reader: Callable[[str], Any]) -> None:
    want = load_file(kept / "hub/model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    with quiet():
        dcp.load(state, storage_reader=reader(str(kept / "nested/presharded")), no_dist=True)
    assert all(torch.equal(state[name], want[name]) for name in want)


def test_a_run_is_searched_for_it(kept: Path, tmp_path: Path) -> None:
    for step in (2, 10):
        shutil.copytree(kept / "nested/presharded", tmp_path / f"run/step-{step}")
    shutil.copytree(kept / "nested/presharded", tmp_path / "run/step-20")
    (tmp_path / "run/step-20/.metadata").unlink()
    found = shardkit.resolve_checkpoint(tmp_path / "run")
    assert (found.path, found.step) == (str(tmp_path / "run/step-10"), 10)
    assert found.skipped == (
        ("step-20", "the save did not finish: .metadata is missing, which is written last"),
    )
    assert shardkit.diff(tmp_path / "run", kept / "hub").is_equal


def test_what_was_not_committed_is_no_checkpoint(made: Path) -> None:
    (made / ".metadata").unlink()
    for verb in (shardkit.inspect, shardkit.resolve_checkpoint):
        with pytest.raises(SourceError, match=r"the save did not finish: \.metadata is missing"):
            verb(made)
    assert f"{FOLDER}/.metadata" in {problem.file for problem in shardkit.verify(made).problems}
    with pytest.raises(SourceError, match=r"has shardkit\.json and no \.metadata"):
        shardkit.prepare(Model, made / FOLDER)


def test_the_folder_may_be_named_itself(kept: Path) -> None:
    """Only the one that counts: an older one has no `.metadata`."""
    assert said(shardkit.verify(kept / "nested/presharded" / FOLDER, full=True)) == said(
        shardkit.verify(kept / "nested/presharded", full=True)
    )
    with pytest.raises(ShardkitError):
        shardkit.consolidate(kept / "nested/presharded" / OLDER, kept / "no-output")


def test_damage_is_found(made: Path) -> None:
    path = made / FOLDER / "__1_0.distcp"
    data, tensor = path.read_bytes(), load_file(made.parent / "weights")["a.weight"][3:].numpy().tobytes()
    assert data.count(tensor) == 1
    path.write_bytes(data.replace(tensor, tensor[:-1] + b"?"))
    assert {each.file for each in shardkit.verify(made, full=True).problems} == {"__1_0.distcp"}
    with pytest.raises(IntegrityError, match=r"__1_0\.distcp"):
        shardkit.consolidate(made, made.parent / "out")


def test_a_manifest_of_another_save_is_found_out(made: Path) -> None:
    metadata = (made / ".metadata").read_bytes()
    place(made, lambda name: name.replace("__0", "__O").replace("__1", "__0").replace("__O", "__1"))
    assert len((made / ".metadata").read_bytes()) == len(metadata)
    problems = shardkit.verify(made).problems
    assert ("CRC-32 of the file", ".metadata") in {(each.message, each.file) for each in problems}


def test_a_list_of_files_beside_it_is_used(made: Path) -> None:
    write_file_list(made)
    beside = made.parent / "one.shardkit.json"
    names = [each["name"] for each in json.loads(beside.read_text())["files"]]
    assert ".metadata" in names
    assert "__0_0.distcp" in names
    assert not any(name.startswith("data-") for name in names)
    assert shardkit.verify(made, manifest=beside).ok


@pytest.mark.parametrize(
    "name",
    [
        f"{FOLDER}/../{OLDER}/__0_0.distcp",
        f"../one/{FOLDER}/__0_0.distcp",
        f"/{FOLDER}/__0_0.distcp",
        f"{FOLDER}//__0_0.distcp",
        f"{FOLDER}/\0/__0_0.distcp",
    ],
)
def test_names_that_leave_it_are_refused(made: Path, name: str) -> None:
    place(made, lambda old: name if "__0_0" in old else old)
    describe(made, made / FOLDER)
    for verb in (shardkit.inspect, lambda path: shardkit.load_into(Model(), path)):
        with pytest.raises(SourceError, match=r"not the name of a \.distcp file in or below"):
            verb(made)


def test_two_folders_are_no_home(made: Path) -> None:
    """They are read as any folders below a checkpoint; no manifest of one speaks for both."""
    place(made, lambda name: name.replace(FOLDER, OLDER) if "__0_0" in name else name)
    assert home.home_of(str(made)) == str(made)
    found = shardkit.inspect(made)
    assert found.kind == "dcp"
    assert [file.name for file in found.files] == [f"{OLDER}/__0_0.distcp", f"{FOLDER}/__1_0.distcp"]


def test_a_shard_beside_the_folder_makes_it_no_home(made: Path) -> None:
    shutil.copy(made / FOLDER / "__0_0.distcp", made / "__0_0.distcp")
    place(made, lambda name: "__0_0.distcp" if "__0_0" in name else name)
    assert shardkit.inspect(made).kind == "dcp"


def test_names_of_tensors_that_look_like_paths_are_found_out(made: Path) -> None:
    """The bytes of `.metadata` say one folder; whoever parses it sees that it names others."""
    known = home._folders
    inspected = shardkit.inspect(made)
    place(made, lambda name: name.replace(FOLDER, "elsewhere") if "__0_0" in name else name)
    status = os.lstat(made / ".metadata")
    known[os.path.realpath(made), status.st_ino, status.st_size, status.st_mtime_ns] = FOLDER
    with pytest.raises(SourceError, match=rf"names files in {FOLDER}/ and files elsewhere"):
        shardkit.consolidate(made, made.parent / "out")
    assert inspected.kind == "presharded"


def test_a_link_that_leaves_is_refused(made: Path) -> None:
    (made / FOLDER).rename(made.parent / "outside")
    (made / FOLDER).symlink_to("../outside")
    for verb in (shardkit.inspect, lambda path: shardkit.consolidate(path, made.parent / "out")):
        with pytest.raises(ShardkitError, match="symbolic link that leaves its directory"):
            verb(made)
    shardkit.consolidate(made, made.parent / "out", follow_links=True)
    assert shardkit.verify(made.parent / "out").problems == ()


@pytest.mark.parametrize("name", ["../outside", f"../../one/{OLDER}/__0_0.distcp", "/etc/passwd"])
def test_a_manifest_that_names_files_outside_is_refused(made: Path, name: str) -> None:
    path = made / FOLDER / "shardkit.json"
    content = json.loads(path.read_text())
    content["files"][0]["name"] = name
    path.write_bytes(manifest.sign(content))
    for verb in (shardkit.inspect, lambda path: shardkit.prepare(Model, path)):
        with pytest.raises(SourceError, match="a file name"):
            verb(made)
    assert shardkit.verify(made).problems


def test_a_manifest_at_the_top_counts(made: Path) -> None:
    """Then the directory is a flat one, with its shards in a folder."""
    shutil.copy(made / FOLDER / "shardkit.json", made / "shardkit.json")
    assert home.home_of(str(made)) == str(made)


def test_the_home_of_anything_else_is_itself(made: Path, kept: Path) -> None:
    for path in (kept / "flat/presharded", kept / "hub", made / "nothing", made / ".metadata", made / OLDER):
        assert home.home_of(str(path)) == home.root_of(str(path)) == str(path)
    assert home.home_of(f"{made}/") == str(made / FOLDER)
    assert home.root_of(f"{made}/{FOLDER}/") == str(made)
