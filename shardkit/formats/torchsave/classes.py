"""Tensors of classes that wrap another tensor: find the attribute with the value, or explain why there is none.

In Float8, MXFP8 and INT8 training, weights have such a class, which casts them for a collective or a product of
matrices. `torch.save` writes the object: class, dtype, shape, and every attribute. The value is the one attribute that
is a plain tensor of that dtype and shape; other attributes are settings, or tensors for the next cast.

A class is identified by its name and its package, as modules move within a package. For a class that is not in the
table no attribute is guessed: if scales are stored beside it, an inner tensor is not the value. Such a tensor is refused
with an `UnreadableClass`. No class is imported or run.

Source: torchao 0.5 to 0.18, torchao/float8/fsdp_utils.py, torchao/prototype/moe_training/tensor.py and
torchao/prototype/quantized_training; xtuner 1, xtuner/v1/float8/fsdp_utils.py; torch 2.13,
torch/distributed/_functional_collectives.py; bitsandbytes 0.50, bitsandbytes/nn/modules.py; TransformerEngine 2.9 and
2.20, transformer_engine/pytorch/tensor. `tests/data/classes` has their records. Only read of, not tried: diffusers,
quantizers/gguf/utils.py; DeepSpeed, linear/quantization.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardkit.core.catalog import SourceFile
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, few
from shardkit.errors import SourceError
from shardkit.formats.torchsave.archive import UnsupportedFile, ZipEntry
from shardkit.formats.torchsave.record import TensorRecord, is_extent


class _Wrapper(NamedTuple):
    value: str
    """The attribute with the value."""
    more_attributes: tuple[str, ...]
    """All other attributes that an object may have."""
    whole: str | None = None
    """For a class that may pad weights, the one of `more_attributes` with the weight's unpadded shape."""


_FLOAT8 = ("_linear_mm_config", "_dtype")
_XTUNER = _Wrapper(
    "_tensor", ("_dtype", "_ori_shape", "_precomputed_scale", "_precomputed_w"), whole="_ori_shape"
)
_GROUPED = _Wrapper("_data", ("config",))
_WRAPPERS = {
    ("torchao", "WeightWithDynamicFloat8CastTensor"): _Wrapper("_tensor", (*_FLOAT8, "_precomputed_scale")),
    ("torchao", "WeightWithDelayedFloat8CastTensor"): _Wrapper(
        "_tensor", (*_FLOAT8, "_amax_buffer", "_amax_history_buffer", "_scale_buffer", "is_amax_initialized")
    ),
    ("torchao", "WeightWithStaticFloat8CastTensor"): _Wrapper("_tensor", (*_FLOAT8, "_static_scale")),
    ("torchao", "ScaledGroupedMMTensor"): _Wrapper("_data", ("scaling_type", "kernel_preference")),
    ("torchao", "Float8TrainingWeightWrapperTensor"): _GROUPED,
    ("torchao", "MXFP8TrainingWeightWrapperTensor"): _GROUPED,
    ("torchao", "Int8MixedPrecisionTrainingLinearWeight"): _GROUPED,
    ("torchao", "BitNetTrainingLinearWeight"): _Wrapper("_data", ("_precomputed_scale",)),
    ("xtuner", "WeightWithDynamicTilewiseFloat8CastTensor"): _XTUNER,
    ("xtuner", "WeightWithDynamicTensorWiseFloat8CastTensor"): _XTUNER,
    ("torch", "AsyncCollectiveTensor"): _Wrapper("elem", ("completed",)),  # what `full_tensor` may return
}
_IS_PARAMETER = "_is_param"  # torch 2.13, torch/nn/parameter.py: set on an object that became a parameter
_QUANTISERS = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "optimum": "quanto",
    "diffusers": "GGUF",
    "deepspeed": "DeepSpeed",
    "transformer_engine": "TransformerEngine",
}
_QUANTISED = "quantised by"
_IN_TRAINING = (".optim.", ".quantized_training.")  # a trainer quantises these tensors in each step
_QUANTISED_PARAMETERS = {
    "quant_state": "bitsandbytes.nn.Params4bit",
    "SCB": "bitsandbytes.nn.Int8Params",
    "quant_type": "diffusers.quantizers.gguf.utils.GGUFParameter",
    "quantizer": "deepspeed.linear.quantization.QuantizedParameter",
}
"""Classes of parameters, by the attribute with the scales: torch pickles a parameter without its class."""
_OF_BYTES = ("quant_type", "quantizer")
"""Attributes that other classes may have too: they are evidence only if the data are bytes."""
_MAKES = re.compile(r"_make_(?:(\w+)_)?in_reduce_ex")
"""Names of functions that TransformerEngine's pickles call, and those of classes that imitate it."""
_MADE = {
    "float8_tensor": "Float8Tensor",
    "float8_blockwise_tensor": "Float8BlockwiseQTensor",
    "mxfp8_tensor": "MXFP8Tensor",
    "nvfp4_tensor": "NVFP4Tensor",
    "hybrid_quantized_tensor": "HybridQuantizedTensor",
    "identity_tensor": "IdentityTensor",
}
_MAX_NAMED = 3
_TORCH_ALLOWS = ("__builtin__.", "builtins.", "_codecs.", "collections.", "torch.")
_TENSORS = "'Tensor', 'Parameter', 'Buffer', 'ndarray'"
_OF_NUMPY = re.compile(
    r"numpy\.(ndarray|dtype|_?core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer))"
)
_DEQUANTISED = "t.dequantize(), or what the class has for it"
_REPLACE = "replace such tensors by plain ones ({}), and save it again"


