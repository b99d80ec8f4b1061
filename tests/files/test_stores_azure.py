"""Checkpoints at `az://` paths, from Azurite (`npm install -g azurite`): skipped where it is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardkit
from shardkit.errors import IntegrityError, ResourceError
from shardkit.files import stores
from shardkit.files.remote import cloud, kinds
from tests.contents import contents
from tests.files.conftest import Model, make
from tests.worlds import stores as servers

pytestmark = pytest.mark.prove

AZ = "az://bucket/try"


def test_every_verb_reads_from_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.reached("azure", tmp_path):
        import obstore

        home = tmp_path / "home"
        home.mkdir()
        make(home)
        client = cloud.connect("az://bucket")
        for path in sorted(home.rglob("*")):
            if path.is_file():
                obstore.put(client, f"try/{path.relative_to(home)}", path.read_bytes())
        for source, where in ((AZ, "far"), (str(home), "near")):
            (tmp_path / where).mkdir()
            shardkit.consolidate(f"{source}/dcp", tmp_path / where / "a")
            shardkit.reshard(f"{source}/dcp", tmp_path / where / "b", world_size=3)
            shardkit.preshard(f"{source}/hub", tmp_path / where / "c", world_size=2, wrap="none")
        assert contents(tmp_path / "far") == contents(tmp_path / "near")
        assert shardkit.inspect(f"{AZ}/dcp").tensors == shardkit.inspect(home / "dcp").tensors
        assert shardkit.verify(f"{AZ}/dcp", full=True).problems == ()
        assert shardkit.diff(f"{AZ}/dcp", home / "hub").is_equal
        model, want = Model(), load_file(home / "hub/model.safetensors")
        shardkit.load_into(model, f"{AZ}/hub")
        assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())
        number = stores.open_number(f"{AZ}/dcp/.metadata", os.O_RDONLY)
        obstore.put(client, "try/dcp/.metadata", b"another version")
        with pytest.raises(IntegrityError, match="the object changed"):
            stores.read(number, 10, 0)
        stores.close_number(number)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA")
        kinds.forget_stores()
        stores.forget()
        with pytest.raises(ResourceError, match="denies access"):
            shardkit.inspect(f"{AZ}/hub")
