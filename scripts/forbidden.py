"""Fail on calls that could run what a file says: pickle, eval, unrestricted torch.load, processes, modules by name.

    python scripts/forbidden.py [DIRECTORY]

What is allowed after all is listed here, by file and with the reason. An exception that nothing needs fails too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = {
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "runpy",
    "code",
    "yaml",
    "pty",
}
"""Nothing imports these; `subprocess`, `importlib` and `zipfile` are imported by those who are listed below."""
GUARDED = {"subprocess", "importlib", "zipfile", "tarfile"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"extract", "extractall", "unpack_archive", "system", "popen"}
LOADERS = {
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "numpy.load": "allow_pickle=False",
}

ALLOWED = {
    "__init__.py": {"importlib": "public names load when they are first used; the names are ours"},
    "_version.py": {"importlib": "whether torch is installed"},
    "cli/__init__.py": {"importlib": "commands load when they are run; the names are ours"},
    "formats/dcp/records.py": {"importlib": "one of two zstd modules, both named here"},
    "formats/registry.py": {"importlib": "formats load when their turn comes; the names are ours"},
    "layout/trace_cache.py": {"importlib": "versions of torch and transformers"},
    "layout/traced.py": {
        "importlib": "whether transformers is installed",
        "subprocess": "models are built and traced in a child process",
    },
    "layout/units.py": {"importlib": "a wrap policy that the person who runs it names, `module:function`"},
    "operations/environment.py": {"importlib": "versions of packages"},
    "training/extras/publish.py": {
        "importlib": "transformers, and lightning under either of its names",
        "subprocess": "shardkit watch, after a save",
    },
    "training/extras/safe_reader.py": {"zipfile": "writes one in memory"},
}
"""File -> what of GUARDED it imports, and why that cannot be steered by a file."""


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every forbidden or guarded thing in a module's source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").partition(".")[0]
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in METHODS)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[int, str]]:
    name = ast.unparse(node.func)
    keywords = {f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords}
    if name in BUILTINS or name.rpartition(".")[2] in METHODS:
        yield node.lineno, name
    if name in LOADERS and LOADERS[name] not in keywords:
        yield node.lineno, f"{name} without {LOADERS[name]}"
    if keywords & {"weights_only=False", "shell=True", "allow_pickle=True"}:
        yield node.lineno, ", ".join(keywords & {"weights_only=False", "shell=True", "allow_pickle=True"})


def problems(directory: Path) -> Iterator[str]:
    """Yield a line for everything in a package that is not allowed, and for exceptions that are not needed."""
    needed: set[tuple[str, str]] = set()
    for path in sorted(directory.rglob("*.py")):
        file = path.relative_to(directory).as_posix()
        for line, name in uses(path.read_text(encoding="utf-8")):
            if name in GUARDED and name in ALLOWED.get(file, {}):
                needed.add((file, name))
            elif name in GUARDED or name in MODULES or not name.isidentifier() or name in BUILTINS | METHODS:
                yield f"{path}:{line}: {name}"
    for file, names in ALLOWED.items():
        yield from (f"{file}: {name} is allowed and not used" for name in names if (file, name) not in needed)


def main() -> int:
    """Print every problem; return the exit code."""
    found = list(problems(Path(sys.argv[1] if len(sys.argv) > 1 else "shardkit")))
    print("\n".join(found), end="\n" * bool(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
