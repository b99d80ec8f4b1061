"""Match stored tensors to the tensors of a model. Their names may differ by wrappers, prefixes, PEFT or renamings.

In this module an FQN is a name in the model's state dict, and a base name is an FQN without the modules that PEFT adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed
from shardkit.errors import LayoutError, SourceError
from shardkit.keys.expressions import Expression, Stored, leaves, substitute, to_json
from shardkit.keys.names import clean, clean_name, join, match_prefix, natural, split
from shardkit.keys.peft import base_name
from shardkit.keys.renaming import is_computed
from shardkit.layout.binding import ClassNames
from shardkit.layout.classes import build_model, built_dtypes, collect, ignored_patterns, is_transformers
from shardkit.layout.conversions import Conversions, revert_conversions

_Rename = Callable[[str], tuple[str, str | None]]
"""Takes a name; returns the new name, and the pattern of transformers' converter if more than the name changes."""


def match_names(
    shapes: Mapping[str, Shape],
    model_names: Iterable[str],
    *,
    computed: Iterable[str] = (),
    model: nn.Module | None = None,
    as_loaded: bool = False,
) -> ClassNames:
    """Find the stored tensor for each tensor of a model.

    Args:
        shapes: stored name, in the files or below the checkpoint's root -> shape.
        model_names: names of all parameters and buffers in the model's state dict, with every name of a tie.
        computed: names of buffers that are not in the state dict.
        model: the model, whose class may have renamings and names to leave out. Not needed for plain modules.
        as_loaded: change only those prefixes that `from_pretrained` would add or remove; guess no others.

    Returns:
        The better of two matches, by the number of stored tensors that have a place: one for the names as they are,
        one for the names as `from_pretrained` changes them.

    Raises:
        SourceError: several stored tensors would be one of the model's.
    """
    targets, computed_names = _Targets(model_names), set(computed)
    cleaned = {name: join(clean(name)) for name in shapes}
    cleaned = {name: cleaned[name] for name in sorted(cleaned, key=lambda name: natural(cleaned[name]))}
    root = transformers_root(model)
    prefixes = _prefixes(cleaned.values(), targets, root, as_loaded=as_loaded)
    matched = _match(shapes, cleaned, targets, prefixes, lambda name: (name, None))
    conversions = Conversions.of(root[1]) if root is not None else None
    if root is not None and conversions is not None and (matched.unused or conversions.keep_names):
        renamed = _match(shapes, cleaned, targets, prefixes, conversions.rename)
        if len(renamed.unused) < len(matched.unused) or (
            not matched.unused and not renamed.unused and renamed.fused
        ):
            matched = _with_conversions(renamed, cleaned, targets, root, conversions, shapes)
    if root is None:
        return _without_ignored(matched, lambda name: cleaned[name] in computed_names)
    buffers = _Targets(computed_names)
    ignored = _ignored_names(root[1])

    def is_left_out(name: str) -> bool:
        return bool(
            buffers.find(cleaned[name], prefixes) or ignored(name) or is_computed(cleaned[name], shapes[name])
        )

    computed_fqns = _computed_names(
        root[1], root[0], [fqn for fqn in targets.fqns if fqn not in matched.names]
    )
    return replace(_without_ignored(matched, is_left_out), computed_fqns=computed_fqns, is_transformers=True)


class _Targets:
    """A model's FQNs, and the base names under which their tensors may be stored."""

    def __init__(self, fqns: Iterable[str]) -> None:
        self.fqns = dict.fromkeys(fqns)
        self.by_base: dict[str, list[str]] = {}
        for fqn in self.fqns:
            base = base_name(fqn)
            if base is not None:
                self.by_base.setdefault(base, []).append(fqn)

    def find(self, name: str, prefixes: Iterable[tuple[str, str]]) -> list[str]:
        """Return the FQNs that a stored tensor with this name fills; several if PEFT added copies of a module."""
        if name in self.fqns:
            return [name]
        for old, new in (("", ""), *prefixes):
            if name.startswith(old):
                changed = new + name.removeprefix(old)
                if changed in self.by_base:
                    return self.by_base[changed]
                if changed in self.fqns:
                    return [changed]
        return []


def transformers_root(model: nn.Module | None) -> tuple[str, nn.Module] | None:
    """Return the outermost transformers model in a model and its path by base names; None if the model has none."""
    for path, module in model.named_modules() if model is not None else ():
        if is_transformers(module):
            # The base name of something inside the module lacks what PEFT and wrappers add before it.
            inside = base_name(clean_name(f"{path}.x" if path else "x")) or "x"
            return inside.removesuffix("x").removesuffix("."), module
    return None


