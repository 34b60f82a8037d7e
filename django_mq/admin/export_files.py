"""Rows as the text of a CSV or JSON file, with secrets hidden and formulas defused."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from io import StringIO
from typing import Any

from django_mq.admin.texts import MAX_JSON
from django_mq.queues import redacted

#: Columns that contain JSON.
DOCUMENTS = ("payload", "metadata")
TYPES = {"csv": "text/csv; charset=utf-8", "json": "application/json"}

# A spreadsheet runs a cell that begins with one of these as a formula, even after spaces.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def harmless(value: object) -> str:
    """Return a cell that a spreadsheet shows as text, and never runs as a formula.

    >>> harmless("=1+1"), harmless("shop.orders"), harmless(-7), harmless(None)
    ("'=1+1", 'shop.orders', '-7', '')
    """
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    text = str(value)
    is_formula = isinstance(value, str) and text.lstrip(" ").startswith(_FORMULA)
    return f"'{text}" if is_formula else text


def document(text: str | None) -> Any:
    """Return a stored document with secrets hidden; None if hiding them failed."""
    if text is None or len(text) > MAX_JSON:
        return None
    try:
        return redacted(json.loads(text))
    except (ValueError, RecursionError):
        return None


def as_csv(rows: Iterator[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Return the lines of a CSV file, with a header."""
    buffer = StringIO()
    writer = csv.writer(buffer)
    writer.writerow(columns)
    for row in rows:
        writer.writerow(
            harmless(json.dumps(row[name], ensure_ascii=False) if name in DOCUMENTS else row[name])
            for name in columns
        )
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def as_json(rows: Iterator[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Return a JSON array, one object per line."""
    joint = "[\n"
    for row in rows:
        found = {name: row[name] for name in columns}
        yield joint + json.dumps(found, ensure_ascii=False, default=datetime.isoformat)
        joint = ",\n"
    yield "\n]\n" if joint != "[\n" else "[]\n"
