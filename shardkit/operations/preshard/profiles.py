"""Profiles: the directory that a trainer's own loading code expects, as data.

    folder/            where the shard files lie
        names          root, attribute and the model's own name, joined by dots
    companions         files that the trainer reads beside them

Sources: accelerate 1.15, utils/fsdp_utils.py (load_fsdp_model); transformers 5.23, trainer.py (train);
torchtitan 0.2 and 0.3, components/checkpoint.py; lightning 2.6, strategies/fsdp.py and model_parallel.py
(load_checkpoint). docs/trainers.md says what was proved with which version.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from shardkit._version import page
from shardkit.core.catalog import FileStamp
from shardkit.core.text import count, escape, suggestion
from shardkit.errors import SourceError, UsageError
from shardkit.files import manifest, storage
from shardkit.files.stores import repo_of
from shardkit.files.strict_json import refuse_pointers
from shardkit.formats.contract import OpenedHubModel
from shardkit.formats.hub.assets import asset_patterns, list_assets
from shardkit.formats.hub.directory import library_of
from shardkit.formats.hub.repo import fetch_files
from shardkit.formats.quantised import FILES
from shardkit.formats.torchsave.writer import Plain, plain_record
from shardkit.keys.rule_sets import shipped_sets
from shardkit.layout.layout import Layout
from shardkit.operations.companions import BesideFile
from shardkit.operations.describe import OutputFiles

ProfileName = Literal["plain", "torchtitan", "accelerate", "lightning", "lightning-mp", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one trainer expects."""

    name: ProfileName
    folder: str = ""
    """Where the shard files and `.metadata` lie; "" is the directory itself."""
    form: Literal["dcp", "safetensors"] = "dcp"
    """How tensors are stored: as DCP's own `.distcp` files, or as its safetensors shards."""
    root: tuple[str, ...] = ()
    """Keys of the state dict that the trainer loads, above the model's own."""
    attribute: str | None = None
    """Where a module of the trainer holds the model, unless a person says otherwise; None if nothing is around it."""
    key_sets: str = ""
    """How the names of its shipped key rules begin; "" if it trains models of transformers."""
    companions: Mapping[str, bytes] = field(default_factory=dict)
    """Files that it reads beside the shards, by name."""
    needs_config: bool = False
    """The trainer reads config.json there."""
    usage: tuple[str, ...] = ()
    """Lines that start it; `{output}` is the directory, `{loader}` the class of transformers that loads the model."""

    def head(self, attribute: str | None) -> str:
        """Return the prefix of the model's own names.

        Args:
            attribute: where the trainer's module holds the model, as a person says; "" if the module is the model.

        Raises:
            UsageError: nothing is around the model here.
        """
        if attribute is not None and self.attribute is None:
            raise UsageError(
                f"--attribute: with --profile {self.name} nothing is around the model",
                hint="leave it out; it is for Lightning, whose modules hold the model in an attribute",
            )
        parts = (*self.root, self.attribute if attribute is None else attribute)
        return "".join(f"{part}." for part in parts if part)

    def check_in_store(self) -> None:
        """Refuse a form that a store cannot make visible all at once: the trainer looks for several files.

        Raises:
            UsageError: it is such a form.
        """
        if self.folder or self.companions or self.form != "dcp":
            raise UsageError(
                f"--profile {self.name}: the trainer looks for files that a store cannot make visible all at once",
                hint="write into a local directory, and copy that with the store's own tool",
            )

    def paths(self, names: Iterable[str]) -> dict[str, tuple[str | int, ...]] | None:
        """Return the path of each name of a checkpoint in the nested state dict; None if that is flat."""
        length = sum(len(key) + 1 for key in self.root)
        return {name: (*self.root, name[length:]) for name in names} if length else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


# Without this file the Trainer does not start. It says that nothing was trained yet, and has the Trainer's defaults:
# on resuming, the Trainer takes intervals from here, and the batch size with auto_find_batch_size. Its saves fail unless
# each object whose state it exports is named here.
_TRAINER_STATE = {
    **{"epoch": 0.0, "global_step": 0, "train_batch_size": 8},
    **{"logging_steps": 500, "eval_steps": 500, "save_steps": 500},
    "stateful_callbacks": {"TrainerControl": {}, "EarlyStoppingCallback": None},
}

# What a Trainer looks for on loading, without loops, callbacks and optimizers: nothing was trained yet.
_LIGHTNING_META: Plain = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.6"}
_LIGHTNING = Profile(
    name="lightning",
    root=("model",),
    attribute="model",
    companions={"meta.pt": plain_record(_LIGHTNING_META)},
    usage=(
        "Lightning: trainer.validate(module, ckpt_path={output!r}), or, to train, in on_fit_start:",
        "    strategy = self.trainer.strategy",
        "    optimizers, strategy.optimizers = strategy.optimizers, []  # the checkpoint has no state of theirs",
        "    strategy.load_checkpoint({output!r})",
        "    strategy.optimizers = optimizers",
    ),
)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(name="plain"),
        Profile(
            name="torchtitan",
            key_sets="torchtitan-",
            usage=("torchtitan: --checkpoint.enable --checkpoint.initial_load_path {output}",),
        ),
        Profile(
            name="accelerate",
            folder="pytorch_model_fsdp_0",
            root=("model",),
            companions={"trainer_state.json": _json(_TRAINER_STATE)},
            usage=(
                "accelerate: accelerate.utils.load_fsdp_model(",
                "    accelerator.state.fsdp_plugin, accelerator, model, {output!r})",
                "transformers: trainer.train(resume_from_checkpoint={output!r})",
            ),
        ),
        _LIGHTNING,
        replace(_LIGHTNING, name="lightning-mp", root=("state_dict",)),
        Profile(
            name="transformers",
            form="safetensors",
            needs_config=True,
            usage=(
                "transformers: {loader}.from_pretrained(",
                "    {output!r}, distributed_config=DistributedConfig(...))",
            ),
        ),
    )
}


