"""Reasons, as operators read them."""

from __future__ import annotations

from django_mq import queues


def why(message, state, *parts):
    """Assert that the answer for `message` has all `parts`, and return it."""
    answer = queues.why(message.pk)
    assert (answer.id, answer.state) == (message.pk, state)
    assert answer.text.startswith(f"Message {message.pk} (shop.orders.placed, queue mail) ")
    for part in parts:
        assert part in answer.text
    return answer
