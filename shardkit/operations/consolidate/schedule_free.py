"""`--weights eval`: compute the weights to publish from a checkpoint saved in training mode of a schedule-free optimizer.

In training mode a parameter is y, a point between the average x and the fast iterate z. The weights to publish are x:
`optimizer.eval()` computes x = lerp(y, z, 1 - 1 / beta1). The optimizer's parameter groups have the mode and beta1, its
states have z.

Source: schedulefree 1.4.1, the `eval` of each class; beta1 is `betas[0]`, or `momentum` for SGD. The states of reference
classes have x itself. Those of the wrapper class lack mode and momentum.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from shardkit.core.catalog import Catalog, carry
from shardkit.core.text import count, escape, listed
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.home import MAX_METADATA, METADATA
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.formats.contract import Checkpoint, DcpFolder, folder_name, listing, parent_folder
from shardkit.formats.contract.optimizer import GROUPS, PARAMS, STATE, OptimizerState
from shardkit.formats.dcp.directory import is_dcp, open_dcp
from shardkit.formats.derived import derive_checkpoint
from shardkit.formats.rankfiles.inside import find_states, settings_in
from shardkit.formats.torchsave.file import open_torch_file
from shardkit.formats.trainers.full_file import is_full_file
from shardkit.keys.trainer_state import is_optimizer_name, is_optimizer_of
from shardkit.transfer.codecs.lerp import Lerp
from shardkit.transfer.sources import same_bytes

EVAL = "eval"
"""Value of `--weights`."""
_MODE, _BETAS, _MOMENTUM = "train_mode", "betas", "momentum"
_NAMES = "param_names"  # beside `params`, where the optimizer was made of named parameters
_SETTINGS = frozenset({_MODE, _BETAS, _MOMENTUM, PARAMS, _NAMES})
_FAST, _AVERAGE = "z", "x"
# timm, torch-optimizer and pytorch_optimizer.
_SLOW = re.compile(r"(?:lookahead_)?slow_(?:params?|buff(?:er)?|weights?)")
_ACCELERATES = (
    "pytorch_model"  # with the number of a model: accelerate's directory beside that of the optimizer
)
_ONE_FILE = frozenset({"full-file", "accelerate-bin"})  # formats whose optimizer is quickly opened
_HINT = "call optimizer.eval() before saving, or load the checkpoint in the training script and do so"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParameterGroup:
    """The settings of a group of parameters; of one parameter if the state is flattened by FQN."""

    name: str
    """Common part of the names of its settings: "optimizer.param_groups.0" for "optimizer.param_groups.0.betas"."""
    values: Mapping[str, object]
    """Settings by the last part of their name."""
    key: str
    """Number of the group, or the FQN of its only parameter."""

    @property
    def names(self) -> dict[str, str | None]:
        """Key of each parameter's state, which is its FQN or a number -> FQN; None if the FQN is unknown."""
        params, names = self.values.get(PARAMS, [self.key]), self.values.get(_NAMES)
        if not isinstance(params, list):
            return {}
        if not isinstance(names, list) or len(names) != len(params):
            names = [param if type(param) is str else None for param in params]
        return dict(zip(map(str, params), names, strict=True))

    @property
    def trains(self) -> bool:
        """True if the weights are those of training."""
        return self.values.get(_MODE) is True

    @property
    def beta(self) -> float | None:
        """beta1; None if it is missing or 0."""
        betas = self.values.get(_BETAS)
        beta = betas[0] if isinstance(betas, (list, tuple)) and betas else self.values.get(_MOMENTUM)
        return float(beta) if type(beta) in (int, float) and beta else None  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Optimizer:
    """The state of an optimizer, with the weights."""

    checkpoint: Checkpoint
    """A checkpoint whose catalog has the weights and the states."""
    settings: Mapping[str, object]
    """Settings of parameter groups by name, such as "optimizer.param_groups.0.betas"."""
    problem: str | None = None
    """Why states cannot be assigned to parameters, escaped for messages."""

    def groups(self) -> dict[tuple[str, str], _ParameterGroup]:
        """Return the group of each parameter, by (prefix of the optimizer, FQN or number of the parameter)."""
        by_name = dict[str, dict[str, object]]()
        for name, value in self.settings.items():
            above, _, leaf = name.rpartition(".")
            if leaf in _SETTINGS:
                by_name.setdefault(above, {})[leaf] = value
        groups = dict[tuple[str, str], _ParameterGroup]()
        for name, values in by_name.items():
            prefix, _, key = f".{name}".partition(f".{GROUPS}.")
            group = _ParameterGroup(name=name, values=values, key=key)
            groups |= {(prefix[1:], state): group for state in group.names}
        return groups

    def states(self, leaf: str) -> dict[tuple[str, str], str]:
        """Return the stored names of all states of one kind, such as "z", by the same keys as `groups`."""
        names = dict[tuple[str, str], str]()
        for name in self.checkpoint.catalog.tensors:
            prefix, mark, rest = f".{name}".partition(f".{STATE}.")
            if mark and rest.endswith(f".{leaf}"):
                names[prefix[1:], rest.removesuffix(f".{leaf}")] = name
        return names


