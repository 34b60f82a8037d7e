"""The handler of a relay: a batch goes to a broker, whose answers end the messages."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from time import monotonic

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured

from django_mq.conf import get_settings
from django_mq.conf.relays import Destination
from django_mq.contrib.relays.envelope import Outgoing, outgoing
from django_mq.contrib.relays.links import KINDS, BrokerAway, BrokerLink, LinkPool, NotTaken
from django_mq.messages import Delivery
from django_mq.policy.plain_text import one_line

logger = logging.getLogger("django_mq")

#: Metadata of a message that came in through an inbox.
INBOX = "mq.inbox"
#: Seconds until a message is tried again whose broker was away. One that the broker got and did not
#: take waits longer: if it is the reason, the others go first.
AWAY_SECONDS, NOT_TAKEN_SECONDS = 5.0, 10.0
#: Seconds for which a broker that took a message counts as one that is there.
THERE_SECONDS = 60.0


class Relay:
    """Passes the messages of one handler on to a destination."""

    def __init__(self, to: str, *, inbox: bool) -> None:
        self.to = to
        self._inbox = inbox
        self._links: LinkPool | None = None
        self._away = False
        self._taken_at = -inf

    @property
    def links(self) -> LinkPool:
        """The connections to the destination; raises ImproperlyConfigured if there is none."""
        destination = get_settings().relays.get(self.to)
        if destination is None:
            raise ImproperlyConfigured(unknown_destination(self.to))
        if self._links is None or self._links.destination is not destination:
            self._links = LinkPool(destination)
        return self._links

    def send(self, deliveries: list[Delivery]) -> None:
        """Publish the messages; give a verdict on those that the broker has not confirmed."""
        links = self.links
        source = source_of(links.destination)
        waiting: dict[str, tuple[Outgoing, Delivery]] = {}
        for each in deliveries:
            if INBOX in each.metadata and not self._inbox:
                continue  # it would go back to where it came from
            message = outgoing(each, links.destination.envelope, source)
            waiting[message.id] = message, each
        failed: set[str] = set()
        kind = KINDS[links.destination.kind]
        while waiting:
            try:
                link, used = links.take()
            except BrokerAway as away:
                return self._wait_for_broker(waiting.values(), away)
            try:
                self._publish(link, waiting, failed, together=kind.keeps_order)
            except BrokerAway as away:
                link.close()
                if not (used and kind.stays_open):
                    return self._wait_for_broker(waiting.values(), away)
                continue  # the broker may have restarted since: try a new connection
            except BaseException:
                link.close()
                raise
            links.give_back(link)
            self._is_back()

    def _publish(
        self,
        link: BrokerLink,
        waiting: dict[str, tuple[Outgoing, Delivery]],
        failed: set[str],
        *,
        together: bool,
    ) -> None:
        """Publish the waiting messages; remove each that has its answer, and note failed keys."""
        for wave in waves([message for message, _ in waiting.values()], together=together):
            sent = [each for each in wave if each.key not in failed]
            away: BrokerAway | None = None
            for message, error in link.send(sent) if sent else ():
                delivery = waiting[message.id][1]
                if isinstance(error, BrokerAway) and not self._fails_again(delivery, error):
                    away = error
                    if isinstance(error, NotTaken):
                        del waiting[message.id]
                        _snooze(delivery, error, NOT_TAKEN_SECONDS)
                    continue
                del waiting[message.id]
                if error is None:
                    self._taken_at = monotonic()
                else:
                    delivery.fail(error)
                    failed.update([] if message.key is None else [message.key])
            if away is not None:
                raise away
        for _, delivery in waiting.values():  # their key failed, perhaps in another queue or line
            delivery.snooze(0)
        waiting.clear()

    def _fails_again(self, delivery: Delivery, error: BrokerAway) -> bool:
        """Return whether the message is why: it failed before, and the broker takes others.

        After a failed attempt a message comes alone, so no later one of its batch can tell.
        """
        if not isinstance(error, NotTaken) or delivery.attempt == 1:
            return False
        return monotonic() - self._taken_at < THERE_SECONDS

    def _wait_for_broker(
        self, unanswered: Iterable[tuple[Outgoing, Delivery]], away: BrokerAway
    ) -> None:
        for _, delivery in unanswered:
            _snooze(delivery, away, AWAY_SECONDS)
        if not self._away:
            self._away = True
            logger.warning(
                "relay to %s: the broker is away, its messages wait: %s",
                self.to,
                one_line(str(away)),
                extra={"event": "relay_away", "relay": self.to},
            )

    def _is_back(self) -> None:
        if self._away:
            self._away = False
            logger.info(
                "relay to %s: the broker is back",
                self.to,
                extra={"event": "relay_back", "relay": self.to},
            )


def _snooze(delivery: Delivery, away: BrokerAway, seconds: float) -> None:
    reason = f"the broker is away: {one_line(str(away))}"
    delivery.snooze(seconds, backoff=True, reason=reason)


def waves(batch: Sequence[Outgoing], *, together: bool) -> Iterator[list[Outgoing]]:
    """Yield the messages in parts that have one message of each key at most, in order.

    All of them at once if `together`.
    """
    rest = list(batch)
    while rest:
        wave, later, keys = [], [], set()
        for each in rest:
            if each.key in keys and not together:
                later.append(each)
                continue
            wave.append(each)
            if each.key is not None:
                keys.add(each.key)
        yield wave
        rest = later


def source_of(destination: Destination) -> str:
    """Return the CloudEvents source: that of the destination, else the name of the project."""
    if destination.source is not None:
        return destination.source
    return "/" + (getattr(django_settings, "ROOT_URLCONF", "") or "django_mq").partition(".")[0]


def unknown_destination(to: str) -> str:
    """Return the text for a relay whose destination is not in the settings."""
    known = ", ".join(map(repr, get_settings().relays)) or "none"
    return f"relay(to={to!r}): DJANGO_MQ['RELAYS'] has no such destination (it has {known})"
