"""Unique ids as policy: every state against every option, and several messages at once."""

from __future__ import annotations

from typing import get_args

import pytest

from django_mq.policy.uniqueness import (
    Action,
    OnDuplicate,
    PlannedReceipt,
    UniqueState,
    decide,
    plan,
    state_of,
)

OPTIONS = get_args(OnDuplicate)


def test_every_state_has_an_answer_to_every_option() -> None:
    """CAR-5: the action, or the reason for none."""
    for state in UniqueState:
        for option in OPTIONS:
            decision = decide(state, option)
            assert (decision.action is Action.NOTHING) == (decision.receipt.outcome == "duplicate")
            assert decision.receipt.reason == (
                state.value if decision.receipt.outcome == "duplicate" else ""
            )
            assert decision.receipt.refused == (option == "raise" and state is not UniqueState.FREE)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ("", UniqueState.FREE),
        ("alive", UniqueState.WAITING),
        ("alive quiet", UniqueState.WAITING),
        ("alive leased", UniqueState.IN_FLIGHT),
        ("alive leased aside quiet", UniqueState.IN_FLIGHT),
        ("alive aside", UniqueState.IN_FLIGHT),
        ("quiet", UniqueState.QUIET),
        ("leased", UniqueState.FREE),
    ],
)
def test_states_follow_from_facts(facts: str, state: UniqueState) -> None:
    """CAR-1, CAR-2, CAR-3: nothing is stored but facts, and the message comes first."""
    true = facts.split()
    found = state_of(
        alive="alive" in true, leased="leased" in true, aside="aside" in true, quiet="quiet" in true
    )
    assert found is state


@pytest.mark.parametrize(
    ("state", "options", "action", "content", "due", "outcomes"),
    [
        (UniqueState.FREE, "skip", Action.ADD, 0, 0, "added"),
        (UniqueState.FREE, "skip skip", Action.ADD, 0, 0, "added duplicate"),
        (UniqueState.FREE, "requeue requeue", Action.ADD, 0, 0, "added duplicate"),
        (UniqueState.FREE, "skip update", Action.ADD, 1, 0, "added updated"),
        (UniqueState.FREE, "skip debounce update", Action.ADD, 2, 1, "added debounced updated"),
        (UniqueState.FREE, "skip debounce", Action.ADD, 0, 1, "added debounced"),
        (UniqueState.FREE, "rerun rerun", Action.ADD, 1, 0, "added updated"),
        (UniqueState.WAITING, "skip", Action.NOTHING, None, None, "duplicate"),
        (UniqueState.WAITING, "update", Action.CHANGE, 0, None, "updated"),
        (UniqueState.WAITING, "rerun", Action.CHANGE, 0, None, "updated"),
        (UniqueState.WAITING, "replace", Action.CHANGE, 0, 0, "updated"),
        (UniqueState.WAITING, "debounce debounce", Action.CHANGE, None, 1, "debounced debounced"),
        (UniqueState.WAITING, "debounce update", Action.CHANGE, 1, 0, "debounced updated"),
        (
            UniqueState.WAITING,
            "update skip debounce",
            Action.CHANGE,
            0,
            2,
            "updated duplicate debounced",
        ),
        (UniqueState.IN_FLIGHT, "requeue skip", Action.PUT_ASIDE, 0, 0, "requeued duplicate"),
        (UniqueState.IN_FLIGHT, "requeue requeue", Action.PUT_ASIDE, 1, 1, "requeued requeued"),
        (UniqueState.IN_FLIGHT, "rerun debounce", Action.PUT_ASIDE, 0, 0, "requeued duplicate"),
        (UniqueState.QUIET, "rerun rerun", Action.ADD, 1, 0, "requeued updated"),
        (UniqueState.QUIET, "skip requeue", Action.ADD, 1, 1, "duplicate requeued"),
        (UniqueState.QUIET, "requeue update", Action.ADD, 1, 0, "requeued updated"),
    ],
)
def test_the_messages_of_one_id_are_one_write(
    state: UniqueState,
    options: str,
    action: Action,
    content: int | None,
    due: int | None,
    outcomes: str,
) -> None:
    """The later message sees the earlier one."""
    found = plan(state, options.split())  # type: ignore[arg-type]
    assert (found.action, found.content, found.due) == (action, content, due)
    assert " ".join(receipt.outcome for receipt in found.receipts) == outcomes


def test_a_later_one_that_raises_is_refused() -> None:
    assert plan(UniqueState.FREE, ["raise", "raise"]).receipts == (
        PlannedReceipt("added"),
        PlannedReceipt("duplicate", "waiting", refused=True),
    )
