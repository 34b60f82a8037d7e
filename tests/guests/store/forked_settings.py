"""The shop with a forked order app: the test runner puts `forked` on the path."""

from tests.guests.store import settings as shared
from tests.guests.store.settings import *  # noqa: F403

INSTALLED_APPS = [
    "forked.order.apps.OrderConfig" if each == "oscar.apps.order.apps.OrderConfig" else each
    for each in shared.INSTALLED_APPS
]
