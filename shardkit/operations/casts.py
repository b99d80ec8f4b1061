"""Choose the dtype in which each tensor is stored, by `--dtype` and `--dtype-rule`.

Some tensors are never narrowed: those that the model keeps in fp32, and quantised ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME, CASTS, DType, most_bytes, short_dtype, wide_among_half
from shardkit.core.text import GLOBS_HINT, count, escape, listed, match_nothing, unmatched
from shardkit.errors import UsageError
from shardkit.files import manifest, storage
from shardkit.keys.expressions import Expression, leaves
from shardkit.layout.traced import ask_class

if TYPE_CHECKING:
    from shardkit.formats.contract import Dequantized
    from shardkit.formats.hub.base import Base

KEEP, BASE = "keep", "base"
CHOICES = (KEEP, BASE, *CASTS)
_FP32 = BY_NAME["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypeCount:
    """The tensors of one dtype."""

    dtype: str
    """torch's name."""
    num_tensors: int
    tensor_bytes: int


def count_dtypes(tensors: Iterable[tuple[str, int]]) -> list[DTypeCount]:
    """Count tensors by dtype, in the order in which dtypes first appear.

    Args:
        tensors: (dtype, bytes) of each tensor.
    """
    numbers, sizes = Counter[str](), Counter[str]()
    for dtype, nbytes in tensors:
        numbers[dtype] += 1
        sizes[dtype] += nbytes
    return [DTypeCount(dtype=d, num_tensors=n, tensor_bytes=sizes[d]) for d, n in numbers.items()]


def check_cast(option: str, dtype: str, choices: Iterable[str] = (KEEP, *CASTS)) -> None:
    """Refuse an unknown value of an option.

    Raises:
        UsageError: `dtype` is not one of `choices`.
    """
    if dtype not in choices:
        raise UsageError(f"{option} {escape(str(dtype))!r} is not one of {', '.join(choices)}")


def check_choice(dtype: str, base: Base | None) -> None:
    """Refuse an unknown value of consolidate's `--dtype`.

    Raises:
        UsageError: it is not one of CHOICES, or it is "base" and the dtypes of the base are not known.
    """
    check_cast("--dtype", dtype, CHOICES)
    if dtype == BASE and (base is None or base.tensors is None):
        raise UsageError(
            "--dtype base needs a base with known dtypes",
            hint="name it with --base, or ask for bf16, fp16 or fp32",
        )


class DtypeRule(NamedTuple):
    """A `--dtype-rule GLOB=DTYPE`: the dtype of some tensors, which overrides `--dtype`."""

    glob: str
    """Matches names in the output."""
    dtype: str
    """"keep", "bf16", "fp16" or "fp32"."""


def parse_rules(rules: Iterable[str]) -> tuple[DtypeRule, ...]:
    """Parse the values of `--dtype-rule`.

    Raises:
        UsageError: lists all values that are not GLOB=DTYPE.
    """
    parsed, problems = list[DtypeRule](), list[str]()
    for rule in rules:
        glob, is_rule, name = rule.rpartition("=")
        dtype = short_dtype(name)
        if not is_rule or not glob or dtype not in (KEEP, *CASTS):
            problems.append(escape(rule))
        parsed.append(DtypeRule(glob, dtype))
    UsageError.raise_for(
        problems,
        f"{count(len(problems), 'dtype rule')} not of the form GLOB=DTYPE",
        hint=f"such as 'model.layers.*.mlp.gate.weight=fp32'; the dtype is one of {', '.join((KEEP, *CASTS))}",
    )
    return tuple(parsed)


def apply_rules(
    rules: Iterable[DtypeRule], default_dtypes: Mapping[str, DType], chosen: Mapping[str, DType]
) -> dict[str, DType]:
    """Return the chosen dtypes, changed by rules. If several rules match a tensor, the last wins.

    Args:
        rules: the rules; they apply only to floating tensors.
        default_dtypes: dtypes without any options, by name in the output. "keep" in a rule means these.
        chosen: dtypes without the rules.

    Raises:
        UsageError: lists all globs that match no floating tensor.
    """
    changed, idle = dict(chosen), list[str]()
    names = [name for name, dtype in default_dtypes.items() if dtype.is_convertible]
    for rule in rules:
        matched = [name for name in names if fnmatchcase(name, rule.glob)]
        changed |= {name: CASTS.get(rule.dtype, default_dtypes[name]) for name in matched}
        if not matched:
            idle.append(rule.glob)
    if idle:
        raise UsageError(
            match_nothing("--dtype-rule", len(idle), "no floating tensor of the output"),
            problems=unmatched(idle, names),
            hint=f"{GLOBS_HINT}; --dry-run shows what would be written",
        )
    return changed