class UnreadableClass(SourceError):
    """A record is intact, but its tensor is of a class whose values shardkit cannot read from a file."""

    class_name = ""
    """With its module, as in the file."""
    why = ""
    """The class, and the tensors that an object consists of; escaped."""
    entries: Mapping[str, ZipEntry]
    """The record's storages; positions count from the start of the file."""
    tensors: frozenset[str] = frozenset()
    """Names of all refused tensors, if there are several."""
    files: tuple[SourceFile, ...] = ()
    """Files of `torch.save` with these tensors; empty for a DCP directory."""


def is_known_class(name: str) -> bool:
    """True if the value of a class's objects can be read; the name includes the module."""
    return _wrapper_of(name) is not None


def _wrapper_of(name: str) -> _Wrapper | None:
    package, _, rest = name.partition(".")
    return _WRAPPERS.get((package, rest.rpartition(".")[2]))


def unwrap_value(name: str, args: object, attributes: Mapping[str, object]) -> TensorRecord | str:
    """Return the value of an object whose class wraps a tensor, or the reason why it cannot be read.

    Args:
        name: the class, with its module.
        args: (class, dtype, shape, layout), as torch sees the object.
        attributes: of the object.
    """
    wrapper = _wrapper_of(name)
    if wrapper is None:
        return describe_object(
            name, [str(key) for key, value in attributes.items() if isinstance(value, TensorRecord)]
        )
    value = attributes.get(wrapper.value)
    if not isinstance(value, TensorRecord):
        return f"{name}, whose {wrapper.value} is no plain tensor"
    unknown_keys = [
        str(key) for key in attributes if key not in (wrapper.value, *wrapper.more_attributes, _IS_PARAMETER)
    ]
    if unknown_keys:
        return f"{name}, with attributes that are not known: {', '.join(unknown_keys)}"
    if not isinstance(args, tuple) or args[1:3] != (value.dtype, value.shape):
        return f"{name}, whose {wrapper.value} has another dtype or shape than the object"
    if wrapper.whole is None:
        return value
    whole = attributes.get(wrapper.whole)
    if not is_extent(whole):
        return f"{name}, whose {wrapper.whole} is no shape"
    return replace(value, unpadded=(name, whole))


