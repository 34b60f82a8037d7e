"""Call a handler with the argument that its annotation names: deliveries, or message classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django_mq.exceptions import InvalidPayload, UnexpectedPayload
from django_mq.handlers.argument_spec import (
    ArgumentSpec,
    Unresolved,
    argument_spec,
    misfit,
    takes_plain,
)
from django_mq.messages import Delivery
from django_mq.messages.classes import MessageClass
from django_mq.policy.routing import Pattern

if TYPE_CHECKING:
    from django_mq.handlers.registry import Handler


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
        return argument_spec(self._function, batch=self._batch)

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
    if takes_plain(function):
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


def argument_misfit(handler: Handler) -> str:
    """Return the annotation of a plain handler's argument if it is not what the handler gets."""
    if isinstance(handler.call, TypedCall):
        try:
            if handler.call.takes.classes:
                return ""
        except Unresolved:
            return ""
    return misfit(handler.function, batch=handler.batch)


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
