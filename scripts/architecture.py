"""Hold the package's imports against the order of its rooms, and draw them.

    python scripts/architecture.py           say what is against the order; fail if anything is, or if the picture is old
    python scripts/architecture.py --draw    draw docs/architecture.svg anew

A room is a folder of the package. Imports point down: from a room to one that stands below it in FLOORS, never up, and
never in a circle. An import inside a function counts as any other. A class name means one thing in the whole package.
No module outside `files` asks what kind of path it has: `files/location` says what can be done there. OSFT is known
outside `osft` at its seams alone. A name has a noun: words that say nothing by themselves, such as `said`, name no
variable, parameter or attribute.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardkit"
PICTURE = ROOT / "docs" / "architecture.svg"
MAX_FILES = 16
"""In a room: more than that are a drawer."""

FLOORS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("pictures",),
    ("training",),
    ("training/extras",),
    ("training/model",),
    ("osft/training",),
    ("training/fill",),
    ("training/ranks",),
    ("operations/watch",),
    ("operations/commit",),
    ("operations/preshard", "operations/consolidate", "operations/reshard"),
    ("operations/verify", "operations/inspect"),
    ("operations/diff",),
    ("operations",),
    ("operations/parts",),
    ("osft",),
    ("formats",),
    ("formats/trainers",),
    ("formats/deepspeed",),
    ("formats/rankfiles",),
    ("formats/dcp",),
    ("formats/hub",),
    ("formats/contract",),
    ("formats/torchsave",),
    ("transfer",),
    ("transfer/codecs",),
    ("layout/choice",),
    ("layout",),
    ("keys", "pickles"),
    ("files/output",),
    ("files",),
    ("files/remote",),
    ("core",),
    ("ground",),
)
"""From the top floor down. Rooms of one floor do not import each other."""
ELSEWHERE = {
    "__init__.py": "cli",
    "__main__.py": "cli",
    "errors.py": "ground",
    "_folding.py": "ground",
    "_version.py": "ground",
    "_torch.py": "ground",
}
"""Files that stand on another floor than the other files of their folder. `ground` is what everybody may use."""

DRAWN_IN = {"osft/training": "training"}
"""Rooms that the picture shows among those of another folder, between which they stand."""

KIND_QUESTIONS = {"is_remote", "SCHEMES", "WRITABLE"}
"""What says whether a path leads to a disk or into a store."""

OSFT_SEAMS = {
    # public names
    "__init__.py": {"plan", "training/projection"},
    # the codec that folds
    "operations/consolidate/job.py": {"fold"},
    # the phases of a training job
    "training/finalize.py": {"training/model"},
    "training/model/fit.py": {"training/model"},
    "training/prepare.py": {"plan", "training/model"},
    "training/wrap.py": {"modules"},
}
"""Modules outside `osft` that import from it, and what; nothing may be added. Names and shapes are in `core/factored`."""

BARE_WORDS = frozenset(
    "said told asked given held taken made known beside own other others theirs ours wanted left found there".split()
)
"""No names, with or without underscores around them: they do not say what a value is."""
PUBLIC_NAMES = {
    "files/manifest.py": {"others"},  # a field of shardkit.json
    "operations/parts/results.py": {"found"},  # a field of the JSON of a part
    "operations/parts/part.py": {"found"},  # which becomes that field
    "operations/verify/result.py": {"found"},  # a field of the JSON of a problem
}
"""Bare words that users see. Besides, methods such as `__or__` call their second operand `other`."""

WIDTH = 900
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">
<style>
.box {{ fill: #eef2f7; stroke: #8a9bb0 }} .room {{ fill: #ffffff; stroke: #c3ccd8 }} .name {{ font-weight: bold }}
.arrow {{ fill: none; stroke: #47566b; stroke-width: 1.5; marker-end: url(#tip) }}
</style>
<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#47566b"/></marker></defs>
"""


