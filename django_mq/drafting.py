"""From messages with unique ids, and what is known of those, to what is written: no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from django_mq.exceptions import DuplicateMessage
from django_mq.messages import CopyReceipt, OnDuplicate
from django_mq.store.rows import NewRow
from django_mq.store.unique import Seen, Unique, UniqueId
from django_mq.unique import Action, Plan, State, plan, state_of


class Wanted(NamedTuple):
    """A row to store, and what it says of its unique id (None: it has none)."""

    row: NewRow
    unique_id: str | None = None
    unique_for: float | None = None
    on_duplicate: OnDuplicate = "skip"


class Draft(NamedTuple):
    """What a call is to write.

    `adding` are rows to insert, with the place of the message each came from, in that order;
    `replacing` new contents of waiting rows, with whether the due time changes too; `aside` what
    is put aside.
    """

    adding: list[tuple[int, Unique]]
    replacing: list[tuple[Unique, bool]]
    aside: list[Unique]
    plans: Mapping[UniqueId, Plan]
    seen: Mapping[UniqueId, Seen]

    def __bool__(self) -> bool:
        return bool(self.adding or self.replacing or self.aside)


class Call:
    """The rows of one call, by their unique ids."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self._places: dict[UniqueId, list[int]] = {}
        for place, each in enumerate(wanted):
            if each.unique_id is not None:
                row = each.row
                id = UniqueId(row.queue, row.handler, row.type, each.unique_id)
                self._places.setdefault(id, []).append(place)
        #: Sorted, as in all calls: so they are taken in the same order.
        self.ids = sorted(self._places)

    def draft(self, seen: Mapping[UniqueId, Seen]) -> Draft:
        """Return what is to be written, as things are; raises DuplicateMessage."""
        plans = {id: self._plan(id, seen[id]) for id in self.ids}
        rows = {id: self._row(id, seen[id], found) for id, found in plans.items()}
        adding = [
            (place, Unique(0, each.row))
            for place, each in enumerate(self._wanted)
            if each.unique_id is None
        ]
        replacing, aside = [], []
        for id, found in plans.items():
            if found.action is Action.ADD:
                adding.append((self._places[id][0], rows[id]))
            elif found.action is Action.REPLACE:
                replacing.append((rows[id], found.due is not None))
            elif found.action is Action.PUT_ASIDE:
                aside.append(rows[id])
        return Draft(sorted(adding, key=_place), replacing, aside, plans, seen)

    def copies(self, draft: Draft, ids: Mapping[int, int]) -> list[CopyReceipt]:
        """Return what became of each row; `ids` are those of the inserted ones, by place."""
        told: dict[int, CopyReceipt] = {}
        for id, found in draft.plans.items():
            seen = draft.seen[id]
            holder = ids.get(self._places[id][0], seen.message_id if seen.alive else None)
            for place, answer in zip(self._places[id], found.answers, strict=True):
                no_row = found.action is Action.PUT_ASIDE and answer.outcome == "requeued"
                told[place] = CopyReceipt(
                    id.handler,
                    id.queue,
                    None if no_row else holder,
                    answer.outcome,
                    answer.reason,
                )
        return [
            told.get(place) or CopyReceipt(each.row.handler, each.row.queue, ids[place])
            for place, each in enumerate(self._wanted)
        ]

    def _plan(self, id: UniqueId, seen: Seen) -> Plan:
        state = state_of(alive=seen.alive, leased=seen.leased, aside=seen.aside, quiet=seen.quiet)
        found = plan(state, [self._wanted[place].on_duplicate for place in self._places[id]])
        for answer in found.answers:
            if answer.refused:
                raise DuplicateMessage(_refusal(id, seen, State(answer.reason)))
        return found

    def _row(self, id: UniqueId, seen: Seen, found: Plan) -> Unique:
        """Return the row that the messages of one id make together."""
        places = self._places[id]
        content = self._wanted[places[found.content]]
        row = content.row
        if found.due is not None and found.due != found.content:
            due = self._wanted[places[found.due]].row
            row = row._replace(due=due.due, delay=due.delay)
        return Unique(seen.message_id or 0, row, id.unique_id, content.unique_for, seen)


def named(ids: Sequence[UniqueId]) -> str:
    """Name the first of the ids, and say what it is unique for."""
    first = ids[0]
    others = f" (or one of {len(ids) - 1:,} others)" if len(ids) > 1 else ""
    return f"unique id {first.unique_id}{others} of {first.type} in queue {first.queue}"


def _refusal(id: UniqueId, seen: Seen, state: State) -> str:
    holder = f"message {seen.message_id}" if seen.alive else "another message of this call"
    why = {
        State.WAITING: f"{holder} waits with it",
        State.IN_FLIGHT: f"{holder} has it and is in flight",
    }.get(state, f"its message was handled, and it stays taken until {seen.quiet_until}")
    return f"{named([id])} is taken: {why}"


def _place(each: tuple[int, Unique]) -> int:
    return each[0]
