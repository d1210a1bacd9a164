"""The tree of errors: the one drawn in the docstring, the one in code, and what survives
pickling.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import copy
import inspect
import pickle
import re

import pytest

from telegrad import errors
from telegrad.errors import TelegradError

EXAMPLES: list[Exception] = [
    errors.TelegradError("plain", peer="w1", call="f"),
    errors.UsageError("wrong", peer="w1", call="f"),
    errors.RemoteError("échec", type_name="lib.Odd", traceback_text="Traceback ...", peer="w1"),
    errors.CallTimeout("late", peer="w1", call="f"),
    errors.CallCancelled("stopped", peer="w1", call="f"),
    errors.QueueFull("busy", peer="w1", call="f"),
    errors.PeerLost("gone", peer="w1", call="f", leave_reason="out of memory"),
    errors.GroupBroken("incomplete", missing=["w1", "w2"]),
    errors.WorkersFailed("2 workers failed", failures={}),
    errors.WorkerExited("it failed", peer="w1", exit_code=137, log="w1.log"),
    errors.JoinError("nobody there", peer="w1"),
    errors.ProtocolError("nonsense", peer="w1"),
    errors.AuthenticationError("wrong secret", peer="w1"),
    errors.StoreTampered("forged", peer="w1"),
    errors.SerializationError("a lock", path="args[0].lock", peer="w1", call="f"),
    errors.StaleReference("gone", peer="w1", call="f"),
    errors.InternalError("impossible", peer="w1", call="f"),
    errors.ArgumentTypeError("a text", peer="w1", call="f"),
    errors.RemoteTraceback("Traceback ..."),
]

NAMES_OF_EXAMPLES = [type(example).__name__ for example in EXAMPLES]


def classes() -> dict[str, type[Exception]]:
    """Every exception class that the module defines."""
    found = inspect.getmembers(
        errors, lambda value: inspect.isclass(value) and value.__module__ == errors.__name__
    )
    return {name: value for name, value in found if issubclass(value, Exception)}


def drawn() -> list[tuple[str, str | None, list[str]]]:
    """The tree of the docstring: each name with its parent and the foreign types that it also
    is.
    """
    tree: list[tuple[str, str | None, list[str]]] = []
    branch: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^(    [│├└─ ]*)([A-Z]\w+)(.*)$", line)
        if match is None:
            continue
        column, name = len(match[1]), match[2]
        branch[column] = name
        also = re.search(r"\(also (.*)\)", match[3])
        tree.append((name, branch.get(column - 4), re.split(r" and |, ", also[1]) if also else []))
    return tree


def foreign(name: str) -> type[BaseException]:
    if name.startswith("concurrent.futures."):
        return getattr(concurrent.futures, name.rpartition(".")[2])  # type: ignore[no-any-return]
    return getattr(builtins, name)  # type: ignore[no-any-return]


def test_the_docstring_names_exactly_the_classes_that_exist() -> None:
    assert sorted(name for name, _, _ in drawn()) == sorted(set(classes()) - {"RemoteTraceback"})


@pytest.mark.parametrize(("name", "parent", "also"), drawn(), ids=[name for name, _, _ in drawn()])
def test_a_class_stands_where_the_docstring_draws_it(
    name: str, parent: str | None, also: list[str]
) -> None:
    cls = classes()[name]
    ours = [base for base in cls.__bases__ if issubclass(base, TelegradError)]
    assert [base.__name__ for base in ours] == ([parent] if parent else [])
    for other in also:
        assert issubclass(cls, foreign(other))


def test_all_of_them_are_runtime_errors_as_with_torch() -> None:
    assert all(issubclass(classes()[name], RuntimeError) for name, _, _ in drawn())


def test_every_class_has_an_example_here() -> None:
    assert sorted(NAMES_OF_EXAMPLES) == sorted(classes())


@pytest.mark.parametrize("error", EXAMPLES, ids=NAMES_OF_EXAMPLES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_message_and_attributes(error: Exception, protocol: int) -> None:
    copied = pickle.loads(pickle.dumps(error, protocol))
    assert type(copied) is type(error)
    assert copied.args == error.args
    assert vars(copied) == vars(error)
    assert str(copied) == str(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=NAMES_OF_EXAMPLES)
def test_copying_keeps_type_message_and_attributes(error: Exception) -> None:
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert (type(copied), copied.args, vars(copied)) == (type(error), error.args, vars(error))


def test_all_failures_travel() -> None:
    error = errors.WorkersFailed.of(
        {"w1": ValueError("no"), "w2": errors.PeerLost("gone", peer="w2")}
    )
    copied = pickle.loads(pickle.dumps(error))
    assert [repr(each) for each in copied.failures.values()] == [
        "ValueError('no')",
        "PeerLost('gone')",
    ]
    assert (
        str(copied) == str(error) == "2 workers failed:\n  w1: ValueError: no\n  w2: PeerLost: gone"
    )


def test_attributes_that_were_set_later_travel_too() -> None:
    error = errors.SerializationError("a lock", path="args[0]")
    error.peer = "w3"
    error.call = "train"
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.peer, copied.call, copied.path) == ("w3", "train", "args[0]")


def test_the_examples_carry_the_attributes_that_the_docstrings_promise() -> None:
    remote, lost, broken = EXAMPLES[2], EXAMPLES[6], EXAMPLES[7]
    assert isinstance(remote, errors.RemoteError)
    assert (remote.type_name, remote.traceback_text, remote.peer) == (
        "lib.Odd",
        "Traceback ...",
        "w1",
    )
    assert isinstance(lost, errors.PeerLost)
    assert (lost.peer, lost.call, lost.leave_reason) == ("w1", "f", "out of memory")
    assert isinstance(broken, errors.GroupBroken)
    assert broken.missing == ("w1", "w2")


def test_a_message_is_all_that_is_needed() -> None:
    for cls in classes().values():
        assert cls("message").args == ("message",)


class Quota(errors.UsageError):
    """A subclass of a user, whose constructor takes other arguments than the message."""

    def __init__(self, used: int, limit: int) -> None:
        super().__init__(f"{used} of {limit}", call="reserve")
        self.used = used
        self.limit = limit


def test_a_subclass_with_another_constructor_pickles() -> None:
    copied = pickle.loads(pickle.dumps(Quota(3, 2)))
    assert isinstance(copied, Quota)
    assert (str(copied), copied.used, copied.limit, copied.call) == ("3 of 2", 3, 2, "reserve")


@pytest.mark.parametrize(
    ("cls", "caught_as"),
    [
        (errors.CallTimeout, TimeoutError),
        (errors.PeerLost, ConnectionError),
        (errors.GroupBroken, OSError),
        (errors.CallCancelled, concurrent.futures.CancelledError),
        (errors.SerializationError, TypeError),
        (errors.UsageError, ValueError),
    ],
)
def test_an_error_is_caught_as_what_python_calls_it(
    cls: type[Exception], caught_as: type[Exception]
) -> None:
    with pytest.raises(caught_as, match="message"):
        raise cls("message")


def test_a_remote_traceback_shows_its_text_on_a_line_of_its_own() -> None:
    assert (
        str(errors.RemoteTraceback("Traceback (most recent call last):"))
        == "\nTraceback (most recent call last):"
    )
