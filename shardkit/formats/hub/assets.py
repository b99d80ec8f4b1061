"""The assets of a Hub model, which are its files beside the weights: config, tokenizer, processor, template, code, card.

They are recognised by a list of names, because a trainer's directory has many other files, from optimizer state to the
arguments of the run. A model of sentence-transformers also has modules: `modules.json` names their directories, which
hold weights of their own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase, translate
from functools import cache
from typing import Any

from shardkit.core.text import count, escape
from shardkit.errors import ResourceError, ShardkitError, SourceError
from shardkit.files import storage
from shardkit.files.links import locate, read_inside
from shardkit.files.strict_json import is_unicode, parse_integer

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
CARD = "README.md"
_OWN_CARD = re.compile(rb"---\nbase_model: (\S+)  # https://huggingface\.co/\1\n---\n")

# transformers 5.23: CONFIG_NAME, GENERATION_CONFIG_NAME, the tokenizers' `vocab_files_names`, the processors'
# `*_NAME`, CHAT_TEMPLATE_DIR; ModelOpt's hf_quant_config.json; sentence_transformers 5: modules.json and what it names.
_OF_TOKENIZERS = tuple(
    """
    tokenizer* special_tokens_map.json added_tokens.json vocab.* vocab-* merges.txt bpe.codes spm.model
    spiece.model source.spm target.spm sentencepiece* *.tiktoken tiktoken.model ice_text.model tekken.json
    byte_maps.json dict.txt emoji.json entity_vocab.json normalizer.json prophetnet.tokenizer spm_char.model
    target_vocab.json word_pronunciation.json word_shape.json chat_template.jinja chat_template.json
    additional_chat_templates/*.jinja
    """.split()
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
_NO_VOCABULARY = (
    *(
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "merges.txt",
        "normalizer.json",
    ),
    *("tokenization_*.py", *_TEMPLATES),
)
# Folders of further tokenizers of a processor, such as InstructBLIP's `qformer_tokenizer`.
_TOKENIZER_FOLDER = "*_tokenizer"
_OF_PROCESSORS = (
    *("preprocessor_config.json", "processor_config.json", "image_processor_config.json"),
    *("video_preprocessor_config.json", "video_processor_config.json", "audio_tokenizer_config.json"),
    *(f"{_TOKENIZER_FOLDER}/{name}" for name in _OF_TOKENIZERS if "/" not in name),
)
_BY_TOOLS = (
    *("config.json", "hf_quant_config.json", "generation_config.json", *_OF_TOKENIZERS, *_OF_PROCESSORS),
    *(
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "[0-9]_*/config.json",
    ),
)
_BY_PEOPLE = ("*.py", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*")
_PATTERNS = (*_BY_TOOLS, *_BY_PEOPLE)
_FOLDERS = ("additional_chat_templates", "[0-9]_*", _TOKENIZER_FOLDER)
# The assets of a tokenizer, which are replaced together with it.
_TOKENIZER = (*_OF_TOKENIZERS, "tokenization_*.py")

MODULES = "modules.json"
# sentence_transformers 5.6, base/model.py (modules.json) and base/modules/router.py (router_config.json).
_ROUTER = "router_config.json"
_MAX_MODULES_BYTES = 1 << 20
_MAX_DEPTH = 4
_MAX_FILES = 20_000

_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data"),
    *(
        "*.h5",
        "*.msgpack",
        "*.npz",
        "*.npy",
        "*.ot",
        "*.tflite",
        "*.nemo",
        "*.keras",
        "*.pdparams",
        "*.pkl",
        "*.pickle",
        "*.distcp",
    ),
)
# Files that surely hold no weights. A list of all files with weights would never be complete, so every file that is not
# in this list and not copied is reported.
_NO_WEIGHTS = tuple(
    """
    *.json *.jsonl *.txt *.md *.rst *.yaml *.yml *.toml *.cfg *.ini *.conf *.py *.pyc *.pyi *.sh *.js
    *.css *.html *.ipynb *.jinja *.jinja2 *.c *.cpp *.cu *.h *.csv *.tsv *.xml *.log *.out *.err *.lock
    *.proto *.sha256 *.md5 *.png *.jpg *.jpeg *.gif *.svg *.webp *.ico *.pdf *.wav *.mp3 *.flac *.ogg
    *.mp4 *.webm *.ttf *.woff2 *.metadata .git* .ds_store *.tfevents.* license* notice* readme*
    use_policy* latest latest_universal metadata.pkl
    """.split()
)
_NOT_WALKED = (".git", os.path.join(".cache", "huggingface"))  # folders of git and of `hf download`
# (patterns of names, description). The first match counts.
_BESIDE = (
    (("adapter*",), "an adapter, which is not merged into the weights"),
    (
        (
            "optim*",
            "*_optim_states.pt",
            "*scheduler*",
            "rng*",
            "random_states*",
            "scaler*",
            "training_args.bin",
        ),
        "state of the trainer",
    ),
)
# The same model in another format.
_COPIES = ("*.gguf", "*.onnx*", "openvino*", "tf_model*", "flax_model*", "consolidated*", "pytorch_model*")
_NOT_NAMED = "not among the model's weight files"


