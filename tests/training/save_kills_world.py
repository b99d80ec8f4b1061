"""Save over a save again and again, each time killed at a later call; argument: a directory, as JSON with "exchange".

Whatever is at the destination then is whole: the save before, or the new one; or the one before it, which was killed
while it was committed, as the next save ends that first. The last save leaves nothing beside it.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import shardkit
from tests.torture.faults import Faults

_MOMENTS = ("rename", "renameat2", "rmdir")
"""Calls between which something is another than it was, for whoever comes next."""


def _model(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _value_in(place: Path) -> float:
    assert shardkit.verify(place, full=True).problems == ()
    model = _model(0.0)
    shardkit.load_into(model, place)
    (value,) = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    return float(value)


def _dies_at(at: int, value: float, place: Path, *, exchange: bool) -> bool:
    """Save in a process that is killed at a storage call; False if it ended before."""
    child = os.fork()
    if not child:
        fault = {"at": at, "of": _MOMENTS, "do": "kill"}
        Faults(fault, os.open(os.devnull, os.O_WRONLY)).install(exchange=exchange)
        shardkit.save(_model(value), place, overwrite=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def main() -> None:
    request = json.loads(sys.argv[1])
    home, exchange = Path(request["home"]), request["exchange"]
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    place, was, killed, ends, num_new = home / "last", 1.0, 1.0, False, 0
    shardkit.save(_model(was), place)
    for at in range(1, 1000):
        value = at + 1.0
        ends = not _dies_at(at, value, place, exchange=exchange)
        if not place.exists():  # a commit that was interrupted is ended before anything else
            assert not exchange
            with suppress(shardkit.UsageError):
                shardkit.save(_model(0.0), place)
        now = _value_in(place)
        assert now in (was, killed, value), (at, was, killed, now)
        num_new += now == value
        was, killed = now, value
        if ends:
            break
    assert ends
    assert num_new > 1  # what is killed after the commit has saved
    assert [path.name for path in home.iterdir()] == ["last"]


if __name__ == "__main__":
    main()
