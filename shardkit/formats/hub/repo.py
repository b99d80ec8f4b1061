"""Download models from the Hub, or only the headers of their weights, always from one commit; and upload models.

All traffic goes through huggingface_hub, with its session, cache, token, retries, progress bars and environment
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). The header of a safetensors file takes two HTTP range requests, made
here: huggingface_hub's own `parse_safetensors_file_metadata` reads the whole file if a server ignores ranges, and checks
little.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from shardkit.core.text import escape
from shardkit.errors import ResourceError, ShardkitError, SourceError, UsageError, causes
from shardkit.files import storage
from shardkit.files.remote.hub import (
    SCHEME,
    Response,
    address_of,
    explain,
    named,
    names_repo,
    status_of,
)
from shardkit.formats.contract import OpenedHubModel
from shardkit.formats.hub.assets import list_weights
from shardkit.formats.hub.directory import (
    RemoteHeaders,
    choose_weights,
    open_weights,
    weight_files,
    with_other_weights,
)
from shardkit.formats.hub.files import DIFFUSERS, MODEL, WeightFiles, select_weights
from shardkit.formats.hub.safetensors import LENGTH_BYTES, SafetensorsHeader, check_header, text_length

# Files besides the weights that are needed to build the model. Remote code is downloaded here, and never run here.
_SMALL_FILES = ("config.json", "generation_config.json", "*.py")

# huggingface_hub 2.4, utils/_validators.py, validate_repo_id
_REPO_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_MAX_REPO_ID = 96
_NUM_CONNECTIONS = 8
_DOWNLOADED = (
    "{name}: a legacy file can be read only once it is here, so the weights were downloaded into the cache"
)
# Patterns of weight files. Those of an earlier upload with other names would be a second model beside the new one.
_REPLACED = tuple(
    f"{stem}{end}"
    for stem in (MODEL, DIFFUSERS)
    for end in (".safetensors", "-*-of-*.safetensors", ".safetensors.index.json")
)
# vLLM 0.11, model_executor/layers/quantization: get_config_filenames of ModelOpt, GPTQ and AWQ. Loaders read plain weights
# as quantised ones if such a file is beside them.
_QUANTISED_CONFIGS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_FILE_ENDINGS = (".safetensors", ".bin", ".json", ".git", ".distcp", ".ckpt", ".pt", ".pth")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)", re.ASCII)  # RFC 9110, 14.4
_PARTIAL, _UNSATISFIABLE = 206, 416
_MAX_RETRIES = 3
_PIECE_BYTES = 1 << 16


def looks_like_repo_id(text: str) -> bool:
    """True for text of the form `name` or `organisation/name`, as the Hub spells repo ids."""
    return (
        len(text) <= _MAX_REPO_ID
        and _REPO_ID.fullmatch(text) is not None
        and not any(pair in text for pair in ("--", ".."))
        and not text.endswith((*_FILE_ENDINGS, "-", "."))
    )


class Repo(NamedTuple):
    """A repo that the user named."""

    id: str
    """`organisation/name`."""
    revision: str | None
    """Branch, tag or commit; None is the default branch."""


def named_repo(text: str, revision: str | None = None) -> Repo | None:
    """Return the repo that a text names, or None if it names no repo.

    The text may be a repo id, `hf://organisation/name@revision`, or the address of the repo's web page.

    Args:
        text: as the user wrote it.
        revision: from an option; None for the one in the text, or the default branch.

    Raises:
        UsageError: the text and `revision` name different revisions.
    """
    address = (address_of(text) or text).rstrip("/")
    if not address.startswith(SCHEME):
        return Repo(text, revision) if looks_like_repo_id(text) else None
    if not names_repo(address):  # a folder, or a file
        return None
    repo_id, named_revision = named(address)
    if not looks_like_repo_id(repo_id):
        return None
    if named_revision is not None and revision not in (None, named_revision):
        raise UsageError(
            f"{escape(text)} is of revision {escape(named_revision)}, and --revision is {escape(str(revision))}",
            hint="leave out one of the two",
        )
    return Repo(repo_id, named_revision or revision)


def fetch_model(
    repo_id: str, *, revision: str | None = None, variant: str | None = None, headers_only: bool = False
) -> OpenedHubModel:
    """Download a model's weights into huggingface_hub's cache and open them.

    Args:
        repo_id: `organisation/name`.
        revision: branch, tag or commit; None is the default branch.
        variant: as for `open_model`.
        headers_only: download no safetensors file, and read only the headers of those that are not in the cache.
            Legacy files have no separate header, so they are downloaded.

    Returns:
        A model whose identity has the repo and the commit; every file is from that commit.

    Raises:
        SourceError: the repo, revision or weights do not exist, the repo is gated, or weights are damaged.
        ResourceError: no network; offline, and files are missing in the cache; or a full disk.
    """
    with _explaining_errors(repo_id, revision):
        folder = _download(repo_id, revision, _SMALL_FILES)
        commit = os.path.basename(folder)
        weights, repo_files = _choose_among(repo_id, commit, folder, variant)
        names, absent = _weight_files(repo_id, commit, folder, weights)
        elsewhere: RemoteHeaders = {}
        if headers_only and weights.kind == "safetensors":
            elsewhere = _read_headers(repo_id, commit, absent)
        else:
            _download(repo_id, commit, _literal_patterns(names))
    model = with_other_weights(open_weights(folder, weights, elsewhere=elsewhere), repo_files)
    if headers_only and absent and weights.kind != "safetensors":
        model.catalog.notes += (_DOWNLOADED.format(name=escape(absent[0])),)
    identity = replace(model.identity, repo=repo_id, commit=commit)
    return replace(model, label=repo_id.rpartition("/")[2], identity=identity)


def cached_model(source: str, revision: str | None = None, variant: str | None = None) -> str | None:
    """Return the folder of a repo's model in the cache if all of its weights are there, else None. Downloads nothing.

    Args:
        source: as the user wrote it; it may also be a path, for which this is None.
        revision, variant: as for `fetch_model`.
    """
    try:
        repo = None if storage.lexists(source) else named_repo(source, revision)
        if repo is None:
            return None
        from huggingface_hub import snapshot_download

        folder = str(snapshot_download(repo.id, revision=repo.revision, local_files_only=True))
        weights = choose_weights(folder, storage.listdir(folder), variant=variant)
        names, _ = weight_files(folder, weights)
    except Exception:  # of many unrelated types; a download will raise the same problem
        return None
    return folder if all(storage.exists(os.path.join(folder, name)) for name in names) else None


def _weight_files(
    repo_id: str, commit: str, folder: str, weights: WeightFiles
) -> tuple[tuple[str, ...], list[str]]:
    """Download the index, and return the names of all weight files and of those that are not in the cache."""
    if weights.index:
        _download(repo_id, commit, _literal_patterns([weights.index]))
    names, _ = weight_files(folder, weights)
    return names, [name for name in names if not storage.exists(os.path.join(folder, name))]


def _read_headers(repo_id: str, commit: str, names: Iterable[str]) -> RemoteHeaders:
    """Read headers over the network, several at a time; files that the repo lacks are left out.

    The function in the entry of a damaged header raises its error, so that all damaged ones are reported together.
    """
    from huggingface_hub import errors

    headers = {}
    pool = ThreadPoolExecutor(_NUM_CONNECTIONS)
    try:
        pending = {name: pool.submit(read_remote_header, repo_id, commit, name) for name in names}
        for name, future in pending.items():
            error = future.exception()
            if isinstance(error, errors.EntryNotFoundError):
                continue
            if error is not None and not isinstance(error, SourceError):
                raise error
            headers[name] = future.result
    finally:
        pool.shutdown(cancel_futures=True)
    return headers


def fetch_files(repo_id: str, patterns: Iterable[str], *, revision: str | None = None) -> str:
    """Download the matching files of a repo into the cache, and return the commit's folder there.

    Raises:
        SourceError, ResourceError: as `fetch_model`.
    """
    with _explaining_errors(repo_id, revision):
        return _download(repo_id, revision, patterns)


def open_headers(repo_id: str, commit: str) -> OpenedHubModel | None:
    """Open a repo's weights without downloading them; return None if it has no safetensors weights.

    Args:
        repo_id: `organisation/name`.
        commit: the full hash.

    Raises:
        SourceError, ResourceError: as `fetch_model`.
    """
    with _explaining_errors(repo_id, commit):
        folder = _download(repo_id, commit, _SMALL_FILES)
        try:
            weights, repo_files = _choose_among(repo_id, commit, folder, None)
        except SourceError:  # an adapter's repo, or one of configs alone
            return None
        if weights.kind != "safetensors":
            return None
        elsewhere = _read_headers(repo_id, commit, _weight_files(repo_id, commit, folder, weights)[1])
    return with_other_weights(open_weights(folder, weights, elsewhere=elsewhere), repo_files)


def list_files(repo_id: str, commit: str) -> list[str]:
    """Return the names of a repo's files, or an empty list if the Hub does not answer."""
    from huggingface_hub import list_repo_files

    try:
        return list(list_repo_files(repo_id, revision=commit))
    except Exception:  # the HTTP client's own types: no common base in huggingface_hub
        return []


