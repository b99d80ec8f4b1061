"""Where the wanted tensors lie in a checkpoint, and their names below that place.

The whole set of names decides where the model begins. The search goes down from the top. On each level it
sets aside what is not the model, and it passes through a level with a single child: `app.model.` and
`state.net.` are such ways to a model. The way ends where several parts stand side by side. If these are the
inside of something that the Hub stores under one name (`model.layers`, `transformer.h`), that one name
belongs to the model and stays. A dict of the saved state dict is never part of the model's names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardkit.core.catalog import TensorEntry
from shardkit.core.text import count, escape, few, in_shell, suggestion
from shardkit.errors import SourceError, UsageError
from shardkit.keys.names import MODULE, PEFT, Segments, clean, is_number, join, match_prefix, split
from shardkit.keys.tree import (
    Node,
    build_tree,
    is_averaged,
    kind_beside,
    object_kind,
    optimizer_names,
    optimizer_path,
)

Path = tuple[str | int, ...]
_WEIGHTS = ("model", "ema", "current")  # kinds of the roots that hold a model's weights
_MAX_DEPTH = 6  # of the roots that are suggested
_MAX_DOTS = 1000  # every part of a name is a node that knows its path
_MAX_CHAIN = 64
_MAX_NAMED = 3  # levels on which parts have names

# Keys that trainers put around a model's state dict. No model has a module of that name.
_HARNESS_WORDS = ("state_dict", "model_state", "model_state_dict", "app", "state", "dcp")
# Keys that people and trainers save a model under, best first.
MODEL_WORDS = ("model", MODULE, *_HARNESS_WORDS, *"net network policy actor student online_model".split())
# The one name above a model without its head on the Hub: base_model_prefix of transformers 5.
_PREFIXES = frozenset(
    "model transformer gpt_neox backbone bert roberta distilbert electra deberta albert mpnet mobilebert longformer"
    " funnel layoutlm luke esm xlnet vit deit beit swin dinov2 convnext resnet clip siglip encoder decoder rwkv".split()
)
# Inkling's language model has all its weights below both, its head too.
_INKLING, _INKLING_HEAD = ("model", "llm"), "unembed"
# What stands side by side inside a model without a head.
_BODY = frozenset(
    "layers embed_tokens norm h wte wpe ln_f word_embeddings embeddings embedding encoder decoder shared embed_in"
    " final_layer_norm norm_f blocks block layer embed_positions pooler visual vision_tower vision_model language_model"
    " text_model multi_modal_projector merger patch_embed tok_embeddings rotary_emb".split()
)
_HEADS = frozenset(
    "lm_head score classifier qa_outputs embed_out cls output output_layer head v_head value_head reward_head proj_out"
    " logits_proj".split()
)
# They stand beside `model` if that is the language model alone (Qwen2-VL on the Hub), else inside it.
_TOWERS = frozenset({"visual", "vision_tower", "audio_tower", "multi_modal_projector"})
_TWINS = frozenset({"text_model", "vision_model"})  # CLIP and similar models
# Leaves of an optimizer's state that are averages of weights. Others with such words may be moments: grad_ema.
_AVERAGED_STATE = re.compile(
    r"(?:ema|swa|avg|averaged?|shadow)_(?:params?|parameters?|weights?|model)"
    r"|(?:params?|parameters?|weights?|model)_(?:ema|swa|avg|averaged)|ax"
)
# What a LightningModule keeps beside the model.
_AIDS = re.compile(
    r"(?:\w+_)?(?:loss|losses|loss_fn|loss_func|criterion|criteria|metrics?|acc|accuracy|auroc|f1|meter)(?:_\w+)?"
    r"|teacher(?:_\w+)?|ref|reference(?:_\w+)?|ref_model|target(?:_\w+)?|critic|value"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedNames:
    """A checkpoint's names, sorted into what may be weights and what is not."""

    tensors: Mapping[str, TensorEntry]
    paths: Mapping[str, Path] | None
    roots: Mapping[str, Path]
    """Paths that the format gives a meaning."""
    optimizer: frozenset[str]
    """Tensors of optimizers."""
    harness: frozenset[Segments]
    """Levels that hold an optimizer, a scheduler or the like."""
    flattened: frozenset[Segments]
    """Those of them where it was no entry of a dict: names alone tell what belongs to a trainer there."""
    is_lightning: bool
    """A LightningModule's state dict: the model is an attribute."""
    tree: Node
    """The tree of every tensor that is not an optimizer's."""


