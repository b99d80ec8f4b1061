"""Averages of a model's weights: in the saved dict, or in the state of an optimizer."""

import pytest
import torch
import torch.optim.swa_utils
from torch import nn

from shardkit.errors import SourceError, UsageError
from shardkit.keys.select import Naming, select_model
from tests.keys.key_sets import MODELS, entries, entry, optimizer
from tests.keys.test_roots import under

LLAMA = MODELS["llama"]


class TestAveragedWeights:
    def test_inside_of_a_lightning_module(self) -> None:
        stored = [*under("state_dict.net", LLAMA), *under("state_dict.ema_model.module", LLAMA)]
        selection = select_model(entries([*stored, "state_dict.ema_model.n_averaged"]))
        assert selection.root == "state_dict.net"
        averaged = select_model(
            entries([*stored, "state_dict.ema_model.n_averaged"]), naming=Naming(weights="ema")
        )
        assert averaged.root == "state_dict.ema_model.module"
        assert set(averaged.names.values()) == set(LLAMA)

    def test_of_parameters_alone_without_the_tied_head(self) -> None:
        """Names are the model's, though nothing in the average itself shows that `model.` is one of them."""
        stored = [*under("model", LLAMA), *under("ema", LLAMA[:-1])]
        averaged = select_model(entries(stored), naming=Naming(weights="ema"))
        assert set(averaged.names.values()) == set(LLAMA[:-1])

    def test_above_the_root_that_the_layout_gives(self) -> None:
        tensors = entries([*under("state_dict.net", LLAMA), *under("ema", LLAMA), *under("critic", LLAMA)])
        roots = {"model": ("state_dict",)}
        assert select_model(tensors, roots=roots).root == "state_dict.net"
        assert select_model(tensors, naming=Naming(weights="ema"), roots=roots).root == "ema"
        assert select_model(tensors, naming=Naming(weights="critic"), roots=roots).root == "critic"

    def test_with_a_copy_of_the_trained_model_inside(self) -> None:
        names = [*under("model", LLAMA), *under("ema.ema_model", LLAMA), *under("ema.online_model", LLAMA)]
        tensors = {**entries(names), "ema.step": entry("ema.step", ()), **optimizer("optim", LLAMA)}
        assert select_model(tensors).root == "model"
        assert select_model(tensors, naming=Naming(weights="ema")).root == "ema.ema_model"

    def test_stored_without_dots(self) -> None:
        dotless = [f"model_ema.{name.replace('.', '')}" for name in LLAMA]
        tensors = {
            **entries([*under("model", LLAMA), *dotless]),
            "model_ema.decay": entry("model_ema.decay", ()),
        }
        averaged = select_model({**tensors, **optimizer("optim", LLAMA)}, naming=Naming(weights="ema"))
        assert averaged.names == {
            f"model_ema.{name.replace('.', '')}": name for name in averaged.names.values()
        }
        assert set(averaged.names.values()) == set(LLAMA)

    @pytest.mark.parametrize("below", [True, False])
    def test_without_dots_and_without_an_optimizer(self, below: bool) -> None:
        """Copies are known by their names and shapes, whether or not those begin with the model's own."""
        start = "" if below else "model"
        dotless = [f"model_ema.{start}{name.replace('.', '')}" for name in LLAMA]
        found = select_model(entries([*under("model", LLAMA), *dotless]))
        assert (found.root, set(found.names.values())) == ("model", set(LLAMA))
        assert [part.kind for part in found.skipped] == ["averaged weights"]

    @pytest.mark.parametrize("above", ["", "model_state_dict.", "_orig_mod."])
    @pytest.mark.parametrize(
        "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"net": nn.Linear(2, 2)})]
    )
    def test_of_torch_by_itself(self, model: nn.Module, above: str) -> None:
        """AveragedModel puts `module.` above the model, and its counter beside that."""
        stored = {
            f"{above}{name}": entry(f"{above}{name}", tensor.shape)
            for name, tensor in torch.optim.swa_utils.AveragedModel(model).state_dict().items()
        }
        found = select_model(stored)
        assert set(found.names.values()) == set(model.state_dict())
        assert [(part.kind, part.path) for part in found.skipped] == [
            ("trainer state", f"{above.removeprefix('_orig_mod.')}n_averaged")
        ]
        with pytest.raises(UsageError, match="holds no averaged weights"):
            select_model(stored, naming=Naming(weights="ema"))

    @pytest.mark.parametrize("above", ["", "model.", "state_dict."])
    @pytest.mark.parametrize("inside", [("module", "head"), ("encoder",), ("encoder", "head")])
    def test_of_a_model_with_such_a_buffer(self, inside: tuple[str, ...], above: str) -> None:
        """Beside anything but module. alone, n_averaged is the model's own."""
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in inside})
        model.register_buffer("n_averaged", torch.tensor(2))
        stored = {
            f"{above}{name}": entry(f"{above}{name}", tensor.shape)
            for name, tensor in model.state_dict().items()
        }
        assert set(select_model(stored).names) == set(stored)

    @pytest.mark.parametrize("above", ["", "state."])
    def test_of_one_model_among_several(self, above: str) -> None:
        """As code for GANs saves it: which model is meant is not clear, which average is."""
        stored = [name for part in ("g", "d", "g_ema") for name in under(f"{above}{part}", LLAMA)]
        found = select_model(entries(stored), naming=Naming(weights="ema"))
        assert (found.root, set(found.names.values())) == (f"{above}g_ema", set(LLAMA))
        with pytest.raises(UsageError, match="2 sets of averaged weights") as caught:
            select_model(entries([*stored, *under(f"{above}d_ema", LLAMA)]), naming=Naming(weights="ema"))
        assert len(caught.value.problems) == 2

    def test_as_a_list(self) -> None:
        names = [*under("model", LLAMA), *(f"ema.shadow_params.{n}" for n in range(12))]
        with pytest.raises(SourceError, match="list of 12 tensors without names"):
            select_model({**entries(names), **optimizer("optim", LLAMA)}, naming=Naming(weights="ema"))

    def test_not_there(self) -> None:
        with pytest.raises(UsageError, match="no averaged weights"):
            select_model(entries(LLAMA), naming=Naming(weights="ema"))
        with pytest.raises(UsageError, match="no weights of that name"):
            select_model(entries(LLAMA), naming=Naming(weights="emma"))

    def test_nothing_else_there(self) -> None:
        with pytest.raises(SourceError) as caught:
            select_model({**entries(under("model_ema", LLAMA)), **optimizer("optim", LLAMA)})
        assert "weights ema" in str(caught.value.hint)
