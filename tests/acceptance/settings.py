"""The test project, with handlers that do as their message says, and what one test wants set."""

import json
import os

from testproject.settings import *  # noqa: F403

# Nothing that takes time to import: dozens of workers are started.
INSTALLED_APPS = ["django_mq", "tests.acceptance.app"]
ROOT_URLCONF = None
MIDDLEWARE = []
TEMPLATES = []

# Each test adds the settings that it needs to DJANGO_MQ and to the default database.
DJANGO_MQ = json.loads(os.environ.get("ACCEPTANCE_MQ", "{}"))
DATABASES["default"].update(json.loads(os.environ.get("ACCEPTANCE_DATABASE", "{}")))  # noqa: F405
for alias, changes in json.loads(os.environ.get("ACCEPTANCE_ALIASES", "{}")).items():
    DATABASES[alias] = {**DATABASES["default"], **changes}  # noqa: F405