class RepoFile(NamedTuple):
    """The Hub's description of a file in a repo."""

    name: str
    size: int
    """Bytes."""
    git_id: str
    """Git id of the blob in the repo's history: the file itself if `sha256` is None, else a pointer to it."""
    sha256: str | None
    """Of the file, in hex, if it is stored outside git (LFS, Xet); else None."""


def list_repo(repo_id: str, *, revision: str | None = None) -> tuple[str, dict[str, RepoFile]]:
    """Return the commit of a repo, and its files by name; nothing is downloaded.

    Args:
        repo_id: `organisation/name`.
        revision: branch, tag or commit; None is the default branch.

    Raises:
        UsageError: HF_HUB_OFFLINE is set.
        SourceError, ResourceError: as `fetch_model`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFolder

    if constants.HF_HUB_OFFLINE:
        raise UsageError("the Hub must be asked, but HF_HUB_OFFLINE is set", hint="unset it")
    with _explaining_errors(repo_id, revision):
        api = HfApi()
        commit = str(api.model_info(repo_id, revision=revision).sha)
        files = [
            RepoFile(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
            for entry in api.list_repo_tree(repo_id, recursive=True, revision=commit)
            if not isinstance(entry, RepoFolder)
        ]
    return commit, {file.name: file for file in files}


def _download(repo_id: str, revision: str | None, patterns: Iterable[str]) -> str:
    """Download the matching files, and return the commit's folder in the cache."""
    from huggingface_hub import snapshot_download

    folder = str(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))
    storage.list_again()
    return folder


