"""Flips bits in checkpoints, one at a time, and lets consolidate, reshard and finalize move what is damaged.

    python -m tests.corruption.moving [--count 1000] [--seed 0] [LAYOUT ...]

prints a line for each layout: the share of its bytes that is compared as it moves, and how many flips in those were refused.
Every flip goes through all three; whatever takes one is printed, and the exit code is 1. `make corruption` runs it too.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import nn

import shardkit
from shardkit.errors import IntegrityError
from shardkit.training.fill import reading
from shardkit.transfer import checks
from shardkit.transfer.checks import Entries, Entry, EntryReading, Readings, Verdict, pack
from tests.corruption.outputs import make, weights
from tests.corruption.sweep import SCRATCH
from tests.worlds.processes import run_script

OPERATIONS = ("consolidate", "reshard", "finalize")
_RANK_FILES = ("fsdp2", "hsdp", "fsdp2_tp", "fsdp1", "placed")


class Stretch(NamedTuple):
    """Bytes of a file that were compared."""

    path: str
    start: int
    stop: int


def _deepspeed(writer: str) -> Callable[[Path], Path]:
    def write(out: Path) -> Path:
        from tests.formats.deepspeed import samples

        path: Path = getattr(samples, writer)(out, 3)
        return path

    return write


def _views(out: Path) -> Path:
    flat = torch.arange(9000.0)
    state = {"a.weight": flat[:4000].view(40, 100), "b.weight": flat[4000:].view(50, 100).T}
    out.mkdir()
    torch.save({"state_dict": state, "global_step": 3}, out / "last.ckpt")
    return out / "last.ckpt"


def _legacy(out: Path) -> Path:
    out.mkdir()
    torch.save({**weights(), "turned.weight": torch.arange(600.0).view(20, 30).T}, out / "pytorch_model.bin")
    return out


def _of_ranks(case: str) -> Callable[[Path], Path]:
    def write(out: Path) -> Path:
        script = Path(__file__).parents[1] / "formats" / "rank_world.py"
        files = out.with_name("rank-files")
        if not files.exists():
            files.mkdir()
            run_script(str(script), str(files))
        return files / case

    return write


def _made(kind: str) -> Callable[[Path], Path]:
    return lambda out: make(kind, out.parent)


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    **{
        kind: _made(kind)
        for kind in ("stock", "fsdp2", "preshard", "preshard-columns", "preshard-hsdp", "reshard")
    },
    "save": _made("save"),
    "reshard-trainer": _made("reshard-trainer"),
    "deepspeed-zero2": _deepspeed("write_joined"),
    "deepspeed-zero3": _deepspeed("write_partitioned"),
    "views": _views,
    "pytorch_model.bin": _legacy,
    **{f"ranks-{case}": _of_ranks(case) for case in _RANK_FILES},
    "safetensors": _made("safetensors"),
}


@contextmanager
def compared() -> Iterator[list[Stretch]]:
    """Note what the operations inside compare, and find right."""
    found, paths, judge, label_of = list[Stretch](), dict[str, str](), checks.judge, Entries.label_of

    def noted_label(entries: Entries, path: str) -> str:
        label = label_of(entries, path)
        paths[label] = path
        return label

    def noted(lists: Iterable[Readings]) -> Verdict:
        lists = list(lists)
        by_entry = defaultdict[tuple[str, Entry], list[EntryReading]](list)
        for each in lists:
            for file, numbers in each["whole"].items():
                for entry in map(Entry, *[iter(numbers)] * 3):
                    by_entry[file, entry].append(EntryReading(file, entry, "", *entry))
            for file, of_tensors in each["parts"].items():
                for tensor, numbers in of_tensors.items():
                    for begin, end, crc, *rest in zip(*[iter(numbers)] * 6, strict=True):
                        entry = Entry(begin, end, crc)
                        by_entry[file, entry].append(EntryReading(file, entry, tensor, *rest))
        for (file, entry), readings in by_entry.items():
            if judge([pack(readings)]).checked.checked_bytes and file in paths:
                found.append(Stretch(paths[file], entry.start, entry.stop))
        return judge(lists)

    with (
        mock.patch.object(checks, "judge", noted),
        mock.patch.object(reading, "judge", noted),
        mock.patch.object(Entries, "label_of", noted_label),
    ):
        yield found


class Moves:
    """The three operations on one checkpoint."""

    def __init__(self, path: Path, scratch: Path, root: str | None) -> None:
        self._path, self._out, self._root = path, scratch / "out", root
        result = shardkit.consolidate(path, self._out, root=root, single_file=True)
        total = result.checked_bytes + sum(part.entry_bytes for part in result.unchecked)
        self.share = result.checked_bytes / total if total else 1.0
        self.unchecked = result.unchecked
        self._shapes = {
            name: (tensor.shape, tensor.dtype)
            for name, tensor in load_file(self._out / "model.safetensors").items()
        }
        self._ties = result.ties
        shutil.rmtree(self._out)

    def run(self, name: str) -> None:
        try:
            getattr(self, f"_{name}")()
        finally:
            shutil.rmtree(self._out, ignore_errors=True)

    def _consolidate(self) -> None:
        shardkit.consolidate(self._path, self._out, root=self._root)

    def _reshard(self) -> None:
        if self._path.name == "pytorch_model.bin" or (self._path / "pytorch_model.bin").exists():
            shardkit.preshard(self._path, self._out, world_size=3, wrap="none")
        else:
            shardkit.reshard(self._path, self._out, world_size=3)

    def _finalize(self) -> None:
        model, parameters = nn.Module(), dict[str, nn.Parameter]()
        for fqn, (shape, dtype) in self._shapes.items():
            value = torch.empty(shape, dtype=dtype, device="meta")
            parameters[fqn] = nn.Parameter(value, requires_grad=False)
        for kept, dropped in self._ties:
            parameters[dropped] = parameters[kept]
        for fqn, parameter in parameters.items():
            *parts, last = fqn.split(".")
            owner = model
            for part in parts:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, parameter)
        context = shardkit.prepare(lambda: model, self._path)
        shardkit.finalize(context.model, context)


def flip(at: str, byte: int, bit: int) -> None:
    """Change one bit of a file, and leave its times alone: disks do not change those either."""
    with open(at, "r+b") as file:
        file.seek(byte)
        (held,) = file.read(1)
        file.seek(byte)
        file.write(bytes([held ^ 1 << bit]))


def campaign(name: str, directory: Path, num_flips: int, pick: random.Random) -> tuple[str, Counter[str]]:
    """Return a layout's line, and how many flips each operation refused."""
    path = LAYOUTS[name](directory / name)
    moves, refused = Moves(path, directory, "model" if name == "stock" else None), Counter[str]()
    stretches: set[Stretch] | None = None
    for operation in OPERATIONS:
        with compared() as found:
            moves.run(operation)
        stretches = set(found) if stretches is None else stretches & set(found)
    places = sorted(stretches or ())
    if not places:
        num_flips = 0
    for _ in range(num_flips):
        at = pick.choice(places)
        byte, bit = pick.randrange(at.start, at.stop), pick.randrange(8)
        flip(at.path, byte, bit)
        for operation in OPERATIONS:
            try:
                moves.run(operation)
            except IntegrityError:
                refused[operation] += 1
            else:
                print(f"{name}: {operation} took bit {bit} of byte {byte} of {at.path}", flush=True)
        flip(at.path, byte, bit)
    shares = [f"{moves.share:7.1%}", f"{num_flips:5d}", *(f"{refused[each]:5d}" for each in OPERATIONS)]
    reasons = "; ".join(f"{part.reason}: {part.num_entries}" for part in moves.unchecked)
    return f"{name:20s} {' '.join(shares)}  {reasons}", refused + Counter({"flips": num_flips})


def main(arguments: Sequence[str]) -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("layouts", nargs="*", choices=[[], *LAYOUTS])
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    pick, names, total = random.Random(options.seed), options.layouts or list(LAYOUTS), Counter[str]()
    damageable = [name for name in names if name != "safetensors"]
    print(f"{'layout':20s} checked flips consolidate reshard finalize  unchecked")
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        for name in names:
            place = damageable.index(name) if name in damageable else None
            each, more = divmod(options.count, max(len(damageable), 1))
            num_flips = 0 if place is None else each + (place < more)
            line, counts = campaign(name, Path(scratch), num_flips, pick)
            total += counts
            print(line, flush=True)
    print(f"of {total['flips']} flips refused: " + ", ".join(f"{each} {total[each]}" for each in OPERATIONS))
    return 0 if all(total[each] == total["flips"] for each in OPERATIONS) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
