"""Choose the weight files of a Hub model, by file names alone, in this order:

    1. model.safetensors, or model.safetensors.index.json and the files that it lists; a model of diffusers has
       diffusion_pytorch_model in place of model
    2. the only other *.safetensors.index.json
    3. pytorch_model.bin, or pytorch_model.bin.index.json and the files that it lists; of diffusers the same
    4. the only variant: model.<variant>.safetensors, its index, or either of the others

If the user names a variant, only that counts. No other file counts as the model's weights: adapters, optimizers
and originals (`consolidated*`) are often beside them.

Source: transformers 5.24, modeling_utils._get_resolved_checkpoint_files and _add_variant; diffusers 0.42.1,
utils/constants.py and utils/hub_utils.py, _add_variant: both libraries put a variant into the index's name before `.json`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

from shardkit.core.text import escape, suggestion
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.formats.contract import matching_names
from shardkit.formats.hub.adapter import merge_command

Kind = Literal["safetensors", "torch-bin"]

# A numbered weight file, by its number and their total; or a rank's file of torch's Hugging Face writer, by the rank.
_SHARD = re.compile(
    r"[-_.](?P<number>\d{1,9})[-_]of[-_](?!0*1\b)(?P<of>\d{1,9})(\.[\w-]+)?\.(safetensors|bin)$"
    r"|^shard-(?P<rank>\d{1,9})-model-.*\.safetensors$",
    re.ASCII | re.IGNORECASE,
)
_OF_A_SET = re.compile(r"(?P<stem>.+)-(?P<number>\d{1,9})-of-(?P<of>\d{1,9}\.(safetensors|bin))", re.ASCII)
_MAX_PARTS = 10_000
MODEL, DIFFUSERS = "model", "diffusion_pytorch_model"
"""Beginnings of the names of weight files, for transformers and for diffusers."""
_STEMS: tuple[tuple[Kind, str, str], ...] = (
    ("safetensors", MODEL, "safetensors"),
    ("safetensors", DIFFUSERS, "safetensors"),
    ("torch-bin", "pytorch_model", "bin"),
    ("torch-bin", DIFFUSERS, "bin"),
)
# Names of the weight file, of the index, and of the index in both libraries' spelling; "" or ".<variant>" replaces {}.
_FORMS: tuple[tuple[Kind, tuple[str, str, str]], ...] = tuple(
    (kind, (f"{stem}{{}}.{end}", f"{stem}{{}}.{end}.index.json", f"{stem}.{end}.index{{}}.json"))
    for kind, stem, end in _STEMS
)
# `older` is the variant in the older spelling, of diffusers until 0.30 and transformers until 4.47.
_VARIANT = re.compile(
    rf"({'|'.join(dict.fromkeys(stem for _, stem, _ in _STEMS))})"
    r"(\.(?P<variant>[\w-]+?(\.[\w-]+?)*?)(-\d{5}-of-\d{5})?|-\d{5}-of-\d{5}\.(?P<older>[\w.-]+))\.(safetensors|bin)",
    re.ASCII,
)
PLAIN_STEMS = frozenset(stem for _, stem, _ in _STEMS)
"""Usual names of weight files, from which no label for the model can be made."""
_STEM = re.compile(
    r"(?P<stem>.+?)(-\d{1,9}-of-\d{1,9})?\.(safetensors|bin)(\.index(\.[\w-]+)?\.json)?", re.ASCII
)
PIPELINE = "model_index.json"
_NOT_THE_MODEL = ("adapter*", "consolidated*", "optimizer*")
_OTHER_FORMS = {
    "*.gguf": "a model in GGUF format",
    "*.h5": "a model of TensorFlow",
    "_CHECKPOINT_METADATA": "an Orbax checkpoint (JAX)",
}
TORCH_FILES = (".pt", ".pth", ".ckpt")
"""Endings of files of `torch.save`, which may hold anything."""
_MERGE = (
    "give the model that it was trained on, or merge the two and give the result: {merge}; "
    "a model of another kind has a class of its own in place of AutoModelForCausalLM"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The chosen weight files of a model."""

    kind: Kind
    index: str | None
    """The index's name; None if `single` is the only file."""
    single: str | None
    """The only weight file. With an index: a file beside it, which the index must list."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the choice."""
    numbered: tuple[str, ...] = field(default=(), compare=False)
    """Names of all files that are numbered as parts of a model, listed in an index or not."""

    @property
    def stem(self) -> str:
        """Beginning of the files' names without the variant, as safetensors files have it: "model" for pytorch_model.bin."""
        name = self.index or self.single or ""
        usual = next((stem for _, stem, _ in _STEMS if re.match(rf"{stem}[.-]", name)), None)
        match = _STEM.fullmatch(name)
        stem = usual or (match["stem"] if match else MODEL)
        return MODEL if stem == "pytorch_model" else stem

    def unlisted(self, listed: Collection[str]) -> list[str]:
        """Return the files that an index does not list although it lists others of the same numbered set."""

        def sets(names: Collection[str]) -> dict[str, tuple[str, str]]:
            matches = ((name, _OF_A_SET.fullmatch(name)) for name in names)
            return {name: (match["stem"], match["of"]) for name, match in matches if match}

        index_sets = set(sets(listed).values())
        return sorted(
            name for name, of in sets(self.numbered).items() if of in index_sets and name not in listed
        )


