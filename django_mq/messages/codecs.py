"""Convert values of annotated types to JSON values and back, without coercing them.

A codec is built once for a type. A dataclass field may be None, bool, int, float, str, any
JSON, datetime (aware), date, time, timedelta, Decimal, UUID, Enum, Literal, Optional, list, tuple,
dict with text keys, and another dataclass.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from django_mq.messages.scalars import SCALARS, Mismatch, kind_of, scalar_of


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


class _Anything:
    def dump(self, value: Any) -> Any:
        return value

    load = dump

    def schema(self) -> dict[str, Any]:
        return {}


class _Choice:
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


class _Optional:
    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def dump(self, value: Any) -> Any:
        return None if value is None else self._codec.dump(value)

    def load(self, value: Any) -> Any:
        return None if value is None else self._codec.load(value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self._codec.schema(), {"type": "null"}]}


class _Array:
    """A list, or a tuple of any length."""

    def __init__(self, made: Callable[[Any], Any], item: Codec) -> None:
        self._made = made
        self._item = item

    def dump(self, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise Mismatch(f"must be a list or tuple; got {kind_of(value)}")
        return [_at(f"[{i}]", self._item.dump, each) for i, each in enumerate(value)]

    def load(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise Mismatch(f"must be a list; got {kind_of(value)}")
        return self._made(_at(f"[{i}]", self._item.load, each) for i, each in enumerate(value))

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self._item.schema()}


class _FixedTuple:
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
        return made([_at(f"[{i}]", getattr(codec, convert), each) for i, (codec, each) in pairs])

    def schema(self) -> dict[str, Any]:
        return {
            "type": "array",
            "prefixItems": [each.schema() for each in self._items],
            "minItems": len(self._items),
            "maxItems": len(self._items),
        }


class _Object:
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
            key: _at(f"[{key!r}]", convert, each, redacted="[...]") for key, each in value.items()
        }

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._value.schema()}


class DataclassCodec:
    """A dataclass as an object of its fields; ignores unknown fields, fills in missing ones."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.schema_name = cls.__qualname__  # a message may contain two classes of one name
        self._fields: dict[str, tuple[Codec, bool]] = {}

    def resolve(self, build: Callable[[Any], Codec]) -> None:
        """Build the codecs of the fields, which may name this class. Raises Unsupported."""
        try:
            hints = typing.get_type_hints(self.cls, include_extras=True)
        except Exception as error:
            raise Unsupported(f"an annotation of {self.cls.__qualname__}: {error}") from error
        for name, hint in hints.items():
            if isinstance(hint, dataclasses.InitVar) and not hasattr(self.cls, name):
                where = f"{self.cls.__qualname__}.{name}"
                raise Unsupported(f"{where}: an InitVar is not stored, so it needs a default")
        for field in dataclasses.fields(self.cls):
            if not field.init:
                continue
            try:
                codec = build(hints[field.name])
            except Unsupported as error:
                raise Unsupported(f"{self.cls.__qualname__}.{field.name}: {error}") from error
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            self._fields[field.name] = codec, required

    def dump(self, value: Any) -> Any:
        if type(value) is not self.cls:
            raise Mismatch(f"must be a {self.cls.__qualname__}; got {kind_of(value)}")
        return {
            name: _at(name, codec.dump, getattr(value, name))
            for name, (codec, _) in self._fields.items()
        }

    def load(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(f"must be an object; got {kind_of(value)}")
        given = {}
        for name, (codec, required) in self._fields.items():
            if name in value:
                given[name] = _at(name, codec.load, value[name])
            elif required:
                raise Mismatch("is missing", name)
        try:
            return self.cls(**given)
        except (TypeError, ValueError) as error:  # from its __post_init__
            refused = f"is refused by {self.cls.__qualname__}"
            redacted = "", f"{refused}: {type(error).__qualname__}"
            raise Mismatch(f"{refused}: {error}", redacted=redacted) from error

    def schema(self) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self.schema_name}"}

    def definition(self) -> dict[str, Any]:
        """Return the definition that `schema()` refers to."""
        return {
            "type": "object",
            "title": self.cls.__qualname__,
            "properties": {name: codec.schema() for name, (codec, _) in self._fields.items()},
            "required": [name for name, (_, required) in self._fields.items() if required],
        }


class CodecBuilder:
    """Builds codecs, one per dataclass, so that a class may contain instances of itself."""

    def __init__(self) -> None:
        self.dataclasses: dict[type, DataclassCodec] = {}

    def build(self, hint: Any) -> Codec:
        """Return the codec of a type; raises Unsupported."""
        while hasattr(hint, "__supertype__"):  # a NewType
            hint = hint.__supertype__
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.build(arguments[0])
        if hint in (Any, object):
            return _Anything()
        if (scalar := scalar_of(hint)) is not None:
            return scalar
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _Choice(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._dataclass(hint)
        if origin is typing.Literal:
            return _Choice(arguments)
        if origin in (typing.Union, types.UnionType):
            rest = [each for each in arguments if each is not type(None)]
            if len(rest) == 1 and len(arguments) == 2:
                return _Optional(self.build(rest[0]))
        return self._collection(hint, origin, arguments)

    def _collection(self, hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Codec:
        made = hint if origin is None else origin
        if made is tuple and arguments and arguments[-1] is not ...:
            return _FixedTuple([self.build(each) for each in arguments])
        if made in (list, tuple, Sequence):
            item = self.build(arguments[0]) if arguments else _Anything()
            return _Array(tuple if made is tuple else list, item)
        if made in (dict, Mapping):
            if arguments and arguments[0] is not str:
                raise Unsupported("the keys of a JSON object are text: dict[str, ...]")
            return _Object(self.build(arguments[1]) if arguments else _Anything())
        raise Unsupported(
            f"{hint!r} has no JSON form: use {', '.join(each.__name__ for each in SCALARS)}, Enum,"
            " Literal, list, tuple, dict[str, ...], X | None or a dataclass"
        )

    def _dataclass(self, cls: type) -> DataclassCodec:
        codec = self.dataclasses.get(cls)
        if codec is None:
            codec = self.dataclasses[cls] = DataclassCodec(cls)
            codec.resolve(self.build)
        return codec


def _at(
    step: str, convert: Callable[[Any], Any], value: Any, *, redacted: str | None = None
) -> Any:
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
