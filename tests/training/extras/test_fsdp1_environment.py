"""The variables that turn the RAM efficient loading of transformers on and off."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardkit.training.extras.fsdp1 import hf_ram_efficient_loading
from tests.training.models import llama

pytestmark = pytest.mark.prove

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


@pytest.mark.dist
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("local_rank", ["0", "1", None])
def test_who_reads_is_what_the_docstring_says(
    local_rank: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that have LOCAL_RANK 0, before transformers 5.23; every rank since then."""
    import transformers

    torch.manual_seed(0)
    saved = transformers.LlamaForCausalLM(llama())
    saved.save_pretrained(tmp_path)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with hf_ram_efficient_loading(True):
        loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    expected = saved.state_dict()
    reads = all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert reads is (version >= (5, 23) or local_rank == "0")
    assert not any(parameter.is_meta for parameter in loaded.parameters())  # memory is taken all the same
    buffers = dict(saved.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in loaded.named_buffers())
    assert "5.23: none. Every rank reads every value." in (hf_ram_efficient_loading.__doc__ or "")
