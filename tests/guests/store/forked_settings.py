"""The shop with its order app forked: `forked` is on the path of whoever runs this."""

from tests.guests.store import settings as shared
from tests.guests.store.settings import *  # noqa: F403

INSTALLED_APPS = [
    "forked.order.apps.OrderConfig" if each == "oscar.apps.order.apps.OrderConfig" else each
    for each in shared.INSTALLED_APPS
]
