"""Relays pass messages on to a broker; see docs/relays.md."""

from __future__ import annotations

from typing import Any

from django.core import checks

from django_mq.checks.registering import TAG, CheckMessages, check
from django_mq.conf import Settings
from django_mq.contrib.relays.sending import Relay, unknown_destination
from django_mq.exceptions import InvalidHandler
from django_mq.handlers import all_handlers, get, handler
from django_mq.policy.column_bounds import MAX_INTEGER
from django_mq.values import short_repr

__all__ = ["relay"]


def relay(
    *patterns: str,
    to: str,
    queue: str | None = None,
    name: str | None = None,
    inbox: bool = False,
    **options: Any,
) -> None:
    """Pass the messages whose type matches one of `patterns` on to the destination `to`.

    `DJANGO_MQ["RELAYS"]` has the destinations. A message is acked once the broker has confirmed it,
    so it arrives at least once; its id is the id of the event. While the broker is away, messages
    wait without using attempts. Of messages with one key, the next is sent after the broker has
    confirmed the one before; in Kafka the key is the record's, and a partition keeps the order.

    - `queue` and `name`: of the handler; default `relay.<to>` for both.
    - `inbox`: also pass on messages that came in through an inbox.
    - `options`: further options of `@handler`, such as `where=`, `retry=`, `max_batch=`.

    Raises InvalidHandler if the options cannot make a handler. A destination that the settings do
    not have is a system check error.
    """
    if not isinstance(to, str) or not to:
        raise InvalidHandler(f"relay(to={short_repr(to)}): name a destination of RELAYS")
    if fixed := {"batch", "atomic", "cron", "every", "tz"} & set(options):
        raise InvalidHandler(f"relay(to={to!r}) decides {', '.join(sorted(fixed))} itself")
    own_name = name or f"relay.{to}"
    known = get(own_name)
    if known is not None and known.patterns != patterns:
        raise InvalidHandler(
            f"{own_name} is already a handler: give all patterns to one relay(), or one of them"
            " another name="
        )
    options.setdefault("schema_version", MAX_INTEGER)  # it passes on what it need not understand
    handler(
        *patterns,
        queue=queue or f"relay.{to}",
        name=own_name,
        batch=True,
        atomic=False,
        **options,
    )(Relay(to, inbox=inbox).send)


@check(TAG)
def check_destinations(settings: Settings) -> CheckMessages:
    """E014: a relay to a destination that is not there."""
    relays = (getattr(each.function, "__self__", None) for each in all_handlers())
    named = {each.to for each in relays if isinstance(each, Relay)}
    for to in sorted(named - set(settings.relays)):
        yield checks.Error(
            f"{unknown_destination(to)}.",
            hint="Add it, or correct the relay(...) in handlers.py.",
            id="django_mq.E014",
        )
