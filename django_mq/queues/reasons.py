"""The exact reason why a message is not running now, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from django_mq.conf import alias_of, command_on
from django_mq.conf.local_time import local_text
from django_mq.messages import worker_of
from django_mq.models import QueuedMessage, QueueState
from django_mq.policy.durations import span
from django_mq.queues.busy import ends, holder, holder_name, ran_for, suspicion
from django_mq.queues.case import LATE, VERY_LATE, Case, read_message
from django_mq.queues.dead_letters import OWN_REASONS, death, remedy, remedy_of_head
from django_mq.queues.fleet import WorkerProcess
from django_mq.queues.obstacles import (
    claim_refusal,
    in_line,
    last_known,
    locked,
    obstacle,
    obstacle_for,
    other_code,
)
from django_mq.queues.stalled import shown_count
from django_mq.states import GONE_AFTER, MessageState
from django_mq.store.waiting_behind import LinePosition
from django_mq.values import short_repr

#: The state of an id without a stored message.
GONE = "gone"
#: After this silence, a heartbeat is late.
LATE_HEARTBEAT = timedelta(seconds=15)
#: The fate of a message whose worker is gone.
TAKES_OVER = (
    "Another worker takes the message over when the lease lapses; no command can shorten it"
)


@dataclass(frozen=True, slots=True)
class Why:
    """The state of message `id` and the reason for it; `str()` is the whole answer.

    `state` is one of MessageState, or "gone". `text` holds only names, times and numbers; `error`
    comes from a handler and may be as private as the payload. `behind` is the id of the first
    message of its key, or of its ordered queue, if this message waits for it. If it waits only for
    that message, `error` is the error of that message.
    """

    id: int
    state: str
    text: str
    error: str = ""
    behind: int | None = None

    def __str__(self) -> str:
        return f"{self.text} Last error: {self.error}" if self.error else self.text


def why(id: int, *, using: str | None = None) -> Why:
    """Explain why message `id` is not running now, or that it is next, running, or gone."""
    if type(id) is not int:
        raise ValueError(f"{short_repr(id)} is not the id of a message: give a whole number")
    alias = alias_of(using)
    message = read_message(id, alias)
    if message is None:
        return Why(id, GONE, *last_known(id, alias))
    return explain(message, Case(message, alias).position, late=LATE, using=alias)


def explain(
    message: QueuedMessage,
    position: LinePosition | None,
    first: QueuedMessage | None = None,
    *,
    late: timedelta = VERY_LATE,
    using: str,
) -> Why:
    """Explain a message that was read with its state, and with the database's time as `now`.

    `position` is its position in its line, None for none, and `first` the message that it waits
    for; if `first` is missing, that message is read. If the message has been due for longer than
    `late`, the database is asked whether it refuses the claim.
    """
    case = Case(message, using, late)
    case.position, case.first = position, first
    text, error = _REASONS[message.state](case)
    if message.state in _OWN_CONDITION:
        line, of_first = _behind(case)
        text += f". Then it {line}" if line else ""
        error = error or of_first
    text += f". {alone}" if (alone := suspicion(message)) else ""
    text = f"Message {message.pk} ({message.type}, queue {message.queue}) {text}."
    behind = case.position.waits_for if case.position else None
    return Why(message.pk, message.state.value, text, error, behind)


Reason = tuple[str, str]


def _dead(case: Case) -> Reason:
    message = case.message
    return f"{death(message)}. {remedy(message, case.alias)}", _error_of_dead(message)


def _error_of_dead(message: QueuedMessage) -> str:
    return message.last_error if message.dead_reason in OWN_REASONS else message.dead_reason


def _running(case: Case) -> Reason:
    message, worker = case.message, holder(case.message, case.workers())
    ran = ran_for(message, case.alias)
    began = f"for {span(ran)}, " if ran is not None else ""
    by = f"{began}by {holder_name(message, worker)}"
    text = f"runs now, attempt {message.attempts} of {message.max_attempts}, {by}"
    if worker is not None and worker.silent >= LATE_HEARTBEAT:
        return text + _perhaps_gone(message, worker), ""
    if message.leased_until is not None and message.leased_until <= case.now:
        text += (
            ". Its lease is not renewed while the handler has the row locked: it lapsed at"
            f" {local_text(message.leased_until)}, and the worker keeps the message"
        )
    return text + ends(message, ran, case.now, case.alias), ""


def _perhaps_gone(message: QueuedMessage, worker: WorkerProcess) -> str:
    """Say what becomes of a running message if its worker, whose heartbeat is late, is gone."""
    counts_as_gone = worker.last_seen + GONE_AFTER
    return (
        f". The last heartbeat of its worker came at {local_text(worker.last_seen)}, and one is due"
        " every 10 s. If the worker is gone, another one takes the message over after"
        f" {local_text(max(message.leased_until or counts_as_gone, counts_as_gone))}, and no"
        " command can do so earlier"
    )


def _leased(case: Case) -> Reason:
    message, worker = case.message, holder(case.message, case.workers())
    text = f"is leased until {local_text(message.leased_until)}, by {holder_name(message, worker)}"
    if worker is not None and worker.alive:
        text += ": it will run there soon, or another worker takes it over when the lease lapses"
        return text, ""
    if worker is None:
        text += ", of which no heartbeat is stored: it is gone, unless it has just started"
    else:
        text += f", which is gone: its last heartbeat came at {local_text(worker.last_seen)}"
    return f"{text}. {TAKES_OVER}", ""


def _blocked(case: Case) -> Reason:
    line, error = _behind(case)
    if line:
        return line, error
    before = case.message.blocked_by
    return (
        f"is now the first of its key {case.message.key}: message {before}, which blocked it, is"
        " gone or no longer blocks. The next maintenance run of a worker frees it",
        "",
    )


def _behind(case: Case) -> Reason:
    """Describe the message that this one waits behind; empty if it waits behind none."""
    position = case.position
    if position is None or position.waits_for is None:
        return "", ""
    first = case.read_first(position.waits_for, position)
    whose = "its ordered queue" if case.ordered else f"its key {case.message.key}"
    n = shown_count(position.ahead)
    if first is None:  # all were acked in the meantime
        if position.ahead > 1:
            return f"waited behind {n} others of {whose}, which are now gone", ""
        return f"waited behind message {position.waits_for} of {whose}, which is now gone", ""
    if first.state == MessageState.DEAD:
        reason = f"{death(first)}. {remedy_of_head(first, case.alias)}"
        error = _error_of_dead(first)
    else:
        ahead = Case(first, case.alias, case.late)
        ahead.position = None  # nothing is ahead of the first message
        reason, error = _REASONS[first.state](ahead)
    if position.ahead > 1:
        return f"waits behind {n} others of {whose}; the first, message {first.pk}, {reason}", error
    return f"waits behind message {first.pk} of {whose}, which {reason}", error


def _held(case: Case) -> Reason:
    message = case.message
    found, of_worker = obstacle_for(message)
    is_same = bool(found) and message.last_error.startswith(of_worker)
    found = found or other_code(message, case.workers())
    text = f"has been held since {local_text(message.held_since)}: {found}"
    if message.processable_after > case.now:
        text += f". Workers check it again at {local_text(message.processable_after)}"
    # `last_error` is the worker's reason for holding the message: mostly the one found here, too.
    return text, "" if is_same else message.last_error


def _expired(case: Case) -> Reason:
    return (
        f"expired at {local_text(case.message.expires_at)}: no attempt will start, and the"
        " next worker that finds it dead-letters it",
        "",
    )


def _paused(case: Case) -> Reason:
    queue = QueueState.objects.using(case.alias).filter(pk=case.message.queue).first()
    if queue is None:
        return "was in a paused queue a moment ago: try again", ""
    if queue.paused_at is not None and (
        queue.paused_until is None or queue.paused_until > case.now
    ):
        end = local_text(queue.paused_until) if queue.paused_until else "it is resumed"
        resume = command_on(case.alias, f"mq_resume {queue.pk}")
        return (
            f"waits because its queue is paused until {end} (since {local_text(queue.paused_at)})."
            f" {resume} ends the pause",
            "",
        )
    return (
        f"waits because its queue is backing off until {local_text(queue.backoff_until)}"
        f" (level {queue.backoff_level})",
        case.message.last_error,
    )


def _retrying(case: Case) -> Reason:
    message = case.message
    return (
        f"failed attempt {message.attempts} of {message.max_attempts} and runs again after"
        f" {local_text(message.processable_after)}{_would_be_held(message)}",
        message.last_error,
    )


def _delayed(case: Case) -> Reason:
    message = case.message
    text = f"is delayed until {local_text(message.processable_after)}{_would_be_held(message)}"
    return text, message.last_error


def _would_be_held(message: QueuedMessage) -> str:
    """Say why a worker that runs the code of this process would hold `message` once it is due."""
    found = obstacle(message)
    if not found:
        return ""
    return f". A worker with the code of this process would then hold message {message.pk}: {found}"


def _processable(case: Case) -> Reason:
    message, is_late = case.message, case.is_late()
    if is_late and (refused := claim_refusal(message.pk, case.alias)):
        return (
            f"cannot be claimed: the database refuses it ({refused.error_class}). A trigger, a"
            " policy or a constraint of the table raises; workers try it again every minute",
            refused.text,
        )
    text = f"has been due since {local_text(message.processable_after)}"
    if message.leased_until is not None:
        text = (
            f"is due: the lease of worker {worker_of(message.claimed_by)} lapsed at"
            f" {local_text(message.leased_until)}"
        )
    line, of_first = _behind(case)
    if waits := line or (locked(message, case.alias) if is_late else ""):
        return f"{text}, but {waits}", of_first or message.last_error
    if message.leased_until is not None:
        text += ", and the next worker that polls takes it over"
    waits = in_line(message, case.workers(), case.alias, passed_over=case.is_passed_over())
    return f"{text}, {waits}", message.last_error


#: In these states a message first waits for a condition of its own, then in its line.
_OWN_CONDITION = (
    MessageState.HELD,
    MessageState.PAUSED,
    MessageState.RETRYING,
    MessageState.DELAYED,
)
_REASONS: dict[MessageState, Callable[[Case], Reason]] = {
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
