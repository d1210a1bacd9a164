"""Functions that run on other workers: their marks, and what a server knows of them.

Marks on a function control how calls from peers are served. They are attributes of the function,
so they are known wherever the function is. `DeferredReply` is what a function returns whose result
is not available yet.

The callee's side: `FunctionRegistry` says which functions peers may call, and a `ServedFunction`
how long each takes.

State: `FunctionRegistry._served` only grows, up to `MAX_FUNCTIONS`; `dict.setdefault` is atomic, so
it needs no lock. `_trusted`, `_definers` and `_exposed` grow while modules are imported. The
durations in `ServedFunction` are statistics; a race loses a sample.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch.futures
from torch import Tensor

from telegrad.errors import (
    ArgumentTypeError,
    InternalError,
    SerializationError,
    UsageError,
    error_text,
)
from telegrad.futures import Future
from telegrad.messages.device_routes import ANY_DEVICE_MARK
from telegrad.wire import codec

MAX_FUNCTIONS = 1 << 14
# A class with this attribute has instances that are callable, hashable and never change.
BY_REFERENCE = "pickles_by_reference"
# the attribute of a callable with the number of arguments that are not those of the user
HIDDEN_ARGUMENTS = "hidden_arguments"
Function = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])
ASYNC_MARK = "_wrapped_async_rpc_function"
_SERVED_MARK = "_runs_for_peers"
_INTERNAL_MARK = "_internal_to_telegrad"
_trusted: set[Any] = set()
_definers: dict[Any, str] = {}
P = ParamSpec("P")
T = TypeVar("T")
_exposed: set[Function] = set()


def describe(function: Function) -> str:
    """Return the name of a function for messages and logs."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(name) if name else repr(function)


def check_callable(function: object) -> None:
    """Raise `ArgumentTypeError` if what a call is to run is no function."""
    if not callable(function):
        raise ArgumentTypeError(
            f"the function of a call must be callable, not {type(function).__name__}"
        )


def checked_args(args: Any) -> tuple[Any, ...]:
    """Return the arguments of a call. A single tensor or string is not a sequence of them."""
    if args is None:
        return ()
    is_one_value = isinstance(args, Tensor) or (isinstance(args, (str, bytes, Mapping)) and args)
    if is_one_value or not isinstance(args, Iterable):
        raise UsageError(
            f"args must be a tuple, not {type(args).__name__}; write args=(value,) for one argument"
        )
    return tuple(args)


def checked_kwargs(kwargs: Any) -> dict[str, Any]:
    """Return the keyword arguments of a call."""
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise UsageError(f"kwargs must be a dict with the names of parameters, not {kwargs!r:.100}")
    return dict(kwargs)


