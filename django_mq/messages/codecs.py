"""Codecs: each converts the values of one kind to JSON values and back, without coercing them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from django_mq.messages.scalars import Mismatch, kind_of


class Unsupported(TypeError):
    """A type has no JSON form here."""


class Codec(Protocol):
    """Converts the values of one type; both directions raise Mismatch."""

    def dump(self, value: Any) -> Any:
        """Return the JSON value of `value`."""

    def load(self, value: Any) -> Any:
        """Return the value that was dumped as the JSON value `value`."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the dumped values."""


class Anything:
    """Any JSON value."""

    def dump(self, value: Any) -> Any:
        return value

    load = dump

    def schema(self) -> dict[str, Any]:
        return {}


class Choice:
    """The members of an Enum, by value, or the values of a Literal. Raises Unsupported."""

    def __init__(self, members: Iterable[Any]) -> None:
        # Pairs of JSON value and member: a dict would treat 0 and False as the same key.
        self._pairs: list[tuple[Any, Any]] = []
        for each in members:
            raw = _json_value(each)
            if (same := self._find(raw)) is not None:
                raise Unsupported(f"{same[1]!r} and {each!r} have the same JSON form")
            self._pairs.append((raw, each))
        self._shown = ", ".join(repr(raw) for raw, _ in self._pairs)

    def dump(self, value: Any) -> Any:
        for raw, member in self._pairs:
            if member is value or (type(member) is type(value) and member == value):
                return raw
        raise self._mismatch(value)

    def load(self, value: Any) -> Any:
        if (pair := self._find(value)) is None:
            raise self._mismatch(value)
        return pair[1]

    def schema(self) -> dict[str, Any]:
        return {"enum": [raw for raw, _ in self._pairs]}

    def _find(self, value: Any) -> tuple[Any, Any] | None:
        found = (pair for pair in self._pairs if type(pair[0]) is type(value) and pair[0] == value)
        return next(found, None)

    def _mismatch(self, value: Any) -> Mismatch:
        return Mismatch(f"must be one of {self._shown}; got {kind_of(value)}")


class Nullable:
    """A value, or None."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def dump(self, value: Any) -> Any:
        return None if value is None else self._codec.dump(value)

    def load(self, value: Any) -> Any:
        return None if value is None else self._codec.load(value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self._codec.schema(), {"type": "null"}]}


class Array:
    """A list, or a tuple of any length."""

    def __init__(self, made: Callable[[Any], Any], item: Codec) -> None:
        self._made = made
        self._item = item

    def dump(self, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise Mismatch(f"must be a list or tuple; got {kind_of(value)}")
        return [at(f"[{i}]", self._item.dump, each) for i, each in enumerate(value)]

    def load(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise Mismatch(f"must be a list; got {kind_of(value)}")
        return self._made(at(f"[{i}]", self._item.load, each) for i, each in enumerate(value))

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self._item.schema()}


class FixedTuple:
    """A tuple with a type for each place."""

    def __init__(self, items: list[Codec]) -> None:
        self._items = items

    def dump(self, value: Any) -> Any:
        return self._each(value, "dump", tuple, list)

    def load(self, value: Any) -> Any:
        return self._each(value, "load", list, tuple)

    def _each(self, value: Any, convert: str, given: Any, made: Callable[[Any], Any]) -> Any:
        if not isinstance(value, given) or len(value) != len(self._items):
            raise Mismatch(f"must be {len(self._items)} values; got {kind_of(value)}")
        pairs = enumerate(zip(self._items, value, strict=True))
        return made([at(f"[{i}]", getattr(codec, convert), each) for i, (codec, each) in pairs])

    def schema(self) -> dict[str, Any]:
        return {
            "type": "array",
            "prefixItems": [each.schema() for each in self._items],
            "minItems": len(self._items),
            "maxItems": len(self._items),
        }


class Object:
    """A dict with text keys."""

    def __init__(self, value: Codec) -> None:
        self._value = value

    def dump(self, value: Any) -> Any:
        return self._each(value, self._value.dump)

    def load(self, value: Any) -> Any:
        return self._each(value, self._value.load)

    def _each(self, value: Any, convert: Callable[[Any], Any]) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise Mismatch(f"must be a dict with text keys; got {kind_of(value)}")
        return {
            key: at(f"[{key!r}]", convert, each, redacted="[...]") for key, each in value.items()
        }

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._value.schema()}


def at(step: str, convert: Callable[[Any], Any], value: Any, *, redacted: str | None = None) -> Any:
    """Convert `value`, which is at `step` in its container; a Mismatch names the step."""
    try:
        return convert(value)
    except Mismatch as error:
        raise error.under(step, redacted) from None


def _json_value(member: Any) -> Any:
    """Return the JSON value of a member of an Enum, or of a value of a Literal."""
    value = member.value if isinstance(member, enum.Enum) else member
    if type(value) not in (str, int, bool, type(None)):
        raise Unsupported(f"{member!r} has no JSON form: text and whole numbers have one")
    return value
