"""Find a field of a pydantic model that pydantic writes as asterisks, so that its value is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Parts of a schema that describe no stored value; a default may be any object.
_UNSTORED = ("config", "computed_fields", "default", "metadata", "serialization")


def masked_field(cls: Any) -> str | None:
    """Return the first field with a secret (`Login.password`), also of nested classes, or None.

    A field or class with a serializer of its own counts as none: it decides what is written.
    """
    cls.model_rebuild(raise_errors=False)  # its annotations may name later classes
    if not cls.__pydantic_complete__:
        return None  # nobody can make an instance either
    # Annotations do not show who writes a field; the schema does. It is a tree: a class that
    # contains itself is in it once, and elsewhere by name.
    return _find(cls.__pydantic_core_schema__, cls.__qualname__)


def _find(schema: object, where: str) -> str | None:
    if isinstance(schema, dict):
        writer = schema.get("serialization") or {}
        if str(writer.get("type")).startswith("function"):
            return where if _masks(writer["function"]) else None
        if schema.get("serialization_exclude"):
            return None
        if "cls" in schema and "schema" in schema:
            where = schema["cls"].__qualname__
        for key, part in schema.items():
            if key == "fields" and (found := _of_fields(part, where)):
                return found
            if key not in (*_UNSTORED, "fields") and (found := _find(part, where)):
                return found
    elif isinstance(schema, list | tuple):
        return next(filter(None, (_find(each, where) for each in schema)), None)
    return None


def _of_fields(fields: Any, owner: str) -> str | None:
    """Look at the fields of a class: a dict by name; for a dataclass a list, and one of names."""
    named: Iterable[tuple[str, Any]] = (
        fields.items()
        if isinstance(fields, dict)
        else ((each["name"], each) for each in fields if isinstance(each, dict))
    )
    return next(filter(None, (_find(each, f"{owner}.{name}") for name, each in named)), None)


def _masks(function: object) -> bool:
    """Return whether this serializer is pydantic's own of SecretStr, SecretBytes and Secret."""
    name = getattr(function, "__qualname__", "")
    return getattr(function, "__module__", "") == "pydantic.types" and "secret" in name.lower()