def _literal_patterns(names: Iterable[str]) -> list[str]:
    """Return patterns that match these names and nothing else."""
    return [glob.escape(name) for name in names]


def _choose_among(
    repo_id: str, commit: str, folder: str, variant: str | None
) -> tuple[WeightFiles, list[str]]:
    """Choose the weights among the repo's files, or among the cached files if the Hub does not answer.

    Returns:
        The weights, and the names of all files among which they were chosen.
    """
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(repo_id, revision=commit)
    except Exception:  # the HTTP client's own types: no common base in huggingface_hub
        cached = storage.listdir(folder) if storage.isdir(folder) else []
        try:
            return select_weights(cached, repo_id, variant=variant, is_repo=True), list_weights(folder)
        except SourceError:
            pass
        raise  # the Hub's error explains more than a list of files that the cache lacks
    top = [name for name in names if "/" not in name]
    return select_weights(top, repo_id, variant=variant, is_repo=True), names


@contextmanager
def _explaining_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Replace errors of huggingface_hub by errors of ours, whose message is one clear line."""
    try:
        yield
    except ShardkitError:
        raise
    except Exception as error:  # also whatever the HTTP client and the Xet client raise
        raise _explain(error, repo_id, revision) from None


def _explain(error: Exception, repo_id: str, revision: str | None) -> ShardkitError:
    explanation = explain(error, repo_id, revision)
    if explanation is not None:
        return explanation
    chain = list(causes(error))
    status = next((s for s in map(status_of, chain) if s is not None), None)
    first = (str(chain[-1]).splitlines() or [""])[0]
    reason = f"HTTP {status}" if status else f"{type(chain[-1]).__name__}: {escape(first)}"
    return ResourceError(
        f"{escape(repo_id)}: cannot be downloaded: {reason}",
        hint="check the network, HF_ENDPOINT and the free disk space; what has arrived is kept",
    )


def read_remote_header(repo_id: str, commit: str, name: str) -> SafetensorsHeader:
    """Read and check the header of a safetensors file in a repo, without its data.

    Args:
        repo_id: `organisation/name`.
        commit: the full hash, so that both requests read the same file.
        name: of the file in the repo.

    Raises:
        SourceError: the header breaks a rule of the format, or does not fit the file size that the server reports.
        ResourceError: the server's answer makes no sense.
        Exception: from huggingface_hub and its HTTP client.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repo_id, name, revision=commit)
    start, size = _get_range(url, 0, LENGTH_BYTES, name)
    if size is None:
        size = get_hf_file_metadata(url).size
    if size is None:
        raise _senseless_answer_error(name, "it does not report the file's size")
    length = text_length(start, size, name)
    text = _get_range(url, LENGTH_BYTES, LENGTH_BYTES + length, name)[0] if length else b""
    if (len(start), len(text)) != (LENGTH_BYTES, length):
        raise _senseless_answer_error(
            name, f"{len(start) + len(text)} bytes came of a header of {LENGTH_BYTES + length}"
        )
    return check_header(text, size, name)


