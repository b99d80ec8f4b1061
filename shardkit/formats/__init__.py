"""Checkpoints of every format: `open` reads one to a catalog, and images describe the files to write.

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
    """Open a checkpoint or a Hub model of any format; no tensor data is read.

    Args:
        source: one of: a directory; a file that is a checkpoint; a file that belongs to one (`.metadata`, `meta.pt`);
            the repo id of a Hub model; an open checkpoint. A path that exists is never looked up on the Hub, and an
            open checkpoint is not opened again.
        format: the name of the format to open it as; None recognises the format by marker files.
        revision: branch, tag or commit of a repo id.
        variant: of a Hub model, e.g. "fp16" for `model.fp16.safetensors`; None opens the default weights.
        headers_only: True if only headers will be read, so that a repo's weights need not be downloaded; see
            `hub.repo.fetch_model`.
        plain: whether to refuse quantised weights or to replace them by dequantised ones; None leaves them as stored.
        folded: replace the factors of OSFT by the dense weights that they make up.

    Raises:
        UsageError: `format` is not the name of a format, or `revision` is given for a local path.
        SourceError: the path does not exist, is not a checkpoint, or is a damaged or incomplete one.
        IntegrityError: stored bytes contradict their description.
        ResourceError: a file or the network cannot be read.
        LayoutError: with `plain` or `folded`: quantised weights are refused, or scales or factors do not fit.
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
