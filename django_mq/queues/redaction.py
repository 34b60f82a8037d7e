"""Payloads for display: values of secret keys are hidden, at any depth."""

from __future__ import annotations

from typing import Any

from django_mq.conf import get_settings

#: Replaces a hidden value, as on Django's own debug pages.
REDACTED = "********************"


def redacted(value: Any) -> Any:
    """Return a decoded JSON value with the values of secret keys hidden.

    A key is secret when the pattern in the setting `REDACT` matches any part of it; with None
    nothing is hidden.
    """
    pattern = get_settings().redact
    if pattern is None:
        return value
    hides = pattern.search

    def redact(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: REDACTED if hides(key) else redact(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [redact(inner) for inner in value]
        return value

    return redact(value)
