"""What each tensor is stored as: `--dtype`, and what is never narrowed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

from shardkit import manifest
from shardkit.core.catalog import Catalog
from shardkit.core.dtypes import BY_NAME, CASTS, DType
from shardkit.core.text import count, escape, listed
from shardkit.errors import UsageError
from shardkit.operations.consolidate_base import Base

KEEP, BASE = "keep", "base"
CHOICES = (KEEP, BASE, *CASTS)
_FP32 = BY_NAME["float32"]


def check_choice(dtype: str, base: Base | None) -> None:
    """Refuse what `--dtype` cannot be.

    Raises:
        UsageError: not one of its values, or "base" without a base whose dtypes are known.
    """
    if dtype not in CHOICES:
        raise UsageError(f"--dtype {escape(dtype)!r} is not one of {', '.join(CHOICES)}")
    if dtype == BASE and (base is None or base.tensors is None):
        raise UsageError(
            "--dtype base needs a base whose weights say their dtypes",
            hint="name it with --base, or ask for bf16, fp16 or fp32",
        )


def choose_dtypes(
    catalog: Catalog, names: Mapping[str, str], dtype: str, base: Base | None, directory: str
) -> tuple[dict[str, DType], list[str]]:
    """Return what each tensor is stored as, by name in the output, and what has to be said about it.

    Only floating tensors whose values stand for themselves are converted: no integer, and no fp8 or fp4.

    Args:
        catalog: of the checkpoint.
        names: stored name -> name in the output.
        dtype: one of CHOICES.
        base: what is known of the model before it was trained.
        directory: the checkpoint's, where a manifest may lie.
    """
    held = {name: catalog.tensors[source].dtype for source, name in names.items()}
    if dtype == KEEP:
        return held, []
    if dtype == BASE:
        return _as_base(held, base)
    target = CASTS[dtype]
    keep, notes = frozenset[str](), list[str]()
    if target is not _FP32:
        wide = [name for name, found in held.items() if found.is_convertible and found.itemsize > 2]
        keep, notes = _keep_fp32(wide, names, base, directory)
    chosen = {
        name: target if found.is_convertible and name not in keep else found for name, found in held.items()
    }
    return chosen, [*notes, *_quantised(held)]


def _as_base(held: Mapping[str, DType], base: Base | None) -> tuple[dict[str, DType], list[str]]:
    assert base is not None
    assert base.tensors is not None
    chosen, absent = dict(held), []
    for name, found in held.items():
        wanted = base.tensors.get(name)
        if wanted is None:
            absent.append(name)
        elif found.is_convertible and wanted.dtype.is_convertible:
            chosen[name] = wanted.dtype
    notes = (
        [f"not in the base, so their dtype is kept: {count(len(absent), 'tensor')}: {listed(absent)}"]
        if absent
        else []
    )
    return chosen, notes


def _keep_fp32(
    wide: list[str], names: Mapping[str, str], base: Base | None, directory: str
) -> tuple[frozenset[str], list[str]]:
    """Return which of the tensors in fp32 stay so when the others become half precision, and what to say.

    The base's dtypes tell; then a manifest beside the checkpoint; then the model's class, if transformers is here.
    """
    if not wide:
        return frozenset(), []
    known = _from_base(wide, base)
    origin = "the base stores them so"
    if known is None:
        known, origin = _from_manifest(wide, names, directory), "the manifest of the checkpoint says so"
    if known is None:
        known, origin = _from_transformers(wide, base), "the model's class asks for it"
    if known is None:
        lacking = (
            "its class cannot be built here" if base and base.config else "there is no base and no config"
        )
        return frozenset(), [
            f"which tensors the model keeps in fp32 is not known, {lacking}: all were converted"
        ]
    if not known:
        return known, []
    return known, [f"kept in fp32, {origin}: {count(len(known), 'tensor')}: {listed(sorted(known))}"]


def _from_base(wide: list[str], base: Base | None) -> frozenset[str] | None:
    if base is None or base.tensors is None:
        return None
    return _wide_among_narrow({name: tensor.dtype for name, tensor in base.tensors.items()}, wide)


def _from_manifest(wide: list[str], names: Mapping[str, str], directory: str) -> frozenset[str] | None:
    content = manifest.read(directory) if os.path.isdir(directory) else None
    tensors = content.get("tensors") if content else None
    if not isinstance(tensors, dict):
        return None
    dtypes = {
        names[fqn]: BY_NAME[entry["dtype"]]
        for fqn, entry in tensors.items()
        if fqn in names and isinstance(entry, dict) and entry.get("dtype") in BY_NAME
    }
    return _wide_among_narrow(dtypes, wide)


def _wide_among_narrow(dtypes: Mapping[str, DType], wide: list[str]) -> frozenset[str] | None:
    """Return which of `wide` are fp32 in a model that is mostly half precision; None where it is not."""
    counted = Counter(dtype for dtype in dtypes.values() if dtype.is_convertible)
    if not counted or counted.most_common(1)[0][0].itemsize > 2:
        return None
    return frozenset(name for name in wide if dtypes.get(name) is _FP32)


def _from_transformers(wide: list[str], base: Base | None) -> frozenset[str] | None:
    if base is None or base.config is None:
        return None
    try:
        from shardkit.layout import meta_model

        model = meta_model.build_model(base.directory, trust_remote_code=False)
    except (
        Exception
    ):  # no transformers, no such class, or whatever a model's constructor raises: then nobody knows
        return None
    return frozenset(meta_model.keep_fp32_names(model, wide))


def _quantised(held: Mapping[str, DType]) -> list[str]:
    found = [name for name, dtype in held.items() if dtype.is_floating and not dtype.is_convertible]
    return (
        [f"{count(len(found), 'fp8 or fp4 tensor')} not converted: the scales stand in other tensors"]
        if found
        else []
    )
