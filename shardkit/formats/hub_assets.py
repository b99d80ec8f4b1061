"""Which files of a Hub model lie beside its weights: config, tokenizer, processor, chat template, code, card.

Named one by one: a directory of a trainer holds much else, from optimizer state to the arguments of the run.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase

from shardkit.core.text import escape
from shardkit.errors import ResourceError, SourceError
from shardkit.formats.inside import locate

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"

# transformers 5.23: CONFIG_NAME, GENERATION_CONFIG_NAME, the tokenizers' `vocab_files_names`, the processors'
# `*_NAME`, CHAT_TEMPLATE_DIR; sentence_transformers 5: modules.json and what it names.
_PATTERNS = (
    CONFIG,
    GENERATION_CONFIG,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "vocab-*",
    "merges.txt",
    "bpe.codes",
    "spm.model",
    "spiece.model",
    "source.spm",
    "target.spm",
    "sentencepiece*",
    "*.tiktoken",
    "tekken.json",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "normalizer.json",
    "prophetnet.tokenizer",
    "spm_char.model",
    "target_vocab.json",
    "word_pronunciation.json",
    "word_shape.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "video_processor_config.json",
    "audio_tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "*.py",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_FOLDERS = ("additional_chat_templates", "[0-9]_*")


def is_asset(name: str) -> bool:
    """True for the name of such a file, relative to the model's directory."""
    return not name.endswith((".safetensors", ".bin", ".pt")) and any(
        name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in _PATTERNS
    )


def is_asset_folder(name: str) -> bool:
    """True for the name of a directory that such files may lie in."""
    return any(fnmatchcase(name, pattern) for pattern in _FOLDERS)


def asset_patterns() -> tuple[str, ...]:
    """Return what to ask the Hub for."""
    return _PATTERNS


def list_assets(directory: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the files of this kind that a directory holds.

    Returns:
        Name -> path, in the order of names; and the names of links that leave the directory.

    Raises:
        ResourceError: the directory cannot be listed.
    """
    try:
        names = os.listdir(directory)
        for folder in filter(is_asset_folder, list(names)):
            place = os.path.join(directory, folder)
            if os.path.isdir(place) and not os.path.islink(place):
                names += [f"{folder}/{name}" for name in os.listdir(place)]
    except OSError as error:
        raise ResourceError(f"cannot list {escape(directory)}: {error.strerror}") from None
    found, refused = dict[str, str](), list[str]()
    for name in sorted(filter(is_asset, names)):
        try:
            path = locate(directory, name)
        except SourceError:
            refused.append(name)
            continue
        if os.path.isfile(path):
            found[name] = path
    return found, tuple(refused)