@dataclass(slots=True, kw_only=True)
class Located:
    """The wanted tensors, and what was decided on the way."""

    root: Segments
    names: dict[str, Segments] = field(default_factory=dict)
    """Stored name -> path below the root, without segments of wrappers."""
    aside: dict[Segments, str] = field(default_factory=dict)
    """Path -> kind of each part that was set aside."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def read_source(
    tensors: Mapping[str, TensorEntry],
    objects: Collection[str],
    paths: Mapping[str, Path] | None,
    roots: Mapping[str, Path],
) -> SortedNames:
    """Sort a checkpoint's names. For the arguments see `select_model`.

    Raises:
        SourceError: names have absurdly many parts.
    """
    deep = [name for name in tensors if name.count(".") > _MAX_DOTS]
    SourceError.raise_for(
        list(map(escape, deep)),
        f"{count(len(deep), 'name')} of more than {_MAX_DOTS} dotted parts: no module is nested so deeply",
    )
    optimizer = optimizer_names(tensors.values(), objects)
    foreign = [clean(join(map(str, path))) for kind, path in roots.items() if kind not in _WEIGHTS]
    for prefix in foreign:
        optimizer.update(name for name in tensors if clean(name)[: len(prefix)] == prefix)
    harness, flattened, is_lightning = set[Segments](), set[Segments](), False
    beside = {(optimizer_path(name), _is_entry(optimizer_path(name), name, paths)) for name in optimizer}
    beside |= {(_object_path(name), _is_entry(_object_path(name), name, paths)) for name in objects}
    for path, is_entry in beside:
        if path:
            harness.add(path[:-1])
            if not is_entry:
                flattened.add(path[:-1])
            # Lightning's Trainer alone numbers its optimizers in the state dict.
            is_lightning |= len(path) == 1 and path[0].startswith("optimizer_") and is_number(path[0][10:])
    is_lightning |= tuple(roots.get("model", ())) == ("state_dict",)
    return SortedNames(
        tensors=tensors,
        paths=paths,
        roots=roots,
        optimizer=frozenset(optimizer),
        harness=frozenset(harness),
        flattened=frozenset(flattened),
        is_lightning=is_lightning,
        tree=build_tree((entry for name, entry in tensors.items() if name not in optimizer), paths),
    )


def _object_path(name: str) -> Segments:
    segments = split(name)
    place = next((place for place, segment in enumerate(segments) if object_kind(segment)), None)
    return () if place is None else segments[: place + 1]


def _is_entry(part: Segments, name: str, paths: Mapping[str, Path] | None) -> bool:
    """True if nothing says that the part of the checkpoint with this name was no entry of a saved dict."""
    path = None if paths is None else paths.get(name)
    return path is None or any(clean(join(map(str, path[:stop]))) == part for stop in range(1, len(path) + 1))


def locate_root(source: SortedNames, root: str) -> Located:
    """Return every tensor below a path that a person named.

    Raises:
        UsageError: there is nothing below it.
    """
    path = clean(root.strip(".")) if root.strip(".") else ()
    node = source.tree.find(path)
    if node is None or not node.num_tensors:
        node = build_tree(source.tensors.values()).find(path)  # an optimizer's, if a person asks for it
    if node is None or not (node.is_module or not path):
        paths = [path for path, _ in source.tree.tensors()]
        known = sorted({join(path[:depth]) for path in paths for depth in range(1, _MAX_DEPTH)})
        raise UsageError(
            f"--root {escape(root)!r} is not in the checkpoint{suggestion(join(path), known)}",
            problems=list_roots(source),
            hint="give one of these paths, or leave --root out to have the model found",
        )
    located = Located(root=path)
    _take(located, [node])
    return located


def locate_top(source: SortedNames) -> Located:
    """Return every tensor that does not stand beside the model at the top, for a person's own prefixes."""
    return _below(source, source.tree)