def modules(package: Path) -> dict[str, Path]:
    """Return dotted name -> file of every module of a package."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                name for whole in names if (name := whole if whole in known else node.module or "") in known
            )


def room_of(path: Path, package: Path) -> str:
    """Return the room in which a file stands."""
    file = path.relative_to(package)
    return ELSEWHERE.get(file.as_posix()) or file.parent.as_posix()


def problems(package: Path) -> Iterator[str]:
    """Yield a line for each import that points up or to the same floor, each circle, each room that is too full."""
    known = modules(package)
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    graph: dict[str, set[str]] = {}
    files: dict[str, int] = defaultdict(int)
    for name, path in known.items():
        graph[name] = set(imports(path, known)) - {name}
        here = room_of(path, package)
        files[path.parent.relative_to(package).as_posix()] += 1
        if here not in floor:
            yield f"{path.relative_to(package)}: its folder is no room of scripts/architecture.py"
            continue
        for other in sorted(graph[name]):
            there = room_of(known[other], package)
            if there != here and floor.get(there, -1) <= floor[here]:
                yield f"{path.relative_to(package)} ({here}) imports {known[other].relative_to(package)} ({there}), which is not below it"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"a circle of imports: {' -> '.join(error.args[1])}"
    yield from (
        f"{room} has {number} files, more than {MAX_FILES}"
        for room, number in files.items()
        if number > MAX_FILES
    )


def shared_names(package: Path) -> Iterator[str]:
    """Yield a line for each class name that two files define, also if one of them has it for a type that is no class.

    With an underscore before it a name is the same name.
    """
    homes: dict[str, set[str]] = defaultdict(set)
    classes = set[str]()
    for path in modules(package).values():
        tree, file = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(package).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name.lstrip("_"))
                homes[node.name.lstrip("_")].add(file)
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Name):
                    homes[target.id.lstrip("_")].add(file)
    for name, files in sorted(homes.items()):
        if name in classes and len(files) > 1:
            yield f"class {name} is in {' and in '.join(sorted(files))}: name each for what it is, or make them one"


def kind_questions(package: Path) -> Iterator[str]:
    """Yield a line for each module outside `files` that asks what kind of path it has."""
    for path in modules(package).values():
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in (getattr(node, field, None) for field in ("id", "attr", "name"))
            if isinstance(name, str)
        }
        if names & KIND_QUESTIONS and package_of(room_of(path, package)) != "files":
            file = path.relative_to(package).as_posix()
            yield f"{file} asks what kind of path it has: give what it needs a name in files/location"


def osft_imports(package: Path, seams: Mapping[str, Collection[str]] = OSFT_SEAMS) -> Iterator[str]:
    """Yield a line for each import from `osft` outside it that is none of its seams, and each seam that is none."""
    known, used = modules(package), dict[str, set[str]]()
    inside = {
        name: path.relative_to(package / "osft")
        for name, path in known.items()
        if (package / "osft") in path.parents
    }
    for name in known.keys() - inside.keys():
        there = {
            inside[other].with_suffix("").as_posix()
            for other in imports(known[name], known)
            if other in inside
        }
        if there:
            used[known[name].relative_to(package).as_posix()] = there
    for file in sorted(used.keys() | seams.keys()):
        for module in sorted(used.get(file, set()) - {*seams.get(file, ())}):
            yield f"{file} imports osft/{module}.py: names and shapes of factors are in core/factored, the rest stays in osft"
        for module in sorted({*seams.get(file, ())} - used.get(file, set())):
            yield f"{file} imports osft/{module}.py no more: take it out of OSFT_SEAMS"


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module binds, and its line: variables, parameters, attributes, and imported names."""
    nodes = [*ast.walk(tree)]
    methods = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("__")]
    operands = {arg for method in methods for arg in method.args.args if arg.arg == "other"}
    for node in nodes:
        name: str | None = None
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg) and node not in operands:
            name = node.arg
        elif isinstance(node, ast.alias):
            name = node.asname or node.name
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = node.name
        if name is not None:
            yield name, node.lineno


def bare_words(package: Path, public: Mapping[str, Collection[str]] = PUBLIC_NAMES) -> Iterator[str]:
    """Yield a line for each name that is a bare word, and each public one that is not there."""
    unused = {(file, name) for file, names in public.items() for name in names}
    for path in modules(package).values():
        file = path.relative_to(package).as_posix()
        for name, line in bound_names(ast.parse(path.read_text(encoding="utf-8"))):
            if name in public.get(file, ()):
                unused.discard((file, name))
            elif name.strip("_") in BARE_WORDS:
                yield f"{file}:{line}: {name} is no name: say what the value is"
    yield from (f"{file} has no name {name}: take it out of PUBLIC_NAMES" for file, name in sorted(unused))


def arrows(package: Path) -> dict[str, set[str]]:
    """Return which rooms each room imports, `ground` aside."""
    known = modules(package)
    found: dict[str, set[str]] = defaultdict(set)
    for path in known.values():
        here = room_of(path, package)
        found[here] |= {room_of(known[other], package) for other in imports(path, known)}
    return {room: others - {room, "ground"} for room, others in found.items() if room != "ground"}


