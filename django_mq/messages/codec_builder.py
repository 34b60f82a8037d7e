"""Build the codec of an annotated type.

A codec is built once for a type. A dataclass field may be None, bool, int, float, str, any
JSON, datetime (aware), date, time, timedelta, Decimal, UUID, Enum, Literal, Optional, list, tuple,
dict with text keys, and another dataclass.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django_mq.messages.codecs import (
    Anything,
    Array,
    Choice,
    Codec,
    FixedTuple,
    Nullable,
    Object,
    Unsupported,
    at,
)
from django_mq.messages.scalars import SCALARS, Mismatch, kind_of, scalar_of


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
            return Anything()
        if (scalar := scalar_of(hint)) is not None:
            return scalar
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return Choice(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self._dataclass(hint)
        if origin is typing.Literal:
            return Choice(arguments)
        if origin in (typing.Union, types.UnionType):
            rest = [each for each in arguments if each is not type(None)]
            if len(rest) == 1 and len(arguments) == 2:
                return Nullable(self.build(rest[0]))
        return self._collection(hint, origin, arguments)

    def _collection(self, hint: Any, origin: Any, arguments: tuple[Any, ...]) -> Codec:
        made = hint if origin is None else origin
        if made is tuple and arguments and arguments[-1] is not ...:
            return FixedTuple([self.build(each) for each in arguments])
        if made in (list, tuple, Sequence):
            item = self.build(arguments[0]) if arguments else Anything()
            return Array(tuple if made is tuple else list, item)
        if made in (dict, Mapping):
            if arguments and arguments[0] is not str:
                raise Unsupported("the keys of a JSON object are text: dict[str, ...]")
            return Object(self.build(arguments[1]) if arguments else Anything())
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
            name: at(name, codec.dump, getattr(value, name))
            for name, (codec, _) in self._fields.items()
        }

    def load(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(f"must be an object; got {kind_of(value)}")
        given = {}
        for name, (codec, required) in self._fields.items():
            if name in value:
                given[name] = at(name, codec.load, value[name])
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
