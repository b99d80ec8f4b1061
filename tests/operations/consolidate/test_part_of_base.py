"""A part trained out of a larger model: what was not trained comes from the base, byte for byte, and whole parts alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import shardkit
from shardkit.cli import main
from shardkit.errors import LayoutError, UsageError
from shardkit.operations.consolidate import consolidate
from tests.operations.consolidate.checkpoints import (
    EMBED,
    HEAD,
    assert_bit_equal,
    hub,
    load,
    save,
    weights,
)
from tests.osft.factored import factored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning")

VISUAL = "model.visual.*"
# It names no class, so none is asked.
WHOLE = {"model_type": "some_vision_model", "tie_word_embeddings": False}
Tensors = dict[str, torch.Tensor]


def tower() -> Tensors:
    """Return a vision tower and its merger; what is below one name is in fp32, the rest in bf16."""
    torch.manual_seed(1)
    found = {
        f"blocks.{at}.attn.{name}.weight": torch.randn(8, 8) for at in range(2) for name in ("qkv", "proj")
    }
    found |= {f"merger.{name}.weight": torch.randn(16, 8) for name in ("fc1", "fc2")}
    found |= {"patch_embed.proj.weight": torch.randn(8, 12), "pos_embed": torch.randn(4, 8)}
    return {
        f"model.visual.{name}": value if "pos_embed" in name else value.bfloat16()
        for name, value in found.items()
    }


def in_whole(text: Mapping[str, torch.Tensor]) -> Tensors:
    """Return a language model's tensors as the files of a vision model name them."""
    return {re.sub(r"^model\.", "model.language_model.", name): value for name, value in text.items()}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return hub(tmp_path / "base", {**in_whole(weights()), **tower()}, WHOLE)


def trained(tmp_path: Path, state: Mapping[str, torch.Tensor] | None = None) -> Path:
    state = weights() if state is None else state
    return save({"model": {name: value * 2 for name, value in state.items()}}, tmp_path / "step-3")


def expected(tmp_path: Path) -> Tensors:
    return {**in_whole({name: value * 2 for name, value in weights().items()}), **tower()}


def test_a_language_model_gets_the_tower_of_its_base(base: Path, tmp_path: Path) -> None:
    result = consolidate(trained(tmp_path), tmp_path / "out", base=base, fill_from_base=[VISUAL])
    assert_bit_equal(load(tmp_path / "out"), expected(tmp_path))
    assert set(result.from_base) == tower().keys()
    assert (result.held_against, result.warnings, result.unloadable) == ("base", (), ())
    assert f"copied unchanged from {base}: 8 tensors: {VISUAL}" in result.notes
    assert result.renamed == (("model.", "model.language_model.", 20),)
    assert result.to_json()["from_base"] == result.from_base


