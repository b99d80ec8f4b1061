"""docs/commands.md, every command with its options, from click; the Python API from its docstrings.

docs/python.md has a line for each name. The site has a page with all of it, which is not in the repository.

python scripts/reference.py               writes the pages anew
python scripts/reference.py --check       fails where one is out of date
python scripts/reference.py --site FILE   writes the site's page
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import shardkit as library
from shardkit.cli import main as shardkit
from shardkit.cli.options import sections

DOCS = Path(__file__).parents[1] / "docs"
_SCHEMAS = runpy.run_path(str(Path(__file__).with_name("schemas.py")))
_HEAD = """\
# Commands

Every command and option, made from the program itself: `shardkit COMMAND --help` says the same, `-h` the first of it.
[cli.md](cli.md) explains what they do and why; the [guides](guides/index.md) show them at work.
"""


_PYTHON_HEAD = """\
# Python

`import shardkit` offers these names, in order of use; importing it imports no torch. Each links to its source.
`help(shardkit.preshard)` prints arguments and errors, and the page "Python, in full" of the site has all of them.
Functions raise [`ShardkitError`](#errors) for what a caller can cause. They print nothing but a bar of bytes, on a
terminal and in a notebook, which `progress=False` or `SHARDKIT_NO_PROGRESS=1` switches off. A result is one line;
`print(result)` and a notebook show what the command prints. [Start](start.md) shows the functions at work,
[training](training.md) those of a training job.
"""
_SITE_HEAD = """\
# Python, in full

Arguments, results and errors of everything that `import shardkit` offers. [Python](python.md) is the overview.
"""
_GROUPS = {
    "Move weights": ("preshard", "consolidate", "reshard", "resolve_checkpoint"),
    "Look and check": ("inspect", "verify", "diff", "latest"),
    "Start a training job": (
        "prepare",
        "wrap",
        "finalize",
        "load_into",
        "from_rank",
        "ModelInitializationContext",
    ),
    "Train and save": ("save", "clip_grad_norm_", "grad_norm", "rebind_optimizer", "parameter_names"),
    "Publish while it trains": ("Publisher", "TrainerPublisher", "LightningPublisher"),
    "See what a job does": ("diagnose", "Diagnosis", "PhaseMemory", "FSDPDiagnosticsCallback"),
    "Load and save with stock torch": (
        "SafeReader",
        "checkpointable",
        "bf16_mixed_precision",
        "layer_policy",
    ),
    "FSDP1": ("param_init_fn", "hf_ram_efficient_loading"),
    "OSFT": (
        *("OsftPlan", "osft_optimizer", "osft_leak"),
        *("project_gradients_", "project_parameters_"),
    ),
    "Many machines, and what they leave": ("commit", "status", "abort", "environment"),
    "Results": (
        *("PreshardResult", "ConsolidateResult", "ReshardResult", "ResolvedCheckpoint", "SaveResult"),
        *("InspectResult", "VerifyResult", "VerifyProblem", "DiffResult"),
        *("LatestResult", "RunCheckpoint"),
        *(
            "PartResult",
            "CommitResult",
            "StatusResult",
            "UnfinishedJob",
            "AbortResult",
            "Environment",
        ),
    ),
    "Errors": (
        *("ShardkitError", "UsageError", "MeshError", "PolicyError", "SourceError", "IntegrityError"),
        *("LayoutError", "ResourceError", "IncompleteError", "Interrupted"),
    ),
}
"""Heading -> names, in order of use."""
_STATUS = (
    ("0", "done; of verify: nothing is wrong; of diff: equal"),
    ("1", "the answer of verify or diff is no; latest found no whole checkpoint"),
    ("2", "usage: invalid options, an existing destination"),
    ("3", "an input that is damaged, refused or not understood"),
    ("4", "incomplete: the same command goes on"),
    ("5", "disk, permission, memory or network"),
    ("70", "a bug of shardkit"),
    ("130, 143", "interrupted by Ctrl-C or SIGTERM"),
)
_VARIABLES = (
    ("SHARDKIT_JOBS", "threads, where --jobs is not given"),
    ("SHARDKIT_MAX_MEMORY", "memory for all buffers, where --max-memory is not given"),
    ("SHARDKIT_NO_PROGRESS", "1: no progress"),
    ("SHARDKIT_CACHE", "directory for what is kept between runs, or off; shardkit env shows it"),
    ("SHARDKIT_DEBUG", "1: tracebacks with errors"),
    ("NO_COLOR", "no colours"),
)
_SECTIONS = ("Args", "Returns", "Raises", "Yields", "Source")


def texts() -> dict[str, str]:
    """Return the pages, by their names in docs."""
    return {"commands.md": _commands(), "python.md": _python()}


def _commands() -> str:
    root = click.Context(shardkit, info_name="shardkit", **shardkit.context_settings)
    contexts = list(_contexts(shardkit, root))
    lists = [
        "| command | what it does |",
        "|---|---|",
        *(
            f"| [`{each.command_path}`](#{_anchor(each.command_path)}) | {each.command.get_short_help_str(200)} |"
            for each in contexts
        ),
    ]
    ends = [
        "## Exit codes",
        "",
        *_table(("code", "meaning"), _STATUS),
        "",
        "## Environment variables",
        "",
        *_table(("variable", "effect"), _VARIABLES),
    ]
    parts = [_HEAD, "\n".join(lists) + "\n", *map(_command, contexts), "\n".join(ends) + "\n"]
    return "\n".join(parts)


def _contexts(group: click.Group, around: click.Context) -> Iterator[click.Context]:
    for name in group.list_commands(around):
        command = group.get_command(around, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=around)
        if isinstance(command, click.Group):
            yield from _contexts(command, context)
        else:
            yield context


def _command(context: click.Context) -> str:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    texts = [" ".join(text.split()) for text in (command.help or "").replace("\b", "").split("\n\n")]
    examples = (command.epilog or "").replace("\b", "").strip("\n").splitlines()
    shown = [line[2:] for line in examples if line.startswith("  ")]
    lines = [f"## {context.command_path}", "", "```text", usage, "```", ""]
    lines += [line for text in texts for line in (*_folded(text), "")]
    rows = [
        row
        for section, records in sections(context)
        if (kept := [record for record in records if not record[0].startswith(("-h", "--help"))])
        for row in [f"| **{section}** | |", *_table(("", ""), kept)[2:]]
    ]
    lines += ["| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join([*lines, "```bash", *shown, "```", ""])


def _folded(text: str, width: int = 118) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _table(head: tuple[str, str], rows: object) -> list[str]:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    for term, text in rows:  # type: ignore[attr-defined]
        cells = term.replace("|", "\\|"), " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{cells[0]}` | {cells[1]} |")
    return lines


def _anchor(path: str) -> str:
    return path.replace(" ", "-")


def _python() -> str:
    parts = [_PYTHON_HEAD]
    for heading, names in _GROUPS.items():
        rows = "\n".join(f"| [`{name}`](../{_source(name)}) | {_summary(name)} |" for name in names)
        parts.append(f"## {heading}\n\n| name | what it is |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def _source(name: str) -> str:
    """Return the file that defines a name, from the root of the repository."""
    path = sys.modules[getattr(library, name).__module__].__file__
    assert path is not None
    return Path(path).relative_to(DOCS.parent).as_posix()


def _summary(name: str) -> str:
    """Return the first sentence of a docstring."""
    first = " ".join((inspect.getdoc(getattr(library, name)) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", first)[0].replace("|", "\\|").replace("<", "&lt;")


def site_page() -> str:
    """Return the page with everything that docstrings say."""
    parts = [_SITE_HEAD]
    for heading, names in _GROUPS.items():
        parts += [f"## {heading}\n", *map(_entry, names)]
    return "\n".join(parts)


def _entry(name: str) -> str:
    thing = getattr(library, name)
    body, sections = _docstring(inspect.getdoc(thing) or "")
    lines = [f"### {name}", ""]
    if not inspect.isclass(thing):
        lines += ["```python", _signature(name, thing), "```", ""]
    elif sections.get("Args"):
        lines += ["```python", _signature(name, thing.__init__), "```", ""]
    lines += body
    if sections.get("Args"):
        lines += [*_cells("argument", sections["Args"]), ""]
    for title in ("Returns", "Yields"):
        if sections.get(title):
            lines += [*_folded(f"**{title}:** {' '.join(' '.join(sections[title]).split())}"), ""]
    if sections.get("Raises"):
        lines += [*_cells("raises", sections["Raises"]), ""]
    if inspect.isclass(thing):
        lines += _members(name, thing)
    return "\n".join(lines)


def _docstring(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Divide a docstring into the lines of its text, with fences around code, and its sections."""
    sections: dict[str, list[str]] = {"": []}
    into = sections[""]
    for line in text.splitlines():
        if line.endswith(":") and line[:-1] in _SECTIONS:
            into = sections.setdefault(line[:-1], [])
        elif line.strip() or not into or into[-1]:
            into.append(line)
    body = list[str]()
    for part in "\n".join(sections.pop("")).strip().split("\n\n"):
        if part.startswith("    "):
            body += ["```python", textwrap.dedent(part), "```", ""]
        else:
            body += [*_folded(" ".join(part.split())), ""]
    return body, sections


def _cells(head: str, lines: list[str]) -> list[str]:
    """Return a table of the entries of a section; a text that is no entry stands below it."""
    entries, below = list[tuple[str, str]](), list[str]()
    for line in textwrap.dedent("\n".join(lines)).strip().splitlines():
        match = re.fullmatch(r"([A-Z]\w+(?:, [A-Z]\w+)*|\*{0,2}[a-z_]\w*): (.*)", line)
        if match:
            entries.append((match[1], match[2]))
        elif line.startswith(" ") and entries and not below:
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line.strip()}")
        else:
            below.append(line)
    table = _table((head, "meaning"), entries)
    return [*table, "", *_folded(" ".join(" ".join(below).split()))] if below else table


