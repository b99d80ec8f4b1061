"""docs/models.md, written from the table of outcomes."""

from __future__ import annotations

import json
import textwrap
from collections import Counter, defaultdict
from pathlib import Path

from tests.models.outcomes import REASONS, expected
from tests.models.zoo import IN_MAKE_PROVE, ZOO

COLUMNS = {
    "preshard": ("preshard",),
    "three phases": ("direct", "broadcast", "presharded"),
    "stock `dcp.load`": ("stock",),
    "save, consolidate": ("save", "consolidate", "dcp_save", "dcp_consolidate", "bare"),
    "logits": ("reference", "logits"),
}
"""Column -> the steps that it sums up."""

_HEAD = """\
# Models

{count} tiny models of {types} architectures of transformers {version} go through everything that shardkit does, in bf16.
Their weights are random, and no two tensors are alike. {passed} models [pass everything](#what-passes); the others are
[in a table](#what-does-not-pass) with the reason. Architectures that the installed transformers lacks are left out
(`lara_mini` and `inkling2_loop` came with 5.24), and so is `inkling_mm_model`, which needs scipy (it passed by hand).

- **preshard**: `shardkit preshard` for 4 ranks. The other steps run on 2 ranks.
- **three phases**: `prepare`, `wrap`, `finalize` from the Hub directory (each rank reads; for a third of the models one
  rank reads and sends) and from the pre-sharded one. Every parameter and buffer has the name, dtype and bits of
  `from_pretrained`.
- **stock `dcp.load`**: torch alone loads the pre-sharded directory, with the same bits.
- **save, consolidate**: `shardkit.save`, and stock `dcp.save` of the same model. `shardkit consolidate --base` of both
  gives the original safetensors, each tensor with its name, dtype and bytes; so does consolidate with a `config.json`
  alone.
- **logits**: the wrapped model's logits equal those of `from_pretrained` in one process, bit for bit.

`make models` compares all of this with the table, and `make prove` {tested} of the models. A model that begins to pass
fails the test like one that stops passing.

A suffix distinguishes models of one type. `+fused` and `+live` are stored under the names of the model in memory, as
`save_pretrained(..., save_original_format=False)` writes them. `+repo` have the names, shapes, dtypes and order of a
real repo, often older than today's `save_pretrained`: buffers of masks, heads of another class, old prefixes. Their
weight files come out with the original's bytes; those of three quantised ones become plain, as transformers dequantises
them.

## What passes
"""

THEIRS = Path(__file__).with_name("theirs.json")
_THEIRS = """
## transformers' own FSDP loading

`from_pretrained(distributed_config=DistributedConfig(fsdp_size=2))` of transformers {transformers} with torch {torch}, on
two gloo ranks, each tensor compared with plain `from_pretrained`: of {count} models {right} are right, {wrong} are wrong
without an error, {error} fail. The classes of zaya and youtu+padding change values at each load; falcon_h1's are buffers.
shardkit's three phases are right wherever this page says so. `python -m tests.models.theirs` makes this list, and
`tests/models/theirs.json` names the tensors.
"""


def render(version: str) -> str:
    """Return the text of docs/models.md.

    Args:
        version: of transformers.
    """
    numbers = {reason: at for at, reason in enumerate(REASONS, 1)}
    cells = {name: _cells(name, numbers) for name in ZOO}
    passed = [name for name, found in cells.items() if {*found} == {"yes"}]
    parts = [
        _HEAD.format(
            count=len(ZOO),
            passed=len(passed),
            tested=len(IN_MAKE_PROVE),
            types=len({each.model_type for each in ZOO.values()}),
            version=version,
        )
    ]
    for kind in dict.fromkeys(each.kind for each in ZOO.values()):
        names = [name for name in passed if ZOO[name].kind == kind]
        parts += _wrapped(f"- **{kind[0].upper()}{kind[1:]}**: {', '.join(names)}")
    parts += _theirs()
    parts += ["\n## What does not pass\n", f"| model | class | {' | '.join(COLUMNS)} |"]
    parts.append("|" + "---|" * (2 + len(COLUMNS)))
    for name in (name for name in ZOO if name not in passed):
        parts.append(f"| {name} | {ZOO[name].model_class} | {' | '.join(cells[name])} |")
    parts.append("\nA number is a reason, a dash a step that was not reached:\n")
    for reason, each in REASONS.items():
        parts += _wrapped(f"{numbers[reason]}. {each.text}", "   ")
    return "\n".join(parts) + "\n"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, 118, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _theirs() -> list[str]:
    """Return the lines about transformers' own loading, as `theirs.py` noted it."""
    noted = json.loads(THEIRS.read_text())
    models = {name: noted["models"][name] for name in ZOO if name in noted["models"]}
    said = Counter(answer.partition(":")[0] for answer in models.values())
    text = _THEIRS.format(
        count=len(models), **{key: said[key] for key in ("right", "wrong", "error")}, **noted
    )
    wrong = [f"{name} ({_tensors(answer)})" for name, answer in models.items() if answer.startswith("wrong")]
    errors = defaultdict[str, list[str]](list)
    for name, answer in models.items():
        if answer.startswith("error"):
            errors[answer.removeprefix("error: ")].append(name)
    lines = [line for error, names in errors.items() for line in _wrapped(f"- {', '.join(names)}: {error}")]
    return [text, *_wrapped(f"- Wrong (tensors): {', '.join(wrong)}"), *lines]


def _tensors(answer: str) -> str:
    """Return how many tensors are wrong, of "wrong: 2 of 39 tensors: ..."."""
    return answer.split(": ")[1].removesuffix(" tensors")


def _cells(name: str, numbers: dict[str, int]) -> list[str]:
    found = expected(name)
    cells = []
    for steps in COLUMNS.values():
        reasons = sorted({numbers[found[step]] for step in steps if found.get(step)})
        reached = any(step in found for step in steps if step != "reference")
        cells.append(", ".join(map(str, reasons)) or ("yes" if reached else "-"))
    return cells
