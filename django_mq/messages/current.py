"""The delivery whose handler runs in this context, the database of its message, and the loop."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from django.db import connections

from django_mq.messages.delivery import Delivery

#: The delivery that runs in this context; messages broadcast here name it as their cause.
current_delivery: ContextVar[Delivery | None] = ContextVar("django_mq.delivery", default=None)
_alias: ContextVar[str | None] = ContextVar("django_mq.alias", default=None)


def set_current(delivery: Delivery, alias: str) -> None:
    """Note that the handler of `delivery`, from the database `alias`, runs in this context."""
    current_delivery.set(delivery)
    _alias.set(alias)


def foreign_alias(alias: str) -> str | None:
    """Return the alias of the current delivery, if its database is not that of `alias`."""
    here = _alias.get()
    if here is None or here == alias or _address(here) == _address(alias):
        return None
    return here


def is_on_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _address(alias: str) -> tuple[str, ...]:
    settings = connections.settings.get(alias, {"NAME": alias})
    return tuple(str(settings.get(name, "")) for name in ("HOST", "PORT", "NAME"))
