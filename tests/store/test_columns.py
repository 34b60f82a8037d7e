"""A new column of a message is not forgotten in a statement that stores, copies or keeps one."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from django_mq.models import HandledMessage, QueuedMessage
from django_mq.store import (
    change_waiting,
    history,
    insert,
    promotion,
    replay,
    routing,
)
from django_mq.store import unique_ids as unique
from django_mq.store.claimed_row import claimed_columns

#: Columns that a broadcast leaves at their defaults: they follow the message's way through a queue.
OF_ITS_WAY = {
    *("id", "created_at", "leased_until", "claimed_by", "attempts", "blocked_by", "held_since"),
    *("suspect", "last_error", "dead_at", "dead_reason", "unstarted_claim"),
}
#: Columns that only messages with a unique id have.
OF_UNIQUE_IDS = {"unique_id", "unique_for"}
GIVEN = {field.column for field in QueuedMessage._meta.concrete_fields} - OF_ITS_WAY

NAMES = ", ".join(["", *(each.names for each in insert.OPTIONAL)])


def inserted(statement: str) -> set[str]:
    found = re.search(r"(?:into|copy) django_mq_\w+message\s+\(([^)]*)\)", statement)
    assert found is not None
    return set(re.findall(r"\w+", found[1]))


def updated(statement: str) -> set[str]:
    _, _, found = statement.partition("update django_mq_queuedmessage m\n   set ")
    return set(re.findall(r"(?:^|,) *(\w+) = ", found.partition("\n  from ")[0], re.MULTILINE))


def read(columns: str, table: str) -> set[str]:
    return set(re.findall(rf"\b{table}\.(\w+)", columns.partition(" from ")[0]))


@pytest.mark.parametrize(
    ("name", "columns", "left_out"),
    [
        ("insert.INSERT_FEW", inserted(insert.INSERT_FEW), OF_UNIQUE_IDS),
        ("insert.OPTIONAL", inserted(insert.INSERT_VALUES.format(NAMES, "")), OF_UNIQUE_IDS),
        ("insert.COPY", inserted(insert.COPY.format(NAMES)), OF_UNIQUE_IDS),
        ("unique_ids.ADD", inserted(unique.ADD), ()),
        ("promotion.PROMOTE_PUT_ASIDE", inserted(promotion.PROMOTE_PUT_ASIDE), ()),
        # Only one copy can have a unique id, or the result of a request: the row itself.
        ("routing.SPLIT", inserted(routing.SPLIT), {*OF_UNIQUE_IDS, "wants_result"}),
        # A duplicate has these in common with the message that waits.
        (
            "change_waiting.REPLACE",
            updated(change_waiting.REPLACE),
            {"queue", "type", "handler", "unique_id", "wants_result", "ordered"},
        ),
        (
            "claimed_row.claimed_columns()",
            read(claimed_columns(), "m"),
            {"unique_for"},  # the row of the unique id has it, too
        ),
        # These decide how a message waits and ends. Its due time is kept as `due_at`.
        (
            "history.ACK",
            inserted(history.ACK),
            {
                *OF_UNIQUE_IDS,
                *("wants_result", "ordered", "retry", "max_attempts", "expires_at"),
                "processable_after",
            },
        ),
    ],
)
def test_it_has_the_columns_of_a_message(
    name: str, columns: set[str], left_out: Iterable[str]
) -> None:
    forgotten = GIVEN - columns - {*left_out}
    assert not forgotten, f"add them to {name}, or say here why it leaves them out"
    assert not columns.intersection(left_out), f"{name} no longer leaves them out"


def test_a_replay_has_the_columns_of_the_history() -> None:
    # A copy has another way through its queue than the message that was handled.
    left_out = {
        *("attempts", "worker", "size", "correlation_id", "causation_id"),
        *("created_at", "due_at", "started_at", "ended_at", "keep_until"),
    }
    kept = {field.column for field in HandledMessage._meta.concrete_fields} - left_out
    found = replay.FIND_WITH_CONTENT.partition("\n  from ")[0]
    forgotten = kept - read(found, "h")
    assert not forgotten, "add them to replay.FIND, or say here why it leaves them out"
