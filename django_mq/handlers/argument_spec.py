"""Read the annotation of a handler's argument: deliveries, or message classes."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from django_mq.handlers.callables import shown
from django_mq.messages import Delivery
from django_mq.messages.adapters import is_supported
from django_mq.messages.classes import MessageClass, message_class

#: Annotations that need not be resolved; they are often imported only for type checkers.
_PLAIN = re.compile(r"(list\[)?([\w.]+\.)?(Delivery|Any|object)(\[Any\])?\]?")


class Unresolved(Exception):
    """The annotation of a handler's argument names something that no handler can get."""


class ArgumentSpec(NamedTuple):
    """How the argument of a handler is built.

    `classes`: the message classes of the argument, by type; without any, the handler takes plain
    deliveries. `wrapped`: it takes a `Delivery[...]`, whose payload is the instance.
    """

    classes: dict[str, MessageClass]
    wrapped: bool


def takes_plain(function: Callable[..., Any]) -> bool:
    """Return whether the annotation of the argument, if any, can name no message class."""
    annotation = _annotation(function)
    return annotation in (None, Any, object, Delivery) or (
        isinstance(annotation, str) and _PLAIN.fullmatch(annotation) is not None
    )


def argument_spec(function: Callable[..., Any], *, batch: bool) -> ArgumentSpec:
    """Return what the annotation of the argument names; raises Unresolved."""
    hint = _resolved(function)
    listed = typing.get_origin(hint) is list
    if listed:
        [hint] = typing.get_args(hint)
    members = _members(hint)
    wrapped = all(typing.get_origin(each) is Delivery for each in members)
    if wrapped:  # Delivery[A | B], or Delivery[A] | Delivery[B]
        members = tuple(inner for each in members for inner in _members(*typing.get_args(each)))
    found = [message_class(each) for each in members]
    classes = {each.type: each for each in found if each is not None}
    if not classes and not any(isinstance(each, type) and is_supported(each) for each in members):
        if any(map(_names_class, members)):
            raise Unresolved(
                f"the argument of {shown(function)} is annotated with {_resolved(function)}, which"
                " no handler gets: use a message class, Delivery[...] or a list of them"
            )
        return ArgumentSpec({}, False)
    for member, known in zip(members, found, strict=True):
        if known is None:
            raise Unresolved(
                f"the argument of {shown(function)} is annotated with"
                f" {getattr(member, '__qualname__', member)}, which has no @message(...)"
            )
    if listed != batch:
        one = " | ".join(each.cls.__qualname__ for each in classes.values())
        raise Unresolved(_contradiction(function, f"Delivery[{one}]" if wrapped else one, batch))
    return ArgumentSpec(classes, wrapped)


def misfit(function: Callable[..., Any], *, batch: bool) -> str:
    """Return the annotation if the argument, a delivery or a list of them, is certainly none.

    Else "": also if the annotation cannot be resolved, or is a protocol or a type variable, or if a
    wrapper of the annotated function may pass it something else.
    """
    if _annotation(function) is None or hasattr(function, "__wrapped__"):
        return ""
    try:
        hint = _resolved(function)
    except Unresolved:
        return ""
    return "" if _may_be(hint, list if batch else Delivery) else inspect.formatannotation(hint)


def _may_be(hint: Any, given: type) -> bool:
    """Return whether a value of the class `given` may fit the annotation."""
    members = _members(hint)
    if len(members) > 1:
        return any(_may_be(each, given) for each in members)
    kind = typing.get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if typing.is_typeddict(kind) or not issubclass(given, kind):
        return False
    return given is not list or all(_may_be(each, Delivery) for each in typing.get_args(hint))


def _innermost(function: Callable[..., Any]) -> tuple[Any, int]:
    """Return the Python function that gets the delivery, and the index of its parameter.

    The object of a method and the arguments of a partial come before the delivery.
    """
    inner: Any = function
    seen: list[object] = []
    index = 0
    while inner not in seen:
        seen.append(inner)
        if inspect.ismethod(inner):  # first, since it has the attributes of its function
            inner, index = inner.__func__, index + 1
        elif isinstance(inner, functools.partial):
            inner, index = inner.func, index + len(inner.args)
        elif (wrapped := getattr(inner, "__wrapped__", None)) is not None:
            inner = wrapped
        elif not inspect.isroutine(inner):
            inner = getattr(inner, "__call__", inner)  # noqa: B004  # the method that a call runs
    return inner, index


def _annotation(function: Callable[..., Any]) -> Any:
    inner, index = _innermost(function)
    code = getattr(inner, "__code__", None)
    if code is None or index >= code.co_argcount:
        return None
    try:
        return inner.__annotations__.get(code.co_varnames[index])
    except NameError:  # Python 3.14 evaluates them here: too early for a module half imported
        return inspect.Parameter.empty


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _names_class(hint: Any) -> bool:
    return message_class(hint) is not None or any(map(_names_class, typing.get_args(hint)))


def _contradiction(function: Callable[..., Any], one: str, batch: bool) -> str:
    """Say that an annotation and `batch=` disagree; `one` is the annotation of a single message."""
    argument = f"the argument of {shown(function)} is annotated with"
    if batch:
        return (
            f"{argument} {one}, but with batch=True it is a list: annotate it with list[{one}], or"
            " leave out batch=True"
        )
    return (
        f"{argument} list[{one}], but without batch=True it is one message: add batch=True, or"
        f" annotate it with {one}"
    )


def _resolved(function: Callable[..., Any]) -> Any:
    inner, _ = _innermost(function)
    annotation = _annotation(function)

    def bearer() -> None: ...

    bearer.__annotations__ = {"argument": annotation}
    try:
        nonlocals = inspect.getclosurevars(inner).nonlocals
        return typing.get_type_hints(bearer, inner.__globals__, nonlocals)["argument"]
    except Exception as error:
        raise Unresolved(
            f"the annotation {annotation!r} of the argument of {shown(function)} cannot be"
            f" resolved ({error}): import what it names at run time, too, not only for type"
            " checkers"
        ) from error
