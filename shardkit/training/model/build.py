"""Build a model without memory for its weights: parameters on meta, buffers computed, embeddings with enough rows.

A model that is built on the meta device loses its buffers, and those in no checkpoint would later have random
content. A model that is built on the CPU needs the memory of all of its weights, and the time to initialise them. So
the model is built on the CPU, but each parameter is moved to meta as soon as a module gets it. Its memory has not been
touched by then, and code that initialises it later has no effect.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.core.dtypes import BY_NAME, CASTS, short_dtype
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, ShardkitError, UsageError
from shardkit.files import storage
from shardkit.files.home import home_of
from shardkit.formats.contract import NAME_A_REPO, missing_path, with_path_hint
from shardkit.formats.hub.assets import CONFIG, GENERATION_CONFIG, asset_patterns
from shardkit.formats.hub.directory import read_json
from shardkit.formats.hub.files import unread_format
from shardkit.formats.quantised import can_dequantize, refuse_quantised, why_quantised
from shardkit.formats.registry import recognise
from shardkit.keys.names import clean_name
from shardkit.layout.classes import (
    ClassDtypes,
    built_dtypes,
    class_dtypes,
    find_class,
    is_transformers,
    safe_creation,
    transformers_model,
)
from shardkit.layout.layout import CannotBuildError
from shardkit.operations.resolve import adapter_file, find_checkpoint
from shardkit.training.model.buffers import InitBuffers, compute_buffers
from shardkit.training.model.hidden import has_hidden
from shardkit.training.ranks.agree import log_once
from shardkit.training.ranks.local import buffer_places, refuse_lazy, tensor_places

MULTIPLE = 8  # rows of embeddings: fast on tensor cores, and 2, 4 or 8 ranks get shards of equal size


def align_vocab(model: nn.Module, tokenizer: Sized | int, *, multiple: int = MULTIPLE) -> dict[str, int]:
    """Add rows to the embeddings of a model on meta until a tokenizer fits. Rows are never removed.

    This changes input and output embeddings, tied or not, a bias of the output, and the config. transformers'
    own `resize_token_embeddings` would initialise and copy whole weights.

    Args:
        model: a transformers model, with or without PEFT, with all parameters on meta.
        tokenizer: the tokenizer, or its number of tokens.
        multiple: the number of rows is rounded up to a multiple of this.

    Returns:
        FQN (the first one, if tied) -> previous number of rows, for every parameter that got more rows.

    Raises:
        UsageError: `tokenizer` is no valid number of tokens, or `model` is not a transformers model.
        LayoutError: the model's class resizes embeddings in its own way.
    """
    tokens = tokenizer if isinstance(tokenizer, int) else len(tokenizer)
    if tokens < 1 or multiple < 1 or isinstance(tokenizer, bool):
        raise UsageError(
            f"{tokens} tokens in multiples of {multiple}: both are at least 1",
            hint="give a tokenizer, or the number of its tokens",
        )
    inner = _embedding_model(model)
    rows = -(-tokens // multiple) * multiple
    embedding = inner.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        raise LayoutError(f"the input embedding is a {type(embedding).__name__}, which has no rows to add to")
    old = weight.shape[0]
    if tokens <= old:
        return {}
    head = inner.get_output_embeddings()
    outputs = head.parameters(recurse=False) if isinstance(head, nn.Module) else ()
    longer = [weight, *(param for param in outputs if param.shape[:1] == (old,))]
    _refuse_own_resizing(inner)
    _refuse_other_rows(inner, old, longer)
    grown = _lengthen(model, longer, rows)
    _set_vocab_size(inner, old, rows)
    return grown


def _embedding_model(model: nn.Module) -> Any:
    inner = transformers_model(model)
    if inner is None:
        raise UsageError(
            f"align_vocab needs a model of transformers, not a {type(model).__name__}: it asks the model for its "
            "embeddings",
            hint="build the model with as many rows as the tokenizer needs",
        )
    return inner


def _refuse_own_resizing(inner: Any) -> None:
    from transformers import PreTrainedModel

    methods = ("resize_token_embeddings", "_resize_token_embeddings", "_get_resized_embeddings")
    overridden = [
        name for name in methods if getattr(type(inner), name) is not getattr(PreTrainedModel, name)
    ]
    if overridden:
        raise LayoutError(
            f"{type(inner).__name__} resizes its embeddings in a way of its own ({overridden[0]})",
            hint="resize it with transformers and save it, then give that as the source",
        )


def _refuse_other_rows(inner: nn.Module, old: int, longer: list[nn.Parameter]) -> None:
    """Raise an error if other tensors of the model seem to have an element for each token, as they would stay short."""
    longer_ids = {id(param) for param in longer}
    per_token_names = [
        clean_name(name)
        for name, param in inner.named_parameters()
        if id(param) not in longer_ids and param.ndim == 1 and param.shape[0] == old
    ]
    # This is no coincidence: if a layer's width were equal to the vocabulary's size, many tensors would have that size.
    per_token_names += [
        clean_name(name) for name, buffer in inner.named_buffers() if buffer.shape[-1:] == (old,)
    ]
    LayoutError.raise_for(
        [escape(name) for name in per_token_names],
        f"{count(len(per_token_names), 'tensor')} beside the embeddings seem to have an element for each token",
        hint="resize the model with transformers and save it, then give that as the source",
    )


def _lengthen(model: nn.Module, longer: list[nn.Parameter], rows: int) -> dict[str, int]:
    new: dict[int, nn.Parameter] = {}
    for param in longer:
        if id(param) not in new:
            memoryless = torch.empty((rows, *param.shape[1:]), dtype=param.dtype, device="meta")
            new[id(param)] = nn.Parameter(memoryless, requires_grad=param.requires_grad)
    grown: dict[int, tuple[str, int]] = {}
    for place in tensor_places(model, once=True):
        if id(place.tensor) in new:
            old = place.tensor.shape[0]
            setattr(place.module, place.name, new[id(place.tensor)])
            grown.setdefault(id(place.tensor), (place.fqn, old))
            for attribute in ("num_embeddings", "out_features"):
                if getattr(place.module, attribute, None) == old:
                    setattr(place.module, attribute, rows)
    return dict(grown.values())


def _set_vocab_size(inner: Any, old: int, rows: int) -> None:
    """Set the number of rows in the config, and in the attributes where transformers models have a copy of it."""
    inner.config.get_text_config().vocab_size = rows
    for module in inner.modules():
        if getattr(module, "vocab_size", None) == old and is_transformers(module):
            module.vocab_size = rows


BuildModel = Callable[[], nn.Module] | str | os.PathLike[str] | nn.Module
"""The argument of `build_model`."""

# Errors of torch for operations on meta that need values, e.g. "Tensor.item() cannot be called on meta tensors".
_NO_VALUE = re.compile(r"\bmeta (tensor|device|backend)|Tensor\.__format__|Device 'meta'", re.IGNORECASE)
_BUILD_WITH_MEMORY = (
    "build it with memory: model = shardkit.wrap(build(), mesh), and then shardkit.load_into(model, source), which fills it "
    "in place; what its code makes of weights that are not in the state dict has to be made again after that"
)
_BUILD_IT = "give a function that builds the model"


def build_model(
    what: BuildModel,
    *,
    dtype: torch.dtype | str | None = None,
    init_buffers: InitBuffers | None = None,
    trust_remote_code: bool = False,
    dequantize: bool = False,
    seed: int = 0,
    moved: list[nn.Parameter] | None = None,
    home: str | None = None,
) -> nn.Module:
    """Build a model whose parameters are on meta and whose buffers are computed, on the CPU.

    Args:
        what: a function that returns the model, in any way; a directory with a config.json or a repo id, whose
            model transformers builds; or a model on meta, whose buffers are computed anew.
        dtype: dtype of floating parameters, "bf16", "fp16", "fp32" or a torch dtype; None keeps the model's own.
            Parameters that the model's class makes or lists as fp32 are fp32 under half precision, as with
            `from_pretrained`. Buffers keep the dtype that the model gave them.
        init_buffers: computes the buffers of a model on meta; None uses transformers' own initialisation.
        trust_remote_code: the model's own code, in the directory or repo, may run.
        dequantize: accept a config of quantised weights; the model has plain ones.
        seed: seed of random buffers. Building does not change the state of the random generator.
        moved: list to which all parameters are added that modules get while the model is built.
        home: result of `find_config`, or None.

    Returns:
        The model. Persistent buffers that nothing computes are left on meta, because the source may have them.

    Raises:
        UsageError: `what` is none of these, the dtype is not valid, or the model is wrapped or
            has memory already.
        LayoutError: the model cannot be built, nothing computes some buffers, or parameters have no shape.
    """
    float_dtype, moved = parse_dtype(dtype), [] if moved is None else moved
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if isinstance(what, nn.Module):
            model = what
        elif isinstance(what, (str, os.PathLike)):
            directory = home or find_config(os.fspath(what), None)
            model = _from_config(
                directory,
                float_dtype,
                init_buffers,
                moved,
                trust_remote_code=trust_remote_code,
                dequantize=dequantize,
            )
            float_dtype = float_dtype or _own_dtype(model)
            files = (read_json(directory, name) for name in (GENERATION_CONFIG, CONFIG))
            set_generation_config(model, directory, *files)
        elif callable(what):
            model = _build_on_meta(what, moved)
        else:
            raise UsageError(
                f"build_model is a {type(what).__name__}",
                hint="give a function that returns the model, a directory or repo id, or a model on meta",
            )
    _refuse_wrapped(model)
    _check_parameters(model, is_given=model is what)
    if model is what:
        compute_buffers(model, init_buffers)
    else:
        compute_buffers(model, init_buffers, hint=_BUILD_WITH_MEMORY)
    _buffers_to_cpu(model)
    if float_dtype is not None:
        # A model that transformers built from its config already has that dtype.
        is_built = isinstance(what, (str, os.PathLike))
        _set_dtypes(model, built_dtypes(model, float_dtype) if is_built else class_dtypes(model, float_dtype))
    return model


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating dtype with a name; None for None.

    Raises:
        UsageError: this is not the name of a floating dtype.
    """
    if isinstance(dtype, str):
        dtype_entry = CASTS.get(short_dtype(dtype)) or BY_NAME.get(dtype)
        dtype = (
            getattr(torch, dtype_entry.name)
            if dtype_entry is not None and dtype_entry.is_convertible
            else dtype
        )
    if dtype is None or (isinstance(dtype, torch.dtype) and _is_convertible(dtype)):
        return dtype
    raise UsageError(
        f"dtype {escape(str(dtype))} cannot hold weights",
        hint="take bf16, fp16, fp32, or None for the model's own",
    )


