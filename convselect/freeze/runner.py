"""Many calls of the C library as one.

Between two layers of a network nothing of Python is in the caches, and a call through ctypes then takes 2 to 5 us.
`cs_run` of csrc/runner.c makes calls that are written down in an array, one after another, at 0.02 to 0.1 us each. It
does not hold Python's global lock, and returns between two steps after 50 ms, so that signals are seen.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from convselect.freeze.bound import Bound
from convselect.freeze.kernel import FixedCall, FixedCalls
from convselect.kernels import _library

MAX_ARGUMENTS = 8
_FLOATS = (ctypes.c_float, ctypes.c_double, ctypes.c_longdouble)
_SIMPLE: type = ctypes.c_int.__base__  # type: ignore[assignment]


class Slot(NamedTuple):
    """An address that changes from call to call: number `which` of those that are given, plus `offset` bytes."""

    which: int
    offset: int = 0


class _Step(ctypes.Structure):
    """`cs_step` of csrc/convselect.h."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("arity", ctypes.c_int32),
        ("has_status", ctypes.c_int32),
        ("arguments", ctypes.c_int64 * MAX_ARGUMENTS),
    )


class Runner:
    """Calls of C functions as one call, in order. Not for two calls at a time.

    Args:
        bounds: functions of the C library whose parameters are pointers and integers, at most 8 of them. Arguments are
            ints, None, what ctypes passes as a pointer, or slots. If a function's `restype` is None it has no status.
        otherwise: `otherwise(i, status)` computes the result of step i if its function returned a status other than OK,
            or raises; the steps behind it run afterwards.
        words: slots outside the arguments: (word, slot), with a word such as `word_of` returns.

    Raises:
        TypeError: if a function or an argument is of another kind.
        ValueError: if there are more than 8 arguments, or an integer has more than 64 bits.
    """

    def __init__(
        self,
        bounds: Sequence[Bound],
        otherwise: Callable[[int, int], object],
        words: Iterable[tuple[Any, Slot]] = (),
    ) -> None:
        loaded = _library.library()
        assert loaded is not None
        self._otherwise, self._count, self._next = otherwise, len(bounds), ctypes.c_int64(0)
        self._array = (_Step * len(bounds))()
        self._places = [(word, *slot) for word, slot in words]
        for i, bound in enumerate(bounds):
            self._write(i, bound)
        self._owners = [(bound.function, bound.arguments, bound.owners) for bound in bounds]
        self._call = loaded["cs_run"]
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes, self._call.restype = (pointer, size, size, pointer), ctypes.c_int32
        self._steps, self._next_at = ctypes.byref(self._array), ctypes.byref(self._next)

    def _write(self, i: int, bound: Bound) -> None:
        function, arguments, _ = bound
        if len(arguments) > MAX_ARGUMENTS:
            raise ValueError(f"{len(arguments)} arguments, more than {MAX_ARGUMENTS}")
        if function.restype not in (None, ctypes.c_int32) or any(t in _FLOATS for t in function.argtypes or ()):
            raise TypeError(f"{function} has a result or a parameter of another kind")
        step = self._array[i]
        step.function = ctypes.cast(function, ctypes.c_void_p).value
        step.arity, step.has_status = len(arguments), function.restype is not None
        for k, argument in enumerate(arguments):
            if isinstance(argument, Slot):
                offset = i * ctypes.sizeof(_Step) + _Step.arguments.offset + k * ctypes.sizeof(ctypes.c_int64)
                self._places.append((ctypes.c_int64.from_buffer(self._array, offset), *argument))
            else:
                step.arguments[k] = _as_word(argument)

    def run(self, addresses: Sequence[int] = ()) -> None:
        """Make the calls.

        Args:
            addresses: what the slots stand for in this call; they must stay valid until it returns.
        """
        for word, which, offset in self._places:
            word.value = addresses[which] + offset
        first, count = 0, self._count
        while first < count:
            status = self._call(self._steps, first, count, self._next_at)
            first = self._next.value
            if status != _library.OK:
                self._otherwise(first, status)
                first += 1


def joined(functions: Sequence[Any]) -> dict[int, tuple[Any, Callable[[], None] | None]]:
    """Steps of a program that need not be called one by one.

    Args:
        functions: what each step calls.

    Returns:
        Index of a step that is a `FixedCall` with another one beside it, or several of them -> (its result, what to
        call in its place): a runner for the first of a series, None for the rest.
    """
    found: dict[int, tuple[Any, Callable[[], None] | None]] = {}
    if not can_run():
        return found
    for is_fixed, group in itertools.groupby(enumerate(functions), lambda item: isinstance(item[1], _FIXED)):
        series = list(group)
        calls = [call for _, one in series for call in _each(one)] if is_fixed else []
        if len(calls) > 1:
            found |= {i: (one.out, None) for i, one in series}
            found[series[0][0]] = (series[0][1].out, _runner_of(calls).run)
    return found


_FIXED = (FixedCall, FixedCalls)


def _each(fixed: FixedCall | FixedCalls) -> tuple[FixedCall, ...]:
    return (fixed,) if isinstance(fixed, FixedCall) else fixed.calls


def _runner_of(calls: Sequence[FixedCall]) -> Runner:
    return Runner([call.bound for call in calls], lambda i, status: calls[i].otherwise(status))


def can_run() -> bool:
    """Whether arguments fit in 64 bits each, as csrc/runner.c needs it."""
    return _library.available() and ctypes.sizeof(ctypes.c_void_p) == 8


def word_of(structure: ctypes.Structure, name: str) -> Any:
    """A pointer field of a structure, as a word that slots are written to."""
    return ctypes.c_int64.from_buffer(structure, getattr(type(structure), name).offset)


def _as_word(argument: Any) -> int:
    if isinstance(argument, _SIMPLE):
        argument = argument.value  # type: ignore[attr-defined]
    if argument is None:
        return 0
    if isinstance(argument, int):
        if not -(2**63) <= argument < 2**64:
            raise ValueError(f"{argument} does not fit in 64 bits")
        return argument
    try:
        return ctypes.cast(argument, ctypes.c_void_p).value or 0
    except ctypes.ArgumentError as error:
        raise TypeError(f"{type(argument).__name__} is neither an integer nor a pointer") from error
