"""The documented role that enqueues tasks with unique ids."""

from __future__ import annotations

from typing import get_args

import pytest
from django.db import connection

from django_mq import DuplicateMessage
from django_mq.messages import OnDuplicate
from tests.contrib.tasks import jobs
from tests.roles import acting_as, documented, skip_unless_able

pytestmark = pytest.mark.django_db

#: `enqueue()` refuses these: they store a message without an id, so there is no result to return.
REFUSED = {"requeue", "rerun"}


@pytest.mark.parametrize("how", sorted(set(get_args(OnDuplicate)) - REFUSED))
def test_a_task_is_enqueued_again(how: str) -> None:
    skip_unless_able()
    with connection.cursor() as cursor:
        for block in documented():
            cursor.execute(block)
    with acting_as("mq_unique_task_producer"):
        first = jobs.note.using(unique_id="one").enqueue(1)
        again = jobs.note.using(unique_id="one", on_duplicate=how)
        if how == "raise":
            with pytest.raises(DuplicateMessage):
                again.enqueue(2)
        else:
            assert again.enqueue(2).id == first.id
