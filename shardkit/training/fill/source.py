"""A source of weights, opened for one model: where each tensor lies, and which weights these are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import nn

from shardkit import formats
from shardkit.core.catalog import Catalog, subset
from shardkit.core.regions import Region
from shardkit.core.text import count, escape, listed
from shardkit.errors import ResourceError, ShardkitError
from shardkit.files import manifest, storage
from shardkit.formats.contract import Checkpoint, HubModel
from shardkit.formats.hub.base import saved_key_rules
from shardkit.formats.hub.directory import read_config
from shardkit.formats.recorded import add_checksums
from shardkit.keys.check import refuse_factors
from shardkit.keys.peft import base_name
from shardkit.keys.renaming import KeyRule, apply_key_rules
from shardkit.keys.select import select_model
from shardkit.layout.naming import NameMatch, match_names
from shardkit.training.fill.from_rank import RankSource
from shardkit.training.fill.presharded import METADATA, Presharded, open_presharded
from shardkit.training.ranks.context import ExpectedTensor, KeyRules, Weights, key_rules

# Stored beside packed or scaled values. transformers 5.23, quantizers/: fp8, bitsandbytes, GPTQ, AWQ, MXFP4.
_SCALES = (
    *(".weight_scale_inv", ".weight_scale", ".weight_packed", ".qweight", ".qzeros", ".absmax", ".quant_map"),
    *("_proj_blocks", "_proj_scales", ".SCB"),
)
_NUM_SAMPLES = 64
_SAMPLE_NBYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A source, before it is known which of its tensors are wanted."""

    path: str
    catalog: Catalog
    names: Mapping[str, str]
    """Stored name -> name without the checkpoint's own root, of the weights of its model."""
    select: Callable[[Collection[str]], Catalog]
    identity: Callable[[Catalog], object]
    """Plain data that tells these weights from others, given the catalog of the wanted ones."""
    hub_names: Mapping[str, str] | None = None
    """Stored name -> the Hub's; None where that is not known."""
    may_have_own_names: bool = False
    """Names may also be the model's own; then only those that differ from it are the Hub's."""
    quantised: str | None = None
    presharded: str | None = None
    is_hub: bool = False
    notes: tuple[str, ...] = ()
    open_chunks: Callable[[Mapping[str, Sequence[Region]]], Catalog] | None = None


