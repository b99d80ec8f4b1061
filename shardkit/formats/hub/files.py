"""The weights of a Hub model, recognised by file names alone. Pure: no I/O.

    1. model.safetensors, or model.safetensors.index.json and the files that it lists
    2. the only other *.safetensors.index.json
    3. pytorch_model.bin, or pytorch_model.bin.index.json and the files that it lists
    4. the only variant: model.<variant>.safetensors, its index, or either of pytorch_model

If a variant is asked for, it replaces all four. Nothing else counts as the model's weights: adapters, optimizers
and originals (`consolidated*`) often lie beside it.

Source: transformers 5.23, modeling_utils._get_resolved_checkpoint_files and _add_variant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from shardkit.core.text import escape, in_shell, suggestion
from shardkit.errors import SourceError
from shardkit.formats.hub.adapter import merge_command
from shardkit.formats.hub.assets import may_be_model

Kind = Literal["safetensors", "torch-bin"]

_SHARD = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.(safetensors|bin)$")
_OF_A_SET = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<of>\d{1,9}\.(safetensors|bin))", re.ASCII)
_MAX_PARTS = 10_000
# Weight file, index, and the index as transformers spells it; "" or ".<variant>" goes in.
_FORMS: dict[Kind, tuple[str, str, str]] = {
    "safetensors": (
        "model{}.safetensors",
        "model{}.safetensors.index.json",
        "model.safetensors.index{}.json",
    ),
    "torch-bin": ("pytorch_model{}.bin", "pytorch_model{}.bin.index.json", "pytorch_model.bin.index{}.json"),
}
PIPELINE = "model_index.json"
_NOT_THE_MODEL = ("adapter*", "consolidated*", "optimizer*")

_CONSOLIDATE = "shardkit consolidate makes a Hub model of it, shardkit reshard writes it for another mesh"
_OF_A_PIPELINE = "shardkit takes one model at a time: give the weight file of one of them; `ls {place}/*/*.safetensors` lists them"
_ORIGINAL = "give the repo or directory with the original safetensors weights"
_IN_REPO = (
    f"{_ORIGINAL}; they often lie in the same repo: `hf download ORGANISATION/NAME "
    "--include '*.safetensors' --include '*.json'` brings them here"
)
OTHER_FILES = {
    ".gguf": ("a model in GGUF format", _ORIGINAL),
    ".onnx": ("a model in ONNX format", _IN_REPO),
    ".h5": ("a model of TensorFlow", _IN_REPO),
    ".msgpack": ("a model of Flax", _IN_REPO),
}
"""By the ending of a file: what it is, and what to do."""
OTHER_NAMES = (*(f"*{ending}" for ending in OTHER_FILES), "onnx")
"""Patterns of names of models in forms that are not read."""
TORCH_FILES = (".pt", ".pth", ".ckpt")
"""Endings of files of `torch.save`, which may hold anything."""
_MERGE = (
    "give the model that it was trained on, or merge the two and give the result: {merge}; "
    "a model of another kind has a class of its own in place of AutoModelForCausalLM"
)
# (what, a pattern that some name must match, what to do), in the order in which they are tried. What to do has
# {place} for the directory, {file} for what matches, and {merge} for the command that merges an adapter.
_LOOKS_LIKE: tuple[tuple[str, str, str], ...] = (
    ("a Lightning checkpoint (meta.pt)", "meta.pt", _CONSOLIDATE),
    ("a sharded checkpoint (.metadata of torch.distributed.checkpoint)", ".metadata", _CONSOLIDATE),
    ("a verl checkpoint (one .pt file for each rank)", "model_world_size_*_rank_*.pt", _CONSOLIDATE),
    ("an accelerate checkpoint (pytorch_model_fsdp_0)", "pytorch_model_fsdp_0*", _CONSOLIDATE),
    ("a DeepSpeed checkpoint", "global_step*", _CONSOLIDATE),
    ("sharded files of torch's Hugging Face writer", "shard-*-model-*.safetensors", _CONSOLIDATE),
    ("a PEFT adapter", "adapter_model.*", _MERGE),
    (
        "a model in its authors' own format only (consolidated files)",
        "consolidated*",
        "give the repo or directory with weights for transformers",
    ),
    ("a diffusers pipeline, whose models lie in directories of their own", PIPELINE, _OF_A_PIPELINE),
    ("one model of a diffusers pipeline", "diffusion_pytorch_model*", "give its weight file: {file}"),
    *(
        (
            "shards whose index is missing",
            f"{stem}-?????-of-?????.{ending}",
            f"download {stem}.{ending}.index.json too",
        )
        for stem, ending in (("model", "safetensors"), ("pytorch_model", "bin"))
    ),
    (
        "the top of a Hub cache entry",
        "snapshots",
        "give the directory of one commit, snapshots/<commit>, or the repo id",
    ),
    *(
        (f"{what} only, which is not read", f"*{ending}", hint)
        for ending, (what, hint) in OTHER_FILES.items()
    ),
    ("a model in ONNX format only, which is not read", "onnx", _IN_REPO),
    *(
        (
            "a checkpoint in a file of torch.save",
            f"*{ending}",
            "`shardkit consolidate {file}` makes a Hub model of it",
        )
        for ending in TORCH_FILES
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files to open."""

    kind: Kind
    index: str | None
    """The index's name; None if `single` is all."""
    single: str | None
    """The only weight file. With an index: a file beside it, which the index must list."""
    notes: tuple[str, ...] = ()
    """What a person should be told about the choice."""
    numbered: tuple[str, ...] = field(default=(), compare=False)
    """Names of all files that are numbered as parts of a model, listed in an index or not."""

    def unlisted(self, listed: Collection[str]) -> list[str]:
        """Return the files that are numbered as parts of one set with some that an index lists."""

        def sets(names: Collection[str]) -> dict[str, tuple[str, str]]:
            matches = ((name, _OF_A_SET.fullmatch(name)) for name in names)
            return {name: (match["stem"], match["of"]) for name, match in matches if match}

        known = set(sets(listed).values())
        return sorted(name for name, of in sets(self.numbered).items() if of in known and name not in listed)