def _is_convertible(dtype: torch.dtype) -> bool:
    """True for floating dtypes whose values need no separate scale."""
    return dtype.is_floating_point and dtype.itemsize >= 2


@contextlib.contextmanager
def parameters_on_meta(moved: list[nn.Parameter]) -> Iterator[None]:
    """Move every parameter that a module gets in this context to meta. It stays the same object where possible.

    Args:
        moved: list to which these parameters are added, and their deep copies, which are not registered in modules by
            the patched method.
    """
    register, copied = nn.Module.register_parameter, nn.Parameter.__deepcopy__
    replaced = WeakIdKeyDictionary()

    def note(param: nn.Parameter) -> nn.Parameter:
        moved.append(param)
        return param

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param if param is None else note(_to_meta(param, replaced)))

    def deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        return note(copied(self, memo))  # type: ignore[no-untyped-call]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = copied  # type: ignore[method-assign]


def _to_meta(param: nn.Parameter, replaced: WeakIdKeyDictionary) -> nn.Parameter:
    """Move a parameter to meta, in place, so that other references to it (a tie, a list) are to the one on meta."""
    if param.is_meta or isinstance(param, nn.parameter.UninitializedParameter):
        return param
    if param in replaced:
        meta_parameter = replaced[param]
        assert isinstance(meta_parameter, nn.Parameter)
        return meta_parameter
    memoryless = torch.empty_like(param.detach(), device="meta")
    twin = nn.Parameter(memoryless, requires_grad=param.requires_grad)
    twin.__class__ = type(param)
    twin.__dict__.update(vars(param))
    try:
        torch.utils.swap_tensors(param, twin)  # type: ignore[no-untyped-call]
    except RuntimeError:  # autograd or a weak reference refers to the old object
        replaced[param] = twin
        return twin
    return param


