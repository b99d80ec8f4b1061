"""A tokenizer that a person names for the output: its files, and how many rows of an embedding it needs.

Sources: tokenizers 0.22, `tokenizer.json`; transformers 5.24, `vocab_files_names` and `added_tokens_decoder`;
sentencepiece_model.proto, field 1 of ModelProto.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files import storage
from shardkit.files.strict_json import parse_integer, read_small, refuse_pointers
from shardkit.formats.hub.assets import is_tokenizer_file, list_assets

_MAX_BYTES = 256 << 20
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer's files."""

    label: str
    """The directory, as it was given."""
    files: Mapping[str, str]
    """Name -> path."""
    tokens: int | None
    """The rows that it needs: one more than its highest id. None if its files are of a kind that is not read here."""


def open_tokenizer(directory: str) -> Tokenizer:
    """Open the tokenizer in a directory.

    Raises:
        SourceError: no directory, none in it, or damaged files or pointers of Git LFS.
        ResourceError: it cannot be read.
    """
    is_directory = storage.isdir(directory)
    files = tokenizer_files(directory) if is_directory else {}
    if not files:
        none_there = "no files of a tokenizer there (tokenizer.json, vocab.txt, ...)"
        raise SourceError(
            f"--tokenizer {escape(directory)}: {none_there if is_directory else 'not a directory'}",
            hint="give the directory that the tokenizer's save_pretrained wrote, or a Hub model's",
        )
    refuse_pointers(files)
    return Tokenizer(label=directory, files=files, tokens=_count(files))


def tokenizer_files(directory: str) -> dict[str, str]:
    """Return the files of a tokenizer in a directory: name -> path.

    Raises:
        ResourceError: it cannot be listed.
    """
    return {name: path for name, path in list_assets(directory)[0].items() if is_tokenizer_file(name)}


def _count(files: Mapping[str, str]) -> int | None:
    """Return one more than the highest id in a tokenizer's files; None if no file lists its tokens."""
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


def _object(data: bytes, name: str) -> dict[str, Any]:
    try:
        content = json.loads(data, parse_int=parse_integer)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{escape(name)}: not valid JSON: {escape(str(error))}") from None
    return content if isinstance(content, dict) else {}


def _ids(values: object) -> Iterator[int]:
    for value in values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, int) and not isinstance(value, bool):
            yield value


def _fast(data: bytes, name: str) -> Iterator[int]:
    content = _object(data, name)
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    yield from _ids([*vocab.values()]) if isinstance(vocab, dict) else range(len(vocab or ()))
    added = content.get("added_tokens")
    yield from _ids([token.get("id") for token in added or () if isinstance(token, dict)])


def _table(data: bytes, name: str) -> Iterator[int]:
    yield from _ids([*_object(data, name).values()])


def _lines(data: bytes, _name: str) -> Iterator[int]:
    yield from range(len(data.splitlines()))


def _decoder(data: bytes, name: str) -> Iterator[int]:
    added = _object(data, name).get("added_tokens_decoder")
    yield from _ids([int(key) for key in added if key.isdecimal()] if isinstance(added, dict) else ())


def _pieces(data: bytes, name: str) -> Iterator[int]:
    """Yield the numbers of a SentencePiece model's pieces: the fields 1 of the message, whatever is in them."""
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


# The first that is there lists the tokens; the others are older forms of the same.
_LISTS = {
    "tokenizer.json": _fast,
    "vocab.json": _table,
    "vocab.txt": _lines,
    "tokenizer.model": _pieces,
    "spiece.model": _pieces,
    "sentencepiece.bpe.model": _pieces,
}
_ADDED = {"added_tokens.json": _table, "tokenizer_config.json": _decoder}
