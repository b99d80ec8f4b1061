"""Get from the real model, in a child process: its layout, its names, and the weights that its files lack.

A child process (`trace_child`) builds the model on the meta device and wraps it by the real `fully_shard`. It is a
process of its own because a fake process group cannot be made next to a real one, importing a model may run much
code, and this process need not load torch. The child answers with JSON, which `trace_cache` caches. In `one_process`
a command starts at most one child.

    trace_model     config.json, mesh, policy -> Trace, with the layout
    ask_class       config.json, names -> ClassReply
    ClassQuestion   config, names in files -> ClassAnswer, computed while bytes move

No code from a model's directory runs, unless the user trusts it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from shardkit._folding import fold
from shardkit.core.dtypes import DType
from shardkit.core.mesh import Axis, Mesh
from shardkit.core.placements import Placement
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed
from shardkit.errors import LayoutError, PolicyError, ResourceError, ShardkitError, SourceError, UsageError
from shardkit.files import storage
from shardkit.files.manifest import Unit
from shardkit.keys.expressions import Expression, from_json
from shardkit.layout.binding import ClassNames
from shardkit.layout.layout import CannotBuildError, Layout, TensorLayout
from shardkit.layout.trace_cache import slot_for
from shardkit.layout.wrap_policy import parse_policy, parse_stages

T = TypeVar("T")

_log = logging.getLogger("shardkit")

DEFAULT_TIMEOUT_S = 600.0
_LAST_LINES = 12

_ASKED = {
    "": "what the model's tensors are called and where they lie",
    "class": "what its tensors are called in files, and which from_pretrained would not find",
}
"""Value of "asks" in a request -> words for log messages."""

STATUSES: dict[str, type[ShardkitError]] = {
    "cannot_build": CannotBuildError,
    "policy": PolicyError,
    "layout": LayoutError,
    "source": SourceError,
    "usage": UsageError,
}
"""Status in the child's answer -> class of the error; a subclass comes before its base class."""

# The child gets this process's import path and nothing more. `python -m` would put the current directory
# first, and that may be a downloaded model with a json.py in it.
# The child ends soon and uses little memory, while garbage collection would take a sixth of its time.
_BOOT = "import gc, sys; gc.disable(); sys.path[:] = sys.argv[1:]; from shardkit.layout.trace_child import main; main()"

# A launcher's settings for real process groups would leak into the fake one. PYTHONWARNINGS could turn a library's
# warning into an error.
_DROPPED = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCH_DISTRIBUTED_DEBUG"
    " PYTHONWARNINGS".split()
)
_SET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The result of a trace: the layout, and data for comparing its names with a source's."""

    layout: Layout
    model_class: str
    """E.g. "LlamaForCausalLM"."""
    absent_buffers: frozenset[str]
    """Names of non-persistent buffers: the live model has them, but its state dict does not."""
    match: ClassNames | None = None
    """How the model matches the source's names; None if `trace_model` got no names."""


