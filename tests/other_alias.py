"""A second alias of the test database; a module that imports the fixture has it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from django.db import connections


@pytest.fixture(scope="module", autouse=True)
def _other_alias(django_db_setup: None) -> Iterator[None]:
    """The project has a second alias, `other`, of the same database."""
    connections.settings["other"] = copy.deepcopy(connections["default"].settings_dict)
    yield
    connections["other"].close()
    del connections.settings["other"]
    del connections["other"]
