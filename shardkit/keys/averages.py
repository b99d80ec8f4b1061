"""Find averages of a model's weights (EMA, SWA) in a checkpoint: in the saved dict, or in an optimizer's state."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.core.text import count, escape, few, in_shell
from shardkit.errors import SourceError, UsageError
from shardkit.keys.names import Segments, clean, is_number, join, match_prefix
from shardkit.keys.roots import Located, SortedNames, Want, list_roots, locate_model, root_option
from shardkit.keys.trainer_state import is_averaged

_MAX_DEPTH = 3  # segments down to the root of an average
# Last parts of names in an optimizer's state that are averages of weights. Similar names may be moments: grad_ema.
_AVERAGED_STATE = re.compile(
    r"(?:ema|swa|avg|averaged?|shadow)_(?:params?|parameters?|weights?|model)"
    r"|(?:params?|parameters?|weights?|model)_(?:ema|swa|avg|averaged)|ax"
)


def locate_averaged(source: SortedNames, want: Want | None) -> Located:
    """Return the averaged weights, under the names of the model's tensors.

    Raises:
        UsageError: the checkpoint has no averaged weights, or several sets of them.
        SourceError: they are stored as a list, without names.
    """
    try:
        model = locate_model(source, want)
    except SourceError:  # several models, such as a GAN's: perhaps only one of them has an average
        model = Located(root=())
    root = _find_averages(source, model)
    if isinstance(root, _AveragedStates):
        return _take_states(root, model)
    # ema-pytorch and torch's AveragedModel store the averaged copy, counters, and the model in training.
    while inner := [
        name for name, part in source.below(root).items() if part.is_module and is_averaged(name)
    ]:
        root = (*root, inner[0])
    inside = [path[len(root) :] for path in source.paths.values() if path[: len(root)] == root]
    if all(is_number(segment) for path in inside for segment in path):
        raise SourceError(
            f"the averaged weights under {escape(join(root))} are a list of {len(inside)} tensors without "
            "names: which parameter each belongs to is known only to the model's code",
            hint="load them with the training code and save the averaged model's state dict",
        )
    aside = {model.root: "model"} if model.names and model.root else {}
    located = Located(root=root, aside=dict(aside))
    if not _take_dotless(source, located, model):
        in_model = {join(path): source.tensors[stored].shape for stored, path in model.names.items()}
        located = locate_model(source, in_model, root)
        located.aside |= aside
    return located


class _AveragedStates(NamedTuple):
    """Tensors in an optimizer's state that may be averages of parameters: `ABOVE.PARAMETER.LEAF`, one per parameter.

    For example, in `optimizer.state.layers.0.weight.ema_params` the last part, `ema_params`, is the leaf.
    """

    above: Segments
    """The common beginning of the names, up to `state`."""
    leaf: str
    """The common last part of the names."""
    names: dict[str, Segments]
    """Stored name -> name of the parameter in the model; empty if the parameters are not known."""
    num_tensors: int
    is_numbered: bool
    """The parameters have numbers instead of names."""
    other_leaves: tuple[str, ...]
    """The last parts of all other names below `above`."""

    @property
    def is_sure(self) -> bool:
        """True if the names show that these are averages of weights, and of which weights."""
        return bool(self.names) and _AVERAGED_STATE.fullmatch(self.leaf) is not None

    @property
    def line(self) -> str:
        """A line for messages."""
        unknown = ", whose parameters are only numbered" if self.is_numbered else ""
        where = f"{join(self.above)}.*.{self.leaf}"
        return f"{escape(where)}: {count(self.num_tensors, 'tensor')}{unknown}"

    @property
    def option(self) -> str:
        """The command-line options that select these tensors."""
        names = in_shell(rf"\.{re.escape(self.leaf)}$=")
        other_leaves = "".join(f" --exclude {in_shell(f'*.{leaf}')}" for leaf in self.other_leaves)
        return f"--root {in_shell(join(self.above))} --rename {names}{other_leaves}"


def _averaged_states(source: SortedNames, model: Located) -> Iterator[_AveragedStates]:
    """Yield optimizer states that may be averages of weights, such as torchtitan's `ema_params` or ASGD's `ax`."""
    shapes = {path: source.tensors[stored].shape for stored, path in model.names.items()}
    in_model, kinds = {join(path) for path in shapes}, dict[tuple[Segments, str], dict[str, Segments]]()
    for name in source.tensors:
        path = clean(name) if name in source.optimizer else ()
        if "state" in path and (is_averaged(path[-1]) or _AVERAGED_STATE.fullmatch(path[-1])):
            place = path.index("state") + 1
            kinds.setdefault((path[:place], path[-1]), {})[name] = path[place:-1]
    for (above, leaf), paths in kinds.items():
        prefix = match_prefix(list(paths.values()), in_model) or ()
        names = {stored: path[len(prefix) :] for stored, path in paths.items()}
        fits = all(source.tensors[stored].shape == shapes.get(path) for stored, path in names.items())
        if fits or not any(path in shapes for path in names.values()):  # else a factored moment or a counter
            is_numbered = all(map(is_number, (path[-1] for path in paths.values() if path)))
            below = (path for path in map(clean, source.tensors) if path[: len(above)] == above)
            other_leaves = tuple(sorted({path[-1] for path in below} - {leaf}))
            yield _AveragedStates(above, leaf, names if fits else {}, len(names), is_numbered, other_leaves)


def _take_states(states: _AveragedStates, model: Located) -> Located:
    """Return averages from an optimizer's state as located weights, in the order of the model's tensors."""
    order = {path: place for place, path in enumerate(model.names.values())}
    names = dict(sorted(states.names.items(), key=lambda item: order[item[1]]))
    located = Located(root=states.above, names=names, aside={model.root: "model"} if model.root else {})
    located.notes.append(f"averaged weights taken from the optimizer's state, {states.line}")
    lacking = [escape(join(path)) for path in order.keys() - set(names.values())]
    if lacking:
        located.warnings.append(
            f"the optimizer has no average of {count(len(lacking), 'tensor')} of the model (tied, frozen or buffers): "
            f"{few(sorted(lacking), 5)}"
        )
    return located


def _find_averages(source: SortedNames, model: Located) -> Segments | _AveragedStates:
    """Return the root of the averaged weights, or the optimizer states that are averaged weights.

    Raises:
        UsageError: there are no averages, several, or only candidates that their names do not identify.
    """
    roots = _averaged_roots(source, model)
    states = list(_averaged_states(source, model))
    averages: list[Segments | _AveragedStates] = [*roots, *(part for part in states if part.is_sure)]
    if len(averages) == 1:
        return averages[0]
    if averages:
        first = averages[0]
        raise UsageError(
            f"--weights ema: the checkpoint holds {len(averages)} sets of averaged weights",
            problems=[
                part.line
                if isinstance(part, _AveragedStates)
                else f"{escape(join(part))}: {count(roots[part], 'tensor')}"
                for part in averages
            ],
            hint=f"choose one, as in {first.option if isinstance(first, _AveragedStates) else root_option(first)}",
        )
    if not states:
        message = "--weights ema: the checkpoint holds no averaged weights"
        raise UsageError(message, problems=list_roots(source))
    raise UsageError(
        "--weights ema: the checkpoint has no averaged weights that can be recognised by their names",
        problems=[part.line for part in states],
        hint="load them with the training code and save the averaged model's state dict"
        if states[0].is_numbered
        else f"if these are averages of weights: {states[0].option}",
    )


def _averaged_roots(source: SortedNames, model: Located) -> Counter[Segments]:
    """Return root -> number of tensors of the parts that are averaged weights: by the format, else by their names."""
    if source.roots.get("ema"):
        root = clean(join(map(str, source.roots["ema"])))
        return Counter(root for path in source.paths.values() if path[: len(root)] == root)
    averages = Counter[Segments]()
    for path in source.paths.values():
        stops = range(1, min(len(path), _MAX_DEPTH + 1))
        stop = next((stop for stop in stops if is_averaged(path[stop - 1])), None)
        if stop is not None and path[:stop] != model.root[:stop]:
            averages[path[:stop]] += 1
    sizes = {
        level: max(len(part.stored) for part in source.below(level).values())
        for level in {root[:-1] for root in averages}
    }
    for root in [root for root in averages if root not in model.aside]:
        if 2 * averages[root] < sizes[root[:-1]]:  # a module of the model
            del averages[root]
    return averages


def _take_dotless(source: SortedNames, located: Located, model: Located) -> bool:
    """Add averaged weights that are stored as buffers to `located`; return False if there are none.

    Their names are the model's without the dots: `layers0weight` for `layers.0.weight`.
    """
    by_dotless = {join(path).replace(".", ""): path for path in model.names.values()}
    children = source.below(located.root)
    dotless = {
        part.stored[0]: by_dotless[name]
        for name, part in children.items()
        if name in by_dotless and not part.is_module
    }
    if 2 * len(dotless) <= len(children) or any(len(path) == 1 for path in dotless.values()):
        return False
    located.names.update(dotless)
    located.notes.append(
        f"{len(dotless)} averaged weights are stored without dots; their names are the model's"
    )
    return True
