"""The package's imports are what the picture in docs/ shows; and the check finds what it is there to find."""

from __future__ import annotations

import ast
import dataclasses
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shardkit.formats.contract import Checkpoint

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import architecture  # noqa: E402


def test_imports_point_down_and_the_picture_shows_them() -> None:
    assert list(architecture.problems(architecture.PACKAGE)) == []
    drawn = architecture.draw(architecture.PACKAGE)
    assert architecture.PICTURE.read_text() == drawn, "python scripts/architecture.py --draw"


def package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "shardkit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "shardkit"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"core/a.py": "from shardkit.cli.b import f", "cli/b.py": ""},
            "core/a.py (core) imports cli/b.py (cli), which is not below it",
        ),
        (
            {"keys/a.py": "def f():\n    import shardkit.pickles.b", "pickles/b.py": ""},
            "keys/a.py (keys) imports pickles/b.py (pickles), which is not below it",
        ),
        (
            {"core/a.py": "from shardkit.core import b", "core/b.py": "from shardkit.core.a import f"},
            "a circle of imports: shardkit.core.a -> shardkit.core.b -> shardkit.core.a",
        ),
        ({"drawer/a.py": ""}, "drawer/a.py: its folder is no room of scripts/architecture.py"),
        ({f"core/m{number}.py": "" for number in range(17)}, "core has 17 files, more than 16"),
    ],
    ids=["up", "across, inside a function", "circle", "no room", "too full"],
)
def test_what_is_against_the_order_is_said(tmp_path: Path, files: dict[str, str], said: str) -> None:
    found = list(architecture.problems(package(tmp_path, {"__init__.py": "", **files})))
    assert len(found) == 1
    assert found[0] in (said, "a circle of imports: shardkit.core.b -> shardkit.core.a -> shardkit.core.b")


def test_a_class_name_means_one_thing() -> None:
    assert list(architecture.shared_names(architecture.PACKAGE)) == []


def test_a_class_name_in_two_files_is_found(tmp_path: Path) -> None:
    inside = package(
        tmp_path,
        {
            "core/a.py": "class Part:\n    class _Row: ...",
            "core/b.py": "Row = int\ndef f():\n    class _Row: ...",
            "core/d.py": "Part = Row = str",
            "keys/c.py": "if True:\n    class Place: ...\nelse:\n    class Place: ...",
        },
    )
    assert list(architecture.shared_names(inside)) == [
        "class Part is in core/a.py and in core/d.py: name each for what it is, or make them one",
        "class Row is in core/a.py and in core/b.py and in core/d.py: name each for what it is, or make them one",
    ]


def test_what_every_format_opens_to_has_at_most_nine_fields() -> None:
    assert len(dataclasses.fields(Checkpoint)) <= 9


def test_osft_is_imported_at_its_seams_alone() -> None:
    assert list(architecture.osft_imports(architecture.PACKAGE)) == []


def test_an_import_from_osft_that_is_no_seam_is_found(tmp_path: Path) -> None:
    inside = package(
        tmp_path,
        {
            "osft/plan.py": "",
            "osft/training/model.py": "from shardkit.osft import plan",
            "cli/a.py": "def f():\n    from shardkit.osft.plan import g",
            "training/b.py": "import shardkit.osft.training.model",
            "keys/c.py": "",
        },
    )
    seams = {"training/b.py": {"training/model"}, "keys/c.py": {"plan"}}
    assert list(architecture.osft_imports(inside, seams)) == [
        "cli/a.py imports osft/plan.py: names and shapes of factors are in core/factored, the rest stays in osft",
        "keys/c.py imports osft/plan.py no more: take it out of OSFT_SEAMS",
    ]


def test_no_module_outside_files_asks_what_kind_of_path_it_has() -> None:
    assert list(architecture.kind_questions(architecture.PACKAGE)) == []


def test_a_module_that_asks_what_kind_of_path_it_has_is_found(tmp_path: Path) -> None:
    inside = package(
        tmp_path,
        {
            "files/a.py": "def is_remote(path): ...",
            "keys/b.py": "from shardkit.files.a import is_remote as far",
            "keys/c.py": "from shardkit.files import a\nif a.is_remote(''): ...",
            "keys/d.py": "from shardkit.files import a",
            "keys/e.py": "def f(path):\n    from shardkit.files.a import WRITABLE",
        },
    )
    said = " asks what kind of path it has: give what it needs a name in files/location"
    assert list(architecture.kind_questions(inside)) == [f"keys/{name}.py{said}" for name in "bce"]


