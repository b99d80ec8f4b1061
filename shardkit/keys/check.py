"""What seems wrong with a model, told from names, shapes, its config and its base's names. No model is built.

Names may be another trainer's own, transformers' names in memory, or factors of weights. They may differ from
the base's. Weights may be missing: a list of blocks has no holes, it is as long as the config says, a block
inside it has what all the others have, and a vocabulary has an embedding. These rules hold for every known
model. Finding nothing proves nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape as escape_glob
from typing import Any, Literal, NamedTuple

from shardkit._folding import fold
from shardkit.core.regions import Shape
from shardkit.core.text import count, escape, listed
from shardkit.errors import SourceError
from shardkit.keys.names import Segments, is_number, join, split
from shardkit.keys.renaming import is_computed

# One telling name of each; the first that matches decides.
_OWN_NAMES = {
    "torchtitan's": r"(?:^|\.)layers\.\d+\.attention\.(?:qkv_linear\.)?(?:wqkv|wq|wk|wv)\.weight$",
    "torchtune's": r"(?:^|\.)layers\.\d+\.(?:attn\.output_proj\.weight|sa_norm\.scale)$",
    "OLMo-core's": r"(?:^|\.)blocks\.\d+\.attention\.(?:w_q|w_out)\.weight$",
    "fms's": r"(?:^|\.)(?:ff_sub_layer\.\w+\.weight|attn\.in_proj\.qkv_fused\.weight)$",
    "Megatron's": r"(?:^|\.)(?:linear_qkv|linear_fc1|embedding\.word_embeddings)\.(?:weight|layer_norm_weight)$",
}
_LIKE_TORCHTITANS = ("mistral_large4", "mistral_large4_text")
"""Types of models whose names on the Hub are of the same kind."""
_FUSED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)$")
_IN_MEMORY = {
    "experts fused into one tensor": _FUSED_EXPERTS.pattern,
    "the language model of a vision model below `model.`": r"^model\.(?:language_model|visual|vision_tower)\.",
}
# mini_trainer 0.9 (osft_utils.py) and PEFT 0.21 (tuners/osf): a matrix is kept as factors of its SVD.
_FACTORS = re.compile(
    r"(?:^|\.)(?:osft_[USV]_high|osft_params\.[USV]_low|osf_svd_params\.(?:[^.]+\.)?[USV]_low|_?osf_[USV]_high)$"
)
_MEGATRON_ONLY = re.compile(r"^(?:decoder|embedding)\.")


def own_names_warnings(
    names: Iterable[str], base: Collection[str] | None, model_type: object = None
) -> tuple[str, ...]:
    """Return a warning where names are another trainer's own and `from_pretrained` finds none of them.

    Args:
        names: the names to write.
        base: the base's names; None if they are not known. The base's own names are right.
        model_type: of the model's config, where there is one.
    """
    if model_type in _LIKE_TORCHTITANS:
        return ()
    for what, matched in _matches(_OWN_NAMES, names, base):
        if what != "Megatron's" or any(map(_MEGATRON_ONLY.search, matched)):
            return (f"the names are {what} own, not the Hub's ({_example(matched)})",)
    return ()


def in_memory_warnings(names: Iterable[str], base: Collection[str] | None) -> tuple[str, ...]:
    """Return a warning for each kind of name that transformers uses in memory only; arguments as above."""
    return tuple(
        f"{len(matched)} names are transformers' own in memory and may not be the Hub's: {what} "
        f"({_example(matched)}); they are written as they are"
        for what, matched in _matches(_IN_MEMORY, names, base)
    )


def _matches(
    patterns: Mapping[str, str], names: Iterable[str], base: Collection[str] | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield each kind of names of which there are any, with those names; the base's names are left out."""
    left = [name for name in names if base is None or name not in base]
    for what, pattern in patterns.items():
        matched = [name for name in left if re.search(pattern, name)]
        if matched:
            yield what, matched