def find_profile(name: str) -> Profile:
    """Return a profile by its name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in PROFILES:
        raise UsageError(
            f"--profile {escape(name)!r} is not one of {', '.join(PROFILES)}{suggestion(name, PROFILES)}",
            hint="verl starts from the Hub's files" if name == "verl" else None,
        )
    return PROFILES[name]


def choose_keys(profile: Profile, config: Mapping[str, Any] | None) -> str:
    """Return the name of the shipped key rules that turn a model's names into the trainer's own.

    Args:
        profile: one with key sets.
        config: config.json of the model; None if there is none.

    Raises:
        UsageError: there are none for such a model, or only for an older version of the trainer.
    """
    model_type = (config or {}).get("model_type")
    candidates = [rules for rules in shipped_sets() if rules.name.startswith(profile.key_sets)]
    fitting = [rules for rules in candidates if model_type in rules.model_types]
    current = [rules.name for rules in fitting if not rules.name.rpartition("-")[2][:1].isdigit()]
    if len(current) == 1:
        return current[0]
    what = "a model without a model_type in config.json" if model_type is None else f"{model_type} models"
    raise UsageError(
        f"--profile {profile.name}: no key rules for {escape(what)} are chosen by themselves",
        problems=[f"{rules.name}: {rules.title}" for rules in fitting or candidates],
        hint=f"name one of these with --keys, or give a TOML file ({page('keys.md')})",
    )


def below(layout: Layout, root: str) -> Layout:
    """Return a layout with `root` before every name."""
    if not root:
        return layout
    return replace(
        layout,
        tensors={root + fqn: replace(tensor, fqn=root + fqn) for fqn, tensor in layout.tensors.items()},
        ties=tuple(tuple(root + fqn for fqn in group) for group in layout.ties),
        sources={root + fqn: source for fqn, source in layout.sources.items()},
        keep_fp32=None if layout.keep_fp32 is None else frozenset(root + fqn for fqn in layout.keep_fp32),
    )


def check_stock(profile: Profile, layout: Layout) -> None:
    """Refuse tensors that the trainer, which loads with stock `dcp.load`, would fill wrong.

    Raises:
        UsageError: there are such tensors; lists them.
    """
    names = layout.not_for_stock()
    if names:
        raise UsageError(
            f"--profile {profile.name}: this trainer loads with stock dcp.load, which on --mesh {layout.mesh} fills "
            f"{count(len(names), 'tensor')} wrong, and may raise no error",
            problems=map(escape, names),
            hint="take a mesh of dp_replicate and dp_shard, which loads into any other; or --profile transformers",
        )


class Assets(NamedTuple):
    """What lies beside a model's weights."""

    files: Mapping[str, str]
    """Name in the output -> path."""
    refused: tuple[str, ...]
    """Names of links that leave the directory, or lead to nothing."""


def find_assets(profile: Profile, model: OpenedHubModel) -> Assets:
    """Return the files of the model that are copied, so that the output can be built and exported by itself.

    Those of a repo are downloaded, if they were not.

    Raises:
        SourceError: there is no config.json, and the trainer needs it; or some files are pointers of Git LFS.
        ResourceError: the directory cannot be listed; no network.
    """
    identity = model.identity
    if identity.repo is not None and repo_of(model.directory) is None:
        fetch_files(identity.repo, asset_patterns(), revision=identity.commit)
    # Of a repo of weights alone, a dry run has downloaded nothing.
    files, refused = list_assets(model.directory) if storage.isdir(model.directory) else ({}, ())
    if profile.needs_config and "config.json" not in files:
        raise SourceError(
            f"--profile {profile.name}: there is no config.json beside the weights, and the trainer needs it",
            hint="give the directory of a whole model",
        )
    if profile.needs_config and library_of(model.config) not in (None, "transformers"):
        raise SourceError(
            f"--profile {profile.name}: config.json names a class of {library_of(model.config)}, and the trainer loads "
            "models of transformers",
            hint="leave --profile out: shardkit.load_into fills any model that is wrapped for this mesh",
        )
    files = {name: path for name, path in files.items() if name not in FILES}  # what is presharded is plain
    refuse_pointers(files)
    return Assets(files, refused)


def with_config(
    profile: Profile, assets: Mapping[str, str], config: Mapping[str, Any] | None
) -> tuple[Profile, dict[str, str]]:
    """Return a profile that writes another config.json than the model's file, and the files that are still copied.

    Args:
        profile: whose files.
        assets: from `find_assets`.
        config: what config.json is to say.
    """
    companions = {**profile.companions, "config.json": _json(config or {})}
    files = {name: path for name, path in assets.items() if name != "config.json"}
    return replace(profile, companions=companions), files


def write_companions(
    profile: Profile, assets: Mapping[str, str], output: OutputFiles
) -> list[manifest.ListedFile]:
    """Write the files that the trainer reads beside the shards; return what the manifest says of them.

    Args:
        profile: says which.
        assets: files that are copied: name in the output -> path.
        output: where they go.
    """
    written = [output.write(name, data) for name, data in profile.companions.items()]
    copied = [
        output.copy(BesideFile(name, FileStamp.of(storage.stat(path))), path) for name, path in assets.items()
    ]
    return [*written, *copied]