def missing_parts(names: Collection[str]) -> tuple[str, ...]:
    """Return the names that are missing in numbered sets of files.

    If `model-00001-of-00002.safetensors` is the only name, this is `model-00002-of-00002.safetensors`.

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
    """True for the name of a weight file that is numbered as one of several."""
    return _SHARD.search(name) is not None


def which_part(name: str) -> str | None:
    """Return which part of a model a weight file is by its name, such as "part 1 of 9"; None if it is not numbered."""
    match = _SHARD.search(name)
    if match is None:
        return None
    if match["rank"] is not None:
        return "what one rank holds"
    return f"part {int(match['number'])} of {int(match['of'])}"


def part_notes(name: str) -> tuple[str, ...]:
    """Return a note about a weight file that is a numbered part of a model, else an empty tuple."""
    part = which_part(name)
    return (
        ()
        if part is None
        else (f"{escape(name)} is {part} of a model: the tensors of the other files are not here",)
    )


def refuse_part(path: str) -> None:
    """Refuse a path to one of several weight files where a whole model is expected.

    Raises:
        SourceError: the file is numbered as one of several.
    """
    part = None if storage.isdir(path) else which_part(os.path.basename(path))
    if part is not None:
        raise SourceError(
            f"{escape(path)} is {part} of a model, not a model",
            hint="give the directory with all of its files, or their index (*.index.json); inspect and verify take one alone",
        )


def is_plain_file(name: str) -> bool:
    """True for a usual name of a model's only weight file, such as `model.safetensors`."""
    return any(name == single.format("") for _, (single, *_) in _FORMS)


