"""A message as a producer writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django_mq.exceptions import When
from django_mq.policy.backoff import RetryPolicy

if TYPE_CHECKING:
    from django_mq.policy.uniqueness import OnDuplicate


@dataclass(frozen=True, slots=True)
class Message:
    """One message to broadcast; the fields are the options of `broadcast()`.

    `payload` is any JSON value; `None` is stored as `{}`. `after`, `expires` and `unique_for` are
    seconds or a timedelta; the first two may also be an aware datetime. `priority` is -100..100,
    higher first. `on_duplicate` (None means "skip") and `unique_for` need a `unique_id`.
    Nothing is checked before the message is broadcast.
    """

    type: str
    payload: Any = None
    _: KW_ONLY
    queue: str | None = None
    metadata: Mapping[str, Any] | None = None
    schema_version: int = 1
    after: When | None = None
    expires: When | None = None
    priority: int = 0
    key: str | None = None
    unique_id: str | None = None
    on_duplicate: OnDuplicate | None = None
    unique_for: float | timedelta | None = None
    retry: RetryPolicy | None = None
