"""Find out how transformers renames and converts stored tensors on their way into a model, and back.

transformers 5 has a list of renamings and converters for each architecture. Which of them apply depends on the
order of the keys, the config and the model. So the list is not interpreted here. Instead, the converters themselves
run, on meta tensors with the names and shapes of the files, and `Lowering` records every operation that they execute.
Their results are then known as expressions of the stored tensors, and bytes can be moved accordingly:

    a converter stacks two stored experts (64, 32)  ->  "experts.down_proj" = stack([Stored(...), Stored(...)], 0)

Only operations that cut, join and reorder tensors can be expressed. The result of any other operation is `Opaque`:
when bytes move, the converter itself computes it from whole real tensors (`convert_values`).

Only this module uses transformers' interfaces for conversions: get_model_conversion_mapping (5.0 to 5.23),
WeightRenaming and WeightConverter.

Source: transformers 5.23, core_model_loading.convert_and_load_state_dict_in_model and revert_weight_conversion.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit._torch import DispatchMode, class_before_sharding
from shardkit.core.regions import Region, Shape
from shardkit.core.text import escape
from shardkit.errors import LayoutError
from shardkit.keys.expressions import Expression, Opaque, Stored, Zeros, concat, cut, permute, reshape, stack
from shardkit.keys.names import natural
from shardkit.layout.classes import meta_twins


class Lowering(DispatchMode):  # type: ignore[no-untyped-call]
    """A context that records operations on meta tensors: each result as an expression of the tensors from `stored`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: list[str] = []
        """Names of the executed operations that cannot be expressed."""
        self._kept: dict[int, torch.Tensor] = {}
        self._expressions: dict[int, Expression] = {}

    def stored(self, name: str, shape: Shape) -> torch.Tensor:
        """Return a meta tensor that represents a stored one."""
        tensor = torch.empty(shape, device="meta")
        self._note(tensor, Stored(name, tuple(shape)))
        return tensor

    def expression(self, tensor: torch.Tensor) -> Expression | None:
        """Return the expression of a tensor; None if an operation that made it cannot be expressed."""
        return self._expressions.get(id(tensor))

    def _note(self, tensor: torch.Tensor, expression: Expression | None) -> None:
        self._kept[id(tensor)] = tensor  # so that no other tensor gets its id
        if expression is None:
            self._expressions.pop(id(tensor), None)
        else:
            self._expressions[id(tensor)] = expression

    def on_operation(self, name: str, inputs: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        """Record the result of an operation, if an input has an expression.

        torch runs each operation in this context through the base class, which then calls this method.
        """
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        input_tensors = [value for value in _flatten(inputs) if isinstance(value, torch.Tensor)]
        if not any(id(value) in self._expressions for value in input_tensors):
            return
        expressions: list[Expression] | None = None
        rule = _RULES.get(name.removeprefix("aten.").partition(".")[0])
        if (
            rule is not None
            and not options.keys() - _HARMLESS
            and all(id(value) in self._expressions for value in input_tensors)
        ):
            with contextlib.suppress(ValueError, TypeError, IndexError):
                outcome = rule(_Arguments(self._expressions, inputs))
                expressions = outcome if isinstance(outcome, list) else [outcome]
        fits = expressions is not None and [tuple(x.shape) for x in tensors] == [x.shape for x in expressions]
        if not fits:
            self.unknown.append(name)
        for index, tensor in enumerate(tensors):
            self._note(tensor, expressions[index] if expressions is not None and fits else None)


_HARMLESS = frozenset({"memory_format", "dtype", "layout", "device", "pin_memory", "non_blocking"})
"""Options of operations that leave the elements as they are, or change only their dtype."""


def _flatten(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value


class _Arguments(NamedTuple):
    """The positional arguments of an operation, with tensors as expressions."""

    expressions: Mapping[int, Expression]
    values: tuple[Any, ...]

    def tensor(self) -> Expression:
        """Return the first argument, a tensor."""
        return self.expressions[id(self.values[0])]

    def tensors(self) -> list[Expression]:
        """Return the first argument, a list of tensors."""
        return [self.expressions[id(tensor)] for tensor in self.values[0]]

    def get(self, index: int, default: Any = None) -> Any:
        """Return the argument at an index, or the default if there are fewer arguments."""
        return self.values[index] if index < len(self.values) else default

    def dim(self, index: int) -> int:
        """Return the argument at an index as a dim of the first argument, counted from the front."""
        return int(self.get(index, 0)) % len(self.tensor().shape)


def _cut_range(of: Expression, dim: int, start: int, size: int) -> Expression:
    offsets = tuple(start if d == dim else 0 for d in range(len(of.shape)))
    return cut(of, Region(offsets, tuple(size if d == dim else n for d, n in enumerate(of.shape))))


def _drop_dim(of: Expression, dim: int) -> Expression:
    return reshape(of, (*of.shape[:dim], *of.shape[dim + 1 :]))


def _split(arguments: _Arguments) -> list[Expression]:
    of, sizes, dim = arguments.tensor(), arguments.get(1), arguments.dim(2)
    total = of.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - start) for start in range(0, total, max(sizes, 1))]
    pieces, start = list[Expression](), 0
    for size in sizes:
        pieces.append(_cut_range(of, dim, start, int(size)))
        start += int(size)
    return pieces


