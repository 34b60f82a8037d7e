"""A project with tasks, and little else."""

import json
import os

from testproject.settings import *  # noqa: F403

INSTALLED_APPS = ["django_mq", "tests.contrib.tasks.app"]
ROOT_URLCONF = None
MIDDLEWARE = []
TEMPLATES = []
TASKS = {
    "default": {
        "BACKEND": "django_mq.contrib.tasks.MessageQueueBackend",
        "OPTIONS": {
            "modules": ["tests.contrib.tasks.app.more"],
            **json.loads(os.environ.get("TASK_OPTIONS", "{}")),
        },
    }
}
