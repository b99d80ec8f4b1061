"""A directory that `torch.distributed.checkpoint` saved, whoever called it."""

from __future__ import annotations

import re

from shardkit.core.catalog import Catalog
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.formats.checkpoint import Checkpoint, asset_directories
from shardkit.formats.dcp.directory import DcpDirectory, is_dcp, open_dcp_lazily

# torch 2.13, torch/distributed/fsdp/_flat_param.py: FLAT_PARAM; "flat_param" before torch 2.0.
_FLAT = re.compile(r"(.*\.)?_?flat_param(_\d+)?")


def is_dcp_directory(path: str) -> bool:
    """True where `.metadata`, or a rank's `__R.metadata`, lies in the directory."""
    return is_dcp(path)


def open_dcp_directory(path: str) -> Checkpoint:
    """Open a DCP directory; its records are opened by `select`.

    Raises:
        SourceError: missing, damaged, hostile or contradictory; without tensors; or flat parameters of FSDP1.
        ResourceError: a file may not be read.
    """
    return as_checkpoint(path, open_dcp_lazily(path))


def as_checkpoint(path: str, opened: DcpDirectory) -> Checkpoint:
    """Return an opened DCP directory as a checkpoint.

    Raises:
        SourceError: it has no tensors, or flat parameters of FSDP1.
    """
    catalog = opened.catalog
    _refuse_empty(path, catalog)
    _refuse_flat(path, catalog)
    return Checkpoint(
        path=path,
        format="dcp",
        writer="torch.distributed.checkpoint",
        catalog=catalog,
        select=opened.select,
        dcp=opened,
        check=opened.check if opened.has_records else None,
        assets=asset_directories(path),
        notes=catalog.notes,
    )


def _refuse_empty(path: str, catalog: Catalog) -> None:
    if catalog.tensors:
        return
    if catalog.objects:
        reason = f"only {len(catalog.objects)} entries that are not tensors"
    else:
        reason = "nothing at all: the state dict that was saved was empty"
    raise SourceError(
        f"{escape(path)} has no tensors: {reason}",
        hint="a trainer that picks parameters by name may have found none (known: FSDP1 with PEFT adapters);"
        " use an earlier checkpoint, or save the model again",
    )


def _refuse_flat(path: str, catalog: Catalog) -> None:
    """Flat parameters hold many tensors end to end; which ones, only the wrapped model knew."""
    flat = [entry for fqn, entry in catalog.tensors.items() if _FLAT.fullmatch(fqn) and len(entry.shape) == 1]
    if flat:
        raise SourceError(
            f"{escape(path)} holds {len(flat)} flat parameters of FSDP1 (LOCAL_STATE_DICT): the names and shapes "
            "of what is in them are not recorded",
            problems=[f"{escape(entry.fqn)}: {entry.num_elements} elements" for entry in flat],
            hint="load it into the model that was wrapped the same way, and save it with SHARDED_STATE_DICT",
        )
