"""What seems to be missing from a model, told from names, shapes and its config alone: no model is built.

Only what holds for every model that is known: a list of blocks has no holes, it is as long as the config says, a block
inside of it has what all the others have, and a vocabulary has an embedding. That nothing is found proves nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed

# The outermost list of blocks in a name; other lists (Sequentials, stages, experts) may have holes by right.
_BLOCK = re.compile(r"^((?:[^.]*[^.\d][^.]*\.)*?(?:layers|layer|h|blocks|block))\.(\d+)\.(.+)$", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)", re.ASCII)
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_MIN_BLOCKS = 4  # fewer have no two inner ones to compare


def find_gaps(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of weight that `from_pretrained` would seem to miss.

    Args:
        shapes: by name in the output.
        config: of a transformers model.
    """
    lists = dict[str, dict[int, set[str]]]()
    for name in shapes:
        if found := _BLOCK.match(name):
            path, index, rest = found.groups()
            lists.setdefault(path, {}).setdefault(int(index), set()).add(rest)
    counted = set(_counted(config))
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    is_text = (
        _is_number(text.get("vocab_size")) and "patch_size" not in text
    )  # BEiT has a vocabulary of images
    return [
        *(_embedding(shapes, text["vocab_size"]) if is_text else ()),
        *(_length(lists, shapes, text) if is_text else ()),
        *(
            line
            for path, blocks in lists.items()
            if max(blocks) + 1
            in counted  # Sequentials have holes by right: those of EnCodec are named layers
            for line in _holes(path, blocks)
        ),
    ]


def _counted(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield how many layers a config and those inside of it count."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith(("_config", "encoder", "decoder")):
            yield from _counted(value)
        elif _is_number(value) and (key in _COUNTS or key.endswith(("coder_layers", "depth"))):
            yield value


def _embedding(shapes: Mapping[str, Shape], tokens: int) -> Iterator[str]:
    if not any(len(shape) > 1 and max(shape) >= tokens for shape in shapes.values()):
        yield f"an embedding of the {count(tokens, 'token')} that the config counts"


def _length(
    lists: Mapping[str, Mapping[int, object]], shapes: Mapping[str, Shape], config: Mapping[str, Any]
) -> Iterator[str]:
    wanted = next((config[key] for key in _COUNTS if _is_number(config.get(key))), 0)
    if wanted and not any(map(_NUMBER.search, shapes)):
        yield f"all {count(wanted, 'layer')}"
    elif lists:
        path = max(lists, key=lambda path: max(lists[path]))
        length = max(lists[path]) + 1
        if length < wanted:
            yield f"{escape(path)}.{length} up to {wanted - 1}: the config counts {count(wanted, 'layer')}"


def _holes(path: str, blocks: Mapping[int, set[str]]) -> Iterator[str]:
    last = max(blocks)
    lost = [f"{path}.{index}" for index in range(min(last, 1 << 16)) if index not in blocks]
    if lost:
        yield f"whole layers: {listed(lost)}"
        return
    if len(blocks) < _MIN_BLOCKS:
        return
    held = Counter(name for block in blocks.values() for name in block)
    # The first and the last may lack what the others have (a norm, a downsampling).
    for index in range(1, last):
        own = [name for name in blocks[index] if held[name] == 1]
        gone = [
            name for name, number in held.items() if number == len(blocks) - 1 and name not in blocks[index]
        ]
        if gone and not own:
            yield listed([f"{path}.{index}.{name}" for name in sorted(gone)])


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
