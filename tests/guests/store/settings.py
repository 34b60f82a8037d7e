"""A django-oscar shop, with the settings of its manual."""

from typing import Any

from oscar import INSTALLED_APPS as OSCAR_APPS
from oscar.defaults import *  # noqa: F403

from tests.guests.settings import *  # noqa: F403

INSTALLED_APPS: list[Any] = [
    *OSCAR_APPS,
    "django_mq",
    "tests.guests.store.apps.StoreConfig",
]
SITE_ID = 1
MIDDLEWARE = [
    *MIDDLEWARE,  # noqa: F405
    "oscar.apps.basket.middleware.BasketMiddleware",
    "django.contrib.flatpages.middleware.FlatpageFallbackMiddleware",
]
ROOT_URLCONF = "tests.guests.store.urls"
HAYSTACK_CONNECTIONS = {"default": {"ENGINE": "haystack.backends.simple_backend.SimpleEngine"}}
