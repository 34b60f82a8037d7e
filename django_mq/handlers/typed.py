"""Call a handler with the argument that its annotation names: deliveries, or message classes."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from django_mq.exceptions import InvalidPayload, UnexpectedPayload
from django_mq.handlers.callables import shown
from django_mq.messages import Delivery
from django_mq.messages.adapters import is_supported
from django_mq.messages.classes import MessageClass, message_class
from django_mq.policy.routing import Pattern

if TYPE_CHECKING:
    from django_mq.handlers.registry import Handler

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


class TypedCall:
    """Calls a handler with instances of the message classes that its annotation names.

    In a list outside transactions, a delivery with wrong content fails alone, and is removed.
    """

    def __init__(self, function: Callable[..., Any], *, batch: bool, atomic: bool) -> None:
        self._function = function
        self._batch = batch
        self._atomic = atomic
        self._singly = batch and not atomic

    @functools.cached_property
    def takes(self) -> ArgumentSpec:
        """Resolved at first use, when the module of the handler is imported; raises Unresolved."""
        return _takes(self._function, batch=self._batch)

    def __call__(self, argument: Any) -> Any:
        with self._converted(argument) as converted:
            return self._function(converted) if self._is_called(argument) else None

    def _is_called(self, argument: Any) -> bool:
        """Return whether to call the handler: not if no message of its list has valid content."""
        return not self._singly or bool(argument)

    @contextmanager
    def _converted(self, argument: Any) -> Iterator[Any]:
        classes, wrapped = self.takes
        deliveries: list[Delivery[Any]] = argument if self._batch else [argument]
        if self._singly and classes:
            instances = _accepted(deliveries, classes)
        else:
            instances = [_instance(each, classes) for each in deliveries] if classes else []
        if not wrapped:
            yield argument if not classes else instances if self._batch else instances[0]
            return
        if self._atomic:  # its on_commit hooks read the payload after the call
            given = list(map(_with_payload, deliveries, instances))
            yield given if self._batch else given[0]
            return
        for delivery, instance in zip(deliveries, instances, strict=True):
            delivery._payload = instance
        try:
            yield argument
        finally:
            for delivery in deliveries:  # receivers of signals get the JSON, as with any handler
                del delivery._payload


class AsyncTypedCall(TypedCall):
    """Calls an async handler like TypedCall."""

    async def __call__(self, argument: Any) -> Any:
        with self._converted(argument) as converted:
            return await self._function(converted) if self._is_called(argument) else None


def typed(
    function: Callable[..., Any], *, batch: bool, is_async: bool, atomic: bool
) -> Callable[..., Any]:
    """Return `function`, or a wrapper that passes instances if its annotation may name a class."""
    annotation = _annotation(function)
    if annotation in (None, Any, object, Delivery) or (
        isinstance(annotation, str) and _PLAIN.fullmatch(annotation)
    ):
        return function
    kind = AsyncTypedCall if is_async else TypedCall
    return kind(function, batch=batch, atomic=atomic)


def refusal(handler: Handler, type: str, version: int) -> str:
    """Say why `handler` cannot take this version of a type; empty if it can.

    The newest version that a handler understands is that of its message class, else its
    `schema_version`.
    """
    newest = handler.schema_version
    if isinstance(handler.call, TypedCall):
        try:
            found = handler.call.takes.classes.get(type)
        except Unresolved as error:
            return str(error)
        if found is not None:
            newest = found.version
            gap = found.gap(version)
            if gap is not None:
                return (
                    f"its schema version {version} has no way to version {newest}:"
                    f" @upcast({type!r}, {gap}) is missing"
                )
    if version <= newest:
        return ""
    return (
        f"its schema version {version} is newer than version {newest} that handler"
        f" {handler.name} understands"
    )


def annotation_errors(handler: Handler) -> Iterator[str]:
    """Say what is wrong with the annotation of a handler's argument."""
    if not isinstance(handler.call, TypedCall):
        return
    try:
        classes = handler.call.takes.classes
    except Unresolved as error:
        yield str(error)
        return
    others = [each for each in handler.patterns if each not in classes] if classes else []
    if others:
        yield (
            f"the handler {handler.name} subscribes to {', '.join(others)}, but its argument is"
            f" annotated with the class of {', '.join(classes)} alone"
        )
    for type in classes:
        if not any(Pattern(each).matches(type) for each in handler.patterns):
            yield (
                f"the argument of the handler {handler.name} is annotated with the class of"
                f" {type}, to which it does not subscribe"
            )


def _instance(delivery: Delivery[Any], classes: dict[str, MessageClass]) -> Any:
    found = classes.get(delivery.type)
    if found is None:
        raise _unexpected(f"the handler takes {', '.join(classes)}, not {delivery.type}")
    try:
        return found.load(delivery.raw, delivery.schema_version)
    except InvalidPayload as error:
        raise _unexpected(str(error), redacted_text=error._redacted_text) from error


def _with_payload(delivery: Delivery[Any], instance: Any) -> Delivery[Any]:
    """Return a delivery of the same message whose payload is `instance`."""
    found: Delivery[Any] = Delivery(delivery._row, delivery._asked_at)
    found._payload = instance
    return found


def _unexpected(text: str, *, redacted_text: str = "") -> UnexpectedPayload:
    error = UnexpectedPayload(text)
    error._redacted_text = redacted_text or text
    return error


def _accepted(deliveries: list[Delivery[Any]], classes: dict[str, MessageClass]) -> list[Any]:
    """Return the instances of the deliveries with valid content; fail and remove the others."""
    instances = []
    for delivery in list(deliveries):
        try:
            instances.append(_instance(delivery, classes))
        except UnexpectedPayload as error:
            delivery.fail(error)
            deliveries.remove(delivery)
    return instances


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


def _takes(function: Callable[..., Any], *, batch: bool) -> ArgumentSpec:
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
