"""Policies as Python callers give them: which modules of a model become units."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from shardkit.core.text import count, escape
from shardkit.errors import PolicyError
from shardkit.layout.units import check_ties, class_counts, import_name, match_auto, match_names, without_ties
from shardkit.layout.wrap_policy import Wording, list_candidates, parse_policy

Policy = str | type[nn.Module] | Iterable[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
"""See `shardkit.wrap`."""

_USAGE = (
    'give "auto", "none", classes, class names, import paths ("pkg.mod.Class"), module paths ("model.layers.*"), a set '
    "of these, or a function (name, module) -> bool"
)
POLICY = Wording("policy", 'policy="{}"', _USAGE)
CHECKPOINTING = Wording(
    "activation_checkpointing", 'activation_checkpointing="{}"', _USAGE, effect="checkpoints nothing"
)


def choose_units(model: nn.Module, policy: Policy) -> list[str]:
    """Return the paths of the modules that a policy makes units, the root aside, in module order.

    Args:
        model: not wrapped yet.
        policy: see `shardkit.wrap`.

    Raises:
        PolicyError: it matches nothing, or is none.
        LayoutError: it would put the names of one parameter into different units.
    """
    chosen = match_policy(model, policy, POLICY)
    if isinstance(policy, str) and policy.strip() == "auto":
        chosen = without_ties(model, chosen)
    check_ties(model, chosen, POLICY)
    return chosen


def match_policy(model: nn.Module, policy: Policy, wording: Wording) -> list[str]:
    """Return the paths of the modules that a policy matches, the root aside, in module order.

    Args:
        wording: the argument that it was given as.

    Raises:
        PolicyError: it, or a member of it, matches nothing or what has no forward, or it is none.
    """
    if isinstance(policy, str):
        chosen = _match_text(model, policy, wording)
    elif isinstance(policy, type):
        chosen = _match_classes(model, [policy], wording)
    elif isinstance(policy, Iterable):
        members = list(policy)
        classes = [member for member in members if isinstance(member, type)]
        names = [member for member in members if isinstance(member, str)]
        if not members or len(classes) + len(names) < len(members):
            raise PolicyError(f"{wording.name}: holds no classes or names: {members}", hint=wording.usage)
        found = {*_match_classes(model, classes, wording), *match_names(model, sorted(names), wording)}
        chosen = [path for path, _ in model.named_modules() if path in found]
    elif callable(policy):
        chosen = _match_predicate(model, policy, wording)
    else:
        raise PolicyError(f"{wording.name}: cannot be of type {type(policy).__name__}", hint=wording.usage)
    _check_forward(model, chosen, wording)
    return chosen


def _match_text(model: nn.Module, policy: str, wording: Wording) -> list[str]:
    parsed = parse_policy(policy, wording)
    if parsed.kind == "function":
        raise PolicyError(
            f"{wording.name}: {escape(policy)} shards the model itself",
            hint="call it with the model and the mesh in place of wrap; finalize takes a model wrapped by anybody",
        )
    if parsed.kind == "auto":
        return match_auto(model, wording)
    return match_names(model, parsed.names, wording)


def _match_classes(model: nn.Module, classes: list[type], wording: Wording) -> list[str]:
    modules = [(path, module) for path, module in model.named_modules() if path]
    absent = [c.__name__ for c in classes if not any(isinstance(module, c) for _, module in modules)]
    if absent:
        raise _nothing(model, f"no module is a {' or a '.join(sorted(absent))}", absent, wording)
    return [path for path, module in modules if isinstance(module, tuple(classes))]


def _match_predicate(
    model: nn.Module, predicate: Callable[[str, nn.Module], bool], wording: Wording
) -> list[str]:
    name = getattr(predicate, "__name__", type(predicate).__name__)
    try:
        matched = [path for path, module in model.named_modules() if path and predicate(path, module)]
    except TypeError as error:
        raise PolicyError(
            f"{wording.name}: {escape(name)} cannot be called with a name and a module: {error}",
            hint="it takes (name, module) and returns whether the module is a unit",
        ) from error
    if not matched:
        raise _nothing(
            model,
            f"{escape(name)} chose none of {count(len(list(model.modules())) - 1, 'module')}",
            [],
            wording,
        )
    return matched


def _nothing(model: nn.Module, message: str, asked: Iterable[str], wording: Wording) -> PolicyError:
    return PolicyError(
        f"{wording.name}: {message}",
        problems=list_candidates(class_counts(model), asked),
        hint=f"the module classes that exist are listed above; {wording.of('none')} {wording.effect}",
    )


def _check_forward(model: nn.Module, paths: Iterable[str], wording: Wording) -> None:
    """Refuse containers: nothing calls them, so nothing would gather their parameters."""
    modules = dict(model.named_modules())
    containers = [
        path
        for path in paths
        if isinstance(modules[path], nn.ModuleList | nn.ModuleDict)
        and type(modules[path]).forward is nn.Module.forward
    ]
    if containers:
        raise PolicyError(
            f"{wording.name}: {count(len(containers), 'module')} that it matches cannot be units: they have no forward",
            problems=[f"{escape(path)} ({type(modules[path]).__name__})" for path in containers],
            hint=f"name what is in it, as {escape(containers[0])}.*",
        )


def layer_policy(*paths: str) -> set[type[nn.Module]]:
    """Return the classes of some import paths, as `wrap`, and FSDP1's own policies, take them.

    Args:
        paths: such as "transformers.models.llama.modeling_llama.LlamaDecoderLayer".

    Raises:
        PolicyError: paths that lead to no module class, all at once.
    """
    found: set[type[nn.Module]] = set()
    problems = []
    for path in paths:
        module_name, _, attribute = path.rpartition(".")
        try:
            if not module_name:
                raise PolicyError(f"layer_policy: {escape(path)} is not an import path (pkg.mod.Class)")
            value = import_name(module_name, attribute, Wording("layer_policy", "{}", _USAGE))
            if not (isinstance(value, type) and issubclass(value, nn.Module)):
                raise PolicyError(f"layer_policy: {escape(path)} is not a class of modules")
            found.add(value)
        except PolicyError as error:
            problems.append(f"{escape(path)}: {error.message.partition(': ')[2]}")
    if problems or not paths:
        raise PolicyError(
            "layer_policy: no classes to wrap"
            if not paths
            else f"layer_policy: {count(len(problems), 'path')} cannot be used",
            problems=problems,
            hint="give import paths of module classes, such as transformers.models.llama.modeling_llama.LlamaDecoderLayer",
        )
    return found
