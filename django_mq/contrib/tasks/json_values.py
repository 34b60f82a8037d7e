"""Arguments and return values as Django's JSON, with errors that say where the bad value is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django_mq.contrib.tasks.compat import normalize_json
from django_mq.values import short_repr

ADVICE = "use JSON: the pk of an object, and text for dates, UUIDs and decimals"


def as_json(value: Any, name: str) -> Any:
    """Return `value` as JSON-compatible types; `name` is its name in errors.

    Raises TypeError for a value of another type and ValueError for bytes that are not UTF-8, like
    Django, with the place of the value.

    >>> as_json({"ids": (1, 2)}, "kwargs")
    {'ids': [1, 2]}
    >>> as_json([1, {"tags": {2}}], "args")
    Traceback (most recent call last):
        ...
    TypeError: args[1]['tags']: Unsupported type: <class 'set'>: use JSON: the pk of an object, \
and text for dates, UUIDs and decimals
    """
    try:
        return normalize_json(value)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{_place(value, name)}: {error}: {ADVICE}") from error


def _place(value: Any, name: str) -> str:
    """Return the path of the first value that Django refuses."""
    children: Iterable[tuple[object, Any]] = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    for key, each in children:
        try:
            normalize_json(each)
        except (TypeError, ValueError):
            return _place(each, f"{name}[{short_repr(key)}]")
    return name