def _slice(arguments: _Arguments) -> Expression:
    of, dim = arguments.tensor(), arguments.dim(1)
    size = of.shape[dim]
    start, stop, step = arguments.get(2) or 0, arguments.get(3, size), arguments.get(4, 1)
    start, stop = slice(start, size if stop is None else stop).indices(size)[:2]
    if step != 1:
        raise ValueError("every n-th element")
    return _cut_range(of, dim, start, max(stop - start, 0))


def _select(arguments: _Arguments) -> Expression:
    of, dim = arguments.tensor(), arguments.dim(1)
    return _drop_dim(_cut_range(of, dim, int(arguments.get(2)) % of.shape[dim], 1), dim)


def _unbind(arguments: _Arguments) -> list[Expression]:
    of, dim = arguments.tensor(), arguments.dim(1)
    return [_drop_dim(_cut_range(of, dim, index, 1), dim) for index in range(of.shape[dim])]


def _view(arguments: _Arguments) -> Expression:
    of, shape = arguments.tensor(), [int(n) for n in arguments.get(1)]
    if -1 in shape:
        shape[shape.index(-1)] = prod(of.shape) // prod(size for size in shape if size != -1)
    return reshape(of, tuple(shape))


def _transpose(arguments: _Arguments) -> Expression:
    of = arguments.tensor()
    dims = list(range(len(of.shape)))
    a, b = arguments.dim(1), arguments.dim(2)
    dims[a], dims[b] = dims[b], dims[a]
    return permute(of, dims)


