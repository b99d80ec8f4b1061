"""No false alarms: what transformers saves of a model is never said to lack a weight.

python -m tests.models.lacking [NAME...]    every model of the zoo, through consolidate without a base
python -m tests.models.lacking --classes    every class of transformers that its default config can build, by names
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import transformers
from transformers.models.auto import modeling_auto

import shardkit
from shardkit.layout.binding import ClassNames
from shardkit.layout.classes import safe_creation
from shardkit.layout.naming import ask_model
from tests.models.zoo import ZOO, from_pretrained, make_hub
from tests.models.zoo_world import contents


def alarms(name: str, out: Path) -> list[str]:
    """Return what is wrong with what consolidate says of a model of the zoo: its files' names, and those in memory."""
    make_hub(ZOO[name], out / "hub")
    found = []
    for what, state in {
        "files": contents(out / "hub"),
        "memory": dict(from_pretrained(ZOO[name], out / "hub").state_dict()),
    }.items():
        checkpoint = out / what
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it saves in a single process, as asked
            dcp.save({"model": state}, checkpoint_id=checkpoint, no_dist=True)
        shutil.copyfile(out / "hub/config.json", checkpoint / "config.json")
        made = shardkit.consolidate(checkpoint, out / f"{what}-hf")
        if made.held_against != "class" or made.unloadable:
            found.append(f"{name}, names of {what}: {made.held_against}: {[*made.unloadable, *made.notes]}")
    return found


def class_names() -> list[str]:
    """Return the names of all classes of models that transformers' auto classes know."""
    tables = (
        table
        for key, table in vars(modeling_auto).items()
        if key.startswith("MODEL") and key.endswith("_MAPPING_NAMES")
    )
    return sorted({name for table in tables for names in table.values() for name in _flat(names)})


def _flat(names: str | Iterable[str]) -> Iterable[str]:
    return [names] if isinstance(names, str) else names


def saved_by(name: str) -> tuple[Any, dict[str, tuple[int, ...]]] | None:
    """Return a model of a class by its default config, and the shapes that it saves; None if there is no such.

    No byte is made: model and tensors are on meta.
    """
    model_class = getattr(transformers, name, None)
    saved: dict[str, tuple[int, ...]] = {}

    def record(tensors: dict[str, torch.Tensor], *_: Any, **__: Any) -> None:
        saved.update({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    try:
        config = model_class.config_class()  # type: ignore[union-attr]
        with torch.device("meta"), safe_creation():
            model = model_class._from_config(config, attn_implementation="eager")  # type: ignore[union-attr]
        model.tie_weights()
        with (
            tempfile.TemporaryDirectory() as scratch,
            mock.patch("transformers.modeling_utils.safe_save_file", record),
        ):
            model.save_pretrained(scratch, max_shard_size="1000TB")
    except Exception:  # no default config, or a package that is not here
        return None
    return model, saved


def lacking_of(name: str) -> ClassNames | None:
    """Return what a class is said to lack of what it saves itself; None where it cannot be built."""
    built = saved_by(name)
    return None if built is None else ask_model(*built)


def _check_classes(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        found = lacking_of(name)
        if found is None:
            print(f"not built: {name}")
            continue
        if found.missing or found.misfits:
            yield f"{name}: {found.missing} {found.misfits}"


def _check_zoo(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        with tempfile.TemporaryDirectory() as out:
            try:
                yield from alarms(name, Path(out))
            except shardkit.LayoutError as error:
                if "quantised" not in str(error):
                    raise
                print(f"{name}: refused as quantised, before anything is said to be missing")


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    arguments = sys.argv[1:]
    if arguments[:1] == ["--classes"]:
        names = arguments[1:] or class_names()
        wrong = list(_check_classes(names))
    else:
        names = arguments or list(ZOO)
        wrong = list(_check_zoo(names))
    print("\n".join([*wrong, json.dumps({"asked": len(names), "alarms": len(wrong)})]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