def _prefixes(
    stored: Iterable[str], targets: _Targets, root: tuple[str, nn.Module] | None, *, as_loaded: bool
) -> list[tuple[str, str]]:
    """Return pairs (prefix of stored names, its replacement). Those from transformers come before guessed ones."""
    prefixes = []
    if root is not None:
        path, module = root
        before = f"{path}." if path else ""
        inner = getattr(module, "base_model_prefix", "")
        if before:
            prefixes.append(("", before))
        if isinstance(inner, str) and inner:
            prefixes += [(f"{inner}.", before), ("", f"{before}{inner}.")]
    if as_loaded:
        return list(dict.fromkeys(prefixes))
    names, bases = dict.fromkeys(stored), targets.by_base.keys()
    extra = match_prefix([split(name) for name in names], bases)
    if extra:
        prefixes.append((join(extra) + ".", ""))
    lacking = match_prefix([split(name) for name in bases], names)
    if lacking:
        prefixes.append(("", join(lacking) + "."))
    return list(dict.fromkeys(prefixes))


def _match(
    shapes: Mapping[str, Shape],
    stored: Mapping[str, str],
    targets: _Targets,
    prefixes: list[tuple[str, str]],
    rename: _Rename,
) -> ClassNames:
    """Return which of the model's tensors each stored tensor fills, by names only.

    Args:
        shapes: stored name -> shape.
        stored: stored name -> name without wrappers' segments.
        targets: the model's tensors.
        prefixes: pairs (prefix of stored names, its replacement), in the order in which they are tried.
        rename: transformers' renaming of names; its second result is the pattern of a conversion that makes several tensors
            one, or None.

    Raises:
        SourceError: several stored tensors would fill one of the model's.
    """
    names: dict[str, list[str]] = {}
    unused, fused = dict[str, Shape](), dict[str, str]()
    for key, plain in stored.items():
        name, pattern = rename(plain)
        fqns = targets.find(name, prefixes)
        if not fqns and name != plain:  # as from_pretrained does: the renaming was probably wrong
            fqns, pattern = targets.find(plain, prefixes), None
        if not fqns:
            unused[key] = tuple(shapes[key])
        elif pattern is not None:
            fused[key] = fqns[0]
        else:
            for fqn in fqns:
                names.setdefault(fqn, []).append(key)
    _refuse_duplicates(names)
    return ClassNames(
        names={fqn: names[fqn][0] for fqn in targets.fqns if fqn in names}, unused=unused, fused=fused
    )


def _with_conversions(
    match: ClassNames,
    cleaned: Mapping[str, str],
    targets: _Targets,
    root: tuple[str, nn.Module],
    conversions: Conversions,
    shapes: Mapping[str, Shape],
) -> ClassNames:
    """Return a match with expressions for its fused tensors, where they can be found."""
    before = f"{root[0]}." if root[0] else ""
    groups: dict[str, dict[str, str]] = {}
    for stored, fqn in match.fused.items():
        home = (base_name(fqn) or fqn).removeprefix(before)
        groups.setdefault(home, {})[stored] = cleaned[stored]
    conversion = conversions.convert(root[1], groups, shapes)
    names, converted = {fqn: [stored] for fqn, stored in match.names.items()}, dict[str, Expression]()
    for home, expression in conversion.expressions.items():
        for fqn in targets.find(before + home, ()):
            if isinstance(expression, Stored):
                names.setdefault(fqn, []).append(expression.name)
            elif fqn in names or fqn in converted:
                names.setdefault(fqn, []).append(next(leaf.name for leaf in leaves(expression)))
            else:
                converted[fqn] = expression
    _refuse_duplicates(names)
    failed = {fqn: why for home, why in conversion.failed.items() for fqn in targets.find(before + home, ())}
    return replace(
        match,
        names={fqn: names[fqn][0] for fqn in targets.fqns if fqn in names},
        converted={fqn: converted[fqn] for fqn in targets.fqns if fqn in converted},
        fused={stored: fqn for stored, fqn in match.fused.items() if fqn in failed},
        failed=failed,
    )


