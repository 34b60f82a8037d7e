"""What may become a handler, what it is called, and when two of them are one.

Refused with a text that says what to do instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from django_mq.exceptions import InvalidHandler, InvalidName
from django_mq.routing import check_name


def check_function(function: object) -> bool:
    """Return whether it is async; raises InvalidHandler when it cannot take a delivery."""
    if inspect.isclass(function):
        raise InvalidHandler(
            f"{shown(function)} is a class: put @handler on a function, which may make an instance"
        )
    # Duck-typed: django.tasks is there from Django 6.0 on, django_tasks may not be installed.
    if any(
        base.__name__ == "Task" and base.__module__.startswith(("django.tasks", "django_tasks"))
        for base in type(function).__mro__
    ):
        raise InvalidHandler(
            f"{shown(function)} is a Django task: put @handler on a plain function that calls"
            " its enqueue(), or on the function without @task"
        )
    if not callable(function):
        raise InvalidHandler(f"@handler stands on a function, not on a {type(function).__name__}")
    # What runs when it is called: of a partial its function, of an instance its __call__. Not what
    # it wraps: a plain wrapper may well run an async function to its end.
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func
    if not inspect.isroutine(called):
        called = type(called).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise InvalidHandler(
            f"{shown(function)} is a generator: calling it would run nothing; drop the yield"
        )
    try:
        inspect.signature(function).bind(object())
    except TypeError:
        raise InvalidHandler(
            f"{shown(function)} must take one positional argument, the delivery:"
            " def send_confirmation(delivery): ..."
        ) from None
    except ValueError:  # written in C, without a signature
        pass
    return inspect.iscoroutinefunction(called)


def name_of(function: Callable[..., Any]) -> str:
    """Return `module.qualname`, without `<locals>`; raises InvalidHandler if that is no name."""
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
    """Return the function and all that it wraps."""
    layers: list[object] = [function]
    while (inner := getattr(layers[-1], "__wrapped__", None)) is not None and inner not in layers:
        layers.append(inner)
    return layers


def source_of(function: Callable[..., Any]) -> tuple[str, str, str, int] | None:
    """Return module, name, file and line of a Python function, through what wraps it, else None.

    They are the same again after a reload of its module.
    """
    inner: Any = layers_of(function)[-1]
    code = getattr(inner, "__code__", None)
    if code is None:
        return None
    return inner.__module__, inner.__qualname__, code.co_filename, code.co_firstlineno


def shown(function: object) -> str:
    """Return how an error names what `@handler` was put on."""
    return getattr(function, "__qualname__", None) or f"a {type(function).__name__}"
