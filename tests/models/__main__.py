"""All models: `make models`, or `python -m tests.models [NAME...]`; `--docs` writes docs/models.md instead.

`--results FILE` notes there what each model came to, and skips the models that stand there already: an interrupted run
goes on where it stopped.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.models.outcomes import expected, named
from tests.models.zoo import ZOO
from tests.worlds.processes import ROOT, run_script

_TIMEOUT_S = 3600.0
_BATCH = 16  # models; what an interruption costs


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
    place = None
    if arguments[:1] == ["--results"]:
        place, arguments = Path(arguments[1]), arguments[2:]
    names = arguments or list(ZOO)
    results: dict[str, dict[str, str]] = json.loads(place.read_text()) if place and place.exists() else {}
    left = [name for name in names if name not in results]
    for start in range(0, len(left), _BATCH if place else len(left) or 1):
        batch = left[start : start + _BATCH] if place else left
        with tempfile.TemporaryDirectory() as out:
            results |= run(batch, Path(out))
        if place:
            place.write_text(json.dumps(results, indent=1))
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
    if place and not wrong:
        place.unlink()  # the next run begins anew
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
