"""The findings of the doctor: each id is provoked on a real server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections

Alias = Callable[..., str]


@pytest.fixture
def alias() -> Iterator[Alias]:
    """Make another alias of the test database, with some parameters changed."""
    made = []

    def make(name: str, **changed: Any) -> str:
        made.append(name)
        connections.databases[name] = {
            **copy.deepcopy(connection.settings_dict),
            **changed,
        }
        return name

    yield make
    for name in made:
        connections[name].close()
        del connections.databases[name]
        del connections[name]
