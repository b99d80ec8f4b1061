"""`--quantize base`: weights in the form in which the base has them.

The base decides which tensors are quantised, in which blocks, with which names and dtypes of scales. All other tensors
have the base's dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from shardkit.core.catalog import Catalog, Codec, carry
from shardkit.core.text import count, escape
from shardkit.errors import LayoutError, UsageError
from shardkit.formats.hub.base import Base
from shardkit.formats.hub.safetensors import OutputTensor
from shardkit.formats.quantised import QUANTIZATION_CONFIGS, find_scaled, method_of
from shardkit.keys.expressions import computed_name
from shardkit.operations.consolidate.options import ConsolidateOptions
from shardkit.transfer.codecs.bound import bind
from shardkit.transfer.codecs.dequantize import Scaled
from shardkit.transfer.codecs.quantize import Fp8Codes, Fp8Form, Fp8Scales, KeptScales, Quantiser


class Example(NamedTuple):
    """The base whose form the output takes."""

    stored: Base
    """With its weights as stored."""
    sections: Mapping[str, Any]
    """The part of its config about quantisation."""
    scaled: Mapping[str, Scaled]
    """Its quantised weights, by the name of the plain one."""
    further: tuple[str, ...]
    """Tensors that neither plain models have nor weights are computed from, such as `input_scale`."""

    def form(self, plain: Base) -> Base:
        """Return the stored base with the config of the plain one, which may follow the output's vocabulary."""
        config = {**(plain.config or {}), **self.sections}
        return replace(self.stored, config=config, own_files=plain.own_files)


def example_of(plain: Base | None) -> Example:
    """Return a base as an example; it is given as if it were plain.

    Raises:
        UsageError: there is none, or its weights are not quantised, or config.json does not say how.
    """
    if plain is None or plain.stored is None or plain.stored.tensors is None:
        raise UsageError(
            "--quantize base needs a base that is quantised in a way that shardkit can read",
            hint="name one with --base, such as Qwen/Qwen3-8B-FP8",
        )
    stored, config, tensors = plain.stored, plain.stored.config or {}, plain.stored.tensors
    sections = {key: config[key] for key in QUANTIZATION_CONFIGS if config.get(key)}
    if not sections:
        raise UsageError(
            f"--quantize base: config.json of {escape(stored.label)} has no {QUANTIZATION_CONFIGS[0]} at its top",
            hint="a model without it would be loaded as if its codes were weights; leave --quantize out",
        )
    scaled = find_scaled(tensors, config, stored.label).scaled
    weight_names = {name for each in scaled.values() for name in each.names.stored} | (
        plain.tensors or {}
    ).keys()
    return Example(stored, sections, scaled, tuple(name for name in tensors if name not in weight_names))


def plain_options(options: ConsolidateOptions, plain: Base | None, example: Example) -> ConsolidateOptions:
    """Return the options for plain weights: dtypes of the base, and no globs for tensors of quantised models alone."""
    names = (plain.tensors if plain else None) or {}
    globs = [
        glob
        for glob in options.fill_from_base
        if _matching(names, [glob]) or not _matching(example.further, [glob])
    ]
    return replace(options, dtype="base", fill_from_base=globs)