def locate_model(source: SortedNames, base: Collection[str] | None) -> Located:
    """Return the model's tensors: the best match for the base's names, else what the structure shows."""
    start = source.tree
    if "model" in source.roots:
        marked = start.find(clean(join(map(str, source.roots["model"])))) if source.roots["model"] else start
        start = marked or Node(path=())
    if base:
        depth = len(start.path) + 2
        names = [path for path, _ in start.tensors() if not any(map(is_averaged, path[:depth]))]
        prefix = match_prefix(names, base)
        if prefix is not None and prefix[-2:] == PEFT:
            prefix = prefix[:-2]  # keep in the names what tells adapters from other weights
        node = source.tree.find(prefix) if prefix is not None else None
        if node is not None and node.path[: len(start.path)] == start.path:
            return _below(source, node)
    return _find(source, start)


def locate_averaged(source: SortedNames, base: Collection[str] | None) -> Located:
    """Return the averaged weights (EMA), under the names of the model's tensors.

    Raises:
        UsageError: there are none, or several.
        SourceError: they are kept as a list, without names.
    """
    try:
        model = locate_model(source, base)
    except SourceError:  # several models, as of a GAN: one of them alone may have an average
        parts = _parts(source)
        averages = [node.path for name in parts if is_averaged(name) for node in parts[name]]
        model = Located(root=(), aside=dict.fromkeys(averages, "averaged weights"))
    node = _averaged(source, model)
    if isinstance(node, _AveragedStates):
        return _take_states(node, model)
    # What ema-pytorch and torch's AveragedModel keep: the averaged copy, counters, the online model.
    while inner := [
        child for child in node.children.values() if child.is_module and is_averaged(child.path[-1])
    ]:
        node = inner[0]
    tensors = list(node.tensors())
    if all(is_number(segment) for path, _ in tensors for segment in path[len(node.path) :]):
        raise SourceError(
            f"the averaged weights under {escape(join(node.path))} are a list of {len(tensors)} tensors without "
            "names: which parameter each belongs to is known only to the model's code",
            hint="load them with the training code and save the averaged model's state dict",
        )
    located = Located(root=node.path, aside={model.root: "model"} if model.names and model.root else {})
    if _take_dotless(located, node, model):
        return located
    known = {join(path) for path in model.names.values()}
    prefix = match_prefix([path[len(node.path) :] for path, _ in tensors], known)
    if prefix is not None:
        averaged = node.find(prefix)
        assert averaged is not None
        return _below(source, averaged, aside=located.aside)
    return _find(source, node)


def locate_other(source: SortedNames, weights: str) -> Located:
    """Return the weights that the format, or the checkpoint itself, knows under some other name.

    Raises:
        UsageError: nothing has that name.
    """
    if source.roots.get(weights):
        root = join(map(str, source.roots[weights]))
        start = source.tree.find(clean(root))
        return _find(source, start) if start is not None else locate_root(source, root)
    parts = _parts(source)
    chosen = parts.get(weights, [])
    if len(chosen) > 1:
        raise UsageError(
            f"--weights {escape(weights)!r}: {len(chosen)} parts of the checkpoint have that name",
            problems=[f"{_shown(node)}: {count(node.num_tensors, 'tensor')}" for node in chosen],
            hint=f"choose one, as in {_option(chosen[0])}",
        )
    if not chosen and weights.partition(".")[0] in parts:  # nothing says that ema_0.9999 was one key
        chosen = [node for node in [source.tree.find(clean(weights))] if node is not None and node.is_module]
    if chosen:
        return _find(source, chosen[0])
    named = (name for name, nodes in parts.items() if any(_is_announced(source, node) for node in nodes))
    known = list(dict.fromkeys(("model", *(source.roots.keys() - {"optimizer"}), *named)))
    raise UsageError(
        f"--weights {escape(weights)!r}: the checkpoint has no weights of that name{suggestion(weights, known)}",
        problems=list_roots(source),
        hint=f"give --weights {' or '.join(map(repr, known))}; --root takes a path",
    )


