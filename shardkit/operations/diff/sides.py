"""The two sides of diff, A and B: open both checkpoints, and bring their tensors to the same names and the same form.

A *side* is one of the two checkpoints. A quantised side is dequantised if the other is plain, OSFT factors are folded,
and a trainer's fused tensors become the Hub's. Then a tensor of A is compared with the tensor of B that has the same
name.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit import formats
from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.dtypes import CASTS, DType
from shardkit.core.factored import factor_of
from shardkit.core.regions import Shape, blocks, full_region
from shardkit.core.text import MIB, count, escape, listed
from shardkit.errors import SourceError
from shardkit.files import storage, stores
from shardkit.files.links import link_notes
from shardkit.formats.contract import PLAIN, Checkpoint, PlainWeights
from shardkit.formats.dcp.objects import object_lines
from shardkit.formats.dequantize import config_of
from shardkit.formats.folded import floating_targets
from shardkit.formats.hub.base import recorded_derived, recorded_rules
from shardkit.formats.hub.files import refuse_part
from shardkit.formats.quantised import can_dequantize, unmarked_tensors, why_narrow, why_quantised
from shardkit.keys.expressions import rename_leaves
from shardkit.keys.renaming import apply_key_rules
from shardkit.keys.select import Globs, select_model
from shardkit.layout.binding import (
    ClassNames,
    TensorsAtHand,
    bind,
    class_provider,
    manifest_provider,
    name_in_catalog,
    shipped_provider,
)
from shardkit.layout.traced import SAME_IN_MEMORY, ask_class, may_differ_in_memory, why_no_class
from shardkit.operations.diff.options import DiffOptions
from shardkit.operations.resolve import ChosenCheckpoint, ResolvedCheckpoint
from shardkit.operations.ties import place_of, tie_candidates
from shardkit.transfer.codecs.bound import bind as bound_catalog
from shardkit.transfer.codecs.derive import made_by
from shardkit.transfer.codecs.fold import Fold
from shardkit.transfer.plan import flat_source
from shardkit.transfer.sources import Reader, bands, same_bytes

_FOLDED_BYTES = 8 * MIB  # of a folded weight that are in memory at a time; folding takes twice as much again

Names = Mapping[str, str]
"""Name in the model -> stored name."""
_LABELS = ("A", "B")
"""Names of the sides in notes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two checkpoints."""

    given_path: str
    resolved: ResolvedCheckpoint
    checkpoint: Checkpoint
    names: Names
    """Names of the tensors to compare. The name in the model is the Hub's, on both sides."""
    live: Mapping[str, str]
    """Stored name -> name in memory, if known."""
    catalog: Catalog
    """The same tensors, as raw extents."""

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor by its name in the model."""
        return self.catalog.tensors[self.names[name]]

    def bands(self, name: str, reader: Reader, max_elements: int) -> Iterator[memoryview]:
        """Yield a tensor's bytes in bands, runs of elements in row-major order; each view is valid until the next.

        The order is that of the whole tensor, however it is chunked in files. The cuts depend only on shape and
        `max_elements`, so two tensors of the same shape are cut alike.

        Args:
            name: name in the model.
            reader: reads the catalog's files.
            max_elements: maximum elements of a band; a tensor that has to be gathered takes as much memory again.

        Raises:
            IntegrityError, ResourceError: a file cannot be read as described.
        """
        entry = self.entry(name)
        if not entry.num_elements:
            return
        if self.is_folded(name):
            yield from self._folded_bands(entry, reader, max_elements)
            return
        itemsize = entry.dtype.itemsize
        # Flat: the chunks, one behind the other, are the tensor in row-major order. Then its bytes are read straight into
        # the band. Chunks of another form, and bytes that have to be decoded (packed, or computed), are gathered by `bands`;
        # scalars as well, for which it has a case of its own.
        flat = flat_source(entry, self.catalog) if entry.shape else None
        if flat is None:
            whole = full_region(entry.shape)
            yield from bands(self.catalog, entry.fqn, whole, reader, max_elements * itemsize)
            return
        start, buffer = 0, bytearray()
        for block in blocks(entry.shape, max_elements):
            stop = start + block.num_elements
            buffer = buffer or bytearray((stop - start) * itemsize)  # the first block is the largest
            view, offset = memoryview(buffer)[: (stop - start) * itemsize], 0
            for move in flat.moves(start, stop):
                reader.read_into(move.file, view[offset : offset + move.nbytes], move.start, entry.fqn)
                offset += move.nbytes
            yield view
            start = stop

    def is_folded(self, name: str) -> bool:
        """True if the tensor, or a part of it, is stored as factors."""
        return made_by(self.catalog, self.names[name], Fold)

    def _folded_bands(self, entry: TensorEntry, reader: Reader, max_elements: int) -> Iterator[memoryview]:
        """Yield bands of a folded tensor, cut from larger bands, as computing a band takes a pass over all of V."""
        itemsize, whole = entry.dtype.itemsize, full_region(entry.shape)
        most = max(_FOLDED_BYTES // (max_elements * itemsize), 1) * max_elements
        larger = bands(self.catalog, entry.fqn, whole, reader, most * itemsize)
        remaining_bytes = memoryview(b"")
        for block in blocks(entry.shape, max_elements):
            nbytes = block.num_elements * itemsize
            if len(remaining_bytes) < nbytes:
                rest = bytes(remaining_bytes)
                following = next(larger)
                remaining_bytes = memoryview(rest + bytes(following)) if rest else following
            yield remaining_bytes[:nbytes]
            remaining_bytes = remaining_bytes[nbytes:]


def open_sides(
    sources: tuple[ChosenCheckpoint, ChosenCheckpoint], options: DiffOptions
) -> tuple[Side, Side, list[str]]:
    """Open both checkpoints, but only the tensors that are compared.

    Args:
        sources: the checkpoints.
        options: what to compare.

    Returns:
        Both sides, and notes.

    Raises:
        UsageError: a glob matches no name, or the globs leave no tensor.
        SourceError, ResourceError: one of the checkpoints cannot be opened.
    """
    for source in sources:
        refuse_part(source.resolved.path)
    opened = (sources[0].open(), sources[1].open())
    notes = list[str]()
    for side in opened:
        paths = {os.path.relpath(file.path, side.catalog.directory): file.path for file in side.catalog.files}
        notes += (
            link_notes(side.catalog.directory, paths)
            if side.hub is not None and storage.isdir(side.path)
            else ()
        )
    if not options.all_tensors:
        for alike in (_make_both_plain, _fold_factors):
            opened, more_notes = alike(opened)
            notes += more_notes
    notes += [
        f"{label}: {line}"
        for label, checkpoint in zip(_LABELS, opened, strict=True)
        if checkpoint.dcp is not None
        for lines in object_lines(checkpoint.dcp)
        for line in lines
    ]
    named, name_notes = (_name_all if options.all_tensors else _name_model)(opened)
    a, b = (
        Side(
            given_path=stores.as_path(path),
            resolved=resolved.resolved,
            checkpoint=checkpoint,
            names=tensors.names,
            live=tensors.live,
            catalog=checkpoint.select(list(tensors.names.values())),
        )
        for path, resolved, checkpoint, tensors in zip(
            (options.a, options.b), sources, opened, named, strict=True
        )
    )
    if not options.all_tensors:
        a, by_rules = _convert_to_other(a, b, _LABELS[0])
        b, also = _convert_to_other(b, a, _LABELS[1])
        name_notes += [*by_rules, *also]
    globs = Globs(tuple(options.include), tuple(options.exclude))
    globs.check(a.names.keys() | b.names.keys())
    a, b = (
        replace(side, names={name: stored for name, stored in side.names.items() if globs.selects(name)})
        for side in (a, b)
    )
    return a, b, [*notes, *name_notes]


def _make_both_plain(
    opened: tuple[Checkpoint, Checkpoint],
) -> tuple[tuple[Checkpoint, Checkpoint], list[str]]:
    """Dequantise a side if only its weights are quantised. Two quantised sides are compared as they are stored.

    Raises:
        LayoutError: scales do not fit their weights.
    """
    both_tensors = [checkpoint.catalog.tensors for checkpoint in opened]
    why = [why_quantised(tensors) or why_narrow(unmarked_tensors(tensors)) for tensors in both_tensors]
    if (why[0] is None) == (why[1] is None):
        return opened, []
    index = 0 if why[1] is None else 1
    side, other_checkpoint = opened[index], opened[1 - index]
    called, other_called = _LABELS[index], _LABELS[1 - index]
    if not can_dequantize(config_of(side)):
        return opened, [
            f"{called} is quantised in a way that shardkit does not know ({why[index]}), and {other_called} is not: "
            "quantised weights cannot be compared"
        ]
    nbytes = Counter[DType]()
    for entry in other_checkpoint.catalog.tensors.values():
        nbytes[entry.dtype] += entry.nbytes if entry.dtype in CASTS.values() else 0
    dtype = nbytes.most_common(1)[0][0] if nbytes.total() else PLAIN
    plain = formats.open(side, plain=PlainWeights(dtype=dtype))
    number = count(len(plain.remarks.dequantized.names) if plain.remarks.dequantized else 0, "weight")
    opened = (plain, other_checkpoint) if index == 0 else (other_checkpoint, plain)
    return opened, [f"{called}: dequantised to {dtype.name}: {number}"]


def _fold_factors(opened: tuple[Checkpoint, Checkpoint]) -> tuple[tuple[Checkpoint, Checkpoint], list[str]]:
    """Fold the factors of OSFT, unless both sides have factors of the same shapes: these are compared as they are.

    Raises:
        LayoutError: factors are missing, or do not fit each other.
    """
    targets = [floating_targets(side.catalog.tensors) for side in opened]
    if all(targets):
        named, _ = _name_model(opened)
        one, two = (
            {
                name: checkpoint.catalog.tensors[stored].shape
                for name, stored in named[side].names.items()
                if factor_of(name) is not None
            }
            for side, checkpoint in enumerate(opened)
        )
        if one == two:
            return opened, []
    notes = [
        f"{label}: folded from factors of OSFT: {count(len(stored), 'weight')}"
        for label, stored in zip(_LABELS, targets, strict=True)
        if stored
    ]
    return (formats.open(opened[0], folded=True), formats.open(opened[1], folded=True)), notes


def _convert_to_other(side: Side, other_side: Side, label: str) -> tuple[Side, list[str]]:
    """Convert names and shapes of one side to the other's, if its own are a trainer's or those of a model in memory.

    For example, experts that are fused in memory are cut apart if the other side is a Hub model.

    Returns:
        The converted side, and notes.
    """
    # `lone`: names that only this side has; `lacking`: names that only the other has.
    lone, lacking = side.names.keys() - other_side.names.keys(), other_side.names.keys() - side.names.keys()
    side_shapes, other_shapes = (
        _shapes(side.catalog, side.names),
        _shapes(other_side.catalog, other_side.names),
    )
    is_saved = side.checkpoint.hub is None
    is_turned = is_saved and any(
        other_shapes.get(name, shape) != shape for name, shape in side_shapes.items()
    )
    if not (lone and lacking) and not is_turned:
        return side, []
    stored = {side.live.get(fqn, name): fqn for name, fqn in side.names.items()}
    names = {side.live.get(fqn, name): name for name, fqn in side.names.items()}
    unasked = list[str]()
    have = TensorsAtHand(
        shapes={live: side.catalog.tensors[fqn].shape for live, fqn in stored.items()},
        names=names,
        config=other_side.checkpoint.hub.config if other_side.checkpoint.hub is not None else None,
        padding=side.checkpoint.contents.padding,
    )
    providers = [
        manifest_provider(recorded_derived(side.checkpoint)),
        *([shipped_provider] if is_saved else []),
    ]
    providers += [class_provider(lambda _: _ask_class(other_side, unasked.append))]
    binding = bind(have, other_shapes, providers)
    because = [
        f"{label}: tensors that the model's class stores in another form count as other tensors: {why}"
        for why in unasked
    ]
    if set(binding.by.values()) == {"selection"}:
        return side, because
    expressions = {
        name: rename_leaves(expression, stored) for name, expression in binding.expressions.items()
    }
    renamed, derived_tensors = name_in_catalog(expressions, side.catalog.tensors)
    notes = because
    if binding.rules is not None:
        notes.append(
            f"{label}: names turned into the Hub's by the key rules of {escape(binding.rules.title)}"
        )
        if binding.dropped:
            notes.append(f"{label}: not compared, the key rules leave them out: {listed(binding.dropped)}")
    notes += [f"{label}: {note}" for note in binding.notes]
    return replace(side, names=renamed, catalog=bound_catalog(side.catalog, derived_tensors)), notes


def _shapes(catalog: Catalog, names: Names) -> dict[str, Shape]:
    return {name: catalog.tensors[stored].shape for name, stored in names.items()}


def _ask_class(side: Side, on_unasked: Callable[[str], object] = lambda why: None) -> ClassNames | None:
    """Return what a Hub model's class says about its names; None if it cannot be asked, or need not be.

    Args:
        side: the side with the Hub model.
        on_unasked: called with the reason if the class cannot be asked.
    """
    hub = side.checkpoint.hub
    config = {} if hub is None else hub.config or {}
    names_class = config.get("architectures") and config.get("model_type") not in (None, *SAME_IN_MEMORY)
    if names_class and (why := why_no_class(config)) is not None:
        on_unasked(why)
        return None
    if hub is not None and may_differ_in_memory(config):
        shapes = {name: entry.shape for name, entry in hub.catalog.tensors.items()}
        reply = ask_class(hub.directory, shapes)
        return None if reply is None else reply.match
    return None


def find_ties(side: Side, other_side: Side) -> dict[str, str]:
    """Return tensors that only one side has, but that are copies of a tensor that both have.

    Some checkpoints store tied weights once, others under each name. A copy shares its bytes in the file with the other
    tensor; or models tie the two, and their bytes are equal.

    Args:
        side: the side that has the copies.
        other_side: the side that lacks them.

    Returns:
        Name that only `side` has -> name of the equal tensor that both have.

    Raises:
        IntegrityError, ResourceError: a file cannot be read as described.
    """
    lone = [name for name in side.names if name not in other_side.names]
    if not lone:
        return {}
    copies = _same_places(side, other_side, lone)
    open_names = {name for name in lone if name not in copies}
    for tied in (_tied_by_shape, _tied_by_class):
        if open_names <= copies.keys():
            break
        for one, two in tied(side, other_side):
            for name, partner in ((one, two), (two, one)):
                is_open = name in open_names and name not in copies and partner in other_side.names
                if is_open and same_bytes(side.catalog, side.names[name], side.names[partner]):
                    copies[name] = partner
    return copies


def _same_places(side: Side, other_side: Side, lone: Collection[str]) -> dict[str, str]:
    """Return tensors of `lone` whose bytes are, in the file, those of a tensor that both sides have: lone -> that one."""
    common = {
        place: name
        for name in side.names
        if name in other_side.names and (place := place_of(side.catalog, side.names[name])) is not None
    }
    return {
        name: common[place]
        for name in lone
        if (place := place_of(side.catalog, side.names[name])) in common and place
    }


def _tied_by_shape(side: Side, _: Side) -> Iterator[tuple[str, str]]:
    """Yield pairs of names that may be tied: an embedding and an output layer of the same shape, and the like."""
    for name, partners, _is_head in tie_candidates(side.catalog, side.names):
        for partner in partners:
            yield name, partner


def _tied_by_class(side: Side, other_side: Side) -> Iterator[tuple[str, str]]:
    """Yield pairs of names that the class of the other side's config ties in memory."""
    class_names = _ask_class(other_side) if side.checkpoint.hub is None else None
    for group in class_names.ties if class_names is not None else ():
        yield from itertools.combinations([name for name in group if name in side.names], 2)


