"""A request takes the options of a broadcast; the async functions take those of the plain ones."""

from __future__ import annotations

import inspect

import pytest
from asgiref.sync import async_to_sync

from django_mq import aask, arequest, ask, broadcast, request
from django_mq.models import QueuedMessage

pytestmark = pytest.mark.django_db


def test_the_async_functions_have_the_same_options() -> None:
    assert inspect.signature(aask) == inspect.signature(ask)
    assert inspect.signature(arequest) == inspect.signature(request)
    assert inspect.iscoroutinefunction(aask)
    assert inspect.iscoroutinefunction(arequest)


def test_a_new_option_of_a_broadcast_is_one_of_a_request() -> None:
    options = set(inspect.signature(broadcast).parameters)
    # A duplicate has no reply of its own, and nobody waits for a reply that is not due.
    options -= {"unique_id", "on_duplicate", "unique_for"}
    assert set(inspect.signature(request).parameters) == options, "options of request()"
    assert set(inspect.signature(ask).parameters) == options - {"after"} | {"timeout"}


@pytest.mark.parametrize("option", ["after", "unique_id", "delay"])
def test_aask_has_the_refusals_of_ask(option: str) -> None:
    for function in (ask, async_to_sync(aask)):
        with pytest.raises(TypeError, match=option):
            function("a.b", **{option: "x"})
    assert not QueuedMessage.objects.exists()
