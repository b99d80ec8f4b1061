"""Real architectures through everything, and the table that says which do not pass."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.models import __main__ as zoo
from tests.models.outcomes import check_table, expected, named
from tests.models.table import render
from tests.models.zoo import IN_MAKE_PROVE, ZOO
from tests.models.zoo_world import difference
from tests.worlds.processes import ROOT

pytestmark = pytest.mark.prove

EVERY_STEP = "test_every_step_ends_as_expected"


def document() -> str:
    """Return docs/models.md as it should be."""
    return render(transformers.__version__)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """What the steps said, of the models that were selected (`-k llama`)."""
    selected = {item.callspec.params["name"] for item in request.session.items if _is_of_a_model(item)}
    names = [name for name in ZOO if name in selected]
    return zoo.run(names, tmp_path_factory.mktemp("zoo"), timeout_s=1800)


def _is_of_a_model(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == EVERY_STEP


@pytest.mark.dist
@pytest.mark.parametrize("name", [name for name in ZOO if name in IN_MAKE_PROVE])
def test_every_step_ends_as_expected(results: dict[str, dict[str, str]], name: str) -> None:
    assert named(results[name], name) == expected(name)


def test_the_table_is_of_the_zoo() -> None:
    check_table()
    assert ZOO.keys() >= IN_MAKE_PROVE
    assert len({each.model_type for each in ZOO.values()}) >= 60


def test_the_documentation_is_written_from_it() -> None:
    """`python -m tests.models --docs` writes it."""
    assert (ROOT / "docs/models.md").read_text() == document()


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), ""),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), ""),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "off by 0"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0000002]), "off by 2.4e-07"),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0]), "torch.bfloat16 instead of torch.float32"),
        (torch.tensor([[1.0]]), torch.tensor([1.0]), "[1, 1] instead of [1]"),
    ],
)
def test_one_bit_is_a_difference(found: torch.Tensor, expected: torch.Tensor, said: str) -> None:
    assert difference(found, expected) == said
