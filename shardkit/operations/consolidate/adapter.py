"""Checkpoints of PEFT models: write the adapter alone, or merge it into the weights that it was trained on (`merge`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardkit.core.catalog import Catalog
from shardkit.core.text import count, escape, listed
from shardkit.errors import SourceError, UsageError
from shardkit.files import storage
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.adapter import (
    ADAPTER_CONFIG,
    AdapterSettings,
    base_of_adapter,
    find_settings,
    is_adapter,
    merge_command,
    read_settings,
)
from shardkit.formats.hub.base import Base, recorded_names, settings_directories
from shardkit.keys.expressions import FusedTensors
from shardkit.keys.peft import (
    PeftNames,
    base_names_to_save,
    classify_peft,
    find_misfits,
)
from shardkit.operations.consolidate.adapted import base_warnings
from shardkit.operations.consolidate.assets import dump_config
from shardkit.operations.consolidate.headers import is_diffusers_lora
from shardkit.operations.consolidate.merge import plan_merge
from shardkit.transfer.codecs.derive import derive

STEM = "adapter_model"  # peft 0.21, SAFETENSORS_WEIGHTS_NAME
_BY_PEFT = "PEFT merges it into a separate model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTensors:
    """The tensors to write."""

    kind: str
    """"model", "adapter" or "merged"."""
    catalog: Catalog
    """Its records need not be open."""
    names: dict[str, str]
    """Name in the catalog -> name in the output."""
    adapter_config: bytes | None = None
    """Content of `adapter_config.json`; None for a model, or if the settings are unknown."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    keys: str | None = None
    """Name of the rule set that gave the Hub's names."""
    why_not_rules: tuple[str, ...] = ()
    """Why rule sets that match all or most names were not applied."""
    split: tuple[FusedTensors, ...] = ()
    """Tensors that are split into several."""
    origins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name in the catalog of a tensor that is computed from stored ones -> their names."""
    by: Mapping[str, str] = field(default_factory=dict)
    """Name in the output -> who decided it, as in `NamedTensor`; names that `keys.select` gave are missing."""


def choose_tensors(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    base: Base | None,
    *,
    merge: bool,
    adapter_config: str | None,
) -> ChosenTensors:
    """Choose the tensors to write: all of a model; only the adapter of a PEFT model; or the merged model.

    Args:
        checkpoint: the opened checkpoint.
        names: stored name -> name in the output, of the selected tensors.
        base: the base, whose directory may have an `adapter_config.json`; or None.
        merge: add the adapter to the weights that it was trained on.
        adapter_config: an `adapter_config.json`, or its directory, that the user named; or None.

    Raises:
        SourceError: there is no adapter to merge, it cannot be merged, or its settings are not known.
        UsageError: the user named settings, but there is no adapter.
    """
    keeps_names = all(name == stored for stored, name in names.items())
    if keeps_names and is_diffusers_lora(checkpoint) and not merge and adapter_config is None:
        return ChosenTensors(kind="adapter", catalog=_deferred(checkpoint, list(names)), names=dict(names))
    of_base = None if base is None else base.tensors
    base_names = of_base if of_base is not None else recorded_names(checkpoint).names
    peft = classify_peft(names.values(), base_names or ())
    if adapter_config is not None and peft.kind == "none":
        raise UsageError("--adapter-config is about an adapter, and the chosen tensors hold none")
    settings = _settings_of(checkpoint, base, adapter_config) if merge or peft.kind != "none" else None
    if merge:
        if peft.kind == "adapter":
            raise _adapter_alone(checkpoint, base)
        return _merged(checkpoint, names, settings)
    if peft.kind == "none":
        return ChosenTensors(kind="model", catalog=_deferred(checkpoint, list(names)), names=dict(names))
    _refuse_shira(peft, names.values(), settings)
    stored = {name: source for source, name in names.items()}
    entries = checkpoint.catalog.tensors
    stored_shapes = {
        name: entries[source].shape for name, source in stored.items() if entries[source].dtype.is_convertible
    }
    shapes_in_base = {
        name: tensor.shape for name, tensor in (of_base or {}).items() if tensor.dtype.is_convertible
    }
    extra_names = base_names_to_save(peft, stored_shapes, settings.values if settings else {}, shapes_in_base)
    chosen = {stored[name]: target for name, target in (peft.adapter_names | extra_names).items()}
    catalog = _deferred(checkpoint, list(chosen))
    shapes = {name: catalog.tensors[stored[name]].shape for name in peft.adapter_names}
    _refuse_cut(peft, {**stored_shapes, **shapes}, settings, shapes_in_base)
    content = _config_of(settings, peft, shapes, _repo_of(base))
    values = settings.values if settings else {}
    other_base = base_warnings(checkpoint, stored, peft, {*peft.adapter_names, *extra_names}, values, base)
    return ChosenTensors(
        kind="adapter",
        catalog=catalog,
        names=chosen,
        adapter_config=content,
        notes=tuple(_adapter_notes(peft, settings if content is not None else None, extra_names)),
        warnings=(*other_base, *(() if content is not None else (_NO_CONFIG,))),
    )


def _deferred(checkpoint: Checkpoint, names: list[str]) -> Catalog:
    """Return a catalog of some tensors, whose records are opened only later if the format allows it."""
    dcp = checkpoint.dcp
    is_plain = dcp is not None and checkpoint.select == dcp.select
    return dcp.defer(names) if dcp is not None and is_plain else checkpoint.select(names)


_NO_CONFIG = (
    f"there is no {ADAPTER_CONFIG}, without which PEFT cannot load an adapter: name one with --adapter-config"
)


def _refuse_cut(
    peft: PeftNames,
    shapes: Mapping[str, tuple[int, ...]],
    settings: AdapterSettings | None,
    base: Mapping[str, tuple[int, ...]],
) -> None:
    """Refuse an adapter whose shapes do not fit its settings, as if one rank had saved only its rows.

    Args:
        peft: the adapter's tensors.
        shapes: by name in the output, of all tensors in the checkpoint.
        settings: the adapter's settings. Without all of them nothing is compared.
        base: shapes in the base, if known.
    """
    problems = find_misfits(peft, shapes, settings.values, base) if settings and settings.is_complete else []
    SourceError.raise_for(
        problems,
        f"{count(len(problems), 'module')} of the adapter have other shapes than its settings and its base call for",
        hint=f"perhaps one rank saved only its own rows: consolidate a sharded checkpoint of the run, or save it "
        f"again with all rows gathered; if the shapes are right, name the {ADAPTER_CONFIG} of the run with --adapter-config",
    )


def _refuse_shira(peft: PeftNames, names: Iterable[str], settings: AdapterSettings | None) -> None:
    """Refuse a ShiRA adapter without the positions that its numbers belong to: PEFT would choose other positions.

    A state dict lacks them; PEFT finds them again by the `random_seed` in the settings.
    """
    is_lacking = "shira" in peft.methods and not any("shira_indices" in name for name in names)
    if is_lacking and (settings is None or settings.values.get("random_seed") is None):
        raise SourceError(
            "the checkpoint lacks the places that ShiRA changes, and the adapter's settings have no random_seed by which "
            "PEFT finds them again",
            hint="call save_pretrained of the PeftModel in the training job, which saves them; if a seed was set, "
            f"--adapter-config names the {ADAPTER_CONFIG} of the run",
        )


def _adapter_notes(
    peft: PeftNames, settings: AdapterSettings | None, extra_names: Mapping[str, str]
) -> Iterator[str]:
    """Yield notes on what an adapter's files contain, and what was left out.

    Args:
        peft: the adapter's tensors.
        settings: those of which `adapter_config.json` was made; None if there is no such file.
        extra_names: other tensors that PEFT saves with the adapter: name in the model -> name in the adapter's file.
    """
    if peft.kind == "base+adapter":
        yield (
            "the checkpoint holds an adapter and the weights that it was trained on: the adapter was written; "
            "--merge-lora writes the merged model"
        )
    if extra_names:
        kinds = "biases that were trained, or rows of a vocabulary that is not the base's"
        yield f"in the adapter's file, as PEFT saves them: {listed(list(extra_names.values()))} ({kinds})"
    if peft.other_adapters:
        yield f"of several adapters, {escape(peft.adapter or '')} was written, not {', '.join(map(escape, peft.other_adapters))}"
    if settings is not None and not settings.is_complete:
        yield f"{ADAPTER_CONFIG} was made from {settings.origin} and the names of the tensors: check it"


def _merged(
    checkpoint: Checkpoint, names: Mapping[str, str], settings: AdapterSettings | None
) -> ChosenTensors:
    """Return the tensors of the base with the adapter added to them; they are computed when they are read."""
    plan = plan_merge(checkpoint.catalog.tensors, names, settings.values if settings else {})
    catalog = derive(checkpoint.select(list(names)), plan.merges, plan.adapter_names)
    origin = f", scaled as {settings.origin} says" if settings else ""
    note = f"the adapter was added to {len(plan.merges)} tensors{origin}"
    return ChosenTensors(kind="merged", catalog=catalog, names=plan.names, notes=(note,))


def _adapter_alone(checkpoint: Checkpoint, base: Base | None) -> SourceError:
    """Return the error for `--merge-lora` if the checkpoint has only the adapter, not the weights to merge it into."""
    hint = merged_by_peft(checkpoint, base)
    if is_diffusers_lora(checkpoint):
        hint = "diffusers merges it: load_lora_weights of its pipeline, then fuse_lora()"
    elif hint is None:
        command = merge_command(
            "ADAPTER", base.label if base is not None and base.is_given else None, "merged"
        )
        hint = f"write the adapter without --merge-lora first; {_BY_PEFT}: {command}"
    return SourceError(
        f"{escape(checkpoint.path)}: an adapter alone, without the weights that it was trained on", hint=hint
    )


def merged_by_peft(checkpoint: Checkpoint, base: Base | None) -> str | None:
    """Return a hint with the command by which PEFT merges an adapter in its own files; None for other checkpoints."""
    if checkpoint.hub is None or not is_adapter(storage.listdir(checkpoint.hub.directory)):
        return None
    directory = checkpoint.hub.directory
    model = base.label if base is not None and base.is_given else base_of_adapter(directory)
    return f"{_BY_PEFT}: {merge_command(directory, model, 'merged')}"


def _settings_of(
    checkpoint: Checkpoint, base: Base | None, adapter_config: str | None
) -> AdapterSettings | None:
    """Return the adapter's settings: those that the user named, else from the first directory that has some, or None."""
    if adapter_config is not None:
        path = (
            os.path.join(adapter_config, ADAPTER_CONFIG) if storage.isdir(adapter_config) else adapter_config
        )
        if not storage.lexists(path):
            raise SourceError(
                f"--adapter-config {escape(adapter_config)}: there is no {escape(path)}",
                hint=f"give an {ADAPTER_CONFIG}, or its directory",
            )
        return AdapterSettings(values=read_settings(path), is_complete=True, origin=escape(adapter_config))
    places = (*checkpoint.contents.assets, checkpoint.catalog.directory, checkpoint.path)
    own_places = settings_directories(checkpoint) if base is not None and base.own_files is not None else ()
    return find_settings([*own_places, *([base.directory] if base else []), *places])


def _config_of(
    settings: AdapterSettings | None, peft: PeftNames, shapes: Mapping[str, tuple[int, ...]], base: str | None
) -> bytes | None:
    """Return the content of `adapter_config.json`, with the base's name; None if too little is known."""
    if settings is None:
        return None
    if settings.is_complete:
        return dump_config(settings.values)
    alpha, rank = settings.values.get("lora_alpha"), settings.values.get("r")
    if type(alpha) not in (int, float) or type(rank) is not int or not peft.modules:
        return None
    ranks = {module.path: shapes[module.a][0] for module in peft.modules if module.a and shapes.get(module.a)}
    if set(ranks.values()) - {rank}:
        raise SourceError(
            f"{settings.origin} says rank {rank}, the adapter has {sorted(set(ranks.values()))}",
            hint="name the adapter_config.json of the run with --adapter-config",
        )
    return dump_config(
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
    """Return the base's repo id, or None. A local path would mean nothing to users of the adapter."""
    is_repo = base is not None and base.is_given and base.label != base.directory
    return base.label if base is not None and is_repo else None