def dequantized_as(dtype: str, rules: Iterable[DtypeRule]) -> DType:
    """Return the dtype to dequantise to: bfloat16; or float32 if options convert it, so that values are rounded once."""
    return BY_NAME["bfloat16"] if dtype in (KEEP, BASE) and not any(True for _ in rules) else _FP32


def find_default_dtypes(
    catalog: Catalog,
    sources: Mapping[str, str],
    dequantized: Dequantized | None,
    expressions: Mapping[str, Expression],
) -> dict[str, DType]:
    """Return the dtypes of tensors without any options: as in the catalog, but bfloat16 for those that were quantised.

    Args:
        catalog: catalog of the source.
        sources: name in the output -> name in the catalog.
        dequantized: the tensors that were quantised, or None.
        expressions: name in the catalog -> the expression that computes it, for computed tensors.
    """
    dtypes = {name: catalog.tensors[source].dtype for name, source in sources.items()}
    if dequantized is None:
        return dtypes
    was_quantised = {
        *dequantized.names,
        *(
            name
            for name, of in expressions.items()
            if any(leaf.name in dequantized.names for leaf in leaves(of))
        ),
    }
    return {
        name: BY_NAME["bfloat16"] if sources[name] in was_quantised else dtype
        for name, dtype in dtypes.items()
    }


def find_folded_dtypes(
    default_dtypes: Mapping[str, DType], folded: Collection[str], nbytes: Mapping[str, int], base: Base | None
) -> tuple[dict[str, DType], list[str]]:
    """Return the dtypes without any options for a model with weights folded from factors, and notes.

    OSFT stores factors in float32, and mostly the other tensors, too, whatever dtype the model had before. So the base's
    dtypes are used. Without a base, folded weights get the dtype that most bytes of the other tensors have.

    Args:
        default_dtypes: dtypes in the checkpoint, by name in the output.
        folded: names in the output of folded weights.
        nbytes: bytes of each tensor in the checkpoint.
        base: the model before training, or None.
    """
    base_tensors = base.tensors if base is not None and base.tensors is not None else {}
    dense = (
        most_bytes((dtype, nbytes[name]) for name, dtype in default_dtypes.items() if name not in folded)
        or _FP32
    )
    chosen = {
        name: _dtype_before(dtype, base_tensors[name].dtype)
        if name in base_tensors
        else (dense if name in folded else dtype)
        for name, dtype in default_dtypes.items()
    }
    notes, not_in_base = list[str](), [name for name in folded if name not in base_tensors]
    if len(not_in_base) < len(folded) and base is not None:
        changed = sum(
            chosen[name] is not default_dtypes[name] for name in default_dtypes if name not in folded
        )
        change_note = (
            f", and {count(changed, 'tensor')} beside them that OSFT held in fp32" if changed else ""
        )
        notes.append(
            f"folded weights have the dtypes of {escape(base.label)}{change_note}; --dtype fp32 keeps all digits"
        )
    if not_in_base:
        notes.append(
            f"{count(len(not_in_base), 'folded weight')} in {dense.name}, as most of what was not factors is; "
            "--dtype gives another"
        )
    return chosen, notes


def _dtype_before(dtype: DType, before: DType) -> DType:
    """Return the base's dtype for a tensor that OSFT stored in float32; other dtypes stay."""
    return before if dtype is _FP32 and before.is_convertible else dtype


def choose_dtypes(
    default_dtypes: Mapping[str, DType],
    names: Mapping[str, str],
    dtype: str,
    rules: Iterable[DtypeRule],
    base: Base | None,
    directory: str,
) -> tuple[dict[str, DType], list[str]]:
    """Return the dtype in which each tensor is stored, by its name in the output, and notes.

    Only plain floating tensors are converted, not integers, fp8 or fp4.

    Args:
        default_dtypes: dtypes without any options, by name in the output.
        names: stored name -> name in the output.
        dtype: one of CHOICES.
        rules: the dtype rules.
        base: the model before training, or None.
        directory: the checkpoint, which may have a manifest.

    Raises:
        UsageError: lists all rules that match no floating tensor.
    """
    chosen, notes = _choose(dict(default_dtypes), names, dtype, base, directory)
    return apply_rules(rules, default_dtypes, chosen), notes


