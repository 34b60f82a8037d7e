"""Note how deliveries end in queues that may back off, and write the levels of these queues."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from django_mq import signals
from django_mq.conf import QueueBackoff, Settings
from django_mq.executor.ended import Ended, Settled
from django_mq.policy.backoff import Random
from django_mq.policy.queue_backoff import Step, jittered_waits, step_of, top_level
from django_mq.store import Cursor, queue_backoff

#: A time before every claim.
NEVER = datetime.min.replace(tzinfo=UTC)


class _Probed(NamedTuple):
    """A probe that ended, and the step of the level that follows."""

    claimer: str
    step: Step


class QueueBackoffs:
    """Notes how deliveries end, and writes what that means for the levels of their queues.

    Any thread notes. The loop writes, each level in a short transaction of its own: the row of a
    queue must not stay locked while a slice runs. Queues whose settings have no `backoff`, or a
    maximum of zero, are ignored, except one that still backs off under earlier settings: its first
    probe ends the backoff, whatever the probe's result.

    `stop_queue(queue, before)` forbids starting messages of `queue` that were claimed before
    `before`. Until a note is written, `before` is None: nothing of the queue may start. Then it is
    the time of the last change of the level.
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
        self._probed: dict[str, _Probed] = {}
        self._probes: dict[str, str] = {}
        self._changed: dict[str, datetime] = {}

    @property
    def active(self) -> bool:
        """Whether any queue may back off, or does; otherwise there is nothing to note."""
        return bool(self._options or self._probes)

    @property
    def queues(self) -> frozenset[str]:
        """The queues that may back off."""
        return frozenset(self._options)

    def noted(self) -> bool:
        """Return whether there is something to `write()`."""
        return bool(self._failed or self._probed)

    def note(self, ended: Sequence[Ended]) -> bool:
        """Note deliveries whose end is committed; return whether to `write()` soon.

        For a queue at full rate this notes only failures; for one that backs off, its probe.
        """
        if not self.active:
            return False
        noted = False
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
            self._stop_queue(row.queue, None)  # before the note: write() lets messages start again
            with self._lock:
                if probes:
                    self._probed[row.queue] = _Probed(row.claimed_by, step)
                else:
                    latest = self._failed.get(row.queue, row.claimed_at)
                    self._failed[row.queue] = max(latest, row.claimed_at)
            noted = True
        return noted

    def write(self, cursor: Cursor) -> set[str]:
        """Write what was noted, and announce each change.

        Returns the noted queues that back off now, by whichever worker. A note that cannot be
        written, since the row of its queue is locked or the database is lost, is kept for the next
        call, and nothing of that queue starts here until then.
        """
        with self._lock:
            failed, self._failed = self._failed, {}
            probed, self._probed = self._probed, {}
        if not failed and not probed:
            return set()
        try:
            for queue, probe in probed.items():
                waits = self._waits(queue)
                moved = queue_backoff.end_probe(
                    cursor, queue=queue, claimer=probe.claimer, step=probe.step, waits=waits
                )
                _announce(queue, moved)
            for queue, claimed_at in failed.items():
                waits = self._waits(queue)
                moved = queue_backoff.raise_level(
                    cursor, queue=queue, claimed_at=claimed_at, waits=waits
                )
                _announce(queue, moved)
            found = queue_backoff.backoff_states(cursor, {*failed, *probed})
        except BaseException:
            self._keep(failed, probed)
            raise
        stands = {
            queue: found.get(queue, queue_backoff.BackoffState()) for queue in (*failed, *probed)
        }
        self._learn(stands)
        open_failed = {q: at for q, at in failed.items() if _is_open(stands[q], at)}
        open_probed = {q: p for q, p in probed.items() if stands[q].probe_by == p.claimer}
        self._keep(open_failed, open_probed)
        for queue in stands.keys() - open_failed.keys() - open_probed.keys():
            self._stop_queue(queue, stands[queue].changed_at or NEVER)
        return {queue for queue, stand in stands.items() if stand.level}

    def probe_started(self, queue: str, claimer: str) -> None:
        """Note that `claimer` claimed the probe of `queue`, whose end moves the level.

        Call it before the message is handed out.
        """
        with self._lock:
            self._probes[queue] = claimer

    def cancel_probe(self, cursor: Cursor, queue: str, claimer: str) -> None:
        """Give up a probe that claimed nothing, or whose message is released without a run."""
        with self._lock:
            if self._probes.get(queue) == claimer:
                del self._probes[queue]
        queue_backoff.cancel_probe(cursor, queue=queue, claimer=claimer)

    def probes(self) -> list[tuple[str, str]]:
        """Return queue and claimer of the probes that run here; from any thread."""
        with self._lock:
            return list(self._probes.items())

    def _waits(self, queue: str) -> list[float]:
        options: QueueBackoff | None = self._options.get(queue)
        if options is None:
            return []  # no level above zero
        return jittered_waits(
            multiplier=options.multiplier,
            maximum=options.maximum,
            jitter=options.jitter,
            random=self._random,
        )

    def _learn(self, stands: dict[str, queue_backoff.BackoffState]) -> None:
        """Remember the last changes: failures of messages claimed before them need no statement."""
        with self._lock:
            for queue, stand in stands.items():
                if stand.changed_at is not None:
                    self._changed[queue] = stand.changed_at
                if self._probes.get(queue) != stand.probe_by:
                    self._probes.pop(queue, None)

    def _keep(self, failed: dict[str, datetime], probed: dict[str, _Probed]) -> None:
        """Keep notes for the next write, unless newer ones came meanwhile."""
        with self._lock:
            for queue, claimed_at in failed.items():
                self._failed[queue] = max(claimed_at, self._failed.get(queue, claimed_at))
            for queue, probe in probed.items():
                self._probed.setdefault(queue, probe)


def _step(ended: Ended) -> Step:
    if ended.settled in (Settled.ACKED, Settled.FINISHED):
        return Step.DOWN
    return step_of(ended.outcome, ended.error)


def _is_newer(claimed_at: datetime, changed_at: datetime | None) -> bool:
    return changed_at is None or claimed_at > changed_at


def _is_open(stand: queue_backoff.BackoffState, claimed_at: datetime) -> bool:
    """Return whether a failure still has to be written, because the row of its queue was locked."""
    return stand.level == 0 and _is_newer(claimed_at, stand.changed_at)


def _announce(queue: str, moved: queue_backoff.LevelChange | None) -> None:
    if moved is None or moved.before == moved.level:
        return
    before, level, until = moved
    if level == 0:
        signal, text = signals.backoff_ended, "no longer backs off"
    elif before == 0:
        signal, text = signals.backoff_started, f"backs off until {until}, level {level}"
    else:
        signal, text = signals.backoff_changed, f"backs off until {until}, level {level}"
    signals.announce_queue(signal, queue, text, level=level, until=until)
