"""Uploading a finished directory to the Hub, through huggingface_hub."""

from __future__ import annotations

import os

from shardkit.core.text import escape
from shardkit.errors import ResourceError, UsageError
from shardkit.formats.hub.repo import looks_like_repo_id

# Weights of an earlier upload that was divided over files otherwise would be a second model beside the new ones.
_REPLACED = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


def check_push(repo_id: str) -> None:
    """Refuse what cannot be uploaded to, before any work is done.

    Raises:
        UsageError: not a repo id, nobody is logged in, or huggingface_hub is told to stay offline.
    """
    if not looks_like_repo_id(repo_id):
        raise UsageError(
            f"--push-to-hub {escape(repo_id)!r} is not a repo id", hint="write it as organisation/name"
        )
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push-to-hub: HF_HUB_OFFLINE is set", hint="unset it, or leave --push-to-hub out")
    if get_token() is None:
        raise UsageError(
            "--push-to-hub: nobody is logged in to the Hub",
            hint="log in with `hf auth login`, or set HF_TOKEN",
        )


def push(directory: str, repo_id: str, *, private: bool, branch: str | None) -> str:
    """Upload a directory; return the address of the repo.

    Files of the same name are replaced, weights that are divided over files otherwise are removed, and all
    else in the repo stays.

    Args:
        directory: complete and checked.
        repo_id: made where it does not exist.
        private: how a repo that has to be made is seen.
        branch: made where it does not exist; None is the default one.

    Raises:
        ResourceError: the Hub refuses, or cannot be reached; the directory stays as it is.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = str(api.create_repo(repo_id, private=private or None, exist_ok=True))
        if branch is not None:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=directory,
            revision=branch,
            commit_message=f"Upload {os.path.basename(directory)} with shardkit",
            delete_patterns=list(_REPLACED),  # of them, what is not uploaded anew
        )
    except Exception as error:  # also whatever the HTTP client and the Xet client raise
        raise _refused(error, directory, repo_id) from error
    return url if branch is None else f"{url}/tree/{branch}"


def _refused(error: Exception, directory: str, repo_id: str) -> ResourceError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    first = (str(error).strip().splitlines() or [""])[0]
    reason = f"HTTP {status}: {escape(first)}" if status else f"{type(error).__name__}: {escape(first)}"
    login = "check HF_TOKEN or log in with `hf auth login`, then " if status in (401, 403) else ""
    return ResourceError(
        f"{escape(repo_id)}: the model cannot be uploaded: {reason}",
        hint=f"it is complete in {escape(directory)}: {login}run `hf upload {escape(repo_id)} {escape(directory)}`",
    )
