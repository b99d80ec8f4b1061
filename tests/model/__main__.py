"""All of it: `python -m tests.model [--only NAME] [--seconds N]`; prints what was looked at, exits with 1 after a violation."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace

from tests.model.processes import standing_in
from tests.model.scenarios import plans
from tests.model.search import Search, story

_SHOWN_CALLS = 40


def main() -> int:
    """Search, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.model")
    parser.add_argument("--only", default="", help="scenarios whose names contain this")
    parser.add_argument(
        "--seconds", type=float, default=60, help="of the processor, for each search at most; 60 by default"
    )
    parser.add_argument(
        "--traces", type=int, default=2, help="violations of a search that are shown; 2 by default"
    )
    options = parser.parse_args()
    gc.disable()  # the states of a search stay, and are many
    print("| scenario | search | states | runs | losses (reruns) | seen | seconds | allowed | violations |")
    print("|---|---|---|---|---|---|---|---|---|")
    totals = [0, 0, 0, 0]
    with standing_in():
        for plan in plans():
            if options.only not in plan.scenario.name:
                continue
            for bounds in plan.searches:
                began = time.process_time()
                result = Search(plan.scenario, replace(bounds, max_seconds=options.seconds)).run()
                seen = "at random" if bounds.is_random else "all" if result.is_complete else "cut"
                losses = (
                    f"{result.num_power_failures:,} ({result.num_reruns:,})" if bounds.power_failures else ""
                )
                num_violations = result.violations.total()
                print(
                    f"| {plan.scenario.name} | {bounds} | {result.num_states:,} | {result.num_runs:,} | {losses} | {seen} "
                    f"| {time.process_time() - began:.0f} | {result.num_allowed or ''} | {num_violations} |",
                    flush=True,
                )
                for problem, count in result.violations.most_common(options.traces):
                    print(f"    {count} x {problem}")
                    for line in story(plan.scenario, result.traces[problem])[-_SHOWN_CALLS:]:
                        print(f"        {line}")
                numbers = (result.num_states, result.num_runs, result.num_power_failures, num_violations)
                totals = [total + number for total, number in zip(totals, numbers, strict=True)]
            plan.scenario.programs.clear()
    print("\n{:,} states, {:,} schedules to their end, {:,} power failures, {:,} violations".format(*totals))
    return int(totals[-1] > 0)


if __name__ == "__main__":
    sys.exit(main())