def describe_object(name: str, tensors: Sequence[str] | int) -> str:
    """Return a text about the tensors in an object, which adds "quantised by" if its class is known to quantise.

    Args:
        name: the class, with its module.
        tensors: names of the plain tensors in it, or their number. With a single one it does not count as quantised.
    """
    number, parts = (
        (tensors, count(tensors, "plain tensor"))
        if isinstance(tensors, int)
        else (len(tensors), ", ".join(tensors))
    )
    is_quantised = number != 1 and not any(part in name for part in _IN_TRAINING)
    by = _QUANTISERS.get(name.partition(".")[0]) if is_quantised else None
    return f"{name}, which is made of {parts or 'no plain tensor'}" + (f": {_QUANTISED} {by}" if by else "")


def class_made_by(module: str, function: str) -> str | None:
    """Return the full name of the class whose objects a function makes from tensors; None for any other function."""
    match = _MAKES.fullmatch(function)
    return None if match is None else f"{module}.{_MADE.get(match[1] or '', function)}"


def quantised_parameter(data: object, attributes: Mapping[str, object]) -> tuple[str, str] | None:
    """Return (description, class) of a parameter whose data are quantised codes; None for any other parameter."""
    are_bytes = isinstance(data, TensorRecord) and data.dtype.name in ("uint8", "int8")
    for key, cls in _QUANTISED_PARAMETERS.items():
        if attributes.get(key) is not None and (are_bytes or key not in _OF_BYTES):
            return describe_object(cls, ["data", key]), cls
    return None


def padding_error(record: TensorRecord, shape: Shape) -> UnreadableClass | None:
    """Return the error for a part of a tensor that its class has padded; None if the tensor is not padded.

    Args:
        record: of the part.
        shape: of the whole tensor as stored.
    """
    if record.unpadded is None or record.unpadded[1] == shape:
        return None
    name, unpadded_shape = record.unpadded
    return unreadable_error(name, f"{name}, which is padded from {list(unpadded_shape)} to {list(shape)}")


def unreadable_error(
    name: str, why: str, *, where: str = "", entries: Mapping[str, ZipEntry] | None = None
) -> UnreadableClass:
    """Return the error for one record of an unreadable class.

    Args:
        name: the class, with its module.
        why: the class, and the tensors that an object consists of.
        where: the record, escaped.
        entries: its storages.
    """
    error = UnreadableClass(f"{where}: {escape(why)}")
    error.class_name, error.why, error.entries = name, escape(why), entries or {}
    return error


def refuse_classes(errors: Mapping[str, UnreadableClass], path: str) -> None:
    """Raise one error for all tensors of unreadable classes in a DCP directory, if there are any.

    Args:
        errors: by the tensor's stored name.
        path: of the directory.
    """
    why = {name: error.why for name, error in errors.items()}
    hint = f"{_original_model_hint(why)}load it with what saved it, {_REPLACE.format(_DEQUANTISED)}"
    is_quantised = any(_QUANTISED in reason for reason in why.values())
    names = {error.class_name for error in errors.values()}
    _refuse_tensors(why, hint if is_quantised else _how_to_unwrap(names, path))


def refuse_objects(reasons: Mapping[str, str], files: Iterable[SourceFile]) -> None:
    """Raise one error for all tensors of unreadable classes in files of `torch.save`, if there are any.

    Args:
        reasons: file and reason, by the tensor's name.
        files: all that were opened.
    """
    is_quantised = any(_QUANTISED in why for why in reasons.values())
    plain = (
        "t.dequantize()" if is_quantised else "torch.empty(t.shape, dtype=t.dtype).copy_(t), or t.to_dense()"
    )
    _refuse_tensors(
        {name: escape(why) for name, why in reasons.items()},
        f"{_original_model_hint(reasons)}load each file with torch where the class can be imported, {_REPLACE.format(plain)}",
        tuple(files),
    )


