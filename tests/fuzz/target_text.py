"""The small languages of the command line, and the arithmetic of placements; held against torch where it has them."""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod
from random import Random

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core.mesh import Mesh, parse_mesh
from shardkit.core.placements import Placement
from shardkit.core.text import format_size, parse_size
from shardkit.formats.torchsave.file import StoredPlacement, local_region
from shardkit.keys.select import Globs, Naming, apply_rules, parse_rules
from shardkit.layout.wrap_policy import WrapPolicy, match_paths, parse_policy, unknown_names_error
from tests.fuzz.mutate import BOUNDARIES, TEXTS, change_bytes, change_text, pick
from tests.fuzz.target import Refusals, Target, attempt

# Short: how long a regular expression that somebody wrote runs is up to them, and grows with the name.
_NAMES = {"": "", "a.b": "a.b", "m.h.0.w": "m.h.0.w", "x": "m.h.1.w", "m._orig_mod.n": "m.n"}
_SEPARATOR = "\x1e"


def _text(data: bytes) -> str:
    """As Python gives command-line arguments: what is not UTF-8 becomes lone surrogates."""
    return data.decode("utf-8", "surrogateescape")


def _words(words: Sequence[str]) -> Callable[[Random, Sequence[bytes]], bytes]:
    def mutate(rng: Random, seeds: Sequence[bytes]) -> bytes:
        if rng.random() < 0.1:
            return change_bytes(rng, pick(rng, seeds))
        return change_text(rng, pick(rng, seeds).decode(), words).encode("utf-8", "surrogateescape")

    return mutate


def check_rename(data: bytes) -> bool:
    """Five options: --rename, --strip-prefix, --add-prefix, --include, --exclude."""
    rename, strip, add, include, exclude = (_text(data).split(_SEPARATOR) + [""] * 5)[:5]
    globs = Globs((include,) if include else (), (exclude,) if exclude else ())

    def read() -> tuple[dict[str, str], list[str]]:
        naming = Naming(
            rename=(rename,) if rename else (),
            strip_prefix=(strip,) if strip else (),
            add_prefix=add,
        )
        rules = parse_rules(naming)
        names, notes = apply_rules(rules, _NAMES)
        globs.check(names.values())
        return {stored: name for stored, name in names.items() if globs.selects(name)}, notes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, on brackets in brackets: what they mean may change
        found = attempt(read)
    if found is None:
        return False
    kept, notes = found
    assert kept.keys() <= _NAMES.keys()
    assert all(kept[stored] or not _NAMES[stored] for stored in kept)
    assert all(map(str.isprintable, notes)), notes
    if rename and not (strip or add.strip(".") or include or exclude):
        regex, _, replacement = rename.rpartition("=")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert kept == {k: re.sub(regex, replacement, v) for k, v in _NAMES.items()}
    return True


def rename_seeds() -> list[bytes]:
    """One option after the other, with a separator between them."""
    renames = (
        r"^m\.=model.",
        r"(\w+)\.h=\1.layers",
        r"(?P<n>[a-z]+)$=\g<n>_x",
        "a(?=b)|(?!c)d=",
        r"\.(\d{1,3})\.=.\1.",
        "",
    )
    return [
        _SEPARATOR.join((rename, *rest)).encode()
        for rename in renames
        for rest in (("", "", "", ""), ("m", "model.", "m*", "*w*"), ("m.", ".", "[a-z]*", "n*"))
    ]


_REGEX = (
    *("=", "\\", "(", ")", "[", "]", "{", "}", "*", "+", "?", "|", "^", "$", ".", "\\1", "\\2", "\\g<0>"),
    *("\\g<n>", "(?P<n>", "(?i)", "(?a)", "(?<=a)", "(?<=a*)", "(?=", "(?!", "(?:", "(?P=n)"),
    *("(?(1)a|b)", "{1,3}", "{4294967296}", "{99999}", "\\d", "\\w", "\\Z", "\\x", "\\u0000"),
    *("\\N{DASH}", "[a-", "[[", "[a--b]", "[a&&b]", "[^]", "++", "(" * 120, "\\g<", "\\g<a b>", "\\100"),
    *("\\0", "\\g<\u00b2>", "(?P<\u00e9>", "\\c", "a", "m", "h", ".", "0", _SEPARATOR, "(?#", "(?"),
)


def check_wrap(data: bytes) -> bool:
    """--wrap."""
    text = _text(data)
    policy = attempt(lambda: parse_policy(text))
    if policy is None:
        return False
    assert (policy.kind == "names") == bool(policy.names)
    assert (policy.kind == "function") == (policy.function is not None)
    _check_matches(policy)
    return True