def absent_parts(names: Collection[str]) -> tuple[str, ...]:
    """Return the files that numbered sets lack: of `model-00001-of-00002.safetensors` alone the second.

    Args:
        names: of weight files. A set may be numbered from 0.
    """
    sets: dict[tuple[str, str], dict[int, int]] = {}
    for match in filter(None, map(_OF_A_SET.fullmatch, names)):
        number = match["number"]
        sets.setdefault((match["stem"], match["of"]), {})[int(number)] = len(number)
    lost = list[str]()
    for (stem, of), digits in sets.items():
        total, first, width = int(of.partition(".")[0]), 0 if 0 in digits else 1, min(digits.values())
        if max(digits) < first + total <= _MAX_PARTS:
            lost += [
                f"{stem}-{part:0{width}d}-of-{of}"
                for part in range(first, first + total)
                if part not in digits
            ]
    return tuple(lost)


def is_part(name: str) -> bool:
    """True for a weight file that is numbered as one of several."""
    return _SHARD.search(name) is not None


def is_plain_file(name: str) -> bool:
    """True for the name that the only weight file of a model has."""
    return any(name == single.format("") for single, *_ in _FORMS.values())


def select_weights(
    names: Collection[str],
    label: str,
    *,
    variant: str | None = None,
    adapted: str | None = None,
    is_repo: bool = False,
) -> WeightFiles:
    """Decide which files are the weights of a model.

    Args:
        names: the file names of a directory or repo, top level.
        label: the path of the directory, or the repo id.
        variant: e.g. "fp16"; None takes the default weights, or the only variant if there are none.
        adapted: the model that an adapter there was trained on, if it is known.
        is_repo: the files are not on this machine.

    Raises:
        SourceError: there are no weights, or more than one set; it says what was found.
    """
    if _is_sharded(names):  # even where weights of a model lie beside it
        raise _nothing_found(names, label, adapted, is_repo=is_repo)
    if variant is not None:
        weights = _with_variant(names, variant)
        if weights is None:
            raise _no_such_variant(names, label, variant)
    else:
        weights = _default(names, "safetensors") or _other_index(names, label) or _default(names, "torch-bin")
        weights = weights or _only_variant(names, label)
        if weights is None:
            raise _nothing_found(names, label, adapted, is_repo=is_repo)
    return replace(weights, numbered=tuple(filter(_OF_A_SET.fullmatch, names)))


def select_file(name: str) -> WeightFiles:
    """Return the weights that a person named by one file: a weight file or an index.

    Raises:
        SourceError: by its name it is neither.
    """
    shard = f"{escape(name)} is one shard of a larger model: what the others hold is missing"
    notes = (shard,) if _SHARD.search(name) else ()
    if name.endswith(".safetensors"):
        return WeightFiles(kind="safetensors", index=None, single=name, notes=notes)
    if name.endswith(".bin"):
        return WeightFiles(kind="torch-bin", index=None, single=name, notes=notes)
    if name.endswith(".json") and ".index." in name:
        return WeightFiles(kind="torch-bin" if ".bin." in name else "safetensors", index=name, single=None)
    refused = other_form(name)
    if refused is not None:
        raise refused
    raise SourceError(
        f"{escape(name)}: not a weight file that can be opened by itself",
        hint="give a directory, a .safetensors file, a .bin file, or an index (*.index.json)",
    )


def other_form(path: str) -> SourceError | None:
    """Return the error for a file with a model in a form that is not read; None if its name tells no such form."""
    what, hint = OTHER_FILES.get(os.path.splitext(path)[1].lower(), (None, None))
    return None if what is None else SourceError(f"{escape(path)}: {what}, which is not read", hint=hint)


def _is_sharded(names: Collection[str]) -> bool:
    return ".metadata" in names or any(fnmatchcase(name, "model_world_size_*_rank_*.pt") for name in names)


