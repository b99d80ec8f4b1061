"""Decide whether the output may have another vocabulary size than the base, and adjust the config if so.

More rows than in the base mean added tokens. Fewer rows may be only one rank's share of them, so they are accepted only
if something confirms that they are all: the checkpoint's own config, arguments or manifest, or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, in_shell, listed
from shardkit.errors import LayoutError
from shardkit.formats.contract import Checkpoint
from shardkit.formats.hub.assets import is_tokenizer_file, is_vocabulary
from shardkit.formats.hub.base import Base, find_config, own_config, recorded_vocab_rows
from shardkit.formats.hub.directory import read_config
from shardkit.formats.hub.tokenizer import Tokenizer, tokenizer_files
from shardkit.keys.tokens import (
    TokenRows,
    counts_tokens,
    find_token_rows,
    paddings,
    with_num_tokens,
    with_token_rows,
)
from shardkit.layout.traced import SAME_IN_MEMORY

_MOST_PADDING = 128  # rows, as `pad_to_multiple_of` of a resized embedding has them
_SHARES = {2: "half", 3: "a third", 4: "a quarter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsChange:
    """A vocabulary whose number of rows differs from the base's."""

    base: Base | None
    """The base, with the output's number of rows in its shapes and its config."""
    changed: tuple[TokenRows, ...] = ()
    """The accepted changes of the number of rows."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    hint: str = ""
    """What the user can do about a number of rows that is not accepted; empty if all are."""


def follow_vocabulary(
    checkpoint: Checkpoint, base: Base | None, shapes: Mapping[str, Shape], tokenizer: Tokenizer | None
) -> RowsChange:
    """Compare the number of vocabulary rows with the base's, and decide whether the output may have another.

    Args:
        checkpoint: the opened checkpoint.
        base: the base. If its tensors are not known, its config gives the number of rows, for types of models that
            have exactly `vocab_size` rows.
        shapes: by name in the output, or in memory.
        tokenizer: the tokenizer that the user named, or None. Its size may confirm that the vocabulary was cut.

    Raises:
        SourceError, IntegrityError, ResourceError: the checkpoint's config or manifest cannot be read.
    """
    if base is None or base.config is None:
        return RowsChange(base=base)
    shapes_in_base = {name: tensor.shape for name, tensor in (base.tensors or {}).items()}
    if base.tensors is None:
        shapes_in_base = _by_config(shapes, base.config)
    why = [
        (rows, _why_not(rows, checkpoint, tokenizer))
        for rows in find_token_rows(shapes, shapes_in_base, base.config)
    ]
    if base.tensors is None:  # other misfits are left to the model's class
        why = [(rows, hint) for rows, hint in why if rows.are_alike and not rows.is_cut]
    hints, changed = [hint for _, hint in why if hint], tuple(rows for rows, hint in why if not hint)
    tensors, config = dict(base.tensors or {}), dict(base.config)
    for rows in changed:
        if base.tensors is not None:
            tensors |= {name: tensors[name]._replace(shape=shape) for name, shape in rows.shapes.items()}
        config = with_num_tokens(config, rows.places, rows.new[0])
    return RowsChange(
        base=replace(base, tensors=base.tensors and tensors, config=config) if changed else base,
        changed=changed,
        notes=tuple(_notes(changed, base, tokenizer)),
        warnings=tuple(_warnings(changed, checkpoint, base, tokenizer)),
        hint=hints[0] if hints else "",
    )


def _by_config(shapes: Mapping[str, Shape], config: Mapping[str, object]) -> dict[str, Shape]:
    """Return the shapes of vocabulary tensors with the config's `vocab_size` as rows; empty if rows may differ from it."""
    tokens = config.get("vocab_size")
    if config.get("model_type") not in SAME_IN_MEMORY or not isinstance(tokens, int):
        return {}
    return with_token_rows(shapes, tokens)


