"""Exceptions that cross a connection: their own type, args and attributes, and where they were
raised.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import json
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from telegrad.errors import (
    CallTimeout,
    GroupBroken,
    PeerLost,
    RemoteError,
    RemoteTraceback,
    UsageError,
)
from telegrad.wire.failures import decode_failure, encode_failure


def raised(error: BaseException) -> BaseException:
    """The exception as it is when it was raised and caught."""
    try:
        raise error
    except BaseException as caught:
        return caught


def trip(error: BaseException) -> Exception:
    return decode_failure(encode_failure(raised(error), "w1", "train"))


def text_of(error: BaseException) -> str:
    assert isinstance(error.__cause__, RemoteTraceback)
    return error.__cause__.text


# Own type, args and attributes


class Plain(Exception):
    pass


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class Formatted(Exception):
    """Its constructor takes something else than what ends up in `args`."""

    constructed = 0

    def __init__(self, code: int, *, reason: str) -> None:
        type(self).constructed += 1
        super().__init__(f"{code}: {reason}")
        self.code = code


class NoSuper(ValueError):
    def __init__(self, code: int) -> None:
        self.code = code


class Reduced(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("reduced")
        self.code = code

    def __reduce__(self) -> tuple[type[Reduced], tuple[int]]:
        return Reduced, (self.code,)


class FileTrouble(OSError):
    pass


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@dataclass
class Structured(Exception):
    code: int
    reason: str = "none"


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


@dataclass(frozen=True)
class FrozenFileTrouble(OSError):
    code: int


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        ValueError(),
        ValueError(1, "two", [3.0]),
        KeyError("échec 大"),
        IndexError(3),
        ZeroDivisionError("division by zero"),
        StopIteration(5),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"),
        SyntaxError("bad", ("file.py", 3, 4, "text", 3, 5)),
        json.JSONDecodeError("expecting", "{", 1),
        FileNotFoundError(errno.ENOENT, "no such file", "/a/b"),
        OSError(errno.EACCES, "denied", "/a", None, "/b"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        FileTrouble(errno.EIO, "broken", "/c"),
        ImportError("no module", name="nothing", path="/d"),
        ModuleNotFoundError("no module", name="nothing"),
        Plain("plain", 1),
        TwoArguments(3, "drei"),
        Formatted(4, reason="vier"),
        NoSuper(5),
        Reduced(6),
        Structured(7, "sieben"),
        RuntimeError("CUDA error: out of memory"),
        torch.cuda.OutOfMemoryError("out of memory"),
        UsageError("wrong use", peer="w0", call="f"),
        CallTimeout("late", peer="w0", call="f"),
        PeerLost("gone", peer="w0", leave_reason="bye"),
        RemoteError("far away", type_name="lib.Odd", traceback_text="...", peer="w0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_as_its_own_type_with_args_and_attributes(error: Exception) -> None:
    received = trip(error)
    assert type(received) is type(error)
    assert received.args == error.args
    assert vars(received) == vars(error)
    assert str(received) == str(error)


def test_attributes_that_live_outside_the_dictionary_arrive_too() -> None:
    missing = trip(FileNotFoundError(errno.ENOENT, "no such file", "/a", None, "/b"))
    assert isinstance(missing, FileNotFoundError)
    assert (missing.errno, missing.strerror, missing.filename, missing.filename2) == (
        2,
        "no such file",
        "/a",
        "/b",
    )
    undecodable = trip(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"))
    assert isinstance(undecodable, UnicodeDecodeError)
    assert (undecodable.object, undecodable.start, undecodable.reason) == (b"\xff", 0, "invalid")
    unimportable = trip(ImportError("no", name="nothing", path="/d"))
    assert isinstance(unimportable, ImportError)
    assert (unimportable.name, unimportable.path) == ("nothing", "/d")
    assert trip(StopIteration(5)).value == 5  # type: ignore[attr-defined]


def test_the_constructor_of_a_user_is_not_run_again() -> None:
    error = Formatted(1, reason="one")
    before = Formatted.constructed
    trip(error)
    assert Formatted.constructed == before


def test_attributes_of_any_kind() -> None:
    error = Plain("with luggage")
    error.tensor = torch.arange(10_000)  # type: ignore[attr-defined]
    error.function = lambda value: value + 1  # type: ignore[attr-defined]
    received: Any = trip(error)
    assert torch.equal(received.tensor, torch.arange(10_000))
    received.tensor[0] = 5
    assert received.function(1) == 2


def test_notes_travel() -> None:
    error = Plain("noted")
    error.__notes__ = ["while training"]
    assert trip(error).__notes__ == ["while training"]


def test_a_local_exception_class() -> None:
    class Local(ValueError):
        pass

    received = trip(Local("here", 2))
    assert type(received).__name__ == "Local"
    assert isinstance(received, ValueError)
    assert received.args == ("here", 2)


def test_a_group_arrives_with_all_its_exceptions() -> None:
    group = getattr(builtins, "ExceptionGroup", None)
    if group is None:
        pytest.skip("Python 3.10 has no exception groups")
    received = trip(group("several", [ValueError(1), TwoArguments(2, "b")]))
    assert type(received) is group
    assert [type(error) for error in received.exceptions] == [ValueError, TwoArguments]  # type: ignore[attr-defined]
    assert received.exceptions[1].reason == "b"  # type: ignore[attr-defined]


def test_one_of_ours_learns_where_it_came_from() -> None:
    received = trip(UsageError("wrong"))
    assert isinstance(received, UsageError)
    assert received.peer == "w1"
    broken = trip(GroupBroken("incomplete", missing=("w3",)))
    assert isinstance(broken, GroupBroken)
    assert (broken.missing, broken.peer) == (("w3",), "w1")


# What cannot be rebuilt


def unpicklable() -> Exception:
    error = Plain("held")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


class Unbuildable(Exception):
    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _explode, ()


class NotAnException(Exception):
    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def _explode() -> None:
    raise RuntimeError("cannot be rebuilt")


class PickyFileTrouble(OSError):
    """Pickles like any OSError, with its args, which its constructor does not understand."""

    def __init__(self, path: str, *, owner: str) -> None:
        super().__init__(errno.EACCES, "denied", path)
        self.owner = owner


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (SystemExit(3), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError"),
        (unpicklable(), f"{__name__}.Plain"),
        (Unbuildable("odd"), f"{__name__}.Unbuildable"),
        (NotAnException("odd"), f"{__name__}.NotAnException"),
        (PickyFileTrouble("/a", owner="local_member"), f"{__name__}.PickyFileTrouble"),
        (FrozenFileTrouble(1), f"{__name__}.FrozenFileTrouble"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_cannot_be_rebuilt_is_a_remote_error_with_its_name_and_traceback(
    error: BaseException, name: str
) -> None:
    received = trip(error)
    assert type(received) is RemoteError
    assert received.type_name == name
    assert received.peer == "w1"
    assert str(received).startswith(f"{name} on worker 'w1' in train: ")
    assert str(error) in str(received)
    assert "in raised" in received.traceback_text
    assert "in raised" in text_of(received)


def test_an_exception_that_cannot_be_changed_arrives_somehow() -> None:
    received = trip(Frozen(4))
    assert isinstance(received, Frozen | RemoteError)
    assert "Frozen" in text_of(received)


def test_an_exception_without_words_arrives() -> None:
    received = trip(Silent("args are fine"))
    assert type(received) is Silent
    assert received.args == ("args are fine",)


def test_an_exception_without_words_that_cannot_be_rebuilt_says_so() -> None:
    error = Silent()
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    received = trip(error)
    assert isinstance(received, RemoteError)
    assert "str() of the Silent raised RuntimeError(no words)" in str(received)


def test_words_of_a_class_of_the_users_own_travel_as_text() -> None:
    class Words(str):
        pass

    class Eloquent(Exception):
        def __str__(self) -> str:
            return Words("many words")

    error = Eloquent()
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    assert "many words" in str(trip(error))


def test_surrogates_in_a_message_survive() -> None:
    error = Plain("odd \ud800 text")
    assert str(trip(error)) == "odd \ud800 text"


# The remote traceback


def of_telegrad(function: Any) -> BaseException:
    """Call as our own code does: the first frames of the traceback are ours."""
    namespace: dict[str, Any] = {"__name__": "telegrad.server.connection", "function": function}
    source = (
        "def execute():\n"
        "    return function()\n"
        "def serve():\n"
        "    try:\n"
        "        execute()\n"
        "    except BaseException as error:\n"
        "        return error\n"
    )
    exec(compile(source, "serving.py", "exec"), namespace)
    return namespace["serve"]()  # type: ignore[no-any-return]


def user_function() -> None:
    helper()


def helper() -> None:
    raise TwoArguments(1, "from the helper")


def test_the_cause_is_the_remote_traceback_and_starts_in_the_users_code() -> None:
    received = decode_failure(encode_failure(of_telegrad(user_function), "w1", "user_function"))
    text = text_of(received)
    assert text.startswith(
        "On worker 'w1', in user_function:\nTraceback (most recent call last):\n"
    )
    frames = [line.strip() for line in text.splitlines() if line.lstrip().startswith("File ")]
    assert [frame.rpartition(" in ")[2] for frame in frames] == ["user_function", "helper"]
    assert "serving.py" not in text
    assert text.endswith("TwoArguments: (1, 'from the helper')")


def test_frames_of_ours_below_the_users_are_kept() -> None:
    def calls_us() -> None:
        raise of_telegrad(user_function)

    text = text_of(decode_failure(encode_failure(of_telegrad(calls_us), "w1", "calls_us")))
    assert "calls_us" in text
    assert "serving.py" in text


def test_an_error_that_is_all_ours_still_says_what_it_is() -> None:
    failed = of_telegrad(5)
    text = text_of(decode_failure(encode_failure(failed, "w1", "five")))
    assert text == "On worker 'w1', in five:\nTypeError: 'int' object is not callable"


def test_the_causes_of_the_remote_exception_are_in_the_text() -> None:
    def chained() -> None:
        try:
            helper()
        except TwoArguments as error:
            raise Plain("on top") from error

    received = decode_failure(encode_failure(of_telegrad(chained), "w1", "chained"))
    assert "direct cause" in text_of(received)
    assert "from the helper" in text_of(received)


def test_a_local_traceback_shows_the_remote_one() -> None:
    received = trip(ValueError("shown"))
    shown = "".join(traceback.format_exception(raised(received)))
    assert "On worker 'w1', in train:" in shown
    assert "in raised" in shown
    assert shown.endswith("ValueError: shown\n")


def test_an_exception_that_passes_through_two_workers_keeps_both_stories() -> None:
    first = decode_failure(encode_failure(raised(ValueError("deep")), "w2", "inner"))
    second = decode_failure(encode_failure(raised(first), "w1", "outer"))
    assert type(second) is ValueError
    assert "On worker 'w1', in outer:" in text_of(second)
    assert "On worker 'w2', in inner:" in text_of(second)


def test_an_exception_that_was_never_raised() -> None:
    received = decode_failure(encode_failure(ValueError("fresh"), "w1", "f"))
    assert text_of(received) == "On worker 'w1', in f:\nValueError: fresh"


def test_a_long_message_arrives_whole_and_is_not_repeated() -> None:
    body = encode_failure(ValueError("x" * 1_000_000), "w1", "f")
    assert len(body) < 1_100_000
    error = decode_failure(body)
    assert str(error) == "x" * 1_000_000
    assert "(1000000 characters)" in str(error.__cause__)
    assert len(str(error.__cause__)) < 20_000