def _refuse_duplicates(names: Mapping[str, list[str]]) -> None:
    problems = [
        f"{escape(fqn)}: {' and '.join(map(escape, keys))}" for fqn, keys in names.items() if len(keys) > 1
    ]
    SourceError.raise_for(
        problems,
        f"several stored tensors would be one of the model's, for {count(len(problems), 'name')}",
        hint="the source holds two models, or one under two roots: give one of them",
    )


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict in its order; parameters are the objects themselves."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def ask_model(model: nn.Module, shapes: Mapping[str, Shape], *, as_loaded: bool = True) -> ClassNames:
    """Return how a model matches the names in files, and which of its weights `from_pretrained` would not find.

    Args:
        model: a model that was built from its config on the meta device, is tied, and is not wrapped.
        shapes: name in the files -> shape. Names with segments that wrappers add (such as `_orig_mod` of
            `torch.compile`) match nothing.
        as_loaded: as for `match_names`.

    Raises:
        SourceError: several of the stored tensors would be one of the model's.
    """
    state = tensors_of(model)
    computed = [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in state]
    plain = {name: tuple(shape) for name, shape in shapes.items() if clean_name(name) == name}
    match = match_names(plain, state, computed=computed, model=model, as_loaded=as_loaded)
    # FQN -> shape that the files would give it, or why the conversion to it is not known
    matched: dict[str, Shape | str] = {fqn: plain[name] for fqn, name in match.names.items()}
    matched |= {fqn: expression.shape for fqn, expression in match.converted.items()} | dict(match.failed)
    bound_ids = {id(state[name]) for name in matched if name in state}  # one name of a tie is enough
    bound_names = {*matched, *match.computed_fqns}
    missing = [name for name, x in state.items() if name not in bound_names and id(x) not in bound_ids]
    misfits = [
        (
            name,
            shape_or_reason
            if isinstance(shape_or_reason, str)
            else f"{list(shape_or_reason)}, in the model {list(state[name].shape)}",
        )
        for name, shape_or_reason in matched.items()
        if name in state and shape_or_reason != tuple(state[name].shape)
    ]
    ties = [tuple(dict.fromkeys(match.names.get(fqn, fqn) for fqn in group)) for group in tied_groups(state)]
    unsaved = collect(model, "_keys_to_ignore_on_save")
    return replace(match, unsaved=unsaved, ties=ties, missing=missing, misfits=misfits)


