"""Names as the tree of modules that they came from, and what stands beside the model in it.

Optimizer, scheduler, random states and averaged weights stand beside the model. Structure tells them first:
the leaves that optimizers keep for each parameter. Then come the names that trainers give to what they save.
Such a name counts only beside or above the model, never for a module inside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardkit.core.catalog import TensorEntry
from shardkit.keys.names import MODULE, Segments, clean, is_number, join


@dataclass(slots=True, kw_only=True)
class Node:
    """A module, a dict of a state dict, or a tensor."""

    path: Segments
    children: dict[str, Node] = field(default_factory=dict)
    """In the order in which they were first seen."""
    entries: list[TensorEntry] = field(default_factory=list)
    """The tensors of exactly this name: more than one where a wrapped and a plain name both exist."""
    num_tensors: int = 0
    """Tensors at and below this node."""
    num_elements: int = 0
    """Elements of all tensors at and below it."""
    is_dict: bool = False
    """The checkpoint says that it was a dict of the saved state dict, not a module."""

    @property
    def is_container(self) -> bool:
        """True for a list of modules: all its children are numbered."""
        return bool(self.children) and not self.entries and all(map(is_number, self.children))

    @property
    def is_module(self) -> bool:
        """True if something lies below it."""
        return bool(self.children)

    def find(self, path: Iterable[str]) -> Node | None:
        """Return the node at a path below this one."""
        node: Node | None = self
        for segment in path:
            if node is None:
                return None
            node = node.children.get(segment)
        return node

    def tensors(self) -> Iterator[tuple[Segments, TensorEntry]]:
        """Yield every tensor at and below this node with its path from the top."""
        stack = [self]
        while stack:
            node = stack.pop()
            for entry in node.entries:
                yield node.path, entry
            stack.extend(reversed(node.children.values()))


def build_tree(
    entries: Iterable[TensorEntry], paths: Mapping[str, tuple[str | int, ...]] | None = None
) -> Node:
    """Return the tree of some tensors' names, without the segments of wrappers.

    Args:
        entries: the tensors, under their stored names.
        paths: path of each name in the state dict that was saved, where it is known.
    """
    top, dicts = Node(path=()), set[tuple[str | int, ...]]()
    joined = _joined_lists(paths or {})
    for entry in entries:
        segments = clean(joined.get(entry.fqn, entry.fqn))
        node = top
        node.num_tensors, node.num_elements = node.num_tensors + 1, node.num_elements + entry.num_elements
        for depth, segment in enumerate(segments, 1):
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = Node(path=segments[:depth])
            node = child
            node.num_tensors += 1
            node.num_elements += entry.num_elements
        node.entries.append(entry)
        path = paths.get(entry.fqn) if paths else None
        if path is not None:
            dicts.add(path[:-1])
    for path in dicts:
        for stop in range(1, len(path) + 1):
            inner = top.find(clean(join(map(str, path[:stop]))))
            if inner is not None:
                inner.is_dict = True
    return top


def _joined_lists(paths: Mapping[str, tuple[str | int, ...]]) -> dict[str, str]:
    """Return the names of the tensors in lists of state dicts as they are without their dict's place in the list.

    A process with several stages of a pipeline saves them so, as `{"model": [first, second]}`. If two names become one,
    they are several models, whose names stay.
    """
    lists = dict[tuple[str | int, ...], dict[str, tuple[str | int, ...]]]()
    for fqn, path in paths.items():
        place = next((place for place, key in enumerate(path) if isinstance(key, int)), 0)
        if place:
            lists.setdefault(path[:place], {})[fqn] = path
    joined = dict[str, str]()
    for above, members in lists.items():
        names = {fqn: join(map(str, (*above, *path[len(above) + 1 :]))) for fqn, path in members.items()}
        places = {path[len(above)] for path in members.values()}
        is_of_dicts = len(places) > 1 and all(len(path) > len(above) + 1 for path in members.values())
        if is_of_dicts and above[-1] != "models" and len(set(names.values())) == len(names):
            joined |= names
    return joined


Kind = Literal["optimizer", "scheduler", "random state", "trainer state", "averaged weights"]

# What one parameter's state is made of: torch.optim, torchao, bitsandbytes, Shampoo, Muon, DeepSpeed.
_STATE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "exp_inf"}
    | {"momentum_buffer", "second_momentum_buffer", "square_avg", "grad_avg", "acc_delta", "exp_avg_slow"}
    | {"state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2", "master_param", "hessian", "prev_grad"}
)
_COUNTERS = frozenset({"step", "eta", "mu", "mu_product", "sum", "step_size", "prev", "ax"})

_OPTIMIZER = re.compile(
    r"(?:\w+_)?(?:optim|optimizer)s?(?:_(?:states?|state_dict|dict|\d+))*|opt_states?|chained_\d+|param_groups"
)
# Megatron-Core has the leaf before the parameter: optimizer.state.exp_avg.decoder.final_layernorm.weight
_LEAF_FIRST = re.compile(
    rf"(?:.*\.)?optimizer\.state\.(?:{'|'.join(sorted(_STATE))}|fp32_param)\..*", re.DOTALL
)
_OPTIMIZER_WORD = re.compile(r"optim(?:izer)?s?(?:states?)?")
_BOTH = frozenset({"and", "model", "models", "weights"})
# They say of a name neither whose it is nor which.
_FILLERS = frozenset(
    "model models weights params parameters state states dict ckpt ckpts checkpoint checkpoints".split()
    + "dcp dist distcp distributed fsdp shard shards sharded".split()
)
_SCHEDULER = re.compile(r"(?:lr_|learning_rate_)?(?:scheduler|sched)s?(?:_(?:states?|state_dict|\d+))*")
_RANDOM = re.compile(r"(?:\w+_)?(?:rng|random)(?:_\w+)?s?")
_TRAINER = re.compile(
    r"(?:train|trainer|client|extra|job)_?states?|(?:\w+_)?(?:dataloader|data_loader|sampler)s?(?:_\w+)?"
    r"|callbacks|loops|progress|(?:grad_)?scaler|hparams|hyper_parameters|timestamps?"
)
_COUNTER = re.compile(
    r"(?:\w+_)?(?:steps?|epochs?|iterations?|iter|seed|seen|lr|loss|version|decay|num_updates|n_averaged|initted)"
    r"(?:_\w+)?"
)
_AVERAGED = re.compile(
    r"(?:\w+_)?(?:ema|swa)(?:_\w+|\d+)?|(?:\w+_)?(?:shadow|averaged)(?:_(?:params|parameters|model|weights))?"
)
# torch.get_rng_state() is 5056 bytes (5048 before 1.9), CUDA's is 16 (816 before 1.13).
_RANDOM_BYTES = frozenset({5056, 5048, 816, 16})
_MAX_NESTED = 8  # segments of one name in a path
_TAIL = 3  # segments that say which parameter of which kind of layer


def optimizer_names(entries: Iterable[TensorEntry], objects: Iterable[str]) -> set[str]:
    """Return the names of tensors that are an optimizer's state for some parameter, by `param_groups` or their leaves.

    What stands in `state` beside `param_groups` is an optimizer's, whatever that is called and keeps. Elsewhere
    leaves tell. One of them is not enough, because averaging modules have buffers of such names too. It takes two,
    or one beside a step count, or one below a name of optimizers. Megatron-Core's stand between these two.

    Args:
        entries: all tensors.
        objects: names of entries that are not tensors.
    """
    entries = list(entries)
    kin: dict[str, list[str]] = {}
    for entry in entries:
        parent, _, leaf = entry.fqn.rpartition(".")
        if leaf in _STATE or leaf in _COUNTERS:
            kin.setdefault(parent, []).append(leaf)
    states = set[str]()
    for parent, leaves in kin.items():
        if any(leaf in _STATE for leaf in leaves) and (
            len(leaves) > 1 or any(map(_OPTIMIZER.fullmatch, parent.split(".")))
        ):
            states.update(f"{parent}.{leaf}" if parent else leaf for leaf in leaves)
    names = [entry.fqn for entry in entries]
    states.update(filter(_LEAF_FIRST.fullmatch, names))
    grouped = {above for name in (*objects, *names) for above in _above("param_groups", name)}
    if grouped:
        states.update(name for name in names if not grouped.isdisjoint(_above("state", name)))
    return states


def _above(segment: str, name: str) -> list[str]:
    """Return the prefixes of a name that end before a segment of this kind."""
    segments = name.split(".") if segment in name else []
    places = [place for place, part in enumerate(segments) if part == segment]
    return [".".join(segments[:place]) for place in places[:_MAX_NESTED]]


def optimizer_path(name: str) -> Segments:
    """Return the path of the optimizer that a state belongs to, as far as the name tells."""
    segments = clean(name)
    for place, segment in enumerate(segments):
        if _OPTIMIZER.fullmatch(segment):
            return segments[: place + 1]
    return segments[: segments.index("state")] if "state" in segments else segments[:1]


def is_optimizers(name: str) -> bool:
    """True for a name that people give to the file or directory of an optimizer (`optim_ckpt`), and of nothing else."""
    words = _words(name)
    is_one = _OPTIMIZER.fullmatch(name) is not None or any(map(_OPTIMIZER_WORD.fullmatch, words))
    return is_one and _BOTH.isdisjoint(words)  # not model_and_optim


def is_optimizer_of(name: str, model: str, *, is_only: bool) -> bool:
    """True if a directory of an optimizer belongs to that of a model, going by their names.

    Args:
        name: of the optimizer's: `optim_ckpt`, `generator_optim`, `optim_step20`.
        model: of the model's: `model_ckpt`, `generator`, `model_step20`.
        is_only: no other model lies beside the two. An optimizer's name that says nothing else fits any model then.
    """
    own, others = (
        [word for word in _words(text) if word not in _FILLERS and not _OPTIMIZER_WORD.fullmatch(word)]
        for text in (name, model)
    )
    numbers, its_numbers = (re.findall(r"[0-9]+", text) for text in (name, model))
    return own == others or (is_only and numbers == its_numbers and not any(map(str.isalpha, own)))


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


def object_kind(segment: str) -> Kind | None:
    """Return the kind of an entry that is not a tensor, by a segment beside or above the model."""
    for pattern, kind in _BY_NAME:
        if pattern.fullmatch(segment):
            return kind
    return None


def kind_beside(
    node: Node, *, siblings: Iterable[Node], is_dict: bool, is_harness: bool, is_inside: bool
) -> Kind | None:
    """Return the kind of a child of a node on the way to the model; None if it may be the model.

    Args:
        node: the child.
        siblings: the children of that level, with or without the child itself.
        is_dict: the children are entries of a saved dict, not modules.
        is_harness: a trainer put this level together: it is such a dict, or holds an optimizer. Names tell
            more there than among the modules of a model.
        is_inside: the checkpoint says that the child is a module. A model may have a `scaler` of its own.
    """
    name = node.path[-1]
    if not node.is_module:
        # AveragedModel of torch has nothing beside these two; a model may have a buffer of that name.
        is_wrappers = name == "n_averaged" and {child.path[-1] for child in siblings} - {name} == {MODULE}
        return _leaf_kind(name, node, is_dict, is_harness or is_wrappers)
    if _AVERAGED.fullmatch(name) and (is_harness or _is_copy(node, siblings)):
        return "averaged weights"
    if is_inside or not (is_harness or node.is_dict):
        return None
    return object_kind(name)


_BY_NAME: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (_OPTIMIZER, "optimizer"),
    (_SCHEDULER, "scheduler"),
    (_RANDOM, "random state"),
    (_TRAINER, "trainer state"),
)


def _leaf_kind(name: str, node: Node, is_dict: bool, is_harness: bool) -> Kind | None:
    entry = node.entries[0]
    if entry.dtype.name == "uint8" and len(entry.shape) == 1:
        has_bytes = entry.num_elements in _RANDOM_BYTES
        is_random = (_RANDOM.fullmatch(name) and (is_harness or has_bytes)) or (is_dict and has_bytes)
        return "random state" if is_random else None
    # A model may have a scalar at its top (CLIP's logit_scale), so beside modules the name has to tell.
    is_count = entry.num_elements <= 1 and (is_dict or (is_harness and _COUNTER.fullmatch(name)))
    return "trainer state" if is_count else None


def is_averaged(name: str) -> bool:
    """True for a name that trainers give to averaged weights (EMA, SWA)."""
    return _AVERAGED.fullmatch(name) is not None


def _is_copy(node: Node, siblings: Iterable[Node]) -> bool:
    """True if most tensors of a node have a counterpart among its siblings, by name and shape.

    Copies that are stored as buffers have names without dots, which contain the path below the sibling.
    """
    others = [
        (path, entry) for sibling in siblings if sibling is not node for path, entry in sibling.tensors()
    ]
    known, depth = {(path[-_TAIL:], entry.shape) for path, entry in others}, len(node.path)
    for start in (depth, depth - 1):
        known |= {(("".join(path[start:]),), entry.shape) for path, entry in others if len(path) > start + 1}
    matched = sum(
        (path[-_TAIL:], entry.shape) in known or (path[depth:], entry.shape) in known
        for path, entry in node.tensors()
    )
    return 2 * matched >= node.num_tensors
