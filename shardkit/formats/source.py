"""What a person means by SOURCE: a path that exists, or else a repo id."""

from __future__ import annotations

import os

from shardkit.core.text import escape
from shardkit.errors import SourceError, UsageError
from shardkit.formats.hub.directory import HubModel, open_model
from shardkit.formats.hub.repo import fetch_model, looks_like_repo_id


def open_source(
    source: str, *, revision: str | None = None, variant: str | None = None, headers_only: bool = False
) -> HubModel:
    """Open a Hub model from wherever it is; a path that exists is never looked up on the Hub.

    Args:
        source: a directory, a weight file, an index, or a repo id.
        revision: branch, tag or commit of a repo id.
        variant: as for `open_model`.
        headers_only: nothing but headers will be read, so a repo's weights need not be brought here; see
            `fetch_model`.

    Raises:
        UsageError: a revision of something local.
        SourceError: neither a path nor a repo id, or its weights are refused.
        ResourceError: no network, or a file that may not be read.
    """
    if os.path.lexists(source):
        if revision is not None:
            raise UsageError(
                f"{escape(source)} is a local path, it has no revision {escape(revision)!r}",
                hint="leave --revision out, or give a repo id",
            )
        return open_model(source, variant=variant)
    if looks_like_repo_id(source):
        return fetch_model(source, revision=revision, variant=variant, headers_only=headers_only)
    raise SourceError(
        f"{escape(source)}: no such path, and not a repo id either",
        hint="check the path, or name a model on the Hub as organisation/name",
    )
