import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from shardkit.training.hf_environment import hf_ram_efficient_loading

NAMES = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def values() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


@pytest.fixture(autouse=True)
def before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMES[0], "as it was")
    monkeypatch.delenv(NAMES[1], raising=False)


def test_sets_and_puts_back() -> None:
    with hf_ram_efficient_loading(True):
        assert values() == ["true", "true"]
        with hf_ram_efficient_loading(False):
            assert values() == ["false", "false"]
        assert values() == ["true", "true"]
    assert values() == ["as it was", None]


def test_puts_back_after_an_exception() -> None:
    def fail() -> None:
        with hf_ram_efficient_loading(True):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert values() == ["as it was", None]


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("enabled", [True, False])
def test_transformers_understands_it(enabled: bool) -> None:
    from transformers.distributed.fsdp import is_fsdp_enabled

    with hf_ram_efficient_loading(enabled):
        assert is_fsdp_enabled() is enabled
