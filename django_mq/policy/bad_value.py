"""Name the value in a payload that cannot be encoded, by its path, for error texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

from django_mq.exceptions import InvalidPayload

#: The attributes of dataclasses, pydantic models and msgspec Structs.
FIELDS = ("__dataclass_fields__", "__pydantic_fields__", "__struct_fields__")
SEND_FIELDS = ": send a dict of its fields"
ALONE = ", or broadcast an instance of a @message class alone, without type and payload"


def unencodable(
    what: str, value: object, dumps: Callable[[Any], str], error: Exception
) -> InvalidPayload:
    """Return the error of a value that `dumps` refused with `error`."""
    path, culprit = _culprit(value, dumps)
    advice = _advice(culprit)
    if advice == SEND_FIELDS and (what, path) == ("payload", ""):
        advice += ALONE
    return InvalidPayload(f"{what}{short(path)}: {_encoder_error(error)}{advice}")


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value that is not a container, and each key, with its path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield path + step(key), key
            yield from leaves(each, path + step(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from leaves(each, path + step(index))
    else:
        yield path, value


def step(key: object) -> str:
    """Return the text of one step of a path; repr keeps control characters out of logs."""
    if isinstance(key, str) and key.isidentifier() and len(key) <= 100:
        return f".{key}"
    return f"[{key[:100]!r}]" if isinstance(key, str) else f"[{key!r}]"


def short(path: str) -> str:
    """Return a path without its middle if it is long."""
    return path if len(path) <= 200 else f"{path[:100]}...{path[-100:]}"


def _culprit(value: object, dumps: Callable[[Any], str]) -> tuple[str, object]:
    """Return the first value that cannot be encoded on its own, and its path; else "" and None."""
    try:
        for path, leaf in leaves(value):
            try:
                dumps(leaf).encode()
            except Exception:
                return path, leaf
    except Exception:  # the value cannot even be iterated
        return "", None
    return "", None


def _advice(culprit: object) -> str:
    """Return what to send instead of a value that the encoder does not know; else ""."""
    try:  # on the value, not its class: request.user is a lazy object
        if hasattr(culprit, "_meta") and hasattr(culprit, "pk"):  # a Django model
            return ": send its pk"
        if hasattr(culprit, "values_list"):  # a queryset
            return ": send a list of pks"
        if any(hasattr(culprit, name) for name in FIELDS):
            return SEND_FIELDS
    except Exception:  # code of the value
        return ""
    if isinstance(culprit, Set | Iterator):
        return ": send a list"
    return ": send text, such as base64" if isinstance(culprit, bytes | bytearray) else ""


def _encoder_error(error: Exception) -> str:
    """Return the text of the encoder's own errors, and only the class of others."""
    if isinstance(error, TypeError | ValueError | OverflowError):
        return str(error)[:500]
    return f"the encoder raised {type(error).__name__}"
