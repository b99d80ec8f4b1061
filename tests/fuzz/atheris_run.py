"""Run a fuzz target guided by coverage: `python -m tests.fuzz.atheris_run TARGET -- -runs=1000000 -seed=1`.

What follows `--` goes to libFuzzer. Needs `pip install --group fuzz`. Inputs that break a promise are kept
under `tests/fuzz/found/`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["shardkit"]):
    from tests.fuzz.run import FOUND
    from tests.fuzz.target import Target
    from tests.fuzz.targets import TARGETS, load

_MEMORY_MIB, _TIMEOUT_S = 2048, 10


def mutator(target: Target) -> object:
    """Return a mutator for libFuzzer: half its own edits, half the target's."""
    seeds = list(target.seeds())

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        try:
            return target.mutate(rng, [bytes(data)])[:max_size]
        except Exception:  # too broken to be taken apart: begin anew
            return target.mutate(rng, seeds)[:max_size]

    return mutate


def main() -> None:
    """Parse the command line and hand over to libFuzzer, which ends the process."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"{__doc__}\nTARGET is one of {', '.join(TARGETS)}")
    name, options = sys.argv[1], [option for option in sys.argv[2:] if option != "--"]
    with atheris.instrument_imports(include=["shardkit"]):
        target = load(name)
    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds()):
            Path(corpus, str(number)).write_bytes(seed)
        limits = [
            f"-timeout={_TIMEOUT_S}",
            f"-rss_limit_mb={_MEMORY_MIB}",
            f"-artifact_prefix={FOUND}/{name}-",
        ]
        atheris.Setup([sys.argv[0], *limits, *options, corpus], target.check, custom_mutator=mutator(target))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