class Promise(Protocol):
    """A value that is not there yet. It costs less than a future."""

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` when the value is available, or at once if it is."""

    def value(self) -> Any:
        """Return the value, or raise the error that was set instead."""


class DeferredReply:
    """Reply with the value of a future or promise once it is there. A function may return this.

    `on_abandoned()` is called if the caller no longer waits: it cancelled the call, its deadline
    has passed, or it was lost.
    """

    __slots__ = ("_value", "on_abandoned")

    def __init__(
        self,
        value: torch.futures.Future[Any] | Promise,
        on_abandoned: Callable[[], None] | None = None,
    ) -> None:
        self._value = value
        self.on_abandoned = on_abandoned

    @property
    def future(self) -> torch.futures.Future[Any]:
        """The value as a future."""
        if isinstance(self._value, torch._C.Future):
            return self._value
        future: Future[Any] = Future()
        self._value.listen(future._complete_from)
        self._value = future
        return future

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(done)` when the value is available; `done.value()` returns or raises
        it.
        """
        if isinstance(self._value, torch._C.Future):
            self._value.add_done_callback(callback)
        else:
            self._value.listen(callback)


def serve_as(function: Function, served: Function) -> None:
    """When a peer calls `function`, run `served` instead, which may return a `DeferredReply`."""
    setattr(function, _SERVED_MARK, served)


def served_form(function: Function) -> Function:
    """Return what runs when a peer calls `function`, which may be a bound method."""
    served = getattr(function, _SERVED_MARK, None)
    if served is None:
        return function
    instance = getattr(function, "__self__", None)
    return served if instance is None else MethodType(served, instance)


def trusted(function: F) -> F:
    """Decorate a function or class of Telegrad that is served also with `only_registered`.

    Trusted functions are compared by identity, so a peer cannot send one of its own that claims to
    be trusted.
    """
    _trusted.add(function)
    return function


def definer(takes: str) -> Callable[[F], F]:
    """Decorate what the pickle of a function of Telegrad may apply to one argument.

    The argument is a ``name`` or a registered ``function``. The result is trusted.
    """

    def mark(function: F) -> F:
        _definers[function] = takes
        return function

    return mark


def is_trusted(function: Any) -> bool:
    """Return whether `function`, or its class, is marked with `trusted`."""
    return function in _trusted or type(function) in _trusted


def internal(function: F) -> F:
    """Decorate a function of Telegrad itself: its calls do not count as work of the user."""
    setattr(function, _INTERNAL_MARK, True)
    return trusted(function)


def is_internal(function: Function) -> bool:
    """Return whether `function` is marked with `internal`."""
    return hasattr(function, _INTERNAL_MARK)


def expose(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that workers with ``Config(only_registered=True)`` may be asked to run."""
    _exposed.add(function)
    return function


def unregistered_error(worker: str, name: str) -> UsageError:
    """Return the error of a call of a function that is not registered on `worker`."""
    return UsageError(
        f"worker {worker!r} serves only registered functions, and {name} is not one: mark it with "
        "@telegrad.expose there"
    )


def no_future_error(name: str, value: object) -> UsageError:
    """Return the error of an asynchronous function that returned `value`."""
    return UsageError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
        f"but {name} returned {type(value).__name__}"
    )


class ServedFunction:
    """A function that peers call here, and how long it takes."""

    __slots__ = (
        "any_device",
        "function",
        "internal",
        "is_deferred",
        "must_run",
        "name",
        "reply_may_wait",
        "run",
        "seconds",
    )

    def __init__(self, function: Function) -> None:
        self.function = function
        self.run = served_form(function)
        self.name = describe(function)
        self.is_deferred = getattr(self.run, ASYNC_MARK, None) is not None
        self.internal = is_internal(function)
        self.any_device = hasattr(function, ANY_DEVICE_MARK)
        # even if its caller no longer waits
        self.must_run = bool(getattr(function, "must_run", False))
        # a moment, until the worker has less to do
        self.reply_may_wait = bool(getattr(function, "answer_may_wait", False))
        # a moving average, which `ServerConnection` keeps; negative: never run
        self.seconds = -1.0

    def __repr__(self) -> str:
        return f"<ServedFunction {self.name} {self.seconds * 1e6:.0f} us>"


class FunctionRegistry:
    """The functions that peers have called on one agent."""

    def __init__(self, only_registered: bool) -> None:
        self._only_registered = only_registered
        self._served: dict[Function, ServedFunction] = {}

    def __repr__(self) -> str:
        return f"<FunctionRegistry of {len(self._served)} functions>"

    def find(self, function: Function) -> ServedFunction:
        """Return the `ServedFunction` of `function`, which all connections share."""
        served = self._served.get(function)
        if served is None:
            served = ServedFunction(function)
            if len(self._served) < MAX_FUNCTIONS:
                served = self._served.setdefault(function, served)
        return served

    def decode(self, definition: bytes) -> ServedFunction:
        """Return the function that a peer has sent: pickled by reference.

        With `only_registered`, the pickle is not loaded, and no module is imported: what it names
        is looked up among the registered functions.
        """
        if not self._only_registered:
            return self.find(codec.decode(definition))
        try:
            return self.find(_registered.decode(definition))
        except LookupError as error:
            return ServedFunction(UnregisteredFunction(str(error.args[0])))

    def is_allowed(self, function: Function | None) -> bool:
        """Return whether peers may call `function`; None: a function that is sent by value."""
        if not self._only_registered:
            return True
        try:
            return function in _exposed or is_trusted(function)
        except TypeError:  # not hashable, so it was never exposed
            return False


