"""Recognise what trainers save besides a model's weights: optimizer, scheduler, random states, counters, averages.

A name's last segment is its *leaf*. Optimizers are recognised by the leaves of a parameter's state (`exp_avg`), and by
their `param_groups`. Everything else is recognised by the names that trainers use for it, which only the tables here
list. Such a name counts only next to or above the model, never for a module inside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from shardkit.core.catalog import TensorEntry
from shardkit.keys.names import Segments, clean

Kind = Literal["optimizer", "scheduler", "random state", "trainer state", "averaged weights"]

# Leaves of a parameter's state in torch.optim, torchao, bitsandbytes, Shampoo, Muon, DeepSpeed.
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
# Words that do not help to match an optimizer's name with its model's.
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
_MAX_NESTED = 8  # occurrences of one segment in a path


def optimizer_names(entries: Iterable[TensorEntry], objects: Iterable[str]) -> set[str]:
    """Return the names of tensors that are an optimizer's state for a parameter.

    Tensors below `state` are an optimizer's if `param_groups` is next to it, whatever their names. Other tensors are
    recognised by their leaves. One such leaf is not enough, because averaging modules have buffers of these names too:
    two are needed, or one and a step count, or one below a name of optimizers. In Megatron-Core's names the leaf comes
    before the parameter.

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
    grouped = {above for name in (*objects, *names) for above in _prefixes_before("param_groups", name)}
    if grouped:
        states.update(name for name in names if not grouped.isdisjoint(_prefixes_before("state", name)))
    return states


def _prefixes_before(segment: str, name: str) -> list[str]:
    """Return the prefixes of a name that end before this segment: for "state" in "a.state.b", "a"."""
    segments = name.split(".") if segment in name else []
    places = [place for place, part in enumerate(segments) if part == segment]
    return [".".join(segments[:place]) for place in places[:_MAX_NESTED]]


def optimizer_path(name: str) -> Segments:
    """Return the path of the optimizer that a state's name contains, as well as it can be found."""
    segments = clean(name)
    for place, segment in enumerate(segments):
        if _OPTIMIZER.fullmatch(segment):
            return segments[: place + 1]
    return segments[: segments.index("state")] if "state" in segments else segments[:1]


def is_optimizer_name(name: str) -> bool:
    """True for the name of a file or directory that has only an optimizer, such as `optim_ckpt`."""
    words = _words(name)
    is_one = _OPTIMIZER.fullmatch(name) is not None or any(map(_OPTIMIZER_WORD.fullmatch, words))
    return is_one and _BOTH.isdisjoint(words)  # not model_and_optim


def is_optimizer_of(name: str, model: str, *, is_only: bool) -> bool:
    """True if, by their names, the directory of an optimizer belongs to the directory of a model.

    Args:
        name: name of the optimizer's directory: `optim_ckpt`, `generator_optim`, `optim_step20`.
        model: name of the model's directory: `model_ckpt`, `generator`, `model_step20`.
        is_only: there is no other model next to the two. An optimizer's name without a word of its own then fits any
            model with the same numbers.
    """
    words, model_words = (
        [word for word in _words(text) if word not in _FILLERS and not _OPTIMIZER_WORD.fullmatch(word)]
        for text in (name, model)
    )
    numbers, its_numbers = (re.findall(r"[0-9]+", text) for text in (name, model))
    return words == model_words or (is_only and numbers == its_numbers and not any(map(str.isalpha, words)))


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


def object_kind(segment: str) -> Kind | None:
    """Return the kind of trainer state that a segment next to or above the model names, or None."""
    for pattern, kind in _BY_NAME:
        if pattern.fullmatch(segment):
            return kind
    return None


_BY_NAME: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (_OPTIMIZER, "optimizer"),
    (_SCHEDULER, "scheduler"),
    (_RANDOM, "random state"),
    (_TRAINER, "trainer state"),
)


def leaf_kind(name: str, entry: TensorEntry, *, has_trainers_name: bool) -> Kind | None:
    """Return the kind of a single tensor next to the model's entry; None if it may be one of the model's.

    Args:
        name: the last segment of its name.
        entry: the tensor.
        has_trainers_name: require a trainer's name for it, because the tensor may also be a parameter.
    """
    if entry.dtype.name == "uint8" and len(entry.shape) == 1:
        is_random = _RANDOM.fullmatch(name) if has_trainers_name else entry.num_elements in _RANDOM_BYTES
        return "random state" if is_random else None
    is_count = entry.num_elements <= 1 and (not has_trainers_name or _COUNTER.fullmatch(name))
    return "trainer state" if is_count else None


def is_averaged(name: str) -> bool:
    """True for a name that trainers give to averaged weights (EMA, SWA)."""
    return _AVERAGED.fullmatch(name) is not None
