"""The test project, with handlers that follow their message, and one test's own settings."""

import json
import os

from testproject.settings import *  # noqa: F403

# Nothing that is slow to import: dozens of workers are started.
INSTALLED_APPS = ["django_mq", "tests.acceptance.app"]
ROOT_URLCONF = None
MIDDLEWARE = []
TEMPLATES = []

# Each test adds the settings that it needs to DJANGO_MQ and to the default database.
DJANGO_MQ = json.loads(os.environ.get("ACCEPTANCE_MQ", "{}"))
DATABASES["default"].update(json.loads(os.environ.get("ACCEPTANCE_DATABASE", "{}")))  # noqa: F405
for alias, changes in json.loads(os.environ.get("ACCEPTANCE_ALIASES", "{}")).items():
    DATABASES[alias] = {**DATABASES["default"], **changes}  # noqa: F405