def _build_on_meta(build: Callable[[], nn.Module], moved: list[nn.Parameter]) -> nn.Module:
    try:
        with parameters_on_meta(moved):
            model = build()
    except (RuntimeError, TypeError) as error:
        if _NO_VALUE.search(str(error)) is None:
            raise
        raise LayoutError(
            "the code that builds the model reads the value of a weight, and weights have none while prepare builds it: "
            + str(error).splitlines()[0].partition(". ")[0],
            hint=_BUILD_WITH_MEMORY,
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"build_model returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def find_config(what: str, revision: str | None) -> str:
    """Return the directory with a model's config and code.

    Args:
        what: the directory, a file in it, or a repo id.
        revision: the revision of the repo, or None.

    Raises:
        LayoutError: the path exists but has no config; the error states what is there.
        SourceError, ResourceError: the path does not exist, or the repo cannot be downloaded.
    """
    from shardkit.formats.hub.repo import fetch_files, named_repo

    if storage.lexists(what):
        home = home_of(what if storage.isdir(what) else os.path.dirname(what) or os.curdir)
        if not storage.lexists(os.path.join(home, CONFIG)):
            raise _no_config(what)
        return storage.local_config(home)
    repo = named_repo(what, revision)
    if repo is None:
        raise missing_path(what, hint=f"check the path, or {NAME_A_REPO}")
    try:
        directory = fetch_files(repo.id, asset_patterns(), revision=repo.revision)
    except ShardkitError as error:
        raise with_path_hint(what, error) from None
    if not storage.lexists(os.path.join(directory, CONFIG)):
        raise _no_config(what, "a repo")
    return directory


def _no_config(path: str, kind: str = "") -> LayoutError:
    """Return the error for a path without a config: it states what is there, and what to pass instead."""
    kind, source = (kind, None) if kind else _describe_path(path)
    give = "give the model's directory or repo id, or a function that builds it"
    return LayoutError(
        f"{escape(path)} is {kind}, and has no config.json to build a model from",
        hint=give if source is None else f"{give}; this may be its source: prepare(MODEL, {source})",
    )


def _describe_path(path: str) -> tuple[str, str | None]:
    """Return (description of a path, Python expression to pass it to `prepare` as a source, or None)."""
    if adapter_file(path) is not None:
        return "a PEFT adapter", None
    is_directory = storage.isdir(path)
    if not is_directory and (form := unread_format([os.path.basename(path)])) is not None:
        return form, None
    try:
        checkpoint_path = find_checkpoint(path).path
    except UsageError:
        return "a directory of several checkpoints", None
    except ShardkitError:
        return "no checkpoint", None
    if checkpoint_path != path:
        return "a run's directory", f'shardkit.resolve_checkpoint("{escape(path)}").path'
    row = recognise(path)
    if row is None:
        return "no checkpoint", None
    what = "a checkpoint" if row.is_sharded else "a directory with weights"
    return what if is_directory else "a file with weights", f'"{escape(path)}"'


def _from_config(
    directory: str,
    dtype: torch.dtype | None,
    init_buffers: InitBuffers | None,
    moved: list[nn.Parameter],
    *,
    trust_remote_code: bool,
    dequantize: bool,
) -> nn.Module:
    """Build the model that `from_pretrained` would build, on meta, in the dtype in which it would compute buffers.

    transformers models can compute their buffers anew, so no parameter is ever allocated. A single one, with all
    experts of a layer, may be larger than the machine's memory.
    """
    try:
        import transformers  # noqa: F401 - checks that it is installed
    except ImportError as error:
        raise UsageError(
            "building a model from its config needs transformers",
            hint="`pip install 'shardkit[trace]'`, or give a function that builds the model",
        ) from error
    try:
        model_class, config = find_class(directory, trust_remote_code=trust_remote_code)
    except CannotBuildError as error:  # only `preshard` treats this class in a special way
        raise LayoutError(error.message, problems=error.problems, hint=error.hint or _BUILD_IT) from error
    _without_quantisation(config, directory, dequantize=dequantize)
    options = {} if dtype is None else {"dtype": dtype}
    try:
        with contextlib.suppress(LayoutError, RuntimeError, TypeError, ValueError):
            with torch.device("meta"), safe_creation():
                model = model_class._from_config(copy.deepcopy(config), **options)
            assert isinstance(model, nn.Module)
            compute_buffers(model, init_buffers)
            if not any(buffer.is_meta for buffer in model.buffers()) and not has_hidden(model):
                return model
        # The model's code needs values that meta does not have: it reads values while it builds, or only __init__
        # computes a buffer or a tensor in another object.
        return _build_on_meta(lambda: model_class._from_config(config, **options), moved)
    except ImportError as error:
        raise LayoutError(
            f"{model_class.__name__} needs a package that is not here: {escape(str(error))}",
            hint="install it",
        ) from error


def set_generation_config(
    model: nn.Module, directory: str, generation: dict[str, Any] | None, config: dict[str, Any] | None = None
) -> None:
    """Give a transformers model the generation config that `from_pretrained` would give it.

    A generation config that the user's code has set stays. One that cannot be used causes a warning, as training needs
    none.

    Args:
        model: the new model, with or without PEFT.
        directory: the directory of the files, for messages.
        generation: the content of generation_config.json, or None.
        config: the content of config.json, used if there is no generation_config.json. In transformers 5 the model's
            own config lacks the settings for generation that the file has.

    Source: transformers 5.24, GenerationMixin.adjust_generation_fn and GenerationConfig.from_pretrained.
    """
    inner = transformers_model(model)
    if inner is None or not is_derived(getattr(inner, "generation_config", None)):
        return
    from transformers import GenerationConfig

    try:
        if generation is not None:
            inner.generation_config = GenerationConfig.from_dict(generation)
            inner.generation_config._original_object_hash = hash(inner.generation_config)
        elif config is not None and hasattr(inner, "adjust_generation_fn"):
            inner.generation_config = GenerationConfig.from_model_config(config)
    except (AttributeError, TypeError, ValueError) as error:
        log_once(
            f"{GENERATION_CONFIG} of {escape(directory)} is not used: {escape(str(error))}; generate follows {CONFIG}",
            logging.WARNING,
        )


def is_derived(generation: Any) -> bool:
    """True for a generation config that transformers derived from a model's config, and that has not changed since."""
    original_hash = getattr(generation, "_original_object_hash", None)
    return bool(getattr(generation, "_from_model_config", False)) and original_hash in (
        None,
        hash(generation),
    )


def _without_quantisation(config: Any, directory: str, *, dequantize: bool) -> None:
    """Remove the quantisation from a config, since the model has plain weights, or raise an error."""
    for part in _parts(config):
        described = getattr(part, "quantization_config", None)
        if not described:
            continue
        raw = {"quantization_config": described if isinstance(described, dict) else described.to_dict()}
        if not dequantize or not can_dequantize(raw):
            raise refuse_quantised(str(why_quantised({}, raw)), directory, is_tried=dequantize)
        del part.quantization_config


def _parts(config: Any) -> Iterator[Any]:
    """Yield a transformers config and those of its parts, at any depth."""
    yield config
    # The config of a model with its own code need not list its parts.
    for name in {*getattr(config, "sub_configs", ()), "text_config"}:
        part = getattr(config, name, None)
        if part is not None and part is not config:
            yield from _parts(part)


def _own_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype in which a transformers model was built, apart from its fp32 modules, or None."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _refuse_wrapped(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, DataParallel)
    wrapped = [
        f"{escape(path) or 'the model'}: {type(module).__name__}"
        for path, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    cut = [f"{escape(name)}: a DTensor" for name, p in model.named_parameters() if isinstance(p, DTensor)]
    UsageError.raise_for(
        wrapped or cut,
        "the model is wrapped already, and prepare needs the plain one",
        hint="prepare first and wrap ctx.model; a model that is wrapped with fully_shard is filled by load_into",
    )


def _check_parameters(model: nn.Module, *, is_given: bool) -> None:
    """Raise an error for lazy parameters, or if the user's model has memory; move overlooked parameters to meta."""
    refuse_lazy(model)
    real = {name: param for name, param in model.named_parameters() if not param.is_meta}
    if is_given and real:
        raise UsageError(
            f"the model has memory for {len(real)} parameters already: every rank would hold all of it",
            problems=[
                f"{escape(name)}: {list(param.shape)} on {param.device}" for name, param in real.items()
            ],
            hint="give the function that builds it instead, or build it under torch.device('meta')",
        )
    if real:  # set in a module without `register_parameter`
        replaced = WeakIdKeyDictionary()
        for place in tensor_places(model, once=True):
            if isinstance(place.tensor, nn.Parameter):
                setattr(place.module, place.name, _to_meta(place.tensor, replaced))


def _buffers_to_cpu(model: nn.Module) -> None:
    for place in buffer_places(model, once=True):
        if not place.tensor.is_meta and place.tensor.device.type != "cpu":
            setattr(place.module, place.name, place.tensor.cpu())


def _set_dtypes(model: nn.Module, dtypes: ClassDtypes) -> None:
    """Convert floating parameters to their dtypes, and buffers that the model's class keeps in fp32."""
    for name, param in model.named_parameters():
        if _is_convertible(param.dtype):
            param.data = param.data.to(dtypes.of(clean_name(name)))
    for place in buffer_places(model, once=True):
        is_kept = dtypes.kept is not None and dtypes.kept.search(place.fqn)
        if is_kept and _is_convertible(place.tensor.dtype):
            setattr(place.module, place.name, place.tensor.to(torch.float32))
