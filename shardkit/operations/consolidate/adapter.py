"""Checkpoints of PEFT models: the adapter by itself, or merged into the weights that it was trained on (`merge`)."""

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
    Settings,
    adapted_model,
    find_settings,
    is_adapter,
    merge_command,
    read_settings,
)
from shardkit.formats.hub.base import Base, places_of_settings, recorded_names
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
_BY_PEFT = "PEFT merges it into a model that lies elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The tensors that are going to be written."""

    kind: str
    """"model", "adapter" or "merged"."""
    catalog: Catalog
    """Records may be closed."""
    names: dict[str, str]
    """Name in the catalog -> name in the output."""
    adapter_config: bytes | None = None
    """The settings of an adapter, where they are known."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    keys: str | None = None
    """Name of the rule set that gave the Hub's names."""
    why_not_rules: tuple[str, ...] = ()
    """Why sets that know all names, or most, did not give them."""
    split: tuple[FusedTensors, ...] = ()
    """Tensors that become several."""
    origins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name in the catalog of a tensor that is made of stored ones -> their names."""
    by: Mapping[str, str] = field(default_factory=dict)
    """Name in the output -> who decided it, as `NamedTensor` has it; names that were selected are missing."""


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
        SourceError: there is no adapter to merge, it cannot be merged, or its settings are not known.
        UsageError: settings are given, and there is no adapter.
    """
    is_whole = all(name == stored for stored, name in names.items())
    if is_whole and is_diffusers_lora(checkpoint) and not merge and adapter_config is None:
        return Chosen(kind="adapter", catalog=_deferred(checkpoint, list(names)), names=dict(names))
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
        return Chosen(kind="model", catalog=_deferred(checkpoint, list(names)), names=dict(names))
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
    return Chosen(
        kind="adapter",
        catalog=catalog,
        names=chosen,
        adapter_config=content,
        notes=tuple(_adapter_notes(peft, settings, extra_names)),
        warnings=(*other_base, *(() if content is not None else (_NO_CONFIG,))),
    )


def _deferred(checkpoint: Checkpoint, names: list[str]) -> Catalog:
    """Return a catalog of some tensors, whose records are still closed where they can be."""
    dcp = checkpoint.dcp
    is_plain = dcp is not None and checkpoint.select == dcp.select
    return dcp.defer(names) if dcp is not None and is_plain else checkpoint.select(names)


_NO_CONFIG = (
    f"there is no {ADAPTER_CONFIG}, without which PEFT cannot load an adapter: name one with --adapter-config"
)


def _refuse_cut(
    peft: PeftNames,
    shapes: Mapping[str, tuple[int, ...]],
    settings: Settings | None,
    base: Mapping[str, tuple[int, ...]],
) -> None:
    problems = find_misfits(peft, shapes, settings.values, base) if settings and settings.is_whole else []
    SourceError.raise_for(
        problems,
        f"{count(len(problems), 'module')} of the adapter have other shapes than its settings and its base call for",
        hint=f"a rank that saved its own rows alone lacks the others': consolidate a sharded checkpoint of the run, or save it "
        f"again with all rows gathered; if the shapes are right, --adapter-config names the {ADAPTER_CONFIG} of the run",
    )


def _refuse_shira(peft: PeftNames, names: Iterable[str], settings: Settings | None) -> None:
    """Refuse numbers of ShiRA whose places are not known, which a state dict lacks: PEFT would choose others."""
    is_lacking = "shira" in peft.methods and not any("shira_indices" in name for name in names)
    if is_lacking and (settings is None or settings.values.get("random_seed") is None):
        raise SourceError(
            "the checkpoint lacks the places that ShiRA changes, and the adapter's settings have no random_seed by which "
            "PEFT finds them again",
            hint="call save_pretrained of the PeftModel in the training job, which saves them; if a seed was set, "
            f"--adapter-config names the {ADAPTER_CONFIG} of the run",
        )


def _adapter_notes(
    peft: PeftNames, settings: Settings | None, extra_names: Mapping[str, str]
) -> Iterator[str]:
    if peft.kind == "base+adapter":
        yield (
            "the checkpoint holds an adapter and the weights that it was trained on: the adapter was written; "
            "--merge-lora writes the merged model"
        )
    if extra_names:
        kinds = "biases that were trained, or rows of a vocabulary that is not the base's"
        yield f"in the adapter's file, as PEFT saves them: {listed(list(extra_names.values()))} ({kinds})"
    if peft.other_adapters:
        yield f"the adapter {escape(peft.adapter or '')} was taken; also there: {', '.join(map(escape, peft.other_adapters))}"
    if settings is not None and not settings.is_whole:
        yield f"{ADAPTER_CONFIG} was made from {settings.origin} and the names of the tensors: check it"


def _merged(checkpoint: Checkpoint, names: Mapping[str, str], settings: Settings | None) -> Chosen:
    plan = plan_merge(checkpoint.catalog.tensors, names, settings.values if settings else {})
    catalog = derive(checkpoint.select(list(names)), plan.merges, plan.gone)
    origin = f", scaled as {settings.origin} says" if settings else ""
    note = f"the adapter was added to {len(plan.merges)} tensors{origin}"
    return Chosen(kind="merged", catalog=catalog, names=plan.names, notes=(note,))


def _adapter_alone(checkpoint: Checkpoint, base: Base | None) -> SourceError:
    """Return the error for an adapter that is to be merged into weights that the checkpoint does not hold."""
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
    """Return how PEFT itself merges an adapter in PEFT's own files; None for any other checkpoint."""
    if checkpoint.hub is None or not is_adapter(storage.listdir(checkpoint.hub.directory)):
        return None
    directory = checkpoint.hub.directory
    model = base.label if base is not None and base.is_given else adapted_model(directory)
    return f"{_BY_PEFT}: {merge_command(directory, model, 'merged')}"


def _settings_of(checkpoint: Checkpoint, base: Base | None, adapter_config: str | None) -> Settings | None:
    """Return the settings from the first place that has some."""
    if adapter_config is not None:
        path = (
            os.path.join(adapter_config, ADAPTER_CONFIG) if storage.isdir(adapter_config) else adapter_config
        )
        if not storage.lexists(path):
            raise SourceError(
                f"--adapter-config {escape(adapter_config)}: there is no {escape(path)}",
                hint=f"give an {ADAPTER_CONFIG}, or the directory that it lies in",
            )
        return Settings(values=read_settings(path), is_whole=True, origin=escape(adapter_config))
    places = (*checkpoint.contents.assets, checkpoint.catalog.directory, checkpoint.path)
    own_places = places_of_settings(checkpoint) if base is not None and base.own_files is not None else ()
    return find_settings([*own_places, *([base.directory] if base else []), *places])


def _config_of(
    settings: Settings | None, peft: PeftNames, shapes: Mapping[str, tuple[int, ...]], base: str | None
) -> bytes | None:
    """Return an `adapter_config.json` that names the base; None if too little is known for one."""
    if settings is None:
        return None
    if settings.is_whole:
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
    """Return the repo id that a person gave. A path means nothing to whoever gets the adapter."""
    is_repo = base is not None and base.is_given and base.label != base.directory
    return base.label if base is not None and is_repo else None