def test_the_refusal_has_the_command(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works as it is printed, and names what it takes."""
    monkeypatch.chdir(tmp_path)
    trained(tmp_path)
    result = CliRunner().invoke(main, ["consolidate", "step-3", "--base", "base"])
    assert result.exit_code == 3
    assert "the checkpoint does not fit --base base: 8 differences" in result.output
    (command,) = re.findall(r"`shardkit (.*)`", result.output)
    assert command == f"consolidate step-3 --base base --fill-from-base '{VISUAL}'"
    again = CliRunner().invoke(main, command.replace("'", "").split())
    assert again.exit_code == 0, again.output
    assert "8 tensors: model.visual.*" in again.output
    assert_bit_equal(load(tmp_path / "step-3-hf"), expected(tmp_path))


@pytest.mark.parametrize(
    ("prefix", "globs"),
    [("thinker.", ("talker.*", "code2wav.*")), ("language_model.", ("vision_tower.*", "projector.*"))],
)
def test_any_prefix_and_several_globs(prefix: str, globs: tuple[str, ...], tmp_path: Path) -> None:
    """An Omni thinker, whose talker has the same modules with other shapes; a language model of Llava's old files."""
    rest = {f"{glob[:-1]}model.layers.{at}.w.weight": torch.randn(3, 3) for glob in globs for at in range(2)}
    base = hub(
        tmp_path / "base", {**{prefix + name: value for name, value in weights().items()}, **rest}, WHOLE
    )
    checkpoint = trained(tmp_path)
    with pytest.raises(LayoutError) as refused:
        consolidate(checkpoint, tmp_path / "out", base=base)
    assert all(f"--fill-from-base '{glob}'" in str(refused.value.hint) for glob in globs)
    consolidate(checkpoint, tmp_path / "out", base=base, fill_from_base=globs)
    found = load(tmp_path / "out")
    assert_bit_equal(found, {**{prefix + name: 2 * value for name, value in weights().items()}, **rest})


def test_a_part_without_its_head(base: Path, tmp_path: Path) -> None:
    """The head is a part by itself; names below `model.` may be gone too."""
    body = {name.removeprefix("model."): value for name, value in weights().items() if name != HEAD}
    result = consolidate(
        trained(tmp_path, body), tmp_path / "out", base=base, fill_from_base=[VISUAL, "lm_head.*"]
    )
    assert_bit_equal(load(tmp_path / "out"), {**expected(tmp_path), HEAD: weights()[HEAD]})
    assert {HEAD, *tower()} == set(result.from_base)


def test_a_trained_head_is_not_to_be_taken_from_the_base(tmp_path: Path) -> None:
    """It lies beside the part whose names are the base's, below another prefix."""
    own, towers = {"language_model." + name: value for name, value in weights().items()}, tower()
    visual = {name.removeprefix("model."): value for name, value in towers.items()}
    base = hub(tmp_path / "base", {**own, **visual}, WHOLE)
    policy = {f"policy.{name}": value for name, value in {**in_whole(weights()), **towers}.items()}
    checkpoint = trained(tmp_path, {**policy, "value_head.weight": torch.randn(1, 16)})
    with pytest.raises(LayoutError, match=r"missing: language_model\.lm_head\.weight") as refused:
        consolidate(checkpoint, tmp_path / "out", base=base)
    assert "root may give the base's names" in str(refused.value.hint)
    consolidate(checkpoint, tmp_path / "out", base=base, root="model.policy")
    assert_bit_equal(load(tmp_path / "out"), {name: 2 * value for name, value in {**own, **visual}.items()})


LAYER, BLOCK = "model.layers.1.", "model.visual.blocks.1."


@pytest.mark.parametrize(
    ("gone", "fill", "part"),
    [
        (LAYER, ["*layers.1.*"], "model.language_model.layers"),
        ("model.layers.0.mlp.up_proj", ["*up_proj*"], "model.language_model.layers"),
        (BLOCK, [VISUAL], "model.visual.blocks"),
        ("model.visual.merger.fc1", [VISUAL], "model.visual.merger"),
        ("model.visual.blocks.", ["model.visual.blocks.0.*"], "model.visual.blocks"),
    ],
)
@pytest.mark.parametrize("allow_missing", [False, True])
def test_never_a_layer_or_a_module_in_part(
    gone: str, fill: list[str], part: str, allow_missing: bool, base: Path, tmp_path: Path
) -> None:
    """It is named, whether or not tensors may be missing."""
    state = {name: value for name, value in {**weights(), **tower()}.items() if not name.startswith(gone)}
    if gone.startswith("model.layers"):
        state = in_whole(state)
        state = {name.replace("model.language_model.visual", "model.visual"): v for name, v in state.items()}
    else:
        state = {**in_whole(weights()), **{n: v for n, v in tower().items() if not n.startswith(gone)}}
    with pytest.raises(LayoutError) as refused:
        consolidate(
            trained(tmp_path, state),
            tmp_path / "out",
            base=base,
            fill_from_base=fill,
            allow_missing=allow_missing,
        )
    assert any(f"others of {part} would not come from the base" in line for line in refused.value.problems)
    assert not (tmp_path / "out").exists()


def test_an_expert_alone_is_no_part(tmp_path: Path) -> None:
    state = {f"experts.{at}.up.weight": torch.randn(4, 4) for at in range(4)} | {"norm.weight": torch.ones(4)}
    base = hub(tmp_path / "base", state, WHOLE)
    del state["experts.2.up.weight"]
    with pytest.raises(LayoutError, match="1 difference") as refused:
        consolidate(trained(tmp_path, state), tmp_path / "out", base=base, fill_from_base=["*"])
    assert refused.value.problems == (
        "not a whole part: experts.2.up.weight: others of experts would not come from the base",
    )


def test_a_copy_that_the_base_stores_is_not_the_old_one(tmp_path: Path) -> None:
    """The trained embedding would stand beside the base's own copy of the old one."""
    text = weights(tied=True)
    base = hub(tmp_path / "base", {**in_whole(text), **tower()}, {"model_type": "some_vision_model"})
    body = {name: value for name, value in text.items() if name != HEAD}
    with pytest.raises(LayoutError) as refused:
        consolidate(trained(tmp_path, body), tmp_path / "out", base=base, fill_from_base=["*"])
    assert re.search(rf"{HEAD}: the base has the same bytes under .*{EMBED[6:]}", refused.value.problems[0])


def test_what_the_checkpoint_has_is_never_the_bases(base: Path, tmp_path: Path) -> None:
    """And a glob that has nothing to fill is named."""
    checkpoint = trained(tmp_path, {**in_whole(weights()), **tower()})
    result = consolidate(checkpoint, tmp_path / "out", base=base, fill_from_base=["*", "typo.*"])
    assert result.from_base == ()
    assert_bit_equal(
        load(tmp_path / "out"),
        {name: 2 * value for name, value in load_file(base / "model.safetensors").items()},
    )
    assert "--fill-from-base 'typo.*' matches no tensor that is missing" in result.notes


def test_dtypes_are_asked_for_as_ever(base: Path, tmp_path: Path) -> None:
    fill: dict[str, Any] = {"base": base, "fill_from_base": [VISUAL]}
    state = {name: value.bfloat16() for name, value in weights().items()}
    consolidate(trained(tmp_path, state), tmp_path / "kept", **fill)
    kept = load(tmp_path / "kept")
    assert_bit_equal({name: kept[name] for name in tower()}, tower())
    consolidate(tmp_path / "step-3", tmp_path / "cast", dtype="fp32", **fill)
    assert {value.dtype for value in load(tmp_path / "cast").values()} == {torch.float32}


def test_factors_of_a_part(tmp_path: Path) -> None:
    """What OSFT trained of it is folded into the base's dtype; what it holds in float32 tells nothing of the tower."""
    dense = weights(torch.bfloat16)
    base = hub(tmp_path / "base", {**in_whole(dense), **tower()}, WHOLE)
    checkpoint = save({"model": factored({n: v.float() for n, v in dense.items()})}, tmp_path / "step-3")
    consolidate(checkpoint, tmp_path / "out", base=base, fill_from_base=[VISUAL])
    found = load(tmp_path / "out")
    assert {name: found[name].dtype for name in found} == dict.fromkeys(in_whole(dense), torch.bfloat16) | {
        name: value.dtype for name, value in tower().items()
    }
    assert_bit_equal({name: found[name] for name in tower()}, tower())


def test_what_is_excluded_may_come_from_the_base(base: Path, tmp_path: Path) -> None:
    checkpoint = trained(tmp_path, {**in_whole(weights()), **tower()})
    consolidate(checkpoint, tmp_path / "out", base=base, exclude=[VISUAL], fill_from_base=[VISUAL])
    assert_bit_equal(load(tmp_path / "out"), expected(tmp_path))


def test_a_part_alone_has_the_bases_names(base: Path, tmp_path: Path) -> None:
    """Without its tower, if a person lets that pass."""
    consolidate(trained(tmp_path), tmp_path / "out", base=base, allow_missing=True)
    assert load(tmp_path / "out").keys() == in_whole(weights()).keys()


def test_in_parts(base: Path, tmp_path: Path) -> None:
    checkpoint = trained(tmp_path)
    for number in (1, 2):
        shardkit.consolidate(
            checkpoint,
            tmp_path / "out",
            base=base,
            fill_from_base=[VISUAL],
            max_shard_size="4KB",
            part=f"{number}/2",
        )
    assert_bit_equal(load(tmp_path / "out"), expected(tmp_path))


@pytest.mark.parametrize("has_base", [False, True])
def test_there_is_nothing_to_fill_from(has_base: bool, tmp_path: Path) -> None:
    base = hub(tmp_path / "base", None, WHOLE) if has_base else None
    with pytest.raises(UsageError, match="takes tensors of a base with weights"):
        consolidate(trained(tmp_path), tmp_path / "out", base=base, fill_from_base=["*"])


def test_nothing_of_the_base_is_no_part_of_it(base: Path, tmp_path: Path) -> None:
    """Names that fit nowhere would leave the base's model, beside what was trained."""
    other = {f"net.{at}.weight": torch.ones(2) for at in range(2)}
    with pytest.raises(LayoutError, match="the checkpoint does not fit") as refused:
        consolidate(
            trained(tmp_path, other),
            tmp_path / "out",
            base=base,
            fill_from_base=["*"],
            allow_unexpected=True,
        )
    assert "the checkpoint has no tensor of the base" in refused.value.problems[0]