class Opening:
    """A source that is opened when it is first needed, and once.

    Args:
        source: a Hub directory, file or repo id, a pre-sharded directory, a checkpoint of any trainer, or what
            `from_rank` returned on the rank that holds the state dict.
        revision: branch, tag or commit of a repo id.
        variant: "fp16" takes `model.fp16.safetensors`.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | RankSource,
        *,
        revision: str | None = None,
        variant: str | None = None,
    ) -> None:
        self.source = os.fspath(source) if isinstance(source, os.PathLike) else source
        self._revision, self._variant = revision, variant

    def weights_of(self, wanted: list[str]) -> _Opened:
        """Return what it holds of a model with some names; raises as `open_weights`."""
        content = self._content
        if isinstance(content, Presharded):
            return _of_presharded(str(self.source), content, wanted)
        if isinstance(content, Checkpoint):
            hub = content.hub
            return _of_checkpoint(content, wanted) if hub is None else _of_hub(hub, content.path, wanted)
        assert isinstance(self.source, RankSource)
        return _of_rank(self.source, content, wanted)

    @cached_property
    def _content(self) -> Presharded | Checkpoint | Catalog:
        if isinstance(self.source, RankSource):
            return self.source.open()
        if storage.isdir(self.source) and self._revision is None and self._variant is None:
            presharded = open_presharded(self.source)
            if presharded is not None:
                return presharded
        return formats.open(self.source, revision=self._revision, variant=self._variant)


def open_weights(
    source: str | os.PathLike[str] | RankSource | Opening,
    names: Mapping[str, ExpectedTensor],
    ties: Iterable[Collection[str]] = (),
    *,
    model: nn.Module | None = None,
) -> Weights:
    """Open a source and find the tensors of a model in it; reads none of them.

    `check_fit` tells whether they fit.

    Args:
        source: as for `Opening`.
        names: the model's parameters and buffers; those that no state dict has are not searched for.
        ties: groups of names that are one parameter; the source may have any of them.
        model: where it is a model of transformers, wrapped or not, its own renamings apply.

    Raises:
        SourceError, IntegrityError: nothing there, or it is damaged or incomplete, or holds factors of matrices that
            the model has whole.
        ResourceError: it cannot be read or downloaded.
        UsageError: a revision of something local.
    """
    wanted = {fqn: None for fqn, tensor in names.items() if tensor.persistent}
    for group in ties:
        wanted.update(dict.fromkeys(group if any(name in wanted for name in group) else ()))
    opening = source if isinstance(source, Opening) else Opening(source)
    opened = opening.weights_of(list(wanted))
    found = match_names(
        opened.names,
        wanted,
        shapes={name: opened.catalog.tensors[name].shape for name in opened.names},
        computed=[fqn for fqn, tensor in names.items() if not tensor.persistent],
        model=model,
    )
    catalog = opened.select(list(dict.fromkeys(found.names.values())))
    return Weights(
        path=opened.path,
        catalog=catalog,
        names=found.names,
        identity=_digest([opened.identity(catalog), _samples(catalog)]),
        presharded=opened.presharded,
        unused={name: opened.catalog.tensors[name].shape for name in found.unused},
        made=frozenset(found.made),
        follows_class=found.is_transformers,
        fused=found.fused,
        quantised=opened.quantised or _scales(found.unused),
        notes=(*opened.notes, *_match_notes(found)),
        key_rules=_key_rules(opened, found.names),
        open_chunks=opened.open_chunks,
    )


def _match_notes(found: NameMatch) -> Iterator[str]:
    if found.ignored:
        yield f"left out of the source, the model computes them: {listed(found.ignored)}"
    if found.renamed:
        yield f"{count(found.renamed, 'tensor')} of the source found under other names than the model's"


def first_dtype(source: Opening) -> str | None:
    """Return the dtype that `from_pretrained` takes where a config names none; None where it cannot be told.

    It is the dtype of the first floating tensor by name, in the first file.

    Source: transformers 5.23, modeling_utils, _get_dtype and get_state_dict_dtype.
    """
    try:
        opened = source.weights_of([])
    except ShardkitError:  # opening it in earnest reports this
        return None
    tensors, chunks = opened.catalog.tensors, opened.catalog.chunks

    def place(name: str) -> tuple[str, str]:
        entry = tensors[name]
        file = opened.catalog.files[chunks.file[entry.first_chunk]].name if entry.num_chunks else ""
        return file if opened.is_hub else "", name

    floating = (name for name in opened.names if tensors[name].dtype.is_convertible)
    first = min(floating, key=place, default=None)
    return None if first is None else tensors[first].dtype.name


def _key_rules(opened: _Opened, names: Mapping[str, str]) -> KeyRules | None:
    hub = opened.hub_names
    if hub is None:
        return None
    rules = key_rules({fqn: hub[stored] for fqn, stored in names.items()})
    return rules if rules or not opened.may_have_own_names else None


def _of_presharded(source: str, presharded: Presharded, wanted: list[str]) -> _Opened:
    catalog, digest = presharded.catalog, presharded.digest
    names, _ = _select(catalog, wanted, None)
    return _Opened(
        path=source,
        catalog=catalog,
        names=names,
        hub_names=_renamed(names, presharded.key_rules or ()),
        may_have_own_names=True,  # `reshard` writes what preshard does, under a model's names
        select=lambda names: subset(catalog, names),
        identity=lambda _: {"manifest": digest},
        presharded=source,
        open_chunks=presharded.open_chunks,
    )


def _of_rank(source: RankSource, catalog: Catalog, wanted: list[str]) -> _Opened:
    names, notes = _select(catalog, wanted, None)
    return _Opened(
        path=source.label,
        catalog=catalog,
        names=names,
        hub_names=names,
        may_have_own_names=True,
        select=lambda names: subset(catalog, names),
        identity=lambda _: [source.label],
        notes=(*catalog.notes, *notes),
    )


def _of_hub(model: HubModel, path: str, wanted: list[str]) -> _Opened:
    add_checksums(model.catalog, path)
    if wanted:
        refuse_factors(model.catalog.tensors, wanted)
    return _Opened(
        path=model.directory,
        catalog=model.catalog,
        names={name: name for name in model.catalog.tensors},
        hub_names={name: name for name in model.catalog.tensors},
        select=lambda names: subset(model.catalog, names),
        # Without the repo and its commit: a copy in a directory has the same weights.
        identity=lambda _: [manifest.to_json(file) for file in model.identity.files],
        quantised=_quantisation(model.config),
        is_hub=True,
        notes=model.catalog.notes,
    )


def _of_checkpoint(checkpoint: Checkpoint, wanted: list[str]) -> _Opened:
    names, notes = _select(checkpoint.catalog, wanted, checkpoint)
    config = next((read_config(directory) for directory in checkpoint.assets), None)
    rules = saved_key_rules(checkpoint)
    return _Opened(
        path=checkpoint.path,
        catalog=checkpoint.catalog,
        names=names,
        hub_names=None if rules is None else _renamed(names, rules),
        select=partial(_selected, checkpoint),
        identity=lambda catalog: [_file_digest(checkpoint.catalog.directory), _rows(catalog)],
        quantised=_quantisation(config),
        notes=(*checkpoint.notes, *notes),
    )


def _selected(checkpoint: Checkpoint, names: Collection[str]) -> Catalog:
    catalog = checkpoint.select(names)
    add_checksums(catalog, checkpoint.path)
    return catalog


def _renamed(names: Mapping[str, str], rules: Sequence[KeyRule]) -> dict[str, str]:
    changed = apply_key_rules(rules, names.values()).names
    return {stored: changed.get(name, name) for stored, name in names.items()}


def _select(
    catalog: Catalog, wanted: list[str], checkpoint: Checkpoint | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the weights of a checkpoint's model by stored name, each with its name below the root; no optimizer."""
    if wanted:
        refuse_factors(catalog.tensors, wanted)  # first: otherwise the error would be that names fit nothing
    bases = [base for base in map(base_name, wanted) if base is not None]
    selection = select_model(
        catalog.tensors,
        catalog.objects,
        catalog.paths,
        checkpoint.roots if checkpoint is not None else {},
        base_names=list(dict.fromkeys((*wanted, *bases))),
    )
    return selection.names, (*selection.notes, *selection.unloadable, *selection.warnings)