_PATHS = (
    *("", "model", "model.layers", "model.layers.0", "model.layers.1", "model.layers.0.mlp", "head"),
    "model.x.10",
)


def _check_matches(policy: WrapPolicy) -> None:
    for name in policy.names:
        matched = match_paths(name, _PATHS)
        assert matched == [path for path in _PATHS if path in matched]
    error = unknown_names_error(policy.names, dict.fromkeys(_PATHS, 1), what="module paths")
    assert all(map(str.isprintable, (error.message, *error.problems)))


def wrap_seeds() -> list[bytes]:
    """Of every kind."""
    texts = (
        "auto",
        "none",
        "LlamaDecoderLayer,Block",
        "pkg.mod.Class",
        "model.layers.*",
        "layers, head",
        "a.b:c",
    )
    return [text.encode() for text in texts]


_WRAP = (
    *("auto", "none", ",", ".", ":", "*", " ", "a", "model", "layers", "0", "pkg.mod:function", "\n"),
    "\t",
    *TEXTS,
)


def check_mesh(data: bytes) -> bool:
    """--mesh, and the placements of a manifest."""
    text = _text(data)
    if text.startswith(("R", "S")):
        placement = attempt(lambda: Placement.parse(text))
        if placement is None:
            return False
        numbers = [int(each) for each in re.findall("[0-9]+", text)]
        assert [int(each) for each in re.findall("[0-9]+", str(placement))] == numbers
        assert Placement.parse(str(placement)) == placement
        return True
    mesh = attempt(lambda: parse_mesh(text, None))
    if mesh is None:
        return False
    assert mesh.size == prod(mesh.shape) >= mesh.num_shards >= 1
    assert mesh.shape == _again(mesh)
    for rank in {0, mesh.size - 1, mesh.size // 2}:
        assert all(0 <= at < size for at, size in zip(mesh.coord(rank), mesh.shape, strict=True))
    _check_region(mesh)
    return True


def _again(mesh: Mesh) -> tuple[int, ...]:
    """The sizes of a mesh that is described by sizes and roles."""
    return parse_mesh(",".join(f"{axis.name}:{axis.role}={axis.size}" for axis in mesh.axes), None).shape


def _check_region(mesh: Mesh) -> None:
    shape = (7, 5)
    placements = tuple(Placement(None if axis.role == "replicate" else 0) for axis in mesh.axes)
    torch_placements = [Replicate() if axis.role == "replicate" else Shard(0) for axis in mesh.axes]
    for rank in {0, mesh.size - 1}:
        ((region, _),) = mesh.held(shape, placements, rank)
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh.shape, list(mesh.coord(rank)), torch_placements
        )
        assert (region.sizes, region.offsets) == (tuple(sizes), tuple(offsets))


def mesh_seeds() -> list[bytes]:
    """As people write them."""
    texts = (
        "dp_shard=4",
        "dp_replicate=2,dp_shard=16",
        "a:replicate=3,b:shard=2",
        "R",
        "S(0)",
        "S(12)",
        "b:shard=7",
    )
    return [text.encode() for text in texts]


_MESH = (
    *("dp_shard", "dp_replicate", "tp", "ep", ":shard", ":replicate", "=", ",", "2", "1", "0", "131072"),
    *("131073", "-1", " ", "\n", "S", "R", "(", ")", "S(1)", "\u0662", "999999999", "9999999999", "a"),
    "_",
    *TEXTS,
)


