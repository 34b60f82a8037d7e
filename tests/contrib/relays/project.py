"""The test project with one relay, and the settings of a test."""

import json
import os

from testproject.settings import *  # noqa: F403

INSTALLED_APPS = ["django_mq", "tests.contrib.relays.app"]
ROOT_URLCONF = None
MIDDLEWARE = []
TEMPLATES = []
DJANGO_MQ = json.loads(os.environ["RELAYS_MQ"])