def _get_range(url: str, start: int, stop: int, name: str) -> tuple[bytes, int | None]:
    """Return bytes `start` to `stop` of a file, and its size; None if the server does not report the size."""
    with _stream(url, f"bytes={start}-{stop - 1}") as (response, pieces):
        try:
            return _read_response(response, pieces, start, stop, name)
        except Exception as error:
            # Raised outside the context: inside, http_stream_backoff would mistake it for a failed attempt.
            failure = error
    raise failure


def _read_response(
    response: Response, pieces: Iterable[bytes], start: int, stop: int, name: str
) -> tuple[bytes, int | None]:
    """Return the same from a response, whose body may be the requested range or the whole file."""
    from huggingface_hub import utils

    if response.status_code == _UNSATISFIABLE and start == 0:
        return b"", 0
    utils.hf_raise_for_status(response)  # type: ignore[attr-defined, arg-type]
    if response.status_code != _PARTIAL:  # the server ignores ranges: take the beginning, leave the rest
        return _first_bytes(pieces, stop)[start:], _content_length(response.headers)
    content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if content_range is None or int(content_range[1]) != start:
        raise _senseless_answer_error(name, "it answers with another range than it was asked for")
    size = None if content_range[2] == "*" else int(content_range[2])
    return _first_bytes(pieces, stop - start), size


def _first_bytes(pieces: Iterable[bytes], nbytes: int) -> bytes:
    """Return the first bytes of a body, and read little more than these."""
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
def _stream(url: str, byte_range: str) -> Iterator[tuple[Response, Iterable[bytes]]]:
    """Request a range, and yield the response and its unread body in pieces."""
    from huggingface_hub import constants
    from huggingface_hub import utils as installed

    utils: Any = installed  # its functions are not in its type stubs, and differ between versions
    # Compression would hide the size, and a header would gain little from it.
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


