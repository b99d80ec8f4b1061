"""Run transformers' own converters on real tensors, for conversions that shardkit cannot express itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from shardkit.keys.expressions import Opaque

if TYPE_CHECKING:
    import torch
    from torch import nn


class OwnCode:
    """The converters of a model. The model is built at the first call.

    Args:
        build: returns the model of transformers, on any device.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._model: nn.Module | None = None

    def __call__(self, opaque: Opaque, values: list[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the tensors that a converter makes of stored ones: name in the model -> tensor.

        Args:
            opaque: any tensor of the group that the converter makes.
            values: the stored tensors `opaque.parts`, on the CPU.

        Raises:
            LayoutError: the model cannot be built, or the converter fails.
        """
        from shardkit.layout.conversions import convert_values

        with self._lock:
            if self._model is None:
                self._model = self._build()
            return convert_values(self._model, opaque, values)


def own_code_for(directory: str, *, trust_remote_code: bool) -> OwnCode:
    """Return the converters for the model that a config describes. Nothing is imported before the first call.

    Args:
        directory: holds config.json.
        trust_remote_code: whether code in the directory may be imported.
    """
    return OwnCode(partial(_build, directory, trust_remote_code))


def _build(directory: str, trust_remote_code: bool) -> nn.Module:
    from shardkit.layout.classes import build_model

    return build_model(directory, trust_remote_code=trust_remote_code)
