"""Checkpoints of PEFT models: the adapter by itself, or merged into the weights that it was trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.errors import SourceError, UsageError
from shardkit.files.links import locate
from shardkit.files.strict_json import parse_object, read_small
from shardkit.formats.checkpoint import Checkpoint
from shardkit.formats.hub.base import ADAPTER_CONFIG, Base
from shardkit.keys.peft import PeftNames, classify_peft
from shardkit.operations.consolidate.lora import merged_catalog, plan_merge

STEM = "adapter_model"  # peft 0.21, SAFETENSORS_WEIGHTS_NAME
_VERL_META = "lora_train_meta.json"  # rank, alpha and task type, no more
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """An adapter's settings, as `adapter_config.json` holds them."""

    values: Mapping[str, Any]
    is_whole: bool
    """From an `adapter_config.json`; otherwise what a trainer noted of it."""
    origin: str
    """The file, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The tensors that are going to be written."""

    kind: str
    """"model", "adapter" or "merged"."""
    catalog: Catalog
    """Raw extents."""
    names: dict[str, str]
    """Name in the catalog -> name in the output."""
    adapter_config: bytes | None = None
    """Of an adapter, where its settings are known."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def choose_tensors(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    base: Base | None,
    *,
    merge: bool,
    adapter_config: str | None,
) -> Chosen:
    """Decide what is written of a checkpoint that may hold an adapter.

    Args:
        checkpoint: opened.
        names: stored name -> name in the output, as they were selected.
        base: where an `adapter_config.json` may lie.
        merge: add the adapter to the weights that it was trained on.
        adapter_config: an `adapter_config.json`, or the directory that it lies in, given by a person.

    Raises:
        SourceError: no adapter to merge, one that cannot be, or settings that are not known.
        UsageError: settings for an adapter that is not there.
    """
    peft = classify_peft(names.values())
    if adapter_config is not None and peft.kind == "none":
        raise UsageError("--adapter-config is about an adapter, and the tensors that are taken hold none")
    settings = _find_settings(checkpoint, base, adapter_config) if merge or peft.kind != "none" else None
    if merge:
        return _merged(checkpoint, names, settings)
    if peft.kind == "none":
        return Chosen(kind="model", catalog=checkpoint.select(list(names)), names=dict(names))
    stored = {name: source for source, name in names.items()}
    chosen = {stored[name]: target for name, target in peft.adapter_names.items()}
    catalog = checkpoint.select(list(chosen))
    shapes = {name: catalog.tensors[stored[name]].shape for name in peft.adapter_names}
    content = _config_of(settings, peft, shapes, _repo_of(base))
    return Chosen(
        kind="adapter",
        catalog=catalog,
        names=chosen,
        adapter_config=content,
        notes=tuple(_adapter_notes(peft, settings)),
        warnings=() if content is not None else (_NO_CONFIG,),
    )


_NO_CONFIG = f"there is no {ADAPTER_CONFIG}, and PEFT cannot load an adapter without it: name one with --adapter-config"


def _adapter_notes(peft: PeftNames, settings: Settings | None) -> Iterator[str]:
    if peft.kind == "base+adapter":
        yield (
            "the checkpoint holds an adapter and the weights that it was trained on: the adapter was written; "
            "--merge-lora writes the merged model"
        )
    if peft.others:
        yield f"the adapter {escape(peft.adapter or '')} was taken, beside it: {', '.join(map(escape, peft.others))}"
    if settings is not None and not settings.is_whole:
        yield f"{ADAPTER_CONFIG} was made from {settings.origin} and the names of the tensors: look it over"


def _merged(checkpoint: Checkpoint, names: Mapping[str, str], settings: Settings | None) -> Chosen:
    plan = plan_merge(checkpoint.catalog.tensors, names, settings.values if settings else {})
    catalog = merged_catalog(checkpoint.select(list(names)), plan)
    origin = f", scaled as {settings.origin} says" if settings else ""
    note = f"{len(plan.merges)} tensors have the adapter added to them{origin}"
    return Chosen(kind="merged", catalog=catalog, names=plan.names, notes=(note,))


def _find_settings(checkpoint: Checkpoint, base: Base | None, given: str | None) -> Settings | None:
    """Return the settings from the first place that has some."""
    if given is not None:
        path = os.path.join(given, ADAPTER_CONFIG) if os.path.isdir(given) else given
        if not os.path.lexists(path):
            raise SourceError(
                f"--adapter-config {escape(given)}: there is no {escape(path)}",
                hint=f"give an {ADAPTER_CONFIG}, or the directory that it lies in",
            )
        return Settings(values=_read(path), is_whole=True, origin=escape(given))
    directories = [base.directory] if base else []
    directories += [*checkpoint.assets, checkpoint.catalog.directory, checkpoint.path]
    for name in (ADAPTER_CONFIG, _VERL_META):
        for directory in directories:
            if os.path.isfile(os.path.join(directory, name)):
                values = _read(locate(directory, name))
                return Settings(values=values, is_whole=name == ADAPTER_CONFIG, origin=name)
    return None


def _read(path: str) -> Mapping[str, Any]:
    name = os.path.basename(path)
    return parse_object(read_small(path, name, _MAX_BYTES), name)


def _config_of(
    settings: Settings | None, peft: PeftNames, shapes: Mapping[str, tuple[int, ...]], base: str | None
) -> bytes | None:
    """Return an `adapter_config.json`, which names the base; None where too little is known for one."""
    if settings is None:
        return None
    if settings.is_whole:
        return _dump(settings.values)
    alpha, rank = settings.values.get("lora_alpha"), settings.values.get("r")
    if type(alpha) not in (int, float) or type(rank) is not int or not peft.modules:
        return None
    ranks = {module.path: shapes[module.a][0] for module in peft.modules if module.a and shapes.get(module.a)}
    if set(ranks.values()) - {rank}:
        raise SourceError(
            f"{settings.origin} says rank {rank}, the adapter has {sorted(set(ranks.values()))}",
            hint="name the adapter_config.json of the run with --adapter-config",
        )
    return _dump(
        {
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "lora_alpha": alpha,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": rank,
            "target_modules": sorted({module.path.rpartition(".")[2] for module in peft.modules}),
            "task_type": settings.values.get("task_type"),
            "use_dora": "dora" in peft.methods,
        }
    )


def _repo_of(base: Base | None) -> str | None:
    """Return the repo id that a person gave; a path means nothing to whoever gets the adapter."""
    is_repo = base is not None and base.is_given and base.label != base.directory
    return base.label if base is not None and is_repo else None


def _dump(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