def _senseless_answer_error(name: str, reason: str) -> ResourceError:
    return ResourceError(
        f"{escape(name)}: the server cannot be understood: {reason}",
        hint="check HF_ENDPOINT and any proxy; without --dry-run the whole file is downloaded",
    )


def check_push(repo_id: str, *, is_tried: bool = False) -> None:
    """Refuse an upload that cannot succeed, before any work is done.

    Args:
        repo_id: as the user wrote it.
        is_tried: True for a dry run, which needs no login.

    Raises:
        UsageError: `repo_id` is malformed, nobody is logged in, or HF_HUB_OFFLINE is set.
    """
    if not looks_like_repo_id(repo_id):
        raise UsageError(
            f"--push-to-hub {escape(repo_id)!r} is not a repo id", hint="write it as organisation/name"
        )
    if is_tried:
        return
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to-hub: HF_HUB_OFFLINE is set", hint="unset it, or leave --push-to-hub out")
    if get_token() is None:
        raise UsageError(
            "--push-to-hub: nobody is logged in to the Hub",
            hint="log in with `hf auth login`, or set HF_TOKEN",
        )


class HubUpload(NamedTuple):
    """The result of an upload."""

    address: str
    """Web address of the repo, or of its branch."""
    commit: str
    """The commit of the upload."""
    kept: tuple[str, ...] = ()
    """Files that were not uploaded, because the repo has its own."""
    removed: tuple[str, ...] = ()
    """Files in the repo that described quantised earlier weights; the new weights have none, so they were removed."""


def push(
    directory: str, repo_id: str, *, private: bool, branch: str | None, by_people: Iterable[str] = ()
) -> HubUpload:
    """Upload a directory.

    Files of the same name are replaced. Weight files of an earlier upload with other names are removed, and so are the
    configs of their quantisation. Everything else in the repo stays.

    Args:
        directory: complete and checked.
        repo_id: created if it does not exist.
        private: whether a new repo is private.
        branch: created if it does not exist; None is the default one.
        by_people: files that are not uploaded if the repo has them already, such as a card that somebody wrote there.

    Raises:
        ResourceError: the Hub refuses, or cannot be reached. The directory is not changed.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = str(api.create_repo(repo_id, private=private or None, exist_ok=True))
        if branch is not None:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        repo_files = {*api.list_repo_files(repo_id, revision=branch)}
        kept = sorted({*by_people} & repo_files)
        uploaded = api.upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            revision=branch,
            ignore_patterns=list(map(glob.escape, kept)),
            commit_message=f"Upload {os.path.basename(directory)} with shardkit",
            delete_patterns=[*_REPLACED, *_QUANTISED_CONFIGS],  # removes those that are not uploaded anew
        )
    except Exception as error:  # also whatever the HTTP client and the Xet client raise
        raise _upload_error(error, directory, repo_id) from None
    removed = repo_files.intersection(_QUANTISED_CONFIGS).difference(storage.listdir(directory))
    address = url if branch is None else f"{url}/tree/{branch}"
    return HubUpload(address, uploaded.oid, tuple(kept), tuple(sorted(removed)))


def _upload_error(error: Exception, directory: str, repo_id: str) -> ResourceError:
    status = status_of(error)
    first = (str(error).strip().splitlines() or [""])[0]
    reason = f"{f'HTTP {status}' if status else type(error).__name__}: {escape(first)}"
    login = "check HF_TOKEN or log in with `hf auth login`, then " if status in (401, 403) else ""
    return ResourceError(
        f"{escape(repo_id)}: the model cannot be uploaded: {reason}",
        hint=f"it is complete in {escape(directory)}: {login}run the same command again with --exist-ok to upload it",
    )
