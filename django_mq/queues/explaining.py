"""Why a message does not run now: the exact reason, for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from django.db.models.functions import Now

from django_mq.conf import get_settings
from django_mq.models import QueuedMessage, QueueState
from django_mq.queues.connecting import alias_of
from django_mq.queues.fleet import Worker, workers
from django_mq.queues.gone import last_known
from django_mq.queues.obstacles import in_line, obstacle, shown, worker_of
from django_mq.queues.standing import shown_count, standings
from django_mq.states import MessageState
from django_mq.store.heads import Standing

#: Not a state of a message, but of an id: nothing has it.
GONE = "gone"
#: Reasons that this library gives, up to a colon; others are a handler's own words.
OWN_REASONS = {
    "exhausted": "its last attempt failed",
    "expired": "it expired before an attempt could start",
    "held for too long": "no worker could run it for too long",
}


@dataclass(frozen=True, slots=True)
class Why:
    """The state of message `id` and the reason for it; `str()` is the whole answer.

    `state` is one of MessageState, or "gone". `text` holds names, times and numbers only;
    `error` is what a handler said or raised, which may be as private as the payload. `behind` is
    the message of its key, or of its ordered queue, that must go before this one: the first.
    """

    id: int
    state: str
    text: str
    error: str = ""
    behind: int | None = None

    def __str__(self) -> str:
        return f"{self.text} Last error: {self.error}" if self.error else self.text


def why(id: int, *, using: str | None = None) -> Why:
    """Say why message `id` does not run now, or that it would be next, or that it is gone."""
    alias = alias_of(using)
    message = _read(id, alias)
    if message is None:
        return Why(id, GONE, *last_known(id, alias))
    case = _Case(message, alias)
    text, error = _REASONS[message.state](case)
    if message.state in _LATER and (line := _behind(case)):
        text += f". Then it {line}"
    text = f"Message {id} ({message.type}, queue {message.queue}) {text}."
    standing = case.standing
    return Why(id, message.state.value, text, error, standing.waits_for if standing else None)


def _read(id: int, alias: str) -> QueuedMessage | None:
    messages = QueuedMessage.objects.using(alias).with_state().annotate(now=Now())
    return messages.defer("payload", "metadata").filter(pk=id).first()


class _Case:
    """A message, and what has to be looked up to explain it."""

    def __init__(self, message: QueuedMessage, alias: str) -> None:
        self.message = message
        self.alias = alias
        self.now: datetime = message.now  # type: ignore[attr-defined]  # annotated
        self.ordered = get_settings().queue(message.queue).ordered

    @cached_property
    def standing(self) -> Standing | None:
        """Where a message that waits stands in its line; None when it is in none."""
        waits = self.message.leased_until is None and self.message.dead_at is None
        if not waits or (self.message.key is None and not self.ordered):
            return None
        return standings([self.message.pk], using=self.alias).get(self.message.pk)

    def workers(self) -> list[Worker]:
        return workers(using=self.alias)

    def holder(self) -> str:
        """Return who has claimed the message: host and process, if its heartbeat is known."""
        id = worker_of(self.message)
        for worker in self.workers():
            if worker.id == id:
                seen = "" if worker.alive else f", last seen {shown(worker.last_seen)}"
                return f"by worker {id} (host {worker.host}, process {worker.pid}{seen})"
        return f"by worker {id} (no heartbeat of it is known)"


Reason = tuple[str, str]


def _dead(case: _Case) -> Reason:
    message = case.message
    text = f"{_died(message)}. Requeue it to try again, or discard it"
    reason = message.dead_reason
    return text, message.last_error if reason in OWN_REASONS else reason


def _died(message: QueuedMessage) -> str:
    own = OWN_REASONS.get(message.dead_reason.partition(":")[0])
    return (
        f"is dead since {shown(message.dead_at)}: {own or 'no more attempts will be made'}"
        f" ({message.attempts} of {message.max_attempts} attempts used)"
    )


def _running(case: _Case) -> Reason:
    message = case.message
    text = f"runs now, attempt {message.attempts} of {message.max_attempts}, {case.holder()}"
    if message.leased_until is not None and message.leased_until <= case.now:
        text += f". Its lease lapsed at {shown(message.leased_until)}; the worker still lists it"
    return text, ""


def _leased(case: _Case) -> Reason:
    message = case.message
    return (
        f"is leased until {shown(message.leased_until)}, {case.holder()}: it runs there soon, or"
        " is taken over when the lease lapses",
        "",
    )


def _blocked(case: _Case) -> Reason:
    if line := _behind(case):
        return line, ""
    before = case.message.blocked_by
    return (
        f"is the first of its key {case.message.key} now: message {before}, which it waited"
        " behind, is gone or does not count any more. A worker frees it with its next chores",
        "",
    )


def _behind(case: _Case) -> str:
    """Say what a message waits behind in its line, and how that one stands; empty: nothing."""
    standing = case.standing
    if standing is None or standing.waits_for is None:
        return ""
    first = _read(standing.waits_for, case.alias)
    whose = "its ordered queue" if case.ordered else f"its key {case.message.key}"
    if first is None:  # acked while we looked
        return f"waited behind message {standing.waits_for} of {whose}, which is gone by now"
    if first.state == MessageState.DEAD:
        stands = f"{_died(first)}. Requeue or discard that one, and the others go on"
    else:
        stands = _REASONS[first.state](_Case(first, case.alias))[0]
    if standing.ahead > 1:
        n = shown_count(standing.ahead)
        return f"waits behind {n} others of {whose}; the first, message {first.pk}, {stands}"
    return f"waits behind message {first.pk} of {whose}, which {stands}"


def _held(case: _Case) -> Reason:
    message = case.message
    text = f"is held since {shown(message.held_since)}: {obstacle(message)}"
    if message.processable_after > case.now:
        text += f". Workers look again at {shown(message.processable_after)}"
    return text, message.last_error


def _expired(case: _Case) -> Reason:
    return (
        f"expired at {shown(case.message.expires_at)}: no attempt starts any more, and it becomes"
        " a dead letter as soon as a worker meets it",
        "",
    )


def _paused(case: _Case) -> Reason:
    queue = QueueState.objects.using(case.alias).filter(pk=case.message.queue).first()
    if queue is None:
        return "was in a paused queue a moment ago", ""
    if queue.paused_at is not None and (
        queue.paused_until is None or queue.paused_until > case.now
    ):
        end = f"until {shown(queue.paused_until)}" if queue.paused_until else "until it is resumed"
        return f"waits because its queue is paused {end}", ""
    return (
        f"waits because its queue backs off until {shown(queue.backoff_until)}"
        f" (level {queue.backoff_level})",
        "",
    )


def _retrying(case: _Case) -> Reason:
    message = case.message
    return (
        f"failed attempt {message.attempts} of {message.max_attempts} and runs again after"
        f" {shown(message.processable_after)}",
        message.last_error,
    )


def _delayed(case: _Case) -> Reason:
    return f"is delayed until {shown(case.message.processable_after)}", ""


def _processable(case: _Case) -> Reason:
    message = case.message
    if message.leased_until is not None:
        text = (
            f"is due: the lease of worker {worker_of(message)} lapsed at"
            f" {shown(message.leased_until)}, and the next worker that looks takes it over"
        )
        return f"{text}, {in_line(message, case.workers(), case.alias)}", ""
    text = f"is due since {shown(message.processable_after)}"
    if line := _behind(case):
        return f"{text}, but {line}", ""
    return f"{text}, {in_line(message, case.workers(), case.alias)}", ""


#: A message in one of these states waits for something of its own first, then in its line.
_LATER = (MessageState.HELD, MessageState.PAUSED, MessageState.RETRYING, MessageState.DELAYED)
_REASONS: dict[MessageState, Callable[[_Case], Reason]] = {
    MessageState.DEAD: _dead,
    MessageState.RUNNING: _running,
    MessageState.LEASED: _leased,
    MessageState.BLOCKED: _blocked,
    MessageState.HELD: _held,
    MessageState.EXPIRED: _expired,
    MessageState.PAUSED: _paused,
    MessageState.RETRYING: _retrying,
    MessageState.DELAYED: _delayed,
    MessageState.PROCESSABLE: _processable,
}