def is_asset(name: str) -> bool:
    """True for the name of an asset, relative to the model's directory."""
    return _is_any(name, _PATTERNS)


def is_generated_asset(name: str) -> bool:
    """True for the name of an asset that programs write and people do not, such as a config or a tokenizer's file."""
    return _is_any(name, _BY_TOOLS) and not _is_any(name, _BY_PEOPLE)


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return not name.endswith((".safetensors", ".bin", ".pt")) and any(
        name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns
    )


def card_of(repo_id: str) -> bytes:
    """Return a model card that only names the base, which is a model on the Hub."""
    return f"---\nbase_model: {repo_id}  # https://huggingface.co/{repo_id}\n---\n".encode()


def is_generated_card(data: bytes) -> bool:
    """True for a card that `card_of` made, whatever the base."""
    return _OWN_CARD.fullmatch(data) is not None


def is_tokenizer_file(name: str) -> bool:
    """True for the name of an asset that belongs to a tokenizer."""
    return is_asset(name) and _is_any(name, _TOKENIZER)


def is_processor_file(name: str) -> bool:
    """True for the name of a processor's asset, except those of its main tokenizer."""
    return _is_any(name, _OF_PROCESSORS)


def is_template(name: str) -> bool:
    """True for the name of a chat template's file."""
    return _is_any(name, _TEMPLATES)


def is_vocabulary(name: str) -> bool:
    """True for the name of a tokenizer's file that lists its tokens."""
    return _is_any(name, _TOKENIZER) and not _is_any(name, _NO_VOCABULARY)


def is_asset_folder(name: str) -> bool:
    """True for the name of a directory that may hold assets."""
    return any(fnmatchcase(name, pattern) for pattern in _FOLDERS)


def is_tokenizer_folder(name: str) -> bool:
    """True for the name of a directory that may hold a processor's further tokenizer, and no other file of the model."""
    return fnmatchcase(name, _TOKENIZER_FOLDER)


def asset_patterns() -> tuple[str, ...]:
    """Return the patterns of assets, for a download from the Hub."""
    return _PATTERNS


def is_weights(name: str) -> bool:
    """True for the name of a file with weights, in any format that is found on the Hub."""
    return _matches(name, _WEIGHTS)


def may_hold_weights(name: str) -> bool:
    """True for the name of a file with weights, or of a kind that is unknown here."""
    return is_weights(name) or not (is_asset(name) or _matches(name, _NO_WEIGHTS))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return _combined_pattern(patterns).match(os.path.basename(name).lower()) is not None