def optimizer_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a warning if the checkpoint was saved in training mode, so that its weights are not those to publish."""
    try:
        optimizer = _open_optimizer(checkpoint, may_take_long=False)
    except ShardkitError:  # the weights alone do not need the optimizer
        return
    modes = {name: value for name, value in optimizer.settings.items() if name.endswith(f".{_MODE}")}
    trains = [name for name, value in modes.items() if value is True]
    if trains:
        yield (
            f"saved in training mode of a schedule-free optimizer ({listed(trains)}): these weights are not those to "
            "publish; --weights eval writes what optimizer.eval() gives"
        )
    elif not modes and (fast := _fast_states(optimizer)):
        yield (
            f"the optimizer's state has z of a schedule-free optimizer ({listed(fast)}), and does not say in which mode "
            "it was saved: in training mode these weights are not those to publish; call optimizer.eval() before saving"
        )
    slow = [name for name in checkpoint.catalog.tensors if _SLOW.fullmatch(name.rpartition(".")[2])]
    if slow:
        yield (
            f"saved by a Lookahead optimizer ({listed(slow)}): these weights are the fast ones, up to k steps past the slow "
            "weights, which are those to publish"
        )


def _fast_states(optimizer: _Optimizer) -> list[str]:
    """Return the names of states that only schedule-free optimizers have: z without n. FTRL has both."""
    ftrl_states = optimizer.states("n")
    return [name for key, name in optimizer.states(_FAST).items() if key not in ftrl_states]


def with_eval_weights(checkpoint: Checkpoint, weights: Collection[str]) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the checkpoint with the weights that `optimizer.eval()` gives, and notes.

    Args:
        checkpoint: the opened checkpoint.
        weights: stored names of the model's tensors.

    Raises:
        UsageError: the checkpoint has no state of a schedule-free optimizer.
        SourceError: the state lacks something that the computation needs; the error names it.
    """
    optimizer = _open_optimizer(checkpoint, may_take_long=True)
    modes = [name for name in optimizer.settings if name.endswith(f".{_MODE}")]
    if not modes and (fast := _fast_states(optimizer)):
        raise SourceError(
            f"--weights eval: the optimizer's mode and beta are not known: there is {listed(fast)}, but no "
            f"{_MODE}",
            hint=_HINT,
        )
    if not modes:
        raise UsageError(
            "--weights eval: the checkpoint has no state of a schedule-free optimizer",
            hint="leave --weights out to take the model's",
        )
    if not any(optimizer.settings[name] is True for name in modes):
        return checkpoint, (
            "--weights eval: the optimizer was in evaluation mode, the weights are x already",
        )
    is_numbered = any(None in group.names.values() for group in optimizer.groups().values())
    if optimizer.problem is not None or is_numbered:
        why = optimizer.problem or "its parameters are only numbered"
        raise SourceError(
            f"--weights eval: which state belongs to which weight is unknown: {why}", hint=_HINT
        )
    codecs, used = _codecs(optimizer, weights)
    note = f"{count(len(codecs), 'weight')} computed as optimizer.eval() of a schedule-free optimizer does"
    return derive_checkpoint(optimizer.checkpoint, codecs, used), (note,)