def _squeeze(arguments: _Arguments) -> Expression:
    of, dims = arguments.tensor(), arguments.get(1)
    chosen = range(len(of.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    drop = {dim % len(of.shape) for dim in chosen}
    return reshape(of, tuple(n for d, n in enumerate(of.shape) if n != 1 or d not in drop))


def _unsqueeze(arguments: _Arguments) -> Expression:
    of, dim = arguments.tensor(), int(arguments.get(1))
    dim = dim + len(of.shape) + 1 if dim < 0 else dim
    return reshape(of, (*of.shape[:dim], 1, *of.shape[dim:]))


def _pad(arguments: _Arguments) -> Expression:
    of, pads, value = arguments.tensor(), list(arguments.get(1)), arguments.get(2, 0)
    if value != 0 or any(pad < 0 for pad in pads):
        raise ValueError("padding that is not zeros")
    for index in range(0, len(pads), 2):
        dim = len(of.shape) - 1 - index // 2
        for pad, first in ((pads[index], True), (pads[index + 1], False)):
            if pad:
                zeros = Zeros((*of.shape[:dim], pad, *of.shape[dim + 1 :]))
                of = concat([zeros, of] if first else [of, zeros], dim)
    return of


def _identity(arguments: _Arguments) -> Expression:
    return arguments.tensor()


_RULES: Mapping[str, Callable[[_Arguments], Expression | list[Expression]]] = {
    "cat": lambda arguments: concat(arguments.tensors(), int(arguments.get(1, 0))),
    "stack": lambda arguments: stack(arguments.tensors(), int(arguments.get(1, 0))),
    "split": _split,
    "split_with_sizes": _split,
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "_reshape_alias": _view,
    "transpose": _transpose,
    "t": lambda arguments: permute(arguments.tensor(), range(len(arguments.tensor().shape))[::-1]),
    "permute": lambda arguments: permute(arguments.tensor(), [int(dim) for dim in arguments.get(1)]),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "constant_pad_nd": _pad,
    "new_zeros": lambda arguments: Zeros(tuple(arguments.get(1))),
    "clone": _identity,
    "detach": _identity,
    "alias": _identity,
    "lift_fresh": _identity,
    "_to_copy": _identity,
    "expand": _identity,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The results of transformers' conversions, in either direction.

    The keys are names in the model from `Conversions.convert`, and names in the Hub's files from `revert_conversions`.
    """

    expressions: Mapping[str, Expression] = field(default_factory=dict)
    """Name -> expression of the inputs."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Name -> why it has no expression; the end of a sentence whose subject is the name."""


class Conversions(NamedTuple):
    """How `from_pretrained` renames and converts stored tensors for a model."""

    renamings: list[Any]
    converters: list[Any]

    @classmethod
    def of(cls, module: Any) -> Conversions | None:
        """Return the renamings and converters for a model; None if this transformers is too old to have any."""
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming
        except ImportError:
            return None
        with original_classes(module):
            transforms = get_model_conversion_mapping(module)
        return cls(
            [transform for transform in transforms if isinstance(transform, WeightRenaming)],
            [transform for transform in transforms if isinstance(transform, WeightConverter)],
        )

    @property
    def keep_names(self) -> bool:
        """True if some converter keeps a name, so that names alone do not show whether tensors need converting."""
        return any(set(c.source_patterns) & set(c.target_patterns) for c in self.converters)

    def rename(self, name: str) -> tuple[str, str | None]:
        """Return a stored tensor's name in the model, and its converter's pattern or None."""
        from transformers.core_model_loading import rename_source_key

        renamed: tuple[str, str | None] = rename_source_key(name, self.renamings, self.converters)
        return renamed

    def convert(
        self, model: nn.Module, groups: Mapping[str, Mapping[str, str]], shapes: Mapping[str, Shape]
    ) -> Conversion:
        """Return the model's tensors as expressions of stored ones, under the model's own names.

        Args:
            model: the transformers model that receives the tensors, wrapped or not.
            groups: the groups of tensors that are converted together. Name in the model of a group's first result
                -> stored name -> the name that the converters see.
            shapes: stored name -> shape.
        """
        converted, failed = dict[str, Expression](), dict[str, str]()
        for fqn, names in groups.items():
            parts = tuple(
                (names[name], Stored(name, tuple(shapes[name])))
                for name in sorted(names, key=lambda name: natural(names[name]))
            )
            seen = [name for name, _ in parts]
            with Lowering() as lowering:
                try:
                    tensors = [lowering.stored(part.name, part.shape) for _, part in parts]
                    values = self.make(model, fqn, seen, tensors)
                    expressions = {target: lowering.expression(tensor) for target, tensor in values.items()}
                    opaque = [target for target, expression in expressions.items() if expression is None]
                    changed = self._dtype_changing_targets(model, fqn, parts) if opaque else set()
                except Exception as error:  # an operation may raise anything for tensors that do not fit
                    failed[fqn] = (
                        f"cannot be made of what is there: {escape(str(error).partition(chr(10))[0])}"
                    )
                    continue
            converted |= {target: e for target, e in expressions.items() if e is not None}
            for target in opaque:
                if target in changed:
                    reason = ", ".join(dict.fromkeys(lowering.unknown)) or "it is not made of stored tensors"
                    failed[target] = f"is computed in another dtype than it is stored in: {reason}"
                else:
                    converted[target] = Opaque(target, fqn, parts, tuple(values[target].shape))
        return Conversion(expressions=converted, failed=failed)

    def make(
        self, model: nn.Module, group: str, names: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Run the converter of a group; return name in the model -> resulting tensor.

        Args:
            model: a transformers model.
            group: name in the model of the group's first result.
            names: names of the input tensors, as the converter sees them, in natural order.
            tensors: the input tensors, in the order of the names.

        Raises:
            Exception: anything that an operation may raise.
        """
        by_pattern = {pattern: c for c in self.converters for pattern in c.source_patterns}
        converter = None
        for name, tensor in zip(names, tensors, strict=True):
            _, pattern = self.rename(name)
            assert pattern is not None
            converter = converter or copy.deepcopy(by_pattern[pattern])
            converter.add_tensor(group, name, pattern, tensor)
        assert converter is not None
        values = _run(converter, group, model)
        return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}

    def _dtype_changing_targets(
        self, model: nn.Module, group: str, parts: Sequence[tuple[str, Stored]]
    ) -> set[str]:
        """Return the results of a converter whose dtype differs from that of its inputs."""
        changed = set[str]()
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [torch.empty(part.shape, device="meta", dtype=dtype) for _, part in parts]
            values = self.make(model, group, [name for name, _ in parts], tensors)
            changed |= {target for target, value in values.items() if value.dtype is not dtype}
        return changed


def convert_values(
    model: nn.Module, opaque: Opaque, values: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Convert real tensors by transformers' own code, as `from_pretrained` does.

    Args:
        model: a transformers model on any device.
        opaque: any tensor of the group that the converter makes.
        values: the stored tensors `opaque.parts`, on the CPU.

    Returns:
        Name in the model -> tensor, for the whole group.

    Raises:
        LayoutError: the converter fails, or this transformers has none.
    """
    conversions = Conversions.of(model)
    try:
        if conversions is None:
            raise LayoutError("this transformers is older than 5.0")
        with torch.no_grad():
            return conversions.make(model, opaque.group, [name for name, _ in opaque.parts], values)
    except Exception as error:  # an operation may raise anything
        reason = escape(str(error).partition(chr(10))[0])
        raise LayoutError(
            f"transformers cannot make {escape(opaque.target)} of what is stored: {reason}"
        ) from error


def revert_conversions(model: Any, shapes: Mapping[str, Shape]) -> Conversion:
    """Return the tensors that `save_pretrained` would write, with the names and forms of the Hub's files.

    `from_pretrained` records in a model which prefixes its files had. A model that was built otherwise lacks that.

    Args:
        model: a transformers model.
        shapes: name in the model -> shape.

    Raises:
        LayoutError: this transformers cannot revert conversions, or fails to.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise LayoutError("this transformers does not tell the Hub's names: it is older than 5.0") from error
    expressions, failed = dict[str, Expression](), dict[str, str]()
    with Lowering() as lowering:
        tensors = {name: lowering.stored(name, shape) for name, shape in shapes.items()}
        try:
            reverted = revert_weight_conversion(model, tensors)
        except Exception as error:  # an operation may raise anything
            reason = escape(str(error).partition(chr(10))[0]) or type(error).__name__
            raise LayoutError(
                f"transformers cannot turn the names of the model into the Hub's: {reason}"
            ) from error
    for name, value in reverted.items():
        tensor = value[0] if isinstance(value, list) else value
        expression = lowering.expression(tensor)
        if expression is None:
            failed[name] = (
                f"is computed by operations that shardkit does not know: {', '.join(lowering.unknown)}"
            )
        else:
            expressions[name] = expression
    return Conversion(expressions=expressions, failed=failed)


def _run(converter: Any, fqn: str, model: nn.Module) -> Mapping[str, Any]:
    """Run a converter. If it fails because wrappers hide the model's parameters, run it with the model's twin."""
    again = copy.copy(converter.collected_tensors)
    config = getattr(model, "config", None)
    try:
        values: Mapping[str, Any] = converter.convert(fqn, model=model, config=config)
    except AttributeError:
        twin = next((twin for _, twin in meta_twins(model, None) if twin is not None), None)
        if twin is None:
            raise
        converter.collected_tensors = again
        values = converter.convert(fqn, model=twin, config=config)
    return values


@contextlib.contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Restore the classes that `fully_shard` replaced while the context lasts, for code that reads class names."""
    changed = {module: type(module) for module in model.modules() if isinstance(module, FSDPModule)}
    try:
        for module in changed:
            module.__class__ = class_before_sharding(module)
        yield
    finally:
        for module, sharded in changed.items():
            module.__class__ = sharded
