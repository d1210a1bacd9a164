"""torch's own debug server asks the agents of a process, and shows a page."""

from __future__ import annotations

import importlib
import json
import urllib.request
from typing import Any

import pytest
import torch.distributed as dist

from telegrad.errors import UsageError
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import Gate, hold_at

c10d: Any = pytest.importorskip("torch._C._distributed_c10d")
if not hasattr(c10d, "_register_handler"):
    pytest.skip("this torch has no debug server", allow_module_level=True)


@pytest.fixture
def transport() -> str:
    return "unix"


def test_the_worker_server_answers_while_a_call_is_blocked(
    cluster: Clusters, gate: Gate, in_background: Background
) -> None:
    workers = cluster(2)
    server = c10d._WorkerServer("127.0.0.1", 0)
    try:
        waiting = in_background(workers["w0"].call, "w1", hold_at, gate)
        gate.wait_for()
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/handler/telegrad", method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found = {each["worker"]["name"]: each for each in json.loads(answer.read())}
        gate.open()
        waiting.result()
    finally:
        server.shutdown()
    assert {"w0", "w1"} <= found.keys()
    assert [call["function"] for call in found["w1"]["calls"]] == ["hold_at"]


def test_the_page_shows_the_status(
    cluster: Clusters, gate: Gate, in_background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("tabulate")
    frontend = pytest.importorskip("torch.distributed.debug._frontend")
    handler_type = importlib.import_module("telegrad.telemetry.torch_debug_page").TelegradHandler
    if not hasattr(frontend.DebugHandler, "fetch_timeout"):  # torch 2.11
        with pytest.raises(UsageError, match="install a newer torch"):
            handler_type()
        return
    handler = handler_type()
    workers = cluster(2)
    server = c10d._WorkerServer("127.0.0.1", 0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    debug = dist.PrefixStore("debug_server", store)
    debug.set("rank0", f"http://127.0.0.1:{server.port}")
    debug.set("rank1", "http://127.0.0.1:9")  # nobody is there
    page = frontend.FrontendServer(port=0, handlers=[handler])
    try:
        waiting = in_background(workers["w0"].call, "w1", hold_at, gate)
        gate.wait_for()
        port = page._server.server_address[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/telegrad", timeout=60) as answer:
            shown = answer.read().decode()
        text = handler.dump()
        gate.open()
        waiting.result()
    finally:
        page._server.shutdown()
        page._server.server_close()
        server.shutdown()
    for each in (shown, text or ""):
        assert "hold_at on w1" in each
        assert "rank 1" in each
        assert "503" in each
