"""The header of a safetensors file on the Hub, by two HTTP range requests; its data stays where it is.

huggingface_hub makes the requests: its session, token and retries. It has `parse_safetensors_file_metadata`
too, which reads the whole file where a server ignores ranges, and checks little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from shardkit.core.text import escape
from shardkit.errors import ResourceError
from shardkit.formats.hub.safetensors import LENGTH_BYTES, SafetensorsHeader, check_header, text_length

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)", re.ASCII)  # RFC 9110, 14.4
_PARTIAL, _UNSATISFIABLE = 206, 416
_MAX_RETRIES = 3
_PIECE_BYTES = 1 << 16


class _Response(Protocol):
    """What the clients of all versions of huggingface_hub answer with."""

    status_code: int
    headers: Any


class _Answer(NamedTuple):
    data: bytes
    size: int | None
    """Bytes of the whole file; None where the server does not say."""


def read_remote_header(repo_id: str, commit: str, name: str) -> SafetensorsHeader:
    """Read and check the header of a safetensors file of a repo, and no byte of its data.

    Args:
        repo_id: `organisation/name`.
        commit: a full hash, so that both requests see one file.
        name: of the file in the repo.

    Raises:
        SourceError: any rule of the format is broken; the size is the one that the server tells.
        ResourceError: the server's answer makes no sense.
        Exception: whatever huggingface_hub and its HTTP client raise.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo_id, name, revision=commit)
    start, size = _get(url, 0, LENGTH_BYTES, name)
    if size is None:
        size = get_hf_file_metadata(url).size
    if size is None:
        raise _senseless(name, "it does not tell the size of the file")
    length = text_length(start, size, name)
    text = _get(url, LENGTH_BYTES, LENGTH_BYTES + length, name).data if length else b""
    if (len(start), len(text)) != (LENGTH_BYTES, length):
        raise _senseless(name, f"{len(start) + len(text)} bytes came of a header of {LENGTH_BYTES + length}")
    return check_header(text, size, name)


def _get(url: str, start: int, stop: int, name: str) -> _Answer:
    """Return bytes `start` to `stop` of a file; one that is empty has none."""
    with _stream(url, f"bytes={start}-{stop - 1}") as (response, pieces):
        try:
            return _read(response, pieces, start, stop, name)
        except Exception as error:
            # Raised below: http_stream_backoff mistakes it for a failed attempt when it passes through.
            failure = error
    raise failure


def _read(response: _Response, pieces: Iterable[bytes], start: int, stop: int, name: str) -> _Answer:
    """Return what was asked for, from the part of the file or from the whole of it."""
    from huggingface_hub import utils

    if response.status_code == _UNSATISFIABLE and start == 0:
        return _Answer(b"", 0)
    utils.hf_raise_for_status(response)  # type: ignore[attr-defined, arg-type]
    if response.status_code != _PARTIAL:  # the server ignores ranges: take the beginning, leave the rest
        return _Answer(_take(pieces, stop)[start:], _content_length(response.headers))
    content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if content_range is None or int(content_range[1]) != start:
        raise _senseless(name, "it answers with another range than it was asked for")
    size = None if content_range[2] == "*" else int(content_range[2])
    return _Answer(_take(pieces, stop - start), size)


def _take(pieces: Iterable[bytes], nbytes: int) -> bytes:
    """Return the first bytes of a body, and read little further."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) >= nbytes:
            break
    return bytes(body[:nbytes])


def _content_length(headers: Mapping[str, str]) -> int | None:
    length = headers.get("Content-Length", "")
    return int(length) if length.isdecimal() and not headers.get("Content-Encoding") else None


@contextmanager
def _stream(url: str, byte_range: str) -> Iterator[tuple[_Response, Iterable[bytes]]]:
    """Ask for a range and give the response, with its body still to come."""
    from huggingface_hub import constants
    from huggingface_hub import utils as installed

    utils: Any = installed  # it exports its functions without saying so, and others in other versions
    # Compression would hide the size, and nothing of a header is worth it.
    headers = {**utils.build_hf_headers(), "Range": byte_range, "Accept-Encoding": "identity"}
    options: dict[str, Any] = {
        "headers": headers,
        "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT,
        "max_retries": _MAX_RETRIES,
    }
    if hasattr(utils, "http_stream_backoff"):
        with utils.http_stream_backoff("GET", url, **options) as response:
            yield response, response.iter_bytes(_PIECE_BYTES)
    else:  # huggingface_hub before 1.0, which used requests
        with utils.http_backoff("GET", url, stream=True, **options) as response:
            yield response, response.iter_content(_PIECE_BYTES)


def _senseless(name: str, reason: str) -> ResourceError:
    return ResourceError(
        f"{escape(name)}: the server cannot be understood: {reason}",
        hint="check HF_ENDPOINT and any proxy; without --dry-run the whole file is downloaded",
    )
