"""The whole zoo: `make zoo`, or `python -m tests.models [NAME...]`; `--docs` writes docs/models.md instead."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.models.outcomes import expected, named
from tests.models.zoo import ZOO
from tests.worlds.processes import ROOT, run_script

_TIMEOUT_S = 3600.0


def run(names: list[str], out: Path, *, timeout_s: float = _TIMEOUT_S) -> dict[str, dict[str, str]]:
    """Take models through everything, and return what each step of each said."""
    request = {"out": str(out), "names": names}
    run_script("models/zoo_world.py", json.dumps(request), timeout_s=timeout_s)
    found: dict[str, dict[str, str]] = json.loads((out / "results.json").read_text())
    return found


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--docs"]:
        from tests.models.test_zoo import document

        (ROOT / "docs/models.md").write_text(document())
        return
    names = arguments or list(ZOO)
    with tempfile.TemporaryDirectory() as out:
        results = run(names, Path(out))
    wrong = 0
    for name, said in results.items():
        found, known = named(said, name), expected(name)
        for step in {**known, **found}:
            if found.get(step) != known.get(step):
                wrong += 1
                print(f"{name}, {step}: expected {known.get(step)!r}, found {found.get(step)!r}")
    passed = sum(not any(known.values()) for known in map(expected, names))
    print(
        f"{len(names)} models: {passed} pass everything, {len(names) - passed} as the table says; {wrong} surprises"
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
