"""`@message` gives a class a type and a version; `@upcast` turns older payloads into newer ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

from django_mq.exceptions import InvalidMessage, InvalidName, InvalidPayload
from django_mq.messages.adapters import codec_of, is_supported
from django_mq.messages.codecs import Codec, Unsupported
from django_mq.messages.scalars import Mismatch
from django_mq.policy.column_bounds import check_version
from django_mq.policy.names import check_name

C = TypeVar("C", bound=type)
Upcast = Callable[[dict[str, Any]], dict[str, Any]]
U = TypeVar("U", bound=Upcast)


class MessageClass:
    """The class of the messages of one type, in its current version."""

    def __init__(self, cls: type, type: str, version: int) -> None:
        self.cls = cls
        self.type = type
        self.version = version

    @cached_property
    def codec(self) -> Codec:
        """Built at first use, when all modules that its annotations name have been imported.

        Raises Unsupported if a field has no JSON form.
        """
        return codec_of(self.cls)

    def dump(self, instance: Any) -> Any:
        """Return the payload of an instance; raises InvalidPayload, which has the field's path."""
        name = self.cls.__qualname__
        try:
            return self.codec.dump(instance)
        except Unsupported as error:  # the system checks report it, too
            raise InvalidPayload(str(error)) from error
        except Mismatch as error:
            raise InvalidPayload(f"{name}: {error}") from error
        except RecursionError:
            raise InvalidPayload(f"{name}: is nested too deeply, or contains itself") from None

    def load(self, payload: Any, version: int) -> Any:
        """Return the instance of a payload of any version that has no `gap()`.

        Raises InvalidPayload, which has the field's path, or the version whose upcast raised.
        """
        for each in range(version, self.version):
            if not isinstance(payload, dict):
                raise _invalid(
                    f"{self.type}: version {each} of the payload must be an object to be upcast"
                )
            try:
                payload = _upcasts[self.type, each](payload)
            except Exception as error:
                raise _invalid(
                    f"{self.type}: the upcast from version {each} raised {type(error).__qualname__}"
                ) from error
        try:
            return self.codec.load(payload)
        except Mismatch as error:
            name = self.cls.__qualname__
            raise _invalid(
                f"{name}: {error}", redacted_text=f"{name}: {error.redacted_text}"
            ) from error

    def gap(self, version: int) -> int | None:
        """Return the first version from `version` on that has no upcast; None if all have one."""
        versions = range(version, self.version)
        return next((each for each in versions if (self.type, each) not in _upcasts), None)

    @property
    def oldest(self) -> int:
        """The oldest version of this type that an upcast starts from."""
        starts = [each for type, each in _upcasts if type == self.type and each < self.version]
        return min(starts, default=max(1, self.version - 1))


_by_class: dict[type, MessageClass] = {}
_by_type: dict[str, MessageClass] = {}
_upcasts: dict[tuple[str, int], Upcast] = {}


def message(type: str, *, version: int = 1) -> Callable[[C], C]:
    """Register a class for the messages of one type; the class itself is unchanged.

    The class is a dataclass, a pydantic model or a msgspec Struct. `broadcast(instance)` takes
    type, payload and `schema_version` from it, and a handler whose argument is annotated with the
    class gets an instance. Raise `version` when the fields change, and write an `@upcast` from the
    old version. Raises InvalidMessage for any other object, if the type already has a class, or if
    the class already has a type.
    """
    given: object = type
    if isinstance(given, _Type):
        raise InvalidMessage(
            f"say what type {given.__qualname__} is the class of, in brackets after @message:"
            " @message('shop.orders.placed')"
        )
    try:
        type = check_name(type, "type")
    except InvalidName as error:
        raise InvalidMessage(f"{error}; write @message('shop.orders.placed')") from error
    check_version(version, "version", InvalidMessage)

    def register(cls: C) -> C:
        if not isinstance(cls, _Type) or not is_supported(cls):
            shown = getattr(cls, "__qualname__", repr(cls))
            raise InvalidMessage(
                f"{shown} is not a dataclass, a pydantic model or a msgspec Struct: put @message"
                " above @dataclass"
            )
        holder = _by_type.get(type)
        if holder is not None and _full_name(holder.cls) != _full_name(cls):
            raise InvalidMessage(
                f"{type} is already the type of {holder.cls.__qualname__}: a type has one class;"
                " raise its version when the fields change"
            )
        known = _by_class.get(cls)
        if known is not None and known.type != type:
            raise InvalidMessage(
                f"{cls.__qualname__} is already the class of {known.type}: a class has one type;"
                f" give {type} a subclass of it"
            )
        _by_type[type] = _by_class[cls] = MessageClass(cls, type, version)
        return cls

    return register


def upcast(type: str, from_version: int) -> Callable[[U], U]:
    """Register a function that turns a payload of `from_version` into one of the next version.

    The function gets the payload as a dict and returns a dict. A chain of upcasts leads from the
    version of a stored message to the version of its class. A message whose upcast raises has wrong
    content and is dead at once. Raises InvalidMessage if there already is such an upcast, or if the
    function does not take one argument.
    """
    try:
        type = check_name(type, "type")
    except InvalidName as error:
        raise InvalidMessage(f"{error}; write @upcast('shop.orders.placed', 1)") from error
    check_version(from_version, "from_version", InvalidMessage)

    def register(function: U) -> U:
        if not callable(function):
            raise InvalidMessage(f"{function!r} is not a function: put @upcast above one")
        with suppress(ValueError):  # some builtins do not reveal their parameters
            try:
                inspect.signature(function).bind({})
            except TypeError as error:
                raise InvalidMessage(
                    f"{_full_name(function)} cannot be called with one argument, the payload:"
                    f" {error}"
                ) from error
        known = _upcasts.get((type, from_version))
        if known is not None and _full_name(known) != _full_name(function):
            raise InvalidMessage(f"version {from_version} of {type} already has an upcast")
        _upcasts[type, from_version] = function
        return function

    return register


def upcasts_without_class() -> list[tuple[str, int]]:
    """Return types and versions of upcasts whose type has no message class: probably typos."""
    return sorted(each for each in _upcasts if each[0] not in _by_type)


def class_of(value: object) -> MessageClass | None:
    """Return the message class of an instance, or None."""
    return _by_class.get(value.__class__)


def message_class(cls: Any) -> MessageClass | None:
    """Return the MessageClass that `@message` registered for a class, or None."""
    return _by_class.get(cls) if isinstance(cls, _Type) else None


def class_of_type(type: str) -> MessageClass | None:
    """Return the message class of a type, None if it has none."""
    return _by_type.get(type)


def message_classes() -> list[MessageClass]:
    """Return all message classes, by type."""
    return [_by_type[type] for type in sorted(_by_type)]


@contextmanager
def isolated() -> Iterator[None]:
    """For tests: registrations made in the block are dropped at its end."""
    registries: tuple[dict[Any, Any], ...] = (_by_class, _by_type, _upcasts)
    kept = [dict(each) for each in registries]
    try:
        yield
    finally:
        for registry, before in zip(registries, kept, strict=True):
            registry.clear()
            registry.update(before)


_Type = type


def _invalid(text: str, *, redacted_text: str = "") -> InvalidPayload:
    """Return the error; `redacted_text` is its text for a log, by default the same text."""
    error = InvalidPayload(text)
    error._redacted_text = redacted_text or text
    return error


def _full_name(thing: Any) -> tuple[str, str]:
    """Return the identity of a class or function; it survives a reload of the module."""
    return thing.__module__, thing.__qualname__
