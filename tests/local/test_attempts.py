"""Which failed attempts to reach a worker show that it is lost."""

from __future__ import annotations

import pytest

from telegrad import Config
from telegrad.group import failure_detector
from telegrad.group.failure_detector import Attempts
from telegrad.group.hosts import host_id
from telegrad.group.membership import Member
from telegrad.wire.handshake import Incarnation

CONFIG = Config(heartbeat_timeout=30.0, heartbeat_interval=5.0)
LIMIT = 100.0
LOOPBACK, ADDRESS = "tcp:127.0.0.1:5", "tcp:10.0.0.1:5"


class Clock:
    """A clock that stands still until it is set."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failure_detector, "time", clock)
    return clock


def attempts(address: str = ADDRESS, host: str = "another") -> Attempts:
    member = Member("w1", 1, Incarnation("1"), (address,), host=host)
    return Attempts(member, CONFIG, LIMIT)


@pytest.mark.parametrize(("address", "host"), [(LOOPBACK, ""), (ADDRESS, host_id())])
def test_a_refusal_of_this_host_is_final(clock: Clock, address: str, host: str) -> None:
    assert attempts(address, host).failed(refused=True) == (
        "no process listens at its address any more"
    )
    assert attempts(address, host).failed(refused=False) == ""


def test_refusals_of_another_host_are_silence(clock: Clock) -> None:
    series = attempts()
    assert series.failed(refused=True) == ""
    clock.now += 29
    assert series.failed(refused=True) == ""
    clock.now += 1
    assert "no process listens at its address any more for 30 s" in series.failed(refused=True)


def test_refusals_count_only_without_another_failure_between_them(clock: Clock) -> None:
    series = attempts()
    for _ in range(4):
        assert series.failed(refused=True) == ""
        clock.now += 20
        assert series.failed(refused=False) == ""


def test_other_failures_are_a_loss_after_the_limit(clock: Clock) -> None:
    series = attempts()
    clock.now += LIMIT - 1
    assert series.failed(refused=False) == ""
    clock.now += 1
    assert series.failed(refused=False) == "it could not be reached for 100 s"
