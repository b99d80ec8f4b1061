"""DCP_SHARDING_INFO: which part of each tensor a safetensors file of torch's holds.

Source: torch 2.13, torch/distributed/checkpoint/filesystem.py (`_write_files_from_queue`).
"""

from __future__ import annotations

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.errors import SourceError
from shardkit.files.strict_json import parse_object
from shardkit.formats.hub.safetensors import SafetensorsHeader

_KEY = "DCP_SHARDING_INFO"
_FIELD = "saved_offsets"
_LIMIT = 1 << 62
_HINT = "the file is damaged or was put together by hand: use another copy"


def saved_offsets(header: SafetensorsHeader, name: str) -> dict[str, Shape] | None:
    """Return the offsets of each tensor's part in the whole tensor, None where the file has no such info.

    Args:
        header: of the file.
        name: of the file, for messages.

    Raises:
        SourceError: malformed, or at odds with the header; names file and tensors.
    """
    text = header.metadata.get(_KEY)
    if text is None:
        return None
    info = parse_object(text.encode(), f"{name}, {_KEY}")
    found: dict[str, Shape] = {}
    problems: list[str] = []
    for tensor in header.tensors:
        fields = info.get(tensor.fqn)
        offsets = fields.get(_FIELD) if isinstance(fields, dict) else None
        corner = _corner(offsets, len(tensor.shape))
        if corner is None:
            problems.append(
                f"{escape(tensor.fqn)}: expected {len(tensor.shape)} offsets, found {escape(repr(offsets))}"
            )
        else:
            found[tensor.fqn] = corner
    if problems:
        raise SourceError(
            f"{escape(name)}: {_KEY} does not place {len(problems)} tensors", problems=problems, hint=_HINT
        )
    return found


def _corner(offsets: object, num_dims: int) -> Shape | None:
    if not isinstance(offsets, list) or len(offsets) != num_dims:
        return None
    if any(type(offset) is not int or not 0 <= offset < _LIMIT for offset in offsets):
        return None
    return tuple(offsets)
