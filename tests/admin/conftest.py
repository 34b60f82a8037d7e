"""Users with exactly the given rights, and their logged-in clients."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from tests.queues.conftest import lock, no_handlers, other  # noqa: F401  (fixtures of this directory too)

VIEW = (
    "view_queuedmessage",
    "view_failedattempt",
    "view_handledmessage",
    "view_operation",
    "view_queuestate",
    "view_result",
    "view_schedule",
    "view_uniquekey",
    "view_workerheartbeat",
)


@pytest.fixture(autouse=True)
def _plain_static_files(settings):
    settings.STORAGES = {
        **settings.STORAGES,
        "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    }


@pytest.fixture
def login(db):
    """Log in a member of staff with these rights of django_mq; `boss=True` has all."""

    def login(*rights, boss=False, name="ada"):
        user = User.objects.create(username=name, is_staff=True, is_superuser=boss)
        found = Permission.objects.filter(content_type__app_label="django_mq", codename__in=rights)
        assert len(found) == len(set(rights))
        user.user_permissions.set(found)
        client = Client()
        client.force_login(user)
        client.user = user
        return client

    return login


@pytest.fixture
def boss(login):
    return login(boss=True)


@pytest.fixture
def viewer(login):
    """A user who may view everything but payloads."""
    return login(*VIEW, name="viewer")