def holds_fused_experts(names: Iterable[str]) -> bool:
    """True if one tensor holds experts that the Hub stores one by one."""
    return any(map(_FUSED_EXPERTS.search, names))


def other_numbers_of_experts(ours: Mapping[str, Shape], base: Mapping[str, Shape]) -> dict[str, int]:
    """Return how many experts a base has one by one, by the names of tensors that hold another number of them as one."""
    numbers = dict[str, set[str]]()
    for name in base:
        if match := _EXPERT.match(name):
            numbers.setdefault(match[1], set()).add(match[2])
    return {
        name: len(numbers[match[1]])
        for name, shape in ours.items()
        if name not in base
        and (match := _STACKED.match(name))
        and match[1] in numbers
        and shape[:1] != (len(numbers[match[1]]),)
    }


def refuse_factors(names: Iterable[str], wanted: Iterable[str] = (), hint: str | None = None) -> None:
    """Refuse weights that are stored as the factors of orthogonal subspace fine-tuning.

    Args:
        names: the names that a model is made from.
        wanted: names of that model, where they are known. A model that has factors itself takes them as they
            are.
        hint: what to do instead, where more is known than that consolidate folds whole sets.

    Raises:
        SourceError: there are such factors.
    """
    factors = [name for name in names if _FACTORS.search(name)]
    if not factors or any(map(_FACTORS.search, wanted)):
        return
    modules = {_FACTORS.sub("", name): name for name in reversed(factors)}
    has_high = any("_high" in name for name in factors)
    lost = "" if has_high else "; only their trained part is here, so the weights cannot be made from it"
    raise SourceError(
        f"{count(len(modules), 'matrix is', 'matrices are')} stored as factors of orthogonal subspace fine-tuning "
        f"(OSFT), which are not weights{lost}",
        problems=[f"{escape(module)}: {escape(name)}" for module, name in reversed(modules.items())],
        hint=hint or "consolidate folds whole sets of factors: name the checkpoint that has all of them",
    )


def _example(names: list[str]) -> str:
    return f"such as {escape(names[0])}"


# The outermost list of blocks in a name. Other lists (Sequentials, stages, experts) may rightly have holes.
_BLOCK = re.compile(r"^((?:(?!\d+\.)[^.]+\.)*?(?:layers|layer|h|blocks|block))\.(\d+)\.(.+)$", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)", re.ASCII)
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FORETELLING = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Layers that follow those that the config counts."""
_LOOPED = re.compile(r"loops|cycles|ut_steps|recurrent_(?:steps|depth)|repeats")
"""Keys of models that go through a layer several times, and may count it as often."""
_MOST_OF_A_SEQUENTIAL = 2  # weight and bias; between them are activations, which have none
_WITHOUT_TOKENS = (
    *("ForImageClassification", "ForImageTextRetrieval", "ForAudioClassification"),
    *("Blip2QFormerModel", "Blip2TextModelWithProjection", "Blip2VisionModelWithProjection"),
    *("TranscribeWordTimestampModel", "Molmo2Model", "Molmo2TextModel"),
)
"""Ends of classes of CLIP, BLIP-2, Whisper and Nemotron without an embedding of the tokens that their config counts.

