"""The codecs of whole messages: dataclasses, pydantic models and msgspec Structs.

pydantic and msgspec are optional: a class made with one of them has imported it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from typing import Any, ClassVar, Protocol

from django_mq.messages.codec_builder import CodecBuilder
from django_mq.messages.codecs import Codec, Unsupported
from django_mq.messages.masked_fields import masked_field
from django_mq.messages.scalars import Mismatch


class _DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class _ModelInstance(Protocol):
    def model_dump(self) -> dict[str, Any]: ...


class _StructInstance(Protocol):
    __struct_fields__: ClassVar[tuple[str, ...]]


#: The beginnings of msgspec's errors that name only types and fields.
_PLAIN = ("Expected `", "Object missing required field `")

#: An instance of a class that `@message` may decorate, for type checkers.
MessageInstance = _DataclassInstance | _ModelInstance | _StructInstance


def is_supported(cls: type) -> bool:
    """Return whether `codec_of` knows this kind of class."""
    return dataclasses.is_dataclass(cls) or _is_model(cls) or _is_struct(cls)


def codec_of(cls: type) -> Codec:
    """Return the codec of a class; raises Unsupported if a field has no JSON form."""
    if _is_model(cls):
        return _Model(cls)
    if _is_struct(cls):
        return _Struct(cls)
    return _Dataclass(cls)


def _is_model(cls: type) -> bool:
    return hasattr(cls, "model_validate_json") and hasattr(cls, "model_dump")


def _is_struct(cls: type) -> bool:
    return hasattr(cls, "__struct_fields__")


class _Dataclass:
    def __init__(self, cls: type) -> None:
        self._codecs = CodecBuilder()
        codec = self._codecs.build(cls)
        self._dump = codec.dump
        self.load = codec.load
        self._schema = codec.schema
        found = self._codecs.dataclasses
        self._checks_itself = any(hasattr(each, "__post_init__") for each in found)
        names = Counter(each.__qualname__ for each in found)
        for each in found.values():
            if names[each.schema_name] > 1:
                each.schema_name = f"{each.cls.__module__}.{each.schema_name}"

    def dump(self, value: Any) -> Any:
        dumped = self._dump(value)
        if self._checks_itself:
            self._check(dumped)
        return dumped

    def _check(self, dumped: Any) -> None:
        """Run the checks of the classes again: the instance may have been changed since."""
        try:
            self.load(dumped)
        except Mismatch:
            raise
        except Exception as error:  # whatever a `__post_init__` raises
            raise Mismatch(f"is refused: {type(error).__qualname__}") from error

    def schema(self) -> dict[str, Any]:
        codecs = self._codecs.dataclasses.values()
        parts = {each.schema_name: each.definition() for each in codecs}
        return {**self._schema(), "$defs": parts}


class _Model:
    """A pydantic model, by the aliases of its fields; strict, so that nothing is coerced."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls
        if masked := masked_field(cls):
            raise Unsupported(
                f"{masked}: pydantic writes a secret as asterisks: send a reference to it, or write"
                " its value with a @field_serializer"
            )

    def dump(self, value: Any) -> Any:
        try:
            dumped = value.model_dump(mode="json", by_alias=True, warnings=False)
        except ValueError as error:  # it has no JSON form, or is a model that contains itself
            raise Mismatch(f"is refused: {error}") from None
        self.load(dumped)  # a model may have been changed, or constructed, without validation
        return dumped

    def load(self, value: Any) -> Any:
        try:
            return self._cls.model_validate_json(json.dumps(value), strict=True)
        except ValueError as error:
            if not hasattr(error, "errors"):  # JSON cannot have it: an integer of too many digits
                raise Mismatch(f"is refused: {error}", redacted=("", "is refused")) from None
            first = error.errors(include_url=False, include_input=False)[0]
            redacted = self._redacted_path(first["loc"]), f"is refused: {first['type']}"
            raise Mismatch(
                f"is refused: {first['msg']}", _path(first["loc"]), redacted=redacted
            ) from None

    def _redacted_path(self, steps: tuple[str | int, ...]) -> str:
        """Return the path up to the first step that may be the key of a dict."""
        fields = self._cls.model_fields
        known = {*fields, *(each.alias for each in fields.values())}
        if not steps or steps[0] not in known:
            return "..." if steps else ""
        kept = list(itertools.takewhile(lambda each: isinstance(each, int), steps[1:]))
        rest = "..." if len(kept) + 1 < len(steps) else ""
        return _path((steps[0], *kept)) + rest

    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = self._cls.model_json_schema(by_alias=True)
        return schema


class _Struct:
    """A msgspec Struct."""

    def __init__(self, cls: type) -> None:
        import msgspec

        self._cls = cls
        self._msgspec = msgspec
        try:
            msgspec.json.schema(cls)
        except (TypeError, NameError) as error:
            raise Unsupported(f"{cls.__qualname__}: {error}") from error

    def dump(self, value: Any) -> Any:
        try:
            dumped = self._msgspec.to_builtins(value)
        except TypeError as error:
            raise Mismatch(f"is refused: {error}") from None
        self.load(dumped)  # a Struct does not check its own fields
        return dumped

    def load(self, value: Any) -> Any:
        try:
            # JSON turns the keys of dict[int, ...] into text.
            return self._msgspec.convert(value, self._cls, str_keys=True)
        except self._msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$")
            path = path.rstrip("`").removeprefix(".")
            # Other texts quote the value, or come from the class's own __post_init__.
            is_plain = error.__cause__ is None and problem.startswith(_PLAIN)
            redacted = path, f"is refused: {problem}" if is_plain else "is refused"
            raise Mismatch(f"is refused: {problem}", path, redacted=redacted) from None

    def schema(self) -> dict[str, Any]:
        return self._msgspec.json.schema(self._cls)


def _path(steps: tuple[str | int, ...]) -> str:
    joined = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in steps)
    return joined.removeprefix(".")
