"""A site with the debug toolbar, which inspects each request."""

from tests.guests import settings as shared
from tests.guests.settings import *  # noqa: F403

INSTALLED_APPS = [*shared.INSTALLED_APPS, "debug_toolbar", "tests.guests.toolbar"]
MIDDLEWARE = ["debug_toolbar.middleware.DebugToolbarMiddleware", *shared.MIDDLEWARE]
ROOT_URLCONF = "tests.guests.toolbar.urls"
DEBUG_TOOLBAR_CONFIG = {
    "IS_RUNNING_TESTS": False,
    "SHOW_TOOLBAR_CALLBACK": "tests.guests.toolbar.urls.always",
}