def _codecs(optimizer: _Optimizer, weights: Collection[str]) -> tuple[dict[str, Lerp], set[str]]:
    """Return the codec of each weight that has to be computed, and the names of states that the result need not have."""
    groups, tensors = optimizer.groups(), optimizer.checkpoint.catalog.tensors
    fast, average = optimizer.states(_FAST), optimizer.states(_AVERAGE)
    averaged_groups = {
        key: group for key, group in groups.items() if group.trains and (key in fast or key in average)
    }
    fqns = {str(group.names[state]) for (_, state), group in groups.items()}
    stored = _weights_of(fqns, weights, tensors)
    codecs, problems = dict[str, Lerp](), list[str]()
    for key, group in averaged_groups.items():
        fqn = str(group.names[key[1]])
        weight, end = stored.get(fqn), average.get(key) or fast[key]
        factor = None if key in average else group.beta
        if weight is None:
            problems.append(f"{escape(end)}: the checkpoint has no weight {escape(fqn)}")
        elif weight not in weights:
            continue  # the user excluded it
        elif factor is None and key not in average:
            problems.append(f"{escape(group.name)}: neither {_BETAS} nor {_MOMENTUM}, or 0")
        elif (tensors[weight].dtype, tensors[weight].shape) != (tensors[end].dtype, tensors[end].shape):
            problems.append(
                f"{escape(end)}: {tensors[end].dtype.name} {list(tensors[end].shape)}, the weight "
                f"{tensors[weight].dtype.name} {list(tensors[weight].shape)}"
            )
        else:
            codecs[weight] = Lerp(
                start=weight,
                end=end,
                weight=None if factor is None else 1 - 1 / factor,
                dtype=tensors[weight].dtype,
                shape=tensors[weight].shape,
            )
    SourceError.raise_for(
        list(dict.fromkeys(problems)),
        "--weights eval: the weights cannot be computed from the optimizer's state",
        hint=_HINT,
    )
    lone = [name for name in weights if name not in codecs and name not in stored.values()]
    return codecs | _tied_codecs(optimizer.checkpoint, codecs, lone), {*fast.values(), *average.values()}


def _weights_of(fqns: Collection[str], weights: Collection[str], tensors: Collection[str]) -> dict[str, str]:
    """Return FQN -> stored name of each parameter. Stored names are a prefix + FQN; the most frequent prefix is used.

    {"layers.0.w": "model.layers.0.w"}, if stored names begin with "model.".

    Args:
        fqns: FQNs of the optimizer's parameters.
        weights: stored names of the tensors to write.
        tensors: all stored names.
    """
    roots = Counter[str]()
    for name in weights:
        segments = name.split(".")
        for depth in range(len(segments)):
            if ".".join(segments[depth:]) in fqns:
                roots[".".join((*segments[:depth], ""))] += 1
    root = roots.most_common(1)[0][0] if roots else ""
    return {fqn: root + fqn for fqn in fqns if root + fqn in tensors}


def _tied_codecs(
    checkpoint: Checkpoint, codecs: Mapping[str, Lerp], lone: Collection[str]
) -> dict[str, Lerp]:
    """Return the codecs of further names of tied weights, which are equal copies and have no state of their own.

    Args:
        checkpoint: the opened checkpoint.
        codecs: codecs of the weights that have a state.
        lone: stored names of weights without a state.
    """
    tensors, tied = checkpoint.catalog.tensors, dict[str, Lerp]()
    for name in lone:
        key = (tensors[name].dtype, tensors[name].shape)
        for weight, codec in codecs.items():
            if key == (codec.dtype, codec.shape) and len(codec.shape) > 1:
                if same_bytes(checkpoint.select([name, weight]), name, weight):
                    tied[name] = replace(codec, start=name)
                    break
    return tied