def _matching(names: Iterable[str], globs: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def quantise(
    plain_tensors: Sequence[OutputTensor],
    catalog: Catalog,
    example: Example,
    fill: Sequence[str],
    from_base: Collection[str],
) -> tuple[tuple[OutputTensor, ...], Catalog, str]:
    """Return the tensors to write, with codes and scales in place of the weights that the base has so; and a note.

    Args:
        plain_tensors: what would be written without `--quantize`, in the order of the output.
        catalog: of these tensors.
        example: the base.
        fill: the globs of `--fill-from-base`.
        from_base: tensors that are copied from the base; codes and scales stay as they are.

    Raises:
        LayoutError: the base has weights in a form that is not written, or further tensors that are not copied; or the
            checkpoint has tensors with the names of scales; lists all of a kind.
    """
    kept, codecs, output = KeptScales(), dict[str, Codec](), list[OutputTensor]()
    scaled, sources = example.scaled, {*catalog.tensors}
    copied = _copied_tensors(example, {tensor.fqn for tensor in plain_tensors}, fill)
    unchanged = scaled.keys() & {*from_base}
    forms = _forms([tensor for tensor in plain_tensors if tensor.fqn not in unchanged], catalog, example)
    for tensor in plain_tensors:
        if tensor.fqn in unchanged:
            copied += scaled[tensor.fqn].names.stored
        elif tensor.fqn not in forms:
            output.append(tensor)
        else:
            names = scaled[tensor.fqn].names
            quantiser = Quantiser(tensor.source, tensor.shape, forms[tensor.fqn], names.scales, kept)
            for name, codec in ((names.numbers, Fp8Codes(quantiser)), (names.scales, Fp8Scales(quantiser))):
                source = computed_name(name, sources)
                sources.add(source)
                codecs[source] = codec
                output.append(OutputTensor(name, source, codec.dtype, codec.shape))
    catalog = bind(catalog, {}, codecs=codecs)
    if copied:
        assert example.stored.catalog is not None
        supplied = {computed_name(name, catalog.tensors): name for name in copied}
        catalog = carry(catalog, [tensor.source for tensor in output], example.stored.catalog, supplied)
        entries = ((name, source, catalog.tensors[source]) for source, name in supplied.items())
        output += [OutputTensor(name, source, entry.dtype, entry.shape) for name, source, entry in entries]
    numbers = Counter(tensor.fqn for tensor in output)
    LayoutError.raise_for(
        [escape(name) for name, number in numbers.items() if number > 1],
        "the checkpoint has tensors with the names of the scales that --quantize writes",
        hint="leave them out with --exclude",
    )
    parts = [f"quantised as in {escape(example.stored.label)}: {count(len(forms), 'weight')}"]
    parts += [f"{count(len(copied), 'tensor')} of its quantised ones copied as they are"] if copied else []
    return tuple(output), catalog, "; ".join(parts)


def _forms(plain_tensors: Iterable[OutputTensor], catalog: Catalog, example: Example) -> dict[str, Fp8Form]:
    """Return the form of each weight that is quantised; arguments and errors as for `quantise`."""
    section, forms, problems = next(iter(example.sections.values())), dict[str, Fp8Form](), list[str]()
    described = section if isinstance(section, Mapping) else {}
    for name, source in ((tensor.fqn, tensor.source) for tensor in plain_tensors):
        scaled = example.scaled.get(name)
        if scaled is None:
            continue
        try:
            if not (dtype := catalog.tensors[source].dtype).is_convertible:
                raise ValueError(f"its values in the checkpoint are {dtype.name}")
            if scaled.method.form is None:
                raise ValueError(f"it is {scaled.method.name}")
            forms[name] = scaled.method.form(scaled, example.stored.tensors or {}, described)
        except ValueError as error:
            problems.append(f"{escape(name)}: {error}")
    LayoutError.raise_for(
        problems,
        f"--quantize base writes fp8 with scales of blocks or rows, and not what {escape(example.stored.label)} has "
        f"({escape(str(method_of(example.stored.config)))})",
        hint="leave --quantize out for plain weights, and quantise these with the tool that made the base",
    )
    return forms


def _copied_tensors(example: Example, written: Collection[str], fill: Sequence[str]) -> list[str]:
    """Return the base's further tensors that are copied: of modules that are written, and which the checkpoint lacks.

    Raises:
        LayoutError: no glob of `fill` matches some of them; lists all.
    """
    modules = {"", *(name[:end] for name in written for end, sign in enumerate(name) if sign == ".")}
    further = [name for name in example.further if name.rpartition(".")[0] in modules and name not in written]
    copied = _matching(further, fill)
    unknown = sorted({*further} - {*copied})
    globs = sorted({f"--fill-from-base '*.{name.rpartition('.')[2]}'" for name in unknown})
    LayoutError.raise_for(
        [escape(name) for name in unknown],
        f"{escape(example.stored.label)} has scales of activations or of the cache, which were measured with other weights",
        hint=f"copy them: {' '.join(globs)}",
    )
    return copied