def answer_class(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request of `traced.ask_class`: build the model of a config and match its names; return plain data.

    Args:
        request: the request. Code next to config.json does not run.

    Returns:
        A dict with these keys:
        model_class: name of the class.
        match: result of `ask_model`, for the requested names or, if they are names in memory, for their Hub's form.
        form: for names in memory only, see `_hub_form`.
        fp32: if a dtype is requested, the names that stay in fp32; `match` is then empty and `form` is missing.

    Raises:
        Exception: any error of the code that builds the model.
    """
    dtype: torch.dtype | None = getattr(torch, request["dtype"]) if request["dtype"] else None
    model, names = build_model(request["directory"], trust_remote_code=False, dtype=dtype), request["names"]
    answer: dict[str, Any] = {"model_class": type(model).__name__, "match": ClassNames().to_json()}
    if dtype is not None:
        dtypes = built_dtypes(model, dtype)
        return answer | {"fp32": [name for name in names if dtypes.of_stored(name) is torch.float32]}
    if not request["in_memory"]:
        return answer | {"match": ask_model(model, names).to_json()}
    form, result = _hub_form(model, names)
    return answer | {"form": form} | ({} if result is None else {"match": ask_model(model, result).to_json()})


def tied_groups(state: Mapping[str, object]) -> list[list[str]]:
    """Return the groups of several names for the same tensor object."""
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _hub_form(
    model: nn.Module, shapes: Mapping[str, Shape]
) -> tuple[dict[str, Any], dict[str, Shape] | None]:
    """Return the Hub's form of tensors in memory as plain data, and its shapes: name on the Hub -> shape, or None.

    Args:
        model: a model that was built from its config.
        shapes: name in memory -> shape. Some names may be foreign to the model. All names may lack the same prefix.

    Returns:
        A dict with these keys:
        made: name on the Hub -> expression of the tensors in memory, without tensors that the model computes itself.
            None if most of the names are not the model's, or if `from_pretrained` would turn the result into
            something else than these tensors.
        why: the reason for None; else empty.
        is_lost: true if the names are the model's, but loading no known form would give these tensors again.
        ties: groups of names in memory of one tensor; the name that `save_pretrained` keeps comes first.
    """
    state = {name: tuple(x.shape) for name, x in model.state_dict().items() if isinstance(x, torch.Tensor)}
    before = _lacked_prefix(state, shapes)
    stored_tensors = {before + name: Stored(name, tuple(shape)) for name, shape in shapes.items()}
    model_shapes = {
        name: stored.shape for name, stored in stored_tensors.items() if state.get(name) == stored.shape
    }
    unsaved = [name for name in collect(model, "_keys_to_ignore_on_save") if name in model_shapes]
    further = getattr(model, "all_tied_weights_keys", {})  # of transformers: name left out -> name kept
    ties = [
        [name.removeprefix(before) for name in sorted(group, key=further.__contains__)]
        for group in tied_groups(tensors_of(model))
    ]

    def unknown(why: str, *, is_lost: bool = True) -> tuple[dict[str, Any], None]:
        return {"made": None, "why": why, "is_lost": is_lost, "ties": ties}, None

    if 2 * len(model_shapes) < len(shapes):
        return unknown("these are not its names in memory", is_lost=False)
    try:
        reverted = revert_conversions(
            model, {name: shape for name, shape in model_shapes.items() if name not in unsaved}
        )
    except LayoutError as error:
        wrong = _changed_by_loading(
            model, model_shapes, {name: Stored(name, shape) for name, shape in model_shapes.items()}
        )
        changes = f"; it would change {listed(wrong)}" if wrong else ""
        return unknown(error.message + changes, is_lost=bool(wrong))
    if reverted.failed:
        name, why = next(iter(reverted.failed.items()))
        return unknown(f"{escape(name)} {why}")
    expressions = {
        **reverted.expressions,
        **{
            name: Stored(name, stored.shape)
            for name, stored in stored_tensors.items()
            if name not in model_shapes
        },
    }
    wrong = _changed_by_loading(model, model_shapes, expressions)
    if wrong:
        return unknown(f"from_pretrained would make something else of it: {listed(wrong)}")
    plain = {name: to_json(substitute(e, stored_tensors)) for name, e in expressions.items()}
    form = {"made": plain, "why": "", "is_lost": False, "ties": ties}
    return form, {name: expression.shape for name, expression in expressions.items()}


def _lacked_prefix(names: Collection[str], stored: Mapping[str, Shape]) -> str:
    """Return the prefix, with its dot, that turns all stored names into names of the model; or an empty string."""
    prefix = match_prefix([split(name) for name in names], stored)
    before = f"{join(prefix)}." if prefix else ""
    return before if all(before + name in names for name in stored) else ""


def _changed_by_loading(
    model: nn.Module, model_shapes: Mapping[str, Shape], expressions: Mapping[str, Expression]
) -> list[str]:
    """Return the FQNs of tensors that saving and loading would change.

    Args:
        model: a transformers model.
        model_shapes: FQN -> shape.
        expressions: name in the files that would be saved -> expression of the model's tensors.
    """
    shapes = {name: expression.shape for name, expression in expressions.items()}
    matched = match_names(shapes, model_shapes, model=model, as_loaded=True)
    again = {fqn: expressions[stored] for fqn, stored in matched.names.items()}
    again |= {fqn: substitute(expression, expressions) for fqn, expression in matched.converted.items()}
    return [fqn for fqn, expression in again.items() if expression != Stored(fqn, tuple(model_shapes[fqn]))]


def _computed_names(model: nn.Module, path: str, lacking: Iterable[str]) -> tuple[str, ...]:
    """Return those FQNs that files may lack, because the model's class computes them without a warning.

    Source: transformers 5.23, PreTrainedModel._adjust_missing_and_unexpected_keys.
    """
    patterns = collect(model, "_keys_to_ignore_on_load_missing")
    before = f"{path}." if path else ""
    inner_fqns = [fqn for fqn in lacking if fqn.startswith(before)]
    return tuple(fqn for fqn in inner_fqns if any(re.search(p, fqn.removeprefix(before)) for p in patterns))


def _ignored_names(model: nn.Module) -> Callable[[str], object]:
    """Return a predicate for stored names that the model's class leaves out."""
    patterns = ignored_patterns(model)
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(joined).search if patterns else lambda _: None


def _without_ignored(match: ClassNames, is_left_out: Callable[[str], bool]) -> ClassNames:
    """Move the unused tensors that the model leaves out to `ignored`."""
    ignored = {name: None for name in match.unused if is_left_out(name)}
    unused = {name: shape for name, shape in match.unused.items() if name not in ignored}
    return replace(match, unused=unused, ignored=tuple(ignored))
