"""Check that an object can be a handler; find its name, its wrapped functions and its source."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable
from types import CodeType
from typing import Any

from django_mq.exceptions import InvalidHandler, InvalidName
from django_mq.policy.names import check_name


def check_function(function: object) -> bool:
    """Return whether `function` is async; raise InvalidHandler if it cannot take a delivery."""
    if inspect.isclass(function):
        raise InvalidHandler(
            f"{shown(function)} is a class: put @handler on a function, which may make an instance"
        )
    if is_django_task(function):
        raise InvalidHandler(
            f"{shown(function)} is a Django task: put @handler on a plain function that calls"
            " its enqueue(), or on the function without @task"
        )
    if not callable(function):
        raise InvalidHandler(f"put @handler on a function, not on a {type(function).__name__}")
    # The code that a call runs: a partial's function, an instance's __call__. Not the wrapped
    # function: a plain wrapper may run an async function to its end.
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func
    if not inspect.isroutine(called):
        called = type(called).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise InvalidHandler(
            f"{shown(function)} is a generator: calling it runs nothing; remove the yield"
        )
    _check_signature(function)
    return inspect.iscoroutinefunction(called)


def _check_signature(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature
        return
    try:
        signature.bind(object())
    except TypeError:
        text = "must take one positional argument, the delivery: def send(delivery): ..."
        if next(iter(signature.parameters), "") == "self":
            text = (
                "is a method of a class: put @handler on a function outside, or register a method"
                " of an instance by handler(...)(instance.method)"
            )
        raise InvalidHandler(f"{shown(function)} {text}") from None


def is_django_task(thing: object) -> bool:
    """Return whether `thing` is a Django task."""
    # Compared by name: Django 5.2 has no django.tasks, and django_tasks may not be installed.
    return any(
        base.__name__ == "Task" and base.__module__.startswith(("django.tasks", "django_tasks"))
        for base in type(thing).__mro__
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return `module.qualname` without `<locals>`; raise InvalidHandler if that is not a name."""
    qualname = getattr(function, "__qualname__", None)
    if qualname is None:
        raise InvalidHandler(
            f"a {type(function).__name__} has no name of its own: give @handler(..., name=...)"
        )
    try:
        return check_name(
            f"{function.__module__}.{qualname}".replace("<locals>.", ""), "handler name"
        )
    except InvalidName as error:
        raise InvalidHandler(f"{error}; give @handler(..., name=...)") from error


def layers_of(function: Callable[..., Any]) -> list[object]:
    """Return the function and the functions that it wraps, outermost first."""
    layers: list[object] = [function]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None and inner not in layers:
        layers.append(inner)
    return layers


def source_of(function: Callable[..., Any]) -> tuple[str, str, str, int] | None:
    """Return module, name, file and line of the innermost function; None if it is not Python.

    They stay the same if the module is reloaded.
    """
    inner: Any = layers_of(function)[-1]
    code = code_of(function)
    if code is None:
        return None
    return inner.__module__, inner.__qualname__, code.co_filename, code.co_firstlineno


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of the innermost function; None if it is not Python."""
    return getattr(layers_of(function)[-1], "__code__", None)


def is_same_function(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Return whether two functions of one code object have the same defaults, closure and self.

    >>> def repeat(times):
    ...     return lambda text: text * times
    >>> is_same_function(repeat(2), repeat(2)), is_same_function(repeat(2), repeat(3))
    (True, False)
    """
    values, others = _values_of(one), _values_of(other)
    return len(values) == len(others) and all(map(operator.is_, values, others))


def _values_of(function: Callable[..., Any]) -> list[object]:
    """Return the values that the innermost function has from outside its code.

    They are compared by identity: the `==` of a user's object may do anything.
    """
    inner: Any = layers_of(function)[-1]
    values = [*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()]
    values.append(getattr(inner, "__self__", None))
    for cell in inner.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that the factory has not bound yet
            values.append(cell.cell_contents)
    return values


def shown(function: object) -> str:
    """Return how an error text names the decorated object."""
    return getattr(function, "__qualname__", None) or f"a {type(function).__name__}"