def _choose(
    default_dtypes: dict[str, DType], names: Mapping[str, str], dtype: str, base: Base | None, directory: str
) -> tuple[dict[str, DType], list[str]]:
    if dtype == KEEP:
        return default_dtypes, []
    if dtype == BASE:
        return _dtypes_of_base(default_dtypes, base)
    target = CASTS[dtype]
    keep, notes = frozenset[str](), list[str]()
    if target is not _FP32:
        wide = [
            name
            for name, default in default_dtypes.items()
            if default.is_convertible and default.itemsize > 2
        ]
        keep, notes = _keep_fp32(wide, names, base, directory, target)
    chosen = {
        name: target if default.is_convertible and name not in keep else default
        for name, default in default_dtypes.items()
    }
    return chosen, [*notes, *quantised_notes(default_dtypes)]


def _dtypes_of_base(
    default_dtypes: Mapping[str, DType], base: Base | None
) -> tuple[dict[str, DType], list[str]]:
    assert base is not None
    assert base.tensors is not None
    chosen, absent = dict(default_dtypes), []
    for name, dtype in default_dtypes.items():
        base_tensor = base.tensors.get(name)
        if base_tensor is None:
            absent.append(name)
        elif dtype.is_convertible and base_tensor.dtype.is_convertible:
            chosen[name] = base_tensor.dtype
    notes = (
        [f"their dtype is kept, as the base lacks them: {count(len(absent), 'tensor')}: {listed(absent)}"]
        if absent
        else []
    )
    return chosen, notes


def _keep_fp32(
    wide: list[str], names: Mapping[str, str], base: Base | None, directory: str, target: DType
) -> tuple[frozenset[str], list[str]]:
    """Return which of the tensors in fp32 stay in fp32 when the others become half precision, and notes.

    The base's dtypes decide; or else a manifest in the checkpoint; or else the model's class, if transformers is
    installed.
    """
    if not wide:
        return frozenset(), []
    kept_names = _from_base(wide, base)
    origin = "the base stores them so"
    if kept_names is None:
        kept_names, origin = _from_manifest(wide, names, directory), "the checkpoint's manifest says so"
    if kept_names is None:
        kept_names, origin = _from_transformers(wide, base, target), "the model's class asks for it"
    if kept_names is None:
        why = "its class cannot be built here" if base and base.config else "there is no base and no config"
        return frozenset(), [
            f"it is not known which tensors the model keeps in fp32, as {why}: all were converted"
        ]
    if not kept_names:
        return kept_names, []
    return kept_names, [
        f"kept in fp32, {origin}: {count(len(kept_names), 'tensor')}: {listed(sorted(kept_names))}"
    ]


def _from_base(wide: list[str], base: Base | None) -> frozenset[str] | None:
    if base is None or base.tensors is None:
        return None
    return _wide_ones({name: tensor.dtype for name, tensor in base.tensors.items()}, wide)


def _from_manifest(wide: list[str], names: Mapping[str, str], directory: str) -> frozenset[str] | None:
    recorded = manifest.read(directory) if storage.isdir(directory) else None
    if recorded is None or isinstance(recorded, manifest.SavedState):
        return None
    dtypes = {
        names[fqn]: BY_NAME[tensor.dtype]
        for fqn, tensor in manifest.all_tensors(recorded).items()
        if fqn in names
    }
    return _wide_ones(dtypes, wide)


def _wide_ones(dtypes: Mapping[str, DType], wide: list[str]) -> frozenset[str] | None:
    kept_wide = wide_among_half(dtypes)
    return None if kept_wide is None else kept_wide.intersection(wide)


def _from_transformers(wide: list[str], base: Base | None, target: DType) -> frozenset[str] | None:
    if base is None or base.config is None:
        return None
    reply = ask_class(base.directory, dict.fromkeys(wide, ()), dtype=target)
    return None if reply is None else reply.fp32


def quantised_notes(dtypes: Mapping[str, DType]) -> Iterator[str]:
    """Yield a note about floating tensors that are not converted because they are quantised."""
    number = sum(dtype.is_floating and not dtype.is_convertible for dtype in dtypes.values())
    if number:
        yield f"{count(number, 'fp8 or fp4 tensor')} not converted: their scales are in other tensors"


def beyond_range(tensors: Collection[tuple[str, DType]]) -> Iterator[str]:
    """Yield a warning for each dtype whose range is too small for values of some tensors, given as (FQN, dtype)."""
    for dtype in sorted({dtype for _, dtype in tensors}, key=attrgetter("name")):
        names = sorted(fqn for fqn, tensor_dtype in tensors if tensor_dtype is dtype)
        yield (
            f"{count(len(names), 'tensor')} {'has' if len(names) == 1 else 'have'} values beyond the range of "
            f"{short_dtype(dtype.name)}, which became infinite: {listed(names)}"
        )
