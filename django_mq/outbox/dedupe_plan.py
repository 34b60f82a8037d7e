"""Decide what a call with unique ids writes, given the state of each id; uses no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from django_mq.exceptions import DuplicateMessage
from django_mq.messages import CopyReceipt
from django_mq.outbox.options import starts_before_expiry
from django_mq.policy.uniqueness import Action, OnDuplicate, Plan, UniqueState, plan, state_of
from django_mq.store.rows import NewRow
from django_mq.store.unique_ids import StoredUniqueId, UniqueId, UniqueRow


class Candidate(NamedTuple):
    """A row that a call would store, with the unique options of its message."""

    row: NewRow
    unique_id: str | None = None
    unique_for: float | None = None
    on_duplicate: OnDuplicate = "skip"


class PlannedWrites(NamedTuple):
    """The writes of a call.

    `adding`: rows to insert, each with the index of its candidate, in that order. `replacing`: new
    contents of waiting rows, each with whether its due time changes, too. `moving`: waiting rows
    that only get a new due time. `aside`: rows to put aside.
    """

    adding: list[tuple[int, UniqueRow]]
    replacing: list[tuple[UniqueRow, bool]]
    moving: list[UniqueRow]
    aside: list[UniqueRow]
    plans: Mapping[UniqueId, Plan]
    seen: Mapping[UniqueId, StoredUniqueId]

    def __bool__(self) -> bool:
        return bool(self.adding or self.replacing or self.moving or self.aside)


class DedupeCall:
    """The candidates of one call, by unique id."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates
        self._indexes: dict[UniqueId, list[int]] = {}
        for index, each in enumerate(candidates):
            if each.unique_id is not None:
                row = each.row
                id = UniqueId(row.queue, row.handler, row.type, each.unique_id)
                self._indexes.setdefault(id, []).append(index)
        #: Sorted, so that all calls lock their ids in the same order.
        self.ids = sorted(self._indexes)

    def writes(self, seen: Mapping[UniqueId, StoredUniqueId]) -> PlannedWrites:
        """Return what to write, given the state of each id; raises DuplicateMessage."""
        plans = {id: self._plan(id, seen[id]) for id in self.ids}
        dues = {id: self._due(id, found) for id, found in plans.items()}
        rows = {id: self._row(id, seen[id], found, dues[id]) for id, found in plans.items()}
        adding = [
            (index, UniqueRow(0, each.row))
            for index, each in enumerate(self._candidates)
            if each.unique_id is None
        ]
        replacing, moving, aside = [], [], []
        for id, found in plans.items():
            if found.action is Action.ADD:
                # Those before the first that sets a due time are duplicates, and store nothing.
                adding.append((self._indexes[id][found.dues[0]], rows[id]))
            elif found.action is Action.CHANGE and found.content is None:
                moving.append(rows[id])
            elif found.action is Action.CHANGE:
                replacing.append((rows[id], dues[id] is not None))
            elif found.action is Action.PUT_ASIDE:
                aside.append(rows[id])
        return PlannedWrites(
            sorted(adding, key=itemgetter(0)), replacing, moving, aside, plans, seen
        )

    def copies(self, writes: PlannedWrites, ids: Mapping[int, int]) -> list[CopyReceipt]:
        """Return the outcome of each candidate; `ids` has the id of each inserted row by index."""
        receipts: dict[int, CopyReceipt] = {}
        for id, found in writes.plans.items():
            seen = writes.seen[id]
            holder = seen.message_id if seen.alive else None
            for index, planned in zip(self._indexes[id], found.receipts, strict=True):
                holder = ids.get(index, holder)  # an inserted row holds the id from there on
                no_row = found.action is Action.PUT_ASIDE and planned.outcome == "requeued"
                receipts[index] = CopyReceipt(
                    id.handler,
                    id.queue,
                    None if no_row else holder,
                    planned.outcome,
                    planned.reason,
                )
        return [
            receipts.get(index) or CopyReceipt(each.row.handler, each.row.queue, ids[index])
            for index, each in enumerate(self._candidates)
        ]

    def _plan(self, id: UniqueId, seen: StoredUniqueId) -> Plan:
        state = state_of(alive=seen.alive, leased=seen.leased, aside=seen.aside, quiet=seen.quiet)
        found = plan(state, [self._candidates[index].on_duplicate for index in self._indexes[id]])
        for planned in found.receipts:
            if planned.refused:
                raise DuplicateMessage(_refusal(id, seen, UniqueState(planned.reason)))
        return found

    def _due(self, id: UniqueId, found: Plan) -> int | None:
        """Return the index of the message whose due time is written; None: the stored one stays.

        A due time that lies beyond the expiry of the content does not count.
        """
        if found.content is None:  # the statement compares it with the stored expiry
            return found.due
        indexes = self._indexes[id]
        content = self._candidates[indexes[found.content]].row
        for index in reversed(found.dues):
            due = self._candidates[indexes[index]].row
            if index == found.content or starts_before_expiry(due, content):
                return index
        return found.content if found.dues and found.dues[0] < found.content else None

    def _row(self, id: UniqueId, seen: StoredUniqueId, found: Plan, due: int | None) -> UniqueRow:
        """Return the row into which the candidates of one id merge, due when message `due` is."""
        indexes = self._indexes[id]
        chosen = due if found.content is None else found.content
        content = self._candidates[indexes[chosen or 0]]
        row = content.row
        if due is not None and due != chosen:
            other = self._candidates[indexes[due]].row
            row = row._replace(due=other.due, delay=other.delay)
        return UniqueRow(seen.message_id or 0, row, id.unique_id, content.unique_for, seen)


def ids_text(ids: Sequence[UniqueId]) -> str:
    """Name the first of the ids, with its type and queue, for an error text."""
    first = ids[0]
    others = f" (or one of {len(ids) - 1:,} others)" if len(ids) > 1 else ""
    return f"unique id {first.unique_id}{others} of {first.type} in queue {first.queue}"


def _refusal(id: UniqueId, seen: StoredUniqueId, state: UniqueState) -> str:
    holder = f"message {seen.message_id}" if seen.alive else "another message of this call"
    why = {
        UniqueState.WAITING: f"{holder} waits with it",
        UniqueState.IN_FLIGHT: f"{holder} has it and is in flight",
    }.get(state, f"its message was handled, and it stays taken until {seen.quiet_until}")
    return f"{ids_text([id])} is taken: {why}"
