"""The async functions take the options of the plain ones."""

from __future__ import annotations

import inspect

import pytest
from asgiref.sync import async_to_sync

from django_mq import aask, arequest, ask, request
from django_mq.models import QueuedMessage

pytestmark = pytest.mark.django_db


def test_the_async_functions_have_the_same_options() -> None:
    assert inspect.signature(aask) == inspect.signature(ask)
    assert inspect.signature(arequest) == inspect.signature(request)
    assert inspect.iscoroutinefunction(aask)
    assert inspect.iscoroutinefunction(arequest)


@pytest.mark.parametrize("option", ["after", "unique_id", "delay"])
def test_aask_refuses_what_ask_refuses(option: str) -> None:
    for function in (ask, async_to_sync(aask)):
        with pytest.raises(TypeError, match=option):
            function("a.b", **{option: "x"})
    assert not QueuedMessage.objects.exists()
