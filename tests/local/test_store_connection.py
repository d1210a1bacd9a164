"""The end of the process that hosts the store is noticed before torch is asked."""

from __future__ import annotations

import gc
import os

import pytest
import torch.distributed as dist

from telegrad.errors import JoinError
from telegrad.group.signed_store import SignedStore
from telegrad.group.store_connection import StoreConnection
from tests.local.gates import until


def has_ended(connection: StoreConnection) -> bool:
    try:
        connection.require_open()
    except JoinError:
        return True
    return False


def test_a_store_that_has_ended_is_not_asked(capfd: pytest.CaptureFixture[str]) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    store = SignedStore(dist.PrefixStore("a", dist.PrefixStore("b", client)), b"key")
    assert store.write("key", "value", None)
    assert store.exists("key")
    capfd.readouterr()
    del host  # which stops its server
    until(lambda: has_ended(store._connection))
    for use in (
        lambda: store.exists("key"),
        lambda: store.read("key", "the test"),
        lambda: store.read_all({"key": "the test"}),
        lambda: store.write("key", "other", None),
    ):
        with pytest.raises(JoinError, match="usually the worker with rank 0, is gone"):
            use()
    assert "frame #" not in capfd.readouterr().err


def test_its_descriptor_is_closed_with_it() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = len(os.listdir("/proc/self/fd"))
    connection = StoreConnection(host)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del connection
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_stores_of_other_kinds_do_not_end() -> None:
    StoreConnection(dist.PrefixStore("a", dist.HashStore())).require_open()
    StoreConnection(object()).require_open()