def test_names_say_what_they_are() -> None:
    assert list(architecture.bare_words(architecture.PACKAGE)) == []


def test_names_that_say_nothing_are_found(tmp_path: Path) -> None:
    inside = package(
        tmp_path,
        {
            "core/a.py": "def f(said, *told, asked=0, **given): ...\nwhile held := f(taken=1):\n    made.known = beside",
            "core/b.py": "class A:\n    own: int\n    def __eq__(self, other): ...\n    def f(self, other): self._others = 1",
            "core/c.py": "from a import theirs, b as ours\nfor wanted in []:\n    with a as left: ...",
            "core/d.py": "try: ...\nexcept A as found: ...\nmatch a:\n    case [*_there]: ...\n    case A() as said: ...",
            "keys/e.py": "said_names = is_told = f(left=found.there)",
            "keys/f/g.py": "others = 1",
            "cli/j.py": "said = found = 1",
        },
    )
    public = {"cli/j.py": {"said", "told"}}
    *places, public_one = architecture.bare_words(inside, public)
    assert public_one == "cli/j.py has no name told: take it out of PUBLIC_NAMES"
    assert "core/a.py:1: said is no name: say what the value is" in places
    names = [(place.partition("/")[0], place.split()[1]) for place in places]
    core = "said told asked given held known own other _others theirs ours wanted left found _there said"
    assert sorted(names) == sorted(
        [("cli", "found"), ("keys", "others"), *(("core", name) for name in core.split())]
    )


WRITING = (
    "files/output/*.py",
    "operations/write.py",
    "operations/places.py",
    "operations/destination.py",
    "operations/parts/*.py",
    "operations/commit/*.py",
    "cli/parts.py",
)
"""All that writes, but for Ray."""
MOST_LINES, MOST_CHANGING = 2830, 6


def writing() -> list[Path]:
    found = [path for pattern in WRITING for path in architecture.PACKAGE.glob(pattern)]
    return [path for path in found if path.stem != "on_ray"]


def num_code_lines(source: str) -> int:
    """Count the lines that are neither blank nor a comment nor in a docstring."""
    lines, docs = set[int](), set[int]()
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*no_code, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        for each in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                docs.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    return len(lines - docs)


