"""Readers turn the raw value of a setting into the value that is used; one reader per kind.

A reader raises ValueError with a text that says what the value must be. `read_fields` reads a dict
into the fields of a dataclass, and collects all errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from django_mq.policy.backoff import RetryPolicy
from django_mq.policy.column_bounds import MAX_INTEGER, MAX_SPAN_SECONDS
from django_mq.policy.names import RULE, check_name
from django_mq.values import as_seconds, short_repr

Reader = Callable[[Any], Any]

#: Options of other queues that are parts of a `RetryPolicy` here.
_PARTS_OF_RETRY = frozenset(("attempts", "backoff", "max_attempts", "max_retries", "retries"))


def option(read: Reader, default: Any = MISSING, *, make: Any = MISSING) -> Any:
    """Return a dataclass field whose value `read_fields()` takes from `read`."""
    return field(default=default, default_factory=make, metadata={"read": read})


class SecretValueError(ValueError):
    """An error of a value that no text may show, since it may have a password."""


def integer(low: int, high: int = MAX_INTEGER) -> Reader:
    """Return a reader of whole numbers from `low` to `high`.

    >>> integer(1)(100)
    100
    """

    def read(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return read


def duration(*, zero: bool = False) -> Reader:
    """Return a reader of seconds and timedeltas above zero; `zero=True` also allows zero.

    >>> from datetime import timedelta
    >>> duration()(timedelta(minutes=1))
    60.0
    """

    def read(value: object) -> float:
        seconds = as_seconds(value)
        if seconds is None or seconds > MAX_SPAN_SECONDS or (seconds == 0 and not zero):
            minimum = "from zero" if zero else "more than zero"
            raise ValueError(f"must be seconds or a timedelta, {minimum} and at most 100 years")
        return seconds

    return read


def share(value: object) -> float:
    """Read a number from 0 to 1."""
    number = as_seconds(value) if isinstance(value, int | float) else None
    if number is None or number > 1:
        raise ValueError("must be a number from 0 to 1")
    return number


def one_of(*allowed: str) -> Reader:
    """Return a reader that accepts only these texts."""

    def read(value: object) -> object:
        if value not in allowed:
            raise ValueError(f"must be {' or '.join(map(repr, allowed))}")
        return value

    return read


def optional(read: Reader) -> Reader:
    """Return a reader that also accepts None."""

    def read_optional(value: object) -> Any:
        try:
            return None if value is None else read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or None") from None

    return read_optional


def text(value: object) -> str:
    """Read a text; it must not be empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text that is not empty")
    return value


def name(value: object) -> str:
    """Read a name; see `check_name()`."""
    try:
        return check_name(value, "it")
    except ValueError:
        raise ValueError(f"must be a name: {RULE}") from None


def _only(kind: type[Any], what: str) -> Reader:
    """Return a reader that accepts values of one type."""

    def read(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"must be {what}")
        return value

    return read


flag = _only(bool, "True or False")
mapping = _only(Mapping, "a dict")
retry_policy = _only(RetryPolicy, "a django_mq.RetryPolicy")


def pattern(value: object) -> re.Pattern[str]:
    """Read a regular expression: compiled, or a text, which is compiled to ignore case."""
    if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
        return value
    try:
        return re.compile(text(value), re.IGNORECASE)
    except (ValueError, re.error):
        raise ValueError("must be a regular expression of text") from None


@dataclass(frozen=True, slots=True)
class SettingError:
    """One error in the settings: where, what, and perhaps a suggestion."""

    where: str
    problem: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.where} {self.problem}" + (f" {self.hint}" if self.hint else "")

    def as_part(self) -> str:
        """Return the error as a part of a sentence in another error."""
        return f"{self.where} {self.problem.rstrip('.')}" + (f" ({self.hint})" if self.hint else "")


def setting_error(where: str, value: object, error: ValueError) -> SettingError:
    """Return an error that names the setting and its value, and says what the value must be."""
    if isinstance(error, SecretValueError):
        return SettingError(where, f"{error}.")
    return SettingError(where, f"is {short_repr(value)}: {error}.")


def read_entry(
    entry: object,
    options: object,
    where: str,
    errors: list[SettingError],
    *,
    is_secret: bool = False,
) -> Mapping[str, Any] | None:
    """Return the options of a setting's entry, None if they are not a dict; `entry` is its name.

    Errors are appended to `errors`; with `is_secret`, they show no options.
    """
    try:
        name(entry)
    except ValueError as error:
        errors.append(SettingError(where, f"has a bad name: it {error}."))
    try:
        found: Mapping[str, Any] = mapping(options)
    except ValueError as error:
        shown = SecretValueError(error) if is_secret else error
        errors.append(setting_error(where, options, shown))
        return None
    return found


def read_fields(
    kind: type[Any],
    raw: Mapping[Any, Any],
    spell: Callable[[str], str],
    where: str,
    errors: list[SettingError],
    inherited: Mapping[str, Any] = MappingProxyType({}),
    elsewhere: Callable[[str], str | None] = lambda key: None,
) -> dict[str, Any]:
    """Return a value for each field of the dataclass `kind` that has a reader.

    The keys of `raw` are field names passed through `spell`. A field that is missing or bad takes
    the inherited value, else its default. Errors are appended to `errors`; they refer to `raw` as
    `where`. `elsewhere` returns the hint for a key that belongs to another dict of the settings.
    """
    known = _options(kind, spell)
    values = dict(inherited)
    for each in known.values():
        if each.default is not MISSING:
            values[each.name] = each.default
        elif each.default_factory is not MISSING:
            values[each.name] = each.default_factory()
    for key, value in raw.items():
        if key in known:
            try:
                values[known[key].name] = known[key].metadata["read"](value)
            except ValueError as error:
                errors.append(setting_error(f"{where}[{key!r}]", value, error))
        else:
            spelled = spell(str(key))
            near = get_close_matches(spelled, known, 1)
            meant = f"Did you mean {near[0]!r}?" if near else None
            other = elsewhere(str(key)) or _hint_of_retry(str(key), known, spell)
            hint = meant if near == [spelled] else other or meant
            errors.append(SettingError(f"{where}[{key!r}]", "is unknown.", hint))
    return values


def hint_of(kind: type[Any], spell: Callable[[str], str], place: str, key: str) -> str | None:
    """Return the hint that `key` belongs to `place`, if the dataclass `kind` has such an option."""
    return f"{place}[{spell(key)!r}]." if spell(key) in _options(kind, spell) else None


def _hint_of_retry(key: str, known: Mapping[str, Any], spell: Callable[[str], str]) -> str | None:
    """Return the hint that `key` is a part of the option `retry`, if `known` has that."""
    if key.lower() not in _PARTS_OF_RETRY or spell("retry") not in known:
        return None
    return f"It is part of {spell('retry')!r}: RetryPolicy(max_attempts=..., backoff=...)."


def _options(kind: type[Any], spell: Callable[[str], str]) -> dict[str, Field[Any]]:
    return {spell(each.name): each for each in fields(kind) if "read" in each.metadata}
