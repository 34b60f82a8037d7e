"""The app: at start it registers the checks and collects the handlers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.utils.module_loading import autodiscover_modules, import_string


class DjangoMQConfig(AppConfig):
    """The app; `ready()` imports `handlers.py` of every installed app."""

    name = "django_mq"
    verbose_name = "Message queue"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks; import `handlers.py` and the tasks of every app, or raise."""
        from django_mq import checks  # noqa: F401  (importing it registers the checks)

        autodiscover_modules("handlers")
        for backend in _task_backends():
            backend.load_tasks()


def _task_backends() -> set[Any]:
    """Return the classes in TASKS that store tasks as messages.

    They are found through TASKS, without importing the backend here, since it is optional. Backends
    of other packages are left alone, and Django reports a backend that cannot be imported.
    """
    paths = [params.get("BACKEND", "") for params in getattr(settings, "TASKS", {}).values()]
    found = set()
    for path in paths:
        if not path.startswith(("django.", "django_tasks.")):
            with suppress(ImportError):
                found.add(import_string(path))
    return {each for each in found if hasattr(each, "load_tasks")}
