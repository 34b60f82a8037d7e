"""Record how deliveries end in queues that may back off, and write the levels of these queues."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django_mq import signals
from django_mq.conf import QueueBackoff, Settings
from django_mq.conf.local_time import local_text
from django_mq.executor.ended import DONE, Ended
from django_mq.policy.backoff import Random
from django_mq.policy.queue_backoff import Step, jittered_waits, step_of, top_level
from django_mq.store import Cursor, queue_backoff

#: Earlier than every claim.
BEFORE_ALL = datetime.min.replace(tzinfo=UTC)


class _EndedProbe(NamedTuple):
    """A probe that ended, and the step of the level that follows."""

    claimer: str
    step: Step


class BackoffLevels:
    """Records how deliveries end, and writes the resulting levels of their queues.

    Any thread records. The loop writes, each level in a short transaction of its own, because the
    row of a queue must not stay locked while a slice runs. Queues whose settings have no `backoff`,
    or a maximum of zero, are ignored, unless one still backs off under earlier settings: then its
    first probe ends the backoff, whatever the probe's result.

    `stop_queue(queue, before)` keeps messages of `queue` from starting that were claimed before
    `before`. Until a record is written, `before` is None: nothing of the queue may start. Then it
    is the time of the last change of the level.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        stop_queue: Callable[[str, datetime | None], None],
        random: Random = random.random,
    ) -> None:
        self._options = {
            name: options.backoff
            for name, options in settings.queues.items()
            if options.backoff is not None
            and top_level(multiplier=options.backoff.multiplier, maximum=options.backoff.maximum)
        }
        self._stop_queue = stop_queue
        self._random = random
        self._lock = threading.Lock()
        self._failed: dict[str, datetime] = {}
        self._ended_probes: dict[str, _EndedProbe] = {}
        self._probes: dict[str, str] = {}
        self._changed: dict[str, datetime] = {}

    @property
    def active(self) -> bool:
        """Whether any queue may back off, or does; if not, there is nothing to record."""
        return bool(self._options or self._probes)

    @property
    def queues(self) -> frozenset[str]:
        """The queues that may back off."""
        return frozenset(self._options)

    def has_pending(self) -> bool:
        """Return whether there is something to `write()`."""
        return bool(self._failed or self._ended_probes)

    def record(self, ended: Sequence[Ended]) -> bool:
        """Record deliveries whose end is committed; return whether to `write()` soon.

        For a queue at full rate this records only failures; for a queue that backs off, its probe.
        """
        if not self.active:
            return False
        recorded = False
        for each in ended:
            row = each.delivery._row
            probes = self._probes.get(row.queue) == row.claimed_by
            if not probes and row.queue not in self._options:
                continue
            step = _step(each)
            if not probes and step is not Step.UP:
                continue
            if not probes and not _is_newer(row.claimed_at, self._changed.get(row.queue)):
                continue
            self._stop_queue(row.queue, None)  # first: write() lets messages start again
            with self._lock:
                if probes:
                    self._ended_probes[row.queue] = _EndedProbe(row.claimed_by, step)
                else:
                    latest = self._failed.get(row.queue, row.claimed_at)
                    self._failed[row.queue] = max(latest, row.claimed_at)
            recorded = True
        return recorded

    def write(self, cursor: Cursor) -> None:
        """Write the records, and announce each change.

        A record that cannot be written, because the row of its queue is locked or the database is
        lost, is kept for the next call, and nothing of that queue starts here until then.
        """
        with self._lock:
            failed, self._failed = self._failed, {}
            ended_probes, self._ended_probes = self._ended_probes, {}
        if not failed and not ended_probes:
            return
        try:
            for queue, probe in ended_probes.items():
                waits = self._waits(queue)
                moved = queue_backoff.end_probe(
                    cursor, queue=queue, claimer=probe.claimer, step=probe.step, waits=waits
                )
                _announce(queue, moved)
            for queue, claimed_at in failed.items():
                wait = self._waits(queue)[0]
                moved = queue_backoff.raise_level(
                    cursor, queue=queue, claimed_at=claimed_at, wait=wait
                )
                _announce(queue, moved)
            found = queue_backoff.backoff_states(cursor, {*failed, *ended_probes})
        except BaseException:
            self._restore(failed, ended_probes)
            raise
        states = {
            queue: found.get(queue, queue_backoff.BackoffState())
            for queue in (*failed, *ended_probes)
        }
        self._remember_changes(states)
        open_failed = {q: at for q, at in failed.items() if _is_open(states[q], at)}
        open_probes = {q: p for q, p in ended_probes.items() if states[q].probe_by == p.claimer}
        self._restore(open_failed, open_probes)
        for queue in states.keys() - open_failed.keys() - open_probes.keys():
            self._stop_queue(queue, states[queue].changed_at or BEFORE_ALL)

    def probe_started(self, queue: str, claimer: str) -> None:
        """Record that `claimer` claimed the probe of `queue`; the end of the probe moves the level.

        Call this before the message is handed out.
        """
        with self._lock:
            self._probes[queue] = claimer

    def cancel_probe(self, cursor: Cursor, queue: str, claimer: str) -> None:
        """Give up a probe that claimed nothing, or whose message is released without a run."""
        with self._lock:
            if self._probes.get(queue) == claimer:
                del self._probes[queue]
        queue_backoff.cancel_probe(cursor, queue=queue, claimer=claimer)

    def cancel_probes(self, cursor: Cursor, claimers: Collection[str]) -> None:
        """Give up those of the claims that are probes: their messages do not run."""
        for queue, claimer in self.probes():
            if claimer in claimers:
                self.cancel_probe(cursor, queue, claimer)

    def probes(self) -> list[tuple[str, str]]:
        """Return queue and claimer of the probes that run here; from any thread."""
        with self._lock:
            return list(self._probes.items())

    def _waits(self, queue: str) -> list[float]:
        options: QueueBackoff | None = self._options.get(queue)
        if options is None:
            return []  # no queue is above level zero
        return jittered_waits(
            multiplier=options.multiplier,
            maximum=options.maximum,
            jitter=options.jitter,
            random=self._random,
        )

    def _remember_changes(self, states: dict[str, queue_backoff.BackoffState]) -> None:
        """Remember the last changes, so that failures of earlier claims need no statement."""
        with self._lock:
            for queue, state in states.items():
                if state.changed_at is not None:
                    self._changed[queue] = state.changed_at
                if self._probes.get(queue) != state.probe_by:
                    self._probes.pop(queue, None)

    def _restore(self, failed: dict[str, datetime], ended_probes: dict[str, _EndedProbe]) -> None:
        """Keep records for the next write, unless newer ones came meanwhile."""
        with self._lock:
            for queue, claimed_at in failed.items():
                self._failed[queue] = max(claimed_at, self._failed.get(queue, claimed_at))
            for queue, probe in ended_probes.items():
                self._ended_probes.setdefault(queue, probe)


def _step(ended: Ended) -> Step:
    if ended.settled in DONE:
        return Step.DOWN
    return step_of(ended.outcome, ended.error)


def _is_newer(claimed_at: datetime, changed_at: datetime | None) -> bool:
    return changed_at is None or claimed_at > changed_at


def _is_open(state: queue_backoff.BackoffState, claimed_at: datetime) -> bool:
    """Return whether a failure is still to be written, because the row of its queue was locked."""
    return state.level == 0 and _is_newer(claimed_at, state.changed_at)


def _announce(queue: str, moved: queue_backoff.LevelChange | None) -> None:
    if moved is None or moved.previous_level == moved.level:
        return
    before, level, until = moved
    if level == 0:
        signal, text = signals.backoff_ended, "no longer backs off"
    else:
        signal = signals.backoff_changed if before else signals.backoff_started
        text = f"backs off until {local_text(until)}, level {level}"
    signals.announce_queue(signal, queue, text, level=level, until=until)
