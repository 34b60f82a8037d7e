"""The actions of operators are the same four wherever they are named."""

from __future__ import annotations

from django_mq import queues
from django_mq.admin import QueuedMessageAdmin
from django_mq.admin.message_actions import MESSAGE_ACTIONS
from django_mq.models.operation import ACTION_LABELS
from django_mq.operations.changes import CHANGES, HEAD_ACTIONS, REMOVING_ACTIONS
from django_mq.states import MessageState
from django_mq.store.message_filters import ACTION_CONDITIONS


def test_each_action_is_known_to_all() -> None:
    """To the public functions, workers, the table of operations, its filter, and the admin."""
    actions = set(CHANGES)
    assert actions == {name for name, _ in ACTION_LABELS} == set(ACTION_CONDITIONS)
    assert {name: getattr(queues, name) for name in actions} == {
        name: each.run for name, each in MESSAGE_ACTIONS.items()
    }
    assert set(QueuedMessageAdmin.actions) == actions | {f"{name}_heads" for name in HEAD_ACTIONS}


def test_log_and_admin_agree_on_the_removing_actions() -> None:
    assert set(REMOVING_ACTIONS) == {each.name for each in MESSAGE_ACTIONS.values() if each.removes}


def test_the_actions_on_heads_are_those_on_dead_letters() -> None:
    assert set(HEAD_ACTIONS) == {
        name for name, where in ACTION_CONDITIONS.items() if where == "m.dead_at is not null"
    }
    assert set(HEAD_ACTIONS) == {
        each.name for each in MESSAGE_ACTIONS.values() if each.states == {MessageState.DEAD}
    }
