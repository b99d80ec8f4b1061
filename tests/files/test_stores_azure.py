"""Checkpoints at `az://` paths, from Azurite (`npm install -g azurite`): skipped where it is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardkit
from shardkit.errors import IntegrityError, ResourceError
from shardkit.files import stores
from shardkit.files.remote import cloud, kinds
from tests.files.conftest import check_verbs, make
from tests.worlds import stores as servers

pytestmark = pytest.mark.prove

AZ = "az://bucket/try"


def test_every_verb_reads_from_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.reached("azure", tmp_path):
        import obstore

        home = tmp_path / "home"
        home.mkdir()
        make(home)
        servers.upload(home, AZ)
        check_verbs(AZ, home, tmp_path)
        number = stores.open_number(f"{AZ}/dcp/.metadata", os.O_RDONLY)
        obstore.put(cloud.connect("az://bucket"), "try/dcp/.metadata", b"another version")
        with pytest.raises(IntegrityError, match="the object changed"):
            stores.read(number, 10, 0)
        stores.close_number(number)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA")
        kinds.forget_stores()
        stores.forget()
        with pytest.raises(ResourceError, match="denies access"):
            shardkit.inspect(f"{AZ}/hub")
