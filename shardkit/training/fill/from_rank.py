"""Use the memory of one rank as the source: a state dict that exists only there, after a merge or model surgery."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from shardkit.core.catalog import Catalog, Decoded, OnRead, SourceFile
from shardkit.core.dtypes import BY_NAME
from shardkit.core.keywords import suggests_keywords
from shardkit.core.regions import full_region
from shardkit.core.text import count, escape, listed
from shardkit.errors import IntegrityError, SourceError, UsageError
from shardkit.training.ranks.agree import gather_json, shown_once, world
from shardkit.training.ranks.local import memory_of

StateDict = Mapping[str, Any] | nn.Module
"""The rank's data: names and tensors, or a model that has them."""


class RankSource:
    """The source that `from_rank` returns, for `prepare` and `load_into`."""

    def __init__(self, state: StateDict | None, rank: int) -> None:
        self._state, self.rank = state, rank

    @property
    def is_here(self) -> bool:
        """True on the rank that has the state dict."""
        return world()[0] == self.rank

    @property
    def label(self) -> str:
        """Name of the source for messages."""
        return f"the state dict of rank {self.rank}"

    @property
    def has_state(self) -> bool:
        """True if this rank passed a state dict."""
        return self._state is not None

    def open(self) -> Catalog:
        """Return a catalog of the tensors. Each tensor is turned into bytes when it is read, one at a time.

        Raises:
            UsageError: the state is not a mapping of names to tensors, or a model that is wrapped by FSDP1.
            SourceError: another rank has it; or tensors are not plain, or not all of their values are on this rank; the
                error lists all of them.
        """
        if not self.is_here:
            raise SourceError(f"rank {self.rank} alone holds the state dict")
        return _catalog(_tensors(self._state), self.label)


@suggests_keywords
def from_rank(state_dict: StateDict | None, rank: int = 0) -> RankSource:
    """Return a source for `prepare` or `load_into` in one rank's memory. This rank sends the others their shards.

    Nothing is read before `finalize`. Until then the tensors must not change, and the context keeps them in memory.

    Args:
        state_dict: on the rank with the weights: a mapping of the model's or the Hub's names to tensors, of any dtype,
            device and strides; or a model, whose `state_dict()` is used. None on all other ranks.
        rank: the rank with the weights.

    Returns:
        The source. Every rank must pass it, with the same `rank`. Mistakes are raised on all ranks by the function
        that gets it.
    """
    return RankSource(state_dict, rank)


@shown_once()
def check_sources(source: object) -> None:
    """Compare the sources that the ranks have passed; every rank calls it.

    Raises:
        UsageError: on all ranks: they name different ranks, the named rank has no state dict, or another one has.
    """
    mine = None
    if isinstance(source, RankSource):
        rank = source.rank
        mine = [rank if type(rank) is int else repr(rank), source.has_state]
    answers = gather_json(mine, phase="opening the source")
    if not any(answers):
        return
    hint = "rank R: shardkit.from_rank(state_dict, rank=R); all others: shardkit.from_rank(None, rank=R)"
    if not all(answers) or any(named[0] != answers[0][0] for named in answers):
        raise UsageError(
            "the ranks do not name the same holder of the state dict",
            problems=[
                f"rank {here}: {f'from_rank(..., rank={named[0]})' if named else 'another kind of source'}"
                for here, named in enumerate(answers)
            ],
            hint=hint,
        )
    rank = answers[0][0]
    if type(rank) is not int or not 0 <= rank < len(answers):
        raise UsageError(
            f"from_rank: rank={escape(str(rank))} is none of the {count(len(answers), 'rank')}", hint=hint
        )
    wrong = [
        f"rank {here}: "
        + ("a state dict; it would be ignored" if has else "None, though it is the rank that is named")
        for here, (_, has) in enumerate(answers)
        if has != (here == rank)
    ]
    UsageError.raise_for(wrong, f"from_rank: rank {rank}, and no other, gives the state dict", hint=hint)


def _tensors(state: StateDict | None) -> Mapping[str, Any]:
    if isinstance(state, nn.Module):
        if any(isinstance(module, FullyShardedDataParallel) for module in state.modules()):
            raise UsageError(
                "from_rank: the model is wrapped by FSDP1, and no rank holds all of it",
                hint="save it, and give the checkpoint as the source",
            )
        state = state.state_dict()
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        what = "a mapping with keys that are not text" if isinstance(state, Mapping) else type(state).__name__
        raise UsageError(f"from_rank: expected names and tensors, or a model, found {what}")
    if not any(isinstance(value, torch.Tensor) for value in state.values()):
        raise UsageError(
            f"from_rank: none of {count(len(state), 'entry', 'entries')} is a tensor: {listed(list(state))}",
            hint="give the state dict itself, such as checkpoint['model']",
        )
    return state


def _catalog(state: Mapping[str, Any], label: str) -> Catalog:
    catalog = Catalog(format="memory", directory=label)
    problems = [
        f"{escape(name)}: {reason}" for name, value in state.items() if (reason := _why_refused(value))
    ]
    SourceError.raise_for(
        problems,
        f"{count(len(problems), 'tensor')} of {label} cannot be sent",
        hint="give whole plain tensors: gather DTensors with full_tensor(), dequantise, densify",
    )
    numbers: dict[object, int] = {}
    skipped_names = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            skipped_names.append(name)
            continue
        tensor, dtype = value.detach(), BY_NAME[str(value.dtype).removeprefix("torch.")]
        region = full_region(tuple(tensor.shape))
        nbytes = region.num_elements * dtype.itemsize
        # Tied tensors are one file, so that their values are not compared.
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        place = memory if nbytes else name
        if place not in numbers:
            numbers[place] = len(catalog.files)
            derivation = Decoded(_decoder(tensor, name))
            catalog.files.append(SourceFile(name=name, path=label, size=nbytes, derivation=derivation))
        catalog.add_tensor(name, dtype, region.sizes, iter(((numbers[place], 0, nbytes, region),)))
    catalog.objects = tuple(skipped_names)
    if skipped_names:
        catalog.notes = (f"left out of {label}, because they are not tensors: {listed(skipped_names)}",)
    return catalog


def _why_refused(value: object) -> str | None:
    """Return why a tensor cannot be sent as plain bytes; None for plain tensors and for objects that are no tensors."""
    if not isinstance(value, torch.Tensor):
        return None
    if isinstance(value, DTensor):
        return "a DTensor, of which this rank may hold only a part"
    if type(value) not in (torch.Tensor, nn.Parameter):
        return f"a {type(value).__name__}, which is not a plain tensor"
    if value.is_meta:
        return "on meta, without values"
    if value.layout != torch.strided or value.is_quantized:
        return f"its layout is {value.layout}" if value.layout != torch.strided else "quantised"
    if str(value.dtype).removeprefix("torch.") not in BY_NAME:
        return f"its dtype {value.dtype} is not supported"
    if not _has_memory(value):
        return "its memory was freed"
    return None


def _decoder(tensor: torch.Tensor, name: str) -> Callable[[OnRead], memoryview]:
    def decode(_: OnRead) -> memoryview:
        if not _has_memory(tensor):
            raise IntegrityError(
                f"{escape(name)} of the state dict has no memory any more",
                hint="leave the tensors as they are until finalize has returned",
            )
        with torch.no_grad():
            return memory_of(tensor.cpu().resolve_conj().resolve_neg().contiguous())

    return decode


def _has_memory(tensor: torch.Tensor) -> bool:
    """False if the storage was made smaller than the tensor, for example to free it; a read would be out of bounds."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return not tensor.numel() or end <= tensor.untyped_storage().nbytes()
