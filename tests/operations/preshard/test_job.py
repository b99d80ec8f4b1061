"""What preshard decides: where its layout comes from, as `--layout` says it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.errors import LayoutError, UsageError
from shardkit.layout import traced
from shardkit.operations.preshard import preshard

BERT = {"architectures": ["BertModel"], "model_type": "bert"}


@pytest.fixture
def hub(make_hub: Callable[..., Path]) -> Path:
    return make_hub({"encoder.layer.0.weight": torch.ones(4, 2)}, config=BERT)


def test_declared_asks_nobody(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(payload: bytes, timeout_s: float) -> Any:
        raise AssertionError("a child was started")

    monkeypatch.setattr(traced, "_serve_request", spawn)
    made = preshard(hub, tmp_path / "out", world_size=2, layout="declared")
    assert made.layout == "declared"
    assert any("--layout declared" in note for note in made.notes)


def test_traced_is_refused_without_a_model(make_hub: Callable[..., Path], tmp_path: Path) -> None:
    plain = make_hub({"a": torch.ones(4)})
    with pytest.raises(
        LayoutError, match=r"--layout traced: no model can be traced: there is no config.json"
    ):
        preshard(plain, tmp_path / "out", world_size=2, layout="traced")
    assert not (tmp_path / "out").exists()


def test_what_contradicts_itself_is_refused(hub: Path, tmp_path: Path) -> None:
    for options, said in (
        ({"layout": "traced", "names": "hub"}, "--names hub gives other names than a model"),
        ({"layout": "traced", "keys": "torchtitan-llama3"}, "key rules give other names than a model"),
        ({"layout": "real"}, "--layout 'real' is not one of auto, traced, declared"),
        ({"dtype": None}, "--dtype 'None' is not one of keep, bf16, fp16, fp32"),
    ):
        with pytest.raises(UsageError, match=said):
            preshard(hub, tmp_path / "out", world_size=2, **options)


def test_what_takes_seconds_is_said_before_it_does(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = list[str]()
    caplog.set_level("DEBUG", "shardkit")

    def spawn(payload: bytes, timeout_s: float) -> Any:
        assert said == ["tracing BertModel ..."]
        raise OSError(2, "no Python here")

    monkeypatch.setattr(traced, "_serve_request", spawn)
    with pytest.raises(Exception, match="cannot start Python"):
        preshard(hub, tmp_path / "out", world_size=2, on_step=said.append)
    assert caplog.messages[-1].startswith("transformers is asked what the model's tensors are called")
