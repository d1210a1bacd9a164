"""An attacker who can write to the store leads no worker elsewhere and runs nothing.

The store has no authentication. Whatever it says, a call goes to the worker that it names, or fails
with an error that names the entry.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from telegrad import Agent
from telegrad.errors import TelegradError
from tests.local.attacks import HERE, PROXIED, Scene, note_and_return, port_of, settings
from tests.local.gates import Log
from tests.local.proxy import Proxy


def changed_address(scene: Scene, entry: bytes, attacker: int) -> bytes:
    address = f"{PROXIED}:{port_of(scene.victim)}".encode()
    assert address in entry
    return entry.replace(address, f"{HERE}:{attacker}".encode())


TAMPERED_ENTRIES: dict[str, Callable[[Scene, bytes, int], bytes]] = {
    "other address": changed_address,
    "other name": lambda scene, entry, _: entry.replace(b"victim", b"member"),
    "other incarnation": lambda scene, entry, _: entry.replace(
        scene.victim._runtime.local_member.incarnation.encode(), b"0123456789abcdef"
    ),
    "entry of another member": lambda scene, entry, _: scene.store.get("rank/1"),
    "not an entry": lambda scene, entry, _: b"[[[[",
    "empty": lambda scene, entry, _: b"",
}


@pytest.mark.parametrize("how", TAMPERED_ENTRIES)
def test_a_tampered_directory_is_an_error_that_names_the_entry(
    scene: Scene, log: Log, how: str
) -> None:
    """The attacker changes an entry, and relays and records what comes to its own address."""
    scene.join("other")
    with socket.create_server((HERE, 0)) as probe:
        attacker = int(probe.getsockname()[1])
    entry = bytes(scene.store.get("rank/0"))
    with Proxy({(HERE, attacker): (HERE, port_of(scene.victim))}) as relay:
        scene.store.set("rank/0", TAMPERED_ENTRIES[how](scene, entry, attacker))
        with pytest.raises(TelegradError, match="rank/0"):
            scene.join("member").call("victim", note_and_return, log, "ran")
        assert relay.accepted == 0
    assert log.entries == []
    scene.store.set("rank/0", entry)
    scene.members_work()


def test_a_name_that_leads_to_another_member_is_an_error(scene: Scene, log: Log) -> None:
    scene.join("other")
    rank = scene.store.get("name/victim")
    scene.store.set("name/victim", "1")
    with pytest.raises(TelegradError, match="victim"):
        scene.join("member").call("victim", note_and_return, log, "ran")
    assert log.entries == []
    scene.store.set("name/victim", rank)
    scene.members_work()


def test_a_removed_entry_is_an_error_that_names_it(scene: Scene, log: Log) -> None:
    entry = scene.store.get("rank/0")
    scene.store.delete_key("rank/0")
    with pytest.raises(TelegradError, match=r"rank/0|victim"):
        scene.join("member").call("victim", note_and_return, log, "ran")
    assert log.entries == []
    scene.store.set("rank/0", entry)
    scene.members_work()


def test_the_entry_of_an_earlier_incarnation_leads_nowhere(scene: Scene, log: Log) -> None:
    """The entry is genuine, but the worker has restarted since."""
    earlier = scene.join("restarted")
    entry = scene.store.get("rank/1")
    earlier.close()
    config = settings(scene.mode)
    restarted = Agent("restarted", store=scene.store, rank=1, config=config)
    with restarted:
        scene.store.set("rank/1", entry)
        with pytest.raises(TelegradError, match="restarted"):
            scene.join("member", timeout=2.0).call("restarted", note_and_return, log, "ran")
    assert log.entries == []
    scene.members_work()
