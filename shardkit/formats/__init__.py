"""Checkpoints of every format: opened to catalogs, written from images. `open` is the one way in.

Internal: import from `shardkit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardkit.formats.contract import Checkpoint, PlainWeights


def open(
    source: str | Checkpoint,
    *,
    format: str | None = None,
    revision: str | None = None,
    variant: str | None = None,
    headers_only: bool = False,
    plain: PlainWeights | None = None,
    folded: bool = False,
) -> Checkpoint:
    """Open a checkpoint or a Hub model of any format: its catalog, and how to get at the tensors.

    Args:
        source: a directory, a file that is a checkpoint, or one that belongs to it (`.metadata`, `meta.pt`); or the
            repo id of a Hub model. A path that exists is never looked up on the Hub. A checkpoint that is open already
            is not opened again.
        format: the only format to open it as; None recognises the format by marker files.
        revision: branch, tag or commit of a repo id.
        variant: of a Hub model, e.g. "fp16" for `model.fp16.safetensors`; None takes the default weights.
        headers_only: True if nothing but headers will be read: a repo's weights need not be downloaded then; see
            `hub.repo.fetch_model`.
        plain: quantised weights are refused, or plain ones stand in their place; None leaves them as they are stored.
        folded: dense weights stand in the place of factors.

    Raises:
        UsageError: `format` is not the name of a format, or `revision` is given for a local path.
        SourceError: there is nothing, no checkpoint, or a damaged or incomplete one.
        IntegrityError, ResourceError: from opening it; no network.
        LayoutError: with `plain` or `folded`: weights are quantised and refused, or scales or factors do not fit.
    """
    if isinstance(source, str):
        from shardkit.formats.registry import open_checkpoint

        source = open_checkpoint(
            source, format=format, revision=revision, variant=variant, headers_only=headers_only
        )
    if plain is not None:
        from shardkit.formats.dequantize import plain_checkpoint

        source = plain_checkpoint(source, plain)
    if folded:
        from shardkit.formats.folded import fold_checkpoint

        source = fold_checkpoint(source)
    return source
