"""docs/models.md, written from the table of outcomes."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path

from tests.models.outcomes import REASONS, expected
from tests.models.zoo import IN_MAKE_TEST, ZOO

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
Their weights are random, and no two tensors are alike. An architecture that the installed transformers lacks is left
out: `lara_mini` and `inkling2_loop` came with 5.24. So is `inkling_mm_model`, which takes scipy to be built (by hand,
with it, all passed).

- **preshard**: `shardkit preshard` for 4 ranks. All that follows runs on 2 ranks.
- **three phases**: `prepare`, `wrap`, `finalize`, from the Hub directory (each rank reads, or for a third of the models
  one rank sends) and from the pre-sharded one. Every parameter and every buffer has the name, the dtype and the bits
  that `from_pretrained` gives it.
- **stock `dcp.load`**: torch alone loads the pre-sharded directory, with the same bits.
- **save, consolidate**: `shardkit.save`, and stock `dcp.save` of the same model. `shardkit consolidate --base` of both
  gives the original's safetensors, each tensor with its name, dtype and bytes. So does consolidate without a base,
  beside `config.json` alone.
- **logits**: what the wrapped model answers equals, bit for bit, what the model of `from_pretrained` answers in one
  process.

`make models` holds all of it against this table, and `make test` holds {tested} of the models: one that begins to pass
fails there as one that ceases to. A number stands for a reason, which is [written below](#what-does-not-pass); a dash
for what was not reached. What is refused is refused before anything is written.

What stands after a `+` tells a model from others of its type:

- `+fused` and `+live` are the same models in files that have the names of the model in memory, as
  `save_pretrained(..., save_original_format=False)` writes them.
- `+repo` are tiny models in directories that have the names, shapes, dtypes and order of a real repo, written down by
  hand: older than what `save_pretrained` writes today, with buffers of masks, heads of another class, and prefixes that
  are gone since. There every file of weights has the original's bytes. Of the three whose weights are quantised, plain
  ones are made, and the result is held against what transformers dequantises.
"""

THEIRS = Path(__file__).with_name("theirs.json")
_THEIRS = """
## transformers' own FSDP loading

`from_pretrained(distributed_config=DistributedConfig(fsdp_size=2))` of transformers {transformers} with torch {torch}, on
two gloo ranks, every tensor held against plain `from_pretrained`: of {count} models {right} are right, {wrong} are wrong
without a word, {error} end with an error. The class of zaya and youtu+padding changes these values at each load;
falcon_h1's are buffers. The three phases of shardkit are right wherever the tables above say yes.
`python -m tests.models.theirs` makes this list.
"""


def render(version: str) -> str:
    """Return the text of docs/models.md.

    Args:
        version: of transformers.
    """
    numbers = {reason: at for at, reason in enumerate(REASONS, 1)}
    parts = [
        _HEAD.format(
            count=len(ZOO),
            tested=len(IN_MAKE_TEST),
            types=len({each.model_type for each in ZOO.values()}),
            version=version,
        )
    ]
    for kind in dict.fromkeys(each.kind for each in ZOO.values()):
        parts += [f"\n## {kind[0].upper()}{kind[1:]}\n", f"| model | class | {' | '.join(COLUMNS)} |"]
        parts.append("|" + "---|" * (2 + len(COLUMNS)))
        for name, each in ZOO.items():
            if each.kind == kind:
                parts.append(f"| {name} | {each.model_class} | {' | '.join(_cells(name, numbers))} |")
    parts += _theirs()
    parts.append("\n## What does not pass\n")
    for reason, each in REASONS.items():
        parts += textwrap.wrap(f"{numbers[reason]}. {each.text}", 118, subsequent_indent="   ")
    return "\n".join(parts) + "\n"


def _theirs() -> list[str]:
    """Return the lines about transformers' own loading, as `theirs.py` noted it."""
    noted = json.loads(THEIRS.read_text())
    models = {name: noted["models"][name] for name in ZOO if name in noted["models"]}
    said = Counter(answer.partition(":")[0] for answer in models.values())
    text = _THEIRS.format(
        count=len(models), **{key: said[key] for key in ("right", "wrong", "error")}, **noted
    )
    rows = [f"| {name} | {answer} |" for name, answer in models.items() if answer != "right"]
    return [text, "| model | transformers' own FSDP loading |", "|---|---|", *rows]


def _cells(name: str, numbers: dict[str, int]) -> list[str]:
    found = expected(name)
    cells = []
    for steps in COLUMNS.values():
        reasons = sorted({numbers[found[step]] for step in steps if found.get(step)})
        reached = any(step in found for step in steps if step != "reference")
        cells.append(", ".join(map(str, reasons)) or ("yes" if reached else "-"))
    return cells