def _signature(name: str, function: Any) -> str:
    parts, star = list[str](), False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        kept = parameter.replace(annotation=parameter.empty)
        annotation = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        parts.append(str(kept).partition("=")[0] + annotation + default)
    returned = inspect.signature(function).return_annotation
    arrow = f" -> {returned}" if isinstance(returned, str) and returned != "None" else ""
    line = f"{name}({', '.join(parts)}){arrow}"
    return (
        line
        if len(line) <= 100
        else "\n".join([f"{name}(", *(f"    {each}," for each in parts), f"){arrow}"])
    )


def _default(value: object) -> str:
    """Return a default as a caller would write it: sizes in units."""
    is_size = isinstance(value, int) and value >= 2**20 and value % 2**20 == 0
    return f'"{value // 2**20}MiB"' if is_size else f'"{value}"' if isinstance(value, str) else repr(value)


def _members(name: str, kind: type) -> list[str]:
    """Return tables of a class's fields, or where its JSON schema lies, and of its methods."""
    lines = list[str]()
    command = next((command for command, result in _SCHEMAS["RESULTS"].items() if result is kind), None)
    if command:
        lines += _folded(
            f"The fields are those of `shardkit {command} --json`:"
            f" [{command}.schema.json](schemas/{command}.schema.json)."
        )
        lines.append("")
    elif dataclasses.is_dataclass(kind):
        told = dict(_SCHEMAS["texts_of_fields"](kind))
        fields = [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]
        lines += [*_table(("field", "meaning"), ((field, told.get(field, "")) for field in fields)), ""]
    if name == "SafeReader" or name == "FSDPDiagnosticsCallback":  # what torch and Lightning call
        return lines
    methods = [
        (
            f"{each}()" if callable(value) or isinstance(value, classmethod) else each,
            told.partition("\n\n")[0],
        )
        for each, value in vars(kind).items()
        if not each.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod))
        and (told := inspect.getdoc(getattr(kind, each)) or "")
    ]
    return [*lines, *_table(("method or property", "meaning"), methods), ""] if methods else lines


if __name__ == "__main__":
    if "--site" in sys.argv:
        page = Path(sys.argv[sys.argv.index("--site") + 1])
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(site_page())
        sys.exit(0)
    stale = [
        name
        for name, text in texts().items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text() != text
    ]
    if "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/reference.py" if stale else 0)
    for name in stale:
        (DOCS / name).write_text(texts()[name])
