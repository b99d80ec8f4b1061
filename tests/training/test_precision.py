"""What a wrapped model computes in bf16 is what `from_pretrained` computes in bf16, bit for bit."""

import pytest

from tests.training.conftest import World
from tests.training.precision_world import CASES


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
