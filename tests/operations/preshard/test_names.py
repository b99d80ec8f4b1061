"""A pre-sharded directory whose model has other names in memory than its files: the manifest knows both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit.errors import UsageError
from shardkit.operations.consolidate import consolidate
from shardkit.operations.diff import diff
from shardkit.operations.preshard import preshard
from shardkit.operations.reshard import reshard
from shardkit.operations.verify import verify
from tests.models.zoo import ZOO, make_hub

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("name", ["qwen2_vl", "llava", "gpt_neox"])
def test_preshard_and_consolidate_give_the_hub_model_again(
    name: str, tmp_path: Path, fast_trace: object
) -> None:
    hub, sharded = tmp_path / "hub", tmp_path / "sharded"
    make_hub(ZOO[name], hub)
    preshard(hub, sharded, world_size=2)
    manifest = json.loads((sharded / "shardkit.json").read_text())
    assert any(fqn != tensor["source"]["name"] for fqn, tensor in manifest["tensors"].items())
    reshard(sharded, tmp_path / "resharded", world_size=3)
    for source in ("sharded", "resharded"):
        consolidate(tmp_path / source, tmp_path / f"{source}-hf")
        expected, found = (load_file(each / "model.safetensors") for each in (hub, tmp_path / f"{source}-hf"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    for one, two in ((hub, sharded), (sharded, hub)):
        assert diff(one, two).differences == ()
    assert diff(sharded, sharded).differences == ()


def test_the_output_is_a_source_of_its_own(tmp_path: Path, fast_trace: object) -> None:
    """What lies beside the weights goes with them, so no base is asked for on the way back."""
    hub, sharded, back = (tmp_path / name for name in ("hub", "sharded", "back"))
    make_hub(ZOO["qwen3_moe"], hub)
    for name, text in {"tokenizer.json": "{}", "trainer.log": "x", "optimizer.pt": "x"}.items():
        (hub / name).write_text(text)
    (hub / "chat_template.jinja").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("not to be followed")
    result = preshard(hub, sharded, world_size=2)
    assert result.copied == ("config.json", "generation_config.json", "tokenizer.json")
    assert [note for note in result.notes if "chat_template.jinja" in note]
    assert verify(sharded, full=True).problems == ()
    reshard(sharded, tmp_path / "resharded", world_size=3)
    for source in (sharded, tmp_path / "resharded"):
        result = consolidate(source, back, overwrite=True)
        assert (result.unloadable, result.missing) == ((), ())
        names = {*result.file_names, "config.json", "generation_config.json", "tokenizer.json"}
        assert {path.name for path in back.iterdir()} == names
        for path in back.iterdir():
            if path.suffix == ".safetensors":
                expected, found = load_file(hub / path.name), load_file(path)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[key], expected[key]) for key in expected)
            else:
                assert path.read_bytes() == (hub / path.name).read_bytes()
    (sharded / "tokenizer.json").write_text("other")
    assert verify(sharded, full=True).problems


@pytest.mark.parametrize("knows_how", ["by the manifest", "by the class"])
def test_globs_are_about_names_in_the_output(knows_how: str, tmp_path: Path, fast_trace: object) -> None:
    """Of experts that were fused, some are taken and some are left out."""
    hub, sharded = tmp_path / "hub", tmp_path / "sharded"
    make_hub(ZOO["mixtral+repo"], hub)
    preshard(hub, sharded, world_size=2)
    options: dict[str, object] = {}
    if knows_how == "by the class":
        (sharded / "shardkit.json").unlink()
        options = {"base": hub, "allow_missing": True}
    expected = {k: x for path in hub.glob("*.safetensors") for k, x in load_file(path).items()}
    for include, exclude, wanted in (
        (["*.experts.1.*"], [], r".*\.experts\.1\..*"),
        ([], ["*.experts.[02].*", "*norm*"], r"((?!\.experts\.[02]\.|norm).)*"),
        (["*.layers.0.*"], ["*.w2.*"], r"((?!\.w2\.).)*\.layers\.0\.((?!\.w2\.).)*"),
        (["lm_head.weight"], [], r"lm_head\.weight"),
    ):
        consolidate(sharded, tmp_path / "some", include=include, exclude=exclude, overwrite=True, **options)  # type: ignore[arg-type]
        found = {
            k: x for path in (tmp_path / "some").glob("*.safetensors") for k, x in load_file(path).items()
        }
        assert found.keys() == {name for name in expected if re.fullmatch(wanted, name)}
        assert all(torch.equal(x, expected[name]) for name, x in found.items())
    result = consolidate(
        sharded, tmp_path / "x", include=["*w3*"], exclude=["*norm*"], dry_run=True, **options
    )  # type: ignore[arg-type]
    assert [part.num_tensors for part in result.skipped if part.what == "excluded"] == [
        19
    ]  # of 21 that are stored
    for idle in ("*.experts.7.*", "model.layers.0.mlp.experts.gate_up_proj"):  # a name in memory
        with pytest.raises(UsageError, match=r"1 glob of .* matches no name") as caught:
            consolidate(sharded, tmp_path / "none", include=["*w3*", idle], **options)  # type: ignore[arg-type]
        assert any(".experts." in line for line in caught.value.problems)