Of Molmo 2, `save_pretrained` writes it as two halves.
"""
_MIN_BLOCKS = 4  # fewer blocks have no two inner ones to compare
_OF_SCALES = re.compile(r"scales?(?:_inv|_2)?$|zeros?$|zero_point$|(?:absmax|quant_map|g_idx|SCB)$")
_TOKENS = ("model.embed_tokens.weight", "lm_head.weight")
_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.", re.ASCII)
_STACKED = re.compile(r"^((.+)\.experts)\.(?:gate_up_proj|up_proj|down_proj)$")
_ROUTERS = ("gate", "router", "gate.wg", "router.gate", "router.layer")
# Types of models whose experts are all counted by one key, and all routed to. LongCat routes to experts without weights.
_WITH_EXPERTS = frozenset(
    "afmoe axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe flex_olmo glm4_moe glm4_moe_lite gpt_oss"
    " hunyuan_v1_moe jamba kimi_linear lfm2_moe llama4 llama4_text minimax minimax_m2 mixtral nemotron_h olmoe phimoe"
    " qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe qwen3_vl_moe_text".split()
)
_PLAIN_DECODERS = frozenset(
    "cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm4 granite hunyuan_v1_dense llama ministral mistral"
    " nemotron olmo olmo2 olmo3 phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2".split()
)
"""Types of models whose embedding has a row for each token that the config counts."""
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Gap(NamedTuple):
    """What a model seems to lack."""

    text: str
    """What config.json calls for; of another shape: the tensors, their shape, and what the config counts."""
    kind: Literal["layers", "weights", "shape", "grown"]
    """Whole layers that the config counts, other weights, tensors of another shape, or a vocabulary with more rows."""

    def line(self, where: str) -> str:
        """Return it as a warning; `where` is what lacks it, such as "the output"."""
        if self.kind in ("shape", "grown"):
            return f"from_pretrained would refuse {where} for the shape of {self.text}"
        return f"from_pretrained would initialise at random what config.json calls for and {where} lacks: {self.text}"


def find_gaps(shapes: Mapping[str, Shape], config: Mapping[str, Any] | None) -> list[Gap]:
    """Return each kind of weight that seems to be missing for `from_pretrained`.

    Args:
        shapes: by name in the output.
        config: the config of a transformers model; nothing is said where there is none, or one of another library.
    """
    if not config or "model_type" not in config:
        return []
    lists = dict[str, dict[int, set[str]]]()
    for name in shapes:
        if match := _BLOCK.match(name):
            path, index, rest = match.groups()
            lists.setdefault(path, {}).setdefault(int(index), set()).add(rest)
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    counted = set(_counted(config))
    # BEiT has a vocabulary of images.
    gaps, is_text = list[Gap](), _is_number(text.get("vocab_size")) and "patch_size" not in text
    is_text = is_text and not any(
        str(config.get("architectures")).endswith(f"{ending}']") for ending in _WITHOUT_TOKENS
    )
    if is_text:
        gaps += _embedding(shapes, text["vocab_size"])
        gaps += _length(lists, shapes, text, counted)
        gaps += _rows(shapes, config)
    for path, blocks in lists.items():
        if max(blocks) + 1 in counted:  # Sequentials rightly have holes: those of EnCodec are named layers
            gaps += _holes(path, blocks)
    gaps += _experts(shapes, text)
    return gaps


def _counted(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of layers in a config and in the configs inside it."""
    more = next((config[key] for key in _FORETELLING if _is_number(config.get(key))), 0)
    for key, value in config.items():
        if isinstance(value, Mapping) and key.endswith(("_config", "encoder", "decoder")):
            yield from _counted(value)
        elif _is_number(value) and (key in _COUNTS or key.endswith(("coder_layers", "depth"))):
            yield from (value, value + more) if key in _COUNTS else (value,)


def _embedding(shapes: Mapping[str, Shape], tokens: int) -> Iterator[Gap]:
    if not any(len(shape) > 1 and max(shape) >= tokens for shape in shapes.values()):
        yield Gap(f"an embedding of the {count(tokens, 'token')} that the config counts", "weights")


