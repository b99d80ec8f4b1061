"""The experts of DeepSpeed's MoE layers: open their files, and find their fp32 masters in the optimizer's files.

Every expert has a file with its weights, under its number in the whole model:

    layer_L_expert_E_mp_rank_00_model_states.pt     L counts the MoE layers; older versions: expert_E_...

With ZeRO-1 and 2 the fp32 masters are in the optimizer's files, like those of dense parameters. The experts are divided
among `ep_size` expert-parallel ranks. Each of these is a set of `world / ep_size` ranks over which the flat tensor of
its experts is cut. The names in the files are those of rank 0, which number only its own experts. The setting
`use_data_before_expert_parallelism` decides which ranks form a set, but a checkpoint may lack it. So both orders are
tried: in the right one, some masters that are compared equal the values in the experts' files after a cast.

AutoEP, which distributes the experts of a transformers model, stacks those of a rank in one tensor:
`PREFIX.experts.w1`, and w2, w3. In the experts' files, and here, each expert has a tensor of its own:
`PREFIX.experts.w1.E`.

Source: DeepSpeed 0.19, runtime/engine.py (`_save_moe_checkpoint`), utils/groups.py
(`_create_expert_and_data_parallel`) and runtime/zero/stage_1_and_2.py (`_configure_moe_settings`).
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import IntegrityError, SourceError
from shardkit.files.strict_json import open_regular, read_exactly
from shardkit.formats.contract import DamagedFiles
from shardkit.formats.deepspeed.files import (
    ExpertStates,
    ModelStates,
    OptimizerStates,
    StateFiles,
    Tag,
    open_states,
    read_expert_states,
)
from shardkit.formats.deepspeed.zero import masters_of
from shardkit.formats.torchsave.file import TensorRef, TorchFile

_EXPERT = re.compile(r"((?:.*?\.)?(?:deepspeed_experts|experts\.w[123])\.)([0-9]{1,6})((?:\..+)?)", re.DOTALL)
_FORMATS = {"float32": "f", "float64": "d", "float16": "e", "bfloat16": "f"}
_MAX_COMPARED = 256  # elements, of one parameter of each expert-parallel rank
_ROUNDING = 2.0**-7  # of bfloat16, twice
_SMALLEST = 2.0**-23  # of float16, twice
_ANOTHER_SAVE = "the files are of different saves: use another copy of the checkpoint"


def open_experts(tag: Tag, files: StateFiles, main: ModelStates) -> list[ExpertStates]:
    """Open the files of all experts; an empty list if the model has no MoE layers.

    Raises:
        SourceError: lists all missing or damaged files.
    """
    if main.has_own_places:
        raise SourceError(
            f"{escape(main.file.name)}: its experts are placed on ranks by rules of their own (AutoEP)",
            hint="convert it with DeepSpeed's ds_to_universal.py, and give the directory that this makes",
        )
    keys = _required_keys(files, main)
    missing = [_file_name(*key) for key in keys if key not in files.experts]
    if missing:
        raise DamagedFiles(
            f"{escape(tag.directory)}: {len(missing)} of {len(keys)} files of experts are missing",
            {tag.prefix + name: "" for name in missing},
            hint="copy them too; each node may have kept its own",
        )
    return open_states(tag, [files.experts[key] for key in keys], read_expert_states)


def stale_experts(files: StateFiles, main: ModelStates) -> list[str]:
    """Return the names of files of experts that the model does not have."""
    keys = set(_required_keys(files, main))
    return [name for key, name in files.experts.items() if key not in keys]


def _required_keys(files: StateFiles, main: ModelStates) -> list[tuple[int, int]]:
    """Return (layer, expert) of every file that must exist; the layer is -1 if a file is for all layers."""
    counts = dict(enumerate(main.num_experts))
    if counts and files.experts and all(layer < 0 for layer, _ in files.experts):
        counts = {-1: max(counts.values())}
    elif not counts:
        for layer, expert in files.experts:
            counts[layer] = max(counts.get(layer, 0), expert + 1)
    return [(layer, expert) for layer, number in sorted(counts.items()) for expert in range(number)]


def _file_name(layer: int, expert: int) -> str:
    return f"{f'layer_{layer}_' if layer >= 0 else ''}expert_{expert}_mp_rank_00_model_states.pt"


def place_experts(
    tag: Tag, main: ModelStates, optimizers: Sequence[OptimizerStates], experts: Sequence[ExpertStates]
) -> ModelStates:
    """Return the model's file with groups for the whole model, in which every expert has its own number.

    Args:
        tag: the saved state.
        main: the model's file, with the groups of rank 0.
        optimizers: files of all ranks, in order.
        experts: their files.

    Raises:
        IntegrityError: the groups are not those of experts, or the masters do not equal the values in the experts' files.
    """
    main = replace(main, groups=_whole_groups(tag, main, optimizers, experts))
    orders = [replace(main, is_data_first=first) for first in (main.is_data_first, not main.is_data_first)]
    compared = [_compare_experts(tag, order, optimizers, experts) for order in orders]
    best = min(range(len(orders)), key=lambda number: (bool(compared[number][0]), compared[number][1]))
    IntegrityError.raise_for(
        compared[best][0],
        f"{escape(tag.directory)}: the optimizer's masters are not the values of the experts' files",
        hint=_ANOTHER_SAVE,
    )
    return orders[best]


def _whole_groups(
    tag: Tag, main: ModelStates, optimizers: Sequence[OptimizerStates], experts: Sequence[ExpertStates]
) -> list[Mapping[str, Shape]]:
    """Return the groups with the experts of all ranks, one expert-parallel rank after another."""
    numbers: dict[str, set[str]] = defaultdict(set)
    for name in (name for expert in experts for name in expert.tensors):
        if match := _EXPERT.fullmatch(name):
            numbers[match[1]].add(match[2])
    groups, problems = list[Mapping[str, Shape]](), list[str]()
    for number, group in enumerate(map(partial(_unstack, main.stacked), main.groups or ())):
        ep_size = optimizers[0].ep_size_of(number, len(optimizers))
        whole: dict[str, Shape] = {}
        for ep_rank in range(ep_size if ep_size > 1 else 0):
            for name, shape in group.items():
                match = _EXPERT.fullmatch(name)
                total = len(numbers[match[1]]) if match else 0
                if match is None or not total or total % ep_size:
                    problems += [f"{escape(name)}: {ep_size} ranks have one each, files have {total} experts"]
                    continue
                index = int(match[2]) + ep_rank * (total // ep_size)
                whole[f"{match[1]}{index}{match[3]}"] = shape
        groups.append(group if ep_size == 1 else whole)
    IntegrityError.raise_for(
        list(dict.fromkeys(problems)),
        f"{escape(tag.directory)}: its optimizer does not have the experts that lie in files",
        hint=_ANOTHER_SAVE,
    )
    return groups


def _unstack(stacked: Mapping[str, int], group: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return a group in which each of AutoEP's stacked tensors is replaced by one tensor for each expert."""
    unstacked: dict[str, Shape] = {}
    for name, shape in group.items():
        if shape and shape[0] <= stacked.get(name, 0):
            unstacked |= {f"{name}.{index}": shape[1:] for index in range(shape[0])}
        else:
            unstacked[name] = shape
    return unstacked


