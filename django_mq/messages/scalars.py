"""Single values: values that JSON has, and values that are stored as text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.utils.dateparse import parse_duration
from django.utils.duration import duration_iso_string


class Mismatch(ValueError):
    """A value does not have its type: `path` leads to the value, `problem` says what it must be.

    `redacted` is path and problem without any part of the value, such as the keys of a dict or the
    text of an application's own check. By default it is the same text.
    """

    def __init__(
        self, problem: str, path: str = "", *, redacted: tuple[str, str] | None = None
    ) -> None:
        super().__init__(_sentence(path, problem))
        self.problem = problem
        self.path = path
        self._redacted = (path, problem) if redacted is None else redacted

    @property
    def redacted_text(self) -> str:
        """The text for a log: `redacted`, in a sentence."""
        return _sentence(*self._redacted)

    def under(self, step: str, redacted: str | None = None) -> Mismatch:
        """Return this mismatch as seen from the container that holds the value at `step`."""
        path, problem = self._redacted
        redacted_path = _below(step if redacted is None else redacted, path)
        return Mismatch(self.problem, _below(step, self.path), redacted=(redacted_path, problem))


def _sentence(path: str, problem: str) -> str:
    return f"{path} {problem}" if path else problem


def _below(step: str, path: str) -> str:
    """Return the path to `path` within the value at `step`.

    >>> _below("lines", "[0].sku"), _below("order", "id"), _below("order", "")
    ('lines[0].sku', 'order.id', 'order')
    """
    return f"{step}.{path}" if path and not path.startswith("[") else f"{step}{path}"


class Scalar:
    """The values of one type: those that `is_one` accepts.

    `dumped` and `loaded` convert them to JSON and back; without these functions, values stay as
    they are. `loaded` raises ValueError. In errors, `shown` names the values in JSON and `given`
    those in Python; `hint` says how a text or number becomes one.
    """

    def __init__(
        self,
        shown: str,
        is_one: Callable[[Any], bool],
        schema: dict[str, Any],
        *,
        given: str | None = None,
        hint: str = "",
        dumped: Callable[[Any], Any] = lambda value: value,
        loaded: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._shown = shown
        self._given = given or shown
        self._hint = hint
        self._is_one = is_one
        self._schema = schema
        self._dumped = dumped
        self._loaded = loaded

    def dump(self, value: Any) -> Any:
        if not self._is_one(value):
            hint = self._hint if isinstance(value, int | float | str) else ""
            raise Mismatch(f"must be {self._given}; got {kind_of(value)}{hint}")
        try:
            return self._dumped(value)
        except OverflowError:  # float(10**400)
            raise Mismatch(f"must be {self._given}; got {kind_of(value)}, too large") from None

    def load(self, value: Any) -> Any:
        try:
            loaded = self._loaded(value)
        except (ValueError, ArithmeticError):
            raise self._mismatch(value) from None
        if not self._is_one(loaded):
            raise self._mismatch(value)
        return loaded

    def schema(self) -> dict[str, Any]:
        return dict(self._schema)

    def _mismatch(self, value: Any) -> Mismatch:
        return Mismatch(f"must be {self._shown}; got {kind_of(value)}")


def kind_of(value: object) -> str:
    """Return the kind of a value, without its content, which may be private."""
    if isinstance(value, datetime) and value.utcoffset() is None:
        return "a naive datetime, without a time zone"
    if isinstance(value, Decimal) and not value.is_finite():
        return "a Decimal that is not finite"
    return _KINDS.get(type(value)) or f"a {type(value).__qualname__}"


_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _read(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a `loaded` that parses text, and refuses other values."""

    def loaded(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(value)
        return parse(value)

    return loaded


def _is_aware(value: Any) -> bool:
    return isinstance(value, datetime) and value.utcoffset() is not None


def _duration(text: str) -> timedelta:
    if "P" not in text[:2] or (parsed := parse_duration(text)) is None:
        raise ValueError(text)
    return parsed


def _text(form: str | None = None) -> dict[str, Any]:
    return {"type": "string"} if form is None else {"type": "string", "format": form}


#: The codec of each type.
SCALARS: dict[Any, Scalar] = {
    type(None): Scalar("null", _is(type(None)), {"type": "null"}),
    bool: Scalar("true or false", _is(bool), {"type": "boolean"}),
    int: Scalar("a whole number", _is(int), {"type": "integer"}),
    # jsonb returns 1e16 as an integer, and to type checkers an integer is a float.
    float: Scalar(
        "a number",
        _is(float, int),
        {"type": "number"},
        dumped=float,
        loaded=lambda value: float(value) if type(value) is int else value,
    ),
    str: Scalar("text", lambda value: isinstance(value, str), _text()),
    datetime: Scalar(
        "a date and time with its offset from UTC, in ISO 8601",
        _is_aware,
        _text("date-time"),
        given="an aware datetime",
        dumped=datetime.isoformat,
        loaded=_read(datetime.fromisoformat),
    ),
    date: Scalar(
        "a date in ISO 8601",
        # A datetime is a date, too. A test may replace the class: the dates of freezegun are its.
        lambda value: isinstance(value, date) and not isinstance(value, datetime),
        _text("date"),
        given="a date",
        dumped=date.isoformat,
        loaded=_read(date.fromisoformat),
    ),
    time: Scalar(
        "a time in ISO 8601",
        lambda value: isinstance(value, time),
        _text("time"),
        given="a time",
        dumped=time.isoformat,
        loaded=_read(time.fromisoformat),
    ),
    timedelta: Scalar(
        "a duration in ISO 8601",
        lambda value: isinstance(value, timedelta),
        _text("duration"),
        given="a timedelta",
        dumped=duration_iso_string,
        loaded=_read(_duration),
    ),
    Decimal: Scalar(
        "a finite decimal number, as text",
        lambda value: isinstance(value, Decimal) and value.is_finite(),
        _text(),
        given="a finite Decimal",
        # The total of Order.objects.create(total=10) is an int.
        hint=": pass Decimal(...), or call refresh_from_db() after create()",
        dumped=str,
        loaded=_read(Decimal),
    ),
    UUID: Scalar(
        "a UUID",
        lambda value: isinstance(value, UUID),
        _text("uuid"),
        dumped=str,
        loaded=_read(UUID),
    ),
}


def scalar_of(hint: Any) -> Scalar | None:
    """Return the codec of a type that is stored as a single value, None for any other type."""
    try:
        return SCALARS.get(hint)
    except TypeError:  # it cannot be hashed: list[Annotated[int, []]]
        return None