class SideNames(NamedTuple):
    """Names of the tensors of a side that are compared."""

    names: Names
    live: Mapping[str, str]
    """Stored name -> name in memory, if known."""


def _name_all(opened: tuple[Checkpoint, Checkpoint]) -> tuple[tuple[SideNames, SideNames], list[str]]:
    """Return all tensors of both sides under their stored names, and notes about entries that are not tensors."""
    notes = [
        f"{label}: {count(len(checkpoint.catalog.objects), 'entry', 'entries')} that are not tensors are not compared"
        for label, checkpoint in zip(_LABELS, opened, strict=True)
        if checkpoint.catalog.objects
    ]
    return (_stored_names(opened[0]), _stored_names(opened[1])), notes


def _name_model(opened: tuple[Checkpoint, Checkpoint]) -> tuple[tuple[SideNames, SideNames], list[str]]:
    """Find the model's weights in both checkpoints, and name them alike. The shapes of one side help to name the other."""
    first, second = (1, 0) if opened[1].hub is not None and opened[0].hub is None else (0, 1)
    answers: dict[int, SideNames | str] = {}
    for side, partner in ((first, second), (second, first), (first, second)):
        base = answers.get(partner)
        if not isinstance(answers.get(side), SideNames):
            shapes = _shapes(opened[partner].catalog, base.names) if isinstance(base, SideNames) else None
            answers[side] = _select(opened[side], shapes)
    for side, partner in ((0, 1), (1, 0)):
        answers[side] = _as_on_hub(opened[side], answers[side], answers[partner])
    named = dict[int, SideNames]()
    notes = []
    for side, label in enumerate(_LABELS):
        answer = answers[side]
        named[side] = _stored_names(opened[side]) if isinstance(answer, str) else answer
        if isinstance(answer, str):
            notes.append(f"{label}: tensors go by their stored names: {answer}")
        left_out = len(opened[side].catalog.tensors) - len(named[side].names)
        if left_out:
            notes.append(
                f"{label}: {count(left_out, 'tensor')} beside the model's weights not compared; --all compares all"
            )
    return (named[0], named[1]), notes


