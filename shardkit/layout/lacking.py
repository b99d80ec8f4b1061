"""Asks the class that a config names which of its weights `from_pretrained` would not find in files.

    config.json, names and shapes -> a process of its own, while bytes move -> Answer

Where transformers is loaded already it is asked at once, in this process. Nothing from a file is executed, and no failure
is an error: then the class was not asked, and the answer says why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.core.regions import Shape
from shardkit.core.text import escape
from shardkit.layout.choose import why_no_class
from shardkit.layout.traced import DEFAULT_TIMEOUT_S, Child, ChildTimeoutError, start_child

_MAX_REMEMBERED = 256
# A damaged or hostile config may count so many modules that building them never ends.
_COUNTS = re.compile(r"layer|expert|block|depth|stage|codebook")
_MAX_COUNT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a class says of names."""

    model_class: str = ""
    """E.g. "LlamaForCausalLM"; empty where none was asked."""
    missing: tuple[str, ...] = ()
    """Names of weights that `from_pretrained` would initialise at random, as the class calls them."""
    misfits: tuple[tuple[str, str], ...] = ()
    """(name, why) of weights that it would refuse the files for."""
    failure: str | None = None
    """Why the class was not asked; None where it was."""


# By config, names and shapes: a process that consolidates one checkpoint after the other asks once.
_answers: dict[str, Answer] = {}


class Question:
    """A question that is under way; to be closed, which ends the child whatever it does.

    Args:
        config: of the model, as plain data.
        shapes: by name in its files.
    """

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
        content = [config, list(shapes.items())]
        self._key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        self._stack = contextlib.ExitStack()
        self._child: Child | None = None
        self._answer = _answers.get(self._key)
        reason = _why_not(config) if self._answer is None else None
        if reason is not None:
            self._answer = Answer(failure=reason)
        if self._answer is None:
            try:
                with contextlib.ExitStack() as opened:
                    self._ask(opened, config, shapes)
                    self._stack = opened.pop_all()
            except OSError as error:  # no room for scratch files
                self._answer = Answer(
                    failure=f"nothing can be written for the process that asks it: {error.strerror}"
                )

    def __enter__(self) -> Question:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, if it is still at it."""
        self._stack.close()

    def answer(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Answer:
        """Return the answer, waiting for it."""
        if self._answer is None:
            assert self._child is not None
            try:
                status = self._child.wait(timeout_s)
            except ChildTimeoutError:
                self._answer = Answer(failure=f"no answer came within {timeout_s:g} s")
            else:
                self._answer = self._remember(_read(self._answer_path, status))
        return self._answer

    def _ask(
        self, opened: contextlib.ExitStack, config: Mapping[str, Any], shapes: Mapping[str, Shape]
    ) -> None:
        scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="shardkit-class-"))
        self._answer_path = os.path.join(scratch, "answer.json")
        with open(os.path.join(scratch, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        if _may_ask_here():
            self._answer = self._remember(_ask_here(scratch, shapes))
            return
        request = {
            "asks": "lacking",
            "directory": scratch,
            "names": dict(shapes),
            "answer": self._answer_path,
        }
        stdin = opened.enter_context(tempfile.TemporaryFile())
        stdin.write(json.dumps(request).encode())
        stdin.seek(0)
        try:
            self._child = start_child(stdin)
        except OSError as error:  # an interpreter inside of another program may have no name
            self._answer = Answer(failure=f"Python cannot be started: {error.strerror}")
            return
        opened.callback(_end, self._child)

    def _remember(self, answer: Answer) -> Answer:
        if answer.failure is None:
            if len(_answers) >= _MAX_REMEMBERED:
                _answers.clear()
            _answers[self._key] = answer
        return answer


def _end(child: Child) -> None:
    child.kill()
    child.wait()


def _why_not(config: Mapping[str, Any]) -> str | None:
    """Return why the class of a config cannot be asked, as far as can be told without importing anything."""
    if (reason := why_no_class(config)) is not None:
        return reason
    if config.get("quantization_config"):
        return "the weights are quantised, and have names of their own"
    if _counts_too_many(config):
        return "config.json counts more layers than can be built"
    return None


def _counts_too_many(config: Mapping[str, Any]) -> bool:
    return any(
        _counts_too_many(value)
        if isinstance(value, Mapping)
        else isinstance(value, int) and value > _MAX_COUNT and _COUNTS.search(key)
        for key, value in config.items()
    )


def _may_ask_here() -> bool:
    """True where it costs no import and disturbs nobody.

    Building a model sets torch's default dtype for a moment, which another thread may be using; and DeepSpeed would have
    it built by all ranks together.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and "transformers" in sys.modules and "deepspeed" not in sys.modules


def _ask_here(directory: str, shapes: Mapping[str, Shape]) -> Answer:
    import torch

    logger = logging.getLogger("transformers")
    level = logger.level
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL + 1)
        try:
            from shardkit.layout.trace_child import answer_lacking

            return _parse(answer_lacking(directory, shapes))
        except (Exception, SystemExit) as error:  # a model's code may raise anything
            return Answer(failure=escape(f"{type(error).__name__}: {error}"))
        finally:
            logger.setLevel(level)


def _read(path: str, status: int) -> Answer:
    try:
        with open(path, encoding="utf-8") as file:
            answer = json.load(file)
    except (OSError, ValueError):
        how = f"by signal {-status}" if status < 0 else f"with exit code {status}"
        return Answer(failure=f"the process that asks it ended {how}")
    return _parse(answer) if answer["status"] == "ok" else Answer(failure=escape(answer["message"]))


def _parse(answer: Mapping[str, Any]) -> Answer:
    return Answer(
        model_class=answer["model_class"],
        missing=tuple(answer["missing"]),
        misfits=tuple((name, why) for name, why in answer["misfits"]),
    )