def needed(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return the arrows that do not follow from others: where a room reaches another through a third, none is drawn."""

    def below(room: str) -> set[str]:
        return set().union(*({other} | below(other) for other in graph.get(room, ())))

    return {
        room: {o for o in others if not any(o in below(p) for p in others - {o})}
        for room, others in graph.items()
    }


def package_of(room: str) -> str:
    """Return the box in which a room is drawn."""
    return DRAWN_IN.get(room) or room.partition("/")[0]


def job_of(room: str) -> str:
    """Return what a room is for: the first line of its docstring, up to the first colon or full stop."""
    folder = f"{room}/__init__.py"
    text = ast.get_docstring(ast.parse((PACKAGE / folder).read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0].split(". ")[0].rstrip(".")


def draw(package: Path) -> str:
    """Return the picture: a box for each package, its rooms in their order, and the arrows between boxes."""
    graph: dict[str, set[str]] = defaultdict(set)
    for room, others in arrows(package).items():
        graph[package_of(room)] |= {package_of(other) for other in others} - {package_of(room)}
    graph = needed(graph)
    depth: dict[str, int] = {}
    for box in reversed(tuple(TopologicalSorter(graph).static_order())):  # from the top down
        depth[box] = max((depth[above] + 1 for above, below in graph.items() if box in below), default=0)
    places, shapes, top = dict[str, tuple[float, float, float]](), list[str](), 10.0
    for level in range(max(depth.values()) + 1):
        boxes = sorted(
            (box for box in depth if depth[box] == level), key=lambda box: (_over(box, graph, places), box)
        )
        width, tallest = (WIDTH - 20 - 20 * (len(boxes) - 1)) / len(boxes), 0.0
        for number, box in enumerate(boxes):
            left = 10 + number * (width + 20)
            height = _draw_box(box, left, top, width, shapes)
            places[box] = (left + width / 2, top, top + height)
            tallest = max(tallest, height)
        top += tallest + 34
    for box, others in sorted(graph.items()):
        for other in sorted(others):
            (x, _, y), (to_x, to_y, _) = places[box], places[other]
            shapes.append(f'<path class="arrow" d="M {x:.0f} {y:.0f} L {to_x:.0f} {to_y - 6:.0f}"/>')
    return HEAD.format(width=WIDTH, height=round(top - 24)) + "\n".join(shapes) + "\n</svg>\n"


def _over(box: str, graph: Mapping[str, set[str]], places: Mapping[str, tuple[float, float, float]]) -> float:
    """Return where the boxes stand that point at one, so that arrows cross little."""
    above = [places[other][0] for other, below in graph.items() if box in below and other in places]
    return sum(above) / max(len(above), 1)


def _draw_box(box: str, left: float, top: float, width: float, shapes: list[str]) -> float:
    """Draw a package with its rooms, those of a floor side by side; return its height."""
    rows = [rooms for rooms in ([r for r in floor if package_of(r) == box] for floor in FLOORS) if rooms]
    frame, y = len(shapes), top + 8
    for rooms in rows:
        cell = (width - 16 - 8 * (len(rooms) - 1)) / len(rooms)
        lines = {room: wrap(job_of(room), max(int(cell / 6.1), 12)) for room in rooms}
        height = 24 + 14 * max(map(len, lines.values()))
        for number, room in enumerate(rooms):
            x = left + 8 + number * (cell + 8)
            shapes.append(
                f'<rect class="room" x="{x:.0f}" y="{y:.0f}" width="{cell:.0f}" height="{height}"/>'
            )
            shapes.append(f'<text class="name" x="{x + 7:.0f}" y="{y + 16:.0f}">{escape(room)}</text>')
            for line, text in enumerate(lines[room]):
                shapes.append(f'<text x="{x + 7:.0f}" y="{y + 31 + 14 * line:.0f}">{escape(text)}</text>')
        y += height + 6
    shapes.insert(
        frame,
        f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{y - top + 2:.0f}"/>',
    )
    return y - top + 2


def main() -> int:
    """Draw the picture, or print what is against the order; return the exit code."""
    if sys.argv[1:] == ["--draw"]:
        PICTURE.write_text(draw(PACKAGE), encoding="utf-8")
        return 0
    found = [
        *problems(PACKAGE),
        *shared_names(PACKAGE),
        *kind_questions(PACKAGE),
        *osft_imports(PACKAGE),
        *bare_words(PACKAGE),
    ]
    if not found and (not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != draw(PACKAGE)):
        found.append(f"docs/{PICTURE.name} is old: python scripts/architecture.py --draw")
    print("\n".join(found), end="\n" * bool(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