def _select(checkpoint: Checkpoint, base: Mapping[str, Shape] | None) -> SideNames | str:
    """Return the names of the model's weights in a checkpoint, or the reason why they cannot be determined."""
    catalog = checkpoint.catalog
    if not catalog.tensors:
        return SideNames({}, {})
    try:
        selection = select_model(
            catalog.tensors, catalog.objects, catalog.paths, checkpoint.contents.roots, base_shapes=base
        )
    except SourceError as error:
        return error.message
    return SideNames({name: stored for stored, name in selection.names.items()}, selection.live)


def _as_on_hub(
    checkpoint: Checkpoint, named: SideNames | str, other_names: SideNames | str
) -> SideNames | str:
    """Return a side's names as its manifest records them from the Hub, if more of these match the other side's names."""
    recorded = recorded_rules(checkpoint)
    if recorded is None or not recorded.rules or isinstance(other_names, str):
        return named
    below = {
        stored: stored.removeprefix(recorded.prefix)
        for stored in checkpoint.catalog.tensors
        if stored.startswith(recorded.prefix)
    }
    renamed = {name: stored for stored, name in apply_key_rules(recorded.rules, below).items()}
    num_common = 0 if isinstance(named, str) else len(named.names.keys() & other_names.names.keys())
    return SideNames(renamed, below) if len(renamed.keys() & other_names.names.keys()) > num_common else named


def _stored_names(checkpoint: Checkpoint) -> SideNames:
    return SideNames({name: name for name in checkpoint.catalog.tensors}, {})
