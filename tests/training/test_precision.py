"""What a wrapped model computes in bf16 is what `from_pretrained` computes in bf16, bit for bit."""

import pytest

from tests.training.conftest import World
from tests.training.precision_world import CASES, KEPT, PRESHARDED


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.dist
def test_logits_are_those_of_one_process(precision_world: World, name: str, dtype: str) -> None:
    for each in precision_world.found("logits"):
        assert each[name][dtype] == 0
        assert each[name]["spread"] > 1e-3  # nothing is all zeros


@pytest.mark.dist
def test_the_root_casts_its_inputs_and_blocks_do_not(precision_world: World) -> None:
    found = precision_world.found("logits")[0]["policies"]
    blocks = {"encoder.layer.0": False, "encoder.layer.1": False}
    assert found["bf16"] == {"": True, "embeddings": False, **blocks}
    # Masters of another dtype than what is computed in: models ask for it, and cast by it.
    assert found["fp32"] == {"": True, "embeddings": True, **blocks}
    assert found["own"] == dict.fromkeys(found["own"], True)


RUNS = [
    (name, f"{dtype}{ending}")
    for name, case in KEPT.items()
    for dtype in case.masters
    for ending in ("", "-again", *(["-presharded"] if name in PRESHARDED and dtype == case.half else []))
]
UNITS = {
    "ernie4_5-moe": ["model.layers.1.mlp"],
    "hunyuan-moe": ["model.layers.0.mlp", "model.layers.1.mlp"],
    "deberta": ["deberta.encoder.layer.0.attention", "deberta.encoder.layer.1.attention"],
    "t5": [
        f"{stack}.block.{n}.layer.{at}" for stack, at in (("encoder", 1), ("decoder", 2)) for n in range(2)
    ],
    "blip2": ["qformer"],
}


@pytest.mark.parametrize(("name", "run"), RUNS)
@pytest.mark.dist
def test_parameters_in_fp32_train_as_in_one_process(precision_world: World, name: str, run: str) -> None:
    """In units of their own, also while activations are computed again, and from a directory of `preshard --dtype`."""
    for each in precision_world.found("logits"):
        found, right = each["kept"][name][run], each["kept"][name]["right"]
        assert found["logits"] == 0
        assert found["gradients"] < 0.04
        assert found["kept"] < (1e-6 if run.startswith("fp32") else 0.04)
        assert right
        assert run.startswith("fp32") or found["wide"] == right
        assert found["outside"] == (["query_tokens"] if name == "blip2" else [])
        # With masters in fp32 nothing but what is computed in fp32 is apart.
        own = [] if (name, run[:4]) == ("deberta", "fp32") else UNITS[name]
        assert set(own) <= set(found["units"])
        plain = {path for path in found["units"] if not path or path.rpartition(".")[2].isdecimal()}
        assert name == "blip2" or set(found["units"]) - set(own) <= plain | {"deberta.embeddings"}