def _open_optimizer(checkpoint: Checkpoint, *, may_take_long: bool) -> _Optimizer:
    """Return the state of the optimizer; without settings if it cannot be a schedule-free one.

    Args:
        checkpoint: the opened checkpoint.
        may_take_long: open the state even if each rank has its own file.

    Raises:
        SourceError, IntegrityError, ResourceError: as opening does.
    """
    if checkpoint.dcp is not None:
        settings = _read_settings(checkpoint.dcp)
        directory = _directory_beside(checkpoint)
        if settings or directory is None or not _names_mode(directory):
            return _Optimizer(checkpoint=checkpoint, settings=settings)
        folder = open_dcp(directory)
        settings = _read_settings(folder)
        return _Optimizer(
            checkpoint=_with_states(checkpoint, folder.catalog, folder.select), settings=settings
        )
    if checkpoint.contents.optimizer is not None and (may_take_long or checkpoint.format in _ONE_FILE):
        opened = checkpoint.contents.optimizer()
        if not isinstance(opened, OptimizerState):
            problem = None if checkpoint.format == "full-file" else opened.reason
            return _Optimizer(checkpoint=checkpoint, settings=opened.settings, problem=problem)
        if opened.has_model:
            return _Optimizer(checkpoint=checkpoint, settings=opened.settings)
        joined = _with_states(checkpoint, opened.catalog, lambda _: opened.catalog)
        return _Optimizer(checkpoint=joined, settings=opened.settings)
    return _Optimizer(
        checkpoint=checkpoint, settings=_settings_beside_hub_model(checkpoint), problem="it only numbers them"
    )


def _read_settings(folder: DcpFolder) -> dict[str, object]:
    """Return the settings of schedule-free parameter groups. Without a `train_mode` among the names, nothing is read."""
    names = [name for name in folder.objects if f".{GROUPS}." in f".{name}"]
    if not any(name.endswith(f".{_MODE}") for name in names):
        return {}
    settings = dict[str, object]()
    for name in names:
        place = folder.objects[name]
        if name.rpartition(".")[2] in _SETTINGS and place is not None and not place.transforms:
            file = folder.catalog.files[place.file]
            settings[name] = open_torch_file(file.path, file.name, (place.start, place.nbytes)).tree
    return settings


def _directory_beside(checkpoint: Checkpoint) -> str | None:
    """Return the DCP directory of the optimizer beside that of the model, or None.

    Directories above the opened path are not listed, unless it has accelerate's name for a model.
    """
    directory = checkpoint.catalog.directory
    home, model = parent_folder(directory), folder_name(directory)
    opened = os.path.join(storage.absolute(checkpoint.path), "")
    if not os.path.join(home, "").startswith(opened) and not model.startswith(_ACCELERATES):
        return None
    names = [
        name
        for name in listing(home)
        if is_optimizer_name(name)
        and is_optimizer_of(name, model, is_only=True)
        and is_dcp(os.path.join(home, name))
    ]
    return os.path.join(home, names[0]) if len(names) == 1 else None


def _names_mode(directory: str) -> bool:
    """True if a directory's `.metadata` contains "train_mode". Searching is fast; parsing takes seconds with many ranks."""
    path = os.path.join(directory, METADATA)
    if not storage.isfile(path):
        return False
    with open_regular(path, METADATA) as (fd, size):
        return size <= MAX_METADATA and _MODE.encode() in bytes(read_exactly(fd, 0, size, METADATA))


def _with_states(
    checkpoint: Checkpoint, states: Catalog, select: Callable[[Collection[str]], Catalog]
) -> Checkpoint:
    """Return a checkpoint whose catalog has the optimizer's states, too.

    Args:
        checkpoint: the weights.
        states: catalog of the states, whose records need not be open.
        select: `Checkpoint.select` of the states.
    """
    model_catalog = checkpoint.catalog
    more = {name: name for name in states.tensors if name.endswith((f".{_FAST}", f".{_AVERAGE}"))}

    def select_both(names: Collection[str]) -> Catalog:
        weights = [name for name in names if name in model_catalog.tensors]
        state_names = {name: name for name in names if name in more}
        return carry(checkpoint.select(weights), weights, select(list(state_names)), state_names)

    catalog = carry(model_catalog, list(model_catalog.tensors), states, more)
    catalog.objects, catalog.notes, catalog.metadata_crc32 = (
        model_catalog.objects,
        model_catalog.notes,
        model_catalog.metadata_crc32,
    )
    return replace(checkpoint, catalog=catalog, select=select_both, dcp=None)


def _settings_beside_hub_model(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the settings of an optimizer file beside the weights of a Hub model, as transformers' Trainer saves it."""
    settings = dict[str, object]()
    for name in listing(checkpoint.path) if checkpoint.hub is not None else ():
        path = os.path.join(checkpoint.path, name)
        if is_optimizer_name(os.path.splitext(name)[0]) and storage.isfile(path) and is_full_file(path):
            settings |= settings_in(find_states(open_torch_file(path, name).tree))
    return settings
