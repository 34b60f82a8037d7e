"""The stored filter of an operation, in words for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django_mq.conf.local_time import local
from django_mq.policy.message_filter import TIMES
from django_mq.policy.plain_text import one_line

#: The maximum number of bytes of all conditions.
MAX_WORDS = 2000
#: Conditions with values of payloads or metadata.
_PRIVATE = ("at_path", "metadata")


def public_words(conditions: dict[str, Any]) -> str:
    """Return the conditions on one line, without values of payloads and metadata.

    >>> public_words({"queues": ["mail"], "state": "dead", "at_path": "7"})
    'queue mail, state dead, at path ...'
    >>> public_words({})
    'no filter'
    """
    return one_line(", ".join(in_words(without_values(conditions))), MAX_WORDS) or "no filter"


def without_values(conditions: dict[str, Any]) -> dict[str, Any]:
    """Return the conditions without values of payloads and metadata.

    >>> without_values({"path": ["payload", "id"], "at_path": "7"})
    {'path': ['payload', 'id'], 'at_path': '...'}
    """
    return {name: "..." if name in _PRIVATE else each for name, each in conditions.items()}


def in_words(conditions: dict[str, Any]) -> list[str]:
    """Return the stored conditions of an operation, each in a few words.

    >>> in_words({"queues": ["mail"], "state": "dead", "at_path": "7", "path": ["payload", "id"]})
    ['queue mail', 'state dead', 'at path 7', 'path payload.id']
    """
    found = []
    for name, value in conditions.items():
        if name == "heads":
            found.append("the first message of the line of each")
            continue
        if name == "path":
            value = ".".join(map(str, value)) if isinstance(value, list) else value
        elif isinstance(value, list):
            value = " or ".join(map(str, value)) or "none"
        elif isinstance(value, str) and name in TIMES:
            value = _shown(value)
        found.append(f"{'queue' if name == 'queues' else name.replace('_', ' ')} {value}")
    return found


def _shown(text: str) -> str:
    try:
        at = datetime.fromisoformat(text)
        return f"{local(at):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError):
        return text