def changing(node: ast.ClassDef) -> set[str]:
    """Return the attributes of a class that are assigned once it is made."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name != "__init__"]
    targets = [
        target
        for method in methods
        for each in ast.walk(method)
        for target in ast.walk(each)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    ]
    return {each.attr for each in targets if isinstance(each.value, ast.Name) and each.value.id == "self"}


def test_one_way_to_write_stays_small() -> None:
    """The limits only shrink."""
    assert num_code_lines((architecture.PACKAGE / "operations/write.py").read_text()) <= 267
    assert sum(num_code_lines(path.read_text()) for path in writing()) <= MOST_LINES


def test_no_class_that_writes_changes_in_many_ways() -> None:
    classes = [node for path in writing() for node in ast.walk(ast.parse(path.read_text()))]
    assert {
        node.name: changing(node)
        for node in classes
        if isinstance(node, ast.ClassDef) and len(changing(node)) > MOST_CHANGING
    } == {}


def test_lines_of_code_and_what_changes_are_counted(tmp_path: Path) -> None:
    source = '"""Doc."""\n# a\n\nclass A:\n    """Doc.\n\n    More."""\n    def f(self):\n        self.a, self.b = (\n            1, 2)\n'
    assert num_code_lines(source) == 4
    (node,) = ast.parse(source).body[1:]
    assert isinstance(node, ast.ClassDef)
    assert changing(node) == {"a", "b"}


TOPICS = {
    "cli/hints": "what errors tell people to type",
    "cli/results": "what a person sees who calls the library",
    "cli/schemas": "what --json prints",
    "cli/start": "what any command imports",
    "cli/surface": "the flags of all commands",
    "operations/checked_sources": "every verb compares what it reads",
    "operations/consolidate/ask_class": "warnings against from_pretrained's own",
    "operations/consolidate/base_repo": "a base on the Hub",
    "operations/consolidate/diffusers": "models of diffusers, and of no library, there and back",
    "operations/consolidate/factors_refused": "what fine-tuning leaves as factors is refused by every reader",
    "operations/consolidate/fold_or_keep": "dense weights of factors, or factors as they are",
    "operations/consolidate/gaps": "what from_pretrained would make up",
    "operations/consolidate/memory": "peak memory, by the kernel",
    "operations/consolidate/modules": "weights beside the model's own, through every verb",
    "operations/consolidate/part_of_base": "what was not trained, from the base",
    "operations/consolidate/trainers": "from each trainer's run directory",
    "operations/opened_once": "every verb parses a source once",
    "operations/preshard/factors": "a source whose weights are factors",
    "operations/preshard/dequantize": "plain weights of quantised ones",
    "operations/preshard/names": "models with other names in memory than in files, there and back",
    "operations/preshard/scale": "a thousand ranks",
    "operations/reflink": "shared extents, with every verb that moves bytes",
    "operations/reshard/hub": "what it keeps for the way back to the Hub",
    "operations/frames": "calls between a command and the bytes that it writes",
    "operations/keys": "key rules, through every verb",
    "operations/moments": "moments of an optimizer that are one rank's part, through every verb",
    "operations/reshard/kept": "trainers' own forms, optimizer and all",
    "operations/reshard/optimizers_beside": "optimizers in a directory beside the checkpoint",
    "operations/tensor_classes": "tensors of trainers' own classes, through every verb",
    "operations/shards_in_folders": "files in folders below .metadata, through every verb",
    "operations/written_manifests": "the manifests that verbs write",
    "operations/unsupported_files": "whole files of torch.save that no verb takes",
    "operations/verify/repo": "a repo on the Hub",
    "osft/presharded": "factors that an earlier version pre-sharded, through every verb",
    "training/cuda": "all phases, on a GPU",
    "training/dequantize": "plain weights of quantised ones, on real ranks",
    "training/generation_config": "how a job generates, from prepare through save to consolidate",
    "training/key_rules": "names of the Hub, from prepare through save to consolidate",
    "training/live": "models in use",
    "training/old_layouts": "old models of the Hub, from preshard through training to consolidate",
    "training/outside": "parameters outside of any FSDP unit",
    "training/precision": "bits of computing in bf16",
    "training/ties": "broken ties in prepare, finalize and load_into",
    "training/two_names": "models registered under two names, from save to consolidate",
    "transfer/codecs/encode": "a codec of the tests that makes several tensors of one",
}
"""Test files of a room that go through several of its modules, by what they are about."""


def misnamed(tests: Path, shardkit: Path, topics: Mapping[str, str]) -> Iterator[str]:
    """Yield the test files of the package's rooms that are named after no module, and topics without a file.

    A file has the name of a module or folder of its room, with or without `_topic` after it, or that of the room itself.
    """
    unknown = set(topics)
    for path in sorted(tests.rglob("test_*.py")):
        room = path.parent.relative_to(tests)
        if room == Path() or not (shardkit / room).is_dir():
            continue
        name = path.stem.removeprefix("test_")
        modules = {each.stem for each in (shardkit / room).iterdir() if each.suffix in (".py", "")} | {
            room.name
        }
        topic = f"{room}/{name}"
        if topic in topics:
            unknown.remove(topic)
        elif not any(name == module or name.startswith(f"{module}_") for module in modules):
            yield topic
    yield from (f"{topic}: no such test" for topic in sorted(unknown))


def test_each_test_file_has_the_name_of_what_it_tests() -> None:
    assert list(misnamed(ROOT / "tests", architecture.PACKAGE, TOPICS)) == []


def test_a_name_that_says_nothing_is_found(tmp_path: Path) -> None:
    inside = package(tmp_path, {"core/mesh.py": "", "layout/trace/__init__.py": ""})
    for name in (
        "core/test_mesh",
        "core/test_mesh_axes",
        "core/test_core",
        "core/test_meshes",
        "layout/test_trace",
    ):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert list(misnamed(tmp_path / "tests", inside, {})) == ["core/meshes"]
    assert list(misnamed(tmp_path / "tests", inside, {"core/meshes": "all of them"})) == []
    assert list(misnamed(tmp_path / "tests", inside, {"core/lost": "", "core/meshes": ""})) == [
        "core/lost: no such test"
    ]