def variant_of(name: str) -> str | None:
    """Return the variant in a weight file's name, such as "fp16" of model.fp16-00001-of-00002.safetensors, or None."""
    match = _VARIANT.fullmatch(name)
    return None if match is None else match["variant"] or match["older"]


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
        names: of files at the top of a directory or repo.
        label: the path of the directory, or the repo id.
        variant: e.g. "fp16"; None chooses the default weights, or the only variant if there are no default weights.
        adapted: the model that an adapter there was trained on, if known.
        is_repo: the files are not on this machine.

    Raises:
        SourceError: there are no weights, or several sets of them; lists what is there.
    """
    if _is_sharded(names):  # even if weights of a model are beside it
        raise SourceError(
            f"{escape(label)} is a sharded checkpoint of a training, not a Hub model",
            hint="shardkit consolidate makes a Hub model of it, shardkit reshard writes it for another mesh",
        )
    if variant is not None:
        weights = _with_variant(names, variant)
        if weights is None:
            raise _no_such_variant_error(names, label, variant)
    else:
        weights = _default_weights(names, "safetensors", label) or _only_index(names, label)
        weights = weights or _default_weights(names, "torch-bin", label) or _only_variant(names, label)
        if weights is None:
            raise _no_weights_error(names, label, adapted, is_repo=is_repo)
    return replace(weights, numbered=tuple(filter(_OF_A_SET.fullmatch, names)))


def select_file(name: str) -> WeightFiles:
    """Return the weights for a file that the user named, which is a weight file or an index.

    Raises:
        SourceError: its name is neither a weight file's nor an index's.
    """
    notes = part_notes(name)
    if name.endswith(".safetensors"):
        return WeightFiles(kind="safetensors", index=None, single=name, notes=notes)
    if name.endswith(".bin"):
        return WeightFiles(kind="torch-bin", index=None, single=name, notes=notes)
    if name.endswith(".json") and ".index." in name:
        return WeightFiles(kind="torch-bin" if ".bin." in name else "safetensors", index=name, single=None)
    raise SourceError(
        f"{escape(name)}: {unread_format([name]) or 'not a weight file that can be opened by itself'}",
        hint="give a directory, a .safetensors file, a .bin file, or an index (*.index.json)",
    )


def unread_format(names: Collection[str]) -> str | None:
    """Return the format of a model that is not read here, with its reason, if names are its markers; else None."""
    return next(
        (
            f"{what}, which is not read"
            for pattern, what in _OTHER_FORMS.items()
            if matching_names(names, pattern)
        ),
        None,
    )


def _is_sharded(names: Collection[str]) -> bool:
    return ".metadata" in names or any(fnmatchcase(name, "model_world_size_*_rank_*.pt") for name in names)


def _default_weights(names: Collection[str], kind: Kind, label: str) -> WeightFiles | None:
    sets = list[WeightFiles]()
    for form in (form for of, form in _FORMS if of == kind):
        single, index = (name if name in names else None for name in map(str.format, form[:2], ("", "")))
        if single is not None or index is not None:
            sets.append(WeightFiles(kind=kind, index=index, single=single))
    if len(sets) > 1:
        raise _ambiguous_weights_error(label, [weights.single or weights.index or "" for weights in sets])
    return sets[0] if sets else None


def _only_index(names: Collection[str], label: str) -> WeightFiles | None:
    variants = {name for _, name, _ in _variant_files(names)}
    indexes = sorted(
        name
        for name in names
        if name.endswith(".safetensors.index.json")
        and name not in variants
        and not any(fnmatchcase(name, pattern) for pattern in _NOT_THE_MODEL)
    )
    if len(indexes) > 1:
        raise _ambiguous_weights_error(label, indexes)
    return WeightFiles(kind="safetensors", index=indexes[0], single=None) if indexes else None


def _only_variant(names: Collection[str], label: str) -> WeightFiles | None:
    variants = sorted({variant for variant, _, _ in _variant_files(names)})
    if len(variants) > 1:
        raise _ambiguous_weights_error(label, sorted(name for _, name, _ in _variant_files(names)))
    weights = _with_variant(names, variants[0]) if variants else None
    if weights is None:
        return None
    note = f"no default weights in {escape(label)}: opened its only variant, {escape(variants[0])}"
    return replace(weights, notes=(note,))


def _with_variant(names: Collection[str], variant: str) -> WeightFiles | None:
    """Return the files of a variant, safetensors rather than legacy ones; None if there are none."""
    for kind, forms in _FORMS:
        matches = [name for form in forms if (name := form.format(f".{variant}")) in names]
        if len(matches) > 1:
            raise _ambiguous_weights_error(f"variant {variant}", matches)
        if matches:
            single, index = (None, matches[0]) if matches[0].endswith(".json") else (matches[0], None)
            return WeightFiles(kind=kind, index=index, single=single)
    return None


def _variant_files(names: Collection[str]) -> Iterator[tuple[str, str, Kind]]:
    """Yield (variant, file name, kind) for every file with a variant in its name."""
    for kind, form in ((kind, form) for kind, forms in _FORMS for form in forms):
        before, after = (re.escape(part) for part in form.split("{}"))
        pattern = re.compile(rf"{before}\.(?P<variant>[\w-]+(\.[\w-]+)*){after}", re.ASCII)
        for name in names:
            match = pattern.fullmatch(name)
            if match and not _SHARD.search(name):
                yield match["variant"], name, kind


def _no_such_variant_error(names: Collection[str], label: str, variant: str) -> SourceError:
    variants = sorted({name for name, _, _ in _variant_files(names)})
    return SourceError(
        f"{escape(label)} has no weights of variant {escape(variant)!r}{suggestion(variant, variants)}",
        hint=f"give --variant {' or '.join(map(repr, variants))}"
        if variants
        else "leave --variant out: it has none",
    )


def _ambiguous_weights_error(label: str, names: list[str]) -> SourceError:
    return SourceError(
        f"{escape(label)}: {len(names)} files could be the weights",
        problems=map(escape, names),
        hint="say which: name the variant, or give the path of one of these files",
    )


def empty_directory_error(path: str) -> SourceError:
    """Return the error for an empty directory."""
    return SourceError(
        f"{escape(path)} is an empty directory",
        hint="check the path, or copy or download the files into it first",
    )


def _no_weights_error(
    names: Collection[str], label: str, adapted: str | None, *, is_repo: bool
) -> SourceError:
    """Return the error for a directory without a model's weights: it names what is there instead.

    Args:
        names, label, adapted, is_repo: as for `select_weights`.
    """
    if not names and not is_repo:
        return empty_directory_error(label)
    if adapters := matching_names(names, "adapter_model.*"):
        return SourceError(
            f"{escape(label)}: expected a Hub model, found a PEFT adapter: {escape(adapters[0])}",
            hint=_MERGE.format(merge=merge_command(label, adapted, "merged")),
        )
    for _, stem, ending in _STEMS:
        if shards := matching_names(names, f"{stem}-?????-of-?????.{ending}"):
            return SourceError(
                f"{escape(label)}: expected a Hub model, found shards whose index is missing: {escape(shards[0])}",
                problems=[f"missing: {escape(name)}" for name in missing_parts(shards)],
                hint=f"download {stem}.{ending}.index.json too",
            )
    form = unread_format(names)
    return SourceError(
        f"{escape(label)}: no model weights found, neither model.safetensors nor an index"
        + (f"; this is {form}" if form else ""),
        problems=[f"found {escape(name)}" for name in sorted(names) if not name.startswith(".")],
        hint="give the directory that has them, or the weight file itself; or download them first",
    )