def mutate_mesh(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Half of them one to three axes, of which one word is another."""
    if rng.random() < 0.5:
        return _words(_MESH)(rng, seeds)
    axes = [
        f"a{i}:{pick(rng, ('shard', 'replicate'))}={int(rng.random() * 9)}"
        for i in range(1 + int(rng.random() * 3))
    ]
    text = ",".join(sorted(axes, key=lambda axis: "shard" in axis))
    return (change_text(rng, text, _MESH) if rng.random() < 0.3 else text).encode("utf-8", "surrogateescape")


def check_size(data: bytes) -> bool:
    """Sizes are exact."""
    text = _text(data)
    size = attempt(lambda: parse_size(text))
    if size is None:
        return False
    number, unit = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text).groups()  # type: ignore[union-attr]
    base, power = (
        (1024 if "i" in unit.lower() else 1000),
        " kmgtp".index(unit.lower()[:1].replace("b", " ") or " "),
    )
    assert size == int(Fraction(number) * base**power)
    assert format_size(size).isascii()
    return True


def size_seeds() -> list[bytes]:
    """As people write them."""
    return [
        text.encode()
        for text in ("5GB", "512MiB", "1024", "1.5 TiB", "0.000000001PB", " 7kb ", "999999999999999999b")
    ]


_SIZE = (
    "k",
    "M",
    "g",
    "T",
    "P",
    "i",
    "B",
    "b",
    ".",
    "0",
    "1",
    "9",
    " ",
    "-",
    "e",
    "_",
    "\u0663",
    "\n",
    "1" * 19,
    *TEXTS,
)


_MAX_COUNTED = 1 << 16
_NUMBERS = struct.Struct("<4q3b3b3b3b2b")


def check_placements(data: bytes) -> bool:
    """A tensor of two dims on a mesh of up to three axes: the region that torch computes, or ValueError."""
    values = _NUMBERS.unpack(data[: _NUMBERS.size].ljust(_NUMBERS.size, b"\0"))
    shape, rest = tuple(value & (2**62 - 1) for value in values[:2]), values[4:]
    dims, factors, sizes, coords = rest[:3], rest[3:6], rest[6:9], rest[9:12]
    axes = 1 + rest[12] % 3
    mesh_shape = [1 + size % 5 for size in sizes[:axes]]
    coord = [at % (size + 1) - (rest[13] == 1) for at, size in zip(coords, mesh_shape, strict=False)]
    stored = [
        StoredPlacement(
            None if dim % 5 == 4 else dim % 5 - (dim % 7 == 6), 1 if factor % 3 else abs(factor) % 9
        )
        for dim, factor in zip(dims[:axes], factors, strict=False)
    ]
    try:
        region = local_region(shape, stored, mesh_shape, coord)
    except ValueError as error:
        Refusals.latest = str(error)
        assert Refusals.latest.isprintable(), Refusals.latest
        return False
    assert all(0 <= start <= start + size <= full for start, size, full in zip(*region, shape, strict=True))
    if max(shape) > _MAX_COUNTED:
        return True  # torch counts shards out, element by element
    expected = _of_torch(shape, stored, mesh_shape, coord)
    if expected is not None and region.num_elements and not _is_cut_in_two_ways(shape, stored, mesh_shape):
        assert (region.sizes, region.offsets) == expected
    return True


def _is_cut_in_two_ways(
    shape: tuple[int, ...], stored: Sequence[StoredPlacement], mesh_shape: Sequence[int]
) -> bool:
    """True where torch 2.13 has two answers: `distribute_tensor` cuts a dim into `split_factor` parts at once.

    `fully_shard` cuts what other axes have cut one after the other; with uneven parts that is something else, and it
    is what lies in checkpoints.
    """
    for placement in stored:
        axes = [size for other, size in zip(stored, mesh_shape, strict=False) if other.dim == placement.dim]
        if placement.dim is not None and placement.split_factor > 1 and len(axes) > 2:
            if shape[placement.dim] % prod(axes):
                return True
    return False


def _of_torch(
    shape: tuple[int, ...], stored: Sequence[StoredPlacement], mesh_shape: Sequence[int], coord: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (sizes, offsets); None where the coordinate of a replicated axis is none, which makes no difference."""
    if any(not 0 <= at < size for at, size in zip(coord, mesh_shape, strict=True)):
        return None
    placements = [
        Replicate()
        if placement.dim is None
        else Shard(placement.dim)
        if placement.split_factor == 1
        else _StridedShard(placement.dim, split_factor=placement.split_factor)
        for placement in stored
    ]
    sizes, offsets = _compute_local_shape_and_global_offset(shape, tuple(mesh_shape), list(coord), placements)
    return tuple(sizes), tuple(offsets)


def placement_seeds() -> list[bytes]:
    """Numbers, packed."""
    rng = Random(0)
    return [_random_placements(rng) for _ in range(30)]


def _random_placements(rng: Random) -> bytes:
    sizes = [
        pick(rng, BOUNDARIES) % 2**62 if rng.random() < 0.2 else int(rng.random() * 40) for _ in range(4)
    ]
    return _NUMBERS.pack(*sizes, *(int(rng.random() * 12) for _ in range(14)))


def mutate_placements(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """Mostly other numbers."""
    return _random_placements(rng) if rng.random() < 0.8 else change_bytes(rng, pick(rng, seeds))


TARGETS = {
    "rename": Target(check_rename, rename_seeds, _words(_REGEX)),
    "wrap": Target(check_wrap, wrap_seeds, _words(_WRAP)),
    "mesh": Target(check_mesh, mesh_seeds, mutate_mesh),
    "size": Target(check_size, size_seeds, _words(_SIZE)),
    "placements": Target(check_placements, placement_seeds, mutate_placements),
}
