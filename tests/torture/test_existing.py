"""The same command after a success ends well if the output is of this very plan, and in no other case."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.files import manifest
from shardkit.transfer.execute import ComparingExecution
from tests.torture.divided import committing, good, part, parts
from tests.torture.harness import Answer, Place, Scenario, Scenarios, Server, content, restore, stamps

ALL = (
    "preshard no digests",
    "preshard columns cast",
    "consolidate manifest",
    "consolidate cast",
    "reshard",
    "reshard cast",
    "preshard factors",
)


def made(scenario: Scenario, server: Server, path: Path) -> Place:
    place = Place(scenario, path)
    assert scenario.run(server, place.out).code == 0
    return place


def again(place: Place, server: Server, *extra: str, scenario: Scenario | None = None) -> Answer:
    """Run once more; nothing is touched in any case."""
    before = stamps(place.out)
    answer = (scenario or place.scenario).run(server, place.out, extra=extra)
    assert stamps(place.out) == before
    place.check_source()
    assert place.staging() == []
    return answer


@pytest.mark.parametrize("name", ALL)
def test_the_same_command_again(name: str, found: Scenarios, server: Server, place: Path) -> None:
    there = made(found[name], server, place)
    answer = again(there, server)
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert said["was_there"] is True
    assert said["warnings"] == json.loads(found[name].run(server, place / "other").out)["warnings"]
    shutil.rmtree(place / "other")
    (there.out / "notes.md").write_text("of the user")
    if name.startswith("consolidate"):
        return
    assert again(there, server).code == 0
    there.remove()


@pytest.mark.parametrize("name", ["preshard", "consolidate", "consolidate manifest", "reshard"])
def test_another_step_of_one_run(name: str, found: Scenarios, server: Server, place: Path) -> None:
    """It has the same names, shapes and sizes, and other values."""
    scenario = found[name]
    there = Place(scenario, place)
    for file, data in scenario.old.items():
        if data is not None:
            (there.out / file).parent.mkdir(parents=True, exist_ok=True)
            (there.out / file).write_bytes(data)
    answer = again(there, server)
    assert answer.code == 2
    assert "exists, and is not what this command writes\n" in answer.err
    # The tensors of the two checkpoints in folders are alike.
    assert ("scheduler.pt: other content\n" if name == "reshard" else "other bytes at ") in answer.err
    assert "--overwrite" in answer.err
    there.remove()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("preshard", ("--dtype", "bf16"), 'dtype: "keep" there, "bf16" here'),
        ("preshard", ("--world-size", "4"), 'mesh: "dp_shard=5" there, "dp_shard=4" here'),
        ("preshard", ("--digest", "none"), 'digest: "crc32" there, "none" here'),
        ("preshard", ("--sha256",), "shardkit.json: other content\n"),
        ("consolidate", ("--manifest",), "shardkit.json: missing\n"),
        ("consolidate", ("--dtype", "bf16"), "model-00001-of-00006.safetensors: missing\n"),
        ("consolidate manifest", ("--sha256",), "shardkit.json: other content\n"),
        ("reshard", ("--optimizer-dtype", "bf16"), 'optimizer_dtype: "keep" there, "bf16" here'),
    ],
)
def test_other_options(
    name: str, options: tuple[str, ...], said: str, found: Scenarios, server: Server, place: Path
) -> None:
    there = made(found[name], server, place)
    answer = again(there, server, *options)
    assert answer.code == 2, answer.err
    assert said in answer.err
    there.remove()


@pytest.mark.parametrize("name", ["preshard", "consolidate manifest", "reshard"])
def test_one_byte_of_the_output(name: str, found: Scenarios, server: Server, place: Path) -> None:
    there = made(found[name], server, place)
    for file in sorted(file for file in there.out.rglob("*") if file.is_file()):
        data = file.read_bytes()
        if not data:
            continue
        times = file.stat()
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        answer = again(there, server)
        assert answer.code == 2, (file, answer)
        file.write_bytes(data)
    assert again(there, server).code == 0
    there.remove()


@pytest.mark.parametrize("name", ["preshard", "consolidate", "reshard"])
def test_killed_between_the_rename_and_the_removal(
    name: str, found: Scenarios, server: Server, place: Path
) -> None:
    scenario = found[name]
    ended = 0
    for before_end in range(0, 8):
        there = Place(scenario, place)
        killed = scenario.run(server, there.out, fault={"at": scenario.num_calls - before_end, "do": "kill"})
        assert killed.code == -9
        if there.out.exists():
            ended += bool(there.staging())
            answer = again_from(there, server)
            assert answer.code == 0, answer.err
            assert json.loads(answer.out)["was_there"] is True
    assert ended > 1
    there.remove()


@pytest.mark.parametrize("of", ["command", "part", "gc"])
@pytest.mark.parametrize("removed", [0, 1, 2, 3])
def test_killed_there_with_factors(
    removed: int, of: str, found: Scenarios, server: Server, place: Path
) -> None:
    """With the plan or without it, down to an empty directory."""
    scenario = found["preshard factors"]
    there = Place(scenario, place)
    # The last three files are those of owner, plan and commit.
    of_last = ("unlink", removed - 2) if removed < 3 else ("rmdir", 0)
    fault = {"at": scenario.calls.count(of_last[0]) + of_last[1], "of": [of_last[0]], "do": "kill"}
    assert scenario.run(server, there.out, fault=fault).code == -9
    (left,) = there.staging()
    assert len(list(left.iterdir())) == 3 - removed
    if of == "gc":
        assert server(["gc", str(there.out), "--json"]).code == 0
        assert there.staging() == []
    if of == "part":
        good(server.together([part(scenario, there.out, "2/3")]))
        assert there.staging() == []
    assert again_from(there, server).code == 0
    there.remove()


def test_factors_of_other_weights(found: Scenarios, server: Server, place: Path) -> None:
    """Names, shapes and sizes are the same; what is stored as it was comes first where it differs."""
    scenario = found["preshard factors"]
    there = Place(scenario, place)
    assert scenario.run(server, there.out).code == 0
    made = content(there.out)
    for change, said in (
        ({"crc32": 1}, "its factors were computed of other values"),
        ({"crc32": None}, "no record says what its factors were computed of"),
    ):
        record = json.loads(made["shardkit.json"] or b"")
        path = max(record["osft"]["modules"])
        record["osft"]["modules"][path] |= change
        (there.out / "shardkit.json").write_bytes(manifest.sign(record))
        answer = again(there, server)
        assert answer.code == 2
        assert said in answer.err
        restore(there.out, made)
    data = made["__0_0.distcp"] or b""
    (there.out / "__0_0.distcp").write_bytes(data[:3000] + bytes([data[3000] ^ 1]) + data[3001:])
    assert again(there, server).code == 2
    restore(there.out, scenario.old)
    assert again(there, server).code == 2
    shutil.rmtree(there.out)
    assert scenario.run(server, there.out, extra=["--digest", "none"]).code == 0
    answer = again(there, server, "--digest", "none")
    assert answer.code == 2
    assert "exists, and nothing proves that it is what this command writes\n" in answer.err
    assert "no record says what its factors were computed of" in answer.err
    assert "replace it with --overwrite" in answer.err
    answer = again(there, server, "--digest", "none", "--dtype", "bf16")
    assert "exists, and is not what this command writes\n" in answer.err
    there.remove()


def again_from(place: Place, server: Server) -> Answer:
    """Run once more, after which nothing lies beside the output."""
    before = content(place.out)
    answer = place.scenario.run(server, place.out)
    assert content(place.out) == before == place.scenario.expected
    assert place.staging() == []
    return answer


def test_what_comes_after_is_done_all_the_same(found: Scenarios, server: Server, place: Path) -> None:
    there = Place(found["consolidate"], place)
    page = place / "record.json"
    scenario = replace(there.scenario, args=(*there.scenario.args, "--manifest-file", str(page)))
    assert scenario.run(server, there.out).code == 0
    written = page.read_bytes()
    assert scenario.run(server, there.out).code == 0
    page.unlink()
    assert scenario.run(server, there.out).code == 0
    assert page.read_bytes() == written
    page.write_text("of the user")
    answer = scenario.run(server, there.out)
    assert answer.code == 2
    assert page.read_text() == "of the user"
    there.remove()


@pytest.mark.parametrize("by", ["part", "commit"])
def test_killed_before_what_comes_after(by: str, found: Scenarios, server: Server, place: Path) -> None:
    """The last part does it when it is run again, and so does `commit`."""
    there = Place(found["consolidate"], place / "w")
    page = place / "record.json"
    more = ("--manifest-file", str(page))

    def first() -> None:
        there.remove()
        there.out.parent.mkdir()
        page.unlink(missing_ok=True)
        good(server.together([part(there.scenario, there.out, "1/2", *more)]))

    last, killed = part(there.scenario, there.out, "2/2", *more), 0
    first()
    (whole,) = server.together([last])
    written = page.read_bytes()
    for before_end in range(1, 40, 6):
        first()
        fault = {"at": len(whole.calls) - before_end, "do": "kill"}
        assert server.together([{**last, "fault": fault}])[0].code == -9
        if not there.out.exists():
            break
        killed += not page.exists()
        (said,) = good(server.together([last if by == "part" else committing(there.scenario, there.out)]))
        assert said["was_there" if by == "part" else "by_another"] is True
        there.check_is(there.scenario.expected)
        assert page.read_bytes() == written
        assert [path.suffix for path in there.staging()] == ([".done"] if by == "part" else [])
    assert killed
    shutil.rmtree(place)


@pytest.mark.parametrize(
    ("osft", "digest"),
    [
        (None, "crc32"),
        *((shardkit.OsftPlan(ratio=0.3, targets=["layers.*"]), each) for each in ("crc32", "none")),
    ],
)
def test_a_record_of_the_run_spares_the_reading(
    osft: shardkit.OsftPlan | None,
    digest: str,
    found: Scenarios,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    fast_factors: object,
) -> None:
    monkeypatch.setenv("SHARDKIT_CACHE", str(place / "cache"))
    source, out = place / "source", place / "out"
    shutil.copytree(found["preshard"].source, source)

    def run(**more: Any) -> shardkit.PreshardResult:
        more = {"world_size": 2, "wrap": "none", "layout": "declared", "osft": osft, "digest": digest, **more}
        return shardkit.preshard(source, out, **more)

    assert run().was_there is False
    before = stamps(out)
    with monkeypatch.context() as patch:
        patch.setattr(ComparingExecution, "run", None)
        assert run().was_there is True
    with pytest.raises(UsageError, match=r"is not what this command writes|nothing proves"):
        run(sha256=True)
    assert stamps(out) == before
    # Another state of a source is no proof, and neither is one of the output.
    os.utime(source / "model.safetensors")
    if osft is not None and digest == "none":
        with pytest.raises(UsageError, match="nothing proves that it is what this command writes"):
            run()
    else:
        assert run().was_there is True
    run(overwrite=True)
    os.utime(out / "__0_0.distcp")
    (out / "__0_0.distcp").write_bytes(bytes((out / "__0_0.distcp").stat().st_size))
    with pytest.raises(UsageError, match=r"is not what this command writes|nothing proves"):
        run()
    assert run(overwrite=True).was_there is False
    assert run().was_there is True
    assert shardkit_cache_entries(place) == 1
    shutil.rmtree(place)


def shardkit_cache_entries(place: Path) -> int:
    return len(list((place / "cache" / "outputs").iterdir()))


def test_overwrite_writes_anew(found: Scenarios, server: Server, place: Path) -> None:
    there = made(found["preshard"], server, place)
    before = stamps(there.out)
    answer = there.scenario.run(server, there.out, overwrite=True)
    assert answer.code == 0
    assert json.loads(answer.out)["was_there"] is False
    assert stamps(there.out) != before
    there.remove()


PARTS = ("preshard columns cast", "preshard factors", "consolidate manifest", "consolidate", "reshard")


@pytest.mark.parametrize("by", ["parts", "one process"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_what_is_there(name: str, by: str, found: Scenarios, server: Server, place: Path) -> None:
    """After `commit` has removed their marks, or where one process was faster."""
    scenario = found[name]
    there = Place(scenario, place)
    if by == "parts":
        good(server.together(parts(scenario, there.out, 2)))
        good(server.together([committing(scenario, there.out)]))
    else:
        good(server.together(parts(scenario, there.out, 2)[:1]))  # a part of it was begun
        assert scenario.run(server, there.out).code == 0
    for request in parts(scenario, there.out, 3):
        before = stamps(there.out)
        (said,) = good(server.together([request]))
        assert said["was_there"] is True
        assert said["part"]["is_committed"] is True
        assert stamps(there.out) == before
        assert there.staging() == []
    assert good(server.together([committing(scenario, there.out)]))[0]["by_another"]
    other = ("--dtype", "fp16") if name.startswith("preshard") else ("--dtype", "bf16")
    (answer,) = server.together([part(scenario, there.out, "1/2", *other)])
    assert answer.code == 2
    assert "exists, and is not what this command writes\n" in answer.err
    restore(there.out, scenario.old)
    (answer,) = server.together([part(scenario, there.out, "2/2")])
    assert answer.code == 2
    assert "exists, and is not what this command writes\n" in answer.err
    assert content(there.out) == scenario.old
    assert there.staging() == []
    there.remove()


@pytest.mark.parametrize("name", ["preshard", "consolidate manifest", "reshard"])
def test_a_commit_is_recorded(
    name: str, found: Scenarios, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDKIT_CACHE", str(place / "cache"))
    place.mkdir()
    args = found[name].command(place / "out")
    with Server() as server:
        for number in ("1/2", "2/2"):
            assert server([*args, "--part", number]).code == 0
        good([server(["commit", str(place / "out"), "--json"])])
        for more in ([], ["--part", "2/2"]):
            made = json.loads(server([*args, *more]).out)
            assert (made["was_there"], made["checked_bytes"]) == (True, 0)
    shutil.rmtree(place)


def test_a_dry_run_draws_no_page_of_what_is_there(found: Scenarios, server: Server, place: Path) -> None:
    there, page = made(found["preshard"], server, place / "w"), place / "page.html"
    answer = again(there, server, "--dry-run", "--html", str(page))
    assert answer.code == 2
    assert "exists" in answer.err
    assert not page.exists()
    shutil.rmtree(place)


@pytest.mark.parametrize("name", ["consolidate", "reshard two jobs"])
def test_a_comparison_that_is_killed_leaves_nothing(
    name: str, found: Scenarios, server: Server, place: Path
) -> None:
    """It writes what describes the files beside the output once more: what lies there then is nobody's."""
    scenario, there = found[name], Place(found[name], place)
    restore(there.out, scenario.expected)
    num_calls = len(again(there, server).calls)
    restore(there.out, scenario.expected)
    num_left = 0
    for back in range(1, 40, 5):
        killed = scenario.run(server, there.out, fault={"at": num_calls - back, "do": "kill"})
        assert killed.code == -9
        num_left += len(there.staging())
        assert again(there, server).code == 0
        restore(there.out, scenario.expected)
    assert num_left
    there.remove()
