"""Values that psql may put into a column and that no part of django_mq would write there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.db import DataError, IntegrityError, connection, models, transaction

_TIMES = (
    "infinity",
    "-infinity",
    "0044-03-15 BC",
    "0001-01-01",
    "1899-12-31",
    "1900-01-01",
    "9998-12-31",
    "9999-12-31 23:59:59",
    "20000-01-01",
)
_TEXTS = (
    "",
    " ",
    "null",
    "a\nb",
    "\x01\x1b[2J\x7f",
    "\u202efdp.exe",
    "%s %(x)s {} {0}",
    "<script>'\"",
    "/",
    "é" * 64,
    "x" * 32,
    "x" * 10_000,
)
_JSON = (
    "null",
    "true",
    "7",
    '"text"',
    "[]",
    "{}",
    "[[]]",
    '{"a": null}',
    '{"": {"": []}}',
    '[null, {}, [], "x", -1, 1.5, 1e400, 9223372036854775808, true]',
    "1" * 5000,
    f"[{'1' * 5000}]",
    '{"kind": "fixed", "seconds": %s}' % ("1" * 5000),
    "[" * 5000 + "]" * 5000,
    '{"a": ' * 5000 + "1" + "}" * 5000,
    '{"kind": "intervals", "seconds": [], "max_attempts": -1}',
    '{"kind": ["fixed"], "x": 1}',
)
_SPANS = ("0", "-1 day", "1 us", "2000000 years", "178000000 years", "1000000 mons -30000000 days")


def _whole(bits: int) -> tuple[str, ...]:
    maximum = 2 ** (bits - 1) - 1
    return (str(-maximum - 1), "-1", "0", "1", str(maximum - 1), str(maximum))


BY_KIND: dict[type[models.Field[Any, Any]], Sequence[str]] = {
    models.DateTimeField: _TIMES,
    models.CharField: _TEXTS,
    models.TextField: _TEXTS,
    models.JSONField: _JSON,
    models.DurationField: _SPANS,
    models.BooleanField: ("true", "false"),
    models.BigIntegerField: _whole(64),
    models.SmallIntegerField: _whole(16),
    models.IntegerField: _whole(32),
    models.FloatField: ("NaN", "Infinity", "-Infinity", "-1", "0", "1e-300", "1e6", "1e300"),
}


def values(field: models.Field[Any, Any]) -> Iterator[str | None]:
    """Yield the odd values of a column as SQL text: by its type, so new columns are covered.

    A column computed by the database has none: any value is refused.
    """
    if field.generated:
        return
    kind = next(each for each in BY_KIND if isinstance(field, each))
    yield from BY_KIND[kind]
    if field.null:
        yield None


def insert(model: type[models.Model], columns: dict[str, str | None]) -> Any:
    """Insert a row like psql; return its primary key, or None if the table refuses it."""
    meta = model._meta
    assert meta.pk is not None
    names = ", ".join(columns)
    marks = ", ".join("%s" for _ in columns)
    statement = f"insert into {meta.db_table} ({names}) values ({marks}) returning {meta.pk.column}"
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(statement, list(columns.values()))
            return cursor.fetchone()[0]
    except (IntegrityError, DataError):
        return None