def _rows(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Iterator[Gap]:
    """Compare the rows of embeddings with the vocabulary, in decoders of text whose class transformers has.

    Models of several parts may have more rows than the config counts, as those of mllama do.
    """
    is_plain = str(config.get("model_type")) in _WITH_EXPERTS | _PLAIN_DECODERS and "auto_map" not in config
    tokens: Any = config.get("vocab_size")
    if not is_plain or not _is_number(tokens) or _TOKENS[0] not in shapes:
        return
    other = {name: shapes[name] for name in _TOKENS if name in shapes and shapes[name][:1] != (tokens,)}
    if other:
        is_grown = min(other.values())[0] > tokens
        yield _misshapen(other, count(tokens, "token"))._replace(kind="grown" if is_grown else "shape")
    classes = config.get("architectures")
    has_head = isinstance(classes, list) and str(classes[:1]).endswith("ForCausalLM']")
    if has_head and config.get("tie_word_embeddings") is False and _TOKENS[1] not in shapes:
        yield Gap(f"{_TOKENS[1]}, which is not tied", "weights")


def _length(
    lists: Mapping[str, Mapping[int, object]],
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    counted: Collection[int],
) -> Iterator[Gap]:
    wanted = next((config[key] for key in _COUNTS if _is_number(config.get(key))), 0)
    if any(map(_LOOPED.search, config)):
        return
    if wanted and not any(map(_NUMBER.search, shapes)):
        yield Gap(f"all {count(wanted, 'layer')}", "layers")
    elif lists:
        lengths = {path: max(blocks) + 1 for path, blocks in lists.items()}
        # Another tower may have more layers than the text's: then its own is the one that nothing counts.
        unknown = [path for path, length in lengths.items() if length not in counted]
        if max(lengths.values()) >= wanted and (wanted in lengths.values() or not unknown):
            return
        path = max(unknown or lengths, key=lambda path: lengths[path])
        if lengths[path] < wanted:
            yield Gap(
                f"{escape(path)}.{lengths[path]} up to {wanted - 1}: the config counts {count(wanted, 'layer')}",
                "layers",
            )


def _holes(path: str, blocks: Mapping[int, set[str]]) -> Iterator[Gap]:
    last = max(blocks)
    lost = [f"{path}.{index}" for index in range(min(last, 1 << 16)) if index not in blocks]
    if lost:
        if max(map(len, blocks.values())) > _MOST_OF_A_SEQUENTIAL:
            yield Gap(f"whole layers: {listed(lost)}", "layers")
        return
    if len(blocks) < _MIN_BLOCKS:
        return
    # A module that was left out of a quantisation has no scales.
    held = Counter(name for block in blocks.values() for name in block if not _OF_SCALES.search(name))
    # The first and the last block may lack what the others have (a norm, a downsampling).
    for index in range(1, last):
        own = [name for name in blocks[index] if held[name] == 1]
        gone = [
            name for name, number in held.items() if number == len(blocks) - 1 and name not in blocks[index]
        ]
        if gone and not own:
            yield Gap(listed([f"{path}.{index}.{name}" for name in sorted(gone)]), "weights")


def _experts(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Iterator[Gap]:
    """Compare the experts of known types with the number that the config has of them, and the rows of their routers."""
    counts = {config[key] for key in _EXPERT_COUNTS if _is_number(config.get(key))}
    if str(config.get("model_type")) not in _WITH_EXPERTS or len(counts) != 1:
        return
    wanted, experts, stacked = counts.pop(), dict[str, set[int]](), dict[str, Shape]()
    for name, shape in shapes.items():
        if match := _EXPERT.match(name):
            experts.setdefault(match[1], set()).add(int(match[2]))
        elif (match := _STACKED.match(name)) and shape and shape[0] != wanted:
            stacked[name] = shape
    lost = [
        f"{path}.{index}"
        for path, held in experts.items()
        if len(held) < wanted
        for index in range(min(wanted, 1 << 12))
        if index not in held
    ]
    if lost:
        number = count(len(lost), "expert")
        yield Gap(f"{number} (the config counts {wanted} in each layer): {_folded(lost)}", "weights")
    homes = {path.rpartition(".")[0] for path in experts} | {m[2] for m in map(_STACKED.match, shapes) if m}
    routers = (f"{home}.{router}.weight" for home in homes for router in _ROUTERS)
    other = {name: shapes[name] for name in routers if name in shapes and shapes[name][:1] != (wanted,)}
    if stacked or other:
        yield _misshapen({**stacked, **other}, count(wanted, "expert"))


def _misshapen(shapes: Mapping[str, Shape], counted: str) -> Gap:
    shown = [f"{line.pattern} {list(line.key)}" for line in fold(sorted(shapes.items()))]
    return Gap(f"{listed(shown)}: the config counts {counted}", "shape")


def _folded(names: Iterable[str]) -> str:
    return listed([line.pattern for line in fold((name, None) for name in names)])


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseComparison:
    """How the names to write differ from the base's."""

    missing: tuple[str, ...] = ()
    """Names of the base that would not be written, except those that a tie replaces."""
    unexpected: tuple[str, ...] = ()
    """Names that the base lacks, except copies of tied tensors."""
    computed: tuple[str, ...] = ()
    """Names of buffers that only one side has and that every model computes itself."""
    wrong_shapes: tuple[tuple[str, Shape, Shape], ...] = ()
    """(name, the base's shape, ours)."""

    @property
    def is_equal(self) -> bool:
        """True if nothing differs, ties aside."""
        return not (self.missing or self.unexpected or self.wrong_shapes)


def compare_with_base(
    ours: Mapping[str, Shape], base: Mapping[str, Shape], *, ties: Iterable[Collection[str]] = ()
) -> BaseComparison:
    """Compare the names and shapes to write with those of the base.

    Args:
        ours: shape by output name.
        base: shape by name in the base.
        ties: groups of names that are one parameter, e.g. [("model.embed_tokens.weight", "lm_head.weight")].
            Another name of its group replaces a name that one side lacks.
    """
    groups = {name: set(group) for group in ties for name in group}
    missing, unexpected, computed = list[str](), list[str](), list[str]()
    for one, other, lacking in ((base, ours, missing), (ours, base, unexpected)):
        for name in one:
            if name not in other and groups.get(name, set()).isdisjoint(other):
                (computed if is_computed(name, one[name]) else lacking).append(name)
    return BaseComparison(
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        computed=tuple(computed),
        wrong_shapes=tuple(
            (name, tuple(base[name]), tuple(shape))
            for name, shape in ours.items()
            if name in base and tuple(base[name]) != tuple(shape)
        ),
    )


def torn_parts(missing: Collection[str], held: Collection[str]) -> dict[str, str]:
    """Return the part that each missing name stands in, if others of that part are there.

    A part is a whole list of blocks or experts, the outermost; elsewhere the largest module without such a list.
    Tensors that lie directly in one module belong together too.

    Args:
        missing: names of the base that are to come from elsewhere.
        held: names of the base that are there.
    """
    paths = {name: split(name) for name in (*missing, *held)}
    above_lists = {path[:stop] for path in paths.values() for stop in range(_first_number(path) + 1)}
    there = {paths[name][:depth] for name in held for depth in range(len(paths[name]))}
    parents = {paths[name][:-1] for name in held}
    torn = dict[str, str]()
    for name in missing:
        path = paths[name]
        stop = _first_number(path)
        without = (path[:depth] for depth in range(1, len(path)) if path[:depth] not in above_lists)
        part = path[:stop] if stop >= 0 else next(without, path)
        if part in there or path[:-1] in parents:
            torn[name] = join(part if part in there else path[:-1])
    return torn


def whole_parts(missing: Collection[str], held: Collection[str]) -> list[str]:
    """Return globs of missing names, each for the largest module of which nothing is there; arguments as above."""
    there = {path[:depth] for path in map(split, held) for depth in range(1, len(path))}
    globs = list[str]()
    for name in missing:
        path = split(name)
        module = next((path[:depth] for depth in range(1, len(path)) if path[:depth] not in there), None)
        globs.append(escape_glob(name) if module is None else f"{escape_glob(join(module))}.*")
    return list(dict.fromkeys(globs))


def _first_number(path: Segments) -> int:
    """Return the place of the first index of a list in a name; -1 if there is none."""
    return next((place for place, segment in enumerate(path) if is_number(segment)), -1)
