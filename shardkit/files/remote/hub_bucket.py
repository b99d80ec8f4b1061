"""Buckets of the Hub, `hf://buckets/organisation/name[/folder]`, read by ranges, without a copy on the disk.

A bucket has no commits: files are replaced. The listing has the hash of each file's content, and bytes are taken only from
an address of that content: one outside of the Hub, to which it redirects, or one whose every answer names the hash.
Source: huggingface_hub 2.4.0, hf_api.py and hf_file_system.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

from shardkit.core.text import escape
from shardkit.errors import SourceError, UsageError
from shardkit.files.remote.contract import ObjectStat, RequestFailure
from shardkit.files.remote.hub import SCHEME as HUB
from shardkit.files.remote.hub import FilesOnHub, Place, is_the_hubs, unnamed_content_error

SCHEME = f"{HUB}buckets/"
_ROOT = re.compile(rf"{SCHEME}(?!\.)[\w.-]+/(?!\.)[\w.-]+", re.ASCII)
_RESOLVE = "/resolve/"
_NANOSECONDS = 10**9


def names_bucket(root: str) -> bool:
    """True for `hf://buckets/organisation/name`."""
    return _ROOT.fullmatch(root) is not None


class BucketStore(FilesOnHub):
    """A bucket.

    Args:
        root: `hf://buckets/organisation/name`.
    """

    _offline_hint = "unset it, or copy the directory to a disk first with `hf buckets sync`"

    def __init__(self, root: str) -> None:
        if not names_bucket(root):
            raise UsageError(
                f"{escape(root)} is not a bucket",
                hint="write it as hf://buckets/organisation/name[/folder]; a bucket has no revisions",
            )
        super().__init__(root.removeprefix(SCHEME))

    def _entries(self, key: str) -> Iterator[tuple[str, ObjectStat | None]]:
        import huggingface_hub

        api = huggingface_hub.HfApi()
        if not hasattr(api, "list_bucket_tree"):
            raise UsageError(
                f"huggingface_hub {huggingface_hub.__version__} cannot read buckets",
                hint="`pip install -U huggingface_hub`",
            )
        # The Hub compares text: when "step-1" is listed, what is in "step-10" is among the entries.
        for entry in api.list_bucket_tree(self._id, key or None):
            if entry.type == "file":
                changed = int(entry.mtime.timestamp() * _NANOSECONDS) if entry.mtime is not None else 0
                yield entry.path, ObjectStat(entry.size, entry.xet_hash, changed)
            else:
                yield entry.path, None

    def _place_of(self, key: str) -> Place:
        from huggingface_hub import constants, get_hf_file_metadata

        url = f"{constants.ENDPOINT}/buckets/{self._id}{_RESOLVE}{quote(key, safe='')}"
        metadata = get_hf_file_metadata(url)
        content, location = metadata.xet_file_data, metadata.location
        if content is None:
            raise unnamed_content_error(key)
        is_of_the_file = is_the_hubs(location) or _RESOLVE in urlsplit(location).path
        return Place(location, metadata.size, content.file_hash, names_version=is_of_the_file)

    def explain(self, error: Exception, path: str) -> RequestFailure:
        """Return why a call failed."""
        from huggingface_hub import errors

        missing = (errors.RepositoryNotFoundError, getattr(errors, "BucketNotFoundError", ()))
        if isinstance(error, missing):
            refused = SourceError(
                f"{escape(self._id)}: no such bucket on the Hub, or a private one",
                hint="check the spelling; for a private bucket log in with `hf auth login`",
            )
            return RequestFailure(refused, may_pass=False)
        return super().explain(error, path)