def _quantisation(config: Mapping[str, object] | None) -> str | None:
    described = (config or {}).get("quantization_config")
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else None
    return f"config.json has a quantization_config ({escape(str(method or 'of no named method'))})"


def _scales(unused: Iterable[str]) -> str | None:
    found = [name for name in unused if name.endswith(_SCALES)]
    return f"{count(len(found), 'tensor')} of scales or packed values: {listed(found)}" if found else None


def _rows(catalog: Catalog) -> list[object]:
    """Return a catalog as plain data without paths and times."""
    table = catalog.chunks
    files = [(file.name, file.size) for file in catalog.files]
    return [
        [
            entry.fqn,
            entry.dtype.name,
            entry.shape,
            [
                (*files[table.file[row]], table.start[row], table.nbytes[row], region)
                for row, region in zip(entry.chunk_ids, table.regions(entry.chunk_ids), strict=True)
            ],
        ]
        for entry in catalog.tensors.values()
    ]


def _file_digest(directory: str) -> str | None:
    """Return a digest of `.metadata`, which has an id of each save; None where there is none."""
    digest = hashlib.sha256()
    try:
        with storage.open_file(os.path.join(directory, METADATA), "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()


def _samples(catalog: Catalog) -> str:
    """Return a digest of a few bytes here and there: all fine-tunes of one model have equal headers."""
    table, digest = catalog.chunks, hashlib.sha256()
    places = [
        (file, table.start[row], table.nbytes[row])
        for row in range(len(table))
        if table.nbytes[row] and not (file := catalog.files[table.file[row]]).decode
    ] or [(file, 0, file.size) for file in catalog.files if not file.decode]
    for file, first, nbytes in places[:: max(len(places) // _NUM_SAMPLES, 1)]:
        start = first + nbytes // 2
        size = min(_SAMPLE_NBYTES, first + nbytes - start)
        try:
            with storage.open_file(file.path, "rb", buffering=0) as stream:
                digest.update(storage.pread(stream.fileno(), size, start))
        except OSError as error:
            raise ResourceError(f"{escape(file.name)}: {error.strerror}") from error
    return digest.hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