def _default(names: Collection[str], kind: Kind) -> WeightFiles | None:
    single, index = (name if name in names else None for name in map(str.format, _FORMS[kind][:2], ("", "")))
    return None if single is None and index is None else WeightFiles(kind=kind, index=index, single=single)


def _other_index(names: Collection[str], label: str) -> WeightFiles | None:
    variants = {name for _, name, _ in _variants(names)}
    indexes = sorted(
        name
        for name in names
        if name.endswith(".safetensors.index.json")
        and name not in variants
        and not any(fnmatchcase(name, pattern) for pattern in _NOT_THE_MODEL)
    )
    if len(indexes) > 1:
        raise _ambiguous(label, indexes)
    return WeightFiles(kind="safetensors", index=indexes[0], single=None) if indexes else None


def _only_variant(names: Collection[str], label: str) -> WeightFiles | None:
    known = sorted({variant for variant, _, _ in _variants(names)})
    if len(known) > 1:
        raise _ambiguous(label, sorted(name for _, name, _ in _variants(names)))
    weights = _with_variant(names, known[0]) if known else None
    if weights is None:
        return None
    note = f"no default weights in {escape(label)}: took its only variant, {escape(known[0])}"
    return replace(weights, notes=(note,))


def _with_variant(names: Collection[str], variant: str) -> WeightFiles | None:
    """Return the files of a variant, safetensors before legacy ones; None if there are none."""
    for kind, forms in _FORMS.items():
        matching = [name for form in forms if (name := form.format(f".{variant}")) in names]
        if len(matching) > 1:
            raise _ambiguous(f"variant {variant}", matching)
        if matching:
            single, index = (None, matching[0]) if matching[0].endswith(".json") else (matching[0], None)
            return WeightFiles(kind=kind, index=index, single=single)
    return None


def _variants(names: Collection[str]) -> Iterator[tuple[str, str, Kind]]:
    """Yield (variant, file name, kind) of every file that is named as a variant's."""
    for kind, form in ((kind, form) for kind, forms in _FORMS.items() for form in forms):
        before, after = (re.escape(part) for part in form.split("{}"))
        pattern = re.compile(rf"{before}\.(?P<variant>[\w-]+(\.[\w-]+)*){after}", re.ASCII)
        for name in names:
            match = pattern.fullmatch(name)
            if match and not _SHARD.search(name):
                yield match["variant"], name, kind


def _no_such_variant(names: Collection[str], label: str, variant: str) -> SourceError:
    known = sorted({name for name, _, _ in _variants(names)})
    return SourceError(
        f"{escape(label)} has no weights of variant {escape(variant)!r}{suggestion(variant, known)}",
        hint=f"give --variant {' or '.join(map(repr, known))}"
        if known
        else "leave --variant out: it has none",
    )


def _ambiguous(label: str, names: list[str]) -> SourceError:
    return SourceError(
        f"{escape(label)}: {len(names)} files could be the weights",
        problems=map(escape, names),
        hint="say which: name the variant, or give the path of one of these files",
    )


def empty_directory(path: str) -> SourceError:
    """Return the error for a directory that holds nothing."""
    return SourceError(
        f"{escape(path)} is an empty directory",
        hint="check the path, or copy or download the files into it first",
    )


def _nothing_found(names: Collection[str], label: str, adapted: str | None, *, is_repo: bool) -> SourceError:
    """Return an error that says what there is instead of a model's weights; arguments as for `select_weights`."""
    if not names and not is_repo:
        return empty_directory(label)
    for what, pattern, hint in _LOOKS_LIKE:
        seen = [name for name in names if fnmatchcase(name, pattern)]
        if pattern.endswith(TORCH_FILES):
            seen = [name for name in seen if may_be_model(name)]
        # meta.pt alone says little; Lightning writes it beside .metadata.
        if seen and (pattern != "meta.pt" or ".metadata" in names):
            first = min(seen, key=lambda name: (not name.endswith(".safetensors"), len(name), name))
            return SourceError(
                f"{escape(label)}: expected a Hub model, this looks like {what}: {escape(first)}",
                problems=[f"missing: {escape(name)}" for name in absent_parts(seen)],
                hint=_what_to_do(hint, first, label, adapted, is_repo=is_repo),
            )
    visible = sorted(name for name in names if not name.startswith("."))
    return SourceError(
        f"{escape(label)}: no model weights found, neither model.safetensors nor an index",
        problems=[f"found {escape(name)}" for name in visible],
        hint="give the directory that has them, or the weight file itself; or download them first",
    )


def _what_to_do(hint: str, file: str, label: str, adapted: str | None, *, is_repo: bool) -> str:
    """Return a hint of `_LOOKS_LIKE` with what it names; files of a repo have to be downloaded first."""
    directory = "DIRECTORY" if is_repo else label
    told = hint.format(
        place=in_shell(directory),
        file=in_shell(os.path.join(directory, file)),
        merge=merge_command(label, adapted, "merged"),
    )
    if directory not in told or not is_repo:
        return told
    return f"`hf download {in_shell(label)}` brings it into a DIRECTORY; {told}"
