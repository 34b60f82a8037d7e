"""A small Wagtail site, with the parts of the `wagtail start` settings that it needs."""

import tempfile

from tests.guests import settings as shared
from tests.guests.settings import *  # noqa: F403

INSTALLED_APPS = [
    "tests.guests.cms.apps.CmsConfig",
    "wagtail.contrib.frontend_cache",
    "wagtail.contrib.redirects",
    "wagtail.embeds",
    "wagtail.sites",
    "wagtail.users",
    "wagtail.snippets",
    "wagtail.documents",
    "wagtail.images",
    "wagtail.search",
    "wagtail.admin",
    "wagtail",
    "modelcluster",
    "taggit",
    "django_filters",
    "django.contrib.postgres",
    *shared.INSTALLED_APPS,
]
ROOT_URLCONF = "tests.guests.cms.urls"
MEDIA_ROOT = tempfile.mkdtemp(prefix="guests-media-")
MEDIA_URL = "/media/"
WAGTAIL_SITE_NAME = "guests"
WAGTAILADMIN_BASE_URL = "http://testserver"
WAGTAILSEARCH_BACKENDS = {"default": {"BACKEND": "wagtail.search.backends.database"}}
WAGTAILFRONTENDCACHE = {"cache": {"BACKEND": "tests.guests.cms.cache.NotedCache"}}
