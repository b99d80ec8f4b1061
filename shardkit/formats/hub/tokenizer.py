"""Read a tokenizer: its files, its tokens, the rows of an embedding that it needs, and its differences from another.

Sources: tokenizers 0.22, `tokenizer.json`; transformers 5.24, `vocab_files_names` and `added_tokens_decoder`;
sentencepiece_model.proto, field 1 of ModelProto.
"""

from __future__ import annotations

import json
from binascii import crc32
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.strict_json import parse_integer, read_small, refuse_pointers
from shardkit.formats.hub.assets import is_tokenizer_file, list_assets

_MAX_BYTES = 256 << 20
_MAX_TOKENS = 1 << 31
SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_SAID_ROLES = ("bos_token", "eos_token", "pad_token")
_TEXTS = ("tokenizer.json", "vocab.json", "vocab.txt")

FileReaders = Mapping[str, Callable[[], bytes]]
"""Name of a tokenizer's file -> function that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer's files."""

    label: str
    """The option and directory, for messages; escaped."""
    files: Mapping[str, str]
    """Name -> path."""
    tokens: int | None
    """The rows of an embedding that it needs: its highest id plus one. None if its kind of vocabulary is not read here."""


def open_tokenizer(directory: str) -> Tokenizer:
    """Open the tokenizer in a directory.

    Raises:
        SourceError: not a directory, no tokenizer in it, or files that are damaged or are pointers of Git LFS.
        ResourceError: a file cannot be read.
    """
    is_directory = storage.isdir(directory)
    files = tokenizer_files(directory) if is_directory else {}
    if not files:
        none_there = "no files of a tokenizer there (tokenizer.json, vocab.txt, ...)"
        raise SourceError(
            f"--tokenizer {escape(directory)}: {none_there if is_directory else 'not a directory'}",
            hint="give the directory that the tokenizer's save_pretrained wrote, or a Hub model's",
        )
    return read_tokenizer(f"--tokenizer {escape(directory)}", files)


def read_tokenizer(label: str, files: Mapping[str, str]) -> Tokenizer:
    """Read a tokenizer's files, name -> path; errors as for `open_tokenizer`."""
    refuse_pointers(files)
    return Tokenizer(label=label, files=files, tokens=_count_rows(files))


def tokenizer_files(directory: str) -> dict[str, str]:
    """Return the files of a tokenizer in a directory: name -> path.

    Raises:
        ResourceError: the directory cannot be listed.
    """
    return {name: path for name, path in list_assets(directory)[0].items() if is_tokenizer_file(name)}


def _count_rows(files: Mapping[str, str]) -> int | None:
    """Return the highest id in a tokenizer's files plus one; None if no file lists its tokens."""
    listed = [
        ids
        for name, read in _LISTS.items()
        if name in files and (ids := list(read(read_small(files[name], name, _MAX_BYTES), name)))
    ]
    if not listed:
        return None
    added = [
        token_id
        for name, read in _ADDED.items()
        if name in files
        for token_id in read(read_small(files[name], name, _MAX_BYTES), name)
    ]
    return min(max(max(listed[0]), *added, -1) + 1, _MAX_TOKENS)


def token_ids(files: FileReaders) -> dict[str, int]:
    """Return text -> id of all tokens in files that list them as text; a SentencePiece model is not read."""
    ids, added = dict[str, Any](), list[Any]()
    name = next((name for name in _TEXTS if name in files), None)
    if name == "vocab.txt":
        lines = files[name]().decode("utf-8", "replace").splitlines()
        ids = {line: number for number, line in enumerate(lines)}
    elif name is not None:
        content = _parse_object_or_empty(files[name](), name)
        model = content.get("model") if name == "tokenizer.json" else {"vocab": content}
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, list):  # pieces, each with its score
            pieces = enumerate(vocab)
            vocab = {str(piece[0]): number for number, piece in pieces if isinstance(piece, list) and piece}
        ids = dict(vocab) if isinstance(vocab, dict) else {}
        entries = content.get("added_tokens")
        added += entries if isinstance(entries, list) else []
    if "added_tokens.json" in files:
        ids |= _parse_object_or_empty(files["added_tokens.json"](), "added_tokens.json")
    decoder = _settings(files).get("added_tokens_decoder")
    for key, token in decoder.items() if isinstance(decoder, dict) else ():
        added += [{**token, "id": int(key)}] if key.isdecimal() and isinstance(token, dict) else []
    ids |= {str(token.get("content")): token.get("id") for token in added if isinstance(token, dict)}
    return {token: number for token, number in ids.items() if isinstance(number, int)}


def special_tokens(files: FileReaders) -> dict[str, str]:
    """Return role -> text of the special tokens; a role is a key such as `eos_token`."""
    name, settings = "special_tokens_map.json", _settings(files)
    tokens = {**(_parse_object_or_empty(files[name](), name) if name in files else {}), **settings}
    plain = {
        role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()
    }
    return {
        role: token for role, token in plain.items() if role.endswith("_token") and isinstance(token, str)
    }


