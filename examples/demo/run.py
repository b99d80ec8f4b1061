"""The demo: a real trained model, pre-sharded for 4 ranks, loaded by stock torch, compared bit for bit.

    make demo        (examples/demo/run.py --model DIRECTORY --output DIRECTORY)

What is run is what a user would type: the command `shardkit preshard`, then torchrun with a script
(load.py) that wraps the model with FSDP2 and calls `torch.distributed.checkpoint.load`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

HERE = Path(__file__).parent
NUM_RANKS = 4
# Today's BertModel computes this buffer; the file still holds it.
OMITTED = ["embeddings.position_ids"]
# No network; quiet; and every process adds up in the same order (one thread each).
ENVIRONMENT = os.environ | {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command that has run."""

    stdout: str
    elapsed_s: float
    peak_bytes: int
    """Of its largest process."""


def main() -> int:
    """Run the steps, print the tables, and return 0 if every bit is equal."""
    parser = argparse.ArgumentParser(description="pre-shard a real model, load it with 4 processes, compare")
    parser.add_argument("--model", required=True, help="directory of the model: config, tokenizer, weights")
    parser.add_argument("--output", required=True, type=Path, help="directory for all output; removed first")
    options = parser.parse_args()
    output: Path = options.output
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    checkpoint = output / f"minilm-{NUM_RANKS}-ranks"

    say(f"A real sentence model, for {NUM_RANKS} ranks. Everything is written to {output}/", "")
    say(
        "1. One command makes one file for each rank:",
        f"   shardkit preshard MODEL {checkpoint} --world-size 4",
    )
    preshard = run_preshard(options.model, checkpoint)
    result = json.loads(preshard.stdout)
    for name, reason in result["omitted"]:
        say(f"   left out: {name}: {reason}")

    say("2. The whole model in one process, for comparison: AutoModel.from_pretrained")
    reference = run_python("reference.py", options.model, output / "reference.embedding")

    say(
        f"3. {NUM_RANKS} processes: meta device, fully_shard, and the stock torch.distributed.checkpoint.load",
        "",
    )
    ranks = run_torchrun("load.py", options.model, checkpoint, output)
    reports = [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]

    print_steps(result, preshard, reference, ranks)
    print_ranks(reports, checkpoint)
    problems = find_problems(output, result, reports)
    say(*(f"wrong: {problem}" for problem in problems))
    say("bit-equal: no" if problems else "bit-equal: yes")
    return 1 if problems else 0


def say(*lines: str) -> None:
    """Print lines at once, so that a reader sees what is being waited for."""
    for line in lines:
        print(line, flush=True)


def run_preshard(model: str, checkpoint: Path) -> Step:
    """Call the command as a user would, except that the result comes as JSON."""
    command = [str(Path(sys.executable).with_name("shardkit")), "preshard", model, str(checkpoint)]
    return run([*command, "--world-size", str(NUM_RANKS), "--json", "--no-progress"])


def run_python(script: str, *arguments: str | Path) -> Step:
    """Run one of the scripts beside this one."""
    return run([sys.executable, str(HERE / script), *map(str, arguments)])


def run_torchrun(script: str, *arguments: str | Path) -> Step:
    """Run one of the scripts beside this one in every rank."""
    # --standalone takes a free port; the address spares machines whose own name does not resolve.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    command = [sys.executable, *torchrun, "--nproc-per-node", str(NUM_RANKS), str(HERE / script)]
    return run([*command, *map(str, arguments)])


def run(command: Sequence[str]) -> Step:
    """Run a command to its end; where it fails, show what it said and leave."""
    begun = time.monotonic()
    with TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=stdout, stderr=stderr)
        # wait4 tells the peak of this command and of what it started, not of everything so far.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if process.returncode != 0:
            print(stdout.read(), stderr.read(), file=sys.stderr)
            sys.exit(f"failed with exit code {process.returncode}: {' '.join(command)}")
        step = Step(
            stdout=stdout.read(), elapsed_s=time.monotonic() - begun, peak_bytes=usage.ru_maxrss * 1024
        )
    return step


def print_steps(result: dict[str, Any], preshard: Step, reference: Step, ranks: Step) -> None:
    """One row for each step."""
    sizes = {"read": result["read_bytes"], "written": result["written_bytes"]}
    rows = [["step", "read", "written", "seconds", "peak memory"]]
    rows += [
        ["preshard", *map(megabytes, sizes.values()), *cost(preshard)],
        ["whole model", megabytes(sizes["read"]), "", *cost(reference)],
        [f"{NUM_RANKS} ranks", "see below", "", *cost(ranks)],
    ]
    print_table(rows, num_left=1)


def print_ranks(reports: list[dict[str, Any]], checkpoint: Path) -> None:
    """One row for each rank."""
    rows = [["rank", "shard files opened", "size", "read in all", "dcp.load s", "peak memory"]]
    for rank, report in enumerate(reports):
        size = sum((checkpoint / name).stat().st_size for name in report["opened"])
        rows.append(
            [
                str(rank),
                ", ".join(report["opened"]),
                megabytes(size),
                megabytes(report["read_bytes"]),
                f"{report['load_s']:.2f}",
                megabytes(report["peak_bytes"]),
            ]
        )
    print_table(rows, num_left=2)
    imported = max(report["imported_bytes"] for report in reports)
    say(
        "Seconds include starting Python and importing torch and transformers, and so does the memory:",
        f"{megabytes(imported)} of each rank's peak. Read in all: everything that dcp.load read, .metadata too.",
        "",
    )


def cost(step: Step) -> list[str]:
    """Return seconds and peak memory as cells."""
    return [f"{step.elapsed_s:.1f}", megabytes(step.peak_bytes)]


def megabytes(num_bytes: int) -> str:
    """Return bytes in decimal megabytes."""
    return f"{num_bytes / 1e6:.1f} MB"


def print_table(rows: list[list[str]], *, num_left: int) -> None:
    """Print rows under each other, then an empty line; the first columns are text, the others numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        say("   ".join(cells).rstrip())
    say("")


def find_problems(output: Path, result: dict[str, Any], reports: list[dict[str, Any]]) -> list[str]:
    """Return what is not as it has to be: an embedding, a file opened, a tensor left out."""
    problems = []
    expected = (output / "reference.embedding").read_bytes()
    for rank, report in enumerate(reports):
        if (output / f"rank{rank}.embedding").read_bytes() != expected:
            problems.append(f"the embedding of rank {rank} differs from the whole model's")
        if report["opened"] != [f"__{rank}_0.distcp"]:
            problems.append(f"rank {rank} opened {report['opened']}, not its own file")
    omitted = [name for name, _ in result["omitted"]]
    if omitted != OMITTED:
        problems.append(f"preshard left out {omitted}, not {OMITTED}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