class _RegisteredFunctions:
    """The functions that are exposed or trusted, by name and by the pickle of their reference.

    State: both tables are made again when functions were added; a race makes them twice.
    """

    def __init__(self) -> None:
        self._size = 0
        self._by_name: dict[tuple[str, str], Any] = {}
        self._by_pickle: dict[bytes, Any] = {}

    def decode(self, definition: bytes) -> Any:
        """Return the registered function that a pickle refers to.

        The pickle may also apply one of `_definers` to a name or a registered function. Raise
        `LookupError` with the name of the function otherwise.
        """
        self._update()
        if definition in self._by_pickle:
            return self._by_pickle[definition]
        stack: list[Any] = []
        memo: list[Any] = []
        try:
            for opcode, argument, _ in pickletools.genops(definition):
                name = opcode.name
                if name in ("SHORT_BINUNICODE", "BINUNICODE"):
                    stack.append(argument)
                elif name == "STACK_GLOBAL":
                    function, module = stack.pop(), stack.pop()
                    stack.append(self._find(module, function))
                elif name == "MEMOIZE":
                    memo.append(stack[-1])
                elif name in ("BINGET", "LONG_BINGET"):
                    stack.append(memo[int(argument or 0)])
                elif name == "TUPLE1":
                    stack.append((stack.pop(),))
                elif name == "REDUCE":
                    (part,), define = stack.pop(), stack.pop()
                    takes = "name" if isinstance(part, str) else "function"
                    if _definers.get(define) != takes:
                        raise LookupError(describe(define))
                    stack.append(define(part))
                elif name not in ("PROTO", "FRAME", "STOP"):
                    raise LookupError("a function that is not pickled by its name")
            (found,) = stack
        except (ValueError, IndexError, TypeError) as error:  # not a pickle, or a broken one
            raise LookupError(f"a function with an invalid definition ({error})") from None
        if found not in _exposed and not is_trusted(found):
            raise LookupError(describe(found))
        return found

    def _find(self, module: str, name: str) -> Any:
        try:
            return self._by_name[module, name]
        except KeyError:
            raise LookupError(f"{module}.{name}") from None

    def _update(self) -> None:
        size = len(_exposed) + len(_trusted) + len(_definers)
        if size == self._size:
            return
        for function in (*_exposed, *_trusted, *_definers):
            module = getattr(function, "__module__", None)  # methods of builtin types have none
            self._by_name[str(module), function.__qualname__] = function
        for function in list(_exposed):
            try:
                self._by_pickle[pickle.dumps(function, 5)] = function
            except Exception:
                continue  # it cannot be sent by reference, so no definition can name it
        self._size = size


_registered = _RegisteredFunctions()


class UnregisteredFunction:
    """Stand for a function that is not registered, where only registered ones are served."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InternalError("a function that is not registered was called")


class UndecodableFunction:
    """Stand for a function whose definition could not be received or unpickled. Calling it raises.

    It keeps the reason as text, because the exception would keep the message alive that it was
    raised for.
    """

    def __init__(self, error: BaseException) -> None:
        self._reason = f"{type(error).__name__}: {error_text(error)}"
        self.__qualname__ = "a function that this worker does not have"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SerializationError(
            f"this worker cannot find the function: {self._reason}. "
            "The RPC pickler does not serialize functions that are importable on the caller: "
            "the same module must be importable here and hold the function under the same name"
        )
