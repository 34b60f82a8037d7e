"""Claim due messages: from which lanes, and how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

from django_mq.executor.lease_clock import lease_clock
from django_mq.store import Cursor
from django_mq.store.claim import LANE_START, Lane
from django_mq.worker.claim_round import ClaimResult, ClaimRound
from django_mq.worker.claims import KEYED, PLAIN, ClaimRouter
from django_mq.worker.intake import Intake
from django_mq.worker.lanes import Lanes
from django_mq.worker.parking import PAUSE_SECONDS, Parking
from django_mq.worker.queue_options import ClaimOptions
from django_mq.worker.watermarks import GroupWatermarks, LaneName


class DueFetcher:
    """Claims due messages for one process. The thread that runs the loop calls `fetch()`.

    The parameters are those of `Fetcher`; `lanes` are the known ones, in the order of their turns.
    """

    def __init__(
        self,
        *,
        options: Callable[[str], ClaimOptions],
        intake: Intake,
        claims: ClaimRouter,
        lanes: Lanes,
    ) -> None:
        self._options = options
        self._intake = intake
        self._claims = claims
        self._lanes = lanes
        self._kinds: set[str] = set()
        self._marks = GroupWatermarks()
        self._parking = Parking()

    def update(self, lanes: Iterable[LaneName], now: float) -> None:
        """Claim also from `lanes`, in which a poll saw messages at `now`."""
        self._lanes.update(lanes, now)
        known = self._lanes.known
        self._kinds = {self._options(queue).kind for queue, _ in known}
        groups = {self._group(lane)[1] for lane in known}
        self._marks.keep(known, groups)
        self._parking.keep(groups)

    def request_full(self) -> None:
        """Claim from the start of each lane next time, not from where the last scan ended."""
        self._marks.request_full()

    def fetch(self, cursor: Cursor) -> ClaimRound:
        """Claim once from each group of lanes, the most preferred first."""
        claimed = ClaimRound()
        # Read once: a full scan of one group of lanes must not postpone that of the next group.
        full: dict[str, bool] = {}
        for (options, group), lanes in self._lanes.groups(self._group):
            kind = options.kind
            if claimed.is_filled(kind):
                continue
            # A queue that is claimed alone has a line, or a limit in flight, which counts claims.
            ahead = options.ahead and group in (PLAIN, KEYED)
            room = self._intake.room(kind, options.list_size, ahead=ahead)
            room = min(room, self._claims.max_per_claim(lanes[0][0], options))
            if room <= 0 or (group == KEYED and self._intake.waits_for_thread(kind)):
                claimed.no_room = True
                continue
            if group not in full:
                full[group] = self._is_full(group, lanes[0][0], options)
                self._marks[group].begin_scan(full=full[group])
            result = self._claim_from(cursor, lanes, options, room, group=group, full=full[group])
            rows = result.claim.rows
            if result.scanned and not (rows or full[group] or group == KEYED):
                claimed.look_again(self._marks[group].full_in())
            if result.again_in is not None:
                claimed.look_again(result.again_in)
            claimed.count += len(rows)
            claimed.unfinished |= result.claim.unfinished
            claimed.at_limit |= result.at_limit
            claimed.no_room |= result.claim.left_lines
            claimed.contended |= result.contended
            if len(rows) == room or result.size > options.batch_bytes // 2:
                claimed.filled.add(kind)
                if all(map(claimed.is_filled, self._kinds)):
                    break
        return claimed

    def _claim_from(
        self,
        cursor: Cursor,
        lanes: list[LaneName],
        options: ClaimOptions,
        room: int,
        *,
        group: str,
        full: bool,
    ) -> ClaimResult:
        asked_at, began = lease_clock(), self._claims.clock()
        own = self._marks[group]
        marked = [Lane(*lane, *own.mark(lane, full=full)) for lane in lanes]
        result = self._claim(cursor, marked, options, room, group=group, full=full)
        has_marks = any(lane.at != LANE_START[0] for lane in marked)
        if result.scanned and (has_marks or full or group != KEYED):
            seconds = self._claims.clock() - began
            counted = result.at_limit and not result.claim.rows
            own.record_scan(result.claim.marks, seconds, full=full, rest_key=(options, counted))
        else:  # neither a full scan that was due, nor a regular one
            own.advance(result.claim.marks)
        sparse = len(result.claim.rows) < room // 2 and not result.claim.left_lines
        if group == KEYED and has_marks and sparse:
            own.record_sparse_scan()
            result = result._replace(claim=result.claim._replace(unfinished=True))
        if rows := result.claim.rows:
            self._lanes.pass_turn(lanes, {(row.queue, row.priority) for row in rows})
            size = options.list_size
            self._intake.take(cursor, rows, taken_over=False, list_size=size, asked_at=asked_at)
        return result

    def _claim(
        self,
        cursor: Cursor,
        lanes: list[Lane],
        options: ClaimOptions,
        room: int,
        *,
        group: str,
        full: bool,
    ) -> ClaimResult:
        pause = self._parking.seconds_left(group, monotonic())
        result = self._claims.claim(
            cursor, lanes, options, limit=room, from_marks=not full, park=not pause
        )
        rows = result.claim.rows
        room = len(rows) if result.at_limit else room
        self._parking.record_claim(group, monotonic(), rows, room=room)
        if result.claim.stuck:  # the next claim would find the same if it did not park
            return result._replace(again_in=pause or PAUSE_SECONDS)
        return result

    def _is_full(self, group: str, queue: str, options: ClaimOptions) -> bool:
        """Return whether the next scan of `group`, which contains `queue`, begins at the front."""
        if group in (PLAIN, KEYED):
            return self._marks[group].full_is_due()
        # What an operator requeues comes first in its line, so only rests keep it from the front.
        # With keys, most freed messages lie there.
        keyed = self._claims.facts.has_keys(queue) and not options.ordered
        return keyed or not self._marks[group].full_in()

    def _group(self, lane: LaneName) -> tuple[ClaimOptions, str]:
        """Return the options and the statement group, which all lanes of a claim have in common."""
        options = self._options(lane[0])
        return options, self._claims.statement_group(lane[0], options)
