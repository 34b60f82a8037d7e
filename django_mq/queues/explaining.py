"""Why a message does not run now: the exact reason, for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from django.db.models.functions import Now

from django_mq.models import FailedAttempt, QueuedMessage, QueueState
from django_mq.queues.connecting import alias_of
from django_mq.queues.fleet import Worker, workers
from django_mq.queues.obstacles import in_line, obstacle, shown, worker_of
from django_mq.states import MessageState

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
    `error` is what a handler said or raised, which may be as private as the payload.
    """

    id: int
    state: str
    text: str
    error: str = ""

    def __str__(self) -> str:
        return f"{self.text} Last error: {self.error}" if self.error else self.text


def why(id: int, *, using: str | None = None) -> Why:
    """Say why message `id` does not run now, or that it would be next, or that it is gone."""
    alias = alias_of(using)
    messages = QueuedMessage.objects.using(alias).with_state().annotate(now=Now())
    message = messages.defer("payload", "metadata").filter(pk=id).first()
    if message is None:
        return _gone(id, alias)
    state = message.state
    text, error = _REASONS[state](_Case(message, alias))
    text = f"Message {id} ({message.type}, queue {message.queue}) {text}."
    return Why(id, state.value, text, error)


class _Case:
    """A message, and what has to be looked up to explain it."""

    def __init__(self, message: QueuedMessage, alias: str) -> None:
        self.message = message
        self.alias = alias
        self.now: datetime = message.now  # type: ignore[attr-defined]  # annotated

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


def _gone(id: int, alias: str) -> Why:
    text = f"Message {id} is not stored: it was acked, cancelled or purged, or never existed."
    last = (
        FailedAttempt.objects.using(alias).filter(message_id=id).order_by("-attempt", "-pk").first()
    )
    if last is None:
        return Why(id, GONE, text)
    handler = f" in handler {last.handler}" if last.handler else ""
    return Why(
        id,
        GONE,
        f"{text} Its last failed attempt was number {last.attempt} of {last.type}, queue"
        f" {last.queue},{handler} at {shown(last.ended_at)}.",
        f"{last.error_class}: {last.error_text}".strip(": "),
    )


def _dead(case: _Case) -> Reason:
    message = case.message
    reason = message.dead_reason
    own = OWN_REASONS.get(reason.partition(":")[0])
    text = (
        f"is dead since {shown(message.dead_at)}: {own or 'no more attempts will be made'}"
        f" ({message.attempts} of {message.max_attempts} attempts used). Requeue it to try again,"
        " or discard it"
    )
    return text, message.last_error if reason in OWN_REASONS else reason


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
    message = case.message
    messages = QueuedMessage.objects.using(case.alias).with_state().defer("payload", "metadata")
    ahead = messages.filter(pk=message.blocked_by or 0).first()
    text = f"waits behind message {message.blocked_by} of its key {message.key}"
    if ahead is None:
        return f"{text}, which is gone: a worker frees it with its next chores", ""
    if ahead.state == MessageState.DEAD:
        return f"{text}, which is dead: requeue or discard that one", ""
    return f"{text}, which is {ahead.state.label}", ""


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
    else:
        text = f"is due since {shown(message.processable_after)}"
    return f"{text}, {in_line(message, case.workers(), case.alias)}", ""


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