def chat_template(files: FileReaders) -> object:
    """Return the chat template from the first place in which transformers would find one, or None."""
    if TEMPLATE in files:
        return files[TEMPLATE]().decode("utf-8", "replace").strip()
    name = "chat_template.json"
    template = _settings(files).get("chat_template")
    template = (
        _parse_object_or_empty(files[name](), name).get("chat_template")
        if template is None and name in files
        else template
    )
    return template.strip() if isinstance(template, str) else template


def tokenizer_differences(files: FileReaders, base: FileReaders) -> Iterator[tuple[str, str, object, object]]:
    """Yield (file, key, value, the base's value) for each difference in meaning between a tokenizer and the base's.

    Tokens, special tokens, template and length are compared. Vocabularies that are not read, such as SentencePiece's,
    are compared by their bytes.
    """
    has_same = {name for name in files.keys() & base.keys() if files[name]() == base[name]()}
    ids, base_ids = ({}, {}) if "tokenizer.json" in has_same else (token_ids(files), token_ids(base))
    if ids and base_ids and ids != base_ids:
        alone = [
            [token for token, number in one.items() if two.get(token) != number]
            for one, two in ((ids, base_ids), (base_ids, ids))
        ]
        yield next((name for name in _TEXTS if name in files), SETTINGS), "tokens", alone[0], alone[1]
    for name in sorted(files.keys() & base.keys() - has_same):
        if name.endswith((".model", ".tiktoken")) or name == "merges.txt":
            yield name, "crc32", f"{crc32(files[name]()):08x}", f"{crc32(base[name]()):08x}"
    base_tokens, tokens = special_tokens(base), special_tokens(files)
    for role in sorted(tokens.keys() | base_tokens.keys()):
        is_added = role not in _SAID_ROLES and not (
            role in tokens and role in base_tokens
        )  # Gemma's mask_token, by transformers 5
        if tokens.get(role) != base_tokens.get(role) and not is_added:
            yield SETTINGS, role, tokens.get(role), base_tokens.get(role)
    for key in ("add_bos_token", "add_eos_token", "model_max_length"):
        value, base_value = _settings(files).get(key), _settings(base).get(key)
        if value is not None and base_value is not None and value != base_value:
            yield SETTINGS, key, value, base_value
    if (own_template := chat_template(files)) != (template := chat_template(base)):
        file = next((name for name in (TEMPLATE, "chat_template.json") if name in files), SETTINGS)
        yield file, "chat_template", own_template, template


def _settings(files: FileReaders) -> dict[str, Any]:
    return _parse_object_or_empty(files[SETTINGS](), SETTINGS) if SETTINGS in files else {}


def _parse_object_or_empty(data: bytes, name: str) -> dict[str, Any]:
    """Return the content of a JSON file; empty for other JSON than an object.

    A list, for example, has none of the keys that are read here. The file is copied all the same, as it is.

    Raises:
        SourceError: the file is not valid JSON.
    """
    try:
        content = json.loads(data, parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{escape(name)}: not valid JSON: {escape(str(error))}") from None
    return content if isinstance(content, dict) else {}


def _integers(values: object) -> Iterator[int]:
    for value in values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, int) and not isinstance(value, bool):
            yield value


def _ids_of_fast(data: bytes, name: str) -> Iterator[int]:
    content = _parse_object_or_empty(data, name)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    yield from _integers([*vocab.values()]) if isinstance(vocab, dict) else range(len(vocab or ()))
    added = content.get("added_tokens")
    yield from _integers([token.get("id") for token in added or () if isinstance(token, dict)])


def _ids_of_table(data: bytes, name: str) -> Iterator[int]:
    yield from _integers([*_parse_object_or_empty(data, name).values()])


def _ids_of_lines(data: bytes, _name: str) -> Iterator[int]:
    yield from range(len(data.splitlines()))


def _ids_of_decoder(data: bytes, name: str) -> Iterator[int]:
    added = _parse_object_or_empty(data, name).get("added_tokens_decoder")
    yield from _integers([int(key) for key in added if key.isdecimal()] if isinstance(added, dict) else ())


def _ids_of_pieces(data: bytes, name: str) -> Iterator[int]:
    """Yield the ids of a SentencePiece model's pieces by counting them; a piece is field 1 of the protobuf message."""
    offset = number = 0
    while offset < len(data):
        tag, offset = _varint(data, offset, name)
        if tag & 7 != 2:  # every field of the model is a message
            raise SourceError(f"{escape(name)}: not a SentencePiece model")
        size, offset = _varint(data, offset, name)
        offset += size
        if tag >> 3 == 1:
            yield number
            number += 1


def _varint(data: bytes, offset: int, name: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if offset >= len(data):
            break
        value |= (data[offset] & 127) << shift
        offset += 1
        if data[offset - 1] < 128:
            return value, offset
    raise SourceError(f"{escape(name)}: it ends in the middle of a field")


# The first of these files that exists is read; the others are older forms of the same list.
_LISTS = {
    "tokenizer.json": _ids_of_fast,
    "vocab.json": _ids_of_table,
    "vocab.txt": _ids_of_lines,
    "tokenizer.model": _ids_of_pieces,
    "spiece.model": _ids_of_pieces,
    "sentencepiece.bpe.model": _ids_of_pieces,
}
_ADDED = {"added_tokens.json": _ids_of_table, "tokenizer_config.json": _ids_of_decoder}