def trace_model(
    directory: str,
    mesh: Mesh,
    wrap: str,
    *,
    stages: str = "auto",
    dtype: DType | None = None,
    names: Mapping[str, Shape] | None = None,
    trust_remote_code: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> Trace:
    """Build a model without weights, wrap it as training will, and read every tensor's placements.

    Args:
        directory: the directory with config.json, and with the model's own code if it has any.
        mesh: a mesh of any size. One process represents all ranks.
        wrap: the policy, see `wrap_policy`.
        stages: the assignment to pipeline stages: "auto", or "module:function".
        dtype: the dtype that floating tensors will have; None keeps the stored ones.
        names: stored name -> shape, for tensors to match with the model as `from_pretrained` does; or None.
        trust_remote_code: whether the model's own code may run.
        on_start: called before a child starts, which takes seconds; not called if the answer is cached.

    Returns:
        Trace whose layout has origin "traced", with the names of the live model's state dict.

    Raises:
        CannotBuildError: neither transformers nor trusted code can build the model of the config.
        PolicyError: the policy matches nothing, or its function cannot be imported or fails.
        LayoutError: placements are not supported, ties cross units, or the model fails to build.
        SourceError: several of the source's tensors would be one of the model's.
        ResourceError: the child was killed or took too long.
    """
    parse_policy(wrap)  # reports a typing mistake before a child imports for seconds
    axes = [[axis.name, axis.size, axis.role] for axis in mesh.axes]
    parse_stages(stages)
    about = {
        "axes": axes,
        "ep": mesh.ep,
        "pp": mesh.pp,
        "stages": stages,
        "wrap": wrap,
        "dtype": None if dtype is None else dtype.name,
    }
    request = _request(directory, names, trust_remote_code) | about
    return _ask(request, lambda answer: read_answer(answer, mesh, wrap), on_start)


# Types of models that have the same names and shapes in memory as on the Hub. The list only saves a child.
SAME_IN_MEMORY = frozenset(
    "llama mistral ministral qwen2 qwen3 gemma gemma2 olmo olmo2 olmo3 phi phi3 granite cohere cohere2 stablelm"
    " starcoder2 smollm3 glm4 opt bloom falcon mpt gptj gpt_neo t5 mt5 bart mbart pegasus roberta".split()
)


def may_differ_in_memory(config: Mapping[str, Any]) -> bool:
    """True if a config's class can be built and may have other names in memory than on the Hub."""
    return _why_no_answer(config) is None and config.get("model_type") not in SAME_IN_MEMORY


class ClassReply(NamedTuple):
    """A class's answer about tensors."""

    match: ClassNames
    """How the model matches names in files: the requested names, or for names in memory those in `hub_form`."""
    answer: ClassAnswer
    """The weights that `from_pretrained` would not find in these files, or why the Hub's form is not known."""
    hub_form: Mapping[str, Expression] | None = None
    """For names in memory: name on the Hub -> expression of the tensors in memory; None if it is not known."""
    is_lost: bool = False
    """True if the names are the model's in memory, but loading no known form would give these tensors again."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names in memory of one tensor; the name that `save_pretrained` keeps comes first."""
    fp32: frozenset[str] = frozenset()
    """Names of tensors that the class keeps in fp32 if the others are converted to the requested dtype."""


def ask_class(
    directory: str,
    names: Mapping[str, Shape],
    *,
    in_memory: bool = False,
    dtype: DType | None = None,
    on_start: Callable[[], None] = lambda: None,
) -> ClassReply | None:
    """Ask the class of a model in the installed transformers about its tensors.

    Returns None if there is no answer: transformers lacks the class, the model fails to build, several of the tensors
    would be one of the model's, or the child was killed or took too long.

    Args:
        directory: the directory with config.json. Code in it does not run.
        names: name -> shape. Names are those in files, or those in memory if `in_memory`.
        in_memory: ask for the form in which `save_pretrained` would write the tensors.
        dtype: ask only for `fp32`, in case the other tensors are converted to this dtype.
        on_start: called before a child starts, which takes seconds; not called if the answer is cached.
    """
    with contextlib.suppress(ShardkitError):
        return _ask(_class_request(directory, names, in_memory, dtype), _read_reply, on_start)
    return None


def _class_request(
    directory: str, names: Mapping[str, Shape], in_memory: bool = False, dtype: DType | None = None
) -> dict[str, Any]:
    about = {"asks": "class", "in_memory": in_memory, "dtype": None if dtype is None else dtype.name}
    return _request(directory, names, False) | about


def _read_reply(reply: Mapping[str, Any]) -> ClassReply:
    """Return the answer of `naming.answer_class` as an object."""
    match, form = ClassNames.from_json(reply["match"]), reply.get("form", {})
    answer = ClassAnswer(
        model_class=reply["model_class"],
        missing=tuple(match.missing),
        misfits=tuple((name, why) for name, why in match.misfits),
        failure=form.get("why") or None,
    )
    hub_form = form.get("made")
    return ClassReply(
        match,
        answer,
        None if hub_form is None else {name: from_json(each) for name, each in hub_form.items()},
        form.get("is_lost", False),
        tuple(map(tuple, form.get("ties", ()))),
        frozenset(reply.get("fp32", ())),
    )


def _request(directory: str, names: Mapping[str, Shape] | None, trust_remote_code: bool) -> dict[str, Any]:
    return {
        "directory": os.path.abspath(storage.local_config(directory)),
        "names": None if names is None else dict(names),
        "trust_remote_code": trust_remote_code,
    }


def _ask(
    request: dict[str, Any],
    read: Callable[[Mapping[str, Any]], T],
    on_start: Callable[[], None] = lambda: None,
) -> T:
    """Return `read(answer)` for the answer to a request, which comes from the cache or else from a child."""
    kept = _find_cached(request, read)
    if kept is not None:
        return kept
    on_start()
    return _ask_child(request, read)


def _find_cached(request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T | None:
    slot = slot_for(request)
    kept = slot.find(read) if slot is not None else None
    if kept is not None:
        _log.debug("layout: %s, from the cache", _ASKED[request.get("asks", "")])
    return kept


def _ask_child(request: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
    _log.debug("transformers is asked %s, in a process of its own", _ASKED[request.get("asks", "")])
    return _cache_answer(request, _run_child(request), read)


def _cache_answer(
    request: Mapping[str, Any], answer: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]
) -> T:
    """Return `read(answer)`, and cache the answer."""
    result, slot = read(answer), slot_for(request)
    if slot is not None:
        slot.keep({**answer, "status": "ok"})
    return result


def _run_child(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send a request to the child, and return its answer.

    Raises:
        ShardkitError: the error in the answer; or the child cannot be started, died, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="shardkit-trace-") as scratch:
        # A file, not stdout: importing a model may print anything.
        answer_path = os.path.join(scratch, "answer.json")
        payload = json.dumps({**request, "answer": answer_path}).encode()
        try:
            done = _serve_request(payload, DEFAULT_TIMEOUT_S)
        except OSError as error:  # an interpreter inside another program may have no name
            raise ResourceError(
                f"cannot start Python ({escape(sys.executable or 'sys.executable is empty')}) to trace the model: "
                f"{error.strerror}",
                hint="run it from an ordinary Python interpreter, or without config.json to have the layout declared",
            ) from None
        except subprocess.TimeoutExpired as error:
            raise ResourceError(
                f"tracing the model took longer than {DEFAULT_TIMEOUT_S:g} s",
                problems=_last_lines(error.output),
                hint="try again on a machine that is less busy",
            ) from None
        try:
            with open(answer_path, encoding="utf-8") as file:
                answer: dict[str, Any] = json.load(file)
        except (FileNotFoundError, ValueError):
            raise _child_died_error(done) from None
    if answer["status"] != "ok":
        lines = _last_lines(done.stdout) if answer.get("show_output") else []
        kind = STATUSES[answer["status"]]
        raise kind(answer["message"], problems=[*answer["problems"], *lines], hint=answer["hint"])
    return answer


def _command() -> list[str]:
    return [sys.executable, "-c", _BOOT, *map(os.path.abspath, sys.path)]


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _DROPPED} | _SET


class _ModelProcess:
    """A child that builds models and answers one request after the other. It starts with the first request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self.child: subprocess.Popen[bytes] | None = None

    def serve(self, payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
        """Send a request and wait until the child has written the answer or has ended.

        Returns:
            The output that the child printed meanwhile, and status 0, or the child's exit status if it ended.

        Raises:
            OSError: the child cannot be started.
            subprocess.TimeoutExpired: the child did not answer in time and was killed.
        """
        with self._lock:
            child = self.start()
            before = len(self._output(0))
            try:
                self._line.settimeout(timeout_s)
                self._line.sendall(payload + b"\n")
                is_answered = self._line.recv(1) != b""
            except TimeoutError:
                child.kill()
                raise subprocess.TimeoutExpired(child.args, timeout_s, self._output(before)) from None
            except OSError:  # the child has ended
                is_answered = False
            status = 0 if is_answered else child.wait()
            return subprocess.CompletedProcess(child.args, status, self._output(before))

    def close(self) -> None:
        """End the child. A thread that waits for its answer returns."""
        child = self.child
        if child is not None:
            child.kill()
        with self._lock:
            self._stack.close()
            self.child = None

    def start(self) -> subprocess.Popen[bytes]:
        """Start the child unless it already runs, and return it."""
        if self.child is not None:
            return self.child
        with contextlib.ExitStack() as opened:
            scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="shardkit-trace-"))
            self._printed = os.path.join(scratch, "printed")
            self._line, end = map(opened.enter_context, socket.socketpair())
            with end, open(self._printed, "ab") as file:
                self.child = child = subprocess.Popen(
                    _command(), stdin=end.fileno(), stdout=file, stderr=subprocess.STDOUT, env=_environment()
                )
            opened.callback(child.wait)
            opened.callback(child.kill)
            self._stack = opened.pop_all()
        return child

    def _output(self, start: int) -> bytes:
        with open(self._printed, "rb") as file:
            file.seek(start)
            return file.read()


_process = ContextVar[_ModelProcess | None]("_process", default=None)


@contextlib.contextmanager
def one_process(process: _ModelProcess | None = None) -> Iterator[None]:
    """Let one child answer all requests in this context. It starts with the first request and ends with the context."""
    with contextlib.closing(process or _ModelProcess()) as child_process:
        token = _process.set(child_process)
        try:
            yield
        finally:
            _process.reset(token)


def _serve_request(payload: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Call `_ModelProcess.serve` of the child of the context, or of a new child for this request alone."""
    process = _process.get()
    if process is not None:
        return process.serve(payload, timeout_s)
    with contextlib.closing(_ModelProcess()) as child_process:
        return child_process.serve(payload, timeout_s)


def _child_died_error(done: subprocess.CompletedProcess[bytes]) -> ShardkitError:
    hint = "signal 9 usually means that memory ran out" if done.returncode == -9 else None
    message = f"the process that traces the model ended {_describe_exit(done.returncode)}"
    return ResourceError(message, problems=_last_lines(done.stdout), hint=hint)


def _describe_exit(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with exit code {status}"


def _last_lines(output: bytes | None) -> list[str]:
    lines = (output or b"").decode(errors="replace").splitlines()
    return [escape(line) for line in lines if line.strip()][-_LAST_LINES:]


def read_answer(answer: Mapping[str, Any], mesh: Mesh, wrap: str) -> Trace:
    """Return the trace from a child's answer with status "ok".

    "meshes" has the further meshes over the same ranks (views), "units" the wrapped modules, and "stages" the pipeline stages
    that hold each tensor, ascending; "tensors" refers to meshes and units by their positions.
    """
    views = [
        Mesh(
            tuple(Axis(name, size, role) for name, size, role, _ in axes),
            tuple(tuple(map(tuple, steps)) for *_, steps in axes),
        )
        for axes in answer["meshes"]
    ]
    stages: dict[str, list[int]] = answer["stages"]
    tensors = [
        TensorLayout(
            fqn=fqn,
            shape=tuple(shape),
            placements=tuple(map(Placement.parse, placements)),
            unit=unit,
            is_buffer=is_buffer,
            mesh=None if view is None else views[view],
            # Several stages may hold copies of a tensor, such as a tied embedding. It is stored once, by the first of them.
            stage=stages[fqn][0] if stages else None,
        )
        for fqn, shape, placements, unit, is_buffer, view in answer["tensors"]
    ]
    layout = Layout(
        origin="traced",
        mesh=mesh,
        units=tuple(Unit(path=path, class_name=class_name) for path, class_name in answer["units"]),
        tensors={tensor.fqn: tensor for tensor in tensors},
        ties=tuple(map(tuple, answer["ties"])),
        keep_fp32=frozenset(answer["keep_fp32"]),
        policy=wrap,
        notes=tuple(answer["notes"]),
    )
    return Trace(
        layout=layout,
        model_class=answer["model_class"],
        absent_buffers=frozenset(answer["absent_buffers"]),
        match=None if answer["match"] is None else ClassNames.from_json(answer["match"]),
    )


# A damaged or hostile config may set such a large number of modules that building them never ends.
_COUNTS = re.compile(r"layer|expert|block|depth|stage|codebook")
_MAX_COUNT = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassAnswer:
    """The problems that `from_pretrained` of a class would have with files."""

    model_class: str = ""
    """E.g. "LlamaForCausalLM"; empty if no class answered."""
    missing: tuple[str, ...] = ()
    """The class's names of weights that `from_pretrained` would initialise at random."""
    misfits: tuple[tuple[str, str], ...] = ()
    """(name, reason) of weights because of which `from_pretrained` would refuse the files."""
    failure: str | None = None
    """Why no class answered, or None."""

    def lines(self, where: str) -> Iterator[str]:
        """Yield the problems as sentences for the user; `where` names the files, such as "the output"."""
        name = escape(self.model_class)
        if self.missing:
            folded = [group.pattern for group in fold((fqn, None) for fqn in self.missing)]
            yield (
                f"{name}.from_pretrained would initialise {count(len(self.missing), 'tensor')} at random, "
                f"which {where} lacks: {listed(folded)}"
            )
        if self.misfits:
            shown = [group.pattern for group in fold((fqn, None) for fqn, _ in self.misfits)]
            yield (
                f"{name}.from_pretrained would refuse {where} for {count(len(self.misfits), 'tensor')}: "
                f"{listed(shown)} ({self.misfits[0][0]}: {self.misfits[0][1]})"
            )


class ClassQuestion:
    """Finds out, while bytes move, which weights `from_pretrained` would not find in files.

    If transformers is already loaded, this process builds the model at once. Otherwise a child does, and a thread waits
    for it. A failure is no error: the answer then has the reason in `failure`. Closing the question ends the child.

    Args:
        config: the model's config, as plain data.
        shapes: name in the files -> shape.
    """

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
        self._stack = contextlib.ExitStack()
        self._process = _process.get() or _ModelProcess()
        self._thread: threading.Thread | None = None
        self._answer = ClassAnswer(failure=_why_no_answer(config))
        if self._answer.failure is not None:
            return
        try:
            scratch = tempfile.TemporaryDirectory(prefix="shardkit-class-")
            self._stack.callback(scratch.cleanup)
            with open(os.path.join(scratch.name, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config, file)
            self._ask(_class_request(scratch.name, shapes))
        except OSError as error:  # no room for scratch files, or an interpreter without a name
            self._answer = ClassAnswer(failure=f"no process that asks it can be started: {error.strerror}")

    def __enter__(self) -> ClassQuestion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """True while the answer is not known yet."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """End the child if it still runs."""
        if self._thread is not None:
            self._process.close()
            self._thread.join()
        self._stack.close()

    def answer(self) -> ClassAnswer:
        """Wait for the answer and return it."""
        if self._thread is not None:
            self._thread.join()
        return self._answer

    def _ask(self, request: Mapping[str, Any]) -> None:
        if (kept := _find_cached(request, _read_reply)) is not None:
            self._answer = kept.answer
        elif _may_ask_here():
            _log.debug("transformers is asked %s", _ASKED["class"])
            self._answer = _ask_here(request)
        else:
            self._process.start()
            self._thread = threading.Thread(target=self._ask_in_thread, args=[request])
            self._thread.start()

    def _ask_in_thread(self, request: Mapping[str, Any]) -> None:
        # A new thread does not see the context variable with the main thread's child, so it is set here as well.
        # Otherwise the request would start a second child, which `close` cannot end.
        with one_process(self._process):
            try:
                self._answer = _ask_child(request, _read_reply).answer
            except ShardkitError as error:
                self._answer = ClassAnswer(failure=escape(error.message))


def _why_no_answer(config: Mapping[str, Any]) -> str | None:
    """Return why a config's class cannot answer, or None; nothing is imported, so building may still fail."""
    if (reason := why_no_class(config)) is not None:
        return reason
    if config.get("quantization_config"):
        return "the weights are quantised and have names of their own"
    return "config.json counts more layers than can be built" if _counts_too_many(config) else None


def _counts_too_many(config: Mapping[str, Any]) -> bool:
    return any(
        _counts_too_many(value)
        if isinstance(value, Mapping)
        else isinstance(value, int) and value > _MAX_COUNT and _COUNTS.search(key)
        for key, value in config.items()
    )


def _may_ask_here() -> bool:
    """True if this process can build a model without an import and without side effects on other threads or ranks.

    Building a model changes torch's default dtype for a moment, which another thread may be using. DeepSpeed
    would make all ranks build the model together.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and "transformers" in sys.modules and "deepspeed" not in sys.modules


def _ask_here(request: Mapping[str, Any]) -> ClassAnswer:
    import torch

    logger = logging.getLogger("transformers")
    level = logger.level
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL + 1)
        try:
            from shardkit.layout.naming import answer_class

            return _cache_answer(request, answer_class(request), _read_reply).answer
        except (Exception, SystemExit) as error:  # a model's code may raise any error
            return ClassAnswer(failure=escape(f"{type(error).__name__}: {error}"))
        finally:
            logger.setLevel(level)


def asking_text(config: Mapping[str, Any] | None) -> str:
    """Return the text to show while waiting for a class's answer."""
    return f"asking {class_name(config)} ..."


def class_name(config: Mapping[str, Any] | None) -> str:
    """Return the name of a config's class, for messages."""
    names = (config or {}).get("architectures")
    return escape(str(names[0])) if isinstance(names, list) and names else "the model"


def why_no_class(config: Mapping[str, Any] | None) -> str | None:
    """Return why a config's class cannot be built, or None; nothing is imported, so building may still fail."""
    if config is None:
        return "there is no config.json"
    if not config.get("architectures") or not config.get("model_type"):
        return "config.json names no architecture"
    missing = next(
        (name for name in ("transformers", "torch") if importlib.util.find_spec(name) is None), None
    )
    return missing and f"{missing} is not installed (`pip install 'shardkit[trace]'`)"
