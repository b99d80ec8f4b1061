"""What trainers keep beside a model's weights: optimizer, scheduler, random states, counters, averages of the weights.

Optimizers are known by the leaves that they keep for each parameter, and by their `param_groups`. Everything else goes by
the names that trainers give to what they save: the tables here are the only ones. Such a name counts beside or above
the model, never for a module inside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from shardkit.core.catalog import TensorEntry
from shardkit.keys.names import Segments, clean

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
    words, model_words = (
        [word for word in _words(text) if word not in _FILLERS and not _OPTIMIZER_WORD.fullmatch(word)]
        for text in (name, model)
    )
    numbers, its_numbers = (re.findall(r"[0-9]+", text) for text in (name, model))
    return words == model_words or (is_only and numbers == its_numbers and not any(map(str.isalpha, words)))


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


def object_kind(segment: str) -> Kind | None:
    """Return the kind of an entry that is not a tensor, by a segment beside or above the model."""
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
    """Return the kind of a tensor that stands by itself where a trainer keeps more than the model; None if it may be the model's.

    Args:
        name: its last segment.
        entry: the tensor.
        has_trainers_name: only such a name tells, because the tensor may as well be a parameter.
    """
    if entry.dtype.name == "uint8" and len(entry.shape) == 1:
        is_random = _RANDOM.fullmatch(name) if has_trainers_name else entry.num_elements in _RANDOM_BYTES
        return "random state" if is_random else None
    is_count = entry.num_elements <= 1 and (not has_trainers_name or _COUNTER.fullmatch(name))
    return "trainer state" if is_count else None


def is_averaged(name: str) -> bool:
    """True for a name that trainers give to averaged weights (EMA, SWA)."""
    return _AVERAGED.fullmatch(name) is not None
