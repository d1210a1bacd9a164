"""The settings: defaults, what is refused and how clearly, and the environment."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from telegrad.config import TRANSPORTS, Config
from telegrad.errors import UsageError

SECRET = "correct horse battery staple"


def test_the_defaults_are_valid_and_safe() -> None:
    config = Config()
    assert config.listen == "127.0.0.1"
    assert config.secret is None
    assert config.timeout == 60.0
    assert config.transports == TRANSPORTS == ("memory", "unix", "tcp")
    assert config.only_registered is False


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout = 1.0  # type: ignore[misc]


def test_equal_settings_are_equal() -> None:
    assert Config(timeout=3) == Config(timeout=3.0) != Config()


def test_the_secret_is_not_shown() -> None:
    assert SECRET not in repr(Config(secret=SECRET))
    assert SECRET not in str(Config(secret=SECRET))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout": 0}, "timeout must be positive or None, not 0"),
        ({"timeout": -1.5}, "timeout must be positive or None, not -1.5"),
        ({"timeout": math.nan}, "timeout is a finite number of seconds, not nan"),
        ({"timeout": "5"}, "timeout is a finite number of seconds, not '5'"),
        ({"join_timeout": None}, "join_timeout is a finite number of seconds, not None"),
        ({"threads": "16"}, "threads is a whole number, not '16'"),
        ({"max_frame": 1.5}, "max_frame is a whole number, not 1.5"),
        ({"timeout": math.inf}, "timeout is a finite number of seconds, not inf"),
        ({"join_timeout": 0}, "join_timeout must be positive, not 0"),
        ({"connect_timeout": -1}, "connect_timeout must be positive, not -1"),
        ({"heartbeat_interval": 0}, "heartbeat_interval must be positive, not 0"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout must be positive, not 0"),
        (
            {"heartbeat_interval": 5, "heartbeat_timeout": 5},
            "heartbeat_timeout (5) must exceed heartbeat_interval (5)",
        ),
        ({"transports": ("unix", "pigeon")}, "unknown transports ['pigeon']; choose from"),
        ({"transports": ()}, "transports must not be empty"),
        ({"threads": 0}, "threads must be from 1 to max_threads (2048), not 0"),
        ({"threads": 9, "max_threads": 8}, "threads must be from 1 to max_threads (8), not 9"),
        ({"max_frame": 0}, "max_frame must be"),
        ({"shared_memory_min_bytes": -1}, "shared_memory_min_bytes must"),
        ({"shared_memory_limit": -1}, "shared_memory_limit must"),
        ({"max_idle_connections": -1}, "max_idle_connections must"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Config(**settings)
    assert str(caught.value).startswith("Config: ")
    assert message in str(caught.value)


def test_a_whole_number_may_be_a_float() -> None:
    assert Config(shared_memory_limit=2e9).shared_memory_limit == 2_000_000_000  # type: ignore[arg-type]


def test_a_short_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(UsageError, match="at least 16 characters") as caught:
        Config(secret="hunter2")
    assert "hunter2" not in str(caught.value)


def test_the_shortest_secret_and_the_odd_limits_are_accepted() -> None:
    assert (
        Config(
            secret="x" * 16, timeout=None, threads=1, max_threads=1, max_idle_connections=0
        ).timeout
        is None
    )


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environment({}) == Config()
    assert (
        Config.from_environment({"TELEGRAD_TIMEOUT": "", "TIMEOUT": "3", "PATH": "/bin"})
        == Config()
    )


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("TELEGRAD_TIMEOUT", "2.5", "timeout", 2.5),
        ("TELEGRAD_TIMEOUT", "none", "timeout", None),
        ("TELEGRAD_JOIN_TIMEOUT", "7", "join_timeout", 7.0),
        ("TELEGRAD_SECRET", SECRET, "secret", SECRET),
        ("TELEGRAD_LISTEN", "0.0.0.0", "listen", "0.0.0.0"),
        ("TELEGRAD_ADVERTISE", "node7", "advertise", "node7"),
        ("TELEGRAD_TRANSPORTS", "tcp, unix", "transports", ("tcp", "unix")),
        ("TELEGRAD_THREADS", "3", "threads", 3),
        ("TELEGRAD_MAX_FRAME", "1048576", "max_frame", 1 << 20),
        ("TELEGRAD_ONLY_REGISTERED", "true", "only_registered", True),
        ("TELEGRAD_ONLY_REGISTERED", "0", "only_registered", False),
        ("TELEGRAD_UNMAPPED_DEVICES", "cpu", "unmapped_devices", "cpu"),
        (
            "TELEGRAD_DEVICE_MAPS",
            '{"ps": {"cuda:0": "cpu"}}',
            "device_maps",
            {"ps": {"cuda:0": "cpu"}},
        ),
    ],
)
def test_a_variable_fills_its_field_and_no_other(
    name: str, text: str, field: str, value: Any
) -> None:
    config = Config.from_environment({name: text})
    assert getattr(config, field) == value
    assert config == dataclasses.replace(Config(), **{field: value})


def test_every_field_can_be_set_from_the_environment() -> None:
    texts = {
        "float": "3600",
        "float | None": "3600",
        "int": "64",
        "int | None": "64",
        "tuple[str, ...]": "tcp",
    }
    given = {entry.name: texts.get(str(entry.type), SECRET) for entry in dataclasses.fields(Config)}
    given |= {
        entry.name: str(not entry.default)
        for entry in dataclasses.fields(Config)
        if entry.type == "bool"
    }
    given |= {"device_maps": '{"ps": {"cuda:0": "cpu"}}', "unmapped_devices": "refuse"}
    given |= {"bulk_engine": "tcp"}
    given |= {"tls": "on"}  # the default: certificates, which are also given, need it
    config = Config.from_environment(
        {"TELEGRAD_" + name.upper(): text for name, text in given.items()}
        | {"TELEGRAD_HEARTBEAT_INTERVAL": "1"}
    )
    unchanged = [
        entry.name
        for entry in dataclasses.fields(Config)
        if getattr(config, entry.name) == entry.default
    ]
    assert unchanged == ["tls"]
    assert Config.from_environment({"TELEGRAD_TLS": "off"}).tls == "off"


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_MAX_IDLE_CONNECTIONS", "5")
    assert Config.from_environment().max_idle_connections == 5


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("TELEGRAD_TIMEOUT", "soon", "float | None"),
        ("TELEGRAD_THREADS", "2.5", "int"),
        ("TELEGRAD_ONLY_REGISTERED", "perhaps", "bool"),
        ("TELEGRAD_JOIN_TIMEOUT", "none", "float"),
        ("TELEGRAD_DEVICE_MAPS", "cuda:0", "Mapping[str, Mapping[str, str]]"),
        ("TELEGRAD_DEVICE_MAPS", "[0]", "Mapping[str, Mapping[str, str]]"),
    ],
)
def test_a_variable_of_the_wrong_type_is_named(name: str, text: str, kind: str) -> None:
    with pytest.raises(UsageError) as caught:
        Config.from_environment({name: text})
    assert str(caught.value) == f"{name}={text!r} is not a valid {kind}"


def test_values_from_the_environment_are_validated_too() -> None:
    with pytest.raises(UsageError, match="timeout must be positive"):
        Config.from_environment({"TELEGRAD_TIMEOUT": "-1"})
    with pytest.raises(UsageError, match="unknown transports"):
        Config.from_environment({"TELEGRAD_TRANSPORTS": "unix,pigeon"})
    with pytest.raises(UsageError, match="at least 16 characters"):
        Config.from_environment({"TELEGRAD_SECRET": "short"})


def test_an_unknown_variable_is_reported_with_the_nearest_name() -> None:
    with pytest.warns(UserWarning, match="TELEGRAD_TIMOUT is not .* did you mean TELEGRAD_TIMEOUT"):
        assert Config.from_environment({"TELEGRAD_TIMOUT": "3"}) == Config()
    with pytest.warns(UserWarning, match="TELEGRAD_X_SERVICE_HOST is not a setting of Telegrad$"):
        Config.from_environment({"TELEGRAD_X_SERVICE_HOST": "10.0.0.1"})


def test_variables_of_a_placement_and_of_tests_are_not_reported() -> None:
    names = ("TELEGRAD_RANK", "TELEGRAD_STORE", "TELEGRAD_TEST_SEED", "TELEGRAD_BENCH_PEERS")
    assert Config.from_environment(dict.fromkeys(names, "1")) == Config()
