"""Checkpoints of PEFT models: the adapter by itself, or merged into the weights that it was trained on.

Deciding how it is merged is pure: a tensor that has to be computed becomes a tensor of the catalog that a codec makes
when it is read (`transfer.codecs.lora`). So everything else treats it like a stored one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Literal

from shardkit.core.catalog import Catalog, TensorEntry
from shardkit.core.regions import Shape
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
from shardkit.formats.hub.base import Base, recorded_names
from shardkit.keys.peft import (
    OTHER_ARITHMETIC,
    LoraModule,
    PeftNames,
    classify_peft,
    find_cut,
    names_beside,
    pattern_problems,
    pattern_value,
    without_base_layers,
)
from shardkit.operations.consolidate.assets import dump_config
from shardkit.transfer.codecs.derive import derive
from shardkit.transfer.codecs.lora import Lora

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
    origins: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Name in the catalog of a tensor that is made of stored ones -> their names."""


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
    of_base = None if base is None else base.tensors
    own = of_base if of_base is not None else recorded_names(checkpoint).names
    peft = classify_peft(names.values(), own or ())
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
    held = checkpoint.catalog.tensors
    ours = {name: held[source].shape for name, source in stored.items() if held[source].dtype.is_convertible}
    theirs = {name: tensor.shape for name, tensor in (of_base or {}).items() if tensor.dtype.is_convertible}
    beside = names_beside(peft, ours, settings.values if settings else {}, theirs)
    chosen = {stored[name]: target for name, target in (peft.adapter_names | beside).items()}
    catalog = _deferred(checkpoint, list(chosen))
    shapes = {name: catalog.tensors[stored[name]].shape for name in peft.adapter_names}
    _refuse_cut(peft, {**ours, **shapes}, settings, theirs)
    content = _config_of(settings, peft, shapes, _repo_of(base))
    return Chosen(
        kind="adapter",
        catalog=catalog,
        names=chosen,
        adapter_config=content,
        notes=tuple(_adapter_notes(peft, settings, beside)),
        warnings=() if content is not None else (_NO_CONFIG,),
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
    problems = find_cut(peft, shapes, settings.values, base) if settings and settings.is_whole else []
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


def _adapter_notes(peft: PeftNames, settings: Settings | None, beside: Mapping[str, str]) -> Iterator[str]:
    if peft.kind == "base+adapter":
        yield (
            "the checkpoint holds an adapter and the weights that it was trained on: the adapter was written; "
            "--merge-lora writes the merged model"
        )
    if beside:
        kinds = "biases that were trained, or rows of a vocabulary that is not the base's"
        yield f"in the adapter's file, as PEFT saves them: {listed(list(beside.values()))} ({kinds})"
    if peft.others:
        yield f"the adapter {escape(peft.adapter or '')} was taken; also there: {', '.join(map(escape, peft.others))}"
    if settings is not None and not settings.is_whole:
        yield f"{ADAPTER_CONFIG} was made from {settings.origin} and the names of the tensors: check it"


def _merged(checkpoint: Checkpoint, names: Mapping[str, str], settings: Settings | None) -> Chosen:
    plan = plan_merge(checkpoint.catalog.tensors, names, settings.values if settings else {})
    catalog = derive(checkpoint.select(list(names)), plan.made, plan.gone)
    origin = f", scaled as {settings.origin} says" if settings else ""
    note = f"the adapter was added to {len(plan.made)} tensors{origin}"
    return Chosen(kind="merged", catalog=catalog, names=plan.names, notes=(note,))


def _adapter_alone(checkpoint: Checkpoint, base: Base | None) -> SourceError:
    """Return the error for an adapter that is to be merged into weights that the checkpoint does not hold."""
    hint = merged_by_peft(checkpoint, base)
    if hint is None:
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


def _settings_of(checkpoint: Checkpoint, base: Base | None, given: str | None) -> Settings | None:
    """Return the settings from the first place that has some."""
    if given is not None:
        path = os.path.join(given, ADAPTER_CONFIG) if storage.isdir(given) else given
        if not storage.lexists(path):
            raise SourceError(
                f"--adapter-config {escape(given)}: there is no {escape(path)}",
                hint=f"give an {ADAPTER_CONFIG}, or the directory that it lies in",
            )
        return Settings(values=read_settings(path), is_whole=True, origin=escape(given))
    places = (*checkpoint.assets, checkpoint.catalog.directory, checkpoint.path)
    return find_settings([*([base.directory] if base else []), *places])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """A model with its adapter merged, decided."""

    names: dict[str, str]
    """Name in the catalog -> name in the output."""
    made: dict[str, Lora]
    """What merges, by the name of the base's tensor in the catalog."""

    @property
    def gone(self) -> frozenset[str]:
        """The adapter's tensors that are merged."""
        return frozenset(name for merge in self.made.values() for name in merge.added)


def plan_merge(
    tensors: Mapping[str, TensorEntry], names: Mapping[str, str], config: Mapping[str, Any]
) -> MergePlan:
    """Decide how a checkpoint's adapter is merged.

    Args:
        tensors: of the catalog.
        names: selected name in the catalog -> its output name, `base_model.model.` and all.
        config: the adapter's settings (`adapter_config.json`): `lora_alpha` is needed; `r`, `rank_pattern`,
            `alpha_pattern`, `use_rslora` and `fan_in_fan_out` count where they are there.

    Raises:
        SourceError: there is nothing to merge or to merge it into, the adapter is not LoRA's, or shapes do not fit.
            All problems of a kind are listed.
    """
    stored = {name: source for source, name in names.items()}
    peft = classify_peft(names.values())
    if peft.kind == "none":
        raise SourceError(
            "there is nothing to merge: the checkpoint holds no adapter",
            hint="--merge-lora is for checkpoints that hold both an adapter and the weights that it was trained on",
        )
    _check_settings(peft, config)
    merges, problems = list[Lora](), list[str]()
    transposed = _transposed_modules({name: tensors[source].shape for name, source in stored.items()})
    for module in peft.modules:
        merges += _merges_of(module, stored, tensors, config, transposed, problems)
    SourceError.raise_for(problems, f"{len(problems)} modules cannot be merged")
    kept = {stored[name]: target for name, target in peft.base_names.items()}
    return MergePlan(names=kept, made={merge.base: merge for merge in merges})


def _check_settings(peft: PeftNames, config: Mapping[str, Any]) -> None:
    problems = [f"{escape(name)}: not LoRA's" for name in peft.unmergeable]
    problems += [f"the adapter's settings have {name}" for name in OTHER_ARITHMETIC if config.get(name)]
    if config.get("peft_type") not in (None, "LORA"):
        problems.append(f"the adapter is of type {escape(str(config['peft_type']))}, not LORA")
    SourceError.raise_for(
        problems, "the adapter cannot be merged", hint="export it without --merge-lora instead"
    )
    if config.get("lora_alpha") is None:
        raise SourceError(
            "the adapter's lora_alpha is not known, so neither is its scale",
            hint="name the adapter_config.json that was used with --adapter-config",
        )
    problems = [
        f"{name}: not a number"
        for name in ("r", "lora_alpha")
        if config.get(name) is not None and type(config[name]) not in (int, float)
    ]
    for name in ("rank_pattern", "alpha_pattern"):
        problems += [f"{name}: {problem}" for problem in pattern_problems(config.get(name))]
    SourceError.raise_for(problems, "the adapter's settings cannot be read")


def _transposed_modules(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Return whether modules are stored (in, out), by the last parts of their paths, as the lengths of biases show.

    The settings' `fan_in_fan_out` is that of the module that PEFT wrapped last. If that is the output, square matrices of
    `Conv1D` (GPT-2's `attn.c_proj`) fit both ways.
    """
    biases = {name.removesuffix(".bias"): shape for name, shape in shapes.items() if name.endswith(".bias")}
    return {
        without_base_layers(name).rsplit(".", 2)[-2]: bias == shape[1:]
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and shape[0] != shape[1]
        if (bias := biases.get(name.removesuffix(".weight"))) in (shape[:1], shape[1:])
    }


def _is_transposed(
    module: LoraModule, weight: Shape, a: Shape, transposed: Mapping[str, bool], config: Mapping[str, Any]
) -> bool | None:
    """Return whether a module's weight is stored (in, out); None if nothing shows it."""
    if module.is_embedding:
        return True
    if len({*weight}) > 1:
        return a[1:] == weight[:1]
    name = module.path.rpartition(".")[2]
    if name not in transposed and len({*transposed.values()}) > 1:
        return None
    return transposed.get(name, bool(config.get("fan_in_fan_out")))


def _merges_of(
    module: LoraModule,
    stored: Mapping[str, str],
    tensors: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
    transposed: Mapping[str, bool],
    problems: list[str],
) -> Iterator[Lora]:
    if module.a is None or module.b is None or module.base is None:
        part = "lora_A" if module.a is None else "lora_B" if module.b is None else "weight of the base"
        problems.append(f"{escape(module.path)}: its {part} is missing")
        return
    base, a, b = stored[module.base], stored[module.a], stored[module.b]
    magnitude = stored[module.magnitude] if module.magnitude else None
    is_transposed = _is_transposed(module, tensors[base].shape, tensors[a].shape, transposed, config)
    problem = _shape_problem(tensors[base], tensors[a], tensors[b], bool(is_transposed))
    if is_transposed is None:
        problem = "nothing shows if its square matrix is (in, out) or (out, in): merge_and_unload() of PEFT merges it"
    if problem is None and magnitude and module.is_embedding:
        problem = "DoRA on an embedding"
    if problem is None and module.b_bias and module.base_bias is None:
        problem = "the adapter has a bias and the base has none"
    rank = tensors[a].shape[0] if tensors[a].shape else 0
    told = pattern_value(config.get("rank_pattern"), module.path, config.get("r"))
    if problem is None and told is not None and told != rank:
        problem = f"its rank is {rank}, and {escape(str(told))} in the adapter's settings"
    if problem is not None:
        problems.append(f"{escape(module.path)}: {problem}")
        return
    alpha = pattern_value(config.get("alpha_pattern"), module.path, config["lora_alpha"])
    scale = alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank
    kind: Literal["linear", "transposed"] = "transposed" if is_transposed else "linear"
    weight = tensors[base]
    merge = Lora(
        base=base,
        dtype=weight.dtype,
        shape=weight.shape,
        a=a,
        b=b,
        magnitude=magnitude,
        scale=scale,
        kind=kind,
    )
    yield merge
    if module.b_bias and module.base_bias:
        bias = tensors[stored[module.base_bias]]
        b = stored[module.b_bias]
        yield replace(
            merge, base=bias.fqn, dtype=bias.dtype, shape=bias.shape, a=None, b=b, magnitude=None, kind="bias"
        )


def _shape_problem(base: TensorEntry, a: TensorEntry, b: TensorEntry, is_transposed: bool) -> str | None:
    if any(len(entry.shape) != 2 for entry in (base, a, b)):
        return f"only matrices can be merged, and it is {list(base.shape)}"
    if any(not entry.dtype.is_convertible for entry in (base, a, b)):
        return f"{base.dtype.name} cannot be added to"
    added = (b.shape[0], a.shape[1])
    if a.shape[0] != b.shape[1] or (added[::-1] if is_transposed else added) != base.shape:
        return (
            f"{list(base.shape)} and what is added, {list(b.shape)} x {list(a.shape)}, do not fit each other"
        )
    return None