def _parts(source: SortedNames) -> dict[str, list[Node]]:
    """Return the parts that a person may name: those beside or above a model, and each of several models.

    Of parts of one name, one inside the other, the outer one is meant.
    """
    named = list[tuple[str, Node]]()
    try:
        model = locate_model(source, None)
    except SourceError:  # several models, and nothing tells which is meant
        pass
    else:
        beside = [source.tree.find(path) for path in model.aside]
        named += [(node.path[-1], node) for node in filter(None, beside)]
        named += [(node.path[-1], node) for node in _on_the_way(source, model.root)]
    level = [source.tree]
    for _ in range(_MAX_NAMED):
        below = list[tuple[str, Node]]()
        for node in level:
            if not node.is_container and not _is_whole(list(node.children.values())):
                below += _named(node)
        named += below
        level = [node for _, node in below if node.is_dict or len(below) == 1]
    parts = dict[str, list[Node]]()
    for name, node in named:
        is_inside = any(node.path[: len(other.path)] == other.path for other in parts.get(name, ()))
        if node.is_module and not is_inside:
            parts.setdefault(name, []).append(node)
    return parts


def _named(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield the modules below a node with their names; the key of a saved dict may have a dot in it."""
    for child in filter(lambda child: child.is_module, node.children.values()):
        keys = [] if child.is_dict else [inner for inner in child.children.values() if inner.is_dict]
        for part in keys or [child]:
            yield join(part.path[len(node.path) :]), part


def _is_announced(source: SortedNames, node: Node) -> bool:
    """True for a part that a list has; a module of a model can be named all the same."""
    if not node.is_dict and any(child.is_dict for child in node.children.values()):
        return False
    return node.is_dict or source.paths is None or _holds_whole(node) or is_averaged(node.path[-1])


def list_roots(source: SortedNames) -> list[str]:
    """Return a line for each path that could be a root, at most a few."""
    lines = []
    for node in source.tree.children.values():
        lines.append(f"{escape(join(node.path))}: {count(node.num_tensors, 'tensor')}")
        if len(node.children) <= 4:
            lines += [
                f"{escape(join(child.path))}: {count(child.num_tensors, 'tensor')}"
                for child in node.children.values()
                if child.is_module
            ]
    return lines[:20]


def _take(located: Located, parts: Collection[Node]) -> None:
    for part in parts:
        for path, entry in part.tensors():
            located.names[entry.fqn] = path[len(located.root) :] or path[-1:]


def _below(source: SortedNames, node: Node, aside: Mapping[Segments, str] | None = None) -> Located:
    """Return everything below a node, without what stands beside the model there."""
    located = Located(root=node.path, aside=dict(aside or {}))
    _take(located, _beside(source, node, located))
    return located


def _beside(source: SortedNames, node: Node, located: Located, *, may_be_dict: bool = False) -> list[Node]:
    """Return the children of a level that may be the model; set aside what stands beside them.

    Args:
        may_be_dict: this level may be a dict of the saved state dict, above the model's own level.
    """
    parts, children = [], list(node.children.values())
    modules = [child for child in children if child.is_module]
    is_dict = may_be_dict and bool(modules) and all(child.is_dict for child in modules)
    is_dict = is_dict and (node is source.tree or any(child.path[-1] in MODEL_WORDS for child in modules))
    is_harness = is_dict or node.path in source.harness
    knows = source.paths is not None and node.path not in source.flattened
    for child in children:
        is_inside = knows and not child.is_dict
        kind = kind_beside(
            child, siblings=children, is_dict=is_dict, is_harness=is_harness, is_inside=is_inside
        )
        if kind is None:
            parts.append(child)
        else:
            located.aside[child.path] = kind
    return parts


def _on_the_way(source: SortedNames, root: Segments) -> list[Node]:
    """Return all nodes on the levels above a root, including those that lead to it."""
    levels = [source.tree.find(root[:depth]) for depth in range(len(root))]
    return [child for level in levels if level is not None for child in level.children.values()]


class _AveragedStates(NamedTuple):
    """What an optimizer keeps for its parameters under one of the names of averages, in their shapes."""

    above: Segments
    """What the names begin with, `state` included."""
    leaf: str
    names: dict[str, Segments]
    """Stored name -> name of the parameter in the model; empty if that is unknown."""
    num_tensors: int
    is_numbered: bool
    """Its parameters have numbers instead of names."""
    others: tuple[str, ...]
    """The last parts of all other names there."""

    @property
    def is_sure(self) -> bool:
        """True if the names tell that these are averages of weights, and of which."""
        return bool(self.names) and _AVERAGED_STATE.fullmatch(self.leaf) is not None

    @property
    def line(self) -> str:
        """A line for people."""
        unknown = ", whose parameters are only numbered" if self.is_numbered else ""
        where = f"{join(self.above)}.*.{self.leaf}"
        return f"{escape(where)}: {count(self.num_tensors, 'tensor')}{unknown}"

    @property
    def option(self) -> str:
        """The options that take them."""
        names = in_shell(rf"\.{re.escape(self.leaf)}$=")
        others = "".join(f" --exclude {in_shell(f'*.{leaf}')}" for leaf in self.others)
        return f"--root {in_shell(join(self.above))} --rename {names}{others}"


def _averaged_states(source: SortedNames, model: Located) -> Iterator[_AveragedStates]:
    """Yield the states of optimizers that may be averages of weights: torchtitan's `ema_params`, `ax` of torch's ASGD."""
    shapes = {path: source.tensors[stored].shape for stored, path in model.names.items()}
    known, kinds = {join(path) for path in shapes}, dict[tuple[Segments, str], dict[str, Segments]]()
    for name in source.tensors:
        path = clean(name) if name in source.optimizer else ()
        if "state" in path and (is_averaged(path[-1]) or _AVERAGED_STATE.fullmatch(path[-1])):
            place = path.index("state") + 1
            kinds.setdefault((path[:place], path[-1]), {})[name] = path[place:-1]
    for (above, leaf), paths in kinds.items():
        prefix = match_prefix(list(paths.values()), known) or ()
        names = {stored: path[len(prefix) :] for stored, path in paths.items()}
        fits = all(source.tensors[stored].shape == shapes.get(path) for stored, path in names.items())
        if fits or not any(path in shapes for path in names.values()):  # else a factored moment, or a count
            is_numbered = all(map(is_number, (path[-1] for path in paths.values() if path)))
            below = (path for path in map(clean, source.tensors) if path[: len(above)] == above)
            others = tuple(sorted({path[-1] for path in below} - {leaf}))
            yield _AveragedStates(above, leaf, names if fits else {}, len(names), is_numbered, others)


def _take_states(states: _AveragedStates, model: Located) -> Located:
    """Take averages from an optimizer's state, in the order of the model's tensors."""
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


def _averaged(source: SortedNames, model: Located) -> Node | _AveragedStates:
    """Return where averaged weights begin, or the states of an optimizer that they are.

    Raises:
        UsageError: there are none, several, or only some whose names do not tell.
    """
    if source.roots.get("ema"):
        paths = [clean(join(map(str, source.roots["ema"])))]
    else:
        way = [node for node in _on_the_way(source, model.root) if node.is_module]  # not n_averaged
        beside = [node.path for node in way if is_averaged(node.path[-1])]
        paths = [path for path, kind in model.aside.items() if kind == "averaged weights"]
        paths += [path for path in beside if path not in paths and path != model.root[: len(path)]]
    nodes = [node for path in paths if (node := source.tree.find(path)) is not None and node.num_tensors]
    states = list(_averaged_states(source, model))
    averages: list[Node | _AveragedStates] = [*nodes, *(part for part in states if part.is_sure)]
    if len(averages) == 1:
        return averages[0]
    if averages:
        raise UsageError(
            f"--weights ema: the checkpoint holds {len(averages)} sets of averaged weights",
            problems=[
                f"{escape(join(part.path))}: {part.num_tensors} tensors"
                if isinstance(part, Node)
                else part.line
                for part in averages
            ],
            hint=f"choose one, as in {_option(averages[0]) if isinstance(averages[0], Node) else averages[0].option}",
        )
    if not states:
        said = "--weights ema: the checkpoint holds no averaged weights"
        raise UsageError(said, problems=list_roots(source))
    raise UsageError(
        "--weights ema: the checkpoint holds no averaged weights that names tell",
        problems=[part.line for part in states],
        hint="load them with the training code and save the averaged model's state dict"
        if states[0].is_numbered
        else f"if these are averages of weights: {states[0].option}",
    )


def _take_dotless(located: Located, node: Node, model: Located) -> bool:
    """Take averaged weights stored as buffers: their names are the model's without the dots."""
    by_dotless = {join(path).replace(".", ""): path for path in model.names.values()}
    dotless = {
        child.entries[0].fqn: by_dotless[segment]
        for segment, child in node.children.items()
        if child.entries and segment in by_dotless
    }
    if 2 * len(dotless) <= len(node.children) or any(len(path) == 1 for path in dotless.values()):
        return False
    located.names.update(dotless)
    located.notes.append(
        f"{len(dotless)} averaged weights are stored without dots; their names are the model's"
    )
    return True


def _find(source: SortedNames, start: Node) -> Located:
    """Return where the model begins at or below `start`.

    Raises:
        SourceError: there are several models, and nothing tells which is meant.
    """
    located, floor, node = Located(root=start.path), start.path, start
    in_lightning, knows_dicts = source.is_lightning, source.paths is not None
    parts = list[Node]()
    for _ in range(_MAX_CHAIN):
        located.root, parts = node.path, _beside(source, node, located, may_be_dict=True)
        at_attribute = in_lightning and not any(child.is_dict for child in parts)
        step = _choose(node, parts, located, is_attribute=at_attribute)
        if step is None:
            break
        if not (step.is_dict or at_attribute or _is_way(step, knows_dicts)):
            if not _knows(step):
                located.notes.append(
                    f"every name begins with {_shown(step)}, which may or may not be the model's own: it was kept; "
                    f"{_option(step)} or --base MODEL decides it"
                )
            break
        if step.is_dict or at_attribute:
            floor, in_lightning = step.path, in_lightning and not at_attribute
        located.aside |= {other.path: "other weights" for other in parts if other is not step}
        node = step
    _give_back_prefix(source.tree, located, floor)
    _take(located, parts)
    return located


def _choose(node: Node, parts: list[Node], located: Located, *, is_attribute: bool) -> Node | None:
    """Return the child that alone holds the model, or None if this is the model's own level."""
    modules = [part for part in parts if part.is_module]
    if len(parts) == 1 and modules:
        # A dict may hold an nn.Sequential, and a wrapper or a LightningModule may be around one: layers without weights
        # leave gaps in its numbers. An nn.ModuleList has none, and is part of the LightningModule, which is the model.
        name, numbers = parts[0].path[-1], parts[0].children
        has_gaps = numbers.keys() != {*map(str, range(len(numbers)))}
        is_model = name in MODEL_WORDS or (has_gaps and name not in _BODY)
        is_around = parts[0].is_dict or name == MODULE or (is_attribute and is_model)
        return None if _is_peft(parts[0]) or (parts[0].is_container and not is_around) else parts[0]
    if node.is_container and modules and all(part.is_dict for part in modules):
        return _one_of(modules, parts, located)
    is_list = node.is_container and not any(part.is_dict for part in modules)  # of a module, not of models
    if is_list or _is_whole(parts):
        return None
    named = _best_named([part for part in modules if part.is_dict])
    if named is not None:
        return _announced(named, parts, located)
    whole = [part for part in modules if _holds_whole(part)]
    if len(whole) > 1:
        return _one_of(whole, parts, located)
    if not whole:
        return None
    others = [part for part in parts if part is not whole[0]]
    if is_attribute or all(_AIDS.fullmatch(part.path[-1]) for part in others):
        return _announced(whole[0], parts, located)
    located.warnings.append(
        f"a whole model stands under {_shown(whole[0])}, beside {_some(others)}: all were taken under the names "
        f"they have; {_option(whole[0])} takes the model alone"
    )
    return None


def _announced(chosen: Node, parts: list[Node], located: Located) -> Node:
    others = [part for part in parts if part is not chosen]
    if others:
        located.notes.append(f"took {_shown(chosen)} as the model; left out beside it: {_some(others)}")
    return chosen


def _one_of(whole: list[Node], parts: list[Node], located: Located) -> Node:
    real = [part for part in whole if not _AIDS.fullmatch(part.path[-1])]
    chosen = _best_named(whole) or (real[0] if len(real) == 1 else None)
    if chosen is not None:
        return _announced(chosen, parts, located)
    raise SourceError(
        f"the checkpoint holds {len(whole)} models, and nothing tells which one is meant",
        problems=[f"{_shown(part)}: {part.num_tensors} tensors" for part in whole],
        hint=f"choose one, as in {_option(whole[0])}; --root '' takes everything as it stands",
    )


def _best_named(nodes: list[Node]) -> Node | None:
    """Return the node with the best of the names that models are saved under."""
    by_word = {node.path[-1]: node for node in nodes}
    return next((by_word[word] for word in MODEL_WORDS if word in by_word), None)


def _is_way(step: Node, knows_dicts: bool) -> bool:
    """True if the only child of a level is on the way to the model, not a part of it."""
    if step.path[-1] == MODULE or _knows(step):
        return True
    return not knows_dicts and step.path[-1] in _HARNESS_WORDS


def _knows(step: Node) -> bool:
    """True if the nodes below look like a model of the Hub."""
    if _holds_whole(step):
        return True
    body = [child for child in _branching(step).children.values() if child.path[-1] in _BODY]
    return len(body) > 1 or any(child.is_container for child in body)


def _holds_whole(node: Node) -> bool:
    children = list(_branching(node).children.values())
    return _is_whole(children) or any(map(_is_peft, children))


def _branching(node: Node) -> Node:
    """Return the first node, from this one down, with several children, a container or PEFT's wrapper."""
    for _ in range(_MAX_CHAIN):
        only = next(iter(node.children.values())) if len(node.children) == 1 else None
        if only is None or not only.is_module or only.is_container or _is_peft(only):
            break
        node = only
    return node


def _is_whole(children: list[Node]) -> bool:
    """True for the children of what the Hub stores: a body with its head."""
    names = {child.path[-1] for child in children}
    deep = {child.path[-1] for child in children if child.is_container or _has_container(child)}
    if not names.isdisjoint(_HEADS) and not deep.isdisjoint(_PREFIXES | _BODY):
        return True
    if names >= _TWINS:
        return True
    return not names.isdisjoint(_TOWERS) and any(map(_is_language_model, children))


def _is_language_model(node: Node) -> bool:
    """True for what stands beside a tower on the Hub. In memory, tower and `language_model` are one body."""
    name = node.path[-1]
    is_named = name == "model" or (name == "language_model" and "model" in node.children)
    return is_named and _has_container(node)


def _has_container(node: Node, depth: int = 4) -> bool:
    return any(
        child.is_container or (depth > 0 and _has_container(child, depth - 1))
        for child in node.children.values()
    )


def _is_peft(node: Node) -> bool:
    return (node.path[-1], *node.children) == PEFT


def _give_back_prefix(top: Node, located: Located, floor: Segments) -> None:
    """Go back up by the one name that the Hub keeps above a model's inside; of Inkling by both."""
    node = top.find(located.root)
    assert node is not None
    inside = list(node.children.values())
    if located.root[len(floor) :][-2:] == _INKLING and _INKLING_HEAD in node.children:
        located.root = located.root[:-2]
    elif len(located.root) > len(floor) and located.root[-1] in _PREFIXES:
        if not _is_whole(inside) and not any(map(_is_peft, inside)):
            located.root = located.root[:-1]


def _some(nodes: list[Node]) -> str:
    return few([f"{_shown(node)} ({node.num_tensors})" for node in nodes], 5)


def _shown(node: Node) -> str:
    return escape(join(node.path))


def _option(node: Node) -> str:
    """Return the option that takes what lies below a node, as a shell reads it."""
    return f"--root {in_shell(join(node.path))}"
