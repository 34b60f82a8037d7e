"""A conflict with another session inside `finish()`: the handler may repeat the block."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import OperationalError, connection

from django_mq.messages import Delivery
from tests.executor.nonatomic.conftest import NonAtomicBench, on
from tests.rows import add
from tests.worker.conftest import attempts_of, effect, effects, waiting

pytestmark = pytest.mark.django_db(transaction=True)

CONFLICT = "do $$ begin raise serialization_failure; end $$"


@pytest.mark.parametrize("repeats", [True, False])
def test_it_undoes_the_block_alone(nonatomic: NonAtomicBench, repeats: bool) -> None:
    conflicts: Iterator[str] = iter([CONFLICT])

    def finish(delivery: Delivery) -> None:
        with delivery.finish(), connection.cursor() as cursor:
            effect(delivery)
            for conflict in conflicts:
                cursor.execute(conflict)

    @on()
    def h(delivery: Delivery) -> None:
        try:
            finish(delivery)
        except OperationalError:
            if not repeats:
                raise
            finish(delivery)

    message = add(handler="h")
    assert nonatomic.go() == [True]
    assert effects() == waiting() ^ {message.pk}
    assert attempts_of(message) == ([] if repeats else ["django.db.utils.OperationalError"])
