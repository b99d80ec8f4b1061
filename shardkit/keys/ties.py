"""Names of modules that models tie: which tensors may be copies of which others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardkit.core.regions import Shape

_SHARED, _EMBEDDING, _HEAD = range(3)

# The module that owns a weight, as transformers 5.23 names it in `_tied_weights_keys`: the source of a tie, and what
# is tied to it. `shared` (T5, BART) is the source of the embeddings of encoder and decoder too.
_SHARED_MODULES = frozenset({"shared"})
_EMBEDDING_MODULES = frozenset(
    {
        "embed_tokens",
        "wte",
        "word_embeddings",
        "embed_in",
        "embeddings",
        "tok_embeddings",
        "embed",
        "embedding",
    }
)
_HEAD_MODULES = frozenset({"lm_head", "output", "embed_out", "output_layer", "output_projection"})
_HEAD_PATHS = ("lm_head.decoder", "predictions.decoder", "lm_head.lm_head")
# BERT and RoBERTa keep the bias of the head outside its decoder.
_BIASES = (("predictions.bias", "predictions.decoder.bias"), ("lm_head.bias", "lm_head.decoder.bias"))


def tied_names(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield (name, names of which one may be its equal, is it an output layer): modules that models tie.

    Args:
        shapes: by name in the model.
    """
    roles = {name: role for name in shapes if (role := role_of(name)) is not None}
    for name, role in roles.items():
        keepers = [
            (other_role, other)
            for other, other_role in roles.items()
            if other_role < role and shapes[other] == shapes[name]
        ]
        if keepers:  # an embedding is tied to a shared one only, an output layer to any
            yield (
                name,
                tuple(other for _, other in sorted(keepers, key=lambda keeper: keeper[0])),
                role == _HEAD,
            )
    for kept_end, other_end in _BIASES:
        for name in shapes:
            kept = name.removesuffix(other_end) + kept_end
            if name.endswith(f".{other_end}") and kept in shapes:
                yield name, (kept,), False


def role_of(name: str) -> int | None:
    """Tell a shared embedding, an embedding and an output layer from any other weight (None)."""
    path, _, leaf = name.rpartition(".")
    segments = path.split(".")
    if leaf != "weight":
        return None
    if segments[-1] in _SHARED_MODULES:
        return _SHARED
    if segments[-1] in _EMBEDDING_MODULES:
        return _EMBEDDING
    if any(segment.isdigit() for segment in segments):  # part of a layer, whatever it is called
        return None
    return _HEAD if segments[-1] in _HEAD_MODULES or path.endswith(_HEAD_PATHS) else None
