"""A crash tester of others, ckpt-chaos, over the commands and `save`: `pip install ckpt-chaos`, `python -m tests.torture.crash_tester`.

It kills a copy of each command at each of its file events (before the event, with the file cut in half, by SIGTERM, and
with everything lost that no fsync covers), runs the same command again, and compares the result with that of a run that
nobody disturbed. It is no dependency: nothing else imports this module.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

MODES = "before,torn,term,unsynced"
_THIS = (sys.executable, "-m", "tests.torture.crash_tester")
_REPOSITORY = Path(__file__).resolve().parents[2]
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Tested:
    """One command, as the crash tester runs it."""

    name: str
    command: tuple[str, ...]
    """With `{out}` for the directory that is watched."""
    options: tuple[str, ...] = ()
    """Of the crash tester."""


def tested(home: Path) -> list[Tested]:
    """Return what is tested, of sources that `make_sources` put below `home`."""
    hub, trained, base = (str(home / name) for name in ("hub", "trained", "base"))
    commands = [
        ("preshard", hub, "{out}/model", "--world-size", "4", "--layout", "declared"),
        ("consolidate", trained, "{out}/model", "--base", base, "--max-shard-size", "1MB", "--manifest"),
        ("reshard", trained, "{out}/model", "--world-size", "3"),
    ]
    contract = (
        "--ranks",
        "2",
        "--checkpoint-glob",
        "{out}/step-*",
        "--step-regex",
        r"goes on from step (\d+)",
    )
    return [
        *(Tested(command[0], (*_THIS, "write", *command)) for command in commands),
        *(
            Tested(f"{command[0]} --overwrite", (*_THIS, "replace", str(home), *command))
            for command in commands
        ),
        *(
            Tested(
                f"save, rank {rank} of 2 dies", (*_THIS, "train", "{out}"), (*contract, "--crash-rank", rank)
            )
            for rank in "01"
        ),
    ]


def write(command: Sequence[str]) -> None:
    """Run a command whose third word is its output, and end as it does."""
    from shardkit.cli import main as shardkit

    os.makedirs(os.path.dirname(command[2]), exist_ok=True)
    shardkit(list(command))


def replace(home: str, command: Sequence[str]) -> None:
    """Do so with --overwrite, over what the command makes of the sources with other values."""
    if not os.path.exists(command[2]):
        other = [argument.replace(home, f"{home}/other") for argument in command]
        subprocess.run([*_THIS, "write", *other], check=True)  # the tester leaves children alone
    write([*command, "--overwrite"])


def train(out: str) -> None:
    """Take a few steps on each rank, and save each. Go on from the newest checkpoint below `out`."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    import shardkit
    from tests.worlds.processes import end_world

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = shardkit.wrap(layers, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), policy="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    with contextlib.suppress(shardkit.ShardkitError):  # nothing was saved yet
        newest = shardkit.resolve_checkpoint(out).path
        first = int(newest.rpartition("-")[2])
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    print(f"goes on from step {first}", flush=True)
    for step in range(first + 1, _STEPS + 1):
        torch.manual_seed(step)
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shardkit.save(model, f"{out}/step-{step}", optimizer=optimizer)
        if dist.get_rank() == 0:
            assert not shardkit.verify(f"{out}/step-{step}", full=True).problems
    end_world()
    sys.stdout.flush()
    os._exit(0)  # torch was seen to abort ("terminate called") while an interpreter of a rank ended


def digest(out: Path) -> str:
    """Return what the tester compares: names and digests of all files below `out`, also of hidden ones.

    torch gives the `.metadata` of each save an id of its own, which the manifest's digest of that file covers: of a
    save's two files the names count, and that `verify` found them right.
    """
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return json.dumps({str(path.relative_to(out)): _sha256(path) for path in files})


def _sha256(path: Path) -> str:
    is_named_alone = path.parent.name.startswith("step-") and path.suffix != ".distcp"
    return "" if is_named_alone else hashlib.sha256(path.read_bytes()).hexdigest()


def run(case: Tested, work: Path, modes: str, most: int) -> Counter[str]:
    """Let the tester kill `case` at each of its events; return how often there was which verdict."""
    options = ("--modes", modes, "--max-points", str(most), "--work", str(work), *case.options)
    judge = ("--result-cmd", " ".join((*_THIS, "digest", "{out}")))
    command = (sys.executable, "-m", "ckpt_chaos", "run", *options, *judge, "--", *case.command)
    # The tester starts its own commands with a path of its own: this repository has to be on it.
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "SHARDKIT_CACHE": str(work.parent / "cache")}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    (work.parent / f"{work.name}.log").write_text(done.stdout)
    results = [json.loads(path.read_text()) for path in work.glob("pt_*/result.json")]
    if not results:
        raise SystemExit(done.stdout[-2000:])
    return Counter(_verdict(result) for result in results)


def _verdict(result: dict[str, object]) -> str:
    from ckpt_chaos.runner import _judge

    return str(_judge(result).verdict)


def main() -> int:
    """Test all, or what is named; print a table. Return 1 where a verdict is not PASS."""
    from tests.torture.sources import make_sources

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="what begins with one of these")
    parser.add_argument("--modes", default=MODES)
    parser.add_argument(
        "--max-points", type=int, default=10_000, help="kills of each command, over all modes"
    )
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="shardkit-crash-tester-"))
    make_sources(home / "sources")
    bad = 0
    print(f"ckpt-chaos {version('ckpt-chaos')}")
    for number, case in enumerate(tested(home / "sources")):
        if options.names and not case.name.startswith(tuple(options.names)):
            continue
        verdicts = run(case, home / f"run-{number}", options.modes, options.max_points)
        bad += verdicts.total() - verdicts["PASS"]
        print(
            f"{case.name}: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
        )
    if bad:
        print(f"see {home}", file=sys.stderr)
    else:
        shutil.rmtree(home)
    return int(bool(bad))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", *command]:
            write(command)
        case ["replace", home, *command]:
            replace(home, command)
        case ["train", out]:
            train(out)
        case ["digest", out]:
            print(digest(Path(out)))
        case _:
            sys.exit(main())
