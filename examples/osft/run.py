"""What full fine-tuning forgets, and what OSFT keeps: a small real model learns two tasks, one after the other.

    make osft        (examples/osft/run.py --model DIRECTORY --corpus DIRECTORY --output DIRECTORY)

For each learning rate, the model that has learned the first task learns the second, with its weights free and with
their factors; then it is asked for the first again, by the head that it had. All it uses of shardkit is public:
prepare, finalize, osft_optimizer, save, consolidate. Writes results.json and forgetting.svg; minutes for a seed on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from learn import embed, judge, train
from plot import Panel, draw
from tasks import FIRST, SECOND, Examples, Task, read_tasks
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import shardkit

FULL, OSFT = "full fine-tuning", "OSFT"
TARGETS = "encoder.*.query,encoder.*.key,encoder.*.value,encoder.*.dense"
FIRST_RATE = 5e-5
"""Learning rate of the first task, on which all weights are trained."""
MAX_DIFFERENCE = 1e-4
"""Between what the trained model computes and what its folded weights do, of values near 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line."""

    model: str
    corpus: Path
    output: Path
    kind: str
    ratio: float
    rates: tuple[float, ...]
    num_steps: int
    sizes: dict[str, int]
    """Examples of a task, by the names of `tasks.SHARES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What learning the first task has left."""

    seed: int
    dense: str
    """Directory of the model, in the Hub's form."""
    factors: str
    """Save of the same, as factors."""
    head: nn.Linear
    tasks: tuple[Task, Task]
    before: float
    """Accuracy on the first task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A row of results.json: the second task was learned."""

    seed: int
    method: str
    rate: float
    before: float
    """Accuracy on the first task before it; like the others on articles that nothing was chosen by."""
    first: float
    """Accuracy on the first task after it."""
    second: float
    """Accuracy on the second task."""
    search_loss: float
    """On the second task, of articles kept for choosing the rate."""
    leak: float
    """Of `shardkit.osft_leak`; 0 without factors."""
    train_s: float
    """Seconds of training."""


def load(directory: str, source: str, plan: shardkit.OsftPlan | None = None) -> nn.Module:
    """Return the model of a directory with the weights, or the factors, of a source; with a plan, as factors."""
    context = shardkit.prepare(directory, source, dtype="fp32", osft=plan)
    # A job of several ranks wraps it here: model = shardkit.wrap(context.model, mesh)
    model = shardkit.finalize(context.model, context).eval()
    has_factors = any(".osft_params." in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        # Only targets are guarded by OSFT; biases and norms would forget as ever, so they stay as they are.
        parameter.requires_grad_(".osft_params." in name if has_factors else name.startswith("encoder."))
    return model


def store(model: nn.Module, directory: Path, base: str) -> str:
    """Save as a job does, and bring it back to the Hub's form, where factors are folded; return the directory."""
    checkpoint = directory.with_name(f"{directory.name}-checkpoint")
    shardkit.save(model, checkpoint, overwrite=True)
    # On the command line: shardkit consolidate CHECKPOINT DIRECTORY --base BASE
    shardkit.consolidate(checkpoint, directory, base=base, overwrite=True)
    return str(directory)


def learn_first(options: Options, seed: int) -> Start:
    """Train all weights on the first task, and compute the factors of what came out."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks = read_tasks(options.corpus, tokenizer, options.kind, seed, options.sizes)
    model = load(options.model, options.model)
    head = nn.Linear(model.config.hidden_size, len(FIRST[options.kind]))
    learned = tasks[0]["train"]
    train(model, head, learned, rate=FIRST_RATE, num_steps=options.num_steps, seed=seed)
    dense = store(model, options.output / "first", options.model)
    plan = shardkit.OsftPlan(ratio=options.ratio, targets=TARGETS)
    factors = str(options.output / "first-factors")
    shardkit.save(load(dense, dense, plan), factors, overwrite=True)
    before, _ = judge(model, head, tasks[0]["test"])
    return Start(seed=seed, dense=dense, factors=factors, head=head, tasks=tasks, before=before)


def learn_second(options: Options, start: Start, method: str, rate: float) -> Run:
    """Train on the second task; judge on both what transformers loads of the result."""
    torch.manual_seed(start.seed)
    model = load(start.dense, start.factors if method == OSFT else start.dense)
    head = nn.Linear(model.config.hidden_size, max(2, len(SECOND[options.kind])))
    first, second = start.tasks
    begun = time.monotonic()
    train(
        model,
        head,
        second["train"],
        rate=rate,
        num_steps=options.num_steps,
        seed=start.seed,
        hook=shardkit.osft_optimizer if method == OSFT else None,
    )
    train_s = time.monotonic() - begun
    stored = AutoModel.from_pretrained(store(model, options.output / "second", start.dense)).eval()
    check(model, stored, second["test"])
    return Run(
        seed=start.seed,
        method=method,
        rate=rate,
        before=start.before,
        first=judge(stored, start.head, first["test"])[0],
        second=judge(stored, head, second["test"])[0],
        search_loss=judge(stored, head, second["search"])[1],
        leak=shardkit.osft_leak(model) if method == OSFT else 0.0,
        train_s=train_s,
    )


@torch.no_grad()
def check(model: nn.Module, stored: nn.Module, examples: Examples) -> None:
    """Refuse stored weights that are not what was trained, or that lack what was frozen."""
    batch = examples.tokens[:8], examples.mask[:8]
    differences = {"embeddings": largest(embed(model, *batch) - embed(stored, *batch))}
    factors = dict(model.named_parameters())
    for name in factors:
        path, found, _ = name.partition(".osft_U_high")
        if found:
            u, s, v = (factors[f"{path}.osft_{each}_high"] for each in "USV")
            weight = stored.get_parameter(f"{path}.weight")
            # What the frozen directions make of an input is in the folded weight unchanged.
            differences[path] = largest(u.T @ weight - s[:, None] * v) / largest(weight)
    wrong = {name: value for name, value in differences.items() if not value <= MAX_DIFFERENCE}
    if wrong:
        raise SystemExit(f"the folded weights are not what was trained: {wrong}")


def largest(values: Tensor) -> float:
    """Return the largest absolute value."""
    return float(values.abs().max())


def choose(runs: list[Run], method: str) -> float:
    """Return the rate with the least loss on the second task, over all seeds: the first task has no say."""
    losses: dict[float, float] = {}
    for run in runs:
        if run.method == method:
            losses[run.rate] = losses.get(run.rate, 0.0) + run.search_loss
    return min(losses, key=losses.__getitem__)


def report(runs: list[Run], options: Options) -> None:
    """Write results.json and forgetting.svg, and print a table of means."""
    chosen = {method: choose(runs, method) for method in (FULL, OSFT)}
    before = sum(run.before for run in runs) / len(runs)
    table: dict[str, dict[str, list[list[float]]]] = {"first": {}, "second": {}}
    print(f"\n{'method':18}{'rate':>8}   first task  second task   (first before: {before:.1%})")
    for method in chosen:
        for rate in options.rates:
            mine = [run for run in runs if (run.method, run.rate) == (method, rate)]
            values = {"first": [run.first for run in mine], "second": [run.second for run in mine]}
            for name, each in values.items():
                table[name].setdefault(method, []).append(each)
            means = [sum(each) / len(each) for each in values.values()]
            mark = "   chosen by the second task" if chosen[method] == rate else ""
            print(f"{method:18}{rate:8.0e}   {means[0]:10.1%}  {means[1]:11.1%}{mark}")
    marked = {method: options.rates.index(rate) for method, rate in chosen.items()}
    panels = (
        Panel(title="First task, after the second", lines=table["first"], level=before, marked=marked),
        Panel(title="Second task", lines=table["second"], marked=marked),
    )
    lowest = min(
        value for lines in table.values() for each in lines.values() for one in each for value in one
    )
    low = min(0.8, int(lowest * 5) / 5)
    picture = draw(panels, [f"{rate:.0e}" for rate in options.rates], "learning rate", low)
    (options.output / "forgetting.svg").write_text(picture)
    (options.output / "results.json").write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


def main() -> None:
    """Run every method at every learning rate for every seed."""
    parser = argparse.ArgumentParser(description="what full fine-tuning forgets, and OSFT keeps")
    parser.add_argument("--model", required=True, help="directory of the model: config, tokenizer, weights")
    parser.add_argument("--corpus", required=True, type=Path, help="a directory of articles for each topic")
    parser.add_argument("--output", required=True, type=Path, help="directory for all output; removed first")
    parser.add_argument("--tasks", choices=sorted(FIRST), default="topics", help="see tasks.py")
    parser.add_argument("--ratio", type=float, default=0.3, help="share of directions that OSFT trains")
    parser.add_argument(
        "--rates", default="3e-5,1e-4,3e-4,1e-3", help="learning rates, the same for both methods"
    )
    parser.add_argument("--seeds", default="0", help="1,2,3 for three runs of everything")
    parser.add_argument("--steps", type=int, default=60, help="of each task")
    parser.add_argument("--tests", type=int, default=300, help="examples by which a task is judged")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    shutil.rmtree(given.output, ignore_errors=True)
    given.output.mkdir(parents=True)
    options = Options(
        model=given.model,
        corpus=given.corpus,
        output=given.output,
        kind=given.tasks,
        ratio=given.ratio,
        rates=tuple(float(rate) for rate in given.rates.split(",")),
        num_steps=given.steps,
        sizes={"train": 1000, "search": given.tests, "test": given.tests},
    )
    runs = []
    for seed in (int(seed) for seed in given.seeds.split(",")):
        start = learn_first(options, seed)
        print(f"seed {seed}: {start.before:.1%} on the first task", flush=True)
        for rate in options.rates:
            for method in (FULL, OSFT):
                run = learn_second(options, start, method, rate)
                runs.append(run)
                print(
                    f"  {method:18}{rate:8.0e}: first {run.first:.1%}, second {run.second:.1%}, {run.train_s:.0f} s",
                    flush=True,
                )
    report(runs, options)


if __name__ == "__main__":
    main()
