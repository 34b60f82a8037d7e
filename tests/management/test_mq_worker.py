"""`mq_worker` where it cannot work; its processes are tested in `acceptance`."""

from __future__ import annotations

import pytest
from django.core.management import CommandError
from django.db import connection

from tests.management.conftest import run


@pytest.mark.django_db
@pytest.mark.parametrize("arguments", [(), ("--until-empty",), ("--reload",)])
def test_it_refuses_to_start_inside_a_transaction(arguments: tuple[str, ...]) -> None:
    """As Worker().run() does. Its processes would be refused again and again, for ever."""
    with pytest.raises(CommandError, match=r"in a TestCase use django_mq\.testing\.drain\(\)"):
        run("mq_worker", *arguments)
    assert connection.in_atomic_block
    assert connection.is_usable()  # the test goes on with its transaction