@cache
def _combined_pattern(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one expression that matches if any of the patterns does: a directory may hold thousands of names."""
    return re.compile("|".join(map(translate, patterns)))


def list_modules(directory: str) -> dict[str, str]:
    """Return the modules of a model by `modules.json`: folder -> name in memory; "." is the model's own directory.

    Raises:
        SourceError: a module's folder is outside of the model's directory.
    """
    name_of = dict[str, str]()
    for module in _read_small_json(directory, MODULES, list):
        if isinstance(module, dict) and isinstance(module.get("path"), str):
            name_of[module["path"]] = str(module.get("name", ""))
    for name in _read_small_json(directory, _ROUTER, dict).get("types", ()):
        name_of.setdefault(str(name), "")
    unsafe = [path for path in name_of if "\0" in path or not is_unicode(path)]
    folders = {os.path.normpath(path): name for path, name in name_of.items() if path not in unsafe}
    unsafe += [path for path in folders if os.path.isabs(path) or os.pardir in path.split(os.sep)]
    SourceError.raise_for(
        list(map(escape, unsafe)),
        f"{MODULES} or {_ROUTER} of {escape(directory)} names directories that cannot be in the model's",
        hint="the modules of a model lie in its own directory",
    )
    return folders


def module_folders(directory: str) -> list[str]:
    """Return the folders of modules, relative to the model's directory; raises the same errors as `list_modules`."""
    return [folder for folder in list_modules(directory) if folder != os.curdir]


def _read_small_json(directory: str, name: str, kind: type) -> Any:
    """Return the content of a small JSON file, or an empty `kind` if the file is missing, unreadable or of another kind."""
    if not storage.lexists(os.path.join(directory, name)):
        return kind()
    try:
        content = json.loads(read_inside(directory, name, _MAX_MODULES_BYTES), parse_int=parse_integer)
    except (ShardkitError, ValueError, RecursionError):
        return kind()
    return content if isinstance(content, kind) else kind()


def weights_beside(
    names: Iterable[str], model_files: Collection[str], folders: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield (name, description) of files beside the model's that hold weights, or may hold some. Pure.

    The files of a folder are one entry, such as ("onnx/", "3 files: ..."), unless it is a module's.

    Args:
        names: of files, relative to the model's directory.
        model_files: the model's weight files.
        folders: those of modules, if known.
    """
    inside = dict[str, list[str]]()
    for name in sorted(names):
        if name in model_files or not may_hold_weights(name):
            continue
        folder, _, rest = name.partition("/")
        is_module = fnmatchcase(folder, _FOLDERS[1]) or any(name.startswith(f"{path}/") for path in folders)
        if not rest or is_module:
            yield name, "weights of a module of its own" if is_module else _description(name)
        else:
            inside.setdefault(folder, []).append(name)
    for folder, members in inside.items():
        what = {_description(os.path.basename(name)) for name in members}
        which = members[0].removeprefix(f"{folder}/") if len(members) == 1 else count(len(members), "file")
        yield f"{folder}/", f"{which}: {what.pop() if len(what) == 1 else _NOT_NAMED}"


def may_be_model(name: str) -> bool:
    """True for the name of a file with weights that may be a model's: not an adapter's, a trainer's, or another format's."""
    return is_weights(name) and _description(name) == _NOT_NAMED and not _matches(name, _COPIES)


def unread_weights(names: Iterable[str]) -> list[str]:
    """Return those names, sorted, whose endings are those of weights and that are not an adapter's or a trainer's."""
    return [name for name in sorted(names) if is_weights(name) and _description(name) == _NOT_NAMED]


def unknown_settings(names: Iterable[str]) -> list[str]:
    """Return the JSON files that are neither assets nor an index, and so are settings of another library."""
    return [
        name
        for name in sorted(names)
        if name.endswith(".json") and not is_asset(name) and ".index." not in name
    ]


def _description(name: str) -> str:
    return next(
        (what for patterns, what in _BESIDE if any(fnmatchcase(name, each) for each in patterns)), _NOT_NAMED
    )


def list_weights(directory: str) -> list[str]:
    """Return the names of all files in and below a directory that hold weights, or may hold some."""
    return [name for name in _walk(directory, "", hidden=True) if may_hold_weights(name)]


def list_weights_around(directory: str) -> list[tuple[str, str]]:
    """Return (name, description) of weights in the parent directory, if `directory` is a module of the model there.

    Raises:
        SourceError: as for `list_modules`, about the parent directory.
    """
    here = storage.realpath(directory)
    above, module = os.path.split(here)
    if module not in module_folders(above):
        return []
    names = [name for name in list_weights(above) if not name.startswith(f"{module}/")]
    return [
        (os.path.join(os.pardir, name), f"{what}; {MODULES} above names {module} as one of its modules")
        for name, what in weights_beside(names, (), module_folders(above))
    ]


def _walk(directory: str, folder: str, *, hidden: bool = False) -> Iterator[str]:
    """Yield the files below a folder, relative to the directory; links to directories are not followed."""
    seen = 0
    for here, inner, names in storage.walk(os.path.join(directory, folder)):
        place = os.path.relpath(here, directory)
        place = "" if place == os.curdir else place
        is_deep = place.count(os.sep) + 1 >= _MAX_DEPTH
        shown = [name for name in inner if hidden or not name.startswith(".")]
        inner[:] = (
            [] if is_deep else sorted(name for name in shown if os.path.join(place, name) not in _NOT_WALKED)
        )
        for name in sorted(names):
            seen += 1
            if seen > _MAX_FILES:
                return
            if hidden or not name.startswith("."):
                yield os.path.join(place, name)


def list_assets(directory: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the assets in a directory, and all files of its modules, including weights.

    Returns:
        Name -> path, in the order of names; and the names of links that leave the directory or are broken.

    Raises:
        SourceError: a module is outside of the directory.
        ResourceError: the directory cannot be listed.
    """
    try:
        names = storage.listdir(directory)
        for folder in filter(is_asset_folder, list(names)):
            place = os.path.join(directory, folder)
            if storage.isdir(place) and not storage.islink(place):
                names += [f"{folder}/{name}" for name in storage.listdir(place)]
    except OSError as error:
        raise ResourceError(f"cannot list {escape(directory)}: {error.strerror}") from None
    inside = [name for folder in module_folders(directory) for name in _walk(directory, folder)]
    assets, refused = dict[str, str](), list[str]()
    for name in sorted({*filter(is_asset, names), *inside}):
        try:
            path = locate(directory, name)
        except SourceError:
            refused.append(name)
            continue
        if storage.isfile(path):
            assets[name] = path
        elif storage.islink(path):
            refused.append(name)
    return assets, tuple(refused)