def _compare_experts(
    tag: Tag, main: ModelStates, optimizers: Sequence[OptimizerStates], experts: Sequence[ExpertStates]
) -> tuple[list[str], float]:
    """Compare masters of experts with their files: all shapes, and some values of one parameter for each set of ranks.

    Returns:
        A line for each expert whose shape or values differ; and the sum of the differences of all compared values.
    """
    try:
        masters = masters_of(main, optimizers, 0, tag.directory)
    except IntegrityError as error:
        return list(error.problems), inf
    files = [rank.file for rank in optimizers]
    stored = {name: (expert.file, ref) for expert in experts for name, ref in expert.tensors.items()}
    largest: dict[tuple[int, ...], str] = {}
    problems, distance = list[str](), 0.0
    for name in filter(_EXPERT.fullmatch, masters):
        shape, ranks = masters[name].shape, tuple(piece.file for piece in masters[name].pieces)
        if name not in stored or stored[name][1].shape != shape:
            problems.append(f"{escape(name)}: its file does not hold {list(shape)}")
        elif ranks not in largest or prod(shape) > prod(masters[largest[ranks]].shape):
            largest[ranks] = name
    for name in largest.values():
        file, ref = stored[name]
        if not ref.is_contiguous or ref.dtype.name not in _FORMATS:
            continue
        piece = masters[name].pieces[0]
        length = min(piece.length, _MAX_COMPARED)
        trained = _read_elements(files[piece.file], piece.tensor, piece.start, length)
        pairs = list(zip(trained, _read_elements(file, ref, 0, length), strict=True))
        distance += sum(abs(a - b) for a, b in pairs if abs(a - b) < inf)
        if any(abs(a - b) > _ROUNDING * abs(a) + _SMALLEST for a, b in pairs):
            problems.append(f"{escape(name)}: {escape(file.name)} holds other values")
    return problems, distance


def _read_elements(file: TorchFile, ref: TensorRef, first: int, count: int) -> tuple[float, ...]:
    """Return elements of a contiguous tensor."""
    size = ref.dtype.itemsize
    with open_regular(file.path, file.name) as (fd, _):
        data = read_exactly(fd, ref.start + first * size, count * size, file.name)
    if ref.dtype.name == "bfloat16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[offset : offset + 2] for offset in range(0, len(data), 2))
    return struct.unpack(f"<{count}{_FORMATS[ref.dtype.name]}", data)
