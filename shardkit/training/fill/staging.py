"""Pinned memory through which bytes reach a device while the next ones are being read."""

from __future__ import annotations

import torch

from shardkit.core.regions import Shape

_NUM_BUFFERS = 2  # one is filled from storage while the other is copied


class DeviceStaging:
    """Copies raw bytes to a device on a stream of its own; dtype and strides are put right over there.

    Args:
        device: of the targets.
        nbytes: size of each of its buffers.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))  # where the targets were allocated
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_BUFFERS)]
        self._sent = [self._module.Event() for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def room(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory to be filled and then sent."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        self._sent[self._turn].synchronize()
        return self._buffers[self._turn][:nbytes]

    def send(self, staged: torch.Tensor, dtype: torch.dtype, strides: Shape, target: torch.Tensor) -> None:
        """Copy what `room` gave to a target: elements of `dtype` that lie with `strides`."""
        with self._module.stream(self._stream):
            raw = staged.to(self._device, non_blocking=True)
            target.copy_(raw.view(dtype).as_strided(tuple(target.shape), strides))
            self._sent[self._turn].record(self._stream)

    def finish(self) -> None:
        """Wait until every target is filled."""
        self._stream.synchronize()
