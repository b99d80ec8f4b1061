"""Profiles: for each trainer, the directory that its own loading code expects.

    folder/            contains the shard files
        names          a tensor's name is root, attribute and the model's own name, joined by dots
    companions         further files that the trainer reads

*Stock* loading is `dcp.load` as torch has it. *Key sets* are key rules that shardkit ships: they turn the Hub's names and
tensors into a trainer's own.

Sources: accelerate 1.15, utils/fsdp_utils.py (load_fsdp_model); transformers 5.23, trainer.py (train);
torchtitan 0.2 and 0.3, components/checkpoint.py; lightning 2.6, strategies/fsdp.py and model_parallel.py
(load_checkpoint). docs/trainers.md says what was tested with which version.
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
from shardkit.operations.companions import FileToCopy
from shardkit.operations.describe import OutputFiles

ProfileName = Literal["plain", "torchtitan", "accelerate", "lightning", "lightning-mp", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one trainer expects."""

    name: ProfileName
    folder: str = ""
    """The folder of the shard files and `.metadata`; "" is the directory itself."""
    form: Literal["dcp", "safetensors"] = "dcp"
    """How tensors are stored: as DCP's own `.distcp` files, or as its safetensors shards."""
    root: tuple[str, ...] = ()
    """Keys of the nested state dict that the trainer loads, above the model's own names."""
    attribute: str | None = None
    """Default attribute of the trainer's module that holds the model; None if no module is around the model."""
    key_sets: str = ""
    """Prefix of the names of this trainer's shipped key rules; "" if it trains models of transformers."""
    companions: Mapping[str, bytes] = field(default_factory=dict)
    """Content of the further files that the trainer reads, by name."""
    needs_config: bool = False
    """The trainer reads config.json from the directory."""
    usage: tuple[str, ...] = ()
    """Code or options to start from it; `{output}` is the directory, `{loader}` the model's class of transformers."""

    def head(self, attribute: str | None) -> str:
        """Return the prefix of the model's names in the output: "state_dict.model." or "".

        Args:
            attribute: attribute of the trainer's module that holds the model, if the user named it; "" if the module is
                the model. None for the profile's default.

        Raises:
            UsageError: this trainer has no module around the model.
        """
        if attribute is not None and self.attribute is None:
            raise UsageError(
                f"--attribute: with --profile {self.name} there is no module around the model",
                hint="leave it out; it is for Lightning, whose modules hold the model in an attribute",
            )
        parts = (*self.root, self.attribute if attribute is None else attribute)
        return "".join(f"{part}." for part in parts if part)

    def check_in_store(self) -> None:
        """Refuse a profile whose output cannot appear in a store all at once, as the trainer looks for several files.

        Raises:
            UsageError: this is such a profile.
        """
        if self.folder or self.companions or self.form != "dcp":
            raise UsageError(
                f"--profile {self.name}: the trainer looks for files that a store cannot make visible all at once",
                hint="write into a local directory, and copy that with the store's own tool",
            )

    def paths(self, names: Iterable[str]) -> dict[str, tuple[str | int, ...]] | None:
        """Return the keys of each name in the nested state dict: "model.a.b" -> ("model", "a.b"); None if it is flat."""
        length = sum(len(key) + 1 for key in self.root)
        return {name: (*self.root, name[length:]) for name in names} if length else None


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


# The Trainer does not start without this file. It describes a training before its first step, with the Trainer's
# defaults: on resuming, the Trainer reads intervals from here, and the batch size with auto_find_batch_size. Saving fails
# later unless each object whose state the Trainer exports is named here.
_TRAINER_STATE = {
    **{"epoch": 0.0, "global_step": 0, "train_batch_size": 8},
    **{"logging_steps": 500, "eval_steps": 500, "save_steps": 500},
    "stateful_callbacks": {"TrainerControl": {}, "EarlyStoppingCallback": None},
}

# The keys that Lightning's Trainer needs on loading. Without loops, callbacks and optimizers: nothing was trained yet.
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
        UsageError: no profile has that name.
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
        profile: a profile with key sets.
        config: config.json of the model, or None.

    Raises:
        UsageError: no rules are for such a model, or only rules for an older version of the trainer.
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


def with_root(layout: Layout, root: str) -> Layout:
    """Return a layout with `root`, a prefix such as "model.", before every name in the output."""
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
    """Refuse a layout with tensors that stock `dcp.load`, by which the trainer loads, would fill with wrong values.

    Raises:
        UsageError: there are such tensors; lists them.
    """
    names = layout.not_for_stock()
    if names:
        raise UsageError(
            f"--profile {profile.name}: this trainer loads with stock dcp.load, which on --mesh {layout.mesh} fills "
            f"{count(len(names), 'tensor')} wrong, and may raise no error",
            problems=map(escape, names),
            hint="use a mesh of dp_replicate and dp_shard, which loads into any other; or --profile transformers",
        )


class Assets(NamedTuple):
    """A model's files other than weights: config, tokenizer and the like."""

    files: Mapping[str, str]
    """Name in the output -> path."""
    refused: tuple[str, ...]
    """Names of links that leave the directory or are broken."""


def find_assets(profile: Profile, model: OpenedHubModel) -> Assets:
    """Return the model's files to copy: with them the model can be built from the output, and exported later.

    Files of a repo that are not in the cache are downloaded.

    Raises:
        SourceError: config.json is missing though the trainer needs it; or some files are pointers of Git LFS.
        ResourceError: the directory cannot be listed, or there is no network.
    """
    identity = model.identity
    if identity.repo is not None and repo_of(model.directory) is None:
        fetch_files(identity.repo, asset_patterns(), revision=identity.commit)
    # In a dry run of a repo that has only weights, nothing was downloaded and the directory does not exist.
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
    files = {name: path for name, path in files.items() if name not in FILES}  # the output is not quantised
    refuse_pointers(files)
    return Assets(files, refused)


def with_config(
    profile: Profile, assets: Mapping[str, str], config: Mapping[str, Any] | None
) -> tuple[Profile, dict[str, str]]:
    """Replace the config.json of a model whose weights were dequantised.

    The model's own file still says that they are quantised, so it is not copied.

    Args:
        profile: the trainer's profile.
        assets: files from `find_assets`.
        config: content of the new config.json, without the quantisation.

    Returns:
        The profile, which writes the new config.json, and the files that are still copied.
    """
    companions = {**profile.companions, "config.json": _json(config or {})}
    files = {name: path for name, path in assets.items() if name != "config.json"}
    return replace(profile, companions=companions), files


def write_companions(
    profile: Profile, assets: Mapping[str, str], output: OutputFiles
) -> list[manifest.ListedFile]:
    """Write the files other than shards; return their entries in the manifest.

    Args:
        profile: the trainer's profile, with its companions.
        assets: files to copy: name in the output -> path.
        output: writes into the output's directory.
    """
    written = [output.write(name, data) for name, data in profile.companions.items()]
    copied = [
        output.copy(FileToCopy(name, FileStamp.of(storage.stat(path))), path) for name, path in assets.items()
    ]
    return [*written, *copied]