def _why_not(rows: TokenRows, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> str:
    """Return why the output cannot have this number of rows, and what to do; empty if it can."""
    if not rows.are_alike:
        lines = [f"{name} has {count(number, 'row')}" for name, number in rows.rows.items()]
        return (
            f"input and output need a row for each token, both of them: {listed(lines)}; resize the model as a whole, with "
            "resize_token_embeddings or shardkit.prepare(tokenizer=...)"
        )
    if not rows.is_cut:
        return ""
    new, copy = (
        rows.new[0],
        "--base COPY --config base, COPY being a directory with config.json and tokenizer of the base",
    )
    by_hand = f"{copy} alone and vocab_size {new} in it, writes these rows"
    config = own_config(checkpoint)
    if config is not None and counts_tokens(config, rows.places, new):
        return ""
    if rows.share is not None:
        return (
            f"{new} rows are {_SHARES[rows.share]} of the base's {rows.old}, as one of {rows.share} ranks has them: is a "
            f"part of the checkpoint missing? If the vocabulary was cut to this, {by_hand}"
        )
    if _is_confirmed(rows, checkpoint, tokenizer):
        return ""
    return (
        f"the vocabulary has {new} rows and the base's {rows.old}, and nothing says that it was cut: --tokenizer DIR with "
        f"a tokenizer of {new} tokens does; or {by_hand}"
    )


def _is_confirmed(rows: TokenRows, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> bool:
    """True if the checkpoint's own config, its arguments or manifest, or a tokenizer confirms this number of rows."""
    new = rows.new[0]
    if checkpoint.contents.padding is not None and checkpoint.contents.padding.rows == new:
        return True
    if tokenizer is not None and tokenizer.tokens is not None:
        padding = new - tokenizer.tokens
        if 0 <= padding < _MOST_PADDING and (not padding or new in paddings(tokenizer.tokens)):
            return True
    directory = find_config(checkpoint)
    config = read_config(directory) if directory is not None else None
    return recorded_vocab_rows(checkpoint) == new or (
        config is not None and counts_tokens(config, rows.places, new)
    )


def _warnings(
    changed: tuple[TokenRows, ...], checkpoint: Checkpoint, base: Base, tokenizer: Tokenizer | None
) -> Iterator[str]:
    """Yield a warning for each changed number of rows, if the output gets the tokenizer of a base that the user named.

    That tokenizer is for the base's number of rows.
    """
    label = escape(base.label)
    for rows in changed if tokenizer is None and base.is_given and not _has_own(base) else ():
        new, key = rows.new[0], rows.places[0][-1]  # such as "vocab_size" in ("text_config", "vocab_size")
        more = "lack the new tokens" if new > rows.old else "have more tokens"
        whose, do = f"the tokenizer, which comes from {label}, may {more}", "takes another"
        if not any(map(is_tokenizer_file, base.assets)):
            whose, do = f"{label} has no tokenizer", "puts one there"
        yield (
            f"the vocabulary has {new} rows, in {label} {rows.old}: {key} is {new} now, and {whose}; "
            f"--tokenizer {_where(checkpoint)} {do}"
        )


def _notes(changed: tuple[TokenRows, ...], base: Base, tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield a note for each changed number of rows, where `_warnings` has no warning."""
    for rows in changed if tokenizer is not None or not base.is_given or _has_own(base) else ():
        new, key = rows.new[0], rows.places[0][-1]
        yield f"the vocabulary has {new} rows, in {escape(base.label)} {rows.old}: {key} is {new} now"


def _has_own(base: Base) -> bool:
    """True if the output gets the checkpoint's own tokenizer."""
    return base.own_files is not None and any(map(is_vocabulary, base.own_files.names))


def _where(checkpoint: Checkpoint) -> str:
    """Return the checkpoint's directory that has a tokenizer, quoted for a shell; "DIR" if there is none."""
    homes = (home for home in checkpoint.contents.assets if any(map(is_vocabulary, tokenizer_files(home))))
    return next(map(in_shell, homes), "DIR")


def check_tokenizer(tokenizer: Tokenizer | None, base: Base | None, shapes: Mapping[str, Shape]) -> None:
    """Refuse a tokenizer with ids beyond the rows of the output.

    Args:
        tokenizer: the tokenizer that the user named, or None.
        base: the base, with the output's number of rows; without its config nothing is compared.
        shapes: by name in the output.

    Raises:
        LayoutError: the tokenizer has such ids.
    """
    if tokenizer is None or tokenizer.tokens is None or base is None or base.config is None:
        return
    rows = {name: (tokenizer.tokens, *shape[1:]) for name, shape in shapes.items()}
    short = [change for change in find_token_rows(rows, shapes, base.config) if change.new[0] > change.old]
    if short:
        raise LayoutError(
            f"{tokenizer.label} needs {count(tokenizer.tokens, 'row')}, and the vocabulary has "
            f"{short[0].old}",
            hint="give the tokenizer that the model was trained with",
        )
