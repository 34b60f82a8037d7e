"""A message as a producer writes it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django_mq.exceptions import InvalidName
from django_mq.messages.classes import class_of
from django_mq.policy.backoff import RetryPolicy
from django_mq.values import When

if TYPE_CHECKING:
    from django_mq.messages.adapters import MessageInstance
    from django_mq.policy.uniqueness import OnDuplicate


@dataclass(frozen=True, slots=True)
class Message:
    """One message to broadcast; the fields are the options of `broadcast()`.

    `payload` is any JSON value; `None` is stored as `{}`. `after`, `expires` and `unique_for` are
    seconds or a timedelta; the first two may also be an aware datetime. `priority` is -100..100,
    higher first. `unique_for`, and `on_duplicate` unless it is "skip", need a `unique_id`.

    `Message(instance)` takes type, payload and schema version from an instance of a message class;
    InvalidPayload says which field has wrong content. `broadcast()` checks everything else.
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
    on_duplicate: OnDuplicate = "skip"
    unique_for: float | timedelta | None = None
    retry: RetryPolicy | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            type: str | MessageInstance,
            payload: Any = None,
            *,
            queue: str | None = None,
            metadata: Mapping[str, Any] | None = None,
            schema_version: int = 1,
            after: When | None = None,
            expires: When | None = None,
            priority: int = 0,
            key: str | None = None,
            unique_id: str | None = None,
            on_duplicate: OnDuplicate = "skip",
            unique_for: float | timedelta | None = None,
            retry: RetryPolicy | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        given: object = self.type
        if not isinstance(given, str):
            self._take(given)

    def _take(self, instance: object) -> None:
        """Take type, payload and version from an instance that was passed as the type."""
        found = class_of(instance)
        if found is None:
            given = f"a {instance.__class__.__qualname__}"
            if isinstance(instance, Message):
                given += ": store it with broadcast_many([message])"
            elif inspect.isclass(instance):
                given = f"the class {instance.__qualname__}: pass an instance"
            raise InvalidName(
                f"the type of a message is text or an instance of a @message class, not {given}"
            )
        if self.payload is not None or self.schema_version != 1:
            raise TypeError(
                f"the {instance.__class__.__qualname__} is type, payload and version at once:"
                " leave out payload= and schema_version="
            )
        object.__setattr__(self, "type", found.type)
        object.__setattr__(self, "payload", found.dump(instance))
        object.__setattr__(self, "schema_version", found.version)