def foreign_objects_error(
    name: str, path: str, named: Collection[str], classes: Mapping[str, str], data: Collection[str] = ()
) -> UnsupportedFile:
    """Return the error for a file whose pickle needs classes or functions that are neither torch's nor plain data.

    Args:
        name: of the file in messages.
        path: of the file.
        named: full names of these classes and functions.
        classes: by key, the class of the object there, if known.
        data: full names of classes of plain data in the same pickle.
    """
    shown = few([*map(escape, sorted(named))], _MAX_NAMED)
    return UnsupportedFile(
        f"{escape(name)}: holds more than tensors: its pickle asks for {shown}, which is never run",
        problems=[
            f"{escape(key) or 'the whole file'}: an object of {escape(what)}" for key, what in classes.items()
        ],
        hint=f"ask the authors for safetensors, or {_how_to_save_plain(path, named, data)}",
    )


def _how_to_save_plain(path: str, named: Collection[str], data: Collection[str]) -> str:
    """Return lines of Python that load a file where its classes are installed, and save only its tensors.

    For a file that names functions there are no such lines, as running them could execute anything.
    """
    if not all(map(_is_class_name, named)):
        return "convert the file if you trust it"
    class_names = sorted({*named, *(name for name in data if not name.startswith(_TORCH_ALLOWS))})
    modules = ", ".join(sorted({"torch", *(name.partition(".")[0] for name in class_names)}))
    allowed = [f"({name}, {name!r})" for name in class_names]
    if any(name.startswith("numpy.") for name in class_names):
        allowed.append("*(each for each in vars(numpy.dtypes).values() if isinstance(each, type))")
    stem, suffix = os.path.splitext(path)
    return f"""where these classes can be imported, save its tensors alone, and put that file in its place:
  import {modules}
  torch.serialization.add_safe_globals([{", ".join(allowed)}])
  held = torch.load({escape(path)!r}, map_location="cpu")
  held = held.state_dict() if isinstance(held, torch.nn.Module) else held
  torch.save({{k: torch.as_tensor(t) for k, t in held.items() if type(t).__name__ in ({_TENSORS})}}, {escape(f"{stem}-plain{suffix}")!r})"""


def _is_class_name(name: str) -> bool:
    """True for a name that looks like a class outside the standard library, and for numpy's functions that make arrays."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or parts[0] in sys.stdlib_module_names:
        return False
    return _OF_NUMPY.fullmatch(name) is not None or parts[-1].lstrip("_")[:1].isupper()


def _original_model_hint(reasons: Mapping[str, str]) -> str:
    """Return the advice to use the original model if some tensor was quantised after training, else an empty string."""
    after = (
        _QUANTISED in why and not why.endswith(_QUANTISERS["transformer_engine"]) for why in reasons.values()
    )
    return "take the model that it was quantised from; or " if any(after) else ""


def _refuse_tensors(reasons: Mapping[str, str], hint: str, files: tuple[SourceFile, ...] = ()) -> None:
    if not reasons:
        return
    error = UnreadableClass(
        f"{count(len(reasons), 'tensor is an object', 'tensors are objects')} of a class whose values shardkit cannot "
        "take from a file",
        problems=[f"{escape(name)}: {why}" for name, why in reasons.items()],
        hint=hint,
    )
    error.tensors, error.files = frozenset(reasons), files
    raise error


def _how_to_unwrap(names: Collection[str], path: str) -> str:
    """Return lines of Python that load a checkpoint where its classes are installed, and save it as plain tensors."""
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        return "load it where its classes can be imported, into plain tensors, and save those"
    classes = sorted(names)
    modules = ", ".join(sorted({name.rpartition(".")[0] for name in names} | {"torch"}))
    return f"""where {modules} can be imported, load it into plain tensors, and save those:
  import torch.distributed.checkpoint as dcp, {modules}
  torch.serialization.add_safe_globals([{", ".join(classes)}])
  path, new = {escape(path)!r}, {escape(path.rstrip("/") + "-plain")!r}
  saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
  plain = {{name: torch.empty(m.size, dtype=m.properties.dtype) for name, m in saved if hasattr(m, "size")}}
  dcp.load(plain, checkpoint_id=path)
  dcp.save(plain, checkpoint_id=new)"""
